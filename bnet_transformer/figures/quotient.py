"""Shrunk graphs: the boxes of a quotient, what a slice is as a TAN, the tree of best parents among words."""

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
from bnet_transformer.figures.style import BOX_HEIGHT, LABEL_SIZE, add_legend_and_caption
from bnet_transformer.graph import Quotient

CLASS_BOX = "class"


def layout_quotient(quotient: Quotient, top_box: str | None = None) -> Picture:
    """The boxes and the arrows between them; boxes that point at each other stand in one row."""
    graph = quotient.to_networkx()
    rows = _assign_rows(graph, quotient.boxes, top_box)
    most = int(quotient.counts.max()) if len(quotient.counts) else 0
    arrows = []
    for (i, j), count in zip(quotient.arrows.tolist(), quotient.counts.tolist(), strict=True):
        told = f"{quotient.boxes[i]} → {quotient.boxes[j]}: {count} arrows of the ground graph"
        width = 0.8 + 0.35 * math.log2(count)
        arrows.append(PictureArrow(quotient.boxes[i], quotient.boxes[j], (), "grey", width, title=told))
    picture = _layout_rows([_make_box(name) for name in quotient.boxes], rows, arrows)
    said = f"an arrow stands for up to {most} arrows of the ground graph" if most > 1 else ""
    return add_legend_and_caption(picture, legend=False, title="a shrunk bnet", caption=[said])


def layout_tan(tan: Tan) -> Picture:
    """The boxes of a slice, the class on top."""
    picture = layout_quotient(tan.quotient, tan.class_box)
    told = tan.kind + ("" if tan.class_box == CLASS_BOX else f"; the class is {format_token(tan.class_box)}")
    if tan.missing:
        told += f"; with arrows to {', '.join(map(format_token, tan.missing))} it were {tan.nearly}"
    plain = replace(picture, texts=(), caption="")
    return add_legend_and_caption(plain, legend=False, title=told, caption=[told, picture.caption])


def layout_tan_tree(tree: TanTree) -> Picture:
    """The words in a row, each under the class and its best parent; arrows carry the share that is read."""
    names = [f"word_{i}" for i in range(len(tree.tokens))]
    boxes = [_make_box(CLASS_BOX, (TextRun("x", "math"), TextRun(str(tree.slice), "sup")))]
    for name, token in zip(names, tree.tokens, strict=True):
        boxes.append(_make_box(name, (TextRun(format_token(token), "token"),), f"{name} “{format_token(token, None)}”"))
    rows = {CLASS_BOX: 0, **dict.fromkeys(names, 1)}
    arrows = [PictureArrow(CLASS_BOX, name, (), "line", title=f"{CLASS_BOX} → {name}") for name in names]
    for i, (parent, share) in enumerate(zip(tree.parents, tree.weights, strict=True)):
        if parent >= 0:
            told = f"{names[parent]} → {names[i]}: P(j | i) = {share:.3f}"
            look = 0.6 + 2.3 * share, 0.35 + 0.65 * share
            arrows.append(PictureArrow(names[parent], names[i], (), "accent", *look, weight=share, title=told))
    told = f"slice {tree.slice}, {tree.head}: {tree.mass:.1%} of the attention between words is in the tree"
    return add_legend_and_caption(
        _layout_rows(boxes, rows, arrows), has_box_signs=False, title="the tree of best parents", caption=[told]
    )


def _make_box(name: str, label: tuple[TextRun, ...] = (), title: str = "") -> NodeBox:
    label = label or _box_label(name)
    return NodeBox(
        name,
        0.0,
        0.0,
        max(measure_label(label, LABEL_SIZE) + 18.0, 40.0),
        BOX_HEIGHT,
        label,
        title=title or format_token(name, None),
    )


def _box_label(name: str) -> tuple[TextRun, ...]:
    """The label of a box: of a family or a node, its letter and indices; else its name."""
    stem, indices = split_name(name)
    letter = stem.rsplit("_", 1)[-1]
    if indices and stem.isidentifier() and (len(letter) == 1 or stem[1:2] == "_") and len(indices) < 3:
        return format_node_label(stem, slice=indices[0], word=indices[1] if len(indices) == 2 else None)
    return (TextRun(format_token(name).replace("_", " "), "name"),)


def _assign_rows(graph: nx.DiGraph, boxes: Sequence[str], first: str | None) -> dict[str, int]:
    """The row of each box: below what points at it; those of one cycle share a row, `first` has the first.

    Below the class of words all boxes share one: the words stand side by side.
    """
    rest = graph.subgraph([box for box in boxes if box != first])
    if first == CLASS_BOX:
        return {box: int(box != first) for box in boxes}
    joined = nx.condensation(rest)
    found: dict[str, int] = {}
    for row, generation in enumerate(nx.topological_generations(joined)):
        for part in generation:
            found |= dict.fromkeys(joined.nodes[part]["members"], row + (first is not None))
    return {box: 0 if box == first else found[box] for box in boxes}


def _layout_rows(boxes: Sequence[NodeBox], rows: dict[str, int], arrows: Sequence[PictureArrow]) -> Picture:
    """Boxes in centred rows; arrows between rows are curves, those within a row are arches below it."""
    lines: dict[int, list[str]] = {}
    for name, row in rows.items():
        lines.setdefault(row, []).append(name)
    order = {name: k for line in lines.values() for k, name in enumerate(line)}
    named = {box.name: box for box in boxes}
    items = [
        GridItem(named[name], row, None if len(line) == 1 else order[name], (order[name],))
        for row, line in sorted(lines.items())
        for name in line
    ]
    placed, routed = Grid(
        items, (), [a for a in arrows if rows[a.source] != rows[a.target]], GridSpacing(reach_factor=0.3)
    ).layout()
    named, ways = {box.name: box for box in placed}, iter(routed)
    found = []
    for arrow in arrows:
        if rows[arrow.source] != rows[arrow.target]:
            found.append(next(ways))
            continue
        far = order[arrow.target] - order[arrow.source]
        rise, shift = 20.0 + 17.0 * (abs(far) - 1) + (9.0 if far < 0 else 0.0), 6.0 if far < 0 else 12.0
        way = arch_curve(named[arrow.source], named[arrow.target], rise, shift)
        found.append(replace(arrow, points=way))
    return Picture(tuple(named[box.name] for box in boxes), tuple(found))
