"""Attention: which words attend to which words, and which heads are important.

Data flows through these modules in this order: `heads` computes the roles of heads and the probability that each is
needed; `rollout` multiplies attention through slices, over the heads that are needed; `tan` builds the tree of
strongest attention.
"""

from bnet_transformer.attention.heads import Damage as Damage, Inclusion as Inclusion, Roles as Roles, damage as damage
from bnet_transformer.attention.rollout import Path as Path, Reads as Reads
from bnet_transformer.attention.tan import (
    CorpusTan as CorpusTan,
    Tan as Tan,
    TanTree as TanTree,
    learn_tan as learn_tan,
    tan_tree as tan_tree,
)
