"""How far two words are apart in a stack, and how many steps its slice takes one after another.

A *hop* is an arrow between different words. The path from a word to another is the least number of hops by which the
state of the one reaches the state of the other, through as many slices as that takes; the longest path is that of the
pair farthest apart, among the pairs that are joined at all.
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

MAX_TABLE_ROWS = 4096  # rows of a table of who reaches whom


@dataclass(frozen=True)
class SliceEdge:
    """All arrows from one node of a slice to another: places among the slice's nodes, and the words that they join."""

    parent: int
    child: int
    reach: Reach


@dataclass(frozen=True)
class SliceGraph:
    """The nodes of the last slice of a stack and the arrows within it; the state that leaves is the one that enters."""

    nodes: tuple[NodeSpec, ...]
    edges: tuple[SliceEdge, ...]
    states: frozenset[int]


def build_slice_graph(network: Network, stack: str) -> SliceGraph:
    """The slice of a stack as a graph that runs from state to state.

    Arrows from other slices than the one where the child stands do not count, nor do those through other stacks.
    """
    declared = next(each for each in network.declaration.stacks if each.name == stack)
    step = declared.slices - 1
    inside = [m for m in network.specs if m.group.stack == stack and m.group.step == step]
    nodes = [m for m in inside if m.group.word_stack in (stack, None)]
    place = {m.group.index: k for k, m in enumerate(nodes)}
    roles = {m.group.role: k for k, m in enumerate(nodes)}
    states = {role for role in declared.states if role in roles}
    for member in network.specs:
        if member.group.stack == stack and member.group.slice == step and member.group.role in states:
            place[member.group.index] = roles[member.group.role]
    joints = []
    for k, member in enumerate(nodes):
        for bundle in network.graph.in_edges[member.group.index]:
            if bundle.parent in place:
                joints += [SliceEdge(place[bundle.parent], k, reach) for reach in bundle.reaches]
    return _contract_graph(SliceGraph(tuple(nodes), tuple(joints), frozenset(roles[role] for role in states)))


def _contract_graph(graph: SliceGraph) -> SliceGraph:
    """Without the nodes that lie between no two states; nodes that a word's own arrows join both ways are one."""
    arrows, word_arrows = nx.DiGraph(), nx.DiGraph()
    for digraph in (arrows, word_arrows):
        digraph.add_nodes_from(range(len(graph.nodes)))
    for joint in graph.edges:
        arrows.add_edge(joint.parent, joint.child)
        wordless = None in (graph.nodes[joint.parent].group.word_stack, graph.nodes[joint.child].group.word_stack)
        if joint.reach.kind in ("same", "every", "causal", *KINDS_WITH_WIDTH) and not wordless:
            word_arrows.add_edge(joint.parent, joint.child)
    below = graph.states.union(*(nx.descendants(arrows, state) for state in graph.states))
    above = graph.states.union(*(nx.ancestors(arrows, state) for state in graph.states))
    first = {k: min(one) for one in nx.strongly_connected_components(word_arrows) for k in one if k in below & above}
    kept = sorted(set(first.values()))
    place = {k: kept.index(one) for k, one in first.items()}
    joints = {
        SliceEdge(place[j.parent], place[j.child], j.reach) for j in graph.edges if {j.parent, j.child} <= {*place}
    }
    ordered = sorted(joints, key=lambda joint: (joint.parent, joint.child, str(joint.reach)))
    return SliceGraph(tuple(graph.nodes[k] for k in kept), tuple(ordered), frozenset(place[k] for k in graph.states))


def longest_path(graph: SliceGraph, n: int) -> tuple[int | None, str]:
    """The longest path between two of n words (None: no word is joined to another), and its order where it is known
    for every n; "unknown" where only a table of all pairs would tell, and there are too many."""
    overs = [
        (joint.reach, [graph.nodes[k].group.word_stack for k in (joint.parent, joint.child)]) for joint in graph.edges
    ]
    kinds = {reach for reach, words in overs if None not in words and not reach.is_positionwise}
    kinds = {reach for reach in kinds if reach.kind not in KINDS_WITH_WIDTH or reach.width}  # those that join two words
    one_piece = (
        len(graph.nodes) == 1 and graph.nodes[0].group.word_stack is not None
    )  # hops follow freely on one another
    if one_piece and all(reach.kind in _SHIFT_KINDS for reach in kinds):
        return _longest_shift_path(kinds, n) if kinds else (None, "")
    if sum(1 if node.group.word_stack is None else n for node in graph.nodes) > MAX_TABLE_ROWS:
        return None, "unknown"
    return _longest_table_path(graph, n), ""


_SHIFT_KINDS = ("every", "causal", "earlier", "before", "window", "recent", "same")


def _longest_shift_path(reaches: set[Reach], n: int) -> tuple[int | None, str]:
    """Where a word reads all words, or those at most so far before and behind it."""
    far: dict[str, float] = {"every": math.inf, "causal": math.inf, "earlier": math.inf, "before": 1}
    behind = max(far.get(reach.kind, reach.width) for reach in reaches)
    wide = {"every": math.inf, "recent": 0}
    ahead = max(wide.get(reach.kind, reach.width) for reach in reaches)
    slowest = min(step for step in (behind, ahead) if step)
    if n == 1:
        return None, ""
    if slowest == math.inf:
        return 1, "O(1)"
    return math.ceil((n - 1) / slowest), "O(n)" if slowest == 1 else f"O(n / {slowest})"


def _longest_table_path(graph: SliceGraph, n: int) -> int | None:
    """By a table of the hops from each node and word to each other; None where no two words are joined."""
    sizes = [1 if node.group.word_stack is None else n for node in graph.nodes]
    starts = np.cumsum([0, *sizes])
    hops = np.full((starts[-1], starts[-1]), np.inf)
    for joint in graph.edges:
        rows = slice(starts[joint.parent], starts[joint.parent + 1])
        columns = slice(starts[joint.child], starts[joint.child + 1])
        n_parent, n_child = sizes[joint.parent], sizes[joint.child]
        leaves, enters = (graph.nodes[k].group.word_stack is None for k in (joint.parent, joint.child))
        if leaves:
            reads, steps = np.ones((n_parent, n_child), bool), np.full((n_parent, n_child), 0.0 if enters else 1.0)
        elif enters:
            reads, steps = joint.reach.matrix(1, n_parent).T, np.zeros((n_parent, 1))
        else:
            reads, steps = joint.reach.matrix(n_child, n_parent).T, 1 - np.eye(n)
        hops[rows, columns] = np.minimum(hops[rows, columns], np.where(reads, steps, np.inf))
    states = sorted(k for k in graph.states if graph.nodes[k].group.word_stack is not None)
    if not states:
        return None
    inside = np.concatenate([np.arange(starts[k], starts[k + 1]) for k in states])
    least = dijkstra(csgraph_from_dense(hops, null_value=np.inf), indices=inside)[:, inside]
    between = least.reshape(len(states), n, len(states), n).min((0, 2))  # [word, word], by any of the states
    apart = between[~np.eye(n, dtype=bool) & np.isfinite(between)]
    return int(apart.max()) if apart.size else None


def count_sequential_steps(network: Network, stack: str, n: int) -> tuple[int, str]:
    """The least steps of a slice over n words: the longest chain of words each of which waits for the one before; and
    their order, where it is known."""
    step = next(each for each in network.declaration.stacks if each.name == stack).slices - 1
    longest, waits = 1, False
    for group in network.graph.components:
        members = [network.specs[index] for index in group]
        place = {index: k for k, index in enumerate(group)}
        inside = [(place[g.index], k, g.reach) for k, m in enumerate(members) for g in m.parents if g.index in place]
        one = members[0].group
        if inside and one.stack == stack and one.step == step and one.word_stack is not None:
            longest, waits = max(longest, _longest_chain(inside, n)), True
    return longest, "O(1)" if not waits else "O(n)" if longest == n else ""


def _longest_chain(reaches: Sequence[tuple[int, int, Reach]], n: int) -> int:
    """The longest chain of words in a group that reads itself at earlier words.

    Each node of a group leads to each other; where every arrow can step to the same word or to the next, so does a way
    round, and all words wait for one another.
    """
    if all(reach.kind in ("same", "before", "earlier", "causal") for _, _, reach in reaches):
        return n
    graph = nx.DiGraph()
    for parent, child, reach in reaches:
        words, read = np.nonzero(reach.matrix(n, n))
        pairs = zip(words.tolist(), read.tolist(), strict=True)
        graph.add_weighted_edges_from(((parent, j), (child, i), int(i != j)) for i, j in pairs)
    return 1 + int(nx.dag_longest_path_length(graph))
