"""The edges of a net: writers, readers, and the linear groups between them; and the JSON of edges of MIB."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.files import as_path, atomic_write
from bnet_transformer._core.naming import ARROW, join_name, split_path
from bnet_transformer._core.results import check_field_types
from bnet_transformer._core.tensors import BoolArray, IntArray
from bnet_transformer.compiler.linear import LinearStructure, is_aligned
from bnet_transformer.declare import Network, NodeSpec, as_network
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

    def get_writer(self, edge: SupportsIndex) -> WriterUnit:
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


# --------------------------------------------------------------------------------------------------------------------
# The JSON of MIB's circuit track (Mueller et al. 2025): edges from a writer to a reader, with scores.
#
# The format is that of `Graph.to_json` of the package EAP-IG: `{"cfg": ..., "nodes": {name: {"in_graph": bool}},
# "edges": {"a0.h1->m2": {"score": float, "in_graph": bool}}}`. Its writers are `input`, `a{slice}.h{head}` and
# `m{slice}`; its readers are `a{slice}.h{head}<q>` (also `<k>` and `<v>`), `m{slice}` and `logits`. The names follow
# from the kinds of writers and the channels of readers, so the roles of a net may have any names. Edges are per query
# head in the format; with `ungroup`, the keys and values of grouped heads are written for each head that reads them.
#
# The package builds its graph from `cfg` only: each head and step reads all writers of the slices before it, and a step
# also reads the heads of its slice, unless `parallel_attn_mlp`. A net with other edges has no file.


CONVENTIONS = ("mib",)
EDGE_TYPES = {"score": float, "in_graph": bool}  # of the values of an edge that are read
MIB_SEPARATOR = "->"
CHANNELS = ("q", "k", "v")


@dataclass(frozen=True, repr=False)
class StoredCircuit:
    """A circuit that was read from a file.

    Attributes:
        edges: The names of the edges of the circuit, for `bt.circuit(edges=, at="edges")`.
        scores: The score of each edge, for `bt.faithfulness_curves(scores=, at="edges")`.
    """

    edges: tuple[str, ...]
    scores: Mapping[str, float]

    def __repr__(self) -> str:
        return f"<StoredCircuit: {len(self.edges):,} of {len(self.scores):,} edges>"


@dataclass(frozen=True)
class MibNames:
    """The names of the edges of a net in MIB's format.

    Args:
        of_edge: For each edge its name there; several for the keys and values of grouped heads.
        shape: The entries of `cfg`: the numbers of slices and heads, the width of a state, and whether the heads and
            the step of a slice are parallel.
    """

    of_edge: Mapping[str, tuple[str, ...]]
    shape: Mapping[str, Any]

    @classmethod
    def of_network(cls, network: Network) -> MibNames:
        """The names for a net.

        Raises:
            BNetError: The net has nodes without a counterpart, such as a second stack, or other edges than the graph of
                the package.
        """
        structure = EdgeStructure.of_network(network)
        writers = [_name_writers(structure, w) for w in range(len(structure.writer_groups))]
        if len({name for names in writers for name in names}) < sum(map(len, writers)):
            expected = "a net of one stack with one embedding, and one attention and one step for each slice"
            raise BNetError("convention='mib'", expected=expected, actual="several writers of the same kind and slice")
        readers = [_name_readers(structure, r) for r in range(len(structure.reader_groups))]
        table, names = structure.edges, {}
        columns = (table.readers, table.reader_units, table.writers, table.writer_units)
        for edge, r, u, w, v in zip(table.names, *(column.tolist() for column in columns), strict=True):
            names[edge] = tuple(f"{writers[w][v]}{MIB_SEPARATOR}{reader}" for reader in readers[r][u])
        heads = [part for part in structure.writer_groups if part.kind == "attention"]
        sources = [part.spec for part in structure.writer_groups if part.kind == "input"]
        slices = [part.spec.group.slice for part in structure.writer_groups if part.spec.group.slice is not None]
        shape = {
            "n_layers": 1 + max(slices, default=-1),
            "n_heads": max((len(structure.list_units(part.spec)) for part in heads), default=0),
        }
        counterparts = {name for parts in names.values() for name in parts}
        shape["parallel_attn_mlp"] = _is_parallel(counterparts, shape)
        return cls(names, {**shape, "d_model": math.prod(sources[0].shape) if sources else 0})


def _is_parallel(edges: AbstractSet[str], shape: Mapping[str, int]) -> bool:
    """Whether no step reads the heads of its slice, from all edges of a net, which must be those of the package."""
    nodes = {end.split("<")[0] for edge in edges for end in edge.split(MIB_SEPARATOR)}
    differences = []
    for is_parallel in (False, True):
        graph = {
            MIB_SEPARATOR.join(edge)
            for edge in _iter_package_edges(shape, is_parallel=is_parallel)
            if nodes.issuperset(end.split("<")[0] for end in edge)
        }
        if graph == edges:
            return is_parallel
        differences.append(graph ^ edges)
    nearest = min(differences, key=len)
    example = min(nearest)
    expected = (
        "heads and steps that read all writers of the slices before them, and steps that read the heads of their slice "
        "in all slices, or in none (parallel)"
    )
    raise BNetError(
        "convention='mib'", expected=expected, actual=f"{'an' if example in edges else 'no'} edge {example}"
    )


def _iter_package_edges(shape: Mapping[str, int], *, is_parallel: bool) -> Iterator[tuple[str, str]]:
    """The edges of the graph that the package EAP-IG builds from `cfg`."""
    writers = ["input"]
    for t in range(shape["n_layers"]):
        heads = [f"a{t}.h{head}" for head in range(shape["n_heads"])]
        readers = [f"{head}<{channel}>" for head in heads for channel in CHANNELS]
        yield from itertools.product(writers, readers)
        yield from itertools.product(writers if is_parallel else writers + heads, [f"m{t}"])
        writers += [*heads, f"m{t}"]
    yield from itertools.product(writers, ["logits"])


def _fault(spec: NodeSpec) -> BNetError:
    """The error for a group without a counterpart in the format."""
    expected = "embeddings, heads, feed-forward steps and one readout, each of a slice"
    return BNetError("convention='mib'", expected=expected, actual=f"{spec.group.name}, which the format does not have")


def _name_writers(structure: EdgeStructure, w: int) -> list[str]:
    """The names of the writers of a group."""
    writer = structure.writer_groups[w]
    count, position = len(structure.list_units(writer.spec)), writer.spec.group.slice
    if writer.kind == "input" and count == 1:
        return ["input"]
    if writer.kind == "attention" and position is not None:
        return [f"a{position}.h{head}" for head in range(count)]
    if writer.kind == "feed-forward" and position is not None and count == 1:
        return [f"m{position}"]
    raise _fault(writer.spec)


def _name_readers(structure: EdgeStructure, r: int) -> list[list[str]]:
    """The names of each reader of a group; several for the keys and values of grouped heads."""
    reader = structure.reader_groups[r]
    units, position = structure.list_units(reader.target), reader.target.group.slice
    if reader.channel == READOUT and len(units) == 1:
        return [["logits"]]
    fed = [structure.find_fed_writers(r, u) for u in range(len(units))]
    kinds = {structure.writer_groups[w].kind for writers in fed for w, _ in writers}
    if position is None or len(kinds) != 1:
        raise _fault(reader.target)
    if kinds == {"feed-forward"}:
        return [[f"m{position}"]]
    if reader.channel not in CHANNELS or kinds != {"attention"}:
        raise _fault(reader.target)
    return [[f"a{position}.h{head}<{reader.channel}>" for _, head in sorted(writers)] for writers in fed]


def write_mib(
    path: object,
    convention: object,
    edge_names: Iterable[str],
    retained: Iterable[str],
    scores: Mapping[str, float],
    network: Network,
    *,
    ungroup: bool,
) -> None:
    """Write all edges, with their scores (0 without one) and whether they are in the circuit."""
    check_choice("convention", convention, CONVENTIONS)
    check_choice("ungroup", ungroup, (True, False))
    names, included = MibNames.of_network(network), set(retained)
    edges: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys([*edge_names, *included]):
        if name not in names.of_edge:
            hint = 'Use bt.circuit(at="edges"): the format has edges from a writer to a reader, of all words together'
            raise BNetError("convention='mib'", expected="edges between writers and readers", actual=name, hint=hint)
        counterparts = names.of_edge[name]
        if len(counterparts) > 1 and not ungroup:
            expected = "edges of one query head; keys and values are grouped here"
            hint = "Use ungroup=True, which writes the edge for each head of the group"
            raise BNetError("convention='mib'", expected=expected, actual=name, hint=hint)
        row = {"score": float(scores.get(name, 0.0)), "in_graph": name in included}
        edges |= {counterpart: dict(row) for counterpart in counterparts}
    in_graph = {"input", "logits"}
    for name, row in edges.items():
        in_graph |= {end.split("<")[0] for end in name.split(MIB_SEPARATOR)} if row["in_graph"] else set()
    writers = [writer for writer, reader in _iter_package_edges(names.shape, is_parallel=True) if reader == "logits"]
    nodes = {name: {"in_graph": name in in_graph} for name in (*writers, "logits")}
    with atomic_write(as_path(path)) as target:
        target.write_text(json.dumps({"cfg": names.shape, "nodes": nodes, "edges": edges}), encoding="utf-8")


def read_json(path: object, net: object, *, convention: str = "mib") -> StoredCircuit:
    """Read the edges and scores of a circuit in the format of MIB's circuit track.

    Args:
        path: The path of the file.
        net: The net whose edges the file has.
        convention: The format: `"mib"`.

    Returns:
        The names of the edges in the circuit, and the score of each edge. An edge of grouped keys or values has the
        mean score of its heads, and is in the circuit if one of them is.

    Raises:
        BNetError: The file is not in this format, has an edge that the net lacks, or its `cfg` describes another net,
            such as one with parallel heads and steps.

    >>> import json, pathlib, tempfile
    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions.circuit import read_json
    >>> net = bt.decoder(dim=8, heads=2, slices=1, vocabulary=["the", "cat"])
    >>> edges = {"input->m0": {"score": 0.5, "in_graph": True}, "m0->logits": {"score": 0.1, "in_graph": False}}
    >>> path = pathlib.Path(tempfile.mkdtemp(), "circuit.json")
    >>> _ = path.write_text(json.dumps({"cfg": {}, "nodes": {}, "edges": edges}))
    >>> stored = read_json(path, net)
    >>> stored.edges, stored.scores
    (('embed -> ffn_0',), {'embed -> ffn_0': 0.5, 'ffn_0 -> y': 0.1})
    """
    check_choice("convention", convention, CONVENTIONS)
    file = as_path(path)
    if not file.is_file():
        raise BNetError("path", expected="the JSON file of a circuit", actual=f"{file}, which does not exist")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        edges = {name: {"in_graph": False, **row} for name, row in content["edges"].items()}
        for name, row in edges.items():
            check_field_types(EDGE_TYPES, {key: row[key] for key in EDGE_TYPES}, f"{file}: {name}")
        rows = {name: (float(row["score"]), row["in_graph"]) for name, row in edges.items()}
        shape = {**content.get("cfg", {})}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        expected = "a file with edges, each with a score"
        raise BNetError(f"{file}", expected=expected, actual=f"{type(error).__name__}: {error}") from error
    mib_names = MibNames.of_network(as_network(net))
    names = mib_names.of_edge
    for key in mib_names.shape.keys() & shape.keys():
        if shape[key] != mib_names.shape[key]:
            raise BNetError(f"{file}: {key}", expected=f"{mib_names.shape[key]}, as in the net", actual=shape[key])
    unknown = rows.keys() - {name for counterparts in names.values() for name in counterparts}
    if unknown:
        raise BNetError(f"{file}", expected="edges of the net", actual=min(unknown))
    members = {edge: [rows[name] for name in parts if name in rows] for edge, parts in names.items()}
    scores = {edge: float(np.mean([score for score, _ in part])) for edge, part in members.items() if part}
    return StoredCircuit(tuple(edge for edge, part in members.items() if any(flag for _, flag in part)), scores)
