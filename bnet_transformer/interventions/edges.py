"""The edges of a net, from its declaration: writers, readers, and the linear groups between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from bnet_transformer._core.naming import ARROW, join_name, split_path
from bnet_transformer._core.tensors import BoolArray, IntArray
from bnet_transformer.compiler.linear import LinearStructure, is_aligned
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.graph import GroundGraph
from bnet_transformer.tpm import Attention

if TYPE_CHECKING:
    import pandas as pd


# --------------------------------------------------------------------------------------------------------------------
# The edges of a net, from its declaration: writers, readers, and the linear groups between them.
#
# A *writer* is a node (without its word) whose value enters a chain of sums, linear maps and norms: an embedding, the
# mix of a head, a feed-forward step. A *reader* is where such a chain ends: in a nonlinear slot of a node, or in the
# readout. An *edge* leads from a writer to a reader along all chains between them (Conmy et al. 2023). Which parents
# continue a chain is declared by each TPM (`TPM.linear_parents`), so no architecture is a special case.


READOUT = "readout"
EDGES = "edges"  # the value of `at` and `over` for edges from writers to readers
AlignedPlates = frozenset[str]
WriterUnit = tuple[int, int]  # the number of the writer group, and the unit within it


@dataclass(frozen=True)
class WriterGroup:
    """The writers of one node group: one for each index along its plates.

    Attributes:
        spec: The node group.
        is_part: Whether the writer is only what an affine group adds itself, such as an attention with a residual.
        kind: `"input"`, `"attention"` or `"feed-forward"`.
    """

    spec: NodeSpec
    is_part: bool
    kind: str


@dataclass(frozen=True)
class ReaderGroup:
    """The readers of one node group: one for each index along the plates of the target.

    Attributes:
        target: The group whose value is computed from what the reader sees.
        slots: The slots of the target through which the reader sees writers.
        channel: The slot (`"q"`, `"k"`, `"v"`, ...) that the reader feeds, or `"readout"`.
        has_channel: Whether the channel is part of the name, because the target has several.
        sources: The writer groups with an edge to the reader, each with the plates of the target in which both have the
            same index: several collections if there are several paths.
        chain: The linear groups on the paths, parents first, without the target.
    """

    target: NodeSpec
    slots: tuple[int, ...]
    channel: str
    has_channel: bool
    sources: Mapping[int, frozenset[AlignedPlates]] = field(repr=False)
    chain: tuple[int, ...] = field(repr=False)
    is_readout: bool = False


@dataclass(frozen=True)
class EdgeTable:
    """All edges, ordered by reader group: the number of the reader group and of the writer group, and their units.

    A unit is the flattened index along the plates of the group.
    """

    readers: IntArray
    reader_units: IntArray
    writers: IntArray
    writer_units: IntArray
    names: tuple[str, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.readers)

    def get_writer(self, edge: int) -> WriterUnit:
        """The writer of an edge."""
        return int(self.writers[edge]), int(self.writer_units[edge])

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each edge by its name."""
        return {name: k for k, name in enumerate(self.names)}


@dataclass(frozen=True)
class EdgeStructure(LinearStructure):
    """The writers, the readers and the edges of a net. Its outcomes are the readouts."""

    @classmethod
    def of_network(cls, network: Network) -> EdgeStructure:
        """The edges to the readouts of a net: the word-dependent groups without word-dependent children."""
        graph = network.graph
        dependent = cls(network).word_dependent
        ends = [i for i in sorted(dependent) if not any(edge.child in dependent for edge in graph.out_edges[i])]
        structure = cls(network, tuple(ends))
        structure.check_not_recurrent()
        return structure

    def check_not_recurrent(self) -> None:
        """Raise an error for a recurrent group that depends on the words: its words are no sum of writers."""
        recurrent = sorted((self.network.graph.recurrent & self.relevant) - self.leaves)
        if recurrent:
            name = self.network.graph.groups[recurrent[0]].name
            expected = "a net whose nodes are sums of writers at all words"
            hint = 'Use nodes or arrows, such as bt.sweep(at="x")'
            raise BNetError("edges", expected=expected, actual=f"{name}, which is recurrent", hint=hint)

    @cached_property
    def relevant(self) -> frozenset[int]:
        """The outcomes and their word-dependent ancestors; nothing passes through leaves."""
        visited, stack = set[int](), list(self.outcomes)
        while stack:
            index = stack.pop()
            if index in visited or index not in self.word_dependent:
                continue
            visited.add(index)
            if index not in self.leaves:
                stack += [edge.parent for edge in self.network.graph.in_edges[index]]
        return frozenset(visited)

    def _find_linear_positions(self, spec: NodeSpec) -> tuple[int, ...]:
        """The slots that a TPM declares as linear, with vectors as parents."""
        return tuple(k for k in super()._find_linear_positions(spec) if self.is_vector(spec.parents[k].index))

    @cached_property
    def writer_groups(self) -> tuple[WriterGroup, ...]:
        """The groups of writers, in topological order."""
        writers = []
        for index in sorted(self.relevant):
            spec = self.network.specs[index]
            linear, reading = self.get_linear_positions(spec), self.get_reading_positions(spec)
            if not self.is_vector(index) or (spec.tpm.is_random and index in self.outcomes):
                continue
            if not linear or reading:
                writers.append(WriterGroup(spec, bool(linear), self._get_kind(spec)))
        return tuple(writers)

    def _get_kind(self, spec: NodeSpec) -> str:
        """The kind of a writer."""
        if spec.group.index in self.leaves or not self.get_reading_positions(spec):
            return "input"
        return "attention" if isinstance(spec.tpm, Attention) or spec.tpm.has_attention else "feed-forward"

    @cached_property
    def writer_index(self) -> dict[int, int]:
        """The position of a node group among the groups of writers."""
        return {writer.spec.group.index: k for k, writer in enumerate(self.writer_groups)}

    @cached_property
    def reader_groups(self) -> tuple[ReaderGroup, ...]:
        """The groups of readers, in topological order of the nodes that are computed first from them."""
        readers = [reader for reader in self._iter_readers() if reader.sources]
        return tuple(sorted(readers, key=lambda reader: reader.target.group.index))

    def _iter_readers(self) -> Iterator[ReaderGroup]:
        specs = self.network.specs
        private = self._find_private_channels()
        for index, channel in private.items():
            spec = specs[index]
            yield self._build_reader(spec, self.get_linear_positions(spec), channel, has_channel=False)
        for index in sorted(self.relevant):
            spec = specs[index]
            reading = [k for k in self.get_reading_positions(spec) if spec.parents[k].index not in private]
            by_channel: dict[str, list[int]] = {}
            for k in reading:
                by_channel.setdefault(_get_channel(spec, k), []).append(k)
            has_channel = len({_get_channel(spec, k) for k in self.get_reading_positions(spec)}) > 1
            for channel, slots in by_channel.items():
                yield self._build_reader(spec, tuple(slots), channel, has_channel=has_channel)
        for index in self.outcomes:
            spec = specs[index]
            # A readout that is not affine in its parents reads through its own slots above.
            if linear := self.get_linear_positions(spec):
                yield self._build_reader(spec, linear, READOUT, has_channel=bool(self.get_reading_positions(spec)))

    def _find_private_channels(self) -> dict[int, str]:
        """The groups that only feed one channel of nodes with several channels, such as the queries of a head."""
        specs, graph, private = self.network.specs, self.network.graph, {}
        for index in sorted(self.relevant - set(self.outcomes)):
            spec = specs[index]
            if not self.get_linear_positions(spec) or self.get_reading_positions(spec):
                continue
            channels = set()
            for child in {edge.child for edge in graph.out_edges[index]} & self.relevant:
                child_spec = specs[child]
                reading = self.get_reading_positions(child_spec)
                slots = [k for k, parent in enumerate(child_spec.parents) if parent.index == index]
                is_multi_channel = len({_get_channel(child_spec, k) for k in reading}) > 1
                channels |= {_get_channel(child_spec, k) if k in reading and is_multi_channel else None for k in slots}
            if len(channels) == 1 and (channel := channels.pop()) is not None:
                private[index] = channel
        return private

    def _build_reader(
        self, target: NodeSpec, slots: tuple[int, ...], channel: str, *, has_channel: bool
    ) -> ReaderGroup:
        """The reader of some slots of a group, with the writers from which a chain leads to them."""
        specs = self.network.specs
        sources: dict[int, set[AlignedPlates]] = {}
        visited: set[tuple[int, AlignedPlates]] = set()
        stack = [self._step(target, k, frozenset(target.group.plates)) for k in slots]
        while stack:
            state = stack.pop()
            if state in visited:
                continue
            visited.add(state)
            index, aligned = state
            if index in self.writer_index:
                sources.setdefault(self.writer_index[index], set()).add(aligned)
            stack += [self._step(specs[index], k, aligned) for k in self.get_linear_positions(specs[index])]
        chain = tuple(sorted({index for index, _ in visited}))
        frozen = {writer: frozenset(aligned) for writer, aligned in sorted(sources.items())}
        is_readout = target.group.index in self.outcomes
        return ReaderGroup(target, slots, channel, has_channel, frozen, chain, is_readout)

    def _step(self, spec: NodeSpec, slot: int, aligned: AlignedPlates) -> tuple[int, AlignedPlates]:
        """The parent in a slot, and the plates in which all nodes on the path so far have the same index."""
        parent = spec.parents[slot]
        changed = {*parent.over, *dict(parent.pick)}
        plates = self.network.specs[parent.index].group.plates
        return parent.index, frozenset(plate for plate in aligned if plate in plates and plate not in changed)

    @cached_property
    def edges(self) -> EdgeTable:
        """All edges."""
        columns: list[IntArray] = []
        names: list[str] = []
        writer_names = [self.get_writer_names(w) for w in range(len(self.writer_groups))]
        for r, reader in enumerate(self.reader_groups):
            ends = [f" {ARROW} {name}" for name in self.get_reader_names(r)]
            for w, aligned in reader.sources.items():
                mask = self._build_unit_mask(reader.target, self.writer_groups[w].spec, aligned)
                u, v = mask.nonzero()
                columns.append(np.stack([np.full(len(u), r), u, np.full(len(u), w), v]))
                starts = writer_names[w]
                names += [starts[j] + ends[i] for i, j in zip(u.tolist(), v.tolist(), strict=True)]
        table = np.concatenate(columns, 1) if columns else np.zeros((4, 0), dtype=np.int64)
        readers, reader_units, writers, writer_units = table
        return EdgeTable(readers, reader_units, writers, writer_units, tuple(names))

    def find_fed_writers(self, reader: int, unit: int) -> set[WriterUnit]:
        """The writers whose value depends on a reader without a further edge."""
        return {(w, int(v)) for w, mask in self._fed_writers[reader] for v in np.flatnonzero(mask[unit])}

    @cached_property
    def _fed_writers(self) -> list[list[tuple[int, BoolArray]]]:
        """The writers that each group of readers feeds: the number of their group, `[reader unit, writer unit]`."""
        result = []
        for part in self.reader_groups:
            fed, index = list[tuple[int, BoolArray]](), part.target.group.index
            for w, spec in enumerate(writer.spec for writer in self.writer_groups):
                if spec.group.index == index:
                    collections = [frozenset(part.target.group.plates)] if part.channel != READOUT else []
                else:
                    slots = [k for k in self.get_reading_positions(spec) if spec.parents[k].index == index]
                    collections = [self._step(spec, k, frozenset(spec.group.plates))[1] for k in slots]
                if collections:
                    fed.append((w, self._build_unit_mask(part.target, spec, collections)))
            result.append(fed)
        return result

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each edge: its name, writer, reader, channel, the writer's kind, both slices."""
        import pandas as pd

        table = self.edges
        readers = [self.reader_groups[r] for r in table.readers.tolist()]
        writers = [self.writer_groups[w] for w in table.writers.tolist()]
        ends = [split_path(name) for name in table.names]
        return pd.DataFrame(
            {
                "edge": list(table.names),
                "writer": [writer for writer, _ in ends],
                "reader": [reader for _, reader in ends],
                "channel": [reader.channel for reader in readers],
                "kind": [writer.kind for writer in writers],
                "writer_slice": pd.array([writer.spec.group.slice for writer in writers], dtype="Int64"),
                "reader_slice": pd.array([reader.target.group.slice for reader in readers], dtype="Int64"),
            }
        )

    def _build_unit_mask(self, target: NodeSpec, writer: NodeSpec, collections: Collection[AlignedPlates]) -> BoolArray:
        """Whether a path leads from a unit of a writer to a unit of a reader, `[reader unit, writer unit]`."""
        shape = self.count_units(target), self.count_units(writer)
        if not all(aligned & {*writer.group.plates} for aligned in collections):
            return np.ones(shape, dtype=bool)
        targets, writers = (
            np.array(self.list_units(spec)).reshape(len(self.list_units(spec)), -1) for spec in (target, writer)
        )
        mask = np.zeros(shape, dtype=bool)
        for aligned in collections:
            plates = [plate for plate in sorted(aligned) if plate in writer.group.plates]
            first = targets[:, [target.group.plates.index(plate) for plate in plates]]
            second = writers[:, [writer.group.plates.index(plate) for plate in plates]]
            mask |= (first[:, None] == second[None]).all(-1)
        return mask

    def get_writer_names(self, writer: int) -> list[str]:
        """The names of the writers of a group."""
        spec = self.writer_groups[writer].spec
        return [join_name(spec.group.name, unit) for unit in self.list_units(spec)]

    def get_reader_names(self, reader: int) -> list[str]:
        """The names of the readers of a group."""
        part = self.reader_groups[reader]
        suffix = f"<{part.channel}>" if part.has_channel else ""
        return [join_name(part.target.group.name, unit) + suffix for unit in self.list_units(part.target)]


def _get_channel(spec: NodeSpec, slot: int) -> str:
    """The name of a slot, without the mark of a collection."""
    return spec.parents[slot].slot.rstrip(".")


def is_wordwise_path(network: Network, reader: ReaderGroup) -> bool:
    """Whether word i of a reader depends only on word i of the linear groups before it."""
    chain = {*reader.chain}
    slots = [(reader.target, k) for k in reader.slots]
    slots += [
        (network.specs[i], k) for i in reader.chain for k, p in enumerate(network.specs[i].parents) if p.index in chain
    ]
    return all(is_aligned(spec.parents[k]) for spec, k in slots)


# --------------------------------------------------------------------------------------------------------------------
# The ground arrows along the chains of edges, which figures mark.


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
