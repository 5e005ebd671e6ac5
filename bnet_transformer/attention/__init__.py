"""Attention: what words read, and which heads matter.

`rollout` multiplies reads through slices, `tan` draws the strongest reads as a tree-augmented network, `heads` names
the roles of heads and gives the probability that each is needed.
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
