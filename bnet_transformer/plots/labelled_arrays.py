"""Arrays with named axes, labels and optional intervals, and their plots: bars, heat maps, panels of heat maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from bnet_transformer._core.arrays import FloatArray, copy_to_tensor, to_numpy
from bnet_transformer._core.checks import check_choice, check_int, check_mapping, check_names
from bnet_transformer._core.tokens import distinguish
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import BASE_FONT, text_width
from bnet_transformer.figures.labels import format_token
from bnet_transformer.plots.canvas import MAX_LABEL_LENGTH, SMALL_FONT_SIZE, Canvas
from bnet_transformer.plots.heat_maps import (
    HeatMapData,
    count_columns,
    draw_heat_map,
    draw_heat_maps,
    probability_limits,
    tick_label_width,
)
from bnet_transformer.plots.numbers import choose_unit, format_digits, format_number

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
    ax = draw_heat_map(canvas, data, value_label=value_label, x=x, y=y, limits=limits, square=x == y)
    if y == "sentence" and len(rows) > 40 and "sentence" not in result.labels:
        ax.set_yticks([])
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
    draw_heat_maps(
        canvas, maps, value_label=value_label, x=x, y=y, num_columns=count_columns(canvas, len(maps), 4), square=x == y
    )


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
    width = max(2.6, min(canvas.page_width, (0.26 + 0.26 * len(series)) * len(labels) + 0.9))
    height = max(1.3, (0.1 + 0.13 * len(series)) * len(labels))
    planned_size = (width, height) if ax is None else None
    if ax is None and is_upright:
        ax = canvas.add_axes(width, 2.3)
    elif ax is None:
        ax = canvas.add_axes(min(canvas.page_width, 3.4 + tick_label_width(labels, max_length)), height + 0.8)
    width, height = canvas.panel_size(ax, planned_size)
    positions = np.arange(len(labels), dtype=np.float64)
    thickness = (0.74 if len(labels) > 3 else 0.56) / len(series)
    centres: list[FloatArray] = [positions + (k - (len(series) - 1) / 2) * thickness for k in range(len(series))]
    for bar_positions, bars in zip(centres, series, strict=True):
        _draw_series(canvas, ax, bar_positions, thickness * 0.94, bars, is_upright)
    canvas.draw_when_sized(lambda: _write_bar_numbers(canvas, ax, centres, series, is_upright, (width, height)))
    if is_upright:
        canvas.set_tick_labels(ax, "x", labels, width - 0.7, max_length)
        canvas.set_axis_labels(ax, category_label, value_label)
    else:
        canvas.set_tick_labels(ax, "y", labels, height, max_length)
        ax.set_ylim(len(labels) - 0.4, -0.6)
        canvas.set_axis_labels(ax, value_label, category_label)
    ax.tick_params(axis="x" if is_upright else "y", length=0)
    _set_value_limits(ax, series, is_upright)
    if len(series) > 1:
        legend_style: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        canvas.add_legend(ax, handles=ax.containers, ncols=len(series), **legend_style)
    return ax


def _draw_series(canvas: Canvas, ax: Axes, positions: Any, thickness: float, bars: BarSeries, is_upright: bool) -> None:
    """Draw the bars of one series."""
    draw: Any = ax.bar if is_upright else ax.barh
    bar_style = {"color": canvas.colours[bars.colour], "label": bars.name or None, "linewidth": 0}
    for bar in draw(positions, np.nan_to_num(bars.values), thickness, **bar_style):
        bar.set_hatch(bars.hatch)
    if bars.low is not None and bars.high is not None:
        line: Any = {"color": canvas.colours["ink"], "linewidth": 1.0, "label": f"interval {bars.name}".strip()}
        (ax.vlines if is_upright else ax.hlines)(positions, bars.low, bars.high, **line)


def _write_bar_numbers(
    canvas: Canvas,
    ax: Axes,
    centres: Sequence[FloatArray],
    series: Sequence[BarSeries],
    is_upright: bool,
    planned: tuple[float, float],
) -> None:
    """Write the number of each bar at its end, unless the numbers of neighbouring bars would overlap."""
    largest = max(float(np.nanmax(np.abs(bars.values), initial=0.0)) for bars in series)
    texts = [
        ["none" if np.isnan(x) else format_number(x, largest, short=False) for x in bars.values] for bars in series
    ]
    size = 72 * np.array(canvas.panel_size(ax, planned))
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
    style |= {"fontsize": 6.5, "color": canvas.colours["grey"], "fontfamily": canvas.with_font([BASE_FONT])}
    for bar_positions, bars, line in zip(centres, series, texts, strict=True):
        tips = np.maximum(np.nan_to_num(bars.values), 0)
        tips = tips if bars.high is None else np.maximum(tips, np.nan_to_num(bars.high))
        for position, end, text in zip(bar_positions, tips, line, strict=True):
            point, offset = ((position, end), (0, 2)) if is_upright else ((end, position), (3, 0))
            ax.annotate(text, point, offset, textcoords="offset points", **style)


def _set_value_limits(ax: Axes, series: Sequence[BarSeries], is_upright: bool) -> None:
    """Set the limits of the values: from 0 (or below) to the highest bar, plus the height of its number."""
    numbers = np.concatenate([x for bars in series for x in (bars.values, bars.low, bars.high) if x is not None])
    low, high = float(np.nanmin(numbers, initial=0.0)), float(np.nanmax(numbers, initial=0.0))
    span = (high - low) or 1.0
    ends = (low - (0.12 * span if low < 0 else 0), high + (0.14 if is_upright else 0.12) * span)
    (ax.set_ylim if is_upright else ax.set_xlim)(*ends)
