"""Draws of all shares of a slice, and the evidence: populations that follow `log P` from a power of zero to one.

At a power p the density of the shares is `prod_s sum_xi P(xi | rho) P(y_s | xi)^p`: at zero their prior, so that every
mode has its part of a population, and at one the posterior. A population is weighed anew at each power, drawn again by
the weights, and moved by Gibbs steps: gates given shares, shares given gates (sequential Monte Carlo: Del Moral, Doucet
and Jasra 2006). The means of the weights make the evidence, and by it the populations are mixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer.inference.heads.conditional import TINY

POPULATIONS, MEMBERS = 4, 64  # apart from each other, so that they tell how far they agree
SWEEPS = 2  # moves of every share at each power
KEPT = 0.5  # of a population, that the weights of a step keep in effect


@dataclass(frozen=True)
class Drawn:
    """Draws of the shares, `[draw, head]`, and the log evidence by each population."""

    rho: Tensor
    log_evidence: Tensor


def settings(heads: int) -> Tensor:
    """All settings of the gates, `[2^heads, heads]`, the last with all on.

    >>> settings(2)
    tensor([[0., 0.],
            [1., 0.],
            [0., 1.],
            [1., 1.]], dtype=torch.float64)
    """
    return (torch.arange(2**heads)[:, None] >> torch.arange(heads) & 1).double()


def annealed(table: Tensor, generator: torch.Generator) -> Drawn:
    """The shares and the evidence of `log P` of each sentence and setting, `[sentence, setting]`."""
    heads = int(math.log2(table.shape[1]))
    rho = torch.rand(POPULATIONS * MEMBERS, heads, generator=generator, dtype=torch.float64).clamp(TINY, 1 - TINY)
    evidence, power = torch.zeros(POPULATIONS, dtype=torch.float64), 0.0
    log = log_likelihood(table, rho, power)
    while power < 1:
        power, then = _next(table, rho, power, log)
        weight = (then - log).reshape(POPULATIONS, MEMBERS)
        evidence += weight.logsumexp(1) - math.log(MEMBERS)
        rho = moved(power * table, rho[_again(weight, generator)], generator)
        log = log_likelihood(table, rho, power)
    return Drawn(rho[_of_all(evidence, generator)], evidence)


def log_likelihood(table: Tensor, rho: Tensor, power: float) -> Tensor:
    """`sum_s log sum_xi P(xi | rho) P(y_s | xi)^power` of each draw."""
    most = table.amax(1, keepdim=True)
    scaled = (power * (table - most)).exp()
    return (log_prior(rho).exp() @ scaled.T).log().sum(1) + power * most.sum()


def moved(table: Tensor, rho: Tensor, generator: torch.Generator) -> Tensor:
    """Draws after Gibbs steps: the gate of each sentence given the shares, the share given the gates."""
    rho, halves = rho.clone(), [sides(table, head) for head in range(rho.shape[1])]
    for head, half in [*enumerate(halves)] * SWEEPS:
        ratio = log_ratio(*half, others(rho, head))
        likely = torch.sigmoid(ratio + torch.logit(rho[:, head])[:, None])
        on = (torch.rand(likely.shape, generator=generator, dtype=torch.float64) < likely).sum(1)
        ins, outs = (torch._standard_gamma(1.0 + n.double(), generator=generator) for n in (on, len(table) - on))
        rho[:, head] = (ins / (ins + outs)).clamp(TINY, 1 - TINY)
    return rho


def sides(table: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """`P(y_s | setting)` where a gate is off, and where it is on: `[side, setting of the others, sentence]`, each side
    scaled by its own greatest entry, so that neither is lost where they are far apart; and the logs of these scales."""
    halves = table.reshape(len(table), -1, 2, 2**head).permute(2, 1, 3, 0).flatten(1, 2)
    most = halves.amax(1, keepdim=True)
    return (halves - most).exp(), most


def log_ratio(halves: Tensor, scales: Tensor, rho: Tensor) -> Tensor:
    """`log P(y_s | gate on) - log P(y_s | gate off)`, the other gates summed out by their rho: `[draw, sentence]`."""
    off, on = ((log_prior(rho).exp() @ halves).log() + scales).unbind()
    return on - off


def log_prior(rho: Tensor) -> Tensor:
    """The log probability of each setting of the gates, `[draw, setting]`."""
    bits = settings(rho.shape[1])
    return rho.log() @ bits.T + torch.log1p(-rho) @ (1 - bits).T


def others(rho: Tensor, head: int) -> Tensor:
    """The shares of the other heads."""
    return rho[:, [k for k in range(rho.shape[1]) if k != head]]


def _next(table: Tensor, rho: Tensor, power: float, log: Tensor) -> tuple[float, Tensor]:
    """The next power, at which a population keeps some of its members in effect, and `log P` there."""
    low, high = power, 1.0
    then = log_likelihood(table, rho, high)
    while _kept(then - log) < KEPT and high - low > 1e-3 * (high - power):
        middle = (low + high) / 2
        at = log_likelihood(table, rho, middle)
        if _kept(at - log) < KEPT:
            high, then = middle, at
        else:
            low = middle
    return high, then


def _kept(weight: Tensor) -> float:
    """The least share of a population that its weights keep in effect."""
    each = weight.reshape(POPULATIONS, MEMBERS).softmax(1)
    return float((1 / each.square().sum(1)).min()) / MEMBERS


def _again(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Members drawn again by their weights, evenly, each population by itself."""
    start = torch.rand(POPULATIONS, 1, generator=generator, dtype=torch.float64)
    at = (torch.arange(MEMBERS) + start) / MEMBERS
    member = torch.searchsorted(weight.softmax(1).cumsum(1), at).clamp(max=MEMBERS - 1)
    return (member + MEMBERS * torch.arange(POPULATIONS)[:, None]).flatten()


def _of_all(evidence: Tensor, generator: torch.Generator) -> Tensor:
    """Members of all populations, as many of each as its evidence says, in any order."""
    count = POPULATIONS * MEMBERS
    at = (torch.arange(count) + torch.rand(1, generator=generator, dtype=torch.float64)) / count
    which = torch.searchsorted(evidence.softmax(0).cumsum(0), at).clamp(max=POPULATIONS - 1)
    place = torch.arange(count) % MEMBERS
    return (which * MEMBERS + place)[torch.randperm(count, generator=generator)]
