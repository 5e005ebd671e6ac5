"""Tables with probabilities of 0: the chest clinic with its published tables, against pgmpy, sums and counts."""

import math

import numpy as np
import pytest
import torch
from pgmpy.readwrite import BIFReader
from pyro.infer import TraceEnum_ELBO

import bnet_transformer as bt
from bnet_transformer.inference import Evidence, log_evidence
from bnet_transformer.tpm import Categorical
from tests import flat_options
from tests.discrete_networks import PARENTS, D, check_posteriors, draw_samples, get_tables, joint, marginal, textbook


def test_posteriors_are_those_of_pgmpy():
    for evidence in ({}, {"xray": 1, "dysp": 0}, {"either": 0, "smoke": 1}):
        check_posteriors(textbook(), evidence)


def test_the_probability_of_evidence_is_a_sum_over_all_states():
    net = textbook()
    s, full = net.sentence(), joint(net)
    expected = marginal(full, "xray", {"dysp": 1})[1]
    assert float(s.log_prob({"xray": 1, "dysp": 1})) == pytest.approx(math.log(expected))
    dysp = torch.tensor([0, 1])
    actual = log_evidence(net.module(), {"dysp": Evidence(dysp)}).detach()
    np.testing.assert_allclose(actual.exp(), marginal(full, "dysp", {}))
    model = net.pyro()
    elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
    assert -elbo.loss(model, lambda **_: None, y={"dysp": dysp}) == pytest.approx(float(actual.sum()))
    mass = marginal(joint(net, {"either": 1}), "lung", {"dysp": 1})
    np.testing.assert_allclose(s.do(either=1).posterior("lung", {"dysp": 1}), mass / mass.sum(), atol=1e-12)
    for call in (s.log_prob, lambda e: s.posterior("smoke", e), lambda e: s.sample(5, e)):
        with pytest.raises(bt.EvidenceError):
            call({"either": 0, "lung": 1})


def test_samples_follow_the_joint_and_never_take_an_impossible_state():
    net = textbook()
    full = joint(net)
    unconditional = draw_samples(net, 10_000)
    conditioned = dict(net.sentence().sample(5_000, {"xray": 1}, seed=0).states)
    for result in (unconditional, conditioned):
        assert torch.equal(result["either"], result["tub"] | result["lung"])
    np.testing.assert_allclose(
        [float(unconditional[name].double().mean()) for name in PARENTS],
        [marginal(full, name, {})[1] for name in PARENTS],
        atol=0.02,
    )
    samples = net.pyro()(batch=500)
    assert torch.equal(samples["either"], samples["tub"] | samples["lung"])


def test_a_counterfactual_of_a_function_follows_from_its_parents():
    s = textbook().sentence()
    probs = s.counterfactual("either", {"tub": 0}, {"tub": 1, "lung": 0}).probabilities
    np.testing.assert_allclose(probs, [1, 0], atol=1e-12)
    probs = s.counterfactual("either", {"tub": 0}, {"tub": 1, "lung": 1}).probabilities
    np.testing.assert_allclose(probs, [0, 1], atol=1e-12)


@pytest.mark.slow
def test_exports_and_files_have_the_zeros(tmp_path):
    net = textbook()
    net.save(tmp_path / "asia.safetensors")
    loaded = bt.load(tmp_path / "asia.safetensors")
    assert all(value.equal(loaded.parameters[name]) for name, value in net.parameters.items())
    s = net.sentence()
    s.draw(tmp_path / "asia.bif")
    for model in (s.to_pgmpy(), BIFReader(str(tmp_path / "asia.bif")).get_model()):
        table = model.get_cpds("either")
        assert table.get_value(either="no", tub="no", lung="yes") == 0
        assert table.get_value(either="no", tub="no", lung="no") == 1
    s.observe(dysp="yes").draw(tmp_path / "asia.json")
    assert "NaN" not in (tmp_path / "asia.json").read_text()


def test_a_root_may_have_a_state_of_probability_zero():
    root = bt.Node("a", Categorical(3, probabilities=(0.0, 0.25, 0.75)))
    net = bt.BNet(bt.Declaration(nodes=[root, bt.Node("b", Categorical(2), ["a"])]))
    np.testing.assert_allclose(net.sentence().posterior("a"), [0, 0.25, 0.75], atol=1e-7)
    assert net.check()
    with pytest.raises(bt.EvidenceError):
        net.sentence().log_prob({"a": 0})


@pytest.mark.parametrize("row", [[-math.inf, -math.inf], [math.inf, 0.0], [math.nan, 0.0]])
def test_a_row_that_is_no_distribution_is_refused(row):
    with pytest.raises(bt.DeclarationError):
        textbook().replace({"asia.logits": torch.tensor(row, dtype=D)})


@pytest.mark.parametrize("options", [{"method": "em", "steps": 1}, {"steps": 100, "rate": 0.3}])
def test_a_fit_keeps_zeros_and_counts_the_rest(options):
    net, data = textbook(), draw_samples(textbook(), 200)
    start = net.replace({k: v.clamp(min=-1) for k, v in net.parameters.items() if k != "either.logits"})
    result = flat_options.fit(start, data, restarts=1, progress=False, **options)
    np.testing.assert_allclose(result.theta["either"], get_tables(net)["either"], atol=1e-12)
    for name in ("bronc", "smoke"):
        counts = np.zeros((2,) * (len(PARENTS[name]) + 1))
        np.add.at(counts, tuple(data[column].numpy() for column in (*PARENTS[name], name)), 1)
        np.testing.assert_allclose(result.theta[name], counts / counts.sum(-1, keepdims=True), atol=1e-3)
    partial = {name: value for name, value in data.items() if name not in ("tub", "lung")}
    result = flat_options.fit(start, partial, restarts=2, progress=False, **{**options, "steps": 2})
    np.testing.assert_allclose(result.theta["either"], get_tables(net)["either"], atol=1e-12)


def test_a_fit_that_cannot_keep_zeros_is_refused():
    net, data = textbook(), draw_samples(textbook(), 5)
    for method in ("svi", "nuts"):
        with pytest.raises(bt.BNetError, match="either"):
            flat_options.fit(net, data, method=method, progress=False)
    nodes = [bt.Node(name, Categorical(2, prior=2.0), parents) for name, parents in PARENTS.items()]
    smooth = bt.BNet(bt.Declaration(nodes=nodes)).to(D).replace(net.parameters)
    with pytest.raises(bt.BNetError, match="either"):
        bt.fit(smooth, data, method="em", progress=False)
    learn = [name for name in net.parameters if name != "either.logits"]
    result = bt.fit(smooth, data, method=bt.EM(steps=2), learn=learn, progress=False)
    assert result.net.parameters["either.logits"].equal(net.parameters["either.logits"])
