"""Fits by SVI and NUTS: means over samples, label switching, starts of chains, interrupts."""

import os
import random
import signal
from dataclasses import replace

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import TraceEnum_ELBO
from torch.distributions import kl_divergence

import bnet_transformer as bt
from bnet_transformer._core.distributed import distributed_context
from bnet_transformer._core.files import derive_seed
from bnet_transformer.data import read_batch
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.inference import Evidence, log_evidence, posterior
from bnet_transformer.learning.fit import heads as heads, laplace, nuts
from bnet_transformer.learning.fit.coordinates import Coordinates
from bnet_transformer.learning.fit.diagnostics import count_effective, describe_effective
from bnet_transformer.learning.fit.heads import align_heads
from bnet_transformer.learning.fit.nuts import NUTSChain, find_chain_starts
from bnet_transformer.learning.fit.objective import FitObjective, FitProblem, select_learnable
from bnet_transformer.learning.fit.result import Fit, FitRecord
from bnet_transformer.learning.fit.svi import VariationalOptimizer, get_prior
from bnet_transformer.learning.loop import LoopConfig
from bnet_transformer.tpm import Normal
from tests import flat_options

ARVIZ = pytest.mark.filterwarnings("ignore:\nArviZ is undergoing:FutureWarning")
WEIGHTS = ["W_q_0.values", "W_k_0.values", "W_v_0.values"]


def mixture(heads=2, sigma=0.5, seed=3, **options):
    net = bt.bayesuvius(2, heads=heads, observe=Normal(sigma), prior=1.0, seed=seed, **options).to(torch.float64)
    if heads == 2:
        net = net.replace({"c.logits": torch.tensor([0.7, 0.3]).double().log()})
    key = "atoms" if options.get("atoms") else "value" if options.get("per") == "word" else "values"
    return net.replace({f"W_v_0.{key}": 2 * net.parameters[f"W_v_0.{key}"]})


def draw_xy(net, sentences=12, words=2, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(sentences, words, 2).double()
    return x, net.pyro(parameters="own")(x)["y"].reshape(sentences, words, 2).detach()


def make_objective(net, learn=None, spread=1.0):
    learned = select_learnable(net.network, infer_fit_task(net.network).readouts, learn, spread)
    return FitObjective(net.network, learned, 2**16)


def fit_nuts(net, data, **options):
    kwargs = {"chains": 2, "draws": 8, "warmup": 6, "spread": 1.0, "progress": False, **options}
    return flat_options.fit(net, data, method="nuts", **kwargs)


def permute_heads(net, learn, shifts):
    """Return samples `[chain, 1, ...]` of the net's parameters, with another order of heads in each chain."""
    result = {}
    for name in learn:
        value = net.parameters[name].detach()
        value = value.softmax(-1) if name.endswith("logits") else value
        result[name] = torch.stack([value.roll(k, 0) for k in shifts])[:, None]
    return result


def test_heads_are_matched_where_all_of_a_head_is_learned():
    heads = 3
    net = mixture(heads=heads, sigma=0.2).replace({"c.logits": torch.arange(heads).double()})
    learn = ["c.logits", *WEIGHTS]
    data = draw_xy(net, 40)
    objective, corpus = make_objective(net, learn), read_batch(net.network, data)
    samples = permute_heads(net, learn, (0, 1, 2))
    result, matched = align_heads(objective, corpus, samples, torch.tensor([[1.0], [2.0], [0.0]]))
    assert matched == ("c",)
    for name in learn:  # as in the second, the densest
        torch.testing.assert_close(result[name], samples[name][1:2].expand_as(samples[name]))


@pytest.mark.parametrize("learn", [["c.logits"], ["c.logits", "W_v_0.values"], WEIGHTS])
def test_heads_stay_as_they_are_drawn_where_a_part_of_them_is_fixed(learn):
    net = mixture(sigma=1.5)
    objective, corpus = make_objective(net, learn), read_batch(net.network, draw_xy(net))
    samples = permute_heads(net, learn, (0, 1))
    result, matched = align_heads(objective, corpus, samples, torch.zeros(2, 1))
    assert matched == ()
    assert all(torch.allclose(result[name], samples[name], rtol=1e-12) for name in learn)


def test_what_is_fixed_but_equal_over_heads_lets_them_be_matched():
    net = mixture(sigma=0.2)
    net = net.replace({n: net.parameters[n][:1].expand(2, 2, 2).clone() for n in WEIGHTS[:2]})
    learn = ["c.logits", "W_v_0.values"]
    samples = permute_heads(net, learn, (0, 1))
    result, matched = align_heads(
        make_objective(net, learn), read_batch(net.network, draw_xy(net, 40)), samples, torch.zeros(2, 1)
    )
    assert matched == ("c",)
    for name in learn:
        torch.testing.assert_close(result[name][1], samples[name][0])


@pytest.mark.slow
def test_draws_of_a_fit_keep_their_likelihoods():
    """Every draw of a fit has, by exact elimination, the density that its chain computed."""
    net = mixture(sigma=1.5)
    data = draw_xy(net, 5)
    learn = ["c.logits", *WEIGHTS]
    f = fit_nuts(net, data, learn=learn, draws=2, warmup=2, seed=1)
    corpus = read_batch(net.network, data)
    coordinates = Coordinates(make_objective(net, learn), corpus)
    for chain in range(2):
        for draw in range(2):
            sample = {name: f.samples[name][chain, draw] for name in learn}
            sample = {n: v.log() if n == "c.logits" else v for n, v in sample.items()}
            lp = float(coordinates.log_density(coordinates.encode(sample), corpus))
            assert lp == pytest.approx(float(f.statistics["lp"][chain, draw]), abs=1e-6)
            net_ = net.replace(sample)
            expected = log_evidence(net_.module(), {"y": Evidence(data[1])}, data[0])
            torch.testing.assert_close(f.log_likelihoods[chain, draw], expected.detach())


@pytest.fixture(scope="module")
def regression():
    """Return a net whose only learned parameter is `W_v` of one head: Bayesian linear regression, whose posterior has a
    formula."""
    net, sigma, spread = mixture(heads=1, sigma=0.8), 0.8, 0.4
    x, y = draw_xy(net, 16)
    z = net.replace({"W_v_0.values": torch.eye(2).double()[None]}).module()(x, want=("x_1",))["x_1"].reshape(-1, 2)
    precision = (z.mT @ z / sigma**2 + torch.eye(2).double() / spread**2).detach()
    mean = torch.linalg.solve(precision, z.detach().mT @ y.reshape(-1, 2) / sigma**2).mT
    return net, (x, y), spread, mean, precision


@pytest.mark.slow
def test_nuts_draws_from_the_posterior_of_linear_regression(regression):
    net, data, spread, mean, precision = regression
    f = fit_nuts(net, data, learn=["W_v_0.values"], spread=spread, draws=120, warmup=40, chains=1)
    samples = f.samples["W_v_0.values"].flatten(0, 1)[:, 0]
    expected = precision.inverse()
    torch.testing.assert_close(samples.mean(0), mean, atol=4 * float(expected.max()) ** 0.5 / 70**0.5, rtol=0)
    for row in range(2):
        torch.testing.assert_close(torch.cov(samples[:, row].mT), expected, atol=0.45 * float(expected.max()), rtol=0)


@pytest.mark.slow
def test_svi_finds_the_nearest_mean_field_of_linear_regression_by_minibatches(regression):
    """The mean is exact; the standard deviation of each number is that given all others."""
    net, data, spread, mean, precision = regression
    options = {"steps": 250, "batch": 4, "rate": 0.03, "draws": 2000, "learn": ["W_v_0.values"], "spread": spread}
    f = flat_options.fit(net, data, method="svi", progress=False, **options)
    samples = f.samples["W_v_0.values"][0, :, 0]
    torch.testing.assert_close(f.net.parameters["W_v_0.values"][0], mean, atol=0.03, rtol=0)
    expected = precision.diagonal().rsqrt().expand(2, 2)
    torch.testing.assert_close(samples.std(0), expected, rtol=0.35, atol=0)


@pytest.mark.parametrize("batch", [12, 5])
def test_a_step_of_svi_is_that_of_trace_enum_elbo(batch):
    """Pyro's enumeration at the same draw of the guide: equal loss and gradient, except for our exact KL."""
    net = mixture()
    x, y = draw_xy(net)
    learn = ["c.logits", "W_v_0.values"]
    objective, corpus = make_objective(net, learn), read_batch(net.network, (x, y))
    with distributed_context(torch.device("cpu")) as current:
        run = VariationalOptimizer(FitProblem(objective, corpus, None, batch, 4, LoopConfig(), {}, current), bt.SVI())
    torch.manual_seed(0)
    run.sets.values = {name: value + 0.3 * torch.randn_like(value) for name, value in run.sets.values.items()}
    actual, gradient = run.bound_and_grad(0)
    leaves = {name: value.detach().requires_grad_() for name, value in run.sets.values.items()}
    guide_distributions = run.guide({name: value[0] for name, value in leaves.items()})
    indices = run.minibatch_indices(0)
    indices = torch.arange(12) if indices is None else indices
    program, samples = net.pyro(parameters="own"), {}

    def model(x, y):
        samples["W_v_0.values"] = pyro.sample("W_v", get_prior(run.objective, "W_v_0.values"))
        with pyro.poutine.scale(scale=12 / len(indices)):
            samples["c.logits"] = pyro.sample("theta_c_told", get_prior(run.objective, "c.logits"))
            parameters = {"W_v_0.values": samples["W_v_0.values"], "c.logits": samples["c.logits"].log()}
            return program(x, y, parameters=parameters)

    def guide(x, y):
        for name, site in (("c.logits", "theta_c_told"), ("W_v_0.values", "W_v")):
            pyro.sample(site, guide_distributions[name])

    torch.manual_seed(derive_seed(4, "draw", 0))
    elbo = TraceEnum_ELBO(max_plate_nesting=program.max_plate_nesting)
    scale = 12 / len(indices)
    peer = -elbo.differentiable_loss(model, guide, x[indices], y[indices])
    prior = {name: get_prior(run.objective, name).log_prob(samples[name]) for name in learn}
    guide_log_probs = {name: guide_distributions[name].log_prob(samples[name]) for name in learn}
    evidence = peer - scale * prior["c.logits"] - prior["W_v_0.values"] + sum(guide_log_probs.values())
    kl = sum(kl_divergence(guide_distributions[name], get_prior(run.objective, name)) for name in learn)
    expected = (evidence - kl) / 12
    torch.testing.assert_close(actual[0], expected.detach())
    for name, gradient_ in zip(leaves, torch.autograd.grad(expected, list(leaves.values())), strict=True):
        torch.testing.assert_close(gradient[name], gradient_)


def make_known_fit(count=6, heads=2):
    """Return a fit of given draws, each in another basis of `q` and `k`: its results have formulas."""
    net = mixture(heads=heads)
    torch.manual_seed(5)
    weights = {name: net.parameters[name] for name in WEIGHTS}
    basis = torch.randn(2, count // 2, 1, 2, 2).double()
    noise = {name: 0.2 * torch.randn(2, count // 2, *value.shape).double() for name, value in weights.items()}
    q, k, v = (weights[name] + noise[name] for name in WEIGHTS)
    pi = torch.distributions.Dirichlet(torch.full((heads,), 5.0).double()).sample((2, count // 2))
    samples = dict(zip(["c.logits", *WEIGHTS], (pi, basis @ q, basis.inverse().mT @ k, v), strict=True))
    data = draw_xy(net)
    record = FitRecord(12, "", learned=tuple(samples))
    fit = Fit(net.network, "nuts", record, samples=samples, data=read_batch(net.network, data))
    nets = [
        net.replace({name: v[c, d].log() if name == "c.logits" else v[c, d] for name, v in samples.items()})
        for c in range(2)
        for d in range(count // 2)
    ]
    return fit, nets, data, q.mT @ k


def test_answers_are_means_over_draws_and_never_of_matrices_of_another_basis():
    f, nets, (x, y), A = make_known_fit()
    torch.testing.assert_close(f.heads.A["x_1"], A.mean((0, 1)))
    torch.testing.assert_close(f.heads.OV["x_1"], f.samples["W_v_0.values"].mean((0, 1)))
    torch.testing.assert_close(f.pi, f.samples["c.logits"].mean((0, 1)))
    torch.testing.assert_close(f.heads.usage, f.pi)
    responsibilities = torch.stack([posterior(net.module(), "c", {"y": Evidence(y)}, x) for net in nets]).mean(0)
    torch.testing.assert_close(f.responsibilities((x, y)), responsibilities)
    expected = []
    for net in nets:
        outputs = net.module()(x).reshape(2, 12, 2, 2)  # by head
        expected.append(torch.einsum("h,hsio->sio", net.parameters["c.logits"].exp(), outputs).detach())
    torch.testing.assert_close(f.predict(x), torch.stack(expected).mean(0))
    ll = torch.stack([log_evidence(net.module(), {"y": Evidence(y)}, x) for net in nets]).detach()
    torch.testing.assert_close(f.log_likelihoods.flatten(0, 1), ll)
    torch.testing.assert_close(f.log_likelihood((x, y)), ll.exp().mean(0).log())


def test_intervals_are_quantiles_of_draws():
    mass = 0.9
    f, _, _, A = make_known_fit(400)
    samples_by_name = {"A x_1": A, "OV x_1": f.samples["W_v_0.values"], "c.logits": f.samples["c.logits"]}
    for name, values in samples_by_name.items():
        ends = np.quantile(values.flatten(0, 1).numpy(), [(1 - mass) / 2, (1 + mass) / 2], axis=0)
        for result, expected in zip(f.interval(name, mass), ends, strict=True):
            np.testing.assert_allclose(result.numpy(), expected)
    with pytest.raises(bt.UnknownNameError, match="A x_1"):
        f.interval("A x_2")
    with pytest.raises(bt.BNetError, match="share"):
        f.interval("A x_1", 1.5)


@pytest.mark.slow
def test_intervals_of_chains_that_disagree_are_reported():
    f, *_ = make_known_fit(400)
    moved = {name: value.clone() for name, value in f.samples.items()}
    moved["W_v_0.values"][1] += 5.0  # a chain in another mode
    separate = replace(f, samples=moved, statistics={"lp": torch.arange(400.0).reshape(2, 200)})
    with pytest.warns(UserWarning, match=r"R-hat is above 1.1 for OV x_1 \(\d+"):
        separate.interval("OV x_1")
    separate.interval("A x_1")  # the chains agree on A, and warnings are errors
    with pytest.warns(UserWarning, match="R-hat is above 1.1 for the log density"):
        separate.predict_interval(torch.zeros(1, 2, 2, dtype=torch.float64))
    (note,) = [note for note in describe_effective(f.network, moved) if "R-hat" in note]
    assert "OV x_1" in note and "A x_1" not in note


def test_the_net_of_a_fit_is_the_draw_nearest_to_the_means():
    f, nets, _, A = make_known_fit(12)
    invariants = {"pi": f.samples["c.logits"], "A": A, "OV": f.samples["W_v_0.values"]}
    distances = sum(
        (((v := value.flatten(0, 1).flatten(1)) - v.mean(0)).square() / v.var(0, correction=0)).mean(1)
        for value in invariants.values()
    )
    result = heads.find_representative(f.network, f.samples)
    for name, value in result.items():
        torch.testing.assert_close(value, nets[int(distances.argmin())].parameters[name])


def test_chunks_give_equal_results_within_the_memory_limit(monkeypatch):
    f, nets, _, A = make_known_fit()
    objective, full = make_objective(nets[0], list(f.samples)), f.log_likelihoods.flatten(0, 1)
    sizes, evidences = [], FitObjective.log_evidences
    numel = heads.MAX_CHUNK_NUMEL // (heads.split_into_chunks(objective, f.data)[0] * len(f.data))

    def count_numel(self, sets, part):
        sizes.append(len(next(iter(sets.values()))) * len(part) * numel)
        return evidences(self, sets, part)

    monkeypatch.setattr(FitObjective, "log_evidences", count_numel)
    for max_numel in (numel, 7 * numel, 30 * numel):
        monkeypatch.setattr(heads, "MAX_CHUNK_NUMEL", max_numel)
        sizes.clear()
        sets = heads.samples_to_parameters(f.network, f.samples)
        torch.testing.assert_close(heads.log_likelihoods(objective, f.data, sets), full)
        assert max(sizes) <= max_numel and sum(sizes) == 6 * 12 * numel
        torch.testing.assert_close(f.heads.A["x_1"], A.mean((0, 1)))
        low, high = f.interval("A x_1")
        assert bool((low < A.mean((0, 1))).all() and (A.mean((0, 1)) < high).all())


@pytest.mark.slow
def test_each_chain_begins_at_a_mode_that_its_own_starts_find():
    """The modes are stationary, found from separate starts, and only the first search sees the net's parameters."""
    net = mixture(sigma=0.2)
    learn, data = ["c.logits", "W_v_0.values"], draw_xy(net, 15)
    corpus = read_batch(net.network, data)
    problem = FitProblem(make_objective(net, learn), corpus, None, None, 0, LoopConfig(progress=False))
    coordinates, starts = find_chain_starts(problem, [0, 1, 2])
    modes = [mode for mode, _ in starts]
    for mode in modes:
        z = mode.z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(coordinates.log_density(z, corpus), z)
        assert float(gradient.abs().max()) < 1e-3 * float(mode.root.inverse().abs().max())
    assert max(mode.log_density for mode in modes) - min(mode.log_density for mode in modes) < 50
    assert all(mode.root is not None and not mode.singular for mode in modes)
    again, _ = find_chain_starts(problem, [1])[1][0]
    torch.testing.assert_close(again.z, modes[1].z)  # the mode of a chain does not depend on the other chains


@pytest.mark.slow
def test_chains_without_a_hessian_and_starts_of_different_density(monkeypatch):
    net = mixture(sigma=1.5)
    data, learn = draw_xy(net), ["c.logits", "W_v_0.values"]
    monkeypatch.setattr(laplace, "MAX_COORDINATES", 3)
    monkeypatch.setattr(nuts, "MAX_MODE_GAP", -1.0)
    f = fit_nuts(net, data, learn=learn, draws=2, warmup=2)
    assert f.samples["W_v_0.values"].shape[:2] == (2, 2) and "nats" in f.notes[0]
    with pytest.raises(bt.BNetError, match="at most 3 learned numbers"):
        bt.fit(net, data, method=bt.Laplace(), learn=learn, spread=1.0, progress=False)


@pytest.mark.slow
def test_a_chain_in_a_mode_of_negligible_probability_starts_at_the_best_mode(monkeypatch):
    net, learn = mixture(heads=1), ["W_v_0.values"]
    data = draw_xy(net)
    find_starts, gaps = nuts.find_chain_starts, {0: (9.0, 0.0), 2: (60.0, 0.0), 3: (60.0, 120.0), 4: (9.0, -90.0)}

    def find_poor_starts(problem, numbers):
        """Modes with another density and another volume, some of them far away; the best one is that of chain 1."""
        coordinates, starts = find_starts(problem, numbers)
        mode, approximation = starts[1]
        for k, (gap, log_det) in gaps.items():
            poor = replace(mode, z=mode.z + gap, log_density=mode.log_density - gap, log_det=mode.log_det + log_det)
            starts[k] = poor, replace(approximation, center=approximation.center + gap)
        return coordinates, starts

    monkeypatch.setattr(nuts, "find_chain_starts", find_poor_starts)
    chains = []
    monkeypatch.setattr(NUTSChain, "advance", lambda chain: chains.append(chain))
    problem = FitProblem(
        make_objective(net, learn), read_batch(net.network, data), None, None, 0, LoopConfig(progress=False)
    )
    _, _, notes = nuts._run_chains(problem, bt.NUTS(chains=5, draws=1, warmup=1))
    is_moved = {
        chain.index: bool((chain.approximation.center == chains[1].approximation.center).all()) for chain in chains
    }
    assert is_moved == {0: False, 1: True, 2: True, 3: False, 4: True}
    (note,) = notes
    assert "chain 2 (60 nats), chain 4 (54 nats)" in note and "mode of chain 1" in note


@ARVIZ
def test_the_effective_sample_size_of_autoregressive_chains_is_that_of_arviz():
    az, correlation = pytest.importorskip("arviz"), torch.tensor([0.0, 0.5, 0.9], dtype=torch.float64)
    torch.manual_seed(0)
    value, rows = torch.randn(4, 3, dtype=torch.float64), []
    for _ in range(1000):
        value = correlation * value + (1 - correlation**2).sqrt() * torch.randn_like(value)
        rows.append(value)
    draws = torch.stack(rows, 1)
    expected = torch.tensor([float(az.ess(draws[..., k].numpy())) for k in range(3)], dtype=torch.float64)
    torch.testing.assert_close(count_effective(draws), expected, rtol=0.1, atol=0)


def test_chains_have_separate_starts_and_do_not_change_the_global_random_state():
    net = mixture(heads=1)
    data = draw_xy(net)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    f = fit_nuts(net, data, learn=["W_v_0.values"], draws=1, warmup=1, chains=3)
    assert len(f.samples["W_v_0.values"].flatten(0, 1).flatten(1).unique(dim=0)) == 3
    assert torch.equal(states[0], torch.get_rng_state()) and random.getstate() == states[2]
    assert bool((np.random.get_state()[1] == states[1]).all())


@pytest.mark.parametrize("when", [4, 9])
def test_chains_that_ctrl_c_stopped_keep_their_draws(when, tmp_path, monkeypatch):
    """During the warmup, and after it."""
    net = mixture()
    data, learn = draw_xy(net), ["c.logits"]
    expected = fit_nuts(net, data, learn=learn)
    advance = NUTSChain.advance

    def advance_and_stop(self):
        advance(self)
        if self.step == when and self.index == 0:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(NUTSChain, "advance", advance_and_stop)
    partial = fit_nuts(net, data, learn=learn, folder=tmp_path)
    assert not partial.finished
    if when > 6:
        assert partial.statistics["lp"].equal(expected.statistics["lp"][:, : when - 6])
    else:
        assert not partial.samples and "warmup" in partial.approximate
    monkeypatch.setattr(NUTSChain, "advance", advance)
    resumed = fit_nuts(net, data, learn=learn, folder=tmp_path, resume=True)
    assert resumed.finished and all(
        resumed.statistics[name].equal(value) for name, value in expected.statistics.items()
    )


def test_a_chain_that_continues_with_new_kernels_draws_as_one_kernel_of_pyro(monkeypatch):
    net = mixture()
    data, options = draw_xy(net), {"learn": ["c.logits"], "warmup": 25}  # Pyro adapts the mass matrix from 20 steps on
    f = fit_nuts(net, data, every=1, **options)
    monkeypatch.setattr(NUTSChain, "_replace_kernel", lambda *options: None)
    one = fit_nuts(net, data, **options)
    assert f.samples["c.logits"].equal(one.samples["c.logits"]) and f.divergent == one.divergent
    torch.testing.assert_close(f.statistics, one.statistics)


@ARVIZ
def test_sampler_statistics_of_nuts_are_in_arviz_and_in_the_file(tmp_path):
    net = mixture()
    f = fit_nuts(net, draw_xy(net), learn=["c.logits"], draws=3)
    stats = f.to_arviz().sample_stats
    assert stats["diverging"].dtype == bool and stats["diverging"].values.sum(1).tolist() == list(f.divergent)
    steps, depth = stats["n_steps"].values, stats["tree_depth"].values
    assert bool((2 ** (depth - 1) <= steps).all() and (steps < 2**depth).all() and (steps > 0).all())
    rate = stats["acceptance_rate"].values
    assert bool((rate >= 0).all() and (rate <= 1).all()) and len(set(rate.flatten().tolist())) > 1
    f.save(tmp_path / "f.safetensors")
    result = bt.load(tmp_path / "f.safetensors")
    assert result.matched == f.matched and all(torch.equal(v, f.statistics[k]) for k, v in result.statistics.items())
    torch.testing.assert_close(result.log_likelihoods, f.log_likelihoods)


def test_a_file_from_before_the_record_of_a_fit_is_read():
    f = make_known_fit()[0]
    fields = f._to_fields()
    flat = fields | vars(fields.pop("record")) | {"guide": None}
    assert Fit._from_fields(Fit._upgrade_fields(flat)).record == f.record
    with pytest.raises(bt.FileError, match="restart"):
        Fit._upgrade_fields(fields | vars(f.record) | {"restart": "first"})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["svi", "nuts"])
def test_posteriors_are_found_on_another_device(method):
    net = mixture()
    options = {"steps": 20} if method == "svi" else {"draws": 4, "warmup": 4, "chains": 2}
    f = flat_options.fit(net, draw_xy(net), method=method, spread=1.0, device="cuda", progress=False, **options)
    assert (
        f.pi.device.type == "cpu" and f.log_likelihoods.isfinite().all() and f.predict(draw_xy(net)[0]).isfinite().all()
    )
