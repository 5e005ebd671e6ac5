"""Tables with given numbers: from arrays, functions and data frames; textbook networks against pgmpy and sums."""

from __future__ import annotations

import gzip
import itertools
import math
import pickle
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pgmpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from pgmpy.factors.discrete import TabularCPD
from pgmpy.inference import VariableElimination
from pgmpy.models import DiscreteBayesianNetwork
from pgmpy.readwrite import BIFReader

import bnet_transformer as bt
from bnet_transformer.bridges import pgmpy as pgmpy_bridge
from bnet_transformer.bridges.pgmpy import parse_bif
from bnet_transformer.tpm import Categorical, Given, Parent, Table
from tests.discrete_networks import D, check_posteriors, joint, marginal, textbook

YES = ("no", "yes")
WET = [[[1.0, 0.0], [0.1, 0.9]], [[0.1, 0.9], [0.01, 0.99]]]  # P(wet | sprinkler, rain)


def sprinkler() -> bt.BNet:
    """The lawn of Russell and Norvig (2010), with its published tables."""
    nodes = [
        bt.Node("cloudy", Table((0.5, 0.5), YES)),
        bt.Node("sprinkler", Table([[0.5, 0.5], [0.9, 0.1]], YES), ["cloudy"]),
        bt.Node("rain", Table([[0.8, 0.2], [0.2, 0.8]], YES), ["cloudy"]),
        bt.Node("wet", Table(WET, YES), ["sprinkler", "rain"]),
    ]
    return bt.BNet(bt.Declaration(nodes=nodes, name="sprinkler")).to(D)


# networks


def test_the_chest_clinic_has_its_published_probabilities():
    """Lauritzen and Spiegelhalter (1988), table 2; posteriors against pgmpy."""
    net = textbook()
    s = net.sentence()
    published = {"tub": 0.0104, "lung": 0.055, "bronc": 0.45, "either": 0.064828, "xray": 0.11029004, "dysp": 0.4359706}
    for name, expected in published.items():
        assert float(s.posterior(name)[1]) == pytest.approx(expected, abs=1e-10)
    check_posteriors(net, {"asia": 1, "dysp": 1})
    mass = marginal(joint(net), "lung", {"asia": 1, "dysp": 1})
    np.testing.assert_allclose(s.posterior("lung", {"asia": "yes", "dysp": "yes"}), mass / mass.sum(), atol=1e-10)
    assert float(s.log_prob({"asia": 1, "dysp": 1})) == pytest.approx(math.log(mass.sum()), abs=1e-10)


def test_the_sprinkler_is_asked_set_and_sampled():
    s = sprinkler().sentence()
    tables = (np.array([0.5, 0.5]), np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.8, 0.2], [0.2, 0.8]]))
    full = np.einsum("c,cs,cr,srw->csrw", *tables, np.array(WET))
    oracle = VariableElimination(s.to_pgmpy())
    for name, axis in (("cloudy", 0), ("sprinkler", 1), ("rain", 2)):
        observed = full[..., 1].sum(tuple({0, 1, 2} - {axis}))
        np.testing.assert_allclose(s.posterior(name, {"wet": "yes"}), observed / observed.sum(), atol=1e-10)
        peer = oracle.query([name], {"wet": "yes"}, show_progress=False).values
        np.testing.assert_allclose(s.posterior(name, {"wet": 1}), peer, atol=1e-10)
    set_on = np.einsum("c,cr,rw->rw", tables[0], tables[2], np.array(WET)[1])
    np.testing.assert_allclose(s.do(sprinkler="yes").posterior("wet"), set_on.sum(0), atol=1e-10)
    samples = s.sample(4000, seed=0)
    assert float(samples["wet"].double().mean()) == pytest.approx(full[..., 1].sum(), abs=0.03)
    assert not bool(((samples["sprinkler"] == 0) & (samples["rain"] == 0) & (samples["wet"] == 1)).any())


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, derandomize=True)
def test_random_networks_are_those_of_sums_and_of_pgmpy(seed):
    """Random parents, sizes, functions and zeros; evidence that is possible."""
    rng = np.random.default_rng(seed)
    sizes, parents, tables = rng.integers(1, 4, 5).tolist(), [], []
    for k, n in enumerate(sizes):
        parents.append([int(i) for i in rng.permutation(k)[: rng.integers(0, 3)]])
        shape = [sizes[i] for i in parents[k]]
        if parents[k] and rng.random() < 0.3:
            tables.append(Table.from_function(lambda *states, n=n: sum(states) % n, shape, states=n))
        else:
            weights = rng.random((*shape, n)) * (rng.random((*shape, n)) < 0.7) + 1e-3 * np.eye(n)[rng.integers(n)]
            tables.append(Table(weights / weights.sum(-1, keepdims=True)))
    roles = "abcde"
    nodes = [bt.Node(roles[k], tables[k], [roles[i] for i in parents[k]]) for k in rng.permutation(5)]
    s = bt.BNet(bt.Declaration(nodes=nodes)).to(D).sentence()
    operands = [part for k in range(5) for part in (np.asarray(tables[k].probabilities), [*parents[k], k])]
    full = np.einsum(*operands, range(5))
    observed = np.unravel_index(rng.choice(full.size, p=full.ravel() / full.sum()), full.shape)[3:]
    evidence = {"d": int(observed[0]), "e": int(observed[1])}
    mass = full[..., observed[0], observed[1]]
    assert float(s.log_prob(evidence)) == pytest.approx(math.log(mass.sum()), abs=1e-10)
    oracle = VariableElimination(s.to_pgmpy())
    for axis, name in enumerate("abc"):
        expected = mass.sum(tuple({0, 1, 2} - {axis})) / mass.sum()
        np.testing.assert_allclose(s.posterior(name, evidence), expected, atol=1e-10)
        labels = {key: str(value) for key, value in evidence.items()}
        np.testing.assert_allclose(oracle.query([name], labels, show_progress=False).values, expected, atol=1e-10)


@pytest.mark.parametrize("suffix", ["svg", "tex", "json", "bif", "html"])
def test_a_network_of_tables_is_drawn(suffix, tmp_path):
    net = sprinkler()
    net.sentence().observe(wet="yes").draw(tmp_path / f"ground.{suffix}")
    if suffix in ("svg", "tex", "json"):
        net.draw(tmp_path / f"folded.{suffix}")
        assert (tmp_path / f"folded.{suffix}").stat().st_size > 0
    assert (tmp_path / f"ground.{suffix}").stat().st_size > 0


def test_a_learnable_table_is_fitted_and_keeps_its_zeros():
    nodes = [
        bt.Node("a", Table((0.5, 0.5), learnable=True, prior=2.0)),
        bt.Node("b", Table([[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]], learnable=True), ["a"]),
        bt.Node("fixed", Table([[0.25, 0.75], [0.5, 0.5], [0.1, 0.9]]), ["b"]),
    ]
    net = bt.BNet(bt.Declaration(nodes=nodes)).to(D)
    data = {"a": [0, 0, 0, 1, 1], "b": [1, 1, 2, 0, 2], "fixed": [0, 0, 0, 0, 0]}
    theta = bt.fit(net, data, method=bt.EM(steps=2), progress=False).theta
    np.testing.assert_allclose(theta["a"], [4 / 7, 3 / 7], atol=1e-10)  # one pseudo-count for each state
    np.testing.assert_allclose(theta["b"], [[0, 2 / 3, 1 / 3], [1 / 2, 0, 1 / 2]], atol=1e-6)
    np.testing.assert_allclose(theta["fixed"], [[0.25, 0.75], [0.5, 0.5], [0.1, 0.9]], atol=1e-12)
    stepped = bt.fit(net, data, method=bt.MAP(steps=5), progress=False).theta["b"]
    assert float(stepped[0, 0]) == 0 and float(stepped[0, 1]) > 0.5


# words


def chain(tables: int) -> tuple[bt.BNet, list[np.ndarray], np.ndarray]:
    """A hidden Markov model with several independent chains (factorial), its transitions and its emission."""
    rng = np.random.default_rng(tables)
    transitions = [rng.dirichlet(np.ones(2), 2) for _ in range(tables)]
    emission = rng.dirichlet(np.ones(3), (2,) * tables)
    roles = [f"z{chr(97 + k)}" for k in range(tables)]
    nodes = [
        bt.Node(role, Table(transition, initial=(0.3, 0.7)), [bt.Arrow(role, "before")], plates=["word"])
        for role, transition in zip(roles, transitions, strict=True)
    ]
    stack = bt.Stack(nodes, epilogue=[bt.Node("y", Table(emission), roles, plates=["word"])])
    return bt.BNet(bt.Declaration([stack], name="chain")).to(D), transitions, emission


@pytest.mark.parametrize("tables", [1, 2])
def test_a_hidden_markov_model_is_a_sum_over_its_paths(tables):
    """Also a factorial one (Ghahramani and Jordan 1997)."""
    net, transitions, emission = chain(tables)
    y = [2, 0, 1]
    total = np.zeros((2,) * tables)  # by the states of the middle word
    for path in itertools.product(np.ndindex(*(2,) * tables), repeat=3):
        p = 1.0
        for i, states in enumerate(path):
            for k, transition in enumerate(transitions):
                p *= transition[path[i - 1][k], states[k]] if i else (0.3, 0.7)[states[k]]
            p *= emission[(*states, y[i])]
        total[path[1]] += p
    s = net.sentence("a b c")
    evidence = {f"y_{i}": state for i, state in enumerate(y)}
    names = [f"z{chr(97 + k)}_0_1" for k in range(tables)]
    np.testing.assert_allclose(s.posterior(names, evidence).reshape(total.shape), total / total.sum(), atol=1e-10)
    assert float(s.log_prob(evidence)) == pytest.approx(math.log(total.sum()), abs=1e-10)
    if tables == 1:
        np.testing.assert_allclose(s.posterior("za_0_0"), [0.3, 0.7], atol=1e-12)
        assert r"\pi" in net.equations().latex


def test_words_without_input_nodes_are_counted():
    """A mixture at each word, without a given node: EM counts the words of sentences, and not their padding."""
    prior, emission = np.array([0.3, 0.7]), np.array([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]])
    nodes = [
        bt.Node("z", Table(prior, learnable=True), plates=["word"]),
        bt.Node("y", Table(emission), ["z"], plates=["word"]),
    ]
    net = bt.BNet(bt.Declaration([bt.Stack(prologue=nodes)])).to(D)
    rows = [("a b c", [0, 1, 2]), ("a b", [1, 1])]
    fitted = bt.fit(net, rows, method=bt.EM(steps=1, optimizer="first-order"), progress=False)
    y = np.array([0, 1, 2, 1, 1])
    posterior = prior[:, None] * emission[:, y]
    np.testing.assert_allclose(fitted.theta["z"], (posterior / posterior.sum(0)).mean(1), atol=1e-10)
    start = bt.fit(net, rows, method=bt.EM(steps=1, optimizer="first-order"), learn=["z.logits"], progress=False)
    expected = [float(start.net.sentence(t).log_prob({f"y_{i}": k for i, k in enumerate(ys)})) for t, ys in rows]
    numbers = [(len(t.split()) * [0], ys) for t, ys in rows]
    np.testing.assert_allclose(start.log_likelihood(numbers), expected, atol=1e-10)
    batch = net.batch(["a b c", [7, 8]])
    assert batch.x[""].shape == (2, 3) and net.module()(batch.x, batch.mask).shape[-2:] == (3, 3)  # [word, state]
    for empty in ("", [], 3):
        with pytest.raises(bt.BNetError, match="sentence"):
            bt.fit(net, [(empty, [0])], progress=False)


def test_a_hidden_markov_model_is_fitted_by_the_counts_of_its_paths():
    """Baum-Welch: one step from sums over all paths; with a prior, sentences of several lengths, no input node."""
    rng = np.random.default_rng(3)
    initial, *rows_of_z = rng.dirichlet(np.ones(2), 3)
    transition, emission = np.array(rows_of_z), rng.dirichlet(np.ones(3), 2)
    z = Table(transition, initial=initial, learnable=True, prior=1.5)
    nodes = [bt.Node("z", z, [bt.Arrow("z", "before")], plates=["word"])]
    stack = bt.Stack(nodes, epilogue=[bt.Node("y", Table(emission, learnable=True), ["z"], plates=["word"])])
    rows = [("a b c d", [0, 2, 1, 2]), ("a", [1]), ("a b c", [2, 2, 0])]
    counts = {"z_0": np.full((2, 2), 0.5), "z_0.initial": np.full(2, 0.5), "y": np.zeros((2, 3))}
    for _, y in rows:
        paths = list(itertools.product(range(2), repeat=len(y)))
        joint_probs = np.array([
            initial[path[0]] * np.prod([transition[pair] for pair in itertools.pairwise(path)])
            * np.prod([emission[pair] for pair in zip(path, y, strict=True)])
            for path in paths
        ])  # fmt: skip
        for path, p in zip(paths, joint_probs / joint_probs.sum(), strict=True):
            counts["z_0.initial"][path[0]] += p
            for pair in itertools.pairwise(path):
                counts["z_0"][pair] += p
            for pair in zip(path, y, strict=True):
                counts["y"][pair] += p
    net = bt.BNet(bt.Declaration([stack])).to(D)
    theta = bt.fit(net, rows, method=bt.EM(steps=1, optimizer="first-order"), progress=False).theta
    for name, count in counts.items():
        np.testing.assert_allclose(theta[name], count / count.sum(-1, keepdims=True), atol=1e-10)


def test_the_initial_table_keeps_the_axes_of_other_parents():
    table = Table(np.full((2, 3, 2), 0.5), initial=[[0.1, 0.9], [0.2, 0.8], [0.3, 0.7]])
    before, other = Parent("c", states=2, is_optional=True), Parent("d", states=3)
    assert table.shape(before, other) == ()
    assert {name: p.shape for name, p in table.parameters(before, other).items()} == {
        "logits": (2, 3, 2),
        "initial": (3, 2),
    }
    for wrong, parents in (
        (Table(np.full((2, 3, 2), 0.5)), (before, other)),
        (table, (Parent("c", states=2), other)),
        (Table(np.full((2, 3, 2), 0.5), initial=(0.5, 0.5)), (before, other)),
        (Table(np.full((2, 3, 2), 0.5), initial=np.full((2, 2), 0.5)), (before, other)),
    ):
        with pytest.raises(bt.BNetError, match=r"initial|d: "):
            wrong.shape(*parents)


# functions and data frames


def test_a_function_gives_states_labels_or_probabilities():
    as_number = Table.from_function(lambda a, b: (a + b) % 3, (2, 3), states=3)
    table = np.asarray(as_number.probabilities)
    assert all(table[a, b, (a + b) % 3] == 1 for a, b in np.ndindex(2, 3)) and table.sum() == 6
    by_label = Table.from_function(lambda day, n: "wet" if day == "rain" or n else "dry", [("sun", "rain"), 2],
                                   labels=("dry", "wet"))  # fmt: skip
    assert by_label.probabilities == Table.from_function(lambda a, b: a or b, (2, 2), states=2).probabilities
    assert Table.from_function(lambda a: bool(a), (2,), states=2).probabilities == ((1.0, 0.0), (0.0, 1.0))
    mixed = Table.from_function(lambda a: np.array([0.25, 0.75]) if a else 0, (2,), states=2)
    assert mixed.probabilities == ((1.0, 0.0), (0.25, 0.75))
    root = Table.from_function(lambda: torch.tensor([0.5, 0.5]), ())
    assert root.probabilities == (0.5, 0.5) and root.states == 2


@pytest.mark.parametrize(
    ("function", "options", "match"),
    [
        (lambda a, b: 0, {}, "number of states"),
        (lambda a, b: a + b, {"states": 2}, r"\(yes, 1\).*0 to 1"),
        (lambda a, b: "maybe", {"labels": YES}, r"\(no, 0\).*no, yes"),
        (lambda a, b: None, {"states": 2}, r"\(no, 0\)"),
        (lambda a, b: 0.5, {"states": 2}, r"\(no, 0\)"),
        (lambda a, b: [0.5, 0.25, 0.25], {"states": 2}, r"\(no, 0\).*2 prob"),
        (lambda a, b: [0.5, 0.5 + (a == "yes") * b], {}, r"\(yes, 1\).*sum to 1.*sum 2"),
        (lambda a, b: [[1.0]], {}, r"\(no, 0\)"),
        (lambda a, b: [[1.0], 1.0], {}, r"\(no, 0\)"),
    ],
)
def test_an_invalid_result_names_the_states_of_the_parents(function, options, match):
    def call(a: str, b: int) -> object:
        return function(YES.index(a) if match.endswith("0 to 1") else a, b)

    with pytest.raises(bt.BNetError, match=match):
        Table.from_function(call, [YES, 2], **options)


def test_a_data_frame_is_a_cross_table():
    data = pd.DataFrame(sprinkler().sentence().sample(500, seed=1).states).astype(int)
    labelled = data.replace({0: "no", 1: "yes"})
    counts = np.zeros((2, 2, 2))
    np.add.at(counts, (data["sprinkler"], data["rain"], data["wet"]), 1)
    frame = pd.crosstab([labelled["sprinkler"], labelled["rain"]], labelled["wet"], normalize="index")
    table = Table.from_dataframe(frame, [YES, YES], labels=YES)
    np.testing.assert_allclose(table.probabilities, counts / counts.sum(-1, keepdims=True), atol=1e-12)
    for same in (frame.iloc[::-1], frame[["yes", "no"]], frame.reset_index().set_index(["sprinkler", "rain"])):
        assert Table.from_dataframe(same, [YES, YES], labels=YES) == table
    assert Table.from_dataframe(frame[["yes", "no"]], [YES, YES]).labels == ("yes", "no")
    flipped = Table.from_dataframe(frame, [("yes", "no"), YES], labels=YES)
    np.testing.assert_array_equal(flipped.probabilities, np.asarray(table.probabilities)[::-1])
    numbers = pd.crosstab([data["sprinkler"], data["rain"]], data["wet"], normalize="index")
    numbered = Table.from_dataframe(numbers, (2, 2))
    assert numbered.probabilities == table.probabilities and numbered.labels is None
    by_bool = pd.crosstab([data["sprinkler"] == 1, data["rain"] == 1], data["wet"] == 1, normalize="index")
    assert Table.from_dataframe(by_bool, (2, 2)) == numbered
    root = Table.from_dataframe(pd.DataFrame({"a": [0.25], "b": [0.75]}))
    assert root == Table((0.25, 0.75), ("a", "b"))
    for bad, match in (
        (frame.iloc[:-1], r"row \(yes, yes\).*no row"),
        (pd.concat([frame, frame.iloc[:1]]), r"row \(no, no\).*two rows"),
        (frame * 2, r"row \(no, no\).*sum 2"),
        (frame.where(frame > 2), r"row \(no, no\)"),
        (frame.rename(index={"yes": "si"}), r"\(no, si\)|\(si, no\)"),
        (frame.assign(maybe=0.0), "labels"),
        (frame.astype(object).replace(frame.iloc[0, 0], "x"), "probabilities"),
        ([[0.5, 0.5]], "DataFrame"),
    ):
        with pytest.raises(bt.BNetError, match=match):
            Table.from_dataframe(bad, [YES, YES], labels=YES)


# declarations


def test_rows_that_are_no_distributions_name_the_states_of_the_parents():
    for values, match in (
        ([[[0.5, 0.5], [0.5, 0.6]]], r"row \(0, 1\).*sum 1.1"),
        ([[0.5, 0.5], [1.5, -0.5]], r"row \(1\).*0 to 1"),
        ([0.5, math.nan], "0 to 1"),
        ([[0.5, 0.5], [0.5]], "array"),
        (0.5, "array"),
        ([], "array"),
        ([1j, 1 - 1j], "array"),
        ("ab", "array"),
        (pd.DataFrame([[0.5, 0.5]]), "from_dataframe"),
        (lambda a: a, "from_function"),
    ):
        with pytest.raises(bt.BNetError, match=f"probabilities.*{match}"):
            Table(values)
    with pytest.raises(bt.BNetError, match="labels"):
        Table((0.5, 0.5), ("a",))
    with pytest.raises(bt.BNetError, match=r"initial, row \(0\)"):
        Table([[0.5, 0.5]], initial=[[0.5, 0.6]])
    with pytest.raises(bt.BNetError, match="learnable=True"):
        Table((0.5, 0.5), prior=1.0)


def test_parents_must_fit_the_axes():
    a, x = bt.Node("a", Table((0.5, 0.5))), bt.Node("x", Given(2))
    for parents, match in ((["a"], "2 discrete parents"), (["a", "a", "a"], "2 discrete"), (["a", "a"], "3 states")):
        with pytest.raises(bt.DeclarationError, match=match):
            bt.BNet(bt.Declaration(nodes=[a, bt.Node("b", Table(np.full((2, 3, 2), 0.5)), parents)]))
    with pytest.raises(bt.DeclarationError, match="discrete node"):
        bt.BNet(bt.Declaration(nodes=[x, bt.Node("b", Table(np.eye(2)), ["x"])]))


def test_a_table_is_stored_hashed_and_has_all_digits(tmp_path):
    third = Table([[1 / 3, 2 / 3], [0.0, 1.0]], YES, initial=(1 / 7, 6 / 7), learnable=True, prior=1.5)
    assert hash(third) == hash(pickle.loads(pickle.dumps(third))) and eval(repr(third)) == third
    node = bt.Node("c", third, [bt.Arrow("c", "before")], plates=["word"])
    net = bt.BNet(bt.Declaration([bt.Stack([node])]))
    net.save(tmp_path / "net.safetensors")
    loaded = bt.load(tmp_path / "net.safetensors")
    assert loaded.declaration == net.declaration
    for double in (net.to(D), loaded.to(D), net.to(torch.float16).to(D)):
        torch.testing.assert_close(double.parameters["c_0.logits"].exp(), torch.tensor(third.probabilities, dtype=D),
                                   rtol=0, atol=1e-15)  # fmt: skip
    moved = net.replace({"c_0.initial": torch.tensor([0.5, 0.5]).log()}).to(D)
    torch.testing.assert_close(moved.parameters["c_0.initial"].exp(), torch.full((2,), 0.5, dtype=D), rtol=0, atol=1e-7)


# pgmpy and BIF


def clinic_of_pgmpy() -> DiscreteBayesianNetwork:
    """A network with labels of every kind, another order of states in a child, and parents that are not sorted."""
    states = {"b": ["don't", "{x; y}"], "a": ["low", "2nd", ""], "c": [0, 1], "d": [True, False]}
    network = DiscreteBayesianNetwork([("b", "c"), ("a", "c"), ("c", "d")])
    rng = np.random.default_rng(0)

    def add(name: str, *parents: str, flip: str = "") -> None:
        names = {k: states[k][::-1] if k == flip else states[k] for k in (name, *parents)}
        sizes = [len(states[parent]) for parent in parents]
        values = rng.dirichlet(np.ones(len(states[name])), math.prod(sizes)).T
        network.add_cpds(TabularCPD(name, len(states[name]), values, list(parents), sizes, names))

    add("b"), add("a"), add("c", "b", "a", flip="a"), add("d", "c")
    return network


def test_pgmpy_both_ways():
    source = clinic_of_pgmpy()
    net = bt.from_pgmpy(source)
    s = net.sentence()
    assert s.labels("a") == ("low", "2nd", "") and s.labels("d") == ("True", "False")
    assert s.parents("c") == ["b", "a"]
    back = s.to_pgmpy()
    assert set(back.nodes) == set(source.nodes) and set(back.edges) == set(source.edges)
    for name in source.nodes:
        expected, actual = source.get_cpds(name), back.get_cpds(name)
        assert actual.variables == expected.variables
        for values in itertools.product(*(expected.state_names[k] for k in expected.variables)):
            chosen = dict(zip(expected.variables, values, strict=True))
            same = actual.get_value(**{k: str(state) for k, state in chosen.items()})
            assert same == pytest.approx(expected.get_value(**chosen), abs=1e-14)
    again = bt.from_pgmpy(back)
    assert {n.role: n.parents for n in again.declaration.nodes} == {n.role: n.parents for n in net.declaration.nodes}
    learned = bt.from_pgmpy(source, learnable=True)
    assert bt.fit(
        learned, {"c": [0, 1, 1]}, method=bt.EM(steps=1, optimizer="first-order"), progress=False
    ).theta.keys() == {"a", "b", "c", "d"}


@pytest.mark.slow
def test_bif_both_ways(tmp_path):
    net = bt.from_pgmpy(clinic_of_pgmpy())
    net.sentence().draw(tmp_path / "net.bif")
    loaded = bt.read_bif(tmp_path / "net.bif")
    s, again = net.sentence(), loaded.sentence()
    for name in ("a", "b", "d"):
        assert again.labels(name) == s.labels(name)
        close = {"rtol": 0, "atol": 1e-14}
        torch.testing.assert_close(again.posterior(name, {"c": 1}), s.posterior(name, {"c": 1}), **close)
        assert again.parents("c") == ["b", "a"] and again.to_pgmpy().get_cpds(name) == s.to_pgmpy().get_cpds(name)


@pytest.mark.slow
def test_a_published_file_keeps_its_labels_and_rounded_rows(tmp_path):
    """No marker of escaped labels; no line break at the end; rows rounded to three digits; a table of a child."""
    (tmp_path / "a.bif").write_text(
        "// comment\nnetwork survey {\n}\nvariable A {\n  type discrete [ 3 ] { young_61_, a_b_c, old };\n}\n"
        "variable B { type discrete [ 2 ] { no, yes }; }\n"
        "probability ( A ) {\n  table 0.333, 0.333, 0.333;\n}\n"
        "probability ( B | A ) {\n  (old) 0.1, 0.9;\n  (a_b_c) 0.2, 0.8;\n  (young_61_) 0.3, 0.7;\n}"
    )
    net = bt.read_bif(tmp_path / "a.bif")
    s = net.sentence()
    assert net.declaration.name == "survey" and s.labels("A") == ("young_61_", "a_b_c", "old")
    np.testing.assert_allclose(s.posterior("A"), np.full(3, 1 / 3), atol=1e-15)
    np.testing.assert_allclose(s.posterior("B", {"A": "a_b_c"}), [0.2, 0.8], atol=1e-15)


TWO_VARIABLES = """
variable A { type discrete [ 2 ] { yes, no }; }
variable default { type discrete [ 3 ] { default, y, z }; }
probability ( default | A ) { (no) 0.2, 0.3, 0.5; (yes) 0.1, 0.1, 0.8; }
probability ( A ) { default 0.3, 0.7; }
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", ["(no) 0.2, 0.3, 0.5; default 0.1 0.1 0.8 ;", "default 0.1, 0.1, 0.8; (no) 0.2, 0.3, 0.5;"]
)
def test_default_rows_of_a_file(rows, tmp_path):
    (tmp_path / "a.bif").write_text(TWO_VARIABLES.replace("(no) 0.2, 0.3, 0.5; (yes) 0.1, 0.1, 0.8;", rows))
    s = bt.read_bif(tmp_path / "a.bif").sentence()
    np.testing.assert_allclose(s.posterior("A"), [0.3, 0.7], atol=1e-15)
    for state, row in {"yes": [0.1, 0.1, 0.8], "no": [0.2, 0.3, 0.5]}.items():
        np.testing.assert_allclose(s.posterior("default", {"A": state}), row, atol=1e-15)


@pytest.mark.parametrize(
    ("part", "changed", "message"),
    [
        ("| A", "| Q", "probability of default: .*variables of the file; got Q"),
        ("(no)", "(maybe)", r"probability of default: .*state of each parent \(A\).*maybe"),
        ("[ 3 ]", "[ 4 ]", "variable default: expected 4 states"),
        ("default 0.3, 0.7", "default 0.3, 0.3, 0.4", "probability of A: expected 2 numbers"),
        ("default 0.3, 0.7", "table 0.3", "probability of A: expected 2 numbers"),
        ("default 0.3, 0.7", "table 0.3, 0_7", "line 5: expected numbers; got 0_7"),
        ("default 0.3, 0.7", "table nan, 1", "line 5: expected numbers; got nan"),
        ("default 0.3, 0.7", "table 0.3, 0.7; default 0.3, 0.7", "a row 'table' or other rows"),
        ("(no) 0.2, 0.3, 0.5;", "", r"probability of default: expected a row \(no\)"),
        ("(no)", "(yes)", "line 4: expected different rows"),
        ("| A", "| A, A", "different parents"),
        ("yes, no", "no, no", "variable A: expected 2 states, which are different"),
        ("probability ( A )", "probability ( default )", "probability of default: expected one block"),
        ("probability ( A )", "property ( A )", "line 5: expected a block"),
        ("{ default 0.3, 0.7; }", "{ default 0.3, 0.7;", "line 6: .*the end of the file"),
        ("probability ( A ) { default 0.3, 0.7; }", "/* probability", "the end of the file"),
        ("probability ( A ) { default 0.3, 0.7; }", 'network "', "the end of the file"),
        ("probability ( A ) { default 0.3, 0.7; }", "", "variable A: expected a block 'probability'"),
    ],
)
def test_faults_of_a_file_are_named(part, changed, message, tmp_path):
    (tmp_path / "a.bif").write_text(TWO_VARIABLES.replace(part, changed))
    with pytest.raises(bt.BNetError, match=message):
        bt.read_bif(tmp_path / "a.bif")


EXAMPLES = Path(pgmpy.__file__).parent / "utils" / "example_models"  # of the bnlearn repository
SLOW_EXAMPLES = ["alarm", "child", "hailfinder", "hepar2", "insurance", "sachs", "win95pts"]


@pytest.mark.parametrize(
    "name", ["asia", "survey", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_EXAMPLES)]
)
def test_published_files_are_read_as_by_pgmpy(name):
    text = gzip.decompress((EXAMPLES / f"{name}.bif.gz").read_bytes()).decode()
    network = BIFReader(string=text).get_model()
    title, tables = parse_bif(text)
    assert title == network.name and [table.name for table in tables] == [*network.nodes]
    for table in tables:
        expected = network.get_cpds(table.name)
        assert (table.name, *table.parents) == tuple(expected.variables)
        assert list(table.states) == expected.state_names[table.name]
        np.testing.assert_array_equal(table.values, expected.values)


def test_names_with_spaces_symbols_and_comments_are_read():
    title, (first, second) = parse_bif("""
        network "my net" { property a = b; } variable big one { type discrete [2] { <5 (low), S/W | "x, y" }; } // text
        variable B { property type = "}"; type discrete [3] { a "b c" d/* ; */ } ; property p; }
        probability (B|BIG ONE) { (S/W | "x, y") .5 .25,.25; property q; default 1e-1 2.E-1 +7e-1 } ;
        probability ( "big one" ) { /**/ table 0.5 /* } */ 0.5; }
    """)  # pgmpy does not read such names in rows
    assert title == "my net" and first.states == ("<5 (low)", "S/W | x, y") and second.states == ("a", "b c", "d")
    assert second.parents == ("big one",) and first.values.tolist() == [0.5, 0.5]
    np.testing.assert_array_equal(second.values.T, [[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]])
    variables = "".join(f"variable {name} {{ type discrete [2] {{ a, b }}; }}" for name in "AB")
    old = parse_bif(f"{variables} probability ( A B ) {{ default 0.5 0.5; }} probability ( B ) {{ table 0.5 0.5; }}")
    assert old[1][0].parents == ("B",)


def test_a_table_of_default_rows_has_a_limit():
    """A file of 4 kB cannot declare tables of many gigabytes; the missing row of such a table is found at once."""
    names = [f"v{k}" for k in range(40)]
    blocks = [f"variable {name} {{ type discrete [10] {{ {' '.join(map(str, range(10)))} }}; }}" for name in names]
    text = "".join(blocks) + f"probability ( v0 | {', '.join(names[1:])} ) {{ ROWS }}"
    with pytest.raises(bt.BudgetError, match="at most 10,000,000 entries"):
        parse_bif(text.replace("ROWS", "default " + "0.1 " * 10 + ";"))
    with pytest.raises(bt.BNetError, match=r"a row \(0, 0"):
        parse_bif(text.replace("ROWS", ""))
    with pytest.raises(bt.BNetError, match=r"expected 1,?0+ numbers in the row table"):
        parse_bif(text.replace("ROWS", "table 0.1;"))


def count_steps(call):
    """Count the lines that a call executes in the readers of BIF, without the lines of its callees elsewhere."""
    steps, files = 0, (pgmpy.__file__, pgmpy_bridge.__file__)

    def count(frame, event, argument):
        nonlocal steps
        steps += event == "line"
        return count

    previous = sys.gettrace()
    sys.settrace(lambda frame, event, argument: count if frame.f_code.co_filename in files else None)
    try:
        call()
    finally:
        sys.settrace(previous)
    return steps


STEPS_PER_CHARACTER = 50
PIECES = [" ", "\n", "/", "/*", "*/", "//", '"', "(", ")", "{", "}", "[", "]", "|", ",", ";", "_", "a", "0", "0.5 "]
PIECES += ["variable ", "variable a { type discrete [ 2 ] { a, b }; } ", "probability ( a ", "type ", "default 0.5 "]
PIECES += ["network ", "property a ", "(a) 0.5 0.5; ", "probability ( a | b ) { ", "table 0.5 0.5; ", "/**/", "_a_1"]


@given(st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from([1, 1, 30, 300])), max_size=8), st.text(max_size=20))
@settings(max_examples=100, deadline=None)
def test_the_steps_of_the_reader_are_linear(repeated, tail):
    """Every character is in one token, and the number of steps is at most linear in the number of characters."""
    text = "".join(piece * count for piece, count in repeated) + tail
    assert "".join(match[0] for match in pgmpy_bridge.TOKEN.finditer(text)) == text

    def parse():
        with suppress(bt.BNetError):
            parse_bif(text)

    assert count_steps(parse) <= STEPS_PER_CHARACTER * (len(text) + 10)


@pytest.mark.parametrize("count", [100, 1000])
def test_the_steps_of_a_valid_file_are_linear(count):
    """Many states, many rows and many variables, whose name is also proposed as a role."""
    states = ", ".join(f"s{k}" for k in range(count))
    rows = "".join(f"(s{k}) 0.5, 0.5;\n" for k in range(count))
    text = (
        f"variable A {{ type discrete [ {count} ] {{ {states} }}; }}\n variable B {{ type discrete [ 2 ] {{ a, b }}; }}"
    )
    text += f"probability ( A ) {{ default {'0 ' * (count - 1)} 1; }} probability ( B | A ) {{ {rows} }}"
    network = "".join(f"variable v{k} {{ type discrete [ 1 ] {{ a }}; }}" for k in range(count))
    network += "".join(f"probability ( v{k} ) {{ table 1; }}" for k in range(count))
    for part in (text, network):
        assert count_steps(lambda part=part: parse_bif(part)) <= STEPS_PER_CHARACTER * len(part)
    assert count_steps(lambda: pgmpy_bridge._propose_role("a" + "_1" * count)) <= 10 * count


def test_names_that_are_no_roles_are_refused_with_a_proposal():
    network = DiscreteBayesianNetwork([("X_1", "a-b")])
    table = TabularCPD("a-b", 2, [[0.5, 0.1], [0.5, 0.9]], ["X_1"], [2])
    network.add_cpds(TabularCPD("X_1", 2, [[0.5], [0.5]]), table)
    with pytest.raises(bt.BNetError, match=r"\{'X_1': 'X1', 'a-b': 'a_b'\}"):
        bt.from_pgmpy(network)
    for roles in ({"X_1": "X1", "a-b": "a_b"}, lambda name: name.replace("-", "_").replace("_1", "1")):
        assert bt.from_pgmpy(network, roles=roles).sentence().parents("a_b") == ["X1"]
    with pytest.raises(bt.BNetError, match="different roles"):
        bt.from_pgmpy(network, roles={"X_1": "a", "a-b": "a"})
    with pytest.raises(bt.UnknownNameError, match="X_1"):
        bt.from_pgmpy(network, roles={"X_2": "a"})


def test_networks_that_are_incomplete_are_refused(tmp_path):
    network = DiscreteBayesianNetwork([("a", "b")])
    network.add_cpds(TabularCPD("a", 2, [[0.5], [0.5]]))
    with pytest.raises(bt.BNetError, match=r"variable b: .*no table"):
        bt.from_pgmpy(network)
    network.add_cpds(TabularCPD("b", 2, [[0.5, 0.4], [0.5, 0.4]], ["a"], [2]))
    with pytest.raises(bt.BNetError, match=r"variable b, row \(1\).*sum 0.8"):
        bt.from_pgmpy(network)
    network.add_cpds(TabularCPD("b", 2, np.full((2, 3), 0.5), ["a"], [3]))
    with pytest.raises(bt.BNetError, match=r"variable b: .*its parent a"):
        bt.from_pgmpy(network)
    with pytest.raises(bt.BNetError, match="model"):
        bt.from_pgmpy("asia")  # type: ignore[arg-type]
    path = tmp_path / "a.bif"
    path.write_text("variable A {\n  type discrete [ 2 ] { a, b };\n}\nprobability ( A ) {\n (x) 1; }\n")
    with pytest.raises(bt.FileError, match=r"a\.bif"):
        bt.read_bif(path)
    two = "variable A {\n type discrete [ 1 ] { x };\n}\nvariable a {\n type discrete [ 1 ] { x };\n}\n"
    path.write_text(two)
    with pytest.raises(bt.FileError, match="A, a"):
        bt.read_bif(path)
    with pytest.raises(bt.FileError, match=r"[Nn]o such file"):
        bt.read_bif(tmp_path / "nothing.bif")


def test_restarts_of_a_learnable_table_are_different():
    """The first restart has the declared numbers, which are a fixed point of EM; the others are random."""
    nodes = [
        bt.Node("z", Table([[0.5, 0.5]] * 2, initial=[0.5, 0.5], learnable=True), [bt.Arrow("z", "before")], ["word"]),
        bt.Node("e", Table([[1 / 3] * 3] * 2, learnable=True), ["z"], ["word"]),
    ]
    net = bt.BNet(bt.Declaration([bt.Stack(nodes)]))
    y = [[0, 1, 2, 0, 1, 2, 0, 1], [1, 2, 0, 1, 2, 0]]
    f = bt.fit(
        net, {"e_0": y}, method=bt.EM(steps=20, restarts=3, prune=False, optimizer="first-order"), progress=False
    )
    last = {restart: score for _, restart, score in f.measured}
    assert f.restart > 0 and last[0] < min(last[1], last[2]) - 0.1
    assert f.predict([" ".join("a" * len(row)) for row in y], readout="e_0").shape == (2, 8, 3)


def test_words_without_values_are_counted():
    """A hidden Markov model: the number of words, and columns of observations of unequal length, are enough."""
    nodes = [
        bt.Node("z", Categorical(2), [bt.Arrow("z", "before")], ["word"]),
        bt.Node("e", Categorical(3), ["z"], ["word"]),
    ]
    net = bt.BNet(bt.Declaration([bt.Stack(nodes)]))
    assert str(net.sentence(5)) == "<Sentence '0 1 2 3 4': 10 nodes, 9 arrows>"
    columns = {"e_0": [[0, 1, 2], [1, 1]]}
    pairs = [("a b c", [0, 1, 2]), ("a b", [1, 1])]
    fits = [bt.fit(net, data, method=bt.EM(steps=3), progress=False) for data in (columns, pairs)]
    torch.testing.assert_close(fits[0].theta, fits[1].theta)
    with pytest.raises(bt.BNetError, match="at least 1"):
        net.sentence(0)
