"""The template graph of a net and the ground graph of a sentence as a folder of two Parquet files.

`nodes.parquet` has a row for each node and `arrows.parquet` a row for each arrow, with the attributes of the networkx
graphs. The arrows of a sentence are written from the integer arrays of the ground graph, one row group for each edge
template, so that a sentence may have millions of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.files import as_path, atomic_write
from bnet_transformer.bridges.networkx import check_arrow_limit, iter_nodes, select_part, template_graph_to_networkx
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.graph import GroundGraph, NodeGroup, NodeSelection
from bnet_transformer.inference import SentenceState, iter_arrow_weights

if TYPE_CHECKING:
    import pyarrow as pa

NODES, ARROWS = "nodes.parquet", "arrows.parquet"
MAX_ARROWS = 100_000_000  # about 0.5 GB
HEADER = {"format": "bnet_transformer graph", "version": 1}


def is_folder(path: object) -> bool:
    """True for the path of a folder: it ends in a separator, or is an existing folder without a suffix."""
    checked = as_path(path)
    return os.fspath(path).endswith(("/", os.sep)) or (not checked.suffix and checked.is_dir())  # type: ignore[call-overload]


def write_template_graph(network: Network, folder: object) -> None:
    """Write the template graph of a net.

    Args:
        network: The net.
        folder: The folder; it is created if it does not exist.

    Raises:
        BNetError: pyarrow is not installed.
        FileError: The folder cannot be written.
    """
    pa = _import_pyarrow()
    graph = template_graph_to_networkx(network)
    columns = _group_columns(pa) | {"plates": pa.list_(pa.string()), "label": pa.string()}
    slots = ("source", "target", "role", "slot", "reach")
    arrows = pa.schema({**dict.fromkeys(slots, pa.string()), "pick": pa.map_(pa.string(), pa.string())})
    rows = [
        {"source": u, "target": v, **data, "pick": list(data["pick"].items())} for u, v, data in graph.edges(data=True)
    ]
    nodes = [{"name": name, **data} for name, data in graph.nodes(data=True)]
    _write_folder(
        folder,
        (pa.schema(columns), [pa.Table.from_pylist(nodes, schema=pa.schema(columns))]),
        (arrows, [pa.Table.from_pylist(rows, schema=arrows)]),
    )


def write_ground_graph(
    state: SentenceState,
    folder: object,
    *,
    weights: bool = True,
    slices: int | Collection[int] | None = None,
    words: object = None,
    heads: int | Collection[int] | None = None,
    attention: bool = False,
    min_weight: float | None = None,
    limit: int | None = MAX_ARROWS,
) -> None:
    """Write the ground graph of a sentence, or a part of it. The options are those of `sentence_to_networkx`.

    Args:
        state: The sentence.
        folder: The folder; it is created if it does not exist.
        weights: True includes selectors and weights.
        slices: The slices to include; None for all.
        words: The words to include; None for all.
        heads: The heads to include; None for all.
        attention: True adds the column `weight`: `P(j | i)`, averaged over the posterior of the latent choices; it is
            null for arrows that are no attention.
        min_weight: The minimum weight of an arrow; None for no minimum.
        limit: The maximum number of arrows, before those of smaller weights are left out; None for no limit.

    Raises:
        BNetError: pyarrow is not installed.
        BudgetError: If there are more arrows than `limit`.
        FileError: The folder cannot be written.
    """
    pa = _import_pyarrow()
    selection = select_part(
        state, weights=weights, slices=slices, words=words, heads=heads, attention=attention, min_weight=min_weight
    )
    check_arrow_limit(state.ground, selection, limit)
    has_weights = attention or min_weight is not None
    columns = _group_columns(pa) | {
        **{"plates": pa.list_(pa.string()), "index": pa.list_(pa.int64()), "head": pa.int32(), "word": pa.int32()},
        **{"token": pa.string(), "label": pa.string(), "do": pa.bool_()},
    }
    arrows = dict.fromkeys(("source", "target", "role"), pa.string()) | (
        {"weight": pa.float64()} if has_weights else {}
    )
    _write_folder(
        folder,
        (pa.schema(columns), _node_tables(pa, state, selection, pa.schema(columns))),
        (pa.schema(arrows), _arrow_tables(pa, state, selection, has_weights, min_weight)),
    )


def _import_pyarrow() -> Any:
    """The module pyarrow with its submodule parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        hint = 'Run pip install "bnet-transformer[parquet]"'
        raise BNetError(
            "a folder of Parquet files requires the package pyarrow, which is not installed", hint=hint
        ) from error
    return pyarrow


def _group_columns(pa: Any) -> dict[str, Any]:
    """The types of the columns that all nodes have."""
    return {
        **{"name": pa.string(), "stack": pa.string(), "role": pa.string(), "slice": pa.int32(), "kind": pa.string()},
        **{"learnable": pa.bool_(), "shape": pa.list_(pa.int64()), "tpm": pa.string()},
    }


def _node_tables(pa: Any, state: SentenceState, selection: NodeSelection, schema: Any) -> Iterator[pa.Table]:
    """The nodes of each selected group."""
    for spec in state.network.specs:
        if state.ground.is_selected(spec.group, selection):
            nodes = iter_nodes(state.ground, spec, selection, state.tokens, state.evidence.keys())
            yield pa.Table.from_pylist([{"name": name, **data} for name, data in nodes], schema=schema)


def _arrow_tables(
    pa: Any, state: SentenceState, selection: NodeSelection, has_weights: bool, min_weight: float | None
) -> Iterator[pa.Table]:
    """The arrows of each edge template, as arrays: the names are dictionaries of the two groups."""
    ground, groups = state.ground, state.network.graph.groups
    if has_weights:
        arrows: Iterable[Any] = iter_arrow_weights(state.query(), state.evaluator, selection)
    else:
        arrows = ((*arrow, None) for arrow in ground.arrows(selection))
    for edge, sources, targets, values in arrows:
        if min_weight is not None and values is not None:
            is_strong = ~(values < min_weight)  # True for arrows without a weight, NaN
            sources, targets, values = sources[is_strong], targets[is_strong], values[is_strong]
        parent, child = groups[edge.parent], groups[edge.child]
        columns = {
            "source": _name_column(pa, ground, parent, sources),
            "target": _name_column(pa, ground, child, targets),
            "role": pa.DictionaryArray.from_arrays(np.zeros(len(sources), dtype=np.int8), [parent.role]),
        }
        if has_weights:
            values = np.full(len(sources), np.nan) if values is None else values
            columns["weight"] = pa.array(values, mask=np.isnan(values))
        yield pa.table(columns)


def _name_column(pa: Any, ground: GroundGraph, group: NodeGroup, nodes: NDArray[Any]) -> Any:
    """The names of nodes of one group."""
    indices = (nodes - ground.offsets[group.index]).astype(np.int64)
    return pa.DictionaryArray.from_arrays(indices, pa.array(ground.iter_names(group), pa.string()))


def _write_folder(folder: object, nodes: tuple[Any, Iterable[Any]], arrows: tuple[Any, Iterable[Any]]) -> None:
    """Write the schema and the tables of both files; neither file is replaced before both are complete."""
    path = as_path(folder)
    is_new = not path.exists()
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise FileError(str(folder), expected="a folder that can be created", actual=error.strerror) from error
    try:
        with atomic_write(path / NODES) as nodes_file, atomic_write(path / ARROWS) as arrows_file:
            _write_tables(nodes_file, *nodes)
            _write_tables(arrows_file, *arrows)
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def _write_tables(path: Any, schema: Any, tables: Iterable[Any]) -> None:
    """Write tables as the row groups of a file; `schema` is that of a file without tables."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # The Arrow schema is not stored: with it, readers would return the dictionaries instead of strings.
    try:
        tables = iter(tables)
        first = next(tables, schema.empty_table())
        with pq.ParquetWriter(path, first.schema, store_schema=False) as writer:
            writer.add_key_value_metadata({"bnet_transformer": json.dumps(HEADER)})
            for table in itertools.chain([first], tables):
                if table.num_rows:
                    writer.write_table(table)
    except (UnicodeEncodeError, pa.ArrowInvalid) as error:
        raise BNetError("graph", expected="text that UTF-8 can contain", actual=str(error)) from error
