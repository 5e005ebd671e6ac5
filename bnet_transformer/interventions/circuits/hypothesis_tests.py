"""Tests of sufficiency, necessity and minimality of a circuit against random sets of edges (Shi et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.saved_results import SavedResult
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.circuits.greedy import MAX_BATCH_SIZE, evaluate_changes
from bnet_transformer.interventions.circuits.runs import CircuitRuns, build_mask

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.05  # in the summary, without a correction for the number of edges


@dataclass(frozen=True, eq=False, repr=False)
class CircuitTests(SavedResult):
    """The result of `Circuit.test`: p values against random sets of edges of the same size.

    Attributes:
        sufficiency: The p value of the distance `D` of the circuit from the clean run, against that of random circuits:
            the share of random circuits that are at least as near. Small if the circuit is better than random ones.
        necessity: The p value of the distance from the clean run if the edges of the circuit are removed from the net,
            against that of the removal of as many random edges outside the circuit: the share that changes the metric
            at least as much.
        minimality: For each edge of the circuit, the p value of the change of the metric by its removal from the
            circuit, against that of edges outside, each added to the circuit: the share that changes it at least as
            much. Large for an edge that the circuit does not need. The least possible value is `1 / (1 + n)` with n
            edges outside; there is no correction for the number of edges.
        changes: For each edge of the circuit, the mean of the absolute change of the metric by its removal.
        distance: `D` of the circuit.
        removed_distance: `D` of the net without the edges of the circuit.
        draws: The number of random sets.
        examples: The number of pairs.
        is_in_sample: Whether the pairs are those of the search.
    """

    _shapes = "minimality changes: {edge}"

    sufficiency: float
    necessity: float
    minimality: Mapping[str, float]
    changes: Mapping[str, float]
    distance: float
    removed_distance: float
    draws: int
    examples: int
    is_in_sample: bool

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each edge of the circuit: the change by its removal, and its p value."""
        import pandas as pd

        rows = [(name, self.changes[name], p) for name, p in self.minimality.items()]
        return pd.DataFrame(rows, columns=["edge", "change", "p"]).sort_values("p", ignore_index=True)

    def __repr__(self) -> str:
        count = sum(p <= LEVEL for p in self.minimality.values())
        pairs = f"{self.examples} {'searched' if self.is_in_sample else 'other'} pair{'s' * (self.examples != 1)}"
        return (
            f"<CircuitTests: sufficiency p {self.sufficiency:.3g}, necessity p {self.necessity:.3g}, "
            f"minimality p at most {LEVEL} for {count} of {len(self.minimality)} edges, {pairs}>"
        )

    def _repr_html_(self) -> str:
        """The tests as a sentence and a table of the edges."""
        return (
            f"<p>{escape(repr(self)[1:-1])}</p>{self.to_dataframe().to_html(index=False, float_format='{:.3g}'.format)}"
        )


def run_tests(
    runs: CircuitRuns, retained: Sequence[str], positions: Sequence[int], draws: int, seed: int, *, is_in_sample: bool
) -> CircuitTests:
    """Compare a circuit with random sets of edges, on the examples at some positions."""
    mask, index = build_mask(runs, retained), torch.as_tensor(positions, dtype=torch.long)
    members, outside = torch.nonzero(mask)[:, 0], torch.nonzero(~mask)[:, 0]
    if not len(members) or not len(outside):
        expected = "a circuit with some of the edges that transmit a difference"
        raise BNetError("test", expected=expected, actual=f"{len(members)} of {len(mask)} edges")
    generator = np.random.default_rng(seed)
    every, size = torch.arange(len(mask)), len(members)
    random_sets, outer_sets = (_draw_sets(edges, size, len(mask), draws, generator) for edges in (every, outside))
    added = torch.from_numpy(generator.permutation(outside.numpy())[:draws])

    def evaluate(masks: Tensor) -> Tensor:
        return torch.cat([runs.evaluate(part)[:, index] for part in masks.split(MAX_BATCH_SIZE)])

    clean, outcome = runs.evaluate_clean()[index], evaluate(mask[None])
    distances = []
    for masks in (torch.cat([mask[None], random_sets]), ~torch.cat([mask[None], outer_sets])):
        distances.append((evaluate(masks) - clean).abs().mean(-1))
    with_only, without = distances
    changes, other_changes = (
        (evaluate_changes(runs, mask, edges[:, None].tolist())[:, index] - outcome).abs().mean(-1)
        for edges in (members, added)
    )
    names = [runs.edge_names[edge] for edge in members.tolist()]
    minimality = [compute_p_value(other_changes >= change) for change in changes]
    return CircuitTests(
        sufficiency=compute_p_value(with_only[1:] <= with_only[0]),
        necessity=compute_p_value(without[1:] >= without[0]),
        minimality=dict(zip(names, minimality, strict=True)),
        changes=dict(zip(names, changes.tolist(), strict=True)),
        distance=float(with_only[0]),
        removed_distance=float(without[0]),
        draws=draws,
        examples=len(index),
        is_in_sample=is_in_sample,
    )


def compute_p_value(is_extreme: Tensor) -> float:
    """The p value of a Monte Carlo test: the observed value counts as one of the draws."""
    return (1 + int(is_extreme.sum())) / (1 + len(is_extreme))


def _draw_sets(edges: Tensor, size: int, count: int, draws: int, generator: np.random.Generator) -> Tensor:
    """The masks of random subsets of edges, of this size or all if there are fewer, `[draw, edge]`."""
    masks = torch.zeros(draws, count, dtype=torch.bool)
    for row in masks:
        row[torch.from_numpy(generator.permutation(edges.numpy())[:size])] = True
    return masks
