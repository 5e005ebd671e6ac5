"""The oracles of edges, compared with the same GPT-2 of transformers under hooks, and with finite differences."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from tests.eap_ig_formulas import (
    EdgeGraph,
    EdgeRuns,
    patch_edge,
    score_clean_corrupted,
    score_eap,
    score_eap_ig_activations,
    score_eap_ig_inputs,
    score_exactly,
)
from tests.huggingface_models import GPT2, D, init_model

CLEAN = torch.tensor([[3, 4, 15, 6, 7], [1, 2, 13, 4, 5]])
CORRUPT = torch.tensor([[3, 8, 5, 6, 17], [19, 7, 8, 9, 10]])
FIRST, SECOND, STEPS = 4, 11, 2


@pytest.fixture(scope="module")
def graph():
    model = init_model("GPT2LMHeadModel", {**GPT2, "n_layer": 3, "n_head": 2, "n_embd": 8, "vocab_size": 20})
    for parameter in model.parameters():
        parameter.data.mul_(2.5)  # so that every kind of edge has an effect
    return EdgeGraph(model)


def difference(logits):
    """The difference of two logits at the last word, for each example."""
    return logits[..., -1, FIRST] - logits[..., -1, SECOND]


def metric(logits):
    return difference(logits).sum()


def run_hooked(model, ids, shifts, fixed=None):
    """The logits of the model of transformers, a row for each edge, `[edge, example, word, token]`.

    In the row of an edge, `shifts[edge]` is added to the input of its reader only. `fixed` sets the outputs of modules.
    """
    body, edges, count = model.transformer, list(shifts), len(ids)
    size, width = model.config.n_embd // model.config.n_head, model.config.n_embd

    def find_shift(reader):
        rows = [shifts[edge] if edge.endswith(f"->{reader}") else torch.zeros_like(shifts[edges[0]]) for edge in edges]
        return torch.cat(rows)

    def shift_input(reader):
        return lambda module, inputs: (inputs[0] + find_shift(reader), *inputs[1:])

    def replace_columns(block, t):
        def hook(module, inputs, output):
            output = output.clone()
            for h in range(model.config.n_head):
                for n, letter in enumerate("qkv"):
                    state = states[t] + find_shift(f"a{t}.h{h}<{letter}>")
                    columns = slice(n * width + h * size, n * width + (h + 1) * size)
                    weight, bias = module.weight[:, columns], module.bias[columns]
                    output[..., columns] = (
                        torch.nn.functional.layer_norm(
                            state, (width,), block.ln_1.weight, block.ln_1.bias, block.ln_1.eps
                        )
                        @ weight
                        + bias
                    )
            return output

        return hook

    states = {}
    with ExitStack() as stack, torch.no_grad():
        for t, block in enumerate(body.h):
            record = lambda module, inputs, t=t: states.__setitem__(t, inputs[0])  # noqa: E731
            stack.enter_context(block.register_forward_pre_hook(record))
            stack.enter_context(block.attn.c_attn.register_forward_hook(replace_columns(block, t)))
            stack.enter_context(block.ln_2.register_forward_pre_hook(shift_input(f"m{t}")))
        stack.enter_context(body.ln_f.register_forward_pre_hook(shift_input("logits")))
        for module, value in (fixed or {}).items():
            constant = value.repeat(len(edges), 1, 1)
            stack.enter_context(module.register_forward_hook(lambda module, inputs, output, c=constant: c))
        logits = model(ids.repeat(len(edges), 1)).logits
    return logits.view(len(edges), count, *logits.shape[1:])


def record_outputs(model, ids):
    """The output of each writer in the model of transformers, and of each module that `fixed` may set."""
    body, size, modules, writers = model.transformer, model.config.n_embd // model.config.n_head, {}, {}

    def record(module, inputs, output):
        modules[module] = output

    def record_heads(t):
        def hook(module, inputs, output):
            modules[module] = output
            for h in range(model.config.n_head):
                columns = slice(h * size, (h + 1) * size)
                writers[f"a{t}.h{h}"] = inputs[0][..., columns] @ module.weight[columns]

        return hook

    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(body.wte.register_forward_hook(record))
        for t, block in enumerate(body.h):
            stack.enter_context(block.attn.c_proj.register_forward_hook(record_heads(t)))
            stack.enter_context(block.mlp.register_forward_hook(record))
        model(ids)
    writers["input"] = modules[body.wte]
    return writers | {f"m{t}": modules[block.mlp] for t, block in enumerate(body.h)}, modules


def list_shifts(graph):
    """The difference `corrupt - clean` of the writer of each edge."""
    clean, corrupt = (record_outputs(graph.model, ids)[0] for ids in (CLEAN, CORRUPT))
    return {edge: corrupt[edge.split("->")[0]] - clean[edge.split("->")[0]] for edge in graph.edges}


def score_by_differences(graph, runs, size=1e-5):
    """The mean derivative of exact patching over runs with fixed modules, by central finite differences."""
    shifts, total = list_shifts(graph), 0
    for fixed in runs:
        ends = [
            difference(run_hooked(graph.model, CLEAN, {e: sign * size * v for e, v in shifts.items()}, fixed))
            for sign in (1, -1)
        ]
        total = total + (ends[0] - ends[1]).mean(1) / (2 * size)
    return dict(zip(shifts, (total / len(runs)).tolist(), strict=True))


def assert_equal(actual, expected, tolerance):
    assert list(actual) == list(expected)
    error = max(abs(actual[edge] - expected[edge]) for edge in expected)
    assert error < tolerance
    assert max(map(abs, expected.values())) > 0.1


def interpolate(module, share):
    """Set a module to `share` of its clean output and the remainder of its corrupt output."""
    clean, corrupt = (record_outputs(module[0], ids)[1][module[1]] for ids in (CLEAN, CORRUPT))
    return {module[1]: share * clean + (1 - share) * corrupt}


def test_the_graph_computes_the_logits_of_the_model(graph):
    for ids in (CLEAN, CORRUPT):
        torch.testing.assert_close(graph.run(ids).logits, graph.model(ids).logits, rtol=1e-11, atol=1e-11)
    assert graph.run(CLEAN).logits.dtype == D
    writers, _ = record_outputs(graph.model, CLEAN)
    outputs = graph.run(CLEAN).outputs
    for writer in set(writers) - {"input"}:
        torch.testing.assert_close(outputs[writer], writers[writer], rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_the_edges_of_gpt2_small_are_those_of_the_package(graph):
    config = SimpleNamespace(n_layer=12, n_head=12)
    by_layer = [36 * (1 + 13 * t) + 13 * (1 + t) for t in range(12)]
    assert len(EdgeGraph(SimpleNamespace(config=config)).edges) == sum(by_layer) + 157 == 32491
    assert {"input->a0.h0<q>", "a0.h1->m0", "m1->a2.h0<v>", "m2->logits"} <= set(graph.edges)
    assert not {"a0.h1->a0.h0<k>", "m0->m0", "m1->a1.h0<q>"} & set(graph.edges)


@pytest.mark.slow
def test_exact_patching_of_every_edge_is_a_run_of_the_model_under_hooks(graph):
    expected = run_hooked(graph.model, CLEAN, list_shifts(graph))
    logits = torch.stack([patch_edge(graph, CLEAN, CORRUPT, edge) for edge in graph.edges])
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    effects = (difference(expected) - difference(graph.model(CLEAN).logits)).mean(1)
    scores = score_exactly(graph, CLEAN, CORRUPT, metric)
    assert_equal(scores, dict(zip(graph.edges, effects.tolist(), strict=True)), 1e-10)


def test_eap_is_the_derivative_of_exact_patching(graph):
    assert_equal(score_eap(graph, CLEAN, CORRUPT, metric), score_by_differences(graph, [{}]), 1e-7)


def test_eap_is_the_gradient_of_shares_of_the_corrupt_run(graph):
    runs = EdgeRuns(graph, CLEAN, CORRUPT, difference)
    shares = torch.ones(len(graph.edges), dtype=D, requires_grad=True)
    (gradient,) = torch.autograd.grad(runs.evaluate_with_grad(shares).mean(), shares)
    assert_equal(
        score_eap(graph, CLEAN, CORRUPT, metric), dict(zip(graph.edges, (-gradient).tolist(), strict=True)), 1e-10
    )


@pytest.mark.slow
def test_eap_ig_of_inputs_is_the_mean_derivative_at_interpolated_embeddings_without_the_clean_end(graph):
    words = (graph.model, graph.model.transformer.wte)
    runs = [interpolate(words, k / STEPS) for k in range(STEPS)]
    scores = score_eap_ig_inputs(graph, CLEAN, CORRUPT, metric, STEPS)
    assert_equal(scores, score_by_differences(graph, runs), 1e-7)


@pytest.mark.slow
def test_eap_ig_of_activations_is_the_mean_derivative_over_all_fixed_modules_without_the_corrupt_end(graph):
    body = graph.model.transformer
    modules = [body.wte, *(module for block in body.h for module in (block.attn.c_proj, block.mlp))]
    runs = [interpolate((graph.model, module), k / STEPS) for module in modules for k in (1, 2)]
    scores = score_eap_ig_activations(graph, CLEAN, CORRUPT, metric, STEPS)
    assert_equal(scores, score_by_differences(graph, runs), 1e-7)


def test_the_mean_of_both_ends(graph):
    words = (graph.model, graph.model.transformer.wte)
    runs = [interpolate(words, share) for share in (0, 1)]
    assert_equal(score_clean_corrupted(graph, CLEAN, CORRUPT, metric), score_by_differences(graph, runs), 1e-7)


@pytest.mark.slow
def test_integrated_gradients_of_the_edges_from_the_input_add_up_to_the_difference_of_the_runs(graph):
    def add_up(scores):
        return sum(score for edge, score in scores.items() if edge.startswith("input->"))

    steps = 128
    left = add_up(score_eap_ig_inputs(graph, CLEAN, CORRUPT, metric, steps))
    at_corrupt, at_clean = (
        add_up(score_eap_ig_inputs(graph, CLEAN, CORRUPT, metric, 1)),
        add_up(score_eap(graph, CLEAN, CORRUPT, metric)),
    )
    trapezoids = left + (at_clean - at_corrupt) / (2 * steps)
    with torch.no_grad():
        expected = float((difference(graph.model(CORRUPT).logits) - difference(graph.model(CLEAN).logits)).mean())
    assert abs(trapezoids - expected) < 1e-3 * abs(expected)


def test_a_circuit_reads_the_corrupt_run_outside_of_it(graph):
    def logits(retained):
        return graph.run_circuit(CLEAN, CORRUPT, retained).logits

    all_edges, edge = set(graph.edges), "a0.h1->a2.h0<k>"
    torch.testing.assert_close(logits(all_edges), graph.run(CLEAN).logits, rtol=0, atol=1e-11)
    torch.testing.assert_close(logits(()), graph.run(CORRUPT).logits, rtol=0, atol=1e-11)
    torch.testing.assert_close(logits(all_edges - {edge}), patch_edge(graph, CLEAN, CORRUPT, edge), rtol=0, atol=1e-11)
    direct = graph.run(CORRUPT)
    ends = logits({"input->logits"})  # the readout sees the corrupt state, with the clean embedding
    state = direct.inputs["logits"] + graph.run(CLEAN).outputs["input"] - direct.outputs["input"]
    expected = graph.model.lm_head(graph.model.transformer.ln_f(state))
    torch.testing.assert_close(ends, expected, rtol=0, atol=1e-11)
