"""Contributions: the parts of every net sum to the readout, or an error gives the reason; oracles by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer import tpm
from bnet_transformer._core.naming import split_path
from bnet_transformer.interventions import Attend, Scale, Zero
from bnet_transformer.interventions.cells import find_attention_groups
from bnet_transformer.residual_stream.linear_paths import Decomposition, LinearRun
from tests.cases import CASES, VOCABULARY, close, get_case, jitter

UNDEFINED = {  # the cases without parts, with a term of the message
    "program": "a sum or a linear map",
    "recurrent": "recurrent",
    "recurrent, rnn": "recurrent",
    "recurrent, lstm": "recurrent",
    "recurrences": "Gated",
    "integrator": "ResNet",
    "cayley, arbitrary": "Triangular",
    "triangular": "Triangular",
    "vanilla encoder, masked word": "transform with the TPM Activation",
    "vanilla encoder, class": "transform with the TPM Activation",
    "chapter": "Attention",
    "gated": "Gate",
    "geometric": "ResNet",
    "geometric, add": "ResNet",
    "cayley": "Triangular",
    "sprinkler": "Categorical",
    "chest clinic": "Table",
    "tagger": "Table",
    "hidden states": "Categorical",
    "factorial chains": "Categorical",
}
TRANSFORMERS = [case for case in CASES if case.name.startswith(("encoder", "vanilla", "grouped", "bucketed", "concat"))]


def find_readout(s):
    """The last node with a likelihood of vectors, or of the net, and a difference of its logits, or the sum."""
    specs = s.state.network.specs
    likelihoods = [m for m in specs if m.tpm.is_random and any(p.states is None for p in m.tpm_parents)]
    spec = (likelihoods or specs)[-1]
    node = list(s.ground.iter_names(spec.group))[-1]
    return node, (0, 1) if spec.tpm.kind == "discrete" else torch.ones(spec.shape, dtype=torch.float64)


def compute_readout(s, node, of):
    """The same number from the distribution of the node."""
    if not s.state.model.spec(s.ground.id(node)).tpm.is_random:
        return s[node] @ of
    distribution = s.tpm(node)
    if isinstance(of, tuple):
        return distribution.logits[..., of[0]] - distribution.logits[..., of[1]]
    return distribution.mean @ of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_sum_to_the_readout_or_an_error_gives_the_reason(case):
    s = case.sentence
    node, of = find_readout(s)
    if case.name in UNDEFINED:
        with pytest.raises(bt.BNetError, match=UNDEFINED[case.name]):
            s.contributions(node, of=of)
        return
    result = s.contributions(node, of=of)
    expected = compute_readout(s.do(result.choices), node, of)
    close(result.value, expected)
    close(result.total, expected)
    assert result.writers and result.values.shape[-1] == len(s.words) + 1
    heads = [k for k, writer in enumerate(result.writers) if writer.kind == "attention"]
    if heads and case.name != "marginal":
        paths = s.contributions(node, of=of, paths=2)
        close(paths.values.sum(-1), result.parts[..., heads])
        assert [head.name for head in paths.heads] == [result.writers[k].name for k in heads]


def test_all_transformers_are_decomposed():
    assert len(TRANSFORMERS) >= 12
    undefined = {case.name for case in TRANSFORMERS} & UNDEFINED.keys()
    assert undefined == {"vanilla encoder, masked word", "vanilla encoder, class"}  # a nonlinear head before the logits


@pytest.mark.parametrize("case", TRANSFORMERS, ids=lambda case: case.name)
def test_the_passes_forward_and_back_give_the_same_parts(case):
    s = case.sentence
    state = s.state
    group = [group for group in state.network.graph.groups if state.network.is_word_state(group)][-1]
    node = list(s.ground.iter_names(group))[-1]
    u = torch.linspace(-1, 1, s[node].shape[-1], dtype=torch.float64)
    result = s.contributions(node, of=u)
    spec, index = state.model.spec(s.ground.id(node)), state.ground.unravel_index(s.ground.id(node))[1]
    run = LinearRun(state, node, frozenset({spec.group.index}))
    word = np.arange(run.count_words(spec.group.index)) == index[-1]
    parts = Decomposition(run, {spec.group.index: word})
    writers, block = parts.join(spec.group.index)
    vectors = run.select_node(spec, index, block[0].movedim(run.layout.word_dim - 1, 0), 1)
    values = dict(zip((writer.name for writer in writers), vectors @ u, strict=True))
    for writer in result.writers:
        close(values.pop(writer.name, torch.zeros(())), result[writer.name])
    assert not any(float(value) for value in values.values())
    close(vectors.sum(0), s[node])
    assert tuple(run.list_norms(parts.forward.words)) == result.norms


STATES_BEFORE_NORMS = {
    "concat": "x_1",
    "encoder, pre-norm": "x_2",
    "bucketed": "x_2",
    "grouped": "x_2",
    "encoder-decoder": "dec_x_2",
    "positioned": "x_1",
    "vanilla encoder, masked word": "x_1",
    "vanilla decoder, learned": "x_1",
    "vanilla encoder-decoder, pre-norm": "dec_x_1",
}


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(STATES_BEFORE_NORMS.items())), st.data())
def test_a_part_is_the_first_order_effect_of_the_edge_to_the_readout(state, data):
    case, group = state  # attention is no linear parent, so it is fixed for the edge as for the part
    s = get_case(case).sentence
    node = data.draw(st.sampled_from([*s.ground.iter_names(s.state.network.graph.get_group(group))]))
    size = len(s[node])
    u = torch.tensor(data.draw(st.lists(st.floats(0.5, 2), min_size=size, max_size=size)), dtype=torch.float64)
    result = s.contributions(node, of=u)
    metric = eval(f"lambda {node}: {node} @ u", {"u": u})  # the name of the argument is the node
    effects = bt.sweep(Zero(), s, at="edges", metric=metric, method=bt.Gradient(), progress=False)
    ends = map(split_path, effects.labels["edge"])
    by_writer = {writer: value for (writer, reader), value in zip(ends, effects.values, strict=True) if reader == group}
    parts = {writer.name: result[writer.name] for writer in result.writers}
    words = {writer.name for writer in result.writers if "position" not in writer.group and writer.kind != "bias"}
    assert result.norms == () and words <= by_writer.keys()
    for writer, value in by_writer.items():
        close(-value, parts.get(writer, torch.zeros(())))


def test_choices_on_which_the_readout_does_not_depend_are_set_too():
    plates = ("word",)
    nodes = [
        bt.Node("c", tpm.Categorical(2), ["x"], plates),
        bt.Node("W", tpm.Select((4, 4)), [bt.Arrow("c", "before")], plates),
        bt.Node("x", tpm.Linear(), ["W", "x"], plates),
    ]
    given_x, y = bt.Node("x", tpm.Given(4), plates=plates), bt.Node("y", tpm.Categorical(3), ["x"], plates)
    s = bt.BNet(bt.Declaration([bt.Stack(nodes, [given_x], [y])])).sentence(torch.randn(3, 4))
    first, second = (s.contributions(node, of=(0, 1)) for node in ("y_0", "y_1"))
    assert not first.choices and list(second.choices) == ["c_0_0"]
    for node, result in (("y_0", first), ("y_1", second)):
        logits = s.do(c_0_0=second.choices["c_0_0"], c_0_1=0, c_0_2=0).tpm(node).logits
        torch.testing.assert_close(result.total, logits[0] - logits[1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pairs_sum_to_the_scores(case):
    s = case.sentence
    for stem, groups in find_attention_groups(s.state.model).items():
        group = groups[-1]
        index = [size - 1 for size in s.ground.shapes[group.index]]
        name = "_".join(map(str, [stem, *([] if group.slice is None else [group.slice]), *index]))
        if case.name in ("gated", "geometric", "geometric, add"):
            with pytest.raises(bt.UnsupportedError, match=r"AdditiveAttention|ResNet"):
                s.contributions(name)
            continue
        result = s.contributions(name)
        close(result.total, result.scores)
        normaliser = s.state.network.specs[group.index].tpm.normaliser.kind
        assert result.is_centred == (normaliser == "softmax")
        if result.is_centred:
            close(result.total.mean(-1), torch.zeros_like(result.scores[..., 0]), 1e-9)
        weights = {"softmax": result.scores.softmax(-1), "sigmoid": result.scores.sigmoid(), "none": result.scores}
        close(weights[normaliser], result.weights)


def test_a_row_of_attention_that_is_a_node():
    s = get_case("marginal").sentence
    result = s.contributions("j_0_2")
    close(result.scores.softmax(-1), s.tpm("j_0_2").probs)
    assert [writer.name for writer in result.queries] == ["x_0"]


# oracles by hand


def tiny_net(*further_nodes):
    """A pre-norm decoder of one slice with two heads, without a feed-forward step."""
    word = ["word"]
    heads = ["head", "word"]
    prologue = [bt.Node("token", tpm.Given(states=3), plates=word), bt.Node("x", tpm.Embed(4), ["token"], plates=word)]
    weights = [bt.Node(f"W_{r}", tpm.Weight((2, 4)), plates=["head"]) for r in "qkv"]
    maps = [bt.Node(r, tpm.Affine(), [f"W_{r}", "norm"], plates=heads) for r in "qkv"]
    causal = [bt.Arrow(r, "causal") for r in "kv"]
    slice_ = [
        bt.Node("norm", tpm.Norm("rms"), ["x"], plates=word),
        *weights,
        *maps,
        bt.Node("a", tpm.Attention(tpm.Dot(None)), ["q", *causal], plates=heads),
        bt.Node("W_o", tpm.Weight((4, 2)), plates=["head"]),
        bt.Node("x", tpm.Concat(bias=True, residual=True), ["W_o", "a", "x"], plates=word),
    ]
    readout = [
        bt.Node("final", tpm.Norm("layer"), ["x"], plates=word),
        bt.Node("y", tpm.Categorical(3), ["final"], plates=word),
        *further_nodes,
    ]
    stack = bt.Stack(slice_, prologue, readout, vocabulary=VOCABULARY)
    return jitter(bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)]))).to(torch.float64)


def test_parts_and_paths_by_hand_in_numpy():
    net = tiny_net()
    s = net.sentence("the cat sat")
    p = {name: value.numpy() for name, value in net.parameters.items()}
    embed = p["x_0.table"]  # the words have ids 0, 1, 2
    rms = 1 / np.sqrt((embed**2).mean(-1, keepdims=True) + 1e-5)
    normed = p["norm_0.gain"] * embed * rms
    weights = s.attention(0)[:, 2].numpy()  # [head, word j]
    values = np.einsum("hod,nd->hno", p["W_v_0.value"], normed)
    mixes = np.einsum("hn,hno->hno", weights, values + p["v_0.bias"][:, None])
    stream = np.einsum("hdo,hno->hnd", p["W_o_0.value"], mixes)  # [head, word j, d]
    x = embed[2] + stream.sum((0, 1)) + p["x_1.bias"]
    u = p["y.weight"][1] - p["y.weight"][0]
    deviation = np.sqrt(x.var() + 1e-5)

    def project(vector):
        return (p["final.gain"] * (vector - vector.mean(-1, keepdims=True)) / deviation) @ u

    result = s.contributions("y_2", of=("cat", "the"))
    by_name = dict(zip((writer.name for writer in result.writers), result.values.numpy(), strict=True))
    close(by_name["x_0"], np.array([0, 0, project(embed[2]), 0]))
    for head in range(2):
        close(by_name[f"a_0_{head}"][:3], project(stream[head]))
    close(by_name["bias of x_1"].sum(), project(p["x_1.bias"]))
    close(by_name["bias of final"].sum(), p["final.bias"] @ u)
    close(by_name["bias of y"].sum(), p["y.logits"][1] - p["y.logits"][0])
    assert result.norms == ("final_2",) and len(by_name) == 6
    paths = s.contributions("y_2", of=("cat", "the"), paths=2)
    names = [writer.name for writer in paths.writers]
    linear = np.einsum("hdo,hno->hnd", p["W_o_0.value"], weights[..., None] * values).sum(1)
    close(paths.values[:, names.index("x_0")].numpy(), project(linear))
    assert paths.norms == ("norm_0_*", "final_2")


def test_score_parts_are_products_of_the_parts_of_query_and_key():
    net = get_case("vanilla decoder, causal").net  # two post-norm slices, rotary positions are in "grouped"
    s = net.sentence("the cat sat")
    result = s.contributions("j_0_1_2")
    q, k = s["q_0_1_2"], torch.stack([s[f"k_0_1_{j}"] for j in range(3)])
    scores = k @ q / q.shape[-1] ** 0.5
    close(result.total, scores - scores.mean())
    names = [writer.name for writer in result.queries]
    W_q, W_k = s["W_q_0_1"], s["W_k_0_1"]
    part = (s["position_2"] @ W_q.T) @ (torch.stack([s[f"embed_{j}"] for j in range(3)]) @ W_k.T).T / q.shape[-1] ** 0.5
    close(result.values[names.index("position"), names.index("embed")], part - part.mean())


def test_exact_effects_on_scores_are_those_of_do():
    s = get_case("encoder, pre-norm").sentence
    result = s.contributions("j_1_0_2", exact=True)

    def compute(sentence):
        scores = torch.stack([sentence[f"k_1_0_{j}"] for j in range(3)]) @ sentence["q_1_0_2"] / 2**0.5
        return scores - scores.mean()

    assert set(result.effects) == {writer.name for writer in result.keys if writer.kind != "bias"}
    for name, effect in result.effects.items():
        close(effect, compute(s) - compute(s.do({f"{name}_*": Zero()})))


def test_words_of_a_window_have_their_indices_in_the_sentence():
    s = build_small_net(mask=bt.Reach("window", 1)).sentence("the cat the dog")
    result, rows = s.contributions("j_0_0_3"), s.attention(0)[0, 3]
    assert result.indices == tuple(j for j, weight in enumerate(rows.tolist()) if weight)
    assert result.indices[-1] == 3 and result.indices[0] > 0
    labels = [f"{j} {s.words[j]}" for j in result.indices]
    assert list(result.to_dataframe("all")["word"].unique()) == labels == list(result.by_writer().columns)
    assert set(result.to_dataframe(3)["word"]) == {"3 dog"}
    position, table = result.at_word(3)
    assert position == len(labels) - 1
    close(table, result.values[..., -1])
    for read in (result.at_word, result.top, result.to_dataframe):
        with pytest.raises(bt.BNetError, match=f"reads.*{result.indices[0]} to 3"):
            read(word=0)


# the direction, the sentence, interventions


def test_one_logit_a_vector_and_labels():
    s = get_case("vanilla decoder, causal").sentence
    logits = s["logits_2"]
    close(s.contributions("logits_2", of="cat").total, logits[1])
    close(s.contributions("logits_2", of=1).total, logits[1])
    close(s.contributions("y_2", of=("sat", "the")).total, logits[2] - logits[0])
    u = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    for of in (u, u.numpy(), u.float().numpy(), u.tolist(), (0.5, -1, 2)):
        close(s.contributions("logits_2", of=of).total, logits @ u)
    close(s.contributions("x_2_1", of=torch.ones(4, dtype=torch.float64)).total, s["x_2_1"].sum())


def test_set_nodes_are_writers_and_set_rows_are_used():
    s = get_case("encoder, pre-norm").sentence
    value = torch.tensor([1.0, -2.0, 0.5, 0.25], dtype=torch.float64)
    for changed in (
        s.do({"ffn_0_2": value}),
        s.do({"x_1_2": value}),
        s.do({f"x_1_{word}": value for word in range(3)}),
        s.do({"a_1_0_2": Attend([0.5, 0.5, 0.0])}),
    ):
        result = changed.contributions("y_2", of=(0, 4))
        close(result.total, compute_readout(changed, "y_2", (0, 4)))
        heads = [k for k, writer in enumerate(result.writers) if writer.kind == "attention"]
        close(changed.contributions("y_2", of=(0, 4), paths=2).values.sum(-1), result.parts[heads])
    part = s.do({"x_1_2": value}).contributions("y_2", of=(0, 4))
    kinds = {writer.name: writer.kind for writer in part.writers}
    assert kinds["x_1"] == "input" and float(part["embed"]) == 0.0


@pytest.mark.parametrize(
    ("case", "node", "of"),
    [
        ("encoder, pre-norm", "y_2", (0, 4)),
        ("encoder, pre-norm", "add1_1_2", torch.ones(4, dtype=torch.float64)),
        ("vanilla encoder", "y_2", torch.ones(4, dtype=torch.float64)),  # Normal
    ],
)
@pytest.mark.parametrize("removed", [True, Scale(0.5), torch.tanh])
def test_exact_effects_are_those_of_do(case, node, of, removed):
    s = get_case(case).sentence
    result = s.contributions(node, of=of, exact=removed)
    for writer, effect in zip(result.writers, result.effects, strict=True):
        if writer.kind == "bias":
            assert bool(effect.isnan())
            continue
        without = s.do({f"{writer.name}_2": Zero() if removed is True else removed})
        close(effect, compute_readout(s, node, of) - compute_readout(without, node, of), 1e-8)
    assert {"part", "effect"} <= set(result.to_dataframe().columns)


@pytest.mark.parametrize("name", ["y", "add1_1", "j_1_0"])
def test_a_word_counted_from_the_end_is_the_same_readout(name):
    s = get_case("encoder, pre-norm").sentence
    of = {"y": (0, 4), "add1_1": torch.ones(4, dtype=torch.float64), "j_1_0": None}[name]
    expected, actual = (s.contributions(f"{name}_{word}", of, exact=True) for word in (len(s.words) - 1, -1))
    assert actual.node == expected.node and actual.to_dataframe().equals(expected.to_dataframe())
    assert not actual.compare(expected).difference.any()


@pytest.mark.parametrize(
    ("arrow", "node", "words"),
    [("first", "m_3", (0, 3)), ("before", "m_3", (2, 3)), ("rest", "m_3", (3,)), ("last", "m_1", (1, 3))],
)
def test_exact_effects_remove_a_writer_at_the_words_of_its_row(arrow, node, words):
    net = tiny_net(bt.Node("m", tpm.Add(), ["x", bt.Arrow("x", arrow)], plates=["word"]))
    s, u = net.sentence("the cat sat the"), torch.linspace(-1, 1, 4, dtype=torch.float64)
    result = s.contributions(node, of=u, exact=True)
    for writer, effect in zip(result.writers, result.effects, strict=True):
        assert writer.words == words
        if writer.kind != "bias":
            close(effect, (s[node] - s.do({f"{writer.name}_{j}": Zero() for j in words})[node]) @ u)


def build_small_net(build=bt.decoder, **options):
    """A pre-norm net of two slices."""
    words = ["the", "a", "cat", "dog", "sat"]
    options = {"heads": 2, "slices": 2, "norm": "pre", "vocabulary": words, "hidden": 12, "seed": 1} | options
    return build(8, dropout=0.0, **options).to(torch.float64)


SET_NODES = [
    ["a_0_0_2"],
    ["a_0_1_0", "a_0_0_1"],
    ["a_1_1_0", "a_1_1_1", "a_1_1_2"],
    ["embed_1"],
    ["ffn_1_2", "ffn_0_0"],
    ["x_1_0"],
    ["norm1_0_2"],
]


@pytest.mark.parametrize(("nodes", "pool"), [*zip(SET_NODES, itertools.cycle(["mean", None]), strict=False)])
def test_each_node_is_of_one_writer_also_if_do_sets_it(nodes, pool):
    net = build_small_net(bt.encoder, pool=pool, readout=tpm.Categorical(2)) if pool else build_small_net()
    s, of = net.sentence("the cat the"), (0, 1)
    node = "y" if pool else "y_2"
    s = s.do({name: torch.linspace(-1, 2, s[name].numel(), dtype=torch.float64) for name in nodes})
    result = s.contributions(node, of=of, exact=True)
    close(result.total, result.value)
    check_rows(s, result.writers)
    for k, writer in enumerate(result.writers):
        if writer.kind != "bias":
            removed = s.do(dict.fromkeys(writer.nodes, Zero()))
            close(result.effects[k], result.value - removed.contributions(node, of=of).value, 1e-9)
        rows = [j for j, other in enumerate(result.writers) if other.name == writer.name]
        close(result[writer.name], result.parts[rows].sum())
    heads = result.by_head()
    assert list(heads.columns) == ["0", "1"] and list(heads.index) == ["a_0", "a_1"]
    close(float(heads.loc["a_0", "0"]), float(result["a_0_0"]))
    paths = s.contributions(node, of=of, paths=2)
    attention = [k for k, writer in enumerate(result.writers) if writer.kind == "attention"]
    assert paths.heads == tuple(result.writers[k] for k in attention)
    close(paths.values.sum(-1), result.parts[attention])
    scores = s.contributions("j_1_0_2")
    close(scores.total, scores.scores)
    check_rows(s, scores.keys)
    check_rows(s, scores.queries)


def check_rows(s, writers):
    """No node is in two rows, each row has nodes, and the rows of nodes that `do` sets are inputs."""
    rows = [writer for writer in writers if writer.kind != "bias"]
    names = [name for writer in rows for name in writer.nodes]
    assert len(set(names)) == len(names)
    for writer in rows:
        is_set = {s.ground.id(name) in s.state.model.do for name in writer.nodes}
        assert writer.group in ("embed", "position") or is_set == {writer.kind == "input"}


# the tables


def test_tables():
    s = get_case("vanilla decoder, causal").sentence
    result = s.contributions("logits_2", of=("cat", "sat"))
    heads, words, frame = result.by_head(), result.by_word(), result.to_dataframe()
    assert heads.shape == (2, 2) and list(heads.index) == ["a_0", "a_1"]
    close(float(heads.loc["a_1", "0"]), float(result["a_1_0"]))
    close(float(words["total"].sum()), float(result.total))
    assert list(words["word"]) == ["the", "cat", "sat"]
    close(float(frame["part"].sum()), float(result.total))
    top = result.top(3)
    assert len(top) == 3 and abs(top[0][1]) == frame["part"].abs().max()
    paths = s.contributions("logits_2", of=("cat", "sat"), paths=2).to_dataframe()
    close(float(paths["part"].sum()), float(heads.to_numpy().sum()))
    scores = s.contributions("j_1_0_2")
    close(scores.to_dataframe("all").groupby("word", sort=False)["part"].sum().tolist(), scores.scores.tolist())
    by_query, by_key = scores.by_writer("query"), scores.by_writer("key")
    close(by_query.sum().tolist(), by_key.sum().tolist())
    close(float(by_key.loc["a_0_1", "1 cat"]), float(scores.values[:, list(by_key.index).index("a_0_1"), 1].sum()))
    position, table = scores.at_word()
    close(float(scores.to_dataframe()["part"].sum()), float(scores.scores[position]))
    close(float(scores.to_dataframe(0)["part"].sum()), float(scores.scores[0]))
    query, key, part = scores.top(1, word=0)[0]
    rows = scores.to_dataframe(0).set_index(["query", "key"])["part"]
    assert abs(part) == rows.abs().max() and part == rows[query, key]
    assert position == int(scores.weights.argmax()) and table.shape == scores.values.shape[:2]
    assert all("norm" in repr(item) for item in (result, s.contributions("j_1_0_2")))


@pytest.mark.parametrize(
    ("node", "options", "key_term"),
    [
        ("x_2_2", {}, "of"),
        ("logits_2", {"of": ("cat", "sat", "the")}, "of"),
        ("logits_2", {"of": np.ones(4)}, "of"),
        ("logits_2", {"of": [0.5, 1.0, float("nan")]}, "of"),
        ("x_2_2", {"of": 7}, "of"),
        ("ffn_0_2", {"of": 0}, "FeedForward.*j_0_1_2"),
        ("token_0", {"of": 0}, "input"),
        ("j_1_0_9", {}, "j_slice_head_word"),
        ("j_1_0_2", {"of": 0}, "of"),
        ("j_1_0_2", {"paths": 2}, "paths"),
        ("logits_2", {"of": 0, "paths": 2, "exact": True}, "exact"),
        ("y_2", {"of": 0, "exact": True}, "exact"),
    ],
)
def test_invalid_input(node, options, key_term):
    s = get_case("vanilla decoder, causal").sentence
    with pytest.raises(bt.BNetError, match=key_term):
        s.contributions(node, **options)


@pytest.mark.parametrize(
    ("name", "node", "row"),
    [
        ("chapter, two slices", "y_2", "j_1_2"),
        ("slice, codebook", "y_2", None),
        ("word, two slices", "y_1", None),
        ("windowed selectors", "y_2", None),
        ("backward chain", "y_1", None),
        ("experts", "y_1", None),
    ],
)
def test_latent_choices_have_their_most_probable_states(name, node, row):
    """The choices are those of the largest entry of the joint posterior, and the parts those after `do` of all."""
    s = get_case(name).sentence
    result = s.contributions(node, of=0)
    best = [*result.choices]
    probs = s.posterior(best)
    close(probs[tuple(result.choices.values())], probs.max())
    close(torch.tensor(result.choice_prob, dtype=probs.dtype), probs.max())
    groups = {s.ground.group_of(s.ground.id(choice)) for choice in best}
    nodes = [item for group in groups for item in s.ground.iter_names(group)]
    for states in (dict.fromkeys(nodes, 0), {item: len(s.labels(item)) - 1 for item in nodes}):
        after = s.do({**states, **result.choices})  # the other choices of the groups do not matter
        expected = after.contributions(node, of=0)
        close(expected.parts, result.parts)
        close(result.total, result.value)
        assert not expected.choices
    has_heads = any(writer.kind == "attention" for writer in result.writers)
    items = [result, *([s.contributions(node, of=0, paths=2)] if has_heads else [])]
    items += [s.contributions(row)] if row is not None else []
    for item in items:
        (first, state), *_ = item.choices.items()
        assert f"{first} = {state}" in repr(item)


def test_an_observed_choice_has_its_state_beside_open_ones():
    s = get_case("windowed selectors").sentence
    result = s.observe({"c_0_0": 0, "y_1": 1}).contributions("y_2", of=(0, 1))
    expected = s.do({"c_0": [0, result.choices["c_0_1"], result.choices["c_0_2"]]}).contributions("y_2", of=(0, 1))
    close(result.parts, expected.parts)
    assert "c_0_0" not in result.choices


def test_the_default_readout_is_the_most_probable_state():
    for name, node in (("chapter, two slices", "y_2"), ("vanilla decoder, causal", "logits_2")):
        s = get_case(name).sentence
        result = s.contributions(node)
        assert result.readout.states == (int(s.posterior("y_2").argmax()),)


def test_exact_effects_under_evidence_are_those_of_the_set_choices():
    s = get_case("chapter, two slices").sentence
    result = s.observe({"y_1": 1}).contributions("y_2", of=(0, 1), exact=True)
    expected = s.do(result.choices).contributions("y_2", of=(0, 1), exact=True)
    torch.testing.assert_close(result.effects, expected.effects, equal_nan=True)  # biases have none


def test_many_latent_choices_have_their_most_probable_states():
    options = {"per": "word", "mask": "causal", "vocabulary": ["a", "b"], "observe": tpm.Categorical(2)}
    s = bt.bayesuvius(4, heads=2, slices=2, **options).to(torch.float64).sentence(["a", "b"] * 8)
    result = s.contributions("y_15", of=(0, 1))  # 2^17 joint states
    assert len(result.choices) == 17 and math.isclose(result.choice_prob, 0.5**17, rel_tol=1e-9)
    close(result.value, compute_readout(s.do(result.choices), "y_15", (0, 1)))


def get_cells(figure):
    """The numbers of the heat map of a figure; zero where a cell is blank."""
    arrays = [item.get_array() for item in figure.axes[0].collections]
    return next(array for array in arrays if array is not None and array.ndim == 2).filled(0.0)


@pytest.mark.slow
def test_plots_show_the_parts():
    s = get_case("vanilla decoder, causal").sentence
    result = s.contributions("logits_2", of=("cat", "sat"))
    bars = bt.plot(result, by="writer").axes[0].patches
    lengths = [length for bar in bars for length in (bar.get_width(), bar.get_height())]
    assert all(min(abs(part - length) for length in lengths) < 1e-9 for part in result.parts.tolist())
    heads = result.by_head().to_numpy()
    close(get_cells(bt.plot(result, by="head"))[:, :2].tolist(), heads.tolist())
    kinds = [kind for kind in ("input", "attention", "feed-forward", "bias") if kind in result.by_word()]
    close(get_cells(bt.plot(result, by="word")).T.tolist(), result.by_word()[kinds].to_numpy().tolist())
    paths = s.contributions("logits_2", of=("cat", "sat"), paths=2)
    close(get_cells(bt.plot(paths, top=99)).T.tolist(), paths.values.tolist())
    scores = s.contributions("j_1_0_2")
    close(get_cells(bt.plot(scores, word=1, top=99)).tolist(), scores.at_word(1)[1].tolist())
    with pytest.raises(bt.BNetError, match="0 to 2"):
        bt.plot(scores, word=3)
    window = build_small_net(mask=bt.Reach("window", 1)).sentence("the cat the dog").contributions("j_0_0_3")
    assert "word 3 'dog'" in bt.plot(window, word=3).texts[0].get_text()
