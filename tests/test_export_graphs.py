"""The exports to networkx, their text formats, and writing by suffix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer._core.files import write_file
from bnet_transformer._core.naming import WORD, format_label
from bnet_transformer.bridges.networkx import (
    check_arrow_limit,
    ground_graph_to_networkx,
    template_graph_to_networkx,
    to_json,
)
from bnet_transformer.bridges.pgmpy import to_bif
from bnet_transformer.drawing import get_graph_writers
from bnet_transformer.graph import GroundGraph, NodeSelection
from bnet_transformer.tpm import Categorical
from tests.cases import CASES, Case

FOLDED = {"stack", "role", "slice", "plates", "kind", "learnable", "shape", "tpm", "label"}
ATTRIBUTES = FOLDED | {"head", "index", "word", "token", "do"}


def make_graph(case: Case) -> tuple[bt.Sentence, nx.DiGraph]:
    sentence = case.sentence
    tokens = sentence.state.tokens
    return sentence, ground_graph_to_networkx(sentence.net.network, sentence.ground, tokens=tokens)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ground_is_the_ground_graph(case: Case) -> None:
    sentence, graph = make_graph(case)
    ground, network = sentence.ground, sentence.net.network
    assert list(graph) == ground.names and nx.is_directed_acyclic_graph(graph)
    for node, name in enumerate(ground.names):
        assert set(graph.predecessors(name)) == {ground.name(parent) for parent in ground.parents(node)}
        data, group = graph.nodes[name], ground.group_of(node)
        spec = network.specs[group.index]
        assert data.keys() == ATTRIBUTES
        assert (data["stack"], data["role"], data["slice"]) == (group.stack, group.role, group.slice)
        assert (data["shape"], data["learnable"]) == (spec.shape, spec.learnable)
        assert data["tpm"] == type(spec.tpm).__name__
        position = dict(zip(data["plates"], data["index"], strict=True))
        assert name == "_".join([group.name, *map(str, data["index"])])
        assert (data["word"], data["head"]) == (position.get(WORD), position.get("head"))
        text = sentence.state.tokens.get(group.word_stack or "", ())
        assert data["token"] == (text[data["word"]] if group.word_stack is not None else None)
        kinds = {"deterministic": "deterministic", "discrete": "stochastic", "continuous": "stochastic"}
        assert data["kind"] == ("observed" if spec.tpm.kind == "input" else kinds[spec.tpm.kind])
    for parent, _, data in graph.edges(data=True):
        assert data == {"role": graph.nodes[parent]["role"]}
    first = next(iter(graph.edges(data=True)))[2]
    first["role"] = "changed"  # no attributes are shared between arrows
    assert sum(data["role"] == "changed" for _, _, data in graph.edges(data=True)) == 1


def test_labels() -> None:
    net = bt.bayesuvius(4, heads=12, combine="concat", slices=11, residual=True)
    sentence = net.sentence("the cat sat")
    graph = ground_graph_to_networkx(net.network, sentence.ground, tokens={"": ("the", "cat", "sat")})
    assert graph.nodes["x_1_2"]["label"] == 'x₂¹ "sat"'
    assert graph.nodes["q_10_11_0"]["label"] == 'q₀¹⁰⁽¹¹⁾ "the"'
    assert graph.nodes["W_q_0_3"]["label"] == "W_q⁰⁽³⁾"
    assert graph.nodes["q_10_11_0"]["head"] == 11 and graph.nodes["q_10_11_0"]["index"] == (11, 0)
    assert format_label("h", stack="enc", slice=0, plates=(1, 23), word=4567890) == "enc h₄₅₆₇₈₉₀⁰⁽¹⁾⁽²³⁾"
    without_tokens = ground_graph_to_networkx(net.network, sentence.ground)
    assert without_tokens.nodes["x_1_2"]["token"] is None and without_tokens.nodes["x_1_2"]["label"] == "x₂¹"
    labels = list(nx.get_node_attributes(graph, "label").values())
    assert len(set(labels)) == len(labels)


def test_the_chapters_counts() -> None:
    def counts(weights: bool, **options: Any) -> tuple[int, int]:
        sentence = bt.bayesuvius(4, **options).sentence("the cat sat")
        graph = ground_graph_to_networkx(
            sentence.net.network, sentence.ground, selection=NodeSelection(weights=weights)
        )
        return graph.number_of_nodes(), graph.number_of_edges()

    assert counts(False) == (15, 30) and counts(True) == (19, 42)
    assert counts(False, residual=True) == (15, 33)
    assert counts(False, mask="causal") == (15, 24)
    assert counts(True, per="word", heads=5) == (9 + 12 * 5, 3 + 39 * 5)


def test_selection_observed_and_surgery() -> None:
    net = bt.bayesuvius(4, slices=3, heads=4, combine="concat", observe=Categorical(2))
    ground = net.sentence("the cat sat on").ground
    selection = NodeSelection(slices=[1], words={"": [1, 3]}, plates={"head": [2]}, weights=False)
    observed = ground.id("q_1_2_3")
    graph = ground_graph_to_networkx(
        net.network, ground, selection=selection, observed=[observed, ground.id("q_1_0_0")]
    )
    assert sorted(graph) == sorted(
        f"{stem}_{i}" for stem in ("x_1", "q_1_2", "k_1_2", "v_1_2", "a_1_2", "x_2") for i in (1, 3)
    )
    full = ground_graph_to_networkx(net.network, ground)
    assert set(graph.edges) == {(u, v) for u, v in full.edges if u in graph and v in graph and not u.startswith("x_0")}
    assert [name for name, kind in graph.nodes(data="kind") if kind == "observed"] == ["q_1_2_3"]
    cut = ground.surgery([ground.id("x_1_0")])
    done = ground_graph_to_networkx(net.network, cut)
    assert set(full.edges) - set(done.edges) == set(full.in_edges("x_1_0"))


def test_weights() -> None:
    net = bt.bayesuvius(4)
    ground = net.sentence("the cat").ground
    expected = {("k_0_0", "x_1_1"): 0.25, ("k_0_1", "x_1_1"): 0.75, ("v_0_0", "x_1_0"): 0, ("q_0_0", "c"): 0.5}
    weights = {(ground.id(u), ground.id(v)): w for (u, v), w in expected.items()}
    graph = ground_graph_to_networkx(net.network, ground, weights=weights)
    result = {(u, v): w for u, v, w in graph.edges(data="weight") if w is not None}
    assert result == {pair: w for pair, w in expected.items() if pair[1] != "c"}
    assert all(type(w) is float for w in result.values()) and graph.edges["k_0_0", "x_1_1"]["role"] == "k"
    filtered = ground_graph_to_networkx(net.network, ground, weights=weights, min_weight=0.25)
    assert set(graph.edges) - set(filtered.edges) == {("v_0_0", "x_1_0")} and set(filtered) == set(graph)
    unweighted = ground_graph_to_networkx(net.network, ground, min_weight=0.25)
    assert set(unweighted.edges) == set(graph.edges)  # an arrow without a weight has no attribute


def test_too_many_arrows_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    net = bt.bayesuvius(24, slices=12, heads=12, combine="concat", key_dim=2, value_dim=2)
    ground = GroundGraph(net.network.graph, {"": 512})
    arrows = ground.count_arrows()

    def refuse(*given: object) -> None:
        raise AssertionError("arrows or names were made")

    monkeypatch.setattr(GroundGraph, "arrows", refuse)
    monkeypatch.setattr(GroundGraph, "iter_names", refuse)
    message = rf"at most 100,000 arrows .*got {len(ground):,} nodes and {arrows:,} arrows. .*limit={arrows}"
    with pytest.raises(bt.BudgetError, match=message):
        ground_graph_to_networkx(net.network, ground)
    monkeypatch.undo()
    one_word = net.sentence("a").ground
    count = one_word.count_arrows()
    with pytest.raises(bt.BudgetError):
        ground_graph_to_networkx(net.network, one_word, limit=count - 1)
    assert ground_graph_to_networkx(net.network, one_word, limit=count).number_of_edges() == count
    assert ground_graph_to_networkx(net.network, one_word, limit=None).number_of_edges() == count
    check_arrow_limit(ground, NodeSelection(slices=[]), 0)
    for bad in (-1, 2.5, "many", True):
        with pytest.raises(bt.BNetError, match="limit"):
            check_arrow_limit(one_word, NodeSelection(), bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_folded_has_an_arrow_for_each_slot(case: Case) -> None:
    network = case.net.network
    graph = template_graph_to_networkx(network)
    assert list(graph) == [spec.group.name for spec in network.specs]
    for spec in network.specs:
        data = graph.nodes[spec.group.name]
        words = () if spec.group.word_stack is None else (WORD,)
        assert data["plates"] == (*spec.group.plates, *words) and data["shape"] == spec.shape
        assert data.keys() == FOLDED
        arrows = list(graph.in_edges(spec.group.name, data=True))
        slots = [data["slot"] for _, _, data in arrows if data["slot"] != "pick"]
        assert sorted(slots) == sorted(parent.slot for parent in spec.parents)
        picks = {name for _, _, data in arrows for name in data["pick"].values()}
        assert picks == {u for u, _, data in arrows if data["slot"] == "pick"}
        assert all(data["role"] == graph.nodes[u]["role"] for u, _, data in arrows)
    edges = {(network.specs[e.parent].group.name, network.specs[e.child].group.name) for e in network.graph.edges}
    assert set(graph.edges()) == edges


def test_the_folded_graph_has_reach_and_pick() -> None:
    graph = bt.bayesuvius(4, per="word", mask="causal", residual=True).graph()
    incoming = {(u, data["slot"]): data for u, _, data in graph.in_edges("x_1", data=True)}
    assert incoming["k_0", "k."] == {"role": "k", "slot": "k.", "reach": "causal", "pick": {"head": "c_0"}}
    assert incoming["c_0", "pick"] == {"role": "c", "slot": "pick", "reach": "same", "pick": {}}
    assert incoming["x_0", "x"]["reach"] == "same" and graph.nodes["x_1"]["label"] == "x¹"
    assert graph.nodes["x_0"]["kind"] == "observed" and graph.nodes["c_0"]["kind"] == "stochastic"
    graph_ = next(case for case in CASES if case.name == "geometric").net.graph()
    assert [data["slot"] for data in graph_.get_edge_data("x_0", "a_0").values()] == ["z.", "z", "v."]


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_json_keeps_the_graph(case: Case) -> None:
    for graph in (make_graph(case)[1], case.net.graph()):
        back = nx.node_link_graph(json.loads(to_json(graph)), edges="edges")
        assert type(back) is type(graph) and list(back) == list(graph) and set(back.edges) == set(graph.edges)
        for name, data in graph.nodes(data=True):
            assert back.nodes[name] == json.loads(json.dumps(data))
        assert all(back.edges[arrow] == data for arrow, data in graph.edges.items())


@settings(max_examples=40)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_any_token_survives(tokens: list[str]) -> None:
    net = bt.bayesuvius(2)
    graph = ground_graph_to_networkx(net.network, net.sentence(tokens).ground, tokens={"": tokens})
    back = nx.node_link_graph(json.loads(to_json(graph)), edges="edges")
    assert [back.nodes[f"x_0_{i}"]["token"] for i in range(len(tokens))] == tokens


def test_json_refuses_what_is_no_number() -> None:
    with pytest.raises(bt.BNetError, match="graph: expected finite numbers"):
        to_json(nx.DiGraph([("a", "b", {"weight": float("nan")})]))


def test_write_by_suffix(tmp_path: Path) -> None:
    sentence, graph = make_graph(next(case for case in CASES if case.name == "codebook"))
    writers = get_graph_writers(sentence.net.network, lambda: graph)
    write_file(tmp_path / "a.json", writers)
    assert (tmp_path / "a.json").read_text() == to_json(graph)
    write_file(str(tmp_path / "a.GraphML"), writers)
    assert set(nx.read_graphml(tmp_path / "a.GraphML")) == set(graph)
    for name in ("a.txt", "a", "a.json.gz", "json"):
        with pytest.raises(bt.BNetError, match=r"allowed: \.gexf, \.graphml, \.json$"):
            write_file(tmp_path / name, writers)
    write_file(tmp_path / "a.txt", {**writers, ".txt": lambda: b"mine"})
    assert (tmp_path / "a.txt").read_bytes() == b"mine"
    sentence.draw(tmp_path / "a.bif")
    assert (tmp_path / "a.bif").read_text() == to_bif(sentence.state.model)
    sentence.observe(x_1_0=sentence.do(W_q_0=0, W_k_0=0, W_v_0=1)["x_1_0"]).draw(tmp_path / "b.bif")
    assert "variable x_1_0 {" in (tmp_path / "b.bif").read_text()
    for name in ("c.bif", "c.html"):  # a net is not a sentence
        with pytest.raises(bt.BNetError, match=r"allowed: \.dot, \.gexf, \.graphml, \.json, \.pdf"):
            sentence.net.draw(tmp_path / name)
    assert len(list(tmp_path.iterdir())) == 5


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")
    network = bt.bayesuvius(2).network

    def fail() -> nx.Graph:
        raise bt.BudgetError("graph", expected="less", actual="more")

    with pytest.raises(bt.BudgetError):
        write_file(path, get_graph_writers(network, fail))
    graph = nx.DiGraph([("a", "b")])

    def fail_halfway(self: Path, content: bytes) -> int:
        os.write(os.open(self, os.O_WRONLY), content[:3])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fail_halfway)
        with pytest.raises(bt.FileError, match=r"^[^\n]*No space left on device$"):
            write_file(path, get_graph_writers(network, lambda: graph))
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    nowhere = [tmp_path / "nowhere" / "a.json", path / "a.json", tmp_path / ("x" * 300 + ".json"), "/proc/nothing.json"]
    for bad in (*nowhere, "", None, 3):
        with pytest.raises(bt.FileError):
            write_file(bad, get_graph_writers(network, lambda: graph))  # type: ignore[arg-type]
