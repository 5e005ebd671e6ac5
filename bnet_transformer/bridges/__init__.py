"""Bridges to other libraries: graphs for networkx, tables for pgmpy and BIF, a model for Pyro."""
