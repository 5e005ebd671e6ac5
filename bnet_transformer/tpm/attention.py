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
    At,
    Kind,
    Parameter,
    Parent,
    Product,
    Shape,
    VectorMap,
    matrix,
    single_axis,
    spread_of,
    vector,
)
from bnet_transformer.tpm.checks import at_least, choice, flag, instance, optional, positive
from bnet_transformer.tpm.combine import apply
from bnet_transformer.tpm.score import Bias, Dot, Normaliser, Score
from bnet_transformer.tpm.steps import ACTIVATIONS, activated, activation_name
from bnet_transformer.tpm.symbols import Symbols, scripts

T = TypeVar("T", Parent, Tensor)
CAY = r"\operatorname{Cay}"
MOST = 2.0**45
"""The greatest entry of C beside which float64 holds the 1 to two digits."""


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
            raise BNetError(v.name, expected=wanted, actual=_told(v))
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
            raise BNetError(read.name, expected="words to read", actual=read.form)
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


# volume-preserving nets: matrices kept as the vector of their free entries

# The vector of a skew-symmetric or strictly triangular matrix, of `d (d-1)/2`, holds the entries below the diagonal row
# by row, `L_21, L_31, L_32, L_41, ...`; of an upper triangle it holds those of the transpose, `U_12, U_13, U_23, U_14,
# ...`; of a skew matrix those below, the ones above are their negatives.


def packed_size(dim: int) -> int:
    """How many entries of a matrix stand below its diagonal."""
    return dim * (dim - 1) // 2


def lower(packed: Tensor, dim: int) -> Tensor:
    """The strictly lower triangular matrix `[..., dim, dim]` of a vector `[..., dim (dim-1)/2]`.

    >>> lower(torch.tensor([1., 2., 3.]), 3)
    tensor([[0., 0., 0.],
            [1., 0., 0.],
            [2., 3., 0.]])
    """
    i = torch.arange(dim, device=packed.device)
    row, column = i[:, None], i[None, :]
    below = column < row
    place = torch.where(below, row * (row - 1) // 2 + column, 0)
    return torch.where(below, packed[..., place], 0.0)


@final
@dataclass(frozen=True)
class Skew(TPM):
    """A learnable skew-symmetric root, `A = S - S^T` with S strictly lower triangular; starts normal with `spread`.

    >>> Skew(3).parameters()["packed"].shape
    (3,)
    """

    dim: Annotated[int, at_least(2)]
    spread: Annotated[float | None, optional(positive)] = None
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> Shape:
        return (self.dim, self.dim)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return {"packed": Parameter((packed_size(self.dim),), spread_of((self.dim,), self.spread))}

    def value(self, at: At, *parents: Tensor) -> Tensor:
        S = lower(at["packed"], self.dim)
        return S - S.mT

    def latex(self, s: Symbols) -> str:
        s.only("word")
        value = s.own.decorated("hat")
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
    activation: Annotated[str, activation_name] = "tanh"
    bias: Annotated[bool, flag] = True
    spread: Annotated[float | None, optional(positive)] = None

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        (width,) = self.shape(*parents)
        found = {"packed": Parameter((packed_size(width),), spread_of((width,), self.spread))}
        return found | ({"bias": Parameter((width,), fill=0.0)} if self.bias else {})

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        (width,) = self.shape(*parents)
        return (Product(parents, (width, width), own=True),)

    def value(self, at: At, *parents: Tensor) -> Tensor:
        (x,) = parents
        L = lower(at["packed"], x.shape[-1])
        W = L if self.side == "lower" else L.mT
        return x + ACTIVATIONS[self.activation](apply(W, x, at["bias"] if self.bias else None))

    def latex(self, s: Symbols) -> str:
        W = s.parameter("L" if self.side == "lower" else "U")
        s.define(rf"\text{{every }} {W.base} \text{{ is strictly {self.side} triangular}}")
        inner = s.map(W, s.of("x", "b")) + (s.plus(s.parameter("b")) if self.bias else "")
        return s.equals(f"{s.of('x')} + {activated(self.activation, inner)}")


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
        single_axis(z)
        width = vector(z)
        if z.reads is None or z.reads[1].kind != "every":
            got = z.form if z.reads is None else f"reach {z.reads[1]}"
            raise BNetError(z.name, expected="every word (C pairs all words with all: reach 'every')", actual=got)
        if matrix(A) != (width, width):
            raise BNetError(A.name, expected=f"a matrix of shape {(width, width)}, for {z.name}", actual=A.form)
        return (width,)

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        """`A z`, `Z^T A Z`; of the system its factors, counted as the product of two such matrices, then the rest."""
        z, A = parents
        (width,) = z.shape
        pairs = Product((z, A), z.shape, over=(z, z))
        factors = Product((z, A), (), over=(z, z, z))
        return Product((z, A), (width, width)), pairs, factors, pairs

    def value(self, at: At, *parents: Tensor) -> Tensor:
        own = at.read["z."] == at.word[..., None]
        mixed = self.mix(at.read["z."], at.mask["z."], *parents)
        return torch.einsum("...m,...md->...d", own.to(mixed.dtype), mixed)

    def mix(self, read: Tensor, mask: Tensor | None, z: Tensor, A: Tensor) -> Tensor:
        """All words of the collection after the mix, `[..., m, d]`; without a mask all of them are there.

        `Cay(C) = 2 (I + C)^-1 - I`, so that one linear system with the words as its right-hand side is enough. It is
        made and solved in float64, for C grows with the squares of the words and the 1 beside it must not be lost;
        words come out as NaN where there is no solution, or C is not finite or too large for that.
        """
        Z, A = z.double(), A.double()
        if mask is not None:
            Z = Z.masked_fill(~mask[..., None], 0.0)  # then C is 0 there too
        C = self.correlation(read, Z, A)
        one = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
        solved, failed = torch.linalg.solve_ex(one + C.mT, Z)
        lost = (failed != 0) | (C.abs().amax((-2, -1)) > MOST)
        solved = solved.masked_fill(lost[..., None, None], torch.nan)
        mixed: Tensor = (2 * solved - Z).to(z.dtype)
        return mixed.contiguous()  # solve leaves it column by column

    def correlation(self, read: Tensor, z: Tensor, A: Tensor) -> Tensor:
        """C, `[..., m, m]`."""
        C: Tensor = z @ A @ z.mT
        if self.form == "skew":
            return C
        below = read[..., :, None] > read[..., None, :]
        B: Tensor = torch.where(below, C, 0.0) * z.shape[-1] ** -0.5
        return B - B.mT

    def why_no_reading(self) -> str:
        return "Cayley, which multiplies words by an orthogonal matrix: its columns are no distributions"

    def latex(self, s: Symbols) -> str:
        s.over_words("z.")
        s.define(rf"{CAY}(C) = (I - C)(I + C)^{{-1}}")
        z, other = s.of("z."), s.prime()
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
            return s.equals(rf"{CAY}({C})^\top {z}" if s.form == "row" else f"{z} {CAY}({C})")
        entry = rf"{CAY}({C})_{{j{s.own.word or 0}}}"
        return s.equals(f"{entry} {z}" if s.form == "einstein" else rf"{s.sum('z.')} {z} \, {entry}")
