"""From a question to log factors: one tensor for each random family that matters, in the compiled layout."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer.compiler.module import Module, Values, laid_out
from bnet_transformer.compiler.values import Course, seen, states
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.network import Member, Network
from bnet_transformer.tpm import Given

NEVER = -1e30  # the log probability of what cannot be: finite, so that sums and gradients stay so


@dataclass(frozen=True)
class Evidence:
    """What was seen of a family: values `[batch, *plates, word, *shape]`, and where (`observed`; all by default)."""

    value: Tensor
    observed: Tensor | None = None


@dataclass(frozen=True)
class Factor:
    """`log P` of one family, or of its evidence: the family says over which plates and words it lies."""

    member: Member
    table: Tensor


def question_to_factors(
    module: Module,
    evidence: Mapping[str, Evidence],
    query: str | None,
    x: Values | None,
    mask: Values | None,
    *,
    do: Mapping[str, Tensor] | None,
    given: Mapping[str, Tensor] | None,
    atol: float,
    budget: int,
) -> tuple[Course, list[Factor]]:
    """The factors that evidence and a query need, every choice among them enumerated along a dim of its own."""
    network = module.network
    known = {network.graph.family(name).index for name in do or {}}
    asked = [network.graph.family(name).index for name in (*evidence, *([query] if query else []))]
    above = _closure(network, asked, known)
    inner = {bundle.parent for index in above for bundle in network.graph.into[index] if index not in known}
    random = {i for i in above if network.members[i].tpm.kind != "deterministic" and i not in known}
    tops = {asked[-1]} if query else set()
    free = {i for i in random if network.members[i].tpm.kind == "discrete" and i in inner | tops}
    for index in asked:
        _check_budget(network, index, free, known, budget)
    want = tuple(network.graph.families[i].name for i in sorted(random | set(asked) - known))
    course, _ = module.course(want, x, mask, do=do, given=given, enumerate_too=frozenset(free))
    factors = []
    for index in sorted(random | set(asked) - known):
        member = network.members[index]
        told = evidence.get(member.family.name)
        if index in free:
            factors.append(Factor(member, _prior(course, index, member)))
            if told is not None:
                factors.append(Factor(member, _match(course, index, member, told, atol)))
        elif told is not None:
            factors.append(Factor(member, _likelihood(course, index, member, told, atol)))
    return course, factors


def _check_budget(network: Network, index: int, free: set[int], known: set[int], budget: int) -> None:
    """Refuse evidence whose value hangs on more joint states than the budget, before any is computed."""
    found: set[int] = set()
    stack = [bundle.parent for bundle in network.graph.into[index] if index not in known]
    seen_: set[int] = set()
    while stack:
        at = stack.pop()
        if at in seen_ or at in known:
            continue
        seen_.add(at)
        if at in free:
            found.add(at)
        else:
            stack.extend(bundle.parent for bundle in network.graph.into[at])
    count = math.prod(network.members[i].tpm.states or 1 for i in found)
    if count > budget:
        names = ", ".join(network.members[i].family.name for i in sorted(found))
        raise BudgetError(
            f"exact elimination for {network.members[index].family.name}",
            expected=f"at most {budget} joint states for each sentence ({names})",
            got=f"{count}",
            allowed="a larger budget=; do= or evidence on some of these; SVI, which is approximate",
        )


def _closure(network: Network, asked: Collection[int], known: Collection[int]) -> set[int]:
    """The asked families and all above them, after surgery."""
    found: set[int] = set()
    stack = list(asked)
    while stack:
        index = stack.pop()
        if index not in found:
            found.add(index)
            if index not in known and not isinstance(network.members[index].tpm, Given):
                stack.extend(bundle.parent for bundle in network.graph.into[index])
    return found


def _prior(course: Course, index: int, member: Member) -> Tensor:
    """`log P(state | parents)` for every state, along the family's own dim."""
    at, parents = seen(course, member)
    table = _log_softmax(course, member.tpm.logits(at, *parents))
    place = course.layout.enumerated.index(index)
    return table.transpose(place, -1).squeeze(-1).clamp(min=NEVER)


def _match(course: Course, index: int, member: Member, told: Evidence, atol: float) -> Tensor:
    """Evidence on an enumerated family: zero for the states that agree with it, NEVER for the others."""
    value = laid_out(course, index, told.value)
    if value.is_floating_point():
        return _agreement(course, index, member, told, course.values[index], atol)
    agrees = states(course, index) == value
    return _where_seen(course, member, told, torch.where(agrees, 0.0, NEVER).to(course.dtype))


def _likelihood(course: Course, index: int, member: Member, told: Evidence, atol: float) -> Tensor:
    """`log P(evidence | parents)` of a family that nothing else reads, or that is a function of its parents."""
    if member.tpm.kind == "deterministic":
        return _agreement(course, index, member, told, course.values[index], atol)
    value = laid_out(course, index, told.value)
    at, parents = seen(course, member)
    if member.tpm.kind == "continuous":
        table = member.tpm.log_prob(at, value, *parents)
        return _where_seen(course, member, told, table.clamp(min=NEVER))
    if value.is_floating_point():
        raise BNetError(member.family.name, expected="states, for nothing reads its tensors", got="tensors")
    table = _log_softmax(course, member.tpm.logits(at, *parents))
    lead = torch.broadcast_shapes(table.shape[:-1], value.shape)
    picked = table.expand(*lead, table.shape[-1]).gather(-1, value.expand(lead)[..., None]).squeeze(-1)
    return _where_seen(course, member, told, picked.clamp(min=NEVER))


def _agreement(course: Course, index: int, member: Member, told: Evidence, made: Tensor, atol: float) -> Tensor:
    """Zero where the value that the net makes is the one that was seen, within `atol`; else NEVER."""
    value = laid_out(course, index, told.value)
    near = (made - value).abs() <= atol
    for _ in member.shape:
        near = near.all(-1)
    return _where_seen(course, member, told, torch.where(near, 0.0, NEVER).to(course.dtype))


def _where_seen(course: Course, member: Member, told: Evidence, table: Tensor) -> Tensor:
    if told.observed is None:
        return table
    flags = laid_out(course, member.family.index, told.observed.long()).bool()
    return torch.where(flags, table, 0.0)


def _log_softmax(course: Course, logits: Tensor) -> Tensor:
    """Log probabilities `[*layout, states]`; the dims that a TPM left out lead with size 1."""
    missing = course.layout.rank + 1 - logits.dim()
    return torch.log_softmax(logits, -1).reshape(*[1] * missing, *logits.shape)
