"""Edges of SmolLM2: the laws of all edges, and the exact effects of edges into the readout, from end to end."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.interventions.edges.runner import build_edge_runner
from bnet_transformer.pretrained.source import is_installed

SLICES, HEADS, GROUPS = 30, 9, 3
TEXTS = "The dog chased the", "The cat chased the"
OPTIONS = {"metric": {"y_3": (" cat", " dog")}, "direction": "noise"}


@pytest.fixture(scope="module")
def pair():
    if not is_installed("smollm2"):
        pytest.skip("the weights: make smollm2")
    net = bt.from_pretrained("smollm2")
    return tuple(map(net.sentence, TEXTS))


@pytest.mark.slow
def test_edges_are_counted_for_each_head_and_group(pair):
    names = [name.split(" -> ") for name in build_edge_runner(*pair, OPTIONS["metric"]).edge_names]
    readers = {reader: 0 for _, reader in names}
    for _, reader in names:
        readers[reader] += 1
    per_slice = HEADS + 1  # the heads and the feed-forward step
    for t in (0, 17):
        before = 1 + t * per_slice
        assert [readers[f"{role}_{t}_{group}"] for role in "kv" for group in range(GROUPS)] == [before] * 2 * GROUPS
        assert [readers[f"q_{t}_{g}_{h}"] for g in range(GROUPS) for h in range(HEADS // GROUPS)] == [before] * HEADS
    assert readers["y"] == 1 + SLICES * per_slice
    assert len(names) == sum(
        (HEADS + 2 * GROUPS) * (1 + t * per_slice) + 1 + t * per_slice + HEADS for t in range(SLICES)
    ) + 1 + SLICES * per_slice


@pytest.mark.slow
def test_circuits_of_all_and_of_no_edges_are_the_clean_and_the_corrupt_run(pair):
    runner = build_edge_runner(*pair, OPTIONS["metric"])
    logits = [s["logits_3"] for s in pair]
    states = [pair[0].net.states.index(token) for token in (" cat", " dog")]
    for actual, values in zip((runner.evaluate_clean(), runner.evaluate_corrupt()), logits, strict=True):
        torch.testing.assert_close(actual[0], (values[states[0]] - values[states[1]]).double(), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_edges_into_the_readout_add_up_to_first_order(pair):
    """All edges that change one writer of the readout equal a run of the reader; a small change is linear."""
    clean, corrupt = pair
    estimates = bt.sweep(clean, corrupt, at="edges", first_order=True, **OPTIONS)
    assert torch.isfinite(estimates.effects).all()
