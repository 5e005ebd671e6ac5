"""Linear maps, sums and pooling: `W x + b`, the sum of parents, the sum of heads through `W_o`, pooled words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_int
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import (
    TPM,
    EvalContext,
    Parameter,
    Parent,
    Product,
    Shape,
    check_matrix,
    check_single_axis,
    check_vector,
)
from bnet_transformer.tpm.field_checks import check_bool, choice, named, optional
from bnet_transformer.tpm.symbols import Symbols

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
        return s.equals(pool_latex(self.how, s, "x."))


def pool_words(reduction: str, x: Tensor, mask: Tensor) -> Tensor:
    """The mean or sum, `[..., d]`, of the vectors `[..., m, d]` for which the mask `[..., m]` is true."""
    weight = mask.to(x.dtype)
    if reduction == "mean":
        weight = weight / weight.sum(-1, keepdim=True)
    return (weight[..., None] * x).sum(-2)


def pool_latex(reduction: str, s: Symbols, slot: str, letter: str = "a") -> str:
    """The pooled collection in LaTeX, in the form of `s`; `letter` is the feature index."""
    factor = "" if reduction == "sum" else rf"\frac{{1}}{{{s.slot(slot).count}}} "
    x = s.of(slot, letter)
    if s.form in ("word", "einstein") or s.index_letters(slot) != "j":
        return f"{factor}{s.sum(slot)} {x}"
    if s.slot(slot).mask:  # some words have no arrow
        s.require_form("word")
    one, across = r"\mathbf{1}", r"\mathbf{1}^\top"
    if s.is_full_matrix:
        one = across = f"{one} {across}"
    return f"{factor}{across} {x}" if s.form == "row" else f"{factor}{x} {one}"
