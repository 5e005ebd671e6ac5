"""The names that rows use: small nets and what was found of them, made once; files and a folder, made for each row."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import CliRunner

import bnet_transformer as bt
from bnet_transformer.cli import main
from bnet_transformer.tpm import TPM, Embed, Given, Linear
from tests.cases import every

ROOMS = ("compiler", "cost", "equations", "inference", "models", "pretrained", "pyro_reading", "training")
WORDS = ["the", "cat", "sat"]
PAIRS = [("the cat sat", "cat the sat"), ("sat the cat", "the sat cat")]
CAT = {"y_2": ("cat", "sat")}


class Exit2(Exception):
    """A command line that is refused: exit code 2, and one line on the standard error."""


def cli(*arguments: object) -> str:
    """What a command prints."""
    found = CliRunner().invoke(main, list(map(str, arguments)))
    if found.exit_code == 2 and not found.stdout and found.stderr.count("\n") == 1:
        raise Exit2(found.stderr.removeprefix("Error: "))
    assert found.exit_code == 0, found.output
    return found.stdout


def of(tpm: TPM, *parents: object) -> bt.BNet:
    """A net with a node of that TPM behind `token` (3 states), `x` (4 numbers), `wide` (6) and `odd` (3)."""
    before = [bt.Node("token", Given(states=3), plates=["word"]), bt.Node("x", Embed(4), ["token"], ["word"])]
    before += [bt.Node(role, Linear(dim), ["x"], ["word"]) for role, dim in (("wide", 6), ("odd", 3))]
    stack = bt.Stack([bt.Node("x", Linear(4), ["x"], ["word"])], before, [bt.Node("z", tpm, parents, ["word"])])
    return bt.BNet(bt.Declaration([stack]))


def mine(**told: object) -> TPM:
    """A TPM of a stranger: the identity but for what is told."""
    body = {"slots": ("x",), "shape": lambda self, *p: p[0].shape, "value": lambda self, at, *p: p[0], **told}
    made: TPM = dataclass(frozen=True)(type("Mine", (TPM,), body))()
    return made


def under(default: str, asked: Callable[[], Any]) -> Any:
    """What is found under another default of torch: a floating type, a device, a mode of gradients or of kernels."""
    if default == "float64":
        torch.set_default_dtype(torch.float64)
    if default == "meta":
        torch.set_default_device("meta")
    torch.use_deterministic_algorithms(default == "deterministic")
    try:
        with torch.inference_mode(default == "inference"):
            return asked()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)


def at_once(asked: Callable[[], Any], threads: int = 8) -> list[Any]:
    """What that many threads find that ask at the same moment."""
    gate = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        asking = [pool.submit(lambda: (gate.wait(), asked())[1]) for _ in range(threads)]
        return [each.result() for each in asking]


def later(make: Callable[[Any], Any], told: Any) -> Any:
    """What is made of an array or a tensor, which is then filled with other numbers."""
    made_of = make(told)
    told[:] = 9
    return made_of


PLAIN: dict[str, Any] = {
    **{room: importlib.import_module(f"bnet_transformer.{room}") for room in ROOMS},
    "toy": importlib.import_module("bnet_transformer.training.toy"),
    **{"bt": bt, "np": np, "torch": torch, "inf": math.inf, "nan": math.nan, "math": math, "CAT": CAT, "pairs": PAIRS},
    **{"under": under, "at_once": at_once, "later": later, "copy": copy, "pickle": pickle},
    **{"cli": cli, "every": every, "mine": mine, "of": of, "ids": torch.tensor([[0, 1, 2]])},
}
MADE: dict[str, Callable[[], Any]] = {
    "net": lambda: bt.bayesuvius(4, heads=3, vocabulary=WORDS, observe=bt.tpm.Categorical(3)),
    "s": lambda: made("net").sentence("the cat sat"),
    "plain": lambda: bt.bayesuvius(4),
    "real": lambda: bt.bayesuvius(4, observe=bt.tpm.Normal(1.0)),
    "dec": lambda: bt.decoder(8, heads=2, slices=1, vocabulary=WORDS),
    "both": lambda: bt.encoder_decoder(8, heads=2, slices=1, vocabulary=WORDS),
    "vp": lambda: bt.volume_preserving(3, slices=1),
    "mini": lambda: bt.from_pretrained("minilm"),
    "module": lambda: made("net").module().eval(),
    "boxes": lambda: made("s").shrink(lambda name: name[0]),
    "clean": lambda: made("dec").sentence("the cat sat"),
    "corrupt": lambda: made("dec").sentence("cat cat sat"),
    "swept": lambda: bt.sweep(made("clean"), made("corrupt"), metric=CAT, progress=False),
    "mediated": lambda: bt.mediation(made("clean"), made("corrupt"), metric=CAT, progress=False),
    "held": lambda: bt.inclusion(made("dec"), ["the cat sat", "sat the cat"], draws=50, progress=False),
    "told": lambda: bt.roles(made("dec"), ["the cat sat", "sat the cat"], draws=50),
    "fitted": lambda: bt.fit(made("net"), PAIRS, method=bt.EM(steps=2), progress=False),
    "trained": lambda: bt.train(made("dec"), ["the cat sat", "sat the cat"], steps=2, progress=False),
}


@cache
def made(name: str) -> Any:
    """A net, or what was found of it."""
    return MADE[name]()


def _text(folder: Path) -> Path:
    (folder / "a.txt").write_text("no net")
    return folder / "a.txt"


def _empty(folder: Path) -> Path:
    (folder / "empty").touch()
    return folder / "empty"


def _saved(folder: Path) -> Path:
    made("net").save(folder / "net.safetensors")
    return folder / "net.safetensors"


def _cut(folder: Path) -> Path:
    path = _saved(folder)
    path.write_bytes(path.read_bytes()[:-9])
    return path


def _flipped(folder: Path) -> Path:
    path = _saved(folder)
    held = bytearray(path.read_bytes())
    held[-3] ^= 1
    path.write_bytes(held)
    return path


FRESH: dict[str, Callable[[Path], Path]] = {
    **{"folder": lambda folder: folder, "text": _text, "empty": _empty},
    **{"saved": _saved, "cut": _cut, "flipped": _flipped},
}


def namespace(said: str, folder: Path) -> dict[str, Any]:
    """The names that a row says, and no more of them than it says."""
    names = set(re.findall(r"(?<![\w.\"])[A-Za-z_]\w*", said))
    found = {name: PLAIN[name] for name in names & PLAIN.keys()}
    found |= {name: made(name) for name in names & MADE.keys()}
    return found | {name: FRESH[name](folder) for name in names & FRESH.keys()}
