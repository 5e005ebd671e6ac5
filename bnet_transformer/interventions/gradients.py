"""Gradients of the metric at node groups, and the derivatives of linear groups along the differences of writers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.tensors import BoolArray
from bnet_transformer.compiler.fused import find_residuals
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.edge_patches import find_needed_words
from bnet_transformer.interventions.edges import EdgeStructure, WriterUnit, adds_units, list_linear_groups, map_units
from bnet_transformer.interventions.engine import BaseRun, Differences, ExampleBatch, Outcomes, interpolate
from bnet_transformer.interventions.examples import Metric
from bnet_transformer.interventions.methods import ACTIVATIONS, EXACT_HINT
from bnet_transformer.interventions.patched_run import (
    GroupUpdate,
    PatchedRun,
    RowIndex,
    SparseUpdate,
    count_words,
    gather_nodes,
    get_layout_index,
    get_layout_shape,
    is_wordwise,
)
from bnet_transformer.tpm import TPM

# --------------------------------------------------------------------------------------------------------------------
# Gradients of the metric at node groups, in the base run or in runs between the base and the source run.
#
# `iter_gradient_runs` is the common part of all first-order estimates: of nodes, of rows of attention, and of arrows
# and paths (`estimate_cells`), and of edges (`add_edge_effects`).


ROUNDING_STEPS = 32  # the rounding error of the sums of one node, in rounding steps
HALF_BITS = 16


@dataclass(frozen=True)
class GradientRun:
    """A run, and the gradient of the metric with respect to the values of its groups.

    Args:
        batch: The examples of the run.
        base_run: The base run of these examples, with the values of the source run, in the same state of the choices.
        run: The run at which the gradient is evaluated: the base run, or one between the base and the source run.
        gradients: For each group of `run.gradient_groups` that leads to the metric, the gradient with respect to its
            values, `[example, *plates, word, *shape]` in the layout of the run.
        outcome_gradients: The gradient with respect to each outcome, `[1, example, *shape]`, by node.
        is_stationary: Whether the gradient of the metric is zero up to rounding at this point, `[example]`.
    """

    batch: ExampleBatch
    base_run: BaseRun
    run: PatchedRun
    gradients: dict[int, Tensor]
    outcome_gradients: Outcomes
    is_stationary: Tensor


@dataclass(frozen=True)
class Point:
    """A run at which a gradient is evaluated.

    Args:
        fraction: The fraction of the way from the base run to the source run; None for the base run.
        writer: The number of the group of writers that is set there; None for the inputs.
    """

    fraction: float | None = None
    writer: int | None = None


def list_points(batch: ExampleBatch) -> list[Point]:
    """The points over which a gradient is averaged, by the rule of the method."""
    gradient, edges = batch.options.gradient, batch.cells.edges
    assert gradient is not None
    if not gradient.steps:
        return [Point()]
    fractions = [1 - f if batch.options.is_noise else f for f in gradient.list_fractions()]
    writers: Sequence[int | None] = [None]
    if gradient.rule == ACTIVATIONS:
        assert edges is not None
        writers = range(len(edges.structure.writer_groups))
    return [Point(fraction, writer) for writer in writers for fraction in fractions]


def iter_gradient_runs(
    batches: Sequence[ExampleBatch], metric: Metric, points: Sequence[Point] = (Point(),)
) -> Iterator[GradientRun]:
    """Iterate over runs with the gradients of the metric at their groups.

    Args:
        batches: The batches of a sweep by gradients; their cells determine the groups.
        metric: The metric.
        points: The runs at which the gradient is evaluated.

    Yields:
        A run for each point, batch and joint state of the latent choices. The mean over the points, summed over the
        states, is the gradient (averaged over the states) or the integrated gradient.

    Raises:
        BNetError: The metric has no gradient, or no input with real values differs between the runs.
    """
    is_interpolated = any(point.fraction is not None and point.writer is None for point in points)
    if is_interpolated and not any(run.input_differences for batch in batches for run in batch.iter_base_runs()):
        expected = "sentences that differ in an input, or a node below it, with real values, for steps="
        hint = "Use steps=0, which needs the gradient at one run only"
        raise BNetError(
            "clean, corrupt", expected=expected, actual="no such difference that leads to the metric", hint=hint
        )
    for point in points:
        cached = [list(_iter_runs(batch, point)) if batch.should_cache else None for batch in batches]
        runs = [part or _iter_runs(batch, point) for part, batch in zip(cached, batches, strict=True)]
        outcome_gradients, is_stationary = _compute_outcome_gradients(batches, runs, metric)
        stationary_parts = is_stationary.split([len(batch.base) for batch in batches])
        runs = [part or _iter_runs(batch, point) for part, batch in zip(cached, batches, strict=True)]
        for batch, batch_runs, by_state, part in zip(batches, runs, outcome_gradients, stationary_parts, strict=True):
            for (base_run, run), gradients in zip(batch_runs, by_state, strict=True):
                has_edges = batch.cells.edges is not None  # estimates of edges differentiate parts of the run again
                by_group = _backpropagate(run, gradients, retain_graph=has_edges)
                yield GradientRun(batch, base_run, run, by_group, gradients, part)


def _iter_runs(batch: ExampleBatch, point: Point) -> Iterator[tuple[BaseRun, PatchedRun]]:
    """Iterate over the base runs of a batch, each with the run at a point."""
    for base_run in batch.iter_base_runs():
        run, differences = base_run.run, base_run.input_differences
        if point.writer is not None:
            differences = _list_writer_differences(base_run, point.writer)
        if point.fraction is not None and differences:  # a writer without a difference has its value of the base run
            overrides = interpolate(run, differences, point.fraction)
            run = PatchedRun(
                run.examples, run.needed, run.source_groups, gradient_groups=run.gradient_groups, overrides=overrides
            )
        yield base_run, run


def _list_writer_differences(base_run: BaseRun, writer: int) -> Differences:
    """All nodes of a group of writers, with their values in the base run and the difference of the source run."""
    run, edges = base_run.run, base_run.edges
    assert edges is not None
    if writer not in base_run.differences:
        return {}
    group = edges.structure.writer_groups[writer].spec.group
    nodes = np.arange(len(run.examples.model.ground.select_nodes(group)))
    position = get_layout_index(run.base, run.specs[group.index], nodes)
    tables = run.base.values[group.index].detach(), base_run.differences[writer]
    base, difference = (gather_nodes(run.base, run.specs[group.index], table, position) for table in tables)
    return {group.index: (nodes, base, difference)}


def _compute_outcome_gradients(
    batches: Sequence[ExampleBatch], runs: Sequence[Iterable[tuple[BaseRun, PatchedRun]]], metric: Metric
) -> tuple[list[list[Outcomes]], Tensor]:
    """The gradient of the metric with respect to each outcome, by batch and by joint state of the choices.

    Also whether it is zero up to rounding, `[example]`.
    """
    leaves = [
        [
            {node: value.detach().requires_grad_() for node, value in run.compute_base_outcomes().items()}
            for _, run in batch_runs
        ]
        for batch_runs in runs
    ]
    averaged = [batch.marginalize(states) for batch, states in zip(batches, leaves, strict=True)]
    joined = {node: torch.cat([outcomes[node] for outcomes in averaged], 1) for node in metric.nodes}
    values = metric.evaluate_with_grad(joined)
    if not values.requires_grad:
        expected = "a metric with a gradient (torch operations on its nodes), for method=bt.Gradient()"
        raise BNetError("metric", expected=expected, actual="numbers without gradient", hint=EXACT_HINT)
    # The metric of an example depends on the outcomes of this example only, so the gradient of the sum contains the
    # gradient of every example.
    flat = [value for states in leaves for outcomes in states for value in outcomes.values()]
    slopes = torch.autograd.grad(values.sum(), [*joined.values()], materialize_grads=True, retain_graph=True)
    is_stationary = _find_stationary(batches[0], metric, joined, dict(zip(joined, slopes, strict=True)))
    gradients = iter(torch.autograd.grad(values.sum(), flat, materialize_grads=True))
    return [[{node: next(gradients) for node in outcomes} for outcomes in states] for states in leaves], is_stationary


def _find_stationary(batch: ExampleBatch, metric: Metric, outcomes: Outcomes, slopes: Outcomes) -> Tensor:
    """Whether the gradient of the metric is zero up to rounding, such as that of KL at its minimum: `[example]`.

    A slope is zero if it is not greater than what rounding of the outcomes makes of zero: its change if the outcomes
    change by the rounding error of the run, which grows with the number of node groups. For log probabilities y, with
    the slopes g, the gradient with respect to logits is `g - exp(y) sum(g)`, so that the rounding error of exp(y) is
    added. In half precision this error is as large as gradients are, so that only a gradient of exactly 0 is zero.
    """
    precision = torch.finfo(batch.base.model.network.dtype)
    if precision.bits <= HALF_BITS:
        by_node = [(slope[0].reshape(slope.shape[1], -1) == 0).all(-1) for slope in slopes.values()]
        return torch.stack(by_node).all(0).cpu()
    rounding = precision.eps * (ROUNDING_STEPS + len(batch.needed.ancestor_words))
    generator = torch.Generator().manual_seed(0)
    moved = dict[int, Tensor]()
    for node, value in outcomes.items():
        is_log = batch.has_log_probs(node)
        noise = 2 * torch.rand(value.shape, generator=generator, dtype=value.dtype).to(value.device) - 1
        size = _get_error_scale(value) if is_log else _find_largest(value)
        shifted = value.detach() + rounding * size * noise
        moved[node] = (shifted.log_softmax(-1) if is_log else shifted).requires_grad_()
    total = metric.evaluate_with_grad(moved).sum()
    moved_slopes = dict(zip(moved, torch.autograd.grad(total, [*moved.values()], materialize_grads=True), strict=True))
    is_stationary = torch.ones(next(iter(outcomes.values())).shape[1], dtype=torch.bool)
    for node, joined in outcomes.items():
        value = joined.detach()
        slope, moved_slope, terms = slopes[node], moved_slopes[node], torch.zeros_like(value)
        if batch.has_log_probs(node):
            probs = value.exp()
            terms = rounding * _get_error_scale(value) * probs * slope.abs().sum(-1, keepdim=True)
            slope = slope - probs * slope.sum(-1, keepdim=True)
            moved_slope = moved_slope - moved[node].exp() * moved_slope.sum(-1, keepdim=True)
        is_zero = slope.abs() <= terms + _find_largest(moved_slope - slope)
        is_stationary &= is_zero[0].reshape(len(is_stationary), -1).all(-1).cpu()
    return is_stationary


def _get_error_scale(log_probs: Tensor) -> Tensor:
    """The scale of the errors of log probabilities, which are relative errors of the probabilities."""
    return log_probs.detach().abs().clamp(min=1).nan_to_num(posinf=1)


def _find_largest(value: Tensor) -> Tensor:
    """The largest magnitude in each outcome `[1, example, *shape]`: `[1, example, *ones]`."""
    return value.abs().amax([*range(2, value.dim())], keepdim=True) if value.dim() > 2 else value.abs()


def _backpropagate(run: PatchedRun, outcome_gradients: Outcomes, *, retain_graph: bool) -> dict[int, Tensor]:
    """The gradient with respect to the values of each group, by the chain rule from the outcomes."""
    outcomes = {node: value for node, value in run.compute_base_outcomes().items() if value.requires_grad}
    if not outcomes or not run.perturbations:
        return {}
    ends, grad_outputs = list(outcomes.values()), [outcome_gradients[node] for node in outcomes]
    gradients = torch.autograd.grad(
        ends, list(run.perturbations.values()), grad_outputs, retain_graph=retain_graph, materialize_grads=True
    )
    return dict(zip(run.perturbations, gradients, strict=True))


# --------------------------------------------------------------------------------------------------------------------
# The derivatives of linear groups along the differences of writers: the forward part of first-order estimates.


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
