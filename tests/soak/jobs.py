"""What children do. They are forked from a process that has imported this: nothing here computes on import."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import matplotlib
import pyro.infer
import torch
import torch._dynamo  # an optimiser imports it at its first step

import bnet_transformer as bt
from bnet_transformer import export, inference, pretrained, viz
from bnet_transformer.cli import main
from bnet_transformer.files import replacing, store
from bnet_transformer.inference import fit as fitting
from bnet_transformer.tpm import Categorical, Normal
from tests import flat_options

IMPORTED = (matplotlib, pyro.infer, torch._dynamo, export, inference, pretrained, viz, fitting)
WORDS = ("the", "cat", "sat", "on", "mat", "dog")
SAID = ("the cat sat on the mat", "the mat sat", "on the cat", "the dog sat on the cat") * 3
OPTIONS: dict[str, dict[str, Any]] = {
    "map": {"steps": 24, "restarts": 2, "batch": 16, "rate": 0.05},
    "em": {"steps": 24, "inner": 4, "rate": 0.05},
    "svi": {"steps": 24, "spread": 1.0, "draws": 4, "rate": 0.05},
}
KINDS = ("train", *OPTIONS)


def decoder() -> bt.BNet:
    """A small net of words, with dropout."""
    return bt.decoder(8, heads=2, slices=1, vocabulary=WORDS, dropout=0.1, seed=3)


def mixture() -> bt.BNet:
    """A small mixture of heads."""
    return bt.bayesuvius(3, heads=2, key_dim=2, seed=1, observe=Normal(0.5)).to(torch.float64)


def vectors(count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences of vectors, and what is observed."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(count, 3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def told_net(labels: tuple[str, ...] = ("no", "yes")) -> bt.BNet:
    """A small net with a readout in words."""
    return bt.bayesuvius(6, heads=2, vocabulary=WORDS, observe=Categorical(2, labels=labels))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """A hash of every bit."""
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def run(kind: str, folder: Path | None = None, resume: bool = False, seed: int = 0, every: int = 1) -> dict[str, Any]:
    """Train or fit; the losses or bounds and a hash of all that was found."""
    kept: dict[str, Any] = {"folder": folder, "resume": resume, "every": every, "progress": False, "seed": seed}
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "train":
            held = {"held_out": list(SAID[:2]), "patience": 99}
            trained = flat_options.train(
                decoder(), list(SAID), steps=24, batch=4, optimizer=bt.AdamW(rate=0.01), **held, **kept
            )
            found = {**trained.net.parameters}
            return {"losses": [*trained.losses, *(loss for _, loss in trained.held_out)], "found": digest(found)}
        fitted = flat_options.fit(mixture(), vectors(), method=kind, **OPTIONS[kind], **kept)
    found = {**fitted.net.parameters, **{f"sample {k}": v for k, v in fitted.samples.items()}}
    return {"losses": [*fitted.bounds, *(score for _, _, score in fitted.measured)], "found": digest(found)}


def course(kind: str, folder: Path, out: Path, resume: bool, seed: int = 0) -> None:
    """A run that keeps checkpoints, and tells its course at the end."""
    told = run(kind, folder, resume, seed)
    told["losses"] = [loss.hex() for loss in told["losses"]]
    with replacing(out) as temporary:
        temporary.write_text(json.dumps(told))


def command(place: Path, *words: str) -> None:
    """A command in a folder; what it says is in the file `said` there."""
    os.chdir(place)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs would not hear of it
    with open("said", "w") as said:
        sys.stdout = sys.stderr = said
        main(words)


def nets() -> tuple[bt.BNet, bt.BNet]:
    """Two nets, of some megabytes, that are saved in turn."""
    one, other = (bt.bayesuvius(256, heads=4, seed=seed) for seed in (0, 1))
    return one, other


def turned(path: Path) -> None:
    """Put another net in the place of the one that is loaded from there."""
    net = bt.load(path)
    for value in net.parameters.values():
        value.neg_()
    net.save(path)


def cut_short(path: Path, back: Connection) -> None:
    """Load a net whose file loses its bytes when it is open; send back the error."""
    opening = store.opening

    def shortened(where: Path) -> Any:
        opened = opening(where)
        os.truncate(where, 4096)
        return opened

    store.opening = shortened
    try:
        bt.load(path)
        back.send("loaded")
    except Exception as error:  # whatever comes is told
        back.send(type(error).__name__)


def writers(what: str) -> list[Callable[[Path], object]]:
    """Two things that are written to one file in turn: nets, fits, pictures, pages, graphs."""
    if what == "load and save":
        return [nets()[0].save, turned]
    if what.endswith(".safetensors"):
        return [net.save for net in nets()]
    if what.endswith(".fit"):
        net = mixture()
        return [fit(net, seed).save for seed in (0, 1)]
    sentences = [told_net().sentence(text) for text in (SAID[0], SAID[3])]
    return [(s.explore if what.endswith(".html") else s.draw) for s in sentences]


def fit(net: bt.BNet, seed: int) -> Any:
    """A short fit."""
    return bt.fit(net, vectors(), method=bt.MAP(steps=3, rate=0.05), seed=seed, progress=False)


def written(target: Path, what: str, which: int) -> None:
    """Write one of the two things."""
    writers(what)[which](target)


def writing(target: Path, what: str, ready: Path) -> None:
    """Write the two things in turn, for ever; `ready` appears when it begins."""
    both = writers(what)
    ready.touch()
    while True:
        for write in both:
            write(target)
