"""Permutation tests and bootstrap intervals of the difference of two ratios of means, by cell.

With *paired* sentences (two models or checkpoints on the same sentences) the null hypothesis is that both results of a
sentence have the same joint distribution when they are exchanged: a resample exchanges the results of random sentences,
which for a mean is a random sign of each difference. With *unpaired* sentences (two data sets) it is that all sentences
have one distribution: a resample divides them at random. The statistic is studentised, so that it stays valid to first
order if only the means are equal (Chung and Romano 2013), and so that cells have one scale: the adjusted p of a cell
compares it with the maximum over all cells (max-T, Westfall and Young 1993).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bnet_transformer._core.arrays import FloatArray

MAX_CHUNK_NUMEL = 2**22  # numbers of resampled tables at once
TIE_MARGIN = 1e-9  # statistics from 0 to 1 that differ by no more are equal


def estimate_ratio(table: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The ratio of the means of numerators and denominators, and the influence of each sentence on it.

    Args:
        table: Numerators and denominators, `[..., 2, cell, sentence]`.

    Returns:
        The ratio, `[..., cell]`, and its influence values (delta method), `[..., cell, sentence]`, whose mean is 0.
    """
    numerators, denominators = table[..., 0, :, :], table[..., 1, :, :]
    with np.errstate(divide="ignore", invalid="ignore"):  # the effects of a resample can cancel
        scale = denominators.mean(-1, keepdims=True)
        ratio = numerators.mean(-1, keepdims=True) / scale
        return ratio[..., 0], (numerators - ratio * denominators) / scale


def count_permutations(counts: Sequence[int], paired: bool) -> int:
    """The number of distinct permutations of the test."""
    return 2 ** counts[0] if paired else math.comb(sum(counts), counts[0])


def permutation_p(
    tables: Sequence[FloatArray], paired: bool, resamples: int, seed: int
) -> tuple[FloatArray, FloatArray, bool]:
    """The permutation p value of each cell, and its max-T adjustment.

    Args:
        tables: Numerators and denominators of both results, `[2, cell, sentence]` each.
        paired: Whether the sentences are the same.
        resamples: The maximum number of permutations.
        seed: The seed of the permutations.

    Returns:
        The p values, the adjusted p values, `[cell]` each, and whether all permutations were computed.
    """
    from scipy.stats import permutation_test  # slow to import

    samples: tuple[FloatArray, ...] = tuple(tables)
    statistic: Callable[..., FloatArray] = functools.partial(_studentise, paired=paired)
    if paired and all((table[1] == 1).all() for table in tables):
        # For means, |t| is monotone in |mean| / (root mean square), and sign flips do not change the mean square.
        differences = tables[0][0] - tables[1][0]
        scale = np.sqrt(np.square(differences).mean(-1, keepdims=True))
        samples = (np.divide(differences, scale, out=np.zeros_like(differences), where=scale > 0),)
        statistic = _mean_magnitude
    result = permutation_test(
        samples,
        statistic,
        permutation_type="samples" if paired else "independent",
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, MAX_CHUNK_NUMEL // sum(sample.size for sample in samples)),
        alternative="greater",
        axis=-1,
        random_state=np.random.default_rng(seed),
    )
    is_exact = count_permutations([table.shape[-1] for table in tables], paired) <= resamples
    is_finite = np.isfinite(estimate_ratio(tables[0])[0] - estimate_ratio(tables[1])[0])
    null, observed = result.null_distribution, np.asarray(result.statistic)
    greatest = null[:, is_finite].max(1, initial=0.0, keepdims=True)
    extra = 0 if is_exact else 1  # the observed value counts as one of the draws

    def count_p(statistics: FloatArray) -> FloatArray:
        # Equal statistics, which are from 0 to 1, differ by rounding. The tolerance of scipy's p value is relative, so
        # that ties of a statistic of zero are lost.
        num_extreme = (statistics >= observed - TIE_MARGIN).sum(0)
        return np.where(is_finite, (num_extreme + extra) / (len(null) + extra), np.nan)

    return count_p(null), count_p(greatest), is_exact


def _mean_magnitude(differences: FloatArray, axis: int) -> FloatArray:
    """The absolute mean of differences over the last dim."""
    magnitude: FloatArray = np.abs(differences.mean(axis))
    return magnitude


def _studentise(first: FloatArray, second: FloatArray, axis: int, *, paired: bool) -> FloatArray:
    """A monotone function of |t| of the difference of two ratios of means, `[..., cell]`, from 0 to 1."""
    (estimate, influence), (other, other_influence) = estimate_ratio(first), estimate_ratio(second)
    parts = [influence - other_influence] if paired else [influence, other_influence]
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.sum([part.var(axis, ddof=1) / part.shape[axis] for part in parts], axis=0)
        difference = estimate - other
        # |t| / sqrt(1 + t^2) is finite also if all differences are equal.
        bounded = np.abs(difference) / np.sqrt(variance + np.square(difference))
    is_zero = (difference == 0) & (variance == 0)
    return np.where(is_zero, 0.0, np.nan_to_num(bounded, nan=1.0, posinf=1.0))


def studentised_interval(
    tables: Sequence[FloatArray], paired: bool, confidence: float, resamples: int, seed: int
) -> tuple[FloatArray, FloatArray]:
    """The studentised bootstrap interval (bootstrap-t) of the difference of two ratios of means.

    It resamples the influence values of the sentences. It holds its level better than percentiles if values are skewed
    or sentences are few (Davison and Hinkley 1997, section 5.2).

    Args:
        tables: Numerators and denominators of both results, `[2, cell, sentence]` each.
        paired: Whether the sentences are the same.
        confidence: The confidence level.
        resamples: The number of resamples.
        seed: The seed of the resamples.

    Returns:
        The lower and the upper ends, `[cell]` each.
    """
    (first, influence), (second, other_influence) = (estimate_ratio(table) for table in tables)
    parts = [influence - other_influence] if paired else [influence, -other_influence]
    generator = np.random.default_rng(seed)
    weights = []
    for part in parts:
        count = part.shape[-1]
        weights.append(generator.multinomial(count, np.full(count, 1 / count), resamples).T / count)
    error = np.sqrt(sum(part.var(-1, ddof=1) / part.shape[-1] for part in parts))
    tail = (1 - confidence) / 2
    ends = np.full((2, len(first)), np.nan)
    step = max(1, MAX_CHUNK_NUMEL // resamples)
    for start in range(0, len(first), step):
        rows = slice(start, start + step)
        mean: Any = 0.0
        variance: Any = 0.0
        for part, weight in zip(parts, weights, strict=True):
            centre = part[rows] @ weight
            mean, count = mean + centre, part.shape[-1]
            variance = variance + np.maximum(np.square(part[rows]) @ weight - np.square(centre), 0) / (count - 1)
        floor = 1e-9 * error[rows, None]
        with np.errstate(invalid="ignore"):  # NaN for a cell whose estimate is not finite
            t = np.divide(mean, np.sqrt(variance), out=np.zeros_like(mean), where=np.sqrt(variance) > floor)
            ends[:, rows] = np.quantile(t, (1 - tail, tail), axis=1)
    low, high = first - second - ends * error
    return low, high
