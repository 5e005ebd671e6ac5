"""Node names: formatting and parsing are inverse, bad roles raise errors, reaches match their definitions."""

import keyword
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import bnet_transformer as bt
from bnet_transformer._core.naming import (
    KINDS_WITH_WIDTH,
    REACH_KINDS,
    Reach,
    as_reach,
    find_role_fault,
    join_name,
    join_stem,
    split_name,
    split_pattern,
)
from bnet_transformer.errors import BNetError
from bnet_transformer.graph import find_family
from bnet_transformer.interventions import Zero
from bnet_transformer.page.widget import check_selected
from tests.cases import CASES, close, get_case

roles = st.tuples(st.sampled_from("abzQ"), st.text("abzQ019_", max_size=8)).map("".join)
roles = roles.filter(lambda role: find_role_fault(role) is None)


@settings(max_examples=30)
@given(stack=st.just("") | roles, role=roles, indices=st.lists(st.integers(0, 10**6), max_size=4))
def test_names_parse_back(stack, role, indices):
    stem = join_stem(stack, role)
    assert split_name(join_name(stem, indices)) == (stem, tuple(indices))
    name = join_name(stem, indices)
    assert name.isidentifier() and not keyword.iskeyword(name)


@pytest.mark.parametrize("name", ["x_01_2", "x_1_", "x__1", "x_1.5", "x_١"])
def test_near_names_do_not_parse_as_ground_names(name):
    assert split_name(name)[0] != "x"


@pytest.mark.parametrize("role", ["x_1", "1x", "", "x-y", "lambda", "match", "enc", "x_", "é", 3, "a b"])
def test_bad_roles_are_refused(role):
    assert find_role_fault(role, stacks=["enc"]) is not None


@pytest.mark.parametrize("kind", [kind for kind in REACH_KINDS if kind not in (*KINDS_WITH_WIDTH, "mask")])
def test_reach_matrices_against_their_definition(kind):
    rule = {
        "same": lambda i, j: i == j,
        "every": lambda i, j: True,
        "causal": lambda i, j: j <= i,
        "earlier": lambda i, j: j < i,
        "before": lambda i, j: j == i - 1,
        "after": lambda i, j: j == i + 1,
        "rest": lambda i, j: i == j and i > 0,
        "first": lambda i, j: j == 0,
        "last": lambda i, j: j == 3,
    }[kind]
    reach = Reach(kind)
    matrix = reach.matrix(4, 4)
    assert matrix.tolist() == [[rule(i, j) for j in range(4)] for i in range(4)]
    assert reach.is_single == bool((matrix.sum(1) <= 1).all())
    if kind != "first":
        assert reach.is_causal == bool(~np.triu(matrix, 1).any())
    assert reach.is_strictly_causal == bool(~np.triu(matrix).any())


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
def test_empty_reads_agree_with_the_table(children, parents, width):
    is_square = children == parents
    plain = [
        kind
        for kind in REACH_KINDS
        if kind not in (*KINDS_WITH_WIDTH, "mask") and (is_square or kind not in ("same", "rest"))
    ]
    kinds = [*map(Reach, plain), *(Reach(kind, width) for kind in KINDS_WITH_WIDTH)]
    for reach in [*kinds, as_reach(np.tri(children, parents, width - 2, dtype=bool))]:
        empty = np.flatnonzero(~reach.matrix(children, parents).any(1))
        assert reach.first_empty_row(children, parents) == (int(empty[0]) if len(empty) else None), reach


@given(st.integers(0, 5), st.integers(1, 6))
def test_window(width, n):
    matrix = Reach("window", width).matrix(n, n)
    assert matrix.tolist() == [[abs(i - j) <= width for j in range(n)] for i in range(n)]
    recent = Reach("recent", width)
    assert recent.matrix(n, n).tolist() == [[0 <= i - j <= width for j in range(n)] for i in range(n)]
    assert (
        recent.is_causal
        and not recent.is_strictly_causal
        and not recent.is_single
        and str(recent) == f"recent({width})"
    )


def test_a_mask_is_its_table():
    table = np.array([[True, False], [True, True]])
    reach = as_reach(table)
    assert (reach.matrix(2, 2) == table).all() and reach.is_causal and not reach.is_strictly_causal
    with pytest.raises(BNetError, match="2 words that read 2"):
        reach.matrix(3, 3)


BAD = ["nonsense", "window", "recent", [[1, 0], [0, 1]], [True, False], 3.5, object(), [[True], []]]


@pytest.mark.parametrize("value", BAD)
def test_bad_reaches_are_refused(value):
    with pytest.raises(BNetError):
        as_reach(value)


@settings(max_examples=50)
@given(st.data())
def test_counting_arrows_makes_no_table_of_them(data):
    kind = data.draw(st.sampled_from([kind for kind in REACH_KINDS if kind != "mask"]))
    children, parents = (data.draw(st.integers(1, 7)) for _ in range(2))
    parents = children if kind in ("same", "rest") else parents
    reach = Reach(kind, data.draw(st.integers(0, 4)) if kind in KINDS_WITH_WIDTH else 0)
    i, j = (np.array(sorted(data.draw(st.sets(st.integers(0, n - 1))))) for n in (children, parents))
    i, j = i.astype(np.int64), j.astype(np.int64)
    assert reach.count_arrows(i, j, children, parents) == reach.matrix(children, parents)[np.ix_(i, j)].sum()


# names of several nodes


def match_by_text(s, stem, tokens):
    """The names of the nodes of a stem whose indices, as text, begin with the tokens: an oracle without a parser."""
    names = set()
    for group in s.ground.template.groups:
        words = s.ground.word_counts[group.word_stack] if group.word_stack is not None else 0
        for name in s.ground.iter_names(group) if group.stem == stem else ():
            indices = name[len(stem) :].split("_")[1:]
            from_end = str(int(indices[-1]) - words) if words else ""
            accepted = [{"*", index} for index in indices[:-1]] + [{"*", index, from_end} for index in indices[-1:]]
            if len(tokens) <= len(indices) and all(token in ok for token, ok in zip(tokens, accepted, strict=False)):
                names.add(name)
    return names


@st.composite
def patterns(draw):
    """A sentence, and the stem and the indices of a pattern that matches at least one of its nodes."""
    s = draw(st.sampled_from(CASES)).sentence
    group, index = s.ground.unravel_index(draw(st.integers(0, len(s.ground) - 1)))
    tokens = [str(i) for i in (*(() if group.slice is None else (group.slice,)), *index)]
    if group.word_stack is not None and draw(st.booleans()):
        tokens[-1] = str(index[-1] - s.ground.word_counts[group.word_stack])
    tokens = [draw(st.sampled_from([token, "*"])) for token in tokens]
    return s, group.stem, tokens[: draw(st.integers(0, len(tokens)))]


@settings(max_examples=40, deadline=None)
@given(patterns())
def test_a_pattern_is_the_list_of_its_nodes(case_and_pattern):
    s, stem, tokens = case_and_pattern
    names = [s.ground.name(node) for node in find_family(s.ground, "_".join([stem, *tokens])).nodes]
    assert len(names) == len(set(names)) and set(names) == match_by_text(s, stem, tokens)


@pytest.mark.parametrize("name", ["concat", "grouped", "encoder, pre-norm"])
@pytest.mark.parametrize("pattern", ["a_0_*", "a_*_*", "v_0", "x_*", "q_*_1", "v_0_*_-1"])
def test_a_pattern_names_the_same_nodes_in_every_function(name, pattern):
    """All heads of a slice, also those in groups, in do, sweeps, circuits and highlights."""
    case = get_case(name)
    s, other = case.sentence, case.net.sentence(" ".join([str(case.text).split()[0]] * 3))
    stem, *tokens = pattern.split("_")
    names, metric = match_by_text(s, stem, tokens), {"y": 1}
    if not names:  # the net has no slice of this index
        pytest.skip(f"{name} has no {pattern}")
    assert {s.ground.name(node) for node in s.do({pattern: Zero()}).state.interventions} == names
    sweep = bt.sweep(Zero(), s, at={"pattern": [pattern], "list": sorted(names)}, metric=metric, progress=False)
    close(sweep.outcomes[0], sweep.outcomes[1])
    sources = {
        edges: {edge.split(" -> ")[0] for edge in bt.circuit(s, other, metric=metric, edges=edges).retained}
        for edges in ("* -> *", f"{pattern} -> *")
    }
    assert sources[f"{pattern} -> *"] == sources["* -> *"] & names != set()
    draw = lambda marked: s.picture(detail="nodes", attention=False, highlight=marked).boxes  # noqa: E731
    assert draw(pattern) == draw(sorted(names)) != draw(None)


@pytest.mark.parametrize("name", ["grouped", "encoder, pre-norm"])
@pytest.mark.parametrize(
    ("pattern", "start", "end"), [("a_0_* -> y", "a_0_", "y"), ("a_0 -> *", "a_0_", ""), ("* -> y", "", "y")]
)
def test_a_pattern_of_edges_is_the_same_in_sweeps_and_circuits(name, pattern, start, end):
    case = get_case(name)
    s, other = case.sentence, case.net.sentence("the the the")
    options = {"metric": {"y": 1}}
    every = bt.sweep(s, other, at="edges", **options).names.values()
    expected = {edge for edge in every if edge.startswith(start) and edge.endswith(f"-> {end}" if end else "")}
    assert set(bt.sweep(s, other, at=[pattern], **options).names.values()) == expected != set()
    assert set(bt.circuit(s, other, at="edges", edges=[pattern], **options).retained) == expected


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_a_negative_word_counts_from_the_end(data):
    s = data.draw(st.sampled_from([get_case(name) for name in ("concat", "grouped", "encoder-decoder")])).sentence
    groups = [group for group in s.ground.template.groups if group.word_stack is not None]
    group = data.draw(st.sampled_from(groups))
    name = data.draw(st.sampled_from([*s.ground.iter_names(group)]))
    stem, _, word = name.rpartition("_")
    from_end = f"{stem}_{int(word) - s.ground.word_counts[group.word_stack]}"
    assert s.ground.id(from_end) == s.ground.id(name) and check_selected(s.ground, from_end) == name
    assert s.parents(from_end) == s.parents(name) and s.blanket(from_end) == s.blanket(name)
    with pytest.raises(bt.UnknownNameError):
        s.parents(f"{stem}_{-1 - s.ground.word_counts[group.word_stack]}")
    draw = lambda name: s.picture(detail="nodes", attention=False, highlight=name, only=name).boxes  # noqa: E731
    assert draw(from_end) == draw(name)
    assert s.shrink({from_end: "here"}).boxes == s.shrink({name: "here"}).boxes
    if group.role == "y":
        state = {from_end: 1}, {name: 1}
        assert s.log_prob(state[0]) == s.log_prob(state[1])
        assert torch.equal(s.posterior(from_end), s.posterior(name))
    elif group.role != "token":
        assert torch.equal(s[from_end], s[name])
        assert s.do({from_end: 0}).state.interventions.keys() == s.do({name: 0}).state.interventions.keys()


def test_a_negative_word_in_metrics_of_circuits_and_in_generation():
    s = get_case("concat").sentence
    other = s.net.sentence("the the the")
    edges = bt.circuit(s, other, metric={"y_2": 1}, edges="* -> *").retained
    scores = {edge: float(len(edges) - k) for k, edge in enumerate(edges)}
    options = {"scores": scores, "baselines": ()}
    curves = [bt.faithfulness_curves(s, other, metric={y: 1}, readout=y, **options) for y in ("y_2", "y_-1")]
    assert curves[0].to_dataframe().equals(curves[1].to_dataframe())
    net = bt.decoder(8, heads=2, slices=1, vocabulary=["the", "cat"])
    with pytest.raises(bt.EvidenceError, match="counted from the start"):
        net.generate(["the cat"], length=2, do={"x_1_-1": 0})


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_graph_queries_of_several_nodes_are_those_of_their_list(data):
    s = get_case(data.draw(st.sampled_from(["concat", "grouped", "encoder-decoder"]))).sentence
    groups = [group.name for group in s.ground.template.groups]
    first, second = data.draw(st.permutations(groups))[:2]
    lists = [sorted(match_by_text(s, *split_group(s, name))) for name in (first, second)]
    assert s.ancestors(first) == s.ancestors(*lists[0]) and s.descendants(first) == s.descendants(*lists[0])
    given_nodes = [name for name in data.draw(st.lists(st.sampled_from(groups))) if name not in (first, second)]
    expected = s.separated(*lists, [node for name in given_nodes for node in match_by_text(s, *split_group(s, name))])
    assert s.separated(first, second, given_nodes) == expected
    role = "x" if "x" in s.ground.template.by_stem else "dec_x"
    route = s.explain("value", role)
    assert (route.algorithm, route.question) == ("compiled", f"value of {role}")


def split_group(s, name):
    """The stem of a node group, and its slice as a list of tokens."""
    group = s.ground.template.by_name[name]
    return group.stem, [] if group.slice is None else [str(group.slice)]


@given(st.text("a1_0x-*", max_size=12))
def test_the_indices_of_a_name_are_those_of_a_regular_expression(name):
    match = re.fullmatch(r"(.*?)((?:_(?:\*|0|-?[1-9]\d{0,17}))*)", name)
    assert split_pattern(name) == (match[1], tuple(None if i == "*" else int(i) for i in match[2].split("_")[1:]))


@settings(max_examples=25, deadline=None)
@given(patterns())
def test_a_query_of_one_node_accepts_only_the_name_of_one_node(case_and_pattern):
    """In a net a slice is the only index, so that a star for it leaves no other index open."""
    s, stem, tokens = case_and_pattern
    pattern, names = "_".join([stem, *tokens]), sorted(match_by_text(s, stem, tokens))
    is_name = "*" not in tokens and names[0].count("_") == pattern.count("_")
    for query in (s.parents, s.children, s.blanket):
        if is_name:
            assert query(pattern) == query(names[0])
        else:
            with pytest.raises(bt.UnknownNameError, match="one node"):
                query(pattern)
    assert (pattern in s.nodes) == is_name
    slices = [group.name for group in s.ground.template.by_stem[stem] if group.slice is not None]
    for query in (s.net.parents, s.net.children, s.net.blanket):
        for name in (f"{stem}_*", stem) if slices else ():
            with pytest.raises(bt.UnknownNameError, match=slices[0]):
                query(name)


@pytest.mark.parametrize("pattern", ["c_0_*", "c", "y_*", "y"])
def test_posteriors_of_a_pattern_of_all_nodes_are_those_of_each_node(pattern):
    s = get_case("word").sentence.observe({"y_1": 1})
    stem, *tokens = pattern.split("_")
    names = sorted(match_by_text(s, stem, tokens))
    result = s.posteriors(pattern)
    close(result.probabilities, torch.stack([s.posterior(name) for name in names]))
    assert result.name == names[0].rpartition("_")[0]
    assert s.explain("posteriors", pattern).algorithm == s.explain("posteriors", result.name).algorithm


def test_results_know_a_node_by_each_of_its_names():
    s = get_case("word").sentence
    last = len(s.words) - 1
    for samples in (s.sample(7), s.do({f"y_{last - 1}": 1}).sample(7)):
        assert torch.equal(samples["y_-1"], samples.states[f"y_{last}"])
        assert torch.equal(samples["c_0_-2"], samples.states[f"c_0_{last - 1}"])
        for name in ("y", "y_*", "y_-9", f"y_{last + 1}", "z", "*", None):
            with pytest.raises(bt.UnknownNameError):
                samples[name]
    with pytest.raises(bt.UnknownNameError):  # the last word is set, so that it has no samples
        s.do({"y_-1": 1}).sample(2)["y_-1"]
    assert bt.plot(s.sample(7), node="y_-1") is not None
    ranked = s.most_probable(nodes=["y_-1", "c_0_0"])
    assert torch.equal(ranked["y_-1"], ranked[f"y_{last}"]) and ranked.labels("y_-1") == ranked.labels(f"y_{last}")
    for name in ("y_*", "y"):
        assert torch.equal(ranked[name][:, -1], ranked["y_-1"]) and ranked[name].shape == (1, last + 1)
    for name in ("*", "z", "y_-9", None):
        with pytest.raises(bt.UnknownNameError):
            ranked[name]


@pytest.mark.parametrize("name", ["x_1_-1", "v_0_*_-1", "v_0_1_-1 -> a_0_1_-1"])
def test_a_cell_of_a_sweep_has_one_name(name):
    s = get_case("concat").sentence
    other, last = s.net.sentence("the the the"), len(s.words) - 1
    start = name.replace("-1", str(last))
    sweep = bt.sweep(other, s, at=[name, start, f"x_1_{last - 1}"], metric={"y": 1}, progress=False)
    assert list(sweep.names.values()) == [start, f"x_1_{last - 1}"] and sweep[name] == sweep[start]
    with pytest.raises(bt.UnknownNameError):
        sweep["x_1_-2"]
    every = bt.sweep(other, s, at="x", metric={"y": 1}, progress=False)
    assert every["x_1_-1"] == every[f"x_1_{last}"] != every["x_1_0"]
