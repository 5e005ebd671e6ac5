"""Methods that score the edges of a problem, and the circuits that they retain by a rule fixed beforehand."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer._core.naming import split_path
from bnet_transformer.interventions.acdc import search_circuit
from bnet_transformer.interventions.circuit_runs import CircuitRuns

SHARE = 0.01  # of the largest size of a score: the circuit of a method; of clean - corrupt: the threshold of a search
MASK_SHARE = 0.5  # of the largest probability of a learned mask
STEPS = 10  # of integrated gradients
TAUS = (0.001, 0.01, 0.03, 0.1, 0.3)  # thresholds of ACDC, as shares of clean - corrupt
PENALTY, UPDATES, RATE = 0.02, 200, 0.1  # learned mask: weight of the share of edges, Adam steps, learning rate
BASELINE = "random edges"
RECOVERED = "exact, both"  # the method whose circuits are tested

Scores = Mapping[str, float]


@dataclass
class CountedRuns(CircuitRuns):
    """Runs of circuits that count themselves; `swapped` are those with the clean and the corrupt sentences exchanged.

    `counts` has one number, which both share.
    """

    runs: Any
    swapped: Any
    counts: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        self.edge_names = tuple(self.runs.edge_names)

    def evaluate(self, retained: Tensor) -> Tensor:
        """Return the metric of each circuit, `[circuit, example]`."""
        self.counts[0] += len(retained)
        return self.runs.evaluate(retained)

    def evaluate_with_grad(self, shares: Tensor) -> Tensor:
        """Return the metric of a circuit with a share of each edge, `[example]`; a forward and a backward run."""
        self.counts[0] += 2
        return self.runs.evaluate_with_grad(shares)

    def evaluate_clean(self) -> Tensor:
        """Return the metric of the clean run, `[example]`."""
        self.counts[0] += 1
        return self.runs.evaluate_clean()

    def evaluate_corrupt(self) -> Tensor:
        """Return the metric of the corrupt run, `[example]`."""
        self.counts[0] += 1
        return self.runs.evaluate_corrupt()

    def swap(self) -> CountedRuns:
        """Return the same runs with the clean and the corrupt sentences exchanged."""
        return CountedRuns(self.swapped, self.runs, self.counts)

    @property
    def edge_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the edges that a search tests together."""
        return self.runs.edge_groups

    def find_connected(self, retained: Tensor) -> Tensor:
        """Return the mask of the edges that lead to the metric along the retained ones."""
        return self.runs.find_connected(retained)


@dataclass(frozen=True)
class Recovery:
    """What a method returns: the scores of all edges, its circuit, and the number of its runs of all pairs.

    `seconds` are those of results that the method takes from earlier calls.
    """

    scores: Scores
    circuit: frozenset[str]
    runs: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Problem:
    """A program with its true edges, the runs on the pairs of the search and on other pairs, and sweeps over edges.

    `sweep(**options)` returns the effects of `bt.sweep(at="edges", **options)` on the pairs of the search.
    `writer_sizes` and `reader_sizes` are the mean norms of the outputs of writers and the norms of weights of readers.
    """

    name: str
    truth: frozenset[str]
    runs: Any
    held_out: Any
    sweep: Callable[..., Scores]
    slices: int
    writer_sizes: Mapping[str, float] = field(default_factory=dict)
    reader_sizes: Mapping[str, float] = field(default_factory=dict)
    searches: dict[object, Recovery] = field(default_factory=dict, repr=False)  # a cache

    @cached_property
    def swapped(self) -> Any:
        """Return the runs of the search with the clean and the corrupt sentences exchanged."""
        return self.runs.swap()

    def count_runs(self) -> CountedRuns:
        """Return the runs of the search with a new count."""
        return CountedRuns(self.runs, self.swapped)


def select_edges(scores: Scores, share: float = SHARE) -> frozenset[str]:
    """Return the circuit of scores by the rule: the edges of at least this share of the largest size.

    >>> sorted(select_edges({"a": 1.0, "b": -0.5, "c": 0.001, "d": 0.0}))
    ['a', 'b']
    """
    largest = max(map(abs, scores.values()))
    return frozenset(name for name, score in scores.items() if largest and abs(score) >= share * largest)


def score_randomly(problem: Problem) -> Recovery:
    """Score edges by random numbers, which depend on the name of the program; the circuit has the size of the truth."""
    generator = random.Random(problem.name)
    scores = {name: generator.random() for name in problem.runs.edge_names}
    return Recovery(scores, frozenset(sorted(scores, key=lambda name: -scores[name])[: len(problem.truth)]), 0)


def score_by_size(problem: Problem) -> Recovery:
    """Score by the mean norm of the output of the writer times the norm of the weights of the reader."""
    ends = {name: split_path(name) for name in problem.runs.edge_names}
    scores = {name: problem.writer_sizes[w] * problem.reader_sizes[r] for name, (w, r) in ends.items()}
    return Recovery(scores, select_edges(scores), 1)


def sweep_exactly(*directions: str) -> Callable[[Problem], Recovery]:
    """Return the method of exact effects, of which the greatest in size is the score."""

    def score(problem: Problem) -> Recovery:
        tables = [(1 if d == "denoise" else -1, problem.sweep(direction=d)) for d in directions]
        scores = {name: max((sign * t[name] for sign, t in tables), key=abs) for name in problem.runs.edge_names}
        return Recovery(scores, select_edges(scores), len(directions) * (len(scores) + 2))

    return score


def sweep_by_gradients(method: bt.Gradient) -> Callable[[Problem], Recovery]:
    """Return a method that estimates the effects of noising by gradients."""

    def score(problem: Problem) -> Recovery:
        effects = problem.sweep(direction="noise", method=method)
        # One forward and one backward run at each step, and both ends; activations are set one group after the other.
        groups = 1 + 2 * problem.slices if method.rule == "activations" else 1
        scores = {name: -effects[name] for name in problem.runs.edge_names}
        return Recovery(scores, select_edges(scores), 2 + 2 * STEPS * groups if method.steps else 3)

    return score


def search_acdc(*directions: str, taus: Sequence[float] = TAUS) -> Callable[[Problem], Recovery]:
    """Return the search of `bt.circuit` on all pairs, at each of these thresholds; the circuit is that at `SHARE`.

    Of two directions, an edge has the greater score, and the circuit is the union, as with `direction="both"`.
    """

    def score(problem: Problem) -> Recovery:
        results = []
        for key in ((direction, *taus) for direction in directions):
            if key not in problem.searches:
                start = time.process_time()
                result = search_in_direction(problem, key[0], taus)
                problem.searches[key] = replace(result, seconds=time.process_time() - start)
                results.append(result)
            else:
                results.append(problem.searches[key])
        scores = {name: max(result.scores[name] for result in results) for name in problem.runs.edge_names}
        circuit = frozenset[str]().union(*(result.circuit for result in results))
        return Recovery(scores, circuit, sum(r.runs for r in results), sum(r.seconds for r in results))

    return score


def search_in_direction(problem: Problem, direction: str, taus: Sequence[float]) -> Recovery:
    """Search at each threshold."""
    runs = problem.count_runs()
    clean, corrupt = runs.evaluate_clean(), runs.evaluate_corrupt()
    total, examples = float((clean - corrupt).abs().mean()), np.arange(len(clean))
    scores, circuit = dict.fromkeys(runs.edge_names, 0.0), frozenset[str]()
    for share in taus:
        retained = search_circuit(runs, examples, share * total, direction).retained
        edges = frozenset(runs.edge_names[edge] for edge in retained)
        scores |= dict.fromkeys(edges, share)
        circuit = edges if share == SHARE else circuit
    return Recovery(scores, circuit, runs.counts[0])


def learn_mask(problem: Problem) -> Recovery:
    """Score by P(gate > 0) of hard-concrete gates (Louizos et al. 2018, arXiv:1712.01312), one for each edge.

    Adam minimises ((m(gates) - m(clean)) / (m(clean) - m(corrupt)))^2 + PENALTY * (mean P(gate > 0)).
    """
    beta, low, high = 2 / 3, -0.1, 1.1  # the constants of the paper
    runs = problem.count_runs()
    clean, corrupt = float(runs.evaluate_clean().mean()), float(runs.evaluate_corrupt().mean())
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((len(runs.edge_names),), 2.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=RATE)
    shift = beta * torch.log(torch.tensor(-low / high))
    for _ in range(UPDATES):
        u = torch.rand(logits.shape, generator=generator, dtype=logits.dtype).clamp(1e-6, 1 - 1e-6)
        gates = (((u.logit() + logits) / beta).sigmoid() * (high - low) + low).clamp(0, 1)
        error = (runs.evaluate_with_grad(gates).mean() - clean) / (clean - corrupt)
        loss = error.square() + PENALTY * (logits - shift).sigmoid().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    probabilities = (logits.detach() - shift).sigmoid()
    scores = dict(zip(runs.edge_names, probabilities.tolist(), strict=True))
    return Recovery(scores, select_edges(scores, MASK_SHARE), runs.counts[0])


METHODS: dict[str, Callable[[Problem], Recovery]] = {
    BASELINE: score_randomly,
    "activation x weight": score_by_size,
    "EAP": sweep_by_gradients(bt.Gradient()),
    "IG": sweep_by_gradients(bt.Gradient(steps=STEPS)),
    "EAP-IG inputs": sweep_by_gradients(bt.Gradient(steps=STEPS, rule="left")),
    "EAP-IG activations": sweep_by_gradients(bt.Gradient(steps=STEPS, rule="activations")),
    "exact, noising": sweep_exactly("noise"),
    "exact, denoising": sweep_exactly("denoise"),
    RECOVERED: sweep_exactly("noise", "denoise"),
    "ACDC, noising": search_acdc("noise"),
    "ACDC, denoising": search_acdc("denoise"),
    "ACDC, both": search_acdc("noise", "denoise"),
    "learned mask": learn_mask,
}
# With fewer pairs, the circuits of these methods; a search needs only one threshold for its circuit.
BY_PAIRS = {name: score for name, score in METHODS.items() if name.startswith("exact") or name == "EAP"} | {
    "ACDC, noising": search_acdc("noise", taus=[SHARE]),
    "ACDC, denoising": search_acdc("denoise", taus=[SHARE]),
    "ACDC, both": search_acdc("noise", "denoise", taus=[SHARE]),
}
