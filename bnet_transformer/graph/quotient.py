"""Quotient graphs: groups of nodes (boxes) are contracted to single nodes, and parallel arrows are counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.checks import check_mapping
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.graph.ground_graph import ALL_NODES, GroundGraph, NodeSelection
from bnet_transformer.graph.queries import find_family

if TYPE_CHECKING:
    import networkx as nx

MAX_ARROWS = 10_000_000  # the maximum number of contracted arrows


@dataclass(frozen=True)
class Quotient:
    """A graph of boxes, which are groups of nodes.

    Attributes:
        boxes: The names of the boxes.
        arrows: The arrows between boxes, `[arrow, 2]`: the indices of the parent box and of the child box.
        counts: The number of arrows of the ground graph that each arrow represents, `[arrow]`.
    """

    _shapes = "boxes: any box; arrows: int<box arrow 2; counts: int arrow"

    boxes: tuple[str, ...]
    arrows: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def acyclic(self) -> bool:
        """True if the graph of the boxes has no cycle."""
        import networkx as nx

        return bool(nx.is_directed_acyclic_graph(self.to_networkx()))

    def to_networkx(self) -> nx.DiGraph:
        """The graph of the boxes as a networkx graph; its edges have the attribute `count`."""
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from(self.boxes)
        graph.add_edges_from(
            (self.boxes[i], self.boxes[j], {"count": int(count)})
            for (i, j), count in zip(self.arrows.tolist(), self.counts.tolist(), strict=True)
        )
        return graph


def shrink(
    ground: GroundGraph, boxes: Mapping[str, str] | Callable[[str], str], selection: NodeSelection = ALL_NODES
) -> Quotient:
    """Contract each box to one node: arrows inside a box are removed, and parallel arrows are counted.

    `boxes` maps the name of a node, or of several nodes, to that of their box. A node that is not in a mapping is its
    own box.
    """
    if callable(boxes):
        naming = boxes
    else:
        if not isinstance(boxes, Mapping):
            raise BNetError("boxes", expected="a mapping from names, or a function of a name", actual=boxes)
        given = check_mapping("boxes", boxes)
        mapping = {ground.name(node): given[name] for name in given for node in find_family(ground, name).nodes}
        naming = lambda name: mapping.get(name, name)  # noqa: E731
    arrows = ground.count_arrows(selection)
    if arrows > MAX_ARROWS:
        hint = "Select fewer words or slices"
        raise BudgetError("quotient graph", expected=f"at most {MAX_ARROWS} arrows", actual=arrows, hint=hint)
    nodes = [
        node
        for group in ground.template.groups
        if ground.is_selected(group, selection)
        for node in ground.select_nodes(group, selection).tolist()
    ]
    label = np.full(len(ground), -1, dtype=np.int64)
    order: dict[str, int] = {}
    for node in nodes:
        name = naming(ground.name(node))
        if not isinstance(name, str) or not name:
            raise BNetError("boxes", expected="the name of a box, a string", actual=name)
        label[node] = order.setdefault(name, len(order))
    num_boxes = len(order)
    codes = [
        label[sources] * num_boxes + label[targets] for _, sources, targets in ground.arrows(selection) if len(sources)
    ]
    joined = np.concatenate(codes) if codes else np.zeros(0, dtype=np.int64)
    unique, counts = np.unique(joined, return_counts=True)
    pairs = np.stack([unique // max(num_boxes, 1), unique % max(num_boxes, 1)], axis=1)
    is_outer = pairs[:, 0] != pairs[:, 1]
    return Quotient(tuple(order), pairs[is_outer], counts[is_outer])
