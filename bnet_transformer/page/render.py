"""The page itself: the front end, its colours and what it shows in one HTML file that fetches nothing."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from bnet_transformer.figures.labels import escape_invisible
from bnet_transformer.figures.style import HEAD_COLOURS, get_palette

MODULES = (
    "ground_graph",
    "attention",
    "elements",
    "layout",
    "viewport",
    "controls",
    "export",
    "panel",
    "attention_lines",
    "explorer",
)
COLOUR_SCHEMES = {"auto": "light dark", "light": "light", "dark": "dark"}

_IMPORT = re.compile(r'^import (\{.*?\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:const|class|(?:async )?function) (\w+))", re.MULTILINE)


def render_html(description: Mapping[str, Any], buffer: bytes) -> bytes:
    """The HTML file of a description."""
    theme = str(description["theme"])
    parts = {
        "title": html.escape(escape_invisible(f"{description['title']} — a Bayesian network")),
        "scheme": COLOUR_SCHEMES[theme],
        "theme": theme,
        "style": render_style_sheet(),
        "description": to_json(description),
        "buffer": encode_buffer(buffer),
        "script": bundle_script("boot"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read_asset("page.html")).encode("utf-8", "replace")


@cache
def bundle_script(entry_point: str) -> str:
    """The modules of the front end as one, that of the page (`boot`) or of the widget (`widget`) last.

    Each module becomes a function that is called once and gives back what it exports; the last one stays a module.
    """
    return "\n".join([*map(_wrap_module, MODULES), _resolve_imports(entry_point)])


def _wrap_module(name: str) -> str:
    text = _resolve_imports(name)
    told = ", ".join(name for _, name in _EXPORT.findall(text))
    own = _EXPORT.sub(r"\1", text)
    return f"const ${name} = (() => {{\n{own}\nreturn {{ {told} }};\n}})();"


def _resolve_imports(name: str) -> str:
    """A module whose imports are taken from the modules before it."""
    return _IMPORT.sub(r"const \1 = $\2;", _read_asset(f"{name}.js"))


@cache
def render_style_sheet() -> str:
    """The style sheet, with the colours of every picture as its variables."""
    light, dark = (_css_variables(theme) for theme in ("light", "dark"))
    media = f'@media (prefers-color-scheme: dark) {{ .bnet:not([data-theme="light"]) {{ {dark} }} }}'
    return f'.bnet {{ {light} }}\n{media}\n.bnet[data-theme="dark"] {{ {dark} }}\n{_read_asset("style.css")}'


def _css_variables(theme: str) -> str:
    named = {**get_palette(theme), **{f"head-{k}": colour for k, colour in enumerate(HEAD_COLOURS[theme])}}
    return f"color-scheme: {theme}; " + "; ".join(f"--{name}: {colour}" for name, colour in named.items())


def _read_asset(name: str) -> str:
    return resources.files("bnet_transformer.page").joinpath("frontend", name).read_text("utf-8")


def encode_buffer(buffer: bytes) -> str:
    """A block of bytes as text: gzip, then base64; the same bytes make the same text."""
    return base64.b64encode(gzip.compress(buffer, compresslevel=4, mtime=0)).decode("ascii")


def to_json(value: object) -> str:
    r"""JSON in plain ASCII in which no tag can open or close.

    >>> to_json({"word": "</script>"})
    '{"word":"\\u003c/script>"}'
    """
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")
