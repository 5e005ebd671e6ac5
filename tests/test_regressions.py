"""Typical mistakes of users: each raises one clear error, and none gives a wrong result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.tpm import TPM, Add, Attention, Categorical, Embed, Given, Linear, Pool, Read, Relative, Select
from tests.cases import every

W = ["word"]
X = bt.Node("x", Given(4), plates=W)
D = torch.float64


def make_linear(role: str = "x", *parents: str, plates: list[str] = W) -> bt.Node:
    return bt.Node(role, Linear(4), parents or ["x"], plates)


def build(*slice_: bt.Node, prologue=(X,), epilogue=(), nodes=(), plates=(), **options) -> bt.BNet:
    return bt.BNet(bt.Declaration([bt.Stack(slice_, prologue, epilogue, **options)], nodes, plates))


@dataclass(frozen=True)
class Laplace(TPM):
    slots: ClassVar[tuple[str, ...]] = ("x",)
    kind: ClassVar = "continuous"

    def shape(self, *parents):
        return parents[0].shape

    def distribution(self, context, *parents):
        return torch.distributions.Independent(torch.distributions.Laplace(parents[0], torch.ones_like(parents[0])), 1)


class LocalLaplace(torch.distributions.Laplace):
    """A distribution with a name that Pyro does not have."""


@dataclass(frozen=True)
class Nameless(Laplace):
    def distribution(self, context, *parents):
        return torch.distributions.Independent(LocalLaplace(parents[0], torch.ones_like(parents[0])), 1)


def test_a_batch_of_a_user_defined_distribution_is_refused_not_replaced():
    weight = bt.Node("W", Select((4, 4)), ["c"])
    readout = bt.Node("y", Laplace(), ["x"], W)
    s = build(weight, bt.Node("x", Linear(), ["W", "x"], W), epilogue=[readout], nodes=[bt.Node("c", Categorical(2))])
    s = s.sentence("a b")
    with pytest.raises(bt.BNetError, match=r"latent choices \(c\)"):
        s.tpm("y_0")
    assert isinstance(s.do(c=1).tpm("y_0").base_dist, torch.distributions.Laplace)


def test_draws_that_a_sentence_refuses_are_pyros_where_pyro_has_them():
    """The error advises `net.pyro()` only where it can draw: for a Laplace of variance 2, not for a class that Pyro
    does not have."""
    laplace = build(make_linear(), epilogue=[bt.Node("y", Laplace(), ["x"], W)]).sentence("a b")
    with pytest.raises(bt.BNetError, match="a Categorical or a Normal"):
        laplace.sample(3)
    x = torch.zeros(5000, 2, 4)
    samples, mean = laplace.net.pyro()(x)["y"], laplace.net.module()(x[:1])[0]
    assert torch.allclose(samples.mean(0), mean, atol=0.1) and torch.allclose(
        samples.var(0), torch.tensor(2.0), atol=0.3
    )
    with pytest.raises(bt.BNetError) as caught:
        build(make_linear(), epilogue=[bt.Node("y", Nameless(), ["x"], W)]).sentence("a b").sample(3)
    assert caught.value.allowed is None


def test_a_label_is_no_word_to_read_and_no_head():
    nodes = [
        make_linear("v"),
        bt.Node("j", Read(), ["x", every("x")], W),
        bt.Node("x", Add(), [every("v", pick={"word": "j"})], W),
    ]
    words = [bt.Node("t", Given(states=3), plates=W), bt.Node("x", Embed(4), ["t"], W)]
    s = build(*nodes, prologue=words, vocabulary=["the", "cat", "sat"]).sentence("cat the sat")
    with pytest.raises(bt.EvidenceError, match="no labels"):
        s.do(j_0_0="cat")
    chapter = bt.bayesuvius(4, heads=3, per="slice", vocabulary=["the", "cat", "sat"]).sentence("cat")
    with pytest.raises(bt.EvidenceError, match="no labels"):
        chapter.do(c_0="cat")


def test_evidence_on_a_function_is_no_do():
    s = bt.bayesuvius(4, heads=3).sentence("the cat sat")
    observed = s.observe(q_0_0=s.do(c=0)["q_0_0"])
    assert observed["x_1_0"].equal(s["x_1_0"]) and observed["q_0_0"].equal(s["q_0_0"])
    assert observed.attention(0).equal(s.attention(0)) and observed.tpm("x_1_0").v.equal(s.tpm("x_1_0").v)
    assert observed.posterior("c").tolist() == [1.0, 0.0, 0.0]


def test_nan_is_never_an_answer():
    s = bt.bayesuvius(4, observe=Categorical(3)).sentence(x=[[1e30] * 4, [-1e30] * 4])
    for call in (lambda: s.posterior("c", {"y_0": 1}), lambda: s["x_1_0"], lambda: s.attention(0)):
        with pytest.raises(bt.BNetError, match="number"):
            call()


def test_reading_stays_in_log_space():
    nodes = [make_linear("v"), bt.Node("j", Read(), ["x", every("x")], W), make_linear()]
    s = build(*nodes).sentence(x=[[30.0, 0, 0, 0], [-30.0, 1, 0, 0], [0, 1, 2, 3.0]])
    logits = s.tpm("j_0_0").logits
    assert torch.isfinite(logits).all() and logits[1] < -1000
    assert s.posterior("j_0_0", {"j_0_0": 1}).tolist() == [0.0, 1.0, 0.0]


def test_a_relative_bias_is_the_same_score_under_both_normalisers():
    x, b = torch.randn(3, 4, dtype=D), torch.randn(5, dtype=D)
    scores = x @ x.T + torch.stack([torch.stack([b[max(-2, min(2, k - q)) + 2] for k in range(3)]) for q in range(3)])
    bias = bt.Node("b", bt.tpm.Weight(5))
    for over, pair, expected in (
        ("keys", ["x", every("x")], torch.softmax(scores, 1)),
        ("queries", [every("x"), "x"], torch.softmax(scores, 0).T),
    ):
        mix = bt.Node("x", Attention(bias=Relative(2), over=over), [*pair, every("x"), "b"], W)
        s = build(mix, nodes=[bias]).to(D).replace({"b.value": b}).sentence(x=x)
        torch.testing.assert_close(s.attention(0), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "selector, reach",
    [(bt.Node("j", Read(), ["x", every("x")], W), "causal"), (bt.Node("j", Categorical(7), plates=W), "every")],
)
def test_a_word_is_picked_by_its_reader(selector, reach):
    picked = bt.Node("x", Add(), [bt.Arrow("v", reach, pick={"word": "j"})], W)
    with pytest.raises(bt.DeclarationError, match="of a word by a Read node"):
        build(make_linear("v"), selector, picked)


def test_a_weak_reading_does_not_drop_a_query_or_a_residual():
    mix = bt.Node("x", Attention(residual=True), ["x", every("x"), every("x"), "x"], W)
    graph = build(mix).sentence(x=[[1.0, 0, 0, 0], [3.0, 0, 0, 0]]).graph(min_weight=0.5)
    assert graph.has_edge("x_0_0", "x_1_0") and not graph.has_edge("x_0_0", "x_1_1")


def test_rows_over_different_choices_are_not_stacked():
    mask = [[True, True, False], [False, True, True], [True, False, True]]
    s = bt.bayesuvius(4, slices=2, per="word", mask=mask).sentence("a b c")
    with pytest.raises(bt.BNetError, match="same latent choices"):
        s.attention(1)
    assert s.attention(0).shape == (2, 3, 3)


def test_a_node_has_one_value():
    s = bt.bayesuvius(4, observe=Categorical(3)).sentence("a b")
    with pytest.raises(bt.EvidenceError, match="two different observed values"):
        s.observe(y_0=1).posterior("c", {"y_0": 0})
    assert s.observe(y_0=1).observe(y_0=1).posterior("c").equal(s.posterior("c", {"y_0": 1}))
    with pytest.raises(bt.EvidenceError, match="in the mapping and also a keyword argument"):
        s.do({"c": 0}, c=1)
    with pytest.raises(bt.BNetError, match="expected a random node"):
        s.do(c=1).posterior("c")
    with pytest.raises(bt.BNetError, match=r"is set by do, and has no attention\. Use the sentence before this do"):
        s.do(x_1_0=torch.zeros(4)).attention(0)


@dataclass(frozen=True)
class Bad(TPM):
    """A TPM with one defect."""

    wrong: str = ""
    slots: ClassVar[tuple[str, ...]] = ("x",)

    def shape(self, *parents):
        if self.wrong == "raises":
            raise ValueError("not enough values to unpack")
        if self.wrong == "refuses":
            raise bt.BNetError("the width is odd")
        return {"none": None, "list": [4], "number": 4}.get(self.wrong, parents[0].shape)

    def parameters(self, *parents):
        return {"parameters": {"p": (4,)}, "no mapping": 3}.get(self.wrong, {})

    def priors(self):
        return {"unknown": 1.0} if self.wrong == "priors" else {}

    def value(self, context, *parents):
        return {"sum": parents[0].sum(-1), "nothing": None}.get(self.wrong, parents[0])


@pytest.mark.parametrize("wrong", ["raises", "refuses", "none", "list", "number", "parameters", "no mapping", "priors"])
def test_mistakes_in_user_defined_tpms_are_reported(wrong):
    with pytest.raises(bt.DeclarationError, match="a_0, Bad: expected"):
        build(bt.Node("a", Bad(wrong), ["x"], W), make_linear("x", "a"))


def test_a_prior_without_logits_is_reported():
    with pytest.raises(
        bt.DeclarationError, match=r"y, prior: expected None, because affine=False omits the logits; got 0.5"
    ):
        bt.bayesuvius(3, observe=bt.tpm.Categorical(3, prior=0.5, affine=False))


@pytest.mark.parametrize("wrong", ["sum", "nothing"])
def test_a_value_of_another_shape_is_named(wrong):
    s = build(bt.Node("a", Bad(wrong), ["x"], W), make_linear("x", "a")).sentence("a")
    with pytest.raises(bt.BNetError, match=r"a_0 \(Bad\): expected a value of its declared shape \(4,\)"):
        s["x_1_0"]


def test_all_faults_at_once():
    with pytest.raises(bt.DeclarationError) as caught:
        build(make_linear(), epilogue=[bt.Node("read1", Linear(), ["x"], W), bt.Node("read2", Linear(), ["x"], W)])
    assert len(caught.value.faults) == 2
    with pytest.raises(bt.DeclarationError) as caught:
        build(bt.Node("x", Add(), ["zzz", "qqq"], ["hed", "hod", "word"]), slices=3)
    text = str(caught.value)
    assert all(name in text for name in ("zzz", "qqq", "hed", "hod")) and len(caught.value.faults) == 4


def test_read_reads_words():
    heads = make_linear("e", plates=["h", "word"])
    with pytest.raises(bt.DeclarationError, match="a collection of words"):
        build(heads, bt.Node("j", Read(), ["x", "e"], W), make_linear(), plates=[bt.Plate("h", 2)])
    with pytest.raises(bt.DeclarationError, match="as many states as words"):
        build(bt.Node("j", Read(), ["x", every("x")], W), bt.Node("x", Add(), ["x", "j"], W))


def test_reading_twice_is_not_enumerated_word_by_word():
    nodes = [make_linear("v"), bt.Node("j", Read(), ["x", every("x")], W)]
    module = build(*nodes, bt.Node("x", Add(), [every("v", pick={"word": "j"})], W), slices=2).module()
    with pytest.raises(bt.BNetError, match="x_2 depends on j_0 at several words"):
        module(torch.randn(1, 3, 4))


def test_given_words_of_any_shape():
    words = [bt.Node("x", Given((2, 2)), plates=W)]
    plain = build(bt.Node("x", Add(), ["x"], W), prologue=words)
    x = torch.randn(3, 2, 2)
    assert plain.sentence(x=x)["x_1_1"].equal(x[1]) and plain.sentence(given={"x_0": x})["x_1_2"].equal(x[2])


def test_types_of_parameters():
    chapter = bt.bayesuvius(4)
    mixed = chapter.replace({"W_q_0.values": chapter.parameters["W_q_0.values"].double()})
    with pytest.raises(bt.BNetError, match="one floating type"):
        mixed.sentence("a")
    plain = build(bt.Node("x", Pool("sum"), [every("x")], W)).to(D)
    assert plain.sentence("a b")["x_1_0"].dtype == D


@pytest.mark.parametrize(
    "make",
    [
        lambda: Categorical(2, probabilities=(1.1, -0.1)),
        lambda: Categorical(3, labels=5),
        lambda: Categorical(3, labels=(1, 2, 3)),
        lambda: Attention(bias=True),
        lambda: bt.Reach("mask", table=5),
        lambda: bt.Reach("mask", table="ab"),
        lambda: bt.Reach("mask", table=[[1, 0], [0, 1]]),
        lambda: bt.bayesuvius(4, mask="before"),
        lambda: bt.bayesuvius(4, mask="foo"),
    ],
)
def test_refused_when_made(make):
    with pytest.raises(bt.BNetError, match="expected"):
        make()


def test_small_things():
    assert bt.tpm.Weight(()).parameters()["value"].shape == ()
    table = bt.Reach("mask", table=[[True, False], [True, True]])
    assert hash(table) == hash(bt.Reach("mask", table=((True, False), (True, True))))
    s = bt.bayesuvius(4).sentence(["\ud800", "a"])
    assert s["x_0_0"].shape == (4,)
    graph = s.do(c=1).graph()
    assert graph.nodes["c"]["do"] and not graph.nodes["x_0_0"]["do"]
    with pytest.raises(bt.BudgetError, match="budget="):
        s.limits(budget=1).posterior("c", {"x_1_0": s.do(c=1)["x_1_0"]})
