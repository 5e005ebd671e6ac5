"""Exact values of readers: a writer has its value in the other run, and the linear groups after it are computed again.

All other writers keep their values in the base run, so the linear groups between them and the reader are computed with
one changed writer at a time, all norms included. A cell of this pass is one writer; all readers share it. The value of
a reader is then a patch of its node (`GroupPatch`), and the rest of the net runs as for any other patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.tensors import BoolArray, IntArray
from bnet_transformer.compiler.gather import ExecutionState
from bnet_transformer.compiler.linear import LinearStructure, compute_constant, find_reached_words, find_read_words
from bnet_transformer.declare import NodeSpec
from bnet_transformer.interventions.cells import EdgeCells
from bnet_transformer.interventions.edges import READOUT, EdgeStructure, ReaderGroup, WriterUnit
from bnet_transformer.interventions.linear_pass import Block, LinearPass, Norms
from bnet_transformer.interventions.patched_run import (
    GroupPatch,
    GroupUpdate,
    PatchedRun,
    RowIndex,
    SparseUpdate,
    count_words,
    get_layout_index,
    get_layout_shape,
)


def build_linear_pass(
    run: PatchedRun,
    differences: Mapping[int, Tensor],
    structure: EdgeStructure,
    readers: Sequence[int],
    writers: Sequence[WriterUnit],
    norms: Norms,
) -> LinearPass:
    """The pass from some writers to some readers, in which each writer writes its difference between two runs.

    Args:
        run: The base run.
        differences: What each group of writers writes in the other run minus the base run, by its number,
            `[1 or N, *plates, word, *shape]`.
        structure: The edges of the net.
        readers: The numbers of the groups of readers.
        writers: The writers: one cell each.
        norms: How norms transform the differences.

    Returns:
        The pass, of which nothing is computed yet.
    """
    starts = dict[int, BoolArray]()
    for reader in (structure.reader_groups[r] for r in readers):
        needed = run.needed.ancestor_words[reader.target.group.index]
        for parent in (reader.target.parents[k] for k in reader.slots):
            words = find_read_words(parent, needed, count_words(run.examples.model, parent.index))
            starts[parent.index] = starts.get(parent.index, np.zeros_like(words)) | words
    cells = dict[int, list[int]]()
    for cell, (w, _) in enumerate(writers):
        if w in differences:
            cells.setdefault(structure.writer_groups[w].spec.group.index, []).append(cell)
    units = [unit for _, unit in writers]

    def get_sources(spec: NodeSpec) -> list[Block]:
        part = cells.get(spec.group.index, [])
        if not part:
            return []
        difference = differences[structure.writer_index[spec.group.index]]
        return [(part, changes.split_units(spec, difference, [units[cell] for cell in part]))]

    masks = structure.find_words(starts, run.base.word_counts)
    changes = LinearPass(run.base, len(run.examples), structure, masks, get_sources, units, norms, run.compact_index)
    return changes


def update_group(run: PatchedRun, changes: LinearPass, index: int) -> tuple[GroupUpdate, BoolArray]:
    """The values of a group in each cell of a pass, and the words that a changed writer reaches, `[cell, word]`."""
    cells, block = changes.join(index)
    mask = np.zeros((len(changes.units), len(changes.words[index])), dtype=bool)
    if not cells:
        return GroupUpdate(RowIndex.from_mask(mask), run.base.values[index]), mask
    axis = run.base.layout.word_dim
    update = changes.build_update(index, range(len(changes.units)), (cells, block))
    by_word = (block != 0).movedim((axis, axis + 1), (0, 1)).flatten(2).any(-1).cpu().numpy()
    mask[np.array(cells)[:, None], np.flatnonzero(changes.words[index])] = by_word
    base = SparseUpdate(run.base, {}, run.compact_index)
    return GroupUpdate(update.rows, base.gather(index, update.rows) + update.values), mask


def compute_reader(
    run: PatchedRun, changes: LinearPass, reader: ReaderGroup, visible: Mapping[int, tuple[GroupUpdate, BoolArray]]
) -> tuple[RowIndex, Tensor]:
    """The value of the readers of a group in each cell of a pass.

    Args:
        run: The base run.
        changes: The pass.
        reader: The group of readers.
        visible: The parents that the readers see, by group, as `update_group` returns them.

    Returns:
        The rows that a changed writer reaches, and their values, `[1 or N, *plates, row, *shape]`. Of a random outcome
        these are `log P`, or the mean.
    """
    spec, index, structure = reader.target, reader.target.group.index, changes.structure
    reached = np.zeros((len(changes.units), count_words(run.examples.model, index)), dtype=bool)
    for parent in (spec.parents[k] for k in reader.slots):
        reached |= find_reached_words(parent, visible[parent.index][1], reached.shape[1])
    rows = RowIndex.from_mask(reached & run.needed.ancestor_words[index])
    if not len(rows):
        return rows, torch.zeros(0)
    updates = {parent.index: visible[parent.index][0] for parent in (spec.parents[k] for k in reader.slots)}
    is_open = spec.tpm.is_random and index not in run.base.known
    slots = reader.slots if has_other_slots(structure, reader) else None
    value = SparseUpdate(run.base, updates, run.compact_index).compute(spec, rows, as_distribution=is_open, slots=slots)
    return rows, run.apply_interventions(value, index, rows) if index in run.base.patched else value


def has_other_slots(structure: LinearStructure, reader: ReaderGroup) -> bool:
    """Whether a target has slots with writers through which the reader does not read."""
    linear, reading = structure.get_linear_positions(reader.target), structure.get_reading_positions(reader.target)
    return len(linear) + len(reading) > len(reader.slots)


def get_writer_values(structure: EdgeStructure, state: ExecutionState, w: int) -> Tensor:
    """What a group of writers writes in a run, `[1 or N, *plates, word, *shape]`."""
    spec, is_part = structure.writer_groups[w].spec, structure.writer_groups[w].is_part
    linear = structure.get_linear_positions(spec)
    return compute_constant(state, spec, linear) if is_part else state.values[spec.group.index]


@torch.no_grad()
def compute_edge_patches(
    run: PatchedRun, differences: Mapping[int, Tensor], edges: EdgeCells
) -> tuple[dict[int, list[GroupPatch]], dict[int, list[GroupPatch]]]:
    """The patches of the targets of some edges, by node group.

    A readout is patched only as the metric sees it: another node that reads the same value is another reader.

    Args:
        run: The base run.
        differences: What each group of writers writes in the other run minus the base run, by its number.
        edges: The edges, with the cells that set them.

    Returns:
        For each group of targets the patches of its nodes, and for each readout the patches of its outcomes.
    """
    table = edges.structure.edges
    node_patches, outcome_patches = dict[int, list[GroupPatch]](), dict[int, list[GroupPatch]]()
    structure, readers, writers = edges.structure, edges.reader_groups, edges.writer_units
    changes = build_linear_pass(run, differences, structure, readers, writers, Norms.EXACT)
    groups = [structure.reader_groups[r] for r in readers]
    ends = {reader.target.parents[k].index for reader in groups for k in reader.slots}
    changes.compute(ends)
    visible = {index: update_group(run, changes, index) for index in ends}
    number_of = {writer: k for k, writer in enumerate(writers)}
    for r, reader in zip(readers, groups, strict=True):
        rows, value = compute_reader(run, changes, reader, visible)
        if not len(rows):
            continue
        part = edges.select(table.readers[edges.edges] == r)
        spec = reader.target
        num_words = count_words(run.examples.model, spec.group.index)
        pairs = zip(table.writers[part.edges].tolist(), table.writer_units[part.edges].tolist(), strict=True)
        cells = torch.tensor([number_of[pair] for pair in pairs])
        units = torch.from_numpy(table.reader_units[part.edges])
        words = torch.arange(num_words)[None].expand(len(cells), -1)
        row = rows.row_ids[cells[:, None], words]
        is_set = row >= 0
        if part.words is not None:
            is_set &= words == torch.from_numpy(part.words)[:, None]
        k, word = is_set.nonzero(as_tuple=True)
        node = get_layout_index(run.base, spec, (units[k] * num_words + word).numpy())
        axis, event = run.base.layout.word_dim, value.shape[run.base.layout.word_dim + 1 :]
        full = value.expand(len(run.examples), *get_layout_shape(run.base, spec)[:-1], value.shape[axis], *event)
        source = full.movedim(0, axis)[(*node[:-1], row[k, word])].transpose(0, 1)
        patch = GroupPatch(torch.from_numpy(part.cells)[k], node, source, is_per_node=True)
        patches = outcome_patches if reader.channel == READOUT else node_patches
        patches.setdefault(spec.group.index, []).append(patch)
    return node_patches, outcome_patches


def find_effective_edges(run: PatchedRun, differences: Mapping[int, Tensor], edges: EdgeCells) -> IntArray:
    """The cells that set an edge whose writer differs between the runs in some example."""
    table = edges.structure.edges
    differs: dict[int, BoolArray] = {
        w: np.any(find_differing_words(run, edges.structure, w, d), axis=-1) for w, d in differences.items()
    }
    pairs = zip(table.writers[edges.edges].tolist(), table.writer_units[edges.edges].tolist(), strict=True)
    cell_ids: IntArray = np.unique(edges.cells[[differs[w][unit] for w, unit in pairs]])
    return cell_ids


def find_differing_words(run: PatchedRun, structure: EdgeStructure, w: int, difference: Tensor) -> BoolArray:
    """The words at which each writer of a group differs between the runs in some example, `[unit, word]`."""
    spec, layout = structure.writer_groups[w].spec, run.base.layout
    full = difference.expand(len(difference), *get_layout_shape(run.base, spec), *spec.shape)
    axes = [*(layout.axis(plate) for plate in spec.group.plates), layout.word_dim]
    by_word = (full != 0).movedim(axes, list(range(len(axes)))).flatten(len(axes)).any(-1)
    differing: BoolArray = by_word.reshape(-1, by_word.shape[-1]).cpu().numpy()
    return differing


def spread_nodes(run: PatchedRun, index: int, values: Tensor, nodes: IntArray | None = None) -> Tensor:
    """Values of the nodes of a group, `[1 or N, node, *shape]`, in the layout: `[1 or N, *plates, word, *shape]`.

    With `nodes`, only the values of these nodes are given; those of others are zero.
    """
    spec = run.specs[index]
    shape = get_layout_shape(run.base, spec)
    full = values.new_zeros(len(values), *shape, *spec.shape)
    position = get_layout_index(run.base, spec, np.arange(values.shape[1]) if nodes is None else nodes)
    full.movedim(0, run.base.layout.word_dim)[position] = values.transpose(0, 1)
    return full
