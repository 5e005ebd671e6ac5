"""Plots of fits, training, costs, calibrations, and of the comparison of two results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from bnet_transformer._core.checks import check_choice, check_fraction, check_int, check_names
from bnet_transformer._core.stats import LEVEL, ResultComparison
from bnet_transformer._core.tensors import BoolArray, FloatArray, rank_by_size, to_numpy
from bnet_transformer.cost import Cost
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.sweep_results import EstimateCalibration
from bnet_transformer.learning.calibration import CALIBRATED, Calibration
from bnet_transformer.learning.fit import Check, Comparison, Fit, Heads, ModelComparison
from bnet_transformer.learning.fit.heads import find_unidentified
from bnet_transformer.learning.training import Trained
from bnet_transformer.plots.canvas import SMALL_FONT_SIZE, Canvas, format_digits
from bnet_transformer.plots.heat_maps import BarSeries, HeatMapData, count_columns, draw_bars, draw_matrix, frame_cell

# --------------------------------------------------------------------------------------------------------------------
# Plots of simulation-based calibration: ECDF differences of the ranks with simultaneous bands.


MAX_COLUMNS = 3
PANEL_HEIGHT = 1.25  # inches
MIN_P = 1e-6  # smaller p values are not printed


def plot_calibration(result: Calibration, canvas: Canvas, *, quantity: str | None = None) -> None:
    """Plot the ECDF of the positions of the true values minus the uniform one, with its band, for each quantity.

    `quantity` selects one of them. On the user's axes it is by default the one with the smallest p value.
    """
    if result.replications < 2:
        raise BNetError(
            "this calibration has no curves", expected="at least 2 replications", actual=result.replications
        )
    names = list(result.ranks)
    p = result.p
    if quantity is not None:
        check_names("quantity", [quantity], names)
        names = [quantity]
    elif canvas.user_axes is not None:
        names = [min(names, key=lambda name: p[name])]
        canvas.add_note("The quantity with the smallest p; choose another with quantity=.")
    columns = min(2 if canvas.is_narrow else MAX_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    size = (2.8, 1.8) if len(names) == 1 else (canvas.page_width / columns, PANEL_HEIGHT)
    panels = canvas.add_panels(rows, columns, *size, sharex=True, sharey=True)
    verdicts = result.verdicts
    for name, ax in zip(names, panels, strict=False):
        _draw_difference(result, canvas, ax, name)
        text = f"{name}: {verdicts[name]}"
        if len(names) == 1:
            canvas.set_title(text)
        else:
            canvas.set_panel_title(ax, text)
            ax.title.set_color(canvas.colours["ink" if verdicts[name] == CALIBRATED else "second"])
    for ax in panels[len(names) :]:
        ax.set_visible(False)
    labels = "position of the true value among the draws", "ECDF − uniform"
    if len(names) == 1:
        canvas.set_axis_labels(panels[0], *labels)
    else:
        canvas.set_shared_labels(*labels)
        canvas.set_title(f"Calibration of {result.method.upper()}, {result.replications:,} replications")
    if canvas.user_axes is None:
        canvas.add_note(
            f"Band: contains all points of all {len(result.ranks)} quantities with probability {result.level:g} if the "
            "posteriors are correct. Arch: draws too high; trough: draws too low; first arch, then trough: too narrow; "
            "first trough, then arch: too wide."
        )


def _draw_difference(result: Calibration, canvas: Canvas, ax: Axes, name: str) -> None:
    """Draw the band and the ECDF difference of one quantity."""
    points = np.concatenate([[0.0], result.points, [1.0]])
    low, high, difference = (np.pad(values, 1) for values in (*result.band, result.differences[name]))
    ax.fill_between(points, low, high, color=canvas.colours["observed"], alpha=0.6, linewidth=0, label="band")
    ax.axhline(0, color=canvas.colours["grey"], linewidth=0.7)
    is_inside = result.verdicts[name] == CALIBRATED
    colour = canvas.colours["accent" if is_inside else "second"]
    ax.plot(points, difference, color=colour, linewidth=1.3, label="ECDF difference")
    ax.set_xlim(0, 1)
    ax.set_xticks([0, 0.5, 1], labels=["0", "½", "1"])
    mean, error = result.coverage(name)
    p = f"p = {result.p[name]:.2g}" if result.p[name] >= MIN_P else f"p < {MIN_P:g}"
    is_low = bool(difference.mean() < 0)  # the text is on the other side of the curve
    y, alignment = (0.97, "top") if is_low else (0.03, "bottom")
    lines = [p, "90% interval", f"covers {mean:.0%} ± {error:.0%}"]
    text = "\n".join(lines if canvas.is_narrow else [lines[0], " ".join(lines[1:])])
    style: dict[str, Any] = {"fontsize": SMALL_FONT_SIZE - 1, "color": canvas.colours["grey"], "va": alignment}
    style["bbox"] = {"facecolor": canvas.colours["paper"], "alpha": 0.7, "linewidth": 0, "pad": 1}
    ax.text(0.03, y, text, transform=ax.transAxes, **style)


# --------------------------------------------------------------------------------------------------------------------
# Plots of comparisons: the differences of two results with their intervals; estimated and exact effects.


MAX_CELLS = 24
ROW_HEIGHT = 0.17  # inches


def plot_result_comparison(result: ResultComparison, canvas: Canvas, *, top: int = MAX_CELLS) -> None:
    """Plot the `top` largest differences of two results, with intervals; filled where the adjusted p is at most 0.05.

    The cells have the order of the results.
    """
    ranked = [k for k in rank_by_size(result.difference) if bool(result.difference[k].isfinite())]
    if not ranked:
        raise BNetError("this comparison has no plot", expected="differences that are finite")
    order = sorted(ranked[: check_int("top", top)])
    labels = [result.cells[k] for k in order]
    ax = canvas.add_axes(3.2, ROW_HEIGHT * len(order))
    difference = to_numpy(result.difference)[order]
    rows, colour = np.arange(len(order)), canvas.colours["accent"]
    if result.low is not None and result.high is not None:
        low, high = (to_numpy(end)[order] for end in (result.low, result.high))
        ax.hlines(rows, low, high, color=colour, linewidth=1.2, zorder=2)
    is_sure = np.zeros(len(order), dtype=bool)
    if result.adjusted_p is not None:
        is_sure = to_numpy(result.adjusted_p)[order] <= LEVEL
    face = [colour if sure else canvas.colours["paper"] for sure in is_sure]
    ax.scatter(difference, rows, s=16, c=face, edgecolors=colour, linewidths=1.0, zorder=3)
    ax.axvline(0, color=canvas.colours["grey"], linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
    canvas.label_rows(ax, labels, 40)
    canvas.set_axis_labels(ax, f"{result.measure}, first − second")
    first, second = result.examples
    count = f"{first} paired sentence{'s' * (first != 1)}" if result.paired else f"{first} and {second} sentences"
    canvas.set_title(f"Difference of two results ({result.kind}), {count}")
    if len(order) < len(result.cells):
        canvas.add_note(f"The {len(order)} largest of {len(result.cells):,} differences.")
    if result.adjusted_p is not None:
        interval = f"Lines: {result.confidence:.0%} intervals. " if result.low is not None else ""
        canvas.add_note(f"{interval}Filled: p at most {LEVEL}, adjusted for {len(result.cells):,} cells (max-T).")


def plot_estimate_calibration(result: EstimateCalibration, canvas: Canvas) -> None:
    """Plot the exact effects of some cells by their estimates to first order; on the line they are equal."""
    frame = result.to_dataframe()
    estimate, exact = frame["estimate"].to_numpy(), frame["exact"].to_numpy()
    ax = canvas.add_axes(2.5, 2.5, has_fixed_shape=True)
    ax.scatter(estimate, exact, s=14, color=canvas.colours["accent"], alpha=0.8, linewidths=0, zorder=3)
    low, high = (float(f(np.concatenate([[0.0], estimate, exact]))) for f in (np.min, np.max))
    margin = 0.06 * (high - low or 1.0)
    ends = low - margin, high + margin
    ax.plot(ends, ends, color=canvas.colours["grey"], linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
    ax.set_xlim(*ends)
    ax.set_ylim(*ends)
    canvas.set_axis_labels(ax, "estimated effect", "exact effect")
    canvas.set_title(f"Estimated and exact effects of {len(frame):,} cells")
    canvas.add_note(f"{result.caption.partition(': ')[2].capitalize()}.")


MIN_PANEL_WIDTH = 1.9  # inches of a panel with axes
FIT_VIEWS = ("pi", "theta", "history")
MAX_RANGE_RATIO = 5.0  # a fit below this multiple of the range of the better fits is drawn at the lower edge
MAX_UNSMOOTHED_STEPS = 120  # a longer curve is drawn in a pale colour, with its running mean


def plot_training(result: Trained[Any], canvas: Canvas) -> None:
    """Plot the loss of each step, and the loss on held-out sentences."""
    ax = canvas.add_axes(4.1, 2.1)
    _draw_curve(canvas, ax, result.losses, "loss")
    if result.held_out:
        steps, values = zip(*result.held_out, strict=True)
        _draw_points(canvas, ax, steps, values, "held out")
    canvas.style_curve_axes(ax, "step", "loss")
    canvas.add_legend(ax, loc="best")


def plot_fit(
    result: Fit[Any], canvas: Canvas, *, show: str | None = None, owner: str | None = None, share: float = 0.9
) -> None:
    """Plot the head probabilities `pi` of each selector and the history of the fit, or one of them, or a table `theta`.

    `owner` chooses one selector or one table. If the fit has a posterior, intervals with probability `share` are drawn.
    """
    check_choice("show", show, (None, *FIT_VIEWS))
    check_fraction("share", share)
    if owner is not None and show == "history":
        raise BNetError("owner= has no effect with show='history'", hint="Use show='pi' or show='theta'")
    if show == "theta":
        _plot_theta(result, canvas, owner, share)
        return
    available = {"pi": result.selectors, "history": result.measured or result.bounds[1:]}
    views = [name for name, value in available.items() if value]
    selected = [show] if show is not None else views[:1] if canvas.user_axes is not None else views
    if not selected or any(view not in views for view in selected):
        allowed = ", ".join(f"show={view!r}" for view in (*views, *(["theta"] if result.theta else [])))
        if show is None:
            hint = f"Pass {allowed}" if allowed else None
            raise BNetError("this fit has no table pi and no history to plot", hint=hint)
        raise BNetError("show", expected="a part that this fit has", actual=show, allowed=allowed)
    selectors = _choose_selectors(result, owner) if "pi" in selected else []
    if canvas.user_axes is not None and len(selectors) > 1:
        canvas.add_note(f"Selector {selectors[0]} of {', '.join(selectors)}; choose another with owner=.")
        selectors = selectors[:1]
    num_panels = len(selectors) + ("history" in selected)
    num_columns = count_columns(canvas, num_panels, 2 if num_panels == 4 else 3, MIN_PANEL_WIDTH)
    rows = math.ceil(num_panels / num_columns)
    width = canvas.page_width / num_columns if num_columns > 1 else 3.1 if selectors else 4.1
    panels = canvas.add_panels(rows, num_columns, width, 2.0)
    for selector, ax in zip(selectors, panels, strict=False):
        _plot_pi(result, canvas, ax, selector, share)
    if "history" in selected:
        _plot_history(result, canvas, panels[len(selectors)])
    for ax in panels[num_panels:]:
        ax.set_visible(False)
    canvas.set_title("" if num_panels == 1 else f"Fit by {result.method.upper()}, {result.sentences:,} sentences")
    canvas.add_note(f"Approximate: {result.approximate}." if result.approximate else "")


def plot_heads(result: Heads, canvas: Canvas, *, show: str = "usage") -> None:
    """Plot the usage of each head, with dead ones labelled; or the cosine similarity of the heads' matrices."""
    check_choice("show", show, ("usage", "cosine"))
    if show == "usage":
        ax = canvas.add_axes(max(2.2, 0.5 * len(result.usage)), 1.9)
        _plot_usage(canvas, ax, result)
        canvas.set_title(f"{result.live} of {len(result.usage)} heads live, effective number {result.effective:.2f}")
        return
    if not result.cosine:
        raise BNetError("these heads have no matrices to compare", hint="Use show='usage'")
    names = tuple(str(k) for k in range(len(result.usage)))
    maps = [HeatMapData(to_numpy(value.double()), names, names, name) for name, value in result.cosine.items()]
    labels: Any = {"value_label": "cosine", "x": "head", "y": "head"}
    num_columns = count_columns(canvas, len(maps), 4)
    draw_matrix(canvas, maps, **labels, num_columns=num_columns, limits=(-1.0, 1.0), square=True)
    canvas.set_title("Similarity of heads" if len(maps) > 1 else maps[0].name)


def plot_comparison(result: Comparison, canvas: Canvas) -> None:
    """Plot how many sentences each pair of heads of two fits has in common, with matched heads framed."""
    overlap = to_numpy(result.overlap.double())
    rows, columns = (tuple(str(k) for k in range(size)) for size in overlap.shape)
    labels: Any = {"value_label": "sentences in common", "x": "head of the other fit", "y": "head of this fit"}
    (ax,) = draw_matrix(canvas, [HeatMapData(overlap, rows, columns)], **labels, square=True)
    for head, match in enumerate(result.match):
        if match >= 0:
            frame_cell(canvas, ax, head, match)
    canvas.set_title(f"Adjusted Rand index {result.agreement:.2f}")
    gain = f"{format_digits(result.gain, sign=True)} ± {format_digits(result.gain_error, 2)}"
    canvas.add_note(f"Red frames: matched heads. Gain: {gain} nats per sentence.")


def plot_model_comparison(result: ModelComparison, canvas: Canvas) -> None:
    """Plot the held-out density of each fit by its number of heads, with paired errors; the choice is marked.

    If fits have equal numbers of heads, the x axis has the labels of the fits.
    """
    density, gain, error = (to_numpy(v) for v in (result.density, result.gain, result.gain_error))
    labels, heads = [*result.fits], np.array(result.heads)
    best, choice = labels.index(result.best), labels.index(result.choice)
    is_by_heads = len(set(result.heads)) == len(heads)
    order = np.argsort(heads, kind="stable")
    x = np.empty(len(heads))
    x[order] = heads[order] if is_by_heads else np.arange(len(heads))
    is_in_range = _find_fits_in_range(gain, error, result.tie)
    is_in_range[choice] = True
    ax = canvas.add_axes(max(2.8, 0.42 * len(heads) + 1.0), 2.0)
    accent, second, grey = (canvas.colours[name] for name in ("accent", "second", "grey"))
    ax.axhline(density[best], color=grey, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    shown = [k for k in order if is_in_range[k]]
    spread = np.nan_to_num(error[shown])
    if is_by_heads:
        ax.plot(x[shown], density[shown], color=accent, linewidth=0.9, alpha=0.5, zorder=2)
    bars: Any = {"fmt": "o", "color": accent, "markersize": 4.5, "elinewidth": 1.1, "capsize": 2.5, "zorder": 3}
    ax.errorbar(x[shown], density[shown], yerr=spread, **bars, label="paired standard error")
    ring: Any = {"markersize": 10, "markerfacecolor": "none", "markeredgecolor": second, "markeredgewidth": 1.3}
    ax.plot(x[choice], density[choice], "o", **ring, zorder=4, linestyle="none", label="choice")
    low, high = float((density[shown] - spread).min()), float((density[shown] + spread).max())
    margin = max(0.12 * (high - low), result.tie)
    low, high = low - (2.2 if len(shown) < len(order) else 1) * margin, high + margin
    ax.set_ylim(low, high)
    for k in order:
        if not is_in_range[k]:
            ax.plot(x[k], low + 0.05 * (high - low), "v", color=accent, markersize=4.5, markerfacecolor="none")
            text, style = format_digits(float(gain[k]), sign=True), {"ha": "center", "va": "bottom", "color": grey}
            canvas.add_text(ax, x[k], low + 0.1 * (high - low), text, **style)
    canvas.style_curve_axes(ax, "heads" if is_by_heads else "fit", "log density, nats per sentence")
    ax.set_xlim(x.min() - 0.5, x.max() + 0.5)
    if not is_by_heads:
        canvas.set_tick_labels(ax, "x", [str(labels[k]) for k in order])
    canvas.add_legend(ax, is_above=True, ncols=2)
    unit = " heads" if labels == heads.tolist() else ""
    canvas.set_title(f"Choice: {labels[choice]}{unit}")
    canvas.add_note(f"{result.criterion[0].upper()}{result.criterion[1:]}, {result.densities.shape[1]:,} sentences.")
    canvas.add_note(f"Dashed line: the best, {labels[best]}{unit}. Errors: of the difference from it.")
    canvas.add_note(
        "" if is_in_range.all() else "Triangles: fits below the axis, with their differences from the best."
    )


def _find_fits_in_range(gain: FloatArray, error: FloatArray, tie: float) -> BoolArray:
    """Find the fits that fit on one scale with the best: a much worse one would hide the differences of the others."""
    is_in_range, extent = np.zeros(len(gain), dtype=bool), tie
    for k in np.argsort(-gain, kind="stable"):
        if is_in_range.sum() >= 2 and -gain[k] > MAX_RANGE_RATIO * extent:
            break
        if np.isfinite(gain[k]):
            is_in_range[k], extent = True, max(extent, float(np.nan_to_num(error[k]) - gain[k]))
    return is_in_range


def plot_check(result: Check, canvas: Canvas) -> None:
    """Plot the z-score of each statistic of the data under the posterior predictive distribution."""
    names = list(result.observed)
    deviation = np.array([result.spread[name] for name in names])
    difference = np.array([result.observed[name] - result.mean[name] for name in names])
    z = np.divide(difference, deviation, out=np.where(difference == 0, 0.0, np.nan), where=deviation > 0)
    ax = canvas.add_axes(3.4, 0.26 * len(names))
    style: Any = {"alpha": 0.5, "linewidth": 0, "label": "2 standard deviations of the samples"}
    ax.axvspan(-2, 2, color=canvas.colours["observed"], **style)
    ax.axvline(0, color=canvas.colours["grey"], linewidth=0.8)
    ax.plot(z, range(len(names)), "o", color=canvas.colours["accent"], markersize=4.5, label="data")
    canvas.label_rows(ax, names)
    half_width = max(3.0, float(np.nanmax(np.abs(z), initial=0.0)) * 1.15)
    ax.set_xlim(-half_width, half_width)
    right = ax.secondary_yaxis("right")
    right.set_yticks(range(len(names)), labels=[f"p = {result.p[name]:.2f}" for name in names])
    right.tick_params(length=0, labelsize=6.5, labelcolor=canvas.colours["grey"])
    right.spines["right"].set_visible(False)
    canvas.set_axis_labels(ax, "z-score: standard deviations from the mean of the samples")
    canvas.add_legend(ax, is_above=True, ncols=2)
    constant = [name for name, value in zip(names, z, strict=True) if np.isnan(value)]
    canvas.add_note(f"Not drawn, because all samples are equal: {', '.join(constant)}." if constant else "")


def plot_cost(result: Cost, canvas: Canvas, *, show: str = "flops") -> None:
    """Plot the FLOPs, parameters or bytes of each node template, in descending order."""
    options = ("flops", "parameters", "value_bytes", "parameter_bytes")
    check_choice("show", show, options)
    rows = sorted((row for row in result.rows if getattr(row, show)), key=lambda row: -getattr(row, show))
    if not rows:
        raise BNetError("show", expected="a cost above 0 of some template", actual=show, allowed=", ".join(options))
    numbers = np.array([float(getattr(row, show)) for row in rows])
    scale, unit = next((s, u) for s, u in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")) if numbers[0] >= s)
    unit_names = {"flops": "FLOPs", "value_bytes": "bytes of values", "parameter_bytes": "bytes of parameters"}
    unit_name = unit_names.get(show, show)
    series = BarSeries(numbers[:25] / scale)
    value_label = f"{unit + ' ' if unit else ''}{unit_name}"
    draw_bars(canvas, [series], [row.template for row in rows[:25]], value_label=value_label, category_label="template")
    if show == "flops" and result.unknown:
        canvas.add_note(f"Unknown FLOPs: {', '.join(result.unknown)}.")
    if len(rows) > 25:
        canvas.add_note(
            f"Showing the 25 largest of {len(rows)} templates; "
            f"the others have {format_digits(float(numbers[25:].sum()) / scale)} {value_label}."
        )
    words = ", ".join(f"{n:,}" for n in result.words.values())
    canvas.set_title(f"{result.name}, {words} words, batch {result.batch}")


def _choose_selectors(result: Fit[Any], owner: str | None) -> list[str]:
    """One selector for each owner of a table, or the selector of `owner`."""
    by_owner: dict[str, str] = {}
    for name in result.selectors:
        by_owner.setdefault(result.network.get_spec(name).param_prefix, name)
    if owner is not None and owner not in by_owner:
        raise BNetError("owner", expected="a selector", actual=owner, allowed=", ".join(by_owner) or None)
    return list(by_owner.values()) if owner is None else [by_owner[owner]]


def _plot_pi(result: Fit[Any], canvas: Canvas, ax: Axes, selector: str, share: float) -> None:
    """Plot the probabilities of the states of one selector."""
    heads = result.heads_of(selector)
    spec = result.network.get_spec(selector)
    low, high = (None, None) if spec.parents else _posterior_interval(result, f"{spec.param_prefix}.logits", share)
    if spec.parents:
        canvas.add_note(f"P({selector}): the stationary distribution of the chain. show='theta' draws its table.")
    _plot_usage(canvas, ax, heads, low, high)
    canvas.set_panel_title(ax, f"{heads.live} of {len(heads.usage)} live, effective {heads.effective:.2f}")
    canvas.add_note(f"Intervals: {share:.0%} of the posterior." if low is not None else "")


def _plot_usage(
    canvas: Canvas, ax: Axes, heads: Heads, low: FloatArray | None = None, high: FloatArray | None = None
) -> None:
    """Draw the usage of each head as a bar."""
    labels = [f"{k} (dead)" if k in heads.dead else str(k) for k in range(len(heads.usage))]
    usage = to_numpy(heads.usage.double()).reshape(-1)
    names: Any = {"value_label": f"P({heads.selector})", "category_label": heads.selector}
    draw_bars(canvas, [BarSeries(usage, low=low, high=high)], labels, **names, ax=ax)


def _plot_history(result: Fit[Any], canvas: Canvas, ax: Axes) -> None:
    """The objective by step, and the criterion of each restart on the sentences that evaluate the fit."""
    if result.bounds:
        _draw_curve(canvas, ax, result.bounds, "objective")
    restarts = sorted({restart for _, restart, _ in result.measured})
    for restart in sorted(restarts, key=lambda r: r == result.restart):
        points = [(step, value) for step, r, value in result.measured if r == restart]
        steps, values = zip(*points, strict=True)
        is_best = restart == result.restart
        style: dict[str, Any] = {"color": canvas.colours["grey"], "linewidth": 0.7, "markersize": 2.2}
        label = "other restarts" if restart == next(r for r in restarts if r != result.restart or is_best) else "_"
        if is_best:
            label, style = f"{result.evaluated_on},\nrestart {restart}", {}
        _draw_points(canvas, ax, steps, values, label, **style)
    canvas.style_curve_axes(ax, "step", f"{result.criterion} per sentence, nats")
    canvas.add_legend(ax, loc="best")


def _plot_theta(result: Fit[Any], canvas: Canvas, owner: str | None, share: float) -> None:
    """Plot the probability table of one discrete node, a row for each state of its parents."""
    tables = result.theta
    if owner is None:
        conditional = [name for name, value in tables.items() if value.dim() > 1]
        owner = (conditional or list(tables) or [""])[0]
    if owner not in tables:
        raise BNetError("owner", expected="a node with a table", actual=owner, allowed=", ".join(tables) or None)
    values = to_numpy(tables[owner].double())
    flat = values.reshape(-1, values.shape[-1])
    name = owner if owner in result.network.parameters else f"{owner}.logits"
    low, high = _posterior_interval(result, name, share)
    if low is not None and high is not None:
        low, high = low.reshape(flat.shape), high.reshape(flat.shape)
        canvas.add_note(f"Intervals: {share:.0%} of the posterior.")
    rows = [", ".join(map(str, index)) for index in np.ndindex(values.shape[:-1])] if values.ndim > 1 else [owner]
    columns = tuple(str(k) for k in range(flat.shape[1]))
    data = HeatMapData(flat, tuple(rows), columns, low=low, high=high)
    draw_matrix(canvas, [data], value_label=f"P({owner} | parents)", x=f"state of {owner}", y="state of the parents")


def _posterior_interval(result: Fit[Any], name: str, share: float) -> tuple[FloatArray | None, FloatArray | None]:
    """The interval of an identified parameter that has posterior samples with intervals, else (None, None)."""
    if name not in result.samples or not result.has_intervals:
        return None, None
    if name in find_unidentified(result.network, result.samples):
        return None, None
    low, high = result.interval(name, share)
    return to_numpy(low.double()), to_numpy(high.double())


def _draw_curve(canvas: Canvas, ax: Axes, values: Sequence[float], name: str) -> None:
    """Plot a value for each step, counted from 1; a long curve is drawn in a pale colour, with its running mean."""
    steps = np.arange(1, len(values) + 1)
    numbers = np.asarray(values, dtype=float)
    colour = canvas.colours["accent"]
    if len(values) <= MAX_UNSMOOTHED_STEPS:
        ax.plot(steps, numbers, color=colour, linewidth=1.3, label=name)
        return
    window = max(5, len(values) // 40) | 1
    ax.plot(steps, numbers, color=colour, linewidth=0.6, alpha=0.3, label=name)
    inner = np.convolve(numbers, np.ones(window) / window, mode="valid")
    middle = steps[window // 2 : window // 2 + len(inner)]
    ax.plot(middle, inner, color=colour, linewidth=1.4, label=f"mean of {window} steps")


def _draw_points(
    canvas: Canvas, ax: Axes, steps: Sequence[int], values: Sequence[float], name: str, **style: Any
) -> None:
    """Plot values at some steps as points joined by lines."""
    marks = {"marker": "o", "markersize": 3.2, "linewidth": 1.1, "color": canvas.colours["second"], "linestyle": "--"}
    ax.plot(steps, values, label=name, **{**marks, **style})
