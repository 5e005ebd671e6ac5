"""Plots: `kinds.plot` draws any result as a matplotlib Figure. No global state of pyplot is read or changed.

`canvas` is the paper and the fonts; `heat` and `tables` (numbers with named axes, bars) are the kinds of drawing;
`sentences`, `readings`, `fits`, `heads` and `sweeps` say which drawing tells a result, and `kinds` is the one table of
them all: a new plot is a row there.
"""
