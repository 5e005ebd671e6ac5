"""Rows of the compiled net: the same work as in another library, with the same weights and equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, ratios, time_calls
from benchmarks.limits import measure_limit
from bnet_transformer.tpm import Add, Affine, Attention, Concat, Dot, FeedForward, Given, Norm, Weight

DIM, HEADS, SLICES, BATCH, WORDS = 384, 12, 6, 8, 128
WORD = ["word"]
PER_HEAD = ["head", "word"]


def encoder_forward() -> list[Figure]:
    """Forward pass of a 6-slice, 384-wide, 12-head concat net with feed-forward (post-norm) on 8 x 128 words, compared
    with `torch.nn.TransformerEncoder` of the same shape and weights; no gradients."""
    module, peer, x = _create_pair()
    with torch.no_grad():
        torch.testing.assert_close(module(x), peer(x), rtol=1e-4, atol=1e-4)
        spent = time_calls({"ours": lambda: module(x), "theirs": lambda: peer(x)}, runs=15)
        return _compare(spent, lambda: module(x))


def encoder_training() -> list[Figure]:
    """Forward and backward pass of the same two modules."""
    module, peer, x = _create_pair()
    run = {"ours": lambda: module(x).sum().backward(), "theirs": lambda: peer(x).sum().backward()}
    return _compare(time_calls(run, runs=11), run["ours"])


def _compare(spent: dict[str, list[float]], job: Callable[[], object]) -> list[Figure]:
    """Return the figures of our times, theirs, their ratio and the limit."""
    return [
        figure("compiled net", spent["ours"], "s"),
        figure("torch.nn.TransformerEncoder", spent["theirs"], "s"),
        figure("ratio", ratios(spent["ours"], spent["theirs"]), "", target=1.05),
        *measure_limit(job, spent["ours"]),
    ]


def _create_pair() -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a torch encoder, its bnet as a module, and input."""
    torch.manual_seed(0)
    slice_ = nn.TransformerEncoderLayer(DIM, HEADS, 4 * DIM, dropout=0.0, batch_first=True)
    peer = nn.TransformerEncoder(slice_, SLICES, enable_nested_tensor=False).train()
    return convert_encoder(peer).module().train(), peer, torch.randn(BATCH, WORDS, DIM)


def convert_encoder(encoder: nn.TransformerEncoder) -> bt.BNet:
    """Return the bnet of a torch encoder, with its weights."""
    first: Any = encoder.layers[0]
    dim, heads, hidden = first.self_attn.embed_dim, first.self_attn.num_heads, first.linear1.out_features
    width = dim // heads
    maps = [bt.Node(f"W_{r}", Weight((width, dim)), plates=["head"]) for r in "qkv"]
    maps += [bt.Node(r, Affine(), [f"W_{r}", "x"], PER_HEAD) for r in "qkv"]
    steps = [
        bt.Node("a", Attention(Dot(None)), ["q", bt.Arrow("k", "every"), bt.Arrow("v", "every")], PER_HEAD),
        bt.Node("W_o", Weight((dim, width)), plates=["head"]),
        bt.Node("mix", Concat(bias=True), ["W_o", "a"], WORD),
        bt.Node("add1", Add(), ["x", "mix"], WORD),
        bt.Node("norm1", Norm(), ["add1"], WORD),
        bt.Node("ffn", FeedForward(hidden), ["norm1"], WORD),
        bt.Node("add2", Add(), ["norm1", "ffn"], WORD),
        bt.Node("x", Norm(), ["add2"], WORD),
    ]
    stack = bt.Stack([*maps, *steps], [bt.Node("x", Given(dim), plates=WORD)], slices=len(encoder.layers))
    net = bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", heads)], name="encoder"))
    parameters: dict[str, Tensor] = {}
    for t, layer in enumerate(encoder.layers):
        weights = {name: value.detach() for name, value in layer.named_parameters()}
        qkv = weights["self_attn.in_proj_weight"].reshape(3, heads, width, dim)
        biases = weights["self_attn.in_proj_bias"].reshape(3, heads, width)
        for k, r in enumerate("qkv"):
            parameters |= {f"W_{r}_{t}.value": qkv[k], f"{r}_{t}.bias": biases[k]}
        parameters |= {
            f"W_o_{t}.value": weights["self_attn.out_proj.weight"].reshape(dim, heads, width).transpose(0, 1),
            f"mix_{t}.bias": weights["self_attn.out_proj.bias"],
            f"norm1_{t}.gain": weights["norm1.weight"],
            f"norm1_{t}.bias": weights["norm1.bias"],
            f"ffn_{t}.weight_in": weights["linear1.weight"],
            f"ffn_{t}.bias_in": weights["linear1.bias"],
            f"ffn_{t}.weight_out": weights["linear2.weight"],
            f"ffn_{t}.bias_out": weights["linear2.bias"],
            f"x_{t + 1}.gain": weights["norm2.weight"],
            f"x_{t + 1}.bias": weights["norm2.bias"],
        }
    return net.replace(parameters)
