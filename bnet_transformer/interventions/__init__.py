"""Interventions on a sentence and their effects.

`Zero`, `Mean`, `Noise`, `Shift`, `Scale`, `Swap`, `Project`, `Set`, `Apply` and `Attend` say what a value becomes, in
`do` and in all functions of this package. `sweep` patches many groups of nodes in one batch (activation patching,
ablation, mediation) of pairs (`examples`): `parse_cells` reads what is patched (`cells`), `engine` finds the cells that
share a run and runs them (`patched_run`; the others one at a time, `sequential`), and `edge_attribution` estimates
effects to first order from `gradients`, as `methods` says; `sweep_results` has the tables of effects. `circuit`
searches for the edges that a metric requires (`acdc`), on runs of `edges` (`edge_runs`) or of arrows (`circuit_arrows`,
`circuit_runs`), and `curves` measures rankings of edges. All edges are sums of what writers add (`linear_pass`).
`counterfactual` computes what a node would have been under other interventions, given the evidence. `ResultComparison`
is the result of `a.compare(b)`, also of results of other packages.
"""

from bnet_transformer._core.stats import ResultComparison as ResultComparison
from bnet_transformer.data.do_values import (
    Apply as Apply,
    Attend as Attend,
    Mean as Mean,
    Noise as Noise,
    Project as Project,
    Scale as Scale,
    Set as Set,
    Shift as Shift,
    Swap as Swap,
    Zero as Zero,
)

__all__ = ["Apply", "Attend", "Mean", "Noise", "Project", "ResultComparison", "Scale", "Set", "Shift", "Swap", "Zero"]
