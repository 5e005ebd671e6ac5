"""Do methods that score edges recover the known circuits of compiled programs?

    python -m benchmarks.known_circuits [histogram backup ...] [--pairs 64]

Writes docs/benchmarks/known_circuits.md. A method scores every edge: the score is an estimate of the decrease of the
metric when this edge reads the corrupt run, so an edge that supports the metric has a positive score. The truth is the
set of edges with an effect on some pair of sentences of the program.

Fixed before any result: the pairs (seed 0 for the search, seed 1 for the curves), the options of the methods (`STEPS`,
`TAUS`, `PENALTY`), and the rule that turns scores into a circuit: the edges whose size is at least `SHARE` of the
largest (one half for probabilities). Average precision and AUC rank the edges by the size of their score; ties count
as in scikit-learn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

import bnet_transformer as bt
from benchmarks.report import describe_conditions

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "known_circuits.md"
SHARE = 0.01  # of the largest size of a score: the circuit of a method
SHARES = {"learned mask": 0.5}  # of methods whose scores are probabilities
STEPS = 10  # of integrated gradients
TAUS = (0.001, 0.01, 0.03, 0.1, 0.3)  # thresholds of ACDC, as shares of clean - corrupt
PENALTY, UPDATES, RATE = 0.02, 200, 0.1  # learned mask: weight of the share of edges, Adam steps, learning rate
FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the edges: the grid of MIB
ARROW = " -> "

Scores = Mapping[str, float]


@dataclass
class CountedRuns:
    """Runs of circuits (`edge_names`, `evaluate`, `evaluate_clean`, `evaluate_corrupt`, `swap`), and their number.

    `evaluate(retained)` returns the metric, `[circuit, example]`, of runs in which the edges of a mask read this run
    and all other edges the corrupt run. `evaluate_with_grad(shares)` does so for one circuit with a differentiable
    share of each edge, `[edge]`, where 1 is this run.
    """

    runs: Any
    count: int = 0

    @property
    def edge_names(self) -> tuple[str, ...]:
        return tuple(self.runs.edge_names)

    def evaluate(self, retained: Tensor) -> Tensor:
        """Return the mean metric of each circuit."""
        self.count += len(retained)
        return self.runs.evaluate(retained).double().mean(1)

    def evaluate_with_grad(self, shares: Tensor) -> Tensor:
        """Return the mean metric of a circuit with shares of edges; a forward and a backward run."""
        self.count += 2
        return self.runs.evaluate_with_grad(shares).double().mean()

    def evaluate_ends(self) -> tuple[float, float]:
        """Return the mean metric of the clean and of the corrupt run."""
        self.count += 2
        return float(self.runs.evaluate_clean().double().mean()), float(self.runs.evaluate_corrupt().double().mean())

    def swap(self) -> CountedRuns:
        """Return the same runs with the clean and the corrupt sentences exchanged."""
        return CountedRuns(self.runs.swap())


@dataclass(frozen=True)
class Problem:
    """A program with its true edges, runs on the pairs of the search and on other pairs, and estimates of the package.

    `estimate(method)` returns the scores of `"eap"`, `"eap-ig inputs"` or `"eap-ig activations"`, and the number of its
    runs of all pairs, forward or backward. `writer_sizes` and `reader_sizes` are the mean norms of outputs of writers
    and the norms of the weights of readers.
    """

    name: str
    truth: frozenset[str]
    runs: Any
    held_out: Any
    estimate: Callable[[str], tuple[Scores, int]]
    writer_sizes: Mapping[str, float] = field(default_factory=dict)
    reader_sizes: Mapping[str, float] = field(default_factory=dict)


# ---------------------------------------------------------------- the package


def create_problem(name: str, count: int) -> Problem:
    """Return the problem of a program of the corpus, with `count` pairs of sentences for the search."""
    from bnet_transformer.interventions.edges.runner import build_edge_runner
    from bnet_transformer.programs.corpus import get_program

    known = get_program(name)
    compiled, pairs = known.compiled, known.list_pairs(count, seed=0)
    other_pairs = [pair for pair in known.list_pairs(count, seed=1) if pair not in pairs] or pairs

    def encode(pairs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        clean, corrupt = (
            [compiled.net.sentence(compiled.encode(w)) for w in side] for side in zip(*pairs, strict=True)
        )
        return clean, corrupt

    def estimate(method: str) -> tuple[Scores, int]:
        options: dict[str, Any] = {"metric": create_metric(compiled, pairs), "first_order": True, "direction": "noise"}
        if method != "eap":
            options |= {"steps": STEPS, "convention": method.replace(" inputs", "").replace(" ", "-")}
        result = bt.sweep(*encode(pairs), at="edges", **options)
        groups = 1 + 2 * count_slices(compiled.net) if method == "eap-ig activations" else 1
        count = 3 if method == "eap" else 2 + 2 * STEPS * groups
        return {name: -float(result.values[index]) for index, name in result.names.items()}, count

    runs, held_out = (build_edge_runner(*encode(item), create_metric(compiled, item)) for item in (pairs, other_pairs))
    # The state x_0 is the sum of the writer `embed` and the positions, which are equal in both runs.
    truth = frozenset(edge.replace("x_0 -> ", "embed -> ") for edge in known.truth.edges)
    assert truth <= set(runs.edge_names), f"unknown edges: {sorted(truth - set(runs.edge_names))}"
    return Problem(name, truth, runs, held_out, estimate, *measure_sizes(compiled, pairs))


def create_metric(compiled: Any, pairs: Sequence[Any]) -> Callable[..., Tensor]:
    """Return log P(output of the clean sentence) - log P(output of the corrupt one), summed over words.

    For a numeric output it is the inner product of the outputs and the difference of the outputs of the two sentences.
    """
    first = int(compiled.has_bos)
    clean, corrupt = ([compiled.run(pair[side]) for pair in pairs] for side in (0, 1))
    if not compiled.output_values:
        change = torch.tensor(clean, dtype=torch.float64) - torch.tensor(corrupt, dtype=torch.float64)
        return lambda y: (y[:, first:].flatten(1) * change).sum(1)
    index = {value: k for k, value in enumerate(compiled.output_values)}
    ids, other_ids = (torch.tensor([[index[value] for value in row] for row in rows]) for rows in (clean, corrupt))

    def compare(y: Tensor) -> Tensor:
        logs = y[:, first:]
        return (logs.gather(2, ids[:, :, None]) - logs.gather(2, other_ids[:, :, None])).sum((1, 2))

    return compare


def count_slices(net: bt.BNet) -> int:
    """Return the number of slices of a compiled program."""
    return sum(name.startswith("W_q_") for name in net.parameters)


def measure_sizes(compiled: Any, pairs: Sequence[Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the mean norm of the output of each writer in the clean run, and the norm of each reader's weights."""
    parameters, slices = compiled.net.parameters, count_slices(compiled.net)
    outputs = ["embed", *(f"{role}_{t}" for t in range(slices) for role in ("a", "ffn"))]
    with torch.no_grad():
        values = compiled.module(compiled.to_ids([pair[0] for pair in pairs]), want=outputs)
    writers = {name: values[name] for name in outputs if not name.startswith("a_")}
    readers = {"y": parameters["y.weight"], **{f"ffn_{t}": parameters[f"ffn_{t}.weight_in"] for t in range(slices)}}
    for t in range(slices):
        maps = parameters[f"W_o_{t}.value"]
        for h, weight in enumerate(maps):
            writers[f"a_{t}_{h}"] = values[f"a_{t}"][:, h] @ weight.T
            readers |= {f"{role}_{t}_{h}": parameters[f"W_{role}_{t}.value"][h] for role in "qkv"}
    return {w: float(v.norm(dim=-1).mean()) for w, v in writers.items()}, {
        r: float(v.norm()) for r, v in readers.items()
    }


def list_programs() -> list[str]:
    """Return the names of the programs of the corpus."""
    from bnet_transformer.programs.corpus import CORPUS

    return [known.name for known in CORPUS]


# ---------------------------------------------------------------- methods


def score_randomly(problem: Problem, runs: CountedRuns) -> Scores:
    """Return uniform random numbers (seed 0)."""
    values = torch.rand(len(runs.edge_names), generator=torch.Generator().manual_seed(0))
    return dict(zip(runs.edge_names, values.tolist(), strict=True))


def score_by_size(problem: Problem, runs: CountedRuns) -> Scores:
    """Return the mean norm of the output of the writer times the norm of the weights of the reader."""
    runs.count += 1
    ends = {name: name.split(ARROW) for name in runs.edge_names}
    return {name: problem.writer_sizes[w] * problem.reader_sizes[r] for name, (w, r) in ends.items()}


def score_by_noising(problem: Problem, runs: CountedRuns) -> Scores:
    """Return m(clean) - m(one edge reads the corrupt run), by exact runs."""
    base, _ = runs.evaluate_ends()
    effects = base - runs.evaluate(~torch.eye(len(runs.edge_names), dtype=torch.bool))
    return dict(zip(runs.edge_names, effects.tolist(), strict=True))


def score_by_denoising(problem: Problem, runs: CountedRuns) -> Scores:
    """Return m(one edge reads the clean run) - m(corrupt), by exact runs: noising of the exchanged sentences."""
    swapped = runs.swap()
    scores = score_by_noising(problem, swapped)
    runs.count += swapped.count
    return {name: -score for name, score in scores.items()}


def score_by_both(problem: Problem, runs: CountedRuns) -> Scores:
    """Return the score of noising or of denoising, whichever is greater in size."""
    first, second = score_by_noising(problem, runs), score_by_denoising(problem, runs)
    return {name: max(first[name], second[name], key=abs) for name in first}


def search_acdc(runs: CountedRuns, tau: float) -> Tensor:
    """Return the mask of the edges that ACDC (Conmy et al. 2023, arXiv:2304.14997) retains, `[edge]`.

    From the last edge to the first, an edge is removed if the metric changes by less than tau in size. The paper
    compares KL divergences; here the change of the metric is compared.
    """
    retained = torch.ones(1, len(runs.edge_names), dtype=torch.bool)
    current = float(runs.evaluate(retained))
    for edge in reversed(range(len(runs.edge_names))):
        retained[0, edge] = False
        value = float(runs.evaluate(retained))
        if abs(value - current) < tau:
            current = value
        else:
            retained[0, edge] = True
    return retained[0]


def score_by_acdc(problem: Problem, runs: CountedRuns) -> Scores:
    """Return the largest threshold of `TAUS` at which ACDC retains an edge; 0 at none."""
    clean, corrupt = runs.evaluate_ends()
    scores = torch.zeros(len(runs.edge_names), dtype=torch.float64)
    for share in TAUS:
        scores[search_acdc(runs, share * abs(clean - corrupt))] = share
    return dict(zip(runs.edge_names, scores.tolist(), strict=True))


def score_by_learned_mask(problem: Problem, runs: CountedRuns) -> Scores:
    """Return P(gate > 0) of hard-concrete gates (Louizos et al. 2018, arXiv:1712.01312), one for each edge.

    Adam minimises ((m(gates) - m(clean)) / (m(clean) - m(corrupt)))^2 + PENALTY * (mean P(gate > 0)).
    """
    beta, low, high = 2 / 3, -0.1, 1.1  # the constants of the paper
    clean, corrupt = runs.evaluate_ends()
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((len(runs.edge_names),), 2.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=RATE)
    shift = beta * torch.log(torch.tensor(-low / high))
    for _ in range(UPDATES):
        u = torch.rand(logits.shape, generator=generator, dtype=logits.dtype).clamp(1e-6, 1 - 1e-6)
        gates = (((u.logit() + logits) / beta).sigmoid() * (high - low) + low).clamp(0, 1)
        error = (runs.evaluate_with_grad(gates) - clean) / (clean - corrupt)
        loss = error.square() + PENALTY * (logits - shift).sigmoid().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    probabilities = (logits.detach() - shift).sigmoid()
    return dict(zip(runs.edge_names, probabilities.tolist(), strict=True))


def create_estimate(method: str) -> Callable[[Problem, CountedRuns], Scores]:
    """Return a method of the package that estimates all edges by gradients."""

    def score(problem: Problem, runs: CountedRuns) -> Scores:
        scores, count = problem.estimate(method)
        runs.count += count
        return scores

    return score


METHODS: dict[str, Callable[[Problem, CountedRuns], Scores]] = {
    "random": score_randomly,
    "activation x weight": score_by_size,
    "EAP": create_estimate("eap"),
    f"EAP-IG, inputs, {STEPS} steps": create_estimate("eap-ig inputs"),
    f"EAP-IG, activations, {STEPS} steps": create_estimate("eap-ig activations"),
    "exact, noising": score_by_noising,
    "exact, denoising": score_by_denoising,
    "exact, both": score_by_both,
    "ACDC": score_by_acdc,
    "learned mask": score_by_learned_mask,
}


# ---------------------------------------------------------------- measures


def select_edges(scores: Scores, share: float = SHARE) -> frozenset[str]:
    """Return the circuit of scores by the rule: the edges of at least this share of the largest size.

    >>> sorted(select_edges({"a": 1.0, "b": -0.5, "c": 0.001, "d": 0.0}))
    ['a', 'b']
    """
    largest = max(map(abs, scores.values()))
    return frozenset(name for name, score in scores.items() if largest and abs(score) >= share * largest)


def compute_curve(runs: CountedRuns, scores: Scores, *, by_size: bool) -> list[float]:
    """Return f(k) = (m(C_k) - m(corrupt)) / (m(clean) - m(corrupt)) for the shares k of the edges in `FRACTIONS`.

    C_k has the first int(k E) edges by score (in the direction of m(clean) - m(corrupt)), or by its size. Ties are in
    the order of the edges.
    """
    clean, corrupt = runs.evaluate_ends()
    values = torch.tensor([scores[name] for name in runs.edge_names], dtype=torch.float64)
    order = (values.abs() if by_size else values * (1 if clean > corrupt else -1)).argsort(descending=True, stable=True)
    retained = torch.zeros(len(FRACTIONS), len(order), dtype=torch.bool)
    for row, share in enumerate(FRACTIONS):
        retained[row, order[: int(share * len(order))]] = True
    return ((runs.evaluate(retained) - corrupt) / (clean - corrupt)).tolist()


def integrate(values: Sequence[float]) -> float:
    """Return the area under values at `FRACTIONS`, by trapezoids on a linear scale; of a constant 1 it is 0.999.

    >>> round(integrate([1.0] * 10), 6)
    0.999
    """
    ends = zip(pairwise(FRACTIONS), pairwise(values), strict=True)
    return sum((right - left) * (first + last) / 2 for (left, right), (first, last) in ends)


def measure_scores(problem: Problem, scores: Scores, share: float = SHARE) -> dict[str, float]:
    """Return average precision, AUC, precision and recall by the rule, CPR (ranked by score) and CMD (by size)."""
    held_out = CountedRuns(problem.held_out)
    names = held_out.edge_names
    is_true, sizes = [name in problem.truth for name in names], [abs(scores[name]) for name in names]
    selected = select_edges(scores, share)
    correct = len(selected & problem.truth)
    return {
        "average precision": float(average_precision_score(is_true, sizes)),
        "AUC": float(roc_auc_score(is_true, sizes)),
        "precision": correct / len(selected) if selected else 1.0,
        "recall": correct / len(problem.truth),
        "CPR": integrate(compute_curve(held_out, scores, by_size=False)),
        "CMD": integrate([abs(1 - value) for value in compute_curve(held_out, scores, by_size=True)]),
    }


def measure_problem(problem: Problem) -> dict[str, dict[str, float]]:
    """Return the measures of each method, with its number of runs of all pairs and its seconds."""
    table = {}
    for method, score in METHODS.items():
        runs, start = CountedRuns(problem.runs), time.perf_counter()
        scores = score(problem, runs)
        cost = {"runs": runs.count, "seconds": time.perf_counter() - start}
        table[method] = measure_scores(problem, scores, SHARES.get(method, SHARE)) | cost
    return table


# ---------------------------------------------------------------- the page


def format_page(tables: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return the page: the mean of each measure over the programs, then average precision by program."""
    columns = list(next(iter(next(iter(tables.values())).values())))
    measured = "; ".join(f"{subject}: {value}" for subject, value in describe_conditions().items())
    lines = ["# Benchmarks: known circuits", "", *(__doc__ or "").splitlines(), "", f"Measured on {measured}.", ""]
    lines += [f"Means over {len(tables)} programs:", "", f"| method | {' | '.join(columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for method in METHODS:
        means = [sum(table[method][column] for table in tables.values()) / len(tables) for column in columns]
        lines.append(f"| {method} | " + " | ".join(f"{value:.3g}" for value in means) + " |")
    lines += ["", f"Average precision (recall by the rule):\n\n| method | {' | '.join(tables)} |"]
    lines.append("|---" * (len(tables) + 1) + "|")
    for method in METHODS:
        cells = [
            f"{table[method]['average precision']:.2f} ({table[method]['recall']:.2f})" for table in tables.values()
        ]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure programs, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.known_circuits", description=__doc__)
    parser.add_argument("programs", nargs="*", help="names of programs; default: all")
    parser.add_argument("--pairs", type=int, default=64, help="pairs of the search, at most 64")
    args = parser.parse_args(argv)
    names = args.programs or list_programs()
    page = format_page({name: measure_problem(create_problem(name, args.pairs)) for name in names})
    PAGE.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
