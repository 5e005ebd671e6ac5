"""Exact inference in float32 at any scale of log p: posteriors, counts and gradients keep their precision."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer._core.distributed import SINGLE_PROCESS
from bnet_transformer.data import read_batch
from bnet_transformer.data.batch import infer_fit_task
from bnet_transformer.inference import Evidence, log_evidence, posterior
from bnet_transformer.inference.factors import compute_factors, request_factors
from bnet_transformer.learning.fit.curvature import EMExpansion
from bnet_transformer.learning.fit.objective import FitObjective, select_learnable
from bnet_transformer.tpm import Categorical, Normal
from tests.cases import close

PRIOR = torch.tensor([0.7, 0.2, 0.1])


def make_mixture(sigma: float = 0.5, **options) -> bt.BNet:
    """Return three heads with probabilities .7, .2 and .1; log p grows with 1 / sigma^2."""
    net = bt.bayesuvius(4, heads=3, observe=Normal(sigma), seed=1, **options)
    return net.replace({name: PRIOR.log() for name, value in net.parameters.items() if value.shape == (3,)})


def equalize_heads(net: bt.BNet) -> bt.BNet:
    """Return the net with the weights of the first head in all heads."""
    stacked = {k: v for k, v in net.parameters.items() if k.startswith("W_")}
    return net.replace({k: v[:1].expand_as(v).clone() for k, v in stacked.items()})


def make_data(sentences: int = 5, words: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(sentences, words, 4, generator=g), torch.randn(sentences, words, 4, generator=g)


def make_objective(net: bt.BNet) -> FitObjective:
    learnable = select_learnable(net.network, infer_fit_task(net.network).readouts, None, None)
    return FitObjective(net.network, learnable, 2**16)


KINDS = {
    "sentence": {},
    "word": {"per": "word"},
    "slices": {"per": "slice", "slices": 2},
    "codebook": {"atoms": 2},
    "marginal": {"attention": "marginal"},
}


@settings(max_examples=20)
@given(st.sampled_from(sorted(KINDS)), st.floats(-6, 1), st.integers(0, 2**16))
def test_posteriors_and_counts_sum_to_one_at_any_scale(kind, log_sigma, seed):
    """log p of a sentence is between -10 and -10^13."""
    net = make_mixture(10**log_sigma, **KINDS[kind])
    x, y = make_data(seed=seed)
    module = net.module()
    for spec in net.network.specs:
        if spec.tpm.kind == "discrete":
            total = posterior(module, spec.group.name, {"y": Evidence(y)}, x).sum(-1)
            assert float((total - 1).abs().max()) < 1e-6
    objective, corpus = make_objective(net), read_batch(net.network, (x, y))
    sets = {name: net.parameters[name][None] for name in objective.learned.names}
    counts = EMExpansion(objective, [corpus], SINGLE_PROCESS, weights=())(sets).counts
    for name, (count,) in counts.items():
        assert name in objective.learned.tables
        words = 6 if kind == "word" else 1
        if count.dim() == 1:
            assert float(count.sum()) == pytest.approx(5 * words, rel=1e-6)


@pytest.mark.parametrize("kind", ["sentence", "word", "slices", "codebook"])
@pytest.mark.parametrize("sigma", [1.0, 1e-2, 1e-4, 1e-6])
def test_equal_heads_keep_their_prior(kind, sigma):
    """Observations carry no information on equal heads: the posterior is the prior, for any log p."""
    net = equalize_heads(make_mixture(sigma, **KINDS[kind]))
    x, y = make_data()
    assert float(log_evidence(net.module(), {"y": Evidence(y)}, x).detach().mean()) < -5 / sigma**2
    names = [m.group.name for m in net.network.specs if m.tpm.states == 3]
    for name in names:
        result = posterior(net.module(), name, {"y": Evidence(y)}, x)
        torch.testing.assert_close(result, PRIOR.expand_as(result), atol=1e-6, rtol=0)
    if kind != "codebook":
        objective = make_objective(net)
        corpus = read_batch(net.network, (x, y))
        responsibilities = objective.responsibilities(net.parameters, corpus, net.network.get_spec(names[0]))
        torch.testing.assert_close(responsibilities, PRIOR.expand_as(responsibilities), atol=1e-6, rtol=0)


@pytest.mark.parametrize("sigma", [1.0, 1e-1, 1e-2, 1e-3])
def test_posteriors_are_those_of_the_same_likelihoods_in_float64(sigma):
    """The float32 likelihoods, with the prior in float64: a softmax of their sum."""
    net, (x, y) = make_mixture(sigma), make_data()
    evidence = {"y": Evidence(y)}
    module, graph = net.module(), net.network.graph
    observed, target = {graph.get_group("y").index: evidence["y"]}, graph.get_group("c").index
    request = request_factors(module, observed, target, module.check_request([], x))
    _, factors = compute_factors(module, request)
    (likelihood,) = (factor.table for factor in factors if factor.evidence is not None)
    expected = (likelihood.detach().reshape(3, 5).T.double() + PRIOR.double().log()).softmax(-1)
    result = posterior(net.module(), "c", evidence, x)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=0)
    total = log_evidence(net.module(), evidence, x)
    exact = (likelihood.detach().reshape(3, 5).T.double() + PRIOR.double().log()).logsumexp(-1)
    torch.testing.assert_close(total.detach().double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("sigma", [1.0, 1e-2, 1e-4])
def test_gradients_of_the_log_evidence_are_those_of_float64(sigma):
    """For equal heads, where no rounding of a likelihood changes the posterior."""
    x, y = make_data()
    result = {}
    for dtype in (torch.float32, torch.float64):
        net = equalize_heads(make_mixture(sigma)).to(dtype)
        leaves = {name: value.detach().clone().requires_grad_() for name, value in net.parameters.items()}
        corpus = read_batch(net.network, (x.to(dtype), y.to(dtype)))
        total = make_objective(net).log_evidence(leaves, corpus).sum()
        names = [name for name, value in leaves.items() if name.startswith("W_")]
        result[dtype] = torch.autograd.grad(total, [leaves[name] for name in names])
    for actual, exact in zip(*result.values(), strict=True):
        error = (actual.double() - exact).norm() / exact.norm()
        assert float(error) < 1e-4


@pytest.mark.parametrize("states", [3, 50])
def test_gradients_of_a_categorical_readout_are_those_of_float64(states):
    """Logits of a readout in the millions: its softmax also sums to 1."""
    result = {}
    for dtype in (torch.float32, torch.float64):
        net = bt.bayesuvius(4, heads=2, observe=Categorical(states), seed=1).to(dtype)
        biases = torch.arange(states, dtype=dtype) * 2**-4 + 3e6
        leaves = {**net.parameters, "y.logits": biases.requires_grad_()}
        x, y = make_data()[0].to(dtype), torch.arange(30).reshape(5, 6) % states
        total = make_objective(net).log_evidence(leaves, read_batch(net.network, (x, y))).sum()
        (result[dtype],) = torch.autograd.grad(total, biases)
    assert abs(float(result[torch.float32].detach().sum())) < 1e-3


def test_em_in_float32_keeps_shares_without_information_in_the_data():
    """Data carry no information on equal heads: EM leaves their probabilities unchanged."""
    net, (x, y) = equalize_heads(make_mixture(1e-3)), make_data(40)
    f = bt.fit(net, (x, y), method=bt.EM(steps=5), learn=["c.logits"], progress=False)
    torch.testing.assert_close(f.pi, PRIOR, atol=1e-5, rtol=0)
    responsibilities = f.responsibilities((x, y))
    torch.testing.assert_close(responsibilities.sum(-1), torch.ones(40), atol=1e-6, rtol=0)
    torch.testing.assert_close(responsibilities, f.pi.expand(40, 3), atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of forward mode in torch
def test_second_derivatives_are_those_of_differences():
    """By reverse and forward mode, under vmap; differences of the gradient in float64."""
    net, (x, y) = make_mixture(0.7).to(torch.float64), make_data(3)
    objective, corpus = make_objective(net), read_batch(net.network, (x.double(), y.double()))

    def evidence(logits: torch.Tensor) -> torch.Tensor:
        return objective.log_evidence({**net.parameters, "c.logits": logits}, corpus).sum()

    at = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)
    gradient, step = torch.func.grad(evidence), 1e-6
    rows = [(gradient(at + step * e) - gradient(at - step * e)) / (2 * step) for e in torch.eye(3, dtype=torch.float64)]
    for hessian in (torch.func.hessian(evidence), torch.func.jacrev(gradient)):
        close(hessian(at), torch.stack(rows), 1e-06)
    points = torch.stack([at, -at])
    gradients = torch.vmap(gradient)(points)
    torch.testing.assert_close(gradients, torch.stack([gradient(row) for row in points]))


@pytest.mark.parametrize("sigma", [1.0, 1e-2, 1e-4])
def test_the_joint_posterior_of_selectors_of_equal_heads_is_the_prior(sigma):
    s = equalize_heads(make_mixture(sigma, per="slice", slices=2)).sentence(x=make_data(1, 3)[0][0])
    result = s.posterior(["c_0", "c_1"], {f"y_{i}": torch.ones(4) for i in range(3)})
    expected = PRIOR.double()[:, None] * PRIOR.double()
    torch.testing.assert_close(result.double(), expected, atol=1e-6, rtol=0)


def test_a_posterior_sums_to_one_in_the_type_of_the_net():
    s = make_mixture(1e-3).sentence(x=make_data(1, 3)[0][0])
    for value in range(5):
        result = s.posterior("c", {"y_1": torch.full((4,), 0.3 * value)})
        assert result.dtype == torch.float32 and abs(float(result.double().sum()) - 1) < 2e-7
