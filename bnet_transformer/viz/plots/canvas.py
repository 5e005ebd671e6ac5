"""The paper that plots are drawn on: a new figure or the axes of the caller, with its colours, words and notes."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.figure import Figure, SubFigure

from bnet_transformer.errors import BNetError
from bnet_transformer.files import as_path, replacing
from bnet_transformer.viz.palette import HEADS, palette
from bnet_transformer.viz.plots.words import ABSENT, BASE, LONGEST, shown, width, written

PAGE = 6.9  # inches between the margins of a page
SIZE = 8.0
SMALL = 7.0
TITLE = 9.0
EDGE = 0.06  # inches around what is drawn
DOTS = 144  # to the inch

# One hue, lightness from that of the paper to that of the ink: read alike with any colour vision, and in grey.
SEQUENTIAL = {
    "light": ("#f1f4f8", "#c3d7ea", "#7fb0d8", "#3a82bd", "#135a97", "#08335c"),
    "dark": ("#1d242e", "#1f4468", "#256b9f", "#4796cf", "#8cc3ea", "#e3f2fd"),
}
DIVERGING = {
    "light": ("#08406f", "#2f7fb8", "#9cc5e3", "#f4f5f6", "#f3b48c", "#cc6426", "#7c3208"),
    "dark": ("#b5dcf8", "#5ea9dc", "#28587f", "#1d2026", "#7a4723", "#e0894c", "#ffd9b8"),
}
SAVED: Any = {"svg.fonttype": "none", "svg.hashsalt": "bnet_transformer", "pdf.fonttype": 42, "ps.fonttype": 42}
UNDATED = {"svg": "Date", "pdf": "CreationDate"}  # the same plot, the same bytes


def whole_dots(inches: float) -> float:
    """A length in whole dots: the solver of layouts differs from run to run, far below one."""
    return round(inches * DOTS) / DOTS


class PlotFigure(Figure):
    """A Figure that saves text as text, undated, and files whole; it shows itself in a notebook without pyplot."""

    def savefig(self, fname: Any, **options: Any) -> None:
        file = isinstance(fname, str | os.PathLike)
        form = options.pop("format", None) or (as_path(fname).suffix[1:] if file else "")
        if not form:
            form = matplotlib.rcParams["savefig.format"]
            fname = f"{os.fspath(fname)}.{form}" if file else fname
        if form.lower() in UNDATED:
            options["metadata"] = {UNDATED[form.lower()]: None, **(options.get("metadata") or {})}
        with matplotlib.rc_context(SAVED), replacing(fname) if file else nullcontext(fname) as target:
            drawn = io.BytesIO()  # on a full disk matplotlib's own writers end in other errors
            super().savefig(drawn if file else target, format=form, **options)
            if file:
                target.write_bytes(drawn.getvalue())

    def _repr_png_(self) -> bytes:
        held = io.BytesIO()
        self.savefig(held, format="png", dpi=DOTS)
        return held.getvalue()


class Canvas:
    """Where a plot goes. `colours` are those of the theme; notes that drawing leaves are told beneath."""

    def __init__(self, ax: Axes | None, theme: str, title: str | None) -> None:
        if ax is not None and not isinstance(ax, Axes):
            raise BNetError("ax", expected="the Axes of matplotlib, or None", got=ax)
        if title is not None and not isinstance(title, str):
            raise BNetError("title", expected="a string", got=title)
        self.colours = palette(theme)
        self.heads = HEADS[theme]
        self.theme = theme
        self.given = ax
        self.title = title
        self.figure: Figure | SubFigure | None = None if ax is None else ax.figure
        self._panels: list[Axes] = []
        self._boxes: dict[Axes, tuple[float, float, float, float]] = {}
        self._around: dict[str, str] = {}
        self._notes: list[str] = []
        self._absent: set[str] = set()

    @contextmanager
    def style(self) -> Iterator[None]:
        """The settings of matplotlib while a plot is drawn, and no longer."""
        settings: Any = {
            "text.color": self.colours["ink"],
            "text.parse_math": False,
            "font.family": [BASE],
            "font.size": SIZE,
        }
        with matplotlib.style.context("default"), matplotlib.rc_context(settings):
            yield

    def axes(self, wide: float, high: float) -> Axes:
        """One panel: the caller's axes, or those of a new figure of a size in inches."""
        if self.given is not None:
            self.dress(self.given)
            return self.given
        return self.panels(1, 1, wide, high)[0]

    def panels(self, rows: int, columns: int, wide: float, high: float, **options: Any) -> list[Axes]:
        """Panels of a new figure, row by row."""
        if self.given is not None and rows * columns > 1:
            allowed = "an option that chooses one panel; or no ax="
            raise BNetError("ax", expected="a plot of one panel", got=f"{rows * columns} panels", allowed=allowed)
        if self.given is not None:
            return [self.axes(wide, high)]
        figure = PlotFigure(figsize=(wide, high), dpi=DOTS, layout="compressed", facecolor=self.colours["paper"])
        FigureCanvasAgg(figure)
        self.figure = figure
        found = figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
        for ax in found:
            self.dress(ax)
        self._panels = list(found)
        return list(found)

    def grid(self, rows: int, columns: int, side: tuple[float, float], gap: tuple[float, float]) -> list[Axes]:
        """Many small panels of a size in inches, row by row, and a scale beside them: placed at once, without words."""
        (w, h), (beside, below), left, top = side, gap, 0.28, 0.22
        wide, high = left + columns * (w + beside) + 0.62, rows * (h + below) + top
        self.figure = figure = PlotFigure(figsize=(wide, high), dpi=DOTS, facecolor=self.colours["paper"])
        FigureCanvasAgg(figure)
        for k in range(rows * columns):
            i, j = divmod(k, columns)
            box = (left + j * (w + beside), high - top - (i + 1) * (h + below) + below, w, h)
            ax = figure.add_axes((0, 0, 0.1, 0.1), label=f"panel {k}")
            self._boxes[ax] = box
            self.dress(ax)
        self._panels = list(self._boxes)
        tall = min(2.6, rows * (h + below) - below)
        scale = figure.add_axes((0, 0, 0.1, 0.1), label="scale")
        self._boxes[scale] = (left + columns * (w + beside) + 0.06, (high - top - tall + below) / 2, 0.09, tall)
        return list(self._panels)

    def around(self, x: str, y: str) -> None:
        """What the axes of all panels are, told once."""
        self._around |= {"x": x, "y": y}

    def dress(self, ax: Axes) -> None:
        """Thin frames, small type, the colours of the theme."""
        ax.set_facecolor(self.colours["paper"])
        for side, spine in ax.spines.items():
            spine.set(color=self.colours["line"], linewidth=0.8, visible=side in ("left", "bottom"))
        marks: Any = {
            "color": self.colours["line"],
            "labelcolor": self.colours["ink"],
            "labelsize": SMALL,
            "width": 0.8,
        }
        ax.tick_params(which="major", length=3, pad=3, labelfontfamily=BASE, **marks)

    def framed(self, ax: Axes) -> None:
        """A frame on all sides, without ticks that stick out."""
        for spine in ax.spines.values():
            spine.set_visible(True)
        ax.tick_params(which="both", length=0)

    def headline(self, text: str, ax: Axes | None = None) -> None:
        """The title of the whole, above the panel or the panels, unless the caller told one; "" is none."""
        told = self.title if self.title is not None else text
        if not told:
            return
        (line,), fonts = self.lines([told], 120)
        style: dict[str, Any] = {"fontsize": TITLE, "fontfamily": fonts, "color": self.colours["ink"]}
        if ax is not None:
            ax.set_title(line, loc="left", pad=8, **style)
        else:
            self._around["title"] = told

    def subtitle(self, ax: Axes, text: str) -> None:
        """The title of one panel of several."""
        (line,), fonts = self.lines([text], 60) if text else ([""], [BASE])
        ax.set_title(line, fontsize=SIZE, fontfamily=fonts, color=self.colours["ink"], pad=3)

    def named(self, ax: Axes, x: str = "", y: str = "") -> None:
        """What the axes are."""
        for text, put in ((x, ax.set_xlabel), (y, ax.set_ylabel)):
            if text:
                (line,), fonts = self.lines([text], 80)
                put(line, fontsize=SIZE, fontfamily=fonts, color=self.colours["grey"])

    def note(self, text: str) -> None:
        """Say something beneath the plot: what is hidden, what is a convention."""
        if text and text not in self._notes:
            self._notes.append(text)

    def lines(self, texts: Sequence[object], longest: int = LONGEST) -> tuple[list[str], list[str]]:
        """Texts as they can be written, and the fonts to write them in; letters that no font has are noted."""
        told, fonts, absent = written([shown(text, longest) for text in texts])
        self._absent |= set(absent)
        return told, fonts

    def words(self, ax: Axes, which: str, words: Sequence[object], inches: float, longest: int = LONGEST) -> None:
        """Words along an axis, at 0, 1, 2, ...: as many as stand apart, turned where they are wide."""
        told, fonts = self.lines(words, longest)
        size = SMALL + 0.5
        pitch = 72 * inches / max(1, len(told))
        if pitch < 1.2 * size:
            size = max(6.0, min(size, pitch / 1.2))
        step = max(1, math.ceil(1.2 * size / pitch))
        places = list(range(0, len(told), step))
        turned: dict[str, Any] = {}
        if which == "x" and max(width(told[k], size) for k in places) + 4 > pitch * step:
            turned = {"rotation": 90}
            if pitch * step > 1.9 * size:
                turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        style: dict[str, Any] = {"fontsize": size, "fontfamily": fonts, "parse_math": False, "usetex": False}
        axis = ax.xaxis if which == "x" else ax.yaxis
        axis.set_ticks(places, labels=[told[k] for k in places], color=self.colours["ink"], **style, **turned)

    def write(self, ax: Axes, x: float, y: float, text: object, **style: Any) -> None:
        """A text at a place of the data."""
        (line,), fonts = self.lines([text], 60)
        style = {"fontsize": SMALL, "color": self.colours["ink"], **style}
        ax.text(x, y, line, fontfamily=fonts, parse_math=False, **style)

    def legend(self, ax: Axes, **options: Any) -> None:
        """What the marks of a panel mean."""
        ax.legend(frameon=False, fontsize=SMALL, labelcolor=self.colours["ink"], handlelength=1.6, **options)

    def sequential(self) -> Colormap:
        """From nothing (the paper) to much (the ink); blank where there is no number."""
        return _map(SEQUENTIAL[self.theme], self.colours["paper"])

    def diverging(self) -> Colormap:
        """Below zero, zero, above zero."""
        return _map(DIVERGING[self.theme], self.colours["paper"])

    def bar(self, image: Any, what: str, axes: Sequence[Axes], note: str = "") -> None:
        """The scale of the colours: beside one panel, or beside them all."""
        if self._boxes:
            scale = axes[0].figure.colorbar(image, cax=list(self._boxes)[-1])
        elif len(axes) == 1:
            place = axes[0].inset_axes((1.03, 0.0, 0.035, 1.0))
            scale = axes[0].figure.colorbar(image, cax=place)
        else:
            scale = axes[0].figure.colorbar(image, ax=list(axes), fraction=0.03, pad=0.015, aspect=32, shrink=0.8)
        scale.outline.set_visible(False)
        (line,), fonts = self.lines([what], 60)
        scale.set_label(line, fontsize=SIZE, color=self.colours["grey"], fontfamily=fonts)
        scale.ax.tick_params(
            length=2, width=0.6, labelsize=SMALL, color=self.colours["line"], labelcolor=self.colours["ink"]
        )

    def contrast(self, colour: Any) -> str:
        """Ink or paper, whichever is read better on a colour."""
        ink, paper = self.colours["ink"], self.colours["paper"]
        return max((ink, paper), key=lambda each: abs(lightness(each) - lightness(colour)))

    def finished(self) -> Figure | SubFigure:
        """The figure, with its notes beneath."""
        assert self.figure is not None
        if self._absent:
            points = ", ".join(f"U+{ord(letter):04X}" for letter in sorted(self._absent)[:8])
            more = f" and {len(self._absent) - 8} more" if len(self._absent) > 8 else ""
            self.note(f"{ABSENT} stands for letters that no font here has: {points}{more}.")
        if self.given is not None and self._notes:
            told = [self.given.get_xlabel(), *self._notes]
            self.given.set_xlabel("\n".join(line for line in told if line), fontfamily=BASE)
        if isinstance(self.figure, PlotFigure) and self.given is None:
            self._fitted(self.figure)
        return self.figure

    def _fitted(self, figure: PlotFigure) -> None:
        """Cut the paper to the panels, and write around them what is told of the whole."""
        for _ in range(0 if self._boxes else 2):
            figure.draw_without_rendering()
            box = figure.get_tightbbox()
            before = figure.get_size_inches()
            figure.set_size_inches(whole_dots(box.width + 2 * EDGE), whole_dots(box.height + 2 * EDGE))
            if np.allclose(before, figure.get_size_inches(), atol=0.1):
                break
        wide, high = figure.get_size_inches()
        x, y, title = (self._around.get(side, "") for side in ("x", "y", "title"))
        left, top = (0.17 if y else 0.0), (0.26 if title else 0.0)
        line = (SMALL - 0.5) * 1.3 / 72
        room = max(24, int((wide + left) * 72 / (0.56 * (SMALL - 0.5))))
        notes = "\n".join(textwrap.fill(each, room) for each in self._notes)
        foot = (notes.count("\n") + 1) * line + EDGE if notes else 0.0
        bottom = foot + (0.17 if x else 0.0)
        full, tall = whole_dots(wide + left), whole_dots(high + top + bottom)
        figure.set_size_inches(full, tall)
        if self._boxes:
            for ax, (at_x, at_y, w, h) in self._boxes.items():
                ax.set_position(((left + at_x) / full, (bottom + at_y) / tall, w / full, h / tall))
        else:
            engine: Any = figure.get_layout_engine()
            engine.set(rect=(left / full, bottom / tall, wide / full, high / tall))
            figure.draw_without_rendering()
        boxes = [ax.get_position() for ax in self._panels if ax.get_visible()]
        across = (min(b.x0 for b in boxes) + max(b.x1 for b in boxes)) / 2
        up = (min(b.y0 for b in boxes) + max(b.y1 for b in boxes)) / 2
        small: Any = {"fontsize": SIZE, "color": self.colours["grey"], "fontfamily": BASE}
        if x:
            figure.text(across, (foot + EDGE) / tall, x, ha="center", va="bottom", **small)
        if y:
            figure.text(EDGE / full, up, y, ha="left", va="center", rotation=90, **small)
        if title:
            (text,), fonts = self.lines([title], 120)
            style: Any = {"fontsize": TITLE, "color": self.colours["ink"], "fontfamily": fonts}
            figure.text(EDGE / full, 1 - EDGE / tall, text, ha="left", va="top", **style)
        style = {**small, "fontsize": SMALL - 0.5, "linespacing": 1.3}
        figure.text(EDGE / full, EDGE / tall, notes, ha="left", va="bottom", **style)


def lightness(colour: Any) -> float:
    """The relative luminance of a colour, 0 to 1, on a scale that the eye counts as even."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)) ** (1 / 2.2))


def scaled(low: float, high: float) -> Normalize:
    """A scale of colours that is never empty."""
    return Normalize(low, high if high > low else low + 1.0)


def _map(colours: Sequence[str], blank: str) -> Colormap:
    found = LinearSegmentedColormap.from_list("bnet", list(colours))
    return found.with_extremes(bad=blank)
