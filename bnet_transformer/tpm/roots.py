"""Roots and embeddings: inputs (`Given`), weights (`Weight`), positions, embeddings of words and image patches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_int
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import (
    TPM,
    EvalContext,
    Kind,
    Parameter,
    Parent,
    Patches,
    Shape,
    VectorMap,
    check_bool,
    check_discrete,
    check_positive,
    check_shape,
    choice,
    initial_spread,
    instance_of,
    min_int,
    named,
    optional,
)
from bnet_transformer.tpm.random import gather_entry
from bnet_transformer.tpm.symbols import FEATURE_LETTERS, Symbols, format_multiple, format_power


@final
@dataclass(frozen=True)
class Start(VectorMap):
    """The first word is replaced by a learnable vector: `x_0 = u`, and `x_i = e_i` for i > 0; deterministic.

    Parent: the vector `x`, `[d]`, of the same word. The value has shape `[d]`.

    Args:
        spread: The standard deviation of the initial normal distribution of `u`. Default 0.02.

    >>> Start().value(EvalContext({"vector": torch.tensor([9.])}, word=torch.arange(3)), torch.ones(3, 1)).squeeze()
    tensor([9., 1., 1.])
    """

    spread: Annotated[float, check_positive] = 0.02

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return {"vector": Parameter(self.shape(*parents), self.spread)}

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return (0,)

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return torch.where((context.word == 0)[..., None], context["vector"], parents[0])

    def latex(self, s: Symbols) -> str:
        s.require_form("word")
        u, i = s.parameter("u"), s.node.word or 0
        return s.equals(rf"\begin{{cases}} {u} & {i} = 0 \\ {s.of('x')} & {i} > 0 \end{{cases}}")


@final
@dataclass(frozen=True)
class Given(TPM):
    """An input, which the sentence gives: a tensor, or a state such as the id of a word in a vocabulary.

    It has no parents.

    Args:
        size: The shape of a tensor: an integer, or a tuple of integers. Default `()`, one number.
        states: The number of states, instead of `size`. None (default) for a tensor.
        default: The state of all nodes if the sentence gives none, such as the segment 0. None (default): the sentence
            must give the states.
        image: The division of an image into the vectors of all words. None (default) for other inputs.

    >>> Given(8).shape(), Given(states=100).states
    ((8,), 100)
    """

    size: Annotated[int | Shape, named("Given", check_shape)] = ()
    states: Annotated[int | None, optional(check_int)] = None
    default: Annotated[int | None, optional(min_int(0))] = None
    image: Annotated[Patches | None, optional(instance_of(Patches, "Patches, or None"))] = None
    kind: ClassVar[Kind] = "input"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.states is not None and self.size != ():
            actual = f"size={self.size} and states={self.states}"
            raise BNetError("Given", expected="either size or states=, not both", actual=actual)
        if self.image is not None and self.size != (self.image.features,):
            expected = f"a size of {self.image.features}, the number of features of a patch"
            raise BNetError("Given", expected=expected, actual=self.size)
        if self.default is not None and self.default >= (self.states or 0):
            expected = "None, because states= is not given" if self.states is None else f"a state below {self.states}"
            raise BNetError("default of Given", expected=expected, actual=self.default)

    @property
    def is_index_valued(self) -> bool:
        return self.states is not None

    def shape(self, *parents: Parent) -> Shape:
        return check_shape("Given", self.size)

    def latex(self, s: Symbols) -> str:
        given = s.node.with_accent("bar")[FEATURE_LETTERS[: s.rank]]
        s.define(rf"{given} \text{{ is given with the sentence}}")
        return s.equals(given)


@final
@dataclass(frozen=True)
class Weight(TPM):
    """A learnable tensor: `P(W) = delta(W, value)`; deterministic. It has no parents.

    Args:
        size: The shape: an integer, or a tuple of integers.
        spread: The standard deviation of the initial normal distribution. None (default) for `1/sqrt(columns)`.

    >>> Weight((4, 8)).shape()
    (4, 8)
    """

    size: Annotated[int | Shape, named("Weight", check_shape)]
    spread: Annotated[float | None, optional(check_positive)] = None
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> Shape:
        return check_shape("Weight", self.size)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        shape = self.shape()
        return {"value": Parameter(shape, initial_spread(shape, self.spread))}

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return context["value"]

    def latex(self, s: Symbols) -> str:
        s.require_form("word")
        return s.delta(s.node.with_accent("hat"))


@final
@dataclass(frozen=True)
class Sinusoid(TPM):
    """The sinusoidal encoding of a word's position, for sentences of any length; deterministic. It has no parents.

    For word i, feature 2e is `sin(i / base^(2e/dim))` and feature 2e+1 is `cos(i / base^(2e/dim))` (Vaswani et al.
    2017). Words and features are numbered from 0.

    Args:
        dim: The width of the encoding.
        base: The base of the wavelengths. Default 10000.
        halves: Whether all sines precede all cosines, instead of alternating. Default False.
        first: 1 numbers words and features from 1, so that the first feature is a cosine. Default 0.
        rounded: Whether the encoding is rounded to float32, as in a stored table. Default False.

    >>> Sinusoid(6).value(EvalContext(word=torch.tensor(0)))
    tensor([0., 1., 0., 1., 0., 1.])
    """

    dim: Annotated[int, check_int]
    base: Annotated[float, check_positive] = 10_000.0
    halves: Annotated[bool, check_bool] = False
    first: Annotated[int, choice(0, 1)] = 0
    rounded: Annotated[bool, check_bool] = False
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> Shape:
        return (self.dim,)

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        offset = 0 if self.halves else self.first
        pairs = (self.dim + offset + 1) // 2
        power = torch.arange(pairs, dtype=torch.float64, device=context.word.device) * (2 / self.dim)
        angle = (context.word + self.first).to(torch.float64)[..., None] * self.base**-power
        waves = [angle.sin(), angle.cos()]
        encoding = torch.cat(waves, -1) if self.halves else torch.stack(waves, -1).flatten(-2)
        encoding = encoding[..., offset : offset + self.dim]
        if self.rounded:
            encoding = encoding.to(torch.float32).to(torch.float64)
        return encoding.to(context.dtype)

    def latex(self, s: Symbols) -> str:
        position = f"({s.node.word or 0} + 1)" if self.first else s.node.word or 0

        def angle(power: str) -> str:
            return f"{position} / {format_power(self.base, f'{power}/{self.dim}')}"

        if self.halves:
            half = (self.dim + 1) // 2
            rows = (("2e", f"e < {half}"), (f"2(e-{half})", rf"e \ge {half}"))
        else:
            rows = (("e", r"e \text{ even}"), ("(e-1)", r"e \text{ odd}"))
            if self.first:
                s.define(rf"\text{{features }} e \text{{ of }} {s.node.plain} \text{{ count from }} 1")
        waves = zip((r"\sin", r"\cos"), rows, strict=True)
        cases = r" \\ ".join(rf"{wave}({angle(power)}) & {condition}" for wave, (power, condition) in waves)
        return s.indicator(rf"{s.node.entry('e')} = \begin{{cases}} {cases} \end{{cases}}")


@final
@dataclass(frozen=True)
class Positions(TPM):
    """A learnable vector for each position: row i of a table `E`, `[length, dim]`; deterministic. It has no parents.

    Args:
        length: The maximum number of words.
        dim: The width of a vector.
        spread: The standard deviation of the initial normal distribution. Default 0.02.

    >>> Positions(length=512, dim=8).shape()
    (8,)
    """

    length: Annotated[int, check_int]
    dim: Annotated[int, check_int]
    spread: Annotated[float, check_positive] = 0.02
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> Shape:
        return (self.dim,)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return {"table": Parameter((self.length, self.dim), self.spread)}

    @property
    def max_words(self) -> int | None:
        return self.length

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return _lookup_rows(context["table"], context.word)

    def latex(self, s: Symbols) -> str:
        s.define(rf"{s.parameter('E', s.i)} \text{{ is the vector of position }} {s.i}")
        return s.equals(s.parameter("E", s.i, letters="a"))


@final
@dataclass(frozen=True)
class Embed(TPM):
    """The embedding of a word: `scale * E[token]`, a row of a table `E`, `[states, dim]`; deterministic.

    Parents, in order: the table `W`, `[states, dim]`, if `tied`; the discrete node `token`.

    Args:
        dim: The width of a vector.
        scale: The factor of the vector. Default 1.
        tied: Whether the table is a parent, which other nodes can share, such as the readout. Default False: the TPM
            owns a learnable table.
        spread: The standard deviation of the initial normal distribution of the table that the TPM owns. Default 1.

    >>> Embed(dim=8).shape(Parent("token", states=100))
    (8,)
    """

    dim: Annotated[int, check_int]
    scale: Annotated[float, check_float] = 1.0
    tied: Annotated[bool, check_bool] = False
    spread: Annotated[float, check_positive] = 1.0
    elementwise: ClassVar[bool] = True

    def get_slots(self) -> tuple[str, ...]:
        return ("W", "token") if self.tied else ("token",)

    def shape(self, *parents: Parent) -> Shape:
        states = check_discrete(parents[-1])
        if self.tied and parents[0].shape != (states, self.dim):
            raise BNetError(parents[0].name, expected=f"a table of shape {(states, self.dim)}", actual=parents[0].form)
        return (self.dim,)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        states = parents[-1].states or 0
        return {} if self.tied else {"table": Parameter((states, self.dim), self.spread)}

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        table = parents[0] if self.tied else context["table"]
        return self.scale * _lookup_rows(table, parents[-1])

    def latex(self, s: Symbols) -> str:
        token = str(s.of("token"))
        row = s.weight("W", "a").with_sub(token) if self.tied else s.parameter("E", token, letters="a")
        s.define(rf"{row.plain} \text{{ is row }} {token} \text{{ of a table}}")
        return s.equals(format_multiple(self.scale, row.T if s.form == "row" else str(row)))


def _lookup_rows(table: Tensor, index: Tensor) -> Tensor:
    """Row `index` of a table `[..., rows, dim]`; leading dims broadcast."""
    if math.prod(table.shape[:-2]) == 1:
        return torch.nn.functional.embedding(index, table.reshape(table.shape[-2:]))
    return gather_entry(table, index, 1)
