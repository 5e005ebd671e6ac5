"""Inference on the compiled reading: exact elimination of the discrete choices, for a batch of sentences at once."""

from bnet_transformer.inference import ground
from bnet_transformer.inference.abduction import Counterfactual, counterfactual
from bnet_transformer.inference.answers import Answers
from bnet_transformer.inference.boxes import Tan, TanTree, tan, tan_tree
from bnet_transformer.inference.corpus import CorpusTan, corpus_tan
from bnet_transformer.inference.exact import log_evidence, posterior
from bnet_transformer.inference.factors import Evidence
from bnet_transformer.inference.joint import Samples, dependence, joint_log_evidence, joint_posterior, sample
from bnet_transformer.inference.paths import Path, Reads, reads
from bnet_transformer.inference.pieces import add_gradient
from bnet_transformer.inference.surgery import Attend, Mean, Noise, Zero, expanded, matching, value_for

__all__ = [
    "Answers",
    "Attend",
    "CorpusTan",
    "Counterfactual",
    "Evidence",
    "Mean",
    "Noise",
    "Path",
    "Reads",
    "Samples",
    "Tan",
    "TanTree",
    "Zero",
    "add_gradient",
    "corpus_tan",
    "counterfactual",
    "dependence",
    "expanded",
    "ground",
    "joint_log_evidence",
    "joint_posterior",
    "log_evidence",
    "matching",
    "posterior",
    "reads",
    "sample",
    "tan",
    "tan_tree",
    "value_for",
]
