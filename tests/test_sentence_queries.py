"""Queries of sentences: joint posteriors, samples, do, attention rollout, boxes and trees, counterfactuals."""

import itertools
import math
import random

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer.attention import learn_tan
from bnet_transformer.interventions import Mean, Noise, Zero
from bnet_transformer.interventions.counterfactual import gumbel_max
from bnet_transformer.tpm import Categorical, Normal
from tests.cases import CASES, close, get_case, jitter, two_head_net

D = torch.float64


# probability


def test_a_chain_of_posteriors_is_normalised_and_bounded():
    s = two_head_net(atoms=2).sentence("the cat sat")
    result = s.posterior(["W_k_0", "c", "W_q_0"], {"y_0": 1})
    assert result.shape == (2, 2, 2)
    close(result.sum((0, 2)), s.posterior("c", {"y_0": 1}))
    close(s.posterior(["c", "y_0"], {"y_0": 1})[:, [0, 2]], torch.zeros(2, 2))
    with pytest.raises(bt.BudgetError, match="got 8"):
        s.limits(budget=7).posterior(["W_k_0", "c", "W_q_0"])
    for names in ([], 3, None):
        with pytest.raises(bt.BNetError, match="name: expected"):
            s.posterior(names)
    with pytest.raises(bt.BNetError, match="different nodes"):
        s.posterior(["c", "c"])


def read_nodes(s):
    """The value of the last node of each deterministic group, or the distribution of a random one."""
    results = {}
    for spec in s.net.network.specs:
        name = s.ground.name(int(s.ground.select_nodes(spec.group)[-1]))
        if spec.tpm.kind == "deterministic":
            results[name] = s[name]
        elif spec.tpm.is_random:
            results[name] = getattr(s.tpm(name), "logits", None)
    return results


@pytest.mark.slow  # the tests of the live page include a quick one
@pytest.mark.parametrize("case", [case for case in CASES if case.evidence], ids=lambda case: case.name)
def test_values_after_evidence_are_those_of_a_fresh_sentence(case):
    """Values before evidence are reused: also if it fixes a choice on which they depend."""
    s, evidence = case.sentence, dict(case.evidence)
    for spec in s.net.network.specs:
        if spec.tpm.kind == "discrete" and s.net.network.graph.out_edges[spec.group.index]:
            node = int(s.ground.select_nodes(spec.group)[0])
            evidence.setdefault(s.ground.name(node), s.state.model.count_states(node) - 1)
    values = dict(evidence)
    read_nodes(s)
    observed = s.observe({name: evidence.pop(name) for name in list(evidence)[1:]})
    read_nodes(observed)
    observed = observed.observe(evidence)
    reused, fresh = read_nodes(observed), read_nodes(case.sentence.observe(values))
    assert reused.keys() == fresh.keys()
    for name in reused:
        close(reused[name], fresh[name], 1e-12)


def test_real_readouts_are_drawn_around_their_mean():
    s = two_head_net(observe=Normal(0.5)).sentence("the cat").do(c=1)
    samples = s.sample(4000)["y_0"]
    assert samples.shape == (4000, 4)
    assert (samples.mean(0) - s["x_1_0"]).abs().max() < 0.04 and (samples.std(0) - 0.5).abs().max() < 0.03
    with pytest.raises(bt.EvidenceError, match="x_1_0"):
        s.sample(3, {"x_1_0": torch.ones(4)})


@pytest.mark.parametrize(
    "options",
    [{}, {"slices": 2, "residual": True}, {"per": "word"}, {"atoms": 2}, {"mask": "causal"}, {"observe": Normal(0.5)}],
)
def test_marginal_attention_is_the_mixture_over_words_read(options):
    """p(y_i) = sum_j P(j | i) p(y_i | v_j + residual), for each state of the choices: by hand, from the soft net."""
    soft, hard = (
        two_head_net(**options),
        bt.bayesuvius(4, **{"heads": 2, "observe": Categorical(3), **options}, attention="marginal"),
    )
    hard = hard.replace(dict(soft.parameters)).to(D)
    s, h = soft.sentence("the cat sat"), hard.sentence("the cat sat")
    is_continuous = isinstance(options.get("observe"), Normal)
    observed = {"y_1": torch.tensor([0.1, 0.4, -0.3, 0.2], dtype=D) if is_continuous else 2}
    last = options.get("slices", 1) - 1
    states = {"c_0_1": 2} if options.get("per") == "word" else {"c": 2}
    states |= {f"W_{r}_0": 2 for r in "qkv"} if "atoms" in options else {}
    total = torch.zeros((), dtype=D)
    for indices in itertools.product(*map(range, states.values())):
        setting = dict(zip(states, indices, strict=True))
        word_choices = {"c_0_0": 0, "c_0_2": 0} if "c_0_1" in setting else {}
        fixed = s.do({**setting, **word_choices})
        prior = s.posterior(list(states))[indices] if len(states) > 1 else s.posterior(next(iter(states)))[indices]
        row = fixed.attention(last)[1]
        for j, weight in enumerate(row):
            head = f"{setting['c_0_1']}_" if "c_0_1" in setting else ""
            value = fixed[f"v_{last}_{head}{j}"] + (fixed[f"x_{last}_1"] if options.get("residual") else 0)
            if weight > 0:
                total = total + prior * weight * s.do({f"x_{last + 1}_1": value}).log_prob(observed).exp()
    close(h.log_prob(observed).exp(), total)
    assert "j_1" in h.parents("z_1") and not torch.allclose(h.log_prob(observed), s.log_prob(observed))


def test_attention_is_inferred_only_in_the_marginal_net():
    h = two_head_net(attention="marginal").sentence("the cat sat")
    assert not torch.allclose(h.posterior("j_1", {"y_1": 0}), h.posterior("j_1", {"y_1": 1}))
    close(h.log_prob({"j_1": 2, "y_1": 0}), (h.posterior("j_1", {"y_1": 0})[2]).log() + h.log_prob({"y_1": 0}))
    with pytest.raises(bt.BNetError, match="expected combine='select' and a readout"):
        bt.bayesuvius(4, combine="concat", observe=Categorical(2), attention="marginal")


# do


def test_patterns_families_and_roles_name_nodes():
    s = bt.bayesuvius(4, heads=3, slices=2, combine="concat", observe=Categorical(2)).to(D).sentence("the cat sat")
    assert set(map(s.ground.name, s.state.resolve_interventions({"q_1_*_2": Zero()}))) == {
        f"q_1_{h}_2" for h in range(3)
    }
    sizes = {"q_1": 9, "q": 18, "q_*_1_*": 6, "q_1_*": 9, "q_*_1": 6}
    assert {nodes: len(s.state.resolve_interventions({nodes: Zero()})) for nodes in sizes} == sizes
    patched = s.do({"q_1_*_2": Zero()})
    assert patched.parents("q_1_0_2") == [] and patched.parents("q_1_0_1") and patched["q_1_2_2"].tolist() == [0] * 4
    close(patched.attention(1)[:, 2], torch.full((3, 3), 1 / 3, dtype=D))
    for pattern in ("q_9_*_2", "zz_*", "q_1_*_3"):
        with pytest.raises(bt.UnknownNameError):
            s.do({pattern: Zero()})
    with pytest.raises(bt.EvidenceError, match="has another value already"):
        s.do({"q_1_*_2": Zero(), "q_1_0_2": Zero()})


# The case, the name of several nodes, the name of each, the sizes of the axes, and the choices on which they depend.
NODES_OF_NAMES = [
    ("chapter, two slices", "x", "x_{}_{}", (3, 3), ["c"]),
    ("chapter, two slices", "x_1", "x_1_{}", (3,), ["c"]),
    ("slice", "x", "x_{}_{}", (4, 3), ["c_0", "c_1", "c_2"]),
    ("slice", "x_1", "x_1_{}", (3,), ["c_0"]),
    ("slice", "c", "c_{}", (3,), ["c_0", "c_1", "c_2"]),
    ("slice", "x_*_-1", "x_{}_2", (4,), ["c_0", "c_1", "c_2"]),
    ("word", "x_1", "x_1_{}", (3,), ["c_0_0", "c_0_1", "c_0_2"]),
    ("grouped", "x", "x_{}_{}", (3, 3), []),
    ("grouped", "a_0_*", "a_0_{}_{}_{}", (2, 3, 3), []),
    ("grouped", "q_*_1_*_-1", "q_{}_1_{}_2", (2, 3), []),
    ("encoder-decoder", "dec_x", "dec_x_{}_{}", (3, 2), []),
]


@pytest.mark.parametrize(("name", "family", "form", "sizes", "choices"), NODES_OF_NAMES)
def test_the_value_of_several_nodes_has_an_axis_for_each_choice_and_open_index(name, family, form, sizes, choices):
    """The same numbers as node by node, after `do` of the choices."""
    s = get_case(name).sentence
    counts = [len(s.labels(choice)) for choice in choices]
    value, indices = s[family], [*itertools.product(*map(range, sizes))]
    assert value.shape[: len(counts) + len(sizes)] == (*counts, *sizes)
    for states in itertools.product(*map(range, counts)):
        after = s.do(dict(zip(choices, states, strict=True)))
        for index in indices:
            close(value[(*states, *index)], after[form.format(*index)])


@pytest.mark.parametrize(("name", "family", "form", "sizes", "choices"), NODES_OF_NAMES)
def test_a_value_of_several_nodes_is_a_value_for_each(name, family, form, sizes, choices):
    s = get_case(name).sentence
    indices = [*itertools.product(*map(range, sizes))]
    if choices and family == "c":
        values = torch.arange(len(indices)).reshape(sizes) % 2
    else:
        shape = s.do(dict.fromkeys(choices, 0))[form.format(*indices[0])].shape
        values = torch.arange(math.prod((*sizes, *shape)), dtype=D).reshape(*sizes, *shape) / 7
    expected = s.do({form.format(*index): values[index] for index in indices}).state.interventions
    for value in (values, values.numpy(), values.tolist()):
        actual = s.do({family: value}).state.interventions
        assert actual.keys() == expected.keys() and all(torch.equal(actual[node], expected[node]) for node in actual)
    with pytest.raises(bt.EvidenceError, match="for all nodes"):
        s.do({family: values[1:]})


def test_evidence_of_several_nodes_is_evidence_of_each():
    s = get_case("concat").sentence
    close(s.log_prob({"y": [0, 2, 1]}), s.log_prob({"y_0": 0, "y_1": 2, "y_2": 1}))
    close(s.log_prob({"y": 1}), s.log_prob({f"y_{i}": 1 for i in range(3)}))
    close(s.do({"x_1": torch.tensor(2.0)})["x_1"], torch.full((3, 4), 2.0))  # a number is the value of every entry
    with pytest.raises(bt.EvidenceError, match="another value"):
        s.observe({"y": 1, "y_-1": 0})


def test_words_as_evidence_are_weighed_by_bayes_rule():
    words = ["the", "cat", "sat"]
    net = jitter(bt.bayesuvius(4, heads=3, vocabulary=words, mask="causal", observe=Categorical(3)).to(torch.float64))
    s = net.sentence("the cat sat the cat")
    observed = s.observe_words()
    ids = [words.index(word) for word in s.words]
    heads = [torch.stack([s.do(c=k).posterior(f"y_{i}") for i in range(5)]) for k in range(3)]
    weights = torch.stack([head[range(4), ids[1:]].prod() for head in heads]) * s.posterior("c")
    close(observed.posterior("c"), weights / weights.sum())
    close(observed.posterior("y_4"), torch.einsum("c,cy->y", weights / weights.sum(), torch.stack(heads)[:, 4]))
    best = net.generate("the cat sat the cat", length=1)  # computed word by word, with sums over the choices
    assert best.ids[0][-1] == int(observed.posterior("y_4").argmax())
    two = bt.encoder_decoder(8, heads=2, slices=1, vocabulary=words)
    pair = two.sentence({"enc": ["cat", "sat"], "dec": ["the", "sat", "the"]})
    close(pair.observe_words().log_prob(), pair.log_prob({"dec_y_0": "sat", "dec_y_1": "the"}))
    for bad in (bt.bayesuvius(4), bt.encoder(8, heads=2, slices=1, vocabulary=words, readout="word")):
        with pytest.raises(bt.BNetError, match="predicts the next word"):
            bad.sentence(words).observe_words()


def test_means_and_patches_of_sentences_of_other_lengths():
    """Word i has the value of word i; a sentence without word i is an error that names its length."""
    net = bt.bayesuvius(4, slices=2, combine="concat", residual=True, observe=Categorical(2)).to(D)
    s, long, short = (net.sentence(text) for text in ("the cat sat", "the dog sat the cat", "the dog"))
    close(s.do({"x_1": Mean([s, long])})["x_1_2"], (s["x_1_2"] + long["x_1_2"]) / 2)
    close(s.do({"x_1_1": Mean([short, long])})["x_1_1"], (short["x_1_1"] + long["x_1_1"]) / 2)
    close(s.do({"x_1": long})["x_1_2"], long["x_1_2"])
    for value in (Mean([long, short]), Mean([short]), short):
        for name in ("x_1", "x_1_*", "x_1_2", "q_1_0_2"):
            with pytest.raises(bt.EvidenceError, match=r"_2: .* of 2 words"):
                s.do({name: value})
    with pytest.raises(bt.UnknownNameError):  # another net, whose names differ
        s.do({"x_2_1": Mean([bt.bayesuvius(4).sentence("the cat sat")])})


def test_patching_means_noise_and_undoing():
    net = bt.bayesuvius(4, slices=2, combine="concat", residual=True, observe=Categorical(2)).to(D)
    s, other = net.sentence("the cat sat"), net.sentence("the dog sat")
    patched = s.do({"x_1_*": other})
    close(patched["x_2_2"], net.sentence("the dog sat").do({f"x_1_{i}": other[f"x_1_{i}"] for i in range(3)})["x_2_2"])
    close(patched["x_2_0"], other["x_2_0"])
    mean = s.do({"x_1_1": Mean([s, other])})
    close(mean["x_1_1"], (s["x_1_1"] + other["x_1_1"]) / 2)
    close(s.do({"x_1_*": Mean()})["x_1_0"], torch.stack([s[f"x_1_{i}"] for i in range(3)]).mean(0))
    noisy = s.do({"x_1": Noise(0.1, seed=4)})
    assert 0 < (noisy["x_1_0"] - s["x_1_0"]).abs().max() < 0.6
    close(noisy["x_1_2"], s.do(x_1_2=Noise(0.1, seed=4))["x_1_2"])
    assert not torch.equal(noisy["x_1_0"] - s["x_1_0"], noisy["x_1_1"] - s["x_1_1"])
    restored = patched.do(q_1_0_0=Zero()).undo("x_1_*")
    assert restored.state.interventions.keys() == {s.ground.id("q_1_0_0")}
    close(restored.undo()["x_2_1"], s["x_2_1"])
    with pytest.raises(bt.BNetError, match="undo"):
        s.undo()
    with pytest.raises(bt.EvidenceError, match="not both"):
        s.observe(y_0=1).do({"y": 0})
    with pytest.raises(bt.EvidenceError, match="y_0"):
        s.do(y_0=Zero())


@pytest.mark.parametrize(
    "name",
    ["codebook", *(pytest.param(name, marks=pytest.mark.slow) for name in ("slice", "two selectors", "marginal"))],
)
def test_separated_nodes_are_independent_in_the_numbers(name):
    """By d-separation and by D-separation (deterministic=True); some pairs are separated only in the second sense."""
    s = get_case(name).sentence
    pick, counts = random.Random(2), {"plain": 0, "determined": 0, "dependent": 0}
    names = [n for n in s.nodes if "y" not in n or n.endswith("y_0")]
    for _ in range(30):
        x, y, *observed = pick.sample(names, pick.randint(2, 4))
        if pick.random() < 0.5:
            observed += [n for n in names if not s.parents(n) and n not in (x, y, *observed) and pick.random() < 0.9]
        plain, closed = (s.separated(x, y, observed, deterministic=d) for d in (False, True))
        assert closed or not plain
        if closed or counts["dependent"] < 2:
            try:
                result = s.separated(x, y, observed, deterministic=True, verify=True)
            except bt.BNetError:  # real readouts, and choices that exceed the budget
                continue
            assert result.dependence == pytest.approx(0, abs=1e-9) or not result
            counts["dependent"] += result.dependence > 1e-6
            counts["plain" if plain else "determined"] += bool(result)
    assert counts["plain"] and (counts["determined"] or name == "codebook")


# reading paths


def rollout(attentions):
    """Abnar and Zuidema (2020), as published: A = 0.5 W + 0.5 I, rows normalised, multiplied from the first on."""
    joint = None
    for weights in attentions:
        mixed = weights.mean(0) + torch.eye(weights.shape[-1], dtype=weights.dtype)
        mixed = mixed / mixed.sum(-1, keepdim=True)
        joint = mixed if joint is None else mixed @ joint
    return joint


@pytest.mark.parametrize("options", [{}, {"mask": "causal", "residual": True}])
def test_rollout_is_the_published_one(options):
    s = two_head_net(combine="concat", heads=3, slices=3, **options).sentence("the cat sat on")
    result = s.reads()
    close(result.matrix, rollout([s.attention(t) for t in range(3)]))
    close(result.matrix.sum(-1), torch.ones(4))
    single = s.reads([1, 2], head=1, residual=0.0)
    close(single.matrix, s.attention(2)[1] @ s.attention(1)[1])
    close(single.entropies, torch.stack([torch.distributions.Categorical(s.attention(t)[1]).entropy() for t in (1, 2)]))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["c"]),
        ({"atoms": 2}, ["W_q_0", "W_k_0", "W_v_0", "W_q_1", "W_k_1"]),
        ({"per": "slice"}, ["c_0", "c_1"]),
        ({"per": "word"}, ["c_0_0", "c_0_1", "c_1_0", "c_1_1"]),
    ],
)
def test_under_a_selector_products_are_averaged(options, names):
    s = two_head_net(slices=2, heads=3, **options).sentence("the cat")
    evidence, total = {"y_1": 2}, 0
    posterior = s.posterior(names, evidence)
    for states in itertools.product(*map(range, posterior.shape)):
        fixed = s.do(dict(zip(names, states, strict=True)))
        total = total + posterior[states] * (fixed.attention(1) @ fixed.attention(0))
    result = s.reads(evidence=evidence, residual=0.0)
    close(result.matrix, total)
    marginal = [sum(w * a[t] for w, a in zip(result.weights, result.attention, strict=True)) for t in (0, 1)]
    assert not torch.allclose(result.matrix, marginal[1] @ marginal[0])


def test_bad_readings():
    s = two_head_net(slices=3).sentence("the cat")
    for wrong in ({"residual": 2}, {"head": 0}, {"method": "x"}, {"slices": [0, 2]}, {"slices": 3}, {"slices": "some"}):
        with pytest.raises(bt.BNetError):
            s.reads(**wrong)
    with pytest.raises(bt.BNetError, match="from 0 to 1"):
        s.reads().paths(2)
    with pytest.raises(bt.BNetError, match=r"P\(j"):
        get_case("cayley").sentence.reads()
    with pytest.raises(bt.BudgetError, match="joint states"):
        two_head_net(per="word", slices=2).sentence("a b c d").limits(budget=8).reads()
    pair = get_case("encoder-decoder").sentence
    assert pair.reads(role="dec_a").matrix.shape == (2, 2) and pair.reads(role="enc_a").matrix.shape == (3, 3)
    with pytest.raises(bt.BNetError, match="same stack"):
        pair.reads(role="dec_cross_a")


# boxes


def test_what_a_slice_is_when_shrunk():
    kinds = lambda **options: [  # noqa: E731
        (result.kind, result.nearly)
        for result in (bt.bayesuvius(4, **options).sentence("the cat sat").tan(boxes) for boxes in ("words", "roles"))
    ]
    assert kinds() == [("no DAG", "no DAG"), ("DAG", "reverse TAN")]
    assert kinds(residual=True) == [("no DAG", "no DAG"), ("reverse TAN", "reverse TAN")]
    assert kinds(mask="causal")[0] == ("augmented naive Bayes", "augmented naive Bayes")
    single = bt.bayesuvius(4, mask=[[True, False], [False, True]]).sentence("the cat").tan()
    assert single.kind == "naive Bayes"
    pair = bt.bayesuvius(4, mask="causal", slices=2).sentence("the cat").tan(slice=1)
    assert pair.kind == "TAN" and not pair.missing
    roles = bt.bayesuvius(4).sentence("the cat").tan("roles")
    assert roles.missing == ("x_1",) and roles.class_box == "x_0"
    assert bt.bayesuvius(4).sentence("a b").tan({"x_1_0": "out", "x_1_1": "out"}, class_box="x_0_0").kind == "DAG"
    with pytest.raises(bt.BNetError, match="class_box"):
        bt.bayesuvius(4).sentence("a b").tan(class_box="nobody")
    for case in ("concat", "encoder, pre-norm", "word"):
        get_case(case).sentence.tan("words")


@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, {"combine": "concat"}])
def test_the_tree_is_networkxs_and_its_mass_is_what_is_kept(options):
    s = two_head_net(**options).sentence("the cat sat on a mat")
    tree = s.tan_tree()
    A = s.reads(0, residual=0.0).matrix
    graph = nx.DiGraph()
    graph.add_weighted_edges_from((j, i, float(A[i, j])) for i in range(6) for j in range(6) if i != j and A[i, j] > 0)
    best = nx.maximum_spanning_arborescence(graph)
    assert sum(tree.weights) == pytest.approx(best.size("weight")) and tree.parents.count(-1) == 1
    assert tree.mass == pytest.approx(best.size("weight") / float((1 - A.diagonal()).sum()))
    assert 0 < tree.mass <= 1
    isolated = two_head_net(mask=[[True, False], [False, True]]).sentence("a b").tan_tree()
    assert isolated.parents == (-1, -1) and isolated.mass == 1


def test_the_tree_of_a_corpus_is_pgmpys():
    from pgmpy.estimators import TreeSearch

    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 2400)
    a = rng.integers(0, 3, 2400)
    b = np.where(rng.random(2400) < 0.8, a, rng.integers(0, 3, 2400))
    c = np.where(rng.random(2400) < 0.7, (b + label) % 3, rng.integers(0, 3, 2400))
    d = np.where(rng.random(2400) < 0.7, b, rng.integers(0, 3, 2400))
    result = learn_tan(label.tolist(), np.stack([a, b, c, d], 1), ["a", "b", "c", "d"])
    actual = {frozenset((result.boxes[p], box)) for box, p in zip(result.boxes, result.parents, strict=True) if p >= 0}
    frame = pd.DataFrame({"a": a, "b": b, "c": c, "d": d, "class": label})
    search = TreeSearch(frame, root_node="a", n_jobs=1)
    tree = search.estimate(estimator_type="tan", show_progress=False, class_node="class")
    peer = {frozenset(pair) for pair in tree.edges() if "class" not in pair}
    assert actual == peer == {frozenset("ab"), frozenset("bc"), frozenset("bd")}
    from sklearn.metrics import mutual_info_score

    expected = sum((label == k).mean() * mutual_info_score(a[label == k], b[label == k]) for k in (0, 1))
    assert result.information[0, 1] == pytest.approx(expected)
    counts = [[len(np.unique(x[label == k], axis=0)) for x in (a, b, np.stack([a, b], 1))] for k in (0, 1)]
    bias = sum((n_ab - 1) - (n_a - 1) - (n_b - 1) for n_a, n_b, n_ab in counts) / (2 * 2400)
    assert result.corrected[0, 1] == pytest.approx(expected - bias) and bias > 0
    # the divergence of the counts from the product of their conditionals along the tree
    p = np.zeros((2, 3, 3, 3, 3))
    np.add.at(p, (label, a, b, c, d), 1 / 2400)
    ab, bc, bd, B = p.sum((3, 4)), p.sum((1, 4)), p.sum((1, 3)), p.sum((1, 3, 4))
    q = ab[:, :, :, None, None] * (bc / B[..., None])[:, None, :, :, None] * (bd / B[..., None])[:, None, :, None, :]
    expected = (p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum()
    assert result.divergence == pytest.approx(expected)


def test_a_corpus_of_sentences():
    net = two_head_net(heads=2, vocabulary=["a", "b", "c", "d"], observe=Categorical(4))
    texts = [" ".join(words) for words in itertools.islice(itertools.product("abcd", repeat=3), 0, 60, 2)]
    observed = [net.sentence(text).observe(y_0=k % 4, y_2=(k // 4) % 4) for k, text in enumerate(texts)]
    result = net.tan(observed)
    assert result.sentences == 30 and result.parents.count(-1) == 1
    assert net.tan(texts, classes=[k % 2 for k in range(30)]).boxes == ("word_0", "word_1", "word_2")
    for sentences, classes, message in (
        (texts, "c", "evidence"),
        ([*texts, "a b"], [0] * 31, "same length"),
        (texts, [0, 1], "30 labels"),
        ([texts[0]] * 4, [0, 1, 0, 1], "differ"),
    ):
        with pytest.raises(bt.BNetError, match=message):
            net.tan(sentences, classes)


# counterfactuals


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(0, 10**6))
def test_gumbel_max_keeps_the_marginal_and_is_what_noise_says(n, seed):
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.softmax(2 * torch.randn(n, generator=generator, dtype=D), 0) for _ in range(2))
    table = torch.stack([gumbel_max(p, q, k) for k in range(n)])
    close(table.sum(1), torch.ones(n))
    close(p @ table, q)
    close(torch.stack([gumbel_max(p, p, k) for k in range(n)]), torch.eye(n))
    for k, m in itertools.product(
        range(n), repeat=2
    ):  # stability: a state whose odds did not rise above those of k is not chosen
        if m != k and q[m] / p[m] <= q[k] / p[k]:
            assert table[k, m] == 0


def test_gumbel_max_is_what_shared_noise_gives():
    p, q = (
        torch.softmax(torch.tensor(logits, dtype=D), 0) for logits in ([0.3, -0.5, 1.0, 0.0], [-0.6, 0.8, 0.2, 0.1])
    )
    noise = -torch.log(torch.distributions.Exponential(torch.ones((), dtype=D)).sample((200_000, 4)))
    before, after = ((x.log() + noise).argmax(1) for x in (p, q))
    for k in range(4):
        actual = torch.bincount(after[before == k], minlength=4) / (before == k).sum()
        assert (actual - gumbel_max(p, q, k)).abs().max() < 0.01


def test_the_noise_of_a_normal_is_its_residual():
    s = two_head_net(observe=Normal(0.5), heads=3).sentence("the cat")
    y = torch.tensor([0.2, -0.4, 0.3, 1.0], dtype=D)
    new = torch.tensor([1.0, 0.5, -0.5, 0.1], dtype=D)
    result = s.counterfactual("y_1", {"x_0_1": new}, {"y_1": y})
    posterior = s.posterior("c", {"y_1": y})
    expected = sum(posterior[c] * (y - s.do(c=c)["x_1_1"] + s.do(c=c, x_0_1=new)["x_1_1"]) for c in range(3))
    close(result.mean, expected)
    assert result.convention is None
    close(s.counterfactual("y_1", {"x_0_1": s["x_0_1"]}, {"y_1": y}).mean, y)
    state = s.counterfactual("x_1_0", {"x_0_1": new}, {"y_1": y})
    close(state.mean, sum(posterior[c] * s.do(c=c, x_0_1=new)["x_1_0"] for c in range(3)))
    close(state.weights, posterior)
    predicted = s.counterfactual("y_0", {"c": 2}, {"y_1": y})
    close(predicted.mean, s.do(c=2)["x_1_0"])
    close(predicted.sigma, torch.full((3, 4), 0.5), 1e-8)


def test_choices_below_set_nodes_follow_a_convention():
    s = two_head_net(atoms=2, heads=3).sentence("the cat")
    result = s.counterfactual("W_q_0", {"c": 1}, {"W_q_0": 0})
    theta = torch.softmax(s.net.parameters["W_q_0.logits"], -1)
    posterior = s.posterior("c", {"W_q_0": 0})
    close(result.probabilities, sum(posterior[c] * gumbel_max(theta[c], theta[1], 0) for c in range(3)))
    assert "Gumbel-max noise by convention" in result.convention
    close(s.counterfactual("W_q_0", {"c": 1}).probabilities, theta[1])
    close(s.counterfactual("y_1", {"x_0_0": s["x_0_0"]}, {"y_1": 2, "y_0": 1}).probabilities, torch.tensor([0.0, 0, 1]))
    close(s.counterfactual("y_1", {"c": 2}).probabilities, s.do(c=2).posterior("y_1"))
    close(s.counterfactual("c", {"W_q_0": 1}, {"y_0": 1}).probabilities, s.posterior("c", {"y_0": 1}))
    with pytest.raises(bt.EvidenceError, match="probability zero"):
        s.counterfactual("y_1", {"c": 0}, {"x_1_0": torch.zeros(4)})
    with pytest.raises(bt.UnknownNameError):
        s.counterfactual("y_9", {"c": 0})


def test_labels_name_the_states_of_discrete_nodes():
    net = bt.bayesuvius(4, heads=3, vocabulary=["the", "cat"], observe=Categorical(2), attention="marginal")
    s = net.sentence("the cat the")
    assert s.labels("y_1") == ("the", "cat") and s.labels("c") == ("0", "1", "2") and s.labels("j_0") == s.words
    with pytest.raises(bt.BNetError, match="x_0_1: expected a discrete node; got a node of kind 'deterministic'"):
        s.labels("x_0_1")
