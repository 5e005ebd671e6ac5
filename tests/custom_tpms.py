"""TPMs that the package does not contain, as a user would write them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from bnet_transformer.tpm import TPM, EvalContext, Parameter, Parent, Product


@final
@dataclass(frozen=True)
class Gate(TPM):
    """`sigmoid(g) * x`."""

    slots: ClassVar[tuple[str, ...]] = ("g", "x")
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> tuple[int, ...]:
        return parents[1].shape

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        g, x = parents
        return torch.sigmoid(g) * x


@final
@dataclass(frozen=True)
class AdditiveAttention(TPM):
    """Bahdanau's attention: `P(j | i) = softmax_j(w . tanh(q_i + k_j))`."""

    slots: ClassVar[tuple[str, ...]] = ("q", "k.", "v.")

    def shape(self, *parents: Parent) -> tuple[int, ...]:
        return parents[2].shape

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return {"w": Parameter(parents[0].shape)}

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        q, k, v = parents
        return Product((q, k), q.shape, over=(k,), has_parameter=True), Product(
            (q, k, v), v.shape, over=(k,), has_parameter=True
        )

    def attention_weights(self, context: EvalContext, *parents: Tensor) -> Tensor:
        q, k, _ = parents
        scores = torch.einsum("...d,...md->...m", context["w"], torch.tanh(q[..., None, :] + k))
        return scores.masked_fill(~context.mask["k."], -torch.inf).softmax(-1)

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return torch.einsum("...m,...md->...d", self.attention_weights(context, *parents), parents[2])


@final
@dataclass(frozen=True)
class Recurrent(TPM):
    """An Elman cell: `tanh(W x_i + U h_(i-1) + b)`."""

    dim: int
    slots: ClassVar[tuple[str, ...]] = ("x", "h")

    def shape(self, *parents: Parent) -> tuple[int, ...]:
        return (self.dim,)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        (width,) = parents[0].shape
        return {
            "W": Parameter((self.dim, width), 0.5),
            "U": Parameter((self.dim, self.dim), 0.5),
            "b": Parameter((self.dim,), 0.1),
        }

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        return tuple(Product((parent,), (self.dim, *parent.shape), has_parameter=True) for parent in parents)

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        x, h = parents
        into = torch.einsum("...oi,...i->...o", context["W"], x)
        return torch.tanh(into + torch.einsum("...oi,...i->...o", context["U"], h) + context["b"])


@final
@dataclass(frozen=True)
class NoisyWord(TPM):
    """With probability `noise` a word of the background distribution, else `softmax(W x)`."""

    n: int
    noise: float = 0.2
    prior: float | None = None
    kind: ClassVar[Literal["discrete"]] = "discrete"
    slots: ClassVar[tuple[str, ...]] = ("x",)

    @property
    def states(self) -> int:
        return self.n

    def shape(self, *parents: Parent) -> tuple[int, ...]:
        return ()

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return {"logits": Parameter((self.n,), fill=0.0), "W": Parameter((self.n, *parents[0].shape), 0.5)}

    def logits(self, context: EvalContext, *parents: Tensor) -> Tensor:
        word = (context["W"] @ parents[0][..., None])[..., 0].log_softmax(-1)
        background = context["logits"].log_softmax(-1)
        return torch.logaddexp(word + math.log(1 - self.noise), background + math.log(self.noise))

    def priors(self) -> dict[str, float]:
        return {} if self.prior is None else {"logits": self.prior}
