"""Questions about single nodes of a sentence: by elimination over whole families, by the reference where the structure
forbids that (choices of words that meet, `do` on some nodes of a family, rows of attention that were set).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer.compiler.module import Module
from bnet_transformer.errors import ReadingError
from bnet_transformer.graph import ancestors
from bnet_transformer.inference import exact
from bnet_transformer.inference.factors import Evidence
from bnet_transformer.reference import ATOL, BUDGET, World
from bnet_transformer.tpm import Given


def posterior(
    module: Module,
    world: World,
    query: int,
    evidence: Mapping[int, Tensor],
    budget: int = BUDGET,
    atol: float = ATOL,
) -> Tensor:
    """`P(query | evidence)` for a discrete node of a sentence: `[states]`."""
    try:
        return eliminated(module, world, query, evidence, budget, atol)
    except ReadingError:
        return reference.posterior(world, query, evidence, budget, atol)


def eliminated(
    module: Module, world: World, query: int, evidence: Mapping[int, Tensor], budget: int, atol: float
) -> Tensor:
    """The same by elimination alone, or the error that says why not."""
    family, index = world.ground.place(query)
    found = exact.posterior(
        module,
        family.name,
        seen_families(world, evidence),
        counted(world),
        do=set_families(world),
        given={name: value[None] for name, value in world.given.items()},
        budget=budget,
        atol=atol,
    )
    return found[(0, *index)].double()


def choices_above(world: World, nodes: Iterable[int], settled: Mapping[int, Tensor]) -> list[int]:
    """The discrete random nodes, not settled, that decide the values of `nodes`: `choices`, a family at a time."""
    members, start = world.network.members, [node for node in nodes if node not in world.do]
    discrete = frozenset(member.family.index for member in members if member.tpm.kind == "discrete")
    if any(world.ground.family_of(node).index not in discrete for node in settled):
        return reference.choices(world, start, settled)
    found = {*start, *ancestors(world.ground, start, ends=discrete)}
    open_ = (node for node in found if node not in settled and node not in world.do)
    return sorted(node for node in open_ if world.ground.family_of(node).index in discrete)


def counted(world: World) -> dict[str, Tensor]:
    """What says how many words a stack has, for the stacks for whose words nothing is given."""
    given = {world.network.member(name).family.words for name in world.given}
    device, words = world.network.device, world.ground.words
    return {stack: torch.zeros(1, count, device=device) for stack, count in words.items() if stack not in given}


def seen_families(world: World, evidence: Mapping[int, Tensor]) -> dict[str, Evidence]:
    """Evidence on nodes as evidence on families, for a batch of one sentence."""
    return {name: Evidence(value, some) for name, (value, some) in _gathered(world, evidence).items()}


def set_families(world: World) -> dict[str, Tensor]:
    """What `do` set, as values of families; it must have set all nodes of each, and no row of attention."""
    for node in world.rows:
        raise _apart(world.ground.name(node), "a node that reads by its own P(j | i)", "one that reads by a row")
    found = {}
    for name, (value, some) in _gathered(world, world.do).items():
        if some is not None:
            raise _apart(name, "all nodes of a family set, or none", "some of them")
        found[name] = value
    return found


def _gathered(world: World, told: Mapping[int, Tensor]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """For each family, what is told of its nodes, `[1, *plates, word, *shape]`, and of which nodes (None: of all)."""
    by_family: dict[int, dict[int, Tensor]] = {}
    for node, value in told.items():
        index = world.ground.family_of(node).index
        by_family.setdefault(index, {})[node - int(world.ground.offsets[index])] = value
    found = {}
    for index, values in by_family.items():
        member, shape = world.network.members[index], world.ground.shapes[index]
        if isinstance(member.tpm, Given):
            raise _apart(member.family.name, "a node that is not given with the sentence", "a given one")
        first = next(iter(values.values()))
        if any(value.shape != first.shape or value.dtype != first.dtype for value in values.values()):
            raise _apart(member.family.name, "states for its nodes, or tensors", "both")
        flat = torch.zeros(torch.Size(shape).numel(), *first.shape, dtype=first.dtype, device=first.device)
        where = torch.tensor(list(values))
        flat[where] = torch.stack(list(values.values()))
        some = torch.zeros(len(flat), dtype=torch.bool, device=first.device)
        some[where] = True
        whole = flat.reshape(1, *shape, *first.shape)
        found[member.family.name] = whole, None if bool(some.all()) else some.reshape(1, *shape)
    return found


def _apart(name: str, expected: str, got: str) -> ReadingError:
    return ReadingError(name, expected=expected, got=got)
