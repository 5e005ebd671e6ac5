"""The engine of a sweep: the metric of all cells, in chunks that fit in memory.

The *base* run is patched, and the *source* run provides the values: the corrupt and the clean run, or the reverse with
`direction="noise"`. A cell that sets its nodes to their values in the base run is not run again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.arrays import IntArray
from bnet_transformer._core.cancellation import check_cancelled
from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.inference.obstacles import Obstacle
from bnet_transformer.interventions.edges.cells import EdgeCells
from bnet_transformer.interventions.sweeps import sequential
from bnet_transformer.interventions.sweeps.ablation import Ablation
from bnet_transformer.interventions.sweeps.alignment import WordAlignment
from bnet_transformer.interventions.sweeps.cell_spec import PatchCells, PatchSites, group_paths
from bnet_transformer.interventions.sweeps.choices import EnumeratedChoices, enumerate_choices
from bnet_transformer.interventions.sweeps.edge_patches import (
    compute_edge_patches,
    find_effective_edges,
    get_writer_values,
    spread_nodes,
)
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.interventions.sweeps.interpolation import (
    InputDifference,
    find_input_difference,
    find_interpolation_groups,
)
from bnet_transformer.interventions.sweeps.metric import Metric
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun, build_patch, select_cells
from bnet_transformer.interventions.sweeps.routing import (
    find_obstacles,
    find_set_groups,
    find_shared_obstacle,
    find_source_groups,
)
from bnet_transformer.interventions.sweeps.sparse_update import (
    GroupPatch,
    NeededPositions,
    count_outcome_values,
    estimate_bytes,
    find_needed_positions,
)
from bnet_transformer.reference import locate_node

Outcomes = dict[int, Tensor]


@dataclass(frozen=True)
class SweepOptions:
    """How the cells of a sweep are computed.

    Args:
        memory: The maximum number of bytes that are used at once.
        first_order: Whether effects are estimated from gradients and no cell is run.
        steps: The number of interpolated runs whose gradients are averaged; 0 for the gradient at the base run.
        is_noise: Whether corrupt values are patched into the clean run.
        convention: The points at which gradients are averaged: those of `interpolation`, or of a package.
    """

    memory: int
    first_order: bool = False
    steps: int = 0
    is_noise: bool = False
    convention: str | None = None

    @property
    def side_names(self) -> tuple[str, str]:
        """The names of the source and of the base sentences."""
        return ("corrupt", "clean") if self.is_noise else ("clean", "corrupt")


@dataclass
class BaseRun:
    """The base run, the patches of cells and the outcomes of the source run, in one joint state of the choices."""

    run: PatchedRun
    patches: dict[int, list[GroupPatch]]
    effective_cells: IntArray  # the cells that change the value of a node
    source: ExecutionState | None
    source_outcomes: Outcomes | None
    difference: InputDifference | None = None  # between the inputs of both runs, for integrated gradients
    edges: EdgeCells | None = None
    differences: dict[int, Tensor] = field(default_factory=dict)  # what each group of writers writes, source minus base

    def compute_outcomes(self, cells: IntArray) -> Outcomes:
        """The outcomes of some cells, `[cell, example, *shape]`; cells without an effect are not patched."""
        mask = np.isin(cells, self.effective_cells)
        patches = select_cells(self.patches, cells[mask], np.flatnonzero(mask))
        if self.edges is not None:
            numbers = np.full(int(cells.max(initial=-1)) + 1, -1)
            numbers[cells[mask]] = np.flatnonzero(mask)
            inside = self.edges.select(np.isin(self.edges.cells, cells[mask])).renumber_cells(numbers)
            if len(inside.cells):
                node_patches, outcome_patches = compute_edge_patches(self.run, self.differences, inside)
                for group, sent in node_patches.items():
                    patches.setdefault(group, []).extend(sent)
                return self.run.compute_outcomes(len(cells), patches, outcome_patches)
        return self.run.compute_outcomes(len(cells), patches)


@dataclass
class ExampleBatch:
    """A batch of examples that share one run, and the outcomes of cells in them.

    Args:
        source: The sentences that provide the values; None for an ablation.
        base: The sentences that are patched, as many as the others.
        alignment: The word of the source from which each word of the base takes its values.
        cells: What each cell sets.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        options: How the cells are computed.
        ablation: The values that replace those of a source.
        first_example: The number of the first example in the sweep.
        should_cache: Whether the runs of all batches fit in memory, so that they are computed once.
    """

    source: Examples | None
    base: Examples
    alignment: WordAlignment
    cells: PatchCells
    outcome_nodes: tuple[int, ...]
    options: SweepOptions
    ablation: Ablation | None = None
    first_example: int = 0
    should_cache: bool = True
    source_outcome_nodes: tuple[int, ...] | None = field(init=False)  # None if the source has no metric
    choices: EnumeratedChoices = field(init=False)
    needed: NeededPositions = field(init=False)
    source_needed: NeededPositions = field(init=False)
    has_shared_run: bool = field(init=False)
    source_obstacles: dict[int, Obstacle] = field(init=False)  # cells whose values a shared run cannot provide
    obstacles: dict[int, Obstacle] = field(init=False)  # these, and cells whose changes a shared run cannot compute
    sequential_cells: set[int] = field(init=False)  # those of these cells that change the value of a node
    _base_runs: list[BaseRun] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        has_source = self.source is not None
        self.source_outcome_nodes = self.alignment.align_outcomes(self.outcome_nodes) if has_source else None
        self.choices = self._enumerate_choices()
        states = next(iter(self.choices))  # the structure is the same in every state
        base = self.base.with_choices(states)
        self.needed = self.source_needed = find_needed_positions(base.model, self.outcome_nodes)
        sides_needed = [(base, self.needed)]
        if self.source is not None:
            source = self.source.with_choices(states)
            if not self.alignment.is_identity or source.model.do.keys() != base.model.do.keys():
                self.source_needed = find_needed_positions(source.model, self.source_outcome_nodes or ())
            sides_needed.append((source, self.source_needed))
        shared_obstacle = find_shared_obstacle(sides_needed)
        self.has_shared_run = shared_obstacle is None
        if shared_obstacle is None:
            first_order = self.options.first_order
            self.source_obstacles, changes = find_obstacles(sides_needed, self.cells, first_order=first_order)
            self.obstacles = {**changes, **self.source_obstacles}
        else:
            self.obstacles = self.source_obstacles = dict.fromkeys(self.cells.cell_ids.tolist(), shared_obstacle)
        self.sequential_cells = set(self.obstacles)
        self._check_edges()

    def _check_edges(self) -> None:
        """Raise an error for edges that cannot share a run."""
        edges = self.cells.edges
        obstacle = None if edges is None else next((self.obstacles.get(c) for c in edges.cells.tolist()), None)
        if obstacle is not None:
            raise UnsupportedError(f"at='edges': edges cannot share a run, because {obstacle}")

    def _enumerate_choices(self) -> EnumeratedChoices:
        """The latent choices of both runs that are enumerated."""
        touched = [*self.cells.get_patched_nodes(self.base.model), *(path.nodes[0] for path in self.cells.paths)]
        if self.cells.edges is not None:
            specs, ground = self.base.model.network.specs, self.base.model.ground
            touched += [int(ground.offsets[i]) for i in self.cells.edges.targets if not specs[i].tpm.is_random]
        names = self.options.side_names
        if self.alignment.has_equal_lengths:
            return enumerate_choices(self.source, self.base, touched, self.outcome_nodes, names)
        assert self.source is not None
        choices = enumerate_choices(None, self.base, touched, self.outcome_nodes, names)
        aligned = [source for node in touched if (source := self.alignment.align_node(node)) is not None]
        source_choices = enumerate_choices(None, self.source, aligned, self.source_outcome_nodes or (), names)
        open_choices = [
            model.ground.name(n)
            for c, model in ((choices, self.base.model), (source_choices, self.source.model))
            for n in c.nodes
        ]
        if open_choices:
            reason = "sentences of unequal lengths with latent choices cannot be swept"
            raise UnsupportedError(reason, hint=f"Set {', '.join(dict.fromkeys(open_choices))} by do")
        return choices

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
        """The outcomes of the base run, and of the source run if there are any: `[1, example, *shape]` each.

        The outcomes of the source have the ids of the nodes in the base.
        """
        nodes = self.source_outcome_nodes
        if not self.has_shared_run:
            has_metric = self.source is not None and nodes is not None
            source = self._compute_base_sequentially(self.source, nodes) if has_metric else None  # type: ignore[arg-type]
            return self._compute_base_sequentially(self.base, self.outcome_nodes), source
        bases, sources, effective = list[Outcomes](), list[Outcomes](), set[int]()
        for base_run in self.iter_base_runs():
            bases.append(base_run.run.compute_base_outcomes())
            sources += [] if base_run.source_outcomes is None else [base_run.source_outcomes]
            effective.update(base_run.effective_cells.tolist())
        # An obstacle to computing the changes of a cell does not matter if the cell changes no value.
        self.sequential_cells = {*self.source_obstacles, *(self.obstacles.keys() & effective)}
        return self.marginalize(bases), self.marginalize(sources) if sources else None

    def has_log_probs(self, node: int) -> bool:
        """Whether the outcome of a node is its log probabilities."""
        return locate_node(self.base.model, node)[0].tpm.kind == "discrete" and node not in self.base.model.do

    def marginalize(self, outcomes: Sequence[Mapping[int, Tensor]]) -> Outcomes:
        """The outcomes, averaged over the joint states of the choices."""
        marginals = {}
        for node in self.outcome_nodes:
            is_discrete = self.has_log_probs(node)
            marginals[node] = self.choices.marginalize([by_node[node] for by_node in outcomes], is_discrete=is_discrete)
        return marginals

    def _build_base_run(self, states: Mapping[int, Tensor]) -> BaseRun:
        """Build the runs in one joint state of the choices; one source run has outcomes and the values to patch."""
        base, first_order = self.base.with_choices(states), self.options.first_order
        cells = _drop_cells(self.cells, self.source_obstacles)
        sources = frozenset(
            find_source_groups(base.model, cells) - {sites.group for sites in cells.sites if sites.is_attention}
        )
        if self.options.steps:
            models = [base.model, *([] if self.source is None else [self.source.model])]
            sources |= find_interpolation_groups(models, self.needed)
        gradient_groups = self._find_gradient_groups(cells) if first_order else frozenset()
        run = PatchedRun(base, self.needed, sources, gradient_groups=gradient_groups)
        patches: dict[int, list[GroupPatch]] = {}
        if self.ablation is not None:
            for sites in cells.sites:
                patches.setdefault(sites.group, []).append(self._build_ablation_patch(run, sites, self.ablation))
            return self._add_edges(BaseRun(run, patches, find_effective_cells(run, patches), None, None), cells.edges)
        assert self.source is not None
        attention_groups = frozenset(sites.group for sites in cells.sites if sites.is_attention)
        source_run = PatchedRun(self.source.with_choices(states), self.source_needed, sources, attention_groups)
        source, nodes, outcomes = source_run.base, self.source_outcome_nodes, None
        if nodes is not None:
            by_node = source_run.compute_base_outcomes()
            outcomes = {node: by_node[peer] for node, peer in zip(self.outcome_nodes, nodes, strict=True)}
        for sites in cells.sites:
            patches.setdefault(sites.group, []).append(build_patch(run, source, sites, self.alignment))
        if cells.paths and not first_order:
            with torch.no_grad():
                sent = run.patch_paths(
                    group_paths(cells.paths),
                    lambda sites: build_patch(run, source, sites, self.alignment),
                    self.options.memory,
                )
            for group, group_patches in sent.items():
                patches.setdefault(group, []).extend(group_patches)
        difference = None
        if self.options.steps:
            difference = find_input_difference(run, source, source_run.examples, self.alignment)
        effective = find_effective_cells(run, patches)
        return self._add_edges(BaseRun(run, patches, effective, source, outcomes, difference), cells.edges)

    def _find_gradient_groups(self, cells: PatchCells) -> frozenset[int]:
        """The groups at which a gradient is needed; a readout has the gradient of the metric itself."""
        groups = find_set_groups(self.base.model, cells)
        if cells.edges is not None:
            readouts = {self.base.model.ground.group_of(node).index for node in self.outcome_nodes}
            groups -= readouts - {sites.group for sites in cells.sites}
        return frozenset(groups)

    @torch.no_grad()
    def _add_edges(self, base_run: BaseRun, edges: EdgeCells | None) -> BaseRun:
        """A base run with the differences of the writers of edges."""
        if edges is None:
            return base_run
        run = base_run.run
        differences = {}
        for w in edges.writers:
            base = get_writer_values(edges.structure, run.base, w)
            if base_run.source is not None:
                differences[w] = get_writer_values(edges.structure, base_run.source, w) - base
                continue
            writer = edges.structure.writer_groups[w]
            if writer.is_part or self.ablation is None:
                hint = "Use sentences on both sides, or name edges of other writers"
                name = writer.spec.group.name
                raise UnsupportedError(f"at='edges': an ablation cannot set a part of {name}", hint=hint)
            index = writer.spec.group.index
            nodes = np.arange(len(run.examples.model.ground.select_nodes(writer.spec.group)))
            values = self.ablation.get_values(run, self.first_example, index, nodes)
            differences[w] = spread_nodes(run, index, values.to(base)) - base
        effective = np.union1d(base_run.effective_cells, find_effective_edges(run, differences, edges))
        return replace(base_run, edges=edges, differences=differences, effective_cells=effective)

    def _build_ablation_patch(self, run: PatchedRun, sites: PatchSites, ablation: Ablation) -> GroupPatch:
        """The patch of an ablation in one node group."""
        nodes, inverse = np.unique(sites.nodes, return_inverse=True)
        source = ablation.get_values(run, self.first_example, sites.group, nodes)[:, torch.from_numpy(inverse)]
        patch = build_patch(run, run.base, replace(sites, is_attention=False))
        return replace(patch, source=source.to(patch.source), is_per_node=True)

    def _compute_base_sequentially(self, examples: Examples, nodes: Sequence[int]) -> Outcomes:
        """The outcomes of sentences that are run one at a time, by the ids of the base: `[1, example, *shape]`."""
        sides = (examples.with_choices(states) for states in self.choices)
        by_state = [[sequential.compute_outcomes(side.module, model, nodes) for model in side.models] for side in sides]
        return self.marginalize([sequential.stack_outcomes(self.outcome_nodes, [rows]) for rows in by_state])

    def _compute_cells_sequentially(self, states: Mapping[int, Tensor], cells: IntArray) -> Outcomes:
        """The outcomes of cells that run one at a time: `[cell, example, *shape]`."""
        base = self.base.with_choices(states)
        source = None if self.source is None else self.source.with_choices(states)
        ablation = self.ablation
        values = (
            None if ablation is None else lambda example, node: ablation.get_value(self.first_example + example, node)
        )
        runner = sequential.SequentialSweep(source, base, self.alignment, self.cells, self.outcome_nodes, values)
        return sequential.stack_outcomes(self.outcome_nodes, [runner.compute_outcomes(int(cell)) for cell in cells])


def _drop_cells(cells: PatchCells, dropped: Collection[int]) -> PatchCells:
    """The cells without the sites and the paths of dropped cells."""
    remaining = tuple(sites for sites in cells.sites if not np.isin(sites.cells, list(dropped)).all())
    return replace(  # edges are never dropped: an obstacle to an edge is an error
        cells, sites=remaining, paths=tuple(path for path in cells.paths if path.cell not in dropped)
    )


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


@dataclass(frozen=True)
class CellOutcomes:
    """The metric of the runs of a sweep.

    Args:
        values: The metric with each cell patched, `[*axes, example]`.
        source: The metric of the source run, `[example]`; None without one.
        base: The metric of the base run, `[example]`.
        is_stationary: Whether the gradient of the metric from which the values are estimated is zero up to rounding,
            `[example]`; False for values of runs.
    """

    values: Tensor
    source: Tensor | None
    base: Tensor
    is_stationary: Tensor


def run_cells(
    batches: Sequence[ExampleBatch], metric: Metric, cells: PatchCells, progress: bool | None
) -> CellOutcomes:
    """Run every cell in every example."""
    source, base = evaluate_base_runs(batches, metric)
    cell_ids = cells.cell_ids
    is_isolated = np.isin(cell_ids, list(set().union(*(batch.sequential_cells for batch in batches))))
    values = torch.full((int(np.prod(cells.shape, dtype=np.int64)), len(base)), torch.nan, dtype=torch.float64)
    model, memory = batches[0].base.model, batches[0].options.memory
    cell_bytes, _ = estimate_bytes(model, batches[0].needed)
    size = max(1, memory // (cell_bytes * max(len(batch.base) for batch in batches)))
    outcome_bytes = (
        3
        * model.network.dtype.itemsize
        * sum(count_outcome_values(model, locate_node(model, node)[0]) for node in metric.nodes)
    )
    size = max(1, min(size, memory // (outcome_bytes * len(base))))
    hide = None if progress is None else not progress
    with tqdm(total=len(cell_ids), disable=hide, unit="cell", leave=False) as bar:
        for is_sequential in (False, True):
            selected = cell_ids[is_isolated == is_sequential]
            for start in range(0, len(selected), size):
                check_cancelled()
                chunk = selected[start : start + size]
                outcomes = [batch.compute_outcomes(chunk, is_sequential=is_sequential) for batch in batches]
                values[torch.from_numpy(chunk)] = evaluate_metric(metric, outcomes)
                bar.update(len(chunk))
    is_stationary = torch.zeros(len(base), dtype=torch.bool)
    return CellOutcomes(values.reshape(*cells.shape, -1), source, base, is_stationary)


def evaluate_base_runs(batches: Sequence[ExampleBatch], metric: Metric) -> tuple[Tensor | None, Tensor]:
    """The metric of the source run, if it has one, and of the base run: `[example]`."""
    base_outcomes = [batch.compute_base_outcomes() for batch in batches]
    sources = [outcomes for _, outcomes in base_outcomes if outcomes is not None]
    base = evaluate_metric(metric, [outcomes for outcomes, _ in base_outcomes])[0]
    return evaluate_metric(metric, sources)[0] if sources else None, base


def evaluate_metric(metric: Metric, batch_outcomes: Sequence[Mapping[int, Tensor]]) -> Tensor:
    """The metric, `[cell, example]`, of the outcomes of the batches."""
    return metric({node: torch.cat([outcomes[node] for outcomes in batch_outcomes], 1) for node in metric.nodes})
