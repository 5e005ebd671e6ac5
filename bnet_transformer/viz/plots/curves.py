"""Curves over steps: losses, bounds, what was measured on held-out sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from bnet_transformer.viz.plots.canvas import Canvas

NOISY = 120  # more steps than this are drawn pale, with their running mean over them


def curve(canvas: Canvas, ax: Axes, values: Sequence[float], name: str, colour: str = "accent") -> None:
    """A number at each step, counted from 1; a long curve pale, and its running mean."""
    steps = np.arange(1, len(values) + 1)
    numbers = np.asarray(values, dtype=float)
    tint = canvas.colours[colour]
    if len(values) <= NOISY:
        ax.plot(steps, numbers, color=tint, linewidth=1.3, label=name)
        return
    window = max(5, len(values) // 40) | 1
    ax.plot(steps, numbers, color=tint, linewidth=0.6, alpha=0.3, label=name)
    inner = np.convolve(numbers, np.ones(window) / window, mode="valid")
    middle = steps[window // 2 : window // 2 + len(inner)]
    ax.plot(middle, inner, color=tint, linewidth=1.4, label=f"mean of {window} steps")


def points(canvas: Canvas, ax: Axes, steps: Sequence[int], values: Sequence[float], name: str, **style: Any) -> None:
    """Numbers at some steps, joined."""
    marks = {"marker": "o", "markersize": 3.2, "linewidth": 1.1, "color": canvas.colours["second"], "linestyle": "--"}
    ax.plot(steps, values, label=name, **{**marks, **style})


def dressed(canvas: Canvas, ax: Axes, what: str) -> None:
    """Steps below, faint lines across."""
    canvas.named(ax, "step", what)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    ax.grid(axis="y", color=canvas.colours["line"], linewidth=0.5)
    ax.set_axisbelow(True)
    ax.margins(x=0.02)
    canvas.legend(ax, loc="best")
