"""Volume-preserving nets: matrices kept as the vector of their free entries, triangular steps, Cayley's attention.

The vector of a skew-symmetric or strictly triangular matrix, of `d (d-1)/2`, holds the entries below the diagonal row
by row, `L_21, L_31, L_32, L_41, ...`; of an upper triangle it holds those of the transpose, `U_12, U_13, U_23, U_14,
...`; of a skew matrix those below, the ones above are their negatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import (
    TPM,
    At,
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
from bnet_transformer.tpm.checks import at_least, choice, flag, optional, positive
from bnet_transformer.tpm.combine import apply
from bnet_transformer.tpm.steps import ACTIVATIONS, activated, activation_name
from bnet_transformer.tpm.symbols import Symbols

CAY = r"\operatorname{Cay}"
MOST = 2.0**45
"""The greatest entry of C beside which float64 holds the 1 to two digits."""


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
            raise BNetError(z.name, expected="every word (C pairs all words with all: reach 'every')", got=got)
        if matrix(A) != (width, width):
            raise BNetError(A.name, expected=f"a matrix of shape {(width, width)}, for {z.name}", got=A.form)
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
        root = rf"\sqrt{{{s.width('z.')}}}"
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
