"""Pictures: figures of graphs, and plots of results.

A figure is laid out once, as a `Picture` (boxes, arrows, frames and texts with their places), and written by what
its file's suffix says. `figures` knows the figure of each kind of result; `nodes`, `words` and `quotient`
lay out, `grid` places and routes, `style` gives colours, signs and the legend, `svg` (with
PNG and PDF), `dot` and `tikz` write, `plots` is for numbers.
"""

from bnet_transformer.figures.picture import Picture

__all__ = ["Picture"]
