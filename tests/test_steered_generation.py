"""Interventions during generation equal `do` on the full sentence; drawn choices and samples follow the net; errors."""

import contextlib
import itertools
import math
from functools import cache

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import tpm
from bnet_transformer.interventions import Attend, Mean, Noise, Project, Scale, Set, Shift, Swap, Zero
from bnet_transformer.tpm import Attention, Categorical
from tests.cases import CASES, close, get_case, jitter
from tests.test_chains import make_language_net
from tests.test_decoding import NETS

D = torch.float64
VOCABULARY = ("the", "cat", "sat")
GENERATORS = (
    "chapter, words",
    "encoder, post-norm",
    "encoder, pre-norm",
    "recurrent, lstm",
    "grouped",
    "vanilla decoder, causal",
    "vanilla encoder-decoder",
)
FURTHER = ("recurrent", "relative", "pre-norm, learned positions", "sigmoid of earlier words", "concat of the chapter")
KINDS = (
    *("set", "zero", "shift", "set a word", "shift a word", "sentence", "mean", "attend", "one plate"),
    *("function", "scale a word", "noise", "swap", "project", "coordinates", "changes of plates"),
)
PROMPTS, NEW_WORDS, LENGTH = ([1, 2], [0, 2, 1]), 4, 7


@cache
def make_net(name: str) -> bt.BNet:
    """A net that generates words: a case, or a net of the tests of decoding. Its choices are set by `set_choices`."""
    return get_case(name).net if name in GENERATORS else jitter(NETS[name]()).to(D)


def set_choices(net: bt.BNet) -> dict[str, int]:
    """Interventions on all latent choices, so that nodes have one value."""
    return {spec.group.name: 1 for spec in net.network.choices}


def get_stack(net: bt.BNet) -> str:
    """The stack in which words are generated, which is the last one."""
    return net.network.graph.word_stacks[-1]


def make_sentence(net: bt.BNet, words: list[int], row: int = 0) -> bt.Sentence:
    """A sentence with these words in the stack in which words are generated."""
    stacks = net.network.graph.word_stacks
    return net.sentence(words if len(stacks) == 1 else {stacks[0]: [[0, 1, 2], [2, 1, 0]][row], stacks[1]: words})


def make_prompts(net: bt.BNet) -> object:
    """Two prompts of different lengths; for two stacks with their sources."""
    stacks = net.network.graph.word_stacks
    return list(PROMPTS) if len(stacks) == 1 else {stacks[0]: [[0, 1, 2], [2, 1, 0]], stacks[1]: list(PROMPTS)}


def make_intervention(net: bt.BNet, spec: object, kind: str) -> dict[str, object]:
    """An intervention of some kind on a node group."""
    group, generator = spec.group, torch.Generator().manual_seed(spec.group.index)
    vector = torch.randn(spec.shape, generator=generator, dtype=D)
    sources = [
        make_sentence(net, words).do(set_choices(net)) for words in ([2, 1, 0, 0, 1, 2, 2], [1, 1, 0, 2, 0, 0, 1])
    ]
    name = group.name
    first = "".join(f"_{k}" for k in (*[0] * len(group.plates), 1)) if group.word_stack is not None else ""
    is_attention = isinstance(spec.tpm, Attention) and group.word_stack == get_stack(net)
    if kind == "one plate" and group.plates and group.word_stack is not None:
        prefix = "_0" * (len(group.plates) - 1)
        return {f"{name}{prefix}_1": Zero(), f"{name}{prefix}_0": Shift(vector)}
    if kind == "changes of plates" and group.plates and group.word_stack is not None:
        return {f"{name}_0": lambda value: (value - vector).tanh(), f"{name}_1": Swap(sources[0], [0])}
    if kind == "attend" and is_attention and "earlier" not in str(spec.parents[1].reach):
        count = 2 if spec.parents[1].reach.kind == "causal" else 0
        return {f"{name}{first}": Attend([0.25, 0.75])} if count else {name: Zero()}
    return {
        "set": {name: vector},
        "zero": {name: Zero()},
        "shift": {name: Shift(vector)},
        "set a word": {f"{name}{first}": vector},
        "shift a word": {f"{name}{first}": Shift(vector)},
        "sentence": {name: sources[0]},
        "mean": {name: Mean(sources)},
        "function": {name: lambda value: value.sin() + vector},
        "scale a word": {f"{name}{first}": Scale(vector)},
        "noise": {name: Noise(0.5, seed=3)},
        "swap": {name: Swap(sources[0], torch.linalg.qr(vector.reshape(-1, 1)).Q)},
        "project": {name: Project([0], Mean(sources))},
        "coordinates": {name: Set(1.5, torch.linalg.qr(vector.reshape(-1, 1)).Q)},
    }.get(kind, {name: Shift(0.5 * vector)})


def find_readout(net: bt.BNet) -> object:
    """The readout of the next word."""
    return next(m for m in net.network.specs if m.tpm.is_random and not net.network.graph.out_edges[m.group.index])


def list_targets(net: bt.BNet) -> list[object]:
    """The groups with real values on which the next word depends, and which interventions can set."""
    readout = find_readout(net)
    specs = net.network.ancestral_specs(readout)
    return [spec for spec in specs if spec is not readout and not spec.tpm.is_index_valued and not spec.tpm.is_random]


def check_generation(net: bt.BNet, do: dict[str, object], **options: object) -> None:
    """The log probabilities of the words are those of the sentence after `do`."""
    do = {**set_choices(net), **do}
    result = net.generate(make_prompts(net), do=do, length=NEW_WORDS, seed=3, **options)
    readout = find_readout(net).group.name
    for row, (prompt, ids) in enumerate(zip(PROMPTS, result.ids, strict=True)):
        s = make_sentence(net, [*prompt, *ids], row).do(do)
        actual = torch.tensor(result.log_probs[row], dtype=D)
        at = range(len(prompt) - 1, len(prompt) - 1 + len(ids))
        expected = [s.tpm(f"{readout}_{i}").log_prob(torch.tensor(w)) for i, w in zip(at, ids, strict=True)]
        close(actual, torch.stack(expected))
        assert result.scores[row] == pytest.approx(sum(result.log_probs[row]), abs=1e-10)


@pytest.mark.parametrize("name", GENERATORS + FURTHER)
def test_generation_with_interventions_equals_do_on_the_full_sentence(name):
    """One intervention of each kind, on groups from the first to the last."""
    net = make_net(name)
    targets = list_targets(net)
    for k, spec in enumerate(targets[:: max(1, len(targets) // len(KINDS))]):
        check_generation(net, make_intervention(net, spec, KINDS[k % len(KINDS)]), method="sample")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GENERATORS + tuple(NETS))
def test_every_kind_of_intervention_equals_do(name, kind):
    """Every kind on every second group, which are the others for the next kind."""
    net = make_net(name)
    for k, spec in enumerate(list_targets(net)[KINDS.index(kind) % 2 :: 2]):
        check_generation(net, make_intervention(net, spec, kind), method=("greedy", "beam", "sample")[k % 3])


def test_the_cases_that_generate_are_covered():
    """Every case of the table either is tested above or cannot generate words."""
    generators = set()
    for case in CASES:
        prompt = {"start": 0} if isinstance(case.text, dict) else {}
        with contextlib.suppress(bt.BNetError):
            case.net.generate(case.text, length=1, **prompt)
            generators.add(case.name)
    # The net with four learned positions is too short; `NETS` has one with more positions.
    assert generators == {*GENERATORS, "vanilla decoder, learned", "neurons"}


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_interventions_at_new_words_only(method):
    net = make_net("vanilla decoder, causal")
    vector = torch.tensor([1.0, -2.0, 0.5, 1.0], dtype=D)
    for change in (Shift(vector), lambda value: (value * vector).exp()):
        do = {"x_1": change, "x_0_1": Zero()}
        result = net.generate([[1, 2], [0, 2, 1]], do=do, do_from="new", length=4, method=method)
        for prompt, ids, log_probs in zip(PROMPTS, result.ids, result.log_probs, strict=True):
            new_words = range(len(prompt), len(prompt) + 4)
            s = net.sentence([*prompt, *ids]).do({f"x_1_{i}": change for i in new_words} | {"x_0_1": Zero()})
            expected = [s.tpm(f"y_{i - 1}").log_prob(torch.tensor(w)) for i, w in zip(new_words, ids, strict=True)]
            close(torch.tensor(log_probs, dtype=D), torch.stack(expected))


def test_a_function_is_called_with_the_changed_nodes_only():
    """Not with those of other heads and of the prompt."""
    net = make_net("vanilla decoder, causal")
    words = [[1, 2], [0, 2, 1]]
    sizes = []

    def halve(value):
        sizes.append(value.numel() // value.shape[-1])
        return value / 2

    net.generate(words, do={"a_0_1": halve}, do_from="new", length=2)
    assert max(sizes) <= 2


def test_a_patch_or_a_mean_at_new_words_leaves_the_prompt_as_it_is():
    net = make_net("vanilla decoder, causal")
    donors = [net.sentence(ids) for ids in ([2, 0, 0, 1, 2], [0, 1, 1, 2, 0])]
    for value in (donors[0], Mean(donors)):
        result = net.generate([[1, 2], [0, 2, 1]], do={"x_1": value}, do_from="new", length=2)
        for prompt, ids, log_probs in zip(PROMPTS, result.ids, result.log_probs, strict=True):
            new_words = range(len(prompt), len(prompt) + 2)
            s = net.sentence([*prompt, *ids]).do({f"x_1_{i}": value for i in new_words})
            expected = [s.tpm(f"y_{i - 1}").log_prob(torch.tensor(w)) for i, w in zip(new_words, ids, strict=True)]
            close(torch.tensor(log_probs, dtype=D), torch.stack(expected))


def test_a_patch_applies_at_the_words_that_the_sentence_has():
    net, other = make_net("vanilla decoder, causal"), make_net("vanilla decoder, causal").sentence([2, 0, 0])
    result = net.generate([1, 2], do={"x_1": other}, length=4)
    s = net.sentence([1, 2, *result.ids[0]]).do({f"x_1_{i}": other for i in range(3)})
    close(result.log_probs[0][-1], float(s.tpm("y_4").log_prob(torch.tensor(result.ids[0][-1]))))


def test_shifts_of_several_slices_add_up():
    """A shift is added to the value after the shifts of earlier slices and, in recurrent nets, of earlier words."""
    s, vector = get_case("vanilla decoder, causal").sentence, torch.tensor([1.0, -2.0, 0.5, 1.0], dtype=D)
    one_by_one = s.do(x_0=Shift(vector)).do(x_1=Shift(vector)).do(x_2=Shift(vector))
    close(s.do(x=Shift(vector))["x_2_2"], one_by_one["x_2_2"])
    recurrent = get_case("recurrent, lstm").sentence
    by_word = recurrent
    for word in range(3):
        by_word = by_word.do({f"cell_0_{word}": Shift(vector)})
    close(recurrent.do(cell_0=Shift(vector))["x_2_2"], by_word["x_2_2"])
    assert not torch.allclose(by_word["cell_0_2"], recurrent["cell_0_2"] + vector)


def test_a_name_without_its_word_is_all_words():
    s = get_case("vanilla decoder, causal").sentence
    assert s.do(a_1_0=Zero()).state.interventions.keys() == s.do({"a_1_0_*": Zero()}).state.interventions.keys()


# Nets with latent choices.


def make_mixture(per: str = "sentence", **options: object) -> bt.BNet:
    """A net with latent choices and a vocabulary of three words, whose choices matter."""
    if per == "chain":
        return make_language_net()
    net = bt.bayesuvius(4, heads=2, vocabulary=VOCABULARY, mask="causal", observe=Categorical(3), per=per, **options)
    return jitter(net, 0.8).to(D)


def compute_joint(
    net: bt.BNet, prompt: list[int], count: int, do: dict[str, object] | None = None
) -> dict[tuple[int, ...], float]:
    """The exact probability of the next words and of all choices, given the prompt, by enumeration.

    The values that `do` changes are those given the choices.
    """
    names = [name for name in net.sentence([0] * (len(prompt) + count - 1)).sample(1).states if name[0] != "y"]
    log_probs = {}
    for words in itertools.product(range(3), repeat=count):
        full = [*prompt, *words]
        s, observed = net.sentence(full[:-1]), {f"y_{i}": word for i, word in enumerate(full[1:])}
        for states in itertools.product(range(2), repeat=len(names)):
            choices = dict(zip(names, states, strict=True))
            given_choices = s.do(choices).do(do or {}).log_prob(observed)
            log_probs[(*words, *states)] = float(s.log_prob(choices)) + float(given_choices)
    weights = torch.tensor(list(log_probs.values()), dtype=D).softmax(0).tolist()
    return dict(zip(log_probs, weights, strict=True))


def check_samples(rows: torch.Tensor, joint: dict[tuple[int, ...], float]) -> None:
    """The chi-square statistic of samples `[n, column]` is that of the joint distribution."""
    keys, counts = torch.unique(rows, dim=0, return_counts=True)
    observed = {tuple(key): count for key, count in zip(keys.tolist(), counts.tolist(), strict=True)}
    assert observed.keys() <= joint.keys()
    cells = [(observed.get(key, 0), len(rows) * p) for key, p in joint.items()]
    common, uncommon = [c for c in cells if c[1] >= 5], [c for c in cells if c[1] < 5]
    common += [tuple(map(sum, zip(*uncommon, strict=True)))] if uncommon else []
    statistic = sum((o - e) ** 2 / e for o, e in common if e > 0)
    freedom = len(common) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("per", ["sentence", "word", "slice", "chain"])
def test_samples_of_choices_and_words_have_the_joint_distribution(per):
    net = make_mixture(per=per)
    samples = net.sample(3000, words=2, start=0, seed=5)
    choices = [name for name in samples.states if name[0] != "y"]
    rows = torch.stack([samples["y_0"], samples["y_1"], *(samples[name] for name in choices)], 1)
    check_samples(rows, compute_joint(net, [0], 2))
    labels, frame = samples.labels["y_0"], samples.to_dataframe()
    assert len(labels) == 3 and samples.texts[7] == " ".join(labels[samples[name][7]] for name in ("y_0", "y_1"))
    assert frame["y_1"][7] == labels[samples["y_1"][7]] and all(name in repr(samples) for name in choices)


def test_samples_of_a_net_whose_choices_no_elimination_covers():
    """Two slices with a choice of each word: the words of a prompt make their posterior exponential, draws do not."""
    net = make_mixture(per="word", slices=2)
    samples = net.sample(3000, words=2, start=0, seed=5)
    rows = torch.stack([samples[name] for name in ("y_0", "y_1")], 1)
    joint: dict[tuple[int, ...], float] = {}
    for words in itertools.product(range(3), repeat=2):
        joint[words] = float(net.sentence([0, words[0]]).log_prob({"y_0": words[0], "y_1": words[1]}).exp())
    check_samples(rows, joint)


@pytest.mark.parametrize("per", ["sentence", "word", "chain"])
def test_choices_are_drawn_given_the_prompt(per):
    """Also in a batch with a shorter prompt, after which decoding starts."""
    net, prompt = make_mixture(per=per), [0, 2, 1]
    result = net.generate([prompt] * 2000 + [[1]], method="sample", choices="draw", length=2, seed=5)
    states = [value[:-1].reshape(2000, -1) for value in result.states.values()]
    rows = torch.cat([torch.tensor(result.ids[:-1]), *states], 1)
    check_samples(rows, compute_joint(net, prompt, 2))


def test_words_sampled_with_and_without_drawn_choices_have_the_same_distribution():
    net = make_mixture()
    joint: dict[tuple[int, ...], float] = {}
    for (*words, _), p in compute_joint(net, [0], 2).items():
        joint[tuple(words)] = joint.get(tuple(words), 0.0) + p
    for choices in ("sum", "draw"):
        result = net.generate([[0]] * 3000, method="sample", choices=choices, length=2, seed=1)
        check_samples(torch.tensor(result.ids), joint)
        assert bool(result.states) == (choices == "draw")


def test_interventions_in_a_net_with_latent_choices():
    """The predicted word is averaged over the posterior of the choice in the net after the interventions."""
    net, vector = make_mixture(slices=2), torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=D)
    for do in ({"x_1": vector}, {"x_0_1": Zero()}, {"c": 1, "x_1": Shift(vector)}, {"c": 0}):
        result = net.generate([0, 2], do=do, length=2)
        s = net.sentence([0, 2, *result.ids[0]]).do(do)
        evidence = {}
        for i, word in enumerate([2, *result.ids[0]]):
            if i >= 1:
                close(result.log_probs[0][i - 1], float(s.posterior(f"y_{i}", evidence)[word].log()))
            evidence[f"y_{i}"] = word


@pytest.mark.parametrize("per", ["sentence", "word", "chain"])
def test_changes_of_values_that_depend_on_latent_choices(per):
    """They apply in each state of the choices, which are summed out or drawn."""
    net, prompt = make_mixture(per=per), [0, 2]
    name = next(spec.group.name for spec in list_targets(net)[::-1] if spec.group.word_stack is not None)
    do = {name: lambda value: 2 * value.tanh() + 0.5}
    joint = compute_joint(net, prompt, 2, do)
    result = net.generate([prompt], do=do, length=2)
    given_words = sum(p for row, p in joint.items() if row[:2] == result.ids[0])
    assert result.scores[0] == pytest.approx(math.log(given_words), abs=1e-10)
    plain = compute_joint(net, prompt, 2)
    assert abs(sum(p for row, p in plain.items() if row[:2] == result.ids[0]) - given_words) > 1e-3
    result = net.generate([prompt] * 2000, do=do, method="sample", choices="draw", length=2, seed=5)
    states = [value.reshape(2000, -1) for value in result.states.values()]
    check_samples(torch.cat([torch.tensor(result.ids), *states], 1), joint)


def test_samples_after_a_change_have_its_distribution():
    net = make_mixture(slices=2)
    plain = net.sentence([0, 2])
    s = plain.do({"x_0": lambda value: -2 * value}).do({"x_0_1": Scale(3.0)})
    set_values = plain.do({"x_0_0": -2 * plain["x_0_0"], "x_0_1": -6 * plain["x_0_1"]})
    assert s.sample(50, seed=2).states["y_1"].equal(set_values.sample(50, seed=2).states["y_1"])
    names, samples = ["c", "y_0", "y_1"], s.sample(3000, seed=5)
    joint = {
        states: float(s.log_prob(dict(zip(names, states, strict=True))).exp())
        for states in itertools.product(range(2), range(3), range(3))
    }
    check_samples(torch.stack([samples[name] for name in names], 1), joint)


def test_samples_of_nets_that_generate_all_their_words():
    sprinkler = get_case("sprinkler").net
    assert sprinkler.sample(7, seed=2)["wet"].tolist() == sprinkler.sentence().sample(7, seed=2)["wet"].tolist()
    tags = bt.Node(
        "tag", tpm.Table(((0.9, 0.1), (0.2, 0.8)), initial=(0.5, 0.5)), [bt.Arrow("tag", "before")], ["word"]
    )
    word = bt.Node("y", tpm.Table(((0.7, 0.3), (0.1, 0.9))), ["tag"], ["word"])
    hmm = bt.BNet(bt.Declaration([bt.Stack([tags], [], [word])]))
    samples = hmm.sample(4, words=3)
    assert {name[0] for name in samples.states} == {"t", "y"} and len(samples.states) == 6
    net = make_net("vanilla decoder, causal")
    assert net.sample(3, words=2, start=1, seed=4)["y_1"].tolist() == [
        row[1] for row in net.generate([[1]] * 3, method="sample", length=2, seed=4).ids
    ]


VECTOR = torch.ones(4, dtype=D)
BAD = {
    "an unknown node": ({"do": {"z_1": Zero()}}, "unknown|known name"),
    "a near name": ({"do": {"x_7": Zero()}}, "x_0_0 to x_2"),
    "another width": ({"do": {"x_1": torch.ones(3)}}, "shape"),
    "a shift of another width": ({"do": {"x_1": Shift(torch.ones(3))}}, "shift of shape"),
    "a word after the prompt": ({"do": {"x_1_3": Zero()}}, "word of every prompt"),
    "the readout": ({"do": {"y": 1}}, "readout"),
    "a function of states": ({"do": {"token": Scale(2.0)}}, "real values"),
    "Mean of words": ({"do": {"x_1": Mean()}}, "Mean"),
    "Attend at every word": ({"do": {"a_1": Attend([1.0])}}, "Attend"),
    "no mapping": ({"do": "x_1"}, "mapping"),
    "two values": ({"do": {"x_1": Zero(), "x_1_0": Zero()}}, "another value"),
    "do_from": ({"do_from": "prompt"}, "do_from"),
    "choices": ({"choices": "all"}, "choices"),
    "draw without sampling": ({"choices": "draw"}, "does not sample"),
    "a state": ({"do": {"token": 9}}, "state"),
    "infinity": ({"do": {"x_1": VECTOR / 0}}, "finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_interventions_that_cannot_apply_are_errors(name):
    options, match = BAD[name]
    with pytest.raises(bt.BNetError, match=match):
        make_net("vanilla decoder, causal").generate([1, 2], length=3, **options)


def test_further_errors():
    net = make_net("vanilla decoder, causal")
    with pytest.raises(bt.BNetError, match="sentences of at least 5 words"):
        net.generate([1, 2], length=3, do={"x_1": Mean([net.sentence([1, 2])])})
    for value in (Mean([net.sentence([1])]), net.sentence([1])):
        with pytest.raises(bt.BNetError, match=r"x_1_1: .* of 1 word"):
            net.generate([1, 2], length=3, do={"x_1_1": value})
    for value in (Mean([get_case("chapter").sentence]), get_case("chapter").sentence):  # whose stack has another name
        with pytest.raises(bt.UnknownNameError):
            make_net("vanilla encoder-decoder").generate({"enc": [1, 2]}, start=1, length=3, do={"dec_x_1": value})
    with pytest.raises(bt.BNetError, match="some nodes of c_0 are set"):
        make_mixture("word").generate([1, 2], length=2, do={"c_0_0": 1}, method="sample", choices="draw")
    with pytest.raises(bt.BNetError, match="finite"):
        Shift([float("nan")])
    with pytest.raises(bt.BNetError, match="start"):
        net.sample(3, words=2)
    with pytest.raises(bt.BNetError, match="words"):
        net.sample(3, start=1)
    with pytest.raises(bt.BNetError, match=r"sentence\(\.\.\.\)\.sample"):
        get_case("tagger").net.sample(3, words=2)
    with pytest.raises(bt.BNetError, match="one stack"):
        make_net("vanilla encoder-decoder").sample(3, words=2, start=0)
