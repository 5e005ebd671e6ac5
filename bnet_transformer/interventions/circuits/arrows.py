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
from bnet_transformer.graph.template_graph import EdgeTemplate
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import GroundModel

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class IncomingArrows:
    """The arrows into a family that carry something: ground ids of both ends, and the edge that each belongs to.

    An edge is what is taken away at once, one arrow or several; -1 stands for an arrow that always stays.
    """

    sources: IntArray
    targets: IntArray
    edge_ids: IntArray

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class CircuitArrows:
    """All arrows that carry something to an outcome, by the family into which they lead; families in order.

    `edge_names` has the name of each edge, `edges_by_group` the edges of each family. `differing_nodes` marks the nodes at which the runs begin
    to differ, `num_idle` counts the arrows above the outcomes that carry nothing.
    """

    ground: GroundGraph
    outcome_nodes: tuple[int, ...]
    incoming: dict[int, IncomingArrows]
    edge_names: tuple[str, ...]
    edges_by_group: Mapping[int, tuple[int, ...]] = field(repr=False)
    differing_nodes: BoolArray = field(repr=False)
    num_idle: int = 0


def find_circuit_arrows(
    clean: Examples, corrupt: Examples, outcome_nodes: Sequence[int], over: Collection[str], candidates: object
) -> CircuitArrows:
    """The arrows between two runs, joined into edges."""
    world, ground = clean.model, clean.model.ground
    above = np.zeros(len(ground), dtype=bool)
    above[[*outcome_nodes, *ancestors(ground, outcome_nodes)]] = True
    inputs, live = _find_differing_nodes(clean, corrupt)
    wanted = _parse_candidates(ground, candidates)
    found: dict[int, list[tuple[EdgeTemplate, IntArray, IntArray]]] = {}
    idle = 0
    for bundle, sources, targets in ground.arrows():
        there = above[targets]
        some = there & live[sources]
        idle += int(there.sum() - some.sum())
        if some.any():
            found.setdefault(bundle.child, []).append((bundle, sources[some], targets[some]))
    into: dict[int, IncomingArrows] = {}
    names: list[str] = []
    of = {}
    for index in sorted(found):
        _check_removable(world, index, live)
        number: dict[str, int] = {}
        edges: list[int] = []
        for bundle, sources, targets in found[index]:
            if wanted is None or (bundle.parent, bundle.child) in wanted:
                arrows = _name_edges(ground, sources, targets, over)
                edges += [number.setdefault(name, len(names) + len(number)) for name in arrows]
            else:
                edges += [-1] * len(sources)
        ends = [np.concatenate([each[k] for each in found[index]]).astype(np.int64) for k in (1, 2)]
        into[index] = IncomingArrows(ends[0], ends[1], np.array(edges))
        of[index] = tuple(number.values())
        names += number
    return CircuitArrows(ground, tuple(outcome_nodes), into, tuple(names), of, inputs & above, idle)


def mark_needed_sources(
    arrows: CircuitArrows, retained: Mapping[int, BoolArray], needed: BoolArray, group: int
) -> None:
    """Mark in `needed` the sources of the kept arrows into the nodes of a family that it marks."""
    into, keep = arrows.incoming[group], retained[group]
    needed[into.sources[keep & needed[into.targets]]] = True


def iter_active_arrows(arrows: CircuitArrows, retained: Mapping[int, BoolArray]) -> Iterator[tuple[int, int, int]]:
    """The kept arrows on a path from where the runs differ to an outcome: source, target, edge."""
    below, beneath = np.zeros(len(arrows.ground), dtype=bool), arrows.differing_nodes.copy()
    below[list(arrows.outcome_nodes)] = True
    for family in reversed(arrows.incoming):
        mark_needed_sources(arrows, retained, below, family)
    for family, into in arrows.incoming.items():
        beneath[into.targets[retained[family] & beneath[into.sources]]] = True
        there = retained[family] & beneath[into.sources] & below[into.targets]
        yield from zip(*(each[there].tolist() for each in (into.sources, into.targets, into.edge_ids)), strict=True)


def get_node_slice(ground: GroundGraph, index: int) -> slice:
    """The numbers of a family's nodes."""
    return slice(int(ground.offsets[index]), int(ground.offsets[index + 1]))


def parse_edge_axes(ground: GroundGraph, over: object) -> tuple[str, ...]:
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


def _find_differing_nodes(clean: Examples, corrupt: Examples) -> tuple[BoolArray, BoolArray]:
    """The nodes at which two runs begin to differ, and those with all that they lead to."""
    world, other = clean.model, corrupt.model
    folded = world.network.graph
    inputs = np.zeros(len(world.ground), dtype=bool)
    same = []
    pairs = list(zip(clean.models, corrupt.models, strict=True))
    for name in world.inputs:
        part = get_node_slice(world.ground, folded.by_name[name].index)
        for one, two in pairs:
            differ = (one.inputs[name] != two.inputs[name]).reshape(part.stop - part.start, -1).any(-1)
            inputs[part] |= differ.numpy()
    for node in {*world.do, *other.do, *world.attention_rows, *other.attention_rows}:
        alike = all(_has_same_intervention(*pair, node) for pair in pairs)
        inputs[node] = not alike
        if alike and node in world.do:
            same.append(node)
    rows = world.ground.retained_parents if world.attention_rows.keys() == other.attention_rows.keys() else {}
    ground = GroundGraph(folded, world.ground.word_counts, same, rows)  # no arrow leads into what is set alike in both
    live = inputs.copy()
    live[descendants(ground, np.flatnonzero(inputs).tolist())] = True
    return inputs, live


def _has_same_intervention(first: GroundModel, second: GroundModel, node: int) -> bool:
    """True where a node is set to the same value, or to the same row of attention, in both."""
    for told in ("do", "attention_rows"):
        mine, theirs = getattr(first, told).get(node), getattr(second, told).get(node)
        if (mine is None) != (theirs is None) or (mine is not None and not torch.equal(mine, theirs)):
            return False
    return True


def _check_removable(model: GroundModel, index: int, live: BoolArray) -> None:
    """Refuse a family whose arrows cannot be taken away one by one in a batch."""
    member, ground = model.network.specs[index], model.ground
    if index in model.network.graph.recurrent:
        raise UnsupportedError(
            member.group.name,
            expected="words that are computed at once",
            actual="words that read each other, one after another, and differ between the runs",
            allowed="a corrupt sentence that differs in what these words do not hang on",
        )
    for selector in {selector for given in member.parents for _, selector in given.pick}:
        if live[get_node_slice(ground, selector)].any():
            name = model.network.specs[selector].group.name
            raise UnsupportedError(
                f"arrow {name} -> {member.group.name}",
                expected="a choice, picked by, that is the same in both runs",
                actual="one that differs",
                allowed=f"do({name}=...) to the same state in clean and corrupt",
            )


def _parse_candidates(ground: GroundGraph, candidates: object) -> set[tuple[int, int]] | None:
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


def _name_edges(ground: GroundGraph, sources: IntArray, targets: IntArray, over: Collection[str]) -> list[str]:
    """The edge of each arrow: the names of its ends, with a star for each index that is joined."""
    names = {}
    for node in {*sources.tolist(), *targets.tolist()}:
        family, index = ground.unravel_index(node)
        own = zip(ground.axes(family), index, strict=True)
        names[node] = "_".join([family.name, *(str(i) if axis in over else "*" for axis, i in own)])
    ends = zip(sources.tolist(), targets.tolist(), strict=True)
    return [f"{names[source]} -> {names[target]}" for source, target in ends]
