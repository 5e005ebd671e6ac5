"""The open choices above what a sweep sets and asks: they are the same in both runs, and the outcomes are averaged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer.asking import choice_above
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError
from bnet_transformer.inference.joint_posterior import joint_log_probs
from bnet_transformer.inference.query import Query, joint_states
from bnet_transformer.inference.sweeps.examples import Examples
from bnet_transformer.reference import BUDGET
from bnet_transformer.world import World, choices, where


@dataclass(frozen=True)
class Choices:
    """Choices that no value decides (a selector, atoms) and every joint state of them, `[state, node]`."""

    nodes: tuple[int, ...]
    states: Tensor
    examples: Examples = field(repr=False)

    @cached_property
    def log_probs(self) -> Tensor:
        """The log probability of each joint state in each example, `[state, example]`."""
        module, nodes = self.examples.module, self.nodes
        each = [joint_log_probs(Query(module, world, nodes=nodes)).reshape(-1) for world in self.examples.worlds]
        return torch.stack(each, -1)

    def __iter__(self) -> Iterator[dict[int, Tensor]]:
        for row in self.states:
            yield dict(zip(self.nodes, row.unbind(), strict=True))

    def averaged(self, found: Sequence[Tensor], *, discrete: bool) -> Tensor:
        """An outcome over all states, `[cell, example, *shape]` in each: its mean, or the log of the mean of `P`."""
        if not self.nodes:
            return found[0]
        each = torch.stack(list(found))
        logs = self.log_probs.to(each.dtype).reshape(len(each), 1, -1, *[1] * (each.dim() - 3))
        return (each + logs).logsumexp(0) if discrete else (each * logs.exp()).sum(0)


def choices_of(clean: Examples | None, corrupt: Examples, nodes: Sequence[int], outcomes: Sequence[int]) -> Choices:
    """The choices above some nodes in either run that no value decides."""
    found: set[int] = set()
    for examples in (corrupt,) if clean is None else (clean, corrupt):
        world = examples.world
        asked = [parent for node in outcomes for parent in _decided_by(world, node)] + list(nodes)
        if not _may_hang_on_choices(world, asked):  # cheaper to tell than which nodes are open
            continue
        found |= {node for node in choices(world, asked, {}) if not _decided(world, node)}
    free = sorted(found)
    world = corrupt.world
    for node in found.intersection(outcomes):
        wanted, name = "a node that hangs on what is swept", world.ground.name(node)
        raise BNetError(f"metric of {name}", expected=wanted, got="a choice that is the same in both runs")
    count = math.prod(world.count_states(node) for node in free)
    if count > BUDGET:
        raise BudgetError(
            "sweep",
            expected=f"at most {BUDGET} joint states of the open choices",
            got=f"{count}",
            allowed="do() on them: " + ", ".join(map(world.ground.name, free[:6])),
        )
    for node in free:
        if node in world.do:
            allowed = f"do({world.ground.name(node)}=...) in the clean sentences"
            raise EvidenceError(
                world.ground.name(node),
                expected="a choice open in both",
                got="one set in corrupt alone",
                allowed=allowed,
            )
    states = joint_states([range(world.count_states(node)) for node in free])
    return Choices(tuple(free), states, corrupt)


def _may_hang_on_choices(world: World, nodes: Sequence[int]) -> bool:
    """Whether some nodes, or a family above them, are random and discrete."""
    families = {world.ground.family_of(node).index for node in nodes}
    own = any(world.network.members[index].tpm.kind == "discrete" for index in families)
    return own or choice_above(world.network, families)


def _decided_by(world: World, node: int) -> list[int]:
    """What decides an outcome: the parents of a random node, or the node itself."""
    random = where(world, node)[0].tpm.is_random and node not in world.do
    return reference.parents(world, node) if random else [node]


def _decided(world: World, node: int) -> bool:
    """True where values decide the distribution of a choice, and not other choices alone."""
    above = reference.parents(world, node)
    seen: set[int] = set()
    while above:
        parent = above.pop()
        if parent not in seen:
            seen.add(parent)
            member = where(world, parent)[0]
            if member.tpm.kind != "discrete" and (member.inputs or member.tpm.kind == "input"):
                return True
            above.extend(reference.parents(world, parent))
    return False
