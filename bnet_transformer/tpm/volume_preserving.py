"""Volume-preserving nets: skew-symmetric weights, triangular steps, and words mixed by a Cayley transform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import (
    TPM,
    EvalContext,
    Parameter,
    Parent,
    Product,
    Shape,
    VectorMap,
    check_bool,
    check_matrix,
    check_positive,
    check_single_axis,
    check_vector,
    choice,
    initial_spread,
    min_int,
    optional,
)
from bnet_transformer.tpm.deterministic import ACTIVATIONS, activation_latex, apply_linear, check_activation
from bnet_transformer.tpm.symbols import Symbols

CAYLEY_LATEX = r"\operatorname{Cay}"
MAX_CORRELATION = 2.0**45  # the largest entry of C for which float64 preserves two digits of the 1 in I + C

# A skew-symmetric or strictly triangular matrix is stored as a vector of `d (d-1)/2` numbers: the entries below the
# diagonal, row by row, `L_21, L_31, L_32, L_41, ...`. For an upper triangle these are the entries of the transpose,
# `U_12, U_13, U_23, U_14, ...`. The entries of a skew-symmetric matrix above the diagonal are the negatives.


def packed_size(dim: int) -> int:
    """The number of entries below the diagonal of a square matrix."""
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
    """A learnable skew-symmetric matrix: `A = S - S^T` with S strictly lower triangular; deterministic.

    It has no parents. The value has shape `[dim, dim]`.

    Args:
        dim: The number of rows, at least 2.
        spread: The standard deviation of the initial normal distribution of S. None (default) for `1/sqrt(dim)`.

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
    """A triangular step: `x' = x + s(L x + b)` with L strictly triangular; deterministic.

    The determinant of its Jacobian is 1 for every s. The TPM owns L and b. Parent: the vector `x`, `[d]`. The value has
    shape `[d]`.

    Args:
        side: `"lower"` (default) or `"upper"`: the triangle of L that is not zero.
        activation: The function s: `"relu"`, `"gelu"`, `"gelu_tanh"`, `"silu"`, `"tanh"`, `"sigmoid"` or `"identity"`.
            Default `"tanh"`.
        bias: Whether there is a bias b. Default True.
        spread: The standard deviation of the initial normal distribution of L. None (default) for `1/sqrt(d)`.

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
        W = L if self.side == "lower" else L.mT  # the Jacobian, I + diag(s') W, is triangular with ones on its diagonal
        return x + ACTIVATIONS[self.activation](apply_linear(W, x, context["bias"] if self.bias else None))

    def latex(self, s: Symbols) -> str:
        W = s.parameter("L" if self.side == "lower" else "U")
        s.define(rf"\text{{every }} {W.base} \text{{ is strictly {self.side} triangular}}")
        inner = s.map(W, s.of("x", "b")) + (s.plus(s.parameter("b")) if self.bias else "")
        return s.equals(f"{s.of('x')} + {activation_latex(self.activation, inner)}")


@final
@dataclass(frozen=True)
class Cayley(TPM):
    """Words mixed by a Cayley transform: `Z' = Z Cay(C)` with `Cay(C) = (I - C)(I + C)^-1`; deterministic.

    The words of the sentence are the columns of Z, and `Cay(C)` is orthogonal. A masked word has no influence on the
    others. Parents, in order: the words `z.`, `[d]` each, with reach `"every"`, and the matrix `A`, `[d, d]`. The value
    has shape `[d]`.

    Args:
        form: `"skew"` (default): `C = Z^T A Z`, where A is skew-symmetric (a `Skew` node). `"arbitrary"`:
            `C = B - B^T` for any matrix A, where B is the part of `Z^T A Z / sqrt(d)` below the diagonal.

    >>> Cayley().get_slots()
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
            raise BNetError(z.name, expected="reach 'every', because C pairs all words", actual=actual)
        if check_matrix(A) != (width, width):
            expected = f"a matrix of shape {(width, width)}, because {z.name} has width {width}"
            raise BNetError(A.name, expected=expected, actual=A.form)
        return (width,)

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        """The matrix products: `A z`, `Z^T A Z`, and the factorisation and solution of the linear system.

        The factorisation is counted as one product of C with C.
        """
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
        """All words of the sentence after the mix.

        Args:
            read_indices: The indices of the words, `[..., m]`.
            mask: True for the words that are present, `[..., m]`; None if all are.
            z: The words, `[..., m, d]`.
            A: The matrix, `[..., d, d]`.

        Returns:
            The mixed words, `[..., m, d]`. They are NaN if the linear system has no solution, or if C is not finite or
            too large for float64.
        """
        # I - C = 2 I - (I + C), so Cay(C) = 2 (I + C)^-1 - I, and it is enough to solve one linear system with the
        # words as right-hand sides. C is skew-symmetric in both forms, so I + C is regular and Cay(C) is orthogonal
        # (Cayley 1846). The system is solved in float64: C grows with the square of the words, and in lower precision
        # the 1 of I + C would be lost.
        Z, A = z.double(), A.double()
        if mask is not None:
            Z = Z.masked_fill(~mask[..., None], 0.0)  # then the row and column of C are 0
        C = self.correlation(read_indices, Z, A)
        one = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
        solution, info = torch.linalg.solve_ex(one + C.mT, Z)
        is_invalid = (info != 0) | (C.abs().amax((-2, -1)) > MAX_CORRELATION)
        solution = solution.masked_fill(is_invalid[..., None, None], torch.nan)
        mixed: Tensor = (2 * solution - Z).to(z.dtype)
        return mixed.contiguous()  # solve returns it in column-major order

    def correlation(self, read_indices: Tensor, z: Tensor, A: Tensor) -> Tensor:
        """The skew-symmetric matrix C of all pairs of words.

        Args:
            read_indices: The indices of the words, `[..., m]`.
            z: The words, `[..., m, d]`.
            A: The matrix, `[..., d, d]`.

        Returns:
            C, `[..., m, m]`.
        """
        C: Tensor = z @ A @ z.mT
        if self.form == "skew":
            return C
        below = read_indices[..., :, None] > read_indices[..., None, :]
        B: Tensor = torch.where(below, C, 0.0) * z.shape[-1] ** -0.5
        return B - B.mT

    def no_attention_reason(self) -> str:
        return "Cayley, which multiplies words by an orthogonal matrix: its columns are not distributions"

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
            s.define(r"\operatorname{lower} \text{ sets the entries on and above the diagonal to } 0")
        else:
            s.define(rf"{C} = B - B^\top")
            s.define(rf"B_{{jj'}} = \frac{{1}}{{{root}}} {scores} \text{{ if }} j > j', \text{{ else }} 0")
        if matrices:
            return s.equals(rf"{CAYLEY_LATEX}({C})^\top {z}" if s.form == "row" else f"{z} {CAYLEY_LATEX}({C})")
        entry = rf"{CAYLEY_LATEX}({C})_{{j{s.node.word or 0}}}"
        return s.equals(f"{entry} {z}" if s.form == "einstein" else rf"{s.sum('z.')} {z} \, {entry}")
