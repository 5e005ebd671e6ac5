"""Many states of some choices at once: they are the batch of one course, which answers for all of them.

Joint posteriors are made so: `log P(states, evidence)` for each joint state, what is left open eliminated.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from bnet_transformer import asking, reference
from bnet_transformer.compiler.module import Module
from bnet_transformer.data import Evidence
from bnet_transformer.errors import ReadingError
from bnet_transformer.inference import exact, ground
from bnet_transformer.inference.answers import Answers
from bnet_transformer.inference.batched_states import joint_states, of_one_sentence, pieces
from bnet_transformer.inference.factors import NEVER
from bnet_transformer.reference import ATOL, BUDGET, World

Seen = Mapping[int, Tensor]


def joint_log_probs(
    module: Module, world: World, nodes: Sequence[int], evidence: Seen, budget: int = BUDGET, atol: float = ATOL
) -> Tensor:
    """`log P(nodes, evidence)` for discrete nodes, `[*states]`: -inf for states that cannot be beside the evidence."""
    supports, rest = [], dict(evidence)
    for node in nodes:
        told = rest.pop(node, None)
        supports.append(_possible(module, world, node, told, budget, atol))
    found = torch.full([reference.support(world, node) for node in nodes], -math.inf, dtype=torch.float64)
    place = torch.meshgrid(*(torch.tensor(each) for each in supports), indexing="ij")
    try:
        logs = _log_probs(module, world, nodes, joint_states(supports), rest, budget, atol)
        found[place] = logs.reshape(place[0].shape)
    except ReadingError:
        found[place] = _beside_the_others(module, world, nodes, supports, rest, budget, atol).reshape(place[0].shape)
    return found


def _possible(module: Module, world: World, node: int, told: Tensor | None, budget: int, atol: float) -> list[int]:
    """The states of a choice that evidence on it leaves: a tensor may fit several."""
    if told is None:
        return list(range(reference.support(world, node)))
    if not told.is_floating_point():
        return [int(told)]
    return torch.nonzero(ground.posterior(module, world, node, {node: told}, budget, atol)).flatten().tolist()


def log_evidence_by_states(
    module: Module, world: World, evidence: Seen, budget: int = BUDGET, atol: float = ATOL
) -> Tensor:
    """`log P(evidence)`, the sum over all joint states of the choices above it, which are one batch."""

    def of(nodes: Sequence[int]) -> Tensor:
        some = {node: evidence[node] for node in nodes}
        return _beside_the_others(module, world, [], [], some, budget, atol).reshape(())

    total, low, high = of([*evidence]), 0, len(evidence)
    if total > -math.inf:
        return total
    while high - low > 1:  # the first `low` pieces are possible together, the first `high` are not
        middle = (low + high) // 2
        low, high = (low, middle) if of([*evidence][:middle]) == -math.inf else (middle, high)
    raise reference.impossible(world, evidence, low)


def _beside_the_others(
    module: Module,
    world: World,
    nodes: Sequence[int],
    supports: Sequence[Sequence[int]],
    evidence: Seen,
    budget: int,
    atol: float,
) -> Tensor:
    """The same where choices meet: all those above are told, and the others summed out; by the reference at last."""
    settled = reference.settling(world, evidence)
    free = reference.choices(world, [*nodes, *evidence], settled, beyond=True)
    others = [node for node in free if node not in nodes]
    every = [*supports, *(range(reference.support(world, node)) for node in others)]
    shape = [len(each) for each in every]
    if math.prod(shape) > budget:
        reference.check_joint_states(world, free, budget)
    try:
        batch = _without_barren_choices(world, {*free, *nodes, *evidence})
        logs = _log_probs(module, batch, [*nodes, *others], joint_states(every), evidence, budget, atol)
    except ReadingError:
        told = ({**settled, **dict(zip([*nodes, *others], row, strict=True))} for row in joint_states(every))
        runs = (reference.Run(world, states) for states in told)
        logs = torch.tensor([reference.log_joint(run, free, evidence, atol) for run in runs], dtype=torch.float64)
    return logs.reshape(*shape[: len(nodes)], -1).logsumexp(-1)


def _without_barren_choices(world: World, relevant: Collection[int]) -> World:
    """The sentence with state 0 for each choice that is above nothing relevant: what it is changes no probability."""
    families = {world.ground.family_of(node).index for node in relevant}
    above = families | world.network.graph.above(families)
    choices = [m.family for m in world.network.members if m.tpm.kind == "discrete" and m.family.index in above]
    nodes = [node for family in choices for node in world.ground.nodes(family).tolist()]
    zero = torch.zeros((), dtype=torch.long, device=world.network.device)
    return replace(world, do={**{node: zero for node in nodes if node not in relevant}, **world.do})


def _log_probs(
    module: Module, world: World, nodes: Sequence[int], states: Tensor, evidence: Seen, budget: int, atol: float
) -> Tensor:
    """`log P(nodes = states, evidence)` for each row of states."""
    module, relevant = of_one_sentence(module), _relevant(world, [*nodes, *evidence])
    families, found = {world.ground.family_of(node).index for node in (*nodes, *evidence)}, []
    for part in pieces(world, len(states), families):
        found.append(
            exact.log_evidence(
                module,
                seen_in(relevant, nodes, states[part], evidence),
                ground.counted(relevant),
                **ground.interventions(relevant),
                given={name: value[None] for name, value in relevant.given.items()},
                budget=budget,
                atol=atol,
                check=False,
                dtype=torch.float64,
            ).detach()
        )
    logs = torch.cat(found).double().cpu()
    return torch.where(logs > NEVER / 2, logs, -math.inf) if not bool(logs.isnan().any()) else _named(logs)


def _named(logs: Tensor) -> Tensor:
    raise ReadingError("joint posterior", expected="log probabilities that are numbers", got=f"{logs[logs.isnan()][0]}")


def _relevant(world: World, nodes: Sequence[int]) -> World:
    """The world with no more set than stands above some nodes."""
    families = {world.ground.family_of(node).index for node in nodes}
    above = families | world.network.graph.above(families)
    do, rows = (
        {n: v for n, v in told.items() if world.ground.family_of(n).index in above} for told in (world.do, world.rows)
    )
    return replace(world, do=do, rows=rows)


def seen_in(world: World, nodes: Sequence[int], states: Tensor, evidence: Seen) -> dict[str, Evidence]:
    """Evidence on families: what was seen, and a state of each node for each row, `[row, node]`."""
    seen = ground.seen_families(world, evidence)
    by_family: dict[int, dict[int, Tensor]] = {}
    for node, state in zip(nodes, states.unbind(1), strict=True):
        index = world.ground.family_of(node).index
        by_family.setdefault(index, {})[node - int(world.ground.offsets[index])] = state
    for index, told in by_family.items():
        family, shape = world.network.members[index].family, world.ground.shapes[index]
        value = torch.zeros(len(states), math.prod(shape), dtype=torch.long)
        where = torch.zeros(math.prod(shape), dtype=torch.bool)
        if family.name in seen:
            before = seen[family.name]
            if before.value.is_floating_point():
                raise ReadingError(family.name, expected="states for its nodes, or tensors", got="both")
            value[:] = before.value.reshape(1, -1)
            where[:] = True if before.observed is None else before.observed.reshape(-1)
        for place, state in told.items():
            value[:, place], where[place] = state, True
        observed = None if bool(where.all()) else where.reshape(1, *shape)
        seen[family.name] = Evidence(value.reshape(-1, *shape), observed)
    return seen


def many_readings(
    module: Module,
    world: World,
    nodes: Sequence[int],
    states: Tensor,
    slices: Sequence[int],
    role: str | None,
    known: Answers | None = None,
) -> Iterator[tuple[slice, list[Tensor]]]:
    """`P(j | i)` of some slices, `[S, *plates, word, word]` each, with these choices set to each row of states.

    `known` is what was asked of this world before, without evidence: where no choice is open it answers.
    """
    if not nodes:
        yield slice(0, 1), [each[None] for each in _together(known or Answers(module, world, {}), slices, role)]
        return
    module = of_one_sentence(module)
    readers = {asking.reader(world, t, role).family.index for t in slices}
    for part in pieces(world, len(states), readers):
        told = dict(zip(nodes, states[part].unbind(1), strict=True))
        done = {**world.do, **{node: state[0] for node, state in told.items()}}
        try:
            answers = Answers(module, replace(world, do=done), {}, states=told)
            yield part, _together(answers, slices, role)
        except ReadingError:
            yield part, _one_by_one(module, world, nodes, states[part], slices, role)


def _together(answers: Answers, slices: Sequence[int], role: str | None) -> list[Tensor]:
    """What some slices read, in one course of the net where there is one for all."""
    with suppress(ReadingError):
        answers.prepare([asking.reader(answers.world, t, role) for t in slices])
    return [answers.attention(t, role) for t in slices]


def _one_by_one(
    module: Module, world: World, nodes: Sequence[int], states: Tensor, slices: Sequence[int], role: str | None
) -> list[Tensor]:
    """The same, a state at a time: what cannot be told of many at once."""
    each = []
    for row in states:
        done = {**world.do, **dict(zip(nodes, row, strict=True))}
        answers = Answers(module, replace(world, do=done), {})
        each.append([answers.attention(t, role) for t in slices])
    return [torch.stack(tables) for tables in zip(*each, strict=True)]
