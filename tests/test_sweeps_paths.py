"""Arrows and paths equal their definition by two forward runs, mediation its own by two sweeps; what is refused."""

import re

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.interventions import Attend, Mean, Noise, Zero
from bnet_transformer.tpm import Add, Affine, Categorical, Given, Linear, Pool
from tests.cases import WORD, every, get_case, jitter
from tests.sweep_oracle import (
    D,
    Oracle,
    by_index,
    get_arrows,
    get_cells,
    get_outputs,
    get_refusal,
    make_metric,
    make_pair,
    patch_path,
    set_values,
)
from tests.test_sweeps import all_indices, check, close, doubled, several, some, two

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


def known(result):
    """The indices of a sweep at which there is a cell."""
    return {tuple(at) for at in (~result.outcomes[..., 0].isnan()).nonzero().tolist()}


PAIRS = [(name, arrow) for name, some in ARROWS.items() for arrow in some]


@pytest.mark.parametrize(
    ("name", "arrow"), [pytest.param(*item, marks=[pytest.mark.slow] * (k % 3 > 0)) for k, item in enumerate(PAIRS)]
)
def test_an_arrow_is_two_forward_runs(name, arrow):
    """Run 1: the child with the clean value of that one parent; run 2: the corrupt run with the child set to it."""
    clean, corrupt = make_pair(get_case(name))
    names = get_outputs(corrupt)
    slow = Oracle(clean, corrupt, tuple(names))
    result = bt.sweep(clean, corrupt, at=arrow, metric=make_metric(names))
    expected = by_index(result, get_arrows(corrupt, *arrow.split(" -> ")))
    assert result.at == arrow and known(result) == set(expected)
    for index, (parent, child) in expected.items():
        assert result.names[index] == f"{corrupt.ground.name(parent)} -> {corrupt.ground.name(child)}"
    picked = some(expected, len(slow.runs), (name, arrow))
    check(result, slow, {index: patch_path(*expected[index]) for index in picked})
    if arrow != ARROWS[name][0]:
        return
    rough = bt.sweep(*make_pair(get_case(name), torch.float32), at=arrow, metric=make_metric(names))
    torch.testing.assert_close(rough.outcomes, result.outcomes, rtol=1e-5, atol=1e-5, equal_nan=True, check_dtype=False)


def test_arrows_set_together_are_set_together():
    """`over` joins arrows: into one child all its clean parents at once, into several each of them its own."""
    clean, corrupt = two(doubled())
    names = get_outputs(corrupt)
    slow = Oracle(clean, corrupt, tuple(names))
    every_arrow = get_arrows(corrupt, "v", "a")
    for over in (("slice", "head"), ("slice", "head", "word"), ("slice", "word", "read"), ("read",)):
        result = bt.sweep(clean, corrupt, at="v -> a", metric=make_metric(names), over=over)
        axes = ("slice", "head", "word", "read")
        groups = {}
        for index, arrow in every_arrow.items():
            groups.setdefault(tuple(index[axes.index(axis)] for axis in over), []).append(arrow)
        assert result.axes == over and set(groups) == all_indices(result)

        def patch(group):
            def done(clean, corrupt):
                created = {}
                for child in {child for _, child in group}:
                    corrupt.value(child)
                    single = bt.reference.ReferenceRun(corrupt.model, corrupt.states)
                    single.values = {**corrupt.values, **{p: clean.value(p) for p, c in group if c == child}}
                    created[child] = single._compute_value(child)
                return created

            return done

        check(result, slow, {index: patch(group) for index, group in groups.items()})


PATHS = {
    "concat": ("v -> a -> x", "x -> v -> a -> x"),
    "chapter, two slices": ("x -> v -> x -> q",),
    "encoder-decoder": ("enc_x -> dec_cross_v -> dec_cross_a",),
    "encoder, pre-norm": ("x -> norm1 -> q",),
}


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, some in PATHS.items() for path in some])
def test_a_path_carries_the_clean_value_alone(name, path):
    clean, corrupt = make_pair(get_case(name))
    names, ground = get_outputs(corrupt), corrupt.ground
    slow, (first, *remainder) = Oracle(clean, corrupt, tuple(names)), path.split(" -> ")
    routes = [(node,) for family in ground.template.by_stem[first] for node in ground.select_nodes(family).tolist()]
    for role in remainder:
        routes = [
            (*route, n) for route in routes for n in ground.children(route[-1]) if ground.group_of(n).stem == role
        ]
    result = bt.sweep(clean, corrupt, at=path, metric=make_metric(names))
    given = {" -> ".join(map(ground.name, route)): route for route in routes}
    assert result.axes == ("path",) and sorted(result.names.values()) == sorted(given) and len(given) == len(routes)
    picked = some([index for (index,) in result.names], len(slow.runs), path)
    check(result, slow, {(k,): patch_path(*given[result.names[k,]]) for k in picked})


def test_patterns_and_paths_by_name():
    clean, corrupt = two(doubled(observe=Categorical(3)))
    slow, ground = Oracle(clean, corrupt, ("y_2",)), corrupt.ground
    at = ["x_0_1 -> v_0_0_1 -> a_0_0_2", "q_0_*_2", "x_1", "v_1_1_0 -> a_1_1_2", "a_0_1_0", "x"]
    result = bt.sweep(clean, corrupt, at=at, metric=make_metric(["y_2"]))
    assert result.axes == ("cell",) and result.labels["cell"] == tuple(at) and list(result.names.values()) == at
    ids = lambda *given: [ground.id(name) for name in given]  # noqa: E731
    patches = [
        patch_path(*ids("x_0_1", "v_0_0_1", "a_0_0_2")),
        set_values(ids("q_0_0_2", "q_0_1_2")),
        set_values(ids("x_1_0", "x_1_1", "x_1_2")),
        patch_path(*ids("v_1_1_0", "a_1_1_2")),
        set_values(ids("a_0_1_0")),
        set_values([n for nodes in get_cells(corrupt, "x").values() for n in nodes]),
    ]
    check(result, slow, {(k,): patch for k, patch in enumerate(patches)})


LEFT = {"vanilla decoder, causal": "v -> a", "positioned": "v -> s", "encoder-decoder": "dec_cross_v -> dec_cross_a"}


@pytest.mark.parametrize(("name", "arrow"), LEFT.items())
def test_paths_leave_the_rest_as_it_was_set(name, arrow):
    """Surgery of the corrupt sentence holds along the way."""
    clean, corrupt = make_pair(get_case(name))
    names = get_outputs(corrupt)
    expected = get_arrows(corrupt, *arrow.split(" -> "))
    index = sorted(expected)[-1]
    other = next(key for key in sorted(expected) if expected[key][1] != expected[index][1])
    done = corrupt.do({corrupt.ground.name(expected[other][1]): Zero()})
    slow = Oracle(clean, done, tuple(names))
    result = bt.sweep(clean, done, at=arrow, metric=make_metric(names))
    removed = {key for key, (_, child) in expected.items() if child == expected[other][1]}
    assert known(result) == set(expected) - removed
    check(result, slow, {index: patch_path(*expected[index])})


# mediation


def linear():
    """Two linear slices: each word adds what all words say."""
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
    clean, corrupt = several(linear())
    weights = torch.tensor([0.5, -1.0, 0.25, 2.0], dtype=D)
    for through in ("x", "m", "v -> a", "x -> v -> a", ["x_0_1", "v_1"]):
        result = bt.mediation(clean, corrupt, through=through, metric=lambda pool, x_1_2: pool @ weights + x_1_2[:, 0])
        present = ~result.indirect_outcomes.isnan()
        total = (result.clean - result.corrupt).expand(present.shape)
        direct, indirect = result.direct_outcomes - result.corrupt, result.indirect_outcomes - result.corrupt
        close((direct + indirect)[present], total[present])
        close(result.interaction[present[..., 0]], torch.zeros(int(present[..., 0].sum()), dtype=D))
        assert float(indirect[present].abs().max()) > 0.1 and float(direct[present].abs().max()) > 0.1, through


def test_mediation_is_two_sweeps():
    """Indirect: the corrupt run with the clean mediator; direct: the clean run with the corrupt one."""
    for options, through in (({}, "x"), ({}, "j"), ({"combine": "select"}, "v -> x"), ({}, ["x_1_*", "x_0_2"])):
        clean, corrupt = several(doubled(observe=Categorical(3), **options), 2)
        given = {"metric": make_metric(["y_0", "y_2"])}
        result = bt.mediation(clean, corrupt, through=through, **given)
        one, other = bt.sweep(clean, corrupt, at=through, **given), bt.sweep(corrupt, clean, at=through, **given)
        for actual, peer in ((result.indirect_outcomes, one.outcomes), (result.direct_outcomes, other.outcomes)):
            torch.testing.assert_close(actual, peer, equal_nan=True)
        assert result.clean.equal(one.clean) and result.corrupt.equal(one.corrupt)
        assert (result.axes, dict(result.names), dict(result.labels)) == (one.axes, dict(one.names), dict(one.labels))
        assert float(torch.as_tensor(result.interaction).nan_to_num().abs().max()) > 1e-3


def test_a_mediator_on_every_way_has_no_direct_effect():
    corrupt = two(doubled(residual=False))[1]
    clean = corrupt.do({"x_0_1": torch.ones(4, dtype=D)})
    result = bt.mediation(clean, corrupt, through="x", metric=make_metric(["x_2_2"]), over=("slice",))
    close(result.indirect_outcomes[1], result.clean)
    close(result.direct_outcomes[1], result.corrupt)
    nothing = bt.mediation(clean, corrupt, through="x", metric=make_metric(["x_2_2"]))
    close(nothing.direct_outcomes[0, 0], nothing.clean)
    close(nothing.indirect_outcomes[0, 0], nothing.corrupt)


# bad questions


@pytest.fixture(scope="module")
def asked():
    """A net, and a clean and a corrupt sentence of it."""
    net = doubled(observe=Categorical(3))
    return net, *two(net)


METRICS = [
    (lambda y_2: y_2, r"metric: expected shape \(1,\).*got shape \(1, 3\)"),
    (lambda y_2: y_2[:, 0] * torch.nan, "metric: expected numbers; got NaN"),
    (lambda y_7: y_7[:, 0], "y_7"),
    ({"y_0": 1, "y_1": 1}, "metric: expected one node"),
    ({"y_2": "cat"}, "y_2"),
    ({"y_2": 3}, "y_2: expected a state from 0 to 2; got 3"),
    ({"y_2": (0, 1, 2)}, "metric of y_2: expected a state, or a tuple of two"),
    ({"y_2": [0, 1]}, "metric of y_2: expected a state, or a list of 1"),
    ({"x_2_2": 1}, "x_2_2: expected a discrete random node"),
]
PLACES = [
    ({"at": "xx"}, "xx"),
    ({"at": "x_0_1"}, r"at: expected a role; got x_0_1; allowed: at=\['x_0_1'\]"),
    ({"at": ["x_0_9"]}, "x_0_9"),
    ({"over": ("slice", "layer")}, "layer"),
    ({"over": ("slice", "read")}, "read"),
    ({"at": ["x_0_1"], "over": ("slice",)}, "slice"),
    ({"at": "a -> v"}, "a -> v"),
    ({"at": "x -> q -> v"}, "q -> v|x -> q -> v"),
    ({"at": ["v_0_0_1 -> a_0_1_2"]}, "v_0_0_1 -> a_0_1_2"),
]


def test_a_metric_or_a_place_that_is_none_is_told(asked):
    _, clean, corrupt = asked
    for metric_, match in METRICS:
        assert re.search(match, get_refusal(bt.sweep, clean, corrupt, metric=metric_)), match
    for options, match in PLACES:
        assert re.search(match, get_refusal(bt.sweep, clean, corrupt, **{"metric": {"y_2": 1}, **options})), options
    assert "xx" in get_refusal(bt.mediation, clean, corrupt, through="xx", metric={"y_2": 1})


def test_sentences_that_do_not_fit_are_told(asked):
    net, clean, corrupt = asked
    short = net.sentence("a b")
    for one, other, match in [
        (short, corrupt, "3 words.*2 words|2 words.*3 words"),
        (doubled().sentence("the cat sat"), corrupt, "same net"),
        ([clean, clean], [corrupt], "as many sentences"),
        ("the cat sat", corrupt, "clean: expected a Sentence"),
        ([clean, clean], [corrupt, 3], "corrupt: expected a Sentence"),
        ([clean, short], [corrupt] * 2, r"clean\[1\].*3 words"),
        (clean, corrupt.observe(y_0=1), "corrupt: expected a sentence without evidence; got y_0"),
        (clean.observe(y_0=1), corrupt, "clean: expected a sentence without evidence"),
    ]:
        for call in (bt.sweep, bt.mediation):
            assert re.search(match, get_refusal(call, one, other, metric={"y_2": 1})), match


def test_a_metric_that_fails_says_how(asked):
    """Its own error is not hidden: it is the cause of ours."""

    def boom(y_2):
        raise RuntimeError("a metric of somebody else")

    with pytest.raises(bt.BNetError, match=r"metric.*RuntimeError.*somebody else") as caught:
        bt.sweep(*asked[1:], at="x", metric=boom)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_what_cannot_be_ablated_or_mediated(asked):
    _, _, corrupt = asked
    for clean in (Attend([1.0, 0, 0]), torch.zeros(4)):
        with pytest.raises(bt.BNetError, match="clean"):
            bt.sweep(clean, corrupt, at="x", metric={"y_2": 1})
    for clean in (Zero(), Mean(), Noise(1.0)):
        with pytest.raises(bt.BNetError):
            bt.sweep(clean, corrupt, at="v -> y", metric={"y_2": 1})
        with pytest.raises(bt.BNetError, match="clean"):
            bt.mediation(clean, corrupt, metric={"y_2": 1})
    with pytest.raises(bt.BNetError, match="W_q"):
        bt.sweep(Mean(), corrupt, at="W_q", metric={"y_2": 1})
    ids = make_pair(get_case("vanilla decoder, learned"))[1]
    with pytest.raises(bt.BNetError, match="token"):
        bt.sweep(Zero(), ids, at="token", metric={"y_2": 1})
    for name in ("cayley", "marginal"):
        clean, corrupt = make_pair(get_case(name))
        assert "j" in get_refusal(bt.sweep, clean, corrupt, at="j", metric=make_metric(get_outputs(corrupt)))
    open_ = doubled(combine="select", observe=Categorical(3))
    with pytest.raises(bt.BNetError, match="c"):
        bt.sweep(*two(open_), at="c", metric={"y_2": 1})
