"""Benchmarks: rows that compare this library with other libraries on equal work; `python -m benchmarks`."""
