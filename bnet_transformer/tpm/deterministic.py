"""Deterministic functions: linear maps, sums, pooling, activations, feed-forward maps, norms, recurrent steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

from bnet_transformer._core.checks import check_float, check_int
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import (
    TPM,
    EvalContext,
    Parameter,
    Parent,
    Product,
    Shape,
    VectorMap,
    check_below_one,
    check_bool,
    check_matrix,
    check_positive,
    check_single_axis,
    check_vector,
    choice,
    named,
    optional,
)
from bnet_transformer.tpm.symbols import Symbol, Symbols, add_scripts, format_multiple, format_number

# --------------------------------------------------------------------------------------------------------------------
# Linear maps, sums and pooling: `W x + b`, the sum of parents, the sum of heads through `W_o`, pooled words.


POOLS = ("mean", "sum")


@dataclass(frozen=True)
class _LinearMap(TPM):
    """`W x`, plus `b` if the class has a bias; with `dim` the TPM owns the matrix, which has `dim` rows."""

    dim: Annotated[int | None, optional(check_int)] = None
    has_bias: ClassVar[bool] = False

    def get_slots(self) -> tuple[str, ...]:
        return ("W", "x") if self.dim is None else ("x",)

    def shape(self, *parents: Parent) -> Shape:
        if self.dim is not None:
            check_vector(parents[0])
            return (self.dim,)
        W, x = parents
        out, width = check_matrix(W)
        if x.shape != (width,) or x.states is not None:
            expected = f"a vector of width {width}, the number of columns of {W.name}"
            raise BNetError(x.name, expected=expected, actual=x.form)
        return (out,)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        bias = {"bias": Parameter(self.shape(*parents), fill=0.0)} if self.has_bias else {}
        if self.dim is None:
            return bias
        width = check_vector(parents[0])
        return {"weight": Parameter((self.dim, width), width**-0.5)} | bias

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        (out,), (width,) = self.shape(*parents), parents[-1].shape
        return (Product(parents, (out, width), has_parameter=self.dim is not None),)

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return (len(parents) - 1,)

    def select_entries(
        self, entries: Tensor, context: EvalContext, *parents: Tensor
    ) -> tuple[EvalContext, tuple[Tensor, ...]]:
        context = context.select_entries(entries, weight=-2, bias=-1)
        return context, parents if self.dim is not None else (parents[0].index_select(-2, entries), *parents[1:])

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        W = parents[0] if self.dim is None else context["weight"]
        return apply_linear(W, parents[-1], context["bias"] if self.has_bias else None)

    def latex(self, s: Symbols) -> str:
        W = s.weight("W") if self.dim is None else s.parameter("W")
        return s.equals(s.map(W, s.of("x")) + (s.plus(s.parameter("b")) if self.has_bias else ""))


@final
@dataclass(frozen=True)
class Linear(_LinearMap):
    """A linear map `W x`; deterministic.

    Parents, in order: the weight node `W`, `[out, in]`, and the vector `x`, `[in]`; with `dim` only `x`. The value has
    shape `[out]`.

    Args:
        dim: The number of rows of a learnable matrix `weight` that the TPM owns. None (default): the matrix is the
            first parent.

    >>> Linear().shape(Parent("W", (4, 8)), Parent("x", (8,)))
    (4,)
    >>> Linear(4).parameters(Parent("x", (8,)))["weight"].shape
    (4, 8)
    """


@final
@dataclass(frozen=True)
class Affine(_LinearMap):
    """An affine map `W x + b`; deterministic. The TPM owns the learnable bias, which starts at 0.

    Parents, in order: the weight node `W`, `[out, in]`, and the vector `x`, `[in]`; with `dim` only `x`. The value has
    shape `[out]`.

    Args:
        dim: The number of rows of a learnable matrix `weight` that the TPM owns. None (default): the matrix is the
            first parent.

    >>> sorted(Affine(4).parameters(Parent("x", (8,))))
    ['bias', 'weight']
    """

    has_bias: ClassVar[bool] = True


def apply_linear(W: Tensor, x: Tensor, b: Tensor | None = None) -> Tensor:
    """`W x`, plus `b` if it is given, for one vector or a batch: `[..., out]`."""
    if W.dim() == 2 and (b is None or b.dim() == 1):
        return torch.nn.functional.linear(x, W, b)
    if math.prod(W.shape[:-2]) == 1 and W.dim() <= x.dim() + 1 and (b is None or b.dim() == 1):
        return torch.nn.functional.linear(x, W.reshape(W.shape[-2:]), b)
    y = torch.einsum("...oi,...i->...o", W, x)
    return y if b is None else y + b


@final
@dataclass(frozen=True)
class Add(TPM):
    """The sum of its parents, `x_1 + x_2 + ...`; a copy of a single parent; deterministic.

    Parents: any number of tensors of the same shape, which is also the shape of the value.

    >>> import torch
    >>> Add().value(EvalContext(), torch.ones(2), torch.ones(2))
    tensor([2., 2.])
    """

    slots: ClassVar[tuple[str, ...]] = ("*x",)
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> Shape:
        if not parents:
            raise BNetError("Add", expected="at least one parent")
        for parent in parents:
            if parent.states is not None or parent.shape != parents[0].shape:
                expected = f"a value of shape {parents[0].shape}, the shape of {parents[0].name}"
                raise BNetError(parent.name, expected=expected, actual=parent.form)
        return parents[0].shape

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return tuple(range(len(parents)))

    def residual_parents(self, *parents: Parent) -> tuple[int, ...]:
        return self.linear_parents(*parents)

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        total = parents[0]
        for parent in parents[1:]:
            total = total + parent
        return total

    def latex(self, s: Symbols) -> str:
        return s.equals(" + ".join(str(s.of(slot)) for slot in s.slot_indices()))


@final
@dataclass(frozen=True)
class Concat(TPM):
    """All heads of multi-head attention, concatenated and mapped: `sum_h W_o^h a^h`, `+ b`, `+ x`; deterministic.

    The sum equals `W_o [a^1; ...; a^K]` with `W_o = [W_o^1 ... W_o^K]`. No head is selected.

    Parents, in order: the matrices `W_o.`, `[out, d]` for each head; the outputs `a.` of the heads, `[d]` each; the
    state `x`, `[out]`, if there is a residual. The value has shape `[out]`; without `W_o` it has `K d` entries.

    Args:
        mapped: Whether there are matrices `W_o`. Default True. False concatenates the outputs of the heads.
        bias: Whether a learnable bias is added, which starts at 0. Default False.
        residual: Whether the state `x` is added. Default False.
        plates: The number of plates of heads. Default 1; 2 for groups of heads and the heads of each group.

    >>> Concat().get_slots(), Concat(mapped=False).get_slots()
    (('W_o.', 'a.'), ('a.',))
    >>> heads = (("head", 2),)
    >>> Concat().shape(Parent("W_o", (8, 4), over=heads), Parent("a", (4,), over=heads))
    (8,)
    """

    mapped: Annotated[bool, check_bool] = True
    bias: Annotated[bool, check_bool] = False
    residual: Annotated[bool, check_bool] = False
    plates: Annotated[int, check_int] = 1

    def get_slots(self) -> tuple[str, ...]:
        return (*(("W_o.",) if self.mapped else ()), "a.", *(("x",) if self.residual else ()))

    def shape(self, *parents: Parent) -> Shape:
        a = parents[1 if self.mapped else 0]
        width = check_vector(a)
        for parent in parents[: 2 if self.mapped else 1]:
            if len(parent.over) != self.plates:
                expected = "one plate of heads" if self.plates == 1 else f"{self.plates} plates of heads"
                raise BNetError(parent.name, expected=f"a collection over {expected}", actual=parent.form)
            if parent.over != a.over or None in dict(parent.over).values():
                expected = "a collection over the same plates for W_o and a, of known size"
                raise BNetError(parent.name, expected=expected, actual=parent.form)
        if not self.mapped:
            out = math.prod(size or 1 for _, size in a.over) * width
        else:
            out, columns = check_matrix(parents[0])
            if columns != width:
                expected = f"matrices with {width} columns, the width of {a.name}"
                raise BNetError(parents[0].name, expected=expected, actual=parents[0].form)
        if self.residual:
            check_vector(parents[-1], out, reason="the residual is added")
        return (out,)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return {"bias": Parameter(self.shape(*parents), fill=0.0)} if self.bias else {}

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        if not self.mapped:
            return ()
        W_o, a = parents[:2]
        return (Product((W_o, a), W_o.shape, over=(a,)),)

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return tuple(range(1 if self.mapped else 0, len(parents)))

    def residual_parents(self, *parents: Parent) -> tuple[int, ...]:
        return (len(parents) - 1,) if self.residual else ()

    @property
    def adds_entries(self) -> bool:
        return self.mapped

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        bias = context["bias"] if self.bias else None
        if self.mapped:
            total = apply_linear(self.concat_weights(parents[0]), parents[1].flatten(-1 - self.plates), bias)
        else:
            total = parents[0].flatten(-1 - self.plates)
            total = total if bias is None else total + bias
        return total + parents[-1] if self.residual else total

    def concat_weights(self, W_o: Tensor) -> Tensor:
        """The matrices of all heads next to each other, `[W_o^1 ... W_o^K]`.

        Args:
            W_o: The matrices, `[..., head, out, d]`.

        Returns:
            One matrix, `[..., out, head * d]`.
        """
        return W_o.movedim(-2, -2 - self.plates).flatten(-1 - self.plates)

    def latex(self, s: Symbols) -> str:
        terms = (s.plus(s.parameter("b")) if self.bias else "") + (f" + {s.of('x')}" if self.residual else "")
        if not self.mapped:
            stacked = rf"\operatorname{{concat}}_{{{s.index_letters('a.')}}} {s.of('a.', '')}"
            return s.equals((rf"\left({stacked}\right)_a" if s.form == "einstein" else stacked) + terms)
        heads = "" if s.form == "einstein" else s.sum("a.") + " "
        return s.equals(heads + s.map(s.weight("W_o."), s.of("a.")) + terms)


@final
@dataclass(frozen=True)
class Pool(TPM):
    """The mean or the sum of the vectors of a collection: `1/n sum_j x_j`, or `sum_j x_j`; deterministic.

    Parent: the collection `x.`, `[d]` for each word of the collection (or each entry of one plate). The value has shape
        `[d]`.

    Args:
        how: `"mean"` (default) or `"sum"`.

    >>> x = torch.tensor([[1.0], [3.0], [9.0]])                     # [word, d]
    >>> Pool().value(EvalContext(mask={"x.": torch.tensor([True, True, False])}), x)
    tensor([2.])
    """

    how: Annotated[str, named("pool", choice(*POOLS))] = "mean"
    slots: ClassVar[tuple[str, ...]] = ("x.",)
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> Shape:
        check_single_axis(parents[0])
        return (check_vector(parents[0]),)

    @property
    def can_read_empty(self) -> bool:
        return self.how == "sum"

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return (0,)

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return pool_words(self.how, parents[0], context.mask["x."])

    def latex(self, s: Symbols) -> str:
        return s.equals(pool_latex(self.how, s))


def pool_words(reduction: str, x: Tensor, mask: Tensor) -> Tensor:
    """The mean or sum, `[..., d]`, of the vectors `[..., m, d]` for which the mask `[..., m]` is true."""
    weight = mask.to(x.dtype)
    if reduction == "mean":
        weight = weight / weight.sum(-1, keepdim=True)
    return (weight[..., None] * x).sum(-2)


def pool_latex(reduction: str, s: Symbols, letter: str = "a") -> str:
    """The pooled collection `x.` in LaTeX, in the form of `s`; `letter` is the feature index."""
    factor = "" if reduction == "sum" else rf"\frac{{1}}{{{s.slot('x.').count}}} "
    x = s.of("x.", letter)
    if s.form in ("word", "einstein") or s.index_letters("x.") != "j":
        return f"{factor}{s.sum('x.')} {x}"
    if s.slot("x.").mask:  # some words have no arrow
        s.require_form("word")
    one, across = r"\mathbf{1}", r"\mathbf{1}^\top"
    if s.is_full_matrix:
        one = across = f"{one} {across}"
    return f"{factor}{across} {x}" if s.form == "row" else f"{factor}{x} {one}"


# --------------------------------------------------------------------------------------------------------------------
# Word-wise functions: activations, feed-forward maps, ResNet steps, norms, dropout, steps of recurrent nets.


_ACTIVATION_TABLE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {  # function and name in LaTeX
    "relu": (torch.relu, r"\operatorname{ReLU}"),
    "gelu": (functional.gelu, r"\operatorname{GELU}"),
    "gelu_tanh": (partial(functional.gelu, approximate="tanh"), r"\operatorname{GELU}_{\tanh}"),
    "silu": (functional.silu, r"\operatorname{SiLU}"),
    "tanh": (torch.tanh, r"\tanh"),
    "sigmoid": (torch.sigmoid, r"\operatorname{sigmoid}"),
    "identity": (lambda x: x, ""),
}
ACTIVATIONS = {name: function for name, (function, _) in _ACTIVATION_TABLE.items()}
ACTIVATION_LATEX = {name: latex for name, (_, latex) in _ACTIVATION_TABLE.items()}
check_activation = choice(*ACTIVATIONS)


def activation_latex(activation: str, argument: str | Symbol) -> str:
    """An activation of `argument` in LaTeX; for the identity, the argument itself."""
    return f"{ACTIVATION_LATEX[activation]}({argument})" if ACTIVATION_LATEX[activation] else str(argument)


@final
@dataclass(frozen=True)
class Activation(VectorMap):
    """An activation of each entry: `x' = s(x)`; deterministic.

    Parent: the vector `x`, `[d]`. The value has shape `[d]`.

    Args:
        activation: `"relu"` (default), `"gelu"`, `"gelu_tanh"`, `"silu"`, `"tanh"`, `"sigmoid"` or `"identity"`.

    >>> Activation("relu").value(EvalContext(), torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    activation: Annotated[str, check_activation] = "relu"

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return (0,) if self.activation == "identity" else ()

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](parents[0])

    def latex(self, s: Symbols) -> str:
        return s.equals(activation_latex(self.activation, s.of("x")))


@final
@dataclass(frozen=True)
class Multiple(VectorMap):
    """A multiple of a vector: `x' = factor x`; deterministic.

    Parent: the vector `x`, `[d]`. The value has shape `[d]`.

    Args:
        factor: The factor.

    >>> Multiple(0.5).value(EvalContext(), torch.tensor([2.0]))
    tensor([1.])
    """

    factor: Annotated[float, check_float]

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return (0,)

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return self.factor * parents[0]

    def latex(self, s: Symbols) -> str:
        return s.equals(format_multiple(self.factor, str(s.of("x"))))


@dataclass(frozen=True)
class _HiddenLayer(VectorMap):
    """The hidden activations of a feed-forward map: `s(W_1 x + b_1)`, or gated `s(W_g x + b_g) * (W_1 x + b_1)`."""

    hidden: Annotated[int, check_int]
    activation: Annotated[str, check_activation] = "relu"
    gated: Annotated[bool, check_bool] = False
    bias: Annotated[bool, check_bool] = True

    def _get_map_shapes(self, width: int) -> dict[str, Shape]:
        """The shapes of the matrices by the suffix of their names."""
        return dict.fromkeys(("in", "gate") if self.gated else ("in",), (self.hidden, width))

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        maps = self._get_map_shapes(check_vector(parents[0]))
        parameters = {f"weight_{name}": Parameter(shape, shape[1] ** -0.5) for name, shape in maps.items()}
        if self.bias:
            parameters |= {f"bias_{name}": Parameter(shape[:1], fill=0.0) for name, shape in maps.items()}
        return parameters

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        maps = self._get_map_shapes(check_vector(parents[0]))
        return tuple(Product(parents, (self.hidden, parents[0].shape[0]), has_parameter=True) for _ in maps)

    def _compute_hidden(self, context: EvalContext, x: Tensor) -> Tensor:
        """The hidden activations, `[..., hidden]`."""
        hidden = ACTIVATIONS[self.activation](self._apply_map("gate" if self.gated else "in", context, x))
        return hidden * self._apply_map("in", context, x) if self.gated else hidden

    def _apply_map(self, name: str, context: EvalContext, x: Tensor) -> Tensor:
        """One of the linear maps, with its bias."""
        return apply_linear(context[f"weight_{name}"], x, context[f"bias_{name}"] if self.bias else None)

    def _format_hidden(self, s: Symbols, row: str) -> str:
        """The hidden activations in LaTeX; `row` is the letter of their index."""

        def inner(name: str, letters: str) -> str:
            bias = s.plus(s.parameter("b", name), row) if self.bias else ""
            return s.map(s.parameter("W", name), s.of("x"), letters) + bias

        hidden = f"{ACTIVATION_LATEX[self.activation]}({inner('g' if self.gated else '1', f'{row}d')})"
        if not self.gated:
            return hidden
        times = "" if s.form == "einstein" else r" \odot "
        return rf"\left({hidden}{times}({inner('1', f'{row}e')})\right)"


@final
@dataclass(frozen=True)
class FeedForward(_HiddenLayer):
    """A feed-forward map: `x' = W_2 s(W_1 x + b_1) + b_2`; deterministic. The TPM owns the weights and biases.

    Gated: `x' = W_2 (s(W_g x + b_g) * (W_1 x + b_1)) + b_2`. Parent: the vector `x`, `[d]`. The value has shape `[d]`.

    Args:
        hidden: The width of the hidden vector.
        activation: The function s: `"relu"`, `"gelu"`, `"gelu_tanh"`, `"silu"`, `"tanh"`, `"sigmoid"` or `"identity"`.
            Default `"relu"`.
        gated: Whether the map is gated, as in Llama. Default False.
        bias: Whether there are biases. Default True.

    >>> sorted(FeedForward(32).parameters(Parent("x", (8,))))
    ['bias_in', 'bias_out', 'weight_in', 'weight_out']
    """

    def _get_map_shapes(self, width: int) -> dict[str, Shape]:
        return {"in": (self.hidden, width), "out": (width, self.hidden), **super()._get_map_shapes(width)}

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return self._apply_map("out", context, self._compute_hidden(context, parents[0]))

    def split_neurons(self, *parents: Parent) -> tuple[TPM, TPM, Mapping[str, str]]:
        neurons = Neurons(self.hidden, self.activation, self.gated, self.bias)
        output = (Affine if self.bias else Linear)(check_vector(parents[0]))
        return neurons, output, {"weight": "weight_out", "bias": "bias_out"}

    def latex(self, s: Symbols) -> str:
        out = s.map(s.parameter("W", "2"), self._format_hidden(s, "b"))
        return s.equals(out + (s.plus(s.parameter("b", "2")) if self.bias else ""))


@final
@dataclass(frozen=True)
class Neurons(_HiddenLayer):
    """The hidden activations of a feed-forward map: `h = s(W_1 x + b_1)`; deterministic. The TPM owns W and b.

    Gated: `h = s(W_g x + b_g) * (W_1 x + b_1)`. A `Linear` or `Affine` map of them is a `FeedForward`;
    `net.expose_neurons()` declares feed-forward nodes in this way. Parent: the vector `x`, `[d]`. The value has shape
    `[hidden]`.

    Args:
        hidden: The number of neurons.
        activation: The function s: `"relu"`, `"gelu"`, `"gelu_tanh"`, `"silu"`, `"tanh"`, `"sigmoid"` or `"identity"`.
            Default `"relu"`.
        gated: Whether the activations are gated, as in Llama. Default False.
        bias: Whether there are biases. Default True.

    >>> Neurons(32, gated=True, bias=False).parameters(Parent("x", (8,))).keys()
    dict_keys(['weight_in', 'weight_gate'])
    """

    def shape(self, *parents: Parent) -> Shape:
        super().shape(*parents)
        return (self.hidden,)

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return self._compute_hidden(context, parents[0])

    def latex(self, s: Symbols) -> str:
        return s.equals(self._format_hidden(s, "a"))


@final
@dataclass(frozen=True)
class ResNet(VectorMap):
    """A chain of residual steps: `z' = z + s(W z + b)`, applied `blocks` times; deterministic.

    Each step has its own parameters W, `[d, d]`, and b, `[d]`. Parent: the vector `z`, `[d]`. The value has shape
    `[d]`.

    Args:
        blocks: The number of steps. Default 1.
        activation: The function s: `"relu"`, `"gelu"`, `"gelu_tanh"`, `"silu"`, `"tanh"`, `"sigmoid"` or `"identity"`.
            Default `"tanh"`.

    >>> ResNet(blocks=2).parameters(Parent("z", (3,)))["weight"].shape
    (2, 3, 3)
    """

    blocks: Annotated[int, check_int] = 1
    activation: Annotated[str, check_activation] = "tanh"

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        (width,) = self.shape(*parents)
        return {
            "weight": Parameter((self.blocks, width, width), width**-0.5),
            "bias": Parameter((self.blocks, width), fill=0.0),
        }

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        (width,) = self.shape(*parents)
        return (Product(parents, (width, width), has_parameter=True),) * self.blocks

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        z = parents[0]
        activate = ACTIVATIONS[self.activation]
        for W, b in zip(context["weight"].unbind(-3), context["bias"].unbind(-2), strict=True):
            z = z + activate(apply_linear(W, z, b))
        return z

    def latex(self, s: Symbols) -> str:
        sub = () if self.blocks == 1 else ("m",)
        W, b = s.parameter("W", *sub), s.parameter("b", *sub)
        activate = ACTIVATION_LATEX[self.activation]
        if self.blocks == 1:
            return s.equals(rf"{s.of('x')} + {activate}({s.map(W, s.of('x'))}{s.plus(b)})")
        last, first, one = (s.parameter("f", m).plain for m in (str(self.blocks), "1", "m"))
        z = {"row": "Z", "column": "Z", "einstein": "z_b"}.get(s.form, "z")
        start, end = ("[", "]_a") if s.form == "einstein" else ("", "")
        step = rf"{z.replace('b', 'a')} + {activate}({s.map(W, z)}{s.plus(b)})"
        s.define(rf"{start}{one}({z[0]}){end} = {step}")
        chain = rf"{last} \circ" + (r" \cdots \circ" if self.blocks > 2 else "") + f" {first}"
        return s.equals(f"{start}({chain})({s.of('x', '')}){end}")


@final
@dataclass(frozen=True)
class Norm(VectorMap):
    """A norm: `x' = gain (x - mean x) / sqrt(var x + eps) + bias`, or RMS: `x' = gain x / sqrt(mean x^2 + eps)`.

    The TPM is deterministic and owns the gain and the bias. Parent: the vector `x`, `[d]`. The value has shape `[d]`.

    Args:
        form: `"layer"` (default) for layer norm, or `"rms"`, which has no bias.
        eps: The number that is added to the variance. Default 1e-5.
        affine: Whether there is a learnable gain (and bias). Default True.
        bias: Whether a layer norm has a learnable bias. Default True.

    >>> Norm("rms").parameters(Parent("x", (8,))).keys()
    dict_keys(['gain'])
    """

    form: Annotated[str, named("norm", choice("layer", "rms"))] = "layer"
    eps: Annotated[float, check_positive] = 1e-5
    affine: Annotated[bool, check_bool] = True
    bias: Annotated[bool, check_bool] = True

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        if not self.affine:
            return {}
        shape = self.shape(*parents)
        gain = {"gain": Parameter(shape, fill=1.0)}
        return gain | {"bias": Parameter(shape, fill=0.0)} if self._has_bias else gain

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        x = parents[0]
        gain, bias = context.parameters.get("gain"), context.parameters.get("bias")
        # torch's norms accept only one gain. If each entry of a plate has a gain, it is applied after the norm.
        shared = None if gain is None or gain.dim() > 1 else gain
        if self.form == "layer":
            scaled = functional.layer_norm(x, x.shape[-1:], shared, None if shared is None else bias, self.eps)
        else:
            scaled = _rms_norm(x, shared, self.eps)
        if shared is not None or gain is None:
            return scaled
        return gain * scaled if bias is None else gain * scaled + bias

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return (0,)

    def norm_scale(self, context: EvalContext, *parents: Tensor) -> Tensor:
        x = parents[0]
        square = x.var(-1, correction=0, keepdim=True) if self.form == "layer" else x.square().mean(-1, keepdim=True)
        return torch.rsqrt(square + self.eps)

    def linear_value(self, context: EvalContext, scale: Tensor | None, *parents: Tensor) -> Tensor:
        assert scale is not None
        x, parameters = parents[0], context.parameters
        value = scale * (x - x.mean(-1, keepdim=True) if self.form == "layer" else x)
        value = parameters["gain"] * value if "gain" in parameters else value
        return value + parameters["bias"] if "bias" in parameters else value

    def latex(self, s: Symbols) -> str:
        x, b = s.of("x"), s.of("x", "b")
        gain, bias = s.parameter("g"), s.plus(s.parameter("b"))
        layer, eps = self.form == "layer", format_number(self.eps)
        if s.form in ("row", "column"):
            sub = [] if self.eps == 1e-5 else [eps]
            name = add_scripts(rf"\operatorname{{{'LayerNorm' if layer else 'RMSNorm'}}}", sub)
            s.define(rf"{name}(x) = {_norm_latex('x', 'x', layer, eps, '')} \text{{ for each word}}")
            scale = rf"\operatorname{{diag}}({gain})"
            value = rf"{name}({x}) \, {scale}" if s.form == "row" else rf"{scale} \, {name}({x})"
            return s.equals(value + (bias if self._has_bias else "") if self.affine else f"{name}({x})")
        value = _norm_latex(str(x), str(b), layer, eps, "_b" if s.form == "einstein" else "")
        if not self.affine:
            return s.equals(value)
        times = rf"{gain['a']} " if s.form == "einstein" else rf"{gain} \odot "
        return s.equals(times + value + (bias if self._has_bias else ""))

    @property
    def _has_bias(self) -> bool:
        """True if the norm has a bias."""
        return self.form == "layer" and self.bias


def _rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """`gain x / sqrt(mean x^2 + eps)`, by the faster of two ways."""
    # Without gradients, on a CPU, torch's operation is slower than its parts. With gradients it stores fewer tensors.
    if torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype.itemsize < 4:  # torch's is exact in half precision
        return functional.rms_norm(x, x.shape[-1:], gain, eps)
    mean_square = (x * x).sum(-1, keepdim=True).mul_(1 / x.shape[-1])
    scaled = x * mean_square.add_(eps).rsqrt_()
    return scaled if gain is None else scaled * gain


def _norm_latex(x: str, inner: str, is_layer_norm: bool, eps: str, index: str) -> str:
    """The normalised vector, before gain and bias; `index` is the index that mean and variance run over."""
    mean, variance = rf"\operatorname{{mean}}{index}", rf"\operatorname{{var}}{index}"
    if is_layer_norm:
        return rf"\frac{{{x} - {mean}({inner})}}{{\sqrt{{{variance}({inner}) + {eps}}}}}"
    square = f"({inner})^2" if index else rf"{inner} \odot {inner}"
    return rf"\frac{{{x}}}{{\sqrt{{{mean}({square}) + {eps}}}}}"


@final
@dataclass(frozen=True)
class Dropout(VectorMap):
    """Dropout: `x' = m x / (1 - p)` with m ~ Bernoulli(1 - p) in training mode; otherwise `x' = x`.

    The TPM is deterministic for inference: the mask m is never enumerated. Parent: the vector `x`, `[d]`. The value has
    shape `[d]`.

    Args:
        p: The probability with which an entry is set to zero, from 0 to below 1. Default 0.1.

    >>> Dropout(0.1).value(EvalContext(), torch.ones(2))
    tensor([1., 1.])
    """

    p: Annotated[float, named("dropout p", check_below_one)] = 0.1

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return (0,)

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return functional.dropout(parents[0], self.p, training=context.training)

    def latex(self, s: Symbols) -> str:
        x, keep = s.of("x"), format_number(1 - self.p)
        s.define(
            rf"\text{{in training }} {s.node['a']} = \frac{{m}}{{{keep}}} {x}"
            rf", \; m \sim \operatorname{{Bernoulli}}({keep}) \text{{ for each entry}}"
        )
        return s.equals(x)


# recurrent nets


@final
@dataclass(frozen=True)
class Recur(TPM):
    """A recurrent step: `h' = s(W x + U h + b)`; deterministic. The TPM owns W, U and b.

    Parents, in order: the vector `x`, `[d]`, of the word, and the previous state `h`, `[dim]`. The value has shape
    `[dim]`.

    Args:
        dim: The width of the state.
        activation: The function s: `"relu"`, `"gelu"`, `"gelu_tanh"`, `"silu"`, `"tanh"`, `"sigmoid"` or `"identity"`.
            Default `"tanh"`.
        bias: Whether there is a bias. Default True.

    >>> sorted(Recur(3).parameters(Parent("x", (2,)), Parent("h", (3,))))
    ['U', 'W', 'bias']
    """

    dim: Annotated[int, check_int]
    activation: Annotated[str, check_activation] = "tanh"
    bias: Annotated[bool, check_bool] = True
    slots: ClassVar[tuple[str, ...]] = ("x", "h")

    def shape(self, *parents: Parent) -> Shape:
        for parent in parents:
            check_vector(parent)
        return (self.dim,)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        spread = (3 * self.dim) ** -0.5  # the standard deviation of torch's U(-1 / sqrt(dim), 1 / sqrt(dim))
        maps = zip("WU", parents, strict=True)
        parameters = {name: Parameter((self.dim, *parent.shape), spread) for name, parent in maps}
        return parameters | ({"bias": Parameter((self.dim,), fill=0.0)} if self.bias else {})

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        return tuple(Product((parent,), (self.dim, *parent.shape), has_parameter=True) for parent in parents)

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        x, h = parents
        return ACTIVATIONS[self.activation](
            apply_linear(context["W"], x, context["bias"] if self.bias else None) + apply_linear(context["U"], h)
        )

    def latex(self, s: Symbols) -> str:
        bias = s.plus(s.parameter("b")) if self.bias else ""
        inside = s.map(s.parameter("W"), s.of("x")) + f" + {s.map(s.parameter('U'), s.of('h'))}" + bias
        return s.equals(activation_latex(self.activation, inside))


@final
@dataclass(frozen=True)
class Memory(VectorMap):
    """The cell update of an LSTM: `cell' = forget * cell + input * candidate`, entry by entry; deterministic.

    Parents, in order: `input`, `candidate`, `forget` and the previous `cell`, `[d]` each. The value has shape `[d]`.

    >>> Memory().value(EvalContext(), *(torch.tensor([x]) for x in (1.0, 2.0, 0.5, 4.0)))
    tensor([4.])
    """

    slots: ClassVar[tuple[str, ...]] = ("input", "candidate", "forget", "cell")

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        input_, candidate, forget, cell = parents
        return torch.addcmul(forget * cell, input_, candidate)

    def latex(self, s: Symbols) -> str:
        input_, candidate, forget, cell = (str(s.of(slot)) for slot in self.slots)
        times = " " if s.form == "einstein" else r" \odot "
        return s.equals(f"{forget}{times}{cell} + {input_}{times}{candidate}")


@final
@dataclass(frozen=True)
class Gated(VectorMap):
    """A gated activation: `x' = g * s(x)`, entry by entry; deterministic.

    Parents, in order: the gate `g` and the vector `x`, `[d]` each. The value has shape `[d]`.

    Args:
        activation: The function s: `"relu"`, `"gelu"`, `"gelu_tanh"`, `"silu"`, `"tanh"`, `"sigmoid"` or `"identity"`.
            Default `"tanh"`.

    >>> Gated("relu").value(EvalContext(), torch.tensor([0.5, 0.5]), torch.tensor([-1.0, 2.0]))
    tensor([0., 1.])
    """

    activation: Annotated[str, check_activation] = "tanh"
    slots: ClassVar[tuple[str, ...]] = ("g", "x")

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        g, x = parents
        return g * ACTIVATIONS[self.activation](x)

    def latex(self, s: Symbols) -> str:
        times = " " if s.form == "einstein" else r" \odot "
        return s.equals(f"{s.of('g')}{times}{activation_latex(self.activation, s.of('x'))}")
