"""Do methods that score edges recover the known circuits of compiled programs?

    python -m benchmarks.known_circuits [histogram backup ...] [--pairs 64]

The programs are those of `programs.CORPUS`, the edges those of `net.edges()`. The truth is the set of edges with an
effect on the output in some of 1,024 pairs of sentences (`programs.true_edges`). A method sees at most 64 pairs and
scores every edge: the score is an estimate of the decrease of the metric when this edge reads the corrupt run, so an
edge that supports the metric has a positive score. The metric of a pair is log P(output of the clean sentence) -
log P(output of the corrupt one), summed over words; for numbers, the product of the output and the difference.

Fixed before any result: the pairs (seed 0 for the search; seed 1, without those of the search, for curves and tests),
the options of the methods (`STEPS`, `TAUS`, `PENALTY`, `UPDATES`, `RATE`), and the rule that turns scores into a
circuit: the edges whose size is at least 1% of the largest, or half of the largest for the probabilities of a mask.

Decided after the exact methods had been run: the circuit of a search is that of the same 1%, of clean - corrupt (two
of its circuits had been seen); random circuits have as many edges as the truth; a quarter of the pairs of `dyck` is
held out, because no others exist; and the table of single pairs. No threshold was changed after a result.

- **average precision**, **AUC**: edges ranked by the size of the score; ties count as in scikit-learn.
- **precision**, **recall**, **recovered**: of the circuit by the rule; the programs with exactly the true edges.
- **CPR**, **CMD**, **log-k area**: of `bt.faithfulness_curves`, on other pairs than those that were scored. The row
  `truth` scores true edges 1 and other edges 0. Its ties are in the order of the edges, so a ranking of the true edges
  by their effects can have a larger CPR.
- **runs**: forward or backward runs of all pairs, counted in searches and masks; for sweeps by the number of edges and
  steps. **seconds**: of one core (CPU time), without the construction of the pairs.

The methods:

- **activation x weight**: the mean norm of the output of the writer times the norm of the weights of the reader.
- **exact**: `bt.sweep(at="edges", direction=...)`; *both* is the greater of the two in size.
- **EAP**, **IG**, **EAP-IG**: the same with `method=bt.Gradient()`: by gradients at the clean run, or at 10 steps by
  the midpoint rule, or with `rule="left"` (inputs) and `rule="activations"`.
- **ACDC**: the search of `bt.circuit(at="edges", direction=...)`. The score of an edge is the largest threshold, of
  0.1, 1, 3, 10 and 30% of clean - corrupt, at which it is retained.
- **learned mask**: hard-concrete gates (Louizos et al. 2018, arXiv:1712.01312), trained by 200 steps of Adam to restore
  the metric with few edges.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

import bnet_transformer as bt
from benchmarks.edge_methods import BASELINE, BY_PAIRS, METHODS, RECOVERED, Problem, Recovery, Scores
from benchmarks.report import describe_conditions
from bnet_transformer._core.naming import split_path
from bnet_transformer.interventions.circuit import CircuitTests, run_tests
from bnet_transformer.interventions.curves import MIB_SHARES, measure_curves
from bnet_transformer.interventions.edge_runs import build_edge_runner
from bnet_transformer.programs.corpus import CORPUS, get_program

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "known_circuits.md"
FEWER_PAIRS, SINGLE_PAIRS = (1, 4, 16), 8  # numbers of pairs of further searches; searches with one pair
DRAWS = 200  # random circuits of a test
TRUTH = "truth"  # the row of the true edges
DIFFICULT = ("either", "backup", "redundant", "cancelling", "induction, norm")  # programs whose edges are named

Table = dict[str, dict[str, float]]  # measures by method


# ---------------------------------------------------------------- the package


def create_problem(name: str, count: int, first: int = 0) -> Problem:
    """Return the problem of a program of the corpus, with `count` pairs for the search, from `first` on."""
    known = get_program(name)
    compiled, pairs = known.compiled, known.list_pairs(first + count, seed=0)[first:]
    other_pairs = [pair for pair in known.list_pairs(64, seed=1) if pair not in pairs]
    if not other_pairs:  # the program has no more than `count` pairs
        pairs, other_pairs = pairs[: -(len(pairs) // 4)], pairs[-(len(pairs) // 4) :]
    clean, corrupt, metric = encode_pairs(compiled, pairs)

    def sweep(**options: Any) -> Scores:
        result = bt.sweep(clean, corrupt, at="edges", metric=metric, **options)
        return {edge: float(result.values[index]) for index, edge in result.names.items()}

    runs, held_out = (build_edge_runner(*encode_pairs(compiled, items)) for items in (pairs, other_pairs))
    slices = len(compiled.layout.heads)
    return Problem(name, known.truth.edges, runs, held_out, sweep, slices, *measure_sizes(compiled, pairs))


def encode_pairs(compiled: Any, pairs: Sequence[Any]) -> tuple[list[Any], list[Any], Callable[..., Tensor]]:
    """Return the clean sentences, the corrupt sentences, and the metric."""
    clean, corrupt = ([compiled.net.sentence(compiled.encode(w)) for w in side] for side in zip(*pairs, strict=True))
    return clean, corrupt, create_metric(compiled, pairs)


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


def measure_sizes(compiled: Any, pairs: Sequence[Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the mean norm of the output of each writer in the clean run, and the norm of each reader's weights."""
    parameters, slices = compiled.net.parameters, len(compiled.layout.heads)
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


# ---------------------------------------------------------------- measures


def measure_problem(problem: Problem) -> tuple[dict[str, Recovery], Table]:
    """Return the scores and circuits of each method, and their measures with runs and seconds."""
    reference = {name: float(name in problem.truth) for name in problem.runs.edge_names}
    recoveries, seconds = {TRUTH: Recovery(reference, problem.truth, 0)}, {TRUTH: 0.0}
    problem.runs.evaluate_clean()  # builds what all circuits share
    for method, score in METHODS.items():
        start = time.process_time()
        recoveries[method] = score(problem)
        seconds[method] = recoveries[method].seconds + time.process_time() - start
    scores = {method: recovery.scores for method, recovery in recoveries.items()}
    curves = measure_curves(problem.held_out, scores, MIB_SHARES, 0, confidence=0.95, resamples=1, seed=0)
    table = {}
    for method, recovery in recoveries.items():
        areas = {"CPR": curves.cpr[method], "CMD": curves.cmd[method], "log-k area": curves.log_area[method]}
        cost = {"runs": recovery.runs, "seconds": seconds[method]}
        table[method] = measure_recovery(problem.truth, recovery) | areas | cost
    return recoveries, table


def measure_recovery(truth: frozenset[str], recovery: Recovery) -> dict[str, float]:
    """Return average precision and AUC of the scores, and precision and recall of the circuit."""
    is_true, sizes = [name in truth for name in recovery.scores], [abs(score) for score in recovery.scores.values()]
    correct = len(recovery.circuit & truth)
    return {
        "average precision": float(average_precision_score(is_true, sizes)),
        "AUC": float(roc_auc_score(is_true, sizes)),
        "precision": correct / len(recovery.circuit) if recovery.circuit else 1.0,
        "recall": correct / len(truth),
        "recovered": float(recovery.circuit == truth),
    }


def compare_with_random(problem: Problem, circuit: frozenset[str]) -> CircuitTests:
    """Compare a circuit with random ones on the other pairs, as `Circuit.test` does."""
    positions = range(len(problem.held_out.evaluate_clean()))
    return run_tests(problem.held_out, sorted(circuit), positions, DRAWS, 0, is_in_sample=False)


@dataclass(frozen=True)
class ProgramResult:
    """The results of a program: of each method, of the tests of the recovered circuit, and by the number of pairs."""

    problem: Problem
    recoveries: Mapping[str, Recovery]
    table: Table
    tests: CircuitTests
    by_pairs: Mapping[int, Mapping[str, frozenset[str]]]
    by_single_pair: Sequence[Mapping[str, frozenset[str]]] = ()

    def count_errors(self, method: str) -> tuple[int, int]:
        """Return the number of true edges that a circuit misses, and of edges that are not true."""
        circuit, truth = self.recoveries[method].circuit, self.problem.truth
        return len(truth - circuit), len(circuit - truth)

    def measure_margin(self) -> tuple[float, float]:
        """Return the least exact score of a true edge, and the greatest of another, as shares of the largest score."""
        sizes = {name: abs(score) for name, score in self.recoveries[RECOVERED].scores.items()}
        largest, truth = max(sizes.values()), self.problem.truth
        false_sizes = [size for name, size in sizes.items() if name not in truth]
        return min(sizes[name] for name in truth) / largest, max(false_sizes, default=0.0) / largest


def measure_program(name: str, count: int) -> ProgramResult:
    """Measure a program of the corpus with `count` pairs, and some methods with fewer pairs."""
    problem = create_problem(name, count)
    recoveries, table = measure_problem(problem)
    by_pairs = {count: {method: recoveries[method].circuit for method in BY_PAIRS}}
    for pairs in FEWER_PAIRS:
        by_pairs[pairs] = find_circuits(create_problem(name, min(pairs, count)))
    singles = range(SINGLE_PAIRS if name in DIFFICULT else 0)
    by_single_pair = [find_circuits(create_problem(name, 1, first)) for first in singles]
    tests = compare_with_random(problem, recoveries[RECOVERED].circuit)
    return ProgramResult(problem, recoveries, table, tests, dict(sorted(by_pairs.items())), by_single_pair)


def find_circuits(problem: Problem) -> dict[str, frozenset[str]]:
    """Return the circuits of the methods that are compared by the number of pairs."""
    return {method: score(problem).circuit for method, score in BY_PAIRS.items()}


# ---------------------------------------------------------------- the page


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table of Markdown, with an empty line after it."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)] + [""]


def format_number(value: float) -> str:
    """Return a number with three significant digits; numbers below 0.001 are 0."""
    return f"{value:.0f}" if value >= 100 or value < 0.001 else f"{value:.3g}"


def list_missed(result: ProgramResult, circuits: Sequence[frozenset[str]]) -> str:
    """Return the names of the true edges that circuits miss, with the number of circuits if there are several."""
    counts = {edge: sum(edge not in circuit for circuit in circuits) for edge in sorted(result.problem.truth)}
    missed = [f"`{edge}`" + f" {count}" * (len(circuits) > 1) for edge, count in counts.items() if count]
    return ", ".join(missed) or "none"


def format_page(results: Mapping[str, ProgramResult], seconds: float) -> str:
    """Return the page: means over programs, each program, missed edges, fewer pairs, and tests of circuits."""
    measured = "; ".join(v if s == "date" else f"{s}: {v}" for s, v in describe_conditions().items())
    introduction = (__doc__ or "").replace("    python", "```bash\npython").replace("[--pairs 64]", "[--pairs 64]\n```")
    lines = ["# Benchmarks: known circuits", "", *introduction.splitlines(), ""]
    lines += [
        "This page is written by the script; not edited by hand.",
        f"Measured on {measured}; {seconds:.0f} s in all.",
        "",
    ]
    lines += [f"## Means over {len(results)} programs", "", *format_means(results)]
    lines += ["## Each program", "", *format_programs(results)]
    lines += ["## Missed edges", "", *format_missed(results)]
    lines += ["## Fewer pairs", "", *format_pairs(results)]
    lines += ["## The recovered circuits", "", *format_tests(results)]
    return "\n".join(lines).rstrip() + "\n"


def format_means(results: Mapping[str, ProgramResult]) -> list[str]:
    """Return the table of means; `recovered` is a count."""
    tables = [result.table for result in results.values()]
    rows = []
    for method in (TRUTH, *METHODS):
        sums = {column: sum(table[method][column] for table in tables) for column in tables[0][method]}
        means = {column: format_number(total / len(tables)) for column, total in sums.items()}
        rows.append([method, *(means | {"recovered": f"{sums['recovered']:.0f} of {len(tables)}"}).values()])
    return format_table(["method", *tables[0][TRUTH]], rows)


def format_programs(results: Mapping[str, ProgramResult]) -> list[str]:
    """Return the table of average precision and errors of the circuit, by program."""
    methods = [method for method in METHODS if method != BASELINE]
    rows = []
    for name, result in results.items():
        problem, cells = result.problem, []
        for method in methods:
            missed, false = result.count_errors(method)
            errors = f" -{missed}" * bool(missed) + f" +{false}" * bool(false)
            cells.append(f"{result.table[method]['average precision']:.2g}{errors}")
        rows.append([name, f"{len(problem.truth)} of {len(problem.runs.edge_names)}", *cells])
    text = "Average precision; then the number of true edges that the circuit misses (-), and of other edges in it (+)."
    return [text, "", *format_table(["program", "true edges", *methods], rows)]


def format_missed(results: Mapping[str, ProgramResult]) -> list[str]:
    """Return the table of missed edges, by channel of the reader, and by name for the difficult programs."""
    channels = {"queries, keys": "qk", "values": "v", "steps": "f", "readout": "y"}
    shown = [name for name in DIFFICULT if name in results]
    rows = []
    for method in (m for m in METHODS if m != BASELINE):
        pairs = [(result.problem.truth, result.recoveries[method].circuit) for result in results.values()]
        cells = []
        for initials in channels.values():
            edges = [(edge, c) for truth, c in pairs for edge in truth if split_path(edge)[1][0] in initials]
            cells.append(f"{sum(edge not in circuit for edge, circuit in edges)} of {len(edges)}")
        named = (list_missed(results[name], [results[name].recoveries[method].circuit]) for name in shown)
        rows.append([method, *cells, *named])
    text = (
        "True edges that the circuits miss: by the channel of the reader in all programs, and by name in five programs."
    )
    return [text, "", *format_table(["method", *channels, *shown], rows)]


def format_pairs(results: Mapping[str, ProgramResult]) -> list[str]:
    """Return the tables of mean recall by the number of pairs, and of edges that single pairs do not show."""
    counts = list(next(iter(results.values())).by_pairs)
    shown = [name for name in DIFFICULT if name in results]
    rows, named = [], []
    for method in BY_PAIRS:
        cells = [method]
        for count in counts:
            pairs = [(result.problem.truth, result.by_pairs[count][method]) for result in results.values()]
            recall = sum(len(truth & circuit) / len(truth) for truth, circuit in pairs) / len(pairs)
            cells.append(f"{recall:.2f} ({sum(truth == circuit for truth, circuit in pairs)})")
        rows.append(cells)
        singles = ([circuits[method] for circuits in results[name].by_single_pair] for name in shown)
        named.append([method, *(list_missed(results[name], c) for name, c in zip(shown, singles, strict=True))])
    text = "Mean recall, and the number of programs with exactly the true edges, by the number of pairs of the search."
    single = f"True edges that are missed with one pair, and in how many of the first {SINGLE_PAIRS} pairs."
    header = ["method", *(f"{n} pair{'s' * (n > 1)}" for n in counts)]
    return [text, "", *format_table(header, rows), single, "", *format_table(["method", *shown], named)]


def format_tests(results: Mapping[str, ProgramResult]) -> list[str]:
    """Return the table of the margins and tests of the circuits of `RECOVERED`."""
    rows = []
    for name, result in results.items():
        tests, size, (true, false) = result.tests, len(result.recoveries[RECOVERED].circuit), result.measure_margin()
        possible = 1 / (1 + min(DRAWS, len(result.problem.runs.edge_names) - size))
        values = tests.sufficiency, tests.necessity, max(tests.minimality.values()), possible
        margin, distance = (f"{true:.2g}", f"{false:.1g}"), f"{tests.distance:.1g} of {tests.removed_distance:.2g}"
        rows.append([name, *margin, distance, *(f"{value:.2g}" for value in values), str(tests.examples)])
    header = ["program", "least true score", "greatest other score", "distance", "sufficiency p", "necessity p"]
    text = [
        f"The circuits of `{RECOVERED}`: the least score of a true edge and the greatest of another, as shares of the",
        "largest score (the rule divides at 0.01); and `found.test()` (Shi et al. 2024, arXiv:2410.13032) on other",
        "pairs: the distance of the circuit to the clean run, of that without its edges, and p values against 200",
        "random circuits of as many edges. The last two are the largest p of its edges, and the least possible p.",
    ]
    return [*text, "", *format_table([*header, "minimality p", "least possible", "pairs"], rows)]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure programs, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.known_circuits", description=__doc__)
    parser.add_argument("programs", nargs="*", help="names of programs; default: all")
    parser.add_argument("--pairs", type=int, default=64, help="pairs of the search, at most 64")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    start = time.perf_counter()
    measure_problem(create_problem("shift", 4))  # imports and first calls are no part of the seconds
    names = args.programs or [known.name for known in CORPUS]
    results = {}
    for name in names:
        results[name] = measure_program(name, args.pairs)
        print(f"{time.perf_counter() - start:.0f} s: {name}", file=sys.stderr, flush=True)
    page = format_page(results, time.perf_counter() - start)
    PAGE.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
