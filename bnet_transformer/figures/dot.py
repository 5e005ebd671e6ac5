"""Pictures as DOT that people edit: the structure with its labels and colours, and no places, which Graphviz finds.

Graphviz itself is not needed to write DOT; to render it, the program `dot` is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import graphviz

from bnet_transformer.figures.labels import Run, visible, written
from bnet_transformer.figures.picture import Arrow, Box, Frame, Picture
from bnet_transformer.figures.style import FADED, SIZE, line_colour, palette

Nested = dict[int, tuple[Frame, int | None, frozenset[str]]]  # by the number of a frame

STYLES = {"solid": "solid", "dash": "dashed", "dot": "dotted"}


def to_dot(picture: Picture) -> str:
    """The picture as DOT: a node for each box, an edge for each arrow, a cluster for each frame round nodes."""
    colours = palette("light" if picture.theme == "auto" else picture.theme)
    font = {"fontname": "DejaVu Sans", "fontcolor": colours["ink"], "fontsize": f"{SIZE:g}"}
    box = {"shape": "box", "style": "rounded,filled", "fillcolor": colours["paper"], "color": colours["ink"], **font}
    lines = [
        "digraph bnet {",
        "  graph" + _listed(bgcolor=colours["paper"], label=picture.caption, tooltip=picture.title, **font),
        "  node" + _listed(**box),
        "  edge" + _listed(color=colours["grey"], arrowsize="0.7"),
        *_cluster(None, picture.boxes, _nested(picture), colours, "  "),
        *(f"  {_quoted(a.source)} -> {_quoted(a.target)}" + _arrow(a, colours) for a in picture.arrows),
        "}",
    ]
    return "\n".join(lines) + "\n"


class DotSource(graphviz.Source):  # type: ignore[misc]  # graphviz says nothing of its types
    """DOT source that a notebook shows: drawn by `dot` where it is on the PATH, else as the SVG of this library."""

    def __init__(self, dot: str, svg: Callable[[], str]) -> None:
        super().__init__(dot)
        self._svg = svg

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **_: Any) -> dict[str, str]:
        if shutil.which("dot") is None:
            return {"image/svg+xml": self._svg()}
        drawn: dict[str, str] = super()._repr_mimebundle_(include, exclude)
        return drawn


def _cluster(
    outer: int | None, boxes: Sequence[Box], nested: Nested, colours: Mapping[str, str], indent: str
) -> Iterator[str]:
    """The nodes that stand in no smaller cluster, then the clusters inside this one."""
    clusters = {k: (frame, names) for k, (frame, parent, names) in nested.items() if parent == outer}
    deeper = {name for _, names in clusters.values() for name in names}
    for box in boxes:
        if box.name not in deeper:
            yield indent + _quoted(box.name) + _box(box, colours)
    for k, (frame, names) in clusters.items():
        yield f"{indent}subgraph cluster_{k} {{"
        colour = colours["accent" if frame.kind == "box" else "grey"]
        yield f"{indent}  graph" + _listed(label=frame.name, style="rounded", color=colour, labeljust="l")
        yield from _cluster(k, [box for box in boxes if box.name in names], nested, colours, indent + "  ")
        yield f"{indent}}}"


def _faint(colour: str, share: float) -> str:
    return colour + ("" if share >= 1 else f"{round(255 * share):02x}")


def _box(box: Box, colours: Mapping[str, str]) -> str:
    line, share = line_colour(box), FADED if box.faded else 1.0
    return _listed(
        _label(box.label or written(box.title or box.name)),
        fillcolor="" if box.fill == "paper" else _faint(colours[box.fill], share),
        style="rounded,filled,dashed" if box.dashed else "",
        color="" if line == "ink" and share == 1 else _faint(colours[line], share),
        fontcolor="" if share == 1 else _faint(colours["ink"], share),
        penwidth="2.2" if box.accent else "",
        peripheries="2" if box.border == "double" else "",
        tooltip=box.title,
    )


def _arrow(arrow: Arrow, colours: Mapping[str, str]) -> str:
    return _listed(
        color="" if arrow.colour == "grey" and arrow.opacity >= 1 else _faint(colours[arrow.colour], arrow.opacity),
        style="" if arrow.dash == "solid" else STYLES[arrow.dash],
        penwidth=f"{arrow.width:.3g}",
        arrowhead="" if arrow.head else "none",
        tooltip=arrow.title,
    )


def _nested(picture: Picture) -> Nested:
    """The frames that are clusters, the largest first: each with the smallest cluster around it, and its nodes.

    Clusters of DOT hold one another or are apart; a frame that meets another in some of its nodes is left out.
    """
    groups = [(k, frame, _inside(frame, picture.boxes)) for k, frame in enumerate(picture.frames)]
    found: Nested = {}
    for k, frame, names in sorted(groups, key=lambda group: -len(group[2])):
        if frame.kind != "line" and names and all(names <= other or not names & other for *_, other in found.values()):
            around = [outer for outer, (*_, other) in found.items() if names <= other]
            found[k] = frame, around[-1] if around else None, names
    return found


def _inside(frame: Frame, boxes: Sequence[Box]) -> frozenset[str]:
    right, bottom = frame.x + frame.width, frame.y + frame.height
    return frozenset(box.name for box in boxes if frame.x < box.x < right and frame.y < box.y < bottom)


def _listed(markup: str = "", **attributes: str) -> str:
    """Attributes; `markup` is a label in Graphviz's own."""
    found = [f"label=<{markup}>"] if markup else []
    for name, value in attributes.items():
        if value:
            text = _doubled(visible(value)).replace("&", "&amp;")
            text = _doubled(text) if name == "tooltip" else text  # the backslashes of a tooltip are read twice
            found.append(f"{name}={_string(text)}")
    return " [" + ", ".join(found) + "]"


def _quoted(name: str) -> str:
    """The name of a node as a DOT string."""
    return _string(_doubled(visible(name)))


def _string(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def _doubled(text: str) -> str:
    return text.replace("\\", "\\\\")


def _label(label: Sequence[Run]) -> str:
    marks = {"math": ("<I>", "</I>"), "sub": ("<SUB>", "</SUB>"), "sup": ("<SUP>", "</SUP>")}
    parts = []
    for run in label:
        begin, end = marks.get(run.style, ("", ""))
        parts.append(begin + _doubled(escape(visible(run.text))) + end)
    return "".join(parts)
