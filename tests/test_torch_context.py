"""Runs are isolated from their caller: gradient modes of torch, other threads, and the memory of inputs."""

import os
import threading

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer._core.tensors import copy_to_tensor, fork_torch_rng
from tests import flat_options

WORDS = ["the", "cat", "sat"]
PAIRS = [("the cat sat", "cat the sat"), ("sat the cat", "the sat cat")]
METHODS = {
    "map": {"steps": 2},
    "em": {"steps": 2},
    "svi": {"steps": 2, "spread": 1.0, "draws": 2},
    "nuts": {"chains": 1, "draws": 2, "warmup": 2, "spread": 1.0},
}


def make_net(seed=0):
    return bt.bayesuvius(4, heads=2, vocabulary=WORDS, observe=bt.tpm.Categorical(3), prior=1.0, seed=seed)


def make_normal_net():
    return bt.bayesuvius(4, heads=2, observe=bt.tpm.Normal(1.0))


def make_decoder():
    return bt.decoder(8, heads=2, slices=1, dropout=0.3, vocabulary=WORDS)


def fit_params(method, seed=0):
    return flat_options.fit(
        make_net(), PAIRS, method=method, seed=seed, progress=False, **METHODS[method]
    ).net.network.parameters


def train(seed=0):
    return bt.train(make_decoder(), ["the cat sat"], steps=3, seed=seed, progress=False).losses


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        pytest.param("map", torch.no_grad, marks=pytest.mark.slow),
        pytest.param("em", torch.inference_mode, marks=pytest.mark.slow),
        ("svi", torch.no_grad),
        pytest.param("nuts", torch.inference_mode, marks=pytest.mark.slow),
    ],
)
def test_a_fit_is_the_same_without_gradients_around_it(mode, method):
    with mode():
        result = fit_params(method)
    for name, value in fit_params(method).items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=0)


def test_training_posteriors_and_importance_are_the_same_without_gradients_around_them():
    def compute():
        result = bt.inclusion(make_decoder(), ["the cat sat"], draws=5, progress=False)
        return train(), make_net().sentence("the cat sat").posterior("c", {"y_1": "cat"}).tolist(), result.importance

    with torch.inference_mode():
        inside = compute()
    outside = compute()
    assert inside[:2] == outside[:2]
    torch.testing.assert_close(inside[2], outside[2])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_dependence_has_its_derivatives_without_gradients_around_it(mode):
    s = make_normal_net().sentence(x=torch.eye(3, 4)).do(c=0)
    with mode():
        result = s.separated("x_0_0", "x_1_2", verify=True).over_roots
    assert result == s.separated("x_0_0", "x_1_2", verify=True).over_roots > 0


def test_a_net_of_inference_mode_learns_after_it():
    with torch.inference_mode():
        net = make_net()
    assert not any(value.is_inference() for value in net.network.parameters.values())
    assert bt.fit(net, PAIRS, method=bt.MAP(steps=1), progress=False).finished


def test_a_default_device_is_not_that_of_a_run():
    net, dec = make_net(), make_decoder()
    with torch.device("meta"):
        assert bt.fit(net, PAIRS, method=bt.MAP(steps=1), progress=False).finished
        assert bt.train(dec, ["the cat sat"], steps=1, progress=False).steps == 1


def run_in_threads(calls):
    """Return the results of several calls, each in a separate thread."""
    result, threads = {}, []
    for name, call in calls.items():
        threads.append(threading.Thread(target=lambda name=name, call=call: result.update({name: call()})))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result


@pytest.mark.slow
def test_threads_draw_as_in_separate_runs():
    calls = {("train", k): lambda k=k: train(k) for k in range(2)}
    calls |= {(m, k): lambda m=m, k=k: fit_params(m, k)["c.logits"].tolist() for m in ("svi", "nuts") for k in range(2)}
    result = bt.fit(make_net(), PAIRS, method=bt.MAP(steps=1), progress=False)
    calls |= {("check", k): lambda: result.check(PAIRS, draws=5).p for k in range(2)}
    assert run_in_threads(calls) == {name: call() for name, call in calls.items()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have():
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with fork_torch_rng(torch.device("cpu")):
            entered.set()
            leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait()
    child = os.fork()
    if not child:
        with fork_torch_rng(torch.device("cpu")):
            os._exit(0)
    leave.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0


def test_a_fit_copies_its_inputs():
    x, y = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    result = bt.fit(make_normal_net(), (x, y), method=bt.MAP(steps=1), progress=False)
    before = result.log_likelihood(result.data)
    x.zero_(), y.zero_()
    assert result.log_likelihood(result.data).equal(before)


def test_a_statistic_changes_its_own_copy():
    result = bt.fit(make_net(), PAIRS, method=bt.MAP(steps=1), progress=False)
    before = result.data.evidence["y"].value.clone()
    result.check(result.data, {"none left": lambda y: y.zero_().sum()}, draws=2)
    assert result.data.evidence["y"].value.equal(before)


def test_numbers_of_any_type_are_read():
    for dtype in ("uint16", "uint32", "uint64", ">i4", ">f8", "float16"):
        assert copy_to_tensor(np.array([0, 1, 2], dtype=dtype)).tolist() == [0, 1, 2], dtype


def test_numbers_are_on_the_host_in_order():
    with torch.device("meta"):
        result = copy_to_tensor(np.arange(6).reshape(2, 3).T[::-1])
    assert result.is_contiguous() and result.tolist() == [[2, 5], [1, 4], [0, 3]]


@pytest.mark.parametrize(
    "value", [torch.eye(2).to_sparse(), torch.ones(2, device="meta"), np.ma.masked_equal([1.0, 2.0], 2.0)]
)
def test_numbers_that_are_not_there_are_refused(value):
    with pytest.raises(TypeError):
        copy_to_tensor(value)
    with pytest.raises(bt.BNetError, match="expected real numbers"):
        bt.bayesuvius(2).sentence(x=value)
