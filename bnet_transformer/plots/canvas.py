"""The canvas of a plot: a new figure or the user's axes, with colours, fonts, texts that fit, and an exact width."""

from __future__ import annotations

import io
import itertools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from matplotlib.gridspec import GridSpecFromSubplotSpec, SubplotSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, Formatter, MaxNLocator, ScalarFormatter
from matplotlib.transforms import Bbox

from bnet_transformer._core.files import as_path, atomic_write
from bnet_transformer._core.tensors import FloatArray
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import (
    BASE_FONT,
    GENERIC_FONTS,
    MIN_FONT_SIZE,
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
# The figure of a plot: its fonts, its layout, and how it is saved with an exact width.


PADDING = 0.06  # inches around the content
SHARED_LABEL_HEIGHT = 0.17  # inches of the label that all panels share
NOTE_SHARE = 0.97  # of the width: letters on a screen are up to 3% wider than in print
DPI = 144  # points per inch

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
DATE_METADATA = {"svg": "Date", "pdf": "CreationDate"}  # omitted, so that equal plots have equal bytes
SAVE_HINT = "Install it, use another one, or save as SVG, which has only its name"
NAMED_FONT_FORMATS = ("svg", "svgz")  # a file of these formats has the name of a font, not its letters


@contextmanager
def plot_rc_context(text_colour: str) -> Iterator[None]:
    """A context with the matplotlib settings of plots."""
    with matplotlib.style.context("default"), matplotlib.rc_context({**RC_PARAMS, "text.color": text_colour}):
        yield


@contextmanager
def silence_font_search() -> Iterator[None]:
    """A context without the messages of matplotlib about a font that is not installed."""
    logger = logging.getLogger("matplotlib.font_manager")
    level = logger.level
    logger.setLevel(logging.ERROR + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


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


class PlotFigure(Figure):
    """A Figure that saves text as text, without date and empty margins, and writes files atomically.

    With `exact_width`, files have the size of the figure. A notebook shows it without pyplot. A `missing_font` is named
    only in SVG: all texts have installed fonts, with which their sizes are measured.
    """

    text_colour = "black"
    exact_width = False
    missing_font = ""

    def draw(self, renderer: Any) -> None:
        with plot_rc_context(self.text_colour):
            super().draw(renderer)

    def get_tightbbox(self, renderer: Any = None, *args: Any, **options: Any) -> Bbox:
        """The box of the content in inches; with `exact_width`, that of the figure."""
        if self.exact_width:
            return Bbox.from_bounds(0, 0, *self.get_size_inches())
        return super().get_tightbbox(renderer, *args, **options)

    def savefig(self, fname: Any, **options: Any) -> None:
        is_path = isinstance(fname, str | os.PathLike)
        file_format = options.pop("format", None) or (as_path(fname).suffix[1:] if is_path else "")
        if not file_format:
            file_format = matplotlib.rcParams["savefig.format"]
            fname = f"{os.fspath(fname)}.{file_format}" if is_path else fname
        if self.missing_font and file_format.lower() not in NAMED_FONT_FORMATS:
            resolve_font(self.missing_font, get_font_names(), SAVE_HINT)
        if file_format.lower() in DATE_METADATA:
            options["metadata"] = {DATE_METADATA[file_format.lower()]: None, **(options.get("metadata") or {})}
        options = {"bbox_inches": "tight", "pad_inches": PADDING, **options}
        if self.exact_width:
            options |= {"bbox_inches": "tight", "pad_inches": 0}
            if file_format.lower() not in VECTOR_FORMATS:
                options = {"dpi": PRINT_DPI, **options}
        self._save(fname if is_path else None, fname, file_format, options)

    def _save(self, path: Any, target: Any, file_format: str, options: dict[str, Any]) -> None:
        """Write a file or a stream."""
        self.draw_without_rendering()  # compute the layout at the dpi of the figure, not of the file
        with (
            plot_rc_context(self.text_colour),
            self._name_missing_font(file_format),
            atomic_write(path) if path is not None else nullcontext(target) as stream,
        ):
            buffer = io.BytesIO()  # on a full disk, the writers of matplotlib raise errors other than OSError
            super().savefig(buffer if path is not None else stream, format=file_format, **options)
            if path is not None:
                stream.write_bytes(buffer.getvalue())

    @contextmanager
    def _name_missing_font(self, file_format: str) -> Iterator[None]:
        """A context in which the texts of an SVG have the font that is not installed as their first choice."""
        is_named = self.missing_font and file_format.lower() in NAMED_FONT_FORMATS
        texts: list[Any] = self.findobj(Text) if is_named else []
        families = {text: text.get_fontfamily() for text in texts if text.get_fontfamily()[0] == BASE_FONT}
        try:
            for text, names in families.items():
                text.set_fontfamily([self.missing_font, *names])
            with silence_font_search() if families else nullcontext():
                yield
        finally:
            for text, names in families.items():
                text.set_fontfamily(names)

    def _repr_png_(self) -> bytes:
        """The PNG that a notebook shows."""
        buffer = io.BytesIO()
        pad = 0 if self.exact_width else PADDING
        if self.missing_font:
            warnings.warn(
                f"font {self.missing_font!r} is not installed: {BASE_FONT} is shown. {SAVE_HINT}", stacklevel=2
            )
        self._save(None, buffer, "png", {"bbox_inches": "tight", "pad_inches": pad, "dpi": DPI})
        return buffer.getvalue()


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


def measure_content(figure: Figure) -> Bbox:
    """The box in pixels of the axes of a figure with their labels and legends, without the texts of the figure."""
    panels = [ax for ax in figure.axes if ax.get_visible()]
    legends = [legend for ax in panels if (legend := ax.get_legend()) is not None]
    boxes = [*(ax.get_tightbbox() for ax in panels), *(legend.get_window_extent() for legend in legends)]
    return Bbox.union([box for box in boxes if box is not None])


class FigureLayout(ConstrainedLayoutEngine):
    """Packs the panels as tightly as their labels allow, and puts title, shared axis labels and notes around them.

    With `exact_width`, title and notes span the width of the figure.
    """

    def __init__(self, exact_width: bool = False, font_scale: float = 1.0) -> None:
        super().__init__(compress=True)
        self.exact_width, self.font_scale = exact_width, font_scale
        self.texts: dict[str, Text] = {}
        self.notes: list[str] = []
        self.size: tuple[float, ...] = ()
        self.panels: Sequence[Axes] = ()

    def execute(self, fig: Any) -> None:
        size = tuple(fig.get_size_inches())
        if size != self.size and self.panels[0].get_subplotspec() is not None:
            if self.exact_width:
                left = ((SHARED_LABEL_HEIGHT if "y" in self.texts else 0) + PADDING / 2) / size[0]
                self.set(rect=(left, 0, 1 - left - PADDING / 2 / size[0], 1))
            super().execute(fig)  # a second run would move the panels slightly
        self.size = size
        inches = fig.dpi_scale_trans.inverted()
        box = inches.transform_bbox(measure_content(fig))
        panels = inches.transform_bbox(Bbox.union([ax.bbox for ax in self.panels if ax.get_visible()]))
        left = box.x0 - (SHARED_LABEL_HEIGHT if "y" in self.texts else 0.0)
        right = box.x1
        if self.exact_width:
            left, right = PADDING, size[0] - PADDING
        bottom = box.y0 - PADDING
        positions = {
            "y": (box.x0 - PADDING, (panels.y0 + panels.y1) / 2),
            "x": ((panels.x0 + panels.x1) / 2, bottom),
            "title": (left, box.y1 + PADDING),
            "notes": (left, bottom - (SHARED_LABEL_HEIGHT if "x" in self.texts else 0.0)),
        }
        for name, text in self.texts.items():
            text.set_position(np.divide(positions[name], size).tolist())
        if "notes" in self.texts:
            text = self.texts["notes"]
            points = max(120.0, NOTE_SHARE * 72 * (right - left)) / self.font_scale
            text.set_text("\n".join(wrap_text(note, float(text.get_fontsize()), points) for note in self.notes))


# --------------------------------------------------------------------------------------------------------------------
# Fit texts to the space of a figure with a given width, or of the axes of a user.
#
# All sizes are measured in the laid out figure. Labels are wrapped, ticks are thinned, legends get fewer columns.


SPACE_PADDING = 0.03  # inches between the content and the end of the space of the user's axes
MIN_TICK_GAP = 2.0  # points between the labels of two ticks
MIN_TICKS = 2
MAX_LABEL_LINES = 3


def get_pixels(ax: Axes) -> float:
    """The number of pixels of a point (1/72 inch)."""
    return float(ax.figure.dpi) / 72


def get_child_axes(ax: Axes) -> list[Axes]:
    """The axes inside other axes, such as a colour bar."""
    return [child for child in ax.child_axes if isinstance(child, Axes)]


def measure_axes(ax: Axes) -> tuple[float, float]:
    """The width and height of axes in points."""
    box = ax.get_window_extent()
    return float(box.width / get_pixels(ax)), float(box.height / get_pixels(ax))


def thin_numeric_ticks(ax: Axes) -> None:
    """Reduce the ticks of axes with numbers until their labels do not overlap."""
    for axis, side in ((ax.xaxis, 0), (ax.yaxis, 1)):
        locator, gap = axis.get_major_locator(), get_pixels(ax) * MIN_TICK_GAP
        if isinstance(locator, MaxNLocator) and axis.get_scale() == "linear":
            for count in range(8, MIN_TICKS - 1, -1):
                if not _labels_overlap(axis, side, gap):
                    break
                locator.set_params(nbins=count)
        elif isinstance(locator, FixedLocator) and axis.get_scale() != "linear":
            positions, labels = axis.get_majorticklocs(), [label.get_text() for label in axis.get_ticklabels()]
            while len(positions) > MIN_TICKS and _labels_overlap(axis, side, gap):
                positions, labels = positions[::2], labels[::2]
                axis.set_ticks(positions, labels=labels)


def _labels_overlap(axis: Any, side: int, gap: float) -> bool:
    """Whether the labels of neighbouring ticks overlap."""
    limits = sorted(axis.get_view_interval())
    labels = [
        tick.label1
        for tick, position in zip(axis.get_major_ticks(), axis.get_majorticklocs(), strict=False)
        if tick.label1.get_visible() and limits[0] <= position <= limits[1]
    ]
    ends = sorted(tuple(label.get_window_extent().get_points()[:, side]) for label in labels if label.get_text())
    return any(first[1] + gap > second[0] for first, second in itertools.pairwise(ends))


def wrap_axis_labels(ax: Axes, max_width: float) -> None:
    """Wrap the label of the x axis to a width in points, and that of the y axis to the height of the axes."""
    _wrap(ax.xaxis.label, max_width)
    _wrap(ax.yaxis.label, max(40.0, measure_axes(ax)[1]))


def _wrap(label: Text, points: float, max_lines: int = MAX_LABEL_LINES) -> None:
    """Wrap a label, which may be wrapped already."""
    text = label.get_text()
    if text:
        label.set_text(wrap_text(text.replace("\n", " "), float(label.get_fontsize()), points, max_lines))


def legend_width(ax: Axes) -> float:
    """The width of the legend of axes in points."""
    legend = ax.get_legend()
    return 0.0 if legend is None else float(legend.get_window_extent().width / get_pixels(ax))


def shrink_lines(ax: Axes, factor: float) -> None:
    """Multiply the widths of lines and the sizes of markers."""
    for line in ax.lines:
        line.set_linewidth(line.get_linewidth() * factor)
        line.set_markersize(line.get_markersize() * factor)
        line.set_markeredgewidth(line.get_markeredgewidth() * factor)
    for collection in ax.collections:
        collection.set_linewidth([width * factor for width in np.atleast_1d(collection.get_linewidth())])
    for patch in ax.patches:
        patch.set_linewidth(patch.get_linewidth() * factor)


# the space of the user's axes


def find_space(ax: Axes) -> Bbox:
    """The space of axes in pixels: their cell of the grid of subplots, or up to the middle of the gaps to others."""
    figure = ax.figure
    spec = ax.get_subplotspec()
    box = _space_between(ax, figure) if spec is None else _cell_of(spec, figure)
    title = getattr(figure, "_suptitle", None)
    bounds = figure.bbox
    top = 1.0
    if title is not None and title.get_text():
        top = min(1.0, (title.get_window_extent().y0 - bounds.y0) / bounds.height)
    x0, x1 = (bounds.x0 + x * bounds.width for x in (box.x0, box.x1))
    y0, y1 = (bounds.y0 + y * bounds.height for y in (box.y0, min(box.y1, top)))
    pad = SPACE_PADDING * figure.dpi
    return Bbox.from_extents(x0 + pad, y0 + pad, x1 - pad, y1 - pad)


def measure_cell(ax: Axes) -> float:
    """The smaller side in inches of the space of axes; of a grid of subplots the same for all cells of one size."""
    spec, box = ax.get_subplotspec(), ax.figure.bbox
    if spec is None or isinstance(spec.get_gridspec(), GridSpecFromSubplotSpec):
        space = find_space(ax)
        return float(min(space.width, space.height) / ax.figure.dpi)
    grid = spec.get_gridspec()
    width = box.width * len(spec.colspan) / grid.ncols
    return float(min(width, box.height * len(spec.rowspan) / grid.nrows) / ax.figure.dpi)


def _cell_of(spec: SubplotSpec, figure: Any) -> Bbox:
    """The cell of a grid with half of the gaps around it, in fractions of the figure."""
    grid: Any = spec.get_gridspec()
    outer = Bbox.unit()
    if isinstance(grid, GridSpecFromSubplotSpec):
        outer = _cell_of(grid._subplot_spec, figure)  # type: ignore[attr-defined]
    bottoms, tops, lefts, rights = grid.get_grid_positions(figure)
    rows, columns = spec.rowspan, spec.colspan

    def middle(ends: Any, starts: Any, k: int, last: int, edges: tuple[float, float]) -> float:
        return edges[0] if k == 0 else edges[1] if k > last else float(ends[k - 1] + starts[k]) / 2

    x0, x1 = (middle(rights, lefts, k, grid.ncols - 1, (outer.x0, outer.x1)) for k in (columns.start, columns.stop))
    y1, y0 = (middle(bottoms, tops, k, grid.nrows - 1, (outer.y1, outer.y0)) for k in (rows.start, rows.stop))
    return Bbox.from_extents(x0, y0, x1, y1)


def _space_between(ax: Axes, figure: Any) -> Bbox:
    """The space up to the middle of the gaps to other axes, in fractions of the figure."""
    box_of_axes = ax.get_position(original=True)
    x0, y0, x1, y1 = 0.0, 0.0, 1.0, 1.0
    for other in figure.axes:
        box = other.get_position(original=True)
        if other is ax or not other.get_visible():
            continue
        if box.y0 < box_of_axes.y1 and box_of_axes.y0 < box.y1:
            x0 = max(x0, (box.x1 + box_of_axes.x0) / 2) if box.x1 <= box_of_axes.x0 else x0
            x1 = min(x1, (box.x0 + box_of_axes.x1) / 2) if box.x0 >= box_of_axes.x1 else x1
        if box.x0 < box_of_axes.x1 and box_of_axes.x0 < box.x1:
            y0 = max(y0, (box.y1 + box_of_axes.y0) / 2) if box.y1 <= box_of_axes.y0 else y0
            y1 = min(y1, (box.y0 + box_of_axes.y1) / 2) if box.y0 >= box_of_axes.y1 else y1
    return Bbox.from_extents(x0, y0, x1, y1)


def move_into(ax: Axes, space: Bbox, min_share: float) -> bool:
    """Move axes so that their labels are inside a space in pixels; return whether they have `min_share` of it."""
    tight, legend = ax.get_tightbbox(), ax.get_legend()
    box = ax.get_window_extent()  # after get_tightbbox, which applies the aspect
    if tight is None:
        return True
    if legend is not None:
        extent = legend.get_window_extent()
        tight = Bbox.from_extents(tight.x0, min(tight.y0, extent.y0), tight.x1, max(tight.y1, extent.y1))
    margins = box.x0 - tight.x0, box.y0 - tight.y0, tight.x1 - box.x1, tight.y1 - box.y1
    left, bottom, right, top = (max(0.0, float(margin)) for margin in margins)
    target = [space.x0 + left, space.y0 + bottom, space.x1 - right, space.y1 - top]
    is_large = target[3] - target[1] >= min_share * space.height and target[2] - target[0] >= min_share * space.width
    target[2] = max(target[2], target[0] + 0.1 * space.width)
    target[3] = max(target[3], target[1] + 0.1 * space.height)
    box, bounds = Bbox.from_extents(*target), ax.figure.bbox
    x0, y0 = (box.x0 - bounds.x0) / bounds.width, (box.y0 - bounds.y0) / bounds.height
    ax.set_position((x0, y0, box.width / bounds.width, box.height / bounds.height))
    ax.apply_aspect()
    return bool(is_large)


# --------------------------------------------------------------------------------------------------------------------
# Fit the panels of a plot to the width of a figure, or into the axes of a user.


MAX_GROWTH = 0.5  # of the height of a figure, to fill its width
FIT_STEPS = 2  # wrapped labels change the size of panels, on which labels depend
SMALL_TEXT, SMALL_LINES = 0.72, 0.65  # the factors of the sizes of texts and lines in a small space
SMALL_TITLE = 5.5  # points
SMALL_LEGEND = {
    "handlelength": 1.0,
    "labelspacing": 0.2,
    "handletextpad": 0.4,
    "columnspacing": 0.8,
    "title_fontsize": 5,
}
MIN_PANEL_SHARE = 0.38  # of the space of the user's axes; notes are omitted before a panel gets smaller


def fit_to_width(canvas: Canvas, figure: PlotFigure, width: float) -> None:
    """Lay out the figure, fit its texts, and set the height of the figure to that of its content.

    Args:
        canvas: The canvas with all panels drawn.
        figure: The figure of the canvas.
        width: The width of the figure in inches.
    """
    canvas.is_laid_out = True
    canvas.add_figure_texts()
    points = NOTE_SHARE * 72 * (width - 2 * PADDING)
    for ax in canvas.layout.panels:
        _fit_legend(canvas, ax, points)  # the layout of a legend that is too wide leaves no space for the panel
        wrap_axis_labels(ax, points / 1.3)
    for _ in range(FIT_STEPS):
        canvas.layout.size = ()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "constrained_layout not applied", UserWarning)
            canvas.layout.execute(figure)
        _fit_texts(canvas, points)
        _fill_width(canvas, figure)
    canvas.layout.size = ()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "constrained_layout not applied", UserWarning)
        try:
            canvas.layout.execute(figure)
        except UserWarning:
            raise canvas.narrow_error() from None
    canvas.finish_panels()
    canvas.add_figure_texts()
    canvas.layout.execute(figure)
    figure.set_layout_engine("none")
    _crop_height(figure)


def _fill_width(canvas: Canvas, figure: PlotFigure) -> None:
    """Increase the height of a narrow figure if panels of a fixed shape do not fill its width."""
    panels = [ax for ax in canvas.layout.panels if ax.get_visible()]
    if not canvas.is_narrow or panels[0].get_aspect() == "auto" or panels[0].get_subplotspec() is None:
        return
    width, height = figure.get_size_inches()
    inches = figure.dpi_scale_trans.inverted()
    content = inches.transform_bbox(measure_content(figure))
    box = inches.transform_bbox(Bbox.union([ax.get_window_extent() for ax in panels]))
    slack = width - 2 * PADDING - content.width - (SHARED_LABEL_HEIGHT if "y" in canvas.layout.texts else 0.0)
    figure.set_size_inches(width, height + min(max(0.0, slack) * box.height / box.width, MAX_GROWTH * height))


def _fit_texts(canvas: Canvas, width: float) -> None:
    """Thin ticks, wrap labels and reduce the columns of legends; `width` is that of the figure in points."""
    panels = [ax for ax in canvas.layout.panels if ax.get_visible()]
    _show_tick_labels(canvas)
    for ax in panels:
        thin_numeric_ticks(ax)
        points = measure_axes(ax)[0]
        if len(panels) == 1:
            box, pixels = ax.get_window_extent(), get_pixels(ax)
            middle = (box.x0 + box.x1) / 2 / pixels
            points = 2 * min(middle, 72 * canvas.page_width - middle) - 6
        wrap_axis_labels(ax, max(points, 60.0) / canvas.font_scale)
        for bar in get_child_axes(ax):
            wrap_axis_labels(bar, width)
        if canvas.panel_titles.get(ax):
            _wrap(ax.title, points / canvas.font_scale, 2)
        _fit_legend(canvas, ax, width)


def _show_tick_labels(canvas: Canvas) -> None:
    """Show the tick labels that fit the present sizes of the panels."""
    for ticks in canvas.tick_labels.values():
        is_y = ticks.axis_name == "y"
        low, high = ticks.ax.get_ylim() if is_y else ticks.ax.get_xlim()
        canvas.show_tick_labels(ticks, measure_axes(ticks.ax)[is_y] / abs(high - low))


def _fit_legend(canvas: Canvas, ax: Axes, width: float) -> None:
    """Reduce the columns of a legend until it is not wider than `width` points, then shorten its texts.

    A wide legend above the panel is moved to the left edge.
    """
    options = canvas.legends.get(ax)
    if options is None:
        return
    is_inside = "bbox_to_anchor" not in options
    limit = max(40.0, 0.9 * measure_axes(ax)[0]) if is_inside else width
    if canvas.user_axes is not None and not is_inside and options.get("loc") == "upper left":
        limit = (canvas.space.x1 - ax.get_window_extent().x0) / get_pixels(ax)
    while options.get("ncols", 1) > 1 and legend_width(ax) > limit:
        options["ncols"] -= 1
        canvas.show_legend(ax)
    if options.get("loc") == "lower left":  # above the panel
        box, pixels = ax.get_window_extent(), get_pixels(ax)
        left = (box.x0 - canvas.space.x0) / pixels
        exceeds_width = legend_width(ax) > width - left
        options["bbox_to_anchor"] = (-max(0.0, left - 4) * pixels / box.width if exceeds_width else 0, 1)
        canvas.show_legend(ax)
    legend, excess = ax.get_legend(), legend_width(ax) - limit
    if legend is not None and excess > 0:
        max_text_width = max(text.get_window_extent().width for text in legend.get_texts()) / get_pixels(ax)
        points = max(8.0, 0.97 * (max_text_width - excess))
        for text in legend.get_texts():
            text.set_text(cut(text.get_text(), float(text.get_fontsize()), points))


def _crop_height(figure: PlotFigure) -> None:
    """Set the height of the figure to that of its content."""
    width, height = figure.get_size_inches()
    inches = figure.dpi_scale_trans.inverted()
    boxes = [measure_content(figure), *(text.get_window_extent() for text in figure.texts)]
    box = inches.transform_bbox(Bbox.union(boxes))
    low, new_height = box.y0 - PADDING, box.height + 2 * PADDING

    def move(y: float) -> float:
        return float((y * height - low) / new_height)

    boxes_by_axes = [(ax, ax.get_position(original=True)) for ax in figure.axes]
    figure.set_size_inches(width, new_height)
    for ax, position_box in boxes_by_axes:
        ax.set_position(
            (position_box.x0, move(position_box.y0), position_box.width, move(position_box.y1) - move(position_box.y0))
        )
    for text in figure.texts:
        x, y = text.get_position()
        text.set_position((x, move(y)))


def fit_into_axes(canvas: Canvas, ax: Axes, title: str) -> None:
    """Fit title, labels and notes into the space of the user's axes; move the axes unless a layout engine does.

    Args:
        canvas: The canvas with the panel drawn.
        ax: The axes of the user.
        title: The title.
    """
    if canvas.is_small:
        shrink_lines(ax, SMALL_LINES)
        _shrink(canvas, ax)
    label = ax.get_xlabel()
    canvas.is_laid_out = True
    _fit_user_axes(canvas, ax, title, label)
    canvas.finish_panels()
    if canvas.is_small:
        _shrink(canvas, ax)
    _fit_user_axes(canvas, ax, title, label)


def _shrink(canvas: Canvas, ax: Axes) -> None:
    """Reduce the sizes of all texts in a small space, to at least the smallest legible size."""
    if ax in canvas.legends:
        fonts = {**canvas.legends[ax]["prop"], "size": MIN_FONT_SIZE}
        canvas.legends[ax] |= SMALL_LEGEND | {"prop": fonts}
        canvas.show_legend(ax)
    for axis in [axis for panel in (ax, *ax.child_axes) for axis in (panel.xaxis, panel.yaxis)]:
        size = float(axis.get_ticklabels()[0].get_fontsize()) if axis.get_ticklabels() else MIN_FONT_SIZE
        axis.set_tick_params(labelsize=max(MIN_FONT_SIZE, size * SMALL_TEXT), pad=1.5)
    for text in ax.findobj(Text):
        text.set_fontsize(max(MIN_FONT_SIZE, float(text.get_fontsize()) * SMALL_TEXT))


def _fit_user_axes(canvas: Canvas, ax: Axes, title: str, label: str) -> None:
    """Fit with the notes; without them, and with a title of one line, if the panel would be too small."""
    for notes, lines in ((canvas.notes, 3), ([], 3), ([], 1)):
        is_large = True
        for _ in range(FIT_STEPS + 1):
            is_large = _fit_iteration(canvas, ax, title, label, notes, lines)
        _show_tick_labels(canvas)
        if is_large:
            return


def _fit_iteration(canvas: Canvas, ax: Axes, title: str, label: str, notes: Sequence[str], title_lines: int) -> bool:
    """Wrap and thin the texts for the current position of the axes, and move the axes."""
    points, box, space = get_pixels(ax), ax.get_window_extent(), canvas.space
    middle = (box.x0 + box.x1) / 2
    centred = 2 * min(middle - space.x0, space.x1 - middle) / points / canvas.font_scale
    ax.set_xlabel(label)
    wrap_axis_labels(ax, centred)
    size = float(ax.xaxis.label.get_fontsize())
    lines = [ax.get_xlabel(), *(wrap_text(note, size, centred) for note in notes)]
    ax.set_xlabel("\n".join(line for line in lines if line))
    for bar in get_child_axes(ax):
        wrap_axis_labels(bar, space.width / points)
    _show_tick_labels(canvas)
    thin_numeric_ticks(ax)
    _fit_legend(canvas, ax, space.width / points)
    _set_title(canvas, ax, title, (space.x1 - box.x0) / points, title_lines)
    engine: Any = ax.get_figure(root=True).get_layout_engine()  # type: ignore[union-attr]
    if engine is not None:
        engine.execute(ax.get_figure(root=True))
        new = ax.get_window_extent()
        return bool(new.height >= MIN_PANEL_SHARE * space.height)
    return move_into(ax, space, MIN_PANEL_SHARE)


def _set_title(canvas: Canvas, ax: Axes, title: str, width: float, lines: int) -> None:
    """Set the title of the user's axes, above a legend that is above the panel."""
    (line,), fonts = canvas.format_texts([title], 120) if title else ([""], [])
    size = SMALL_TITLE if canvas.is_small else canvas.title_size
    legend, pad = ax.get_legend(), 3 if canvas.is_small else 8
    if legend is not None and title:
        overlap = legend.get_window_extent().y1 - ax.get_window_extent().y1
        pad = max(pad, overlap / get_pixels(ax) + 2)
    text = wrap_text(line, size * canvas.font_scale, width, lines)
    style: Any = {"fontfamily": fonts} if fonts else {}
    ax.set_title(text, loc="left", pad=pad, fontsize=size, color=canvas.colours["ink"], **style)


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

    def label_rows(self, ax: Axes, labels: Sequence[object], inches: float, max_length: int = MAX_LABEL_LENGTH) -> None:
        """Label the rows of a panel from top to bottom, without tick marks; `inches` is its height in a new figure."""
        ax.set_ylim(len(labels) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        self.set_tick_labels(ax, "y", labels, self.panel_size(ax, (0.0, inches))[1], max_length)

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
