"""Attention as the TPM it is: a categorical over words `P(j | i)`, and its mix of values `E_j[v_j]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeVar, final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import TPM, At, Kind, Parent, Product, Shape, single_axis, vector
from bnet_transformer.tpm.checks import choice, flag, instance, optional
from bnet_transformer.tpm.score import Bias, Dot, Normaliser, Score
from bnet_transformer.tpm.symbols import Symbols, scripts

T = TypeVar("T", Parent, Tensor)


class _Reading(TPM):
    """What `Attention` and `Read` share: from score, bias and normaliser to the weights of the words read."""

    score: Annotated[Score, instance(Score, "a score", "Dot(), Bilinear(), or a Score of yours")]
    over: Annotated[str, choice("keys", "queries")]
    bias: Annotated[Bias | None, optional(instance(Bias, "a bias by distance", "Relative(limit), Buckets(), None"))]
    normaliser = Normaliser()

    def reading_slots(self) -> tuple[str, ...]:
        own, read = self.score.roles
        pair = (own, f"{read}.") if self.over == "keys" else (f"{own}.", read)
        return (*pair, *self.score.extra, *(("b",) if self.bias else ()))

    def reading_parents(self, parents: tuple[T, ...]) -> tuple[T, ...]:
        """The parents that fill `reading_slots`."""
        return parents

    def reading(self, at: At, *parents: Tensor) -> Tensor | None:
        return self.normaliser.weights(*self.scores(at, *parents)) if self.has_reading else None

    def scores(self, at: At, *parents: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of the words read, before they are normalised, and the mask of who is read."""
        query, key, *extra = self.reading_parents(parents)
        i, j = at.word, at.read[self._read_slot]
        table = extra.pop() if self.bias else None
        if self.over == "keys":
            scores = self.score.against(query, key, i, j, *extra)
        else:
            scores = self.score.towards(query, key, j, i, *extra)
        if self.bias and table is not None:
            scores = scores + self.bias.bias(table, i, j, from_key=self.over == "queries")
        return scores, at.mask[self._read_slot]

    def products(self, *parents: Parent) -> tuple[Product, ...] | None:
        """The matrix products of the scores."""
        query, key, *extra = self.reading_parents(parents)
        own, read = (query, key) if self.over == "keys" else (key, query)
        return self.score.products(own, read, *(extra[:-1] if self.bias else extra))

    @property
    def _read_slot(self) -> str:
        """The slot of the words read."""
        return self.reading_slots()[1 if self.over == "keys" else 0]

    def _check(self, parents: tuple[Parent, ...]) -> Parent:
        """Refuse shapes that cannot be scored; the parent of the words read."""
        query, key, *extra = self.reading_parents(parents)
        read = key if self.over == "keys" else query
        single_axis(read)
        if self.bias:
            self.bias.check(extra.pop())
        self.score.check(query, key, *extra)
        return read

    def _scored(self, s: Symbols) -> tuple[str, str]:
        """The scores (with the mask, in the forms that have one) and the name of the normaliser, in LaTeX."""
        read, queries = self._read_slot, self.over == "queries"
        scores = self.score.latex(s, *self.reading_slots()[:2])
        scores += self.bias.latex(s, read, from_key=queries) if self.bias else ""
        if self.normaliser.kind != "softmax":
            return scores, {"sigmoid": r"\operatorname{sigmoid}"}.get(self.normaliser.kind, "")
        mask = s.mask(read) if s.form != "word" else ""
        if s.form in ("row", "column"):
            s.define(rf"\operatorname{{softmax}} \text{{ acts on each {s.form}}}")
        below = [r"\text{queries}"] if queries else []
        below += ["j"] if s.form == "einstein" else []
        return scores + (f" + {mask}" if mask else ""), scripts(r"\operatorname{softmax}", below)

    def _fraction(self, s: Symbols, top: Symbols) -> str:
        """The softmax of one word, written out: the scores of `top` over the sum of all."""
        over, under = (self._scored(each)[0] for each in (top, s.prime()))
        short = self.bias is None and self.score == Dot()
        e = "e^{%s}" if short else r"\exp\left(%s\right)"
        return rf"\frac{{{e % over}}}{{{s.prime().sum(self._read_slot)} {e % under}}}"


@final
@dataclass(frozen=True)
class Attention(_Reading):
    """`x'_i = sum_j v_j P(j | i)` with `P(j | i) = normaliser_j(score(q_i, k_j))`, `+ x_i` with `residual`.

    Parents q, k., v. (then the score's matrix A, a bias table b, the residual x, as they are asked for). Over
    `"queries"` the word is its key: it takes q., k, v. and mixes by a softmax over the queries that reach it.
    The mix may be of x itself: let x fill the slot v.

    >>> Attention().takes(), Attention(over="queries", residual=True).takes()
    (('q', 'k.', 'v.'), ('q.', 'k', 'v.', 'x'))
    """

    score: Score = field(default_factory=Dot)
    normaliser: Annotated[Normaliser, instance(Normaliser, "a Normaliser")] = field(default_factory=Normaliser)
    over: str = "keys"
    bias: Bias | None = None
    residual: Annotated[bool, flag] = False

    def takes(self) -> tuple[str, ...]:
        slots = self.reading_slots()
        return (*slots[:2], "v.", *slots[2:], *(("x",) if self.residual else ()))

    def reading_parents(self, parents: tuple[T, ...]) -> tuple[T, ...]:
        return parents[:2] + parents[3 : len(parents) - self.residual]

    def shape(self, *parents: Parent) -> Shape:
        read, v = self._check(parents), parents[2]
        if (read.reads, read.over) != (v.reads, v.over):
            wanted = f"values of the words that are read, as {read.name} ({_told(read)})"
            raise BNetError(v.name, expected=wanted, got=_told(v))
        width = vector(v)
        if self.residual:
            vector(parents[-1], width, why="the residual is added to the mix")
        return (width,)

    def products(self, *parents: Parent) -> tuple[Product, ...] | None:
        scores, (query, key, v, *_) = super().products(*parents), parents
        read = key if self.over == "keys" else query
        mix = Product((*self.reading_parents(parents), v), v.shape, over=(read,))
        return None if scores is None else (*scores, mix)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        return self.mix(self.normaliser.weights(*self.scores(at, *parents)), *parents)

    def mix(self, weights: Tensor, *parents: Tensor) -> Tensor:
        """`sum_j v_j w_j (+ x)` for these weights of the words; of the parents it reads `mixed_slots`."""
        v = parents[2]
        if v.dim() > 2 and v.shape[-3] == 1 and weights.dim() >= v.dim() - 1:  # all words read the same values
            mix = weights @ v.squeeze(-3)
        else:
            mix = torch.einsum("...m,...md->...d", weights, v)
        return mix + parents[-1] if self.residual else mix

    def mixed_slots(self) -> tuple[str, ...]:
        """The slots that are mixed or added: all but those on which `P(j | i)` depends."""
        return tuple(slot for slot in self.takes() if slot not in self.reading_slots())

    def latex(self, s: Symbols) -> str:
        read, softmax = self._read_slot, self.normaliser.kind == "softmax"
        s.over_words(read, "v.")
        if self.over == "queries" and softmax:
            s.define(r"\text{the softmax runs over queries: word } i \text{ is the key (q and k have changed roles)}")
        rest = f" + {s.of('x')}" if self.residual else ""
        v = s.of("v.")
        if s.form == "word":
            mix = self._word_by_word(s, read)
            return s.equals(f"{{{mix}}}{rest}" if rest else mix)
        scores, name = self._scored(s)
        value = rf"{name}\left({scores}\right)"
        gate = "" if softmax else s.mask(read, "B")
        if gate:
            value = f"{gate} {value}" if s.form == "einstein" else rf"\left({gate} \odot {value}\right)"
        return s.equals((f"{value} {v}" if s.form == "row" else f"{v} {value}") + rest)

    def _word_by_word(self, s: Symbols, read: str) -> str:
        """The chapter's own telling: the mix of values under the attention TPM, which is their mean given i."""
        v, total = s["v."], s.sum("v.")
        if self.normaliser.kind != "softmax":
            scores, name = self._scored(s)
            return rf"{total} {v} \, {name}\left({scores}\right)"
        given = s.index(read) + (rf" \mid {s.own.word}" if s.own.word else "")
        over = "" if self.over == "keys" else r"\ \text{(softmax over the queries)}"
        weights = rf"\underbrace{{{self._fraction(s, s)}}}_{{P({given}){over}}}"
        return rf"\underbrace{{{total} {v} \, {weights}}}_{{\mathbb{{E}}_{{{given}}}[{v}]}}"

    @property
    def may_read_nothing(self) -> bool:
        return self.normaliser.kind != "softmax"

    @property
    def has_reading(self) -> bool:
        """False where the weights are no distribution."""
        return self.normaliser.kind == "softmax"

    def why_no_reading(self) -> str:
        return f"the normaliser {self.normaliser.kind!r} gives weights that are no distribution"


@final
@dataclass(frozen=True)
class Read(_Reading):
    """The word that is read, as a variable: `P(j | i) = softmax_j(score(q_i, k_j))`; discrete.

    A child that picks word `j` of the values makes attention *marginal*: `x'_i = v_j` with probability `P(j | i)`.

    >>> Read().takes(), Read().kind
    (('q', 'k.'), 'discrete')
    """

    score: Score = field(default_factory=Dot)
    over: str = "keys"
    bias: Bias | None = None
    kind: ClassVar[Kind] = "discrete"

    def takes(self) -> tuple[str, ...]:
        return self.reading_slots()

    def shape(self, *parents: Parent) -> Shape:
        read = self._check(parents)
        if read.reads is None:
            raise BNetError(read.name, expected="words to read", got=read.form)
        return ()

    def logits(self, at: At, *parents: Tensor) -> Tensor:
        scores, mask = self.scores(at, *parents)
        return scores.masked_fill(~mask, -torch.inf)

    def latex(self, s: Symbols) -> str:
        s.over_words(self._read_slot)
        if s.form == "word":
            return self._fraction(s, s.read_at(self._read_slot, s.state))
        return s.softmax(*self._scored(s), "j")


def _told(parent: Parent) -> str:
    if parent.reads is None:
        return parent.form
    stack, reach = parent.reads
    return f"reach {reach}" + (f" of stack {stack!r}" if stack else "")
