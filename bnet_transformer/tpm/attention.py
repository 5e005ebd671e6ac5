"""Attention: a categorical distribution over words, `P(j | i)`, and the mean of the values under it, `E_j[v_j]`.

Word i attends to word j with weight `P(j | i)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeVar, final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import TPM, EvalContext, Kind, Parent, Product, Shape, check_single_axis, check_vector
from bnet_transformer.tpm.field_checks import check_bool, choice, instance_of, optional
from bnet_transformer.tpm.score import Bias, Dot, Normaliser, Score
from bnet_transformer.tpm.symbols import Symbols, add_scripts

T = TypeVar("T", Parent, Tensor)


class ScoredAttention(TPM):
    """The common part of `Attention` and `Read`: a score, a bias and a normaliser, from which the weights follow."""

    score: Annotated[Score, instance_of(Score, "a score", "Dot(), Bilinear(), or your own Score")]
    over: Annotated[str, choice("keys", "queries")]
    bias: Annotated[Bias | None, optional(instance_of(Bias, "a bias by distance", "Relative(limit), Buckets(), None"))]
    normaliser = Normaliser()

    def attention_slots(self) -> tuple[str, ...]:
        self_role, read_role = self.score.roles
        pair = (self_role, f"{read_role}.") if self.over == "keys" else (f"{self_role}.", read_role)
        return (*pair, *self.score.extra_slots, *(("b",) if self.bias else ()))

    def attention_parents(self, parents: tuple[T, ...]) -> tuple[T, ...]:
        """The parents on which the attention weights depend: those in `attention_slots`.

        Args:
            parents: All parents, in the order of the slots.

        Returns:
            The query, the keys and the other parents of the score.
        """
        return parents

    def attention_weights(self, context: EvalContext, *parents: Tensor) -> Tensor | None:
        return self.normaliser.normalise(*self.scores(context, *parents)) if self.has_attention else None

    def scores(self, context: EvalContext, *parents: Tensor) -> tuple[Tensor, Tensor]:
        """The scores before normalisation, and the mask of the words j that word i can attend to.

        Args:
            context: The parameters, the index of the word and the words to which it can attend.
            *parents: The values of the parents, in the order of the slots.

        Returns:
            The scores and the mask, `[..., m]` each, for m words.
        """
        query, key, *extra = self.attention_parents(parents)
        i, j = context.word, context.read_indices[self._read_slot]
        table = extra.pop() if self.bias else None
        if self.over == "keys":
            scores = self.score.score_keys(query, key, i, j, *extra)
        else:
            scores = self.score.score_queries(query, key, j, i, *extra)
        if self.bias and table is not None:
            scores = scores + self.bias.compute_bias(table, i, j, from_key=self.over == "queries")
        return scores, context.mask[self._read_slot]

    def products(self, *parents: Parent) -> tuple[Product, ...] | None:
        """The matrix products of the scores."""
        query, key, *extra = self.attention_parents(parents)
        self_parent, read_parent = (query, key) if self.over == "keys" else (key, query)
        return self.score.products(self_parent, read_parent, *(extra[:-1] if self.bias else extra))

    @property
    def _read_slot(self) -> str:
        """The slot of the collection of words."""
        return self.attention_slots()[1 if self.over == "keys" else 0]

    def _check_parents(self, parents: tuple[Parent, ...]) -> Parent:
        """The parent with the attended words; raises an error if the parents cannot be scored."""
        query, key, *extra = self.attention_parents(parents)
        read = key if self.over == "keys" else query
        check_single_axis(read)
        if self.bias:
            self.bias.check_table(extra.pop())
        self.score.check_parents(query, key, *extra)
        return read

    def _scores_latex(self, s: Symbols) -> tuple[str, str]:
        """The scores, with the mask in the forms that have one, and the name of the normaliser, in LaTeX."""
        read, queries = self._read_slot, self.over == "queries"
        scores = self.score.latex(s, *self.attention_slots()[:2])
        scores += self.bias.latex(s, read, from_key=queries) if self.bias else ""
        if self.normaliser.kind != "softmax":
            return scores, {"sigmoid": r"\operatorname{sigmoid}"}.get(self.normaliser.kind, "")
        mask = s.mask(read) if s.form != "word" else ""
        if s.form in ("row", "column"):
            s.define(rf"\operatorname{{softmax}} \text{{ acts on each {s.form}}}")
        subscripts = [r"\text{queries}"] if queries else []
        subscripts += ["j"] if s.form == "einstein" else []
        return scores + (f" + {mask}" if mask else ""), add_scripts(r"\operatorname{softmax}", subscripts)

    def _softmax_latex(self, s: Symbols, numerator: Symbols) -> str:
        """The softmax of one word in full: the exponential of the score of `numerator` over the sum of all."""
        over, under = (self._scores_latex(symbols)[0] for symbols in (numerator, s.with_primes()))
        short = self.bias is None and self.score == Dot()
        e = "e^{%s}" if short else r"\exp\left(%s\right)"
        return rf"\frac{{{e % over}}}{{{s.with_primes().sum(self._read_slot)} {e % under}}}"


@final
@dataclass(frozen=True)
class Attention(ScoredAttention):
    """Attention: `x'_i = sum_j P(j | i) v_j` with `P(j | i) = softmax_j(score(q_i, k_j))`; deterministic.

    Parents, in order: the query `q`, `[d]`; the keys `k.`, `[d]` for each attended word; the values `v.`, `[d_v]`
    for each of these words; the matrix `A` if the score is `Bilinear`; the table `b` if there is a bias; the state `x`,
    `[d_v]`, if there is a residual. To mix the states themselves, use them as the parent in the slot `v.` too. The
    value has shape `[d_v]`.

    Args:
        score: The score of a query and a key: `Dot()` (default), `Bilinear()`, or your own subclass of `Score`.
        normaliser: The map from scores to weights. Default `Normaliser("softmax")`; with the others the weights are not
            a distribution.
        over: `"keys"` (default): the node's word is the query, and the softmax runs over the keys that it reads.
            `"queries"`: the node's word is the key; the parents are `q.`, `k`, `v.`, and the softmax runs over the
            queries that reach it, as in the geometric integrators.
        bias: A bias of the scores by distance, `Relative(limit)` or `Buckets()`; None (default) for no bias.
        residual: Whether the state `x_i` is added to the mix. Default False.

    >>> Attention().get_slots(), Attention(over="queries", residual=True).get_slots()
    (('q', 'k.', 'v.'), ('q.', 'k', 'v.', 'x'))
    >>> words = (("word", None),)
    >>> q, k, v = Parent("q", (4,)), Parent("k", (4,), over=words), Parent("v", (6,), over=words)
    >>> Attention(Dot(None)).shape(q, k, v)
    (6,)
    """

    score: Score = field(default_factory=Dot)
    normaliser: Annotated[Normaliser, instance_of(Normaliser, "a Normaliser")] = field(default_factory=Normaliser)
    over: str = "keys"
    bias: Bias | None = None
    residual: Annotated[bool, check_bool] = False

    def get_slots(self) -> tuple[str, ...]:
        slots = self.attention_slots()
        return (*slots[:2], "v.", *slots[2:], *(("x",) if self.residual else ()))

    def attention_parents(self, parents: tuple[T, ...]) -> tuple[T, ...]:
        return parents[:2] + parents[3 : len(parents) - self.residual]

    def shape(self, *parents: Parent) -> Shape:
        read, v = self._check_parents(parents), parents[2]
        if (read.stack_reach, read.over) != (v.stack_reach, v.over):
            expected = f"values of the same words as {read.name} ({_describe_words(read)})"
            raise BNetError(v.name, expected=expected, actual=_describe_words(v))
        width = check_vector(v)
        if self.residual:
            check_vector(parents[-1], width, reason="the residual is added to the mix")
        return (width,)

    def products(self, *parents: Parent) -> tuple[Product, ...] | None:
        scores, (query, key, v, *_) = super().products(*parents), parents
        read = key if self.over == "keys" else query
        mix = Product((*self.attention_parents(parents), v), v.shape, over=(read,))
        return None if scores is None else (*scores, mix)

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return (len(parents) - 1,) if self.residual else ()

    def residual_parents(self, *parents: Parent) -> tuple[int, ...]:
        return self.linear_parents(*parents)

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return self.mix(self.normaliser.normalise(*self.scores(context, *parents)), *parents)

    def mix(self, weights: Tensor, *parents: Tensor) -> Tensor:
        """The mix of the values under given weights: `sum_j w_j v_j`, plus `x` if there is a residual.

        Args:
            weights: The weights of the words, `[..., m]`.
            *parents: The values of the parents, `[..., *shape]`, in the order of the slots. Only those of `mixed_slots`
                are read.

        Returns:
            The mix, `[..., d_v]`.
        """
        v = parents[2]
        if v.dim() > 2 and v.shape[-3] == 1 and weights.dim() >= v.dim() - 1:  # all words use the same values
            mix = weights @ v.squeeze(-3)
        else:
            mix = torch.einsum("...m,...md->...d", weights, v)
        return mix + parents[-1] if self.residual else mix

    def mixed_slots(self) -> tuple[str, ...]:
        """The slots that are mixed or added: those on which `P(j | i)` does not depend."""
        return tuple(slot for slot in self.get_slots() if slot not in self.attention_slots())

    def latex(self, s: Symbols) -> str:
        read, softmax = self._read_slot, self.normaliser.kind == "softmax"
        s.require_over_words(read, "v.")
        if self.over == "queries" and softmax:
            s.define(r"\text{the softmax runs over queries: word } i \text{ is the key (q and k have changed roles)}")
        residual = f" + {s.of('x')}" if self.residual else ""
        v = s.of("v.")
        if s.form == "word":
            mix = self._word_latex(s, read)
            return s.equals(f"{{{mix}}}{residual}" if residual else mix)
        scores, name = self._scores_latex(s)
        value = rf"{name}\left({scores}\right)"
        gate = "" if softmax else s.mask(read, "B")
        if gate:
            value = f"{gate} {value}" if s.form == "einstein" else rf"\left({gate} \odot {value}\right)"
        return s.equals((f"{value} {v}" if s.form == "row" else f"{v} {value}") + residual)

    def _word_latex(self, s: Symbols, read: str) -> str:
        """The mix for one word: the expectation of the values under the attention distribution."""
        v, total = s["v."], s.sum("v.")
        if self.normaliser.kind != "softmax":
            scores, name = self._scores_latex(s)
            return rf"{total} {v} \, {name}\left({scores}\right)"
        condition = s.index_letters(read) + (rf" \mid {s.node.word}" if s.node.word else "")
        over = "" if self.over == "keys" else r"\ \text{(softmax over the queries)}"
        weights = rf"\underbrace{{{self._softmax_latex(s, s)}}}_{{P({condition}){over}}}"
        return rf"\underbrace{{{total} {v} \, {weights}}}_{{\mathbb{{E}}_{{{condition}}}[{v}]}}"

    @property
    def can_read_empty(self) -> bool:
        return self.normaliser.kind != "softmax"

    @property
    def has_attention(self) -> bool:
        """True if the weights are a distribution."""
        return self.normaliser.kind == "softmax"

    def no_attention_reason(self) -> str:
        return f"weights of the normaliser {self.normaliser.kind!r}, which are not a distribution"


@final
@dataclass(frozen=True)
class Read(ScoredAttention):
    """The attended word, as a random variable `j`: `P(j | i) = softmax_j(score(q_i, k_j))`; discrete.

    The states are the words of the sentence. If a child picks word `j` of the values
    (`Arrow("v", "every", pick={"word": "j"})`), attention is *marginal*: `x'_i = v_j` with probability `P(j | i)`.

    Parents, in order: the query `q`, `[d]`; the keys `k.`, `[d]` for each attended word; the matrix `A` if the
    score is `Bilinear`; the table `b` if there is a bias.

    Args:
        score: The score of a query and a key: `Dot()` (default), `Bilinear()`, or your own subclass of `Score`.
        over: `"keys"` (default): the node's word is the query. `"queries"`: the node's word is the key, and the parents
            are `q.`, `k`.
        bias: A bias of the scores by distance, `Relative(limit)` or `Buckets()`; None (default) for no bias.

    >>> Read().get_slots(), Read().kind
    (('q', 'k.'), 'discrete')
    """

    score: Score = field(default_factory=Dot)
    over: str = "keys"
    bias: Bias | None = None
    kind: ClassVar[Kind] = "discrete"

    def get_slots(self) -> tuple[str, ...]:
        return self.attention_slots()

    def shape(self, *parents: Parent) -> Shape:
        read = self._check_parents(parents)
        if read.stack_reach is None:
            raise BNetError(read.name, expected="a collection of words", actual=read.form)
        return ()

    def logits(self, context: EvalContext, *parents: Tensor) -> Tensor:
        scores, mask = self.scores(context, *parents)
        return scores.masked_fill(~mask, -torch.inf)

    def latex(self, s: Symbols) -> str:
        s.require_over_words(self._read_slot)
        if s.form == "word":
            return self._softmax_latex(s, s.with_read_index(self._read_slot, s.state))
        return s.softmax(*self._scores_latex(s), "j")


def _describe_words(parent: Parent) -> str:
    """The reach and the stack of a collection of words, for error messages."""
    if parent.stack_reach is None:
        return parent.form
    stack, reach = parent.stack_reach
    return f"reach {reach}" + (f" of stack {stack!r}" if stack else "")
