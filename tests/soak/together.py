"""Two processes at one folder, readers beside writers, a page that is open twice: no mixed files."""

from __future__ import annotations

import json
import multiprocessing
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import bnet_transformer as bt
from bnet_transformer import training
from tests.soak import jobs, pages
from tests.soak.probing import LONGEST, Found, Probe, Setup, Tally, answer, child, done, folder, strays, struck


def attempted(kind: str, where: Path, seed: int, go: Path, back: Connection) -> None:
    """A run that begins when `go` is there, and sends back its course, or the error."""
    end = time.monotonic() + 60
    while not go.exists() and time.monotonic() < end:
        time.sleep(0.001)
    try:
        back.send({"seed": seed, **jobs.run(kind, where, seed=seed)})
    except bt.BNetError as error:
        back.send({"seed": seed, "error": type(error).__name__, "told": str(error)})


def probe_folder(kind: str, setup: Setup) -> Found:
    """Two runs with different seeds begin at once in one folder: one has it, the other is told."""
    law = "one run has the folder and gives what it gives alone; the other is refused; one checkpoint, of the first"
    tally = Tally(f"two runs at once into one folder: {kind}", law)
    with folder() as place:
        alone = {seed: _alone(kind, place / f"alone {seed}", seed) for seed in (0, 1)}
        for seed, draw in setup.tries():
            where, go = place / f"run {seed}", place / f"go {seed}"
            pipes = [multiprocessing.Pipe(duplex=False) for _ in (0, 1)]
            order = draw.sample((0, 1), 2)
            runs = [child(attempted, kind, where, each, go, pipe[1]) for each, pipe in zip(order, pipes, strict=True)]
            go.touch()
            came = [ours.recv() if ours.poll(LONGEST) else {} for ours, _ in pipes]
            for run in runs:
                run.join(LONGEST)
            ran = [each for each in came if "found" in each]
            told = [each for each in came if "error" in each]
            good = len(ran) == len(told) == 1 and ran[0]["found"] == alone[ran[0]["seed"]]["found"]
            good = good and told[0]["error"] == "FileError"
            left = sorted(each.name for each in where.iterdir() if each.name not in ("checkpoint.safetensors", "all"))
            tally.add(good and not left, f"seed {seed}: {told or came}, left {left}")
    return tally.found()


def _alone(kind: str, where: Path, seed: int) -> dict[str, object]:
    out = where.with_suffix(".json")
    if not done(jobs.course, kind, where, out, False, seed):
        raise RuntimeError(f"{kind} did not come to its end")
    found: dict[str, object] = json.loads(out.read_text())
    return found


def probe_lock(setup: Setup) -> Found:
    """The lock of a killed run is gone with it; while it lives, resume is refused as well."""
    tally = Tally("a run beside one that lives, and after one that was killed", "refused; then taken at once")
    with folder() as place:
        for seed, draw in setup.tries():
            where, out = place / f"run {seed}", place / f"{seed}.json"
            made = child(jobs.course, "train", where, out, False)
            lock = where / "checkpoint.safetensors.lock"
            while not (lock.exists() and lock.read_bytes()) and made.is_alive():
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.05))
            try:
                jobs.run("train", where, resume=True)
                told = "" if not made.is_alive() else "went on beside it"
            except bt.FileError as error:
                told = "" if f"process {made.pid}" in str(error) else str(error)
            made.kill()
            made.join()
            taken = done(jobs.course, "train", where, out, True)
            tally.add(not told and taken and not lock.exists(), f"seed {seed}: {told or 'not taken'}")
    return tally.found("the lock is flock's on a file beside the checkpoint, taken away at the end")


def probe_moved(setup: Setup) -> Found:
    """The folder of a run that lives is moved away, and another run begins under its name."""
    law = "each run gives what it gives alone, or is told by one FileError; what was moved goes on from there"
    tally, ended = Tally("a run whose folder is moved away, or made anew by another run", law), 0
    with folder() as place:
        alone = {seed: _alone("train", place / f"alone {seed}", seed)["found"] for seed in (0, 1)}
        for seed, draw in setup.tries():
            where, moved, go = place / f"run {seed}", place / f"moved {seed}", place / f"go {seed}"
            ours, theirs = multiprocessing.Pipe(duplex=False)
            made = child(attempted, "train", where, 0, go, theirs)
            go.touch()
            while not (where / "checkpoint.safetensors.lock").exists() and made.is_alive():
                time.sleep(0.002)
            made.join(draw.uniform(0, 0.3))
            where.rename(moved)
            came = [answer(attempted, "train", where, 1, go)] if seed % 2 else []
            came.append(ours.recv() if ours.poll(LONGEST) else {})
            made.join(LONGEST)
            ended += "error" in came[-1]
            good = all(
                each.get("error") == "FileError" or each.get("found") == alone[each.get("seed")] for each in came
            )
            good = good and any("found" in each for each in came[:-1] or [{"found": 0}])
            again = place / f"{seed}.json"
            good = good and done(jobs.course, "train", moved, again, True)
            good = good and json.loads(again.read_text())["found"] == alone[0]
            left = strays(moved) + strays(where)
            tally.add(good and not left, f"seed {seed}: {came}, left {left}")
    return tally.found(f"{ended} ended by it")


def probe_names(setup: Setup) -> Found:
    """Two runs in one folder that each calls by another name."""
    tally = Tally("two runs at once into one folder, by a link and by a roundabout path", "the second is refused")
    with folder() as place:
        for seed, _ in setup.tries():
            where, link, go = place / f"run {seed}", place / f"link {seed}", place / f"go {seed}"
            where.mkdir()
            link.symlink_to(where, target_is_directory=True)
            go.touch()
            made = child(jobs.course, "train", where, place / f"{seed}.json", False)
            while not (where / "checkpoint.safetensors.lock").exists() and made.is_alive():
                time.sleep(0.002)
            for other in (link, place / "." / where.name / ".." / where.name):
                came = answer(attempted, "train", other, 1, go) if made.is_alive() else {}
                told = came.get("error", "") if made.is_alive() else "FileError"
                tally.add(told == "FileError", f"seed {seed}: {other}: {came}")
            made.join(LONGEST)
            (place / f"{seed}.json").unlink()
    return tally.found()


def probe_commands(setup: Setup) -> Found:
    """Two commands write one file at once."""
    tally = Tally("two commands with the same -o at once", "both end well; the file is that of one of them, whole")
    with folder() as place:
        target = place / "a.svg"
        asked = [("draw", "a bird sang"), ("draw", "a dog sang a")]
        cwd = [place / each for each in ("one", "other")]
        whole = set()
        for where, words in zip(cwd, asked, strict=True):
            where.mkdir()
            if not done(jobs.command, where, *words, "-o", str(target)):
                raise RuntimeError(f"{words} did not come to its end: {(where / 'said').read_text()}")
            whole.add(target.read_bytes())
        for seed, _ in setup.tries():
            both = [child(jobs.command, at, *words, "-o", str(target)) for at, words in zip(cwd, asked, strict=True)]
            for made in both:
                made.join(LONGEST)
            good = all(made.exitcode == 0 for made in both) and target.read_bytes() in whole and not strays(place)
            tally.add(good and len(whole) == 2, f"seed {seed}: {[made.exitcode for made in both]}")
    return tally.found()


def reading(target: Path, suffix: str, seconds: float, back: Connection) -> None:
    """Read again and again; send back how many different contents came, and the first error."""
    seen, wrong, count = set(), "", 0
    end = time.monotonic() + seconds
    while time.monotonic() < end and not wrong:
        try:
            if suffix == ".safetensors":
                seen.add(jobs.digest(dict(bt.load(target).parameters)))
            elif suffix == ".fit":
                seen.add(jobs.digest(dict(bt.load(target).net.parameters)))
            elif suffix == ".checkpoint":
                found = training.kept(jobs.decoder(), target)
                seen.add(jobs.digest(dict(found.net.parameters)))
            else:
                seen.add(target.read_bytes())
        except BaseException as error:  # whatever comes is told
            wrong = f"{type(error).__name__}: {error}"
        count += 1
    back.send((len(seen), wrong, count))


def probe_reader(suffix: str, setup: Setup) -> Found:
    """A reader in a loop while another process saves in a loop."""
    what = {
        ".safetensors": "load during saves",
        ".fit": "load of a fit during saves",
        ".html": "a page read during explore",
        ".svg": "a picture during draw",
    }
    tally = Tally(what[suffix], "every read is whole: one of the two that are written")
    reads = 0
    with folder() as place:
        target = place / f"a{suffix}"
        done(jobs.written, target, suffix, 0)
        for seed, draw in setup.tries():
            writers = [child(jobs.writing, target, suffix, place / f"ready {seed} {k}") for k in (0, 1)]
            while not all((place / f"ready {seed} {k}").exists() for k in (0, 1)):
                time.sleep(0.005)
            kinds, wrong, count = answer(reading, target, suffix, draw.uniform(0.2, 0.6)) or (0, "killed", 0)
            for writer in writers:
                writer.kill()
                writer.join()
            reads += count
            tally.add(1 <= kinds <= 2 and not wrong, f"seed {seed}: {kinds} contents, {wrong}")
    return tally.found(f"{reads} reads beside two writers of one file")


def probe_checkpoint(setup: Setup) -> Found:
    """`training.kept` in a loop while a run keeps its checkpoints."""
    tally = Tally("training.kept beside a run", "every checkpoint that is read is whole")
    reads = 0
    with folder() as place:
        for seed, draw in setup.tries():
            where = place / f"run {seed}"
            made = child(jobs.course, "train", where, place / f"{seed}.json", False)
            while not (where / "checkpoint.safetensors").exists() and made.is_alive():
                time.sleep(0.002)
            seen, wrong, count = answer(reading, where, ".checkpoint", draw.uniform(0.1, 0.4)) or (0, "killed", 0)
            made.join(LONGEST)
            reads += count
            tally.add(seen >= 1 and not wrong, f"seed {seed}: {wrong}")
    return tally.found(f"{reads} reads")


def probe_leftovers(setup: Setup) -> Found:
    """What a killed run left half written is gone when the next one begins."""
    tally = Tally(
        "half a checkpoint of a killed run", "gone when the next run begins; the temporary files of others stay"
    )
    with folder() as place:
        for seed, draw in setup.tries():
            where = place / f"run {seed}"
            struck(jobs.course, "train", where, place / f"{seed}.json", False, after=draw.uniform(0.05, 0.5))
            for name in (f".checkpoint.safetensors.{seed:016x}.tmp", ".other.safetensors.0123456789abcdef.tmp"):
                (where / name).mkdir(parents=True)
                (where / name / "whole").write_bytes(b"half")
            good = done(jobs.course, "train", where, place / f"{seed}.json", True)
            left = strays(where)
            tally.add(good and left == [".other.safetensors.0123456789abcdef.tmp"], f"seed {seed}: {left}")
    return tally.found()


def plan(setup: Setup) -> list[tuple[Probe, Setup]]:
    """A tenth of `times` for each."""
    few = Setup(max(1, setup.times // 10), setup.seed)
    made: list[Probe] = [partial(probe_folder, kind) for kind in ("train", "map")]
    made += [probe_lock, probe_leftovers, probe_checkpoint, probe_moved, probe_names, probe_commands]
    made += [partial(probe_reader, suffix) for suffix in (".safetensors", ".fit", ".html", ".svg")]
    return [*((probe, few) for probe in made), *pages.plan(setup)]
