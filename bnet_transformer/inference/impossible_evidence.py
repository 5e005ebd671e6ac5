"""Which evidence is impossible, and which number is none: the error that names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bnet_transformer.axes import WORD, join
from bnet_transformer.compiler.course import Course
from bnet_transformer.data import Evidence
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.inference.elimination import eliminated
from bnet_transformer.inference.factors import NEVER, Factor


def check_possible(course: Course, factors: Sequence[Factor], total: Tensor) -> None:
    """Refuse evidence of probability zero, naming the first piece of it that cannot be beside those before it."""
    possible = total > NEVER / 2
    if bool(possible.all()):
        return
    if bool(total.isnan().any()):
        _check_finite(course, factors)
    sentence = int((~possible).nonzero()[0])
    several = len(total) > 1
    course, factors = _of_sentence(course, factors, sentence) if several else (course, factors)
    low, high = -1, sum(_pieces(course, factor).numel() for factor in factors if factor.told is not None)
    while high - low > 1:  # the first `low` pieces of evidence are possible together, the first `high` are not
        middle = (low + high) // 2
        low, high = (middle, high) if _are_possible(course, factors, 0, middle) else (low, middle)
    if high == 0:
        raise BNetError("log evidence", expected="a log probability that is a number", got="NaN before any evidence")
    raise _error(course, factors, high - 1, sentence if several else None)


def _check_finite(course: Course, factors: Sequence[Factor]) -> None:
    """Refuse what is given or set and is no number, and parameters that are none: evidence is not to blame then."""
    layout = course.layout
    told = {factor.member.family.index for factor in factors if factor.told is not None}
    for index, value in course.known.items():
        bad = ~torch.isfinite(value)
        if index in told or not bool(bad.any()):
            continue
        family, at = course.network.members[index].family, bad.nonzero()[0].tolist()
        axes = [*family.plates, *([WORD] if family.words is not None else [])]
        what = join(family.name, [at[layout.axis(axis)] for axis in axes])
        what += f" of sentence {at[layout.batch]}" if value.shape[layout.batch] > 1 else ""
        raise EvidenceError(what, expected="finite numbers", got=value[tuple(at)].item())
    for name, value in course.parameters.items():
        if bool(value.isnan().any()):
            raise BNetError(f"parameter {name}", expected="numbers", got="NaN")


def _of_sentence(course: Course, factors: Sequence[Factor], sentence: int) -> tuple[Course, list[Factor]]:
    """The same question of one sentence of the batch."""
    place = course.layout.batch

    def one(table: Tensor) -> Tensor:
        return table.narrow(place, sentence, 1) if table.shape[place] > 1 else table

    found = []
    for factor in factors:
        told = None if factor.told is None else Evidence(one(factor.told.value))
        found.append(replace(factor, table=one(factor.table), told=told))
    return replace(course, known={index: one(value) for index, value in course.known.items()}), found


def _pieces(course: Course, factor: Factor) -> torch.Size:
    """How many pieces of evidence a factor holds along the batch, the plates and the words."""
    return factor.table.shape[course.layout.batch :]


def _are_possible(course: Course, factors: Sequence[Factor], low: int, high: int) -> bool:
    """True where the pieces of evidence from `low` to before `high` are possible together."""
    found, start = [], 0
    for factor in factors:
        if factor.told is not None:
            own = _pieces(course, factor)
            number = start + torch.arange(own.numel(), device=factor.table.device).reshape(own)
            start += own.numel()
            factor = replace(factor, table=factor.table.where((low <= number) & (number < high), 0.0), told=None)
        found.append(factor)
    return bool((eliminated(course, found) > NEVER / 2).all())


def _error(course: Course, factors: Sequence[Factor], piece: int, sentence: int | None) -> BNetError:
    """The error for one piece of evidence that cannot be, alone or after those before it."""
    layout, alone = course.layout, not _are_possible(course, factors, piece, piece + 1)
    told = [(factor, factor.told) for factor in factors if factor.told is not None]
    while piece >= _pieces(course, told[0][0]).numel():
        piece -= _pieces(course, told.pop(0)[0]).numel()
    (factor, evidence), family = told[0], told[0][0].member.family
    at = [int(i) for i in torch.unravel_index(torch.tensor(piece), _pieces(course, factor))]
    axes = [*family.plates, *([WORD] if family.words is not None else [])]
    what = family.name if factor.summed else join(family.name, [at[layout.axis(k) - layout.batch] for k in axes])
    if sentence is not None or _pieces(course, factor)[0] > 1:
        what += f" of sentence {at[0] if sentence is None else sentence}"
    lead = [0] * layout.batch + at
    value = evidence.value[tuple(0 if n == 1 else i for n, i in zip(evidence.value.shape, lead, strict=False))]
    if factor.summed:
        value = evidence.value.select(layout.batch, 0 if evidence.value.shape[layout.batch] == 1 else at[0])
    if not bool(torch.isfinite(value).all()):
        return EvidenceError(what, expected="finite numbers", got=value.tolist())
    own = factor.table.flatten(layout.batch)[..., piece]
    if bool(own.isnan().any()):
        return BNetError(what, expected="a log probability that is a number", got="NaN")
    beside = "" if alone else " given the evidence before it"
    if factor.member.tpm.kind == "continuous":  # a density that is not zero may still be too small to reckon with
        wanted = f"evidence whose log density is above {NEVER / 2:g} in some state of the net"
        return EvidenceError(what, expected=wanted, got=f"one below it{beside}: {value.tolist()}")
    got = f"one of probability zero{beside}: {value.tolist()}"
    return EvidenceError(what, expected="evidence that some state of the net makes possible", got=got)
