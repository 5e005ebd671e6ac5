"""Simultaneous confidence bands for the empirical distribution function (ECDF) of uniform numbers, and exact p values.

Under the hypothesis, the number of N uniform values that are at most z is Binomial(N, z) at each point z. A band of
binomial intervals that contains the whole ECDF with a given probability needs wider intervals than each point on its
own (Säilynoja, Bürkner and Vehtari 2022, "Graphical test for discrete uniformity and its applications in
goodness-of-fit evaluation and multiple sample comparison").
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

FloatArray = NDArray[np.float64]
MAX_POINTS = 100  # the maximum number of points at which an ECDF is evaluated


def get_points(count: int) -> FloatArray:
    """Return the points at which the ECDF of some values is evaluated: multiples of 1 / K between 0 and 1."""
    cells = min(count, MAX_POINTS)
    points: FloatArray = np.arange(1, cells) / cells
    return points


def count_below(values: FloatArray) -> NDArray[np.int64]:
    """Count the values that are at most each point, `[point]`."""
    return np.searchsorted(np.sort(values), get_points(len(values)), side="right").astype(np.int64)


@lru_cache(maxsize=16)
def _tail_probabilities(count: int) -> FloatArray:
    """Compute the two-sided tail probability of each number of values below each point, `[point, count + 1]`."""
    points, numbers = get_points(count)[:, None], np.arange(count + 1)
    lower = stats.binom.cdf(numbers, count, points)
    upper = stats.binom.sf(numbers - 1, count, points)
    tails: FloatArray = np.minimum(1.0, 2 * np.minimum(lower, upper))
    return tails


@lru_cache(maxsize=256)
def exceedance_probability(count: int, tail: float) -> float:
    """Compute the probability that the smallest tail probability of the ECDF of uniform values is at most `tail`.

    This is the p value of an ECDF whose smallest tail probability is `tail`.
    """
    # The numbers of uniform values in K equal cells are multinomial, which is K independent Poisson numbers given that
    # their sum is N. So the probability that all partial sums stay in their intervals is a product of convolutions with
    # one Poisson distribution, each followed by a truncation, divided by the Poisson probability of N (the exact
    # algorithm of Moscovich and Nadler 2017, "Fast calculation of boundary crossing probabilities for Poisson
    # processes", on a grid). No simulation is needed.
    inside = _tail_probabilities(count) > tail
    numbers = np.arange(count + 1)
    increments = stats.poisson.pmf(numbers, count / (len(inside) + 1))
    density = np.zeros(count + 1)
    density[0] = 1.0
    for row in inside:
        density = np.convolve(density, increments)[: count + 1] * row
    total = float(density @ increments[::-1])  # the last cell contains the other values
    return max(0.0, 1.0 - total / float(stats.poisson.pmf(count, count)))


def smallest_tail(values: FloatArray) -> float:
    """Compute the smallest tail probability of the ECDF of some values over all points."""
    tails = _tail_probabilities(len(values))
    return float(tails[np.arange(len(tails)), count_below(values)].min())


def ecdf_p_value(values: FloatArray) -> float:
    """Compute the probability that the ECDF of uniform values is at least as extreme as that of `values`."""
    return exceedance_probability(len(values), smallest_tail(values))


@lru_cache(maxsize=64)
def simultaneous_band(count: int, error: float) -> tuple[FloatArray, FloatArray]:
    """Compute the band that the ECDF of uniform values leaves with a probability of at most `error`.

    Returns:
        The lowest and the highest ECDF in the band at each point, both `[point]`.
    """
    tails = _tail_probabilities(count)
    levels = np.unique(tails)
    low, high = -1, len(levels) - 1  # the widest band has no level; the narrowest excludes everything
    while high - low > 1:
        middle = (low + high) // 2
        if exceedance_probability(count, float(levels[middle])) <= error:
            low = middle
        else:
            high = middle
    inside: Any = tails > (levels[low] if low >= 0 else -1.0)
    return inside.argmax(1) / count, (count - inside[:, ::-1].argmax(1)) / count
