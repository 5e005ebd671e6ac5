"""Circuits: a small set of arrows that preserves a metric, found by a greedy search.

`arrows` finds the arrows that transmit a difference between the two runs, and joins them into edges; `runner` evaluates
many circuits in one batch; `search` removes edges one by one, and returns the remaining `Circuit`.
"""

from bnet_transformer.interventions.circuits.search import Circuit, circuit

__all__ = ["Circuit", "circuit"]
