"""Pareto-smoothed importance weights, their diagnostic k-hat, and resampling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_KHAT = 0.7  # above it, estimates by importance weights are unreliable (Vehtari et al. 2024)
MIN_TAIL = 5  # fewer weights have no tail whose shape can be estimated


def smooth_weights(log_weights: Tensor) -> tuple[Tensor, float]:
    """Smooth the largest importance weights by a generalised Pareto distribution.

    Args:
        log_weights: The logarithms of the weights, `[draw]`, up to a constant.

    Returns:
        The normalised weights, `[draw]`, and k-hat, the shape of the distribution of the largest weights. It is
        infinite if the tail has fewer than five weights or one that is not finite.
    """
    logs, khat = smooth_log_weights(log_weights)
    return logs.softmax(0), khat


def smooth_log_weights(log_weights: Tensor) -> tuple[Tensor, float]:
    """Smooth weights as `smooth_weights` does, but return their logarithms, not normalised, `[draw]`, and k-hat."""
    # Vehtari, Simpson, Gelman, Yao and Gabry 2024, "Pareto smoothed importance sampling", section 2: the M largest of S
    # weights, M = min(S / 5, 3 sqrt(S)), are replaced by the expected order statistics of a generalised Pareto
    # distribution that is fitted to them, and no weight exceeds the largest raw weight. The mean of the weights has a
    # finite variance only if the shape is below 1/2; below 0.7 it converges at a practical rate.
    largest = log_weights.max().double()
    logs = log_weights.double() - largest
    count = len(logs)
    tail = min(count // 5, math.ceil(3 * math.sqrt(count)))
    order = logs.argsort()
    khat = math.inf
    if tail >= MIN_TAIL and bool(logs.isfinite().any()):
        cutoff = logs[order[-tail - 1]].exp()
        excess = logs[order[-tail:]].exp() - cutoff
        if bool(excess[0] >= 0) and float(excess[-1]) > 0:
            shape, sigma = _fit_pareto(excess)
            if math.isfinite(shape):
                khat = shape
                probs = (torch.arange(tail, dtype=torch.float64, device=logs.device) + 0.5) / tail
                quantiles = (
                    torch.expm1(-khat * torch.log1p(-probs)) * (sigma / khat) if khat else -sigma * (-probs).log1p()
                )
                logs[order[-tail:]] = (cutoff + quantiles).log().clamp(max=0.0)
    return logs + largest, khat


def _fit_pareto(excess: Tensor) -> tuple[float, float]:
    """Estimate the shape and scale of a generalised Pareto distribution from ordered values of at least 0."""
    # Zhang and Stephens 2009: the profile likelihood of theta = -k / sigma is averaged over a grid. The shape is then
    # shrunk towards 1/2 with the weight of ten observations (Vehtari et al. 2024, appendix).
    n = len(excess)
    grid = 30 + int(math.sqrt(n))
    k = torch.arange(1, grid + 1, dtype=torch.float64, device=excess.device)
    quartile = excess[int(n / 4 + 0.5) - 1].clamp(min=torch.finfo(torch.float64).tiny)
    theta = 1 / excess[-1] + (1 - (grid / (k - 0.5)).sqrt()) / 3 / quartile
    shape = torch.log1p(-theta[:, None] * excess).mean(1)
    likelihood = n * ((-theta / shape).log() - shape - 1)
    weights = likelihood.nan_to_num(nan=-math.inf).softmax(0)
    mean = (weights * theta).sum()
    fitted = float(torch.log1p(-mean * excess).mean())
    return (n * fitted + 10 * 0.5) / (n + 10), -fitted / float(mean)


def estimate_log_mean(log_weights: Tensor) -> tuple[float, float, float]:
    """Estimate the logarithm of the mean importance weight: the log of the integral of an unnormalised density.

    Args:
        log_weights: The log of the unnormalised density minus the log density of the proposal, `[draw]`.

    Returns:
        The estimate by smoothed weights, its standard error, and k-hat.
    """
    # The relative variance of the mean of n weights is 1 / ESS - 1 / n with ESS = (sum w)^2 / sum w^2, which is the
    # variance of its logarithm (delta method).
    logs, khat = smooth_log_weights(log_weights)
    count = len(logs)
    variance = 1 / effective_sample_size(logs.softmax(0)) - 1 / count
    return float(logs.logsumexp(0)) - math.log(count), math.sqrt(max(variance, 0.0)), khat


def effective_sample_size(weights: Tensor) -> float:
    """Compute the number of equal weights with the same variance of estimates, from normalised weights (Kong 1992)."""
    return float(1 / weights.square().sum())


def resample(weights: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw indices in proportion to normalised weights, by systematic resampling, in random order, `[count]`."""
    # One uniform number determines n evenly spaced points on the cumulative weights. So a draw of weight w is taken
    # either floor(w n) or ceil(w n) times, and w n times on average: unbiased, and in practice with less variance than
    # multinomial resampling (Douc, Cappe and Moulines 2005).
    start = torch.rand((), generator=generator, dtype=torch.float64)
    points = (torch.arange(count, dtype=torch.float64) + start) / count
    indices = torch.searchsorted(weights.cpu().cumsum(0), points).clamp(max=len(weights) - 1)
    return indices[torch.randperm(count, generator=generator)].to(weights.device)
