"""The canvas of a plot: a new figure or the user's axes, with colours, fonts, titles, labels and notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import get_font_names
from matplotlib.ticker import MaxNLocator, ScalarFormatter
from matplotlib.transforms import Bbox

from bnet_transformer.errors import BNetError
from bnet_transformer.figures.font_names import GENERIC_FONTS, check_font_name, find_family, resolve_font
from bnet_transformer.figures.fonts import BASE_FONT, MISSING_GLYPH, replace_missing_glyphs, text_width
from bnet_transformer.figures.labels import format_token
from bnet_transformer.figures.size import MIN_FONT_SIZE, parse_width
from bnet_transformer.figures.style import HEAD_COLOURS, get_palette
from bnet_transformer.plots.numbers import UnitFormatter, choose_unit
from bnet_transformer.plots.panel_fitting import fit_into_axes, fit_to_width
from bnet_transformer.plots.saved_figure import (
    DPI,
    NOTE_SHARE,
    PADDING,
    FigureLayout,
    PlotFigure,
    relative_font_width,
    wrap_text,
)
from bnet_transformer.plots.text_fitting import find_space, measure_cell

PAGE_WIDTH = 6.9  # the width of the text of a page, in inches
FONT_SIZE = 8.0
SMALL_FONT_SIZE = 7.0
TITLE_FONT_SIZE = 9.0

MAX_LABEL_SHARE = 0.38  # of the width of the page for the labels at the left of an axis
NARROW_WIDTH = 5.0  # inches
SMALL_SPACE = 2.0  # inches: texts in a smaller space of the user's axes have the smallest size
MIN_PANEL_WIDTH = 0.12  # inches
COLOUR_BAR_WIDTH = 0.57  # inches of a colour bar with its ticks and label
USER_AXES_SHARE = 0.9  # of the measured size: notes that are added last reduce the size of the user's axes

AXES_FONT_HINT = "Install it or use another one; without ax=, an SVG file needs only its name"
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


@dataclass(frozen=True)
class TickLabels:
    """The labels of the ticks of an axis at some positions, which are thinned to the space of the axis."""

    ax: Axes
    axis_name: str
    texts: tuple[str, ...]
    fonts: tuple[str, ...]
    positions: tuple[float, ...]


class Canvas:
    """The figure and axes of a plot, with the `colours` of the theme; notes are printed below the panels.

    With `width` (see `parse_width`), the figure has exactly this width; else it is as wide as its content requires, at
    most `page_width`.
    """

    def __init__(
        self, ax: Axes | None, theme: str, title: str | None, width: object = None, font: object = None
    ) -> None:
        if ax is not None and not isinstance(ax, Axes):
            raise BNetError("ax", expected="matplotlib Axes or None", actual=ax)
        if title is not None and not isinstance(title, str):
            raise BNetError("title", expected="a string", actual=title)
        if ax is not None and width is not None:
            hint = "Set the width of the figure of ax, such as Figure(figsize=(3.3, 2))"
            raise BNetError("width= cannot be combined with ax=", hint=hint)
        self.width = None if width is None else parse_width(width)
        self.page_width = PAGE_WIDTH if self.width is None else self.width
        self.space = Bbox.unit() if ax is None else find_space(ax)  # of the user's axes, in pixels
        self.is_small = False  # in a small part of the figure of the user, all texts have the smallest size
        if ax is not None:
            self.page_width = self.space.width / ax.figure.dpi
            self.is_small = measure_cell(ax) < SMALL_SPACE
        name = check_font_name(font)
        if ax is not None and name is not None:
            resolve_font(name, get_font_names(), AXES_FONT_HINT)
        family = None if name is None else find_family(name, get_font_names())
        self.font = name if name in GENERIC_FONTS else family  # None for the default font
        self.missing_font = name if name is not None and family is None else ""
        self.font_scale = relative_font_width(family)
        self.colours = get_palette(theme)
        self.head_colours = HEAD_COLOURS[theme]
        self.theme = theme
        self.user_axes = ax
        self.title, self.title_size = title, TITLE_FONT_SIZE
        self.figure: Figure | SubFigure | None = None if ax is None else ax.figure
        self.layout = FigureLayout(self.width is not None, self.font_scale)
        self._colour_bar_axes: Axes | None = None
        self._title, self._is_title_above_legend = "", False
        self._label_style: dict[str, Any] = {
            "fontsize": FONT_SIZE,
            "color": self.colours["grey"],
            "fontfamily": self.with_font([BASE_FONT]),
        }
        self._figure_texts: dict[str, tuple[str, dict[str, Any]]] = {}  # texts and their style
        self.notes: list[str] = []
        self._missing_glyphs: set[str] = set()
        self.tick_labels: dict[tuple[Axes, str], TickLabels] = {}
        self.legends: dict[Axes, dict[str, Any]] = {}
        self.panel_titles: dict[Axes, str] = {}
        self._final_steps: list[Callable[[], None]] = []
        self.is_laid_out = False  # then sizes are measured

    def with_font(self, fonts: Sequence[str]) -> list[str]:
        """Font families, the first choice first: the font of the user, then those that contain the characters."""
        return [*([self.font] if self.font else []), *fonts]

    def panel_size(self, ax: Axes, default: tuple[float, float] | None = None) -> tuple[float, float]:
        """Width and height of a panel in inches: `default` for a new figure, else measured."""
        is_measured = self.user_axes is not None or self.is_laid_out
        if default is not None and not is_measured:
            return default
        box, share = ax.get_window_extent(), 1.0 if self.user_axes is None else USER_AXES_SHARE
        return share * box.width / ax.figure.dpi, share * box.height / ax.figure.dpi

    def limit_label_length(self, longest: int) -> int:
        """The number of characters of a label that has at most a third of the width of the page."""
        return max(4, min(longest, int(MAX_LABEL_SHARE * 72 * self.page_width / (0.6 * SMALL_FONT_SIZE))))

    @property
    def is_narrow(self) -> bool:
        """Whether the figure is narrower than two panels with axes."""
        return self.page_width < NARROW_WIDTH

    def draw_when_sized(self, draw: Callable[[], None]) -> None:
        """Draw a part that depends on the final size of the panels, which `panel_size` then returns."""
        self._final_steps.append(draw)

    def add_axes(self, width: float, height: float) -> Axes:
        """One panel: the user's axes, or the axes of a new figure with a size in inches."""
        return self.add_panels(1, 1, width, height)[0]

    def add_panels(self, rows: int, columns: int, width: float, height: float, **options: Any) -> list[Axes]:
        """The panels of a new figure, row by row; or the user's axes if there is only one panel."""
        self._check_panels(rows * columns)
        if self.user_axes is not None:
            return self._style_axes([self.user_axes])
        panels = self._create_figure(width, height).subplots(rows, columns, squeeze=False, **options).ravel().tolist()
        return self._style_axes(panels)

    def add_panel_grid(
        self, rows: int, columns: int, panel_size: tuple[float, float], gap: tuple[float, float], left: float
    ) -> list[Axes]:
        """Many small panels with a size in inches, row by row, and a colour bar.

        `left` is the space for the labels of the first column. The positions are computed directly, without the slow
        constrained layout.
        """
        self._check_panels(rows * columns)
        (w, h), (gap_x, gap_y) = panel_size, gap
        if w < MIN_PANEL_WIDTH:
            raise self.narrow_error()
        width, height = left + columns * (w + gap_x) + COLOUR_BAR_WIDTH, rows * (h + gap_y)
        width = width if self.width is None else self.width
        figure, axes = self._create_figure(width, height), []
        for k in range(rows * columns):
            i, j = divmod(k, columns)
            left_bottom = ((left + j * (w + gap_x)) / width, 1 - ((i + 1) * (h + gap_y) - gap_y) / height)
            axes.append(figure.add_axes((*left_bottom, w / width, h / height), label=f"panel {k}"))
        bar_height = min(2.6, height - gap_y)
        bar_bottom = (height + gap_y - bar_height) / 2 / height
        bar_bounds = ((left + columns * (w + gap_x) + 0.04) / width, bar_bottom, 0.09 / width, bar_height / height)
        self._colour_bar_axes = figure.add_axes(bar_bounds, label="scale")
        return self._style_axes(axes)

    def _check_panels(self, count: int) -> None:
        """Raise an error for several panels on the axes of the user."""
        if self.user_axes is not None and count > 1:
            hint = "Choose one panel by an option of the plot, or leave out ax="
            raise BNetError("ax", expected="a plot with one panel", actual=f"{count} panels", hint=hint)

    def narrow_error(self) -> BNetError:
        """The error for a width in which the labels leave no space for a panel."""
        hint = "Use a larger width, or plot a part of the result"
        return BNetError("width", expected="space for the labels of this plot", actual=f"{self.width:g}in", hint=hint)

    def _create_figure(self, width: float, height: float) -> PlotFigure:
        """A new figure of a size in inches."""
        width = width if self.width is None else self.width
        self.figure = PlotFigure(figsize=(width, height), dpi=DPI, layout=self.layout, facecolor=self.colours["paper"])
        self.figure.text_colour = self.colours["ink"]
        self.figure.exact_width = self.width is not None
        self.figure.missing_font = self.missing_font
        FigureCanvasAgg(self.figure)
        return self.figure

    def _style_axes(self, panels: list[Axes]) -> list[Axes]:
        """The panels with thin frames, small fonts and the colours of the theme."""
        ticks: Any = {"color": self.colours["line"], "labelcolor": self.colours["ink"], "labelsize": SMALL_FONT_SIZE}
        for ax in panels:
            ax.set_facecolor(self.colours["paper"])
            for side, spine in ax.spines.items():
                spine.set(color=self.colours["line"], linewidth=0.8, visible=side in ("left", "bottom"))
            ax.tick_params(
                which="major", length=3, pad=3, width=0.8, labelfontfamily=self.with_font([BASE_FONT]), **ticks
            )
        self.layout.panels = panels
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
        (line,), fonts = self.format_texts([text], 60) if text else ([""], self.with_font([BASE_FONT]))
        ax.set_title(line, fontsize=FONT_SIZE, fontfamily=fonts, color=self.colours["ink"], pad=3)
        self.panel_titles[ax] = line

    def set_axis_labels(self, ax: Axes, x: str = "", y: str = "") -> None:
        """Set the labels of the axes of a panel; an empty label does not change the existing one."""
        for text, set_label in ((x, ax.set_xlabel), (y, ax.set_ylabel)):
            if text:
                (line,), fonts = self.format_texts([text], 80)
                set_label(line, fontsize=FONT_SIZE, fontfamily=fonts, color=self.colours["grey"])

    def add_note(self, text: str) -> None:
        """Add a note below the plot, such as a convention or a count of omitted parts; a note is added only once."""
        if text and text not in self.notes:
            self.notes.append(text)

    def format_texts(self, texts: Sequence[object], max_length: int = MAX_LABEL_LENGTH) -> tuple[list[str], list[str]]:
        """The texts for display and their fonts; characters that no font has are replaced, and a note lists them."""
        strings, fonts, missing = replace_missing_glyphs([format_token(text, max_length) for text in texts])
        self._missing_glyphs |= set(missing)
        return strings, self.with_font(fonts)

    def set_tick_labels(
        self,
        ax: Axes,
        axis_name: str,
        labels: Sequence[object],
        inches: float,
        max_length: int = MAX_LABEL_LENGTH,
        positions: Sequence[float] | None = None,
    ) -> None:
        """Label the ticks 0, 1, 2, ... of an axis, or those at `positions`.

        Only as many labels are shown as do not overlap in a length of `inches`. Wide labels are rotated.
        """
        texts, fonts = self.format_texts(labels, max_length)
        tick_positions = tuple(map(float, range(len(texts)) if positions is None else positions))
        ticks = TickLabels(ax, axis_name, tuple(texts), tuple(fonts), tick_positions)
        self.tick_labels[ax, axis_name] = ticks
        span = tick_positions[-1] - tick_positions[0] + 1 if tick_positions else 1
        self.show_tick_labels(ticks, 72 * inches / span)

    def show_tick_labels(self, ticks: TickLabels, unit: float) -> None:
        """Show as many labels as do not overlap, where a unit of the axis is `unit` points long."""
        texts, tick_positions = ticks.texts, ticks.positions
        if not texts:
            return
        size = SMALL_FONT_SIZE + 0.5 if not self.is_small else MIN_FONT_SIZE
        pitch = unit * min(np.diff(sorted(tick_positions)), default=1.0)
        if pitch < 1.2 * size:
            size = max(min(6.0, size), min(size, pitch / 1.2))
        step = max(1, math.ceil(1.2 * size / pitch))
        shown = range(0, len(texts), step)
        rotation: dict[str, Any] = {}
        max_width = self.font_scale * max(text_width(texts[k], size) for k in shown)
        if ticks.axis_name == "x" and max_width + 4 > pitch * step:
            rotation = {"rotation": 90}
            if pitch * step > 1.9 * size:
                rotation = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        elif ticks.axis_name == "x":
            rotation = {"rotation": 0, "ha": "center", "rotation_mode": "default"}
        style: dict[str, Any] = {"fontsize": size, "fontfamily": list(ticks.fonts), "parse_math": False}
        axis = ticks.ax.xaxis if ticks.axis_name == "x" else ticks.ax.yaxis
        labels = [texts[k] for k in shown]
        style |= {"usetex": False, "color": self.colours["ink"], **rotation}
        axis.set_ticks([tick_positions[k] for k in shown], labels=labels, **style)

    def set_index_ticks(self, ax: Axes) -> None:
        """Label the x axis with the numbers of some columns, where the words of a long sentence do not fit."""
        self.tick_labels.pop((ax, "x"), None)
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
        fonts = {} if "prop" in options else {"prop": {"family": self.with_font([BASE_FONT]), "size": SMALL_FONT_SIZE}}
        options = {"frameon": False, "handlelength": 1.6, "labelcolor": self.colours["ink"], **fonts, **options}
        self.legends[ax] = options
        self.show_legend(ax)

    def show_legend(self, ax: Axes) -> None:
        """Draw the legend of a panel with its current options."""
        options = self.legends[ax]
        # The layout would narrow the panel for a legend above it, which then extends even farther.
        is_anchored, is_above = "bbox_to_anchor" in options, options.get("loc") == "lower left"
        is_free = is_anchored if self.user_axes is not None else is_above and self.width is not None
        ax.legend(**options).set_in_layout(not is_free)

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
        """Draw the colour bar of one panel, or of all panels together; a common factor is in its label."""
        if self._colour_bar_axes is not None:
            bar = axes[0].figure.colorbar(image, cax=self._colour_bar_axes)
        elif len(axes) == 1:
            bar_axes = axes[0].inset_axes((1.03, 0.0, 0.035, 1.0))
            bar = axes[0].figure.colorbar(image, cax=bar_axes)
        else:
            bar = axes[0].figure.colorbar(image, ax=list(axes), fraction=0.03, pad=0.015, aspect=32, shrink=0.8)
        bar.outline.set_visible(False)
        unit, unit_text = choose_unit(np.array([image.norm.vmin, image.norm.vmax]))
        bar.formatter = UnitFormatter(unit)
        (line,), fonts = self.format_texts([value_label + unit_text], 60)
        bar.set_label(line, fontsize=FONT_SIZE, color=self.colours["grey"], fontfamily=fonts)
        bar.ax.tick_params(
            length=2, width=0.6, labelsize=SMALL_FONT_SIZE, color=self.colours["line"], labelcolor=self.colours["ink"]
        )
        bar.ax.tick_params(labelfontfamily=self.with_font([BASE_FONT]))

    def contrasting_colour(self, colour: Any) -> str:
        """The text or the background colour, whichever has more contrast with a colour."""
        ink, paper = self.colours["ink"], self.colours["paper"]
        return max((ink, paper), key=lambda candidate: abs(lightness(candidate) - lightness(colour)))

    def finish(self) -> Figure | SubFigure:
        """The figure with its title and notes, and with texts that fit into its width or the axes of the user."""
        assert self.figure is not None
        self._name_units()
        title = self._title if self.title is None else self.title
        if self.user_axes is not None:
            fit_into_axes(self, self.user_axes, title)
            return self.figure
        self._add_title(title)
        if isinstance(self.figure, PlotFigure) and self.width is not None:
            fit_to_width(self, self.figure, self.width)
        else:
            self.finish_panels()
            self.add_figure_texts()
        return self.figure

    def _name_units(self) -> None:
        """Move common factors of the numbers along axes into the labels of the axes."""
        for ax in self.layout.panels:
            for axis in (ax.xaxis, ax.yaxis):
                if type(axis.get_major_formatter()) is not ScalarFormatter or axis.get_scale() != "linear":
                    continue
                label = axis.label.get_text()
                unit, text = choose_unit(np.asarray(axis.get_view_interval()))
                unit, text = (unit, text) if label else (1.0, "")
                axis.set_major_formatter(UnitFormatter(unit))
                axis.label.set_text(label + text)

    def _add_title(self, title: str) -> None:
        """Add the title above a single panel, or above all panels."""
        if not title:
            return
        panels = self.layout.panels
        (line,), fonts = self.format_texts([title], 120)
        style: dict[str, Any] = {"fontsize": TITLE_FONT_SIZE, "fontfamily": fonts, "color": self.colours["ink"]}
        is_single = len(panels) == 1 and not self._figure_texts and not self._is_title_above_legend
        if is_single and self.width is None:
            panels[0].set_title(line, loc="left", pad=8, **style)
        else:
            if self.width is not None:
                line = wrap_text(line, TITLE_FONT_SIZE * self.font_scale, NOTE_SHARE * 72 * (self.width - 2 * PADDING))
            self._figure_texts["title"] = line, style | {"va": "bottom"}

    def finish_panels(self) -> None:
        """Draw the parts that depend on the size of the panels."""
        for draw in self._final_steps:
            draw()
        if self._missing_glyphs:
            points = ", ".join(f"U+{ord(letter):04X}" for letter in sorted(self._missing_glyphs)[:8])
            more = f" and {len(self._missing_glyphs) - 8} more" if len(self._missing_glyphs) > 8 else ""
            self.add_note(f"{MISSING_GLYPH} replaces characters that no installed font has: {points}{more}.")

    def add_figure_texts(self) -> None:
        """Add title, shared labels and notes, whose positions are computed when the figure is drawn."""
        assert self.figure is not None
        self.layout.notes = self.notes
        notes = self._label_style | {"fontsize": SMALL_FONT_SIZE - 0.5, "linespacing": 1.3, "va": "top"}
        self._figure_texts["notes"] = "\n".join(self.notes), notes
        for name, (text, style) in self._figure_texts.items():
            if text and name not in self.layout.texts:
                self.layout.texts[name] = self.figure.text(0, 0, text, **style)


def lightness(colour: Any) -> float:
    """The perceived lightness of a colour, 0 to 1."""
    # Relative luminance of WCAG 2 (linear sRGB), then a gamma of 2.2 for a perceptually uniform scale.
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)) ** (1 / 2.2))


def make_norm(low: float, high: float) -> Normalize:
    """A linear scale of colours; an empty interval gets length 1."""
    return Normalize(low, high if high > low else low + 1.0)
