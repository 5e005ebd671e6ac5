"""The equations of a net as LaTeX and as MathML; nested lists replace MathML tags, so the page requires no parser."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from functools import lru_cache, partial
from typing import Any

from bnet_transformer.declare import Network
from bnet_transformer.equations import equations
from bnet_transformer.equations.notation import Notation
from bnet_transformer.equations.render import share_equations

MATHML_TAGS = frozenset(
    {"math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msub", "msup", "msubsup"}
    | {"munder", "mover", "munderover", "mtable", "mtr", "mtd", "mstyle", "mpadded", "menclose"}
)
MATHML_ATTRIBUTES = frozenset(
    {"mathvariant", "stretchy", "fence", "form", "minsize", "maxsize", "width", "height", "depth", "accent"}
    | {"columnalign", "separator", "movablelimits", "display", "displaystyle", "scriptlevel", "largeop"}
    | {"linethickness", "lspace", "rspace", "symmetric"}
)
UNDERBRACE = "\u23df"


def describe_equations(network: Network) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the equations with name, LaTeX, MathML and note; and the index of the equation of each node group."""
    return network.derive("equations of the page", partial(_describe_equations, network))


def _describe_equations(network: Network) -> tuple[list[dict[str, Any]], list[int]]:
    """Describe the equations, which do not depend on a sentence."""
    rows = [
        {
            "name": row.name,
            "latex": row.latex,
            "mathml": _render_sides(row.left, row.right + row.condition),
            "note": row.note,
        }
        for row in equations(network).rows
    ]
    indices = [-1] * len(network.specs)
    for k, shared in enumerate(share_equations(network, Notation(network))):
        for spec in shared.specs:
            indices[spec.group.index] = k
    return rows, indices


def _render_sides(left: str, right: str) -> list[Any] | None:
    """Return the MathML of the two sides of an equation as two formulas, so that the page can use two lines."""
    sides = to_mathml(left), to_mathml(f"= {right}")
    return None if None in sides else list(sides)


@lru_cache(maxsize=2000)  # the formulas of a net do not change with its interventions
def to_mathml(latex: str) -> list[Any] | None:
    """Return a formula as MathML: `[tag, attributes, text or children]`; None if the converter lacks a command.

    >>> to_mathml("x^2")[2][0][2][0]
    ['msup', {}, [['mi', {}, 'x'], ['mn', {}, '2']]]
    """
    from latex2mathml.converter import convert

    try:
        root = ElementTree.fromstring(convert(latex, display="block"))
    except Exception:  # a user's TPM may have any LaTeX; the page shows LaTeX that cannot be converted as text
        return None
    return _element_to_lists(root)


def _element_to_lists(element: ElementTree.Element) -> list[Any]:
    """An element of MathML as nested lists."""
    tag = element.tag.rpartition("}")[2]
    attributes = {name: value for name, value in element.attrib.items() if name in MATHML_ATTRIBUTES}
    children = _merge_upright_letters([_element_to_lists(child) for child in element])
    if tag == "munder" and len(children) == 2 and children[1][2] == UNDERBRACE:
        # Few fonts can stretch a brace, so the style sheet draws it.
        return ["mrow", {"class": "brace"}, children[:1]]
    if children:
        return [tag if tag in MATHML_TAGS else "mrow", attributes, children]
    return [tag if tag in MATHML_TAGS else "mtext", attributes, element.text or ""]


def _merge_upright_letters(elements: list[list[Any]]) -> list[list[Any]]:
    r"""Merge the separate letters into which the converter splits `\mathrm{name}`, and the digits after them."""
    merged: list[list[Any]] = []
    for element in elements:
        tag, attributes, content = element
        is_upright = (
            tag in ("mi", "mn", "mo") and attributes.get("mathvariant") == "normal" and isinstance(content, str)
        )
        is_upright = is_upright or (tag == "mn" and bool(merged) and merged[-1][0] == "mi" and len(merged[-1][2]) > 1)
        if is_upright and merged and merged[-1][0] == "mi" and merged[-1][1].get("mathvariant") == "normal":
            merged[-1] = ["mi", {"mathvariant": "normal"}, merged[-1][2] + content]
        else:
            merged.append(element)
    return merged
