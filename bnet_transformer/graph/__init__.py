"""Structure alone, on integers: the folded graph, the ground graph of a sentence, shrinking. Never imports torch."""

from bnet_transformer.graph.folded import Bundle, Family, FoldedGraph
from bnet_transformer.graph.ground import Ground, Selection
from bnet_transformer.graph.queries import (
    Separation,
    StructureQueries,
    Trail,
    active_trail,
    minimal_cut,
    minimal_separator,
)
from bnet_transformer.graph.separation import Question, reaches, separated
from bnet_transformer.graph.shrink import Quotient, shrink
from bnet_transformer.graph.walk import ancestors, ancestral_order, blanket, descendants, topological_order

__all__ = [
    "Bundle",
    "Family",
    "FoldedGraph",
    "Ground",
    "Question",
    "Quotient",
    "Selection",
    "Separation",
    "StructureQueries",
    "Trail",
    "active_trail",
    "ancestors",
    "ancestral_order",
    "blanket",
    "descendants",
    "minimal_cut",
    "minimal_separator",
    "reaches",
    "separated",
    "shrink",
    "topological_order",
]
