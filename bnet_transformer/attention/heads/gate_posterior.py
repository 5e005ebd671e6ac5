"""The posterior of gates: exactly for one slice, or for all slices at once with relaxed gates.

For one slice, `log P(y_s | gates)` is computed for every gate setting, and the gates are summed out:

    p(rho | y) = prod_s sum_xi [prod_nu rho_nu^xi_nu (1 - rho_nu)^(1 - xi_nu)] P(y_s | xi)        (rho_nu ~ Beta(1, 1))

Samples of rho come from sequential Monte Carlo with Gibbs moves. Collapsed Gibbs sweeps then give samples, inclusion
probabilities and Bayes factors.

For all slices at once, the method is stochastic variational inference with relaxed gates. The approximation is
`q(rho) prod_s q(xi_s | rho)` with `q(xi_s = 1 | rho) = sigmoid(logit rho + e_s)`, independently for each head. A head
that no likelihood depends on keeps its prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer._core.distributed import SINGLE_PROCESS, DistributedContext
from bnet_transformer.attention.heads.gated_runs import CorpusPart, GatedRuns

COARSE_POINTS, FINE_POINTS = 33, 81  # grid points: to find the mode of a density, and to integrate it
MIN_COARSE_POINTS = 4  # minimum number of coarse points near the mode
LOG_DENSITY_CUTOFF = 30.0  # nats below the mode at which the grid ends
CHUNK_NUMEL = 2**22  # elements (sentences x points) of one chunk
MIN_RHO = 1e-12  # the minimum rho
NUM_POPULATIONS, POPULATION_SIZE = 8, 64  # independent populations; the errors are estimated from their spread
GIBBS_SWEEPS = 2  # Gibbs sweeps at each power
MIN_ESS_FRACTION = 0.5  # minimum effective sample size of a step, as a fraction of the samples
MAX_BRIDGE_GAP = 2.0  # maximum difference in nats of both estimates of the integral for bridge sampling
RELAXATION_STRIDE = 12  # one of this many gates is relaxed at a time
WARMUP_FRACTION = 1 / 2  # fraction of the rounds in which the power rises and estimates are not averaged
MIN_UPDATE_RATE = 0.2  # minimum weight of the latest estimate
INTERACTION_DRAWS = 32  # samples of rho over which the odds of pairs of gates are averaged


@dataclass(frozen=True)
class GatePosterior:
    """The posterior of the heads of one slice, or of all slices, with a dim of slices before the dim of heads.

    Args:
        rho: Samples of rho, `[draw, head]`.
        rho_error: The Monte Carlo error of the mean of rho, `[head]`; NaN if it is not known.
        log_bayes: The log Bayes factor of each head, `[head]`.
        error: The Monte Carlo error of `log_bayes`, `[head]`.
        inclusion: The probability of each gate, `[sentence, head]`.
        interaction: The mean log odds ratio of two gates of a sentence, `[head, head]`; None unless all settings were
            run.
        rhat: R-hat of rho, `[slice, head]`; None without chains.
    """

    rho: Tensor
    rho_error: Tensor
    log_bayes: Tensor
    error: Tensor
    inclusion: Tensor
    interaction: Tensor | None
    rhat: Tensor | None = None


def exact_gate_posterior(
    log_probs: Tensor, draws: int, generator: torch.Generator, update_progress: Callable[[int], object]
) -> GatePosterior:
    """Compute the gate posterior of one slice from `log P` of each sentence and setting, `[sentence, setting]`."""
    heads = int(math.log2(log_probs.shape[1]))
    halves = [split_by_gate(log_probs, head) for head in range(heads)]
    rho, evidence, mean_error = run_smc(log_probs, generator)
    update_progress(1)
    samples, log_integrals, inclusion = [], [], torch.zeros(len(log_probs), heads, dtype=torch.float64)
    rows = -(-draws // len(rho))
    for _ in range(rows):
        rho, log_integral, probs = _collapsed_gibbs_sweep(halves, rho, generator)
        samples.append(rho)
        log_integrals.append(log_integral)
        inclusion += probs / rows
    bayes_factors = torch.stack(
        [
            _log_bayes_factor(log_probs, half, head, by_head, evidence, generator, update_progress)
            for head, (half, by_head) in enumerate(zip(halves, torch.stack(log_integrals).unbind(-1), strict=True))
        ]
    )
    interaction = _interaction(log_probs, samples[-1][:: max(1, len(rho) // INTERACTION_DRAWS)])
    log_bayes, error = bayes_factors.unbind(1)
    rho = torch.cat(samples)[:draws]
    rho_error = torch.hypot(mean_error, rho.std(0, correction=0) / draws**0.5)
    return GatePosterior(rho, rho_error, log_bayes, error, inclusion, interaction)


def _collapsed_gibbs_sweep(
    halves: list[tuple[Tensor, Tensor]], rho: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one Gibbs sweep over rho, with the gates summed out.

    Returns:
        The new samples, `[draw, head]`; the log integral of each conditional density, `[draw, head]`; the mean of
        the gates, `[sentence, head]`.
    """
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
    """Compute the log Bayes factor of a head and its error; `log_integrals` are over the posterior, `[row, draw]`."""
    log_probs_off = log_probs.reshape(len(log_probs), -1, 2, 2**head)[:, :, 0].flatten(1)
    (rho, evidence_off, _), samples = run_smc(log_probs_off, generator), []
    for _ in range(len(log_integrals)):
        rho = gibbs_step(log_probs_off, rho, generator)
        samples.append(sample_rho(log_likelihood_ratio(*half, rho), 1, generator)[1])
    update_progress(1)
    rows = torch.stack(samples)
    by_population = zip(rows.chunk(NUM_POPULATIONS, 1), log_integrals.chunk(NUM_POPULATIONS, 1), strict=True)
    bridges = torch.stack([bridge_sampling(off.flatten(), free.flatten()) for off, free in by_population])
    # Given the other rho, the integral I of the conditional density over rho_nu, relative to its value at 0, is a Bayes
    # factor. The Bayes factor of the head is the mean of I over the posterior with rho_nu = 0, and also one over the
    # mean of 1 / I over the posterior with free rho_nu. Bridge sampling combines both (Bennett 1976, Efficient
    # estimation of free energy differences). If they do not overlap, the ratio of the SMC evidences is used.
    low, high = log_mean_exp(rows.flatten()), -log_mean_exp(-log_integrals.flatten())
    if float(high - low) > MAX_BRIDGE_GAP:
        error = (evidence - evidence_off).std() / NUM_POPULATIONS**0.5
        return torch.stack([log_mean_exp(evidence) - log_mean_exp(evidence_off), error])
    # The two estimates are biased in opposite directions.
    error = torch.hypot(bridges.std() / NUM_POPULATIONS**0.5, (high - low) / 4)
    return torch.stack([bridge_sampling(rows.flatten(), log_integrals.flatten()), error])


def bridge_sampling(restricted: Tensor, free: Tensor) -> Tensor:
    """Estimate the log mean of e^x under `rho_nu = 0`, from samples of x with `rho_nu = 0` and with free `rho_nu`."""
    # Fixed-point iteration of Meng and Wong 1996 (Simulating ratios of normalizing constants), for equal sample sizes.
    estimate = (log_mean_exp(restricted) - log_mean_exp(-free)) / 2
    for _ in range(50):
        log_off = log_mean_exp(restricted - torch.logaddexp(restricted, estimate))
        estimate = log_off - log_mean_exp(-torch.logaddexp(free, estimate))
    return estimate


def log_mean_exp(log_values: Tensor) -> Tensor:
    """Compute the log of the mean of e^x."""
    return log_values.logsumexp(0) - math.log(len(log_values))


def _interaction(log_probs: Tensor, rho: Tensor) -> Tensor:
    """Compute the log odds ratio of each pair of gates, averaged over sentences and samples, `[head, head]`.

    The diagonal is zero. Given rho, gates that enter the likelihood independently have an odds ratio of exactly 1.
    """
    heads, bits = rho.shape[1], gate_settings(rho.shape[1])
    result = torch.zeros(heads, heads, dtype=torch.float64)
    for prior in log_prior(rho):
        log = log_probs + prior
        for a in range(heads):
            for b in range(a):
                off, only_a, only_b, both = (
                    log[:, (bits[:, a] == x) & (bits[:, b] == y)].logsumexp(1)
                    for x, y in ((0, 0), (1, 0), (0, 1), (1, 1))
                )
                result[a, b] += (both + off - only_a - only_b).mean() / len(rho)
    return result + result.T


def gate_settings(num_heads: int) -> Tensor:
    """Return all gate settings, `[2^heads, heads]`; in the last one all gates are on.

    >>> gate_settings(2)
    tensor([[0., 0.],
            [1., 0.],
            [0., 1.],
            [1., 1.]], dtype=torch.float64)
    """
    return (torch.arange(2**num_heads)[:, None] >> torch.arange(num_heads) & 1).double()


def run_smc(log_probs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sample rho by sequential Monte Carlo.

    Args:
        log_probs: `log P` of each sentence and setting, `[sentence, setting]`.
        generator: The random generator.

    Returns:
        The samples, `[draw, head]`; the estimate of the log evidence by each population, `[population]`; and the Monte
        Carlo error of the mean of rho, `[head]`.
    """
    # Sequential Monte Carlo sampler (Del Moral, Doucet and Jasra 2006) on the tempered densities
    # `prod_s sum_xi P(xi | rho) P(y_s | xi)^power`. Power 0 is the prior, so every mode has samples; power 1 is the
    # posterior. Gibbs moves leave each density invariant, so the product of the mean weights estimates the evidence.
    # The next power is the largest at which the effective sample size is high enough.
    heads = int(math.log2(log_probs.shape[1]))
    rho = torch.rand(NUM_POPULATIONS * POPULATION_SIZE, heads, generator=generator, dtype=torch.float64)
    rho = rho.clamp(MIN_RHO, 1 - MIN_RHO)
    evidence, power = torch.zeros(NUM_POPULATIONS, dtype=torch.float64), 0.0
    log = tempered_log_likelihood(log_probs, rho, power)
    while power < 1:
        power, next_log = _next_power(log_probs, rho, power, log)
        weight = (next_log - log).reshape(NUM_POPULATIONS, POPULATION_SIZE)
        evidence += weight.logsumexp(1) - math.log(POPULATION_SIZE)
        rho = gibbs_step(power * log_probs, rho[_resample(weight, generator)], generator)
        log = tempered_log_likelihood(log_probs, rho, power)
    # The mean of rho is a ratio of estimates, sum_k Z_k m_k / sum_k Z_k, over populations with evidence Z_k and mean
    # m_k. Its error is that of the delta method. Populations are independent, so it includes the error of the weights
    # of modes between which the moves do not mix.
    shares, means = evidence.softmax(0), rho.reshape(NUM_POPULATIONS, POPULATION_SIZE, heads).mean(1)
    deviations = shares[:, None] * (means - shares @ means)
    mean_error = (deviations.square().sum(0) * NUM_POPULATIONS / (NUM_POPULATIONS - 1)).sqrt()
    # Mix the populations in proportion to their evidence estimates, by systematic resampling.
    count = NUM_POPULATIONS * POPULATION_SIZE
    positions = (torch.arange(count) + torch.rand(1, generator=generator, dtype=torch.float64)) / count
    population = torch.searchsorted(evidence.softmax(0).cumsum(0), positions).clamp(max=NUM_POPULATIONS - 1)
    selected = population * POPULATION_SIZE + torch.arange(count) % POPULATION_SIZE
    return rho[selected[torch.randperm(count, generator=generator)]], evidence, mean_error


def tempered_log_likelihood(log_probs: Tensor, rho: Tensor, power: float) -> Tensor:
    """Compute `sum_s log sum_xi P(xi | rho) P(y_s | xi)^power` of each sample."""
    maximum = log_probs.amax(1, keepdim=True)
    scaled = (power * (log_probs - maximum)).exp()
    return (log_prior(rho).exp() @ scaled.T).log().sum(1) + power * maximum.sum()


def gibbs_step(log_probs: Tensor, rho: Tensor, generator: torch.Generator) -> Tensor:
    """Take Gibbs steps: sample the gates of each sentence given rho, then rho given the gates."""
    rho, halves = rho.clone(), [split_by_gate(log_probs, head) for head in range(rho.shape[1])]
    for head, half in [*enumerate(halves)] * GIBBS_SWEEPS:
        ratio = log_likelihood_ratio(*half, drop_head(rho, head))
        probs = torch.sigmoid(ratio + torch.logit(rho[:, head])[:, None])
        num_on = (torch.rand(probs.shape, generator=generator, dtype=torch.float64) < probs).sum(1)
        # A sample of Beta(1 + on, 1 + off) as a ratio of gamma variables, because these accept a generator.
        counts = (1.0 + num_on.double(), 1.0 + (len(log_probs) - num_on).double())
        on, off = (torch._standard_gamma(count, generator=generator) for count in counts)
        rho[:, head] = (on / (on + off)).clamp(MIN_RHO, 1 - MIN_RHO)
    return rho


def split_by_gate(log_probs: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """Split `P(y_s | setting)` into the settings with a gate off and with the gate on.

    Returns:
        `[side, setting of the others, sentence]`, where each side is divided by its maximum so that neither underflows,
        and the logs of these maxima.
    """
    halves = log_probs.reshape(len(log_probs), -1, 2, 2**head).permute(2, 1, 3, 0).flatten(1, 2)
    maximum = halves.amax(1, keepdim=True)
    return (halves - maximum).exp(), maximum


def log_likelihood_ratio(halves: Tensor, scales: Tensor, rho: Tensor) -> Tensor:
    """Compute `log P(y_s | gate on) - log P(y_s | gate off)`, other gates summed out given rho, `[draw, sentence]`."""
    off, on = ((log_prior(rho).exp() @ halves).log() + scales).unbind()
    return on - off


def log_prior(rho: Tensor) -> Tensor:
    """Compute the log probability of each gate setting, `[draw, setting]`."""
    bits = gate_settings(rho.shape[1])
    return rho.log() @ bits.T + torch.log1p(-rho) @ (1 - bits).T


def drop_head(rho: Tensor, head: int) -> Tensor:
    """Return the rho of all other heads."""
    return rho[:, [k for k in range(rho.shape[1]) if k != head]]


def _next_power(log_probs: Tensor, rho: Tensor, power: float, log_likelihoods: Tensor) -> tuple[float, Tensor]:
    """Find the next power, with a large enough effective sample size, and the log likelihood at this power."""
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
    """Return the minimum over populations of the effective sample size, as a fraction of the population."""
    weights = log_weights.reshape(NUM_POPULATIONS, POPULATION_SIZE).softmax(1)
    return float((1 / weights.square().sum(1)).min()) / POPULATION_SIZE


def _resample(log_weights: Tensor, generator: torch.Generator) -> Tensor:
    """Resample systematically within each population; return the indices of the selected samples."""
    start = torch.rand(NUM_POPULATIONS, 1, generator=generator, dtype=torch.float64)
    positions = (torch.arange(POPULATION_SIZE) + start) / POPULATION_SIZE
    indices = torch.searchsorted(log_weights.softmax(1).cumsum(1), positions).clamp(max=POPULATION_SIZE - 1)
    return (indices + POPULATION_SIZE * torch.arange(NUM_POPULATIONS)[:, None]).flatten()


def sample_rho(
    log_ratios: Tensor, num_samples: int, generator: torch.Generator, ranks: DistributedContext = SINGLE_PROCESS
) -> tuple[Tensor, Tensor]:
    """Sample rho from the density `prod_s (1 - rho + rho e^ratio_s)` of each row, and compute its log integral.

    Args:
        log_ratios: The log likelihood ratios, `[row, sentence]`; each rank passes those of its sentences.
        num_samples: The number of samples of each row.
        generator: The random generator; all ranks draw the same samples.
        ranks: The processes.

    Returns:
        The samples, `[row, draw]`, and the log integrals, `[row]`.
    """
    # The conditional density of one rho is log-concave and one-dimensional, so a grid around its mode integrates it.
    # Its piecewise linear interpolation is sampled by inversion: within a piece the cumulative is quadratic.
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
    """Compute `sum_s log(1 - rho + rho e^ratio_s)` of each row on a grid near its mode.

    Returns:
        The points and the values, `[row, point]`.
    """
    low = torch.zeros(len(log_ratios), 1, dtype=torch.float64)
    top = torch.ones_like(low)
    # The density is log-concave, so it is high on one interval. With many sentences this interval is narrow, so the
    # grid is refined until it has enough points there.
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
    """Return points of an interval, denser at its ends."""
    fractions = torch.sin(torch.linspace(0, math.pi / 2, count, dtype=torch.float64)).square()
    return low + (high - low) * fractions


def _log_density(log_ratios: Tensor, rho: Tensor) -> Tensor:
    """Compute the log density of each row at its points.

    The larger of the two terms of each sentence is factored out first, so that nothing overflows. The other term
    underflows only far below the mode.
    """
    total = torch.zeros_like(rho)
    for part in log_ratios.split(max(1, CHUNK_NUMEL // rho.numel()), 1):
        maximum = part.clamp(min=0)
        on, off = (part - maximum).exp()[:, :, None], (-maximum).exp()[:, :, None]
        total += torch.addcmul(off, on - off, rho[:, None, :]).log().sum(1) + maximum.sum(1, keepdim=True)
    return total


class _GateLogOdds:
    """`e_s` of each gate: the current value, and the mean and variance of the estimates after the warmup."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.current, self.num_updates = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        self.sum, self.squares, self.count = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))

    def update(self, sentence_ids: Tensor, is_relaxed: Tensor, slopes: Tensor, is_counted: bool) -> None:
        """Move the log odds of the relaxed gates towards the slopes."""
        self.num_updates[sentence_ids] += is_relaxed
        rate = (1 / self.num_updates[sentence_ids].clamp(min=1)).clamp(min=MIN_UPDATE_RATE)
        rate = torch.where(is_relaxed, rate, 0.0)
        self.current[sentence_ids] += rate * (slopes - self.current[sentence_ids])
        if is_counted:
            self.sum[sentence_ids] += torch.where(is_relaxed, slopes, 0.0)
            self.squares[sentence_ids] += torch.where(is_relaxed, slopes.square(), 0.0)
            self.count[sentence_ids] += is_relaxed

    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        """Return the mean estimate of each gate, and the variance of this mean."""
        mean = self.sum / self.count
        spread = (self.squares / self.count - mean.square()).clamp(min=0)
        return mean, spread / (self.count - 1).clamp(min=1)


def count_passes(num_gates: int) -> int:
    """Return the number of passes that relax each gate once."""
    return min(num_gates, RELAXATION_STRIDE)


def relaxed_gate_posterior(
    runs: GatedRuns,
    scale: float,
    rounds: int,
    draws: int,
    generator: torch.Generator,
    update_progress: Callable[[int], object],
) -> GatePosterior:
    """Compute the posterior of all gates by stochastic variational inference.

    Args:
        runs: The gated runs. The random numbers of a sentence do not depend on the number of ranks.
        scale: The factor by which `log P` of a run is multiplied.
        rounds: The number of rounds; a round relaxes each gate of each sentence once.
        draws: The number of samples of rho.
        generator: The random generator.
        update_progress: A function that receives the number of finished runs.
    """
    # The optimal e_s, given the other factors, is `E[log P(y_s | on) - log P(y_s | off)]` over the other gates, which
    # is the integral of d log P / d gate from off to on. A uniform relaxed gate samples that integral, and one backward
    # pass gives the slopes of all relaxed gates. A step towards them is a natural gradient step (Hoffman et al. 2013).
    # The estimate is biased by the gates that are relaxed together, one in RELAXATION_STRIDE. The optimal q(rho) is
    # `prod_s (1 - rho + rho exp e_s)`. Dependent gates have many optima, so the power of the likelihood rises from 0 to
    # 1 during the warmup, and the estimates after it are averaged.
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
        torch.full(shape[1:], torch.nan, dtype=torch.float64),  # the approximation has no error
        log_bayes.reshape(shape[1:]),
        error.reshape(shape[1:]),
        ranks.all_gather(inclusion.reshape(shape)),
        None,
    )


def _relaxed_slopes(
    runs: GatedRuns, part: CorpusPart, probabilities: Tensor, offset: int, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return which gates are relaxed in each sentence, and the gradient of `log P` with respect to all gates.

    A gate that is not relaxed is on with the probability in `probabilities`.
    """
    threshold, values = uniforms.unbind(1)
    gates, count = (threshold < probabilities).double(), probabilities[0].numel()
    offsets = torch.arange(count) + runs.ranks.global_indices(part.indices)[:, None] + offset
    is_relaxed = (offsets % count_passes(count) == 0).reshape(probabilities.shape)
    network = runs.module.network
    leaf = torch.where(is_relaxed, values, gates).to(network.device, network.dtype).requires_grad_()
    (slope,) = torch.autograd.grad(runs.gated_log_probs(part, leaf).sum(), leaf)
    return is_relaxed, slope.double().cpu()
