"""Gradients of the metric at node groups, in the base run or in runs between the base and the source run.

`iter_gradient_runs` is the common part of all first-order estimates: of nodes, of rows of attention, and of arrows and
paths (`first_order`). Other estimates use it with batches of `build_gradient_batches`, which name the groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.sweeps.alignment import parse_words
from bnet_transformer.interventions.sweeps.cell_spec import PatchCells
from bnet_transformer.interventions.sweeps.engine import BaseRun, ExampleBatch, Outcomes, SweepOptions
from bnet_transformer.interventions.sweeps.examples import Examples, Metric
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun
from bnet_transformer.interventions.sweeps.request import SweepRequest


@dataclass(frozen=True)
class GradientRun:
    """A run, and the gradient of the metric with respect to the values of its groups.

    Args:
        batch: The examples of the run.
        base_run: The base run of these examples, with the values of the source run, in the same state of the choices.
        run: The run at which the gradient is evaluated: the base run, or one between the base and the source run.
        gradients: For each group of `run.gradient_groups` that leads to the metric, the gradient with respect to its
            values, `[example, *plates, word, *shape]` in the layout of the run.
    """

    batch: ExampleBatch
    base_run: BaseRun
    run: PatchedRun
    gradients: dict[int, Tensor]


def build_gradient_batches(
    source: Examples, base: Examples, metric: Metric, groups: Collection[int], options: SweepOptions
) -> list[ExampleBatch]:
    """Build batches without cells, for the gradients of a metric at some groups.

    Args:
        source: The sentences of the source run.
        base: The sentences of the base run, as many and of the same length.
        metric: The metric.
        groups: The groups at which gradients are computed; both runs contain their values.
        options: The memory, and the number of steps; `first_order` must be true.

    Returns:
        The batches for `iter_gradient_runs`, whose runs fit in half of the memory.

    Raises:
        BNetError: A group that leads to the metric has no shared run, such as a recurrent group.
    """
    alignment = parse_words(base.model, source.model, None)
    cells = PatchCells("groups", (), {}, {}, {})
    request = SweepRequest(source, base, alignment, cells, metric, options, groups=frozenset(groups))
    batches = request.build_batches()
    if not batches[0].has_shared_run:
        raise BNetError("gradients", expected="a metric of nodes that one run computes", actual="separate runs")
    return batches


def iter_gradient_runs(batches: Sequence[ExampleBatch], metric: Metric, steps: int = 0) -> Iterator[GradientRun]:
    """Iterate over runs with the gradients of the metric at their groups.

    Args:
        batches: The batches of a sweep with `first_order`; their cells determine the groups.
        metric: The metric.
        steps: The number of runs between the base and the source run, at the fractions `(k + 1/2) / steps` of the way
            (the midpoint rule); 0 for the base run only.

    Yields:
        A run for each step, batch and joint state of the latent choices. The mean over the steps, summed over the
        states, is the gradient (averaged over the states) or the integrated gradient.

    Raises:
        BNetError: The metric has no gradient, or no input with real values differs between the runs.
    """
    if steps and not any(base_run.difference for batch in batches for base_run in batch.iter_base_runs()):
        expected = "sentences that differ in an input, or a node below it, with real values, for steps="
        hint = "Use steps=0, which needs the gradient at one run only"
        raise BNetError(
            "clean, corrupt", expected=expected, actual="no such difference that leads to the metric", hint=hint
        )
    fractions: list[float | None] = [(k + 0.5) / steps for k in range(steps)]
    for fraction in fractions or [None]:
        cached = [list(_iter_runs(batch, fraction)) if batch.should_cache else None for batch in batches]
        runs = [part or _iter_runs(batch, fraction) for part, batch in zip(cached, batches, strict=True)]
        outcome_gradients = _compute_outcome_gradients(batches, runs, metric)
        runs = [part or _iter_runs(batch, fraction) for part, batch in zip(cached, batches, strict=True)]
        for batch, batch_runs, by_state in zip(batches, runs, outcome_gradients, strict=True):
            for (base_run, run), gradients in zip(batch_runs, by_state, strict=True):
                yield GradientRun(batch, base_run, run, _backpropagate(run, gradients))


def _iter_runs(batch: ExampleBatch, fraction: float | None) -> Iterator[tuple[BaseRun, PatchedRun]]:
    """Iterate over the base runs of a batch, each with the run at a fraction of the way to the source run."""
    for base_run in batch.iter_base_runs():
        run = base_run.run
        if fraction is not None and base_run.difference:
            overrides = base_run.difference.interpolate(fraction)
            run = PatchedRun(
                run.examples, run.needed, run.source_groups, gradient_groups=run.gradient_groups, overrides=overrides
            )
        yield base_run, run


def _compute_outcome_gradients(
    batches: Sequence[ExampleBatch], runs: Sequence[Iterable[tuple[BaseRun, PatchedRun]]], metric: Metric
) -> list[list[Outcomes]]:
    """The gradient of the metric with respect to each outcome, by batch and by joint state of the choices."""
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
        expected = "a metric with a gradient (torch operations on its nodes), for first_order=True"
        raise BNetError("metric", expected=expected, actual="numbers without gradient", hint="Use first_order=False")
    # The metric of an example depends on the outcomes of this example only, so the gradient of the sum contains the
    # gradient of every example.
    flat = [value for states in leaves for outcomes in states for value in outcomes.values()]
    gradients = iter(torch.autograd.grad(values.sum(), flat, materialize_grads=True))
    return [[{node: next(gradients) for node in outcomes} for outcomes in states] for states in leaves]


def _backpropagate(run: PatchedRun, outcome_gradients: Outcomes) -> dict[int, Tensor]:
    """The gradient with respect to the values of each group, by the chain rule from the outcomes."""
    outcomes = {node: value for node, value in run.compute_base_outcomes().items() if value.requires_grad}
    if not outcomes or not run.perturbations:
        return {}
    ends, grad_outputs = list(outcomes.values()), [outcome_gradients[node] for node in outcomes]
    gradients = torch.autograd.grad(ends, list(run.perturbations.values()), grad_outputs, materialize_grads=True)
    return dict(zip(run.perturbations, gradients, strict=True))
