"""Bridges to other libraries.

networkx   template and ground graphs as networkx graphs, node-link JSON and GraphML
pgmpy      the discrete part of a sentence's bnet as tables, for pgmpy and as BIF
pyro       the net as a Pyro model

To add a text format for graphs, add its writer to `networkx.get_graph_writers`; `drawing` selects it by the suffix.
"""
