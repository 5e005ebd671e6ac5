"""Invalid arguments of a sweep: the error names the argument, the node or the item."""

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.interventions import Attend, Mean, Noise, Zero
from tests.cases import get_case
from tests.sweep_oracle import get_outputs, get_refusal, make_metric, make_pair
from tests.test_sweeps import make_net, make_sentences

NET = make_net(observe=bt.tpm.Categorical(3))
CLEAN, CORRUPT = make_sentences(NET)
LONG, SHORT = NET.sentence("a big dog sat down"), NET.sentence("a b")
TOKENS = make_sentences(make_net(vocabulary=["cat", "dog", "cats", "the", "sat"], observe=bt.tpm.Categorical(3)))
MIXTURE = make_net(combine="select", observe=bt.tpm.Categorical(3))
PAIR, LENGTHS = (CLEAN, CORRUPT), ([CLEAN, SHORT], [CORRUPT, NET.sentence("b a")])
HEADS = ("slice", "head")

CELLS = [
    ({"at": "xx"}, "xx"),
    ({"at": "x_0_1"}, "x_0_1"),
    ({"at": ["x_0_9"]}, "x_0_9"),
    ({"at": ["x", "xx"]}, "xx"),
    ({"at": ["x", 3]}, "at"),
    ({"at": "a -> v"}, "a -> v"),
    ({"at": "x -> q -> v"}, "q -> v"),
    ({"at": ["x -> k", "x -> a"]}, "q -> a"),
    ({"at": ["v_0_0_1 -> a_0_1_2"]}, "v_0_0_1 -> a_0_1_2"),
    ({"at": ["v_0_0_* -> q_0_0_*"]}, "arrows"),
    ({"at": {"all": ["x_0_*"]}, "over": ("slice",)}, "over"),
    ({"over": ("slice", "layer")}, "layer"),
    ({"over": ("slice", "read")}, "read"),
    ({"at": ["x", "a"], "over": ("slice", "layer")}, "layer"),
    ({"at": ["x", "a"], "over": ("slice", "read")}, "read"),
    ({"at": ["x_0_1"], "over": ("slice",)}, "slice"),
    ({"at": ["x_1_2[4]"]}, "entries from 0 to 3"),
    ({"at": {"cell": ["x_1_2[4]"]}}, "entries from 0 to 3"),
    ({"at": {"cell": []}}, "at"),
    ({"at": {"cell": ["v -> a"]}}, "at"),
    ({"at": {"cell": "a_0"}}, "at"),
    ({"at": ["x_1_2[a]"]}, "x_1_2[a]"),
    ({"at": ["x_1_9[0]"]}, "x_1_9"),
    ({"at": ["x_0_0[1] -> v_0_0_1"]}, "x_0_0[1]"),
    ({"at": "j", "over": ("entry",)}, "entry"),
    ({"at": "score", "over": ("entry",)}, "entry"),
    ({"at": "v -> a", "over": ("entry",)}, "entry"),
    ({"direction": "both"}, "direction"),
    ({"method": "first order"}, "method"),
    ({"method": bt.Gradient}, "method"),
    ({"method": bt.Gradient(steps=2, rule="activations")}, "rule"),
    ({"steps": 2}, "bt.Gradient(steps=...)"),
    ({"first_order": True}, "first_order"),
]
METRICS = [
    (lambda y_2: y_2, "shape (1, 3)"),
    (lambda y_2: y_2[:, 0] * torch.nan, "NaN"),
    (lambda y_7: y_7[:, 0], "y_7"),
    (lambda qq: qq[:, 0], "qq"),
    ({"y_0": 1, "y_1": 1}, "one node"),
    ({"y_2": "cat"}, "y_2"),
    ({"y_2": 3}, "from 0 to 2; got 3"),
    ({"y_2": (0, 1, 2)}, "two states"),
    ({"y_2": [0, 1]}, "a list of 1"),
    ({"x_2_2": 1}, "x_2_2"),
]
SIDES = [
    ((SHORT, CORRUPT), {}, "2 words"),
    ((LONG, CORRUPT), {}, "words={"),
    ((make_net().sentence("the cat sat"), CORRUPT), {}, "same net"),
    (([CLEAN, CLEAN], [CORRUPT]), {}, "as many sentences"),
    (("the cat sat", CORRUPT), {}, "clean"),
    (([CLEAN, CLEAN], [CORRUPT, 3]), {}, "corrupt"),
    (([CLEAN, SHORT], [CORRUPT] * 2), {}, "corrupt[1]"),
    (([CLEAN, CLEAN], [CORRUPT, CORRUPT.do(a_0=Zero())]), {}, "corrupt[1]"),
    ((CLEAN, CORRUPT.observe(y_0=1)), {}, "y_0"),
    ((CLEAN.observe(y_0=1), CORRUPT), {}, "y_0"),
    ((CORRUPT, CORRUPT), {}, "a pair that differs"),
    ((Attend([1.0, 0, 0]), CORRUPT), {}, "clean"),
    ((torch.zeros(5), CORRUPT), {}, "(5,)"),
    ((Zero(), CORRUPT), {"at": "v -> y"}, "y"),
    ((Mean(), CORRUPT), {"at": "v -> y"}, "y"),
    ((Mean(), CORRUPT), {"at": "W_q"}, "W_q"),
    ((Zero(), CORRUPT), {"at": "score"}, "at"),
    ((Zero(), CORRUPT), {"words": {0: 1}}, "words"),
    ((Zero(), CORRUPT), {"method": bt.Gradient(steps=2)}, "steps"),
    ((CLEAN.do(y_0=1), CLEAN.do(y_0=0)), {"method": bt.Gradient(steps=2)}, "differ in an input"),
    ((CORRUPT, Zero()), {}, "direction='noise'"),
    ((Zero(), CORRUPT), {"direction": "noise"}, "direction='denoise'"),
    (TOKENS, {"at": "token", "over": ("word", "entry")}, "vectors"),
    (TOKENS, {"at": ["token_1[0]"]}, "vectors"),
    (TOKENS, {"at": "token", "method": bt.Gradient()}, "token"),
    (TOKENS, {"at": "token -> x", "method": bt.Gradient()}, "token"),
    ((Zero(), TOKENS[1]), {"at": "token"}, "token"),
    (make_sentences(MIXTURE), {"at": "c"}, "c"),
    ((MIXTURE.sentence("a big dog sat down"), MIXTURE.sentence("the cat sat")), {"words": {0: 1, 2: 2}}, "Set c by do"),
    *(
        ((LONG, CORRUPT), {"at": at, "words": words}, match)
        for at, words, match in (
            ("x", {0: 5}, "from 0 to 2 mapped to words from 0 to 4"),
            ("x", {3: 1}, "3: 1"),
            ("x", [(0, 1), (0, 2)], "0 twice"),
            ("x", "0:1", "words"),
            ("x", {}, "words"),
            ("x", {"enc": {0: 1}}, "words"),
            ("j", {0: 1}, "rows of attention"),
            (["x_0_2"], {0: 1}, "no cell"),
        )
    ),
    *(
        (LENGTHS, {"metric": {"y_-1": 1}, **options}, match)
        for options, match in (
            ({"at": "x"}, "over"),
            ({"at": "a", "over": ("slice", "word")}, "over"),
            ({"at": "j", "over": ("slice", "read")}, "over"),
            ({"at": ["x_1_0"]}, "at"),
            ({"at": {"a cell": ["a_0_*_1"]}}, "at"),
            ({"at": ["v_0_1_0 -> a_0_1_1"]}, "at"),
            ({"at": "a", "over": HEADS, "metric": {"y_1": 1}}, "y_-1"),
            ({"at": "a", "over": HEADS, "metric": lambda y_1: y_1[:, 0]}, "y_-1"),
            ({"at": "a", "over": HEADS, "metric": {"y_-3": 1}}, "y_-3"),
            ({"at": "a", "over": HEADS, "words": {0: 0}}, "words"),
        )
    ),
]
INVALID = [
    *((PAIR, options, match) for options, match in CELLS),
    *((PAIR, {"metric": metric}, match) for metric, match in METRICS),
    *SIDES,
]


@pytest.mark.parametrize(("sides", "options", "match"), INVALID, ids=range(len(INVALID)))
def test_invalid_sweeps(sides, options, match):
    assert match in get_refusal(bt.sweep, *sides, **{"metric": {"y_2": 1}, **options})


def test_invalid_mediations():
    query = {"metric": {"y_2": 1}}
    assert "xx" in get_refusal(bt.mediation, *PAIR, through="xx", **query)
    for clean in (Zero(), Mean(), Noise(1.0), SHORT, CLEAN.observe(y_0=1)):
        assert get_refusal(bt.mediation, clean, CORRUPT, **query)


@pytest.mark.parametrize("name", ["cayley", "marginal"])
def test_nets_without_rows_of_attention(name):
    clean, corrupt = make_pair(get_case(name))
    assert "j" in get_refusal(bt.sweep, clean, corrupt, at="j", metric=make_metric(get_outputs(corrupt)))


def test_an_error_of_a_metric_is_the_cause():
    """Its error is not hidden: it is the cause of ours."""

    def raise_error(y_2):
        raise RuntimeError("a metric of somebody else")

    with pytest.raises(bt.BNetError, match=r"metric.*RuntimeError.*somebody else") as caught:
        bt.sweep(*PAIR, at="x", metric=raise_error)
    assert isinstance(caught.value.__cause__, RuntimeError)
