"""All slices at once: stochastic variational inference with relaxed gates.

The approximation is `q(rho) prod_s q(xi_s | rho)` with `q(xi_s = 1 | rho) = sigmoid(logit rho + e_s)` for each head by
itself: a head that no likelihood hangs on keeps its prior, and best for `rho` is `prod_s (1 - rho + rho exp e_s)`, as
in the exact posterior. Best for `e_s` is what the gate is worth to its sentence while the others are as likely as they
are, `E[log P(y_s | on) - log P(y_s | off)]`, the integral of the slope of `log P` between off and on. So each gate in
turn is relaxed: put to a uniform number while the others are drawn, on or off; one run backwards gives the slopes of
all that are relaxed, and `e_s` moves towards them (a natural gradient; Hoffman et al. 2013). That some of the others,
one in TOGETHER, are relaxed at the same time is what such an estimate is off by.

Gates that hang together have many optima. So the likelihood begins with a small power, which rises to one while it
warms up; of what comes after, the mean is taken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bnet_transformer._core.distributed import Ranks
from bnet_transformer.inference.heads.posterior import Posterior, drawn, draws_of
from bnet_transformer.inference.heads.runs import Part, Runs

TOGETHER = 12  # one in so many gates is relaxed at a time, or a single one
WARM = 1 / 2  # of the rounds, in which the power of the likelihood rises, and no estimate counts
LATEST = 0.2  # the least weight of the latest estimate


class _Worth:
    """`e_s` of each gate: as it goes, and the mean and spread of the estimates after the warm-up."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.now, self.met = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        self.sum, self.squares, self.count = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))

    def move(self, which: Tensor, there: Tensor, slope: Tensor, counts: bool) -> None:
        """Towards the slopes of the gates that were relaxed in some sentences."""
        self.met[which] += there
        rate = torch.where(there, (1 / self.met[which].clamp(min=1)).clamp(min=LATEST), 0.0)
        self.now[which] += rate * (slope - self.now[which])
        if counts:
            self.sum[which] += torch.where(there, slope, 0.0)
            self.squares[which] += torch.where(there, slope.square(), 0.0)
            self.count[which] += there

    def told(self) -> tuple[Tensor, Tensor]:
        """The mean estimate of each, and the variance of that mean."""
        mean = self.sum / self.count
        spread = (self.squares / self.count - mean.square()).clamp(min=0)
        return mean, spread / (self.count - 1).clamp(min=1)


def passes_of(gates: int) -> int:
    """How many runs of a sentence relax each of its gates once."""
    return min(gates, TOGETHER)


def relaxed(
    runs: Runs,
    scale: float,
    rounds: int,
    draws: int,
    generator: torch.Generator,
    told: Callable[[int], object],
) -> Posterior:
    """The posterior of all gates; `scale` is what `log P` of a run is multiplied by; in a round each gate is relaxed
    once in every sentence. Random numbers are drawn for the sentences of all ranks, so that each has its own."""
    shape, ranks = (len(runs.corpus), len(runs.sites), runs.heads), runs.ranks
    worth, parts = _Worth(shape), list(runs.parts(runs.fitting()))
    count = sum(ranks.all_gather_object(shape[0]))
    warm = max(1, round(WARM * rounds))
    for turn in range(rounds):
        power = min(1.0, (turn + 1) / warm) ** 2
        for place in range(passes_of(shape[1] * shape[2])):
            rho = drawn(power * worth.now.flatten(1).T, generator, ranks)[0].reshape(shape[1:])
            random = torch.rand(2, count, *shape[1:], generator=generator, dtype=torch.float64).transpose(0, 1)
            random = ranks.shard(random)
            for part in parts:
                likely = torch.sigmoid(torch.logit(rho) + power * worth.now[part.which])
                there, slope = _slopes(runs, part, likely, place, random[part.which])
                worth.move(part.which, there, scale * slope, turn >= warm)
                told(len(part))
    return _found(*worth.told(), draws, generator, ranks)


def _slopes(runs: Runs, part: Part, likely: Tensor, place: int, random: Tensor) -> tuple[Tensor, Tensor]:
    """Which gates are relaxed in each sentence, and the slopes of `log P` along all; the others are on if `likely`."""
    chance, between = random.unbind(1)
    gates, count = (chance < likely).double(), likely[0].numel()
    turn = torch.arange(count) + runs.ranks.places(part.which)[:, None] + place
    there = (turn % passes_of(count) == 0).reshape(likely.shape)
    leaf = torch.where(there, between, gates).to(part.device, runs.module.network.dtype).requires_grad_()
    (slope,) = torch.autograd.grad(runs.gated(part, leaf).sum(), leaf)
    return there, slope.double().cpu()


def _found(worth: Tensor, variance: Tensor, draws: int, generator: torch.Generator, ranks: Ranks) -> Posterior:
    sites, heads = worth.shape[1:]
    rho, log_bayes = draws_of(worth.flatten(1).T, draws, generator, ranks)
    each = torch.sigmoid(torch.logit(rho[:, :64].T)[:, None] + worth.flatten(1)).mean(0)  # [sentence, site * head]
    error = ranks.all_reduce((each.square() * variance.flatten(1)).sum(0)).sqrt()
    return Posterior(
        rho.T.reshape(draws, sites, heads),
        log_bayes.reshape(sites, heads),
        error.reshape(sites, heads),
        ranks.all_gather(each.reshape(worth.shape)),
        None,
    )
