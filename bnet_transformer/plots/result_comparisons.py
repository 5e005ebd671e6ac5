"""Plots of comparisons: the differences of two results with their intervals; estimated and exact effects."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from bnet_transformer._core.arrays import FloatArray, to_numpy
from bnet_transformer._core.checks import check_int
from bnet_transformer._core.result_comparison import LEVEL, ResultComparison
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.sweeps.calibration import EstimateCalibration
from bnet_transformer.plots.canvas import PAGE_WIDTH, Canvas
from bnet_transformer.plots.heat_maps import tick_label_width

MAX_CELLS = 24
ROW_HEIGHT = 0.17  # inches


def plot_result_comparison(result: ResultComparison, canvas: Canvas, *, top: int = MAX_CELLS) -> None:
    """Plot the `top` largest differences of two results, with intervals; filled where the adjusted p is at most 0.05.

    The cells have the order of the results.
    """
    ranked = [k for k in result._rank_cells() if bool(result.difference[k].isfinite())]
    if not ranked:
        raise BNetError("this comparison has no plot", expected="differences that are finite")
    order = sorted(ranked[: check_int("top", top)])
    labels = [result.cells[k] for k in order]
    height = ROW_HEIGHT * len(order)
    ax = canvas.add_axes(min(PAGE_WIDTH, 3.4 + tick_label_width(labels, 40)), height + 0.8)
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
    ax.set_ylim(len(order) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    _, panel_height = canvas.panel_size(ax, (0.0, height))
    canvas.set_tick_labels(ax, "y", labels, panel_height, 40)
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
    ax = canvas.add_axes(3.0, 2.9)
    ax.scatter(estimate, exact, s=14, color=canvas.colours["accent"], alpha=0.8, linewidths=0, zorder=3)
    _draw_diagonal(canvas, ax, np.concatenate([estimate, exact]))
    canvas.set_axis_labels(ax, "estimated effect", "exact effect")
    canvas.set_title(f"Estimated and exact effects of {len(frame):,} cells")
    canvas.add_note(f"{result.format_line().partition(': ')[2].capitalize()}.")


def _draw_diagonal(canvas: Canvas, ax: Axes, values: FloatArray) -> None:
    """Draw the line of equality over the range of the values."""
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    margin = 0.06 * (high - low or 1.0)
    ends = low - margin, high + margin
    ax.plot(ends, ends, color=canvas.colours["grey"], linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
    ax.set_xlim(*ends)
    ax.set_ylim(*ends)
