"""Structure alone, on integers: the folded graph, the ground graph of a sentence, shrinking. Never imports torch."""

from bnet_transformer.graph.folded import Bundle as Bundle
from bnet_transformer.graph.folded import Family as Family
from bnet_transformer.graph.folded import FoldedGraph as FoldedGraph
from bnet_transformer.graph.ground import Ground as Ground
from bnet_transformer.graph.ground import Selection as Selection
from bnet_transformer.graph.queries import Separation as Separation
from bnet_transformer.graph.queries import StructureQueries as StructureQueries
from bnet_transformer.graph.queries import Trail as Trail
from bnet_transformer.graph.shrink import Quotient as Quotient
from bnet_transformer.graph.shrink import shrink as shrink
from bnet_transformer.graph.walk import ancestors as ancestors
from bnet_transformer.graph.walk import ancestral_order as ancestral_order
from bnet_transformer.graph.walk import descendants as descendants
from bnet_transformer.graph.walk import topological_order as topological_order
