"""The template graph (the folded graph): one node group for each node template and slice, and edges between groups.

It does not depend on a sentence, so the plate of words has no size. `GroundGraph` adds the words.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from bnet_transformer._core.naming import (
    EVERY_NODE,
    FIRST_STATE,
    HOOK_ALIASES,
    HOOK_PATTERN,
    NEXT_STATE,
    POST_NORM_HOOKS,
    PRE_NORM_HOOKS,
    STACK_BLOCKS,
    WORD,
    Reach,
    join_name,
    join_stem,
    split_pattern,
)
from bnet_transformer.errors import UnknownNameError, unknown_name_error


@dataclass(frozen=True)
class NodeGroup:
    """All nodes of one template at one slice: the group `q_0` has the nodes `q_0_0`, `q_0_1`, ...

    Args:
        index: The index of the group in the template graph.
        stack: The name of its stack; empty for an unnamed stack, or outside the stacks.
        role: The role.
        slice: The slice in the name of its nodes; None for none.
        plates: The plates, without that of words.
        word_stack: The stack of its words; None for a group without words.
        step: The position in the stack: -1 for the prologue, t for a node that slice t computes (also the state
            `x_(t+1)`), the number of slices for the epilogue. None (default) outside the stacks.
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
        """The name without indices: the role, with the prefix of a named stack."""
        return join_stem(self.stack, self.role)

    @cached_property
    def name(self) -> str:
        """The name of the group: its stem and slice."""
        return join_name(self.stem, () if self.slice is None else (self.slice,))

    def count_words(self, word_counts: Mapping[str, int]) -> int:
        """The number of words of the group in a sentence.

        Args:
            word_counts: The number of words of each stack.

        Returns:
            The number; 1 for a group without words.
        """
        return 1 if self.word_stack is None else word_counts[self.word_stack]


@dataclass(frozen=True)
class EdgeTemplate:
    """All arrows from one group to another.

    An arrow joins nodes with the same index of each common plate, and all indices of other plates.

    Args:
        parent: The index of the parent group.
        child: The index of the child group.
        reaches: The reaches by which the child depends on words of the parent; an arrow exists if one of them
            contains it.
        slots: The slots of the child's TPM that the parent fills.
    """

    parent: int
    child: int
    reaches: tuple[Reach, ...]
    slots: tuple[str, ...]


@dataclass(frozen=True)
class TemplateGraph:
    """Node groups and edge templates.

    Args:
        groups: The groups in topological order; those of a recurrent component are adjacent.
        edges: The edge templates.
        plate_sizes: The size of each plate.
        slices: The number of slices of each stack.
        components: The strongly connected components in topological order, as indices of groups.
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
        """The stacks with words, in order; empty for a net without words."""
        used = {group.word_stack for group in self.groups}
        return tuple(stack for stack in self.slices if stack in used)

    @property
    def depth(self) -> int:
        """The number of slices of the deepest stack; 0 in a net without slices."""
        return max(self.slices.values(), default=0)

    @cached_property
    def by_name(self) -> dict[str, NodeGroup]:
        """The groups by name."""
        return {group.name: group for group in self.groups}

    @cached_property
    def by_stem(self) -> dict[str, tuple[NodeGroup, ...]]:
        """The groups of all slices by stem."""
        by_stem: dict[str, list[NodeGroup]] = {}
        for group in self.groups:
            by_stem.setdefault(group.stem, []).append(group)
        return {stem: tuple(groups) for stem, groups in by_stem.items()}

    @cached_property
    def in_edges(self) -> tuple[tuple[EdgeTemplate, ...], ...]:
        """The incoming edges of each group."""
        edges: list[list[EdgeTemplate]] = [[] for _ in self.groups]
        for edge in self.edges:
            edges[edge.child].append(edge)
        return tuple(map(tuple, edges))

    @cached_property
    def out_edges(self) -> tuple[tuple[EdgeTemplate, ...], ...]:
        """The outgoing edges of each group."""
        edges: list[list[EdgeTemplate]] = [[] for _ in self.groups]
        for edge in self.edges:
            edges[edge.parent].append(edge)
        return tuple(map(tuple, edges))

    @cached_property
    def word_independent(self) -> frozenset[int]:
        """The groups without words that have no ancestor with words, such as `W_q_0` and `c`.

        Empty for a net without words.
        """
        independent: set[int] = set()
        for group in self.groups if self.word_stacks else ():
            parents = (edge.parent for edge in self.in_edges[group.index])
            if group.word_stack is None and all(parent in independent for parent in parents):
                independent.add(group.index)
        return frozenset(independent)

    @cached_property
    def recurrent(self) -> frozenset[int]:
        """The groups with words that are computed one after another, because they are part of a cycle."""
        in_cycle = {index for component in self.components if len(component) > 1 for index in component}
        return frozenset(in_cycle | {edge.child for edge in self.edges if edge.child == edge.parent})

    @cached_property
    def backward(self) -> frozenset[int]:
        """The recurrent groups that are computed from the last word to the first: their component reads later words."""
        component_of = {index: k for k, component in enumerate(self.components) for index in component}
        backward_components = {
            component_of[edge.child]
            for edge in self.edges
            if component_of[edge.child] == component_of[edge.parent] and any(r.kind == "after" for r in edge.reaches)
        }
        return frozenset(index for k in backward_components for index in self.components[k])

    def ancestors(self, groups: Iterable[int], blocked_groups: Container[int] = ()) -> set[int]:
        """The ancestors of some groups; one of `groups` is included only if it is an ancestor of another.

        Args:
            groups: The indices of the groups.
            blocked_groups: The groups with parents that are not visited, even if they are in `groups`. Default: none.

        Returns:
            The indices of the ancestors.
        """
        return self._transitive_closure(groups, True, blocked_groups)

    def descendants(self, groups: Iterable[int]) -> set[int]:
        """The descendants of some groups; one of `groups` is included only if it is a descendant of another.

        Args:
            groups: The indices of the groups.

        Returns:
            The indices of the descendants.
        """
        return self._transitive_closure(groups, False, ())

    def ancestral_set(self, groups: Iterable[int], blocked_groups: Container[int] = ()) -> set[int]:
        """Some groups and all their ancestors.

        Args:
            groups: The indices of the groups.
            blocked_groups: The groups with parents that are not visited. Default: none.

        Returns:
            The indices of the groups and their ancestors.
        """
        start = set(groups)
        return start | self._transitive_closure(start, True, blocked_groups)

    def _transitive_closure(self, groups: Iterable[int], up: bool, blocked_groups: Container[int]) -> set[int]:
        """The groups that a path of at least one edge joins to `groups`, upwards or downwards."""
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
        """The group of a given name.

        Args:
            name: The name of a group, such as `"q_0"`.

        Returns:
            The group.

        Raises:
            UnknownNameError: If no group has this name; the message lists near matches, or the groups of nodes.
        """
        try:
            return self.by_name[name]
        except (KeyError, TypeError):
            groups = [group.name for group, _ in self.match_groups(name, {})]
            if not groups or name == EVERY_NODE:
                raise unknown_node_error("node group", name, self.by_name, self) from None
            is_node = self.find_group_of_node(name) is not None
            actual = f"the node {name!r}" if is_node else f"{name!r}, a name of several nodes"
            kind = "the group of this node" if is_node else "a group of these nodes"
            hint = f"Pass {kind}, {', '.join(map(repr, groups[:8]))}{', …' if len(groups) > 8 else ''}"
            raise UnknownNameError("node group", expected="the name of a group", actual=actual, hint=hint) from None

    def find_group_of_node(self, name: object) -> NodeGroup | None:
        """The group of a node: `q_0` for `q_0_2`.

        Args:
            name: The name of the node.

        Returns:
            The group; None if there is no such node.
        """
        parsed = self.parse_name(name, {})
        return parsed[0] if parsed and parsed[1] else None

    def parse_name(self, name: object, word_counts: Mapping[str, int]) -> tuple[NodeGroup, tuple[int, ...]] | None:
        """The group and the index of a node from its name: `q_0_2` is word 2 of the group `q_0`.

        Args:
            name: The name of the node; a negative word counts from the end.
            word_counts: The number of words of each stack; unlimited for stacks that are missing.

        Returns:
            The group, and the indices of the plates and of the word; None if there is no such node.
        """
        if not isinstance(name, str) or None in split_pattern(name)[1]:  # a star is several nodes, also of the slice
            return None
        for group, index in self.match_groups(name, word_counts):
            values = tuple(i for i in index if i is not None)
            if len(values) == len(index) and self.has_all_indices(name, group):
                return group, values
        return None

    def has_all_indices(self, name: object, group: NodeGroup) -> bool:
        """Whether a name or a pattern of nodes of a group has a number or a star for each of their indices.

        Args:
            name: The name or the pattern.
            group: A group that it matches.
        """
        count = (group.slice is not None) + len(group.plates) + (group.word_stack is not None)
        return name != EVERY_NODE and isinstance(name, str) and len(split_pattern(name)[1]) == count

    def match_groups(
        self, name: object, word_counts: Mapping[str, int]
    ) -> list[tuple[NodeGroup, tuple[int | None, ...]]]:
        """The groups of the nodes that a name or a pattern matches.

        Args:
            name: The name or the pattern: numbers and stars for the indices, of which the last may be missing.
            word_counts: The number of words of each stack; unlimited for stacks that are missing.

        Returns:
            Each group, with the indices of its plates and its word, counted from the start; None for every index.
        """
        stem, indices = split_pattern(name) if isinstance(name, str) else ("", ())
        matches: list[tuple[NodeGroup, tuple[int | None, ...]]] = []
        groups = self.groups if name == EVERY_NODE else self.by_stem.get(stem, ())
        if indices and indices[0] is not None and (in_slice := self.by_name.get(f"{stem}_{indices[0]}")) is not None:
            groups = (in_slice,)  # without a loop over all slices, because names are parsed often
        for group in groups:
            sizes = [self.plate_sizes[plate] for plate in group.plates]
            sizes += [] if group.word_stack is None else [word_counts.get(group.word_stack, sys.maxsize)]
            is_in_slice = group.slice is None or not indices or indices[0] in (None, group.slice)
            index = list(indices[group.slice is not None :])
            if group.word_stack is not None and len(index) == len(sizes) and (index[-1] or 0) < 0:
                index[-1] += sizes[-1]  # type: ignore[operator]  # a negative number is not None
            is_inside = all(i is None or 0 <= i < size for i, size in zip(index, sizes, strict=False))
            if is_in_slice and is_inside and len(index) <= len(sizes):
                matches.append((group, (*index, *[None] * (len(sizes) - len(index)))))
        return matches


def unknown_node_error(subject: str, name: object, names: Iterable[str], template: TemplateGraph) -> UnknownNameError:
    """The error for an unknown node: it names the equivalent of a hook of TransformerLens, or else near matches.

    Args:
        subject: The argument, as the message names it.
        name: The unknown name.
        names: The known names.
        template: The template graph of the net.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> print(unknown_node_error("node", "blocks.0.hook_resid_pre", [], s.ground.template))
    node: expected a name of this net; got 'blocks.0.hook_resid_pre'. This hook of TransformerLens is x_0_word here, \
such as x_0_0. To set all of them: do(x_0=...), or at=['x_0'] in a sweep.
    """
    match = HOOK_PATTERN.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        hint = "Neurons are nodes of net.expose_neurons()" if isinstance(name, str) and "neuron" in name else None
        return unknown_name_error(subject, name, names, hint=hint)
    hint = _describe_hook(template, match)
    return UnknownNameError(subject, expected="a name of this net", actual=repr(name), hint=hint)


def get_attention_name(group: NodeGroup) -> str:
    """The name of the rows of attention of a group in sweeps: `j`, `dec_cross_j`."""
    role = "j" if group.role in ("a", "x") else f"{group.role.removesuffix('_a')}_j"
    return join_stem(group.stack, role)


# The state and the parts of attention are found from the edges of the graph, whatever their roles are called; the other
# nodes that a hook of TransformerLens holds are found by role.
def _describe_hook(template: TemplateGraph, match: re.Match[str]) -> str:
    """The nodes that a hook holds, in a sentence without its full stop."""
    point, t = match["point"], None if match["t"] is None else int(match["t"])
    for alias, hook in HOOK_ALIASES.items():
        point = re.sub(rf"(^|\.){re.escape(alias)}$", rf"\g<1>{hook}", point)
    if t is not None:
        point = f"blocks.{{t}}.{point}"
    only_stack = STACK_BLOCKS.get(match["blocks"] or "")
    stacks = [stack for stack in template.slices if only_stack in (None, stack)]
    matches: list[tuple[str, NodeGroup]] = []
    for stack in stacks:
        norm, attention = template.by_name.get(f"{join_stem(stack, 'norm1')}_0"), _find_attention(template, stack, 0)
        is_pre_norm = norm is None or attention is None or attention.index not in template.ancestors([norm.index])
        hooks = PRE_NORM_HOOKS if is_pre_norm else POST_NORM_HOOKS
        groups = ((role, _find_group(template, stack, role, t)) for role, points in hooks.items() if point in points)
        matches += [(role, group) for role, group in groups if group is not None]
    if not matches:
        depth = max((template.slices[stack] for stack in stacks), default=0)
        if t is not None and t >= depth:
            return f"Block t of TransformerLens is slice t here, and this net has {depth} slices, counted from 0"
        return "This net has no node for this hook of TransformerLens"
    return "This hook of TransformerLens is " + ". Or: ".join(_describe_group(template, *pair) for pair in matches)


def _describe_group(template: TemplateGraph, role: str, group: NodeGroup) -> str:
    """The names of the nodes of a group, with an example."""
    axes = [*group.plates, *([WORD] if group.word_stack is not None else [])]
    names, first = "_".join([group.name, *axes]), join_name(group.name, [0] * len(axes))
    if role == "j":
        attentions = [other for other in template.groups if other.step == group.step and _has_queries(template, other)]
        option, at = "" if len(attentions) == 1 else f", role={group.stem!r}", get_attention_name(group)
        query = f"s.attention({group.step or 0}{option})"
        return f"P(j | i) of {names} here: {query}, do({first}=Attend(row)), or at={at!r} in a sweep"
    every = f", such as {first}. To set all of them: do({group.name}=...), or at=['{group.name}'] in a sweep"
    return f"{names} here" + (every if axes else "")


def _find_group(template: TemplateGraph, stack: str, role: str, t: int | None) -> NodeGroup | None:
    """The group of a role of the table in slice t; None where the net has none."""
    if role in ("x", FIRST_STATE, NEXT_STATE):
        number = (t or 0) + (role == NEXT_STATE)
        slices = template.slices[stack]
        states = [
            groups
            for groups in template.by_stem.values()  # the state is the role that has one slice more than the stack
            if groups[0].stack == stack and {group.slice for group in groups} == set(range(slices + 1))
        ]
        return states[0][number] if states and (t or 0) < slices else None
    if role in ("q", "k", "v", "j", "a"):
        attention = _find_attention(template, stack, t or 0)
        if attention is None or role in ("j", "a"):
            return attention
        return template.groups[_get_parent(template, attention, role)]
    stem = join_stem(stack, role)
    return template.by_name.get(stem if t is None else join_name(stem, (t,)))


def _find_attention(template: TemplateGraph, stack: str, t: int) -> NodeGroup | None:
    """The first group in slice t of a stack that has queries, and keys of the same stack."""
    for group in template.groups:
        if (group.stack, group.step) == (stack, t):
            keys = _get_parent(template, group, "k")
            if _has_queries(template, group) and keys >= 0 and template.groups[keys].word_stack == stack:
                return group
    return None


def _has_queries(template: TemplateGraph, group: NodeGroup) -> bool:
    """Whether a group is attention: it has a parent in the slot q."""
    return _get_parent(template, group, "q") >= 0


def _get_parent(template: TemplateGraph, group: NodeGroup, slot: str) -> int:
    """The index of the parent in a slot of attention (q, k or v); -1 without a parent."""
    edges = template.in_edges[group.index]
    return next((edge.parent for edge in edges if any(name.rstrip(".") == slot for name in edge.slots)), -1)
