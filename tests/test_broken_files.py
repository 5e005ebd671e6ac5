"""Truncated, changed and replaced files, full disks and missing memory: one clear error each."""

import os
import pickle
import random
import struct
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

import bnet_transformer as bt
from bnet_transformer._core import files as tensors, process
from bnet_transformer.declare import io as store
from bnet_transformer.interventions.cells import PATH_BYTES
from bnet_transformer.learning import training
from bnet_transformer.tpm import Categorical
from tests.file_helpers import rewrite
from tests.test_interrupted_runs import WORDS, are_equal as same, draw_vectors as vectors, make_mixture as mixture


def make_decoder():
    return bt.decoder(8, heads=2, slices=1, vocabulary=WORDS, dropout=0.1)


def run_fit():
    return bt.fit(mixture(), vectors(), method=bt.MAP(steps=2), progress=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a file of each kind, and its reader."""
    folder = tmp_path_factory.mktemp("saved")
    bt.bayesuvius(4, heads=2, vocabulary=WORDS, observe=Categorical(2, labels=("no", "yes"))).save(folder / "net")
    run_fit().save(folder / "fit")
    bt.train(make_decoder(), ["the cat sat"], steps=2, checkpoints=folder, progress=False)

    def checkpoint(path):
        result = training.load_checkpoint(make_decoder(), path)
        return result.losses, result.steps, dict(result.net.parameters)

    def net(path):
        result = bt.load(path)
        return result.declaration, dict(result.parameters)

    def fit(path):
        result = bt.load(path)
        return result.bounds, result.measured, result.net.declaration, dict(result.net.parameters)

    return {"net": (folder / "net", net), "fit": (folder / "fit", fit),
            "checkpoint": (folder / "checkpoint.safetensors", checkpoint)}  # fmt: skip


@pytest.mark.parametrize("kind", ["net", "fit", "checkpoint"])
def test_a_damaged_file_is_refused_or_read_as_it_was(kind, saved, tmp_path):
    """The file is truncated at a byte, or has a flipped bit: at the ends, in the header and in the tensors."""
    path, read = saved[kind]
    content, expected, damaged, rng = path.read_bytes(), read(path), tmp_path / "damaged", random.Random(0)
    header = 8 + int.from_bytes(content[:8], "little")
    positions = [0, 1, 7, 8, 9, header, len(content) // 2, len(content) - 9, len(content) - 1]
    positions += [rng.randrange(8, header) for _ in range(10)] + [
        rng.randrange(header, len(content)) for _ in range(10)
    ]
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 1 << rng.randrange(8)
        for changed in (content[:position], bytes(flipped)):
            damaged.write_bytes(changed)
            try:
                result = read(damaged)
            except bt.FileError as error:
                assert "\n" not in str(error) and str(damaged) in str(error)
            else:
                assert same(result, expected), f"byte {position}"


def test_files_without_a_net_are_refused(tmp_path):
    path = tmp_path / "a"
    os.mkfifo(tmp_path / "fifo")
    for name, message in (("fifo", "a special file"), ("", "got a folder"), ("a", "no such file")):
        with pytest.raises(bt.FileError, match=message):
            bt.load(tmp_path / name)
    huge, pickled = struct.pack("<Q", 2**62), pickle.dumps({"a": 1}) * 9
    for content in (b"", b"short", huge, huge + b"{}", pickled, b"PK\x03\x04" * 99, struct.pack("<Q", 4) + b"null"):
        path.write_bytes(content)
        with pytest.raises(bt.FileError, match="a: expected a net"):
            bt.load(path)
    save_file({"w": torch.zeros(2)}, path, {"format": "pt"})
    with pytest.raises(bt.FileError, match="a safetensors file of another format"):
        bt.load(path)


@pytest.mark.parametrize("kind", ["net", "checkpoint"])
def test_a_header_with_values_of_another_type_is_refused(kind, saved, tmp_path):
    """The checksum of the changed file is valid. The header of a fit is tested with those of results."""
    path, read = saved[kind]
    sign = store._compute_sha256 if kind == "net" else tensors._compute_sha256
    for name in {"net": ["seed"], "checkpoint": ["step", "settings", "net"]}[kind]:
        for value in (None, "text", 1.5, True, [1], {"a": 1}):
            if name == "settings" and isinstance(value, dict):
                continue
            other = tmp_path / "other"
            other.write_bytes(path.read_bytes())
            with pytest.raises(bt.FileError, match="other"):
                read(rewrite(other, lambda header, part={name: value}: header.update(part), signed=True, sign=sign))


def test_no_pickle_is_near(saved, monkeypatch):
    """Loading works where pickle cannot load anything."""

    def refuse(*arguments, **options):
        raise AssertionError("pickle")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    for path, read in saved.values():
        read(path)


@pytest.mark.parametrize("kind", ["net", "fit", "checkpoint"])
def test_a_file_of_another_version_names_it(kind, saved, tmp_path):
    path, read = saved[kind]
    other = tmp_path / "other"
    for version in (0, -1, 3, "1", None, 1.5, True):
        other.write_bytes(path.read_bytes())
        with pytest.raises(bt.FileError, match="version"):
            read(rewrite(other, lambda header, version=version: header.update(version=version)))


def test_a_file_that_is_replaced_while_it_is_opened_is_read_whole(monkeypatch, tmp_path):
    path, from_file = tmp_path / "a", torch.UntypedStorage.from_file
    first, second = (bt.bayesuvius(8, heads=2, seed=seed) for seed in (0, 1))
    first.save(path)

    def replace_file(*arguments, **options):  # safetensors maps a file that it opened before
        second.save(path)
        return from_file(*arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replace_file)
    assert same(dict(bt.load(path).parameters), dict(first.parameters))


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(monkeypatch, tmp_path):
    path, open_file = tmp_path / "a", tensors.open_safetensors
    bt.bayesuvius(64, heads=2).save(path)

    def open_shortened(name, *more):
        opened = open_file(name, *more)
        os.truncate(name, 4096)
        return opened

    monkeypatch.setattr(tensors, "open_safetensors", open_shortened)
    with pytest.raises(bt.FileError):
        bt.load(path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the system bounds no file")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_full_disk_is_one_error_and_leaves_the_old_file(tmp_path):
    """A limit on the file size simulates a full disk."""
    import resource

    net = bt.bayesuvius(16, heads=2, vocabulary=WORDS, observe=Categorical(2))
    s, fit, run = net.sentence("the cat sat"), run_fit(), tmp_path / "run"
    writers = {"a.safetensors": net.save, "a.fit": fit.save, "a.html": s.draw}
    writers |= {f"a.{suffix}": s.draw for suffix in ("svg", "pdf", "json")}
    writers["b.svg"] = lambda path: bt.plot(fit).figure.savefig(path)

    def train(path):
        options = {"steps": 4, "checkpoints": bt.Checkpoints(path.parent, resume=True), "progress": False}
        return bt.train(make_decoder(), ["the cat sat"], **options)

    bt.train(make_decoder(), ["the cat sat"], steps=2, checkpoints=run, progress=False)
    writers["run/checkpoint.safetensors"] = train
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, write in writers.items():
        path = tmp_path / name
        old = path.read_bytes() if path.exists() else b"old"
        path.write_bytes(old)
        for left in (0, 1024):
            resource.setrlimit(resource.RLIMIT_FSIZE, (left, limits[1]))
            try:
                with pytest.raises(bt.FileError) as error:
                    write(path)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert "\n" not in str(error.value), name
            assert path.read_bytes() == old and not [*path.parent.glob(".*.tmp")], name
    assert train(run / "checkpoint.safetensors").steps == 4


def test_memory_is_counted_before_allocation():
    process.check_memory("draws", 1, "fewer draws=")
    with pytest.raises(bt.BudgetError, match=r"at most [\d,]+ bytes, .*; got 1,0+.* Use fewer draws="):
        process.check_memory("draws", 10**30, "fewer draws=")
    with pytest.raises(RuntimeError, match="another"), process.translate_memory_errors("a call"):
        raise RuntimeError("another")
    for error in (MemoryError(), RuntimeError("can't allocate memory: you tried to allocate 8 bytes.")):
        with pytest.raises(bt.BudgetError, match="a call: there is not"), process.translate_memory_errors("a call"):
            raise error


def test_too_large_requests_are_refused_before_allocation(tmp_path):
    net = bt.decoder(4, heads=2, slices=1, vocabulary=["a", "b"])
    s = net.sentence(["a", "b"] * 4_000)
    restarts = bt.MAP(restarts=10**9)
    for call, message in (
        (s.graph, "networkx graph: expected at most 100,000 arrows"),
        (s.tan, "quotient graph: expected at most 10000000 arrows"),
        (lambda: s.draw(tmp_path / "a.svg", detail="nodes"), "figure of the nodes: expected at most 2,000 arrows"),
        (lambda: s.draw(tmp_path / "a.svg", words=range(7_000)), "attention grid: expected at most 10000000 pairs"),
        (lambda: bt.volume_preserving(3).iterate([[0.0] * 3], 10**15), "steps: expected at most"),
        (lambda: bt.bayesuvius(4, observe=Categorical(10**12)), "parameters: expected at most"),
        (lambda: bt.fit(mixture(), vectors(), method=restarts), "1000000000 restarts: expected at most"),
    ):
        with pytest.raises(bt.BudgetError, match=message):
            call()
    assert not any(tmp_path.iterdir())


def test_the_memory_of_a_sweep_is_counted_by_its_paths(monkeypatch):
    net = bt.decoder(4, heads=2, slices=1, vocabulary=["a", "b"])
    clean, corrupt = (net.sentence(words * 10) for words in (["a", "b"], ["b", "a"]))
    for at, count in {"v -> a": 2 * 210, "x -> q -> a -> mix": 2 * 20}.items():
        run_sweep = partial(bt.sweep, clean, corrupt, at=at, metric={"y_19": ("a", "b")}, progress=False)
        assert len(run_sweep().names) == count
        monkeypatch.setattr(process, "total_memory", lambda count=count: PATH_BYTES * count - 1)
        with pytest.raises(bt.BudgetError, match=f"at '{at}': expected at most .*got {PATH_BYTES * count:,} bytes"):
            run_sweep()
        monkeypatch.undo()
