"""The ground arrows along the chains of edges, which figures mark."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from bnet_transformer._core.arrays import IntArray
from bnet_transformer.declare import NodeSpec
from bnet_transformer.graph import GroundGraph
from bnet_transformer.interventions.edges.structure import EdgeStructure


def iter_chain_arrows(
    structure: EdgeStructure, ground: GroundGraph, names: Collection[str]
) -> Iterator[tuple[int, int]]:
    """Yield the ground arrows, source and target, along the chains of some edges, and from their readers to writers."""
    table, specs = structure.edges, structure.network.specs
    retained = {name: k for k, name in enumerate(table.names) if name in set(names)}.values()
    pairs: dict[tuple[int, int], set[tuple[int | None, int | None]]] = {}  # by groups: the units of both ends
    writers = {(int(table.writers[k]), int(table.writer_units[k])) for k in retained}
    for k in retained:
        reader, unit = structure.reader_groups[table.readers[k]], int(table.reader_units[k])
        start, target = structure.writer_groups[table.writers[k]].spec.group.index, reader.target.group.index
        reached = {start}
        for index in reader.chain:
            parents = {specs[index].parents[slot].index for slot in structure.get_linear_positions(specs[index])}
            for parent in parents & reached:
                pairs.setdefault((parent, index), set()).add(
                    (int(table.writer_units[k]) if parent == start else None, None)
                )
                reached.add(index)
        for parent in {reader.target.parents[slot].index for slot in reader.slots} & reached:
            source_unit = int(table.writer_units[k]) if parent == start else None
            pairs.setdefault((parent, target), set()).add((source_unit, unit))
        for w, v in structure.find_fed_writers(int(table.readers[k]), unit) & writers:
            writer = structure.writer_groups[w].spec.group.index
            if writer != target:
                pairs.setdefault((target, writer), set()).add((unit, v))
    for edge, sources, targets in ground.arrows():
        ends = pairs.get((edge.parent, edge.child))
        if ends is None:
            continue
        source_units, target_units = (
            _find_units(structure, ground, specs[index], nodes)
            for index, nodes in ((edge.parent, sources), (edge.child, targets))
        )
        chosen = np.zeros(len(sources), dtype=bool)
        for source_unit, target_unit in ends:
            is_source = source_units == source_unit if source_unit is not None else np.ones_like(chosen)
            is_target = target_units == target_unit if target_unit is not None else np.ones_like(chosen)
            chosen |= is_source & is_target
        yield from zip(sources[chosen].tolist(), targets[chosen].tolist(), strict=True)


def _find_units(structure: EdgeStructure, ground: GroundGraph, spec: NodeSpec, nodes: IntArray) -> IntArray:
    """The unit of each ground node of a group."""
    shape, count = ground.shapes[spec.group.index], len(structure.list_units(spec))
    units: IntArray = (nodes - int(ground.offsets[spec.group.index])) // (int(np.prod(shape, dtype=np.int64)) // count)
    return units
