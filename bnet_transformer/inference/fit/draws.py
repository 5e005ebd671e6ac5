"""Draws of a posterior over parameters, in pieces: the log likelihoods and the invariants of each, the one to show."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.fit.heads import invariants, sources_of
from bnet_transformer.inference.fit.objective import Objective
from bnet_transformer.network import Member, Network

NUMBERS = 2**22  # numbers of the largest table that a piece holds: draws times sentences times joint states
MOST = 2**28  # numbers of all draws of one matrix whose interval is still told


def selectors_of(network: Network) -> list[Member]:
    """The choices that hang on no other node, and that something reads."""
    reads = network.graph.out_of
    return [m for m in network.members if m.tpm.kind == "discrete" and not m.inputs and reads[m.family.index]]


def tables_of(network: Network) -> frozenset[str]:
    """The parameters of which a sample is told as probabilities."""
    return frozenset(
        f"{m.owner}.logits" for m in network.members if m.tpm.kind == "discrete" and "weight" not in m.parameters
    )


def stored(samples: Mapping[str, Tensor], tables: Collection[str]) -> dict[str, Tensor]:
    """Samples, one dim of draws in front, as parameters."""
    flat = {name: value.flatten(0, 1) for name, value in samples.items()}
    return {name: value.log() if name in tables else value for name, value in flat.items()}


def places(count: int, most: int) -> list[int]:
    """Draws evenly taken from so many, at most so many."""
    found: list[int] = torch.linspace(0, count - 1, min(most, count)).round().long().tolist()
    return found


def pieces(objective: Objective, corpus: Batch) -> tuple[int, list[Batch]]:
    """How many draws are computed at once, and the parts of the sentences, so that no table passes `NUMBERS`."""
    with torch.no_grad():
        course, factors = objective(corpus.take(slice(0, 1)), lambda course, factors: (course, factors))
    tables = [*(factor.table for factor in factors), *course.values.values()]
    each = max([t.numel() for t in tables if isinstance(t, Tensor)], default=1) * _widest(objective, corpus)
    if objective.of_corpus:
        return max(1, NUMBERS // (each * len(corpus))), [corpus]
    sentences = max(1, min(len(corpus), NUMBERS // each))
    return max(1, NUMBERS // (each * sentences)), corpus.parts(sentences)


def _widest(objective: Objective, corpus: Batch) -> int:
    """The most numbers of one word: of a vector, of the states of a readout, of the words that it reads."""
    worded = [m for m in objective.network.members if m.family.words is not None or m.family.name in corpus.evidence]
    vectors = [m.tpm.states or 1 if m.tpm.kind == "discrete" else math.prod(m.shape) for m in worded]
    return max([*vectors, *(x.shape[1] for x in corpus.x.values()), 1])


def likelihoods(objective: Objective, corpus: Batch, sets: Mapping[str, Tensor]) -> Tensor:
    """The log evidence of each sentence under each draw, `[draw, sentence]`."""
    count = len(next(iter(sets.values())))
    at_once, parts = pieces(objective, corpus)
    with torch.no_grad():
        rows = []
        for start in range(0, count, at_once):
            some = {name: value[start : start + at_once] for name, value in sets.items()}
            rows.append(torch.cat([objective.log_evidences(some, part) for part in parts], 1))
    return torch.cat(rows)


def shares(objective: Objective, corpus: Batch, sets: Mapping[str, Tensor], selector: Member) -> Tensor:
    """`P(c | x, y)` under each draw, `[draw, sentence, head]` or `[draw, sentence, word, head]`."""
    count = len(next(iter(sets.values())))
    at_once, parts = pieces(objective, corpus)
    rows = []
    for start in range(0, count, at_once):
        some = {name: value[start : start + at_once] for name, value in sets.items()}
        found = [torch.vmap(lambda one, part=part: objective.shares(one, part, selector))(some) for part in parts]
        rows.append(torch.cat(found, 1))
    return torch.cat(rows)


def invariants_by_draw(
    network: Network, selector: Member, sets: Mapping[str, Tensor], only: Collection[str] | None = None
) -> Iterator[dict[str, Tensor]]:
    """The invariants of the heads, `[draw, head, dim, dim]`, a few draws at once; those that no sample tells of too."""
    first = invariants(network, selector, {k: sets[k][0] if k in sets else v for k, v in network.parameters.items()})
    count = len(next(iter(sets.values())))
    at_once = max(1, NUMBERS // max([v.numel() for v in first.values()], default=1))
    for start in range(0, count, at_once):
        some = {name: value[start : start + at_once] for name, value in sets.items()}
        length = len(next(iter(some.values())))
        found = invariants(network, selector, {**network.parameters, **some})
        yield {k: v.expand(length, *first[k].shape) for k, v in found.items() if only is None or k in only}


def mean_invariants(network: Network, selector: Member, sets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The means of the invariants over all draws: not those of the means, which a change of basis would spoil."""
    totals: dict[str, Tensor] = {}
    for found in invariants_by_draw(network, selector, sets):
        for name, value in found.items():
            totals[name] = totals.get(name, 0) + value.sum(0)
    count = len(next(iter(sets.values())))
    return {name: total / count for name, total in totals.items()}


def interval(values: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Between which values each number lies with a probability, from draws of it, `[draw, ...]`."""
    ends = torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=values.dtype, device=values.device)
    columns = values.flatten(1).split(max(1, NUMBERS // len(values)), 1)
    low, high = torch.cat([torch.quantile(each, ends, dim=0) for each in columns], 1)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])


def interval_of_invariant(
    network: Network, sets: Mapping[str, Tensor], name: str, share: float
) -> tuple[Tensor, Tensor] | None:
    """The same of `A x_1` or `OV x_1`; None where no selector's heads have it."""
    for selector in selectors_of(network):
        if name not in sources_of(network, selector):
            continue
        found, total = [], 0
        for each in invariants_by_draw(network, selector, sets, (name,)):
            found.append(each[name])
            total += each[name].numel()
            if total > MOST:
                count = len(next(iter(sets.values())))
                raise BNetError(name, expected=f"at most {MOST:,} numbers", got=f"{count} draws of it", allowed="fewer")
        return interval(torch.cat(found), share)
    return None


def representative(network: Network, samples: Mapping[str, Tensor], tables: Collection[str]) -> dict[str, Tensor]:
    """The draw that stands for all, as parameters: its tables and invariants lie nearest their means.

    Each number counts in units of its spread, each table and matrix as much as any other. Weights that no invariant is
    made of are taken as they are.
    """
    sets = stored(samples, tables)
    count, used = len(next(iter(sets.values()))), set()
    far = torch.zeros(count, dtype=torch.float64)
    for selector in selectors_of(network):
        sources = sources_of(network, selector)
        used |= {name for names in sources.values() for each in names for name in each}
        if not sources:
            continue
        means = mean_invariants(network, selector, sets)
        squares = {name: torch.zeros_like(mean) for name, mean in means.items()}
        for found in invariants_by_draw(network, selector, sets):
            for name, value in found.items():
                squares[name] = squares[name] + (value - means[name]).square().sum(0)
        start = 0
        for found in invariants_by_draw(network, selector, sets):
            for name, value in found.items():
                some = _distance(value, means[name], squares[name] / count)
                far[start : start + len(value)] += some
            start += len(value)
    for name, value in samples.items():
        if name in tables or name not in used:
            flat = value.flatten(0, 1)
            far += _distance(flat, flat.mean(0), flat.var(0, correction=0))
    return {name: value[int(far.argmin())] for name, value in sets.items()}


def _distance(values: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """The mean square distance of each draw from the mean, in units of the variance of each number."""
    tiny = torch.finfo(values.dtype).tiny
    return ((values - mean).square() / variance.clamp(min=tiny)).flatten(1).mean(1).double().cpu()
