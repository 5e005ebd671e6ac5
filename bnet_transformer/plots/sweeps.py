"""Plots of patching sweeps: the effect of each cell on the metric; and of mediation: direct and indirect effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.checks import check_choice, check_fraction, check_int
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.sweeps.results import MEDIATION_PARTS, Mediation, Sweep
from bnet_transformer.plots.canvas import Canvas
from bnet_transformer.plots.heat_maps import FloatArray, HeatMapData, draw_heat_map, draw_heat_maps, tick_label_width
from bnet_transformer.plots.labelled_arrays import BarSeries, draw_bars, to_float_array

MAX_BAR_CELLS = 12  # more cells with direct and indirect effects are drawn as heat maps
MAX_STACKED_PANELS = 12  # in a column on a page
MAX_THINNED_PANELS = 3  # at most this many panels may be narrow, with only some of their labels
MAX_STROKE_CELLS = 160  # strokes are not visible with more rows or columns
MIN_STROKE_EFFECT = 0.02  # relative to the largest effect; weaker effects have no stroke
MAX_NAME_LENGTH = 44  # characters of the name of a cell or a path
PANELS_WIDTH = 5.6  # of all panels of a row, in inches
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
    """Plot the mean effect of each cell: bars for one axis, a heat map for two, panels for three; NaN is blank.

    `restored` plots fractions of the total effect. Bars have bootstrap intervals; cells of a heat map have standard
    errors, or intervals if `intervals=True`.
    """
    check_fraction("confidence", confidence)
    check_choice("restored", restored, (True, False))
    check_choice("intervals", intervals, (None, True, False))
    check_int("top", top)
    if len(result.axes) > 3:
        raise _axes_limit_error(result, 3)
    has_intervals = _should_draw_intervals(result, intervals, restored)
    values = to_float_array("effects", result.restored if restored else result.values)
    errors = None if restored or result.examples == 1 else to_float_array("errors", result.error)
    value_label = "effect" if result.examples == 1 else "mean effect"
    if restored:
        value_label = "from corrupt, 0, to clean, 1" if result.direction == "noise" else "share of the total"
    unit, unit_text = _choose_unit(values)
    value_label += unit_text
    bounds = _scale_interval(result, confidence, unit) if has_intervals else None
    ax = None
    if len(result.axes) < 2:
        ax = _draw_bars(canvas, result, [_make_series(result, values * unit, bounds)], value_label, top)
    elif len(result.axes) == 2:
        low, high = bounds or (None, None)
        error = None if errors is None else errors * unit
        data = HeatMapData(values * unit, *_get_labels(result, (0, 1)), low=low, high=high, error=error)
        limits, options = symmetric_limits(data.values), _axis_options(result, (0, 1))
        ax = draw_heat_map(canvas, data, value_label=value_label, limits=limits, **options)
        _draw_strokes(canvas, [ax], [values])
    else:
        by = result.axes.index("head") if "head" in result.axes else 0
        axis, other_dims = result.axes[by], tuple(dim for dim in range(3) if dim != by)
        matrices = list(np.moveaxis(values * unit, by, 0))
        names = [f"{axis} {label}" for label in result.labels[axis]]
        _draw_panels(canvas, result, dict(zip(names, matrices, strict=True)), other_dims, value_label, 4)
    canvas.set_title(f"{result.at}, {_describe_patches(result)}")
    canvas.add_note("Blank: the cell does not exist." if len(result.names) < values.size else "")
    if has_intervals:
        canvas.add_note(_interval_note(result, confidence))
    elif errors is not None:
        maximum, over = float(np.nanmax(errors, initial=0.0)), f"over {result.examples:,} examples"
        in_cells = ax is not None and any("±" in text.get_text() for text in ax.texts)
        note = f"±: standard error {over}." if in_cells else f"Standard errors {over}: at most {maximum:.2g}."
        canvas.add_note(note)


def plot_mediation(
    result: Mediation, canvas: Canvas, *, show: str | None = None, confidence: float = 0.95, top: int = MAX_BAR_CELLS
) -> None:
    """Plot direct and indirect effects: as bars for a list, for paths and for few cells, else as two heat maps.

    `show` plots only one of the direct effect, the indirect effect and their interaction, as a sweep.
    """
    check_choice("show", show, (None, *MEDIATION_PARTS))
    check_int("top", top)
    total = f"{float(result.total.mean()):.3g}".replace("-", "−")
    if show is not None:
        plot_sweep(result.of(show), canvas, confidence=confidence, top=top)
        canvas.add_note(
            f"{'Interaction' if show == 'interaction' else f'{show.capitalize()} effect'}; total effect: {total}."
        )
        return
    parts = {name: result.of(name) for name in ("direct", "indirect")}
    values = {name: to_float_array(name, part.values) for name, part in parts.items()}
    unit, unit_text = _choose_unit(*values.values())
    values = {name: matrix * unit for name, matrix in values.items()}
    if len(result.axes) > 1 and len(result.names) > MAX_BAR_CELLS:
        if len(result.axes) > 2:
            raise _axes_limit_error(result, 2)
        _draw_panels(canvas, result, values, (0, 1), f"effect{unit_text}", 2)
        canvas.add_note("Blank: the cell does not exist." if len(result.names) < values["direct"].size else "")
    else:
        has_intervals = result.examples > 1
        styles: Any = {"direct": {"colour": "prior"}, "indirect": {"colour": "accent", "hatch": "////"}}
        series = []
        for name, part in parts.items():
            bounds = _scale_interval(part, confidence, unit) if has_intervals else None
            series.append(_make_series(result, values[name], bounds, name=name, **styles[name]))
        _draw_bars(canvas, result, series, f"effect{unit_text}", top)
        canvas.add_note(_interval_note(parts["direct"], confidence) if has_intervals else "")
    canvas.set_title(f"Effects through {result.at}", is_above_legend=True)
    canvas.add_note(f"Total effect: {total} = direct + indirect + interaction.")


def _describe_patches(result: Sweep) -> str:
    """What the cells set, and how the effects were computed, for the title."""
    names = ("corrupt", "clean") if result.direction == "noise" else ("clean", "corrupt")
    is_ablation = result.clean is None or result.corrupt is None
    patches = "ablated" if is_ablation else f"{names[0]} patched into {names[1]}"
    return patches + result.format_order()


def _should_draw_intervals(result: Sweep, intervals: bool | None, restored: bool) -> bool:
    """Whether to draw intervals: by default for bars only; an error if they are requested but not available."""
    refused = {"a single example": result.examples == 1, "restored=True": restored, "3 axes": len(result.axes) == 3}
    reason = next((name for name, is_so in refused.items() if is_so), None)
    if intervals and reason:
        expected = "effects of several examples over 1 or 2 axes"
        raise BNetError("intervals=True", expected=expected, actual=reason)
    return reason is None and (len(result.axes) < 2 if intervals is None else intervals)


def _interval_note(result: Sweep, confidence: float) -> str:
    """The note that explains intervals."""
    return f"{confidence:.0%} bootstrap intervals over {result.examples:,} examples."


def _choose_unit(*arrays: FloatArray) -> tuple[float, str]:
    """A power of ten that scales small numbers, and its text for the label of the values."""
    largest, power = symmetric_limits(*arrays)[1], 0
    while largest * 10**power < 0.1 and power < 15:
        power += 3
    return 10.0**power, f", in 10{str(-power).translate(SUPERSCRIPTS)}" if power else ""


def _scale_interval(result: Sweep, confidence: float, unit: float) -> IntervalEnds:
    """The ends of the intervals of the effects, multiplied by a unit."""
    low, high = result.interval(confidence)
    return to_numpy(low) * unit, to_numpy(high) * unit


def _make_series(result: Sweep | Mediation, values: FloatArray, interval: IntervalEnds, **style: Any) -> BarSeries:
    """The bars of the cells."""
    low, high = (None if interval is None else np.array([interval[k][index] for index in result.names]) for k in (0, 1))
    return BarSeries(np.array([values[index] for index in result.names]), low=low, high=high, **style)


def _draw_bars(
    canvas: Canvas, result: Sweep | Mediation, series: Sequence[BarSeries], value_label: str, top: int
) -> Axes:
    """Draw a bar for each cell with its name, or with its label if there is one axis; at most the `top` strongest."""
    labels, category = list(result.names.values()), "cell"
    if len(result.axes) == 1:
        (category,) = result.axes
        labels = [result.labels[category][k] for (k,) in result.names]
    if len(labels) > top:
        indices = np.sort(np.argsort(-np.abs(np.nan_to_num(series[-1].values)), kind="stable")[:top])
        canvas.add_note(f"Showing the {top} strongest of {len(labels):,}.")
        if category == "word":
            labels = [f"{i} {label}" for i, label in zip(result.positions_along(category), labels, strict=True)]
        series, labels = [bars.select(indices) for bars in series], [labels[k] for k in indices]
    axis_labels: Any = {"value_label": value_label, "category_label": category}
    return draw_bars(canvas, series, labels, **axis_labels, max_length=MAX_NAME_LENGTH)


def _draw_panels(
    canvas: Canvas,
    result: Sweep | Mediation,
    values: Mapping[str, FloatArray],
    dims: tuple[int, ...],
    value_label: str,
    max_columns: int,
) -> None:
    """Draw heat maps on one scale, at most `max_columns` in a row; fewer if labels would not fit."""
    labels = _get_labels(result, dims)
    maps = [HeatMapData(matrix, *labels, name, short_name=name.split()[-1]) for name, matrix in values.items()]
    rows, columns = maps[0].values.shape
    count = min(max_columns, len(maps))
    width = (PANELS_WIDTH - tick_label_width(labels[0])) * 72
    fits = [k for k in range(1, count + 1) if width / k / columns >= MIN_WORD_PITCH]
    should_thin = not fits and len(maps) <= MAX_THINNED_PANELS
    num_columns = max([k for k in fits if -(-len(maps) // k) <= MAX_STACKED_PANELS], default=count)
    options = _axis_options(result, dims)
    aspect = None if options["square"] or not (fits or should_thin) else min(1.0, max(0.16, 1.1 * rows / columns))
    options |= {"value_label": value_label, "num_columns": 1 if should_thin else num_columns, "aspect": aspect}
    options |= {"limits": symmetric_limits(*values.values()), "max_width": PANELS_WIDTH}
    panels = draw_heat_maps(canvas, maps, **options, should_write_numbers=True, should_thin_labels=should_thin)
    _draw_strokes(canvas, panels, list(values.values()))


def _get_labels(result: Sweep | Mediation, dims: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The labels of the rows and the columns."""
    rows, columns = (result.labels[result.axes[dim]] for dim in dims)
    return rows, columns


def _axis_options(result: Sweep | Mediation, dims: tuple[int, ...]) -> dict[str, Any]:
    """The names of the axes as options of a heat map, which is square if both are words."""
    y, x = (result.axes[dim] for dim in dims)
    is_attention = "read" in (x, y)
    names = {"read": "word attended to", "word": "word that attends" if is_attention else "word"}
    return {"x": names.get(x, x), "y": names.get(y, y), "square": is_attention and "word" in (x, y)}


def symmetric_limits(*arrays: FloatArray) -> tuple[float, float]:
    """The ends of a colour scale, symmetric about 0."""
    largest = max(float(np.nanmax(np.abs(array), initial=0.0)) for array in arrays) or 1.0
    return -largest, largest


def _draw_strokes(canvas: Canvas, panels: Sequence[Axes], arrays: Sequence[FloatArray]) -> None:
    """Draw a minus sign in each negative cell without a number or interval, so that the sign is not only a colour."""
    largest = symmetric_limits(*arrays)[1]
    has_strokes = False
    for ax, values in zip(panels, arrays, strict=True):
        has_signs = bool(ax.texts) or any(collection.get_label() == "interval" for collection in ax.collections)
        negative = np.argwhere(np.nan_to_num(values) < -MIN_STROKE_EFFECT * largest)
        if has_signs or not len(negative) or max(values.shape) > MAX_STROKE_CELLS:
            continue
        image = next(iter([*ax.collections, *ax.images]))
        fills = [image.cmap(image.norm(image.norm.vmax * values[i, j] / largest)) for i, j in negative]
        colours = [canvas.contrasting_colour(fill) for fill in fills]
        lines = [[(j - 0.22, i), (j + 0.22, i)] for i, j in negative]
        ax.add_collection(LineCollection(lines, colors=colours, linewidths=0.8, label="below 0"))
        has_strokes = True
    canvas.add_note("Stroke in a cell: negative value." if has_strokes else "")


def _axes_limit_error(result: Sweep | Mediation, max_axes: int) -> BNetError:
    """The error for a sweep with more axes than can be plotted."""
    axis = result.axes[0]
    hint = f"Plot each {axis} separately, such as .select({axis}={result.positions_along(axis)[0]})"
    hint += ", or compute the result with fewer axes in over="
    if isinstance(result, Mediation) and len(result.axes) == 3:
        hint += ", or plot each part separately, such as show='indirect'"
    received = f"{len(result.axes)}: {', '.join(result.axes)}"
    return BNetError("plot", expected=f"at most {max_axes} axes", actual=received, hint=hint)
