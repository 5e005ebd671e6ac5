"""Edges from writers to readers, as in ACDC, edge attribution patching and MIB.

`structure` finds the writers, the readers and the edges of a declaration, and `chain_arrows` the ground arrows along
them; `cells` are the edges that a sweep sets (`sweeps.edge_cells`, `edge_patches`, `edge_tangents`, `edge_estimates`).
`runner` runs circuits of edges for searches and curves: `masked_run` computes the groups of nodes, `reader_view` what
each reader sees, and `entry_maps` what each head adds to a sum. `pruning` finds the edges that transmit nothing.
"""
