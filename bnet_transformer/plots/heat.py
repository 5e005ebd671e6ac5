"""Heat maps: one, several side by side, and one whose cells show an interval as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from bnet_transformer.errors import BudgetError
from bnet_transformer.figures.fonts import width
from bnet_transformer.figures.labels import shown
from bnet_transformer.plots.canvas import LONGEST, PAGE, SIZE, SMALL, Canvas, scaled

Numbers = NDArray[np.float64]

PANELS = 256
FINE = 40  # cells of more rows or columns have no gaps, and are written as an image in SVG and PDF


@dataclass(frozen=True)
class Map:
    """A matrix to colour: words along its rows and columns, its name (also a short one), what its row of panels is.

    `low` and `high` are drawn as an interval in each cell, `error` is written beneath its number.
    """

    values: Numbers = field(repr=False)
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    name: str = ""
    row: str = ""
    short: str = ""
    low: Numbers | None = field(default=None, repr=False)
    high: Numbers | None = field(default=None, repr=False)
    error: Numbers | None = field(default=None, repr=False)


def heat_map(
    canvas: Canvas,
    shown_map: Map,
    *,
    what: str,
    x: str,
    y: str,
    limits: tuple[float, float] | None = None,
    square: bool = False,
    norm: Normalize | None = None,
    write: Callable[[Axes, Any, float, float], None] | None = None,
) -> Axes:
    """One matrix in colours, words on both axes, numbers in the cells where there is room.

    `norm` is a scale of colours that is not even; `write` fills the cells itself: it is told the axes, what is
    coloured, and how many inches a cell is wide and high.
    """
    rows, columns = shown_map.values.shape
    longest = LONGEST if square else 2 * LONGEST
    left, below = room(shown_map.rows, longest), room(shown_map.columns)
    if square:
        across = down = min(PAGE - left - 1.2, max(1.9, 0.3 * max(rows, columns)))
    else:
        across, down = min(PAGE - left - 1.2, max(2.2, 0.42 * columns)), min(3.8, max(1.0, 0.26 * rows))
    if shown_map.low is not None or shown_map.error is not None:
        down = min(7.0, max(1.2, (0.34 if shown_map.low is None else 0.44) * rows))
    ax = canvas.axes(across + left + 1.1, down + below + 0.75)
    across, down = canvas.size(ax, (across, down))
    image = coloured(canvas, ax, shown_map, limits, norm)
    if square:
        ax.set_aspect("equal")
    canvas.words(ax, "x", shown_map.columns, across)
    canvas.words(ax, "y", shown_map.rows, down, longest)
    canvas.named(ax, x, y)
    if write is not None:
        write(ax, image, across / columns, down / rows)
    elif shown_map.low is not None:
        whiskers(canvas, ax, shown_map, image)
    elif across / columns >= 0.27 and down / rows >= 0.16:
        write_numbers(canvas, ax, shown_map.values, image, shown_map.error if down / rows >= 0.3 else None)
    canvas.bar(image, what, [ax])
    return ax


def heat_maps(
    canvas: Canvas,
    maps: Sequence[Map | None],
    *,
    what: str,
    x: str,
    y: str,
    across: int,
    limits: tuple[float, float] | None = None,
    square: bool = True,
    tall: float | None = None,
    widest: float = 2.0,
    numbers: bool = False,
    thinned: bool = False,
) -> list[Axes]:
    """Several matrices on one scale, `across` in a row, None for an empty place; words at the left and at the foot.

    A panel is at most `widest` inches wide, and `tall` times as high; `numbers` are written where there is room,
    and words as well, or with `thinned` as many of them as stand apart.
    """
    some = [each for each in maps if each is not None]
    if len(some) > PANELS:
        allowed = "slice=, head= and do (such as s.do(c=1)), which leave fewer"
        raise BudgetError("plot", expected=f"at most {PANELS} panels", actual=f"{len(some)}", allowed=allowed)
    first, count = some[0], math.ceil(len(maps) / across)
    names = ["" if each is None else each.name for each in maps]
    titled = [k < across or names[k] != names[k - across] for k in range(len(maps))]
    side = (PAGE - 1.1) / across - 0.1
    words = max(len(first.columns), len(first.rows) / min(1.0, tall or 1.0))
    worded = thinned or min(widest, side - room(first.rows) / across) * 72 / words >= 6.5
    tall = tall or (1.0 if square else 0.8)
    if worded:
        left, below = room(first.rows), room(first.columns)
        side = min(widest, (PAGE - 0.9 - left) / across)
        high = count * (tall * side + 0.1) + 0.16 * sum(titled[::across]) + below + 0.4
        panels = canvas.panels(count, across, side * across + left + 0.9, min(9.4, high), sharex=True, sharey=True)
    else:
        side = min(1.8, side)
        panels = canvas.grid(count, across, (side, tall * side), (0.08, 0.22 if any(titled[across:]) else 0.08))
    limits = limits or shared_limits([each.values for each in some])
    titles = _titles(canvas, maps, names, 72 * side)
    image: Any = None
    for k, ax in enumerate(panels):
        found = maps[k] if k < len(maps) else None
        if found is None:
            ax.set_visible(False)
            continue
        image = coloured(canvas, ax, found, limits)
        canvas.subtitle(ax, titles[k] if titled[k] else "")
        canvas.named(ax, y=found.row if k % across == 0 else "")
        if not worded:
            ax.set_xticks([])
            ax.set_yticks([])
            continue
        if square:
            ax.set_aspect("equal")
        if numbers and side / len(first.columns) >= 0.27 and tall * side / len(first.rows) >= 0.16:
            write_numbers(canvas, ax, found.values, image)
        foot = k + across >= len(maps) or maps[k + across] is None
        if k % across == 0:
            canvas.words(ax, "y", first.rows, tall * side * 0.95)
        if foot:
            canvas.words(ax, "x", first.columns, side * 0.95)
        ax.tick_params(labelleft=k % across == 0, labelbottom=foot)
    canvas.around(x, y)
    canvas.bar(image, what, panels)
    return [ax for ax in panels if ax.get_visible()]


def _titles(canvas: Canvas, maps: Sequence[Map | None], names: Sequence[str], points: float) -> list[str]:
    """What is written above each panel: its name, or the short one where names would run together."""

    def apart(names: Sequence[str], longest: int = 60) -> bool:
        return max(width(shown(name, longest), SIZE) for name in names) + 5 < points

    some = [each for each in maps if each is not None]
    if not apart(names) and all(each.short for each in some):
        canvas.note(f"Above each panel only its numbers: the last is {some[-1].name}.")
        names = ["" if each is None else each.short for each in maps]
    longest = next((n for n in range(60, 3, -1) if apart(names, n)), 3)
    return [shown(name, longest) if name else "" for name in names]


def coloured(
    canvas: Canvas, ax: Axes, shown_map: Map, limits: tuple[float, float] | None, norm: Normalize | None = None
) -> Any:
    """The cells of a matrix, first row on top; blank where there is no number."""
    values = np.ma.masked_invalid(shown_map.values)
    norm = norm or scaled(*(limits or shared_limits([shown_map.values])))
    rows, columns = values.shape
    style: Any = {"cmap": canvas.colour_map(norm), "norm": norm}
    image: Any
    if max(rows, columns) > FINE:
        image = ax.imshow(values, aspect="auto", interpolation="nearest", **style)
    else:
        edges = (np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5)
        image = ax.pcolormesh(*edges, values, edgecolors=canvas.colours["paper"], linewidth=0.6, **style)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    canvas.framed(ax)
    return image


def framed(canvas: Canvas, ax: Axes, row: int, column: int) -> None:
    """Frame one cell in red."""
    style: Any = {"edgecolor": canvas.colours["q"], "linewidth": 1.5, "fill": False, "gid": f"frame_{row}_{column}"}
    ax.add_patch(Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, **style))


def shared_limits(several: Sequence[Numbers]) -> tuple[float, float]:
    """The ends of a scale: from 0 up, or even on both sides of 0 where a number is below it."""
    every = np.concatenate([each.ravel() for each in several])
    low, high = float(np.nanmin(every, initial=0.0)), float(np.nanmax(every, initial=0.0))
    return (-max(-low, high), max(-low, high)) if low < 0 else (0.0, high or 1.0)


def up_to(several: Sequence[Numbers]) -> tuple[float, float]:
    """The ends of a scale of probabilities: up to 1, or to a round number if all are small."""
    most = max(float(np.nanmax(each, initial=0.0)) for each in several)
    return 0.0, next(end for end in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, math.inf) if most <= end)


def write_numbers(canvas: Canvas, ax: Axes, values: Numbers, image: Any, error: Numbers | None = None) -> None:
    """The number of each cell, in ink or paper, whichever is read better; its error beneath it."""
    most = float(np.nanmax(np.abs(values), initial=0.0))
    whole = bool(np.all(np.mod(values[~np.isnan(values)], 1) == 0))
    for (i, j), value in np.ndenumerate(values):
        if np.isnan(value) or (error is None and abs(value) < 0.005):
            continue
        text = f"{value:.0f}" if whole else f"{value:.2f}" if most < 100 else f"{value:.3g}"
        text = text.replace("0.", ".", 1) if most <= 1 and abs(value) < 0.995 else text
        text = text.replace("-", "−") if abs(value) >= 0.005 else "0"
        colour = canvas.contrast(image.cmap(image.norm(value)))
        style: Any = {"ha": "center", "va": "center_baseline", "color": colour}
        canvas.write(ax, j, i if error is None else i - 0.14, text, fontsize=6.5, **style)
        if error is not None and error[i, j] >= 0.005:
            spread = f"{error[i, j]:.2f}".lstrip("0") if most < 100 else f"{error[i, j]:.3g}"
            canvas.write(ax, j, i + 0.24, f"±{spread}", fontsize=5.2, **style)


def whiskers(canvas: Canvas, ax: Axes, shown_map: Map, image: Any) -> None:
    """In each cell its interval, upright on one scale for all cells, a dot for the value, a thin line for zero."""
    assert shown_map.low is not None and shown_map.high is not None
    least, most = float(np.nanmin(shown_map.low, initial=0.0)), float(np.nanmax(shown_map.high, initial=0.0))
    span = (most - least) or 1.0

    def height(value: Any) -> Any:
        return 0.4 - 0.8 * (value - least) / span

    lines, zeros, colours, dots = [], [], [], []
    for (i, j), value in np.ndenumerate(shown_map.values):
        if np.isnan(value):
            continue
        colour = canvas.contrast(image.cmap(image.norm(value)))
        lines.append([(j, i + height(shown_map.low[i, j])), (j, i + height(shown_map.high[i, j]))])
        zeros.append([(j - 0.3, i + height(0.0)), (j + 0.3, i + height(0.0))])
        dots.append((j, i + height(value)))
        colours.append(colour)
    if not dots:
        return
    ax.add_collection(LineCollection(zeros, colors=colours, linewidths=0.5, alpha=0.6, label="zero"))
    ax.add_collection(LineCollection(lines, colors=colours, linewidths=1.1, label="interval"))
    x, y = np.array(dots).T
    ax.scatter(x, y, s=8, c=colours, linewidths=0, zorder=3)
    canvas.note(f"In each cell the value (dot) and its interval, between {least:.2g} and {most:.2g}; thin line: 0.")


def room(words: Sequence[str], longest: int = LONGEST) -> float:
    """The inches that words along an axis take, across."""
    widest = sorted({shown(word, longest) for word in words}, key=lambda word: (len(word), word))[-3:]
    return max(width(word, SMALL + 0.5) for word in widest) / 72 + 0.3
