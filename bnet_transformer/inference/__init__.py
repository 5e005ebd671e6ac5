"""Inference on the compiled reading: exact elimination of the discrete choices, for a batch of sentences at once."""

from bnet_transformer.data import Evidence as Evidence
from bnet_transformer.inference.abduction import Counterfactual as Counterfactual, counterfactual as counterfactual
from bnet_transformer.inference.exact import log_evidence as log_evidence, posterior as posterior
from bnet_transformer.inference.explain import explain_question as explain_question
from bnet_transformer.inference.heads import Damage as Damage, Inclusion as Inclusion, damage as damage
from bnet_transformer.inference.joint_posterior import (
    Samples as Samples,
    arrow_weights as arrow_weights,
    joint_log_evidence as joint_log_evidence,
    joint_posterior as joint_posterior,
    sample as sample,
)
from bnet_transformer.inference.node_queries import Answers as Answers
from bnet_transformer.inference.query import PerformanceWarning as PerformanceWarning, Route as Route
from bnet_transformer.inference.rollout import Path as Path, Reads as Reads, reads as reads
from bnet_transformer.inference.sentence_state import (
    Attend as Attend,
    Mean as Mean,
    Noise as Noise,
    SentenceState as SentenceState,
    Zero as Zero,
)
from bnet_transformer.inference.tan import (
    CorpusTan as CorpusTan,
    Tan as Tan,
    TanTree as TanTree,
    corpus_tan as corpus_tan,
    tan as tan,
    tan_of_corpus as tan_of_corpus,
    tan_tree as tan_tree,
)
