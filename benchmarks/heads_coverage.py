"""Coverage of the intervals of `bt.inclusion`: 90% of them should contain the planted shares.

    python -m benchmarks.heads_coverage [--replications 120] [--method gibbs]

Writes docs/benchmarks/heads_coverage.md; with `--method` only the rows of this method. Each replication draws the share
of every head from its prior, rho ~ Uniform(0, 1), for each sentence a gate of each head by its share, and y of each
word from the net with these gates (d=6, sentences of four words, y ~ Normal(0.5)). "Held" is the percentage of
intervals that contain the share, with its standard error over replications. The target is 90% within two standard
errors, and at most 5 points away. "Exact" gates the heads of one slice with the other slice on, as the
method assumes; "gibbs" gates those of both slices. Where heads are weak (W_o multiplied by 0.1), the data contain
little information about a gate, and intervals are wide. "None" counts the heads to which the method gives no interval.
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
DRAWS = 400


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
    """Return whether each interval contains its share, and its width (NaN without one), both `[replication, head]`."""
    net, generator = create_planted(heads, strength), torch.Generator().manual_seed(heads)
    covered, widths = [], []
    for k in range(replications):
        slices = (k % 2,) if method == "exact" else (0, 1)
        rho, x, y = simulate(net, sentences, slices, generator)
        f = bt.inclusion(net, (x, y), method=method, draws=DRAWS, seed=k, progress=False)
        low, high = f.low[list(slices)], f.high[list(slices)]
        covered.append(((low <= rho) & (rho <= high)).flatten())
        widths.append((high - low).flatten())
    return torch.stack(covered), torch.stack(widths)


def estimate_coverage(covered: Tensor, widths: Tensor) -> tuple[float, float]:
    """Return the fraction of intervals that contain their share, and its standard error over replications."""
    # A ratio estimator: the heads of a replication share its data, so replications are the independent units.
    count = (~widths.isnan()).sum(1).double()
    fraction = covered.sum() / count.sum()
    residual = covered.sum(1) - fraction * count
    error = (residual.square().sum() * len(count) / (len(count) - 1)).sqrt() / count.sum()
    return float(fraction), float(error)


def measure_row(method: str, heads: int, sentences: int, strength: float, replications: int) -> str:
    """Measure one row of the table."""
    start = time.perf_counter()
    covered, widths = measure_coverage(method, heads, sentences, strength, replications)
    fraction, error = estimate_coverage(covered, widths)
    has_coverage = abs(fraction - LEVEL) <= min(2 * error, MAX_DISTANCE)
    cells = [
        method,
        heads,
        sentences,
        strength,
        replications,
        int((~widths.isnan()).sum()),
        int(widths.isnan().sum()),
        f"{100 * fraction:.1f}% ± {100 * error:.1f}%",
        f"{float(widths.nanmean()):.2f}",
        f"{(time.perf_counter() - start) / replications:.1f}",
        "met" if has_coverage else "**not met**",
    ]
    return f"| {' | '.join(map(str, cells))} |"


LEVEL, MAX_DISTANCE = 0.9, 0.05
CASES = (
    ("exact", 4, 60, 1.0),
    ("exact", 4, 60, 0.1),
    ("exact", 4, 8, 1.0),
    ("exact", 8, 60, 1.0),
    ("gibbs", 4, 60, 1.0),
    ("gibbs", 4, 60, 0.1),
)
COLUMNS = "method heads sentences strength replications intervals none held mean_width seconds_each 90%"
HEADER = f"| {' | '.join(COLUMNS.split()).replace('_', ' ')} |"


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replications", type=int, default=120)
    parser.add_argument("--method", choices=sorted({case[0] for case in CASES}))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    lines = [HEADER, "|---" * (HEADER.count("|") - 1) + "|"]
    for case in CASES:
        if arguments.method in (None, case[0]):
            lines.append(measure_row(*case, arguments.replications))
            print(lines[-1], flush=True)
        else:
            prefix = f"| {' | '.join(map(str, case))} |"
            lines += [line for line in before if line.startswith(prefix)]
    text = (__doc__ or "").split("\n\n", 2)[2]
    text = text[text.index("Each replication") :].strip()
    when = f"{datetime.date.today()}, torch {torch.__version__}, one thread"
    head = "# Coverage of intervals of head shares\n\n"
    head += f"Measured on {when}, by `python -m benchmarks.heads_coverage`."
    PAGE.write_text(f"{head}\n\n{text}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
