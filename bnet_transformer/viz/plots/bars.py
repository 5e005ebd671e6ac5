"""Bars: shares of states, side by side where there are two of each, with intervals where these are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from bnet_transformer.viz.plots.canvas import PAGE, SMALL, Canvas
from bnet_transformer.viz.plots.heat import room
from bnet_transformer.viz.plots.table import Numbers
from bnet_transformer.viz.plots.words import LONGEST, shown, width

UPRIGHT = 16  # more bars than this lie on their side


@dataclass(frozen=True)
class Series:
    """A number for each label, with its name."""

    values: Numbers = field(repr=False)
    name: str = ""
    low: Numbers | None = field(default=None, repr=False)
    high: Numbers | None = field(default=None, repr=False)
    colour: str = "accent"
    hatch: str = ""

    def part(self, kept: Any) -> Series:
        """Some of the numbers."""
        low, high = (None if each is None else each[kept] for each in (self.low, self.high))
        return replace(self, values=self.values[kept], low=low, high=high)


def top_of(series: Sequence[Series], labels: Sequence[str], top: int) -> tuple[list[Series], list[str], str]:
    """The `top` greatest bars (of the last series), greatest first, if there are more; and what was left out."""
    count = len(labels)
    if count <= top:
        return list(series), list(labels), ""
    kept = np.argsort(-np.abs(np.nan_to_num(series[-1].values)), kind="stable")[:top]
    chosen = [each.part(kept) for each in series]
    rest = float(np.nansum(np.delete(series[-1].values, kept)))
    told = f"The {top} greatest of {count:,}; the others have {rest:.3g} together."
    return chosen, [labels[k] for k in kept], told


def bars(
    canvas: Canvas,
    ax: Axes | None,
    series: Sequence[Series],
    labels: Sequence[str],
    *,
    what: str,
    of: str,
    longest: int = LONGEST,
) -> Axes:
    """Bars for each label: upright if there are few, with short labels; lying if not. Numbers at their ends."""
    widest = max(width(shown(label, longest), SMALL + 0.5) for label in labels)
    upright = len(labels) <= UPRIGHT and widest < 60
    across = max(2.6, min(PAGE, (0.26 + 0.26 * len(series)) * len(labels) + 0.9))
    long = max(1.3, (0.1 + 0.13 * len(series)) * len(labels))
    told = ax is not None
    if ax is None:
        ax = canvas.axes(across, 2.3) if upright else canvas.axes(min(PAGE, 3.4 + room(labels, longest)), long + 0.8)
    if told or canvas.given is not None:
        across, long = canvas.size(ax)
    places = np.arange(len(labels))
    thick = (0.74 if len(labels) > 3 else 0.56) / len(series)
    for k, each in enumerate(series):
        _one(canvas, ax, places + (k - (len(series) - 1) / 2) * thick, thick * 0.94, each, upright)
    if upright:
        canvas.words(ax, "x", labels, across - 0.7, longest)
        canvas.named(ax, of, what)
    else:
        canvas.words(ax, "y", labels, long, longest)
        ax.set_ylim(len(labels) - 0.4, -0.6)
        canvas.named(ax, what, of)
    ax.tick_params(axis="x" if upright else "y", length=0)
    _margin(ax, series, upright)
    if len(series) > 1:
        canvas.legend(
            ax, handles=ax.containers, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(series), borderaxespad=0.2
        )
    return ax


def _one(canvas: Canvas, ax: Axes, places: Any, thick: float, each: Series, upright: bool) -> None:
    colour = canvas.colours.get(each.colour, each.colour)
    draw: Any = ax.bar if upright else ax.barh
    drawn = draw(places, np.nan_to_num(each.values), thick, color=colour, label=each.name or None, linewidth=0)
    for bar in drawn:
        bar.set_hatch(each.hatch)
    ends = np.maximum(np.nan_to_num(each.values), 0)
    if each.low is not None and each.high is not None:
        line: Any = {"color": canvas.colours["ink"], "linewidth": 1.0, "label": f"interval {each.name}".strip()}
        (ax.vlines if upright else ax.hlines)(places, each.low, each.high, **line)
        ends = np.maximum(ends, np.nan_to_num(each.high))
    if len(places) > 30:
        return
    style: Any = {"ha": "center", "va": "bottom"} if upright else {"ha": "left", "va": "center_baseline"}
    for place, end, value in zip(places, ends, each.values, strict=True):
        text = "none" if np.isnan(value) else f"{value:.2f}" if abs(value) < 100 else f"{value:.3g}"
        at, offset = ((place, end), (0, 2)) if upright else ((end, place), (3, 0))
        ax.annotate(text, at, offset, textcoords="offset points", fontsize=6.5, color=canvas.colours["grey"], **style)


def _margin(ax: Axes, series: Sequence[Series], upright: bool) -> None:
    """From 0 (or below) to the highest bar, with room for its number."""
    every = np.concatenate([x for each in series for x in (each.values, each.low, each.high) if x is not None])
    low, high = float(np.nanmin(every, initial=0.0)), float(np.nanmax(every, initial=0.0))
    span = (high - low) or 1.0
    ends = (low - (0.12 * span if low < 0 else 0), high + (0.14 if upright else 0.12) * span)
    (ax.set_ylim if upright else ax.set_xlim)(*ends)
