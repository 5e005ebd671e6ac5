"""Matrices with named axes: heat maps, panels of heat maps and bars, with labels and optional intervals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int, check_mapping, check_names
from bnet_transformer._core.tensors import FloatArray, copy_to_tensor, to_numpy
from bnet_transformer._core.tokens import distinguish
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.figures.attention_grid import describe_omission
from bnet_transformer.figures.fonts import MIN_FONT_SIZE, format_token, text_width
from bnet_transformer.plots.canvas import (
    MAX_LABEL_LENGTH,
    SMALL_FONT_SIZE,
    Canvas,
    choose_unit,
    format_digits,
    format_number,
    make_norm,
)

# --------------------------------------------------------------------------------------------------------------------
# The words of an axis without special tokens, with a note about what is not shown.


def select_words(
    canvas: Canvas, tokens: Sequence[str], flags: Sequence[bool], special: bool, masses: FloatArray | None = None
) -> list[int]:
    """The indices of the words to show: all, or with `special=False` those that are no special tokens.

    `masses` are the shares of attention that go to each word, `[..., j]`, with NaN for none; the note has the mean
    share that goes to the words that are not shown.
    """
    check_choice("special", special, (True, False))
    if special:
        return list(range(len(tokens)))
    if len(flags) != len(tokens):
        hint = "Compute the result from sentences, or select words by other options"
        raise BNetError(
            "special", expected="True: the special tokens of this result are unknown", actual=special, hint=hint
        )
    shown = [k for k, is_special in enumerate(flags) if not is_special]
    if not shown:
        raise BNetError("special", expected="words that are no special tokens", actual="all words are special")
    hidden = [k for k in range(len(tokens)) if flags[k]]
    if hidden:
        share = None if masses is None else float(np.nansum(masses[..., hidden], -1).mean())
        canvas.add_note(f"{describe_omission([tokens[k] for k in hidden], 'shown', share)}.")
    return shown


MAX_PANELS = 256
MAX_GAPPED_CELLS = 40  # with more rows or columns, cells have no gaps and are an image in SVG and PDF
MIN_PANEL_WIDTHS = {6: 1.0, MAX_PANELS: 0.44}  # inches, by the number of panels in a row, in a figure with a width
NUMBER_SIZES = (6.5, 6.0, 5.5, MIN_FONT_SIZE)  # points; the largest that fits is chosen
ERROR_SIZE = 5.2
MIN_LINE_CELL = (9.0, 16.0)  # points: the interval in a smaller cell is a bar
MAX_PANEL_WIDTH = 2.0  # inches of one of several matrices
MAX_CELL_RATIO = 1.6  # of the height and the width of a cell in a figure with a width
MIN_BAR_CELL = (4.0, 6.0)  # points: a smaller cell has no interval


@dataclass(frozen=True)
class HeatMapData:
    """A matrix with the labels of its rows and columns, its name, and the title of its row of panels.

    `low` and `high` are drawn as an interval in each cell; `error` is written below its number.
    """

    values: FloatArray = field(repr=False)
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    name: str = ""
    row_title: str = ""
    low: FloatArray | None = field(default=None, repr=False)
    high: FloatArray | None = field(default=None, repr=False)
    error: FloatArray | None = field(default=None, repr=False)

    def select(self, rows: Sequence[int], columns: Sequence[int]) -> HeatMapData:
        """The data of some rows and columns."""
        index, names = np.ix_(rows, columns), ("values", "low", "high", "error")
        parts: Any = {name: getattr(self, name)[index] for name in names if getattr(self, name) is not None}
        parts["row_labels"] = tuple(self.row_labels[k] for k in rows)
        parts["column_labels"] = tuple(self.column_labels[k] for k in columns)
        return replace(self, **parts)

    def scale(self, unit: float) -> HeatMapData:
        """The same data with all numbers multiplied by a factor."""
        arrays = {name: getattr(self, name) for name in ("values", "low", "high", "error")}
        return replace(self, **{name: array * unit for name, array in arrays.items() if array is not None})


def draw_matrix(
    canvas: Canvas,
    panels: Sequence[HeatMapData | None],
    *,
    value_label: str,
    x: str,
    y: str,
    num_columns: int = 1,
    limits: tuple[float, float] | None = None,
    norm: Normalize | None = None,
    square: bool = False,
    size: tuple[float, float] | None = None,
    write_cells: Callable[[Axes, Any, float, float], None] | None = None,
) -> list[Axes]:
    """Draw matrices on one scale, `num_columns` in a row, with numbers in the cells if they fit; None draws no panel.

    A panel has a `size` in inches, by default by the number of its cells; it is at most as wide as the page. Only the
    outer panels have labels. `norm` is a nonlinear scale of colours. `write_cells(ax, image, width, height)` writes
    into the cells instead, where `width` and `height` are those of a cell in inches.
    """
    filled = [data for data in panels if data is not None]
    if len(filled) > MAX_PANELS:
        hint = "Plot fewer panels with slice=, head= or do, such as s.do(c=1)"
        raise BudgetError("plot", expected=f"at most {MAX_PANELS} panels", actual=f"{len(filled)}", hint=hint)
    if norm is None:
        low, high = limits or shared_limits([data.values for data in filled])
        unit, unit_text = choose_unit(np.array([low, high]))
        norm, value_label = make_norm(low * unit, high * unit), value_label + unit_text
        panels = [None if data is None else data.scale(unit) for data in panels]
        filled = [data for data in panels if data is not None]
    is_single, first = len(panels) == 1, filled[0]
    width, height = size or _choose_size(canvas, first, is_single, square)
    shape = math.ceil(len(panels) / num_columns), num_columns
    axes = canvas.add_panels(*shape, width, height, has_fixed_shape=square or not is_single)
    names = ["" if is_single or data is None else data.name for data in panels]
    is_titled = [k < num_columns or names[k] != names[k - num_columns] for k in range(len(panels))]
    longest = canvas.limit_label_length(MAX_LABEL_LENGTH)
    image: Any = None
    for k, (ax, data) in enumerate(itertools.zip_longest(axes, panels)):
        if data is None:
            ax.set_visible(False)
            continue
        image = draw_cells(canvas, ax, data, norm)
        canvas.set_panel_title(ax, names[k] if is_titled[k] else "")
        ax.set_xticks([])
        ax.set_yticks([])
        if k % num_columns == 0:
            canvas.set_axis_labels(ax, y=data.row_title)
            canvas.set_tick_labels(ax, "y", first.row_labels, longest if square or not is_single else 2 * longest)
        if k + num_columns >= len(panels) or panels[k + num_columns] is None:
            canvas.set_tick_labels(ax, "x", first.column_labels, longest)
    shown = [ax for ax in axes if ax.get_visible()]

    def fill_cells() -> None:
        cell = np.divide(canvas.panel_size(shown[0]), first.values.shape[::-1]).tolist()
        if write_cells is not None:
            write_cells(shown[0], image, *cell)
        elif first.low is not None:
            draw_intervals(canvas, shown[0], first, image, (cell[0], cell[1]))
        else:
            write_numbers(canvas, shown, filled, image, (cell[0], cell[1]))

    canvas.draw_when_sized(fill_cells)
    if is_single:
        canvas.set_axis_labels(shown[0], x, y)
    else:
        canvas.set_shared_labels(x, y)
    canvas.add_colour_bar(image, value_label)
    return shown


def _choose_size(canvas: Canvas, data: HeatMapData, is_single: bool, square: bool) -> tuple[float, float]:
    """The size of a panel in inches by the number of its cells."""
    rows, columns = data.values.shape
    if not is_single:
        return MAX_PANEL_WIDTH, MAX_PANEL_WIDTH * (1.0 if square else 0.8)
    if square:
        side = max(2.1, 0.33 * max(rows, columns))
        return side, side
    width = min(canvas.page_width - 1.0, max(2.4, 0.45 * columns))
    if data.low is None and data.error is None:
        return width, min(4.0, max(1.3, 0.3 * rows))
    height = min(7.0, max(1.4, (0.38 if data.low is None else 0.5) * rows))
    return width, min(height, max(1.4, MAX_CELL_RATIO * width / columns * rows))


def count_columns(canvas: Canvas, count: int, limit: int, smallest: float | None = None) -> int:
    """The number of panels in a row: at most `limit`; in a figure with a width, as many as have the smallest width."""
    if canvas.width is None:
        return min(limit, count)
    smallest = smallest or next(width for limit_count, width in MIN_PANEL_WIDTHS.items() if count <= limit_count)
    fitting = max(1, min(limit, count, int((canvas.width - 1.0) / smallest)))
    return math.ceil(count / math.ceil(count / fitting))


def draw_cells(canvas: Canvas, ax: Axes, data: HeatMapData, norm: Normalize) -> Any:
    """Draw the cells of a matrix, the first row on top, NaN as blank; return the image, which has the colours."""
    values = np.ma.masked_invalid(data.values)
    rows, columns = values.shape
    style: Any = {"cmap": canvas.make_colour_map(norm), "norm": norm}
    image: Any
    if max(rows, columns) > MAX_GAPPED_CELLS:
        image = ax.imshow(values, aspect="auto", interpolation="nearest", **style)
    else:
        edges = (np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5)
        image = ax.pcolormesh(*edges, values, edgecolors=canvas.colours["paper"], linewidth=0.6, **style)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    canvas.draw_frame(ax)
    return image


def frame_cell(canvas: Canvas, ax: Axes, row: int, column: int) -> None:
    """Frame one cell in red."""
    style: Any = {"edgecolor": canvas.colours["q"], "linewidth": 1.5, "fill": False, "gid": f"frame_{row}_{column}"}
    ax.add_patch(Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, **style))


def shared_limits(arrays: Sequence[FloatArray]) -> tuple[float, float]:
    """The ends of a scale: from 0 up, or symmetric about 0 if there are negative numbers."""
    numbers = np.concatenate([array.ravel() for array in arrays])
    low, high = float(np.nanmin(numbers, initial=0.0)), float(np.nanmax(numbers, initial=0.0))
    return (-max(-low, high), max(-low, high)) if low < 0 else (0.0, high or 1.0)


def probability_limits(arrays: Sequence[FloatArray]) -> tuple[float, float]:
    """The ends of a scale of probabilities: from 0 to 1, or to a smaller round number above all of them."""
    largest = max(float(np.nanmax(array, initial=0.0)) for array in arrays)
    return 0.0, next(end for end in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, math.inf) if largest <= end)


def write_numbers(
    canvas: Canvas, panels: Sequence[Axes], maps: Sequence[HeatMapData], image: Any, cell: tuple[float, float]
) -> bool:
    """Write the number of each cell, with its error below it, in a colour with contrast; return whether they fit.

    `cell` is the size of a cell in inches. If one number does not fit, none is written, so that no cell is misread.
    """
    finite = np.concatenate([data.values[np.isfinite(data.values)] for data in maps])
    largest, is_integer = float(np.abs(finite).max(initial=0.0)), bool(np.all(np.mod(finite, 1) == 0))
    texts = [
        {
            index: format_number(float(value), largest, is_integer=is_integer)
            for index, value in np.ndenumerate(data.values)
            if not np.isnan(value)
        }
        for data in maps
    ]
    size = fit_font_size(canvas, {text for by_cell in texts for text in by_cell.values()}, cell)
    if size is None:
        return False
    errors = [_format_errors(data, largest) for data in maps]
    has_errors = 72 * cell[1] >= 1.25 * (size + ERROR_SIZE) + 1 and bool(
        fit_font_size(canvas, {text for by_cell in errors for text in by_cell.values()}, cell)
    )
    for ax, data, by_cell, error_by_cell in zip(panels, maps, texts, errors, strict=True):
        has_two_lines = has_errors and data.error is not None
        for (i, j), text in by_cell.items():
            colour = canvas.contrasting_colour(image.cmap(image.norm(data.values[i, j])))
            style: Any = {"ha": "center", "va": "center_baseline", "color": colour}
            canvas.add_text(ax, j, i - 0.14 if has_two_lines else i, text, fontsize=size, **style)
            if has_two_lines and (i, j) in error_by_cell:
                canvas.add_text(ax, j, i + 0.24, error_by_cell[i, j], fontsize=ERROR_SIZE, **style)
    return True


def _format_errors(data: HeatMapData, largest: float) -> dict[tuple[int, ...], str]:
    """The texts of the errors that are not 0."""
    if data.error is None:
        return {}
    numbers = {index: float(error) for index, error in np.ndenumerate(data.error) if error >= 0.005}
    return {index: f"±{format_number(error, largest if largest >= 100 else 1.0)}" for index, error in numbers.items()}


def fit_font_size(canvas: Canvas, texts: Collection[str], cell: tuple[float, float]) -> float | None:
    """The largest size in points at which all texts fit into a cell with a size in inches; None if none does."""
    width, height = 72 * cell[0] - 2.5, 72 * cell[1]
    longest = sorted(texts, key=len)[-12:]
    for size in NUMBER_SIZES:
        max_text_width = max((text_width(text, size) for text in longest), default=0.0)
        if canvas.font_scale * max_text_width <= width and 1.25 * size <= height:
            return size
    return None


def draw_intervals(canvas: Canvas, ax: Axes, data: HeatMapData, image: Any, cell: tuple[float, float]) -> None:
    """Draw the interval of each cell as a vertical line, on one scale for all cells; a dot is the value.

    In a small cell, the interval is a bar, with a line for the value. `cell` is the size of a cell in inches.
    """
    assert data.low is not None and data.high is not None
    smallest, largest = float(np.nanmin(data.low, initial=0.0)), float(np.nanmax(data.high, initial=0.0))
    span = (largest - smallest) or 1.0
    points = 72 * cell[0], 72 * cell[1]
    if points[0] < MIN_BAR_CELL[0] or points[1] < MIN_BAR_CELL[1]:
        max_length = float(np.nanmax(data.high - data.low, initial=0.0))
        canvas.add_note(f"Intervals do not fit into the cells; the widest is {format_digits(max_length, 2)}.")
        return
    is_bar = points[0] < MIN_LINE_CELL[0] or points[1] < MIN_LINE_CELL[1]

    def height(value: Any) -> Any:
        return 0.4 - 0.8 * (value - smallest) / span

    lines, zeros, marks, colours, fills = [], [], [], [], []
    for (i, j), value in np.ndenumerate(data.values):
        if np.isnan(value):
            continue
        fill = image.cmap(image.norm(value))
        lines.append([(j, i + height(data.low[i, j])), (j, i + height(data.high[i, j]))])
        zeros.append([(j - 0.3, i + height(0.0)), (j + 0.3, i + height(0.0))])
        marks.append([(j - 0.3, i + height(value)), (j + 0.3, i + height(value))])
        colours.append(canvas.contrasting_colour(fill))
        fills.append(fill)
    if not lines:
        return
    ax.add_collection(LineCollection(zeros, colors=colours, linewidths=0.5, alpha=0.6, label="zero"))
    thickness = 0.5 * points[0] if is_bar else 1.1
    ax.add_collection(
        LineCollection(lines, colors=colours, linewidths=thickness, capstyle="butt", label="interval", zorder=2.5)
    )
    if is_bar:
        ax.add_collection(LineCollection(marks, colors=fills, linewidths=0.9, label="value", zorder=3))
    else:
        x, y = np.array(marks).mean(1).T
        ax.scatter(x, y, s=8, c=colours, linewidths=0, zorder=3)
    parts = "interval (bar) and value (line in it)" if is_bar else "value (dot) and interval"
    canvas.add_note(
        f"Cell: {parts}, on a scale from {format_digits(smallest, 2)} to {format_digits(largest, 2)}; thin line: 0."
    )


def tick_label_width(labels: Sequence[str], max_length: int = MAX_LABEL_LENGTH) -> float:
    """The width in inches of labels at the left of an axis."""
    longest = sorted({format_token(word, max_length) for word in labels}, key=lambda word: (len(word), word))[-3:]
    return max(text_width(word, SMALL_FONT_SIZE + 0.5) for word in longest) / 72 + 0.3


# --------------------------------------------------------------------------------------------------------------------
# Arrays with named axes, labels and optional intervals, and their plots: bars, heat maps, panels of heat maps.


MAX_UPRIGHT_BARS = 16  # with more bars than this, bars are horizontal
MAX_BAR_NUMBERS = 60  # more bars have no numbers


@dataclass(frozen=True)
class LabelledArray:
    """An array with named axes; `low` and `high` are the ends of an interval around each value, or None.

    `labels[axis]` names the positions along an axis. NaN is a missing value.
    """

    values: FloatArray = field(repr=False)
    axes: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    low: FloatArray | None = field(default=None, repr=False)
    high: FloatArray | None = field(default=None, repr=False)
    value_label: str = ""

    @property
    def is_distribution(self) -> bool:
        """True if no value is negative and each row sums to 1."""
        smallest, sums = np.nanmin(self.values, initial=0.0), np.nansum(self.values, -1)
        return bool(smallest >= 0 and np.allclose(sums, 1, atol=1e-4))

    def labels_along(self, dim: int) -> tuple[str, ...]:
        """The labels along a dim; if none are given, the indices."""
        axis = self.axes[dim]
        return self.labels.get(axis, tuple(map(str, range(self.values.shape[dim]))))


def make_labelled_array(
    values: object,
    axes: object,
    *,
    labels: object = None,
    low: object = None,
    high: object = None,
    error: object = None,
    value_label: str = "",
) -> LabelledArray:
    """A validated `LabelledArray` from arrays or tensors; `error` sets `low = values - error`, `high = values + error`.

    >>> make_labelled_array([[0.2, 0.8]], ("sentence", "head")).labels_along(1)
    ('0', '1')
    """
    numbers = to_float_array("values", values)
    names = parse_axes(axes, numbers.ndim)
    if numbers.size == 0:
        raise BNetError("values", expected="at least one number", actual=f"shape {numbers.shape}")
    label_map = _parse_labels(labels, names, numbers.shape)
    if error is not None:
        if low is not None or high is not None:
            raise BNetError("pass error=, or low= and high=, not both")
        half_width = to_float_array("error", error, numbers.shape)
        if bool((half_width < 0).any()):
            raise BNetError("error", expected="no negative numbers", actual=float(np.nanmin(half_width)))
        return LabelledArray(numbers, names, label_map, numbers - half_width, numbers + half_width, value_label)
    if (low is None) != (high is None):
        missing = "low" if low is None else "high"
        raise BNetError(f"an interval requires both low= and high=; {missing}= is missing")
    if low is None:
        return LabelledArray(numbers, names, label_map, value_label=value_label)
    lower, upper = to_float_array("low", low, numbers.shape), to_float_array("high", high, numbers.shape)
    if bool((lower > upper).any()):
        raise BNetError("low= is above high= in some places", hint="Pass the lower ends as low=")
    return LabelledArray(numbers, names, label_map, lower, upper, value_label)


def to_float_array(subject: str, value: object, shape: tuple[int, ...] | None = None) -> FloatArray:
    """An array or tensor as an array of floats, which may be NaN but not infinite."""
    try:
        array = np.asarray(to_numpy(copy_to_tensor(value)) if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):  # rows of different lengths, or a tensor without accessible values
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise BNetError(subject, expected="an array of real numbers", actual=value)
    numbers = array.astype(np.float64)
    if bool(np.isinf(numbers).any()):
        raise BNetError(subject, expected="finite numbers, or NaN for blank", actual="an infinite number")
    if shape is not None and numbers.shape != shape:
        raise BNetError(subject, expected=f"the same shape as values, {shape}", actual=numbers.shape)
    return numbers


def parse_axes(axes: object, count: int) -> tuple[str, ...]:
    """The names of the axes, one for each of `count` dims."""
    if axes is None and count == 1:
        return ("state",)
    names = (axes,) if isinstance(axes, str) else tuple(axes) if isinstance(axes, Sequence) else ()
    if not 1 <= count <= 3:
        raise BNetError("values", expected="1, 2 or 3 dims", actual=f"{count}")
    if len(names) != count or not all(isinstance(name, str) and name for name in names):
        hint = 'Examples: ("sentence", "head"), ("slice", "head"), ("head", "word", "word")'
        raise BNetError("axes", expected=f"a name for each of {count} dims", actual=axes, hint=hint)
    if len(set(names)) != count:
        raise BNetError("axes", expected="different names", actual=axes)
    return names


def _parse_labels(labels: object, names: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
    """The labels of each axis, validated."""
    parsed = {}
    sizes = dict(zip(names, shape, strict=True))
    label_map = check_mapping("labels", labels)
    check_names("labels", label_map, names)
    for axis, names_along in label_map.items():
        if isinstance(names_along, str) or not isinstance(names_along, Sequence):
            raise BNetError(f"labels of {axis}", expected="a list of strings", actual=names_along)
        if len(names_along) != sizes[axis]:
            raise BNetError(f"labels of {axis}", expected=f"{sizes[axis]} labels", actual=len(names_along))
        parsed[axis] = tuple(map(str, names_along))
    return parsed


def plot_array(
    result: object,
    canvas: Canvas,
    *,
    axes: object = None,
    labels: Mapping[str, Sequence[str]] | None = None,
    low: object = None,
    high: object = None,
    error: object = None,
    value_label: str = "",
    top: int = 20,
    sort: bool | None = None,
) -> None:
    """Plot an array or tensor by the names of its axes."""
    plot_labelled_array(
        make_labelled_array(result, axes, labels=labels, low=low, high=high, error=error, value_label=value_label),
        canvas,
        top=top,
        sort=sort,
    )


def plot_array_result(result: Any, canvas: Canvas, *, top: int = 20, sort: bool | None = None) -> None:
    """Plot a result with `values` and `axes`, and optional `labels`, `low`, `high`, `error` and `value_label`."""
    extra = {name: getattr(result, name, None) for name in ("labels", "low", "high", "error")}
    value_label = getattr(result, "value_label", "")
    array = make_labelled_array(
        result.values, tuple(result.axes), **extra, value_label=value_label if isinstance(value_label, str) else ""
    )
    plot_labelled_array(array, canvas, top=top, sort=sort)


def plot_labelled_array(result: LabelledArray, canvas: Canvas, *, top: int = 20, sort: bool | None = None) -> None:
    """Plot one axis as bars, two as a heat map (with intervals in its cells), three as panels of heat maps.

    At most the `top` largest bars are drawn. `sort` orders rows by their strongest column; by default, only rows that
    are sentences are sorted.
    """
    check_int("top", top)
    check_choice("sort", sort, (None, True, False))
    value_label = result.value_label or ("probability" if result.is_distribution else "value")
    if result.values.ndim == 1:
        bars = BarSeries(result.values, low=result.low, high=result.high)
        series, labels, note = select_top([bars], result.labels_along(0), top)
        draw_bars(canvas, series, labels, value_label=value_label, category_label=result.axes[0])
        canvas.add_note(note)
    elif result.values.ndim == 2:
        _plot_matrix(result, canvas, value_label, sort)
    else:
        _plot_panels(result, canvas, value_label)


def _plot_matrix(result: LabelledArray, canvas: Canvas, value_label: str, sort: bool | None) -> None:
    """Plot an array with two axes."""
    rows, columns = result.labels_along(0), result.labels_along(1)
    data = HeatMapData(result.values, rows, columns, low=result.low, high=result.high)
    y, x = result.axes
    if sort or (sort is None and y == "sentence"):
        numbers = np.nan_to_num(result.values, nan=-np.inf)
        order = np.lexsort((-numbers.max(1), numbers.argmax(1)))  # by strongest column, then by its value
        low, high = (None if bound is None else bound[order] for bound in (result.low, result.high))
        data = HeatMapData(result.values[order], tuple(rows[k] for k in order), columns, low=low, high=high)
        canvas.add_note(f"{y.capitalize()}s are sorted by their strongest {x}.")
    limits = probability_limits([result.values]) if result.is_distribution else None
    (ax,) = draw_matrix(canvas, [data], value_label=value_label, x=x, y=y, limits=limits, square=x == y)
    if y == "sentence" and len(rows) > 40 and "sentence" not in result.labels:
        canvas.set_tick_labels(ax, "y", ())
        canvas.set_axis_labels(ax, y=f"{len(rows):,} {y}s")


def _plot_panels(result: LabelledArray, canvas: Canvas, value_label: str) -> None:
    """Plot an array with three axes."""
    if result.low is not None:
        expected = "an array with 1 or 2 axes"
        raise BNetError("values with low=, high= or error=", expected=expected, actual="3 axes")
    by = result.axes.index("head") if "head" in result.axes else 0
    values, names = np.moveaxis(result.values, by, 0), result.labels_along(by)
    other_dims = [dim for dim in range(3) if dim != by]
    rows, columns = (result.labels_along(dim) for dim in other_dims)
    maps = [
        HeatMapData(matrix, rows, columns, f"{result.axes[by]} {name}")
        for name, matrix in zip(names, values, strict=True)
    ]
    y, x = (result.axes[dim] for dim in other_dims)
    num_columns = count_columns(canvas, len(maps), 4)
    draw_matrix(canvas, maps, value_label=value_label, x=x, y=y, num_columns=num_columns, square=x == y)


@dataclass(frozen=True)
class BarSeries:
    """A series of bars: a value for each label, with optional intervals, and a style."""

    values: FloatArray = field(repr=False)
    name: str = ""
    low: FloatArray | None = field(default=None, repr=False)
    high: FloatArray | None = field(default=None, repr=False)
    colour: str = "accent"
    hatch: str = ""

    def select(self, index: Any) -> BarSeries:
        """The series of some of the bars."""
        low, high = (None if bound is None else bound[index] for bound in (self.low, self.high))
        return replace(self, values=self.values[index], low=low, high=high)

    def scale(self, unit: float) -> BarSeries:
        """The same bars with all numbers multiplied by a factor."""
        low, high = (None if bound is None else bound * unit for bound in (self.low, self.high))
        return replace(self, values=self.values * unit, low=low, high=high)


def select_top(series: Sequence[BarSeries], labels: Sequence[str], top: int) -> tuple[list[BarSeries], list[str], str]:
    """The `top` largest bars by magnitude in the last series, their labels, and a note on the others."""
    count = len(labels)
    if count <= top:
        return list(series), distinguish(labels), ""
    indices = np.argsort(-np.abs(np.nan_to_num(series[-1].values)), kind="stable")[:top]
    selected = [bars.select(indices) for bars in series]
    remainder = float(np.nansum(np.delete(series[-1].values, indices)))
    note = f"Showing the {top} largest of {count:,}; the sum of the others is {format_digits(remainder)}."
    return selected, distinguish(labels[k] for k in indices), note


def draw_bars(
    canvas: Canvas,
    series: Sequence[BarSeries],
    labels: Sequence[str],
    *,
    value_label: str,
    category_label: str,
    max_length: int = MAX_LABEL_LENGTH,
    ax: Axes | None = None,
) -> Axes:
    """Draw bars with numbers at their ends: vertical for a few bars with short labels, else horizontal."""
    unit, unit_text = choose_unit(*(bars.values for bars in series))
    series, value_label = [bars.scale(unit) for bars in series], value_label + unit_text
    max_length = canvas.limit_label_length(max_length)
    max_width = max(text_width(format_token(label, max_length), SMALL_FONT_SIZE + 0.5) for label in labels)
    max_upright = MAX_UPRIGHT_BARS if canvas.width is None else min(MAX_UPRIGHT_BARS, 3.5 * canvas.page_width)
    is_upright = len(labels) <= max_upright and max_width < 60
    if ax is None and is_upright:
        ax = canvas.add_axes(max(2.0, (0.26 + 0.26 * len(series)) * len(labels)), 1.8)
    elif ax is None:
        ax = canvas.add_axes(3.2, max(1.0, (0.1 + 0.13 * len(series)) * len(labels)))
    positions = np.arange(len(labels), dtype=np.float64)
    thickness = (0.74 if len(labels) > 3 else 0.56) / len(series)
    centres: list[FloatArray] = [positions + (k - (len(series) - 1) / 2) * thickness for k in range(len(series))]
    for bar_positions, bars in zip(centres, series, strict=True):
        style: Any = {"color": canvas.colours[bars.colour], "label": bars.name or None, "linewidth": 0}
        numbers = np.nan_to_num(bars.values)
        for bar in (ax.bar if is_upright else ax.barh)(bar_positions, numbers, thickness * 0.94, **style):
            bar.set_hatch(bars.hatch)
        if bars.low is not None and bars.high is not None:
            line: Any = {"color": canvas.colours["ink"], "linewidth": 1.0, "label": f"interval {bars.name}".strip()}
            (ax.vlines if is_upright else ax.hlines)(bar_positions, bars.low, bars.high, **line)
    canvas.draw_when_sized(lambda: _write_bar_numbers(canvas, ax, centres, series, is_upright))
    if is_upright:
        canvas.set_tick_labels(ax, "x", labels, max_length)
        canvas.set_axis_labels(ax, category_label, value_label)
    else:
        canvas.label_rows(ax, labels, max_length)
        canvas.set_axis_labels(ax, value_label, category_label)
    ax.tick_params(axis="x" if is_upright else "y", length=0)
    ends = np.concatenate([x for bars in series for x in (bars.values, bars.low, bars.high) if x is not None])
    low, high = float(np.nanmin(ends, initial=0.0)), float(np.nanmax(ends, initial=0.0))
    span = (high - low) or 1.0  # above the highest bar, there is space for its number
    limits = low - (0.12 * span if low < 0 else 0), high + (0.14 if is_upright else 0.12) * span
    (ax.set_ylim if is_upright else ax.set_xlim)(*limits)
    if len(series) > 1:
        canvas.add_legend(ax, handles=ax.containers, ncols=len(series), is_above=True)
    return ax


def _write_bar_numbers(
    canvas: Canvas, ax: Axes, centres: Sequence[FloatArray], series: Sequence[BarSeries], is_upright: bool
) -> None:
    """Write the number of each bar at its end, unless the numbers of neighbouring bars would overlap."""
    largest = max(float(np.nanmax(np.abs(bars.values), initial=0.0)) for bars in series)
    texts = [
        ["none" if np.isnan(x) else format_number(x, largest, short=False) for x in bars.values] for bars in series
    ]
    size = 72 * np.array(canvas.panel_size(ax))
    low, high = sorted(ax.get_xlim() if is_upright else ax.get_ylim())
    spacing = centres[1][0] - centres[0][0] if len(series) > 1 else 1.0
    pitch = spacing * size[0 if is_upright else 1] / (high - low)
    max_text_width = max(text_width(text, 6.5) for line in texts for text in line) * canvas.font_scale
    if sum(map(len, texts)) > MAX_BAR_NUMBERS or (max_text_width + 1.5 if is_upright else 6.0) > pitch:
        return
    low, high = ax.get_ylim() if is_upright else ax.get_xlim()
    ends = [
        max(
            np.nanmax(bars.values, initial=0.0), np.nanmax(bars.values if bars.high is None else bars.high, initial=0.0)
        )
        for bars in series
    ]
    share = (
        10 / size[1] if is_upright else (max_text_width + 5) / size[0]
    )  # of the axis, for the numbers above the ends
    high = max(high, low + (max(ends) - low) / (1 - min(share, 0.5)))
    (ax.set_ylim if is_upright else ax.set_xlim)(low, high)
    style: Any = {"ha": "center", "va": "bottom"} if is_upright else {"ha": "left", "va": "center_baseline"}
    style |= {"fontsize": 6.5, "color": canvas.colours["grey"]}
    for bar_positions, bars, line in zip(centres, series, texts, strict=True):
        tips = np.maximum(np.nan_to_num(bars.values), 0)
        tips = tips if bars.high is None else np.maximum(tips, np.nan_to_num(bars.high))
        for position, end, text in zip(bar_positions, tips, line, strict=True):
            point, offset = ((position, end), (0, 2)) if is_upright else ((end, position), (3, 0))
            ax.annotate(text, point, offset, textcoords="offset points", **style)
