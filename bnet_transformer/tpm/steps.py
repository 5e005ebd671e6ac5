"""The word-wise steps: an activation, the feed-forward map, the ResNet step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

from bnet_transformer.errors import number, one_of, put, whole
from bnet_transformer.tpm.base import TPM, At, Parameter, Parent, Product, Shape, vector
from bnet_transformer.tpm.linear import apply
from bnet_transformer.tpm.notation import scaled
from bnet_transformer.tpm.symbols import Symbols

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}

LATEX = {
    "relu": r"\operatorname{ReLU}",
    "gelu": r"\operatorname{GELU}",
    "gelu_tanh": r"\operatorname{GELU}_{\tanh}",
    "silu": r"\operatorname{SiLU}",
    "tanh": r"\tanh",
    "sigmoid": r"\operatorname{sigmoid}",
    "identity": "",
}


@final
@dataclass(frozen=True)
class Activation(TPM):
    """`s(x)`, entry by entry.

    >>> Activation("relu").value(At(), torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    activation: str = "relu"
    slots: ClassVar[tuple[str, ...]] = ("x",)
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("activation", self.activation, ACTIVATIONS)

    def shape(self, *parents: Parent) -> Shape:
        return (vector(parents[0]),)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](parents[0])

    def latex(self, s: Symbols) -> str:
        activate = LATEX[self.activation]
        return s.equals(f"{activate}({s.of('x')})" if activate else s.of("x"))


@final
@dataclass(frozen=True)
class Scale(TPM):
    """`factor x`.

    >>> Scale(0.5).value(At(), torch.tensor([2.0]))
    tensor([1.])
    """

    factor: float
    slots: ClassVar[tuple[str, ...]] = ("x",)
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        put(self, factor=number("factor", self.factor))

    def shape(self, *parents: Parent) -> Shape:
        return (vector(parents[0]),)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        return self.factor * parents[0]

    def latex(self, s: Symbols) -> str:
        return s.equals(scaled(self.factor, str(s.of("x"))))


@final
@dataclass(frozen=True)
class FeedForward(TPM):
    """`W_2 s(W_1 x + b_1) + b_2`; gated: `W_2 (s(W_g x + b_g) * (W_1 x + b_1)) + b_2`; without biases if so asked.

    >>> sorted(FeedForward(32).parameters(Parent("x", (8,))))
    ['bias_in', 'bias_out', 'weight_in', 'weight_out']
    """

    hidden: int
    activation: str = "relu"
    gated: bool = False
    bias: bool = True
    slots: ClassVar[tuple[str, ...]] = ("x",)

    def __post_init__(self) -> None:
        put(self, hidden=whole("hidden", self.hidden))
        one_of("activation", self.activation, ACTIVATIONS)
        for what in ("gated", "bias"):
            one_of(what, getattr(self, what), (True, False))

    def shape(self, *parents: Parent) -> Shape:
        return (vector(parents[0]),)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        (width,) = self.shape(*parents)
        maps = {"in": (self.hidden, width), "out": (width, self.hidden)}
        if self.gated:
            maps["gate"] = (self.hidden, width)
        found = {f"weight_{name}": Parameter(shape, shape[1] ** -0.5) for name, shape in maps.items()}
        if self.bias:
            found |= {f"bias_{name}": Parameter(shape[:1], fill=0.0) for name, shape in maps.items()}
        return found

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        (width,) = self.shape(*parents)
        return (Product(parents, (self.hidden, width), own=True),) * (3 if self.gated else 2)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.activation]
        hidden = activate(self._map(at, "gate" if self.gated else "in", parents[0]))  # what it is made of goes at once
        return self._map(at, "out", hidden * self._map(at, "in", parents[0]) if self.gated else hidden)

    def latex(self, s: Symbols) -> str:
        def inner(name: str, letters: str) -> str:
            bias = s.plus(s.parameter("b", name), "b") if self.bias else ""
            return s.map(s.parameter("W", name), s.of("x"), letters) + bias

        hidden = f"{LATEX[self.activation]}({inner('g' if self.gated else '1', 'bd')})"
        if self.gated:
            times = "" if s.form == "einstein" else r" \odot "
            hidden = rf"\left({hidden}{times}({inner('1', 'be')})\right)"
        out = s.map(s.parameter("W", "2"), hidden)
        return s.equals(out + (s.plus(s.parameter("b", "2")) if self.bias else ""))

    def _map(self, at: At, name: str, x: Tensor) -> Tensor:
        return apply(at[f"weight_{name}"], x, at[f"bias_{name}"] if self.bias else None)


@final
@dataclass(frozen=True)
class ResNet(TPM):
    """`z + s(W z + b)`, `blocks` times with parameters of their own (seed 000).

    >>> ResNet(blocks=2).parameters(Parent("z", (3,)))["weight"].shape
    (2, 3, 3)
    """

    blocks: int = 1
    activation: str = "tanh"
    slots: ClassVar[tuple[str, ...]] = ("x",)

    def __post_init__(self) -> None:
        put(self, blocks=whole("blocks", self.blocks))
        one_of("activation", self.activation, ACTIVATIONS)

    def shape(self, *parents: Parent) -> Shape:
        return (vector(parents[0]),)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        (width,) = self.shape(*parents)
        return {
            "weight": Parameter((self.blocks, width, width), width**-0.5),
            "bias": Parameter((self.blocks, width), fill=0.0),
        }

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        (width,) = self.shape(*parents)
        return (Product(parents, (width, width), own=True),) * self.blocks

    def value(self, at: At, *parents: Tensor) -> Tensor:
        z = parents[0]
        activate = ACTIVATIONS[self.activation]
        for W, b in zip(at["weight"].unbind(-3), at["bias"].unbind(-2), strict=True):
            z = z + activate(apply(W, z, b))
        return z

    def latex(self, s: Symbols) -> str:
        sub = () if self.blocks == 1 else ("m",)
        W, b = s.parameter("W", *sub), s.parameter("b", *sub)
        activate = LATEX[self.activation]
        if self.blocks == 1:
            return s.equals(rf"{s.of('x')} + {activate}({s.map(W, s.of('x'))}{s.plus(b)})")
        last, first, one = (s.parameter("f", m).plain for m in (str(self.blocks), "1", "m"))
        z = {"row": "Z", "column": "Z", "einstein": "z_b"}.get(s.form, "z")
        start, end = ("[", "]_a") if s.form == "einstein" else ("", "")
        step = rf"{z.replace('b', 'a')} + {activate}({s.map(W, z)}{s.plus(b)})"
        s.define(rf"{start}{one}({z[0]}){end} = {step}")
        chain = rf"{last} \circ" + (r" \cdots \circ" if self.blocks > 2 else "") + f" {first}"
        return s.equals(f"{start}({chain})({s.of('x', '')}){end}")
