"""Plots of results as matplotlib figures. The global state of pyplot is neither read nor changed.

The pipeline, in the order in which data flows:

- `registry`: `plot` selects the function for the type of a result; a new plot is a new entry in its table;
- `sentences`, `rollout`, `tan`, `distributions`, `fits`, `calibrations`, `heads`, `sweeps`: the plots of the results of
  each package;
- `labelled_arrays` (arrays with named axes, bars), `heat_maps`: the kinds of drawing that these plots use;
- `canvas`: the figure, its panels, fonts, colours, titles and notes.
"""
