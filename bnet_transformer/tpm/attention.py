"""Attention as the TPM it is: a categorical over words `P(j | i)`, and its mix of values `E_j[v_j]`; and what preserves
volume: Cayley's mix, and triangular steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeVar, final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import (
    TPM,
    EvalContext,
    Kind,
    Parameter,
    Parent,
    Product,
    Shape,
    VectorMap,
    check_matrix,
    check_single_axis,
    check_vector,
    initial_spread,
)
from bnet_transformer.tpm.combine import apply_linear
from bnet_transformer.tpm.field_checks import check_bool, check_positive, choice, instance_of, min_int, optional
from bnet_transformer.tpm.score import Bias, Dot, Normaliser, Score
from bnet_transformer.tpm.steps import ACTIVATIONS, activation_latex, check_activation
from bnet_transformer.tpm.symbols import Symbols, add_scripts

T = TypeVar("T", Parent, Tensor)
CAYLEY_LATEX = r"\operatorname{Cay}"
MAX_CORRELATION = 2.0**45
"""The greatest entry of C beside which float64 holds the 1 to two digits."""


class _ScoredAttention(TPM):
    """What `Attention` and `Read` share: from score, bias and normaliser to the weights of the words read."""

    score: Annotated[Score, instance_of(Score, "a score", "Dot(), Bilinear(), or a Score of yours")]
    over: Annotated[str, choice("keys", "queries")]
    bias: Annotated[Bias | None, optional(instance_of(Bias, "a bias by distance", "Relative(limit), Buckets(), None"))]
    normaliser = Normaliser()

    def attention_slots(self) -> tuple[str, ...]:
        self_role, read_role = self.score.roles
        pair = (self_role, f"{read_role}.") if self.over == "keys" else (f"{self_role}.", read_role)
        return (*pair, *self.score.extra_slots, *(("b",) if self.bias else ()))

    def attention_parents(self, parents: tuple[T, ...]) -> tuple[T, ...]:
        """The parents that fill `reading_slots`."""
        return parents

    def attention_weights(self, context: EvalContext, *parents: Tensor) -> Tensor | None:
        return self.normaliser.normalise(*self.scores(context, *parents)) if self.has_attention else None

    def scores(self, context: EvalContext, *parents: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of the words read, before they are normalised, and the mask of who is read."""
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
        """The slot of the words read."""
        return self.attention_slots()[1 if self.over == "keys" else 0]

    def _check_parents(self, parents: tuple[Parent, ...]) -> Parent:
        """Refuse shapes that cannot be scored; the parent of the words read."""
        query, key, *extra = self.attention_parents(parents)
        read = key if self.over == "keys" else query
        check_single_axis(read)
        if self.bias:
            self.bias.check_table(extra.pop())
        self.score.check_parents(query, key, *extra)
        return read

    def _scores_latex(self, s: Symbols) -> tuple[str, str]:
        """The scores (with the mask, in the forms that have one) and the name of the normaliser, in LaTeX."""
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
        """The softmax of one word, written out: the scores of `numerator` over the sum of all."""
        over, under = (self._scores_latex(symbols)[0] for symbols in (numerator, s.with_primes()))
        short = self.bias is None and self.score == Dot()
        e = "e^{%s}" if short else r"\exp\left(%s\right)"
        return rf"\frac{{{e % over}}}{{{s.with_primes().sum(self._read_slot)} {e % under}}}"


@final
@dataclass(frozen=True)
class Attention(_ScoredAttention):
    """`x'_i = sum_j v_j P(j | i)` with `P(j | i) = normaliser_j(score(q_i, k_j))`, `+ x_i` with `residual`.

    Parents q, k., v. (then the score's matrix A, a bias table b, the residual x, as they are asked for). Over
    `"queries"` the word is its key: it takes q., k, v. and mixes by a softmax over the queries that reach it.
    The mix may be of x itself: let x fill the slot v.

    >>> Attention().takes(), Attention(over="queries", residual=True).takes()
    (('q', 'k.', 'v.'), ('q.', 'k', 'v.', 'x'))
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
            expected = f"values of the words that are read, as {read.name} ({_describe_words(read)})"
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

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return self.mix(self.normaliser.normalise(*self.scores(context, *parents)), *parents)

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
        """The chapter's own telling: the mix of values under the attention TPM, which is their mean given i."""
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
        """False where the weights are no distribution."""
        return self.normaliser.kind == "softmax"

    def no_attention_reason(self) -> str:
        return f"the normaliser {self.normaliser.kind!r} gives weights that are no distribution"


@final
@dataclass(frozen=True)
class Read(_ScoredAttention):
    """The word that is read, as a variable: `P(j | i) = softmax_j(score(q_i, k_j))`; discrete.

    A child that picks word `j` of the values makes attention *marginal*: `x'_i = v_j` with probability `P(j | i)`.

    >>> Read().takes(), Read().kind
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
            raise BNetError(read.name, expected="words to read", actual=read.form)
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
    if parent.stack_reach is None:
        return parent.form
    stack, reach = parent.stack_reach
    return f"reach {reach}" + (f" of stack {stack!r}" if stack else "")


# volume-preserving nets: matrices kept as the vector of their free entries

# The vector of a skew-symmetric or strictly triangular matrix, of `d (d-1)/2`, holds the entries below the diagonal row
# by row, `L_21, L_31, L_32, L_41, ...`; of an upper triangle it holds those of the transpose, `U_12, U_13, U_23, U_14,
# ...`; of a skew matrix those below, the ones above are their negatives.


def packed_size(dim: int) -> int:
    """How many entries of a matrix stand below its diagonal."""
    return dim * (dim - 1) // 2


def unpack_lower(packed: Tensor, dim: int) -> Tensor:
    """The strictly lower triangular matrix `[..., dim, dim]` of a vector `[..., dim (dim-1)/2]`.

    >>> unpack_lower(torch.tensor([1., 2., 3.]), 3)
    tensor([[0., 0., 0.],
            [1., 0., 0.],
            [2., 3., 0.]])
    """
    i = torch.arange(dim, device=packed.device)
    row, column = i[:, None], i[None, :]
    below = column < row
    index = torch.where(below, row * (row - 1) // 2 + column, 0)
    return torch.where(below, packed[..., index], 0.0)


@final
@dataclass(frozen=True)
class Skew(TPM):
    """A learnable skew-symmetric root, `A = S - S^T` with S strictly lower triangular; starts normal with `spread`.

    >>> Skew(3).parameters()["packed"].shape
    (3,)
    """

    dim: Annotated[int, min_int(2)]
    spread: Annotated[float | None, optional(check_positive)] = None
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> Shape:
        return (self.dim, self.dim)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return {"packed": Parameter((packed_size(self.dim),), initial_spread((self.dim,), self.spread))}

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        S = unpack_lower(context["packed"], self.dim)
        return S - S.mT

    def latex(self, s: Symbols) -> str:
        s.require_form("word")
        value = s.node.with_accent("hat")
        s.define(rf"{value.T} = -{value}")
        return s.delta(value)


@final
@dataclass(frozen=True)
class Triangular(VectorMap):
    """`x + s(L x + b)` with L strictly lower triangular (or `"upper"`): its Jacobian determinant is 1 for any s.

    >>> sorted((name, p.shape) for name, p in Triangular("upper").parameters(Parent("x", (3,))).items())
    [('bias', (3,)), ('packed', (3,))]
    """

    side: Annotated[str, choice("lower", "upper")] = "lower"
    activation: Annotated[str, check_activation] = "tanh"
    bias: Annotated[bool, check_bool] = True
    spread: Annotated[float | None, optional(check_positive)] = None

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        (width,) = self.shape(*parents)
        parameters = {"packed": Parameter((packed_size(width),), initial_spread((width,), self.spread))}
        return parameters | ({"bias": Parameter((width,), fill=0.0)} if self.bias else {})

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        (width,) = self.shape(*parents)
        return (Product(parents, (width, width), has_parameter=True),)

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        (x,) = parents
        L = unpack_lower(context["packed"], x.shape[-1])
        W = L if self.side == "lower" else L.mT
        return x + ACTIVATIONS[self.activation](apply_linear(W, x, context["bias"] if self.bias else None))

    def latex(self, s: Symbols) -> str:
        W = s.parameter("L" if self.side == "lower" else "U")
        s.define(rf"\text{{every }} {W.base} \text{{ is strictly {self.side} triangular}}")
        inner = s.map(W, s.of("x", "b")) + (s.plus(s.parameter("b")) if self.bias else "")
        return s.equals(f"{s.of('x')} + {activation_latex(self.activation, inner)}")


@final
@dataclass(frozen=True)
class Cayley(TPM):
    """`Z Cay(C)`, `Cay(C) = (I - C)(I + C)^-1`, of all words of a sentence as the columns of Z.

    `"skew"`: `C = Z^T A Z` with A skew-symmetric (a `Skew` node). `"arbitrary"`: `B` is what of `Z^T A Z / sqrt(d)`
    stands below the diagonal, `C = B - B^T`, A any matrix. A word that is absent leaves C as if it were not there.

    >>> Cayley().takes()
    ('z.', 'A')
    """

    form: Annotated[str, choice("skew", "arbitrary")] = "skew"
    slots: ClassVar[tuple[str, ...]] = ("z.", "A")

    def shape(self, *parents: Parent) -> Shape:
        z, A = parents
        check_single_axis(z)
        width = check_vector(z)
        if z.stack_reach is None or z.stack_reach[1].kind != "every":
            actual = z.form if z.stack_reach is None else f"reach {z.stack_reach[1]}"
            raise BNetError(z.name, expected="every word (C pairs all words with all: reach 'every')", actual=actual)
        if check_matrix(A) != (width, width):
            raise BNetError(A.name, expected=f"a matrix of shape {(width, width)}, for {z.name}", actual=A.form)
        return (width,)

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        """`A z`, `Z^T A Z`; of the system its factors, counted as the product of two such matrices, then the rest."""
        z, A = parents
        (width,) = z.shape
        pairs = Product((z, A), z.shape, over=(z, z))
        factors = Product((z, A), (), over=(z, z, z))
        return Product((z, A), (width, width)), pairs, factors, pairs

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        is_self = context.read_indices["z."] == context.word[..., None]
        mixed = self.mix(context.read_indices["z."], context.mask["z."], *parents)
        return torch.einsum("...m,...md->...d", is_self.to(mixed.dtype), mixed)

    def mix(self, read_indices: Tensor, mask: Tensor | None, z: Tensor, A: Tensor) -> Tensor:
        """All words of the collection after the mix, `[..., m, d]`; without a mask all of them are there.

        `Cay(C) = 2 (I + C)^-1 - I`, so that one linear system with the words as its right-hand side is enough. It is
        made and solved in float64, for C grows with the squares of the words and the 1 beside it must not be lost;
        words come out as NaN where there is no solution, or C is not finite or too large for that.
        """
        Z, A = z.double(), A.double()
        if mask is not None:
            Z = Z.masked_fill(~mask[..., None], 0.0)  # then C is 0 there too
        C = self.correlation(read_indices, Z, A)
        one = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
        solution, info = torch.linalg.solve_ex(one + C.mT, Z)
        is_invalid = (info != 0) | (C.abs().amax((-2, -1)) > MAX_CORRELATION)
        solution = solution.masked_fill(is_invalid[..., None, None], torch.nan)
        mixed: Tensor = (2 * solution - Z).to(z.dtype)
        return mixed.contiguous()  # solve leaves it column by column

    def correlation(self, read_indices: Tensor, z: Tensor, A: Tensor) -> Tensor:
        """C, `[..., m, m]`."""
        C: Tensor = z @ A @ z.mT
        if self.form == "skew":
            return C
        below = read_indices[..., :, None] > read_indices[..., None, :]
        B: Tensor = torch.where(below, C, 0.0) * z.shape[-1] ** -0.5
        return B - B.mT

    def no_attention_reason(self) -> str:
        return "Cayley, which multiplies words by an orthogonal matrix: its columns are no distributions"

    def latex(self, s: Symbols) -> str:
        s.require_over_words("z.")
        s.define(rf"{CAYLEY_LATEX}(C) = (I - C)(I + C)^{{-1}}")
        z, other = s.of("z."), s.with_primes()
        C = rf"C({s.weight('A').plain})"
        matrices = s.form in ("row", "column")
        if s.form == "row":
            scores = f"{z} {s.weight('A')} {z.T}"
        elif s.form == "column":
            scores = f"{z.T} {s.weight('A')} {z}"
        elif s.form == "word":
            scores = f"{z.T} {s.weight('A')} {other.of('z.')}"
        else:
            scores = f"{s.of('z.', 'b')} {s.weight('A', 'bd')} {other.of('z.', 'd')}"
        root = rf"\sqrt{{{s.slot('z.').shape[-1]}}}"
        if self.form == "skew" and matrices:
            C = scores
        elif self.form == "skew":
            s.define(f"{C}_{{jj'}} = {scores}")
        elif matrices:
            s.define(rf"{C} = B - B^\top, \quad B = \operatorname{{lower}}({scores}) / {root}")
            s.define(r"\operatorname{lower} \text{ keeps what stands below the diagonal}")
        else:
            s.define(rf"{C} = B - B^\top")
            s.define(rf"B_{{jj'}} = \frac{{1}}{{{root}}} {scores} \text{{ if }} j > j', \text{{ else }} 0")
        if matrices:
            return s.equals(rf"{CAYLEY_LATEX}({C})^\top {z}" if s.form == "row" else f"{z} {CAYLEY_LATEX}({C})")
        entry = rf"{CAYLEY_LATEX}({C})_{{j{s.node.word or 0}}}"
        return s.equals(f"{entry} {z}" if s.form == "einstein" else rf"{s.sum('z.')} {z} \, {entry}")
