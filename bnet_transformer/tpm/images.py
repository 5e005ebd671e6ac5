"""Images as words: the patches of an image in reading order, behind a first word that has a vector of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, number, put, whole
from bnet_transformer.tpm.base import TPM, At, Parameter, Parent, Shape, vector
from bnet_transformer.tpm.symbols import Symbols


@final
@dataclass(frozen=True)
class Patches:
    """How an image `[channel, row, column]` is cut into words: patches of `high` rows and `wide` columns, row by row.

    Word 0 is of no patch (it gathers the image, and is given as zeros); rows and columns that fill no patch are left.

    >>> Patches(channels=3, rows=8, columns=8, high=4, wide=4).tokens
    ('[CLS]', '0,0', '0,1', '1,0', '1,1')
    """

    channels: int
    rows: int
    columns: int
    high: int
    wide: int

    def __post_init__(self) -> None:
        for what in ("channels", "rows", "columns", "high", "wide"):
            put(self, **{what: whole(f"{what} of the patches", getattr(self, what))})
        if self.high > self.rows or self.wide > self.columns:
            wanted = f"at most the image, {self.rows} x {self.columns}"
            raise BNetError("patches", expected=wanted, got=f"{self.high} x {self.wide}")

    @property
    def down(self) -> int:
        """How many patches stand below each other."""
        return self.rows // self.high

    @property
    def across(self) -> int:
        """How many patches stand side by side."""
        return self.columns // self.wide

    @property
    def words(self) -> int:
        """How many words an image has, its first among them."""
        return 1 + self.down * self.across

    @property
    def features(self) -> int:
        """How many numbers a patch has."""
        return self.channels * self.high * self.wide

    @property
    def tokens(self) -> tuple[str, ...]:
        """What the words are called: by the row and the column of their patch."""
        return ("[CLS]", *(f"{i},{j}" for i in range(self.down) for j in range(self.across)))

    def read(self, image: Tensor) -> Tensor:
        """The words of an image, `[word, feature]`; the features of a patch run over channel, row, column."""
        wanted = (self.channels, self.rows, self.columns)
        if tuple(image.shape) != wanted:
            raise BNetError("image", expected=f"[channel, row, column] of shape {wanted}", got=tuple(image.shape))
        kept = image[:, : self.down * self.high, : self.across * self.wide]
        cut = kept.unfold(1, self.high, self.high).unfold(2, self.wide, self.wide)
        words = cut.permute(1, 2, 0, 3, 4).reshape(-1, self.features)
        return torch.cat([words.new_zeros(1, self.features), words])


@final
@dataclass(frozen=True)
class Start(TPM):
    """The first word has a vector of its own, `u`; every other is passed on: `x_0 = u`, `x_i = e_i`.

    >>> Start().value(At({"vector": torch.tensor([9.])}, word=torch.arange(3)), torch.ones(3, 1)).squeeze()
    tensor([9., 1., 1.])
    """

    spread: float = 0.02
    slots: ClassVar[tuple[str, ...]] = ("x",)
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        put(self, spread=number("spread", self.spread, above=0))

    def shape(self, *parents: Parent) -> Shape:
        return (vector(parents[0]),)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return {"vector": Parameter(self.shape(*parents), self.spread)}

    def value(self, at: At, *parents: Tensor) -> Tensor:
        return torch.where((at.word == 0)[..., None], at["vector"], parents[0])

    def latex(self, s: Symbols) -> str:
        s.only("word")
        u, i = s.parameter("u"), s.own.word or 0
        return s.equals(rf"\begin{{cases}} {u} & {i} = 0 \\ {s.of('x')} & {i} > 0 \end{{cases}}")
