"""The engine of a sweep: for all cells, in chunks that fit in memory, the metric of the run with the cell set.

A cell that sets nodes to what they are anyway is the corrupt run, and is not run again.

To first order no cell is run. The slope of the metric at every node of the corrupt run, from one pass forward and one
back, estimates

    m(corrupt) + <dm/dz, clean z - corrupt z>,    of a cell that sets z.

For a row of attention z is `P(j | i)`. Known as attribution patching (Nanda 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.torch_context import enable_gradients
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.routing import Obstacle
from bnet_transformer.interventions.sweeps import sequential
from bnet_transformer.interventions.sweeps.ablation import Ablation
from bnet_transformer.interventions.sweeps.cell_spec import IntArray, PatchCells, PatchSites
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
    """The corrupt run in one joint state of the choices, what cells set in it, and the outcomes of the clean run."""

    run: PatchedRun
    patches: dict[int, list[GroupPatch]]
    effective_cells: IntArray  # the cells that set a node to what it is not
    clean_outcomes: Outcomes | None

    def compute_outcomes(self, cells: IntArray) -> Outcomes:
        """The outcomes of some cells; those that are not busy set nothing."""
        busy = np.isin(cells, self.effective_cells)
        return self.run.compute_outcomes(len(cells), select_cells(self.patches, cells[busy], np.flatnonzero(busy)))


@dataclass
class SweepBatch:
    """Examples that one run holds, and the outcomes of cells in them.

    Args:
        clean: The clean sentences, None for an ablation.
        corrupt: The corrupt sentences, as many.
        cells: What each cell sets.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        memory: Bytes that may be used at once.
        ablation: The values that replace clean ones.
        first_example: The number of the first example in the sweep.
        should_cache: True where memory holds the runs of all batches, so that they are made once.
        first_order: True where effects are estimated from slopes and no cell runs.
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
    source_obstacles: dict[int, Obstacle] = field(init=False)  # cells that take no values from a common run
    obstacles: dict[int, Obstacle] = field(init=False)  # these, and the cells whose changes are computed alone
    sequential_cells: set[int] = field(init=False)  # of them, those that set something to another value
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
        everywhere = find_shared_obstacle(sides_needed)
        self.has_shared_run = everywhere is None
        if everywhere is None:
            self.source_obstacles, changes = find_obstacles(sides_needed, self.cells, first_order=self.first_order)
            self.obstacles = {**changes, **self.source_obstacles}
        else:
            self.obstacles = self.source_obstacles = dict.fromkeys(self.cells.cell_ids.tolist(), everywhere)
        self.sequential_cells = set(self.obstacles)

    def compute_outcomes(self, cells: IntArray, *, is_sequential: bool) -> Outcomes:
        """The outcomes of some cells, in one run or each in its own, choices averaged: `[cell, example, *shape]`."""
        if is_sequential:
            return self.marginalize([self._compute_cells_sequentially(states, cells) for states in self.choices])
        return self.marginalize([start.compute_outcomes(cells) for start in self.iter_base_runs()])

    def iter_base_runs(self) -> Iterable[BaseRun]:
        """Where the runs start from, for each state of the choices: made once, if memory holds them."""
        if self.should_cache and not self._base_runs:
            self._base_runs = [self._build_base_run(states) for states in self.choices]
        return self._base_runs or map(self._build_base_run, self.choices)

    def compute_base_outcomes(self) -> tuple[Outcomes, Outcomes | None]:
        """The outcomes of the corrupt run, and of the clean run if there is one: `[1, example, *shape]` each."""
        if not self.has_shared_run:
            clean = None if self.clean is None else self._compute_base_sequentially(self.clean)
            return self._compute_base_sequentially(self.corrupt), clean
        corrupts, cleans, busy = list[Outcomes](), list[Outcomes](), set[int]()
        for start in self.iter_base_runs():
            corrupts.append(start.run.compute_base_outcomes())
            cleans += [] if start.clean_outcomes is None else [start.clean_outcomes]
            busy.update(start.effective_cells.tolist())
        # What a cell changes is no obstacle if it sets nothing to another value.
        self.sequential_cells = {*self.source_obstacles, *(self.obstacles.keys() & busy)}
        return self.marginalize(corrupts), self.marginalize(cleans) if cleans else None

    def marginalize(self, outcomes: Sequence[Mapping[int, Tensor]]) -> Outcomes:
        """The outcomes over the states of the choices."""
        world = self.corrupt.model
        found = {}
        for node in self.outcome_nodes:
            discrete = locate_node(world, node)[0].tpm.kind == "discrete" and node not in world.do
            found[node] = self.choices.marginalize([each[node] for each in outcomes], is_discrete=discrete)
        return found

    def _build_base_run(self, states: Mapping[int, Tensor]) -> BaseRun:
        """The runs in one state of the choices. One clean run gives both its outcomes and the values that cells set."""
        corrupt = self.corrupt.with_choices(states)
        cells = _drop_cells(self.cells, self.source_obstacles)
        sources = frozenset(
            find_source_groups(corrupt.model, cells) - {each.group for each in cells.sites if each.is_attention}
        )
        slopes = frozenset(each.group for each in cells.sites) if self.first_order else frozenset()
        run = PatchedRun(corrupt, self.needed, sources, gradient_groups=slopes)
        settings: dict[int, list[GroupPatch]] = {}
        outcomes = None
        if self.ablation is not None:
            for each in cells.sites:
                settings.setdefault(each.group, []).append(self._build_ablation_patch(run, each, self.ablation))
        else:
            assert self.clean is not None
            clean = self.clean.with_choices(states)
            readings = frozenset(each.group for each in cells.sites if each.is_attention)
            clean_run = PatchedRun(clean, self.clean_needed, sources, readings)
            outcomes = clean_run.compute_base_outcomes()
            for each in cells.sites:
                settings.setdefault(each.group, []).append(build_patch(run, clean_run.base, each))
            if cells.paths:
                for family, several in run.patch_paths(clean_run.base, cells.paths, self.memory).items():
                    settings.setdefault(family, []).extend(several)
        return BaseRun(run, settings, find_effective_cells(run, settings), outcomes)

    def _build_ablation_patch(self, run: PatchedRun, sites: PatchSites, ablation: Ablation) -> GroupPatch:
        """What an ablation sets in a family."""
        nodes, which = np.unique(sites.nodes, return_inverse=True)
        source = ablation.get_values(run, self.first_example, sites.group, nodes)[:, torch.from_numpy(which)]
        found = build_patch(run, run.base, replace(sites, is_attention=False))
        return replace(found, source=source.to(found.source), is_per_node=True)

    def _compute_base_sequentially(self, examples: Examples) -> Outcomes:
        """The outcomes of sentences, each run by itself: `[1, example, *shape]`."""
        sides = (examples.with_choices(states) for states in self.choices)
        each = [
            [sequential.compute_outcomes(side.module, world, self.outcome_nodes) for world in side.models]
            for side in sides
        ]
        return self.marginalize([sequential.stack_outcomes(self.outcome_nodes, [rows]) for rows in each])

    def _compute_cells_sequentially(self, states: Mapping[int, Tensor], cells: IntArray) -> Outcomes:
        corrupt = self.corrupt.with_choices(states)
        clean = None if self.clean is None else self.clean.with_choices(states)
        ablation = self.ablation
        values = (
            None if ablation is None else lambda example, node: ablation.get_value(self.first_example + example, node)
        )
        each = sequential.SequentialSweep(clean, corrupt, self.cells, self.outcome_nodes, values)
        return sequential.stack_outcomes(self.outcome_nodes, [each.compute_outcomes(int(cell)) for cell in cells])


def _drop_cells(cells: PatchCells, dropped: Collection[int]) -> PatchCells:
    """The cells without the families and the paths that only some of them set."""
    entries = tuple(each for each in cells.sites if not np.isin(each.cells, list(dropped)).all())
    return replace(cells, sites=entries, paths=tuple(path for path in cells.paths if path.cell not in dropped))


def find_effective_cells(run: PatchedRun, patches: Mapping[int, Sequence[GroupPatch]]) -> IntArray:
    """The cells of which a node differs, in some example, from what it is in the corrupt run; all that set rows."""
    busy = []
    for family, several in patches.items():
        for each in several:
            unlike = torch.ones(len(each.cells), dtype=torch.bool)
            if not each.is_attention:
                unlike = (
                    (run.get_base_values(family, each) != run.get_patch_values(family, each))
                    .reshape(len(each.cells), -1)
                    .any(-1)
                    .cpu()
                )
            busy.append(each.cells[unlike].numpy())
    found: IntArray = np.unique(np.concatenate(busy)) if busy else np.zeros(0, dtype=np.int64)
    return found


def run_cells(
    batches: Sequence[SweepBatch], metric: Metric, cells: PatchCells, progress: bool | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run every cell in every example.

    Returns:
        The metric with each cell set, `[*axes, example]`; of the clean run, if there is one, and of the corrupt run,
        `[example]` each.
    """
    clean, corrupt = evaluate_base_runs(batches, metric)
    there = cells.cell_ids
    apart = np.isin(there, list(set().union(*(batch.sequential_cells for batch in batches))))
    found = torch.full((int(np.prod(cells.shape, dtype=np.int64)), len(corrupt)), torch.nan, dtype=torch.float64)
    world, memory = batches[0].corrupt.model, batches[0].memory
    each, _ = estimate_bytes(world, batches[0].needed)
    size = max(1, memory // (each * max(len(batch.corrupt) for batch in batches)))
    asked = (
        3
        * world.network.dtype.itemsize
        * sum(count_outcome_values(world, locate_node(world, node)[0]) for node in metric.nodes)
    )
    size = max(1, min(size, memory // (asked * len(corrupt))))
    hide = None if progress is None else not progress
    with tqdm(total=len(there), disable=hide, unit="cell", leave=False) as bar:
        for alone in (False, True):
            some = there[apart == alone]
            for start in range(0, len(some), size):
                chunk = some[start : start + size]
                outcomes = [batch.compute_outcomes(chunk, is_sequential=alone) for batch in batches]
                found[torch.from_numpy(chunk)] = _evaluate_metric(metric, outcomes)
                bar.update(len(chunk))
    return found.reshape(*cells.shape, -1), clean, corrupt


def evaluate_base_runs(batches: Sequence[SweepBatch], metric: Metric) -> tuple[Tensor | None, Tensor]:
    """The metric of the clean run, if there is one, and of the corrupt run: `[example]`."""
    both = [batch.compute_base_outcomes() for batch in batches]
    clean = [outcomes for _, outcomes in both if outcomes is not None]
    corrupt = _evaluate_metric(metric, [outcomes for outcomes, _ in both])[0]
    return _evaluate_metric(metric, clean)[0] if clean else None, corrupt


def _evaluate_metric(metric: Metric, batch_outcomes: Sequence[Mapping[int, Tensor]]) -> Tensor:
    """The metric, `[cell, example]`, of the outcomes of the batches."""
    return metric({node: torch.cat([outcomes[node] for outcomes in batch_outcomes], 1) for node in metric.nodes})


@enable_gradients()
def estimate_cells(
    batches: Sequence[SweepBatch], metric: Metric, cells: PatchCells, progress: bool | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As `run_cells`, to first order: no cell is run."""
    for obstacle in batches[0].obstacles.values():
        allowed = "first_order=False, which runs each cell"
        raise BNetError("first_order", expected="cells that one batch can hold", actual=f"{obstacle}", allowed=allowed)
    clean, corrupt = evaluate_base_runs(batches, metric)
    effects = torch.zeros(int(np.prod(cells.shape, dtype=np.int64)), len(corrupt), dtype=torch.float64)
    hide = None if progress is None else not progress
    outer = _compute_outcome_gradients(batches, metric)
    for batch, of_states in zip(tqdm(batches, disable=hide, unit="part", leave=False), outer, strict=True):
        some = slice(batch.first_example, batch.first_example + len(batch.corrupt))
        for start, slopes in zip(batch.iter_base_runs(), of_states, strict=True):
            _add_effects(effects[:, some], start, slopes)
    there = torch.from_numpy(cells.cell_ids)
    if not bool(effects[there].isfinite().all()):
        wanted = "a metric with a finite slope at the corrupt run, for first_order=True"
        raise BNetError("metric", expected=wanted, actual="NaN or infinity", allowed="first_order=False")
    found = torch.full_like(effects, torch.nan)
    found[there] = corrupt + effects[there]
    return found.reshape(*cells.shape, -1), clean, corrupt


def _compute_outcome_gradients(batches: Sequence[SweepBatch], metric: Metric) -> list[list[Outcomes]]:
    """How the metric, summed over examples, changes with each outcome: of each batch, in each state of the choices."""
    leaves = [
        [
            {node: value.detach().requires_grad_() for node, value in start.run.compute_base_outcomes().items()}
            for start in batch.iter_base_runs()
        ]
        for batch in batches
    ]
    averaged = [batch.marginalize(states) for batch, states in zip(batches, leaves, strict=True)]
    told = metric.evaluate_with_grad({node: torch.cat([each[node] for each in averaged], 1) for node in metric.nodes})
    if not told.requires_grad:
        wanted = "a metric with a gradient (torch operations on its nodes), for first_order=True"
        raise BNetError("metric", expected=wanted, actual="numbers without one", allowed="first_order=False")
    flat = [value for states in leaves for each in states for value in each.values()]
    slopes = iter(torch.autograd.grad(told.sum(), flat, materialize_grads=True))
    return [[{node: next(slopes) for node in each} for each in states] for states in leaves]


def _add_effects(effects: Tensor, base_run: BaseRun, outcome_gradients: Mapping[int, Tensor]) -> None:
    """Add `<dm/dz, clean z - corrupt z>` of each cell, `[cell, example]`, given the slopes of the outcomes."""
    run = base_run.run
    outcomes = {node: value for node, value in run.compute_base_outcomes().items() if value.requires_grad}
    if not outcomes:
        return
    ends, given = list(outcomes.values()), [outcome_gradients[node] for node in outcomes]
    inner = torch.autograd.grad(ends, list(run.perturbations.values()), given, materialize_grads=True)
    for family, slope in zip(run.perturbations, inner, strict=True):
        for setting in base_run.patches[family]:
            if setting.is_attention:
                told = _estimate_attention_effects(run, family, setting, slope)
            else:
                by = run.get_patch_values(family, setting) - run.get_base_values(family, setting).detach()
                told = (gather_nodes(run, family, slope.to(by.device), setting.nodes) * by).flatten(2).sum(-1)
            effects.index_add_(0, setting.cells, told.double().cpu().expand(-1, effects.shape[1]))


def _estimate_attention_effects(run: PatchedRun, group: int, patch: GroupPatch, gradient: Tensor) -> Tensor:
    """The same where `P(j | i)` is set, of which the mix is a linear function: `[k, example]`."""
    member, course = run.specs[group], run.base
    with torch.no_grad():
        weights, parents = compute_attention_weights(course, member)
    weights = (
        weights.expand(len(gradient), *get_layout_shape(course, member), weights.shape[-1]).clone().requires_grad_()
    )
    mix = member.tpm.mix(weights, *(parent.detach() for parent in parents))  # type: ignore[attr-defined]
    (steep,) = torch.autograd.grad((course.layout.pad_dims(mix, 1) * gradient.to(mix.device)).sum(), weights)
    each = steep * (patch.source.to(steep.device) - weights.detach())
    told = gather_nodes(run, group, each, patch.nodes)  # [k, example, word read]
    return told.sum(-1) if patch.read_words is None else told[torch.arange(len(told)), :, patch.read_words]
