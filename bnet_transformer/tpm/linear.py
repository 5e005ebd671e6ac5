"""Linear maps of one parent: `W x` and `W x + b`, the matrix a parent (a weight node) or the TPM's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, whole
from bnet_transformer.tpm.base import TPM, At, Parameter, Parent, Product, Shape, matrix, vector
from bnet_transformer.tpm.checks import Checks, optional
from bnet_transformer.tpm.symbols import Symbols


@dataclass(frozen=True)
class _Map(TPM):
    """`W x`, and `+ b` where the kind has a bias; with `dim` the matrix is its own, of so many rows."""

    dim: int | None = None
    biased: ClassVar[bool] = False
    field_checks: ClassVar[Checks] = {"dim": optional(whole)}

    def takes(self) -> tuple[str, ...]:
        return ("W", "x") if self.dim is None else ("x",)

    @property
    def learnable(self) -> bool:
        return self.biased or self.dim is not None

    def shape(self, *parents: Parent) -> Shape:
        if self.dim is not None:
            vector(parents[0])
            return (self.dim,)
        W, x = parents
        out, width = matrix(W)
        if x.shape != (width,) or x.states is not None:
            wanted = f"a vector of width {width} (the columns of {W.name})"
            raise BNetError(x.name, expected=wanted, got=x.form)
        return (out,)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        found = {"bias": Parameter(self.shape(*parents), fill=0.0)} if self.biased else {}
        if self.dim is None:
            return found
        width = vector(parents[0])
        return {"weight": Parameter((self.dim, width), width**-0.5)} | found

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        (out,), (width,) = self.shape(*parents), parents[-1].shape
        return (Product(parents, (out, width), own=self.dim is not None),)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        W = parents[0] if self.dim is None else at["weight"]
        return apply(W, parents[-1], at["bias"] if self.biased else None)

    def latex(self, s: Symbols) -> str:
        W = s.weight("W") if self.dim is None else s.parameter("W")
        return s.equals(s.map(W, s.of("x")) + (s.plus(s.parameter("b")) if self.biased else ""))


@final
@dataclass(frozen=True)
class Linear(_Map):
    """`W x` with W a weight node: `1(v = W_v x)`. `Linear(dim)` owns its matrix and has the one parent x.

    >>> Linear().shape(Parent("W", (4, 8)), Parent("x", (8,)))
    (4,)
    """


@final
@dataclass(frozen=True)
class Affine(_Map):
    """`W x + b` with W a weight node and b its own. `Affine(dim)` owns both and has the one parent x.

    >>> sorted(Affine(4).parameters(Parent("x", (8,))))
    ['bias', 'weight']
    """

    biased: ClassVar[bool] = True


def apply(W: Tensor, x: Tensor, b: Tensor | None = None) -> Tensor:
    """`W x (+ b)` for one vector or a batch of them."""
    if math.prod(W.shape[:-2]) == 1 and W.dim() <= x.dim() + 1 and (b is None or b.dim() == 1):
        return torch.nn.functional.linear(x, W.reshape(W.shape[-2:]), b)
    y = torch.einsum("...oi,...i->...o", W, x)
    return y if b is None else y + b
