"""Small inputs that ask for more memory than there is: a BudgetError that says so, in a process with little to give."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from click.testing import CliRunner

import bnet_transformer as bt
from bnet_transformer.cli import main
from tests import flat_options
from tests.soak import jobs
from tests.soak.files import _folder_of_bert
from tests.soak.probing import Found, Probe, Setup, Tally, answer, folder

MORE = 2**30  # bytes that the process may take beyond what it has
LEAST, MOST = 2**25, 2**32  # from and to which a call is given more and more


def _words(count: int) -> list[str]:
    return list((jobs.WORDS * (count // len(jobs.WORDS) + 1))[:count])


def _decoder(slices: int = 1, **options: object) -> bt.BNet:
    return bt.decoder(8, heads=2, slices=slices, vocabulary=jobs.WORDS, **options)


def _fit(**options: object) -> object:
    return flat_options.fit(jobs.mixture(), jobs.vectors(), progress=False, **options)


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
    "equations of 10^6 slices": lambda: bt.bayesuvius(4, slices=10**6).equations(),
    "inclusion(draws=10**10)": lambda: _included(draws=10**10),
    "roles of 5,000 words": lambda: bt.roles(_decoder(), [" ".join(_words(5_000))]),
    "plot of the attention of 10,000 words": lambda: bt.plot(_decoder().sentence(_words(10_000)).reads()),
    "draw a.bif of a table of 10^12": lambda: _table().draw(Path("never.bif")),
    "generate(length=10**9)": lambda: _decoder(words=32, positions="learned").generate("the cat", length=10**9),
    "generate(length=10**9) without a last word": lambda: _decoder().generate("the cat", length=10**9),
    "iterate(steps=10**9)": lambda: bt.volume_preserving(3).iterate([[0.0] * 3], 10**9),
    "a config with giant sizes": lambda: _pretrained(hidden_size=2**30),
    "a config with a giant vocabulary": lambda: _pretrained(vocab_size=2**40),
    "a config with 10^9 layers": lambda: _pretrained(num_hidden_layers=10**9),
    "HDF5 with giant declared shapes": lambda: _hdf5(),
    "a safetensors header with giant shapes": lambda: _giant(jobs.decoder()),
    "a fit of 10^12 draws, by its header": lambda: _giant(jobs.fit(jobs.mixture(), 0)),
    "command: cost --words 10^12": lambda: _command("cost", "--words", str(10**12)),
    "command: train --dim 10^6": lambda: _command("train", "the cat", "--dim", str(10**6)),
    "command: fit --restarts 10^9": lambda: _command("fit", "the cat sat", "--restarts", str(10**9)),
}
ENOUGH: dict[str, Callable[[], object]] = {
    "attention of 4,000 words": lambda: _decoder().sentence(_words(4_000)).attention(slice=0),
    "reads of 1,500 words": lambda: _decoder(2).sentence(_words(1_500)).reads(slices="all"),
    "posterior of 4^7 states": lambda: _mixture(slices=3).sentence(_words(3)).posterior("y_1", budget=10**6),
    "fit(method='svi', draws=10**6)": lambda: bt.fit(
        jobs.mixture(), jobs.vectors(), method=bt.SVI(steps=1, draws=10**6), spread=1.0, progress=False
    ),
    "explore of 300 words": lambda: _explored(300),
}
REFUSED = 2  # the exit status of a command


def _explored(count: int) -> object:
    with folder() as place:
        return _decoder().sentence(_words(count)).explore(place / "a.html")


def _command(*words: str) -> None:
    """A command, whose one line of an error is the error."""
    found = CliRunner().invoke(main, words)
    if found.exit_code == REFUSED and found.stderr.startswith("Error: "):
        raise bt.BNetError(found.stderr.removesuffix("\n"))


def _included(**options: object) -> object:
    return bt.inclusion(_decoder(), list(jobs.SAID), progress=False, **options)


def _pretrained(**changed: object) -> object:
    with folder() as place:
        _folder_of_bert(place)
        told = json.loads((place / "config.json").read_text()) | changed
        (place / "config.json").write_text(json.dumps(told))
        return bt.from_pretrained(place)


def _hdf5() -> object:
    import h5py

    with folder() as place:
        with h5py.File(place / "a.h5", "w") as file:
            for role in ("PQ", "PK", "PV"):
                file.create_dataset(f"L1/{role}/head_1", (10**6, 10**6), "f8", chunks=(1, 1000))
        return bt.load_geometric(place / "a.h5")


def _giant(saved: bt.BNet | bt.Fit[bt.BNet]) -> object:
    """A file of a few kilobytes, whose header tells of more."""
    with folder() as place:
        path = place / "a.safetensors"
        saved.save(path)
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        for name, told in header.items():
            if name != "__metadata__":
                told["shape"] = [2**20, 2**20]
        head = json.dumps(header).encode()
        path.write_bytes(len(head).to_bytes(8, "little") + head + content[8 + length :])
        return bt.load(path)


def _table() -> bt.Sentence:
    """A sentence whose readout has a parent of many states."""
    net = bt.bayesuvius(4, slices=2, heads=300, per="slice", vocabulary=jobs.WORDS, observe=bt.tpm.Categorical(9))
    return net.sentence(_words(6))


def asked(what: str, more: int, place: Path, back: Connection) -> None:
    """Ask with so little memory, and send back what came; temporary files lie in a folder that outlives a kill."""
    import resource

    tempfile.tempdir = str(place)
    torch.set_num_threads(1)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + more, has + more))
    began = time.perf_counter()
    try:
        (ASKED | ENOUGH)[what]()
        came = "answered", ""
    except BaseException as error:  # whatever comes is told
        came = type(error).__name__, str(error)
    peak = 1024 * int(Path("/proc/self/status").read_text().partition("VmPeak:")[2].split()[0])
    back.send((*came, time.perf_counter() - began, peak - has))


def probe_memory(setup: Setup) -> Found:
    """Each of the calls, once."""
    law = "a BudgetError (or another BNetError that counts), before the process is out of memory"
    tally = Tally(f"{MORE // 2**30} GiB to give (RLIMIT_AS)", law)
    longest, slow = 0.0, ""
    for what in ASKED:
        with folder() as place:
            kind, told, seconds, _ = answer(asked, what, MORE, place) or ("killed or hanging", "", 0.0, 0)
        good = hasattr(bt, kind) and issubclass(getattr(bt, kind), bt.BNetError) and "\n" not in told
        tally.add(good, f"{what}: {kind}: {told}")
        if seconds > longest:
            longest, slow = seconds, what
    return tally.found(f"{len(ASKED)} calls; the slowest refusal after {longest:.1f} s ({slow})")


def probe_enough(setup: Setup) -> Found:
    """Calls that have room, with twice as much memory each time until they are answered."""
    law = "a BudgetError where there is too little; answered with at most four times what it then takes"
    tally, seen = Tally("too little memory, then enough", law), []
    for what in ENOUGH:
        more, kind, told, took = LEAST // 2, "BudgetError", "", 0
        while kind == "BudgetError" and more < MOST:
            more *= 2
            with folder() as place:
                kind, told, _, took = answer(asked, what, more, place) or ("killed or hanging", "", 0.0, 0)
        good = kind == "answered" and (more == LEAST or more <= 4 * took)
        tally.add(good, f"{what}: {kind} with {more // 2**20} MB, takes {took // 2**20} MB: {told}")
        seen.append(f"{what} takes {took // 2**20} MB, has {more // 2**20} MB")
    return tally.found("; ".join(seen))


def plan(setup: Setup) -> list[tuple[Probe, Setup]]:
    """All calls, once, where the system keeps a process short."""
    return [(probe_memory, setup), (probe_enough, setup)] if sys.platform == "linux" else []
