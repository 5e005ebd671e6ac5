"""The path length between words of a stack, and the number of sequential steps of its slice.

Both are columns of table 1 of Vaswani et al. 2017. A *hop* is an arrow between different words. The path length from
one word to another is the minimum number of hops from the state of the first to the state of the second, through any
number of slices. The maximum is over the pairs of connected words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from scipy.sparse.csgraph import csgraph_from_dense, dijkstra

from bnet_transformer._core.naming import KINDS_WITH_WIDTH, Reach
from bnet_transformer.declare import Network, NodeSpec

MAX_TABLE_ROWS = 4096  # the maximum size of the table of all pairs of (node, word)


@dataclass(frozen=True)
class SliceEdge:
    """All arrows from one node of a slice to another, by indices of `SliceGraph.nodes`, and the reach of words."""

    parent: int
    child: int
    reach: Reach


@dataclass(frozen=True)
class SliceGraph:
    """The nodes of the last slice of a stack and the arrows within it; its input and output state are one node.

    So a cycle in the graph is a path through several slices.
    """

    nodes: tuple[NodeSpec, ...]
    edges: tuple[SliceEdge, ...]
    states: frozenset[int]


def build_slice_graph(network: Network, stack: str) -> SliceGraph:
    """The slice of a stack as a graph from state to state.

    Arrows from other slices than the child's are ignored, and so are paths through other stacks.
    """
    declared = next(s for s in network.declaration.stacks if s.name == stack)
    step = declared.slices - 1
    inside = [m for m in network.specs if m.group.stack == stack and m.group.step == step]
    nodes = [m for m in inside if m.group.word_stack in (stack, None)]
    position = {m.group.index: k for k, m in enumerate(nodes)}
    roles = {m.group.role: k for k, m in enumerate(nodes)}
    states = {role for role in declared.states if role in roles}
    for spec in network.specs:
        if spec.group.stack == stack and spec.group.slice == step and spec.group.role in states:
            position[spec.group.index] = roles[spec.group.role]
    edges = []
    for k, spec in enumerate(nodes):
        for edge in network.graph.in_edges[spec.group.index]:
            if edge.parent in position:
                edges += [SliceEdge(position[edge.parent], k, reach) for reach in edge.reaches]
    return _contract_graph(SliceGraph(tuple(nodes), tuple(edges), frozenset(roles[role] for role in states)))


def _contract_graph(graph: SliceGraph) -> SliceGraph:
    """Remove nodes that are on no path between states; merge nodes that are connected in both directions in one word.

    A merge does not change the number of hops between words: its nodes reach each other without a hop.
    """
    arrows, word_arrows = nx.DiGraph(), nx.DiGraph()
    for digraph in (arrows, word_arrows):
        digraph.add_nodes_from(range(len(graph.nodes)))
    for edge in graph.edges:
        arrows.add_edge(edge.parent, edge.child)
        wordless = None in (graph.nodes[edge.parent].group.word_stack, graph.nodes[edge.child].group.word_stack)
        if edge.reach.kind in ("same", "every", "causal", *KINDS_WITH_WIDTH) and not wordless:
            word_arrows.add_edge(edge.parent, edge.child)
    below = graph.states.union(*(nx.descendants(arrows, state) for state in graph.states))
    above = graph.states.union(*(nx.ancestors(arrows, state) for state in graph.states))
    representative = {
        k: min(component)
        for component in nx.strongly_connected_components(word_arrows)
        for k in component
        if k in below & above
    }
    retained = sorted(set(representative.values()))
    position = {k: retained.index(first) for k, first in representative.items()}
    edges = {
        SliceEdge(position[j.parent], position[j.child], j.reach)
        for j in graph.edges
        if {j.parent, j.child} <= {*position}
    }
    ordered = sorted(edges, key=lambda edge: (edge.parent, edge.child, str(edge.reach)))
    return SliceGraph(
        tuple(graph.nodes[k] for k in retained), tuple(ordered), frozenset(position[k] for k in graph.states)
    )


def longest_path(graph: SliceGraph, n: int) -> tuple[int | None, str]:
    """The maximum path length between two of n words, and its order.

    Returns:
        The length, None if no word is connected to another; and its order. The order is empty if the length is known
        for this n only, and "unknown" if it requires a table of all pairs with more than `MAX_TABLE_ROWS` rows.
    """
    overs = [(edge.reach, [graph.nodes[k].group.word_stack for k in (edge.parent, edge.child)]) for edge in graph.edges]
    kinds = {reach for reach, words in overs if None not in words and not reach.is_positionwise}
    kinds = {
        reach for reach in kinds if reach.kind not in KINDS_WITH_WIDTH or reach.width
    }  # reaches that join two words
    # In a graph of one node any hop can follow any other.
    is_single_node = len(graph.nodes) == 1 and graph.nodes[0].group.word_stack is not None
    if is_single_node and all(reach.kind in _SHIFT_KINDS for reach in kinds):
        return _longest_shift_path(kinds, n) if kinds else (None, "")
    if sum(1 if node.group.word_stack is None else n for node in graph.nodes) > MAX_TABLE_ROWS:
        return None, "unknown"
    return _longest_table_path(graph, n), ""


_SHIFT_KINDS = ("every", "causal", "earlier", "before", "after", "window", "recent", "same")


def _longest_shift_path(reaches: set[Reach], n: int) -> tuple[int | None, str]:
    """The path length if a word depends on all words, or the words up to a distance before and after it.

    Hops of at most s words cover a distance of n - 1 in ceil((n - 1) / s) steps; the slower direction is decisive.
    """
    backward: dict[str, float] = {"every": math.inf, "causal": math.inf, "earlier": math.inf, "before": 1}
    behind = max(backward.get(reach.kind, reach.width) for reach in reaches)
    forward = {"every": math.inf, "recent": 0, "after": 1}
    ahead = max(forward.get(reach.kind, reach.width) for reach in reaches)
    slowest = min(step for step in (behind, ahead) if step)
    if n == 1:
        return None, ""
    if slowest == math.inf:
        return 1, "O(1)"
    return math.ceil((n - 1) / slowest), "O(n)" if slowest == 1 else f"O(n / {slowest})"


def _longest_table_path(graph: SliceGraph, n: int) -> int | None:
    """The path length by Dijkstra's algorithm over all (node, word); None if no two words are connected."""
    sizes = [1 if node.group.word_stack is None else n for node in graph.nodes]
    starts = np.cumsum([0, *sizes])
    hops = np.full((starts[-1], starts[-1]), np.inf)
    for edge in graph.edges:
        rows = slice(starts[edge.parent], starts[edge.parent + 1])
        columns = slice(starts[edge.child], starts[edge.child + 1])
        n_parent, n_child = sizes[edge.parent], sizes[edge.child]
        leaves, enters = (graph.nodes[k].group.word_stack is None for k in (edge.parent, edge.child))
        if leaves:
            reads, steps = np.ones((n_parent, n_child), bool), np.full((n_parent, n_child), 0.0 if enters else 1.0)
        elif enters:
            reads, steps = edge.reach.matrix(1, n_parent).T, np.zeros((n_parent, 1))
        else:
            reads, steps = edge.reach.matrix(n_child, n_parent).T, 1 - np.eye(n)
        hops[rows, columns] = np.minimum(hops[rows, columns], np.where(reads, steps, np.inf))
    states = sorted(k for k in graph.states if graph.nodes[k].group.word_stack is not None)
    if not states:
        return None
    inside = np.concatenate([np.arange(starts[k], starts[k + 1]) for k in states])
    distances = dijkstra(csgraph_from_dense(hops, null_value=np.inf), indices=inside)[:, inside]
    word_distances = distances.reshape(len(states), n, len(states), n).min(
        (0, 2)
    )  # [word, word], the minimum over the states
    finite = word_distances[~np.eye(n, dtype=bool) & np.isfinite(word_distances)]
    return int(finite.max()) if finite.size else None


def count_sequential_steps(network: Network, stack: str, n: int) -> tuple[int, str]:
    """The sequential steps of a slice over n words, and their order if it is known.

    It is the longest chain of words, each of which depends on the previous one: no parallel schedule has fewer steps.
    """
    step = next(s for s in network.declaration.stacks if s.name == stack).slices - 1
    longest, waits = 1, False
    for component in network.graph.components:
        specs = [network.specs[index] for index in component]
        position = {index: k for k, index in enumerate(component)}
        inside = [
            (position[g.index], k, g.reach) for k, m in enumerate(specs) for g in m.parents if g.index in position
        ]
        group = specs[0].group
        if inside and group.stack == stack and group.step == step and group.word_stack is not None:
            longest, waits = max(longest, _longest_chain(inside, n)), True
    return longest, "O(1)" if not waits else "O(n)" if longest == n else ""


def _longest_chain(reaches: Sequence[tuple[int, int, Reach]], n: int) -> int:
    """The longest chain of words in a component that depends on itself at earlier words.

    A component is strongly connected. If every arrow can join a word to itself or to the next, a cycle can step to the
    next word, so the chain has all n words. Otherwise it is the longest path in the DAG of (node, word).
    """
    if all(reach.kind in ("same", "before", "earlier", "causal", "after") for _, _, reach in reaches):
        return n
    graph = nx.DiGraph()
    for parent, child, reach in reaches:
        words, read = np.nonzero(reach.matrix(n, n))
        pairs = zip(words.tolist(), read.tolist(), strict=True)
        graph.add_weighted_edges_from(((parent, j), (child, i), int(i != j)) for i, j in pairs)
    return 1 + int(nx.dag_longest_path_length(graph))
