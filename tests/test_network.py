"""Declarations: valid ones build; an invalid one reports every fault at once, each with node, expected and actual
value."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.tpm import Add, Affine, Attention, Categorical, Given, Linear, Normal, Weight
from tests.cases import CASES, TPMS, every
from tests.custom_tpms import Recurrent

WORD = ["word"]
X = bt.Node("x", Given(4), plates=WORD)


def build(*nodes: bt.Node, prologue=(X,), epilogue=(), outside=(), plates=(), slices=1) -> bt.BNet:
    stack = bt.Stack(nodes, prologue, epilogue, slices=slices)
    return bt.BNet(bt.Declaration([stack], outside, plates))


def find_faults(*nodes: bt.Node, **options: object) -> list[str]:
    with pytest.raises(bt.DeclarationError) as caught:
        build(*nodes, **options)
    return [str(fault) for fault in caught.value.faults]


def test_the_table_covers_every_tpm():
    used = {type(m.tpm) for case in CASES for m in case.build().network.specs}
    assert len(CASES) >= 15 and not set(TPMS) - used


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_cases_check(case):
    assert case.net.check()


def test_every_fault_at_once():
    faults = find_faults(
        bt.Node("q", Linear(), ["W_q", "x"], plates=WORD),
        bt.Node("x_1", Add(), ["x"], plates=WORD),
        bt.Node("k", Linear(), ["W_k"], plates=[*WORD, "haed"]),
        bt.Node("v", Linear(3), ["xx"], plates=WORD),
        bt.Node("g", Add(), ["h"], plates=WORD),
        bt.Node("h", Add(), ["g"], plates=WORD),
        outside=[bt.Node("W_q", Weight((4, 5))), bt.Node("W_k", Weight((4, 4)))],
    )
    text = "\n".join(faults)
    assert "x_1: expected an identifier as role" in text
    assert "k_0: expected a declared plate" in text
    assert "2 parents for Linear, with the slots W, x; got 1: W_k" in text
    assert "near matches are x" in text
    assert "no cycle" in text
    assert all("expected" in fault for fault in faults) and len(faults) >= 5


def test_errors_of_shapes_have_node_expected_and_actual():
    faults = find_faults(
        bt.Node("W", Weight((4, 5))),
        bt.Node("q", Linear(), ["W", "x"], plates=WORD),
        bt.Node("s", Add(), ["x", "n"], plates=WORD),
        bt.Node("n", Linear(3), ["x"], plates=WORD),
    )
    assert faults == [
        "q_0, parent x: expected a vector of width 5, the number of columns of W_0; got shape (4,)",
        "s_0, parent n_0: expected a value of shape (4,), the shape of x; got shape (3,)",
    ]


def test_a_state_must_fit_the_next_slice():
    widen = bt.Node("x", Attention(), ["x", every("x"), every("v")], plates=WORD)
    nodes = [bt.Node("v", Linear(3), ["x"], plates=WORD), widen]
    assert build(*nodes).sentence("a b")["x_1_0"].shape == (3,)
    rigid = [bt.Node("W", Weight((3, 4))), bt.Node("v", Linear(), ["W", "x"], plates=WORD), widen]
    (fault,) = find_faults(*rigid, slices=2)
    assert fault.startswith("v_1") and "width 4" in fault and "(3,)" in fault


@pytest.mark.parametrize(
    "node, message",
    [
        (bt.Node("a", Attention(), ["x", "x", every("x")], plates=WORD), "slot k. of Attention"),
        (bt.Node("a", Add(), [every("x")], plates=WORD), "a single parent in the slot x of Add"),
        (bt.Node("a", Add(), ["x"]), "the node has no plate 'word'"),
        (bt.Node("a", Attention(), ["x", every("x"), bt.Arrow("x", "causal")], plates=WORD), "reach causal"),
        (bt.Node("a", Add(), [bt.Arrow("x", slice=3)], plates=WORD), "no slice= for 'x'"),
        (bt.Node("a", Add(), [bt.Arrow("x", pick={"head": "x"})], plates=WORD), "pick"),
        (bt.Node("a", Add(), ["enc.x"], plates=WORD), "a role without a stack"),
        (bt.Node("a", Add(), [], plates=WORD), "at least one parent"),
        (bt.Node("a", Attention(), ["x", every("h"), every("h")], plates=WORD), "over one axis"),
        (bt.Node("a", Add(), ["x"], plates=["word", "word"]), "each plate once"),
        (bt.Node("class", Add(), ["x"], plates=WORD), "keyword"),
        (bt.Node("a", Add(), ["a"], plates=WORD), "no cycle"),
        (bt.Node("a", Recurrent(2), ["x", bt.Arrow("a", "before")], plates=WORD), "shape="),
        (bt.Node("a", Recurrent(2), ["x", bt.Arrow("a", "before")], WORD, shape=(3,)), "shape (3,), as declared"),
        (bt.Node("a", Recurrent(2), ["x", bt.Arrow("a", "causal")], plates=WORD, shape=(2,)), "no cycle"),
        (bt.Node("a", Categorical(2), ["x", "x"], plates=WORD), "at most one vector"),
    ],
)
def test_faults(node, message):
    heads = bt.Node("h", Linear(4), ["x"], plates=["head", "word"])
    faults = find_faults(heads, node, plates=[bt.Plate("head", 2)])
    assert any(message in fault for fault in faults), faults


def test_errors_of_scope_and_words():
    c = bt.Node("c", Categorical(2), ["x"], plates=WORD, scope="corpus")
    assert any("a root without plate 'word'" in fault for fault in find_faults(c))
    node = bt.Node("k", Linear(4), ["x"], plates=["word", "enc.word"])
    enc = bt.Stack([bt.Node("x", Add(), ["x"], plates=WORD)], [X], name="enc")
    dec = bt.Stack([node], [X], name="dec")
    with pytest.raises(bt.DeclarationError, match="at most one plate of words"):
        bt.BNet(bt.Declaration([enc, dec]))


def test_a_wrong_number_of_words_names_the_arrow():
    enc = bt.Stack([bt.Node("x", Add(), ["x"], plates=WORD)], [X], name="enc")
    dec = bt.Stack([bt.Node("x", Add(), ["x", "enc.x"], plates=WORD)], [X], name="dec")
    net = bt.BNet(bt.Declaration([enc, dec]))
    with pytest.raises(bt.BNetError, match=r"enc_x_1 -> dec_x_1.*got 1 words that read 2"):
        net.sentence({"enc": "a b", "dec": "c"})


def test_shared_is_for_slices():
    shared = bt.Node("x", Given(4), plates=WORD, shared=True)
    assert any("only for a node of a slice" in fault for fault in find_faults(prologue=[shared]))


def test_clashing_names():
    enc = bt.Stack([bt.Node("x", Add(), ["x"], plates=WORD)], [X], name="enc")
    dec = bt.Stack([bt.Node("x", Add(), ["x"], plates=WORD)], [X], name="dec")
    with pytest.raises(bt.DeclarationError, match="one node of this name"):
        bt.BNet(bt.Declaration([enc, dec], [bt.Node("enc_x", Weight(3))]))
    with pytest.raises(bt.DeclarationError, match="different names"):
        bt.BNet(bt.Declaration([enc, enc]))
    with pytest.raises(bt.DeclarationError, match="name of a stack"):
        bt.BNet(bt.Declaration([enc, dec], [bt.Node("dec", Weight(3))]))
    with pytest.raises(bt.DeclarationError, match="one node of this role in the slice"):
        build(bt.Node("a", Add(), ["x"], plates=WORD), bt.Node("a", Add(), ["x"], plates=WORD))


def test_two_heads_of_different_size_are_refused():
    selector = bt.Node("c", Categorical(3))
    node = bt.Node("a", Add(), [bt.Arrow("q", pick={"head": "c"})], plates=WORD)
    q = bt.Node("q", Linear(4), ["x"], plates=["head", "word"])
    faults = find_faults(q, node, outside=[selector], plates=[bt.Plate("head", 2)])
    assert any("a selector of 2 states" in fault for fault in faults)


def test_slices_have_their_own_parameters_unless_shared():
    per_slice = build(bt.Node("x", Affine(4), ["x"], plates=WORD), slices=2)
    shared = build(bt.Node("x", Affine(4), ["x"], plates=WORD, shared=True), slices=2)
    assert set(per_slice.parameters) == {"x_1.weight", "x_1.bias", "x_2.weight", "x_2.bias"}
    assert set(shared.parameters) == {"x.weight", "x.bias"}


def test_parameters_do_not_depend_on_their_neighbours():
    one, two = bt.bayesuvius(4), bt.bayesuvius(4, slices=2, observe=Normal(1.0))
    assert all(one.parameters[name].equal(two.parameters[name]) for name in one.parameters)
    assert not one.parameters["W_q_0.values"].equal(bt.bayesuvius(4, seed=1).parameters["W_q_0.values"])


def test_bad_parameters_are_reported_together():
    net = bt.bayesuvius(4)
    parameters = {
        "W_q_0.values": torch.full((2, 4, 4), torch.nan),
        "W_k_0.values": torch.zeros(2, 4),
        "W_v_0.values": torch.zeros(2, 4, 4, dtype=torch.int),
    }
    with pytest.raises(bt.DeclarationError) as caught:
        net.replace(parameters)
    text = str(caught.value)
    assert "finite" in text and "(2, 4, 4)" in text and "floating" in text
    with pytest.raises(bt.UnknownNameError, match=r"W_q_0\.values"):
        net.replace({"W_q_0.value": torch.zeros(1)})
