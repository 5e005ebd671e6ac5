"""Runs of circuits: a reader sees the writers of its retained edges in this run, and the others in the corrupt run.

Groups are computed in topological order. What a reader sees is `corrupt + D`, with the deviation D from the corrupt
run (`reader_view`). Readers of one group that see different states (one for each head) are copies along the plates of
the group, if no group between the sums of writers and the group has or joins these plates. Otherwise they are separate
cells: a value is `[circuit * unit, example, *plates, word, *shape]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.compiler.evaluate import evaluate_tpm
from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.compiler.linear_groups import find_residuals
from bnet_transformer.declare import NodeSpec
from bnet_transformer.interventions.edges.entry_maps import adds_units, map_units
from bnet_transformer.interventions.edges.reader_view import ReaderView, WriterChanges, merge_changes, spread_units
from bnet_transformer.interventions.edges.structure import EdgeStructure, is_wordwise_path
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.interventions.sweeps.sparse_update import NeededPositions, summarize_distribution
from bnet_transformer.tpm import Attention

Outcomes = dict[int, Tensor]


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
    def first_columns(self) -> list[int]:
        """The number of the first writer of each group of writers, among all writers; then the number of writers."""
        counts = [self.structure.count_units(writer.spec) for writer in self.structure.writer_groups]
        return [0, *np.cumsum(counts).tolist()]

    @cached_property
    def edge_ids(self) -> list[Tensor]:
        """For each group of readers the edge of each pair, `[reader, writer]`; the number of edges for no edge."""
        table, tables = self.structure.edges, []
        columns = np.array(self.first_columns)[table.writers] + table.writer_units
        for r, reader in enumerate(self.structure.reader_groups):
            edges = np.flatnonzero(table.readers == r)
            grid = np.full((self.structure.count_units(reader.target), self.first_columns[-1]), len(table))
            grid[table.reader_units[edges], columns[edges]] = edges
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

    @cached_property
    def is_norm(self) -> dict[int, bool]:
        """Whether a linear group contains the scale of a norm."""
        norms = {}
        with torch.no_grad():
            for index in self.residuals:
                spec = self.corrupt.network.specs[index]
                if self.structure.get_linear_positions(spec):
                    context, parents = gather_parents(self.corrupt, spec)
                    norms[index] = spec.tpm.norm_scale(context, *parents) is not None
        return norms

    @cached_property
    def sums(self) -> frozenset[int]:
        """The linear groups that are sums of writers, each of which is mapped once for all readers."""
        sums = set[int]()
        for index in sorted(self.residuals):
            parents = self.list_linear_parents(index)
            is_set = index in self.clean.patched and bool(parents)
            if is_set or self.is_norm.get(index, False):
                continue
            # Of a sum that a group maps, the product for each reader is cheaper than that for each writer.
            if all(self.is_mapped_writer(index, p) or (p in self.residuals[index] and p in sums) for p in parents):
                sums.add(index)
        return frozenset(sums)

    def list_linear_parents(self, index: int) -> list[int]:
        """The linear parents of a group, each once."""
        spec = self.corrupt.network.specs[index]
        return list(dict.fromkeys(spec.parents[k].index for k in self.structure.get_linear_positions(spec)))

    def is_mapped_writer(self, index: int, parent: int) -> bool:
        """Whether a linear group maps a parent that is a writer and no sum."""
        is_writer = parent in self.structure.writer_index and not self.list_linear_parents(parent)
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
    changes: dict[int, Tensor] = field(default_factory=dict)  # what each group of writers writes, minus the corrupt run
    _sums: dict[int, list[WriterChanges]] = field(default_factory=dict)
    _mapped: dict[tuple[int, int], WriterChanges] = field(default_factory=dict)

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
        """The factors of edges, and zero for a pair without an edge, `[circuit, edge + 1]`."""
        return torch.cat([self.retained, self.retained.new_zeros(self.count, 1)], 1)

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
            self.changes[w] = self.values[index] - self._get_corrupt_part(spec, w)
            if structure.writer_groups[w].is_part and is_outcome:  # the value contains the linear slots
                self.changes[w] = self._evaluate(spec, readers, is_outcome=False) - self._get_corrupt_part(spec, w)

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
        return self.finish(self.run.corrupt, spec, context, zeroed)

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
        value = self.finish(state, spec, context, parents)
        value = value if units == 1 else self._select_diagonal(spec, value, units)
        if word is None and index in self.run.clean.patched and value.dim() == self.run.clean.patched[index][0].dim():
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

    def finish(self, state: ExecutionState, spec: NodeSpec, context: object, parents: list[Tensor]) -> Tensor:
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

    def get_sum(self, index: int) -> list[WriterChanges]:
        """What the writers before a sum, and in it, add to it."""
        if index not in self._sums:
            parts, residuals = list[WriterChanges](), self.run.residuals[index]
            for parent in self.run.list_linear_parents(index):
                if parent in residuals:
                    parts += [part.scale(residuals[parent]) for part in self.get_sum(parent)]
                else:
                    parts.append(self.get_mapped(parent, index))
            if (w := self.structure.writer_index.get(index)) is not None:
                parts.append(self._split_writers(w))
            self._sums[index] = merge_changes(parts)
        return self._sums[index]

    def get_mapped(self, parent: int, index: int) -> WriterChanges:
        """What each writer of a group adds to a linear group that maps it."""
        if (parent, index) not in self._mapped:
            corrupt, w = self.run.corrupt, self.structure.writer_index[parent]
            spec = corrupt.network.specs[index]
            if adds_units(corrupt.network, spec, parent):
                state = replace(corrupt, values={**corrupt.values, parent: self.changes[w]})
                mapped = map_units(state, self.structure, spec, parent).movedim(0, 1)
                changes = WriterChanges(self._get_columns(w), mapped)
            else:
                single = self._split_writers(w)
                mapped = self.map_linear(spec, {parent: single.values.flatten(0, 1)})
                changes = replace(single, values=mapped.unflatten(0, single.values.shape[:2]))
            self._mapped[parent, index] = changes
        return self._mapped[parent, index]

    def _get_columns(self, w: int) -> Tensor:
        """The numbers of the writers of a group, `[writer]`."""
        return torch.arange(*self.run.first_columns[w : w + 2], device=self.retained.device)

    def _split_writers(self, w: int) -> WriterChanges:
        """What each writer of a group writes minus the corrupt run; zero at the positions of the others."""
        spec, layout = self.structure.writer_groups[w].spec, self.run.clean.layout
        change, sizes = self.changes[w], self.run.clean.network.graph.plate_sizes
        columns = self._get_columns(w)
        if not spec.group.plates:
            return WriterChanges(columns, change[:, None])
        shape = list(change.shape)
        for plate in spec.group.plates:
            shape[layout.axis(plate)] = sizes[plate]
        mask = torch.eye(len(columns), dtype=change.dtype, device=change.device)
        mask = spread_units(mask, spec, layout, sizes, change.dim())
        return WriterChanges(columns, change.expand(shape)[:, None] * mask[None])

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
            results.append(self.finish(corrupt, spec, context, parents))
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
