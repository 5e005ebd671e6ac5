"""First-order estimates of edges: the gradient at the reader, the derivative on the way, the difference of the writer.

For a net with pre-norm this is edge attribution patching (Syed, Rager and Conmy 2023). The gradient at every reader
comes from one backward pass; the readers are pulled back, and the writers pushed forward, to the sums between them,
where one product joins all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from bnet_transformer.interventions.edges.structure import EdgeCells, EdgeStructure, ReaderGroup, is_wordwise_path
from bnet_transformer.interventions.sweeps.edge_patches import WriterPass
from bnet_transformer.interventions.sweeps.gradients import GradientRun
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun
from bnet_transformer.interventions.sweeps.sparse_update import (
    GroupUpdate,
    RowIndex,
    SparseUpdate,
    count_words,
    get_layout_index,
    get_layout_shape,
)


def add_edge_effects(effects: Tensor, item: GradientRun, edges: EdgeCells) -> None:
    """Add the effects of edges to `effects[cell, example]`."""
    gradients = _find_target_gradients(item)
    table, by_word = edges.structure.edges, edges.words is not None
    keys = np.stack([table.readers[edges.edges], table.writers[edges.edges]])
    differences = item.base_run.differences
    for r, w, units, estimates in estimate_edges(item.run, differences, edges, gradients, by_word=by_word):
        inside = np.flatnonzero((keys[0] == r) & (keys[1] == w))
        reader_units = torch.from_numpy(table.reader_units[edges.edges[inside]])
        column = np.searchsorted(np.array(units), table.writer_units[edges.edges[inside]])
        index: tuple[Tensor, ...] = (reader_units, torch.from_numpy(column))
        if edges.words is not None:
            index = (*index, torch.from_numpy(edges.words[inside]))
        values = estimates[(slice(None), *index)].double().cpu()  # [example, edge]
        effects.index_add_(0, torch.from_numpy(edges.cells[inside]), values.T)


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
) -> Iterator[tuple[int, int, list[int], Tensor]]:
    """Estimate the effects of edges from the gradients at the targets of readers.

    Args:
        run: The run at which the net is linearised.
        differences: What each group of writers writes in the other run minus the base run, by its number.
        edges: The edges.
        gradients: The gradient of the metric at each target, `[example, *plates, word, *shape]`.
        by_word: Whether to return the effect of each word of the reader.

    Yields:
        The number of a group of readers, of a group of writers, the units of writers, and the effects,
        `[example, reader unit, writer unit]`; with `by_word` followed by a dim for the word of the reader.
    """
    structure = edges.structure
    readers = [r for r in edges.reader_groups if structure.reader_groups[r].target.group.index in gradients]
    paths = {r: find_reader_path(structure, structure.reader_groups[r]) for r in readers}
    ends = {index for path in paths.values() for index in path.ends}
    with forward_ad.dual_level(), torch.no_grad():
        units = edges.writer_units
        linear = WriterPass(run, differences, structure, readers, units, as_tangent=True)
        linear.compute_groups(ends)
        tangents = {
            index: (update.rows, tangent)
            for index, update in linear.update.by_group.items()
            if index in ends and (tangent := forward_ad.unpack_dual(update.values).tangent) is not None
        }
    dense = {index: _spread_rows(run, index, rows, value) for index, (rows, value) in tangents.items()}
    for r in readers:
        reader = structure.reader_groups[r]
        gradient = gradients[reader.target.group.index]
        totals: dict[int, list[Tensor]] = {}
        words = _split_words(run, reader, paths[r], by_word=by_word)
        for word in words:
            adjoints = _pull_back(run, structure, reader, paths[r], gradient, word)
            sums: dict[int, Tensor] = {}
            for end in [end for end in adjoints if end in dense]:
                cells, tangent = dense[end]
                effects = _join(adjoints[end], tangent, run, keep_words=by_word and word is None)
                for column, cell in enumerate(cells.tolist()):
                    sums[cell] = sums.get(cell, 0.0) + effects[:, :, column]
            for cell, effects in sums.items():
                totals.setdefault(cell, []).append(effects)
        for w in reader.sources:
            cells_of = [cell for cell in sorted(totals) if units[cell][0] == w]
            if cells_of:
                by_cell = [totals[c][0] if len(words) == 1 else torch.stack(totals[c], -1) for c in cells_of]
                if by_word and words == [None] and by_cell[0].dim() == 2:
                    by_cell = [value[..., None] for value in by_cell]
                yield r, w, [units[cell][1] for cell in cells_of], torch.stack(by_cell, 2)


def _split_words(run: PatchedRun, reader: ReaderGroup, path: ReaderPath, *, by_word: bool) -> list[int | None]:
    """The words of a reader that need a backward pass each; None for all words at once."""
    stacks = {run.specs[index].group.word_stack for index in (*path.ends, *path.groups)}
    if not by_word or (stacks == {reader.target.group.word_stack} and is_wordwise_path(run.base.network, reader)):
        return [None]
    return list(range(count_words(run.examples.model, reader.target.group.index)))


def _spread_rows(run: PatchedRun, index: int, rows: RowIndex, value: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as `[cell, example, *plates, word, *shape]`, zero at words without a row; also the cells, `[cell]`."""
    axis, spec = run.base.layout.word_dim, run.specs[index]
    cells = torch.unique_consecutive(rows.cells)
    words = count_words(run.examples.model, index)
    shape = (len(run.examples), *get_layout_shape(run.base, spec)[:-1], len(rows), *spec.shape)
    result = value.new_zeros(len(cells), words, *shape[:axis], *shape[axis + 1 :])
    result[torch.searchsorted(cells, rows.cells), rows.words] = value.expand(shape).movedim(axis, 0)
    return cells, result.movedim(1, axis + 1)


def _pull_back(
    run: PatchedRun,
    structure: EdgeStructure,
    reader: ReaderGroup,
    path: ReaderPath,
    gradient: Tensor,
    word: int | None,
) -> dict[int, Tensor]:
    """The gradient at the ends of a path for each unit of a reader, `[unit, example, *plates, word, *shape]` each."""
    needed = run.needed.ancestor_words
    group_rows = {index: RowIndex.from_mask(needed[index][None]) for index in (*path.ends, *path.groups)}
    leaves, updates = {}, dict[int, GroupUpdate]()
    update = SparseUpdate(run.base, updates, run.compact_index)
    target, axis = reader.target, run.base.layout.word_dim
    with torch.enable_grad():
        for index in path.ends:
            spec, rows = run.specs[index], group_rows[index]
            shape = (len(run.examples), *get_layout_shape(run.base, spec)[:-1], len(rows), *spec.shape)
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
    seeds = _split_units(run, target, seed)
    gradients = torch.autograd.grad(
        value, list(leaves.values()), seeds, is_grads_batched=True, materialize_grads=True
    )
    adjoints = {}
    for index, part in zip(leaves, gradients, strict=True):  # zero at words that lead to no outcome
        count = count_words(run.examples.model, index)
        full = part.new_zeros(*part.shape[: axis + 1], count, *part.shape[axis + 2 :])
        adjoints[index] = full.index_copy_(axis + 1, group_rows[index].words.to(part.device), part)
    return adjoints


def _has_other_slots(structure: EdgeStructure, reader: ReaderGroup) -> bool:
    """Whether a target has slots with writers through which the reader does not read."""
    linear, reading = structure.get_linear_positions(reader.target), structure.get_reading_positions(reader.target)
    return len(linear) + len(reading) > len(reader.slots)


def _split_units(run: PatchedRun, spec: object, seed: Tensor) -> Tensor:
    """A gradient, `[example, *plates, row, *shape]`, for each unit of a group alone: `[unit, ...]`."""
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


def _join(adjoint: Tensor, tangent: Tensor, run: PatchedRun, *, keep_words: bool) -> Tensor:
    """The products of gradients of readers and tangents of writers: `[example, reader, writer]`, or also `[..., word]`."""
    axis = 1 + run.base.layout.word_dim
    a, t = adjoint.movedim((1, axis), (0, 1)), tangent.movedim((1, axis), (0, 1))  # [example, word, unit, ...]
    a, t = a.flatten(3), t.flatten(3)
    if keep_words:
        return torch.einsum("nwuk,nwck->nucw", a, t)
    return torch.einsum("nwuk,nwck->nuc", a, t)
