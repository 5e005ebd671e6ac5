"""Figures of graphs: a figure is laid out once as a `Picture`, which is independent of file formats, and then written.

The modules, in the order in which data flows:

- `options`: validates the options of a figure, finds the nodes to highlight, and fits the figure to its width;
- `sentence_views`: chooses the view of a sentence: its nodes, the attention grid, or the folded graph;
- `graph_layout`, `attention_grid`, `grid_layout`: lay out graphs with few crossings, the attention grid, and quotient
  graphs and TANs. They use `fonts` (widths of texts, labels of nodes);
- `picture`: the layout: boxes, arrows, frames and texts with their positions; colours, line styles, legend and caption;
- `svg` (also PNG and PDF), `graphviz` (DOT), `tikz`, `graph_files` (GraphML and GEXF): write the files.

`bnet_transformer.drawing` selects the figure for each kind of result. Plots of numbers are in `bnet_transformer.plots`.
"""

from bnet_transformer.figures.picture import Picture

__all__ = ["Picture"]
