"""The gauge of attention: the pairs of matrices whose entries the attention weights do not determine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.tpm import Affine, Attention, Codebook, Dot, Linear, Read, Select, Weight


@dataclass(frozen=True)
class Gauge:
    """The parameters of the queries and of the keys of attention with the score `q . k`.

    Attributes:
        attention: The name of the attention node.
        query: The names of the matrices, and of the bias if there is one, that compute the queries.
        key: The names of those that compute the keys.
        is_per_head: True if head h of the queries occurs only with head h of the keys, so each head has a gauge. False
            if all matrices share one gauge, as the atoms of codebooks do.
    """

    attention: str
    query: tuple[str, ...]
    key: tuple[str, ...]
    is_per_head: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters of the gauge."""
        return self.query + self.key


def find_gauges(network: Network) -> list[Gauge]:
    """Find the gauges of the attention nodes from the structure of the net."""
    # The score q . k does not change if an orthogonal matrix Q maps both q and k: (Q W_q x) . (Q W_k x') = q . k. It
    # changes if q or k has another child, or is rotated by its position (then only one phase for each plane is free).
    # With a bias, the matrix is [W b] and the input [x 1].
    result: dict[tuple[str, ...], Gauge] = {}
    for spec in network.specs:
        if not _has_dot_score(spec) or not _are_only_scored(network, spec.parents[0].index, spec.parents[1].index):
            continue
        sides = [_find_side(network, parent) for parent in spec.parents[:2]]
        if sides[0] is None or sides[1] is None:
            continue
        (query, by_query), (key, by_key) = sides[0], sides[1]
        if not {*query} & {*key}:
            is_per_head = by_query is not None and by_query == by_key
            gauge = Gauge(spec.group.name, query, key, is_per_head)
            result.setdefault(gauge.names, gauge)
    uses = [name for gauge in result.values() for name in gauge.names]
    return [gauge for gauge in result.values() if all(uses.count(name) == 1 for name in gauge.names)]


def find_unfixed(network: Network, weights: Collection[str]) -> list[str]:
    """Find the attention nodes of which both the queries and the keys are linear maps with these weights."""
    result = []
    for spec in network.specs:
        if isinstance(spec.tpm, Attention | Read):
            sides = [_find_side(network, parent) for parent in spec.parents[:2]]
            if all(side is not None and {*side[0]} & {*weights} for side in sides):
                result.append(spec.group.name)
    return result


def _has_dot_score(spec: NodeSpec) -> bool:
    """Return True for attention with the score `q . k` without rotation."""
    return isinstance(spec.tpm, Attention | Read) and isinstance(spec.tpm.score, Dot) and spec.tpm.score.rotary is None


def _are_only_scored(network: Network, query: int, key: int) -> bool:
    """Return True if every child of two nodes is attention in which one is the query and the other the key."""
    for spec in network.specs:
        parents = [parent.index for parent in spec.parents]
        is_pair = parents[:2] == [query, key] and not {query, key} & {*parents[2:]} and _has_dot_score(spec)
        if {query, key} & {*parents} and not is_pair:
            return False
    return query != key


def _find_side(network: Network, parent: ParentSpec) -> tuple[tuple[str, ...], tuple[object, ...] | None] | None:
    """Find the parameters of the queries or keys, and the choices and plates that index the head; None if unknown.

    The indices are None if one query depends on several atoms.
    """
    source = network.specs[parent.index]
    if not isinstance(source.tpm, Linear | Affine):
        return None
    bias = (f"{source.param_prefix}.bias",) if source.tpm.has_bias else ()
    plates = tuple(name for name in source.group.plates if name != "word")
    indices: tuple[object, ...] | None = (*plates, *[by for _, by in parent.pick])
    if source.tpm.dim is not None:
        return (f"{source.param_prefix}.weight", *bias), indices
    weight = network.specs[source.parents[0].index]
    name = {Select: "values", Codebook: "atoms", Weight: "value"}.get(type(weight.tpm))
    if name is None or weight.group.word_stack is not None:
        return None
    if isinstance(weight.tpm, Codebook):
        indices = None
    elif isinstance(weight.tpm, Select):
        indices = (*plates, *[p.index for p in weight.parents])
    if bias and len(weight.group.plates) != len(plates):  # one bias for several matrices
        indices = None
    return (f"{weight.param_prefix}.{name}", *bias), indices
