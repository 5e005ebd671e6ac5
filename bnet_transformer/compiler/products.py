"""Pass within the plan: which matrix products are made as one.

Maps of one vector are made *together*: `[q k v] = [W_q W_k W_v] x`. Maps around an attention are *folded* into it where
that costs less: `q_i . k_j = x_i . (W_q^T W_k) x_j`, and `sum_j P(j | i) W_v x_j = W_v sum_j P(j | i) x_j`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from bnet_transformer.axes import WORD
from bnet_transformer.network import Input, Member, Network
from bnet_transformer.tpm import Affine, Attention, Dot, Linear

Spread = Mapping[int, frozenset[object]]


@dataclass(frozen=True)
class Fold:
    """An attention that reads x instead of q, k (and v): how it sees x, and the weights that are applied to it."""

    member: Member
    W_q: Input
    W_k: Input
    W_v: Input | None
    residual: bool
    away: frozenset[int]


def folds(
    network: Network, groups: Sequence[Sequence[int]], enumerated: set[int], kept: set[int], known: Collection[int]
) -> dict[int, Fold]:
    """The attentions of a plan that are cheaper when the maps around them are folded in; `kept` are wanted."""
    order = [index for group in groups for index in group]
    spread = _spread(network, order, enumerated)
    readers = dict.fromkeys(order, 0)
    for index in order:
        for parent in {bundle.parent for bundle in network.graph.into[index]} & readers.keys():
            readers[parent] += 1
    free = {index for index in order if readers[index] == 1 and index not in {*kept, *known, *enumerated}}
    found: dict[int, Fold] = {}
    for (index,) in (group for group in groups if len(group) == 1):
        member = network.members[index]
        if isinstance(member.tpm, Attention) and index not in known:
            fold = _fold(network, member, spread, free)
            if fold is not None:
                found[index] = fold
    return found


def together(network: Network, order: Sequence[int], away: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Maps of one vector by weights that are all there when the first of them is due: first -> all."""
    place = {index: k for k, index in enumerate(order)}
    alike: dict[tuple[object, ...], list[int]] = {}
    for index in order:
        member = network.members[index]
        if index not in away and isinstance(member.tpm, Linear | Affine) and _is_map(member):
            x = member.inputs[1]
            alike.setdefault((x.parent, member.family.plates, member.family.words, type(member.tpm)), []).append(index)
    found = {}
    for indices in alike.values():
        there = [i for i in indices if place.get(network.members[i].inputs[0].parent, -1) < place[indices[0]]]
        if len(there) > 1:
            found[there[0]] = tuple(there)
    return found


def _fold(network: Network, member: Member, spread: Spread, free: set[int]) -> Fold | None:
    tpm = member.tpm
    assert isinstance(tpm, Attention)
    if not isinstance(tpm.score, Dot) or tpm.score.rotary is not None or tpm.over != "keys":
        return None
    if any(given.pick for given in member.inputs) or any(given.over != (WORD,) for given in member.inputs[1:3]):
        return None
    q, k, v = (network.members[given.parent] for given in member.inputs[:3])
    if not all(m.family.index in free and isinstance(m.tpm, Linear) and _is_map(m) for m in (q, k)):
        return None
    (W_q, x_q), (W_k, x_k) = q.inputs, k.inputs
    if _is_of_words(network, W_k):
        return None
    size = _Sizes(network, spread)
    (key,), (d_q,), (d_k,) = q.shape, q.parents[1].shape, k.parents[1].shape
    if d_k > key or size(W_q, W_k) * d_q * d_k > (size(W_q) * d_q + size(W_k) * d_k) * key:
        return None
    inputs = [replace(x_q, slot="q"), replace(member.inputs[1], parent=x_k.parent), *member.inputs[2:]]
    away, W_v = {q.family.index, k.family.index}, None
    if v.family.index in free and isinstance(v.tpm, Linear) and _is_map(v):
        weights, x_v = v.inputs
        shared = not spread.get(x_v.parent, frozenset()) & spread[weights.parent]
        within = spread[W_q.parent] | spread[W_k.parent] <= spread[weights.parent]
        shared = shared and not _is_of_words(network, weights)
        if shared and within and v.parents[1].shape <= v.shape:
            W_v = weights
            inputs[2] = replace(member.inputs[2], parent=x_v.parent)
            away.add(v.family.index)
    scored = replace(tpm, score=Dot(tpm.score.factor(key)), residual=False)
    return Fold(replace(member, tpm=scored, inputs=tuple(inputs)), W_q, W_k, W_v, tpm.residual, frozenset(away))


def _is_of_words(network: Network, weights: Input) -> bool:
    """True for weights of each word: those of the word that is read, which only a map before the attention can take."""
    return network.members[weights.parent].family.words is not None


def _is_map(member: Member) -> bool:
    """True for `W x` of a word's own vector, W and x read as they are."""
    if len(member.inputs) != 2:
        return False
    W, x = member.inputs
    bare = not (W.pick or x.pick or W.over or x.over)
    return bare and W.reach.kind == x.reach.kind == "same" and member.family.words is not None


def _spread(network: Network, order: Sequence[int], enumerated: set[int]) -> Spread:
    """The dims besides batch and word along which each value spreads: plates, and enumerated families."""
    found: dict[int, frozenset[object]] = {}
    for index in order:
        family = network.members[index].family
        above = (found.get(bundle.parent, frozenset()) for bundle in network.graph.into[index])
        inner = {index} if index in enumerated else {d for each in above for d in each if isinstance(d, int)}
        found[index] = frozenset({*family.plates, *inner})
    return found


@dataclass(frozen=True)
class _Sizes:
    """How many entries the dims have along which some weights spread."""

    network: Network
    spread: Spread

    def __call__(self, *weights: Input) -> float:
        dims = {d for W in weights for d in self.spread.get(W.parent, frozenset())}
        return math.prod(self._size(d) for d in dims)

    def _size(self, dim: object) -> float:
        if isinstance(dim, str):
            return self.network.graph.sizes[dim]
        assert isinstance(dim, int)
        return self.network.members[dim].tpm.states or math.inf
