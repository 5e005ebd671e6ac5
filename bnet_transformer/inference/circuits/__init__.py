"""Circuits: the smallest set of arrows, by a greedy search, that keeps an outcome.

`arrows` says which arrows carry a difference, and joins them into edges; `run` computes many circuits at once, from one
family to the outcomes; `search` takes edges away one by one; `result` is what comes out.
"""

from bnet_transformer.inference.circuits.result import Circuit
from bnet_transformer.inference.circuits.search import circuit

__all__ = ["Circuit", "circuit"]
