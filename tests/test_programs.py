"""Compiled programs: the net computes the program, its readings apply, and the true circuit is that of two runs."""

import operator
import random

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import programs
from bnet_transformer.interventions import Zero
from bnet_transformer.programs import CORPUS, get_program
from bnet_transformer.programs.compiled import LOGIT, PairRuns, list_edges, structural_edges
from bnet_transformer.programs.program import encode_value
from tests.cases import close

PREVIOUS = programs.select(programs.indices, programs.indices, lambda j, i: j == i - 1)
SAME = programs.select(programs.tokens, programs.tokens, operator.eq)
IS_A = programs.map(lambda token: token == "a", programs.tokens, encoding="numeric")


def shares(words, token):
    return [words[: i + 1].count(token) / (i + 1) for i in range(len(words))]


def counts(words):
    return [words.count(word) for word in words]


def find_next(words):
    """The token after an earlier equal token, which is unique where the program is defined."""
    return [next((words[j] for j in range(1, i + 1) if words[j - 1] == words[i]), None) for i in range(len(words))]


def sort_words(words):
    """Each token once, at the number of smaller words; equal tokens have the same position."""
    positions = {sum(w < word for w in words): word for word in words}
    return [positions.get(i) for i in range(len(words))]


def is_balanced(words):
    depth, lowest = 0, 0
    for word in words:
        depth += 1 if word == "(" else -1
        lowest = min(lowest, depth)
    return [depth == 0 and lowest == 0] * len(words)


def after_mark(words):
    return next((words[i + 1] for i in range(len(words) - 1) if words[i] == "#"), words[0])


# Each program of the corpus as a Python function of a list of words, written without s-ops.
MEANINGS = {
    "shift": lambda w: [None, *w[:-1]],
    "reverse": lambda w: w[::-1],
    "induction": find_next,
    "histogram": counts,
    "double histogram": lambda w: counts(counts(w)),
    "fraction": lambda w: shares(w, "x"),
    "sort": sort_words,
    "first occurrence": lambda w: [word not in w[:i] for i, word in enumerate(w)],
    "balance": lambda w: [p - q for p, q in zip(shares(w, "("), shares(w, ")"), strict=True)],
    "dyck": is_balanced,
    "mode": lambda w: [n == max(counts(w)) for n in counts(w)],
    "lookup": lambda w: [w[word] if word < len(w) else None for word in w],
    "either": lambda w: [None, None, *("x" in w[i - 2 : i] for i in range(2, len(w)))][: len(w)],
    "backup": lambda w: [after_mark(w)] * len(w),
    "redundant": lambda w: [None, *w[:-1]],
    "cancelling": lambda w: [float(word == "x") for word in w],
    "induction, norm": find_next,
    "majority, norm": lambda w: [share > 0.5 for share in shares(w, "x")],
}


def parametrize_corpus(*names, slow=()):
    chosen = [get_program(name) for name in names] or [*CORPUS[::2]]
    chosen += [pytest.param(get_program(name), marks=pytest.mark.slow) for name in slow]
    chosen += [] if names else [pytest.param(known, marks=pytest.mark.slow) for known in CORPUS[1::2]]
    return pytest.mark.parametrize("known", chosen, ids=lambda known: known.name)


def assert_outputs(compiled, sentences, tolerance=1e-6):
    """The net has the outputs of the program: the same states, or numbers up to a tolerance."""
    for words, outputs in zip(sentences, compiled.predict(sentences), strict=True):
        expected = compiled.run(words)
        if compiled.program.output.is_numeric:
            assert outputs == pytest.approx(expected, abs=tolerance), words
        else:
            assert outputs == expected, words


# values


@parametrize_corpus()
def test_the_net_computes_the_program_for_all_sentences(known):
    sentences = known.list_sentences()
    assert len(sentences) > 100
    assert_outputs(known.compiled, sentences)


@parametrize_corpus()
def test_the_program_has_its_meaning(known):
    for words in known.list_sentences():
        expected = MEANINGS[known.name](list(words))
        assert known.compiled.run(words) == pytest.approx(expected) if expected[0] is not None else tuple(expected)


@pytest.mark.parametrize("name", ["balance", "fraction", "cancelling"])
def test_numbers_are_right_with_a_norm(name):
    known = get_program(name)
    options = {"vocabulary": known.vocabulary, "max_words": known.max_words, "causal": known.causal}
    compiled = programs.compile(known.build(), norm="rms", **options)
    assert {"norm1_0", "norm2_0", "norm"} <= {group.name for group in compiled.net.network.graph.groups}
    assert_outputs(compiled, known.list_sentences()[::7])


def draw_sop(generator, pool, kind):
    """A random s-op of s-ops in the pool, with random tables as functions and relations."""
    draw = generator.choice
    states, numbers = ([sop for sop in pool if sop.is_numeric == is_numeric] for is_numeric in (False, True))

    def table(results):
        entries = {}
        return lambda *values: entries.setdefault(values, draw(results))

    selector = programs.select(draw(states), draw(states), table([True, False]))
    if generator.random() < 0.3:
        selector &= programs.select(draw(states), draw(states), table([True, False]))
    match kind:
        case "map":
            return programs.map(table([0, 1, 2, None]), draw(pool))
        case "numeric map":
            return programs.map(table([-1, 0, 2]), draw(pool), encoding="numeric")
        case "sequence map":
            return programs.sequence_map(table([0, 1]), draw(states), draw(pool))
        case "numeric sequence map":
            return programs.sequence_map(table([1, 3]), draw(pool), draw(states), encoding="numeric")
        case "linear" if numbers:
            return programs.linear_sequence_map(draw(numbers), draw(numbers), 1, -0.5)
        case "aggregate":
            return programs.aggregate(selector, draw(pool))
        case "width":
            return programs.selector_width(selector)
    return programs.fallback(draw(states), draw(states))


KINDS = ["map", "numeric map", "sequence map", "numeric sequence map", "linear", "aggregate", "width", "fallback"]


def draw_program(generator):
    """A random program of two to six s-ops."""
    pool = [programs.tokens, programs.indices]
    for _ in range(generator.randrange(2, 7)):
        pool.append(draw_sop(generator, pool, generator.choice(KINDS)))
    return pool[-1]


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(k, marks=pytest.mark.slow) for k in range(8, 150))])
def test_random_programs(seed):
    """A law: the net of any program that compiles computes it wherever it is defined."""
    generator = random.Random(seed)
    options = {"causal": generator.random() < 0.5, "norm": generator.choice([None, "rms"])}
    compiled = programs.compile(draw_program(generator), vocabulary="abc", max_words=4, **options)
    sentences = [generator.choices("abc", k=generator.randrange(1, 5)) for _ in range(60)]
    defined = []
    for words in sentences:
        try:
            compiled.run(words)
        except bt.BNetError:  # several categorical values in one aggregate
            continue
        defined.append(words)
    assert_outputs(compiled, defined, tolerance=1e-5)


# the program as a bnet


@parametrize_corpus()
def test_the_bnet_of_a_program_has_its_values(known):
    program = known.compiled.program
    for words in random.Random(2).sample(known.list_sentences(), 2):
        s = program.net.sentence([*map(str, words)])
        for name, column in program.evaluate(words).items():
            for i, value in enumerate(column):
                close(s[f"{name}_{i}"], encode_value(program, program.variables[name], value))


def test_interventions_on_variables():
    program = get_program("induction").compiled.program
    assert program.run("abcdb") == (None, None, None, None, "c")
    s = program.net.sentence([*"abcdb"])
    do = {"previous_2": "d", "previous_3": "b"}  # word 3 follows "b", and word 2 does not
    assert program.run("abcdb", do=do)[-1] == "d"
    values = {name: encode_value(program, program.variables["previous"], value) for name, value in do.items()}
    close(s.do(values)["next_4"], encode_value(program, program.output, "d"))


def test_the_graph_of_a_program():
    program = get_program("either").compiled.program
    assert set(program.graph().predecessors("either")) == {"previous1", "previous2"}
    graph = program.graph("xab")
    assert graph.nodes["either_2"]["value"] is True
    assert set(graph.predecessors("previous2_2")) == {"indices_0", "indices_1", "indices_2", "tokens_0"}


# the true circuit


def list_writer_nodes(s, compiled, reader):
    """The nodes of all writers before a reader, each as a pair of its writer and its name."""
    slices, heads = len(compiled.layout.heads), compiled.net.network.graph.plate_sizes["head"]
    sublayers = [[f"{role}_{t}" for role in roles] for t in range(slices) for roles in ("qkv", ["ffn"])]
    group = "_".join(reader.split("_")[:2])
    end = next((k for k, groups in enumerate(sublayers) if group in groups), len(sublayers))
    writers = ["embed"]
    for k in range(end):
        writers += [f"ffn_{k // 2}"] if k % 2 else [f"a_{k // 2}_{h}" for h in range(heads)]
    return [(writer, f"{writer}_{i}") for writer in writers for i in range(len(s.words))]


def readout(s, i):
    distribution = s.tpm(f"y_{i}")
    return distribution.logits if isinstance(distribution, torch.distributions.Categorical) else distribution.mean


def read_output(s, i, compiled):
    """The output at a word: the most probable state, or the mean."""
    value = readout(s, i)
    return value.argmax() if compiled.output_values else value


def has_effect(compiled, clean, corrupt, edge):
    """Whether the output changes if one reader reads one writer in the other run: two runs by `Sentence.do`."""
    writer, reader = edge.split(" -> ")
    s, other = (compiled.net.sentence(compiled.encode(words)) for words in (clean, corrupt))
    nodes = list_writer_nodes(s, compiled, reader)
    changed = s.do({name: (other if source == writer else s)[name] for source, name in nodes})
    if reader != "y":
        changed = s.do({f"{reader}_{i}": changed[f"{reader}_{i}"] for i in range(len(s.words))})
    outputs = range(compiled.has_bos, len(s.words))
    return any((read_output(changed, i, compiled) - read_output(s, i, compiled)).abs() > 1e-3 for i in outputs)


@parametrize_corpus()
def test_the_truth_has_the_edges_of_the_net(known):
    compiled = known.compiled
    assert list_edges(compiled) == tuple(compiled.net.edges()["edge"])
    readers = {edge.split(" -> ")[1] for edge in list_edges(compiled)}
    heads = [f"{t}_{h}" for t in range(len(compiled.layout.heads)) for h in range(max(map(len, compiled.layout.heads)))]
    steps = {f"ffn_{t}" for t in range(len(compiled.layout.heads))}
    assert readers == {"y", *steps, *(f"{role}_{head}" for role in "qkv" for head in heads)}
    runs = PairRuns(compiled, known.list_pairs(1), tolerance=1e-3)
    assert sorted(edge for edge, _ in runs.iter_effects()) == sorted(list_edges(compiled))
    assert structural_edges(compiled) <= {*list_edges(compiled)}


@parametrize_corpus("either", slow=["cancelling", "redundant", "induction, norm"])
def test_an_edge_is_two_runs(known):
    sentences = random.Random(1).sample([w for w in known.list_sentences() if len(w) == 4], 2)
    truth = known.compiled.true_edges(sentences)
    assert truth.is_exhaustive and truth.num_pairs == 2
    pairs = [sentences, sentences[::-1]]
    for edge in list_edges(known.compiled):
        assert truth.effects[edge] == sum(has_effect(known.compiled, *pair, edge) for pair in pairs) / 2, edge


@parametrize_corpus("either", "backup", "redundant", "cancelling", "induction", "induction, norm")
def test_true_circuits(known):
    """By hand: the words move along these edges, and positions are equal in all sentences of one length."""
    edges = {
        "either": ["embed -> v_0_0", "embed -> v_0_1", "a_0_0 -> ffn_0", "a_0_1 -> ffn_0", "ffn_0 -> y"],
        "backup": [
            *("embed -> v_0_0", "a_0_0 -> k_1_0", "embed -> v_1_0", "a_1_0 -> ffn_1"),  # the token after the mark
            *("embed -> v_0_1", "a_0_1 -> ffn_1", "ffn_1 -> y"),
        ],
        "redundant": ["embed -> v_0_0", "a_0_0 -> ffn_0", "ffn_0 -> y"],
        "cancelling": [
            *("embed -> ffn_0", "ffn_0 -> v_1_0", "ffn_0 -> v_1_1", "a_1_0 -> y", "a_1_1 -> y", "ffn_0 -> y")
        ],
        "induction": ["embed -> v_0_0", "a_0_0 -> k_1_0", "embed -> q_1_0", "embed -> v_1_0", "a_1_0 -> y"],
    }[known.name.removesuffix(", norm")]
    assert known.truth.edges == set(edges) and known.truth.edges <= known.truth.structural
    assert ("a_0_1 -> ffn_0" in known.truth.without_effect) == (known.name == "redundant")


def test_a_sample_of_pairs_finds_the_edges_of_all_pairs():
    compiled = programs.compile(get_program("either").build(), vocabulary="xab", max_words=3, causal=True)
    truth, sample = compiled.true_edges(), compiled.true_edges(max_pairs=100, seed=1)
    assert truth.is_exhaustive and truth.num_pairs == 27 * 26
    assert not sample.is_exhaustive and sample.num_pairs == 100
    assert sample.edges == truth.edges
    assert all(abs(share - truth.effects[edge]) < 0.3 for edge, share in sample.effects.items())


@parametrize_corpus()
def test_effects_are_structural(known):
    truth = known.compiled.true_edges(max_pairs=30)
    assert truth.edges and truth.edges <= truth.structural <= truth.effects.keys()
    assert truth.to_dataframe()["by structure"].sum() == len(truth.structural)


@parametrize_corpus()
def test_pairs_differ_in_their_outputs(known):
    pairs = known.list_pairs()
    assert 32 <= len(pairs) <= 64 and len(set(pairs)) == len(pairs) and pairs == known.list_pairs()
    assert pairs[:5] == known.list_pairs(5) and pairs[:5] != known.list_pairs(5, seed=1)
    for clean, corrupt in pairs:
        assert len(clean) == len(corrupt) == known.max_words
        assert known.compiled.run(clean) != known.compiled.run(corrupt)


# the readings of the net


@parametrize_corpus("majority, norm", slow=["either", "dyck"])
def test_every_reading_applies(known, tmp_path):
    compiled = known.compiled
    clean, corrupt = (compiled.net.sentence(compiled.encode(words)) for words in known.list_pairs(1)[0])
    word = next(i for i in range(len(clean.words)) if (readout(clean, i) - readout(corrupt, i)).abs().max() > 1)
    label = clean.labels(f"y_{word}")[int(readout(clean, word).argmax())]
    metric = {f"y_{word}": label}
    last = f"ffn_{len(compiled.layout.heads) - 1}"
    assert bt.sweep(clean, corrupt, at="ffn", over=["slice"], metric=metric)[f"{last}_*"] > 1
    circuit = bt.circuit(clean, corrupt, metric=metric, threshold=0.1, over=["slice", "head"])
    assert circuit.faithfulness > 0.9
    part = clean.contributions(f"y_{word}", of=label)[last]  # only the last step writes the output
    close(part, torch.tensor(LOGIT), 1e-6)
    state = clean.labels(f"y_{word}").index(label)
    assert clean.do(ffn=Zero()).tpm(f"y_{word}").probs[state] < 0.6
    clean.draw(tmp_path / "sentence.svg")
    compiled.net.save(tmp_path / "net.safetensors")
    loaded = bt.load(tmp_path / "net.safetensors")
    close(loaded.sentence(clean.words)[f"ffn_0_{word}"], clean[f"ffn_0_{word}"])
    assert compiled.net.check() and compiled.net.equations() is not None


# invalid input


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: programs.aggregate(programs.tokens, programs.tokens), "a selector"),
        (lambda: programs.map(str, "tokens"), "an s-op"),
        (lambda: programs.map(3, programs.tokens), "a function"),
        (lambda: programs.map(str, programs.tokens, encoding="vector"), "encoding"),
        (lambda: programs.select(IS_A, programs.tokens, operator.eq), "a categorical s-op"),
        (lambda: programs.linear_sequence_map(IS_A, programs.tokens), "a numeric s-op"),
        (lambda: programs.sequence_map(max, IS_A, IS_A), "at most one numeric"),
        (lambda: programs.fallback(IS_A, programs.tokens), "a categorical s-op"),
        (lambda: SAME & programs.tokens, "a selector"),
    ],
)
def test_invalid_programs(build, message):
    with pytest.raises(bt.BNetError, match=message):
        build()


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (programs.aggregate(PREVIOUS, IS_A), {"bos": False}, "bos=True"),
        (programs.aggregate(PREVIOUS, programs.tokens), {"bos": False}, "bos=True"),
        (programs.selector_width(SAME), {"bos": False}, "bos=True"),
        (programs.tokens, {"vocabulary": ["a", "BOS"]}, "BOS"),
        (programs.tokens, {"vocabulary": ["a", "a"]}, "different"),
        (programs.tokens, {"max_words": 0}, "max_words"),
        (programs.tokens, {"norm": "layer"}, "norm"),
        (programs.tokens, {"sharpness": 1.0}, "sharpness"),
        ("tokens", {}, "an s-op"),
        (programs.map(lambda t: t, programs.tokens, name="tokens"), {}, "different names"),
        (programs.map(lambda t: t, programs.tokens, name="x_1"), {}, "role"),
        (programs.map(lambda t: 1 / 0, programs.tokens), {}, "the function failed"),
        (programs.map(lambda t: float("nan"), programs.tokens, encoding="numeric"), {}, "finite"),
        (programs.map(lambda t: {"a": 1, "b": "1"}[t], programs.tokens), {}, "different texts"),
    ],
)
def test_programs_that_do_not_fit(program, options, message):
    with pytest.raises(bt.BNetError, match=message):
        programs.compile(program, **{"vocabulary": "ab", "max_words": 3, **options})


@pytest.mark.parametrize("sentence", ["abz", "abab", "", 3, ["a", "c"]])
def test_sentences_that_do_not_fit(sentence):
    compiled = programs.compile(programs.selector_width(SAME), vocabulary="ab", max_words=3)
    for call in (compiled.encode, compiled.run, lambda words: compiled.predict([words])):
        with pytest.raises(bt.BNetError, match="sentence"):
            call(sentence)


def test_an_aggregate_of_different_states_is_not_defined():
    compiled = programs.compile(programs.aggregate(SAME, programs.indices), vocabulary="ab", max_words=3)
    assert compiled.run("ab") == (0, 1)
    with pytest.raises(bt.BNetError, match="one categorical value"):
        compiled.run("aa")


def test_true_edges_need_sentences_of_one_length():
    compiled = get_program("shift").compiled
    for sentences in (["ab", "abc"], ["ab"], ["ab", "ab"]):
        with pytest.raises(bt.BNetError, match="at least two different sentences of one length"):
            compiled.true_edges(sentences)
    with pytest.raises(bt.BNetError, match="at most 64"):
        get_program("shift").list_pairs(65)
    with pytest.raises(bt.UnknownNameError, match="induction"):
        get_program("inductoin")


def test_without_bos_where_no_aggregate_needs_it():
    known = get_program("fraction")
    assert not known.compiled.has_bos and known.compiled.encode("xa") == ["x", "a"]
    with_bos = programs.compile(known.build(), vocabulary=known.vocabulary, max_words=6, causal=True, bos=True)
    assert with_bos.encode("xa") == ["BOS", "x", "a"]
    assert_outputs(with_bos, known.list_sentences()[::11])


def test_a_program_without_heads():
    compiled = programs.compile(programs.map(str.upper, programs.tokens), vocabulary="ab", max_words=3)
    assert compiled.predict(["ab"]) == [("A", "B")] and compiled.true_edges().edges == {"embed -> ffn_0", "ffn_0 -> y"}
    identity = programs.compile(programs.tokens, vocabulary=["one", "two"], max_words=3)
    close(identity.program.net.sentence("two")["tokens_0"], torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert identity.predict(["one two", ["two"]]) == [("one", "two"), ("two",)]
