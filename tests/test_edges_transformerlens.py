"""Edges of a sweep, compared with hooks and attribution patching of TransformerLens on the same random GPT-2."""

import pytest
import torch

from benchmarks import edges as peers


@pytest.fixture(scope="module")
def nets():
    pytest.importorskip("transformer_lens", reason='the oracle: pip install "bnet-transformer[peers]"')
    return peers.Nets.create(slices=2, heads=2, dim=16, words=6, count=3)


@pytest.mark.parametrize("first_order", [True, False])
def test_edges_are_those_of_hooks_of_transformer_lens(nets, first_order):
    actual = peers.list_package_scores(peers.run_package_edges(nets, first_order=first_order))
    edges = peers.list_edges(2, 2)
    assert {f"{writer}->{reader}" for writer, reader in edges} == actual.keys()
    expected = peers.score_by_hooks(nets) if first_order else peers.patch_by_hooks(nets, edges)
    first, second = (torch.tensor([scores[name] for name in actual]) for scores in (actual, expected))
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)
    assert float(second.abs().max()) > 0.01
