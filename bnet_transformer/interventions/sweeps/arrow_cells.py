"""Cells of arrows and paths: of all arrows between two roles, of all paths along roles, of one path of names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from bnet_transformer._core.arrays import IntArray
from bnet_transformer._core.memory import check_memory
from bnet_transformer._core.naming import SLICE, WORD, join_path, split_path
from bnet_transformer.errors import BNetError
from bnet_transformer.graph import NodeGroup, find_family
from bnet_transformer.graph.transformer_lens import unknown_node_error
from bnet_transformer.interventions.sweeps.cell_spec import (
    READ,
    NodePath,
    PatchCells,
    check_not_node,
    check_patchable,
    find_merged_plates,
    is_index_valued,
    label_positions,
    merge_plates,
    number_cells,
    select_axes,
    unravel_nodes,
)
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import GroundModel

PATH_BYTES = 2_500  # memory of one path: its name, its nodes, the values along it
RoleArrows = list[tuple[NodeGroup, NodeGroup, IntArray, IntArray]]  # parent, child, and the ids of both ends


def build_arrow_cells(examples: Examples, at: str, over: object, *, is_strict: bool = True) -> PatchCells:
    """A cell for each ground arrow between two roles, or for each ground path along more roles.

    Without `is_strict`, axes in `over` that the arrows do not have are ignored.
    """
    model = examples.model
    roles = split_path(at)
    for role in roles:
        if role not in model.network.graph.by_stem:
            check_not_node(model, role, at)
            raise unknown_node_error("at", role, model.network.graph.by_stem, model.network.graph)
    for pair in itertools.pairwise(roles):
        _check_path_memory(at, model.ground.count_arrows(roles=pair))
    steps = [_find_role_arrows(model, *pair, at) for pair in itertools.pairwise(roles)]
    if len(steps) > 1:
        if over is not None and is_strict:
            raise BNetError("over", expected="None, because at= is a path", actual=over)
        return _build_path_cells(model, at, steps)
    default = _get_arrow_axes(model, steps[0])
    axes = select_axes(over, default, default, is_strict=is_strict)
    merged, grid = find_merged_plates(axes, default), []
    for parent, child, sources, targets in steps[0]:
        read = unravel_nodes(model, parent, sources)
        position = read | unravel_nodes(model, child, targets) | ({READ: read[WORD]} if WORD in read else {})
        grid.append(merge_plates(merged, model.network.graph.plate_sizes, position))
    positions, cell_ids = number_cells(axes, grid)
    paths: list[NodePath] = []
    names: dict[int, str] = {}
    for cells, (_, _, sources, targets) in zip(cell_ids, steps[0], strict=True):
        for cell_id, source, target in zip(cells.tolist(), sources.tolist(), targets.tolist(), strict=True):
            paths.append(NodePath(cell_id, (source, target)))
            name = join_path(map(model.ground.name, (source, target)))
            names[cell_id] = _join_arrow_names(names.get(cell_id, name), name)
    parent, child = steps[0][0][:2]
    labels = label_positions(examples, positions, {WORD: child.word_stack, READ: parent.word_stack})
    return PatchCells(at, axes, positions, labels, names, paths=tuple(paths))


def _join_arrow_names(first: str, second: str) -> str:
    """The common name of two arrows: a star for each index in which they differ."""
    ends = zip(split_path(first), split_path(second), strict=True)
    parts = [zip(a.split("_"), b.split("_"), strict=True) for a, b in ends]
    return join_path("_".join(a if a == b else "*" for a, b in indices) for indices in parts)


def _find_role_arrows(model: GroundModel, parent_role: str, child_role: str, at: str) -> RoleArrows:
    """The ground arrows from one role to another, by pair of node groups."""
    groups = model.network.graph.groups
    arrows: RoleArrows = []
    for edge, sources, targets in model.ground.arrows(roles=(parent_role, child_role)):
        parent, child = groups[edge.parent], groups[edge.child]
        if len(sources):
            check_patchable(model, model.network.specs[parent.index])
            check_path_node(model, int(targets[0]))
            arrows.append((parent, child, sources.astype(np.int64), targets.astype(np.int64)))
    if not arrows:
        graph, arrow = model.network.graph, f"{parent_role} -> {child_role}"
        parent_ids = (edge.parent for group in graph.by_stem[child_role] for edge in graph.in_edges[group.index])
        stems = sorted({groups[index].stem for index in parent_ids})
        allowed = ", ".join(f"{stem} -> {child_role}" for stem in stems) or f"{child_role} has no parent"
        raise BNetError(f"at {at!r}", expected="arrows of the bnet", actual=arrow, allowed=allowed)
    return arrows


def _get_arrow_axes(model: GroundModel, arrows: RoleArrows) -> tuple[str, ...]:
    """The axes of arrows: the slice of the child, the plates of both, the word of the child, the word that it reads."""
    axes_by_pair: list[tuple[str, ...]] = []
    for parent, child, _, _ in arrows:
        spec = model.network.specs[child.index]
        reads_other_words = any(ref.reach.kind != "same" for ref in spec.parents if ref.index == parent.index)
        reads = parent.word_stack is not None and (
            child.word_stack is None or reads_other_words or parent.word_stack != child.word_stack
        )
        plates = tuple(dict.fromkeys([*child.plates, *parent.plates]))
        sliced = (SLICE,) if child.slice is not None else ()
        word = (WORD,) if child.word_stack is not None else ()
        axes_by_pair.append((*sliced, *plates, *word, *((READ,) if reads else ())))
    union = max(axes_by_pair, key=len)
    if all(axes in (union, tuple(axis for axis in union if axis != READ)) for axes in axes_by_pair):
        return union  # the source of an arrow from the same word is this word
    if len(set(axes_by_pair)) > 1:
        actual = " and ".join(map(str, dict.fromkeys(axes_by_pair)))
        raise BNetError("at", expected="arrows with the same axes in all slices", actual=actual)
    return axes_by_pair[0]


def _build_path_cells(model: GroundModel, at: str, steps: Sequence[RoleArrows]) -> PatchCells:
    """A cell for every ground path along some roles."""
    first = dict.fromkeys(source for _, _, sources, _ in steps[0] for source in sources.tolist())
    chains: list[tuple[int, ...]] = [(source,) for source in first]
    for step in steps:
        next_nodes: dict[int, list[int]] = {}
        for _, _, sources, targets in step:
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                next_nodes.setdefault(source, []).append(target)
        _check_path_memory(at, sum(len(next_nodes.get(path[-1], ())) for path in chains))
        chains = [(*path, target) for path in chains for target in next_nodes.get(path[-1], ())]
    paths = [NodePath(k, nodes) for k, nodes in enumerate(chains)]
    if not paths:
        raise BNetError(f"at {at!r}: the ground graph has no path along these roles")
    names = {r.cell: join_path(map(model.ground.name, r.nodes)) for r in paths}
    positions = {"path": tuple(range(len(paths)))}
    return PatchCells(at, ("path",), positions, {"path": tuple(names.values())}, names, paths=tuple(paths))


def _check_path_memory(at: str, count: int) -> None:
    """Raise an error if the arrows or paths do not fit in memory."""
    check_memory(f"at {at!r}", PATH_BYTES * count, "a shorter sentence, or at=[...] with fewer paths")


def parse_path(model: GroundModel, text: str) -> tuple[int, ...]:
    """Parse a path of names, `"v_0_0_1 -> a_0_0_3"`, into ground ids; each step must be an arrow."""
    nodes = tuple(model.ground.id(name) for name in split_path(text))
    for parent, child in itertools.pairwise(nodes):
        if parent not in model.ground.parents(child):
            names = f"{model.ground.name(parent)} -> {model.ground.name(child)}"
            allowed = ", ".join(map(model.ground.name, model.ground.parents(child)[:6])) or "it has no parent"
            raise BNetError(f"path {text!r}", expected="arrows of the bnet", actual=names, allowed=allowed)
    for child in nodes[1:]:
        check_path_node(model, child)
    return nodes


def match_arrows(model: GroundModel, text: str) -> list[tuple[int, ...]]:
    """The ground arrows between the nodes of two patterns, `"v_0_1_* -> a_0_1_*"`."""
    parents, children = (find_family(model.ground, pattern).nodes for pattern in split_path(text))
    allowed = set(parents)
    arrows: list[tuple[int, ...]] = [
        (parent, child) for child in children for parent in model.ground.parents(child) if parent in allowed
    ]
    if not arrows:
        raise BNetError(f"path {text!r}", expected="arrows of the bnet", actual="no arrow between nodes of these names")
    for child in {arrow[-1] for arrow in arrows}:
        check_path_node(model, child)
    return arrows


def find_arrow_roles(model: GroundModel, *, is_real: bool = False) -> list[str]:
    """All arrows of roles (`"v -> a"`) along which a value can be patched, in the order of the declaration.

    The child is a function of its parents, and the parent has a value in both runs. With `is_real`, the nodes also have
    real values, which have gradients.
    """
    specs, ground, arrows = model.network.specs, model.ground, dict[tuple[str, str], bool]()
    with_rows = {ground.group_of(node).index for node in model.attention_rows}
    for edge in ground.template.edges:
        parent, child = specs[edge.parent], specs[edge.child]
        has_value = not parent.tpm.is_random or set(ground.select_nodes(parent.group).tolist()) <= model.do.keys()
        has_value &= not child.tpm.is_random and edge.child not in with_rows
        has_value &= not (is_real and (is_index_valued(parent) or is_index_valued(child)))
        roles = parent.group.stem, child.group.stem
        arrows[roles] = arrows.get(roles, True) and has_value
    return [join_path(roles) for roles, has_value in arrows.items() if has_value and ground.count_arrows(roles=roles)]


def check_path_node(model: GroundModel, child: int) -> None:
    """Raise an error for a path to a node that is not a function of its parents."""
    spec = model.network.specs[model.ground.group_of(child).index]
    if spec.tpm.is_random or child in model.attention_rows:
        is_set = child in model.attention_rows
        actual = "a node whose row of attention is set" if is_set else f"a {spec.tpm.kind} node"
        raise BNetError(
            f"path to {model.ground.name(child)}",
            expected="nodes that are functions of their parents",
            actual=actual,
            hint="End the path at a parent of this node; the run continues from there",
        )
