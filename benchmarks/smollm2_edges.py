"""Rows of edges in SmolLM2-135M: all parts of a study of a circuit, compared with one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

import bnet_transformer as bt
from benchmarks.harness import Figure, figure, measure_peak, ratios, time_calls
from bnet_transformer.pretrained.source import is_installed

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
FIRST, SECOND = " Mary", " John"
STEPS, EXACT, CIRCUITS, RETAINED = 4, 100, 8, 0.8
RUNS = 3


@dataclass(frozen=True)
class Study:
    """One pair of sentences of SmolLM2, and what a study of its circuit computes."""

    net: bt.BNet

    @cached_property
    def pair(self) -> tuple[Any, Any]:
        """The clean and the corrupt sentence."""
        return self.net.sentence(CLEAN), self.net.sentence(CORRUPT)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The metric, the difference of two logits at the last word; corrupt values are set in the clean run."""
        words = len(self.pair[0].words)
        return {"metric": {f"y_{words - 1}": (FIRST, SECOND)}, "direction": "noise"}

    @cached_property
    def scores(self) -> Any:
        """The effects to first order."""
        return self.estimate()

    @cached_property
    def runner(self) -> Any:
        """The runner of circuits of edges."""
        from bnet_transformer.interventions.edge_runs import build_edge_runner

        return build_edge_runner(*self.pair, self.options["metric"])

    def forward(self) -> Any:
        """The values of one new sentence."""
        return self.net.sentence(CLEAN)[f"logits_{len(self.pair[0].words) - 1}"]

    def estimate(self, steps: int = 0) -> Any:
        """The effects of all edges from gradients."""
        return bt.sweep(*self.pair, at="edges", method=bt.Gradient(steps=steps), **self.options)

    def run_strongest(self) -> Any:
        """The exact effects of the strongest edges."""
        return bt.sweep(*self.pair, at=[name for name, _ in self.scores.top(EXACT)], **self.options)

    def draw_curve(self) -> Any:
        """The faithfulness of circuits of ten sizes, by the signed and by the absolute ranking."""
        metric = self.options["metric"]
        scores = {"first order": self.scores}
        return bt.faithfulness_curves(*self.pair, metric=metric, scores=scores, at="edges", baselines=())

    def run_circuits(self, count: int) -> torch.Tensor:
        """The metric of some random circuits with most of the edges."""
        generator = torch.Generator().manual_seed(0)
        masks = torch.rand(count, len(self.runner.edge_names), generator=generator) < RETAINED
        return self.runner.evaluate(masks)


def study_of_a_circuit() -> list[Figure]:
    """SmolLM2-135M (30 slices, 9 heads, keys and values of 3 groups: 70,651 edges), one pair of sentences of 14 words,
    on one metric: all edges to first order; by integrated gradients with 4 steps; the exact effects of the strongest
    100 edges; the curve of faithfulness at the ten sizes of MIB, by the signed and by the absolute ranking (20
    circuits); one circuit, and 8 in one batch. Compared with a forward pass of a new sentence."""
    if not is_installed("smollm2"):
        return []
    study = Study(bt.from_pretrained("smollm2"))
    calls: dict[str, Callable[[], object]] = {
        "forward pass": study.forward,
        "all edges to first order": study.estimate,
        f"integrated gradients, {STEPS} steps": lambda: study.estimate(STEPS),
        f"{EXACT} exact edges": study.run_strongest,
        "curve of ten sizes": study.draw_curve,
        "one circuit": lambda: study.run_circuits(1),
        f"{CIRCUITS} circuits in a batch": lambda: study.run_circuits(CIRCUITS),
    }
    spent = time_calls(calls, RUNS)
    spent["one circuit of a batch"] = [seconds / CIRCUITS for seconds in spent[f"{CIRCUITS} circuits in a batch"]]
    forward, *names = spent
    return [
        *(figure(name, seconds, "s") for name, seconds in spent.items()),
        *(figure(f"{name}: forward passes", ratios(spent[name], spent[forward]), "") for name in names),
        *(figure(f"{name}: peak memory", measure_peak(call), "MB") for name, call in calls.items()),
    ]
