"""D-separation by the Bayes ball for many queries at once. Each query is one bit of a 64-bit lane.

A set of nodes is an array of bits for each node group, so one step along an edge template is one array operation. The
queries run on a thinned graph, which contains only the words and heads that they need.
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

Bits = NDArray[np.uint64]  # [..., lanes]: bit q % 64 of lane q // 64 belongs to query q
LANE_BITS = 64
MAX_BITS = 2**28


@dataclass(frozen=True)
class SeparationQuery:
    """The query whether the nodes `given` separate the nodes `x` from the nodes `y`."""

    x: frozenset[int]
    y: frozenset[int]
    given: frozenset[int] = frozenset()

    @property
    def nodes(self) -> frozenset[int]:
        """All nodes of the query."""
        return self.x | self.y | self.given


def are_separated(
    ground: GroundGraph, queries: Sequence[SeparationQuery], functional_groups: Collection[int] = ()
) -> NDArray[np.bool_]:
    """For each query, whether `given` separates its `x` from its `y`.

    `functional_groups` are the groups of nodes that are functions of their parents. With them, the given nodes and the
    nodes set by `do` are extended by all nodes that they determine (D-separation).
    """
    separated = np.zeros(len(queries), dtype=bool)
    start = 0
    while start < len(queries):
        num_nodes = max(1, len(thin_graph(ground, [queries[start].nodes]).ground))
        size = max(LANE_BITS, MAX_BITS // num_nodes // LANE_BITS * LANE_BITS)
        chunk = queries[start : start + min(size, 64 * LANE_BITS)]
        separated[start : start + len(chunk)] = _are_chunk_separated(ground, chunk, functional_groups)
        start += len(chunk)
    return separated


def _are_chunk_separated(
    ground: GroundGraph, queries: Sequence[SeparationQuery], functional_groups: Collection[int]
) -> NDArray[np.bool_]:
    """The answers of some queries, on one thinned graph."""
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
    reached = np.bitwise_or.reduce(bayes_ball(thinned.ground, x, given, blocked, cut, goal=y) & y, axis=0)
    return ~np.unpackbits(reached.view(np.uint8), bitorder="little")[:count].astype(bool)


def deterministic_closure(ground: GroundGraph, given: Bits, cut: CutMarks, functional_groups: Collection[int]) -> Bits:
    """The given nodes and all nodes that they determine; without `functional_groups` only the given nodes."""
    if not functional_groups:
        return given
    # D-separation (Geiger, Verma and Pearl 1990): a node is determined if it is given, or is a function of parents that
    # are all determined. This computes the complement as a least fixed point: a node that is not given is undetermined
    # if it is not a function, has no incoming arrow (every root is free), or has an undetermined parent.
    template, undetermined, not_fixed = ground.template, np.zeros_like(given), ~given
    for index, bits in cut.cut_nodes.items():
        part = view_group(ground, not_fixed, index)
        part &= ~bits
    for component in template.components or tuple((group.index,) for group in template.groups):
        while True:
            changed = False
            for index in component:
                part = view_group(ground, undetermined, index)
                if index in functional_groups and template.in_edges[index]:
                    parts = ((edge, view_group(ground, undetermined, edge.parent)) for edge in template.in_edges[index])
                    incoming = (propagate_marks(ground, edge, bits, cut, up=False) for edge, bits in parts)
                    fresh = reduce(np.bitwise_or, incoming) & view_group(ground, not_fixed, index)
                else:
                    fresh = view_group(ground, not_fixed, index)
                changed |= bool((fresh & ~part).any())
                part |= fresh
            reads_itself = any(edge.parent == component[0] for edge in template.in_edges[component[0]])
            if not changed or (len(component) == 1 and not reads_itself):
                break
    return ~undetermined


def pack_queries(ground: GroundGraph, count: int, nodes: Sequence[Iterable[int]]) -> Bits:
    """The bits of all queries, `[node, lanes]`, set at the nodes of each query."""
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
    """The surgery of `ground` as bits of a smaller graph, from the ids of the cut nodes in each query's small graph."""
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
    """The nodes that a ball from `start` reaches, `[node, lanes]`.

    The ball stays inside `within`. It may stop when it has reached `goal` in every query that has one.
    """
    # The Bayes ball (Shachter 1998). A ball that arrives from a child passes through a node that is not blocked, to its
    # parents and children. A ball that arrives from a parent passes through such a node to its children; at a given
    # node it bounces back to the parents, because evidence opens the collider. `blocked` are the determined nodes,
    # `given` those that are given: a determined node blocks the ball, but only a given node opens a collider. x and y
    # are separated if no ball from x reaches y. Groups are in topological order, so the last (up) or the first (down)
    # pending group has received all its balls before it is expanded.
    groups = range(len(ground.template.groups))
    visited = {"given": given, "blocked": blocked, "up": start.copy(), "down": np.zeros_like(start)}
    by_group = {name: [view_group(ground, bits, index) for index in groups] for name, bits in visited.items()}
    allowed = None if within is None else [view_group(ground, within, index) for index in groups]
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
            fresh = fresh if allowed is None else fresh & allowed[other]
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
        passing = bits & ~by_group["blocked"][index]
        propagate_bits(index, passing if going_up else bits & by_group["given"][index], "up")
        propagate_bits(index, passing, "down")
    return visited["up"] | visited["down"]


def split_bits_by_group(ground: GroundGraph, bits: Bits) -> dict[int, Bits]:
    """The bits of each group with at least one bit, `[*plates, word, lanes]`."""
    nodes = np.flatnonzero(bits.any(axis=-1))
    groups = np.unique(np.searchsorted(ground.offsets, nodes, side="right") - 1)
    return {index: view_group(ground, bits, index) for index in groups.tolist()}


def view_group(ground: GroundGraph, bits: Bits, index: int) -> Bits:
    """The bits of one group, `[*plates, word, lanes]`, as a view."""
    low, high = int(ground.offsets[index]), int(ground.offsets[index + 1])
    return bits[low:high].reshape(*ground.shapes[index], bits.shape[-1])


def nodes_of_first_query(bits: Bits) -> Ids:
    """The nodes at which the bit of the first query is set."""
    return np.flatnonzero(bits[:, 0] & np.uint64(1))


# --------------------------------------------------------------------------------------------------------------------
# Thinned ground graphs: a separation query on few words and heads needs only a small graph.


THINNABLE_REACHES = ("same", "every", "causal", "first", "last")  # preserved by the map of words in `thin_graph`


@dataclass(frozen=True)
class ThinnedGraph:
    """The smaller ground graphs of several queries, which have the same size.

    Attributes:
        ground: The smaller graph.
        full: The full graph.
        retained: For each query, the indices of each axis (a plate, or the words of a stack) in the smaller graph.
    """

    ground: GroundGraph
    full: GroundGraph
    retained: tuple[dict[tuple[str, str], Sequence[int]], ...]

    def to_thinned(self, nodes: Sequence[Iterable[int]]) -> list[list[int]]:
        """The ids in the smaller graph of the nodes of each query."""
        thinned = []
        for ids, retained in zip(nodes, self.retained, strict=True):
            numbers = []
            for node in ids:
                group, index = self.full.unravel_index(node)
                entry = [retained[axis].index(i) for axis, i in zip(_axes(group), index, strict=True)]
                numbers.append(self.ground.ravel_index(group, entry))
            thinned.append(numbers)
        return thinned

    def to_full(self, node: int) -> int:
        """The id in the full graph of a node of the smaller graph of the first query."""
        group, index = self.ground.unravel_index(node)
        retained = self.retained[0]
        return self.full.ravel_index(group, [retained[axis][i] for axis, i in zip(_axes(group), index, strict=True)])

    def apply_surgery(self) -> GroundGraph:
        """The smaller graph of the first query, with the surgery of the full graph."""
        cut, partly_cut = (self.to_thinned([nodes])[0] for nodes in (self.full.cut_nodes, self.full.retained_parents))
        return self.ground.surgery(cut, dict(zip(partly_cut, self.full.retained_parents.values(), strict=True)))


def thin_graph(ground: GroundGraph, named: Sequence[Iterable[int]]) -> ThinnedGraph:
    """The smaller graphs for queries about the nodes `named`."""
    # Words and heads that a query does not name are interchangeable. Map each word to the greatest retained word that
    # is not after it. If the named words, the word after each of them, and both ends are retained, this map preserves
    # arrows for THINNABLE_REACHES. The same holds for a plate with the named indices and one more. So a trail is active
    # in the full graph if and only if its image is active in the thinned graph, and the cost does not depend on the
    # length of the sentence.
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
    """`size` sorted indices of an axis that contain the required ones."""
    if size == full_size:
        return range(full_size)
    unnamed = (i for i in range(full_size) if i not in required)
    return sorted([*required, *islice(unnamed, size - len(required))])


def _required_indices(axis: tuple[str, str], named: set[int], size: int) -> set[int]:
    """The indices of an axis that must be retained.

    For words these are the named words, both ends, and the word after each; for a plate, the named indices and one
    more.
    """
    if axis[0] == WORD:
        return {i for word in (0, *named, size - 1) for i in (word, word + 1) if i < size}
    spare = next((i for i in range(size) if i not in named), None)
    return named if spare is None else {*named, spare}


def _unthinnable_axes(ground: GroundGraph) -> set[tuple[str, str]]:
    """The axes of words that cannot be thinned, because a reach depends on more than the order of words."""
    axes = set()
    for edge in ground.template.edges:
        child, parent = ground.template.groups[edge.child], ground.template.groups[edge.parent]
        is_cross_stack = child.word_stack is not None and child.word_stack != parent.word_stack
        for reach in edge.reaches if parent.word_stack is not None else ():
            if reach.kind not in THINNABLE_REACHES or (is_cross_stack and reach.kind in ("same", "causal")):
                axes |= {(WORD, stack) for stack in (child.word_stack, parent.word_stack) if stack is not None}
    return axes


def _named_indices(ground: GroundGraph, nodes: Iterable[int]) -> dict[tuple[str, str], set[int]]:
    """The indices of some nodes along each axis."""
    named: dict[tuple[str, str], set[int]] = {}
    for node in nodes:
        group, index = ground.unravel_index(node)
        for axis, i in zip(_axes(group), index, strict=True):
            named.setdefault(axis, set()).add(i)
    return named


def _axes(group: NodeGroup) -> list[tuple[str, str]]:
    """The axes of a group: (plate, "") for each plate, then ("word", stack)."""
    return [(plate, "") for plate in group.plates] + ([] if group.word_stack is None else [(WORD, group.word_stack)])
