"""The self-contained HTML file: the front end, its style sheet, the data and the equations; it loads no other file."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from importlib import resources
from typing import Any

from bnet_transformer.declare import Network
from bnet_transformer.equations import Notation, equations, share_equations
from bnet_transformer.figures.fonts import escape_invisible
from bnet_transformer.figures.picture import HEAD_COLOURS, get_palette

# --------------------------------------------------------------------------------------------------------------------
# The equations of a net as LaTeX and as MathML; nested lists replace MathML tags, so the page requires no parser.


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
    rows = []
    for row in equations(network).rows:
        sides = [to_mathml(row.left), to_mathml(f"= {row.right}{row.condition}")]  # so that the page can use two lines
        mathml = None if None in sides else sides
        rows.append({"name": row.name, "latex": row.latex, "mathml": mathml, "note": row.note})
    indices = [-1] * len(network.specs)
    for k, shared in enumerate(share_equations(network, Notation(network))):
        for spec in shared.specs:
            indices[spec.group.index] = k
    return rows, indices


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


# --------------------------------------------------------------------------------------------------------------------
# The self-contained HTML file: the front end, its style sheet and the data of the page; it loads no other file.


MODULES = (
    "ground_graph",
    "attention",
    "elements",
    "layout",
    "viewport",
    "controls",
    "export",
    "panel",
    "printout",
    "attention_lines",
    "view_state",
    "input",
    "explorer",
    "live_state",
    "live_history",
    "live_client",
    "live_progress",
    "live_tables",
    "live_panel",
)
NOTEBOOK_THEMES = {  # the marks of the themes of JupyterLab, VS Code and Colab
    "light": ('[data-jp-theme-light="true"]', ".vscode-light", 'html[theme="light"]'),
    "dark": ('[data-jp-theme-light="false"]', ".vscode-dark", 'html[theme="dark"]'),
}
COLOUR_SCHEMES = {"auto": "light dark", "light": "light", "dark": "dark"}

_IMPORT = re.compile(r'^import (\{.*?\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:const|class|(?:async )?function) (\w+))", re.MULTILINE)


def render_html(description: Mapping[str, Any], buffer: bytes) -> bytes:
    """Return the HTML file for a description and its buffer."""
    theme = str(description["theme"])
    parts = {
        "title": html.escape(escape_invisible(f"{description['title']} — a Bayesian network")),
        "scheme": COLOUR_SCHEMES[theme],
        "theme": theme,
        "style": render_style_sheet(),
        "description": to_json(description),
        # gzip has no time stamp, so equal buffers have equal text
        "buffer": base64.b64encode(gzip.compress(buffer, compresslevel=4, mtime=0)).decode("ascii"),
        "script": bundle_script("boot"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], read_asset("page.html")).encode("utf-8", "replace")


@cache
def bundle_script(entry_point: str) -> str:
    """Return the front end as one module, for an entry point: `boot` (the HTML file), `widget` (anywidget) or `serve`.

    Neither an HTML file opened from disk nor anywidget can import a second file. So each module that the entry point
    needs becomes a function that runs once and returns its exports; a module follows the modules that it imports.
    """
    needed = {entry_point}
    for name in (entry_point, *reversed(MODULES)):
        if name in needed:
            needed.update(module for _, module in _IMPORT.findall(read_asset(f"{name}.js")))
    parts = []
    for module in filter(needed.__contains__, MODULES):
        text = _resolve_imports(module)
        exports = ", ".join(name for _, name in _EXPORT.findall(text))
        body = _EXPORT.sub(r"\1", text)
        parts.append(f"const ${module} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();")
    return "\n".join([*parts, _resolve_imports(entry_point)])


def _resolve_imports(name: str) -> str:
    """Return the text of a module in which each import reads the exports of an earlier module."""
    return _IMPORT.sub(r"const \1 = $\2;", read_asset(f"{name}.js"))


@cache
def render_style_sheet() -> str:
    """Return the style sheet, with the palettes of figures as CSS variables."""
    variables = []
    for theme in ("light", "dark"):
        colours = {**get_palette(theme), **{f"head-{k}": colour for k, colour in enumerate(HEAD_COLOURS[theme])}}
        declarations = "; ".join(f"--{name}: {colour}" for name, colour in colours.items())
        variables.append(f"color-scheme: {theme}; {declarations}")
    light, dark = variables
    is_not_light, is_not_dark = (f'.bnet:not([data-theme="{theme}"])' for theme in ("light", "dark"))
    rules = [
        f".bnet {{ {light} }}",
        f"@media (prefers-color-scheme: dark) {{ {is_not_light} {{ {dark} }} }}",
        *(f":where({notebook}) {is_not_dark} {{ {light} }}" for notebook in NOTEBOOK_THEMES["light"]),
        *(f":where({notebook}) {is_not_light} {{ {dark} }}" for notebook in NOTEBOOK_THEMES["dark"]),
        f'.bnet[data-theme="dark"] {{ {dark} }}',
        f"@media print {{ .bnet.bnet {{ {light} }} }}",  # as specific as the rules above, and later
    ]
    return "\n".join([*rules, read_asset("style.css")])


@cache
def read_asset(name: str) -> str:
    """The text of a file of the front end."""
    return resources.files("bnet_transformer.page").joinpath("frontend", name).read_text("utf-8")


def to_json(value: object) -> str:
    r"""JSON in ASCII that is safe in a script element: without `<`, no tag can open or close.

    >>> to_json({"word": "</script>"})
    '{"word":"\\u003c/script>"}'
    """
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")
