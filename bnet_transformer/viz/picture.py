"""The layout that every picture is written from: boxes, arrows, frames and texts with their places, in points.

y runs downwards. A `Picture` knows no file format and no architecture; writers read nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from bnet_transformer.viz.labels import Run, measured, plain

if TYPE_CHECKING:
    import networkx as nx

Point = tuple[float, float]
MARGIN = 14.0

DASHES = {"solid": (), "dash": (5.0, 2.6), "dot": (0.9, 2.3)}  # the ends of lines are round


@dataclass(frozen=True)
class Box:
    """A node: its middle, its size, what its label says, and how its fill and border tell what it is.

    `fill` is `paper`, `observed` or `do`; `border` is `double`, `single`, `none` or, of a mere point, `dot`. `under`
    outlines stand behind the node of a plate.
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
    def edges(self) -> tuple[float, float, float, float]:
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
    def edges(self) -> tuple[float, float, float, float]:
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
        import networkx as nx

        graph = nx.MultiDiGraph()
        graph.add_nodes_from((box.name, {"label": plain(box.label), "fill": box.fill}) for box in self.boxes)
        graph.add_edges_from((a.source, a.target, {"colour": a.colour, "weight": a.weight}) for a in self.arrows)
        return graph


def extent(picture: Picture) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of all that is drawn."""
    return _around(_corners(picture))


def fitted(picture: Picture, margin: float = MARGIN) -> Picture:
    """The same picture moved so that it starts at the margin, with its width and height."""
    left, top, right, bottom = extent(picture)
    found = moved(picture, margin - left, margin - top)
    return replace(found, width=right - left + 2 * margin, height=bottom - top + 2 * margin)


def moved(picture: Picture, dx: float, dy: float) -> Picture:
    """The same picture elsewhere."""
    return replace(
        picture,
        boxes=tuple(replace(b, x=b.x + dx, y=b.y + dy) for b in picture.boxes),
        arrows=tuple(_moved(a, dx, dy) for a in picture.arrows),
        frames=tuple(replace(f, x=f.x + dx, y=f.y + dy) for f in picture.frames),
        texts=tuple(replace(t, x=t.x + dx, y=t.y + dy) for t in picture.texts),
        legend=tuple(
            Entry(
                _moved(e.sample, dx, dy)
                if isinstance(e.sample, Arrow)
                else replace(e.sample, x=e.sample.x + dx, y=e.sample.y + dy),
                replace(e.text, x=e.text.x + dx, y=e.text.y + dy),
            )
            for e in picture.legend
        ),
    )


def _moved(arrow: Arrow, dx: float, dy: float) -> Arrow:
    return replace(arrow, points=tuple((x + dx, y + dy) for x, y in arrow.points))


def _corners(picture: Picture) -> Iterator[tuple[float, float, float, float]]:
    for box in picture.boxes:
        left, top, right, bottom = box.edges
        yield left, top, right + 2.5 * box.under, bottom + 2.5 * box.under
    for frame in picture.frames:
        yield frame.x, frame.y, frame.x + frame.width, frame.y + frame.height
    for line in picture.lines:
        yield line.edges
    for arrow in [*picture.arrows, *(e.sample for e in picture.legend if isinstance(e.sample, Arrow))]:
        for x, y in passed(arrow.points):
            yield x, y, x, y
    for entry in picture.legend:
        if isinstance(entry.sample, Box):
            yield entry.sample.edges


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


def _around(corners: Iterable[tuple[float, float, float, float]]) -> tuple[float, float, float, float]:
    listed = list(corners) or [(0.0, 0.0, 0.0, 0.0)]
    lefts, tops, rights, bottoms = zip(*listed, strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)
