"""Plots of circuits: the effects and the tests of edges, and f(k) of several methods by the share of edges."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.checks import check_choice, check_int, check_sequence
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.circuits import FaithfulnessCurves
from bnet_transformer.interventions.circuits.curves import RANDOM, RANKINGS
from bnet_transformer.interventions.circuits.hypothesis_tests import LEVEL, CircuitTests
from bnet_transformer.interventions.circuits.result import Circuit
from bnet_transformer.plots.canvas import PAGE_WIDTH, Canvas
from bnet_transformer.plots.heat_maps import tick_label_width

MARKERS = "osD^vPX<"
MAX_EDGES = 24  # bars of edges
RANKING_TITLES = {"signed": "by signed score", "absolute": "by absolute score"}
LEGEND_LINE, LEGEND_OFFSET = 0.16, 0.4  # inches: the height of a line, and the distance of the legend from the x axis
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
    height = 2.4 + LEGEND_LINE * len(names)
    rows, columns = (len(rankings), 1) if canvas.is_narrow else (1, len(rankings))
    panels = canvas.add_panels(rows, columns, 3.3 * columns + 0.2, height * rows, sharey=True)
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
    canvas.style_curve_axes(ax, "", "", 6)
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
    canvas.set_title(f"Circuit of {result.edges:,} of {result.candidates:,} edges", is_above_legend=True)
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
    canvas.set_title(title, is_above_legend=True)
    if len(shown) < len(frame):
        canvas.add_note(f"The {len(shown)} largest of {len(frame):,} changes.")


def _draw_edges(
    canvas: Canvas, edges: Any, values: Any, is_marked: Any, names: tuple[str, str], value_label: str
) -> None:
    """Draw a horizontal bar for each edge, in one of two colours."""
    labels, numbers, marks = (np.asarray(column) for column in (edges, values, is_marked))
    height = 0.17 * len(labels)
    ax = canvas.add_axes(min(PAGE_WIDTH, 3.4 + tick_label_width(labels.tolist(), 40)), height + 0.9)
    for name, colour, mask in zip(names, ("accent", "prior"), (marks.astype(bool), ~marks.astype(bool)), strict=True):
        if mask.any():
            style: Any = {"color": canvas.colours[colour], "label": name, "linewidth": 0, "zorder": 2}
            ax.barh(np.flatnonzero(mask), numbers[mask].astype(float), 0.74, **style)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    _, panel_height = canvas.panel_size(ax, (0.0, height))
    canvas.set_tick_labels(ax, "y", labels.tolist(), panel_height, 40)
    canvas.set_axis_labels(ax, value_label, "edge")
    canvas.add_legend(ax, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=2)
