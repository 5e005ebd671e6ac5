"""What probes share: their setup, what they find, and processes to be killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOAD = ["tests.soak.jobs"]
LONGEST = 120.0  # seconds after which a child counts as hanging


@dataclass(frozen=True)
class Setup:
    """How often a probe tries, the seed of its first try (the next ones follow), and the rooms that were asked for."""

    times: int = 50
    seed: int = 0

    def tries(self) -> Iterator[tuple[int, random.Random]]:
        """The seed of each try, and random numbers of its own."""
        for seed in range(self.seed, self.seed + self.times):
            yield seed, random.Random(seed)

    @staticmethod
    def moment(seed: int) -> float:
        """Which share of its course a try is let go: those of seeds that follow each other are spread evenly."""
        return seed * (5**0.5 - 1) / 2 % 1


@dataclass(frozen=True)
class Found:
    """What a probe found: what was done, what was to hold, how often it was tried, where it failed, what was seen."""

    probe: str
    law: str
    tries: int
    failures: tuple[str, ...] = ()
    seen: str = ""
    left_out: bool = False

    @property
    def held(self) -> int:
        """In how many tries it held."""
        return self.tries - len(self.failures)


@dataclass
class Tally:
    """The tries of a probe, as they are made."""

    probe: str
    law: str
    tries: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, good: bool, told: str) -> None:
        """One more try; what is told is kept where it failed."""
        self.tries += 1
        if not good:
            self.failures.append(told)

    def found(self, seen: str = "") -> Found:
        """What came of them."""
        return Found(self.probe, self.law, self.tries, tuple(self.failures), seen)


Probe = Callable[[Setup], Found]
STARTED: list[BaseProcess] = []  # the children of this process
SLOW = 0.02  # seconds that a slow disk takes to keep what is written


def child(job: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """A process of its own that does a job; it is forked from one that has imported all that jobs need."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a child forked beside running threads would hang
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # what killed children leave, it clears away
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    made = context.Process(target=job, args=arguments, daemon=True)
    made.start()
    STARTED[:] = [each for each in STARTED if each.is_alive()] + [made]
    return made


def on_a_slow_disk(job: Callable[..., Any], *arguments: Any) -> None:
    """Do a job where it takes a while until what is written is on the disk: a kill can fall into that."""
    quick = os.fsync

    def fsync(held: int) -> None:
        time.sleep(SLOW)
        quick(held)

    os.fsync = fsync
    job(*arguments)


def done(job: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a job came to its end."""
    made = child(job, *arguments)
    made.join(LONGEST)
    if made.is_alive():
        made.kill()
        made.join()
    return made.exitcode == 0


def struck(
    job: Callable[..., Any],
    *arguments: Any,
    after: float,
    within: Path | None = None,
    how: int = signal.SIGKILL,
) -> int | None:
    """Start a job and end it after so many seconds, or then when it writes in the folder `within`; its exit status.

    That is minus the signal where it was killed, and its own where it had ended before; None where it went on.
    """
    made = child(job, *arguments) if within is None else child(on_a_slow_disk, job, *arguments)
    made.join(after)
    end = time.monotonic() + LONGEST
    while within is not None and made.is_alive() and not strays(within) and time.monotonic() < end:
        time.sleep(0.0005)
    if made.is_alive():
        os.kill(made.pid or 0, how)
    made.join(LONGEST)
    status = made.exitcode
    made.kill()
    made.join()
    return status


def answer(job: Callable[..., Any], *arguments: Any) -> Any:
    """What a job sends back through the pipe that it is given last; None where it was killed, failed or hung."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    made = child(job, *arguments, theirs)
    theirs.close()
    with ours:
        try:
            return ours.recv() if ours.poll(LONGEST) else None
        except EOFError:
            return None
        finally:
            made.kill()
            made.join()


def length(job: Callable[..., Any], *arguments: Any) -> float:
    """The seconds that a job takes, to its end."""
    done(time.sleep, 0)  # the process that forks is there
    began = time.perf_counter()
    if not done(job, *arguments):
        raise RuntimeError(f"{job.__name__} of {arguments} did not come to its end")
    return time.perf_counter() - began


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that is gone afterwards, with what children that a probe left behind would still write there."""
    with tempfile.TemporaryDirectory(prefix="soak-") as made:
        try:
            yield Path(made)
        finally:
            for each in STARTED:
                each.kill()
                each.join()


def strays(where: Path) -> list[str]:
    """The temporary folders of those who write there, or who did when they were killed."""
    try:
        return [name for name in os.listdir(where) if name.startswith(".") and name.endswith(".tmp")]
    except OSError:
        return []
