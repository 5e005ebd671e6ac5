"""Interventions on a sentence and their effects.

`Zero`, `Mean`, `Noise`, `Shift` and `Attend` are values of `do`. `sweep` patches many groups of nodes in one batch
(activation patching, ablation, mediation): `parse_cells` reads what is patched (`cells`), `routing` chooses which cells
share a run, `engine` runs them (`patched_run`), and `edge_attribution` estimates effects to first order. `circuit`
searches for the edges that a metric requires (`acdc`), on runs of `edge_runs` or `circuit_runs`, and `curves` measures
rankings of edges. `counterfactual` computes what a node would have been under other interventions, given the evidence.
`ResultComparison` is the result of `a.compare(b)`, also of results of other packages.
"""

from bnet_transformer._core.stats import ResultComparison as ResultComparison
from bnet_transformer.inference.do_values import (
    Attend as Attend,
    Mean as Mean,
    Noise as Noise,
    Shift as Shift,
    Zero as Zero,
)

__all__ = ["Attend", "Mean", "Noise", "ResultComparison", "Shift", "Zero"]
