"""A picture: boxes, arrows, frames and texts with their positions in points, and their style, legend and caption.

y increases downwards. The route of an arrow is a chain of cubic Bézier curves. A `Picture` is independent of file
formats and architectures, and the writers (`svg`, `graphviz`, `tikz`) use nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import networkx as nx

from bnet_transformer._core.checks import check_choice
from bnet_transformer.figures.fonts import TextRun, fill_lines, label_to_text, measure_label

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


def sample_curve(points: tuple[Point, ...], count: int = 8) -> Iterator[Point]:
    """Yield points on a chain of curves: `count` for each curve, and the last point."""
    # The cubic Bézier curve in Bernstein form.
    for start, one, two, end in zip(points[::3], points[1::3], points[2::3], points[3::3], strict=False):
        for k in range(count):
            t = k / count
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


# --------------------------------------------------------------------------------------------------------------------
# Style of pictures: colours, fills, borders and dashes with their meaning, the legend, and the caption.
#
# The name of a colour has one meaning in every picture, in the light and the dark theme. Colour-blind readers can
# distinguish the colours, and a border, a dash or a label repeats the meaning of each colour.


LABEL_SIZE = 11.0  # of labels
CAPTION_SIZE = 8.5  # of the legend and the caption
HEADING_SIZE = 12.0  # of the text above a figure
BOX_HEIGHT = 26.0
DOT_MARK_SIZE = 7.0  # of the text of a marked dot
MAX_CROSSED_POINTS = 20  # of arrows behind a text at the height of its dot, before it is above or below
MIN_TEXT_WIDTH = 220.0  # of the legend and the caption of a small figure
SAMPLE_WIDTH = 30.0  # of a sample of the legend, with the gap to its text
DEFAULT_MARK = "marked"
FADED_OPACITY = 0.3  # of nodes that are not highlighted

ROLE_DASHES = {"q": "solid", "k": "dash", "v": "dot"}
ARROW_WIDTH = (0.5, 2.3)  # of an arrow with probability 0, and the increment for probability 1
ARROW_OPACITY = (0.25, 0.75)  # likewise: for probability 0, and the increment for probability 1
ROLE_TEXTS = {"q": "query q", "k": "key k", "v": "value v"}


COLOURS = {
    "ink": ("#1b1f24", "#e6e9ee"),  # text and borders
    "paper": ("#ffffff", "#14171c"),
    "grey": ("#6b7280", "#98a1ae"),  # background: secondary text, plain arrows
    "prior": ("#b4bac3", "#5d6673"),  # a distribution before the evidence
    "line": ("#d5d9df", "#353b45"),  # frames and grids
    "q": ("#cc2f27", "#ff7a70"),  # queries, red as in the chapter
    "k": ("#0b66ad", "#62aef0"),  # keys
    "v": ("#0b8a68", "#3fc79d"),  # values
    "observed": ("#d9dce1", "#474e59"),  # fill of an observed node
    "do": ("#f6c453", "#a8741a"),  # fill of a node that is set by do
    "learnable": ("#8a5a9e", "#c79bdb"),  # learned parameters
    "accent": ("#0b66ad", "#62aef0"),  # the subject of the figure
    "second": ("#c2571a", "#f0995c"),  # the reference that the subject is compared with
}
PALETTES: Mapping[str, Mapping[str, str]] = {
    theme: {name: pair[k] for name, pair in COLOURS.items()} for k, theme in enumerate(("light", "dark"))
}

# Heads and other unordered categories: the palette of Okabe and Ito (2008, "Color Universal Design"), darkened or
# lightened for contrast with the background of the theme.
HEAD_COLOURS: Mapping[str, tuple[str, ...]] = {
    "light": ("#0b66ad", "#c2571a", "#0b8a68", "#b3588c", "#b07d00", "#4a9fd0", "#6b7280", "#6a4c93"),
    "dark": ("#62aef0", "#f0995c", "#3fc79d", "#e393bf", "#e6c04d", "#9fd5f7", "#98a1ae", "#b79ae0"),
}


def get_palette(theme: str = "light") -> Mapping[str, str]:
    """The named colours of a theme, `light` or `dark`.

    >>> get_palette("light")["q"], get_palette("dark")["paper"]
    ('#cc2f27', '#14171c')
    """
    check_choice("theme", theme, tuple(PALETTES))
    return PALETTES[theme]


def arrow_colour(parent: str, child: str) -> str:
    """Return the name of an arrow's colour: that of q, k or v if a role at one of its ends is q, k or v, else grey.

    >>> arrow_colour("x", "q"), arrow_colour("k", "x"), arrow_colour("enc.x", "cross_v"), arrow_colour("c", "W_q")
    ('q', 'k', 'v', 'grey')
    """
    for role in (child, parent):
        letter = role.rsplit("_", 1)[-1]
        if letter in ROLE_DASHES and not role.startswith("W_"):
            return letter
    return "grey"


def make_arrow(source: str, target: str, colour: str, weight: float | None = None, title: str = "") -> PictureArrow:
    """Return an arrow without a route; its probability `weight` determines width and opacity."""
    style = 0.9, 1.0
    if weight is not None:
        style = ARROW_WIDTH[0] + ARROW_WIDTH[1] * weight, ARROW_OPACITY[0] + ARROW_OPACITY[1] * weight
    dash = ROLE_DASHES.get(colour, "solid")
    return PictureArrow(source, target, (), colour, *style, dash=dash, weight=weight, title=title)


def border_colour(box: NodeBox) -> str:
    """Return the name of the colour of a box's border, which depends on its mark."""
    if not box.mark:
        return "ink"
    return {"given": "second", "collider": "second", "y": "learnable"}.get(box.mark, "accent")


def box_outlines(box: NodeBox) -> Iterator[tuple[float, float, float]]:
    """The rectangles of a box, from back to front, as (offset of top left, offset of bottom right, line width).

    Offsets are along both axes. The inner line of a double border comes last.
    """
    for k in range(box.num_stacked, -1, -1):
        yield 2.5 * k, 2.5 * k, 2.2 if box.mark and not k else 0.9
    if box.border == "double":
        yield 2.5, -2.5, 0.7


def split_arrow_head(arrow: PictureArrow) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Return the curves of an arrow's line, which end inside its head, and the corners of the head, the tip first."""
    if not arrow.has_head:
        return arrow.points, ()
    (x1, y1), before = arrow.points[-1], arrow.points[-2]
    x0, y0 = before if before != (x1, y1) else arrow.points[0]
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    size = 4.2 + 1.3 * arrow.width
    bx, by, half = x1 - size * dx, y1 - size * dy, 0.36 * size
    inside = (x1 - 0.8 * size * dx, y1 - 0.8 * size * dy)
    head = (x1, y1), (bx - half * dy, by + half * dx), (bx + half * dy, by - half * dx)
    return (*arrow.points[:-1], inside), head


_sample_box = partial(NodeBox, "", 0.0, 0.0, 22.0, 14.0)  # of the legend


def _sample_arrow(colour: str) -> PictureArrow:
    """An arrow for the legend."""
    curve = cubic_curve((-12.0, 0.0), (12.0, 0.0), sideways=True)
    return replace(make_arrow("", "", colour), points=curve, width=1.1)


def to_sentence_case(text: str) -> str:
    """Return the text with its first letter in upper case.

    >>> to_sentence_case("mean over 2 heads")
    'Mean over 2 heads'
    """
    return text[:1].upper() + text[1:]


def _label_dot(box: NodeBox, occupied: Sequence[Bounds], points: Sequence[Point]) -> TextLine | None:
    """Return the mark of a dot as text at the side with the fewest points of arrows; None if no side has space."""
    across, along = box.width / 2 + 2.0, box.height / 2 + DOT_MARK_SIZE / 2 + 0.5
    sides = [(dx, dy, anchor) for dx, anchor in ((across, "start"), (-across, "end")) for dy in (0.0, -along, along)]
    label, colour = (TextRun(box.mark),), border_colour(box)
    candidates = []
    for dx, dy, anchor in sides:
        line = TextLine(box.x + dx, box.y + dy, label, anchor, DOT_MARK_SIZE, colour)
        left, top, right, bottom = line.bounds
        if not any(left < x1 and x0 < right and top < y1 - 0.5 and y0 + 0.5 < bottom for x0, y0, x1, y1 in occupied):
            count = sum(left < x < right and top < y < bottom for x, y in points)
            candidates.append((count + (MAX_CROSSED_POINTS if dy else 0), line))
    return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


@dataclass(frozen=True)
class Drawing:
    """The layout of a figure before its texts are added.

    Args:
        content: The boxes, arrows, frames and their labels.
        title: What the figure shows.
        caption: Sentences without full stops; empty ones are ignored.
        has_legend: Whether the styles of boxes and arrows are explained.
        has_box_signs: Whether the legend explains boxes; else it explains only arrows.
    """

    content: Picture
    title: str
    caption: Sequence[str] = ()
    has_legend: bool = True
    has_box_signs: bool = True

    @cached_property
    def signs(self) -> list[tuple[NodeBox | PictureArrow, str]]:
        """A sample and an explanation for every style that the content uses."""
        if not self.has_legend:
            return []
        boxes, arrows = self.content.boxes if self.has_box_signs else (), self.content.arrows
        signs: list[tuple[bool, NodeBox, str]] = [
            (any(b.border == "double" for b in boxes), _sample_box(border="double"), "deterministic"),
            (any(b.border == "single" and b.fill == "paper" for b in boxes), _sample_box(), "stochastic"),
            (any(b.is_dashed for b in boxes), _sample_box(is_dashed=True), "learnable TPM"),
            (any(b.fill == "observed" for b in boxes), _sample_box(fill="observed"), "observed"),
            (any(b.fill == "do" for b in boxes), _sample_box(fill="do", border="double"), "set by do"),
            (any(b.num_stacked for b in boxes), _sample_box(num_stacked=2), "repeated over plates"),
        ]
        entries: list[tuple[NodeBox | PictureArrow, str]] = [
            (sample, text) for is_used, sample, text in signs if is_used
        ]
        for role in dict.fromkeys("effect" if b.mark[0] in "+-" else b.mark for b in boxes if b.mark):
            marked = next(b for b in boxes if b.mark and role == ("effect" if b.mark[0] in "+-" else b.mark))
            box = _sample_box(mark=role)
            if marked.border == "dot":
                box = replace(box, border="dot", width=marked.width, height=marked.height)
            entries.append((box, role))
        colours = {arrow.colour for arrow in arrows}
        entries += [(_sample_arrow(colour), text) for colour, text in ROLE_TEXTS.items() if colour in colours]
        has_heads = any(arrow.has_head for arrow in arrows)
        if "accent" in colours:
            entries.append((replace(_sample_arrow("accent"), has_head=has_heads), "from word j to word i"))
        if any(arrow.weight is not None for arrow in arrows):
            sample = _sample_arrow("accent" if "accent" in colours else "grey")
            entries.append((replace(sample, width=2.6, has_head=has_heads), "P(j | i), by width and contrast"))
        return entries

    @property
    def full_caption(self) -> str:
        """The caption as one text."""
        return " ".join(f"{sentence}." for sentence in self.caption if sentence)

    def min_text_width(self, heading: str) -> float:
        """The width of the longest part that has no line break: a word, or an entry of the legend."""
        widths = [measure_label((TextRun(word),), CAPTION_SIZE) for word in self.full_caption.split()]
        widths += [measure_label((TextRun(word),), HEADING_SIZE) for word in heading.split()]
        widths += [measure_label((TextRun(text),), CAPTION_SIZE) + SAMPLE_WIDTH for _, text in self.signs]
        return max(widths, default=0.0)


def add_texts(drawing: Drawing, heading: str = "", text_width: float | None = None) -> Picture:
    """Add the heading above a drawing, and its legend and caption below.

    `text_width` is the width at which they are wrapped; None for the width of the drawing, but at least a width at
    which they are readable.
    """
    picture = add_marks(drawing.content)
    left, top, right, bottom = extent(picture)
    width = text_width
    if width is None:
        lengths = [
            measure_label((TextRun(text),), size)
            for text, size in ((drawing.full_caption, CAPTION_SIZE), (heading, HEADING_SIZE))
        ]
        width = max(right - left, min(MIN_TEXT_WIDTH, max(lengths)), drawing.min_text_width(heading))
    left -= (width - (right - left)) / 2
    entries, y = _layout_legend(drawing.signs, left, width, bottom + 24.0)
    lines = _wrap_text(drawing.full_caption, width, CAPTION_SIZE)
    texts = [
        TextLine(left + width / 2, y + 13.0 * k, (TextRun(text),), size=CAPTION_SIZE, colour="grey")
        for k, text in enumerate(lines)
    ]
    for k, text in enumerate(reversed(_wrap_text(heading, width, HEADING_SIZE))):
        y = top - 16.0 - 1.4 * HEADING_SIZE * k
        texts.append(TextLine(left + width / 2, y, (TextRun(text),), size=HEADING_SIZE))
    titles: dict[str, Any] = {"title": heading or drawing.title, "heading": heading, "caption": drawing.full_caption}
    return replace(picture, texts=(*picture.texts, *texts), legend=tuple(entries), **titles)


def add_marks(picture: Picture) -> Picture:
    """Add the marks of highlighted boxes as texts above the boxes, and different marks of dots next to the dots."""
    occupied = [line.bounds for line in picture.lines]
    occupied += [box.bounds for box in picture.boxes if box.border == "dot"]
    labelled = [box for box in picture.boxes if box.mark not in ("", DEFAULT_MARK)]
    dot_marks = {box.mark for box in labelled if box.border == "dot"}
    has_dots = len(dot_marks) > 1 or any(mark[0] in "+-" for mark in dot_marks)  # the legend has a single label
    points = [point for arrow in picture.arrows for point in sample_curve(arrow.points, 16)] if has_dots else []
    texts = list(picture.texts)
    for box in labelled:
        left, top, _, _ = box.bounds
        if box.border != "dot":
            texts.append(TextLine(left + 1.0, top - 6.5, (TextRun(box.mark),), "start", 7.5, border_colour(box)))
        elif has_dots and (line := _label_dot(box, occupied, points)) is not None:
            occupied.append(line.bounds)
            texts.append(line)
    return replace(picture, texts=tuple(texts))


def _layout_legend(
    signs: Sequence[tuple[NodeBox | PictureArrow, str]], left: float, max_width: float, y: float
) -> tuple[list[LegendEntry], float]:
    """The entries of the legend in centred rows of similar length, and the y below the last row."""
    if not signs:
        return [], y
    widths = [
        (sample, text, SAMPLE_WIDTH + measure_label((TextRun(text),), CAPTION_SIZE) + 14.0) for sample, text in signs
    ]
    width = max_width + 14.0  # the gap after the last entry of a row is not drawn
    rows = _wrap_entries(widths, width)
    while width > 60.0 and len(_wrap_entries(widths, width * 0.97)) == len(rows):  # rows of about one length
        width *= 0.97
    entries = []
    for row in _wrap_entries(widths, width):
        x = left + (max_width - sum(entry_width for *_, entry_width in row) + 14.0) / 2
        for sample, text, entry_width in row:
            text_line = TextLine(x + SAMPLE_WIDTH, y, (TextRun(text),), "start", CAPTION_SIZE)
            offset = -2.5 if isinstance(sample, NodeBox) and sample.num_stacked else 0.0
            entries.append(LegendEntry(translate(sample, x + 12.0 + offset, y), text_line))
            x += entry_width
        y += 17.0
    return entries, y + 2.0


def _wrap_entries(
    signs: Sequence[tuple[NodeBox | PictureArrow, str, float]], max_width: float
) -> list[list[tuple[NodeBox | PictureArrow, str, float]]]:
    """Distribute the entries of a legend over rows of at most `max_width`."""
    rows: list[list[tuple[NodeBox | PictureArrow, str, float]]] = [[]]
    for sign in signs:
        if rows[-1] and sum(need for *_, need in rows[-1]) + sign[2] > max_width:
            rows.append([])
        rows[-1].append(sign)
    return rows


_WORD = re.compile(r"\S*P\(j \| i\)\S*|\S+")  # of a text that is wrapped; a probability is not divided


def _wrap_text(text: str, max_width: float, size: float) -> list[str]:
    """The lines of a text of at most `max_width`, of about one length; a word that is wider is a line."""
    words, width = _WORD.findall(text), max_width

    def fits(line: str) -> bool:
        return measure_label((TextRun(line),), size) <= width

    lines = fill_lines(words, fits)
    while len(lines) > 1 and width > 60.0:
        width *= 0.97
        if len(shorter := fill_lines(words, fits)) != len(lines):
            break
        lines = shorter
    return lines
