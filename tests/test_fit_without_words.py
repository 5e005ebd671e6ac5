"""Fits of Bayesian networks without words, against counts, sums over all joint states and closed forms."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.inference import Evidence, log_evidence
from bnet_transformer.learning.fit.heads import find_selectors, head_dims
from bnet_transformer.tpm import Categorical, Given, Linear, Normal, Weight
from tests import flat_options
from tests.cases import hidden_states, jitter, sites
from tests.discrete_networks import PARENTS, D, asia, draw_samples, get_tables, joint, site_density


def count_states(data: dict[str, torch.Tensor], name: str) -> np.ndarray:
    """Return the counts of each state in each row of a table."""
    result = np.zeros((2,) * (len(PARENTS[name]) + 1))
    np.add.at(result, tuple(data[item].numpy() for item in (*PARENTS[name], name)), 1)
    return result


def test_em_of_complete_data_gives_the_observed_shares():
    net, data = asia(), draw_samples(asia(), 500)
    result = bt.fit(jitter(net), data, method=bt.EM(steps=1), progress=False)
    for name in PARENTS:
        counts = count_states(data, name)
        np.testing.assert_allclose(result.theta[name], counts / counts.sum(-1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float", "Int64", "category"])
def test_a_dataframe_is_the_same_data_and_its_empty_cells_are_not_observed(dtype):
    net, data = asia(), draw_samples(asia(), 30)
    data = {name: value.where(torch.rand(30) < 0.8, -1) for name, value in data.items()}
    frame = pd.DataFrame({name: value.numpy() for name, value in data.items()}).replace(-1, np.nan).astype(dtype)
    if dtype == "category":
        frame = frame.apply(lambda column: column.map({0: "no", 1: "yes"}))
    columns = {name: frame[name] for name in PARENTS}
    a, b, c = (bt.fit(net, item, method=bt.EM(steps=2), progress=False) for item in (data, frame, columns))
    assert (
        a.data.equals(b.data) and a.data.equals(c.data) and all(a.theta[name].equal(b.theta[name]) for name in PARENTS)
    )
    torch.testing.assert_close(a.log_likelihood(frame), a.log_likelihood(data))


def test_nan_is_not_observed_and_booleans_are_states():
    net = asia()
    expected = bt.fit(net, {"dysp": [1, -1, 0], "asia": [1, 0, 0]}, method=bt.EM(steps=2), progress=False)
    for dysp, asia_ in (
        ([True, None, False], [True, False, False]),
        ([1, math.nan, 0], torch.tensor([True, False, False])),
        (np.array([1, np.nan, 0]), np.array([True, False, False])),
        (torch.tensor([1, math.nan, 0]), (1.0, 0.0, 0.0)),
        (["yes", math.nan, "no"], [1, 0, 0]),
    ):
        result = bt.fit(net, {"dysp": dysp, "asia": asia_}, method=bt.EM(steps=2), progress=False)
        assert result.data.equals(expected.data)
    rows = [{"dysp": True, "asia": 1}, {"dysp": math.nan, "asia": False}, {"dysp": 0.0, "asia": 0}]
    assert bt.fit(net, rows, method=bt.EM(steps=2), progress=False).data.equals(expected.data)
    with pytest.raises(bt.BNetError):
        bt.fit(net, {"dysp": [0.5, 1.0]}, progress=False)


def test_a_check_names_the_readout_it_is_of():
    net, data = asia(), draw_samples(asia(), 40)
    result = bt.fit(net, data, method=bt.EM(steps=1), progress=False)
    for kwargs, readout in (({}, "xray"), ({"readout": "dysp"}, "dysp")):
        check = result.check(data, draws=3, **kwargs)
        frequency = float(data[readout].double().mean())
        assert check.readout == readout and check.to_dataframe().index.name == readout
        assert check.observed["share of 1"] == pytest.approx(frequency)
    torch.testing.assert_close(result.predict(readout="dysp").flatten(), result.net.sentence().posterior("dysp"))


def expected_counts(net: bt.BNet, rows: list[dict[str, int]]) -> tuple[dict[str, np.ndarray], float]:
    """Compute the E-step by sums over all joint states, and the log likelihood."""
    joint_probs, names = joint(net), list(PARENTS)
    counts = {name: np.zeros((2,) * (len(PARENTS[name]) + 1)) for name in names}
    total = 0.0
    for row in rows:
        observed = np.zeros_like(joint_probs)
        index = tuple(row.get(name, slice(None)) for name in names)
        observed[index] = joint_probs[index]
        total += math.log(observed.sum())
        for name in names:
            axes = [names.index(node) for node in (*PARENTS[name], name)]
            by_node = np.moveaxis(observed, axes, range(len(axes)))
            counts[name] += by_node.reshape(*by_node.shape[: len(axes)], -1).sum(-1) / observed.sum()
    return counts, total


@pytest.mark.parametrize("prior", [None, 2.5])
def test_em_of_incomplete_data_takes_the_steps_of_sums_over_all_states(prior):
    """Some nodes are never observed, some only sometimes; with a prior, the step is that of the posterior."""
    nodes = [bt.Node(name, Categorical(2, prior=prior), parents) for name, parents in PARENTS.items()]
    start = jitter(bt.BNet(bt.Declaration(nodes=nodes)), 1.0).to(D)
    data = {name: value.clone() for name, value in draw_samples(asia(), 60).items() if name not in ("either", "bronc")}
    data["tub"][::3], data["lung"][1::4] = -1, -1
    rows = [{name: int(value[k]) for name, value in data.items() if value[k] >= 0} for k in range(60)]
    net = start
    for _ in range(3):
        counts, _ = expected_counts(net, rows)
        pseudo_counts = {name: torch.tensor(count) + (prior or 1.0) - 1 for name, count in counts.items()}
        net = net.replace({f"{k}.logits": (v / v.sum(-1, keepdim=True)).log() for k, v in pseudo_counts.items()})
    result = bt.fit(start, data, method=bt.EM(steps=3, optimizer="first-order"), progress=False)
    for name in PARENTS:
        np.testing.assert_allclose(result.theta[name], get_tables(net)[name], atol=1e-7)
    assert float(result.log_likelihood(data).sum()) == pytest.approx(expected_counts(net, rows)[1])


def test_a_table_below_observed_nodes_is_learned_separately():
    """The likelihoods are cached, and the rows of the table differ by sentence."""
    net, data = asia(), draw_samples(asia(), 80)
    del data["lung"]
    rows = [{name: int(value[k]) for name, value in data.items()} for k in range(80)]
    counts, _ = expected_counts(net, rows)
    result = bt.fit(net, data, method=bt.EM(steps=1, optimizer="first-order"), learn=["lung.logits"], progress=False)
    expected = counts["lung"] / counts["lung"].sum(-1, keepdims=True)
    np.testing.assert_allclose(result.theta["lung"], expected, atol=1e-7)
    assert result.net.parameters["dysp.logits"].equal(net.parameters["dysp.logits"])


@pytest.mark.slow
def test_samples_of_the_posterior_are_dirichlet():
    """Complete data and a conjugate prior: each row of a table is a Dirichlet."""
    nodes = [bt.Node("rain", Categorical(3, prior=2.0)), bt.Node("wet", Categorical(2, prior=2.0), ["rain"])]
    net = bt.BNet(bt.Declaration(nodes=nodes)).to(D)
    data = {"rain": torch.tensor([0, 0, 0, 1, 1, 2] * 5), "wet": torch.tensor([0, 1, 1, 0, 0, 1] * 5)}
    rain = torch.bincount(data["rain"]) + 2.0
    wet = torch.stack([torch.bincount(data["wet"][data["rain"] == k], minlength=2) + 2.0 for k in range(3)])
    for options in (
        {"method": "svi", "steps": 150, "draws": 500},
        {"method": "nuts", "chains": 1, "warmup": 20, "draws": 60},
    ):
        result = flat_options.fit(net, data, progress=False, **options)
        torch.testing.assert_close(result.theta["rain"], (rain / rain.sum()).to(D), atol=0.05, rtol=0)
        torch.testing.assert_close(result.theta["wet"], (wet / wet.sum(-1, keepdim=True)).to(D), atol=0.08, rtol=0)


def test_a_mixture_is_fitted_to_an_array_of_observations():
    truth = jitter(sites(), 1.0).to(D)
    y = truth.pyro()(batch=300)["y"].squeeze(-2).detach()
    start = jitter(sites(), 0.3).to(D)
    result = bt.fit(start, y, method=bt.EM(steps=60, restarts=2), progress=False)
    torch.testing.assert_close(result.log_likelihood(y), site_density(result.net, y), rtol=1e-9, atol=1e-9)
    assert result.log_likelihood(y).mean() > site_density(start, y).mean()
    log_probs = torch.stack(
        [log_evidence(result.net.module(), {"y": Evidence(y)}, do={"z": torch.tensor(k)}) for k in (0, 1)], 1
    )
    expected = (result.pi.log() + log_probs.detach()).softmax(1)
    torch.testing.assert_close(result.responsibilities(y), expected, rtol=1e-9, atol=1e-9)
    assert result.predict(readout="y").shape == (1, 2, 2) and set(result.check(y, draws=20).p) == {
        "mean",
        "variance",
        "kurtosis",
    }


def test_inputs_of_a_net_without_words_are_columns_too():
    """A regression by a given node: least squares."""
    nodes = [
        bt.Node("u", Given(2)),
        bt.Node("W", Weight((1, 2))),
        bt.Node("m", Linear(), ["W", "u"]),
        bt.Node("y", Normal(1.0), ["m"]),
    ]
    net = bt.BNet(bt.Declaration(nodes=nodes)).to(D)
    u, noise = torch.randn(50, 2, dtype=D), torch.randn(50, 1, dtype=D)
    y = u @ torch.tensor([[1.5], [-0.5]], dtype=D) + 0.1 * noise
    result = bt.fit(net, {"u": u, "y": y}, method=bt.MAP(steps=200, rate=0.1), progress=False)
    solution = torch.linalg.lstsq(u, y).solution
    torch.testing.assert_close(result.net.parameters["W.value"], solution.T, atol=1e-3, rtol=0)
    torch.testing.assert_close(result.predict({"u": u}), u @ result.net.parameters["W.value"].T)
    for data in ({"y": y}, [{"y": [1.0]}]):
        with pytest.raises(bt.BNetError, match="the input nodes u have no column"):
            bt.fit(net, data, progress=False)
    narrow = [bt.Node("v", Given(1)), bt.Node("b", Linear(1), ["v"]), bt.Node("y", Normal(1.0), ["b"])]
    narrow = bt.BNet(bt.Declaration(nodes=narrow)).to(D)
    frame = pd.DataFrame({"v": u[:, 0], "y": y[:, 0]})
    a, b = (bt.fit(narrow, item, method=bt.MAP(steps=3), progress=False) for item in (frame, {"v": u[:, :1], "y": y}))
    assert a.data.equals(b.data)


def test_time_may_be_slices():
    """A hidden Markov model over slices: the forward recursion."""
    net = jitter(hidden_states(), 1.0).to(D)
    start, transition, emission = (net.parameters[f"{name}.logits"].log_softmax(-1) for name in ("x_0", "x", "y"))
    y = torch.randint(3, (4, 3))
    alpha = start.expand(4, 2)
    for t in range(3):
        alpha = (alpha[:, :, None] + transition).logsumexp(1) + emission[:, y[:, t]].T
    actual = log_evidence(net.module(), {f"y_{t}": Evidence(y[:, t]) for t in range(3)})
    torch.testing.assert_close(actual, alpha.logsumexp(1))
    result = bt.fit(net, {f"y_{t}": y[:, t] for t in range(3)}, method=bt.EM(steps=5), progress=False)
    assert set(result.theta) == {"x_0", "x", "y"} and result.bounds[-1] > result.bounds[0]


def test_states_of_a_choice_are_turned_in_tables_on_a_plate_as_well():
    """The order of the states of a choice that is never observed does not change the likelihood."""
    net = jitter(sites(), 1.0).to(D)
    (selector,) = find_selectors(net.network)
    dims = {name: head_dims(net.network, selector, name) for name in net.parameters}
    assert {name: dim for name, dim in dims.items() if dim} == {"z.logits": (0,), "x.logits": (1,)}
    flipped = net.replace({k: v.flip(dims[k]) for k, v in net.parameters.items() if dims[k]})
    y = torch.randn(4, 2, 2, dtype=D)
    torch.testing.assert_close(site_density(flipped, y), site_density(net, y))


def test_invalid_data_are_refused():
    for data, match in (
        ([], "a mapping from"),
        ({"rain": [1]}, "rain"),
        ({"dysp": [1, 2]}, "states from 0 to 1"),
        ({"dysp": [1, 0], "asia": [1]}, "equal length"),
        ({"dysp": [None, None]}, "no node of .* is observed"),
    ):
        with pytest.raises(bt.BNetError, match=match):
            bt.fit(asia(), data, progress=False)


def test_choices_that_are_observed_are_not_drawn():
    with pytest.raises(bt.BNetError, match="asia"):
        bt.fit(asia(), draw_samples(asia(), 5), method=bt.SVI(choices="sampled"), progress=False)
