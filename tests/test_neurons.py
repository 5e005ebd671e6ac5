"""Neurons as nodes: the hidden activations of feed-forward nodes are nodes of the same net."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference, tpm
from bnet_transformer.interventions import Zero
from tests.cases import CASES, WORD, close, jitter
from tests.sweep_oracle import D, get_outputs, make_metric, rotate_words


def state_steps() -> bt.BNet:
    """Feed-forward nodes as the states of slices, in the prologue too, recurrent, and outside the stacks."""
    stack = bt.Stack(
        [bt.Node("x", tpm.FeedForward(5, "tanh"), ["x"], WORD)],
        [bt.Node("token", tpm.Given(4), plates=WORD), bt.Node("x", tpm.FeedForward(3, "silu"), ["token"], WORD)],
        [
            bt.Node("h", tpm.FeedForward(3, "tanh"), [bt.Arrow("z", "before")], WORD, shape=(4,)),
            bt.Node("z", tpm.Add(), ["x", "h"], WORD, shape=(4,)),
        ],
        slices=2,
    )
    nodes = [bt.Node("pool", tpm.Pool(), [bt.Arrow("z", "every")]), bt.Node("y", tpm.FeedForward(2), ["pool"])]
    return jitter(bt.BNet(bt.Declaration([stack], nodes, name="states"))).to(D)


NETS = {case.name: case for case in CASES if any(isinstance(s.tpm, tpm.FeedForward) for s in case.net.network.specs)}


@pytest.mark.parametrize("name", [*NETS, "states"])
def test_the_net_with_neurons_computes_the_same(name, tmp_path):
    """Node by node and compiled, with the same tensors; the file has the neurons too."""
    net, text = (NETS[name].net, NETS[name].text) if name in NETS else (state_steps(), "the cat sat")
    exposed = net.expose_neurons()
    assert {id(value) for value in exposed.parameters.values()} == {id(value) for value in net.parameters.values()}
    exposed.save(tmp_path / "net.safetensors")
    s, t = net.sentence(text), bt.load(tmp_path / "net.safetensors").sentence(text)
    states = {spec.group.name: 1 for spec in net.network.choices}
    s, t = s.do(states), t.do(states)
    for node in s.nodes:
        spec = s.state.model.spec(s.ground.id(node))
        if spec.tpm.kind == "deterministic":
            close(t[node], s[node])
            close(reference.values(t.state.model, t.ground.id(node), {}), t[node])
    for spec in net.network.specs:
        if isinstance(spec.tpm, tpm.FeedForward):
            neurons = exposed.network.specs[exposed.network.get_spec(spec.group.name).parents[0].index]
            assert isinstance(neurons.tpm, tpm.Neurons) and neurons.shape == (spec.tpm.hidden,)
            assert neurons.group.step == spec.group.step and neurons.group.plates == spec.group.plates
    with pytest.raises(bt.BNetError, match="a feed-forward node"):
        exposed.expose_neurons()


def test_all_neurons_are_the_feed_forward_node():
    """They have no other child. If they are zero, the value is its bias."""
    for name in ("encoder, pre-norm", "vanilla decoder, learned", "vanilla encoder-decoder"):
        net, text = NETS[name].net.expose_neurons(), NETS[name].text
        clean, corrupt = net.sentence(rotate_words(net, text)), net.sentence(text)
        query = {"metric": make_metric(get_outputs(corrupt))}
        stem = "dec_" if "dec_x" in corrupt.ground.template.by_stem else ""
        neurons, ffn = (bt.sweep(clean, corrupt, at=f"{stem}{role}", **query) for role in ("neuron", "ffn"))
        close(neurons.outcomes, ffn.outcomes)
        assert ffn.effects.abs().max() > 1e-3 and neurons.names[0, 0] == f"{stem}neuron_0_0"
        first = bt.sweep(clean, corrupt, at=f"{stem}neuron", method=bt.Gradient(), **query)
        close(first.outcomes, bt.sweep(clean, corrupt, at=f"{stem}ffn", method=bt.Gradient(), **query).outcomes)
        bias = corrupt.net.parameters.get(f"{stem}ffn_0.bias", torch.zeros(4, dtype=D))
        close(corrupt.do({f"{stem}neuron_0_1": Zero()})[f"{stem}ffn_0_1"], bias)


def test_a_role_of_neurons_that_is_declared_already():
    nodes = [bt.Node("neuron", tpm.Linear(4), ["x"], WORD), bt.Node("ffn", tpm.FeedForward(3), ["neuron"], WORD)]
    stack = bt.Stack(nodes, [bt.Node("x", tpm.Given(4), plates=WORD)])
    with pytest.raises(bt.BNetError, match="'neuron'"):
        bt.BNet(bt.Declaration([stack])).expose_neurons()


def test_the_error_for_neurons_that_are_no_nodes():
    s = bt.decoder(4, heads=2, slices=1, features=2).sentence(x=torch.ones(2, 2))
    with pytest.raises(bt.UnknownNameError, match="expose_neurons"):
        s["neuron_0_1"]
