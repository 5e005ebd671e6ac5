"""The gauge of attention: the pairs of matrices whose entries the net does not determine."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.tpm import (
    Add,
    Affine,
    Attention,
    Categorical,
    Codebook,
    Concat,
    Dot,
    Linear,
    Normal,
    Read,
    Select,
    Weight,
)

Axes = tuple[tuple[str | None, int | None], ...]  # the plate of each leading axis, and the choice that picks its entry


@dataclass(frozen=True)
class Gauge:
    """A pair of matrices that an orthogonal matrix maps to another pair with the same product: `W_q^T W_k`, `W_o W_v`.

    Attributes:
        node: The name of the attention node.
        left: The names of the matrices, and of the bias if there is one, that compute the queries or the values.
        right: The names of those that compute the keys, or of the matrices `W_o`.
        shared: The number of leading axes that the matrices of both sides have in common, such as that of the heads.
            Each entry has a separate gauge. 0 if all matrices share one gauge, as the atoms of codebooks do.
        has_planes: True if features e and e + w/2 are rotated by rotary positions, so each such plane has one phase.
        is_output: True for `W_v` and `W_o`, or the matrix of a readout, whose columns are the features.
        is_partial: True if rotary positions rotate only some of the features. No coordinates fix this gauge.
    """

    node: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    shared: int
    has_planes: bool = False
    is_output: bool = False
    is_partial: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters of the gauge."""
        return self.left + self.right

    @property
    def product(self) -> str:
        """The product that does not depend on the gauge."""
        return f"{self.right[0]} {self.left[0]}" if self.is_output else "W_q^T W_k"


def find_gauges(network: Network) -> list[Gauge]:
    """Find the gauges of the attention nodes from the structure of the net."""
    result: dict[tuple[str, ...], Gauge] = {}
    finders = _find_score_gauge, _find_output_gauge, _find_readout_gauge
    for spec in network.specs:
        for gauge in (find(network, spec) for find in finders):
            if gauge is not None and not {*gauge.left} & {*gauge.right}:
                result.setdefault(gauge.names, gauge)
    uses = [name for gauge in result.values() for name in gauge.names]
    return [gauge for gauge in result.values() if all(uses.count(name) == 1 for name in gauge.names)]


def _find_score_gauge(network: Network, spec: NodeSpec) -> Gauge | None:
    """Find the gauge of the queries and keys of an attention node."""
    # The score q . k does not change if an orthogonal matrix Q maps both q and k: (Q W_q x) . (Q W_k x') = q . k. It
    # changes if q or k has another child. If rotary positions rotate planes of features, only rotations of each plane
    # commute with them. With a bias, the matrix is [W b] and the input [x 1].
    score = _get_dot_score(spec)
    if score is None or not _are_only_scored(network, spec):
        return None
    has_planes, shape = score.rope is not None, network.specs[spec.parents[0].index].shape
    is_partial = score.rope is not None and score.rope.width not in {None, *shape}
    sides = [find_side(network, parent) for parent in spec.parents[:2]]
    if sides[0] is None or sides[1] is None:
        return None
    (left, left_axes), (right, right_axes) = sides[0], sides[1]
    shared = _count_shared(left_axes, right_axes)
    return Gauge(spec.group.name, left, right, shared, has_planes, is_partial=is_partial)


def _find_output_gauge(network: Network, spec: NodeSpec) -> Gauge | None:
    """Find the gauge of the values of the heads that a node sums: `sum_h W_o^h sum_j P(j | i) W_v^h x_j`."""
    if not isinstance(spec.tpm, Concat) or not spec.tpm.mapped:
        return None
    weight, attention = (network.specs[parent.index] for parent in spec.parents[:2])
    if not isinstance(weight.tpm, Weight) or not isinstance(attention.tpm, Attention) or attention.tpm.residual:
        return None
    if any(_count_uses(network, index) > 1 for index in (weight.group.index, attention.group.index)):
        return None
    values = attention.parents[2]
    side = find_side(network, values)
    if side is None or _count_uses(network, values.index) > 1:
        return None
    left, axes = side
    shared = _count_shared(axes, tuple((plate, None) for plate in weight.group.plates))
    return Gauge(attention.group.name, left, (f"{weight.param_prefix}.value",), shared, is_output=True)


def _find_readout_gauge(network: Network, spec: NodeSpec) -> Gauge | None:
    """Find the gauge of the values of attention without a residual, of which a readout has a linear map."""
    if not isinstance(spec.tpm, Categorical | Normal) or "weight" not in spec.parameters:
        return None
    attention = network.specs[spec.parents[-1].index]
    values = attention.parents[2] if isinstance(attention.tpm, Attention) and not attention.tpm.residual else None
    if isinstance(attention.tpm, Add) and len(attention.parents) == 1:  # the value of the word that is read
        (values,) = attention.parents
    if values is None or any(_count_uses(network, index) > 1 for index in (attention.group.index, values.index)):
        return None
    side = find_side(network, values)
    right = (f"{spec.param_prefix}.weight",)
    return None if side is None else Gauge(attention.group.name, side[0], right, 0, is_output=True)


def find_unfixed(network: Network, weights: Collection[str]) -> list[str]:
    """Find the attention nodes of which both the queries and the keys are linear maps with these weights."""
    result = []
    for spec in network.specs:
        if isinstance(spec.tpm, Attention | Read):
            sides = [find_side(network, parent) for parent in spec.parents[:2]]
            if all(side is not None and {*side[0]} & {*weights} for side in sides):
                result.append(spec.group.name)
    return result


def _get_dot_score(spec: NodeSpec) -> Dot | None:
    """Return the score `q . k` of an attention node; None for another score or node."""
    if isinstance(spec.tpm, Attention | Read) and isinstance(spec.tpm.score, Dot):
        return spec.tpm.score
    return None


def _are_only_scored(network: Network, attention: NodeSpec) -> bool:
    """Return True if every child of the queries and keys of a node is attention by equally rotated scores of these."""
    score, (query, key) = _get_dot_score(attention), (parent.index for parent in attention.parents[:2])
    for spec in network.specs:
        parents, other = [parent.index for parent in spec.parents], _get_dot_score(spec)
        is_pair = parents[:2] == [query, key] and not {query, key} & {*parents[2:]}
        is_equal = score is not None and other is not None and score.rope == other.rope
        if {query, key} & {*parents} and not (is_pair and is_equal):
            return False
    return query != key


def _count_uses(network: Network, index: int) -> int:
    """Count the slots of all nodes in which a node is a parent."""
    return sum(parent.index == index for spec in network.specs for parent in spec.parents)


def _count_shared(left: Axes, right: Axes) -> int:
    """Count the leading axes that the matrices of both sides have in common."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def find_side(network: Network, parent: ParentSpec) -> tuple[tuple[str, ...], Axes] | None:
    """Find the parameters of the queries, keys or values, and the leading axes of the matrices; None if unknown.

    There are no axes if one vector depends on several atoms, or if the bias has other axes than the matrix.
    """
    source = network.specs[parent.index]
    if not isinstance(source.tpm, Linear | Affine):
        return None
    bias = (f"{source.param_prefix}.bias",) if source.tpm.has_bias else ()
    picks = dict(parent.pick)
    if source.tpm.dim is not None:
        axes: Axes = tuple((plate, picks.get(plate)) for plate in source.group.plates)
        return (f"{source.param_prefix}.weight", *bias), axes
    weight = network.specs[source.parents[0].index]
    name = {Select: "values", Codebook: "atoms", Weight: "value"}.get(type(weight.tpm))
    if name is None or weight.group.word_stack is not None:
        return None
    picks |= dict(source.parents[0].pick)
    axes = tuple((plate, picks.get(plate)) for plate in weight.group.plates)
    if isinstance(weight.tpm, Select):
        axes += tuple((None, p.index) for p in weight.parents)
    if isinstance(weight.tpm, Codebook) or (bias and len(weight.group.plates) != len(source.group.plates)):
        axes = ()
    return (f"{weight.param_prefix}.{name}", *bias), axes
