"""Inference on the compiled net: values, distributions, posteriors, evidence and samples of the nodes of a sentence.

In the order in which data flows: `sentence_state` holds a sentence with its interventions and evidence; `query` makes a
`Query` of it and routes it to an algorithm. `node_queries` answers for values and TPMs. Probabilities come from `exact`
(elimination, on the `factors` of node groups) or from `joint_posterior` (enumeration and sampling). `dependence`
measures how far nodes depend on each other, `readout` computes readouts that are not needed in full.
"""

from bnet_transformer.data import Evidence as Evidence
from bnet_transformer.inference.exact import log_evidence as log_evidence, posterior as posterior
from bnet_transformer.inference.joint_posterior import (
    Samples as Samples,
    arrow_weights as arrow_weights,
    joint_log_evidence as joint_log_evidence,
    joint_posterior as joint_posterior,
    sample as sample,
)
from bnet_transformer.inference.node_evaluator import NodeEvaluator as NodeEvaluator
from bnet_transformer.inference.query import PerformanceWarning as PerformanceWarning, Route as Route
from bnet_transformer.inference.sentence_state import SentenceState as SentenceState
