"""The benchmark of known circuits: programs are recovered, and methods and measures have their definitions."""

from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.edge_methods import BASELINE, BY_PAIRS, METHODS, RECOVERED, Problem, Recovery
from benchmarks.known_circuits import (
    TRUTH,
    ProgramResult,
    compare_with_random,
    create_problem,
    format_page,
    measure_problem,
    measure_recovery,
)
from bnet_transformer.interventions.circuit_runs import CircuitRuns
from bnet_transformer.programs import CORPUS

QUICK = ("either", "backup", "cancelling", "induction, norm")
EDGES = ("x -> a", "x -> b", "x -> c", "x -> d", "x -> e", "x -> f", "a -> y", "b -> y")


def parametrize_programs():
    names = [known.name for known in CORPUS]
    return pytest.mark.parametrize(
        "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )


@parametrize_programs()
def test_exact_effects_in_both_directions_recover_each_program(name):
    """With 64 pairs, and the rule of the benchmark: the circuit is the truth by effect."""
    problem = create_problem(name, 64)
    recovery = METHODS[RECOVERED](problem)
    assert recovery.circuit == problem.truth
    measures = measure_recovery(problem.truth, recovery)
    assert (measures["precision"], measures["recall"]) == (1, 1) and measures["average precision"] == pytest.approx(1)


def test_effects_of_the_sweep_are_those_of_circuits_without_one_edge():
    problem = create_problem("induction, norm", 8)
    edges = problem.runs.edge_names
    for method, runs in (("exact, noising", problem.runs), ("exact, denoising", problem.swapped)):
        effects = runs.evaluate_clean() - runs.evaluate(~torch.eye(len(edges), dtype=torch.bool))
        sign = 1 if runs is problem.runs else -1
        expected = dict(zip(edges, (sign * effects).mean(1).tolist(), strict=True))
        assert METHODS[method](problem).scores == pytest.approx(expected, abs=1e-8)


# formulas of edges, whose truth is known


@dataclass(eq=False)
class FormulaRuns(CircuitRuns):
    """Runs whose metric is a formula of the shares of edges that read this run; examples differ in scale."""

    formula: object
    is_swapped: bool = False
    edge_names: tuple[str, ...] = EDGES

    def evaluate_with_grad(self, shares):
        return self.formula(1 - shares if self.is_swapped else shares)[None] * torch.tensor([1.0, 3.0])

    def evaluate(self, retained):
        return torch.stack([self.evaluate_with_grad(row.double()) for row in retained])

    def swap(self):
        return replace(self, is_swapped=not self.is_swapped)


FORMULAS = {
    "and": (lambda s: s[0] * s[6], {0, 6}),
    "or": (lambda s: s[0] + s[1] - s[0] * s[1], {0, 1}),
    "sum": (lambda s: 2 * s[0] + s[1] - 0.5 * s[2], {0, 1, 2}),
}


def create_formula_problem(name):
    formula, true = FORMULAS[name]
    runs = FormulaRuns(formula)

    def sweep(direction, method="exact"):
        base = runs if direction == "noise" else runs.swap()
        shares = torch.full((len(EDGES),), float(direction == "noise"), dtype=torch.float64)
        change = -1 if direction == "noise" else 1
        if method != "exact":
            effects = change * torch.autograd.functional.jacobian(lambda s: 2 * formula(s), shares)
        else:
            retained = ~torch.eye(len(EDGES), dtype=torch.bool)
            effects = (base.evaluate(retained) - base.evaluate_clean()).mean(1)
        return dict(zip(EDGES, effects.tolist(), strict=True))

    sizes = {end: 1.0 for edge in EDGES for end in edge.split(" -> ")}
    return Problem(name, frozenset(EDGES[k] for k in true), runs, runs, sweep, 1, sizes, sizes)


@pytest.fixture(scope="module")
def problems():
    return {name: create_formula_problem(name) for name in FORMULAS}


@pytest.fixture(scope="module")
def results(problems):
    return {name: measure_problem(problem) for name, problem in problems.items()}


@pytest.fixture(scope="module")
def tables(results):
    return {name: table for name, (_, table) in results.items()}


def test_each_direction_recovers_its_gate(tables):
    for method in ("exact", "ACDC"):
        assert tables["and"][f"{method}, noising"]["recall"] == 1 > tables["or"][f"{method}, noising"]["recall"]
        assert tables["or"][f"{method}, denoising"]["recall"] == 1 > tables["and"][f"{method}, denoising"]["recall"]
        for table in tables.values():
            both = table[f"{method}, both"]
            assert (both["AUC"], both["precision"], both["recall"]) == (1, 1, 1)
    assert tables["or"]["EAP"]["recall"] == 0 and tables["or"]["ACDC, noising"]["recall"] == 0.5


def test_a_learned_mask_ranks_the_edges_of_a_conjunction_first(tables):
    assert tables["and"]["learned mask"]["average precision"] == 1


def test_runs_are_counted(tables):
    counts = {method: row["runs"] for method, row in tables["sum"].items()}
    assert counts["exact, noising"] == len(EDGES) + 2 and counts["exact, both"] == 2 * (len(EDGES) + 2)
    assert counts["EAP"] == 3 and counts["IG"] == 22 and counts["EAP-IG activations"] == 62 and counts[BASELINE] == 0
    assert counts["ACDC, noising"] + counts["ACDC, denoising"] == counts["ACDC, both"] > 5 * 2 * len(EDGES)


def test_ranks_and_circuits_by_their_definitions(problems):
    truth = problems["sum"].truth
    scores = dict(zip(EDGES, (0.5, -0.2, 0.0, 0.5, 0.1, 0.0, 0.0, 0.0), strict=True))
    measures = measure_recovery(truth, Recovery(scores, frozenset({"x -> a", "x -> b", "x -> d", "x -> e"}), 0))
    sizes = {edge: abs(score) for edge, score in scores.items()}
    pairs = [(sizes[a] > sizes[b]) + 0.5 * (sizes[a] == sizes[b]) for a in truth for b in set(EDGES) - truth]
    assert measures["AUC"] == pytest.approx(sum(pairs) / len(pairs))
    precisions = [1 / 2, 2 / 3, 3 / 8]  # at the thresholds 0.5, 0.2 and 0, where recall grows by a third
    assert measures["average precision"] == pytest.approx(sum(precisions) / 3)
    assert (measures["precision"], measures["recall"], measures["recovered"]) == (2 / 4, 2 / 3, 0)


def test_the_page_has_the_rows_of_each_method_and_program(problems, results):
    measured = {}
    for name, (recoveries, table) in results.items():
        circuits = {method: recovery.circuit for method, recovery in recoveries.items()}
        tests = compare_with_random(problems[name], recoveries[RECOVERED].circuit)
        measured[name] = ProgramResult(problems[name], recoveries, table, tests, {1: circuits, 64: circuits})
    assert measured["or"].count_errors("ACDC, noising") == (1, 0)
    assert measured["sum"].measure_margin() == (0.25, 0)
    page = format_page(measured, 0.0)
    rows = {name: page.count(f"\n| {name} |") for name in (*FORMULAS, TRUTH, BASELINE, *METHODS)}
    assert rows == dict.fromkeys((*FORMULAS, *METHODS), 2) | {TRUTH: 1, BASELINE: 1} | dict.fromkeys(BY_PAIRS, 4)
