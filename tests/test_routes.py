"""The router tells the truth: what it says is compiled runs without the reference, and what it names is the reason."""

import pytest

import bnet_transformer as bt
from bnet_transformer.inference.explain import EXPLAINERS
from bnet_transformer.tpm import Categorical
from tests.cases import CASES

SLOW = {"codebook, two slices", "slice, codebook"}
SOME = [case for case in CASES if case.name not in SLOW]


def arguments(s, evidence):
    """Arguments for each question that a sentence answers with numbers."""
    first = {member.family.name: next(s.ground.family_names(member.family)) for member in s.net.network.members}
    observed = {s.ground.family_of(s.ground.id(name)).name for name in evidence}
    for member in s.net.network.members:
        name = first[member.family.name]
        yield ("value", name) if not member.tpm.is_random else ("tpm", name)
        if member.tpm.kind == "discrete" and member.family.name not in observed:
            yield "posterior", name
            yield "posterior", name, evidence
    yield "log_prob", evidence
    yield "sample", 3, evidence
    slices = {member.family.step for member in s.net.network.members if member.reads_words and member.tpm.has_reading}
    yield from (("attention", t) for t in slices - {None})


def ask(s, question, *rest):
    return s[rest[0]] if question == "value" else getattr(s, question)(*rest)


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_what_is_not_the_reference_runs_without_it(case, without_the_reference):
    s = case.sentence
    for question, *rest in arguments(s, case.evidence or {}):
        try:
            route = s.explain(question, *rest)
        except bt.BNetError:
            with pytest.raises(bt.BNetError):
                ask(s, question, *rest)
            continue
        if route.algorithm == "reference":
            assert route.node is not None and route.evaluations > 0 and route.flops is None
            continue
        assert route.flops is None or route.flops >= 0
        with without_the_reference():
            ask(s, question, *rest)


def test_the_node_that_rules_elimination_out_is_named():
    s = bt.bayesuvius(4, heads=3, slices=2, per="word", observe=Categorical(3)).sentence("the cat sat")
    route = s.explain("posterior", "c_0_0", {"y_2": 1})
    assert (route.algorithm, route.states, route.node) == ("enumeration", 81, "c_0")
    route = s.explain("value", "x_2_0")
    assert (route.algorithm, route.states) == ("enumeration", 81)
    route = s.explain("posterior", "c_0_0", {"x_1_0": s.do(c_0_0=1)["x_1_0"]})
    assert (route.algorithm, route.node) == ("elimination", None)


def test_flops_of_a_route_are_those_of_the_pass():
    net = bt.bayesuvius(8, heads=3, slices=2, per="slice")
    s = net.sentence("a b c d")
    assert s.explain("value", "x_2_3").flops == net.cost(words=4, want=["x_2"]).flops
    assert s.do(c_0=0, c_1=1).explain("value", "x_2_3").flops < s.do(c_0=0).explain("value", "x_2_3").flops


def test_every_question_has_an_explainer_of_its_name():
    names = {name for name in EXPLAINERS if name != "value"}
    assert all(callable(getattr(bt.Sentence, name)) for name in names)
    with pytest.raises(bt.UnknownNameError, match="posterior"):
        bt.bayesuvius(4).sentence("a b").explain("posterioor", "c")
    with pytest.raises(bt.BNetError, match="arguments of posterior"):
        bt.bayesuvius(4).sentence("a b").explain("posterior", nodes="c")


def test_a_slow_question_says_so_before_it_starts(monkeypatch):
    from bnet_transformer.inference import PerformanceWarning, route

    monkeypatch.setattr(route, "SLOW", 0)
    s = bt.bayesuvius(4, attention="marginal", observe=Categorical(3)).sentence("a b c")
    assert s.explain("tpm", "j_0").algorithm == "reference"
    with pytest.warns(PerformanceWarning, match="j is neither"):
        s.tpm("j_0")
