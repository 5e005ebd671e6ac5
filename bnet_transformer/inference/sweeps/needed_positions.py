"""Which nodes a sweep computes again: those that descend from what a cell sets, and lead to an outcome.

Both are tables of words, `[cell, word]` and `[word]`, for each family (one column if it has no words): an arrow carries
them along its reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.graph.walk import marks_of, reach
from bnet_transformer.network import Member
from bnet_transformer.reference import World

Table = NDArray[np.bool_]
COPIES = 8  # of the widest value of a cell that are there at once


@dataclass(frozen=True)
class NeededPositions:
    """The words of each family that lead to an outcome, and those that `do` has set.

    Args:
        outcomes: Ground ids of the nodes that the metric reads.
        leads: Of each family from which an outcome descends, which words lead to it, `[word]`.
        cut: Of each family of which `do` has set a node, the words of which it has set every node, `[word]`.
    """

    outcomes: tuple[int, ...]
    leads: Mapping[int, Table]
    cut: Mapping[int, Table]


def find_needed_positions(world: World, outcomes: Iterable[int]) -> NeededPositions:
    """Mark the ancestors of the outcomes, and of these the words.

    Args:
        world: The sentence after surgery.
        outcomes: Ground ids of the nodes that the metric reads.

    Returns:
        The words that lead to an outcome, and those that are set.
    """
    outcomes, ground = tuple(outcomes), world.ground
    marks = marks_of(ground, outcomes)
    for index, above in reach(ground, marks, up=True).items():
        marks[index] = np.asarray(marks[index] | above) if index in marks else above
    leads = {index: np.any(_by_word(world, index, mark), axis=0) for index, mark in marks.items()}
    cut = {index: np.all(_by_word(world, index, mark), axis=0) for index, mark in marks_of(ground, world.do).items()}
    return NeededPositions(outcomes, leads, cut)


def _by_word(world: World, index: int, marks: Table) -> Table:
    """The marks of a family's nodes as `[plates, word]`, one word if it has none."""
    return marks.reshape(-1, count_words(world, index))


def find_changed_positions(
    world: World, needed: NeededPositions, set_words: Mapping[int, Table], cells: int
) -> dict[int, tuple[Table, Table]]:
    """Walk from what cells set down to the outcomes.

    Args:
        world: The sentence after surgery.
        needed: The words that lead to an outcome; no others are walked.
        set_words: Of each family of which cells set nodes, the words in which they do, `[cell, word]`.
        cells: The number of cells.

    Returns:
        Of each family that changes in a cell, in order: the words that read something changed, `[cell, word]`, and
        these together with the words in which the cell sets a node.
    """
    changed: dict[int, tuple[Table, Table]] = {}
    for index, member in enumerate(world.network.members):
        leads = needed.leads.get(index)
        if leads is None or not (index in set_words or any(given.parent in changed for given in member.inputs)):
            continue
        descends = np.zeros((cells, len(leads)), dtype=np.bool_)
        for given in member.inputs:
            if given.parent in changed:
                above = changed[given.parent][1]
                if given.reach.kind == "same" or world.network.members[given.parent].family.words is None:
                    descends |= above
                    continue
                reads = given.reach.matrix(len(leads), count_words(world, given.parent))  # [word, word read]
                descends |= (above.astype(np.float32) @ reads.T.astype(np.float32)) > 0
        descends &= leads & np.logical_not(needed.cut.get(index, False))
        both = descends | (set_words[index] & leads) if index in set_words else descends
        if both.any():
            changed[index] = descends, both
    return changed


def count_words(world: World, index: int) -> int:
    """The words of a family, 1 if it has none."""
    words = world.network.members[index].family.words
    return 1 if words is None else world.ground.words[words]


def bytes_of(world: World, needed: NeededPositions) -> tuple[int, int]:
    """What one cell of one example takes while it is computed, and what the run of one example takes that is kept."""
    most, kept = 1, 1
    for index, table in needed.leads.items():
        member, count, shape = world.network.members[index], int(table.sum()), world.ground.shapes[index]
        if member.tpm.kind == "input" or member.family.words is None:
            continue
        plates = int(np.prod(shape[:-1], dtype=np.int64))
        own = numbers_in(world, member)
        inner = max([n for each in member.parameters.values() for n in each.shape[:1]], default=1)
        stacks = [world.network.members[given.parent].family.words for given in member.inputs]
        read = max([world.ground.words[stack] for stack in stacks if stack is not None], default=1)
        most = max(most, count * max(plates * own, plates * read, inner))
        kept += 2 * plates * own * (shape[-1] if table.all() else count)
    size = world.network.dtype.itemsize
    return size * COPIES * most, size * kept


def numbers_in(world: World, member: Member) -> int:
    """How many numbers an outcome of a node has: its value's, or the probabilities of its states."""
    if member.tpm.kind == "discrete":
        return world.network.count_states(member.family.index, world.ground.words)
    return math.prod(member.shape)
