"""Questions about single nodes of a sentence: by elimination over whole families, by the reference where the structure
forbids that (choices of words that meet).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer.compiler.module import Module
from bnet_transformer.data import Evidence
from bnet_transformer.errors import ReadingError
from bnet_transformer.graph import ancestors
from bnet_transformer.inference import exact
from bnet_transformer.reference import ATOL, BUDGET, World


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
        **interventions(world),
        given={name: value[None] for name, value in world.given.items()},
        budget=budget,
        atol=atol,
    )
    share = found[(0, *index)].double()
    return share / share.sum()  # in float32 the sum is 1 to 1e-7


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
    families = node_values_by_family(world, evidence)
    for name in families:
        if world.network.member(name).tpm.kind == "input":
            wanted = "evidence on a node that is not given with the sentence"
            raise ReadingError(name, expected=wanted, got="a given one")
    return {name: Evidence(value, None if bool(which.all()) else which) for name, (value, which) in families.items()}


def interventions(world: World, above: Collection[int] | None = None) -> dict[str, Any]:
    """What `do` set, as `do`, `patched` and `rows` of a course: whole families, some nodes of a family, attention rows.

    `above` names the families that matter; all by default.
    """
    whole: dict[str, Tensor] = {}
    patched: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (value, which) in node_values_by_family(world, world.do, above).items():
        if bool(which.all()) and world.network.member(name).tpm.kind != "input":
            whole[name] = value
        else:
            patched[name] = value, which
    return {"do": whole, "patched": patched, "rows": _rows_by_family(world, above)}


def node_values_by_family(
    world: World, values: Mapping[int, Tensor], above: Collection[int] | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Values of nodes by family: `[1, *plates, word, *shape]`, and which nodes have one, `[1, *plates, word]`."""
    by_family: dict[int, dict[int, Tensor]] = {}
    for node, value in values.items():
        index = world.ground.family_of(node).index
        if above is None or index in above:
            by_family.setdefault(index, {})[node - int(world.ground.offsets[index])] = value
    families = {}
    for index, nodes in by_family.items():
        member, shape = world.network.members[index], world.ground.shapes[index]
        first = next(iter(nodes.values()))
        if any(value.shape != first.shape or value.dtype != first.dtype for value in nodes.values()):
            raise ReadingError(member.family.name, expected="states for its nodes, or tensors", got="both")
        flat = torch.zeros(math.prod(shape), *first.shape, dtype=first.dtype, device=first.device)
        which = torch.zeros(len(flat), dtype=torch.bool, device=first.device)
        flat[list(nodes)], which[list(nodes)] = torch.stack(list(nodes.values())), True
        families[member.family.name] = flat.reshape(1, *shape, *first.shape), which.reshape(1, *shape)
    return families


def _rows_by_family(world: World, above: Collection[int] | None) -> dict[str, tuple[Tensor, Tensor]]:
    """The rows of attention that are set, by family: `[1, *plates, word, word read]`, and of which nodes."""
    rows: dict[str, tuple[Tensor, Tensor]] = {}
    for node, row in world.rows.items():
        family = world.ground.family_of(node)
        if above is None or family.index in above:
            shape = world.ground.shapes[family.index]
            empty = row.new_zeros(1, *shape, len(row)), row.new_zeros(1, *shape, dtype=torch.bool)
            weights, which = rows.setdefault(family.name, empty)
            at = (0, *world.ground.place(node)[1])
            weights[at], which[at] = row, True
    return rows
