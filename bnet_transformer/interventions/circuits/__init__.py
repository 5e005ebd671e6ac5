"""Circuits: the smallest set of arrows, by a greedy search, that keeps an outcome.

`arrows` says which arrows carry a difference, and joins them into edges; `run` computes many circuits at once, from one
family to the outcomes; `search` takes edges away one by one, until a `Circuit` is left.
"""

from bnet_transformer.interventions.circuits.search import Circuit, circuit

__all__ = ["Circuit", "circuit"]
