"""The folded graph: one node group for each node template and slice, with its plates, and the edges between groups.

It has no sentence, so the word plate has no size. `GroundGraph` adds the words.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from bnet_transformer._core.naming import Reach, join_name, join_stem, split_name
from bnet_transformer.errors import UnknownNameError, unknown_name_error


@dataclass(frozen=True)
class NodeGroup:
    """All nodes of one template at one slice: `q_0` stands for `q_0_0`, `q_0_1`, ... over its plates.

    `step` orders a stack: -1 for its prologue, t for what slice t computes (its state `x_(t+1)` included),
    `slices` for its epilogue; None for a node outside every stack.
    """

    index: int
    stack: str
    role: str
    slice: int | None
    plates: tuple[str, ...]
    word_stack: str | None
    step: int | None = None

    @cached_property
    def stem(self) -> str:
        return join_stem(self.stack, self.role)

    @cached_property
    def name(self) -> str:
        return join_name(self.stem, () if self.slice is None else (self.slice,))


@dataclass(frozen=True)
class EdgeTemplate:
    """All arrows from one group to another: for a shared plate the same index, for a plate of the parent alone every
    index, for words the union of the reaches (one for each slot of the child that the parent fills).
    """

    parent: int
    child: int
    reaches: tuple[Reach, ...]
    slots: tuple[str, ...]


@dataclass(frozen=True)
class TemplateGraph:
    """Node groups and edge templates.

    Groups are in topological order; those of a recurrent component are adjacent. `components` are the strongly
    connected components in that order.
    """

    groups: tuple[NodeGroup, ...]
    edges: tuple[EdgeTemplate, ...]
    plate_sizes: Mapping[str, int]
    slices: Mapping[str, int]
    components: tuple[tuple[int, ...], ...] = field(default=())

    @cached_property
    def without_plates(self) -> TemplateGraph:
        """The same graph with one node for each group: without plates, words and reaches."""
        groups = tuple(replace(group, plates=(), word_stack=None) for group in self.groups)
        edges = tuple(replace(edge, reaches=()) for edge in self.edges)
        return TemplateGraph(groups, edges, {}, self.slices, self.components)

    @cached_property
    def word_stacks(self) -> tuple[str, ...]:
        """The stacks with a group over their words, in order; none in a net without words."""
        used = {group.word_stack for group in self.groups}
        return tuple(stack for stack in self.slices if stack in used)

    @property
    def depth(self) -> int:
        """The number of slices of the deepest stack; 0 in a net without slices."""
        return max(self.slices.values(), default=0)

    @cached_property
    def by_name(self) -> dict[str, NodeGroup]:
        return {group.name: group for group in self.groups}

    @cached_property
    def by_stem(self) -> dict[str, tuple[NodeGroup, ...]]:
        by_stem: dict[str, list[NodeGroup]] = {}
        for group in self.groups:
            by_stem.setdefault(group.stem, []).append(group)
        return {stem: tuple(groups) for stem, groups in by_stem.items()}

    @cached_property
    def in_edges(self) -> tuple[tuple[EdgeTemplate, ...], ...]:
        """The incoming edges of each group."""
        return _collect_edges(len(self.groups), ((edge.child, edge) for edge in self.edges))

    @cached_property
    def out_edges(self) -> tuple[tuple[EdgeTemplate, ...], ...]:
        """The outgoing edges of each group."""
        return _collect_edges(len(self.groups), ((edge.parent, edge) for edge in self.edges))

    @cached_property
    def word_independent(self) -> frozenset[int]:
        """The weights: groups that are not over words and have no ancestor that is (`W_q_0`, `c`).

        A net without words has no weights in this sense.
        """
        independent: set[int] = set()
        for group in self.groups if self.word_stacks else ():
            parents = (edge.parent for edge in self.in_edges[group.index])
            if group.word_stack is None and all(parent in independent for parent in parents):
                independent.add(group.index)
        return frozenset(independent)

    @cached_property
    def recurrent(self) -> frozenset[int]:
        """The groups whose words are computed one after another: they read themselves, or each other in a component."""
        in_cycle = {index for component in self.components if len(component) > 1 for index in component}
        return frozenset(in_cycle | {edge.child for edge in self.edges if edge.child == edge.parent})

    def ancestors(self, groups: Iterable[int], blocked_groups: Container[int] = ()) -> set[int]:
        """The groups from which edges lead to `groups`; these are included only where one leads to another.

        Args:
            groups: Where the search starts.
            blocked_groups: Groups whose parents are not visited, even if the search starts there.
        """
        return self._transitive_closure(groups, True, blocked_groups)

    def descendants(self, groups: Iterable[int]) -> set[int]:
        """The groups to which edges lead from `groups`; these are included only where one leads to another."""
        return self._transitive_closure(groups, False, ())

    def ancestral_set(self, groups: Iterable[int], blocked_groups: Container[int] = ()) -> set[int]:
        """`groups` and all their ancestors."""
        start = set(groups)
        return start | self.ancestors(start, blocked_groups)

    def _transitive_closure(self, groups: Iterable[int], up: bool, blocked_groups: Container[int]) -> set[int]:
        closure: set[int] = set()
        stack = list(groups)
        while stack:
            index = stack.pop()
            if index not in blocked_groups:
                edges = self.in_edges[index] if up else self.out_edges[index]
                fresh = {edge.parent if up else edge.child for edge in edges} - closure
                closure |= fresh
                stack.extend(fresh)
        return closure

    def get_group(self, name: str) -> NodeGroup:
        """The group of that name, or the error with near matches; the name of a single node has its own message."""
        try:
            return self.by_name[name]
        except (KeyError, TypeError):
            group = self.find_group_of_node(name)
            if group is None:
                raise unknown_name_error("family", name, self.by_name) from None
            actual, allowed = f"{name!r}, one node", f"{group.name!r}"
            raise UnknownNameError("family", expected="the name of a family", actual=actual, allowed=allowed) from None

    def find_group_of_node(self, name: object) -> NodeGroup | None:
        """The group of a single node by its name: `q_0` for `q_0_2`."""
        parsed = self.parse_name(name, {})
        return parsed[0] if parsed and parsed[1] else None

    def parse_name(self, name: object, word_counts: Mapping[str, int]) -> tuple[NodeGroup, tuple[int, ...]] | None:
        """The group of a node and its index there, or None.

        Args:
            name: The name of a node: `q_0_2` is word 2 of the group `q_0`.
            word_counts: The number of words of each stack; unlimited for stacks that are missing.
        """
        stem, indices = split_name(name) if isinstance(name, str) else ("", ())
        for group in self.by_stem.get(stem, ()):
            prefix = () if group.slice is None else (group.slice,)
            sizes = [self.plate_sizes[plate] for plate in group.plates]
            sizes += [] if group.word_stack is None else [word_counts.get(group.word_stack, sys.maxsize)]
            index = indices[len(prefix) :]
            is_inside = len(index) == len(sizes) and all(i < n for i, n in zip(index, sizes, strict=True))
            if indices[: len(prefix)] == prefix and is_inside:
                return group, index
        return None


def _collect_edges(count: int, pairs: Iterable[tuple[int, EdgeTemplate]]) -> tuple[tuple[EdgeTemplate, ...], ...]:
    edges: list[list[EdgeTemplate]] = [[] for _ in range(count)]
    for index, edge in pairs:
        edges[index].append(edge)
    return tuple(map(tuple, edges))
