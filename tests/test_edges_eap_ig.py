"""Sweeps over edges against the formulas of EAP-IG, and exact patching, on an explicit GPT-2."""

import json
from dataclasses import replace

import pytest
import torch

import bnet_transformer as bt
from benchmarks.edges import convert_name
from bnet_transformer.interventions.circuit import read_json
from bnet_transformer.interventions.edge_runs import build_edge_runner
from bnet_transformer.pretrained import from_pretrained
from tests.eap_ig_formulas import (
    EdgeGraph,
    EdgeRuns,
    score_eap,
    score_eap_ig_activations,
    score_eap_ig_inputs,
    score_exactly,
)
from tests.huggingface_models import GPT2, NEOX, init_model
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
    "EAP": (score_eap, {"method": bt.Gradient()}, ()),
    "inputs": (score_eap_ig_inputs, {"method": bt.Gradient(steps=STEPS, rule="left")}, (STEPS,)),
    "activations": (score_eap_ig_activations, {"method": bt.Gradient(steps=STEPS, rule="activations")}, (STEPS,)),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_edge_has_the_score_of_the_formulas(graph, net, method):
    score, options, steps = METHODS[method]
    expected, actual = score(graph, CLEAN, CORRUPT, metric, *steps), sweep(net, **options)
    assert actual.keys() == expected.keys()
    assert max(abs(actual[edge] - expected[edge]) for edge in expected) < 1e-9
    assert max(map(abs, expected.values())) > 0.1


def test_the_other_direction_exchanges_the_runs(graph, net):
    for score, options in ((score_exactly, {}), (score_eap, {"method": bt.Gradient()})):
        expected = score(graph, CORRUPT, CLEAN, metric)
        actual = sweep(net, direction="denoise", **options)
        assert actual.keys() == expected.keys()
        assert max(abs(actual[edge] - expected[edge]) for edge in expected) < 1e-9


def test_lists_of_sentences_are_the_mean_of_single_ones(graph, net):
    expected = [score_eap(graph, CLEAN[k : k + 1], CORRUPT[k : k + 1], metric) for k in range(2)]
    actual = sweep(net, method=bt.Gradient())
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


def make_parallel(net):
    """The net of the weights of a GPT-2 in which the heads and the step of a slice are parallel."""
    (stack,) = net.declaration.stacks
    options = {"norm": "parallel", "activation": "gelu_tanh", "hidden": 32, "dropout": 0}
    (parallel,) = bt.decoder(8, heads=2, slices=3, **options).declaration.stacks
    changed = bt.BNet(replace(net.declaration, stacks=[replace(stack, slice=parallel.slice)]))
    return bt.BNet(changed.network.to(torch.float64).with_parameters(net.parameters))


@pytest.mark.parametrize("change", [lambda net: net, make_parallel])
def test_the_package_reads_a_circuit_of_a_file_as_the_same_graph(graph, net, change, tmp_path):
    declared = change(net)
    clean, corrupt = ([declared.sentence(ids.tolist()) for ids in side] for side in (CLEAN, CORRUPT))
    options = {"metric": {"y_4": (FIRST, SECOND)}, "at": "edges"}
    names = declared.edges()["edge"]
    chosen = names[torch.rand(len(names), generator=torch.Generator().manual_seed(3)).numpy() < 0.7]
    result = bt.circuit(clean, corrupt, **options, edges=list(chosen))
    path = tmp_path / "circuit.json"
    result.to_json(path, scores=bt.sweep(clean, corrupt, **options, direction="noise"))
    content = json.loads(path.read_text())
    package = replace(graph, is_parallel=content["cfg"]["parallel_attn_mlp"])
    assert {*package.edges} == content["edges"].keys()
    retained = [edge for edge, row in content["edges"].items() if row["in_graph"]]
    expected = difference(package.run_circuit(CLEAN, CORRUPT, retained).logits)
    torch.testing.assert_close(result.outcome, expected.detach(), rtol=0, atol=1e-9)
    assert {*read_json(path, declared).edges} == {*chosen}
    content["cfg"]["parallel_attn_mlp"] = not package.is_parallel
    path.write_text(json.dumps(content))
    with pytest.raises(bt.BNetError, match="parallel_attn_mlp"):
        read_json(path, declared)


@pytest.mark.parametrize("is_parallel", [True, False])
def test_files_of_neox_state_whether_its_sublayers_are_parallel(is_parallel, tmp_path):
    net = from_pretrained(init_model("GPTNeoXForCausalLM", {**NEOX, "use_parallel_residual": is_parallel}))
    pair = net.sentence([3, 4, 5]), net.sentence([3, 6, 5])
    result = bt.circuit(*pair, metric={"y_2": (4, 5)}, at="edges", edges="* -> *")
    result.to_json(tmp_path / "circuit.json", scores={})
    assert json.loads((tmp_path / "circuit.json").read_text())["cfg"]["parallel_attn_mlp"] is is_parallel


def test_a_net_of_parallel_and_sequential_slices_has_no_file(tmp_path):
    declaration = bt.decoder(8, heads=2, slices=2, norm="parallel", vocabulary=20).declaration
    (stack,) = declaration.stacks
    total = bt.Node("total", bt.tpm.Add(), ["x", bt.Arrow("mix", slice=0)], ["word"])  # the heads of slice 0
    nodes = [replace(node, parents=["total"]) if node.role == "norm2" else node for node in stack.slice]
    nodes.insert([node.role for node in nodes].index("norm2"), total)
    net = bt.BNet(replace(declaration, stacks=[replace(stack, slice=nodes)]))
    pair = net.sentence([3, 4, 5]), net.sentence([3, 6, 5])
    result = bt.circuit(*pair, metric={"y_2": (4, 5)}, at="edges", edges="* -> *")
    with pytest.raises(bt.BNetError, match=r"a1\.h0->m1"):
        result.to_json(tmp_path / "circuit.json", scores={})
