"""Sweeps over edges, and files of circuits, against the GPT-2 of transformers under hooks (EAP, EAP-IG, MIB)."""

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

import bnet_transformer as bt
from benchmarks.edges import convert_name
from bnet_transformer.interventions.circuit import read_json
from bnet_transformer.pretrained import from_pretrained
from tests.huggingface_models import GPT2, NEOX, init_model

CLEAN = torch.tensor([[3, 4, 15, 6, 7], [1, 2, 13, 4, 5]])
CORRUPT = torch.tensor([[3, 8, 5, 6, 17], [19, 7, 8, 9, 10]])
FIRST, SECOND, STEPS = 4, 11, 2
OPTIONS = {"metric": {"y_4": (FIRST, SECOND)}, "at": "edges"}


@pytest.fixture(scope="module")
def model():
    model = init_model("GPT2LMHeadModel", {**GPT2, "n_layer": 3, "n_head": 2, "n_embd": 8, "vocab_size": 20})
    for parameter in model.parameters():
        parameter.data.mul_(2.5)  # so that every kind of edge has an effect
    return model


@pytest.fixture(scope="module")
def net(model):
    return from_pretrained(model)


def make_sides(net):
    return [[net.sentence(ids.tolist()) for ids in side] for side in (CLEAN, CORRUPT)]


def sweep(net, sides=None, direction="noise", **options):
    """The mean effect of each edge, by its name in the package EAP-IG."""
    result = bt.sweep(*(sides or make_sides(net)), direction=direction, **OPTIONS, **options)
    return {convert_name(name): float(result.values[index]) for index, name in result.names.items()}


def difference(logits):
    """The difference of two logits at the last word, for each example."""
    return logits[..., -1, FIRST] - logits[..., -1, SECOND]


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


def measure(model, edges, sides=(CLEAN, CORRUPT), size=1.0, fixed=None):
    """The mean effect of the patch of each edge, times `size`, in a run with fixed modules; by central differences.

    With `size=None`, the effect of the full patch.
    """
    clean, corrupt = (record_outputs(model, ids)[0] for ids in sides)
    shifts = {edge: corrupt[edge.split("->")[0]] - clean[edge.split("->")[0]] for edge in edges}
    if size is None:
        values = difference(run_hooked(model, sides[0], shifts)) - difference(model(sides[0]).logits)
    else:
        one, two = (
            difference(run_hooked(model, sides[0], {e: s * size * v for e, v in shifts.items()}, fixed))
            for s in (1, -1)
        )
        values = (one - two) / (2 * size)
    return values.mean(1).detach()


def interpolate(model, module, share):
    """Set a module to `share` of its clean output and the remainder of its corrupt output."""
    clean, corrupt = (record_outputs(model, ids)[1][module] for ids in (CLEAN, CORRUPT))
    return {module: share * clean + (1 - share) * corrupt}


def list_runs(model, rule):
    """The fixed modules of each run of EAP-IG: the words without the clean end, or each module without the corrupt."""
    body = model.transformer
    if rule == "left":
        return [interpolate(model, body.wte, k / STEPS) for k in range(STEPS)]
    modules = [body.wte, *(module for block in body.h for module in (block.attn.c_proj, block.mlp))]
    return [interpolate(model, module, k / STEPS) for module in modules for k in range(1, STEPS + 1)]


@pytest.mark.parametrize("direction", ["noise", "denoise"])
def test_exact_effects_are_those_of_hooks(model, net, direction):
    actual = sweep(net, direction=direction)
    expected = measure(model, actual, (CLEAN, CORRUPT) if direction == "noise" else (CORRUPT, CLEAN), None)
    torch.testing.assert_close(torch.tensor([*actual.values()], dtype=torch.float64), expected, rtol=0, atol=1e-9)
    assert float(expected.abs().max()) > 0.1


@pytest.mark.parametrize(
    "rule", [None, *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("left", "activations"))]
)
def test_estimates_are_the_mean_derivative_of_exact_effects(model, net, rule):
    method = bt.Gradient() if rule is None else bt.Gradient(steps=STEPS, rule=rule)
    actual, runs = sweep(net, method=method), [None] if rule is None else list_runs(model, rule)
    expected = torch.stack([measure(model, actual, size=1e-5, fixed=fixed) for fixed in runs]).mean(0)
    torch.testing.assert_close(torch.tensor([*actual.values()], dtype=torch.float64), expected, rtol=0, atol=1e-7)


def make_parallel(net):
    """The net of the weights of a GPT-2 in which the heads and the step of a slice are parallel."""
    (stack,) = net.declaration.stacks
    options = {"norm": "parallel", "activation": "gelu_tanh", "hidden": 32, "dropout": 0}
    (parallel,) = bt.decoder(8, heads=2, slices=3, **options).declaration.stacks
    changed = bt.BNet(replace(net.declaration, stacks=[replace(stack, slice=parallel.slice)]))
    return bt.BNet(changed.network.to(torch.float64).with_parameters(net.parameters))


@pytest.mark.parametrize("change", [lambda net: net, make_parallel])
def test_a_file_of_a_circuit_has_the_edges_of_the_package(net, change, tmp_path):
    declared = change(net)
    sides, names = make_sides(declared), declared.edges()["edge"]
    chosen = names[torch.rand(len(names), generator=torch.Generator().manual_seed(3)).numpy() < 0.7]
    result, path = bt.circuit(*sides, **OPTIONS, edges=list(chosen)), tmp_path / "circuit.json"
    result.to_json(path, scores=bt.sweep(*sides, **OPTIONS, direction="noise"))
    content = json.loads(path.read_text())
    is_parallel = content["cfg"]["parallel_attn_mlp"]
    expected, writers = set(), ["input"]
    for t in range(3):
        heads = [f"a{t}.h{h}" for h in range(2)]
        expected |= {f"{writer}->{head}<{channel}>" for writer in writers for head in heads for channel in "qkv"}
        expected |= {f"{writer}->m{t}" for writer in (writers if is_parallel else writers + heads)}
        writers += [*heads, f"m{t}"]
    assert content["edges"].keys() == expected | {f"{writer}->logits" for writer in writers}
    assert {*read_json(path, declared).edges} == {*chosen}
    content["cfg"]["parallel_attn_mlp"] = not is_parallel
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
