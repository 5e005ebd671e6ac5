"""Normalisation of a vector: layer norm and RMS norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor
from torch.nn import functional

from bnet_transformer.errors import number, one_of, put
from bnet_transformer.tpm.base import TPM, At, Parameter, Parent, Shape, vector
from bnet_transformer.tpm.notation import numeral, scripts
from bnet_transformer.tpm.symbols import Symbols


@final
@dataclass(frozen=True)
class Norm(TPM):
    """`gain (x - mean x) / sqrt(var x + eps) + bias`; `Norm("rms")`: `gain x / sqrt(mean x^2 + eps)`.

    `bias=False` leaves the bias of a layer norm out.

    >>> Norm("rms").parameters(Parent("x", (8,))).keys()
    dict_keys(['gain'])
    """

    form: str = "layer"
    eps: float = 1e-5
    affine: bool = True
    bias: bool = True
    slots: ClassVar[tuple[str, ...]] = ("x",)
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("norm", self.form, ("layer", "rms"))
        put(self, eps=number("eps", self.eps, above=0))
        one_of("affine", self.affine, (True, False))
        one_of("bias", self.bias, (True, False))

    @property
    def learnable(self) -> bool:
        return self.affine

    def shape(self, *parents: Parent) -> Shape:
        return (vector(parents[0]),)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        if not self.affine:
            return {}
        shape = self.shape(*parents)
        gain = {"gain": Parameter(shape, fill=1.0)}
        return gain | {"bias": Parameter(shape, fill=0.0)} if self._biased else gain

    def value(self, at: At, *parents: Tensor) -> Tensor:
        x = parents[0]
        gain, bias = at.parameters.get("gain"), at.parameters.get("bias")
        own = None if gain is None or gain.dim() > 1 else gain  # a gain for each entry of a plate is applied apart
        if self.form == "layer":
            scaled = functional.layer_norm(x, x.shape[-1:], own, None if own is None else bias, self.eps)
        else:
            scaled = functional.rms_norm(x, x.shape[-1:], own, self.eps)
        if own is not None or gain is None:
            return scaled
        return gain * scaled if bias is None else gain * scaled + bias

    def latex(self, s: Symbols) -> str:
        x, b = s.of("x"), s.of("x", "b")
        gain, bias = s.parameter("g"), s.plus(s.parameter("b"))
        layer, eps = self.form == "layer", numeral(self.eps)
        if s.form in ("row", "column"):
            sub = [] if self.eps == 1e-5 else [eps]
            name = scripts(rf"\operatorname{{{'LayerNorm' if layer else 'RMSNorm'}}}", sub)
            s.define(rf"{name}(x) = {_normed('x', 'x', layer, eps, '')} \text{{ for each word}}")
            scale = rf"\operatorname{{diag}}({gain})"
            value = rf"{name}({x}) \, {scale}" if s.form == "row" else rf"{scale} \, {name}({x})"
            return s.equals(value + (bias if self._biased else "") if self.affine else f"{name}({x})")
        value = _normed(str(x), str(b), layer, eps, "_b" if s.form == "einstein" else "")
        if not self.affine:
            return s.equals(value)
        times = rf"{gain['a']} " if s.form == "einstein" else rf"{gain} \odot "
        return s.equals(times + value + (bias if self._biased else ""))

    @property
    def _biased(self) -> bool:
        return self.form == "layer" and self.bias


def _normed(x: str, inner: str, layer: bool, eps: str, over: str) -> str:
    """The normalised vector, before gain and bias; `over` is the index that mean and variance run over."""
    mean, variance = rf"\operatorname{{mean}}{over}", rf"\operatorname{{var}}{over}"
    if layer:
        return rf"\frac{{{x} - {mean}({inner})}}{{\sqrt{{{variance}({inner}) + {eps}}}}}"
    square = f"({inner})^2" if over else rf"{inner} \odot {inner}"
    return rf"\frac{{{x}}}{{\sqrt{{{mean}({square}) + {eps}}}}}"
