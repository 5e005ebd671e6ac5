"""What a search and a curve need of a net: runs of circuits over named edges, in which the other edges are corrupt.

`ArrowRuns` implements `CircuitRuns` for ground arrows. Any other class of edges with the same methods can be searched
and ranked in the same way, because edges occur only as names and as columns of masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD, format_label, join_path, match_names, split_path
from bnet_transformer.errors import unknown_name_error
from bnet_transformer.graph import NodeGroup

INPUT, OUTCOME, BETWEEN = "differs", "outcome", "between"  # the part of a node in a circuit


@dataclass(frozen=True)
class CircuitParts:
    """What a figure of a circuit draws.

    Args:
        edge_of: The edge of each arrow of the circuit; None for an arrow that was not a candidate.
        nodes: The nodes of these arrows, with their attributes.
        num_idle: The number of arrows of the net that transmit no difference between the runs.
    """

    edge_of: Mapping[str, str | None]
    nodes: Mapping[str, Mapping[str, Any]]
    num_idle: int


class CircuitRuns(Protocol):
    """Runs of circuits. Along a retained edge the run reads its own value, along any other edge the corrupt one.

    Subclass it to inherit the defaults of `edge_groups`, `count_from_start`, `find_connected`, `check_edge` and
    `trace`.

    Attributes:
        edge_names: The name of each edge, `"source -> target"`, targets in topological order.
    """

    edge_names: tuple[str, ...]

    def evaluate(self, retained: Tensor) -> Tensor:
        """The metric, `[circuit, example]`, of circuits with the masks `retained`, `[circuit, edge]`."""
        ...

    def evaluate_clean(self) -> Tensor:
        """The metric of the clean run, `[example]`."""
        ...

    def evaluate_corrupt(self) -> Tensor:
        """The metric of the corrupt run, `[example]`."""
        ...

    def swap(self) -> CircuitRuns:
        """The same edges with the clean and the corrupt run exchanged."""
        ...

    @property
    def edge_groups(self) -> tuple[tuple[int, ...], ...]:
        """The edges that a search tests together, groups in topological order: by default those into one target."""
        targets = enumerate(split_path(name)[-1] for name in self.edge_names)
        return tuple(tuple(k for k, _ in edges) for _, edges in groupby(targets, key=lambda item: item[1]))

    def count_from_start(self, name: str) -> str:
        """The name of the end of an edge, with a word that is counted from the start; by default unchanged."""
        return name

    def find_connected(self, retained: Tensor) -> Tensor:
        """The mask of the edges that lead to the metric along the retained ones, `[edge]`; by default all edges."""
        return torch.ones_like(retained)

    def check_edge(self, name: str) -> None:
        """Raise an error if the net has no such edge. Edges without a difference may have no column in the masks."""
        if name not in self.edge_names:
            raise unknown_name_error("edge", name, self.edge_names)

    def trace(self, retained: Tensor) -> CircuitParts:
        """The arrows and nodes of a circuit, for its graph and for figures: by default the edges and their ends."""
        names = [name for name, is_retained in zip(self.edge_names, retained.tolist(), strict=True) if is_retained]
        ends = dict.fromkeys(end for name in names for end in split_path(name))
        nodes = {end: {"role": end.split("_")[0], "label": end, "part": BETWEEN} for end in ends}
        return CircuitParts({name: name for name in names}, nodes, 0)


def match_edges(patterns: Iterable[str], runs: CircuitRuns) -> tuple[str, ...]:
    """The names of the edges that match the patterns.

    Args:
        patterns: Names such as `"v_0_0_1 -> a_0_0_3"`, and patterns such as `"a_0_* -> *"`.
        runs: The runs.

    Returns:
        The names, without duplicates; a full name of an edge without a difference is retained unchanged.
    """
    known, names = dict.fromkeys(runs.edge_names), dict[str, None]()
    for pattern in patterns:
        name = join_path(map(runs.count_from_start, split_path(pattern)))
        matches = [name] if name in known else match_names(name, known)
        if not matches:
            runs.check_edge(name)
            matches = [name]
        names |= dict.fromkeys(matches)
    return tuple(names)


def build_mask(runs: CircuitRuns, names: Iterable[str]) -> Tensor:
    """The mask of the named edges, `[edge]`; names without a column are omitted."""
    included = set(names)
    return torch.tensor([name in included for name in runs.edge_names], dtype=torch.bool)


def describe_node(
    group: NodeGroup, axes: Sequence[str], index: Sequence[int], part: str, token: str | None = None
) -> dict[str, Any]:
    """The attributes of a node in the graph of a circuit.

    Args:
        group: The node group.
        axes: The axes of the node: the plates of its group, and `"word"` if it has a word.
        index: The position along each axis.
        part: `INPUT`, `OUTCOME` or `BETWEEN`.
        token: The token of its word; None if the examples have different tokens.

    Returns:
        The attributes, by name.
    """
    position = dict(zip(axes, index, strict=True))
    word, plates = position.get(WORD), tuple(int(position[plate]) for plate in group.plates)
    return {
        "stack": group.stack,
        "role": group.role,
        "slice": group.slice,
        "head": position.get("head"),
        "plates": axes,
        "index": index,
        "word": word,
        "token": None if token is None else str(token),  # writers of graphs accept only built-in types
        "label": format_label(group.role, stack=group.stack, slice=group.slice, plates=plates, word=word, token=token),
        "part": part,
    }
