"""Determinism: the same seed gives the same bits in another process, under another hash seed, on other threads.

OMP_NUM_THREADS=2 python -m tests.soak.threads      what each function gives, as JSON
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

import bnet_transformer as bt
from tests import flat_options
from tests.soak import jobs
from tests.soak.probing import Found, Probe, Setup, Tally, folder

LOOSE = 1e-3  # how far float32 may be off on other threads, of the largest number: training follows its rounding
OF_NUMBERS = "page (html)"  # a file of float32 numbers: other digits, other bytes
KEPT = 4000  # numbers that are told of a function
Given = Callable[[Path], Mapping[str, Tensor] | bytes]


def _wide(observe: bool = False) -> bt.BNet:
    """Wide enough that torch shares its products among threads."""
    if observe:
        return bt.bayesuvius(128, heads=4, vocabulary=jobs.WORDS, observe=bt.tpm.Categorical(50), seed=2)
    return bt.decoder(256, heads=4, slices=2, vocabulary=jobs.WORDS, seed=2)


def _said(count: int = 128) -> list[str]:
    return list((jobs.WORDS * (count // len(jobs.WORDS) + 1))[:count])


def _file(write: str, suffix: str) -> Given:
    def made(place: Path) -> bytes:
        path = place / f"a{suffix}"
        s = _wide(observe=True).sentence(jobs.SAID[0])
        (s.net.save if write == "save" else getattr(s, write))(path)
        return path.read_bytes()

    return made


def _fitted(method: str) -> Given:
    def made(place: Path) -> Mapping[str, Tensor]:
        options = {**jobs.OPTIONS[method]}
        net = bt.bayesuvius(64, heads=2, seed=1, observe=bt.tpm.Normal(0.5))
        g = torch.Generator().manual_seed(0)
        data = tuple(torch.randn(64, 16, 64, generator=g) for _ in range(2))
        found = flat_options.fit(net, data, method=method, progress=False, **options)
        return {"bounds": torch.tensor(found.bounds), **found.samples, **found.net.parameters}

    return made


def _trained(place: Path) -> Mapping[str, Tensor]:
    trained = bt.train(_wide(), [_said(64)] * 16, steps=6, batch=8, optimizer=bt.AdamW(rate=1e-3), progress=False)
    return {"losses": torch.tensor(trained.losses), **trained.net.parameters}


def _plotted(place: Path) -> bytes:
    bt.plot(jobs.fit(jobs.mixture(), 0)).figure.savefig(place / "a.svg")
    return (place / "a.svg").read_bytes()


def _swept() -> Tensor:
    net = _wide()
    one, other = (net.sentence(_said(16)[start:][:12]) for start in (0, 1))
    return bt.sweep(one, other, at="x", metric={"y_11": ("the", "cat")}, progress=False).values


GIVEN: dict[str, Given] = {
    "a sentence's values": lambda place: {"x": _wide().sentence(_said())["x_2_100"]},
    "attention": lambda place: {"a": _wide().sentence(_said()).attention(slice=1)},
    "module": lambda place: {"y": _wide().module().eval()(torch.arange(128)[None] % 6)},
    "posterior": lambda place: {"c": _posterior()},
    "sample": lambda place: _drawn(),
    "generate": lambda place: {"ids": _generated()},
    "train": _trained,
    **{f"fit {method}": _fitted(method) for method in jobs.OPTIONS},
    "sweep": lambda place: {"values": _swept()},
    "inclusion": lambda place: {"mean": bt.inclusion(_small(), list(jobs.SAID), progress=False).mean},
    "inclusion svi": lambda place: {
        "mean": bt.inclusion(_small(), list(jobs.SAID), method="svi", rounds=5, progress=False).mean
    },
    "roles": lambda place: {"mean": bt.roles(_small(), list(jobs.SAID)).mean},
    "draw svg": _file("draw", ".svg"),
    "draw png": _file("draw", ".png"),
    "draw pdf": _file("draw", ".pdf"),
    "draw dot": _file("draw", ".dot"),
    "draw tex": _file("draw", ".tex"),
    "draw json": _file("draw", ".json"),
    "draw graphml": _file("draw", ".graphml"),
    "draw bif": _file("draw", ".bif"),
    "page (html)": _file("explore", ".html"),
    "plot svg": _plotted,
    "save": _file("save", ".safetensors"),
    "equations": lambda place: str(_wide().equations()).encode(),
}


def _small() -> bt.BNet:
    return bt.decoder(64, heads=4, slices=2, vocabulary=jobs.WORDS, seed=2)


def _posterior() -> Tensor:
    s = _wide(observe=True).sentence(_said(32))
    found: Tensor = s.posterior("c", evidence={"y_5": 3})
    return found


def _drawn() -> Mapping[str, Tensor]:
    return dict(_wide(observe=True).sentence(_said(16)).sample(50, seed=3).states)


def _generated() -> Tensor:
    found = _wide().generate(["the cat"], method="sample", length=40, seed=1)
    return torch.tensor([[jobs.WORDS.index(word) for word in row] for row in found.words])


def told() -> dict[str, dict[str, object]]:
    """A hash of every bit that each function gives, and some of its numbers."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    made: dict[str, dict[str, object]] = {}
    for name, given in GIVEN.items():
        with warnings.catch_warnings(), folder() as place:
            warnings.simplefilter("ignore")
            found = given(place)
        if isinstance(found, bytes):
            made[name] = {"hash": hashlib.sha256(found).hexdigest(), "numbers": []}
        else:
            flat = torch.cat([value.detach().double().reshape(-1)[:KEPT] for _, value in sorted(found.items())])
            made[name] = {"hash": jobs.digest(dict(found)), "numbers": flat.tolist()}
    return made


def elsewhere(threads: int, hash_seed: int) -> dict[str, dict[str, object]]:
    """What another process tells."""
    told_to = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": str(hash_seed)}
    run = subprocess.run([sys.executable, "-m", "tests.soak.threads"], env=told_to, stdout=subprocess.PIPE, check=True)
    found: dict[str, dict[str, object]] = json.loads(run.stdout)
    return found


def _apart(one: Mapping[str, object], other: Mapping[str, object]) -> float:
    """The largest difference of two results, of the largest number; infinite where the bytes of files differ."""
    a, b = (torch.tensor(each["numbers"], dtype=torch.float64) for each in (one, other))
    if one["hash"] == other["hash"]:
        return 0.0
    if not a.numel() or a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))


def probe_threads(setup: Setup) -> Found:
    """Two runs, another hash seed, two threads and four."""
    first = elsewhere(1, 0)
    same = Tally("a second process; another PYTHONHASHSEED", "the same bits from the same seed")
    for other in (elsewhere(1, 0), elsewhere(1, 12345)):
        for name, one in first.items():
            same.add(one["hash"] == other[name]["hash"], f"{name}: {_apart(one, other[name]):.1e} apart")
    return same.found(", ".join(first))


def probe_more_threads(setup: Setup) -> Found:
    """On two and four threads torch may add in another order."""
    law = f"the same bits, or within {LOOSE:g} of the largest number (float32)"
    tally, first, apart = Tally("2 and 4 threads instead of 1", law), elsewhere(1, 0), dict[str, float]()
    for count in (2, 4):
        for name, other in elsewhere(count, 0).items():
            far = _apart(first[name], other)
            apart[name] = max(far, apart.get(name, 0.0))
            if name == OF_NUMBERS:
                continue
            tally.add(far <= LOOSE, f"{name} on {count} threads: {far:.1e} apart")
    off = ", ".join(f"{name} {far:.0e}" for name, far in sorted(apart.items()) if 0 < far < float("inf"))
    bytes_ = f"; other bytes: {OF_NUMBERS}, which holds numbers" if apart[OF_NUMBERS] else ""
    exact = ", ".join(sorted(name for name, far in apart.items() if not far))
    return tally.found(f"to the bit: {exact}; apart: {off or 'none'}{bytes_}")


def plan(setup: Setup) -> list[tuple[Probe, Setup]]:
    """Each once."""
    return [(probe_threads, setup), (probe_more_threads, setup)]


if __name__ == "__main__":
    print(json.dumps(told()))
