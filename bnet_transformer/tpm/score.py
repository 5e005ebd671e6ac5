"""The parts of attention: scores (how much word i asks for word j) and normalisers."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, number, one_of, put
from bnet_transformer.tpm.base import Parent, Product, matrix, vector
from bnet_transformer.tpm.notation import function, scaled, scripts
from bnet_transformer.tpm.rotary import Rotary, Turns
from bnet_transformer.tpm.symbols import Symbol, Symbols


@dataclass(frozen=True)
class Score(abc.ABC):
    """A score: `[..., m]` from the word's own vector `[..., d]` and those it reads `[..., m, d]`."""

    roles: ClassVar[tuple[str, str]]
    extra: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def check(self, query: Parent, key: Parent, *extra: Parent) -> None:
        """Refuse shapes that cannot be scored."""

    @abc.abstractmethod
    def against(self, query: Tensor, keys: Tensor, i: Tensor, j: Tensor, *extra: Tensor) -> Tensor:
        """`s_ij` for one query i and every key j."""

    @abc.abstractmethod
    def towards(self, queries: Tensor, key: Tensor, j: Tensor, i: Tensor, *extra: Tensor) -> Tensor:
        """`s_ji` for every query j and one key i (the softmax over queries of the geometric integrator)."""

    def products(self, own: Parent, read: Parent, *extra: Parent) -> tuple[Product, ...] | None:
        """The matrix products of the scores of one word, from its own vector and those it reads; None if not said."""
        return None

    def latex(self, s: Symbols, query: str, key: str) -> str:
        r"""The score in LaTeX, from the slots of query and key; the one with a dot is read, the other is own.

        In the forms of matrices it is the matrix of all scores, the word's own row by row in `row`, column by
        column in `column`. What a score that says nothing more is: `\operatorname{Score}(q_i, k_j)`.
        """
        given = ", ".join(str(s[slot]) for slot in (query, key, *self.extra))
        return f"{function(type(self).__name__)}({given})"


@final
@dataclass(frozen=True)
class Dot(Score):
    """`scale * q_i . k_j`; `scale=None` is 1/sqrt(d_k). `rotary=base`, or a `Rotary`, turns q by i and k by j.

    >>> Dot(None).against(torch.ones(4), torch.ones(2, 4), torch.tensor(0), torch.arange(2))
    tensor([2., 2.])
    """

    scale: float | None = 1.0
    rotary: float | Rotary | None = None
    roles: ClassVar[tuple[str, str]] = ("q", "k")

    def __post_init__(self) -> None:
        if self.scale is not None:
            put(self, scale=number("scale", self.scale))
        self.turning  # noqa: B018  a base is checked where a Rotary is made of it

    @property
    def turning(self) -> Rotary | None:
        """The rotary positions, where there are some."""
        return self.rotary if self.rotary is None or isinstance(self.rotary, Rotary) else Rotary(self.rotary)

    def check(self, query: Parent, key: Parent, *extra: Parent) -> None:
        width = vector(key, vector(query), why=f"as {query.name}")
        if self.turning is not None:
            self.turning.check(width, query.name, query.form)

    def factor(self, width: int) -> float:
        """The scale for keys of that width."""
        return width**-0.5 if self.scale is None else self.scale

    def against(self, query: Tensor, keys: Tensor, i: Tensor, j: Tensor, *extra: Tensor) -> Tensor:
        q, k = self.turn(query, i), self.turn(keys, j)
        return self.factor(q.shape[-1]) * torch.einsum("...d,...md->...m", q, k)

    def towards(self, queries: Tensor, key: Tensor, j: Tensor, i: Tensor, *extra: Tensor) -> Tensor:
        return self.against(key, queries, i, j)

    def products(self, own: Parent, read: Parent, *extra: Parent) -> tuple[Product, ...]:
        return (Product((own, read), read.shape, over=(read,)),)

    def latex(self, s: Symbols, query: str, key: str) -> str:
        product, root = self._product(s, query, key), rf"\sqrt{{{s.width(key)}}}"
        if self.scale is not None:
            return scaled(self.scale, product)
        top, rest = (product, "") if s.form in ("row", "column") else ("1", f" {product}")
        return rf"\frac{{{top}}}{{{root}}}{rest}"

    def _product(self, s: Symbols, query: str, key: str) -> str:
        q, k = s.of(query, "b"), s.of(key, "b")
        own, read = (q, k) if key.endswith(".") else (k, q)
        if self.turning is not None:
            return self._turned_product(s, self.turning, q, k, own, read)
        products = {"word": f"{q.T} {k}", "row": f"{own} {read.T}", "column": f"{read.T} {own}"}
        return products.get(s.form, f"{q} {k}")

    def _turned_product(self, s: Symbols, rotary: Rotary, q: Symbol, k: Symbol, own: Symbol, read: Symbol) -> str:
        def turn(i: str) -> str:
            return scripts("R", [i], s.role)

        rotary.define(s, turn("i"), s.width(0))
        ours, theirs = (turn(x.word or "0") for x in (q, k))
        if s.form == "word":
            return rf"({ours} {q})^\top {theirs} {k}"
        if s.form == "einstein":
            return rf"({ours})_{{bd}} {q['d']} ({theirs})_{{be}} {k['e']}"
        if not s.whole:
            s.only("word")
        rot = scripts(r"\operatorname{rot}", (), s.role)
        if s.form == "row":
            s.define(rf"{rot}(Z)_{{i:}} = Z_{{i:}} ({turn('i')})^\top")
            return rf"{rot}({own}) {rot}({read})^\top"
        s.define(rf"{rot}(Z)_{{:i}} = {turn('i')} Z_{{:i}}")
        return rf"{rot}({read})^\top {rot}({own})"

    def turn(self, x: Tensor, position: Tensor, turns: Turns | None = None) -> Tensor:
        """Vectors of words at these positions, turned where there are rotary positions."""
        return x if self.turning is None else self.turning.turn(x, position, turns)


@final
@dataclass(frozen=True)
class Bilinear(Score):
    """`scale * z_i^T A z_j`, the correlation matrix `Z^T A Z` of seed 000; A is a weight node."""

    scale: float = 1.0
    roles: ClassVar[tuple[str, str]] = ("z", "z")
    extra: ClassVar[tuple[str, ...]] = ("A",)

    def __post_init__(self) -> None:
        put(self, scale=number("scale", self.scale))

    def check(self, query: Parent, key: Parent, *extra: Parent) -> None:
        wanted = (vector(query), vector(key))
        if matrix(extra[0]) != wanted:
            raise BNetError(extra[0].name, expected=f"a matrix of shape {wanted}", got=extra[0].form)

    def against(self, query: Tensor, keys: Tensor, i: Tensor, j: Tensor, *extra: Tensor) -> Tensor:
        Az = torch.einsum("...d,...de->...e", query, extra[0])  # the one word first
        return self.scale * torch.einsum("...e,...me->...m", Az, keys)

    def towards(self, queries: Tensor, key: Tensor, j: Tensor, i: Tensor, *extra: Tensor) -> Tensor:
        Az = torch.einsum("...de,...e->...d", extra[0], key)
        return self.scale * torch.einsum("...md,...d->...m", queries, Az)

    def products(self, own: Parent, read: Parent, *extra: Parent) -> tuple[Product, ...]:
        (A,) = extra
        return Product((own, A), A.shape), Product((own, A, read), read.shape, over=(read,))

    def latex(self, s: Symbols, query: str, key: str) -> str:
        z, A, w = s.of(query, "b"), s.weight("A", "bd"), s.of(key, "d")
        over_keys = key.endswith(".")
        own, read, turned = (z, w, A.T) if over_keys else (w, z, str(A))
        straight = str(A) if over_keys else A.T
        products = {
            "word": f"{z.T} {A} {w}",
            "row": f"{own} {straight} {read.T}",
            "column": f"{read.T} {turned} {own}",
        }
        return scaled(self.scale, products.get(s.form, f"{z} {A} {w}"))


@final
@dataclass(frozen=True)
class Normaliser:
    """From scores to weights: `softmax` over what is read (then the weights are `P(j | i)`), `sigmoid`, or `none`.

    >>> Normaliser().weights(torch.tensor([0., 0., 9.]), torch.tensor([True, True, False]))
    tensor([0.5000, 0.5000, 0.0000])
    """

    kind: str = "softmax"

    def __post_init__(self) -> None:
        one_of("normaliser", self.kind, ("softmax", "sigmoid", "none"))

    def weights(self, scores: Tensor, mask: Tensor) -> Tensor:
        """`[..., m]` over the words that the mask reads; the others weigh nothing."""
        if self.kind == "softmax":
            return scores.masked_fill(~mask, -torch.inf).softmax(-1)
        weights = scores.sigmoid() if self.kind == "sigmoid" else scores
        return weights.masked_fill(~mask, 0.0)
