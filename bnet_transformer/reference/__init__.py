"""The reference: evaluation node by node over the ground graph, on small tensors. It defines what a declaration means.

All other parts of the package are tested against it. `ground_model` contains a sentence with its interventions and the
ground parents of each slot. `run` computes values, distributions and attention of nodes, given a state of each random
node. `enumeration` sums runs over the joint states of the latent choices. `node_tables` computes the conditional tables
and the attention of single nodes, batched over those states.
"""

from bnet_transformer.reference.enumeration import (
    ATOL as ATOL,
    BUDGET as BUDGET,
    RTOL as RTOL,
    check_joint_states as check_joint_states,
    enumerate_runs as enumerate_runs,
    impossible_evidence_error as impossible_evidence_error,
    is_close as is_close,
    log_evidence as log_evidence,
    log_joint as log_joint,
    posterior as posterior,
    values as values,
)
from bnet_transformer.reference.ground_model import (
    AttentionRow as AttentionRow,
    GroundModel as GroundModel,
    Interventions as Interventions,
    attention_parents as attention_parents,
    evaluation_order as evaluation_order,
    find_open_choices as find_open_choices,
    find_readable_words as find_readable_words,
    find_slot_parents as find_slot_parents,
    get_fixed as get_fixed,
    is_fixed as is_fixed,
    locate_node as locate_node,
    parents as parents,
)
from bnet_transformer.reference.run import ReferenceRun as ReferenceRun
