"""How many bytes a sweep takes for a cell and for an example, from the sizes of the families that it computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bnet_transformer.compiler.plan import states_in
from bnet_transformer.inference.sweeps.pairs import Examples
from bnet_transformer.inference.sweeps.reach import leads
from bnet_transformer.network import Member
from bnet_transformer.world import World

COPIES = 8  # of the widest value of a cell that are there at once


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
