"""What writers add to linear groups: one pass from the writers to the groups, with a cell for each writer.

A sum passes the parts of its parents on unchanged, so that only maps and norms cost time. A norm either has the
derivative of its value (`Norms.DERIVATIVE`, for first-order estimates), or its scale is held fixed (`FIXED`, for
contributions), or it is computed again with each changed writer (`EXACT`, for the exact effects of edges).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.tensors import BoolArray, IntArray
from bnet_transformer.compiler.gather import ExecutionState
from bnet_transformer.compiler.linear import (
    LinearStructure,
    WordMasks,
    adds_units,
    compute_constant,
    find_reached_words,
    find_read_words,
    find_residuals,
    is_norm,
    map_units,
)
from bnet_transformer.declare import NodeSpec
from bnet_transformer.interventions.cells import EdgeCells
from bnet_transformer.interventions.edges import READOUT, EdgeStructure, ReaderGroup, WriterUnit
from bnet_transformer.interventions.patched_run import (
    GroupPatch,
    GroupUpdate,
    PatchedRun,
    RowIndex,
    SparseUpdate,
    get_layout_index,
    get_layout_shape,
    is_wordwise,
)

Block = tuple[list[int], Tensor]  # cells, and their parts `[example, *plates, cell, word, *shape]` at the needed words
Norms = Enum("Norms", ["DERIVATIVE", "FIXED", "EXACT"])


@dataclass
class LinearPass:
    """The parts of linear groups by writer.

    Args:
        base: The run.
        count: The number of examples.
        structure: The linear paths.
        words: The words of each linear group that are needed.
        get_sources: The parts that the writers of a group write, given the group.
        units: The unit of the writer of each cell within its group.
        norms: How norms transform the parts.
        compact_index: For groups of which the base contains only some words, the index of each word there.
    """

    base: ExecutionState
    count: int
    structure: LinearStructure
    words: WordMasks
    get_sources: Callable[[NodeSpec], list[Block]]
    units: Sequence[int]
    norms: Norms
    compact_index: Mapping[int, Tensor] = field(default_factory=dict)
    blocks: dict[int, list[Block]] = field(init=False, default_factory=dict)
    _rows: dict[tuple[int, bytes], RowIndex] = field(init=False, default_factory=dict, repr=False)

    @torch.no_grad()
    def compute(self, ends: Collection[int]) -> None:
        """Compute the groups on the paths to some groups; only the blocks of these groups are kept."""
        order = [index for index in self.structure.list_groups(ends) if self.words[index].any()]
        last_use = {parent: index for index in order for parent in self.structure.list_linear_parents(index)}
        for index in order:
            self.blocks[index] = self._compute_group(self.structure.network.specs[index])
            for parent in [p for p in self.blocks if last_use.get(p) == index and p not in ends]:  # frees the memory
                del self.blocks[parent]

    def join(self, index: int) -> Block:
        """The writers before a group, and their parts in one block; writers that reach it twice have their sum."""
        blocks = sorted(self.blocks.get(index, []), key=lambda block: block[0][:1])
        cells = [cell for part, _ in blocks for cell in part]
        if not blocks:
            return [], torch.zeros(0)
        axis = self.base.layout.word_dim
        sizes = [max(block.shape[d] for _, block in blocks) for d in range(blocks[0][1].dim())]
        full = [b.expand(*sizes[:axis], b.shape[axis], *sizes[axis + 1 :]) for _, b in blocks]
        joined = full[0] if len(full) == 1 else torch.cat(full, axis)
        unique = sorted(set(cells))
        if unique == cells:
            return cells, joined
        total = joined.new_zeros(*joined.shape[:axis], len(unique), *joined.shape[axis + 1 :])
        return unique, total.index_add(axis, torch.from_numpy(np.searchsorted(unique, cells)).to(joined.device), joined)

    def split_units(self, spec: NodeSpec, value: Tensor, units: Sequence[int]) -> Tensor:
        """A value of a group, `[1 or N, *plates, word, *shape]`, of one unit in each cell of a block."""
        layout = self.base.layout
        words = torch.from_numpy(np.flatnonzero(self.words[spec.group.index])).to(value.device)
        full = value.expand(self.count, *get_layout_shape(self.base, spec), *spec.shape)
        table = torch.eye(self.structure.count_units(spec), dtype=value.dtype, device=value.device)[list(units)]
        mask = self.structure.spread_units(table, spec, layout, value.dim())
        rows = full.index_select(layout.word_dim, words).unsqueeze(layout.word_dim)
        return rows * mask.movedim(0, layout.word_dim - 1)[None]

    def _compute_group(self, spec: NodeSpec) -> list[Block]:
        """The blocks of a group: passed on by its residual parents, mapped from the others, and its own writers."""
        index, positions = spec.group.index, self.structure.get_linear_positions(spec)
        residuals = find_residuals(spec, positions)
        blocks, mapped = list[Block](), list[int]()
        for parent in self.structure.list_linear_parents(index):
            parts = self.blocks.get(parent)
            if not parts:
                continue
            if parent in residuals:
                factor = residuals[parent]
                narrowed = [(cells, self._narrow(block, parent, index)) for cells, block in parts]
                blocks += narrowed if factor == 1 else [(cells, factor * block) for cells, block in narrowed]
            elif self._is_split(spec, parent):
                blocks.append(self._map_units(spec, parent))
            else:
                mapped.append(parent)
        if mapped:
            blocks.append(self.map_group(spec, mapped))
        if index in self.base.patched and blocks:
            is_set = self.base.patched[index][1]
            blocks = [(cells, block * ~self._align_mask(is_set, index, block)) for cells, block in blocks]
        return blocks + self.get_sources(spec)

    def _is_split(self, spec: NodeSpec, parent: int) -> bool:
        """Whether a group adds one term for each writer of a parent group, which is no sum itself."""
        network = self.structure.network
        is_writer = not self.structure.list_linear_parents(parent) and len(self.blocks[parent]) == 1
        return is_writer and is_wordwise(network, spec) and adds_units(network, spec, parent)

    def _map_units(self, spec: NodeSpec, parent: int) -> Block:
        """The parts of a group from the writers of a parent, each by its own map."""
        ((cells, block),), axis = self.blocks[parent], self.base.layout.word_dim
        updates = {parent: GroupUpdate(RowIndex.from_mask(self.words[parent][None]), block.sum(axis))}
        rows = RowIndex.from_mask(self.words[spec.group.index][None])
        state = SparseUpdate(self.base, updates, self.compact_index).build_row_state(spec, rows)
        terms = map_units(state, self.structure.get_linear_positions(spec), spec, parent)
        units = torch.tensor([self.units[cell] for cell in cells], device=terms.device)
        return cells, terms.index_select(0, units).movedim(0, axis)

    def _narrow(self, block: Tensor, parent: int, child: int) -> Tensor:
        """A block of a parent at the words that a child needs."""
        before, after = self.words[parent], self.words[child]
        if len(before) != len(after) or (before == after).all():
            return block
        chosen = torch.from_numpy(np.flatnonzero(after[before]))
        return block.index_select(self.base.layout.word_dim + 1, chosen.to(block.device))

    def _align_mask(self, mask: Tensor, index: int, block: Tensor) -> Tensor:
        """A mask `[1 or N, *plates, word]` of the nodes of a group, aligned with a block."""
        axis = self.base.layout.word_dim
        full = mask.expand(*mask.shape[:axis], len(self.words[index]))
        full = full.index_select(axis, torch.from_numpy(np.flatnonzero(self.words[index])).to(mask.device))
        return full.unsqueeze(axis).reshape(*full.shape[:axis], 1, -1, *[1] * (block.dim() - axis - 2))

    def map_group(self, spec: NodeSpec, parents: Sequence[int], words: BoolArray | None = None) -> Block:
        """The parts of a group, at its needed words or at others, from those of parents that it maps."""
        axis = self.base.layout.word_dim
        joined = {parent: self.join(parent) for parent in parents}
        cells = sorted({cell for part, _ in joined.values() for cell in part})
        words = self.words[spec.group.index] if words is None else words
        rows = self._index_rows(np.tile(words, (len(cells), 1)))
        updates = {parent: self.build_update(parent, cells, block) for parent, block in joined.items()}
        if is_norm(spec) and self.norms is Norms.DERIVATIVE:
            result = self._differentiate_norm(spec, rows, updates)
            constant = None
        else:
            is_exact = is_norm(spec) and self.norms is Norms.EXACT
            single, start = RowIndex.from_mask(words[None]), dict[int, GroupUpdate]()
            base = SparseUpdate(self.base, {}, self.compact_index)
            for parent, update in updates.items():
                if is_exact:
                    values = update.values + base.gather(parent, update.rows)
                    updates[parent] = GroupUpdate(update.rows, values)
                else:
                    mask = self.words[parent][None]
                    zeros = torch.zeros_like(update.values.narrow(axis, 0, int(mask.sum())))
                    start[parent] = GroupUpdate(RowIndex.from_mask(mask), zeros)
            result, constant = self._evaluate(spec, rows, updates), self._evaluate(spec, single, start)
        shape = (self.count, *get_layout_shape(self.base, spec)[:-1], len(rows), *spec.shape)
        block = result.expand(shape).unflatten(axis, (len(cells), -1))
        return cells, block if constant is None or not bool(constant.any()) else block - constant.unsqueeze(axis)

    def _index_rows(self, mask: BoolArray) -> RowIndex:
        """The rows of a mask `[cell, word]`; equal masks have the same object, so that no value is gathered again."""
        key = len(mask), mask.tobytes()
        if key not in self._rows:
            self._rows[key] = RowIndex.from_mask(mask)
        return self._rows[key]

    def build_update(self, index: int, cells: Sequence[int], block: Block) -> GroupUpdate:
        """A block of a group as the update of some cells."""
        part, values = block
        mask = np.zeros((len(cells), len(self.words[index])), dtype=bool)
        mask[np.isin(cells, part)] = self.words[index]
        axis = self.base.layout.word_dim
        return GroupUpdate(self._index_rows(mask), values.flatten(axis, axis + 1))

    def _differentiate_norm(self, spec: NodeSpec, rows: RowIndex, parts: Mapping[int, GroupUpdate]) -> Tensor:
        """The derivative of a norm along the parts of its parents."""
        # J t is the derivative with respect to v of <J^T v, t>, so that two backward passes compute it. (The forward
        # mode of torch compiles a script for the derivative of a norm, with a warning that it is deprecated.)
        base = SparseUpdate(self.base, {}, self.compact_index)
        with torch.enable_grad():
            leaves = {
                index: base.gather(index, update.rows).detach().expand(update.values.shape).clone().requires_grad_()
                for index, update in parts.items()
            }
            updates = {index: GroupUpdate(parts[index].rows, leaf) for index, leaf in leaves.items()}
            value = self._evaluate(spec, rows, updates)
            seed = torch.zeros_like(value, requires_grad=True)
            pulled = torch.autograd.grad(value, list(leaves.values()), seed, create_graph=True)
            (result,) = torch.autograd.grad(pulled, seed, [parts[index].values for index in leaves])
        return result

    def _evaluate(self, spec: NodeSpec, rows: RowIndex, updates: dict[int, GroupUpdate]) -> Tensor:
        """The rows of a group with updated linear parents."""
        slots = self.structure.get_linear_positions(spec) if self.structure.get_reading_positions(spec) else None
        update = SparseUpdate(self.base, updates, self.compact_index)
        return update.compute(spec, rows, slots=slots, is_scale_fixed=self.norms is Norms.FIXED)


def multiply_parts(
    adjoint: Tensor, tangent: Tensor, axis: int, needed: BoolArray, words: BoolArray, *, keep_words: bool = False
) -> Tensor:
    """The products of gradients of readers and parts of writers: `[example, reader, writer]`, or also `[..., word]`.

    Args:
        adjoint: The gradients at the words of `needed`, `[reader, example, *plates, word, *shape]`.
        tangent: The parts at the words of `words`, `[example, *plates, writer, word, *shape]`.
        axis: The dim of the words of a value.
        needed: The mask of the words that have a gradient.
        words: The mask of the words that have a part.
        keep_words: Whether to return the product of each word.
    """
    common = needed & words
    if not np.array_equal(needed, words):  # some readers of this group are not among the cells
        adjoint = adjoint.index_select(1 + axis, torch.from_numpy(np.flatnonzero(common[needed])).to(adjoint.device))
        tangent = tangent.index_select(1 + axis, torch.from_numpy(np.flatnonzero(common[words])).to(tangent.device))
    a = adjoint.movedim((1, 1 + axis), (0, 1))  # [example, word, reader, *plates, *shape]
    t = tangent.movedim((axis + 1, axis), (1, 2))  # [example, word, writer, *plates, *shape]
    a, t = a.flatten(3), t.flatten(3)
    if not keep_words:
        a, t = a.transpose(1, 2).flatten(2), t.transpose(1, 2).flatten(2)
        return a @ t.mT
    products = (a @ t.mT).movedim(1, -1)  # [example, reader, writer, needed word]
    full = products.new_zeros(*products.shape[:-1], len(words))
    full[..., torch.from_numpy(np.flatnonzero(common)).to(full.device)] = products
    return full


# --------------------------------------------------------------------------------------------------------------------
# Exact values of readers: a writer has its value in the other run, and the linear groups after it are computed again.
#
# All other writers keep their values in the base run, so the linear groups between them and the reader are computed
# with one changed writer at a time, all norms included. A cell of this pass is one writer; all readers share it. The
# value of a reader is then a patch of its node (`GroupPatch`), and the rest of the net runs as for any other patch.


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
            words = find_read_words(parent, needed, run.examples.model.ground.count_words(parent.index))
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
    reached = np.zeros((len(changes.units), run.examples.model.ground.count_words(index)), dtype=bool)
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
        num_words = run.examples.model.ground.count_words(spec.group.index)
        cells = torch.tensor([number_of[table.get_writer(edge)] for edge in part.edges])
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
    writers = map(table.get_writer, edges.edges)
    cell_ids: IntArray = np.unique(edges.cells[[differs[w][unit] for w, unit in writers]])
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
