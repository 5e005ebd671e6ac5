"""Pictures: figures of graphs, and plots of results.

A figure is laid out once, as a `Picture` (boxes, arrows, frames and texts with their places), and written by what
its file's suffix says. `figures` knows the figure of each kind of result; `nodes`, `words` and `quotient`
lay out, `grid` places and routes, `style` gives colours, signs and the legend, `svg`, `dot` and `tikz`
write, `typeset` turns SVG to PNG and PDF, `plots` is for numbers.
"""

from bnet_transformer.viz import figures as figures
from bnet_transformer.viz.picture import Picture

__all__ = ["Picture"]
