"""Fit texts to the space of a figure with a given width, or of the axes of a user.

All sizes are measured in the laid out figure. Labels are wrapped, ticks are thinned, legends get fewer columns.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.gridspec import GridSpecFromSubplotSpec, SubplotSpec
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, MaxNLocator
from matplotlib.transforms import Bbox

from bnet_transformer.figures.size import MIN_FONT_SIZE
from bnet_transformer.plots.saved_figure import cut, wrap_text

SPACE_PADDING = 0.03  # inches between the content and the end of the space of the user's axes
MIN_TICK_GAP = 2.0  # points between the labels of two ticks
MIN_TICKS = 2
MAX_LABEL_LINES = 3


def get_pixels(ax: Axes) -> float:
    """The number of pixels of a point (1/72 inch)."""
    return float(ax.figure.dpi) / 72


def get_child_axes(ax: Axes) -> list[Axes]:
    """The axes inside other axes, such as a colour bar."""
    return [child for child in ax.child_axes if isinstance(child, Axes)]


def measure_axes(ax: Axes) -> tuple[float, float]:
    """The width and height of axes in points."""
    box = ax.get_window_extent()
    return float(box.width / get_pixels(ax)), float(box.height / get_pixels(ax))


def measure_unit(ax: Axes, axis_name: str) -> float:
    """The length in points of one unit of the data along a linear axis."""
    low, high = ax.get_xlim() if axis_name == "x" else ax.get_ylim()
    return measure_axes(ax)[axis_name == "y"] / abs(high - low)


def thin_numeric_ticks(ax: Axes) -> None:
    """Reduce the ticks of axes with numbers until their labels do not overlap."""
    for axis, side in ((ax.xaxis, 0), (ax.yaxis, 1)):
        locator, gap = axis.get_major_locator(), get_pixels(ax) * MIN_TICK_GAP
        if isinstance(locator, MaxNLocator) and axis.get_scale() == "linear":
            for count in range(8, MIN_TICKS - 1, -1):
                if not _labels_overlap(axis, side, gap):
                    break
                locator.set_params(nbins=count)
        elif isinstance(locator, FixedLocator) and axis.get_scale() != "linear":
            positions, labels = axis.get_majorticklocs(), [label.get_text() for label in axis.get_ticklabels()]
            while len(positions) > MIN_TICKS and _labels_overlap(axis, side, gap):
                positions, labels = positions[::2], labels[::2]
                axis.set_ticks(positions, labels=labels)


def _labels_overlap(axis: Any, side: int, gap: float) -> bool:
    """Whether the labels of neighbouring ticks overlap."""
    limits = sorted(axis.get_view_interval())
    labels = [
        tick.label1
        for tick, position in zip(axis.get_major_ticks(), axis.get_majorticklocs(), strict=False)
        if tick.label1.get_visible() and limits[0] <= position <= limits[1]
    ]
    ends = sorted(tuple(label.get_window_extent().get_points()[:, side]) for label in labels if label.get_text())
    return any(first[1] + gap > second[0] for first, second in itertools.pairwise(ends))


def wrap_axis_labels(ax: Axes, max_width: float, max_height: float | None = None) -> None:
    """Wrap the label of the x axis to a width, and that of the y axis to a height, in points."""
    _wrap(ax.xaxis.label, max_width)
    _wrap(ax.yaxis.label, max_height if max_height is not None else max(40.0, measure_axes(ax)[1]))


def wrap_panel_title(ax: Axes, points: float) -> None:
    """Wrap the title of one of several panels."""
    if ax.title.get_text():
        _wrap(ax.title, points, 2)


def _wrap(label: Text, points: float, max_lines: int = MAX_LABEL_LINES) -> None:
    """Wrap a label, which may be wrapped already."""
    text = label.get_text()
    if text:
        label.set_text(wrap_text(text.replace("\n", " "), float(label.get_fontsize()), points, max_lines))


def shrink_texts(ax: Axes, factor: float) -> None:
    """Multiply the sizes of all texts of axes, to at least the smallest legible size."""
    ticks = [axis for panel in (ax, *ax.child_axes) for axis in (panel.xaxis, panel.yaxis)]
    for axis in ticks:
        size = float(axis.get_ticklabels()[0].get_fontsize()) if axis.get_ticklabels() else MIN_FONT_SIZE
        axis.set_tick_params(labelsize=max(MIN_FONT_SIZE, size * factor), pad=1.5)
    for text in ax.findobj(Text):
        text.set_fontsize(max(MIN_FONT_SIZE, float(text.get_fontsize()) * factor))


def legend_width(ax: Axes) -> float:
    """The width of the legend of axes in points."""
    legend = ax.get_legend()
    return 0.0 if legend is None else float(legend.get_window_extent().width / get_pixels(ax))


def shorten_legend(ax: Axes, width: float) -> None:
    """Shorten the texts of a legend that is wider than `width` points."""
    legend, excess = ax.get_legend(), legend_width(ax) - width
    if legend is None or excess <= 0:
        return
    max_text_width = max(text.get_window_extent().width for text in legend.get_texts()) / get_pixels(ax)
    for text in legend.get_texts():
        text.set_text(cut(text.get_text(), float(text.get_fontsize()), max(8.0, 0.97 * (max_text_width - excess))))


def shrink_lines(ax: Axes, factor: float) -> None:
    """Multiply the widths of lines and the sizes of markers."""
    for line in ax.lines:
        line.set_linewidth(line.get_linewidth() * factor)
        line.set_markersize(line.get_markersize() * factor)
        line.set_markeredgewidth(line.get_markeredgewidth() * factor)
    for collection in ax.collections:
        collection.set_linewidth([width * factor for width in np.atleast_1d(collection.get_linewidth())])
    for patch in ax.patches:
        patch.set_linewidth(patch.get_linewidth() * factor)


# the space of the user's axes


def find_space(ax: Axes) -> Bbox:
    """The space of axes in pixels: their cell of the grid of subplots, or up to the middle of the gaps to others."""
    figure = ax.figure
    spec = ax.get_subplotspec()
    if spec is not None:
        box = _cell_of(spec, figure)
    else:
        box = _space_between(ax, figure)
    title = getattr(figure, "_suptitle", None)
    bounds = figure.bbox
    top = 1.0
    if title is not None and title.get_text():
        top = min(1.0, (title.get_window_extent().y0 - bounds.y0) / bounds.height)
    box = Bbox.from_extents(box.x0, box.y0, box.x1, min(box.y1, top))
    corners = [
        (bounds.x0 + x * bounds.width, bounds.y0 + y * bounds.height) for x, y in ((box.x0, box.y0), (box.x1, box.y1))
    ]
    pad = SPACE_PADDING * figure.dpi
    (x0, y0), (x1, y1) = corners
    return Bbox.from_extents(x0 + pad, y0 + pad, x1 - pad, y1 - pad)


def measure_cell(ax: Axes) -> float:
    """The smaller side in inches of the space of axes; of a grid of subplots the same for all cells of one size."""
    spec, box = ax.get_subplotspec(), ax.figure.bbox
    if spec is None or isinstance(spec.get_gridspec(), GridSpecFromSubplotSpec):
        space = find_space(ax)
        return float(min(space.width, space.height) / ax.figure.dpi)
    grid = spec.get_gridspec()
    width = box.width * len(spec.colspan) / grid.ncols
    return float(min(width, box.height * len(spec.rowspan) / grid.nrows) / ax.figure.dpi)


def _cell_of(spec: SubplotSpec, figure: Any) -> Bbox:
    """The cell of a grid with half of the gaps around it, in fractions of the figure."""
    grid: Any = spec.get_gridspec()
    outer = Bbox.unit()
    if isinstance(grid, GridSpecFromSubplotSpec):
        outer = _cell_of(grid._subplot_spec, figure)  # type: ignore[attr-defined]
    bottoms, tops, lefts, rights = grid.get_grid_positions(figure)
    rows, columns = spec.rowspan, spec.colspan

    def middle(ends: Any, starts: Any, k: int, last: int, edges: tuple[float, float]) -> float:
        return edges[0] if k == 0 else edges[1] if k > last else float(ends[k - 1] + starts[k]) / 2

    x0, x1 = (middle(rights, lefts, k, grid.ncols - 1, (outer.x0, outer.x1)) for k in (columns.start, columns.stop))
    y1, y0 = (middle(bottoms, tops, k, grid.nrows - 1, (outer.y1, outer.y0)) for k in (rows.start, rows.stop))
    return Bbox.from_extents(x0, y0, x1, y1)


def _space_between(ax: Axes, figure: Any) -> Bbox:
    """The space up to the middle of the gaps to other axes, in fractions of the figure."""
    box_of_axes = ax.get_position(original=True)
    x0, y0, x1, y1 = 0.0, 0.0, 1.0, 1.0
    for other in figure.axes:
        box = other.get_position(original=True)
        if other is ax or not other.get_visible():
            continue
        if box.y0 < box_of_axes.y1 and box_of_axes.y0 < box.y1:
            x0 = max(x0, (box.x1 + box_of_axes.x0) / 2) if box.x1 <= box_of_axes.x0 else x0
            x1 = min(x1, (box.x0 + box_of_axes.x1) / 2) if box.x0 >= box_of_axes.x1 else x1
        if box.x0 < box_of_axes.x1 and box_of_axes.x0 < box.x1:
            y0 = max(y0, (box.y1 + box_of_axes.y0) / 2) if box.y1 <= box_of_axes.y0 else y0
            y1 = min(y1, (box.y0 + box_of_axes.y1) / 2) if box.y0 >= box_of_axes.y1 else y1
    return Bbox.from_extents(x0, y0, x1, y1)


def move_into(ax: Axes, space: Bbox, min_share: float) -> bool:
    """Move axes so that their labels are inside a space in pixels; return whether they have `min_share` of it."""
    tight, legend = ax.get_tightbbox(), ax.get_legend()
    box = ax.get_window_extent()  # after get_tightbbox, which applies the aspect
    if tight is None:
        return True
    if legend is not None:
        extent = legend.get_window_extent()
        tight = Bbox.from_extents(tight.x0, min(tight.y0, extent.y0), tight.x1, max(tight.y1, extent.y1))
    margins = box.x0 - tight.x0, box.y0 - tight.y0, tight.x1 - box.x1, tight.y1 - box.y1
    left, bottom, right, top = (max(0.0, float(margin)) for margin in margins)
    target = [space.x0 + left, space.y0 + bottom, space.x1 - right, space.y1 - top]
    is_large = target[3] - target[1] >= min_share * space.height and target[2] - target[0] >= min_share * space.width
    target[2] = max(target[2], target[0] + 0.1 * space.width)
    target[3] = max(target[3], target[1] + 0.1 * space.height)
    set_pixel_box(ax, Bbox.from_extents(*target))
    return bool(is_large)


def set_pixel_box(ax: Axes, box: Bbox) -> None:
    """Set the position of axes in pixels."""
    bounds = ax.figure.bbox
    x0, y0 = (box.x0 - bounds.x0) / bounds.width, (box.y0 - bounds.y0) / bounds.height
    ax.set_position((x0, y0, box.width / bounds.width, box.height / bounds.height))
    ax.apply_aspect()
