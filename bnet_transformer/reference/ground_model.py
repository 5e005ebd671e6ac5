"""The ground model: a sentence with its interventions, and the parents and choices of its nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from bnet_transformer._core.naming import WORD, Reach
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.errors import EvidenceError
from bnet_transformer.graph.ground import GroundGraph, RetainedParents
from bnet_transformer.graph.walk import ancestors
from bnet_transformer.tpm import Attention


@dataclass(frozen=True)
class Row:
    """What `do` sets a node to that reads by a row of its own in place of `P(j | i)`: `weights[j]`, for all words."""

    weights: Tensor


Done = Mapping[int, Tensor | Row]


@dataclass(frozen=True)
class World:
    """A sentence with all that is settled about it.

    `given` holds the values that come with the sentence, `[*plates, word, *shape]` for each family of `Given` nodes;
    `do` a value (a state, where the node is discrete) for each node that is set, `rows` a row of attention for each
    that reads by one. Nodes are ground ids.
    """

    network: Network
    ground: GroundGraph
    given: Mapping[str, Tensor]
    do: Mapping[int, Tensor] = field(default_factory=dict)
    rows: Mapping[int, Tensor] = field(default_factory=dict)

    def member(self, node: int) -> NodeSpec:
        """The family of a node, as it was declared."""
        return self.network.specs[self.ground.group_of(node).index]

    def count_states(self, node: int) -> int:
        """How many states a discrete node has."""
        return self.network.count_states(self.ground.group_of(node).index, self.ground.word_counts)

    def surgery(self, done: Done) -> World:
        """The same sentence with more nodes set; of what is told of one node, the last counts."""
        if not done:
            return self
        do = {node: value for node, value in self.do.items() if node not in done}
        rows = {node: row for node, row in self.rows.items() if node not in done}
        do |= {node: value for node, value in done.items() if isinstance(value, Tensor)}
        rows |= {node: value.weights for node, value in done.items() if isinstance(value, Row)}
        kept = {node: _kept(self.member(node)) for node in rows}
        return replace(self, ground=self.ground.surgery(do, kept), do=do, rows=rows)


def sources(
    world: World, member: NodeSpec, index: tuple[int, ...], given: ParentSpec, states: Mapping[int, Tensor]
) -> tuple[tuple[int, ...], list[int], list[int]]:
    """The ground parents that fill one slot of a node: the axes of the collection, the ids, the words read.

    An id of -1 stands for a word that is not there, whose value is zero (or state 0): the one before the first, or
    one that a selector picks out of reach (which has probability zero).
    """
    ground, parent = world.ground, world.network.specs[given.index].group
    own = dict(zip(ground.axes(member.group), index, strict=True))
    options: list[list[int]] = []
    words: list[int] = []
    for plate in parent.plates:
        picked = _picked(world, member, index, given, plate, states)
        wide = list(range(ground.template.plate_sizes[plate]))
        options.append(wide if plate in given.over and picked is None else [own[plate] if picked is None else picked])
    if parent.word_stack is not None:
        row = given.reach.matrix(_count(world, member), ground.word_counts[parent.word_stack])[own.get(WORD, 0)]
        words = np.flatnonzero(row).tolist()
        picked = _picked(world, member, index, given, WORD, states)
        words = words if picked is None else [word for word in words if word == picked]
        if not words and WORD not in given.over:
            return (), [-1], []
        options.append(words)
    shape = tuple(len(option) for axis, option in zip(ground.axes(parent), options, strict=True) if axis in given.over)
    return shape, [ground.ravel_index(parent, at) for at in itertools.product(*options)], words


def _picked(
    world: World, member: NodeSpec, index: tuple[int, ...], given: ParentSpec, plate: str, states: Mapping[int, Tensor]
) -> int | None:
    """The entry along a plate that a selector picks, if one does."""
    selector = dict(given.pick).get(plate)
    if selector is None:
        return None
    chooser, own = world.network.specs[selector], dict(zip(world.ground.axes(member.group), index, strict=True))
    at = tuple(own[axis] for axis in world.ground.axes(chooser.group))
    node = world.ground.ravel_index(chooser.group, at)
    state = world.do.get(node, states.get(node))
    if state is None and chooser.tpm.kind == "input":
        state = world.given[chooser.group.name][at]
    if state is None:
        raise EvidenceError(world.ground.name(node), expected="a state, for it is random", actual="none")
    return int(state)


def pending(world: World, node: int, known: Mapping[int, object], states: Mapping[int, Tensor]) -> list[int]:
    """The nodes on which a value depends, itself last, that are not known yet; a node with a state needs no parent."""
    order: list[int] = []
    seen: set[int] = set()
    stack = [(node, False)]
    while stack:
        at, ready = stack.pop()
        if ready:
            order.append(at)
        elif at not in seen and at not in known:
            seen.add(at)
            stack.append((at, True))
            above = [] if at in states else parents(world, at)
            stack.extend((parent, False) for parent in above if parent not in known)
    return order


def parents(world: World, node: int) -> list[int]:
    """A node's parents after surgery: none where it is set."""
    return [] if node in world.do else world.ground.parents(node)


def reading_parents(world: World, node: int) -> list[int]:
    """The parents of a node on which its reading `P(j | i)` depends."""
    member, _ = where(world, node)
    slots = member.tpm.reading_slots() if node not in world.rows else ()
    families = {given.index for given in member.parents if given.slot in slots}
    families |= {selector for given in member.parents if given.slot in slots for _, selector in given.pick}
    return [parent for parent in parents(world, node) if world.ground.group_of(parent).index in families]


def choices(world: World, nodes: Iterable[int], settled: Mapping[int, Tensor], *, beyond: bool = False) -> list[int]:
    """The discrete random nodes, not settled, that decide the values of `nodes`; `beyond` adds those that decide
    their distributions in turn."""
    discrete = frozenset(m.group.index for m in world.network.specs if m.tpm.kind == "discrete")
    start = [node for node in nodes if node not in world.do]
    ends, stops = ((), ()) if beyond else (discrete, settled)
    found = {*start, *ancestors(world.ground, start, ends, stops)}
    open_ = (node for node in found if node not in settled and node not in world.do)
    return sorted(node for node in open_ if world.ground.group_of(node).index in discrete)


def words_read(world: World, node: int) -> list[int]:
    """The words that a node may read whose state is a word."""
    member, index = where(world, node)
    read = member.word_parents[0]
    words = world.ground.word_counts[world.network.get_source_stack(member)]
    row = index[-1] if member.group.word_stack is not None else 0
    found: list[int] = np.flatnonzero(read.reach.matrix(_count(world, member), words)[row]).tolist()
    return found


def settling(world: World, evidence: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The evidence that says outright what a random node came to."""
    return {node: seen for node, seen in evidence.items() if settles(world, node, seen)}


def settles(world: World, node: int, seen: Tensor) -> bool:
    """True where evidence says outright what a random node came to."""
    kind = world.member(node).tpm.kind
    return kind == "continuous" or (kind == "discrete" and not seen.is_floating_point())


def _kept(member: NodeSpec) -> RetainedParents:
    """What a node still reads that reads by a row: the families of its values and its residual, with their reaches."""
    assert isinstance(member.tpm, Attention)
    kept: dict[int, tuple[Reach, ...]] = {}
    for given in member.parents:
        if given.slot in member.tpm.mixed_slots():
            kept[given.index] = tuple(dict.fromkeys((*kept.get(given.index, ()), given.reach)))
    return kept


def where(world: World, node: int) -> tuple[NodeSpec, tuple[int, ...]]:
    """The member to which a node belongs, and its index there."""
    family, index = world.ground.unravel_index(node)
    return world.network.specs[family.index], index


def _count(world: World, member: NodeSpec) -> int:
    return 1 if member.group.word_stack is None else world.ground.word_counts[member.group.word_stack]
