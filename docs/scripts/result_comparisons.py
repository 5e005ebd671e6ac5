"""Print the table of docs/results.md: how often intervals and p values of `a.compare(b)` are wrong, by simulation.

``python docs/scripts/result_comparisons.py`` draws pairs of results without a difference of means. For each kind of
data it prints the coverage of the 95% intervals, the share of cells with p at most 0.05, and the share of simulations
in which the adjusted p of any cell is at most 0.05.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bnet_transformer._core.stats import permutation_p, studentised_interval

NUM_CELLS, RESAMPLES, SIMULATIONS = 10, 400, 1000
Tables = tuple[np.ndarray, np.ndarray]


def make_means(draw: Callable[..., np.ndarray], generator: np.random.Generator, counts: tuple[int, int]) -> Tables:
    """Two tables of means: half of the variance of a cell is common to all cells of a sentence."""
    tables = []
    for count in counts:
        values = draw(generator, (NUM_CELLS, count)) + draw(generator, (1, count))
        tables.append(np.stack([values, np.ones_like(values)]))
    return tables[0], tables[1]


def make_paired(draw: Callable[..., np.ndarray], generator: np.random.Generator, count: int) -> Tables:
    """Two tables of means on the same sentences, whose difficulty is common to both."""
    first, second = make_means(draw, generator, (count, count))
    difficulty = 3 * generator.normal(size=count)
    first[0] += difficulty
    second[0] = difficulty  # the differences have the distribution of one table
    return first, second


def make_ratios(generator: np.random.Generator, count: int) -> Tables:
    """Two tables of faithfulness: each total effect is at least 0.2, and the circuit restores 70% of it, with noise."""
    total = 0.2 + generator.exponential(size=(1, count))
    noise = 0.3 * generator.normal(size=(2, NUM_CELLS, count))
    first, second = (np.stack([0.7 * total + part, np.broadcast_to(total, part.shape)]) for part in noise)
    return first, second


def draw_normal(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers."""
    return generator.normal(size=shape)


def draw_heavy(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers with heavy tails: Student's t with 3 degrees of freedom."""
    return generator.standard_t(3, size=shape)


def draw_skewed(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Skewed numbers: exponential, with mean 0."""
    return generator.exponential(size=shape) - 1


def make_unequal(generator: np.random.Generator, counts: tuple[int, int]) -> Tables:
    """Two data sets; the smaller one has three times the standard deviation."""
    first, second = make_means(draw_normal, generator, counts)
    first[0] *= 3
    return first, second


CASES: Mapping[str, tuple[bool, Callable[[np.random.Generator], Tables]]] = {
    "paired, normal differences, 10 sentences": (True, lambda g: make_paired(draw_normal, g, 10)),
    "paired, normal differences, 40 sentences": (True, lambda g: make_paired(draw_normal, g, 40)),
    "paired, heavy tails (t with 3 degrees), 20 sentences": (True, lambda g: make_paired(draw_heavy, g, 20)),
    "paired, skewed differences (exponential), 20 sentences": (True, lambda g: make_paired(draw_skewed, g, 20)),
    "paired, faithfulness (a ratio of means), 20 sentences": (True, lambda g: make_ratios(g, 20)),
    "two data sets, normal, 15 and 30 sentences": (False, lambda g: make_means(draw_normal, g, (15, 30))),
    "two data sets, skewed (exponential), 15 and 30": (False, lambda g: make_means(draw_skewed, g, (15, 30))),
    "two data sets, standard deviations 3 and 1, 15 and 30": (False, lambda g: make_unequal(g, (15, 30))),
}


def simulate(case: str, simulations: int = SIMULATIONS) -> dict[str, float]:
    """Simulate one kind of data: the coverage of the intervals, and the error rates of p and of the adjusted p."""
    paired, make_tables = CASES[case]
    generator = np.random.default_rng([*case.encode()])
    hits: list[Any] = []
    for seed in range(simulations):
        tables = make_tables(generator)
        low, high = studentised_interval(tables, paired, 0.95, RESAMPLES, seed)
        p, adjusted, _ = permutation_p(tables, paired, RESAMPLES, seed)
        is_covered = (low <= 0) & (high >= 0)
        hits.append((is_covered.mean(), (p <= 0.05).mean(), (adjusted <= 0.05).any()))
    return dict(zip(("coverage", "p", "adjusted p"), np.mean(hits, axis=0).tolist(), strict=True))


def main() -> None:
    """Print a row for each kind of data."""
    values = f"values ({SIMULATIONS:,} simulations of {NUM_CELLS} cells)"
    head = values, "coverage of 95%", "p ≤ 0.05", "any adjusted p ≤ 0.05"
    print(f"| {' | '.join(head)} |")
    print("|---|---|---|---|")
    for case in CASES:
        rates = simulate(case)
        print(f"| {case} | {' | '.join(f'{rate:.1%}' for rate in rates.values())} |", flush=True)


if __name__ == "__main__":
    main()
