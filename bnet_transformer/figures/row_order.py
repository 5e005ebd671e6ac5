"""Rows of a drawn graph: which row each node group has, and an order of the nodes of a row with few crossings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import networkx as nx

from bnet_transformer.graph import TemplateGraph


def assign_rows(template_graph: TemplateGraph, group_ids: Collection[int]) -> dict[int, tuple[int, int]]:
    """The (row, depth) of each node group of `group_ids`; rows are numbered without gaps.

    Groups that depend on words have depth 0. A group that does not depend on words, such as a weight, is drawn above
    the row of its children: at depth 1 above groups of depth 0, at depth 2 above groups of depth 1, and so on.
    """
    wordless = template_graph.word_independent
    graph = _contract_hidden(template_graph, {index for index in group_ids if index not in wordless})
    # Longest-path layering puts every node below its parents. Then, children first, each node is moved down to the row
    # above its children: it stays below its parents, and its arrows become shorter.
    rows = {idx: row for row, indices in enumerate(nx.topological_generations(graph)) for idx in indices}
    for idx in reversed(list(graph)):
        if graph[idx]:
            rows[idx] = min(rows[child] for child in graph[idx]) - 1
    row_numbers = {row: k for k, row in enumerate(sorted({rows[idx] for idx in graph}))}
    result = {idx: (row_numbers[rows[idx]], 0) for idx in graph}
    for group in reversed(template_graph.groups):
        if group.index in group_ids and group.index in wordless:
            children = [result[edge.child] for edge in template_graph.out_edges[group.index] if edge.child in result]
            row = min((row for row, _ in children), default=0)
            result[group.index] = row, 1 + max((depth for _, depth in children), default=0)
    return result


def _contract_hidden(template_graph: TemplateGraph, visible: Collection[int]) -> nx.DiGraph:
    """The graph of the visible groups, with an arrow for each path between two of them through hidden groups.

    So a slice that is not drawn takes no rows, and parts of the graph that only it separates are drawn side by side.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(group.index for group in template_graph.groups if group.index in visible)
    nearest: dict[int, set[int]] = {}  # the visible groups from which a path through hidden groups leads to a group
    for group in template_graph.groups:  # parents come first, except along recurrent arrows
        sources: set[int] = set()
        for edge in template_graph.in_edges[group.index]:
            if edge.parent < group.index and edge.parent not in template_graph.word_independent:
                sources |= {edge.parent} if edge.parent in visible else nearest[edge.parent]
        nearest[group.index] = sources
        if group.index in visible:
            graph.add_edges_from((source, group.index) for source in sources)
    return graph


def minimize_crossings(
    rows: Mapping[str, int], arrows: Sequence[tuple[str, str]], num_sweeps: int = 4
) -> dict[str, int]:
    """The index of each node in its row, such that few arrows cross; ties keep the order of `rows`."""
    # Barycentre heuristic of Sugiyama, Tagawa and Toda (1981, "Methods for visual understanding of hierarchical system
    # structures"); the exact problem is NP-hard even for two rows (Garey and Johnson, 1983). Sweeps go down and up in
    # turn: each row is sorted by the mean position of a node's neighbours in the rows already passed. Positions are
    # counted from the middle of a row, so that rows of different lengths are comparable.
    ordered: dict[int, list[str]] = {}
    for name, row in rows.items():
        ordered.setdefault(row, []).append(name)
    neighbours: dict[str, list[str]] = {name: [] for name in rows}
    for parent, child in arrows:
        neighbours[parent].append(child)
        neighbours[child].append(parent)
    positions = {name: k - (len(line) - 1) / 2 for line in ordered.values() for k, name in enumerate(line)}
    for sweep in range(num_sweeps):
        direction = 1 if sweep % 2 == 0 else -1
        for row in sorted(ordered, reverse=direction < 0):
            means = {}
            for name in ordered[row]:
                adjacent = [positions[other] for other in neighbours[name] if (row - rows[other]) * direction > 0]
                means[name] = sum(adjacent) / len(adjacent) if adjacent else positions[name]
            ordered[row].sort(key=means.__getitem__)
            positions |= {name: k - (len(ordered[row]) - 1) / 2 for k, name in enumerate(ordered[row])}
    return {name: k for line in ordered.values() for k, name in enumerate(line)}
