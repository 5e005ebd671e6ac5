"""The formulas of edges, compared with TransformerLens on the same random GPT-2."""

import pytest
import torch

from benchmarks import edges as peers
from tests.eap_ig_formulas import EdgeGraph, score_eap, score_exactly


@pytest.fixture(scope="module")
def nets():
    pytest.importorskip("transformer_lens", reason='the oracle: pip install "bnet-transformer[peers]"')
    return peers.Nets.create(slices=2, heads=2, dim=16, words=6, count=3)


def metric(logits):
    return peers.compute_difference(logits).sum()


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    names = list(expected)
    first, second = (torch.tensor([scores[name] for name in names]) for scores in (actual, expected))
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)
    assert float(second.abs().max()) > 0.01


def test_eap_is_that_of_hooks_of_transformer_lens_and_of_its_attribution_patching(nets):
    expected = score_eap(EdgeGraph(nets.model), nets.clean, nets.corrupt, metric)
    assert_equal(peers.score_plainly(nets), expected)
    assert_equal(peers.score_by_hooks(nets), expected)
    # Its gradient is that of the corrupt run, and its direction is from corrupt to clean.
    at_corrupt = score_eap(EdgeGraph(nets.model), nets.corrupt, nets.clean, metric)
    assert_equal(peers.score_by_attribution_patch(nets), at_corrupt)


def test_exact_edges_are_those_of_hooks_of_transformer_lens(nets):
    expected = score_exactly(EdgeGraph(nets.model), nets.clean, nets.corrupt, metric)
    edges = peers.list_edges(2, 2)
    assert {f"{writer}->{reader}" for writer, reader in edges} == set(expected)
    assert_equal(peers.patch_by_hooks(nets, edges), {f"{u}->{v}": expected[f"{u}->{v}"] for u, v in edges})
    assert_equal(peers.patch_plainly(nets, edges), {f"{u}->{v}": expected[f"{u}->{v}"] for u, v in edges})
