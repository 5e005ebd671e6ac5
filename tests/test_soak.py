"""The short form of the soak tests: each probe a few times."""

import importlib
import importlib.util
import os
import re
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, final

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import errors
from bnet_transformer.files import alone, replacing, write_tensors
from bnet_transformer.inference.sweeps.cell_spec import PATH_BYTES
from bnet_transformer.tpm import TPM, Given, Linear, Normal
from tests.soak import __main__ as soak
from tests.soak import disk, files, jobs, kill, memory, pages, together
from tests.soak.probing import Found, Setup, Tally, answer, child, folder

ONCE = Setup(1, 0)


def holds(found: Found) -> None:
    if found.left_out:
        pytest.skip(found.seen)
    assert found.tries and not found.failures, "\n".join(found.failures)


@pytest.mark.parametrize("kind", ["train", "map"])
def test_a_killed_run_goes_on_as_if_it_had_never_been(kind):
    holds(kill.probe_run(kind, Setup(1, 7)))


@pytest.mark.parametrize("what", ["save of a net", "draw (svg)"])
def test_a_killed_writer_leaves_the_old_file_or_the_new_one(what):
    holds(kill.probe_write(what, Setup(2, 7)))


def test_an_interrupted_command_ends_in_good_order():
    holds(kill.probe_signal("train", "SIGINT", Setup(1, 7)))


def test_a_writer_that_is_killed_leaves_no_name_but_ours(monkeypatch, tmp_path):
    there = []
    monkeypatch.setattr(os, "fsync", lambda _: there.append([*os.walk(tmp_path)]))
    path = tmp_path / "a.safetensors"
    jobs.decoder().save(path)
    (_, (own,), files), (_, _, written) = there[0]
    assert re.fullmatch(r"\.a\.safetensors\.[0-9a-f]{16}\.tmp", own) and not files and written == ["whole"]
    assert len(there) == 2  # of the file, and of the folder that names it


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mounted", [True, False])
def test_full_disks_and_read_only_ones_are_one_error(monkeypatch, mounted):
    writers = disk.writers
    few = ["save a.safetensors", "save a.fit", "draw a.svg", "plot a.svg", "train checkpoint"]
    monkeypatch.setattr(disk, "writers", lambda kept: {what: writers(kept)[what] for what in few})
    holds(disk.probe_full(mounted, ONCE))
    few.remove("train checkpoint")
    holds(disk.probe_read_only(mounted, ONCE))


def test_pictures_that_graphviz_has_no_room_for_are_file_errors(tmp_path):
    resource = pytest.importorskip("resource")  # not on Windows
    s, before = jobs.told_net().sentence(jobs.SAID[0]), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        for kind in ("png", "pdf"):
            with pytest.raises(bt.FileError):
                s.draw(tmp_path / f"a.{kind}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["fit", "checkpoint", "HDF5 of a stranger"])
def test_damaged_files_are_read_as_they_were_or_refused(name):
    if name.startswith("HDF5") and not importlib.util.find_spec("h5py"):
        pytest.skip("reads HDF5: pip install bnet-transformer[hdf5]")
    holds(files.probe_damage(name, Setup(1, 3)))


def test_other_versions_are_told():
    holds(files.probe_versions(ONCE))


QUICK = ("Categorical(10**9)", "attention of 30,000 words", "posterior(budget=10**18)", "fit(restarts=10**9)")


def test_too_little_memory_is_told(monkeypatch):
    monkeypatch.setattr(memory, "ASKED", {what: memory.ASKED[what] for what in QUICK})
    monkeypatch.setattr(memory, "ENOUGH", {what: memory.ENOUGH[what] for what in [*memory.ENOUGH][::4]})
    for probe, setup in memory.plan(ONCE):
        holds(probe(setup))


def test_memory_is_counted_before_it_is_taken():
    there = errors.memory()
    assert there is None or there > 2**27
    errors.room_for("draws", 1, "fewer draws=")
    with pytest.raises(
        bt.BudgetError, match=r"draws: expected at most [\d,]+ bytes, .*; got 1,0+.* allowed: fewer draws="
    ):
        errors.room_for("draws", 10**30, "fewer draws=")
    with pytest.raises(RuntimeError, match="another"), errors.within_memory("a call"):
        raise RuntimeError("another")
    for raised in (
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ):
        with pytest.raises(bt.BudgetError, match="a call: expected memory"), errors.within_memory("a call"):
            raise raised


def test_a_kill_of_a_short_command_falls_inside_its_write():
    found = kill.probe_command("train of its own file", Setup(1, 7))
    holds(found)
    assert found.seen.endswith("1 inside a write")


def test_a_probe_that_breaks_leaves_no_child_and_no_folder():
    with pytest.raises(ZeroDivisionError), folder() as place:
        made = child(jobs.writing, place / "a.svg", "a.svg", place / "ready")
        raise ZeroDivisionError
    assert not made.is_alive() and not place.exists()


class Amount:
    """A plain object: its repr tells where it lies."""

    def __init__(self, value):
        self.value = value


@final
@dataclass(frozen=True)
class Scaled(TPM):
    """A stranger's TPM: `amount x`."""

    amount: Amount
    slots: ClassVar[tuple[str, ...]] = ("x",)

    def shape(self, *parents):
        return parents[0].shape

    def value(self, at, *parents):
        return self.amount.value * parents[0]


def scaled(value):
    nodes = [
        bt.Node("h", Scaled(Amount(value)), ["x"], plates=["word"]),
        bt.Node("x", Linear(2), ["h"], plates=["word"]),
    ]
    said, told = bt.Node("x", Given(2), plates=["word"]), bt.Node("y", Normal(0.5), ["x"], plates=["word"])
    return bt.BNet(bt.Declaration([bt.Stack(nodes, [said], [told])], name="scaled"))


def test_a_run_of_a_net_that_holds_a_plain_object_goes_on(tmp_path):
    data = torch.ones(4, 3, 2), torch.zeros(4, 3, 2)
    whole = bt.train(scaled(2.0), data, steps=4, progress=False)
    bt.train(scaled(2.0), data, steps=2, checkpoints=tmp_path, progress=False)
    with pytest.raises(bt.FileError, match="another declaration"):
        bt.train(scaled(3.0), data, steps=4, checkpoints=bt.Checkpoints(tmp_path, resume=True), progress=False)
    assert (
        bt.train(scaled(2.0), data, steps=4, checkpoints=bt.Checkpoints(tmp_path, resume=True), progress=False).losses
        == whole.losses
    )
    odd = scaled(2.0)
    odd.declaration.stacks[0].slice[0].tpm.amount.lock = threading.Lock()
    with pytest.raises(bt.BNetError, match="declaration: expected one that a checkpoint can tell from others; got one"):
        bt.train(odd, data, steps=2, checkpoints=tmp_path / "odd", progress=False)


def test_two_runs_do_not_share_a_folder():
    holds(together.probe_folder("train", ONCE))
    holds(together.probe_lock(ONCE))


def test_a_reader_beside_writers_reads_whole_files():
    holds(together.probe_reader(".safetensors", ONCE))


def test_a_file_that_is_replaced_while_it_is_opened_is_read_whole(monkeypatch, tmp_path):
    path, mapped = tmp_path / "a.safetensors", torch.UntypedStorage.from_file
    one, other = jobs.nets()
    one.save(path)

    def replaced(*told, **options):  # as safetensors maps a file that it has opened before
        other.save(path)
        return mapped(*told, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replaced)
    assert jobs.digest(dict(bt.load(path).parameters)) == jobs.digest(dict(one.parameters))


def test_weights_that_are_replaced_while_they_are_mapped_are_told(monkeypatch, tmp_path):
    files._folder_of_bert(tmp_path)
    path, mapped = tmp_path / "model.safetensors", torch.UntypedStorage.from_file

    def replaced(*told, **options):  # another file of the same size
        with replacing(path) as temporary:
            temporary.write_bytes(path.read_bytes())
        return mapped(*told, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replaced)
    with pytest.raises(bt.FileError, match="a file that nobody writes while it is opened"):
        bt.from_pretrained(tmp_path)


def test_a_file_that_is_cut_short_while_it_is_read_ends_no_process(tmp_path):
    jobs.nets()[0].save(tmp_path / "a.safetensors")
    assert answer(jobs.cut_short, tmp_path / "a.safetensors") == "FileError"


def test_a_lock_is_of_a_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "a"
    with alone(path), alone(tmp_path / "b"):
        assert (tmp_path / "a.lock").read_text().isdigit()
        for _ in range(2):
            with pytest.raises(bt.FileError, match=r"no other run writes to; got one that process \d+"), alone(path):
                raise AssertionError
    with pytest.raises(ZeroDivisionError), alone(path):
        raise ZeroDivisionError
    (tmp_path / "a.lock").write_text("12345")  # as a killed run leaves it
    mine, other = (tmp_path / f".{name}.0123456789abcdef.tmp" for name in "ab")
    for stray in (mine, other):
        stray.mkdir()
        (stray / "whole").touch()
    with alone(path):
        assert not mine.exists()
    assert list(tmp_path.iterdir()) == [other]
    with pytest.raises(bt.FileError, match="a folder that can be written"), alone(tmp_path / "none" / "a"):
        raise AssertionError


def test_a_lock_is_of_the_folder_whatever_its_name_and_is_taken_anew_where_it_went(tmp_path):
    folder, link = tmp_path / "run", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder, target_is_directory=True)
    path, other = folder / "a", link / "a"

    def write():
        write_tensors(path, {"format": "any", "version": 1}, {"x": torch.zeros(2)})

    with alone(path):
        with pytest.raises(bt.FileError, match="no other run writes to"), alone(other):
            raise AssertionError
        (folder / "a.lock").unlink()  # somebody tidied up
        write()
        with pytest.raises(bt.FileError, match="no other run writes to"), alone(other):
            raise AssertionError
        folder.rename(tmp_path / "moved")
        with pytest.raises(bt.FileError, match="a folder that can be written"):
            write()
        folder.mkdir()
        with alone(other):  # another run begins
            with pytest.raises(bt.FileError, match="no other run writes to"):
                write()
            assert not path.exists()
        with alone(other):
            pass
    assert not [*folder.iterdir()]


def test_long_and_strange_names_have_temporary_files(tmp_path):
    for name in ("x" * 255, "é" * 127, ".hidden", "[a]*?.svg", "a\nb"):
        with replacing(tmp_path / name) as temporary:
            temporary.write_text(name)
        with alone(tmp_path / name[:200].encode()[:200].decode(errors="ignore")):
            pass
        assert (tmp_path / name).read_text() == name
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize(
    "probe",
    [*(pytest.param(probe, marks=pytest.mark.slow) for probe in pages.PROBES[:3]), pages.PROBES[3]],
    ids=lambda probe: probe.__name__,
)
def test_a_page_that_is_open_twice_is_two_pages(probe):
    holds(pages.told(probe, ONCE))


def test_a_probe_that_breaks_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(files, "plan", lambda setup: [(partial(files.probe_damage, "nothing"), setup)])
    (found,) = soak.results("files", ONCE)
    assert found.failures == ("KeyError: 'nothing'",) and "probe_damage nothing" in capsys.readouterr().out


def test_the_page_tells_failures_and_how_to_repeat_them():
    tally = Tally("a | b", "always")
    tally.add(True, "not told")
    tally.add(False, "seed 12, byte 3: <wrong>")
    found = [tally.found("two\nlines"), Found("c", "d", 0, left_out=True)]
    before = soak.page({"kill": "## kill\n\nas it was", "files": "## files\n\nof another run"}, "")
    text = soak.page({"files": soak.section("files", found, Setup(2, 11), 1.0)}, before)
    assert "## kill\n\nas it was\n\n## files" in text and "of another run" not in text
    assert text.count("# Soak and fault tests") == 1
    assert "| a \\| b | always | 2 | 1 | two lines |" in text and "| c | d | 0 | left out |  |" in text
    assert "- seed 12, byte 3: &lt;wrong>: `python -m tests.soak --only files --times 1 --seed 12`" in text
    assert "2 tries, 1 failed" in text
    for room in soak.ROOMS[:6]:
        assert importlib.import_module(f"tests.soak.{room}").plan(ONCE) is not None


def test_what_is_too_large_is_refused_before_it_is_made(tmp_path):
    net = bt.decoder(4, heads=2, slices=1, vocabulary=["a", "b"])
    s = net.sentence(["a", "b"] * 4_000)
    for ask, told in (
        (s.graph, "networkx graph: expected at most 100000 arrows"),
        (s.tan, "shrinking: expected at most 10000000 arrows"),
        (lambda: s.draw(tmp_path / "a.svg", detail="nodes"), "figure of the nodes: expected at most 2000 arrows"),
        (lambda: s.draw(tmp_path / "a.svg", words=range(7_000)), "reading grid: expected at most 10000000 pairs"),
        (lambda: bt.volume_preserving(3).iterate([[0.0] * 3], 10**15), "steps: expected at most"),
    ):
        with pytest.raises(bt.BudgetError, match=told):
            ask()
    assert not any(tmp_path.iterdir())


def test_the_memory_of_a_sweep_is_counted_by_its_paths(monkeypatch):
    net = bt.decoder(4, heads=2, slices=1, vocabulary=["a", "b"])
    clean, corrupt = (net.sentence(words * 10) for words in (["a", "b"], ["b", "a"]))
    asked = {"v -> a": 2 * 210, "x -> v -> a": 2 * 210, "x -> q -> a -> mix": 2 * 20}
    for at, count in asked.items():
        swept = partial(bt.sweep, clean, corrupt, at=at, metric={"y_19": ("a", "b")}, progress=False)
        assert len(swept().names) == count
        monkeypatch.setattr(errors, "memory", lambda count=count: PATH_BYTES * count - 1)
        with pytest.raises(bt.BudgetError, match=f"at '{at}': expected at most .*got {PATH_BYTES * count:,} bytes"):
            swept()
        monkeypatch.undo()


def test_what_iterate_keeps_is_counted_before_and_a_rollout_can_be_interrupted(monkeypatch):
    net, module = bt.volume_preserving(3), None
    for steps in (1, 2, 5):
        assert net.iterate([[0.1] * 3] * 2, steps).shape == (steps, 3)
    done = []

    def interrupted(*told, **options):
        done.append(1)
        if len(done) == 3:
            raise KeyboardInterrupt
        return forward(*told, **options)

    module = net.module().eval()
    forward = module.forward
    monkeypatch.setattr(module, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        net.iterate([[0.1] * 3], 10**8, module=module)
    assert len(done) == 3


def test_memory_is_of_the_machine_its_container_and_its_swap(monkeypatch, tmp_path):
    version_1 = tmp_path / "memory.limit_in_bytes"
    version_1.write_text(f"{2**20}\n")
    monkeypatch.setattr(errors, "CGROUPS", (str(tmp_path / "memory.max"), str(version_1)))
    monkeypatch.setattr(errors, "_swap", lambda: 2**10)
    assert errors.memory() == 2**20 + 2**10
    version_1.write_text("max\n")
    monkeypatch.setattr(errors.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 2**12}.get(name, -1), raising=False)
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert errors.memory() is None
    errors.room_for("draws", 10**30, "fewer draws=")


@pytest.mark.skipif(sys.platform != "linux", reason="the system bounds no file")
def test_a_lock_on_a_disk_without_room_is_a_lock_and_is_let_go(tmp_path):
    """It then does not say whose it is."""
    import resource

    path, before = tmp_path / "a", resource.getrlimit(resource.RLIMIT_FSIZE)
    held = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with alone(path), pytest.raises(bt.FileError, match="one that another run writes to"), alone(path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(list(Path("/proc/self/fd").iterdir())) == held
