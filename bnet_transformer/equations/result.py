r"""The result: rows of equations and what their letters mean, to print, paste, compile or show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bnet_transformer.equations.layout import aligned, packed
from bnet_transformer.errors import unknown

PAGE_SETUP = r"""\setlength{\textwidth}{17.5cm}
\setlength{\textheight}{24cm}
\setlength{\oddsidemargin}{-0.8cm}
\setlength{\topmargin}{-1.8cm}
\setlength{\parindent}{0pt}
\allowdisplaybreaks
\pagestyle{empty}
"""
HEAD = rf"""\documentclass{{article}}
\usepackage{{amsmath,amssymb}}
{PAGE_SETUP}\begin{{document}}
"""


@dataclass(frozen=True)
class Equation:
    """One row: `left = right`, for one node template.

    `form` is the form in which it is told (`word` where the asked form has no words for it); `slices` the
    slices that it holds for, where not for all; `note` says in plain words what kind of TPM it is.
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
        """The slices it holds for, where not for all."""
        if not self.slices:
            return ""
        return rf" \qquad (t = {', '.join(map(str, self.slices))})"

    def __str__(self) -> str:
        return self.latex

    def _repr_latex_(self) -> str:
        return f"$$\n{self.latex}\n$$"


@dataclass(frozen=True)
class Equations:
    r"""The structural equations of a net, one row for each node template, and what the letters in them mean.

    `str()` and `.latex` are an `align*` to paste in a paper (amsmath, amssymb), `.document()` is a document
    of its own. Rows are found by name (`told["x_(t+1)"]`) and in a loop.
    """

    form: str
    rows: tuple[Equation, ...]
    where: tuple[str, ...]

    @property
    def latex(self) -> str:
        r"""The equations as one `align*`."""
        return f"\\begin{{align*}}\n{self._body()}\n\\end{{align*}}"

    def document(self) -> str:
        """A document of its own, for pdflatex."""
        return f"{HEAD}{self.latex}\n\\end{{document}}\n"

    def __str__(self) -> str:
        return self.latex

    def __iter__(self) -> Iterator[Equation]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Equation:
        """The row of that name, such as `x_(t+1)`."""
        for row in self.rows:
            if row.name == name:
                return row
        raise unknown("equation", name, [row.name for row in self.rows])

    def _repr_latex_(self) -> str:
        return f"$$\n\\begin{{aligned}}\n{self._body()}\n\\end{{aligned}}\n$$"

    def _body(self) -> str:
        lines = aligned([(row.left, row.right + row.condition) for row in self.rows])
        told = packed(self.where)
        lines += [(r"\text{where} & \quad " if k == 0 else r"& \quad ") + line for k, line in enumerate(told)]
        return " \\\\\n".join(lines)
