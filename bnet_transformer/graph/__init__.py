"""The structure of a net, on integers; it never imports torch.

`template_graph` has one node group for each node template and slice, and no words. `ground_graph` adds the words of a
sentence: nodes are integers, arrows are computed on demand. `traversal` moves marks along edges (ancestors, Markov
blanket, topological order). `thinned_graph` and `d_separation` answer separation queries by Bayes ball, 64 at once.
`queries` are the methods by name of `BNet` and `Sentence`. `quotient` contracts boxes of nodes, `arborescence` finds
maximum trees.
"""

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
