"""The engine of a sweep: the metric of all cells, in chunks that fit in memory, or one sentence and run at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer import reference
from bnet_transformer._core.process import check_cancelled
from bnet_transformer._core.tensors import FloatArray, IntArray
from bnet_transformer.compiler.gather import ExecutionState
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data.do_values import Change, Entries, WithConstant, resolve_relative
from bnet_transformer.errors import EvidenceError, UnsupportedError
from bnet_transformer.graph import ancestors, topological_order
from bnet_transformer.inference.plan import Obstacle
from bnet_transformer.inference.posteriors import plan_joint, plan_posterior
from bnet_transformer.inference.query import Query
from bnet_transformer.inference.values import NodeEvaluator
from bnet_transformer.interventions.ablation import Ablation
from bnet_transformer.interventions.cells import (
    EdgeCells,
    PatchCells,
    PatchSites,
    WordAlignment,
    group_paths,
    is_index_valued,
)
from bnet_transformer.interventions.examples import Examples, Metric, Overrides
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
    find_needed_positions,
    select_cells,
)
from bnet_transformer.interventions.routing import (
    EnumeratedChoices,
    enumerate_choices,
    find_obstacles,
    find_score_parents,
    find_set_groups,
    find_shared_obstacle,
    find_source_groups,
)
from bnet_transformer.reference import AttentionRow, GroundModel, find_open_choices, locate_node

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


def interpolate(run: PatchedRun, differences: Differences, fraction: float) -> Overrides:
    """The values of some nodes at a fraction of the way from the base run to the source run."""
    overrides, count = {}, len(run.examples)
    for group, (nodes, base, delta) in differences.items():
        shape = run.examples.model.ground.shapes[group]
        values = delta.new_zeros(count, math.prod(shape), *delta.shape[2:])
        values[:, nodes] = (base + fraction * delta).transpose(0, 1)
        mask = torch.zeros(count, math.prod(shape), dtype=torch.bool, device=delta.device)
        mask[:, nodes] = True
        overrides[group] = values.reshape(count, *shape, *delta.shape[2:]), mask.reshape(count, *shape)
    return overrides


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


def find_input_differences(
    run: PatchedRun, source: ExecutionState, source_examples: Examples, alignment: WordAlignment
) -> Differences:
    """Find the nodes with real values at which the difference between two runs begins.

    Args:
        run: The base run, with the values of all groups of `find_interpolation_groups`.
        source: The source run, with the same groups.
        source_examples: The sentences of the source run.
        alignment: The source word of each base word; words without one have no difference.

    Returns:
        These nodes and their values; no group if the runs do not differ there.
    """
    model = run.examples.model
    ground, specs = model.ground, model.network.specs
    marked = {index: np.zeros(math.prod(ground.shapes[index]), dtype=np.bool_) for index in run.needed.ancestor_words}

    def mark(nodes: Iterable[int]) -> None:
        for node in nodes:
            group = ground.group_of(node).index
            if group in marked:
                marked[group][node - int(ground.offsets[group])] = True

    mark([*model.do, *_find_set_nodes(model, source_examples.model)])
    differences: dict[int, tuple[IntArray, Tensor, Tensor]] = {}
    for index in sorted(marked):
        spec = specs[index]
        nodes = np.flatnonzero(marked[index] | (spec.tpm.kind == "input"))
        nodes = nodes[alignment.align_nodes(index, nodes) >= 0]
        if not len(nodes) or index not in run.base.values or index not in source.values:
            continue
        patch = build_patch(run, source, PatchSites(index, np.zeros_like(nodes), nodes), alignment)
        delta = run.get_difference(index, patch)
        differs = (delta != 0).reshape(len(nodes), -1).any(-1).cpu()
        changed = nodes[differs.numpy()]
        if is_index_valued(spec):
            children = {c for node in changed for c in ground.children(int(ground.offsets[index]) + int(node))}
            mark(child for child in children if not specs[ground.group_of(child).index].tpm.is_random)
        elif differs.any():
            differences[index] = changed, run.get_base_values(index, patch).detach()[differs], delta[differs]
    return differences


def _find_set_nodes(base: GroundModel, source: GroundModel) -> list[int]:
    """The ids in the base of the nodes that `do` sets in the source."""
    names = (source.ground.name(node) for node in source.do)
    template, counts = base.ground.template, base.ground.word_counts
    return [base.ground.id(name) for name in names if template.parse_name(name, counts) is not None]


# --------------------------------------------------------------------------------------------------------------------
# Sequential evaluation of cells that cannot share a run: one sentence and one run at a time.
#
# Such cells change recurrent groups, or values on which latent choices depend. Outcomes are exact: the interventions of
# a cell are applied to each sentence, which is evaluated by the algorithms of single sentences.


def compute_outcomes(module: CompiledModule, model: GroundModel, nodes: Sequence[int]) -> list[Tensor]:
    """The outcome of each node: `log P` if it is discrete, its mean if it is continuous, else its mean value."""
    return [_compute_outcome(module, model, node) for node in nodes]


def stack_outcomes(nodes: Sequence[int], outcomes: Sequence[Sequence[Sequence[Tensor]]]) -> dict[int, Tensor]:
    """Stack outcomes by cell, example and node into `[cell, example, *shape]` of each node."""
    return {
        node: torch.stack([torch.stack([values[k] for values in examples]) for examples in outcomes])
        for k, node in enumerate(nodes)
    }


def _compute_outcome(module: CompiledModule, model: GroundModel, node: int) -> Tensor:
    """The outcome of one node."""
    spec = locate_node(model, node)[0]
    if node in model.do:
        value: Tensor = model.do[node]
        return value
    model = _drop_batched_values(model, node)
    evaluator = NodeEvaluator(module, model, {})
    if spec.tpm.kind == "discrete":
        if spec.parents and not find_open_choices(model, reference.parents(model, node), {}):
            log_probs: Tensor = evaluator.plan_distribution(node).run().logits.double()  # type: ignore[attr-defined]
            return log_probs
        return plan_posterior(Query(module, model, nodes=(node,))).run().log()
    if not spec.tpm.is_random:
        return _average_over_choices(module, model, [node], evaluator.value(node), len(spec.shape))
    mean = evaluator.plan_distribution(node).run().mean
    return _average_over_choices(module, model, reference.parents(model, node), mean, len(spec.shape))


def _drop_batched_values(model: GroundModel, node: int) -> GroundModel:
    """The model without the set values that have a row for each state of a latent choice.

    Such a value was set below a choice that does not affect outcomes, so it cannot be an ancestor of the node.
    """
    batched = {
        n for n, v in model.do.items() if v.is_floating_point() and v.dim() > len(locate_node(model, n)[0].shape)
    }
    if not batched or batched & {*ancestors(model.ground, [node])}:
        return model
    return replace(model, do={n: v for n, v in model.do.items() if n not in batched})


def _average_over_choices(
    module: CompiledModule, model: GroundModel, nodes: Sequence[int], value: Tensor, event_dim: int
) -> Tensor:
    """The mean of a value `[*states, *shape]` over the latent choices on which it depends: `[*shape]`."""
    open_choices = find_open_choices(model, nodes, {})
    if not open_choices or value.dim() == event_dim:
        return value
    probs = plan_joint(Query(module, model, nodes=tuple(open_choices))).run().exp().to(value.dtype)
    mean: Tensor = torch.tensordot(probs, value.flatten(0, value.dim() - event_dim - 1), 1)
    return mean


@dataclass
class SequentialSweep:
    """Computes cells by interventions on the base sentences, one sentence at a time.

    Args:
        source: The sentences that provide the values; None for an ablation.
        base: The sentences that are patched.
        alignment: The word of the source from which each word of the base takes its values.
        cells: What each cell sets.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        ablation_value: The value of an intervention without a source, by example and node.
        change: The change of the values of nodes, whose constants are the values of the source.
    """

    source: Examples | None
    base: Examples
    alignment: WordAlignment
    cells: PatchCells
    outcome_nodes: Sequence[int]
    ablation_value: Callable[[int, int], Tensor] | None = None
    change: Change | None = None
    changing_cells: set[int] = field(default_factory=set)  # of the computed cells, those that change a value
    _evaluators: dict[tuple[bool, int], NodeEvaluator] = field(default_factory=dict)
    _base_outcomes: dict[int, list[Tensor]] = field(default_factory=dict)

    def compute_outcomes(self, cell: int) -> list[list[Tensor]]:
        """The outcomes with a cell set, by example and node; cached if the cell changes no value."""
        results = []
        for n, model in enumerate(self.base.models):
            interventions = {**self._resolve_sites(cell, n), **self._resolve_paths(cell, n)}
            changes = any(
                isinstance(v, AttentionRow) or not torch.equal(v, self._get_value(False, n, k))
                for k, v in interventions.items()
            )
            if changes:
                self.changing_cells.add(cell)
            if changes or n not in self._base_outcomes:
                patched = model.surgery(interventions) if changes else model
                outcomes = compute_outcomes(self.base.module, patched, self.outcome_nodes)
                if not changes:
                    self._base_outcomes[n] = outcomes
            results.append(outcomes if changes else self._base_outcomes[n])
        return results

    def _apply_change(
        self, n: int, values: Mapping[int, Tensor], entries: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> dict[int, Tensor]:
        """The values of nodes in example `n` after the change, whose constants are given, of all or of some entries."""
        nodes = values if self.change is not None else entries
        changes: dict[int, Change] = {}
        for node in nodes:
            change, index = self.change and WithConstant(self.change, values[node]), entries.get(node)
            if index is not None:
                change = Entries(torch.tensor(index), change or values[node])
            assert change is not None
            changes[node] = change
        fixed = {node: value for node, value in values.items() if node not in changes}
        model, module = self.base.models[n], self.base.module

        def evaluate(resolved: Mapping[int, Tensor]) -> Callable[[int], Tensor]:
            patched = model.surgery({**fixed, **resolved})
            return NodeEvaluator(module, patched, {}).read_value

        return {**fixed, **resolve_relative(model, changes, evaluate)}

    def _resolve_sites(self, cell: int, n: int) -> dict[int, Tensor | AttentionRow]:
        """The values, or rows of attention, that a cell sets in example `n`, by node."""
        values, entries, rows = dict[int, Tensor](), dict[int, list[int]](), dict[int, list[int]]()
        for sites in self.cells.sites:
            offset = int(self.base.model.ground.offsets[sites.group])
            for k in (sites.cells == cell).nonzero()[0]:
                node = offset + int(sites.nodes[k])
                part = [] if sites.entries is None else [int(sites.entries[k])]
                if sites.is_attention:
                    rows.setdefault(node, []).extend(part)
                    continue
                values[node] = values[node] if node in values else self._get_source_value(n, node)
                if part:
                    entries.setdefault(node, []).extend(part)
        return {**self._apply_change(n, values, entries), **self._resolve_rows(n, rows)}

    def _resolve_rows(self, n: int, rows: Mapping[int, Sequence[int]]) -> dict[int, AttentionRow]:
        """The rows of attention that are set in example `n`, or some entries of them."""
        patches, model = dict[int, AttentionRow](), self.base.models[n]
        for node in topological_order(model.ground).tolist() if rows else ():
            if node not in rows:
                continue
            row, entries = _read_row(self._get_evaluator(True, n), node), rows[node]
            if entries:  # the fixed are those of the run with the rows of earlier nodes
                base = _read_row(NodeEvaluator(self.base.module, model.surgery(patches), {}), node)
                index = torch.tensor(entries)
                row = base.index_copy(0, index, row[index])
            patches[node] = AttentionRow(row)
        return patches

    def _resolve_paths(self, cell: int, n: int) -> dict[int, Tensor]:
        """The values that the paths of a cell transmit to their last nodes in example `n`, by node."""
        ends: dict[int, list[tuple[int, ...]]] = {}
        for path in self.cells.paths:
            if path.cell == cell:
                ends.setdefault(path.nodes[-1], []).append(path.nodes)
        patches = {}
        for end, paths in ends.items():
            firsts = {path[0]: self._get_source_value(n, path[0]) for path in paths}
            sent = self._apply_change(n, firsts)
            for step in range(1, len(paths[0])):
                child = paths[0][step]
                sent = {child: self._compute_child(n, child, sent)}
            patches[end] = sent[end]
        return patches

    def _compute_child(self, n: int, child: int, parent_values: dict[int, Tensor]) -> Tensor:
        """The value of a node in the base run with these values of some parents, `[*shape]`."""
        model = self.base.models[n]
        parents = [p for p in reference.parents(model, child) if not locate_node(model, p)[0].tpm.is_random]
        values = {p: self._get_single_value(False, n, p) for p in parents if p not in parent_values}
        evaluator = NodeEvaluator(self.base.module, model.surgery({**values, **parent_values}), {})
        return self._check_single_value(child, evaluator.value(child))

    def _get_evaluator(self, is_source: bool, n: int) -> NodeEvaluator:
        """The cached evaluator of example `n` of the source or the base sentences."""
        if (is_source, n) not in self._evaluators:
            examples = self.source if is_source else self.base
            assert examples is not None
            self._evaluators[is_source, n] = NodeEvaluator(examples.module, examples.models[n], {})
        return self._evaluators[is_source, n]

    def _align(self, node: int) -> int:
        """The id in the source sentences of a node that cells set."""
        aligned = self.alignment.align_node(node)
        assert aligned is not None  # cells without a source do not exist
        return aligned

    def _get_value(self, is_source: bool, n: int, node: int) -> Tensor:
        """The value of a node in the source or the base run, `[*states, *shape]` if it depends on latent choices."""
        return self._get_evaluator(is_source, n).read_value(self._align(node) if is_source else node)

    def _get_source_value(self, n: int, node: int) -> Tensor:
        """The value of the source, or of an intervention without one, for a node of example `n`, `[*shape]`."""
        return self._get_single_value(True, n, node) if self.ablation_value is None else self.ablation_value(n, node)

    def _get_single_value(self, is_source: bool, n: int, node: int) -> Tensor:
        """The value of a node, `[*shape]`; an error if it depends on latent choices."""
        return self._check_single_value(node, self._get_value(is_source, n, node))

    def _check_single_value(self, node: int, value: Tensor) -> Tensor:
        """The value of a node, `[*shape]`; an error if it has more dims, for the states of latent choices."""
        if value.is_floating_point() and tuple(value.shape) != locate_node(self.base.model, node)[0].shape:
            name = self.base.model.ground.name(node)
            hint = "Set the choices on which it depends in both runs, by do"
            raise EvidenceError(name, expected="one value", actual="a value for each state of a choice", hint=hint)
        return value


def _read_row(evaluator: NodeEvaluator, node: int) -> Tensor:
    """The row of attention `P(j | i)` of a node, `[word j]`."""
    spec, index = locate_node(evaluator.model, node)
    return evaluator.plan_attention(spec).run()[index]


# --------------------------------------------------------------------------------------------------------------------
# The engine of a sweep: the metric of all cells, in chunks that fit in memory.
#
# The *base* run is patched, and the *source* run provides the values: the corrupt and the clean run, or the reverse
# with `direction="noise"`. A cell that sets its nodes to their values in the base run is not run again.


Outcomes = dict[int, Tensor]


@dataclass(frozen=True)
class SweepOptions:
    """How the cells of a sweep are computed.

    Args:
        memory: The maximum number of bytes that are used at once.
        gradient: How effects are estimated from gradients, so that no cell is run; None for exact effects.
        is_noise: Whether corrupt values are patched into the clean run.
    """

    memory: int
    gradient: Gradient | None = None
    is_noise: bool = False

    @property
    def side_names(self) -> tuple[str, str]:
        """The names of the source and of the base sentences."""
        return ("corrupt", "clean") if self.is_noise else ("clean", "corrupt")


@dataclass
class BaseRun:
    """The base run, the patches of cells and the outcomes of the source run, in one joint state of the choices."""

    run: PatchedRun
    build_patch: Callable[[PatchSites], GroupPatch]  # the patch of some nodes
    patches: dict[int, list[GroupPatch]]
    changes: FloatArray  # the largest relative change of a value by each cell
    source: ExecutionState | None
    source_outcomes: Outcomes | None
    input_differences: Differences = field(default_factory=dict)  # between both runs, for integrated gradients
    edges: EdgeCells | None = None
    differences: dict[int, Tensor] = field(default_factory=dict)  # what each group of writers writes, source minus base

    def compute_outcomes(self, cells: IntArray) -> Outcomes:
        """The outcomes of some cells, `[cell, example, *shape]`; cells without an effect are not patched."""
        mask = self.changes[cells] > 0
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
        base: The sentences that are patched, as many as the fixed.
        alignment: The word of the source from which each word of the base takes its values.
        cells: What each cell sets.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        options: How the cells are computed.
        ablation: The values of an intervention without a source.
        change: The change of the values of nodes, whose constants are the values of the source or of `ablation`.
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
    change: Change | None = None
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
    changes: FloatArray = field(init=False)  # the largest relative change of a value by each cell
    _base_runs: list[BaseRun] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        has_source = self.source is not None
        self.changes = np.zeros(math.prod(self.cells.shape))
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
            is_exact = self.options.gradient is None
            self.source_obstacles, changes = find_obstacles(sides_needed, self.cells, is_exact=is_exact)
            self.obstacles = {**changes, **self.source_obstacles}
        else:
            self.obstacles = self.source_obstacles = dict.fromkeys(self.cells.cell_ids.tolist(), shared_obstacle)
        self.sequential_cells = set(self.obstacles)
        self._check_shared()

    def _check_shared(self) -> None:
        """Raise an error for edges, and for scores of attention, that cannot share a run."""
        edges = [] if self.cells.edges is None else [("edges", self.cells.edges.cells)]
        scores = [("scores", sites.cells) for sites in self.cells.sites if sites.is_score]
        for name, cells in edges + scores:
            for obstacle in (self.obstacles[cell] for cell in cells.tolist() if cell in self.obstacles):
                raise UnsupportedError(f"at={self.cells.at!r}: {name} cannot share a run, because {obstacle}")

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

    def release_base_runs(self) -> None:
        """Free the memory of the cached base runs."""
        self._base_runs = []

    def compute_base_outcomes(self) -> tuple[Outcomes, Outcomes | None]:
        """The outcomes of the base run, and of the source run if there are any: `[1, example, *shape]` each.

        The outcomes of the source have the ids of the nodes in the base.
        """
        nodes = self.source_outcome_nodes
        if not self.has_shared_run:
            has_metric = self.source is not None and nodes is not None
            source = self._compute_base_sequentially(self.source, nodes) if has_metric else None  # type: ignore[arg-type]
            return self._compute_base_sequentially(self.base, self.outcome_nodes), source
        bases, sources = list[Outcomes](), list[Outcomes]()
        for base_run in self.iter_base_runs():
            bases.append(base_run.run.compute_base_outcomes())
            sources += [] if base_run.source_outcomes is None else [base_run.source_outcomes]
            np.maximum(self.changes, base_run.changes, out=self.changes)
        # An obstacle to computing the changes of a cell does not matter if the cell changes no value.
        changing = {cell for cell in self.obstacles if self.changes[cell] > 0}
        self.sequential_cells = {*self.source_obstacles, *changing}
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
        base, gradient, cells = self.base.with_choices(states), self.options.gradient, self.cells
        cells = _drop_cells(cells, self.source_obstacles)
        sources = frozenset(
            find_source_groups(base.model, cells) - {sites.group for sites in cells.sites if sites.is_attention}
            | find_score_parents(base.model, cells.sites)
        )
        has_steps = gradient is not None and gradient.steps > 0
        if has_steps:
            models = [base.model, *([] if self.source is None else [self.source.model])]
            sources |= find_interpolation_groups(models, self.needed)
        gradient_groups = frozenset[int]() if gradient is None else self._find_gradient_groups(cells)
        run = PatchedRun(base, self.needed, sources, gradient_groups=gradient_groups)
        patches: dict[int, list[GroupPatch]] = {}
        source, outcomes = None, None
        if self.source is not None:
            rows = [sites for sites in cells.sites if sites.is_attention and not sites.is_score]
            attention_groups = frozenset(sites.group for sites in rows)
            source_run = PatchedRun(self.source.with_choices(states), self.source_needed, sources, attention_groups)
            source, nodes = source_run.base, self.source_outcome_nodes
            if nodes is not None:
                by_node = source_run.compute_base_outcomes()
                outcomes = {node: by_node[peer] for node, peer in zip(self.outcome_nodes, nodes, strict=True)}

        def build(sites: PatchSites) -> GroupPatch:
            if source is not None:
                return build_patch(run, source, sites, self.alignment, self.change)
            return self._build_ablation_patch(run, sites)

        with torch.no_grad():
            for sites in cells.sites:
                patches.setdefault(sites.group, []).append(build(sites))
            if cells.paths and gradient is None:
                sent = run.patch_paths(group_paths(cells.paths), build, self.options.memory)
                for group, group_patches in sent.items():
                    patches.setdefault(group, []).extend(group_patches)
            changes = measure_changes(run, patches, len(self.changes))
        base_run = BaseRun(run, build, patches, changes, source, outcomes)
        if has_steps and source is not None:
            base_run.input_differences = find_input_differences(run, source, source_run.examples, self.alignment)
        return self._add_edges(base_run, cells.edges)

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
            writer = edges.structure.writer_groups[w]
            index, name = writer.spec.group.index, writer.spec.group.name
            if base_run.source is not None:
                values = get_writer_values(edges.structure, base_run.source, w)
            elif writer.is_part or self.ablation is None:
                hint = "Use sentences on both sides, or name edges of other writers"
                raise UnsupportedError(f"at='edges': this intervention cannot set a part of {name}", hint=hint)
            else:
                nodes = np.arange(len(run.examples.model.ground.select_nodes(writer.spec.group)))
                constants = self.ablation.get_values(run, self.first_example, index, nodes)
                values = spread_nodes(run, index, constants.to(base))
            if self.change is not None:
                values = self.change.apply(base, writer.spec.shape, values)
            differences[w] = values - base
        base_run.changes[find_effective_edges(run, differences, edges)] = np.inf
        return replace(base_run, edges=edges, differences=differences)

    def _build_ablation_patch(self, run: PatchedRun, sites: PatchSites) -> GroupPatch:
        """The patch of an intervention without a source in one node group."""
        assert self.ablation is not None
        nodes, inverse = np.unique(sites.nodes, return_inverse=True)
        values = self.ablation.get_values(run, self.first_example, sites.group, nodes)
        patch = build_patch(run, run.base, sites, change=self.change)
        if patch.entries is None:
            source = values[:, torch.from_numpy(inverse)]
            return replace(patch, source=source.to(patch.source), is_per_node=True)
        return replace(patch, source=spread_nodes(run, sites.group, values.to(patch.source), nodes))

    def _compute_base_sequentially(self, examples: Examples, nodes: Sequence[int]) -> Outcomes:
        """The outcomes of sentences that are run one at a time, by the ids of the base: `[1, example, *shape]`."""
        sides = (examples.with_choices(states) for states in self.choices)
        by_state = [[compute_outcomes(side.module, model, nodes) for model in side.models] for side in sides]
        return self.marginalize([stack_outcomes(self.outcome_nodes, [rows]) for rows in by_state])

    def _compute_cells_sequentially(self, states: Mapping[int, Tensor], cells: IntArray) -> Outcomes:
        """The outcomes of cells that run one at a time: `[cell, example, *shape]`."""
        base = self.base.with_choices(states)
        source = None if self.source is None else self.source.with_choices(states)
        ablation = self.ablation
        values = (
            None if ablation is None else lambda example, node: ablation.get_value(self.first_example + example, node)
        )
        runner = SequentialSweep(source, base, self.alignment, self.cells, self.outcome_nodes, values, self.change)
        outcomes = stack_outcomes(self.outcome_nodes, [runner.compute_outcomes(int(cell)) for cell in cells])
        self.changes[[*runner.changing_cells]] = np.inf
        return outcomes


def _drop_cells(cells: PatchCells, dropped: Collection[int]) -> PatchCells:
    """The cells without the sites and the paths of dropped cells."""
    remaining = tuple(sites for sites in cells.sites if not np.isin(sites.cells, list(dropped)).all())
    return replace(  # edges are never dropped: an obstacle to an edge is an error
        cells, sites=remaining, paths=tuple(path for path in cells.paths if path.cell not in dropped)
    )


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
    return CellOutcomes(values.reshape(*cells.shape, len(base)), source, base, is_stationary, join_changes(batches))


def join_changes(parts: Iterable[ExampleBatch | CellOutcomes]) -> FloatArray:
    """The largest relative change of a value by each cell over parts of the examples, `[cell]`."""
    largest: FloatArray = np.maximum.reduce([part.changes for part in parts])
    return largest


def evaluate_base_runs(batches: Sequence[ExampleBatch], metric: Metric) -> tuple[Tensor | None, Tensor]:
    """The metric of the source run, if it has one, and of the base run: `[example]`."""
    base_outcomes = [batch.compute_base_outcomes() for batch in batches]
    sources = [outcomes for _, outcomes in base_outcomes if outcomes is not None]
    base = evaluate_metric(metric, [outcomes for outcomes, _ in base_outcomes])[0]
    return evaluate_metric(metric, sources)[0] if sources else None, base


def evaluate_metric(metric: Metric, batch_outcomes: Sequence[Mapping[int, Tensor]]) -> Tensor:
    """The metric, `[cell, example]`, of the outcomes of the batches."""
    return metric({node: torch.cat([outcomes[node] for outcomes in batch_outcomes], 1) for node in metric.nodes})
