"""The arrows of a circuit: those that transmit a difference between the two runs to an outcome."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from bnet_transformer._core.checks import check_choice, check_sequence
from bnet_transformer._core.naming import SLICE, WORD, join_path, split_path
from bnet_transformer._core.tensors import BoolArray, IntArray
from bnet_transformer.compiler.linear import LinearStructure
from bnet_transformer.errors import BNetError, UnsupportedError, unknown_name_error
from bnet_transformer.graph import GroundGraph, ancestors
from bnet_transformer.graph.template_graph import EdgeTemplate
from bnet_transformer.graph.traversal import descendants
from bnet_transformer.interventions.ablation import Ablation
from bnet_transformer.interventions.cells import find_merged_plates, is_index_valued
from bnet_transformer.interventions.examples import Examples
from bnet_transformer.reference import GroundModel

# --------------------------------------------------------------------------------------------------------------------
# The candidate arrows of a circuit: those that transmit a difference between the two runs to an outcome.
#
# An arrow is active if its source can differ between the clean and the corrupt run. This is the case if the source is,
# or descends from, an input that differs or a node that `do` sets in one run only or to another value. Other arrows are
# idle.


NODES = "nodes"  # the first entry of `over` if edges are nodes: all arrows from a node are one edge


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
        edges_by_group: The ids of the edges into each node group; of nodes as edges, those of the group.
        first_nodes: The mask of the first nodes that differ between the two runs, `[node]`.
        differing_nodes: The mask of the nodes that differ without a difference of their parents, `[node]`: the first
            nodes, or all nodes that are ablated.
        num_idle: The number of arrows between ancestors of the outcomes that transmit no difference.
        over: The axes along which arrows are separate edges; after `NODES`, those along which nodes are.
        silent: The candidates, as the user passed them, of which no arrow transmits a difference.
    """

    ground: GroundGraph
    outcome_nodes: tuple[int, ...]
    incoming: dict[int, IncomingArrows]
    edge_names: tuple[str, ...]
    edges_by_group: Mapping[int, tuple[int, ...]] = field(repr=False)
    first_nodes: BoolArray = field(repr=False)
    differing_nodes: BoolArray = field(repr=False)
    num_idle: int = 0
    over: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


def find_circuit_arrows(
    clean: Examples,
    corrupt: Examples | Ablation,
    outcome_nodes: Sequence[int],
    over: tuple[str, ...],
    candidates: object,
) -> CircuitArrows:
    """Find the active arrows, and join them into edges: all arrows from a node, if `over` begins with `NODES`.

    Args:
        clean: The clean examples.
        corrupt: The corrupt examples, or the ablation of the nodes from which candidates start.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        over: The axes along which arrows are separate edges.
        candidates: The arrows that may be removed, such as `"v -> a"`, or the roles of nodes; None for all.

    Returns:
        The arrows, by the node group of their target.
    """
    model, ground, is_of_nodes = clean.model, clean.model.ground, NODES in over
    is_ancestor = np.zeros(len(ground), dtype=bool)
    is_ancestor[[*outcome_nodes, *ancestors(ground, outcome_nodes)]] = True
    parsed = _parse_candidates(ground, candidates, is_of_nodes=is_of_nodes)
    pairs = None if parsed is None else set[tuple[int, int]]().union(*parsed.values())
    if isinstance(corrupt, Ablation):
        pairs = _select_sources(model, pairs, has_states=corrupt.alignment is not None and corrupt.change is None)
        ablated, differing = {parent for parent, _ in pairs}, np.zeros(len(ground), dtype=bool)
        for index in ablated:
            differing[get_node_slice(ground, index)] = corrupt.find_set_nodes(index)
        can_differ = _mark_descendants(ground, differing)
        if corrupt.joins_words:
            _mark_ancestors_of_words(ground, is_ancestor, ablated)
    else:
        differing, can_differ = _find_differing_nodes(clean, corrupt)
    by_group: dict[int, list[tuple[EdgeTemplate, IntArray, IntArray]]] = {}
    num_idle = 0
    for edge, sources, targets in ground.arrows():
        relevant = is_ancestor[targets]
        active = relevant & can_differ[sources]
        num_idle += int(relevant.sum() - active.sum())
        if active.any():
            by_group.setdefault(edge.child, []).append((edge, sources[active], targets[active]))
    names: dict[int, list[str]] = {}  # of the edge of each arrow, by the group of the target; "" if it is never removed
    order_keys: dict[str, tuple[int, int]] = {}  # of each edge: the group with which it is tested, and its place there
    used = set[tuple[int, int]]()
    for index in sorted(by_group):
        _check_removable(model, index, can_differ)
        names[index] = []
        for edge, sources, targets in by_group[index]:
            if pairs is not None and (edge.parent, edge.child) not in pairs:
                names[index] += [""] * len(sources)
                continue
            new_names = _name_edges(ground, sources, targets, over)
            if isinstance(corrupt, Ablation):  # arrows from words without an aligned one are never removed
                is_set = differing[sources].tolist()
                new_names = [name if flag else "" for name, flag in zip(new_names, is_set, strict=True)]
            names[index] += new_names
            for name, source in zip(new_names, sources.tolist(), strict=True):
                if name:
                    used.add((edge.parent, edge.child))
                    order_keys.setdefault(name, (edge.parent, source) if is_of_nodes else (index, len(order_keys)))
    edge_names = tuple(sorted(order_keys, key=order_keys.__getitem__))
    ids = {name: k for k, name in enumerate(edge_names)} | {"": -1}
    edges_by_group = {
        index: tuple(ids[name] for name in members)
        for index, members in groupby(edge_names, key=lambda name: order_keys[name][0])
    }
    differing &= is_ancestor
    first, incoming = differing.copy(), {}
    for index in names:
        ends = [np.concatenate([part[k] for part in by_group[index]]).astype(np.int64) for k in (1, 2)]
        incoming[index] = IncomingArrows(ends[0], ends[1], np.array([ids[name] for name in names[index]]))
        first[ends[1]] &= not isinstance(corrupt, Ablation)
    masks = edges_by_group, first, differing
    silent = tuple(pattern for pattern, members in (parsed or {}).items() if not members & used)
    return CircuitArrows(ground, tuple(outcome_nodes), incoming, edge_names, *masks, num_idle, over, silent)


def _mark_ancestors_of_words(ground: GroundGraph, is_ancestor: BoolArray, ablated: Collection[int]) -> None:
    """Mark also the ancestors through means over the words of ablated groups."""
    by_child: dict[int, list[tuple[IntArray, IntArray]]] = {}
    for edge, sources, targets in ground.arrows():
        by_child.setdefault(edge.child, []).append((sources, targets))
    for index in reversed(range(len(ground.template.groups))):
        nodes = get_node_slice(ground, index)
        is_ancestor[nodes] |= index in ablated and is_ancestor[nodes].any()
        for sources, targets in by_child.get(index, ()):
            is_ancestor[sources[is_ancestor[targets]]] = True


def _select_sources(
    model: GroundModel, pairs: set[tuple[int, int]] | None, *, has_states: bool
) -> set[tuple[int, int]]:
    """The pairs of groups whose parent can be ablated: by default all real groups that depend on the words.

    With `has_states`, for values of other words, also tokens and positions, which differ between aligned words.

    Raises:
        BNetError: A candidate starts from nodes without real values.
    """
    specs, graph = model.network.specs, model.network.graph
    if pairs is None:
        if has_states:
            parents = {m.group.index for m in specs if m.group.word_stack is not None and not m.tpm.is_random}
        else:
            dependent = LinearStructure(model.network).word_dependent
            parents = {index for index in dependent if not is_index_valued(specs[index])}
        return {(e.parent, e.child) for e in graph.edges if e.parent in parents}
    for parent in () if has_states else sorted({parent for parent, _ in pairs}):
        if is_index_valued(specs[parent]):
            name = specs[parent].group.name
            raise BNetError(
                "candidates", expected="nodes with real values, for an ablation", actual=f"{name}, which has states"
            )
    return pairs


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
        ends = split_path(name)
        is_similar = all(
            end.startswith(groups[i].name) for end, i in zip(ends, (edge.parent, edge.child), strict=False)
        )
        if is_similar and name in _name_edges(arrows.ground, sources, targets, arrows.over):
            return
    if NODES in arrows.over:
        raise unknown_name_error("node", name, arrows.edge_names)
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
        is_same = all(has_same_intervention(*pair, node) for pair in pairs)
        differing[node] = not is_same
        if is_same and node in model.do:
            unchanged.append(node)
    has_same_rows = model.attention_rows.keys() == corrupt_model.attention_rows.keys()
    rows = model.ground.retained_parents if has_same_rows else {}
    # A node that both runs set to the same value cannot differ: graph surgery cuts the arrows into it.
    return differing, _mark_descendants(GroundGraph(template, model.ground.word_counts, unchanged, rows), differing)


def _mark_descendants(ground: GroundGraph, marks: BoolArray) -> BoolArray:
    """The mask of the marked nodes and of their descendants, `[node]`."""
    result = marks.copy()
    result[descendants(ground, np.flatnonzero(marks).tolist())] = True
    return result


def has_same_intervention(first: GroundModel, second: GroundModel, node: int) -> bool:
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


def _parse_candidates(
    ground: GroundGraph, candidates: object, *, is_of_nodes: bool
) -> dict[str, set[tuple[int, int]]] | None:
    """For each candidate the pairs (parent group, child group) whose arrows may be removed; None for all."""
    if candidates is None:
        return None
    patterns = check_sequence("candidates", [candidates] if isinstance(candidates, str) else candidates, str)
    groups = ground.template.groups
    known: dict[str, set[tuple[int, int]]] = {}
    for edge in ground.template.edges:
        ends = (groups[edge.parent].stem,) if is_of_nodes else (groups[edge.parent].stem, groups[edge.child].stem)
        known.setdefault(join_path(ends), set()).add((edge.parent, edge.child))
    names = {pattern: join_path(split_path(pattern)) for pattern in patterns}
    for pattern, name in names.items():
        if name not in known:
            raise unknown_name_error(f"{'role' if is_of_nodes else 'arrow'} of candidates", pattern, known)
    return {pattern: known[name] for pattern, name in names.items()}


def _name_edges(ground: GroundGraph, sources: IntArray, targets: IntArray, over: Collection[str]) -> list[str]:
    """The name of the edge of each arrow: the names of both ends (or of the source), with a star for a joined index."""
    names, columns = {}, (sources.tolist(),) if NODES in over else (sources.tolist(), targets.tolist())
    for node in {node for column in columns for node in column}:
        group, index = ground.unravel_index(node)
        axes = zip(ground.axes(group), index, strict=True)
        names[node] = "_".join([group.name, *(str(i) if axis in over else "*" for axis, i in axes)])
    return [join_path([names[node] for node in ends]) for ends in zip(*columns, strict=True)]
