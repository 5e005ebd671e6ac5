"""What a net costs: parameters, FLOPs and bytes of each node template, exact in the number of words, and their orders.

`counting` says along which dims each value spreads and how many multiplications that makes, `paths` how far two words
are apart; `count` puts them together.
"""

from bnet_transformer.cost.flop_counter import Polynomial
from bnet_transformer.cost.net_cost import Cost, SliceCost, TemplateCost, cost

__all__ = ["Cost", "Polynomial", "SliceCost", "TemplateCost", "cost"]
