"""From a model's sizes and habits to its declaration: words, the slices of the vanilla transformer, readouts.

    x_0 = norm(E[token] + position + segment)       post-norm families; pre-norm ones add without a norm
    dec_y_i = softmax_w(E_w . s dec_x_i + b_w)      E one table for the words of both stacks and the logits, or several

The words of a decoder beside an encoder are the outputs shifted right by one (`bt.models.shift_right`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from bnet_transformer._core.checks import check_int
from bnet_transformer._core.naming import Reach
from bnet_transformer.declare import Arrow, Declaration, Node, Stack
from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.models._sublayers import TABLE, WORD, Sublayers
from bnet_transformer.pretrained.family import Family, Options, is_causal
from bnet_transformer.pretrained.keys import Weights, are_equal, bias_of, short, weight_keys
from bnet_transformer.tpm import (
    Activation,
    Add,
    Affine,
    Bias,
    Buckets,
    Categorical,
    Dot,
    Embed,
    EvalContext,
    Given,
    Linear,
    Patches,
    Pool,
    Positions,
    Scale,
    Sinusoid,
    Start,
    Weight,
)

SEGMENT = "segment"


def options_to_declaration(
    family: Family, options: Options, vocabulary: tuple[str, ...] | None, extras: Collection[str] = ()
) -> Declaration:
    """The declaration of a model; `extras` are nodes of the whole sentence: the model's `pooler`, a mean `pool`."""
    score = Dot(None, options.rotary)
    net = sublayers(family, options, options.hidden, gated=family.gated, score=score, relative=family.relative)
    tied = is_tied(options)
    slice_ = net.slice(options.reach)
    once: list[Node] = []
    if family.shared:  # the same parameters in all slices, and weights as nodes that all slices read
        once = [node for node in slice_ if isinstance(node.tpm, Weight)]
        slice_ = [replace(node, shared=True) for node in slice_ if node not in once]
    stack = Stack(
        slice_,
        _one_stack_words(family, options, net, tied=tied),
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


def settled(family: Family, options: Options, weights: Weights) -> Options:
    """The options as the weights say too: whether one table serves the embeddings and the readout."""
    if family.settle is not None:
        return family.settle(family, options, weights)
    # Beside another table in the weights a config that says tied is wrong: transformers does not tie them either.
    tables = [family.weight_of(part) for part in ("embed", "logits") if is_tied(options)]
    return replace(options, tied=are_equal(family, weights, *tables)) if tables else options


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


def _one_stack_words(family: Family, options: Options, net: Sublayers, *, tied: bool) -> list[Node]:
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
        return _word_of_one_stack(family, options, net, tied=tied)
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
    return [*_first(net), Node(dense, Affine(net.dim), ["first"]), Node("pooled", Activation(activation), [dense])]


def _word_of_one_stack(family: Family, options: Options, net: Sublayers, *, tied: bool) -> list[Node]:
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


# families of an encoder and a decoder

# Models of both stacks; an encoder alone has nothing of what is read here.
READOUTS = {"ForConditionalGeneration": "word", "MTModel": "word", "EncoderModel": "encoder", "Model": None}


@dataclass(frozen=True, kw_only=True)
class Both(Options):
    """The options of an encoder and a decoder; those of `Options` are the encoder's where they differ, but for `reach`.

    `apart`: each stack has a vocabulary of its own.
    """

    decoder: Mapping[str, int]
    embed_scale: float
    logits_scale: float
    gated: bool
    buckets: tuple[int, int] | None
    one_table: bool = True
    logits_bias: bool = True
    apart: bool = False


@dataclass(frozen=True, kw_only=True)
class TwoStacks(Family):
    """A family of an encoder and a decoder.

    `decoder` maps the options that the decoder has of its own to the names of the config. `translate` adds to a config
    what its config class derives from other settings. `positions` are "learned", "sinusoidal" or None; a bias of the
    scores by distance, where the config has `buckets`, is one node of each stack. Parts of a stack start with its name.
    """

    decoder: Mapping[str, str]
    positions: str | None
    score: Dot = Dot(None)  # noqa: RUF009  (frozen)
    translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    readouts: Mapping[str, str | None] = field(default_factory=lambda: READOUTS)
    declare: Callable[..., Declaration] | None = field(default_factory=lambda: options_to_two_stacks)
    settle: Callable[..., Options] | None = field(default_factory=lambda: settled_stacks)

    def canonical(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config with one name for each setting, with those that its config class derives from others."""
        return super().canonical(self.translate(config))

    def options(self, config: Mapping[str, Any], architecture: str | None, readout: str | None) -> Both:
        """What a config says, in our words."""
        config = self.canonical(config)
        told, start = super().options(config, architecture, readout), self.said(config, "start")
        reach = Reach("causal" if is_causal(config) else "every")
        told = replace(told, reach=reach, labels=())  # it observes words alone
        if start is not None:
            told = replace(told, start=check_int("decoder_start_token_id of the config", start, minimum=0))
        apart = "one_table" in self.names and not config.get(self.names["one_table"], True)
        one_table = told.tied and not apart
        return Both(
            **{each.name: getattr(told, each.name) for each in fields(told)},
            decoder=self._decoder(config, told, one_table=one_table),
            embed_scale=told.dim**0.5 if self._says(config, "scaled_words") else 1.0,
            logits_scale=told.dim**-0.5 if self._says(config, "scaled_logits") else 1.0,
            gated=self._says(config, "gated_ffn"),
            buckets=(self.size(config, "buckets"), self.size(config, "furthest")) if "buckets" in self.names else None,
            one_table=one_table,
            apart=apart,
        )

    def _decoder(self, config: Mapping[str, Any], told: Options, *, one_table: bool) -> dict[str, int]:
        """The sizes of the decoder, those of the encoder where the config tells no others."""
        found = {}
        for option in ("slices", "hidden", "heads", "states"):
            name = self.decoder.get(option)
            value = None if name is None or (option == "states" and one_table) else config.get(name)
            found[option] = getattr(told, option) if value is None else check_int(f"{name} of the config", value)
        if found["heads"] != told.heads:
            what = f"{self.decoder['heads']} of the config"
            raise BNetError(what, expected=f"{told.heads}, as many heads as the encoder's", actual=found["heads"])
        return found

    def _says(self, config: Mapping[str, Any], option: str) -> bool:
        return option in self.names and bool(self.said(config, option))


def settled_stacks(family: TwoStacks, options: Both, weights: Weights) -> Both:
    """Which tables are one, as the weights say too; whether the logits have a bias; and that sinusoids are such."""
    if family.positions == "sinusoidal":
        for stack in ("enc", "dec"):
            _check_sinusoids(family, options.dim, weights, f"{stack}_sinusoids")
    keys, present = _table_keys(family, options, weights), weight_keys(family, weights)
    biases = {short(family, key) for key in bias_of(family.where("logits"))[0]}
    tables = {family.weight_of(part): key for part, key in keys.items() if family.weight_of(part) != key}
    enc, dec, logits = (keys.get(part) for part in ("enc_embed", "dec_embed", "logits"))
    return replace(
        options,
        one_table=options.one_table and are_equal(family, weights, enc, dec),
        tied=options.tied and are_equal(family, weights, dec, logits),
        logits_bias=family.logits_bias and not biases.isdisjoint(present),
        tables=tables,
    )


def _table_keys(family: TwoStacks, options: Both, weights: Weights) -> dict[str, str]:
    """The key of the table that each part reads; none for a part whose table is missing.

    A part reads its own table. `transformers` ties a table that a file lacks to `shared`, which no stack reads itself,
    and where that is missing too, to one of the tables that are tied with it: which one is clear where they are equal.
    """
    present = weight_keys(family, weights)
    tied = ("dec_embed", "logits") if options.apart else ("embed", "enc_embed", "dec_embed", "logits")
    held = [key for part in tied if options.tied and (key := family.weight_of(part)) in present]
    found = {}
    for part in ("enc_embed", "dec_embed", *(["logits"] if options.readout == "word" else [])):
        own = family.weight_of(part)
        if own in present:
            found[part] = own
        elif part in tied and held:
            shared = family.weight_of("embed")
            if held[0] != shared and not all(are_equal(family, weights, held[0], key) for key in held):
                wanted = f"{own}, or one table in place of it and of {shared}"
                raise FileError(weights.where, expected=wanted, actual=f"{', '.join(held)}, which differ")
            found[part] = held[0]
    return found


def _check_sinusoids(family: TwoStacks, dim: int, weights: Weights, part: str) -> None:
    """Refuse a table of positions, where the weights hold one, that is not of sinusoids to its own precision."""
    present, key = weight_keys(family, weights), family.weight_of(part) if part in family.modules else ""
    if key not in present:
        return
    table = weights.tensor(present[key])
    made = _sinusoid(dim).value(EvalContext(word=torch.arange(len(table)), dtype=torch.float64))
    close = 4 * max(torch.finfo(table.dtype).eps, torch.finfo(torch.float32).eps)
    if table.shape != made.shape or not torch.allclose(table.double(), made.to(table.device), rtol=0, atol=close):
        raise FileError(f"{weights.where}: {family.where(part).key}", expected="sinusoids", actual="other positions")


def options_to_two_stacks(
    family: TwoStacks, options: Both, vocabulary: tuple[str, ...] | None, extras: Collection[str] = ()
) -> Declaration:
    """The declaration of an encoder and a decoder that reads its last state."""
    shared = options.one_table or is_tied(options)
    states = {"enc": options.states, "dec": options.decoder["states"]}
    stacks = []
    for name in ("enc", "dec"):
        relative = None if options.buckets is None else Buckets(*options.buckets, two_sided=name == "enc")
        hidden = options.hidden if name == "enc" else options.decoder["hidden"]
        net = sublayers(family, options, hidden, gated=options.gated, score=family.score, relative=relative)
        reaches = [Reach("every")] if name == "enc" else [options.reach, Reach("every")]
        tied = options.one_table or (shared and name == "dec")
        observed = _next_word(options, net) if name == "dec" and options.readout == "word" else []
        named = len(vocabulary or ()) == states[name] and not (name == "dec" and options.apart)
        stacks.append(
            Stack(
                net.slice(*reaches),
                _words(family, options, net, states[name], tied=tied),
                [*net.finish(), *observed],
                slices=options.slices if name == "enc" else options.decoder["slices"],
                name=name,
                vocabulary=vocabulary if named else None,
            )
        )
    table = [Node(TABLE, Weight((states["dec"], options.dim)))] if shared else []
    return Declaration(stacks, table, net.plates, name=family.name)


def _words(family: TwoStacks, options: Both, net: Sublayers, states: int, *, tied: bool) -> list[Node]:
    """The first state of a stack: embedding and position, and their norm where the family has one; and the bias."""
    table = Embed(options.dim, scale=options.embed_scale, tied=tied)
    read = [TABLE, "token"] if tied else ["token"]
    nodes = [Node("token", Given(states=states), plates=WORD)]
    if net.relative is not None:
        nodes.append(Node("b", Weight((net.relative.width,)), plates=["head"]))
    if family.positions is None:
        return [*nodes, Node("x", table, read, WORD)]
    learned = family.positions == "learned"
    position = Positions(options.length, options.dim) if learned else _sinusoid(options.dim)
    last = "add" if family.normed_words else "x"
    nodes += [
        Node("embed", table, read, WORD),
        Node("position", position, plates=WORD),
        Node(last, Add(), ["embed", "position"], WORD),
    ]
    return [*nodes, Node("x", net.normed, ["add"], WORD)] if family.normed_words else nodes


def _sinusoid(dim: int) -> Sinusoid:
    """Sines in the first half of the features, cosines in the second."""
    return Sinusoid(dim, halves=True, rounded=True)


def _next_word(options: Both, net: Sublayers) -> list[Node]:
    """The output at each place of the decoder."""
    nodes, source = [], net.out
    if options.logits_scale != 1:
        nodes, source = [Node("scaled", Scale(options.logits_scale), [net.out], WORD)], "scaled"
    states, biased = options.decoder["states"], options.logits_bias
    return nodes + word_readout(states, source, tied=is_tied(options), biased=biased)
