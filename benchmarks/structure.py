"""Rows of the structure: arrow arrays of ground graphs, their memory, and the networkx export."""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

from benchmarks.harness import Figure, figure, measure_peak, peak_memory, ratios, run_in_process, time_calls
from benchmarks.limits import Work, limit_figures
from bnet_transformer.graph import GroundGraph, NodeSelection, TemplateGraph


def arrows_of_128_words() -> list[Figure]:
    """The arrow arrays of 128 words, 6 slices, 12 heads (concat): all created and kept. The limit is that of writing
    the arrays."""
    template = _create_net(slices=6).network.graph
    ground = GroundGraph(template, {"": 128})
    spent = time_calls({"arrays": lambda: list(GroundGraph(template, {"": 128}).arrows())}, runs=15)
    peak, arrows = measure_peak(lambda: list(ground.arrows())), list(ground.arrows())
    assert sum(len(sources) for _, sources, _ in arrows) == ground.count_arrows()
    return [
        figure("nodes", len(ground), ""),
        figure("arrows", ground.count_arrows(), ""),
        figure("time for all arrays", spent["arrays"], "s", target=1.0),
        figure("peak memory of the arrays", peak, "MB"),
        *limit_figures(Work(0, _count_bytes(arrows)), spent["arrays"]),
    ]


def arrows_of_512_words() -> list[Figure]:
    """512 words, 12 slices, 12 heads (concat): counted; one slice, head and ten words sliced out; then all arrays at
    once. In a fresh process with the folded graph and without torch. Memory is its peak resident memory (VmHWM): first
    before the ground graph is made, then the peak up to each step. The limit is that of writing the arrays that are
    kept at once."""
    rows, written, seconds = run_in_process(_measure_large, _create_net(slices=12).network.graph)
    return [*rows, *limit_figures(Work(0, written), [seconds])]


def _measure_large(template: TemplateGraph) -> tuple[list[Figure], int, float]:
    """Return the figures of a large ground graph."""
    assert "torch" not in sys.modules
    before = peak_memory()
    selection = NodeSelection(slices=[5], plates={"head": [7]}, words={"": range(100, 110)})
    counted = time_calls({"": lambda: _count(GroundGraph(template, {"": 512}))}, runs=15)[""]
    sliced = time_calls({"": lambda: list(GroundGraph(template, {"": 512}).arrows(selection))}, runs=15)[""]
    small = peak_memory()
    ground = GroundGraph(template, {"": 512})
    start = time.perf_counter()
    streamed = sum(len(sources) for _, sources, _ in ground.arrows())
    stream_time = time.perf_counter() - start
    assert streamed == ground.count_arrows()
    stream = peak_memory()
    start = time.perf_counter()
    arrows = list(ground.arrows())
    array_time = time.perf_counter() - start
    full = peak_memory()
    assert sum(len(sources) for _, sources, _ in arrows) == streamed
    num_nodes, num_arrows = _count(ground)
    num_sliced = sum(len(sources) for _, sources, _ in ground.arrows(selection))
    rows = [
        figure("nodes", num_nodes, ""),
        figure("arrows", num_arrows, ""),
        figure("arrows of the slice, head and words", num_sliced, ""),
        figure("time to count nodes and arrows", counted, "s"),
        figure("time to slice out", sliced, "s"),
        figure("time for all arrays, one pair of groups after another", stream_time, "s"),
        figure("time for all arrays, kept at once", array_time, "s"),
        figure("peak memory before the ground graph", before, "MB"),
        figure("peak memory after counting and slicing", small, "MB", target=1000.0),
        figure("peak memory after all arrays one after another", stream, "MB"),
        figure("peak memory with all arrays at once", full, "MB"),
    ]
    return rows, _count_bytes(arrows), array_time


def _count_bytes(arrows: list[Any]) -> int:
    """Return the bytes of the arrays of sources and targets."""
    return sum(sources.nbytes + targets.nbytes for _, sources, targets in arrows)


def _count(ground: GroundGraph) -> tuple[int, int]:
    """Return the numbers of nodes and arrows."""
    return ground.count_nodes(), ground.count_arrows()


def networkx_of_128_words() -> list[Figure]:
    """The networkx export of 128 words, 6 slices, 12 heads (limit lifted), nodes with all their attributes, compared
    with a plain `add_edges_from` on prepared tuples: the same arrows in the same order with the same attributes, in
    both forms of networkx: attributes in each tuple, or once per call. The prepared tuples are frozen, so the garbage
    collector ignores them, for all. The ratio is to the faster of the two forms."""
    import networkx as nx

    from bnet_transformer.bridges.networkx import ground_graph_to_networkx

    network = _create_net(slices=6).network
    ground = GroundGraph(network.graph, {"": 128})
    graph = ground_graph_to_networkx(network, ground, limit=None)
    triples: list[tuple[str, str, dict[str, Any]]] = []
    grouped: list[tuple[list[tuple[str, str]], dict[str, Any]]] = []
    for _, sources, targets in ground.arrows():
        pairs = [(ground.names[u], ground.names[v]) for u, v in zip(sources, targets, strict=True)]
        attributes = graph.edges[pairs[0]]
        triples += [(*pair, dict(attributes)) for pair in pairs]
        grouped.append((pairs, dict(attributes)))
    assert len(triples) == len(graph.edges) and all(graph.edges[u, v] == text for u, v, text in triples)
    del graph
    gc.collect()
    gc.freeze()

    def add_edges(*batches: tuple[list[Any], dict[str, str]]) -> nx.DiGraph:
        peer = nx.DiGraph()
        for pairs, attributes in batches:
            peer.add_edges_from(pairs, **attributes)
        return peer

    export = lambda: ground_graph_to_networkx(network, GroundGraph(network.graph, {"": 128}), limit=None)  # noqa: E731
    spent = time_calls(
        {"ours": export, "triples": lambda: add_edges((triples, {})), "pairs": lambda: add_edges(*grouped)}, runs=7
    )
    gc.unfreeze()
    best = min(("triples", "pairs"), key=lambda name: sorted(spent[name])[len(spent[name]) // 2])
    return [
        figure("arrows", ground.count_arrows(), ""),
        figure("time of the export", spent["ours"], "s"),
        figure("time of add_edges_from on (u, v, attributes)", spent["triples"], "s"),
        figure("time of add_edges_from on (u, v), attributes by keyword", spent["pairs"], "s"),
        figure("ratio to the faster of them", ratios(spent["ours"], spent[best]), "", target=1.3),
        figure("peak memory of the export", measure_peak(export), "MB"),
    ]


def _create_net(slices: int) -> Any:
    """Return a concat net with this number of slices."""
    import bnet_transformer as bt

    return bt.bayesuvius(24, slices=slices, heads=12, combine="concat", key_dim=2, value_dim=2)
