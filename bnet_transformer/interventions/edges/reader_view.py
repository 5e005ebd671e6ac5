"""What the readers of a circuit see: the corrupt run, and a deviation that is the sum over their retained writers.

In a sum of writers, the deviation of all readers is one product: the mask of the edges times what each writer adds to
the sum. After a norm, it is computed for each reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bnet_transformer.compiler.execution_state import TensorLayout
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import NodeSpec
from bnet_transformer.interventions.edges.structure import ReaderGroup

if TYPE_CHECKING:
    from bnet_transformer.interventions.edges.masked_run import CircuitValues

MERGED = 8  # the number of tensors of the same level that are joined; this copies each tensor once a level


@dataclass(frozen=True)
class WriterChanges:
    """What some writers add to a group, minus the corrupt run.

    Args:
        columns: The numbers of the writers, among all writers, `[writer]`.
        values: The values, `[circuit or 1, writer, example, *plates, word, *shape]`.
        level: The number of times that the values were joined with others.
    """

    columns: Tensor
    values: Tensor
    level: int = 0

    def scale(self, factor: int) -> WriterChanges:
        """The changes times a factor."""
        return self if factor == 1 else replace(self, values=factor * self.values)


def merge_changes(parts: Sequence[WriterChanges]) -> list[WriterChanges]:
    """Join the parts at the end that have the same level, so that a sum of n writers has some log(n) parts."""
    merged: list[WriterChanges] = []
    for part in parts:
        merged.append(part)
        while len(merged) >= MERGED and len({other.level for other in merged[-MERGED:]}) == 1:
            merged[-MERGED:] = [_concatenate(merged[-MERGED:])]
    return merged


def _concatenate(parts: Sequence[WriterChanges]) -> WriterChanges:
    """Several parts as one."""
    shapes = [(part.values.shape[0], 1, *part.values.shape[2:]) for part in parts]
    count, _, *shape = torch.broadcast_shapes(*shapes)
    values = torch.cat([part.values.expand(count, -1, *shape) for part in parts], 1)
    return WriterChanges(torch.cat([part.columns for part in parts]), values, parts[0].level + 1)


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
            is_sum = index in self.circuit.run.sums
            self.deviations[index] = self._compute_sum(index) if is_sum else self._compute_deviation(index)
        return self.deviations[index]

    def _compute_sum(self, index: int) -> Tensor | None:
        """The deviation of a sum of writers."""
        run = self.circuit.run
        if index in run.structure.writer_index and not run.list_linear_parents(index):
            return self._select_writers(index)
        return self._multiply(self.circuit.get_sum(index))

    def _multiply(self, parts: Sequence[WriterChanges]) -> Tensor | None:
        """The sum over writers, for each reader."""
        total: Tensor | None = None
        for part in parts:
            values, mask = self._narrow(part.values, 1), self.mask[:, :, part.columns]
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
        copies = value.squeeze([1 + axis for axis in axes]) if axes else value.squeeze(1)
        if not axes:
            return copies
        by_plate: Tensor = copies.unflatten(1, [state.network.graph.plate_sizes[plate] for plate in target.plates])
        return by_plate.movedim(list(range(1, 1 + len(axes))), axes)

    def _select_writers(self, index: int) -> Tensor:
        """The deviation of a group of writers without a sum: each unit is a writer."""
        run, w = self.circuit.run, self.circuit.structure.writer_index[index]
        spec, change = run.clean.network.specs[index], self._narrow(self.circuit.changes[w])
        mask = self.mask[:, :, slice(*run.first_columns[w : w + 2])]
        factors = spread_units(mask, spec, run.clean.layout, run.clean.network.graph.plate_sizes, change.dim())
        return self._align_readers(factors * change[:, None])

    def _compute_deviation(self, index: int) -> Tensor | None:
        """The deviation of a group that is no sum of writers."""
        structure, run = self.circuit.structure, self.circuit.run
        spec = run.clean.network.specs[index]
        total: Tensor | None = None
        if run.is_norm.get(index, False):
            total = self._compute_norm(spec)
        else:
            for parent in run.list_linear_parents(index):
                total = _add(total, self._map_parent(spec, parent))
        if index in structure.writer_index:
            total = _add(total, self._select_writers(index))
        if total is not None and index in run.clean.patched and run.list_linear_parents(index):
            fixed, is_set = run.clean.patched[index]
            difference = self._narrow(fixed - run.corrupt.values[index])
            is_set = self._narrow(is_set.reshape(*is_set.shape, *[1] * (fixed.dim() - is_set.dim())))
            total = torch.where(is_set, difference, total)
        return total

    def _map_parent(self, spec: NodeSpec, parent: int) -> Tensor | None:
        """What one linear parent adds to the deviation of a group."""
        run, index = self.circuit.run, spec.group.index
        if run.is_mapped_writer(index, parent):
            return self._multiply([self.circuit.get_mapped(parent, index)])
        deviation = self.compute_deviation(parent)
        if deviation is None:
            return None
        if count := run.residuals[index].get(parent):
            return count * deviation
        return self.circuit.map_linear(spec, {parent: deviation}, self.word)

    def _compute_norm(self, spec: NodeSpec) -> Tensor | None:
        """The deviation of a norm, whose scale depends on what the readers see."""
        corrupt = self.circuit.run.corrupt
        parents = self.circuit.run.list_linear_parents(spec.group.index)
        if all(self.compute_deviation(parent) is None for parent in parents):
            return None
        visible = {index: self.compute_value(index) for index in parents}
        context, slots = gather_parents(replace(corrupt, values={**corrupt.values, **visible}), spec, self.word)
        value = self.circuit.finish(corrupt, spec, context, slots)
        return value - self._narrow(corrupt.values[spec.group.index])

    def _narrow(self, value: Tensor, offset: int = 0) -> Tensor:
        """A value at the needed word."""
        axis = self.circuit.run.clean.layout.word_dim + offset
        return value if self.word is None or value.shape[axis] == 1 else value.narrow(axis, self.word, 1)


def spread_units(mask: Tensor, spec: NodeSpec, layout: TensorLayout, sizes: Mapping[str, int], dims: int) -> Tensor:
    """A mask `[*cell, unit]` with the units along the plates of a group, in a layout of `dims` dims, cells first."""
    plates, leading, shape = spec.group.plates, mask.shape[:-1], [1] * (dims - 1)
    for plate in plates:
        shape[layout.axis(plate) - 1] = sizes[plate]
    order = sorted(range(len(plates)), key=lambda k: layout.axis(plates[k]))
    grid = mask.reshape(*leading, *(sizes[plate] for plate in plates))
    return grid.permute(*range(len(leading)), *(len(leading) + k for k in order)).reshape(*leading, *shape)


def _add(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    """The sum of two deviations, of which None is zero."""
    return term if total is None else total if term is None else total + term
