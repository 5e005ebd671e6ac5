"""Gradients of the metric at node groups, in the base run or in runs between the base and the source run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.engine import BaseRun, Differences, ExampleBatch, Outcomes, interpolate
from bnet_transformer.interventions.examples import Metric
from bnet_transformer.interventions.methods import ACTIVATIONS, EXACT_HINT
from bnet_transformer.interventions.patched_run import PatchedRun, gather_nodes, get_layout_index

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
