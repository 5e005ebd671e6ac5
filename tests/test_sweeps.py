"""Sweeps equal one intervention at a time, by the reference: roles, rows of attention, ablations, latent choices."""

import itertools
import random

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer import reference
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.interventions import Attend, Mean, Noise, Zero
from tests.cases import CASES, chapter, get_case, jitter
from tests.sweep_oracle import D, Oracle, get_axes, get_cells, get_outputs, make_metric, make_pair, set_rows, set_values

CELLS, RUNS = 4, 20  # maximum number of cells of a sweep for the reference; and its runs for these


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(
        torch.as_tensor(actual), torch.as_tensor(expected, dtype=D), rtol=tolerance, atol=tolerance, check_dtype=False
    )


def make_net(**options):
    return jitter(chapter(**{"heads": 2, "combine": "concat", "slices": 2, "residual": True, **options})()).to(D)


def make_sentences(net, corrupt="the cat sat", clean="dog cats sat"):
    return net.sentence(clean), net.sentence(corrupt)


def choose(indices, states, key, count=2):
    """Return random cells of a sweep, as many as the oracle can compute in time, and the last one."""
    indices = sorted(indices)
    picked = random.Random(str(key)).sample(indices, min(len(indices), count, RUNS // states))
    return dict.fromkeys([indices[-1], *picked])


def check(result, oracle, patches, tolerance=1e-10):
    """Check that cells of a sweep equal one intervention at a time."""
    for index, patch in patches.items():
        close(result.outcomes[index][0], oracle.evaluate(patch), tolerance)


def find_roles(net):
    """Return the roles over which a sweep may run: nodes that are functions, and words that are given."""
    kinds = {m.group.stem: m.tpm.kind for m in net.network.specs}
    return [role for role, kind in kinds.items() if kind == "deterministic"]


# one intervention at a time


@pytest.mark.parametrize("kind", ["patch", "zero", "mean"])
def test_a_cell_of_a_mapping_sets_all_its_nodes(kind):
    net = make_net()
    clean, corrupt = make_sentences(net)
    ablation = {"patch": None, "zero": Zero(), "mean": Mean([clean, corrupt])}[kind]
    cells = {"first": ["a_0_0_*", "a_1_1_*"], "second": ["a_1_0_2"], "all": ["a_0_*_*", "a_1_*_*"]}
    result = bt.sweep(ablation or clean, corrupt, at=cells, metric=lambda x_2_2: x_2_2[:, 0], progress=False)
    assert result.axes == ("cell",) and result.labels["cell"] == tuple(cells)
    for k, patterns in enumerate(cells.values()):
        expected = corrupt.do(dict.fromkeys(patterns, ablation or clean))["x_2_2"][0]
        close(result.outcomes[k, 0], expected)


def test_the_oracle_is_do_and_the_posterior():
    """With latent choices, at words that do not depend on them; with all choices set, at every node."""
    clean, corrupt = make_pair(get_case("codebook"))
    oracle = Oracle(clean, corrupt, ("y_2",))
    fixed = corrupt.do(x_0_1=clean)
    model = fixed.state.model
    close(
        oracle.inputs(set_values([fixed.ground.id("x_0_1")]))[0][0].exp(),
        reference.posterior(model, model.ground.id("y_2"), {}),
    )
    clean, corrupt = make_pair(get_case("encoder-decoder"))
    oracle = Oracle(clean, corrupt, ("dec_y_1", "dec_x_2_0"))
    for name in ("enc_x_1_2", "dec_cross_v_0_1", "dec_a_1_1", "dec_W_k_0"):
        fixed = corrupt.do({name: clean[name]})
        log_probs, values = oracle.inputs(set_values([fixed.ground.id(name)]))
        close(log_probs[0], fixed.tpm("dec_y_1").logits)
        close(values[0], fixed["dec_x_2_0"])


LARGE = ("word", "word, codebook", "word, two slices", "codebook, two slices")  # many joint states: one role is enough
CASES_WITH_WORDS = [case_ for case_ in CASES if case_.text is not None]
REFUSED = {("marginal", "x"), ("experts", "x"), ("experts", "e"), ("hidden Markov", "x"), ("hidden Markov", "W")}
REFUSED |= {("backward chain", "x"), *(("windowed selectors", role) for role in "xpWv")}


# Roles that are swept: one of every kind of TPM, axes and attended words, and of nets with choices of every kind.
ROLES = {
    "chapter": ("x", "W_q", "q"),
    "chapter, two slices": ("v",),
    "chapter, words": ("x",),
    "codebook": ("q",),
    "slice": ("W_q",),
    "word": ("q",),
    "concat": ("W_q", "a"),
    "encoder, post-norm": ("position", "x", "q", "a", "mix", "drop", "norm1", "ffn"),
    "encoder, pre-norm": ("position",),
    "three stacks": ("W_shared", "dec_left"),
    "two selectors": ("v",),
    "gated": ("a", "g"),
    "recurrent": ("h",),
    "recurrent, lstm": ("input", "cell"),
    "recurrences": ("g", "p", "m"),
    "integrator": ("resnet",),
    "cayley": ("A", "a", "lower1"),
    "bucketed": ("scaled",),
    "grouped": ("a",),
    "marginal": ("x",),
    "hidden Markov": ("W",),
    "experts": ("e",),
    "encoder-decoder": ("dec_a",),
    "positioned": ("both", "pool", "first"),
    "shared slices": ("a",),
    "started": ("start", "first"),
    "vanilla encoder, masked word": ("transform",),
    "vanilla encoder, class": ("dense", "transform"),
    "vanilla encoder-decoder, pre-norm": ("dec_cross_a",),
}


def check_roles(case_, roles, count):
    """Sweep the roles of a case; this number of cells is compared with the oracle."""
    clean, corrupt = make_pair(case_)
    names = get_outputs(corrupt)
    oracle = Oracle(clean, corrupt, tuple(names))
    base = [oracle.evaluate(base=0)], [oracle.evaluate()]
    for number, role in enumerate(roles):
        axes = get_axes(corrupt, role)
        subsets = [over for n in range(1, len(axes)) for over in itertools.combinations(axes, n)]
        if (case_.name, role) in REFUSED:
            with pytest.raises(bt.EvidenceError, match=r"a value for each state of a choice.* by do"):
                bt.sweep(clean, corrupt, at=role, metric=make_metric(names))
            continue
        joint = random.Random(f"{case_.name} {role}").choice(subsets) if subsets and len(oracle.runs) < RUNS else None
        for over in dict.fromkeys((None, joint)):
            result = bt.sweep(clean, corrupt, at=role, metric=make_metric(names), over=over)
            expected = get_cells(corrupt, role, over)
            assert result.axes == (axes if over is None else over) and len(result.labels) == len(result.axes)
            assert set(itertools.product(*map(range, result.outcomes.shape[:-1]))) == set(expected)
            picked = choose(expected, len(oracle.runs), (case_.name, role, over), count)
            check(result, oracle, {index: set_values(expected[index]) for index in picked})
            for index in picked if over is None else ():
                assert result.names[index] == corrupt.ground.name(expected[index][0])
            if over is None and number == 0:
                f32 = bt.sweep(*make_pair(case_, torch.float32), at=role, metric=make_metric(names))
                close(f32.outcomes, result.outcomes, 1e-5)
                close(f32.corrupt, result.corrupt, 1e-5)
        close(result.clean, base[0])
        close(result.corrupt, base[1])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (k % 2)) for k, name in enumerate(ROLES)]
)
def test_roles_of_every_kind_are_swept_as_one_node_is_set_at_a_time(name):
    """In double precision; and in single precision the same."""
    check_roles(get_case(name), ROLES[name], 1)


@pytest.mark.slow
@pytest.mark.parametrize("case_", CASES_WITH_WORDS, ids=lambda case_: case_.name)
def test_every_role_is_swept_as_one_node_is_set_at_a_time(case_):
    every_role = find_roles(case_.net)
    check_roles(case_, every_role[::3] if case_.name in LARGE else every_role, CELLS)


@pytest.mark.parametrize("name", ["marginal", "experts", "hidden Markov"])
def test_choices_that_values_decide_are_set_first(name):
    """As the error advises: with these set in both runs, to equal values or not, every role is swept."""
    clean, corrupt = make_pair(get_case(name))
    stem = {"marginal": "j", "experts": "r", "hidden Markov": "z"}[name]
    nodes = [n for n in corrupt.ground.names if n.startswith(f"{stem}_")]
    clean, corrupt = (
        s.do({n: (k + shift) % 2 if name != "marginal" else 0 for k, n in enumerate(nodes)})
        for shift, s in enumerate((clean, corrupt))
    )
    names = get_outputs(corrupt)
    oracle = Oracle(clean, corrupt, tuple(names))
    for role in (*find_roles(corrupt.net), stem):
        result, expected = bt.sweep(clean, corrupt, at=role, metric=make_metric(names)), get_cells(corrupt, role)
        check(result, oracle, {index: set_values(expected[index]) for index in choose(expected, 1, (name, role))})


READERS = {
    "concat": ("j", "a"),
    "chapter, two slices": ("j", "x"),
    "codebook": ("j", "x"),
    "encoder-decoder": ("enc_j", "enc_a"),
    "vanilla encoder-decoder, pre-norm": ("dec_cross_j", "dec_cross_a"),
    "vanilla decoder, causal": ("j", "a"),
}


@pytest.mark.parametrize("name", READERS)
def test_rows_and_entries_of_attention(name):
    """Whole rows, rows set together, and single entries, whose row need not sum to one afterwards."""
    role, reader = READERS[name]
    clean, corrupt = make_pair(get_case(name))
    names = get_outputs(corrupt)
    oracle = Oracle(clean, corrupt, tuple(names))
    ground = corrupt.ground
    groups = [g for g in ground.template.by_stem[reader] if ground.template.in_edges[g.index]]
    rows = {}
    for k, group in enumerate(groups):
        for node in ground.select_nodes(group).tolist():
            if oracle.corrupt.net.network.specs[group.index].tpm.kind == "deterministic" and get_row(oracle, node):
                rows[(k, *ground.unravel_index(node)[1])] = node
    result = bt.sweep(clean, corrupt, at=role, metric=make_metric(names))
    assert result.axes[0] == "slice" and result.axes[-1] == "word" and set(rows) == all_indices(result)
    check(result, oracle, {index: set_rows([rows[index]]) for index in choose(rows, len(oracle.runs), name)})
    joined = bt.sweep(clean, corrupt, at=role, metric=make_metric(names), over=result.axes[:-1])
    for index in all_indices(joined):
        close(joined.outcomes[index][0], oracle.evaluate(set_rows([n for key, n in rows.items() if key[:-1] == index])))
    entry = bt.sweep(clean, corrupt, at=role, metric=make_metric(names), over=(*result.axes, "read"))
    present = {(*index, word): node for index, node in rows.items() for word in get_row(oracle, node)[0]}
    assert {tuple(at) for at in (~entry.outcomes[..., 0].isnan()).nonzero().tolist()} == set(present)
    check(entry, oracle, {at: set_rows([present[at]], [at[-1]]) for at in choose(present, len(oracle.runs), (name, 1))})


def get_row(oracle, node):
    return oracle.runs[0][1].attention(node)


def all_indices(result):
    return set(itertools.product(*map(range, result.outcomes.shape[:-1])))


# several examples, chunks, choices


def make_examples(net, count=3, seed=3, words=3):
    pick = random.Random(seed)
    vocabulary = ["cat", "dog", "sat", "ran", "the", "a"]
    texts = [[" ".join(pick.choices(vocabulary, k=words)) for _ in range(count)] for _ in "ab"]
    return [[net.sentence(text) for text in side] for side in texts]


# cells without an effect


@pytest.mark.parametrize("name", [name for name in ROLES if {(name, role) for role in ROLES[name]} - {*REFUSED}])
def test_silent_cells_are_those_whose_values_are_equal_in_both_runs(name):
    clean, corrupt = make_pair(get_case(name))
    roles = [role for role in ROLES[name] if (name, role) not in REFUSED]
    result = bt.sweep(clean, corrupt, at=roles, metric=make_metric(get_outputs(corrupt)))
    values = {cell: [s[cell].double() for s in (clean, corrupt)] for cell in result.names.values()}
    assert {*result.silent} == {cell for cell, (a, b) in values.items() if torch.allclose(a, b, rtol=1e-13, atol=0)}
    effects = [float(result[cell]) for cell in result.silent]
    assert max(map(abs, effects), default=0) < 1e-12 and not any("named" in note for note in result.notes)


@pytest.mark.parametrize("method", ["exact", bt.Gradient()], ids=str)
def test_silent_cells_of_rows_arrows_edges_and_of_names_that_are_notes(method):
    net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "cat", "dog", "sat", "ran"]).to(D)
    clean, corrupt = net.sentence("the cat sat ran"), net.sentence("the dog sat ran")
    query = {"metric": {"y_3": "sat"}, "method": method}
    rows = bt.sweep(clean, corrupt, at="j", **query)  # the words of slice 0 are equal from word 2 on
    assert {*rows.silent} == {name for name in rows.names.values() if name.endswith("_0")}
    entries = bt.sweep(clean, corrupt, at="j", over=("slice", "head", "word", "read"), **query)
    assert {name.partition("[")[0] for name in entries.silent} >= {*rows.silent}
    arrows = bt.sweep(clean, corrupt, at="v -> a", **query)
    silent = {
        name for name in arrows.names.values() if clean[name.split(" ->")[0]].equal(corrupt[name.split(" ->")[0]])
    }
    assert {*arrows.silent} == silent
    assert len(arrows.select(slice=1).silent) == len([name for name in silent if name.startswith("v_1")])
    by_word = bt.sweep(clean, corrupt, at="edges", **query)
    assert not by_word.silent  # each writer differs at some word
    equal = bt.sweep(clean.do(a_0_1=Zero()), corrupt.do(a_0_1=Zero()), at="edges", **query)
    assert {name.split(" ->")[0] for name in equal.silent} == {"a_0_1"}
    named = bt.sweep(clean, corrupt, at=["x_1_0", "x_1_2", "x_2_1", "a"], **query)
    assert [note.rpartition(": ")[2] for note in named.notes] == ["x_1_0", "x_2_1"]
    pattern = bt.sweep(clean, corrupt, at={"first": ["x_*_0"], "second": ["x_*_1"]}, **query)
    assert pattern.silent == ("first",) and len(pattern.notes) == 1
    role = bt.sweep(clean, corrupt, at="x", **query)
    assert {"x_0_0", "x_1_0", "x_2_0"} < {*role.silent} and not role.notes and "no value" in role.caption


def test_a_change_of_a_rounding_step_is_silent():
    corrupt = make_sentences(make_net(observe=bt.tpm.Categorical(3)))[1]
    for steps, silent in ((2, ("x_1_1",)), (50, ())):
        factor = 1 + steps * torch.finfo(D).eps
        moved = corrupt.do(x_1_1=corrupt["x_1_1"] * factor)
        for method in ("exact", bt.Gradient()):
            result = bt.sweep(moved, corrupt, at=["x_1_1"], metric={"y_2": 1}, method=method)
            assert result.silent == silent and any("no value" in note for note in result.notes) == bool(silent)
    identity = bt.sweep(lambda v: (v / 3) * 3, corrupt, at=["x_1_1", "x_1_2 -> q_1_0_2"], metric={"y_2": 1})
    assert identity.silent == ("x_1_1", "x_1_2 -> q_1_0_2") and len(identity.notes) == 2


EXAMPLES = {
    "concat": ({}, 3, ("x", "q", "j", "v -> a", ["x_0_1", "x_1_*"])),
    "select": ({"combine": "select"}, 3, ("x", "v -> x")),
    "select, per word": ({"combine": "select", "per": "word", "slices": 1}, 2, ("x", "v -> x")),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_several_examples_equal_separate_sweeps(name):
    options, words, sites = EXAMPLES[name]
    clean, corrupt = make_examples(make_net(observe=bt.tpm.Categorical(3), **options), 2, words=words)
    for at in sites:
        query = {"at": at, "metric": make_metric(["y_0", f"y_{words - 1}"])}
        result = bt.sweep(clean, corrupt, **query)
        assert result.outcomes.shape[-1] == len(result.corrupt) == len(result.clean) == 2, at
        for k, (one, other) in enumerate(zip(clean, corrupt, strict=True)):
            check_same(result, bt.sweep(one, other, **query), k)


def check_same(result, single, k=slice(None)):
    present = ~single.outcomes.isnan()
    assert torch.equal(~result.outcomes[..., k].reshape(present.shape).isnan(), present)
    close(result.outcomes[..., k].reshape(present.shape)[present], single.outcomes[present])
    close(result.corrupt[k].reshape(-1), single.corrupt)
    close(result.clean[k].reshape(-1), single.clean)


PATH = "v_0_0_0 -> a_0_0_1 -> mix_0_1"


@pytest.mark.parametrize("at", ["x", "W_q", "j", "v -> a", "token", ["x_1", "q_0_0_1", PATH]], ids=str)
def test_chunks_give_the_same(at):
    net = get_case("vanilla decoder, causal").net
    clean, corrupt = (
        [net.sentence(text) for text in side] for side in (("the cat", "cat sat"), ("sat cat", "the sat"))
    )
    query = {"at": at, "metric": make_metric(["y_0", "y_1"])}
    expected = bt.sweep(clean, corrupt, **query)
    for memory in (1, 2**13):
        check_same(bt.sweep(clean, corrupt, memory=memory, **query), expected)


def test_a_metric_of_states_is_that_of_a_function():
    net = get_case("vanilla decoder, causal").net
    clean, corrupt = (
        [net.sentence(text) for text in side]
        for side in (["the cat sat", "sat sat cat"], ["cat cat sat", "the sat the"])
    )
    query = {"at": "x", "over": ("slice", "word")}

    def run_sweep(make_metric):
        return bt.sweep(clean, corrupt, metric=make_metric, **query).outcomes

    y = [run_sweep({"y_2": k}) for k in range(3)]
    close(run_sweep({"y_2": "cat"}), y[net.network.vocabularies[""].index("cat")])
    close(run_sweep({"y_2": (0, 2)}), y[0] - y[2])
    close(run_sweep({"y_2": [2, 1]}), torch.stack([y[2][..., 0], y[1][..., 1]], -1))
    differences = [y[0][..., 0] - y[2][..., 0], y[1][..., 1] - y[0][..., 1]]
    close(run_sweep({"y_2": ([0, 1], [2, 0])}), torch.stack(differences, -1))
    close(run_sweep(lambda y_2: y_2[:, 0] - y_2[:, 2]), y[0] - y[2])
    close(sum(values.exp() for values in y), torch.ones_like(y[0]))


def test_open_choices_are_averaged_before_the_metric():
    """log of the mean of P(y | c), with the same c in both runs: no mean of the metrics, and no clean value of another
    c."""
    clean, corrupt = make_pair(get_case("slice"))
    result = bt.sweep(clean, corrupt, at="x", metric={"y_2": 1})
    states = list(itertools.product((0, 1), repeat=3))
    settings = [{f"c_{t}": c for t, c in enumerate(chosen)} for chosen in states]
    pi = torch.stack([corrupt.posterior(f"c_{t}") for t in range(3)]).log()
    log_weights = torch.stack([sum(pi[t, c] for t, c in enumerate(chosen)) for chosen in states])
    for t, i in ((0, 1), (2, 2), (3, 0)):
        log_probs = [corrupt.do(c).do({f"x_{t}_{i}": clean.do(c)[f"x_{t}_{i}"]}).tpm("y_2").logits[1] for c in settings]
        close(result.outcomes[t, i, 0], torch.logsumexp(log_weights + torch.stack(log_probs), 0))
    closed = bt.sweep(clean.do(settings[1]), corrupt.do(settings[1]), at="x", metric={"y_2": 1})
    assert bool((closed.outcomes != result.outcomes).any())


def test_above_the_budget_of_states_the_error_names_do():
    net = jitter(bt.bayesuvius(4, heads=4, slices=9, per="slice", observe=bt.tpm.Categorical(2))).to(D)
    with pytest.raises(bt.BudgetError, match="Set some of them by do"):
        bt.sweep(*make_sentences(net), at="x", metric={"y_2": 1})
    choices = {f"c_{t}": t % 4 for t in range(8)}
    clean, corrupt = (s.do(choices) for s in make_sentences(net))
    check(
        bt.sweep(clean, corrupt, at="x", metric=make_metric(["y_2"])),
        Oracle(clean, corrupt, ("y_2",)),
        {(8, 2): set_values([corrupt.ground.id("x_8_2")])},
    )


# ablations and sentences that are set already


def test_a_mean_over_sentences_is_that_of_their_values_one_by_one():
    """Sentences of other lengths, set or observed, of another net: compared with means computed by hand; all heads of a
    word together, and in parts where memory is short."""
    net = make_net(observe=bt.tpm.Categorical(3))
    (first, second), (corrupt, second_corrupt) = make_examples(net, 2)
    longer, other = net.sentence("a dog sat on the mat"), make_net(observe=bt.tpm.Categorical(3)).sentence("a dog ran")
    observed, patched = first.observe(y_0=1), first.do(x_1_1=second)
    for references in ([first, second], [first, longer], [patched, second], [observed, longer, other]):
        for over, memory in ((None, 2**29), (("slice", "word"), 1)):
            query = {"at": "a", "over": over, "metric": {"y_2": 1}, "memory": memory}
            result = bt.sweep(Mean(references), [corrupt, second_corrupt], **query)
            for t, i in ((0, 0), (1, 2)):
                names = [f"a_{t}_{h}_{i}" for h in range(2)]
                means = {name: sum(s[name] for s in references) / len(references) for name in names}
                for k, s in enumerate((corrupt, second_corrupt)):
                    if over is None:
                        expected = s.do({names[1]: means[names[1]]}).tpm("y_2").logits[1]
                        close(result.outcomes[t, 1, i, k], expected)
                    else:
                        close(result.outcomes[t, i, k], s.do(means).tpm("y_2").logits[1])


@pytest.mark.parametrize(
    "clean", [lambda references: Mean(references), lambda references: Mean(), lambda references: Noise(0.3)]
)
def test_an_ablation_computes_its_values_once_for_all_examples(monkeypatch, clean):
    """A mean over sentences takes one run of the net more than zeros do, for any nodes and any number of examples."""
    net, runs = make_net(observe=bt.tpm.Categorical(3)), []
    execute = CompiledModule.execute
    monkeypatch.setattr(CompiledModule, "execute", lambda self, request: runs.append(1) or execute(self, request))

    def count_runs(clean, count):
        runs.clear()
        words = ["cat", "dog", "bird", "fish", "cow", "hen", "fox", "ox"]
        bt.sweep(clean, [net.sentence(f"the {word} sat") for word in words[:count]], at="a", metric={"y_2": 1})
        return len(runs)

    references = [net.sentence(f"a {word} ran") for word in ("cat", "dog", "bird")]
    for count in (1, 8):
        assert count_runs(clean(references), count) <= count_runs(Zero(), count) + 1


def test_open_choices_are_ablated_state_by_state():
    net = make_net(combine="select", observe=bt.tpm.Categorical(3))
    corrupt = make_sentences(net)[1]
    result = bt.sweep(Zero(), corrupt, at="q", metric={"y_2": 1})
    for index, name in result.names.items():
        ablated = corrupt.do({name: Zero()})
        close(result.outcomes[index][0].exp(), ablated.posterior("y_2")[1])


def test_a_choice_that_is_set_in_only_one_run():
    """The corrupt run goes through its states, each with the same clean values; a choice set in both runs keeps its
    value."""
    net = make_net(combine="select", heads=3, observe=bt.tpm.Categorical(3))
    one, other = make_sentences(net)
    query = {"metric": make_metric(["y_0", "y_2"])}
    for clean, corrupt in ((one.do(c=0), other), (one.do(c=0), other.do(c=2))):
        oracle = Oracle(clean, corrupt, ("y_0", "y_2"))
        for role in ("x", "q"):
            result, expected = bt.sweep(clean, corrupt, at=role, **query), get_cells(corrupt, role)
            check(result, oracle, {index: set_values(expected[index]) for index in choose(expected, 1, role)})
            close(result.corrupt, [oracle.evaluate()])
            close(result.clean, [oracle.evaluate(base=0)])
    with pytest.raises(bt.EvidenceError, match=r"c is set in the corrupt sentences only.*do\(c=...\)"):
        bt.sweep(one, other.do(c=1), at="x", metric={"y_2": 1})
    result = bt.sweep(clean, corrupt, at=["c", "x_0"], **query)
    close(result.outcomes[0], [Oracle(clean, corrupt.do(c=0), ("y_0", "y_2")).evaluate()])
    close(bt.sweep(clean, corrupt, at="c", **query).outcomes.flatten(), result.outcomes[0])


def test_entries_of_rows_with_other_nodes_set():
    clean, corrupt = make_sentences(make_net(observe=bt.tpm.Categorical(3)))
    row = Attend([0.2, 0.5, 0.3])
    clean, corrupt = clean.do({"a_1_0_1": row}), corrupt.do({"a_0_1_2": row, "x_1_1": Zero()})
    oracle, expected = Oracle(clean, corrupt, ("y_0", "y_2")), get_cells(corrupt, "a")
    query = {"at": "j", "over": ("slice", "head", "word", "read"), "metric": make_metric(["y_0", "y_2"])}
    result = bt.sweep(clean, corrupt, **query)
    check(result, oracle, {(*at, 1): set_rows([expected[at][0]], [1]) for at in choose(expected, 1, "read")})


# cells that lead nowhere, and identities


def test_a_later_word_of_a_causal_net_moves_nothing():
    clean, corrupt = make_sentences(make_net(mask="causal"), clean="a dog ran")
    for at in ("x", "q", "k", "v", "a", "j", "v -> a", "x -> q"):
        result = bt.sweep(clean, corrupt, at=at, metric=make_metric(["x_2_1"]))
        later = result.outcomes.movedim(result.axes.index("word"), 0)[2]
        later = later[~later.isnan()]
        assert bool((later == result.corrupt).all())
        assert bool((result.outcomes[~result.outcomes.isnan()] != result.corrupt).any())
    last = bt.sweep(clean, corrupt, at="q", metric=make_metric(["x_1_2"]))
    assert bool((last.outcomes[1] == last.corrupt).all())


def test_no_difference_has_no_effect():
    """Cells whose values are the same in both runs."""
    clean, corrupt = make_sentences(make_net(observe=bt.tpm.Categorical(3)))
    for at in ("W_v", "W_q -> q"):
        result = bt.sweep(clean, corrupt, at=at, metric=make_metric(["y_0", "y_2"]))
        present = ~result.outcomes.isnan()
        close(result.outcomes[present], result.corrupt.expand(result.outcomes.shape)[present])


@pytest.mark.parametrize("states", [2, 5])  # 5 cells over 2 words: as many rows as states
def test_a_readout_of_which_do_set_a_word(states):
    net = bt.bayesuvius(4, heads=2, slices=2, observe=bt.tpm.Categorical(states)).to(torch.float64)
    clean, corrupt = (net.sentence(words).do(c=0, y_0=1) for words in ("the cat", "a dog"))
    result = bt.sweep(clean, corrupt, at="x", metric={"y_1": (0, 1)}, progress=False)

    def outcome(s):
        logits = s.tpm("y_1").logits
        return float(logits[0] - logits[1])

    for name, effect in result.top(4):
        assert effect == pytest.approx(outcome(corrupt.do({name: clean})) - outcome(corrupt), abs=1e-9)
