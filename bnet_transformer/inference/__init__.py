"""Inference on the compiled net: values, distributions, posteriors, evidence and samples of the nodes of a sentence.

In the order in which data flows: `selection` parses slices, words and heads, and `intervention_values` the values of
`do`. `sentence_state` contains a sentence with its interventions and evidence. `query` translates queries about nodes
into tensors of node groups, and `routing` chooses the algorithm. `node_evaluator` computes values, TPMs and attention.
For probabilities, `factors` builds log factors of node groups and `elimination` eliminates the choices from them.
`chain` sums chains along words. `deferred_readout` computes the likelihood of a readout without its mean.
`factor_graph` builds tables over the choices of one sentence that occur together, and `contraction` eliminates the
choices from them. `joint_posterior` adds conditioning and enumeration. From these results, `group_posterior` computes
the posteriors of all nodes of a group, `ranked_states` the most probable joint states, and `sampling` samples.
`dependence` measures how strongly nodes depend on each other.
"""

from bnet_transformer.data import Evidence as Evidence
from bnet_transformer.inference.elimination import log_evidence as log_evidence, posterior as posterior
from bnet_transformer.inference.group_posterior import (
    GroupPosterior as GroupPosterior,
    compute_group_posterior as compute_group_posterior,
)
from bnet_transformer.inference.joint_posterior import (
    arrow_weights as arrow_weights,
    iter_arrow_weights as iter_arrow_weights,
    joint_log_evidence as joint_log_evidence,
    joint_posterior as joint_posterior,
)
from bnet_transformer.inference.node_evaluator import NodeEvaluator as NodeEvaluator
from bnet_transformer.inference.ranked_states import (
    GroupStates as GroupStates,
    RankedStates as RankedStates,
    compute_ranked_states as compute_ranked_states,
    find_explained_nodes as find_explained_nodes,
)
from bnet_transformer.inference.routing import PerformanceWarning as PerformanceWarning, Route as Route
from bnet_transformer.inference.sampling import Samples as Samples, sample as sample
from bnet_transformer.inference.sentence_state import SentenceState as SentenceState
