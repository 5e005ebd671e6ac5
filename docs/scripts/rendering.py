"""The Sphinx extension of the site: docstrings to reStructuredText, formulas to MathML, links to the repository."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from public_objects import list_reference
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.util.nodes import make_refnode

from bnet_transformer import tpm

ROOT = Path(__file__).resolve().parents[2]
PICTURE_FOLDERS = ("docs/serve",)
CODE = re.compile(r"(`[^`]+`)")
SPECIAL = re.compile(r"([\\*|_<>])")
ROWS = re.compile(r"\\(begin|end)\{(?:aligned|split)\}")
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")
ENTRY_NAME = re.compile(r"^(    \*{0,2}\w[\w.]*(?:, \*{0,2}\w+)*:)(?= |$)", re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_config_value("repository", None, "env")
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    app.connect("autodoc-process-docstring", _convert_docstring, priority=400)  # before napoleon
    app.connect("builder-inited", _strip_annotated)
    app.connect("doctree-read", _link_files, priority=100)  # before downloads are collected
    app.connect("missing-reference", _resolve_type)
    app.connect("build-finished", _copy_pictures)
    next(field for field in PyObject.doc_field_types if field.name == "variable").label = "Attributes"
    return {"parallel_read_safe": True, "parallel_write_safe": True}


# signatures: types without the checks of their `Annotated`


def strip_annotated(hint: str) -> str:
    """A type in which each `Annotated` one is the type itself.

    >>> strip_annotated("Annotated[int | tuple[int, ...], named('size', is_int)]")
    'int | tuple[int, ...]'
    """
    while match := re.search(r"Annotated\[", hint):
        depth, comma, end = 1, 0, match.end()
        while depth:
            depth += {"[": 1, "]": -1}.get(hint[end], 0)
            comma = comma or (end if depth == 1 and hint[end] == "," else 0)
            end += 1
        hint = hint[: match.start()] + hint[match.end() : comma] + hint[end:]
    return hint


def _strip_annotated(app: Sphinx) -> None:
    """Take the checks from the types of all TPMs and their parts, before they are read."""
    kinds = {kind for value in vars(tpm).values() if isinstance(value, type) for kind in value.__mro__[:-1]}
    for kind in kinds:
        for hints in (getattr(kind, "__annotations__", {}), getattr(kind.__init__, "__annotations__", {})):
            hints |= {name: strip_annotated(hint) for name, hint in hints.items() if isinstance(hint, str)}


# docstrings: paragraphs with `code`, `>>>` examples, lists, Google-style sections, and indented literal text


def plain_to_rst(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a docstring as reStructuredText; its sections keep the Google style that napoleon reads.

    >>> list(plain_to_rst(["A `shape` *as* it is."]))
    ['A \\\\ ``shape``\\\\  \\\\*as\\\\* it is.', '']
    >>> list(plain_to_rst(["Args:", "    x: The `x`.", "", "Returns:", "    A pair: two numbers."]))
    ['Args:', '    x: The \\\\ ``x``\\\\ .', '', 'Returns:', '    : A pair: two numbers.', '']
    """
    section = ""
    for block in re.split(r"\n[ \t]*\n", "\n".join(lines).strip("\n")):
        header = block.partition("\n")[0]
        if SECTION.fullmatch(header):
            section = header.removesuffix(":")
            yield header
            yield from _convert_section(section, block.partition("\n")[2]).splitlines()
        elif section and block.startswith(" "):
            yield from _convert_section("", block).splitlines()
        else:
            section = ""
            if block.lstrip().startswith(">>> "):
                yield from block.splitlines()
            elif block.startswith(" "):
                yield from ("::", "", *("    " + line for line in block.splitlines()))
            else:
                yield from _convert_inline(block).splitlines()
        yield ""


def _convert_section(section: str, body: str) -> str:
    """Convert the text of a section. Without a type, napoleon would take text before a colon for the returned type."""
    if section in ("Returns", "Yields"):
        return "    : " + _convert_inline(body.strip())
    parts = ENTRY_NAME.split(body)  # text, name, text, name, ...
    return "".join(part if k % 2 else _convert_inline(part) for k, part in enumerate(parts))


def _convert_inline(text: str) -> str:
    """Convert code in backticks, and escape what reStructuredText would interpret."""
    return "".join(_convert_piece(part) for part in CODE.split(text))


def _convert_piece(part: str) -> str:
    if not (part.startswith("`") and len(part) > 2):
        return SPECIAL.sub(r"\\\1", part)
    code = " ".join(part[1:-1].split())
    path = _find_public_path(code)
    # autosummary would end its summary at a full stop within code: a zero-width space hides it
    return rf"\ :py:obj:`{code} <{path}>`\ " if path else "\\ ``" + code.replace(". ", ".\u200b ") + "``\\ "


def _find_public_path(code: str) -> str | None:
    """The object of the reference that a piece of code names: a class as `Sentence`, a function as `bt.sweep`."""
    name = code.removeprefix("bt.")
    if name == code and not (name.isidentifier() and name[0].isupper()):
        return None
    paths = list_reference()
    if f"bnet_transformer.{name}" in paths:
        return f"bnet_transformer.{name}"
    return next((path for path in paths if name == code and path.endswith(f".{name}")), None)


def _convert_docstring(app: Sphinx, subject: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = list(plain_to_rst(lines))
    if subject == "property" and lines:
        lines[0] = f": {lines[0]}"  # napoleon would take text before a colon for the type of the property


# formulas


def to_mathml(latex: str, display: str = "inline") -> str:
    """A formula as MathML; rows that are aligned at `&` are a table, by the one name its converter has for them.

    >>> to_mathml(r"\\begin{aligned} a &= b \\\\ c &= d \\end{aligned}").count("<mtr>")
    2
    """
    return convert(ROWS.sub(r"\\\1{align*}", latex), display=display)


def _visit_inline(self: Any, node: nodes.math) -> None:
    self.body.append(to_mathml(node.astext()))
    raise nodes.SkipNode


def _visit_block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{to_mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


# links and types


def _link_files(app: Sphinx, doctree: nodes.document) -> None:
    """Links to folders, and to files that are not pages, lead to the repository where its address is known."""
    current = (ROOT / app.env.docname).parent
    links = list(doctree.findall(addnodes.download_reference))
    links += [link for link in doctree.findall(addnodes.pending_xref) if link["reftype"] == "myst"]
    for link in links:
        path = (current / link["reftarget"]).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            continue
        children = link.children if link.children else [nodes.literal(text=link["reftarget"])]
        if app.config.repository:
            kind = "tree" if path.is_dir() else "blob"
            uri = f"{app.config.repository}/{kind}/HEAD/{path.relative_to(ROOT)}"
            link.replace_self(nodes.reference("", "", *children, refuri=uri))
        elif path.is_dir():
            link.replace_self(nodes.inline("", "", *children))


def _copy_pictures(app: Sphinx, error: Exception | None) -> None:
    """Copy the files of `<picture>` elements, which Sphinx does not read as images, to the folders of their pages."""
    if error is None and app.builder.format == "html":
        for folder in PICTURE_FOLDERS:
            shutil.copytree(ROOT / folder, Path(app.outdir) / folder, dirs_exist_ok=True)


def _resolve_type(app: Sphinx, env: Any, node: addnodes.pending_xref, content: nodes.Element) -> nodes.Element | None:
    """Resolve a type by its last name: signatures have the module that defines it, the docs the public one."""
    if node.get("refdomain") != "py":
        return None
    last = node["reftarget"].rsplit(".", 1)[-1]
    objects = env.get_domain("py").objects
    matches = [(name, obj) for name, obj in objects.items() if name.rsplit(".", 1)[-1] == last]
    matches = [(name, obj) for name, obj in matches if obj.objtype in ("class", "exception")]
    if len(matches) != 1 or not node["reftarget"].startswith(("bnet_transformer", last)):
        return None
    ((name, obj),) = matches
    return make_refnode(app.builder, node["refdoc"], obj.docname, obj.node_id, content, name)
