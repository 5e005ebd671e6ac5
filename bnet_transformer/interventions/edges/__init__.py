"""Edges from writers to readers, as in ACDC, edge attribution patching and MIB.

`structure` finds the writers, the readers and the edges of a declaration. Sweeps over edges are in `sweeps`
(`edge_cells`, `edge_patches`, `edge_estimates`). `runner` runs circuits of edges for searches and curves; `pruning`
finds the edges that cannot transmit anything.
"""
