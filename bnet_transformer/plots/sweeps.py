"""Plots of interventions: the effects of cells in sweeps, mediation, and the edges and curves of circuits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.ticker import FixedLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from bnet_transformer._core.checks import check_choice, check_fraction, check_int, check_sequence
from bnet_transformer._core.naming import WORD
from bnet_transformer._core.tensors import FloatArray, to_numpy
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.cells import READ
from bnet_transformer.interventions.circuit import LEVEL, Circuit, CircuitTests
from bnet_transformer.interventions.curves import RANDOM, RANKINGS, FaithfulnessCurves
from bnet_transformer.interventions.sweep_results import MEDIATION_PARTS, Mediation, Sweep
from bnet_transformer.plots.canvas import Canvas, format_digits
from bnet_transformer.plots.heat_maps import (
    BarSeries,
    HeatMapData,
    count_columns,
    draw_bars,
    draw_matrix,
    select_words,
    tick_label_width,
    to_float_array,
)

# --------------------------------------------------------------------------------------------------------------------
# Plots of circuits: the effects and the tests of edges, and f(k) of several methods by the share of edges.


MARKERS = "osD^vPX<"
MAX_EDGES = 24  # bars of edges
RANKING_TITLES = {"signed": "by signed score", "absolute": "by absolute score"}
LEGEND_OFFSET = 0.4  # inches: the distance of the legend from the x axis
OVERFLOW = 0.35  # the part of an interval that extends beyond the curves is drawn up to this share of their range


def plot_faithfulness_curves(
    result: FaithfulnessCurves,
    canvas: Canvas,
    *,
    ranking: str | None = None,
    intervals: bool = True,
    methods: object = None,
) -> None:
    """Plot f(k) of each method by the share of edges on a log scale, with bands of the intervals over the pairs.

    `ranking` selects `"signed"` (whose integral is CPR) or `"absolute"` (whose distance from 1 is CMD); by default both
    in two panels, on the user's axes the signed one. `methods` selects some.
    """
    check_choice("ranking", ranking, (None, *RANKINGS))
    check_choice("intervals", intervals, (True, False))
    names = result.methods if methods is None else check_sequence("methods", methods, str)
    if not names:
        raise BNetError(
            "methods", expected="at least one of the methods", actual=methods, allowed=", ".join(result.methods)
        )
    rankings = RANKINGS if ranking is None and canvas.user_axes is None else (ranking or "signed",)
    rows, columns = (len(rankings), 1) if canvas.is_narrow else (1, len(rankings))
    panels = canvas.add_panels(rows, columns, 2.8, 1.9, sharey=True)
    styles = _choose_styles(names, canvas)
    ranges = []
    for ax, kind in zip(panels, rankings, strict=True):
        ranges.append(_draw_curves(result, canvas, ax, kind, styles, intervals=intervals and result.examples > 1))
        areas, measure = (result.cpr, "CPR") if kind == "signed" else (result.cmd, "CMD")
        for line, name in zip(ax.get_lines(), names, strict=False):
            line.set_label(f"{name}, {measure} {areas[name]:.2f}")
        if len(panels) > 1:
            canvas.set_panel_title(ax, RANKING_TITLES[kind])
        canvas.set_axis_labels(ax, "share of the edges", "faithfulness f(k)" if ax is panels[0] or rows > 1 else "")
        # Below the label of the axis the legend covers no curve.
        below = ax.transAxes + ScaledTranslation(0, -LEGEND_OFFSET, ax.figure.dpi_scale_trans)
        canvas.add_legend(ax, loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, borderaxespad=0.0)
    panels[0].set_ylim(min(low for low, _ in ranges), max(high for _, high in ranges))
    suffix = f", {RANKING_TITLES[rankings[0]]}" if len(panels) == 1 else ""
    pairs = f"{result.examples} pair{'s' * (result.examples != 1)}"
    canvas.set_title(f"Faithfulness of the best of {result.edges:,} edges, {pairs}{suffix}")
    if intervals and result.examples > 1:
        canvas.add_note(
            f"Bands: {result.confidence:.0%} intervals, by resampling pairs. Dashed: the net, and the empty circuit."
        )


def _choose_styles(names: Any, canvas: Canvas) -> dict[str, dict[str, Any]]:
    """The colour and marker of each method; baselines are grey."""
    colours = itertools.cycle(colour for colour in canvas.head_colours if colour != canvas.colours["grey"])
    markers = itertools.cycle(MARKERS)
    styles = {}
    for name in names:
        is_baseline = name == RANDOM
        styles[name] = {
            "color": canvas.colours["grey"] if is_baseline else next(colours),
            "marker": "." if is_baseline else next(markers),
            "linestyle": (0, (1, 1.5)) if is_baseline else "-",
        }
    return styles


def _draw_curves(
    result: FaithfulnessCurves,
    canvas: Canvas,
    ax: Axes,
    ranking: str,
    styles: dict[str, dict[str, Any]],
    *,
    intervals: bool,
) -> tuple[float, float]:
    """Draw the curves of one ranking; return their range of y, with a part of wide intervals."""
    shares = np.array(result.shares)
    curves = {name: to_numpy(result.faithfulness(name, ranking=ranking)) for name in styles}
    for k, (name, style) in enumerate(styles.items()):
        extra = max(0, 3 - k) / 2  # earlier curves are wider, so that equal ones are visible
        ax.plot(shares, curves[name], linewidth=1.2 + extra, markersize=3.2 + 1.5 * extra, zorder=3, **style)
    low = min(0.0, *(float(curve.min()) for curve in curves.values()))
    high = max(1.0, *(float(curve.max()) for curve in curves.values()))
    margin = 0.05 * (high - low)
    ends = [low - margin, high + margin]
    if intervals:
        for name, style in styles.items():
            lower, upper = (to_numpy(end) for end in result.interval(name, ranking=ranking))
            ax.fill_between(shares, lower, upper, color=style["color"], alpha=0.15, linewidth=0, zorder=2)
            limit = OVERFLOW * (high - low)
            ends = [max(min(ends[0], lower.min()), low - limit), min(max(ends[1], upper.max()), high + limit)]
    for level in (0, 1):
        ax.axhline(level, color=canvas.colours["grey"], linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
    canvas.style_curve_axes(ax, "", "")
    ax.set_xscale("log")
    ticks = [10.0**power for power in range(int(np.floor(np.log10(shares[0]) + 1e-9)), 1)]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(ticks, labels=[f"{100 * tick:g}%" for tick in ticks])
    ax.set_xlim(shares[0] / 1.15, 1.15 * shares[-1])
    return ends[0], ends[1]


def plot_circuit(result: Circuit, canvas: Canvas, *, top: int = MAX_EDGES) -> None:
    """Plot the effects of the `top` edges with the largest effects; the edges of the circuit have another colour."""
    frame = result.to_dataframe().dropna(subset="effect").sort_values("effect", ascending=False, kind="stable")
    if frame.empty:
        hint = "Draw its edges by s.draw(path, highlight=circuit), or plot circuit.test()"
        raise BNetError("this circuit has no effects", expected="the circuit of a search", hint=hint)
    shown = frame.head(check_int("top", top))
    _draw_edges(
        canvas, shown["edge"], shown["effect"], shown["kept"], ("in the circuit", "left out"), "effect of its removal"
    )
    canvas.set_title(f"Circuit of {result.edges:,} of {result.candidates:,} edges")
    canvas.add_note(f"{result._format_summary()}.")
    if len(shown) < len(frame):
        canvas.add_note(f"The {len(shown)} largest of {len(frame):,} effects.")


def plot_circuit_tests(result: CircuitTests, canvas: Canvas, *, top: int = MAX_EDGES) -> None:
    """Plot the change of the metric by the removal of each edge of a circuit; small p values have another colour."""
    frame = result.to_dataframe().sort_values("change", ascending=False, kind="stable")
    shown = frame.head(check_int("top", top))
    names = f"minimality p at most {LEVEL}", "larger p"
    _draw_edges(canvas, shown["edge"], shown["change"], shown["p"] <= LEVEL, names, "change of the metric")
    title = f"Sufficiency p {result.sufficiency:.2g}, necessity p {result.necessity:.2g}"
    canvas.set_title(title)
    if len(shown) < len(frame):
        canvas.add_note(f"The {len(shown)} largest of {len(frame):,} changes.")


def _draw_edges(
    canvas: Canvas, edges: Any, values: Any, is_marked: Any, names: tuple[str, str], value_label: str
) -> None:
    """Draw a horizontal bar for each edge, in one of two colours."""
    labels, numbers, marks = (np.asarray(column) for column in (edges, values, is_marked))
    ax = canvas.add_axes(3.2, 0.17 * len(labels))
    ax.locator_params(axis="x", nbins=5)  # numbers such as 0.025 side by side
    for name, colour, mask in zip(names, ("accent", "prior"), (marks.astype(bool), ~marks.astype(bool)), strict=True):
        if mask.any():
            style: Any = {"color": canvas.colours[colour], "label": name, "linewidth": 0, "zorder": 2}
            ax.barh(np.flatnonzero(mask), numbers[mask].astype(float), 0.74, **style)
    canvas.label_rows(ax, labels.tolist(), 40)
    canvas.set_axis_labels(ax, value_label, "edge")
    canvas.add_legend(ax, is_above=True, ncols=2)


DEFAULT_CONFIDENCE = 0.95
MAX_BAR_CELLS = 12  # more cells with direct and indirect effects are drawn as heat maps
MAX_STACKED_PANELS = 12  # in a column on a page
MAX_THINNED_PANELS = 3  # at most this many panels may be narrow, with only some of their labels
MAX_STROKE_CELLS = 160  # strokes are not visible with more rows or columns
MIN_STROKE_EFFECT = 0.02  # relative to the largest effect; weaker effects have no stroke
MAX_NAME_LENGTH = 44  # characters of the name of a cell or a path
PANELS_WIDTH = 5.6  # of all panels of a row, in inches
MIN_WORD_PITCH = 6.7  # points between words

IntervalEnds = tuple[FloatArray, FloatArray] | None


def plot_sweep(
    result: Sweep,
    canvas: Canvas,
    *,
    restored: bool = False,
    intervals: bool | None = None,
    confidence: float | None = None,
    top: int = 20,
    special: bool = True,
) -> None:
    """Plot the mean effect of each cell: bars for one axis, a heat map for two, panels for three; NaN is blank.

    `special=False` leaves out special tokens. `restored` plots fractions of the total effect. Bars
    have bootstrap intervals of probability `confidence`, by default 0.95; cells of a heat map have standard errors, or
    intervals if `intervals=True`.
    """
    check_choice("restored", restored, (True, False))
    check_choice("intervals", intervals, (None, True, False))
    check_int("top", top)
    if len(result.axes) > 3:
        raise _axes_limit_error(result, 3)
    has_intervals = _should_draw_intervals(result, intervals, restored)
    level = _choose_confidence(confidence, has_intervals)
    values = to_float_array("effects", result.restored if restored else result.values)
    errors = None if restored or result.examples == 1 else to_float_array("errors", result.error)
    value_label = "effect" if result.examples == 1 else "mean effect"
    if restored:
        value_label = "from corrupt, 0, to clean, 1" if result.direction == "noise" else "share of the total"
    bounds = _compute_interval(result, level) if has_intervals else None
    panels: list[Axes] = []
    if len(result.axes) < 2:
        _draw_bars(canvas, result, [_make_series(result, values, bounds)], value_label, top, special)
    elif len(result.axes) == 2:
        low, high = bounds or (None, None)
        data = HeatMapData(values, *_get_labels(result, (0, 1)), low=low, high=high, error=errors)
        (data,) = _crop(canvas, result, (0, 1), _drop_special(canvas, result, (0, 1), [data], special))
        limits, options = symmetric_limits(data.values), _axis_options(result, (0, 1))
        panels = draw_matrix(canvas, [data], value_label=value_label, limits=limits, **options)
        canvas.draw_when_sized(lambda: _draw_strokes(canvas, panels, [data.values]))
    else:
        by = result.axes.index("head") if "head" in result.axes else 0
        axis, other_dims = result.axes[by], tuple(dim for dim in range(3) if dim != by)
        matrices = list(np.moveaxis(values, by, 0))
        names = [f"{axis} {label}" for label in result.labels[axis]]
        _draw_panels(canvas, result, dict(zip(names, matrices, strict=True)), other_dims, value_label, 4, special)
    canvas.set_title(f"{result.at}, {_describe_patches(result)}")
    canvas.add_note("Blank: the cell does not exist." if len(result.names) < values.size else "")
    if has_intervals:
        canvas.add_note(_interval_note(result, level))
    elif errors is not None:
        maximum, over = float(np.nanmax(errors, initial=0.0)), f"over {result.examples:,} examples"

        def add_error_note() -> None:
            in_cells = any("±" in text.get_text() for ax in panels for text in ax.texts)
            note = (
                f"±: standard error {over}."
                if in_cells
                else f"Standard errors {over}: at most {format_digits(maximum, 2)}."
            )
            canvas.add_note(note)

        canvas.draw_when_sized(add_error_note)


def plot_mediation(
    result: Mediation,
    canvas: Canvas,
    *,
    show: str | None = None,
    confidence: float | None = None,
    top: int = MAX_BAR_CELLS,
    special: bool = True,
) -> None:
    """Plot direct and indirect effects: as bars for a list, for paths and for few cells, else as two heat maps.

    `show` plots only one of the direct effect, the indirect effect and their interaction, as a sweep.
    """
    check_choice("show", show, (None, *MEDIATION_PARTS))
    check_int("top", top)
    total = format_digits(float(result.total.mean()))
    if show is not None:
        plot_sweep(result.of(show), canvas, confidence=confidence, top=top, special=special)
        canvas.add_note(
            f"{'Interaction' if show == 'interaction' else f'{show.capitalize()} effect'}; total effect: {total}."
        )
        return
    parts = {name: result.of(name) for name in ("direct", "indirect")}
    values = {name: to_float_array(name, part.values) for name, part in parts.items()}
    has_bars = len(result.axes) < 2 or len(result.names) <= MAX_BAR_CELLS
    has_intervals = has_bars and result.examples > 1
    level = _choose_confidence(confidence, has_intervals)
    if not has_bars:
        if len(result.axes) > 2:
            raise _axes_limit_error(result, 2)
        _draw_panels(canvas, result, values, (0, 1), "effect", 2, special)
        canvas.add_note("Blank: the cell does not exist." if len(result.names) < values["direct"].size else "")
    else:
        styles: Any = {"direct": {"colour": "prior"}, "indirect": {"colour": "accent", "hatch": "////"}}
        series = []
        for name, part in parts.items():
            bounds = _compute_interval(part, level) if has_intervals else None
            series.append(_make_series(result, values[name], bounds, name=name, **styles[name]))
        _draw_bars(canvas, result, series, "effect", top, special)
        canvas.add_note(_interval_note(parts["direct"], level) if has_intervals else "")
    canvas.set_title(f"Effects through {result.at}")
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


def _choose_confidence(confidence: float | None, has_intervals: bool) -> float:
    """The probability of the intervals; an error if it is given for a plot without intervals."""
    if confidence is None:
        return DEFAULT_CONFIDENCE
    if not has_intervals:
        expected = "a plot with intervals: bars or intervals=True, effects of several examples, without restored=True"
        raise BNetError("confidence", expected=expected, actual=confidence)
    return check_fraction("confidence", confidence)


def _interval_note(result: Sweep, confidence: float) -> str:
    """The note that explains intervals."""
    return f"{confidence:.0%} bootstrap intervals over {result.examples:,} examples."


def _compute_interval(result: Sweep, confidence: float) -> IntervalEnds:
    """The ends of the intervals of the effects."""
    low, high = result.interval(confidence)
    return to_numpy(low), to_numpy(high)


def _make_series(result: Sweep | Mediation, values: FloatArray, interval: IntervalEnds, **style: Any) -> BarSeries:
    """The bars of the cells."""
    low, high = (None if interval is None else np.array([interval[k][index] for index in result.names]) for k in (0, 1))
    return BarSeries(np.array([values[index] for index in result.names]), low=low, high=high, **style)


def _draw_bars(
    canvas: Canvas, result: Sweep | Mediation, series: Sequence[BarSeries], value_label: str, top: int, special: bool
) -> Axes:
    """Draw a bar for each cell with its name, or with its label if there is one axis; at most the `top` strongest."""
    labels, category = list(result.names.values()), "cell"
    if len(result.axes) == 1:
        (category,) = result.axes
        names = _label_axis(result, category)
        cells = [k for (k,) in result.names]
        labels = [names[k] for k in cells]
        if category == WORD:
            shown = set(_select_along(canvas, result, WORD, special))
            index = [position for position, k in enumerate(cells) if k in shown]
            series, labels = [bars.select(index) for bars in series], [labels[k] for k in index]
    if len(labels) > top:
        indices = np.sort(np.argsort(-np.abs(np.nan_to_num(series[-1].values)), kind="stable")[:top])
        canvas.add_note(f"Showing the {top} strongest of {len(labels):,}.")
        if category == WORD:
            numbers = result.positions_along(category)
            labels = [
                label if label == f"word {i}" else f"{i} {label}" for i, label in zip(numbers, labels, strict=True)
            ]
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
    special: bool,
) -> None:
    """Draw heat maps on one scale, at most `max_columns` in a row; fewer if labels would not fit."""
    labels = _get_labels(result, dims)
    maps = [HeatMapData(matrix, *labels, name) for name, matrix in values.items()]
    maps = _crop(canvas, result, dims, _drop_special(canvas, result, dims, maps, special))
    rows, columns = maps[0].values.shape
    count = count_columns(canvas, len(maps), max_columns)
    width = min(PANELS_WIDTH, canvas.page_width - 0.9) - tick_label_width(maps[0].row_labels)
    fits = [k for k in range(1, count + 1) if 72 * width / k / columns >= MIN_WORD_PITCH]
    num_columns = max([k for k in fits if -(-len(maps) // k) <= MAX_STACKED_PANELS], default=count)
    if not fits and len(maps) <= MAX_THINNED_PANELS:
        num_columns = 1
    options = _axis_options(result, dims)
    ratio = 1.0 if options["square"] and rows == columns else max(0.16, 1.1 * rows / columns)
    width = width / num_columns
    options |= {"value_label": value_label, "num_columns": num_columns, "size": (width, width * min(1.6, ratio))}
    options["limits"] = symmetric_limits(*(m.values for m in maps))
    panels = draw_matrix(canvas, maps, **options)
    canvas.draw_when_sized(lambda: _draw_strokes(canvas, panels, [m.values for m in maps]))


def _crop(
    canvas: Canvas, result: Sweep | Mediation, dims: tuple[int, ...], maps: Sequence[HeatMapData]
) -> list[HeatMapData]:
    """The maps of arrows between words without the words whose arrows have an effect of exactly 0 in all maps."""
    if READ not in (result.axes[dim] for dim in dims):
        return list(maps)
    has_effect = np.any([np.nan_to_num(m.values) != 0 for m in maps], axis=0)
    if not has_effect.any():
        return list(maps)
    rows, columns = np.flatnonzero(has_effect.any(1)), np.flatnonzero(has_effect.any(0))
    counts = [size - len(shown) for size, shown in zip(has_effect.shape, (rows, columns), strict=True)]
    if any(counts):
        names = ("attend" if result.axes[dim] == WORD else "are attended to" for dim in dims)
        hidden = " and ".join(f"{count} that {name}" for count, name in zip(counts, names, strict=True) if count)
        canvas.add_note(f"Not shown: words whose arrows all have an effect of exactly 0, {hidden}.")
    return [data.select(rows.tolist(), columns.tolist()) for data in maps]


def _drop_special(
    canvas: Canvas, result: Sweep | Mediation, dims: tuple[int, ...], maps: Sequence[HeatMapData], special: bool
) -> list[HeatMapData]:
    """The maps without the rows and columns of special tokens."""
    shown = []
    for dim, size in zip(dims, maps[0].values.shape, strict=True):
        axis = result.axes[dim]
        is_of_words = axis in (WORD, READ)
        shown.append(_select_along(canvas, result, axis, special) if is_of_words else list(range(size)))
    return [data.select(*shown) for data in maps]


def _select_along(canvas: Canvas, result: Sweep | Mediation, axis: str, special: bool) -> list[int]:
    """The positions of the words that are shown along an axis."""
    return select_words(canvas, _label_axis(result, axis), result.special.get(axis, ()), special)


def _get_labels(result: Sweep | Mediation, dims: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The labels of the rows and the columns."""
    rows, columns = (_label_axis(result, result.axes[dim]) for dim in dims)
    return rows, columns


def _label_axis(result: Sweep | Mediation, axis: str) -> tuple[str, ...]:
    """The labels along an axis: "sat / ran" for aligned tokens, "word 1" if the tokens of the examples differ."""
    labels = result.aligned.get(axis, result.labels[axis])
    if axis not in (WORD, READ):
        return labels
    numbers = map(str, result.positions_along(axis))
    is_index = [label == number for label, number in zip(labels, numbers, strict=True)]
    return tuple(f"word {label}" if is_number else label for label, is_number in zip(labels, is_index, strict=True))


def _axis_options(result: Sweep | Mediation, dims: tuple[int, ...]) -> dict[str, Any]:
    """The names of the axes as options of a heat map, which is square if both are words."""
    y, x = (result.axes[dim] for dim in dims)
    is_attention = READ in (x, y)
    names = {READ: "word attended to", WORD: "word that attends" if is_attention else "word"}
    return {"x": names.get(x, x), "y": names.get(y, y), "square": is_attention and WORD in (x, y)}


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
