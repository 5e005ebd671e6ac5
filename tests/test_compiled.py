"""The compiled module equals the reference: every group of every case, do, padding, gradients, torch.compile."""

import itertools
import math
import shutil
from functools import cache

import pytest
import torch
from hypothesis import given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.inference import Evidence, log_evidence
from bnet_transformer.interventions import Attend, Mean, Noise, Project, Scale, Shift, Swap, Zero
from bnet_transformer.tpm import Attention, Categorical, Given, Linear, Select, Weight
from tests.cases import CASES, Case, batch_inputs, close, get_case

D = torch.float64
IDS = {"ids": lambda case: case.name}


@pytest.mark.parametrize("name", ["chapter, two slices", "slice", "grouped", "encoder-decoder", "codebook, two slices"])
def test_a_role_of_an_output_or_a_value_has_an_axis_of_slices(name):
    """The values of the module are those of the sentence, and setting a role sets each of its groups."""
    s = get_case(name).sentence
    module, given = s.net.module(), batch_inputs(s)
    role = "dec_x" if name == "encoder-decoder" else "x"
    groups, count = s.net.network.graph.by_stem[role], s[role].dim() - 3
    value = module(given=given, want=[role])[role]
    close(value.squeeze(count), s[role])  # [*states, batch, slice, word, feature] without the batch of one
    set_value = torch.randn(1, len(groups), *s[groups[0].name].shape[-2:], dtype=D)
    separate = {group.name: set_value[:, k] for k, group in enumerate(groups)}
    last = module.output
    close(module(given=given, want=[last, role], do={role: set_value})[role], set_value)
    close(module(given=given, do={role: set_value}), module(given=given, do=separate))


def test_a_batch_is_its_sentences():
    module = bt.bayesuvius(4, slices=2, heads=3, residual=True).to(D).module()
    x = torch.randn(5, 3, 4, dtype=D)
    one_by_one = torch.cat([module(x[k : k + 1]) for k in range(5)], 1)
    close(module(x), one_by_one)


def test_states_of_a_selector_share_the_values_before_it():
    module = bt.bayesuvius(4, slices=2, heads=3, vocabulary=["a", "b"]).module()
    result = module(torch.tensor([[0, 1]]), want=["x_0", "q_0", "x_2"])
    assert [tuple(result[name].shape) for name in ("x_0", "q_0", "x_2")] == [(1, 2, 4), (3, 1, 2, 4), (3, 1, 2, 4)]


@pytest.mark.parametrize("words", [3, 20])
def test_do_of_each_words_own_choice(words):
    """The choice of an attending word selects its query and the keys and values that it uses, explicit or fused."""
    net = bt.bayesuvius(4, heads=3, per="word").to(D)
    x = torch.randn(words, 4, dtype=D)
    choice = [i % 3 for i in range(words)]
    actual = net.module()(x[None], do={"c_0": torch.tensor([choice])})
    done = net.sentence(x=x).do({f"c_0_{i}": c for i, c in enumerate(choice)})
    for i in (0, 1, words - 1):
        close(actual[..., 0, i, :].squeeze(), done[f"x_1_{i}"])


CHANGES = {
    "function": lambda s, spec: lambda value: (value + 0.3).sin(),
    "scale": lambda s, spec: Scale(-0.5),
    "noise": lambda s, spec: Noise(0.5, seed=3),
    "swap": lambda s, spec: Swap(s, [0]),
    "project": lambda s, spec: Project([0], torch.full(spec.shape, 0.7, dtype=D)),
    "zero": lambda s, spec: Zero(),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("name", ["chapter, words", "recurrent, lstm", "encoder-decoder", "grouped", "codebook"])
def test_interventions_equal_do_of_the_sentence(name, kind):
    """On every group, on its nodes with one index, and on one node: the outputs are those of the sentence."""
    s = get_case(name).sentence
    module, network = s.net.module().eval(), s.net.network
    fixed = s.do({spec.group.name: 1 for spec in network.choices})
    choices = {spec.group.name: 1 for spec in network.choices}
    outputs = [m.group.name for m in network.specs if m.tpm.kind == "deterministic" and not m.tpm.is_index_valued]
    targets = [
        spec for spec in network.specs if spec.group.name in outputs and network.graph.out_edges[spec.group.index]
    ]
    targets = [spec for spec in targets if network.graph.in_edges[spec.group.index]]
    for k, spec in enumerate(targets[:: max(1, len(targets) // 5)]):
        axes = s.ground.axes(spec.group)
        index = "_0" * (0, 1, len(axes))[k % 3] if axes else ""
        do = {spec.group.name + index: CHANGES[kind](fixed, spec)}
        after = fixed.do(do)
        values = module(given=batch_inputs(s), want=outputs, do={**choices, **do})
        for output, value in values.items():
            expected = after[output]
            close(value.reshape(expected.shape), expected)


def test_interventions_on_sentences_of_different_lengths():
    net = bt.decoder(8, heads=2, slices=2, vocabulary=5).to(D)
    module, ids = net.module().eval(), [[1, 2, 3, 4], [0, 3]]
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    do = {
        "x_1": Scale(1.5),
        "a_0_1": lambda value: value.relu(),
        "x_2_1": Shift(torch.ones(8)),
        "a_1_0_1": Attend([1, 0]),
    }
    x = torch.tensor([ids[0], [*ids[1], 0, 0]])
    values = module(x, mask, want=["x_2", "logits"], do=do)
    weights, _ = module.attention_weights(x, mask, do=do)
    for k, words in enumerate(ids):
        s = net.sentence(words).do(do)
        for name, value in values.items():
            close(value[k, : len(words)], s[name])
        close(weights["a_1"][k, 0, 1, : len(words)], s.attention(1)[0, 1])
    for bad, message in (
        ({"x_1_2": Zero()}, "x_1_2: expected a word of every .* from 0 to 1"),
        ({"x_1": Mean()}, "Mean"),
        ({"a_0_0_1": Attend([0, 0, 0, 1])}, "can attend"),
        ({"x_1": torch.zeros(2, 4, 8, dtype=D), "x_1_0": Zero()}, "x_1 has another value already"),
        ({"y": Scale(2.0)}, "y_0"),
        ({"x_9": Zero()}, "x_9"),
        ({"x_1": lambda value: value[..., :1]}, "a tensor of shape"),
    ):
        with pytest.raises(bt.BNetError, match=message):
            module(x, mask, do=bad)


def test_a_change_applies_in_each_state_of_the_choices():
    """The log evidence of a net with changed values is the sum over the states."""
    net = bt.bayesuvius(4, heads=3, vocabulary=["a", "b"], observe=Categorical(3)).to(D)
    module, x, y = net.module(), torch.tensor([[0, 1], [1, 1]]), torch.tensor([[2, 0], [1, 1]])
    do = {"x_1": lambda value: (3 * value).tanh() + 1, "q_0_0": Scale(2.0)}
    by_state = torch.stack([module(x, do={**do, "c": c}, want=["y"])["y"] for c in range(3)])
    log_likelihood = by_state.log_softmax(-1).gather(-1, y.expand(3, 2, 2)[..., None]).sum((-2, -1))
    actual = log_evidence(module, {"y": Evidence(y)}, x, do=do)
    close(actual, (log_likelihood - math.log(3)).logsumexp(0))
    assert not torch.allclose(actual, log_evidence(module, {"y": Evidence(y)}, x))


def test_gradients_pass_through_a_function():
    """They are those of the same computation by hand, with respect to the parameters of the function and of the net."""
    net = bt.decoder(6, heads=2, slices=2, vocabulary=5).to(D)
    module, ids = net.module().eval(), torch.tensor([[1, 2, 3], [0, 3, 3]])
    weight = torch.randn(6, 6, dtype=D, requires_grad=True)
    inputs = [weight, next(module.parameters())]

    def compute_loss(run):
        return torch.autograd.grad(run()["logits"].square().sum(), inputs)

    def by_hand():
        state = module(ids, want=["x_1"])["x_1"]
        changed = torch.cat([(state[:, :2] @ weight).tanh(), state[:, 2:]], 1)
        return module(ids, want=["logits"], do={"x_1": changed})

    def encode(value):
        return (value @ weight).tanh()

    do = {"x_1_0": encode, "x_1_1": encode}
    for actual, expected in zip(
        compute_loss(lambda: module(ids, want=["logits"], do=do)), compute_loss(by_hand), strict=True
    ):
        close(actual, expected)


def test_the_module_shares_the_nets_parameters():
    net = bt.bayesuvius(4)
    module = net.module()
    assert module.store["W_q_0/values"].data_ptr() == net.parameters["W_q_0.values"].data_ptr()
    assert set(module.state_dict()) == {f"store.{name.replace('.', '/')}" for name in net.parameters}
    other = bt.bayesuvius(4, seed=1).module()
    other.load_state_dict(module.state_dict())
    x = torch.randn(1, 3, 4)
    assert other(x).equal(module(x))


@pytest.mark.slow
def test_it_compiles_without_a_break():
    """With every feature in one call: ids, a mask, states of `do`."""
    module = bt.bayesuvius(4, slices=2, heads=3, mask="causal", vocabulary=["a", "b"], observe=Categorical(3)).module()
    ids, mask, do = torch.tensor([[0, 1, 1]]), torch.tensor([[True, True, False]]), {"c": torch.tensor([2])}
    torch._dynamo.reset()  # clears the nets that other tests compiled
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids, mask, do=do), module(ids, mask, do=do))


# laws


@cache
def get_sentence_and_module(name: str) -> tuple[bt.Sentence, CompiledModule]:
    case = get_case(name)
    return case.sentence, case.net.module().eval()


@settings(max_examples=12, deadline=None)
@given(case=st.sampled_from(CASES), data=st.data())
def test_what_does_not_descend_from_what_is_set_does_not_change(case: Case, data):
    """Two values of `do` that differ at one node: only the descendants of that node may differ."""
    s, module = get_sentence_and_module(case.name)
    specs = [m for m in s.net.network.specs if m.tpm.kind != "continuous" and not m.tpm.is_index_valued]
    specs += [m for m in s.net.network.specs if m.tpm.kind == "discrete" and m.tpm.states is not None]
    spec = data.draw(st.sampled_from(specs), label="member")
    shape = s.ground.shapes[spec.group.index]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), label="seed"))
    if spec.tpm.is_index_valued:
        a = torch.randint(spec.tpm.states, (1, *shape), generator=generator)
    else:
        a = torch.randn(1, *shape, *spec.shape, generator=generator, dtype=D)
    at = data.draw(st.integers(0, a.reshape(-1, *(() if spec.tpm.is_index_valued else spec.shape)).shape[0] - 1))
    b = a.clone()
    flat = b.view(-1, *(() if spec.tpm.is_index_valued else spec.shape))
    flat[at] = (flat[at] + 1) % spec.tpm.states if spec.tpm.is_index_valued else flat[at] + 1
    node = int(s.ground.offsets[spec.group.index]) + at
    changed = {node, *map(s.ground.id, s.descendants(s.ground.name(node)))}
    for group in s.net.network.graph.groups:
        try:
            first, second = (
                module(given=batch_inputs(s), want=[group.name], do={spec.group.name: value})[group.name]
                for value in (a, b)
            )
        except bt.BNetError:
            continue  # an error, which other tests check
        group_spec = s.net.network.specs[group.index]
        num_dims = 0 if first.dtype == torch.long else len(group_spec.shape)
        num_dims += group_spec.tpm.kind == "discrete" and first.is_floating_point() and not group_spec.shape
        batch_dims = first.dim() - num_dims - len(s.ground.shapes[group.index])
        for index, id_ in zip(
            itertools.product(*map(range, s.ground.shapes[group.index])),
            s.ground.select_nodes(group).tolist(),
            strict=True,
        ):
            if id_ not in changed:
                key = (slice(None),) * batch_dims + index
                close(first[key], second[key])


# types and compilers


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's own backend wants a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_it_compiles_to_machine_code():
    selected = bt.bayesuvius(4, slices=2, heads=3, mask="causal", observe=Categorical(3))
    encoder = get_case("encoder, post-norm").net.to(torch.float32)
    for net, x in ((selected, torch.randn(2, 5, 4)), (encoder, torch.randint(5, (2, 5)))):
        module = net.module().eval()
        torch._dynamo.reset()  # clears the nets that other tests compiled
        compiled = torch.compile(module, fullgraph=True)
        mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
        close(compiled(x, mask), module(x, mask), 1e-05)


@pytest.mark.slow
def test_it_compiles_for_sentences_of_any_length():
    module = bt.decoder(8, heads=2, slices=1, vocabulary=5).module().eval()
    torch._dynamo.reset()  # clears the nets that other tests compiled
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for words in (4, 17, 18, 30):
        ids = torch.randint(5, (2, words))
        close(compiled(ids), module(ids), 1e-05)


def test_cached_plans_are_distinguished_by_query():
    torch.manual_seed(0)
    net = bt.bayesuvius(4, heads=2, observe=Categorical(3)).to(D)
    module, x, y = net.module(), torch.randn(5, 3, 4, dtype=D), torch.randint(3, (5, 3))
    both = {"y": Evidence(y), "W_q_0": Evidence(net.parameters["W_q_0.values"][torch.tensor([0, 1, 1, 0, 1])])}
    partial = {"y": Evidence(y, torch.tensor([[True, False, True]]))}
    queries = [({"y": Evidence(y)}, {}), (partial, {}), (both, {}), ({"y": Evidence(y)}, {"c": torch.tensor(1)})]
    for _ in range(2):
        for evidence, do in queries:
            fresh = log_evidence(net.module(), evidence, x, do=do)
            close(log_evidence(module, evidence, x, do=do), fresh, 0)


@pytest.mark.parametrize("roles", ["k", "qkv"])
def test_weights_of_each_word_are_not_folded_across_the_attention(roles):
    word, every = ["word"], bt.Reach("every")
    nodes = [bt.Node("c", Categorical(2), plates=word)]
    for role in "qkv":
        select = role in roles
        weight = bt.Node(f"W_{role}", Select((4, 4)), ["c"], word) if select else bt.Node(f"W_{role}", Weight((4, 4)))
        nodes += [weight, bt.Node(role, Linear(), [f"W_{role}", "x"], word)]
    nodes.append(bt.Node("x", Attention(), ["q", bt.Arrow("k", every), bt.Arrow("v", every)], word))
    stack = bt.Stack(nodes, [bt.Node("x", Given(4), plates=word)], [bt.Node("y", Categorical(2), ["x"], word)])
    s = bt.BNet(bt.Declaration([stack])).to(torch.float64).sentence("a b c d e")  # more words than features
    done = s.do({f"c_0_{word}": word % 2 for word in range(5)})
    value = reference.values(done.state.model, done.ground.id("x_1_1"), {})
    torch.testing.assert_close(done["x_1_1"], value)
    expected = reference.posterior(s.state.model, s.ground.id("y_1"), {}, 2**16)
    torch.testing.assert_close(s.posterior("y_1"), expected)
