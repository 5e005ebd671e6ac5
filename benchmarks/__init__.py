"""Measured figures: `python -m benchmarks [row ...]`. Targets are printed beside them, never asserted."""
