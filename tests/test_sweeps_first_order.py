"""First-order sweeps: the gradient of the metric, for every role; nodes without a gradient raise errors."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.interventions import Noise, Zero
from tests.cases import get_case
from tests.sweep_oracle import D, get_outputs, make_metric, make_pair, nonlinear
from tests.test_sweeps import READERS, REFUSED, ROLES, close, find_roles, make_examples, make_net, make_sentences

NOISE_SCALE = 1e-6
# Roles computed word after word, or whose values decide a choice: a sweep runs their cells one at a time.
SEQUENTIAL = {
    "recurrent": {"h"},
    "recurrent, rnn": {"x"},
    "recurrent, lstm": {"token", "x", "input", "forget", "output", "candidate", "cell"},
    "recurrences": {"h", "m", "p"},
    "marginal": {"q", "k", "v", "W_q", "W_k", "W_v"},
}
# Weights below a choice; none left.
UNMOVED = {"chapter, real", "corpus", "slice", "hidden Markov", "experts", *SEQUENTIAL}


def add_noise(s, first=()):
    """Return the same sentence with a little noise in nodes of the first role that supports noise."""
    for role in (*first, *find_roles(s.net)):
        names = [s.ground.name(node) for node in s.ground.select_nodes(s.ground.template.by_stem[role][0]).tolist()]
        try:
            return s.do({name: Noise(NOISE_SCALE) for name in names})
        except bt.BNetError:  # of weights that depend on a choice
            continue
    raise AssertionError("no such nodes")


def check_effects(estimate, result):
    """Check first-order effects of small noise against measured ones, and return the scale of effects."""
    scale = float(result.effects.nan_to_num().abs().max())
    assert estimate.first_order and not result.first_order
    torch.testing.assert_close(estimate.effects, result.effects, rtol=1e-4, atol=1e-4 * scale + 1e-14, equal_nan=True)
    assert estimate.axes == result.axes and estimate.names == result.names and estimate.labels == result.labels
    torch.testing.assert_close(estimate.corrupt, result.corrupt, rtol=0, atol=0)
    return scale


@pytest.mark.parametrize("name", [name for name in ROLES if name != "word"])
def test_a_small_change_has_the_first_order_effect(name):
    _, corrupt = make_pair(get_case(name))
    query = make_metric(get_outputs(corrupt))
    largest, refused = 0.0, set()
    for role in ROLES[name]:
        if (name, role) in REFUSED:
            continue
        clean = add_noise(corrupt, [role])
        result = bt.sweep(clean, corrupt, at=role, metric=query)
        try:
            estimate = bt.sweep(clean, corrupt, at=role, metric=query, first_order=True)
        except bt.BNetError as error:
            assert "first_order" in str(error)
            refused.add(role)
        else:
            largest = max(largest, check_effects(estimate, result))
    assert largest > NOISE_SCALE / 1000 or name in UNMOVED
    assert not refused - SEQUENTIAL.get(name, set()), "what a batch can hold has slopes"


@pytest.mark.parametrize("name", READERS)
def test_rows_of_attention_have_slopes_too(name):
    """Whole rows, and single entries."""
    _, corrupt = make_pair(get_case(name))
    sides = add_noise(corrupt), corrupt
    query = {"at": READERS[name][0], "metric": make_metric(get_outputs(corrupt))}
    rows = bt.sweep(*sides, **query)
    check_effects(bt.sweep(*sides, first_order=True, **query), rows)
    over = (*rows.axes, "read")
    check_effects(bt.sweep(*sides, over=over, first_order=True, **query), bt.sweep(*sides, over=over, **query))


def test_in_parts_as_at_once():
    net = make_net(heads=3, observe=bt.tpm.Categorical(3))
    clean, corrupt = make_examples(net, 5)
    query = {"at": "x", "metric": {"y_2": (0, 1)}, "first_order": True}
    result = bt.sweep(clean, corrupt, **query)
    close(bt.sweep(clean, corrupt, memory=1, **query).effects, result.effects)
    per_example = [bt.sweep(a, b, **query) for a, b in zip(clean, corrupt, strict=True)]
    close(torch.cat([one.effects for one in per_example], -1), result.effects)
    close(result.clean, bt.sweep(clean, corrupt, at="x", metric={"y_2": (0, 1)}).clean)
    assert "to first order" in repr(result) and "to first order" in result._repr_html_()
    assert result.select(slice=1).first_order


def test_cells_of_names_and_of_an_ablation():
    """A name, a pattern, zeros: the gradient times the change of the value."""
    net = make_net(observe=bt.tpm.Categorical(3))
    s = make_sentences(net)[1]
    query = {"metric": {"y_2": (0, 1)}, "first_order": True}
    result = bt.sweep(Zero(), s, at=["v_1_0_1", "v_1_*_1"], **query)
    per_node = bt.sweep(Zero(), s, at="v", **query)
    close(result.values[0], per_node["v_1_0_1"])
    close(result.values[1], per_node["v_1_0_1"] + per_node["v_1_1_1"])


def test_what_has_no_slope_is_refused():
    net = make_net(observe=bt.tpm.Categorical(3))
    clean, corrupt = make_sentences(net)
    query = {"metric": {"y_2": (0, 1)}, "first_order": True}
    for function in (lambda y_2: y_2.detach()[:, 0], lambda y_2: y_2.argmax(-1).double()):
        with pytest.raises(bt.BNetError, match="metric: expected a metric with a gradient"):
            bt.sweep(clean, corrupt, metric=function, first_order=True)
    with pytest.raises(bt.BNetError, match=r"metric: expected a metric with a finite gradient .* got NaN or infinity"):
        bt.sweep(clean, corrupt, metric=lambda y_2: (y_2 - y_2).sum(-1).abs().sqrt(), first_order=True)


@pytest.mark.parametrize(("mode", "at"), [(torch.no_grad, "x"), (torch.inference_mode, "j")])
def test_slopes_are_the_same_without_gradients_around_them(mode, at):
    net = make_net(observe=bt.tpm.Categorical(3))
    query = {"at": at, "metric": {"y_2": (0, 1)}, "first_order": True}
    with mode():
        result = bt.sweep(*make_sentences(net), **query)
    assert result.effects.equal(bt.sweep(*make_sentences(net), **query).effects)
    assert result.values.abs().max() > 0


def test_words_have_no_slope():
    """States are discrete."""
    net = make_net(vocabulary=["cat", "dog", "cats", "the", "sat"], observe=bt.tpm.Categorical(3))
    clean, corrupt = make_sentences(net)
    with pytest.raises(
        bt.BNetError, match=r"at token: expected nodes with real values.*got discrete nodes. Use first_order=Fal"
    ):
        bt.sweep(clean, corrupt, at="token", metric={"y_2": (0, 1)}, first_order=True)
    with pytest.raises(bt.BNetError, match="at token: expected nodes with real values"):
        bt.sweep(clean, corrupt, at="token -> x", metric={"y_2": (0, 1)}, first_order=True)


def test_parameters_are_as_they_were():
    net = make_net(observe=bt.tpm.Categorical(3))
    clean, corrupt = make_sentences(net)
    before = {name: (value.requires_grad, value.grad) for name, value in net.parameters.items()}
    bt.sweep(clean, corrupt, metric=lambda x_2_0, y_2: nonlinear(x_2_0, y_2), first_order=True)
    assert {name: (value.requires_grad, value.grad) for name, value in net.parameters.items()} == before
    assert net.network.dtype == D
