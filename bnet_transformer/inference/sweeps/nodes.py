"""Cells of nodes: every node of a role, or every row (every entry) of attention, or what patterns stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bnet_transformer import asking
from bnet_transformer.axes import SLICE, WORD
from bnet_transformer.errors import BNetError, unknown
from bnet_transformer.graph import Family
from bnet_transformer.inference.sweeps.cells import (
    READ,
    Cells,
    Entries,
    Ids,
    axes_of,
    cell_numbers,
    check_value,
    chosen,
    indices_of,
    places_along,
)
from bnet_transformer.network import Member
from bnet_transformer.tpm import Attention
from bnet_transformer.world import World


def of_role(world: World, at: str, over: object) -> Cells:
    """A cell for each node of a role, or for each group of them that only the axes of `over` tell apart."""
    graph = world.network.graph
    readers = {} if at in graph.by_stem else readers_of(world)
    if at not in graph.by_stem and at not in readers:
        raise unknown("at", at, [*graph.by_stem, *readers_of(world)])
    rows = at in readers
    families = readers[at] if rows else graph.by_stem[at]
    for family in families if not rows else ():
        check_value(world, world.network.members[family.index])
    own = axes_of(families[0])
    if any(axes_of(family) != own for family in families):
        raise BNetError("at", expected="a role whose nodes have the same axes in all slices", got=at)
    allowed = (*own, READ) if rows else own
    axes = chosen(over, own, allowed)
    words = _width(world, families[0]) if rows else 0
    grid = []
    for family in families:
        nodes = world.ground.nodes(family)
        place = indices_of(world, family, nodes)
        place[SLICE] = np.full(len(nodes), -1 if family.slice is None else family.slice)
        grid.append((family, place, np.arange(len(nodes))))
    sizes = places_along(axes, grid, words)
    entries: list[Entries] = []
    names: dict[int, str] = {}
    for family, place, node in grid:
        read = None
        if rows:
            _check_attention(world, world.network.members[family.index])
        if READ in axes:
            reads = asking.readable(world, world.network.members[family.index])
            row = place[WORD] if WORD in place else np.zeros_like(node)
            which, read = np.nonzero(reads[row])
            node, place = node[which], {axis: at_[which] for axis, at_ in place.items()} | {READ: read}
        cell = cell_numbers(axes, sizes, place, len(node))
        entries.append(Entries(family.index, cell, node, rows, read if read is not None or not rows else None))
        names |= _names(at, family, axes, own, place, cell)
    return Cells(at, axes, sizes, {}, names, tuple(entries))


def readers_of(world: World) -> dict[str, tuple[Family, ...]]:
    """The families whose rows of attention can be set, by how the word that they read is called: `j`, `dec_cross_j`."""
    found: dict[str, list[Family]] = {}
    for member in world.network.members:
        if member.reads_words and member.tpm.kind == "deterministic":
            family = member.family
            role = {"a": "j", "x": "j"}.get(family.role, f"{family.role.removesuffix('_a')}_j")
            found.setdefault(f"{family.stack}_{role}" if family.stack else role, []).append(family)
    return {name: tuple(families) for name, families in found.items()}


def _names(
    at: str, family: Family, axes: Sequence[str], own: Sequence[str], place: Mapping[str, Ids], cell: Ids
) -> dict[int, str]:
    """The name of each cell: a star for each index that it joins."""
    shown = [place[axis] if axis in axes else None for axis in own]
    read = place.get(READ)
    found = {}
    for k, number in enumerate(cell.tolist()):
        if number not in found:
            name = "_".join([at, *("*" if each is None else str(int(each[k])) for each in shown)])
            found[number] = name if read is None else f"{name}[{int(read[k])}]"
    return found


def _check_attention(world: World, member: Member) -> None:
    plain = isinstance(member.tpm, Attention) and not any(given.pick for given in member.inputs)
    values = [given for given in member.inputs if given.slot == "v."]
    if not plain or not values or values[0].over != (WORD,):
        wanted = "families that mix by an Attention over words, without picks"
        raise BNetError(f"at {member.family.name}", expected=wanted, got=type(member.tpm).__name__)
    if isinstance(member.tpm, Attention) and member.tpm.normaliser.kind != "softmax":
        raise BNetError(f"at {member.family.name}", expected="attention P(j | i)", got=member.tpm.why_no_reading())


def _width(world: World, family: Family) -> int:
    """How many words a family reads."""
    member = world.network.members[family.index]
    return world.ground.words[world.network.stack_read(member)]
