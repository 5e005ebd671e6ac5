"""Writes graphs as GraphML and GEXF by networkx, with the positions and colours of the figure as attributes.

Gephi reads them from the attributes x, y, r, g and b of GraphML, and from the attribute `viz`, which networkx writes as
elements of GEXF. y of a node increases upwards in both formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import networkx as nx

from bnet_transformer.declare import Network
from bnet_transformer.figures.fonts import Density
from bnet_transformer.figures.graph_layout import layout_ground_graph, layout_template_graph
from bnet_transformer.figures.options import DEFAULT_LIMIT
from bnet_transformer.figures.picture import arrow_colour, get_palette

# Characters that XML 1.0 forbids, the carriage return (XML readers convert it to a line feed), and quoted strings.
_NEEDS_JSON = re.compile('[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|(?s:\\A".*"\\Z)')


def to_graphml(network: Network, graph: nx.Graph) -> bytes:
    """Convert a template graph or a ground graph to GraphML; see `encode_graph` for its attributes."""
    encoded = encode_graph(network, graph)
    for _, data in [*encoded.nodes(data=True), *((arrow, data) for *arrow, data in encoded.edges(data=True))]:
        viz = data.pop("viz")
        data |= viz["color"] | {axis: viz["position"][axis] for axis in ("x", "y") if "position" in viz}
    stream = BytesIO()
    nx.write_graphml(encoded, stream)
    return stream.getvalue()


def to_gexf(network: Network, graph: nx.Graph) -> bytes:
    """Convert a template graph or a ground graph to GEXF 1.3; see `encode_graph` for its attributes."""
    stream = BytesIO()
    nx.write_gexf(encode_graph(network, graph), stream, version="1.3")
    return stream.getvalue()


def encode_graph(network: Network, graph: nx.Graph) -> nx.Graph:
    """Return a graph with attributes that XML can contain, and with `viz`, the position and the colour of its parts.

    Values other than numbers, truth values and text are JSON strings: tuples, mappings, and text with characters that
    XML forbids. Text in double quotes is a JSON string too, so that the two are distinct. Attributes that are None are
    left out. Parallel arrows have different keys, because readers drop further arrows with the same id.
    """
    if graph.is_multigraph():
        picture = layout_template_graph(network, graph, Density())
    else:  # without arrows, positions are approximate; the layout of a large graph takes long
        is_large = graph.number_of_edges() > DEFAULT_LIMIT
        picture = layout_ground_graph(network, nx.create_empty_copy(graph) if is_large else graph, Density())
    encoded, palette = graph.__class__(), get_palette("light")
    for box in picture.boxes:
        data = graph.nodes[box.name]
        # On the white page of Gephi, nodes are not white.
        colour = box.fill if box.fill != "paper" else arrow_colour(data["role"], "")
        viz = {"color": _rgb(palette[colour]), "position": {"x": box.x, "y": -box.y, "z": 0.0}}
        encoded.add_node(box.name, **_encode(data), viz=viz)
    for k, (parent, child, data) in enumerate(graph.edges(data=True)):
        colour = arrow_colour(data["role"], graph.nodes[child]["role"])
        key = {"key": k} if graph.is_multigraph() else {}
        encoded.add_edge(parent, child, **key, **_encode(data), viz={"color": _rgb(palette[colour])})
    return encoded


def _rgb(colour: str) -> dict[str, int]:
    """The channels of a colour `#rrggbb`."""
    return {channel: int(colour[k : k + 2], 16) for channel, k in (("r", 1), ("g", 3), ("b", 5))}


def _encode(data: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes as numbers, truth values and strings."""
    return {
        key: value
        if isinstance(value, bool | int | float) or (isinstance(value, str) and not _NEEDS_JSON.search(value))
        else json.dumps(value)
        for key, value in data.items()
        if value is not None
    }
