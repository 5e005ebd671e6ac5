"""Plots of sweeps: the effect of each cell on the metric; what of the whole goes through a cell, and what does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from bnet_transformer._core.checks import check_choice, check_fraction, check_int
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.sweeps.results import MEDIATION_PARTS, Mediation, Sweep
from bnet_transformer.plots.canvas import Canvas
from bnet_transformer.plots.heat_maps import FloatArray, HeatMapData, draw_heat_map, draw_heat_maps, tick_label_width
from bnet_transformer.plots.labelled_arrays import BarSeries, draw_bars, to_float_array
from bnet_transformer.tpm.arrays import to_numpy

MAX_BAR_CELLS = 12  # cells whose direct and indirect effects stand side by side as bars
MAX_STACKED_PANELS = 12  # panels that stand one above the other on a page
MAX_THINNED_PANELS = 3  # panels that stand so even if not all words can be told
MAX_STROKE_CELLS = 160  # rows or columns up to which a stroke can be seen
MIN_STROKE_EFFECT = 0.02  # of the greatest effect: what is weaker gets no stroke
MAX_NAME_LENGTH = 44  # letters of the name of a cell or a path
PANELS_WIDTH = 5.6  # inches for the panels of a row
MIN_WORD_PITCH = 6.7  # points between words

SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")

IntervalEnds = tuple[FloatArray, FloatArray] | None


def plot_sweep(
    result: Sweep,
    canvas: Canvas,
    *,
    restored: bool = False,
    intervals: bool | None = None,
    confidence: float = 0.95,
    top: int = 20,
) -> None:
    """The mean effect of each cell: bars of one axis, a heat map of two, small ones of three; blank is no cell.

    With `restored` it is told as a share of the total. Bars have bootstrap intervals, cells of a heat map their
    standard error, or with `intervals=True` their interval.
    """
    check_fraction("confidence", confidence)
    check_choice("restored", restored, (True, False))
    check_choice("intervals", intervals, (None, True, False))
    check_int("top", top)
    if len(result.axes) > 3:
        raise _axes_limit_error(result, 3)
    drawn = _should_draw_intervals(result, intervals, restored)
    values = to_float_array("effects", result.restored if restored else result.values)
    errors = None if restored or result.examples == 1 else to_float_array("errors", result.error)
    what = "share of the total" if restored else "effect" if result.examples == 1 else "mean effect"
    unit, told = _choose_unit(values)
    ends = _scale_interval(result, confidence, unit) if drawn else None
    ax = None
    if len(result.axes) < 2:
        ax = _draw_bars(canvas, result, [_make_series(result, values * unit, ends)], what + told, top)
    elif len(result.axes) == 2:
        low, high = ends or (None, None)
        error = None if errors is None else errors * unit
        found = HeatMapData(values * unit, *_get_labels(result, (0, 1)), low=low, high=high, error=error)
        ax = draw_heat_map(
            canvas,
            found,
            value_label=what + told,
            **_axis_options(result, (0, 1)),
            limits=symmetric_limits(found.values),
        )
        _draw_strokes(canvas, [ax], [values])
    else:
        by = result.axes.index("head") if "head" in result.axes else 0
        axis, rest = result.axes[by], tuple(dim for dim in range(3) if dim != by)
        each = list(np.moveaxis(values * unit, by, 0))
        names = [f"{axis} {label}" for label in result.labels[axis]]
        _draw_panels(canvas, result, dict(zip(names, each, strict=True)), rest, what + told, 4)
    order = ", to first order" if result.first_order else ""
    canvas.set_title(f"{result.at}, {'ablated' if result.clean is None else 'clean into corrupt'}{order}")
    canvas.add_note("Blank: no such cell." if len(result.names) < values.size else "")
    if drawn:
        canvas.add_note(_interval_note(result, confidence))
    elif errors is not None:
        most, over = float(np.nanmax(errors, initial=0.0)), f"over {result.examples:,} examples"
        written = ax is not None and any("±" in each.get_text() for each in ax.texts)
        canvas.add_note(f"±: the standard error {over}." if written else f"Standard errors {over}: at most {most:.2g}.")


def plot_mediation(
    result: Mediation, canvas: Canvas, *, show: str | None = None, confidence: float = 0.95, top: int = MAX_BAR_CELLS
) -> None:
    """Direct and indirect effects side by side: bars of few cells, of a list and of paths; heat maps of many.

    `show` draws one of the direct, the indirect effect and the interaction alone, as a sweep is drawn.
    """
    check_choice("show", show, (None, *MEDIATION_PARTS))
    check_int("top", top)
    total = f"{float(result.total.mean()):.3g}".replace("-", "−")
    if show is not None:
        plot_sweep(result.of(show), canvas, confidence=confidence, top=top)
        canvas.add_note(f"The {show if show == 'interaction' else f'{show} effect'}; the total effect is {total}.")
        return
    parts = {name: result.of(name) for name in ("direct", "indirect")}
    values = {name: to_float_array(name, part.values) for name, part in parts.items()}
    unit, told = _choose_unit(*values.values())
    values = {name: each * unit for name, each in values.items()}
    if len(result.axes) > 1 and len(result.names) > MAX_BAR_CELLS:
        if len(result.axes) > 2:
            raise _axes_limit_error(result, 2)
        _draw_panels(canvas, result, values, (0, 1), f"effect{told}", 2)
        canvas.add_note("Blank: no such cell." if len(result.names) < values["direct"].size else "")
    else:
        several = result.examples > 1
        ends = {name: _scale_interval(part, confidence, unit) if several else None for name, part in parts.items()}
        styles: Any = {"direct": {"colour": "prior"}, "indirect": {"colour": "accent", "hatch": "////"}}
        series = [_make_series(result, each, ends[name], name=name, **styles[name]) for name, each in values.items()]
        _draw_bars(canvas, result, series, f"effect{told}", top)
        canvas.add_note(_interval_note(parts["direct"], confidence) if several else "")
    canvas.set_title(f"through {result.at}", is_above_legend=True)
    canvas.add_note(f"The total effect is {total}: what direct and indirect lack of it is their interaction.")


def _should_draw_intervals(result: Sweep, intervals: bool | None, restored: bool) -> bool:
    """Whether intervals are drawn: of bars where there are some; of a heat map where they are asked for."""
    refused = {"a single example": result.examples == 1, "restored=True": restored, "3 axes": len(result.axes) == 3}
    why = next((told for told, is_so in refused.items() if is_so), None)
    if intervals and why:
        raise BNetError("intervals", expected="effects of several examples, over 1 or 2 axes", actual=why)
    return why is None and (len(result.axes) < 2 if intervals is None else intervals)


def _interval_note(result: Sweep, confidence: float) -> str:
    return f"Intervals of {confidence:.0%}, bootstrapped over {result.examples:,} examples."


def _choose_unit(*arrays: FloatArray) -> tuple[float, str]:
    """What numbers are multiplied by where all are small, and how that is told."""
    most, power = symmetric_limits(*arrays)[1], 0
    while most * 10**power < 0.1 and power < 15:
        power += 3
    return 10.0**power, f", in 10{str(-power).translate(SUPERSCRIPTS)}" if power else ""


def _scale_interval(result: Sweep, confidence: float, unit: float) -> IntervalEnds:
    low, high = result.interval(confidence)
    return to_numpy(low) * unit, to_numpy(high) * unit


def _make_series(result: Sweep | Mediation, values: FloatArray, interval: IntervalEnds, **style: Any) -> BarSeries:
    """The cells in a row."""
    low, high = (None if interval is None else np.array([interval[k][index] for index in result.names]) for k in (0, 1))
    return BarSeries(np.array([values[index] for index in result.names]), low=low, high=high, **style)


def _draw_bars(
    canvas: Canvas, result: Sweep | Mediation, series: Sequence[BarSeries], value_label: str, top: int
) -> Axes:
    """Bars of cells by their names, or by the labels of their one axis; of many the strongest, in their order."""
    labels, of = list(result.names.values()), "cell"
    if len(result.axes) == 1:
        (of,) = result.axes
        labels = [result.labels[of][k] for (k,) in result.names]
    if len(labels) > top:
        kept = np.sort(np.argsort(-np.abs(np.nan_to_num(series[-1].values)), kind="stable")[:top])
        canvas.add_note(f"The {top} strongest of {len(labels):,}.")
        if of == "word":
            labels = [f"{place} {label}" for place, label in zip(result.places_along(of), labels, strict=True)]
        series, labels = [each.select(kept) for each in series], [labels[k] for k in kept]
    return draw_bars(canvas, series, labels, value_label=value_label, category_label=of, max_length=MAX_NAME_LENGTH)


def _draw_panels(
    canvas: Canvas,
    result: Sweep | Mediation,
    values: Mapping[str, FloatArray],
    dims: tuple[int, ...],
    value_label: str,
    max_columns: int,
) -> None:
    """Small heat maps on one scale, at `max_columns` so many in a row: fewer where words would find no room."""
    maps = [
        HeatMapData(each, *_get_labels(result, dims), name, short_name=name.split()[-1])
        for name, each in values.items()
    ]
    rows, columns = maps[0].values.shape
    count = min(max_columns, len(maps))
    fits = [
        k
        for k in range(1, count + 1)
        if (PANELS_WIDTH - tick_label_width(maps[0].row_labels)) / k * 72 / columns >= MIN_WORD_PITCH
    ]
    thinned = not fits and len(maps) <= MAX_THINNED_PANELS
    across = 1 if thinned else max([k for k in fits if -(-len(maps) // k) <= MAX_STACKED_PANELS], default=count)
    around = _axis_options(result, dims)
    tall = None if around["square"] or not (fits or thinned) else min(1.0, max(0.16, 1.1 * rows / columns))
    limits = symmetric_limits(*values.values())
    style: Any = {"limits": limits, "aspect": tall, "max_width": PANELS_WIDTH, "should_write_numbers": True, "should_thin_labels": thinned}
    panels = draw_heat_maps(canvas, maps, value_label=value_label, num_columns=across, **around, **style)
    _draw_strokes(canvas, panels, list(values.values()))


def _get_labels(result: Sweep | Mediation, dims: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What stands along the rows and the columns."""
    rows, columns = (result.labels[result.axes[dim]] for dim in dims)
    return rows, columns


def _axis_options(result: Sweep | Mediation, dims: tuple[int, ...]) -> dict[str, Any]:
    """What the rows and the columns are, and whether both are words."""
    y, x = (result.axes[dim] for dim in dims)
    both = "read" in (x, y)
    told = {"read": "word that is read", "word": "word that reads" if both else "word"}
    return {"x": told.get(x, x), "y": told.get(y, y), "square": both and "word" in (x, y)}


def symmetric_limits(*arrays: FloatArray) -> tuple[float, float]:
    """The ends of the colours: even on both sides of 0."""
    most = max(float(np.nanmax(np.abs(each), initial=0.0)) for each in arrays) or 1.0
    return -most, most


def _draw_strokes(canvas: Canvas, panels: Sequence[Axes], arrays: Sequence[FloatArray]) -> None:
    """A stroke in each cell below 0, where no number and no interval says so: colour is not the only sign."""
    most = symmetric_limits(*arrays)[1]
    drawn = False
    for ax, values in zip(panels, arrays, strict=True):
        told = bool(ax.texts) or any(each.get_label() == "interval" for each in ax.collections)
        below = np.argwhere(np.nan_to_num(values) < -MIN_STROKE_EFFECT * most)
        if told or not len(below) or max(values.shape) > MAX_STROKE_CELLS:
            continue
        image = next(iter([*ax.collections, *ax.images]))
        colours = [
            canvas.contrasting_colour(image.cmap(image.norm(image.norm.vmax * values[i, j] / most))) for i, j in below
        ]
        lines = [[(j - 0.22, i), (j + 0.22, i)] for i, j in below]
        ax.add_collection(LineCollection(lines, colors=colours, linewidths=0.8, label="below 0"))
        drawn = True
    canvas.add_note("A stroke in a cell: below 0." if drawn else "")


def _axes_limit_error(result: Sweep | Mediation, max_axes: int) -> BNetError:
    """The error for a table of more axes than a page has."""
    axis = result.axes[0]
    allowed = f".where({axis}={result.places_along(axis)[0]}), and so for each {axis}; or over= with fewer axes"
    if isinstance(result, Mediation) and len(result.axes) == 3:
        allowed += "; or show='indirect', and so for each part"
    got = f"{len(result.axes)}: {', '.join(result.axes)}"
    return BNetError("plot", expected=f"at most {max_axes} axes", actual=got, allowed=allowed)
