"""The graph: node and arrow counts of the chapter; every query against networkx and pgmpy on random nets."""

import itertools
from collections import Counter

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer._core.naming import Reach
from bnet_transformer.graph import (
    EdgeTemplate,
    GroundGraph,
    NodeGroup,
    NodeSelection,
    TemplateGraph,
    ancestors,
    descendants,
    shrink,
    topological_order,
)
from bnet_transformer.graph.traversal import markov_blanket
from tests.cases import CASES

THREE = {"": 3}
NO_FILTER = NodeSelection()


def get_counts(net: bt.BNet, words: int = 3, **selection: object) -> tuple[int, int]:
    ground = GroundGraph(net.network.graph, {"": words})
    chosen = NodeSelection(**selection)
    arrows = sum(len(sources) for _, sources, _ in ground.arrows(chosen))
    assert arrows == ground.count_arrows(chosen)
    assert ground.count_nodes(chosen) == sum(
        len(ground.select_nodes(g, chosen)) for g in ground.template.groups if ground.is_selected(g, chosen)
    )
    return ground.count_nodes(chosen), arrows


def test_the_chapters_slice():
    net = bt.bayesuvius(4)
    assert get_counts(net, weights=False) == (15, 30) and get_counts(net) == (19, 42)
    assert get_counts(bt.bayesuvius(4, residual=True), weights=False) == (15, 33)
    ground = GroundGraph(bt.bayesuvius(4, mask="causal").network.graph, THREE)
    groups, child = ground.template.groups, ground.template.by_name["x_1"].index
    by_role = {groups[edge.parent].role: len(sources) for edge, sources, _ in ground.arrows() if edge.child == child}
    assert by_role == {"q": 3, "k": 6, "v": 6}


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_a_selector_for_each_word(heads):
    assert get_counts(bt.bayesuvius(4, heads=heads, per="word")) == (9 + 12 * heads, 3 + 39 * heads)


@pytest.mark.parametrize("slices, words, heads", [(1, 3, 2), (2, 4, 3), (3, 1, 1)])
def test_concat_counts(slices, words, heads):
    """x, and for each head q, k, v, a; W_q, W_k, W_v, W_o for each head."""
    net = bt.bayesuvius(4, slices=slices, heads=heads, combine="concat")
    nodes = words * (slices + 1) + slices * heads * (4 * words + 4)
    arrows = slices * heads * (6 * words + words + 2 * words**2 + words + words)
    assert get_counts(net, words) == (nodes, arrows)


def as_networkx(ground: GroundGraph, selection: NodeSelection = NO_FILTER) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(ground)))
    for _, sources, targets in ground.arrows(selection):
        pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        assert not any(graph.has_edge(*pair) for pair in pairs)
        graph.add_edges_from(pairs)
    return graph


@pytest.mark.parametrize("case", CASES[1::6], ids=lambda case: case.name)
def test_questions_of_structure_agree_with_networkx(case):
    ground = case.sentence.ground
    graph = as_networkx(ground)
    assert nx.is_directed_acyclic_graph(graph)
    position = {node: k for k, node in enumerate(topological_order(ground).tolist())}
    assert sorted(position) == list(graph)
    assert all(position[u] < position[v] for u, v in graph.edges)
    for node in graph:
        assert ground.id(ground.name(node)) == node
        assert sorted(ground.parents(node)) == sorted(graph.predecessors(node))
        assert sorted(ground.children(node)) == sorted(graph.successors(node))
        assert ancestors(ground, [node]) == sorted(nx.ancestors(graph, node))
        assert descendants(ground, [node]) == sorted(nx.descendants(graph, node))
        assert markov_blanket(ground, node) == compute_blanket(graph, node)


def compute_blanket(graph: nx.DiGraph, node: int) -> list[int]:
    blanket = set(graph.predecessors(node)) | set(graph.successors(node))
    for child in graph.successors(node):
        blanket |= set(graph.predecessors(child))
    return sorted(blanket - {node})


@st.composite
def plans(draw):
    """A random template graph over two plates and words of one stack, recurrent arrows included, and a word count."""
    count = draw(st.integers(2, 6))
    plates = [tuple(p for p in ("atom", "head") if draw(st.booleans())) for _ in range(count)]
    over_words = [draw(st.booleans()) for _ in range(count)]
    arrows = []
    for parent, child in itertools.combinations(range(count), 2):
        if draw(st.booleans()):
            kinds = ["every", "first", "last"] if over_words[parent] else ["same"]
            if over_words[parent] and over_words[child]:
                kinds += ["same", "causal", "earlier", "before"]
            arrows.append((parent, child, draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2, unique=True))))
    arrows += [(k, k, ["before"]) for k in range(count) if over_words[k] and draw(st.booleans())]
    return plates, over_words, arrows, draw(st.integers(1, 4))


def make_ground_graph(plan) -> GroundGraph:
    """The ground graph of a plan (of `plans`)."""
    plates, over_words, arrows, words = plan
    groups = tuple(
        NodeGroup(k, "", f"r{chr(97 + k)}", None, plates[k], "" if over_words[k] else None, 0)
        for k in range(len(plates))
    )
    edges = tuple(EdgeTemplate(parent, child, tuple(map(Reach, kinds)), ("x",)) for parent, child, kinds in arrows)
    components = tuple((k,) for k in range(len(plates)))
    return GroundGraph(TemplateGraph(groups, edges, {"atom": 2, "head": 3}, {"": 1}, components), {"": words})


@settings(max_examples=50, deadline=None)
@given(plans(), st.data())
def test_random_nets_agree_with_networkx(plan, data):
    ground = make_ground_graph(plan)
    cut = data.draw(st.sets(st.integers(0, len(ground) - 1), max_size=3))
    graph = as_networkx(ground)
    for node in cut:
        graph.remove_edges_from(list(graph.in_edges(node)))
    after = ground.surgery(cut)
    assert nx.utils.edges_equal(as_networkx(after).edges, graph.edges, directed=True)
    assert after.count_arrows() == graph.number_of_edges()
    nodes = data.draw(st.lists(st.integers(0, len(ground) - 1), min_size=1, max_size=3, unique=True))
    up = set().union(*(nx.ancestors(graph, node) for node in nodes)) - set(nodes)
    down = set().union(*(nx.descendants(graph, node) for node in nodes)) - set(nodes)
    assert ancestors(after, nodes) == sorted(up)
    assert descendants(after, nodes) == sorted(down)
    assert markov_blanket(after, nodes[0]) == compute_blanket(graph, nodes[0])
    position = {node: k for k, node in enumerate(topological_order(after).tolist())}
    assert all(position[u] < position[v] for u, v in graph.edges)


@settings(max_examples=25, deadline=None)
@given(plans(), st.data())
def test_blankets_agree_with_pgmpy(plan, data):
    ground = make_ground_graph(plan)
    from pgmpy.base import DAG

    dag = DAG()
    dag.add_nodes_from(ground.names)
    dag.add_edges_from((ground.name(u), ground.name(v)) for u, v in as_networkx(ground).edges)
    node = data.draw(st.integers(0, len(ground) - 1))
    assert {ground.name(n) for n in markov_blanket(ground, node)} == set(dag.get_markov_blanket(ground.name(node)))
    assert {ground.name(n) for n in ground.parents(node)} == set(dag.get_parents(ground.name(node)))


@settings(max_examples=40, deadline=None)
@given(plans(), st.data())
def test_a_selection_is_the_induced_subgraph(plan, data):
    ground = make_ground_graph(plan)
    words = data.draw(st.lists(st.integers(0, ground.word_counts[""] - 1), min_size=1, unique=True))
    heads = data.draw(st.lists(st.integers(0, 2), min_size=1, unique=True))
    selection = NodeSelection(words={"": words}, plates={"head": heads}, weights=data.draw(st.booleans()))
    selected = {
        int(node)
        for group in ground.template.groups
        if ground.is_selected(group, selection)
        for node in ground.select_nodes(group, selection)
    }
    expected = as_networkx(ground).subgraph(selected)
    actual = as_networkx(ground, selection)
    assert set(actual.edges) == set(expected.edges)
    assert ground.count_arrows(selection) == expected.number_of_edges()
    assert ground.count_nodes(selection) == len(selected)


def test_slices_keep_what_they_read_and_compute():
    ground = GroundGraph(bt.bayesuvius(4, slices=3, vocabulary=["a", "b"]).network.graph, THREE)
    selection = NodeSelection(slices=[1], weights=False)
    names = {g.name for g in ground.template.groups if ground.is_selected(g, selection)}
    assert names == {"x_1", "q_1", "k_1", "v_1", "x_2"}
    assert get_counts(bt.bayesuvius(4, slices=3), slices=[1], weights=False) == (15, 30)
    assert get_counts(bt.bayesuvius(4, slices=3), slices=[0, 2], weights=False) == (30, 60)
    first = {g.name for g in ground.template.groups if ground.is_selected(g, NodeSelection(slices=[0], weights=False))}
    assert first == {"token", "x_0", "q_0", "k_0", "v_0", "x_1"}


def test_shrinking_counts_and_cycles():
    s = bt.bayesuvius(4).sentence("the cat sat")
    words = s.shrink(lambda name: "x" if name.startswith("x_0") else f"word_{name.rsplit('_', 1)[1]}")
    graph = words.to_networkx()
    assert set(graph) == {"x", "word_0", "word_1", "word_2"} and not words.acyclic
    assert graph["x"]["word_1"]["count"] == 3 and graph["word_0"]["word_1"]["count"] == 2
    causal = bt.bayesuvius(4, mask="causal").sentence("the cat sat")
    roles = causal.shrink(lambda name: name.rsplit("_", 1)[0])
    assert roles.acyclic and set(roles.to_networkx()) == {"x_0", "q_0", "k_0", "v_0", "x_1"}
    partial = s.shrink({"q_0_0": "qs", "q_0_1": "qs"})
    assert "q_0_2" in partial.boxes and partial.to_networkx()["x_0_0"]["qs"]["count"] == 1


@settings(max_examples=30, deadline=None)
@given(plans(), st.randoms(use_true_random=False))
def test_shrinking_agrees_with_networkx_quotients(plan, random):
    ground = make_ground_graph(plan)
    boxes = {name: f"box{random.randrange(3)}" for name in ground.names}
    partition = [{n for n in ground.names if boxes[n] == box} for box in sorted(set(boxes.values()))]
    graph = nx.relabel_nodes(as_networkx(ground), dict(enumerate(ground.names)))
    expected = nx.quotient_graph(graph, partition, relabel=False)
    quotient = shrink(ground, boxes).to_networkx()
    name = {frozenset(part): boxes[next(iter(part))] for part in partition}
    assert set(quotient.edges) == {(name[u], name[v]) for u, v in expected.edges}
    across = Counter((boxes[u], boxes[v]) for u, v in graph.edges if boxes[u] != boxes[v])
    assert {(u, v): count for u, v, count in quotient.edges(data="count")} == across


def test_the_error_for_a_selector_names_summed_heads():
    s = bt.encoder(dim=4, heads=2, slices=1).sentence("the cat")
    for call in (lambda: s.posterior("c"), lambda: s.do(c=1), lambda: s["c_0"]):
        with pytest.raises(bt.UnknownNameError, match=r"sums its heads and has no head selector.*bt\.inclusion"):
            call()


def test_errors_for_unknown_names_have_the_range_or_near_matches():
    s = bt.bayesuvius(4, heads=2, combine="concat").sentence("the cat sat")
    with pytest.raises(bt.UnknownNameError, match="q_0_0_0 to q_0_1_2"):
        s.parents("q_0_2_0")
    with pytest.raises(bt.UnknownNameError, match="near matches"):
        s.parents("w_q_0_0")
    for name in ("x", "x_0", "x_0_3", "x_-1_0", "", "x_0_0 ", "x_00_0", None, 3):
        with pytest.raises(bt.UnknownNameError):
            s.parents(name)


def test_counting_is_lazy():
    """512 words x 12 slices x 12 heads: 75 million arrows, counted without making one."""
    ground = GroundGraph(bt.bayesuvius(4, slices=12, heads=12, combine="concat").network.graph, {"": 512})
    assert ground.count_arrows() > 75_000_000
    part = NodeSelection(slices=[5], plates={"head": [3]}, words={"": np.arange(10)})
    arrows = 3 * 10 * 2 + 10 + 2 * 10 * 10 + 10 + 10  # W and x to q, k, v; q; k and v to a; W_o; a to x
    assert sum(len(s) for _, s, _ in ground.arrows(part)) == ground.count_arrows(part) == arrows
    assert ground.name(ground.id("a_11_11_511")) == "a_11_11_511"
