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
from tests.soak import jobs
from tests.soak.probing import LONGEST, Found, Probe, Setup, Tally, answer, child, done, folder, killed, strays


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


def reading(target: Path, suffix: str, seconds: float, back: Connection) -> None:
    """Read again and again; send back how many different contents came, and the first error."""
    seen, wrong, count = set(), "", 0
    end = time.monotonic() + seconds
    while time.monotonic() < end and not wrong:
        try:
            if suffix == ".safetensors":
                seen.add(jobs.digest(dict(bt.load(target).parameters)))
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
    what = {".safetensors": "load during saves", ".html": "a page read during explore", ".svg": "a picture during draw"}
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
            killed(jobs.course, "train", where, place / f"{seed}.json", False, after=draw.uniform(0.05, 0.5))
            where.mkdir(exist_ok=True)
            for name in (f".checkpoint.safetensors.{seed:016x}.tmp", ".other.safetensors.0123456789abcdef.tmp"):
                (where / name).write_bytes(b"half")
            good = done(jobs.course, "train", where, place / f"{seed}.json", True)
            left = strays(where)
            tally.add(good and left == [".other.safetensors.0123456789abcdef.tmp"], f"seed {seed}: {left}")
    return tally.found()


def probe_page(setup: Setup) -> Found:
    """A page in two windows: what is done in one is not seen in the other, and its file does not change."""
    law = "each window has its own state; the file stays as it was"
    try:
        from tests.browsing import chromium, opened
    except BaseException:  # no playwright: its import skips
        return Found("a page opened twice", law, 0, seen="no playwright here", left_out=True)
    tally = Tally("a page opened twice (Chromium)", law)
    try:
        with folder() as place, chromium() as browser:
            file = place / "a.html"
            jobs.told_net().sentence(jobs.SAID[0]).explore(file)
            whole = file.read_bytes()
            with opened(browser, file) as one, opened(browser, file) as other:
                before = other.content()
                one.locator(".node").first.click()
                one.keyboard.press("+")
                tally.add(other.content() == before, "the other window changed")
                tally.add(file.read_bytes() == whole, "the file changed")
    except BaseException:  # no Chromium: the tests of the page skip as well
        return Found("a page opened twice", law, 0, seen="no Chromium here", left_out=True)
    return tally.found()


def plan(setup: Setup) -> list[tuple[Probe, Setup]]:
    """A tenth of `times` for each."""
    few = Setup(max(1, setup.times // 10), setup.seed)
    made: list[Probe] = [partial(probe_folder, kind) for kind in ("train", "map", "nuts")]
    made += [probe_lock, probe_leftovers, probe_checkpoint]
    made += [partial(probe_reader, suffix) for suffix in (".safetensors", ".html", ".svg")]
    return [*((probe, few) for probe in made), (probe_page, few)]
