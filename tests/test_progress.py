"""Progress bars are only for terminals, unless progress= is set; the rest of the library prints nothing."""

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
    """A stream instead of stderr; a terminal, or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def run_train(progress: bool | None) -> None:
    bt.train(bt.decoder(4, heads=1, slices=1, hidden=4, vocabulary=WORDS), TEXTS, steps=2, progress=progress)


def make_fit(method: str) -> Callable[[bool | None], None]:
    """A function that fits two sentences by a method."""
    options = {"chains": 1, "draws": 2, "warmup": 2} if method == "nuts" else {"steps": 2}

    def run(progress: bool | None) -> None:
        net = bt.bayesuvius(4, heads=2, key_dim=2, vocabulary=WORDS, observe=Categorical(4))
        data = torch.tensor([[0, 1, 3], [0, 2, 3]]), torch.tensor([[1, 3, 0], [2, 3, 0]])
        flat_options.fit(net, data, method=method, learn=["c.logits"], progress=progress, **options)

    return run


def run_sweep(progress: bool | None) -> None:
    net = bt.decoder(4, heads=1, slices=1, hidden=4, vocabulary=WORDS)
    cat, dog = (net.sentence(text) for text in TEXTS)
    bt.sweep(cat, dog, metric={"y_2": "cat"}, progress=progress)


def run_circuit(progress: bool | None) -> None:
    net = bt.decoder(4, heads=1, slices=1, hidden=4, vocabulary=WORDS)
    cat, dog = (net.sentence(text) for text in TEXTS)
    bt.circuit(cat, dog, metric={"y_2": "cat"}, threshold="5%", progress=progress)


def make_heads_run(method: str) -> Callable[[bool | None], None]:
    """A function that computes the inclusion of heads by a method, and their damage."""
    options = {} if method == "exact" else {"rounds": 8}

    def run(progress: bool | None) -> None:
        net = bt.encoder(4, heads=2, slices=1, hidden=4, vocabulary=WORDS)
        damage(bt.inclusion(net, TEXTS, method=method, progress=progress, **options), TEXTS, progress=progress)

    return run


RUNS = {
    "train": run_train,
    "map": make_fit("map"),
    "svi": make_fit("svi"),
    "nuts": make_fit("nuts"),
    "sweep": run_sweep,
    "circuit": run_circuit,
    "heads, exact": make_heads_run("exact"),
    "heads, svi": make_heads_run("svi"),
    "heads, gibbs": make_heads_run("gibbs"),
}


@pytest.mark.parametrize("name", RUNS)
def test_bars_are_for_terminals(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {}
    for terminal, progress in ((False, None), (True, None), (True, False), (False, True)):
        with monkeypatch.context() as patch:
            stream = Stream(terminal)
            patch.setattr(sys, "stderr", stream)
            RUNS[name](progress)
        outputs[terminal, progress] = stream.getvalue()
    assert outputs[False, None] == outputs[True, False] == ""
    assert "%|" in outputs[True, None] and "%|" in outputs[False, True]
    assert capsys.readouterr().out == ""


def test_reading_a_model_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    bt.from_pretrained("tiny").sentence("the cat sat").posterior("c")
    assert capfd.readouterr() == ("", "")
