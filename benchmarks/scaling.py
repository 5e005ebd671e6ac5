"""Strong and weak scaling of training, a fit and a query over several processes, and a prediction for 64 processes.

    python -m benchmarks.scaling [--processes 1 2] [--repeats 5] [--markdown docs/benchmarks/scaling.md]

Processes of one thread each on one machine, connected by gloo. Strong scaling: the same sentences for every number of
processes. Weak scaling: the same number of sentences for each process. Three jobs: a step of `bt.train` (a decoder of 2
slices, width 64, 4 heads, 32 words), a step of `bt.fit` by map (a mixture of 4 heads, 2 slices, 16 words, width 32),
and its `responsibilities`. The time of a step is the difference of two runs of unequal length, so the start of a call
does not count.

The model is t(k, n) = a + b n / k + c log2 k for n sentences on k processes: `a` is the work that every process repeats
(the optimiser, the host), `b` the work of one sentence, `c` the time that a doubling of the processes adds to merging
sums and results. On one machine with few cores `c` also contains the competition of processes for the cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bnet_transformer as bt
from bnet_transformer.tpm import Normal

ROOT = Path(__file__).resolve().parent.parent
GOAL = 64  # number of processes of the prediction
SIZES = {"train": (32, 64, 128), "fit": (128, 256, 512), "responsibilities": (256, 512, 1024)}
STEPS = {"train": (1, 5), "fit": (1, 5)}
Point = tuple[int, int, float]


def time_train_step(count: int) -> float:
    """Return the seconds of a training step with `count` sentences."""
    net = bt.decoder(64, heads=4, slices=2, vocabulary=[f"w{k}" for k in range(100)], seed=1)
    data = torch.randint(100, (count, 33), generator=torch.Generator().manual_seed(0))

    def run(steps: int) -> None:
        bt.train(net, lambda step: data, steps=steps, progress=False)

    return _time_step(run, *STEPS["train"])


def time_fit_step(count: int) -> float:
    """Return the seconds of a step of a fit by map."""
    net, data = _create_mixture(count)

    def run(steps: int) -> None:
        bt.fit(net, data, method=bt.MAP(steps=steps), batch=count, every=10**6, progress=False)

    return _time_step(run, *STEPS["fit"])


def time_responsibilities(count: int) -> float:
    """Return the seconds of the responsibilities of `count` sentences."""
    net, data = _create_mixture(count)
    result = bt.fit(net, _create_mixture(8)[1], method=bt.MAP(steps=1), progress=False)
    result.responsibilities(data)
    start = time.perf_counter()
    result.responsibilities(data)
    return time.perf_counter() - start


JOBS: dict[str, Callable[[int], float]] = {
    "train": time_train_step,
    "fit": time_fit_step,
    "responsibilities": time_responsibilities,
}


def _create_mixture(count: int) -> tuple[bt.BNet, tuple[torch.Tensor, torch.Tensor]]:
    """Return the mixture and its data."""
    g = torch.Generator().manual_seed(count)
    data = torch.randn(count, 16, 32, generator=g), torch.randn(count, 16, 32, generator=g)
    return bt.bayesuvius(32, heads=4, slices=2, observe=Normal(1.0), seed=1), data


def _time_step(run: Callable[[int], None], num_short: int, num_long: int) -> float:
    """Return the seconds of one step, from two runs of unequal length."""
    seconds = []
    for steps in (num_short, num_long):
        start = time.perf_counter()
        run(steps)
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / (num_long - num_short)


def run_jobs(processes: int, repeats: int, sizes: dict[str, Sequence[int]], out: str) -> None:
    """Run all jobs in turn, `repeats` times, in each process; rank 0 writes the medians to a file."""
    torch.set_num_threads(1)
    result: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):  # the first turn is a warm-up
        for name, counts in sizes.items():
            for count in counts:
                seconds = JOBS[name](count)
                if repeat:
                    result.setdefault(f"{name} {count}", []).append(seconds)
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps({name: statistics.median(item) for name, item in result.items()}))


def measure(processes: int, repeats: int) -> dict[str, list[Point]]:
    """Return the points `(k, n, seconds)` of each job: strong ones, and weak ones with k times the smallest size."""
    sizes = {name: sorted({*item, item[0] * processes}) for name, item in SIZES.items()}
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free_socket:
        out = Path(folder, "out.json")
        free_socket.bind(("127.0.0.1", 0))
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_socket.getsockname()[1])}
        free_socket.close()
        arguments = [str(processes), str(repeats), json.dumps(sizes), str(out)]
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.scaling", "--work", *arguments],
                cwd=ROOT,
                env={**os.environ, **rendezvous, "OMP_NUM_THREADS": "1", "RANK": str(k), "WORLD_SIZE": str(processes)},
            )
            for k in range(processes)
        ]
        codes = [child.wait() for child in children]
        if any(codes):
            raise SystemExit(f"a run of {processes} processes failed")
        seconds = json.loads(out.read_text())
    return {name: [(processes, n, seconds[f"{name} {n}"]) for n in counts] for name, counts in sizes.items()}


def model_terms(k: int, n: int, *, has_doublings: bool) -> list[float]:
    """Return the coefficients of a, b and c in the model."""
    return [1.0, n / k, *([math.log2(k)] if has_doublings else [])]


def fit_model(points: Sequence[Point]) -> list[float]:
    """Fit a, b and c, none negative, by least squares of relative errors; c is 0 if there is only one process."""
    from scipy.optimize import nnls

    has_doublings = len({k for k, *_ in points}) > 1
    rows = np.array([model_terms(k, n, has_doublings=has_doublings) for k, n, _ in points])
    seconds = np.array([t for *_, t in points])
    result = nnls(rows / seconds[:, None], np.ones(len(points)))[0].tolist()
    return result if has_doublings else [*result, 0.0]


def predict(parameters: Sequence[float], k: int, n: int) -> float:
    """Return the seconds of the model."""
    return sum(p * x for p, x in zip(parameters, model_terms(k, n, has_doublings=True), strict=True))


def format_tables(points: dict[str, list[Point]]) -> list[str]:
    """Return the tables: the parameters, the measured times and the model, and the prediction."""
    lines = ["## The model", "", "| job | a, ms | b, ms per sentence | c, ms | points | worst relative error |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    parameters = {name: fit_model(item) for name, item in points.items()}
    for name, item in points.items():
        a, b, c = (1e3 * p for p in parameters[name])
        worst = max(abs(predict(parameters[name], k, n) / t - 1) for k, n, t in item)
        lines.append(f"| {name} | {a:.2f} | {b:.4f} | {c:.2f} | {len(item)} | {worst:.0%} |")
    head = "| job | processes | sentences | ms | by the model | strong speedup | weak efficiency |"
    lines += ["", "## Measured", "", head, "|---|---|---|---|---|---|---|"]
    for name, item in points.items():
        single = {n: t for k, n, t in item if k == 1}
        minimum = min(single) if single else 0
        for k, n, t in item:
            strong = f"{single[n] / t:.2f}" if n in single and k > 1 else ""
            weak = f"{single[minimum] / t:.2f}" if minimum and n == minimum * k and k > 1 else ""
            modelled = 1e3 * predict(parameters[name], k, n)
            lines.append(f"| {name} | {k} | {n} | {1e3 * t:.2f} | {modelled:.2f} | {strong} | {weak} |")
    lines += ["", f"## Predicted for {GOAL} processes", "", "| job | sentences | strong speedup | weak efficiency |",
              "|---|---|---|---|"]  # fmt: skip
    for name, item in points.items():
        for n in (max(n for _, n, _ in item), GOAL * max(n for _, n, _ in item)):
            speedup = predict(parameters[name], 1, n) / predict(parameters[name], GOAL, n)
            weak = predict(parameters[name], 1, n // GOAL) / predict(parameters[name], GOAL, n)
            lines.append(f"| {name} | {n} | {speedup:.1f} | {weak:.2f} |")
    return lines


LEFT_OUT = f"""
The prediction extrapolates the model to {GOAL} processes. `a` and `b` were fitted to several sizes, `c` only to
{{doublings}}. It omits the network between machines (its delay, and the bytes of gradients over its rate, which do
not grow as log2 k), a slower rank for which all others wait, and caches that hold a smaller share.
"""


def main() -> None:
    """Measure, fit the model, print, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        processes, repeats, sizes, out = args.work
        run_jobs(int(processes), int(repeats), json.loads(sizes), out)
        return
    points: dict[str, list[Any]] = {name: [] for name in JOBS}
    for processes in sorted(set(args.processes)):
        for name, item in measure(processes, args.repeats).items():
            points[name] += item
    doublings = ", ".join(f"{k}" for k in sorted(set(args.processes)))
    lines = [*format_tables(points), LEFT_OUT.format(doublings=f"{doublings} processes")]
    print("\n".join(lines))
    if args.markdown is not None:
        when = f"{datetime.date.today()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
        command = f"python -m benchmarks.scaling --processes {' '.join(map(str, args.processes))}"
        head = f"# Scaling\n\nMeasured on {when}, by `{command}`; medians of {args.repeats}.\n\n"
        about = (__doc__ or "").split("\n\n", 2)[2]
        args.markdown.write_text(head + about + "\n" + "\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
