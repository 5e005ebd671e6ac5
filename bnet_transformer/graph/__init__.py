"""Structure alone, on integers: the folded graph, the ground graph of a sentence, shrinking. Never imports torch."""

from bnet_transformer.graph.ground_graph import GroundGraph as GroundGraph, NodeSelection as NodeSelection
from bnet_transformer.graph.queries import (
    Separation as Separation,
    StructureQueries as StructureQueries,
    Trail as Trail,
)
from bnet_transformer.graph.quotient import Quotient as Quotient, shrink as shrink
from bnet_transformer.graph.template_graph import (
    EdgeTemplate as EdgeTemplate,
    NodeGroup as NodeGroup,
    TemplateGraph as TemplateGraph,
)
from bnet_transformer.graph.traversal import (
    ancestors as ancestors,
    ancestral_order as ancestral_order,
    descendants as descendants,
    topological_order as topological_order,
)
