"""Separation: which nodes tell of each other, given others. Many questions at once, each on a bit of its own.

Balls roll along arrows (Shachter 1998): past a node that is not given, and back up from one that is. A set of nodes is
an array of bits for each family, so that one step along a bundle of arrows is one array operation. A question names few
words and heads, and those that it does not name are alike: mapping each word to the greatest kept one at or before it
takes arrows to arrows, so the balls need only the graph of the words named, their next ones and both ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.naming import WORD
from bnet_transformer.graph.ground_graph import GroundGraph, Ids
from bnet_transformer.graph.template_graph import NodeGroup
from bnet_transformer.graph.traversal import CutMarks, propagate_marks

Bits = NDArray[np.uint64]  # [..., lanes]: bit q % 64 of lane q // 64 belongs to question q
LANE_BITS = 64
MAX_BITS = 2**28
THINNABLE_REACHES = (
    "same",
    "every",
    "causal",
    "first",
    "last",
)  # the reaches that a map of words as above takes to themselves


@dataclass(frozen=True)
class SeparationQuery:
    """Are the nodes `x` and `y` separated by `given`?"""

    x: frozenset[int]
    y: frozenset[int]
    given: frozenset[int] = frozenset()

    @property
    def nodes(self) -> frozenset[int]:
        """All nodes that it names."""
        return self.x | self.y | self.given


def are_separated(
    ground: GroundGraph, queries: Sequence[SeparationQuery], functional_groups: Collection[int] = ()
) -> NDArray[np.bool_]:
    """For each question, whether it is so. `functional_groups` are families whose nodes their parents determine: what is given
    then closes under what it determines (D-separation: Geiger, Verma and Pearl 1990), as does what is set.
    """
    separated = np.zeros(len(queries), dtype=bool)
    start = 0
    while start < len(queries):
        size = max(
            LANE_BITS,
            MAX_BITS // max(1, len(thin_graph(ground, [queries[start].nodes]).ground)) // LANE_BITS * LANE_BITS,
        )
        chunk = queries[start : start + min(size, 64 * LANE_BITS)]
        separated[start : start + len(chunk)] = _are_chunk_separated(ground, chunk, functional_groups)
        start += len(chunk)
    return separated


def _are_chunk_separated(
    ground: GroundGraph, queries: Sequence[SeparationQuery], functional_groups: Collection[int]
) -> NDArray[np.bool_]:
    thinned = thin_graph(ground, [query.nodes for query in queries])
    count = len(queries)
    x, y, given = (
        pack_queries(thinned.ground, count, thinned.to_thinned([getattr(query, part) for query in queries]))
        for part in ("x", "y", "given")
    )
    cut = pack_cuts(
        ground,
        thinned.ground,
        *(thinned.to_thinned([nodes] * count) for nodes in (ground.cut_nodes, ground.retained_parents)),
    )
    blocked = deterministic_closure(thinned.ground, given, cut, functional_groups)
    y &= ~blocked
    hit = np.bitwise_or.reduce(bayes_ball(thinned.ground, x, given, blocked, cut, goal=y) & y, axis=0)
    return ~np.unpackbits(hit.view(np.uint8), bitorder="little")[:count].astype(bool)


def deterministic_closure(ground: GroundGraph, given: Bits, cut: CutMarks, functional_groups: Collection[int]) -> Bits:
    """The nodes that what is given determines, itself among them; with no `functional_groups`, itself alone."""
    if not functional_groups:
        return given
    # what is not determined: a root counts as free, whatever its TPM
    template, undetermined, open_ = ground.template, np.zeros_like(given), ~given
    for index, bits in cut.cut_nodes.items():
        part = view_group(ground, open_, index)
        part &= ~bits
    for component in template.components or tuple((group.index,) for group in template.groups):
        while True:
            changed = False
            for index in component:
                part = view_group(ground, undetermined, index)
                if index in functional_groups and template.in_edges[index]:
                    parts = ((edge, view_group(ground, undetermined, edge.parent)) for edge in template.in_edges[index])
                    incoming = (propagate_marks(ground, edge, bits, cut, up=False) for edge, bits in parts)
                    fresh = reduce(np.bitwise_or, incoming) & view_group(ground, open_, index)
                else:
                    fresh = view_group(ground, open_, index)
                changed |= bool((fresh & ~part).any())
                part |= fresh
            reads_itself = any(edge.parent == component[0] for edge in template.in_edges[component[0]])
            if not changed or (len(component) == 1 and not reads_itself):
                break
    return ~undetermined


# the words and heads that a question does not name


@dataclass(frozen=True)
class ThinnedGraph:
    """A smaller ground graph for each question, all of one size: `kept[q][axis]` are the indices that question q keeps
    of an axis, a plate or the words of a stack.
    """

    ground: GroundGraph
    full: GroundGraph
    retained: tuple[dict[tuple[str, str], Sequence[int]], ...]

    def to_thinned(self, nodes: Sequence[Iterable[int]]) -> list[list[int]]:
        """The nodes of each question as numbers of the smaller graph."""
        thinned = []
        for ids, retained in zip(nodes, self.retained, strict=True):
            numbers = []
            for node in ids:
                group, index = self.full.unravel_index(node)
                entry = [retained[axis].index(i) for axis, i in zip(_axes(group), index, strict=True)]
                numbers.append(self.ground.ravel_index(group, entry))
            thinned.append(numbers)
        return thinned

    def to_full(self, node: int, query: int = 0) -> int:
        """The number in the full graph of a node of the smaller one."""
        group, index = self.ground.unravel_index(node)
        retained = self.retained[query]
        return self.full.ravel_index(group, [retained[axis][i] for axis, i in zip(_axes(group), index, strict=True)])

    def apply_surgery(self) -> GroundGraph:
        """The smaller graph of the first question, without the arrows that the full one has lost."""
        cut, rows = (self.to_thinned([nodes])[0] for nodes in (self.full.cut_nodes, self.full.retained_parents))
        return self.ground.surgery(cut, dict(zip(rows, self.full.retained_parents.values(), strict=True)))


def thin_graph(ground: GroundGraph, named: Sequence[Iterable[int]]) -> ThinnedGraph:
    """The smaller graphs for questions that name these nodes."""
    full_sizes = {(plate, ""): size for plate, size in ground.template.plate_sizes.items()}
    full_sizes |= {(WORD, stack): size for stack, size in ground.word_counts.items()}
    named_by_query = [_named_indices(ground, {*nodes, *ground.cut_nodes, *ground.retained_parents}) for nodes in named]
    required = [
        {axis: _required_indices(axis, by_axis.get(axis, set()), size) for axis, size in full_sizes.items()}
        for by_axis in named_by_query
    ]
    sizes = {axis: max(len(by_axis[axis]) for by_axis in required) for axis in full_sizes}
    sizes |= {axis: full_sizes[axis] for axis in _unthinnable_axes(ground)}
    retained = tuple(
        {axis: _pad_indices(idx, sizes[axis], full_sizes[axis]) for axis, idx in by_axis.items()}
        for by_axis in required
    )
    plates = {plate: sizes[plate, ""] for plate in ground.template.plate_sizes}
    small = GroundGraph(
        replace(ground.template, plate_sizes=plates), {stack: sizes[WORD, stack] for stack in ground.word_counts}
    )
    return ThinnedGraph(small, ground, retained)


def _pad_indices(required: set[int], size: int, full_size: int) -> Sequence[int]:
    """So many of the indices of an axis, these among them, in order."""
    if size == full_size:
        return range(full_size)
    more = (i for i in range(full_size) if i not in required)
    return sorted([*required, *islice(more, size - len(required))])


def _required_indices(axis: tuple[str, str], named: set[int], size: int) -> set[int]:
    """The indices that must be kept of an axis: of words those named, both ends, and the one after each; of a plate
    those named and one more."""
    if axis[0] == WORD:
        return {i for word in (0, *named, size - 1) for i in (word, word + 1) if i < size}
    spare = next((i for i in range(size) if i not in named), None)
    return named if spare is None else {*named, spare}


def _unthinnable_axes(ground: GroundGraph) -> set[tuple[str, str]]:
    """The words that cannot be thinned, for a reach among them tells words apart by more than their order."""
    axes = set()
    for edge in ground.template.edges:
        child, parent = ground.template.groups[edge.child], ground.template.groups[edge.parent]
        is_cross_stack = child.word_stack is not None and child.word_stack != parent.word_stack
        for reach in edge.reaches if parent.word_stack is not None else ():
            if reach.kind not in THINNABLE_REACHES or (is_cross_stack and reach.kind in ("same", "causal")):
                axes |= {(WORD, stack) for stack in (child.word_stack, parent.word_stack) if stack is not None}
    return axes


def _named_indices(ground: GroundGraph, nodes: Iterable[int]) -> dict[tuple[str, str], set[int]]:
    named: dict[tuple[str, str], set[int]] = {}
    for node in nodes:
        group, index = ground.unravel_index(node)
        for axis, i in zip(_axes(group), index, strict=True):
            named.setdefault(axis, set()).add(i)
    return named


def _axes(group: NodeGroup) -> list[tuple[str, str]]:
    return [(plate, "") for plate in group.plates] + ([] if group.word_stack is None else [(WORD, group.word_stack)])


# the balls


def pack_queries(ground: GroundGraph, count: int, nodes: Sequence[Iterable[int]]) -> Bits:
    """`[node, lanes]`: the bit of each question at its nodes."""
    bits: Bits = np.zeros((len(ground), -(-count // LANE_BITS)), dtype=np.uint64)
    pairs = [(node, query) for query, ids in enumerate(nodes) for node in ids]
    if pairs:
        node, query = np.array(pairs).T
        bit = np.uint64(1) << (query % LANE_BITS).astype(np.uint64)
        np.bitwise_or.at(bits, (node, query // LANE_BITS), bit)
    return bits


def pack_cuts(
    ground: GroundGraph, small: GroundGraph, cut_nodes: Sequence[Iterable[int]], partly_cut: Sequence[Iterable[int]]
) -> CutMarks:
    """What surgery took of a graph, as bits of a smaller one, in which each question has these numbers for it."""
    nodes, partial = (pack_queries(small, len(cut_nodes), numbers) for numbers in (cut_nodes, partly_cut))
    return CutMarks(split_bits_by_group(small, nodes), split_bits_by_group(small, partial & ~nodes), ground)


def bayes_ball(
    ground: GroundGraph,
    start: Bits,
    given: Bits,
    blocked: Bits,
    cut: CutMarks,
    within: Bits | None = None,
    goal: Bits | None = None,
) -> Bits:
    """`[node, lanes]`: where the balls come that start at `start`; they stay inside `within`, and may stop once each
    question that has a `goal` has come to it.
    """
    groups = range(len(ground.template.groups))
    visited = {"given": given, "blocked": blocked, "up": start.copy(), "down": np.zeros_like(start)}
    by_group = {name: [view_group(ground, bits, index) for index in groups] for name, bits in visited.items()}
    inside = None if within is None else [view_group(ground, within, index) for index in groups]
    pending: dict[str, dict[int, Bits]] = {"up": {}, "down": {}}
    goals = {} if goal is None else split_bits_by_group(ground, goal)
    unmet: Bits = start[0] * 0 if goal is None else np.bitwise_or.reduce(goal, axis=0)

    def propagate_bits(index: int, bits: Bits, direction: str) -> None:
        up = direction == "up"
        if not bits.any():
            return
        for edge in (ground.template.in_edges if up else ground.template.out_edges)[index]:
            other = edge.parent if up else edge.child
            arrived = propagate_marks(ground, edge, bits, cut, up=up)
            fresh = arrived & ~by_group[direction][other]
            fresh = fresh if inside is None else fresh & inside[other]
            if fresh.any():
                by_group[direction][other] |= fresh
                pending[direction][other] = pending[direction][other] | fresh if other in pending[direction] else fresh
                if other in goals:
                    arrived = (fresh & goals[other]).reshape(-1, len(unmet))
                    np.bitwise_and(unmet, ~np.bitwise_or.reduce(arrived, axis=0), out=unmet)

    pending["up"] |= split_bits_by_group(ground, start)
    while (pending["up"] or pending["down"]) and (goal is None or unmet.any()):
        going_up = bool(pending["up"])
        direction = "up" if going_up else "down"
        index = max(pending[direction]) if going_up else min(pending[direction])
        bits = pending[direction].pop(index)
        past = bits & ~by_group["blocked"][index]
        propagate_bits(index, past if going_up else bits & by_group["given"][index], "up")
        propagate_bits(index, past, "down")
    return visited["up"] | visited["down"]


def split_bits_by_group(ground: GroundGraph, bits: Bits) -> dict[int, Bits]:
    """The bits of each family that has some."""
    nodes = np.flatnonzero(bits.any(axis=-1))
    groups = np.unique(np.searchsorted(ground.offsets, nodes, side="right") - 1)
    return {index: view_group(ground, bits, index) for index in groups.tolist()}


def view_group(ground: GroundGraph, bits: Bits, index: int) -> Bits:
    """The part of a family, `[*plates, word, lanes]`."""
    low, high = int(ground.offsets[index]), int(ground.offsets[index + 1])
    return bits[low:high].reshape(*ground.shapes[index], bits.shape[-1])


def nodes_of_first_query(bits: Bits) -> Ids:
    """The nodes at which the first question has its bit."""
    return np.flatnonzero(bits[:, 0] & np.uint64(1))
