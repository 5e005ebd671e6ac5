"""Traversal of the ground graph: ancestors, Markov blanket, topological order.

A set of nodes is an array of marks for each group, `[*plates, word, lanes]`. Marks are booleans or bits. They are
propagated along edge templates, so that one step is one array operation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.naming import Reach
from bnet_transformer.graph.ground_graph import GroundGraph, Ids, NodeSelection
from bnet_transformer.graph.template_graph import EdgeTemplate

Marks = NDArray[Any]  # [*plates, word, lanes]: booleans in one lane, or one bit for each query


def ancestors(
    ground: GroundGraph, nodes: Iterable[int], blocked_groups: Collection[int] = (), blocked_nodes: Iterable[int] = ()
) -> list[int]:
    """The ancestors of some nodes, without these nodes.

    Args:
        ground: The ground graph.
        nodes: The ids of the nodes.
        blocked_groups: The groups with parents that are not visited, even if `nodes` has some of their nodes. Default:
            none.
        blocked_nodes: The nodes with parents that are not visited. Default: none.

    Returns:
        The ids of the ancestors, sorted.
    """
    return _transitive_closure(ground, nodes, up=True, blocked_groups=blocked_groups, blocked_nodes=blocked_nodes)


def descendants(ground: GroundGraph, nodes: Iterable[int]) -> list[int]:
    """The descendants of some nodes, without these nodes."""
    return _transitive_closure(ground, nodes, up=False)


def markov_blanket(ground: GroundGraph, node: int) -> list[int]:
    """The Markov blanket of a node: its parents, its children, and the other parents of its children."""
    blanket = set(ground.parents(node))
    for child in ground.children(node):
        blanket |= {child, *ground.parents(child)}
    return sorted(blanket - {node})


def topological_order(ground: GroundGraph) -> Ids:
    """All nodes, parents before children; the nodes of a recurrent component are in the order of its computation."""
    parts: list[Ids] = []
    for component in ground.template.components:
        groups = [ground.template.groups[index] for index in component]
        reads_itself = any(edge.parent in component for edge in ground.template.in_edges[component[0]])
        if not reads_itself:
            parts.append(ground.select_nodes(groups[0]))
            continue
        stack = groups[0].word_stack or ""
        is_backward = groups[0].index in ground.template.backward
        order = range(ground.word_counts[stack])
        for i in reversed(order) if is_backward else order:
            word = NodeSelection(words={stack: [i]})
            parts.extend(ground.select_nodes(group, word) for group in groups)
    return np.concatenate(parts)


class NodeNames(Sequence[str]):
    """The names of the nodes of a ground graph in topological order, computed when they are read.

    Args:
        ground: The ground graph.

    >>> import bnet_transformer as bt
    >>> nodes = bt.bayesuvius(dim=4).sentence("the cat sat").nodes
    >>> len(nodes), nodes[0], nodes[-2:], "q_0_2" in nodes
    (19, 'c', ['x_1_1', 'x_1_2'], True)
    """

    def __init__(self, ground: GroundGraph) -> None:
        self.ground = ground
        self._order = topological_order(ground)

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """The name at an index, or the list of names of a slice.

        Args:
            index: The index or the slice.

        Returns:
            The name, or the names.
        """
        if isinstance(index, slice):
            return [self.ground.name(node) for node in self._order[index].tolist()]
        return self.ground.name(int(self._order[index]))

    def __iter__(self) -> Iterator[str]:
        return map(self.ground.name, map(int, self._order))

    def __contains__(self, name: object) -> bool:
        return self.ground.template.parse_name(name, self.ground.word_counts) is not None

    def __repr__(self) -> str:
        shown = [*self[:3], "…", *self[-2:]] if len(self) > 6 else list(self)
        return f"<{len(self):,} nodes: {', '.join(shown)}>"


def ancestral_order(ground: GroundGraph, nodes: Collection[int]) -> list[int]:
    """Some nodes and all their ancestors, parents before children."""
    needed = {*nodes, *ancestors(ground, nodes)}
    return [node for node in topological_order(ground).tolist() if node in needed]


def mark_nodes(ground: GroundGraph, nodes: Iterable[int], mark: np.generic = np.True_) -> dict[int, Marks]:
    """The marks of some nodes by group, `[*plates, word, 1]`: zero at other nodes."""
    marked = {}
    for group, ids in ground.split_by_group(nodes).items():
        marked[group] = np.zeros((*ground.shapes[group], 1), dtype=mark.dtype)
        marked[group].reshape(-1)[np.array(ids) - int(ground.offsets[group])] = mark
    return marked


@dataclass(frozen=True)
class CutMarks:
    """The surgery of a graph as marks.

    Attributes:
        cut_nodes: The marks of nodes without incoming arrows, by group.
        partly_cut: The marks of nodes with only the incoming arrows that `ground` retains, by group.
        ground: The graph with the surgery.
    """

    cut_nodes: Mapping[int, Marks]
    partly_cut: Mapping[int, Marks]
    ground: GroundGraph


def _transitive_closure(
    ground: GroundGraph,
    nodes: Iterable[int],
    *,
    up: bool,
    blocked_groups: Collection[int] = (),
    blocked_nodes: Iterable[int] = (),
) -> list[int]:
    """The ids of the ancestors (up) or descendants of some nodes, without these nodes."""
    roots = mark_nodes(ground, nodes)
    reached = find_reachable(ground, roots, up=up, blocked_groups=blocked_groups, blocked_nodes=blocked_nodes)
    closure: list[int] = []
    for index in sorted(reached):
        mark = reached[index] & ~roots[index] if index in roots else reached[index]
        closure.extend((np.flatnonzero(mark) + int(ground.offsets[index])).tolist())
    return closure


def find_reachable(
    ground: GroundGraph,
    roots: Mapping[int, Marks],
    *,
    up: bool,
    blocked_groups: Collection[int] = (),
    blocked_nodes: Iterable[int] = (),
) -> dict[int, Marks]:
    """The marks of all nodes that a path of at least one arrow joins to the marked nodes, upwards or downwards."""
    blocked = mark_nodes(ground, blocked_nodes)
    cut = CutMarks(
        mark_nodes(ground, ground.cut_nodes),
        mark_nodes(ground, ground.retained_parents.keys() - ground.cut_nodes),
        ground,
    )
    # Groups are in topological order: the last (up) or first (down) pending group has received all its marks, except in
    # a recurrent component, which is repeated until there are no new marks.
    reached: dict[int, Marks] = {}
    frontier = dict(roots)
    while frontier:
        index = max(frontier) if up else min(frontier)
        mark = frontier.pop(index)
        if index in blocked_groups:
            continue
        mark = mark & ~blocked[index] if index in blocked else mark
        for edge in (ground.template.in_edges if up else ground.template.out_edges)[index]:
            other = edge.parent if up else edge.child
            arrived = propagate_marks(ground, edge, mark, cut, up=up)
            new = arrived & ~reached[other] if other in reached else arrived
            if new.any():
                reached[other] = reached[other] | arrived if other in reached else arrived
                frontier[other] = frontier[other] | new if other in frontier else new
    return reached


def propagate_marks(ground: GroundGraph, edge: EdgeTemplate, marks: Marks, cut: CutMarks, *, up: bool) -> Marks:
    """The marks of one group propagated along an edge template, after surgery.

    Args:
        ground: The ground graph.
        edge: The edge template.
        marks: The marks of the child (up) or of the parent (down), `[*plates, word, lanes]`.
        cut: The surgery.
        up: Whether marks are propagated from children to parents.

    Returns:
        The marks of the other group, `[*plates, word, lanes]`.
    """
    # The edge is split by its children: no mark is propagated to or from a cut child, a partly cut child uses only the
    # reaches that it retains, and all other children use the full edge.
    cut_marks = [marks_of[edge.child] for marks_of in (cut.cut_nodes, cut.partly_cut) if edge.child in marks_of]
    if not cut_marks:
        return propagate_uncut_marks(ground, edge, marks, up=up)
    parts = [(edge, ~reduce(np.bitwise_or, cut_marks))]
    retained = cut.ground.retained_edge(edge) if edge.child in cut.partly_cut else None
    if retained is not None:
        parts.append((retained, cut.partly_cut[edge.child]))
    if up:
        moved = [propagate_uncut_marks(ground, part, marks & mask, up=True) for part, mask in parts]
    else:
        moved = [propagate_uncut_marks(ground, part, marks, up=False) & mask for part, mask in parts]
    return reduce(np.bitwise_or, moved)


def propagate_uncut_marks(ground: GroundGraph, edge: EdgeTemplate, bits: Marks, *, up: bool) -> Marks:
    """The marks of one group propagated along an edge template without surgery, in the shape of the other group."""
    child, parent = ground.template.groups[edge.child], ground.template.groups[edge.parent]
    source, target = (child, parent) if up else (parent, child)
    dropped = tuple(k for k, plate in enumerate(source.plates) if plate not in target.plates)
    bits = np.bitwise_or.reduce(bits, axis=dropped) if dropped else bits
    bits = bits[..., None, :] if source.word_stack is None else bits
    if parent.word_stack is not None and edge.reaches:
        n, m = child.count_words(ground.word_counts), parent.count_words(ground.word_counts)
        bits = reduce(np.bitwise_or, [_propagate_by_reach(reach, bits, n, m, up) for reach in edge.reaches])
    elif up:
        bits = np.bitwise_or.reduce(bits, axis=-2, keepdims=True)
    shared = [plate for plate in source.plates if plate in target.plates]
    order = [shared.index(plate) for plate in target.plates if plate in shared]
    bits = bits.transpose(*order, len(shared), len(shared) + 1)
    for k, plate in enumerate(target.plates):
        if plate not in shared:
            bits = np.expand_dims(bits, k)
    bits = bits[..., 0, :] if target.word_stack is None else bits
    return np.broadcast_to(bits, (*ground.shapes[target.index], bits.shape[-1]))


def _propagate_by_reach(reach: Reach, bits: Marks, n: int, m: int, up: bool) -> Marks:
    """The marks of n words of a child propagated to the m words of the parent that they read (up), or the reverse."""
    if reach.kind == "same":
        return bits
    if reach.kind == "every":
        return np.bitwise_or.reduce(bits, axis=-2, keepdims=True)
    if reach.kind in ("causal", "earlier") and n == m:
        flow = np.bitwise_or.accumulate(bits[..., ::-1, :] if up else bits, axis=-2)
        flow = flow[..., ::-1, :] if up else flow
        return flow if reach.kind == "causal" else _propagate_by_reach(Reach("before"), flow, n, m, up)
    if reach.kind == "mask":
        rows, inverse = _unique_rows(reach, n, m, up)
        reduced = [np.bitwise_or.reduce(bits[..., row, :], axis=-2) for row in rows]
        return np.stack(reduced, axis=-2)[..., inverse, :]
    low, high = (end.clip(0, m) for end in reach.word_range(np.arange(n), m))
    if up:  # both ends are monotonic in i, so the words that read word j are a range too
        low, high = (np.searchsorted(end, np.arange(m), side="right") for end in (high, low))
    return _reduce_ranges(bits, low, high)


def _reduce_ranges(bits: Marks, low: Ids, high: Ids) -> Marks:
    """The union of the marks of each range of words, `[..., range, lanes]`."""
    # A sparse table: two runs of length 2^k <= l cover a range of length l. They may overlap because OR is idempotent.
    # This is O(n log n) for all ranges.
    reduced = np.zeros((*bits.shape[:-2], len(low), bits.shape[-1]), dtype=bits.dtype)
    length, run = high - low, 1
    while (length >= run).any():
        selected = (length >= run) & (length < 2 * run)
        reduced[..., selected, :] = bits[..., low[selected], :] | bits[..., high[selected] - run, :]
        bits = bits[..., :-run, :] | bits[..., run:, :]
        run *= 2
    return reduced


@lru_cache(maxsize=64)
def _unique_rows(reach: Reach, n: int, m: int, up: bool) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """The distinct rows of a mask, and the index of the row of each word."""
    pairs = reach.matrix(n, m)
    rows, inverse = np.unique(pairs.T if up else pairs, axis=0, return_inverse=True)
    return rows, inverse.reshape(-1)
