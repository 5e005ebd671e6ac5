"""Runs of circuits: a reader sees the writers of its retained edges in this run, and the others in the corrupt run.

Groups are computed in topological order. What a reader sees is `corrupt + D`, with the deviation D from the corrupt
run: a sum over its retained writers, mapped by the linear groups on the way. The map of a writer is computed once for
all readers; a norm is computed for each reader. Readers of one group that see different states (one for each head) are
separate cells: a deviation is `[circuit * unit, example, *plates, word, *shape]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import BoolArray
from bnet_transformer._core.checks import check_int
from bnet_transformer.compiler.evaluate import evaluate_tpm
from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.compiler.linear_groups import find_residuals
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, UnsupportedError
from bnet_transformer.interventions.circuits.arrow_runs import run_with_cells
from bnet_transformer.interventions.circuits.runs import CircuitRuns
from bnet_transformer.interventions.edges.pruning import find_blocked_edges
from bnet_transformer.interventions.edges.structure import EdgeStructure, ReaderGroup, is_wordwise_path
from bnet_transformer.interventions.sweeps.choices import EnumeratedChoices, enumerate_choices
from bnet_transformer.interventions.sweeps.edge_cells import build_structure
from bnet_transformer.interventions.sweeps.examples import (
    DEFAULT_MEMORY,
    Examples,
    Metric,
    has_difference,
    parse_example_pair,
    parse_metric,
)
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun
from bnet_transformer.interventions.sweeps.routing import find_run_obstacle
from bnet_transformer.interventions.sweeps.sparse_update import (
    NeededPositions,
    find_needed_positions,
    get_layout_shape,
    summarize_distribution,
)
from bnet_transformer.reference import locate_node
from bnet_transformer.tpm import Attention

Outcomes = dict[int, Tensor]


@dataclass
class EdgeRunner(CircuitRuns):
    """Runs of circuits of edges from writers to readers.

    Args:
        clean: The sentences that a circuit runs.
        corrupt: The corrupt sentences, as many.
        structure: The edges of the net.
        metric: The metric.
        choices: The latent choices over which outcomes are averaged.
        needed: The words that lead to an outcome.
        memory: The approximate number of bytes that are used at once.
    """

    clean: Examples
    corrupt: Examples
    structure: EdgeStructure
    metric: Metric
    choices: EnumeratedChoices
    needed: NeededPositions
    memory: int

    edge_names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.edge_names = self.structure.edges.names

    def swap(self) -> EdgeRunner:
        """The same edges with the clean and the corrupt run exchanged."""
        return replace(self, clean=self.corrupt, corrupt=self.clean)

    @cached_property
    def blocked(self) -> BoolArray:
        """The edges that cannot transmit anything, by proof, `[edge]`."""
        groups = frozenset(writer.spec.group.index for writer in self.structure.writer_groups)
        blocked = np.ones(len(self.edge_names), dtype=bool)
        for states in self.choices:  # weights under a choice differ between its states
            example = next(self.clean.with_choices(states).split(1))
            blocked &= find_blocked_edges(PatchedRun(example, self.needed, groups), self.structure)
        return blocked

    @property
    def edge_groups(self) -> tuple[tuple[int, ...], ...]:
        """The edges of each group of readers."""
        readers = self.structure.edges.readers
        return tuple(tuple(np.flatnonzero(readers == r).tolist()) for r in np.unique(readers))

    def find_connected(self, retained: Tensor) -> Tensor:
        """The mask of the edges that can transmit a difference, and whose reader leads to the metric, `[edge]`."""
        table, structure = self.structure.edges, self.structure
        active = {(r, u): structure.reader_groups[r].is_readout for r, u in structure.reader_units}
        needed: set[tuple[int, int]] = set()  # the writers that lead to the metric
        connected = np.zeros(len(table), dtype=bool)
        for r in reversed(range(len(structure.reader_groups))):
            edges = np.flatnonzero(table.readers == r)
            for u in np.unique(table.reader_units[edges]).tolist():
                if active[r, u] or needed & structure.find_fed_writers(r, u):
                    edges_in = edges[table.reader_units[edges] == u]
                    connected[edges_in] = True
                    retained_edges = edges_in[retained.numpy()[edges_in]]
                    needed |= set(
                        zip(
                            table.writers[retained_edges].tolist(),
                            table.writer_units[retained_edges].tolist(),
                            strict=True,
                        )
                    )
        return torch.from_numpy(connected & ~self.blocked)

    @cached_property
    def runs(self) -> list[MaskedRun]:
        """The runs in each joint state of the choices."""
        runs = []
        for states in self.choices:
            sides = (side.with_choices(states) for side in (self.clean, self.corrupt))
            clean, corrupt = (run_with_cells(side, self.metric.nodes) for side in sides)
            runs.append(MaskedRun(self.structure, clean, corrupt, self.needed, self.metric.nodes, self.clean))
        return runs

    def evaluate(self, retained: Tensor) -> Tensor:
        """The metric of some circuits.

        Args:
            retained: The mask of the retained edges, `[circuit, edge]`.

        Returns:
            The metric, `[circuit, example]`.
        """
        size = max(1, self.memory // self._estimate_bytes())
        return torch.cat([self._evaluate_metric(retained[k : k + size]) for k in range(0, len(retained), size)])

    def evaluate_with_grad(self, gates: Tensor) -> Tensor:
        """The metric, `[example]`, of a circuit in which edges are retained in part: factors from 0 to 1, `[edge]`."""
        outcomes = [run.compute_outcomes(gates[None]) for run in self.runs]
        return self.metric.evaluate_with_grad(self._marginalize(outcomes))

    def evaluate_clean(self) -> Tensor:
        """The metric of the clean run, `[example]`: that of the circuit of all edges."""
        return self.evaluate(torch.ones(1, len(self.edge_names), dtype=torch.bool))[0]

    def evaluate_corrupt(self) -> Tensor:
        """The metric of the corrupt run, `[example]`: that of the circuit without edges."""
        return self.evaluate(torch.zeros(1, len(self.edge_names), dtype=torch.bool))[0]

    @torch.no_grad()
    def _evaluate_metric(self, retained: Tensor) -> Tensor:
        """The metric of circuits that fit in memory."""
        return self.metric(self._marginalize([run.compute_outcomes(retained) for run in self.runs]))

    def _marginalize(self, outcomes: Sequence[Mapping[int, Tensor]]) -> Outcomes:
        """The outcomes, averaged over the joint states of the choices."""
        model, averaged = self.clean.model, {}
        for node in self.metric.nodes:
            is_discrete = locate_node(model, node)[0].tpm.kind == "discrete" and node not in model.do
            averaged[node] = self.choices.marginalize([values[node] for values in outcomes], is_discrete=is_discrete)
        return averaged

    def _estimate_bytes(self) -> int:
        """The memory of one circuit: the values of all groups, and the deviations of all readers of one group."""
        state, structure, total, largest = self.runs[0].corrupt, self.structure, 0, 0
        for index in structure.relevant:
            spec = state.network.specs[index]
            total += math.prod(get_layout_shape(state, spec)) * math.prod(spec.shape)
        for reader in structure.reader_groups:
            units = len(structure.list_units(reader.target))
            sizes = [math.prod(get_layout_shape(state, state.network.specs[i])[:-1]) for i in reader.chain]
            widths = [math.prod(state.network.specs[i].shape) for i in reader.chain]
            words = max(state.word_counts.values(), default=1)
            largest = max(largest, 4 * units * words * max(map(math.prod, zip(sizes, widths, strict=True)), default=1))
        return max(1, len(self.clean) * state.dtype.itemsize * (3 * total + largest))


def build_edge_runner(clean: object, corrupt: object, metric: object, memory: int = DEFAULT_MEMORY) -> EdgeRunner:
    """Validate the sentences and the metric, and build the runner of their circuits.

    Args:
        clean: The sentence or sentences that circuits run.
        corrupt: The corrupt sentence or sentences.
        metric: The metric, as for `bt.sweep`.
        memory: The approximate number of bytes that are used at once.

    Returns:
        The runner.
    """
    clean_examples, corrupt_examples = parse_example_pair(clean, corrupt)
    return build_runner(clean_examples, corrupt_examples, metric, memory)


def build_runner(clean_examples: Examples, corrupt_examples: Examples, metric: object, memory: int) -> EdgeRunner:
    """The runner of the circuits of valid examples."""
    if not has_difference(clean_examples, corrupt_examples):
        actual = "clean and corrupt sentences with the same values"
        raise BNetError("corrupt", expected="a pair that differs", actual=actual)
    parsed = parse_metric(clean_examples, metric)
    structure = build_structure(clean_examples, corrupt_examples, parsed.nodes)
    model = clean_examples.model
    specs, ground = model.network.specs, model.ground
    targets = {reader.target.group.index for reader in structure.reader_groups}
    touched = [int(ground.offsets[index]) for index in sorted(targets) if not specs[index].tpm.is_random]
    choices = enumerate_choices(corrupt_examples, clean_examples, touched, parsed.nodes, ("corrupt", "clean"))
    states = next(iter(choices))
    prepared = clean_examples.with_choices(states)
    needed = find_needed_positions(prepared.model, parsed.nodes)
    for side in (prepared, corrupt_examples.with_choices(states)):
        outcomes = {ground.group_of(node).index for node in parsed.nodes}
        obstacle = find_run_obstacle(side, {*needed.ancestor_words, *outcomes})
        if obstacle is not None:
            raise UnsupportedError(f"edges cannot share a run, because {obstacle}")
    return EdgeRunner(clean_examples, corrupt_examples, structure, parsed, choices, needed, check_int("memory", memory))


@dataclass
class MaskedRun:
    """The clean and the corrupt run in one joint state of the choices.

    Args:
        structure: The edges of the net.
        clean: The clean run, `[1, example, *plates, word, *shape]` by node group.
        corrupt: The corrupt run.
        needed: The words that lead to an outcome.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        examples: The clean sentences.
    """

    structure: EdgeStructure
    clean: ExecutionState
    corrupt: ExecutionState
    needed: NeededPositions
    outcome_nodes: Sequence[int]
    examples: Examples

    @cached_property
    def readers_by_target(self) -> dict[int, list[int]]:
        """The numbers of the reader groups of each target."""
        by_target: dict[int, list[int]] = {}
        for r, reader in enumerate(self.structure.reader_groups):
            by_target.setdefault(reader.target.group.index, []).append(r)
        return by_target

    @cached_property
    def edge_ids(self) -> dict[tuple[int, int], Tensor]:
        """For each group of readers and of writers, the edge of each pair of units, `[reader, writer]`; -1 for none."""
        table, ids = self.structure.edges, dict[tuple[int, int], Tensor]()
        keys = table.readers * (len(self.structure.writer_groups) + 1) + table.writers
        for key in np.unique(keys).tolist():
            edges = np.flatnonzero(keys == key)
            r, w = divmod(key, len(self.structure.writer_groups) + 1)
            reader, writer = self.structure.reader_groups[r].target, self.structure.writer_groups[w].spec
            shape = len(self.structure.list_units(reader)), len(self.structure.list_units(writer))
            grid = torch.full(shape, -1)
            grid[table.reader_units[edges], table.writer_units[edges]] = torch.from_numpy(edges)
            ids[r, w] = grid.to(self.corrupt.device)
        return ids

    @cached_property
    def is_norm(self) -> dict[int, bool]:
        """Whether a linear group contains the scale of a norm."""
        norms = {}
        with torch.no_grad():
            for index in {index for reader in self.structure.reader_groups for index in reader.chain}:
                spec = self.corrupt.network.specs[index]
                if not self.structure.get_linear_positions(spec):
                    continue
                context, parents = gather_parents(self.corrupt, spec)
                norms[index] = spec.tpm.norm_scale(context, *parents) is not None
        return norms

    def compute_outcomes(self, retained: Tensor) -> Outcomes:
        """The outcome of each outcome node, `[circuit, example, *shape]`.

        Args:
            retained: The mask of the retained edges, or their factors, `[circuit, edge]`.
        """
        circuit = CircuitValues(self, retained.to(self.corrupt.device, self.corrupt.dtype))
        for index in sorted(self.structure.relevant):
            circuit.compute_group(index)
        return {node: circuit.get_outcome(node) for node in self.outcome_nodes}


@dataclass
class CircuitValues:
    """The values of some circuits, by node group, in topological order.

    Args:
        run: The clean and the corrupt run.
        retained: The factors of edges, `[circuit, edge]`: 1 for a retained edge.
    """

    run: MaskedRun
    retained: Tensor
    values: dict[int, Tensor] = field(default_factory=dict)
    outcome_words: dict[int, int] = field(default_factory=dict)
    _changes: dict[int, Tensor] = field(default_factory=dict)
    _mapped: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def structure(self) -> EdgeStructure:
        """The edges of the net."""
        return self.run.structure

    @property
    def count(self) -> int:
        """The number of circuits."""
        return len(self.retained)

    def compute_group(self, index: int) -> None:
        """Compute a group of targets, of writers, or of nodes between them; other linear groups belong to readers."""
        spec, structure = self.run.clean.network.specs[index], self.structure
        if index not in self.run.needed.ancestor_words:
            return
        readers = self.run.readers_by_target.get(index, [])
        is_outcome = index in structure.outcomes
        is_linear = bool(structure.get_linear_positions(spec)) and index not in structure.writer_index
        if is_linear and not readers:
            return
        if spec.tpm.is_random and not is_outcome:
            return
        if index in structure.leaves or (not readers and not self._has_computed_parent(spec)):
            if index in self.run.clean.values:
                self.values[index] = self.run.clean.values[index]
        else:
            self.values[index] = self._evaluate(spec, readers, is_outcome=is_outcome)
        w = structure.writer_index.get(index)
        if w is not None:
            self._changes[w] = self.values[index] - self._get_corrupt_part(spec, w)
            if structure.writer_groups[w].is_part and is_outcome:  # the value contains the linear slots
                self._changes[w] = self._evaluate(spec, readers, is_outcome=False) - self._get_corrupt_part(spec, w)

    def _has_computed_parent(self, spec: NodeSpec) -> bool:
        """Whether a parent has a value that differs from the clean run."""
        return any(parent.index in self.values for parent in spec.parents)

    def _get_corrupt_part(self, spec: NodeSpec, w: int) -> Tensor:
        """What a group of writers writes in the corrupt run."""
        if not self.structure.writer_groups[w].is_part:
            return self.run.corrupt.values[spec.group.index]
        context, parents = gather_parents(self.run.corrupt, spec)
        linear = self.structure.get_linear_positions(spec)
        zeroed = [torch.zeros_like(parent) if k in linear else parent for k, parent in enumerate(parents)]
        return self._finish(self.run.corrupt, spec, context, zeroed)

    def _evaluate(self, spec: NodeSpec, readers: Sequence[int], *, is_outcome: bool) -> Tensor:
        """The value of a group in each circuit; for writers that are a part, without the linear slots."""
        structure, index = self.structure, spec.group.index
        linear = structure.get_linear_positions(spec)
        is_part = index in structure.writer_index and bool(linear) and not is_outcome
        units = len(structure.list_units(spec)) if readers else 1
        word = self._find_single_word(spec, readers)
        state = replace(self.run.clean, values={**self.run.clean.values, **self._expand(spec, units)})
        context, parents = gather_parents(state, spec, word)
        for r in readers:
            reader = structure.reader_groups[r]
            if is_part and set(reader.slots) <= set(linear):
                continue
            view = ReaderView(self, r, units, word)
            visible = {spec.parents[k].index: view.compute_value(spec.parents[k].index) for k in reader.slots}
            _, slots = gather_parents(replace(state, values={**state.values, **visible}), spec, word)
            parents = [slots[k] if k in reader.slots else parent for k, parent in enumerate(parents)]
        if is_part:
            parents = [torch.zeros_like(p) if k in linear else p for k, p in enumerate(parents)]
        value = self._finish(state, spec, context, parents)
        value = value if units == 1 else self._select_diagonal(spec, value, units)
        if word is not None:
            self.outcome_words[index] = word
        elif index in self.run.clean.patched and value.dim() == self.run.clean.patched[index][0].dim():
            fixed, is_set = self.run.clean.patched[index]
            value = torch.where(is_set.reshape(*is_set.shape, *[1] * (fixed.dim() - is_set.dim())), fixed, value)
        return value

    def _find_single_word(self, spec: NodeSpec, readers: Sequence[int]) -> int | None:
        """The word of an outcome that is needed at one word only, such as the logits of a language model."""
        index = spec.group.index
        if index not in self.structure.outcomes or spec.group.word_stack is None or not readers:
            return None
        if any(edge.child in self.structure.relevant for edge in self.run.clean.network.graph.out_edges[index]):
            return None
        words = np.flatnonzero(self.run.needed.ancestor_words[index])
        is_wordwise = all(is_wordwise_path(self.run.clean.network, self.structure.reader_groups[r]) for r in readers)
        return int(words[0]) if len(words) == 1 and is_wordwise else None

    def _expand(self, spec: NodeSpec, units: int) -> dict[int, Tensor]:
        """The computed values of the parents of a group, with a cell for each circuit and unit."""
        indices = {parent.index for parent in spec.parents} & self.values.keys()
        if units == 1:
            return {index: self.values[index] for index in indices}
        return {
            index: value if len(value) == 1 else value.repeat_interleave(units, 0)
            for index in indices
            for value in [self.values[index]]
        }

    def _finish(self, state: ExecutionState, spec: NodeSpec, context: object, parents: list[Tensor]) -> Tensor:
        """Evaluate a TPM; nodes with a set row of attention mix by this row."""
        index, layout = spec.group.index, state.layout
        if spec.tpm.is_random and index not in state.values:
            value = summarize_distribution(spec, context, parents)
            return layout.pad_dims(value, 1 if spec.tpm.kind == "discrete" else len(spec.shape))
        value = layout.pad_dims(evaluate_tpm(state, spec, context, parents), len(spec.shape))  # type: ignore[arg-type]
        if index in state.attention_rows:
            rows, is_set = state.attention_rows[index]
            assert isinstance(spec.tpm, Attention)
            value = torch.where(is_set[..., None], spec.tpm.mix(rows, *parents), value)
        return value

    def _select_diagonal(self, spec: NodeSpec, value: Tensor, units: int) -> Tensor:
        """The value of each unit in its own cell: from `[circuit * unit, ...]` to `[circuit, ...]`."""
        layout, sizes = self.run.clean.layout, self.run.clean.network.graph.plate_sizes
        plates = spec.group.plates
        if len(value) == 1:
            return value
        shape = list(value.shape)
        for plate in plates:
            shape[layout.axis(plate)] = sizes[plate]
        value = value.expand(shape).unflatten(0, (self.count, units))
        axes = [1 + layout.axis(plate) for plate in plates]
        moved = value.movedim(axes, list(range(2, 2 + len(axes)))).flatten(2, 1 + len(axes))
        steps = torch.arange(units, device=value.device)
        diagonal: Tensor = moved[:, steps, steps].unflatten(1, [sizes[plate] for plate in plates])
        return diagonal.movedim(list(range(1, 1 + len(axes))), [axis - 1 for axis in axes])

    def get_change(self, w: int, units: int) -> Tensor:
        """What a group of writers writes minus the corrupt run, with a cell for each circuit and unit."""
        change = self._changes[w]
        return change if len(change) == 1 or units == 1 else change.repeat_interleave(units, 0)

    def get_mapped_change(self, w: int, spec: NodeSpec) -> Tensor:
        """What each writer of a group adds to a linear group that maps it, `[circuit, writer, example, ...]`."""
        key = w, spec.group.index
        if key not in self._mapped:
            writer = self.structure.writer_groups[w].spec
            change, layout = self._changes[w], self.run.clean.layout
            count = len(self.structure.list_units(writer))
            shape = list(change.shape)
            sizes = self.run.clean.network.graph.plate_sizes
            for plate in writer.group.plates:
                shape[layout.axis(plate)] = sizes[plate]
            mask = torch.eye(count, dtype=change.dtype, device=change.device)
            mask = _spread_units(mask, writer, layout, sizes, change.dim())
            single = (change.expand(shape)[:, None] * mask[None]).flatten(0, 1)
            mapped = self.map_linear(spec, {writer.group.index: single})
            self._mapped[key] = mapped.unflatten(0, (len(change), count))
        return self._mapped[key]

    def map_linear(self, spec: NodeSpec, deviations: Mapping[int, Tensor], word: int | None = None) -> Tensor:
        """The linear part of a group, applied to deviations of its linear parents; without the scale of a norm."""
        corrupt, linear = self.run.corrupt, self.structure.get_linear_positions(spec)
        zeros = {spec.parents[k].index: torch.zeros_like(corrupt.values[spec.parents[k].index][:1]) for k in linear}
        results = []
        for values in ({**zeros, **deviations}, zeros):
            context, parents = gather_parents(replace(corrupt, values={**corrupt.values, **values}), spec, word)
            if {spec.parents[k].index for k in linear} & {
                parent.index for k, parent in enumerate(spec.parents) if k not in linear
            }:
                _, unchanged = gather_parents(corrupt, spec, word)
                parents = [p if k in linear else unchanged[k] for k, p in enumerate(parents)]
            results.append(self._finish(corrupt, spec, context, parents))
        return results[0] - results[1]

    def get_outcome(self, node: int) -> Tensor:
        """The outcome of a node, `[circuit, example, *shape]`."""
        ground, layout = self.run.examples.model.ground, self.run.clean.layout
        group, index = ground.unravel_index(node)
        value = self.values[group.index] if group.index in self.values else self.run.clean.values[group.index]
        position = dict(zip(ground.axes(group), index, strict=True))
        for plate in reversed((*layout.plates, "word")):
            axis = layout.axis(plate)
            value = value.select(axis, position.get(plate, 0) if value.shape[axis] > 1 else 0)
        return value.expand(self.count, len(self.run.examples), *value.shape[2:])


def _spread_units(mask: Tensor, spec: NodeSpec, layout: object, sizes: Mapping[str, int], dims: int) -> Tensor:
    """A mask `[cell, unit]` with the units along the plates of a group, in a layout of `dims` dims, cells first."""
    plates = spec.group.plates
    leading = mask.shape[:-1]
    shape = [1] * (dims - 1)
    for plate in plates:
        shape[layout.axis(plate) - 1] = sizes[plate]  # type: ignore[attr-defined]
    order = sorted(range(len(plates)), key=lambda k: layout.axis(plates[k]))  # type: ignore[attr-defined]
    grid = mask.reshape(*leading, *(sizes[plate] for plate in plates))
    return grid.permute(*range(len(leading)), *(len(leading) + k for k in order)).reshape(*leading, *shape)


@dataclass
class ReaderView:
    """What the readers of a group see: deviations of linear groups from the corrupt run.

    Args:
        circuit: The values of the circuits.
        number: The number of the group of readers.
        units: The number of cells for each circuit: the readers of the group.
        word: The only word that is needed; None for all words.
    """

    circuit: CircuitValues
    number: int
    units: int
    word: int | None
    deviations: dict[int, Tensor | None] = field(default_factory=dict)

    @property
    def reader(self) -> ReaderGroup:
        """The group of readers."""
        return self.circuit.structure.reader_groups[self.number]

    def compute_value(self, index: int) -> Tensor:
        """The value of a group as the readers see it, `[circuit * unit, example, *plates, word, *shape]`."""
        corrupt = self._narrow(self.circuit.run.corrupt.values[index])
        deviation = self.compute_deviation(index)
        return corrupt if deviation is None else corrupt + deviation

    def compute_deviation(self, index: int) -> Tensor | None:
        """The deviation of a group; None if it is zero."""
        if index not in self.deviations:
            self.deviations[index] = self._compute_deviation(index)
        return self.deviations[index]

    def _compute_deviation(self, index: int) -> Tensor | None:
        structure, run = self.circuit.structure, self.circuit.run
        spec = run.clean.network.specs[index]
        linear = structure.get_linear_positions(spec)
        total: Tensor | None = None
        if linear:
            parents = dict.fromkeys(spec.parents[k].index for k in linear)
            if run.is_norm[index]:
                total = self._compute_norm(spec, parents)
            else:
                for parent in parents:
                    total = _add(total, self._map_parent(spec, parent))
        w = structure.writer_index.get(index)
        if w is not None and (mask := self._get_mask(w)) is not None:
            layout, sizes = run.clean.layout, run.clean.network.graph.plate_sizes
            change = self._narrow(self.circuit.get_change(w, self.units))
            factors = _spread_units(mask.flatten(0, 1), structure.writer_groups[w].spec, layout, sizes, change.dim())
            total = _add(total, change * factors)
        if total is not None and index in run.clean.patched and linear:
            fixed, is_set = run.clean.patched[index]
            difference = self._narrow(fixed - run.corrupt.values[index])
            is_set = self._narrow(is_set.reshape(*is_set.shape, *[1] * (fixed.dim() - is_set.dim())))
            total = torch.where(is_set, difference, total)
        return total

    def _map_parent(self, spec: NodeSpec, parent: int) -> Tensor | None:
        """What one linear parent adds to the deviation of a group."""
        structure, run = self.circuit.structure, self.circuit.run
        linear = structure.get_linear_positions(spec)
        if count := find_residuals(spec, linear).get(parent):
            deviation = self.compute_deviation(parent)
            return deviation if deviation is None or count == 1 else count * deviation
        w = structure.writer_index.get(parent)
        if w is not None and not structure.get_linear_positions(run.clean.network.specs[parent]):
            mask = self._get_mask(w)
            if mask is None:
                return None
            mapped = self._narrow(self.circuit.get_mapped_change(w, spec), 1)  # [circuit or 1, writer, example, ...]
            flat = mapped.flatten(2)
            product: Tensor
            if len(mapped) == 1:
                product = mask.flatten(0, 1) @ flat[0]
            else:
                product = torch.bmm(mask, flat).flatten(0, 1)
            result: Tensor = product.unflatten(1, mapped.shape[2:])
            return result
        deviation = self.compute_deviation(parent)
        return None if deviation is None else self.circuit.map_linear(spec, {parent: deviation}, self.word)

    def _compute_norm(self, spec: NodeSpec, parents: Mapping[int, None]) -> Tensor | None:
        """The deviation of a norm, whose scale depends on what the readers see."""
        corrupt = self.circuit.run.corrupt
        deviations = {index: self.compute_deviation(index) for index in parents}
        if all(deviation is None for deviation in deviations.values()):
            return None
        visible = {index: self.compute_value(index) for index in parents}
        context, slots = gather_parents(replace(corrupt, values={**corrupt.values, **visible}), spec, self.word)
        value = self.circuit._finish(corrupt, spec, context, slots)
        return value - self._narrow(corrupt.values[spec.group.index])

    def _get_mask(self, w: int) -> Tensor | None:
        """The factors of the edges from a group of writers, `[circuit, reader, writer]`; None if there are no edges."""
        ids = self.circuit.run.edge_ids.get((self.number, w))
        if ids is None:
            return None
        mask = self.circuit.retained[:, ids.clamp(min=0)] * (ids >= 0)
        return mask if mask.shape[1] == self.units else mask[:, :1]

    def _narrow(self, value: Tensor, offset: int = 0) -> Tensor:
        """A value at the needed word."""
        axis = self.circuit.run.clean.layout.word_dim + offset
        return value if self.word is None or value.shape[axis] == 1 else value.narrow(axis, self.word, 1)


def _add(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    """The sum of two deviations, of which None is zero."""
    return term if total is None else total if term is None else total + term
