"""Coverage of 90% intervals of `A`, `OV`, `pi` and predictions, by each method with a posterior.

    python -m benchmarks.coverage [--replications 40] [--methods laplace,nuts] [--processes 1] [--resume FILE]

Writes docs/benchmarks/coverage.md; rows of methods that are not measured stay as they are. With `--resume` each
replication is saved in a file when it ends, and replications in the file are not run again. The model: two heads of
width 2 for each sentence, all weights and pi learned, 40 sentences of 4 words, sigma 1. The two features of a word are
correlated (0.95). In each replication the truth is drawn from the prior of the fit: entries of W_q, W_k and W_v ~ N(0,
1), pi ~ Dirichlet(2, 2). A fit starts at random parameters, never at the truth. Its heads are matched to the true heads
by the Hungarian method on responsibilities. An interval reaches from the 5% to the 95% quantile of the draws.
Predictions are means of y on five new sentences, which do not depend on labels. Standard errors are clustered by
replication. A row passes if 90% is within two standard errors and the coverage is between 85% and 95%.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer.learning.fit.heads import count_overlap, match_heads
from bnet_transformer.learning.fit.objective import Method
from bnet_transformer.learning.fit.result import as_fit
from bnet_transformer.tpm import Normal

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "coverage.md"
SENTENCES, NEW_SENTENCES, WORDS, DIM, HEADS = 40, 5, 4, 2, 2
CORRELATION = 0.95  # correlation of a word's two features
SHARE = 0.9
LEARN = ["c.logits", "W_q_0.values", "W_k_0.values", "W_v_0.values"]
METHODS: dict[str, tuple[str, Method]] = {
    "mean-field": ("SVI, mean-field", bt.SVI(steps=1000, rate=0.03)),
    "laplace": ("Laplace", bt.Laplace(reweight=False)),
    "reweighted": ("Laplace, reweighted if k-hat < 0.7", bt.Laplace()),
    "nuts": ("NUTS", bt.NUTS(chains=1, draws=1000, warmup=150)),
}
FEWER = {"nuts": 20}  # the greatest number of replications of slow methods
Measurement = tuple[dict[str, float], float | None, float]  # coverage by quantity, k-hat, processor seconds
QUANTITIES = ("A", "OV", "pi", "predictions")


def draw_sentences(count: int) -> Tensor:
    """Draw the words of some sentences, `[sentence, word, dim]`."""
    x = torch.randn(count, WORDS, DIM, dtype=torch.float64)
    x[..., 1] = CORRELATION * x[..., 0] + math.sqrt(1 - CORRELATION**2) * x[..., 1]
    return x


def simulate(seed: int) -> tuple[bt.BNet, tuple[Tensor, Tensor], Tensor]:
    """Return a net with parameters drawn from the prior of the fit, its sentences, and new sentences."""
    torch.manual_seed(seed)
    truth = bt.bayesuvius(DIM, heads=HEADS, observe=Normal(1.0), prior=2.0, seed=seed).to(torch.float64)
    pi = torch.distributions.Dirichlet(torch.full((HEADS,), 2.0, dtype=torch.float64)).sample()
    shape = (HEADS, DIM, DIM)
    weights = {name: torch.randn(shape, dtype=torch.float64) for name in LEARN[1:]}
    truth = truth.replace({"c.logits": pi.log(), **weights})
    x, new = draw_sentences(SENTENCES), draw_sentences(NEW_SENTENCES)
    y = truth.pyro(parameters="own")(x)["y"].reshape(SENTENCES, WORDS, DIM)
    return truth, (x, y), new


def compute_quantities(samples: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """Compute `A`, `OV`, `pi` and the means of the new sentences for each draw, `[draw, ...]`."""
    A = samples["W_q_0.values"].mT @ samples["W_k_0.values"]
    V, pi = samples["W_v_0.values"], samples["c.logits"]
    weights = torch.einsum("sid,nhde,sje->nhsij", x, A, x).softmax(-1)
    means = torch.einsum("nh,nhsij,nhod,sjd->nsio", pi, weights, V, x)
    return {"A": A, "OV": V, "pi": pi, "predictions": means}


def measure(seed: int, method: Method) -> Measurement:
    """Return the share of covered numbers of each quantity, k-hat, and the processor seconds of one fit."""
    truth, data, new = simulate(seed)
    net = bt.bayesuvius(DIM, heads=HEADS, observe=Normal(1.0), prior=2.0, seed=10_000 + seed).to(torch.float64)
    start = time.process_time()
    f = bt.fit(net, data, method=method, learn=LEARN, spread=1.0, seed=seed, progress=False)
    seconds = time.process_time() - start
    true_samples = {name: truth.parameters[name].detach()[None] for name in LEARN}
    true_samples["c.logits"] = true_samples["c.logits"].exp()
    reference = as_fit(truth)
    match = list(match_heads(count_overlap(reference.responsibilities(data), f.responsibilities(data))))
    draws = compute_quantities({name: value.flatten(0, 1) for name, value in f.samples.items()}, new)
    covered = {}
    for name, true in compute_quantities(true_samples, new).items():
        values = draws[name] if name == "predictions" else draws[name][:, match]
        ends = torch.tensor([(1 - SHARE) / 2, (1 + SHARE) / 2], dtype=torch.float64)
        low, high = torch.quantile(values.flatten(1), ends, dim=0)
        inside = (low <= true.flatten()) & (true.flatten() <= high)
        covered[name] = float((inside[:1] if name == "pi" else inside).double().mean())
    return covered, f.khat, seconds


def measure_all(key: str, seeds: range, processes: int, path: Path | None) -> list[Measurement]:
    """Measure a method in each replication, and read those that are in the file `path`."""
    saved = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path and path.exists() else []
    )
    results = {row["seed"]: tuple(row["result"]) for row in saved if row["method"] == repr(METHODS[key][1])}
    with ProcessPoolExecutor(processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        jobs = {pool.submit(measure, seed, METHODS[key][1]): seed for seed in seeds if seed not in results}
        for job in as_completed(jobs):
            results[jobs[job]] = job.result()
            if path:
                row = {"method": repr(METHODS[key][1]), "seed": jobs[job], "result": job.result()}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return [results[seed] for seed in seeds]


def summarize(shares: Tensor) -> str:
    """Return the coverage with its standard error, clustered by replication, and whether it passes."""
    mean, error = float(shares.mean()), float(shares.std() / math.sqrt(len(shares)))
    passes = abs(mean - SHARE) <= min(0.05, 2 * error)
    return f"{100 * mean:.1f} ± {100 * error:.1f}" + ("" if passes else " (**not met**)")


def read_rows() -> dict[str, str]:
    """Read the rows of the page, by method."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    labels = {label for label, _ in METHODS.values()}
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}
    return {label: row for label, row in rows.items() if label in labels}


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replications", type=int, default=40)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the replications")
    parser.add_argument("--resume", type=Path, help="a file of finished replications, which is continued")
    options = parser.parse_args()
    header = ["method", "replications", *QUANTITIES, "k-hat < 0.7", "processor seconds per fit", "date"]
    rows = read_rows()
    for key in options.methods.split(","):
        label, _ = METHODS[key]
        count = min(options.replications, FEWER.get(key, options.replications))
        seeds = range(options.first, options.first + count)
        results = measure_all(key, seeds, options.processes, options.resume)
        cells = [summarize(torch.tensor([covered[name] for covered, _, _ in results])) for name in QUANTITIES]
        khats = [khat for _, khat, _ in results if khat is not None]
        share = f"{sum(khat < 0.7 for khat in khats)} of {len(khats)}" if khats else ""
        seconds = sorted(s for _, _, s in results)[len(results) // 2]
        rows[label] = f"| {label} | {count} | {' | '.join(cells)} | {share} | {seconds:.1f} | {datetime.date.today()} |"
        print(rows[label], flush=True)
    text = (__doc__ or "").split("\n\n", 2)[2]
    text = text[text.index("The model") :]
    head = "# Coverage of intervals\n\nMeasured by `python -m benchmarks.coverage` on one thread per fit, with torch "
    head += f"{torch.__version__}; coverage in percent, target 90."
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [rows[label] for label, _ in METHODS.values() if label in rows]
    PAGE.write_text(f"{head}\n\n{text}\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
