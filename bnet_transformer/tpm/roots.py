"""Roots and embeddings: inputs (`Given`), weights (`Weight`), positions, embeddings of words and of image patches."""

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
    Shape,
    VectorMap,
    check_discrete,
    check_shape,
    initial_spread,
)
from bnet_transformer.tpm.field_checks import (
    CheckedDataclass,
    check_bool,
    check_positive,
    choice,
    instance_of,
    min_int,
    named,
    optional,
)
from bnet_transformer.tpm.random import gather_entry
from bnet_transformer.tpm.symbols import FEATURE_LETTERS, Symbols, format_multiple, format_power


@final
@dataclass(frozen=True)
class Patches(CheckedDataclass):
    """How an image `[channel, row, column]` is cut into words: patches of `high` rows and `wide` columns, row by row.

    Word 0 is no patch (it gathers the image, and its input is zero); rows and columns that fill no patch are dropped.

    >>> Patches(channels=3, rows=8, columns=8, high=4, wide=4).tokens
    ('[CLS]', '0,0', '0,1', '1,0', '1,1')
    """

    channels: Annotated[int, check_int]
    rows: Annotated[int, check_int]
    columns: Annotated[int, check_int]
    high: Annotated[int, check_int]
    wide: Annotated[int, check_int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high > self.rows or self.wide > self.columns:
            expected = f"at most the image, {self.rows} x {self.columns}"
            raise BNetError("patches", expected=expected, actual=f"{self.high} x {self.wide}")

    @property
    def num_patch_rows(self) -> int:
        """The number of patches in a column of the image."""
        return self.rows // self.high

    @property
    def num_patch_columns(self) -> int:
        """The number of patches in a row of the image."""
        return self.columns // self.wide

    @property
    def words(self) -> int:
        """The number of words of an image, with the first."""
        return 1 + self.num_patch_rows * self.num_patch_columns

    @property
    def features(self) -> int:
        """The number of features of a patch."""
        return self.channels * self.high * self.wide

    @property
    def tokens(self) -> tuple[str, ...]:
        """The names of the words: the row and the column of each patch."""
        return ("[CLS]", *(f"{i},{j}" for i in range(self.num_patch_rows) for j in range(self.num_patch_columns)))

    def patchify(self, image: Tensor) -> Tensor:
        """The words of an image, `[word, feature]`; the features of a patch run over channel, row, column."""
        shape = (self.channels, self.rows, self.columns)
        if tuple(image.shape) != shape:
            raise BNetError("image", expected=f"[channel, row, column] of shape {shape}", actual=tuple(image.shape))
        cropped = image[:, : self.num_patch_rows * self.high, : self.num_patch_columns * self.wide]
        patches = cropped.unfold(1, self.high, self.high).unfold(2, self.wide, self.wide)
        words = patches.permute(1, 2, 0, 3, 4).reshape(-1, self.features)
        return torch.cat([words.new_zeros(1, self.features), words])


@final
@dataclass(frozen=True)
class Start(VectorMap):
    """The first word has a learnable vector `u`; every other word is copied: `x_0 = u`, `x_i = e_i`.

    >>> Start().value(EvalContext({"vector": torch.tensor([9.])}, word=torch.arange(3)), torch.ones(3, 1)).squeeze()
    tensor([9., 1., 1.])
    """

    spread: Annotated[float, check_positive] = 0.02

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return {"vector": Parameter(self.shape(*parents), self.spread)}

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return torch.where((context.word == 0)[..., None], context["vector"], parents[0])

    def latex(self, s: Symbols) -> str:
        s.require_form("word")
        u, i = s.parameter("u"), s.node.word or 0
        return s.equals(rf"\begin{{cases}} {u} & {i} = 0 \\ {s.of('x')} & {i} > 0 \end{{cases}}")


@final
@dataclass(frozen=True)
class Given(TPM):
    """A value that comes with the sentence: a vector for each word, or one of `states` words of a vocabulary.

    `default` is the state of every node where the sentence says nothing of them. `image` says how the vectors of all
    words are cut from an image.

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
            raise BNetError("Given", expected="a size or states=, not both", actual=self)
        if self.image is not None and self.size != (self.image.features,):
            raise BNetError("Given", expected=f"the size {self.image.features} of a patch", actual=self.size)
        if self.default is not None and self.default >= (self.states or 0):
            raise BNetError("default", expected="one of the states", actual=self)

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
    """A learnable root, `P(W) = delta(W, value)`; starts normal with `spread`, 1/sqrt(columns) by default.

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
    """The sinusoidal encoding of a word's position, for any length.

    Feature 2e is `sin(i / base^(2e/dim))` and feature 2e+1 the cosine of the same angle, as in Vaswani et al. (2017);
    `halves=True` puts all sines first, then all cosines. Words and features count from 0; `first=1` counts both from
    1, so that the even features, which have the sines, start with the second. `rounded=True` rounds to float32, as a
    table that is stored so.

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
        return (encoding.to(torch.float32) if self.rounded else encoding).to(context.dtype)

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
    """A learnable vector for each position, up to `length` words.

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
    """The vector of a word: row `token` of its own table, times `scale`; `tied=True` takes the table from a parent.

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
    """Row `index` of a table `[..., rows, dim]`, leading dims broadcast."""
    if math.prod(table.shape[:-2]) == 1:
        return torch.nn.functional.embedding(index, table.reshape(table.shape[-2:]))
    return gather_entry(table, index, 1)
