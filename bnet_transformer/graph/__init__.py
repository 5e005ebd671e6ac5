"""The structure of a net, computed with integers; this package never imports torch.

`template_graph` has one node group for each node template and slice, without words. `ground_graph` adds the words of a
sentence: it finds nodes, which are integers, by name or pattern, and computes arrows on demand. `traversal` propagates
marks along edges (ancestors, Markov blanket, topological order). `d_separation` answers separation queries by the Bayes
ball, 64 at once, on a thinned ground graph. `queries` contains the structure queries of `BNet` and `Sentence`, and the
quotient graph, in which groups of nodes are contracted.
"""

from bnet_transformer.graph.ground_graph import (
    GroundGraph as GroundGraph,
    NodeFamily as NodeFamily,
    NodeSelection as NodeSelection,
    count_from_start as count_from_start,
    find_family as find_family,
)
from bnet_transformer.graph.queries import (
    Quotient as Quotient,
    Separation as Separation,
    StructureQueries as StructureQueries,
    Trail as Trail,
    shrink as shrink,
)
from bnet_transformer.graph.template_graph import (
    EdgeTemplate as EdgeTemplate,
    NodeGroup as NodeGroup,
    TemplateGraph as TemplateGraph,
)
from bnet_transformer.graph.traversal import (
    NodeNames as NodeNames,
    ancestors as ancestors,
    ancestral_order as ancestral_order,
    descendants as descendants,
    topological_order as topological_order,
)
