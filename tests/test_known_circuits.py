"""Methods and measures of the benchmark of known circuits, on formulas of edges whose truth is known."""

from dataclasses import dataclass

import pytest
import torch

from benchmarks.known_circuits import (
    FRACTIONS,
    METHODS,
    CountedRuns,
    Problem,
    compute_curve,
    format_page,
    integrate,
    measure_problem,
    measure_scores,
)

EDGES = ("x -> a", "x -> b", "x -> c", "x -> d", "x -> e", "x -> f", "a -> y", "b -> y")


@dataclass(frozen=True)
class FormulaRuns:
    """Runs whose metric is a formula of the shares of edges that read this run; examples differ in scale."""

    formula: object
    is_swapped: bool = False
    edge_names: tuple[str, ...] = EDGES

    def evaluate_with_grad(self, shares):
        return self.formula(1 - shares if self.is_swapped else shares)[None] * torch.tensor([1.0, 3.0])

    def evaluate(self, retained):
        return torch.stack([self.evaluate_with_grad(row.double()) for row in retained])

    def evaluate_clean(self):
        return self.evaluate_with_grad(torch.ones(len(EDGES), dtype=torch.float64))

    def evaluate_corrupt(self):
        return self.evaluate_with_grad(torch.zeros(len(EDGES), dtype=torch.float64))

    def swap(self):
        return FormulaRuns(self.formula, not self.is_swapped)


FORMULAS = {
    "and": (lambda s: s[0] * s[6], {0, 6}),
    "or": (lambda s: s[0] + s[1] - s[0] * s[1], {0, 1}),
    "sum": (lambda s: 2 * s[0] + s[1] - 0.5 * s[2], {0, 1, 2}),
}


def create_problem(name):
    formula, true = FORMULAS[name]
    runs, ones = FormulaRuns(formula), torch.ones(len(EDGES), dtype=torch.float64)
    gradient = torch.autograd.functional.jacobian(lambda s: 2 * formula(s), ones)
    sizes = {end: 1.0 for edge in EDGES for end in edge.split(" -> ")}
    scores = dict(zip(EDGES, gradient.tolist(), strict=True))
    return Problem(name, frozenset(EDGES[k] for k in true), runs, runs, lambda method: (scores, 3), sizes, sizes)


@pytest.fixture(scope="module")
def tables():
    return {name: measure_problem(create_problem(name)) for name in FORMULAS}


def select(table, column):
    return {method: row[column] for method, row in table.items()}


def test_each_direction_recovers_its_gate(tables):
    assert tables["and"]["exact, noising"]["recall"] == 1 and tables["and"]["exact, denoising"]["recall"] == 0
    assert tables["or"]["exact, noising"]["recall"] == 0 and tables["or"]["exact, denoising"]["recall"] == 1
    for table in tables.values():
        both = table["exact, both"]
        assert (both["average precision"], both["AUC"], both["precision"], both["recall"]) == (1, 1, 1, 1)


def test_a_search_retains_one_branch_of_an_or(tables):
    assert tables["or"]["ACDC"]["recall"] == 0.5 and tables["or"]["ACDC"]["precision"] == 1
    assert tables["and"]["ACDC"]["recall"] == tables["sum"]["ACDC"]["recall"] == 1


def test_a_learned_mask_ranks_the_edges_of_a_conjunction_first(tables):
    assert select(tables["and"], "average precision")["learned mask"] == 1


def test_runs_are_counted(tables):
    counts, edges = select(tables["sum"], "runs"), len(EDGES)
    assert counts["exact, noising"] == edges + 2 and counts["exact, both"] == 2 * (edges + 2)
    assert counts["ACDC"] == 2 + 5 * (edges + 1) and counts["EAP"] == 3 and counts["random"] == 0


def test_the_curve_is_that_of_each_circuit_by_itself():
    problem = create_problem("sum")
    scores = dict(zip(EDGES, (0.3, -2.0, 1.0, 0.2, 0.0, -0.1, 0.0, 0.0), strict=True))
    for by_size in (False, True):
        ranked = sorted(EDGES, key=lambda edge: -abs(scores[edge]) if by_size else -scores[edge])
        expected = []
        for share in FRACTIONS:
            included = ranked[: int(share * len(EDGES))]
            expected.append((2 * (EDGES[0] in included) + (EDGES[1] in included) - 0.5 * (EDGES[2] in included)) / 2.5)
        assert compute_curve(CountedRuns(problem.runs), scores, by_size=by_size) == pytest.approx(expected)


def test_areas_and_ranks_by_their_definitions():
    values = [0.0, 0.1, 0.4, 0.4, 0.9, 1.2, 1.0, 0.7, 0.8, 1.0]
    dense = torch.linspace(0.001, 1, 200_001, dtype=torch.float64)
    knots = torch.tensor(FRACTIONS, dtype=torch.float64)
    right = torch.searchsorted(knots, dense).clamp(1, 9)
    left, table = right - 1, torch.tensor(values, dtype=torch.float64)
    line = table[left] + (table[right] - table[left]) * (dense - knots[left]) / (knots[right] - knots[left])
    assert integrate(values) == pytest.approx(float(torch.trapezoid(line, dense)), abs=1e-6)
    problem = create_problem("sum")
    scores = dict(zip(EDGES, (0.5, -0.2, 0.0, 0.5, 0.1, 0.0, 0.0, 0.0), strict=True))
    measures = measure_scores(problem, scores)
    sizes, is_true = [abs(scores[edge]) for edge in EDGES], [edge in problem.truth for edge in EDGES]
    pairs = [(a > b) + 0.5 * (a == b) for a, t in zip(sizes, is_true, strict=True) if t for b in _false(sizes, is_true)]
    assert measures["AUC"] == pytest.approx(sum(pairs) / len(pairs))
    precisions = [1 / 2, 2 / 3, 3 / 8]  # at the thresholds 0.5, 0.2 and 0, where recall grows by a third
    assert measures["average precision"] == pytest.approx(sum(precisions) / 3)
    assert (measures["precision"], measures["recall"]) == (2 / 4, 2 / 3)


def _false(sizes, is_true):
    return [size for size, true in zip(sizes, is_true, strict=True) if not true]


def test_the_page_has_a_row_for_each_method(tables):
    page = format_page(tables)
    assert all(page.count(f"| {method} |") == 2 for method in METHODS)
