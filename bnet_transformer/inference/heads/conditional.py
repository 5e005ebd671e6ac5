"""The share of one head, the others known: `p(rho) = prod_s (1 - rho + rho e^ratio_s)`, drawn from and integrated.

It is log-concave, and of one dimension: points that lie where it is high say all of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bnet_transformer._core.distributed import ALONE, Ranks

COARSE, FINE = 33, 81  # points of [0, 1] at which it is looked for, and then reckoned
SOME = 4  # coarse points, at least, where it is high
LOW = 30.0  # nats below its mode, where it ends
AT_ONCE = 2**22  # numbers, of sentences at points
TINY = 1e-12  # the least share


def drawn(ratio: Tensor, generator: torch.Generator, ranks: Ranks = ALONE) -> tuple[Tensor, Tensor]:
    """A draw of rho from `prod_s (1 - rho + rho e^ratio_s)` for each row of `[row, sentence]`, and the log of its
    integral."""
    draws, log_evidence = draws_of(ratio, 1, generator, ranks)
    return draws[:, 0], log_evidence


def draws_of(ratio: Tensor, count: int, generator: torch.Generator, ranks: Ranks = ALONE) -> tuple[Tensor, Tensor]:
    """So many draws of rho for each row, `[row, draw]`, and the log of the integral: the density is taken to be
    straight between its points. Each of the `ranks` has the ratios of its sentences; all have the same draws."""
    grid, log = density(ratio, ranks)
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


def density(ratio: Tensor, ranks: Ranks = ALONE) -> tuple[Tensor, Tensor]:
    """`sum_s log(1 - rho + rho e^ratio_s)` of each row at points of [0, 1] that lie where it is within LOW of its mode:
    the points and the values, `[row, point]`. It is concave, so that where it is high is one interval; many sentences
    make that narrow, and it is looked for until it is some points wide."""
    low, top = torch.zeros(len(ratio), 1, dtype=torch.float64), torch.ones(len(ratio), 1, dtype=torch.float64)
    narrow = True
    while narrow:
        grid = _points(low, top, COARSE)
        log = ranks.all_reduce(_log_density(ratio, grid))
        high = log >= log.amax(1, keepdim=True) - LOW
        place = torch.arange(COARSE).expand_as(high)
        first = torch.where(high, place, COARSE).amin(1, keepdim=True).sub(1).clamp(min=0)
        last = torch.where(high, place, -1).amax(1, keepdim=True).add(1).clamp(max=COARSE - 1)
        low, top = grid.gather(1, first), grid.gather(1, last)
        narrow = bool((last - first < SOME).any()) and bool((top - low > 1e-12).all())
    grid = _points(low, top, FINE)
    return grid, ranks.all_reduce(_log_density(ratio, grid))


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
