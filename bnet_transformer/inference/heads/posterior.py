"""The posterior of one slice's gates from `log P(y_s | gates)` of every setting: the gates are summed out exactly.

    p(rho | y) = prod_s sum_xi [prod_nu rho_nu^xi_nu (1 - rho_nu)^(1 - xi_nu)] P(y_s | xi)        (rho_nu ~ Beta(1, 1))

is of first degree in each rho_nu and each sentence: with the others known, and `r_s` the Bayes factor of sentence s for
its gate, `p(rho_nu | the others, y)` is `prod_s (1 - rho_nu + rho_nu r_s)`, which is sampled as it is (Gibbs). What is
told of a head is averaged over these conditionals, not read off the draws, where that can be: its inclusion in each
sentence, and the Bayes factor for `rho_nu` free against `rho_nu = 0`, `1 / p(rho_nu = 0 | y)` (Savage and Dickey).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

COARSE, FINE = 33, 81  # points of [0, 1] at which a conditional is looked for, and then reckoned
SOME = 4  # coarse points, at least, where it is high
LOW = 30.0  # nats below its mode, where a conditional ends
AT_ONCE = 2**22  # numbers, of sentences at points
CHAINS, WARMUP = 8, 25
TINY = 1e-12  # the least probability of a gate
JOINTS = 64  # draws of rho over which the joint posterior of the gates of a sentence is averaged


@dataclass(frozen=True)
class Posterior:
    """What is known of one slice's heads.

    `rho` are draws, `[draw, head]`; `log_bayes` and its Monte Carlo `error`, `[head]`; `inclusion`, `[sentence, head]`,
    the probability of each gate; `log_joint`, `[sentence, setting]`, the log of that of all gates of a sentence.
    """

    rho: Tensor
    log_bayes: Tensor
    error: Tensor
    inclusion: Tensor
    log_joint: Tensor


def settings(heads: int) -> Tensor:
    """All settings of the gates, `[2^heads, heads]`, the last with all on.

    >>> settings(2)
    tensor([[0., 0.],
            [1., 0.],
            [0., 1.],
            [1., 1.]], dtype=torch.float64)
    """
    return (torch.arange(2**heads)[:, None] >> torch.arange(heads) & 1).double()


def posterior_of(table: Tensor, draws: int, generator: torch.Generator, told: Callable[[int], None]) -> Posterior:
    """The posterior of the gates of one slice from `log P` of each sentence and setting, `[sentence, setting]`."""
    sentences, heads = len(table), int(math.log2(table.shape[1]))
    bits, sides = settings(heads), [_sides(table, head) for head in range(heads)]
    rows = -(-draws // CHAINS)
    rho = torch.rand(CHAINS, heads, generator=generator, dtype=torch.float64)
    kept = torch.empty(rows, CHAINS, heads, dtype=torch.float64)
    evidence = torch.empty(rows, CHAINS, heads, dtype=torch.float64)
    inclusion = torch.zeros(sentences, heads, dtype=torch.float64)
    log_joint, joints = torch.full_like(table, -torch.inf), 0
    for step in range(WARMUP + rows):
        row = step - WARMUP
        for head in range(heads):
            ratio = _log_ratio(*sides[head], rho[:, [k for k in range(heads) if k != head]])
            rho[:, head], log_evidence = drawn(ratio, generator)
            if row >= 0:
                evidence[row, :, head] = log_evidence
                inclusion[:, head] += torch.sigmoid(ratio + torch.logit(rho[:, head])[:, None]).mean(0)
        if row >= 0:
            kept[row] = rho
            if row % max(1, rows * CHAINS // JOINTS) == 0:
                for prior in _log_prior(bits, rho):
                    log_joint = torch.logaddexp(log_joint, torch.log_softmax(table + prior, 1))
                joints += CHAINS
        told(1)
    log_bayes, error = _log_bayes(evidence)
    return Posterior(kept.flatten(0, 1)[:draws], log_bayes, error, inclusion / rows, log_joint - math.log(joints))


def _sides(table: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """`P(y_s | setting)` where a gate is off, and where it is on: `[side, setting of the others, sentence]`, each side
    scaled by its own greatest entry, so that neither is lost where they are far apart; and the logs of these scales."""
    halves = table.reshape(len(table), -1, 2, 2**head).permute(2, 1, 3, 0).flatten(1, 2)
    most = halves.amax(1, keepdim=True)
    return (halves - most).exp(), most


def _log_ratio(sides: Tensor, scales: Tensor, rho: Tensor) -> Tensor:
    """`log P(y_s | gate on) - log P(y_s | gate off)`, the other gates summed out by their rho: `[chain, sentence]`."""
    prior = _log_prior(settings(rho.shape[1]), rho).exp()
    off, on = ((prior @ sides).log() + scales).unbind()
    return on - off


def _log_prior(bits: Tensor, rho: Tensor) -> Tensor:
    """The log probability of each setting, `[chain, setting]`."""
    return rho.log() @ bits.T + torch.log1p(-rho) @ (1 - bits).T


def drawn(ratio: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A draw of rho from `prod_s (1 - rho + rho e^ratio_s)` for each row of `[row, sentence]`, and the log of its
    integral."""
    draws, log_evidence = draws_of(ratio, 1, generator)
    return draws[:, 0], log_evidence


def draws_of(ratio: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """So many draws of rho for each row, `[row, draw]`, and the log of the integral: the density is taken to be
    straight between its points."""
    grid, log = density(ratio)
    most = log.amax(1, keepdim=True)
    weight = (log - most).exp()
    pieces = 0.5 * (weight[:, 1:] + weight[:, :-1]) * (grid[:, 1:] - grid[:, :-1])
    total = pieces.sum(1)
    below = pieces.cumsum(1)
    u = torch.rand(len(ratio), count, generator=generator, dtype=torch.float64) * total[:, None]
    piece = torch.searchsorted(below, u).clamp(max=pieces.shape[1] - 1)
    rest = u - (below.gather(1, piece) - pieces.gather(1, piece))
    left, right = weight.gather(1, piece), weight.gather(1, piece + 1)
    start, width = grid.gather(1, piece), grid.diff(dim=1).gather(1, piece)
    area = rest / width.clamp(min=1e-300)
    share = 2 * area / (left + (left.square() + 2 * (right - left) * area).clamp(min=0).sqrt()).clamp(min=1e-300)
    rho = start + width * share.clamp(0, 1)
    return rho.clamp(TINY, 1 - TINY), total.log() + most[:, 0]


def density(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """`sum_s log(1 - rho + rho e^ratio_s)` of each row at points of [0, 1] that lie where it is within LOW of its mode:
    the points and the values, `[row, point]`. It is concave, so that where it is high is one interval; many sentences
    make that narrow, and it is looked for until it is some points wide."""
    low, top = torch.zeros(len(ratio), 1, dtype=torch.float64), torch.ones(len(ratio), 1, dtype=torch.float64)
    narrow = True
    while narrow:
        grid = _points(low, top, COARSE)
        log = _log_density(ratio, grid)
        high = log >= log.amax(1, keepdim=True) - LOW
        place = torch.arange(COARSE).expand_as(high)
        first = torch.where(high, place, COARSE).amin(1, keepdim=True).sub(1).clamp(min=0)
        last = torch.where(high, place, -1).amax(1, keepdim=True).add(1).clamp(max=COARSE - 1)
        low, top = grid.gather(1, first), grid.gather(1, last)
        narrow = bool((last - first < SOME).any()) and bool((top - low > 1e-12).all())
    grid = _points(low, top, FINE)
    return grid, _log_density(ratio, grid)


def _points(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Points of an interval, closer together at its ends."""
    at = torch.sin(torch.linspace(0, math.pi / 2, count, dtype=torch.float64)).square()
    return low + (high - low) * at


def _log_density(ratio: Tensor, rho: Tensor) -> Tensor:
    """At each point. The greater of both sides is taken out first, so that none overflows; what is lost of the other
    is far below the mode."""
    total = torch.zeros_like(rho)
    for part in ratio.split(max(1, AT_ONCE // rho.numel()), 1):
        most = part.clamp(min=0)
        on, off = (part - most).exp()[:, :, None], (-most).exp()[:, :, None]
        total += torch.addcmul(off, on - off, rho[:, None, :]).log().sum(1) + most.sum(1, keepdim=True)
    return total


def _log_bayes(evidence: Tensor) -> tuple[Tensor, Tensor]:
    """`- log E[1 / evidence]` over draws `[row, chain, head]`, and how far chains differ in it."""

    def of(log: Tensor) -> Tensor:
        return math.log(log.shape[0]) - torch.logsumexp(-log, 0)

    each = of(evidence)
    return of(evidence.flatten(0, 1)), each.std(0) / math.sqrt(evidence.shape[1])
