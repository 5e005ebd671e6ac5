"""Interventions on a sentence and their effects.

`Zero`, `Mean`, `Noise`, `Shift` and `Attend` are values of `do`. `sweeps` patches many groups of nodes in one batch
(activation patching, ablation, mediation). `circuits` searches for the arrows that a metric requires. `counterfactual`
computes what a node would have been under other interventions, given the evidence. `ResultComparison` is the result of
`a.compare(b)`, also of results of other packages.
"""

from bnet_transformer._core.result_comparison import ResultComparison as ResultComparison
from bnet_transformer.inference.intervention_values import (
    Attend as Attend,
    Mean as Mean,
    Noise as Noise,
    Shift as Shift,
    Zero as Zero,
)

__all__ = ["Attend", "Mean", "Noise", "ResultComparison", "Shift", "Zero"]
