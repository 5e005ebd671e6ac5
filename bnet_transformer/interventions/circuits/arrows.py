"""The arrows that a circuit is chosen from: those that carry a difference between the runs to an outcome.

An arrow carries something if its source differs between the clean and the corrupt run, or may differ in a run between
them: if a path leads to it from a word that differs, or from a node that is set in one of the two, or otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from bnet_transformer._core.checks import check_choice, check_sequence
from bnet_transformer._core.naming import SLICE, WORD
from bnet_transformer.errors import BNetError, UnsupportedError, unknown_name_error
from bnet_transformer.graph import GroundGraph, ancestors, descendants
from bnet_transformer.graph.folded import EdgeTemplate
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import GroundModel

Numbers = NDArray[np.int64]
Marks = NDArray[np.bool_]


@dataclass(frozen=True)
class Into:
    """The arrows into a family that carry something: ground ids of both ends, and the edge that each belongs to.

    An edge is what is taken away at once, one arrow or several; -1 stands for an arrow that always stays.
    """

    sources: Numbers
    targets: Numbers
    edge: Numbers

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class Arrows:
    """All arrows that carry something to an outcome, by the family into which they lead; families in order.

    `edges` has the name of each edge, `of` the edges of each family. `inputs` marks the nodes at which the runs begin
    to differ, `idle` counts the arrows above the outcomes that carry nothing.
    """

    ground: GroundGraph
    outcomes: tuple[int, ...]
    into: dict[int, Into]
    edges: tuple[str, ...]
    of: Mapping[int, tuple[int, ...]] = field(repr=False)
    inputs: Marks = field(repr=False)
    idle: int = 0


def arrows_of(
    clean: Examples, corrupt: Examples, outcomes: Sequence[int], over: Collection[str], candidates: object
) -> Arrows:
    """The arrows between two runs, joined into edges."""
    world, ground = clean.world, clean.world.ground
    above = np.zeros(len(ground), dtype=bool)
    above[[*outcomes, *ancestors(ground, outcomes)]] = True
    inputs, live = _differing(clean, corrupt)
    wanted = _wanted(ground, candidates)
    found: dict[int, list[tuple[EdgeTemplate, Numbers, Numbers]]] = {}
    idle = 0
    for bundle, sources, targets in ground.arrows():
        there = above[targets]
        some = there & live[sources]
        idle += int(there.sum() - some.sum())
        if some.any():
            found.setdefault(bundle.child, []).append((bundle, sources[some], targets[some]))
    into: dict[int, Into] = {}
    names: list[str] = []
    of = {}
    for index in sorted(found):
        _check(world, index, live)
        number: dict[str, int] = {}
        edges: list[int] = []
        for bundle, sources, targets in found[index]:
            if wanted is None or (bundle.parent, bundle.child) in wanted:
                arrows = _names(ground, sources, targets, over)
                edges += [number.setdefault(name, len(names) + len(number)) for name in arrows]
            else:
                edges += [-1] * len(sources)
        ends = [np.concatenate([each[k] for each in found[index]]).astype(np.int64) for k in (1, 2)]
        into[index] = Into(ends[0], ends[1], np.array(edges))
        of[index] = tuple(number.values())
        names += number
    return Arrows(ground, tuple(outcomes), into, tuple(names), of, inputs & above, idle)


def needed_above(arrows: Arrows, kept: Mapping[int, Marks], below: Marks, family: int) -> None:
    """Mark in `below` the sources of the kept arrows into the nodes of a family that it marks."""
    into, keep = arrows.into[family], kept[family]
    below[into.sources[keep & below[into.targets]]] = True


def that_matter(arrows: Arrows, kept: Mapping[int, Marks]) -> Iterator[tuple[int, int, int]]:
    """The kept arrows on a path from where the runs differ to an outcome: source, target, edge."""
    below, beneath = np.zeros(len(arrows.ground), dtype=bool), arrows.inputs.copy()
    below[list(arrows.outcomes)] = True
    for family in reversed(arrows.into):
        needed_above(arrows, kept, below, family)
    for family, into in arrows.into.items():
        beneath[into.targets[kept[family] & beneath[into.sources]]] = True
        there = kept[family] & beneath[into.sources] & below[into.targets]
        yield from zip(*(each[there].tolist() for each in (into.sources, into.targets, into.edge)), strict=True)


def span(ground: GroundGraph, index: int) -> slice:
    """The numbers of a family's nodes."""
    return slice(int(ground.offsets[index]), int(ground.offsets[index + 1]))


def axes_over(ground: GroundGraph, over: object) -> tuple[str, ...]:
    """The axes along which arrows stay apart, checked: all of them by default."""
    known = (SLICE, *ground.template.plate_sizes, WORD)
    if over is None:
        return known
    told = check_sequence("over", over, str)
    for axis in told:
        check_choice("over", axis, known)
    if SLICE not in told:
        hint = "over=('slice',), which joins all words and plates of a slice"
        raise BNetError("over", expected="axes, among them 'slice'", actual=told, allowed=hint)
    return told


def _differing(clean: Examples, corrupt: Examples) -> tuple[Marks, Marks]:
    """The nodes at which two runs begin to differ, and those with all that they lead to."""
    world, other = clean.world, corrupt.world
    folded = world.network.graph
    inputs = np.zeros(len(world.ground), dtype=bool)
    same = []
    pairs = list(zip(clean.worlds, corrupt.worlds, strict=True))
    for name in world.inputs:
        part = span(world.ground, folded.by_name[name].index)
        for one, two in pairs:
            differ = (one.inputs[name] != two.inputs[name]).reshape(part.stop - part.start, -1).any(-1)
            inputs[part] |= differ.numpy()
    for node in {*world.do, *other.do, *world.attention_rows, *other.attention_rows}:
        alike = all(_set_alike(*pair, node) for pair in pairs)
        inputs[node] = not alike
        if alike and node in world.do:
            same.append(node)
    rows = world.ground.retained_parents if world.attention_rows.keys() == other.attention_rows.keys() else {}
    ground = GroundGraph(folded, world.ground.word_counts, same, rows)  # no arrow leads into what is set alike in both
    live = inputs.copy()
    live[descendants(ground, np.flatnonzero(inputs).tolist())] = True
    return inputs, live


def _set_alike(one: GroundModel, other: GroundModel, node: int) -> bool:
    """True where a node is set to the same value, or to the same row of attention, in both."""
    for told in ("do", "rows"):
        mine, theirs = getattr(one, told).get(node), getattr(other, told).get(node)
        if (mine is None) != (theirs is None) or (mine is not None and not torch.equal(mine, theirs)):
            return False
    return True


def _check(world: GroundModel, index: int, live: Marks) -> None:
    """Refuse a family whose arrows cannot be taken away one by one in a batch."""
    member, ground = world.network.specs[index], world.ground
    if index in world.network.graph.recurrent:
        raise UnsupportedError(
            member.group.name,
            expected="words that are computed at once",
            actual="words that read each other, one after another, and differ between the runs",
            allowed="a corrupt sentence that differs in what these words do not hang on",
        )
    for selector in {selector for given in member.parents for _, selector in given.pick}:
        if live[span(ground, selector)].any():
            name = world.network.specs[selector].group.name
            raise UnsupportedError(
                f"arrow {name} -> {member.group.name}",
                expected="a choice, picked by, that is the same in both runs",
                actual="one that differs",
                allowed=f"do({name}=...) to the same state in clean and corrupt",
            )


def _wanted(ground: GroundGraph, candidates: object) -> set[tuple[int, int]] | None:
    """The pairs of families whose arrows may be taken away; None where all may."""
    if candidates is None:
        return None
    told = check_sequence("candidates", [candidates] if isinstance(candidates, str) else candidates, str)
    families = ground.template.groups
    known: dict[str, set[tuple[int, int]]] = {}
    for bundle in ground.template.edges:
        name = f"{families[bundle.parent].stem} -> {families[bundle.child].stem}"
        known.setdefault(name, set()).add((bundle.parent, bundle.child))
    found: set[tuple[int, int]] = set()
    for each in told:
        name = " -> ".join(part.strip() for part in each.split("->"))
        if name not in known:
            raise unknown_name_error("arrow of candidates", each, known)
        found |= known[name]
    return found


def _names(ground: GroundGraph, sources: Numbers, targets: Numbers, over: Collection[str]) -> list[str]:
    """The edge of each arrow: the names of its ends, with a star for each index that is joined."""
    names = {}
    for node in {*sources.tolist(), *targets.tolist()}:
        family, index = ground.unravel_index(node)
        own = zip(ground.axes(family), index, strict=True)
        names[node] = "_".join([family.name, *(str(i) if axis in over else "*" for axis, i in own)])
    ends = zip(sources.tolist(), targets.tolist(), strict=True)
    return [f"{names[source]} -> {names[target]}" for source, target in ends]
