"""Fits a figure to its physical width: how compact its layout is, and the scale at which all text is legible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from bnet_transformer.errors import BNetError
from bnet_transformer.figures.labels import SCRIPT_SCALE, TextRun, measuring_font
from bnet_transformer.figures.options import FigureOptions
from bnet_transformer.figures.picture import Picture, extent, fit_to_extent
from bnet_transformer.figures.size import (
    GRAPH_DENSITIES,
    MAX_HEIGHT,
    MIN_FONT_SIZE,
    NAMED_WIDTHS,
    POINTS_PER_INCH,
    SLIDE_RATIO,
    Density,
    parse_width,
)
from bnet_transformer.figures.style import LABEL_SIZE, Drawing, add_marks, add_texts

TIGHT_MARGIN = 3.0  # of a figure with a given width: the page around it has its own margins
PREFERRED_SCALE = 0.75  # the first layout that fits at this scale is drawn


def compose_picture(
    layout: Callable[[Density], Drawing],
    options: FigureOptions,
    reductions: Callable[[], Sequence[str]] = list,
    densities: Sequence[Density] = GRAPH_DENSITIES,
    fallback: Callable[[], Picture] | None = None,
) -> Picture:
    """Lay out a figure with its texts, at its natural size or in the width of the options.

    Args:
        layout: Lays out the figure for a density.
        options: `width`, `title`, `font` and `theme` of the figure.
        reductions: Returns the options that make the figure smaller, for the error.
        densities: The layouts to try for a given width, from loose to compact.
        fallback: Lays out a figure that shows less, if this one does not fit the width or the height of the page; None
            for an error.

    Returns:
        The picture. With a width, its `scale` is set.

    Raises:
        BNetError: The figure does not fit the width, or the height of a page or slide, at a legible size.
    """
    with measuring_font(options.font):
        return _compose_picture(layout, options, reductions, densities, fallback)


def _compose_picture(
    layout: Callable[[Density], Drawing],
    options: FigureOptions,
    reductions: Callable[[], Sequence[str]],
    densities: Sequence[Density],
    fallback: Callable[[], Picture] | None,
) -> Picture:
    """`compose_picture` with the metrics of the current font."""
    heading = options.title or ""
    style: dict[str, Any] = {"theme": options.theme, "font": options.font}
    if options.width is None:
        return replace(fit_to_extent(add_texts(layout(Density()), heading)), **style)
    width = parse_width(options.width) * POINTS_PER_INCH
    layout = cache(layout)
    chosen = _choose_layout(((density, layout(density)) for density in densities), width, heading)
    if isinstance(chosen, float):
        if fallback is not None:
            return fallback()
        raise _width_error(options, chosen, reductions())
    remaining = (drawing for density in densities if (drawing := layout(density)) is not chosen[0])
    fitted = _fit_height(itertools.chain(chosen[:1], remaining), chosen[1], width, heading)
    if isinstance(fitted, float):
        if fallback is not None:
            return fallback()
        raise _height_error(fitted, _max_height(width), reductions())
    return replace(fitted, **style)


def _fit_height(drawings: Iterable[Drawing], scale: float, width: float, heading: str) -> Picture | float:
    """Return the first layout that is not higher than a page, if necessary with smaller text.

    If there is none, return the smallest height at which one is legible, in points.
    `scale` is that of the first layout.
    """
    max_height, lowest = _max_height(width), math.inf
    for drawing in drawings:
        min_scale = MIN_FONT_SIZE / min_text_size(drawing, heading)
        scale = min(scale, width / required_width(drawing, heading))
        if scale < min_scale:
            continue
        picture, reduced = _compose(drawing, heading, width / scale), scale
        if picture.height * scale > max_height:
            reduced = max(min_scale, max_height / picture.height)
            picture = _compose(drawing, heading, width / reduced)
        if picture.height * reduced <= max_height + 1e-6:
            return replace(picture, scale=reduced)
        lowest = min(lowest, picture.height * reduced)
    return lowest


def _compose(drawing: Drawing, heading: str, width: float) -> Picture:
    """Return a drawing with its texts in a picture of this width, in points of the layout."""
    return fit_to_extent(add_texts(drawing, heading, width - 2 * TIGHT_MARGIN), TIGHT_MARGIN, width)


def _max_height(width: float) -> float:
    """The height of a page, or of a slide for a figure that is wider than a page; in points."""
    is_slide = width > NAMED_WIDTHS["text"] * POINTS_PER_INCH
    return width * SLIDE_RATIO if is_slide else MAX_HEIGHT * POINTS_PER_INCH


def _choose_layout(
    candidates: Iterable[tuple[Density, Drawing]], width: float, heading: str
) -> tuple[Drawing, float] | float:
    """Return the first layout that fits at the preferred scale, or else the one with the largest scale; and its scale.

    If no layout is legible, return the width at which one is, in points.

    The text of a figure that is wider than a page, such as that of a slide, is larger in proportion.
    """
    max_scale = max(1.0, width / (NAMED_WIDTHS["text"] * POINTS_PER_INCH))
    best: tuple[Drawing, float] | None = None
    min_width = math.inf
    for density, drawing in candidates:
        required = required_width(drawing, heading)
        min_scale = MIN_FONT_SIZE / min_text_size(drawing, heading)
        min_width = min(min_width, required * min_scale)
        scale = min(max_scale, width / required)
        if scale >= (max_scale if density.gap > 1.0 else min(PREFERRED_SCALE * max_scale, 1.0)):
            return drawing, scale
        if scale >= min_scale and (best is None or scale > best[1]):
            best = drawing, scale
    return min_width if best is None else best


def required_width(drawing: Drawing, heading: str) -> float:
    """The width of a figure with its margins, in points of the layout; its texts are wrapped."""
    left, _, right, _ = extent(add_marks(drawing.content))
    return max(right - left, drawing.min_text_width(heading)) + 2 * TIGHT_MARGIN


def min_text_size(drawing: Drawing, heading: str) -> float:
    """The size of the smallest text of a figure, in points of the layout."""
    picture = add_texts(drawing, heading)
    return min(iter_text_sizes(picture), default=LABEL_SIZE)


def iter_text_sizes(picture: Picture) -> Iterator[float]:
    """Yield the font size of each run of text of a picture, in points of the layout."""
    labels = [(box.label, LABEL_SIZE) for box in picture.boxes] + [(line.runs, line.size) for line in picture.lines]
    for runs, size in labels:
        for run in runs:
            yield size * _run_scale(run)


def _run_scale(run: TextRun) -> float:
    """The size of a run relative to its label."""
    return SCRIPT_SCALE if run.style in ("sub", "sup") else 1.0


def _width_error(options: FigureOptions, min_width: float, reductions: Sequence[str]) -> BNetError:
    """The error for a width at which the figure is not legible; it names a width that suffices."""
    inches = math.ceil(100 * min_width / POINTS_PER_INCH) / 100
    hint = "To draw less, use " + ", ".join(reductions) if reductions else "Use a larger width"
    expected = f"at least {inches:g}in for this figure, so that no text is smaller than {MIN_FONT_SIZE:g} points"
    return BNetError("width", expected=expected, actual=options.width, hint=hint)


def _height_error(height: float, max_height: float, reductions: Sequence[str]) -> BNetError:
    """The error for a figure that is higher than a page or a slide with the smallest legible text."""
    limit, inches = max_height / POINTS_PER_INCH, math.ceil(100 * height / POINTS_PER_INCH) / 100
    hint = "To draw less, use " + ", ".join(reductions) + "; or draw" if reductions else "Draw"
    return BNetError(
        "height of a figure with width=",
        expected=f"at most {limit:.4g}in, the height of a page or a slide",
        actual=f"{inches:g}in with text of {MIN_FONT_SIZE:g} points",
        hint=f"{hint} it without width=",
    )
