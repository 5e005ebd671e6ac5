"""Linear maps of one parent: `W x` and `W x + b`, the matrix a parent (a weight node) or the TPM's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, put, whole
from bnet_transformer.tpm.base import TPM, At, Parameter, Parent, Product, Shape, matrix, vector
from bnet_transformer.tpm.symbols import Symbol, Symbols


@final
@dataclass(frozen=True)
class Linear(TPM):
    """`W x` with W a weight node: `1(v = W_v x)`. `Linear(dim)` owns its matrix and has the one parent x.

    >>> Linear().shape(Parent("W", (4, 8)), Parent("x", (8,)))
    (4,)
    """

    dim: int | None = None

    def __post_init__(self) -> None:
        if self.dim is not None:
            put(self, dim=whole("dim", self.dim))

    def takes(self) -> tuple[str, ...]:
        return ("W", "x") if self.dim is None else ("x",)

    @property
    def learnable(self) -> bool:
        return self.dim is not None

    def shape(self, *parents: Parent) -> Shape:
        return _shape(self.dim, parents)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return _own_matrix(self.dim, parents)

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        return _products(self.dim, parents)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        W = parents[0] if self.dim is None else at["weight"]
        return apply(W, parents[-1])

    def latex(self, s: Symbols) -> str:
        return s.equals(s.map(_matrix_of(self.dim, s), s.of("x")))


@final
@dataclass(frozen=True)
class Affine(TPM):
    """`W x + b` with W a weight node and b its own. `Affine(dim)` owns both and has the one parent x.

    >>> sorted(Affine(4).parameters(Parent("x", (8,))))
    ['bias', 'weight']
    """

    dim: int | None = None

    def __post_init__(self) -> None:
        if self.dim is not None:
            put(self, dim=whole("dim", self.dim))

    def takes(self) -> tuple[str, ...]:
        return ("W", "x") if self.dim is None else ("x",)

    def shape(self, *parents: Parent) -> Shape:
        return _shape(self.dim, parents)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return _own_matrix(self.dim, parents) | {"bias": Parameter(self.shape(*parents), fill=0.0)}

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        return _products(self.dim, parents)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        W = parents[0] if self.dim is None else at["weight"]
        return apply(W, parents[-1], at["bias"])

    def latex(self, s: Symbols) -> str:
        return s.equals(s.map(_matrix_of(self.dim, s), s.of("x")) + s.plus(s.parameter("b")))


def apply(W: Tensor, x: Tensor, b: Tensor | None = None) -> Tensor:
    """`W x (+ b)` for one vector or a batch of them."""
    if math.prod(W.shape[:-2]) == 1 and W.dim() <= x.dim() + 1 and (b is None or b.dim() == 1):
        return torch.nn.functional.linear(x, W.reshape(W.shape[-2:]), b)
    y = torch.einsum("...oi,...i->...o", W, x)
    return y if b is None else y + b


def _shape(dim: int | None, parents: tuple[Parent, ...]) -> Shape:
    if dim is not None:
        vector(parents[0])
        return (dim,)
    out, width = matrix(parents[0])
    if parents[1].shape != (width,) or parents[1].states is not None:
        raise BNetError(
            parents[1].name,
            expected=f"a vector of width {width} (the columns of {parents[0].name})",
            got=parents[1].form,
        )
    return (out,)


def _products(dim: int | None, parents: tuple[Parent, ...]) -> tuple[Product, ...]:
    """Of `W x`."""
    (out,), (width,) = _shape(dim, parents), parents[-1].shape
    return (Product(parents, (out, width), own=dim is not None),)


def _matrix_of(dim: int | None, s: Symbols) -> Symbol:
    return s.weight("W") if dim is None else s.parameter("W")


def _own_matrix(dim: int | None, parents: tuple[Parent, ...]) -> dict[str, Parameter]:
    if dim is None:
        return {}
    width = vector(parents[0])
    return {"weight": Parameter((dim, width), width**-0.5)}
