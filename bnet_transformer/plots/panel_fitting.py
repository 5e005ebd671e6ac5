"""Fit the panels of a plot to the width of a figure, or into the axes of a user."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from bnet_transformer.figures.size import MIN_FONT_SIZE
from bnet_transformer.plots import text_fitting
from bnet_transformer.plots.saved_figure import (
    NOTE_SHARE,
    PADDING,
    SHARED_LABEL_HEIGHT,
    PlotFigure,
    measure_content,
    wrap_text,
)

if TYPE_CHECKING:
    from bnet_transformer.plots.canvas import Canvas

MAX_GROWTH = 0.5  # of the height of a figure, to fill its width
FIT_STEPS = 2  # wrapped labels change the size of panels, on which labels depend
SMALL_TEXT, SMALL_LINES = 0.72, 0.65  # the factors of the sizes of texts and lines in a small space
SMALL_TITLE = 5.5  # points
SMALL_LEGEND = {
    "handlelength": 1.0,
    "labelspacing": 0.2,
    "handletextpad": 0.4,
    "columnspacing": 0.8,
    "title_fontsize": 5,
}
MIN_PANEL_SHARE = 0.38  # of the space of the user's axes; notes are omitted before a panel gets smaller


def fit_to_width(canvas: Canvas, figure: PlotFigure, width: float) -> None:
    """Lay out the figure, fit its texts, and set the height of the figure to that of its content.

    Args:
        canvas: The canvas with all panels drawn.
        figure: The figure of the canvas.
        width: The width of the figure in inches.
    """
    canvas.is_laid_out = True
    canvas.add_figure_texts()
    points = NOTE_SHARE * 72 * (width - 2 * PADDING)
    for ax in canvas.layout.panels:
        _fit_legend(canvas, ax, points)  # the layout of a legend that is too wide leaves no space for the panel
        text_fitting.wrap_axis_labels(ax, points / 1.3)
    for _ in range(FIT_STEPS):
        canvas.layout.size = ()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "constrained_layout not applied", UserWarning)
            canvas.layout.execute(figure)
        _fit_texts(canvas, points)
        _fill_width(canvas, figure)
    canvas.layout.size = ()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "constrained_layout not applied", UserWarning)
        try:
            canvas.layout.execute(figure)
        except UserWarning:
            raise canvas.narrow_error() from None
    canvas.finish_panels()
    canvas.add_figure_texts()
    canvas.layout.execute(figure)
    figure.set_layout_engine("none")
    _crop_height(figure)


def _fill_width(canvas: Canvas, figure: PlotFigure) -> None:
    """Increase the height of a narrow figure if panels of a fixed shape do not fill its width."""
    panels = [ax for ax in canvas.layout.panels if ax.get_visible()]
    if not canvas.is_narrow or panels[0].get_aspect() == "auto" or panels[0].get_subplotspec() is None:
        return
    width, height = figure.get_size_inches()
    inches = figure.dpi_scale_trans.inverted()
    content = inches.transform_bbox(measure_content(figure))
    box = inches.transform_bbox(Bbox.union([ax.get_window_extent() for ax in panels]))
    slack = width - 2 * PADDING - content.width - (SHARED_LABEL_HEIGHT if "y" in canvas.layout.texts else 0.0)
    figure.set_size_inches(width, height + min(max(0.0, slack) * box.height / box.width, MAX_GROWTH * height))


def _fit_texts(canvas: Canvas, width: float) -> None:
    """Thin ticks, wrap labels and reduce the columns of legends; `width` is that of the figure in points."""
    panels = [ax for ax in canvas.layout.panels if ax.get_visible()]
    _show_tick_labels(canvas)
    for ax in panels:
        text_fitting.thin_numeric_ticks(ax)
        points = text_fitting.measure_axes(ax)[0]
        if len(panels) == 1:
            box, pixels = ax.get_window_extent(), text_fitting.get_pixels(ax)
            middle = (box.x0 + box.x1) / 2 / pixels
            points = 2 * min(middle, 72 * canvas.page_width - middle) - 6
        text_fitting.wrap_axis_labels(ax, max(points, 60.0) / canvas.font_scale)
        for bar in text_fitting.get_child_axes(ax):
            text_fitting.wrap_axis_labels(bar, width)
        if canvas.panel_titles.get(ax):
            text_fitting.wrap_panel_title(ax, points / canvas.font_scale)
        _fit_legend(canvas, ax, width)


def _show_tick_labels(canvas: Canvas) -> None:
    """Show the tick labels that fit the present sizes of the panels."""
    for ticks in canvas.tick_labels.values():
        canvas.show_tick_labels(ticks, text_fitting.measure_unit(ticks.ax, ticks.axis_name))


def _fit_legend(canvas: Canvas, ax: Axes, width: float) -> None:
    """Reduce the columns of a legend until it is not wider than `width` points; move a wide one to the left edge."""
    options = canvas.legends.get(ax)
    if options is None:
        return
    is_inside = "bbox_to_anchor" not in options
    limit = max(40.0, 0.9 * text_fitting.measure_axes(ax)[0]) if is_inside else width
    if canvas.user_axes is not None and not is_inside and options.get("loc") == "upper left":
        limit = (canvas.space.x1 - ax.get_window_extent().x0) / text_fitting.get_pixels(ax)
    while options.get("ncols", 1) > 1 and text_fitting.legend_width(ax) > limit:
        options["ncols"] -= 1
        canvas.show_legend(ax)
    if options.get("loc") == "lower left":  # above the panel
        box, pixels = ax.get_window_extent(), text_fitting.get_pixels(ax)
        left = (box.x0 - canvas.space.x0) / pixels
        exceeds_width = text_fitting.legend_width(ax) > width - left
        options["bbox_to_anchor"] = (-max(0.0, left - 4) * pixels / box.width if exceeds_width else 0, 1)
        canvas.show_legend(ax)
    text_fitting.shorten_legend(ax, limit)


def _crop_height(figure: PlotFigure) -> None:
    """Set the height of the figure to that of its content."""
    width, height = figure.get_size_inches()
    inches = figure.dpi_scale_trans.inverted()
    boxes = [measure_content(figure), *(text.get_window_extent() for text in figure.texts)]
    box = inches.transform_bbox(Bbox.union(boxes))
    low, new_height = box.y0 - PADDING, box.height + 2 * PADDING

    def move(y: float) -> float:
        return float((y * height - low) / new_height)

    boxes_by_axes = [(ax, ax.get_position(original=True)) for ax in figure.axes]
    figure.set_size_inches(width, new_height)
    for ax, position_box in boxes_by_axes:
        ax.set_position(
            (position_box.x0, move(position_box.y0), position_box.width, move(position_box.y1) - move(position_box.y0))
        )
    for text in figure.texts:
        x, y = text.get_position()
        text.set_position((x, move(y)))


def fit_into_axes(canvas: Canvas, ax: Axes, title: str) -> None:
    """Fit title, labels and notes into the space of the user's axes; move the axes unless a layout engine does.

    Args:
        canvas: The canvas with the panel drawn.
        ax: The axes of the user.
        title: The title.
    """
    if canvas.is_small:
        text_fitting.shrink_lines(ax, SMALL_LINES)
        _shrink(canvas, ax)
    label = ax.get_xlabel()
    canvas.is_laid_out = True
    _fit_user_axes(canvas, ax, title, label)
    canvas.finish_panels()
    if canvas.is_small:
        _shrink(canvas, ax)
    _fit_user_axes(canvas, ax, title, label)


def _shrink(canvas: Canvas, ax: Axes) -> None:
    """Reduce the sizes of texts in a small space."""
    if ax in canvas.legends:
        fonts = {**canvas.legends[ax]["prop"], "size": MIN_FONT_SIZE}
        canvas.legends[ax] |= SMALL_LEGEND | {"prop": fonts}
        canvas.show_legend(ax)
    text_fitting.shrink_texts(ax, SMALL_TEXT)


def _fit_user_axes(canvas: Canvas, ax: Axes, title: str, label: str) -> None:
    """Fit with the notes; without them, and with a title of one line, if the panel would be too small."""
    for notes, lines in ((canvas.notes, 3), ([], 3), ([], 1)):
        is_large = True
        for _ in range(FIT_STEPS + 1):
            is_large = _fit_iteration(canvas, ax, title, label, notes, lines)
        _show_tick_labels(canvas)
        if is_large:
            return


def _fit_iteration(canvas: Canvas, ax: Axes, title: str, label: str, notes: Sequence[str], title_lines: int) -> bool:
    """Wrap and thin the texts for the current position of the axes, and move the axes."""
    points, box, space = text_fitting.get_pixels(ax), ax.get_window_extent(), canvas.space
    middle = (box.x0 + box.x1) / 2
    centred = 2 * min(middle - space.x0, space.x1 - middle) / points / canvas.font_scale
    ax.set_xlabel(label)
    text_fitting.wrap_axis_labels(ax, centred)
    size = float(ax.xaxis.label.get_fontsize())
    lines = [ax.get_xlabel(), *(wrap_text(note, size, centred) for note in notes)]
    ax.set_xlabel("\n".join(line for line in lines if line))
    for bar in text_fitting.get_child_axes(ax):
        text_fitting.wrap_axis_labels(bar, space.width / points)
    _show_tick_labels(canvas)
    text_fitting.thin_numeric_ticks(ax)
    _fit_legend(canvas, ax, space.width / points)
    _set_title(canvas, ax, title, (space.x1 - box.x0) / points, title_lines)
    engine: Any = ax.get_figure(root=True).get_layout_engine()  # type: ignore[union-attr]
    if engine is not None:
        engine.execute(ax.get_figure(root=True))
        new = ax.get_window_extent()
        return bool(new.height >= MIN_PANEL_SHARE * space.height)
    return text_fitting.move_into(ax, space, MIN_PANEL_SHARE)


def _set_title(canvas: Canvas, ax: Axes, title: str, width: float, lines: int) -> None:
    """Set the title of the user's axes, above a legend that is above the panel."""
    (line,), fonts = canvas.format_texts([title], 120) if title else ([""], [])
    size = SMALL_TITLE if canvas.is_small else canvas.title_size
    legend, pad = ax.get_legend(), 3 if canvas.is_small else 8
    if legend is not None and title:
        overlap = legend.get_window_extent().y1 - ax.get_window_extent().y1
        pad = max(pad, overlap / text_fitting.get_pixels(ax) + 2)
    text = wrap_text(line, size * canvas.font_scale, width, lines)
    style: Any = {"fontfamily": fonts} if fonts else {}
    ax.set_title(text, loc="left", pad=pad, fontsize=size, color=canvas.colours["ink"], **style)
