"""Fits step by step: forms of data, updates equal torch's Adam, checkpoints, queries of a fit."""

import itertools
from dataclasses import replace

import pytest
import torch
from scipy.stats import ttest_1samp
from sklearn.metrics import adjusted_rand_score

import bnet_transformer as bt
from bnet_transformer._core.files import derive_seed
from bnet_transformer.inference import Evidence, log_evidence
from bnet_transformer.learning.fit import result
from bnet_transformer.learning.fit.methods import resolve_method
from bnet_transformer.learning.loop import FILE_NAME, read_checkpoint
from bnet_transformer.learning.training import create_schedule
from bnet_transformer.tpm import Categorical, Normal
from tests import flat_options

ARVIZ = pytest.mark.filterwarnings("ignore:\nArviZ is undergoing:FutureWarning")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
FROZEN = {"steps": 1, "rate": 1e-12}


def mixture(per="sentence", heads=2, seed=1, **options):
    net = bt.bayesuvius(3, heads=heads, per=per, key_dim=2, seed=seed, **{"observe": Normal(0.5), **options})
    return net.to(torch.float64)


def word_mixture():
    return bt.bayesuvius(4, heads=2, vocabulary=list("abcd"), observe=Categorical(4), seed=2).to(torch.float64)


def vectors(n=40, words=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, words, 3, generator=g, dtype=torch.float64) for _ in range(2))


def fit(net, data, **options):
    return flat_options.fit(net, data, progress=False, **options)


def evidences(net, x, y):
    return log_evidence(net.module(), {"y": Evidence(y)}, x).detach()


# data


def test_whole_numbers_are_real_where_a_net_has_vectors():
    x, y = (torch.randint(-1, 3, (6, 3, 3), generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    net = mixture()
    expected = evidences(net, x.double(), y.double())
    for data in ((x, y), list(zip(x, y, strict=True)), (x.tolist(), y.tolist())):
        torch.testing.assert_close(fit(net, data, **FROZEN).log_likelihood(data), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(fit(net, (x, y), **FROZEN).predict(x), fit(net, (x, y), **FROZEN).predict(x.double()))


# the steps


def run_adam(net, x, y, names, *, steps, batch, rate, spread, clip):
    """Run the same steps with torch's Adam: bounds, and the parameters at the end."""
    leaves = {name: net.parameters[name].detach().clone().requires_grad_() for name in names}
    optimizer = torch.optim.Adam(list(leaves.values()), lr=rate, betas=(0.9, 0.99), eps=1e-8)
    rates, bounds, prior_rows = create_schedule("cosine", rate, max(1, steps // 20), steps, None), [], 2.0
    for step in range(steps):
        epoch, batch_index = divmod(step, -(-len(x) // batch))
        g = torch.Generator().manual_seed(derive_seed(0, "order", epoch))
        indices = torch.randperm(len(x), generator=g)[batch_index * batch : (batch_index + 1) * batch]
        prior = (prior_rows - 1) * leaves["c.logits"].log_softmax(-1).sum()
        prior = prior - sum(leaves[name].square().sum() for name in names if name != "c.logits") / (2 * spread**2)
        module = net.module()
        state = {f"store.{name.replace('.', '/')}": value for name, value in leaves.items()}
        q, k, v = (leaves[f"W_{r}_0.values"] for r in "qkv")
        assert {*state} <= {name for name, _ in module.named_parameters()}
        qk = torch.einsum("coi,bni->bcno", q, x[indices]), torch.einsum("coi,bni->bcno", k, x[indices])
        attention = (qk[0] @ qk[1].mT).softmax(-1)
        mean = attention @ torch.einsum("coi,bni->bcno", v, x[indices])
        log_probs = (
            torch.distributions.Normal(mean, net.parameters["y.log_sigma"].exp())
            .log_prob(y[indices][:, None])
            .sum((2, 3))
        )
        evidence = (leaves["c.logits"].log_softmax(-1) + log_probs).logsumexp(1)
        bound = evidence.mean() + prior / len(x)
        bounds.append(float(bound.detach()))
        optimizer.zero_grad()
        (-bound).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(leaves.values()), clip, error_if_nonfinite=True)
        for group in optimizer.param_groups:
            group["lr"] = rates(step + 1)
        optimizer.step()
    return bounds, leaves


@pytest.mark.parametrize("clip", [None, 0.5])
def test_map_is_torchs_adam_up_the_evidence_of_minibatches_and_the_prior_of_the_whole(clip):
    net, (x, y) = mixture(prior=2.0), vectors(40)
    options = {"steps": 7, "batch": 16, "rate": 0.1, "spread": 0.7}
    names = ["c.logits", *(f"W_{r}_0.values" for r in "qkv")]
    bounds, leaves = run_adam(net, x, y, names, clip=clip, **options)
    f = fit(net, (x, y), clip=clip, every=7, **options)
    assert f.bounds == pytest.approx(bounds, abs=1e-7)
    for name, value in leaves.items():
        torch.testing.assert_close(f.net.parameters[name], value.detach(), rtol=1e-6, atol=1e-8)


def test_the_last_phase_learns_from_all_sentences(tmp_path):
    net, data = mixture(), vectors(60)
    f = fit(net, data, method=bt.MAP(restarts=2, steps=8, optimizer="first-order"), checkpoints=tmp_path)
    saved = read_checkpoint(tmp_path / FILE_NAME, net.network)
    best = net.replace({name: saved.get_tensors("best")[name] for name in f.learned})
    assert f.bounds[8] == pytest.approx(float(evidences(best, *data).mean()), abs=1e-9)


# options


def test_a_method_is_a_config_or_its_name():
    for method in (bt.MAP(), bt.EM(inner=3), bt.SVI(draws=7), bt.NUTS()):
        assert resolve_method(method) is method and resolve_method(method.name) == type(method)()


# checkpoints


def test_a_diverged_fit_resumes_from_its_last_good_step(tmp_path):
    options = {"folder": tmp_path, "every": 1, "optimizer": "first-order"}
    first = fit(mixture(), vectors(), steps=6, **options)
    with pytest.raises(bt.BNetError, match=r"Resume from step 6 .*resume='changed'"):
        fit(mixture(), vectors(), steps=20, rate=1e6, resume="changed", **options)
    f = fit(mixture(), vectors(), steps=20, rate=1e-2, resume="changed", **options)
    assert len(f.bounds) == 20 and min(f.bounds[6:]) > first.bounds[-1] - 0.1


def test_a_fit_that_diverges_at_once_keeps_no_checkpoint(tmp_path):
    with pytest.raises(bt.BNetError, match="before the first checkpoint"):
        fit(mixture(), vectors(), method=bt.MAP(steps=50, rate=1e6), checkpoints=tmp_path, every=1)
    f = fit(
        mixture(),
        vectors(),
        method=bt.MAP(steps=5, rate=1e-3),
        checkpoints=bt.Checkpoints(tmp_path, resume="changed"),
        every=1,
    )
    assert f.bounds == fit(mixture(), vectors(), method=bt.MAP(steps=5, rate=1e-3)).bounds
    with pytest.raises(bt.BNetError, match="a bound of"):
        fit(mixture(), vectors(), method=bt.MAP(steps=1, rate=1e6))


def test_more_steps_are_not_lost_to_an_older_last_phase(tmp_path):
    net, data = mixture(heads=3), vectors(60)
    method = bt.MAP(restarts=3, steps=8, optimizer="first-order")
    fit(net, data, method=method, checkpoints=tmp_path)
    method = replace(method, steps=16)
    longer = fit(net, data, method=method, checkpoints=bt.Checkpoints(tmp_path, resume="changed"))
    saved = read_checkpoint(tmp_path / FILE_NAME, net.network)
    best = net.replace({name: saved.get_tensors("best")[name] for name in longer.learned})
    assert longer.bounds[16] == pytest.approx(float(evidences(best, *data).mean()), abs=1e-9)
    # A finished last phase stays.
    resumed = fit(net, data, method=method, checkpoints=bt.Checkpoints(tmp_path, resume=True))
    assert resumed.bounds == longer.bounds


@pytest.mark.parametrize("parameter", ["W_v_0.values", "c.logits"])
def test_a_checkpoint_of_other_parameters_is_refused(parameter, tmp_path):
    options = {"method": "map", "steps": 4, "learn": ["c.logits"], "folder": tmp_path}
    net = mixture()
    fit(net, vectors(8), **options)
    with pytest.raises(bt.BNetError, match="the settings of the run that wrote the checkpoint: parameters="):
        fit(net.replace({parameter: net.parameters[parameter] + 0.1}), vectors(8), resume=True, **options)
    fit(net, vectors(8), resume=True, **options)


# queries of a fit


def ragged_data(net, lengths=(2,) * 30 + (12,) * 2):
    torch.manual_seed(0)
    xs = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    return [(x, net.pyro()(x[None])["y"].reshape(len(x), 3).detach()) for x in xs]


def word_mixture_net(seed, pi):
    return mixture("word", seed=seed).replace({"c_0.logits": torch.tensor(pi).double().log()})


def test_fits_are_compared_on_the_words_that_are_there():
    nets = word_mixture_net(1, [0.8, 0.2]), word_mixture_net(9, [0.3, 0.7])
    data = ragged_data(nets[0])
    f, g = (fit(net, data, **FROZEN) for net in nets)
    responsibilities = [torch.cat([h.responsibilities((x[None], y[None]))[0] for x, y in data]) for h in (f, g)]
    result = f.compare(g, data)
    torch.testing.assert_close(result.overlap, responsibilities[0].mT @ responsibilities[1], **CLOSE)
    assert result.agreement == pytest.approx(adjusted_rand_score(*(p.argmax(-1).numpy() for p in responsibilities)))


def test_the_gain_has_its_standard_error_and_its_name():
    (x, y), nets = vectors(50), (mixture(), mixture(seed=5))
    f, g = (fit(net, (x, y), **FROZEN) for net in nets)
    gains = (evidences(nets[0], x, y) - evidences(nets[1], x, y)).numpy()
    on_data, default = f.compare(g, (x, y)), f.compare(g)
    for comparison in (on_data, default):
        assert comparison.gain == pytest.approx(gains.mean(), abs=1e-6)
        assert comparison.gain_error == pytest.approx(gains.std(ddof=1) / 50**0.5, rel=1e-6)
    assert on_data.interval[0] < on_data.gain < on_data.interval[1]
    assert on_data.p == pytest.approx(ttest_1samp(gains, 0).pvalue, abs=0.03)
    assert default.interval is None and default.p is None  # both fits have seen these sentences
    assert on_data.criterion == "log likelihood of the given data"
    assert default.criterion == "log likelihood of the training data"
    assert default.criterion in default.caption


def test_fits_of_two_floating_types_are_compared_and_two_kinds_of_choices_are_not():
    data, net = vectors(30), mixture()
    f, g = fit(net, data, **FROZEN), fit(net.to(torch.float32), tuple(part.float() for part in data), **FROZEN)
    for a, b in ((f, g), (g, f)):
        for comparison in (a.compare(b, data), a.compare(b)):
            assert comparison.agreement == pytest.approx(1.0) and comparison.gain == pytest.approx(0.0, abs=1e-4)
    words = fit(mixture("word"), data, **FROZEN)
    for a, b in ((f, words), (words, f)):
        with pytest.raises(bt.BNetError, match="both with one draw per sentence, or both with one draw per word"):
            a.compare(b, data)
    with pytest.raises(bt.BNetError, match="same sentences in the same order"):
        f.compare(fit(net, vectors(30, seed=3), **FROZEN))


@pytest.mark.slow
@ARVIZ
@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto:UserWarning")
def test_posteriors_are_compared_by_leaving_one_out(tmp_path):
    import arviz as az

    data = vectors(25)
    options = {"method": bt.NUTS(chains=1, draws=200, warmup=50), "learn": ["c.logits"], "progress": False}
    f, g = bt.fit(mixture(), data, **options), bt.fit(mixture(seed=5), data, **options)
    comparison, loos = f.compare(g), [az.loo(h.to_arviz(), var_name="y") for h in (f, g)]
    assert comparison.criterion.startswith("leave-one-out")
    assert comparison.gain * 25 == pytest.approx(float(loos[0].elpd_loo - loos[1].elpd_loo), abs=1e-6)
    f.save(tmp_path / "f.safetensors")
    loaded = bt.load(tmp_path / "f.safetensors")
    with pytest.raises(bt.BNetError, match=r"loaded.*data="):
        loaded.compare(g)
    assert loaded.compare(g, data).criterion == "log likelihood of the given data"


def test_own_statistics_see_what_was_observed():
    net = word_mixture_net(1, [0.8, 0.2])
    data = ragged_data(net)
    f, y = fit(net, data, **FROZEN), torch.cat([y for _, y in data])
    check = f.check(data, {"square": lambda y: y.square().mean(), "rows": lambda y: len(y)}, draws=20)
    assert check.observed["square"] == pytest.approx(float(y.square().mean())) and check.observed["rows"] == len(y)
    assert check.mean["rows"] == len(y) and check.mean["square"] == pytest.approx(check.observed["square"], rel=0.2)
    defaults = f.check(data, draws=2)
    assert defaults.observed["variance"] == pytest.approx(float(y.var(0).mean()))


def test_a_fit_remembers_that_words_may_be_missing(tmp_path):
    net, (x, y) = mixture("word"), vectors(6)
    y[1], y[2, 0] = torch.nan, torch.nan
    observed = ~y.isnan().any(-1)
    expected = log_evidence(net.module(), {"y": Evidence(y.nan_to_num(), observed)}, x).detach()
    f = fit(net, (x, y), missing=True, **FROZEN)
    f.save(tmp_path / "f.safetensors")
    for g in (f, bt.load(tmp_path / "f.safetensors")):
        torch.testing.assert_close(g.log_likelihood((x, y)), expected, atol=1e-7, rtol=0)
        assert g.responsibilities((x, y)).shape == (6, 3, 2) and g.check((x, y), draws=2).p
        assert g.compare(f, (x, y)).agreement == pytest.approx(1.0)
    with pytest.raises(bt.BNetError, match="missing=True"):
        fit(net, vectors(6), **FROZEN).log_likelihood((x, y))


def test_a_sampled_fit_reports_its_limits():
    net, data = mixture("word", slices=2), vectors(6)
    f = fit(net, data, method=bt.SVI(choices="sampled", steps=3, draws=4), learn=["c_0.logits", "c_1.logits"])
    calls = [
        lambda: f.log_likelihood(data),
        lambda: f.responsibilities(data),
        lambda: f.predict(data[0]),
        lambda: f.compare(f, data),
    ]
    for call in calls:
        with pytest.raises(
            bt.BNetError, match=r"sampled.*f\.choices.*f\.check\(data\).*f\.to_arviz\(\).*per='sentence'"
        ):
            call()
    assert f.check(data, draws=2).p and f.choices["c_1"].shape == (6, 3, 2)


@pytest.mark.parametrize("observe", [Normal(0.5), Categorical(4)])
def test_predictions_go_in_parts_and_keep_to_the_budget(observe, monkeypatch):
    net = mixture(atoms=2, observe=observe)
    x, y = vectors(10)
    f = fit(net, (x, y if observe == Normal(0.5) else torch.zeros(10, 3, dtype=torch.long)), **FROZEN)
    expected = f.predict(x)
    monkeypatch.setattr(result, "SENTENCES_PER_PART", 4)
    torch.testing.assert_close(f.predict(x), expected, **CLOSE)
    states = 8 if observe == Normal(0.5) else 32  # of the three roles' atoms, and of the readout
    with pytest.raises(bt.BudgetError, match=rf"at most {states - 1} joint states.*got {states}"):
        replace(f, record=replace(f.record, budget=states - 1)).predict(x)
    exact = replace(f, record=replace(f.record, budget=states))
    torch.testing.assert_close(exact.predict(x), expected, **CLOSE)


def test_the_prediction_of_a_real_readout_sums_over_selectors_and_atoms():
    """By hand: `sum_m P(m) E[y | x, m]` with `P(m) = sum_c pi_c prod_r theta^r[c, m_r]`."""
    net, g = mixture(atoms=2), torch.Generator().manual_seed(3)
    sharp = [name for name in net.parameters if name.endswith("logits") or name == "W_v_0.atoms"]
    values = {k: net.parameters[k] for k in sharp}
    net = net.replace({k: v + 2 * torch.randn(v.shape, generator=g, dtype=v.dtype) for k, v in values.items()})
    x, y = vectors(4)
    f = fit(net, (x, y), **FROZEN)
    pi, *theta = (f.theta[node] for node in ("c", "W_q_0", "W_k_0", "W_v_0"))
    expected = torch.zeros_like(x)
    for q, k, v in itertools.product(range(2), repeat=3):
        prob = (pi * theta[0][:, q] * theta[1][:, k] * theta[2][:, v]).sum()
        do = {f"W_{role}_0": torch.full((4,), state) for role, state in zip("qkv", (q, k, v), strict=True)}
        expected = expected + prob * f.net.module()(x, do=do, want=["x_1"])["x_1"].detach()
    torch.testing.assert_close(f.predict(x), expected, rtol=1e-10, atol=1e-10)
