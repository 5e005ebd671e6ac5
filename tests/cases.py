"""Small networks on which every implementation is compared with the reference.

Each case has a net and a text; `evidence` has a positive probability, where the net has a likelihood.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

import bnet_transformer as bt
from bnet_transformer import programs, tpm
from bnet_transformer.inference import Evidence
from tests.custom_tpms import AdditiveAttention, Gate, Recurrent

WORD = ["word"]
HEADS = ["head", "word"]


@dataclass(frozen=True)
class Case:
    """A small net, the text of a sentence, and evidence of positive probability."""

    name: str
    build: Callable[[], bt.BNet]
    text: object = "the cat sat"
    evidence: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def net(self) -> bt.BNet:
        """The net in float64, with spread parameters so that no test is trivially true; the same for all tests."""
        return jitter(self.build()).to(torch.float64)

    @property
    def sentence(self) -> bt.Sentence:
        """The ground bnet of the case's text, before any computation."""
        return self.net.sentence(self.text)


def batch_inputs(s: bt.Sentence) -> dict[str, torch.Tensor]:
    """The given values of a sentence, `[1, ...]` by group name."""
    return {name: value[None] for name, value in s.state.encoded.given.items()}


def batch_evidence(s: bt.Sentence) -> dict[str, Evidence]:
    """The evidence of a sentence as evidence on node groups, for a batch of one."""
    result = {}
    for node, value in s.state.evidence.items():
        group, index = s.ground.unravel_index(node)
        if group.name not in result:
            shape = s.ground.shapes[group.index]
            values = torch.zeros(1, *shape, *value.shape, dtype=value.dtype)
            result[group.name] = Evidence(values, torch.zeros(1, *shape, dtype=torch.bool))
        result[group.name].value[(0, *index)] = value
        result[group.name].observed[(0, *index)] = True
    return result


def two_head_net(**options: object) -> bt.BNet:
    """The chapter's net with two heads and a readout of three states, in float64."""
    return jitter(chapter(**{"heads": 2, "observe": tpm.Categorical(3), **options})()).to(torch.float64)


def get_case(name: str) -> Case:
    """The case with this name."""
    return next(case for case in CASES if case.name == name)


def close(actual: object, expected: object, tolerance: float = 1e-10) -> None:
    """Assert that numbers are equal up to rounding, for any floating type."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


def jitter(net: bt.BNet, spread: float = 0.3) -> bt.BNet:
    """Return the same net with noise on every learnable parameter (biases that start at zero would hide errors)."""
    generator = torch.Generator().manual_seed(5)
    return net.replace(
        {
            name: value + spread * torch.randn(value.shape, generator=generator)
            for name, value in sorted(net.parameters.items())
            if name in net.network.learnable
        }
    )


def every(role: str, **options: object) -> bt.Arrow:
    """Return an arrow from every word."""
    return bt.Arrow(role, bt.Reach("every"), **options)  # type: ignore[arg-type]


def projections(*, heads: bool = False, width: int = 4, dim: int = 4, bias: bool = False) -> list[bt.Node]:
    """Declare q, k, v under weight nodes."""
    plates = ["head"] if heads else []
    make = tpm.Affine() if bias else tpm.Linear()
    return [bt.Node(f"W_{r}", tpm.Weight((width, dim)), plates=plates) for r in "qkv"] + [
        bt.Node(r, make, [f"W_{r}", "x"], plates=[*plates, "word"]) for r in "qkv"
    ]


def encoder(*, pre: bool) -> bt.BNet:
    """A vanilla encoder with every word-wise step: embedding, positions, heads, norms, feed-forward, dropout."""
    prologue = [
        bt.Node("token", tpm.Given(states=5), plates=WORD),
        bt.Node("embed", tpm.Embed(4, scale=2.0), ["token"], plates=WORD),
        bt.Node("position", tpm.Sinusoid(4) if pre else tpm.Positions(8, 4), plates=WORD),
        bt.Node("x", tpm.Add(), ["embed", "position"], plates=WORD),
    ]
    attend = [
        bt.Node(
            "a", tpm.Attention(tpm.Dot(None)), ["q", bt.Arrow("k", "causal"), bt.Arrow("v", "causal")], plates=HEADS
        ),
        bt.Node("W_o", tpm.Weight((4, 2)), plates=["head"]),
        bt.Node("mix", tpm.Concat(bias=True), ["W_o", "a"], plates=WORD),
        bt.Node("drop", tpm.Dropout(0.1), ["mix"], plates=WORD),
    ]
    maps = projections(heads=True, width=2, bias=True)
    if pre:
        rename = {"x": "norm1"}
        maps = [bt.Node(n.role, n.tpm, [rename.get(a.role, a.role) for a in n.arrows], n.plates) for n in maps]
        steps = [
            bt.Node("norm1", tpm.Norm("rms"), ["x"], plates=WORD),
            *maps,
            *attend,
            bt.Node("add1", tpm.Add(), ["x", "drop"], plates=WORD),
            bt.Node("norm2", tpm.Norm(), ["add1"], plates=WORD),
            bt.Node("ffn", tpm.FeedForward(6, "silu", gated=True, bias=False), ["norm2"], plates=WORD),
            bt.Node("x", tpm.Add(), ["add1", "ffn"], plates=WORD),
        ]
    else:
        steps = [
            *maps,
            *attend,
            bt.Node("add1", tpm.Add(), ["x", "drop"], plates=WORD),
            bt.Node("norm1", tpm.Norm(), ["add1"], plates=WORD),
            bt.Node("ffn", tpm.FeedForward(6, "gelu"), ["norm1"], plates=WORD),
            bt.Node("add2", tpm.Add(), ["norm1", "ffn"], plates=WORD),
            bt.Node("x", tpm.Norm(), ["add2"], plates=WORD),
        ]
    readout = bt.Node("y", tpm.Categorical(5), ["x"], plates=WORD)
    words = ("the", "cat", "sat", "on", "mat")
    stack = bt.Stack(steps, prologue, [readout], slices=2, vocabulary=words)
    return bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)], name="encoder"))


def three_stacks() -> bt.BNet:
    """Two encoders and a decoder that reads both, with a selector for each encoder and one shared weight."""

    def side(name: str, selector: str) -> bt.Stack:
        return bt.Stack(
            [
                bt.Node("W_q", tpm.Select((4, 4)), [selector]),
                bt.Node("q", tpm.Linear(), ["W_q", "x"], plates=WORD),
                bt.Node("x", tpm.Attention(residual=True), ["q", every("x"), every("x"), "x"], plates=WORD),
            ],
            [bt.Node("x", tpm.Given(4), plates=WORD)],
            name=name,
            slices=2,
        )

    decoder = bt.Stack(
        [
            bt.Node("q", tpm.Linear(), ["W_shared", "x"], plates=WORD),
            bt.Node("left", tpm.Attention(), ["q", every("enc.x"), every("enc.x")], plates=WORD),
            bt.Node("right", tpm.Attention(), ["q", every("side.x", slice="first"), every("side.x")], plates=WORD),
            bt.Node("x", tpm.Add(), ["x", "left", "right"], plates=WORD),
        ],
        [bt.Node("x", tpm.Given(4), plates=WORD)],
        [bt.Node("y", tpm.Normal(0.7), ["x"], plates=WORD)],
        name="dec",
    )
    roots = [
        bt.Node("c", tpm.Categorical(2)),
        bt.Node("b", tpm.Categorical(3), ["c"]),
        bt.Node("W_shared", tpm.Weight((4, 4))),
        bt.Node("label", tpm.Categorical(2, pool="mean"), [every("dec.x")]),
    ]
    return bt.BNet(bt.Declaration([side("enc", "c"), side("side", "b"), decoder], roots, name="three stacks"))


def two_selectors() -> bt.BNet:
    """A selector of the queries and one of the keys and values; a weight under both."""
    nodes = [
        bt.Node("W_q", tpm.Select((4, 4)), ["c"]),
        bt.Node("W_k", tpm.Codebook(2, (4, 4)), ["d"]),
        bt.Node("W_v", tpm.Select((4, 4)), ["c", "d"]),
        *[bt.Node(r, tpm.Linear(), [f"W_{r}", "x"], plates=WORD) for r in "qkv"],
        bt.Node(
            "x",
            tpm.Attention(),
            ["q", bt.Arrow("k", bt.Reach("window", 1)), bt.Arrow("v", bt.Reach("window", 1))],
            plates=WORD,
        ),
    ]
    prologue = [bt.Node("x", tpm.Given(4), plates=WORD)]
    stack = bt.Stack(nodes, prologue, [bt.Node("y", tpm.Categorical(3), ["x"], plates=WORD)])
    roots = [bt.Node("c", tpm.Categorical(2, (0.25, 0.75))), bt.Node("d", tpm.Categorical(3, prior=1.0))]
    return bt.BNet(bt.Declaration([stack], roots, name="two selectors"))


def gated() -> bt.BNet:
    """A user-defined gate and a user-defined attention."""
    nodes = [
        *projections(),
        bt.Node("a", AdditiveAttention(), ["q", every("k"), every("v")], plates=WORD),
        bt.Node("g", tpm.Affine(4), ["x"], plates=WORD),
        bt.Node("x", Gate(), ["g", "a"], plates=WORD),
    ]
    stack = bt.Stack(nodes, [bt.Node("x", tpm.Given(4), plates=WORD)], slices=2)
    return bt.BNet(bt.Declaration([stack], name="gated"))


def recurrent() -> bt.BNet:
    """A recurrent net: each word depends on the state of the previous word."""
    cell = bt.Node("h", Recurrent(3), ["x", bt.Arrow("h", "before")], plates=WORD, shape=(3,))
    stack = bt.Stack(
        [cell, bt.Node("x", tpm.Linear(4), ["h"], plates=WORD)],
        [bt.Node("x", tpm.Given(4), plates=WORD)],
        [bt.Node("y", tpm.Normal(0.5, dim=2), ["x"], plates=WORD)],
        slices=2,
    )
    return bt.BNet(bt.Declaration([stack], name="recurrent"))


def recurrences() -> bt.BNet:
    """Recurrent maps of all kinds: under a selector, of heads, of the sum over earlier words, gated."""
    before = bt.Arrow("h", "before")
    nodes = [
        bt.Node("W", tpm.Select((3, 3)), ["c"]),
        bt.Node("z", tpm.Linear(), ["W", "x"], plates=WORD),
        bt.Node("h", tpm.Recur(3, "sigmoid"), ["z", before], plates=WORD, shape=(3,)),
        bt.Node("u", tpm.Recur(3), ["z", before], plates=WORD),
        bt.Node("g", tpm.Recur(2, bias=False), ["x", bt.Arrow("g", "before")], plates=HEADS, shape=(2,)),
        bt.Node("p", tpm.Pool("sum"), [bt.Arrow("m", "earlier")], plates=WORD),
        bt.Node("m", tpm.Recur(3, "relu"), ["x", "p"], plates=WORD, shape=(3,)),
        bt.Node("x", tpm.Gated("identity"), ["u", "m"], plates=WORD),
    ]
    side = bt.Node("side", tpm.Concat(mapped=False), [bt.Arrow("g", slice="last")], plates=WORD)
    stack = bt.Stack(
        nodes, [bt.Node("x", tpm.Given(3), plates=WORD)], [side, bt.Node("y", tpm.Normal(0.5), ["x"], WORD)]
    )
    return bt.BNet(
        bt.Declaration([stack], [bt.Node("c", tpm.Categorical(2))], [bt.Plate("head", 2)], name="recurrences")
    )


def marginal() -> bt.BNet:
    """Attention as a variable: j is a node, and x' is the value of the word to which j points."""
    nodes = [
        *projections(),
        bt.Node("j", tpm.Read(tpm.Dot(None)), ["q", bt.Arrow("k", "causal")], plates=WORD),
        bt.Node("x", tpm.Add(), [bt.Arrow("v", "causal", pick={"word": "j"})], plates=WORD),
    ]
    stack = bt.Stack(
        nodes, [bt.Node("x", tpm.Given(4), plates=WORD)], [bt.Node("y", tpm.Categorical(3), ["x"], plates=WORD)]
    )
    return bt.BNet(bt.Declaration([stack], name="marginal"))


def hidden_markov() -> bt.BNet:
    """A chain of discrete states along the words, each given the one before, observed through a Normal readout."""
    state = bt.Node("z", tpm.Categorical(2), [bt.Arrow("z", "before"), "x"], plates=WORD)
    mean = [bt.Node("W", tpm.Select((2, 4)), ["z"], plates=WORD), bt.Node("x", tpm.Linear(), ["W", "x"], plates=WORD)]
    prologue = [bt.Node("x", tpm.Given(4), plates=WORD)]
    stack = bt.Stack([state, *mean], prologue, [bt.Node("y", tpm.Normal(0.6), ["x"], plates=WORD)])
    return bt.BNet(bt.Declaration([stack], name="hidden Markov"))


def windowed_selectors() -> bt.BNet:
    """A second-order chain of selectors along the words, under attention to the words nearby."""
    reach = bt.Reach("window", 1)
    nodes = [
        bt.Node("p", tpm.Select(2), [bt.Arrow("c", "before")], plates=WORD),  # of the word before
        bt.Node("c", tpm.Categorical(2), [bt.Arrow("c", "before"), bt.Arrow("p", "before")], plates=WORD),
        bt.Node("W", tpm.Select((4, 4)), ["c"], plates=WORD),
        bt.Node("v", tpm.Linear(), ["W", "x"], plates=WORD),
        bt.Node("x", tpm.Attention(), ["x", bt.Arrow("x", reach), bt.Arrow("v", reach)], plates=WORD),
    ]
    prologue = [bt.Node("x", tpm.Given(4), plates=WORD)]
    stack = bt.Stack(nodes, prologue, [bt.Node("y", tpm.Categorical(3), ["x"], plates=WORD)])
    return bt.BNet(bt.Declaration([stack], name="windowed selectors"))


def backward_chain() -> bt.BNet:
    """Each word attends with the head of a selector that depends on that of the word after, and on x."""
    nodes = [
        *(bt.Node(f"W_{role}", tpm.Weight((3, 3)), plates=["head"]) for role in "qkv"),
        *(bt.Node(role, tpm.Linear(), [f"W_{role}", "x"], plates=HEADS) for role in "qkv"),
        bt.Node("c", tpm.Categorical(2, prior=2.0), [bt.Arrow("c", "after"), "x"], plates=WORD),
        bt.Node(
            "x",
            tpm.Attention(),
            [bt.Arrow("q", pick={"head": "c"}), *(bt.Arrow(role, "every", pick={"head": "c"}) for role in "kv")],
            plates=WORD,
        ),
    ]
    stack = bt.Stack(
        nodes, [bt.Node("x", tpm.Given(3), plates=WORD)], [bt.Node("y", tpm.Normal(0.7), ["x"], plates=WORD)]
    )
    return bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)], name="backward chain"))


def factorial_chains() -> bt.BNet:
    """Two chains with a common child, one of which depends on the other, a local choice, and one of the sentence."""
    before = lambda role: bt.Arrow(role, "before")  # noqa: E731
    nodes = [
        bt.Node("a", tpm.Categorical(2), ["s", before("a")], plates=WORD),
        bt.Node("b", tpm.Categorical(3), ["a", before("b")], plates=WORD),
        bt.Node("d", tpm.Categorical(2), [before("b")], plates=WORD),
        bt.Node("e", tpm.Categorical(3), ["a", "d"], plates=WORD),
    ]
    stack = bt.Stack(nodes, [bt.Node("x", tpm.Given(2), plates=WORD), bt.Node("s", tpm.Categorical(2))], slices=1)
    return bt.BNet(bt.Declaration([stack], name="factorial chains"))


def experts() -> bt.BNet:
    """A router chooses the feed-forward expert of each word."""
    nodes = [
        bt.Node("r", tpm.Categorical(3), ["x"], plates=WORD),
        bt.Node("e", tpm.FeedForward(3), ["x"], plates=["expert", "word"]),
        bt.Node("x", tpm.Add(), ["x", bt.Arrow("e", pick={"expert": "r"})], plates=WORD),
    ]
    readout = [bt.Node("y", tpm.Normal(0.5), ["x"], plates=WORD)]
    stack = bt.Stack(nodes, [bt.Node("x", tpm.Given(4), plates=WORD)], readout, slices=2)
    return bt.BNet(bt.Declaration([stack], plates=[bt.Plate("expert", 3)], name="experts"))


def encoder_decoder() -> bt.BNet:
    """Cross attention (Vaswani et al.): each decoder slice has its own keys and values over the encoder's words."""
    prologue = [bt.Node("x", tpm.Given(4), plates=WORD)]
    enc = bt.Stack(
        [
            *projections(),
            bt.Node("a", tpm.Attention(tpm.Dot(None)), ["q", every("k"), every("v")], plates=WORD),
            bt.Node("x", tpm.Add(), ["x", "a"], plates=WORD),
        ],
        prologue,
        slices=2,
        name="enc",
    )
    cross = [
        bt.Node("W_k", tpm.Weight((4, 4))),
        bt.Node("cross_q", tpm.Affine(4), ["a"], plates=WORD),
        bt.Node("cross_k", tpm.Affine(), ["W_k", "enc.x"], plates=["enc.word"]),
        bt.Node("cross_v", tpm.Linear(4), ["enc.x"], plates=["enc.word"]),
        bt.Node("cross_a", tpm.Attention(tpm.Dot(None)), ["cross_q", every("cross_k"), every("cross_v")], plates=WORD),
        bt.Node("past", tpm.Pool("sum"), [bt.Arrow("a", "earlier")], plates=WORD),
    ]
    self_attention = bt.Node("a", tpm.Attention(), ["x", bt.Arrow("x", "causal"), bt.Arrow("x", "causal")], plates=WORD)
    dec = bt.Stack(
        [self_attention, *cross, bt.Node("x", tpm.Add(), ["x", "cross_a", "past"], plates=WORD)],
        prologue,
        [bt.Node("y", tpm.Categorical(3), ["x"], plates=WORD)],
        slices=2,
        name="dec",
    )
    return bt.BNet(bt.Declaration([enc, dec], name="encoder-decoder"))


def positioned() -> bt.BNet:
    """Rotary and relative positions, a sigmoid normaliser and a softmax, a pooled real readout."""
    nodes = [
        bt.Node("bias", tpm.Weight(5), plates=["head"]),
        *projections(heads=True, width=4),
        bt.Node(
            "a",
            tpm.Attention(tpm.Dot(None, rotary=100.0), bias=tpm.Relative(2)),
            ["q", every("k"), every("v"), "bias"],
            plates=HEADS,
        ),
        bt.Node("s", tpm.Attention(tpm.Dot(), tpm.Normaliser("sigmoid")), ["q", every("k"), every("v")], plates=HEADS),
        bt.Node("W_o", tpm.Weight((4, 4)), plates=["head"]),
        bt.Node("both", tpm.Add(), ["a", "s"], plates=HEADS),
        bt.Node("x", tpm.Concat(residual=True), ["W_o", "both", "x"], plates=WORD),
    ]
    epilogue = [
        bt.Node("pool", tpm.Pool("sum"), [every("x")]),
        bt.Node("first", tpm.Add(), [bt.Arrow("x", "first"), bt.Arrow("x", "last"), "pool"]),
        bt.Node("y", tpm.Normal(0.8, dim=2, learnable=True), ["first"]),
    ]
    stack = bt.Stack(nodes, [bt.Node("x", tpm.Given(4), plates=WORD)], epilogue)
    return bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)], name="positioned"))


def grouped(width: int | None = 2) -> bt.BNet:
    """Keys and values for groups of heads, partly rotary positions in bands, attention only to previous words."""
    heads, reach = ["group", "head"], bt.Reach("recent", 1)
    rotary = tpm.Rotary(50.0, width=width, factor=4.0, bands=(0.5, 2.0, 9))
    nodes = [
        bt.Node("norm", tpm.Norm("rms"), ["x"], plates=WORD),
        bt.Node("W_q", tpm.Weight((4, 4)), plates=heads),
        *(bt.Node(f"W_{r}", tpm.Weight((4, 4)), plates=["group"]) for r in "kv"),
        bt.Node("q", tpm.Affine(), ["W_q", "norm"], plates=[*heads, "word"]),
        *(bt.Node(r, tpm.Affine(), [f"W_{r}", "norm"], plates=["group", "word"]) for r in "kv"),
        bt.Node(
            "a",
            tpm.Attention(tpm.Dot(None, rotary=rotary)),
            ["q", bt.Arrow("k", reach), bt.Arrow("v", reach)],
            plates=[*heads, "word"],
        ),
        bt.Node("W_o", tpm.Weight((4, 4)), plates=heads),
        bt.Node("x", tpm.Concat(residual=True, plates=2), ["W_o", "a", "x"], plates=WORD),
    ]
    prologue = [bt.Node("token", tpm.Given(states=3), plates=WORD), bt.Node("x", tpm.Embed(4), ["token"], plates=WORD)]
    readout = bt.Node("y", tpm.Categorical(3), ["x"], plates=WORD)
    stack = bt.Stack(nodes, prologue, [readout], slices=2, vocabulary=VOCABULARY)
    plates = [bt.Plate("group", 2), bt.Plate("head", 3)]
    return bt.BNet(bt.Declaration([stack], plates=plates, name="grouped"))


def started() -> bt.BNet:
    """A learned start vector at the first word."""
    prologue = [
        bt.Node("token", tpm.Given(states=3), plates=WORD),
        bt.Node("embed", tpm.Embed(4), ["token"], plates=WORD),
        bt.Node("start", tpm.Start(0.5), [bt.Arrow("embed", "rest")], plates=WORD),
        bt.Node("position", tpm.Positions(5, 4), plates=WORD),
        bt.Node("x", tpm.Add(), ["start", "position"], plates=WORD),
    ]
    mix = bt.Node("x", tpm.Attention(residual=True), ["q", every("k"), every("v"), "x"], plates=WORD)
    readout = [bt.Node("first", tpm.Add(), [bt.Arrow("x", "first")]), bt.Node("y", tpm.Categorical(2), ["first"])]
    stack = bt.Stack([*projections(), mix], prologue, readout, slices=2, vocabulary=VOCABULARY)
    return bt.BNet(bt.Declaration([stack], name="started"))


def bucketed() -> bt.BNet:
    """A bias by bucketed distance, one node for all slices, and a scaled readout."""
    nodes = [
        *projections(heads=True),
        bt.Node(
            "a",
            tpm.Attention(tpm.Dot(), bias=tpm.Buckets(5, furthest=3, two_sided=False)),
            ["q", every("k"), every("v"), "b"],
            plates=HEADS,
        ),
        bt.Node("W_o", tpm.Weight((4, 4)), plates=["head"]),
        bt.Node("x", tpm.Concat(residual=True), ["W_o", "a", "x"], plates=WORD),
    ]
    prologue = [
        bt.Node("b", tpm.Weight(5), plates=["head"]),
        bt.Node("token", tpm.Given(states=3), plates=WORD),
        bt.Node("x", tpm.Embed(4), ["token"], plates=WORD),
    ]
    readout = [
        bt.Node("scaled", tpm.Multiple(0.5), ["x"], plates=WORD),
        bt.Node("y", tpm.Categorical(3), ["scaled"], plates=WORD),
    ]
    stack = bt.Stack(nodes, prologue, readout, slices=2, vocabulary=VOCABULARY)
    return bt.BNet(bt.Declaration([stack], plates=[bt.Plate("head", 2)], name="bucketed"))


def shared_slices() -> bt.BNet:
    """One set of parameters for all slices, declared both ways: shared nodes, and weights outside the slices."""
    table = ((True, False, True), (True, True, False), (False, False, True))
    mask = bt.Reach("mask", table=table)
    nodes = [
        bt.Node("W_v", tpm.Weight((4, 4)), shared=True),
        bt.Node("q", tpm.Linear(), ["W_q", "x"], plates=WORD),
        bt.Node("v", tpm.Linear(), ["W_v", "x"], plates=WORD),
        bt.Node("a", tpm.Attention(), ["q", bt.Arrow("x", mask), bt.Arrow("v", mask)], plates=WORD),
        bt.Node("x", tpm.Norm(), ["a"], plates=WORD, shared=True),
    ]
    prologue = [bt.Node("x", tpm.Given(4), plates=WORD), bt.Node("W_q", tpm.Weight((4, 4)))]
    return bt.BNet(bt.Declaration([bt.Stack(nodes, prologue, slices=3)], name="shared slices"))


def sprinkler() -> bt.BNet:
    """A Bayesian network without words or stacks: tables over tables."""
    states = tpm.Categorical(2, labels=("no", "yes"))
    nodes = [
        bt.Node("cloudy", states),
        bt.Node("sprinkler", states, ["cloudy"]),
        bt.Node("rain", states, ["cloudy"]),
        bt.Node("wet", tpm.Categorical(3), ["sprinkler", "rain"]),
    ]
    return bt.BNet(bt.Declaration(nodes=nodes, name="sprinkler"))


def chest_clinic() -> bt.BNet:
    """A part of the chest clinic by tables with given numbers, one of them a function of its parents."""
    yes = ("no", "yes")
    nodes = [
        bt.Node("smoke", tpm.Table((0.5, 0.5), yes)),
        bt.Node("lung", tpm.Table(((0.99, 0.01), (0.9, 0.1)), yes, learnable=True, prior=2.0), ["smoke"]),
        bt.Node("tub", tpm.Table((0.95, 0.05), yes)),
        bt.Node("either", tpm.Table.from_function(max, (2, 2), labels=yes), ["tub", "lung"]),
        bt.Node("xray", tpm.Table(((0.95, 0.05), (0.02, 0.98)), yes, learnable=True), ["either"]),
    ]
    return bt.BNet(bt.Declaration(nodes=nodes, name="chest clinic"))


def tagger() -> bt.BNet:
    """A hidden Markov model along the words by tables with zeros: no tag follows itself."""
    tag = tpm.Table(((0.0, 0.5, 0.5), (0.7, 0.0, 0.3), (0.4, 0.6, 0.0)), initial=(0.2, 0.5, 0.3))
    word = tpm.Table(((0.6, 0.3, 0.1), (0.1, 0.8, 0.1), (0.0, 0.3, 0.7)), learnable=True)
    nodes = [bt.Node("tag", tag, [bt.Arrow("tag", "before")], WORD), bt.Node("y", word, ["tag"], WORD)]
    stack = bt.Stack(nodes[:1], [bt.Node("x", tpm.Given(4), plates=WORD)], nodes[1:])
    return bt.BNet(bt.Declaration([stack], name="tagger"))


def sites() -> bt.BNet:
    """A mixture without words: a plate of choices below a choice, and a real readout of each."""
    plates = ["site"]
    nodes = [
        bt.Node("z", tpm.Categorical(2)),
        bt.Node("x", tpm.Categorical(3), ["z"], plates=plates),
        bt.Node("mean", tpm.Select(2), ["x"], plates=plates),
        bt.Node("y", tpm.Normal(0.5), ["mean"], plates=plates),
    ]
    return bt.BNet(bt.Declaration(nodes=nodes, plates=[bt.Plate("site", 2)], name="sites"))


def hidden_states() -> bt.BNet:
    """A hidden Markov model with slices as time: a stack without words."""
    steps = [
        bt.Node("x", tpm.Categorical(2), ["x"], shared=True),
        bt.Node("y", tpm.Categorical(3), [bt.Arrow("x", slice="next")], shared=True),
    ]
    stack = bt.Stack(steps, [bt.Node("x", tpm.Categorical(2))], slices=3)
    return bt.BNet(bt.Declaration([stack], name="hidden states"))


def no_slices() -> bt.BNet:
    """A stack without slices: a readout of the given words."""
    prologue = [bt.Node("token", tpm.Given(states=3), plates=WORD), bt.Node("x", tpm.Embed(4), ["token"], plates=WORD)]
    readout = bt.Node("y", tpm.Categorical(2), ["x"], plates=WORD)
    return bt.BNet(bt.Declaration([bt.Stack([], prologue, [readout], vocabulary=VOCABULARY)], name="no slices"))


def chapter(**options: object) -> Callable[[], bt.BNet]:
    """The chapter's net with these options."""
    return lambda: bt.bayesuvius(4, **options)  # type: ignore[arg-type]


def vanilla(kind: str, **options: object) -> Callable[[], bt.BNet]:
    """A small vanilla transformer of this kind."""
    sizes = {"heads": 2, "slices": 2, "hidden": 6, **options}
    return lambda: getattr(bt, kind)(4, **sizes)


Y = {"y_0": 1, "y_2": 0}
R = {"y_0": (0.5, -0.2, 0.1, 0.9), "y_2": (0.0, 0.3, -0.4, 0.2)}
VOCABULARY = ("the", "cat", "sat")

CASES: tuple[Case, ...] = (
    Case("chapter", chapter(heads=3)),
    Case("chapter, two slices", chapter(heads=2, slices=2, observe=tpm.Categorical(3)), evidence=Y),
    Case("chapter, real", chapter(heads=3, residual=True, observe=tpm.Normal(0.5)), evidence=R),
    Case(
        "chapter, words",
        chapter(vocabulary=VOCABULARY, observe=tpm.Categorical(3), scale=None, mask="causal"),
        evidence={"y_1": "sat"},
    ),
    Case(
        "chapter, widths", chapter(key_dim=2, value_dim=3, observe=tpm.Categorical(2, pool="mean")), evidence={"y": 1}
    ),
    Case("codebook", chapter(heads=2, atoms=(3, 2, 2), observe=tpm.Categorical(3), prior=0.5), evidence=Y),
    Case(
        "codebook, two slices", chapter(heads=2, atoms=2, slices=2, residual=True, observe=tpm.Normal(0.4)), evidence=R
    ),
    Case("corpus", chapter(heads=3, per="corpus", observe=tpm.Normal(1.0, dim=2)), evidence={"y_1": (0.2, -0.3)}),
    Case("slice", chapter(heads=2, slices=3, per="slice", observe=tpm.Categorical(3)), evidence=Y),
    Case(
        "slice, codebook",
        chapter(heads=2, slices=2, atoms=(2, 1, 2), per="slice", observe=tpm.Categorical(3)),
        evidence=Y,
    ),
    Case("word", chapter(heads=3, per="word", observe=tpm.Categorical(3), mask="causal"), evidence=Y),
    Case(
        "word, codebook",
        chapter(heads=2, atoms=2, per="word", residual=True, observe=tpm.Categorical(3)),
        "cat sat",
        evidence={"y_1": 2},
    ),
    Case("word, two slices", chapter(heads=2, slices=2, per="word", observe=tpm.Categorical(2)), "cat sat", {"y_0": 1}),
    Case("concat", chapter(heads=3, combine="concat", residual=True, observe=tpm.Categorical(3)), evidence=Y),
    Case("one word", chapter(heads=2, observe=tpm.Categorical(3)), "cat", {"y_0": 2}),
    Case("encoder, post-norm", lambda: encoder(pre=False), "the cat sat", {"y_0": "cat"}),
    Case("encoder, pre-norm", lambda: encoder(pre=True), "mat on the", {"y_2": 4}),
    Case(
        "three stacks",
        three_stacks,
        {"enc": "the cat", "side": "sat on mat", "dec": "a b"},
        {"label": 1, "dec_y_0": (0.1, 0.2, 0.3, 0.4)},
    ),
    Case("two selectors", two_selectors, evidence=Y),
    Case("gated", gated),
    Case("recurrent", recurrent, evidence={"y_1": (0.1, 0.2)}),
    Case("recurrent, rnn", lambda: bt.recurrent(4, cell="rnn", features=2, slices=2), evidence={"y_1": (0.1, 0.2)}),
    Case("recurrent, lstm", lambda: bt.recurrent(4, slices=2, vocabulary=VOCABULARY), evidence={"y_0": "sat"}),
    Case("recurrences", recurrences, evidence={"y_2": (0.1, 0.2, -0.3)}),
    Case("geometric", lambda: bt.geometric(4, blocks=2)),
    Case("geometric, add", lambda: bt.geometric(4, blocks=2, add=True)),
    Case("integrator", lambda: bt.geometric(4, heads=2, slices=1, add=True, observe=tpm.Normal(0.5)), evidence=R),
    Case("cayley", lambda: bt.volume_preserving(4, slices=1)),
    Case(
        "cayley, arbitrary",
        lambda: bt.volume_preserving(4, attention="arbitrary", observe=tpm.Categorical(3)),
        evidence=Y,
    ),
    Case("triangular", lambda: bt.volume_preserving(4, slices=1, attention=None, observe=tpm.Normal(0.5)), evidence=R),
    Case("bucketed", bucketed, evidence={"y_1": "sat"}),
    Case("grouped", grouped, evidence={"y_1": "sat"}),
    Case("marginal", marginal, evidence={"y_2": 1, "y_0": 0}),
    Case("hidden Markov", hidden_markov, evidence={"y_1": (0.1, 0.2), "y_2": (0.5, -0.4)}),
    Case("windowed selectors", windowed_selectors, evidence=Y),
    Case("backward chain", backward_chain, evidence={"y_0": (0.1, 0.2, -0.3), "y_2": (0.5, -0.4, 0.1)}),
    Case("factorial chains", factorial_chains, "the cat", evidence={"e_0_0": 1, "e_0_1": 2}),
    Case("experts", experts, "the cat", evidence={"y_0": (0.3, 0.1, -0.2, 0.4)}),
    Case("encoder-decoder", encoder_decoder, {"enc": "the cat sat", "dec": "le chat"}, {"dec_y_0": 1}),
    Case("positioned", positioned, evidence={"y": (0.1, -0.2)}),
    Case("shared slices", shared_slices),
    Case("started", started, evidence={"y": 1}),
    Case(
        "vanilla encoder",
        vanilla("encoder", positions=tpm.Sinusoid(4, 50.0, first=1), readout=tpm.Normal(0.5)),
        evidence=R,
    ),
    Case(
        "vanilla encoder, masked word",
        vanilla("encoder", slices=1, norm="pre", vocabulary=VOCABULARY, readout="word", transform="gelu", bias=False),
        evidence={"y_1": "sat"},
    ),
    Case(
        "vanilla encoder, class",
        vanilla(
            "encoder", slices=1, positions=None, dropout=0.0, readout=tpm.Categorical(2), pool="first", transform="tanh"
        ),
        evidence={"y": 1},
    ),
    Case("vanilla decoder, features", vanilla("decoder", slices=1, features=2), evidence={"y_1": (0.4, -0.1)}),
    Case("vanilla decoder, causal", vanilla("decoder", vocabulary=VOCABULARY), evidence={"y_0": "cat", "y_2": 0}),
    Case(
        "vanilla decoder, learned",
        vanilla("decoder", slices=1, vocabulary=3, positions="learned", words=4, norm="pre", tie=False),
        [2, 0, 1],
        {"y_1": 2},
    ),
    Case(
        "vanilla encoder-decoder",
        vanilla("encoder_decoder", slices=1, vocabulary=VOCABULARY),
        {"enc": "the cat sat", "dec": "sat the"},
        {"dec_y_1": "cat"},
    ),
    Case(
        "vanilla encoder-decoder, pre-norm",
        vanilla(
            "encoder_decoder",
            slices=1,
            norm="pre",
            vocabulary=VOCABULARY,
            target_vocabulary=("le", "chat"),
            mask={"cross": ((True, False, True), (False, True, True))},
        ),
        {"enc": "the cat sat", "dec": "le chat"},
        {"dec_y_0": "chat"},
    ),
    Case(
        "neurons",
        lambda: bt.decoder(4, heads=2, slices=1, hidden=6, norm="pre", vocabulary=VOCABULARY).expose_neurons(),
        evidence={"y_1": "sat"},
    ),
    Case("sprinkler", sprinkler, None, {"wet": 1}),
    Case("tagger", tagger, evidence={"y_0": 1, "y_2": 0}),
    Case("chest clinic", chest_clinic, None, {"xray": 1}),
    Case("sites", sites, None, {"y_1": (0.3, -0.4)}),
    Case("hidden states", hidden_states, None, {"y_0": 1, "y_2": 2}),
    Case("no slices", no_slices, evidence={"y_1": 1}),
    Case("program", lambda: programs.get_program("backup").compiled.program.net, "a b a"),
)

TPMS = tuple(
    kind
    for name in tpm.__all__
    if isinstance(kind := getattr(tpm, name), type) and issubclass(kind, tpm.TPM) and kind is not tpm.TPM
)
