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
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from bnet_transformer._core.files import as_path, atomic_write
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import BASE_FONT, MISSING_GLYPH, replace_missing_glyphs, text_width
from bnet_transformer.figures.labels import format_token
from bnet_transformer.figures.style import HEAD_COLOURS, get_palette

PAGE_WIDTH = 6.9  # inches between the margins of a page
FONT_SIZE = 8.0
SMALL_FONT_SIZE = 7.0
TITLE_FONT_SIZE = 9.0
PADDING = 0.06  # inches around what is drawn
DPI = 144  # to the inch

MAX_LABEL_LENGTH = 18  # letters of a word

# One hue, lightness from that of the paper to that of the ink: read alike with any colour vision, and in grey.
SEQUENTIAL_COLOURS = {
    "light": ("#f1f4f8", "#c3d7ea", "#7fb0d8", "#3a82bd", "#135a97", "#08335c"),
    "dark": ("#1d242e", "#1f4468", "#256b9f", "#4796cf", "#8cc3ea", "#e3f2fd"),
}
DIVERGING_COLOURS = {
    "light": ("#08406f", "#2f7fb8", "#9cc5e3", "#f4f5f6", "#f3b48c", "#cc6426", "#7c3208"),
    "dark": ("#b5dcf8", "#5ea9dc", "#28587f", "#1d2026", "#7a4723", "#e0894c", "#ffd9b8"),
}
RC_PARAMS: Any = {
    "text.parse_math": False,
    "font.family": [BASE_FONT],
    "font.size": FONT_SIZE,
    "svg.fonttype": "none",
    "svg.hashsalt": "bnet_transformer",
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
}
DATE_METADATA = {"svg": "Date", "pdf": "CreationDate"}  # the same plot, the same bytes


@contextmanager
def plot_rc_context(text_colour: str) -> Iterator[None]:
    """The settings of matplotlib while a plot is made or drawn, and no longer."""
    with matplotlib.style.context("default"), matplotlib.rc_context({**RC_PARAMS, "text.color": text_colour}):
        yield


class PlotFigure(Figure):
    """A Figure that saves text as text, undated, files whole and without empty margins.

    It shows itself in a notebook without pyplot.
    """

    text_colour = "black"

    def draw(self, renderer: Any) -> None:
        with plot_rc_context(self.text_colour):
            super().draw(renderer)

    def savefig(self, fname: Any, **options: Any) -> None:
        file = isinstance(fname, str | os.PathLike)
        form = options.pop("format", None) or (as_path(fname).suffix[1:] if file else "")
        if not form:
            form = matplotlib.rcParams["savefig.format"]
            fname = f"{os.fspath(fname)}.{form}" if file else fname
        if form.lower() in DATE_METADATA:
            options["metadata"] = {DATE_METADATA[form.lower()]: None, **(options.get("metadata") or {})}
        options = {"bbox_inches": "tight", "pad_inches": PADDING, **options}
        self.draw_without_rendering()  # laid out for its own dots to the inch, whatever those of the file are
        with plot_rc_context(self.text_colour), atomic_write(fname) if file else nullcontext(fname) as target:
            drawn = io.BytesIO()  # on a full disk matplotlib's own writers end in other errors
            super().savefig(drawn if file else target, format=form, **options)
            if file:
                target.write_bytes(drawn.getvalue())

    def _repr_png_(self) -> bytes:
        held = io.BytesIO()
        self.savefig(held, format="png", dpi=DPI)
        return held.getvalue()


class FigureLayout(ConstrainedLayoutEngine):
    """Panels as near as their words let them be, and around them the words about the whole: title, axes, notes."""

    def __init__(self) -> None:
        super().__init__(compress=True)
        self.texts: dict[str, Text] = {}
        self.notes: list[str] = []
        self.size: tuple[float, ...] = ()
        self.panels: Sequence[Axes] = ()

    def execute(self, fig: Any) -> None:
        size = tuple(fig.get_size_inches())
        if size != self.size and self.panels[0].get_subplotspec() is not None:
            super().execute(fig)  # it goes on from where it was: run again, it would move the panels by a hair
        self.size = size
        inches = fig.dpi_scale_trans.inverted()
        around = [ax.get_tightbbox() for ax in fig.axes if ax.get_visible()]
        box = inches.transform_bbox(Bbox.union(around))
        panels = inches.transform_bbox(Bbox.union([ax.bbox for ax in self.panels if ax.get_visible()]))
        left = box.x0 - (0.17 if "y" in self.texts else 0.0)
        bottom = box.y0 - PADDING
        places = {
            "y": (box.x0 - PADDING, (panels.y0 + panels.y1) / 2),
            "x": ((panels.x0 + panels.x1) / 2, bottom),
            "title": (left, box.y1 + PADDING),
            "notes": (left, bottom - (0.17 if "x" in self.texts else 0.0)),
        }
        for name, text in self.texts.items():
            text.set_position(np.divide(places[name], size).tolist())
        if "notes" in self.texts:
            letters = max(24, int((box.x1 - left) * 72 / (0.56 * (SMALL_FONT_SIZE - 0.5))))
            self.texts["notes"].set_text("\n".join(textwrap.fill(each, letters) for each in self.notes))


class Canvas:
    """Where a plot goes. `colours` are those of the theme; notes that drawing leaves are told beneath."""

    def __init__(self, ax: Axes | None, theme: str, title: str | None) -> None:
        if ax is not None and not isinstance(ax, Axes):
            raise BNetError("ax", expected="the Axes of matplotlib, or None", actual=ax)
        if title is not None and not isinstance(title, str):
            raise BNetError("title", expected="a string", actual=title)
        self.colours = get_palette(theme)
        self.head_colours = HEAD_COLOURS[theme]
        self.theme = theme
        self.user_axes = ax
        self.title = title
        self.figure: Figure | SubFigure | None = None if ax is None else ax.figure
        self._layout = FigureLayout()
        self._colour_bar_axes: Axes | None = None
        self._title, self._is_title_above_legend = "", False
        self._label_style: dict[str, Any] = {
            "fontsize": FONT_SIZE,
            "color": self.colours["grey"],
            "fontfamily": BASE_FONT,
        }
        self._figure_texts: dict[str, tuple[str, dict[str, Any]]] = {}  # texts and their style
        self._notes: list[str] = []
        self._missing_glyphs: set[str] = set()

    def panel_size(self, ax: Axes, default: tuple[float, float] | None = None) -> tuple[float, float]:
        """How many inches a panel is wide and high: as was planned of a new one, or as it is."""
        if default is not None and self.user_axes is None:
            return default
        box = ax.get_window_extent()
        return box.width / ax.figure.dpi, box.height / ax.figure.dpi

    def add_axes(self, width: float, height: float) -> Axes:
        """One panel: the caller's axes, or those of a new figure of a size in inches."""
        return self.add_panels(1, 1, width, height)[0]

    def add_panels(self, rows: int, columns: int, width: float, height: float, **options: Any) -> list[Axes]:
        """Panels of a new figure, row by row."""
        if self.user_axes is not None and rows * columns > 1:
            allowed = "an option that chooses one panel; or no ax="
            raise BNetError("ax", expected="a plot of one panel", actual=f"{rows * columns} panels", allowed=allowed)
        if self.user_axes is not None:
            return self._style_axes([self.user_axes])
        found = self._create_figure(width, height).subplots(rows, columns, squeeze=False, **options).ravel().tolist()
        return self._style_axes(found)

    def add_panel_grid(
        self, rows: int, columns: int, panel_size: tuple[float, float], gap: tuple[float, float]
    ) -> list[Axes]:
        """Many small panels of a size in inches, row by row, and a scale beside them: placed at once, without words."""
        (w, h), (beside, below) = panel_size, gap
        wide, high = columns * (w + beside) + 0.4, rows * (h + below)
        figure, found = self._create_figure(wide, high), []
        for k in range(rows * columns):
            i, j = divmod(k, columns)
            corner = (j * (w + beside) / wide, 1 - ((i + 1) * (h + below) - below) / high)
            found.append(figure.add_axes((*corner, w / wide, h / high), label=f"panel {k}"))
        tall = min(2.6, high - below)
        beneath = (high + below - tall) / 2 / high
        place = ((columns * (w + beside) + 0.06) / wide, beneath, 0.09 / wide, tall / high)
        self._colour_bar_axes = figure.add_axes(place, label="scale")
        return self._style_axes(found)

    def _create_figure(self, width: float, height: float) -> PlotFigure:
        """A new figure of a size in inches."""
        self.figure = PlotFigure(figsize=(width, height), dpi=DPI, layout=self._layout, facecolor=self.colours["paper"])
        self.figure.text_colour = self.colours["ink"]
        FigureCanvasAgg(self.figure)
        return self.figure

    def _style_axes(self, panels: list[Axes]) -> list[Axes]:
        """Panels with thin frames, small type, the colours of the theme."""
        marks: Any = {"color": self.colours["line"], "labelcolor": self.colours["ink"], "labelsize": SMALL_FONT_SIZE}
        for ax in panels:
            ax.set_facecolor(self.colours["paper"])
            for side, spine in ax.spines.items():
                spine.set(color=self.colours["line"], linewidth=0.8, visible=side in ("left", "bottom"))
            ax.tick_params(which="major", length=3, pad=3, width=0.8, labelfontfamily=BASE_FONT, **marks)
        self._layout.panels = panels
        return panels

    def set_shared_labels(self, x: str, y: str) -> None:
        """What the axes of all panels are, told once."""
        self._figure_texts["x"] = x, self._label_style | {"ha": "center", "va": "top"}
        self._figure_texts["y"] = y, self._label_style | {"ha": "right", "va": "center", "rotation": 90}

    def draw_frame(self, ax: Axes) -> None:
        """A frame on all sides, without ticks that stick out."""
        for spine in ax.spines.values():
            spine.set_visible(True)
        ax.tick_params(which="both", length=0)

    def set_title(self, text: str, *, is_above_legend: bool = False) -> None:
        """The title of the whole, above the panel or the panels and their legend, unless the caller told one."""
        self._title, self._is_title_above_legend = text, is_above_legend

    def set_panel_title(self, ax: Axes, text: str) -> None:
        """The title of one panel of several."""
        (line,), fonts = self.format_texts([text], 60) if text else ([""], [BASE_FONT])
        ax.set_title(line, fontsize=FONT_SIZE, fontfamily=fonts, color=self.colours["ink"], pad=3)

    def set_axis_labels(self, ax: Axes, x: str = "", y: str = "") -> None:
        """What the axes are."""
        for text, put in ((x, ax.set_xlabel), (y, ax.set_ylabel)):
            if text:
                (line,), fonts = self.format_texts([text], 80)
                put(line, fontsize=FONT_SIZE, fontfamily=fonts, color=self.colours["grey"])

    def add_note(self, text: str) -> None:
        """Say something beneath the plot: what is hidden, what is a convention."""
        if text and text not in self._notes:
            self._notes.append(text)

    def format_texts(self, texts: Sequence[object], max_length: int = MAX_LABEL_LENGTH) -> tuple[list[str], list[str]]:
        """Texts as they can be written, and the fonts to write them in; letters that no font has are noted."""
        told, fonts, absent = replace_missing_glyphs([format_token(text, max_length) for text in texts])
        self._missing_glyphs |= set(absent)
        return told, fonts

    def set_tick_labels(
        self, ax: Axes, axis_name: str, labels: Sequence[object], inches: float, max_length: int = MAX_LABEL_LENGTH
    ) -> None:
        """Words along an axis, at 0, 1, 2, ...: as many as stand apart, turned where they are wide."""
        told, fonts = self.format_texts(labels, max_length)
        size = SMALL_FONT_SIZE + 0.5
        pitch = 72 * inches / max(1, len(told))
        if pitch < 1.2 * size:
            size = max(6.0, min(size, pitch / 1.2))
        step = max(1, math.ceil(1.2 * size / pitch))
        places = list(range(0, len(told), step))
        turned: dict[str, Any] = {}
        if axis_name == "x" and max(text_width(told[k], size) for k in places) + 4 > pitch * step:
            turned = {"rotation": 90}
            if pitch * step > 1.9 * size:
                turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        style: dict[str, Any] = {"fontsize": size, "fontfamily": fonts, "parse_math": False, "usetex": False}
        axis = ax.xaxis if axis_name == "x" else ax.yaxis
        axis.set_ticks(places, labels=[told[k] for k in places], color=self.colours["ink"], **style, **turned)

    def add_text(self, ax: Axes, x: float, y: float, text: object, **style: Any) -> None:
        """A text at a place of the data."""
        (line,), fonts = self.format_texts([text], 60)
        style = {"fontsize": SMALL_FONT_SIZE, "color": self.colours["ink"], **style}
        ax.text(x, y, line, fontfamily=fonts, parse_math=False, **style)

    def add_legend(self, ax: Axes, **options: Any) -> None:
        """What the marks of a panel mean."""
        ax.legend(frameon=False, fontsize=SMALL_FONT_SIZE, labelcolor=self.colours["ink"], handlelength=1.6, **options)

    def style_curve_axes(self, ax: Axes, x: str, y: str, num_ticks: int) -> None:
        """What the axes of curves are, some whole numbers along x, faint lines across."""
        self.set_axis_labels(ax, x, y)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=num_ticks))
        ax.grid(axis="y", color=self.colours["line"], linewidth=0.5)
        ax.set_axisbelow(True)
        ax.margins(x=0.02)

    def make_colour_map(self, norm: Normalize) -> Colormap:
        """From nothing (the paper) to much (the ink); for a scale that goes below zero from either side to the middle.

        Blank where there is no number.
        """
        is_signed = norm.vmin is not None and norm.vmin < 0
        found = LinearSegmentedColormap.from_list(
            "bnet", (DIVERGING_COLOURS if is_signed else SEQUENTIAL_COLOURS)[self.theme]
        )
        return found.with_extremes(bad=self.colours["paper"])

    def add_colour_bar(self, image: Any, value_label: str, axes: Sequence[Axes]) -> None:
        """The scale of the colours: beside one panel, or beside them all."""
        if self._colour_bar_axes is not None:
            scale = axes[0].figure.colorbar(image, cax=self._colour_bar_axes)
        elif len(axes) == 1:
            place = axes[0].inset_axes((1.03, 0.0, 0.035, 1.0))
            scale = axes[0].figure.colorbar(image, cax=place)
        else:
            scale = axes[0].figure.colorbar(image, ax=list(axes), fraction=0.03, pad=0.015, aspect=32, shrink=0.8)
        scale.outline.set_visible(False)
        (line,), fonts = self.format_texts([value_label], 60)
        scale.set_label(line, fontsize=FONT_SIZE, color=self.colours["grey"], fontfamily=fonts)
        scale.ax.tick_params(
            length=2, width=0.6, labelsize=SMALL_FONT_SIZE, color=self.colours["line"], labelcolor=self.colours["ink"]
        )

    def contrasting_colour(self, colour: Any) -> str:
        """Ink or paper, whichever is read better on a colour."""
        ink, paper = self.colours["ink"], self.colours["paper"]
        return max((ink, paper), key=lambda each: abs(lightness(each) - lightness(colour)))

    def finish(self) -> Figure | SubFigure:
        """The figure, with its title and its notes beneath; the layout places them when the figure is drawn."""
        assert self.figure is not None
        title, panels = self._title if self.title is None else self.title, self._layout.panels
        if title:
            (line,), fonts = self.format_texts([title], 120)
            style: dict[str, Any] = {"fontsize": TITLE_FONT_SIZE, "fontfamily": fonts, "color": self.colours["ink"]}
            if len(panels) == 1 and not self._figure_texts and not self._is_title_above_legend:
                panels[0].set_title(line, loc="left", pad=8, **style)
            else:
                self._figure_texts["title"] = line, style | {"va": "bottom"}
        if self._missing_glyphs:
            points = ", ".join(f"U+{ord(letter):04X}" for letter in sorted(self._missing_glyphs)[:8])
            more = f" and {len(self._missing_glyphs) - 8} more" if len(self._missing_glyphs) > 8 else ""
            self.add_note(f"{MISSING_GLYPH} stands for letters that no font here has: {points}{more}.")
        if self.user_axes is not None:
            told = [self.user_axes.get_xlabel(), *self._notes]
            if self._notes:
                self.user_axes.set_xlabel("\n".join(line for line in told if line), fontfamily=BASE_FONT)
            return self.figure
        self._layout.notes = self._notes
        notes = self._label_style | {"fontsize": SMALL_FONT_SIZE - 0.5, "linespacing": 1.3, "va": "top"}
        self._figure_texts["notes"] = "\n".join(self._notes), notes
        for name, (text, style) in self._figure_texts.items():
            if text:
                self._layout.texts[name] = self.figure.text(0, 0, text, **style)
        return self.figure


def lightness(colour: Any) -> float:
    """The relative luminance of a colour, 0 to 1, on a scale that the eye counts as even."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)) ** (1 / 2.2))


def make_norm(low: float, high: float) -> Normalize:
    """A scale of colours that is never empty."""
    return Normalize(low, high if high > low else low + 1.0)
