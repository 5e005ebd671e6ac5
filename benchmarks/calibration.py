"""Simulation-based calibration of posteriors (Talts et al. 2018): are the ranks of the true values uniform?

    python -m benchmarks.calibration [--replications 200]

Writes docs/benchmarks/calibration.md. The model is tiny: two heads with known W_q and W_k, pi ~ Dirichlet(2, 2),
entries of W_v ~ N(0, 1), 20 sentences of 2 words of width 2, sigma 1. The two features of a word are correlated (0.95),
so the entries of a row of W_v are correlated in the posterior, which a mean-field guide cannot represent. Each
replication draws parameters from the prior and sentences from them. If the posterior is correct, the rank of the true
value among posterior draws is uniform.
"""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from scipy.stats import chi2
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer.inference import Evidence, posterior
from bnet_transformer.tpm import Normal

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "calibration.md"
SENTENCES, WORDS, DIM = 20, 2, 2
CORRELATION = 0.95  # correlation of a word's two features
LEARN = ["c.logits", "W_v_0.values"]


def simulate(seed: int) -> tuple[bt.BNet, tuple[Tensor, Tensor], Tensor]:
    """Return a net with parameters drawn from their prior, sentences drawn from the net, and their heads."""
    net = bt.bayesuvius(DIM, heads=2, observe=Normal(1.0), prior=2.0, seed=11).to(torch.float64)
    torch.manual_seed(seed)
    pi = torch.distributions.Dirichlet(torch.full((2,), 2.0, dtype=torch.float64)).sample()
    net = net.replace({"c.logits": pi.log(), "W_v_0.values": torch.randn(2, DIM, DIM, dtype=torch.float64)})
    x = torch.randn(SENTENCES, WORDS, DIM, dtype=torch.float64)
    x[..., 1] = CORRELATION * x[..., 0] + math.sqrt(1 - CORRELATION**2) * x[..., 1]
    sample = net.pyro(parameters="own")(x)
    return net, (x, sample["y"].reshape(SENTENCES, WORDS, DIM)), sample["c"].reshape(-1)


def exact_ranks(replications: int, draws: int = 19) -> list[int]:
    """Return the ranks of the true head among draws of its exact posterior, with ties broken at random."""
    ranks: list[int] = []
    for seed in range(-(-replications // SENTENCES)):
        net, (x, y), c = simulate(seed)
        probs = posterior(net.module(), "c", {"y": Evidence(y)}, x)
        samples = torch.multinomial(probs, draws, replacement=True)
        below, ties = (samples < c[:, None]).sum(1), (samples == c[:, None]).sum(1)
        ranks += (below + (torch.rand(len(c)) * (ties + 1)).floor().long()).tolist()
    return ranks[:replications]


def nuts_ranks(
    replications: int, draws: int = 19, thin: int = 3, warmup: int = 100, learn: Sequence[str] = LEARN
) -> list[list[int]]:
    """Return the ranks of the true values among thinned draws of NUTS, separately for each number."""
    return _fit_ranks(bt.NUTS(chains=1, draws=draws * thin, warmup=warmup), replications, learn, thin)


def svi_ranks(replications: int, draws: int = 19) -> list[list[int]]:
    """Return the ranks of the true values among draws of the mean-field guide."""
    return _fit_ranks(bt.SVI(draws=draws, steps=1000, rate=0.03), replications, LEARN, 1)


def _fit_ranks(method: bt.NUTS | bt.SVI, replications: int, learn: Sequence[str], thin: int) -> list[list[int]]:
    """Return the rank of the share of the first head and, where W_v is learned, of the first entry of its W_v."""
    ranks: list[list[int]] = [[] for _ in learn]
    for seed in range(replications):
        net, data, _ = simulate(1000 + seed)
        f = bt.fit(net, data, method=method, learn=learn, spread=1.0, seed=seed, progress=False)
        for name, item in zip(learn, ranks, strict=True):
            samples = f.samples[name].flatten(0, 1)[thin - 1 :: thin].flatten(1)[:, 0]
            item.append(int((samples < _to_natural(name, net.parameters[name]).flatten()[0]).sum()))
    return ranks


def _to_natural(name: str, value: Tensor) -> Tensor:
    """Return a parameter of a fit in its natural form."""
    return value.softmax(-1) if name.endswith("logits") else value


def chi_square(ranks: Sequence[int], bins: int) -> tuple[float, float]:
    """Return the chi-square statistic for uniform ranks from 0 to bins - 1, and its p value."""
    counts = torch.bincount(torch.tensor(ranks), minlength=bins).double()
    even = len(ranks) / bins
    statistic = float(((counts - even).square() / even).sum())
    return statistic, float(chi2.sf(statistic, bins - 1))


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replications", type=int, default=200)
    count = parser.parse_args().replications
    torch.set_num_threads(1)
    lines = [
        "| posterior | ranks | bins | chi-square | p | least and greatest tenth | |",
        "|---|---|---|---|---|---|---|",
    ]
    nuts, svi = nuts_ranks(count), svi_ranks(count)
    for name, ranks, has_target in (
        ("exact P(c given y)", exact_ranks(10 * count), True),
        ("NUTS, P(first head)", nuts[0], True),
        ("NUTS, W_v", nuts[1], True),
        ("mean-field SVI, P(first head)", svi[0], False),
        ("mean-field SVI, W_v", svi[1], False),
    ):
        grouped = [rank // 2 for rank in ranks]
        statistic, p = chi_square(grouped, 10)
        ends = sum(g in (0, 9) for g in grouped) / len(grouped)
        verdict = ("met" if p > 0.01 else "**not met**") if has_target else "no target"
        lines.append(
            f"| {name} | {len(ranks)} | 10 | {statistic:.1f} | {p:.2g} | {ends:.2f} (uniform: 0.20) | {verdict} |"
        )
        print(lines[-1], flush=True)
    text = (__doc__ or "").split("\n\n", 2)[2]
    text = text[text.index("The model is tiny") :]
    when = f"{datetime.date.today()}, torch {torch.__version__}, one thread"
    head = "# Calibration of posteriors\n\n"
    head += f"Measured on {when}, by `python -m benchmarks.calibration`; target p > 0.01."
    PAGE.write_text(f"{head}\n\n{text}\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
