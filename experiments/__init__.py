"""Experiments: trainings whose results stand in docs/experiments; `make experiments` runs them."""
