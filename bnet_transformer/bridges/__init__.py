"""Bridges to other libraries.

networkx   template and ground graphs as networkx graphs, node-link JSON and Parquet
pgmpy      the discrete part of a sentence's bnet as tables, for pgmpy and as BIF, and the reader of BIF
pyro       the net as a Pyro model

GraphML and GEXF contain the layout of the figure, so that their writers are in `figures.graph_files`. To add a format
for graphs, add its writer to `get_graph_writers` of `drawing`.
"""
