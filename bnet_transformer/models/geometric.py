"""Transformers as integrators (B. Brantner et al.): words are vectors of a time series, the columns of Z.

    heads=None    Z -> Z softmax_col(Z^T A Z)  (+ Z)                one head, which mixes the words themselves
    heads=K       Z -> [P_V^T Z softmax_col((P_Q^T Z)^T (P_K^T Z) / sqrt(d))] of each head, concatenated  (+ Z)
    ResNet        z -> z + s(W z + b), `blocks` times; with heads one more step, without s

A column of the softmax belongs to an output word. This word is the *key*, and the softmax runs over the queries.
Compared with Vaswani et al., q and k are exchanged, d is the full width and not that of a head, and there is no `W_o`.
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
    """A geometric transformer: slices of attention, each followed by ResNet steps.

    Args:
        dim: The width of a word, which is a vector.
        slices: The number of slices (L), each with attention and ResNet steps. Default 2.
        blocks: The number of ResNet steps in each slice (n_blocks). Default 1.
        heads: The number of heads, a divisor of `dim`, for the standard transformer integrator. None (default): the
            words are mixed by their correlation matrix `Z^T A Z`.
        add: Whether the words are added to the output of attention. Default False.
        activation: The activation of the ResNet steps. Default `"tanh"`.
        observe: A readout `y` of each word, `Normal(sigma)` or `Categorical(n)`; with its option `pool`, of the
            sentence. None (default) for no readout.
        seed: The seed of the initial parameters. Default 0.

    Returns:
        The net.

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
    """The attention `Z softmax_col(Z^T A Z)`: the softmax of a column runs over the words on the left of A."""
    every = Arrow("x", "every")
    mix = Attention(Bilinear(), over="queries", residual=add)
    return [Node("A", Weight((dim, dim))), Node("a", mix, [every, "x", every, "A", *(["x"] if add else [])], WORD)]


def _build_multi_head_attention(dim: int, heads: int, add: bool) -> list[Node]:
    """A plate of heads, each with queries, keys and values, and the concatenation of their outputs."""
    attend = Attention(Dot(dim**-0.5), over="queries")
    return [
        *(Node(f"W_{role}", Weight((dim // heads, dim)), plates=["head"]) for role in "qkv"),
        *(Node(role, Linear(), [f"W_{role}", "x"], HEADS) for role in "qkv"),
        Node("a", attend, [Arrow("q", "every"), "k", Arrow("v", "every")], HEADS),
        Node("mix", Concat(mapped=False, residual=add), ["a", *(["x"] if add else [])], WORD),
    ]
