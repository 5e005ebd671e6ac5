"""The language of programs: functions that build s-ops and selectors.

It is RASP (Weiss et al. 2021) in the form of tracr (Lindner et al. 2023), with three differences: `&` joins the
conditions of selectors, `fallback` replaces missing values, and an aggregate of different categorical values is an
error.
"""

from __future__ import annotations

from collections.abc import Callable

from bnet_transformer._core.checks import check_float
from bnet_transformer.errors import BNetError
from bnet_transformer.programs.sops import (
    ENCODINGS,
    Aggregate,
    Fallback,
    Indices,
    LinearSequenceMap,
    Map,
    SelectedShare,
    Selector,
    SequenceMap,
    SOp,
    Term,
    Tokens,
    Value,
)

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
