"""Jobs of tests/test_parallel.py: several processes run them on shards, and one process on all sentences.

torchrun --nproc-per-node 2 tests/parallel_jobs.py run_all FOLDER
"""

import os
import signal
import sys
from pathlib import Path

import torch

import bnet_transformer as bt
from bnet_transformer._core.distributed import single_process
from bnet_transformer.learning.fit.adam import GradientOptimizer
from bnet_transformer.tpm import Categorical, Normal
from tests import flat_options

D = torch.float64
WORDS = ["the", "cat", "sat", "on", "a", "mat"]
TEXTS = ["the cat sat", "a mat", "on the mat a cat sat", "the mat sat", "a cat", "cat sat on", "sat"]
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def mixture(per="sentence", **options):
    return bt.bayesuvius(3, heads=2, per=per, **{"observe": Normal(0.5), "prior": 2.0, **options}).to(D)


def make_summed(**options):
    return bt.bayesuvius(4, heads=2, slices=2, combine="concat", vocabulary=WORDS, **options).to(D)


def make_vectors(count, width=3):
    g = torch.Generator().manual_seed(count)
    return tuple(torch.randn(count, 3, width, generator=g, dtype=D) for _ in range(2))


def fit(net, data, **options):
    return flat_options.fit(net, data, progress=False, **options)


def numbers(f):
    return [f.bounds, [score for *_, score in f.measured], dict(f.net.parameters), dict(f.samples), dict(f.choices)]


def run_fits(count, folder=None):
    """Fits of each method, with and without minibatches, and with shards of unequal length."""
    data = make_vectors(count)
    word = {"net": mixture("word", slices=2, observe=Categorical(3), vocabulary=WORDS)}
    xy = torch.arange(count * 3).reshape(count, 3) % 6, torch.arange(count * 3).reshape(count, 3) % 3
    options = {"spread": 1.0, "draws": 3, "batch": 3}
    learned = ["c.logits", "W_v_0.values"]
    second = fit(mixture(), data, method=bt.EM(steps=4, restarts=2), spread=1.0, learn=learned)
    return {
        "map": numbers(fit(mixture(), data, method=bt.MAP(steps=4, restarts=3), batch=3, spread=1.0)),
        "em": numbers(fit(mixture(), data, method=bt.EM(steps=3, inner=2), batch=3)),
        # The number of steps to a stationary point can differ by rounding; the first bounds and the maximum cannot.
        "em, second order": [second.bounds[:4], second.bounds[-1]],
        "em of tables": numbers(fit(mixture(), data, method=bt.EM(steps=2, restarts=2), learn=["c.logits"])),
        "svi": numbers(fit(mixture(), data, method="svi", steps=4, **options)),
        "svi of tables": numbers(fit(mixture(), data, method=bt.SVI(steps=4, draws=3), learn=["c.logits"])),
        "svi, one by one": numbers(fit(mixture(), data, method="svi", steps=3, **options | {"batch": 1})),
        "svi, drawn": numbers(fit(word["net"], xy, method="svi", steps=3, choices="sampled", **options | {"batch": 2})),
        "nuts": numbers(fit(mixture(), data, method=bt.NUTS(chains=3, draws=2, warmup=3), learn=["c.logits"])),
    }


def analyze_attention(count):
    """Roles of heads, and the tree of words."""
    net, texts = make_summed(observe=Categorical(3)), TEXTS[:count]
    r = bt.roles(net, texts, draws=100)
    names = ("mean", "low", "high", "spread", "counts", "chance", "above", "top", "by_sentence")
    sentences = ["the cat sat", "a mat on", "sat the mat", "cat a the", "on the cat", "mat sat a"]
    tan = net.tan(sentences, [0, 1, 0, 1, 0, 1])
    tree = [torch.from_numpy(tan.information), list(tan.parents)]
    return {"roles": [getattr(r, name) for name in names], "tan": tree}


def make_batch(k):
    return [[(k + 2 * i) % 6, i % 6, (k * i) % 6] for i in range(5)]


def run_training(folder=None, kill=False, **options):
    def get_batch(k):
        if kill and k == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return make_batch(k)

    net = bt.decoder(8, heads=2, slices=1, vocabulary=WORDS, dropout=0.0).to(D)
    kwargs = {"steps": 8, "rate": 0.01, "every": 2, "clip": 0.5, "held_out": make_batch(1)} | options
    return flat_options.train(net, get_batch, **kwargs, folder=folder, progress=False)


def run_fit(folder=None, kill=False, **options):
    plain_update = GradientOptimizer.update

    def update(self):
        if kill and self.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        plain_update(self)

    GradientOptimizer.update = update
    try:
        return fit(mixture(), make_vectors(7), steps=8, batch=3, every=2, spread=1.0, folder=folder, **options)
    finally:
        GradientOptimizer.update = plain_update


def run_killed(folder):
    """Kill rank 1 while it trains and, after the restart, while it fits."""
    is_rank_1 = RANK == 1
    train = run_training(folder / "train", kill=is_rank_1 and RESTARTS == 0, resume=True)
    result = run_fit(folder / "fit", kill=is_rank_1 and RESTARTS == 1, resume=True)
    return {
        "train": [train.losses, train.held_out, dict(train.net.parameters)],
        "fit": numbers(result),
        "restarts": [RESTARTS],
    }


def run_all(folder):
    """Run everything that gives equal results in two processes and in one."""
    return run_killed(folder) | run_fits(7) | analyze_attention(7)


def run_unequal(folder):
    """Run calls that raise an error if they differ between ranks, and calls on fewer sentences than ranks."""
    result = run_fits(2) | analyze_attention(2)
    f = fit(mixture(), make_vectors(6), method=bt.MAP(steps=1, optimizer="first-order"))
    messages = []
    for call in (
        lambda: fit(mixture(), tuple(part + (RANK == 1) for part in make_vectors(6)), method=bt.MAP(steps=1)),
        lambda: run_training() if RANK == 2 else bt.roles(make_summed(), TEXTS),
        lambda: run_training(rate=0.02 + 0.01 * RANK),
    ):
        try:
            call()
        except bt.BNetError as error:
            messages.append(str(error))
    result["queries"] = query_fit(f)
    if RANK == 0:
        with single_process():
            result["by itself"] = [run_training().losses]
    for r in ({"mine": fail_on_rank_2}, None) if WORLD > 1 else ():  # the second query finds the process group closed
        try:
            bt.roles(make_summed(), TEXTS, relations=r)
        except bt.BNetError as error:
            messages.append(str(error))
    return result | {"refused": messages}


def query_fit(f):
    """Queries that no rank shares, so each can make others."""
    return [f.responsibilities(make_vectors(4)), f.predict(make_vectors(4)[0]) if RANK == 0 else f.log_likelihoods]


def fail_on_rank_2(words):
    if RANK == 2:
        raise RuntimeError("this rank fails")
    return torch.eye(len(words), dtype=torch.bool).numpy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save(globals()[sys.argv[1]](Path(sys.argv[2])), Path(sys.argv[2], f"{sys.argv[1]}{RANK}"))
