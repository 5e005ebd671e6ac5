"""Figures of graphs: a figure is laid out once as a `Picture`, which is independent of file formats, and then written.

The modules, in the order in which data flows:

- `options`: validates the options of a figure and finds the nodes to highlight;
- `sentence_views`: chooses the view of a sentence: its nodes, the attention grid, or the folded graph;
- `graph_layout`, `attention_grid`, `quotient`: lay out graphs, the attention grid, and quotient graphs and TANs. They
  use `row_order` (rows with few crossings), `grid_layout` (positions, routes of arrows), `labels` and `fonts`;
- `picture`: the layout: boxes, arrows, frames and texts with their positions;
- `style`: colours and line styles; it also adds the legend and the caption;
- `svg` (also PNG and PDF), `dot`, `tikz`: write the files.

`bnet_transformer.drawing` selects the figure for each kind of result. Plots of numbers are in `bnet_transformer.plots`.
"""

from bnet_transformer.figures.picture import Picture

__all__ = ["Picture"]
