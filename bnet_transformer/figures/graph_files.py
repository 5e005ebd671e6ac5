"""Writes graphs as GraphML and GEXF that Gephi and yEd open as the figure looks.

Both formats have the attributes of nodes and arrows; with a layout, also positions, colours and sizes. yEd reads these
only from elements of the namespace `y`, which the schema of yWorks allows inside GraphML's `data`; Gephi reads
them from the attributes x, y, size, r, g and b, and from the elements `viz` of GEXF. In both formats y of a node
increases upwards, except in the geometry of yEd.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import networkx as nx

from bnet_transformer.declare import Network
from bnet_transformer.figures.fonts import Density, TextRun, escape_invisible, label_to_text
from bnet_transformer.figures.graph_layout import layout_ground_graph, layout_template_graph
from bnet_transformer.figures.options import DEFAULT_LIMIT
from bnet_transformer.figures.picture import (
    LABEL_SIZE,
    NodeBox,
    Picture,
    PictureArrow,
    arrow_colour,
    get_palette,
    make_arrow,
)

Attributes = dict[str, Any]

HEADER = '<?xml version="1.0" encoding="UTF-8"?>'
GRAPHML = "http://graphml.graphdrawing.org/xmlns"
YFILES = "http://www.yworks.com/xml/graphml"
XSI = "http://www.w3.org/2001/XMLSchema-instance"
YFILES_SCHEMA = "http://www.yworks.com/xml/schema/graphml/1.1/ygraphml.xsd"
GEXF = "http://gexf.net/1.3"

# Gephi takes the keys d3 and d7 for the labels that yEd writes under these ids (ImporterGraphML.java). With other ids,
# it reports the graphics of yEd as columns without a type; and another attribute must not have these ids.
YFILES_KEYS = {"node": "d3", "edge": "d7"}

# Characters that XML 1.0 forbids, the carriage return (XML readers convert it to a line feed), and quoted strings.
_NEEDS_JSON = re.compile('[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|(?s:\\A".*"\\Z)')
_SCRIPTS = {"sub": str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"), "sup": str.maketrans("0123456789()", "⁰¹²³⁴⁵⁶⁷⁸⁹⁽⁾")}
_TYPE_NAMES = {  # by type: the names in GraphML and in GEXF
    bool: ("boolean", "boolean"),
    int: ("int", "integer"),
    float: ("double", "double"),
    str: ("string", "string"),
}


def _light_palette() -> dict[str, str]:
    """The colours of the light theme, in upper case as the schema of yWorks requires."""
    return {name: colour.upper() for name, colour in get_palette("light").items()}


def layout_graph(network: Network, graph: nx.DiGraph) -> Picture:
    """Lay out a template graph or a ground graph for a file: all boxes and arrows, without legend and caption.

    Arrows have routes if the graph has as few arrows as a figure may have; else they are straight lines.
    """
    if graph.is_multigraph():
        return layout_template_graph(network, graph, Density())
    if graph.number_of_edges() <= DEFAULT_LIMIT:
        return layout_ground_graph(network, graph, Density())
    without_arrows = nx.DiGraph()
    without_arrows.add_nodes_from(graph.nodes(data=True))
    role = nx.get_node_attributes(graph, "role")
    arrows = [
        make_arrow(parent, child, arrow_colour(role[parent], role[child]), attrs.get("weight"))
        for parent, child, attrs in graph.edges(data=True)
    ]
    return replace(layout_ground_graph(network, without_arrows, Density()), arrows=tuple(arrows))


# GraphML


def to_graphml(graph: nx.Graph, picture: Picture | None = None) -> str:
    """Convert a graph to GraphML.

    Values without a GraphML type are JSON strings: tuples, mappings, and strings with characters that XML forbids.
    Strings in double quotes are JSON strings too, so that the two are distinct. Attributes that are None are left out.
    Arrows have no ids: Gephi drops arrows with equal ids, and networkx would read them as attributes.

    Args:
        graph: The graph.
        picture: The layout of the graph, with one arrow for each arrow of the graph, in its order; None for a file
            without positions.
    """
    nodes, edges = _encode_graph(graph)
    palette = _light_palette()
    extra, node_graphics, edge_graphics = [], [""] * len(nodes), [""] * len(edges)
    if picture is not None:
        boxes = {box.name: box for box in picture.boxes}
        # Gephi takes position, size and colour from attributes; on its white page, nodes are not white.
        colours = {name: _rgb(palette[_disc_colour(boxes[name], graph.nodes[name])]) for name, _ in nodes}
        positions = {name: {"x": box.x, "y": -box.y, "size": box.height} for name, box in boxes.items()}
        nodes = [(name, data | positions[name] | colours[name]) for name, data in nodes]
        edges = [
            (source, target, data | _rgb(palette[arrow.colour]))
            for (source, target, data), arrow in zip(edges, picture.arrows, strict=True)
        ]
        node_graphics = [_yfiles_data("node", _yfiles_node(boxes[name], palette)) for name, _ in nodes]
        edge_graphics = [_yfiles_data("edge", _yfiles_edge(a, boxes, palette)) for a in picture.arrows]
        extra = [f'<key id="{key}" for="{kind}" yfiles.type="{kind}graphics"/>' for kind, key in YFILES_KEYS.items()]
    node_types, edge_types = _value_types(data for _, data in nodes), _value_types(data for *_, data in edges)
    lines = [
        HEADER,
        f'<graphml xmlns="{GRAPHML}" xmlns:y="{YFILES}" xmlns:xsi="{XSI}" '
        f'xsi:schemaLocation="{GRAPHML} {YFILES_SCHEMA}">',
        *_graphml_keys("node", node_types),
        *_graphml_keys("edge", edge_types),
        *extra,
        f'<graph id="G" edgedefault="{"directed" if graph.is_directed() else "undirected"}">',
    ]
    # The graphics come first, because networkx reads a label and a position from them, which the attributes replace.
    for (name, data), graphics in zip(nodes, node_graphics, strict=True):
        lines.append(f"<node id={quoteattr(str(name))}>{graphics}{_graphml_data('node', data)}</node>")
    for (source, target, data), graphics in zip(edges, edge_graphics, strict=True):
        ends = f"source={quoteattr(str(source))} target={quoteattr(str(target))}"
        lines.append(f"<edge {ends}>{graphics}{_graphml_data('edge', data)}</edge>")
    return "\n".join([*lines, "</graph>", "</graphml>", ""])


def _graphml_keys(kind: str, types: Mapping[str, type]) -> Iterator[str]:
    """The declarations of attributes; the ids of nodes and of arrows differ, as the schema requires."""
    for name, value_type in types.items():
        key = f"<key id={quoteattr(f'{kind}_{name}')} for={quoteattr(kind)} attr.name={quoteattr(name)}"
        yield f'{key} attr.type="{_TYPE_NAMES[value_type][0]}"/>'


def _graphml_data(kind: str, data: Attributes) -> str:
    """The attributes of a node or an arrow."""
    parts = [f"<data key={quoteattr(f'{kind}_{name}')}>{escape(_format(value))}</data>" for name, value in data.items()]
    return "".join(parts)


def _disc_colour(box: NodeBox, attributes: Attributes) -> str:
    """The name of the colour of a node that is drawn without a border: its fill, or else the colour of its role."""
    return box.fill if box.fill != "paper" else arrow_colour(attributes["role"], "")


def _rgb(colour: str) -> Attributes:
    """The channels of a colour `#rrggbb`."""
    return {channel: int(colour[k : k + 2], 16) for channel, k in (("r", 1), ("g", 3), ("b", 5))}


# the graphics of yEd


def _yfiles_data(kind: str, content: str) -> str:
    """The graphics of a node or an arrow as a `data` element."""
    return f'<data key="{YFILES_KEYS[kind]}">{content}</data>'


def _yfiles_node(box: NodeBox, palette: Mapping[str, str]) -> str:
    """A box as yEd draws it. yEd has no double borders: the border of a deterministic node is wider."""
    line, width = "dashed" if box.is_dashed else "line", 1.8 if box.border == "double" else 0.9
    label = escape(escape_invisible("".join(map(_format_run, box.label))))
    return (
        f'<y:ShapeNode><y:Geometry height="{box.height:.2f}" width="{box.width:.2f}" '
        f'x="{box.x - box.width / 2:.2f}" y="{box.y - box.height / 2:.2f}"/>'
        f'<y:Fill color="{palette[box.fill]}" transparent="false"/>'
        f'<y:BorderStyle color="{palette["ink"]}" type="{line}" width="{width}"/>'
        f'<y:NodeLabel fontSize="{LABEL_SIZE:.0f}" textColor="{palette["ink"]}" modelName="internal" '
        f'modelPosition="c">{label}</y:NodeLabel><y:Shape type="roundrectangle"/></y:ShapeNode>'
    )


def _format_run(run: TextRun) -> str:
    """A piece of a label as plain text, with the subscripts and superscripts of Unicode where these exist."""
    if run.style in _SCRIPTS and set(run.text) <= set("0123456789()"):
        return run.text.translate(_SCRIPTS[run.style])
    return label_to_text([run])


def _yfiles_edge(arrow: PictureArrow, boxes: Mapping[str, NodeBox], palette: Mapping[str, str]) -> str:
    """An arrow as yEd draws it: a line through the ends of the curves of its route, with smooth corners."""
    path = '<y:Path sx="0.00" sy="0.00" tx="0.00" ty="0.00"/>'
    if arrow.points:
        (x0, y0), *bends, (x1, y1) = arrow.points[::3]
        source, target = boxes[arrow.source], boxes[arrow.target]
        ends = f'sx="{x0 - source.x:.2f}" sy="{y0 - source.y:.2f}" tx="{x1 - target.x:.2f}" ty="{y1 - target.y:.2f}"'
        points = "".join(f'<y:Point x="{x:.2f}" y="{y:.2f}"/>' for x, y in bends)
        path = f"<y:Path {ends}>{points}</y:Path>" if points else f"<y:Path {ends}/>"
    colour = palette[arrow.colour] + ("" if arrow.opacity >= 1 else f"{round(255 * arrow.opacity):02X}")
    line = {"solid": "line", "dash": "dashed", "dot": "dotted"}[arrow.dash]
    return (
        f'<y:PolyLineEdge>{path}<y:LineStyle color="{colour}" type="{line}" width="{arrow.width:.2f}"/>'
        '<y:Arrows source="none" target="delta"/><y:BendStyle smoothed="true"/></y:PolyLineEdge>'
    )


# GEXF


def to_gexf(graph: nx.Graph, picture: Picture | None = None) -> str:
    """Convert a graph to GEXF 1.3. Values are encoded as in GraphML.

    Parallel arrows have different kinds, the slot with a number, because Gephi merges arrows of one kind.

    Args:
        graph: The graph.
        picture: The layout of the graph, as for `to_graphml`; None for a file without positions.
    """
    nodes, edges = _encode_graph(graph)
    palette = _light_palette()
    boxes = {} if picture is None else {box.name: box for box in picture.boxes}
    arrows: Sequence[PictureArrow | None] = [None] * len(edges) if picture is None else picture.arrows
    lines = [
        HEADER,
        f'<gexf xmlns="{GEXF}" xmlns:viz="{GEXF}/viz" version="1.3">',
        f'<graph mode="static" defaultedgetype="{"directed" if graph.is_directed() else "undirected"}">',
        *_gexf_attributes("node", _value_types(_without(data, "label") for _, data in nodes)),
        *_gexf_attributes("edge", _value_types(_without(data, "weight") for *_, data in edges)),
        f'<nodes count="{len(nodes)}">',
    ]
    for name, data in nodes:
        label = quoteattr(str(data.get("label", name)))
        values = _gexf_values("node", _without(data, "label"))
        graphics = _viz_node(boxes[name], graph.nodes[name], palette) if boxes else ""
        lines.append(f"<node id={quoteattr(str(name))} label={label}>{values}{graphics}</node>")
    lines += ["</nodes>", f'<edges count="{len(edges)}">']
    counts: Counter[tuple[str, str, str]] = Counter()
    for (source, target, data), arrow in zip(edges, arrows, strict=True):
        ends = f"source={quoteattr(str(source))} target={quoteattr(str(target))}"
        weight = f' weight="{data["weight"]!r}"' if "weight" in data else ""
        slot, kind = str(data.get("slot", "arrow")), ""
        counts[source, target, slot] += 1
        if graph.is_multigraph():
            count = counts[source, target, slot]
            kind = f" kind={quoteattr(slot if count == 1 else f'{slot} {count}')}"
        graphics = "" if arrow is None else _viz_edge(arrow, palette)
        lines.append(f"<edge {ends}{weight}{kind}>{_gexf_values('edge', _without(data, 'weight'))}{graphics}</edge>")
    return "\n".join([*lines, "</edges>", "</graph>", "</gexf>", ""])


def _gexf_attributes(kind: str, types: Mapping[str, type]) -> Iterator[str]:
    """The declarations of attributes."""
    yield f'<attributes class="{kind}">'
    for name, value_type in types.items():
        ids = quoteattr(f"{kind}_{name}")
        yield f'<attribute id={ids} title={quoteattr(name)} type="{_TYPE_NAMES[value_type][1]}"/>'
    yield "</attributes>"


def _gexf_values(kind: str, data: Attributes) -> str:
    """The attributes of a node or an arrow."""
    values = (f"<attvalue for={quoteattr(f'{kind}_{n}')} value={quoteattr(_format(v))}/>" for n, v in data.items())
    return f"<attvalues>{''.join(values)}</attvalues>" if data else ""


def _viz_node(box: NodeBox, attributes: Attributes, palette: Mapping[str, str]) -> str:
    """The colour, the position and the size of a node."""
    colour = _rgb(palette[_disc_colour(box, attributes)])
    return (
        f'<viz:color r="{colour["r"]}" g="{colour["g"]}" b="{colour["b"]}"/>'
        f'<viz:position x="{box.x:.2f}" y="{-box.y:.2f}" z="0.0"/><viz:size value="{box.height:.2f}"/>'
    )


def _viz_edge(arrow: PictureArrow, palette: Mapping[str, str]) -> str:
    """The colour, the width and the dashes of an arrow."""
    colour = _rgb(palette[arrow.colour])
    shape = {"solid": "solid", "dash": "dashed", "dot": "dotted"}[arrow.dash]
    return (
        f'<viz:color r="{colour["r"]}" g="{colour["g"]}" b="{colour["b"]}" a="{arrow.opacity:.3f}"/>'
        f'<viz:thickness value="{arrow.width:.2f}"/><viz:shape value="{shape}"/>'
    )


# both


def _encode_graph(graph: nx.Graph) -> tuple[list[tuple[str, Attributes]], list[tuple[str, str, Attributes]]]:
    """The nodes and the arrows with attributes that XML can contain."""
    nodes = [(name, _encode(data)) for name, data in graph.nodes(data=True)]
    return nodes, [(source, target, _encode(data)) for source, target, data in graph.edges(data=True)]


def _encode(data: Attributes) -> Attributes:
    """Convert attributes to numbers, truth values and strings; those that are None are left out."""
    attributes: Attributes = {}
    for key, value in data.items():
        if isinstance(value, bool | int | float) or (isinstance(value, str) and not _NEEDS_JSON.search(value)):
            attributes[key] = value
        elif value is not None:
            attributes[key] = json.dumps(value)
    return attributes


def _value_types(items: Iterable[Attributes]) -> dict[str, type]:
    """The type of each attribute, in the order of their first values: the only type of its values, or else str."""
    types: dict[str, set[type]] = {}
    for data in items:
        for name, value in data.items():
            types.setdefault(name, set()).add(type(value))
    return {name: kinds.pop() if len(kinds) == 1 else str for name, kinds in types.items()}


def _without(data: Attributes, name: str) -> Attributes:
    """The attributes without one of them."""
    return {key: value for key, value in data.items() if key != name}


def _format(value: object) -> str:
    """A value as text: truth values as XML writes them."""
    return str(value).lower() if isinstance(value, bool) else str(value)
