"""Circuits: sets of edges, found by a search or one's own, evaluated with all other edges corrupt.

`runs` states what a search needs: the metric of masks over named edges. `arrows` finds the arrows that transmit a
difference between the two runs, and joins them into edges; `arrow_runs` evaluates many circuits of them in one batch.
`search` removes edges one by one; `result` is the `Circuit`; `curves` measures rankings of edges; `mib` reads and
writes files.
"""

from bnet_transformer.interventions.circuits.circuit import circuit
from bnet_transformer.interventions.circuits.mib import StoredCircuit, read_json
from bnet_transformer.interventions.circuits.result import Circuit, FaithfulnessWarning

__all__ = ["Circuit", "FaithfulnessWarning", "StoredCircuit", "circuit", "read_json"]
