"""The candidate arrows of a circuit: those that transmit a difference between the two runs to an outcome.

An arrow is active if its source can differ between the clean and the corrupt run. This is the case if the source is, or
descends from, an input that differs or a node that `do` sets in one run only or to another value. Other arrows are
idle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bnet_transformer._core.arrays import BoolArray, IntArray
from bnet_transformer._core.checks import check_choice, check_sequence
from bnet_transformer._core.naming import SLICE, WORD, join_path, split_path
from bnet_transformer.errors import BNetError, UnsupportedError, unknown_name_error
from bnet_transformer.graph import GroundGraph, ancestors, descendants
from bnet_transformer.graph.template_graph import EdgeTemplate
from bnet_transformer.interventions.sweeps.cell_spec import find_merged_plates
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import GroundModel


@dataclass(frozen=True)
class IncomingArrows:
    """The active arrows into a node group: the ground ids of both ends, and the edge of each arrow.

    An edge is one arrow, or several arrows that are removed together. Arrows that are never removed have the edge id
    -1.
    """

    sources: IntArray
    targets: IntArray
    edge_ids: IntArray

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class CircuitArrows:
    """All active arrows that lead to an outcome, by the node group of their target, groups in topological order.

    Args:
        ground: The ground graph.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        incoming: The arrows into each node group.
        edge_names: The name of each edge, by its id.
        edges_by_group: The ids of the edges into each node group.
        differing_nodes: The mask of the first nodes that differ between the two runs, `[node]`.
        num_idle: The number of arrows between ancestors of the outcomes that transmit no difference.
        over: The axes along which arrows are separate edges.
    """

    ground: GroundGraph
    outcome_nodes: tuple[int, ...]
    incoming: dict[int, IncomingArrows]
    edge_names: tuple[str, ...]
    edges_by_group: Mapping[int, tuple[int, ...]] = field(repr=False)
    differing_nodes: BoolArray = field(repr=False)
    num_idle: int = 0
    over: tuple[str, ...] = ()


def find_circuit_arrows(
    clean: Examples, corrupt: Examples, outcome_nodes: Sequence[int], over: tuple[str, ...], candidates: object
) -> CircuitArrows:
    """Find the active arrows between two runs, and join them into edges.

    Args:
        clean: The clean examples.
        corrupt: The corrupt examples.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        over: The axes along which arrows are separate edges.
        candidates: The arrows that may be removed, such as `"v -> a"`; None for all.

    Returns:
        The arrows, by the node group of their target.
    """
    model, ground = clean.model, clean.model.ground
    is_ancestor = np.zeros(len(ground), dtype=bool)
    is_ancestor[[*outcome_nodes, *ancestors(ground, outcome_nodes)]] = True
    differing, can_differ = _find_differing_nodes(clean, corrupt)
    pairs = _parse_candidates(ground, candidates)
    by_group: dict[int, list[tuple[EdgeTemplate, IntArray, IntArray]]] = {}
    num_idle = 0
    for edge, sources, targets in ground.arrows():
        relevant = is_ancestor[targets]
        active = relevant & can_differ[sources]
        num_idle += int(relevant.sum() - active.sum())
        if active.any():
            by_group.setdefault(edge.child, []).append((edge, sources[active], targets[active]))
    incoming: dict[int, IncomingArrows] = {}
    names: list[str] = []
    group_edges = {}
    for index in sorted(by_group):
        _check_removable(model, index, can_differ)
        ids: dict[str, int] = {}
        edge_ids: list[int] = []
        for edge, sources, targets in by_group[index]:
            if pairs is None or (edge.parent, edge.child) in pairs:
                arrow_edges = _name_edges(ground, sources, targets, over)
                edge_ids += [ids.setdefault(name, len(names) + len(ids)) for name in arrow_edges]
            else:
                edge_ids += [-1] * len(sources)
        ends = [np.concatenate([part[k] for part in by_group[index]]).astype(np.int64) for k in (1, 2)]
        incoming[index] = IncomingArrows(ends[0], ends[1], np.array(edge_ids))
        group_edges[index] = tuple(ids.values())
        names += ids
    differing &= is_ancestor
    return CircuitArrows(ground, tuple(outcome_nodes), incoming, tuple(names), group_edges, differing, num_idle, over)


def mark_needed_sources(
    arrows: CircuitArrows, retained: Mapping[int, BoolArray], needed: BoolArray, group: int
) -> None:
    """Mark in `needed`, `[node]`, the sources of retained arrows into those nodes of a group that are marked."""
    incoming, mask = arrows.incoming[group], retained[group]
    needed[incoming.sources[mask & needed[incoming.targets]]] = True


def iter_active_arrows(arrows: CircuitArrows, retained: Mapping[int, BoolArray]) -> Iterator[tuple[int, int, int]]:
    """Yield the retained arrows on a path from a differing node to an outcome: source, target, edge id."""
    needed, differing = np.zeros(len(arrows.ground), dtype=bool), arrows.differing_nodes.copy()
    needed[list(arrows.outcome_nodes)] = True
    for group in reversed(arrows.incoming):
        mark_needed_sources(arrows, retained, needed, group)
    for group, incoming in arrows.incoming.items():
        differing[incoming.targets[retained[group] & differing[incoming.sources]]] = True
        active = retained[group] & differing[incoming.sources] & needed[incoming.targets]
        columns = incoming.sources, incoming.targets, incoming.edge_ids
        yield from zip(*(column[active].tolist() for column in columns), strict=True)


def check_edge_name(arrows: CircuitArrows, name: str) -> None:
    """Raise an error if the net has no edge of this name, with or without a difference between the runs."""
    groups = arrows.ground.template.groups
    for edge, sources, targets in arrows.ground.arrows():
        is_similar = name.startswith(groups[edge.parent].name) and f" -> {groups[edge.child].name}" in name
        if is_similar and name in _name_edges(arrows.ground, sources, targets, arrows.over):
            return
    hint = 'For the edges of net.edges(), such as "a_0_1 -> q_1_0", pass at="edges"'
    raise unknown_name_error("edge", name, arrows.edge_names, hint=hint)


def get_node_slice(ground: GroundGraph, index: int) -> slice:
    """The range of the ground ids of a node group."""
    return slice(int(ground.offsets[index]), int(ground.offsets[index + 1]))


def parse_edge_axes(ground: GroundGraph, over: object) -> tuple[str, ...]:
    """Validate the axes along which arrows are separate edges: all axes by default."""
    known = (SLICE, *ground.template.plate_sizes, WORD)
    if over is None:
        return known
    axes = check_sequence("over", over, str)
    for axis in axes:
        check_choice("over", axis, known)
    if SLICE not in axes:
        hint = "To join all words and plates of a slice, pass over=('slice',)"
        raise BNetError("over", expected="axes that include 'slice'", actual=axes, hint=hint)
    # A head is a head of one group: the axis of heads includes the plates around it.
    merged = (plate for group in ground.template.groups for plate in find_merged_plates(axes, ground.axes(group)))
    return (*axes, *dict.fromkeys(merged))


def _find_differing_nodes(clean: Examples, corrupt: Examples) -> tuple[BoolArray, BoolArray]:
    """The first nodes that differ between two runs, and all nodes that can differ: the first ones and descendants."""
    model, corrupt_model = clean.model, corrupt.model
    template = model.network.graph
    differing = np.zeros(len(model.ground), dtype=bool)
    unchanged = []
    pairs = list(zip(clean.models, corrupt.models, strict=True))
    for name in model.inputs:
        part = get_node_slice(model.ground, template.by_name[name].index)
        for one, two in pairs:
            differ = (one.inputs[name] != two.inputs[name]).reshape(part.stop - part.start, -1).any(-1)
            differing[part] |= differ.cpu().numpy()
    for node in {*model.do, *corrupt_model.do, *model.attention_rows, *corrupt_model.attention_rows}:
        is_same = all(_has_same_intervention(*pair, node) for pair in pairs)
        differing[node] = not is_same
        if is_same and node in model.do:
            unchanged.append(node)
    has_same_rows = model.attention_rows.keys() == corrupt_model.attention_rows.keys()
    rows = model.ground.retained_parents if has_same_rows else {}
    # A node that both runs set to the same value cannot differ: graph surgery cuts the arrows into it.
    ground = GroundGraph(template, model.ground.word_counts, unchanged, rows)
    can_differ = differing.copy()
    can_differ[descendants(ground, np.flatnonzero(differing).tolist())] = True
    return differing, can_differ


def _has_same_intervention(first: GroundModel, second: GroundModel, node: int) -> bool:
    """True if both models set a node to the same value, or to the same row of attention, or neither sets it."""
    for kind in ("do", "attention_rows"):
        value, other = getattr(first, kind).get(node), getattr(second, kind).get(node)
        if (value is None) != (other is None) or (value is not None and not torch.equal(value, other)):
            return False
    return True


def _check_removable(model: GroundModel, index: int, can_differ: BoolArray) -> None:
    """Raise an error for a node group whose arrows cannot be removed separately in a batch."""
    spec, ground = model.network.specs[index], model.ground
    if index in model.network.graph.recurrent:
        name = spec.group.name
        raise UnsupportedError(
            f"{name}: circuits cannot contain a recurrent node group that differs between the runs",
            hint=f"Use a corrupt sentence that differs only where {name} does not depend on it, or use bt.sweep",
        )
    for selector in {selector for parent in spec.parents for _, selector in parent.pick}:
        if can_differ[get_node_slice(ground, selector)].any():
            name = model.network.specs[selector].group.name
            raise UnsupportedError(
                f"arrow {name} -> {spec.group.name}: the selector {name} differs between the runs",
                hint=f"Set it to the same state in clean and corrupt by do({name}=...)",
            )


def _parse_candidates(ground: GroundGraph, candidates: object) -> set[tuple[int, int]] | None:
    """The pairs (parent group, child group) whose arrows may be removed; None for all."""
    if candidates is None:
        return None
    patterns = check_sequence("candidates", [candidates] if isinstance(candidates, str) else candidates, str)
    groups = ground.template.groups
    known: dict[str, set[tuple[int, int]]] = {}
    for edge in ground.template.edges:
        name = f"{groups[edge.parent].stem} -> {groups[edge.child].stem}"
        known.setdefault(name, set()).add((edge.parent, edge.child))
    pairs: set[tuple[int, int]] = set()
    for pattern in patterns:
        name = join_path(split_path(pattern))
        if name not in known:
            raise unknown_name_error("arrow of candidates", pattern, known)
        pairs |= known[name]
    return pairs


def _name_edges(ground: GroundGraph, sources: IntArray, targets: IntArray, over: Collection[str]) -> list[str]:
    """The name of the edge of each arrow: the names of both ends, with a star for each joined index."""
    names = {}
    for node in {*sources.tolist(), *targets.tolist()}:
        group, index = ground.unravel_index(node)
        axes = zip(ground.axes(group), index, strict=True)
        names[node] = "_".join([group.name, *(str(i) if axis in over else "*" for axis, i in axes)])
    ends = zip(sources.tolist(), targets.tolist(), strict=True)
    return [f"{names[source]} -> {names[target]}" for source, target in ends]
