"""Pictures: figures of graphs, and plots of results."""
