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

from bnet_transformer.network import Input, Member
from bnet_transformer.world import World

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
    """Walk from the outcomes up along the arrows, family by family, words as tables.

    Args:
        world: The sentence after surgery.
        outcomes: Ground ids of the nodes that the metric reads.

    Returns:
        The words that lead to an outcome, and those that are set: a walk ends at a word of which every node is set.
    """
    outcomes, leads, cut = tuple(outcomes), dict[int, Table](), _cut_words(world)
    for node in outcomes:
        family, index = world.ground.place(node)
        table = leads.setdefault(family.index, np.zeros(count_words(world, family.index), dtype=np.bool_))
        table[index[-1] if family.words is not None else 0] = True
    while True:  # once, unless families read each other word after word: then until nothing is added
        before = {index: table.copy() for index, table in leads.items()} if world.network.graph.recurrent else leads
        for member in reversed(world.network.members):
            below = leads.get(member.family.index)
            if below is not None:
                _mark_parents(world, member, below & np.logical_not(cut.get(member.family.index, False)), leads)
        if not before or all(
            index in before and np.array_equal(before[index], table) for index, table in leads.items()
        ):
            return NeededPositions(outcomes, {index: table for index, table in leads.items() if table.any()}, cut)


def _mark_parents(world: World, member: Member, below: Table, leads: dict[int, Table]) -> None:
    """Mark the words of each parent that these words of a family read."""
    for given in member.inputs:
        if given.reach.kind == "same":
            above = _beside(world, given.parent, below)
        elif world.network.members[given.parent].family.words is None:
            above = np.array([bool(below.any())])
        else:
            above = np.any(_pairs(world, member, given)[below], axis=0)
        leads[given.parent] = leads[given.parent] | above if given.parent in leads else above.copy()
        for _, selector in given.pick:
            above = _beside(world, selector, below)
            leads[selector] = leads[selector] | above if selector in leads else above.copy()


def _beside(world: World, parent: int, below: Table) -> Table:
    """The words of a parent beside some words of its child; a parent without words stands beside them all."""
    without = world.network.members[parent].family.words is None
    return np.array([bool(below.any())]) if without else below


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
                descends |= _read_from(world, member, given, changed[given.parent][1])
        descends &= leads & np.logical_not(needed.cut.get(index, False))
        both = descends | (set_words[index] & leads) if index in set_words else descends
        if both.any():
            changed[index] = descends, both
    return changed


def _read_from(world: World, member: Member, given: Input, above: Table) -> Table:
    """`[cell, word]`: the words of a family that read one of these words of a parent, `[cell, word of the parent]`."""
    if given.reach.kind == "same" or world.network.members[given.parent].family.words is None:
        return above
    found: Table = (above.astype(np.float32) @ _pairs(world, member, given).T.astype(np.float32)) > 0
    return found


def count_words(world: World, index: int) -> int:
    """The words of a family, 1 if it has none."""
    words = world.network.members[index].family.words
    return 1 if words is None else world.ground.words[words]


def _pairs(world: World, member: Member, given: Input) -> Table:
    """`[word, word read]`."""
    return given.reach.matrix(count_words(world, member.family.index), count_words(world, given.parent))


def _cut_words(world: World) -> dict[int, Table]:
    """For each family of which a node is set, the words all of whose nodes are."""
    sets: dict[int, Table] = {}
    for node in world.do:
        family = world.ground.family_of(node)
        shape = world.ground.shapes[family.index]
        table = sets.setdefault(family.index, np.zeros(int(np.prod(shape, dtype=np.int64)), dtype=np.bool_))
        table[node - int(world.ground.offsets[family.index])] = True
    return {i: np.all(table.reshape(-1, count_words(world, i)), axis=0) for i, table in sets.items()}


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
