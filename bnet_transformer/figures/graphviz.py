"""Writes pictures as editable DOT: the graph with labels and colours, without positions. Graphviz computes positions.

Writing DOT does not require Graphviz; rendering it requires the program `dot`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import graphviz

from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import POINTS_PER_INCH, TextRun, escape_invisible
from bnet_transformer.figures.picture import (
    FADED_OPACITY,
    LABEL_SIZE,
    Frame,
    NodeBox,
    Picture,
    PictureArrow,
    border_colour,
    get_palette,
)

ClusterTree = dict[int, tuple[Frame, int | None, frozenset[str]]]  # by index: frame, parent, names of nodes

EDGE_STYLES = {"solid": "solid", "dash": "dashed", "dot": "dotted"}


def to_dot(picture: Picture) -> str:
    """Return the picture as DOT: a node for each box, an edge for each arrow, a cluster for each frame around nodes."""
    if picture.scale is not None:
        expected = "no width in DOT, which has no positions"
        raise BNetError("width", expected=expected, actual=f"{picture.width * picture.scale / POINTS_PER_INCH:g}in")
    colours = get_palette("light" if picture.theme == "auto" else picture.theme)
    font = {"fontname": picture.font or "DejaVu Sans", "fontcolor": colours["ink"], "fontsize": f"{LABEL_SIZE:g}"}
    label = ". ".join(text for text in (picture.heading.removesuffix("."), picture.caption) if text)
    box = {"shape": "box", "style": "rounded,filled", "fillcolor": colours["paper"], "color": colours["ink"], **font}
    lines = [
        "digraph bnet {",
        "  graph" + _format_attributes(bgcolor=colours["paper"], label=label, tooltip=picture.title, **font),
        "  node" + _format_attributes(**box),
        "  edge" + _format_attributes(color=colours["grey"], arrowsize="0.7"),
        *_render_cluster(None, picture.boxes, _build_cluster_tree(picture), colours, "  "),
        *(f"  {_quote_name(a.source)} -> {_quote_name(a.target)}" + _render_arrow(a, colours) for a in picture.arrows),
        "}",
    ]
    return "\n".join(lines) + "\n"


class DotSource(graphviz.Source):  # type: ignore[misc]  # graphviz has no type hints
    """DOT source that a notebook can show: rendered by `dot` if it is on the PATH, else as the SVG of this library."""

    def __init__(self, dot: str, svg: Callable[[], str]) -> None:
        super().__init__(dot)
        self._svg = svg

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **_: Any) -> dict[str, str]:
        if shutil.which("dot") is None:
            return {"image/svg+xml": self._svg()}
        mimebundle: dict[str, str] = super()._repr_mimebundle_(include, exclude)
        return mimebundle


def _render_cluster(
    parent_id: int | None, boxes: Sequence[NodeBox], cluster_tree: ClusterTree, colours: Mapping[str, str], indent: str
) -> Iterator[str]:
    """Yield the lines of the nodes directly in a cluster, then the lines of its subclusters."""
    clusters = {k: (frame, names) for k, (frame, parent, names) in cluster_tree.items() if parent == parent_id}
    nested = {name for _, names in clusters.values() for name in names}
    for box in boxes:
        if box.name not in nested:
            yield indent + _quote_name(box.name) + _render_box(box, colours)
    for k, (frame, names) in clusters.items():
        yield f"{indent}subgraph cluster_{k} {{"
        colour = colours["accent" if frame.kind == "box" else "grey"]
        yield f"{indent}  graph" + _format_attributes(label=frame.name, style="rounded", color=colour, labeljust="l")
        yield from _render_cluster(k, [box for box in boxes if box.name in names], cluster_tree, colours, indent + "  ")
        yield f"{indent}}}"


def _with_alpha(colour: str, alpha: float) -> str:
    """A colour with an opacity, as `#rrggbbaa`."""
    return colour + ("" if alpha >= 1 else f"{round(255 * alpha):02x}")


def _render_box(box: NodeBox, colours: Mapping[str, str]) -> str:
    """The attributes of a node."""
    line, alpha = border_colour(box), FADED_OPACITY if box.is_faded else 1.0
    return _format_attributes(
        _render_label(box.label or (TextRun(box.title or box.name),)),
        fillcolor="" if box.fill == "paper" else _with_alpha(colours[box.fill], alpha),
        style="rounded,filled,dashed" if box.is_dashed else "",
        color="" if line == "ink" and alpha == 1 else _with_alpha(colours[line], alpha),
        fontcolor="" if alpha == 1 else _with_alpha(colours["ink"], alpha),
        penwidth="2.2" if box.mark else "",
        peripheries="2" if box.border == "double" else "",
        tooltip=box.title,
    )


def _render_arrow(arrow: PictureArrow, colours: Mapping[str, str]) -> str:
    """The attributes of an edge."""
    return _format_attributes(
        color=""
        if arrow.colour == "grey" and arrow.opacity >= 1
        else _with_alpha(colours[arrow.colour], arrow.opacity),
        style="" if arrow.dash == "solid" else EDGE_STYLES[arrow.dash],
        penwidth=f"{arrow.width:.3g}",
        arrowhead="" if arrow.has_head else "none",
        tooltip=arrow.title,
    )


def _build_cluster_tree(picture: Picture) -> ClusterTree:
    """Return the frames that become clusters, largest first, each with its parent cluster and its nodes.

    DOT requires clusters to be nested or disjoint, so a frame that partially overlaps a larger one is omitted.
    """
    groups = []
    for k, frame in enumerate(picture.frames):
        right, bottom = frame.x + frame.width, frame.y + frame.height
        inside = (box.name for box in picture.boxes if frame.x < box.x < right and frame.y < box.y < bottom)
        groups.append((k, frame, frozenset(inside)))
    tree: ClusterTree = {}
    for k, frame, names in sorted(groups, key=lambda group: -len(group[2])):
        if frame.kind != "line" and names and all(names <= other or not names & other for *_, other in tree.values()):
            parents = [outer for outer, (*_, other) in tree.items() if names <= other]
            tree[k] = frame, parents[-1] if parents else None, names
    return tree


def _format_attributes(html_label: str = "", **attributes: str) -> str:
    """Return a list of attributes in brackets; `html_label` is a label in the HTML-like markup of Graphviz."""
    parts = [f"label=<{html_label}>"] if html_label else []
    for name, value in attributes.items():
        if value:
            text = _escape_backslashes(escape_invisible(value)).replace("&", "&amp;")
            # Graphviz unescapes the backslashes of a tooltip twice.
            text = _escape_backslashes(text) if name == "tooltip" else text
            parts.append(f"{name}={_quote_string(text)}")
    return " [" + ", ".join(parts) + "]"


def _quote_name(name: str) -> str:
    """Return the name of a node as a DOT string."""
    return _quote_string(_escape_backslashes(escape_invisible(name)))


def _quote_string(text: str) -> str:
    """Text in quotation marks, as DOT requires."""
    return '"' + text.replace('"', '\\"') + '"'


def _escape_backslashes(text: str) -> str:
    """Text with each backslash doubled."""
    return text.replace("\\", "\\\\")


def _render_label(label: Sequence[TextRun]) -> str:
    """A label in the HTML-like markup of Graphviz."""
    marks = {"math": ("<I>", "</I>"), "sub": ("<SUB>", "</SUB>"), "sup": ("<SUP>", "</SUP>")}
    parts = []
    for run in label:
        begin, end = marks.get(run.style, ("", ""))
        parts.append(begin + _escape_backslashes(escape(escape_invisible(run.text))) + end)
    return "".join(parts)
