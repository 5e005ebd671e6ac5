"""Plots of results as matplotlib figures. The global state of pyplot is neither read nor changed.

The pipeline, in the order in which data flows:

- `registry`: `plot` selects the function for the type of a result; a new plot is a new entry in its table;
- `sentences`, `attention`, `residual_stream`, `sweeps`, `fits`: the plots of the results of each package;
- `heat_maps`: the kinds of drawing that these plots use (arrays with named axes, bars, heat maps);
- `canvas`: the figure, its panels, fonts, texts that fit, colours, titles and notes.
"""
