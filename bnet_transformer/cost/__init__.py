"""The cost of a net: parameters, FLOPs and bytes of each node group, exact in the number of words, and their orders.

flop_counter   the dims of each value and the multiplications of each node group, from the plan of the compiler
net_cost       `cost`: node groups, slices and the net; the path length between words, and the sequential steps
"""

from bnet_transformer.cost.flop_counter import Polynomial
from bnet_transformer.cost.net_cost import Cost, SliceCost, TemplateCost, cost

__all__ = ["Cost", "Polynomial", "SliceCost", "TemplateCost", "cost"]
