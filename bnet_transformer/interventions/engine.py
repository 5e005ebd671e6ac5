"""The engine of a sweep: what is asked (`Experiment`), the runs of rows (`SweepRun`), and the metric of all cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.naming import WORD
from bnet_transformer._core.process import check_cancelled
from bnet_transformer._core.tensors import BoolArray, FloatArray, IntArray
from bnet_transformer.data.do_values import Change
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.inference.plan import Obstacle
from bnet_transformer.interventions.ablation import Ablation
from bnet_transformer.interventions.cells import PatchCells, PatchSites, WordAlignment, group_paths, is_index_valued
from bnet_transformer.interventions.examples import EnumeratedChoices, Examples, Metric, enumerate_choices
from bnet_transformer.interventions.linear_pass import (
    compute_edge_patches,
    find_effective_edges,
    get_writer_values,
    spread_nodes,
)
from bnet_transformer.interventions.methods import Gradient
from bnet_transformer.interventions.patched_run import (
    GroupPatch,
    NeededPositions,
    PatchedRun,
    build_patch,
    count_outcome_values,
    estimate_bytes,
    find_changed_positions,
    find_needed_positions,
    select_cells,
)
from bnet_transformer.interventions.sequential import SequentialRuns
from bnet_transformer.reference import GroundModel, locate_node

# --------------------------------------------------------------------------------------------------------------------
# What a sweep asks, of sentences of one length.
#
# The *base* run is patched, and the *source* run provides the values: the corrupt and the clean run, or the reverse
# with `direction="noise"`. Latent choices that depend on no value have the same state in both runs: the *rows* of the
# runs are the sentences in each joint state of these choices, over which outcomes are averaged.


Outcomes = dict[int, Tensor]  # `[cell, row, *shape]` of each node


@dataclass
class Experiment:
    """A sweep whose arguments are valid.

    Args:
        source: The sentences that provide the values; None for an ablation.
        base: The sentences that are patched.
        alignment: The word of the source from which each word of the base takes its values.
        cells: What each cell sets.
        metric: The metric, of nodes of the base.
        memory: The maximum number of bytes that are used at once.
        gradient: How effects are estimated from gradients, so that no cell is run; None for exact effects.
        is_noise: Whether corrupt values are patched into the clean run.
        ablation: The values of an intervention without a source.
        change: The change of the values of nodes, whose constants are the values of the source or of `ablation`.
        numbers: The numbers of the examples in the sweep.
    """

    source: Examples | None
    base: Examples
    alignment: WordAlignment
    cells: PatchCells
    metric: Metric
    memory: int
    gradient: Gradient | None = None
    is_noise: bool = False
    ablation: Ablation | None = field(default=None, repr=False)
    change: Change | None = field(default=None, repr=False)
    numbers: Sequence[int] = ()

    @property
    def side_names(self) -> tuple[str, str]:
        """The names of the source and of the base sentences."""
        return ("corrupt", "clean") if self.is_noise else ("clean", "corrupt")

    source_outcome_nodes: tuple[int, ...] | None = field(init=False)  # None if the source has no metric
    choices: EnumeratedChoices = field(init=False)  # the latent choices of both runs that are enumerated
    base_rows: Examples = field(init=False)
    source_rows: Examples | None = field(init=False)
    needed: NeededPositions = field(init=False)
    source_needed: NeededPositions = field(init=False)
    shared_obstacle: Obstacle | None = field(init=False)  # why no compiled run computes the metric
    obstacles: dict[int, Obstacle] = field(init=False)  # why cells have separate runs, by cell
    batches: list[slice] = field(init=False)  # the rows of each batch whose runs fit in half of the memory

    def __post_init__(self) -> None:
        nodes = self.metric.nodes
        self.source_outcome_nodes = None if self.source is None else self.alignment.align_outcomes(nodes)
        self.choices = self._enumerate_choices()
        self.base_rows = base = self.choices.expand(self.base)
        self.source_rows = source = None if self.source is None else self.choices.expand(self.source)
        self.needed = self.source_needed = find_needed_positions(base.model, nodes)
        sides = [(base, self.needed)]
        if source is not None:
            if not self.alignment.is_identity or source.model.do.keys() != base.model.do.keys():
                self.source_needed = find_needed_positions(source.model, self.source_outcome_nodes or ())
            sides.append((source, self.source_needed))
        self.shared_obstacle, self.obstacles = find_obstacles(sides, self.cells, is_exact=self.gradient is None)
        edges = [] if self.cells.edges is None else [("edges", self.cells.edges.cells)]
        scores = [("scores", sites.cells) for sites in self.cells.sites if sites.is_score]
        for name, cells in edges + scores if self.obstacles else ():
            for obstacle in (self.obstacles[cell] for cell in cells.tolist() if cell in self.obstacles):
                raise UnsupportedError(f"at={self.cells.at!r}: {name} cannot share a run, because {obstacle}")
        size, count = 1, len(base)
        if count > 1:
            size = max(1, self.memory // (2 * estimate_bytes(base.model, self.needed)[1]))
        self.batches = [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def _enumerate_choices(self) -> EnumeratedChoices:
        """The latent choices of both runs that are enumerated."""
        model, edges, nodes, names = self.base.model, self.cells.edges, self.metric.nodes, self.side_names
        touched = [*self.cells.get_patched_nodes(model), *(path.nodes[0] for path in self.cells.paths)]
        if edges is not None:
            targets = [index for index in edges.targets if not model.network.specs[index].tpm.is_random]
            touched += [int(model.ground.offsets[index]) for index in targets]
        if self.alignment.has_equal_lengths:
            return enumerate_choices(self.source, self.base, touched, nodes, names)
        assert self.source is not None
        choices = enumerate_choices(None, self.base, touched, nodes, names)
        aligned = [source for node in touched if (source := self.alignment.align_node(node)) is not None]
        source_choices = enumerate_choices(None, self.source, aligned, self.source_outcome_nodes or (), names)
        open_names = [*map(model.ground.name, choices.nodes)]
        open_names += map(self.source.model.ground.name, source_choices.nodes)
        if open_names:
            reason = "sentences of unequal lengths with latent choices cannot be swept"
            raise UnsupportedError(reason, hint=f"Set {', '.join(dict.fromkeys(open_names))} by do")
        return choices

    def prepare_runs(self) -> Callable[[], Iterable[SweepRun]]:
        """A function that returns the runs of the batches; if they do not all fit in memory, it computes them again."""
        if self.shared_obstacle is not None:
            return list
        if len(self.batches) > 1:
            return lambda: map(partial(SweepRun, self), self.batches)
        runs = [SweepRun(self, rows) for rows in self.batches]
        return lambda: runs

    @cached_property
    def sequential(self) -> SequentialRuns:
        """The runs of cells that cannot share a run."""
        sides, nodes = (self.source_rows, self.base_rows), self.metric.nodes
        return SequentialRuns(*sides, self.alignment, self.cells, nodes, self.ablation, self.change)

    def has_log_probs(self, node: int) -> bool:
        """Whether the outcome of a node is its log probabilities."""
        return locate_node(self.base.model, node)[0].tpm.kind == "discrete" and node not in self.base.model.do

    def average(self, batches: Sequence[Mapping[int, Tensor]]) -> Outcomes:
        """Join the outcomes of batches, and average them over the choices: `[cell, example, *shape]`."""
        averaged, states = {}, len(self.choices.states)
        for node in self.metric.nodes:
            rows = torch.cat([outcomes[node] for outcomes in batches], 1)
            by_state = rows.unflatten(1, (states, -1)).unbind(1)
            averaged[node] = self.choices.marginalize(by_state, is_discrete=self.has_log_probs(node))
        return averaged

    def evaluate_base(self, runs: Iterable[SweepRun]) -> tuple[Tensor | None, Tensor, FloatArray]:
        """The metric of the source (if it has one) and of the base, `[example]`, and the changes by the cells.

        The changes are the largest relative change of a value by each cell, `[cell]`.
        """
        changes: FloatArray = np.zeros(math.prod(self.cells.shape))
        sources, bases = list[Outcomes](), list[Outcomes]()
        for run in runs:
            bases.append(run.patched.compute_base_outcomes())
            if run.source is not None and self.source_outcome_nodes is not None:  # by the ids of the nodes in the base
                outcomes = run.source.compute_base_outcomes()
                pairs = zip(self.metric.nodes, self.source_outcome_nodes, strict=True)
                sources.append({node: outcomes[peer] for node, peer in pairs})
            np.maximum(changes, run.changes, out=changes)
        if self.shared_obstacle is not None:
            bases = [self.sequential.compute_base()]
            if self.source_outcome_nodes is not None:
                sources = [self.sequential.compute_source(self.source_outcome_nodes)]
        source = self.metric(self.average(sources))[0] if sources else None
        return source, self.metric(self.average(bases))[0], changes


# --------------------------------------------------------------------------------------------------------------------
# Obstacles: which cells of a sweep share one compiled run, and why others run one at a time.
#
# The decision is made before any value is computed. Cells share one compiled run, in which only the values that a cell
# changes are computed again (`patched_run`). A cell has a separate run (`sequential`) if a rule below applies. The
# reported reason is the first rule that applies.
#
# | obstacle | cells that run one at a time |
# |---|---|
# | a continuous random ancestor of the metric without a value | all |
# | a latent ancestor of the metric that is not enumerated: it depends on values, or belongs to other words | all |
# | such a node or choice, as an ancestor of the nodes that a cell patches | those cells |
# | nodes of one group set to states and to vectors | all |
# | recurrent words that the cell changes | those cells |
# | a word picked by a choice, or a row of attention set by `do`, in a group that the cell changes | those cells |
# | rows of attention of a group of which `do` sets a node | those cells |
# | a selector that the cell changes | those cells |


MAX_TABLE_ENTRIES = 2**24  # entries of all tables of changed words at once


def find_obstacles(
    sides: Sequence[tuple[Examples, NeededPositions]], cells: PatchCells, *, is_exact: bool = True
) -> tuple[Obstacle | None, dict[int, Obstacle]]:
    """Find the cells that require a separate run.

    Args:
        sides: The base sentences, and the source sentences if there are any, with the words that lead to an outcome.
        cells: What each cell sets.
        is_exact: Whether cells are run; of estimates only the nodes that cells set matter.

    Returns:
        The obstacle to a compiled run of the metric, which is then that of every cell; None if there is none. And the
        obstacle of each cell with one.
    """
    model, needed = sides[0][0].model, sides[0][1]
    obstacles, parts = dict[int, Obstacle](), list_sources(model, cells)
    sources = set[int]().union(*(groups for _, groups in parts))
    for examples, side_needed in sides:
        ground = examples.model.ground
        groups = {*side_needed.ancestor_words, *(ground.group_of(node).index for node in side_needed.outcome_nodes)}
        if examples.find_obstacle(groups | sources) is None:
            continue
        if (shared := examples.find_obstacle(groups)) is not None:
            return shared, dict.fromkeys(cells.cell_ids.tolist(), shared)
        for cell_ids, groups in parts:
            if (obstacle := examples.find_obstacle(groups)) is not None:
                obstacles |= dict.fromkeys(cell_ids, obstacle)
    rows = [sites for sites in cells.sites if sites.is_attention]
    for sites, (examples, _) in itertools.product(rows, reversed(sides)):
        ground = examples.model.ground
        # Rows with cut nodes cannot be read, or set, as one tensor.
        for node in [*ground.get_cut_nodes(sites.group), *ground.get_partly_cut_nodes(sites.group)][:1]:
            obstacle = Obstacle(ground.name(node), f"{ground.name(node)} is set by do")
            obstacles |= dict.fromkeys(sites.cells.tolist(), obstacle)
    return None, {**_find_update_obstacles(model, needed, cells, is_exact=is_exact), **obstacles}


def find_set_groups(model: GroundModel, cells: PatchCells) -> set[int]:
    """The groups whose nodes cells set: those of sites, and the last ones of paths."""
    last_nodes = {path.nodes[-1] for path in cells.paths}
    groups = {sites.group for sites in cells.sites} | {model.ground.group_of(node).index for node in last_nodes}
    return groups if cells.edges is None else groups | cells.edges.targets


def list_sources(
    model: GroundModel, cells: PatchCells, *, has_rows: bool = True
) -> list[tuple[Collection[int], set[int]]]:
    """Sets of cells, with the node groups whose values a run provides for them.

    These are the groups that cells set, the parents of those whose scores they set, and the groups on paths with their
    parents. With `has_rows=False`, the groups whose rows of attention cells set are left out.
    """
    edges, sources = model.network.graph.in_edges, list[tuple[Collection[int], set[int]]]()
    for sites in cells.sites:
        groups = {sites.group} if has_rows or not sites.is_attention else set[int]()
        groups |= {edge.parent for edge in edges[sites.group]} if sites.is_score else set()
        sources.append((sites.cells.tolist(), groups))
    if cells.edges is not None:
        sources.append((cells.edges.cells.tolist(), {*cells.edges.source_groups}))
    group_of = {node: model.ground.group_of(node).index for path in cells.paths for node in path.nodes}
    by_groups: dict[frozenset[int], list[int]] = {}
    for path in cells.paths:
        by_groups.setdefault(frozenset(group_of[node] for node in path.nodes), []).append(path.cell)
    for on_path, cell_ids in by_groups.items():
        sources.append((cell_ids, {*on_path, *(edge.parent for index in on_path for edge in edges[index])}))
    return sources


def _find_update_obstacles(
    model: GroundModel, needed: NeededPositions, cells: PatchCells, *, is_exact: bool
) -> dict[int, Obstacle]:
    """The obstacles to computing the changes of cells in one run, from the words that change in each group."""
    network, ground = model.network, model.ground
    suspects = {
        index: network.specs[index]
        for index in sorted(needed.ancestor_words)
        if index in network.graph.recurrent
        or any(parent.pick for parent in network.specs[index].parents)
        or (model.attention_rows and ground.get_partly_cut_nodes(index))
    }
    if not suspects:
        return {}
    attention_groups = {sites.group for sites in cells.sites if sites.is_attention}
    obstacles: dict[int, Obstacle] = {}
    for cell_ids, set_words in iter_patched_words(model, needed, cells):
        if is_exact:
            changed = find_changed_positions(model, needed, set_words, len(cell_ids))
        else:
            masked = {index: table & needed.ancestor_words[index] for index, table in set_words.items()}
            changed = {index: (np.zeros_like(table), table) for index, table in masked.items()}
        for index, spec in suspects.items():
            name, marked = spec.group.name, list[tuple[Obstacle, BoolArray]]()
            for selector in {selector for parent in spec.parents for _, selector in parent.pick} & changed.keys():
                selected = network.graph.groups[selector].name
                marked.append(
                    (Obstacle(selected, f"the cell changes the selector {selected} of {name}"), changed[selector][1])
                )
            if index in changed:
                descends, updated = changed[index]
                if index in attention_groups:  # the attention of its words is computed in each cell
                    descends = updated
                if any(axis == WORD for parent in spec.parents for axis, _ in parent.pick):
                    marked.append((Obstacle(name, f"a choice picks the word that {name} reads"), descends))
                if ground.get_partly_cut_nodes(index):
                    marked.append((Obstacle(name, f"do sets rows of attention of {name}"), descends))
                if index in network.graph.recurrent:
                    marked.append((Obstacle(name, f"{name} is computed word by word"), updated))
            for obstacle, table in marked:
                for cell in cell_ids[np.any(table, axis=-1)].tolist():
                    obstacles.setdefault(cell, obstacle)
    return obstacles


def iter_patched_words(
    model: GroundModel, needed: NeededPositions, cells: PatchCells
) -> Iterator[tuple[IntArray, dict[int, BoolArray]]]:
    """Yield chunks of cells that fit in memory, with the mask `[cell, word]` of their words in each group."""
    all_ids, ground = cells.cell_ids, model.ground
    patched: list[tuple[int, IntArray, IntArray]] = [(sites.group, sites.cells, sites.nodes) for sites in cells.sites]
    for path in cells.paths:
        group = ground.group_of(path.nodes[-1]).index
        patched.append((group, np.array([path.cell]), np.array([path.nodes[-1] - int(ground.offsets[group])])))
    if cells.edges is not None:
        patched += cells.edges.list_target_words({i: len(words) for i, words in needed.ancestor_words.items()})
    size = max(1, MAX_TABLE_ENTRIES // max(1, sum(map(len, needed.ancestor_words.values()))))
    for start in range(0, len(all_ids), size):
        cell_ids, tables = all_ids[start : start + size], dict[int, BoolArray]()
        for index, cell, node in patched:
            inside = (cell >= cell_ids[0]) & (cell <= cell_ids[-1])
            if index in needed.ancestor_words and inside.any():
                words = len(needed.ancestor_words[index])
                table = tables.setdefault(index, np.zeros((len(cell_ids), words), dtype=np.bool_))
                table[np.searchsorted(cell_ids, cell[inside]), node[inside] % words] = True
        yield cell_ids, tables


# --------------------------------------------------------------------------------------------------------------------
# The runs of some rows of an experiment, and the outcomes of its cells in them.


@dataclass
class SweepRun:
    """The base run and the source run of some rows, and what cells change in the base run.

    Args:
        experiment: What is asked.
        rows: The rows of the experiment.
    """

    experiment: Experiment
    rows: slice
    patched: PatchedRun = field(init=False)
    source: PatchedRun | None = field(init=False, default=None)
    patches: dict[int, list[GroupPatch]] = field(init=False, default_factory=dict)
    changes: FloatArray = field(init=False)  # the largest relative change of a value by each cell
    writer_differences: dict[int, Tensor] = field(init=False, default_factory=dict)  # source minus base

    def __post_init__(self) -> None:
        experiment = self.experiment
        cells = experiment.cells.drop(experiment.obstacles)  # edges have no obstacles
        base, gradient_groups = experiment.base_rows.select(self.rows), set[int]()
        sources = frozenset[int]().union(*(part for _, part in list_sources(base.model, cells, has_rows=False)))
        if experiment.gradient is not None:
            gradient_groups = find_set_groups(base.model, cells)
            if cells.edges is not None:  # a readout has the gradient of the metric itself
                readouts = {base.model.ground.group_of(node).index for node in experiment.metric.nodes}
                gradient_groups -= readouts - {sites.group for sites in cells.sites}
            if experiment.gradient.steps:
                models = [base.model, *([] if experiment.source is None else [experiment.source.model])]
                sources |= find_interpolation_groups(models, experiment.needed)
        self.patched = PatchedRun(base, experiment.needed, sources, gradient_groups=frozenset(gradient_groups))
        if experiment.source_rows is not None:
            rows = frozenset(sites.group for sites in cells.sites if sites.is_attention and not sites.is_score)
            self.source = PatchedRun(experiment.source_rows.select(self.rows), experiment.source_needed, sources, rows)
        with torch.no_grad():
            for sites in cells.sites:
                self.patches.setdefault(sites.group, []).append(self.build_patch(sites))
            if cells.paths and experiment.gradient is None:
                sent = self.patched.patch_paths(group_paths(cells.paths), self.build_patch, experiment.memory)
                for group, patches in sent.items():
                    self.patches.setdefault(group, []).extend(patches)
            self.changes = measure_changes(self.patched, self.patches, math.prod(cells.shape))
            if cells.edges is not None:
                self.writer_differences = {w: self._compare_writer(w) for w in cells.edges.writers}
                self.changes[find_effective_edges(self.patched, self.writer_differences, cells.edges)] = np.inf

    def build_patch(self, sites: PatchSites) -> GroupPatch:
        """The patch of some nodes: the values of the source, or of an intervention without one."""
        run, experiment = self.patched, self.experiment
        if self.source is not None:
            return build_patch(run, self.source.base, sites, experiment.alignment, experiment.change)
        assert experiment.ablation is not None
        nodes, inverse = np.unique(sites.nodes, return_inverse=True)
        values = experiment.ablation.get_values(run, sites.group, nodes)
        patch = build_patch(run, run.base, sites, change=experiment.change)
        if patch.entries is None:
            source = values[:, torch.from_numpy(inverse)]
            return replace(patch, source=source.to(patch.source), is_per_node=True)
        return replace(patch, source=spread_nodes(run, sites.group, values.to(patch.source), nodes))

    def _compare_writer(self, w: int) -> Tensor:
        """What a group of writers writes in the source run minus the base run."""
        run, experiment, edges = self.patched, self.experiment, self.experiment.cells.edges
        assert edges is not None
        base, writer = get_writer_values(edges.structure, run.base, w), edges.structure.writer_groups[w]
        if self.source is not None:
            values = get_writer_values(edges.structure, self.source.base, w)
        elif writer.is_part or experiment.ablation is None:
            hint = "Use sentences on both sides, or name edges of other writers"
            name = writer.spec.group.name
            raise UnsupportedError(f"at='edges': this intervention cannot set a part of {name}", hint=hint)
        else:
            nodes = np.arange(len(run.examples.model.ground.select_nodes(writer.spec.group)))
            constants = experiment.ablation.get_values(run, writer.spec.group.index, nodes)
            values = spread_nodes(run, writer.spec.group.index, constants.to(base))
        if experiment.change is not None:
            values = experiment.change.apply(base, writer.spec.shape, values)
        return values - base

    def compute_outcomes(self, cells: IntArray) -> Outcomes:
        """The outcomes of some cells; cells without an effect are not patched."""
        mask, edges = self.changes[cells] > 0, self.experiment.cells.edges
        patches = select_cells(self.patches, cells[mask], np.flatnonzero(mask))
        outcome_patches: Mapping[int, Sequence[GroupPatch]] = {}
        if edges is not None:
            numbers = np.full(int(cells.max(initial=-1)) + 1, -1)
            numbers[cells[mask]] = np.flatnonzero(mask)
            inside = edges.select(np.isin(edges.cells, cells[mask])).renumber_cells(numbers)
            if len(inside.cells):
                sent, outcome_patches = compute_edge_patches(self.patched, self.writer_differences, inside)
                for group, group_patches in sent.items():
                    patches.setdefault(group, []).extend(group_patches)
        return self.patched.compute_outcomes(len(cells), patches, outcome_patches)


def find_interpolation_groups(models: Iterable[GroundModel], needed: NeededPositions) -> frozenset[int]:
    """The groups at which a difference between two sentences may begin: inputs, set nodes, and readers of indices."""
    starts = set[int]()
    for model in models:
        specs, set_groups = model.network.specs, {model.ground.group_of(node).index for node in model.do}
        for index in needed.ancestor_words:
            reads_index = any(is_index_valued(specs[parent.index]) for parent in specs[index].parents)
            is_first = reads_index and not specs[index].tpm.is_random
            if specs[index].tpm.kind == "input" or index in set_groups or is_first:
                starts.add(index)
    return frozenset(starts)


def measure_changes(run: PatchedRun, patches: Mapping[int, Sequence[GroupPatch]], num_cells: int) -> FloatArray:
    """The largest change of a value by each cell, `[cell]`, as `get_relative_change` defines it.

    It is 0 for a cell that sets nodes, or rows of attention, to their values in the base run.
    """
    changes: FloatArray = np.zeros(num_cells)
    for group, group_patches in patches.items():
        for patch in group_patches:
            if patch.is_attention and group not in run.needed.ancestor_words:  # the run does not compute its parents
                changes[patch.cells] = np.inf
                continue
            base = run.get_base_values(group, patch).detach()
            difference = run.get_patch_values(group, patch) - base
            np.maximum.at(changes, patch.cells.numpy(), get_relative_change(base, difference))
    return changes


def get_relative_change(base: Tensor, difference: Tensor) -> FloatArray:
    """The largest difference of each node in some example, relative to the largest entry of its value: `[k]`.

    Args:
        base: The values, `[k, 1 or N, *shape]`.
        difference: Their changes, `[k, 1 or N, *shape]`.
    """
    base, difference = (v.reshape(*v.shape[:2], -1).abs().amax(-1).double() for v in (base, difference))
    change = torch.where(difference == 0, 0.0, difference / base).nan_to_num(nan=torch.inf, posinf=torch.inf)
    largest: FloatArray = change.amax(-1).cpu().numpy()
    return largest


@dataclass(frozen=True)
class CellOutcomes:
    """The metric of the runs of a sweep.

    Args:
        values: The metric with each cell patched, `[*axes, example]`.
        source: The metric of the source run, `[example]`; None without one.
        base: The metric of the base run, `[example]`.
        is_stationary: Whether the gradient of the metric from which the values are estimated is zero up to rounding,
            `[example]`; False for values of runs.
        changes: The largest relative change of a value by each cell, `[cell]`.
    """

    values: Tensor
    source: Tensor | None
    base: Tensor
    is_stationary: Tensor
    changes: FloatArray


def run_cells(experiment: Experiment, progress: bool | None) -> CellOutcomes:
    """Run every cell in every example."""
    get_runs, metric, cells, rows = experiment.prepare_runs(), experiment.metric, experiment.cells, experiment.base_rows
    source, base, changes = experiment.evaluate_base(get_runs())
    values = torch.full((math.prod(cells.shape), len(base)), torch.nan, dtype=torch.float64)
    model = rows.model
    outcomes = sum(count_outcome_values(model, locate_node(model, node)[0]) for node in metric.nodes)
    cell_bytes = estimate_bytes(model, experiment.needed)[0] * experiment.batches[0].stop
    size = max(1, experiment.memory // max(cell_bytes, 3 * model.network.dtype.itemsize * outcomes * len(rows)))
    hide = None if progress is None else not progress
    is_isolated = np.isin(cells.cell_ids, list(experiment.obstacles))
    with tqdm(total=len(is_isolated), disable=hide, unit="cell", leave=False) as bar:
        for chunks in (cells.cell_ids[~is_isolated], cells.cell_ids[is_isolated]):
            for start in range(0, len(chunks), size):
                check_cancelled()
                chunk = chunks[start : start + size]
                if int(chunk[0]) in experiment.obstacles:
                    batches = [experiment.sequential.compute_cells(chunk)]
                else:
                    batches = [run.compute_outcomes(chunk) for run in get_runs()]
                values[torch.from_numpy(chunk)] = metric(experiment.average(batches))
                bar.update(len(chunk))
    changes[[*experiment.sequential.changing_cells]] = np.inf
    is_stationary = torch.zeros(len(base), dtype=torch.bool)
    return CellOutcomes(values.reshape(*cells.shape, len(base)), source, base, is_stationary, changes)
