"""The posterior of one slice's gates from `log P(y_s | gates)` of every setting: the gates are summed out exactly.

    p(rho | y) = prod_s sum_xi [prod_nu rho_nu^xi_nu (1 - rho_nu)^(1 - xi_nu)] P(y_s | xi)        (rho_nu ~ Beta(1, 1))

The shares are drawn (`annealing`). With the others known, and `r_s` the Bayes factor of sentence s for its gate, that
of one head is `prod_s (1 - rho_nu + rho_nu r_s)` (`conditional`), by which what is told of a head is averaged.

The Bayes factor is that of `rho_nu` free against `rho_nu = 0`: with the integral I of this density, relative to its
value at zero, it is the mean of I over the shares of the others where `rho_nu = 0`, and one over that of 1 / I where
that is free. Draws of both are bridged (Bennett 1976); where they do not meet, it is the quotient of the evidences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer.inference.heads.annealing import (
    POPULATIONS,
    annealed,
    log_prior,
    log_ratio,
    moved,
    others,
    settings,
    sides,
)
from bnet_transformer.inference.heads.conditional import drawn

APART = 2.0  # nats, by which both means of I may differ for draws that are bridged
FEW = 32  # draws of the shares over which the odds of pairs of gates are averaged


@dataclass(frozen=True)
class Posterior:
    """What is known of one slice's heads.

    `rho` are draws, `[draw, head]`; `log_bayes` and its Monte Carlo `error`, `[head]`; `inclusion`, `[sentence, head]`,
    the probability of each gate; `interaction`, `[head, head]`, the mean log odds ratio of two gates of a sentence.
    """

    rho: Tensor
    log_bayes: Tensor
    error: Tensor
    inclusion: Tensor
    interaction: Tensor


def posterior_of(table: Tensor, draws: int, generator: torch.Generator, told: Callable[[int], None]) -> Posterior:
    """The posterior of the gates of one slice from `log P` of each sentence and setting, `[sentence, setting]`."""
    heads = int(math.log2(table.shape[1]))
    halves = [sides(table, head) for head in range(heads)]
    whole = annealed(table, generator)
    told(1)
    rho, kept, worth, likely = whole.rho, [], [], torch.zeros(len(table), heads, dtype=torch.float64)
    rows = -(-draws // len(rho))
    for _ in range(rows):
        rho, log_integral, each = _swept(halves, rho, generator)
        kept.append(rho)
        worth.append(log_integral)
        likely += each / rows
    found = torch.stack([
        _bayes(table, halves[head], head, torch.stack([w[:, head] for w in worth]), whole.log_evidence, generator, told)
        for head in range(heads)
    ])  # fmt: skip
    interaction = _interaction(table, kept[-1][:: max(1, len(rho) // FEW)])
    return Posterior(torch.cat(kept)[:draws], found[:, 0], found[:, 1], likely, interaction)


def _swept(
    halves: list[tuple[Tensor, Tensor]], rho: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Every share drawn anew given the others; the log of each integral, `[draw, head]`; the mean of the gates."""
    rho, log_integral, likely = rho.clone(), torch.empty_like(rho), []
    for head, half in enumerate(halves):
        ratio = log_ratio(*half, others(rho, head))
        rho[:, head], log_integral[:, head] = drawn(ratio, generator)
        likely.append(torch.sigmoid(ratio + torch.logit(rho[:, head])[:, None]).mean(0))
    return rho, log_integral, torch.stack(likely, 1)


def _bayes(
    table: Tensor,
    half: tuple[Tensor, Tensor],
    head: int,
    free: Tensor,
    evidence: Tensor,
    generator: torch.Generator,
    told: Callable[[int], None],
) -> Tensor:
    """The log Bayes factor of a head and its error; `free` are log integrals over the posterior, `[row, draw]`."""
    never = table.reshape(len(table), -1, 2, 2**head)[:, :, 0].flatten(1)
    without = annealed(never, generator)
    rho, rows = without.rho, []
    for _ in range(len(free)):
        rho = moved(never, rho, generator)
        rows.append(drawn(log_ratio(*half, rho), generator)[1])
    told(1)
    pairs = zip(_populations(torch.stack(rows)), _populations(free), strict=True)
    each = torch.stack([_bridged(*pair) for pair in pairs])
    low, high = _mean(torch.stack(rows).flatten()), -_mean(-free.flatten())
    if float(high - low) > APART:
        error = (evidence - without.log_evidence).std() / POPULATIONS**0.5
        return torch.stack([_mean(evidence) - _mean(without.log_evidence), error])
    error = torch.hypot(each.std() / POPULATIONS**0.5, (high - low) / 4)  # both means err to their own side
    return torch.stack([_bridged(torch.stack(rows).flatten(), free.flatten()), error])


def _populations(rows: Tensor) -> list[Tensor]:
    """The numbers of each population of `[row, draw]`."""
    return [part.flatten() for part in rows.chunk(POPULATIONS, 1)]


def _bridged(never: Tensor, free: Tensor) -> Tensor:
    """The log of the mean of e^x where a head never is, from x there and x where it is free, by both at once."""
    found = (_mean(never) - _mean(-free)) / 2
    for _ in range(50):
        found = _mean(never - torch.logaddexp(never, found)) - _mean(-torch.logaddexp(free, found))
    return found


def _mean(log: Tensor) -> Tensor:
    """The log of the mean of e^x."""
    return log.logsumexp(0) - math.log(len(log))


def _interaction(table: Tensor, rho: Tensor) -> Tensor:
    """The mean over sentences and shares of the log odds ratio of each pair of gates, `[head, head]`; zero for a head
    itself. With the shares known, gates on which the likelihood hangs apart are independent: zero exactly."""
    heads, bits = rho.shape[1], settings(rho.shape[1])
    found = torch.zeros(heads, heads, dtype=torch.float64)
    for prior in log_prior(rho):
        log = table + prior
        for a in range(heads):
            for b in range(a):
                off, one, other, both = (
                    log[:, (bits[:, a] == x) & (bits[:, b] == y)].logsumexp(1)
                    for x, y in ((0, 0), (1, 0), (0, 1), (1, 1))
                )
                found[a, b] += (both + off - one - other).mean() / len(rho)
    return found + found.T
