"""Sweeps over edges: the effect of each edge on a metric, by exact runs or from gradients.

An edge is set to the other run by giving its reader, and no other, a state in which the writer has its value in the
other run (`edge_patches`). To first order the effect is the gradient at the reader times the derivative along the
linear groups times the difference of the writer: for a net with pre-norm this is edge attribution patching (Syed et al.
2023). The gradient at every reader comes from one backward pass; the readers are pulled back, and the writers pushed
forward, to the sums between them, where one product joins all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from tqdm import tqdm

from bnet_transformer._core.arrays import IntArray
from bnet_transformer._core.naming import WORD
from bnet_transformer.errors import BNetError, UnsupportedError
from bnet_transformer.interventions.edges.edge_patches import (
    EdgeCells,
    WriterPass,
    compute_differences,
    compute_edge_patches,
)
from bnet_transformer.interventions.edges.structure import EdgeStructure, ReaderGroup, is_wordwise_path
from bnet_transformer.interventions.sweeps.examples import EnumeratedChoices, Examples, Metric, enumerate_choices
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun
from bnet_transformer.interventions.sweeps.routing import find_run_obstacle
from bnet_transformer.interventions.sweeps.sparse_update import (
    GroupUpdate,
    NeededPositions,
    RowIndex,
    SparseUpdate,
    count_outcome_values,
    count_words,
    estimate_bytes,
    find_needed_positions,
    get_layout_index,
    get_layout_shape,
)
from bnet_transformer.reference import locate_node

Outcomes = dict[int, Tensor]


def build_structure(base: Examples, other: Examples, outcome_nodes: Sequence[int]) -> EdgeStructure:
    """The edges between two runs: nothing passes through a group of which `do` sets all nodes."""
    model, leaves = base.model, set[int]()
    for side in (base, other):
        by_group = side.model.ground.split_by_group(list(side.model.do))
        shapes = side.model.ground.shapes
        leaves |= {index for index, nodes in by_group.items() if len(nodes) == math.prod(shapes[index])}
    outcomes = sorted({model.ground.group_of(node).index for node in outcome_nodes})
    return EdgeStructure(model.network, tuple(outcomes), frozenset(leaves))


@dataclass
class EdgeBatch:
    """A batch of examples that share one run, in one joint state of the choices.

    Args:
        base: The sentences of the base run.
        other: The sentences of the other run, as many.
        structure: The edges of the net.
        needed: The words that lead to an outcome, in each of the two runs.
        writers: The numbers of the groups of writers that are used.
        gradient_groups: Groups at which the outcomes have a gradient.
    """

    base: Examples
    other: Examples
    structure: EdgeStructure
    needed: tuple[NeededPositions, NeededPositions]
    edges: EdgeCells
    gradient_groups: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        sources = frozenset(self.edges.find_source_groups())
        self.run = PatchedRun(self.base, self.needed[0], sources, gradient_groups=self.gradient_groups)
        self.other_run = PatchedRun(self.other, self.needed[1], sources)
        with torch.no_grad():
            self.differences = compute_differences(self.structure, self.run.base, self.other_run.base, self.writers)

    @property
    def writers(self) -> list[int]:
        """The numbers of the groups of writers."""
        return sorted({w for w, _ in self.edges.writer_units})

    def interpolate(self, alpha: float) -> PatchedRun:
        """The run whose input writers have the values `base + alpha (other - base)`."""
        kinds = {w: self.structure.writer_groups[w].kind for w in self.writers}
        offsets = {
            self.structure.writer_groups[w].spec.group.index: alpha * self.differences[w]
            for w, kind in kinds.items()
            if kind == "input"
        }
        sources = frozenset(self.edges.find_source_groups())
        return PatchedRun(
            self.base, self.needed[0], sources, gradient_groups=self.gradient_groups, offsets=offsets
        )

    def find_effective(self) -> IntArray:
        """The positions of the edges whose writer differs between the runs in some example."""
        table, differs = self.structure.edges, dict[int, np.ndarray]()
        for w, difference in self.differences.items():
            spec = self.structure.writer_groups[w].spec
            full = difference.expand(len(difference), *get_layout_shape(self.run.base, spec), *spec.shape)
            axes = [self.run.base.layout.axis(plate) for plate in spec.group.plates]
            by_unit = (full != 0).movedim(axes, list(range(len(axes)))).flatten(len(axes)).any(-1)
            differs[w] = by_unit.reshape(-1).cpu().numpy()
        pairs = zip(table.writers[self.edges.edges].tolist(), table.writer_units[self.edges.edges].tolist(), strict=True)
        return np.flatnonzero([differs[w][unit] for w, unit in pairs])


@dataclass
class EdgeSweep:
    """All cells of a sweep over edges.

    Args:
        base: The sentences of the base run.
        other: The sentences from which a writer has its value.
        metric: The metric.
        edges: The edges, with the cells that set them.
        memory: The approximate number of bytes that are used at once.
    """

    base: Examples
    other: Examples
    metric: Metric
    edges: EdgeCells
    memory: int
    needed: tuple[NeededPositions, NeededPositions] = field(init=False)
    batches: list[tuple[Examples, Examples, EnumeratedChoices]] = field(init=False)
    _cached: tuple[frozenset[int], list[EdgeBatch]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        model, nodes = self.base.model, self.metric.nodes
        ground = model.ground
        targets = [self.edges.structure.reader_groups[r].target for r in self.edges.reader_groups]
        touched = [int(ground.offsets[spec.group.index]) for spec in targets if not spec.tpm.is_random]
        first = enumerate_choices(self.other, self.base, touched, nodes)
        states = next(iter(first))
        sides = [side.with_choices(states) for side in (self.base, self.other)]
        self.needed = tuple(find_needed_positions(side.model, nodes) for side in sides)  # type: ignore[assignment]
        for side, needed in zip(sides, self.needed, strict=True):
            outcomes = {ground.group_of(node).index for node in nodes}
            obstacle = find_run_obstacle(side, {*needed.ancestor_words, *outcomes})
            if obstacle is not None:
                raise UnsupportedError(f"at='edges': edges cannot share a run, because {obstacle}")
        recurrent = sorted(model.network.graph.recurrent & self.edges.structure.relevant)
        if recurrent:
            name = model.network.graph.groups[recurrent[0]].name
            reason = f"{name} is recurrent, so its words have no sum of writers"
            raise UnsupportedError(f"at='edges': {reason}", hint='Use nodes or arrows, such as at="x"')
        size = len(self.base)
        if size > 1:
            size = max(1, self.memory // (2 * estimate_bytes(model, self.needed[0])[1]))
        self.batches = [
            (base, other, enumerate_choices(other, base, touched, nodes))
            for base, other in zip(self.base.split(size), self.other.split(size), strict=True)
        ]

    @property
    def structure(self) -> EdgeStructure:
        """The edges of the net."""
        return self.edges.structure

    @cached_property
    def outcome_groups(self) -> frozenset[int]:
        """The groups of the nodes that the metric reads."""
        return frozenset(self.base.model.ground.group_of(node).index for node in self.metric.nodes)

    def iter_parts(self, gradient_groups: frozenset[int] = frozenset()) -> Iterator[list[EdgeBatch]]:
        """Yield, for each part of the examples, a batch in each joint state of the choices; cached for a single part."""
        if self._cached is not None and self._cached[0] == gradient_groups:
            yield self._cached[1]
            return
        for base, other, choices in self.batches:
            part = [
                EdgeBatch(
                    base.with_choices(states),
                    other.with_choices(states),
                    self.structure,
                    self.needed,
                    self.edges,
                    gradient_groups,
                )
                for states in choices
            ]
            if len(self.batches) == 1:
                self._cached = gradient_groups, part
            yield part

    def marginalize(self, choices: EnumeratedChoices, outcomes: Sequence[Mapping[int, Tensor]]) -> Outcomes:
        """The outcomes, averaged over the joint states of the choices."""
        model, averaged = self.base.model, {}
        for node in self.metric.nodes:
            is_discrete = locate_node(model, node)[0].tpm.kind == "discrete" and node not in model.do
            averaged[node] = choices.marginalize([by_node[node] for by_node in outcomes], is_discrete=is_discrete)
        return averaged

    def evaluate_metric(self, parts: Sequence[Mapping[int, Tensor]]) -> Tensor:
        """The metric, `[cell, example]`, of the outcomes of the batches."""
        return self.metric({node: torch.cat([outcomes[node] for outcomes in parts], 1) for node in self.metric.nodes})

    def evaluate_runs(self) -> tuple[Tensor, Tensor]:
        """The metric of the base run and of the other run, `[example]` each."""
        bases, others = [], []
        for part, (_, _, choices) in zip(self.iter_parts(), self.batches, strict=True):
            bases.append(self.marginalize(choices, [batch.run.compute_base_outcomes() for batch in part]))
            others.append(self.marginalize(choices, [batch.other_run.compute_base_outcomes() for batch in part]))
        return self.evaluate_metric(bases)[0], self.evaluate_metric(others)[0]

    def run_cells(self, num_cells: int, progress: bool | None) -> Tensor:
        """The metric with each cell set, `[cell, example]`; a cell whose writers do not differ is not run."""
        model = self.base.model
        cell_bytes, _ = estimate_bytes(model, self.needed[0])
        values = sum(count_outcome_values(model, locate_node(model, node)[0]) for node in self.metric.nodes)
        size = max(1, self.memory // (max(cell_bytes, 3 * 8 * values) * len(self.base)))
        effective = np.unique(np.concatenate([batch.find_effective() for part in self.iter_parts() for batch in part]))
        base, _ = self.evaluate_runs()
        result = base.repeat(num_cells, 1)
        hide = None if progress is None else not progress
        with tqdm(total=num_cells, disable=hide, unit="cell", leave=False) as bar:
            bar.update(num_cells - len(effective))
            for start in range(0, len(effective), size):
                cells = effective[start : start + size]
                outcomes = [
                    self.marginalize(choices, [_run_chunk(batch, cells) for batch in part])
                    for part, (_, _, choices) in zip(self.iter_parts(), self.batches, strict=True)
                ]
                result[torch.from_numpy(cells)] = self.evaluate_metric(outcomes)
                bar.update(len(cells))
        return result

    @cached_property
    def gradient_groups(self) -> frozenset[int]:
        """The targets of readers at which a gradient is needed; an outcome has the gradient of the metric itself."""
        targets = {self.structure.reader_groups[r].target.group.index for r in self.edges.reader_groups}
        return frozenset(targets - self.outcome_groups)

    def estimate_cells(self, num_cells: int, points: Sequence[float], progress: bool | None) -> Tensor:
        """Estimate `run_cells` from gradients.

        Args:
            num_cells: The number of cells.
            points: The points between the base run (0) and the other run (1) at which the gradients are averaged.
            progress: Whether to show a progress bar.

        Returns:
            The estimated metric with each cell set, `[cell, example]`.
        """
        effects = torch.zeros(num_cells, len(self.base), dtype=torch.float64)
        hide = None if progress is None else not progress
        base, _ = self.evaluate_runs()
        for alpha in tqdm(points, disable=hide, unit="point", leave=False):
            parts = [
                [(batch, batch.interpolate(alpha)) for batch in part] for part in self.iter_parts(self.gradient_groups)
            ]
            offset = 0
            for part, gradients in zip(parts, self._compute_gradients(parts), strict=True):
                for (batch, run), outcome_gradients in zip(part, gradients, strict=True):
                    count = len(batch.base)
                    target = effects[:, offset : offset + count]
                    self._add_estimates(target, batch, run, outcome_gradients, len(points))
                offset += count
        if not bool(effects.isfinite().all()):
            expected = "a metric with a finite gradient at the run, for first_order=True"
            raise BNetError("metric", expected=expected, actual="NaN or infinity", hint="Use first_order=False")
        return base + effects

    def _compute_gradients(self, parts: Sequence[Sequence[tuple[EdgeBatch, PatchedRun]]]) -> list[list[Outcomes]]:
        """The gradient of the metric with respect to each outcome, by part and by joint state of the choices."""
        leaves = [
            [
                {node: value.detach().requires_grad_() for node, value in run.compute_base_outcomes().items()}
                for _, run in part
            ]
            for part in parts
        ]
        averaged = [
            self.marginalize(choices, states) for (_, _, choices), states in zip(self.batches, leaves, strict=True)
        ]
        values = self.metric.evaluate_with_grad(
            {node: torch.cat([outcomes[node] for outcomes in averaged], 1) for node in self.metric.nodes}
        )
        if not values.requires_grad:
            expected = "a metric with a gradient (torch operations on its nodes), for first_order=True"
            raise BNetError("metric", expected=expected, actual="numbers without gradient", hint="Use first_order=False")
        flat = [value for states in leaves for outcomes in states for value in outcomes.values()]
        gradients = iter(torch.autograd.grad(values.sum(), flat, materialize_grads=True))
        return [[{node: next(gradients) for node in outcomes} for outcomes in states] for states in leaves]

    def _add_estimates(
        self, effects: Tensor, batch: EdgeBatch, run: PatchedRun, outcome_gradients: Outcomes, num_points: int
    ) -> None:
        """Add the estimates of one run to `effects[cell, example]`."""
        gradients = _compute_target_gradients(run, outcome_gradients)
        table, edges, by_word = self.structure.edges, self.edges, self.edges.words is not None
        keys = np.stack([table.readers[edges.edges], table.writers[edges.edges]])
        for r, w, units, estimates in estimate_batch(batch, run, gradients, by_word=by_word):
            inside = np.flatnonzero((keys[0] == r) & (keys[1] == w))
            reader_units = torch.from_numpy(table.reader_units[edges.edges[inside]])
            column = np.searchsorted(np.array(units), table.writer_units[edges.edges[inside]])
            index: tuple[Tensor, ...] = (reader_units, torch.from_numpy(column))
            if edges.words is not None:
                index = (*index, torch.from_numpy(edges.words[inside]))
            values = estimates[(slice(None), *index)].double().cpu() / num_points  # [example, edge]
            effects.index_add_(0, torch.from_numpy(edges.cells[inside]), values.T)


def _compute_target_gradients(run: PatchedRun, outcome_gradients: Outcomes) -> dict[int, Tensor]:
    """The gradient of the metric at each target of a reader, `[example, *plates, word, *shape]`, by node group."""
    outcomes = {node: value for node, value in run.compute_base_outcomes().items() if value.requires_grad}
    gradients = dict[int, Tensor]()
    groups = list(run.perturbations)
    if outcomes and groups:
        ends, grad_outputs = list(outcomes.values()), [outcome_gradients[node] for node in outcomes]
        leaves = [run.perturbations[index] for index in groups]
        gradients = dict(zip(groups, torch.autograd.grad(ends, leaves, grad_outputs, materialize_grads=True), strict=True))
    ground = run.examples.model.ground
    for node, gradient in outcome_gradients.items():  # [1, example, *event]
        spec = run.specs[ground.group_of(node).index]
        index = spec.group.index
        event = gradient.shape[2:]
        full = gradient.new_zeros(len(run.examples), *get_layout_shape(run.base, spec), *event)
        position = get_layout_index(run.base, spec, np.array([node - int(ground.offsets[index])]))
        full.movedim(0, run.base.layout.word_dim)[position] = gradient
        gradients[index] = gradients[index] + full if index in gradients and index not in groups else full
    return gradients


@torch.no_grad()
def _run_chunk(batch: EdgeBatch, cells: IntArray) -> Outcomes:
    """The outcomes of some cells, `[cell, example, *shape]`."""
    edges = batch.edges.select(np.isin(batch.edges.cells, cells))
    numbers = np.full(int(cells.max()) + 1, -1)
    numbers[cells] = np.arange(len(cells))
    patches = {
        index: [patch.renumber_cells(numbers) for patch in group_patches]
        for index, group_patches in compute_edge_patches(batch.run, batch.differences, edges).items()
    }
    return batch.run.compute_outcomes(len(cells), patches)


# first order


@dataclass(frozen=True)
class ReaderPath:
    """The linear groups between a reader and the sums (or writers) that it reads.

    Attributes:
        ends: The groups at which the path stops: writers, and groups with several linear parents.
        groups: The groups after these, parents first.
    """

    ends: tuple[int, ...]
    groups: tuple[int, ...]


def find_reader_path(structure: EdgeStructure, reader: ReaderGroup) -> ReaderPath:
    """The path from a reader back to the nearest sums and writers."""
    specs, ends, groups = structure.network.specs, set[int](), set[int]()
    stack = [reader.target.parents[k].index for k in reader.slots]
    while stack:
        index = stack.pop()
        parents = {specs[index].parents[k].index for k in structure.get_linear_positions(specs[index])}
        if index in structure.writer_index or len(parents) != 1:
            ends.add(index)
        elif index not in groups:
            groups.add(index)
            stack += parents
    return ReaderPath(tuple(sorted(ends)), tuple(sorted(groups)))


def estimate_batch(
    batch: EdgeBatch, run: PatchedRun, gradients: Mapping[int, Tensor], *, by_word: bool
) -> Iterator[tuple[int, int, list[int], Tensor]]:
    """Estimate the effects of edges from the gradients at the targets of readers.

    Args:
        batch: The examples.
        run: The run at which the net is linearised.
        gradients: The gradient of the metric at each target, `[example, *plates, word, *shape]`.
        by_word: Whether to return the effect of each word of the reader.

    Yields:
        The number of a group of readers, of a group of writers, the units of writers, and the effects,
        `[example, reader unit, writer unit]`; with `by_word` followed by a dim for the word of the reader.
    """
    structure = batch.structure
    readers = [r for r in batch.edges.reader_groups if structure.reader_groups[r].target.group.index in gradients]
    paths = {r: find_reader_path(structure, structure.reader_groups[r]) for r in readers}
    ends = {index for path in paths.values() for index in path.ends}
    with forward_ad.dual_level(), torch.no_grad():
        units = batch.edges.writer_units
        linear = WriterPass(run, batch.differences, structure, readers, units, as_tangent=True)
        linear.compute_groups(ends)
        tangents = {
            index: (update.rows, tangent)
            for index, update in linear.update.by_group.items()
            if index in ends and (tangent := forward_ad.unpack_dual(update.values).tangent) is not None
        }
    dense = {index: _spread_rows(run, index, rows, value) for index, (rows, value) in tangents.items()}
    for r in readers:
        reader = structure.reader_groups[r]
        gradient = gradients[reader.target.group.index]
        totals: dict[int, list[Tensor]] = {}
        words = _split_words(run, reader, paths[r], by_word=by_word)
        for word in words:
            adjoints = _pull_back(run, structure, reader, paths[r], gradient, word)
            sums: dict[int, Tensor] = {}
            for end in [end for end in adjoints if end in dense]:
                cells, tangent = dense[end]
                effects = _join(adjoints[end], tangent, run, keep_words=by_word and word is None)
                for column, cell in enumerate(cells.tolist()):
                    sums[cell] = sums.get(cell, 0.0) + effects[:, :, column]
            for cell, effects in sums.items():
                totals.setdefault(cell, []).append(effects)
        for w in reader.sources:
            cells_of = [cell for cell in sorted(totals) if units[cell][0] == w]
            if cells_of:
                by_cell = [totals[c][0] if len(words) == 1 else torch.stack(totals[c], -1) for c in cells_of]
                if by_word and words == [None] and by_cell[0].dim() == 2:
                    by_cell = [value[..., None] for value in by_cell]
                yield r, w, [units[cell][1] for cell in cells_of], torch.stack(by_cell, 2)


def _split_words(run: PatchedRun, reader: ReaderGroup, path: ReaderPath, *, by_word: bool) -> list[int | None]:
    """The words of a reader that need a backward pass each; None for all words at once."""
    stacks = {run.specs[index].group.word_stack for index in (*path.ends, *path.groups)}
    if not by_word or (stacks == {reader.target.group.word_stack} and is_wordwise_path(run.base.network, reader)):
        return [None]
    return list(range(count_words(run.examples.model, reader.target.group.index)))


def _spread_rows(run: PatchedRun, index: int, rows: RowIndex, value: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as `[cell, example, *plates, word, *shape]`, zero at words without a row; also the cells, `[cell]`."""
    axis, spec = run.base.layout.word_dim, run.specs[index]
    cells = torch.unique_consecutive(rows.cells)
    words = count_words(run.examples.model, index)
    shape = (len(run.examples), *get_layout_shape(run.base, spec)[:-1], len(rows), *spec.shape)
    result = value.new_zeros(len(cells), words, *shape[:axis], *shape[axis + 1 :])
    result[torch.searchsorted(cells, rows.cells), rows.words] = value.expand(shape).movedim(axis, 0)
    return cells, result.movedim(1, axis + 1)


def _pull_back(
    run: PatchedRun,
    structure: EdgeStructure,
    reader: ReaderGroup,
    path: ReaderPath,
    gradient: Tensor,
    word: int | None,
) -> dict[int, Tensor]:
    """The gradient at the ends of a path for each unit of a reader, `[unit, example, *plates, word, *shape]` each."""
    needed = run.needed.ancestor_words
    group_rows = {index: RowIndex.from_mask(needed[index][None]) for index in (*path.ends, *path.groups)}
    leaves, updates = {}, dict[int, GroupUpdate]()
    update = SparseUpdate(run.base, updates, run.compact_index)
    target, axis = reader.target, run.base.layout.word_dim
    with torch.enable_grad():
        for index in path.ends:
            spec, rows = run.specs[index], group_rows[index]
            shape = (len(run.examples), *get_layout_shape(run.base, spec)[:-1], len(rows), *spec.shape)
            leaves[index] = update.gather(index, rows).detach().expand(shape).clone().requires_grad_()
            updates[index] = GroupUpdate(rows, leaves[index])
        for index in path.groups:
            updates[index] = GroupUpdate(group_rows[index], update.compute(run.specs[index], group_rows[index]))
        rows = RowIndex.from_mask(needed[target.group.index][None])
        is_open = target.tpm.is_random and target.group.index not in run.base.known
        slots = reader.slots if _has_other_slots(structure, reader) else None
        value = update.compute(target, rows, as_distribution=is_open, slots=slots)
        value = value.expand(len(run.examples), *get_layout_shape(run.base, target)[:-1], *value.shape[axis:])
    seed = gradient.index_select(axis, rows.words.to(gradient.device))
    if word is not None:
        mask = (rows.words == word).to(seed)
        seed = seed * mask.reshape(-1, *[1] * (seed.dim() - axis - 1))
    if target.group.index in run.base.patched:  # a set node passes no gradient
        is_set = run.base.patched[target.group.index][1]
        is_set = is_set.expand(*is_set.shape[:axis], count_words(run.examples.model, target.group.index))
        is_set = is_set.index_select(axis, rows.words)
        seed = seed * ~is_set.reshape(*is_set.shape, *[1] * (seed.dim() - is_set.dim()))
    seeds = _split_units(run, target, seed)
    gradients = torch.autograd.grad(
        value, list(leaves.values()), seeds, is_grads_batched=True, materialize_grads=True
    )
    adjoints = {}
    for index, part in zip(leaves, gradients, strict=True):  # zero at words that lead to no outcome
        count = count_words(run.examples.model, index)
        full = part.new_zeros(*part.shape[: axis + 1], count, *part.shape[axis + 2 :])
        adjoints[index] = full.index_copy_(axis + 1, group_rows[index].words.to(part.device), part)
    return adjoints


def _has_other_slots(structure: EdgeStructure, reader: ReaderGroup) -> bool:
    """Whether a target has slots with writers through which the reader does not read."""
    linear, reading = structure.get_linear_positions(reader.target), structure.get_reading_positions(reader.target)
    return len(linear) + len(reading) > len(reader.slots)


def _split_units(run: PatchedRun, spec: object, seed: Tensor) -> Tensor:
    """A gradient, `[example, *plates, row, *shape]`, for each unit of a group alone: `[unit, ...]`."""
    layout, sizes = run.base.layout, run.base.network.graph.plate_sizes
    plates = spec.group.plates  # type: ignore[attr-defined]
    count = math.prod(sizes[plate] for plate in plates)
    units = torch.eye(count, dtype=seed.dtype, device=seed.device)
    shape = [count] + [1] * seed.dim()
    for plate in plates:
        shape[1 + layout.axis(plate)] = sizes[plate]
    order = sorted(range(len(plates)), key=lambda k: layout.axis(plates[k]))
    units = units.reshape(count, *(sizes[plate] for plate in plates)).permute(0, *(1 + k for k in order))
    return seed[None] * units.reshape(shape)


def _join(adjoint: Tensor, tangent: Tensor, run: PatchedRun, *, keep_words: bool) -> Tensor:
    """The products of gradients of readers and tangents of writers: `[example, reader, writer]`, or also `[..., word]`."""
    axis = 1 + run.base.layout.word_dim
    a, t = adjoint.movedim((1, axis), (0, 1)), tangent.movedim((1, axis), (0, 1))  # [example, word, unit, ...]
    a, t = a.flatten(3), t.flatten(3)
    if keep_words:
        return torch.einsum("nwuk,nwck->nucw", a, t)
    return torch.einsum("nwuk,nwck->nuc", a, t)
