"""The ground graph of a sentence: each node group unrolled over its words, heads and other plates.

Nodes are integers. Those of a group are consecutive, in row-major order of its plates, and words are the last axis.
Arrows are computed on demand as integer arrays, and only between selected nodes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.naming import SLICE, WORD, Reach, count_word_from_start, join_name, split_pattern
from bnet_transformer.errors import BNetError, BudgetError, UnknownNameError
from bnet_transformer.graph.template_graph import EdgeTemplate, NodeGroup, TemplateGraph, unknown_node_error

MAX_NODES = 2**40
NO_WORD = np.zeros(1, dtype=np.int64)  # the word index of a node without words
MAX_CACHED_NODES, MAX_CACHED_PARENTS = 2**12, 64  # only short lists of parents are cached

Ids = NDArray[Any]  # int32, or int64 from 2^31 nodes on
Indices = NDArray[Any]
IndexSequence = Sequence[int] | NDArray[Any]
RetainedParents = Mapping[int, tuple[Reach, ...]]  # the groups that a node still reads, with the reaches


@dataclass(frozen=True)
class NodeSelection:
    """A selection of nodes of the ground graph.

    Args:
        slices: The slices, each with the nodes that it reads and computes. None (default) for all.
        words: The words of each stack; all words of stacks that are missing. Default: all.
        plates: The indices of each other plate; all indices of plates that are missing. Default: all.
        weights: Whether groups without words, such as weights, are selected. Default True.
    """

    slices: Collection[int] | None = None
    words: Mapping[str, IndexSequence] = field(default_factory=dict)
    plates: Mapping[str, IndexSequence] = field(default_factory=dict)
    weights: bool = True


ALL_NODES = NodeSelection()


class GroundGraph:
    """The ground graph of a sentence: names, counts, arrows as arrays, parents and children.

    Args:
        template: The template graph.
        word_counts: The number of words of each stack.
        cut_nodes: The ids of nodes without incoming arrows, as after `do`. Default: none.
        retained_parents: For each node that keeps only some of its incoming arrows, the groups that it still reads and
            the reaches. Default: none.

    Raises:
        BudgetError: If there are more than 2^40 nodes.
    """

    def __init__(
        self,
        template: TemplateGraph,
        word_counts: Mapping[str, int],
        cut_nodes: Iterable[int] = (),
        retained_parents: Mapping[int, RetainedParents] | None = None,
    ) -> None:
        self.template = template
        self.word_counts = dict(word_counts)
        shapes = [[template.plate_sizes[plate] for plate in group.plates] for group in template.groups]
        for group, shape in zip(template.groups, shapes, strict=True):
            shape += [] if group.word_stack is None else [self.word_counts[group.word_stack]]
        self.shapes = tuple([tuple(shape) for shape in shapes])
        # The strides of each shape in row-major order, in nodes.
        self.strides = [[math.prod(shape[k + 1 :]) for k in range(len(shape))] for shape in shapes]
        sizes = [math.prod(shape) for shape in self.shapes]
        if sum(sizes) > MAX_NODES:
            raise BudgetError("ground graph", expected=f"at most {MAX_NODES} nodes", actual=f"{sum(sizes)}")
        self.offsets: Ids = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        self._offset_list: list[int] = self.offsets.tolist()  # in which the search of one node is faster
        self._apply_surgery(cut_nodes, retained_parents or {})

    def surgery(
        self, nodes: Iterable[int], retained_parents: Mapping[int, RetainedParents] | None = None
    ) -> GroundGraph:
        """The graph after surgery: the same nodes, with fewer arrows, as `do` requires.

        Args:
            nodes: The ids of all nodes without incoming arrows.
            retained_parents: For each node that keeps only some of its incoming arrows, the groups that it still reads
                and the reaches. None (default) for those of this graph.

        Returns:
            The new graph.
        """
        ground = copy(self)
        ground._apply_surgery(nodes, self.retained_parents if retained_parents is None else retained_parents)
        return ground

    def _apply_surgery(self, cut_nodes: Iterable[int], retained_parents: Mapping[int, RetainedParents]) -> None:
        """Set the nodes without incoming arrows, and those with only the arrows of `retained_parents`."""
        self.cut_nodes, self.retained_parents = frozenset(cut_nodes), dict(retained_parents)
        self.cut_nodes_by_group = self.split_by_group(self.cut_nodes)
        self.partly_cut_by_group = self.split_by_group(
            node for node in self.retained_parents if node not in self.cut_nodes
        )
        self._parents_cache: dict[int, list[int]] = {}

    def split_by_group(self, nodes: Iterable[int], relevant: Collection[int] | None = None) -> dict[int, list[int]]:
        """The nodes of each group.

        Args:
            nodes: The ids of nodes.
            relevant: The indices of the groups that are included. None (default) for all.

        Returns:
            The ids by the index of the group.
        """
        groups: dict[int, list[int]] = {}
        for node in nodes:
            index = self.group_of(node).index
            if relevant is None or index in relevant:
                groups.setdefault(index, []).append(node)
        return groups

    # names

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def axes(self, group: NodeGroup) -> tuple[str, ...]:
        """The axes of the nodes of a group.

        Args:
            group: The group.

        Returns:
            Its plates, then `"word"` if it has words.
        """
        return group.plates if group.word_stack is None else (*group.plates, WORD)

    def id(self, name: object) -> int:
        """The id of a node.

        Args:
            name: The name of the node; a negative word counts from the end.

        Returns:
            The id.

        Raises:
            UnknownNameError: If no node has this name; the message lists near matches.
        """
        return self.ravel_index(*self.parse_name(name))

    def ravel_index(self, group: NodeGroup, index: Sequence[int]) -> int:
        """The id of a node from its group and index.

        Args:
            group: The group.
            index: The indices of the plates, then of the word.

        Returns:
            The id.
        """
        steps = self.strides[group.index]
        return self._offset_list[group.index] + sum([i * step for i, step in zip(index, steps, strict=True)])

    def parse_name(self, name: object) -> tuple[NodeGroup, tuple[int, ...]]:
        """The group and the index of a node from its name: `q_0_2` is word 2 of the group `q_0`.

        Args:
            name: The name of the node; a negative word counts from the end.

        Returns:
            The group, and the indices of the plates and of the word.

        Raises:
            UnknownNameError: If no node has this name; the message lists near matches.
        """
        parsed = self.template.parse_name(name, self.word_counts)
        if parsed is None:
            raise self.unknown_node_error(name)
        return parsed

    def unknown_node_error(self, name: object) -> UnknownNameError:
        """The error for a name that matches no node, or several nodes where one is required.

        Args:
            name: The name or the pattern.

        Returns:
            The error, with the range of valid names or near matches.
        """
        stem = split_pattern(name)[0] if isinstance(name, str) else ""
        groups = self.template.by_stem.get(stem)
        if groups is None:
            of_stacks = {f.stem: next(self.iter_names(f)) for f in reversed(self.template.groups) if f.role == stem}
            if of_stacks:  # the stack is missing in the name
                allowed = ", ".join(f"{full} (such as {first})" for full, first in reversed(of_stacks.items()))
                expected = "a name with the prefix of its stack"
                return UnknownNameError("node", expected=expected, actual=repr(name), allowed=allowed)
            if stem == "c" and "head" in self.template.plate_sizes:
                hint = (
                    "This net sums its heads and has no head selector. Use bt.inclusion to find which heads an answer "
                    "depends on"
                )
                return UnknownNameError("node", expected="a known name", actual=repr(name), hint=hint)
            names = (next(self.iter_names(f)) for f in self.template.groups)
            return unknown_node_error("node", name, names, self.template)
        matched = self.template.match_groups(name, self.word_counts)
        matches = matched or self.template.match_groups(stem, self.word_counts)
        first, last = (
            join_name(group.name, [is_last * (n - 1) if i is None else i for i, n in zip(index, sizes, strict=True)])
            for is_last, (group, index) in enumerate((matches[0], matches[-1]))
            for sizes in (self.shapes[group.index],)
        )
        axes = [*([SLICE] if groups[0].slice is not None else []), *self.axes(groups[0])]
        expected = "the name of one node" if matched else f"a node {'_'.join([stem, *axes])}"
        actual = f"{name!r}, a name of several nodes" if matched else repr(name)
        allowed = first if first == last else f"{first} to {last}"
        return UnknownNameError("node", expected=expected, actual=actual, allowed=allowed)

    def name(self, node: int) -> str:
        """The name of a node.

        Args:
            node: The id of the node.

        Returns:
            The name, such as `"q_0_2"`.
        """
        group, index = self.unravel_index(node)
        return join_name(group.name, index)

    def unravel_index(self, node: int) -> tuple[NodeGroup, tuple[int, ...]]:
        """The group and the index of a node from its id.

        Args:
            node: The id of the node.

        Returns:
            The group, and the indices of the plates and of the word.
        """
        group = self.group_of(node)
        offset, index = int(node) - int(self.offsets[group.index]), []
        for stride in self.strides[group.index]:
            i, offset = divmod(offset, stride)
            index.append(i)
        return group, tuple(index)

    def group_of(self, node: int) -> NodeGroup:
        """The group of a node.

        Args:
            node: The id of the node.

        Returns:
            The group.
        """
        return self.template.groups[bisect_right(self._offset_list, node) - 1]

    def iter_names(self, group: NodeGroup) -> Iterator[str]:
        """The names of the nodes of a group.

        Args:
            group: The group.

        Returns:
            The names, in the order of the ids.
        """
        stems = [group.name]
        for size in self.shapes[group.index]:
            stems = [f"{stem}_{i}" for stem in stems for i in range(size)]
        return iter(stems)

    @cached_property
    def names(self) -> list[str]:
        """The names of all nodes, in the order of the ids."""
        return [name for group in self.template.groups for name in self.iter_names(group)]

    # nodes and arrows

    def is_selected(self, group: NodeGroup, selection: NodeSelection = ALL_NODES) -> bool:
        """Whether a selection contains nodes of a group.

        Args:
            group: The group.
            selection: The selection. Default: all nodes.

        Returns:
            True if it contains at least one node.
        """
        if not selection.weights and group.index in self.template.word_independent:
            return False
        if selection.slices is None or group.step is None:
            return True
        last = self.template.slices[group.stack] - 1
        steps = {min(max(group.step, 0), last)}
        if group.slice is not None:
            steps.add(min(group.slice, last))
        return bool(steps & set(selection.slices))

    def select_indices(self, group: NodeGroup, selection: NodeSelection = ALL_NODES) -> dict[str, Indices]:
        """The selected indices of each axis of a group.

        Args:
            group: The group.
            selection: The selection. Default: all nodes.

        Returns:
            The sorted indices by axis.
        """
        indices = {}
        for axis, size in zip(self.axes(group), self.shapes[group.index], strict=True):
            selected = selection.words.get(group.word_stack or "") if axis == WORD else selection.plates.get(axis)
            index = np.arange(size) if selected is None else np.unique(np.asarray(selected, dtype=np.int64))
            if len(index) and not 0 <= index[0] <= index[-1] < size:
                expected = f"indices from 0 to {size - 1}"
                raise BNetError(f"selection of {axis}", expected=expected, actual=index.tolist())
            indices[axis] = index
        return indices

    def select_nodes(self, group: NodeGroup, selection: NodeSelection = ALL_NODES) -> Ids:
        """The selected nodes of a group.

        Args:
            group: The group.
            selection: The selection. Default: all nodes.

        Returns:
            The sorted ids.
        """
        indices, steps = self.select_indices(group, selection).values(), self.strides[group.index]
        nodes: Ids = np.array([self.offsets[group.index]])
        for index, stride in zip(indices, steps, strict=True):
            nodes = (nodes[:, None] + index * stride).ravel()
        return nodes

    def count_nodes(self, selection: NodeSelection = ALL_NODES) -> int:
        """The number of selected nodes.

        Args:
            selection: The selection. Default: all nodes.

        Returns:
            The number.
        """
        return sum(
            math.prod(len(index) for index in self.select_indices(group, selection).values())
            for group in self.template.groups
            if self.is_selected(group, selection)
        )

    def count_arrows(self, selection: NodeSelection = ALL_NODES, roles: tuple[str, str] | None = None) -> int:
        """The number of arrows between selected nodes, without computing the arrows.

        Args:
            selection: The selection. Default: all nodes.
            roles: The roles of parent and child of the counted arrows, with the prefix of a stack if it has a name.
                None (default) for all.

        Returns:
            The number.
        """
        return sum(self._count_arrows_of_edge(edge, selection) for edge in self._selected_edges(selection, roles))

    def _selected_edges(self, selection: NodeSelection, roles: tuple[str, str] | None = None) -> Iterator[EdgeTemplate]:
        """The edge templates between selected groups, or those of them between two roles."""
        groups = self.template.groups
        is_selected = [self.is_selected(group, selection) for group in groups]
        all_slices = selection.slices is None
        for edge in self.template.edges:
            if roles is not None and roles != (groups[edge.parent].stem, groups[edge.child].stem):
                continue
            if is_selected[edge.parent] and is_selected[edge.child]:
                child, parent = groups[edge.child], groups[edge.parent]
                if all_slices or _is_in_slices(child, parent, set(selection.slices or ()), self.template.slices):
                    yield edge

    def _count_arrows_of_edge(self, edge: EdgeTemplate, selection: NodeSelection) -> int:
        """The number of arrows of one edge template between selected nodes, after surgery."""
        child_idx, parent_idx = (
            self.select_indices(self.template.groups[k], selection) for k in (edge.child, edge.parent)
        )
        plates = {axis for axis in (*child_idx, *parent_idx) if axis != WORD}
        total = math.prod(len(_common_indices(axis, child_idx, parent_idx)) for axis in plates)
        total *= self._count_word_pairs(edge, child_idx.get(WORD, NO_WORD), parent_idx.get(WORD, NO_WORD))
        for node in (*self.get_cut_nodes(edge.child), *self.get_partly_cut_nodes(edge.child)):
            node_idx = {axis: np.array([i]) for axis, i in self._indices_by_axis(node).items()}
            if all(i in child_idx[axis] for axis, i in node_idx.items()):
                total -= len(self._declared_arrows_between(edge, node_idx, parent_idx)[0])
                total += len(self._arrows_between(edge, node_idx, parent_idx)[0])
        return total

    def _count_word_pairs(self, edge: EdgeTemplate, i: Indices, j: Indices) -> int:
        """The number of arrows of an edge from words j to words i."""
        child, parent = self.template.groups[edge.child], self.template.groups[edge.parent]
        if parent.word_stack is None or (child.word_stack is None and not edge.reaches):
            return len(i) * len(j)
        if len(edge.reaches) > 1:
            return int(self.word_adjacency(edge)[np.ix_(i, j)].sum())
        n = child.count_words(self.word_counts)
        return edge.reaches[0].count_arrows(i, j, n, self.word_counts[parent.word_stack])

    def count_words(self, group: int) -> int:
        """The number of words of a group.

        Args:
            group: The index of the group.

        Returns:
            The number; 1 for a group without words.
        """
        return self.template.groups[group].count_words(self.word_counts)

    def get_cut_nodes(self, group: int) -> list[int]:
        """The nodes of a group without incoming arrows after surgery.

        Args:
            group: The index of the group.

        Returns:
            The ids.
        """
        return self.cut_nodes_by_group.get(group, [])

    def get_partly_cut_nodes(self, group: int) -> list[int]:
        """The nodes of a group that kept only some of their incoming arrows.

        Args:
            group: The index of the group.

        Returns:
            The ids.
        """
        return self.partly_cut_by_group.get(group, [])

    def retained_edge(self, edge: EdgeTemplate) -> EdgeTemplate | None:
        """The part of an edge template that partly cut nodes retain.

        Args:
            edge: The edge template, with partly cut nodes in its child group.

        Returns:
            The edge template with the retained reaches; None if nothing is retained.
        """
        reaches = self.retained_parents[self.get_partly_cut_nodes(edge.child)[0]].get(edge.parent)
        return None if reaches is None else replace(edge, reaches=reaches)

    def _indices_by_axis(self, node: int) -> dict[str, int]:
        """The index of a node along each axis of its group."""
        group, index = self.unravel_index(node)
        return dict(zip(self.axes(group), index, strict=True))

    def word_adjacency(self, edge: EdgeTemplate) -> NDArray[np.bool_]:
        """The pairs of words that an edge template joins.

        Args:
            edge: The edge template.

        Returns:
            `[words of the child, words of the parent]`, true for joined pairs; size 1 for a group without words.
        """
        child, parent = self.template.groups[edge.child], self.template.groups[edge.parent]
        n = child.count_words(self.word_counts)
        if parent.word_stack is None or (child.word_stack is None and not edge.reaches):
            return np.ones((n, 1), dtype=bool)
        pairs = [reach.matrix(n, self.word_counts[parent.word_stack]) for reach in edge.reaches]
        return pairs[0] if len(pairs) == 1 else np.logical_or.reduce(pairs)

    def arrows(
        self, selection: NodeSelection = ALL_NODES, roles: tuple[str, str] | None = None
    ) -> Iterator[tuple[EdgeTemplate, Ids, Ids]]:
        """The arrows between selected nodes.

        Args:
            selection: The selection. Default: all nodes.
            roles: The roles of parent and child, with the prefix of a stack if it has a name. None (default) for all.

        Returns:
            For each edge template, the template, the ids of the parents and the ids of the children, `[arrow]` each.
        """
        for edge in self._selected_edges(selection, roles):
            child_idx, parent_idx = (
                self.select_indices(self.template.groups[k], selection) for k in (edge.child, edge.parent)
            )
            yield edge, *self._arrows_between(edge, child_idx, parent_idx)

    def _arrows_between(
        self, edge: EdgeTemplate, child_indices: Mapping[str, Indices], parent_indices: Mapping[str, Indices]
    ) -> tuple[Ids, Ids]:
        """The arrows of an edge template between some indices of child and parent, after surgery."""
        sources, targets, word_pairs = self._declared_arrows_between(edge, child_indices, parent_indices)
        cut, partly_cut = self.get_cut_nodes(edge.child), self.get_partly_cut_nodes(edge.child)
        if not cut and not partly_cut:
            return sources, targets
        is_retained = ~np.isin(targets, cut)
        if partly_cut:
            retained = self.retained_edge(edge)
            is_read = False if retained is None else np.resize(self.word_adjacency(retained)[word_pairs], len(targets))
            is_retained &= is_read | ~np.isin(targets, partly_cut)
        return sources[is_retained], targets[is_retained]

    def _declared_arrows_between(
        self, edge: EdgeTemplate, child_indices: Mapping[str, Indices], parent_indices: Mapping[str, Indices]
    ) -> tuple[Ids, Ids, tuple[Indices, Indices]]:
        """The parents and children of the arrows before surgery, and their word indices, repeated for each plate."""
        child, parent = self.template.groups[edge.child], self.template.groups[edge.parent]
        child_words, parent_words = child_indices.get(WORD, NO_WORD), parent_indices.get(WORD, NO_WORD)
        i, j = self.word_adjacency(edge)[np.ix_(child_words, parent_words)].nonzero()
        word_pairs = child_words[i], parent_words[j]
        dtype = np.int32 if len(self) < 2**31 else np.int64
        child_strides, parent_strides = (
            dict(zip(self.axes(group), self.strides[group.index], strict=True)) for group in (child, parent)
        )
        sources: Ids = np.array([self.offsets[parent.index]], dtype=dtype)
        targets: Ids = np.array([self.offsets[child.index]], dtype=dtype)
        for axis in dict.fromkeys([*child.plates, *parent.plates]):
            index: Ids = _common_indices(axis, child_indices, parent_indices).astype(dtype)
            sources = (sources[:, None] + index * dtype(parent_strides.get(axis, 0))).ravel()
            targets = (targets[:, None] + index * dtype(child_strides.get(axis, 0))).ravel()
        sources = (sources[:, None] + word_pairs[1].astype(dtype)).ravel()
        targets = (targets[:, None] + word_pairs[0].astype(dtype)).ravel()
        return sources, targets, word_pairs

    def parents(self, node: int) -> list[int]:
        """The parents of a node.

        Args:
            node: The id of the node.

        Returns:
            The ids, in the order of the edge templates of its group.
        """
        parents = self._parents_cache.get(node)
        if parents is None:
            parents = self._compute_parents(node)
            if len(parents) <= MAX_CACHED_PARENTS and len(self._parents_cache) < MAX_CACHED_NODES:
                self._parents_cache[node] = parents
        return parents.copy()

    def _compute_parents(self, node: int) -> list[int]:
        """The parents of one node, computed with Python integers."""
        # For a small number of parents this is three times as fast as arrays.
        if node in self.cut_nodes:
            return []
        node_indices, parents = self._indices_by_axis(node), list[int]()
        for edge in self.template.in_edges[self.group_of(node).index]:
            parent, is_read = self.template.groups[edge.parent], self.word_adjacency(edge)[node_indices.get(WORD, 0)]
            if node in self.retained_parents:
                retained = self.retained_edge(edge)
                adjacency = None if retained is None else self.word_adjacency(retained)[node_indices.get(WORD, 0)]
                is_read = is_read[:0] if adjacency is None else is_read & adjacency
            words = np.flatnonzero(is_read).tolist()
            if not words:  # also for a parent without words
                continue
            ids = [int(self.offsets[parent.index])]
            shape, steps = self.shapes[parent.index], self.strides[parent.index]
            for axis, size, step in zip(self.axes(parent), shape, steps, strict=True):
                picks = words if axis == WORD else [node_indices[axis]] if axis in node_indices else range(size)
                ids = [k + i * step for k in ids for i in picks]
            parents += ids
        return parents

    def children(self, node: int) -> list[int]:
        """The children of a node.

        Args:
            node: The id of the node.

        Returns:
            The ids.
        """
        parent_idx = {axis: np.array([i]) for axis, i in self._indices_by_axis(node).items()}
        children: list[int] = []
        for edge in self.template.out_edges[self.group_of(node).index]:
            child_idx = self.select_indices(self.template.groups[edge.child])
            children.extend(self._arrows_between(edge, child_idx, parent_idx)[1].tolist())
        return children


def _common_indices(axis: str, child_indices: Mapping[str, Indices], parent_indices: Mapping[str, Indices]) -> Indices:
    """The indices of an axis that child and parent have in common, or those of the one with the axis."""
    if axis in child_indices and axis in parent_indices:
        return np.intersect1d(child_indices[axis], parent_indices[axis])
    return child_indices[axis] if axis in child_indices else parent_indices[axis]


def _is_in_slices(child: NodeGroup, parent: NodeGroup, slices: set[int], depth: Mapping[str, int]) -> bool:
    """True if an arrow belongs to one of `slices`: the slice of its child, or of its parent if the child has no stack.

    The prologue belongs to the first slice, and the epilogue to the last.
    """
    step = child.step if child.step is not None else parent.step
    if step is None:
        return True
    last = depth[child.stack if child.step is not None else parent.stack] - 1
    return min(max(step, 0), last) in slices


# --------------------------------------------------------------------------------------------------------------------
# The nodes of a name: one node, or a family, which is an array of nodes along the indices that the name leaves open.
#
# All functions that take names of nodes find them here, so that a name or a pattern has one meaning everywhere. The
# rule is in `_core.naming`, and on the page "Declare an architecture".


@dataclass(frozen=True)
class NodeFamily:
    """The nodes of a name or a pattern.

    Args:
        name: The name or the pattern.
        parts: For each node group, the ids of the nodes as an array along its open axes.
        axes: For each node group, the open axes: those plates, and `"word"`, of which the name has no number.
    """

    name: str
    parts: tuple[Ids, ...] = field(repr=False)
    axes: tuple[tuple[str, ...], ...]

    @property
    def nodes(self) -> list[int]:
        """The ids of all nodes: by node group, then in row-major order of the open axes."""
        return [node for part in self.parts for node in part.ravel().tolist()]

    @property
    def is_node(self) -> bool:
        """True for the name of one node; False for an array of nodes, also if it has only one."""
        return len(self.parts) == 1 and not self.axes[0]

    @property
    def open_axes(self) -> tuple[str, ...]:
        """The axes of `array`: `"slice"` for several slices, then the open plates, then `"word"`.

        Raises:
            BNetError: The node groups have different axes.
        """
        if len({(axes, part.shape) for axes, part in zip(self.axes, self.parts, strict=True)}) > 1:
            expected = "a role whose nodes have the same axes in all slices"
            raise BNetError(self.name, expected=expected, actual="groups with different axes")
        return ((SLICE,) if len(self.parts) > 1 else ()) + self.axes[0]

    @property
    def array(self) -> Ids:
        """The ids of all nodes, as an array along `open_axes`."""
        return np.stack(self.parts) if len(self.open_axes) > len(self.axes[0]) else self.parts[0]


def find_family(ground: GroundGraph, name: object) -> NodeFamily:
    """The nodes of a name or a pattern.

    Args:
        ground: The graph of the sentence.
        name: A node (`q_2_0_3`), a node group (`q_2`), a role (`q`), a name without its last indices (`q_2_0`: head 0
            at all words), or a pattern (`q_2_*_3`). A negative word counts from the end (`q_2_0_-1`).

    Raises:
        UnknownNameError: The name matches no node.

    >>> import bnet_transformer as bt
    >>> ground = bt.bayesuvius(dim=4, heads=2, combine="concat").sentence("the cat sat").ground
    >>> family = find_family(ground, "q_0_*_-1")
    >>> family.axes, list(map(ground.name, family.nodes))
    ((('head',),), ['q_0_0_2', 'q_0_1_2'])
    """
    parts, axes = list[Ids](), list[tuple[str, ...]]()
    for group, index in ground.template.match_groups(name, ground.word_counts):
        ids: Ids = np.asarray(ground.offsets[group.index])
        for i, size, step in zip(index, ground.shapes[group.index], ground.strides[group.index], strict=True):
            ids = ids[..., None] + step * np.arange(size) if i is None else np.asarray(ids + i * step)
        parts.append(ids)
        axes.append(tuple([axis for axis, i in zip(ground.axes(group), index, strict=True) if i is None]))
    if not any(part.size for part in parts):
        raise ground.unknown_node_error(name)
    return NodeFamily(str(name), tuple(parts), tuple(axes))


def count_from_start(ground: GroundGraph, name: str) -> str:
    """The same name or pattern, with a word that is counted from the start: `y_-1` of three words is `y_2`.

    Args:
        ground: The graph of the sentence.
        name: The name or the pattern, also with entries; it is returned unchanged if it matches no node.
    """
    groups = [group for group, _ in ground.template.match_groups(name.partition("[")[0], ground.word_counts)]
    stack = groups[0].word_stack if groups else None
    return name if stack is None else count_word_from_start(name, ground.word_counts[stack])
