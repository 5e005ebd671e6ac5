"""Exports: a sentence or a net as something else reads it, chosen by a file's suffix.

To add one of a graph, add its writer to `graph_writers`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from bnet_transformer.errors import BNetError
from bnet_transformer.export.discrete import to_bif, to_pgmpy
from bnet_transformer.export.graphs import (
    LIMIT,
    folded_to_networkx,
    ground_to_networkx,
    sentence_to_networkx,
    to_graphml,
    to_json,
)
from bnet_transformer.files import as_path, replacing

if TYPE_CHECKING:
    import networkx as nx

__all__ = [
    "LIMIT",
    "Writers",
    "folded_to_networkx",
    "graph_writers",
    "ground_to_networkx",
    "sentence_to_networkx",
    "to_bif",
    "to_graphml",
    "to_json",
    "to_pgmpy",
    "write",
]

Writers = dict[str, Callable[[], bytes]]  # by suffix, what makes the content of a file


def graph_writers(graph: Callable[[], nx.Graph]) -> Writers:
    """The formats of a graph, which is made when a file is written."""
    return {".json": lambda: to_json(graph()).encode(), ".graphml": lambda: to_graphml(graph()).encode()}


def write(path: str | os.PathLike[str], writers: Writers) -> None:
    """Write a file, whole or not at all; its suffix says how."""
    suffix = as_path(path).suffix.lower()
    if suffix not in writers:
        got = f"{suffix!r}" if suffix else "none"
        raise BNetError(f"suffix of {path}", expected="one that says how", got=got, allowed=", ".join(sorted(writers)))
    with replacing(path) as temporary:
        temporary.write_bytes(writers[suffix]())
