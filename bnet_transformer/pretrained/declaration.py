"""From a model's sizes and habits to its declaration: words, the slices of the vanilla transformer, readouts.

x_0 = norm(E[token] + position + segment)      post-norm families; pre-norm ones add without a norm
"""

from __future__ import annotations

from collections.abc import Collection

from bnet_transformer.axes import Reach
from bnet_transformer.models._sublayers import TABLE, WORD, Sublayers
from bnet_transformer.network import Arrow, Declaration, Node, Stack
from bnet_transformer.pretrained.family import Family, Options
from bnet_transformer.tpm import Activation, Add, Affine, Categorical, Embed, Given, Linear, Pool, Positions

SEGMENT = "segment"


def options_to_declaration(
    family: Family,
    options: Options,
    vocabulary: tuple[str, ...] | None,
    extras: Collection[str] = (),
) -> Declaration:
    """The declaration of a model; `extras` are nodes of the whole sentence: the model's `pooler`, a mean `pool`."""
    net = Sublayers(
        options.dim,
        options.heads,
        options.hidden,
        family.norm,
        None,
        options.activation,
        bias=True,
        dropout=0.0,
        eps=options.eps,
    )
    tied = is_tied(options)
    stack = Stack(
        net.slice(Reach("causal" if options.causal else "every")),
        _words(family, options, net, tied=tied),
        [*net.finish(), *_observed(family, options, net, tied=tied)],
        slices=options.slices,
        vocabulary=vocabulary,
    )
    outside = [net.ends.table(options.states)] if tied else []
    if "pooler" in extras:
        outside += _pooled(net, "pooler", "tanh")
    if "mean" in extras:
        outside.append(Node("embedding", Pool("mean"), [Arrow(net.out, "every")]))
    return Declaration([stack], outside, [net.plate], name=family.name)


def is_tied(options: Options) -> bool:
    """True where one table serves the embeddings and the readout."""
    return options.tied and options.readout == "word"


def _words(family: Family, options: Options, net: Sublayers, *, tied: bool) -> list[Node]:
    """The first state: embedding, position and segment, and their norm where the family has one."""
    last = "add" if family.normed_words else "x"
    nodes = [
        Node("token", Given(states=options.states), plates=WORD),
        Node("embed", Embed(options.dim, tied=tied), [TABLE, "token"] if tied else ["token"], WORD),
        Node("position", Positions(options.length, options.dim), plates=WORD),
    ]
    if options.segments is not None:
        nodes += [
            Node(SEGMENT, Given(states=options.segments, default=0), plates=WORD),
            Node("segment_embed", Embed(options.dim), [SEGMENT], WORD),
        ]
    summed = ["embed", "position"] + (["segment_embed"] if options.segments is not None else [])
    nodes.append(Node(last, Add(), summed, WORD))
    return nodes if last == "x" else [*nodes, Node("x", net.normed, [last], WORD)]


def _observed(family: Family, options: Options, net: Sublayers, *, tied: bool) -> list[Node]:
    """The readout: a word of the vocabulary or a tag for each word, or the class of the sentence."""
    if options.readout == "word":
        return _next_word(family, options, net, tied=tied)
    count = len(options.labels)
    label = Categorical(count, affine=False, labels=options.labels)
    if options.readout == "tag":
        return [Node("tags", Affine(count), [net.out], WORD), Node("y", label, ["tags"], WORD)]
    if options.readout == "class":
        pooled = _pooled(net, *family.classifier)
        return [*pooled, Node("classifier", Affine(count), ["pooled"]), Node("y", label, ["classifier"])]
    return []


def _pooled(net: Sublayers, dense: str, activation: str) -> list[Node]:
    """`s(W x + b)` of the first word."""
    return [
        Node("first", Add(), [Arrow(net.out, "first")]),
        Node(dense, Affine(net.dim), ["first"]),
        Node("pooled", Activation(activation), [dense]),
    ]


def _next_word(family: Family, options: Options, net: Sublayers, *, tied: bool) -> list[Node]:
    """The word of the vocabulary at each place, or that follows it."""
    nodes: list[Node] = []
    source = net.out
    if "dense" in family.modules:
        nodes = [
            Node("dense", Affine(options.dim), [source], WORD),
            Node("transform", Activation(family.transform or options.activation), ["dense"], WORD),
            Node("transform_norm", net.normed, ["transform"], WORD),
        ]
        source = "transform_norm"
    own = None if tied else options.states
    logits = Affine(own) if family.logits_bias else Linear(own)
    return [
        *nodes,
        Node("logits", logits, [TABLE, source] if tied else [source], WORD),
        Node("y", Categorical(options.states, affine=False), ["logits"], WORD),
    ]
