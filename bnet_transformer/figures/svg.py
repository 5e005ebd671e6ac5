"""Writes pictures as SVG, PNG and PDF.

The SVG has text elements, a title, a description and tooltips; it has no script and loads no other file. typst converts
it to PNG and PDF, so all three formats have the same layout. The fonts are those of the system and DejaVu, which
matplotlib includes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import inspect
import shutil
import struct
import tempfile
import unicodedata
import warnings
import zlib
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from xml.sax import saxutils

import graphviz

from bnet_transformer.figures.fonts import (
    GENERIC_FONTS,
    PRINT_DPI,
    SCRIPT_SCALE,
    escape_invisible,
    has_non_latin,
    label_to_text,
    measure_label,
    resolve_font,
)
from bnet_transformer.figures.graphviz import DotSource, to_dot
from bnet_transformer.figures.picture import (
    DASH_PATTERNS,
    FADED_OPACITY,
    LABEL_SIZE,
    Frame,
    NodeBox,
    Picture,
    PictureArrow,
    TextLine,
    box_outlines,
    get_palette,
    split_arrow_head,
)

SANS = "'DejaVu Sans', Verdana, 'Helvetica Neue', Arial, sans-serif"
SERIF = "'DejaVu Serif', 'STIX Two Text', 'Times New Roman', serif"
MAX_SHOWN_WIDTH = 680.0  # points: wider pictures are shown smaller
PDF_PAGE_SIZE = (468.0, 648.0)  # points: a larger figure becomes a PDF of at most this width and height
PNG_DPI = 192.0
MAX_PNG_PIXELS = 8000.0  # the maximum width and height of a PNG
# All fonts that figures use by name: those of the default, then those of a generic `font=`.
DEJAVU_FONTS = (
    *("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSerif-Italic.ttf"),
    *("DejaVuSans-Oblique.ttf", "DejaVuSansMono.ttf", "DejaVuSansMono-Oblique.ttf"),
)
# The files of this package and of the standard library: a warning is reported at the first stack frame outside them.
INTERNAL_PATHS = (str(Path(__file__).parents[1]), functools.__file__, contextlib.__file__)
# The figure is passed as an input, so no text in it is parsed as typst. Without a date, equal figures have equal bytes.
TYPST_TEMPLATE = """
#set document(title: sys.inputs.title, date: none)
#set page(width: {width}pt, height: {height}pt, margin: 0pt, fill: none)
#image(bytes(sys.inputs.svg), format: "svg", width: {width}pt, height: {height}pt, alt: sys.inputs.title)
"""


class NotebookPicture(Picture):
    """The layout of a figure, with the fields of a `Picture`; a notebook shows it as SVG, a console as one line."""

    def __repr__(self) -> str:
        return f"<Picture: {self.title or 'figure'}, {len(self.boxes)} boxes, {len(self.arrows)} arrows>"

    def _repr_svg_(self) -> str:
        """The SVG that a notebook shows."""
        return to_svg(self)

    def to_graphviz(self) -> graphviz.Source:
        """Return the figure as DOT without positions; see `Picture.to_graphviz`."""
        return DotSource(to_dot(self), self._repr_svg_)


def escape(text: str) -> str:
    """Text escaped for use between tags."""
    return saxutils.escape(escape_invisible(text))


def quoteattr(text: str) -> str:
    """Text escaped as the value of an attribute, with its quotes."""
    return saxutils.quoteattr(escape_invisible(text))


def to_svg(picture: Picture, *, is_print: bool = False) -> str:
    """Return the picture as SVG. With `theme="auto"` its colours follow the light or dark mode of the viewer.

    `is_print` is for typst, which has no dark mode and uses one font for each text element: a font that has its rarest
    character.
    """
    width, height = picture.width, picture.height
    style = SvgStyle(picture.theme, is_print, picture.font)
    if picture.scale is None:  # a small screen may reduce the picture
        scale = min(1.0, MAX_SHOWN_WIDTH / width) if width else 1.0
        size = f'width="{_fmt(width * scale)}" height="{_fmt(height * scale)}" style="max-width:100%;height:auto"'
    else:
        size = f'width="{width * picture.scale:.6g}pt" height="{height * picture.scale:.6g}pt"'
    legend = ", ".join(label_to_text(entry.text.runs) for entry in picture.legend)
    counts = f"{len(picture.boxes)} nodes and {len(picture.arrows)} arrows"
    description = ". ".join(filter(None, (counts, legend and f"Legend: {legend}", picture.caption)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {_fmt(width)} {_fmt(height)}" role="img" font-family={quoteattr(style.sans)}>',
        f"<title>{escape(picture.title)}</title>",
        f"<desc>{escape(description)}</desc>",
        style.sheet,
        f'<rect width="{_fmt(width)}" height="{_fmt(height)}"{style.fill["paper"]}/>',
        '<g class="frames">',
        *(_render_frame(frame, style) for frame in picture.frames),
        '</g><g class="arrows">',
        *(_render_arrow(arrow, style) for arrow in picture.arrows),
        '</g><g class="nodes">',
        *(_render_box(box, style) for box in picture.boxes),
        '</g><g class="texts">',
        *(_render_text(line, style) for line in picture.texts),
        '</g><g class="legend">',
        *(
            _render_arrow(e.handle, style) if isinstance(e.handle, PictureArrow) else _render_box(e.handle, style)
            for e in picture.legend
        ),
        *(_render_text(e.text, style) for e in picture.legend),
        "</g></svg>\n",
    ]
    return "\n".join(part for part in parts if part)


class SvgStyle:
    """Fonts, and colours as SVG attributes: by their name those of a fill, and those of a line without fill.

    With a dark mode, the attributes have classes for its style sheet. A font replaces both default fonts, which become
    the fonts of the characters that it lacks.
    """

    def __init__(self, theme: str, is_print: bool = False, font: str | None = None) -> None:
        first = "" if font is None else f"{font}, " if font in GENERIC_FONTS else f"'{font}', "
        self.sans, self.serif, self.is_print, self.sheet = first + SANS, first + SERIF, is_print, ""
        colours = get_palette("light" if theme == "auto" else theme)
        self.fill = {name: f' fill="{colour}"' for name, colour in colours.items()}
        self.stroke = {name: f' fill="none" stroke="{colour}"' for name, colour in colours.items()}
        if theme == "auto" and not is_print:
            self.fill = {name: f'{attribute} class="f-{name}"' for name, attribute in self.fill.items()}
            self.stroke = {name: f'{attribute} class="s-{name}"' for name, attribute in self.stroke.items()}
            rules = "".join(f".f-{n}{{fill:{c}}}.s-{n}{{stroke:{c}}}" for n, c in get_palette("dark").items())
            self.sheet = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"


@lru_cache(maxsize=2**14)  # a figure repeats a few coordinates many times
def _fmt(value: float) -> str:
    """A number with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def _render_box(box: NodeBox, style: SvgStyle) -> str:
    """The SVG element of a box."""
    left, top, _, _ = box.bounds
    faded = f' opacity="{FADED_OPACITY}"' if box.is_faded else ""
    attrs = f' id={quoteattr(box.name)} class="node"' if box.name else ""
    line = "accent" if box.mark else "ink"
    parts = [f"<g{attrs}{faded}>"]
    if box.title:
        parts.append(f"<title>{escape(box.title)}</title>")
    if box.border == "dot":
        parts.append(f'<circle cx="{_fmt(box.x)}" cy="{_fmt(box.y)}" r="{_fmt(box.width / 2)}"{style.fill[line]}/>')
    else:
        dash = ' stroke-dasharray="3.2 2"' if box.is_dashed else ""
        for start, end, line_width in box_outlines(box):
            width, height = box.width + (end - start), box.height + (end - start)
            geometry = f'x="{_fmt(left + start)}" y="{_fmt(top + start)}" width="{_fmt(width)}" height="{_fmt(height)}"'
            geometry += f' rx="{_fmt(min(5.0, height / 3))}"'
            parts.append(f"<rect {geometry}{style.fill[box.fill]}/>")
            parts.append(f'<rect {geometry}{style.stroke[line]} stroke-width="{_fmt(line_width)}"{dash}/>')
    if box.label:
        parts.append(_render_text(TextLine(box.x, box.y, box.label, size=LABEL_SIZE), style))
    return "".join(parts) + "</g>"


def _render_arrow(arrow: PictureArrow, style: SvgStyle) -> str:
    """The SVG element of an arrow."""
    points, head = split_arrow_head(arrow)
    path = f"M{_format_point(points[0])}C" + " ".join(_format_point(point) for point in points[1:])
    dash = DASH_PATTERNS[arrow.dash]
    dashes = f' stroke-dasharray="{" ".join(_fmt(d * max(arrow.width, 0.8)) for d in dash)}"' if dash else ""
    cap = ' stroke-linecap="round"' if arrow.dash == "dot" else ""
    attrs = f' class="arrow" data-source={quoteattr(arrow.source)} data-target={quoteattr(arrow.target)}'
    weight = "" if arrow.weight is None else f' data-weight="{arrow.weight:.4g}"'
    start_tag = f"<g{attrs}{weight}>" if arrow.source else "<g>"
    title = f"<title>{escape(arrow.title)}</title>" if arrow.title else ""
    opacity = f' opacity="{_fmt(arrow.opacity)}"' if arrow.opacity < 1 else ""
    line = f'<path d="{path}"{style.stroke[arrow.colour]} stroke-width="{_fmt(arrow.width)}"{dashes}{cap}{opacity}/>'
    point = ""
    if head:
        tip, left, right = map(_format_point, head)
        point = f'<path d="M{tip}L{left} {right}Z"{style.fill[arrow.colour]}{opacity}/>'
    return f"{start_tag}{title}{line}{point}</g>"


@lru_cache(maxsize=2**14)
def _format_point(point: tuple[float, float]) -> str:
    """A point as text."""
    return f"{_fmt(point[0])},{_fmt(point[1])}"


def _render_frame(frame: Frame, style: SvgStyle) -> str:
    """The SVG element of a frame."""
    if frame.kind == "line":
        path = f"M{_fmt(frame.x)},{_fmt(frame.y)}v{_fmt(frame.height)}"
        return f'<path d="{path}"{style.stroke["grey"]} stroke-width="0.8"/>'
    colour, line_width = ("accent", 1.3) if frame.kind == "box" else ("grey", 0.7)
    rect = f'x="{_fmt(frame.x)}" y="{_fmt(frame.y)}" width="{_fmt(frame.width)}" height="{_fmt(frame.height)}" rx="8"'
    return f'<rect data-name={quoteattr(frame.name)} {rect}{style.stroke[colour]} stroke-width="{line_width}"/>'


def _render_text(line: TextLine, style: SvgStyle) -> str:
    """The SVG elements of a line of text."""
    label, size = line.runs, line.size
    word = next((k for k, run in enumerate(label) if run.style == "token" and has_non_latin(run.text)), 0)
    if style.is_print and word and line.anchor == "middle":  # a separate element, and so a separate font
        middle = line.x - measure_label(label, size) / 2 + measure_label(label[:word], size)
        before = replace(line, x=middle, runs=label[:word], anchor="end", title="")
        return _render_text(before, style) + _render_text(replace(before, runs=label[word:], anchor="start"), style)
    spans, offset = "", 0.0
    for run in label:
        # `dy` is relative in SVG, so the text after a subscript or superscript is moved back.
        target = {"sub": 0.26 * size, "sup": -0.36 * size}.get(run.style, 0.0)
        attrs = f' dy="{_fmt(target - offset)}"' if target != offset else ""
        offset = target
        if run.style in ("sub", "sup"):
            attrs += f' font-size="{_fmt(size * SCRIPT_SCALE)}"'
        elif run.style in ("math", "name"):
            attrs += f" font-family={quoteattr(style.serif)}" + (' font-style="italic"' if run.style == "math" else "")
        elif run.style == "token":
            attrs += ' style="unicode-bidi:isolate"'
        spans += f"<tspan{attrs}>{escape(run.text)}</tspan>"
    title = f"<title>{escape(line.title)}</title>" if line.title else ""
    attrs = f'x="{_fmt(line.x)}" y="{_fmt(line.y + 0.34 * size)}" text-anchor="{line.anchor}" font-size="{_fmt(size)}"'
    return f'<text {attrs}{style.fill[line.colour]} xml:space="preserve">{title}{spans}</text>'


# PNG and PDF


def to_png(picture: Picture) -> bytes:
    """Return the picture as PNG, at a lower resolution if a side would exceed 8,000 pixels.

    The resolution is 192 dpi. With a physical width it is that of print, 300 dpi, and the file contains it.
    """
    scale = picture.scale or 1.0
    max_dpi = 72.0 * MAX_PNG_PIXELS / max(picture.width * scale, picture.height * scale, 1.0)
    dpi = min(PNG_DPI if picture.scale is None else PRINT_DPI, max_dpi)
    png = _compile_typst(picture, scale, format="png", ppi=dpi)
    if picture.scale is None:
        return png
    per_metre = round(dpi / 0.0254)  # the resolution, which typst does not write
    chunk = b"pHYs" + struct.pack(">IIB", per_metre, per_metre, 1)
    # The chunk follows the signature (8 bytes) and the header (25 bytes), which is always the first chunk.
    return png[:33] + struct.pack(">I", 9) + chunk + struct.pack(">I", zlib.crc32(chunk)) + png[33:]


def to_pdf(picture: Picture) -> bytes:
    """Return the picture as PDF with vector graphics and selectable text, in its physical width or fit to a page."""
    scale = picture.scale
    if scale is None:
        scale = min(1.0, PDF_PAGE_SIZE[0] / max(picture.width, 1.0), PDF_PAGE_SIZE[1] / max(picture.height, 1.0))
    return _compile_typst(picture, scale, format="pdf")


def _compile_typst(picture: Picture, scale: float, **options: Any) -> bytes:
    """Convert a picture to PNG or PDF with typst."""
    import typst

    fonts = _load_fonts()
    if picture.font is not None:
        picture = replace(picture, font=resolve_font(picture.font, fonts.families()))
    page = TYPST_TEMPLATE.format(width=round(picture.width * scale, 3), height=round(picture.height * scale, 3))
    inputs = {"svg": to_svg(picture, is_print=True), "title": escape_invisible(picture.title or "Figure")}
    _warn_missing_glyphs(picture)
    return bytes(typst.compile(page.encode(), font_paths=fonts, sys_inputs=inputs, **options))


@cache
def _load_fonts() -> Any:
    """Return the fonts of the system and DejaVu; the search runs once in a process, because it can find thousands.

    typst searches folders. The folder of matplotlib has LastResort, a font with a box for every character, which typst
    would use for labels. So the three required files are copied to a temporary folder, which is removed at exit.
    """
    import typst

    spec = importlib.util.find_spec("matplotlib")
    assert spec is not None and spec.origin is not None
    dejavu = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    folder = tempfile.TemporaryDirectory(prefix="bnet-fonts-")
    atexit.register(folder.cleanup)
    for name in DEJAVU_FONTS:
        shutil.copyfile(dejavu / name, Path(folder.name) / name)
    return typst.Fonts(include_system_fonts=True, include_embedded_fonts=False, font_paths=[folder.name])


def _warn_missing_glyphs(picture: Picture) -> None:
    """Warn about characters that no font has: typst draws an empty box for each and does not warn."""
    labels = [box.label for box in picture.boxes] + [line.runs for line in picture.lines]
    words = {escape_invisible(run.text) for label in labels for run in label if has_non_latin(run.text)}
    if not words:  # the usual case, which does not import matplotlib
        return
    from bnet_transformer.figures.fonts import replace_missing_glyphs

    _, _, missing = replace_missing_glyphs(words)
    if missing:
        letters = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        warnings.warn(
            f"no installed font has the characters {letters}: PNG and PDF show an empty box for each. Install a font "
            f"that has them (on Debian and Ubuntu: {_suggest_font_package(missing[0])}). SVG uses the viewer's fonts",
            stacklevel=_caller_stacklevel(),
        )


def _caller_stacklevel() -> int:
    """Return the `stacklevel` of the first frame outside this package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(INTERNAL_PATHS):
        frame, level = frame.f_back, level + 1
    return level


def _suggest_font_package(letter: str) -> str:
    """Return the Debian package with a font that has this character."""
    name = unicodedata.name(letter, "")
    if name.startswith(("CJK", "HIRAGANA", "KATAKANA", "HANGUL")):
        return "fonts-noto-cjk"
    return "fonts-noto-color-emoji" if unicodedata.category(letter) == "So" else "fonts-noto-core"
