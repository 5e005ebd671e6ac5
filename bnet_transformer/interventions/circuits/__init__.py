"""Circuits: sets of edges, found by a search or one's own, evaluated with all other edges corrupt.

`runs` states what a search needs: the metric of masks over named edges. `arrows` finds the arrows that transmit a
difference between the two runs, and joins them into edges; `arrow_runs` evaluates many circuits of them in one batch.
`greedy` removes edges one by one, for `search`; `result` is the `Circuit`; `curves` measures rankings of edges;
`hypothesis_tests` compares a circuit with random ones; `mib` reads and writes files.
"""

from bnet_transformer.interventions.circuits.curves import FaithfulnessCurves, faithfulness_curves
from bnet_transformer.interventions.circuits.hypothesis_tests import CircuitTests
from bnet_transformer.interventions.circuits.mib import StoredCircuit, read_json
from bnet_transformer.interventions.circuits.result import Circuit, FaithfulnessWarning
from bnet_transformer.interventions.circuits.search import circuit

__all__ = [
    "Circuit",
    "CircuitTests",
    "FaithfulnessCurves",
    "FaithfulnessWarning",
    "StoredCircuit",
    "circuit",
    "faithfulness_curves",
    "read_json",
]
