"""The JSON of MIB's circuit track (Mueller et al. 2025): edges from a writer to a reader, with scores.

The format is that of `Graph.to_json` of the package EAP-IG: `{"cfg": ..., "nodes": {name: {"in_graph": bool}}, "edges":
{"a0.h1->m2": {"score": float, "in_graph": bool}}}`. Its writers are `input`, `a{slice}.h{head}` and `m{slice}`; its
readers are `a{slice}.h{head}<q>` (also `<k>` and `<v>`), `m{slice}` and `logits`. The names follow from the kinds of
writers and the channels of readers, so the roles of a net may have any names. Edges are per query head in the format;
with `ungroup`, the keys and values of grouped heads are written for each head that reads them.

The package builds its graph from `cfg` only: each head and step reads all writers of the slices before it, and a step
also reads the heads of its slice, unless `parallel_attn_mlp`. A net with other edges has no file.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnet_transformer._core.checks import check_choice
from bnet_transformer._core.field_types import check_field_types
from bnet_transformer._core.files import as_path, atomic_write
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.declare.network import as_network
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.edges.structure import READOUT, EdgeStructure

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
    nodes = {name: {"in_graph": name in in_graph} for name in _list_nodes(names.shape)}
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
    >>> from bnet_transformer.interventions.circuits import read_json
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


def _list_nodes(shape: Mapping[str, Any]) -> list[str]:
    """All nodes of a net of this shape, in MIB's order."""
    layers, heads = range(shape["n_layers"]), range(shape["n_heads"])
    inner = [name for t in layers for name in (*(f"a{t}.h{h}" for h in heads), f"m{t}")]
    return ["input", *inner, "logits"]
