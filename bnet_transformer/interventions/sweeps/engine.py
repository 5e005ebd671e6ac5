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
from bnet_transformer.inference.query import Obstacle
from bnet_transformer.interventions.sweeps import sequential
from bnet_transformer.interventions.sweeps.ablation import Ablation
from bnet_transformer.interventions.sweeps.cell_spec import Cells, Entries, Ids
from bnet_transformer.interventions.sweeps.examples import Choices, Examples, Metric, choices_of
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun, picked, setting_of, some_of
from bnet_transformer.interventions.sweeps.routing import find_obstacle_of_all, find_obstacles, sources_of
from bnet_transformer.interventions.sweeps.sparse_update import (
    NeededPositions,
    Setting,
    bytes_of,
    find_needed_positions,
    full_shape,
    numbers_in,
    weights_of,
)
from bnet_transformer.reference import locate_node

Outcomes = dict[int, Tensor]


@dataclass
class Start:
    """The corrupt run in one joint state of the choices, what cells set in it, and the outcomes of the clean run."""

    run: PatchedRun
    settings: dict[int, list[Setting]]
    busy: Ids  # the cells that set a node to what it is not
    clean: Outcomes | None

    def outcomes(self, cells: Ids) -> Outcomes:
        """The outcomes of some cells; those that are not busy set nothing."""
        busy = np.isin(cells, self.busy)
        return self.run.outcomes(len(cells), some_of(self.settings, cells[busy], np.flatnonzero(busy)))


@dataclass
class ExampleBatch:
    """Examples that one run holds, and the outcomes of cells in them.

    Args:
        clean: The clean sentences, None for an ablation.
        corrupt: The corrupt sentences, as many.
        cells: What each cell sets.
        nodes: Ground ids of the nodes that the metric reads.
        memory: Bytes that may be used at once.
        ablation: The values that replace clean ones.
        first: The number of the first example in the sweep.
        keep: True where memory holds the runs of all batches, so that they are made once.
        first_order: True where effects are estimated from slopes and no cell runs.
    """

    clean: Examples | None
    corrupt: Examples
    cells: Cells
    nodes: tuple[int, ...]
    memory: int
    ablation: Ablation | None = None
    first: int = 0
    keep: bool = True
    first_order: bool = False
    choices: Choices = field(init=False)
    needed: NeededPositions = field(init=False)
    clean_needed: NeededPositions = field(init=False)
    has_run: bool = field(init=False)
    without_source: dict[int, Obstacle] = field(init=False)  # cells that take no values from a common run
    alone: dict[int, Obstacle] = field(init=False)  # these, and the cells whose changes are computed alone
    apart: set[int] = field(init=False)  # of them, those that set something to another value
    _kept: list[Start] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        touched = [*self.cells.nodes_set(self.corrupt.world), *(path.nodes[0] for path in self.cells.paths)]
        self.choices = choices_of(self.clean, self.corrupt, touched, self.nodes)
        states = next(iter(self.choices))  # the structure is the same in every state
        sides = [side.set_to(states) for side in (self.corrupt, self.clean) if side is not None]
        needed = [find_needed_positions(sides[0].world, self.nodes)]
        for side in sides[1:]:
            same = side.world.do.keys() == sides[0].world.do.keys()
            needed.append(needed[0] if same else find_needed_positions(side.world, self.nodes))
        self.needed, self.clean_needed = needed[0], needed[-1]
        sides_needed = list(zip(sides, needed, strict=True))
        everywhere = find_obstacle_of_all(sides_needed)
        self.has_run = everywhere is None
        if everywhere is None:
            self.without_source, changes = find_obstacles(sides_needed, self.cells, first_order=self.first_order)
            self.alone = {**changes, **self.without_source}
        else:
            self.alone = self.without_source = dict.fromkeys(self.cells.there.tolist(), everywhere)
        self.apart = set(self.alone)

    def outcomes(self, cells: Ids, *, alone: bool) -> Outcomes:
        """The outcomes of some cells, in one run or each in its own, choices averaged: `[cell, example, *shape]`."""
        if alone:
            return self.averaged([self._one_by_one(states, cells) for states in self.choices])
        return self.averaged([start.outcomes(cells) for start in self.starts()])

    def starts(self) -> Iterable[Start]:
        """Where the runs start from, for each state of the choices: made once, if memory holds them."""
        if self.keep and not self._kept:
            self._kept = [self._start(states) for states in self.choices]
        return self._kept or map(self._start, self.choices)

    def base_outcomes(self) -> tuple[Outcomes, Outcomes | None]:
        """The outcomes of the corrupt run, and of the clean run if there is one: `[1, example, *shape]` each."""
        if not self.has_run:
            clean = None if self.clean is None else self._of_each(self.clean)
            return self._of_each(self.corrupt), clean
        corrupts, cleans, busy = list[Outcomes](), list[Outcomes](), set[int]()
        for start in self.starts():
            corrupts.append(start.run.base_outcomes())
            cleans += [] if start.clean is None else [start.clean]
            busy.update(start.busy.tolist())
        # What a cell changes is no obstacle if it sets nothing to another value.
        self.apart = {*self.without_source, *(self.alone.keys() & busy)}
        return self.averaged(corrupts), self.averaged(cleans) if cleans else None

    def averaged(self, outcomes: Sequence[Mapping[int, Tensor]]) -> Outcomes:
        """The outcomes over the states of the choices."""
        world = self.corrupt.world
        found = {}
        for node in self.nodes:
            discrete = locate_node(world, node)[0].tpm.kind == "discrete" and node not in world.do
            found[node] = self.choices.averaged([each[node] for each in outcomes], discrete=discrete)
        return found

    def _start(self, states: Mapping[int, Tensor]) -> Start:
        """The runs in one state of the choices. One clean run gives both its outcomes and the values that cells set."""
        corrupt = self.corrupt.set_to(states)
        cells = _without(self.cells, self.without_source)
        sources = frozenset(sources_of(corrupt.world, cells) - {each.family for each in cells.entries if each.rows})
        slopes = frozenset(each.family for each in cells.entries) if self.first_order else frozenset()
        run = PatchedRun(corrupt, self.needed, sources, slopes=slopes)
        settings: dict[int, list[Setting]] = {}
        outcomes = None
        if self.ablation is not None:
            for each in cells.entries:
                settings.setdefault(each.family, []).append(self._ablated(run, each, self.ablation))
        else:
            assert self.clean is not None
            clean = self.clean.set_to(states)
            readings = frozenset(each.family for each in cells.entries if each.rows)
            clean_run = PatchedRun(clean, self.clean_needed, sources, readings)
            outcomes = clean_run.base_outcomes()
            for each in cells.entries:
                settings.setdefault(each.family, []).append(setting_of(run, clean_run.base, each))
            if cells.paths:
                for family, several in run.along_paths(clean_run.base, cells.paths, self.memory).items():
                    settings.setdefault(family, []).extend(several)
        return Start(run, settings, busy_cells(run, settings), outcomes)

    def _ablated(self, run: PatchedRun, entries: Entries, ablation: Ablation) -> Setting:
        """What an ablation sets in a family."""
        nodes, which = np.unique(entries.node, return_inverse=True)
        source = ablation.values(run, self.first, entries.family, nodes)[:, torch.from_numpy(which)]
        found = setting_of(run, run.base, replace(entries, rows=False))
        return replace(found, source=source.to(found.source), own=True)

    def _of_each(self, examples: Examples) -> Outcomes:
        """The outcomes of sentences, each run by itself: `[1, example, *shape]`."""
        sides = (examples.set_to(states) for states in self.choices)
        each = [[sequential.outcomes(side.module, world, self.nodes) for world in side.worlds] for side in sides]
        return self.averaged([sequential.stacked(self.nodes, [rows]) for rows in each])

    def _one_by_one(self, states: Mapping[int, Tensor], cells: Ids) -> Outcomes:
        corrupt = self.corrupt.set_to(states)
        clean = None if self.clean is None else self.clean.set_to(states)
        ablation = self.ablation
        values = None if ablation is None else lambda example, node: ablation.value(self.first + example, node)
        each = sequential.Cases(clean, corrupt, self.cells, self.nodes, values)
        return sequential.stacked(self.nodes, [each.outcomes(int(cell)) for cell in cells])


def _without(cells: Cells, gone: Collection[int]) -> Cells:
    """The cells without the families and the paths that only some of them set."""
    entries = tuple(each for each in cells.entries if not np.isin(each.cell, list(gone)).all())
    return replace(cells, entries=entries, paths=tuple(path for path in cells.paths if path.cell not in gone))


def busy_cells(run: PatchedRun, settings: Mapping[int, Sequence[Setting]]) -> Ids:
    """The cells of which a node differs, in some example, from what it is in the corrupt run; all that set rows."""
    busy = []
    for family, several in settings.items():
        for each in several:
            unlike = torch.ones(len(each.cell), dtype=torch.bool)
            if not each.rows:
                unlike = (run.at(family, each) != run.value_of(family, each)).reshape(len(each.cell), -1).any(-1).cpu()
            busy.append(each.cell[unlike].numpy())
    found: Ids = np.unique(np.concatenate(busy)) if busy else np.zeros(0, dtype=np.int64)
    return found


def run_cells(
    batches: Sequence[ExampleBatch], metric: Metric, cells: Cells, progress: bool | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run every cell in every example.

    Returns:
        The metric with each cell set, `[*axes, example]`; of the clean run, if there is one, and of the corrupt run,
        `[example]` each.
    """
    clean, corrupt = metric_of_base_runs(batches, metric)
    there = cells.there
    apart = np.isin(there, list(set().union(*(batch.apart for batch in batches))))
    found = torch.full((int(np.prod(cells.shape, dtype=np.int64)), len(corrupt)), torch.nan, dtype=torch.float64)
    world, memory = batches[0].corrupt.world, batches[0].memory
    each, _ = bytes_of(world, batches[0].needed)
    size = max(1, memory // (each * max(len(batch.corrupt) for batch in batches)))
    asked = (
        3 * world.network.dtype.itemsize * sum(numbers_in(world, locate_node(world, node)[0]) for node in metric.nodes)
    )
    size = max(1, min(size, memory // (asked * len(corrupt))))
    hide = None if progress is None else not progress
    with tqdm(total=len(there), disable=hide, unit="cell", leave=False) as bar:
        for alone in (False, True):
            some = there[apart == alone]
            for start in range(0, len(some), size):
                chunk = some[start : start + size]
                outcomes = [batch.outcomes(chunk, alone=alone) for batch in batches]
                found[torch.from_numpy(chunk)] = _measured(metric, outcomes)
                bar.update(len(chunk))
    return found.reshape(*cells.shape, -1), clean, corrupt


def metric_of_base_runs(batches: Sequence[ExampleBatch], metric: Metric) -> tuple[Tensor | None, Tensor]:
    """The metric of the clean run, if there is one, and of the corrupt run: `[example]`."""
    both = [batch.base_outcomes() for batch in batches]
    clean = [outcomes for _, outcomes in both if outcomes is not None]
    corrupt = _measured(metric, [outcomes for outcomes, _ in both])[0]
    return _measured(metric, clean)[0] if clean else None, corrupt


def _measured(metric: Metric, each: Sequence[Mapping[int, Tensor]]) -> Tensor:
    """The metric, `[cell, example]`, of the outcomes of the batches."""
    return metric({node: torch.cat([outcomes[node] for outcomes in each], 1) for node in metric.nodes})


@enable_gradients()
def estimate_cells(
    batches: Sequence[ExampleBatch], metric: Metric, cells: Cells, progress: bool | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As `run_cells`, to first order: no cell is run."""
    for obstacle in batches[0].alone.values():
        allowed = "first_order=False, which runs each cell"
        raise BNetError("first_order", expected="cells that one batch can hold", actual=f"{obstacle}", allowed=allowed)
    clean, corrupt = metric_of_base_runs(batches, metric)
    effects = torch.zeros(int(np.prod(cells.shape, dtype=np.int64)), len(corrupt), dtype=torch.float64)
    hide = None if progress is None else not progress
    outer = _slopes_of_outcomes(batches, metric)
    for batch, of_states in zip(tqdm(batches, disable=hide, unit="part", leave=False), outer, strict=True):
        some = slice(batch.first, batch.first + len(batch.corrupt))
        for start, slopes in zip(batch.starts(), of_states, strict=True):
            _add_effects(effects[:, some], start, slopes)
    there = torch.from_numpy(cells.there)
    if not bool(effects[there].isfinite().all()):
        wanted = "a metric with a finite slope at the corrupt run, for first_order=True"
        raise BNetError("metric", expected=wanted, actual="NaN or infinity", allowed="first_order=False")
    found = torch.full_like(effects, torch.nan)
    found[there] = corrupt + effects[there]
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
        raise BNetError("metric", expected=wanted, actual="numbers without one", allowed="first_order=False")
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
    with torch.no_grad():
        weights, parents = weights_of(course, member)
    weights = weights.expand(len(slope), *full_shape(course, member), weights.shape[-1]).clone().requires_grad_()
    mix = member.tpm.mix(weights, *(parent.detach() for parent in parents))  # type: ignore[attr-defined]
    (steep,) = torch.autograd.grad((course.layout.pad_dims(mix, 1) * slope.to(mix.device)).sum(), weights)
    each = steep * (setting.source.to(steep.device) - weights.detach())
    told = picked(run, family, each, setting.node)  # [k, example, word read]
    return told.sum(-1) if setting.read is None else told[torch.arange(len(told)), :, setting.read]
