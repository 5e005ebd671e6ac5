"""Rows of exact inference: the mixture over heads and atoms compared with Pyro, posteriors compared with pgmpy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, measure_peak, ratios, time_calls
from benchmarks.limits import measure_limit
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.inference import Evidence, log_evidence, posterior
from bnet_transformer.tpm import Categorical, Normal

HEADS, ATOMS, SENTENCES, WORDS, DIM = 8, 12, 256, 16, 32
PART = 64  # sentences of one backward pass
Loss = Callable[[], Tensor]
Step = tuple[Loss, Loss]  # a training step: the loss, its gradient added to the parameters; ours and Pyro's


def mixture_step() -> list[Figure]:
    """A training step of the sentence mixture (K=8, N=256, 16 words, d=32, Normal readout) on one thread: the exact
    marginal by elimination, forward and backward, compared with plain Pyro with TraceEnum_ELBO on the same model and
    parameters. The two losses are first asserted to be equal. The target is at most three times its limit."""
    with use_one_thread():
        actual, peer = _create_mixture()
        return _compare(actual, peer, runs=21, target=1 / 3, of_limit=3.0)


def mixture_step_of_32() -> list[Figure]:
    """The training step of the sentence mixture with 32 heads."""
    with use_one_thread():
        actual, peer = _create_mixture(32)
        return _compare(actual, peer, runs=9, target=1 / 3)


def codebook_step_of_32() -> list[Figure]:
    """The same with codebooks: 32 heads draw from 12 atoms per role."""
    with use_one_thread():
        actual, peer = _create_codebook(Normal(1.0), heads=32)
        return _compare(actual, peer, runs=3, target=1 / 20)


def codebook_step() -> list[Figure]:
    """The same with codebooks: each head draws W_q, W_k and W_v from 12 atoms per role, so there are 1,728 joint states
    of the weights under 8 heads. The Normal readout uses Gram matrices."""
    with use_one_thread():
        actual, peer = _create_codebook(Normal(1.0))
        return _compare(actual, peer, runs=3, target=1 / 20)


def codebook_categorical_step() -> list[Figure]:
    """The same codebooks with a Categorical(8) readout of each word, which has no Gram matrices; 16 sentences, because
    plain Pyro stores the vector of every word in every joint state."""
    with use_one_thread():
        actual, peer = _create_codebook(Categorical(8), sentences=16)
        return _compare(actual, peer, runs=3, target=1 / 2)


def head_posteriors() -> list[Figure]:
    """P(c | y) of 256 sentences (4 heads, 6 words, d=8, Categorical(8) readout of each word): one batch of ours,
    compared with pgmpy's VariableElimination, sentence by sentence, on the exported nets; asserted to be equal to 1e-8,
    on one thread. pgmpy's time does not include the export."""
    from pgmpy.inference import VariableElimination

    words = list("abcdefgh")
    net = bt.bayesuvius(8, heads=4, vocabulary=words, observe=Categorical(8)).to(torch.float64)
    generator = torch.Generator().manual_seed(0)
    ids, y = (torch.randint(8, (SENTENCES, 6), generator=generator) for _ in range(2))
    module = net.module()
    start = time.perf_counter()
    models = [VariableElimination(net.sentence(row.tolist()).to_pgmpy()) for row in ids]
    exported = (time.perf_counter() - start) / SENTENCES

    def query_batch() -> Tensor:
        return posterior(module, "c", {"y": Evidence(y)}, ids)

    def query_pgmpy() -> Tensor:
        observed = [{f"y_{i}": words[s] for i, s in enumerate(row)} for row in y.tolist()]
        return torch.stack([_query(model, item) for model, item in zip(models, observed, strict=True)])

    with use_one_thread():
        torch.testing.assert_close(query_batch(), query_pgmpy(), rtol=1e-8, atol=1e-8)
        spent = time_calls({"ours": query_batch, "theirs": query_pgmpy}, runs=9)
        limits = measure_limit(query_batch, spent["ours"])
    return [
        figure("one batch", spent["ours"], "s"),
        figure("pgmpy, one by one", spent["theirs"], "s"),
        figure("our time over pgmpy's", ratios(spent["ours"], spent["theirs"]), ""),
        figure("export of one sentence", exported, "s"),
        *limits,
    ]


def _query(model: Any, observed: dict[str, str]) -> Tensor:
    """Return the posterior of a pgmpy model."""
    return torch.as_tensor(model.query(["c"], observed, show_progress=False).values, dtype=torch.float64)


def _compare(actual: Loss, peer: Loss, runs: int, target: float, of_limit: float | None = None) -> list[Figure]:
    """Return the figures of our steps, Pyro's steps, their ratio and the limit."""
    torch.testing.assert_close(actual(), peer(), rtol=1e-4, atol=1e-2)
    spent = time_calls({"ours": actual, "theirs": peer}, runs=runs)
    return [
        figure("exact elimination", spent["ours"], "s"),
        figure("Pyro, TraceEnum_ELBO", spent["theirs"], "s"),
        figure("our time over Pyro's", ratios(spent["ours"], spent["theirs"]), "", target=target),
        *measure_limit(actual, spent["ours"], of_limit),
        figure("Pyro: peak memory of the job", measure_peak(peer), "MB"),
    ]


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Run torch on one thread, for both sides."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _create_mixture(heads: int = HEADS) -> Step:
    """Return the steps of the mixture, ours and Pyro's."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import config_enumerate

    torch.manual_seed(0)
    net = bt.bayesuvius(DIM, heads=heads, observe=Normal(1.0))
    module, x, y = net.module(), torch.randn(SENTENCES, WORDS, DIM), torch.randn(SENTENCES, WORDS, DIM)
    W = {r: module.store[f"W_{r}_0/values"] for r in "qkv"}
    logits = module.store["c/logits"]

    @config_enumerate  # type: ignore[untyped-decorator]
    def model() -> None:
        with pyro.plate("sentence", SENTENCES):
            c = pyro.sample("c", dist.Categorical(logits=logits))
            q, k, v = (torch.einsum("...oi,...ni->...no", W[r][c], x) for r in "qkv")
            mean = torch.softmax(q @ k.mT, -1) @ v
            pyro.sample("y", dist.Normal(mean, 1.0).to_event(2), obs=y)

    return _create_steps(module, Evidence(y), x, model)


def _create_steps(module: CompiledModule, y: Evidence, x: Tensor, model: Callable[[], None]) -> Step:
    """Return the training steps, ours and Pyro's."""
    from pyro.infer import TraceEnum_ELBO

    elbo = TraceEnum_ELBO(max_plate_nesting=1)

    def step_elimination() -> Tensor:
        total = torch.zeros(())
        for words, observed in zip(x.split(PART), y.value.split(PART), strict=True):  # added, as gradients accumulate
            loss = -log_evidence(module, {"y": Evidence(observed)}, words).sum()
            loss.backward()
            total = total + loss.detach()
        return total

    def step_pyro() -> Tensor:
        loss: Tensor = elbo.differentiable_loss(model, lambda: None)
        loss.backward()
        return loss.detach()

    return step_elimination, step_pyro


def _create_codebook(readout: Normal | Categorical, sentences: int = SENTENCES, heads: int = HEADS) -> Step:
    """Return the steps of the codebook, ours and Pyro's."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import config_enumerate

    torch.manual_seed(0)
    net = bt.bayesuvius(DIM, heads=heads, atoms=ATOMS, observe=readout)
    module, x = net.module(), torch.randn(sentences, WORDS, DIM)
    real = isinstance(readout, Normal)
    y = torch.randn(sentences, WORDS, DIM) if real else torch.randint(8, (sentences, WORDS))
    store = module.store

    @config_enumerate  # type: ignore[untyped-decorator]
    def model() -> None:
        with pyro.plate("sentence", sentences):
            c = pyro.sample("c", dist.Categorical(logits=store["c/logits"]))
            vectors = []
            for r in "qkv":
                m = pyro.sample(f"m_{r}", dist.Categorical(logits=store[f"W_{r}_0/logits"][c]))
                vectors.append(torch.einsum("...oi,...ni->...no", store[f"W_{r}_0/atoms"][m], x))
            q, k, v = vectors
            mean = torch.softmax(q @ k.mT, -1) @ v
            if real:
                read = dist.Normal(mean, 1.0).to_event(2)
            else:
                read = dist.Categorical(logits=mean @ store["y/weight"].mT + store["y/logits"]).to_event(1)
            pyro.sample("y", read, obs=y)

    return _create_steps(module, Evidence(y), x, model)
