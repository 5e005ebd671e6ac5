"""Gates of a module multiply the values of a node group; invalid gates and options of inclusion raise errors."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.attention import damage
from bnet_transformer.tpm import Categorical, Normal
from tests.gate_helpers import BY_NAME, D, close, concat_net, inclusion


def apply_gates(net, x, group, gates, **options):
    """Return the output where the values of a node group are computed, multiplied by gates, and set by `do`."""
    module = net.module()
    values = module(x, want=[group], **options)[group]
    ndim = values.dim() - gates.dim()
    do = {**options.pop("do", {}), group: values * gates.reshape(*gates.shape, *[1] * ndim)}
    return module(x, do=do, **options)


@pytest.mark.parametrize(("name", "words"), [("concat", 40), ("codebook", 2), ("shared slices", 3), ("experts", 2)])
def test_gates_multiply_the_values_of_a_family(name, words):
    """Also where linear maps of many words would be fused into attention; gates prevent this."""
    net = BY_NAME[name].net
    x, module = torch.randn(2, words, 4, dtype=D), net.module()
    specs = net.network.specs
    choices = [s.group for s in specs if s.tpm.kind == "discrete" and net.network.graph.out_edges[s.group.index]]
    fixed = {group.name: torch.tensor(1) for group in choices if group.word_stack is None}
    fixed |= {s.group.name: torch.ones(words, dtype=torch.long) for s in specs if s.group.stem == "r"}
    count = 0
    for spec in specs:
        if spec.tpm.kind == "deterministic" and spec.group.word_stack is not None:
            gates = torch.rand(2, *(net.network.graph.plate_sizes[plate] for plate in spec.group.plates), dtype=D) + 0.5
            gated = {spec.group.name: gates}
            close(module(x, gates=gated, do=fixed), apply_gates(net, x, spec.group.name, gates, do=fixed), 1e-10)
            ones = torch.ones_like(gates)
            close(module(x, gates={spec.group.name: ones}, do=fixed), module(x, do=fixed), 1e-10)
            count += 1
    assert count >= 4


def test_gates_pass_gradients_and_one_sentence_takes_many():
    net = concat_net(observe=Normal(0.5))
    x, module = torch.randn(1, 3, 4, dtype=D), net.module()
    gates = torch.rand(5, 3, dtype=D).requires_grad_()
    batched = module(x, gates={"a_0": gates, "x_1": torch.ones(1, dtype=D)})
    close(batched, torch.cat([module(x, gates={"a_0": row[None]}) for row in gates]))
    (gradient,) = torch.autograd.grad(batched.sum(), gates)
    step = torch.zeros_like(gates)
    step[2, 1] = 1e-6
    difference = module(x, gates={"a_0": gates + step}) - module(x, gates={"a_0": gates - step})
    assert float(difference.sum().detach()) / 2e-6 == pytest.approx(float(gradient[2, 1]), rel=1e-6)


def test_gates_that_fit_no_family_are_refused():
    module, x = concat_net(observe=Categorical(3)).module(), torch.randn(2, 3, 4, dtype=D)
    for gates, match in (
        ({"a_0": torch.ones(2, 2, dtype=D)}, r"\[batch, head\] of shape \(2, 3\).*; got .*of shape \(2, 2\)"),
        ({"x_1": torch.tensor(1.0, dtype=D)}, r"of shape \(2,\).*; got .*of shape \(\)"),
        ({"a_0": torch.ones(2, 3)}, "float64.*got torch.float32"),
        ({"a_0": [1.0]}, "real numbers"),
        ({"y": torch.ones(2, dtype=D)}, "got a discrete group"),
        ({"a_9": torch.ones(2, 3, dtype=D)}, "near matches.*a_0"),
        ([1], "a mapping from names"),
    ):
        with pytest.raises(bt.BNetError, match=match):
            module(x, gates=gates)


@pytest.mark.parametrize(
    ("name", "group", "match"),
    [("recurrent", "h_0", "a recurrent group"), ("hidden Markov", "z_0", "a recurrent group"),
     ("vanilla encoder", "y", "random"), ("encoder, pre-norm", "token", "a discrete group")],
)  # fmt: skip
def test_unsupported_gates_are_refused(name, group, match):
    net = BY_NAME[name].net
    x = torch.randn(1, 3, 4, dtype=D) if name != "encoder, pre-norm" else torch.tensor([[0, 1, 2]])
    with pytest.raises(bt.UnsupportedError, match=match):
        net.module()(x, gates={group: torch.ones(1, dtype=D)})


# bad input

X = torch.randn(3, 2, 4, dtype=D, generator=torch.Generator().manual_seed(0))
Y = torch.zeros(3, 2, dtype=torch.long)


REFUSED = [
    (X, {"sigma": 1e-200}, "one head changes y"),
    (X, {"sigma": 1e200}, "one head changes y"),
    ((X, Y), {"sigma": 1.0}, "sentences without observations"),
    (X, {"output": "x_0"}, "a net that sums heads"),
    (X, {"rounds": 2, "method": "svi"}, "at least 3"),
    (X, {"rounds": 7, "method": "gibbs"}, "at least 8"),
    (X, {"budget": 23}, "24 .3 sentences x 8 settings of 3 gates.*2 sentences.*svi"),
    ([(X[0], None)], {}, "y"),
]


def test_bad_input_is_refused():
    net = concat_net(observe=Categorical(3))
    for data, options, match in REFUSED:
        with pytest.raises(bt.BNetError, match=match):
            inclusion(net, data, **options)


def test_nets_that_have_no_gates_are_refused():
    with pytest.raises(bt.BNetError, match=r"chosen by c.*combine='concat'"):
        inclusion(bt.bayesuvius(4, observe=Categorical(3)), torch.randn(3, 2, 4))
    large = bt.bayesuvius(4, heads=13, combine="concat")
    with pytest.raises(bt.BNetError, match=r"at most 12 heads.*8,192 settings.*method='svi'"):
        inclusion(large, torch.randn(1, 2, 4))
    assert inclusion(large, torch.randn(1, 2, 4), method="svi", rounds=3).log_bayes.shape == (1, 13)
    zeroed = concat_net(slices=1)
    zeroed = zeroed.replace({"W_o_0.value": torch.zeros(3, 4, 4, dtype=D)})
    with pytest.raises(bt.BNetError, match=r"output: .*changes when a head is off; got x_1"):
        inclusion(zeroed, X)


@pytest.mark.slow
def test_damage_requires_sentences_like_those_of_the_measures():
    net = concat_net(observe=Categorical(3))
    observed, around = inclusion(net, (X, Y)), inclusion(net, X)
    with pytest.raises(bt.BNetError, match=r"P\(y \| x\), as in the result"):
        damage(observed, X, progress=False)
    with pytest.raises(bt.BNetError, match="sentences without observations"):
        damage(around, (X, Y), progress=False)
    for counts in ([7], [-1], [], 3, ["one"], [0.5]):
        with pytest.raises(bt.BNetError, match="counts"):
            damage(observed, counts=counts, progress=False)


@pytest.mark.slow
def test_the_net_of_the_user_stays_as_it_was():
    net = concat_net(observe=Categorical(3))
    before = {name: value.clone() for name, value in net.parameters.items()}
    module = net.module()
    inclusion(net, (X, Y))
    inclusion(net, X, method="svi", rounds=3)
    inclusion(net, X, method="gibbs", rounds=8)
    assert all(torch.equal(net.parameters[name], value) for name, value in before.items())
    assert all(value.requires_grad and value.grad is None for value in module.parameters())
