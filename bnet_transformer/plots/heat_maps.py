"""Heat maps: a single one, several panels on one scale, and cells with intervals or numbers."""

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
from bnet_transformer.figures.fonts import text_width
from bnet_transformer.figures.labels import format_token
from bnet_transformer.plots.canvas import FONT_SIZE, MAX_LABEL_LENGTH, PAGE_WIDTH, SMALL_FONT_SIZE, Canvas, make_norm

FloatArray = NDArray[np.float64]

MAX_PANELS = 256
MAX_GAPPED_CELLS = 40  # with more rows or columns, cells have no gaps and are an image in SVG and PDF


@dataclass(frozen=True)
class HeatMapData:
    """A matrix with the labels of its rows and columns, its name (and a short one), and the title of its row of panels.

    `low` and `high` are drawn as an interval in each cell; `error` is written below its number.
    """

    values: FloatArray = field(repr=False)
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    name: str = ""
    row_title: str = ""
    short_name: str = ""
    low: FloatArray | None = field(default=None, repr=False)
    high: FloatArray | None = field(default=None, repr=False)
    error: FloatArray | None = field(default=None, repr=False)


def draw_heat_map(
    canvas: Canvas,
    data: HeatMapData,
    *,
    value_label: str,
    x: str,
    y: str,
    limits: tuple[float, float] | None = None,
    square: bool = False,
    norm: Normalize | None = None,
    write_cells: Callable[[Axes, Any, float, float], None] | None = None,
) -> Axes:
    """Draw one matrix with labels on both axes, and numbers in the cells if they fit.

    `norm` is a nonlinear scale of colours. `write_cells(ax, image, width, height)` writes into the cells instead, where
    `width` and `height` are those of a cell in inches.
    """
    rows, columns = data.values.shape
    longest = MAX_LABEL_LENGTH if square else 2 * MAX_LABEL_LENGTH
    left, below = tick_label_width(data.row_labels, longest), tick_label_width(data.column_labels)
    if square:
        width = height = min(PAGE_WIDTH - left - 1.2, max(1.9, 0.3 * max(rows, columns)))
    else:
        width, height = min(PAGE_WIDTH - left - 1.2, max(2.2, 0.42 * columns)), min(3.8, max(1.0, 0.26 * rows))
    if data.low is not None or data.error is not None:
        height = min(7.0, max(1.2, (0.34 if data.low is None else 0.44) * rows))
    ax = canvas.add_axes(width + left + 1.1, height + below + 0.75)
    width, height = canvas.panel_size(ax, (width, height))
    image = draw_cells(canvas, ax, data, limits, norm)
    if square:
        ax.set_aspect("equal")
    canvas.set_tick_labels(ax, "x", data.column_labels, width)
    canvas.set_tick_labels(ax, "y", data.row_labels, height, longest)
    canvas.set_axis_labels(ax, x, y)
    if write_cells is not None:
        write_cells(ax, image, width / columns, height / rows)
    elif data.low is not None:
        draw_intervals(canvas, ax, data, image)
    elif width / columns >= 0.27 and height / rows >= 0.16:
        write_numbers(canvas, ax, data.values, image, data.error if height / rows >= 0.3 else None)
    canvas.add_colour_bar(image, value_label, [ax])
    return ax


def draw_heat_maps(
    canvas: Canvas,
    maps: Sequence[HeatMapData | None],
    *,
    value_label: str,
    x: str,
    y: str,
    num_columns: int,
    limits: tuple[float, float] | None = None,
    square: bool = True,
    aspect: float | None = None,
    max_width: float = 2.0,
    should_write_numbers: bool = False,
    should_thin_labels: bool = False,
) -> list[Axes]:
    """Draw several matrices on one scale, `num_columns` in a row; None is an empty panel.

    A panel is at most `max_width` inches wide; its height is `aspect` times its width. Only the outer panels have
    labels. If the labels do not fit, they are omitted, or with `should_thin_labels` only some of them are. With
    `should_write_numbers`, the cells have numbers if these fit.
    """
    filled = [m for m in maps if m is not None]
    if len(filled) > MAX_PANELS:
        hint = "Plot fewer panels with slice=, head= or do, such as s.do(c=1)"
        raise BudgetError("plot", expected=f"at most {MAX_PANELS} panels", actual=f"{len(filled)}", hint=hint)
    first, rows = filled[0], math.ceil(len(maps) / num_columns)
    names = ["" if m is None else m.name for m in maps]
    is_titled = [k < num_columns or names[k] != names[k - num_columns] for k in range(len(maps))]
    panel_width = (PAGE_WIDTH - 1.1) / num_columns - 0.1
    num_labels = max(len(first.column_labels), len(first.row_labels) / min(1.0, aspect or 1.0))
    labelled_width = min(max_width, panel_width - tick_label_width(first.row_labels) / num_columns)
    has_labels = should_thin_labels or labelled_width * 72 / num_labels >= 6.5
    aspect = aspect or (1.0 if square else 0.8)
    if has_labels:
        left, below = tick_label_width(first.row_labels), tick_label_width(first.column_labels)
        panel_width = min(max_width, (PAGE_WIDTH - 0.9 - left) / num_columns)
        total_height = rows * (aspect * panel_width + 0.1) + 0.16 * sum(is_titled[::num_columns]) + below + 0.4
        size = panel_width * num_columns + left + 0.9, min(9.4, total_height)
        panels = canvas.add_panels(rows, num_columns, *size, sharex=True, sharey=True)
    else:
        panel_width = min(1.8, panel_width)
        gap = 0.08, 0.22 if any(is_titled[num_columns:]) else 0.08
        panels = canvas.add_panel_grid(rows, num_columns, (panel_width, aspect * panel_width), gap)
    limits = limits or shared_limits([m.values for m in filled])
    titles = _panel_titles(canvas, maps, names, 72 * panel_width)
    image: Any = None
    for k, ax in enumerate(panels):
        data = maps[k] if k < len(maps) else None
        if data is None:
            ax.set_visible(False)
            continue
        image = draw_cells(canvas, ax, data, limits)
        canvas.set_panel_title(ax, titles[k] if is_titled[k] else "")
        canvas.set_axis_labels(ax, y=data.row_title if k % num_columns == 0 else "")
        if not has_labels:
            ax.set_xticks([])
            ax.set_yticks([])
            continue
        if square:
            ax.set_aspect("equal")
        cell = panel_width / len(first.column_labels), aspect * panel_width / len(first.row_labels)
        if should_write_numbers and cell[0] >= 0.27 and cell[1] >= 0.16:
            write_numbers(canvas, ax, data.values, image)
        is_lowest = k + num_columns >= len(maps) or maps[k + num_columns] is None
        if k % num_columns == 0:
            canvas.set_tick_labels(ax, "y", first.row_labels, aspect * panel_width * 0.95)
        if is_lowest:
            canvas.set_tick_labels(ax, "x", first.column_labels, panel_width * 0.95)
        ax.tick_params(labelleft=k % num_columns == 0, labelbottom=is_lowest)
    canvas.set_shared_labels(x, y)
    canvas.add_colour_bar(image, value_label, panels)
    return [ax for ax in panels if ax.get_visible()]


def _panel_titles(canvas: Canvas, maps: Sequence[HeatMapData | None], names: Sequence[str], points: float) -> list[str]:
    """The title of each panel: its name, or the short one if the names do not fit."""

    def fits(names: Sequence[str], max_length: int = 60) -> bool:
        return max(text_width(format_token(name, max_length), FONT_SIZE) for name in names) + 5 < points

    filled = [m for m in maps if m is not None]
    if not fits(names) and all(m.short_name for m in filled):
        canvas.add_note(f"Titles of panels are shortened; the last is {filled[-1].name}.")
        names = ["" if m is None else m.short_name for m in maps]
    longest = next((n for n in range(60, 3, -1) if fits(names, n)), 3)
    return [format_token(name, longest) if name else "" for name in names]


def draw_cells(
    canvas: Canvas, ax: Axes, data: HeatMapData, limits: tuple[float, float] | None, norm: Normalize | None = None
) -> Any:
    """Draw the cells of a matrix, the first row on top, NaN as blank; return the image, which has the colours."""
    values = np.ma.masked_invalid(data.values)
    norm = norm or make_norm(*(limits or shared_limits([data.values])))
    rows, columns = values.shape
    style: Any = {"cmap": canvas.make_colour_map(norm), "norm": norm}
    image: Any
    if max(rows, columns) > MAX_GAPPED_CELLS:
        image = ax.imshow(values, aspect="auto", interpolation="nearest", **style)
    else:
        edges = (np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5)
        image = ax.pcolormesh(*edges, values, edgecolors=canvas.colours["paper"], linewidth=0.6, **style)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    canvas.draw_frame(ax)
    return image


def frame_cell(canvas: Canvas, ax: Axes, row: int, column: int) -> None:
    """Frame one cell in red."""
    style: Any = {"edgecolor": canvas.colours["q"], "linewidth": 1.5, "fill": False, "gid": f"frame_{row}_{column}"}
    ax.add_patch(Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, **style))


def shared_limits(arrays: Sequence[FloatArray]) -> tuple[float, float]:
    """The ends of a scale: from 0 up, or symmetric about 0 if there are negative numbers."""
    numbers = np.concatenate([array.ravel() for array in arrays])
    low, high = float(np.nanmin(numbers, initial=0.0)), float(np.nanmax(numbers, initial=0.0))
    return (-max(-low, high), max(-low, high)) if low < 0 else (0.0, high or 1.0)


def probability_limits(arrays: Sequence[FloatArray]) -> tuple[float, float]:
    """The ends of a scale of probabilities: from 0 to 1, or to a smaller round number above all of them."""
    largest = max(float(np.nanmax(array, initial=0.0)) for array in arrays)
    return 0.0, next(end for end in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, math.inf) if largest <= end)


def write_numbers(canvas: Canvas, ax: Axes, values: FloatArray, image: Any, error: FloatArray | None = None) -> None:
    """Write the number of each cell, with its error below it, in a colour with contrast."""
    largest = float(np.nanmax(np.abs(values), initial=0.0))
    is_integer = bool(np.all(np.mod(values[~np.isnan(values)], 1) == 0))
    for (i, j), value in np.ndenumerate(values):
        if np.isnan(value) or (error is None and abs(value) < 0.005):
            continue
        text = f"{value:.0f}" if is_integer else f"{value:.2f}" if largest < 100 else f"{value:.3g}"
        text = text.replace("0.", ".", 1) if largest <= 1 and abs(value) < 0.995 else text
        text = text.replace("-", "−") if abs(value) >= 0.005 else "0"
        colour = canvas.contrasting_colour(image.cmap(image.norm(value)))
        style: Any = {"ha": "center", "va": "center_baseline", "color": colour}
        canvas.add_text(ax, j, i if error is None else i - 0.14, text, fontsize=6.5, **style)
        if error is not None and error[i, j] >= 0.005:
            error_text = f"{error[i, j]:.2f}".lstrip("0") if largest < 100 else f"{error[i, j]:.3g}"
            canvas.add_text(ax, j, i + 0.24, f"±{error_text}", fontsize=5.2, **style)


def draw_intervals(canvas: Canvas, ax: Axes, data: HeatMapData, image: Any) -> None:
    """Draw the interval of each cell as a vertical line, on one scale for all cells; a dot is the value."""
    assert data.low is not None and data.high is not None
    smallest, largest = float(np.nanmin(data.low, initial=0.0)), float(np.nanmax(data.high, initial=0.0))
    span = (largest - smallest) or 1.0

    def height(value: Any) -> Any:
        return 0.4 - 0.8 * (value - smallest) / span

    lines, zeros, colours, dots = [], [], [], []
    for (i, j), value in np.ndenumerate(data.values):
        if np.isnan(value):
            continue
        colour = canvas.contrasting_colour(image.cmap(image.norm(value)))
        lines.append([(j, i + height(data.low[i, j])), (j, i + height(data.high[i, j]))])
        zeros.append([(j - 0.3, i + height(0.0)), (j + 0.3, i + height(0.0))])
        dots.append((j, i + height(value)))
        colours.append(colour)
    if not dots:
        return
    ax.add_collection(LineCollection(zeros, colors=colours, linewidths=0.5, alpha=0.6, label="zero"))
    ax.add_collection(LineCollection(lines, colors=colours, linewidths=1.1, label="interval"))
    x, y = np.array(dots).T
    ax.scatter(x, y, s=8, c=colours, linewidths=0, zorder=3)
    canvas.add_note(f"Cell: value (dot) and interval, on a scale from {smallest:.2g} to {largest:.2g}; thin line: 0.")


def tick_label_width(labels: Sequence[str], max_length: int = MAX_LABEL_LENGTH) -> float:
    """The width in inches of labels at the left of an axis."""
    longest = sorted({format_token(word, max_length) for word in labels}, key=lambda word: (len(word), word))[-3:]
    return max(text_width(word, SMALL_FONT_SIZE + 0.5) for word in longest) / 72 + 0.3
