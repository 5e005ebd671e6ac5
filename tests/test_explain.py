"""`explain` names the algorithm that answers a query, the reference exactly where the reference runs."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.explanation import EXPLAINERS
from bnet_transformer.tpm import Add, Attention, Categorical, Given, Linear, Normal, Select
from tests.cases import CASES

WORD = ["word"]
HEAVY = {"codebook, two slices", "slice, codebook"}


def make_meeting_words() -> bt.Sentence:
    """Return a net with a choice for each word that depends on the word; other words use its weights, so words interact
    in the second slice."""
    every = bt.Reach("every")
    nodes = [bt.Node("c", Categorical(2), ["x"], WORD), bt.Node("W", Select((3, 3)), ["c"], WORD)]
    nodes.append(bt.Node("v", Linear(), ["W", "x"], WORD))
    nodes.append(bt.Node("x", Attention(), ["x", bt.Arrow("x", every), bt.Arrow("v", every)], WORD))
    readout = [bt.Node("y", Categorical(2), ["x"], WORD)]
    stack = bt.Stack(nodes, [bt.Node("x", Given(3), plates=WORD)], readout, slices=2)
    return bt.BNet(bt.Declaration([stack])).sentence("the cat")


@pytest.fixture
def runs(monkeypatch):
    """A list with an item for each run of the reference."""
    calls, init = [], reference.ReferenceRun.__init__

    def count_run(self, *arguments, **options):
        calls.append(1)
        init(self, *arguments, **options)

    monkeypatch.setattr(reference.ReferenceRun, "__init__", count_run)
    return calls


def check_route(make, runs, question, answer, *arguments, **options):
    """Assert that `explain` succeeds where the query does, and names the reference where it runs."""
    runs.clear()
    try:
        answer(make())
    except bt.BNetError:
        return
    has_run, s = bool(runs), make()
    runs.clear()
    route = s.explain(question, *arguments, **options)
    assert not runs and (route.algorithm == "reference" or not has_run), f"{question} {arguments}: {route}"


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in HEAVY][::3], ids=lambda case: case.name)
def test_some_nodes_of_every_third_case(case, runs):
    make = lambda: case.net.sentence(case.text)  # noqa: E731
    order = make().topological_order()
    for name in order[:: max(1, len(order) // 3)]:
        check_route(make, runs, "value", lambda s, name=name: s[name], name)
        check_route(make, runs, "tpm", lambda s, name=name: s.tpm(name), name)
        check_route(make, runs, "posterior", lambda s, name=name: s.posterior(name), name)
    check_route(make, runs, "attention", lambda s: s.attention(0), 0)
    check_route(make, runs, "log_prob", lambda s: s.log_prob(case.evidence), case.evidence)
    check_route(make, runs, "sample", lambda s: s.sample(3), 3)
    check_route(make, runs, "sample", lambda s: s.sample(3, case.evidence), 3, case.evidence)


def test_interacting_words(runs):
    net = make_meeting_words().net
    make = lambda: net.sentence("the cat")  # noqa: E731
    for name in make().topological_order():
        check_route(make, runs, "value", lambda s, name=name: s[name], name)
        check_route(make, runs, "tpm", lambda s, name=name: s.tpm(name), name)
        check_route(make, runs, "posterior", lambda s, name=name: s.posterior(name), name)
    for t in range(2):
        check_route(make, runs, "attention", lambda s, t=t: s.attention(t), t)


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.explain(["posterior"], "c"),
        lambda s: s.explain("posterior", []),
        lambda s: s.explain("posterior", "c", given={}),
        lambda s: s.explain("separated", [], "c", verify=True),
        lambda s: bt.explain("fit"),
        lambda s: bt.explain(["fit"]),
        lambda s: bt.explain("sweep", s, s),
    ],
)
def test_a_wrong_question_is_an_error_that_names_it(call):
    with pytest.raises(bt.BNetError):
        call(bt.bayesuvius(3).sentence("the cat"))


def test_draws_one_after_another_are_the_references(runs):
    walk = bt.Node("z", Normal(0.5), [bt.Arrow("z", "before")], ["word"], shape=(2,))
    stack = bt.Stack([walk], [bt.Node("x", Given(2), plates=["word"])])
    s = bt.BNet(bt.Declaration([stack])).sentence("the cat")
    route = s.explain("sample", 50)
    assert (route.algorithm, route.node) == ("reference", "z_0") and not runs
    s.sample(50)
    assert runs


def test_a_fit_is_explained_by_its_own_arguments(tmp_path):
    net = bt.bayesuvius(3, heads=2, vocabulary=["the", "cat"], observe=Categorical(2))
    options = {"progress": False, "checkpoints": tmp_path / "kept", "every": 2, "device": "cpu"}
    assert bt.explain("fit", net, [("the cat", "cat the")], method="em", **options).algorithm == "elimination"
    assert not (tmp_path / "kept").exists()


def test_all_nodes_of_a_separation_are_named():
    s = bt.bayesuvius(3).sentence("the cat")
    assert s.explain("separated", ["x_0_0", "x_0_1"], "c").question == "separation of x_0_0, x_0_1 and c"


def test_the_node_that_rules_elimination_out_is_named():
    s = bt.bayesuvius(4, heads=3, slices=2, per="word", observe=Categorical(3)).sentence("the cat sat")
    route = s.explain("posterior", "c_0_0", {"y_2": 1})
    assert (route.algorithm, route.states, route.node) == ("conditioning", 27, "c_0")
    route = s.explain("value", "x_2_0")
    assert (route.algorithm, route.states) == ("enumeration", 81)
    route = s.explain("posterior", "c_0_0", {"x_1_0": s.do(c_0_0=1)["x_1_0"]})
    assert (route.algorithm, route.node) == ("elimination", None)
    nodes = [bt.Node("c", Categorical(2), [bt.Arrow("c", "before")], WORD), bt.Node("h", Select(1), ["c"], WORD)]
    nodes += [bt.Node(role, Add(), [bt.Arrow(parent, "before")], WORD) for role, parent in ("fh", "gf")]
    stack = bt.Stack(nodes, [bt.Node("x", Given(1), plates=WORD)], [bt.Node("y", Normal(0.5), ["g"], WORD)])
    route = bt.BNet(bt.Declaration([stack])).sentence(torch.zeros(3, 1)).explain("log_prob", {"y_1": [0.0]})
    assert (route.algorithm, route.choices) == ("conditioning", ()) and "are at state 0" in route.reason


def test_a_query_beyond_its_budget_is_explained_with_its_error():
    s = bt.bayesuvius(4, heads=4, slices=2, per="word", observe=Categorical(3)).sentence(" ".join("abcdefghijklmn"))
    evidence = {f"y_{i}": 1 for i in range(14)}
    for arguments in (("posterior", "c_0_0", evidence), ("most_probable", evidence), ("log_prob", evidence)):
        route = s.explain(*arguments)
        assert route.states > 2**16 and "c_0_0" in str(route.excess) and route.excess in str(route)
        with pytest.raises(bt.BudgetError) as caught:
            getattr(s, arguments[0])(*arguments[1:])
        assert str(caught.value) == route.excess


def test_flops_of_a_route_are_those_of_the_pass():
    net = bt.bayesuvius(8, heads=3, slices=2, per="slice")
    s = net.sentence("a b c d")
    assert s.explain("value", "x_2_3").flops == net.cost(words=4, want=["x_2"]).flops
    assert s.do(c_0=0, c_1=1).explain("value", "x_2_3").flops < s.do(c_0=0).explain("value", "x_2_3").flops


def test_every_question_has_an_explainer_of_its_name():
    names = {name for name in EXPLAINERS if name != "value"}
    assert all(callable(getattr(bt.Sentence, name)) for name in names)


def test_a_slow_query_warns_before_it_starts(monkeypatch):
    from bnet_transformer.inference import PerformanceWarning, plan

    monkeypatch.setattr(plan, "WARN_EVALUATIONS", 0)
    s = bt.bayesuvius(4, attention="marginal", observe=Categorical(3)).sentence("a b c")
    assert s.explain("tpm", "j_0").algorithm == "reference"
    with pytest.warns(PerformanceWarning, match="j_0 is neither|j is neither"):
        s.tpm("j_0")
