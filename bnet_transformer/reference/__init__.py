"""The reference: slow, node by node over the ground graph, small tensors. It is the meaning of a declaration.

Every other reading is tested against this one. `ground_model` is a sentence with its interventions; a `run` computes
the values and probabilities of its nodes, given a state of each random node; `enumeration` sums over the states.
"""

from bnet_transformer.reference.enumeration import (
    ATOL as ATOL,
    BUDGET as BUDGET,
    ROUNDING as ROUNDING,
    check_joint_states as check_joint_states,
    fits as fits,
    impossible as impossible,
    log_evidence as log_evidence,
    log_joint as log_joint,
    posterior as posterior,
    runs as runs,
    values as values,
)
from bnet_transformer.reference.ground_model import (
    Done as Done,
    Row as Row,
    World as World,
    choices as choices,
    parents as parents,
    pending as pending,
    reading_parents as reading_parents,
    settles as settles,
    settling as settling,
    sources as sources,
    where as where,
    words_read as words_read,
)
from bnet_transformer.reference.run import Run as Run
