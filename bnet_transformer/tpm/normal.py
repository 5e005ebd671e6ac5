"""The real-valued readout: a Normal around a word's vector, or around an affine map of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent
from torch.distributions import Normal as TorchNormal
from torch.nn import functional

from bnet_transformer.errors import whole
from bnet_transformer.tpm.base import TPM, At, Kind, Parameter, Parent, Product, Shape, single_axis, vector
from bnet_transformer.tpm.checks import Checks, choice, flag, optional, positive
from bnet_transformer.tpm.combine import POOLS, pooled, pooled_latex
from bnet_transformer.tpm.symbols import Symbols, raised


@final
@dataclass(frozen=True)
class Normal(TPM):
    """`y ~ N(x, sigma^2 I)`; with `dim`, `y ~ N(W x + b, sigma^2 I)` of that width. `pool` reads a whole sentence.

    `learnable=True` lets training change sigma, one for all features.

    >>> Normal(0.5).shape(Parent("x", (8,)))
    (8,)
    """

    sigma: float = 1.0
    dim: int | None = None
    learnable: bool = False
    pool: str | None = None
    kind: ClassVar[Kind] = "continuous"
    field_checks: ClassVar[Checks] = {
        "sigma": positive,
        "dim": optional(whole),
        "learnable": flag,
        "pool": choice(None, *POOLS),
    }

    def takes(self) -> tuple[str, ...]:
        return ("x.",) if self.pool else ("x",)

    def shape(self, *parents: Parent) -> Shape:
        width = vector(parents[0])
        if self.pool:
            single_axis(parents[0])
        return (width if self.dim is None else self.dim,)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        width = vector(parents[0])
        found = {"log_sigma": Parameter((), fill=math.log(self.sigma), learnable=self.learnable)}
        if self.dim is not None:
            found["weight"] = Parameter((self.dim, width), width**-0.5)
            found["bias"] = Parameter((self.dim,), fill=0.0)
        return found

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        return () if self.dim is None else (Product(parents, (self.dim, *parents[0].shape), own=True),)

    def mean(self, at: At, *parents: Tensor) -> Tensor:
        """`E[y | x]`."""
        x = pooled(self.pool, parents[0], at.mask["x."]) if self.pool else parents[0]
        if self.dim is None:
            return x
        return torch.einsum("...od,...d->...o", at["weight"], x) + at["bias"]

    def log_prob(self, at: At, value: Tensor, *parents: Tensor) -> Tensor:
        mean = self.mean(at, *parents)
        return self.log_density(at, squared_distance(value, mean), mean.shape[-1])

    def log_density(self, at: At, square: Tensor, numbers: int | Tensor) -> Tensor:
        """The log density of so many numbers at a squared distance from their mean."""
        log_sigma = at["log_sigma"]
        found: Tensor = -0.5 * (-2 * log_sigma).exp() * square - numbers * (log_sigma + 0.5 * math.log(2 * math.pi))
        return found

    def distribution(self, at: At, *parents: Tensor) -> Distribution:
        mean = self.mean(at, *parents)
        sigma = at["log_sigma"].exp()[..., None].expand(mean.shape)
        return Independent(TorchNormal(mean, sigma, validate_args=False), 1, validate_args=False)

    def latex(self, s: Symbols) -> str:
        letter = "a" if self.dim is None else "b"
        mean = pooled_latex(self.pool, s, "x.", letter) if self.pool else str(s.of("x", letter))
        if self.dim is not None:
            mean = s.map(s.parameter("W"), mean) + s.plus(s.parameter("b"))
        sigma = s.parameter(r"\sigma")
        variance = f"({sigma})^2" if self.learnable else "1" if self.sigma == 1 else raised(self.sigma, "2")
        unit = variance if s.form == "einstein" else "I" if variance == "1" else f"{variance} I"
        return rf"\mathcal{{N}}\left({s.own['a']};\; {mean},\; {unit}\right)"


def squared_distance(a: Tensor, b: Tensor, over: tuple[int, ...] = (-1,)) -> Tensor:
    """`|a - b|^2` of vectors, or of all numbers along some dims; the way back makes one tensor, where a difference and
    its square make three."""
    a, b = torch.broadcast_tensors(a, b)
    return functional.mse_loss(a, b, reduction="none").sum(over)
