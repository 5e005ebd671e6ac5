"""Structure alone, on integers: the folded graph, the ground graph of a sentence, shrinking. Never imports torch."""

from bnet_transformer.graph.folded import Bundle, Family, FoldedGraph
from bnet_transformer.graph.ground import Ground, Selection
from bnet_transformer.graph.queries import Separation, StructureQueries, Trail
from bnet_transformer.graph.shrink import Quotient, shrink
from bnet_transformer.graph.walk import ancestors, ancestral_order, descendants, topological_order

__all__ = [
    "Bundle",
    "Family",
    "FoldedGraph",
    "Ground",
    "Quotient",
    "Selection",
    "Separation",
    "StructureQueries",
    "Trail",
    "ancestors",
    "ancestral_order",
    "descendants",
    "shrink",
    "topological_order",
]
