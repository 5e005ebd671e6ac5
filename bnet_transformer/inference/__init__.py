"""Inference on the compiled reading: exact elimination of the discrete choices, for a batch of sentences at once."""

from bnet_transformer.data import Evidence
from bnet_transformer.inference.abduction import Counterfactual, counterfactual
from bnet_transformer.inference.corpus_tan import CorpusTan, corpus_tan
from bnet_transformer.inference.dependence import dependences
from bnet_transformer.inference.exact import log_evidence, posterior
from bnet_transformer.inference.expected_reading import arrow_weights
from bnet_transformer.inference.explain import explain_question
from bnet_transformer.inference.heads import Damage, Inclusion, damage
from bnet_transformer.inference.joint_posterior import joint_log_evidence, joint_posterior
from bnet_transformer.inference.node_queries import Answers
from bnet_transformer.inference.pieces import add_gradient
from bnet_transformer.inference.rollout import Path, Reads, reads
from bnet_transformer.inference.route import PerformanceWarning, Route
from bnet_transformer.inference.sampling import Samples, sample
from bnet_transformer.inference.sentence_state import SentenceState
from bnet_transformer.inference.surgery import (
    Attend,
    Mean,
    Noise,
    OwnValues,
    Zero,
    expanded,
    is_own,
    matching,
    value_for,
)
from bnet_transformer.inference.tan import Tan, TanTree, tan, tan_tree
from bnet_transformer.inference.tan_of_corpus import tan_of_corpus

__all__ = [
    "Answers",
    "Attend",
    "CorpusTan",
    "Counterfactual",
    "Damage",
    "Evidence",
    "Inclusion",
    "Mean",
    "Noise",
    "OwnValues",
    "Path",
    "PerformanceWarning",
    "Reads",
    "Route",
    "Samples",
    "SentenceState",
    "Tan",
    "TanTree",
    "Zero",
    "add_gradient",
    "arrow_weights",
    "corpus_tan",
    "counterfactual",
    "damage",
    "dependences",
    "expanded",
    "explain_question",
    "is_own",
    "joint_log_evidence",
    "joint_posterior",
    "log_evidence",
    "matching",
    "posterior",
    "reads",
    "sample",
    "tan",
    "tan_of_corpus",
    "tan_tree",
    "value_for",
]
