"""Slices whose equations are equal are told once: each node template with its slices, and what it calls them.

A template is a node of the declaration. Its slices differ in nothing but the number t, unless an arrow
comes from another slice at some of them than at the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bnet_transformer.equations.letters import Letters
from bnet_transformer.graph import Family
from bnet_transformer.network import Member, Network


@dataclass(frozen=True)
class Group:
    """The members, one a slice, that one equation tells; `part` where they are not all of the template."""

    network: Network
    letters: Letters
    members: tuple[Member, ...]
    part: bool = False

    @property
    def first(self) -> Member:
        """The member whose parents and shapes stand for all."""
        return self.members[0]

    @property
    def slices(self) -> tuple[int, ...]:
        """The slices told: none for a node of the prologue, the epilogue or outside the stacks."""
        return tuple(_step(self.network, m.family) for m in self.members if _in_slices(self.network, m.family))

    @property
    def own(self) -> str | None:
        """The slice index of the node itself: t, t+1 for a state that leaves, 0 for one that enters."""
        return self.slice([member.family for member in self.members])

    def parent(self, place: int) -> str | None:
        """The slice index of what fills an input."""
        return self.slice([self._family(m.inputs[place].parent) for m in self.members])

    def selector(self, place: int, number: int) -> str | None:
        """The slice index of what picks in an input."""
        return self.slice([self._family(m.inputs[place].pick[number][1]) for m in self.members])

    def slice(self, families: Sequence[Family]) -> str | None:
        """What to call the slice of these families, one for each slice of the group."""
        family = families[0]
        if family.slice is None:
            return None
        steps = self.slices
        if not steps or _fixed(families, steps):
            return self._number(family)
        offset = family.slice - steps[0]
        near = family.stack == self.first.family.stack and offset in (0, 1)
        if len(steps) == 1 and not near:
            return self._number(family)
        return f"t{offset:+d}" if offset else "t"

    def _number(self, family: Family) -> str:
        depth = self.network.graph.slices[family.stack]
        last = self.letters.depth(family.stack)
        if family.slice == depth:
            return last
        if family.slice == depth - 1 and family.slice and not self.network.is_state(family):
            return f"{last}-1"
        return str(family.slice)

    def _family(self, index: int) -> Family:
        return self.network.graph.families[index]


def groups(network: Network, letters: Letters) -> list[Group]:
    """Every template with its slices, in the order of the graph; equal slices side by side."""
    templates: dict[tuple[str, str, object], list[Member]] = {}
    for member in network.members:
        family = member.family
        block = "slice" if _in_slices(network, family) else family.step
        templates.setdefault((family.stack, family.role, block), []).append(member)
    found = []
    for members in templates.values():
        ordered = tuple(sorted(members, key=lambda member: member.family.step or 0))
        whole = Group(network, letters, ordered)
        parts = [ordered] if _agree(whole) else list(_alike(whole))
        found += [Group(network, letters, part, len(parts) > 1) for part in parts]
    return found


def _agree(group: Group) -> bool:
    """True where every arrow comes, at all slices, from one fixed slice or from one at a fixed distance."""
    return all(_offsets(refs, group.slices) or _fixed(refs, group.slices) for refs in _references(group))


def _alike(group: Group) -> list[tuple[Member, ...]]:
    parts: dict[object, list[Member]] = {}
    columns, steps = _references(group), group.slices
    fixed = [_fixed(refs, steps) for refs in columns]
    for k, (member, step) in enumerate(zip(group.members, steps, strict=True)):
        offsets = [(refs[k].slice or 0) - step for refs in columns]
        key = tuple(refs[k].slice if one else at for refs, one, at in zip(columns, fixed, offsets, strict=True))
        parts.setdefault(key, []).append(member)
    return [tuple(part) for part in parts.values()]


def _references(group: Group) -> list[list[Family]]:
    """For each arrow into the template, the families that it comes from, one for each slice."""
    families = group.network.graph.families
    rows = [
        [families[k] for given in m.inputs for k in (given.parent, *(selector for _, selector in given.pick))]
        for m in group.members
    ]
    return [list(column) for column in zip(*rows, strict=True)]


def _offsets(families: Sequence[Family], steps: Sequence[int]) -> bool:
    return not steps or len({(f.slice or 0) - t for f, t in zip(families, steps, strict=True)}) == 1


def _fixed(families: Sequence[Family], steps: Sequence[int]) -> bool:
    return not _offsets(families, steps) and len({f.slice for f in families}) == 1


def _in_slices(network: Network, family: Family) -> bool:
    return family.step is not None and 0 <= family.step < network.graph.slices[family.stack]


def _step(network: Network, family: Family) -> int:
    return family.step if family.step is not None else 0
