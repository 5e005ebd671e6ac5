"""The equations of a net for the page: LaTeX, and MathML as nested lists, so that the page parses no markup."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

from bnet_transformer.equations import equations
from bnet_transformer.equations.letters import Letters
from bnet_transformer.equations.telling import groups
from bnet_transformer.network import Network

TAGS = frozenset(
    {"math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msub", "msup", "msubsup"}
    | {"munder", "mover", "munderover", "mtable", "mtr", "mtd", "mstyle", "mpadded", "menclose"}
)
MARKS = frozenset(
    {"mathvariant", "stretchy", "fence", "form", "minsize", "maxsize", "width", "height", "depth", "accent"}
    | {"columnalign", "separator", "movablelimits", "display", "displaystyle", "scriptlevel", "largeop"}
    | {"linethickness", "lspace", "rspace", "symmetric"}
)
BRACE = "\u23df"


def formulas(network: Network) -> tuple[list[dict[str, Any]], list[int]]:
    """Each equation with its name, LaTeX, MathML and note; and for each family which equation is its own."""
    told = equations(network)
    rows = [
        {"name": row.name, "latex": row.latex, "math": _sides(row.left, row.right + row.condition), "note": row.note}
        for row in told.rows
    ]
    which = [-1] * len(network.members)
    for k, group in enumerate(groups(network, Letters(network))):
        for member in group.members:
            which[member.family.index] = k
    return rows, which


def _sides(left: str, right: str) -> list[Any] | None:
    """The two sides of an equation, each a formula of its own, so that they can stand below one another."""
    sides = mathml(left), mathml(f"= {right}")
    return None if None in sides else list(sides)


def mathml(latex: str) -> list[Any] | None:
    """A formula as MathML: `[tag, marks, text or parts]`; None where the converter does not know the LaTeX.

    >>> mathml("x^2")[2][0][2][0]
    ['msup', {}, [['mi', {}, 'x'], ['mn', {}, '2']]]
    """
    from latex2mathml.converter import convert

    try:
        root = ElementTree.fromstring(convert(latex, display="block"))
    except Exception:  # a stranger's TPM may write what no converter knows: the page shows its LaTeX
        return None
    return _told(root)


def _told(element: ElementTree.Element) -> list[Any]:
    tag = element.tag.rpartition("}")[2]
    marks = {name: value for name, value in element.attrib.items() if name in MARKS}
    children = _joined([_told(child) for child in element])
    if tag == "munder" and len(children) == 2 and children[1][2] == BRACE:  # few fonts can stretch a brace
        return ["mrow", {"class": "brace"}, children[:1]]
    if children:
        return [tag if tag in TAGS else "mrow", marks, children]
    return [tag if tag in TAGS else "mtext", marks, element.text or ""]


def _joined(parts: list[list[Any]]) -> list[list[Any]]:
    """Upright letters side by side as one name."""
    found: list[list[Any]] = []
    for part in parts:
        upright = part[0] in ("mi", "mn", "mo") and part[1].get("mathvariant") == "normal" and isinstance(part[2], str)
        upright = upright or (part[0] == "mn" and bool(found) and found[-1][0] == "mi" and len(found[-1][2]) > 1)
        if upright and found and found[-1][0] == "mi" and found[-1][1].get("mathvariant") == "normal":
            found[-1] = ["mi", {"mathvariant": "normal"}, found[-1][2] + part[2]]
        else:
            found.append(part)
    return found
