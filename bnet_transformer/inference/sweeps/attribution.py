"""Sweeps to first order: the slope of the metric at every node of the corrupt run, from one pass forward and one back.

    m(corrupt) + <dm/dz, clean z - corrupt z>,    of a cell that sets z

No cell is run. For a row of attention z is `P(j | i)`. Known as attribution patching (Nanda 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.torch_context import with_gradients
from bnet_transformer.compiler.course import seen
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.sweeps.cell_spec import Cells
from bnet_transformer.inference.sweeps.engine import ExampleBatch, Outcomes, Start, metric_of_base_runs
from bnet_transformer.inference.sweeps.metric import Metric
from bnet_transformer.inference.sweeps.patched_run import PatchedRun, picked
from bnet_transformer.inference.sweeps.sparse_update import Setting, full_shape


@with_gradients()
def estimate_cells(
    batches: Sequence[ExampleBatch], metric: Metric, cells: Cells, progress: bool | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As `run_cells`, to first order: no cell is run."""
    for batch in batches:
        for obstacle in batch.alone.values():
            allowed = "first_order=False, which runs each cell"
            raise BNetError("first_order", expected="cells that one batch can hold", got=f"{obstacle}", allowed=allowed)
    clean, corrupt = metric_of_base_runs(batches, metric)
    effects = torch.zeros(int(np.prod(cells.shape, dtype=np.int64)), len(corrupt), dtype=torch.float64)
    first = 0
    hide = None if progress is None else not progress
    outer = _slopes_of_outcomes(batches, metric)
    for batch, of_states in zip(tqdm(batches, disable=hide, unit="part", leave=False), outer, strict=True):
        some = slice(first, first + len(batch.corrupt))
        for start, slopes in zip(batch.starts(), of_states, strict=True):
            _add_effects(effects[:, some], start, slopes)
        first = some.stop
    there = torch.zeros(len(effects), dtype=torch.bool)
    there[torch.from_numpy(cells.there)] = True
    if not bool(effects[there].isfinite().all()):
        wanted = "a metric with a finite slope at the corrupt run, for first_order=True"
        raise BNetError("metric", expected=wanted, got="NaN or infinity", allowed="first_order=False")
    found = torch.where(there[:, None], corrupt + effects, torch.nan)
    return found.reshape(*cells.shape, -1), clean, corrupt


def _slopes_of_outcomes(batches: Sequence[ExampleBatch], metric: Metric) -> list[list[Outcomes]]:
    """How the metric, summed over examples, changes with each outcome: of each batch, in each state of the choices."""
    leaves = [
        [
            {node: value.detach().requires_grad_() for node, value in start.run.base_outcomes().items()}
            for start in batch.starts()
        ]
        for batch in batches
    ]
    averaged = [batch.averaged(states) for batch, states in zip(batches, leaves, strict=True)]
    told = metric.number({node: torch.cat([each[node] for each in averaged], 1) for node in metric.nodes})
    if not told.requires_grad:
        wanted = "a metric with a gradient (torch operations on its nodes), for first_order=True"
        raise BNetError("metric", expected=wanted, got="numbers without one", allowed="first_order=False")
    flat = [value for states in leaves for each in states for value in each.values()]
    slopes = iter(torch.autograd.grad(told.sum(), flat, materialize_grads=True))
    return [[{node: next(slopes) for node in each} for each in states] for states in leaves]


def _add_effects(effects: Tensor, start: Start, outer: Mapping[int, Tensor]) -> None:
    """Add `<dm/dz, clean z - corrupt z>` of each cell, `[cell, example]`, given the slopes of the outcomes."""
    run = start.run
    outcomes = {node: value for node, value in run.base_outcomes().items() if value.requires_grad}
    if not outcomes:
        return
    ends, given = list(outcomes.values()), [outer[node] for node in outcomes]
    inner = torch.autograd.grad(ends, list(run.nudges.values()), given, materialize_grads=True)
    for family, slope in zip(run.nudges, inner, strict=True):
        for setting in start.settings[family]:
            if setting.rows:
                told = _of_rows(run, family, setting, slope)
            else:
                by = run.value_of(family, setting) - run.at(family, setting).detach()
                told = (picked(run, family, slope.to(by.device), setting.node) * by).flatten(2).sum(-1)
            effects.index_add_(0, setting.cell, told.double().cpu().expand(-1, effects.shape[1]))


def _of_rows(run: PatchedRun, family: int, setting: Setting, slope: Tensor) -> Tensor:
    """The same where `P(j | i)` is set, of which the mix is a linear function: `[k, example]`."""
    member, course = run.members[family], run.base
    at, parents = seen(course, member)
    parents = [parent.detach() for parent in parents]
    with torch.no_grad():
        weights = member.tpm.reading(at, *parents)
    assert weights is not None  # cell_spec refuses an attention that has none
    weights = course.layout.full(weights, 1)
    weights = weights.expand(len(slope), *full_shape(course, member), weights.shape[-1]).clone().requires_grad_()
    mix = member.tpm.mix(weights, *parents)  # type: ignore[attr-defined]
    (steep,) = torch.autograd.grad((course.layout.full(mix, 1) * slope.to(mix.device)).sum(), weights)
    each = steep * (setting.source.to(steep.device) - weights.detach())
    told = picked(run, family, each, setting.node)  # [k, example, word read]
    return told.sum(-1) if setting.read is None else told[torch.arange(len(told)), :, setting.read]
