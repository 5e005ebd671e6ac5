"""How often 90% intervals of `bt.roles` contain a planted share: the table of `docs/roles.md`.

``python docs/scripts/role_intervals.py`` prints it; it takes some minutes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.attention.roles import estimate_shares

RELATIONS, TRUTHS, MIN_SHARE = 7, 400, 0.01
SENTENCES = (1, 10, 50, 200)
Numbers = NDArray[np.float64]
Draw = Callable[[np.random.Generator, Numbers, int], Numbers]


def sample_one_relation(rng: np.random.Generator, theta: Numbers, words: int) -> Numbers:
    """Sample sentences in which all words attend by one relation, drawn from theta."""
    return np.tile(np.eye(RELATIONS)[rng.choice(RELATIONS, p=theta)], (words, 1))


def sample_soft(rng: np.random.Generator, theta: Numbers, words: int) -> Numbers:
    """Sample sentences in which all words have the same soft weights, drawn around theta."""
    return np.tile(rng.dirichlet(4 * theta + 1e-9), (words, 1))


def sample_mixed(rng: np.random.Generator, theta: Numbers, words: int) -> Numbers:
    """Sample sentences in which each word attends by one relation, drawn from shares of its sentence."""
    return np.eye(RELATIONS)[rng.choice(RELATIONS, words, p=rng.dirichlet(4 * theta + 1e-9))]


def sample_independent(rng: np.random.Generator, theta: Numbers, words: int) -> Numbers:
    """Sample sentences in which each word attends by one relation, drawn from theta independently of its sentence."""
    return np.eye(RELATIONS)[rng.choice(RELATIONS, words, p=theta)]


def measure_coverage(rng: np.random.Generator, sample: Draw, sentences: int) -> tuple[float, float]:
    """Return the coverage of the intervals of shares above 1 in 100, and their mean width."""
    covered: list[bool] = []
    widths: list[float] = []
    for _ in range(TRUTHS):
        theta = rng.dirichlet(np.full(RELATIONS, 0.5))
        y = np.stack([sample(rng, theta, int(words)).mean(0) for words in rng.integers(5, 30, sentences)])
        chance = np.full((sentences, 1, RELATIONS), 1 / RELATIONS)
        result = estimate_shares(y[:, None, None], chance, 1 / RELATIONS, 0.9, 1, 0)
        low, high = (result[end][0, 0].numpy() for end in ("low", "high"))
        is_counted = theta > MIN_SHARE
        covered += ((low <= theta) & (theta <= high))[is_counted].tolist()
        widths += (high - low)[is_counted].tolist()
    return float(np.mean(covered)), float(np.mean(widths))


def main() -> None:
    """Print the table."""
    rng = np.random.default_rng(0)
    print("| a sentence reads | " + " | ".join(f"{n} sentence{'s' * (n > 1)}" for n in SENTENCES) + " |")
    print("|---|" + "---|" * len(SENTENCES))
    samplers = {
        "by one relation": sample_one_relation,
        "softly": sample_soft,
        "softly, each word by one": sample_mixed,
        "as any other": sample_independent,
    }
    for name, sample in samplers.items():
        cells = [measure_coverage(rng, sample, n) for n in SENTENCES]
        print(f"| {name} | " + " | ".join(f"{share:.0%} ({width:.3f})" for share, width in cells) + " |")


if __name__ == "__main__":
    main()
