"""Cells: what a sweep sets, each a number of nodes (or rows of attention) that are set together, or paths.

A cell has a place along each axis of the result, and a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.axes import SLICE, WORD
from bnet_transformer.errors import BNetError, unknown
from bnet_transformer.graph import Family
from bnet_transformer.inference.sweeps.examples import Examples
from bnet_transformer.network import Member
from bnet_transformer.world import World

READ = "read"
ARROW = "->"
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Entries:
    """The nodes of one family that cells set: `node[k]`, its number in the family, for `cell[k]`.

    With `rows` it is their `P(j | i)` that is set; `read[k]` is the word of a single entry, or -1 for the whole row.
    """

    family: int
    cell: Ids
    node: Ids
    rows: bool = False
    read: Ids | None = None


@dataclass(frozen=True)
class Route:
    """A path of ground nodes that a cell sends a value along, the last of which it sets."""

    cell: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Cells:
    """The cells of a sweep: the axes of the result, what stands along them, and what each cell sets."""

    at: str
    axes: tuple[str, ...]
    places: Mapping[str, tuple[int, ...]]
    labels: Mapping[str, tuple[str, ...]]
    names: Mapping[int, str] = field(repr=False)
    entries: tuple[Entries, ...] = field(default=(), repr=False)
    routes: tuple[Route, ...] = field(default=(), repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self.places[axis]) for axis in self.axes)

    @property
    def there(self) -> Ids:
        """The cells that there are: an arrow that a mask lacks is none."""
        return np.array(sorted(self.names), dtype=np.int64)


def indices_of(world: World, family: Family, nodes: Ids) -> dict[str, Ids]:
    """The index of nodes of a family along each of its axes."""
    shape = world.ground.shapes[family.index]
    at = np.unravel_index(nodes - int(world.ground.offsets[family.index]), shape) if shape else ()
    return {axis: np.asarray(i, dtype=np.int64) for axis, i in zip(world.ground.axes(family), at, strict=True)}


def axes_of(family: Family) -> tuple[str, ...]:
    """What tells the nodes of a role apart."""
    sliced = (SLICE,) if family.slice is not None else ()
    return (*sliced, *family.plates, *((WORD,) if family.words is not None else ()))


def chosen(over: object, default: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that stay apart, in their order."""
    if over is None:
        return default
    asked = [over] if isinstance(over, str) else list(over) if isinstance(over, Sequence) else [over]
    for axis in asked:
        if axis not in allowed:
            raise unknown("over", axis, allowed)
    if not asked:
        raise BNetError("over", expected="at least one axis", got="none", allowed=", ".join(allowed))
    return tuple(axis for axis in allowed if axis in asked)


Grid = tuple[Family, Mapping[str, Ids], Ids]


def places_along(axes: Sequence[str], grid: Sequence[Grid], words: int) -> dict[str, tuple[int, ...]]:
    """What stands along each axis."""
    found = {}
    for axis in axes:
        if axis == READ and words:
            found[axis] = tuple(range(words))
        else:
            found[axis] = tuple(np.unique(np.concatenate([place[axis] for _, place, _ in grid])).tolist())
    return found


def cell_numbers(
    axes: Sequence[str], sizes: Mapping[str, tuple[int, ...]], place: Mapping[str, Ids], count: int
) -> Ids:
    """The number of the cell at each of so many places."""
    if not axes:
        return np.zeros(count, dtype=np.int64)
    index = [np.searchsorted(np.array(sizes[axis]), place[axis]) for axis in axes]
    found: Ids = np.ravel_multi_index(index, tuple(len(sizes[axis]) for axis in axes)).astype(np.int64)
    return found


def check_value(world: World, member: Member) -> None:
    """Refuse nodes that have no value that could be carried over."""
    nodes = world.ground.nodes(member.family).tolist()
    if member.tpm.is_random and not all(node in world.do for node in nodes):
        names = [m.family.stem for m in world.network.members if not m.tpm.is_random]
        raise BNetError(
            f"at {member.family.name}",
            expected="nodes with a value: functions of their parents, or nodes that are set in both runs",
            got=f"{member.tpm.kind} ones ({type(member.tpm).__name__})",
            allowed=f"do({member.family.name}=...) in both runs; " + ", ".join(dict.fromkeys(names)),
        )


def labelled(examples: Examples, cells: Cells) -> Cells:
    """The same cells, with labels along the axes: a word as its token, where all examples have the same."""
    stack = _stacks(examples.world, cells)
    labels = dict(cells.labels)
    for axis in cells.axes:
        numbers = cells.places[axis]
        if axis in (WORD, READ) and axis not in labels:
            said = [each.get(stack[axis], ()) for each in examples.tokens]
            tokens = [{words[i] if i < len(words) else str(i) for words in said} for i in numbers]
            labels[axis] = tuple(
                next(iter(each)) if len(each) == 1 else str(i) for i, each in zip(numbers, tokens, strict=True)
            )
        labels.setdefault(axis, tuple(map(str, numbers)))
    return replace(cells, labels=labels)


def _stacks(world: World, cells: Cells) -> dict[str, str]:
    """Whose words stand along the axes of words."""
    members = world.network.members
    if cells.entries:
        member = members[cells.entries[0].family]
        reads = [members[g.parent].family.words for g in member.inputs if WORD in g.over]
        return {WORD: member.family.words or "", READ: (reads[0] if reads else None) or ""}
    first = cells.routes[0].nodes
    parent, child = (world.ground.family_of(node) for node in (first[0], first[-1]))
    return {WORD: child.words or "", READ: parent.words or ""}
