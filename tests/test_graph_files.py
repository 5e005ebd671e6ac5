"""Graph files: GraphML and GEXF by the rules of their schemas and readers, and Parquet read back by pyarrow.

The rules are those of the published schemas: graphml.xsd 1.1 (graphml.graphdrawing.org) with the extension
ygraphml.xsd 1.1 (yWorks), and gexf.rnc 1.3 with viz.rnc (gexf.net, CC BY 4.0).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer.figures import graph_files
from bnet_transformer.figures.graph_files import layout_graph, to_gexf, to_graphml
from tests.cases import CASES, Case

pq = pytest.importorskip("pyarrow.parquet", reason='pip install "bnet-transformer[parquet]"')

G, Y, X, V = (
    "{http://graphml.graphdrawing.org/xmlns}",
    "{http://www.yworks.com/xml/graphml}",
    "{http://gexf.net/1.3}",
    "{http://gexf.net/1.3/viz}",
)
NMTOKEN, NUMBER, COLOUR = r"[\w.:-]+", r"-?\d+(\.\d+)?(e-?\d+)?", r"#(([A-F]|[0-9]){2}){3,4}"
LINES = "line|dashed|dotted|dashed_dotted"
PARSERS = {"int": int, "integer": int, "double": float, "boolean": ("true", "false").index, "string": str}
# For each element: the pattern of its children, and that of each attribute; `?` marks optional ones.
Rules = dict[str, tuple[str, dict[str, str]]]
GRAPHML_RULES: Rules = {
    "graphml": ("(key )*(graph )*", {"schemaLocation": ".*"}),
    "key": (
        "(default )?",
        {
            "id": NMTOKEN,
            "for": "node|edge",
            "attr.name?": NMTOKEN,
            "attr.type?": "boolean|int|long|float|double|string",
            "yfiles.type?": "nodegraphics|edgegraphics",
        },
    ),
    "graph": ("((data|node|edge) )*", {"id?": NMTOKEN, "edgedefault": "directed|undirected"}),
    "node": ("(data )*", {"id": NMTOKEN}),
    "edge": ("(data )*", {"source": NMTOKEN, "target": NMTOKEN}),
    "data": ("((ShapeNode|PolyLineEdge) )?", {"key": NMTOKEN}),
    "ShapeNode": ("Geometry Fill BorderStyle NodeLabel Shape ", {}),
    "Geometry": ("", dict.fromkeys(("x", "y", "width", "height"), NUMBER)),
    "Fill": ("", {"color": COLOUR, "transparent": "true|false"}),
    "BorderStyle": ("", {"color": COLOUR, "type": LINES, "width": NUMBER}),
    "NodeLabel": ("", {"fontSize": r"\d+", "textColor": COLOUR, "modelName": "internal", "modelPosition": "c"}),
    "Shape": ("", {"type": "roundrectangle"}),
    "PolyLineEdge": ("Path LineStyle Arrows BendStyle ", {}),
    "Path": ("(Point )*", dict.fromkeys(("sx", "sy", "tx", "ty"), NUMBER)),
    "Point": ("", {"x": NUMBER, "y": NUMBER}),
    "LineStyle": ("", {"color": COLOUR, "type": LINES, "width": NUMBER}),
    "Arrows": ("", {"source": "none", "target": "delta|standard|none"}),
    "BendStyle": ("", {"smoothed": "true|false"}),
}
CHANNEL, UNIT = r"[01]?\d?\d|2[0-4]\d|25[0-5]", r"0(\.\d+)?|1(\.0+)?"
GEXF_RULES: Rules = {
    "gexf": ("(meta )?graph ", {"version": "1.3"}),
    "graph": ("(attributes )*nodes edges ", {"mode": "static", "defaultedgetype": "directed|undirected|mutual"}),
    "attributes": ("(attribute )*", {"class": "node|edge"}),
    "attribute": ("", {"id": ".+", "title": ".+", "type": "integer|double|boolean|string"}),
    "nodes": ("(node )*", {"count": r"\d+"}),
    "edges": ("(edge )*", {"count": r"\d+"}),
    "node": ("(attvalues )?(color position size )?", {"id": ".+", "label": "(?s:.*)"}),
    "edge": (
        "(attvalues )?(color thickness shape )?",
        {"source": ".+", "target": ".+", "weight?": NUMBER, "kind?": ".+"},
    ),
    "attvalues": ("(attvalue )+", {}),
    "attvalue": ("", {"for": ".+", "value": "(?s:.*)"}),
    "color": ("", {"r": CHANNEL, "g": CHANNEL, "b": CHANNEL, "a?": UNIT}),
    "position": ("", dict.fromkeys(("x", "y", "z"), NUMBER)),
    "size": ("", {"value": r"\d+(\.\d+)?"}),
    "thickness": ("", {"value": r"\d+(\.\d+)?"}),
    "shape": ("", {"value": "solid|dotted|dashed|double"}),
}
VIZ = {"color", "position", "size", "thickness", "shape"}


def parse_tag(element: Element) -> tuple[str, str]:
    """The namespace and the local name of an element."""
    namespace, _, name = element.tag.rpartition("}")
    return namespace + "}", name


def check_rules(root: Element, rules: Rules) -> None:
    """Every element has the namespace, the children and the attributes that the schema allows."""
    for element in root.iter():
        namespace, name = parse_tag(element)
        if rules is GEXF_RULES:
            assert namespace == (V if name in VIZ else X)
        else:
            assert namespace == (Y if list(rules).index(name) >= list(rules).index("ShapeNode") else G)
        children, attributes = rules[name]
        assert re.fullmatch(children, "".join(f"{parse_tag(child)[1]} " for child in element)), name
        given = {parse_tag(Element(key))[1] if "}" in key else key: value for key, value in element.attrib.items()}
        required = {key for key in attributes if not key.endswith("?")}
        assert required <= given.keys() <= {key.rstrip("?") for key in attributes}
        for key, value in given.items():
            assert re.fullmatch(attributes.get(key, attributes.get(f"{key}?", "")), value), (name, key, value)


def check_graphml(text: str, graph: nx.Graph) -> Element:
    """The schema of GraphML, its keys and references, and what Gephi requires."""
    root = ElementTree.fromstring(text)
    check_rules(root, GRAPHML_RULES)
    keys = {key.get("id"): key for key in root.iter(f"{G}key")}
    assert len(keys) == len(list(root.iter(f"{G}key")))
    names = [(key.get("for"), key.get("attr.name")) for key in keys.values() if key.get("attr.name")]
    assert len(set(names)) == len(names)
    nodes = [node.get("id") for node in root.iter(f"{G}node")]
    assert nodes == list(graph)  # unique
    ends = [(edge.get("source"), edge.get("target")) for edge in root.iter(f"{G}edge")]
    assert sorted(ends) == sorted((u, v) for u, v, *_ in graph.edges)
    for owner in (*root.iter(f"{G}node"), *root.iter(f"{G}edge")):
        given = [data.get("key") for data in owner]
        assert len(set(given)) == len(given)
        for data in owner:
            key = keys[data.get("key")]
            assert key.get("for") == parse_tag(owner)[1]
            assert len(data) == (key.get("yfiles.type") is not None)
            if not len(data):
                PARSERS[key.get("attr.type") or ""](data.text or "")
    # Gephi takes the keys d3 and d7 for labels, and drops further arrows with the id of another.
    assert all(keys[name].get("yfiles.type") for name in ("d3", "d7") if name in keys)
    return root


def check_gexf(text: str, graph: nx.Graph) -> Element:
    """The schema of GEXF and its references."""
    root = ElementTree.fromstring(text)
    check_rules(root, GEXF_RULES)
    types = {a.get("id"): a.get("type") for a in root.iter(f"{X}attribute")}
    assert len(types) == len(list(root.iter(f"{X}attribute")))
    assert [node.get("id") for node in root.iter(f"{X}node")] == list(graph)
    for value in root.iter(f"{X}attvalue"):
        PARSERS[types[value.get("for")] or ""](value.get("value") or "")
    kinds = [(edge.get("source"), edge.get("target"), edge.get("kind")) for edge in root.iter(f"{X}edge")]
    assert len(set(kinds)) == len(kinds) == graph.number_of_edges()  # Gephi merges arrows of one kind
    return root


def decode(value: object, expected: object) -> object:
    """A value of a file: strings in double quotes, lists and mappings are JSON; the word `[]` is not."""
    ends = ('""',) if isinstance(expected, str) else ('""', "[]", "{}")
    is_json = isinstance(value, str) and value[:1] + value[-1:] in ends and len(value) > 1
    return json.loads(str(value)) if is_json else value


def check_read_back(read: nx.Graph, graph: nx.Graph) -> None:
    """The nodes, the arrows and all attributes of a graph, as networkx reads them; a layout adds further ones."""
    assert set(read) == set(graph) and type(read) is type(graph) and set(read.edges) == set(graph.edges)
    pairs = [(read.nodes[n], graph.nodes[n]) for n in graph] + [(read.edges[e], graph.edges[e]) for e in graph.edges]
    for actual, expected in pairs:
        given = {key: value for key, value in expected.items() if value is not None}
        assert {key: decode(actual[key], given[key]) for key in given} == {
            k: json.loads(json.dumps(v)) for k, v in given.items()
        }


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if k % 8 else [], id=case.name) for k, case in enumerate(CASES)],
)
def test_files_obey_the_schemas_and_are_read_back(case: Case, tmp_path: Path) -> None:
    sentence = case.sentence
    for owner, graph in ((sentence, sentence.graph()), (case.net, case.net.graph())):
        owner.draw(tmp_path / "a.graphml")
        check_graphml((tmp_path / "a.graphml").read_text(encoding="utf-8"), graph)
        check_read_back(nx.read_graphml(tmp_path / "a.graphml", force_multigraph=graph.is_multigraph()), graph)
        owner.draw(tmp_path / "a.gexf")
        check_gexf((tmp_path / "a.gexf").read_text(encoding="utf-8"), graph)
        read = nx.read_gexf(tmp_path / "a.gexf", version="1.3")
        check_read_back(nx.MultiDiGraph(read) if graph.is_multigraph() else read, graph)
        owner.draw(f"{tmp_path}/{type(owner).__name__}/")
        check_parquet(tmp_path / type(owner).__name__, graph)


def test_files_have_the_layout_of_the_figure() -> None:
    s = bt.bayesuvius(4, heads=2, slices=2, residual=True).sentence("the cat sat")
    graph, picture = s.graph(attention=True), s.picture()
    layout = layout_graph(s.net.network, graph)
    root = check_graphml(to_graphml(graph, layout), graph)
    viz = check_gexf(to_gexf(graph, layout), graph)
    boxes = {box.name: box for box in picture.boxes}
    x0, y0 = boxes["x_0_0"].x, boxes["x_0_0"].y
    first = next(n for n in root.iter(f"{G}node") if n.get("id") == "x_0_0").find(f".//{Y}Geometry")
    centre = nx.parse_graphml(to_graphml(graph, layout)).nodes["x_0_0"]
    positions = {node.get("id"): node.find(f"{V}position") for node in viz.iter(f"{X}node")}
    for node in root.iter(f"{G}node"):
        name, geometry = node.get("id") or "", node.find(f".//{Y}Geometry")
        box, data = boxes[name], nx.parse_graphml(to_graphml(graph, layout)).nodes[name] if name == "x_1_2" else centre
        assert (float(geometry.get("width")), float(geometry.get("height"))) == pytest.approx(
            (box.width, box.height), abs=0.01
        )
        for axis, size, shift in (("x", "width", box.x - x0), ("y", "height", box.y - y0)):
            middle, start = (float(g.get(axis)) + float(g.get(size)) / 2 for g in (geometry, first))
            assert middle - start == pytest.approx(shift, abs=0.02)
        # In Gephi, y increases upwards.
        assert float(positions[name].get("y")) - float(positions["x_0_0"].get("y")) == pytest.approx(
            y0 - box.y, abs=0.02
        )
        if name == "x_1_2":
            assert data["y"] - centre["y"] == pytest.approx(y0 - box.y) and data["x"] - centre["x"] == pytest.approx(
                box.x - x0
            )
    labels = [label.text for label in root.iter(f"{Y}NodeLabel")]
    assert "x₀⁰ “the”" in labels and "W_q¹" in labels
    arrows = {(a.source, a.target): a for a in picture.arrows}
    for edge in root.iter(f"{G}edge"):
        arrow = arrows[edge.get("source") or "", edge.get("target") or ""]
        path, line = edge.find(f".//{Y}Path"), edge.find(f".//{Y}LineStyle")
        source = boxes[arrow.source]
        assert float(path.get("sx")) == pytest.approx(arrow.points[0][0] - source.x, abs=0.01)
        assert len(path) == len(arrow.points[::3]) - 2 and float(line.get("width")) == pytest.approx(
            arrow.width, abs=0.01
        )


def test_a_graph_of_many_arrows_is_laid_out_without_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    s = bt.bayesuvius(4, heads=2).sentence("the cat sat")
    graph = s.graph(attention=True)
    routed = layout_graph(s.net.network, graph)
    monkeypatch.setattr(graph_files, "DEFAULT_LIMIT", 3)
    picture = layout_graph(s.net.network, graph)
    assert [box.name for box in picture.boxes] == [box.name for box in routed.boxes]
    assert not any(arrow.points for arrow in picture.arrows)
    assert [(a.colour, a.width) for a in picture.arrows] == [(a.colour, a.width) for a in routed.arrows]
    check_graphml(to_graphml(graph, picture), graph)


def test_set_and_observed_nodes_have_their_colours() -> None:
    s = bt.bayesuvius(4, observe=bt.tpm.Categorical(2)).sentence("the cat").do(q_0_0=[0, 0, 0, 0]).observe(y_0=1)
    graph = s.graph()
    root = check_graphml(to_graphml(graph, layout_graph(s.net.network, graph)), graph)
    fills = {node.get("id"): node.find(f".//{Y}Fill").get("color") for node in root.iter(f"{G}node")}  # type: ignore[union-attr]
    assert fills["q_0_0"] == "#F6C453" and fills["y_0"] == fills["x_0_1"] == "#D9DCE1" and fills["k_0_0"] == "#FFFFFF"
    colours = nx.parse_graphml(to_graphml(graph, layout_graph(s.net.network, graph))).nodes
    assert [colours["k_0_0"][c] for c in "rgb"] == [0x0B, 0x66, 0xAD]  # white nodes are invisible in Gephi


WORDS = st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=4)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WORDS)
def test_any_word_survives(tmp_path: Path, words: list[str]) -> None:
    s = bt.bayesuvius(2).sentence(words)
    graph = s.graph()
    layout = layout_graph(s.net.network, graph)
    check_read_back(nx.parse_graphml(to_graphml(graph, layout).partition("\n")[2]), graph)
    check_graphml(to_graphml(graph, layout), graph)
    check_gexf(to_gexf(graph, layout), graph)
    (tmp_path / "a.gexf").write_text(to_gexf(graph, layout), encoding="utf-8", newline="")
    check_read_back(nx.read_gexf(tmp_path / "a.gexf", version="1.3"), graph)
    s.draw(f"{tmp_path}/words/")
    check_parquet(tmp_path / "words", graph)


# Parquet


def check_parquet(folder: Path, graph: nx.Graph) -> None:
    """Both tables have the rows of the graph, in its order."""
    nodes, arrows = (pq.read_table(folder / name) for name in ("nodes.parquet", "arrows.parquet"))
    expected = [{"name": name, **data} for name, data in graph.nodes(data=True)]
    assert nodes.to_pylist() == [
        {k: list(v) if isinstance(v, tuple) else v for k, v in row.items()} for row in expected
    ]
    rows: list[dict[str, Any]] = []
    for row in arrows.to_pylist():
        pick = {"pick": dict(row["pick"])} if "pick" in row else {}
        rows.append({key: value for key, value in (row | pick).items() if key != "weight" or value is not None})
    edges = [{"source": u, "target": v, **data} for u, v, data in graph.edges(data=True)]
    assert sorted(map(repr, map(sorted_items, rows))) == sorted(map(repr, map(sorted_items, edges)))
    assert json.loads(pq.read_metadata(folder / "arrows.parquet").metadata[b"bnet_transformer"])["version"] == 1


def sorted_items(row: dict[str, Any]) -> list[tuple[str, Any]]:
    """A row in one order of its columns."""
    return sorted(row.items())


@pytest.mark.parametrize(
    "options",
    [{}, {"attention": True}, {"min_weight": 0.3}, {"weights": False, "slices": 1, "words": ["cat"], "heads": 0}],
)
def test_parquet_has_the_options_of_the_graph(options: dict[str, Any], tmp_path: Path) -> None:
    s = bt.decoder(8, heads=2, slices=2, vocabulary=["the", "cat", "sat"], seed=1).sentence("the cat sat")
    s.draw(f"{tmp_path}/a/", **options)
    check_parquet(tmp_path / "a", s.graph(**options))


def test_an_existing_folder_is_replaced_and_a_new_one_removed_on_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = bt.bayesuvius(2).sentence("the cat")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "nodes.parquet").write_text("before")
    for bad in ({"limit": 3}, {"min_weight": 2.0}, {"theme": "dark"}):
        for name in ("a", "new"):
            with pytest.raises(bt.BNetError, match=next(iter(bad))):
                s.draw(f"{tmp_path}/{name}/", **bad)
    with pytest.raises(bt.BNetError, match="surrogates not allowed"):
        bt.bayesuvius(2).sentence(["a\ud800"]).draw(f"{tmp_path}/new/")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "nodes.parquet"]
    assert (tmp_path / "a" / "nodes.parquet").read_text() == "before"
    s.draw(tmp_path / "a")  # an existing folder needs no separator
    check_parquet(tmp_path / "a", s.graph())
    with pytest.raises(bt.BNetError, match="ends in /"):
        s.draw(tmp_path / "b")
    for nowhere in (tmp_path / "no" / "b", tmp_path / "a" / "nodes.parquet"):
        with pytest.raises(bt.FileError, match="folder"):
            s.draw(f"{nowhere}/")
    with pytest.raises(bt.BNetError, match="option"):
        s.net.draw(f"{tmp_path}/c/", theme="dark")
