"""Edges that cannot transmit anything, by proof: the map from the writer to the reader is exactly zero.

Where no norm lies between a writer and a reader, the map is linear and does not depend on the words: the product of the
matrices on the way. It is computed for each basis vector of the writer. Exact zeros are structural: the writer writes
to entries of the state that the reader does not read. Spans with only zero in common do not suffice, as their product
is zero only up to rounding. Through a norm every entry of a state depends on all others, so that nothing is proven.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import BoolArray
from bnet_transformer.declare import NodeSpec
from bnet_transformer.interventions.edges.structure import EdgeStructure, ReaderGroup, list_linear_groups
from bnet_transformer.interventions.sweeps.edge_tangents import TangentPass
from bnet_transformer.interventions.sweeps.patched_run import PatchedRun
from bnet_transformer.interventions.sweeps.sparse_update import get_layout_shape
from bnet_transformer.tpm import TPM


def find_blocked_edges(run: PatchedRun, structure: EdgeStructure) -> BoolArray:
    """The edges whose map is exactly zero, `[edge]`.

    Args:
        run: A run of a sentence, which has the values of all groups of writers.
        structure: The edges.

    Returns:
        The mask; false wherever nothing is proven.
    """
    table = structure.edges
    is_linear = _find_linear_edges(structure)
    blocked: BoolArray = is_linear.copy()
    writers = np.unique(table.writers[is_linear]).tolist()
    width = max((math.prod(structure.writer_groups[w].spec.shape) for w in writers), default=0)
    readers = np.unique(table.readers[is_linear]).tolist()
    units = [(w, v) for w in writers for v in range(len(structure.list_units(structure.writer_groups[w].spec)))]
    for entry in range(width):
        basis = {w: vector for w in writers if (vector := _build_basis(run, structure, w, entry)) is not None}
        cells = [unit for unit in units if unit[0] in basis]
        tangents = TangentPass(run, basis, structure, readers, cells)
        tangents.compute(
            {structure.reader_groups[r].target.parents[k].index for r in readers for k in _get_slots(structure, r)}
        )
        for r in readers:
            transmits = _find_transmitting(tangents, structure.reader_groups[r])
            for k in np.flatnonzero((table.readers == r) & blocked).tolist():
                unit = int(table.writers[k]), int(table.writer_units[k])
                if unit in transmits and transmits[unit][int(table.reader_units[k])]:
                    blocked[k] = False
    return blocked


def _get_slots(structure: EdgeStructure, r: int) -> tuple[int, ...]:
    """The slots of a reader."""
    return structure.reader_groups[r].slots


def _find_linear_edges(structure: EdgeStructure) -> BoolArray:
    """The edges without a norm between the writer and the reader, `[edge]`."""
    specs, count = structure.network.specs, len(structure.writer_groups)
    before, through = dict[int, BoolArray](), dict[int, BoolArray]()  # writers before a group, and those before a norm
    none: BoolArray = np.zeros(count, dtype=bool)
    for index in list_linear_groups(structure, range(len(structure.reader_groups))):
        parents = [specs[index].parents[k].index for k in structure.get_linear_positions(specs[index])]
        before[index] = np.logical_or.reduce([none, *(before[p] for p in parents)])
        is_norm = _is_norm(specs[index])
        through[index] = np.logical_or.reduce([none, *((before if is_norm else through)[p] for p in parents)])
        if (w := structure.writer_index.get(index)) is not None:
            before[index][w] = True
    norms = np.zeros((len(structure.reader_groups), count), dtype=bool)
    for r, reader in enumerate(structure.reader_groups):
        for index in (reader.target.parents[k].index for k in reader.slots):
            norms[r] |= _is_norm(reader.target) | through[index]
    table = structure.edges
    linear: BoolArray = ~norms[table.readers, table.writers]
    return linear


def _is_norm(spec: NodeSpec) -> bool:
    """Whether a group may contain the scale of a norm."""
    return type(spec.tpm).norm_scale is not TPM.norm_scale


def _build_basis(run: PatchedRun, structure: EdgeStructure, w: int, entry: int) -> Tensor | None:
    """One entry of the values of a group of writers, in all nodes; None if the values have fewer entries."""
    spec = structure.writer_groups[w].spec
    size = math.prod(spec.shape)
    if entry >= size:
        return None
    vector = torch.zeros(size, dtype=run.base.dtype, device=run.base.device)
    vector[entry] = 1.0
    return vector.reshape(spec.shape).expand(len(run.examples), *get_layout_shape(run.base, spec), *spec.shape)


def _find_transmitting(tangents: TangentPass, reader: ReaderGroup) -> Mapping[tuple[int, int], BoolArray]:
    """For each writer that is read, the units of a reader that see it, `[unit]`."""
    structure, layout = tangents.structure, tangents.run.base.layout
    spec, units = reader.target, len(structure.list_units(reader.target))
    parents = list(dict.fromkeys(spec.parents[k].index for k in reader.slots))
    is_map = set(reader.slots) <= set(structure.get_linear_positions(spec)) and not spec.tpm.is_random
    visible: dict[tuple[int, int], BoolArray] = {}
    if is_map and any(tangents.blocks.get(parent) for parent in parents):
        cells, block = tangents.map_group(spec, [parent for parent in parents if tangents.blocks.get(parent)])
        axes = [layout.axis(plate) for plate in spec.group.plates]
        by_cell = (block != 0).movedim([*axes, layout.word_dim], list(range(len(axes) + 1)))
        table = by_cell.flatten(len(axes) + 1).any(-1).reshape(units, len(cells)).cpu().numpy()
        return {tangents.writers[cell]: table[:, column] for column, cell in enumerate(cells)}
    for parent in parents:
        cells, block = tangents.join(parent)
        if cells:
            flags = (block != 0).movedim(layout.word_dim, 0).flatten(1).any(-1).tolist()
            for cell, flag in zip(cells, flags, strict=True):
                unit = tangents.writers[cell]
                visible[unit] = visible.get(unit, np.zeros(units, dtype=bool)) | flag
    return visible
