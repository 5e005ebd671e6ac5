"""The width of a figure on paper or a slide: a number with a unit, or a name; and how compact its layout is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from bnet_transformer.errors import BNetError
from bnet_transformer.figures.labels import MAX_TOKEN_LENGTH

POINTS_PER_INCH = 72.0
NAMED_WIDTHS: Mapping[str, float] = {"column": 3.3, "text": 6.9, "slide": 12.0}  # inches
INCHES_PER_UNIT: Mapping[str, float] = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / POINTS_PER_INCH}
MIN_WIDTH, MAX_WIDTH = 0.5, 200.0  # inches
MAX_HEIGHT = 9.0  # inches; a taller figure does not fit a page
SLIDE_RATIO = 9 / 16  # height by width
PRINT_DPI = 300.0  # of a PNG with a width
MIN_FONT_SIZE = 5.0  # points; smaller text is not legible in print
_NUMBER_WITH_UNIT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*")


def parse_width(width: object) -> float:
    """Convert the width of a figure to inches.

    Args:
        width: A number with a unit ("8.5cm", "85mm", "3.3in", "240pt"), or "column" (of a paper with two columns),
            "text" (of a page) or "slide".

    Returns:
        The width in inches.

    Raises:
        BNetError: The width is not one of these, or it is outside 0.5 to 200 inches.

    >>> parse_width("column"), parse_width("5.08 cm")
    (3.3, 2.0)
    """
    if isinstance(width, str) and width in NAMED_WIDTHS:
        return NAMED_WIDTHS[width]
    match = _NUMBER_WITH_UNIT.fullmatch(width) if isinstance(width, str) else None
    if match is None or match[2] not in INCHES_PER_UNIT:
        expected = 'a number with a unit, such as "8.5cm"'
        names = ", ".join([*(f'"{name}"' for name in NAMED_WIDTHS), "units " + ", ".join(INCHES_PER_UNIT)])
        raise BNetError("width", expected=expected, actual=width, allowed=names)
    inches = float(match[1]) * INCHES_PER_UNIT[match[2]]
    if not MIN_WIDTH <= inches <= MAX_WIDTH or not math.isfinite(inches):
        raise BNetError("width", expected=f"{MIN_WIDTH:g} to {MAX_WIDTH:g} inches", actual=f"{width} = {inches:g}in")
    return round(inches, 6)


@dataclass(frozen=True)
class Density:
    """How compact the layout of a figure is.

    Args:
        gap: A factor of the horizontal gaps.
        row_gap: A factor of the vertical gaps.
        padding: The horizontal space of a label in its box, in points.
        max_token: The maximum number of characters of a token in a label.
        is_upright: Whether the words of an attention grid are columns; None for columns if they are few.
    """

    gap: float = 1.0
    row_gap: float = 1.0
    padding: float = 16.0
    max_token: int = MAX_TOKEN_LENGTH
    is_upright: bool | None = None

    @property
    def min_box_width(self) -> float:
        """The minimum width of a box, in points."""
        return 20.0 + self.padding if self.padding > 8.0 else 20.0


# The layouts of an attention grid to try for a given width, from loose to compact. Short tokens come last.
GRID_DENSITIES = (
    *(Density(gap, row_gap=0.8) for gap in (2.4, 1.8, 1.4, 1.0)),
    *(Density(gap, 0.8, padding) for gap, padding in ((0.7, 13.0), (0.45, 11.0), (0.3, 9.0))),
    *(Density(gap, 0.8, is_upright=False) for gap in (1.0, 0.7, 0.5, 0.35)),
    *(Density(0.2, 0.8, 8.0, length, is_upright) for length in (10, 6, 4) for is_upright in (None, False)),
)
GRAPH_DENSITIES = tuple(density for density in GRID_DENSITIES if density.is_upright is None)
