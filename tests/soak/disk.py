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
Write = Callable[[Path], object]


@contextmanager
def disk() -> Iterator[tuple[Path, str]]:
    """A small disk of its own where this process may mount one; else a folder, whose files the system keeps short."""
    with folder() as place:
        mounted = not _call("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place))
        try:
            yield place, f"a disk of {SIZE // 1024} kB" if mounted else ""
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
    """While it lasts there are so many bytes left."""
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
    """While it lasts nothing can be written there."""
    if mounted:
        _call("mount", "-o", "remount,ro", str(place))
    else:
        place.chmod(0o555)
    try:
        yield
    finally:
        if mounted:
            _call("mount", "-o", "remount,rw", str(place))
        else:
            place.chmod(0o755)


def writers() -> dict[str, Write]:
    """Everything that writes a file, by what it is called; each is given the file."""
    s = jobs.told_net().sentence(jobs.SAID[0])
    fit = jobs.fit(jobs.mixture(), 0)
    net = bt.bayesuvius(64, heads=2)
    made: dict[str, Write] = {"save a.safetensors": net.save, "save a.fit": fit.save}
    for suffix in ("svg", "png", "pdf", "dot", "tex", "json", "graphml", "bif", "html"):
        made[f"draw a.{suffix}"] = s.draw
    made["plot a.svg"] = lambda path: bt.plot(fit).figure.savefig(path)
    made["train checkpoint"] = lambda path: jobs.run("train", path.parent, resume=True)
    for kind in ("map", "nuts"):
        made[f"fit-{kind} checkpoint"] = partial(_fitted, kind)
    told = " ".join(jobs.SAID[0].split()[:3])
    made["command-draw a.svg"] = partial(_command, "draw", told)
    made["command-explore a.html"] = partial(_command, "explore", told)
    made["command-train a.safetensors"] = partial(_command, "train", told, "--dim", 8, "--steps", 2)
    made["command-fit a.fit"] = partial(_command, "fit", told, "--dim", 4, "--steps", 2)
    made["command-ask a.json"] = partial(_command, "ask", "posterior", "y_1", told)
    return made


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
    except bt.FileError as error:
        return None if "\n" not in str(error) else f"an error of several lines: {error}"
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
    from bnet_transformer.training import checkpoint

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


def probe_full(setup: Setup) -> Found:
    """Nothing, or less than is needed, is left on the disk."""
    law = "written whole, or one FileError with the old file as it was; nothing else stays"
    torch.manual_seed(setup.seed)
    refused = 0
    with disk() as (place, mounted):
        tally = Tally(f"full disk ({mounted or 'RLIMIT_FSIZE'})", law)
        for what, write in writers().items():
            for seed, draw in setup.tries():
                refused += _probe_full(tally, what, write, place, bool(mounted), seed, draw)
    return tally.found(f"{len(writers())} kinds of files; {refused} refused, the rest fitted")


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


def probe_read_only(setup: Setup) -> Found:
    """The folder takes no files."""
    law = "one FileError; the old file as it was"
    with disk() as (place, mounted):
        if not mounted and os.name == "posix" and os.getuid() == 0:
            return Found("read-only folder", law, 0, seen="nothing is read-only to root here", left_out=True)
        tally = Tally(f"read-only {'disk' if mounted else 'folder'}", law)
        for what, write in writers().items():
            path, old = file_of(what, place), old_file(what, write, place)
            with read_only(place, bool(mounted)):
                wrong = attempt(write, path)
            same = path.read_bytes() == old
            tally.add(wrong is None and same, f"{what}: {wrong or 'written all the same'}")
            _empty(place)
    return tally.found(f"{tally.tries} kinds of files")


def _empty(place: Path) -> None:
    for each in place.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def plan(setup: Setup) -> list[tuple[Probe, Setup]]:
    """A tenth of `times` for each kind of file."""
    few = Setup(max(1, setup.times // 10), setup.seed)
    made: list[tuple[Probe, Setup]] = [(probe_full, few), (probe_read_only, few)]
    return made if sys.platform != "win32" else []
