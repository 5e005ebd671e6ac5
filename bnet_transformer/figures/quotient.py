"""Layout of quotient graphs: the boxes of a shrunk bnet, a slice as a TAN, the tree of the best parents of words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import networkx as nx

from bnet_transformer._core.naming import split_name
from bnet_transformer.attention import Tan, TanTree
from bnet_transformer.figures.grid_layout import Grid, GridItem, GridSpacing
from bnet_transformer.figures.labels import TextRun, format_node_label, format_token, measure_label
from bnet_transformer.figures.picture import NodeBox, Picture, PictureArrow, arch_curve
from bnet_transformer.figures.size import Density
from bnet_transformer.figures.style import BOX_HEIGHT, LABEL_SIZE, Drawing, to_sentence_case
from bnet_transformer.graph import Quotient

CLASS_BOX = "class"
BOX_GAP = 20.0  # between the boxes of a row


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
    spacing = GridSpacing(reach_factor=0.3, box_gap=BOX_GAP * max(density.gap, 1.0)).compact(density)
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
