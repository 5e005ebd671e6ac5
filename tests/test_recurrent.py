"""Recurrent nets: torch's own modules, causality, surgery, padding, the path between words, bad input."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.models import weights_of
from bnet_transformer.tpm import Add, Attention, Categorical, Given, Normal, Recur, Weight
from tests.cases import CASES, close, jitter

D = torch.float64
CELLS = {"rnn": nn.RNN, "lstm": nn.LSTM}
RECURRENT = [case for case in CASES if case.name.startswith("recurr")]
WORD = ["word"]
GATES = ("input", "forget", "candidate", "output")


def make_pair(cell, features, dim, slices, dtype=D, **options):
    """Torch's net and ours, with the same weights."""
    torch.manual_seed(slices)
    peer = CELLS[cell](features, dim, slices, batch_first=True, **options).to(dtype)
    extra = {"activation": options["nonlinearity"]} if "nonlinearity" in options else {}
    bias = options.get("bias", True)
    net = bt.recurrent(dim, cell=cell, features=features, slices=slices, bias=bias, readout=None, **extra).to(dtype)
    return peer, net.replace(weights_of(peer, net=net))


# the nets of torch


@pytest.mark.parametrize("dtype, tolerance", [(D, 1e-10), (torch.float32, 1e-6)], ids=["float64", "float32"])
@pytest.mark.parametrize(
    "cell, features, dim, slices, options",
    [
        ("rnn", 5, 5, 1, {}),
        ("rnn", 3, 7, 3, {}),
        ("rnn", 2, 4, 2, {"nonlinearity": "relu", "bias": False}),
        ("lstm", 6, 6, 1, {}),
        ("lstm", 3, 7, 3, {}),
        ("lstm", 1, 4, 2, {"bias": False}),
    ],
)
def test_they_are_torchs(cell, features, dim, slices, options, dtype, tolerance):
    """Every word of the last slice, and the last state and cell of every slice, for some counts of words; gradients."""
    peer, net = make_pair(cell, features, dim, slices, dtype, **options)
    module, x = net.module(), torch.randn(3, 6, features, dtype=dtype)
    tolerances = {"rtol": tolerance, "atol": tolerance}
    states = [f"x_{t + 1}" for t in range(slices)]
    cells = [f"cell_{t}" for t in range(slices)] if cell == "lstm" else []
    values = module(x, want=[*states, *cells])
    torch.testing.assert_close(values[states[-1]], peer(x)[0], **tolerances)
    for words in (1, 4, 6):
        last = peer(x[:, :words])[1]
        for names, result in zip((states, cells), (last if cells else (last,)), strict=False):
            for name, value in zip(names, result, strict=True):
                torch.testing.assert_close(values[name][:, words - 1], value, **tolerances)
    weight = torch.randn(3, 6, dim, dtype=dtype)
    names = list(net.parameters)
    actual = torch.autograd.grad((module(x) * weight).sum(), [module.store[name.replace(".", "/")] for name in names])
    gradients = torch.autograd.grad((peer(x)[0] * weight).sum(), [*peer.parameters()])
    with torch.no_grad():
        for parameter, gradient in zip(peer.parameters(), gradients, strict=True):
            parameter.copy_(gradient / (2 if gradient.dim() == 1 else 1))  # our one bias is the sum of their two
    expected = weights_of(peer)
    for name, gradient in zip(names, actual, strict=True):
        scale = gradient.abs().max()
        torch.testing.assert_close(gradient / scale, expected[name] / scale, rtol=10 * tolerance, atol=10 * tolerance)


def test_a_copy_that_is_no_whole_one_is_refused():
    for options, message in (
        ({"bidirectional": True}, "bidirectional"),
        ({"proj_size": 2}, "proj_size=2"),
        ({"dropout": 0.5, "num_layers": 2}, "no dropout between layers.*got dropout=0.5"),
        ({"num_layers": 2}, "the net has no"),
        ({"bias": False}, "the module has no"),
    ):
        with pytest.raises(bt.BNetError, match=message):
            weights_of(nn.LSTM(**{"input_size": 4, "hidden_size": 4, **options}), net=bt.recurrent(4, readout=None))
    with pytest.raises(bt.BNetError, match="activation"):
        weights_of(nn.RNN(4, 4, nonlinearity="relu"), net=bt.recurrent(4, cell="rnn", readout=None))
    with pytest.raises(bt.BNetError, match=r"nn\.LSTM"):
        weights_of(nn.GRU(4, 4))


# laws


@settings(max_examples=20, deadline=None)
@given(cell=st.sampled_from([*CELLS]), n=st.integers(2, 6), slices=st.integers(1, 3), word=st.integers(0, 4))
def test_a_word_knows_no_later_word(cell, n, slices, word):
    """In the graph and in the values; and it depends on all earlier words."""
    word = min(word, n - 2)
    net = jitter(bt.recurrent(3, cell=cell, features=2, slices=slices)).to(D)
    module, x = net.module(), torch.randn(2, n, 2, dtype=D)
    changed = x.clone()
    changed[:, word + 1] += 1
    before, after = module(x), module(changed)
    assert before[:, : word + 1].equal(after[:, : word + 1]) and (before[:, word + 1 :] != after[:, word + 1 :]).all()
    s = net.sentence(x=x[0])
    reached = {int(name.rpartition("_")[2]) for name in s.descendants(f"x_0_{word + 1}")}
    assert reached == set(range(word + 1, n))


@pytest.mark.parametrize("cell", CELLS)
def test_padding_changes_no_word(cell):
    """Nor does padding in front: the arrow from an absent word is absent, and the first present word gets zeros."""
    net = jitter(bt.recurrent(3, cell=cell, features=2, slices=2)).to(D)
    module, x = net.module(), torch.randn(4, 5, 2, dtype=D)
    spans = ((0, 5), (0, 2), (3, 5), (4, 5))
    mask = torch.zeros(4, 5, dtype=torch.bool)
    for k, (first, end) in enumerate(spans):
        mask[k, first:end] = True
    result = module(x, mask)
    for k, (first, end) in enumerate(spans):
        expected = module(x[k : k + 1, first:end])[0]
        close(result[k, first:end], expected)


def test_the_word_before_where_all_are_the_same():
    """A node whose words have one value is zero before the first of them; a discrete one is in state 0."""
    nodes = [
        bt.Node("w", Weight(4)),
        bt.Node("u", Add(), ["w"], WORD),
        bt.Node("before", Add(), [bt.Arrow("u", "before")], WORD),
        bt.Node("x", Recur(4), ["before", bt.Arrow("x", "before", slice="next")], WORD, shape=(4,)),
    ]
    net = bt.BNet(bt.Declaration([bt.Stack(nodes, [bt.Node("x", Given(4), plates=WORD)])]))
    x = torch.randn(1, 3, 4)
    result = net.module()(x, want=["before_0", "x_1"])
    s = net.sentence(x=x[0])
    assert not result["before_0"][0, 0].any() and result["before_0"][0, 2].equal(net.parameters["w_0.value"])
    for i in range(3):
        torch.testing.assert_close(result["x_1"][0, i], s[f"x_1_{i}"])


@pytest.mark.parametrize("case", RECURRENT, ids=lambda case: case.name)
def test_setting_a_state_changes_what_comes_after_it(case):
    """Surgery on one node of a scanned group: only its descendants change, as in the reference."""
    s = case.sentence
    s = s.do(c=1) if "c" in s.net.network.graph.by_name else s
    for index in sorted(s.net.network.graph.recurrent):
        spec = s.net.network.specs[index]
        node = spec.group.name + "_0" * len(spec.group.plates) + "_1"
        intervened = s.do({node: torch.full(spec.shape, 0.7, dtype=D)})
        affected = {node, *s.descendants(node)}
        assert {name.rpartition("_")[2] for name in affected} <= {"1", "2"}
        run = reference.ReferenceRun(intervened.state.model, {})
        for name in s.nodes[::2]:
            node_id = s.ground.id(name)
            if s.net.network.specs[s.ground.group_of(node_id).index].tpm.kind == "deterministic":
                close(intervened[name], run.value(node_id))
                assert name in affected or intervened[name].equal(s[name])


@pytest.mark.parametrize("cell", CELLS)
def test_some_states_of_a_batch_are_set_within_the_scan(cell):
    """Each sentence equals a run of only that sentence with the same `do`."""
    net = jitter(bt.recurrent(3, cell=cell, features=2, slices=2)).to(D)
    module, x, patch = net.module(), torch.randn(2, 4, 2, dtype=D), torch.randn(2, 4, 3, dtype=D)
    mask = torch.tensor([[False, True, False, False], [False, False, False, True]])
    request = module.check_request(["x_1", "x_2"], x)
    state, plan = module.execute(replace(request, patched={request.outputs[0]: (patch, mask)}))
    one, two = (state.values[index] for index in plan.outputs)
    for k, word in enumerate((1, 3)):
        s = net.sentence(x=x[k]).do({f"x_1_{word}": patch[k, word]})
        for i in range(4):
            close(one[k, i], s[f"x_1_{i}"])
            close(two[k, i], s[f"x_2_{i}"])


@pytest.mark.parametrize("cell, gated", [("rnn", True), ("lstm", False)])
def test_what_the_state_of_a_word_separates(cell, gated):
    """In an RNN the state of a word separates later words from earlier ones; an LSTM also needs its cell."""
    s = bt.recurrent(3, cell=cell, features=2).sentence(x=torch.randn(4, 2))
    assert bool(s.separated("x_0_0", "x_1_3", given=["x_1_1"])) is gated
    assert s.separated("x_0_0", "x_1_3", given=["x_1_1"] if gated else ["x_1_1", "cell_0_1"])
    assert not s.separated("x_0_0", "x_1_3")


@pytest.mark.slow
def test_it_compiles_without_a_break():
    torch._dynamo.reset()  # clears the nets that other tests compiled
    module, x = bt.recurrent(3, features=2).module(), torch.randn(2, 2, 2)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), module(x))


# costs


@pytest.mark.parametrize("cell, maps", [("rnn", 1), ("lstm", 4)])
def test_the_path_between_words_is_as_long_as_the_sentence(cell, maps):
    net = bt.recurrent(8, cell=cell, slices=2, readout=None)
    cost, encoder_cost = net.cost(words=40), bt.encoder(8, heads=2, slices=2).cost(words=40)
    for one, other in zip(cost.slices, encoder_cost.slices, strict=True):
        assert (one.longest_path, one.longest_path_order, one.steps, one.steps_order) == (39, "O(n)", 40, "O(n)")
        assert (other.longest_path, other.longest_path_order, other.steps) == (1, "O(1)", 1)
    with FlopCounterMode(display=False) as counter:
        net.module()(torch.randn(1, 40, 8))
    assert cost.flops == counter.get_total_flops() == 2 * maps * 2 * 2 * 40 * 8 * 8


# words and readouts


def test_words_of_a_vocabulary_train_and_go_on():
    words = ["a", "b", "c"]
    net = bt.recurrent(16, vocabulary=words, readout="word")
    result = bt.train(net, ["a b c a b c a b"] * 4, steps=60, optimizer=bt.AdamW(rate=3e-2), progress=False)
    assert result.losses[-1] < 0.1 < result.losses[0]
    assert result.net.generate(["a b"], length=4).texts == ("c a b c",)


def test_its_sentences_answer():
    label = bt.recurrent(3, vocabulary=("a", "b"), readout=Categorical(2), pool="last", transform="tanh")
    assert label.sentence("a b b").parents("pool") == ["x_1_2"]
    torch.testing.assert_close(label.sentence("a b b").posterior("y").sum(), torch.tensor(1.0))
    s = jitter(bt.recurrent(3, features=2, readout=Normal(0.5, dim=2))).sentence(x=torch.randn(3, 2))
    assert s.tpm("y_2").mean.shape == (2,) and s.net.pyro() is not None
    assert r"\mathrm{cell}_{i-1}^t" in str(s.net.equations())


def test_real_words_of_an_attention_net():
    """Features are mapped to dim by one affine node; the readout is the next word's features."""
    for make in (bt.encoder, bt.decoder):
        net = make(4, heads=2, slices=1, features=3, dropout=0.0, readout="word")
        s = net.sentence(x=torch.randn(2, 3))
        assert s.parents("embed_1") == ["value_1"] and s.tpm("y_1").mean.shape == (3,)
        assert net.network.get_spec("value").tpm.kind == "input"
    stacks = bt.encoder_decoder(4, heads=2, slices=1, features=2, dropout=0.0, positions=None)
    s = stacks.sentence(x={"enc": torch.randn(3, 2), "dec": torch.randn(2, 2)})
    assert s.parents("dec_x_0_1") == ["dec_value_1"] and s.tpm("dec_y_1").mean.shape == (2,)
    assert {f"{stack}_x_0.{name}" for stack in ("enc", "dec") for name in ("weight", "bias")} <= set(stacks.parameters)


def test_the_words_of_a_decoder_are_shifted():
    """Each output is predicted from the outputs before it: the loss is that of teacher forcing, computed explicitly."""
    net = bt.encoder_decoder(4, heads=2, slices=1, features=2, dropout=0.0).to(D)
    window, target = torch.randn(5, 6, 2, dtype=D), torch.randn(5, 4, 2, dtype=D)
    mean = net.module().eval()({"enc": window, "dec": target[:, :-1]})
    expected = -torch.distributions.Normal(mean, 1.0).log_prob(target[:, 1:]).sum(-1).mean().detach()
    result = bt.train(net, (window, target), steps=1, batch=5, progress=False)
    assert result.losses[0] == pytest.approx(float(expected), rel=1e-9)
    started = bt.train(net, (window, target[:, 1:]), steps=1, batch=5, start=[0.0, 0.0], progress=False)
    zero = torch.cat([torch.zeros(5, 1, 2, dtype=D), target[:, 1:-1]], 1)
    mean = net.module().eval()({"enc": window, "dec": zero})
    expected = -torch.distributions.Normal(mean, 1.0).log_prob(target[:, 1:]).sum(-1).mean().detach()
    assert started.losses[0] == pytest.approx(float(expected), rel=1e-9)
    with pytest.raises(bt.BNetError, match="generate"):
        net.generate({"enc": window[0], "dec": target[0]})


def test_a_net_of_one_stack_requires_pairs_for_training():
    """A net of real words predicts next words only from data in pairs."""
    net = bt.decoder(4, heads=2, slices=1, features=1, dropout=0.0)
    x = torch.randn(3, 5, 1)
    assert bt.train(net, (x[:, :-1], x[:, 1:]), steps=1, progress=False).steps == 1
    with pytest.raises(bt.BNetError, match="pair"):
        bt.train(net, x, steps=1, progress=False)


# bad input


def test_shapes_that_do_not_fit():
    def build(*nodes):
        return bt.BNet(bt.Declaration([bt.Stack(nodes, [bt.Node("x", Given(4), plates=WORD)])]))

    before = bt.Arrow("h", "before")
    with pytest.raises(bt.DeclarationError, match="shape="):
        build(bt.Node("h", Recur(3), ["x", before], WORD))
    with pytest.raises(bt.DeclarationError, match=r"\(3,\)"):
        build(bt.Node("h", Recur(3), ["x", before], WORD, shape=(2,)))
    with pytest.raises(bt.DeclarationError, match="width 4"):
        build(bt.Node("h", Recur(3), ["x", "x"], WORD), bt.Node("x", bt.tpm.Gated(), ["x", "h"], WORD))
    with pytest.raises(bt.DeclarationError, match="vector"):
        build(bt.Node("c", Categorical(2), ["x"], WORD), bt.Node("h", Recur(3), ["x", "c"], WORD))


def test_the_shape_of_a_discrete_node_is_known():
    """A chain of states, and a codebook used at the word before, need no shape=; compared with products by hand."""
    before = bt.Arrow("z", "before")
    stack = bt.Stack([bt.Node("z", Categorical(3), [before], WORD)], [bt.Node("x", Given(2), plates=WORD)])
    net = jitter(bt.BNet(bt.Declaration([stack])), 1.0).to(torch.float64)
    table = net.parameters["z_0.logits"].softmax(-1)
    probs = net.parameters["z_0.initial"].softmax(-1)
    for i in range(4):
        torch.testing.assert_close(net.sentence("a b c d").posterior(f"z_0_{i}"), probs)
        probs = probs @ table
    nodes = [
        bt.Node("c", Categorical(2), [bt.Arrow("W", "before")], WORD),
        bt.Node("W", bt.tpm.Codebook(3, 2), ["c"], WORD),
        bt.Node("x", Add(), ["W", "x"], WORD),
    ]
    codebook = bt.BNet(bt.Declaration([bt.Stack(nodes, [bt.Node("x", Given(2), plates=WORD)])]))
    assert codebook.network.get_spec("W_0").shape == (2,) and codebook.sentence("a b").posterior("c_0_1").shape == (2,)


def test_a_row_of_attention_within_a_scan_is_refused():
    """Where attention is computed word after word, some nodes of a group cannot be patched."""
    nodes = [
        bt.Node("h", Recur(4), ["x", bt.Arrow("a", "before")], WORD),
        bt.Node("a", Attention(), ["x", bt.Arrow("h", "causal"), bt.Arrow("h", "causal")], WORD, shape=(4,)),
    ]
    net = bt.BNet(bt.Declaration([bt.Stack(nodes, [bt.Node("x", Given(4), plates=WORD)])]))
    module, x = net.module(), torch.randn(2, 3, 4)
    value, mask = torch.zeros(2, 1, 4), torch.tensor([[True, False, False]] * 2)
    with pytest.raises(bt.UnsupportedError, match="some nodes of a_0 are set and others are not"):
        request = module.check_request(["a_0"], x)
        module.execute(replace(request, patched={request.outputs[0]: (value.expand(2, 3, 4), mask)}))
