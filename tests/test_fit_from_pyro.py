"""Results of plain Pyro on `net.pyro()` as fits: equal to `bt.fit` and to exact posteriors."""

from __future__ import annotations

import warnings

import pyro
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI, Importance, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal

import bnet_transformer as bt
from bnet_transformer.tpm import Categorical, Normal

D = torch.float64
TRUE = torch.tensor([0.75, 0.25], dtype=D)


@pytest.fixture(autouse=True)
def _clear_parameters():
    pyro.clear_param_store()
    yield
    pyro.clear_param_store()


def mixture(prior: float = 2.0) -> bt.BNet:
    return bt.bayesuvius(3, heads=2, key_dim=2, observe=Normal(0.3), prior=prior, seed=1).to(D)


def draw_xy(net: bt.BNet, count: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    x = torch.randn(count, 3, 3, dtype=D)
    samples = net.replace({"c.logits": TRUE.log()}).pyro(parameters="own")(x)
    return x, samples["y"].reshape(count, 3, 3)


def coins() -> tuple[bt.BNet, dict[str, list[int]], torch.distributions.Beta]:
    """A net of one coin, its days, and the exact posterior of its table: Beta by conjugacy, concentrations of 2."""
    net = bt.BNet(bt.Declaration(nodes=[bt.Node("rain", Categorical(2, prior=2.0))])).to(D)
    return net, {"rain": [1] * 7 + [0] * 3}, torch.distributions.Beta(9.0, 5.0)


def to_tensors(days: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    return {"rain": torch.tensor(days["rain"])}


def test_a_map_by_autodelta_is_the_fits_own():
    net = mixture()
    x, y = draw_xy(net)
    model = net.pyro()
    guide = AutoDelta(pyro.poutine.block(model, expose=["theta_c"]))
    elbo = TraceEnum_ELBO(max_plate_nesting=model.max_plate_nesting)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo)
    for _ in range(120):
        svi.step(x, y)
    f = bt.fit_from_pyro(net, (x, y), guide, arguments=(x, y))
    expected = bt.fit(net, (x, y), method=bt.EM(steps=50), learn=["c.logits"], progress=False)
    torch.testing.assert_close(f.pi, expected.pi, atol=1e-3, rtol=0)
    assert not f.samples and f.method == "pyro" and f.learned == ("c.logits",) and isinstance(f.net, bt.BNet)
    torch.testing.assert_close(f.log_likelihood((x, y)), expected.log_likelihood((x, y)), atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_nuts_of_pyro_equals_the_fits_and_supports_every_query(tmp_path):
    net = mixture()
    x, y = draw_xy(net, 12)
    pyro.set_rng_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = NUTS(net.pyro(), max_plate_nesting=net.pyro().max_plate_nesting)
        mcmc = MCMC(kernel, num_samples=30, warmup_steps=30, disable_progbar=True)
        mcmc.run(x, y)
    f = bt.fit_from_pyro(net, (x, y), mcmc)
    expected = bt.fit(net, (x, y), method=bt.NUTS(chains=1, draws=60, warmup=20), learn=["c.logits"], progress=False)
    assert f.samples["c.logits"].shape == (1, 30, 2) and f.divergent == (0,)
    torch.testing.assert_close(f.pi, expected.pi, atol=0.1, rtol=0)
    assert f.predict(x).shape == y.shape and f.check((x, y), draws=20).p
    low, high = f.interval("c.logits")
    assert bool((low < f.pi).all() and (f.pi < high).all()) and f.heads.live == 2
    f.save(tmp_path / "f.fit")
    assert torch.equal(bt.load(tmp_path / "f.fit").samples["c.logits"], f.samples["c.logits"])
    az = pytest.importorskip("arviz", reason='pip install "bnet-transformer[arviz]"')
    assert isinstance(f.to_arviz(), az.InferenceData) and f.to_arviz().log_likelihood["y"].shape == (1, 30, 12)


def test_importance_sampling_is_the_exact_posterior():
    net, days, exact = coins()
    model = net.pyro()
    pyro.set_rng_seed(1)
    importance = Importance(model, num_samples=500).run(None, to_tensors(days), batch=10)
    f = bt.fit_from_pyro(net, days, importance, num_samples=4000)
    probs = f.samples["rain.logits"][..., 1].flatten()
    assert float(probs.mean()) == pytest.approx(float(exact.mean), abs=0.03)
    assert float(probs.std()) == pytest.approx(float(exact.stddev), abs=0.02)
    assert 100 < f.effective_sample_size < 500 and "500 draws" in f.approximate


def test_few_effective_draws_are_warned_of():
    net, days, _ = coins()
    importance = Importance(net.pyro(), num_samples=2).run(None, to_tensors(days), batch=10)
    importance.log_weights = [torch.tensor(0.0), torch.tensor(-50.0)]
    with pytest.warns(UserWarning, match=r"2 draws with an effective sample size of 1\.0"):
        f = bt.fit_from_pyro(net, days, importance)
    torch.testing.assert_close(f.theta["rain"], importance.exec_traces[0].nodes["theta_rain"]["value"])


@pytest.mark.slow
def test_draws_of_a_user_defined_guide_are_samples():
    net, days, exact = coins()

    def guide(*args, **options):
        start, positive = torch.tensor([4.0, 4.0], dtype=D), torch.distributions.constraints.positive
        pyro.sample("theta_rain", pyro.distributions.Dirichlet(pyro.param("concentration", start, positive)))

    svi = SVI(net.pyro(), guide, pyro.optim.Adam({"lr": 0.05}), pyro.infer.TraceMeanField_ELBO(num_particles=4))
    pyro.set_rng_seed(0)
    for _ in range(80):
        svi.step(None, to_tensors(days), batch=10)
    f = bt.fit_from_pyro(net, days, guide, num_samples=300)
    assert f.samples["rain.logits"].shape == (1, 300, 2) and "guide" in f.approximate
    assert float(f.theta["rain"][1]) == pytest.approx(float(exact.mean), abs=0.05)
    same = bt.fit_from_pyro(net, days, guide, num_samples=300)
    assert torch.equal(same.samples["rain.logits"], f.samples["rain.logits"])


def test_helpers_of_an_automatic_guide_are_no_parameters():
    net, days, _ = coins()
    guide = AutoNormal(net.pyro())
    guide(None, to_tensors(days), batch=10)
    assert [*bt.fit_from_pyro(net, days, guide, num_samples=5).samples] == ["rain.logits"]


def test_samples_by_any_name_of_a_parameter_are_those_of_the_parameter():
    net = mixture()
    data = draw_xy(net, 8)
    weights = torch.randn(2, 5, *net.parameters["W_v_0.values"].shape, dtype=D)
    table = torch.distributions.Dirichlet(torch.ones(2, dtype=D)).sample((2, 5))
    choices = torch.zeros(2, 5, 8, 1, 1, dtype=torch.long)
    named = bt.fit_from_pyro(net, data, {"W_v_0.values": weights, "c.logits": table})
    for renamed in ({"W_v_0_values": weights, "theta_c": table, "c": choices}, {"w": weights, "c_logits": table}):
        sites = {"w": "W_v_0.values"} if "w" in renamed else None
        f = bt.fit_from_pyro(net, data, renamed, sites=sites)
        assert all(torch.equal(value, named.samples[name]) for name, value in f.samples.items())
    single_chain = bt.fit_from_pyro(net, data, {"theta_c": table[0]})
    assert torch.equal(single_chain.net.parameters["W_v_0.values"], net.parameters["W_v_0.values"])


BAD = [
    ({"theta_d": TRUE[None]}, "theta_c"),
    ({"theta_c": TRUE[None, :1]}, r"\[draw, 2\]"),
    ({"theta_c": TRUE}, r"\[draw, 2\]"),
    ({"theta_c": TRUE[None].log()}, "rows of probabilities"),
    ({"theta_c": TRUE[None], "c.logits": TRUE[None]}, "a second site for c.logits"),
    ({"theta_c": TRUE[None], "W_v_0.values": torch.zeros(2, 2, 3, 3, dtype=D)}, "same number of chains"),
    ({"theta_c": (torch.full((5, 2), 0.5, dtype=D), torch.zeros(4))}, "names of sites to samples"),
    ({"c": torch.zeros(5, dtype=torch.long)}, "a site for at least one parameter"),
    ({}, "names of sites"),
    (3, "pyro.infer.MCMC"),
]


def test_what_does_not_match_the_net_is_refused():
    net = mixture()
    data = draw_xy(net, 4)
    for result, message in BAD:
        with pytest.raises(bt.BNetError, match=message):
            bt.fit_from_pyro(net, data, result)


def test_explain_describes_a_fit():
    net = mixture()
    data = draw_xy(net, 12)
    plan = bt.explain("fit", net, data, method=bt.MAP(restarts=3), batch=4)
    assert (plan.algorithm, plan.states, plan.node, plan.is_exact) == ("elimination", 2, None, True)
    assert plan.flops == 3 * bt.explain("fit", net, data, batch=4).flops > 0 and "(c)" in plan.reason
    assert "computed once" in bt.explain("fit", net, data, learn=["c.logits"]).reason
    over = bt.explain("fit", net, data, budget=1)
    assert (over.algorithm, over.node, over.is_exact) == ("sampling", "c", False) and "budget=1" in over.reason
    per_word = bt.bayesuvius(3, heads=2, slices=2, per="word", observe=Normal(0.3)).to(D)
    summed = bt.explain("fit", per_word, data, method="em")
    assert summed.algorithm == "sampling" and summed.node is not None and "bt.SVI(choices='sampled')" in summed.reason
    requested = bt.explain("fit", per_word, data, method=bt.SVI(choices="sampled"), spread=1.0)
    assert (
        requested.algorithm == "sampling" and requested.node == summed.node and "choices='sampled'" in requested.reason
    )
    with pytest.raises(bt.BNetError, match="spread"):
        bt.explain("fit", net, data, method="nuts")
    assert "elimination" in str(plan)
