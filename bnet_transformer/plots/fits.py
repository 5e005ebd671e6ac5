"""Plots of what was fitted or trained: posteriors of tables, heads, comparisons, checks, curves; and of costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.checks import check_choice, check_fraction as check_share
from bnet_transformer.cost import Cost
from bnet_transformer.errors import BNetError
from bnet_transformer.learning.fit import Check, Comparison, Fit, Heads
from bnet_transformer.learning.training.loop import Trained
from bnet_transformer.plots.canvas import PAGE_WIDTH, Canvas
from bnet_transformer.plots.heat_maps import FloatArray, HeatMapData, draw_heat_map, draw_heat_maps, frame_cell
from bnet_transformer.plots.labelled_arrays import BarSeries, draw_bars

FIT_VIEWS = ("pi", "theta", "history")
MAX_UNSMOOTHED_STEPS = 120  # more steps than this are drawn pale, with their running mean over them


def plot_training(result: Trained[Any], canvas: Canvas) -> None:
    """The loss at each step, and on held-out sentences."""
    ax = canvas.add_axes(4.6, 2.5)
    _draw_curve(canvas, ax, result.losses, "loss")
    if result.held_out:
        steps, values = zip(*result.held_out, strict=True)
        _draw_points(canvas, ax, steps, values, "held out")
    canvas.style_curve_axes(ax, "step", "loss", 7)
    canvas.add_legend(ax, loc="best")


def plot_fit(
    result: Fit[Any], canvas: Canvas, *, show: str | None = None, owner: str | None = None, share: float = 0.9
) -> None:
    """The shares `pi` of the heads of every selector and how the fit went; or one of them; or a table `theta`.

    `owner` chooses one selector, or one table. Where there is a posterior, its intervals hold a `share` of it.
    """
    check_choice("show", show, (None, *FIT_VIEWS))
    check_share("share", share)
    if owner is not None and show == "history":
        raise BNetError("owner", expected="owner= of a table: show='pi' or show='theta'", actual=owner)
    if show == "theta":
        _plot_theta(result, canvas, owner, share)
        return
    has = {"pi": result.selectors, "history": result.bounds or result.measured}
    able = [name for name, found in has.items() if found]
    wanted = [show] if show is not None else able[:1] if canvas.user_axes is not None else able
    if not wanted or any(each not in able for each in wanted):
        allowed = ", ".join(f"show={each!r}" for each in (*able, *(["theta"] if result.theta else [])))
        raise BNetError(
            "show", expected="what this fit has", actual=show or "neither pi nor a history", allowed=allowed
        )
    chosen = _choose_selectors(result, owner) if "pi" in wanted else []
    if canvas.user_axes is not None and len(chosen) > 1:
        canvas.add_note(f"{chosen[0]} of the selectors {', '.join(chosen)}; owner= chooses another.")
        chosen = chosen[:1]
    count = len(chosen) + ("history" in wanted)
    across = min(2 if count == 4 else 3, count)
    rows = math.ceil(count / across)
    wide = PAGE_WIDTH if across > 1 else 3.6 if chosen else 4.6
    panels = canvas.add_panels(rows, across, wide, 2.5 * rows)
    for selector, ax in zip(chosen, panels, strict=False):
        _plot_pi(result, canvas, ax, selector, share)
    if "history" in wanted:
        _plot_history(result, canvas, panels[len(chosen)])
    for ax in panels[count:]:
        ax.set_visible(False)
    canvas.set_title("" if count == 1 else f"{result.method} of {result.sentences:,} sentences")
    canvas.add_note(f"Approximate: {result.approximate}." if result.approximate else "")


def plot_heads(result: Heads, canvas: Canvas, *, show: str = "usage") -> None:
    """The share of each head, dead ones hatched; or the cosines between the heads' matrices."""
    check_choice("show", show, ("usage", "cosine"))
    if show == "usage":
        ax = canvas.add_axes(max(2.8, min(6.9, 0.5 * len(result.usage) + 0.9)), 2.4)
        _plot_usage(canvas, ax, result)
        canvas.set_title(f"{result.live} live heads of {len(result.usage)}, {result.effective:.2f} in effect")
        return
    if not result.cosine:
        raise BNetError("show", expected="heads with matrices", actual="none", allowed="'usage'")
    names = tuple(str(k) for k in range(len(result.usage)))
    maps = [HeatMapData(to_numpy(value.double()), names, names, name) for name, value in result.cosine.items()]
    told: Any = {"value_label": "cosine", "x": "head", "y": "head"}
    if len(maps) == 1:
        draw_heat_map(canvas, maps[0], **told, limits=(-1.0, 1.0), square=True)
        canvas.set_title(maps[0].name)
        return
    draw_heat_maps(canvas, maps, **told, num_columns=min(4, len(maps)), limits=(-1.0, 1.0))
    canvas.set_title("How alike the heads are")


def plot_comparison(result: Comparison, canvas: Canvas) -> None:
    """How many sentences a head of each fit answers for, the matches framed."""
    overlap = to_numpy(result.overlap.double())
    rows, columns = (tuple(str(k) for k in range(size)) for size in overlap.shape)
    told: Any = {"value_label": "answered for by both", "x": "head of the other fit", "y": "head of this fit"}
    ax = draw_heat_map(canvas, HeatMapData(overlap, rows, columns), **told, square=True)
    for head, match in enumerate(result.match):
        if match >= 0:
            frame_cell(canvas, ax, head, match)
    canvas.set_title(f"Adjusted Rand index {result.agreement:.2f}")
    canvas.add_note(f"Red frames: matched heads. Gain {result.gain:+.3g} ± {result.gain_error:.2g} nats a sentence.")


def plot_check(result: Check, canvas: Canvas) -> None:
    """Each statistic of the data, in standard deviations of the draws from their mean."""
    names = list(result.observed)
    spread = np.array([result.spread[name] for name in names])
    away = np.array([result.observed[name] - result.mean[name] for name in names])
    z = np.divide(away, spread, out=np.where(away == 0, 0.0, np.nan), where=spread > 0)
    ax = canvas.add_axes(4.8, 0.26 * len(names) + 1.0)
    ax.axvspan(-2, 2, color=canvas.colours["observed"], alpha=0.5, linewidth=0, label="2 deviations of the draws")
    ax.axvline(0, color=canvas.colours["grey"], linewidth=0.8)
    ax.plot(z, range(len(names)), "o", color=canvas.colours["accent"], markersize=4.5, label="data")
    canvas.set_tick_labels(ax, "y", names, 0.26 * len(names))
    far = max(3.0, float(np.nanmax(np.abs(z), initial=0.0)) * 1.15)
    ax.set_xlim(-far, far)
    ax.set_ylim(len(names) - 0.4, -0.6)
    right = ax.secondary_yaxis("right")
    right.set_yticks(range(len(names)), labels=[f"p = {result.p[name]:.2f}" for name in names])
    right.tick_params(length=0, labelsize=6.5, labelcolor=canvas.colours["grey"])
    right.spines["right"].set_visible(False)
    canvas.set_axis_labels(ax, "deviations from the mean of the draws")
    canvas.add_legend(ax, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    still = [name for name, value in zip(names, z, strict=True) if np.isnan(value)]
    canvas.add_note(f"Not drawn, since all draws agree: {', '.join(still)}." if still else "")


def plot_cost(result: Cost, canvas: Canvas, *, show: str = "flops") -> None:
    """The FLOPs, parameters or bytes of each node template, the costly first."""
    options = ("flops", "parameters", "value_bytes", "parameter_bytes")
    check_choice("show", show, options)
    rows = sorted((row for row in result.rows if getattr(row, show)), key=lambda row: -getattr(row, show))
    if not rows:
        raise BNetError("show", expected="a cost that some template has", actual=show, allowed=", ".join(options))
    numbers = np.array([float(getattr(row, show)) for row in rows])
    scale, unit = next((s, u) for s, u in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")) if numbers[0] >= s)
    told = {"flops": "FLOPs", "value_bytes": "bytes of values", "parameter_bytes": "bytes of parameters"}
    what = told.get(show, show)
    series = BarSeries(numbers[:25] / scale)
    of = f"{unit + ' ' if unit else ''}{what}"
    draw_bars(canvas, [series], [row.template for row in rows[:25]], value_label=of, category_label="template")
    if show == "flops" and result.unknown:
        canvas.add_note(f"FLOPs not known of {', '.join(result.unknown)}.")
    if len(rows) > 25:
        canvas.add_note(
            f"The 25 greatest of {len(rows)} templates; the others have {numbers[25:].sum() / scale:.3g} {of}."
        )
    words = ", ".join(f"{n:,}" for n in result.words.values())
    canvas.set_title(f"{result.name}, {words} words, batch {result.batch}")


def _choose_selectors(result: Fit[Any], owner: str | None) -> list[str]:
    """The selectors that are drawn: all, one of each owner of a table; or that of one owner."""
    by_owner: dict[str, str] = {}
    for name in result.selectors:
        by_owner.setdefault(result.network.get_spec(name).param_prefix, name)
    if owner is not None and owner not in by_owner:
        raise BNetError("owner", expected="a selector", actual=owner, allowed=", ".join(by_owner) or "none")
    return list(by_owner.values()) if owner is None else [by_owner[owner]]


def _plot_pi(result: Fit[Any], canvas: Canvas, ax: Axes, selector: str, share: float) -> None:
    found = result.heads_of(selector)
    low, high = _posterior_interval(result, f"{result.network.get_spec(selector).param_prefix}.logits", share)
    _plot_usage(canvas, ax, found, low, high)
    canvas.set_panel_title(ax, f"{found.live} live of {len(found.usage)}, {found.effective:.2f} in effect")
    canvas.add_note(f"Intervals of {share:.0%}." if low is not None else "")


def _plot_usage(
    canvas: Canvas, ax: Axes, heads: Heads, low: FloatArray | None = None, high: FloatArray | None = None
) -> None:
    labels = [f"{k} (dead)" if k in heads.dead else str(k) for k in range(len(heads.usage))]
    usage = to_numpy(heads.usage.double()).reshape(-1)
    draw_bars(
        canvas,
        [BarSeries(usage, low=low, high=high)],
        labels,
        value_label=f"P({heads.selector})",
        category_label=heads.selector,
        ax=ax,
    )


def _plot_history(result: Fit[Any], canvas: Canvas, ax: Axes) -> None:
    """The bound by step, and what each restart was measured at, on the sentences that the fit was judged on."""
    if result.bounds:
        _draw_curve(canvas, ax, result.bounds, "objective")
    restarts = sorted({restart for _, restart, _ in result.measured})
    for restart in sorted(restarts, key=lambda each: each == result.restart):
        told = [(step, value) for step, each, value in result.measured if each == restart]
        steps, values = zip(*told, strict=True)
        kept = restart == result.restart
        style: dict[str, Any] = {} if kept else {"color": canvas.colours["grey"], "linewidth": 0.7, "markersize": 2.2}
        other = "other restarts" if restart == next(r for r in restarts if r != result.restart or kept) else "_"
        _draw_points(
            canvas, ax, steps, values, f"{result.evaluated_on},\nrestart {restart}" if kept else other, **style
        )
    canvas.style_curve_axes(ax, "step", f"{result.criterion} of a sentence, nats", 7)
    canvas.add_legend(ax, loc="best")


def _plot_theta(result: Fit[Any], canvas: Canvas, owner: str | None, share: float) -> None:
    """The table of one choice, a row for each state of its parents."""
    tables = result.theta
    if owner is None:
        below = [name for name, value in tables.items() if value.dim() > 1]
        owner = (below or list(tables) or [""])[0]
    if owner not in tables:
        raise BNetError("owner", expected="a node with a table", actual=owner, allowed=", ".join(tables) or "none")
    values = to_numpy(tables[owner].double())
    flat = values.reshape(-1, values.shape[-1])
    low, high = _posterior_interval(result, f"{owner}.logits", share)
    if low is not None and high is not None:
        low, high = low.reshape(flat.shape), high.reshape(flat.shape)
        canvas.add_note(f"Intervals of {share:.0%}.")
    rows = [", ".join(map(str, index)) for index in np.ndindex(values.shape[:-1])] if values.ndim > 1 else [owner]
    columns = tuple(str(k) for k in range(flat.shape[1]))
    found = HeatMapData(flat, tuple(rows), columns, low=low, high=high)
    draw_heat_map(canvas, found, value_label=f"P({owner} | parents)", x=f"state of {owner}", y="state of the parents")


def _posterior_interval(result: Fit[Any], name: str, share: float) -> tuple[FloatArray | None, FloatArray | None]:
    if name not in result.samples:
        return None, None
    low, high = result.interval(name, share)
    return to_numpy(low.double()), to_numpy(high.double())


def _draw_curve(canvas: Canvas, ax: Axes, values: Sequence[float], name: str) -> None:
    """A number at each step, counted from 1; a long curve pale, and its running mean."""
    steps = np.arange(1, len(values) + 1)
    numbers = np.asarray(values, dtype=float)
    tint = canvas.colours["accent"]
    if len(values) <= MAX_UNSMOOTHED_STEPS:
        ax.plot(steps, numbers, color=tint, linewidth=1.3, label=name)
        return
    window = max(5, len(values) // 40) | 1
    ax.plot(steps, numbers, color=tint, linewidth=0.6, alpha=0.3, label=name)
    inner = np.convolve(numbers, np.ones(window) / window, mode="valid")
    middle = steps[window // 2 : window // 2 + len(inner)]
    ax.plot(middle, inner, color=tint, linewidth=1.4, label=f"mean of {window} steps")


def _draw_points(
    canvas: Canvas, ax: Axes, steps: Sequence[int], values: Sequence[float], name: str, **style: Any
) -> None:
    """Numbers at some steps, joined."""
    marks = {"marker": "o", "markersize": 3.2, "linewidth": 1.1, "color": canvas.colours["second"], "linestyle": "--"}
    ax.plot(steps, values, label=name, **{**marks, **style})
