"""The canvas of a plot: a new figure or the user's axes, with colours, fonts, titles, labels and notes."""

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
from matplotlib.ticker import MaxNLocator, ScalarFormatter
from matplotlib.transforms import Bbox

from bnet_transformer._core.files import as_path, atomic_write
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import BASE_FONT, MISSING_GLYPH, replace_missing_glyphs, text_width
from bnet_transformer.figures.labels import format_token
from bnet_transformer.figures.style import HEAD_COLOURS, get_palette

PAGE_WIDTH = 6.9  # the width of the text of a page, in inches
FONT_SIZE = 8.0
SMALL_FONT_SIZE = 7.0
TITLE_FONT_SIZE = 9.0
PADDING = 0.06  # inches around the content
DPI = 144  # points per inch

MAX_LABEL_LENGTH = 18  # characters of a word

# One hue, whose lightness changes monotonically from background to text: the scale is readable with any colour vision
# and in grey.
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
DATE_METADATA = {"svg": "Date", "pdf": "CreationDate"}  # omitted, so that equal plots have equal bytes


@contextmanager
def plot_rc_context(text_colour: str) -> Iterator[None]:
    """A context with the matplotlib settings of plots."""
    with matplotlib.style.context("default"), matplotlib.rc_context({**RC_PARAMS, "text.color": text_colour}):
        yield


class PlotFigure(Figure):
    """A Figure that saves text as text, without date and empty margins, and writes files atomically.

    A notebook shows it without pyplot.
    """

    text_colour = "black"

    def draw(self, renderer: Any) -> None:
        with plot_rc_context(self.text_colour):
            super().draw(renderer)

    def savefig(self, fname: Any, **options: Any) -> None:
        is_path = isinstance(fname, str | os.PathLike)
        file_format = options.pop("format", None) or (as_path(fname).suffix[1:] if is_path else "")
        if not file_format:
            file_format = matplotlib.rcParams["savefig.format"]
            fname = f"{os.fspath(fname)}.{file_format}" if is_path else fname
        if file_format.lower() in DATE_METADATA:
            options["metadata"] = {DATE_METADATA[file_format.lower()]: None, **(options.get("metadata") or {})}
        options = {"bbox_inches": "tight", "pad_inches": PADDING, **options}
        self.draw_without_rendering()  # compute the layout at the dpi of the figure, not of the file
        with plot_rc_context(self.text_colour), atomic_write(fname) if is_path else nullcontext(fname) as target:
            buffer = io.BytesIO()  # on a full disk, the writers of matplotlib raise errors other than OSError
            super().savefig(buffer if is_path else target, format=file_format, **options)
            if is_path:
                target.write_bytes(buffer.getvalue())

    def _repr_png_(self) -> bytes:
        """The PNG that a notebook shows."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()


class FigureLayout(ConstrainedLayoutEngine):
    """Packs the panels as tightly as their labels allow, and puts title, shared axis labels and notes around them."""

    def __init__(self) -> None:
        super().__init__(compress=True)
        self.texts: dict[str, Text] = {}
        self.notes: list[str] = []
        self.size: tuple[float, ...] = ()
        self.panels: Sequence[Axes] = ()

    def execute(self, fig: Any) -> None:
        size = tuple(fig.get_size_inches())
        if size != self.size and self.panels[0].get_subplotspec() is not None:
            super().execute(fig)  # a second run would move the panels slightly
        self.size = size
        inches = fig.dpi_scale_trans.inverted()
        boxes = [ax.get_tightbbox() for ax in fig.axes if ax.get_visible()]
        box = inches.transform_bbox(Bbox.union(boxes))
        panels = inches.transform_bbox(Bbox.union([ax.bbox for ax in self.panels if ax.get_visible()]))
        left = box.x0 - (0.17 if "y" in self.texts else 0.0)
        bottom = box.y0 - PADDING
        positions = {
            "y": (box.x0 - PADDING, (panels.y0 + panels.y1) / 2),
            "x": ((panels.x0 + panels.x1) / 2, bottom),
            "title": (left, box.y1 + PADDING),
            "notes": (left, bottom - (0.17 if "x" in self.texts else 0.0)),
        }
        for name, text in self.texts.items():
            text.set_position(np.divide(positions[name], size).tolist())
        if "notes" in self.texts:
            line_length = max(24, int((box.x1 - left) * 72 / (0.56 * (SMALL_FONT_SIZE - 0.5))))
            self.texts["notes"].set_text("\n".join(textwrap.fill(note, line_length) for note in self.notes))


class Canvas:
    """The figure and axes of a plot, with the `colours` of the theme; notes are printed below the panels."""

    def __init__(self, ax: Axes | None, theme: str, title: str | None) -> None:
        if ax is not None and not isinstance(ax, Axes):
            raise BNetError("ax", expected="matplotlib Axes or None", actual=ax)
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
        """Width and height of a panel in inches: `default` for a new figure, else measured."""
        if default is not None and self.user_axes is None:
            return default
        box = ax.get_window_extent()
        return box.width / ax.figure.dpi, box.height / ax.figure.dpi

    def add_axes(self, width: float, height: float) -> Axes:
        """One panel: the user's axes, or the axes of a new figure with a size in inches."""
        return self.add_panels(1, 1, width, height)[0]

    def add_panels(self, rows: int, columns: int, width: float, height: float, **options: Any) -> list[Axes]:
        """The panels of a new figure, row by row; or the user's axes if there is only one panel."""
        if self.user_axes is not None and rows * columns > 1:
            hint = "Choose one panel by an option of the plot, or leave out ax="
            raise BNetError("ax", expected="a plot with one panel", actual=f"{rows * columns} panels", hint=hint)
        if self.user_axes is not None:
            return self._style_axes([self.user_axes])
        panels = self._create_figure(width, height).subplots(rows, columns, squeeze=False, **options).ravel().tolist()
        return self._style_axes(panels)

    def add_panel_grid(
        self, rows: int, columns: int, panel_size: tuple[float, float], gap: tuple[float, float]
    ) -> list[Axes]:
        """Many small panels with a size in inches, row by row, and a colour bar.

        The panels have no labels, so their positions are computed directly, without the slow constrained layout.
        """
        (w, h), (gap_x, gap_y) = panel_size, gap
        width, height = columns * (w + gap_x) + 0.4, rows * (h + gap_y)
        figure, axes = self._create_figure(width, height), []
        for k in range(rows * columns):
            i, j = divmod(k, columns)
            left_bottom = (j * (w + gap_x) / width, 1 - ((i + 1) * (h + gap_y) - gap_y) / height)
            axes.append(figure.add_axes((*left_bottom, w / width, h / height), label=f"panel {k}"))
        bar_height = min(2.6, height - gap_y)
        bar_bottom = (height + gap_y - bar_height) / 2 / height
        bar_bounds = ((columns * (w + gap_x) + 0.06) / width, bar_bottom, 0.09 / width, bar_height / height)
        self._colour_bar_axes = figure.add_axes(bar_bounds, label="scale")
        return self._style_axes(axes)

    def _create_figure(self, width: float, height: float) -> PlotFigure:
        """A new figure of a size in inches."""
        self.figure = PlotFigure(figsize=(width, height), dpi=DPI, layout=self._layout, facecolor=self.colours["paper"])
        self.figure.text_colour = self.colours["ink"]
        FigureCanvasAgg(self.figure)
        return self.figure

    def _style_axes(self, panels: list[Axes]) -> list[Axes]:
        """The panels with thin frames, small fonts and the colours of the theme."""
        ticks: Any = {"color": self.colours["line"], "labelcolor": self.colours["ink"], "labelsize": SMALL_FONT_SIZE}
        for ax in panels:
            ax.set_facecolor(self.colours["paper"])
            for side, spine in ax.spines.items():
                spine.set(color=self.colours["line"], linewidth=0.8, visible=side in ("left", "bottom"))
            ax.tick_params(which="major", length=3, pad=3, width=0.8, labelfontfamily=BASE_FONT, **ticks)
        self._layout.panels = panels
        return panels

    def set_shared_labels(self, x: str, y: str) -> None:
        """Set labels for the axes of all panels together."""
        self._figure_texts["x"] = x, self._label_style | {"ha": "center", "va": "top"}
        self._figure_texts["y"] = y, self._label_style | {"ha": "right", "va": "center", "rotation": 90}

    def draw_frame(self, ax: Axes) -> None:
        """Draw a frame on all sides, without tick marks."""
        for spine in ax.spines.values():
            spine.set_visible(True)
        ax.tick_params(which="both", length=0)

    def set_title(self, text: str, *, is_above_legend: bool = False) -> None:
        """Set the default title of the figure; the user's title replaces it."""
        self._title, self._is_title_above_legend = text, is_above_legend

    def set_panel_title(self, ax: Axes, text: str) -> None:
        """Set the title of one of several panels."""
        (line,), fonts = self.format_texts([text], 60) if text else ([""], [BASE_FONT])
        ax.set_title(line, fontsize=FONT_SIZE, fontfamily=fonts, color=self.colours["ink"], pad=3)

    def set_axis_labels(self, ax: Axes, x: str = "", y: str = "") -> None:
        """Set the labels of the axes of a panel; an empty label does not change the existing one."""
        for text, set_label in ((x, ax.set_xlabel), (y, ax.set_ylabel)):
            if text:
                (line,), fonts = self.format_texts([text], 80)
                set_label(line, fontsize=FONT_SIZE, fontfamily=fonts, color=self.colours["grey"])

    def add_note(self, text: str) -> None:
        """Add a note below the plot, such as a convention or a count of omitted parts; a note is added only once."""
        if text and text not in self._notes:
            self._notes.append(text)

    def format_texts(self, texts: Sequence[object], max_length: int = MAX_LABEL_LENGTH) -> tuple[list[str], list[str]]:
        """The texts for display and their fonts; characters that no font has are replaced, and a note lists them."""
        strings, fonts, missing = replace_missing_glyphs([format_token(text, max_length) for text in texts])
        self._missing_glyphs |= set(missing)
        return strings, fonts

    def set_tick_labels(
        self, ax: Axes, axis_name: str, labels: Sequence[object], inches: float, max_length: int = MAX_LABEL_LENGTH
    ) -> None:
        """Label the ticks 0, 1, 2, ... of an axis: only as many as do not overlap, rotated if they are wide."""
        texts, fonts = self.format_texts(labels, max_length)
        size = SMALL_FONT_SIZE + 0.5
        pitch = 72 * inches / max(1, len(texts))
        if pitch < 1.2 * size:
            size = max(6.0, min(size, pitch / 1.2))
        step = max(1, math.ceil(1.2 * size / pitch))
        ticks = list(range(0, len(texts), step))
        rotation: dict[str, Any] = {}
        if axis_name == "x" and max(text_width(texts[k], size) for k in ticks) + 4 > pitch * step:
            rotation = {"rotation": 90}
            if pitch * step > 1.9 * size:
                rotation = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        style: dict[str, Any] = {"fontsize": size, "fontfamily": fonts, "parse_math": False, "usetex": False}
        axis = ax.xaxis if axis_name == "x" else ax.yaxis
        axis.set_ticks(ticks, labels=[texts[k] for k in ticks], color=self.colours["ink"], **style, **rotation)

    def set_index_ticks(self, ax: Axes) -> None:
        """Label the x axis with the numbers of some columns, where the words of a long sentence do not fit."""
        ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        ax.xaxis.set_major_formatter(ScalarFormatter())
        ax.tick_params(axis="x", length=3, labelrotation=0)

    def add_text(self, ax: Axes, x: float, y: float, text: object, **style: Any) -> None:
        """Draw a text at data coordinates."""
        (line,), fonts = self.format_texts([text], 60)
        style = {"fontsize": SMALL_FONT_SIZE, "color": self.colours["ink"], **style}
        ax.text(x, y, line, fontfamily=fonts, parse_math=False, **style)

    def add_legend(self, ax: Axes, **options: Any) -> None:
        """Draw the legend of a panel."""
        options = {"frameon": False, "fontsize": SMALL_FONT_SIZE, "handlelength": 1.6, **options}
        ax.legend(labelcolor=self.colours["ink"], **options)

    def style_curve_axes(self, ax: Axes, x: str, y: str, num_ticks: int) -> None:
        """Label the axes of curves, with integer ticks along x and faint horizontal lines."""
        self.set_axis_labels(ax, x, y)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=num_ticks))
        ax.grid(axis="y", color=self.colours["line"], linewidth=0.5)
        ax.set_axisbelow(True)
        ax.margins(x=0.02)

    def make_colour_map(self, norm: Normalize) -> Colormap:
        """A sequential colour map, or a diverging one if the scale has negative values; NaN is blank."""
        is_signed = norm.vmin is not None and norm.vmin < 0
        colour_map = LinearSegmentedColormap.from_list(
            "bnet", (DIVERGING_COLOURS if is_signed else SEQUENTIAL_COLOURS)[self.theme]
        )
        return colour_map.with_extremes(bad=self.colours["paper"])

    def add_colour_bar(self, image: Any, value_label: str, axes: Sequence[Axes]) -> None:
        """Draw the colour bar of one panel, or of all panels together."""
        if self._colour_bar_axes is not None:
            bar = axes[0].figure.colorbar(image, cax=self._colour_bar_axes)
        elif len(axes) == 1:
            bar_axes = axes[0].inset_axes((1.03, 0.0, 0.035, 1.0))
            bar = axes[0].figure.colorbar(image, cax=bar_axes)
        else:
            bar = axes[0].figure.colorbar(image, ax=list(axes), fraction=0.03, pad=0.015, aspect=32, shrink=0.8)
        bar.outline.set_visible(False)
        (line,), fonts = self.format_texts([value_label], 60)
        bar.set_label(line, fontsize=FONT_SIZE, color=self.colours["grey"], fontfamily=fonts)
        bar.ax.tick_params(
            length=2, width=0.6, labelsize=SMALL_FONT_SIZE, color=self.colours["line"], labelcolor=self.colours["ink"]
        )

    def contrasting_colour(self, colour: Any) -> str:
        """The text or the background colour, whichever has more contrast with a colour."""
        ink, paper = self.colours["ink"], self.colours["paper"]
        return max((ink, paper), key=lambda candidate: abs(lightness(candidate) - lightness(colour)))

    def finish(self) -> Figure | SubFigure:
        """The figure with its title and notes, whose positions are computed when the figure is drawn."""
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
            self.add_note(f"{MISSING_GLYPH} replaces characters that no installed font has: {points}{more}.")
        if self.user_axes is not None:
            label_lines = [self.user_axes.get_xlabel(), *self._notes]
            if self._notes:
                self.user_axes.set_xlabel("\n".join(line for line in label_lines if line), fontfamily=BASE_FONT)
            return self.figure
        self._layout.notes = self._notes
        notes = self._label_style | {"fontsize": SMALL_FONT_SIZE - 0.5, "linespacing": 1.3, "va": "top"}
        self._figure_texts["notes"] = "\n".join(self._notes), notes
        for name, (text, style) in self._figure_texts.items():
            if text:
                self._layout.texts[name] = self.figure.text(0, 0, text, **style)
        return self.figure


def lightness(colour: Any) -> float:
    """The perceived lightness of a colour, 0 to 1."""
    # Relative luminance of WCAG 2 (linear sRGB), then a gamma of 2.2 for a perceptually uniform scale.
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)) ** (1 / 2.2))


def make_norm(low: float, high: float) -> Normalize:
    """A linear scale of colours; an empty interval gets length 1."""
    return Normalize(low, high if high > low else low + 1.0)
