"""Exact values of readers: a writer has its value in the other run, and the linear groups after it are computed again.

All other writers keep their values in the base run, so the linear groups between them and the reader are computed with
one changed writer at a time, all norms included. A cell of this pass is one writer; all readers share it. The value of
a reader is then a patch of its node (`GroupPatch`), and the rest of the net runs as for any other patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.tensors import BoolArray, IntArray
from bnet_transformer.compiler.evaluate import evaluate_tpm
from bnet_transformer.compiler.gather import ExecutionState, gather_parents
from bnet_transformer.declare import NodeSpec
from bnet_transformer.interventions.cells import EdgeCells
from bnet_transformer.interventions.edges import READOUT, EdgeStructure, ReaderGroup, WriterUnit, list_linear_groups
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


@dataclass
class WriterPass:
    """The linear groups before some readers, computed with one changed writer in each cell.

    Args:
        run: The base run.
        differences: What each group of writers writes in the other run minus the base run, by its number,
            `[1 or N, *plates, word, *shape]`.
        structure: The edges of the net.
        readers: The numbers of the groups of readers.
        writers: The writers: one cell each.
    """

    run: PatchedRun
    differences: Mapping[int, Tensor]
    structure: EdgeStructure
    readers: Sequence[int]
    writers: Sequence[WriterUnit]
    update: SparseUpdate = field(init=False)

    def __post_init__(self) -> None:
        self.update = SparseUpdate(self.run.base, {}, self.run.compact_index)

    @cached_property
    def cell_of(self) -> dict[WriterUnit, int]:
        """The cell of each writer."""
        return {writer: k for k, writer in enumerate(self.writers)}

    @cached_property
    def groups(self) -> list[int]:
        """The writers and the linear groups, parents first."""
        return list_linear_groups(self.structure, self.readers)

    @cached_property
    def words(self) -> dict[int, BoolArray]:
        """The words of each linear group that a reader needs, `[word]`."""
        return find_needed_words(self.run, self.structure, self.readers)

    @cached_property
    def reached(self) -> dict[int, BoolArray]:
        """The words of a linear group that a changed writer reaches in each cell, `[cell, word]`."""
        masks: dict[int, BoolArray] = {}
        for index in self.groups:
            spec, w = self.run.specs[index], self.structure.writer_index.get(index)
            mask = self._find_reached(spec, self.structure.get_linear_positions(spec), masks)
            if w is not None and w in self.differences:
                differing = find_differing_words(self.run, self.structure, w, self.differences[w])
                for cell, (group, unit) in enumerate(self.writers):
                    if group == w:
                        mask[cell] |= differing[unit]
            masks[index] = mask
        return masks

    def _find_reached(self, spec: NodeSpec, slots: Sequence[int], masks: Mapping[int, BoolArray]) -> BoolArray:
        """The words of a group that depend on reached words of its parents in some slots, `[cell, word]`."""
        reached = np.zeros((len(self.writers), count_words(self.run.examples.model, spec.group.index)), dtype=bool)
        for parent in (spec.parents[k] for k in slots if spec.parents[k].index in masks):
            mask = masks[parent.index]
            is_aligned = parent.reach.kind == "same" and mask.shape[1] == reached.shape[1]
            if mask.shape[1] == 1 or is_aligned:
                reached |= mask
            else:
                table = parent.reach.matrix(reached.shape[1], mask.shape[1])
                reached |= (mask.astype(np.float32) @ table.T.astype(np.float32)) > 0
        return reached

    def compute_groups(self) -> None:
        """Compute the linear groups."""
        for index in self.groups:
            mask = self.reached[index] & self.words[index]
            if mask.any():
                rows = RowIndex.from_mask(mask)
                self.update.by_group[index] = GroupUpdate(rows, self._compute_group(index, rows))

    def _compute_group(self, index: int, rows: RowIndex) -> Tensor:
        """The rows of a group: computed from its linear parents, with the changed writers of the group itself."""
        spec, w = self.run.specs[index], self.structure.writer_index.get(index)
        slots = self.structure.get_linear_positions(spec)
        has_upstream = any(spec.parents[k].index in self.update.by_group for k in slots)
        if has_upstream:
            is_part = w is not None
            value = self.update.compute(spec, rows, slots=slots if is_part else None)
            if index in self.run.base.patched:
                value = self.run.apply_interventions(value, index, rows)
        else:
            value = self.update.gather(index, rows)
        return value if w is None else self._change_writers(value, spec, w, rows)

    def _change_writers(self, value: Tensor, spec: NodeSpec, w: int, rows: RowIndex) -> Tensor:
        """Change the writers of a group, each in its own cell: `[example, *plates, row, *shape]`."""
        axis, base = self.run.base.layout.word_dim, self.run.base
        units = [unit for group, unit in self.writers if group == w]
        if not units:
            return value
        difference = self.differences[w]
        shape = (len(self.run.examples), *get_layout_shape(base, spec)[:-1], len(rows), *spec.shape)
        change = torch.zeros(shape, dtype=base.dtype, device=value.device)
        num_words = count_words(self.run.examples.model, spec.group.index)
        cells = torch.tensor([self.cell_of[w, unit] for unit in units])
        words = torch.arange(num_words).repeat(len(units))
        row = rows.row_ids[cells.repeat_interleave(num_words), words]
        nodes = (torch.tensor(units)[:, None] * num_words + torch.arange(num_words)).flatten()[row >= 0]
        position = get_layout_index(base, spec, nodes.numpy())
        target = change.movedim(0, axis)
        source = difference.expand(len(self.run.examples), *get_layout_shape(base, spec), *spec.shape).movedim(0, axis)
        target[(*position[:-1], row[row >= 0])] = source[position]
        return value + change

    def compute_reader(self, r: int) -> tuple[RowIndex, Tensor]:
        """The value of the readers of a group in each cell: the rows, and `[1 or N, *plates, row, *shape]`."""
        reader = self.structure.reader_groups[r]
        spec, index = reader.target, reader.target.group.index
        reached = self._find_reached(spec, reader.slots, self.reached)
        rows = RowIndex.from_mask(reached & self.run.needed.ancestor_words[index])
        if not len(rows):
            return rows, torch.zeros(0)
        value = self.evaluate_target(reader, self.update, rows)
        if index in self.run.base.patched:
            value = self.run.apply_interventions(value, index, rows)
        return rows, value

    def evaluate_target(self, reader: ReaderGroup, update: SparseUpdate, rows: RowIndex) -> Tensor:
        """The rows of a target: its reader sees the updated groups. Of a random outcome `log P`, or the mean."""
        spec = reader.target
        has_other_slots = bool(self.structure.get_reading_positions(spec)) or len(reader.slots) < len(
            self.structure.get_linear_positions(spec)
        )
        is_open = spec.tpm.is_random and spec.group.index not in self.run.base.known
        return update.compute(spec, rows, as_distribution=is_open, slots=reader.slots if has_other_slots else None)


def find_needed_words(run: PatchedRun, structure: EdgeStructure, readers: Sequence[int]) -> dict[int, BoolArray]:
    """The words of each linear group that some readers need, `[word]`."""
    model, specs, groups = run.examples.model, run.specs, list_linear_groups(structure, readers)
    needed = {index: np.zeros(count_words(model, index), dtype=bool) for index in groups}

    def mark(spec: NodeSpec, slots: Sequence[int], words: BoolArray) -> None:
        for k in slots:
            parent = spec.parents[k]
            if parent.index not in needed:
                continue
            if parent.reach.kind == "same" or len(needed[parent.index]) == 1:
                needed[parent.index] |= words if len(words) == len(needed[parent.index]) else words.any()
            else:
                table = parent.reach.matrix(len(words), len(needed[parent.index]))
                needed[parent.index] |= table[words].any(0)

    for r in readers:
        reader = structure.reader_groups[r]
        mark(reader.target, reader.slots, run.needed.ancestor_words[reader.target.group.index])
    for index in reversed(groups):
        mark(specs[index], structure.get_linear_positions(specs[index]), needed[index])
    return needed


def get_writer_values(structure: EdgeStructure, state: ExecutionState, w: int) -> Tensor:
    """What a group of writers writes in a run, `[1 or N, *plates, word, *shape]`."""
    writer = structure.writer_groups[w]
    spec = writer.spec
    if not writer.is_part:
        return state.values[spec.group.index]
    context, parents = gather_parents(state, spec)
    linear = structure.get_linear_positions(spec)
    parents = [torch.zeros_like(parent) if k in linear else parent for k, parent in enumerate(parents)]
    return state.layout.pad_dims(evaluate_tpm(state, spec, context, parents), len(spec.shape))


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
    changed = WriterPass(run, differences, edges.structure, edges.reader_groups, edges.writer_units)
    changed.compute_groups()
    for r in edges.reader_groups:
        rows, value = changed.compute_reader(r)
        if not len(rows):
            continue
        part = edges.select(table.readers[edges.edges] == r)
        reader = edges.structure.reader_groups[r]
        spec = reader.target
        num_words = count_words(run.examples.model, spec.group.index)
        cells = torch.tensor(
            [changed.cell_of[int(table.writers[k]), int(table.writer_units[k])] for k in part.edges.tolist()]
        )
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
