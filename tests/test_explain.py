"""`explain` returns the plan that a query runs: it names the algorithm, and is made only once."""

import re
import sys
from collections import Counter

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.inference import elimination, factor_graph, values
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
def steps(monkeypatch):
    """The algorithms that have run: a list with an item for each of their calls."""
    calls = []

    def record(owner, name, step):
        function = getattr(owner, name)

        def call(*arguments, **options):
            calls.append(step)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    record(reference.ReferenceRun, "__init__", "reference")
    record(elimination, "eliminate_choices", "elimination")
    record(factor_graph.FactorGraph, "_compute_tables", "variable elimination")
    record(values.NodeEvaluator, "_compute_enumerated", "enumeration")
    return calls


def count_plans(call):
    """The result of a call, and the number of calls of each planning function with each question."""
    counts, retained = Counter(), []

    def on_event(frame, event, argument):
        name, values = frame.f_code.co_qualname, frame.f_locals
        is_planner = re.match("_?plan_", frame.f_code.co_name) and "/compiler/" not in frame.f_code.co_filename
        if event == "call" and is_planner and "<locals>" not in name:
            query, owner, spec = (values.get(key) for key in ("attention_query", "self", "spec"))
            query = values.get("query") if query is None else query
            retained.append((query, owner, spec))  # so that their ids are not used again
            evidence = tuple(getattr(query, "evidence", ()))
            subject = [str(values.get(key)) for key in ("node", "slices", "count", "name", "group", "question")]
            subject += [getattr(query, key, None) for key in ("nodes", "table", "node")]
            counts[name, *subject, evidence, id(owner), id(spec or getattr(query, "spec", None))] += 1

    sys.setprofile(on_event)
    try:
        return call(), counts
    finally:
        sys.setprofile(None)


def check_plan(make, steps, question, *arguments, **options):
    """Assert that a method runs the plan that `explain` returns, and that it makes no plan twice."""

    def answer(s):
        return s[arguments[0]] if question == "value" else getattr(s, question)(*arguments, **options)

    steps.clear()
    try:
        plan = make().explain(question, *arguments, **options)
    except bt.BNetError as error:
        with pytest.raises(type(error)):
            answer(make())
        return
    assert "reference" not in steps, f"{question} {arguments}: {plan}"
    try:
        expected, counts = count_plans(lambda: answer(make()))
    except bt.BNetError as error:
        with pytest.raises(type(error)):
            plan.run()
        return
    assert max(counts.values(), default=1) == 1, f"{question} {arguments}: {counts.most_common(3)}"
    steps.clear()
    assert str(plan.run()) == str(expected), f"{question} {arguments}"
    ran = {*steps}
    if question not in ("graph", "draw", "reads", "tan_tree"):  # of several plans, these name the slowest
        assert ("reference" in ran) <= (plan.algorithm == "reference"), f"{question} {arguments}: {plan}"
        assert ("variable elimination" in ran) <= (plan.algorithm == "variable elimination"), plan
        if plan.algorithm in ("elimination", "variable elimination"):
            assert plan.algorithm in ran, plan
        if plan.algorithm in ("graph", "compiled"):
            assert not ran - {"elimination"}, plan


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if k % 3 else [])
        for k, case in enumerate(case for case in CASES if case.name not in HEAVY)
    ],
)
def test_every_question_runs_the_plan_that_explain_names(case, steps, tmp_path):
    make = lambda: case.net.sentence(case.text)  # noqa: E731
    s, evidence = make(), dict(case.evidence)
    order, model = list(s.nodes), s.state.model
    discrete = [name for name in order if model.spec(s.ground.id(name)).tpm.kind == "discrete"]
    for name in order[:: max(1, len(order) // 3)]:
        check_plan(make, steps, "value", name)
        check_plan(make, steps, "value", s.ground.group_of(s.ground.id(name)).name)
        check_plan(make, steps, "tpm", name)
        check_plan(make, steps, "posterior", name)
    for name in discrete[:: max(1, len(discrete) // 2)]:
        check_plan(make, steps, "posterior", name, evidence)
        check_plan(make, steps, "top", name, 2, evidence)
        check_plan(make, steps, "counterfactual", name, {discrete[0]: 0}, evidence)
        check_plan(make, steps, "posteriors", s.ground.group_of(s.ground.id(name)).name, evidence)
        check_plan(make, steps, "most_probable", evidence, nodes=[name])
        check_plan(make, steps, "most_probable", evidence, nodes=[name, discrete[0]], count=2)
    check_plan(make, steps, "most_probable", evidence)
    check_plan(make, steps, "log_prob", evidence)
    check_plan(make, steps, "sample", 3)
    check_plan(make, steps, "sample", 3, evidence)
    check_plan(make, steps, "attention", 0)
    check_plan(make, steps, "attention")
    check_plan(make, steps, "reads", evidence=evidence)
    check_plan(make, steps, "tan_tree", evidence=evidence)
    check_plan(make, steps, "graph", attention=True)
    check_plan(make, steps, "draw", tmp_path / "figure.svg")
    check_plan(make, steps, "separated", order[0], order[-1])
    check_plan(make, steps, "separated", order[0], order[-1], verify=True)


def test_interacting_words(steps):
    net = make_meeting_words().net
    make = lambda: net.sentence("the cat")  # noqa: E731
    for name in make().nodes:
        for question in ("value", "tpm", "posterior"):
            check_plan(make, steps, question, name)
    for t in range(2):
        check_plan(make, steps, "attention", t)


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


def test_draws_one_after_another_are_the_references(steps):
    walk = bt.Node("z", Normal(0.5), [bt.Arrow("z", "before")], ["word"], shape=(2,))
    stack = bt.Stack([walk], [bt.Node("x", Given(2), plates=["word"])])
    s = bt.BNet(bt.Declaration([stack])).sentence("the cat")
    plan = s.explain("sample", 50)
    assert (plan.algorithm, plan.node) == ("reference", "z_0") and not steps
    s.sample(50)
    assert "reference" in steps


def test_a_fit_is_explained_by_its_own_arguments(tmp_path):
    net = bt.bayesuvius(3, heads=2, vocabulary=["the", "cat"], observe=Categorical(2))
    options = {"progress": False, "checkpoints": tmp_path / "kept", "every": 2, "device": "cpu"}
    assert bt.explain("fit", net, [("the cat", "cat the")], method="em", **options).algorithm == "elimination"
    assert not (tmp_path / "kept").exists()


def test_the_plans_of_a_fit_and_of_a_sweep_compute_their_results():
    net = bt.bayesuvius(3, heads=2, vocabulary=["the", "cat", "dog"], observe=Categorical(3))
    data, options = [("the cat", "cat the"), ("cat the", "the cat")], {"method": bt.EM(steps=2), "progress": False}
    fitted = [bt.explain("fit", net, data, **options).run(), bt.fit(net, data, **options)]
    for name, value in fitted[1].net.parameters.items():
        assert fitted[0].net.parameters[name].equal(value)
    pair, options = [net.sentence("the cat").do(c=0), net.sentence("the dog").do(c=0)], {"metric": {"y_1": 0}}
    with torch.no_grad():
        swept = [bt.explain("sweep", *pair, **options, method=bt.Gradient()).run() for _ in range(2)]
    assert swept[0].outcomes.equal(swept[1].outcomes) and swept[0].outcomes.isfinite().all()
    assert bt.explain("sweep", *pair, **options).run().outcomes.equal(bt.sweep(*pair, **options).outcomes)


def test_all_nodes_of_a_separation_are_named():
    s = bt.bayesuvius(3).sentence("the cat")
    assert s.explain("separated", ["x_0_0", "x_0_1"], "c").question == "separation of x_0_0, x_0_1 and c"


def test_the_node_that_rules_elimination_out_is_named():
    s = bt.bayesuvius(4, heads=3, slices=2, per="word", observe=Categorical(3)).sentence("the cat sat")
    plan = s.explain("posterior", "c_0_0", {"y_2": 1})
    assert (plan.algorithm, plan.states, plan.node) == ("conditioning", 27, "c_0")
    plan = s.explain("value", "x_2_0")
    assert (plan.algorithm, plan.states) == ("enumeration", 81)
    plan = s.explain("posterior", "c_0_0", {"x_1_0": s.do(c_0_0=1)["x_1_0"]})
    assert (plan.algorithm, plan.node) == ("elimination", None)
    nodes = [bt.Node("c", Categorical(2), [bt.Arrow("c", "before")], WORD), bt.Node("h", Select(1), ["c"], WORD)]
    nodes += [bt.Node(role, Add(), [bt.Arrow(parent, "before")], WORD) for role, parent in ("fh", "gf")]
    stack = bt.Stack(nodes, [bt.Node("x", Given(1), plates=WORD)], [bt.Node("y", Normal(0.5), ["g"], WORD)])
    plan = bt.BNet(bt.Declaration([stack])).sentence(torch.zeros(3, 1)).explain("log_prob", {"y_1": [0.0]})
    assert (plan.algorithm, plan.choices) == ("conditioning", ()) and "are at state 0" in plan.reason


def test_a_query_beyond_its_budget_is_explained_with_its_error():
    s = bt.bayesuvius(4, heads=4, slices=2, per="word", observe=Categorical(3)).sentence(" ".join("abcdefghijklmn"))
    evidence = {f"y_{i}": 1 for i in range(14)}
    for arguments in (("posterior", "c_0_0", evidence), ("most_probable", evidence), ("log_prob", evidence)):
        plan = s.explain(*arguments)
        assert plan.states > 2**16 and "c_0_0" in str(plan.excess) and plan.excess in str(plan)
        with pytest.raises(bt.BudgetError) as caught:
            getattr(s, arguments[0])(*arguments[1:])
        assert str(caught.value) == plan.excess


def test_flops_of_a_plan_are_those_of_the_pass():
    net = bt.bayesuvius(8, heads=3, slices=2, per="slice")
    s = net.sentence("a b c d")
    assert s.explain("value", "x_2_3").flops == net.cost(words=4, want=["x_2"]).flops
    assert s.do(c_0=0, c_1=1).explain("value", "x_2_3").flops < s.do(c_0=0).explain("value", "x_2_3").flops


def test_a_slow_query_warns_before_it_starts(monkeypatch):
    from bnet_transformer.inference import PerformanceWarning, plan

    monkeypatch.setattr(plan, "WARN_EVALUATIONS", 0)
    s = bt.bayesuvius(4, attention="marginal", observe=Categorical(3)).sentence("a b c")
    assert s.explain("tpm", "j_0").algorithm == "reference"
    with pytest.warns(PerformanceWarning, match="j_0 is neither|j is neither"):
        s.tpm("j_0")
