"""Rows of fitting: restarts at once against one by one, and how a step's time grows with heads, words and atoms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, interleaved, peak_memory, ratios
from benchmarks.mixtures import one_thread
from bnet_transformer.inference.fit.corpus import Corpus, corpus_of, task_of_mixture
from bnet_transformer.inference.fit.objective import Objective, learned_of
from bnet_transformer.tpm import Normal

RESTARTS, SENTENCES = 16, 256
Sets = dict[str, Tensor]


def restarts_at_once() -> list[Figure]:
    """A gradient of the exact marginal of 16 restarts (4 heads, 8 words, d=8, d_k=4, 256 sentences), on all threads:
    as one batched dimension, against a loop over them; the gradients are asserted equal first."""
    objective, corpus, sets = _case(RESTARTS, heads=4, words=8, dim=8)

    def at_once() -> list[Tensor]:
        leaves = {name: value.requires_grad_() for name, value in sets.items()}
        return list(torch.autograd.grad(objective.log_evidences(leaves, corpus).sum(), list(leaves.values())))

    def one_by_one() -> list[Tensor]:
        found = []
        for r in range(RESTARTS):
            leaves = {name: value[r].detach().requires_grad_() for name, value in sets.items()}
            found.append(torch.autograd.grad(objective.log_evidence(leaves, corpus).sum(), list(leaves.values())))
        return [torch.stack(each) for each in zip(*found, strict=True)]

    torch.testing.assert_close(at_once(), one_by_one(), rtol=1e-3, atol=1e-3)
    spent = interleaved({"at once": at_once, "one by one": one_by_one}, runs=15, warm=2)
    return [
        figure("at once", spent["at once"], "s"),
        figure("one by one", spent["one by one"], "s"),
        figure("at once over one by one", ratios(spent["at once"], spent["one by one"]), "", target=1 / 1.5),
        figure("peak memory of this process", peak_memory(), "MB"),
    ]


def growth_of_a_step() -> list[Figure]:
    """How the time of a gradient (128 sentences, one thread) grows: the slope of log time over log size, for heads of
    a mixture, words, and atoms of each role (4 heads); and 32 heads over 4 heads with 8 atoms a role, which should
    cost the same."""
    with one_thread():
        heads = {k: _step(heads=k, words=8) for k in (8, 16, 32, 64)}
        words = {n: _step(heads=8, words=n) for n in (8, 16, 32)}
        atoms = {m: _step(heads=4, words=8, atoms=m) for m in (4, 6, 8, 12)}
        wide = {k: _step(heads=k, words=8, atoms=8) for k in (4, 32)}
        spent = interleaved({str(k): call for k, call in wide.items()}, runs=5)
        return [
            figure("slope in heads", _slope(heads), "", target=1.1),
            figure("slope in words", _slope(words), ""),
            figure("slope in atoms a role", _slope(atoms), ""),
            figure("codebooks, 32 heads over 4", ratios(spent["32"], spent["4"]), "", target=1.5),
        ]


def _case(
    restarts: int, *, heads: int, words: int, dim: int, atoms: int | None = None, sentences: int = SENTENCES
) -> tuple[Objective, Corpus, Sets]:
    torch.manual_seed(0)
    net = bt.bayesuvius(dim, heads=heads, key_dim=4, atoms=atoms, observe=Normal(1.0))
    data = torch.randn(sentences, words, dim), torch.randn(sentences, words, dim)
    learned = learned_of(net.network, task_of_mixture(net.network).readouts, None, None)
    objective, corpus = Objective(net.network, learned, 2**16), corpus_of(net.network, data)
    sets = {n: torch.stack([p + 0.1 * torch.randn_like(p) for _ in range(restarts)]) for n, p in net.parameters.items()}
    return objective, corpus, {name: sets[name] for name in learned.names}


def _step(*, heads: int, words: int, atoms: int | None = None) -> Callable[[], object]:
    objective, corpus, sets = _case(1, heads=heads, words=words, dim=8, atoms=atoms, sentences=128)

    def step() -> object:
        leaves = {name: value[0].detach().requires_grad_() for name, value in sets.items()}
        return torch.autograd.grad(objective.log_evidence(leaves, corpus).sum(), list(leaves.values()))

    return step


def _slope(calls: Mapping[int, Callable[[], object]], runs: int = 5) -> float:
    """The slope of the least times by least squares, both in logs."""
    spent = interleaved({str(size): call for size, call in calls.items()}, runs=runs)
    return _fitted([math.log(size) for size in calls], [math.log(min(seconds)) for seconds in spent.values()])


def _fitted(x: Sequence[float], y: Sequence[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    top = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return top / sum((a - mean_x) ** 2 for a in x)
