"""Biases by distance: what is added to the score of words i and j for how far apart they stand."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, one_of, put, whole
from bnet_transformer.tpm.base import Parent, broadcast, vector
from bnet_transformer.tpm.notation import scripts
from bnet_transformer.tpm.symbols import Symbol, Symbols


@dataclass(frozen=True)
class Bias(abc.ABC):
    """A bias `b[d(j - i)]`, from a parent `b` of `width` numbers."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """How many numbers its parent has."""

    @abc.abstractmethod
    def bias(self, b: Tensor, i: Tensor, j: Tensor, *, from_key: bool = False) -> Tensor:
        """`[..., m]`: what is added to the score of query i and keys j, or (`from_key`) of key i and queries j."""

    @abc.abstractmethod
    def number(self, s: Symbols, distance: str) -> str:
        """Which number a distance has, in LaTeX; its definition goes to the symbols."""

    def check(self, b: Parent) -> None:
        """Refuse a table of another width."""
        vector(b, self.width, why="the numbers of a bias by distance")

    def latex(self, s: Symbols, read: str, *, from_key: bool = False) -> str:
        r"""`+ b_{d(j-i)}`, by the distance from query to key; in matrix forms a matrix of all pairs."""
        b, j = s.weight("b", ""), str(s.of(read).word)
        apart = f"{s.own.word}-{j}" if from_key else f"{j}-{s.own.word}"
        entry = b.with_sub(self.number(s, apart if s.own.word else j))
        if s.form in ("word", "einstein"):
            return f" + {entry}"
        table = Symbol("B", sup=(str(b),))
        s.define(rf"{table.entry('i', 'j')} = {entry}")
        return f" + {s.pairs(table)}"


@final
@dataclass(frozen=True)
class Relative(Bias):
    """A bias by distance, `b[clip(j - i, -limit, limit) + limit]`, from a parent `b` of 2 limit + 1 numbers.

    >>> Relative(1).bias(torch.tensor([9., 0., 1.]), torch.tensor(0), torch.arange(3))
    tensor([0., 1., 1.])
    """

    limit: int

    def __post_init__(self) -> None:
        put(self, limit=whole("limit", self.limit, least=0))

    @property
    def width(self) -> int:
        return 2 * self.limit + 1

    def bias(self, b: Tensor, i: Tensor, j: Tensor, *, from_key: bool = False) -> Tensor:
        apart = i[..., None] - j if from_key else j - i[..., None]
        distance = apart.clamp(-self.limit, self.limit) + self.limit
        if b.dim() == 1:
            return b[distance]
        batch = broadcast(b.shape[:-1], distance.shape[:-1])
        return b.expand(*batch, b.shape[-1]).gather(-1, distance.expand(*batch, distance.shape[-1]))

    def number(self, s: Symbols, distance: str) -> str:
        cut = scripts("", [str(self.limit)])
        s.define(rf"[\delta]{cut} = \min(\max(\delta, -{self.limit}), {self.limit})")
        return f"[{distance}]{cut}"


@final
@dataclass(frozen=True)
class Buckets(Bias):
    """A bias by distance in `count` buckets (Raffel et al. 2020): small distances have one each, larger ones share
    buckets that widen like logarithms, and all from `furthest` on share the last.

    Half of the buckets are for the words behind; not `two_sided`, all are for those before, as under a causal mask.

    >>> Buckets(4, furthest=8).bias(torch.arange(4.0), torch.tensor(1), torch.arange(4))
    tensor([1., 0., 3., 3.])
    """

    count: int = 32
    furthest: int = 128
    two_sided: bool = True

    def __post_init__(self) -> None:
        one_of("two_sided", self.two_sided, (True, False))
        put(self, count=whole("count of buckets", self.count, least=4 if self.two_sided else 2))
        put(self, furthest=whole("furthest", self.furthest))
        if self.furthest <= self._single:
            wanted = f"more than {self._single}, the distances with a bucket of their own"
            raise BNetError("furthest", expected=wanted, got=self.furthest)

    @property
    def width(self) -> int:
        return self.count

    @property
    def _side(self) -> int:
        """How many buckets one side has."""
        return self.count // 2 if self.two_sided else self.count

    @property
    def _single(self) -> int:
        """How many distances of a side have a bucket of their own."""
        return self._side // 2

    def bias(self, b: Tensor, i: Tensor, j: Tensor, *, from_key: bool = False) -> Tensor:
        return Relative(self.furthest).bias(b[..., self._of_each(b.device)], i, j, from_key=from_key)

    def _of_each(self, device: torch.device) -> Tensor:
        """The bucket of every distance from -furthest to furthest, in float32, as models are trained."""
        distance = torch.arange(-self.furthest, self.furthest + 1, device=device)
        far = distance.abs() if self.two_sided else (-distance).clamp(min=0)
        share = (far.clamp(min=self._single).float() / self._single).log() / math.log(self.furthest / self._single)
        wide = self._single + (share * (self._side - self._single)).long()
        found = torch.where(far < self._single, far, wide.clamp(max=self._side - 1))
        return found + self._side * (distance > 0) if self.two_sided else found

    def number(self, s: Symbols, distance: str) -> str:
        single, side = self._single, self._side
        cut = scripts("", [str(self.count), str(self.furthest)])
        far = r"|\delta|" if self.two_sided else r"\max(-\delta, 0)"
        behind = rf" + {side} \, [\delta > 0]" if self.two_sided else ""
        share = rf"\frac{{\ln(r / {single})}}{{\ln({self.furthest} / {single})}}"
        wide = rf"\min\left({side - 1}, {single} + \lfloor {side - single} \, {share} \rfloor\right)"
        cases = rf"r & r < {single} \\ {wide} & r \ge {single}"
        s.define(rf"\beta{cut}(\delta) = \begin{{cases}} {cases} \end{{cases}}{behind}, \; r = {far}")
        return rf"\beta{cut}({distance})"
