"""Plots of simulation-based calibration: ECDF differences of the ranks with simultaneous bands."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from bnet_transformer._core.checks import check_names
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import BASE_FONT
from bnet_transformer.learning.calibration import Calibration
from bnet_transformer.learning.calibration.result import CALIBRATED
from bnet_transformer.plots.canvas import SMALL_FONT_SIZE, Canvas

MAX_COLUMNS = 3
PANEL_HEIGHT = 1.55  # inches
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
    if len(names) == 1:
        panels = [canvas.add_axes(3.4, 2.3)]
    else:
        size = canvas.page_width * columns / MAX_COLUMNS, PANEL_HEIGHT * rows + 0.3
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
    if not canvas.is_small:
        ax.text(0.03, y, text, transform=ax.transAxes, fontfamily=canvas.with_font([BASE_FONT]), **style)
