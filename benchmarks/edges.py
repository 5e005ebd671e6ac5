"""Rows of edges: all writer-to-reader edges of a GPT-2-shaped net, compared with the formulas of EAP-IG in plain torch
and with TransformerLens on the same weights.

Edges are those of github.com/hannamw/EAP-IG at commit 795f560: writers are the input, the heads and the feed-forward
steps; readers are q, k, v of each head, the feed-forward steps and the readout; one edge stands for all words.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, ratios, time_calls
from benchmarks.limits import measure_limit
from benchmarks.sweeps import create_bridge, create_prompts, is_lens_missing

FIRST, SECOND = 17, 703  # the words whose logits the metric compares at the last word
VOCABULARY = 1000  # small, so that the readout costs little
SAMPLED = 24  # edges of the loop over hooks


@dataclass(frozen=True)
class Nets:
    """A random GPT-2 (fixed seed) in transformers, here and in TransformerLens, and clean and corrupt prompts."""

    model: Any
    net: Any
    bridge: Any
    clean: Tensor
    corrupt: Tensor

    @classmethod
    def create(cls, slices: int, heads: int, dim: int, words: int, count: int) -> Nets:
        """Create the nets, with a spread of weights at which all edges have an effect."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers

            transformers.logging.set_verbosity_error()
            torch.manual_seed(0)
            sizes = {"n_embd": dim, "n_layer": slices, "n_head": heads, "n_positions": 64, "vocab_size": VOCABULARY}
            tokens = {"bos_token_id": 0, "eos_token_id": 0}
            model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens)).eval()
            for parameter in model.parameters():
                parameter.requires_grad_(False)
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=dim**-0.5)
            bridge = create_bridge(copy.deepcopy(model), VOCABULARY, "cpu")
        bridge.eval()
        bridge.set_use_split_qkv_input(True)
        bridge.set_use_attn_result(True)
        bridge.set_use_hook_mlp_in(True)
        return cls(model, bt.from_pretrained(model), bridge, *create_prompts(words, VOCABULARY, count))

    @property
    def metric(self) -> Mapping[str, tuple[int, int]]:
        """log P(first) - log P(second) at the last word, which is the difference of their logits."""
        return {f"y_{self.clean.shape[1] - 1}": (FIRST, SECOND)}


def compute_difference(logits: Tensor) -> Tensor:
    """Return the metric of each prompt."""
    return logits[:, -1, FIRST] - logits[:, -1, SECOND]


def list_edges(slices: int, heads: int) -> list[tuple[str, str]]:
    """Return the writer and the reader of each edge, named as in EAP-IG and MIB."""
    result, writers = [], ["input"]
    for t in range(slices):
        layer = [f"a{t}.h{h}" for h in range(heads)]
        readers = [f"{head}<{letter}>" for letter in "qkv" for head in layer]
        result += [(writer, reader) for reader in readers for writer in writers]
        writers += layer
        result += [(writer, f"m{t}") for writer in writers]
        writers.append(f"m{t}")
    return [*result, *((writer, "logits") for writer in writers)]


# ---------------------------------------------------------------- the package


def run_package_edges(nets: Nets, *, first_order: bool) -> Any:
    """Return the sweep over all edges from new sentences: to first order at the clean run, or exactly."""
    clean, corrupt = ([nets.net.sentence(row.tolist()) for row in ids] for ids in (nets.clean, nets.corrupt))
    options: dict[str, Any] = {"metric": nets.metric, "direction": "noise"}
    if first_order:
        return bt.sweep(clean, corrupt, at="edges", method=bt.Gradient(), **options)
    return bt.sweep(clean, corrupt, at="edges", **options)


def convert_name(name: str) -> str:
    """Return the name in MIB of an edge of a GPT-2 of ours.

    >>> convert_name("a_0_1 -> q_2_3"), convert_name("embed -> ffn_1"), convert_name("ffn_3 -> y")
    ('a0.h1->a2.h3<q>', 'input->m1', 'm3->logits')
    """
    ends = []
    for end in name.split(" -> "):
        role, *position = end.split("_")
        if role in ("a", "q", "k", "v"):
            ends.append("a{}.h{}".format(*position) + ("" if role == "a" else f"<{role}>"))
        else:
            ends.append({"embed": "input", "y": "logits"}.get(role) or f"m{position[0]}")
    return "->".join(ends)


def list_package_scores(result: Any) -> dict[str, float]:
    """Return the mean effect of each edge over the prompts, by its name in MIB."""
    values = result.values
    return {convert_name(name): float(values[index]) for index, name in result.names.items()}


# ---------------------------------------------------------------- plain torch


def run_split(
    model: Any, ids: Tensor, shifts: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the logits, the outputs of all writers, `[prompt, word, writer, feature]`, and the inputs of readers.

    The queries, keys and values of a head have separate inputs before the norm, as with TransformerLens'
    `use_split_qkv_input`: `{"q_0": [prompt, word, head, feature], ..., "m_0": [prompt, word, 1, feature]}`. `shifts`
    adds to them.
    """
    body, shifts = model.transformer, shifts or {}
    count, dim, words = model.config.n_head, model.config.n_embd, ids.shape[1]
    x = body.wte(ids) + body.wpe(torch.arange(words))
    x = x if x.requires_grad else x.requires_grad_()
    is_later = torch.ones(words, words).triu(1).bool()
    writers, inputs = [x.unsqueeze(2)], {}

    def read(reader: str, state: Tensor, copies: int, norm: Any) -> Tensor:
        inputs[reader] = state.unsqueeze(2).repeat(1, 1, copies, 1) + shifts.get(reader, 0.0)
        return norm(inputs[reader])

    for t, block in enumerate(body.h):
        weight, bias = block.attn.c_attn.weight.view(dim, 3, count, -1), block.attn.c_attn.bias.view(3, count, -1)
        q, k, v = (
            torch.einsum("ewhf,fhs->ehws", read(f"{s}_{t}", x, count, block.ln_1), weight[:, n]) + bias[n, :, None]
            for n, s in enumerate("qkv")
        )
        scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(is_later, -torch.inf)
        mixed = scores.softmax(-1) @ v
        heads = torch.einsum("ehws,hsf->ewhf", mixed, block.attn.c_proj.weight.view(count, -1, dim))
        x = x + heads.sum(2) + block.attn.c_proj.bias
        step = block.mlp(read(f"m_{t}", x, 1, block.ln_2).squeeze(2))
        x = x + step
        writers += [heads, step.unsqueeze(2)]
    logits = model.lm_head(read("logits", x, 1, body.ln_f).squeeze(2))
    return logits, torch.cat(writers, 2), inputs


def name_inputs(inputs: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return for each tensor of inputs the names of its readers in MIB."""
    result = {}
    for key, value in inputs.items():
        role, _, t = key.partition("_")
        names = [f"a{t}.h{h}<{role}>" for h in range(value.shape[2])] if role in "qkv" else [f"m{t}"]
        result[key] = ["logits"] if key == "logits" else names
    return result


def list_writers(slices: int, heads: int) -> list[str]:
    """Return the names of the writers in MIB, in the order of `run_split`."""
    layers = ([*(f"a{t}.h{h}" for h in range(heads)), f"m{t}"] for t in range(slices))
    return ["input", *(writer for layer in layers for writer in layer)]


def score_plainly(nets: Nets) -> dict[str, float]:
    """Return EAP by the formulas of EAP-IG: two forwards, one backward, one product for each group of readers."""
    with torch.no_grad():
        _, corrupt, _ = run_split(nets.model, nets.corrupt)
    logits, clean, inputs = run_split(nets.model, nets.clean)
    gradients = torch.autograd.grad(compute_difference(logits).sum(), tuple(inputs.values()))
    change = corrupt - clean.detach()
    return _contract(nets, change, dict(zip(inputs, gradients, strict=True)))


def _contract(nets: Nets, change: Tensor, gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the products of the changes of writers and the gradients at readers, for each edge."""
    config = nets.model.config
    writers = list_writers(config.n_layer, config.n_head)
    result = {}
    for key, names in name_inputs(gradients).items():
        role, _, t = key.partition("_")
        before = 1 + (config.n_head + 1) * int(t) + (config.n_head if role == "m" else 0) if t else len(writers)
        scores = torch.einsum("ewuf,ewrf->ru", change[:, :, :before], gradients[key]) / len(nets.clean)
        for name, row in zip(names, scores.tolist(), strict=True):
            result |= {f"{writer}->{name}": score for writer, score in zip(writers, row, strict=False)}
    return result


# ---------------------------------------------------------------- TransformerLens


def find_hooks(slices: int) -> tuple[list[str], dict[str, str]]:
    """Return the hooks of writers in the order of `run_split`, and the hook of each of its inputs."""
    writers, readers = ["hook_embed"], {}
    for t in range(slices):
        readers |= {f"{letter}_{t}": f"blocks.{t}.attn.hook_{letter}_input" for letter in "qkv"}
        readers[f"m_{t}"] = f"blocks.{t}.hook_mlp_in"
        writers += [f"blocks.{t}.attn.hook_result", f"blocks.{t}.hook_mlp_out"]
    return writers, {**readers, "logits": f"blocks.{slices - 1}.hook_resid_post"}


def record_writers(nets: Nets, ids: Tensor) -> Tensor:
    """Return the outputs of all writers, `[prompt, word, writer, feature]`."""
    hooks, _ = find_hooks(nets.model.config.n_layer)
    outputs: dict[str, Tensor] = {}

    def record(name: str, value: Tensor, hook: Any) -> None:
        outputs[name] = value if value.dim() == 4 else value.unsqueeze(2)

    recorders = [(name, functools.partial(record, name)) for name in hooks]
    with torch.no_grad(), nets.bridge.hooks(fwd_hooks=recorders):
        nets.bridge(ids)
    return torch.cat([outputs[name] for name in hooks], 2)


def score_by_hooks(nets: Nets) -> dict[str, float]:
    """Return EAP by hooks of TransformerLens, in the form of EAP-IG: two forwards, one forward and backward."""
    _, hooks = find_hooks(nets.model.config.n_layer)
    change = record_writers(nets, nets.corrupt) - record_writers(nets, nets.clean)
    gradients: dict[str, Tensor] = {}

    def start(value: Tensor, hook: Any) -> Tensor:
        return value.detach().requires_grad_()  # gradients of activations, not of parameters

    def record(key: str, gradient: Tensor, hook: Any) -> None:
        gradients[key] = gradient if gradient.dim() == 4 else gradient.unsqueeze(2)

    backward = [(name, functools.partial(record, key)) for key, name in hooks.items()]
    with nets.bridge.hooks(fwd_hooks=[("hook_embed", start)], bwd_hooks=backward):
        compute_difference(nets.bridge(nets.clean)).sum().backward()
    return _contract(nets, change, gradients)


def score_by_attribution_patch(nets: Nets) -> dict[str, float]:
    """Return the edges of `attribution_patch`, added up over words: the gradient at the corrupt run, clean - corrupt.

    It scores each edge at each word and each prompt separately.
    """
    from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig, attribution_patch

    config = EdgeAttributionConfig(granularity="edge")
    nets.bridge.requires_grad_()  # it computes gradients at the embeddings
    scores = attribution_patch(
        nets.bridge, nets.clean, nets.corrupt, lambda logits: compute_difference(logits).sum(), config
    ).edge_scores
    nets.bridge.requires_grad_(False)
    result: dict[str, float] = {}
    for (writer, reader), score in scores.items():
        edge = f"{_name_node(writer)}->{_name_node(reader)}"
        result[edge] = result.get(edge, 0.0) + score
    return result


def _name_node(node: Any) -> str:
    """Return the name in MIB of a node of TransformerLens."""
    if node.head is None:
        return {"embed": "input", "logits": "logits"}.get(node.kind) or f"m{node.layer}"
    return f"a{node.layer}.h{node.head}" + ("" if node.kind == "attn_head_out" else f"<{node.kind[0]}>")


def patch_by_hooks(nets: Nets, edges: list[tuple[str, str]]) -> dict[str, float]:
    """Return the exact effect of these edges, one forward for each, by hooks at the split inputs."""
    config = nets.model.config
    writers, (_, hooks) = list_writers(config.n_layer, config.n_head), find_hooks(config.n_layer)
    change = record_writers(nets, nets.corrupt) - record_writers(nets, nets.clean)
    result = {}
    with torch.no_grad():
        base = compute_difference(nets.bridge(nets.clean))
        for writer, reader in edges:
            key, head = find_input(reader)
            shift = change[:, :, writers.index(writer)]

            def patch(value: Tensor, hook: Any, shift: Tensor = shift, head: int | None = head) -> Tensor:
                if head is None:
                    return value + shift
                value = value.clone()
                value[:, :, head] += shift
                return value

            with nets.bridge.hooks(fwd_hooks=[(hooks[key], patch)]):
                effect = compute_difference(nets.bridge(nets.clean)) - base
            result[f"{writer}->{reader}"] = float(effect.mean())
    return result


def find_input(reader: str) -> tuple[str, int | None]:
    """Return the input of `run_split` of a reader, and its head.

    >>> find_input("a2.h3<q>"), find_input("m1"), find_input("logits")
    (('q_2', 3), ('m_1', None), ('logits', None))
    """
    if reader == "logits":
        return reader, None
    if reader.startswith("m"):
        return f"m_{reader[1:]}", None
    t, h = reader[1:-3].split(".h")
    return f"{reader[-2]}_{t}", int(h)


def patch_plainly(nets: Nets, edges: list[tuple[str, str]]) -> dict[str, float]:
    """Return the exact effect of these edges in plain torch, one forward for each."""
    config = nets.model.config
    writers, result = list_writers(config.n_layer, config.n_head), {}
    with torch.no_grad():
        logits, clean, inputs = run_split(nets.model, nets.clean)
        change = run_split(nets.model, nets.corrupt)[1] - clean
        base = compute_difference(logits)
        for writer, reader in edges:
            key, head = find_input(reader)
            shift = torch.zeros_like(inputs[key])
            shift[:, :, head or 0] = change[:, :, writers.index(writer)]
            effect = compute_difference(run_split(nets.model, nets.clean, {key: shift})[0]) - base
            result[f"{writer}->{reader}"] = float(effect.mean())
    return result


# ---------------------------------------------------------------- rows


def check_scores(actual: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Raise an error if scores differ by more than 1e-3 of the largest."""
    assert actual.keys() == expected.keys(), "the edges differ"
    scale = max(map(abs, expected.values()))
    error = max(abs(actual[edge] - expected[edge]) for edge in expected)
    assert error < 1e-3 * scale, f"scores differ by {error / scale:.1e} of the largest"


def all_edges_to_first_order() -> list[Figure]:
    """All 32,491 edges of a net of the shape of GPT-2 small (12 slices, 12 heads, 768 wide, random weights, vocabulary
    1,000, float32, one prompt of 32 words) to first order:
    `bt.sweep(at="edges", method=bt.Gradient(), direction="noise")` from new sentences, compared with the formulas of
    EAP-IG (commit 795f560) in plain torch (two forwards and one backward, separate inputs of q, k and v, one product
    for each group of readers), and with the same by hooks of TransformerLens (three forwards and one backward, as
    EAP-IG computes them). Scores agree to 1e-3 of the largest. The forward passes of `transformers` and of the compiled
    net show the scale."""
    if is_lens_missing():
        return []
    nets = Nets.create(slices=12, heads=12, dim=768, words=32, count=1)
    expected = score_plainly(nets)
    check_scores(score_by_hooks(nets), expected)
    check_scores(list_package_scores(run_package_edges(nets, first_order=True)), expected)
    module = nets.net.module().eval()
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: run_package_edges(nets, first_order=True),
        "formulas of EAP-IG in plain torch": lambda: score_plainly(nets),
        "hooks of TransformerLens": lambda: score_by_hooks(nets),
        "forward, ours": _without_gradients(lambda: module(nets.clean)),
        "forward, transformers": _without_gradients(lambda: nets.model(nets.clean)),
    }
    spent = time_calls(calls, runs=5)
    rows = [figure(name, seconds, "s") for name, seconds in spent.items()]
    peers = list(calls)[1:3]
    rows += [figure(f"ratio to {name}", ratios(spent["ours"], spent[name]), "") for name in peers]
    rows.append(
        figure("ratio to the forward of transformers", ratios(spent["ours"], spent["forward, transformers"]), "")
    )
    return [*rows, *measure_limit(calls["ours"], spent["ours"])]


def exact_edges() -> list[Figure]:
    """The exact effect of edges of a smaller net (4 slices, 4 heads, 64 wide, 8 prompts of 16 words): all edges by
    `bt.sweep(at="edges", direction="noise")`, compared with a loop over hooks of TransformerLens and a loop in plain
    torch, which run one forward for each of 24 sampled edges; seconds for each edge. Effects agree to 1e-3 of the
    largest."""
    if is_lens_missing():
        return []
    nets = Nets.create(slices=4, heads=4, dim=64, words=16, count=8)
    edges = list_edges(4, 4)
    sampled = [edges[k] for k in torch.randperm(len(edges), generator=torch.Generator().manual_seed(0))[:SAMPLED]]
    expected = patch_plainly(nets, sampled)
    check_scores(patch_by_hooks(nets, sampled), expected)
    scores = list_package_scores(run_package_edges(nets, first_order=False))
    check_scores({edge: scores[edge] for edge in expected}, expected)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: run_package_edges(nets, first_order=False),
        "loop over hooks of TransformerLens": lambda: patch_by_hooks(nets, sampled),
        "loop in plain torch": lambda: patch_plainly(nets, sampled),
    }
    spent = time_calls(calls, runs=5)
    counts = dict.fromkeys(calls, SAMPLED) | {"ours": len(edges)}
    times = {name: [1000 * value / counts[name] for value in seconds] for name, seconds in spent.items()}
    rows = [figure(f"all {len(edges)} edges: ours", spent["ours"], "s")]
    rows += [figure(f"one edge: {name}", values, "ms") for name, values in times.items()]
    rows += [figure(f"ratio to {name}", ratios(times["ours"], times[name]), "") for name in list(calls)[1:]]
    return [*rows, *measure_limit(calls["ours"], spent["ours"])]


def _without_gradients(call: Callable[[], object]) -> Callable[[], object]:
    """Return a call without gradients."""

    def run() -> object:
        with torch.no_grad():
            return call()

    return run
