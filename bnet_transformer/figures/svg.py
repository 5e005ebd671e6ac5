"""Pictures as SVG: vector text, a title and a description, tooltips; no script, and nothing that is fetched.

PNG and PDF are made of the SVG by typst: the same paths and the same text, so that all three formats are one layout.
Their fonts are those of the system and DejaVu, which comes with matplotlib, so a bare machine shows the same letters.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import inspect
import shutil
import tempfile
import unicodedata
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from xml.sax import saxutils

import graphviz

from bnet_transformer.figures.dot import DotSource, to_dot
from bnet_transformer.figures.labels import SMALL, Run, is_foreign, measured, plain, visible
from bnet_transformer.figures.picture import DASHES, Arrow, Box, Frame, Picture, Text
from bnet_transformer.figures.style import FADED, SIZE, line_and_head, outlines, palette

SANS = "'DejaVu Sans', Verdana, 'Helvetica Neue', Arial, sans-serif"
SERIF = "'DejaVu Serif', 'STIX Two Text', 'Times New Roman', serif"
PAGE = 680.0  # points: wider pictures are shown smaller
PAPER = (468.0, 648.0)  # points: a larger figure becomes a PDF of at most this width and height
DPI = 192.0
PIXELS = 8000.0  # a side of a PNG at most
DEJAVU = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSerif-Italic.ttf")  # all that the figures ask for
# What lies between a figure and the code that draws it.
INSIDE = (str(Path(__file__).parents[1]), functools.__file__, contextlib.__file__)
# The figure arrives as an input, so nothing in it is read as typst. Without a date, the same figure is the same bytes.
TYPST = """
#set document(title: sys.inputs.title, date: none)
#set page(width: {width}pt, height: {height}pt, margin: 0pt, fill: none)
#image(bytes(sys.inputs.svg), format: "svg", width: {width}pt, height: {height}pt, alt: sys.inputs.title)
"""


class Shown(Picture):
    """A picture that a notebook shows: SVG, and a line where none can be."""

    def __repr__(self) -> str:
        return f"<Picture: {self.title or 'a figure'}, {len(self.boxes)} boxes, {len(self.arrows)} arrows>"

    def _repr_svg_(self) -> str:
        return to_svg(self)

    def to_graphviz(self) -> graphviz.Source:
        """The figure as DOT without places: see `Sentence.to_graphviz`."""
        return DotSource(to_dot(self), self._repr_svg_)


def showing(picture: Picture) -> Shown:
    """The same picture, such that a notebook shows it."""
    return Shown(**vars(picture))


def escape(text: str) -> str:
    """Text as it stands between tags."""
    return saxutils.escape(visible(text))


def quoteattr(text: str) -> str:
    """Text as an attribute, with its quotes."""
    return saxutils.quoteattr(visible(text))


def to_svg(picture: Picture, *, printed: bool = False) -> str:
    """The picture as SVG. With `theme="auto"` its colours follow the reader's light or dark mode.

    `printed` is for a program that knows no modes, and sets a text element in one font: that of its rarest letter.
    """
    wide, tall = picture.width, picture.height
    shown = min(1.0, PAGE / wide) if wide else 1.0
    ink = Ink(picture.theme, printed)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(wide * shown)}" height="{_n(tall * shown)}" '
        f'viewBox="0 0 {_n(wide)} {_n(tall)}" role="img" font-family={quoteattr(SANS)} '
        'style="max-width:100%;height:auto">',
        f"<title>{escape(picture.title)}</title>",
        f"<desc>{escape(_described(picture))}</desc>",
        ink.sheet(),
        f'<rect width="{_n(wide)}" height="{_n(tall)}"{ink.fill("paper")}/>',
        '<g class="frames">',
        *(_frame(frame, ink) for frame in picture.frames),
        '</g><g class="arrows">',
        *(_arrow(arrow, ink) for arrow in picture.arrows),
        '</g><g class="nodes">',
        *(_box(box, ink) for box in picture.boxes),
        '</g><g class="texts">',
        *(_text(line, ink) for line in picture.texts),
        '</g><g class="legend">',
        *(_arrow(e.sample, ink) if isinstance(e.sample, Arrow) else _box(e.sample, ink) for e in picture.legend),
        *(_text(e.text, ink) for e in picture.legend),
        "</g></svg>\n",
    ]
    return "\n".join(part for part in parts if part)


class Ink:
    """Colours as attributes: of one theme, or (`auto`) with classes that a style sheet turns dark."""

    def __init__(self, theme: str, printed: bool = False) -> None:
        self.auto = theme == "auto" and not printed
        self.colours = palette("light" if theme == "auto" else theme)
        self.printed = printed

    def fill(self, name: str) -> str:
        """The fill of a named colour."""
        return f' fill="{self.colours[name]}"' + (f' class="f-{name}"' if self.auto else "")

    def stroke(self, name: str) -> str:
        """The line of a named colour, with no fill."""
        return f' fill="none" stroke="{self.colours[name]}"' + (f' class="s-{name}"' if self.auto else "")

    def sheet(self) -> str:
        """The style sheet that turns a picture dark."""
        if not self.auto:
            return ""
        rules = "".join(f".f-{n}{{fill:{c}}}.s-{n}{{stroke:{c}}}" for n, c in palette("dark").items())
        return f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"


def _described(picture: Picture) -> str:
    legend = ", ".join(plain(entry.text.runs) for entry in picture.legend)
    counts = f"{len(picture.boxes)} nodes and {len(picture.arrows)} arrows"
    return ". ".join(part for part in (counts, f"Legend: {legend}" if legend else "", picture.caption) if part)


@lru_cache(maxsize=2**14)  # a figure has the same few coordinates many times over
def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def _box(box: Box, ink: Ink) -> str:
    left, top, _, _ = box.edges
    faded = f' opacity="{FADED}"' if box.faded else ""
    named = f' id={quoteattr(box.name)} class="node"' if box.name else ""
    line = "accent" if box.accent else "ink"
    parts = [f"<g{named}{faded}>"]
    if box.title:
        parts.append(f"<title>{escape(box.title)}</title>")
    if box.border == "dot":
        parts.append(f'<circle cx="{_n(box.x)}" cy="{_n(box.y)}" r="{_n(box.width / 2)}"{ink.fill(line)}/>')
    else:
        dash = ' stroke-dasharray="3.2 2"' if box.dashed else ""
        for start, end, thick in outlines(box):
            width, height = box.width + (end - start), box.height + (end - start)
            place = f'x="{_n(left + start)}" y="{_n(top + start)}" width="{_n(width)}" height="{_n(height)}"'
            place += f' rx="{_n(min(5.0, height / 3))}"'
            parts.append(f"<rect {place}{ink.fill(box.fill)}/>")
            parts.append(f'<rect {place}{ink.stroke(line)} stroke-width="{_n(thick)}"{dash}/>')
    if box.label:
        parts.append(_text(Text(box.x, box.y, box.label, size=SIZE), ink))
    return "".join(parts) + "</g>"


def _arrow(arrow: Arrow, ink: Ink) -> str:
    points, head = line_and_head(arrow)
    way = f"M{_p(points[0])}C" + " ".join(_p(point) for point in points[1:])
    dash = DASHES[arrow.dash]
    dashed = f' stroke-dasharray="{" ".join(_n(d * max(arrow.width, 0.8)) for d in dash)}"' if dash else ""
    ends = ' stroke-linecap="round"' if arrow.dash == "dot" else ""
    named = f' class="arrow" data-source={quoteattr(arrow.source)} data-target={quoteattr(arrow.target)}'
    weight = "" if arrow.weight is None else f' data-weight="{arrow.weight:.4g}"'
    opened = f"<g{named}{weight}>" if arrow.source else "<g>"
    title = f"<title>{escape(arrow.title)}</title>" if arrow.title else ""
    faint = f' opacity="{_n(arrow.opacity)}"' if arrow.opacity < 1 else ""
    line = f'<path d="{way}"{ink.stroke(arrow.colour)} stroke-width="{_n(arrow.width)}"{dashed}{ends}{faint}/>'
    point = ""
    if head:
        tip, left, right = map(_p, head)
        point = f'<path d="M{tip}L{left} {right}Z"{ink.fill(arrow.colour)}{faint}/>'
    return f"{opened}{title}{line}{point}</g>"


@lru_cache(maxsize=2**14)
def _p(point: tuple[float, float]) -> str:
    return f"{_n(point[0])},{_n(point[1])}"


def _frame(frame: Frame, ink: Ink) -> str:
    if frame.kind == "line":
        return f'<path d="M{_n(frame.x)},{_n(frame.y)}v{_n(frame.height)}"{ink.stroke("grey")} stroke-width="0.8"/>'
    colour, thick = ("accent", 1.3) if frame.kind == "box" else ("grey", 0.7)
    place = f'x="{_n(frame.x)}" y="{_n(frame.y)}" width="{_n(frame.width)}" height="{_n(frame.height)}" rx="8"'
    return f'<rect data-name={quoteattr(frame.name)} {place}{ink.stroke(colour)} stroke-width="{thick}"/>'


def _text(line: Text, ink: Ink) -> str:
    label, size = line.runs, line.size
    word = next((k for k, run in enumerate(label) if run.style == "token" and is_foreign(run.text)), 0)
    if ink.printed and word and line.anchor == "middle":  # the word gets an element, and so a font, of its own
        middle = line.x - measured(label, size) / 2 + measured(label[:word], size)
        before = replace(line, x=middle, runs=label[:word], anchor="end", title="")
        return _text(before, ink) + _text(replace(before, runs=label[word:], anchor="start"), ink)
    title = f"<title>{escape(line.title)}</title>" if line.title else ""
    place = f'x="{_n(line.x)}" y="{_n(line.y + 0.34 * size)}" text-anchor="{line.anchor}" font-size="{_n(size)}"'
    return f'<text {place}{ink.fill(line.colour)} xml:space="preserve">{title}{"".join(_spans(label, size))}</text>'


def _spans(label: tuple[Run, ...], size: float) -> Iterator[str]:
    """Runs as spans; what stands below or above the line moves back afterwards."""
    moved = 0.0
    for run in label:
        to = {"sub": 0.26 * size, "sup": -0.36 * size}.get(run.style, 0.0)
        shift = f' dy="{_n(to - moved)}"' if to != moved else ""
        moved = to
        look = ""
        if run.style in ("sub", "sup"):
            look = f' font-size="{_n(size * SMALL)}"'
        elif run.style in ("math", "name"):
            look = f" font-family={quoteattr(SERIF)}" + (' font-style="italic"' if run.style == "math" else "")
        elif run.style == "token":
            look = ' style="unicode-bidi:isolate"'
        yield f"<tspan{shift}{look}>{escape(run.text)}</tspan>"


# PNG and PDF


def to_png(picture: Picture) -> bytes:
    """The picture as PNG, at 192 dots to the inch, or fewer where a side would pass 8,000."""
    dpi = min(DPI, 72.0 * PIXELS / max(picture.width, picture.height, 1.0))
    return _compiled(picture, 1.0, format="png", ppi=dpi)


def to_pdf(picture: Picture) -> bytes:
    """The picture as PDF: vectors and text that can be selected, made smaller where it would pass a page."""
    scale = min(1.0, PAPER[0] / max(picture.width, 1.0), PAPER[1] / max(picture.height, 1.0))
    return _compiled(picture, scale, format="pdf")


def _compiled(picture: Picture, scale: float, **options: Any) -> bytes:
    import typst

    page = TYPST.format(width=round(picture.width * scale, 3), height=round(picture.height * scale, 3))
    inputs = {"svg": to_svg(picture, printed=True), "title": visible(picture.title or "a figure")}
    _warn_of_missing_letters(picture)
    return bytes(typst.compile(page.encode(), font_paths=_fonts(), sys_inputs=inputs, **options))


@cache
def _fonts() -> Any:
    """The fonts of the system and DejaVu, sought once in a process: there may be thousands.

    typst takes folders, and matplotlib's own holds LastResort, which has a box for every letter and would be chosen for
    labels; so the three files that are needed are copied to a folder of their own, which goes when Python ends.
    """
    import typst

    found = importlib.util.find_spec("matplotlib")
    assert found is not None and found.origin is not None
    dejavu = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf"
    folder = tempfile.TemporaryDirectory(prefix="bnet-fonts-")
    atexit.register(folder.cleanup)
    for name in DEJAVU:
        shutil.copyfile(dejavu / name, Path(folder.name) / name)
    return typst.Fonts(include_system_fonts=True, include_embedded_fonts=False, font_paths=[folder.name])


def _warn_of_missing_letters(picture: Picture) -> None:
    """Warn of letters that no font has: typst draws an empty box for each, and says nothing."""
    labels = [box.label for box in picture.boxes] + [line.runs for line in picture.lines]
    words = {visible(run.text) for label in labels for run in label if is_foreign(run.text)}
    if not words:  # most figures: matplotlib, which knows the fonts, is not imported for them
        return
    from bnet_transformer.figures.fonts import written

    _, _, missing = written(words)
    if missing:
        some = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        warnings.warn(
            f"no font has the letters {some}: PNG and PDF show an empty box for each. Install a font that has them, "
            f"on Debian and Ubuntu such as {_package(missing[0])}; SVG takes the fonts of its reader",
            stacklevel=_caller(),
        )


def _caller() -> int:
    """The `stacklevel` of the code that draws: of the first frame that is not of this package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    return level


def _package(letter: str) -> str:
    """The package of Debian whose font has a letter."""
    name = unicodedata.name(letter, "")
    if name.startswith(("CJK", "HIRAGANA", "KATAKANA", "HANGUL")):
        return "fonts-noto-cjk"
    return "fonts-noto-color-emoji" if unicodedata.category(letter) == "So" else "fonts-noto-core"
