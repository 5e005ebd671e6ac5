"""The grid layout: boxes in rows and columns, weights at the left, routes of arrows; and quotient graphs on it.

No box overlaps the gaps between rows or the gutters between columns. An arrow between neighbouring rows is one curve.
Every other arrow is routed through gaps and gutters, so no arrow crosses a box.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import networkx as nx

from bnet_transformer._core.naming import split_name
from bnet_transformer.attention import Tan, TanTree
from bnet_transformer.figures.fonts import Density, TextRun, format_node_label, format_token, measure_label
from bnet_transformer.figures.picture import (
    BOX_HEIGHT,
    LABEL_SIZE,
    Drawing,
    NodeBox,
    Picture,
    PictureArrow,
    Point,
    arch_curve,
    cubic_curve,
    level_line,
    rounded_polyline,
    to_sentence_case,
)
from bnet_transformer.graph import Quotient

WEIGHT_SPACING = 32.0  # between weights of one row
BOX_GAP = 7.0  # between boxes of one cell
MIN_ROW_GAP = 20.0  # for the horizontal parts of arrows, which are up to 19 points above a row
MIN_BOX_GAP = 4.0  # of the most compact layout
MIN_LANE_GAP = 8.0  # likewise
LANE_WIDTH = 6.0
PORT_SPACING = 6.5


@dataclass(frozen=True)
class GridItem:
    """A box and its cell: a row, and a column (None: centred over all columns); `order` sorts the boxes of a cell."""

    box: NodeBox
    row: int
    column: int | None
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class WeightItem:
    """A weight in the column at the left, above the row of its children; from `depth` 2 on, it feeds other weights."""

    box: NodeBox
    row: int
    depth: int = 1
    has_slice: bool = True


@dataclass(frozen=True)
class GridSpacing:
    """The gaps of a grid, in points.

    Args:
        row_gap: Between rows, at least.
        column_gap: Between columns.
        weight_gap: Between weights and words.
        reach_factor: The gap above a row is at least this factor times the horizontal extent of its widest arrow.
        box_gap: Between the boxes of one cell.
        lane_gap: Between a column and the first arrow of its gutter.
        min_column_gap: Between columns in the most compact layout.
    """

    row_gap: float = 30.0
    column_gap: float = 20.0
    weight_gap: float = 22.0
    reach_factor: float = 0.22
    box_gap: float = BOX_GAP
    lane_gap: float = 18.0
    min_column_gap: float = 4.0

    def compact(self, density: Density) -> GridSpacing:
        """The spacing with the gaps of a density."""
        gap = density.gap
        return replace(
            self,
            row_gap=max(self.row_gap * density.row_gap, MIN_ROW_GAP),
            column_gap=max(self.column_gap * gap, self.min_column_gap),
            weight_gap=self.weight_gap * min(gap, 1.0),
            box_gap=max(self.box_gap * min(gap, 1.0), MIN_BOX_GAP),
            lane_gap=max(self.lane_gap * min(gap, 1.0), MIN_LANE_GAP),
        )


class Grid:
    """Positions boxes and routes arrows. After `layout`, `rows` and `columns` have the ends of each row and column."""

    def __init__(
        self,
        items: Sequence[GridItem],
        weights: Sequence[WeightItem],
        arrows: Sequence[PictureArrow],
        spacing: GridSpacing = GridSpacing(),
    ) -> None:
        if all(item.column is None for item in items):  # no columns to centre over
            items = [replace(item, column=0) for item in items]
        self.items, self.weights, self.arrows, self.spacing = items, weights, arrows, spacing
        self.items_by_name = {item.box.name: item for item in items}
        self.weights_by_name = {weight.box.name: weight for weight in weights}
        self.weights_above: dict[int, list[WeightItem]] = defaultdict(list)  # those of depth 1, by row
        for weight in weights:
            if weight.depth == 1:
                self.weights_above[weight.row].append(weight)
        self.cells: dict[tuple[int, int | None], list[GridItem]] = {}
        for item in sorted(items, key=attrgetter("order")):
            self.cells.setdefault((item.row, item.column), []).append(item)
        self.boxes: dict[str, NodeBox] = {}
        self.rows: dict[int, tuple[float, float]] = {}
        self.columns: dict[int, tuple[float, float]] = {}
        self.num_lanes: dict[int, int] = {}

    def layout(self) -> tuple[tuple[NodeBox, ...], tuple[PictureArrow, ...]]:
        """The boxes at their positions and the arrows with their routes; arrows keep their order."""
        self._assign_lanes()
        self._layout_columns()
        self._layout_rows()
        self._layout_weights()
        self.right_edge = max(map(self._lane_x, self.lane_by_arrow), default=-math.inf)  # of the lanes
        arrows = tuple(self._route_arrow(k) for k in range(len(self.arrows)))
        return tuple(self.boxes.values()), arrows

    # lanes

    def _is_direct(self, source: GridItem, target: GridItem) -> bool:
        """True if one curve from row to row crosses no box."""
        if target.row <= source.row:
            return False
        columns = [c for c in (source.column, target.column) if c is not None]
        low, high = (min(columns), max(columns)) if len(columns) == 2 else (-1, 10**9)
        between = range(source.row + 1, target.row)
        return not any(row in between and (column is None or low <= column <= high) for row, column in self.cells)

    @cached_property
    def index_in_row(self) -> dict[str, int]:
        """The index of each box in its row, from the left."""
        counts: dict[int, int] = defaultdict(int)
        positions = {}
        for row, column in sorted(self.cells, key=lambda cell: (cell[0], -1 if cell[1] is None else cell[1])):
            for item in self.cells[row, column]:
                positions[item.box.name] = counts[row]
                counts[row] += 1
        return positions

    def _assign_lanes(self) -> None:
        """A lane in a gutter for each arrow that passes rows; arrows whose rows do not overlap share a lane."""
        # First fit on intervals, the shortest first, which puts short arrows next to the boxes and long ones outside.
        self.lane_by_arrow: dict[int, tuple[int, int]] = {}
        occupied: dict[int, list[list[tuple[float, float]]]] = defaultdict(list)
        ends: dict[int, tuple[int, int]] = {}
        self.direct, self.level = set[int](), set[int]()  # arrows of one curve from row to row, or in a row
        for k, arrow in enumerate(self.arrows):
            source, target = self.items_by_name.get(arrow.source), self.items_by_name.get(arrow.target)
            if source is None or target is None:
                continue
            is_in_row = source.row == target.row and source.column is not None and target.column is not None
            if is_in_row and abs(self.index_in_row[arrow.source] - self.index_in_row[arrow.target]) == 1:
                self.level.add(k)
            elif self._is_direct(source, target):
                self.direct.add(k)
            else:
                ends[k] = source.row, target.row
        for k, (start, end) in sorted(ends.items(), key=lambda item: abs(item[1][1] - item[1][0])):
            column = self.items_by_name[self.arrows[k].source].column
            low, high = min(start, end), max(start, end)
            passed = range(low + 1, high) if start < end else range(low, high)  # the rows that its lane passes
            if column is None or any((row, None) in self.cells for row in passed):
                column = max((c for _, c in self.cells if c is not None), default=0)
            span = (low, high) if low < high else (low - 0.5, high + 0.5)  # within a row: from below it to above it
            free = (
                n for n, spans in enumerate(occupied[column]) if all(span[1] <= a or b <= span[0] for a, b in spans)
            )
            lane = next(free, len(occupied[column]))
            if lane == len(occupied[column]):
                occupied[column].append([])
            occupied[column][lane].append(span)
            self.lane_by_arrow[k] = (column, lane)
        self.num_lanes = {column: len(lanes) for column, lanes in occupied.items()}

    # positions

    def _layout_columns(self) -> None:
        """Set the horizontal positions of boxes and columns."""
        gap, widths = self.spacing.box_gap, dict[int, float]()
        cell_widths = {
            key: sum(item.box.width for item in cell) + gap * (len(cell) - 1) for key, cell in self.cells.items()
        }
        for (_, column), width in cell_widths.items():
            if column is not None:
                widths[column] = max(widths.get(column, 0.0), width)
        x = 0.0
        for column in sorted(widths):
            self.columns[column] = (x, x + widths[column])
            lanes = self.num_lanes.get(column, 0)
            x += (
                widths[column]
                + self.spacing.column_gap
                + (LANE_WIDTH * lanes + self.spacing.lane_gap / 1.5 if lanes else 0.0)
            )
        right = max((end for _, end in self.columns.values()), default=0.0)
        for (row, column), cell in self.cells.items():
            low, high = self.columns[column] if column is not None else (0.0, right)
            left = (low + high) / 2 - cell_widths[row, column] / 2
            for item in cell:
                self.boxes[item.box.name] = replace(item.box, x=left + item.box.width / 2)
                left += item.box.width + gap
        self.left_edge = min((box.bounds[0] for box in self.boxes.values()), default=0.0)

    def _layout_rows(self) -> None:
        """Set the vertical positions of boxes and rows."""
        reach: dict[int, float] = defaultdict(float)
        for arrow in (self.arrows[k] for k in self.direct):
            row = self.items_by_name[arrow.target].row
            reach[row] = max(reach[row], abs(self.boxes[arrow.source].x - self.boxes[arrow.target].x))
        y = 0.0
        for row in range(1 + max((item.row for item in self.items), default=0)):
            row_height = max((item.box.height for item in self.items if item.row == row), default=0.0)
            num_weights = len(self.weights_above[row])
            gap = max(
                self.spacing.row_gap if row else 0.0,
                min(self.spacing.reach_factor * reach[row], 120.0),
                WEIGHT_SPACING * num_weights + 30.0 if num_weights else 0.0,
            )
            self.rows[row] = (y + gap, y + gap + row_height)
            y += gap + row_height
        for item in self.items:
            top, bottom = self.rows[item.row]
            self.boxes[item.box.name] = replace(self.boxes[item.box.name], y=(top + bottom) / 2)

    def _layout_weights(self) -> None:
        """Set the positions of the weights, left of the other boxes."""
        if not self.weights:
            return
        # Each weight that feeds a row other than the one below it has a lane.
        self.remote = set[int]()
        for k, arrow in enumerate(self.arrows):
            source, child = self.weights_by_name.get(arrow.source), self.items_by_name.get(arrow.target)
            if source is not None and child is not None and (child.row != source.row or source.depth > 1):
                self.remote.add(k)
        sources = {self.arrows[k].source for k in self.remote}
        self.remote_weights = {name: k for k, name in enumerate(sorted(sources))}
        edge = self.left_edge
        if not self.remote_weights and all(weight.depth == 1 for weight in self.weights):  # no arrow passes other rows
            rows = {row for weight in self.weights for row in (weight.row - 1, weight.row)}
            items = [item for item in self.items if item.row in rows]
            edge = min((self.boxes[item.box.name].bounds[0] for item in items), default=edge)
        right = edge - self.spacing.weight_gap - 5.0 * len(self.remote_weights)
        width = max((w.box.width for w in self.weights if w.depth == 1), default=0.0)
        for row in {weight.row for weight in self.weights}:
            bottom = self.rows[row][0] - 30.0
            for k, weight in enumerate(reversed(self.weights_above[row])):
                y = bottom - WEIGHT_SPACING * k
                self.boxes[weight.box.name] = replace(weight.box, x=right - width / 2, y=y)
        top = min((box.bounds[1] for box in self.boxes.values()), default=0.0)
        x = right - width - 20.0
        for weight in sorted((w for w in self.weights if w.depth > 1), key=attrgetter("depth")):
            x -= weight.box.width / 2
            targets = [arrow.target for arrow in self.arrows if arrow.source == weight.box.name]
            children = [self.boxes[name] for name in targets if name in self.weights_by_name]
            y = top - weight.box.height / 2 - 6.0
            if weight.has_slice and children:
                y = sum(box.y for box in children) / len(children)
            self.boxes[weight.box.name] = replace(weight.box, x=x, y=y)
            x -= 0.0 if weight.has_slice else weight.box.width / 2 + 16.0
            x += weight.box.width / 2 if weight.has_slice else 0.0

    # routes

    @cached_property
    def _port_points(self) -> dict[int, Point]:
        """The end of each arrow at the top of its target box; the ends are sorted by the x from which arrows arrive."""
        incoming: dict[str, list[tuple[float, int]]] = defaultdict(list)  # for each arrow, the x from which it arrives
        for k, arrow in enumerate(self.arrows):
            if arrow.target not in self.items_by_name:
                continue
            if arrow.source in self.weights_by_name:
                incoming[arrow.target].append((-1e9, k))
            elif k in self.lane_by_arrow:
                incoming[arrow.target].append((self._lane_x(k), k))
            elif k in self.direct:
                incoming[arrow.target].append((self.boxes[arrow.source].x, k))
        # In this order, the last segments of the arrows into one box do not cross.
        ports = {}
        for name, arrows in incoming.items():
            box = self.boxes[name]
            step = min(PORT_SPACING, 0.8 * box.width / max(len(arrows) - 1, 1))
            for slot, (_, k) in enumerate(sorted(arrows)):
                ports[k] = (box.x + step * (slot - (len(arrows) - 1) / 2), box.bounds[1])
        return ports

    def _lane_x(self, k: int) -> float:
        """The x of the lane of an arrow."""
        column, lane = self.lane_by_arrow[k]
        return self._lane_starts[column] + self.spacing.lane_gap + LANE_WIDTH * lane

    @cached_property
    def _lane_starts(self) -> dict[int, float]:
        """The right end of the boxes that the lanes of each column pass; centred boxes count for the last column."""
        rows: dict[int, set[int]] = defaultdict(set)
        for k, (column, _) in self.lane_by_arrow.items():
            ends = [self.items_by_name[name].row for name in (self.arrows[k].source, self.arrows[k].target)]
            rows[column] |= set(range(min(ends), max(ends) + 1))
        last = max(self.columns)
        return {
            column: max(
                (
                    self.boxes[item.box.name].bounds[2]
                    for item in self.items
                    if item.row in passed and (item.column == column or (item.column is None and column == last))
                ),
                default=self.columns[column][1],
            )
            for column, passed in rows.items()
        }

    def _route_arrow(self, k: int) -> PictureArrow:
        """An arrow with its route."""
        arrow = self.arrows[k]
        source, target = self.boxes[arrow.source], self.boxes[arrow.target]
        if arrow.source in self.weights_by_name:
            return replace(arrow, points=self._route_from_weight(k, arrow, source, target))
        if k in self.lane_by_arrow:
            return replace(arrow, points=self._route_by_lane(k, source))
        if k in self.level:
            return replace(arrow, points=level_line(source, target))
        return replace(arrow, points=cubic_curve((source.x, source.bounds[3]), self._port_points[k]))

    def _route_from_weight(self, k: int, arrow: PictureArrow, source: NodeBox, target: NodeBox) -> tuple[Point, ...]:
        """The route of an arrow that starts at a weight."""
        weight = self.weights_by_name[arrow.source]
        out = (source.bounds[2], source.y)
        if arrow.target in self.weights_by_name:
            if weight.has_slice or abs(source.y - target.y) < 1:
                return cubic_curve(out, (target.bounds[0], target.y), sideways=True)
            return rounded_polyline([(source.x, source.bounds[3]), (source.x, target.y), (target.bounds[0], target.y)])
        end = self._port_points[k]
        if k not in self.remote:
            return rounded_polyline([out, (end[0], source.y), end])
        lane_idx = self.remote_weights[arrow.source]
        lane = self.left_edge - 8.0 - 5.0 * lane_idx
        y = end[1] - 9.0 - 3.0 * (lane_idx % 3)
        return rounded_polyline([out, (lane, source.y), (lane, y), (end[0], y), end])

    def _route_by_lane(self, k: int, source: NodeBox) -> tuple[Point, ...]:
        """The route of an arrow through its lane."""
        arrow, x = self.arrows[k], self._lane_x(k)
        column, lane = self.lane_by_arrow[k]
        begin, end = self.items_by_name[arrow.source], self.items_by_name[arrow.target]
        if self.cells[begin.row, begin.column][-1] is begin and begin.column == column:
            start = [(source.bounds[2], source.y), (x, source.y)]
        else:
            low = self.rows[begin.row][1] + 8.0 + 3.0 * (lane % 4)
            start = [(source.x, source.bounds[3]), (source.x, low), (x, low)]
        port = self._port_points[k]
        high = self.rows[end.row][0] - 10.0 - 3.0 * (lane % 4)
        return rounded_polyline([*start, (x, high), (port[0], high), port])


# --------------------------------------------------------------------------------------------------------------------
# Layout of quotient graphs: the boxes of a shrunk bnet, a slice as a TAN, the tree of the best parents of words.


CLASS_BOX = "class"
QUOTIENT_BOX_GAP = 20.0  # between the boxes of a row


def layout_quotient(quotient: Quotient, density: Density, top_box: str | None = None) -> Drawing:
    """Lay out a quotient graph; boxes of one cycle share a row, and `top_box` is in the first row."""
    graph = quotient.to_networkx()
    rows = _assign_rows(graph, quotient.boxes, top_box)
    max_count = int(quotient.counts.max()) if len(quotient.counts) else 0
    arrows = []
    for (i, j), count in zip(quotient.arrows.tolist(), quotient.counts.tolist(), strict=True):
        title = f"{quotient.boxes[i]} → {quotient.boxes[j]}: {count} arrows of the ground graph"
        width = 0.8 + 0.35 * math.log2(count)
        arrows.append(PictureArrow(quotient.boxes[i], quotient.boxes[j], (), "grey", width, title=title))
    boxes = [_make_box(name, _box_label(name, density.max_token), density) for name in quotient.boxes]
    caption = f"Each arrow represents up to {max_count} arrows of the ground graph" if max_count > 1 else ""
    return Drawing(_layout_rows(boxes, rows, arrows, density), "Shrunk bnet", [caption], has_legend=False)


def layout_tan(tan: Tan, density: Density) -> Drawing:
    """Lay out a TAN with its class on top."""
    drawing = layout_quotient(tan.quotient, density, tan.class_box)
    title = to_sentence_case(tan.kind.replace("no DAG", "not a DAG"))
    title += "" if tan.class_box == CLASS_BOX else f" with class {format_token(tan.class_box)}"
    if tan.missing:
        title += f"; with arrows to {', '.join(map(format_token, tan.missing))} it would be {tan.nearly}"
    return replace(drawing, title=title, caption=[title, *drawing.caption])


def layout_tan_tree(tree: TanTree, density: Density) -> Drawing:
    """Lay out a tree of best parents: words in a row below the class; the width of an arrow is its attention weight."""
    names = [f"word_{i}" for i in range(len(tree.tokens))]
    boxes = [_make_box(CLASS_BOX, (TextRun("x", "math"), TextRun(str(tree.slice), "sup")), density)]
    for name, token in zip(names, tree.tokens, strict=True):
        label = (TextRun(format_token(token, density.max_token), "token"),)
        boxes.append(_make_box(name, label, density, f"{name} “{format_token(token, None)}”"))
    rows = {CLASS_BOX: 0, **dict.fromkeys(names, 1)}
    arrows = [PictureArrow(CLASS_BOX, name, (), "line", title=f"{CLASS_BOX} → {name}") for name in names]
    for i, (parent, weight) in enumerate(zip(tree.parents, tree.weights, strict=True)):
        if parent >= 0:
            title = f"{names[parent]} → {names[i]}: P(j | i) = {weight:.3f}"
            style = 0.6 + 2.3 * weight, 0.35 + 0.65 * weight  # width and opacity
            arrows.append(PictureArrow(names[parent], names[i], (), "accent", *style, weight=weight, title=title))
    caption = f"Slice {tree.slice}, {tree.head}: the tree has {tree.mass:.1%} of the attention between words"
    content = _layout_rows(boxes, rows, arrows, density)
    return Drawing(content, "Tree of best parents", [caption], has_box_signs=False)


def _make_box(name: str, label: tuple[TextRun, ...], density: Density, title: str = "") -> NodeBox:
    """The box of a quotient graph."""
    return NodeBox(
        name,
        0.0,
        0.0,
        max(measure_label(label, LABEL_SIZE) + density.padding + 2.0, density.min_box_width + 4.0),
        BOX_HEIGHT,
        label,
        title=title or format_token(name, None),
    )


def _box_label(name: str, max_length: int) -> tuple[TextRun, ...]:
    """The label of a box: letter and indices if its name is that of a node or node group, else its name."""
    stem, indices = split_name(name)
    letter = stem.rsplit("_", 1)[-1]
    if indices and stem.isidentifier() and (len(letter) == 1 or stem[1:2] == "_") and len(indices) < 3:
        return format_node_label(stem, slice=indices[0], word=indices[1] if len(indices) == 2 else None)
    return (TextRun(format_token(name, max_length).replace("_", " "), "name"),)


def _assign_rows(graph: nx.DiGraph, boxes: Sequence[str], first: str | None) -> dict[str, int]:
    """The row of each box: only `first` is in row 0, and each box is below its parents; boxes of a cycle share a row.

    If `first` is the class of the words, all other boxes are in row 1.
    """
    if first == CLASS_BOX:
        return {box: int(box != first) for box in boxes}
    # The strongly connected components form an acyclic graph, which has topological generations.
    components = nx.condensation(graph.subgraph([box for box in boxes if box != first]))
    row_by_box: dict[str, int] = {}
    for row, generation in enumerate(nx.topological_generations(components)):
        for component in generation:
            row_by_box |= dict.fromkeys(components.nodes[component]["members"], row + (first is not None))
    return {box: 0 if box == first else row_by_box[box] for box in boxes}


def _layout_rows(
    boxes: Sequence[NodeBox], rows: dict[str, int], arrows: Sequence[PictureArrow], density: Density
) -> Picture:
    """Lay out boxes in centred rows; arrows between rows are curves, arrows within a row are arches below it."""
    lines: dict[int, list[str]] = {}
    for name, row in rows.items():
        lines.setdefault(row, []).append(name)
    order = {name: k for line in lines.values() for k, name in enumerate(line)}
    named = {box.name: box for box in boxes}
    between_rows = [a for a in arrows if rows[a.source] != rows[a.target]]
    # Rows are centred. An arrow that passes a row needs columns, in which it can pass between boxes.
    has_columns = any(rows[a.target] != rows[a.source] + 1 for a in between_rows)
    items = [
        GridItem(named[name], row, order[name] if has_columns and len(line) > 1 else None, (order[name],))
        for row, line in sorted(lines.items())
        for name in line
    ]
    spacing = GridSpacing(reach_factor=0.3, box_gap=QUOTIENT_BOX_GAP * max(density.gap, 1.0)).compact(density)
    positioned, routed = Grid(items, (), between_rows, spacing).layout()
    named, next_routed = {box.name: box for box in positioned}, iter(routed)
    result = []
    for arrow in arrows:
        if rows[arrow.source] != rows[arrow.target]:
            result.append(next(next_routed))
            continue
        span = order[arrow.target] - order[arrow.source]
        height, inset = 20.0 + 17.0 * (abs(span) - 1) + (9.0 if span < 0 else 0.0), 6.0 if span < 0 else 12.0
        result.append(replace(arrow, points=arch_curve(named[arrow.source], named[arrow.target], height, inset)))
    return Picture(tuple(named[box.name] for box in boxes), tuple(result))
