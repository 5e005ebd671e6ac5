"""First-order estimates of the effects of cells, without running a cell.

Let m be the metric, base the run that is patched, and source the run that provides the values. The estimates are

    a node z:                   <dm/dz, source z - base z>
    a row of attention:         the same with z = P(j | i)
    a path u -> ... -> v:       <dm/dv, (dv/d... ... d.../du) (source u - base u)>

where the derivatives along a path are those of its arrows only: all other parents have their values of the run. This is
attribution patching (Nanda 2023): at the clean run with `direction="noise"`, as EAP defines it (Syed, Rager and Conmy
2023), else at the corrupt run. With `steps`, the derivatives are averaged over runs between both (integrated
gradients); the differences remain those of the base and the source run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.torch_context import enable_gradients
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.sweeps.cell_spec import PatchCells, PatchSites, PathsToEnd, group_paths
from bnet_transformer.interventions.sweeps.edge_estimates import add_edge_effects
from bnet_transformer.interventions.sweeps.engine import CellOutcomes, ExampleBatch, evaluate_base_runs
from bnet_transformer.interventions.sweeps.gradients import GradientRun, iter_gradient_runs, list_points
from bnet_transformer.interventions.sweeps.metric import Metric
from bnet_transformer.interventions.sweeps.patched_run import build_patch, gather_nodes
from bnet_transformer.interventions.sweeps.sparse_update import (
    GroupPatch,
    compute_attention_weights,
    get_layout_shape,
    get_parent_groups,
)

PATH_COPIES = 8  # the copies of the values of the parents of a path that its derivative requires


@enable_gradients()
def estimate_cells(
    batches: Sequence[ExampleBatch], metric: Metric, cells: PatchCells, progress: bool | None
) -> CellOutcomes:
    """Estimate the result of `run_cells` to first order, without running a cell."""
    for obstacle in batches[0].obstacles.values():
        hint = "Use first_order=False, which runs each cell"
        raise BNetError(f"first_order: cells cannot share a run, because {obstacle}", hint=hint)
    options = batches[0].options
    source, base = evaluate_base_runs(batches, metric)
    effects = torch.zeros(int(np.prod(cells.shape, dtype=np.int64)), len(base), dtype=torch.float64)
    is_stationary = torch.ones(len(base), dtype=torch.bool)
    hide = None if progress is None else not progress
    points = list_points(batches[0])
    count = len(batches) * len(batches[0].choices.states) * len(points)
    runs = iter_gradient_runs(batches, metric, points)
    for item in tqdm(runs, total=count, disable=hide, unit="part", leave=False):
        part = slice(item.batch.first_example, item.batch.first_example + len(item.batch.base))
        is_stationary[part] &= item.is_stationary
        _add_site_effects(effects[:, part], item)
        _add_path_effects(effects[:, part], item, cells)
        if cells.edges is not None:
            add_edge_effects(effects[:, part], item, cells.edges)
    effects /= len(points)
    cell_ids = torch.from_numpy(cells.cell_ids)
    if not bool(effects[cell_ids].isfinite().all()):
        side = options.side_names[1]
        expected = f"a metric with a finite gradient at the {side} run, for first_order=True"
        raise BNetError("metric", expected=expected, actual="NaN or infinity", hint="Use first_order=False")
    values = torch.full_like(effects, torch.nan)
    values[cell_ids] = base + effects[cell_ids]
    return CellOutcomes(values.reshape(*cells.shape, -1), source, base, is_stationary)


def _add_site_effects(effects: Tensor, item: GradientRun) -> None:
    """Add the effects of nodes and of rows of attention to `effects[cell, example]`."""
    run, base = item.run, item.base_run.run
    for group, gradient in item.gradients.items():
        for patch in item.base_run.patches.get(group, ()):
            if patch.is_attention:
                estimates = _estimate_attention_effects(item, group, patch, gradient)
            else:
                delta = base.get_patch_values(group, patch) - base.get_base_values(group, patch).detach()
                slopes = gather_nodes(run, group, gradient.to(delta.device), patch.nodes)
                estimates = (slopes * delta).flatten(2).sum(-1)
            effects.index_add_(0, patch.cells, estimates.double().cpu().expand(-1, effects.shape[1]))


def _estimate_attention_effects(item: GradientRun, group: int, patch: GroupPatch, gradient: Tensor) -> Tensor:
    """The effects of patches of `P(j | i)`, by the gradient of the mix, which is linear in it: `[k, example]`."""
    run, spec, state = item.run, item.run.specs[group], item.run.base
    with torch.no_grad():
        weights, parents = compute_attention_weights(state, spec)
        base_weights = (
            weights if run is item.base_run.run else compute_attention_weights(item.base_run.run.base, spec)[0]
        )
    shape = (len(gradient), *get_layout_shape(state, spec), weights.shape[-1])
    weights = weights.expand(shape).clone().requires_grad_()
    mix = spec.tpm.mix(weights, *(parent.detach() for parent in parents))  # type: ignore[attr-defined]
    (slope,) = torch.autograd.grad((state.layout.pad_dims(mix, 1) * gradient.to(mix.device)).sum(), weights)
    products = slope * (patch.source.to(slope.device) - base_weights.expand(shape))
    terms = gather_nodes(run, group, products, patch.nodes)  # [k, example, word read]
    return terms.sum(-1) if patch.read_words is None else terms[torch.arange(len(terms)), :, patch.read_words]


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
    size = max(1, item.batch.options.memory // (PATH_COPIES * network.dtype.itemsize * max(1, largest)))
    for start in range(0, len(ends), size):
        _add_path_slopes(effects, item, ends[start : start + size])


def _add_path_slopes(effects: Tensor, item: GradientRun, ends: Sequence[PathsToEnd]) -> None:
    """Add the effects of some paths, from one evaluation of their steps and its gradient."""
    # The first node of each path has the value base + t (source - base), and the steps of the path are computed from
    # it. The derivative of the last node with respect to t, at t = 0, is the product of the derivatives along the
    # arrows of the path. All paths have separate t, so one backward pass computes the derivative of each.
    run, base_run, alignment = item.run, item.base_run, item.batch.alignment
    source, leaves = base_run.source, list[tuple[Tensor, Tensor]]()
    assert source is not None  # paths of an ablation raise an error
    cells = torch.tensor([end.cell for end in ends])

    def build_first(sites: PatchSites) -> GroupPatch:
        patch = build_patch(base_run.run, source, sites, alignment)
        values = base_run.run.get_base_values(sites.group, patch).detach()
        delta = base_run.run.get_patch_values(sites.group, patch).detach() - values
        scale = delta.new_zeros(len(delta), len(run.examples), *[1] * (delta.dim() - 2), requires_grad=True)
        leaves.append((cells[patch.cells], scale))
        moved = run.get_base_values(sites.group, patch).detach() + scale * delta
        return GroupPatch(patch.cells, patch.nodes, moved.transpose(0, 1), is_per_node=True)

    total = torch.zeros((), dtype=run.examples.model.network.dtype, device=run.examples.model.network.device)
    for group, patches in run.patch_paths(ends, build_first, item.batch.options.memory).items():
        for patch in patches:
            values = run.get_patch_values(group, patch)
            slopes = gather_nodes(run, group, item.gradients[group].to(values.device), patch.nodes)
            total = total + (slopes * values).sum()
    if not total.requires_grad:
        return
    scales = [scale for _, scale in leaves]
    gradients = torch.autograd.grad(total, scales, materialize_grads=True)
    for (ids, _), gradient in zip(leaves, gradients, strict=True):
        effects.index_add_(0, ids, gradient.flatten(1).double().cpu())
