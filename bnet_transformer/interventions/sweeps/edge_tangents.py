"""The derivatives of linear groups along the differences of writers: the forward part of first-order estimates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import BoolArray
from bnet_transformer.compiler.linear_groups import find_residuals
from bnet_transformer.declare import NodeSpec
from bnet_transformer.interventions.edges.entry_maps import adds_units, map_units
from bnet_transformer.interventions.edges.structure import EdgeStructure, WriterUnit, list_linear_groups
from bnet_transformer.interventions.sweeps.edge_patches import find_needed_words
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun
from bnet_transformer.interventions.sweeps.sparse_update import (
    GroupUpdate,
    RowIndex,
    SparseUpdate,
    count_words,
    get_layout_index,
    get_layout_shape,
    is_wordwise,
)
from bnet_transformer.tpm import TPM


@dataclass
class TangentPass:
    """The derivatives of linear groups along the differences of writers: one cell for each writer.

    A sum passes the tangents of its parents on unchanged, so that only maps and norms cost time. The tangents of a
    group are blocks `[example, *plates, writer, word, *shape]`, with the words that a reader needs.

    Args:
        run: The run at which the net is linearised.
        differences: What each group of writers writes in the other run minus the base run, by its number.
        structure: The edges of the net.
        readers: The numbers of the groups of readers.
        writers: The writers.
    """

    run: PatchedRun
    differences: Mapping[int, Tensor]
    structure: EdgeStructure
    readers: Sequence[int]
    writers: Sequence[WriterUnit]
    blocks: dict[int, list[tuple[list[int], Tensor]]] = field(init=False, default_factory=dict)
    words: dict[int, BoolArray] = field(init=False)

    def __post_init__(self) -> None:
        self.words = find_needed_words(self.run, self.structure, self.readers)

    @torch.no_grad()
    def compute(self, ends: Collection[int]) -> None:
        """Compute the groups from which a chain leads to one of `ends`."""
        groups = {*ends}
        order = list_linear_groups(self.structure, self.readers)
        for index in reversed(order):
            if index in groups:
                spec = self.run.specs[index]
                groups |= {spec.parents[k].index for k in self.structure.get_linear_positions(spec)}
        for index in order:
            if index in groups and self.words[index].any():
                self.blocks[index] = self._compute_group(self.run.specs[index])

    def join(self, index: int) -> tuple[list[int], Tensor]:
        """The writers before a group, and their tangents in one block; writers that reach it twice have their sum."""
        blocks = self.blocks.get(index, [])
        cells = [cell for part, _ in blocks for cell in part]
        if not blocks:
            return [], torch.zeros(0)
        axis = self.run.base.layout.word_dim
        sizes = [max(block.shape[d] for _, block in blocks) for d in range(blocks[0][1].dim())]
        full = [b.expand(*sizes[:axis], b.shape[axis], *sizes[axis + 1 :]) for _, b in blocks]
        joined = full[0] if len(full) == 1 else torch.cat(full, axis)
        unique = sorted(set(cells))
        if len(unique) == len(cells):
            return cells, joined
        total = joined.new_zeros(*joined.shape[:axis], len(unique), *joined.shape[axis + 1 :])
        return unique, total.index_add(axis, torch.tensor([unique.index(c) for c in cells]), joined)

    def _compute_group(self, spec: NodeSpec) -> list[tuple[list[int], Tensor]]:
        """The blocks of a group: passed on by its residual parents, mapped from the others, and its own writers."""
        index, positions = spec.group.index, self.structure.get_linear_positions(spec)
        residuals = find_residuals(spec, positions)
        blocks = []
        mapped = []
        for parent in dict.fromkeys(spec.parents[k].index for k in positions):
            if not self.blocks.get(parent):
                continue
            if parent in residuals:
                factor = residuals[parent]
                narrowed = [(cells, self._narrow(block, parent, index)) for cells, block in self.blocks[parent]]
                blocks += narrowed if factor == 1 else [(cells, factor * block) for cells, block in narrowed]
            elif self._is_split(spec, parent):
                blocks.append(self._map_units(spec, parent))
            else:
                mapped.append(parent)
        if mapped:
            blocks.append(self.map_group(spec, mapped))
        if index in self.run.base.patched and blocks:
            is_set = self.run.base.patched[index][1]
            blocks = [(cells, block * ~self._align_mask(is_set, index, block)) for cells, block in blocks]
        w = self.structure.writer_index.get(index)
        if w is not None and (new := [cell for cell, (group, _) in enumerate(self.writers) if group == w]):
            blocks.append((new, self._write(spec, w, new)))
        return blocks

    def _is_split(self, spec: NodeSpec, parent: int) -> bool:
        """Whether a group adds one term for each writer of a parent group, which is no sum itself."""
        network, parent_spec = self.structure.network, self.run.specs[parent]
        is_writer = parent in self.structure.writer_index and not self.structure.get_linear_positions(parent_spec)
        return is_writer and is_wordwise(network, spec) and adds_units(network, spec, parent)

    def _map_units(self, spec: NodeSpec, parent: int) -> tuple[list[int], Tensor]:
        """The tangents of a group along the writers of a parent, each by its own map."""
        base, axis, index = self.run.base, self.run.base.layout.word_dim, spec.group.index
        w, parent_spec = self.structure.writer_index[parent], self.run.specs[parent]
        cells = [cell for cell, (group, _) in enumerate(self.writers) if group == w]
        shape = (len(self.run.examples), *get_layout_shape(base, parent_spec), *parent_spec.shape)
        words = torch.from_numpy(np.flatnonzero(self.words[parent])).to(base.device)
        values = self.differences[w].expand(shape).index_select(axis, words)
        updates = {parent: GroupUpdate(RowIndex.from_mask(self.words[parent][None]), values)}
        rows = RowIndex.from_mask(self.words[index][None])
        state = SparseUpdate(base, updates, self.run.compact_index).build_row_state(spec, rows)
        units = torch.tensor([self.writers[cell][1] for cell in cells], device=base.device)
        return cells, map_units(state, self.structure, spec, parent).index_select(0, units).movedim(0, axis)

    def _narrow(self, block: Tensor, parent: int, child: int) -> Tensor:
        """A block of a parent at the words that a child needs."""
        before, after = self.words[parent], self.words[child]
        if len(before) != len(after) or (before == after).all():
            return block
        chosen = torch.from_numpy(np.flatnonzero(after[before]))
        return block.index_select(self.run.base.layout.word_dim + 1, chosen.to(block.device))

    def _align_mask(self, mask: Tensor, index: int, block: Tensor) -> Tensor:
        """A mask `[1 or N, *plates, word]` of the nodes of a group, aligned with a block."""
        axis = self.run.base.layout.word_dim
        full = mask.expand(*mask.shape[:axis], len(self.words[index]))
        full = full.index_select(axis, torch.from_numpy(np.flatnonzero(self.words[index])).to(mask.device))
        return full.unsqueeze(axis).reshape(*full.shape[:axis], 1, -1, *[1] * (block.dim() - axis - 2))

    def _write(self, spec: NodeSpec, w: int, cells: Sequence[int]) -> Tensor:
        """The differences of the writers of a group, each in its own cell."""
        axis, index = self.run.base.layout.word_dim, spec.group.index
        difference = self.differences[w]
        shape = (len(self.run.examples), *get_layout_shape(self.run.base, spec))
        words = np.flatnonzero(self.words[index])
        block = difference.new_zeros(*shape[:-1], len(cells), len(words), *spec.shape)
        count = count_words(self.run.examples.model, index)
        units = np.array([self.writers[cell][1] for cell in cells])
        position = get_layout_index(self.run.base, spec, (units[:, None] * count + words).reshape(-1))
        steps = torch.arange(len(cells)).repeat_interleave(len(words)), torch.arange(len(words)).repeat(len(cells))
        source = difference.expand(*shape, *spec.shape).movedim(0, axis)
        block.movedim(0, axis + 1)[(*position[:-1], *steps)] = source[position]
        return block

    def map_group(self, spec: NodeSpec, parents: Sequence[int]) -> tuple[list[int], Tensor]:
        """The tangents of a group, from those of parents that it maps: by its linear map, or its derivative."""
        axis = self.run.base.layout.word_dim
        joined = {parent: self.join(parent) for parent in parents}
        cells = sorted({cell for part, _ in joined.values() for cell in part})
        index = spec.group.index
        words = self.words[index] if index in self.words else self.run.needed.ancestor_words[index]
        rows = RowIndex.from_mask(np.tile(words, (len(cells), 1)))
        updates = {}
        for parent, (part, tangent) in joined.items():
            local = np.zeros((len(cells), len(self.words[parent])), dtype=bool)
            local[np.isin(cells, part)] = self.words[parent]
            order = torch.from_numpy(np.argsort(part)).to(tangent.device)
            sorted_tangent = tangent.index_select(axis, order).flatten(axis, axis + 1)
            updates[parent] = GroupUpdate(RowIndex.from_mask(local), sorted_tangent)
        if type(spec.tpm).norm_scale is not TPM.norm_scale:
            result = self._differentiate_norm(spec, rows, updates)
        else:
            zeros = {index: GroupUpdate(u.rows, torch.zeros_like(u.values)) for index, u in updates.items()}
            result = self._evaluate(spec, rows, updates) - self._evaluate(spec, rows, zeros)
        shape = (len(self.run.examples), *get_layout_shape(self.run.base, spec)[:-1], len(rows), *spec.shape)
        return cells, result.expand(shape).unflatten(axis, (len(cells), -1))

    def _differentiate_norm(self, spec: NodeSpec, rows: RowIndex, tangents: Mapping[int, GroupUpdate]) -> Tensor:
        """The derivative of a norm along tangents of its parents."""
        # J t is the derivative with respect to v of <J^T v, t>, so that two backward passes compute it. (The forward
        # mode of torch compiles a script for the derivative of a norm, with a warning that it is deprecated.)
        base = SparseUpdate(self.run.base, {}, self.run.compact_index)
        with torch.enable_grad():
            leaves = {
                index: base.gather(index, update.rows).detach().expand(update.values.shape).clone().requires_grad_()
                for index, update in tangents.items()
            }
            updates = {index: GroupUpdate(tangents[index].rows, leaf) for index, leaf in leaves.items()}
            value = self._evaluate(spec, rows, updates)
            seed = torch.zeros_like(value, requires_grad=True)
            pulled = torch.autograd.grad(value, list(leaves.values()), seed, create_graph=True)
            (result,) = torch.autograd.grad(pulled, seed, [tangents[index].values for index in leaves])
        return result

    def _evaluate(self, spec: NodeSpec, rows: RowIndex, updates: dict[int, GroupUpdate]) -> Tensor:
        """The rows of a group with updated linear parents."""
        slots = self.structure.get_linear_positions(spec) if self.structure.get_reading_positions(spec) else None
        return SparseUpdate(self.run.base, updates, self.run.compact_index).compute(spec, rows, slots=slots)
