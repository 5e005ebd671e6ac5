"""Runs of circuits of edges: a reader sees the writers of its retained edges in this run, others in the corrupt one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_int
from bnet_transformer._core.naming import join_path, split_path
from bnet_transformer._core.tensors import BoolArray
from bnet_transformer.compiler.gather import ExecutionState, gather_parents
from bnet_transformer.compiler.linear import adds_units, find_residuals, is_norm, map_units
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, UnsupportedError
from bnet_transformer.graph import ancestors
from bnet_transformer.interventions.ablation import Ablation
from bnet_transformer.interventions.circuit_arrows import has_same_intervention
from bnet_transformer.interventions.circuit_runs import (
    BETWEEN,
    INPUT,
    OUTCOME,
    CircuitParts,
    CircuitRuns,
    describe_node,
    describe_unchanged,
    evaluate_group,
    find_changed_nodes,
    get_outcomes,
    restore_set_values,
    run_with_cells,
)
from bnet_transformer.interventions.edge_attribution import find_blocked_edges
from bnet_transformer.interventions.edges import READOUT, EdgeStructure, ReaderGroup, WriterUnit, is_wordwise_path
from bnet_transformer.interventions.examples import (
    DEFAULT_MEMORY,
    EnumeratedChoices,
    Examples,
    Metric,
    enumerate_choices,
    has_difference,
    parse_example_pair,
    parse_metric,
)
from bnet_transformer.interventions.linear_pass import get_writer_values
from bnet_transformer.interventions.parse_cells import build_structure
from bnet_transformer.interventions.patched_run import (
    NeededPositions,
    PatchedRun,
    find_needed_positions,
    get_layout_shape,
)
from bnet_transformer.reference import locate_node

# --------------------------------------------------------------------------------------------------------------------
# What the readers of a circuit see: the corrupt run, and a deviation that is the sum over their retained writers.
#
# In a sum of writers, the deviation of all readers is one product: the mask of the edges times what each writer adds to
# the sum. After a norm, it is computed for each reader.


# What some writers add to a group minus the corrupt run, and their numbers among all writers: `[writer]` and
# `[circuit or 1, writer, example, *plates, word, *shape]`.
WriterChanges = tuple[Tensor, Tensor]


@dataclass
class ReaderView:
    """What the readers of a group see: deviations of linear groups from the corrupt run.

    The readers are copies along the plates of their target, `[circuit, example, *plates, word, *shape]`, or separate
    cells, `[circuit * unit, ...]`.

    Args:
        circuit: The values of the circuits.
        number: The number of the group of readers.
        word: The only word that is needed; None for all words.
    """

    circuit: CircuitValues
    number: int
    word: int | None
    deviations: dict[int, Tensor | None] = field(default_factory=dict)

    @property
    def reader(self) -> ReaderGroup:
        """The group of readers."""
        return self.circuit.structure.reader_groups[self.number]

    @cached_property
    def mask(self) -> Tensor:
        """The factors of the edges from all writers, `[circuit, reader, writer]`."""
        return self.circuit.padded[:, self.circuit.run.edge_ids[self.number]]

    def compute_value(self, index: int) -> Tensor:
        """The value of a group as the readers see it."""
        corrupt = self._narrow(self.circuit.run.corrupt.values[index])
        deviation = self.compute_deviation(index)
        return corrupt if deviation is None else corrupt + deviation

    def compute_deviation(self, index: int) -> Tensor | None:
        """The deviation of a group; None if it is zero."""
        if index not in self.deviations:
            run = self.circuit.run
            if index not in run.sums:
                self.deviations[index] = self._compute_deviation(index)
            elif index in run.structure.writer_index and not run.structure.list_linear_parents(index):
                self.deviations[index] = self._select_writers(index)
            else:
                self.deviations[index] = self._multiply(self.circuit.get_sum(index))
        return self.deviations[index]

    def _multiply(self, parts: Sequence[WriterChanges]) -> Tensor | None:
        """The sum over writers, for each reader."""
        total: Tensor | None = None
        for columns, changes in parts:
            values, mask = self._narrow(changes, 1), self.mask[:, :, columns]
            flat = values.flatten(2)
            product: Tensor
            product = (mask.flatten(0, 1) @ flat[0]).unflatten(0, mask.shape[:2]) if len(flat) == 1 else mask @ flat
            total = _add(total, product.unflatten(2, values.shape[2:]))
        return None if total is None else self._align_readers(total)

    def _align_readers(self, value: Tensor) -> Tensor:
        """A value `[circuit, reader, example, *plates, word, *shape]` with the readers as copies, or as cells."""
        target, state = self.reader.target.group, self.circuit.run.clean
        if not self.circuit.run.has_copies[target.index]:
            return value.flatten(0, 1)
        axes = [state.layout.axis(plate) for plate in target.plates]
        copies: Tensor = value.squeeze([1 + axis for axis in axes]) if axes else value.squeeze(1)
        if not axes:
            return copies
        copies = copies.unflatten(1, [state.network.graph.plate_sizes[plate] for plate in target.plates])
        result: Tensor = copies.movedim(list(range(1, 1 + len(axes))), axes)
        return result

    def _select_writers(self, index: int) -> Tensor:
        """The deviation of a group of writers without a sum: each unit is a writer."""
        run, total = self.circuit.run, None
        spec = run.clean.network.specs[index]
        for w in run.list_changes(self.circuit.structure.writer_index[index]):
            change, mask = self._narrow(self.circuit.changes[w]), self.mask[:, :, slice(*run.first_columns[w : w + 2])]
            factors = run.structure.spread_units(mask, spec, run.clean.layout, change.dim())
            total = _add(total, factors * change[:, None])
        assert total is not None
        return self._align_readers(total)

    def _compute_deviation(self, index: int) -> Tensor | None:
        """The deviation of a group that is no sum of writers."""
        structure, run = self.circuit.structure, self.circuit.run
        spec = run.clean.network.specs[index]
        total: Tensor | None = None
        if run.is_norm(index):
            total = self._compute_norm(spec)
        else:
            for parent in run.structure.list_linear_parents(index):
                total = _add(total, self._map_parent(spec, parent))
        if index in structure.writer_index:
            total = _add(total, self._select_writers(index))
        if total is not None and index in run.clean.patched and run.structure.list_linear_parents(index):
            fixed, is_set = run.clean.patched[index]
            difference = self._narrow(fixed - run.corrupt.values[index])
            is_set = self._narrow(is_set.reshape(*is_set.shape, *[1] * (fixed.dim() - is_set.dim())))
            total = torch.where(is_set, difference, total)
        return total

    def _map_parent(self, spec: NodeSpec, parent: int) -> Tensor | None:
        """What one linear parent adds to the deviation of a group."""
        run, index = self.circuit.run, spec.group.index
        if run.is_mapped_writer(index, parent):
            return self._multiply(self.circuit.get_mapped(parent, index))
        deviation = self.compute_deviation(parent)
        if deviation is None:
            return None
        if count := run.residuals[index].get(parent):
            return count * deviation
        return self.circuit.map_linear(spec, {parent: deviation}, self.word)

    def _compute_norm(self, spec: NodeSpec) -> Tensor | None:
        """The deviation of a norm, whose scale depends on what the readers see."""
        corrupt = self.circuit.run.corrupt
        parents = self.circuit.structure.list_linear_parents(spec.group.index)
        if all(self.compute_deviation(parent) is None for parent in parents):
            return None
        visible = {index: self.compute_value(index) for index in parents}
        context, slots = gather_parents(replace(corrupt, values={**corrupt.values, **visible}), spec, self.word)
        value = evaluate_group(corrupt, spec, context, slots, self.word)
        return value - self._narrow(corrupt.values[spec.group.index])

    def _narrow(self, value: Tensor, offset: int = 0) -> Tensor:
        """A value at the needed word."""
        axis = self.circuit.run.clean.layout.word_dim + offset
        return value if self.word is None or value.shape[axis] == 1 else value.narrow(axis, self.word, 1)


def _add(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    """The sum of two deviations, of which None is zero."""
    return term if total is None else total if term is None else total + term


# --------------------------------------------------------------------------------------------------------------------
# Runs of circuits: a reader sees the writers of its retained edges in this run, and the others in the corrupt run.
#
# Groups are computed in topological order. What a reader sees is `corrupt + D`, with the deviation D from the corrupt
# run (`ReaderView`). Readers of one group that see different states (one for each head) are copies along the plates of
# the group, if no group between the sums of writers and the group has or joins these plates. Otherwise they are
# separate cells: a value is `[circuit * unit, example, *plates, word, *shape]`.


Outcomes = dict[int, Tensor]


@dataclass
class MaskedRun:
    """The clean and the corrupt run in one joint state of the choices.

    Args:
        structure: The edges of the net.
        clean: The clean run, `[1, example, *plates, word, *shape]` by node group.
        corrupt: The run from which deviations are computed: the corrupt run, the clean run with the values of an
            ablation at all writers, or any run if these values depend on those of the writers.
        needed: The words that lead to an outcome.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        examples: The clean sentences.
        ablation: An ablation whose values depend on those of the writers in the run of the circuit.
    """

    structure: EdgeStructure
    clean: ExecutionState
    corrupt: ExecutionState
    needed: NeededPositions
    outcome_nodes: Sequence[int]
    examples: Examples
    ablation: Ablation | None = None

    @cached_property
    def readers_by_target(self) -> dict[int, list[int]]:
        """The numbers of the reader groups of each target."""
        by_target: dict[int, list[int]] = {}
        for r, reader in enumerate(self.structure.reader_groups):
            by_target.setdefault(reader.target.group.index, []).append(r)
        return by_target

    @cached_property
    def first_columns(self) -> list[int]:
        """The number of the first writer of each group of writers, among all writers; then the number of writers.

        With an ablation that depends on values, each writer has a second number: for what edges that are left out
        transmit.
        """
        counts = [self.structure.count_units(writer.spec) for writer in self.structure.writer_groups]
        return [0, *np.cumsum(counts * (1 if self.ablation is None else 2)).tolist()]

    def list_changes(self, w: int) -> list[int]:
        """The keys of the changes of a group of writers: along retained edges, and along those that are left out."""
        return [w] if self.ablation is None else [w, w + len(self.structure.writer_groups)]

    @cached_property
    def edge_ids(self) -> list[Tensor]:
        """For each group of readers the edge of each pair, `[reader, writer]`; the number of edges for no edge."""
        table, tables, num_groups = self.structure.edges, [], len(self.structure.writer_groups)
        columns = np.array(self.first_columns)[table.writers] + table.writer_units
        for r, reader in enumerate(self.structure.reader_groups):
            edges = np.flatnonzero(table.readers == r)
            grid = np.full((self.structure.count_units(reader.target), self.first_columns[num_groups]), len(table))
            grid[table.reader_units[edges], columns[edges]] = edges
            grid = grid if self.ablation is None else np.concatenate([grid, grid + len(table) + 1], 1)
            tables.append(torch.from_numpy(grid).to(self.corrupt.device))
        return tables

    @cached_property
    def residuals(self) -> dict[int, dict[int, int]]:
        """The linear parents that each linear group adds unchanged, with their number of slots."""
        specs = self.corrupt.network.specs
        groups = {index for reader in self.structure.reader_groups for index in reader.chain}
        return {
            index: find_residuals(specs[index], self.structure.get_linear_positions(specs[index])) for index in groups
        }

    def is_norm(self, index: int) -> bool:
        """Whether a linear group contains the scale of a norm."""
        return is_norm(self.corrupt.network.specs[index]) and bool(self.structure.list_linear_parents(index))

    @cached_property
    def sums(self) -> frozenset[int]:
        """The linear groups that are sums of writers, each of which is mapped once for all readers."""
        sums = set[int]()
        for index in sorted(self.residuals):
            parents = self.structure.list_linear_parents(index)
            is_set = index in self.clean.patched and bool(parents)
            if is_set or self.is_norm(index):
                continue
            # Of a sum that a group maps, the product for each reader is cheaper than that for each writer.
            if all(self.is_mapped_writer(index, p) or (p in self.residuals[index] and p in sums) for p in parents):
                sums.add(index)
        return frozenset(sums)

    def is_mapped_writer(self, index: int, parent: int) -> bool:
        """Whether a linear group maps a parent that is a writer and no sum."""
        is_writer = parent in self.structure.writer_index and not self.structure.list_linear_parents(parent)
        return is_writer and parent not in self.residuals[index]

    @cached_property
    def has_copies(self) -> dict[int, bool]:
        """Whether the readers of each target are copies along its plates: no group after the sums has or joins them."""
        return {i: all(self._can_copy(r) for r in numbers) for i, numbers in self.readers_by_target.items()}

    def _can_copy(self, r: int) -> bool:
        """Whether no group between the sums and the target of a reader has, or joins, the plates of the target."""
        reader, specs = self.structure.reader_groups[r], self.corrupt.network.specs
        plates, visited = {*reader.target.group.plates}, set[int]()
        stack = [(reader.target, k) for k in reader.slots]
        while stack:
            spec, k = stack.pop()
            parent = spec.parents[k]
            if spec is not reader.target and self.is_mapped_writer(spec.group.index, parent.index):
                continue
            if plates & {*parent.over, *dict(parent.pick), *specs[parent.index].group.plates}:
                return False
            if parent.index not in self.sums and parent.index not in visited:
                visited.add(parent.index)
                parent_spec = specs[parent.index]
                stack += [(parent_spec, j) for j in self.structure.get_linear_positions(parent_spec)]
        return True

    def compute_outcomes(self, retained: Tensor) -> Outcomes:
        """The outcome of each outcome node, `[circuit, example, *shape]`.

        Args:
            retained: The mask of the retained edges, or their factors, `[circuit, edge]`.
        """
        circuit = CircuitValues(self, retained.to(self.corrupt.device, self.corrupt.dtype))
        for index in sorted(self.structure.relevant):
            circuit.compute_group(index)
        size = circuit.count, len(self.examples)
        return get_outcomes(self.examples.model.ground, self.outcome_nodes, self.clean, circuit.values, size)


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
    changes: dict[int, Tensor] = field(default_factory=dict)  # what each group of writers writes, minus the corrupt run
    _sums: dict[int, list[WriterChanges]] = field(default_factory=dict)
    _mapped: dict[tuple[int, int], list[WriterChanges]] = field(default_factory=dict)

    @property
    def structure(self) -> EdgeStructure:
        """The edges of the net."""
        return self.run.structure

    @property
    def count(self) -> int:
        """The number of circuits."""
        return len(self.retained)

    @cached_property
    def padded(self) -> Tensor:
        """The factors of edges, and zero for a pair without an edge, `[circuit, edge + 1]`.

        With an ablation that depends on values, the same follows for what is left out.
        """
        zero = self.retained.new_zeros(self.count, 1)
        left_out = [] if self.run.ablation is None else [1 - self.retained, zero]
        return torch.cat([self.retained, zero, *left_out], 1)

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
        is_clean = not readers and not any(parent.index in self.values for parent in spec.parents)
        if index in structure.leaves or is_clean:
            if index in self.run.clean.values:
                self.values[index] = self.run.clean.values[index]
        else:
            self.values[index] = self._evaluate(spec, readers, is_outcome=is_outcome)
        w = structure.writer_index.get(index)
        if w is not None:
            corrupt = get_writer_values(structure, self.run.corrupt, w)
            self.changes[w] = self.values[index] - corrupt
            if structure.writer_groups[w].is_part and is_outcome:  # the value contains the linear slots
                self.changes[w] = self._evaluate(spec, readers, is_outcome=False) - corrupt
            if self.run.ablation is not None:
                left_out = self.run.ablation.apply(self.run.clean, index, self.values[index], self.run.corrupt)
                self.changes[self.run.list_changes(w)[1]] = left_out - corrupt

    def _evaluate(self, spec: NodeSpec, readers: Sequence[int], *, is_outcome: bool) -> Tensor:
        """The value of a group in each circuit; for writers that are a part, without the linear slots."""
        structure, index = self.structure, spec.group.index
        linear = structure.get_linear_positions(spec)
        is_part = index in structure.writer_index and bool(linear) and not is_outcome
        units = structure.count_units(spec) if readers and not self.run.has_copies[index] else 1
        word = self._find_single_word(spec, readers)
        state = replace(self.run.clean, values={**self.run.clean.values, **self._expand(spec, units)})
        context, parents = gather_parents(state, spec, word)
        for r in readers:
            reader = structure.reader_groups[r]
            if is_part and set(reader.slots) <= set(linear):
                continue
            view = ReaderView(self, r, word)
            visible = {spec.parents[k].index: view.compute_value(spec.parents[k].index) for k in reader.slots}
            _, slots = gather_parents(replace(state, values={**state.values, **visible}), spec, word)
            parents = [slots[k] if k in reader.slots else parent for k, parent in enumerate(parents)]
        if is_part:
            parents = [torch.zeros_like(p) if k in linear else p for k, p in enumerate(parents)]
        value = evaluate_group(state, spec, context, parents, word)
        value = value if units == 1 else self._select_diagonal(spec, value, units)
        return restore_set_values(self.run.clean, index, value, word)

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

    def get_sum(self, index: int) -> list[WriterChanges]:
        """What the writers before a sum, and in it, add to it."""
        if index not in self._sums:
            parts, residuals = list[WriterChanges](), self.run.residuals[index]
            for parent in self.structure.list_linear_parents(index):
                if parent in residuals:
                    count = residuals[parent]
                    parts += [(columns, x if count == 1 else count * x) for columns, x in self.get_sum(parent)]
                else:
                    parts += self.get_mapped(parent, index)
            if (w := self.structure.writer_index.get(index)) is not None:
                parts += map(self._split_writers, self.run.list_changes(w))
            self._sums[index] = parts
        return self._sums[index]

    def get_mapped(self, parent: int, index: int) -> list[WriterChanges]:
        """What each writer of a group adds to a linear group that maps it."""
        if (parent, index) not in self._mapped:
            keys = self.run.list_changes(self.structure.writer_index[parent])
            self._mapped[parent, index] = [self._map_changes(parent, index, w) for w in keys]
        return self._mapped[parent, index]

    def _map_changes(self, parent: int, index: int, w: int) -> WriterChanges:
        """The changes of a group of writers, as a linear group maps them."""
        corrupt = self.run.corrupt
        spec = corrupt.network.specs[index]
        if adds_units(corrupt.network, spec, parent):
            state = replace(corrupt, values={**corrupt.values, parent: self.changes[w]})
            mapped = map_units(state, self.structure.get_linear_positions(spec), spec, parent).movedim(0, 1)
            return torch.arange(*self.run.first_columns[w : w + 2], device=mapped.device), mapped
        columns, values = self._split_writers(w)
        return columns, self.map_linear(spec, {parent: values.flatten(0, 1)}).unflatten(0, values.shape[:2])

    def _split_writers(self, w: int) -> WriterChanges:
        """What each writer of a group writes minus the corrupt run; zero at the positions of the others."""
        spec, change = self.structure.writer_groups[w % len(self.structure.writer_groups)].spec, self.changes[w]
        split = self.structure.split_units(change, spec, self.run.clean.layout) if spec.group.plates else change[None]
        return torch.arange(*self.run.first_columns[w : w + 2], device=split.device), split.transpose(0, 1)

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
            results.append(evaluate_group(corrupt, spec, context, parents, word))
        return results[0] - results[1]


# --------------------------------------------------------------------------------------------------------------------
# Runs of circuits of edges, for searches and curves: masks of edges in, the metric of each circuit out.


@dataclass
class EdgeRunner(CircuitRuns):
    """Runs of circuits of edges from writers to readers.

    Args:
        clean: The sentences that a circuit runs.
        corrupt: The corrupt sentences, as many, or the ablation of the writers whose edges are left out.
        structure: The edges of the net.
        metric: The metric.
        choices: The latent choices over which outcomes are averaged.
        needed: The words that lead to an outcome.
        memory: The approximate number of bytes that are used at once.
    """

    clean: Examples
    corrupt: Examples | Ablation
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
        assert isinstance(self.corrupt, Examples)
        swapped = replace(self, clean=self.corrupt, corrupt=self.clean)
        if "blocked" in self.__dict__:  # the maps are the same in both runs
            swapped.__dict__["blocked"] = self.blocked
        return swapped

    @cached_property
    def blocked(self) -> BoolArray:
        """The edges that cannot transmit anything, by proof, `[edge]`."""
        blocked = np.ones(len(self.edge_names), dtype=bool)
        set_groups = {model.ground.group_of(node).index for model in self.clean.models for node in model.do}
        if set_groups - self.structure.word_dependent:  # weights that `do` sets may differ between the examples
            return ~blocked
        groups = frozenset(writer.spec.group.index for writer in self.structure.writer_groups)
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
        if self.relative_ablation is not None:  # then an edge that is left out transmits a value too
            retained = torch.ones_like(retained)
        needed: set[WriterUnit] = set()  # the writers that lead to the metric
        connected = np.zeros(len(table), dtype=bool)
        for r, reader in reversed([*enumerate(structure.reader_groups)]):
            edges = np.flatnonzero(table.readers == r)
            for u in np.unique(table.reader_units[edges]).tolist():
                if reader.is_readout or needed & structure.find_fed_writers(r, u):
                    edges_in = edges[table.reader_units[edges] == u]
                    connected[edges_in] = True
                    needed |= set(map(table.get_writer, edges_in[retained.numpy()[edges_in]].tolist()))
        return torch.from_numpy(connected & ~self.blocked)

    @torch.no_grad()
    def list_notes(self) -> tuple[str, ...]:
        """The edges whose writers have equal values in both runs."""
        table, structure = self.structure.edges, self.structure
        changed = [np.zeros(structure.count_units(writer.spec), dtype=bool) for writer in structure.writer_groups]
        for run, (w, writer) in itertools.product(self.runs, enumerate(structure.writer_groups)):
            index, value = writer.spec.group.index, get_writer_values(structure, run.clean, w)
            other = get_writer_values(structure, run.corrupt, w)
            if run.ablation is not None:
                other = run.ablation.apply(run.clean, index, value, run.corrupt)
            changed[w] |= find_changed_nodes(run.clean, index, value, other).reshape(len(changed[w]), -1).any(-1)
        ends = zip(table.names, table.writers.tolist(), table.writer_units.tolist(), strict=True)
        return describe_unchanged([name for name, w, unit in ends if not changed[w][unit]])

    def trace(self, retained: Tensor) -> CircuitParts:
        """The edges on a path from a writer that differs to the metric, and the arrows from readers to writers."""
        table, structure = self.structure.edges, self.structure
        connected = np.flatnonzero((self.find_connected(retained) & retained).numpy()).tolist()
        ends = {k: ((int(table.readers[k]), int(table.reader_units[k])), table.get_writer(k)) for k in connected}
        reached, needed = set[WriterUnit](), {writer for _, writer in ends.values()}
        for w, writer in enumerate(structure.writer_groups):
            if writer.kind == "input" or isinstance(self.corrupt, Ablation):
                reached |= {(w, unit) for unit in range(structure.count_units(writer.spec))}
        edge_of, nodes = dict[str, str | None](), dict[str, dict[str, Any]]()

        def describe(spec: NodeSpec, unit: int, part: str) -> dict[str, Any]:
            return describe_node(spec.group, spec.group.plates, structure.list_units(spec)[unit], part)

        for k, ((r, u), (w, v)) in ends.items():  # readers are in topological order
            if (w, v) not in reached:
                continue
            edge_of[table.names[k]] = table.names[k]
            writer, reader = structure.writer_groups[w], structure.reader_groups[r]
            first, second = split_path(table.names[k])
            nodes.setdefault(first, describe(writer.spec, v, INPUT if writer.kind == "input" else BETWEEN))
            part = OUTCOME if reader.is_readout and reader.channel == READOUT else BETWEEN
            nodes.setdefault(second, {**describe(reader.target, u, part), "channel": reader.channel})
            for fed in structure.find_fed_writers(r, u) & needed:
                reached.add(fed)
                name = structure.get_writer_names(fed[0])[fed[1]]
                nodes.setdefault(name, describe(structure.writer_groups[fed[0]].spec, fed[1], BETWEEN))
                if name != second:
                    edge_of[join_path((second, name))] = None
        return CircuitParts(edge_of, nodes, 0)

    @property
    def peer(self) -> Examples:
        """The corrupt sentences, those of a swap, or the clean ones."""
        return self.corrupt if isinstance(self.corrupt, Examples) else self.corrupt.peer or self.clean

    @property
    def relative_ablation(self) -> Ablation | None:
        """The ablation, if its values depend on those of the writers in the run of the circuit."""
        return self.corrupt if isinstance(self.corrupt, Ablation) and self.corrupt.is_relative else None

    @cached_property
    def runs(self) -> list[MaskedRun]:
        """The runs in each joint state of the choices."""
        runs, nodes, overrides = list[MaskedRun](), self.metric.nodes, dict[int, tuple[Tensor, Tensor]]()
        if isinstance(self.corrupt, Ablation):
            ground, writers = self.clean.model.ground, self.structure.writer_index
            ablated = [n for n in ancestors(ground, nodes) if ground.group_of(n).index in writers]
            overrides = self.corrupt.build_overrides(ablated)
        for states in self.choices:
            clean = run_with_cells(self.clean.with_choices(states), nodes)
            corrupt = run_with_cells(self.peer.with_choices(states), nodes, overrides)
            shared = self.needed, nodes, self.clean, self.relative_ablation
            runs.append(MaskedRun(self.structure, clean, corrupt, *shared))
        return runs

    @torch.no_grad()
    def evaluate(self, retained: Tensor) -> Tensor:
        """The metric, `[circuit, example]`, of circuits with the masks `retained`, `[circuit, edge]`."""
        parts = retained.split(max(1, self.memory // self._circuit_bytes))
        outcomes = ([run.compute_outcomes(part) for run in self.runs] for part in parts)
        return torch.cat([self.metric(self._marginalize(by_choice)) for by_choice in outcomes])

    def evaluate_with_grad(self, gates: Tensor) -> Tensor:
        """The metric, `[example]`, of a circuit in which edges are retained in part: factors from 0 to 1, `[edge]`."""
        outcomes = [run.compute_outcomes(gates[None]) for run in self.runs]
        return self.metric.evaluate_with_grad(self._marginalize(outcomes))

    def _marginalize(self, outcomes: Sequence[Mapping[int, Tensor]]) -> Outcomes:
        """The outcomes, averaged over the joint states of the choices."""
        model, averaged = self.clean.model, {}
        for node in self.metric.nodes:
            is_discrete = locate_node(model, node)[0].tpm.kind == "discrete" and node not in model.do
            averaged[node] = self.choices.marginalize([values[node] for values in outcomes], is_discrete=is_discrete)
        return averaged

    @cached_property
    def _circuit_bytes(self) -> int:
        """The memory of one circuit: the values of all groups, the changes of all writers, and what a reader sees."""
        run, structure = self.runs[0], self.structure
        sizes = {
            index: math.prod(get_layout_shape(run.corrupt, spec)) * math.prod(spec.shape)
            for index, spec in enumerate(run.corrupt.network.specs)
            if index in structure.relevant
        }
        changes = run.first_columns[-1] * max((sizes[index] for index in run.sums), default=1)
        visible = max(
            structure.count_units(reader.target) * max((sizes[i] for i in reader.chain if i not in run.sums), default=1)
            for reader in structure.reader_groups
        )
        total = 3 * sum(sizes.values()) + changes + 4 * visible
        return max(1, len(self.clean) * run.corrupt.dtype.itemsize * total)


def build_edge_runner(clean: object, corrupt: object, metric: object, memory: int = DEFAULT_MEMORY) -> EdgeRunner:
    """Validate the sentences and the metric, and build the runner of their circuits.

    Args:
        clean: The sentence or sentences that circuits run, or examples.
        corrupt: The corrupt sentence or sentences, or of examples the ablation or the corrupt ones.
        metric: The metric, as for `bt.sweep`.
        memory: The approximate number of bytes that are used at once.

    Returns:
        The runner.
    """
    is_parsed = isinstance(clean, Examples) and isinstance(corrupt, Examples | Ablation)
    clean_examples, corrupt = (clean, corrupt) if is_parsed else parse_example_pair(clean, corrupt)
    assert isinstance(clean_examples, Examples) and isinstance(corrupt, Examples | Ablation)
    peer = corrupt if isinstance(corrupt, Examples) else corrupt.peer
    if peer is not None and not has_difference(clean_examples, peer):
        actual = "clean and corrupt sentences with the same values"
        raise BNetError("corrupt", expected="a pair that differs", actual=actual)
    parsed = parse_metric(clean_examples, metric)
    structure = build_structure(clean_examples, peer, parsed.nodes)
    model = clean_examples.model
    specs, ground = model.network.specs, model.ground
    inputs = {writer.spec.group.index for writer in structure.writer_groups if writer.kind == "input"}
    for node in parsed.nodes:
        if ground.group_of(node).index in inputs:
            expected = "nodes that an edge enters, for circuits of edges"
            raise BNetError(f"metric of {ground.name(node)}", expected=expected, actual="a writer of the input")
    if peer is not None:
        _check_interventions(structure, clean_examples, peer)
    if isinstance(corrupt, Ablation):
        if parts := [writer.spec.group.name for writer in structure.writer_groups if writer.is_part]:
            hint = 'Use corrupt sentences without words=, or ground arrows (at="arrows")'
            raise UnsupportedError(f"at='edges': an ablation, or words=, cannot set a part of {parts[0]}", hint=hint)
        corrupt.check(structure.writer_index)
    targets = {reader.target.group.index for reader in structure.reader_groups}
    touched = [int(ground.offsets[index]) for index in sorted(targets) if not specs[index].tpm.is_random]
    choices = enumerate_choices(peer, clean_examples, touched, parsed.nodes, ("corrupt", "clean"))
    states = next(iter(choices))
    prepared = clean_examples.with_choices(states)
    needed = find_needed_positions(prepared.model, parsed.nodes)
    for side in (prepared, (peer or clean_examples).with_choices(states)):
        outcomes = {ground.group_of(node).index for node in parsed.nodes}
        obstacle = side.find_obstacle({*needed.ancestor_words, *outcomes})
        if obstacle is not None:
            raise UnsupportedError(f"edges cannot share a run, because {obstacle}")
    return EdgeRunner(clean_examples, corrupt, structure, parsed, choices, needed, check_int("memory", memory))


def _check_interventions(structure: EdgeStructure, clean: Examples, corrupt: Examples) -> None:
    """Raise an error for nodes that the runs set to different values, unless they are inputs or whole node groups.

    A circuit has one set of weights, and a node that is set inside the net would not be a sum of its writers in one of
    the runs only.
    """
    ground = clean.model.ground
    inputs = {writer.spec.group.index for writer in structure.writer_groups if writer.kind == "input"}
    for one, other in zip(clean.models, corrupt.models, strict=True):
        for node in sorted({*one.do, *other.do, *one.attention_rows, *other.attention_rows}):
            is_input = ground.group_of(node).index in inputs and node not in {
                **one.attention_rows,
                **other.attention_rows,
            }
            if not is_input and not has_same_intervention(one, other, node):
                name = ground.name(node)
                expected = "interventions that are equal in both runs, except on inputs"
                hint = f'Set {name} to the same value in clean and corrupt, or use ground arrows (at="arrows")'
                raise UnsupportedError('at="edges"', expected=expected, actual=f"{name}, which differs", hint=hint)
