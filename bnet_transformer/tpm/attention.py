"""Attention as the TPM it is: a categorical over words `P(j | i)`, and its mix of values `E_j[v_j]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeVar, final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, one_of
from bnet_transformer.tpm.base import TPM, At, Kind, Parent, Product, Shape, single_axis, vector
from bnet_transformer.tpm.notation import scripts
from bnet_transformer.tpm.score import Bias, Dot, Normaliser, Score
from bnet_transformer.tpm.symbols import Symbols

T = TypeVar("T", Parent, Tensor)


@dataclass(frozen=True)
class _Reading:
    """What `Attention` and `Read` share: from score, bias and normaliser to the weights of the words read."""

    score: Score
    normaliser: Normaliser
    over: str
    bias: Bias | None

    def slots(self) -> tuple[str, ...]:
        own, read = self.score.roles
        pair = (own, f"{read}.") if self.over == "keys" else (f"{own}.", read)
        return (*pair, *self.score.extra, *(("b",) if self.bias else ()))

    def read(self, parents: tuple[Parent, ...]) -> Parent:
        return parents[1 if self.over == "keys" else 0]

    def check(self, parents: tuple[Parent, ...]) -> None:
        query, key, *extra = parents
        single_axis(self.read(parents))
        if self.bias:
            self.bias.check(extra.pop())
        self.score.check(query, key, *extra)

    def weights(self, at: At, parents: tuple[Tensor, ...]) -> Tensor:
        return self.normaliser.weights(*self.scores(at, parents))

    def scores(self, at: At, parents: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The scores of what is read, and the mask of who is."""
        slot = next(slot for slot in self.slots() if slot.endswith("."))
        query, key, *extra = parents
        i, j = at.word, at.read[slot]
        table = extra.pop() if self.bias else None
        if self.over == "keys":
            scores = self.score.against(query, key, i, j, *extra)
        else:
            scores = self.score.towards(query, key, j, i, *extra)
        if self.bias and table is not None:
            scores = scores + self.bias.bias(table, i, j, from_key=self.over == "queries")
        return scores, at.mask[slot]

    def products(self, parents: tuple[Parent, ...]) -> tuple[Product, ...] | None:
        """The matrix products of the scores."""
        own, read = parents[:2] if self.over == "keys" else parents[1::-1]
        return self.score.products(own, read, *parents[2 : len(parents) - (self.bias is not None)])

    def latex(self, s: Symbols) -> tuple[str, str]:
        """The scores (with the mask, in the forms that have one) and the name of the normaliser."""
        query, key = self.slots()[:2]
        read = key if key.endswith(".") else query
        scores = self.score.latex(s, query, key) + (
            self.bias.latex(s, read, from_key=self.over == "queries") if self.bias else ""
        )
        if self.normaliser.kind != "softmax":
            return scores, {"sigmoid": r"\operatorname{sigmoid}"}.get(self.normaliser.kind, "")
        mask = s.mask(read) if s.form != "word" else ""
        if s.form in ("row", "column"):
            s.define(rf"\operatorname{{softmax}} \text{{ acts on each {s.form}}}")
        below = [r"\text{queries}"] if self.over == "queries" else []
        below += ["j"] if s.form == "einstein" else []
        return scores + (f" + {mask}" if mask else ""), scripts(r"\operatorname{softmax}", below)

    def fraction(self, s: Symbols, top: Symbols) -> str:
        """The softmax of one word, written out: the scores of `top` over the sum of all."""
        read = next(slot for slot in self.slots() if slot.endswith("."))
        over, under = (self.latex(each)[0] for each in (top, s.prime()))
        short = self.bias is None and self.score == Dot()
        e = "e^{%s}" if short else r"\exp\left(%s\right)"
        return rf"\frac{{{e % over}}}{{{s.prime().sum(read)} {e % under}}}"


@final
@dataclass(frozen=True)
class Attention(TPM):
    """`x'_i = sum_j v_j P(j | i)` with `P(j | i) = normaliser_j(score(q_i, k_j))`, `+ x_i` with `residual`.

    Parents q, k., v. (then the score's matrix A, a bias table b, the residual x, as they are asked for). Over
    `"queries"` the word is its key: it takes q., k, v. and mixes by a softmax over the queries that reach it.
    The mix may be of x itself: let x fill the slot v.

    >>> Attention().takes(), Attention(over="queries", residual=True).takes()
    (('q', 'k.', 'v.'), ('q.', 'k', 'v.', 'x'))
    """

    score: Score = field(default_factory=Dot)
    normaliser: Normaliser = field(default_factory=Normaliser)
    over: str = "keys"
    bias: Bias | None = None
    residual: bool = False

    def __post_init__(self) -> None:
        _check_parts(self.score, self.normaliser, self.over, self.bias)
        one_of("residual", self.residual, (True, False))

    @property
    def _reading(self) -> _Reading:
        return _Reading(self.score, self.normaliser, self.over, self.bias)

    def takes(self) -> tuple[str, ...]:
        pair, rest = self._reading.slots()[:2], self._reading.slots()[2:]
        return (*pair, "v.", *rest, *(("x",) if self.residual else ()))

    def shape(self, *parents: Parent) -> Shape:
        reading, v, x = self._part(parents)
        self._reading.check(reading)
        read = self._reading.read(reading)
        if (read.reads, read.over) != (v.reads, v.over):
            wanted = f"values of the words that are read, as {read.name} ({_told(read)})"
            raise BNetError(v.name, expected=wanted, got=_told(v))
        width = vector(v)
        if x is not None:
            vector(x, width, why="the residual is added to the mix")
        return (width,)

    def products(self, *parents: Parent) -> tuple[Product, ...] | None:
        reading, v, _ = self._part(parents)
        scores = self._reading.products(reading)
        mix = Product((*reading, v), v.shape, over=(self._reading.read(reading),))
        return None if scores is None else (*scores, mix)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        return self.mix(self._reading.weights(at, self._part(parents)[0]), *parents)

    def scores(self, at: At, *parents: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of the words read, before they are normalised, and the mask of who is read."""
        return self._reading.scores(at, self._part(parents)[0])

    def mix(self, weights: Tensor, *parents: Tensor) -> Tensor:
        """`sum_j v_j w_j (+ x)` for these weights of the words; of the parents it reads `mixed_slots`."""
        _, v, x = self._part(parents)
        if v.dim() > 2 and v.shape[-3] == 1 and weights.dim() >= v.dim() - 1:  # all words read the same values
            mix = weights @ v.squeeze(-3)
        else:
            mix = torch.einsum("...m,...md->...d", weights, v)
        return mix if x is None else mix + x

    def mixed_slots(self) -> tuple[str, ...]:
        """The slots that are mixed or added: all but those on which `P(j | i)` depends."""
        return tuple(slot for slot in self.takes() if slot not in self.reading_slots())

    def reading(self, at: At, *parents: Tensor) -> Tensor | None:
        return self._reading.weights(at, self._part(parents)[0]) if self.normaliser.kind == "softmax" else None

    def latex(self, s: Symbols) -> str:
        reading = self._reading
        read = next(slot for slot in reading.slots() if slot.endswith("."))
        s.over_words(read, "v.")
        if self.over == "queries" and self.normaliser.kind == "softmax":
            s.define(r"\text{the softmax runs over queries: word } i \text{ is the key (q and k have changed roles)}")
        rest = f" + {s.of('x')}" if self.residual else ""
        v = s.of("v.")
        if s.form == "word":
            mix = self._word_by_word(s, read)
            return s.equals(f"{{{mix}}}{rest}" if rest else mix)
        scores, name = reading.latex(s)
        value = rf"{name}\left({scores}\right)"
        gate = s.mask(read, "B") if self.normaliser.kind != "softmax" else ""
        if gate:
            value = f"{gate} {value}" if s.form == "einstein" else rf"\left({gate} \odot {value}\right)"
        return s.equals((f"{value} {v}" if s.form == "row" else f"{v} {value}") + rest)

    def _word_by_word(self, s: Symbols, read: str) -> str:
        """The chapter's own telling: the mix of values under the attention TPM, which is their mean given i."""
        v, total = s["v."], s.sum("v.")
        if self.normaliser.kind != "softmax":
            scores, name = self._reading.latex(s)
            return rf"{total} {v} \, {name}\left({scores}\right)"
        given = s.index(read) + (rf" \mid {s.own.word}" if s.own.word else "")
        over = "" if self.over == "keys" else r"\ \text{(softmax over the queries)}"
        weights = rf"\underbrace{{{self._reading.fraction(s, s)}}}_{{P({given}){over}}}"
        return rf"\underbrace{{{total} {v} \, {weights}}}_{{\mathbb{{E}}_{{{given}}}[{v}]}}"

    def reading_slots(self) -> tuple[str, ...]:
        return self._reading.slots()

    @property
    def may_read_nothing(self) -> bool:
        return self.normaliser.kind != "softmax"

    @property
    def has_reading(self) -> bool:
        """False where the weights are no distribution."""
        return self.normaliser.kind == "softmax"

    def why_no_reading(self) -> str:
        return f"the normaliser {self.normaliser.kind!r} gives weights that are no distribution"

    def _part(self, parents: tuple[T, ...]) -> tuple[tuple[T, ...], T, T | None]:
        end = len(parents) - 1 if self.residual else len(parents)
        return parents[:2] + parents[3:end], parents[2], parents[-1] if self.residual else None


@final
@dataclass(frozen=True)
class Read(TPM):
    """The word that is read, as a variable: `P(j | i) = softmax_j(score(q_i, k_j))`; discrete.

    A child that picks word `j` of the values makes attention *marginal*: `x'_i = v_j` with probability `P(j | i)`.

    >>> Read().takes(), Read().kind
    (('q', 'k.'), 'discrete')
    """

    score: Score = field(default_factory=Dot)
    over: str = "keys"
    bias: Bias | None = None
    kind: ClassVar[Kind] = "discrete"

    def __post_init__(self) -> None:
        _check_parts(self.score, Normaliser(), self.over, self.bias)

    @property
    def _reading(self) -> _Reading:
        return _Reading(self.score, Normaliser(), self.over, self.bias)

    def takes(self) -> tuple[str, ...]:
        return self._reading.slots()

    def shape(self, *parents: Parent) -> Shape:
        self._reading.check(parents)
        read = self._reading.read(parents)
        if read.reads is None:
            raise BNetError(read.name, expected="words to read", got=read.form)
        return ()

    def products(self, *parents: Parent) -> tuple[Product, ...] | None:
        return self._reading.products(parents)

    def logits(self, at: At, *parents: Tensor) -> Tensor:
        scores, mask = self._reading.scores(at, parents)
        return scores.masked_fill(~mask, -torch.inf)

    def reading(self, at: At, *parents: Tensor) -> Tensor | None:
        return self._reading.weights(at, parents)

    def latex(self, s: Symbols) -> str:
        read = next(slot for slot in self.takes() if slot.endswith("."))
        s.over_words(read)
        if s.form == "word":
            return self._reading.fraction(s, s.read_at(read, s.state))
        return s.softmax(*self._reading.latex(s), "j")


def _told(parent: Parent) -> str:
    if parent.reads is None:
        return parent.form
    stack, reach = parent.reads
    return f"reach {reach}" + (f" of stack {stack!r}" if stack else "")


def _check_parts(score: object, normaliser: object, over: object, bias: object) -> None:
    if not isinstance(score, Score):
        raise BNetError("score", expected="a score", got=score, allowed="Dot(), Bilinear(), or a Score of yours")
    if not isinstance(normaliser, Normaliser):
        raise BNetError("normaliser", expected="a Normaliser", got=normaliser)
    one_of("over", over, ("keys", "queries"))
    if bias is not None and not isinstance(bias, Bias):
        raise BNetError("bias", expected="a bias by distance", got=bias, allowed="Relative(limit), Buckets(), None")
