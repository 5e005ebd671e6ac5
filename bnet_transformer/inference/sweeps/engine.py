"""The sweep: for all cells, in chunks that fit in memory, what the metric comes to in the run with the cell set.

A cell that sets nodes to what they are anyway is the corrupt run, and is not run again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer.errors import ReadingError
from bnet_transformer.inference.sweeps import arrows, sequential
from bnet_transformer.inference.sweeps.ablation import Ablation
from bnet_transformer.inference.sweeps.cells import Cells, Entries, Ids
from bnet_transformer.inference.sweeps.choices import Choices, choices_of
from bnet_transformer.inference.sweeps.examples import Examples
from bnet_transformer.inference.sweeps.metric import Metric
from bnet_transformer.inference.sweeps.needed_positions import bytes_of, numbers_in
from bnet_transformer.inference.sweeps.patched_run import Run, setting_of
from bnet_transformer.inference.sweeps.sparse_update import Setting
from bnet_transformer.world import where


@dataclass
class Start:
    """The corrupt run in one joint state of the choices, and all that cells set in it."""

    run: Run
    settings: dict[int, list[Setting]]
    busy: Ids  # the cells that set a node to what it is not

    def outcomes(self, cells: Ids) -> dict[int, Tensor]:
        """The outcomes of some cells; those that are not busy set nothing."""
        place = np.full(int(cells.max()) + 1, -1)
        place[cells] = np.where(np.isin(cells, self.busy), np.arange(len(cells)), -1)
        parts = {family: [_among(each, place) for each in told] for family, told in self.settings.items()}
        settings = {family: [part for part in told if len(part.cell)] for family, told in parts.items()}
        return self.run.outcomes_of(len(cells), settings)


def _among(setting: Setting, place: Ids) -> Setting:
    """What some cells set, numbered by their place; those at -1 are left out."""
    number = np.full(len(setting.cell), -1)
    cell = setting.cell.numpy()
    inside = cell < len(place)
    number[inside] = place[cell[inside]]
    keep = torch.from_numpy(number >= 0)
    node = tuple(each[keep] for each in setting.node)
    read = None if setting.read is None else setting.read[keep]
    source = setting.source[:, keep] if setting.own else setting.source
    return replace(setting, cell=torch.from_numpy(number)[keep], node=node, source=source, read=read)


@dataclass
class Swept:
    """One batch of examples: it answers for cells, all at once where that can be, else one at a time."""

    clean: Examples | None
    corrupt: Examples
    cells: Cells
    nodes: tuple[int, ...]
    memory: int
    ablation: Ablation | None = None
    first: int = 0  # the number of the first example in the sweep
    keep: bool = True
    first_order: bool = False
    choices: Choices = field(init=False)
    one_by_one: bool = field(init=False, default=False)
    _kept: list[Start] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.choices = choices_of(self.clean, self.corrupt, self._touched(), self.nodes)

    def outcomes(self, cells: Ids) -> dict[int, Tensor]:
        """The outcomes of some cells, choices averaged: `[cell, example, *shape]` of each node."""
        if not self.one_by_one:
            try:
                return self.averaged([start.outcomes(cells) for start in self.starts()])
            except ReadingError:
                self.one_by_one, self._kept = True, []
        return self.averaged([self._one_by_one(states, cells) for states in self.choices])

    def starts(self) -> Iterator[Start]:
        """Where the runs start from, for each state of the choices: made once, if there is room to keep them."""
        if self._kept:
            yield from self._kept
            return
        made = []
        for states in self.choices:
            start = self._start(states)
            if self.keep:
                made.append(start)
            yield start
        self._kept = made

    def corrupt_outcomes(self) -> dict[int, Tensor]:
        """The outcomes of the corrupt run, `[1, example, *shape]`."""
        return self._of(self.corrupt)

    def clean_outcomes(self) -> dict[int, Tensor]:
        """The outcomes of the clean run, `[1, example, *shape]`."""
        assert self.clean is not None
        return self._of(self.clean)

    def _of(self, examples: Examples) -> dict[int, Tensor]:
        try:
            if examples is self.corrupt:
                return self.averaged([start.run.corrupt() for start in self.starts()])
            return self.averaged([Run(examples.set_to(states), self.nodes).corrupt() for states in self.choices])
        except ReadingError:
            several = (examples.set_to(states).worlds for states in self.choices)
            each = [[sequential.outcomes(examples.module, world, self.nodes) for world in worlds] for worlds in several]
            return self.averaged([sequential.stacked(self.nodes, [rows]) for rows in each])

    def averaged(self, found: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
        """The outcomes over the states of the choices."""
        world = self.corrupt.world
        discrete = {node: where(world, node)[0].tpm.kind == "discrete" and node not in world.do for node in self.nodes}
        return {n: self.choices.averaged([each[n] for each in found], discrete=discrete[n]) for n in self.nodes}

    def _touched(self) -> list[int]:
        """A node of each family that is set, and those that paths start from."""
        offsets = self.corrupt.world.ground.offsets
        found = [int(offsets[each.family]) + int(node) for each in self.cells.entries for node in np.unique(each.node)]
        return found + [route.nodes[0] for route in self.cells.routes]

    def _start(self, states: Mapping[int, Tensor]) -> Start:
        corrupt = self.corrupt.set_to(states)
        ground, graph = corrupt.world.ground, corrupt.world.network.graph
        on_routes = {ground.family_of(node).index for route in self.cells.routes for node in route.nodes}
        above = {bundle.parent for index in on_routes for bundle in graph.into[index]}
        entries = {each.family for each in self.cells.entries if not each.rows}
        slopes = frozenset(each.family for each in self.cells.entries) if self.first_order else frozenset()
        run = Run(corrupt, self.nodes, frozenset({*on_routes, *above, *entries}), slopes)
        settings: dict[int, list[Setting]] = {}
        if self.ablation is not None:
            for each in self.cells.entries:
                settings.setdefault(each.family, []).append(self._ablated(run, each, self.ablation))
        else:
            assert self.clean is not None
            readings = {each.family for each in self.cells.entries if each.rows}
            _check_reads(self.clean, readings)
            clean = self.clean.set_to(states).course(entries | on_routes | above, readings)
            for each in self.cells.entries:
                settings.setdefault(each.family, []).append(setting_of(run, clean, each))
            if self.cells.routes:
                for family, told in arrows.settings_of(run, clean, self.cells.routes, self.memory).items():
                    settings.setdefault(family, []).extend(told)
        return Start(run, settings, busy_cells(run, settings))

    def _ablated(self, run: Run, entries: Entries, ablation: Ablation) -> Setting:
        """What an ablation sets in a family."""
        nodes, which = np.unique(entries.node, return_inverse=True)
        source = ablation.values(run, self.first, entries.family, nodes)[:, torch.from_numpy(which)]
        found = setting_of(run, run.base, replace(entries, rows=False))
        return replace(found, source=source.to(found.source), own=True)

    def _ablated_value(self, example: int, node: int) -> Tensor:
        assert self.ablation is not None
        return self.ablation.value(self.first + example, node)

    def _one_by_one(self, states: Mapping[int, Tensor], cells: Ids) -> dict[int, Tensor]:
        corrupt = self.corrupt.set_to(states)
        clean = None if self.clean is None else self.clean.set_to(states)
        each = sequential.Cases(clean, corrupt, self.cells, None if self.ablation is None else self._ablated_value)
        rows = [
            [sequential.outcomes(corrupt.module, world, self.nodes) for world in each.worlds(int(c))] for c in cells
        ]
        return sequential.stacked(self.nodes, rows)


def _check_reads(examples: Examples, families: Collection[int]) -> None:
    """Refuse rows of families some of whose nodes are set: those have other rows, or none."""
    ground = examples.world.ground
    for index in families:
        if ground.cut_in(index) or ground.rows_in(index):
            name = ground.folded.families[index].name
            raise ReadingError(name, expected="nodes that read", got="some that are set")


def busy_cells(run: Run, settings: Mapping[int, Sequence[Setting]]) -> Ids:
    """The cells of which a node differs, in some example, from what it is in the corrupt run; all that set rows."""
    busy = []
    for family, told in settings.items():
        for each in told:
            unlike = torch.ones(len(each.cell), dtype=torch.bool)
            if not each.rows:
                unlike = (run.at(family, each) != run.told(family, each)).reshape(len(each.cell), -1).any(-1).cpu()
            busy.append(each.cell[unlike].numpy())
    found: Ids = np.unique(np.concatenate(busy))
    return found


def swept(
    batches: Sequence[Swept], metric: Metric, cells: Cells, memory: int, progress: bool | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The metric with each cell set, `[*axes, example]`; of the clean run, and of the corrupt run, `[example]`."""
    clean, corrupt = both_runs(batches, metric)
    there = cells.there
    found = torch.full((int(np.prod(cells.shape, dtype=np.int64)), len(corrupt)), torch.nan, dtype=torch.float64)
    each, _ = bytes_of(batches[0].corrupt, metric.nodes)
    size = max(1, memory // (each * max(len(batch.corrupt) for batch in batches)))
    size = max(1, min(size, memory // (_told(batches[0], metric) * len(corrupt))))
    hide = None if progress is None else not progress
    with tqdm(total=len(there), disable=hide, unit="cell", leave=False) as bar:
        for start in range(0, len(there), size):
            chunk = there[start : start + size]
            found[torch.from_numpy(chunk)] = _measured(metric, [batch.outcomes(chunk) for batch in batches])
            bar.update(len(chunk))
    return found.reshape(*cells.shape, -1), clean, corrupt


def both_runs(batches: Sequence[Swept], metric: Metric) -> tuple[Tensor | None, Tensor]:
    """The metric of the clean run, if there is one, and of the corrupt run: `[example]`."""
    corrupt = _measured(metric, [batch.corrupt_outcomes() for batch in batches])[0]
    if batches[0].clean is None:
        return None, corrupt
    return _measured(metric, [batch.clean_outcomes() for batch in batches])[0], corrupt


def _measured(metric: Metric, each: Sequence[Mapping[int, Tensor]]) -> Tensor:
    """The metric, `[cell, example]`, of what the batches came to."""
    return metric({node: torch.cat([found[node] for found in each], 1) for node in metric.nodes})


def _told(batch: Swept, metric: Metric) -> int:
    """What a metric is told of one cell of one example, in bytes."""
    world = batch.corrupt.world
    return 3 * world.network.dtype.itemsize * sum(numbers_in(world, where(world, node)[0]) for node in metric.nodes)
