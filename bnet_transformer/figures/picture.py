"""The layout of a figure: boxes, arrows, frames and texts with their positions in points; and the geometry of arrows.

y increases downwards. The route of an arrow is a chain of cubic Bézier curves. A `Picture` is independent of file
formats and architectures, and the writers (`svg`, `dot`, `tikz`) use nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import networkx as nx

from bnet_transformer.figures.labels import TextRun, label_to_text, measure_label

Point = tuple[float, float]
Bounds = tuple[float, float, float, float]  # left, top, right, bottom
PAGE_MARGIN = 14.0
CORNER_RADIUS = 7.0  # of the corners of an arrow

DASH_PATTERNS = {"solid": (), "dash": (5.0, 2.6), "dot": (0.9, 2.3)}  # lengths in line widths; dots have round caps


@dataclass(frozen=True)
class NodeBox:
    """A node: its centre, size, label and style.

    `fill` is `paper`, `observed` or `do`. `border` is `double`, `single`, or `dot` for a node that is drawn as a point.
    Behind a node that a plate repeats, `num_stacked` more outlines are drawn.
    """

    name: str
    x: float
    y: float
    width: float
    height: float
    label: tuple[TextRun, ...] = ()
    fill: str = "paper"
    border: str = "single"
    is_dashed: bool = False
    mark: str = ""
    is_faded: bool = False
    num_stacked: int = 0
    title: str = ""

    @cached_property
    def bounds(self) -> Bounds:
        """Left, top, right, bottom."""
        return self.x - self.width / 2, self.y - self.height / 2, self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class PictureArrow:
    """An arrow: a chain of cubic curves (the first point, then three points for each curve) and its style."""

    source: str
    target: str
    points: tuple[Point, ...]
    colour: str = "grey"
    width: float = 0.9
    opacity: float = 1.0
    dash: str = "solid"
    has_head: bool = True
    weight: float | None = None
    title: str = ""


@dataclass(frozen=True)
class Frame:
    """A rectangle around nodes (a plate, a box), or with `kind="line"` a thin vertical line next to a slice."""

    x: float
    y: float
    width: float
    height: float
    kind: str = "plate"
    name: str = ""


@dataclass(frozen=True)
class TextLine:
    """A line of text; `anchor` states whether `x` is its `start`, `middle` or `end`; `y` is its vertical middle."""

    x: float
    y: float
    runs: tuple[TextRun, ...]
    anchor: str = "middle"
    size: float = 10.0
    colour: str = "ink"
    title: str = ""

    @cached_property
    def bounds(self) -> Bounds:
        """Left, top, right, bottom."""
        width = measure_label(self.runs, self.size)
        left = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return left, self.y - 0.6 * self.size, left + width, self.y + 0.6 * self.size


@dataclass(frozen=True)
class LegendEntry:
    """An entry of the legend: a sample and its explanation."""

    handle: NodeBox | PictureArrow
    text: TextLine


@dataclass(frozen=True)
class Picture:
    """The layout of a figure, as `Sentence.picture` returns it; a notebook shows it.

    Args:
        boxes: The nodes.
        arrows: The arrows with their routes.
        frames: The frames around nodes, and the lines of the slices.
        texts: The texts outside nodes, the caption included.
        legend: The entries of the legend.
        title: What the figure shows.
        caption: Averages and omitted parts, as sentences; empty if everything is drawn.
        theme: `"light"`, `"dark"` or `"auto"`.
        width: The width in points.
        height: The height in points.
        scale: The factor from these points to the points of the file; None if the file format determines it.
        font: The family of the font; None for the default fonts.
        heading: The text above the figure, which `title=` sets.
    """

    boxes: tuple[NodeBox, ...]
    arrows: tuple[PictureArrow, ...]
    frames: tuple[Frame, ...] = ()
    texts: tuple[TextLine, ...] = ()
    legend: tuple[LegendEntry, ...] = ()
    title: str = ""
    caption: str = ""
    theme: str = "light"
    width: float = 0.0
    height: float = 0.0
    scale: float | None = None
    font: str | None = None
    heading: str = ""

    @property
    def lines(self) -> Iterator[TextLine]:
        """All texts outside boxes."""
        yield from self.texts
        for entry in self.legend:
            yield entry.text

    def to_networkx(self) -> nx.MultiDiGraph:
        """Return the drawn graph: nodes with labels and fills, arrows with colours and weights."""
        graph = nx.MultiDiGraph()
        graph.add_nodes_from((box.name, {"label": label_to_text(box.label), "fill": box.fill}) for box in self.boxes)
        graph.add_edges_from((a.source, a.target, {"colour": a.colour, "weight": a.weight}) for a in self.arrows)
        return graph


PART_FIELDS = ("boxes", "arrows", "frames", "texts", "legend")
PartT = TypeVar("PartT", bound=NodeBox | PictureArrow | Frame | TextLine | LegendEntry)


def extent(picture: Picture) -> Bounds:
    """Left, top, right, bottom of the drawing."""
    return bounding_box(
        corners for kind in PART_FIELDS for part in getattr(picture, kind) for corners in _part_rectangles(part)
    )


def bounding_box(rectangles: Iterable[Bounds]) -> Bounds:
    """Left, top, right, bottom of the union of rectangles; zeros for none."""
    lefts, tops, rights, bottoms = zip(*(list(rectangles) or [(0.0, 0.0, 0.0, 0.0)]), strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)


def fit_to_extent(picture: Picture, margin: float = PAGE_MARGIN, width: float | None = None) -> Picture:
    """Move the content of a picture to the margin, and set `width` and `height`; `width` centres it in this width."""
    left, top, right, bottom = extent(picture)
    width = right - left + 2 * margin if width is None else width
    dx, dy = (width - (right - left)) / 2 - left, margin - top
    parts: dict[str, Any] = {
        kind: tuple(translate(part, dx, dy) for part in getattr(picture, kind)) for kind in PART_FIELDS
    }
    return replace(picture, **parts, width=width, height=bottom - top + 2 * margin)


def translate(part: PartT, dx: float, dy: float) -> PartT:
    """Move a part of a picture."""
    if isinstance(part, LegendEntry):
        return replace(part, handle=translate(part.handle, dx, dy), text=translate(part.text, dx, dy))
    if isinstance(part, PictureArrow):
        return replace(part, points=tuple((x + dx, y + dy) for x, y in part.points))
    return replace(part, x=part.x + dx, y=part.y + dy)


def _part_rectangles(part: NodeBox | PictureArrow | Frame | TextLine | LegendEntry) -> Iterator[Bounds]:
    """Rectangles that cover a part of a picture."""
    if isinstance(part, PictureArrow):
        for x, y in sample_curve(part.points):
            yield x, y, x, y
    elif isinstance(part, Frame):
        yield part.x, part.y, part.x + part.width, part.y + part.height
    elif isinstance(part, LegendEntry):
        yield part.text.bounds
        yield from _part_rectangles(
            replace(part.handle, num_stacked=0) if isinstance(part.handle, NodeBox) else part.handle
        )
    else:
        left, top, right, bottom = part.bounds
        under = 2.5 * part.num_stacked if isinstance(part, NodeBox) else 0.0
        yield left, top, right + under, bottom + under


def sample_curve(points: tuple[Point, ...]) -> Iterator[Point]:
    """Yield points on a chain of curves: eight for each curve, and the last point."""
    # The cubic Bézier curve in Bernstein form.
    for start, one, two, end in zip(points[::3], points[1::3], points[2::3], points[3::3], strict=False):
        for k in range(8):
            t = k / 8
            a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
            yield (
                a * start[0] + b * one[0] + c * two[0] + d * end[0],
                a * start[1] + b * one[1] + c * two[1] + d * end[1],
            )
    yield from points[-1:]


# routes of arrows: smooth from row to row, or along straight lines with round corners


def cubic_curve(start: Point, end: Point, *, sideways: bool = False, bow: float = 0.5) -> tuple[Point, ...]:
    """One smooth curve, vertical at both ends, or horizontal if `sideways`.

    >>> cubic_curve((0, 0), (10, 40))
    ((0, 0), (0, 20.0), (10, 20.0), (10, 40))
    """
    (x0, y0), (x1, y1) = start, end
    if sideways:
        dx = bow * (x1 - x0)
        return start, (x0 + dx, y0), (x1 - dx, y1), end
    dy = bow * (y1 - y0)
    return start, (x0, y0 + dy), (x1, y1 - dy), end


def level_line(source: NodeBox, target: NodeBox) -> tuple[Point, ...]:
    """A horizontal line between neighbouring boxes."""
    sign = 1 if target.x > source.x else -1
    start, end = (source.x + sign * source.width / 2, source.y), (target.x - sign * target.width / 2, target.y)
    return cubic_curve(start, end, sideways=True)


def arch_curve(source: NodeBox, target: NodeBox, height: float, inset: float) -> tuple[Point, ...]:
    """An arch below two boxes, between the middles of their lower sides; `inset` moves its ends towards each other."""
    sign = 1 if target.x > source.x else -1
    y0, y1 = source.y + source.height / 2, target.y + target.height / 2
    x0, x1 = source.x + sign * inset, target.x - sign * inset
    return (x0, y0), (x0 + 0.1 * (x1 - x0), y0 + height), (x1 - 0.1 * (x1 - x0), y1 + height), (x1, y1)


def rounded_polyline(corners: Sequence[Point]) -> tuple[Point, ...]:
    """Straight lines through these points, with rounded corners, as a chain of cubic curves."""
    distinct = [corners[0]]
    for corner in corners[1:]:
        if math.dist(corner, distinct[-1]) > 1e-6:
            distinct.append(corner)
    points: list[Point] = [distinct[0]]
    for before, corner, after in zip(distinct, distinct[1:], distinct[2:], strict=False):
        radius = min(CORNER_RADIUS, math.dist(before, corner) / 2, math.dist(corner, after) / 2)
        into, out = _point_towards(corner, before, radius), _point_towards(corner, after, radius)
        points += _line_segment(points[-1], into)
        points += [_point_towards(corner, before, radius * 0.45), _point_towards(corner, after, radius * 0.45), out]
    return (*points, *_line_segment(points[-1], distinct[-1]))


def _line_segment(start: Point, end: Point) -> list[Point]:
    """A straight line as a cubic curve, without its first point."""
    (x0, y0), (x1, y1) = start, end
    return [(x0 + (x1 - x0) / 3, y0 + (y1 - y0) / 3), (x0 + 2 * (x1 - x0) / 3, y0 + 2 * (y1 - y0) / 3), end]


def _point_towards(start: Point, end: Point, length: float) -> Point:
    """The point at a distance from one point on the way to another."""
    distance = math.dist(start, end)
    return start[0] + (end[0] - start[0]) * length / distance, start[1] + (end[1] - start[1]) * length / distance
