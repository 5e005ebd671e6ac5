"""Run the soak tests: what they found, room by room; exit status 1 where something failed.

python -m tests.soak [--only kill,disk] [--times 50] [--seed 0] [--markdown docs/soak.md]
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.soak.probing import Found, Setup

ROOMS = ("kill", "disk", "files", "memory", "threads", "together", "fuzz")


def results(room: str, setup: Setup) -> list[Found]:
    """What the probes of a room find, told as they find it."""
    made = []
    for probe, tries in importlib.import_module(f"tests.soak.{room}").plan(setup):
        began = time.perf_counter()
        try:
            found = probe(tries)
        except Exception as error:  # a probe that breaks is told among the failures, and the others go on
            name = " ".join(map(str, [getattr(probe, "func", probe).__name__, *getattr(probe, "args", ())]))
            found = Found(name, "the probe comes to its end", 1, (f"{type(error).__name__}: {error}",))
        made.append(found)
        verdict = "left out" if found.left_out else f"{found.held} of {found.tries} held"
        print(f"{room}: {found.probe}: {verdict} ({time.perf_counter() - began:.0f} s) {found.seen}", flush=True)
        for failure in found.failures:
            print(f"  FAILED {failure}\n  {again(room, failure)}", flush=True)
    return made


def again(room: str, failure: str) -> str:
    """The command that repeats a try."""
    seed = failure.partition("seed ")[2].partition(":")[0].partition(",")[0]
    return f"python -m tests.soak --only {room} --times 1 --seed {seed if seed.isdigit() else 0}"


def cell(text: str) -> str:
    """Text as it stands in a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def section(room: str, found: Sequence[Found], setup: Setup, seconds: float) -> str:
    """A room of the page: how it was run, a table of its probes, then every failure."""
    title = (importlib.import_module(f"tests.soak.{room}").__doc__ or room).splitlines()[0]
    tries, failed = sum(each.tries for each in found), sum(len(each.failures) for each in found)
    where = f"Python {platform.python_version()}, {platform.system()}, {os.cpu_count()} cores"
    ran = f"`--times {setup.times} --seed {setup.seed}` ({where}, {datetime.date.today()})"
    rows = ["| done | what is to hold | tries | held | seen |", "|---|---|---:|---:|---|"]
    for each in found:
        held = "left out" if each.left_out else f"{each.held}"
        rows.append(f"| {cell(each.probe)} | {cell(each.law)} | {each.tries} | {held} | {cell(each.seen)} |")
    failures = [f"- {cell(failure)}: `{again(room, failure)}`" for each in found for failure in each.failures]
    told = ["", "Failed:", "", *failures] if failures else []
    line = f"{ran}: {tries:,} tries, {failed} failed, {seconds:.0f} s."
    return "\n".join([f"## {room}", "", title, "", line, "", *rows, *told])


INTRODUCTION = """# Soak and fault tests

`make soak` kills, starves, damages and fuzzes what the library does, and writes this page (`python -m tests.soak`;
`--only` takes some rooms, `--times` and `--seed` say how often and from where). A short form of it is in `make test`.
Each room says how it was run; *held* of *tries* is how often it came out as it was to; a try that failed is listed
with the command that repeats it.

What is promised:

- **A killed run goes on as if it had never been.** Checkpoints are written whole or not at all, and every step is a
  function of its number and the seed, so that a resumed run has the losses and the parameters of an uninterrupted
  one, to the bit.
- **A file is the old one or the new one.** `save`, `draw`, `explore`, plots and the command line write in a hidden
  folder beside the file, put the bytes on the disk and then take the name. A killed writer leaves at most that
  folder, `.name.*.tmp`, which nothing reads; in the folder of a run the next run takes it away.
- **An interrupt ends a run in good order.** Ctrl-C (SIGINT) finishes the step and keeps its checkpoint; a command
  then ends with 130. SIGTERM is no more than a kill.
- **One run at a time in a folder.** A second `train` or `fit` with the same folder is refused with the number of
  the process that has it. A killed run leaves its `checkpoint.safetensors.lock`, which locks nothing any more: the
  next run takes it over, and takes it away at its end.
- **Our files are read to the bit or refused.** Nets, fits and checkpoints hold a SHA-256 of their content and a
  version. Files of others (configs, vocabularies, safetensors, HDF5) have no checksum: damage that leaves them well
  formed is not seen.
- **Weights of others are mapped, not copied**: a folder of 400 MB is loaded in a twentieth of a second, and takes
  memory as it is used. So whoever cuts such a file short, or writes into it, while a net uses it ends the process
  (SIGBUS) or changes the net; one that is replaced while it is opened is refused. Our own files are read whole.
- **Memory that is not there is told.** Sizes that can be counted before are refused with the count; what runs out
  all the same is a `BudgetError`, not torch's error. A module from `net.module()` is torch's, and raises torch's
  error.
- **What is read cannot run or crash anything.** Every parser is fed with spoilt inputs by hypothesis, and by atheris
  where it is installed (`make soak` does so, on Linux): it gives a value or one `BNetError`.
- **The same seed gives the same bits** on the same number of threads, whatever the hash seed of Python is. On other
  numbers of threads torch adds in another order, and float32 differs in its last digits; what stays equal to the
  bit is listed under *threads*.
"""


def page(told: Mapping[str, str], before: str) -> str:
    """The whole page; of rooms that were not run now what it said before."""
    parts = [f"## {part}".rstrip() for part in before.split("\n## ")[1:]]
    known = {part.split()[1]: part for part in parts} | dict(told)
    return "\n".join([INTRODUCTION, "\n\n".join(known[room] for room in ROOMS if room in known)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0])
    there = [room for room in ROOMS if importlib.util.find_spec(f"tests.soak.{room}")]
    parser.add_argument("--only", default=",".join(there), help=f"some of {', '.join(there)}")
    parser.add_argument("--times", type=int, default=50, help="tries of the larger probes")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first try")
    parser.add_argument("--markdown", type=Path, help="the page to write; rooms that are not asked for stay")
    asked = parser.parse_args(arguments)
    rooms, setup = asked.only.split(","), Setup(asked.times, asked.seed)
    if not {*rooms} <= {*there}:
        parser.error(f"--only takes some of {', '.join(there)}")
    failed = False
    for room in rooms:
        began = time.perf_counter()
        found = results(room, setup)
        failed |= any(each.failures for each in found)
        if asked.markdown:
            told = {room: section(room, found, setup, time.perf_counter() - began)}
            before = asked.markdown.read_text(encoding="utf-8") if asked.markdown.exists() else ""
            asked.markdown.write_text(page(told, before), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
