"""The canvas of a plot: a new figure or the user's axes, with colours, fonts, texts that fit, and an exact width."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontProperties, get_font_names
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.ticker import Formatter, MaxNLocator, ScalarFormatter
from matplotlib.transforms import Bbox

from bnet_transformer._core.files import as_path, atomic_write
from bnet_transformer._core.tensors import FloatArray
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import (
    BASE_FONT,
    GENERIC_FONTS,
    MISSING_GLYPH,
    PRINT_DPI,
    check_font_name,
    fill_lines,
    find_family,
    format_token,
    parse_width,
    replace_missing_glyphs,
    resolve_font,
    text_width,
)
from bnet_transformer.figures.picture import HEAD_COLOURS, get_palette

# --------------------------------------------------------------------------------------------------------------------
# Numbers as text: in cells, at bars, and along axes with a common power of ten.


MIN_UNSCALED, MAX_UNSCALED = 0.01, 1e5  # if the largest number is outside this range, a power of ten is a common factor
MAX_POWER = 15
SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def choose_unit(*arrays: FloatArray) -> tuple[float, str]:
    """The factor that scales numbers to a readable size, and the text for their label.

    >>> choose_unit(np.array([0.002, -0.001])), choose_unit(np.array([2.0]))
    ((1000.0, ', in 10⁻³'), (1.0, ''))
    """
    largest = max(float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) for array in arrays)
    power = 0
    while 0 < largest < MIN_UNSCALED and largest * 10.0**power < 0.1 and power < MAX_POWER:
        power += 3
    while largest >= MAX_UNSCALED and largest * 10.0**power >= 1000 and power > -MAX_POWER:
        power -= 3
    return 10.0**power, f", in 10{str(-power).translate(SUPERSCRIPTS)}" if power else ""


def format_number(value: float, largest: float, *, is_integer: bool = False, short: bool = True) -> str:
    """A number with two decimals, three if `largest` is below 0.1, or three digits if it is at least 100.

    The text "0" is for exactly 0, and no text is "-0".

    With `short`, numbers of at most 1 have no leading zero.

    >>> [format_number(value, 1.0) for value in (0.25, 0.0, -0.001, -0.5, 1.0)]
    ['.25', '0', '.00', '−.50', '1.00']
    >>> [format_number(value, 12345.0) for value in (12345.0, -1234.5, 12.34)]
    ['12345', '−1234', '12.3']
    """
    if value == 0:
        return "0"
    decimals = 0 if is_integer else 2 if largest >= 0.1 else 3
    if is_integer or largest < 100 or abs(value) < 0.01:
        text = f"{abs(value):.{decimals}f}"
    else:
        text = format_digits(abs(value))
    is_rounded_to_zero = not text.strip("0.")
    text = text[1:] if short and largest <= 1 and text.startswith("0.") else text
    return ("−" if value < 0 and not is_rounded_to_zero else "") + text


def format_digits(value: float, digits: int = 3, *, sign: bool = False) -> str:
    """A number with some significant digits, with all digits before the decimal point below `MAX_UNSCALED`.

    With `sign`, positive numbers have a plus sign.

    >>> format_digits(12345.6), format_digits(-0.12345), format_digits(2.0, sign=True), format_digits(1.5e-7)
    ('12346', '−0.123', '+2', '1.5e−07')
    """
    is_long = 10**digits - 0.5 <= abs(value) < MAX_UNSCALED
    return f"{value:{'+' if sign else ''}{'.0f' if is_long else f'.{digits}g'}}".replace("-", "−")


class UnitFormatter(Formatter):
    """Formats the ticks of an axis in a common power of ten, which the label of the axis has.

    Args:
        unit: The factor of the numbers.
    """

    def __init__(self, unit: float = 1.0) -> None:
        self.unit = unit
        self.tick_positions: FloatArray = np.zeros(0)

    def set_locs(self, locs: Any) -> None:
        """Set the positions of the ticks, which determine the number of decimals.

        Args:
            locs: The positions.
        """
        self.tick_positions = np.asarray(locs, dtype=float)

    def __call__(self, x: float, pos: int | None = None) -> str:
        decimals = count_decimals(np.array([*self.tick_positions, x]) * self.unit)
        text = f"{abs(x * self.unit):.{decimals}f}"
        return ("−" if x < 0 and text.strip("0.") else "") + text


def count_decimals(numbers: FloatArray) -> int:
    """The number of decimals that distinguish evenly spaced numbers.

    >>> count_decimals(np.array([0.0, 0.25, 0.5])), count_decimals(np.array([0.0, 20.0]))
    (2, 0)
    """
    steps = np.diff(np.unique(numbers))
    step = float(steps[steps > 1e-9 * float(np.abs(numbers).max())].min(initial=np.inf))
    tolerance = 1e-3 * (step if np.isfinite(step) else max(float(np.abs(numbers).max()), 1e-9))
    return next((d for d in range(12) if bool((np.abs(np.round(numbers, d) - numbers) < tolerance).all())), 12)


# --------------------------------------------------------------------------------------------------------------------
# The figure of a plot: its settings of matplotlib, and how it is saved.


DPI = 144  # of a picture on a screen
RC_PARAMS: Any = {
    "text.parse_math": False,
    "font.family": [BASE_FONT],
    "font.size": 8.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "bnet_transformer",
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
}
VECTOR_FORMATS = ("svg", "svgz", "pdf", "ps", "eps", "pgf")
NAMED_FONT_FORMATS = ("svg", "svgz")  # a file of these formats has the name of a font, not its letters
DATE_METADATA = {"svg": "Date", "pdf": "CreationDate"}  # omitted, so that equal plots have equal bytes
SAVE_HINT = "Install it, use another one, or save as SVG, which has only its name"


@contextmanager
def plot_rc_context(settings: Any) -> Iterator[None]:
    """A context with some settings of matplotlib, and otherwise its defaults."""
    with matplotlib.style.context("default"), matplotlib.rc_context(settings):
        yield


class PlotFigure(Figure):
    """A Figure that saves text as text, without a date, and writes files atomically.

    Its files have the size of the figure. A notebook shows it without pyplot. A `missing_font` is named only in SVG:
    all texts have installed fonts, with which their sizes are measured.
    """

    rc_params: Any = RC_PARAMS
    missing_font = ""
    has_width = False

    def draw(self, renderer: Any) -> None:
        with plot_rc_context(self.rc_params):
            super().draw(renderer)

    def get_tightbbox(self, renderer: Any = None, *args: Any, **options: Any) -> Bbox:
        """The box of the figure in inches, which is that of its content."""
        return Bbox.from_bounds(0, 0, *self.get_size_inches())

    def savefig(self, fname: Any, **options: Any) -> None:
        is_path = isinstance(fname, str | os.PathLike)
        file_format = str(options.pop("format", None) or (as_path(fname).suffix[1:] if is_path else "")).lower()
        if not file_format:
            file_format = "png"
            fname = f"{os.fspath(fname)}.png" if is_path else fname
        if self.missing_font and file_format not in NAMED_FONT_FORMATS:
            resolve_font(self.missing_font, get_font_names(), SAVE_HINT)
        if file_format in DATE_METADATA:
            options["metadata"] = {DATE_METADATA[file_format]: None, **(options.get("metadata") or {})}
        if self.has_width and file_format not in VECTOR_FORMATS:
            options = {"dpi": PRINT_DPI, **options}
        options |= {"format": file_format, "pad_inches": 0}
        buffer = io.BytesIO()  # on a full disk, the writers of matplotlib raise errors other than OSError
        with plot_rc_context(self.rc_params):
            super().savefig(buffer if is_path else fname, **options)
        if is_path:
            with atomic_write(fname) as path:
                path.write_bytes(buffer.getvalue())

    def _repr_png_(self) -> bytes:
        """The PNG that a notebook shows."""
        if self.missing_font:
            warnings.warn(
                f"font {self.missing_font!r} is not installed: {BASE_FONT} is shown. {SAVE_HINT}", stacklevel=2
            )
        buffer = io.BytesIO()
        with plot_rc_context(self.rc_params):
            super().savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()


# --------------------------------------------------------------------------------------------------------------------
# The canvas. The layout is that of panels with sizes in inches: their labels are fitted to these sizes and measured,
# and the sizes of panels, margins, title and notes add to the size of the figure. With a width, the panels share what
# the margins leave. The constrained layout of matplotlib has a fixed size of the figure, and is slow with many panels.


PAGE_WIDTH = 6.9  # the width of the text of a page, in inches
FONT_SIZE = 8.0
SMALL_FONT_SIZE = 7.0
TITLE_FONT_SIZE = 9.0
PADDING = 0.06  # inches around the content
PANEL_GAP = 0.1  # inches between the labels of two panels
BAR_SIZE = (0.09, 2.6)  # inches: the width and the maximum height of a colour bar for several panels
MAX_GROWTH = 1.5  # of panels with a fixed shape, to fill a narrow figure
FIT_STEPS = 2  # wrapped labels change the size of panels, on which labels depend
MIN_PANEL_WIDTH = 0.12  # inches
MIN_LABEL_SPACE = 90.0  # points: labels of axes are not wrapped to less
MIN_NOTE_WIDTH = 1.7  # inches
NOTE_SHARE = 0.97  # of the width: letters on a screen are up to 3% wider than in print
MAX_LABEL_SHARE = 0.38  # of the width of the page for the labels at the left of an axis
NARROW_WIDTH = 5.0  # inches
MAX_LABEL_LENGTH = 18  # characters of a word

AXES_FONT_HINT = "Install it or use another one; without ax=, an SVG file needs only its name"
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


def wrap_text(text: str, size: float, points: float, max_lines: int | None = None) -> str:
    """The text with line breaks at spaces, so that no line is wider than `points`; cut after `max_lines` lines."""
    lines = fill_lines(text.split(" "), lambda line: text_width(line, size) <= points)
    if max_lines is not None and len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], " ".join(lines[max_lines - 1 :])]
    return "\n".join(cut(line, size, points) for line in lines)


def cut(line: str, size: float, points: float) -> str:
    """The line, shortened with an ellipsis if it is wider than `points`."""
    if text_width(line, size) <= points:
        return line
    lengths = range(len(line) - 1, 0, -1)
    return next((f"{line[:n].rstrip()}…" for n in lengths if text_width(f"{line[:n]}…", size) <= points), "…")


def relative_font_width(font: str | None) -> float:
    """The width of text in an installed font relative to that in the default font, at least 1; 1 for None."""
    if font is None:
        return 1.0
    sample = "abcdefghijklmnopqrstuvwxyz 0123456789"
    widths = [
        text_to_path.get_text_width_height_descent(sample, FontProperties(family=family, size=10), ismath=False)[0]
        for family in (font, BASE_FONT)
    ]
    return max(1.0, widths[0] / widths[1])


def measure_margins(ax: Axes) -> list[float]:
    """The space in inches at the left, right, bottom and top of a panel that its labels and its legend require."""
    tight, legend = ax.get_tightbbox(), ax.get_legend()
    box = ax.get_window_extent()  # after get_tightbbox, which applies the aspect
    assert tight is not None
    bottom, top = tight.y0, tight.y1
    if legend is not None:
        extent = legend.get_window_extent()
        bottom, top = min(bottom, extent.y0), max(top, extent.y1)
    margins = box.x0 - tight.x0, tight.x1 - box.x1, box.y0 - bottom, top - box.y1
    return [max(0.0, float(margin) / ax.figure.dpi) for margin in margins]


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
    most `page_width`. `rc_params` are the settings of matplotlib with which it is drawn.
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
        if ax is not None:
            self.page_width = ax.get_window_extent().width / ax.figure.dpi
        name = check_font_name(font)
        if ax is not None and name is not None:
            resolve_font(name, get_font_names(), AXES_FONT_HINT)
        family = None if name is None else find_family(name, get_font_names())
        self.missing_font = name if name is not None and family is None else ""
        self.font: str = family or ("sans-serif" if name else BASE_FONT)
        if name is not None and name in GENERIC_FONTS:
            self.font = name
        self.font_scale = relative_font_width(family)
        self.colours = get_palette(theme)
        self.head_colours = HEAD_COLOURS[theme]
        self.theme = theme
        self.rc_params = RC_PARAMS | {"text.color": self.colours["ink"], "font.family": [self.font]}
        if self.missing_font:  # an SVG has all names of this generic font
            self.rc_params["font.sans-serif"] = [self.missing_font, BASE_FONT]
        self.user_axes = ax
        self.title = title
        self.figure: Figure | SubFigure | None = None if ax is None else ax.figure
        self.notes: list[str] = []
        self._default_title = ""
        self._shared_labels = ("", "")
        self._figure_texts: dict[str, Text] = {}
        self._missing_glyphs: set[str] = set()
        self._panels: Any = np.empty((0, 0), dtype=object)  # `[row, column]`
        self._panel_width, self._panel_heights, self._has_fixed_shape = 0.0, np.zeros(0), False
        self._colour_bar: Axes | None = None  # of several panels
        self._tick_labels: dict[tuple[Axes, str], TickLabels] = {}
        self._legends: dict[Axes, dict[str, Any]] = {}
        self._final_steps: list[Callable[[], None]] = []

    @property
    def is_narrow(self) -> bool:
        """Whether the figure is narrower than two panels with axes."""
        return self.page_width < NARROW_WIDTH

    def with_font(self, fonts: Sequence[str]) -> list[str]:
        """Font families, the first choice first: the font of the user, then those that contain the characters."""
        return list(dict.fromkeys([self.font, *fonts]))

    def panel_size(self, ax: Axes) -> tuple[float, float]:
        """Width and height of a panel in inches."""
        box = ax.get_window_extent()
        return float(box.width) / ax.figure.dpi, float(box.height) / ax.figure.dpi

    def limit_label_length(self, longest: int) -> int:
        """The number of characters of a label that has at most a third of the width of the page."""
        return max(4, min(longest, int(MAX_LABEL_SHARE * 72 * self.page_width / (0.6 * SMALL_FONT_SIZE))))

    def draw_when_sized(self, draw: Callable[[], None]) -> None:
        """Draw a part that depends on the final size of the panels, which `panel_size` then returns."""
        self._final_steps.append(draw)

    # panels

    def add_axes(self, width: float, height: float, *, has_fixed_shape: bool = False) -> Axes:
        """One panel: the user's axes, or new axes with a size in inches."""
        return self.add_panels(1, 1, width, height, has_fixed_shape=has_fixed_shape)[0]

    def add_panels(
        self,
        rows: int,
        columns: int,
        width: float,
        height: float | Sequence[float],
        *,
        has_fixed_shape: bool = False,
        **options: Any,
    ) -> list[Axes]:
        """The panels of a new figure, row by row; or the user's axes if there is only one panel.

        Each panel has a size in inches, without its labels; `height` can be a number for each row. The panels are
        narrower if they do not fit on a page, and fill a figure with a width. With `has_fixed_shape`, their height
        changes with their width.
        """
        if self.user_axes is not None and rows * columns > 1:
            hint = "Choose one panel by an option of the plot, or leave out ax="
            raise BNetError("ax", expected="a plot with one panel", actual=f"{rows * columns} panels", hint=hint)
        self._panel_width, self._panel_heights = width, np.broadcast_to(height, rows)
        self._has_fixed_shape = has_fixed_shape
        if self.user_axes is not None:
            self._panels = np.array([[self.user_axes]])
        else:
            share = min(1.0, self.page_width / (columns * width))
            size = share * columns * width, (share if has_fixed_shape else 1.0) * float(self._panel_heights.sum())
            self.figure = figure = PlotFigure(figsize=size, dpi=DPI, facecolor=self.colours["paper"])
            figure.rc_params, figure.missing_font = self.rc_params, self.missing_font
            figure.has_width = self.width is not None
            FigureCanvasAgg(figure)
            grid: Any = {"left": 0, "right": 1, "bottom": 0, "top": 1, "wspace": 0, "hspace": 0}
            grid["height_ratios"] = self._panel_heights
            self._panels = figure.subplots(rows, columns, squeeze=False, gridspec_kw=grid, **options)
        ticks: Any = {"color": self.colours["line"], "labelcolor": self.colours["ink"], "labelsize": SMALL_FONT_SIZE}
        for ax in self._panels.flat:
            ax.set_facecolor(self.colours["paper"])
            for side, spine in ax.spines.items():
                spine.set(color=self.colours["line"], linewidth=0.8, visible=side in ("left", "bottom"))
            ax.tick_params(which="major", length=3, pad=3, width=0.8, labelfontfamily=self.with_font([]), **ticks)
        panels: list[Axes] = self._panels.ravel().tolist()
        return panels

    def draw_frame(self, ax: Axes) -> None:
        """Draw a frame on all sides, without tick marks."""
        for spine in ax.spines.values():
            spine.set_visible(True)
        ax.tick_params(which="both", length=0)

    # texts

    def format_texts(self, texts: Sequence[object], max_length: int = MAX_LABEL_LENGTH) -> tuple[list[str], list[str]]:
        """The texts for display and their fonts; characters that no font has are replaced, and a note lists them."""
        strings, fonts, missing = replace_missing_glyphs([format_token(text, max_length) for text in texts])
        self._missing_glyphs |= set(missing)
        return strings, self.with_font(fonts)

    def set_title(self, text: str) -> None:
        """Set the default title of the figure; the user's title replaces it."""
        self._default_title = text

    def set_shared_labels(self, x: str, y: str) -> None:
        """Set labels for the axes of all panels together."""
        self._shared_labels = x, y

    def add_note(self, text: str) -> None:
        """Add a note below the plot, such as a convention or a count of omitted parts; a note is added only once."""
        if text and text not in self.notes:
            self.notes.append(text)

    def set_panel_title(self, ax: Axes, text: str) -> None:
        """Set the title of one of several panels."""
        (line,), fonts = self.format_texts([text], 60) if text else ([""], [self.font])
        ax.set_title(line, fontsize=FONT_SIZE, fontfamily=fonts, color=self.colours["ink"], pad=3)

    def set_axis_labels(self, ax: Axes, x: str = "", y: str = "") -> None:
        """Set the labels of the axes of a panel; an empty label does not change the existing one."""
        for text, set_label in ((x, ax.set_xlabel), (y, ax.set_ylabel)):
            if text:
                (line,), fonts = self.format_texts([text], 80)
                set_label(line, fontsize=FONT_SIZE, fontfamily=fonts, color=self.colours["grey"])

    def add_text(self, ax: Axes, x: float, y: float, text: object, **style: Any) -> None:
        """Draw a text at data coordinates."""
        (line,), fonts = self.format_texts([text], 60)
        style = {"fontsize": SMALL_FONT_SIZE, "color": self.colours["ink"], **style}
        ax.text(x, y, line, fontfamily=fonts, parse_math=False, **style)

    def set_tick_labels(
        self,
        ax: Axes,
        axis_name: str,
        labels: Sequence[object],
        max_length: int = MAX_LABEL_LENGTH,
        positions: Sequence[float] | None = None,
    ) -> None:
        """Label the ticks 0, 1, 2, ... of an axis, or those at `positions`.

        Only as many labels are shown as do not overlap. Wide labels are rotated.
        """
        texts, fonts = self.format_texts(labels, max_length)
        tick_positions = tuple(map(float, range(len(texts)) if positions is None else positions))
        self._tick_labels[ax, axis_name] = TickLabels(ax, axis_name, tuple(texts), tuple(fonts), tick_positions)

    def label_rows(self, ax: Axes, labels: Sequence[object], max_length: int = MAX_LABEL_LENGTH) -> None:
        """Label the rows of a panel from top to bottom, without tick marks."""
        ax.set_ylim(len(labels) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        self.set_tick_labels(ax, "y", labels, max_length)

    def set_index_ticks(self, ax: Axes) -> None:
        """Label the x axis with the numbers of some columns, where the words of a long sentence do not fit."""
        self._tick_labels.pop((ax, "x"), None)
        ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_formatter(ScalarFormatter())
        ax.tick_params(axis="x", length=3, labelrotation=0)

    def style_curve_axes(self, ax: Axes, x: str, y: str) -> None:
        """Label the axes of curves, with integer ticks along x and faint horizontal lines."""
        self.set_axis_labels(ax, x, y)
        ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        ax.grid(axis="y", color=self.colours["line"], linewidth=0.5)
        ax.set_axisbelow(True)
        ax.margins(x=0.02)

    def add_legend(self, ax: Axes, **options: Any) -> None:
        """Draw the legend of a panel; with `is_above=True` above it, at its left edge."""
        if options.pop("is_above", False):
            options |= {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        style: Any = {"frameon": False, "handlelength": 1.6, "labelcolor": self.colours["ink"]}
        self._legends[ax] = style | {"prop": {"family": [self.font], "size": SMALL_FONT_SIZE}} | options
        self._show_legend(ax)

    def _show_legend(self, ax: Axes) -> None:
        """Draw the legend of a panel with its current options."""
        options = self._legends[ax]
        # With a width, a panel would be narrower for a legend above it, which then extends even farther.
        is_free = self.width is not None and options.get("loc") == "lower left"
        ax.legend(**options).set_in_layout(not is_free)

    # colours

    def make_colour_map(self, norm: Normalize) -> Colormap:
        """A sequential colour map, or a diverging one if the scale has negative values; NaN is blank."""
        is_signed = norm.vmin is not None and norm.vmin < 0
        colour_map = LinearSegmentedColormap.from_list(
            "bnet", (DIVERGING_COLOURS if is_signed else SEQUENTIAL_COLOURS)[self.theme]
        )
        return colour_map.with_extremes(bad=self.colours["paper"])

    def add_colour_bar(self, image: Any, value_label: str) -> None:
        """Draw the colour bar of one panel, or of all panels together; a common factor is in its label."""
        first = self._panels[0, 0]
        if self._panels.size == 1:
            bar_axes = first.inset_axes((1.03, 0.0, 0.035, 1.0))
        else:
            bar_axes = self._colour_bar = first.figure.add_axes((0, 0, 0.1, 1), label="<colorbar>")
        bar = first.figure.colorbar(image, cax=bar_axes)
        bar.outline.set_visible(False)
        unit, unit_text = choose_unit(np.array([image.norm.vmin, image.norm.vmax]))
        bar.formatter = UnitFormatter(unit)
        (line,), fonts = self.format_texts([value_label + unit_text], 60)
        bar.set_label(line, fontsize=FONT_SIZE, color=self.colours["grey"], fontfamily=fonts)
        colours: Any = {"color": self.colours["line"], "labelcolor": self.colours["ink"]}
        bar.ax.tick_params(
            length=2, width=0.6, labelsize=SMALL_FONT_SIZE, labelfontfamily=self.with_font([]), **colours
        )

    def contrasting_colour(self, colour: Any) -> str:
        """The text or the background colour, whichever has more contrast with a colour."""
        ink, paper = self.colours["ink"], self.colours["paper"]
        return max((ink, paper), key=lambda candidate: abs(lightness(candidate) - lightness(colour)))

    # layout

    def finish(self) -> Figure | SubFigure:
        """The figure with its title and notes, and with texts that fit into its panels."""
        assert self.figure is not None
        self._name_units()
        title = self._default_title if self.title is None else self.title
        if self.user_axes is None:
            self._add_figure_texts(title)
        label = self._panels[0, 0].get_xlabel()
        for _ in range(FIT_STEPS):
            self._fit_texts(title, label)
            self._arrange()
        for draw in self._final_steps:
            draw()
        if self._missing_glyphs:
            points = ", ".join(f"U+{ord(letter):04X}" for letter in sorted(self._missing_glyphs)[:8])
            more = f" and {len(self._missing_glyphs) - 8} more" if len(self._missing_glyphs) > 8 else ""
            self.add_note(f"{MISSING_GLYPH} replaces characters that no installed font has: {points}{more}.")
        self._fit_texts(title, label)
        self._arrange()
        return self.figure

    def _name_units(self) -> None:
        """Move common factors of the numbers along axes into the labels of the axes."""
        for ax in self._panels.flat:
            for axis in (ax.xaxis, ax.yaxis):
                if type(axis.get_major_formatter()) is not ScalarFormatter or axis.get_scale() != "linear":
                    continue
                label = axis.label.get_text()
                unit, text = choose_unit(np.asarray(axis.get_view_interval())) if label else (1.0, "")
                axis.set_major_formatter(UnitFormatter(unit))
                axis.label.set_text(label + text)

    def _add_figure_texts(self, title: str) -> None:
        """Add title, notes and the shared labels of axes, which `_arrange` places."""
        assert self.figure is not None
        grey: Any = {"color": self.colours["grey"], "fontsize": FONT_SIZE}
        (line,), fonts = self.format_texts([title], 120) if title else ([""], [self.font])
        style: Any = {"fontsize": TITLE_FONT_SIZE, "color": self.colours["ink"], "fontfamily": fonts, "va": "top"}
        x, y = self._shared_labels
        self._figure_texts = {
            "title": self.figure.text(0, 0, line, **style),
            "x": self.figure.text(0, 0, x, ha="center", va="top", **grey),
            "y": self.figure.text(0, 0, y, ha="left", va="center", rotation=90, **grey),
            "notes": self.figure.text(
                0, 0, "", va="top", linespacing=1.3, **grey | {"fontsize": SMALL_FONT_SIZE - 0.5}
            ),
        }

    def _fit_texts(self, title: str, label: str) -> None:
        """Thin the labels of ticks, wrap labels, and reduce the columns of legends, for the present sizes of panels."""
        for ticks in self._tick_labels.values():
            self._show_tick_labels(ticks)
        for ax in self._panels.flat:
            width, height = (max(MIN_LABEL_SPACE, 72 * inches) for inches in self.panel_size(ax))
            self._wrap(ax.xaxis.label, width)
            for axis in [ax.yaxis, *(child.yaxis for child in ax.child_axes if isinstance(child, Axes))]:
                self._wrap(axis.label, height)
            self._wrap(ax.title, 72 * self.panel_size(ax)[0])
            self._fit_legend(ax)
        if self.user_axes is not None:
            self._fit_user_axes(self.user_axes, title, label)

    def _wrap(self, text: Text, points: float, max_lines: int | None = 3) -> None:
        """Wrap a text, which may be wrapped already."""
        if text.get_text():
            line, size = text.get_text().replace("\n", " "), float(text.get_fontsize())
            text.set_text(wrap_text(line, size * self.font_scale, points, max_lines))

    def _show_tick_labels(self, ticks: TickLabels) -> None:
        """Show as many labels of ticks as do not overlap."""
        texts, is_x = ticks.texts, ticks.axis_name == "x"
        axis = ticks.ax.xaxis if is_x else ticks.ax.yaxis
        if not texts:
            return
        low, high = axis.get_view_interval()
        unit = 72 * self.panel_size(ticks.ax)[0 if is_x else 1] / abs(high - low)
        size, pitch = SMALL_FONT_SIZE + 0.5, unit * min(np.diff(sorted(ticks.positions)), default=1.0)
        size = min(size, max(6.0, pitch / 1.2))
        step = max(1, math.ceil(1.2 * size / pitch))
        shown = range(0, len(texts), step)
        max_width = self.font_scale * max(text_width(texts[k], size) for k in shown)
        style: Any = {"fontsize": size, "fontfamily": list(ticks.fonts), "parse_math": False, "usetex": False}
        if is_x and max_width + 4 <= pitch * step:
            style |= {"rotation": 0, "ha": "center", "rotation_mode": "default"}
        elif is_x and pitch * step > 1.9 * size:
            style |= {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        elif is_x:
            style |= {"rotation": 90, "ha": "center", "rotation_mode": "default"}
        labels = [texts[k] for k in shown]
        axis.set_ticks([ticks.positions[k] for k in shown], labels=labels, color=self.colours["ink"], **style)

    def _fit_legend(self, ax: Axes) -> None:
        """Reduce the columns of a legend until it is not wider than its space, then shorten its texts."""
        options = self._legends.get(ax)
        if options is None:
            return
        limit, dpi = 72 * self.panel_size(ax)[0], float(ax.figure.dpi)

        def measure(item: Any) -> float:
            return float(item.get_window_extent().width) * 72 / dpi

        while options.get("ncols", 1) > 1 and measure(ax.get_legend()) > limit:
            options["ncols"] -= 1
            self._show_legend(ax)
        if self.user_axes is None and self._panels.size == 1:
            limit = 72 * (self.page_width - PADDING) - 72 * float(ax.get_window_extent().x0) / dpi
        legend: Any = ax.get_legend()
        excess = measure(legend) - limit
        if excess > 0 and "bbox_to_anchor" in options:
            points = max(8.0, 0.97 * (max(map(measure, legend.get_texts())) - excess))
            for text in legend.get_texts():
                text.set_text(cut(text.get_text(), float(text.get_fontsize()), points))

    def _fit_user_axes(self, ax: Axes, title: str, label: str) -> None:
        """Set the title and the notes of the user's axes: the notes are below the label of the x axis."""
        points = 72 * self.panel_size(ax)[0] / self.font_scale
        size = float(ax.xaxis.label.get_fontsize())
        ax.set_xlabel(
            "\n".join(wrap_text(text, size, max(MIN_LABEL_SPACE, points)) for text in (label, *self.notes) if text)
        )
        if not title:
            return
        legend, pad, dpi = ax.get_legend(), 8.0, ax.figure.dpi
        if legend is not None:
            pad = max(pad, 72 * (legend.get_window_extent().y1 - ax.get_window_extent().y1) / dpi + 2)
        (line,), fonts = self.format_texts([title], 120)
        style: Any = {"fontsize": TITLE_FONT_SIZE, "fontfamily": fonts, "color": self.colours["ink"]}
        ax.set_title(wrap_text(line, TITLE_FONT_SIZE, points, 3), loc="left", pad=pad, **style)

    def _arrange(self) -> None:
        """Set the size of the figure, and the positions of its panels and texts.

        In the figure of a user, its own layout engine does this, if it has one.
        """
        if not isinstance(self.figure, PlotFigure) or self.user_axes is not None:
            root: Any = self._panels[0, 0].get_figure(root=True)
            if root.get_layout_engine() is not None:
                root.get_layout_engine().execute(root)
            return
        rows, columns = self._panels.shape
        margins = np.zeros((4, rows, columns))
        for index in np.ndindex(rows, columns):
            if self._panels[index].get_visible():
                margins[:, *index] = measure_margins(self._panels[index])
        (left, right), (bottom, top) = margins[:2].max(1), margins[2:].max(2)
        bar = 0.0 if self._colour_bar is None else PADDING + BAR_SIZE[0] + measure_margins(self._colour_bar)[1]
        y_label = self._measure("y")[0]
        frame = 2 * PADDING + y_label + float(left.sum() + right.sum()) + PANEL_GAP * (columns - 1) + bar
        panel_width = self._choose_panel_width((self.page_width - frame) / columns)
        heights = self._panel_heights * (panel_width / self._panel_width if self._has_fixed_shape else 1.0)
        width = self.width or self._choose_width(frame + columns * panel_width)
        self._wrap_figure_texts(72 * NOTE_SHARE * (width - 2 * PADDING))
        space = {name: self._measure(name)[1] for name in ("title", "x", "notes")}
        height = 2 * PADDING + sum(space.values()) + float((heights + bottom + top).sum()) + PANEL_GAP * (rows - 1)
        self.figure.set_size_inches(width, height)
        slack = width - frame - columns * panel_width if self.width is not None else 0.0
        before, above = np.roll(right + panel_width + PANEL_GAP, 1), np.roll(bottom + PANEL_GAP, 1)
        before[0] = above[0] = 0.0
        x = PADDING + y_label + slack / 2 + np.cumsum(before + left)
        y = height - PADDING - space["title"] - np.cumsum(above + top + heights)
        for i, j in np.ndindex(rows, columns):
            self._panels[i, j].set_position((x[j] / width, y[i] / height, panel_width / width, heights[i] / height))
        centre = (x[0] + x[-1] + panel_width) / 2, (y[0] + heights[0] + y[-1]) / 2
        if self._colour_bar is not None:
            size = BAR_SIZE[0], min(BAR_SIZE[1], 2 * (centre[1] - y[-1]))
            bounds = x[-1] + panel_width + right[-1] + PADDING, centre[1] - size[1] / 2, *size
            self._colour_bar.set_position(np.divide(bounds, [width, height] * 2).tolist())
        positions = {"title": (PADDING, height - PADDING), "y": (PADDING, centre[1])}
        positions |= {"x": (centre[0], y[-1] - bottom[-1] - PADDING), "notes": (PADDING, space["notes"])}
        for name, position in positions.items():
            self._figure_texts[name].set_position(np.divide(position, (width, height)).tolist())

    def _choose_panel_width(self, available: float) -> float:
        """The width of a panel in inches, of the width that the labels leave."""
        if self.width is None:
            return min(self._panel_width, max(available, MIN_PANEL_WIDTH))
        if available < MIN_PANEL_WIDTH:
            hint = "Use a larger width, or plot a part of the result"
            expected, actual = "space for the labels of this plot", f"{self.width:g}in"
            raise BNetError("width", expected=expected, actual=actual, hint=hint)
        growth = (MAX_GROWTH if self.is_narrow else 1.0) if self._has_fixed_shape else math.inf
        return min(available, growth * self._panel_width)

    def _choose_width(self, content: float) -> float:
        """The width of a figure in inches without a given one: that of its panels, or more for a long title."""
        title = self._figure_texts["title"]
        line = title.get_text().replace("\n", " ")
        points = text_width(line, float(title.get_fontsize())) * self.font_scale / NOTE_SHARE if line else 0.0
        return max(content, MIN_NOTE_WIDTH, min(PAGE_WIDTH, points / 72 + 2 * PADDING))

    def _wrap_figure_texts(self, points: float) -> None:
        """Wrap the title and the notes to a width in points."""
        self._wrap(self._figure_texts["title"], points, None)
        notes = self._figure_texts["notes"]
        size = float(notes.get_fontsize()) * self.font_scale
        notes.set_text("\n".join(wrap_text(note, size, points) for note in self.notes))

    def _measure(self, name: str) -> tuple[float, float]:
        """The width and the height in inches of a text of the figure with the space around it; 0 without text."""
        text = self._figure_texts[name]
        if not text.get_text():
            return 0.0, 0.0
        box, dpi = text.get_window_extent(), text.get_figure(root=True).dpi  # type: ignore[union-attr]
        return float(box.width) / dpi + PADDING, float(box.height) / dpi + PADDING


def lightness(colour: Any) -> float:
    """The perceived lightness of a colour, 0 to 1."""
    # Relative luminance of WCAG 2 (linear sRGB), then a gamma of 2.2 for a perceptually uniform scale.
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)) ** (1 / 2.2))


def make_norm(low: float, high: float) -> Normalize:
    """A linear scale of colours; an empty interval gets length 1."""
    return Normalize(low, high if high > low else low + 1.0)
