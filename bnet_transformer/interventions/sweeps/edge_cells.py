"""Cells of edges: each cell sets one edge from a writer to a reader, at all words or at one word of the reader."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bnet_transformer._core.naming import WORD, join_path, match_names, split_path
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.interventions.edges.cells import EdgeCells
from bnet_transformer.interventions.edges.structure import EDGES, EdgeStructure, has_words
from bnet_transformer.interventions.sweeps.cell_spec import PatchCells, label_positions, select_axes
from bnet_transformer.interventions.sweeps.examples import Examples

EDGE = "edge"


def build_structure(base: Examples, source: Examples | None, outcome_nodes: Sequence[int]) -> EdgeStructure:
    """The edges between two runs; nothing passes through a group of which `do` sets all nodes.

    Raises:
        BNetError: A recurrent group depends on the words, so that it is no sum of writers.
    """
    model, leaves = base.model, set[int]()
    for side in (base, source or base):
        by_group = side.model.ground.split_by_group(list(side.model.do))
        shapes = side.model.ground.shapes
        leaves |= {index for index, nodes in by_group.items() if len(nodes) == math.prod(shapes[index])}
    outcomes = sorted({model.ground.group_of(node).index for node in outcome_nodes})
    key = "edges", tuple(outcomes), frozenset(leaves)
    structure = base.module.memoize(key, lambda: EdgeStructure(model.network, tuple(outcomes), frozenset(leaves)))
    structure.check_not_recurrent()
    if not len(structure.edges):
        raise BNetError("edges: no edge leads from a writer to the metric")
    return structure


def build_edge_cells(
    examples: Examples, structure: EdgeStructure, names: Sequence[str] | None, over: object, *, is_strict: bool = True
) -> PatchCells:
    """A cell for each edge, or for each edge and word of its reader with `over="word"`.

    Args:
        examples: The sentences that are patched.
        structure: The edges.
        names: The names of some edges; None for all.
        over: The further axes along which cells are separate: None or `"word"`.
        is_strict: Whether other axes are an error.
    """
    table, edges, edge_labels = structure.edges, np.arange(len(structure.edges)), structure.edges.names
    if names is not None:
        edges = np.array([k for name in names for k in _find_known_edges(structure, name)], dtype=np.int64)
        edge_labels = tuple(table.names[k] for k in edges.tolist())
    at = EDGES if names is None or len(names) > 1 else names[0]
    axes = (EDGE, *select_axes(over, (), (WORD,), is_strict=is_strict))
    labels = {EDGE: edge_labels}
    positions = {EDGE: tuple(range(len(edges)))}
    if WORD not in axes:
        cells = np.arange(len(edges))
        by_cell = dict(enumerate(labels[EDGE]))
        return PatchCells(at, axes, positions, labels, by_cell, edges=EdgeCells(structure, cells, edges))
    readers = [structure.reader_groups[r].target for r in table.readers[edges].tolist()]
    counts = [examples.model.ground.word_counts[spec.group.word_stack] if has_words(spec) else 1 for spec in readers]
    positions[WORD] = tuple(range(max(counts)))
    stacks = {spec.group.word_stack for spec in readers if has_words(spec)}
    labels[WORD] = tuple(map(str, positions[WORD]))
    if len(stacks) == 1:
        labels |= label_positions(examples, {WORD: positions[WORD]}, {WORD: stacks.pop()})
    pairs = [(k, word) for k, count in enumerate(counts) for word in range(count)]
    number, word = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    cells = number * len(positions[WORD]) + word
    names_by_cell = {
        int(cell): _add_word(labels[EDGE][k], i) if has_words(readers[k]) else labels[EDGE][k]
        for cell, (k, i) in zip(cells, pairs, strict=True)
    }
    by_word = EdgeCells(structure, cells, edges[number], word)
    return PatchCells(at, axes, positions, labels, names_by_cell, edges=by_word)


def match_edges(structure: EdgeStructure, pattern: str) -> list[int]:
    """The numbers of the edges of a name or a pattern, `"a_0_* -> y"`; none if there are no such edges."""
    known = structure.edges.numbers
    name = join_path(split_path(pattern))
    return [known[edge] for edge in ([name] if name in known else match_names(name, known))]


def _find_known_edges(structure: EdgeStructure, pattern: str) -> list[int]:
    """The numbers of the edges of a name or a pattern; an error if there are none."""
    matches = match_edges(structure, pattern)
    if not matches:
        hint = "An edge leads from a writer to a reader after it, such as 'a_0_1 -> q_1_0'; net.edges() lists them"
        raise unknown_name_error("edge", pattern, structure.edges.names, hint=hint)
    return matches


def _add_word(name: str, word: int) -> str:
    """The name of an edge at one word of its reader: `"x_0 -> q_0_1_3"`, `"x_0 -> a_0_1_3<k>"`."""
    stem, mark, channel = name.partition("<")
    return f"{stem}_{word}{mark}{channel}"
