"""The most probable explanation, marginal MAP and the posteriors of a group are those of all joint states."""

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.inference.most_probable import find_maximisation_graph
from bnet_transformer.reference import ReferenceRun
from bnet_transformer.tpm import Categorical
from tests.cases import CASES, close, get_case
from tests.test_cli import run

MAX_JOINT_STATES = 64


def find_cases():
    for case in CASES:
        s = case.sentence
        model = s.state.model
        choices = [n for n in range(len(s.ground)) if model.spec(n).tpm.kind == "discrete" and s.ground.children(n)]
        if choices and math.prod(map(model.count_states, choices)) <= MAX_JOINT_STATES:
            yield case


SMALL_CASES = [*find_cases()]


def enumerate_log_probs(s, nodes):
    """Return `log P(states, evidence)` of each joint state of some nodes, summed over all others."""
    query = s.state.query([s.ground.id(name) for name in nodes])
    log_probs = {}
    for states in itertools.product(*(range(s.state.model.count_states(node)) for node in query.choices)):
        chosen = dict(zip(query.choices, map(torch.tensor, states), strict=True))
        run_ = ReferenceRun(s.state.model, {**query.fixed, **chosen})
        log_prob = torch.tensor(reference.log_joint(run_, query.choices, query.evidence), dtype=torch.float64)
        key = tuple(int(chosen[node]) for node in query.nodes)
        log_probs[key] = torch.logaddexp(log_probs.get(key, torch.tensor(-math.inf)).double(), log_prob)
    return {key: float(value) for key, value in log_probs.items()}


def check_ranked_states(result, s, count):
    """Assert that the result has the `count` most probable of all joint states, and their probabilities."""
    expected = enumerate_log_probs(s, result.nodes)
    possible = sorted((value for value in expected.values() if value > -math.inf), reverse=True)
    close(result.log_probs, torch.tensor(possible[:count], dtype=torch.float64))
    keys = [tuple(row) for row in result.states.tolist()]
    assert len(set(keys)) == len(keys) == min(count, len(possible))
    close(result.log_probs, torch.tensor([expected[key] for key in keys], dtype=torch.float64))
    total = torch.tensor(possible, dtype=torch.float64).logsumexp(0)
    close(result.shares, (result.log_probs - total).exp())


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(SMALL_CASES), st.integers(1, 70), st.booleans(), st.data())
def test_the_most_probable_states_are_those_of_all_joint_states(case, count, has_evidence, data):
    s = case.sentence.observe(case.evidence) if has_evidence else case.sentence
    nodes = list(map(s.ground.name, s.state.ranked_states_query(None, None).nodes))
    change = data.draw(st.sampled_from(["none", "do", "observe"])) if len(nodes) > 1 else "none"
    known = {data.draw(st.sampled_from(nodes)): 0}
    s = s.do(known) if change == "do" else s.observe(known) if change == "observe" else s
    try:
        result = s.most_probable(count=count)
    except bt.EvidenceError:  # the observed state is impossible
        with pytest.raises(bt.EvidenceError):
            s.log_prob()
        return
    assert set(result.nodes) == set(nodes) - (known.keys() if change != "none" else set())
    check_ranked_states(result, s, count)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(SMALL_CASES), st.integers(1, 20), st.data())
@pytest.mark.slow
def test_marginal_map_sums_over_the_other_nodes_before(case, count, data):
    s = case.sentence
    kinds = {spec.group.index: spec.tpm.kind for spec in s.net.network.specs}
    names = [name for name in s.nodes if kinds[s.ground.group_of(s.ground.id(name)).index] == "discrete"]
    names = [name for name in names if name not in case.evidence]
    nodes = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    result = s.most_probable(case.evidence, nodes=nodes, count=count)
    assert list(result.nodes) == nodes
    check_ranked_states(result, s.observe(case.evidence), count)


@pytest.fixture(scope="module")
def chain():
    """A rare cause with one effect, and a frequent cause that spreads over three effects."""
    nodes = [bt.Node("a", Categorical(2)), bt.Node("b", Categorical(3), ["a"]), bt.Node("y", Categorical(2), ["b"])]
    tables = {
        "a.logits": [0.6, 0.4],
        "b.logits": [[1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, 0.0]],
        "y.logits": [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]],
    }
    logs = {name: torch.tensor(table, dtype=torch.float64).log() for name, table in tables.items()}
    return bt.BNet(bt.Declaration(nodes=nodes)).to(torch.float64).replace(logs)


def test_marginal_map_differs_from_the_most_probable_explanation(chain):
    """Pearl 1988: the most probable state of a node is not its state in the most probable explanation."""
    s = chain.sentence()
    best = s.most_probable({"y": 1}, count=9)
    assert best.nodes == ("a", "b") and best.states.tolist() == [[1, 0], [0, 0], [0, 1], [0, 2]]
    close(best.shares, torch.tensor([0.4, 0.2, 0.2, 0.2]).double(), 1e-7)
    marginal = s.most_probable({"y": 1}, nodes="a", count=9)
    assert marginal.states.tolist() == [[0], [1]]
    close(marginal.log_probs, torch.tensor([0.3, 0.2]).double().log(), 1e-7)
    close(marginal.log_evidence, math.log(0.5))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_the_best_path_of_a_chain_with_ties_is_one_of_the_best_of_all_paths(data):
    """Log tables of small integers have many ties, and zeros exclude some transitions."""
    n, word = data.draw(st.integers(1, 4)), ["word"]
    reach = data.draw(st.sampled_from(["before", "after"]))
    state = bt.Node("c", Categorical(3), [bt.Arrow("c", reach)], plates=word)
    stack = bt.Stack(
        [state], [bt.Node("x", bt.tpm.Given(1), plates=word)], [bt.Node("y", Categorical(2), ["c"], plates=word)]
    )
    net = bt.BNet(bt.Declaration([stack])).to(torch.float64)
    weights = st.sampled_from([0.0, 1.0, 1.0, 2.0])
    numbers = {
        name: data.draw(arrays(np.float64, value.shape, elements=weights)) for name, value in net.parameters.items()
    }
    for table in numbers.values():
        table[..., 0] += 1.0  # each row has a possible state
    net = net.replace({name: torch.from_numpy(table).log() for name, table in numbers.items()})
    s = net.sentence(torch.zeros(n, 1).double())
    s = s.observe({f"y_{i}": 0 for i in range(n) if data.draw(st.booleans())})
    s = s.observe({"c_0_0": 0}) if data.draw(st.booleans()) else s
    result = s.most_probable()
    expected = enumerate_log_probs(s, result.nodes)
    best = max(expected.values())
    close(result.log_probs[0].item(), best)
    close(expected[tuple(result.states[0].tolist())], best)  # rounding decides between equal paths
    assert s.explain("most_probable").algorithm == "elimination"


CHAINS = {  # the arrows to the second chain u, and those to the emissions e of z and f of u
    "independent": ([], [], []),
    "coupled": (["z"], [], []),
    "a common emission": ([], ["u"], []),
    "emissions of the word before": ([], [bt.Arrow("z", "before")], []),
    "chains of emissions": ([], [bt.Arrow("e", "before")], [bt.Arrow("f", "before")]),
}


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_nodes_beside_a_complete_chain_are_the_maximum_over_all_joint_states(data):
    """All nodes of one chain, and any nodes of a second chain, of another slice and of the emissions."""
    to_u, to_e, to_f = CHAINS[data.draw(st.sampled_from(list(CHAINS)))]
    nodes = [
        bt.Node("z", Categorical(2), [bt.Arrow("z", "before")], ["word"]),
        bt.Node("u", Categorical(2), [bt.Arrow("u", "before"), *to_u], ["word"]),
        bt.Node("e", Categorical(2), ["z", *to_e], ["word"]),
        bt.Node("f", Categorical(2), ["u", *to_f], ["word"]),
    ]
    has_slices = data.draw(st.booleans()) and not (to_u or to_e or to_f)
    stack = bt.Stack(nodes[::2] if has_slices else nodes, slices=2 if has_slices else 1)
    s = bt.BNet(bt.Declaration([stack]), seed=data.draw(st.integers(0, 99))).to(torch.float64).sentence(2)
    further = data.draw(st.permutations([name for name in s.nodes if not name.startswith("z_0")]))
    observed = [name for name in further if name[0] in "ef"][: data.draw(st.integers(0, 4))]
    s = s.observe({name: data.draw(st.integers(0, 1)) for name in observed})
    latent = [name for name in further if name not in observed][: data.draw(st.integers(0, 4))]
    result = s.most_probable(nodes=[*data.draw(st.permutations(["z_0_0", "z_0_1"])), *latent])
    expected = enumerate_log_probs(s, result.nodes)
    close(result.log_probs[0].item(), max(expected.values()))
    close(expected[tuple(result.states[0].tolist())], max(expected.values()))


def test_plates_of_chains_are_found_by_elimination():
    stack = bt.Stack(
        [
            bt.Node("z", Categorical(3), [bt.Arrow("z", "after")], ["head", "word"]),
            bt.Node("e", Categorical(2), ["z"], ["head", "word"]),
        ]
    )
    s = bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 3)]), seed=0).to(torch.float64).sentence(4)
    evidence = {"e_0": torch.arange(12).reshape(3, 4) % 2}
    assert s.explain("most_probable", evidence).algorithm == "elimination"
    best = s.most_probable(evidence)
    query = s.observe(evidence).state.query([s.ground.id(name) for name in best.nodes])
    states, log_probs = find_maximisation_graph(query).find_best(1)
    assert [states[node].item() for node in query.nodes] == best.states[0].tolist()
    close(best.log_probs, log_probs)


def test_readouts_are_explained_by_marginal_map_only(chain):
    s = chain.sentence()
    every = s.most_probable(nodes=["y", "b", "a"], count=2)
    assert every.nodes == ("y", "b", "a") and every.states[:, 1:].tolist() == [[0, 1], [0, 1]]
    with pytest.raises(bt.BNetError, match="latent choice"):
        s.do(a=0, b=1).most_probable()
    known = s.observe(a=0, b=0)
    for result in (known.most_probable(count=2), known.most_probable(nodes=["a", "b"], count=2)):
        assert result.states.shape == (1, 0) and result["b"].tolist() == [0]
        close(result.shares, torch.ones(1))


def test_results_have_the_states_of_all_nodes_of_a_group():
    s = get_case("word").sentence.do(c_0_0=2).observe(c_0_2=1)
    result = s.most_probable({"y_1": 0}, count=5)
    assert result.nodes == ("c_0_1",) and len(result) == 3
    assert result["c_0"][:, 0].tolist() == [2] * 3 and result["c_0"][:, 2].tolist() == [1] * 3
    assert torch.equal(result["c_0"][:, 1], result["c_0_1"]) and result.labels("c_0_2") == ["1"] * 3
    assert result.to_dataframe()["c_0_1"].tolist() == result.labels("c_0_1")
    requested = s.undo().most_probable(nodes="c_*_0", count=2)
    assert requested.nodes == ("c_0_0",) and requested["c_0"][:, 1:].tolist() == [[-1, 1]] * 2
    for name in ("d", "c_0_3", 0):
        with pytest.raises(bt.UnknownNameError):
            result[name]
    with pytest.raises(bt.UnknownNameError):
        result.labels("c_0")


def test_labels_are_those_of_the_states():
    s = get_case("marginal").sentence
    result = s.most_probable({"y_0": 1})
    words = s.words
    assert result.labels("j_0_1") == [words[int(result["j_0_1"][0])]]


def test_impossible_evidence_names_the_node(chain):
    with pytest.raises(bt.EvidenceError, match=r"^b: "):
        chain.sentence().most_probable({"a": 1, "b": 2})
    with pytest.raises(bt.EvidenceError, match=r"^b: "):
        chain.sentence().most_probable({"a": 1, "b": 2}, nodes="a")
    with pytest.raises(bt.EvidenceError, match=r"^b: "):
        chain.sentence().posteriors("a", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("nodes", "name"),
    [("q_0_0", "q_0_0"), (["c_0_0", "e"], "e"), ([], "nodes"), ("c_0_1", "c_0_1"), (["x_*_1"], "x_0_1")],
)
def test_nodes_that_cannot_be_explained_are_an_error(nodes, name):
    with pytest.raises(bt.BNetError, match=name):
        get_case("word").sentence.do(c_0_1=0).most_probable(nodes=nodes)


def test_more_joint_states_than_the_budget_are_an_error():
    s = get_case("word, two slices").sentence
    with pytest.raises(bt.BudgetError):
        s.limits(budget=3).most_probable({"y_0": 1})
    with pytest.raises(bt.BudgetError):
        get_case("word").net.sentence(" ".join(["the"] * 60)).most_probable(count=10**16)


# posteriors of a group


@pytest.mark.parametrize(
    ("name", "group"),
    [
        *(("word", "c_0"), ("hidden Markov", "z_0"), ("word, two slices", "c_1"), ("sites", "x"), ("word", "y")),
        *(("sprinkler", "rain"), ("marginal", "j_0")),
    ],
)
def test_posteriors_are_those_of_each_node(name, group):
    case = get_case(name)
    s = case.sentence
    nodes = list(s.ground.iter_names(s.ground.template.get_group(group)))
    result = s.posteriors(group, case.evidence)
    flat = result.probabilities.reshape(len(nodes), -1)
    for node, probs in zip(nodes, flat, strict=True):
        close(probs, s.posterior(node, case.evidence))
    assert result.probabilities.dim() == len(result.axes)
    close(torch.tensor(result.to_dataframe()[list(result.labels_along(-1))].to_numpy()), flat)


def test_a_data_frame_has_states_with_the_labels_of_its_axes():
    words = ["word", "token", "head", "state"]
    net = bt.bayesuvius(4, vocabulary=words, observe=Categorical(4, labels=words), seed=3)
    s = net.sentence("state word word")
    frame = s.posteriors("y").to_dataframe()
    assert list(frame.columns) == words and list(frame.index) == [(0, "state"), (1, "word"), (2, "word")]
    for k in range(3):
        for state, label in enumerate(words):
            assert frame[label].iloc[k] == pytest.approx(s.log_prob({f"y_{k}": state}).exp().item())


def test_tables_have_nodes_with_the_names_of_other_columns(tmp_path):
    """The nodes of a file may be called `share`; its most probable states are those of the product of the tables."""
    pytest.importorskip("pgmpy")
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

    source = DiscreteBayesianNetwork([("share", "probability"), ("share", "sentence")])
    first, second, third = np.array([0.3, 0.7]), np.array([[0.1, 0.8], [0.9, 0.2]]), np.array([[0.4, 0.9], [0.6, 0.1]])
    source.add_cpds(TabularCPD("share", 2, first[:, None]))
    for name, table in (("probability", second), ("sentence", third)):
        source.add_cpds(TabularCPD(name, 2, table, ["share"], [2]))
    net = bt.from_pgmpy(source)
    joint = first[:, None, None] * second.T[:, :, None] * third.T[:, None, :]
    row = net.sentence().most_probable(nodes=["share", "probability", "sentence"]).to_dataframe().iloc[0]
    best = np.unravel_index(joint.argmax(), joint.shape)
    assert row["share"] == pytest.approx(joint.max()) and row["log_prob"] == pytest.approx(np.log(joint.max()))
    assert tuple(int(row[name]) for name in ("share (node)", "probability", "sentence")) == best
    net.save(tmp_path / "net.safetensors")
    nodes = "share,probability,sentence"
    result = run("ask", "posterior", nodes, "-m", tmp_path / "net.safetensors", "-o", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "p.csv")
    for _, item in table.iterrows():
        states = tuple(int(item[name]) for name in ("share", "probability (node)", "sentence (node)"))
        assert item["probability"] == pytest.approx(joint[states])


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(SMALL_CASES), st.data())
def test_posteriors_of_a_group_in_any_evidence(case, data):
    """With an observed or a set node of the group, and vectors as evidence on a choice."""
    s = case.sentence.observe(case.evidence)
    nodes = list(map(s.ground.name, s.state.ranked_states_query(None, None).nodes))
    name = data.draw(st.sampled_from(nodes))
    change = data.draw(st.sampled_from(["none", "state", "vector"]))
    children = s.children(name)
    if change == "vector" and "Select" in type(s.state.model.spec(s.ground.id(children[0])).tpm).__name__:
        s = s.observe({children[0]: s.do({name: 0})[children[0]].detach()})
    s = s.observe({name: 0}) if change == "state" else s
    group = s.ground.group_of(s.ground.id(data.draw(st.sampled_from(nodes))))
    result = s.posteriors(group.name).probabilities
    for node, probs in zip(s.ground.iter_names(group), result.reshape(-1, result.shape[-1]), strict=True):
        close(probs, s.posterior(node))


def test_posteriors_of_set_nodes_are_their_states():
    s = get_case("hidden Markov").sentence.do(z_0_1=1)
    assert s.posteriors("z_0", {"y_2": (0.5, -0.4)}).probabilities[1].tolist() == [0, 1]
    with pytest.raises(bt.BNetError, match="z_0_0"):
        s.do(z_0=0).posteriors("z_0")
    for group, error in (("z_0_0", bt.UnknownNameError), ("x_0", bt.BNetError)):
        with pytest.raises(error, match=group):
            s.posteriors(group)


# routes and the command line


def test_the_command_prints_the_states_of_the_sentence():
    s = bt.from_pretrained("tiny").sentence("the cat sat")
    arguments = ["ask", "most-probable", "the cat sat", "--given", "y_2=cat", "--count", 2]
    (document,) = json.loads(run(*arguments, "--json").stdout)["sentences"]
    expected = s.most_probable({"y_2": "cat"}, count=2)
    assert document["states"] == expected.states.tolist() and document["nodes"] == ["c"]
    close(document["log_probs"], expected.log_probs.tolist())
    lines = run(*arguments).stdout.splitlines()
    assert lines[-1].split() == ["c", *expected.labels("c")] and f"{float(expected.log_probs[1]):.3f}" in lines[2]
    (document,) = json.loads(run(*arguments, "--nodes", "y_0,c", "--json").stdout)["sentences"]
    assert document["labels"][0] == [
        s.most_probable({"y_2": "cat"}, nodes=["y_0", "c"]).labels(n)[0] for n in ("y_0", "c")
    ]
