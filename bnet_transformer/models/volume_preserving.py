"""The volume-preserving transformer: attention with an orthogonal matrix, and triangular steps (B. Brantner et al.).

    attention       Z -> Z Cay(C),   Cay(C) = (I - C)(I + C)^-1,   C skew-symmetric
      "skew"        C = Z^T A Z,   A = -A^T
      "arbitrary"   C = B - B^T,   B = strictly lower(Z^T A Z) / sqrt(d)
    feed-forward    x -> x + s(L x + b) with L strictly lower triangular, then with U strictly upper triangular
      a block       linear lower (no bias), linear upper (bias), tanh lower (bias), tanh upper (bias)
      after them    linear lower (no bias), linear upper (bias)

The Jacobian of a triangular step is unit triangular, so its determinant is 1. The determinant of attention in the skew
form is 1 as well. The arbitrary form does not preserve volume: its matrix is orthogonal, but depends on Z. See
docs/geometric.md.
"""

from __future__ import annotations

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Arrow, Declaration, Node, Stack
from bnet_transformer.models._builders import WORD, build_observation
from bnet_transformer.tpm import TPM, Cayley, Given, Skew, Triangular, Weight


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
