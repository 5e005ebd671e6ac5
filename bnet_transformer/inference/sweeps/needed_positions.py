"""Which nodes a sweep computes again: those that descend from what a cell sets, and lead to an outcome.

Both are tables of words, `[cell, word]` and `[word]`, for each family (one column where it is not over words): an arrow
carries them along its reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.compiler.plan import states_in
from bnet_transformer.inference.sweeps.examples import Examples
from bnet_transformer.network import Input, Member
from bnet_transformer.world import World

Table = NDArray[np.bool_]
COPIES = 8  # of the widest value of a cell that are there at once


def count_words(world: World, index: int) -> int:
    """The words that a family is over, 1 where it is over none."""
    words = world.network.members[index].family.words
    return 1 if words is None else world.ground.words[words]


def leads(world: World, outcomes: Iterable[int]) -> dict[int, Table]:
    """For each family of which a node leads to an outcome, which words do."""
    found: dict[int, Table] = {}
    for node in outcomes:
        family, index = world.ground.place(node)
        table = found.setdefault(family.index, np.zeros(count_words(world, family.index), dtype=np.bool_))
        table[index[-1] if family.words is not None else 0] = True
    cut, grown = cut_words(world), True
    while grown:  # once, but for families that read each other word after word
        before = {index: table.copy() for index, table in found.items()}
        for member in reversed(world.network.members):
            if member.family.index in found:
                _lead(world, member, cut, found)
        changed = (index not in before or not np.array_equal(before[index], table) for index, table in found.items())
        grown = bool(world.network.graph.recurrent) and any(changed)
    return {index: table for index, table in found.items() if table.any()}


def _lead(world: World, member: Member, cut: Mapping[int, Table], found: dict[int, Table]) -> None:
    """Note the words of its parents that lead on through the words of a family that do."""
    below = found[member.family.index]
    below = np.logical_and(below, ~cut.get(member.family.index, np.zeros_like(below)))
    for given in member.inputs:
        above = {given.parent: read_by(world, member, given, below)}
        above |= {selector: _own(world, selector, below) for _, selector in given.pick}
        for parent, words in above.items():
            found[parent] = np.logical_or(found[parent], words) if parent in found else words.copy()


def read_by(world: World, member: Member, given: Input, below: Table) -> Table:
    """The words of a parent that some words of a family read."""
    if world.network.members[given.parent].family.words is None:
        return np.array([bool(below.any())])
    if given.reach.kind == "same":
        return below
    found: Table = np.any(_pairs(world, member, given)[below], axis=0)
    return found


def reached(world: World, member: Member, given: Input, above: Table) -> Table:
    """`[cell, word]`: the words of a family that read one of these words of a parent, `[cell, word of the parent]`."""
    n = count_words(world, member.family.index)
    if world.network.members[given.parent].family.words is None:
        return np.broadcast_to(above, (len(above), n))
    if given.reach.kind == "same":
        return above
    found: Table = (above.astype(np.float32) @ _pairs(world, member, given).T.astype(np.float32)) > 0
    return found


def cut_words(world: World) -> dict[int, Table]:
    """For each family of which a node is set, the words all of whose nodes are."""
    sets: dict[int, Table] = {}
    for node in world.do:
        family = world.ground.family_of(node)
        shape = world.ground.shapes[family.index]
        table = sets.setdefault(family.index, np.zeros(int(np.prod(shape, dtype=np.int64)), dtype=np.bool_))
        table[node - int(world.ground.offsets[family.index])] = True
    return {i: np.all(table.reshape(-1, count_words(world, i)), axis=0) for i, table in sets.items()}


def _pairs(world: World, member: Member, given: Input) -> Table:
    """`[word, word read]`."""
    m = count_words(world, given.parent)
    return given.reach.matrix(count_words(world, member.family.index), m)


def _own(world: World, selector: int, below: Table) -> Table:
    """The words of a selector: it stands beside the word that it picks for."""
    return below if count_words(world, selector) == len(below) else np.array([bool(below.any())])


def bytes_of(examples: Examples, nodes: Sequence[int]) -> tuple[int, int]:
    """What one cell of one example takes while it is computed, and what the run of one example takes that is kept."""
    most, kept, world = 1, 1, examples.world
    for index, table in leads(world, nodes).items():
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
    """How many numbers are told of a node: its value's, or the probabilities of its states."""
    if member.tpm.kind == "discrete":
        return states_in(world.network, member.family.index, world.ground.words)
    return math.prod(member.shape)
