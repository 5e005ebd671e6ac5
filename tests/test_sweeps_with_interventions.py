"""Sweeps of sentences with interventions: these hold in every cell, batched or one at a time."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.interventions import Attend, Zero
from tests.cases import jitter
from tests.sweep_oracle import D, Oracle, get_cells, make_metric, set_rows, set_values
from tests.test_sweeps import close

SURGERY = {
    "one head of every word": {"a_0_1_*": Zero()},
    "one head of a word": {"a_0_1_2": Zero(), "v_1_0_1": Zero()},
    "a row": {"a_0_0_3": Attend([0.2, 0.3, 0.4, 0.1])},
    "a row beside a head": {"a_0_0_3": Attend([0.2, 0.3, 0.4, 0.1]), "a_0_2_3": Zero()},
    "a state": {"x_1_1": Zero()},
    "a query": {"q_0_1_3": torch.ones(2, dtype=D)},
    "all heads of a word": {"a_1_*_3": Zero()},
}
NAMES = ("y_3", "x_2_2")


@pytest.fixture(scope="module")
def net():
    words = ["the", "a", "cat", "dog", "sat"]
    options = {"heads": 3, "slices": 2, "norm": "pre", "vocabulary": words, "dropout": 0.0}
    return jitter(bt.decoder(dim=6, **options)).to(D)


SIDES = [("corrupt", 2**29), ("both", 1), ("clean", 2**29)]


@pytest.mark.parametrize(
    ("label", "side", "memory"),
    [pytest.param(label, *SIDES[k % 3], marks=[pytest.mark.slow] * (k % 3 > 0)) for k, label in enumerate(SURGERY)],
)
def test_what_is_set_stays_set(net, label, side, memory):
    clean, corrupt = net.sentence("the cat sat a"), net.sentence("the dog a sat")
    clean = clean.do(SURGERY[label]) if side != "corrupt" else clean
    corrupt = corrupt.do(SURGERY[label]) if side != "clean" else corrupt
    oracle = Oracle(clean, corrupt, NAMES)
    for role, over in (("x", None), ("a", None), ("k", ("head",))):
        result = bt.sweep(clean, corrupt, at=role, over=over, metric=make_metric(NAMES), memory=memory)
        for index, nodes in list(get_cells(corrupt, role, over).items())[1::13]:
            close(result.outcomes[index][0], oracle.evaluate(set_values(nodes)))
    if side == "corrupt" or not any(name.startswith("a") and isinstance(v, Zero) for name, v in SURGERY[label].items()):
        for over in (None, ("head",)):
            result = bt.sweep(clean, corrupt, at="j", over=over, metric=make_metric(NAMES), memory=memory)
            for index, nodes in list(get_cells(corrupt, "a", over).items())[2::13]:
                close(result.outcomes[index][0], oracle.evaluate(set_rows(nodes)))


def test_a_row_of_a_node_that_is_set_is_refused(net):
    clean, corrupt = net.sentence("the cat sat a").do({"a_0_1_2": Zero()}), net.sentence("the dog a sat")
    with pytest.raises(bt.BNetError, match=r"a_0.* is set by do, and has no attention"):
        bt.sweep(clean, corrupt, at="j", metric={"y_3": "cat"})
