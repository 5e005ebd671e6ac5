"""Transformers as integrators, and volume-preserving transformers (B. Brantner et al.) of time series.

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
from bnet_transformer.models.builders import HEADS, WORD, build_observation
from bnet_transformer.tpm import (
    TPM,
    Attention,
    Bilinear,
    Cayley,
    Concat,
    Dot,
    Given,
    Linear,
    ResNet,
    Skew,
    Triangular,
    Weight,
)

# --------------------------------------------------------------------------------------------------------------------
# The volume-preserving transformer: attention with an orthogonal matrix, and triangular steps (B. Brantner et al.).
#
#     attention       Z -> Z Cay(C),   Cay(C) = (I - C)(I + C)^-1,   C skew-symmetric
#       "skew"        C = Z^T A Z,   A = -A^T
#       "arbitrary"   C = B - B^T,   B = strictly lower(Z^T A Z) / sqrt(d)
#     feed-forward    x -> x + s(L x + b) with L strictly lower triangular, then with U strictly upper triangular
#       a block       linear lower (no bias), linear upper (bias), tanh lower (bias), tanh upper (bias)
#       after them    linear lower (no bias), linear upper (bias)
#
# The Jacobian of a triangular step is unit triangular, so its determinant is 1. The determinant of attention in the
# skew form is 1 as well. The arbitrary form does not preserve volume: its matrix is orthogonal, but depends on Z. See
# docs/geometric.md.


def volume_preserving(
    dim: int,
    *,
    slices: int = 2,
    blocks: int = 1,
    attention: str | None = "skew",
    activation: str = "tanh",
    spread: float = 0.3,
    observe: TPM | None = None,
    seed: int = 0,
) -> BNet:
    """A volume-preserving transformer: slices of orthogonal attention, each followed by triangular steps.

    Args:
        dim: The width of a word, which is a vector; at least 2.
        slices: The number of slices (L). Default 2.
        blocks: The number of blocks of triangular steps in each slice (n_blocks). Default 1.
        attention: The form of attention, `"skew"` (default) or `"arbitrary"`. None for no attention: no word then
            depends on another, and with `slices=1` the net is the volume-preserving feed-forward network.
        activation: The activation of the triangular steps that are not linear. Default `"tanh"`.
        spread: The standard deviation of the initial weights. Default 0.3; training is unstable for much larger
            values.
        observe: A readout `y` of each word, `Normal(sigma)` or `Categorical(n)`; with its option `pool`, of the
            sentence. None (default) for no readout.
        seed: The seed of the initial parameters. Default 0.

    Returns:
        The net.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> net = bt.volume_preserving(dim=3, slices=2)
    >>> net.module()(torch.zeros(5, 4, 3)).shape                # [batch, word, dim]
    torch.Size([5, 4, 3])
    """
    dim = check_int("dim", dim, minimum=2)
    check_choice("attention", attention, ("skew", "arbitrary", None))
    nodes = []
    if attention is not None:
        weight = Skew(dim, spread) if attention == "skew" else Weight((dim, dim), spread)
        nodes = [Node("A", weight), Node("a", Cayley(attention), [Arrow("x", "every"), "A"], WORD)]
    nodes += _build_feed_forward("a" if attention else "x", list_triangular_steps(blocks, activation), spread)
    stack = Stack(nodes, [Node("x", Given(dim), plates=WORD)], build_observation(observe), slices=slices)
    return BNet(Declaration([stack], name="volume-preserving"), seed=seed)


def list_triangular_steps(blocks: int, activation: str) -> list[tuple[str, str, bool]]:
    """The triangular steps of a feed-forward map: the side, the activation, and whether there is a bias."""
    linear = [("lower", "identity", False), ("upper", "identity", True)]
    curved = [("lower", activation, True), ("upper", activation, True)]
    return (linear + curved) * check_int("blocks", blocks) + linear


def _build_feed_forward(source: str, steps: list[tuple[str, str, bool]], spread: float) -> list[Node]:
    """A node for each step: `lower1`, `upper1`, `lower2`, ...; the last is the state `x`."""
    nodes: list[Node] = []
    for k, (side, activation, bias) in enumerate(steps):
        role = "x" if k + 1 == len(steps) else f"{side}{k // 2 + 1}"
        before = nodes[-1].role if nodes else source
        nodes.append(Node(role, Triangular(side, activation, bias, spread), [before], WORD))
    return nodes


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
