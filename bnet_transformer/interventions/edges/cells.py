"""The edges that the cells of a sweep set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from bnet_transformer._core.arrays import BoolArray, IntArray
from bnet_transformer.interventions.edges.structure import EdgeStructure, WriterUnit


@dataclass(frozen=True)
class EdgeCells:
    """The edges that cells set: cell `cells[k]` sets edge `edges[k]` of the structure, at a word of the reader.

    `words` is the word of each reader; None for all words at once.
    """

    structure: EdgeStructure
    cells: IntArray
    edges: IntArray
    words: IntArray | None = None

    def select(self, mask: BoolArray) -> EdgeCells:
        """The cells that a mask, `[k]`, marks."""
        words = None if self.words is None else self.words[mask]
        return EdgeCells(self.structure, self.cells[mask], self.edges[mask], words)

    def renumber_cells(self, new_ids: IntArray) -> EdgeCells:
        """The cells with a new id, `new_ids[cell]`; cells whose new id is -1 are dropped."""
        selected = self.select(new_ids[self.cells] >= 0)
        return replace(selected, cells=new_ids[selected.cells])

    @cached_property
    def reader_groups(self) -> list[int]:
        """The numbers of the groups of readers."""
        return [int(r) for r in np.unique(self.structure.edges.readers[self.edges])]

    @cached_property
    def writer_units(self) -> list[WriterUnit]:
        """The writers, each once."""
        table = self.structure.edges
        pairs = np.stack([table.writers[self.edges], table.writer_units[self.edges]])
        return [(int(w), int(v)) for w, v in np.unique(pairs, axis=1).T]

    @cached_property
    def writers(self) -> list[int]:
        """The numbers of the groups of writers."""
        return sorted({w for w, _ in self.writer_units})

    @cached_property
    def targets(self) -> frozenset[int]:
        """The groups whose values are computed from what readers see."""
        return frozenset(self.structure.reader_groups[r].target.group.index for r in self.reader_groups)

    def list_target_words(self, word_counts: Mapping[int, int]) -> list[tuple[int, IntArray, IntArray]]:
        """For each group of targets the cells, and the word of the target that each of them sets: `[cell * word]`."""
        entries = []
        numbers = self.structure.edges.readers[self.edges]
        for r in self.reader_groups:
            index, inside = self.structure.reader_groups[r].target.group.index, numbers == r
            if self.words is not None:
                entries.append((index, self.cells[inside], self.words[inside]))
            elif index in word_counts:
                words = np.arange(word_counts[index])
                cells = self.cells[inside]
                entries.append((index, np.repeat(cells, len(words)), np.tile(words, len(cells))))
        return entries

    @cached_property
    def source_groups(self) -> frozenset[int]:
        """The groups whose values in both runs the edges need."""
        groups = set[int]()
        for w in self.writers:
            writer = self.structure.writer_groups[w]
            groups.add(writer.spec.group.index)
            if writer.is_part:
                groups |= {edge.parent for edge in self.structure.network.graph.in_edges[writer.spec.group.index]}
        return frozenset(groups)


def join_edge_cells(parts: Sequence[EdgeCells]) -> EdgeCells | None:
    """The cells of several parts with the same structure; None without edges."""
    parts = [part for part in parts if len(part.cells)]
    if not parts:
        return None
    words = None
    if any(part.words is not None for part in parts):
        words = np.concatenate([part.words for part in parts if part.words is not None])
    cells, edges = (np.concatenate([getattr(part, name) for part in parts]) for name in ("cells", "edges"))
    return EdgeCells(parts[0].structure, cells, edges, words)
