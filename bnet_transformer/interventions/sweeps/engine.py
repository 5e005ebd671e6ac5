"""The engine of a sweep: the metric of all cells, in chunks that fit in memory, or its first-order estimate.

A cell that sets its nodes to their values in the corrupt run is not run again.

The first-order estimate runs no cell. The gradient of the metric m at every node of the corrupt run, from one forward
and one backward pass, estimates the metric of a cell that sets z as

    m(corrupt) + <dm/dz, clean z - corrupt z>.

For a row of attention z is `P(j | i)`. This is attribution patching (Nanda 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.arrays import IntArray
from bnet_transformer._core.torch_context import enable_gradients
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.obstacles import Obstacle
from bnet_transformer.interventions.sweeps import sequential
from bnet_transformer.interventions.sweeps.ablation import Ablation
from bnet_transformer.interventions.sweeps.cell_spec import PatchCells, PatchSites
from bnet_transformer.interventions.sweeps.examples import EnumeratedChoices, Examples, Metric, enumerate_choices
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun, build_patch, gather_nodes, select_cells
from bnet_transformer.interventions.sweeps.routing import find_obstacles, find_shared_obstacle, find_source_groups
from bnet_transformer.interventions.sweeps.sparse_update import (
    GroupPatch,
    NeededPositions,
    compute_attention_weights,
    count_outcome_values,
    estimate_bytes,
    find_needed_positions,
    get_layout_shape,
)
from bnet_transformer.reference import locate_node

Outcomes = dict[int, Tensor]


@dataclass
class BaseRun:
    """The corrupt run, the patches of cells and the outcomes of the clean run, in one joint state of the choices."""

    run: PatchedRun
    patches: dict[int, list[GroupPatch]]
    effective_cells: IntArray  # the cells that change the value of a node
    clean_outcomes: Outcomes | None

    def compute_outcomes(self, cells: IntArray) -> Outcomes:
        """The outcomes of some cells, `[cell, example, *shape]`; cells without an effect are not patched."""
        mask = np.isin(cells, self.effective_cells)
        return self.run.compute_outcomes(len(cells), select_cells(self.patches, cells[mask], np.flatnonzero(mask)))


@dataclass
class ExampleBatch:
    """A batch of examples that share one run, and the outcomes of cells in them.

    Args:
        clean: The clean sentences; None for an ablation.
        corrupt: The corrupt sentences, as many as the clean ones.
        cells: What each cell sets.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        memory: The maximum number of bytes that are used at once.
        ablation: The values that replace clean values.
        first_example: The number of the first example in the sweep.
        should_cache: Whether the runs of all batches fit in memory, so that they are computed once.
        first_order: Whether effects are estimated from gradients and no cell is run.
    """

    clean: Examples | None
    corrupt: Examples
    cells: PatchCells
    outcome_nodes: tuple[int, ...]
    memory: int
    ablation: Ablation | None = None
    first_example: int = 0
    should_cache: bool = True
    first_order: bool = False
    choices: EnumeratedChoices = field(init=False)
    needed: NeededPositions = field(init=False)
    clean_needed: NeededPositions = field(init=False)
    has_shared_run: bool = field(init=False)
    source_obstacles: dict[int, Obstacle] = field(init=False)  # cells whose values a shared run cannot provide
    obstacles: dict[int, Obstacle] = field(init=False)  # these, and cells whose changes a shared run cannot compute
    sequential_cells: set[int] = field(init=False)  # those of these cells that change the value of a node
    _base_runs: list[BaseRun] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        touched = [*self.cells.get_patched_nodes(self.corrupt.model), *(path.nodes[0] for path in self.cells.paths)]
        self.choices = enumerate_choices(self.clean, self.corrupt, touched, self.outcome_nodes)
        states = next(iter(self.choices))  # the structure is the same in every state
        sides = [side.with_choices(states) for side in (self.corrupt, self.clean) if side is not None]
        needed = [find_needed_positions(sides[0].model, self.outcome_nodes)]
        for side in sides[1:]:
            same = side.model.do.keys() == sides[0].model.do.keys()
            needed.append(needed[0] if same else find_needed_positions(side.model, self.outcome_nodes))
        self.needed, self.clean_needed = needed[0], needed[-1]
        sides_needed = list(zip(sides, needed, strict=True))
        shared_obstacle = find_shared_obstacle(sides_needed)
        self.has_shared_run = shared_obstacle is None
        if shared_obstacle is None:
            self.source_obstacles, changes = find_obstacles(sides_needed, self.cells, first_order=self.first_order)
            self.obstacles = {**changes, **self.source_obstacles}
        else:
            self.obstacles = self.source_obstacles = dict.fromkeys(self.cells.cell_ids.tolist(), shared_obstacle)
        self.sequential_cells = set(self.obstacles)

    def compute_outcomes(self, cells: IntArray, *, is_sequential: bool) -> Outcomes:
        """The outcomes of some cells, averaged over the choices: `[cell, example, *shape]`."""
        if is_sequential:
            return self.marginalize([self._compute_cells_sequentially(states, cells) for states in self.choices])
        return self.marginalize([base_run.compute_outcomes(cells) for base_run in self.iter_base_runs()])

    def iter_base_runs(self) -> Iterable[BaseRun]:
        """Iterate over the base runs, one for each joint state of the choices; cached if they fit in memory."""
        if self.should_cache and not self._base_runs:
            self._base_runs = [self._build_base_run(states) for states in self.choices]
        return self._base_runs or map(self._build_base_run, self.choices)

    def compute_base_outcomes(self) -> tuple[Outcomes, Outcomes | None]:
        """The outcomes of the corrupt run, and of the clean run if there is one: `[1, example, *shape]` each."""
        if not self.has_shared_run:
            clean = None if self.clean is None else self._compute_base_sequentially(self.clean)
            return self._compute_base_sequentially(self.corrupt), clean
        corrupts, cleans, effective = list[Outcomes](), list[Outcomes](), set[int]()
        for base_run in self.iter_base_runs():
            corrupts.append(base_run.run.compute_base_outcomes())
            cleans += [] if base_run.clean_outcomes is None else [base_run.clean_outcomes]
            effective.update(base_run.effective_cells.tolist())
        # An obstacle to computing the changes of a cell does not matter if the cell changes no value.
        self.sequential_cells = {*self.source_obstacles, *(self.obstacles.keys() & effective)}
        return self.marginalize(corrupts), self.marginalize(cleans) if cleans else None

    def marginalize(self, outcomes: Sequence[Mapping[int, Tensor]]) -> Outcomes:
        """The outcomes, averaged over the joint states of the choices."""
        model = self.corrupt.model
        marginals = {}
        for node in self.outcome_nodes:
            is_discrete = locate_node(model, node)[0].tpm.kind == "discrete" and node not in model.do
            marginals[node] = self.choices.marginalize([by_node[node] for by_node in outcomes], is_discrete=is_discrete)
        return marginals

    def _build_base_run(self, states: Mapping[int, Tensor]) -> BaseRun:
        """Build the runs in one joint state of the choices; one clean run returns outcomes and the values to patch."""
        corrupt = self.corrupt.with_choices(states)
        cells = _drop_cells(self.cells, self.source_obstacles)
        sources = frozenset(
            find_source_groups(corrupt.model, cells) - {sites.group for sites in cells.sites if sites.is_attention}
        )
        gradient_groups = frozenset(sites.group for sites in cells.sites) if self.first_order else frozenset()
        run = PatchedRun(corrupt, self.needed, sources, gradient_groups=gradient_groups)
        patches: dict[int, list[GroupPatch]] = {}
        outcomes = None
        if self.ablation is not None:
            for sites in cells.sites:
                patches.setdefault(sites.group, []).append(self._build_ablation_patch(run, sites, self.ablation))
        else:
            assert self.clean is not None
            clean = self.clean.with_choices(states)
            attention_groups = frozenset(sites.group for sites in cells.sites if sites.is_attention)
            clean_run = PatchedRun(clean, self.clean_needed, sources, attention_groups)
            outcomes = clean_run.compute_base_outcomes()
            for sites in cells.sites:
                patches.setdefault(sites.group, []).append(build_patch(run, clean_run.base, sites))
            if cells.paths:
                for group, group_patches in run.patch_paths(clean_run.base, cells.paths, self.memory).items():
                    patches.setdefault(group, []).extend(group_patches)
        return BaseRun(run, patches, find_effective_cells(run, patches), outcomes)

    def _build_ablation_patch(self, run: PatchedRun, sites: PatchSites, ablation: Ablation) -> GroupPatch:
        """The patch of an ablation in one node group."""
        nodes, inverse = np.unique(sites.nodes, return_inverse=True)
        source = ablation.get_values(run, self.first_example, sites.group, nodes)[:, torch.from_numpy(inverse)]
        patch = build_patch(run, run.base, replace(sites, is_attention=False))
        return replace(patch, source=source.to(patch.source), is_per_node=True)

    def _compute_base_sequentially(self, examples: Examples) -> Outcomes:
        """The outcomes of sentences that are run one at a time: `[1, example, *shape]`."""
        sides = (examples.with_choices(states) for states in self.choices)
        by_state = [
            [sequential.compute_outcomes(side.module, model, self.outcome_nodes) for model in side.models]
            for side in sides
        ]
        return self.marginalize([sequential.stack_outcomes(self.outcome_nodes, [rows]) for rows in by_state])

    def _compute_cells_sequentially(self, states: Mapping[int, Tensor], cells: IntArray) -> Outcomes:
        """The outcomes of cells that run one at a time: `[cell, example, *shape]`."""
        corrupt = self.corrupt.with_choices(states)
        clean = None if self.clean is None else self.clean.with_choices(states)
        ablation = self.ablation
        values = (
            None if ablation is None else lambda example, node: ablation.get_value(self.first_example + example, node)
        )
        runner = sequential.SequentialSweep(clean, corrupt, self.cells, self.outcome_nodes, values)
        return sequential.stack_outcomes(self.outcome_nodes, [runner.compute_outcomes(int(cell)) for cell in cells])


def _drop_cells(cells: PatchCells, dropped: Collection[int]) -> PatchCells:
    """The cells without the sites and the paths of dropped cells."""
    remaining = tuple(sites for sites in cells.sites if not np.isin(sites.cells, list(dropped)).all())
    return replace(cells, sites=remaining, paths=tuple(path for path in cells.paths if path.cell not in dropped))


def find_effective_cells(run: PatchedRun, patches: Mapping[int, Sequence[GroupPatch]]) -> IntArray:
    """The cells that change the value of a node in some example; all cells that set attention are included."""
    effective = []
    for group, group_patches in patches.items():
        for patch in group_patches:
            differs = torch.ones(len(patch.cells), dtype=torch.bool)
            if not patch.is_attention:
                differs = (
                    (run.get_base_values(group, patch) != run.get_patch_values(group, patch))
                    .reshape(len(patch.cells), -1)
                    .any(-1)
                    .cpu()
                )
            effective.append(patch.cells[differs].numpy())
    cell_ids: IntArray = np.unique(np.concatenate(effective)) if effective else np.zeros(0, dtype=np.int64)
    return cell_ids


def run_cells(
    batches: Sequence[ExampleBatch], metric: Metric, cells: PatchCells, progress: bool | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run every cell in every example.

    Returns:
        The metric with each cell patched, `[*axes, example]`, the metric of the clean run (None without one), and the
        metric of the corrupt run, `[example]` each.
    """
    clean, corrupt = evaluate_base_runs(batches, metric)
    cell_ids = cells.cell_ids
    is_isolated = np.isin(cell_ids, list(set().union(*(batch.sequential_cells for batch in batches))))
    values = torch.full((int(np.prod(cells.shape, dtype=np.int64)), len(corrupt)), torch.nan, dtype=torch.float64)
    model, memory = batches[0].corrupt.model, batches[0].memory
    cell_bytes, _ = estimate_bytes(model, batches[0].needed)
    size = max(1, memory // (cell_bytes * max(len(batch.corrupt) for batch in batches)))
    outcome_bytes = (
        3
        * model.network.dtype.itemsize
        * sum(count_outcome_values(model, locate_node(model, node)[0]) for node in metric.nodes)
    )
    size = max(1, min(size, memory // (outcome_bytes * len(corrupt))))
    hide = None if progress is None else not progress
    with tqdm(total=len(cell_ids), disable=hide, unit="cell", leave=False) as bar:
        for is_sequential in (False, True):
            selected = cell_ids[is_isolated == is_sequential]
            for start in range(0, len(selected), size):
                chunk = selected[start : start + size]
                outcomes = [batch.compute_outcomes(chunk, is_sequential=is_sequential) for batch in batches]
                values[torch.from_numpy(chunk)] = _evaluate_metric(metric, outcomes)
                bar.update(len(chunk))
    return values.reshape(*cells.shape, -1), clean, corrupt


def evaluate_base_runs(batches: Sequence[ExampleBatch], metric: Metric) -> tuple[Tensor | None, Tensor]:
    """The metric of the clean run, if there is one, and of the corrupt run: `[example]`."""
    base_outcomes = [batch.compute_base_outcomes() for batch in batches]
    clean = [outcomes for _, outcomes in base_outcomes if outcomes is not None]
    corrupt = _evaluate_metric(metric, [outcomes for outcomes, _ in base_outcomes])[0]
    return _evaluate_metric(metric, clean)[0] if clean else None, corrupt


def _evaluate_metric(metric: Metric, batch_outcomes: Sequence[Mapping[int, Tensor]]) -> Tensor:
    """The metric, `[cell, example]`, of the outcomes of the batches."""
    return metric({node: torch.cat([outcomes[node] for outcomes in batch_outcomes], 1) for node in metric.nodes})


@enable_gradients()
def estimate_cells(
    batches: Sequence[ExampleBatch], metric: Metric, cells: PatchCells, progress: bool | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Estimate the result of `run_cells` to first order, without running a cell."""
    for obstacle in batches[0].obstacles.values():
        hint = "Use first_order=False, which runs each cell"
        raise BNetError(f"first_order: cells cannot share a run, because {obstacle}", hint=hint)
    clean, corrupt = evaluate_base_runs(batches, metric)
    effects = torch.zeros(int(np.prod(cells.shape, dtype=np.int64)), len(corrupt), dtype=torch.float64)
    hide = None if progress is None else not progress
    gradients = _compute_outcome_gradients(batches, metric)
    for batch, by_state in zip(tqdm(batches, disable=hide, unit="part", leave=False), gradients, strict=True):
        part = slice(batch.first_example, batch.first_example + len(batch.corrupt))
        for base_run, outcome_gradients in zip(batch.iter_base_runs(), by_state, strict=True):
            _add_effects(effects[:, part], base_run, outcome_gradients)
    cell_ids = torch.from_numpy(cells.cell_ids)
    if not bool(effects[cell_ids].isfinite().all()):
        expected = "a metric with a finite gradient at the corrupt run, for first_order=True"
        raise BNetError("metric", expected=expected, actual="NaN or infinity", hint="Use first_order=False")
    values = torch.full_like(effects, torch.nan)
    values[cell_ids] = corrupt + effects[cell_ids]
    return values.reshape(*cells.shape, -1), clean, corrupt


def _compute_outcome_gradients(batches: Sequence[ExampleBatch], metric: Metric) -> list[list[Outcomes]]:
    """The gradient of the metric with respect to each outcome, by batch and by joint state of the choices."""
    leaves = [
        [
            {node: value.detach().requires_grad_() for node, value in base_run.run.compute_base_outcomes().items()}
            for base_run in batch.iter_base_runs()
        ]
        for batch in batches
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


def _add_effects(effects: Tensor, base_run: BaseRun, outcome_gradients: Mapping[int, Tensor]) -> None:
    """Add `<dm/dz, clean z - corrupt z>` of each cell to `effects[cell, example]`, by the chain rule from outcomes."""
    run = base_run.run
    outcomes = {node: value for node, value in run.compute_base_outcomes().items() if value.requires_grad}
    if not outcomes:
        return
    ends, grad_outputs = list(outcomes.values()), [outcome_gradients[node] for node in outcomes]
    gradients = torch.autograd.grad(ends, list(run.perturbations.values()), grad_outputs, materialize_grads=True)
    for group, gradient in zip(run.perturbations, gradients, strict=True):
        for patch in base_run.patches[group]:
            if patch.is_attention:
                estimates = _estimate_attention_effects(run, group, patch, gradient)
            else:
                delta = run.get_patch_values(group, patch) - run.get_base_values(group, patch).detach()
                slopes = gather_nodes(run, group, gradient.to(delta.device), patch.nodes)
                estimates = (slopes * delta).flatten(2).sum(-1)
            effects.index_add_(0, patch.cells, estimates.double().cpu().expand(-1, effects.shape[1]))


def _estimate_attention_effects(run: PatchedRun, group: int, patch: GroupPatch, gradient: Tensor) -> Tensor:
    """The effects of patches of `P(j | i)`, by the gradient of the mix, which is linear in it: `[k, example]`."""
    spec, state = run.specs[group], run.base
    with torch.no_grad():
        weights, parents = compute_attention_weights(state, spec)
    weights = weights.expand(len(gradient), *get_layout_shape(state, spec), weights.shape[-1]).clone().requires_grad_()
    mix = spec.tpm.mix(weights, *(parent.detach() for parent in parents))  # type: ignore[attr-defined]
    (slope,) = torch.autograd.grad((state.layout.pad_dims(mix, 1) * gradient.to(mix.device)).sum(), weights)
    products = slope * (patch.source.to(slope.device) - weights.detach())
    terms = gather_nodes(run, group, products, patch.nodes)  # [k, example, word read]
    return terms.sum(-1) if patch.read_words is None else terms[torch.arange(len(terms)), :, patch.read_words]
