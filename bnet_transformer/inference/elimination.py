"""Elimination: the sum of log factors over all choices. Choices of single words go first, within their word; then those
of the sentence; then those of the corpus. Selectors go before anything that depends on a sentence, so codebooks cost no
factor K.

A likelihood may lie at -10^8, where float32 has no digits left for a log prior: two of its neighbours are 8 apart. So
each likelihood is taken relative to its greatest value over the choices, and these values are added at the end. They
are constants, and `log sum exp` is the same function of its input whatever constant is taken out, so all derivatives
(posteriors, counts, gradients) are those of the log evidence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bnet_transformer.axes import WORD
from bnet_transformer.compiler.course import Course
from bnet_transformer.errors import BudgetError
from bnet_transformer.inference.factors import NEVER, Factor
from bnet_transformer.tpm.base import broadcast

MOST_NUMBERS = 2**30


def eliminated(course: Course, factors: list[Factor], dtype: torch.dtype | None = None) -> Tensor:
    """The sum of all factors over all choices; `Question.fault` has ruled out choices that other plates depend on.

    In `dtype` is what no choice changes added up, and the result: float64 where results are to be compared that differ
    by less than float32 can tell beside a large likelihood.
    """
    layout, members = course.layout, course.network.members
    local = {i for i in layout.enumerated if members[i].family.words is not None or members[i].family.plates}
    corpus = {i for i in layout.enumerated if members[i].scope == "corpus"}
    batch, axes = batch_of(factors, course), tuple(range(layout.batch + 1, layout.rank))
    groups: dict[tuple[tuple[str, ...], str | None], list[Tensor]] = {}
    constants: list[Tensor] = []  # what no choice changes
    for factor in factors:
        family, table = factor.member.family, factor.table
        over = ((), None) if factor.summed else (family.plates, family.words)
        if factor.told is not None and factor.member.scope != "corpus":
            choices = [k for k in range(layout.batch) if table.shape[k] > 1]
            greatest = _greatest(table, choices) if choices else table
            constant = greatest.to(dtype or greatest.dtype)
            whole = constant.expand(broadcast(constant.shape, full_shape(course, *over, batch)))
            constants.append(whole.sum(axes, keepdim=True))
            if not choices:
                continue
            table = table - greatest
        groups.setdefault(over, []).append(table)
    rest = groups.pop(((), None), [])
    for (plates, words), tables in groups.items():
        own = {i for i in local if (members[i].family.plates, members[i].family.words) == (plates, words)}
        shape = full_shape(course, plates, words, batch)
        wide = [table.expand(broadcast(table.shape, shape)) for table in tables]
        total = _sum_out(course, wide, sorted(own))
        rest.append(total.sum(axes, keepdim=True))
    apart = [f.table for f in factors if f.member.scope == "corpus" and f.member.family.index in corpus]
    rest = [table for table in rest if not any(table is other for other in apart)]
    inner = [i for i in layout.enumerated if i not in local and i not in corpus]
    total = _sum_out(course, rest, inner)
    if corpus:
        total = total.expand(*total.shape[: layout.batch], batch, *total.shape[layout.batch + 1 :])
        total = _sum_out(course, [total.sum(layout.batch, keepdim=True), *apart], sorted(corpus))
        constants = [constant.sum(layout.batch, keepdim=True) for constant in constants]
        batch = 1
    total = _total([total.to(dtype or total.dtype), *constants])
    return total.expand(*[1] * layout.batch, batch, *[1] * (layout.rank - layout.batch - 1)).reshape(batch)


def _sum_out(course: Course, tables: list[Tensor], choices: list[int]) -> Tensor:
    """Sum the choices out, each time the one whose joint table is smallest; then add what is left."""
    layout = course.layout
    left = list(choices)
    while left:
        places = {i: layout.enumerated.index(i) for i in left}
        touching = {i: [table for table in tables if table.shape[place] > 1] for i, place in places.items()}
        costs = {i: math.prod(broadcast(*(t.shape for t in some))) if some else 0 for i, some in touching.items()}
        chosen = min(left, key=lambda i: costs[i])
        if costs[chosen] > MOST_NUMBERS:
            name = course.network.members[chosen].family.name
            raise BudgetError(
                f"eliminating {name}",
                expected=f"a table of at most {MOST_NUMBERS} numbers",
                got=f"{costs[chosen]}",
                allowed="do= or evidence on some of these choices; fewer sentences at once",
            )
        place = places[chosen]
        tables = [table for table in tables if table.shape[place] == 1]
        if touching[chosen]:
            tables.append(_logsumexp(_total(touching[chosen]), place))
        left.remove(chosen)
    if not tables:
        return torch.zeros([1] * layout.rank, dtype=course.log_dtype, device=course.device)
    return _total(tables)


def _greatest(table: Tensor, dims: int | list[int]) -> Tensor:
    """The greatest value over some dims, a constant for every derivative; zero where it is no number."""
    return table.detach().amax(dims, keepdim=True).nan_to_num(0.0, 0.0, 0.0)


def _logsumexp(table: Tensor, place: int) -> Tensor:
    """`log sum exp` over a dim, whose derivative sums to 1 in every floating type.

    That of `torch.logsumexp` is `exp(table - result)`, which sums to 1 only as far as the result is exact: at -10^6 it
    is to 0.03 in float32. Here it is each term of the sum over the sum.
    """
    greatest = _greatest(table, place)
    return (table - greatest).exp().sum(place, keepdim=True).log() + greatest


def _total(tables: list[Tensor]) -> Tensor:
    """The sum of log tables, small ones first, so that what no sentence changes is added once."""
    ordered = sorted(tables, key=lambda table: table.numel())
    total = ordered[0]
    for table in ordered[1:]:
        total = total + table
    return total.clamp(min=NEVER)


def full_shape(course: Course, plates: tuple[str, ...], words: str | None, batch: int) -> list[int]:
    """How a table over all nodes of a family lies in the layout, were it no function of choices."""
    layout = course.layout
    shape = [1] * layout.rank
    shape[layout.batch] = batch
    for plate in plates:
        shape[layout.axis(plate)] = course.network.graph.sizes[plate]
    if words is not None:
        shape[layout.axis(WORD)] = course.words[words]
    return shape


def batch_of(factors: list[Factor], course: Course) -> int:
    """How many sentences are asked about."""
    sizes = [factor.table.shape[course.layout.batch] for factor in factors]
    sizes += [value.shape[course.layout.batch] for value in course.known.values()]
    return max(sizes, default=1)
