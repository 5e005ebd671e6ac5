"""Inference on the compiled net: values, distributions, posteriors, evidence and samples of the nodes of a sentence.

In the order in which data flows: `values` contains the state of a sentence with its interventions and evidence, and
computes values, TPMs and attention of nodes. `query` has the requested nodes, the evidence and the limits of a query,
and `plan` chooses the algorithm. For probabilities, `factors` builds log factors of node groups and `elimination`
eliminates the choices from them. `factor_graph` builds tables over the choices of one sentence that occur together;
`contraction` eliminates the choices from them, and sums chains along words. `posteriors` adds conditioning and
enumeration; it computes the posteriors of nodes and of groups. `most_probable` finds the most probable joint states,
and `sampling` draws samples. `dependence` measures how strongly nodes depend on each other.
"""

from bnet_transformer.data import Evidence as Evidence
from bnet_transformer.inference.elimination import log_evidence as log_evidence, posterior as posterior
from bnet_transformer.inference.most_probable import (
    GroupStates as GroupStates,
    RankedStates as RankedStates,
    plan_ranked_states as plan_ranked_states,
)
from bnet_transformer.inference.plan import PerformanceWarning as PerformanceWarning, Plan as Plan
from bnet_transformer.inference.posteriors import (
    GroupPosterior as GroupPosterior,
    arrow_weights as arrow_weights,
    iter_arrow_weights as iter_arrow_weights,
    plan_group_posterior as plan_group_posterior,
    plan_log_evidence as plan_log_evidence,
    plan_posterior as plan_posterior,
)
from bnet_transformer.inference.sampling import Samples as Samples, plan_sample as plan_sample
from bnet_transformer.inference.values import NodeEvaluator as NodeEvaluator, SentenceState as SentenceState
