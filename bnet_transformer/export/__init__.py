"""Exports: a sentence or a net as something else reads it, chosen by a file's suffix.

To add one, add its writer to `WRITERS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

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
from bnet_transformer.reference import World

if TYPE_CHECKING:
    import networkx as nx

__all__ = [
    "LIMIT",
    "WRITERS",
    "Exportable",
    "folded_to_networkx",
    "ground_to_networkx",
    "sentence_to_networkx",
    "to_bif",
    "to_graphml",
    "to_json",
    "to_pgmpy",
    "write",
]


@dataclass(frozen=True)
class Exportable:
    """What a writer may ask for: the graph, made on demand, and the sentence with its evidence, where there is one."""

    graph: Callable[[], nx.Graph]
    world: World | None = None
    evidence: Mapping[int, Tensor] = field(default_factory=dict)


Writers = Mapping[str, Callable[[Exportable], bytes]]


def _bif(what: Exportable) -> bytes:
    if what.world is None:
        raise BNetError("BIF", expected="the bnet of a sentence", got="a net without a sentence")
    return to_bif(what.world, evidence=what.evidence).encode()


WRITERS: Writers = {
    ".json": lambda what: to_json(what.graph()).encode(),
    ".graphml": lambda what: to_graphml(what.graph()).encode(),
    ".bif": _bif,
}


def write(path: str | os.PathLike[str], what: Exportable, *, writers: Writers = WRITERS) -> None:
    """Write a file, whole or not at all; its suffix says how."""
    suffix = as_path(path).suffix.lower()
    if suffix not in writers:
        got = f"{suffix!r}" if suffix else "none"
        raise BNetError(f"suffix of {path}", expected="one that says how", got=got, allowed=", ".join(sorted(writers)))
    with replacing(path) as temporary:
        temporary.write_bytes(writers[suffix](what))
