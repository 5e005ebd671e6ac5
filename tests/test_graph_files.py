"""Graph files: GraphML and GEXF read back by networkx, and Parquet read back by pyarrow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer.figures import graph_files
from tests.cases import CASES, Case

pq = pytest.importorskip("pyarrow.parquet", reason='pip install "bnet-transformer[parquet]"')


def decode(value: object, expected: object) -> object:
    """A value of a file: strings in double quotes, lists and mappings are JSON; the word `[]` is not."""
    ends = ('""',) if isinstance(expected, str) else ('""', "[]", "{}")
    is_json = isinstance(value, str) and value[:1] + value[-1:] in ends and len(value) > 1
    return json.loads(str(value)) if is_json else value


def check_read_back(owner: Any, graph: nx.Graph, folder: Path, **options: Any) -> dict[str, nx.Graph]:
    """The nodes, the arrows and all attributes of a graph, as networkx reads them; the layout adds further ones."""
    files = {}
    for suffix in ("graphml", "gexf"):
        owner.draw(folder / f"a.{suffix}", **options)
        text = (folder / f"a.{suffix}").read_bytes()
        assert text.startswith(b"<?xml") and b"\0" not in text
    files["graphml"] = nx.read_graphml(folder / "a.graphml", force_multigraph=graph.is_multigraph())
    files["gexf"] = nx.read_gexf(folder / "a.gexf", version="1.3")
    for read in files.values():
        assert set(read) == set(graph)
        keys = [key for *_, key in read.edges(keys=True)] if read.is_multigraph() else []
        assert len(set(keys)) == len(keys)  # Gephi drops arrows with equal ids
        pairs = [(read.nodes[name], graph.nodes[name]) for name in graph]
        for parent, child in set(graph.edges()):
            data = [item[parent][child] for item in (read, graph)]
            lists = [list(x.values()) if g.is_multigraph() else [x] for x, g in zip(data, (read, graph), strict=True)]
            pairs += zip(*lists, strict=True)
        for actual, expected in pairs:
            given = {key: value for key, value in expected.items() if value is not None}
            assert {key: decode(actual[key], given[key]) for key in given} == json.loads(json.dumps(given))
    return files


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if k % 8 else [], id=case.name) for k, case in enumerate(CASES)],
)
def test_files_are_read_back(case: Case, tmp_path: Path) -> None:
    sentence = case.sentence
    for owner, graph in ((sentence, sentence.graph()), (case.net, case.net.graph())):
        check_read_back(owner, graph, tmp_path)
        owner.draw(f"{tmp_path}/{type(owner).__name__}/")
        check_parquet(tmp_path / type(owner).__name__, graph)


@pytest.mark.parametrize("limit", [2_000, 3])
def test_files_have_the_layout_of_the_figure(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of many arrows is laid out without routes of arrows."""
    monkeypatch.setattr(graph_files, "DEFAULT_LIMIT", limit)
    net = bt.bayesuvius(4, heads=2, residual=True, observe=bt.tpm.Categorical(2))
    s = net.sentence("the cat sat").do(q_0_0=[0, 0, 0, 0]).observe(y_0=1)
    files = check_read_back(s, s.graph(attention=True), tmp_path, attention=True)
    boxes = {box.name: box for box in s.picture().boxes}
    first = boxes["x_0_0"]
    maps = {
        "graphml": {name: (data["x"], data["y"]) for name, data in files["graphml"].nodes(data=True)},
        "gexf": {name: [data["viz"]["position"][k] for k in "xy"] for name, data in files["gexf"].nodes(data=True)},
    }
    for points in maps.values():
        x0, y0 = points["x_0_0"]
        for name, (x, y) in points.items():  # y increases upwards
            if limit > 3:
                assert (x - x0, y0 - y) == pytest.approx((boxes[name].x - first.x, boxes[name].y - first.y))
        assert points["y_0"][1] < points["x_1_0"][1] < y0
    colours = files["graphml"].nodes
    assert [colours["k_0_0"][c] for c in "rgb"] == [0x0B, 0x66, 0xAD]  # white nodes are invisible in Gephi
    assert [colours["q_0_0"][c] for c in "rgb"] == [0xF6, 0xC4, 0x53]
    assert all([colours[name][c] for c in "rgb"] == [0xD9, 0xDC, 0xE1] for name in ("y_0", "x_0_1"))
    assert files["gexf"].nodes["y_0"]["viz"]["color"]["g"] == 0xDC
    assert [files["graphml"].edges["k_0_1", "x_1_1"][c] for c in "rgb"] == [0x0B, 0x66, 0xAD]


WORDS = st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=4)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WORDS)
def test_any_word_survives(tmp_path: Path, words: list[str]) -> None:
    s = bt.bayesuvius(2).sentence(words)
    check_read_back(s, s.graph(), tmp_path)
    s.draw(f"{tmp_path}/words/")
    check_parquet(tmp_path / "words", s.graph())


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
