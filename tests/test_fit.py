"""Fits by MAP and EM: their invariants, oracles, errors, and resumed runs."""

import os
import signal

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import tpm
from bnet_transformer._core.distributed import SINGLE_PROCESS
from bnet_transformer.data import read_batch
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.inference import Evidence, log_evidence, posterior
from bnet_transformer.learning.fit import adam
from bnet_transformer.learning.fit.adam import GradientOptimizer
from bnet_transformer.learning.fit.curvature import EMExpansion
from bnet_transformer.learning.fit.em import SecondOrderOptimizer
from bnet_transformer.learning.fit.objective import FitObjective, select_learnable
from bnet_transformer.learning.fit.restarts import init_restarts
from bnet_transformer.tpm import Categorical, Normal
from tests import flat_options
from tests.custom_tpms import NoisyWord

WORDS = ["a", "b", "c", "d"]
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def mixture(per="sentence", heads=3, **options):
    options = {"observe": Normal(0.5), "key_dim": 2, **options}
    return bt.bayesuvius(4, heads=heads, per=per, **options).to(torch.float64)


def word_mixture(heads=3, atoms=None, prior=None):
    return mixture(heads=heads, atoms=atoms, prior=prior, vocabulary=WORDS, observe=Categorical(4))


def vectors(n=30, seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, 3, 4, generator=g, dtype=torch.float64) for _ in range(2))


def ids(n=30, seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, (n, 3), generator=g) for _ in range(2))


def make_objective(net, learn=None, spread=None):
    learned = select_learnable(net.network, infer_fit_task(net.network).readouts, learn, spread)
    return FitObjective(net.network, learned, 2**16)


def fit(net, data, **options):
    return flat_options.fit(net, data, progress=False, **options)


def randomize(net, seed=0):
    g = torch.Generator().manual_seed(seed)
    return net.replace(
        {k: v + 0.3 * torch.randn(v.shape, generator=g, dtype=v.dtype) for k, v in net.parameters.items() if v.dim()}
    )


NETS = {
    "sentence": (lambda: mixture(), vectors),
    "word": (lambda: mixture("word"), vectors),
    "slice": (lambda: mixture("slice", slices=2), vectors),
    "codebook": (lambda: mixture(atoms=(2, 3, 2)), vectors),
    "codebook of words": (lambda: mixture("word", atoms=2), vectors),
    "categorical": (lambda: word_mixture(atoms=2), ids),
}


@pytest.mark.parametrize("name", NETS)
def test_expected_counts_are_summed_posteriors_also_for_batched_parameters(name):
    make_net, data = NETS[name]
    nets, (x, y) = [randomize(make_net(), seed) for seed in range(2)], data(12)
    objective, corpus = make_objective(nets[0], spread=0.7), read_batch(nets[0].network, (x, y))
    sets = {k: torch.stack([n.parameters[k] for n in nets]) for k in nets[0].parameters}
    for row, net_ in zip(objective.log_evidences(sets, corpus), nets, strict=True):
        torch.testing.assert_close(row, log_evidence(net_.module(), {"y": Evidence(y)}, x).detach(), **EXACT)
    net = nets[0]
    objective, corpus = make_objective(net), read_batch(net.network, (x, y))
    sets = {name: value[None] for name, value in net.parameters.items()}
    expansion = EMExpansion(objective, [corpus], SINGLE_PROCESS, weights=())(sets)
    observed = {"y": Evidence(y)}
    torch.testing.assert_close(expansion.log_density[0], log_evidence(net.module(), observed, x).sum(), **EXACT)
    assert set(expansion.counts) == set(objective.learned.tables)
    for table, count in expansion.counts.items():
        node = table.rpartition(".")[0]
        probs = posterior(net.module(), node, observed, x)
        torch.testing.assert_close(count.reshape(-1, count.shape[-1]).sum(0), probs.reshape(-1, probs.shape[-1]).sum(0))


def test_the_gradient_is_that_of_finite_differences():
    net, (x, y) = randomize(mixture(heads=2, atoms=2, prior=2.0)), vectors(2)
    objective, corpus = make_objective(net, spread=0.7), read_batch(net.network, (x, y))
    names = objective.learned.names

    def total(*values):
        sets = dict(zip(names, values, strict=True))
        return objective.log_evidences(sets, corpus).sum(1) + objective.log_prior(sets)

    values = [net.parameters[name][None].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(total, values)


def test_the_prior_is_dirichlet_rows_and_normal_weights():
    net = randomize(mixture(atoms=2, prior=2.5))
    objective = make_objective(net, spread=0.7)
    sets = [{k: v[None] for k, v in randomize(net, s).parameters.items()} for s in (1, 2)]
    log_priors = [objective.log_prior(set_) for set_ in sets]

    def density(set_):
        total = 0.0
        for name, value in set_.items():
            if name.endswith(".logits"):
                theta = value[0].softmax(-1)
                total += torch.distributions.Dirichlet(torch.full_like(theta, 2.5)).log_prob(theta).sum()
            elif name.endswith(".atoms"):
                total += torch.distributions.Normal(0.0, 0.7).log_prob(value).sum()
        return total

    torch.testing.assert_close((log_priors[0] - log_priors[1])[0], density(sets[0]) - density(sets[1]))


@pytest.mark.parametrize("prior", [None, pytest.param(3.0, marks=pytest.mark.slow)])
def test_em_never_falls_and_ends_where_map_does(prior):
    net, data = randomize(word_mixture(atoms=2, prior=prior)), ids(30)
    tables = [name for name in net.parameters if name.endswith("logits") and name != "y.logits"]
    em = fit(net, data, method=bt.EM(steps=120), learn=tables)
    assert min(np.diff(em.bounds)) > -1e-10
    objective, corpus = make_objective(em.net, tables), read_batch(net.network, data)
    sets = {name: em.net.parameters[name][None].clone().requires_grad_() for name in tables}
    bound = (objective.log_evidences(sets, corpus).sum(1) + objective.log_prior(sets)).sum() / 30
    assert max(float(g.abs().max()) for g in torch.autograd.grad(bound, list(sets.values()))) < 2e-3
    by_gradient = fit(em.net, data, learn=tables, method=bt.MAP(steps=40, rate=0.01), batch=30)
    assert by_gradient.bounds[-1] == pytest.approx(em.bounds[-1], abs=2e-3)


def test_em_with_one_table_is_the_closed_form():
    """One selector per sentence, known heads: the M-step is the mean of the responsibilities."""
    net, data = randomize(mixture()), vectors(40)
    f = fit(net, data, method=bt.EM(steps=1, optimizer="first-order"), learn=["c.logits"])
    probs = posterior(net.module(), "c", {"y": Evidence(data[1])}, data[0]).mean(0)
    torch.testing.assert_close(f.pi, probs)
    with_prior = fit(
        word_mixture(prior=4.0), ids(40), method=bt.EM(steps=1, optimizer="first-order"), learn=["c.logits"]
    )
    probs = posterior(word_mixture(prior=4.0).module(), "c", {"y": Evidence(ids(40)[1])}, ids(40)[0]).sum(0) + 3
    torch.testing.assert_close(with_prior.pi, probs / probs.sum())


@pytest.mark.parametrize("method", ["map", "em"])
def test_restarts_at_once_are_restarts_one_by_one(method):
    net, data, held_out = mixture(), vectors(40), vectors(10, seed=1)
    options = {"method": method, "steps": 12, "batch": 16, "held_out": held_out, "every": 12}
    options |= {"inner": 4} if method == "em" else {}
    f = fit(net, data, restarts=3, prune=False, **options)
    objective = make_objective(net)
    run = init_restarts(net.network, objective.learned.names, 3, 0, torch.device("cpu"))
    scores = []
    for r in range(3):
        separate = fit(net.replace(run.get(r)), data, **options)
        scores.append(separate.measured[-1][2])
        if r == f.restart:
            for name, value in separate.net.parameters.items():
                torch.testing.assert_close(f.net.parameters[name], value)
    assert [score for _, _, score in f.measured] == pytest.approx(scores)
    assert f.restart == int(np.argmax(scores))


def test_pruning_keeps_the_better_half_and_the_best_is_the_best_measured():
    held_out = vectors(10, seed=1)
    f = fit(
        mixture(),
        vectors(60),
        method=bt.MAP(restarts=8, steps=16, optimizer="first-order"),
        every=4,
        held_out=held_out,
        spread=0.3,
    )
    restarts = {step: sorted(restart for s, restart, _ in f.measured if s == step) for step in (4, 8, 16)}
    assert [len(restarts[step]) for step in (4, 8, 16)] == [8, 4, 2]
    scores = {restart: score for step, restart, score in f.measured if step == 8}
    assert set(restarts[16]) == set(sorted(scores, key=scores.__getitem__)[-2:])
    assert f.restart == max(f.measured, key=lambda measure: measure[2])[1]
    assert f.log_likelihood(held_out).mean() == pytest.approx(max(s for _, _, s in f.measured))
    assert f.criterion == "log evidence" and f.evaluated_on == "held-out sentences"  # for any prior


# queries of a fit


def test_questions_agree_with_the_reference():
    net = randomize(word_mixture())
    x, y = ids(3)
    f = fit(net, (x, y), method=bt.MAP(steps=1, rate=1e-12))
    s = net.sentence([WORDS[i] for i in x[0]])
    evidence = {f"y_{i}": int(k) for i, k in enumerate(y[0])}
    torch.testing.assert_close(f.responsibilities((x, y))[0], s.posterior("c", evidence), atol=1e-9, rtol=1e-9)
    for i in range(3):
        torch.testing.assert_close(f.predict(x)[0, i], s.posterior(f"y_{i}"), atol=1e-9, rtol=1e-9)
    real = randomize(mixture())
    x, y = vectors(3)
    f = fit(real, (x, y), method=bt.MAP(steps=1, rate=1e-12))
    s = real.sentence(x=x[1])
    mean = torch.einsum("c,cd->d", real.parameters["c.logits"].softmax(-1), s["x_1_2"])
    torch.testing.assert_close(f.predict(x)[1, 2], mean, atol=1e-9, rtol=1e-9)
    words = randomize(mixture("word"))
    s = words.sentence(x=x[1])
    mean = torch.einsum("c,cd->d", words.parameters["c_0.logits"].softmax(-1), s["x_1_2"])
    torch.testing.assert_close(
        fit(words, (x, y), method=bt.MAP(steps=1, rate=1e-12)).predict(x)[1, 2], mean, atol=1e-9, rtol=1e-9
    )


def mean_of(logits, atoms):
    return torch.stack([sum(p * m for p, m in zip(row, atoms, strict=True)) for row in logits.softmax(-1)])


@pytest.mark.parametrize("per", ["sentence", "word", "codebook", "codebook of words"])
def test_invariants_are_those_of_each_head(per):
    net = randomize(NETS[per][0]())
    heads = fit(net, vectors(4), method=bt.MAP(steps=1, rate=1e-12)).heads
    store = net.parameters
    if per in ("sentence", "word"):
        key = "values" if per == "sentence" else "value"
        W = [store[f"W_{r}_0.{key}"] for r in "qkv"]
    elif per == "codebook":
        W = [mean_of(store[f"W_{r}_0.logits"], store[f"W_{r}_0.atoms"]) for r in "qkv"]
    else:
        W = [mean_of(store[f"m_{r}_0.logits"], store[f"W_{r}_0.value"]) for r in "qkv"]
    torch.testing.assert_close(heads.A["x_1"], torch.stack([q.T @ k for q, k in zip(W[0], W[1], strict=True)]))
    torch.testing.assert_close(heads.OV["x_1"], W[2])
    pi = heads.usage
    assert heads.effective == pytest.approx(float((-(pi * pi.log()).sum()).exp()))
    assert torch.allclose(heads.cosine["A x_1"].diagonal(), torch.ones(3).double())


def test_a_fit_compared_with_its_heads_in_another_order():
    net, data = randomize(mixture()), vectors(80)
    order = [2, 0, 1]
    permuted = net.replace({k: v[order] for k, v in net.parameters.items() if v.dim()})
    f, g = (fit(n, data, method=bt.MAP(steps=1, rate=1e-12)) for n in (net, permuted))
    comparison = f.compare(g, data)
    assert comparison.match == tuple(order.index(h) for h in range(3)) and comparison.agreement == pytest.approx(1.0)
    assert comparison.gain == pytest.approx(0.0, abs=1e-9)
    torch.testing.assert_close(comparison.A["x_1"], torch.ones(3).double())
    torch.testing.assert_close(comparison.OV["x_1"], torch.ones(3).double())
    assert list(comparison.to_dataframe()["match"]) == list(comparison.match)
    with_net = f.compare(permuted, data)  # a net is compared as a fit without changes
    assert with_net.match == comparison.match and with_net.gain == pytest.approx(0.0, abs=1e-9)
    torch.testing.assert_close(with_net.overlap, comparison.overlap)
    with pytest.raises(bt.BNetError, match="a net or a loaded fit"):
        f.compare(permuted)


def test_the_last_phase_returns_no_worse_parameters(monkeypatch):
    """With a rate that is far too large, the first measurement is the best."""
    start, run_last_phase = {}, adam._continue_on_all

    def continue_on_all(problem, method, best):
        start.update(objective=problem.objective, corpus=problem.corpus, best=best)
        return run_last_phase(problem, method, best)

    monkeypatch.setattr(adam, "_continue_on_all", continue_on_all)
    monkeypatch.setattr(adam, "FINAL_RATE_FACTOR", 60.0)
    f = fit(
        mixture(heads=2), vectors(), method=bt.MAP(restarts=2, steps=8, optimizer="first-order"), spread=1.0, every=1
    )

    def log_posterior(parameters):
        objective = start["objective"]
        store = {**objective.network.parameters, **parameters}
        evidence = objective.log_evidence(store, start["corpus"]).sum()
        return float(evidence + objective.log_prior({name: value[None] for name, value in store.items()}))

    assert log_posterior(f.net.parameters) >= log_posterior(start["best"])


@pytest.mark.parametrize("prior", [None, 2.0])
def test_checks_draw_from_the_fitted_tables_and_not_from_their_prior(prior):
    """Oracle: the second moment of y is `sum_c pi_c E|mu_c|^2 + sigma^2`, where mu_c is the output of only head c."""
    pi, sigma = torch.tensor([0.93, 0.07], dtype=torch.float64), 0.5
    net = mixture(heads=2, prior=prior, observe=Normal(sigma))
    values = net.parameters["W_v_0.values"] * torch.tensor([1.0, 8.0], dtype=torch.float64)[:, None, None]
    net = net.replace({"c.logits": pi.log(), "W_v_0.values": values})
    x, _ = vectors(200)
    means = torch.stack([net.module()(x, do={"c": torch.full((200,), c)}) for c in range(2)])
    expected = float(pi @ means.detach().square().mean((1, 2, 3))) + sigma**2
    statistic = {"square": lambda y: y.square().mean()}
    result = bt.fit(net, (x, means[0]), method=bt.MAP(steps=1, rate=1e-12), progress=False).check(
        (x, means[0]), statistic, draws=100
    )
    assert abs(result.mean["square"] - expected) < 4 * result.spread["square"] / 10
    assert result.spread["square"] < expected / 2
    shifted = fit(net, (x, means[0]), method=bt.MAP(steps=1, rate=1e-12)).check((x, 9 * means[0]), draws=4)
    assert shifted.p["variance"] == 0.0


# data


@pytest.mark.slow
def test_lists_of_several_lengths_are_arrays_where_they_are_of_one():
    net, method = word_mixture(), bt.MAP(restarts=1, steps=3)
    x, y = ids(4)
    pairs = [([WORDS[i] for i in a], b.tolist()) for a, b in zip(x, y, strict=True)]
    for f in (fit(net, pairs, method=method), fit(net, (x.numpy(), y.numpy()), method=method)):
        assert f.bounds == fit(net, (x, y), method=method).bounds
    ragged = [*pairs, (["a", "b"], [1, None])]
    f = fit(net, ragged, method=bt.MAP(steps=1, rate=1e-12))
    observed = Evidence(torch.tensor([[1, 0]]), torch.tensor([[True, False]]))
    expected = log_evidence(net.module(), {"y": observed}, torch.tensor([[0, 1]]))
    torch.testing.assert_close(f.log_likelihood(ragged)[-1], expected[0].detach(), atol=1e-8, rtol=1e-8)


@pytest.mark.slow
def test_a_fit_of_choices_that_cannot_be_summed_draws_them_as_it_is_advised():
    net, data = mixture("word", slices=2, heads=2), vectors(4)
    for options in ({"method": "map"}, {"method": "em"}, {"method": "svi", "spread": 1.0}):
        with pytest.raises(bt.UnsupportedError, match="choices='sampled'") as error:
            fit(net, data, steps=1, **options)
        advised = eval(f"dict({error.value.hint.partition('se ')[2]})")
        assert fit(net, data, steps=1, draws=2, spread=1.0, **advised).choices
    net = mixture("slice", slices=3)
    with pytest.raises(bt.BudgetError, match="choices='sampled'") as error:
        fit(net, data, method=bt.MAP(steps=1), budget=9)
    assert fit(net, data, method=bt.MAP(steps=1), budget=27).bounds
    advised = eval(f"dict({error.value.hint.partition('use ')[2]})")
    assert fit(net, data, steps=1, budget=9, draws=2, spread=1.0, **advised).choices


X, Y = vectors(6)
HALF = torch.where(torch.arange(4) < 2, Y, torch.nan)
REFUSED = [
    (mixture, (X, HALF), {"missing": True}),
    (mixture, (X, Y.where(torch.arange(6)[:, None, None] < 5, torch.nan)), {}),
    (lambda: mixture(observe=None), (X, Y), {}),
    (lambda: mixture(atoms=4), (X, Y), {"budget": 63}),
    (lambda: mixture("corpus"), (X, Y), {"batch": 3}),
    (lambda: word_mixture(prior=0.5), ids(), {}),
    (mixture, (X, Y), {"learn": ["W_z"]}),
    (mixture, (X, Y), {"method": bt.EM(inner=3), "learn": ["c.logits"]}),
    (mixture, (X, Y), {"method": "svi", "spread": 1.0, "held_out": (X, Y)}),
    (mixture, (X, Y), {"method": bt.EM(optimizer="second-order"), "batch": 2}),
    (mixture, (X, Y), {"method": "nuts", "spread": 1.0, "batch": 2}),
    (mixture, (X, Y), {"method": "svi", "choices": "sampled", "anneal": 2.0}),
    (mixture, (X, Y), {"held_out": (X, Y * torch.nan)}),
]


@pytest.mark.filterwarnings("ignore:per='corpus':UserWarning")
def test_bad_input_is_refused():
    for make, data, options in REFUSED:
        with pytest.raises(bt.BNetError):
            fit(make(), data, **options)


def test_a_corpus_has_one_draw_and_warns():
    net = randomize(mixture("corpus"))
    with pytest.warns(UserWarning, match="selects a model"):
        f = fit(net, (X, Y), method=bt.MAP(steps=2, optimizer="first-order"))
    expected = log_evidence(net.module(), {"y": Evidence(Y)}, X).detach() / len(X)
    assert f.bounds[0] == pytest.approx(float(expected)) and f.responsibilities((X, Y)).shape == (1, 3)


# interrupts and checkpoints


INTERRUPTED = {
    "map": (GradientOptimizer, {"method": "map", "batch": 8, "held_out": vectors(9, seed=3), "restarts": 4}),
    "second order": (
        SecondOrderOptimizer,
        {"method": "em", "restarts": 2, "steps": 8, "learn": ["c.logits", "W_v_0.values"]},
    ),
    "svi": (GradientOptimizer, {"method": "svi", "batch": 8}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(k, marks=pytest.mark.slow) if k == "second order" else k for k in INTERRUPTED]
)
def test_an_interrupt_returns_the_best_so_far_and_resumes_exactly(case, tmp_path, monkeypatch):
    kind, options = INTERRUPTED[case]
    options = {"steps": 12, "spread": 1.0, **options}
    expected = fit(mixture(), vectors(), every=4, **options)
    update = kind.update

    def update_and_interrupt(self):
        update(self)
        if self.step == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "update", update_and_interrupt)
        partial = fit(mixture(), vectors(), every=4, folder=tmp_path, **options)
    assert not partial.finished and len(partial.bounds) == 7 and partial.bounds == expected.bounds[:7]
    resumed = fit(mixture(), vectors(), every=4, folder=tmp_path, resume=True, **options)
    assert resumed.bounds == expected.bounds and resumed.measured == expected.measured
    assert all(torch.equal(v, expected.net.parameters[k]) for k, v in resumed.net.parameters.items())
    for data, other in ((vectors(), {"steps": 13}), (vectors(seed=5), {}), (vectors(), {"resume": False})):
        with pytest.raises(bt.BNetError):
            fit(mixture(), data, every=4, folder=tmp_path, **{"resume": True, **options, **other})


def test_a_choice_that_depends_on_its_word_has_no_table():
    word, heads = ["word"], ["head", "word"]
    picked = bt.Arrow("v", "causal", pick={"head": "c"})
    slice_ = [
        bt.Node("v", tpm.Linear(4), ["x"], plates=heads),
        bt.Node("c", Categorical(2), ["x"], plates=word),
        bt.Node("x", tpm.Attention(), ["x", bt.Arrow("x", "causal"), picked], plates=word),
    ]
    readout = bt.Node("y", Normal(0.5), ["x"], plates=word)
    stack = bt.Stack(slice_, [bt.Node("x", tpm.Given(4), plates=word)], [readout])
    net = bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)])).to(torch.float64)
    f = bt.fit(net, vectors(4), method=bt.MAP(steps=2), progress=False)
    assert f.theta == {} and "c_0.logits" in f.atoms
    for call in (lambda: f.pi, lambda: f.heads, lambda: f.responsibilities(vectors(4))):
        with pytest.raises(bt.BNetError, match=r"no parents, .*; got c_0 with parents. Use posterior"):
            call()
    for other in (net, mixture()):
        with pytest.raises(bt.BNetError, match="spread"):
            bt.fit(other, vectors(4), method="nuts", progress=False)


def test_em_gives_the_mode_of_the_posterior_and_not_the_step_of_the_best_likelihood():
    """Starts at the shares of the best likelihood, with a strong prior; the mode is found on a grid."""
    net, flat = mixture(heads=2, prior=40.0, seed=2), mixture(heads=2, seed=2)
    x, pi = vectors(30)[0], torch.tensor([0.95, 0.05], dtype=torch.float64)
    torch.manual_seed(0)
    data = x, flat.replace({"c.logits": pi.log()}).pyro()(x)["y"].reshape(30, 3, 4)
    start = fit(flat, data, method=bt.EM(steps=60), learn=["c.logits"]).net.parameters["c.logits"]
    grid = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    sets = {"c.logits": torch.stack([grid, 1 - grid], -1).log()}
    evidence = make_objective(net).log_evidences(sets, read_batch(net.network, data)).sum(1)
    log_posterior = evidence + 39 * (grid.log() + (1 - grid).log())
    for method in ("em", "map"):
        f = fit(net.replace({"c.logits": start}), data, method=method, learn=["c.logits"], steps=200, every=10)
        assert f.pi[0].item() == pytest.approx(grid[log_posterior.argmax()].item(), abs=2e-3)
        assert f.criterion == "log posterior density"
        assert max(score for *_, score in f.measured) == pytest.approx(log_posterior.max().item() / 30, abs=1e-4)
    assert abs(f.pi[0] - start.softmax(-1)[0]) > 0.05  # the prior moves the mode


@pytest.mark.slow
@pytest.mark.parametrize("observe", [pytest.param(NoisyWord, marks=pytest.mark.slow), Categorical])
@pytest.mark.parametrize("method", [bt.MAP(restarts=1, steps=150, rate=0.05), bt.EM(restarts=1, steps=150, rate=0.05)])
def test_a_readout_of_states_has_the_prior_that_its_tpm_declares(observe, method):
    lines = [line.split() for line in ("a a a", "a b a", "c a a", "a a b")]
    data = [(line[:-1], line[1:]) for line in lines]
    nets = [
        bt.bayesuvius(4, heads=2, mask="causal", vocabulary=["a", "b", "c"], observe=observe(3, prior=prior))
        for prior in (None, 1000.0)
    ]
    fits = [bt.fit(net, data, method=method, progress=False) for net in nets]
    free, uniform = (f.net.parameters["y.logits"].softmax(-1) for f in fits)
    assert free.max() > 0.4
    torch.testing.assert_close(uniform, torch.full((3,), 1 / 3), atol=5e-3, rtol=0)
    network = nets[1].network
    learned = select_learnable(network, (network.get_spec("y"),), None, None)
    assert set(learned.tables) == {"c.logits"} and learned.logits == {"y.logits": 1000.0}
    logits = network.parameters["y.logits"] + torch.tensor([0.5, 0.0, -1.0])
    sets = {name: network.parameters[name][None] for name in learned.names} | {"y.logits": logits[None]}
    prior = torch.distributions.Dirichlet(torch.full((3,), 1000.0))
    flat = sets | {"y.logits": torch.zeros(1, 3)}
    change = FitObjective(network, learned, 100).log_prior(sets) - FitObjective(network, learned, 100).log_prior(flat)
    expected = prior.log_prob(logits.softmax(-1)) - prior.log_prob(torch.full((3,), 1 / 3))
    torch.testing.assert_close(change[0], expected, rtol=1e-4, atol=1e-3)
    with pytest.raises(bt.BNetError, match="y"):
        bt.fit(nets[1], data, method="svi", spread=1.0, progress=False)
