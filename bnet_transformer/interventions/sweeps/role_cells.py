"""Cells of a role: a cell for each of its nodes, or rows of attention, joined along the axes that `over` omits."""

from __future__ import annotations

import numpy as np

from bnet_transformer._core.naming import SLICE, WORD
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.graph.transformer_lens import unknown_node_error
from bnet_transformer.interventions.sweeps.cell_spec import (
    READ,
    PatchCells,
    PatchSites,
    check_not_node,
    check_patchable,
    find_attention_groups,
    find_merged_plates,
    label_positions,
    merge_plates,
    number_cells,
    select_axes,
    unravel_nodes,
)
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import GroundModel
from bnet_transformer.reference.node_tables import compute_read_mask
from bnet_transformer.tpm import Attention


def build_role_cells(examples: Examples, at: str, over: object, *, is_strict: bool = True) -> PatchCells:
    """A cell for each node of a role, or for all its nodes with the same index along the axes of `over`.

    Without `is_strict`, axes in `over` that the role does not have are ignored.
    """
    model = examples.model
    graph, specs = model.network.graph, model.network.specs
    check_not_node(model, at, at)
    is_attention = at not in graph.by_stem
    known = {**graph.by_stem, **find_attention_groups(model)} if is_attention else graph.by_stem
    if at not in known:
        raise unknown_node_error("at", at, known, graph)
    groups = known[at]
    for group in groups:
        (_check_attention if is_attention else check_patchable)(model, specs[group.index])
    axes_of = [((SLICE,) if group.slice is not None else ()) + tuple(model.ground.axes(group)) for group in groups]
    node_axes = axes_of[0]
    if any(axes != node_axes for axes in axes_of):
        raise BNetError("at", expected="a role whose nodes have the same axes in all slices", actual=at)
    allowed = (*node_axes, READ) if is_attention else node_axes
    axes = select_axes(over, node_axes, allowed, is_strict=is_strict)
    read_stack = model.network.get_source_stack(specs[groups[0].index]) if is_attention else None
    words = 0 if read_stack is None else model.ground.word_counts[read_stack]
    grid, patched = [], []
    for group in groups:
        position = unravel_nodes(model, group, model.ground.select_nodes(group))
        node, read = np.arange(len(position[SLICE])), None
        if READ in axes:
            reads = compute_read_mask(model, specs[group.index])
            selected, read = np.nonzero(reads[position[WORD] if WORD in position else np.zeros_like(node)])
            node, position = node[selected], {axis: index[selected] for axis, index in position.items()} | {READ: read}
        grid.append(position)
        patched.append((group, node, read))
    merged = find_merged_plates(axes, node_axes)
    numbered = [merge_plates(merged, graph.plate_sizes, position) for position in grid]
    positions, cell_ids = number_cells(axes, numbered, words)
    sites: list[PatchSites] = []
    names: dict[int, str] = {}
    for (group, node, read), position, cells in zip(patched, grid, cell_ids, strict=True):
        sites.append(PatchSites(group.index, cells, node, is_attention, read))
        values = [position[axis] if axis in (*axes, *merged) else None for axis in node_axes]
        for k, cell_id in enumerate(cells.tolist()):  # a star for each index that a cell joins
            if cell_id not in names:
                name = "_".join([at, *("*" if index is None else str(int(index[k])) for index in values)])
                names[cell_id] = name if read is None else f"{name}[{int(read[k])}]"
    labels = label_positions(examples, positions, {WORD: groups[0].word_stack, READ: read_stack})
    return PatchCells(at, axes, positions, labels, names, tuple(sites))


def _check_attention(model: GroundModel, spec: NodeSpec) -> None:
    """Raise an error for a group whose rows of attention cannot be set."""
    is_supported = isinstance(spec.tpm, Attention) and not any(parent.pick for parent in spec.parents)
    values = [parent for parent in spec.parents if parent.slot == "v."]
    if not is_supported or not values or values[0].over != (WORD,):
        expected = "node groups with an Attention over words and without pick="
        raise BNetError(f"at {spec.group.name}", expected=expected, actual=type(spec.tpm).__name__)
    if isinstance(spec.tpm, Attention) and spec.tpm.normaliser.kind != "softmax":
        raise BNetError(
            f"at {spec.group.name}", expected="nodes with attention P(j | i)", actual=spec.tpm.no_attention_reason()
        )
