"""How often 90% intervals of `bt.roles` hold a planted share: the table of `docs/roles.md`.

``python docs/scripts/role_intervals.py`` prints it; it takes some minutes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from bnet_transformer.attention.heads.head_roles import RelationStatistics

RELATIONS, TRUTHS, LEAST = 7, 400, 0.01
SENTENCES = (1, 10, 50, 200)
Numbers = NDArray[np.float64]
Draw = Callable[[np.random.Generator, Numbers, int], Numbers]


def one_relation(rng: np.random.Generator, theta: Numbers, words: int) -> Numbers:
    """All words of a sentence read by one relation, drawn from theta."""
    return np.tile(np.eye(RELATIONS)[rng.choice(RELATIONS, p=theta)], (words, 1))


def softly(rng: np.random.Generator, theta: Numbers, words: int) -> Numbers:
    """All words of a sentence read alike, softly, by shares that vary around theta."""
    return np.tile(rng.dirichlet(4 * theta + 1e-9), (words, 1))


def both(rng: np.random.Generator, theta: Numbers, words: int) -> Numbers:
    """Each word reads by one relation, drawn from shares of its sentence."""
    return np.eye(RELATIONS)[rng.choice(RELATIONS, words, p=rng.dirichlet(4 * theta + 1e-9))]


def apart(rng: np.random.Generator, theta: Numbers, words: int) -> Numbers:
    """Each word reads by one relation, drawn from theta whatever its sentence."""
    return np.eye(RELATIONS)[rng.choice(RELATIONS, words, p=theta)]


def held(rng: np.random.Generator, make: Draw, sentences: int) -> tuple[float, float]:
    """How often the intervals hold shares above 1 in 100, and how wide they are."""
    inside: list[bool] = []
    width: list[float] = []
    for _ in range(TRUTHS):
        theta = rng.dirichlet(np.full(RELATIONS, 0.5))
        tally = RelationStatistics((1, 1, RELATIONS), 1 / RELATIONS, 1, 0)
        lengths = rng.integers(5, 30, sentences)
        for words in np.unique(lengths).tolist():
            y = np.stack([make(rng, theta, words) for _ in range(int((lengths == words).sum()))])
            codes = torch.arange(RELATIONS).expand(len(y), words, RELATIONS)
            everyone = torch.ones(words, RELATIONS, dtype=torch.bool)
            tally.add(codes, [torch.from_numpy(y)[None]], [everyone], range(len(y)))
        result = tally.posterior(0.9)
        low, high = (result[end][0, 0].numpy() for end in ("low", "high"))
        some = theta > LEAST
        inside += ((low <= theta) & (theta <= high))[some].tolist()
        width += (high - low)[some].tolist()
    return float(np.mean(inside)), float(np.mean(width))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    print("| a sentence reads | " + " | ".join(f"{n} sentence{'s' * (n > 1)}" for n in SENTENCES) + " |")
    print("|---|" + "---|" * len(SENTENCES))
    given = {"by one relation": one_relation, "softly": softly, "softly, each word by one": both, "as any other": apart}
    for name, make in given.items():
        cells = [held(rng, make, n) for n in SENTENCES]
        print(f"| {name} | " + " | ".join(f"{share:.0%} ({width:.3f})" for share, width in cells) + " |")


if __name__ == "__main__":
    main()
