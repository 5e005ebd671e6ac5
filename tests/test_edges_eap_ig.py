"""Sweeps over edges against the formulas of EAP-IG, and exact patching, on an explicit GPT-2."""

import pytest
import torch

import bnet_transformer as bt
from benchmarks.edges import convert_name
from bnet_transformer.interventions.edges.runner import build_edge_runner
from bnet_transformer.pretrained import from_pretrained
from tests.eap_ig_formulas import (
    EdgeGraph,
    EdgeRuns,
    score_eap,
    score_eap_ig_activations,
    score_eap_ig_inputs,
    score_exactly,
)
from tests.huggingface_models import GPT2, init_model
from tests.test_eap_ig_formulas import CLEAN, CORRUPT, FIRST, SECOND, difference, metric

STEPS = 3


@pytest.fixture(scope="module")
def graph():
    model = init_model("GPT2LMHeadModel", {**GPT2, "n_layer": 3, "n_head": 2, "n_embd": 8, "vocab_size": 20})
    for parameter in model.parameters():
        parameter.data.mul_(2.5)
    return EdgeGraph(model)


@pytest.fixture(scope="module")
def net(graph):
    return from_pretrained(graph.model)


def sweep(net, **options):
    """The mean effect of each edge, by its name in the package EAP-IG."""
    clean, corrupt = ([net.sentence(ids.tolist()) for ids in side] for side in (CLEAN, CORRUPT))
    options = {"metric": {"y_4": (FIRST, SECOND)}, "direction": "noise", **options}
    result = bt.sweep(clean, corrupt, at="edges", **options)
    return {convert_name(name): float(result.values[index]) for index, name in result.names.items()}


METHODS = {
    "exact": (score_exactly, {}, ()),
    "EAP": (score_eap, {"first_order": True}, ()),
    "inputs": (score_eap_ig_inputs, {"first_order": True, "steps": STEPS, "convention": "eap-ig"}, (STEPS,)),
    "activations": (
        score_eap_ig_activations,
        {"first_order": True, "steps": STEPS, "convention": "eap-ig-activations"},
        (STEPS,),
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_edge_has_the_score_of_the_formulas(graph, net, method):
    score, options, steps = METHODS[method]
    expected, actual = score(graph, CLEAN, CORRUPT, metric, *steps), sweep(net, **options)
    assert actual.keys() == expected.keys()
    assert max(abs(actual[edge] - expected[edge]) for edge in expected) < 1e-9
    assert max(map(abs, expected.values())) > 0.1


def test_the_other_direction_exchanges_the_runs(graph, net):
    for score, options in ((score_exactly, {}), (score_eap, {"first_order": True})):
        expected = score(graph, CORRUPT, CLEAN, metric)
        actual = sweep(net, direction="denoise", **options)
        assert actual.keys() == expected.keys()
        assert max(abs(actual[edge] - expected[edge]) for edge in expected) < 1e-9


def test_lists_of_sentences_are_the_mean_of_single_ones(graph, net):
    expected = [score_eap(graph, CLEAN[k : k + 1], CORRUPT[k : k + 1], metric) for k in range(2)]
    actual = sweep(net, first_order=True)
    assert max(abs(actual[edge] - (expected[0][edge] + expected[1][edge]) / 2) for edge in actual) < 1e-9
    assert torch.tensor(list(actual.values())).isfinite().all()


def test_circuits_are_those_of_the_explicit_graph(graph, net):
    clean, corrupt = ([net.sentence(ids.tolist()) for ids in side] for side in (CLEAN, CORRUPT))
    runner, runs = (
        build_edge_runner(clean, corrupt, {"y_4": (FIRST, SECOND)}),
        EdgeRuns(graph, CLEAN, CORRUPT, difference),
    )
    order = [runs.edge_names.index(convert_name(name).replace("->", " -> ")) for name in runner.edge_names]
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(8, len(order), generator=generator) < torch.linspace(0, 1, 8)[:, None]
    expected = runs.evaluate(masks)
    torch.testing.assert_close(runner.evaluate(masks[:, order]), expected, rtol=0, atol=1e-9)
    assert float((expected - runs.evaluate_clean()).abs().max()) > 0.1
    gates = torch.rand(len(order), generator=generator, dtype=torch.float64).requires_grad_()
    values = runner.evaluate_with_grad(gates[order]).sum(), runs.evaluate_with_grad(gates).sum()
    gradients = [torch.autograd.grad(value, gates)[0] for value in values]
    torch.testing.assert_close(*values, rtol=0, atol=1e-9)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)
