"""Arrows and paths equal their definition by two forward runs, mediation its definition by two sweeps; and errors."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.interventions import Zero
from bnet_transformer.tpm import Add, Affine, Categorical, Given, Linear, Pool
from tests.cases import WORD, every, get_case, jitter
from tests.sweep_oracle import (
    D,
    Oracle,
    by_index,
    get_arrows,
    get_outputs,
    make_metric,
    make_pair,
    patch_path,
    set_values,
)
from tests.test_sweeps import all_indices, check, choose, close, make_examples, make_net, make_sentences

ARROWS = {
    "concat": ("v -> a", "k -> a", "q -> a", "x -> q", "x -> x", "a -> x", "W_q -> q"),
    "chapter, two slices": ("v -> x", "q -> x", "x -> v"),
    "chapter, real": ("x -> x",),
    "codebook": ("x -> q", "v -> x"),
    "encoder, post-norm": ("embed -> x", "x -> add1", "a -> mix", "token -> embed"),
    "encoder-decoder": ("dec_x -> dec_a", "enc_x -> dec_cross_k", "dec_cross_v -> dec_cross_a", "dec_a -> dec_past"),
    "three stacks": ("enc_x -> dec_left", "enc_q -> enc_x"),
    "vanilla encoder-decoder, pre-norm": ("dec_cross_k -> dec_cross_a",),
    "recurrent": ("x -> h", "h -> x"),
    "geometric": ("x -> a",),
    "integrator": ("k -> a",),
    "cayley": ("x -> a", "a -> lower1"),
    "gated": ("v -> a", "g -> x", "a -> x"),
    "positioned": ("x -> pool", "pool -> first", "x -> x", "s -> both"),
    "shared slices": ("x -> a", "W_q -> q"),
    "vanilla decoder, causal": ("v -> a",),
}


def find_cells(result):
    """The indices of a sweep at which there is a cell."""
    return {tuple(at) for at in (~result.outcomes[..., 0].isnan()).nonzero().tolist()}


PAIRS = [(name, arrow) for name, group in ARROWS.items() for arrow in group]


@pytest.mark.parametrize(
    ("name", "arrow"), [pytest.param(*pair, marks=[pytest.mark.slow] * (k % 3 > 0)) for k, pair in enumerate(PAIRS)]
)
def test_an_arrow_is_two_forward_runs(name, arrow):
    """Run 1: the child with the clean value of that one parent; run 2: the corrupt run with the child set to it."""
    clean, corrupt = make_pair(get_case(name))
    names = get_outputs(corrupt)
    oracle = Oracle(clean, corrupt, tuple(names))
    result = bt.sweep(clean, corrupt, at=arrow, metric=make_metric(names))
    expected = by_index(result, get_arrows(corrupt, *arrow.split(" -> ")))
    assert result.at == arrow and find_cells(result) == set(expected)
    for index, (parent, child) in expected.items():
        assert result.names[index] == f"{corrupt.ground.name(parent)} -> {corrupt.ground.name(child)}"
    picked = choose(expected, len(oracle.runs), (name, arrow))
    check(result, oracle, {index: patch_path(*expected[index]) for index in picked})
    if arrow != ARROWS[name][0]:
        return
    f32 = bt.sweep(*make_pair(get_case(name), torch.float32), at=arrow, metric=make_metric(names))
    torch.testing.assert_close(f32.outcomes, result.outcomes, rtol=1e-5, atol=1e-5, equal_nan=True, check_dtype=False)


def test_arrows_set_together_are_set_together():
    """`over` joins arrows: a single child gets all its clean parents at once, several children get each of theirs."""
    clean, corrupt = make_sentences(make_net())
    names = get_outputs(corrupt)
    oracle = Oracle(clean, corrupt, tuple(names))
    every_arrow = get_arrows(corrupt, "v", "a")
    for over in (("slice", "head"), ("slice", "head", "word"), ("slice", "word", "read"), ("read",)):
        result = bt.sweep(clean, corrupt, at="v -> a", metric=make_metric(names), over=over)
        axes = ("slice", "head", "word", "read")
        groups = {}
        for index, arrow in every_arrow.items():
            groups.setdefault(tuple(index[axes.index(axis)] for axis in over), []).append(arrow)
        assert result.axes == over and set(groups) == all_indices(result)

        def patch(group):
            def compute_children(clean, corrupt):
                values = {}
                for child in {child for _, child in group}:
                    corrupt.value(child)
                    run = bt.reference.ReferenceRun(corrupt.model, corrupt.states)
                    run.values = {**corrupt.values, **{p: clean.value(p) for p, c in group if c == child}}
                    values[child] = run._compute_value(child)
                return values

            return compute_children

        check(result, oracle, {index: patch(group) for index, group in groups.items()})


PATHS = {
    "concat": ("v -> a -> x", "x -> v -> a -> x"),
    "chapter, two slices": ("x -> v -> x -> q",),
    "encoder-decoder": ("enc_x -> dec_cross_v -> dec_cross_a",),
    "encoder, pre-norm": ("x -> norm1 -> q",),
}


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in PATHS.items() for path in paths])
def test_a_path_propagates_only_the_clean_value(name, path):
    clean, corrupt = make_pair(get_case(name))
    names, ground = get_outputs(corrupt), corrupt.ground
    oracle, (first, *remainder) = Oracle(clean, corrupt, tuple(names)), path.split(" -> ")
    routes = [(node,) for group in ground.template.by_stem[first] for node in ground.select_nodes(group).tolist()]
    for role in remainder:
        routes = [
            (*route, n) for route in routes for n in ground.children(route[-1]) if ground.group_of(n).stem == role
        ]
    result = bt.sweep(clean, corrupt, at=path, metric=make_metric(names))
    by_name = {" -> ".join(map(ground.name, route)): route for route in routes}
    assert result.axes == ("path",) and sorted(result.names.values()) == sorted(by_name) and len(by_name) == len(routes)
    chosen = choose([index for (index,) in result.names], len(oracle.runs), path)
    check(result, oracle, {(k,): patch_path(*by_name[result.names[k,]]) for k in chosen})


def test_patterns_and_paths_by_name():
    clean, corrupt = make_sentences(make_net(observe=Categorical(3)))
    oracle, ground = Oracle(clean, corrupt, ("y_2",)), corrupt.ground

    def set_child_of_all(child, parents):
        def patch(clean, corrupt):
            corrupt.value(ground.id(child))
            run = bt.reference.ReferenceRun(corrupt.model, corrupt.states)
            run.values = {**corrupt.values, **{ground.id(name): clean.value(ground.id(name)) for name in parents}}
            return {ground.id(child): run._compute_value(ground.id(child))}

        return patch

    at = ["x_0_1 -> v_0_0_1 -> a_0_0_2", "q_0_*_2", "x_1", "v_1_1_0 -> a_1_1_2", "a_0_1_0", "v_0_0_* -> a_0_0_2"]
    result = bt.sweep(clean, corrupt, at=at, metric=make_metric(["y_2"]))
    assert result.axes == ("cell",) and result.labels["cell"] == tuple(at) and list(result.names.values()) == at
    ids = lambda *names: [ground.id(name) for name in names]  # noqa: E731
    patches = [
        patch_path(*ids("x_0_1", "v_0_0_1", "a_0_0_2")),
        set_values(ids("q_0_0_2", "q_0_1_2")),
        set_values(ids("x_1_0", "x_1_1", "x_1_2")),
        patch_path(*ids("v_1_1_0", "a_1_1_2")),
        set_values(ids("a_0_1_0")),
        set_child_of_all("a_0_0_2", [f"v_0_0_{i}" for i in range(3)]),
    ]
    check(result, oracle, {(k,): patch for k, patch in enumerate(patches)})


BLOCKED = {"vanilla decoder, causal": "v -> a", "positioned": "v -> s", "encoder-decoder": "dec_cross_v -> dec_cross_a"}


@pytest.mark.parametrize(("name", "arrow"), BLOCKED.items())
def test_paths_leave_the_rest_as_it_was_set(name, arrow):
    """Interventions of the corrupt sentence hold along the path."""
    clean, corrupt = make_pair(get_case(name))
    names = get_outputs(corrupt)
    expected = get_arrows(corrupt, *arrow.split(" -> "))
    index = sorted(expected)[-1]
    other = next(key for key in sorted(expected) if expected[key][1] != expected[index][1])
    patched = corrupt.do({corrupt.ground.name(expected[other][1]): Zero()})
    oracle = Oracle(clean, patched, tuple(names))
    result = bt.sweep(clean, patched, at=arrow, metric=make_metric(names))
    removed = {key for key, (_, child) in expected.items() if child == expected[other][1]}
    assert find_cells(result) == set(expected) - removed
    check(result, oracle, {index: patch_path(*expected[index])})


# mediation


def make_linear_net():
    """Return two linear slices: each word adds the sum of earlier words."""
    nodes = [
        bt.Node("v", Linear(4), ["x"], plates=WORD),
        bt.Node("a", Pool("sum"), [bt.Arrow("v", "earlier")], plates=WORD),
        bt.Node("m", Affine(4), ["a"], plates=WORD),
        bt.Node("x", Add(), ["x", "m", "v"], plates=WORD),
    ]
    stack = bt.Stack(
        nodes, [bt.Node("x", Given(4), plates=WORD)], [bt.Node("pool", Pool("mean"), [every("x")])], slices=2
    )
    return jitter(bt.BNet(bt.Declaration([stack], name="linear"))).to(D)


def test_direct_and_indirect_sum_to_the_total_in_a_linear_net():
    clean, corrupt = make_examples(make_linear_net())
    weights = torch.tensor([0.5, -1.0, 0.25, 2.0], dtype=D)
    for through in ("x", "m", "v -> a", "x -> v -> a", ["x_0_1", "v_1"]):
        result = bt.mediation(clean, corrupt, through=through, metric=lambda pool, x_1_2: pool @ weights + x_1_2[:, 0])
        is_cell = ~result.indirect_outcomes.isnan()
        total = (result.clean - result.corrupt).expand(is_cell.shape)
        direct, indirect = result.direct_outcomes - result.corrupt, result.indirect_outcomes - result.corrupt
        close((direct + indirect)[is_cell], total[is_cell])
        close(result.interaction[is_cell[..., 0]], torch.zeros(int(is_cell[..., 0].sum()), dtype=D))
        assert float(indirect[is_cell].abs().max()) > 0.1 and float(direct[is_cell].abs().max()) > 0.1, through


def test_mediation_is_two_sweeps():
    """Indirect: the corrupt run with the clean mediator; direct: the clean run with the corrupt one."""
    for options, through in (({}, "x"), ({}, "j"), ({"combine": "select"}, "v -> x"), ({}, ["x_1_*", "x_0_2"])):
        clean, corrupt = make_examples(make_net(observe=Categorical(3), **options), 2)
        query = {"metric": make_metric(["y_0", "y_2"])}
        result = bt.mediation(clean, corrupt, through=through, **query)
        one, other = bt.sweep(clean, corrupt, at=through, **query), bt.sweep(corrupt, clean, at=through, **query)
        for actual, peer in ((result.indirect_outcomes, one.outcomes), (result.direct_outcomes, other.outcomes)):
            torch.testing.assert_close(actual, peer, equal_nan=True)
        assert result.clean.equal(one.clean) and result.corrupt.equal(one.corrupt)
        assert (result.axes, dict(result.names), dict(result.labels)) == (one.axes, dict(one.names), dict(one.labels))
        assert float(torch.as_tensor(result.interaction).nan_to_num().abs().max()) > 1e-3


def test_a_mediation_that_no_cell_changes_has_a_note():
    """By the mask of a causal net, word 0 depends on no word after it, and word 2 on all of them."""
    net = bt.decoder(dim=8, heads=2, slices=2, vocabulary=["the", "cat", "dog", "sat"])
    clean, corrupt = net.sentence("the cat sat"), net.sentence("the dog sat")
    for node, is_constant in (("y_0", True), ("y_2", False)):
        result = bt.mediation(clean, corrupt, through="x", metric={node: "cat"})
        for text in (" ".join(result.notes), repr(result), result._repr_html_(), repr(result.of("indirect"))):
            assert ("no cell changes" in text) == is_constant
        assert bool((result.indirect == 0).all()) == is_constant


def test_a_mediator_on_every_path_has_no_direct_effect():
    corrupt = make_sentences(make_net(residual=False))[1]
    clean = corrupt.do({"x_0_1": torch.ones(4, dtype=D)})
    result = bt.mediation(clean, corrupt, through="x", metric=make_metric(["x_2_2"]), over=("slice",))
    close(result.indirect_outcomes[1], result.clean)
    close(result.direct_outcomes[1], result.corrupt)
    per_word = bt.mediation(clean, corrupt, through="x", metric=make_metric(["x_2_2"]))
    close(per_word.direct_outcomes[0, 0], per_word.clean)
    close(per_word.indirect_outcomes[0, 0], per_word.corrupt)


# invalid queries
