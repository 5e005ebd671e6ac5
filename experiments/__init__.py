"""Experiments: trainings whose results are in docs/experiments; `make experiments` runs them."""
