"""Separation, trails, separators and cuts against networkx and pgmpy; D-separation against its definition."""

import itertools
import random

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer._core.naming import KINDS_WITH_WIDTH, Reach
from bnet_transformer.attention.tan import best_parents
from bnet_transformer.graph import EdgeTemplate, GroundGraph, NodeGroup, TemplateGraph, descendants
from bnet_transformer.graph.d_separation import SeparationQuery, are_separated, thin_graph
from bnet_transformer.graph.queries import find_active_trail, find_minimal_cut, find_minimal_separator
from bnet_transformer.tpm import Categorical
from tests.cases import CASES
from tests.test_graph import as_networkx, make_ground_graph, plans


def draw_query(ground: GroundGraph, pick: random.Random) -> SeparationQuery:
    """A random query: one or two nodes on a side, a few given."""
    nodes = pick.sample(range(len(ground)), min(len(ground), pick.choice([2, 3, 5, 8])))
    one = 2 if len(nodes) > 4 else 1
    return SeparationQuery(frozenset(nodes[:one]), frozenset(nodes[one : one + 1]), frozenset(nodes[one + 1 :]))


@settings(max_examples=30, deadline=None)
@given(plans(), st.data())
def test_random_nets_agree_with_networkx_and_trails_are_active(plan, data):
    ground = make_ground_graph(plan)
    if len(ground) < 2:
        return
    ground = ground.surgery(data.draw(st.sets(st.integers(0, len(ground) - 1), max_size=2)))
    graph = as_networkx(ground)
    pick = random.Random(data.draw(st.integers(0, 10**6)))
    queries = [draw_query(ground, pick) for _ in range(6)]
    expected = [nx.is_d_separator(graph, set(q.x), set(q.y), set(q.given)) for q in queries]
    assert are_separated(ground, queries).tolist() == expected
    assert [bool(are_separated(ground, [q])[0]) for q in queries] == expected
    for q, is_separated in zip(queries, expected, strict=True):
        trail = find_active_trail(ground, q)
        assert (trail is None) == is_separated
        if trail is not None:
            check_trail(graph, ground, q, trail)
        x, y = next(iter(q.x)), next(iter(q.y))
        assert (y in descendants(ground, [x])) == nx.has_path(graph, x, y)


def check_trail(graph: nx.DiGraph, ground: GroundGraph, q: SeparationQuery, trail) -> None:
    nodes = [ground.id(name) for name in trail.nodes]
    assert nodes[0] in q.x and nodes[-1] in q.y and len(set(nodes)) == len(nodes)
    for a, b, forward in zip(nodes, nodes[1:], trail.forward, strict=False):
        assert graph.has_edge(a, b) if forward else graph.has_edge(b, a)
    opened = set(q.given).union(*(nx.ancestors(graph, z) for z in q.given))
    colliders = {ground.id(name) for name in trail.colliders}
    assert colliders <= opened
    assert not (set(nodes) - colliders) & q.given


@settings(max_examples=30, deadline=None)
@given(plans(), st.data())
def test_separators_and_cuts_are_minimal(plan, data):
    ground = make_ground_graph(plan)
    if len(ground) < 2:
        return
    x, y = data.draw(st.lists(st.integers(0, len(ground) - 1), min_size=2, max_size=2, unique=True))
    graph = as_networkx(ground)
    result = find_minimal_separator(ground, frozenset([x]), frozenset([y]))
    if graph.has_edge(x, y) or graph.has_edge(y, x):
        assert result is None
    else:
        assert nx.is_minimal_d_separator(graph, {x}, {y}, set(result))
    cut = find_minimal_cut(ground, x, y)
    if graph.has_edge(x, y):
        assert cut is None
    elif nx.has_path(graph, x, y):
        assert len(cut) == nx.node_connectivity(graph, x, y)
        graph.remove_nodes_from(cut)
        assert not nx.has_path(graph, x, y)
    else:
        assert cut == []


def test_cuts_need_as_many_words_as_it_takes():
    """With more heads than words in the thinned graph, a slice is not a bottleneck until words are added."""
    template = bt.bayesuvius(2, slices=3, heads=6, combine="concat").network.graph
    ground = GroundGraph(template, {"": 9})
    result = find_minimal_cut(ground, ground.id("x_0_3"), ground.id("x_3_1"))
    assert len(result) == nx.node_connectivity(as_networkx(ground), ground.id("x_0_3"), ground.id("x_3_1")) == 6
    assert ground.id("x_3_1") not in descendants(ground.surgery(result), [ground.id("x_0_3")])


REACHES = ["same", "every", "causal", "earlier", "before", "rest", "first", "last", *KINDS_WITH_WIDTH, "mask"]


@pytest.mark.parametrize("kind", REACHES)
def test_many_words_agree_for_any_reach(kind, heads=5):
    """Two slices, and sentences long enough that thinning drops words and heads."""
    n, pick = 11, random.Random(kind)
    table = tuple(tuple(pick.random() < 0.4 or i == j for j in range(n)) for i in range(n))
    reach = (
        Reach(kind, width=2)
        if kind in KINDS_WITH_WIDTH
        else Reach(kind, table=table)
        if kind == "mask"
        else Reach(kind)
    )
    groups = [NodeGroup(0, "", "x", 0, (), "", -1)]
    edges = []
    for t in range(2):
        base = 1 + 3 * t
        groups += [NodeGroup(base, "", "k", t, ("head",), "", t), NodeGroup(base + 1, "", "W", t, ("head",), None, t)]
        groups += [NodeGroup(base + 2, "", "x", t + 1, (), "", t)]
        edges += [
            EdgeTemplate(base - 1, base, (Reach("same"),), ("x",)),
            EdgeTemplate(base + 1, base, (), ("W",)),
            EdgeTemplate(base, base + 2, (reach,), ("k",)),
            EdgeTemplate(base - 1, base + 2, (Reach("same"),), ("r",)),
        ]
    order = (0, 2, 1, 3, 5, 4, 6)
    position = {old: new for new, old in enumerate(order)}
    new_groups = tuple(NodeGroup(position[g.index], *list(vars(g).values())[1:]) for g in (groups[k] for k in order))
    new_edges = tuple(EdgeTemplate(position[e.parent], position[e.child], e.reaches, e.slots) for e in edges)
    template = TemplateGraph(new_groups, new_edges, {"head": heads}, {"": 2}, tuple((k,) for k in range(7)))
    ground = GroundGraph(template, {"": n}).surgery([3])
    graph = as_networkx(ground)
    queries = [draw_query(ground, pick) for _ in range(60)]
    expected = [nx.is_d_separator(graph, set(q.x), set(q.y), set(q.given)) for q in queries]
    assert are_separated(ground, queries).tolist() == expected
    thinned = thin_graph(ground, [{0}])
    assert (len(thinned.ground) < len(ground)) == (kind in ("same", "every", "causal", "first", "last") or heads > 2)


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.name)
def test_every_case_agrees_with_networkx(case):
    ground = case.sentence.ground
    graph, pick = as_networkx(ground), random.Random(3)
    queries = [draw_query(ground, pick) for _ in range(25)]
    expected = [nx.is_d_separator(graph, set(q.x), set(q.y), set(q.given)) for q in queries]
    assert are_separated(ground, queries).tolist() == expected
    functions = case.net.network.functional_groups
    expected = [is_d_separated(graph, ground, q, functions) for q in queries]
    assert are_separated(ground, queries, functions).tolist() == expected


def is_d_separated(graph: nx.DiGraph, ground: GroundGraph, q: SeparationQuery, functions) -> bool:
    """Compute D-separation by its definition: no active trail, where each collider has an observed descendant and no
    determined node blocks; a determined node is a given node, or a function of determined parents."""
    determined = set(q.given) | set(ground.cut_nodes)
    for node in nx.topological_sort(graph):
        group = ground.group_of(node)
        if group.index in functions and ground.template.in_edges[group.index]:
            determined |= {node} if set(graph.predecessors(node)) <= determined else set()
    opened = set(q.given).union(*(nx.ancestors(graph, z) for z in q.given))
    starts = [(x, True) for x in q.x - determined]
    observed = set(starts)
    while starts:
        node, upward = starts.pop()
        if node in q.y - determined:
            return False
        steps = []
        if node not in determined:
            steps += [(child, False) for child in graph.successors(node)]
        if (upward and node not in determined) or (not upward and node in opened):
            steps += [(parent, True) for parent in graph.predecessors(node)]
        fresh = [step for step in steps if step not in observed]
        observed.update(fresh)
        starts += fresh
    return True


def test_random_nets_agree_with_pgmpy():
    from pgmpy.base import DAG

    pick = random.Random(7)
    for _ in range(25):
        n = pick.randint(3, 9)
        groups = tuple(NodeGroup(k, "", f"r{chr(97 + k)}", None, (), None) for k in range(n))
        pairs = [(i, j) for i, j in itertools.combinations(range(n), 2) if pick.random() < 0.35]
        edges = tuple(EdgeTemplate(i, j, (), ("x",)) for i, j in pairs)
        ground = GroundGraph(TemplateGraph(groups, edges, {}, {}, tuple((k,) for k in range(n))), {})
        peer = DAG()
        peer.add_nodes_from(range(n))
        peer.add_edges_from(pairs)
        triples = [pick.sample(range(n), pick.randint(2, n)) for _ in range(4)]
        queries = [SeparationQuery(frozenset([a]), frozenset([b]), frozenset(z)) for a, b, *z in triples]
        expected = [not peer.is_dconnected(*q.x, *q.y, observed=sorted(q.given)) for q in queries]
        assert are_separated(ground, queries).tolist() == expected


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 7), st.integers(0, 10**6), st.floats(0.2, 1))
def test_arborescences_are_networkxs(n, seed, density):
    rng = np.random.default_rng(seed)
    weight = np.where(rng.random((n, n)) < density, rng.random((n, n)).round(2), np.nan)
    parents = best_parents(weight)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    pairs = itertools.permutations(range(n), 2)
    graph.add_weighted_edges_from((j, i, weight[i, j]) for i, j in pairs if weight[i, j] >= 0)
    arrows = [(p, i) for i, p in enumerate(parents) if p >= 0]
    assert all(graph.has_edge(*arrow) for arrow in arrows)
    assert not arrows or nx.is_forest(nx.DiGraph(arrows))
    total = sum(weight[i, p] for p, i in arrows)
    try:
        best = nx.maximum_spanning_arborescence(graph)
    except nx.NetworkXException:
        assert parents.count(-1) > 1
    else:
        assert parents.count(-1) == 1
        assert total == pytest.approx(best.size("weight"))


# queries of a sentence


def test_separated_nodes_do_not_move_each_other():
    s = bt.bayesuvius(4, heads=2, slices=2, mask="causal", observe=Categorical(3)).sentence("the cat sat on")
    assert s.separated("x_0_3", "x_2_1") and not s.separated("x_0_1", "x_2_3")
    trail = s.active_trail("x_0_0", "x_1_2")
    assert str(trail) == "x_0_0 -> k_0_0 -> x_1_2" and len(trail) == 2
    assert s.active_trail("x_0_3", "x_0_1") is None
    assert s.active_trail("x_0_3", "x_0_1", "y_3").colliders
    assert "x_1_1" not in s.do(x_1_1=s.do(c=0)["x_1_1"]).descendants("x_0_0")
    assert s.separations([("x_0_3", "x_2_1"), ("x_0_1", ["x_2_3"], ["c"])]).tolist() == [True, False]
    assert s.minimal_separator("q_0_0", "x_1_0") is None
    assert s.minimal_cut("x_0_3", "y_3") == ["x_2_3"]


def test_determined_nodes_close_what_is_given():
    """The weights follow from c: given c, q_0_0 and k_0_0 of the same given word are constants."""
    s = bt.bayesuvius(4, heads=3, observe=Categorical(2)).sentence("the cat")
    plain = s.separated("y_0", "q_0_1", ["c"], verify=True)
    assert not plain and plain.over_choices == pytest.approx(0) and plain.over_roots > 0.1  # by x_0_1
    assert not s.separated("y_0", "W_v_0", ["c"]) and s.separated("y_0", "W_v_0", ["c"], deterministic=True)
    result = s.separated("y_0", "y_1", verify=True)
    assert not result and result.dependence > 1e-4
    assert s.separated("y_0", "y_1", ["x_1_0"], verify=True).dependence == pytest.approx(0, abs=1e-12)
    assert s.separated("y_0", "y_1", ["c", "x_0_0", "x_0_1"], deterministic=True)


def test_what_is_set_is_known():
    s = bt.bayesuvius(4, heads=3).sentence("the cat").do(c=1)
    assert not s.separated("q_0_0", "q_0_1") and s.separated("q_0_0", "q_0_1", deterministic=True)


@pytest.mark.parametrize("words, between", [(3, True), (2, False)])
def test_a_word_outside_the_query_can_open_a_trail(words, between):
    """Slices share no weight here, so only a word between the given states of both ends connects them."""
    net = bt.bayesuvius(4, slices=2, combine="concat", residual=True, mask="causal")
    s, end = net.sentence(["the", "cat", "sat"][:words]), words - 1
    result = s.separated("x_0_0", f"x_2_{end}", ["x_1_0", f"x_1_{end}"])
    assert bool(result) != between


def test_bad_questions():
    s = bt.bayesuvius(4).sentence("the cat")
    with pytest.raises(bt.BNetError, match="x_0_0 is in both x and given"):
        s.separated("x_0_0", "x_1_0", ["x_0_0"])
    with pytest.raises(bt.BNetError, match="x_0_0 is in both x and y"):
        s.separated("x_0_0", ["x_0_0"])
    with pytest.raises(bt.UnknownNameError, match="x_0_0 to x_1_1"):
        s.active_trail("x_0_9", "x_1_0")
    for side in (3, [3], []):
        with pytest.raises(bt.BNetError):
            s.separated("x_0_0", side)
    with pytest.raises(bt.BNetError, match="question"):
        s.separations(["x_0_0"])
    with pytest.raises(bt.BudgetError, match="at most 3 arrows"):
        s.minimal_cut("x_0_0", "x_1_0", limit=3)
