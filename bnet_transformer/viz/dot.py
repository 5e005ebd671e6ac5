"""Pictures as DOT that people edit: the structure with its labels and colours, and no places, which Graphviz finds.

Graphviz itself is not needed to write DOT; to render it, the program `dot` is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

import graphviz

from bnet_transformer.viz.labels import Run, visible, written
from bnet_transformer.viz.picture import Arrow, Box, Frame, Picture
from bnet_transformer.viz.style import FADED, SIZE, line_colour, palette

STYLES = {"solid": "solid", "dash": "dashed", "dot": "dotted"}


def to_dot(picture: Picture) -> str:
    """The picture as DOT: a node for each box, an edge for each arrow, a cluster for each frame round nodes."""
    return "\n".join(_Writer(picture).lines()) + "\n"


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


class _Writer:
    """Writes one picture."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.colours = palette("light" if picture.theme == "auto" else picture.theme)
        self.inside = _nested(picture)

    def lines(self) -> Iterator[str]:
        """The lines of the file."""
        paper, ink, grey = (self.colours[name] for name in ("paper", "ink", "grey"))
        font = {"fontname": "DejaVu Sans", "fontcolor": ink, "fontsize": f"{SIZE:g}"}
        yield "digraph bnet {"
        yield "  graph" + _listed(bgcolor=paper, label=self.picture.caption, tooltip=self.picture.title, **font)
        yield "  node" + _listed(shape="box", style="rounded,filled", fillcolor=paper, color=ink, **font)
        yield "  edge" + _listed(color=grey, arrowsize="0.7")
        yield from self._cluster(None, self.picture.boxes, "  ")
        for arrow in self.picture.arrows:
            yield f"  {_quoted(arrow.source)} -> {_quoted(arrow.target)}" + self._arrow(arrow)
        yield "}"

    def _cluster(self, outer: int | None, boxes: Sequence[Box], indent: str) -> Iterator[str]:
        """The nodes that stand in no smaller cluster, then the clusters inside this one."""
        clusters = [k for k, (parent, _) in self.inside.items() if parent == outer]
        deeper = {name for k in clusters for name in self.inside[k][1]}
        for box in boxes:
            if box.name not in deeper:
                yield indent + _quoted(box.name) + self._box(box)
        for k in clusters:
            frame, names = self.picture.frames[k], self.inside[k][1]
            yield f"{indent}subgraph cluster_{k} {{"
            colour = self.colours["accent" if frame.kind == "box" else "grey"]
            yield f"{indent}  graph" + _listed(label=frame.name, style="rounded", color=colour, labeljust="l")
            yield from self._cluster(k, [box for box in boxes if box.name in names], indent + "  ")
            yield f"{indent}}}"

    def _ink(self, name: str, share: float) -> str:
        return self.colours[name] + ("" if share >= 1 else f"{round(255 * share):02x}")

    def _box(self, box: Box) -> str:
        line, share = line_colour(box), FADED if box.faded else 1.0
        attributes = {
            "fillcolor": "" if box.fill == "paper" else self._ink(box.fill, share),
            "style": "rounded,filled,dashed" if box.dashed else "",
            "color": "" if line == "ink" and share == 1 else self._ink(line, share),
            "fontcolor": "" if share == 1 else self._ink("ink", share),
            "penwidth": "2.2" if box.accent else "",
            "peripheries": "2" if box.border == "double" else "",
            "tooltip": box.title,
        }
        return _listed(label=_label(box.label or written(box.title or box.name)), **attributes)

    def _arrow(self, arrow: Arrow) -> str:
        return _listed(
            color="" if arrow.colour == "grey" and arrow.opacity >= 1 else self._ink(arrow.colour, arrow.opacity),
            style="" if arrow.dash == "solid" else STYLES[arrow.dash],
            penwidth=f"{arrow.width:.3g}",
            arrowhead="" if arrow.head else "none",
            tooltip=arrow.title,
        )


def _nested(picture: Picture) -> dict[int, tuple[int | None, frozenset[str]]]:
    """The frames that are clusters, the largest first: the smallest cluster around each, and its nodes.

    Clusters of DOT hold one another or are apart; a frame that meets another in some of its nodes is left out.
    """
    groups = {k: _boxes_in(frame, picture.boxes) for k, frame in enumerate(picture.frames) if frame.kind != "line"}
    found: dict[int, tuple[int | None, frozenset[str]]] = {}
    for k, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        if names and all(names <= other or not names & other for _, other in found.values()):
            around = [outer for outer, (_, other) in found.items() if names <= other]
            found[k] = around[-1] if around else None, names
    return found


def _boxes_in(frame: Frame, boxes: Sequence[Box]) -> frozenset[str]:
    right, bottom = frame.x + frame.width, frame.y + frame.height
    return frozenset(box.name for box in boxes if frame.x < box.x < right and frame.y < box.y < bottom)


class _Markup(str):
    """A label in Graphviz's markup."""


def _listed(**attributes: str) -> str:
    return " [" + ", ".join(f"{name}={_value(name, value)}" for name, value in attributes.items() if value) + "]"


def _value(name: str, value: str) -> str:
    if isinstance(value, _Markup):
        return f"<{value}>"
    text = _doubled(visible(value)).replace("&", "&amp;")
    return _string(_doubled(text) if name == "tooltip" else text)  # it reads the backslashes of a tooltip twice


def _quoted(name: str) -> str:
    """The name of a node as a DOT string."""
    return _string(_doubled(visible(name)))


def _string(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def _doubled(text: str) -> str:
    return text.replace("\\", "\\\\")


def _label(label: Sequence[Run]) -> _Markup:
    marks = {"math": ("<I>", "</I>"), "sub": ("<SUB>", "</SUB>"), "sup": ("<SUP>", "</SUP>")}
    parts = []
    for run in label:
        begin, end = marks.get(run.style, ("", ""))
        parts.append(begin + _doubled(escape(visible(run.text))) + end)
    return _Markup("".join(parts))
