"""The steps of recurrent nets: a map of the word and of what came before it, a memory, a value behind a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, one_of, put, whole
from bnet_transformer.tpm.base import TPM, At, Parameter, Parent, Product, Shape, vector
from bnet_transformer.tpm.linear import apply
from bnet_transformer.tpm.steps import ACTIVATIONS, LATEX
from bnet_transformer.tpm.symbols import Symbols


@final
@dataclass(frozen=True)
class Recur(TPM):
    """`s(W x + U h + b)`: x is the word, h what came of the words before it.

    >>> sorted(Recur(3).parameters(Parent("x", (2,)), Parent("h", (3,))))
    ['U', 'W', 'bias']
    """

    dim: int
    activation: str = "tanh"
    bias: bool = True
    slots: ClassVar[tuple[str, ...]] = ("x", "h")

    def __post_init__(self) -> None:
        put(self, dim=whole("dim", self.dim))
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("bias", self.bias, (True, False))

    def shape(self, *parents: Parent) -> Shape:
        for parent in parents:
            vector(parent)
        return (self.dim,)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        spread = (3 * self.dim) ** -0.5  # that of torch's own, which draws from U(-1 / sqrt(dim), 1 / sqrt(dim))
        found = {name: Parameter((self.dim, *parent.shape), spread) for name, parent in zip("WU", parents, strict=True)}
        return found | ({"bias": Parameter((self.dim,), fill=0.0)} if self.bias else {})

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        return tuple(Product((parent,), (self.dim, *parent.shape), own=True) for parent in parents)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        x, h = parents
        return ACTIVATIONS[self.activation](apply(at["W"], x, at["bias"] if self.bias else None) + apply(at["U"], h))

    def latex(self, s: Symbols) -> str:
        activate = LATEX[self.activation]
        bias = s.plus(s.parameter("b")) if self.bias else ""
        inside = s.map(s.parameter("W"), s.of("x")) + f" + {s.map(s.parameter('U'), s.of('h'))}" + bias
        return s.equals(f"{activate}({inside})" if activate else inside)


@final
@dataclass(frozen=True)
class Memory(TPM):
    """`forget * cell + input * candidate`, entry by entry: what is kept of a cell, and what is added to it.

    >>> Memory().value(At(), *(torch.tensor([x]) for x in (1.0, 2.0, 0.5, 4.0)))
    tensor([4.])
    """

    slots: ClassVar[tuple[str, ...]] = ("input", "candidate", "forget", "cell")
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> Shape:
        return _alike(parents)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        input_, candidate, forget, cell = parents
        return torch.addcmul(forget * cell, input_, candidate)

    def latex(self, s: Symbols) -> str:
        input_, candidate, forget, cell = (str(s.of(slot)) for slot in self.slots)
        times = " " if s.form == "einstein" else r" \odot "
        return s.equals(f"{forget}{times}{cell} + {input_}{times}{candidate}")


@final
@dataclass(frozen=True)
class Gated(TPM):
    """`g * s(x)`, entry by entry: what a gate lets through.

    >>> Gated("relu").value(At(), torch.tensor([0.5, 0.5]), torch.tensor([-1.0, 2.0]))
    tensor([0., 1.])
    """

    activation: str = "tanh"
    slots: ClassVar[tuple[str, ...]] = ("g", "x")
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("activation", self.activation, ACTIVATIONS)

    def shape(self, *parents: Parent) -> Shape:
        return _alike(parents)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        g, x = parents
        return g * ACTIVATIONS[self.activation](x)

    def latex(self, s: Symbols) -> str:
        activate = LATEX[self.activation]
        x = f"{activate}({s.of('x')})" if activate else str(s.of("x"))
        times = " " if s.form == "einstein" else r" \odot "
        return s.equals(f"{s.of('g')}{times}{x}")


def _alike(parents: tuple[Parent, ...]) -> Shape:
    """The one width of several vectors."""
    width = vector(parents[0])
    for parent in parents[1:]:
        if parent.states is not None or parent.shape != (width,):
            raise BNetError(parent.name, expected=f"a vector of width {width}, as {parents[0].name}", got=parent.form)
    return (width,)
