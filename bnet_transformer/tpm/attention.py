"""Attention: scores, normalisers, the distribution over words `P(j | i)`, and the mean of the values under it.

Word i attends to word j with weight `P(j | i)`.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeVar, final

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_int
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import (
    TPM,
    CheckedDataclass,
    EvalContext,
    Kind,
    Parent,
    Product,
    Shape,
    broadcast_shapes,
    check_bool,
    check_matrix,
    check_positive,
    check_single_axis,
    check_vector,
    choice,
    instance_of,
    min_int,
    named,
    optional,
)
from bnet_transformer.tpm.symbols import (
    Symbol,
    Symbols,
    add_scripts,
    format_multiple,
    format_number,
    format_operator,
    format_power,
)

# --------------------------------------------------------------------------------------------------------------------
# The parts of attention: scores of a query and a key, rotary positions, biases by distance, normalisers.


RotaryCache = dict[tuple[object, ...], list[tuple[Tensor, Tensor, Tensor]]]  # positions, cosines, sines


@final
@dataclass(frozen=True)
class Rotary(CheckedDataclass):
    """Rotary positions (RoPE): pairs of features are rotated by an angle proportional to the position.

    For word i, features e and e + w/2 of the first w features are rotated by the angle `i f_e`, with
    `f_e = base^(-2e/w) / factor` (Su et al. 2021).

    Args:
        base: The base of the wavelengths. Default 10000.
        width: The number w of rotated features, which is even. None (default) for all; other features are unchanged.
        factor: The divisor of the frequencies. Default 1.
        bands: `(low, high, length)`: the divisor depends on the frequency, as in Llama 3. Features with fewer than
            `low` rotations in `length` words have the divisor `factor`, those with more than `high` have the divisor 1,
            and others are interpolated. None (default): all have `factor`.

    >>> Rotary(100.0, factor=2.0).frequencies(4)
    tensor([0.5000, 0.0500], dtype=torch.float64)
    """

    base: Annotated[float, named("rotary base", check_positive)] = 10000.0
    width: Annotated[int | None, optional(named("rotary width", min_int(2)))] = None
    factor: Annotated[float, named("rotary factor", check_positive)] = 1.0
    bands: Annotated[tuple[float, float, int] | None, optional(_check_bands)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width is not None and self.width % 2:
            raise BNetError("rotary width", expected="an even number, because features are paired", actual=self.width)

    def check_width(self, width: int, name: str, received: str) -> None:
        """Check that vectors of a given width can be rotated.

        Args:
            width: The width of the vectors.
            name: The name of their node, for the error.
            received: A description of the vectors, for the error.

        Raises:
            BNetError: If the width is odd, or smaller than the number of rotated features.
        """
        if self.width is None and width % 2:
            raise BNetError(name, expected="an even width, because rotary positions pair features", actual=received)
        if self.width is not None and self.width > width:
            expected = f"at least {self.width} features, the rotary width"
            raise BNetError(name, expected=expected, actual=received)

    def frequencies(self, width: int, device: torch.device | None = None) -> Tensor:
        """The angle between the rotations of two neighbouring words.

        Args:
            width: The width of the vectors.
            device: The device of the result; the CPU by default.

        Returns:
            The angle of each pair of features in radians, `[w / 2]`, in float64.
        """
        rotary_width = self.width or width
        pairs = torch.arange(rotary_width // 2, device=device, dtype=torch.float64)
        frequency = self.base ** (-2 * pairs / rotary_width)
        if self.bands is None:
            return frequency / self.factor
        low, high, length = self.bands
        unscaled = ((length * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return (unscaled + (1 - unscaled) / self.factor) * frequency

    def rotate(self, x: Tensor, position: Tensor, cache: RotaryCache | None = None) -> Tensor:
        """Rotate the vectors of words.

        Args:
            x: The vectors, `[..., d]`.
            position: The positions of the words, `[...]`.
            cache: A cache of cosines and sines, which this method fills. None (default) for no cache.

        Returns:
            The rotated vectors, `[..., d]`.
        """
        # RoPE (Su et al. 2021): q_i and k_j are rotated by i f and j f, so their product depends on j - i only. The
        # angle is computed in float64: in half precision, neighbouring positions of a long sentence would coincide.
        rotary_width = self.width or x.shape[-1]
        cached = [] if cache is None else cache.setdefault((self, x.shape[-1], x.dtype, x.device), [])
        entry = next((entry for entry in cached if entry[0] is position), None)
        if entry is None:
            angle = position.to(torch.float64)[..., None] * self.frequencies(x.shape[-1], x.device)
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            entry = position, torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
            cached.append(entry)
        _, cos, sin = entry
        paired = x if rotary_width == x.shape[-1] else x[..., :rotary_width]
        # [a, b] becomes [a cos - b sin, b cos + a sin]: a roll by half of the features is [b, a].
        rotated = torch.addcmul(paired * cos, paired.roll(rotary_width // 2, -1), sin)
        return rotated if paired is x else torch.cat([rotated, x[..., rotary_width:]], -1)

    def define_latex(self, s: Symbols, rotation: str, width: int) -> None:
        """Add the definition of the rotation of word i to the equations.

        Args:
            s: The symbols, which collect definitions.
            rotation: The symbol of the rotation in LaTeX.
            width: The width of the vectors.
        """
        rotary_width = self.width or width
        angle = rf"i / {format_power(self.base, f'2e/{rotary_width}')}"
        if self.bands is not None:
            low, high, length = self.bands
            angle = rf"i f_e, \; f_e = (s_e + \frac{{1 - s_e}}{{{format_number(self.factor)}}}) g_e"
            s.define(rf"g_e = {format_power(self.base, f'-2e/{rotary_width}')}")
            span, lowest = format_number(high - low), format_number(low)
            inside = rf"\frac{{1}}{{{span}}} (\frac{{{length} g_e}}{{2 \pi}} - {lowest})"
            s.define(rf"s_e = \min(\max({inside}, 0), 1)")
        elif self.factor != 1:
            angle = rf"i / ({format_number(self.factor)} \cdot {format_power(self.base, f'2e/{rotary_width}')})"
        suffix = "" if rotary_width == width else rf" \text{{ for }} e < {rotary_width // 2}"
        pair = rf"e \text{{ and }} e + {rotary_width // 2}"
        s.define(rf"{rotation} \text{{ rotates features }} {pair} \text{{ by the angle }} {angle}{suffix}")


def _check_bands(_: str, bands: object) -> tuple[float, float, int]:
    """The bands as two increasing numbers of rotations and a number of words."""
    if not isinstance(bands, tuple) or len(bands) != 3:
        raise BNetError("rotary bands", expected="(low, high, length)", actual=bands)
    low = check_float("low of the rotary bands", bands[0], above=0)
    high = check_float("high of the rotary bands", bands[1], above=low)
    return low, high, check_int("length of the rotary bands", bands[2])


@dataclass(frozen=True)
class Score(CheckedDataclass, abc.ABC):
    """The base class of scores: the similarity of the node's own word to each word that it reads.

    A subclass is a frozen dataclass that sets `roles`, the slots of query and key, and implements `check_parents`,
    `score_keys` and `score_queries`. `extra_slots` names further parents, such as a matrix. `is_bilinear = True`
    declares that the score is linear in the query and in the key, so that `Sentence.contributions` applies.
    """

    roles: ClassVar[tuple[str, str]]
    extra_slots: ClassVar[tuple[str, ...]] = ()
    is_bilinear: ClassVar[bool] = False  # True if the score is linear in the query and in the key

    @abc.abstractmethod
    def check_parents(self, query: Parent, key: Parent, *extra: Parent) -> None:
        """Check the shapes of the parents.

        Args:
            query: The description of the query.
            key: The description of the key.
            *extra: The descriptions of the parents in `extra_slots`.

        Raises:
            BNetError: If the parents cannot be scored.
        """

    @abc.abstractmethod
    def score_keys(self, query: Tensor, keys: Tensor, i: Tensor, j: Tensor, *extra: Tensor) -> Tensor:
        """The scores `s_ij` of one query i with every key j.

        Args:
            query: The query, `[..., d]`.
            keys: The keys, `[..., m, d]`.
            i: The index of the query's word, `[...]`.
            j: The indices of the keys' words, `[..., m]`.
            *extra: The values of the parents in `extra_slots`.

        Returns:
            The scores, `[..., m]`.
        """

    @abc.abstractmethod
    def score_queries(self, queries: Tensor, key: Tensor, j: Tensor, i: Tensor, *extra: Tensor) -> Tensor:
        """The scores `s_ji` of every query j with one key i, for attention with `over="queries"`.

        Args:
            queries: The queries, `[..., m, d]`.
            key: The key, `[..., d]`.
            j: The indices of the queries' words, `[..., m]`.
            i: The index of the key's word, `[...]`.
            *extra: The values of the parents in `extra_slots`.

        Returns:
            The scores, `[..., m]`.
        """

    def products(self, self_parent: Parent, read_parent: Parent, *extra: Parent) -> tuple[Product, ...] | None:
        """The matrix products of the scores of one word, from which costs are counted.

        Args:
            self_parent: The description of the parent of the node's own word.
            read_parent: The description of the collection of attended words.
            *extra: The descriptions of the parents in `extra_slots`.

        Returns:
            The products; None (default) if the score does not declare them.
        """
        return None

    def latex(self, s: Symbols, query: str, key: str) -> str:
        r"""The score in LaTeX; by default a function of query and key, `\operatorname{Score}(q_i, k_j)`.

        In the matrix forms it is the matrix of all scores. The node's own words are its rows in the form `row`, and its
        columns in the form `column`.

        Args:
            s: The symbols of the node and its parents.
            query: The slot of the query. The slot with a dot at the end is the collection of attended words.
            key: The slot of the key.

        Returns:
            LaTeX without delimiters.
        """
        given = ", ".join(str(s[slot]) for slot in (query, key, *self.extra_slots))
        return f"{format_operator(type(self).__name__)}({given})"


@final
@dataclass(frozen=True)
class Dot(Score):
    """The scaled dot product: `s_ij = scale * q_i . k_j`, with vectors q and k of the same width d_k.

    Args:
        scale: The factor. Default 1; None for `1/sqrt(d_k)`.
        rotary: Rotary positions of q and k: a `Rotary`, or its base. None (default) for no rotation.

    >>> Dot(None).score_keys(torch.ones(4), torch.ones(2, 4), torch.tensor(0), torch.arange(2))
    tensor([2., 2.])
    """

    scale: Annotated[float | None, optional(check_float)] = 1.0
    rotary: float | Rotary | None = None
    roles: ClassVar[tuple[str, str]] = ("q", "k")
    is_bilinear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rope  # noqa: B018  the constructor of Rotary checks the base

    @property
    def rope(self) -> Rotary | None:
        """The rotary positions; None if there are none."""
        return self.rotary if self.rotary is None or isinstance(self.rotary, Rotary) else Rotary(self.rotary)

    def check_parents(self, query: Parent, key: Parent, *extra: Parent) -> None:
        width = check_vector(key, check_vector(query), reason=f"as {query.name}")
        if self.rope is not None:
            self.rope.check_width(width, query.name, query.form)

    def get_scale(self, width: int) -> float:
        """The scale for keys of a given width.

        Args:
            width: The width d_k of the keys.

        Returns:
            The factor of the dot product.
        """
        return width**-0.5 if self.scale is None else self.scale

    def score_keys(self, query: Tensor, keys: Tensor, i: Tensor, j: Tensor, *extra: Tensor) -> Tensor:
        q, k = self.rotate(query, i), self.rotate(keys, j)
        return self.get_scale(q.shape[-1]) * torch.einsum("...d,...md->...m", q, k)

    def score_queries(self, queries: Tensor, key: Tensor, j: Tensor, i: Tensor, *extra: Tensor) -> Tensor:
        return self.score_keys(key, queries, i, j)

    def products(self, self_parent: Parent, read_parent: Parent, *extra: Parent) -> tuple[Product, ...]:
        return (Product((self_parent, read_parent), read_parent.shape, over=(read_parent,)),)

    def latex(self, s: Symbols, query: str, key: str) -> str:
        product, root = self._product_latex(s, query, key), rf"\sqrt{{{s.slot(key).shape[-1]}}}"
        if self.scale is not None:
            return format_multiple(self.scale, product)
        top, factor = (product, "") if s.form in ("row", "column") else ("1", f" {product}")
        return rf"\frac{{{top}}}{{{root}}}{factor}"

    def _product_latex(self, s: Symbols, query: str, key: str) -> str:
        """The product of query and key in LaTeX."""
        q, k = s.of(query, "b"), s.of(key, "b")
        self_symbol, read_symbol = (q, k) if key.endswith(".") else (k, q)
        if self.rope is not None:
            return self._rotary_latex(s, self.rope, q, k, self_symbol, read_symbol)
        z, w = self_symbol, read_symbol
        products = {"word": f"{q.T} {k}", "row": f"{z} {w.T}", "column": f"{w.T} {z}"}
        return products.get(s.form, f"{q} {k}")

    def _rotary_latex(
        self, s: Symbols, rotary: Rotary, q: Symbol, k: Symbol, self_symbol: Symbol, read_symbol: Symbol
    ) -> str:
        """The product of rotated query and key in LaTeX."""

        def rotation(i: str) -> str:
            return add_scripts("R", [i], s.role)

        rotary.define_latex(s, rotation("i"), s.slot(0).shape[-1])
        rot_q, rot_k = (rotation(x.word or "0") for x in (q, k))
        if s.form == "word":
            return rf"({rot_q} {q})^\top {rot_k} {k}"
        if s.form == "einstein":
            return rf"({rot_q})_{{bd}} {q['d']} ({rot_k})_{{be}} {k['e']}"
        if not s.is_full_matrix:
            s.require_form("word")
        rot = add_scripts(r"\operatorname{rot}", (), s.role)
        if s.form == "row":
            s.define(rf"{rot}(Z)_{{i:}} = Z_{{i:}} ({rotation('i')})^\top")
            return rf"{rot}({self_symbol}) {rot}({read_symbol})^\top"
        s.define(rf"{rot}(Z)_{{:i}} = {rotation('i')} Z_{{:i}}")
        return rf"{rot}({read_symbol})^\top {rot}({self_symbol})"

    def rotate(self, x: Tensor, position: Tensor, cache: RotaryCache | None = None) -> Tensor:
        """The vectors of words, rotated if there are rotary positions.

        Args:
            x: The vectors, `[..., d]`.
            position: The positions of the words, `[...]`.
            cache: A cache of cosines and sines, which this method fills. None (default) for no cache.

        Returns:
            The vectors, `[..., d]`.
        """
        rope = self.rope
        return x if rope is None else rope.rotate(x, position, cache)


@final
@dataclass(frozen=True)
class Bilinear(Score):
    """The bilinear score: `s_ij = scale * z_i^T A z_j`, the entries of the correlation matrix `Z^T A Z`.

    Query and key are the states z, and the attention has a further parent: the weight node `A`, `[d, d]`.

    Args:
        scale: The factor. Default 1.

    >>> A, i, j = torch.eye(2), torch.tensor(0), torch.arange(2)
    >>> Bilinear().score_keys(torch.tensor([1., 2.]), torch.eye(2), i, j, A)
    tensor([1., 2.])
    """

    scale: Annotated[float, check_float] = 1.0
    roles: ClassVar[tuple[str, str]] = ("z", "z")
    is_bilinear: ClassVar[bool] = True
    extra_slots: ClassVar[tuple[str, ...]] = ("A",)

    def check_parents(self, query: Parent, key: Parent, *extra: Parent) -> None:
        shape = (check_vector(query), check_vector(key))
        if check_matrix(extra[0]) != shape:
            raise BNetError(extra[0].name, expected=f"a matrix of shape {shape}", actual=extra[0].form)

    def score_keys(self, query: Tensor, keys: Tensor, i: Tensor, j: Tensor, *extra: Tensor) -> Tensor:
        Az = torch.einsum("...d,...de->...e", query, extra[0])  # A times the single vector first: fewer operations
        return self.scale * torch.einsum("...e,...me->...m", Az, keys)

    def score_queries(self, queries: Tensor, key: Tensor, j: Tensor, i: Tensor, *extra: Tensor) -> Tensor:
        Az = torch.einsum("...de,...e->...d", extra[0], key)
        return self.scale * torch.einsum("...md,...d->...m", queries, Az)

    def products(self, self_parent: Parent, read_parent: Parent, *extra: Parent) -> tuple[Product, ...]:
        (A,) = extra
        return Product((self_parent, A), A.shape), Product(
            (self_parent, A, read_parent), read_parent.shape, over=(read_parent,)
        )

    def latex(self, s: Symbols, query: str, key: str) -> str:
        z, A, w = s.of(query, "b"), s.weight("A", "bd"), s.of(key, "d")
        over_keys = key.endswith(".")
        x, y, A_column = (z, w, A.T) if over_keys else (w, z, str(A))  # the node's own word, the words that it reads
        A_row = str(A) if over_keys else A.T
        products = {"word": f"{z.T} {A} {w}", "row": f"{x} {A_row} {y.T}", "column": f"{y.T} {A_column} {x}"}
        return format_multiple(self.scale, products.get(s.form, f"{z} {A} {w}"))


@final
@dataclass(frozen=True)
class Normaliser(CheckedDataclass):
    """The map from scores to weights.

    Args:
        kind: `"softmax"` (default) over the attended words: the weights are the distribution `P(j | i)`.
            `"sigmoid"` of each score, or `"none"`, which uses the scores as weights; these are not distributions.

    >>> Normaliser().normalise(torch.tensor([0., 0., 9.]), torch.tensor([True, True, False]))
    tensor([0.5000, 0.5000, 0.0000])
    """

    kind: Annotated[str, named("normaliser", choice("softmax", "sigmoid", "none"))] = "softmax"

    def normalise(self, scores: Tensor, mask: Tensor) -> Tensor:
        """The weights of the words.

        Args:
            scores: The scores, `[..., m]`.
            mask: True for the attended words, `[..., m]`.

        Returns:
            The weights, `[..., m]`; words outside the mask have weight 0.
        """
        if self.kind == "softmax":
            return scores.masked_fill(~mask, -torch.inf).softmax(-1)
        weights = scores.sigmoid() if self.kind == "sigmoid" else scores
        return weights.masked_fill(~mask, 0.0)


# biases by distance


@dataclass(frozen=True)
class Bias(CheckedDataclass, abc.ABC):
    """The base class of biases by distance: `s_ij + b[d(j - i)]`, with a parent `b` of `width` numbers."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """The number of entries of the parent `b`."""

    @abc.abstractmethod
    def compute_bias(self, b: Tensor, i: Tensor, j: Tensor, *, from_key: bool = False) -> Tensor:
        """The bias of the scores.

        Args:
            b: The table, `[..., width]`.
            i: The index of the node's own word, `[...]`.
            j: The indices of the attended words, `[..., m]`.
            from_key: Whether word i is the key and the words j are the queries. Default False.

        Returns:
            The bias, `[..., m]`.
        """

    @abc.abstractmethod
    def index_latex(self, s: Symbols, distance: str) -> str:
        """The index of a distance in LaTeX; adds its definition to the equations.

        Args:
            s: The symbols, which collect definitions.
            distance: The distance in LaTeX.

        Returns:
            The index of the table, in LaTeX.
        """

    def check_table(self, b: Parent) -> None:
        """Check the width of the table.

        Args:
            b: The description of the parent `b`.

        Raises:
            BNetError: If it is not a vector of `width` numbers.
        """
        check_vector(b, self.width, reason="the number of entries of the bias by distance")

    def latex(self, s: Symbols, read: str, *, from_key: bool = False) -> str:
        r"""The bias in LaTeX with its sign, `+ b_{d(j-i)}`; in the matrix forms a matrix of all pairs.

        Args:
            s: The symbols of the node and its parents.
            read: The slot of the attended words.
            from_key: Whether the node's own word is the key. Default False.

        Returns:
            LaTeX without delimiters.
        """
        b, j = s.weight("b", ""), str(s.of(read).word)
        distance = f"{s.node.word}-{j}" if from_key else f"{j}-{s.node.word}"
        entry = b.with_sub(self.index_latex(s, distance if s.node.word else j))
        if s.form in ("word", "einstein"):
            return f" + {entry}"
        table = Symbol("B", sup=(str(b),))
        s.define(rf"{table.entry('i', 'j')} = {entry}")
        return f" + {s.pair_table(table)}"


@final
@dataclass(frozen=True)
class Relative(Bias):
    """A bias by clipped distance: `b[clip(j - i, -limit, limit) + limit]`; `b` has 2 limit + 1 entries.

    Args:
        limit: The largest distance with its own entry, in words, at least 0.

    >>> Relative(1).compute_bias(torch.tensor([9., 0., 1.]), torch.tensor(0), torch.arange(3))
    tensor([0., 1., 1.])
    """

    limit: Annotated[int, min_int(0)]

    @property
    def width(self) -> int:
        return 2 * self.limit + 1

    def compute_bias(self, b: Tensor, i: Tensor, j: Tensor, *, from_key: bool = False) -> Tensor:
        distance = i[..., None] - j if from_key else j - i[..., None]
        index = distance.clamp(-self.limit, self.limit) + self.limit
        if b.dim() == 1:
            return b[index]
        batch = broadcast_shapes(b.shape[:-1], index.shape[:-1])
        return b.expand(*batch, b.shape[-1]).gather(-1, index.expand(*batch, index.shape[-1]))

    def index_latex(self, s: Symbols, distance: str) -> str:
        cut = add_scripts("", [str(self.limit)])
        s.define(rf"[\delta]{cut} = \min(\max(\delta, -{self.limit}), {self.limit})")
        return f"[{distance}]{cut}"


@final
@dataclass(frozen=True)
class Buckets(Bias):
    """A bias by distance in buckets (Raffel et al. 2020), as in T5; `b` has `count` entries.

    Each small distance has its own bucket. Larger distances share buckets, the widths of which grow logarithmically.

    Args:
        count: The number of buckets, at least 4, or 2 if not `two_sided`. Default 32.
        furthest: The distance from which on all words share the last bucket. Default 128.
        two_sided: Whether half of the buckets are for later words. Default True. False uses all for earlier words,
            which is suitable for a causal mask.

    >>> Buckets(4, furthest=8).compute_bias(torch.arange(4.0), torch.tensor(1), torch.arange(4))
    tensor([1., 0., 3., 3.])
    """

    count: Annotated[int, named("count of buckets", check_int)] = 32
    furthest: Annotated[int, check_int] = 128
    two_sided: Annotated[bool, check_bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("count of buckets", self.count, minimum=4 if self.two_sided else 2)
        if self.furthest <= self._max_exact:
            expected = f"more than {self._max_exact}, the number of distances with their own bucket"
            raise BNetError("furthest", expected=expected, actual=self.furthest)

    @property
    def width(self) -> int:
        return self.count

    @property
    def _buckets_per_side(self) -> int:
        """The number of buckets on one side."""
        return self.count // 2 if self.two_sided else self.count

    @property
    def _max_exact(self) -> int:
        """The number of distances on one side that have their own bucket."""
        return self._buckets_per_side // 2

    def compute_bias(self, b: Tensor, i: Tensor, j: Tensor, *, from_key: bool = False) -> Tensor:
        return Relative(self.furthest).compute_bias(b[..., self._distance_buckets(b.device)], i, j, from_key=from_key)

    def _distance_buckets(self, device: torch.device) -> Tensor:
        """The bucket of every distance from -furthest to furthest."""
        # In float32, as in the training of T5, because rounding decides the bucket of a distance at a boundary.
        distance = torch.arange(-self.furthest, self.furthest + 1, device=device)
        magnitude = distance.abs() if self.two_sided else (-distance).clamp(min=0)
        fraction = (magnitude.clamp(min=self._max_exact).float() / self._max_exact).log() / math.log(
            self.furthest / self._max_exact
        )
        log_bucket = self._max_exact + (fraction * (self._buckets_per_side - self._max_exact)).long()
        bucket = torch.where(magnitude < self._max_exact, magnitude, log_bucket.clamp(max=self._buckets_per_side - 1))
        return bucket + self._buckets_per_side * (distance > 0) if self.two_sided else bucket

    def index_latex(self, s: Symbols, distance: str) -> str:
        single, side = self._max_exact, self._buckets_per_side
        cut = add_scripts("", [str(self.count), str(self.furthest)])
        magnitude = r"|\delta|" if self.two_sided else r"\max(-\delta, 0)"
        sign_term = rf" + {side} \, [\delta > 0]" if self.two_sided else ""
        fraction = rf"\frac{{\ln(r / {single})}}{{\ln({self.furthest} / {single})}}"
        log_bucket = rf"\min\left({side - 1}, {single} + \lfloor {side - single} \, {fraction} \rfloor\right)"
        cases = rf"r & r < {single} \\ {log_bucket} & r \ge {single}"
        s.define(rf"\beta{cut}(\delta) = \begin{{cases}} {cases} \end{{cases}}{sign_term}, \; r = {magnitude}")
        return rf"\beta{cut}({distance})"


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
            return self._softmax_latex(s, s.with_read_index(s.state))
        return s.softmax(*self._scores_latex(s), "j")


def _describe_words(parent: Parent) -> str:
    """The reach and the stack of a collection of words, for error messages."""
    if parent.stack_reach is None:
        return parent.form
    stack, reach = parent.stack_reach
    return f"reach {reach}" + (f" of stack {stack!r}" if stack else "")
