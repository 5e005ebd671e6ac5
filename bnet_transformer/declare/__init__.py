"""The declaration of an architecture and the net it becomes: names, arrows, cycles and shapes checked as a whole.

Passes: `declaration_to_graph`, by way of templates, then shapes and parameters in `declare`.
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
