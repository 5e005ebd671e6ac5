"""Alignment of words: the word of the other run from which each word of the base run takes its values.

By default a word takes the values of the same word. `words=` is another map, so that the two sentences may differ in
length, or may be one sentence whose values are taken from other places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnet_transformer._core.arrays import BoolArray, IntArray
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.sweeps.cell_spec import PatchCells
from bnet_transformer.reference import GroundModel

WORDS_FORM = "a mapping, or pairs, from words of the sentence that is patched to words of the other sentence"


@dataclass(frozen=True)
class WordAlignment:
    """The source word of each base word.

    Args:
        base: A sentence that is patched.
        source: A sentence that provides the values.
        by_stack: For each stack of words, the source word of each base word, `[word]`; -1 for a word without one.
        is_identity: Whether each word is its own source word, in sentences of equal lengths.
    """

    base: GroundModel
    source: GroundModel
    by_stack: Mapping[str, IntArray]
    is_identity: bool

    @property
    def has_equal_lengths(self) -> bool:
        """Whether the sentences have the same numbers of words, so that a node has the same id in both."""
        return self.base.ground.word_counts == self.source.ground.word_counts

    def align_nodes(self, group: int, nodes: IntArray) -> IntArray:
        """The source nodes of nodes of a group, as indices within the group, `[node]`; -1 for a node without one."""
        stack = self.base.network.specs[group].group.word_stack
        if self.is_identity or stack is None:
            return nodes
        plate, word = np.divmod(nodes, self.base.ground.word_counts[stack])
        source_word = self.by_stack[stack][word]
        aligned: IntArray = np.where(
            source_word < 0, -1, plate * self.source.ground.word_counts[stack] + source_word
        ).astype(np.int64)
        return aligned

    def align_node(self, node: int) -> int | None:
        """The ground id of the source node of a base node; None for a node without one."""
        group = self.base.ground.group_of(node).index
        index = self.align_nodes(group, np.array([node - int(self.base.ground.offsets[group])]))[0]
        return None if index < 0 else int(self.source.ground.offsets[group]) + int(index)

    def align_outcomes(self, nodes: Sequence[int]) -> tuple[int, ...] | None:
        """The nodes of the metric in the source run, or None if a node has none, so that the metric is not defined.

        In sentences of equal lengths a word outside of the map is read at the same word.
        """
        aligned = []
        for node in nodes:
            source = self.align_node(node)
            if source is None and self.has_equal_lengths:
                source = node
            if source is None:
                return None
            aligned.append(source)
        return tuple(aligned)

    def drop_unaligned(self, cells: PatchCells) -> PatchCells:
        """The cells without the nodes, and the paths from nodes, that have no source; empty cells do not exist."""
        if self.is_identity:
            return cells
        ground = self.base.ground
        has_source: dict[int, BoolArray] = {}
        for group, shape in enumerate(ground.shapes):
            has_source[group] = self.align_nodes(group, np.arange(int(np.prod(shape, dtype=np.int64)))) >= 0

        def is_aligned(node: int) -> bool:
            group = ground.group_of(node).index
            return bool(has_source[group][node - int(ground.offsets[group])])

        sites = tuple(sites.select(has_source[sites.group][sites.nodes]) for sites in cells.sites)
        paths = tuple(path for path in cells.paths if is_aligned(path.nodes[0]))
        ids = [*(sites_part.cells for sites_part in sites), np.array([path.cell for path in paths], dtype=np.int64)]
        remaining = cells.with_sites(sites, paths, np.unique(np.concatenate(ids)))
        if not remaining.names:
            raise BNetError(
                "words", expected="a map with a word of some cell of at=", actual="no cell with such a word"
            )
        return remaining


def parse_words(base: GroundModel, source: GroundModel, words: object) -> WordAlignment:
    """Parse `words=` into an alignment of the words of each stack.

    Args:
        base: The first sentence that is patched.
        source: The first sentence that provides the values.
        words: None; a mapping or pairs of words; or for a net with several stacks of words, such a map for each stack.

    Returns:
        The alignment. A stack without a map has the identity, which requires equal lengths.
    """
    counts, source_counts = base.ground.word_counts, source.ground.word_counts
    has_stacks = isinstance(words, Mapping) and bool(words) and all(isinstance(key, str) for key in words)
    if words is not None and not has_stacks and len(counts) != 1:
        stacks = ", ".join(map(repr, counts))
        raise BNetError("words", expected="a map for each stack of words", actual=words, allowed=stacks)
    by_stack_maps: dict[str, Any] = {} if words is None else dict(words) if has_stacks else {next(iter(counts)): words}  # type: ignore[call-overload]
    unknown = [stack for stack in by_stack_maps if stack not in counts]
    if unknown:
        raise BNetError("words", expected=WORDS_FORM, actual=unknown[0], allowed=", ".join(map(repr, counts)))
    by_stack: dict[str, IntArray] = {}
    for stack, count in counts.items():
        if stack in by_stack_maps:
            by_stack[stack] = _parse_word_map(by_stack_maps[stack], count, source_counts[stack])
            continue
        if count != source_counts[stack]:
            expected = f"a map of the words of {stack or 'the sentences'}, which differ in number"
            raise BNetError("words", expected=expected, actual=f"{count} and {source_counts[stack]} words")
        by_stack[stack] = np.arange(count)
    is_same = all(np.array_equal(table, np.arange(len(table))) for table in by_stack.values())
    return WordAlignment(base, source, by_stack, is_same and dict(counts) == dict(source_counts))


def _parse_word_map(words: object, count: int, source_count: int) -> IntArray:
    """The source word of each base word, `[word]`, from a mapping or from pairs; -1 for a word that is not in it."""
    pairs: Any = list(words.items()) if isinstance(words, Mapping) else words
    is_valid = isinstance(pairs, Sequence) and not isinstance(pairs, str) and len(pairs) > 0
    is_valid = is_valid and all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs)
    if not is_valid or not all(isinstance(word, int | np.integer) for pair in pairs for word in pair):
        raise BNetError("words", expected=WORDS_FORM, actual=words)
    table = np.full(count, -1)
    for word, source in pairs:
        if not (0 <= word < count and 0 <= source < source_count):
            expected = f"words from 0 to {count - 1} mapped to words from 0 to {source_count - 1}"
            raise BNetError("words", expected=expected, actual=f"{word}: {source}")
        if table[word] >= 0:
            raise BNetError("words", expected="one word of the other sentence for each word", actual=f"{word} twice")
        table[word] = source
    return table
