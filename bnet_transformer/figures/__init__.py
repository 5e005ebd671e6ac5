"""Figures of graphs: laid out once as a `Picture`, which does not depend on a file format, then written in any format.

The pipeline, in the order in which data flows:

- `options`: the options of a figure, validated, and the nodes to highlight;
- `sentence_views`: which view of a sentence is drawn: its nodes, the reading grid, or the folded graph;
- `graph_layout`, `attention_grid`, `quotient`: the layout of graphs, of the reading grid, and of quotients and TANs, by
  way of `row_order` (rows, few crossings), `grid_layout` (positions, routes of arrows), `labels` and `fonts`;
- `picture`: the result, boxes, arrows, frames and texts with their positions;
- `style`: colours and signs, and the legend and caption that it adds;
- `svg` (also PNG and PDF), `dot`, `tikz`: the writers.

`bnet_transformer.drawing` chooses the figure of each kind of result; plots of numbers are in `bnet_transformer.plots`.
"""

from bnet_transformer.figures.picture import Picture

__all__ = ["Picture"]
