"""From a model's sizes and habits to its declaration: words, the slices of the vanilla transformer, readouts.

x_0 = norm(E[token] + position + segment)      post-norm families; pre-norm ones add without a norm
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from bnet_transformer.models._sublayers import TABLE, WORD, Sublayers
from bnet_transformer.network import Arrow, Declaration, Node, Stack
from bnet_transformer.pretrained.family import Family, Options
from bnet_transformer.tpm import (
    Activation,
    Add,
    Affine,
    Bias,
    Categorical,
    Dot,
    Embed,
    Given,
    Linear,
    Patches,
    Pool,
    Positions,
    Start,
    Weight,
)

SEGMENT = "segment"


def options_to_declaration(
    family: Family,
    options: Options,
    vocabulary: tuple[str, ...] | None,
    extras: Collection[str] = (),
) -> Declaration:
    """The declaration of a model; `extras` are nodes of the whole sentence: the model's `pooler`, a mean `pool`."""
    score = Dot(None, options.rotary)
    net = sublayers(family, options, options.hidden, gated=family.gated, score=score, relative=family.relative)
    tied = is_tied(options)
    slice_ = net.slice(options.reach)
    slice_, once = shared(slice_) if family.shared else (slice_, [])
    stack = Stack(
        slice_,
        _words(family, options, net, tied=tied),
        [*net.finish(), *_observed(family, options, net, tied=tied)],
        slices=options.slices,
        vocabulary=vocabulary,
    )
    outside = [Node(TABLE, Weight((options.states, options.embedding)))] if tied else []
    outside += once
    if family.relative is not None:
        outside.append(Node("b", Weight((family.relative.width,)), plates=["head"]))
    if "pooler" in extras:
        outside += _pooled(net, "pooler", "tanh")
    if "mean" in extras:
        outside.append(Node("embedding", Pool("mean"), [Arrow(net.out, "every")]))
    return Declaration([stack], outside, net.plates, name=family.name)


def sublayers(
    family: Family, options: Options, hidden: int, *, gated: bool, score: Dot, relative: Bias | None
) -> Sublayers:
    """The sublayers of a stack."""
    return Sublayers(
        options.dim,
        heads=options.heads,
        hidden=hidden,
        norm=options.norm,
        activation=options.activation,
        eps=options.eps,
        form=family.form,
        gated=gated,
        key_dim=options.key_dim,
        score=score,
        groups=options.groups,
        unbiased=options.unbiased,
        relative=relative,
    )


def is_tied(options: Options) -> bool:
    """True where one table serves the embeddings and the readout."""
    return options.tied and options.readout == "word"


def shared(nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The nodes of a slice with the same parameters in all slices, and its weights as nodes that all slices read."""
    once = [node for node in nodes if isinstance(node.tpm, Weight)]
    return [replace(node, shared=True) for node in nodes if node not in once], once


def _words(family: Family, options: Options, net: Sublayers, *, tied: bool) -> list[Node]:
    """The first state: embedding, position and segment, and their norm where the family has one; then, where words
    are narrower than states, a map of them."""
    if options.image is not None:
        return _image_words(options.image, options.dim)
    if options.rotary is not None:
        table = Embed(options.dim, tied=tied)
        token = Node("token", Given(states=options.states), plates=WORD)
        return [token, Node("x", table, [TABLE, "token"] if tied else ["token"], WORD)]
    last, width = "add" if family.normed_words else "x", options.embedding
    nodes = [
        Node("token", Given(states=options.states), plates=WORD),
        Node("embed", Embed(width, tied=tied), [TABLE, "token"] if tied else ["token"], WORD),
        Node("position", Positions(options.length, width), plates=WORD),
    ]
    if options.segments is not None:
        nodes += [
            Node(SEGMENT, Given(states=options.segments, default=0), plates=WORD),
            Node("segment_embed", Embed(width), [SEGMENT], WORD),
        ]
    summed = ["embed", "position"] + (["segment_embed"] if options.segments is not None else [])
    nodes.append(Node(last, Add(), summed, WORD))
    if "embed_norm" in family.modules:
        return [*nodes, Node("embed_norm", net.normed, [last], WORD), Node("x", Affine(net.dim), ["embed_norm"], WORD)]
    return nodes if last == "x" else [*nodes, Node("x", net.normed, [last], WORD)]


def _image_words(image: Patches, dim: int) -> list[Node]:
    """The first state of the words of an image: `x_0_0 = u + position_0`, `x_0_i = W patch_i + b + position_i`."""
    return [
        Node("patch", Given(image.features, image=image), plates=WORD),
        Node("embed", Affine(dim), ["patch"], WORD),
        Node("start", Start(), [Arrow("embed", "rest")], WORD),
        Node("position", Positions(image.words, dim), plates=WORD),
        Node("x", Add(), ["start", "position"], WORD),
    ]


def _observed(family: Family, options: Options, net: Sublayers, *, tied: bool) -> list[Node]:
    """The readout: a word of the vocabulary or a tag for each word, or the class of the sentence."""
    if options.readout == "word":
        return _next_word(family, options, net, tied=tied)
    count = len(options.labels)
    label = Categorical(count, affine=False, labels=options.labels)
    if options.readout == "tag":
        return [Node("tags", Affine(count), [net.out], WORD), Node("y", label, ["tags"], WORD)]
    if options.readout == "class":
        pooled = _pooled(net, *family.classifier) if family.classifier else _first(net)
        return [*pooled, Node("classifier", Affine(count), [pooled[-1].role]), Node("y", label, ["classifier"])]
    return []


def _first(net: Sublayers) -> list[Node]:
    """What leaves the first word."""
    return [Node("first", Add(), [Arrow(net.out, "first")])]


def _pooled(net: Sublayers, dense: str, activation: str) -> list[Node]:
    """`s(W x + b)` of the first word."""
    return [
        *_first(net),
        Node(dense, Affine(net.dim), ["first"]),
        Node("pooled", Activation(activation), [dense]),
    ]


def _next_word(family: Family, options: Options, net: Sublayers, *, tied: bool) -> list[Node]:
    """The word of the vocabulary at each place, or that follows it."""
    nodes: list[Node] = []
    source = net.out
    if "dense" in family.modules:
        nodes = [
            Node("dense", Affine(options.embedding), [source], WORD),
            Node("transform", Activation(family.transform or options.activation), ["dense"], WORD),
            Node("transform_norm", net.normed, ["transform"], WORD),
        ]
        source = "transform_norm"
    return nodes + word_readout(options.states, source, tied=tied, biased=family.logits_bias)


def word_readout(states: int, source: str, *, tied: bool, biased: bool) -> list[Node]:
    """A word of the vocabulary at each place, from its own matrix or from the table of the words."""
    logits = (Affine if biased else Linear)(None if tied else states)
    return [
        Node("logits", logits, [TABLE, source] if tied else [source], WORD),
        Node("y", Categorical(states, affine=False), ["logits"], WORD),
    ]
