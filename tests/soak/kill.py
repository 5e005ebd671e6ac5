"""kill -9, SIGTERM and SIGINT at moments spread over runs, commands and writing, and inside writes."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bnet_transformer.files import alone
from tests.soak import jobs
from tests.soak.probing import (
    LONGEST,
    Found,
    Probe,
    Setup,
    Tally,
    child,
    done,
    folder,
    length,
    on_a_slow_disk,
    strays,
    struck,
)

WRITTEN = {
    "save of a net": "a.safetensors",
    "load and save of a net": "load and save",
    "save of a fit": "a.fit",
    "draw (svg)": "a.svg",
    "draw (png)": "a.png",
    "draw (pdf)": "a.pdf",
    "explore (html)": "a.html",
    "export (json)": "a.json",
}
SMALL = ("--every", "1", "--steps", "24", "--checkpoint", "run", "-o", "a.json", "-o", "a.safetensors")
RUNS = {
    "train": ("train", *jobs.SAID[:4], "--dim", "8", "--dropout", "0.1", *SMALL),
    "fit": ("fit", *jobs.SAID[:4], "--dim", "4", "--restarts", "2", "--batch", "2", *SMALL),
}
COMMANDS = {
    "train of its own file": ("a.safetensors", ("train", "-m", "a.safetensors", *jobs.SAID[:2], "--steps", "2")),
    "sweep": ("a.csv", ("sweep", "a bird sang a", "a dog sang a", "--at", "x", "--answer", "bird,dog")),
    "draw": ("a.svg", ("draw", "a bird sang")),
    "ask": ("a.json", ("ask", "posterior", "c", "a bird sang")),
}
ENDS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
KILLED = -signal.SIGKILL


def probe_run(kind: str, setup: Setup) -> Found:
    """A run that is killed once or twice goes on as if it had never been."""
    name = "train" if kind == "train" else f"fit {kind}"
    tally = Tally(f"kill -9 during {name}", "resumed: losses and parameters of an uninterrupted run, to the bit")
    with folder() as place:
        seconds = length(jobs.course, kind, place / "whole", place / "whole.json", False)
        wanted = json.loads((place / "whole.json").read_text())
        alive = begun = within = 0
        for seed, draw in setup.tries():
            at, out = place / f"run {seed}", place / f"{seed}.json"
            status = struck(
                jobs.course, kind, at, out, False, after=setup.moment(seed) * seconds, within=_in_a_write(seed, at)
            )
            alive += status == KILLED
            begun += status == KILLED and (at / "checkpoint.safetensors").exists()
            within += bool(strays(at))
            if status == KILLED and draw.random() < 0.3:
                status = struck(jobs.course, kind, at, out, True, after=draw.uniform(0, seconds))
            good = status == 0 or (status == KILLED and done(jobs.course, kind, at, out, True))
            good = good and json.loads(out.read_text()) == wanted
            left = [*strays(at), *strays(at / "all"), *(each.name for each in at.glob("*.lock"))]
            wrong = "" if good else f"another course ({status})"
            tally.add(
                good and not left,
                f"seed {seed}: {' and '.join([wrong] * (not good) + [f'left {each}' for each in left])}",
            )
    return tally.found(
        f"{alive} killed before their end, {begun} of them after a checkpoint, {within} inside the write of one"
    )


def _in_a_write(seed: int, where: Path) -> Path | None:
    """Every second try is let go on until it writes in the folder."""
    return where if seed % 2 else None


def probe_write(what: str, setup: Setup) -> Found:
    """A file that is being written over is the old or the new one, whole."""
    written = WRITTEN[what]
    law = "the file is the old or the new one, whole; what else stays is hidden, and the next run clears it"
    tally, within = Tally(f"kill -9 during {what}", law), 0
    with folder() as place:
        target = place / (written if "." in written else "a.safetensors")
        whole = set()
        for which in (0, 1):
            if not done(jobs.written, target, written, which):
                raise RuntimeError(f"{what} did not come to its end")
            whole.add(target.read_bytes())
        for seed, draw in setup.tries():
            _kill_writer(target, written, place / f"ready {seed}", _in_a_write(seed, place), draw)
            within += bool(strays(place))
            wrong = _unsound(target, whole)
            tally.add(not wrong, f"seed {seed}: {wrong}")
    return tally.found(f"{within} killed inside a write")


def _unsound(target: Path, whole: set[bytes]) -> str:
    """What is wrong with a file whose writer was killed, and with what else lies beside it; the latter is cleared."""
    with alone(target):  # as the next run does
        pass
    beside = [path.name for path in target.parent.iterdir() if path != target and not path.name.startswith("ready")]
    for name in beside:
        path = target.with_name(name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    same = target.exists() and target.read_bytes() in whole
    return f"left {beside}" if beside else "" if same else "neither the old file nor the new one"


def _kill_writer(target: Path, written: str, ready: Path, within: Path | None, draw: random.Random) -> None:
    """Let a child write for a moment, and kill it."""
    made = child(*([] if within is None else [on_a_slow_disk]), jobs.writing, target, written, ready)
    end = time.monotonic() + LONGEST
    while not ready.exists() and made.is_alive() and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.2))
    while within is not None and made.is_alive() and not strays(within) and time.monotonic() < end:
        time.sleep(0.0005)
    if not made.is_alive():
        raise RuntimeError(f"the writer of {target.name} ended by itself")
    made.kill()
    made.join()


def probe_command(what: str, setup: Setup) -> Found:
    """A command that is killed leaves the old file or the new one."""
    name, words = COMMANDS[what]
    law = "the file is the old or the new one, whole; what else stays is hidden, and the next run clears it"
    tally, alive, within = Tally(f"kill -9 during the command {what}", law), 0, 0
    with folder() as place:
        target, ready = place / name, place / "ready"  # of where the words of the command go
        ready.mkdir()
        if name.endswith(".safetensors"):
            jobs.decoder().save(target)
        else:
            target.write_bytes(b"old")
        old = target.read_bytes()
        asked = (jobs.command, place, *words, "-o", name)
        seconds = length(*asked)
        whole = {old, target.read_bytes()}
        for seed, _ in setup.tries():
            target.write_bytes(old)
            status = struck(*asked, after=setup.moment(seed) * seconds, within=_in_a_write(seed, place))
            alive += status == KILLED
            within += bool(strays(place))
            (place / "said").unlink(missing_ok=True)
            wrong = "" if status in (0, KILLED) else f"exit {status}"
            wrong = wrong or _unsound(target, whole)
            tally.add(not wrong, f"seed {seed}: {wrong}")
    return tally.found(f"{alive} killed before their end, {within} inside a write")


def probe_signal(command: str, end: str, setup: Setup) -> Found:
    """A command that is asked to end leaves whole files, and a run that goes on."""
    clean = end == "SIGINT"
    told = "exit 130 in one line, nothing left but the checkpoint" if clean else "its files whole"
    tally = Tally(f"{end} during the command {command}", f"{told}; resumed: the files of an uninterrupted run")
    with folder() as place:
        words, kept = RUNS[command], ("a.json", "a.safetensors")
        whole = _fresh(place / "whole")
        seconds = length(jobs.command, whole, *words)
        wanted = [(whole / name).read_bytes() for name in kept]
        ended = 0
        for seed, _ in setup.tries():
            at = _fresh(place / f"{seed}")
            run = at / "run"
            status = struck(
                jobs.command,
                at,
                *words,
                after=0.05 + setup.moment(seed) * seconds,
                within=_in_a_write(seed, run),
                how=ENDS[end],
            )
            ended += status != 0
            wrong = _ended_badly(at, status, clean)
            if not wrong and not done(jobs.command, at, *words, "--resume"):
                wrong = f"not resumed: {_said(at)}"
            if not wrong and [(at / name).read_bytes() for name in kept] != wanted:
                wrong = "other files"
            tally.add(not wrong, f"seed {seed}: {wrong}")
    return tally.found(f"{ended} ended before their end")


def _fresh(place: Path) -> Path:
    place.mkdir()
    return place


def _said(at: Path) -> str:
    return (at / "said").read_text().strip()


def _ended_badly(at: Path, status: int | None, clean: bool) -> str:
    """What is wrong with how a command ended."""
    if status == 0:
        return ""
    if status != (130 if clean else -signal.SIGTERM):
        return f"exit {status}: {_said(at)}"
    lines = _said(at).splitlines()
    left = [*strays(at), *strays(at / "run"), *(each.name for each in at.glob("run/*.lock"))]
    if clean and (left or not lines[-1].startswith("interrupted") or "Traceback" in _said(at)):
        return f"left {left}, said {lines}"
    return ""


def _shared(probes: Sequence[Probe], setup: Setup) -> list[tuple[Probe, Setup]]:
    """The tries of one kind of probe, shared among its variants."""
    each = -(-setup.times // len(probes))
    return [(probe, Setup(each, setup.seed)) for probe in probes]


def plan(setup: Setup) -> list[tuple[Probe, Setup]]:
    """All of `times` for train, for fit (over its methods), for save, for draw, for commands (over their kinds)."""
    fits: list[Probe] = [partial(probe_run, kind) for kind in jobs.OPTIONS]
    saves: list[Probe] = [partial(probe_write, what) for what in WRITTEN if "save" in what]
    draws: list[Probe] = [partial(probe_write, what) for what in WRITTEN if "save" not in what]
    commands: list[Probe] = [partial(probe_command, what) for what in COMMANDS]
    ends: list[Probe] = [partial(probe_signal, command, end) for command in RUNS for end in ENDS]
    kinds = (fits, saves, draws, commands, ends)
    return [(partial(probe_run, "train"), setup), *(each for probes in kinds for each in _shared(probes, setup))]
