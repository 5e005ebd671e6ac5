"""The layout that every picture is written from: boxes, arrows, frames and texts with their places, in points.

y runs downwards; ways of arrows are chains of cubic curves. A `Picture` knows no file format and no architecture;
writers read nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import networkx as nx

from bnet_transformer.figures.labels import Run, measured, plain

Point = tuple[float, float]
Edges = tuple[float, float, float, float]  # left, top, right, bottom
MARGIN = 14.0
ROUND = 7.0  # of the corners of an arrow

DASHES = {"solid": (), "dash": (5.0, 2.6), "dot": (0.9, 2.3)}  # the ends of lines are round


@dataclass(frozen=True)
class Box:
    """A node: its middle, its size, what its label says, and how its fill and border tell what it is.

    `fill` is `paper`, `observed` or `do`; `border` is `double`, `single` or, of a mere point, `dot`. `under` outlines
    stand behind the node of a plate.
    """

    name: str
    x: float
    y: float
    width: float
    height: float
    label: tuple[Run, ...] = ()
    fill: str = "paper"
    border: str = "single"
    dashed: bool = False
    accent: str = ""
    faded: bool = False
    under: int = 0
    title: str = ""

    @cached_property
    def edges(self) -> Edges:
        """Left, top, right, bottom."""
        return self.x - self.width / 2, self.y - self.height / 2, self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class Arrow:
    """An arrow: a chain of cubic curves (first point, then three for each curve), its colour, width and dash."""

    source: str
    target: str
    points: tuple[Point, ...]
    colour: str = "grey"
    width: float = 0.9
    opacity: float = 1.0
    dash: str = "solid"
    head: bool = True
    weight: float | None = None
    title: str = ""


@dataclass(frozen=True)
class Frame:
    """A rectangle around or beside nodes: a plate, a box of nodes, or (`kind="line"`) a thin line beside a slice."""

    x: float
    y: float
    width: float
    height: float
    kind: str = "plate"
    name: str = ""


@dataclass(frozen=True)
class Text:
    """A line of text: where it stands, at its `start`, `middle` or `end`."""

    x: float
    y: float
    runs: tuple[Run, ...]
    anchor: str = "middle"
    size: float = 10.0
    colour: str = "ink"
    title: str = ""

    @cached_property
    def edges(self) -> Edges:
        """Left, top, right, bottom."""
        wide = measured(self.runs, self.size)
        left = self.x - {"start": 0.0, "middle": wide / 2, "end": wide}[self.anchor]
        return left, self.y - 0.6 * self.size, left + wide, self.y + 0.6 * self.size


@dataclass(frozen=True)
class Entry:
    """A line of the legend: a sample, and what it means."""

    sample: Box | Arrow
    text: Text


@dataclass(frozen=True)
class Picture:
    """A figure: what stands where. `title` says what is drawn, `caption` what is not."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    frames: tuple[Frame, ...] = ()
    texts: tuple[Text, ...] = ()
    legend: tuple[Entry, ...] = ()
    title: str = ""
    caption: str = ""
    theme: str = "light"
    width: float = 0.0
    height: float = 0.0

    @property
    def lines(self) -> Iterator[Text]:
        """All texts that stand outside boxes."""
        yield from self.texts
        for entry in self.legend:
            yield entry.text

    def to_networkx(self) -> nx.MultiDiGraph:
        """The graph that is drawn: its nodes with their labels, its arrows with colour and weight."""
        graph = nx.MultiDiGraph()
        graph.add_nodes_from((box.name, {"label": plain(box.label), "fill": box.fill}) for box in self.boxes)
        graph.add_edges_from((a.source, a.target, {"colour": a.colour, "weight": a.weight}) for a in self.arrows)
        return graph


PARTS = ("boxes", "arrows", "frames", "texts", "legend")
P = TypeVar("P", bound=Box | Arrow | Frame | Text | Entry)


def extent(picture: Picture) -> Edges:
    """Left, top, right, bottom of all that is drawn."""
    return bounds(corners for kind in PARTS for part in getattr(picture, kind) for corners in _corners(part))


def bounds(corners: Iterable[Edges]) -> Edges:
    """Left, top, right, bottom of several rectangles together."""
    lefts, tops, rights, bottoms = zip(*(list(corners) or [(0.0, 0.0, 0.0, 0.0)]), strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)


def fitted(picture: Picture) -> Picture:
    """The same picture moved so that it starts at the margin, with its width and height."""
    left, top, right, bottom = extent(picture)
    dx, dy = MARGIN - left, MARGIN - top
    parts: dict[str, Any] = {kind: tuple(moved(part, dx, dy) for part in getattr(picture, kind)) for kind in PARTS}
    return replace(picture, **parts, width=right - left + 2 * MARGIN, height=bottom - top + 2 * MARGIN)


def moved(part: P, dx: float, dy: float) -> P:
    """The same part of a picture elsewhere."""
    if isinstance(part, Entry):
        return replace(part, sample=moved(part.sample, dx, dy), text=moved(part.text, dx, dy))
    if isinstance(part, Arrow):
        return replace(part, points=tuple((x + dx, y + dy) for x, y in part.points))
    return replace(part, x=part.x + dx, y=part.y + dy)


def _corners(part: Box | Arrow | Frame | Text | Entry) -> Iterator[Edges]:
    """Rectangles that hold a part of a picture."""
    if isinstance(part, Arrow):
        for x, y in passed(part.points):
            yield x, y, x, y
    elif isinstance(part, Frame):
        yield part.x, part.y, part.x + part.width, part.y + part.height
    elif isinstance(part, Entry):
        yield part.text.edges
        yield from _corners(replace(part.sample, under=0) if isinstance(part.sample, Box) else part.sample)
    else:
        left, top, right, bottom = part.edges
        under = 2.5 * part.under if isinstance(part, Box) else 0.0
        yield left, top, right + under, bottom + under


def passed(points: tuple[Point, ...]) -> Iterator[Point]:
    """Points that a chain of curves passes, eight for each curve and its last."""
    for start, one, two, end in zip(points[::3], points[1::3], points[2::3], points[3::3], strict=False):
        for k in range(8):
            t = k / 8
            a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
            yield (
                a * start[0] + b * one[0] + c * two[0] + d * end[0],
                a * start[1] + b * one[1] + c * two[1] + d * end[1],
            )
    yield from points[-1:]


# the ways of arrows: smooth from row to row, or along straight lines with round corners


def curve(start: Point, end: Point, *, sideways: bool = False, bow: float = 0.5) -> tuple[Point, ...]:
    """One smooth curve that leaves and arrives upright, or sideways.

    >>> curve((0, 0), (10, 40))
    ((0, 0), (0, 20.0), (10, 20.0), (10, 40))
    """
    (x0, y0), (x1, y1) = start, end
    if sideways:
        dx = bow * (x1 - x0)
        return start, (x0 + dx, y0), (x1 - dx, y1), end
    dy = bow * (y1 - y0)
    return start, (x0, y0 + dy), (x1, y1 - dy), end


def level(source: Box, target: Box) -> tuple[Point, ...]:
    """A straight line between boxes side by side."""
    way = 1 if target.x > source.x else -1
    start, end = (source.x + way * source.width / 2, source.y), (target.x - way * target.width / 2, target.y)
    return curve(start, end, sideways=True)


def arch(source: Box, target: Box, rise: float, shift: float) -> tuple[Point, ...]:
    """An arch below two boxes, from the bottom of one to that of the other; `shift` moves its ends to each other."""
    toward = 1 if target.x > source.x else -1
    y0, y1 = source.y + source.height / 2, target.y + target.height / 2
    x0, x1 = source.x + toward * shift, target.x - toward * shift
    return (x0, y0), (x0 + 0.1 * (x1 - x0), y0 + rise), (x1 - 0.1 * (x1 - x0), y1 + rise), (x1, y1)


def bent(corners: Sequence[Point]) -> tuple[Point, ...]:
    """Straight lines through these corners, the corners rounded."""
    kept = [corners[0]]
    for corner in corners[1:]:
        if math.dist(corner, kept[-1]) > 1e-6:
            kept.append(corner)
    found: list[Point] = [kept[0]]
    for before, corner, after in zip(kept, kept[1:], kept[2:], strict=False):
        radius = min(ROUND, math.dist(before, corner) / 2, math.dist(corner, after) / 2)
        into, out = _towards(corner, before, radius), _towards(corner, after, radius)
        found += _straight(found[-1], into)
        found += [_towards(corner, before, radius * 0.45), _towards(corner, after, radius * 0.45), out]
    return (*found, *_straight(found[-1], kept[-1]))


def _straight(start: Point, end: Point) -> list[Point]:
    (x0, y0), (x1, y1) = start, end
    return [(x0 + (x1 - x0) / 3, y0 + (y1 - y0) / 3), (x0 + 2 * (x1 - x0) / 3, y0 + 2 * (y1 - y0) / 3), end]


def _towards(start: Point, end: Point, length: float) -> Point:
    far = math.dist(start, end)
    return start[0] + (end[0] - start[0]) * length / far, start[1] + (end[1] - start[1]) * length / far
