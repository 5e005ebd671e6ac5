"""More of what nets and sentences are asked: folded graphs, trails, many states at once, dependence, corpora."""

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
from bnet_transformer import reference
from bnet_transformer.attention import learn_tan
from bnet_transformer.attention.rollout import find_best_paths, max_flow
from bnet_transformer.graph import GroundGraph
from bnet_transformer.graph.d_separation import SeparationQuery, are_separated
from bnet_transformer.graph.queries import find_active_trail, find_minimal_separator
from bnet_transformer.tpm import Categorical, Normal
from tests.cases import close, get_case, two_head_net
from tests.test_graph import as_networkx, grounded, plans

D = torch.float64


def discrete(s):
    kinds = {m.group.index: m.tpm.kind for m in s.net.network.specs}
    return [n for n in s.topological_order() if kinds[s.ground.group_of(s.ground.id(n)).index] == "discrete"]


# the folded graph


@settings(max_examples=50, deadline=None)
@given(plans(), st.data())
def test_what_the_folded_graph_separates_every_ground_graph_does(plan, data):
    """With functions and recurrent arrows; and without these the folded graph is networkx's DAG."""
    ground = grounded(plan)
    flat = GroundGraph(ground.template.without_plates, {})
    order = data.draw(st.permutations(range(len(flat))))
    x, y, *remainder = order
    known = frozenset(remainder[: data.draw(st.integers(0, len(remainder)))])
    functions = data.draw(st.sets(st.sampled_from(range(len(flat)))))
    graph = as_networkx(flat)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    for some in ((), functions):
        separate = bool(are_separated(flat, [SeparationQuery(frozenset([x]), frozenset([y]), known)], some)[0])
        assert some or separate == nx.is_d_separator(graph, {x}, {y}, set(known))
        lifted = [
            frozenset(n for k in part for n in ground.select_nodes(ground.template.groups[k]).tolist())
            for part in ([x], [y], known)
        ]
        assert not separate or bool(are_separated(ground, [SeparationQuery(*lifted)], some)[0])
    result = find_minimal_separator(flat, frozenset([x]), frozenset([y]))
    joined = graph.has_edge(x, y) or graph.has_edge(y, x)
    assert (result is None) == joined and (joined or nx.is_minimal_d_separator(graph, {x}, {y}, set(result)))


@pytest.mark.parametrize(
    "name",
    ["codebook", "word, two slices", "encoder, pre-norm", "three stacks", "recurrences", "marginal", "hidden states"],
)
def test_a_net_answers_for_its_folded_graph(name):
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
        assert net.reaches(name, other) == nx.has_path(graph, name, other)
        if nx.is_directed_acyclic_graph(graph):
            assert bool(net.separated(name, other)) == nx.is_d_separator(graph, {name}, {other}, set())
            assert (net.active_trail(name, other) is None) == bool(net.separated(name, other))
            assert net.separations([(name, other)]).tolist() == [bool(net.separated(name, other))]
        if net.reaches(name, other) and other not in net.children(name):
            assert len(net.minimal_cut(name, other)) == nx.node_connectivity(graph, name, other)


def test_names_of_the_folded_graph():
    net = bt.bayesuvius(4, slices=2, heads=3, observe=Categorical(2))
    assert net.blanket("c") == ["W_q_0", "W_k_0", "W_v_0", "W_q_1", "W_k_1", "W_v_1"]
    assert str(net.active_trail("x_0", "y", given=["x_1"])) == "x_0 -> q_0 <- W_q_0 <- c -> W_q_1 -> q_1 -> x_2 -> y"
    assert net.minimal_cut("x_0", "x_2") == ["x_1"]
    with pytest.raises(bt.UnknownNameError, match="q_0_1"):
        net.separated("q_0_1", "x_2")
    with pytest.raises(bt.BNetError, match="one side"):
        net.separated("x_0", "x_2", ["x_0"])
    # the ground graph may separate what the folded one does not: a word that reads only itself
    single = bt.bayesuvius(4, mask=[[True, False], [False, True]])
    weights = [f"W_{r}_0" for r in "qkv"]
    assert not single.separated("x_0", "x_1", weights)
    assert single.sentence("a b").separated("x_0_0", "x_1_1", weights)


# trails among determined nodes


@settings(max_examples=50, deadline=None)
@given(plans(), st.data())
def test_a_trail_that_passes_nothing_determined_is_there_unless_separated(plan, data):
    ground = grounded(plan)
    assume(len(ground) > 2)
    nodes = data.draw(st.lists(st.integers(0, len(ground) - 1), min_size=2, max_size=5, unique=True))
    end = data.draw(st.integers(2, 3))
    question = SeparationQuery(frozenset(nodes[:1]), frozenset(nodes[1:end]), frozenset(nodes[end:]))
    functions = data.draw(st.sets(st.sampled_from(range(len(ground.template.groups)))))
    trail = find_active_trail(ground, question, functions)
    assert (trail is None) == bool(are_separated(ground, [question], functions)[0])
    if trail is None:
        return
    graph = as_networkx(ground)
    passed = set(question.given)
    functional = {n for n in graph if (f := ground.group_of(n).index) in functions and ground.template.in_edges[f]}
    while more := {n for n in functional - passed if set(graph.predecessors(n)) <= passed}:
        passed |= more
    ids = [ground.id(name) for name in trail.nodes]
    colliders = {ground.id(name) for name in trail.colliders}
    assert not (set(ids) - colliders) & passed
    assert all(
        graph.has_edge(a, b) if f else graph.has_edge(b, a)
        for a, b, f in zip(ids, ids[1:], trail.forward, strict=False)
    )
    assert colliders <= question.given.union(*(nx.ancestors(graph, z) for z in question.given))


def test_a_pair_only_D_separated_has_no_trail_then():
    s = bt.bayesuvius(4, heads=2).sentence("the cat sat")
    assert s.active_trail("q_0_0", "q_0_1", ["c"]) is not None
    assert s.active_trail("q_0_0", "q_0_1", ["c"], deterministic=True) is None
    result = s.active_trail("q_0_0", ["W_q_0", "x_0_0"], ["c"], deterministic=True)
    assert str(result) == "q_0_0 <- x_0_0"  # W_q_0 is known then
    with pytest.raises(bt.BNetError, match="deterministic"):
        s.active_trail("q_0_0", "q_0_1", deterministic=1)


# posteriors and do, against pgmpy

NETS = [
    {"atoms": 2, "heads": 3},
    {"per": "slice", "slices": 2},
    {"per": "corpus", "atoms": (2, 1, 3)},
    {"per": "word"},
    {"per": "word", "slices": 2},
    {"attention": "marginal"},
    {"observe": Normal(0.5), "atoms": 2},
    {"observe": Categorical(3, pool="mean"), "slices": 2},
    {"residual": True, "mask": "causal", "atoms": 2},
]


def theirs(model, nodes, evidence):
    from pgmpy.inference import VariableElimination

    result = VariableElimination(model).query(nodes, evidence=evidence, show_progress=False)
    return torch.tensor(np.moveaxis(result.values, [result.variables.index(n) for n in nodes], range(len(nodes))))


@pytest.mark.parametrize("options", NETS, ids=str)
def test_every_posterior_and_every_do_is_pgmpys(options):
    """Joint and single posteriors given random evidence, and after `do`, which is surgery there too."""
    s, pick = two_head_net(**options).sentence("the cat"), random.Random(str(options))
    names = discrete(s)
    real = isinstance(options.get("observe"), Normal)
    for k in range(4):
        nodes = pick.sample(names, min(len(names), pick.choice([1, 2, 3])))
        remainder = [n for n in names if n not in nodes]
        evidence = {
            n: pick.randrange(len(s.posterior(n)))
            for n in pick.sample(remainder, min(len(remainder), pick.randint(0, 2)))
        }
        if real and k % 2:
            evidence["y_1"] = torch.tensor([0.1, -0.2, 0.4, 0.3], dtype=D)
        done = {n: evidence.pop(n) for n in list(evidence)[:1] if n not in ("y_1",) and k % 2}
        query = s.do(done) if done else s
        model = query.observe(evidence).to_pgmpy()
        close(query.posterior(nodes, evidence), theirs(model, nodes, model.graph["evidence"]), 1e-8)
        if done and not real:
            full = s.to_pgmpy()
            passed = {n: str(state) for n, state in {**done, **evidence}.items()}
            close(query.posterior(nodes, evidence), theirs(full.do(list(done)), nodes, passed), 1e-8)


@pytest.mark.parametrize(
    "options", [{"per": "word", "slices": 2}, {"atoms": (2, 1, 2), "slices": 2}, {"per": "corpus"}]
)
def test_many_states_at_once_are_what_they_are_one_by_one(options):
    s = two_head_net(**options).sentence("the cat")
    slices = list(range(options.get("slices", 1)))
    for t in (s, s.do({"x_0_1": torch.ones(4, dtype=D)})):
        result = t.reads(evidence={"y_1": 2}, residual=0.0)
        total = torch.zeros(2, 2, dtype=D)
        names = list(result.choices[0])
        ids = [t.ground.id(name) for name in names]
        logs = []
        for states in itertools.product(*(range(t.state.model.count_states(node)) for node in ids)):
            world = t.state.model
            passed = dict(zip(names, states, strict=True))
            log = reference.log_evidence(
                world,
                {**{t.ground.id(n): torch.tensor(v) for n, v in passed.items()}, t.ground.id("y_1"): torch.tensor(2)},
            )
            logs.append(log)
            at = t.do(passed)
            rows = [torch.stack([_row(at, f"x_{u + 1}_{i}") for i in range(2)]) for u in slices]
            total = (
                total + log.exp() * torch.linalg.multi_dot(rows[::-1]) if len(rows) > 1 else total + log.exp() * rows[0]
            )
        close(result.matrix, total / torch.stack(logs).exp().sum())
        assert float(result.weights.sum()) == pytest.approx(1)


def _row(s, name):
    words, shares = reference.ReferenceRun(s.state.model, {}).attention(s.ground.id(name))
    return torch.zeros(2, dtype=D).index_add(0, torch.tensor(words), shares)


# draws


@pytest.mark.parametrize("few", [0, 2**12])
@pytest.mark.parametrize(
    "options", [{"per": "word"}, {"atoms": 2, "slices": 2}, {"per": "word", "slices": 2}, {"attention": "marginal"}]
)
def test_draws_along_a_chain_and_from_the_whole_have_the_joint_frequencies(few, options, monkeypatch):
    monkeypatch.setattr(import_module("bnet_transformer.inference.sampling"), "MAX_JOINT_STATES", few)
    s, n = two_head_net(**options).sentence("the cat"), 6000
    evidence = {"y_0": 1}
    samples = s.sample(n, evidence, seed=5)
    names = [*[name for name in discrete(s) if name != "y_0"][:2], "y_1"]
    share = s.posterior(names, evidence)
    code = sum(samples[name] * math.prod(share.shape[k + 1 :]) for k, name in enumerate(names))
    actual = torch.bincount(code, minlength=share.numel()) / n
    assert (actual - share.flatten()).abs().max() < 4.5 * math.sqrt(0.25 / n)


def test_draws_of_choices_that_read_each_other_and_of_vectors():
    s, n = get_case("hidden Markov").sentence, 4000
    samples = s.sample(n, seed=2)
    share = s.posterior(["z_0_0", "z_0_1"])
    actual = torch.bincount(samples["z_0_0"] * 2 + samples["z_0_1"], minlength=4) / n
    assert (actual - share.flatten()).abs().max() < 4.5 * math.sqrt(0.25 / n)
    y = samples["y_1"]
    for state in (0, 1):
        at = s.do({"z_0_1": state})
        mean = at.sample(n, seed=3)["y_1"].mean(0)
        assert (y[samples["z_0_1"] == state].mean(0) - mean).abs().max() < 0.1


# flows and paths


@pytest.mark.parametrize(("count", "n"), [(1, 4), (2, 5), (3, 5), (4, 4)])
def test_the_greatest_flow_is_networkxs(count, n):
    generator = torch.Generator().manual_seed(count)
    steps = torch.softmax(3 * torch.randn(2, count, n, n, generator=generator, dtype=D), -1)
    steps[:, 0, 0, 1:] = 0
    result = max_flow(steps)
    for s, i, j in itertools.product(range(2), range(n), range(n)):
        graph = nx.DiGraph()
        for t, a, b in itertools.product(range(count), range(n), range(n)):
            graph.add_edge((t + 1, a), (t, b), capacity=float(steps[s, t, a, b]))
        assert float(result[s, i, j]) == pytest.approx(nx.maximum_flow_value(graph, (count, i), (0, j)), abs=1e-11)


def test_flows_past_the_budget_are_refused():
    with pytest.raises(bt.BudgetError, match="rollout"):
        max_flow(torch.rand(1100, 3, 8, 8, dtype=D))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 4), st.integers(0, 10**6))
def test_paths_are_the_most_probable_of_all_over_the_states(states, slices, n, seed):
    generator = torch.Generator().manual_seed(seed)
    steps = torch.softmax(2 * torch.randn(states, slices, n, n, generator=generator, dtype=D), -1)
    weights = torch.softmax(torch.randn(states, generator=generator, dtype=D), 0)
    every = {}
    for words in itertools.product(range(n), repeat=slices):
        path = (n - 1, *words)
        share = weights.clone()
        for k, (i, j) in enumerate(itertools.pairwise(path)):
            share = share * steps[:, slices - 1 - k, i, j]
        every[path] = float(share.sum())
    result = find_best_paths(weights, steps, n - 1, 5)
    assert [p for p, _ in result] == pytest.approx(sorted(every.values(), reverse=True)[:5])
    assert all(every[words] == pytest.approx(p) for p, words in result)


def test_a_path_is_ranked_by_all_heads_together():
    s = bt.bayesuvius(dim=4, heads=3, slices=2, seed=1).to(D).sentence("the cat sat")
    result = s.reads(residual=0.0)
    best, second = result.paths(2, 2)
    assert best.words == (2, 0, 1) and best.probability == pytest.approx(0.184, abs=1e-3)
    total = sum(s.do(c=c).attention(1)[2, 0] * s.do(c=c).attention(0)[0, 1] for c in range(3)) / 3
    assert best.probability == pytest.approx(float(total)) and second.probability < best.probability
    item = [float(s.do(c=c).attention(1)[2, 0] * s.do(c=c).attention(0)[0, 1]) for c in range(3)]
    assert best.choices == {"c": int(np.argmax(item))} and best.share == pytest.approx(max(item) / sum(item))
    assert str(best).endswith(f"of it with c={best.choices['c']})")


def test_entropies_are_told_of_each_head_too():
    s = two_head_net(combine="concat", heads=3, slices=2).sentence("the cat sat")
    result = s.reads()
    for t in range(2):
        item = torch.distributions.Categorical(s.attention(t)).entropy()
        close(result.head_entropies[t], item)
        assert bool((result.entropies[t] > item.mean(0)).all())
    close(s.reads(head=1).head_entropies[:, 0], result.head_entropies[:, 1])
    open_ = two_head_net(heads=3).sentence("the cat").reads(evidence={"y_0": 1})
    close(open_.head_entropies[:, 0], open_.entropies)


# dependence


def test_the_partial_correlation_is_that_of_the_linear_net():
    """Against derivatives of the compiled net by its words, and the formula with a pseudo-inverse."""
    net = two_head_net(combine="concat", slices=2, observe=None)
    s = net.sentence("the cat sat")
    x0 = torch.stack([s[f"x_0_{i}"] for i in range(3)])[None]
    module = net.module().eval()

    def J(family, word):
        value = lambda x: module(x, want=[family])[family][0, word]  # noqa: E731
        return torch.autograd.functional.jacobian(value, x0).reshape(4, -1)

    for y, given_ in (("x_2_2", []), ("x_2_2", ["x_1_2"]), ("x_1_1", ["x_2_0", "x_2_1"])):
        J_x = torch.eye(12, dtype=D)[:4]
        at = {n: J(n.rpartition("_")[0], int(n[-1])) for n in (y, *given_)}
        J_y = at[y]
        J_z = torch.cat([at[n] for n in given_]) if given_ else torch.zeros(1, 12, dtype=D)
        left = torch.eye(12, dtype=D) - J_z.T @ torch.linalg.pinv(J_z @ J_z.T, rtol=1e-12) @ J_z
        C = J_x @ left @ J_y.T
        expected = (
            (C / torch.outer((J_x @ left @ J_x.T).diagonal().sqrt(), (J_y @ left @ J_y.T).diagonal().sqrt()))
            .abs()
            .max()
        )
        result = s.separated("x_0_0", y, given_, verify=True)
        assert result.over_roots == pytest.approx(float(expected), abs=1e-6) and result.over_choices is None
        assert result.dependence == result.over_roots > 0.05


def test_ids_stand_for_the_vectors_that_they_choose():
    s = get_case("encoder, post-norm").sentence
    assert s.separated("token_1", "x_1_2", verify=True).dependence > 1e-3
    every = [n for n in s.topological_order() if not s.parents(n) and n != "token_0"]
    assert s.separated("embed_0", "embed_1", every, deterministic=True, verify=True).dependence == 0
    assert s.separated("x_0_1", "x_1_2", [*every, "token_0"], deterministic=True, verify=True).dependence == 0
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
    separate = bt.bayesuvius(4, mask=mask.tolist()).sentence("a b c d").tan()
    assert separate.kind == "reverse forest augmented naive Bayes"
    circle = bt.bayesuvius(4).sentence("a b").tan()
    assert circle.kind == "no DAG"


def test_boxes_of_a_stack():
    s = get_case("encoder-decoder").sentence
    assert all(box == "class" or box.startswith("word_") for box in s.tan(stack="dec").quotient.boxes)
    assert {b.partition("_")[0] for b in s.tan("roles", stack="dec").quotient.boxes} == {"dec"}
    assert len(s.tan(stack="enc").quotient.boxes) == 1 + s.ground.word_counts["enc"]
    with pytest.raises(bt.BNetError, match="stack=, one of enc, dec"):
        s.tan()
    with pytest.raises(bt.UnknownNameError, match="stack"):
        s.tan(stack="decoder")


def test_a_tree_hears_evidence():
    s = two_head_net(heads=3, slices=1).sentence("the cat sat on a mat")
    tree = s.tan_tree(0, {"c": 2})
    assert tree == s.do(c=2).tan_tree(0).__class__(**{**vars(s.do(c=2).tan_tree(0)), "head": tree.head})
    assert tree.weights != s.tan_tree(0).weights


# corpora


def test_a_divergence_is_told_only_where_the_sentences_bear_it():
    """Codes that are independent, so that the divergence is none: what is told is near it, and corrected nearer."""
    rng = np.random.default_rng(0)
    for sentences, n, passed in ((1000, 3, True), (1000, 6, False)):
        codes = rng.integers(0, n, (sentences, n))
        result = learn_tan(rng.integers(0, 2, sentences).tolist(), codes, [f"w{i}" for i in range(n)])
        assert (result.divergence is not None) == passed == (result.divergence_corrected is not None)
        if passed:
            assert abs(result.divergence_corrected) < abs(result.divergence) < 0.05
            assert result.no_divergence_reason is None and "nats from the TAN" in result._repr_html_()
        else:
            assert f"{result.joint_states} joint states" in result.no_divergence_reason
            assert result.no_divergence_reason in result._repr_html_()


def corrected_entropy(*columns):
    counts = np.unique(np.stack(columns, 1), axis=0, return_counts=True)[1]
    share = counts / counts.sum()
    return -(share * np.log(share)).sum(), (len(counts) - 1) / (2 * counts.sum())


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
        plain, extra = (x + y - xy for x, y, xy in zip(*parts, strict=True))
        assert result.information[i, j] == pytest.approx(plain) and result.corrected[i, j] == pytest.approx(
            plain + extra
        )
    edges = {frozenset((i, p)) for i, p in enumerate(result.parents) if p >= 0}
    assert edges == {frozenset((0, 2)), frozenset((1, 2))}  # a and b are independent
    assert result.information[0, 1] > result.information[0, 2]  # and would be a pair, uncorrected
    small = rng.integers(0, 2, (2000, 4))
    small[:, 3] = small[:, 0] ^ small[:, 1]
    passed = learn_tan([0] * 2000, small, list("abcd"))
    joint, single = corrected_entropy(*small.T), [corrected_entropy(column) for column in small.T]
    retained = [(i, p) for i, p in enumerate(passed.parents) if p >= 0]
    expected = sum(sum(item) for item in single) - sum(joint) - sum(passed.corrected[edge] for edge in retained)
    assert passed.divergence_corrected == pytest.approx(expected) and passed.divergence_corrected > 0.01


def spoken(net, count=12):
    text = [" ".join(w) for w in itertools.islice(itertools.product("abcd", repeat=3), 0, 2 * count, 2)]
    return [net.sentence(item) for item in text]


def corpus_net(**options):
    net = bt.bayesuvius(4, heads=3, vocabulary=list("abcd"), observe=Categorical(4), seed=4, **options).to(D)
    generator = torch.Generator().manual_seed(4)
    spread = lambda name: 1.0 if "logits" in name else 2.0  # noqa: E731
    moved = {
        k: v + spread(k) * torch.randn(v.shape, generator=generator, dtype=D) for k, v in sorted(net.parameters.items())
    }
    return net.replace(moved)


@pytest.mark.parametrize("name", ["c", "W_q_0", "y_1"])
def test_words_are_coded_given_the_class_that_is_seen(name):
    net = corpus_net(atoms=2)
    observed = [s.observe(y_0=k % 4, y_2=(k // 4) % 4) for k, s in enumerate(spoken(net))]
    result = net.tan(observed, name)
    labels = [int(s.posterior(name).argmax()) for s in observed]

    def table(given):
        read = [s.reads(0, passed, residual=0.0).matrix for s, passed in zip(observed, given, strict=True)]
        return np.stack([matrix.argmax(-1).numpy() for matrix in read])

    expected = learn_tan(labels, table([{name: label} for label in labels]), ["a", "b", "c"])
    np.testing.assert_allclose(result.information, expected.information)
    if name != "y_1":
        separate = learn_tan(labels, table([{} for _ in labels]), ["a", "b", "c"])
        assert not np.allclose(result.information, separate.information)


def test_classes_may_be_observed_nodes_arrays_and_tensors():
    net = corpus_net()
    text = spoken(net)
    classes = [k % 2 for k in range(12)]
    observed = [s.observe(c=k) for s, k in zip(text, classes, strict=True)]
    by_node = net.tan(observed, "c")
    table = np.stack([s.reads(0, residual=0.0).matrix.argmax(-1).numpy() for s in observed])
    np.testing.assert_allclose(by_node.information, learn_tan(classes, table, list("abc")).information)
    plain = net.tan(text, classes)
    for same in (np.array(classes), torch.tensor(classes), [torch.tensor(k) for k in classes], list(map(str, classes))):
        np.testing.assert_allclose(net.tan(text, same).information, plain.information)
    for bad in ([[0]] * 12, [([0],)] * 12, np.zeros((12, 1)), [math.nan] * 12, 3):
        with pytest.raises(bt.BNetError, match="classes"):
            net.tan(text, bad)
