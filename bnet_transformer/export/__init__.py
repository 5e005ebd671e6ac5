"""Exports: a sentence or a net as something else reads it, chosen by a file's suffix.

To add one of a graph, add its writer to `graph_writers`.
"""

from bnet_transformer.export.discrete import to_bif, to_pgmpy
from bnet_transformer.export.graphs import (
    LIMIT,
    Writers,
    folded_to_networkx,
    graph_writers,
    ground_to_networkx,
    sentence_to_networkx,
    to_graphml,
    to_json,
    write,
)

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
