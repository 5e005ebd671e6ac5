"""First-order effects of cells and edges (edge attribution patching: EAP, EAP-IG), and edges without effect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.tensors import BoolArray, enable_gradients
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.compiler.linear import is_norm
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.cells import EdgeCells, PatchCells, PatchSites, PathsToEnd, group_paths
from bnet_transformer.interventions.edges import EdgeStructure, ReaderGroup, WriterUnit, is_wordwise_path
from bnet_transformer.interventions.engine import CellOutcomes, Experiment, get_relative_change
from bnet_transformer.interventions.gradients import GradientRun, iter_gradient_runs, list_points
from bnet_transformer.interventions.linear_pass import (
    Block,
    LinearPass,
    Norms,
    build_linear_pass,
    has_other_slots,
    multiply_parts,
)
from bnet_transformer.interventions.methods import EXACT_HINT
from bnet_transformer.interventions.patched_run import (
    GroupPatch,
    GroupUpdate,
    PatchedRun,
    RowIndex,
    SparseUpdate,
    gather_nodes,
    get_layout_index,
    get_layout_shape,
    get_parent_groups,
)

# --------------------------------------------------------------------------------------------------------------------
# First-order estimates of edges: the gradient at the reader, the derivative on the way, the difference of the writer.
#
# For a net with pre-norm this is edge attribution patching (Syed, Rager and Conmy 2023). The gradient at every reader
# comes from one backward pass; the readers are pulled back, and the writers pushed forward, to the sums between them,
# where one product joins all pairs.


def add_edge_effects(effects: Tensor, item: GradientRun, edges: EdgeCells) -> None:
    """Add the effects of edges to `effects[cell, example]`."""
    gradients = _find_target_gradients(item)
    table, by_word = edges.structure.edges, edges.words is not None
    order = np.argsort(table.readers[edges.edges], kind="stable")
    readers = table.readers[edges.edges[order]]
    number_of = {writer: k for k, writer in enumerate(edges.writer_units)}
    numbers = np.array([number_of[table.get_writer(edge)] for edge in edges.edges])
    for r, estimates in estimate_edges(item.run, item.base_run.writer_differences, edges, gradients, by_word=by_word):
        inside = order[slice(*np.searchsorted(readers, [r, r + 1]))]
        index = [torch.from_numpy(table.reader_units[edges.edges[inside]]), torch.from_numpy(numbers[inside])]
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


Path = tuple[list[int], list[int]]  # the sums and writers at which the path of a reader stops; the groups after them


def estimate_edges(
    run: PatchedRun,
    differences: Mapping[int, Tensor],
    edges: EdgeCells,
    gradients: Mapping[int, Tensor],
    *,
    by_word: bool,
) -> Iterator[tuple[int, Tensor]]:
    """Estimate the effects of edges from the gradients at the targets of readers.

    Args:
        run: The run at which the net is linearised.
        differences: What each group of writers writes in the other run minus the base run, by its number.
        edges: The edges.
        gradients: The gradient of the metric at each target, `[example, *plates, word, *shape]`.
        by_word: Whether to return the effect of each word of the reader.

    Yields:
        The number of a group of readers, and the effects, `[example, reader unit, writer]`, with all writers of the
        edges; with `by_word` followed by a dim for the word of the reader.
    """
    structure = edges.structure
    readers = [r for r in edges.reader_groups if structure.reader_groups[r].target.group.index in gradients]
    paths = {}
    for r in readers:  # back to the nearest sums and writers
        reader = structure.reader_groups[r]
        paths[r] = structure.find_sums([reader.target.parents[k].index for k in reader.slots], structure.writer_index)
    tangents = build_linear_pass(run, differences, structure, readers, edges.writer_units, Norms.DERIVATIVE)
    tangents.compute({index for ends, _ in paths.values() for index in ends})
    dense: dict[int, Block] = {}
    axis, needed = run.base.layout.word_dim, run.needed.ancestor_words
    for r in readers:
        reader = structure.reader_groups[r]
        gradient = gradients[reader.target.group.index]
        words = _split_words(run, reader, paths[r], by_word=by_word)
        shape = [len(run.examples), structure.count_units(reader.target), len(edges.writer_units)]
        num_words = [run.examples.model.ground.count_words(reader.target.group.index)] if by_word else []
        effects = gradient.new_zeros(shape + num_words)
        for word in words:
            adjoints = _differentiate_run(run, structure, reader, paths[r], gradient) if word is None else None
            adjoints = adjoints or _pull_back(run, structure, reader, paths[r], gradient, word)
            dense = {end: dense[end] if end in dense else tangents.join(end) for end in adjoints}
            total = effects if word is None else effects[..., word]
            for end, adjoint in adjoints.items():
                cells, tangent = dense[end]
                if cells:
                    masks, keep_words = (needed[end], tangents.words[end]), by_word and word is None
                    products = multiply_parts(adjoint, tangent, axis, *masks, keep_words=keep_words)
                    total.index_add_(2, torch.tensor(cells, device=total.device), products.to(total))
        yield r, effects


def _split_words(run: PatchedRun, reader: ReaderGroup, path: Path, *, by_word: bool) -> list[int | None]:
    """The words of a reader that need a backward pass each; None for all words at once."""
    ends, groups = path
    stacks = {run.specs[index].group.word_stack for index in (*ends, *groups)}
    if not by_word or (stacks == {reader.target.group.word_stack} and is_wordwise_path(run.base.network, reader)):
        return [None]
    return list(range(run.examples.model.ground.count_words(reader.target.group.index)))


def _differentiate_run(
    run: PatchedRun, structure: EdgeStructure, reader: ReaderGroup, path: Path, gradient: Tensor
) -> dict[int, Tensor] | None:
    """The gradient at the end of a path by the graph of the run itself, which saves a second evaluation of the target.

    None if the graph has no such path or also others, or if several units need separate gradients.
    """
    values, target, (ends, _) = run.base.values, reader.target.group.index, path
    has_one_path = len(ends) == 1 and not has_other_slots(structure, reader)
    if not has_one_path or structure.count_units(reader.target) != 1:
        return None
    (end,) = ends
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
    run: PatchedRun, structure: EdgeStructure, reader: ReaderGroup, path: Path, gradient: Tensor, word: int | None
) -> dict[int, Tensor]:
    """The gradient at the ends of a path for each unit of a reader, `[unit, example, *plates, word, *shape]` each."""
    needed, layout, (path_ends, path_groups) = run.needed.ancestor_words, run.base.layout, path
    group_rows = {index: RowIndex.from_mask(needed[index][None]) for index in (*path_ends, *path_groups)}
    leaves, updates = {}, dict[int, GroupUpdate]()
    update = SparseUpdate(run.base, updates, run.compact_index)
    target, axis = reader.target, layout.word_dim
    sizes = run.base.network.graph.plate_sizes
    is_expanded = _can_expand_units(run, reader, path)
    unit_axes = [layout.axis(plate) for plate in target.group.plates]
    with torch.enable_grad():
        for index in path_ends:
            spec, rows = run.specs[index], group_rows[index]
            shape = [len(run.examples), *get_layout_shape(run.base, spec)[:-1], len(rows), *spec.shape]
            if is_expanded:  # each unit reads a separate copy, so that one backward pass has the gradient of each
                for plate in target.group.plates:
                    shape[layout.axis(plate)] = sizes[plate]
            leaves[index] = update.gather(index, rows).detach().expand(shape).clone().requires_grad_()
            updates[index] = GroupUpdate(rows, leaves[index])
        for index in path_groups:
            updates[index] = GroupUpdate(group_rows[index], update.compute(run.specs[index], group_rows[index]))
        rows = RowIndex.from_mask(needed[target.group.index][None])
        is_open = target.tpm.is_random and target.group.index not in run.base.known
        slots = reader.slots if has_other_slots(structure, reader) else None
        value = update.compute(target, rows, as_distribution=is_open, slots=slots)
        value = value.expand(len(run.examples), *get_layout_shape(run.base, target)[:-1], *value.shape[axis:])
    seed = gradient.index_select(axis, rows.words.to(gradient.device))
    if word is not None:
        mask = (rows.words == word).to(seed)
        seed = seed * mask.reshape(-1, *[1] * (seed.dim() - axis - 1))
    if target.group.index in run.base.patched:  # a set node passes no gradient
        is_set = run.base.patched[target.group.index][1]
        is_set = is_set.expand(*is_set.shape[:axis], run.examples.model.ground.count_words(target.group.index))
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
        seeds = structure.split_units(seed, target, layout)
        gradients += torch.autograd.grad(value, ends, seeds, is_grads_batched=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _can_expand_units(run: PatchedRun, reader: ReaderGroup, path: Path) -> bool:
    """Whether the units of a reader can be copies along its plates: no group on its path has or joins them."""
    plates, specs = {*reader.target.group.plates}, run.specs
    groups = [specs[index] for part in path for index in part]
    slots = [reader.target.parents[k] for k in reader.slots]
    slots += [parent for index in path[1] for parent in specs[index].parents]
    crossed = [{*spec.group.plates} for spec in groups] + [{*parent.over, *dict(parent.pick)} for parent in slots]
    return not any(plates & axes for axes in crossed)


# --------------------------------------------------------------------------------------------------------------------
# First-order estimates of the effects of cells, without running a cell.
#
# An intervention that sets the value v to t has a strength s: it sets v + s (t - v). Exact effects are those of s = 1.
# The estimate is the derivative of the metric m with respect to s at s = 0, in the run that is patched:
#
#     a node, a row of attention:   <dm/dv, t - v>
#     a path v -> ... -> z:         <dm/dz, dz/d... ... d.../dv (t - v)>
#     an edge:                      the same along all chains of sums, linear maps and norms to the reader
#
# where the derivatives along a path are those of its arrows only: all other parents have their values of the run. A
# node is the path of one node. This is attribution patching (Nanda 2023): at the clean run with `direction="noise"`, as
# EAP defines it (Syed, Rager and Conmy 2023), else at the corrupt run. With `steps`, the derivatives are averaged over
# runs between both (integrated gradients); the differences t - v remain those of the base and the source run.


PATH_COPIES = 8  # the copies of the values of the parents of a path that its derivative requires


@enable_gradients()
def estimate_cells(experiment: Experiment, progress: bool | None) -> CellOutcomes:
    """Estimate the result of `run_cells` to first order, without running a cell."""
    cells, base_rows = experiment.cells, experiment.base_rows
    for obstacle in filter(None, (experiment.shared_obstacle, *experiment.obstacles.values())):
        raise BNetError(f"method: cells cannot share a run, because {obstacle}", hint=f"{EXACT_HINT}, which runs each")
    get_runs = experiment.prepare_runs()
    source, base, changes = experiment.evaluate_base(get_runs())
    effects = torch.zeros(math.prod(cells.shape), len(base_rows), dtype=torch.float64)
    is_stationary = torch.ones(len(base), dtype=torch.bool)
    hide = None if progress is None else not progress
    points = list_points(experiment)
    runs = iter_gradient_runs(experiment, get_runs, points)
    for item in tqdm(runs, total=len(experiment.batches) * len(points), disable=hide, unit="part", leave=False):
        part = effects[:, item.base_run.rows]
        is_stationary &= item.is_stationary
        _add_site_effects(part, item)
        _add_path_effects(part, item, cells)
        np.maximum(changes, item.base_run.changes, out=changes)
        if cells.edges is not None:
            add_edge_effects(part, item, cells.edges)
    effects = effects.unflatten(1, (-1, len(base))).sum(1) / len(points)  # over the joint states of choices
    cell_ids = torch.from_numpy(cells.cell_ids)
    if not bool(effects[cell_ids].isfinite().all()):
        expected = f"a metric with a finite gradient at the {experiment.side_names[1]} run, for method=bt.Gradient()"
        raise BNetError("metric", expected=expected, actual="NaN or infinity", hint=EXACT_HINT)
    values = torch.full_like(effects, torch.nan)
    values[cell_ids] = base + effects[cell_ids]
    return CellOutcomes(values.reshape(*cells.shape, -1), source, base, is_stationary, changes)


def _add_site_effects(effects: Tensor, item: GradientRun) -> None:
    """Add the effects of nodes and of rows of attention to `effects[cell, example]`."""
    for group, gradient in item.gradients.items():
        for patch in item.base_run.patches.get(group, ()):
            slope = _differentiate_mix(item.run, group, gradient, patch) if patch.is_attention else gradient
            delta = item.base_run.patched.get_difference(group, patch)
            slopes = item.run.gather(group, slope.to(delta.device), patch)
            effects.index_add_(0, patch.cells, (slopes * delta).flatten(2).sum(-1).double().cpu())


def _differentiate_mix(run: PatchedRun, group: int, gradient: Tensor, patch: GroupPatch) -> Tensor:
    """The gradient with respect to `P(j | i)` or scores, `[example, *plates, word, word read]`, from that of the mix.

    The mix is linear in `P(j | i)`, so that the derivative does not depend on it.
    """
    state, spec = run.base, run.specs[group]
    _, parents = gather_parents(state, spec)
    shape = (len(gradient), *get_layout_shape(state, spec), patch.source.shape[-1])
    leaf = run.get_attention(group, is_score=True).expand(shape) if patch.is_score else patch.source.new_zeros(shape)
    leaf = leaf.clone().requires_grad_()
    weights = leaf.softmax(-1) if patch.is_score else leaf
    mix = spec.tpm.mix(weights, *(parent.detach() for parent in parents))  # type: ignore[attr-defined]
    (slope,) = torch.autograd.grad((state.layout.pad_dims(mix, 1) * gradient.to(mix.device)).sum(), leaf)
    return slope


def _add_path_effects(effects: Tensor, item: GradientRun, cells: PatchCells) -> None:
    """Add the effects of arrows and paths to `effects[cell, example]`, in chunks of paths that fit in memory."""
    group_of = item.run.examples.model.ground.group_of
    ends = [end for end in group_paths(cells.paths) if group_of(end.paths[0][-1]).index in item.gradients]
    if not ends:
        return
    network, values = item.run.examples.model.network, item.run.base.values
    groups = {group_of(node).index for end in ends for node in end.paths[0][1:]}
    parents = [get_parent_groups(network, network.specs[group]) for group in groups]
    largest = max(sum(values[index].numel() for index in indices if index in values) for indices in parents)
    size = max(1, item.base_run.experiment.memory // (PATH_COPIES * network.dtype.itemsize * max(1, largest)))
    for start in range(0, len(ends), size):
        _add_path_slopes(effects, item, ends[start : start + size])


def _add_path_slopes(effects: Tensor, item: GradientRun, ends: Sequence[PathsToEnd]) -> None:
    """Add the effects of some paths, from one evaluation of their steps and its gradient."""
    # The first node of each path has the value v + s (t - v), and the steps of the path are computed from it. The
    # derivative of the last node with respect to s, at s = 0, is the product of the derivatives along the arrows of the
    # path. All paths have separate s, so one backward pass computes the derivative of each.
    run, base_run, leaves = item.run, item.base_run, list[tuple[Tensor, Tensor]]()
    cells = torch.tensor([end.cell for end in ends])

    def build_first(sites: PatchSites) -> GroupPatch:
        patch = base_run.build_patch(sites)
        values = base_run.patched.get_base_values(sites.group, patch).detach()
        delta = base_run.patched.get_difference(sites.group, patch)
        np.maximum.at(base_run.changes, cells[patch.cells].numpy(), get_relative_change(values, delta))
        strength = delta.new_zeros(len(delta), len(run.examples), *[1] * (delta.dim() - 2), requires_grad=True)
        leaves.append((cells[patch.cells], strength))
        moved = run.get_base_values(sites.group, patch).detach() + strength * delta
        return GroupPatch(patch.cells, patch.nodes, moved.transpose(0, 1), is_per_node=True)

    total = torch.zeros((), dtype=run.examples.model.network.dtype, device=run.examples.model.network.device)
    for group, patches in run.patch_paths(ends, build_first, item.base_run.experiment.memory).items():
        for patch in patches:
            values = run.get_patch_values(group, patch)
            slopes = gather_nodes(run.base, run.specs[group], item.gradients[group].to(values.device), patch.nodes)
            total = total + (slopes * values).sum()
    if not total.requires_grad:
        return
    gradients = torch.autograd.grad(total, [strength for _, strength in leaves], materialize_grads=True)
    for (ids, _), gradient in zip(leaves, gradients, strict=True):
        effects.index_add_(0, ids, gradient.flatten(1).double().cpu())


# --------------------------------------------------------------------------------------------------------------------
# Edges that cannot transmit anything, by proof: the map from the writer to the reader is exactly zero.
#
# Where no norm lies between a writer and a reader, the map is linear and does not depend on the words: the product of
# the matrices on the way. It is computed for one random vector of each writer, whose image under another map is zero
# with probability 0. Exact zeros are structural: the writer writes to entries of the state that the reader does not
# read. Spans with only zero in common do not suffice, as their product is zero only up to rounding. Through a norm
# every entry of a state depends on all others, so that nothing is proven.


def find_blocked_edges(run: PatchedRun, structure: EdgeStructure) -> BoolArray:
    """The edges whose map is exactly zero, `[edge]`.

    Args:
        run: A run of a sentence, which has the values of all groups of writers.
        structure: The edges.

    Returns:
        The mask; false wherever nothing is proven.
    """
    table, generator = structure.edges, torch.Generator().manual_seed(0)
    blocked, differences = _find_linear_edges(structure), dict[int, Tensor]()
    for w in np.unique(table.writers[blocked]).tolist():
        spec = structure.writer_groups[w].spec
        vector = 1 + torch.rand(spec.shape, generator=generator, dtype=torch.float64)
        shape = len(run.examples), *get_layout_shape(run.base, spec), *spec.shape
        differences[w] = vector.to(run.base.device, run.base.dtype).expand(shape)
    writers = [(w, v) for w in differences for v in range(structure.count_units(structure.writer_groups[w].spec))]
    readers = np.unique(table.readers[blocked]).tolist()
    tangents = build_linear_pass(run, differences, structure, readers, writers, Norms.DERIVATIVE)
    groups = [structure.reader_groups[r] for r in readers]
    tangents.compute({reader.target.parents[k].index for reader in groups for k in reader.slots})
    for r, reader in zip(readers, groups, strict=True):
        transmits = _find_transmitting(run, tangents, writers, reader)
        for k in np.flatnonzero((table.readers == r) & blocked).tolist():
            if (writer := table.get_writer(k)) in transmits:
                blocked[k] = not transmits[writer][table.reader_units[k]]
    return blocked


def _find_linear_edges(structure: EdgeStructure) -> BoolArray:
    """The edges without a norm between the writer and the reader, `[edge]`."""
    specs, count = structure.network.specs, len(structure.writer_groups)
    before, through = dict[int, BoolArray](), dict[int, BoolArray]()  # writers before a group, and those before a norm
    none: BoolArray = np.zeros(count, dtype=bool)
    for index in sorted({index for reader in structure.reader_groups for index in reader.chain}):
        parents = structure.list_linear_parents(index)
        before[index] = np.logical_or.reduce([none, *(before[p] for p in parents)])
        crossed = before if is_norm(specs[index]) else through
        through[index] = np.logical_or.reduce([none, *(crossed[p] for p in parents)])
        if (w := structure.writer_index.get(index)) is not None:
            before[index][w] = True
    norms = np.zeros((len(structure.reader_groups), count), dtype=bool)
    for r, reader in enumerate(structure.reader_groups):
        for index in (reader.target.parents[k].index for k in reader.slots):
            norms[r] |= is_norm(reader.target) | through[index]
    table = structure.edges
    linear: BoolArray = ~norms[table.readers, table.writers]
    return linear


def _find_transmitting(
    run: PatchedRun, tangents: LinearPass, writers: Sequence[WriterUnit], reader: ReaderGroup
) -> Mapping[WriterUnit, BoolArray]:
    """For each writer that is read, the units of a reader that see it, `[unit]`."""
    structure, layout = tangents.structure, run.base.layout
    spec, units = reader.target, len(structure.list_units(reader.target))
    parents = list(dict.fromkeys(spec.parents[k].index for k in reader.slots))
    is_map = set(reader.slots) <= set(structure.get_linear_positions(spec)) and not spec.tpm.is_random
    visible: dict[tuple[int, int], BoolArray] = {}
    if is_map and any(tangents.blocks.get(parent) for parent in parents):
        read = [parent for parent in parents if tangents.blocks.get(parent)]
        words = tangents.words.get(spec.group.index, run.needed.ancestor_words[spec.group.index])
        cells, block = tangents.map_group(spec, read, words)
        axes = [layout.axis(plate) for plate in spec.group.plates]
        by_cell = (block != 0).movedim([*axes, layout.word_dim], list(range(len(axes) + 1)))
        table = by_cell.flatten(len(axes) + 1).any(-1).reshape(units, len(cells)).cpu().numpy()
        return {writers[cell]: table[:, column] for column, cell in enumerate(cells)}
    for parent in parents:
        cells, block = tangents.join(parent)
        if cells:
            flags = (block != 0).movedim(layout.word_dim, 0).flatten(1).any(-1).tolist()
            for cell, flag in zip(cells, flags, strict=True):
                unit = writers[cell]
                visible[unit] = visible.get(unit, np.zeros(units, dtype=bool)) | flag
    return visible
