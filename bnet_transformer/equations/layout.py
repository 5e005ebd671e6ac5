r"""How equations stand on a page: an estimate of their width, and the rows that are broken because of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

PAGE = 82.0

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[^\s]")
_SPACES = {r"\,": 0.3, r"\;": 0.5, r"\ ": 0.5, r"\quad": 2.0, r"\qquad": 4.0, r"\left": 0.4, r"\right": 0.0}
_SPACES |= {
    r"\mathbb": 0.0,
    r"\mathcal": 0.3,
    r"\mathbf": 0.1,
    r"\mathrm": 0.0,
    r"\text": 0.0,
    r"\operatorname": 0.3,
}
_SPACES |= {r"\sqrt": 1.2, r"\bar": 0.0, r"\hat": 0.0, r"\Big": 0.4}
_SPACES |= {
    r"\overline": 0.0,
    r"\widehat": 0.0,
    r"\ldots": 2.0,
    r"\sum": 2.2,
    r"\prod": 2.2,
    r"\exp": 2.6,
    r"\tanh": 3.5,
}
_WIDE = frozenset({"=", "+", "-", "<", r"\mid", r"\in", r"\sim", r"\le", r"\ge", r"\odot", r"\circ", r"\cdot"})
_UPRIGHT = frozenset({r"\mathrm", r"\text", r"\operatorname"})
_THIN = frozenset("ijl.,:;()[]|'")


def width(latex: str) -> float:
    """About how wide a formula is, in letters.

    >>> width("x") < width("x_i^t") < width(r"x_i^t + x_j^t") < 8
    True
    """
    tokens = iter(_TOKEN.findall(latex))
    return _measure(tokens)


def _measure(tokens: Iterator[str], closing: str | None = None) -> float:
    total = 0.0
    scripts: dict[str, float] = {}
    for token in tokens:
        if token == closing:
            break
        if token in "_^":
            scripts[token] = 0.62 * _argument(tokens)
            continue
        total += max(scripts.values(), default=0.0)
        scripts = {}
        total += _TALL[token](tokens) if token in _TALL else _one(token, tokens)
    return total + max(scripts.values(), default=0.0)


def _one(token: str, tokens: Iterator[str]) -> float:
    if token == "{":
        return _measure(tokens, "}")
    if token in _WIDE:
        return 2.2
    if token in _UPRIGHT:
        return _SPACES[token] + 0.88 * _argument(tokens)
    if token in _THIN:
        return 0.9 if token in ",;" else 0.6
    return _SPACES.get(token, 1.35 if token.isupper() else 1.1)


def _argument(tokens: Iterator[str]) -> float:
    return _one(next(tokens, ""), tokens)


def _fraction(tokens: Iterator[str]) -> float:
    return max(_argument(tokens), _argument(tokens)) + 0.5


def _brace(tokens: Iterator[str]) -> float:
    body = _argument(tokens)
    next(tokens, "")
    return max(body, 0.62 * _argument(tokens))


def _cases(tokens: Iterator[str]) -> float:
    _argument(tokens)
    rows = " ".join(takewhile(lambda token: token != r"\end", tokens)).split(r"\\")
    _argument(tokens)
    return 3.0 + max(map(width, rows))


_TALL = {r"\frac": _fraction, r"\underbrace": _brace, r"\begin": _cases}


def aligned(pairs: Sequence[tuple[str, str]], page: float = PAGE) -> list[str]:
    """Lines of an `align` from left and right sides; a pair too wide for the page is broken between them."""
    lefts, rights = [width(left) for left, _ in pairs], [width(right) + 2.2 for _, right in pairs]
    best: tuple[float, int, frozenset[int]] | None = None
    for column in sorted({*lefts, 0.0}, reverse=True):
        broken = frozenset(k for k, left in enumerate(lefts) if left > column or column + rights[k] > page)
        reach = [column + (max(lefts[k], rights[k] + 2) if k in broken else rights[k]) for k in range(len(pairs))]
        found = (max(0.0, max(reach, default=0.0) - page), len(broken), broken)
        best = min(best or found, found, key=lambda it: it[:2])
    cut = best[2] if best else frozenset()
    lines = []
    for k, (left, right) in enumerate(pairs):
        lines += [rf"& {left}", rf"& \quad = {right}"] if k in cut else [f"{left} &= {right}"]
    return lines


def packed(statements: Sequence[str], column: float = PAGE / 2) -> list[str]:
    """Short statements side by side, long ones on a line of their own."""
    lines: list[str] = []
    for statement in statements:
        longer = rf"{lines[-1]}, \qquad {statement}" if lines else ""
        if longer and width(longer) <= column:
            lines[-1] = longer
        else:
            lines.append(statement)
    return lines
