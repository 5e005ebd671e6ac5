"""All joint states of some choices of a sentence as a batch: the states, parts that fit in memory, and their module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bnet_transformer.compiler.module import Module
from bnet_transformer.reference import World

NUMBERS = 2**21  # of one value of all words and states of a piece of the batch


def joint_states(supports: Sequence[Sequence[int]]) -> Tensor:
    """All joint states, the last choice fastest: `[S, choice]`."""
    if not supports:
        return torch.zeros(1, 0, dtype=torch.long)
    grids = torch.meshgrid(*(torch.tensor(list(each), dtype=torch.long) for each in supports), indexing="ij")
    return torch.stack([grid.reshape(-1) for grid in grids], -1)


def pieces(world: World, count: int, asked: Iterable[int]) -> Iterator[slice]:
    """Parts of a batch of so many states, each small enough to be computed at once.

    `asked` are the families whose values or distributions are computed; those above them count as well.
    """
    families = set(asked)
    largest = max(_numbers(world, index) for index in world.network.graph.ancestral_set(families))
    size = max(1, NUMBERS // largest)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _numbers(world: World, index: int) -> int:
    """How many numbers a family holds for one state: its values, the logits of its states, the words that it reads."""
    member, words = world.network.members[index], max(world.ground.words.values(), default=1)
    states = world.network.count_states(index, world.ground.words) if member.tpm.kind == "discrete" else 0
    return math.prod(world.ground.shapes[index]) * (max(math.prod(member.shape), states) + words)


def of_one_sentence(module: Module) -> Module:
    """The module whose batch are states of one sentence: what is drawn for a whole corpus is drawn for it alone."""
    network = module.network
    if all(member.scope == "sentence" for member in network.members):
        return module
    members = tuple(replace(member, scope="sentence") for member in network.members)
    return Module(replace(network, members=members)).eval()
