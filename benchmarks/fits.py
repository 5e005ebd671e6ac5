"""The row of fits: batched restarts compared with a loop; and the step whose growth `growth.py` measures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, ratios, time_calls
from benchmarks.limits import measure_limit
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.data.task import infer_fit_task
from bnet_transformer.learning.fit.problem import FitObjective, select_learnable
from bnet_transformer.tpm import Normal

RESTARTS, SENTENCES = 16, 256
Sets = dict[str, Tensor]
Gradients = Callable[[], list[Tensor]]


def batched_restarts() -> list[Figure]:
    """A gradient of the exact marginal of 16 restarts (4 heads, 8 words, d=8, d_k=4, 256 sentences), on all threads: as
    one batched dimension, compared with a loop over them. The gradients are first asserted to be equal."""
    batched, looped = create_restarts(RESTARTS, heads=4, words=8, dim=8)
    torch.testing.assert_close(batched(), looped(), rtol=1e-3, atol=1e-3)
    spent = time_calls({"at once": batched, "one by one": looped}, runs=15, warm=2)
    return [
        figure("at once", spent["at once"], "s"),
        figure("one by one", spent["one by one"], "s"),
        figure("at once over one by one", ratios(spent["at once"], spent["one by one"]), "", target=1 / 1.5),
        *measure_limit(batched, spent["at once"]),
    ]


def create_restarts(count: int, *, device: str = "cpu", **sizes: int) -> tuple[Gradients, Gradients]:
    """Return functions that compute the gradients of all restarts: as one batched dimension, and in a loop."""
    objective, corpus, sets = _create_case(count, device=device, **sizes)

    def compute_batched() -> list[Tensor]:
        leaves = {name: value.requires_grad_() for name, value in sets.items()}
        return list(torch.autograd.grad(objective.log_evidences(leaves, corpus).sum(), list(leaves.values())))

    def compute_looped() -> list[Tensor]:
        grads = []
        for r in range(count):
            leaves = {name: value[r].detach().requires_grad_() for name, value in sets.items()}
            grads.append(torch.autograd.grad(objective.log_evidence(leaves, corpus).sum(), list(leaves.values())))
        return [torch.stack(item) for item in zip(*grads, strict=True)]

    return compute_batched, compute_looped


def _create_case(
    restarts: int,
    *,
    heads: int,
    words: int,
    dim: int,
    atoms: int | None = None,
    sentences: int = SENTENCES,
    device: str = "cpu",
) -> tuple[FitObjective, Batch, Sets]:
    """Return a mixture or a codebook with parameters of all restarts, and data."""
    torch.manual_seed(0)
    net = bt.bayesuvius(dim, heads=heads, key_dim=4, atoms=atoms, observe=Normal(1.0))
    data = torch.randn(sentences, words, dim), torch.randn(sentences, words, dim)
    noise = {n: 0.1 * torch.randn(restarts, *p.shape) for n, p in net.parameters.items()}
    net = net.to(device)
    learned = select_learnable(net.network, infer_fit_task(net.network).readouts, None, None)
    objective, corpus = FitObjective(net.network, learned, 2**16), read_batch(net.network, data)
    return objective, corpus, {name: net.parameters[name] + noise[name].to(device) for name in learned.names}


def create_step(*, heads: int, words: int, atoms: int | None = None, sentences: int = 128) -> Callable[[], object]:
    """Return a gradient of the exact marginal of a mixture, or of codebooks."""
    objective, corpus, sets = _create_case(1, heads=heads, words=words, dim=8, atoms=atoms, sentences=sentences)

    def run() -> object:
        leaves = {name: value[0].detach().requires_grad_() for name, value in sets.items()}
        return torch.autograd.grad(objective.log_evidence(leaves, corpus).sum(), list(leaves.values()))

    return run
