"""Queries of nets and sentences: template graphs, trails, many states at once, dependence, corpora."""

import itertools
import math
import random
from importlib import import_module

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer.attention import learn_tan
from bnet_transformer.attention.rollout import find_best_paths, max_flow
from bnet_transformer.graph import GroundGraph
from bnet_transformer.graph.d_separation import SeparationQuery, are_separated
from bnet_transformer.graph.queries import find_active_trail, find_minimal_separator
from bnet_transformer.interventions import Attend
from bnet_transformer.tpm import Categorical, Normal
from tests.cases import close, get_case, two_head_net
from tests.test_graph import as_networkx, make_ground_graph, plans

D = torch.float64


def find_discrete(s):
    kinds = {m.group.index: m.tpm.kind for m in s.net.network.specs}
    return [n for n in s.nodes if kinds[s.ground.group_of(s.ground.id(n)).index] == "discrete"]


# the template graph


@settings(max_examples=25, deadline=None)
@given(plans(), st.data())
def test_separation_in_the_template_graph_holds_in_every_ground_graph(plan, data):
    """With deterministic nodes and recurrent arrows; without these the template graph is networkx's DAG."""
    ground = make_ground_graph(plan)
    flat = GroundGraph(ground.template.without_plates, {})
    order = data.draw(st.permutations(range(len(flat))))
    x, y, *remainder = order
    observed = frozenset(remainder[: data.draw(st.integers(0, len(remainder)))])
    functions = data.draw(st.sets(st.sampled_from(range(len(flat)))))
    graph = as_networkx(flat)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    for determined in ((), functions):
        actual = bool(are_separated(flat, [SeparationQuery(frozenset([x]), frozenset([y]), observed)], determined)[0])
        assert determined or actual == nx.is_d_separator(graph, {x}, {y}, set(observed))
        lifted = [
            frozenset(n for k in part for n in ground.select_nodes(ground.template.groups[k]).tolist())
            for part in ([x], [y], observed)
        ]
        assert not actual or bool(are_separated(ground, [SeparationQuery(*lifted)], determined)[0])
    separator = find_minimal_separator(flat, frozenset([x]), frozenset([y]))
    adjacent = graph.has_edge(x, y) or graph.has_edge(y, x)
    assert (separator is None) == adjacent and (adjacent or nx.is_minimal_d_separator(graph, {x}, {y}, set(separator)))


@pytest.mark.parametrize(
    "name",
    ["codebook", "word, two slices", "encoder, pre-norm", "three stacks", "recurrences", "marginal", "hidden states"],
)
def test_structural_queries_of_a_net_are_of_its_template_graph(name):
    net = get_case(name).net
    graph = nx.DiGraph(net.graph())
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    pick = random.Random(4)
    for name in pick.sample(sorted(graph), min(6, len(graph))):
        assert sorted(set(net.parents(name)) - {name}) == sorted(graph.predecessors(name))
        assert sorted(set(net.children(name)) - {name}) == sorted(graph.successors(name))
        assert sorted(net.ancestors(name)) == sorted(nx.ancestors(graph, name))
        assert sorted(net.descendants(name)) == sorted(nx.descendants(graph, name))
        other = pick.choice(sorted(set(graph) - {name}))
        assert (other in net.descendants(name)) == nx.has_path(graph, name, other)
        if nx.is_directed_acyclic_graph(graph):
            assert bool(net.separated(name, other)) == nx.is_d_separator(graph, {name}, {other}, set())
            assert (net.active_trail(name, other) is None) == bool(net.separated(name, other))
            assert net.separations([(name, other)]).tolist() == [bool(net.separated(name, other))]
        if other in net.descendants(name) and other not in net.children(name):
            assert len(net.minimal_cut(name, other)) == nx.node_connectivity(graph, name, other)


def test_names_of_the_template_graph():
    net = bt.bayesuvius(4, slices=2, heads=3, observe=Categorical(2))
    assert net.blanket("c") == ["W_q_0", "W_k_0", "W_v_0", "W_q_1", "W_k_1", "W_v_1"]
    assert str(net.active_trail("x_0", "y", given=["x_1"])) == "x_0 -> q_0 <- W_q_0 <- c -> W_q_1 -> q_1 -> x_2 -> y"
    assert net.minimal_cut("x_0", "x_2") == ["x_1"]
    with pytest.raises(bt.UnknownNameError, match="q_0_1"):
        net.separated("q_0_1", "x_2")
    with pytest.raises(bt.BNetError, match="x_0 is in both x and given"):
        net.separated("x_0", "x_2", ["x_0"])
    # the ground graph may separate more than the template graph: a word that attends only to itself
    diagonal = bt.bayesuvius(4, mask=[[True, False], [False, True]])
    weights = [f"W_{r}_0" for r in "qkv"]
    assert not diagonal.separated("x_0", "x_1", weights)
    assert diagonal.sentence("a b").separated("x_0_0", "x_1_1", weights)


# trails among determined nodes


@settings(max_examples=25, deadline=None)
@given(plans(), st.data())
def test_a_trail_without_determined_nodes_exists_unless_separated(plan, data):
    ground = make_ground_graph(plan)
    assume(len(ground) > 2)
    nodes = data.draw(st.lists(st.integers(0, len(ground) - 1), min_size=2, max_size=5, unique=True))
    end = data.draw(st.integers(2, 3))
    query = SeparationQuery(frozenset(nodes[:1]), frozenset(nodes[1:end]), frozenset(nodes[end:]))
    functions = data.draw(st.sets(st.sampled_from(range(len(ground.template.groups)))))
    trail = find_active_trail(ground, query, functions)
    assert (trail is None) == bool(are_separated(ground, [query], functions)[0])
    if trail is None:
        return
    graph = as_networkx(ground)
    determined = set(query.given)
    functional = {n for n in graph if (f := ground.group_of(n).index) in functions and ground.template.in_edges[f]}
    while added := {n for n in functional - determined if set(graph.predecessors(n)) <= determined}:
        determined |= added
    ids = [ground.id(name) for name in trail.nodes]
    colliders = {ground.id(name) for name in trail.colliders}
    assert not (set(ids) - colliders) & determined
    assert all(
        graph.has_edge(a, b) if f else graph.has_edge(b, a)
        for a, b, f in zip(ids, ids[1:], trail.forward, strict=False)
    )
    assert colliders <= query.given.union(*(nx.ancestors(graph, z) for z in query.given))


# posteriors and do, against pgmpy

NETS = [
    {"per": "corpus", "atoms": (2, 1, 3)},
    {"per": "word", "slices": 2},
    {"attention": "marginal"},
    {"observe": Normal(0.5), "atoms": 2},
    {"observe": Categorical(3, pool="mean"), "slices": 2},
]


def query_pgmpy(model, nodes, evidence):
    from pgmpy.inference import VariableElimination

    result = VariableElimination(model).query(nodes, evidence=evidence, show_progress=False)
    return torch.tensor(np.moveaxis(result.values, [result.variables.index(n) for n in nodes], range(len(nodes))))


@pytest.mark.parametrize("options", NETS, ids=str)
def test_every_posterior_and_every_do_is_pgmpys(options):
    """Joint and single posteriors given random evidence, and after `do`, which is surgery in pgmpy too."""
    s, pick = two_head_net(**options).sentence("the cat"), random.Random(str(options))
    names = find_discrete(s)
    is_continuous = isinstance(options.get("observe"), Normal)
    for k in range(4):
        nodes = pick.sample(names, min(len(names), pick.choice([1, 2, 3])))
        candidates = [n for n in names if n not in nodes]
        evidence = {
            n: pick.randrange(len(s.posterior(n)))
            for n in pick.sample(candidates, min(len(candidates), pick.randint(0, 2)))
        }
        if is_continuous and k % 2:
            evidence["y_1"] = torch.tensor([0.1, -0.2, 0.4, 0.3], dtype=D)
        do = {n: evidence.pop(n) for n in list(evidence)[:1] if n not in ("y_1",) and k % 2}
        intervened = s.do(do) if do else s
        model = intervened.observe(evidence).to_pgmpy()
        close(intervened.posterior(nodes, evidence), query_pgmpy(model, nodes, model.graph["evidence"]), 1e-8)
        if do and not is_continuous:
            prior_model = s.to_pgmpy()
            states = {n: str(state) for n, state in {**do, **evidence}.items()}
            close(intervened.posterior(nodes, evidence), query_pgmpy(prior_model.do(list(do)), nodes, states), 1e-8)


# draws


@pytest.mark.parametrize("limit", [0, 2**12])
@pytest.mark.parametrize(
    "options", [{"atoms": 2, "slices": 2}, {"per": "word", "slices": 2}, {"attention": "marginal"}]
)
def test_draws_along_a_chain_and_from_the_whole_have_the_joint_frequencies(limit, options, monkeypatch):
    monkeypatch.setattr(import_module("bnet_transformer.inference.sampling"), "MAX_JOINT_STATES", limit)
    s, n = two_head_net(**options).sentence("the cat"), 6000
    evidence = {"y_0": 1}
    samples = s.sample(n, evidence, seed=5)
    names = [*[name for name in find_discrete(s) if name != "y_0"][:2], "y_1"]
    expected = s.posterior(names, evidence)
    indices = sum(samples[name] * math.prod(expected.shape[k + 1 :]) for k, name in enumerate(names))
    actual = torch.bincount(indices, minlength=expected.numel()) / n
    assert (actual - expected.flatten()).abs().max() < 4.5 * math.sqrt(0.25 / n)


# flows and paths


@pytest.mark.parametrize(("count", "n"), [(1, 4), (2, 5), (3, 5), (4, 4)])
def test_the_greatest_flow_is_networkxs(count, n):
    generator = torch.Generator().manual_seed(count)
    steps = torch.softmax(3 * torch.randn(2, count, n, n, generator=generator, dtype=D), -1)
    steps[:, 0, 0, 1:] = 0
    flow = max_flow(steps)
    for s, i, j in itertools.product(range(2), range(n), range(n)):
        graph = nx.DiGraph()
        for t, a, b in itertools.product(range(count), range(n), range(n)):
            graph.add_edge((t + 1, a), (t, b), capacity=float(steps[s, t, a, b]))
        assert float(flow[s, i, j]) == pytest.approx(nx.maximum_flow_value(graph, (count, i), (0, j)), abs=1e-11)


def test_flows_past_the_budget_are_refused():
    with pytest.raises(bt.BudgetError, match="rollout"):
        max_flow(torch.rand(1100, 3, 8, 8, dtype=D))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 4), st.integers(0, 10**6))
def test_paths_are_the_most_probable_of_all_over_the_states(states, slices, n, seed):
    generator = torch.Generator().manual_seed(seed)
    steps = torch.softmax(2 * torch.randn(states, slices, n, n, generator=generator, dtype=D), -1)
    weights = torch.softmax(torch.randn(states, generator=generator, dtype=D), 0)
    probs = {}
    for words in itertools.product(range(n), repeat=slices):
        path = (n - 1, *words)
        prob = weights.clone()
        for k, (i, j) in enumerate(itertools.pairwise(path)):
            prob = prob * steps[:, slices - 1 - k, i, j]
        probs[path] = float(prob.sum())
    paths = find_best_paths(weights, steps, n - 1, 5)
    assert [p for p, _ in paths] == pytest.approx(sorted(probs.values(), reverse=True)[:5])
    assert all(probs[words] == pytest.approx(p) for p, words in paths)


def test_a_path_is_ranked_by_all_heads_together():
    s = bt.bayesuvius(dim=4, heads=3, slices=2, seed=1).to(D).sentence("the cat sat")
    result = s.reads(residual=0.0)
    best, second = result.paths(2, 2)
    assert best.words == (2, 0, 1) and best.probability == pytest.approx(0.184, abs=1e-3)
    total = sum(s.do(c=c).attention(1)[2, 0] * s.do(c=c).attention(0)[0, 1] for c in range(3)) / 3
    assert best.probability == pytest.approx(float(total)) and second.probability < best.probability
    probs = [float(s.do(c=c).attention(1)[2, 0] * s.do(c=c).attention(0)[0, 1]) for c in range(3)]
    assert best.choices == {"c": int(np.argmax(probs))} and best.share == pytest.approx(max(probs) / sum(probs))
    assert str(best).endswith(f"of it with c={best.choices['c']})")


def test_entropies_are_also_reported_per_head():
    s = two_head_net(combine="concat", heads=3, slices=2).sentence("the cat sat")
    result = s.reads()
    for t in range(2):
        entropies = torch.distributions.Categorical(s.attention(t)).entropy()
        close(result.head_entropies[t], entropies)
        assert bool((result.entropies[t] > entropies.mean(0)).all())
    close(s.reads(head=1).head_entropies[:, 0], result.head_entropies[:, 1])
    mixture = two_head_net(heads=3).sentence("the cat").reads(evidence={"y_0": 1})
    close(mixture.head_entropies[:, 0], mixture.entropies)


# dependence


def test_the_partial_correlation_is_that_of_the_linear_net():
    """Compared with derivatives of the compiled net by its words, and with the formula with a pseudo-inverse."""
    net = two_head_net(combine="concat", slices=2, observe=None)
    s = net.sentence("the cat sat")
    x0 = torch.stack([s[f"x_0_{i}"] for i in range(3)])[None]
    module = net.module().eval()

    def J(group, word):
        value = lambda x: module(x, want=[group])[group][0, word]  # noqa: E731
        return torch.autograd.functional.jacobian(value, x0).reshape(4, -1)

    for y, observed in (("x_2_2", []), ("x_2_2", ["x_1_2"]), ("x_1_1", ["x_2_0", "x_2_1"])):
        J_x = torch.eye(12, dtype=D)[:4]
        jacobians = {n: J(n.rpartition("_")[0], int(n[-1])) for n in (y, *observed)}
        J_y = jacobians[y]
        J_z = torch.cat([jacobians[n] for n in observed]) if observed else torch.zeros(1, 12, dtype=D)
        proj = torch.eye(12, dtype=D) - J_z.T @ torch.linalg.pinv(J_z @ J_z.T, rtol=1e-12) @ J_z
        C = J_x @ proj @ J_y.T
        expected = (
            (C / torch.outer((J_x @ proj @ J_x.T).diagonal().sqrt(), (J_y @ proj @ J_y.T).diagonal().sqrt()))
            .abs()
            .max()
        )
        result = s.separated("x_0_0", y, observed, verify=True)
        assert result.over_roots == pytest.approx(float(expected), abs=1e-6) and result.over_choices is None
        assert result.dependence == result.over_roots > 0.05


def test_dependence_under_a_row_of_attention_that_is_set():
    net = bt.decoder(8, heads=2, slices=2, vocabulary=["the", "cat", "sat"])  # float32; the check is in float64
    s = net.sentence("the cat sat").do({"a_0_*_1": Attend([0.0, 1.0, 0.0])})
    result = s.separated("x_0_0", "y_1", verify=True)  # word 1 reads word 0 in slice 1 only
    assert not result.separated and result.dependence > 1e-4
    both = s.do({"a_1_*_1": Attend([0.0, 1.0, 0.0])}).separated("x_0_0", "y_1", verify=True)
    assert both.dependence == 0  # the arrow of a value with weight 0 stays in the graph


def test_ids_represent_the_vectors_that_they_select():
    s = get_case("encoder, post-norm").sentence
    assert s.separated("token_1", "x_1_2", verify=True).dependence > 1e-3
    roots = [n for n in s.nodes if not s.parents(n) and n != "token_0"]
    assert s.separated("embed_0", "embed_1", roots, deterministic=True, verify=True).dependence == 0
    assert s.separated("x_0_1", "x_1_2", [*roots, "token_0"], deterministic=True, verify=True).dependence == 0
    assert s.separated("token_0", "y_2", verify=True).over_roots > 1e-4


# boxes


def test_several_trees_are_a_forest_and_a_circle_no_tree():
    mask = torch.eye(4, dtype=torch.bool)
    mask[1, 0] = mask[3, 2] = True
    result = bt.bayesuvius(4, mask=mask.tolist()).sentence("a b c d").tan()
    assert result.kind == "forest augmented naive Bayes"
    mask[2, 1] = True
    assert bt.bayesuvius(4, mask=mask.tolist()).sentence("a b c d").tan().kind == "TAN"
    mask = torch.eye(4, dtype=torch.bool)
    mask[2, 0] = mask[2, 1] = True
    reverse = bt.bayesuvius(4, mask=mask.tolist()).sentence("a b c d").tan()
    assert reverse.kind == "reverse forest augmented naive Bayes"
    cyclic = bt.bayesuvius(4).sentence("a b").tan()
    assert cyclic.kind == "no DAG"


def test_boxes_of_a_stack():
    s = get_case("encoder-decoder").sentence
    assert all(box == "class" or box.startswith("word_") for box in s.tan(stack="dec").quotient.boxes)
    assert {b.partition("_")[0] for b in s.tan("roles", stack="dec").quotient.boxes} == {"dec"}
    assert len(s.tan(stack="enc").quotient.boxes) == 1 + s.ground.word_counts["enc"]
    with pytest.raises(bt.BNetError, match="stack=, one of enc, dec"):
        s.tan()
    with pytest.raises(bt.UnknownNameError, match="stack"):
        s.tan(stack="decoder")


def test_a_tree_uses_evidence():
    s = two_head_net(heads=3, slices=1).sentence("the cat sat on a mat")
    tree = s.tan_tree(0, {"c": 2})
    assert tree == s.do(c=2).tan_tree(0).__class__(**{**vars(s.do(c=2).tan_tree(0)), "head": tree.head})
    assert tree.weights != s.tan_tree(0).weights


# corpora


def test_a_divergence_is_reported_only_for_enough_sentences():
    """Independent codes have zero divergence: the estimate is near zero, and nearer with the bias correction."""
    rng = np.random.default_rng(0)
    for sentences, n, is_reported in ((1000, 3, True), (1000, 6, False)):
        codes = rng.integers(0, n, (sentences, n))
        result = learn_tan(rng.integers(0, 2, sentences).tolist(), codes, [f"w{i}" for i in range(n)])
        assert (result.divergence is not None) == is_reported == (result.divergence_corrected is not None)
        if is_reported:
            assert abs(result.divergence_corrected) < abs(result.divergence) < 0.05
            assert result.no_divergence_reason is None and "nats from the TAN" in result.caption
        else:
            assert f"{result.joint_states} joint states" in result.no_divergence_reason
            assert result.no_divergence_reason in result.caption


def corrected_entropy(*columns):
    counts = np.unique(np.stack(columns, 1), axis=0, return_counts=True)[1]
    freqs = counts / counts.sum()
    return -(freqs * np.log(freqs)).sum(), (len(counts) - 1) / (2 * counts.sum())


def test_the_correction_has_its_sign_and_chooses_the_tree():
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 16, (2, 1000))
    u = rng.random(1000)
    c = np.where(u < 0.35, a % 2, np.where(u < 0.7, b % 2, rng.integers(0, 2, 1000)))
    result = learn_tan([0] * 1000, np.stack([a, b, c], 1), ["a", "b", "c"])
    columns = [a, b, c]
    for i, j in itertools.combinations(range(3), 2):
        parts = [
            corrected_entropy(columns[i]),
            corrected_entropy(columns[j]),
            corrected_entropy(columns[i], columns[j]),
        ]
        plain, correction = (x + y - xy for x, y, xy in zip(*parts, strict=True))
        assert result.information[i, j] == pytest.approx(plain) and result.corrected[i, j] == pytest.approx(
            plain + correction
        )
    edges = {frozenset((i, p)) for i, p in enumerate(result.parents) if p >= 0}
    assert edges == {frozenset((0, 2)), frozenset((1, 2))}  # a and b are independent
    assert result.information[0, 1] > result.information[0, 2]  # without the correction they would be a pair
    small = rng.integers(0, 2, (2000, 4))
    small[:, 3] = small[:, 0] ^ small[:, 1]
    tan = learn_tan([0] * 2000, small, list("abcd"))
    joint, single = corrected_entropy(*small.T), [corrected_entropy(column) for column in small.T]
    tree_edges = [(i, p) for i, p in enumerate(tan.parents) if p >= 0]
    expected = sum(sum(terms) for terms in single) - sum(joint) - sum(tan.corrected[edge] for edge in tree_edges)
    assert tan.divergence_corrected == pytest.approx(expected) and tan.divergence_corrected > 0.01


def make_sentences(net, count=12):
    texts = [" ".join(w) for w in itertools.islice(itertools.product("abcd", repeat=3), 0, 2 * count, 2)]
    return [net.sentence(text) for text in texts]


def make_corpus_net(**options):
    net = bt.bayesuvius(4, heads=3, vocabulary=list("abcd"), observe=Categorical(4), seed=4, **options).to(D)
    generator = torch.Generator().manual_seed(4)
    scale = lambda name: 1.0 if "logits" in name else 2.0  # noqa: E731
    parameters = {
        k: v + scale(k) * torch.randn(v.shape, generator=generator, dtype=D) for k, v in sorted(net.parameters.items())
    }
    return net.replace(parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["c", "W_q_0", "y_1"])
def test_words_are_coded_given_the_observed_class(name):
    net = make_corpus_net(atoms=2)
    observed = [s.observe(y_0=k % 4, y_2=(k // 4) % 4) for k, s in enumerate(make_sentences(net))]
    result = net.tan(observed, name)
    labels = [int(s.posterior(name).argmax()) for s in observed]

    def compute_table(given):
        matrices = [s.reads(0, evidence, residual=0.0).matrix for s, evidence in zip(observed, given, strict=True)]
        return np.stack([matrix.argmax(-1).numpy() for matrix in matrices])

    expected = learn_tan(labels, compute_table([{name: label} for label in labels]), ["a", "b", "c"])
    np.testing.assert_allclose(result.information, expected.information)
    if name != "y_1":
        unconditional = learn_tan(labels, compute_table([{} for _ in labels]), ["a", "b", "c"])
        assert not np.allclose(result.information, unconditional.information)


def test_classes_may_be_observed_nodes_arrays_and_tensors():
    net = make_corpus_net()
    sentences = make_sentences(net)
    classes = [k % 2 for k in range(12)]
    observed = [s.observe(c=k) for s, k in zip(sentences, classes, strict=True)]
    by_node = net.tan(observed, "c")
    table = np.stack([s.reads(0, residual=0.0).matrix.argmax(-1).numpy() for s in observed])
    np.testing.assert_allclose(by_node.information, learn_tan(classes, table, list("abc")).information)
    plain = net.tan(sentences, classes)
    for same in (np.array(classes), torch.tensor(classes), [torch.tensor(k) for k in classes], list(map(str, classes))):
        np.testing.assert_allclose(net.tan(sentences, same).information, plain.information)
    for invalid in ([[0]] * 12, [([0],)] * 12, np.zeros((12, 1)), [math.nan] * 12, 3):
        with pytest.raises(bt.BNetError, match="classes"):
            net.tan(sentences, invalid)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("count", [4, 70, pytest.param(63, marks=SLOW), pytest.param(64, marks=SLOW)])
def test_choices_of_one_state_are_set_choices_for_any_number_of_words(count, tmp_path):
    net = bt.bayesuvius(4, heads=1, per="word", slices=2, vocabulary=["the", "cat"], observe=bt.tpm.Categorical(2))
    s = net.sentence(["the", "cat"] * (count // 2) + ["the"] * (count % 2)).observe({"y_3": 1, "y_1": 0})
    known = s.do({f"c_{t}_{i}": 0 for t in (0, 1) for i in range(count)})
    choices = [f"c_0_{i}" for i in range(count)]
    torch.testing.assert_close(s.log_prob(), known.log_prob())
    torch.testing.assert_close(s.posterior(["y_0", *choices[:63]]).flatten(), known.posterior("y_0"))
    torch.testing.assert_close(s.reads().matrix, known.reads().matrix)
    samples = s.sample(4)
    assert all(samples[name].eq(0).all() for name in choices)
    assert s.most_probable(nodes=[*choices, "y_0"])["y_0"].item() == known.most_probable(nodes="y_0")["y_0"].item()
    # A choice of a single state has a dim where at most 64 dims are the result: the values are those after do.
    close = torch.testing.assert_close
    close(s["x_2_0"].flatten(), known["x_2_0"])
    close(s.attention(1).reshape(count, count), known.attention(1))
    close(s["x_2"].reshape(count, -1), known["x_2"])
    close(s.tpm("y_0").logits.flatten(), known.tpm("y_0").logits)
    assert s["x_2_0"].dim() == (1 if count + 2 > 64 else count + 2)
    if count != 70:
        s.draw(tmp_path / "a.html")
        s.draw(tmp_path / "a.svg", detail="words", words=range(4))
    else:
        with pytest.raises(bt.BNetError, match="64"):
            s.posterior(choices)
