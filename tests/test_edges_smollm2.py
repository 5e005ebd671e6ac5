"""Edges of SmolLM2 from end to end: their number, the laws of circuits, and edges into the readout."""

from collections import Counter

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.interventions.edge_runs import build_edge_runner
from bnet_transformer.pretrained.source import is_installed

SLICES, HEADS, GROUPS = 30, 9, 3
TEXTS = "The dog chased the", "The cat ate the"
WORD, STATES = 3, (2644, 5)
METRIC = {f"y_{WORD}": STATES}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair():
    if not is_installed("smollm2"):
        pytest.skip("the weights: make smollm2")
    net = bt.from_pretrained("smollm2")
    return net.sentence(TEXTS[0]), net.sentence(TEXTS[1])


@pytest.fixture(scope="module")
def runner(pair):
    return build_edge_runner(*pair, METRIC)


def test_grouped_heads_have_one_reader_for_each_group(runner):
    readers = Counter(name.split(" -> ")[1] for name in runner.edge_names)
    step = HEADS + 1  # the writers of a slice
    for t in range(SLICES):
        before = 1 + t * step
        assert [readers.pop(f"{role}_{t}_{g}") for role in "kv" for g in range(GROUPS)] == [before] * 2 * GROUPS
        queries = [f"q_{t}_{g}_{h}" for g in range(GROUPS) for h in range(HEADS // GROUPS)]
        assert [readers.pop(name) for name in queries] == [before] * HEADS
        assert readers.pop(f"ffn_{t}") == before + HEADS
    assert readers == {"y": 1 + SLICES * step}


def test_circuits_of_all_and_of_no_edges_are_the_clean_and_the_corrupt_run(pair, runner):
    first, second = STATES
    for actual, sentence in zip((runner.evaluate_clean(), runner.evaluate_corrupt()), pair, strict=True):
        logits = sentence[f"logits_{WORD}"]
        torch.testing.assert_close(actual[0], (logits[first] - logits[second]).double(), rtol=1e-4, atol=1e-4)


def test_edges_into_the_readout_are_those_of_the_norm_and_the_logits(pair, runner):
    """Exact: the readout of the last state with the change of one writer. First order: its derivative."""
    clean, corrupt = pair
    eps = next(spec.tpm.eps for spec in clean.net.network.specs if spec.group.name == "norm")
    parameters = {name: value.double() for name, value in clean.net.parameters.items()}
    direction = parameters["W_embed.value"][STATES[0]] - parameters["W_embed.value"][STATES[1]]

    def read(x):
        scale = (x.square().mean() + eps).rsqrt()
        return (x * scale * parameters["norm.gain"]) @ direction

    def get_change(name):
        return (corrupt[f"{name}_{WORD}"] - clean[f"{name}_{WORD}"]).double()

    last = SLICES - 1
    changes = {f"ffn_{t} -> y": get_change(f"ffn_{t}") for t in (3, last)}
    for g, h in ((0, 1), (2, 0)):
        changes[f"a_{last}_{g}_{h} -> y"] = parameters[f"W_o_{last}.value"][g, h] @ get_change(f"a_{last}_{g}_{h}")
    options = {"metric": METRIC, "direction": "noise"}
    exact = bt.sweep(clean, corrupt, at=[*changes], **options)
    estimates = bt.sweep(clean, corrupt, at="edges", method=bt.Gradient(), **options)
    state = clean[f"x_{SLICES}_{WORD}"].double()
    retained = torch.ones(len(changes), len(runner.edge_names), dtype=torch.bool)
    for k, (name, change) in enumerate(changes.items()):
        retained[k, runner.edge_names.index(name)] = False
        value, slope = torch.func.jvp(read, (state,), (change,))
        tolerance = 1e-4 * float(value.abs())
        assert exact[name] == pytest.approx(float(read(state + change) - value), rel=1e-3, abs=tolerance)
        assert estimates[name] == pytest.approx(float(slope), rel=1e-3, abs=tolerance)
    torch.testing.assert_close(runner.evaluate(retained)[:, 0], exact.outcomes[:, 0], rtol=1e-4, atol=1e-4)
