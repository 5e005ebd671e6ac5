"""Small inputs that ask for more memory than there is: a BudgetError that says so, in a process with little to give."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import bnet_transformer as bt
from tests.soak import jobs
from tests.soak.probing import Found, Probe, Setup, Tally, answer

MORE = 2**30  # bytes that the process may take beyond what it has


def _words(count: int) -> list[str]:
    return list((jobs.WORDS * (count // len(jobs.WORDS) + 1))[:count])


def _decoder(slices: int = 1, **options: object) -> bt.BNet:
    return bt.decoder(8, heads=2, slices=slices, vocabulary=jobs.WORDS, **options)


def _fit(**options: object) -> object:
    return bt.fit(jobs.mixture(), jobs.vectors(), steps=None, progress=False, **options)


def _mixture(**options: object) -> bt.BNet:
    return bt.bayesuvius(4, heads=4, per="word", vocabulary=jobs.WORDS, observe=bt.tpm.Categorical(9), **options)


ASKED: dict[str, Callable[[], object]] = {
    "bayesuvius(dim=10**9)": lambda: bt.bayesuvius(10**9, heads=4),
    "bayesuvius(4, slices=10**6)": lambda: bt.bayesuvius(4, slices=10**6),
    "Categorical(10**12)": lambda: bt.bayesuvius(4, observe=bt.tpm.Categorical(10**12)),
    "Categorical(10**9)": lambda: bt.bayesuvius(4, observe=bt.tpm.Categorical(10**9)),
    "decoder(words=10**9)": lambda: _decoder(words=10**9, positions="learned"),
    "attention of 30,000 words": lambda: _decoder().sentence(_words(30_000)).attention(slice=0),
    "reads of 20,000 words": lambda: _decoder(2).sentence(_words(20_000)).reads(slices="all"),
    "explore of 10,000 words": lambda: _decoder().sentence(_words(10_000)).explore(Path("never.html")),
    "draw of 2,000 words": lambda: _decoder(9).sentence(_words(2_000)).draw(Path("never.svg")),
    "graph of 2,000 words": lambda: _decoder().sentence(_words(2_000)).graph(),
    "tan of 10,000 words": lambda: _decoder().sentence(_words(10_000)).tan(),
    "iterate(steps=10**11)": lambda: bt.volume_preserving(3).iterate([[0.0] * 3], 10**11),
    "posterior(budget=10**18)": lambda: _mixture(slices=3).sentence(_words(8)).posterior("y_1", budget=10**18),
    "posterior of 4^17 states": lambda: _mixture(slices=3).sentence(_words(8)).posterior("y_1"),
    "to_pgmpy of a table of 10^12": lambda: _table().to_pgmpy(),
    "fit(restarts=10**9)": lambda: _fit(restarts=10**9),
    "fit(method='svi', draws=10**11)": lambda: _fit(method="svi", draws=10**11, spread=1.0),
    "fit(method='nuts', draws=10**12)": lambda: _fit(method="nuts", draws=10**12, learn=("c.logits",)),
    "fit(method='nuts', chains=10**9)": lambda: _fit(method="nuts", chains=10**9, learn=("c.logits",)),
    "cost(words=10**12)": lambda: _decoder().cost(10**12),
}


def _table() -> bt.Sentence:
    """A sentence whose readout has a parent of many states."""
    net = bt.bayesuvius(4, slices=2, heads=300, per="slice", vocabulary=jobs.WORDS, observe=bt.tpm.Categorical(9))
    return net.sentence(_words(6))


def asked(what: str, more: int, back: Connection) -> None:
    """Ask with so little memory, and send back what came."""
    import resource

    torch.set_num_threads(1)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + more, has + more))
    began = time.perf_counter()
    try:
        ASKED[what]()
        came = "answered", ""
    except BaseException as error:  # whatever comes is told
        came = type(error).__name__, str(error)
    back.send((*came, time.perf_counter() - began))


def probe_memory(setup: Setup) -> Found:
    """Each of the calls, once."""
    law = "a BudgetError (or another BNetError that counts), before the process is out of memory"
    tally = Tally(f"{MORE // 2**30} GiB to give (RLIMIT_AS)", law)
    longest, slow = 0.0, ""
    for what in ASKED:
        kind, told, seconds = answer(asked, what, MORE) or ("killed or hanging", "", 0.0)
        good = hasattr(bt, kind) and issubclass(getattr(bt, kind), bt.BNetError) and "\n" not in told
        tally.add(good, f"{what}: {kind}: {told}")
        if seconds > longest:
            longest, slow = seconds, what
    return tally.found(f"{len(ASKED)} calls; the slowest refusal after {longest:.1f} s ({slow})")


def plan(setup: Setup) -> list[tuple[Probe, Setup]]:
    """All calls, once, where the system keeps a process short."""
    return [(probe_memory, setup)] if sys.platform == "linux" else []
