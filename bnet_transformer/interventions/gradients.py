"""Gradients of the metric at node groups, in the base run or in runs between the base and the source run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.tensors import IntArray
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.cells import PatchSites, is_index_valued
from bnet_transformer.interventions.engine import Experiment, Outcomes, SweepRun
from bnet_transformer.interventions.methods import ACTIVATIONS, EXACT_HINT
from bnet_transformer.interventions.patched_run import PatchedRun, build_patch, gather_nodes, get_layout_index

# --------------------------------------------------------------------------------------------------------------------
# Runs between the base run and the source run, for integrated gradients (Sundararajan, Taly and Yan 2017).
#
# The inputs are interpolated, not the nodes that cells set: the node groups with real values at which the difference
# between the runs begins. These are inputs and nodes set by `do` with real values. Where an input is an index, such as
# a token, they are the first nodes with real values below it, such as the embedding of the token. All other nodes are
# computed from the interpolated ones.


# For each group the interpolated nodes `[k]`, their values in the base run, and the values in the source run minus
# these, `[k, 1 or N, *shape]` each.
Differences = Mapping[int, tuple[IntArray, Tensor, Tensor]]


@dataclass(frozen=True)
class Point:
    """A run at which a gradient is evaluated.

    Args:
        fraction: The fraction of the way from the base run to the source run; None for the base run.
        writer: The number of the group of writers that is set there; None for the inputs.
    """

    fraction: float | None = None
    writer: int | None = None


def list_points(experiment: Experiment) -> list[Point]:
    """The points over which a gradient is averaged, by the rule of the method."""
    gradient, edges = experiment.gradient, experiment.cells.edges
    assert gradient is not None
    if not gradient.steps:
        return [Point()]
    fractions = [1 - f if experiment.is_noise else f for f in gradient.list_fractions()]
    writers: Sequence[int | None] = [None]
    if gradient.rule == ACTIVATIONS:
        assert edges is not None
        writers = range(len(edges.structure.writer_groups))
    return [Point(fraction, writer) for writer in writers for fraction in fractions]


def move_run(run: SweepRun, point: Point) -> PatchedRun:
    """The run at a point between the base and the source run."""
    patched = run.patched
    if point.fraction is None:
        return patched
    differences = find_input_differences(run) if point.writer is None else _list_writer_nodes(run, point.writer)
    if not differences:  # a writer without a difference has its value of the base run
        return patched
    overrides: dict[int, tuple[Tensor, Tensor]] = {}
    for group, (nodes, base, delta) in differences.items():
        shape, count = patched.examples.model.ground.shapes[group], len(patched.examples)
        values = delta.new_zeros(count, math.prod(shape), *delta.shape[2:])
        values[:, nodes] = (base + point.fraction * delta).transpose(0, 1)
        mask = torch.zeros(count, math.prod(shape), dtype=torch.bool, device=delta.device)
        mask[:, nodes] = True
        overrides[group] = values.reshape(count, *shape, *delta.shape[2:]), mask.reshape(count, *shape)
    shared, gradient_groups = (patched.examples, patched.needed, patched.source_groups), patched.gradient_groups
    return PatchedRun(*shared, gradient_groups=gradient_groups, overrides=overrides)


def _list_writer_nodes(run: SweepRun, w: int) -> Differences:
    """All nodes of a group of writers, with their values in the base run and the difference of the source run."""
    patched, edges = run.patched, run.experiment.cells.edges
    assert edges is not None
    if w not in run.writer_differences:
        return {}
    group = edges.structure.writer_groups[w].spec.group
    nodes = np.arange(len(patched.examples.model.ground.select_nodes(group)))
    position = get_layout_index(patched.base, patched.specs[group.index], nodes)
    tables = patched.base.values[group.index].detach(), run.writer_differences[w]
    base, difference = (gather_nodes(patched.base, patched.specs[group.index], table, position) for table in tables)
    return {group.index: (nodes, base, difference)}


def find_input_differences(run: SweepRun) -> Differences:
    """The nodes with real values at which the difference between both runs begins; none if there is none."""
    patched, alignment = run.patched, run.experiment.alignment
    if run.source is None:
        return {}
    model, source_model, source = patched.examples.model, run.source.examples.model, run.source.base
    ground, specs = model.ground, model.network.specs
    marked = {i: np.zeros(math.prod(ground.shapes[i]), dtype=np.bool_) for i in patched.needed.ancestor_words}

    def mark(nodes: Iterable[int]) -> None:
        for node in nodes:
            group = ground.group_of(node).index
            if group in marked:
                marked[group][node - int(ground.offsets[group])] = True

    names = map(source_model.ground.name, source_model.do)
    mark([*model.do, *(ground.id(n) for n in names if ground.template.parse_name(n, ground.word_counts) is not None)])
    differences: dict[int, tuple[IntArray, Tensor, Tensor]] = {}
    for index in sorted(marked):
        spec = specs[index]
        nodes = np.flatnonzero(marked[index] | (spec.tpm.kind == "input"))
        nodes = nodes[alignment.align_nodes(index, nodes) >= 0]
        if not len(nodes) or index not in patched.base.values or index not in source.values:
            continue
        patch = build_patch(patched, source, PatchSites(index, np.zeros_like(nodes), nodes), alignment)
        delta = patched.get_difference(index, patch)
        differs = (delta != 0).reshape(len(nodes), -1).any(-1).cpu()
        changed = nodes[differs.numpy()]
        if is_index_valued(spec):
            children = {c for node in changed for c in ground.children(int(ground.offsets[index]) + int(node))}
            mark(child for child in children if not specs[ground.group_of(child).index].tpm.is_random)
        elif differs.any():
            differences[index] = changed, patched.get_base_values(index, patch).detach()[differs], delta[differs]
    return differences


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
        base_run: The base and the source run of these rows.
        run: The run at which the gradient is evaluated: the base run, or one between the base and the source run.
        gradients: For each group of `run.gradient_groups` that leads to the metric, the gradient with respect to its
            values, `[row, *plates, word, *shape]` in the layout of the run.
        outcome_gradients: The gradient with respect to each outcome, `[1, row, *shape]`, by node.
        is_stationary: Whether the gradient of the metric is zero up to rounding at this point, `[example]`.
    """

    base_run: SweepRun
    run: PatchedRun
    gradients: dict[int, Tensor]
    outcome_gradients: Outcomes
    is_stationary: Tensor


def iter_gradient_runs(
    experiment: Experiment, get_runs: Callable[[], Iterable[SweepRun]], points: Sequence[Point]
) -> Iterator[GradientRun]:
    """Iterate over runs with the gradients of the metric at their groups.

    Args:
        experiment: A sweep by gradients; its cells determine the groups.
        get_runs: A function that returns the runs of its batches.
        points: The runs at which the gradient is evaluated.

    Yields:
        A run for each point and batch. The mean over the points, summed over the joint states of the choices, is the
        gradient (averaged over the states) or the integrated gradient.

    Raises:
        BNetError: The metric has no gradient, or no input with real values differs between the runs.
    """
    is_interpolated = any(point.fraction is not None and point.writer is None for point in points)
    if is_interpolated and not any(map(find_input_differences, get_runs())):
        expected = "sentences that differ in an input, or a node below it, with real values, for steps="
        hint = "Use steps=0, which needs the gradient at one run only"
        raise BNetError(
            "clean, corrupt", expected=expected, actual="no such difference that leads to the metric", hint=hint
        )
    for point in points:
        moved = [move_run(run, point) for run in get_runs()] if len(experiment.batches) == 1 else []
        runs = moved or (move_run(run, point) for run in get_runs())
        by_run, is_stationary = _compute_outcome_gradients(experiment, runs)
        for k, (run, gradients) in enumerate(zip(get_runs(), by_run, strict=True)):
            at = moved[k] if moved else move_run(run, point)
            yield GradientRun(run, at, _backpropagate(at, gradients), gradients, is_stationary)


def _compute_outcome_gradients(experiment: Experiment, runs: Iterable[PatchedRun]) -> tuple[list[Outcomes], Tensor]:
    """The gradient of the metric with respect to each outcome, by run.

    Also whether it is zero up to rounding, `[example]`.
    """
    outcomes = (run.compute_base_outcomes() for run in runs)
    leaves = [{node: value.detach().requires_grad_() for node, value in by_node.items()} for by_node in outcomes]
    averaged = experiment.average(leaves)
    values = experiment.metric.evaluate_with_grad(averaged)
    if not values.requires_grad:
        expected = "a metric with a gradient (torch operations on its nodes), for method=bt.Gradient()"
        raise BNetError("metric", expected=expected, actual="numbers without gradient", hint=EXACT_HINT)
    # The metric of an example depends on the outcomes of this example only, so the gradient of the sum contains the
    # gradient of every example.
    slopes = torch.autograd.grad(values.sum(), [*averaged.values()], materialize_grads=True, retain_graph=True)
    is_stationary = _find_stationary(experiment, averaged, dict(zip(averaged, slopes, strict=True)))
    flat = [value for by_node in leaves for value in by_node.values()]
    gradients = iter(torch.autograd.grad(values.sum(), flat, materialize_grads=True))
    return [{node: next(gradients) for node in by_node} for by_node in leaves], is_stationary


def _find_stationary(experiment: Experiment, outcomes: Outcomes, slopes: Outcomes) -> Tensor:
    """Whether the gradient of the metric is zero up to rounding, such as that of KL at its minimum: `[example]`.

    A slope is zero if it is not greater than what rounding of the outcomes makes of zero: its change if the outcomes
    change by the rounding error of the run, which grows with the number of node groups. For log probabilities y, with
    the slopes g, the gradient with respect to logits is `g - exp(y) sum(g)`, so that the rounding error of exp(y) is
    added. In half precision this error is as large as gradients are, so that only a gradient of exactly 0 is zero.
    """
    precision = torch.finfo(experiment.base.model.network.dtype)
    if precision.bits <= HALF_BITS:
        by_node = [(slope[0].reshape(slope.shape[1], -1) == 0).all(-1) for slope in slopes.values()]
        return torch.stack(by_node).all(0).cpu()
    rounding = precision.eps * (ROUNDING_STEPS + len(experiment.needed.ancestor_words))
    generator = torch.Generator().manual_seed(0)
    moved = dict[int, Tensor]()
    for node, value in outcomes.items():
        is_log = experiment.has_log_probs(node)
        noise = 2 * torch.rand(value.shape, generator=generator, dtype=value.dtype).to(value.device) - 1
        size = _get_error_scale(value) if is_log else _find_largest(value)
        shifted = value.detach() + rounding * size * noise
        moved[node] = (shifted.log_softmax(-1) if is_log else shifted).requires_grad_()
    total = experiment.metric.evaluate_with_grad(moved).sum()
    moved_slopes = dict(zip(moved, torch.autograd.grad(total, [*moved.values()], materialize_grads=True), strict=True))
    is_stationary = torch.ones(next(iter(outcomes.values())).shape[1], dtype=torch.bool)
    for node, joined in outcomes.items():
        value = joined.detach()
        slope, moved_slope, terms = slopes[node], moved_slopes[node], torch.zeros_like(value)
        if experiment.has_log_probs(node):
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


def _backpropagate(run: PatchedRun, outcome_gradients: Outcomes) -> dict[int, Tensor]:
    """The gradient with respect to the values of each group, by the chain rule from the outcomes.

    The graph remains, because the estimates of edges differentiate parts of it again.
    """
    outcomes = {node: value for node, value in run.compute_base_outcomes().items() if value.requires_grad}
    if not outcomes or not run.perturbations:
        return {}
    ends, grad_outputs = list(outcomes.values()), [outcome_gradients[node] for node in outcomes]
    gradients = torch.autograd.grad(
        ends, list(run.perturbations.values()), grad_outputs, retain_graph=True, materialize_grads=True
    )
    return dict(zip(run.perturbations, gradients, strict=True))
