"""The short form of the soak tests: each probe a few times."""

import importlib
import importlib.util
import sys

import pytest

import bnet_transformer as bt
from bnet_transformer import errors
from bnet_transformer.files import alone, replacing
from tests.soak import __main__ as soak
from tests.soak import disk, files, kill, memory, together
from tests.soak.probing import Found, Setup, Tally

ONCE = Setup(1, 0)


def holds(found: Found) -> None:
    if found.left_out:
        pytest.skip(found.seen)
    assert found.tries and not found.failures, "\n".join(found.failures)


@pytest.mark.parametrize("kind", ["train", "nuts"])
def test_a_killed_run_goes_on_as_if_it_had_never_been(kind):
    holds(kill.probe_run(kind, Setup(1, 7)))


@pytest.mark.parametrize("what", ["save of a net", "draw (svg)"])
def test_a_killed_writer_leaves_the_old_file_or_the_new_one(what):
    holds(kill.probe_write(what, Setup(2, 7)))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_full_disks_and_read_only_ones_are_one_error(monkeypatch):
    made = disk.writers()
    few = ["save a.safetensors", "save a.fit", "draw a.svg", "plot a.svg", "train checkpoint"]
    monkeypatch.setattr(disk, "writers", lambda: {what: made[what] for what in few})
    holds(disk.probe_full(ONCE))
    few.remove("train checkpoint")
    holds(disk.probe_read_only(ONCE))


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


def test_two_runs_do_not_share_a_folder():
    holds(together.probe_folder("train", ONCE))
    holds(together.probe_lock(ONCE))


def test_a_reader_beside_writers_reads_whole_files():
    holds(together.probe_reader(".safetensors", ONCE))


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
    mine.touch()
    other.touch()
    with alone(path):
        assert not mine.exists()
    assert list(tmp_path.iterdir()) == [other]
    with pytest.raises(bt.FileError, match="a folder that can be written"), alone(tmp_path / "none" / "a"):
        raise AssertionError


def test_long_and_strange_names_have_temporary_files(tmp_path):
    for name in ("x" * 255, "é" * 127, ".hidden", "[a]*?.svg", "a\nb"):
        with replacing(tmp_path / name) as temporary:
            temporary.write_text(name)
        with alone(tmp_path / name[:200].encode()[:200].decode(errors="ignore")):
            pass
        assert (tmp_path / name).read_text() == name
    assert len(list(tmp_path.iterdir())) == 5


def test_the_page_tells_failures_and_how_to_repeat_them():
    tally = Tally("a | b", "always")
    tally.add(True, "not told")
    tally.add(False, "seed 12, byte 3: <wrong>")
    text = soak.page({"files": [tally.found("two\nlines"), Found("c", "d", 0, left_out=True)]}, Setup(2, 11), 1.0)
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
