"""Sweeps of several roles in one call, both directions, words aligned by a map, and metrics of whole roles."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.interventions import Mean, Noise, Zero
from tests.cases import get_case
from tests.sweep_oracle import (
    D,
    Oracle,
    forbid_shared_runs,
    get_outputs,
    get_refusal,
    make_metric,
    make_pair,
    patch_path,
    set_values,
)
from tests.test_sweeps import CASES_WITH_WORDS, REFUSED, close, find_roles, make_examples, make_net, make_sentences

LARGE = ("word", "word, codebook", "word, two slices", "codebook, two slices", "integrator")
CASE_NAMES = [case.name for case in CASES_WITH_WORDS if case.name not in LARGE]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (k % 5 > 0)) for k, name in enumerate(CASE_NAMES)]
)
def test_a_part_of_a_list_is_the_sweep_of_its_item(name):
    """Roles, all arrows, a name and a pattern, in one call and in separate calls."""
    clean, corrupt = make_pair(get_case(name))
    query = {"metric": make_metric(get_outputs(corrupt))}
    roles = [role for role in find_roles(corrupt.net)[:4] if (name, role) not in REFUSED]
    if not roles:
        return
    first = next(corrupt.ground.iter_names(corrupt.ground.template.by_stem[roles[-1]][-1]))
    at = [*roles, "arrows", first]
    if name in ("marginal", "backward chain"):
        assert "a value for each state of a choice" in get_refusal(bt.sweep, clean, corrupt, at=at, **query)
        return
    result = bt.sweep(clean, corrupt, at=at, **query)
    assert result.axes == ("cell",) and len({*result.names.values()}) == len(result.names)
    assert {*roles, first} <= {*result.parts} and len(result.parts) > len(roles) + 1
    for item in [*result.parts][:: max(1, len(result.parts) // 5)]:
        single = bt.sweep(clean, corrupt, at=item if item in roles or "->" in item else [item], **query)
        part = result.part(item)
        assert (part.axes, part.at, dict(part.names)) == (single.axes, single.at, dict(single.names))
        assert (dict(part.labels), dict(part.positions)) == (dict(single.labels), dict(single.positions))
        torch.testing.assert_close(part.outcomes, single.outcomes, rtol=1e-10, atol=1e-10, equal_nan=True)
        close(part.corrupt, single.corrupt)


def test_over_joins_the_items_with_its_axes():
    """Arrows without heads keep their slices; an arrow of patterns is a joined arrow; rows and values."""
    clean, corrupt = make_examples(make_net(observe=bt.tpm.Categorical(3)), 2)
    query = {"metric": make_metric(["y_0", "y_2"])}
    items = ["v -> a", "x -> x", "j", "a", "v_1_0_* -> a_1_0_*", "q -> a -> x"]
    result = bt.sweep(clean, corrupt, at=items, over=("slice", "head"), **query)
    assert [result.part(item).axes for item in items] == [
        ("slice", "head"), ("slice",), ("slice", "head"), ("slice", "head"), ("cell",), ("path",)
    ]  # fmt: skip
    for item in items[:4]:
        over = result.part(item).axes
        close(result.part(item).outcomes, bt.sweep(clean, corrupt, at=item, over=over, **query).outcomes)
    close(result.part("v_1_0_* -> a_1_0_*").outcomes[0], result.part("v -> a").outcomes[1, 0])
    close(result.part("q -> a -> x").outcomes, bt.sweep(clean, corrupt, at="q -> a -> x", **query).outcomes)
    close(bt.sweep(clean, corrupt, at=items, over=("slice", "head"), memory=2**16, **query).outcomes, result.outcomes)
    single = bt.sweep(clean, corrupt, at=[*result.names.values()][:1], **query)
    close(single.outcomes[0], result.outcomes[0])
    mediation = bt.mediation(clean, corrupt, through=["x", "a"], **query)
    close(mediation.part("a").direct, bt.mediation(clean, corrupt, through="a", **query).direct)
    assert result.select(cell=3).parts == {} and result.part("a").to_dataframe().shape[0] == 4


# directions


@pytest.mark.parametrize("name", ["concat", "codebook", "encoder-decoder", "vanilla decoder, causal", "recurrent"])
def test_noise_patches_corrupt_values_into_the_clean_run(name):
    """Both directions are one sweep with its sentences swapped; the effects are changes from the base run."""
    clean, corrupt = make_pair(get_case(name))
    query = {"at": find_roles(corrupt.net)[-1], "metric": make_metric(get_outputs(corrupt))}
    noise = bt.sweep(clean, corrupt, direction="noise", **query)
    swapped = bt.sweep(corrupt, clean, **query)
    denoise = bt.sweep(clean, corrupt, **query)
    close(noise.outcomes, swapped.outcomes)
    close(noise.effects, noise.outcomes - noise.clean)
    close(noise.clean, denoise.clean)
    close(noise.corrupt, denoise.corrupt)
    close(noise.total, denoise.total)
    close(noise.restored, (noise.outcomes - noise.corrupt).mean(-1) / noise.total.mean())
    close(denoise.restored, (denoise.outcomes - denoise.corrupt).mean(-1) / noise.total.mean())
    assert "corrupt into clean" in repr(noise)
    explained = bt.explain("sweep", clean, corrupt, direction="noise", **query)
    assert str(explained) == str(bt.explain("sweep", corrupt, clean, **query))


def test_an_ablation_of_the_clean_run():
    s = make_sentences(make_net(observe=bt.tpm.Categorical(3)))[1]
    for ablation in (Zero(), Mean(), Noise(0.3)):
        query = {"at": "q", "metric": {"y_2": 1}}
        noise, denoise = bt.sweep(s, ablation, direction="noise", **query), bt.sweep(ablation, s, **query)
        close(noise.outcomes, denoise.outcomes)
        assert noise.corrupt is None and denoise.clean is None and noise.clean.equal(denoise.corrupt)
        assert noise.examples == 1 and "an ablation" in noise.caption
        with pytest.raises(bt.BNetError, match="no corrupt run"):
            _ = noise.total


# aligned words


@pytest.mark.parametrize("is_sequential", [False, True])
def test_words_take_values_of_other_words(is_sequential, monkeypatch):
    """Sentences of unequal lengths, and one sentence with permuted words: as `do` with the values of these words."""
    if is_sequential:
        forbid_shared_runs(monkeypatch)
    net = make_net(observe=bt.tpm.Categorical(3))
    base, longer = net.sentence("the cat sat"), net.sentence("a big dog sat down")
    maps = {(0, 2): (longer, {0: 1, 2: 3}), (0, 1, 2): (base, [(0, 2), (1, 1), (2, 0)])}
    for keys, (source, words) in maps.items():
        query = {"metric": make_metric(["y_2", "x_1_0"]), "words": words}
        result = bt.sweep(source, base, at=["x", "v -> a", "W_q", "x_1_*"], **query)
        pairs = dict(words)
        part = result.part("x")
        assert {index[1] for index in part.names} == set(keys)
        for (slice_, word), name in part.names.items():
            patched = base.do({name: source[f"x_{slice_}_{pairs[word]}"]})
            values = [torch.as_tensor(patched.tpm("y_2").logits)[None].log_softmax(-1), patched["x_1_0"][None]]
            close(part.outcomes[slice_, part.positions["word"].index(word)], make_metric(["y_2", "x_1_0"])(*values))
        arrow = result.part("v -> a")
        assert {index[3] for index in arrow.names} == set(keys)
        joint = base.do({f"x_1_{word}": source[f"x_1_{peer}"] for word, peer in pairs.items()})
        expected = make_metric(["y_2", "x_1_0"])(joint.tpm("y_2").logits[None], joint["x_1_0"][None])
        close(result.part("x_1_*").outcomes[0], expected)
    source_metric = make_metric(["y_2", "x_1_0"])(longer.tpm("y_3").logits[None], longer["x_1_1"][None])
    close(bt.sweep(longer, base, metric=make_metric(["y_2", "x_1_0"]), words={0: 1, 2: 3}).clean, source_metric)
    noise = bt.sweep(base, longer, metric={"y_2": 1}, words={0: 1}, direction="noise")
    assert noise.corrupt is None and {index[1] for index in noise.names} == {0}


def test_paths_transmit_the_value_of_the_aligned_word():
    net = make_net(observe=bt.tpm.Categorical(3))
    base, longer = net.sentence("the cat sat"), net.sentence("a big dog sat down")
    same = net.sentence("big dog down")  # the words of the longer sentence that are read
    path = "W_v_0 -> v_0_0_1"
    query = {"metric": make_metric(["y_2"])}
    result = bt.sweep(longer, base, at=["x_0_1 -> v_0_0_1 -> a_0_0_2", path], words={0: 1, 1: 2, 2: 4}, **query)
    expected = bt.sweep(same, base, at=["x_0_1 -> v_0_0_1 -> a_0_0_2"], **query)
    close(result.outcomes[0], expected.outcomes[0])
    close(result.outcomes[1], result.corrupt)


def test_unequal_lengths_with_a_choice_that_is_set():
    mixture = make_net(combine="select", observe=bt.tpm.Categorical(3))
    sides = mixture.sentence("a big dog sat down"), mixture.sentence("the cat sat")
    fixed = bt.sweep(*(s.do(c=1) for s in sides), metric={"y_2": 1}, words={0: 1, 2: 2})
    assert float(fixed.effects.nan_to_num().abs().max()) > 0


def test_the_difference_of_a_state_and_itself_is_no_metric():
    clean, corrupt = make_examples(make_net(observe=bt.tpm.Categorical(3)), 2)
    for states in [(1, 1), (torch.tensor(1), 1), ([0, 2], [0, 2]), ([1, 1], 1)]:
        for node in ("y_2", "y"):
            assert "two different states" in get_refusal(bt.sweep, clean, corrupt, metric={node: states}), states
    one_differs = bt.sweep(clean, corrupt, metric={"y_2": ([0, 2], [0, 1])})
    assert [bool(value) for value in one_differs.corrupt] == [False, True]


def test_stacks_have_separate_maps():
    clean, corrupt = make_pair(get_case("encoder-decoder"))
    stacks = list(corrupt.ground.word_counts)
    query = {"at": ["enc_x", "dec_x"], "metric": make_metric(get_outputs(corrupt))}
    result = bt.sweep(clean, corrupt, words={stacks[0]: {0: 1}}, **query)
    full = bt.sweep(clean, corrupt, **query)
    close(result.part("dec_x").outcomes, full.part("dec_x").outcomes)
    assert {index[1] for index in result.part("enc_x").names} == {0}
    assert "a map for each stack" in get_refusal(bt.sweep, clean, corrupt, words={0: 1}, **query)


# metrics of roles


def test_a_metric_of_a_role_receives_all_its_nodes():
    clean, corrupt = make_examples(make_net(observe=bt.tpm.Categorical(3)), 2)
    shapes = {}

    def metric(q, x_2, y, W_q, x_1_0):
        shapes.update(q=q.shape, x_2=x_2.shape, y=y.shape, W_q=W_q.shape, x_1_0=x_1_0.shape)
        return q[:, 1, 0, 2, 1] + x_2[:, 2].sum(-1) * y[:, 0, 1] + x_1_0[:, 0]

    result = bt.sweep(clean, corrupt, at="x", metric=metric)
    single = bt.sweep(
        clean,
        corrupt,
        at="x",
        metric=lambda q_1_0_2, x_2_2, y_0, x_1_0: q_1_0_2[:, 1] + x_2_2.sum(-1) * y_0[:, 1] + x_1_0[:, 0],
    )
    close(result.outcomes, single.outcomes)
    width = corrupt[0]["q_0_0_0"].shape[0]
    assert shapes["q"] == (2, 2, 2, 3, width) and shapes["x_2"][:2] == (2, 3) and shapes["y"] == (2, 3, 3)
    estimate = bt.sweep(clean, corrupt, at="a", metric=metric, method=bt.Gradient())
    assert float(estimate.effects.abs().max()) > 0
    mediation = bt.mediation(clean, corrupt, through="a", metric=lambda y: y[:, -1, 0])
    close(mediation.indirect, bt.sweep(clean, corrupt, at="a", metric={"y_2": 0}).values)
    circuit = bt.circuit(clean, corrupt, metric=lambda y: y[:, -1, 0], threshold=10.0)
    close(circuit.clean, mediation.clean)


def test_a_metric_of_a_role_in_a_sweep_of_separate_runs():
    clean, corrupt = make_pair(get_case("recurrent"))
    result = bt.sweep(clean, corrupt, at="h", metric=lambda x: x.flatten(1).sum(-1))
    nodes = [
        corrupt.ground.name(n) for g in corrupt.ground.template.by_stem["x"] for n in corrupt.ground.select_nodes(g)
    ]
    close(result.corrupt, [sum(float(corrupt[name].sum()) for name in nodes)])


def test_the_oracle_of_a_list():
    """Some cells of a list against interventions on the reference."""
    clean, corrupt = make_pair(get_case("gated"))
    names = get_outputs(corrupt)
    oracle, ground = Oracle(clean, corrupt, tuple(names)), corrupt.ground
    result = bt.sweep(clean, corrupt, at=["g", "v -> a"], metric=make_metric(names))
    part = result.part("v -> a")
    for index in [*part.names][::7]:
        close(part.outcomes[index][0], oracle.evaluate(patch_path(*map(ground.id, part.names[index].split(" -> ")))))
    part = result.part("g")
    for index in [*part.names][::3]:
        close(part.outcomes[index][0], oracle.evaluate(set_values([ground.id(part.names[index])])))
    assert result.outcomes.dtype == D


ARROWS_WITHOUT_WORDS = {"v_0_* -> a_0_*": ["0_0", "0_1"], "v_0_0->a_0_0": ["0_0"], "v_*_1 -> a_*_1": ["0_1", "1_1"]}


@pytest.mark.parametrize("pattern", ARROWS_WITHOUT_WORDS)
def test_a_pattern_without_words_that_matches_no_edge_is_one_of_arrows(pattern):
    """The oracle sets each output to the mean of the clean values by the weights of the corrupt run."""
    net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "a", "cat", "dog"], norm="pre").to(D)
    clean, corrupt = net.sentence("the cat"), net.sentence("a dog")
    options = {"metric": {"y_1": "cat"}}
    outputs = {}
    for head in ARROWS_WITHOUT_WORDS[pattern]:
        query, key, value = corrupt[f"q_{head}"], corrupt[f"k_{head}"], clean[f"v_{head}"]
        scores = (query @ key.T / query.shape[-1] ** 0.5).masked_fill(torch.ones(2, 2).triu(1).bool(), -torch.inf)
        outputs[f"a_{head}"] = scores.softmax(-1) @ value
    logs = corrupt.do(outputs).tpm("y_1").logits.log_softmax(-1)
    result = bt.sweep(clean, corrupt, at=[pattern, "a_0_* -> y"], over="word", **options)
    close(result.part(pattern).outcomes[0, 0], logs[2])
    assert abs(float(result.part(pattern).values[0])) > 1e-3
    assert len(result.part("a_0_* -> y").names) == 2 * 2  # edges by word: a pattern that matches edges is one of edges
    with pytest.raises(bt.BNetError, match="as a list"):
        bt.sweep(clean, corrupt, at=pattern, **options)
    with pytest.raises(bt.UnknownNameError, match="edge"):
        bt.sweep(clean, corrupt, at=["v_0_* -> x_*"], **options)


def test_a_recurrent_net_has_arrows_of_patterns_without_words():
    """Its edges are an error, which is not that of the arrows."""
    clean, corrupt = make_pair(get_case("recurrent"))
    query = {"metric": make_metric(get_outputs(corrupt))}
    result = bt.sweep(clean, corrupt, at=["x_* -> h_*", "x_*_* -> h_*_*", "x_0_* -> h_0_*"], **query)
    close(result.outcomes[0], result.outcomes[1])
