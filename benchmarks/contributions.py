"""Contributions of all heads of a model of the size of SmolLM2-135M, against a loop over hooks."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, measure_peak, ratios, time_calls
from bnet_transformer.pretrained import from_pretrained

WORDS, STATES, PAIR = 32, 49152, (5, 9)
RUNS = 5
PEAKS = {"contributions": "actual", "paths of two": "paths", "scores": "scores"}
SIZES = {
    "vocab_size": STATES,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}


@cache
def make_models() -> tuple[Any, bt.BNet, list[int]]:
    """Return a Llama of the size of SmolLM2-135M with random weights, its net, and the ids of a sentence."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval().requires_grad_(False)
    return model, from_pretrained(model), torch.randint(0, STATES, (WORDS,)).tolist()


@torch.no_grad()
def attribute_with_hooks(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the parts of all heads in the difference of two logits, `[slice, head]`, by one hook for each slice."""
    captured: list[torch.Tensor] = []
    layers, norm = model.model.layers, model.model.norm
    handles = [
        layer.self_attn.o_proj.register_forward_hook(lambda _, args, output: captured.append(args[0]))
        for layer in layers
    ]
    handles.append(norm.register_forward_hook(lambda _, args, output: captured.append(args[0])))
    model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    x, heads = captured.pop()[0, -1], model.config.num_attention_heads
    u = norm.weight * (model.lm_head.weight[PAIR[0]] - model.lm_head.weight[PAIR[1]])
    u = u / (x.square().mean() + norm.variance_epsilon).sqrt()
    rows = []
    for layer, mix in zip(layers, captured, strict=True):
        maps = layer.self_attn.o_proj.weight.reshape(len(u), heads, -1)
        parts = mix[0, -1].reshape(heads, -1)
        rows.append(torch.stack([u @ (maps[:, h] @ parts[h]) for h in range(heads)]))
    return torch.stack(rows)


def contributions_of_all_heads() -> list[Figure]:
    """`contributions` to the difference of two logits, of all writers and words, in a random model of the size of
    SmolLM2-135M (30 slices, 9 heads) at 32 words, over a loop over hooks in `transformers` that computes the parts of
    the heads only.
    """
    model, net, ids = make_models()
    node = f"logits_{WORDS - 1}"
    result = net.sentence(ids).contributions(node, of=PAIR)
    heads = torch.stack([result[f"a_{t}_{h // 3}_{h % 3}"] for t in range(30) for h in range(9)])
    torch.testing.assert_close(heads, attribute_with_hooks(model, ids).flatten(), rtol=1e-3, atol=1e-5)
    calls = {
        "actual": lambda: net.sentence(ids).contributions(node, of=PAIR),
        "hooks": lambda: attribute_with_hooks(model, ids),
        "forward": lambda: net.sentence(ids)[node],
        "paths": lambda: net.sentence(ids).contributions(node, of=PAIR, paths=2),
        "scores": lambda: net.sentence(ids).contributions(f"j_29_0_0_{WORDS - 1}"),
    }
    times = time_calls(calls, RUNS)
    return [
        figure("time over a loop over hooks", ratios(times["actual"], times["hooks"]), ""),
        figure("time over a forward pass of the net", ratios(times["actual"], times["forward"]), ""),
        figure("contributions", times["actual"], "s"),
        figure("paths of two, 270 heads", times["paths"], "s"),
        figure("scores of one row in slice 29", times["scores"], "s"),
        *(figure(f"peak memory of {name}", measure_peak(calls[key]), "MB") for name, key in PEAKS.items()),
    ]
