"""Progress is told to a terminal, and to nothing else unless it is asked for; the rest of the library is quiet."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.attention import damage
from bnet_transformer.tpm import Categorical
from tests import flat_options

WORDS = ["the", "cat", "dog", "sat"]
TEXTS = ["the cat sat", "the dog sat"]


class Stream(io.StringIO):
    """What is written to stderr; a terminal, or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def train(progress: bool | None) -> None:
    bt.train(bt.decoder(4, heads=1, slices=1, hidden=4, vocabulary=WORDS), TEXTS, steps=2, progress=progress)


def fit(method: str) -> Callable[[bool | None], None]:
    """A fit of two sentences by a method."""
    options = {"chains": 1, "draws": 2, "warmup": 2} if method == "nuts" else {"steps": 2}

    def fitted(progress: bool | None) -> None:
        net = bt.bayesuvius(4, heads=2, key_dim=2, vocabulary=WORDS, observe=Categorical(4))
        data = torch.tensor([[0, 1, 3], [0, 2, 3]]), torch.tensor([[1, 3, 0], [2, 3, 0]])
        flat_options.fit(net, data, method=method, learn=["c.logits"], progress=progress, **options)

    return fitted


def sweep(progress: bool | None) -> None:
    net = bt.decoder(4, heads=1, slices=1, hidden=4, vocabulary=WORDS)
    cat, dog = (net.sentence(text) for text in TEXTS)
    bt.sweep(cat, dog, metric={"y_2": "cat"}, progress=progress)


def heads(method: str) -> Callable[[bool | None], None]:
    """Which heads matter, by a method, and what is lost without them."""
    options = {"rounds": 3} if method == "svi" else {}

    def found(progress: bool | None) -> None:
        net = bt.encoder(4, heads=2, slices=1, hidden=4, vocabulary=WORDS)
        damage(bt.inclusion(net, TEXTS, method=method, progress=progress, **options), TEXTS, progress=progress)

    return found


LONG = {
    "train": train,
    "map": fit("map"),
    "svi": fit("svi"),
    "nuts": fit("nuts"),
    "sweep": sweep,
    "heads, exact": heads("exact"),
    "heads, svi": heads("svi"),
}


@pytest.mark.parametrize("name", LONG)
def test_bars_are_for_terminals(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = {}
    for terminal, progress in ((False, None), (True, None), (True, False), (False, True)):
        with monkeypatch.context() as patch:
            stream = Stream(terminal)
            patch.setattr(sys, "stderr", stream)
            LONG[name](progress)
        given[terminal, progress] = stream.getvalue()
    assert given[False, None] == given[True, False] == ""
    assert "%|" in given[True, None] and "%|" in given[False, True]
    assert capsys.readouterr().out == ""


def test_reading_a_model_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    bt.from_pretrained("tiny").sentence("the cat sat").posterior("c")
    assert capfd.readouterr() == ("", "")
