"""Exact inference by elimination: choices of single words first, within their word; then those of the sentence; then
those of the corpus. Selectors go before anything that depends on a sentence, so codebooks cost no factor K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from bnet_transformer.axes import WORD
from bnet_transformer.compiler.module import Module, Values
from bnet_transformer.compiler.values import Course, count_states
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError
from bnet_transformer.graph import Family
from bnet_transformer.inference.factors import NEVER, Evidence, Factor, question_to_factors

BUDGET = 2**16
MOST_NUMBERS = 2**30
ATOL = 1e-6


def log_evidence(
    module: Module,
    evidence: Mapping[str, Evidence],
    x: Values | None = None,
    mask: Values | None = None,
    *,
    do: Mapping[str, Tensor] | None = None,
    given: Mapping[str, Tensor] | None = None,
    budget: int = BUDGET,
    atol: float = ATOL,
) -> Tensor:
    """`log P(evidence)` of each sentence, `[batch]`; of the whole batch, `[1]`, under a selector of the corpus."""
    course, factors = question_to_factors(module, evidence, None, x, mask, do=do, given=given, atol=atol, budget=budget)
    return _eliminated(course, factors)


def posterior(
    module: Module,
    query: str,
    evidence: Mapping[str, Evidence],
    x: Values | None = None,
    mask: Values | None = None,
    *,
    do: Mapping[str, Tensor] | None = None,
    given: Mapping[str, Tensor] | None = None,
    budget: int = BUDGET,
    atol: float = ATOL,
) -> Tensor:
    """`P(query | evidence)` for a discrete family: `[batch, *plates, word, states]`.

    It is the gradient of the log evidence by the log probability of each state (Darwiche 2003).
    """
    network = module.network
    index = network.graph.family(query).index
    member = network.members[index]
    if member.tpm.kind != "discrete":
        raise BNetError(query, expected="a discrete family", got=f"a {member.tpm.kind} one")
    with torch.enable_grad():
        course, factors = question_to_factors(
            module, evidence, query, x, mask, do=do, given=given, atol=atol, budget=budget
        )
        place = course.layout.enumerated.index(index)
        shape = _full_shape(course, member.family.plates, member.family.words, _batch(factors, course))
        shape[place] = count_states(course, index)
        tilt = torch.zeros(shape, dtype=course.dtype, device=course.device, requires_grad=True)
        tables = [Factor(f.member, f.table.detach()) for f in factors]
        total = _eliminated(course, [*tables, Factor(member, tilt)])
        (share,) = torch.autograd.grad(total.sum(), tilt)
    impossible(total, query)
    kept = [k for k in range(course.layout.rank) if k >= course.layout.batch and _has(course, member.family, k)]
    return share.movedim(place, -1).reshape([share.shape[k] for k in kept] + [shape[place]])


def impossible(total: Tensor, what: str) -> None:
    """Refuse evidence of probability zero."""
    bad = (total < NEVER / 2).nonzero().flatten().tolist()
    if bad:
        raise EvidenceError(what, expected="evidence that the net makes possible", got=f"probability zero in {bad}")


def _has(course: Course, family: Family, k: int) -> bool:
    """True where dim k of the layout is one that a family's posterior keeps."""
    layout = course.layout
    if k == layout.word:
        return family.words is not None
    return k == layout.batch or layout.plates[k - layout.batch - 1] in family.plates


def _eliminated(course: Course, factors: list[Factor]) -> Tensor:
    """The sum of all factors over all choices."""
    layout, members = course.layout, course.network.members
    local = {i for i in layout.enumerated if members[i].family.words is not None or members[i].family.plates}
    corpus = {i for i in layout.enumerated if members[i].scope == "corpus"}
    groups: dict[tuple[tuple[str, ...], str | None], list[Tensor]] = {}
    for factor in factors:
        family = factor.member.family
        groups.setdefault((family.plates, family.words), []).append(factor.table)
    rest = groups.pop(((), None), [])
    batch = _batch(factors, course)
    for (plates, words), tables in groups.items():
        own = {i for i in local if (members[i].family.plates, members[i].family.words) == (plates, words)}
        _refuse_strangers(course, tables, local - own)
        shape = _full_shape(course, plates, words, batch)
        wide = [table.expand(torch.broadcast_shapes(table.shape, shape)) for table in tables]
        total = _sum_out(course, wide, sorted(own))
        axes = tuple(range(layout.batch + 1, layout.rank))
        rest.append(total.sum(axes, keepdim=True))
    apart = [f.table for f in factors if f.member.scope == "corpus" and f.member.family.index in corpus]
    rest = [table for table in rest if not any(table is other for other in apart)]
    inner = [i for i in layout.enumerated if i not in local and i not in corpus]
    total = _sum_out(course, rest, inner)
    if corpus:
        total = total.expand(*total.shape[: layout.batch], batch, *total.shape[layout.batch + 1 :])
        total = _sum_out(course, [total.sum(layout.batch, keepdim=True), *apart], sorted(corpus))
        batch = 1
    return total.expand(*[1] * layout.batch, batch, *[1] * (layout.rank - layout.batch - 1)).reshape(batch)


def _sum_out(course: Course, tables: list[Tensor], choices: list[int]) -> Tensor:
    """Sum the choices out, each time the one whose joint table is smallest; then add what is left."""
    layout = course.layout
    left = list(choices)
    while left:
        costs = {i: _joint(layout.enumerated.index(i), tables) for i in left}
        chosen = min(left, key=lambda i: math.prod(costs[i]))
        if math.prod(costs[chosen]) > MOST_NUMBERS:
            name = course.network.members[chosen].family.name
            raise BudgetError(
                f"eliminating {name}",
                expected=f"a table of at most {MOST_NUMBERS} numbers",
                got=f"{math.prod(costs[chosen])}",
                allowed="fewer sentences at once",
            )
        place = layout.enumerated.index(chosen)
        touched = [table for table in tables if table.shape[place] > 1]
        tables = [table for table in tables if table.shape[place] == 1]
        if touched:
            tables.append(_total(touched).logsumexp(place, keepdim=True))
        left.remove(chosen)
    if not tables:
        return torch.zeros([1] * layout.rank, dtype=course.dtype, device=course.device)
    return _total(tables)


def _joint(place: int, tables: list[Tensor]) -> tuple[int, ...]:
    touched = [table.shape for table in tables if table.shape[place] > 1]
    return tuple(torch.broadcast_shapes(*touched)) if touched else (0,)


def _total(tables: list[Tensor]) -> Tensor:
    """The sum of log tables, small ones first, so that what no sentence changes is added once."""
    ordered = sorted(tables, key=lambda table: table.numel())
    total = ordered[0]
    for table in ordered[1:]:
        total = total + table
    return total.clamp(min=NEVER)


def _refuse_strangers(course: Course, tables: list[Tensor], others: set[int]) -> None:
    for i in others:
        if any(table.shape[course.layout.enumerated.index(i)] > 1 for table in tables):
            name = course.network.members[i].family.name
            raise BNetError(
                name,
                expected="choices for each word that meet no other plate",
                got="one that another plate depends on",
                allowed="the reference, for a small net",
            )


def _full_shape(course: Course, plates: tuple[str, ...], words: str | None, batch: int) -> list[int]:
    layout = course.layout
    shape = [1] * layout.rank
    shape[layout.batch] = batch
    for plate in plates:
        shape[layout.axis(plate)] = course.network.graph.sizes[plate]
    if words is not None:
        shape[layout.axis(WORD)] = course.words[words]
    return shape


def _batch(factors: list[Factor], course: Course) -> int:
    sizes = [factor.table.shape[course.layout.batch] for factor in factors]
    sizes += [value.shape[course.layout.batch] for value in course.known.values()]
    return max(sizes, default=1)
