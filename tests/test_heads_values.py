"""Inclusion of heads that become other values than zero when they are off, compared with sentences under `do`."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.attention import damage
from bnet_transformer.attention.gates import gate_settings
from bnet_transformer.attention.inclusion import create_runs, gate_slopes
from bnet_transformer.interventions import Mean, Noise, Project, Scale, Swap, Zero
from tests.gate_helpers import BY_NAME, TEXTS, VOCABULARY, D, close, get_names, get_output, inclusion, log_prob
from tests.test_heads_runs import make_inputs

DONORS = ["a dog sat on the mat", "the cat ran off a mat"]


def shrink(value):
    return value.tanh() - 0.2


VALUES = {
    "mean": lambda net: Mean([net.sentence(text) for text in DONORS]),
    "tensor": lambda net: torch.linspace(-1, 1, 4, dtype=D),
    "sentence": lambda net: net.sentence(DONORS[0]),
    "function": lambda net: shrink,
    "scale": lambda net: Scale(-0.5),
    "noise": lambda net: Noise(0.4, seed=2),
    "project": lambda net: Project([0, 2]),
    "swap": lambda net: Swap(net.sentence(DONORS[1]), [1]),
    "zero": lambda net: Zero(),
}


def make_net():
    return bt.decoder(8, heads=2, slices=2, vocabulary=VOCABULARY, seed=4).to(D)


def run_off(s, value, off):
    """A reference run in which these heads have their other value: pairs (group, head)."""
    ablated = s.do({name: value for group, head in off for name in get_names(s, group)[head].ravel()})
    return reference.ReferenceRun(ablated.state.model, {})


def compute_log_prob(s, value, off, output):
    full = get_output(s, reference.ReferenceRun(s.state.model, {}), output)
    return log_prob(s, run_off(s, value, off), None, output, full)


@pytest.mark.parametrize("kind", VALUES)
def test_log_probs_are_those_of_sentences_under_do(kind):
    net = make_net()
    value, sentences = VALUES[kind](net), [net.sentence(text) for text in TEXTS]
    runs = create_runs(net.network, TEXTS, "x_2", should_observe=False, corrupt=value)
    table = runs.log_prob_table(gate_settings(2), lambda _: None)  # settings 0 .. 3, of which bit k is head k
    for k, s in enumerate(sentences):
        for t in range(2):
            for setting in range(4):
                off = [(f"a_{t}", head) for head in range(2) if not setting >> head & 1]
                close(table[t, k, setting], compute_log_prob(s, value, off, "x_2"))
    both = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]], dtype=D)  # head 0 of slice 0 and head 1 of slice 1 are off
    for part in runs.parts():
        expected = [compute_log_prob(sentences[k], value, [("a_0", 0), ("a_1", 1)], "x_2") for k in part.indices]
        close(runs.gated_log_probs(part, both.expand(len(part), -1, -1)), torch.stack(expected))


def test_slopes_are_those_of_the_strength_of_an_intervention():
    net, step = make_net(), 1e-6
    runs = create_runs(net.network, TEXTS[:1], corrupt=shrink)
    (part,) = runs.parts()
    assert runs.is_observed
    slopes = gate_slopes(runs, part)
    for t in range(2):
        for head in range(2):
            gates = torch.ones(2, 2, 2, dtype=D)
            gates[0, t, head], gates[1, t, head] = 1 + step, 1 - step
            up, down = (runs.gated_log_probs(part, gate[None]) for gate in gates)
            close(slopes[:, t, head], (up - down) / (2 * step), 1e-6)
            weak = net.network, TEXTS[:1]
            runs_of_part = create_runs(*weak, corrupt=lambda v: v + step * (shrink(v) - v))
            (other,) = runs_of_part.parts()
            off = torch.ones(1, 2, 2, dtype=D)
            off[0, t, head] = 0.0
            close(down, runs_of_part.gated_log_probs(other, off))


@pytest.mark.parametrize("method", ["exact", "gibbs", "svi"])
def test_the_losses_of_an_inclusion_are_those_of_single_heads(method, tmp_path):
    net = make_net()
    value, options = Mean([net.sentence(text) for text in DONORS]), {"sigma": 1.0, "method": method, "rounds": 8}
    result = inclusion(net, TEXTS[:2], corrupt=value, **options)
    for t in range(2):
        for head in range(2):
            drops = [-compute_log_prob(net.sentence(text), value, [(f"a_{t}", head)], "y") for text in TEXTS[:2]]
            close(result.losses[:, t, head], torch.stack(drops), 1e-7)
    cost = damage(result, counts=[4], progress=False)
    all_heads = [(f"a_{t}", head) for t in range(2) for head in range(2)]
    drops = [-compute_log_prob(net.sentence(text), value, all_heads, "y") for text in TEXTS[:2]]
    close(cost.values[:, 0], torch.stack(drops).mean().expand(3), 1e-7)
    result.save(tmp_path / "heads.safetensors")
    loaded = bt.load(tmp_path / "heads.safetensors")
    close(loaded.rho, result.rho)
    with pytest.raises(bt.BNetError, match="the function Mean, which a file does not contain"):
        damage(loaded)
    with pytest.raises(bt.BNetError, match="corrupt"):
        result.compare(inclusion(net, TEXTS[:2], **options))


def test_zero_is_the_default_and_saved_values_are_used_again(tmp_path):
    net = make_net()
    plain, zero, scaled = (inclusion(net, TEXTS[:2], sigma=1.0, corrupt=v) for v in (None, Zero(), Scale(0.5)))
    close(plain.rho, zero.rho)
    close(plain.importance, zero.importance)
    close(scaled.importance, plain.importance / 2, 1e-6)
    scaled.save(tmp_path / "heads.safetensors")
    loaded = bt.load(tmp_path / "heads.safetensors")
    close(damage(loaded, progress=False).values, damage(scaled, progress=False).values)


def test_values_of_heads_of_several_stacks_and_plates():
    case = BY_NAME["vanilla encoder-decoder"]
    net, data = case.net, make_inputs(case, case.net)[0]
    f = inclusion(net, data, role="dec_cross_a", sigma=1.0, corrupt=shrink)
    for k, sentence in enumerate(data):
        s = net.sentence(sentence)
        for head in range(2):
            close(f.losses[k, 0, head], -compute_log_prob(s, shrink, [("dec_cross_a_0", head)], "dec_y"), 1e-7)


def test_values_without_a_meaning_are_refused():
    net = make_net()
    for value, message in [
        (Mean(), "a value that does not depend on the other words"),
        (Mean([net.sentence("the cat")]), "sentences of at least"),
        (torch.zeros(3), "shape"),
        (Zero, "an object, such as Zero"),
    ]:
        with pytest.raises(bt.BNetError, match=message):
            inclusion(net, TEXTS, sigma=1.0, corrupt=value)
