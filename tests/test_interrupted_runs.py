"""Runs and writers that are killed or interrupted: files stay complete, and a run resumes bit for bit."""

import os
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from typing import ClassVar, final

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer._core.files import exclusive_lock
from bnet_transformer.cli import main
from bnet_transformer.learning import loop
from bnet_transformer.tpm import TPM, Categorical, Given, Linear, Normal

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
WORDS = ["the", "cat", "sat", "on", "mat", "dog"]
TEXTS = ["the cat sat on the mat", "the mat sat", "on the cat", "the dog sat on the cat"]


def run_in_fork(job, *arguments):
    """Run a job in a forked process; return its exit status, or minus the signal that ended it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks with threads: the child uses none
        child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            signal.alarm(300)
            job(*arguments)
            os._exit(0)
        except SystemExit as end:
            os._exit(end.code)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_call(function, count, signum):
    """Wrap a function: its `count`-th call sends a signal to its own process."""
    calls = []

    def call_and_count(*arguments):
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signum)
        return function(*arguments)

    return call_and_count


def make_mixture():
    return bt.bayesuvius(3, heads=2, key_dim=2, seed=1, observe=Normal(0.5)).to(torch.float64)


def draw_vectors():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(12, 3, 3, generator=generator, dtype=torch.float64) for _ in range(2))


def run_training(checkpoints):
    net = bt.decoder(8, heads=2, slices=1, vocabulary=WORDS, dropout=0.1, seed=3)
    options = {"held_out": TEXTS[:2], "every": 1, "progress": False, "optimizer": bt.AdamW(rate=0.01)}
    result = bt.train(net, TEXTS, steps=8, batch=2, checkpoints=checkpoints, **options)
    return result.losses, result.held_out, dict(result.net.parameters)


def make_fit(method, **options):
    def run(checkpoints):
        result = bt.fit(
            make_mixture(), draw_vectors(), method=method, every=1, checkpoints=checkpoints, progress=False, **options
        )
        fields = result.bounds, result.measured, result.notes, result.log_marginal_likelihood
        return *fields, dict(result.samples), dict(result.statistics), dict(result.net.parameters)

    return run


RUNS = {
    "train": run_training,
    "map": make_fit(bt.MAP(steps=8, restarts=2), batch=5),
    "em": make_fit(bt.EM(steps=8, inner=2)),
    "svi": make_fit(bt.SVI(steps=8, draws=3), spread=1.0),
}
# Fits of several parts, most with their own checkpoints, and the number of the checkpoint at which a run is killed.
PARTS = {
    "nuts": (make_fit(bt.NUTS(chains=1, warmup=2, draws=2), spread=1.0, learn=["c.logits"]), 5),
    "nuts of weights": (make_fit(bt.NUTS(chains=3, warmup=25, draws=4), spread=1.0, learn=["W_v_0.values"]), 3),
    "em by second-order steps": (make_fit(bt.EM(steps=40, restarts=4, optimizer="second-order"), spread=1.0), 5),
    "laplace": (make_fit(bt.Laplace(draws=5, restarts=2), spread=1.0), 3),
}


def are_equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return one == other


@pytest.mark.filterwarnings("ignore::UserWarning")  # about chains that are too short
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (k > 0)) for k, kind in enumerate(RUNS)]
)
def test_a_killed_run_resumes_bit_for_bit(kind, tmp_path):
    """It is killed while it writes its third checkpoint, or just before."""

    def run_killed(folder, in_write):
        if in_write:
            os.fsync = kill_at_call(os.fsync, 3, signal.SIGKILL)
        else:
            loop.write_checkpoint = kill_at_call(loop.write_checkpoint, 3, signal.SIGKILL)
        RUNS[kind](folder)

    expected = RUNS[kind](None)
    for in_write in (True, False):
        folder = tmp_path / str(in_write)
        assert run_in_fork(run_killed, folder, in_write) == -signal.SIGKILL
        assert (len([*folder.glob(".*.tmp")]) == 1) is in_write
        assert are_equal(RUNS[kind](bt.Checkpoints(folder, resume=True)), expected), f"inside a write: {in_write}"
        assert {path.name for path in folder.iterdir() if path.is_file()} == {
            "checkpoint.safetensors",
            "checkpoint.safetensors.lock",
        }
        assert not [*folder.glob(".*.tmp")]


@pytest.mark.filterwarnings("ignore::UserWarning")  # about chains that are too short
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "nuts")) for kind in PARTS])
def test_a_fit_of_several_parts_that_is_killed_at_any_checkpoint_resumes_bit_for_bit(kind, tmp_path, monkeypatch):
    """Each run is killed while it writes a checkpoint, until one ends. No checkpoint is written by two runs."""
    (run, number), folder = PARTS[kind], tmp_path / "run"
    resumed, written, kills = bt.Checkpoints(folder, resume=True), [], 0
    write = loop.write_checkpoint

    def write_and_count(path, network, state):
        written.append((path, state.step))
        write(path, network, state)

    monkeypatch.setattr(loop, "write_checkpoint", write_and_count)
    expected = run(tmp_path / "complete")

    def run_killed():
        os.fsync = kill_at_call(os.fsync, number, signal.SIGKILL)
        run(resumed)

    while (status := run_in_fork(run_killed)) == -signal.SIGKILL:
        kills += 1
    assert status == 0 and kills == (len(written) - 1) // (number - 1)
    assert are_equal(run(resumed), expected)
    assert not [*folder.glob("**/.*.tmp")]
    with pytest.raises(bt.FileError, match="already exists"):
        run(folder)


class Amount:
    """A plain object: its repr has its address."""

    def __init__(self, value):
        self.value = value


@final
@dataclass(frozen=True)
class Scaled(TPM):
    """A TPM from outside the package: `amount x`."""

    amount: Amount
    slots: ClassVar[tuple[str, ...]] = ("x",)

    def shape(self, *parents):
        return parents[0].shape

    def value(self, context, *parents):
        return self.amount.value * parents[0]


def make_scaled(amount):
    nodes = [bt.Node("h", Scaled(amount), ["x"], ["word"]), bt.Node("x", Linear(2), ["h"], ["word"])]
    ends = [bt.Node("x", Given(2), plates=["word"])], [bt.Node("y", Normal(0.5), ["x"], ["word"])]
    return bt.BNet(bt.Declaration([bt.Stack(nodes, *ends)], name="scaled"))


def test_a_run_of_a_net_that_holds_a_plain_object_resumes(tmp_path):
    data, resumed = (torch.ones(4, 3, 2), torch.zeros(4, 3, 2)), bt.Checkpoints(tmp_path, resume=True)
    full, unhashable = bt.train(make_scaled(Amount(2.0)), data, steps=4, progress=False), Amount(2.0)
    unhashable.lock = threading.Lock()
    bt.train(make_scaled(Amount(2.0)), data, steps=2, checkpoints=tmp_path, progress=False)
    with pytest.raises(bt.FileError, match="another declaration"):
        bt.train(make_scaled(Amount(3.0)), data, steps=4, checkpoints=resumed, progress=False)
    assert bt.train(make_scaled(Amount(2.0)), data, steps=4, checkpoints=resumed, progress=False).losses == full.losses
    with pytest.raises(
        bt.BNetError, match=r"declaration: expected a declaration that can be hashed, .*got an object of type lock"
    ):
        bt.train(make_scaled(unhashable), data, steps=2, checkpoints=tmp_path / "odd", progress=False)


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    net = bt.bayesuvius(6, heads=2, vocabulary=WORDS, observe=Categorical(2))
    s = net.sentence(TEXTS[0])
    writers = {"a.safetensors": net.save, "a.svg": s.draw, "a.html": s.draw, "a.json": s.draw}

    def write_killed(write, path):
        os.fsync = kill_at_call(os.fsync, 1, signal.SIGKILL)
        write(path)

    for name, write in writers.items():
        path = tmp_path / name
        path.write_bytes(b"old")
        assert run_in_fork(write_killed, write, path) == -signal.SIGKILL, name
        assert path.read_bytes() == b"old", name
        with exclusive_lock(path):  # as the next run does
            pass
        assert not [*tmp_path.glob(".*")], name
        write(path)
        assert path.read_bytes() != b"old", name


def test_an_interrupted_command_saves_and_resumes(tmp_path):
    args = ["train", *TEXTS, "--dim", "8", "--dropout", "0.1", "--every", "1", "--steps", "6"]
    args += ["--checkpoint", "run", "-o", "a.json", "-o", "a.safetensors"]

    def run_command(folder, *options, interrupted=False):
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdout = sys.stderr = open("output", "w")  # noqa: SIM115
        if interrupted:
            loop.write_checkpoint = kill_at_call(loop.write_checkpoint, 2, signal.SIGINT)
        try:
            main([*args, *options])
        finally:
            sys.stdout.flush()

    complete, folder = tmp_path / "whole", tmp_path / "interrupted"
    for path in (complete, folder):
        path.mkdir()
    assert run_in_fork(run_command, complete) == 0, (complete / "output").read_text()
    assert run_in_fork(lambda: run_command(folder, interrupted=True)) == 130
    text = (folder / "output").read_text()
    assert text.splitlines()[-1].startswith("interrupted") and "Traceback" not in text
    assert run_in_fork(run_command, folder, "--resume") == 0, (folder / "output").read_text()
    for name in ("a.json", "a.safetensors"):
        assert (folder / name).read_bytes() == (complete / name).read_bytes()


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path):
    folder, link = tmp_path / "run", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder, target_is_directory=True)
    path = folder / loop.FILE_NAME
    with exclusive_lock(path), exclusive_lock(folder / "another"):
        for alias in (folder, link):
            with pytest.raises(bt.FileError, match="another run writes to"):
                run_training(bt.Checkpoints(alias, resume=True))
        assert run_in_fork(run_training, folder) == 1
    with pytest.raises(ZeroDivisionError), exclusive_lock(path):
        raise ZeroDivisionError

    def run_killed():
        with exclusive_lock(path):
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_in_fork(run_killed) == -signal.SIGKILL
    stale, unrelated = (folder / f".{name}.abcd1234.tmp" for name in (path.name, "another"))
    for tmp in (stale, unrelated):  # the files that killed writers leave
        tmp.mkdir()
        (tmp / "whole").touch()
    with exclusive_lock(path):
        assert not stale.exists() and unrelated.exists()
    (tmp_path / "file").touch()
    with pytest.raises(bt.FileError, match="a writable folder"), exclusive_lock(tmp_path / "file" / "a"):
        raise AssertionError
