"""What several processes do in tests/test_parallel.py, each with its share: the same functions run in one process too.

torchrun --nproc-per-node 2 tests/parallel_jobs.py together FOLDER
"""

import os
import signal
import sys
from pathlib import Path

import torch

import bnet_transformer as bt
from bnet_transformer.attention import damage
from bnet_transformer.learning.fit.restarts import RestartOptimizer
from bnet_transformer.learning.training import single_process
from bnet_transformer.tpm import Categorical, Normal
from tests import flat_options

D = torch.float64
WORDS = ["the", "cat", "sat", "on", "a", "mat"]
TEXTS = ["the cat sat", "a mat", "on the mat a cat sat", "the mat sat", "a cat", "cat sat on", "sat"]
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def mixture(per="sentence", **options):
    return bt.bayesuvius(3, heads=2, per=per, **{"observe": Normal(0.5), "prior": 2.0, **options}).to(D)


def summed(**options):
    return bt.bayesuvius(4, heads=2, slices=2, combine="concat", vocabulary=WORDS, **options).to(D)


def vectors(count, width=3):
    g = torch.Generator().manual_seed(count)
    return tuple(torch.randn(count, 3, width, generator=g, dtype=D) for _ in range(2))


def fit(net, data, **options):
    return flat_options.fit(net, data, progress=False, **options)


def numbers(f):
    return [f.bounds, [score for *_, score in f.measured], dict(f.net.parameters), dict(f.samples), dict(f.choices)]


def fits(count, folder=None):
    """Fits of each method, with minibatches and shares of unequal length, or none."""
    data = vectors(count)
    word = {"net": mixture("word", slices=2, observe=Categorical(3), vocabulary=WORDS)}
    ids = torch.arange(count * 3).reshape(count, 3) % 6, torch.arange(count * 3).reshape(count, 3) % 3
    few = {"spread": 1.0, "draws": 3, "batch": 3}
    return {
        "map": numbers(fit(mixture(), data, method=bt.MAP(steps=4, restarts=3), batch=3, spread=1.0)),
        "em": numbers(fit(mixture(), data, method=bt.EM(steps=3, inner=2), batch=3)),
        "em of tables": numbers(fit(mixture(), data, method=bt.EM(steps=2, restarts=2), learn=["c.logits"])),
        "svi": numbers(fit(mixture(), data, method="svi", steps=4, **few)),
        "svi of tables": numbers(fit(mixture(), data, method=bt.SVI(steps=4, draws=3), learn=["c.logits"])),
        "svi, one by one": numbers(fit(mixture(), data, method="svi", steps=3, **few | {"batch": 1})),
        "svi, drawn": numbers(fit(word["net"], ids, method="svi", steps=3, choices="sampled", **few | {"batch": 2})),
        "nuts": numbers(fit(mixture(), data, method=bt.NUTS(chains=3, draws=2, warmup=3), learn=["c.logits"])),
    }


def of_fits(count):
    """What a fit tells of many sentences: a point, and a posterior."""
    data, found = vectors(count), {}
    point, word = (
        fit(mixture(), vectors(6), method=bt.MAP(steps=1)),
        fit(mixture("word"), vectors(6), method=bt.MAP(steps=1)),
    )
    samples = fit(mixture(), data, method=bt.SVI(steps=2, draws=3), spread=1.0)
    for name, f in (("point", point), ("word", word), ("samples", samples)):
        told = f.responsibilities(data), f.log_likelihood(data), f.predict(data[0])
        found[name] = [*told, f.log_likelihoods] if f.samples else [*told]
    compared = point.compare(samples, data)
    return found | {"compared": [compared.overlap, compared.gain, compared.gain_error]}


def of_heads(count):
    """Which heads matter, what heads read, the tree of words."""
    told, texts = summed(observe=Categorical(3)), TEXTS[:count]
    pairs = [(text, [k % 3 for k in range(len(text.split()))]) for text in texts]
    found = {}
    for name, data, options in (
        ("observed", pairs, {}),
        ("around", texts, {"sigma": 0.5}),
        ("svi", pairs, {"method": "svi", "rounds": 3}),
        ("svi around", texts, {"method": "svi", "rounds": 3, "output": "x_2"}),
    ):
        f = bt.inclusion(told, data, draws=32, progress=False, **options)
        names = ("rho", "log_bayes", "error", "inclusion", "importance", "importance_error", "ablation", "idle")
        found[name] = [getattr(f, each) for each in names]
        harm = damage(f, counts=[1, 2], progress=False)
        found[f"damage, {name}"] = [harm.values, harm.error]
    r = bt.roles(told, texts, draws=100)
    names = ("mean", "low", "high", "spread", "counts", "chance", "above", "top")
    found["roles"] = [getattr(r, each) for each in names]
    same = ["the cat sat", "a mat on", "sat the mat", "cat a the", "on the cat", "mat sat a"]
    tan = told.tan(same, [0, 1, 0, 1, 0, 1])
    return found | {"tan": [torch.from_numpy(tan.information), list(tan.parents)]}


def step(k):
    return [[(k + 2 * i) % 6, i % 6, (k * i) % 6] for i in range(5)]


def trained(folder=None, kill=False, **options):
    def data(k):
        if kill and k == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(k)

    net = bt.decoder(8, heads=2, slices=1, vocabulary=WORDS, dropout=0.0).to(D)
    told = {"steps": 8, "rate": 0.01, "every": 2, "clip": 0.5, "held_out": step(1)} | options
    return flat_options.train(net, data, **told, folder=folder, progress=False)


def fitted(folder=None, kill=False, **options):
    before = RestartOptimizer.advance

    def advance(self):
        if kill and self.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        before(self)

    RestartOptimizer.advance = advance
    try:
        return fit(mixture(), vectors(7), steps=8, batch=3, every=2, spread=1.0, folder=folder, **options)
    finally:
        RestartOptimizer.advance = before


def killed(folder):
    """A rank is killed while it trains, and, when all have started again, while it fits."""
    one = RANK == 1
    train = trained(folder / "train", kill=one and RESTARTS == 0, resume=True)
    found = fitted(folder / "fit", kill=one and RESTARTS == 1, resume=True)
    return {
        "train": [train.losses, train.held_out, dict(train.net.parameters)],
        "fit": numbers(found),
        "restarts": [RESTARTS],
    }


def together(folder):
    """All that is equal in two processes and in one."""
    return killed(folder) | fits(7) | of_fits(7) | of_heads(7)


def apart(folder):
    """What ranks must not do each in its own way, and a few sentences for many ranks."""
    found = fits(2) | of_fits(2) | of_heads(2)
    f = fit(mixture(), vectors(6), method=bt.MAP(steps=1))
    sliced = fit(mixture("slice", slices=2), vectors(6), method=bt.MAP(steps=1))
    refused = []
    for ask in (
        lambda: fit(mixture(), tuple(part + (RANK == 1) for part in vectors(6)), method=bt.MAP(steps=1)),
        lambda: f.log_likelihood(vectors(4)) if RANK == 2 else f.responsibilities(vectors(4)),
        lambda: trained(rate=0.02 + 0.01 * RANK),
        lambda: sliced.responsibilities(vectors(4), selector=f"c_{int(RANK == 1)}"),
    ):
        try:
            ask()
        except bt.BNetError as error:
            refused.append(str(error))
    if RANK == 0:
        with single_process():
            found["by itself"] = [f.responsibilities(vectors(5))]
    for relations in ({"mine": failing}, None) if WORLD > 1 else ():  # the second question has no group any more
        try:
            bt.roles(summed(), TEXTS, relations=relations)
        except bt.BNetError as error:
            refused.append(str(error))
    return found | {"refused": refused}


def failing(words):
    if RANK == 2:
        raise RuntimeError("this rank fails")
    return torch.eye(len(words), dtype=torch.bool).numpy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save(globals()[sys.argv[1]](Path(sys.argv[2])), Path(sys.argv[2], f"{sys.argv[1]}{RANK}"))
