"""The language of programs: s-ops, which give each word a value, selectors, and the functions that build them.

It is RASP (Weiss et al. 2021) in the form of tracr (Lindner et al. 2023), with three differences: `&` joins the
conditions of selectors, `fallback` replaces missing values, and an aggregate of different categorical values is an
error.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from bnet_transformer._core.checks import check_choice, check_float
from bnet_transformer.errors import BNetError

# --------------------------------------------------------------------------------------------------------------------
# The variables of programs: s-ops, which give each word a value, and selectors, which give each word a set of words.
#
# Each class computes its values word by word, which is the reference semantics. A *missing* value is None: a
# categorical aggregate of no word, and what depends on it. Numeric s-ops are never missing: the mean of no word, and a
# numeric map of a missing value, are 0.


Value = Any  # a token, a number, a boolean, or None for a missing value
Column = Sequence[Value]  # the value of an s-op at each word
ENCODINGS = ("categorical", "numeric")
TOLERANCE = 1e-9  # numbers that differ by less are one value


@dataclass(frozen=True, eq=False)
class SOp(abc.ABC):
    """A sequence operator (s-op): a variable of a program, with a value at each word.

    Args:
        name: The name of the variable. None for a name that the compiler chooses.
    """

    name: str | None
    kind: ClassVar[str]

    @property
    def parents(self) -> tuple[SOp, ...]:
        """The s-ops from which this one is computed, each once: its fields that are s-ops."""
        return tuple(dict.fromkeys(value for value in vars(self).values() if isinstance(value, SOp)))

    @property
    def is_numeric(self) -> bool:
        """True for the numeric encoding, one direction; False for one-hot states."""
        return False

    @abc.abstractmethod
    def compute(self, words: Sequence[Value], columns: dict[SOp, Column], *, causal: bool) -> Column:
        """The value at each word.

        Args:
            words: The tokens of the sentence.
            columns: The values of the parents.
            causal: Whether word i selects only words up to i.

        Returns:
            A value for each word; None where it is missing.
        """

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name or 'without a name'}>"


@final
@dataclass(frozen=True, eq=False, repr=False)
class Tokens(SOp):
    """The token of each word; categorical."""

    kind: ClassVar[str] = "tokens"

    def compute(self, words: Sequence[Value], columns: dict[SOp, Column], *, causal: bool) -> Column:
        return list(words)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Indices(SOp):
    """The position of each word, from 0; categorical."""

    kind: ClassVar[str] = "indices"

    def compute(self, words: Sequence[Value], columns: dict[SOp, Column], *, causal: bool) -> Column:
        return list(range(len(words)))


@dataclass(frozen=True, eq=False, repr=False)
class _Encoded(SOp):
    """An s-op whose encoding the user chooses."""

    function: Callable[..., Value]
    encoding: str

    def __post_init__(self) -> None:
        check_choice("encoding", self.encoding, ENCODINGS)
        if not callable(self.function):
            raise BNetError(self.kind, expected="a function", actual=self.function)

    @property
    def is_numeric(self) -> bool:
        return self.encoding == "numeric"

    def apply(self, *values: Value) -> Value:
        """The function at values of the parents: None if one is missing, or 0 if the result is numeric."""
        if any(value is None for value in values):
            return 0.0 if self.is_numeric else None
        try:
            result = self.function(*values)
        except Exception as error:
            arguments = ", ".join(repr(value) for value in values)
            raise BNetError(f"{self.kind} {self.name}: the function failed at ({arguments}): {error}") from error
        return check_float(f"value of {self.kind} {self.name}", result * 1.0) if self.is_numeric else result


@final
@dataclass(frozen=True, eq=False, repr=False)
class Map(_Encoded):
    """A function of one s-op, word by word."""

    x: SOp
    kind: ClassVar[str] = "map"

    def compute(self, words: Sequence[Value], columns: dict[SOp, Column], *, causal: bool) -> Column:
        return [self.apply(value) for value in columns[self.x]]


@final
@dataclass(frozen=True, eq=False, repr=False)
class SequenceMap(_Encoded):
    """A function of two s-ops, word by word; at most one of them is numeric."""

    x: SOp
    y: SOp
    kind: ClassVar[str] = "sequence_map"

    def compute(self, words: Sequence[Value], columns: dict[SOp, Column], *, causal: bool) -> Column:
        return [self.apply(x, y) for x, y in zip(columns[self.x], columns[self.y], strict=True)]


@final
@dataclass(frozen=True, eq=False, repr=False)
class LinearSequenceMap(SOp):
    """The sum `a x + b y` of two numeric s-ops; numeric."""

    x: SOp
    y: SOp
    a: float
    b: float
    kind: ClassVar[str] = "linear_sequence_map"
    is_numeric: ClassVar[bool] = True

    def compute(self, words: Sequence[Value], columns: dict[SOp, Column], *, causal: bool) -> Column:
        return [self.a * x + self.b * y for x, y in zip(columns[self.x], columns[self.y], strict=True)]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Fallback(SOp):
    """The value of x, or that of y where x is missing; categorical."""

    x: SOp
    y: SOp
    kind: ClassVar[str] = "fallback"

    def compute(self, words: Sequence[Value], columns: dict[SOp, Column], *, causal: bool) -> Column:
        return [y if x is None else x for x, y in zip(columns[self.x], columns[self.y], strict=True)]


@dataclass(frozen=True, eq=False)
class Term:
    """One condition of a selector: word i selects word j if `predicate(keys[j], queries[i])` is true."""

    keys: SOp
    queries: SOp
    predicate: Callable[[Value, Value], object]

    def holds(self, key: Value, query: Value) -> bool:
        """Whether a query selects a key; a missing value selects nothing and is not selected."""
        return key is not None and query is not None and bool(self.predicate(key, query))


@final
@dataclass(frozen=True, eq=False)
class Selector:
    """For each word i the set of words j that satisfy all conditions. `a & b` has the conditions of both.

    Args:
        terms: The conditions.
    """

    terms: tuple[Term, ...]

    def __and__(self, other: Selector) -> Selector:
        if not isinstance(other, Selector):
            raise BNetError("&", expected="a selector", actual=other)
        return Selector(self.terms + other.terms)

    @property
    def parents(self) -> tuple[SOp, ...]:
        """The s-ops that the conditions read, each once."""
        return tuple(dict.fromkeys(sop for term in self.terms for sop in (term.keys, term.queries)))

    def select(self, columns: dict[SOp, Column], *, causal: bool) -> list[list[int]]:
        """The selected words of each word.

        Args:
            columns: The values of the s-ops.
            causal: Whether word i selects only words up to i.

        Returns:
            For each word i the words j, in their order.
        """
        size = len(columns[self.terms[0].queries])

        def is_selected(i: int, j: int) -> bool:
            return all(term.holds(columns[term.keys][j], columns[term.queries][i]) for term in self.terms)

        return [[j for j in range(i + 1 if causal else size) if is_selected(i, j)] for i in range(size)]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Aggregate(SOp):
    """The mean of numeric values over the selected words, or the value that all selected words share."""

    selector: Selector
    values: SOp
    kind: ClassVar[str] = "aggregate"

    @property
    def parents(self) -> tuple[SOp, ...]:
        return tuple(dict.fromkeys((*self.selector.parents, self.values)))

    @property
    def is_numeric(self) -> bool:
        return self.values.is_numeric

    def compute(self, words: Sequence[Value], columns: dict[SOp, Column], *, causal: bool) -> Column:
        values, result = columns[self.values], []
        for selected in self.selector.select(columns, causal=causal):
            if self.is_numeric:
                result.append(sum(values[j] for j in selected) / max(len(selected), 1))
                continue
            states = dict.fromkeys(values[j] for j in selected)
            if len(states) > 1:
                hint = "Use a numeric s-op for a mean, or a selector of one word"
                expected = "one categorical value among the selected words"
                raise BNetError(f"aggregate {self.name}", expected=expected, actual=[*states], hint=hint)
            result.append(next(iter(states), None))
        return result


@final
@dataclass(frozen=True, eq=False, repr=False)
class SelectedShare(SOp):
    """`1 / (1 + n)` for n selected words: the weight of BOS in a head that selects BOS too; numeric."""

    selector: Selector
    kind: ClassVar[str] = "selected_share"
    is_numeric: ClassVar[bool] = True

    @property
    def parents(self) -> tuple[SOp, ...]:
        return self.selector.parents

    def compute(self, words: Sequence[Value], columns: dict[SOp, Column], *, causal: bool) -> Column:
        return [1 / (1 + len(selected)) for selected in self.selector.select(columns, causal=causal)]


tokens: SOp = Tokens("tokens")
indices: SOp = Indices("indices")


def select(keys: SOp, queries: SOp, predicate: Callable[[Value, Value], object]) -> Selector:
    """A selector: word i selects the words j for which `predicate(keys[j], queries[i])` is true.

    Args:
        keys: The categorical s-op of the words j.
        queries: The categorical s-op of word i.
        predicate: A function of a key and a query, such as `operator.eq`.

    Returns:
        The selector. `a & b` selects the words that both select.

    Raises:
        BNetError: Keys or queries are no categorical s-op.

    >>> from bnet_transformer import programs
    >>> before = programs.select(programs.indices, programs.indices, lambda j, i: j == i - 1)
    >>> programs.compile(programs.aggregate(before, programs.tokens), vocabulary="ab", max_words=3).run("aab")
    (None, 'a', 'a')
    """
    for subject, sop in (("keys", keys), ("queries", queries)):
        _check_sop(subject, sop, numeric=False)
    if not callable(predicate):
        raise BNetError("predicate", expected="a function of a key and a query", actual=predicate)
    return Selector((Term(keys, queries, predicate),))


def aggregate(selector: Selector, values: SOp, *, name: str | None = None) -> SOp:
    """The aggregate of values over the selected words: one head.

    Args:
        selector: The selector.
        values: The s-op of the selected words. The aggregate of numeric values is their mean, and 0 if no word is
            selected. Categorical values of the selected words must be equal; the aggregate is missing if no word is
            selected.
        name: The name of the variable. None (default) for a name that the compiler chooses.

    Returns:
        The s-op, with the encoding of `values`.

    Raises:
        BNetError: An argument is no selector or no s-op.

    >>> import operator
    >>> from bnet_transformer import programs
    >>> earlier = programs.select(programs.indices, programs.indices, operator.le)
    >>> is_a = programs.map(lambda token: token == "a", programs.tokens, encoding="numeric")
    >>> compiled = programs.compile(programs.aggregate(earlier, is_a), vocabulary="ab", max_words=4)
    >>> compiled.run("abab")
    (1.0, 0.5, 0.6666666666666666, 0.5)
    """
    if not isinstance(selector, Selector):
        raise BNetError("selector", expected="a selector, such as select(tokens, tokens, operator.eq)", actual=selector)
    return Aggregate(name, selector, _check_sop("values", values))


def selector_width(selector: Selector, *, name: str | None = None) -> SOp:
    """The number of selected words: one head and one map.

    Args:
        selector: The selector.
        name: The name of the variable. None (default) for a name that the compiler chooses.

    Returns:
        The s-op, categorical.

    Raises:
        BNetError: The argument is no selector.

    >>> import operator
    >>> from bnet_transformer import programs
    >>> same = programs.select(programs.tokens, programs.tokens, operator.eq)
    >>> programs.compile(programs.selector_width(same), vocabulary="ab", max_words=4).run("abaa")
    (3, 1, 3, 3)
    """
    if not isinstance(selector, Selector):
        raise BNetError("selector", expected="a selector, such as select(tokens, tokens, operator.eq)", actual=selector)
    share = SelectedShare(None if name is None else f"{name}_share", selector)
    return Map(name, lambda weight: round(1 / weight) - 1, "categorical", share)


def map(function: Callable[[Value], Value], x: SOp, *, encoding: str = "categorical", name: str | None = None) -> SOp:
    """A function of an s-op, word by word: hidden units of the feed-forward step.

    A map of a numeric s-op is piecewise constant between the values that the s-op can have.

    Args:
        function: The function of a value. A categorical result None is a missing value.
        x: The s-op.
        encoding: `"categorical"` (default) for states, or `"numeric"` for numbers, of which aggregates are means.
        name: The name of the variable. None (default) for a name that the compiler chooses.

    Returns:
        The s-op.

    Raises:
        BNetError: An argument is no s-op or no function, or the encoding is unknown.

    >>> from bnet_transformer import programs
    >>> upper = programs.map(str.upper, programs.tokens)
    >>> programs.compile(upper, vocabulary="ab", max_words=3).run("aba")
    ('A', 'B', 'A')
    """
    return Map(name, function, encoding, _check_sop("x", x))


def sequence_map(
    function: Callable[[Value, Value], Value], x: SOp, y: SOp, *, encoding: str = "categorical", name: str | None = None
) -> SOp:
    """A function of two s-ops, word by word: hidden units of the feed-forward step.

    Args:
        function: The function of a value of x and a value of y.
        x: The first s-op.
        y: The second s-op. At most one of the two is numeric; `linear_sequence_map` adds two numeric s-ops.
        encoding: `"categorical"` (default) or `"numeric"`.
        name: The name of the variable. None (default) for a name that the compiler chooses.

    Returns:
        The s-op. It is missing (or 0 if numeric) where x or y is missing.

    Raises:
        BNetError: Both s-ops are numeric, or an argument is no s-op or no function.

    >>> from bnet_transformer import programs
    >>> label = programs.sequence_map(lambda token, i: f"{token}{i}", programs.tokens, programs.indices)
    >>> programs.compile(label, vocabulary="ab", max_words=3).run("aba")
    ('a0', 'b1', 'a2')
    """
    if _check_sop("x", x).is_numeric and _check_sop("y", y).is_numeric:
        hint = "Use linear_sequence_map, or map one of them to a categorical s-op"
        raise BNetError("sequence_map", expected="at most one numeric s-op", actual="two", hint=hint)
    return SequenceMap(name, function, encoding, x, _check_sop("y", y))


def linear_sequence_map(x: SOp, y: SOp, a: float = 1.0, b: float = 1.0, *, name: str | None = None) -> SOp:
    """The sum `a x + b y` of two numeric s-ops, word by word: its readers read x and y with these factors.

    Args:
        x: The first numeric s-op.
        y: The second numeric s-op.
        a: The factor of x. Default 1.
        b: The factor of y. Default 1.
        name: The name of the variable. None (default) for a name that the compiler chooses.

    Returns:
        The s-op, numeric.

    Raises:
        BNetError: An argument is no numeric s-op, or a factor is no finite number.

    >>> from bnet_transformer import programs
    >>> one, two = (programs.map(lambda t, k=k: k * (t == "a"), programs.tokens, encoding="numeric") for k in (1, 2))
    >>> programs.compile(programs.linear_sequence_map(one, two, 1, -1), vocabulary="ab", max_words=3).run("aba")
    (-1.0, 0.0, -1.0)
    """
    _check_sop("x", x, numeric=True), _check_sop("y", y, numeric=True)
    return LinearSequenceMap(name, x, y, check_float("a", a), check_float("b", b))


def fallback(x: SOp, y: SOp, *, name: str | None = None) -> SOp:
    """The value of one s-op, or that of another where the first is missing: hidden units of the feed-forward step.

    Args:
        x: The categorical s-op with the first choice.
        y: The categorical s-op with the value where x is missing.
        name: The name of the variable. None (default) for a name that the compiler chooses.

    Returns:
        The s-op, categorical.

    Raises:
        BNetError: An argument is no categorical s-op.

    >>> from bnet_transformer import programs
    >>> before = programs.select(programs.indices, programs.indices, lambda j, i: j == i - 1)
    >>> previous = programs.fallback(programs.aggregate(before, programs.tokens), programs.tokens)
    >>> programs.compile(previous, vocabulary="ab", max_words=3).run("bab")
    ('b', 'b', 'a')
    """
    return Fallback(name, _check_sop("x", x, numeric=False), _check_sop("y", y, numeric=False))


def _check_sop(subject: str, value: object, *, numeric: bool | None = None) -> SOp:
    """The value as an s-op, of one encoding if that is given."""
    if not isinstance(value, SOp):
        raise BNetError(subject, expected="an s-op, such as tokens, indices or map(...)", actual=value)
    if numeric is not None and value.is_numeric != numeric:
        expected, actual = ENCODINGS[::-1] if numeric else ENCODINGS
        hint = "Use map with another encoding"
        raise BNetError(subject, expected=f"a {expected} s-op", actual=f"a {actual} s-op, {value.kind}", hint=hint)
    return value
