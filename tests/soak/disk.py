"""Full disks and read-only folders: one clear error, and the file that was there stays as it was."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

import bnet_transformer as bt
from bnet_transformer.cli import main
from tests.soak import jobs
from tests.soak.probing import Found, Probe, Setup, Tally, folder, strays

SIZE = 256 * 1024  # bytes of the small disk
NOBODY = 65534
PICTURES = ("svg", "png", "pdf")
NAMED = ("draw", "explore", "train", "fit", "ask", "posterior", "reads", "sweep", "heads", "cost", "--json")
Write = Callable[[Path], object]


@contextmanager
def disk(mounted: bool) -> Iterator[Path | None]:
    """A small disk of its own, None where this process may mount none; or a plain folder."""
    with folder() as place:
        if mounted and _call("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)):
            yield None
            return
        try:
            yield place
        finally:
            if mounted:
                _call("umount", str(place))


def _call(*command: str) -> int:
    """The exit status of a program; that of a missing one is no success either."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode
    except OSError:
        return 1


@contextmanager
def full(place: Path, mounted: bool, left: int) -> Iterator[None]:
    """While it lasts there are so many bytes left: on the disk, or for any one file."""
    if not mounted:
        import resource  # not on Windows

        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return
    filler = place / "filler"
    filler.write_bytes(b"\0" * max(0, shutil.disk_usage(place).free - left))
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def read_only(place: Path, mounted: bool) -> Iterator[None]:
    """While it lasts nothing can be written there; root, whom no folder refuses, is nobody for that long."""
    root = os.geteuid() == 0 and not mounted
    if mounted:
        _call("mount", "-o", "remount,ro", str(place))
    else:
        place.chmod(0o555)
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        if mounted:
            _call("mount", "-o", "remount,rw", str(place))
        else:
            place.chmod(0o755)


def writers(kept: Path) -> dict[str, Write]:
    """Everything that writes a file, by what it is called; each is given the file. What they read is `kept`."""
    s = jobs.told_net().sentence(jobs.SAID[0])
    fit = jobs.fit(jobs.mixture(), 0)
    net = bt.bayesuvius(64, heads=2)
    made: dict[str, Write] = {"save a.safetensors": net.save, "save a.fit": fit.save}
    for suffix in ("svg", "png", "pdf", "dot", "tex", "json", "graphml", "bif", "html"):
        made[f"draw a.{suffix}"] = s.draw
    made["explore a.html"] = s.explore
    for suffix in ("svg", "dot", "graphml"):
        made[f"draw-folded a.{suffix}"] = net.draw
    for suffix in PICTURES:
        made[f"plot a.{suffix}"] = lambda path: bt.plot(fit).figure.savefig(path)
    made["train checkpoint"] = lambda path: jobs.run("train", path.parent, resume=True)
    for kind in ("map",):
        made[f"fit-{kind} checkpoint"] = partial(_fitted, kind)
    return made | dict(_commands(kept))


def _commands(kept: Path) -> Iterator[tuple[str, Write]]:
    """Every command that writes files, with each of its kinds of files."""
    told = " ".join(jobs.SAID[0].split()[:3])
    summed = kept / "summed.safetensors"
    jobs.decoder().save(summed)
    tables = ("csv", "json")
    for words, suffixes in (
        (("draw", told), ("svg", "bif")),
        (("explore", told), ("html",)),
        (("train", told, "--dim", 8, "--steps", 2), ("safetensors", *tables, "svg")),
        (("fit", told, "--dim", 4, "--steps", 2), ("fit", "json", "svg", "safetensors")),
        (("ask", "posterior", "c", "a bird sang"), (*tables, *PICTURES)),
        (("ask", "reads", "a bird sang"), ("csv",)),
        (("sweep", "a bird sang a", "a dog sang a", "--at", "x", "--answer", "bird,dog"), (*tables, "svg")),
        (("heads", told, "-m", summed), (*tables, "svg")),
        (("cost", "--words", 9), (*tables, "svg")),
        (("ask", "posterior", "c", "a bird sang", "--json"), ("json",)),
    ):
        for suffix in suffixes:
            name = "-".join([each for each in words if isinstance(each, str) and each in NAMED])
            yield f"command-{name} a.{suffix}", partial(_command, *words)


def _fitted(kind: str, path: Path) -> None:
    jobs.run(kind, path.parent, resume=True)


def _command(*arguments: Any) -> None:
    """A command, whose one line of an error is the error."""
    *words, path = arguments
    found = CliRunner().invoke(main, [*map(str, words), "-o", str(path)])
    lines = found.stderr.splitlines()
    if found.exit_code == 2 and len(lines) == 1 and lines[0].startswith("Error: "):
        raise bt.FileError(lines[0])
    if found.exit_code:
        raise AssertionError(f"exit {found.exit_code}: {found.output!r}") from found.exception


def file_of(what: str, place: Path) -> Path:
    """The file that a writer writes."""
    return place / ("checkpoint.safetensors" if what.endswith("checkpoint") else what.split()[-1])


def attempt(write: Write, path: Path) -> str | None:
    """None where it was written or refused in one clear line; else what came instead."""
    try:
        write(path)
    except bt.BNetError as error:
        ours = isinstance(error, bt.FileError) and "\n" not in str(error)
        return None if ours else f"{type(error).__name__}: {error}"
    except BaseException as error:  # whatever comes instead is what the probe is for
        return f"{type(error).__name__}: {error}"
    return None


def old_file(what: str, write: Write, place: Path) -> bytes:
    """What stands there before: of runs a checkpoint after a few steps, else a few bytes."""
    path = file_of(what, place)
    if not what.endswith("checkpoint"):
        path.write_bytes(b"old")
        return b"old"
    with suppress(_Enough), _after(3):
        write(path)
    return path.read_bytes()


class _Enough(Exception):
    """A run has gone far enough."""


@contextmanager
def _after(count: int) -> Iterator[None]:
    """A run ends after so many checkpoints."""
    from bnet_transformer.files import checkpoint

    before, done = checkpoint.write, []

    def write(*arguments: Any) -> None:
        before(*arguments)
        done.append(1)
        if len(done) == count:
            raise _Enough

    checkpoint.write = write
    try:
        yield
    finally:
        checkpoint.write = before


def probe_full(mounted: bool, setup: Setup) -> Found:
    """Nothing, or less than is needed, is left on the disk."""
    law = "written whole, or one FileError with the old file as it was; nothing else stays"
    what = f"full disk ({f'of {SIZE // 1024} kB' if mounted else 'RLIMIT_FSIZE: files may be no longer'})"
    torch.manual_seed(setup.seed)
    tally, refused = Tally(what, law), 0
    with folder() as kept, disk(mounted) as place:
        if place is None:
            return Found(what, law, 0, seen="this process may mount none", left_out=True)
        made = writers(kept)
        for name, write in made.items():
            for seed, draw in setup.tries():
                refused += _probe_full(tally, name, write, place, mounted, seed, draw)
    return tally.found(f"{len(made)} kinds of files; {refused} refused, the rest fitted")


def _probe_full(
    tally: Tally, what: str, write: Write, place: Path, mounted: bool, seed: int, draw: random.Random
) -> bool:
    path = file_of(what, place)
    old = old_file(what, write, place)
    with full(place, mounted, draw.choice([0, 0, 4096, draw.randrange(0, 64 * 1024)])):
        wrong = attempt(write, path)
    refused = path.read_bytes() == old
    if path.name == "checkpoint.safetensors" and not refused:
        wrong = wrong or attempt(write, path)  # it goes on from a later checkpoint, which is whole
    left = strays(place) + [each.name for each in place.iterdir() if each.name not in (path.name, "all")]
    tally.add(wrong is None and not left, f"{what}, seed {seed}: {wrong or f'left {left}'}")
    _empty(place)
    return refused


def probe_read_only(mounted: bool, setup: Setup) -> Found:
    """The folder takes no files."""
    what, law = f"read-only {'disk' if mounted else 'folder'}", "one FileError; the old file as it was"
    tally = Tally(what, law)
    with folder() as kept, disk(mounted) as place:
        if place is None:
            return Found(what, law, 0, seen="this process may mount none", left_out=True)
        kept.chmod(0o755)
        if not mounted and not _may_read(place):
            return Found(what, law, 0, seen="root's packages, which nobody else may read", left_out=True)
        for name, write in writers(kept).items():
            path, old = file_of(name, place), old_file(name, write, place)
            with read_only(place, mounted):
                wrong = attempt(write, path)
            same = path.read_bytes() == old
            tally.add(wrong is None and same, f"{name}: {wrong or 'written all the same'}")
            _empty(place)
    return tally.found(f"{tally.tries} kinds of files{', as nobody' if os.geteuid() == 0 and not mounted else ''}")


def _may_read(place: Path) -> bool:
    """Whether the packages, fonts among them, can be read by who is not root."""
    with read_only(place, False):
        try:
            Path(torch.__file__).open().close()
        except OSError:
            return False
    return True


def _empty(place: Path) -> None:
    for each in place.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def plan(setup: Setup) -> list[tuple[Probe, Setup]]:
    """A tenth of `times` for each kind of file."""
    few = Setup(max(1, setup.times // 10), setup.seed)
    ways = [(probe, mounted) for probe in (probe_full, probe_read_only) for mounted in (True, False)]
    probes: list[Probe] = [partial(probe, mounted) for probe, mounted in ways]
    return [(probe, few) for probe in probes] if sys.platform != "win32" else []
