"""Simulation-based calibration: correct posteriors pass, wrong ones are named, and bands have their stated level."""

import math
import os
import signal
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from matplotlib.figure import Figure
from torch.distributions import Dirichlet

import bnet_transformer as bt
from benchmarks import calibration as benchmark
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.inference import log_evidence
from bnet_transformer.learning import calibration
from bnet_transformer.learning.calibration import Calibration, Quantities
from bnet_transformer.learning.fit import methods
from bnet_transformer.learning.fit.objective import FitObjective, Method, select_learnable
from bnet_transformer.learning.fit.predictive import ReadoutPredictor, predict_readout
from bnet_transformer.learning.fit.restarts import build_fit
from bnet_transformer.tpm import Categorical, Normal
from tests.cases import CASES

OBSERVED = ["rain", "wet"]


@dataclass(frozen=True, kw_only=True)
class Conjugate(Method):
    """The posterior of observed tables: a Dirichlet with the prior plus the counts, with some defect."""

    name: ClassVar[str] = "conjugate"

    power: float = 1.0  # of the density: above 1 the draws are too narrow
    shift: float = 0.0  # of the count of state 0
    correlation: float = 0.0  # of consecutive draws
    draws: int = 20
    failures: bool = False


def solve_conjugate(problem, method):
    if method.failures and problem.seed % 2:
        raise bt.BNetError("fit", expected="an even seed")
    torch.manual_seed(problem.seed % 2**32)
    rain, wet = (problem.corpus.observed[name] for name in OBSERVED)
    counts = {"rain.logits": torch.zeros(2), "wet.logits": torch.zeros(2, 3)}
    counts["rain.logits"].index_add_(0, rain, torch.ones(len(rain)))
    counts["wet.logits"].index_put_((rain, wet), torch.ones(len(rain)), accumulate=True)
    samples = {}
    for name, count in counts.items():
        concentration = (1 + count) * method.power
        concentration[..., 0] += method.shift
        values = Dirichlet(concentration).sample((method.draws,))
        for k in range(1, method.draws):  # a chain that stays where it is with some probability
            if torch.rand(()) < method.correlation:
                values[k] = values[k - 1]
        samples[name] = values[None]
    point = {name: value[0, 0].log() for name, value in samples.items()}
    return build_fit(problem, method, point, finished=True, samples=samples)


@pytest.fixture
def weather(monkeypatch):
    monkeypatch.setitem(methods.METHODS, Conjugate, solve_conjugate)
    wet = bt.Node("wet", Categorical(3), ["rain"])
    return bt.BNet(bt.Declaration(nodes=[bt.Node("rain", Categorical(2)), wet]))


def calibrate(net, method, **options):
    options = {"x": 10, "replications": 20, "observed": OBSERVED, "progress": False} | options
    return bt.calibrate(net, method, **options)


def test_a_correct_posterior_is_calibrated(weather):
    share = {"P(rain)": lambda net: net.parameters["rain.logits"].softmax(-1)[1]}
    result = calibrate(weather, Conjugate(), quantities=share, seed=2)
    assert result.verdict == "calibrated" and set(result.verdicts.values()) == {"calibrated"}
    assert result.replications == result.requested == 20 and result.finished and not result.failures
    names = ["log_likelihood", "rain_predicted", "wet_predicted[0]", "wet_predicted[1]", "rain_sorted", "wet_entropy"]
    assert list(result.ranks) == [*names, "P(rain)"]
    for name, ranks in result.ranks.items():
        assert bool((ranks >= 0).all() and (ranks <= result.draws[name]).all())
        mean, error = result.coverage(name)
        assert abs(mean - 0.9) < 4 * max(error, 0.03)
    assert result.to_dataframe().shape == (7, 7) and "calibrated" in result.caption


@pytest.mark.parametrize(
    ("method", "verdict"),
    [(Conjugate(power=8), "too narrow"), pytest.param(Conjugate(shift=60), "biased high", marks=pytest.mark.slow)],
)
def test_a_defect_is_named(weather, method, verdict):
    share = {"first": lambda net: net.parameters["rain.logits"].softmax(-1)[0]}
    result = calibrate(weather, method, quantities=share, x=200, replications=40)
    assert result.verdicts["first"] == verdict and f"first: {verdict}" in result.verdict
    assert result.p["first"] < result.error


@pytest.mark.slow
def test_correlated_draws_of_a_correct_posterior_are_thinned(weather, monkeypatch):
    method = Conjugate(correlation=0.9, draws=120)
    result = calibrate(weather, method, replications=150, seed=1)
    assert result.verdict == "calibrated" and float(result.draws["rain_sorted"].double().median()) < 15
    monkeypatch.setattr(calibration, "count_effective", lambda draws: 240.0)  # no thinning
    assert calibrate(weather, method, replications=150, seed=1).verdict != "calibrated"


@pytest.mark.slow
def test_mean_field_svi_is_too_narrow_on_correlated_words():
    case = benchmark.CASES["known attention"]
    options = {"learn": case.learn, "spread": 1.0, "progress": False}
    method = bt.SVI(draws=100, steps=150, rate=0.1)
    result = bt.calibrate(case.net, method, x=case.draw_words, replications=20, **options)
    wrong = [name for name, verdict in result.verdicts.items() if verdict != "calibrated"]
    assert "OV x_1 norm[1]" in wrong and result.coverage("OV x_1 norm[1]")[0] < 0.8


@pytest.mark.slow
def test_nuts_is_calibrated_on_correlated_words():
    case = benchmark.CASES["known attention"]
    method = bt.NUTS(chains=1, draws=40, warmup=40)
    result = bt.calibrate(case.net, method, x=case.draw_words, replications=20, learn=["c.logits"], progress=False)
    assert result.verdict == "calibrated"


def test_the_exact_posterior_of_heads_is_calibrated():
    result = benchmark.calibrate_heads(500)
    assert result.p["c"] > 0.01 and len(benchmark.format_rows("exact", result)) == 1


@pytest.mark.parametrize("count", [20, 60])
def test_bands_have_the_stated_simultaneous_level(count):
    samples = np.random.default_rng(0).uniform(size=(2000, count))
    low, high = calibration.simultaneous_band(count, 0.1)
    p = np.array([calibration.ecdf_p_value(values) for values in samples])
    outside = np.zeros(len(samples), dtype=bool)
    for k, z in enumerate(calibration.get_points(count)):
        ecdf = (samples <= z).mean(1)
        outside |= (ecdf < low[k] - 1e-9) | (ecdf > high[k] + 1e-9)
    np.testing.assert_array_equal(outside, p <= 0.1)
    for level in (0.05, 0.1, 0.3, 0.8):
        error = (level * (1 - level) / len(samples)) ** 0.5
        assert level - 0.015 - 3 * error < (p <= level).mean() < level + 3 * error  # counts are discrete


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 6), st.floats(0.01, 0.9))
def test_the_probability_of_a_band_is_that_of_all_outcomes(count, tail):
    """Brute force over the cells of all values: multinomial cells have equal probabilities."""
    tails = calibration._tail_probabilities(count)
    cells = np.stack(np.meshgrid(*[np.arange(count)] * count, indexing="ij"), -1).reshape(-1, count)
    below = (cells[:, :, None] < np.arange(1, count)).sum(1)
    smallest = tails[np.arange(count - 1), below].min(1)
    assert calibration.exceedance_probability(count, tail) == pytest.approx((smallest <= tail).mean(), rel=1e-12)


def test_small_p_values_have_correct_digits():
    """In fractions: given the sum of the first cells, the number of values in the next one is binomial."""
    count, tail = 20, 1e-14
    remaining = {0: Fraction(1)}  # the probability of each partial sum that is still inside
    for cell, row in enumerate(calibration._tail_probabilities(count) > tail):
        share, sums = Fraction(1, count - cell), Counter()
        for n, p in remaining.items():
            for m in np.flatnonzero(row[n:]).tolist():
                sums[n + m] += p * math.comb(count - n, m) * share**m * (1 - share) ** (count - n - m)
        remaining = sums
    expected = float(1 - sum(remaining.values()))
    assert 0 < expected < 1e-14
    assert calibration.exceedance_probability(count, tail) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("word", "sprinkler", "two selectors", "tagger")])
def test_quantities_do_not_depend_on_the_draw_that_they_are_computed_with(case):
    """The batch of draws gives the log evidence and the prediction of each net."""
    network = case.net.network
    names = [m for m in infer_fit_task(network).readouts if not network.graph.out_edges[m.group.index]]
    simulator = calibration.Simulator(network, 1 if not network.graph.word_stacks else [case.text], None, 0)
    corpus = simulator.observe(network, 0)
    objective = FitObjective(network, select_learnable(network, tuple(names), None, 1.0), 2**16)
    nets = [network, network.with_parameters({k: v + 0.1 * torch.ones_like(v) for k, v in _weights(network)})]
    sets = {name: torch.stack([n.parameters[name] for n in nets]) for name in objective.learned.names}
    values = Quantities(objective, simulator.readouts, {}, bt.BNet, 0).evaluate(sets, corpus)
    for k, net in enumerate(nets):
        module = bt.BNet(net).module()
        evidence = log_evidence(module, corpus.evidence, corpus.x, corpus.mask, given=corpus.given)
        assert float(values["log_likelihood"][k]) == pytest.approx(float(evidence.detach().sum()), abs=1e-8)
        for spec in simulator.readouts:
            expected = predict_readout(net, spec.group.name, [corpus], 2**16)
            actual = ReadoutPredictor(network, spec.group.name).predict(sets, corpus)[k]
            torch.testing.assert_close(actual, expected)
    assert all(value.shape == (2,) for value in values.values())


def _weights(network):
    tables = network.unconditional_logit_names
    return [(k, v) for k, v in network.parameters.items() if k in network.learnable and k not in tables]


def test_quantities_do_not_depend_on_labels_or_on_the_basis_of_keys():
    net = bt.bayesuvius(3, heads=3, key_dim=2, observe=Normal(0.5), seed=1).to(torch.float64)
    net = net.replace({"c.logits": torch.tensor([0.5, 0.3, 0.2]).double().log()})
    basis, order = torch.tensor([[2.0, 1.0], [0.0, -1.0]]).double(), [2, 0, 1]
    p = {name: value[order] for name, value in net.parameters.items() if value.dim()}
    p["W_q_0.values"], p["W_k_0.values"] = basis @ p["W_q_0.values"], basis.inverse().mT @ p["W_k_0.values"]
    simulator = calibration.Simulator(net.network, torch.randn(4, 3, 3).double(), None, 0)
    objective = FitObjective(net.network, select_learnable(net.network, simulator.readouts, None, 1.0), 2**16)
    sets = {name: torch.stack([net.parameters[name], p[name]]) for name in objective.learned.names}
    corpus = simulator.observe(net.network, 0)
    values = Quantities(objective, simulator.readouts, {}, bt.BNet, 0).evaluate(sets, corpus)
    names = {"log_likelihood", "y_predicted[1]", "c_sorted[1]", "c_entropy", "A x_1 norm[2]", "OV x_1 norm[0]"}
    assert names <= set(values)
    for value in values.values():
        torch.testing.assert_close(value[0], value[1])


def test_padding_has_no_observations():
    net = bt.bayesuvius(3, heads=2, vocabulary=["a", "b"], observe=Categorical(2))
    simulator = calibration.Simulator(net.network, ["a b a", "b"], None, 0)
    assert simulator.observe(net.network, 0).evidence["y"].observed.tolist() == [[True] * 3, [True, False, False]]


def test_words_of_a_function_differ_by_replication():
    seeds = []

    def draw(seed):
        seeds.append(seed)
        return torch.randn(4, 2, 2, generator=torch.Generator().manual_seed(seed))

    net = bt.bayesuvius(2, heads=2, observe=Normal(1.0))
    before = torch.get_rng_state()
    options = {"learn": ["c.logits"], "replications": 20, "progress": False}
    result = bt.calibrate(net, bt.SVI(steps=1, draws=10), x=draw, **options)
    assert len(set(seeds)) == 20 and torch.equal(before, torch.get_rng_state())
    assert set(result.ranks) == {"log_likelihood", "y_predicted[0]", "y_predicted[1]", "c_sorted"}


def test_equal_seeds_give_equal_ranks(weather):
    first, second = (calibrate(weather, Conjugate(draws=5), x=4).ranks["log_likelihood"] for _ in range(2))
    assert torch.equal(first, second)


def test_failed_replications_are_counted_with_their_reason(weather):
    result = calibrate(weather, Conjugate(failures=True, draws=10))
    assert 5 < len(result.failures) < 15 and result.replications + len(result.failures) == 20
    assert "an even seed" in next(iter(result.failures.values())) and "failed" in result._repr_html_()


def test_an_interrupt_returns_what_is_done(weather):
    calls = []

    def count(net):
        calls.append(1)
        if len(calls) == 3 * 11:  # in the third replication, which is completed
            os.kill(os.getpid(), signal.SIGINT)
        return 0.0

    result = calibrate(weather, Conjugate(draws=10), quantities={"count": count})
    assert result.replications == 3 and not result.finished
    assert result.verdict == "too few replications" and "interrupted" in result.caption


def test_bad_input_is_an_error(weather):
    quantities = [{"a": 3}, {"a": lambda net: "b"}]
    for options in (
        {"method": "map"}, {"replications": 5}, {"observed": ["cloud"]}, {"x": None}, {"x": 0},
        *({"quantities": value} for value in quantities),
    ):  # fmt: skip
        with pytest.raises(bt.BNetError):
            calibrate(weather, **{"method": Conjugate(draws=10), "replications": 20, **options})
    net = bt.bayesuvius(2, heads=2, observe=Normal(1.0))
    for options in ({"x": torch.zeros(2, 2, 2)}, *({"x": x, "spread": 1.0} for x in (20, torch.zeros(2, 2, 3)))):
        with pytest.raises(bt.BNetError):
            bt.calibrate(net, "svi", **options)


def make_result(count=50):
    ranks = torch.arange(count) % 20
    values = {"even": ranks, "low": ranks // 4, "wide": 5 + ranks // 2}
    return Calibration("nuts", values, {name: torch.full((count,), 19) for name in values}, count)


def test_the_plot_draws_the_differences_and_the_bands():
    result = make_result()
    figure = bt.plot(result)
    visible = [ax for ax in figure.axes if ax.get_visible()]
    assert [ax.get_title().split(":")[0] for ax in visible] == ["even", "low", "wide"]
    low, high = result.band
    for name, ax in zip(result.ranks, visible, strict=True):
        curve = ax.lines[-1].get_ydata()[1:-1]
        np.testing.assert_allclose(curve, result.differences[name])
        is_inside = bool(((low - 1e-9 <= curve) & (curve <= high + 1e-9)).all())
        assert is_inside == (result.verdicts[name] == "calibrated") == (name == "even")
    ax = Figure().subplots()
    bt.plot(result, ax=ax, quantity="wide")
    assert ax.get_title(loc="left") == "wide: too wide"
    with pytest.raises(bt.UnknownNameError):
        bt.plot(result, quantity="evn")
