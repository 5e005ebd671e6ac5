"""Results do not depend on defaults of torch, on other threads, or on inputs that are modified later."""

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import inference
from bnet_transformer.attention import Inclusion, damage
from bnet_transformer.learning.fit import Fit

WORDS = ["the", "cat", "sat"]
IDS = torch.tensor([[0, 1, 2]])
CAT = {"y_2": ("cat", "sat")}


def run_under(default: str, compute: Callable[[], Any]) -> Any:
    """Compute under another default of torch: a floating type, a device, a mode of gradients, kernels or products."""
    if default == "float64":
        torch.set_default_dtype(torch.float64)
    if default == "meta":
        torch.set_default_device("meta")
    torch.use_deterministic_algorithms(default == "deterministic")
    try:
        with torch.inference_mode(default == "inference"), torch.autocast("cpu", enabled=default == "autocast"):
            return compute()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)


def run_in_threads(compute: Callable[[], Any], threads: int = 8) -> list[Any]:
    """Return the results of this number of threads that compute at the same time."""
    barrier = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(lambda: (barrier.wait(), compute())[1]) for _ in range(threads)]
        return [future.result() for future in futures]


QUERIES: dict[str, Callable[[bt.BNet], torch.Tensor]] = {
    "values": lambda net: net.sentence("the cat sat")["x_2_1"],
    "attention": lambda net: net.sentence("the cat sat").attention(1),
    "posterior": lambda net: net.sentence("the cat sat").posterior("c", {"y_1": "cat"}),
    "reads": lambda net: net.sentence("the cat sat").reads().matrix,
    "log_prob": lambda net: net.sentence("the cat sat").log_prob({"y_1": "cat"}),
    "tpm": lambda net: net.sentence("the cat sat").do(c=0).tpm("y_1").probs,
    "sample": lambda net: net.sentence("the cat sat").sample(5, seed=1).states["y_1"],
    "most_probable": lambda net: net.sentence("the cat sat").most_probable({"y_1": "cat"}, count=3).log_probs,
    "posterior of a batch": lambda net: inference.posterior(
        net.module(), "c", {"y": inference.Evidence(IDS)}, IDS.clone()
    ),
    "log evidence of a batch": lambda net: inference.log_evidence(
        net.module(), {"y": inference.Evidence(IDS)}, IDS.clone()
    ).detach(),
    "gradient of the log evidence": lambda net: differentiate_log_evidence(net),
    "counterfactual": lambda net: net.sentence("the cat sat").counterfactual("y_2", {"c": 0}, {"y_2": 1}).probabilities,
    "generate": lambda net: list_numbers(make_decoder().generate("the cat", length=3).log_probs[0]),
    "lens": lambda net: make_decoder().sentence("the cat sat").lens().distribution(1).probs,
    "contributions": lambda net: make_decoder().sentence("the cat sat").contributions("y_2", of="cat").values,
    "damage": lambda net: damage(find_inclusion(), counts=[1], progress=False).values,
    "fit_lens": lambda net: bt.fit_lens(make_decoder(), ["the cat sat", "cat sat"], steps=1).biases[0],
    "roles": lambda net: bt.roles(make_decoder(), ["the cat sat"]).mean,
    "sweep": lambda net: bt.sweep(*make_pair(net), metric=CAT, progress=False).effects,
    "circuit": lambda net: list_numbers(
        bt.circuit(*make_pair(net), metric=CAT, threshold=0.1, progress=False).effects.values()
    ),
    "fit": lambda net: bt.fit(
        net, [("the cat", "cat the")], method=bt.MAP(restarts=1, steps=2), progress=False
    ).net.parameters["c.logits"],
    "predict": lambda net: fit_net().predict(["the cat"]),
    "slopes": lambda net: bt.sweep(*make_pair(net), metric=CAT, method=bt.Gradient(), progress=False).effects,
    "copy": lambda net: copy.deepcopy(net.sentence("the cat sat"))["x_2_1"],
    "pickle": lambda net: pickle.loads(pickle.dumps(net.sentence("the cat sat")))["x_2_1"],
}


def differentiate_log_evidence(net: bt.BNet) -> torch.Tensor:
    """Return the gradient of the log evidence by the values that the module stores, in one vector."""
    module = net.module()
    with torch.inference_mode(False), torch.enable_grad():
        total = inference.log_evidence(module, {"y": inference.Evidence(IDS)}, IDS.clone()).sum()
        with torch.autocast("cpu", enabled=False):  # torch advises against backward passes under autocast
            total.backward()
    return torch.cat([value.grad.flatten() for value in module.parameters() if value.grad is not None])


def list_numbers(numbers: Iterable[float]) -> torch.Tensor:
    """Return numbers as a tensor that has no default of torch."""
    return torch.tensor([*numbers], dtype=torch.float64, device="cpu")


def make_pair(net: bt.BNet) -> tuple[bt.Sentence, bt.Sentence]:
    """A clean and a corrupt sentence, created under the current default."""
    return net.sentence("the cat sat").do(c=0), net.sentence("cat cat sat").do(c=0)


@cache
def fit_net() -> Fit[bt.BNet]:
    """Return a fit, computed once outside of every default."""
    return bt.fit(make_net(), [("the cat", "cat the")], method=bt.MAP(restarts=1, steps=2), progress=False)


@cache
def find_inclusion() -> Inclusion:
    """Return the inclusion of heads, computed once outside of every default."""
    return bt.inclusion(make_decoder(), ["the cat sat", "cat sat"], progress=False)


@cache
def make_decoder() -> bt.BNet:
    """Return a net without choices, created once outside of every default."""
    return bt.decoder(8, heads=2, slices=2, vocabulary=WORDS, seed=3)


def make_net() -> bt.BNet:
    return bt.bayesuvius(4, heads=3, slices=2, vocabulary=WORDS, observe=bt.tpm.Categorical(3), seed=3)


@pytest.fixture(scope="module")
def net():
    return make_net()


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize(
    "default",
    ["float64", "meta", "autocast", *(pytest.param(k, marks=pytest.mark.slow) for k in ("inference", "deterministic"))],
)
def test_a_default_of_torch_changes_no_answer(default, query, net):
    fit_net(), make_decoder(), find_inclusion()
    assert run_under(default, lambda: QUERIES[query](net)).equal(QUERIES[query](net))


def test_a_seed_is_the_same_net_under_every_default():
    first = bt.bayesuvius(64, seed=1)
    for default in ("float64", "meta"):
        second = run_under(default, lambda: bt.bayesuvius(64, seed=1))
        for name, value in first.parameters.items():
            assert second.parameters[name].float().equal(value)


def test_a_word_has_one_vector_under_every_default():
    net = bt.bayesuvius(64)
    assert run_under("float64", lambda: net.sentence("cat")["x_0_0"]).equal(net.sentence("cat")["x_0_0"])


@pytest.mark.parametrize("query", ["values", "attention", "posterior", "reads", "log_prob", "sample"])
def test_threads_that_share_a_net_find_the_same(query, net):
    expected = QUERIES[query](net)
    shared = make_net()
    assert all(result.equal(expected) for result in run_in_threads(lambda: QUERIES[query](shared)))


def test_threads_that_share_a_sentence_find_the_same(net):
    s = net.sentence("the cat sat")
    expected = s["x_2_1"].clone()
    shared = make_net().sentence("the cat sat")
    assert all(result.equal(expected) for result in run_in_threads(lambda: shared["x_2_1"]))
    assert threading.active_count() < 8


@pytest.mark.parametrize("query", QUERIES)
def test_no_answer_draws_from_the_generators_of_others(query, net):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    QUERIES[query](net)
    assert torch.get_rng_state().equal(before[0])
    assert (np.random.get_state()[1] == before[1]).all()


def test_what_is_changed_later_changes_no_sentence():
    plain = bt.bayesuvius(4, observe=bt.tpm.Normal(0.5))
    for x in (torch.ones(3, 4), np.ones((3, 4), dtype=np.float32)):
        s = plain.sentence(x=x)
        done, observed = s.do(x_0_1=x[1]), s.observe(y_1=x[1])
        x[:] = 9
        assert s["x_0_1"].equal(torch.ones(4))
        assert done["x_0_1"].equal(torch.ones(4))
        assert observed.posterior("c").equal(plain.sentence(x=torch.ones(3, 4)).posterior("c", {"y_1": [1.0] * 4}))
    ids = torch.tensor([0, 1])
    sentence = bt.bayesuvius(4, vocabulary=WORDS).sentence(given={"token": ids})
    ids[:] = 2
    assert sentence["token_0"] == 0


def test_what_is_changed_later_changes_no_net():
    weight = torch.zeros(2, 4, 4)
    net = bt.bayesuvius(4).replace({"W_q_0.values": weight})
    pick, fill = {"head": "c"}, [0.0, 1.0]
    arrow, parameter = bt.Arrow("k", pick=pick), bt.tpm.Parameter((2,), fill=fill)
    weight += 9
    pick["head"], fill[0] = "z", 9.0
    assert not net.parameters["W_q_0.values"].any()
    assert arrow.pick == {"head": "c"}
    assert parameter.fill == (0.0, 1.0)


def test_a_net_takes_the_values_of_a_parameter_and_not_its_gradient():
    scaled = 2 * torch.ones(2, 4, 4, requires_grad=True)
    net = bt.bayesuvius(4).replace({"W_q_0.values": scaled})
    assert copy.deepcopy(net).parameters["W_q_0.values"].equal(scaled)


def test_a_read_only_array_is_read(recwarn):
    x = np.ones((3, 4), dtype=np.float32)
    x.setflags(write=False)
    assert bt.bayesuvius(4).sentence(x=x)["x_0_1"].equal(torch.ones(4))
    assert not recwarn.list


def test_a_number_of_numpy_is_a_number():
    assert bt.recurrent(np.int64(4), slices=np.int64(2)).sentence(x=torch.zeros(2, 4))["x_2_1"].shape == (4,)
    assert type(bt.tpm.Dot(np.float32(0.5)).scale) is float
    assert type(bt.tpm.FeedForward(torch.tensor(3)).hidden) is int
    for value in (np.True_, torch.tensor(True), torch.tensor([4]), np.array([4])):
        with pytest.raises(bt.BNetError, match="dim: expected an integer of at least 1; got"):
            bt.bayesuvius(value)


def test_a_number_of_numpy_is_kept_with_a_run(tmp_path):
    rate = np.float32(0.1)
    net = bt.bayesuvius(4, vocabulary=WORDS, observe=bt.tpm.Categorical(3))
    bt.fit(
        net,
        [("the cat", "cat the")],
        method=bt.MAP(steps=1, rate=rate),
        checkpoints=tmp_path / "a",
        batch=np.int64(1),
        progress=False,
    )
    decoder = bt.decoder(8, heads=2, slices=1, vocabulary=WORDS)
    bt.train(
        decoder,
        ["the cat"],
        steps=1,
        optimizer=bt.AdamW(rate=rate),
        checkpoints=tmp_path / "b",
        batch=np.int64(1),
        progress=False,
    )


@pytest.mark.slow
def test_what_imports_pgmpy_leaves_random_as_it_was():
    code = """
import random
import warnings
warnings.simplefilter("ignore")  # of pgmpy, at its import
import bnet_transformer as bt
dec = bt.decoder(8, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
before = random.getstate()
if "{query}" == "tan":
    dec.tan([dec.sentence(text) for text in ("the cat", "sat cat", "cat the")], ["a", "b", "a"])
else:
    dec.sentence("the cat").to_pgmpy()
assert random.getstate() == before
"""
    for query in ("tan", "pgmpy"):
        subprocess.run([sys.executable, "-c", code.replace("{query}", query)], check=True)


DEC = bt.decoder(8, heads=2, slices=1, vocabulary=WORDS)


def test_the_coldest_and_the_narrowest_draw_are_the_likeliest_words():
    likeliest = DEC.generate(["the", "cat sat"], length=5).words
    for options in ({"temperature": 1e-320}, {"top_p": 1e-320}, {"temperature": Fraction(1, 10**40)}, {"top_k": 1}):
        assert DEC.generate(["the", "cat sat"], length=5, method="sample", **options).words == likeliest
    result = DEC.generate(["the", "cat sat"], length=5, method="sample", temperature=1e308)
    assert all(np.isfinite(result.scores))


def test_an_overflow_is_reported_once(recwarn):
    net, x = bt.bayesuvius(4, observe=bt.tpm.Normal(1.0)), torch.full((3, 4), 1e30)
    with pytest.raises(bt.BNetError, match="expected a finite bound"):
        bt.fit(net, [(x, torch.zeros(3, 4))], method=bt.SVI(steps=2), spread=1.0, progress=False)
    assert not recwarn.list
