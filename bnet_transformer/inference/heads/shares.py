"""The posterior of shares: what is to be expected of the next reading, given soft readings of units (sentences, words).

    theta = E[y]      y_1, ..., y_N ~ F      F ~ DP(alpha, ..., alpha at the corners of the simplex)

Given the readings F is a Dirichlet process too, with the readings as atoms beside the corners. The mean and the
variance of `theta_r` under it are exact; intervals and tails are those of the Beta that has them. Where every reading
is a corner that is the marginal of Dirichlet(alpha + counts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from bnet_transformer._core.distributed import ALONE, Ranks
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer.tpm.arrays import in_numpy

Numbers = NDArray[np.float64]


@dataclass
class Tally:
    """Sums over the readings so far, `[slice, head, relation]`, and draws of `theta`, each by weights of its own.

    The weights are made of random numbers that each sentence has for itself, in whatever order and wherever it comes.
    Under torchrun each rank has sums over its share until they are put `together`.
    """

    shape: tuple[int, int, int]
    alpha: float
    draws: int
    seed: int
    ranks: Ranks = ALONE
    units: int = 0
    total: Numbers = field(init=False)
    squares: Numbers = field(init=False)
    chance: Numbers = field(init=False)
    drawn: Numbers = field(init=False)
    weight: Numbers = field(init=False)

    def __post_init__(self) -> None:
        slices, heads, relations = self.shape
        self.total, self.squares = np.zeros(self.shape), np.zeros(self.shape)
        self.chance = np.zeros((slices, relations))
        corners = np.random.default_rng(self.seed).standard_gamma(self.alpha, (self.draws, relations))
        corners = corners if self.ranks.first else np.zeros_like(corners)
        self.weight = corners.sum(1)
        self.drawn = np.tile(corners, (1, slices * heads))

    def add(
        self,
        codes: Tensor,
        readings: Sequence[Tensor],
        masks: Sequence[Tensor],
        unit: str,
        which: Sequence[int] | None = None,
    ) -> None:
        """Sentences of one length: the relation of each pair of words, `[sentence, i, j]`; `P(j | i)` of each slice,
        `[head, sentence, i, j]`; who may be read, `[i, j]`; and their numbers, by default the first ones."""
        which = range(len(codes)) if which is None else which
        held = torch.nn.functional.one_hot(codes, self.shape[2]).double()
        y = torch.stack([torch.einsum("hsij,sijr->sihr", each.double(), held) for each in readings])
        u = torch.stack(
            [torch.einsum("ij,sijr->sir", mask.double() / mask.sum(-1, keepdim=True), held) for mask in masks]
        )
        y, u = (y.mean(2), u.mean(2)) if unit == "sentence" else (y.flatten(1, 2), u.flatten(1, 2))
        each = in_numpy(y.transpose(0, 1))  # [unit, slice, head, relation]
        self.total += each.sum(0)
        self.squares += np.square(each).sum(0)
        self.chance += in_numpy(u.sum(1))
        own = len(each) // len(which)
        weights = np.concatenate([self._weights(sentence, own) for sentence in which])
        self.weight += weights.sum(0)
        self.drawn += weights.T @ each.reshape(len(each), -1)
        self.units += len(each)

    def _weights(self, sentence: int, units: int) -> Numbers:
        """The weights of a sentence's units in each draw, `[unit, draw]`."""
        own = np.random.default_rng(derive_seed(self.seed, "reading", sentence))
        return own.standard_exponential((units, self.draws))

    def together(self) -> Tally:
        """The sums of all ranks."""
        if self.ranks.world == 1:
            return self
        for name in ("total", "squares", "chance", "weight", "drawn"):
            setattr(self, name, self.ranks.all_reduce(torch.from_numpy(getattr(self, name))).numpy())
        self.units = sum(self.ranks.all_gather_object(self.units))
        return self

    def posterior(self, interval: float) -> dict[str, Tensor]:
        """Means, ends of intervals, spreads, counts, chance, who is above it and who is on top, by name."""
        relations, units = self.shape[2], self.units
        prior = self.alpha * relations
        chance = np.broadcast_to(self.chance[:, None] / units, self.shape)
        mean = (self.alpha + self.total) / (prior + units)
        variance = ((self.alpha + self.squares) / (prior + units) - np.square(mean)) / (prior + units + 1)
        sure = mean * (1 - mean) / variance - 1
        a, b = mean * sure, (1 - mean) * sure
        tail = (1 - interval) / 2
        theta = self.drawn.reshape(self.draws, *self.shape) / self.weight[:, None, None, None]
        best = np.where(chance > 0, theta - chance, -np.inf).argmax(-1)
        found = {
            "mean": mean,
            "low": special.betaincinv(a, b, tail),
            "high": special.betainccinv(a, b, tail),
            "spread": np.sqrt(np.clip(self.squares / units - np.square(self.total / units), 0, None)),
            "counts": self.total,
            "chance": chance.copy(),
            "above": np.where((chance > 0) & (chance < 1), special.betaincc(a, b, chance), np.nan),
            "top": np.stack([(best == r).mean(0) for r in range(relations)], -1),
        }
        return {name: torch.from_numpy(value) for name, value in found.items()}
