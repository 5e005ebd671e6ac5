"""First-order estimates of edges: the gradient at the reader, the derivative on the way, the difference of the writer.

For a net with pre-norm this is edge attribution patching (Syed, Rager and Conmy 2023). The gradient at every reader
comes from one backward pass; the readers are pulled back, and the writers pushed forward, to the sums between them,
where one product joins all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import BoolArray
from bnet_transformer.compiler.linear_groups import find_residuals
from bnet_transformer.declare import NodeSpec
from bnet_transformer.interventions.edges.entry_maps import adds_units, map_units
from bnet_transformer.interventions.edges.structure import (
    EdgeCells,
    EdgeStructure,
    ReaderGroup,
    WriterUnit,
    is_wordwise_path,
    list_linear_groups,
)
from bnet_transformer.interventions.sweeps.edge_patches import find_needed_words
from bnet_transformer.interventions.sweeps.gradients import GradientRun
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


def add_edge_effects(effects: Tensor, item: GradientRun, edges: EdgeCells) -> None:
    """Add the effects of edges to `effects[cell, example]`."""
    gradients = _find_target_gradients(item)
    table, by_word = edges.structure.edges, edges.words is not None
    order = np.argsort(table.readers[edges.edges], kind="stable")
    readers = table.readers[edges.edges[order]]
    number_of = {writer: k for k, writer in enumerate(edges.writer_units)}
    pairs = zip(table.writers[edges.edges].tolist(), table.writer_units[edges.edges].tolist(), strict=True)
    numbers = np.array([number_of[pair] for pair in pairs])
    for r, writers, estimates in estimate_edges(item.run, item.base_run.differences, edges, gradients, by_word=by_word):
        inside = order[slice(*np.searchsorted(readers, [r, r + 1]))]
        columns = np.full(len(number_of), -1)
        columns[writers] = np.arange(len(writers))
        inside = inside[columns[numbers[inside]] >= 0]
        index = [torch.from_numpy(table.reader_units[edges.edges[inside]]), torch.from_numpy(columns[numbers[inside]])]
        if edges.words is not None:
            index.append(torch.from_numpy(edges.words[inside]))
        values = estimates.movedim(0, -1)[tuple(index)].double().cpu()  # [edge, example]
        effects.index_add_(0, torch.from_numpy(edges.cells[inside]), values)


def _find_target_gradients(item: GradientRun) -> dict[int, Tensor]:
    """The gradient of the metric at each target of a reader, `[example, *plates, word, *shape]`, by node group.

    The target of a readout has the gradient of the metric with respect to the outcomes: log probabilities, for states.
    """
    run, gradients, added = item.run, dict(item.gradients), set[int]()
    ground = run.examples.model.ground
    for node, gradient in item.outcome_gradients.items():  # [1, example, *event]
        spec = run.specs[ground.group_of(node).index]
        index = spec.group.index
        if index not in added:
            shape = (len(run.examples), *get_layout_shape(run.base, spec), *gradient.shape[2:])
            gradients[index] = gradient.new_zeros(shape)
            added.add(index)
        position = get_layout_index(run.base, spec, np.array([node - int(ground.offsets[index])]))
        gradients[index].movedim(0, run.base.layout.word_dim)[position] = gradient
    return gradients


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


@dataclass(frozen=True)
class ReaderPath:
    """The linear groups between a reader and the sums (or writers) that it reads.

    Attributes:
        ends: The groups at which the path stops: writers, and groups with several linear parents.
        groups: The groups after these, parents first.
    """

    ends: tuple[int, ...]
    groups: tuple[int, ...]


def find_reader_path(structure: EdgeStructure, reader: ReaderGroup) -> ReaderPath:
    """The path from a reader back to the nearest sums and writers."""
    specs, ends, groups = structure.network.specs, set[int](), set[int]()
    stack = [reader.target.parents[k].index for k in reader.slots]
    while stack:
        index = stack.pop()
        parents = {specs[index].parents[k].index for k in structure.get_linear_positions(specs[index])}
        if index in structure.writer_index or len(parents) != 1:
            ends.add(index)
        elif index not in groups:
            groups.add(index)
            stack += parents
    return ReaderPath(tuple(sorted(ends)), tuple(sorted(groups)))


def estimate_edges(
    run: PatchedRun,
    differences: Mapping[int, Tensor],
    edges: EdgeCells,
    gradients: Mapping[int, Tensor],
    *,
    by_word: bool,
) -> Iterator[tuple[int, list[int], Tensor]]:
    """Estimate the effects of edges from the gradients at the targets of readers.

    Args:
        run: The run at which the net is linearised.
        differences: What each group of writers writes in the other run minus the base run, by its number.
        edges: The edges.
        gradients: The gradient of the metric at each target, `[example, *plates, word, *shape]`.
        by_word: Whether to return the effect of each word of the reader.

    Yields:
        The number of a group of readers, the numbers of writers among those of the edges, and the effects,
        `[example, reader unit, writer]`; with `by_word` followed by a dim for the word of the reader.
    """
    structure = edges.structure
    readers = [r for r in edges.reader_groups if structure.reader_groups[r].target.group.index in gradients]
    paths = {r: find_reader_path(structure, structure.reader_groups[r]) for r in readers}
    tangents = TangentPass(run, differences, structure, readers, edges.writer_units)
    tangents.compute({index for path in paths.values() for index in path.ends})
    dense: dict[int, tuple[list[int], Tensor]] = {}
    for r in readers:
        reader = structure.reader_groups[r]
        gradient = gradients[reader.target.group.index]
        words = _split_words(run, reader, paths[r], by_word=by_word)
        writers, columns = list[int](), list[Tensor]()
        for word in words:
            adjoints = _differentiate_run(run, structure, reader, paths[r], gradient) if word is None else None
            adjoints = adjoints or _pull_back(run, structure, reader, paths[r], gradient, word)
            dense = {end: dense[end] if end in dense else tangents.join(end) for end in adjoints}
            parts = [
                (cells, _join(adjoint, tangent, run, end, tangents.words[end], keep_words=by_word and word is None))
                for end, adjoint in adjoints.items()
                for cells, tangent in [dense[end]]
                if cells
            ]
            if parts:  # the writers are the same for each word
                writers, effects = _add_writers(parts)
                columns.append(effects)
        if columns:
            has_words = words == [None]
            yield r, writers, columns[0] if has_words else torch.stack(columns, -1)


def _add_writers(parts: Sequence[tuple[list[int], Tensor]]) -> tuple[list[int], Tensor]:
    """The sum of effects `[example, reader, writer, ...]` of several lists of writers."""
    if len(parts) == 1:
        return parts[0]
    writers = sorted({writer for numbers, _ in parts for writer in numbers})
    column = {writer: k for k, writer in enumerate(writers)}
    shape = list(parts[0][1].shape)
    shape[2] = len(writers)
    total = parts[0][1].new_zeros(shape)
    for numbers, effects in parts:
        total.index_add_(2, torch.tensor([column[k] for k in numbers], device=total.device), effects)
    return writers, total


def _split_words(run: PatchedRun, reader: ReaderGroup, path: ReaderPath, *, by_word: bool) -> list[int | None]:
    """The words of a reader that need a backward pass each; None for all words at once."""
    stacks = {run.specs[index].group.word_stack for index in (*path.ends, *path.groups)}
    if not by_word or (stacks == {reader.target.group.word_stack} and is_wordwise_path(run.base.network, reader)):
        return [None]
    return list(range(count_words(run.examples.model, reader.target.group.index)))


def _differentiate_run(
    run: PatchedRun, structure: EdgeStructure, reader: ReaderGroup, path: ReaderPath, gradient: Tensor
) -> dict[int, Tensor] | None:
    """The gradient at the end of a path by the graph of the run itself, which saves a second evaluation of the target.

    None if the graph has no such path or also others, or if several units need separate gradients.
    """
    values, target = run.base.values, reader.target.group.index
    has_one_path = len(path.ends) == 1 and not _has_other_slots(structure, reader)
    if not has_one_path or structure.count_units(reader.target) != 1:
        return None
    end = path.ends[0]
    if any(i in run.compact_index or i not in values or not values[i].requires_grad for i in (end, target)):
        return None
    if not len(values[end]) == len(values[target]) == len(gradient):  # a value that all examples share
        return None
    (result,) = torch.autograd.grad(
        values[target], values[end], gradient.expand_as(values[target]), retain_graph=True, allow_unused=True
    )
    words = torch.from_numpy(np.flatnonzero(run.needed.ancestor_words[end])).to(gradient.device)
    return None if result is None else {end: result.index_select(run.base.layout.word_dim, words)[None]}


def _pull_back(
    run: PatchedRun, structure: EdgeStructure, reader: ReaderGroup, path: ReaderPath, gradient: Tensor, word: int | None
) -> dict[int, Tensor]:
    """The gradient at the ends of a path for each unit of a reader, `[unit, example, *plates, word, *shape]` each."""
    needed, layout = run.needed.ancestor_words, run.base.layout
    group_rows = {index: RowIndex.from_mask(needed[index][None]) for index in (*path.ends, *path.groups)}
    leaves, updates = {}, dict[int, GroupUpdate]()
    update = SparseUpdate(run.base, updates, run.compact_index)
    target, axis = reader.target, layout.word_dim
    sizes = run.base.network.graph.plate_sizes
    is_expanded = _can_expand_units(run, reader, path)
    unit_axes = [layout.axis(plate) for plate in target.group.plates]
    with torch.enable_grad():
        for index in path.ends:
            spec, rows = run.specs[index], group_rows[index]
            shape = [len(run.examples), *get_layout_shape(run.base, spec)[:-1], len(rows), *spec.shape]
            if is_expanded:  # each unit reads a separate copy, so that one backward pass has the gradient of each
                for plate in target.group.plates:
                    shape[layout.axis(plate)] = sizes[plate]
            leaves[index] = update.gather(index, rows).detach().expand(shape).clone().requires_grad_()
            updates[index] = GroupUpdate(rows, leaves[index])
        for index in path.groups:
            updates[index] = GroupUpdate(group_rows[index], update.compute(run.specs[index], group_rows[index]))
        rows = RowIndex.from_mask(needed[target.group.index][None])
        is_open = target.tpm.is_random and target.group.index not in run.base.known
        slots = reader.slots if _has_other_slots(structure, reader) else None
        value = update.compute(target, rows, as_distribution=is_open, slots=slots)
        value = value.expand(len(run.examples), *get_layout_shape(run.base, target)[:-1], *value.shape[axis:])
    seed = gradient.index_select(axis, rows.words.to(gradient.device))
    if word is not None:
        mask = (rows.words == word).to(seed)
        seed = seed * mask.reshape(-1, *[1] * (seed.dim() - axis - 1))
    if target.group.index in run.base.patched:  # a set node passes no gradient
        is_set = run.base.patched[target.group.index][1]
        is_set = is_set.expand(*is_set.shape[:axis], count_words(run.examples.model, target.group.index))
        is_set = is_set.index_select(axis, rows.words)
        seed = seed * ~is_set.reshape(*is_set.shape, *[1] * (seed.dim() - is_set.dim()))
    ends = list(leaves.values())
    gradients: list[Tensor] = []
    if is_expanded:
        for part in torch.autograd.grad(value, ends, seed, materialize_grads=True):
            units = part.movedim(unit_axes, list(range(len(unit_axes))))  # [*plates, example, *ones, row, *shape]
            units = units.flatten(0, len(unit_axes) - 1) if unit_axes else units[None]
            for plate_axis in sorted(unit_axes):
                units = units.unsqueeze(1 + plate_axis)
            gradients.append(units)
    else:
        seeds = _split_units(run, target, seed)
        gradients += torch.autograd.grad(value, ends, seeds, is_grads_batched=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _can_expand_units(run: PatchedRun, reader: ReaderGroup, path: ReaderPath) -> bool:
    """Whether the units of a reader can be copies along its plates: no group on its path has or joins them."""
    plates, specs = {*reader.target.group.plates}, run.specs
    groups = [specs[index] for index in (*path.ends, *path.groups)]
    slots = [reader.target.parents[k] for k in reader.slots]
    slots += [parent for index in path.groups for parent in specs[index].parents]
    crossed = [{*spec.group.plates} for spec in groups] + [{*parent.over, *dict(parent.pick)} for parent in slots]
    return not any(plates & axes for axes in crossed)


def _has_other_slots(structure: EdgeStructure, reader: ReaderGroup) -> bool:
    """Whether a target has slots with writers through which the reader does not read."""
    linear, reading = structure.get_linear_positions(reader.target), structure.get_reading_positions(reader.target)
    return len(linear) + len(reading) > len(reader.slots)


def _split_units(run: PatchedRun, spec: object, seed: Tensor) -> Tensor:
    """A gradient, `[example, *plates, row, *shape]`, for one unit of a group at a time: `[unit, ...]`."""
    layout, sizes = run.base.layout, run.base.network.graph.plate_sizes
    plates = spec.group.plates  # type: ignore[attr-defined]
    count = math.prod(sizes[plate] for plate in plates)
    units = torch.eye(count, dtype=seed.dtype, device=seed.device)
    shape = [count] + [1] * seed.dim()
    for plate in plates:
        shape[1 + layout.axis(plate)] = sizes[plate]
    order = sorted(range(len(plates)), key=lambda k: layout.axis(plates[k]))
    units = units.reshape(count, *(sizes[plate] for plate in plates)).permute(0, *(1 + k for k in order))
    return seed[None] * units.reshape(shape)


def _join(adjoint: Tensor, tangent: Tensor, run: PatchedRun, end: int, words: BoolArray, *, keep_words: bool) -> Tensor:
    """The products of gradients of readers and tangents of writers: `[example, reader, writer]`, or also `[..., word]`.

    Args:
        adjoint: The gradients at the needed words, `[reader, example, *plates, word, *shape]`.
        tangent: The tangents, `[example, *plates, writer, word, *shape]`.
        run: The run.
        end: The group.
        words: The mask of the words of the group that have a tangent.
        keep_words: Whether to return the product of each word.
    """
    axis = run.base.layout.word_dim
    needed = run.needed.ancestor_words[end]
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
