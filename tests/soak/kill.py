"""kill -9 at random moments of runs and of writing."""

from __future__ import annotations

import json
import random
import time
from functools import partial
from pathlib import Path

from tests.soak import jobs
from tests.soak.probing import Found, Probe, Setup, Tally, child, done, folder, killed, length, strays

SUFFIXES = {
    "save of a net": ".safetensors",
    "save of a fit": ".fit",
    "draw (svg)": ".svg",
    "draw (png)": ".png",
    "draw (pdf)": ".pdf",
    "explore (html)": ".html",
    "export (json)": ".json",
}


def probe_run(kind: str, setup: Setup) -> Found:
    """A run that is killed once or twice goes on as if it had never been."""
    name = "train" if kind == "train" else f"fit {kind}"
    tally = Tally(f"kill -9 during {name}", "resumed: losses and parameters of an uninterrupted run, to the bit")
    with folder() as place:
        seconds = length(jobs.course, kind, place / "whole", place / "whole.json", False)
        wanted = json.loads((place / "whole.json").read_text())
        alive = begun = 0
        for seed, draw in setup.tries():
            at, out = place / f"run {seed}", place / f"{seed}.json"
            cut = killed(jobs.course, kind, at, out, False, after=draw.uniform(0, seconds))
            alive += cut
            begun += cut and (at / "checkpoint.safetensors").exists()
            if cut and draw.random() < 0.3:
                killed(jobs.course, kind, at, out, True, after=draw.uniform(0, seconds))
            good = not out.exists() or json.loads(out.read_text()) == wanted
            if cut:
                good &= done(jobs.course, kind, at, out, True) and json.loads(out.read_text()) == wanted
            left = [stray for each in (at, at / "all") if each.is_dir() for stray in strays(each)]
            tally.add(good and not left, f"seed {seed}: {'left ' + left[0] if left else 'another course'}")
    return tally.found(f"{alive} killed before their end, {begun} of them after a checkpoint")


def probe_write(what: str, setup: Setup) -> Found:
    """A file that is being written over is the old or the new one, whole."""
    suffix = SUFFIXES[what]
    tally = Tally(f"kill -9 during {what}", "the file is the old or the new one, whole; nothing else looks like one")
    within = 0
    with folder() as place:
        target = place / f"a{suffix}"
        whole = set()
        for which in (0, 1):
            if not done(jobs.written, target, suffix, which):
                raise RuntimeError(f"{what} did not come to its end")
            whole.add(target.read_bytes())
        for seed, draw in setup.tries():
            _kill_writer(target, suffix, place / f"ready {seed}", draw)
            left = [*strays(place), *(path.name for path in place.glob(".tmp*"))]  # the latter are safetensors' own
            within += bool(left)
            for name in left:
                (place / name).unlink()
            other = [path.name for path in place.iterdir() if path != target and not path.name.startswith("ready")]
            good = target.read_bytes() in whole and not other
            tally.add(good, f"seed {seed}: {other[0] if other else 'neither the old file nor the new one'}")
    return tally.found(f"{within} killed inside a write: a hidden .a{suffix}.*.tmp stayed")


def _kill_writer(target: Path, suffix: str, ready: Path, draw: random.Random) -> None:
    """Let a child write for a moment, and kill it."""
    made = child(jobs.writing, target, suffix, ready)
    end = time.monotonic() + 60
    while not ready.exists() and made.is_alive() and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.2))
    if not made.is_alive():
        raise RuntimeError(f"the writer of {target.name} ended by itself")
    made.kill()
    made.join()


def _shared(probes: list[Probe], setup: Setup) -> list[tuple[Probe, Setup]]:
    """The tries of one kind of probe, shared among its variants."""
    each = -(-setup.times // len(probes))
    return [(probe, Setup(each, setup.seed)) for probe in probes]


def plan(setup: Setup) -> list[tuple[Probe, Setup]]:
    """All of `times` for train, for fit (over its methods), for save and for draw (over their kinds)."""
    fits: list[Probe] = [partial(probe_run, kind) for kind in jobs.OPTIONS]
    saves: list[Probe] = [partial(probe_write, what) for what in SUFFIXES if what.startswith("save")]
    draws: list[Probe] = [partial(probe_write, what) for what in SUFFIXES if not what.startswith("save")]
    return [(partial(probe_run, "train"), setup), *_shared(fits, setup), *_shared(saves, setup), *_shared(draws, setup)]
