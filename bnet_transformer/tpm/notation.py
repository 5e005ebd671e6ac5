r"""How names and numbers are written in LaTeX that pdflatex, MathJax and KaTeX read alike."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

_SPECIAL = {c: rf"\{c}" for c in "#$%&_{}"} | {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
}


def scripts(base: str, sub: Sequence[str] = (), sup: Sequence[str] = ()) -> str:
    """A base with subscripts and superscripts.

    >>> scripts("x", ["i"], ["t+1"]), scripts("m", ["q", "i"])
    ('x_i^{t+1}', 'm_{q,i}')
    """
    low, high = ",".join(sub), ",".join(sup)
    return base + (f"_{_braced(low)}" if low else "") + (f"^{_braced(high)}" if high else "")


def function(name: str) -> str:
    r"""The name of a class, as that of a function.

    >>> function("My_Gate")
    '\\operatorname{My\\_Gate}'
    """
    return rf"\operatorname{{{escaped(name) or 'f'}}}"


def escaped(text: str) -> str:
    r"""Text that LaTeX, MathJax and KaTeX show as it is: specials escaped, letters beyond ASCII made plain.

    >>> print(escaped("cross_q"), escaped("50% of $x^2$"), escaped("Größe"))
    cross\_q 50\% of \$x\textasciicircum{}2\$ Groe
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return "".join(_SPECIAL.get(letter, letter) for letter in plain if letter.isprintable())


def numeral(x: float) -> str:
    r"""A number: exact where it is short, else as a fraction, a root or a power of ten.

    >>> numeral(0.5), numeral(1 / 3), numeral(8**-0.5), numeral(512**0.5), numeral(1e-5)
    ('0.5', '\\frac{1}{3}', '\\frac{1}{\\sqrt{8}}', '\\sqrt{512}', '10^{-5}')
    """
    short = f"{x:g}"
    if float(short) != x and x > 0:
        shapes = ((1 / x, r"\frac{1}{%d}"), (x**2, r"\sqrt{%d}"), (x**-2, r"\frac{1}{\sqrt{%d}}"))
        for power, shape in shapes:
            if 1 < power < 1e6 and abs(power - round(power)) < 1e-9 * power:
                return shape % round(power)
    mantissa, _, exponent = short.partition("e")
    if not exponent:
        return short
    factor = "" if mantissa == "1" else "-" if mantissa == "-1" else rf"{mantissa} \cdot "
    return f"{factor}10^{{{int(exponent)}}}"


def raised(x: float, power: str) -> str:
    r"""A number to a power.

    >>> raised(10000.0, "2e/d"), raised(1e6, "2e/d")
    ('10000^{2e/d}', '(10^{6})^{2e/d}')
    """
    base = numeral(x)
    return scripts(f"({base})" if "^" in base or base[0] in "-\\" else base, (), [power])


def scaled(scale: float, value: str) -> str:
    """`value` times a number, which is left out where it is 1."""
    return value if scale == 1 else rf"{numeral(scale)} \, {value}"


def _braced(script: str) -> str:
    return script if len(script) == 1 else f"{{{script}}}"
