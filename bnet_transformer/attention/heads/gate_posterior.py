"""The posterior of gates: of one slice exactly, and of all slices at once with relaxed gates.

Of one slice there is `log P(y_s | gates)` of every setting, and the gates are summed out.

    p(rho | y) = prod_s sum_xi [prod_nu rho_nu^xi_nu (1 - rho_nu)^(1 - xi_nu)] P(y_s | xi)        (rho_nu ~ Beta(1, 1))

The shares rho are drawn by sequential Monte Carlo (Del Moral, Doucet and Jasra 2006): populations follow `log P` from
a power of zero to one. At a power p their density is `prod_s sum_xi P(xi | rho) P(y_s | xi)^p`: at zero the prior, so
that every mode has its part of a population, and at one the posterior. A population is weighed anew at each power,
drawn again by the weights, and moved by Gibbs steps: gates given shares, shares given gates. The means of the weights
make the evidence, and by it the populations are mixed.

With the others known, and `r_s` the Bayes factor of sentence s for its gate, the density of the share of one head is
`prod_s (1 - rho_nu + rho_nu r_s)`. It is log-concave, and of one dimension: points that lie where it is high say all of
it, to draw from it and to integrate it. By it what is told of a head is averaged.

The Bayes factor is that of `rho_nu` free against `rho_nu = 0`: with the integral I of this density, relative to its
value at zero, it is the mean of I over the shares of the others where `rho_nu = 0`, and one over that of 1 / I where
that is free. Draws of both are bridged (Bennett 1976); where they do not meet, it is the quotient of the evidences.

All slices at once: stochastic variational inference with relaxed gates.

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

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer._core.distributed import SINGLE_PROCESS, DistributedContext
from bnet_transformer.attention.heads.gated_runs import CorpusPart, GatedRuns

COARSE_POINTS, FINE_POINTS = 33, 81  # points of [0, 1] at which it is looked for, and then reckoned
MIN_COARSE_POINTS = 4  # coarse points, at least, where it is high
LOG_DENSITY_CUTOFF = 30.0  # nats below its mode, where it ends
CHUNK_NUMEL = 2**22  # numbers, of sentences at points
MIN_RHO = 1e-12  # the least share
NUM_POPULATIONS, POPULATION_SIZE = 4, 64  # apart from each other, so that they tell how far they agree
GIBBS_SWEEPS = 2  # moves of every share at each power
MIN_ESS_FRACTION = 0.5  # of a population, that the weights of a step keep in effect
MAX_BRIDGE_GAP = 2.0  # nats, by which both means of I may differ for draws that are bridged
RELAXATION_STRIDE = 12  # one in so many gates is relaxed at a time, or a single one
WARMUP_FRACTION = 1 / 2  # of the rounds, in which the power of the likelihood rises, and no estimate counts
MIN_UPDATE_RATE = 0.2  # the least weight of the latest estimate
INTERACTION_DRAWS = 32  # draws of the shares over which the odds of pairs of gates are averaged


@dataclass(frozen=True)
class GatePosterior:
    """What is known of the heads of one slice, or, with a dim of slices before that of heads, of all.

    `rho` are draws, `[draw, head]`; `log_bayes` and its Monte Carlo `error`, `[head]`; `inclusion`, `[sentence, head]`,
    the probability of each gate; `interaction`, `[head, head]`, the mean log odds ratio of two gates of a sentence.
    """

    rho: Tensor
    log_bayes: Tensor
    error: Tensor
    inclusion: Tensor
    interaction: Tensor | None


def exact_gate_posterior(
    log_probs: Tensor, draws: int, generator: torch.Generator, update_progress: Callable[[int], object]
) -> GatePosterior:
    """The posterior of the gates of one slice from `log P` of each sentence and setting, `[sentence, setting]`."""
    heads = int(math.log2(log_probs.shape[1]))
    halves = [split_by_gate(log_probs, head) for head in range(heads)]
    rho, evidence = run_smc(log_probs, generator)
    update_progress(1)
    samples, log_integrals, inclusion = [], [], torch.zeros(len(log_probs), heads, dtype=torch.float64)
    rows = -(-draws // len(rho))
    for _ in range(rows):
        rho, log_integral, probs = _collapsed_gibbs_sweep(halves, rho, generator)
        samples.append(rho)
        log_integrals.append(log_integral)
        inclusion += probs / rows
    log_integrals_all = torch.stack(log_integrals)
    all_heads = range(heads)
    factors = torch.stack(
        [
            _log_bayes_factor(log_probs, halves[h], h, log_integrals_all[..., h], evidence, generator, update_progress)
            for h in all_heads
        ]
    )
    interaction = _interaction(log_probs, samples[-1][:: max(1, len(rho) // INTERACTION_DRAWS)])
    return GatePosterior(torch.cat(samples)[:draws], factors[:, 0], factors[:, 1], inclusion, interaction)


def _collapsed_gibbs_sweep(
    halves: list[tuple[Tensor, Tensor]], rho: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Every share drawn anew given the others; the log of each integral, `[draw, head]`; the mean of the gates."""
    rho, log_integral, inclusion = rho.clone(), torch.empty_like(rho), []
    for head, half in enumerate(halves):
        ratio = log_likelihood_ratio(*half, drop_head(rho, head))
        rho[:, [head]], log_integral[:, head] = sample_rho(ratio, 1, generator)
        inclusion.append(torch.sigmoid(ratio + torch.logit(rho[:, head])[:, None]).mean(0))
    return rho, log_integral, torch.stack(inclusion, 1)


def _log_bayes_factor(
    log_probs: Tensor,
    half: tuple[Tensor, Tensor],
    head: int,
    log_integrals: Tensor,
    evidence: Tensor,
    generator: torch.Generator,
    update_progress: Callable[[int], object],
) -> Tensor:
    """The log Bayes factor of a head and its error; `log_integrals` are log integrals over the posterior, `[row, draw]`."""
    log_probs_off = log_probs.reshape(len(log_probs), -1, 2, 2**head)[:, :, 0].flatten(1)
    (rho, evidence_off), samples = run_smc(log_probs_off, generator), []
    for _ in range(len(log_integrals)):
        rho = gibbs_step(log_probs_off, rho, generator)
        samples.append(sample_rho(log_likelihood_ratio(*half, rho), 1, generator)[1])
    update_progress(1)
    rows = torch.stack(samples)
    by_population = zip(rows.chunk(NUM_POPULATIONS, 1), log_integrals.chunk(NUM_POPULATIONS, 1), strict=True)
    bridges = torch.stack([_bridge_sampling(one.flatten(), other.flatten()) for one, other in by_population])
    low, high = _log_mean_exp(rows.flatten()), -_log_mean_exp(-log_integrals.flatten())
    if float(high - low) > MAX_BRIDGE_GAP:
        return torch.stack(
            [
                _log_mean_exp(evidence) - _log_mean_exp(evidence_off),
                (evidence - evidence_off).std() / NUM_POPULATIONS**0.5,
            ]
        )
    error = torch.hypot(bridges.std() / NUM_POPULATIONS**0.5, (high - low) / 4)  # both means err to their own side
    return torch.stack([_bridge_sampling(rows.flatten(), log_integrals.flatten()), error])


def _bridge_sampling(restricted: Tensor, free: Tensor) -> Tensor:
    """The log of the mean of e^x where a head never is, from x there and x where it is free, by both at once."""
    estimate = (_log_mean_exp(restricted) - _log_mean_exp(-free)) / 2
    for _ in range(50):
        estimate = _log_mean_exp(restricted - torch.logaddexp(restricted, estimate)) - _log_mean_exp(
            -torch.logaddexp(free, estimate)
        )
    return estimate


def _log_mean_exp(log_values: Tensor) -> Tensor:
    """The log of the mean of e^x."""
    return log_values.logsumexp(0) - math.log(len(log_values))


def _interaction(log_probs: Tensor, rho: Tensor) -> Tensor:
    """The mean over sentences and shares of the log odds ratio of each pair of gates, `[head, head]`; zero for a head
    itself. With the shares known, gates on which the likelihood hangs apart are independent: zero exactly."""
    heads, bits = rho.shape[1], gate_settings(rho.shape[1])
    result = torch.zeros(heads, heads, dtype=torch.float64)
    for prior in log_prior(rho):
        log = log_probs + prior
        for a in range(heads):
            for b in range(a):
                off, one, other, both = (
                    log[:, (bits[:, a] == x) & (bits[:, b] == y)].logsumexp(1)
                    for x, y in ((0, 0), (1, 0), (0, 1), (1, 1))
                )
                result[a, b] += (both + off - one - other).mean() / len(rho)
    return result + result.T


def gate_settings(num_heads: int) -> Tensor:
    """All settings of the gates, `[2^heads, heads]`, the last with all on.

    >>> gate_settings(2)
    tensor([[0., 0.],
            [1., 0.],
            [0., 1.],
            [1., 1.]], dtype=torch.float64)
    """
    return (torch.arange(2**num_heads)[:, None] >> torch.arange(num_heads) & 1).double()


def run_smc(log_probs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws of the shares, `[draw, head]`, and the log evidence by each population, of `log P` of each sentence and
    setting, `[sentence, setting]`."""
    heads = int(math.log2(log_probs.shape[1]))
    rho = torch.rand(NUM_POPULATIONS * POPULATION_SIZE, heads, generator=generator, dtype=torch.float64).clamp(
        MIN_RHO, 1 - MIN_RHO
    )
    evidence, power = torch.zeros(NUM_POPULATIONS, dtype=torch.float64), 0.0
    log = tempered_log_likelihood(log_probs, rho, power)
    while power < 1:
        power, next_log = _next_power(log_probs, rho, power, log)
        weight = (next_log - log).reshape(NUM_POPULATIONS, POPULATION_SIZE)
        evidence += weight.logsumexp(1) - math.log(POPULATION_SIZE)
        rho = gibbs_step(power * log_probs, rho[_resample(weight, generator)], generator)
        log = tempered_log_likelihood(log_probs, rho, power)
    # members of all populations, as many of each as its evidence says, in any order
    count = NUM_POPULATIONS * POPULATION_SIZE
    positions = (torch.arange(count) + torch.rand(1, generator=generator, dtype=torch.float64)) / count
    population = torch.searchsorted(evidence.softmax(0).cumsum(0), positions).clamp(max=NUM_POPULATIONS - 1)
    selected = population * POPULATION_SIZE + torch.arange(count) % POPULATION_SIZE
    return rho[selected[torch.randperm(count, generator=generator)]], evidence


def tempered_log_likelihood(log_probs: Tensor, rho: Tensor, power: float) -> Tensor:
    """`sum_s log sum_xi P(xi | rho) P(y_s | xi)^power` of each draw."""
    maximum = log_probs.amax(1, keepdim=True)
    scaled = (power * (log_probs - maximum)).exp()
    return (log_prior(rho).exp() @ scaled.T).log().sum(1) + power * maximum.sum()


def gibbs_step(log_probs: Tensor, rho: Tensor, generator: torch.Generator) -> Tensor:
    """Draws after Gibbs steps: the gate of each sentence given the shares, the share given the gates."""
    rho, halves = rho.clone(), [split_by_gate(log_probs, head) for head in range(rho.shape[1])]
    for head, half in [*enumerate(halves)] * GIBBS_SWEEPS:
        ratio = log_likelihood_ratio(*half, drop_head(rho, head))
        probs = torch.sigmoid(ratio + torch.logit(rho[:, head])[:, None])
        num_on = (torch.rand(probs.shape, generator=generator, dtype=torch.float64) < probs).sum(1)
        gamma_on, gamma_off = (
            torch._standard_gamma(1.0 + n.double(), generator=generator) for n in (num_on, len(log_probs) - num_on)
        )
        rho[:, head] = (gamma_on / (gamma_on + gamma_off)).clamp(MIN_RHO, 1 - MIN_RHO)
    return rho


def split_by_gate(log_probs: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """`P(y_s | setting)` where a gate is off, and where it is on: `[side, setting of the others, sentence]`, each side
    scaled by its own greatest entry, so that neither is lost where they are far apart; and the logs of these scales."""
    halves = log_probs.reshape(len(log_probs), -1, 2, 2**head).permute(2, 1, 3, 0).flatten(1, 2)
    maximum = halves.amax(1, keepdim=True)
    return (halves - maximum).exp(), maximum


def log_likelihood_ratio(halves: Tensor, scales: Tensor, rho: Tensor) -> Tensor:
    """`log P(y_s | gate on) - log P(y_s | gate off)`, the other gates summed out by their rho: `[draw, sentence]`."""
    off, on = ((log_prior(rho).exp() @ halves).log() + scales).unbind()
    return on - off


def log_prior(rho: Tensor) -> Tensor:
    """The log probability of each setting of the gates, `[draw, setting]`."""
    bits = gate_settings(rho.shape[1])
    return rho.log() @ bits.T + torch.log1p(-rho) @ (1 - bits).T


def drop_head(rho: Tensor, head: int) -> Tensor:
    """The shares of the other heads."""
    return rho[:, [k for k in range(rho.shape[1]) if k != head]]


def _next_power(log_probs: Tensor, rho: Tensor, power: float, log_likelihoods: Tensor) -> tuple[float, Tensor]:
    """The next power, at which a population keeps some of its members in effect, and `log P` there."""
    low, high = power, 1.0
    log_at_high = tempered_log_likelihood(log_probs, rho, high)
    while _min_ess_fraction(log_at_high - log_likelihoods) < MIN_ESS_FRACTION and high - low > 1e-3 * (high - power):
        middle = (low + high) / 2
        log_at_middle = tempered_log_likelihood(log_probs, rho, middle)
        if _min_ess_fraction(log_at_middle - log_likelihoods) < MIN_ESS_FRACTION:
            high, log_at_high = middle, log_at_middle
        else:
            low = middle
    return high, log_at_high


def _min_ess_fraction(log_weights: Tensor) -> float:
    """The least share of a population that its weights keep in effect."""
    weights = log_weights.reshape(NUM_POPULATIONS, POPULATION_SIZE).softmax(1)
    return float((1 / weights.square().sum(1)).min()) / POPULATION_SIZE


def _resample(log_weights: Tensor, generator: torch.Generator) -> Tensor:
    """Members drawn again by their weights, evenly, each population by itself."""
    start = torch.rand(NUM_POPULATIONS, 1, generator=generator, dtype=torch.float64)
    positions = (torch.arange(POPULATION_SIZE) + start) / POPULATION_SIZE
    indices = torch.searchsorted(log_weights.softmax(1).cumsum(1), positions).clamp(max=POPULATION_SIZE - 1)
    return (indices + POPULATION_SIZE * torch.arange(NUM_POPULATIONS)[:, None]).flatten()


def sample_rho(
    log_ratios: Tensor, num_samples: int, generator: torch.Generator, ranks: DistributedContext = SINGLE_PROCESS
) -> tuple[Tensor, Tensor]:
    """So many draws of rho from `prod_s (1 - rho + rho e^ratio_s)` for each row of `[row, sentence]`, `[row, draw]`;
    and the log of its integral. The density is taken to be straight between its points. Each of the `ranks` has the
    ratios of its sentences; all have the same draws."""
    grid, log = log_density_grid(log_ratios, ranks)
    maximum = log.amax(1, keepdim=True)
    weight = (log - maximum).exp()
    pieces = 0.5 * (weight[:, 1:] + weight[:, :-1]) * (grid[:, 1:] - grid[:, :-1])
    total = pieces.sum(1)
    below = pieces.cumsum(1)
    u = torch.rand(len(log_ratios), num_samples, generator=generator, dtype=torch.float64) * total[:, None]
    piece = torch.searchsorted(below, u).clamp(max=pieces.shape[1] - 1)
    remainder = u - (below.gather(1, piece) - pieces.gather(1, piece))
    left, right = weight.gather(1, piece), weight.gather(1, piece + 1)
    start, width = grid.gather(1, piece), grid.diff(dim=1).gather(1, piece)
    area = remainder / width.clamp(min=1e-300)
    fraction = 2 * area / (left + (left.square() + 2 * (right - left) * area).clamp(min=0).sqrt()).clamp(min=1e-300)
    rho = start + width * fraction.clamp(0, 1)
    return rho.clamp(MIN_RHO, 1 - MIN_RHO), total.log() + maximum[:, 0]


def log_density_grid(log_ratios: Tensor, ranks: DistributedContext = SINGLE_PROCESS) -> tuple[Tensor, Tensor]:
    """`sum_s log(1 - rho + rho e^ratio_s)` of each row at points of [0, 1] that lie where it is within LOW of its mode:
    the points and the values, `[row, point]`. It is concave, so that where it is high is one interval; many sentences
    make that narrow, and it is looked for until it is some points wide."""
    low, top = torch.zeros(len(log_ratios), 1, dtype=torch.float64), torch.ones(len(log_ratios), 1, dtype=torch.float64)
    is_coarse = True
    while is_coarse:
        grid = _grid_points(low, top, COARSE_POINTS)
        log = ranks.all_reduce(_log_density(log_ratios, grid))
        high = log >= log.amax(1, keepdim=True) - LOG_DENSITY_CUTOFF
        positions = torch.arange(COARSE_POINTS).expand_as(high)
        first = torch.where(high, positions, COARSE_POINTS).amin(1, keepdim=True).sub(1).clamp(min=0)
        last = torch.where(high, positions, -1).amax(1, keepdim=True).add(1).clamp(max=COARSE_POINTS - 1)
        low, top = grid.gather(1, first), grid.gather(1, last)
        is_coarse = bool((last - first < MIN_COARSE_POINTS).any()) and bool((top - low > 1e-12).all())
    grid = _grid_points(low, top, FINE_POINTS)
    return grid, ranks.all_reduce(_log_density(log_ratios, grid))


def _grid_points(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Points of an interval, closer together at its ends."""
    fractions = torch.sin(torch.linspace(0, math.pi / 2, count, dtype=torch.float64)).square()
    return low + (high - low) * fractions


def _log_density(log_ratios: Tensor, rho: Tensor) -> Tensor:
    """At each point. The greater of both sides is taken out first, so that none overflows; what is lost of the other
    is far below the mode."""
    total = torch.zeros_like(rho)
    for part in log_ratios.split(max(1, CHUNK_NUMEL // rho.numel()), 1):
        maximum = part.clamp(min=0)
        on, off = (part - maximum).exp()[:, :, None], (-maximum).exp()[:, :, None]
        total += torch.addcmul(off, on - off, rho[:, None, :]).log().sum(1) + maximum.sum(1, keepdim=True)
    return total


class _GateLogOdds:
    """`e_s` of each gate: as it goes, and the mean and spread of the estimates after the warm-up."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.current, self.num_updates = (
            torch.zeros(shape, dtype=torch.float64),
            torch.zeros(shape, dtype=torch.float64),
        )
        self.sum, self.squares, self.count = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))

    def update(self, sentence_ids: Tensor, is_relaxed: Tensor, slopes: Tensor, is_counted: bool) -> None:
        """Towards the slopes of the gates that were relaxed in some sentences."""
        self.num_updates[sentence_ids] += is_relaxed
        rate = torch.where(
            is_relaxed, (1 / self.num_updates[sentence_ids].clamp(min=1)).clamp(min=MIN_UPDATE_RATE), 0.0
        )
        self.current[sentence_ids] += rate * (slopes - self.current[sentence_ids])
        if is_counted:
            self.sum[sentence_ids] += torch.where(is_relaxed, slopes, 0.0)
            self.squares[sentence_ids] += torch.where(is_relaxed, slopes.square(), 0.0)
            self.count[sentence_ids] += is_relaxed

    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        """The mean estimate of each, and the variance of that mean."""
        mean = self.sum / self.count
        spread = (self.squares / self.count - mean.square()).clamp(min=0)
        return mean, spread / (self.count - 1).clamp(min=1)


def count_passes(num_gates: int) -> int:
    """How many runs of a sentence relax each of its gates once."""
    return min(num_gates, RELAXATION_STRIDE)


def relaxed_gate_posterior(
    runs: GatedRuns,
    scale: float,
    rounds: int,
    draws: int,
    generator: torch.Generator,
    update_progress: Callable[[int], object],
) -> GatePosterior:
    """The posterior of all gates; `scale` is what `log P` of a run is multiplied by; in a round each gate is relaxed
    once in every sentence. Random numbers are drawn for the sentences of all ranks, so that each has its own."""
    shape, ranks = (len(runs.corpus), len(runs.sites), runs.num_heads), runs.ranks
    log_odds, parts = _GateLogOdds(shape), list(runs.parts(runs.gradient_part_size()))
    count = sum(ranks.all_gather_object(shape[0]))
    warmup = max(1, round(WARMUP_FRACTION * rounds))
    for step in range(rounds):
        power = min(1.0, (step + 1) / warmup) ** 2
        for offset in range(count_passes(shape[1] * shape[2])):
            rho = sample_rho(power * log_odds.current.flatten(1).T, 1, generator, ranks)[0].reshape(shape[1:])
            uniforms = torch.rand(2, count, *shape[1:], generator=generator, dtype=torch.float64).transpose(0, 1)
            uniforms = ranks.shard(uniforms)
            for part in parts:
                probs = torch.sigmoid(torch.logit(rho) + power * log_odds.current[part.indices])
                is_relaxed, slope = _relaxed_slopes(runs, part, probs, offset, uniforms[part.indices])
                log_odds.update(part.indices, is_relaxed, scale * slope, step >= warmup)
                update_progress(len(part))
    mean, variance = (inclusion.flatten(1) for inclusion in log_odds.mean_and_variance())
    rho, log_bayes = sample_rho(mean.T, draws, generator, ranks)
    inclusion = torch.sigmoid(torch.logit(rho[:, :64].T)[:, None] + mean).mean(0)  # [sentence, site * head]
    error = ranks.all_reduce((inclusion.square() * variance).sum(0)).sqrt()
    return GatePosterior(
        rho.T.reshape(draws, *shape[1:]),
        log_bayes.reshape(shape[1:]),
        error.reshape(shape[1:]),
        ranks.all_gather(inclusion.reshape(shape)),
        None,
    )


def _relaxed_slopes(
    runs: GatedRuns, part: CorpusPart, probabilities: Tensor, offset: int, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Which gates are relaxed in each sentence, and the slopes of `log P` along all; the others are on if `probabilities`."""
    threshold, values = uniforms.unbind(1)
    gates, count = (threshold < probabilities).double(), probabilities[0].numel()
    offsets = torch.arange(count) + runs.ranks.global_indices(part.indices)[:, None] + offset
    is_relaxed = (offsets % count_passes(count) == 0).reshape(probabilities.shape)
    network = runs.module.network
    leaf = torch.where(is_relaxed, values, gates).to(network.device, network.dtype).requires_grad_()
    (slope,) = torch.autograd.grad(runs.gated_log_probs(part, leaf).sum(), leaf)
    return is_relaxed, slope.double().cpu()
