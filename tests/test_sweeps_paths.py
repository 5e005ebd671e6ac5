"""Arrows and paths equal their definition by two forward runs, mediation its own by two sweeps; what is refused."""

import itertools

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.inference import Attend, Mean, Noise, Zero
from bnet_transformer.tpm import Add, Affine, Categorical, Given, Linear, Pool
from tests.cases import WORD, every, jolted
from tests.sweeping import D, Slow, along, arrows, by_index, case, cells, metric, outcomes, pair, setting
from tests.test_sweeps import all_indices, check, close, doubled, several, some, two

ARROWS = {
    "concat": ("v -> a", "k -> a", "q -> a", "x -> q", "x -> x", "a -> x", "W_q -> q"),
    "chapter, two slices": ("v -> x", "q -> x", "k -> x", "x -> v"),
    "chapter, real": ("x -> x", "v -> x"),
    "codebook": ("x -> q", "v -> x"),
    "encoder, post-norm": ("embed -> x", "x -> add1", "norm1 -> add2", "a -> mix", "v -> a", "token -> embed"),
    "encoder-decoder": (
        "dec_x -> dec_a",
        "enc_x -> dec_cross_k",
        "dec_cross_v -> dec_cross_a",
        "dec_a -> dec_past",
        "enc_v -> enc_a",
    ),
    "three stacks": ("enc_x -> dec_left", "enc_q -> enc_x", "dec_left -> dec_x"),
    "vanilla encoder-decoder, pre-norm": ("dec_cross_k -> dec_cross_a", "dec_v -> dec_a", "enc_norm -> dec_cross_v"),
    "recurrent": ("x -> h", "h -> x"),
    "geometric": ("x -> a",),
    "integrator": ("q -> a", "k -> a", "v -> a"),
    "cayley": ("x -> a", "a -> lower1"),
    "gated": ("v -> a", "g -> x", "a -> x"),
    "positioned": ("x -> pool", "pool -> first", "x -> x", "s -> both"),
    "shared slices": ("x -> a", "W_q -> q", "v -> a"),
    "vanilla decoder, causal": ("v -> a", "x -> add1", "k -> a"),
}


def known(found):
    """The indices of a sweep at which there is a cell."""
    return {tuple(at) for at in (~found.outcomes[..., 0].isnan()).nonzero().tolist()}


@pytest.mark.parametrize(("name", "arrow"), [(name, arrow) for name, some in ARROWS.items() for arrow in some])
def test_an_arrow_is_two_forward_runs(name, arrow):
    """Run 1: the child with the clean value of that one parent; run 2: the corrupt run with the child set to it."""
    clean, corrupt = pair(case(name))
    names = outcomes(corrupt)
    slow = Slow(clean, corrupt, tuple(names))
    found = bt.sweep(clean, corrupt, at=arrow, metric=metric(names))
    wanted = by_index(found, arrows(corrupt, *arrow.split(" -> ")))
    assert found.at == arrow and known(found) == set(wanted)
    for index, (parent, child) in wanted.items():
        assert found.names[index] == f"{corrupt.ground.name(parent)} -> {corrupt.ground.name(child)}"
    picked = some(wanted, len(slow.runs), (name, arrow))
    check(found, slow, {index: along(*wanted[index]) for index in picked})
    rough = bt.sweep(*pair(case(name), torch.float32), at=arrow, metric=metric(names))
    torch.testing.assert_close(rough.outcomes, found.outcomes, rtol=1e-5, atol=1e-5, equal_nan=True, check_dtype=False)


def test_an_arrow_into_a_mix_is_what_the_row_makes_of_the_difference():
    """By hand: a_i + P(j | i) (clean v_j - v_j), no run of the reference asked."""
    clean, corrupt = two(doubled(mask="causal"))
    found = bt.sweep(clean, corrupt, at="v -> a", metric=lambda x_2_2: x_2_2[:, 1])
    assert found.axes == ("slice", "head", "word", "read") and found.outcomes.shape == (2, 2, 3, 3, 1)
    for t, h, i, j in itertools.product(*map(range, found.outcomes.shape[:-1])):
        moved = corrupt[f"a_{t}_{h}_{i}"] + corrupt.attention(t)[h, i, j] * (
            clean[f"v_{t}_{h}_{j}"] - corrupt[f"v_{t}_{h}_{j}"]
        )
        if j > i:
            assert bool(found.outcomes[t, h, i, j].isnan()) and (t, h, i, j) not in found.names
        else:
            close(found.outcomes[t, h, i, j], corrupt.do({f"a_{t}_{h}_{i}": moved})["x_2_2"][1:2])


def test_arrows_set_together_are_set_together():
    """`over` joins arrows: into one child all its clean parents at once, into several each of them its own."""
    clean, corrupt = two(doubled())
    names = outcomes(corrupt)
    slow = Slow(clean, corrupt, tuple(names))
    every_arrow = arrows(corrupt, "v", "a")
    for over in (("slice", "head"), ("slice", "head", "word"), ("slice", "word", "read"), ("read",)):
        found = bt.sweep(clean, corrupt, at="v -> a", metric=metric(names), over=over)
        axes = ("slice", "head", "word", "read")
        groups = {}
        for index, arrow in every_arrow.items():
            groups.setdefault(tuple(index[axes.index(axis)] for axis in over), []).append(arrow)
        assert found.axes == over and set(groups) == all_indices(found)

        def patch(group):
            def done(clean, corrupt):
                made = {}
                for child in {child for _, child in group}:
                    corrupt.value(child)
                    alone = bt.reference.Run(corrupt.world, corrupt.states)
                    alone._values = {**corrupt._values, **{p: clean.value(p) for p, c in group if c == child}}
                    made[child] = alone._value(child)
                return made

            return done

        check(found, slow, {index: patch(group) for index, group in groups.items()})


PATHS = {
    "concat": ("x -> v -> a", "v -> a -> x", "x -> v -> a -> x"),
    "chapter, two slices": ("x -> k -> x", "x -> v -> x -> q"),
    "encoder-decoder": ("enc_x -> dec_cross_v -> dec_cross_a",),
    "encoder, pre-norm": ("v -> a -> mix", "x -> norm1 -> q", "x -> add1 -> x"),
}


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, some in PATHS.items() for path in some])
def test_a_path_carries_the_clean_value_alone(name, path):
    clean, corrupt = pair(case(name))
    names, ground = outcomes(corrupt), corrupt.ground
    slow, (first, *rest) = Slow(clean, corrupt, tuple(names)), path.split(" -> ")
    ways = [(node,) for family in ground.folded.by_stem[first] for node in ground.nodes(family).tolist()]
    for role in rest:
        ways = [(*way, n) for way in ways for n in ground.children(way[-1]) if ground.family_of(n).stem == role]
    found = bt.sweep(clean, corrupt, at=path, metric=metric(names))
    told = {" -> ".join(map(ground.name, way)): way for way in ways}
    assert found.axes == ("path",) and sorted(found.names.values()) == sorted(told) and len(told) == len(ways)
    picked = some([index for (index,) in found.names], len(slow.runs), path)
    check(found, slow, {(k,): along(*told[found.names[k,]]) for k in picked})


def test_patterns_and_paths_by_name():
    clean, corrupt = two(doubled(observe=Categorical(3)))
    slow, ground = Slow(clean, corrupt, ("y_2",)), corrupt.ground
    at = ["x_0_1 -> v_0_0_1 -> a_0_0_2", "q_0_*_2", "x_1", "v_1_1_0 -> a_1_1_2", "a_0_1_0", "x"]
    found = bt.sweep(clean, corrupt, at=at, metric=metric(["y_2"]))
    assert found.axes == ("cell",) and found.labels["cell"] == tuple(at) and list(found.names.values()) == at
    ids = lambda *told: [ground.id(name) for name in told]  # noqa: E731
    patches = [
        along(*ids("x_0_1", "v_0_0_1", "a_0_0_2")),
        setting(ids("q_0_0_2", "q_0_1_2")),
        setting(ids("x_1_0", "x_1_1", "x_1_2")),
        along(*ids("v_1_1_0", "a_1_1_2")),
        setting(ids("a_0_1_0")),
        setting([n for nodes in cells(corrupt, "x").values() for n in nodes]),
    ]
    check(found, slow, {(k,): patch for k, patch in enumerate(patches)})


@pytest.mark.parametrize("name", ["vanilla decoder, causal", "word", "positioned", "encoder-decoder"])
def test_paths_leave_the_rest_as_it_was_set(name):
    """Zero effect where nothing differs, and surgery of the corrupt sentence holds along the way."""
    clean, corrupt = pair(case(name))
    names = outcomes(corrupt)
    arrow = {"word": "v -> x", "positioned": "v -> s", "encoder-decoder": "dec_cross_v -> dec_cross_a"}.get(
        name, "v -> a"
    )
    wanted = arrows(corrupt, *arrow.split(" -> "))
    index = sorted(wanted)[-1]
    other = next(key for key in sorted(wanted) if wanted[key][1] != wanted[index][1])
    done = corrupt.do({corrupt.ground.name(wanted[other][1]): Zero()}) if name != "word" else corrupt
    if name == "word":
        return
    slow = Slow(clean, done, tuple(names))
    found = bt.sweep(clean, done, at=arrow, metric=metric(names))
    gone = {key for key, (_, child) in wanted.items() if child == wanted[other][1]}
    assert known(found) == set(wanted) - gone
    check(found, slow, {index: along(*wanted[index])})


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
    return jolted(bt.BNet(bt.Declaration([stack], name="linear"))).to(D)


@pytest.mark.parametrize("through", ["x", "v", "a", "m", "v -> a", "x -> v -> a", ["x_0_1", "v_1"]], ids=str)
def test_direct_and_indirect_sum_to_the_total_in_a_linear_net(through):
    clean, corrupt = several(linear())
    found = bt.mediation(clean, corrupt, through=through, metric=lambda pool, x_1_2: pool @ W + x_1_2[:, 0])
    there = ~found.indirect_outcomes.isnan()
    total = (found.clean - found.corrupt).expand(there.shape)
    direct, indirect = found.direct_outcomes - found.corrupt, found.indirect_outcomes - found.corrupt
    close((direct + indirect)[there], total[there])
    close(found.interaction[there[..., 0]], torch.zeros(int(there[..., 0].sum()), dtype=D))
    assert float(indirect[there].abs().max()) > 0.1 and float(direct[there].abs().max()) > 0.1


W = torch.tensor([0.5, -1.0, 0.25, 2.0], dtype=D)


@pytest.mark.parametrize("options", [{}, {"combine": "select"}], ids=str)
@pytest.mark.parametrize("through", ["x", "q", "j", "v -> {}", ["x_1_*", "x_0_2"]], ids=str)
def test_mediation_is_two_sweeps(options, through):
    """Indirect: the corrupt run with the clean mediator; direct: the clean run with the corrupt one."""
    net = doubled(observe=Categorical(3), **options)
    through = through.format("x" if options else "a") if isinstance(through, str) else through
    clean, corrupt = several(net)
    told = {"metric": metric(["y_0", "y_2"])}
    found = bt.mediation(clean, corrupt, through=through, **told)
    one, other = bt.sweep(clean, corrupt, at=through, **told), bt.sweep(corrupt, clean, at=through, **told)
    close(found.indirect_outcomes[~one.outcomes.isnan()], one.outcomes[~one.outcomes.isnan()])
    close(found.direct_outcomes[~one.outcomes.isnan()], other.outcomes[~one.outcomes.isnan()])
    close(found.clean, one.clean)
    close(found.corrupt, one.corrupt)
    assert (found.axes, dict(found.names), dict(found.labels)) == (one.axes, dict(one.names), dict(one.labels))
    assert float(torch.as_tensor(found.interaction).nan_to_num().abs().max()) > 1e-3


def test_a_mediator_on_every_way_has_no_direct_effect():
    corrupt = two(doubled(residual=False))[1]
    clean = corrupt.do({"x_0_1": torch.ones(4, dtype=D)})
    found = bt.mediation(clean, corrupt, through="x", metric=metric(["x_2_2"]), over=("slice",))
    close(found.indirect_outcomes[1], found.clean)
    close(found.direct_outcomes[1], found.corrupt)
    nothing = bt.mediation(clean, corrupt, through="x", metric=metric(["x_2_2"]))
    close(nothing.direct_outcomes[0, 0], nothing.clean)
    close(nothing.indirect_outcomes[0, 0], nothing.corrupt)


def test_a_pretrained_net_is_swept():
    net = bt.from_pretrained("tiny").to(D)
    clean, corrupt = net.sentence("the cat sat on the mat"), net.sentence("the dog sat on the log")
    clean, corrupt = (s.do(c=0) if "c" in s.ground.names else s for s in (clean, corrupt))
    names = outcomes(corrupt)
    slow = Slow(clean, corrupt, tuple(names))
    found = bt.sweep(clean, corrupt, at="x", metric=metric(names))
    wanted = cells(corrupt, "x")
    check(found, slow, {index: setting(wanted[index]) for index in some(wanted, 4, "tiny")})
    assert found.labels["word"] == corrupt.words or len(found.labels["word"]) == len(corrupt.words)


# bad questions


NET = doubled(observe=Categorical(3))
CLEAN, CORRUPT = two(NET)


def boom(y_2):
    raise RuntimeError("a metric of somebody else")


BAD = {
    "shape of a metric": ({"metric": lambda y_2: y_2}, r"metric: expected shape \(1,\).*got shape \(1, 3\)"),
    "one number": ({"metric": lambda y_2: y_2.sum()}, r"metric: expected shape \(1,\)"),
    "no number": ({"metric": lambda y_2: "high"}, "metric: expected a number"),
    "nothing": ({"metric": lambda y_2: None}, "metric: expected a number"),
    "complex": ({"metric": lambda y_2: y_2[:, 0] * 1j}, "metric: expected real numbers"),
    "not a number": ({"metric": lambda y_2: y_2[:, 0] * torch.nan}, "metric: expected numbers; got NaN"),
    "no metric": ({"metric": 3}, "metric: expected a mapping"),
    "no parameters": ({"metric": lambda: 0}, "metric: expected a mapping"),
    "an unknown node": ({"metric": lambda y_7: y_7[:, 0]}, "y_7"),
    "another unknown node": ({"metric": {"y_9": 1}}, "y_9"),
    "two nodes": ({"metric": {"y_0": 1, "y_1": 1}}, "metric: expected one node"),
    "no node": ({"metric": {}}, "metric: expected one node"),
    "an unknown label": ({"metric": {"y_2": "cat"}}, "y_2"),
    "an unknown state": ({"metric": {"y_2": 3}}, "y_2: expected a state from 0 to 2; got 3"),
    "three states": ({"metric": {"y_2": (0, 1, 2)}}, "metric of y_2: expected a state, or a tuple of two"),
    "too many states": ({"metric": {"y_2": [0, 1]}}, "metric of y_2: expected a state, or a list of 1"),
    "states of no node that has them": ({"metric": {"x_2_2": 1}}, "x_2_2: expected a discrete random node"),
    "another length": ({"clean": NET.sentence("the cat")}, "3 words.*2 words|2 words.*3 words"),
    "another net": ({"clean": doubled().sentence("the cat sat")}, "same net"),
    "other counts": ({"clean": [CLEAN, CLEAN], "corrupt": [CORRUPT]}, "as many sentences"),
    "one and a list": ({"clean": [CLEAN, CLEAN]}, "as many sentences"),
    "none": ({"clean": [], "corrupt": []}, "a Sentence, or a list of them; got none"),
    "no sentence": ({"clean": "the cat sat"}, "clean: expected a Sentence"),
    "no sentence in a list": ({"corrupt": [CORRUPT, 3], "clean": [CLEAN, CLEAN]}, "corrupt: expected a Sentence"),
    "lengths in a list": ({"clean": [CLEAN, NET.sentence("a b")], "corrupt": [CORRUPT] * 2}, r"clean\[1\].*3 words"),
    "evidence": ({"corrupt": CORRUPT.observe(y_0=1)}, "corrupt: expected a sentence without evidence; got y_0"),
    "evidence in the clean one": ({"clean": CLEAN.observe(y_0=1)}, "clean: expected a sentence without evidence"),
    "an unknown role": ({"at": "xx"}, "xx"),
    "nothing to sweep": ({"at": []}, "at"),
    "no name": ({"at": 3}, "at"),
    "an unknown name": ({"at": ["x_0_9"]}, "x_0_9"),
    "an unknown pattern": ({"at": ["q_*_7_0"]}, r"q_\*_7_0"),
    "a random node": ({"at": "y"}, "y"),
    "a random node by name": ({"at": ["y_0"]}, "at y: expected nodes with a value"),
    "an unknown axis": ({"over": ("slice", "layer")}, "layer"),
    "an axis that the role has not": ({"over": ("slice", "head")}, "head"),
    "read of what is no row": ({"over": ("slice", "read")}, "read"),
    "no axis": ({"over": ()}, "over: expected at least one axis"),
    "an axis of cells": ({"at": ["x_0_1"], "over": ("slice",)}, "slice"),
    "no axes": ({"over": 3}, "over"),
    "no memory": ({"memory": 0}, "memory: expected"),
    "memory of half a byte": ({"memory": 0.5}, "memory: expected"),
    "memory of words": ({"memory": "all"}, "memory: expected"),
    "no arrow": ({"at": "a -> v"}, "a -> v"),
    "no arrow to itself": ({"at": "q -> q"}, "q -> q"),
    "an arrow to nothing": ({"at": "x -> "}, "expected a known name; got ''"),
    "an arrow from nothing": ({"at": " -> x"}, "expected a known name; got ''"),
    "an arrow of an unknown role": ({"at": "x -> nix"}, "nix"),
    "a path that breaks": ({"at": "x -> q -> v"}, "q -> v|x -> q -> v"),
    "an arrow that is not there": ({"at": ["v_0_0_1 -> a_0_1_2"]}, "v_0_0_1 -> a_0_1_2"),
    "an arrow by pattern": ({"at": ["v_0_0_1 -> a_0_1"]}, "a_0_1"),
    "an arrow between a role and a name": ({"at": "v -> a_0_0_1"}, "a_0_0_1"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("call", [bt.sweep, bt.mediation])
def test_bad_questions_are_told(what, call):
    changed, match = BAD[what]
    asked = {"clean": CLEAN, "corrupt": CORRUPT, "at": "x", "metric": {"y_2": 1}, **changed}
    if call is bt.mediation:
        asked["through"] = asked.pop("at")
    with pytest.raises(bt.BNetError, match=match):
        call(asked.pop("clean"), asked.pop("corrupt"), **asked)


def test_a_metric_that_fails_says_how():
    """Its own error is not hidden: it is the cause of ours."""
    with pytest.raises(bt.BNetError, match=r"metric.*RuntimeError.*somebody else") as caught:
        bt.sweep(CLEAN, CORRUPT, at="x", metric=boom)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_what_cannot_be_ablated_or_mediated():
    for clean in (Attend([1.0, 0, 0]), torch.zeros(4)):
        with pytest.raises(bt.BNetError, match="clean"):
            bt.sweep(clean, CORRUPT, at="x", metric={"y_2": 1})
    for clean in (Zero(), Mean(), Noise(1.0)):
        with pytest.raises(bt.BNetError):
            bt.sweep(clean, CORRUPT, at="v -> y", metric={"y_2": 1})
        with pytest.raises(bt.BNetError, match="clean"):
            bt.mediation(clean, CORRUPT, metric={"y_2": 1})
    with pytest.raises(bt.BNetError, match="W_q"):
        bt.sweep(Mean(), CORRUPT, at="W_q", metric={"y_2": 1})
    ids = pair(case("vanilla decoder, learned"))[1]
    with pytest.raises(bt.BNetError, match="token"):
        bt.sweep(Zero(), ids, at="token", metric={"y_2": 1})
    for name in ("cayley", "gated"):
        clean, corrupt = pair(case(name))
        if name == "cayley":
            with pytest.raises(bt.BNetError, match="j"):
                bt.sweep(clean, corrupt, at="j", metric=metric(outcomes(corrupt)))
    clean, corrupt = pair(case("marginal"))
    with pytest.raises(bt.BNetError, match="j"):
        bt.sweep(clean, corrupt, at="j", metric={"y_2": 1})
    open_ = doubled(combine="select", observe=Categorical(3))
    with pytest.raises(bt.BNetError, match="c"):
        bt.sweep(*two(open_), at="c", metric={"y_2": 1})
