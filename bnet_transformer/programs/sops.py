"""The variables of programs: s-ops, which give each word a value, and selectors, which give each word a set of words.

Each class computes its values word by word, which is the reference semantics. A *missing* value is None: a categorical
aggregate of no word, and what depends on it. Numeric s-ops are never missing: the mean of no word, and a numeric map of
a missing value, are 0.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from bnet_transformer._core.checks import check_choice, check_float
from bnet_transformer.errors import BNetError

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
        """The s-ops from which this one is computed, each once."""
        return ()

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

    @property
    def parents(self) -> tuple[SOp, ...]:
        return (self.x,)

    def compute(self, words: Sequence[Value], columns: dict[SOp, Column], *, causal: bool) -> Column:
        return [self.apply(value) for value in columns[self.x]]


@final
@dataclass(frozen=True, eq=False, repr=False)
class SequenceMap(_Encoded):
    """A function of two s-ops, word by word; at most one of them is numeric."""

    x: SOp
    y: SOp
    kind: ClassVar[str] = "sequence_map"

    @property
    def parents(self) -> tuple[SOp, ...]:
        return tuple(dict.fromkeys((self.x, self.y)))

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

    @property
    def parents(self) -> tuple[SOp, ...]:
        return tuple(dict.fromkeys((self.x, self.y)))

    @property
    def is_numeric(self) -> bool:
        return True

    def compute(self, words: Sequence[Value], columns: dict[SOp, Column], *, causal: bool) -> Column:
        return [self.a * x + self.b * y for x, y in zip(columns[self.x], columns[self.y], strict=True)]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Fallback(SOp):
    """The value of x, or that of y where x is missing; categorical."""

    x: SOp
    y: SOp
    kind: ClassVar[str] = "fallback"

    @property
    def parents(self) -> tuple[SOp, ...]:
        return tuple(dict.fromkeys((self.x, self.y)))

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

    @property
    def parents(self) -> tuple[SOp, ...]:
        return self.selector.parents

    @property
    def is_numeric(self) -> bool:
        return True

    def compute(self, words: Sequence[Value], columns: dict[SOp, Column], *, causal: bool) -> Column:
        return [1 / (1 + len(selected)) for selected in self.selector.select(columns, causal=causal)]
