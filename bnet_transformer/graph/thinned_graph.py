"""Thinned ground graphs: a separation query on few words and heads needs only a small graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from bnet_transformer._core.naming import WORD
from bnet_transformer.graph.ground_graph import GroundGraph
from bnet_transformer.graph.template_graph import NodeGroup

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

    def to_full(self, node: int, query: int = 0) -> int:
        """The id in the full graph of a node of the smaller graph."""
        group, index = self.ground.unravel_index(node)
        retained = self.retained[query]
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
