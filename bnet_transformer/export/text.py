"""networkx graphs as text: GraphML for other programs, node-link JSON that reads back as the same graph."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from bnet_transformer.errors import BNetError, FileError

if TYPE_CHECKING:
    import networkx as nx

FORMAT = "bnet_transformer graph"
VERSION = 1

# What XML 1.0 cannot hold, the carriage return, which its readers turn into a line feed, and what looks like such JSON.
_AS_JSON = re.compile('[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|(?s:\\A".*"\\Z)')


def to_json(graph: nx.Graph) -> str:
    """Node-link JSON; `from_json` gives back an equal graph, and so does networkx but for lists in place of tuples.

    >>> import networkx as nx
    >>> g = nx.DiGraph([("x_0_0", "q_0_0", {"role": "x", "shape": (8,)})])
    >>> nx.utils.graphs_equal(from_json(to_json(g)), g)
    True
    """
    _check(graph.graph, "the graph")
    for node, attributes in graph.nodes(data=True):
        if not isinstance(node, str):
            raise BNetError("graph", expected="nodes named by strings", got=node)
        _check(attributes, node, taken={"id"})
    for parent, child, attributes in graph.edges(data=True):
        _check(attributes, f"{parent} -> {child}", taken={"source", "target", "key"})
    import networkx as nx

    return json.dumps({"format": FORMAT, "version": VERSION, **nx.node_link_data(graph, edges="edges")})


def from_json(text: str | bytes) -> nx.Graph:
    """The graph that `to_json` wrote: a DiGraph or MultiDiGraph, its attributes of the types they had."""
    import networkx as nx

    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError("graph JSON", expected="JSON text", got=str(error)) from error
    if not isinstance(data, dict) or not isinstance(data.get("nodes"), list) or not isinstance(data.get("edges"), list):
        raise FileError("graph JSON", expected="node-link data, with nodes and edges", got=text)
    version = data.get("version", VERSION)
    if data.get("format", FORMAT) != FORMAT or type(version) is not int or version > VERSION:
        got = f"{data.get('format')}, version {version}"
        raise FileError("graph JSON", expected=f"{FORMAT} of version {VERSION} at most", got=got)
    try:
        things = [*data["nodes"], *data["edges"], data.get("graph", {})]
        for thing in things:
            thing.update({key: _tupled(value) for key, value in thing.items()})
        named = [node["id"] for node in data["nodes"]]
        ends = {arrow[end] for arrow in data["edges"] for end in ("source", "target")}
        stray = ends - set(named)
        if stray or len(set(named)) != len(named) or not all(isinstance(name, str) for name in named):
            got = f"arrows of the unknown nodes {sorted(stray)}" if stray else "a node twice, or of no name"
            raise FileError("graph JSON", expected="nodes of different names, and arrows between them", got=got)
        return nx.node_link_graph(data, edges="edges")
    except (KeyError, TypeError, AttributeError, RecursionError, nx.NetworkXError) as error:
        got = f"{type(error).__name__}: {error}"
        raise FileError("graph JSON", expected="node-link data as to_json writes it", got=got) from error


def to_graphml(graph: nx.Graph) -> str:
    """GraphML. What it has no type for is JSON in a string: tuples and mappings, strings with characters that XML
    forbids and, to be told from these, strings in double quotes. Attributes that are None are left out.
    """
    plain = graph.__class__()
    plain.graph.update(_xml(graph.graph))
    plain.add_nodes_from((node, _xml(data)) for node, data in graph.nodes(data=True))
    if graph.is_multigraph():
        plain.add_edges_from((u, v, key, _xml(data)) for u, v, key, data in graph.edges(keys=True, data=True))
    else:
        plain.add_edges_from((u, v, _xml(data)) for u, v, data in graph.edges(data=True))
    header = '<?xml version="1.0" encoding="utf-8"?>'
    import networkx as nx

    return "\n".join([header, *nx.generate_graphml(plain, encoding="utf-8")]) + "\n"


def _xml(data: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in data.items():
        if isinstance(value, bool | int | float) or (isinstance(value, str) and not _AS_JSON.search(value)):
            found[key] = value
        elif value is not None:
            found[key] = json.dumps(value)
    return found


def _check(value: Any, where: str, taken: Collection[str] = ()) -> None:
    """Refuse what would not come back from JSON as it went in, and the attributes that node-link data have taken."""
    if isinstance(value, tuple):
        for part in value:
            _check(part, where)
    elif isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key in taken:
                wanted = f"strings other than {', '.join(sorted(taken))}" if taken else "strings"
                raise BNetError(where, expected=f"names that are {wanted}", got=key)
        for part in value.values():
            _check(part, where)
    elif value is not None and type(value) not in (bool, int, str, float):
        allowed = "tuples, mappings, strings, numbers, true, false, None"
        raise BNetError(where, expected="an attribute that JSON can hold", got=value, allowed=allowed)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BNetError(where, expected="a finite number", got=value)


def _tupled(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tupled(part) for part in value)
    if isinstance(value, dict):
        return {key: _tupled(part) for key, part in value.items()}
    return value
