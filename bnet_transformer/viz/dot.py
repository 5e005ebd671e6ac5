"""Pictures as DOT, every place and size pinned (`layout=nop2`), so that any Graphviz draws the same.

Nodes and arrows of the bnet have their own names; those of the paper (frames, texts, the legend) begin with `_`.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from bnet_transformer.viz.labels import SMALL, Run, measured, plain, visible
from bnet_transformer.viz.palette import palette
from bnet_transformer.viz.picture import Arrow, Box, Frame, Picture, Text
from bnet_transformer.viz.style import FADED, SIZE, arrow_head, line_colour

SANS, SERIF = "DejaVu Sans", "DejaVu Serif"
INCH = 72.0


def to_dot(picture: Picture, *, dpi: float | None = None, page: tuple[float, float] | None = None) -> str:
    """The picture as DOT; `page` is the width and height in inches that it shall fit."""
    return "\n".join(Writer(picture).lines(dpi, page)) + "\n"


class Writer:
    """Writes one picture; y runs upwards in Graphviz."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.colours = palette("light" if picture.theme == "auto" else picture.theme)

    def lines(self, dpi: float | None, page: tuple[float, float] | None) -> Iterator[str]:
        """The lines of the file."""
        picture, paper = self.picture, self.colours["paper"]
        size = {"size": f"{page[0]:g},{page[1]:g}"} if page else {}
        resolution = {"dpi": f"{dpi:g}"} if dpi else {}
        yield "digraph bnet {"
        yield "graph" + told(
            layout="nop2", pad="0", bgcolor=paper, outputorder="edgesfirst", tooltip=picture.title, **size, **resolution
        )
        yield "node" + told(fontname=SANS, fontsize=f"{SIZE:g}", shape="box", margin="0", fixedsize="true")
        yield "edge" + told(fontname=SANS)
        middle = self._place(picture.width / 2, picture.height / 2)
        yield "_paper" + told(pos=middle, label="", style="invis", **_size(picture.width, picture.height))
        for k, frame in enumerate(picture.frames):
            yield f"_frame_{k}" + self._frame(frame)
        for box in picture.boxes:
            yield quoted(box.name) + self._box(box)
        for arrow in picture.arrows:
            yield f"{quoted(arrow.source)} -> {quoted(arrow.target)}" + self._arrow(arrow)
        for k, line in enumerate(picture.lines):
            yield f"_text_{k}" + self._text(line)
        for k, entry in enumerate(picture.legend):
            if isinstance(entry.sample, Box):
                yield f"_legend_{k}" + self._box(entry.sample)
            else:
                for end, point in (("from", entry.sample.points[0]), ("to", entry.sample.points[-1])):
                    yield f"_{end}_{k}" + told(shape="point", style="invis", pos=self._place(*point), **_size(0.1, 0.1))
                yield f"_from_{k} -> _to_{k}" + self._arrow(entry.sample)
        yield "}"

    def _place(self, x: float, y: float) -> str:
        return f"{x:.2f},{self.picture.height - y:.2f}"

    def _ink(self, name: str, faded: bool = False, opacity: float = 1.0) -> str:
        share = FADED if faded else opacity
        return self.colours[name] + ("" if share >= 1 else f"{round(255 * share):02x}")

    def _box(self, box: Box) -> str:
        line = self._ink(line_colour(box), box.faded)
        about = {"pos": self._place(box.x, box.y), "color": line, "tooltip": box.title or " "}
        if box.border == "dot":
            return told(shape="point", fillcolor=line, label="", **about, **_size(box.width, box.height))
        ring = 8.0 if box.border == "double" else 0.0  # Graphviz draws the second border 4 points outside
        style = "rounded,filled" + (",dashed" if box.dashed else "")
        return told(
            label=self._label(box.label, box.faded),
            style=style,
            fillcolor=self._ink(box.fill, box.faded and box.fill != "paper"),
            peripheries="2" if ring else "1",
            penwidth="2.2" if box.accent else "0.9",
            **about,
            **_size(box.width - ring, box.height - ring),
        )

    def _arrow(self, arrow: Arrow) -> str:
        head = arrow_head(arrow)
        points = (*arrow.points[:-1], head.base) if arrow.head else arrow.points
        end = f"e,{self._place(*head.tip)} " if arrow.head else ""
        weight = {} if arrow.weight is None else {"weight": f"{arrow.weight:.6g}"}
        return told(
            pos=end + " ".join(self._place(*point) for point in points),
            color=self._ink(arrow.colour, opacity=arrow.opacity),
            penwidth=f"{arrow.width * (1.4 if arrow.dash == 'dot' else 1.0):.2f}",
            style={"solid": "solid", "dash": "dashed", "dot": "dotted"}[arrow.dash],
            arrowhead="normal" if arrow.head else "none",
            arrowsize=f"{head.size / 10:.2f}",
            tooltip=arrow.title or " ",
            **weight,
        )

    def _frame(self, frame: Frame) -> str:
        pos = self._place(frame.x + frame.width / 2, frame.y + frame.height / 2)
        if frame.kind == "line":
            line = {"style": "filled", "fillcolor": self.colours["grey"], "penwidth": "0", "label": ""}
            return told(pos=pos, **line, **_size(0.8, frame.height))
        colour, thick = ("accent", "1.3") if frame.kind == "box" else ("grey", "0.7")
        look = {"style": "rounded", "color": self.colours[colour], "penwidth": thick, "label": ""}
        return told(pos=pos, tooltip=frame.name, **look, **_size(frame.width, frame.height))

    def _text(self, line: Text) -> str:
        said: str
        if any(run.style not in ("text", "token") for run in line.runs):
            wide = measured(line.runs, line.size)
            said = Html("".join(_html(run, line.size) for run in line.runs))
        else:
            wide = 1.15 * measured(line.runs, line.size) + 4.0
            turn = {"start": "\\l", "middle": "", "end": "\\r"}[line.anchor]
            said = Escaped(_literal(visible(plain(line.runs))) + turn)
        middle = line.x + {"start": wide / 2, "middle": 0.0, "end": -wide / 2}[line.anchor]
        return told(
            pos=self._place(middle, line.y),
            label=said,
            shape="none",
            fontsize=f"{line.size:g}",
            fontcolor=self.colours[line.colour],
            tooltip=line.title or " ",
            **_size(wide, 1.4 * line.size),
        )

    def _label(self, label: tuple[Run, ...], faded: bool) -> Html:
        colour = self._ink("ink", faded)
        return Html(f'<FONT COLOR="{colour}">{"".join(map(_html, label))}</FONT>' if label else "")


class Html(str):
    """A label in Graphviz's markup."""


class Escaped(str):
    """A string whose backslashes Graphviz may read."""


def told(**attributes: str) -> str:
    """A list of attributes."""
    return " [" + ", ".join(f"{name}={_value(name, value)}" for name, value in attributes.items() if value != "") + "]"


def _value(name: str, value: str) -> str:
    if isinstance(value, Html):
        return f"<{value}>"
    text = value if isinstance(value, Escaped) else _literal(visible(value))
    return _string(_doubled(text) if name == "tooltip" else text)  # it reads the backslashes of a tooltip twice


def quoted(name: str) -> str:
    """A name as a DOT string."""
    return _string(_doubled(visible(name)))


def _string(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def _literal(text: str) -> str:
    """Text in which Graphviz finds no escape and no entity."""
    return _doubled(text).replace("&", "&amp;")


def _doubled(text: str) -> str:
    return text.replace("\\", "\\\\")


def _html(run: Run, size: float = SIZE) -> str:
    text = _doubled(escape(visible(run.text)))
    match run.style:
        case "sub" | "sup":
            return f'<{run.style.upper()}><FONT POINT-SIZE="{size * SMALL:.1f}">{text}</FONT></{run.style.upper()}>'
        case "math":
            return f'<FONT FACE="{SERIF}"><I>{text}</I></FONT>'
        case "name":
            return f'<FONT FACE="{SERIF}">{text}</FONT>'
        case _:
            return text


def _size(width: float, height: float) -> dict[str, str]:
    return {"width": f"{max(width, 0.1) / INCH:.4f}", "height": f"{max(height, 0.1) / INCH:.4f}"}
