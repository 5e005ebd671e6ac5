"""Attention: which words attend to which words, and which heads are important.

Data flows through these modules in this order: `roles` computes what heads attend to; `inclusion` the probability that
each head is needed, by the posterior of its gate (`gates`); `rollout` multiplies attention through slices, over the
heads that are needed; `tan` builds the tree of strongest attention.
"""

from bnet_transformer.attention.inclusion import Damage as Damage, Inclusion as Inclusion, damage as damage
from bnet_transformer.attention.roles import Roles as Roles
from bnet_transformer.attention.rollout import Path as Path, Reads as Reads
from bnet_transformer.attention.tan import (
    CorpusTan as CorpusTan,
    Tan as Tan,
    TanTree as TanTree,
    learn_tan as learn_tan,
    tan_tree as tan_tree,
)
