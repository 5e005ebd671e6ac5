r"""The result: rows of equations and the definitions of their letters, to print, compile or display."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from bnet_transformer.errors import unknown_name_error

T = TypeVar("T")
PAGE_WIDTH = 82.0
PAGE_SETUP = r"""\setlength{\textwidth}{17.5cm}
\setlength{\textheight}{24cm}
\setlength{\oddsidemargin}{-0.8cm}
\setlength{\topmargin}{-1.8cm}
\setlength{\parindent}{0pt}
\allowdisplaybreaks
\pagestyle{empty}
"""
DOCUMENT_HEAD = rf"""\documentclass{{article}}
\usepackage{{amsmath,amssymb}}
{PAGE_SETUP}\begin{{document}}
"""


@dataclass(frozen=True)
class Equation:
    """One row: the equation `left = right` of one template of nodes.

    Attributes:
        name: The name of the row, such as `x_(t+1)`.
        left: The left-hand side in LaTeX.
        right: The right-hand side in LaTeX.
        kind: The kind of the TPM: input, deterministic, discrete or continuous.
        form: The form of the equation; it is `"word"` if the requested form cannot express the equation.
        slices: The slices for which the equation is valid; empty for all.
        note: A description of the TPM in words.
    """

    name: str
    left: str
    right: str
    kind: str
    form: str
    slices: tuple[int, ...] = ()
    note: str = ""

    @property
    def latex(self) -> str:
        """The equation as one formula."""
        return f"{self.left} = {self.right}{self.condition}"

    @property
    def condition(self) -> str:
        """The slices for which the equation is valid, in LaTeX; empty for all."""
        if not self.slices:
            return ""
        return rf" \qquad (t = {', '.join(map(str, self.slices))})"

    def __str__(self) -> str:
        return self.latex

    def _repr_latex_(self) -> str:
        """The LaTeX that a notebook displays."""
        return f"$$\n{self.latex}\n$$"


@dataclass(frozen=True)
class Equations:
    r"""The structural equations of a net, one row for each template of nodes, and the definitions of their letters.

    `str()` and `.latex` return an `align*` environment for a paper (amsmath, amssymb); `.document()` returns a complete
    document. Iteration gives the rows. Rows are also found by name, as in a dictionary: `net.equations()["x_(t+1)"]`,
    `get`, `keys`, `values` and `items`; `in` accepts a name or a row.

    Attributes:
        form: The requested form: `"word"`, `"row"`, `"column"` or `"einstein"`.
        rows: The equations.
        where: The definitions of the letters, in LaTeX.
    """

    form: str
    rows: tuple[Equation, ...]
    where: tuple[str, ...]

    @property
    def latex(self) -> str:
        r"""The equations as one `align*` environment."""
        return f"\\begin{{align*}}\n{self._body()}\n\\end{{align*}}"

    def document(self) -> str:
        """A complete LaTeX document, for pdflatex."""
        return f"{DOCUMENT_HEAD}{self.latex}\n\\end{{document}}\n"

    def __str__(self) -> str:
        return self.latex

    def __iter__(self) -> Iterator[Equation]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, item: object) -> bool:
        return item in self.keys() or item in self.rows

    def keys(self) -> tuple[str, ...]:
        """The names of the rows, so that `dict(equations)` is a dictionary of the rows by name."""
        return tuple(row.name for row in self.rows)

    def values(self) -> tuple[Equation, ...]:
        """The equations, as in `rows`."""
        return self.rows

    def items(self) -> tuple[tuple[str, Equation], ...]:
        """Pairs of the name of a row and its equation, as those of a dictionary.

        >>> import bnet_transformer as bt
        >>> names = [name for name, equation in bt.bayesuvius(dim=4).equations().items()]
        >>> names[-1]
        'x_(t+1)'
        """
        return tuple(zip(self.keys(), self.values(), strict=True))

    def __getitem__(self, name: str) -> Equation:
        """The row of a template of nodes.

        Args:
            name: The name of the row, such as `"x_(t+1)"`.

        Returns:
            The equation.

        Raises:
            UnknownNameError: There is no row with this name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise unknown_name_error("equation", name, self.keys())

    def get(self, name: str, default: T | None = None) -> Equation | T | None:
        """The row of a template of nodes, or another value if there is none.

        Args:
            name: The name of the row, such as `"x_(t+1)"`.
            default: The value that is returned if there is no row with this name; None by default.

        Returns:
            The equation, or `default`.

        >>> import bnet_transformer as bt
        >>> equations = bt.bayesuvius(dim=4).equations()
        >>> equations.get("x_(t+1)").name, equations.get("z"), "z" in equations
        ('x_(t+1)', None, False)
        """
        return self[name] if name in self.keys() else default

    def _repr_latex_(self) -> str:
        """The LaTeX that a notebook displays."""
        return f"$$\n\\begin{{aligned}}\n{self._body()}\n\\end{{aligned}}\n$$"

    def _body(self) -> str:
        """The rows of the equations and of the definitions."""
        lines = align_equations([(row.left, row.right + row.condition) for row in self.rows])
        statements = pack_statements(self.where)
        lines += [(r"\text{where} & \quad " if k == 0 else r"& \quad ") + line for k, line in enumerate(statements)]
        return " \\\\\n".join(lines)


# layout of equations on a page

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[^\s]")
_WIDTH_TABLE = {  # the widths of commands that are neither letters nor relations
    0.0: r"\right \mathbb \mathrm \text \bar \hat \overline \widehat",
    0.1: r"\mathbf",
    0.3: r"\, \mathcal \operatorname",
    0.4: r"\left \Big",
    0.5: r"\; \ ",
    1.2: r"\sqrt",
    2.0: r"\quad \ldots",
    2.2: r"\sum \prod",
    2.6: r"\exp",
    3.5: r"\tanh",
    4.0: r"\qquad",
}
_TOKEN_WIDTHS = {token: width for width, tokens in _WIDTH_TABLE.items() for token in _TOKEN.findall(tokens)}
_RELATIONS = frozenset({"=", "+", "-", "<", r"\mid", r"\in", r"\sim", r"\le", r"\ge", r"\odot", r"\circ", r"\cdot"})
_UPRIGHT = frozenset({r"\mathrm", r"\text", r"\operatorname"})
_NARROW = frozenset("ijl.,:;()[]|'")


def estimate_width(latex: str) -> float:
    """An estimate of the width of a formula, in letters.

    >>> estimate_width("x") < estimate_width("x_i^t") < estimate_width(r"x_i^t + x_j^t") < 8
    True
    """
    return _measure(iter(_TOKEN.findall(latex)))


def _measure(tokens: Iterator[str], closing: str | None = None) -> float:
    """The width of tokens up to a closing token."""
    total = 0.0
    scripts: dict[str, float] = {}
    for token in tokens:
        if token == closing:
            break
        if token in "_^":
            scripts[token] = 0.62 * _measure_argument(tokens)
            continue
        total += max(scripts.values(), default=0.0)
        scripts = {}
        total += (
            _COMMANDS_WITH_ARGUMENTS[token](tokens)
            if token in _COMMANDS_WITH_ARGUMENTS
            else _measure_token(token, tokens)
        )
    return total + max(scripts.values(), default=0.0)


def _measure_token(token: str, tokens: Iterator[str]) -> float:
    """The width of one token, with its arguments."""
    if token == "{":
        return _measure(tokens, "}")
    if token in _RELATIONS:
        return 2.2
    if token in _UPRIGHT:
        return _TOKEN_WIDTHS[token] + 0.88 * _measure_argument(tokens)
    if token in _NARROW:
        return 0.9 if token in ",;" else 0.6
    return _TOKEN_WIDTHS.get(token, 1.35 if token.isupper() else 1.1)


def _measure_argument(tokens: Iterator[str]) -> float:
    """The width of the next argument."""
    return _measure_token(next(tokens, ""), tokens)


def _measure_fraction(tokens: Iterator[str]) -> float:
    """The width of a fraction."""
    return max(_measure_argument(tokens), _measure_argument(tokens)) + 0.5


def _measure_underbrace(tokens: Iterator[str]) -> float:
    """The width of an underbrace with its label."""
    body = _measure_argument(tokens)
    next(tokens, "")
    return max(body, 0.62 * _measure_argument(tokens))


def _measure_cases(tokens: Iterator[str]) -> float:
    """The width of an environment `cases`."""
    _measure_argument(tokens)
    rows = " ".join(takewhile(lambda token: token != r"\end", tokens)).split(r"\\")
    _measure_argument(tokens)
    return 3.0 + max(map(estimate_width, rows))


_COMMANDS_WITH_ARGUMENTS = {r"\frac": _measure_fraction, r"\underbrace": _measure_underbrace, r"\begin": _measure_cases}


def align_equations(pairs: Sequence[tuple[str, str]], page_width: float = PAGE_WIDTH) -> list[str]:
    """The lines of an `align` environment, from left and right sides; too wide pairs are broken between the sides."""
    lefts, rights = [estimate_width(left) for left, _ in pairs], [estimate_width(right) + 2.2 for _, right in pairs]
    options = []
    for column in sorted({*lefts, 0.0}, reverse=True):
        broken = frozenset(k for k, left in enumerate(lefts) if left > column or column + rights[k] > page_width)
        reach = [column + (max(lefts[k], rights[k] + 2) if k in broken else rights[k]) for k in range(len(pairs))]
        options.append((max(0.0, max(reach, default=0.0) - page_width), len(broken), broken))
    *_, cut = min(options, key=lambda option: option[:2])
    lines = []
    for k, (left, right) in enumerate(pairs):
        lines += [rf"& {left}", rf"& \quad = {right}"] if k in cut else [f"{left} &= {right}"]
    return lines


def pack_statements(statements: Sequence[str], column_width: float = PAGE_WIDTH / 2) -> list[str]:
    """Put short statements next to each other, and long statements on separate lines."""
    lines: list[str] = []
    for statement in statements:
        longer = rf"{lines[-1]}, \qquad {statement}" if lines else ""
        if longer and estimate_width(longer) <= column_width:
            lines[-1] = longer
        else:
            lines.append(statement)
    return lines
