"""Tables: numbers with named axes, labels on them, an interval around each where there is one; plots of them, and bars.

Bars are shares of states, side by side where there are two of each, with intervals where these are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int, check_mapping, check_names
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import text_width
from bnet_transformer.figures.labels import format_token
from bnet_transformer.plots.canvas import MAX_LABEL_LENGTH, PAGE_WIDTH, SMALL_FONT_SIZE, Canvas
from bnet_transformer.plots.heat_maps import (
    FloatArray,
    HeatMapData,
    draw_heat_map,
    draw_heat_maps,
    probability_limits,
    tick_label_width,
)
from bnet_transformer.tpm.arrays import copy_to_tensor, to_numpy

MAX_UPRIGHT_BARS = 16  # more bars than this lie on their side


@dataclass(frozen=True)
class LabelledArray:
    """Numbers with named axes: `values[i, j]` lies between `low[i, j]` and `high[i, j]`, where these are known.

    `labels[axis]` names the places along an axis; NaN is a number that is not there.
    """

    values: FloatArray = field(repr=False)
    axes: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    low: FloatArray | None = field(default=None, repr=False)
    high: FloatArray | None = field(default=None, repr=False)
    value_label: str = ""

    @property
    def is_distribution(self) -> bool:
        """True where no number is below zero and each row adds up to 1."""
        least, sums = np.nanmin(self.values, initial=0.0), np.nansum(self.values, -1)
        return bool(least >= 0 and np.allclose(sums, 1, atol=1e-4))

    def labels_along(self, dim: int) -> tuple[str, ...]:
        """The labels along a dim: those told, else its numbers."""
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
    """A table from arrays or tensors, checked; `error` stands for `low = values - error`, `high = values + error`.

    >>> make_labelled_array([[0.2, 0.8]], ("sentence", "head")).named(1)
    ('0', '1')
    """
    numbers = to_float_array("values", values)
    names = parse_axes(axes, numbers.ndim)
    if numbers.size == 0:
        raise BNetError("values", expected="at least one number", actual=f"none, of shape {numbers.shape}")
    told = _parse_labels(labels, names, numbers.shape)
    if error is not None:
        if low is not None or high is not None:
            raise BNetError("error", expected="error=, or low= and high=", actual="both")
        spread = to_float_array("error", error, numbers.shape)
        if bool((spread < 0).any()):
            raise BNetError("error", expected="no number below 0", actual=float(np.nanmin(spread)))
        return LabelledArray(numbers, names, told, numbers - spread, numbers + spread, value_label)
    if (low is None) != (high is None):
        raise BNetError("interval", expected="low= and high=", actual="one of them")
    if low is None:
        return LabelledArray(numbers, names, told, value_label=value_label)
    lower, upper = to_float_array("low", low, numbers.shape), to_float_array("high", high, numbers.shape)
    if bool((lower > upper).any()):
        raise BNetError("interval", expected="low at most high", actual="low above high")
    return LabelledArray(numbers, names, told, lower, upper, value_label)


def to_float_array(subject: str, value: object, shape: tuple[int, ...] | None = None) -> FloatArray:
    """An array or tensor as real numbers, NaN where there is none."""
    try:
        found = np.asarray(to_numpy(copy_to_tensor(value)) if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):  # rows of different lengths, a tensor that does not show its numbers
        found = np.asarray(None)
    if found.dtype.kind not in "biuf":
        raise BNetError(subject, expected="an array of real numbers", actual=value)
    numbers = found.astype(np.float64)
    if bool(np.isinf(numbers).any()):
        raise BNetError(subject, expected="finite numbers (NaN is left blank)", actual="an infinite one")
    if shape is not None and numbers.shape != shape:
        raise BNetError(subject, expected=f"the shape of the values, {shape}", actual=numbers.shape)
    return numbers


def parse_axes(axes: object, count: int) -> tuple[str, ...]:
    """The names of the axes: one for each dim."""
    if axes is None and count == 1:
        return ("state",)
    names = (axes,) if isinstance(axes, str) else tuple(axes) if isinstance(axes, Sequence) else ()
    if not 1 <= count <= 3:
        raise BNetError("values", expected="1, 2 or 3 dims", actual=f"{count}")
    if len(names) != count or not all(isinstance(name, str) and name for name in names):
        allowed = 'such as ("sentence", "head"), ("slice", "head"), ("head", "word", "word")'
        raise BNetError("axes", expected=f"a name for each of {count} dims", actual=axes, allowed=allowed)
    if len(set(names)) != count:
        raise BNetError("axes", expected="different names", actual=axes)
    return names


def _parse_labels(labels: object, names: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
    found = {}
    sizes = dict(zip(names, shape, strict=True))
    given = check_mapping("labels", labels)
    check_names("labels", given, names)
    for axis, told in given.items():
        if isinstance(told, str) or not isinstance(told, Sequence):
            raise BNetError(f"labels of {axis}", expected="a list of strings", actual=told)
        if len(told) != sizes[axis]:
            raise BNetError(f"labels of {axis}", expected=f"{sizes[axis]} of them", actual=len(told))
        found[axis] = tuple(map(str, told))
    return found


# what is drawn of a table


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
    """An array or tensor, by the names of its axes."""
    plot_labelled_array(
        make_labelled_array(result, axes, labels=labels, low=low, high=high, error=error, value_label=value_label),
        canvas,
        top=top,
        sort=sort,
    )


def plot_array_result(result: Any, canvas: Canvas, *, top: int = 20, sort: bool | None = None) -> None:
    """A result with `values` and `axes`; `labels`, `low`, `high`, `error` and `what` where it has them."""
    extra = {name: getattr(result, name, None) for name in ("labels", "low", "high", "error")}
    what = getattr(result, "what", "")
    found = make_labelled_array(
        result.values, tuple(result.axes), **extra, value_label=what if isinstance(what, str) else ""
    )
    plot_labelled_array(found, canvas, top=top, sort=sort)


def plot_labelled_array(result: LabelledArray, canvas: Canvas, *, top: int = 20, sort: bool | None = None) -> None:
    """Bars of one axis, a heat map of two (with intervals in its cells), small heat maps of three.

    `top` is how many bars are drawn of more; `sort` orders sentences by their strongest head, as it does by default.
    """
    check_int("top", top)
    check_choice("sort", sort, (None, True, False))
    what = result.value_label or ("probability" if result.is_distribution else "value")
    if result.values.ndim == 1:
        one = BarSeries(result.values, low=result.low, high=result.high)
        series, labels, told = select_top([one], result.labels_along(0), top)
        draw_bars(canvas, series, labels, value_label=what, category_label=result.axes[0])
        canvas.add_note(told)
    elif result.values.ndim == 2:
        _plot_matrix(result, canvas, what, sort)
    else:
        _plot_panels(result, canvas, what)


def _plot_matrix(result: LabelledArray, canvas: Canvas, value_label: str, sort: bool | None) -> None:
    rows, columns = result.labels_along(0), result.labels_along(1)
    found = HeatMapData(result.values, rows, columns, low=result.low, high=result.high)
    y, x = result.axes
    if sort or (sort is None and y == "sentence"):
        numbers = np.nan_to_num(result.values, nan=-np.inf)
        order = np.lexsort((-numbers.max(1), numbers.argmax(1)))  # of one strongest column the surest first
        low, high = (None if each is None else each[order] for each in (result.low, result.high))
        found = HeatMapData(result.values[order], tuple(rows[k] for k in order), columns, low=low, high=high)
        canvas.add_note(f"{y.capitalize()}s in the order of their strongest {x}.")
    limits = probability_limits([result.values]) if result.is_distribution else None
    ax = draw_heat_map(canvas, found, value_label=value_label, x=x, y=y, limits=limits, square=x == y)
    if y == "sentence" and len(rows) > 40 and "sentence" not in result.labels:
        ax.set_yticks([])
        canvas.set_axis_labels(ax, y=f"{len(rows):,} {y}s")


def _plot_panels(result: LabelledArray, canvas: Canvas, value_label: str) -> None:
    if result.low is not None:
        raise BNetError("interval", expected="a table of 1 or 2 axes to draw intervals in", actual="3 axes")
    by = result.axes.index("head") if "head" in result.axes else 0
    values, names = np.moveaxis(result.values, by, 0), result.labels_along(by)
    rest = [dim for dim in range(3) if dim != by]
    rows, columns = (result.labels_along(dim) for dim in rest)
    maps = [
        HeatMapData(each, rows, columns, f"{result.axes[by]} {name}") for name, each in zip(names, values, strict=True)
    ]
    y, x = (result.axes[dim] for dim in rest)
    draw_heat_maps(canvas, maps, value_label=value_label, x=x, y=y, num_columns=min(4, len(maps)), square=x == y)


@dataclass(frozen=True)
class BarSeries:
    """A number for each label, with its name."""

    values: FloatArray = field(repr=False)
    name: str = ""
    low: FloatArray | None = field(default=None, repr=False)
    high: FloatArray | None = field(default=None, repr=False)
    colour: str = "accent"
    hatch: str = ""

    def select(self, index: Any) -> BarSeries:
        """Some of the numbers."""
        low, high = (None if each is None else each[index] for each in (self.low, self.high))
        return replace(self, values=self.values[index], low=low, high=high)


def select_top(series: Sequence[BarSeries], labels: Sequence[str], top: int) -> tuple[list[BarSeries], list[str], str]:
    """The `top` greatest bars (of the last series), greatest first, if there are more; and what was left out."""
    count = len(labels)
    if count <= top:
        return list(series), list(labels), ""
    kept = np.argsort(-np.abs(np.nan_to_num(series[-1].values)), kind="stable")[:top]
    chosen = [each.select(kept) for each in series]
    rest = float(np.nansum(np.delete(series[-1].values, kept)))
    told = f"The {top} greatest of {count:,}; the others have {rest:.3g} together."
    return chosen, [labels[k] for k in kept], told


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
    """Bars for each label: upright if there are few, with short labels; lying if not. Numbers at their ends."""
    widest = max(text_width(format_token(label, max_length), SMALL_FONT_SIZE + 0.5) for label in labels)
    upright = len(labels) <= MAX_UPRIGHT_BARS and widest < 60
    across = max(2.6, min(PAGE_WIDTH, (0.26 + 0.26 * len(series)) * len(labels) + 0.9))
    long = max(1.3, (0.1 + 0.13 * len(series)) * len(labels))
    planned = (across, long) if ax is None else None
    if ax is None:
        ax = (
            canvas.add_axes(across, 2.3)
            if upright
            else canvas.add_axes(min(PAGE_WIDTH, 3.4 + tick_label_width(labels, max_length)), long + 0.8)
        )
    across, long = canvas.panel_size(ax, planned)
    places = np.arange(len(labels))
    thick = (0.74 if len(labels) > 3 else 0.56) / len(series)
    for k, each in enumerate(series):
        _draw_series(canvas, ax, places + (k - (len(series) - 1) / 2) * thick, thick * 0.94, each, upright)
    if upright:
        canvas.set_tick_labels(ax, "x", labels, across - 0.7, max_length)
        canvas.set_axis_labels(ax, category_label, value_label)
    else:
        canvas.set_tick_labels(ax, "y", labels, long, max_length)
        ax.set_ylim(len(labels) - 0.4, -0.6)
        canvas.set_axis_labels(ax, value_label, category_label)
    ax.tick_params(axis="x" if upright else "y", length=0)
    _set_value_limits(ax, series, upright)
    if len(series) > 1:
        above: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        canvas.add_legend(ax, handles=ax.containers, ncols=len(series), **above)
    return ax


def _draw_series(
    canvas: Canvas, ax: Axes, positions: Any, thickness: float, bar_series: BarSeries, is_upright: bool
) -> None:
    draw: Any = ax.bar if is_upright else ax.barh
    look = {"color": canvas.colours[bar_series.colour], "label": bar_series.name or None, "linewidth": 0}
    for bar in draw(positions, np.nan_to_num(bar_series.values), thickness, **look):
        bar.set_hatch(bar_series.hatch)
    ends = np.maximum(np.nan_to_num(bar_series.values), 0)
    if bar_series.low is not None and bar_series.high is not None:
        line: Any = {"color": canvas.colours["ink"], "linewidth": 1.0, "label": f"interval {bar_series.name}".strip()}
        (ax.vlines if is_upright else ax.hlines)(positions, bar_series.low, bar_series.high, **line)
        ends = np.maximum(ends, np.nan_to_num(bar_series.high))
    if len(positions) > 30:
        return
    style: Any = {"ha": "center", "va": "bottom"} if is_upright else {"ha": "left", "va": "center_baseline"}
    for place, end, value in zip(positions, ends, bar_series.values, strict=True):
        text = "none" if np.isnan(value) else f"{value:.2f}" if abs(value) < 100 else f"{value:.3g}"
        at, offset = ((place, end), (0, 2)) if is_upright else ((end, place), (3, 0))
        ax.annotate(text, at, offset, textcoords="offset points", fontsize=6.5, color=canvas.colours["grey"], **style)


def _set_value_limits(ax: Axes, series: Sequence[BarSeries], is_upright: bool) -> None:
    """From 0 (or below) to the highest bar, with room for its number."""
    every = np.concatenate([x for each in series for x in (each.values, each.low, each.high) if x is not None])
    low, high = float(np.nanmin(every, initial=0.0)), float(np.nanmax(every, initial=0.0))
    span = (high - low) or 1.0
    ends = (low - (0.12 * span if low < 0 else 0), high + (0.14 if is_upright else 0.12) * span)
    (ax.set_ylim if is_upright else ax.set_xlim)(*ends)
