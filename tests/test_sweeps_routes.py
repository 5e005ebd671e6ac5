"""The algorithm for the cells of a sweep: chosen from the structure, explained beforehand, with equal results."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.inference import plan as planner
from bnet_transformer.inference.plan import Obstacle, PerformanceWarning
from bnet_transformer.interventions import Attend, Zero, engine
from tests.cases import get_case
from tests.sweep_oracle import forbid_shared_runs, get_outputs, make_metric, make_pair
from tests.test_sweeps import close, make_net, make_sentences


def make_query(name, at="x"):
    clean, corrupt = make_pair(get_case(name))
    return (clean, corrupt), {"at": at, "metric": make_metric(get_outputs(corrupt))}


def test_a_plain_net_shares_one_run():
    clean, corrupt = make_sentences(make_net(observe=bt.tpm.Categorical(3)))
    plan = bt.explain("sweep", clean, corrupt, at="q", metric={"y_2": (0, 1)})
    assert (plan.algorithm, plan.node, plan.parts, plan.evaluations) == ("compiled", None, (), 0)
    assert plan.is_exact and plan.flops > 0
    single = bt.explain("sweep", clean, corrupt, at=["q_0_0_1"], metric={"y_2": (0, 1)})
    assert single.question == "sweep of 1 cell" and single.flops < plan.flops
    first = bt.explain("sweep", clean, corrupt, at="q", metric={"y_2": (0, 1)}, method=bt.Gradient())
    assert first.algorithm == "compiled" and not first.is_exact and "gradient" in first.reason


def test_each_kind_of_cell_has_its_route():
    """Cells below the recurrence share a run, each cell above it has a separate run; the node is named."""
    sentences, options = make_query("recurrent")
    plan = bt.explain("sweep", *sentences, **options)
    assert plan.algorithm == "sequential"
    assert [(part.algorithm, part.node) for part in plan.parts] == [
        ("compiled", None),
        ("sequential", "h_0"),
        ("sequential", "h_1"),
    ]
    assert str(plan).count("\n") == 3 and "is computed word by word" in str(plan)


@pytest.mark.parametrize(
    ("name", "at", "node"), [("marginal", "W_q", "j_0"), ("hidden Markov", "W", "z_0"), ("recurrent, rnn", "x", "x_1")]
)
def test_the_node_that_forbids_one_run_is_named(name, at, node):
    sentences, options = make_query(name, at)
    plan = bt.explain("sweep", *sentences, **options)
    assert (plan.parts or (plan,))[0].node == node and plan.flops is None and plan.evaluations > 0


def test_rows_of_a_set_node_run_separately():
    clean, corrupt = make_sentences(make_net(observe=bt.tpm.Categorical(3)))
    corrupt = corrupt.do({"a_0_1_2": Attend([0.2, 0.5, 0.3]), "a_1_0_0": Zero()})
    plan = bt.explain("sweep", clean, corrupt, at="j", metric={"y_2": 1})
    assert [part.node for part in plan.parts] == ["a_0_1_2", "a_1_0_0"]
    plan = bt.explain("sweep", clean, corrupt, at="x", metric={"y_2": 1})
    assert [(part.algorithm, part.node) for part in plan.parts] == [("compiled", None), ("sequential", "a_0")]


@pytest.mark.parametrize(("at", "blocked"), [("x", "all"), ("j", "all"), ("a", "some"), ("v -> a", "some")])
def test_both_algorithms_give_the_same_numbers(monkeypatch, at, blocked):
    clean, corrupt = make_sentences(make_net(observe=bt.tpm.Categorical(3)))
    options = {"at": at, "metric": make_metric(["y_0", "x_2_2"])}
    batched = bt.sweep(clean, corrupt, **options)
    obstacle = Obstacle("x_1", "in the way")
    if blocked == "all":
        forbid_shared_runs(monkeypatch)
    else:
        monkeypatch.setattr(engine, "find_obstacles", lambda *_, **__: (None, dict.fromkeys(range(3), obstacle)))
    sequential = bt.sweep(clean, corrupt, **options)
    torch.testing.assert_close(sequential.outcomes, batched.outcomes, rtol=1e-10, atol=1e-10, equal_nan=True)
    close(sequential.clean, batched.clean)
    close(sequential.corrupt, batched.corrupt)


def test_a_slow_sweep_warns_before_it_starts(monkeypatch):
    sentences, options = make_query("recurrent")
    monkeypatch.setattr(planner, "WARN_EVALUATIONS", 10)
    with pytest.raises(PerformanceWarning, match=r"sweep of 9 cells: sequential.*\n.*\n.*h_0 is computed"):
        bt.sweep(*sentences, **options)


def test_slopes_of_a_recurrence_are_refused_with_the_node():
    sentences, options = make_query("recurrent", "h")
    with pytest.raises(bt.BNetError, match="method: cells cannot share a run, because h_0 is computed"):
        bt.sweep(*sentences, **options, method=bt.Gradient())
