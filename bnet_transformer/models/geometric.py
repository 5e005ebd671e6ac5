"""Transformers as integrators (B. Brantner et al.): words are vectors of a time series, the columns of Z.

    heads=None    Z -> Z softmax_col(Z^T A Z)  (+ Z)                the words themselves are mixed, by one head
    heads=K       Z -> [P_V^T Z softmax_col((P_Q^T Z)^T (P_K^T Z) / sqrt(d))] of each head, concatenated  (+ Z)
    ResNet        z -> z + s(W z + b), `blocks` times; with heads one more, without s

A column of the softmax belongs to the output word: that word is the *key*, and the softmax runs over the queries.
Compared with Vaswani et al., q and k are exchanged, d is the full width, not that of a head, and there is no `W_o`.
"""

from __future__ import annotations

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Arrow, Declaration, Node, Plate, Stack
from bnet_transformer.errors import BNetError
from bnet_transformer.models._builders import HEADS, WORD, build_observation
from bnet_transformer.tpm import TPM, Attention, Bilinear, Concat, Dot, Given, Linear, ResNet, Weight


def geometric(
    dim: int,
    *,
    slices: int = 2,
    blocks: int = 1,
    heads: int | None = None,
    add: bool = False,
    activation: str = "tanh",
    observe: TPM | None = None,
    seed: int = 0,
) -> BNet:
    """A geometric transformer: `slices` units (L) of attention and `blocks` ResNet steps (n_blocks).

    Without `heads` the words are mixed by their correlation matrix; with them it is the standard transformer
    integrator. `add` adds the words to the output of attention; `observe` is a readout, `Normal(sigma)` or
    `Categorical(n)`, of each word, or pooled.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> bt.geometric(dim=4, slices=1).sentence(x=torch.zeros(3, 4))["x_1_0"].shape
    torch.Size([4])
    """
    dim, blocks = check_int("dim", dim), check_int("blocks", blocks)
    check_choice("add", add, (True, False))
    if heads is None:
        nodes, plates = _build_correlation(dim, add), []
        nodes.append(Node("x", ResNet(blocks, activation), ["a"], WORD))
    else:
        heads = check_int("heads", heads)
        if dim % heads:
            raise BNetError("heads", expected=f"a divisor of dim, which is {dim}", actual=heads)
        nodes, plates = _build_multi_head_attention(dim, heads, add), [Plate("head", heads)]
        nodes.append(Node("resnet", ResNet(blocks, activation), ["mix"], WORD))
        nodes.append(Node("x", ResNet(1, "identity"), ["resnet"], WORD))
    stack = Stack(nodes, [Node("x", Given(dim), plates=WORD)], build_observation(observe), slices=slices)
    return BNet(Declaration([stack], plates=plates, name="geometric"), seed=seed)


def _build_correlation(dim: int, add: bool) -> list[Node]:
    """`Z softmax_col(Z^T A Z)`: the softmax of a word's column runs over the words on the left of A."""
    every = Arrow("x", "every")
    mix = Attention(Bilinear(), over="queries", residual=add)
    return [Node("A", Weight((dim, dim))), Node("a", mix, [every, "x", every, "A", *(["x"] if add else [])], WORD)]


def _build_multi_head_attention(dim: int, heads: int, add: bool) -> list[Node]:
    """A plate of heads, each with its queries, keys and values; their outputs are concatenated."""
    attend = Attention(Dot(dim**-0.5), over="queries")
    return [
        *(Node(f"W_{role}", Weight((dim // heads, dim)), plates=["head"]) for role in "qkv"),
        *(Node(role, Linear(), [f"W_{role}", "x"], HEADS) for role in "qkv"),
        Node("a", attend, [Arrow("q", "every"), "k", Arrow("v", "every")], HEADS),
        Node("mix", Concat(mapped=False, residual=add), ["a", *(["x"] if add else [])], WORD),
    ]
