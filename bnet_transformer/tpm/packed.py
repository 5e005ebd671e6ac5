"""Matrices kept as the vector of their free entries: skew-symmetric and strictly triangular ones, of `d (d-1)/2`.

The vector holds the entries below the diagonal row by row, `L_21, L_31, L_32, L_41, ...`; of an upper triangle it holds
those of the transpose, `U_12, U_13, U_23, U_14, ...`; of a skew matrix those below, the ones above are their negatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from bnet_transformer.errors import number, one_of, put, whole
from bnet_transformer.tpm.base import TPM, At, Parameter, Parent, Product, Shape, vector
from bnet_transformer.tpm.linear import apply
from bnet_transformer.tpm.steps import ACTIVATIONS, LATEX
from bnet_transformer.tpm.symbols import Symbols


def packed_size(dim: int) -> int:
    """How many entries of a matrix stand below its diagonal."""
    return dim * (dim - 1) // 2


def lower(packed: Tensor, dim: int) -> Tensor:
    """The strictly lower triangular matrix `[..., dim, dim]` of a vector `[..., dim (dim-1)/2]`.

    >>> lower(torch.tensor([1., 2., 3.]), 3)
    tensor([[0., 0., 0.],
            [1., 0., 0.],
            [2., 3., 0.]])
    """
    i = torch.arange(dim, device=packed.device)
    row, column = i[:, None], i[None, :]
    below = column < row
    place = torch.where(below, row * (row - 1) // 2 + column, 0)
    return torch.where(below, packed[..., place], 0.0)


@final
@dataclass(frozen=True)
class Skew(TPM):
    """A learnable skew-symmetric root, `A = S - S^T` with S strictly lower triangular; starts normal with `spread`.

    >>> Skew(3).parameters()["packed"].shape
    (3,)
    """

    dim: int
    spread: float | None = None
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        put(self, dim=whole("dim", self.dim, least=2))
        if self.spread is not None:
            put(self, spread=number("spread", self.spread, above=0))

    def shape(self, *parents: Parent) -> Shape:
        return (self.dim, self.dim)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return {"packed": Parameter((packed_size(self.dim),), _spread(self.spread, self.dim))}

    def value(self, at: At, *parents: Tensor) -> Tensor:
        S = lower(at["packed"], self.dim)
        return S - S.mT

    def latex(self, s: Symbols) -> str:
        s.only("word")
        value = s.own.decorated("hat")
        s.define(rf"{value.T} = -{value}")
        return s.delta(value)


@final
@dataclass(frozen=True)
class Triangular(TPM):
    """`x + s(L x + b)` with L strictly lower triangular (or `"upper"`): its Jacobian determinant is 1 for any s.

    >>> sorted((name, p.shape) for name, p in Triangular("upper").parameters(Parent("x", (3,))).items())
    [('bias', (3,)), ('packed', (3,))]
    """

    side: str = "lower"
    activation: str = "tanh"
    bias: bool = True
    spread: float | None = None
    slots: ClassVar[tuple[str, ...]] = ("x",)

    def __post_init__(self) -> None:
        one_of("side", self.side, ("lower", "upper"))
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("bias", self.bias, (True, False))
        if self.spread is not None:
            put(self, spread=number("spread", self.spread, above=0))

    def shape(self, *parents: Parent) -> Shape:
        return (vector(parents[0]),)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        (width,) = self.shape(*parents)
        found = {"packed": Parameter((packed_size(width),), _spread(self.spread, width))}
        return found | ({"bias": Parameter((width,), fill=0.0)} if self.bias else {})

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        (width,) = self.shape(*parents)
        return (Product(parents, (width, width), own=True),)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        (x,) = parents
        L = lower(at["packed"], x.shape[-1])
        W = L if self.side == "lower" else L.mT
        return x + ACTIVATIONS[self.activation](apply(W, x, at["bias"] if self.bias else None))

    def latex(self, s: Symbols) -> str:
        W = s.parameter("L" if self.side == "lower" else "U")
        s.define(rf"\text{{every }} {W.base} \text{{ is strictly {self.side} triangular}}")
        inner = s.map(W, s.of("x", "b")) + (s.plus(s.parameter("b")) if self.bias else "")
        activate = LATEX[self.activation]
        return s.equals(f"{s.of('x')} + " + (f"{activate}({inner})" if activate else inner))


def _spread(spread: float | None, dim: int) -> float:
    return float(dim**-0.5) if spread is None else spread
