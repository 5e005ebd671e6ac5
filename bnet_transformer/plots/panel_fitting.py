"""Fit the panels of a plot to the width of a figure, or into the axes of a user."""

from __future__ import annotations

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
SMALL_SPACE = 150.0  # points: texts in a smaller space have the smallest size
SMALL_TEXT = 0.72  # the factor of the sizes of texts in a small space
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
        canvas.layout.execute(figure)
        _fit_texts(canvas, points)
        _fill_width(canvas, figure)
    canvas.layout.size = ()
    canvas.layout.execute(figure)
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
    for ticks in canvas.tick_labels.values():
        canvas.show_tick_labels(ticks, text_fitting.measure_unit(ticks.ax, ticks.axis_name))
    for ax in panels:
        text_fitting.thin_numeric_ticks(ax)
        points = text_fitting.measure_axes(ax)[0]
        if len(panels) == 1:
            box, pixels = ax.get_window_extent(), text_fitting.get_pixels(ax)
            middle = (box.x0 + box.x1) / 2 / pixels
            points = 2 * min(middle, 72 * canvas.page_width - middle) - 6
        text_fitting.wrap_axis_labels(ax, max(points, 60.0) / canvas.font_scale)
        for bar in ax.child_axes:
            text_fitting.wrap_axis_labels(bar, width)
        if canvas.panel_titles.get(ax):
            text_fitting.wrap_panel_title(ax, points / canvas.font_scale)
        _fit_legend(canvas, ax, width)


def _fit_legend(canvas: Canvas, ax: Axes, width: float) -> None:
    """Reduce the columns of a legend until it is not wider than `width` points; move a wide one to the left edge."""
    options = canvas.legends.get(ax)
    if options is None:
        return
    while options.get("ncols", 1) > 1 and text_fitting.legend_width(ax) > width:
        options["ncols"] -= 1
        canvas.show_legend(ax)
    if options.get("loc") == "lower left":  # above the panel
        box, pixels = ax.get_window_extent(), text_fitting.get_pixels(ax)
        left = (box.x0 - text_fitting.find_left_edge(ax)) / pixels
        is_wide = text_fitting.legend_width(ax) > width - left
        options["bbox_to_anchor"] = (-max(0.0, left - 4) * pixels / box.width if is_wide else 0, 1)
        canvas.show_legend(ax)


def _crop_height(figure: PlotFigure) -> None:
    """Set the height of the figure to that of its content."""
    width, height = figure.get_size_inches()
    inches = figure.dpi_scale_trans.inverted()
    boxes = [measure_content(figure), *(text.get_window_extent() for text in figure.texts)]
    box = inches.transform_bbox(Bbox.union(boxes))
    low, new_height = box.y0 - PADDING, box.height + 2 * PADDING

    def move(y: float) -> float:
        return float((y * height - low) / new_height)

    places = [(ax, ax.get_position(original=True)) for ax in figure.axes]
    figure.set_size_inches(width, new_height)
    for ax, place in places:
        ax.set_position((place.x0, move(place.y0), place.width, move(place.y1) - move(place.y0)))
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
    space = text_fitting.find_space(ax)
    canvas.is_small = min(space.width, space.height) / text_fitting.get_pixels(ax) < SMALL_SPACE
    if canvas.is_small:
        text_fitting.shrink_texts(ax, SMALL_TEXT)
    label = ax.get_xlabel()
    canvas.is_laid_out = True
    _fit_user_axes(canvas, ax, space, title, label)
    canvas.finish_panels()
    _fit_user_axes(canvas, ax, space, title, label)
    if canvas.is_small:
        text_fitting.shrink_texts(ax, SMALL_TEXT)


def _fit_user_axes(canvas: Canvas, ax: Axes, space: Bbox, title: str, label: str) -> None:
    """Fit with the notes; without them if the panel would be too small."""
    for notes in (canvas.notes, []):
        is_large = True
        for _ in range(FIT_STEPS + 1):
            is_large = _fit_once(canvas, ax, space, title, [label, *notes])
        if is_large or not canvas.notes:
            return


def _fit_once(canvas: Canvas, ax: Axes, space: Bbox, title: str, lines: list[str]) -> bool:
    """Wrap and thin the texts for the current position of the axes, and move the axes."""
    points, box = text_fitting.get_pixels(ax), ax.get_window_extent()
    factor = SMALL_TEXT if canvas.is_small else 1.0
    middle = (box.x0 + box.x1) / 2
    centred = 2 * min(middle - space.x0, space.x1 - middle) / points / canvas.font_scale
    ax.set_xlabel("\n".join(line for line in lines if line))
    text_fitting.wrap_axis_labels(ax, centred)
    for bar in ax.child_axes:
        text_fitting.wrap_axis_labels(bar, space.width / points)
    for ticks in canvas.tick_labels.values():
        canvas.show_tick_labels(ticks, text_fitting.measure_unit(ticks.ax, ticks.axis_name))
    text_fitting.thin_numeric_ticks(ax)
    _fit_legend(canvas, ax, space.width / points)
    _set_title(canvas, ax, title, (space.x1 - box.x0) / points, factor)
    engine: Any = ax.get_figure(root=True).get_layout_engine()  # type: ignore[union-attr]
    if engine is not None:
        engine.execute(ax.get_figure(root=True))
        new = ax.get_window_extent()
        return bool(new.height >= MIN_PANEL_SHARE * space.height)
    return text_fitting.move_into(ax, space, MIN_PANEL_SHARE)


def _set_title(canvas: Canvas, ax: Axes, title: str, width: float, factor: float) -> None:
    """Set the title of the user's axes, above a legend that is above the panel."""
    (line,), fonts = canvas.format_texts([title], 120) if title else ([""], [])
    size = max(MIN_FONT_SIZE, canvas.title_size * factor)
    legend, pad = ax.get_legend(), 8 * factor**2
    if legend is not None and title:
        overlap = legend.get_window_extent().y1 - ax.get_window_extent().y1
        pad = max(pad, overlap / text_fitting.get_pixels(ax) + 2)
    text = wrap_text(line, size * canvas.font_scale, width, 2)
    style: Any = {"fontfamily": fonts} if fonts else {}
    ax.set_title(text, loc="left", pad=pad, fontsize=size, color=canvas.colours["ink"], **style)
