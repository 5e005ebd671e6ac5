"""Fits with a posterior: all methods agree, and ArviZ has their groups."""

from types import SimpleNamespace

import matplotlib
import pyro
import pytest
import torch
from pyro.infer import TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta

import bnet_transformer as bt
from bnet_transformer.data import read_batch
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.learning.fit.arviz_groups import build_arviz
from bnet_transformer.learning.fit.coordinates import Coordinates
from bnet_transformer.learning.fit.objective import FitObjective, select_learnable
from bnet_transformer.learning.fit.svi import get_prior
from bnet_transformer.tpm import Categorical, Normal
from tests import flat_options

ARVIZ = pytest.mark.filterwarnings(
    "ignore:\nArviZ is undergoing:FutureWarning",
    "ignore:Estimated shape parameter of Pareto",  # of a small number of draws
    "ignore:The inplace keyword in DataFrame",  # az.compare of ArviZ 0.23 with pandas 3.1
)
WORDS = list("abcd")


def word_mixture(**options):
    net = bt.bayesuvius(3, heads=2, vocabulary=WORDS, observe=Categorical(4), seed=3, prior=1.0, **options)
    net = net.to(torch.float64)
    key = "atoms" if options.get("atoms") else "values"
    sharp = {name: net.parameters[name] * 4 for name in (f"W_v_0.{key}", "y.weight")}
    return net.replace({"c.logits": torch.tensor([0.7, 0.3]).double().log(), **sharp})


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(1)
    ids = torch.randint(4, (120, 4))
    return ids, word_mixture().pyro(parameters="own")(ids)["y"].reshape(120, 4)


@pytest.fixture(scope="module")
def fits(data):
    net = word_mixture().replace({"c.logits": torch.zeros(2).double()})
    options = {
        "map": {"batch": 120},
        "em": {"steps": 100},
        "svi": {"batch": 120},
        "nuts": {"chains": 2, "draws": 200, "warmup": 60},
    }
    result = {}
    for method, more in options.items():
        result[method] = flat_options.fit(net, data, method=method, learn=["c.logits"], progress=False, **more)
    return result


@pytest.mark.slow
def test_map_em_svi_and_nuts_agree(fits, data):
    """With a flat prior the likelihood of one share is integrated on a grid: its mode, its mean, its standard
    deviation."""
    objective = make_objective(word_mixture(), ["c.logits"])
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    sets = {"c.logits": torch.stack([grid, 1 - grid], -1).log()}
    log_probs = objective.log_evidences(sets, read_batch(word_mixture().network, data)).sum(1)
    weights = log_probs.softmax(0)
    mean = float((weights * grid).sum())
    spread = float((weights * (grid - mean).square()).sum().sqrt())
    assert float(fits["em"].pi[0]) == pytest.approx(float(grid[log_probs.argmax()]), abs=2e-3)
    assert float(fits["map"].pi[0]) == pytest.approx(float(fits["em"].pi[0]), abs=2e-3)
    for method in ("svi", "nuts"):
        samples = fits[method].samples["c.logits"][..., 0]
        assert float(samples.mean()) == pytest.approx(mean, abs=0.01)
        assert float(samples.std()) == pytest.approx(spread, rel=0.2)
    pis = torch.stack([f.pi for f in fits.values()])
    assert float((pis.max(0).values - pis.min(0).values).max()) < 0.02


@pytest.mark.slow
@ARVIZ
def test_arviz_has_chains_that_mix_and_the_likelihoods(fits):
    import arviz as az

    result = fits["nuts"].to_arviz()
    assert result.log_likelihood["y"].shape == (2, 200, 120)
    assert "c_logits" not in result.posterior
    assert torch.equal(torch.tensor(result.posterior["c_pi"].values), fits["nuts"].samples["c.logits"])
    assert float(az.rhat(result, var_names=["c_sorted"])["c_sorted"].max()) < 1.05
    assert float(az.rhat(result, var_names=["c_effective"])["c_effective"]) < 1.05
    assert float(az.ess(result, var_names=["log_evidence"])["log_evidence"]) > 50
    elpd = float(az.loo(result).elpd_loo)
    assert elpd == pytest.approx(float(result.log_likelihood["y"].values.sum(-1).mean()), abs=3)
    assert list(az.compare({"nuts": result, "svi": fits["svi"].to_arviz()})["rank"]) == [0, 1]
    with matplotlib.rc_context({"backend": "agg"}):
        assert len(az.plot_ppc(result).lines) > 100


@ARVIZ
def test_arviz_names_a_selectors_shares_pi_and_other_tables_theta():
    pytest.importorskip("arviz")
    net = bt.bayesuvius(2, heads=2, observe=Normal(1.0), atoms=3)
    data = torch.zeros(3, 2, 2), torch.zeros(3, 2, 2)
    f = bt.fit(net, data, method=bt.SVI(steps=2, draws=3), spread=1.0, progress=False)
    result = f.to_arviz().posterior
    named = {"c_pi": "c.logits"} | {f"W_{role}_0_theta": f"W_{role}_0.logits" for role in "qkv"}
    assert not [name for name in result if name.endswith("_logits")]
    matrices = ([f.samples[f"W_{role}_0.{part}"] for part in ("logits", "atoms")] for role in "qk")
    W_q, W_k = (torch.einsum("...ha,...aij->...hij", *parts) for parts in matrices)
    torch.testing.assert_close(torch.tensor(result["A_x_1"].values), W_q.mT @ W_k)
    for name, parameter in named.items():
        assert torch.equal(torch.tensor(result[name].values), f.samples[parameter])
        assert bool((f.samples[parameter].sum(-1) - 1).abs().max() < 1e-5)


@ARVIZ
def test_arviz_has_observed_and_replicated_observations_and_absent_words_are_nan():
    az = pytest.importorskip("arviz")
    net = bt.bayesuvius(3, heads=2, vocabulary=WORDS, observe=Categorical(4), seed=3)
    pairs = [("a b c", "b a c"), ("a", "b"), ("b a", ["c", None])] * 4
    f = bt.fit(net, pairs, method=bt.SVI(steps=2, draws=8), spread=1.0, progress=False)
    result = f.to_arviz(predictive_draws=4)
    observed, predicted = result.observed_data["y"], result.posterior_predictive["y"]
    assert observed.dims == ("sentence", "word") and result.log_likelihood["y"].dims == ("chain", "draw", "sentence")
    assert predicted.dims == ("chain", "draw", "sentence", "word") and predicted.shape == (1, 4, 12, 3)
    nan = float("nan")
    rows = torch.tensor([[1, 0, 2], [1, nan, nan], [2, nan, nan]]).double().repeat(4, 1)
    torch.testing.assert_close(torch.tensor(observed.values), rows, equal_nan=True)
    assert bool((predicted.isnull() == observed.isnull()).all())
    assert "posterior_predictive" not in f.to_arviz(predictive_draws=0)
    assert az.compare({"f": result, "g": result}, var_name="y").shape[0] == 2


@pytest.mark.slow
@ARVIZ
def test_replicated_observations_have_the_distribution_of_the_posterior_draws():
    pytest.importorskip("arviz")
    node = bt.BNet(bt.Declaration(nodes=[bt.Node("a", Categorical(2)), bt.Node("b", Categorical(2))]))
    data = {"a": [0, 1] * 150, "b": [1] * 299 + [None]}
    f = bt.fit(node, data, method=bt.SVI(steps=200, draws=60, rate=0.1), progress=False)
    result = f.to_arviz(predictive_draws=30)
    assert list(result.log_likelihood) == ["joint"] and result.log_likelihood["joint"].shape == (1, 60, 300)
    assert result.observed_data["a"].dtype.kind == "i" and result.observed_data["b"].dtype.kind == "f"
    idx = torch.linspace(0, 59, 30).round().long()
    for name in ("a", "b"):
        share = torch.tensor(result.posterior_predictive[name].values[0]).double().nanmean(1)
        gap = share - f.samples[f"{name}.logits"][0, idx, 1]
        assert float(gap.abs().max()) < 5 * (0.25 / 300) ** 0.5 and abs(float(gap.mean())) < 0.02


def test_both_interfaces_of_arviz_get_the_same_groups():
    """ArviZ 1.x takes one nested mapping; ArviZ 0.x has a keyword for each group."""
    groups = {"posterior": {"pi": torch.zeros(1, 2).numpy()}, "log_likelihood": {"joint": torch.zeros(1, 2, 3).numpy()}}
    dims = {"joint": ["sentence"], "unused": ["word"]}

    def from_dict(data=None, *, dims, **groups):
        return (data or groups), dims, data is not None

    for version, is_nested in (("0.23.4", False), ("1.3.0", True)):
        module = SimpleNamespace(__version__=version, from_dict=from_dict)
        assert build_arviz(module, groups, dims) == (groups, {"joint": ["sentence"]}, is_nested)


@pytest.mark.slow
def test_intervals_contain_the_mean_and_are_approximate_for_svi(fits):
    for method in ("svi", "nuts"):
        low, high = fits[method].interval("c.logits")
        assert bool((low < fits[method].pi).all() and (fits[method].pi < high).all())
    assert "mean-field" in fits["svi"].approximate and fits["nuts"].approximate is None
    with pytest.raises(bt.UnknownNameError):
        fits["nuts"].interval("c.logit")


def make_objective(net, learn=None, spread=None):
    learned = select_learnable(net.network, infer_fit_task(net.network).readouts, learn, spread)
    return FitObjective(net.network, learned, 2**16)


@pytest.mark.parametrize("atoms", [None, 2])
def test_the_marginal_as_a_factor_is_what_enumeration_gives(atoms, data):
    """The density of SVI and NUTS, compared with Pyro's TraceEnum_ELBO of the same model."""
    net = word_mixture(atoms=atoms)
    objective = make_objective(net, [name for name in net.parameters if name.endswith("logits") and name != "y.logits"])
    corpus = read_batch(net.network, data)
    pyro.clear_param_store()
    program = net.pyro()
    guide = AutoDelta(pyro.poutine.block(program, expose=list(program.priors.values())))
    elbo = TraceEnum_ELBO(max_plate_nesting=program.max_plate_nesting)
    peer = -elbo.differentiable_loss(program, guide, *data)
    median = guide.median()
    theta = {name: median[program.priors[name]].reshape(net.parameters[name].shape) for name in objective.learned.names}
    actual = objective.log_evidence({name: value.log() for name, value in theta.items()}, corpus).sum()
    actual = actual + sum(get_prior(objective, name).log_prob(value) for name, value in theta.items())
    torch.testing.assert_close(actual.detach(), peer.detach())
    coordinates = Coordinates(objective, corpus)
    z = coordinates.encode({name: value.detach().log() for name, value in theta.items()})
    jacobian = sum(value.log().sum() for value in theta.values())  # of the log ratios to the last state
    torch.testing.assert_close(coordinates.log_density(z, corpus).detach(), (actual + jacobian).detach())


@pytest.mark.parametrize("atoms", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_sampled_choices_approximate_summed_ones(atoms, data):
    """On a net where both methods apply: the bound is below the evidence, the choices near their posterior."""
    from bnet_transformer.inference import Evidence, posterior

    net, data = word_mixture(atoms=atoms), (data[0][:60], data[1][:60])
    options = {"method": "svi", "learn": ["c.logits"], "batch": 60, "choices": "sampled", "progress": False}
    steps, rate = (150, 0.2) if atoms is None else (600, 0.1)
    f = flat_options.fit(net, data, steps=steps, rate=rate, **options)
    objective = make_objective(net, ["c.logits"])
    exact = objective.log_evidence(dict(f.net.parameters), read_batch(net.network, data))
    gap = float(exact.mean()) - f.measured[-1][2]
    assert -0.02 < gap < (0.05 if atoms is None else 0.5)
    assert "sampled" in f.approximate and f.log_likelihoods is None
    expected = posterior(f.net.module(), "c", {"y": Evidence(data[1])}, data[0])
    assert float((f.choices["c"] - expected).abs().mean()) < (0.03 if atoms is None else 0.1)
    if atoms is None:
        assert float(f.pi[0]) == pytest.approx(0.7, abs=0.1)


@pytest.mark.slow
def test_choices_of_words_over_slices_are_drawn_where_they_cannot_be_summed(tmp_path):
    true = bt.bayesuvius(3, heads=2, slices=2, per="word", observe=Normal(0.3), seed=2).to(torch.float64)
    true = true.replace({f"c_{t}.logits": torch.tensor([0.7, 0.3]).double().log() for t in (0, 1)})
    true = true.replace({f"W_v_{t}.value": 3 * true.parameters[f"W_v_{t}.value"] for t in (0, 1)})
    torch.manual_seed(0)
    x = torch.randn(40, 3, 3, dtype=torch.float64)
    samples = true.pyro()(x)
    y = samples["y"].reshape(40, 3, 3)
    net = true.replace({f"c_{t}.logits": torch.zeros(2).double() for t in (0, 1)})
    options = {"method": "svi", "learn": ["c_0.logits", "c_1.logits"], "progress": False, "steps": 150}
    with pytest.raises(bt.BNetError):
        flat_options.fit(net, (x, y), **options)
    f = flat_options.fit(net, (x, y), choices="sampled", batch=40, rate=0.2, anneal=0.01, **options)
    assert f.choices["c_1"].shape == (40, 3, 2)
    correct = f.choices["c_1"].argmax(-1) == samples["c_1"].reshape(40, 3)
    majority = float((samples["c_1"] == 0).double().mean())
    assert float(correct.double().mean()) > 0.85 > majority + 0.05  # it has local optima: 1 of the exact posterior
    torch.testing.assert_close(f.theta["c_1"], torch.tensor([0.7, 0.3]).double(), atol=0.12, rtol=0)
    f.save(tmp_path / "f.safetensors")
    assert torch.equal(bt.load(tmp_path / "f.safetensors").choices["c_1"], f.choices["c_1"])
    with pytest.raises(bt.BNetError, match=r"bt\.SVI"):
        bt.fit(net, (x, y), **{"choices": "sampled"})
