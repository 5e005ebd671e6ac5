"""Gates of a module multiply the values of a family; what heads and gates are told wrongly is refused."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.attention import damage
from bnet_transformer.tpm import Categorical, Normal
from tests.gate_helpers import BY_NAME, TEXTS, D, close, concat_net, inclusion


def gated_by_hand(net, x, family, gates, **options):
    """The output where the values of a family are computed, multiplied, and set."""
    module = net.module()
    result = module(x, want=[family], **options)[family]
    local = result.dim() - gates.dim()
    do = {**options.pop("do", {}), family: result * gates.reshape(*gates.shape, *[1] * local)}
    return module(x, do=do, **options)


@pytest.mark.parametrize(("name", "words"), [("concat", 40), ("codebook", 2), ("shared slices", 3), ("experts", 2)])
def test_gates_multiply_the_values_of_a_family(name, words):
    """Also where maps of many words would be folded into an attention, which then is not."""
    net = BY_NAME[name].net
    x, module = torch.randn(2, words, 4, dtype=D), net.module()
    members = net.network.specs
    choices = [m.group for m in members if m.tpm.kind == "discrete" and net.network.graph.out_edges[m.group.index]]
    free = {family.name: torch.tensor(1) for family in choices if family.word_stack is None}
    free |= {m.group.name: torch.ones(words, dtype=torch.long) for m in members if m.group.stem == "r"}
    tried = 0
    for member in members:
        if member.tpm.kind == "deterministic" and member.group.word_stack is not None:
            gates = (
                torch.rand(2, *(net.network.graph.plate_sizes[plate] for plate in member.group.plates), dtype=D) + 0.5
            )
            given = {member.group.name: gates}
            close(module(x, gates=given, do=free), gated_by_hand(net, x, member.group.name, gates, do=free), 1e-10)
            last = torch.ones_like(gates)
            close(module(x, gates={member.group.name: last}, do=free), module(x, do=free), 1e-10)
            tried += 1
    assert tried >= 4


def test_gates_pass_gradients_and_one_sentence_takes_many():
    net = concat_net(observe=Normal(0.5))
    x, module = torch.randn(1, 3, 4, dtype=D), net.module()
    many = torch.rand(5, 3, dtype=D).requires_grad_()
    together = module(x, gates={"a_0": many, "x_1": torch.ones(1, dtype=D)})
    close(together, torch.cat([module(x, gates={"a_0": row[None]}) for row in many]))
    (slope,) = torch.autograd.grad(together.sum(), many)
    step = torch.zeros_like(many)
    step[2, 1] = 1e-6
    separate = module(x, gates={"a_0": many + step}) - module(x, gates={"a_0": many - step})
    assert float(separate.sum().detach()) / 2e-6 == pytest.approx(float(slope[2, 1]), rel=1e-6)


def test_gates_that_fit_no_family_are_refused():
    module, x = concat_net(observe=Categorical(3)).module(), torch.randn(2, 3, 4, dtype=D)
    for given, match in (
        ({"a_0": torch.ones(2, 2, dtype=D)}, r"\[batch, head\] of shape \(2, 3\).*; got .*of shape \(2, 2\)"),
        ({"x_1": torch.tensor(1.0, dtype=D)}, r"of shape \(2,\).*; got .*of shape \(\)"),
        ({"a_0": torch.ones(2, 3)}, "float64.*got torch.float32"),
        ({"a_0": [1.0]}, "real numbers"),
        ({"y": torch.ones(2, dtype=D)}, "got states"),
        ({"a_9": torch.ones(2, 3, dtype=D)}, "near matches.*a_0"),
        ([1], "a mapping from names"),
    ):
        with pytest.raises(bt.BNetError, match=match):
            module(x, gates=given)


@pytest.mark.parametrize(
    ("name", "family", "match"),
    [("recurrent", "h_0", "word"), ("hidden Markov", "z_0", "word"), ("vanilla encoder", "y", "random"),
     ("encoder, pre-norm", "token", "states")],
)  # fmt: skip
def test_gates_on_what_is_no_vector_of_its_parents_are_refused(name, family, match):
    net = BY_NAME[name].net
    x = torch.randn(1, 3, 4, dtype=D) if name != "encoder, pre-norm" else torch.tensor([[0, 1, 2]])
    with pytest.raises(bt.UnsupportedError, match=match):
        net.module()(x, gates={family: torch.ones(1, dtype=D)})


# bad input

X = torch.randn(3, 2, 4, dtype=D, generator=torch.Generator().manual_seed(0))
Y = torch.zeros(3, 2, dtype=torch.long)


REFUSED = [
    (X, {"sigma": 0}, "sigma: expected a finite number above 0"),
    (X, {"sigma": 1e-200}, "one head off moves y"),
    (X, {"sigma": 1e200}, "one head off moves y"),
    ((X, Y), {"sigma": 1.0}, "sentences alone"),
    (X, {"output": "x_9"}, "known name"),
    (X, {"output": "x_0"}, "heads that are summed"),
    (X, {"role": "b"}, "role of heads.*'b'"),
    (X, {"method": "mcmc"}, "'exact', 'svi'"),
    (X, {"interval": 1}, "between 0 and 1"),
    (X, {"rounds": 2, "method": "svi"}, "at least 3"),
    (X, {"budget": 23}, "24: 3 sentences under 8 settings of 3 gates.*2 sentences.*svi"),
    ([], {}, "a list of sentences"),
    ([(X[0], None)], {}, "y"),
]


def test_bad_input_is_told():
    net = concat_net(observe=Categorical(3))
    for data, options, match in REFUSED:
        with pytest.raises(bt.BNetError, match=match):
            inclusion(net, data, **options)


def test_nets_that_have_no_gates_are_refused():
    with pytest.raises(bt.BNetError, match=r"chosen by c.*combine='concat' sums heads"):
        inclusion(bt.bayesuvius(4, observe=Categorical(3)), torch.randn(3, 2, 4))
    many = bt.bayesuvius(4, heads=13, combine="concat")
    with pytest.raises(bt.BNetError, match=r"at most 12 heads.*8,192 settings.*method='svi'"):
        inclusion(many, torch.randn(1, 2, 4))
    assert inclusion(many, torch.randn(1, 2, 4), method="svi", rounds=3).log_bayes.shape == (1, 13)
    with pytest.raises(bt.BNetError, match="a net"):
        inclusion("minilm", TEXTS)
    silent = concat_net(slices=1)
    silent = silent.replace({"W_o_0.value": torch.zeros(3, 4, 4, dtype=D)})
    with pytest.raises(bt.BNetError, match=r"output: .*a head moves when it is off; got x_1"):
        inclusion(silent, X)


def test_damage_is_asked_of_sentences_like_those_of_the_measures():
    net = concat_net(observe=Categorical(3))
    observed, around = inclusion(net, (X, Y)), inclusion(net, X)
    with pytest.raises(bt.BNetError, match=r"P\(y \| x\), as the measures"):
        damage(observed, X, progress=False)
    with pytest.raises(bt.BNetError, match="sentences alone"):
        damage(around, (X, Y), progress=False)
    for counts in ([7], [-1], [], 3, ["one"], [0.5]):
        with pytest.raises(bt.BNetError, match="counts"):
            damage(observed, counts=counts, progress=False)


def test_the_net_of_the_user_stays_as_it_was():
    net = concat_net(observe=Categorical(3))
    retained = {name: value.clone() for name, value in net.parameters.items()}
    module = net.module()
    inclusion(net, (X, Y))
    inclusion(net, X, method="svi", rounds=3)
    assert all(torch.equal(net.parameters[name], value) for name, value in retained.items())
    assert all(value.requires_grad and value.grad is None for value in module.parameters())
