"""The posterior of gates: against quadrature, planted heads, coverage of intervals, all slices at once."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pyro.ops.stats
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.special import betaln
from scipy.stats import beta, kstest, spearmanr

import bnet_transformer as bt
from bnet_transformer.attention.gates import (
    NUM_FREE,
    _StoredSettings,
    drop_head,
    exact_gate_posterior,
    gate_settings as all_settings,
    log_likelihood_ratio,
    relaxed_gate_posterior,
    sample_rho,
    split_by_gate,
    split_rhat,
)
from bnet_transformer.attention.inclusion import create_runs, head_shares
from bnet_transformer.tpm import Activation, Attention, Concat, Dot, Given, Normal, Weight
from tests.cases import HEADS, WORD, every, jitter, projections

D = torch.float64


def quiet(_):
    """Progress callback that prints nothing."""


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def inclusion(net, data, **options):
    return bt.inclusion(net, data, progress=False, **{"draws": 64, **options})


def sample_posterior(table, draws=1000, seed=0):
    return exact_gate_posterior(table, draws, seeded(seed), quiet)


# quadrature: every integrand is a polynomial of rho, for which Gauss and Legendre's rule is exact


def make_grid(points, dims):
    """Points and log weights on [0, 1]^dims."""
    t, w = (torch.from_numpy(values) for values in np.polynomial.legendre.leggauss(points))
    positions = [values.flatten() for values in torch.meshgrid(*[(t + 1) / 2] * dims, indexing="ij")]
    weights = [values.flatten() for values in torch.meshgrid(*[(w / 2).log()] * dims, indexing="ij")]
    return torch.stack(positions, -1), torch.stack(weights, -1).sum(-1)


def quadrature(table, tails=(0.05, 0.95)):
    """Return the mean of rho, log Bayes factors, ends of intervals, and the inclusion of each head in each sentence."""
    sentences, heads = len(table), int(math.log2(table.shape[1]))
    bits = torch.tensor(list(itertools.product((False, True), repeat=heads)))[:, range(heads - 1, -1, -1)]

    def compute_likelihoods(rho):  # for each sentence at each point: the terms of its sum
        prior = torch.where(bits[:, None], rho, 1 - rho).log().sum(-1)
        terms = table[:, :, None] + prior
        return terms.logsumexp(1), terms

    def compute_evidence(head, value):
        rho, weights = make_grid(sentences // 2 + 2, heads - 1)
        point = torch.cat([rho[:, :head], torch.full((len(rho), 1), value, dtype=D), rho[:, head:]], 1)
        return (compute_likelihoods(point)[0].sum(0) + weights).logsumexp(0)

    rho, weights = make_grid(sentences // 2 + 2, heads)
    log_lik, terms = compute_likelihoods(rho)
    log_joint = log_lik.sum(0) + weights
    posterior = log_joint.softmax(0)
    on = [((terms[:, bits[:, head]].logsumexp(1) - log_lik).exp() * posterior).sum(1) for head in range(heads)]
    x = torch.linspace(0, 1, 101, dtype=D)
    ends, bayes = [], []
    for head in range(heads):
        density = torch.stack([compute_evidence(head, float(v)) for v in x])
        bayes.append(log_joint.logsumexp(0) - density[0])
        mass = torch.cumulative_trapezoid((density - density.max()).exp(), x)
        ends.append(np.interp(tails, (mass / mass[-1]).numpy(), x[1:].numpy()))
    return (posterior[:, None] * rho).sum(0), torch.stack(bayes), torch.tensor(np.array(ends)), torch.stack(on, 1)


@pytest.mark.parametrize(("sentences", "heads", "scale"), [(1, 2, 3.0), (5, 3, 3.0), (12, 2, 3000.0)])
def test_the_posterior_is_that_of_quadrature(sentences, heads, scale):
    table = torch.randn(sentences, 2**heads, generator=seeded(sentences), dtype=D) * scale
    table += all_settings(heads) @ torch.linspace(0, scale / 3, heads, dtype=D)
    result, (mean, bayes, ends, on) = sample_posterior(table), quadrature(table)
    torch.testing.assert_close(result.rho.mean(0), mean, atol=0.025, rtol=0)
    low, high = result.rho.quantile(torch.tensor([0.05, 0.95], dtype=D), dim=0)
    torch.testing.assert_close(torch.stack([low, high], 1), ends, atol=0.04, rtol=0)
    assert bool(((result.log_bayes - bayes).abs() < 4 * result.error + 1e-6 * bayes.abs() + 0.01).all())
    torch.testing.assert_close(result.inclusion, on, atol=0.02, rtol=0)
    if heads == 2:
        odds = table[:, 3] + table[:, 0] - table[:, 1] - table[:, 2]
        torch.testing.assert_close(result.interaction[0, 1], odds.mean())


@pytest.mark.parametrize(("sentences", "both_off", "one"), [(40, -1.0, -6.0), (20, -2.0, -50.0)])
def test_heads_that_oppose_each_other_have_both_their_modes(sentences, both_off, one):
    """Each head cancels the other, so the posterior has two modes: both on, and both off."""
    table = torch.tensor([[both_off, one, one, 0.0]], dtype=D).repeat(sentences, 1)
    result, (mean, bayes, _, on) = sample_posterior(table), quadrature(table)
    torch.testing.assert_close(result.rho.mean(0), mean, atol=0.03, rtol=0)
    torch.testing.assert_close(result.inclusion, on, atol=0.03, rtol=0)
    assert float((result.log_bayes - bayes).abs().max()) < 2.5 and float(result.error.min()) > 0.01


def test_heads_without_effect_keep_their_prior():
    """While other settings differ by thousands of nats."""
    live = torch.tensor([-4000.0, 3.0, 0.0, 2500.0], dtype=D) * torch.randn(20, 1, generator=seeded(), dtype=D).abs()
    table = live.repeat_interleave(2, 1)  # head 0 is dead: settings 2k and 2k + 1 are equal
    result = sample_posterior(table, 500)
    assert result.log_bayes[0].abs() < 1e-12 and result.error[0] < 1e-12
    assert kstest(result.rho[:, 0].numpy(), beta(1, 1).cdf).pvalue > 0.01
    assert float((result.inclusion[:, 0] - result.inclusion[0, 0]).abs().max()) < 1e-12
    assert float(result.log_bayes[1:].min()) > 100


def test_one_head_is_a_beta_where_each_sentence_is_sure():
    """All on, all off, mixed, and one on among many off: few sentences and very many."""
    for count, on in ((1, 1), (5, 0), (40, 13), (20_000, 6_000), (20_000, 1)):
        table = torch.full((1, count), -2000.0, dtype=D)
        table[:, :on] = 2000.0
        rho, log_evidence = sample_rho(table, 4000, seeded())
        exact = beta(on + 1, count - on + 1)
        assert kstest(rho[0].numpy(), exact.cdf).statistic < 0.03
        assert float(log_evidence) == pytest.approx(2000 * on + betaln(on + 1, count - on + 1), abs=0.02)


# planted heads


def make_planted_net(strengths, seed, duplicates=None, squash="identity"):
    """Return one slice with heads of these output strengths; two may be duplicates; an activation bounds the state."""
    dim, count = 8, len(strengths)
    nodes = [
        *projections(heads=True, width=dim, dim=dim),
        bt.Node("a", Attention(Dot(None)), ["q", every("k"), every("v")], plates=HEADS),
        bt.Node("W_o", Weight((dim, dim)), plates=["head"]),
        bt.Node("mix", Concat(), ["W_o", "a"], plates=WORD),
        bt.Node("x", Activation(squash), ["mix"], plates=WORD),
    ]
    readout = [bt.Node("y", Normal(0.25), ["x"], plates=WORD)]
    stack = bt.Stack(nodes, [bt.Node("x", Given(dim), plates=WORD)], readout)
    net = bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", count)], name="planted"), seed=seed).to(D)
    parameters = {f"W_{r}_0.value": net.parameters[f"W_{r}_0.value"].clone() for r in "qkvo"}
    for value in parameters.values():
        if duplicates:
            value[duplicates[1]] = value[duplicates[0]]
    parameters["W_o_0.value"] *= torch.tensor(strengths, dtype=D)[:, None, None]
    if duplicates:  # they write to features that no other head writes to
        is_duplicate = torch.isin(torch.arange(count), torch.tensor(duplicates))[:, None]
        parameters["W_o_0.value"][is_duplicate == (torch.arange(dim) >= dim // 2)] = 0.0
    return net.replace(parameters)


def sample_strengths(count, generator):
    """Return strengths that differ by a factor of one and a half, in random order."""
    return (0.2 * 1.5 ** torch.randperm(count, generator=generator).double()).tolist()


@pytest.mark.slow
def test_a_planted_dead_head_is_found_and_ranks_are_those_of_ablation():
    seed = 1
    generator = seeded(seed)
    strengths = sample_strengths(6, generator)
    strengths[seed] = 0.0
    x = torch.randn(24, 4, 8, generator=generator, dtype=D)
    f = inclusion(make_planted_net(strengths, seed), x)
    assert f.dead == ((0, seed),) and f.log_bayes[0, seed].abs() < 1e-9
    assert f.low[0, seed] < 0.15 and f.high[0, seed] > 0.85
    assert spearmanr(f.log_bayes[0], f.ablation[0]).statistic > 0.9
    assert f.agreement().loc["log Bayes factor", "ablation"] > 0.9
    assert f.rank[0].argsort().tolist() == f.log_bayes[0].argsort(descending=True).tolist()


@pytest.mark.slow
def test_planted_duplicates_are_found_where_ablation_has_no_effect():
    """The features to which they write are saturated: one of the two heads is enough, and removing either has no
    effect."""
    seed = 1
    generator = seeded(seed)
    strengths = [*sample_strengths(4, generator), 1e4, 1e4]
    strengths[seed] = 0.0
    net = make_planted_net(strengths, seed, duplicates=(4, 5), squash="tanh")
    x = torch.randn(30, 4, 8, generator=generator, dtype=D)
    state = net.module()(x, want=["x_1"])["x_1"]
    y = state + 0.25 * torch.randn(state.shape, generator=generator, dtype=D)
    f = inclusion(net, (x, y), draws=400)
    assert f.duplicates() == ((0, 4, 5),) and f.dead == ((0, seed),)
    assert float(f.ablation[0, 4:].abs().max()) < 0.01
    expected = math.log(sum(1 / n for n in range(1, 32)))  # the mean over a and b of (1 - (1 - a)(1 - b))^30, times 31
    assert bool(((f.log_bayes[0, 4:] - expected).abs() < 4 * f.error[0, 4:] + 0.05).all())
    assert float((f.log_bayes[0, 4:] - expected).abs().max()) < 0.3
    live = [head for head in range(4) if head != seed]
    assert float(f.interaction[0, 4, 5]) < -100 and float(f.log_bayes[0, live].max()) > 10
    assert spearmanr(f.log_bayes[0, :4], f.ablation[0, :4]).statistic > 0.9
    with pytest.raises(bt.BNetError, match="method='exact'"):
        inclusion(net, (x, y), method="svi", rounds=3).duplicates()


@pytest.mark.slow
def test_intervals_contain_planted_shares(monkeypatch):
    """rho is sampled from the prior, gates from rho, and y from the gates: 90% intervals cover rho 90% of the time."""
    monkeypatch.setattr("bnet_transformer.attention.gates._log_bayes_factor", lambda *args: torch.zeros(2, dtype=D))
    generator, bits, inside = seeded(7), all_settings(4), []
    effect = 0.8 * torch.randn(4, 6, generator=generator, dtype=D)
    for _ in range(50):
        rho = torch.rand(4, generator=generator, dtype=D)
        gates = (torch.rand(25, 4, generator=generator, dtype=D) < rho).to(D)
        effects = effect * (1 + 0.5 * torch.randn(25, 1, 6, generator=generator, dtype=D))
        y = torch.einsum("sh,shd->sd", gates, effects) + torch.randn(25, 6, generator=generator, dtype=D)
        residual = y[:, None] - torch.einsum("kh,shd->skd", bits, effects)
        posterior = exact_gate_posterior(-0.5 * residual.square().sum(-1), 256, generator, quiet)
        low, high = posterior.rho.quantile(torch.tensor([0.05, 0.95], dtype=D), dim=0)
        inside.append((low <= rho) & (rho <= high))
    assert 0.85 <= float(torch.stack(inside).double().mean()) <= 0.95


# all slices at once


def compute_joint_table(runs, sigma):
    """`log P` of each sentence under every setting of the gates of all slices."""
    (part,) = runs.parts()
    shape = (1, len(runs.sites), runs.num_heads)
    rows = [runs.gated_log_probs(part, gates.reshape(shape).expand(len(part), -1, -1))
            for gates in all_settings(len(runs.sites) * runs.num_heads)]  # fmt: skip
    return torch.stack(rows, 1)[part.indices.argsort()].detach() / sigma**2


def make_net(heads, seed):
    net = bt.bayesuvius(8, heads=heads, slices=2, combine="concat", residual=True, seed=seed)
    return jitter(net).to(D)


@pytest.mark.slow
def test_svi_is_near_the_joint_posterior_of_all_slices(heads=2):
    """Means within 0.06 and log Bayes factors within 30% (and Monte Carlo error); closer than slice by slice, where the
    other slices are assumed to be on."""
    net, x = make_net(heads, heads), torch.randn(12, 3, 8, generator=seeded(1), dtype=D)
    per_slice = inclusion(net, x, draws=400)
    f = inclusion(net, x, method="svi", rounds=40, draws=500)
    assert f.sigma == pytest.approx(per_slice.sigma)
    torch.testing.assert_close(f.ablation, per_slice.ablation)
    exact = sample_posterior(compute_joint_table(create_runs(net.network, x, should_observe=False), f.sigma), 400)
    log_bayes = exact.log_bayes.reshape(2, heads)
    assert float((f.log_bayes - log_bayes).abs().mean()) < 0.75 * float((per_slice.log_bayes - log_bayes).abs().mean())
    assert bool(((f.log_bayes - log_bayes).abs() < 0.3 * log_bayes + 3 * f.error + 0.05).all())
    torch.testing.assert_close(f.mean.flatten(), exact.rho.mean(0), atol=0.06, rtol=0)
    torch.testing.assert_close(f.inclusion.flatten(1).mean(0), exact.inclusion.mean(0), atol=0.1, rtol=0)
    assert float((f.inclusion.flatten(1) - exact.inclusion).abs().max()) < 0.25


@pytest.mark.slow
def test_svi_of_one_slice_is_exact_up_to_monte_carlo_error():
    """Where gates do not interact (heads write to disjoint features), only Monte Carlo error remains."""
    net = make_net(3, 0)
    W_o = torch.zeros(3, 8, 8, dtype=D)
    for head, features in enumerate(((0, 1, 2), (3, 4), (5, 6, 7))):
        W_o[head, list(features)] = torch.randn(len(features), 8, generator=seeded(head), dtype=D) / (1 + head)
    net, x = net.replace({"W_o_1.value": W_o}), torch.randn(15, 3, 8, generator=seeded(2), dtype=D)
    runs = create_runs(net.network, x, "x_2", should_observe=False, sites=("a_1",))
    exact = sample_posterior(runs.log_prob_table(all_settings(3), quiet)[0] / 36, 800)
    f = relaxed_gate_posterior(runs, 1 / 36, 40, 800, seeded(), quiet)
    assert bool(((f.log_bayes[0] - exact.log_bayes).abs() < 4 * (f.error[0] + exact.error) + 0.02).all())
    assert float((f.log_bayes[0] - exact.log_bayes).abs().max()) < 0.1 * float(exact.log_bayes.max())
    torch.testing.assert_close(f.inclusion[:, 0], exact.inclusion, atol=0.05, rtol=0)


def simulate_pairs(net, heads, sentences, generator):
    """Return x, and y of the net with gates drawn from shares that are drawn from their prior."""
    x = torch.randn(sentences, 3, 8, generator=generator, dtype=D)
    rho = torch.rand(2, heads, generator=generator, dtype=D)
    gates = (torch.rand(sentences, 2, heads, generator=generator, dtype=D) < rho).to(D)
    y = net.module()(x, gates={"a_0": gates[:, 0], "a_1": gates[:, 1]})
    return x, (y + 0.3 * torch.randn(y.shape, generator=generator, dtype=D)).detach()


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "strength"), [(2, 1.0), (3, 0.2)])
def test_gibbs_is_the_joint_posterior_of_all_slices(heads, strength):
    """That of enumeration, within Monte Carlo error: shares, ends of intervals, gates and Bayes factors. Where heads
    are strong, the gates of a sentence have several modes."""
    net = bt.bayesuvius(8, heads=heads, slices=2, combine="concat", residual=True, observe=Normal(0.3), seed=2)
    net = net.to(D)
    net = net.replace({f"W_o_{t}.value": strength * net.parameters[f"W_o_{t}.value"] for t in (0, 1)})
    data = simulate_pairs(net, heads, 16, seeded(1))
    exact = sample_posterior(compute_joint_table(create_runs(net.network, data), 1.0), 1000)
    f = inclusion(net, data, method="gibbs", rounds=40 if heads == 2 else 60, draws=1000)
    scale, ends = exact.rho.std(0), torch.tensor([0.05, 0.95], dtype=D)
    assert float(((f.mean.flatten() - exact.rho.mean(0)) / scale).abs().max()) < 0.4
    for bound, quantile in zip((f.low, f.high), exact.rho.quantile(ends, dim=0), strict=True):
        assert float(((bound.flatten() - quantile) / scale).abs().max()) < 0.75
    torch.testing.assert_close(f.inclusion.flatten(1), exact.inclusion, atol=0.12, rtol=0)
    difference = (f.log_bayes.flatten() - exact.log_bayes).abs()
    assert bool((difference < 4 * (f.error.flatten() + exact.error) + 0.1).all())
    assert bool((f.error.flatten() < 0.03 * exact.log_bayes.abs() + 0.4).all()) and float(f.rhat.max()) < 1.1


@settings(max_examples=15)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**20))
@pytest.mark.slow
def test_gates_are_sampled_among_the_stored_settings(sentences, num_gates, seed):
    """By their probabilities, if all are stored and some were added twice; a setting that is not stored stays."""
    generator, bits = seeded(seed), all_settings(num_gates).bool()
    table = 3 * torch.randn(sentences, 2**num_gates, generator=generator, dtype=D)
    order = torch.cat([torch.randperm(2**num_gates, generator=generator), torch.tensor([0])])
    chains = NUM_FREE + num_gates
    rho = torch.rand(chains, num_gates, generator=generator, dtype=D).clamp(0.01, 0.99)
    stored = _StoredSettings(sentences, num_gates)
    stored.add(bits[order].expand(sentences, -1, -1), table[:, order])
    stored.add(bits[order[:2]].expand(sentences, -1, -1), table[:, order[:2]])
    log = table[:, None] + (bits[None] * rho.logit()[:, None] + torch.log1p(-rho)[:, None]).sum(-1)
    gates = torch.zeros(sentences, chains, num_gates, dtype=torch.bool)
    counts, repeats = torch.zeros(sentences, chains, 2**num_gates, dtype=D), 64
    for k in range(repeats):  # a grid of uniform numbers, so frequencies are exact up to 1 / repeats
        uniforms = torch.full((sentences, chains), (k + 0.5) / repeats, dtype=D)
        sampled, log_probs, ratios = stored.sample(gates, table[:, :1].expand(-1, chains), rho.logit(), uniforms)
        index = (sampled.long() << torch.arange(num_gates)).sum(-1)
        torch.testing.assert_close(log_probs, table.gather(1, index))
        counts.scatter_add_(2, index[..., None], torch.ones(sentences, chains, 1, dtype=D) / repeats)
    torch.testing.assert_close(counts, log.softmax(-1), atol=1.01 / repeats, rtol=0)
    for head in range(num_gates):
        expected = log_likelihood_ratio(*split_by_gate(table, head), drop_head(rho, head)).T[:, :NUM_FREE]
        torch.testing.assert_close(ratios[:, :NUM_FREE, head], expected)
    other = _StoredSettings(sentences, num_gates)
    other.add(bits[None, 1:].expand(sentences, -1, -1), table[:, 1:])
    sampled, log_probs, ratios = other.sample(gates, table[:, :1].expand(-1, chains), rho.logit(), uniforms)
    assert not sampled.any() and torch.equal(log_probs, table[:, :1].expand(-1, chains)) and float(ratios.max()) < 0


def test_chains_that_disagree_give_no_interval():
    samples = torch.rand(4, 21, 2, 3, generator=seeded(), dtype=D)
    rhat = pyro.ops.stats.split_gelman_rubin(samples)
    torch.testing.assert_close(split_rhat(samples), rhat)
    samples[0, ..., 1, 2] += 1
    assert float(split_rhat(samples)[1, 2]) > 1.1
    net, x = make_net(2, 0), torch.randn(5, 2, 8, generator=seeded(), dtype=D)
    f = inclusion(net, x, method="gibbs", rounds=8)
    f = replace(f, rhat=torch.tensor([[1.0, 1.05], [1.2, 1.0]]))
    assert f.low.isnan().tolist() == f.high.isnan().tolist() == [[False, False], [True, False]]
    assert "for 1 head" in f.caption and not f.mean.isnan().any()
    svi = inclusion(net, x, method="svi", rounds=3)
    assert bool(svi.low.isnan().all() and svi.high.isnan().all()) and "without intervals" in svi.caption
    assert "Monte Carlo error" in str(svi) and "Monte Carlo error" not in str(f)  # it omits the bias of svi


@pytest.mark.slow
def test_gibbs_repeats_and_leaves_dead_heads_at_their_prior():
    net = make_net(2, 1)
    W = net.parameters["W_o_0.value"].clone()
    W[1] = 0
    net, x = net.replace({"W_o_0.value": W}), torch.randn(4, 2, 8, generator=seeded(), dtype=D)
    first, repeated = (inclusion(net, x, method="gibbs", rounds=20, seed=3, draws=500) for _ in range(2))
    assert torch.equal(first.rho, repeated.rho) and torch.equal(first.log_bayes, repeated.log_bayes)
    assert first.rho.shape == (500, 2, 2) and first.dead == ((0, 1),)
    assert first.log_bayes[0, 1].abs() < 1e-9 and first.error[0, 1] < 1e-9
    assert kstest(first.rho[::9, 0, 1].numpy(), beta(1, 1).cdf).pvalue > 0.01


@pytest.mark.slow
def test_svi_repeats_and_leaves_dead_heads_at_their_prior():
    net = make_net(3, 1)
    W = net.parameters["W_o_0.value"].clone()
    W[1] = 0
    net, x = net.replace({"W_o_0.value": W}), torch.randn(6, 2, 8, generator=seeded(), dtype=D)
    first, repeated, other = (inclusion(net, x, method="svi", rounds=3, draws=1000, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.rho, repeated.rho) and torch.equal(first.log_bayes, repeated.log_bayes)
    assert torch.equal(first.importance, repeated.importance) and not torch.equal(first.rho, other.rho)
    assert first.log_bayes[0, 1].abs() < 1e-12 and first.dead == ((0, 1),)
    assert kstest(first.rho[:, 0, 1].numpy(), beta(1, 1).cdf).pvalue > 0.01
    exact = [inclusion(net, x, seed=seed) for seed in (3, 3, 4)]
    assert torch.equal(exact[0].rho, exact[1].rho) and not torch.equal(exact[0].rho, exact[2].rho)


# results


def test_an_inclusion_reads_as_a_table():
    net, x = make_net(2, 0), torch.randn(5, 2, 8, generator=seeded(), dtype=D)
    f = inclusion(net, x, interval=0.5, draws=200)
    wider = inclusion(net, x, interval=0.98, draws=200)
    assert torch.equal(f.rho, wider.rho) and bool(((wider.low < f.low) & (f.high < wider.high)).all())
    tolerance = {"atol": 1e-12, "rtol": 0}
    torch.testing.assert_close(f.low, f.rho.quantile(0.25, dim=0), **tolerance)
    torch.testing.assert_close(f.high, f.rho.quantile(0.75, dim=0), **tolerance)
    table = f.to_dataframe()
    assert table["rank"].tolist() == [1, 2, 3, 4] and table["log_bayes"].is_monotonic_decreasing
    for _, row in table.iterrows():
        index = f.slices.index(row["slice"]), row["head"]
        assert row["rho"] == float(f.mean[index]) and row["ablation"] == float(f.ablation[index])
        assert row["importance"] == float(f.importance[index]) and row["low"] <= row["rho"] <= row["high"]
    text = str(f)
    assert "2 heads of 2 slices by 5 sentences" in text and "Normal around x_2, sigma" in text and "50%" in text
    with pytest.raises(bt.BNetError, match="ablation"):
        f.measure("damage")


@pytest.mark.slow
def test_one_sentence_gives_a_result_without_standard_errors():
    net, x = make_net(2, 0), torch.randn(1, 2, 8, generator=seeded(), dtype=D)
    for method in ("exact", "gibbs", "svi"):
        f = inclusion(net, x, method=method, rounds=8)
        assert bool((f.high - f.low > 0.6)[f.has_interval].all()) and bool(f.log_bayes.isfinite().all())
        assert bool(f.ablation_error.isnan().all() and f.importance_error.isnan().all())
        assert "by 1 sentence (" in str(f)


@settings(max_examples=15)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**20))
def test_shares_are_those_of_enumeration(heads, draws, seed):
    """`E[xi_nu / sum xi]` over all settings; the rest is the probability that all are off."""
    rho = torch.rand(draws, 2, heads, generator=seeded(seed), dtype=D)
    rho = torch.where(torch.rand(rho.shape, generator=seeded(seed + 1)) < 0.2, rho.round(), rho)
    shares, all_off = head_shares(rho)
    expected, expected_off = torch.zeros(2, heads, dtype=D), torch.zeros(2, dtype=D)
    for gates in itertools.product((0, 1), repeat=heads):
        on = torch.tensor(gates, dtype=D)
        prob = torch.where(on == 1, rho, 1 - rho).prod(-1).mean(0)
        expected += prob[:, None] * on / max(sum(gates), 1)
        expected_off += prob * (not any(gates))
    torch.testing.assert_close(shares, expected)
    torch.testing.assert_close(all_off, expected_off)
    torch.testing.assert_close(shares.sum(-1) + all_off, torch.ones(2, dtype=D))
