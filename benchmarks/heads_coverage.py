"""Coverage of the intervals of `bt.inclusion`: 90% of them should contain the planted shares.

    python -m benchmarks.heads_coverage [--replications 120]

Writes docs/benchmarks/heads_coverage.md. Each replication draws the share of every head from its prior, rho ~
Uniform(0, 1), for each sentence a gate of each head by its share, and y of each word from the net with these gates
(d=6, sentences of four words, y ~ Normal(0.5)). "Held" is the percentage of intervals that contain the share. "Exact"
gates the heads of one slice with the other slice on, as the method assumes; "svi" gates those of both slices. Where
heads are weak (W_o multiplied by 0.1), the data contain little information about a gate, and intervals are wide.
"""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path

import torch
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer.tpm import Normal

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "heads_coverage.md"
DIM, WORDS, SIGMA = 6, 4, 0.5
DRAWS, ROUNDS = 400, 40


def create_planted(heads: int, strength: float) -> bt.BNet:
    """Return a net of two slices whose W_o are multiplied by `strength`."""
    net = bt.bayesuvius(
        DIM, heads=heads, slices=2, combine="concat", residual=True, scale=None, observe=Normal(SIGMA), seed=heads
    ).to(torch.float64)
    return net.replace({f"W_o_{t}.value": strength * net.parameters[f"W_o_{t}.value"] for t in (0, 1)})


def simulate(net: bt.BNet, sentences: int, slices: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return shares rho, `[slice, head]`, gates of each sentence by these shares, and y of the gated net."""
    heads = net.network.graph.plate_sizes["head"]
    rho = torch.rand(len(slices), heads, generator=generator, dtype=torch.float64)
    samples = torch.rand(sentences, len(slices), heads, generator=generator, dtype=torch.float64) < rho
    gates = {f"a_{t}": samples[:, k].double() for k, t in enumerate(slices)}
    x = torch.randn(sentences, WORDS, DIM, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        mean = net.module()(x, gates=gates)
    assert isinstance(mean, Tensor)
    noise = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
    return rho, x, mean + SIGMA * noise


def measure_coverage(
    method: str, heads: int, sentences: int, strength: float, replications: int
) -> tuple[Tensor, Tensor]:
    """Return whether each interval contains its share, and its width: both `[replication, head]`."""
    net, generator = create_planted(heads, strength), torch.Generator().manual_seed(heads)
    covered, widths = [], []
    for k in range(replications):
        slices = (0, 1) if method == "svi" else (k % 2,)
        rho, x, y = simulate(net, sentences, slices, generator)
        f = bt.inclusion(net, (x, y), method=method, draws=DRAWS, rounds=ROUNDS, seed=k, progress=False)
        low, high = f.low[list(slices)], f.high[list(slices)]
        covered.append(((low <= rho) & (rho <= high)).flatten())
        widths.append((high - low).flatten())
    return torch.stack(covered), torch.stack(widths)


CASES = (("exact", 4, 60, 1.0), ("exact", 4, 60, 0.1), ("exact", 4, 8, 1.0), ("exact", 8, 60, 1.0), ("svi", 4, 60, 1.0))


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replications", type=int, default=120)
    count = parser.parse_args().replications
    torch.set_num_threads(1)
    lines = [
        "| method | heads | sentences | strength | intervals | held | mean width | seconds | 85% to 95% |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method, heads, sentences, strength in CASES:
        start = time.perf_counter()
        covered, widths = measure_coverage(method, heads, sentences, strength, count)
        fraction = float(covered.double().mean())
        verdict = ("met" if 0.85 <= fraction <= 0.95 else "**not met**") if method == "exact" else "no target"
        cells = [
            method,
            heads,
            sentences,
            strength,
            covered.numel(),
            f"{100 * fraction:.1f}%",
            f"{float(widths.mean()):.2f}",
        ]
        cells += [f"{time.perf_counter() - start:.0f}", verdict]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        print(lines[-1], flush=True)
    text = (__doc__ or "").split("\n\n", 2)[2]
    text = text[text.index("Each replication") :].strip()
    when = f"{datetime.date.today()}, torch {torch.__version__}, one thread"
    head = "# Coverage of intervals of head shares\n\n"
    head += f"Measured on {when}, by `python -m benchmarks.heads_coverage --replications {count}`."
    PAGE.write_text(f"{head}\n\n{text}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
