"""From a declaration to a net. All names, arrows, cycles and shapes are checked, and all faults reported at once.

`declaration` defines the classes with which users declare a net; it unrolls nodes over slices, resolves arrows and
sorts the result into the template graph. `network` infers shapes and parameters from parents to children (`declare`).
`neurons` declares the hidden activations of feed-forward nodes as nodes.
`io` saves a net to a file and loads it.
"""

from bnet_transformer.declare.declaration import Arrow, Declaration, Node, Plate, Stack
from bnet_transformer.declare.network import Network, NodeSpec, ParentSpec, as_network, declare

__all__ = [
    "Arrow",
    "Declaration",
    "Network",
    "Node",
    "NodeSpec",
    "ParentSpec",
    "Plate",
    "Stack",
    "as_network",
    "declare",
]
