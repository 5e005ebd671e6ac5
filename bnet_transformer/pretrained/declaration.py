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
from bnet_transformer.models._builders import TABLE, WORD, BlockBuilder
from bnet_transformer.pretrained.family import ModelFamily, ModelOptions, is_causal
from bnet_transformer.pretrained.weight_mapping import (
    StateDict,
    are_tensors_equal,
    canonical_key,
    index_keys,
    locate_bias,
)
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

SEGMENT_ROLE = "segment"


def options_to_declaration(
    family: ModelFamily, options: ModelOptions, vocabulary: tuple[str, ...] | None, extras: Collection[str] = ()
) -> Declaration:
    """The declaration of a model; `extras` are nodes of the whole sentence: the model's `pooler`, a mean `pool`."""
    score = Dot(None, options.rotary)
    net = make_builder(
        family, options, options.hidden, gated=family.gated, score=score, relative_bias=family.relative_bias
    )
    tied = has_tied_readout(options)
    slice_ = net.build_slice(options.reach)
    once: list[Node] = []
    if family.shared:  # the same parameters in all slices, and weights as nodes that all slices read
        once = [node for node in slice_ if isinstance(node.tpm, Weight)]
        slice_ = [replace(node, shared=True) for node in slice_ if node not in once]
    stack = Stack(
        slice_,
        _build_embedding(family, options, net, tied=tied),
        [*net.build_final_norm(), *_build_readout(family, options, net, tied=tied)],
        slices=options.slices,
        vocabulary=vocabulary,
    )
    outside = [Node(TABLE, Weight((options.states, options.embedding_dim)))] if tied else []
    outside += once
    if family.relative_bias is not None:
        outside.append(Node("b", Weight((family.relative_bias.width,)), plates=["head"]))
    if "pooler" in extras:
        outside += _build_pooler(net, "pooler", "tanh")
    if "mean" in extras:
        outside.append(Node("embedding", Pool("mean"), [Arrow(net.output_role, "every")]))
    return Declaration([stack], outside, net.plates, name=family.name)


def resolve_options(family: ModelFamily, options: ModelOptions, weights: StateDict) -> ModelOptions:
    """The options as the weights say too: whether one table serves the embeddings and the readout."""
    if family.resolve_options is not None:
        return family.resolve_options(family, options, weights)
    # Beside another table in the weights a config that says tied is wrong: transformers does not tie them either.
    tables = [family.get_weight_key(part) for part in ("embed", "logits") if has_tied_readout(options)]
    return replace(options, tied=are_tensors_equal(family, weights, *tables)) if tables else options


def make_builder(
    family: ModelFamily, options: ModelOptions, hidden: int, *, gated: bool, score: Dot, relative_bias: Bias | None
) -> BlockBuilder:
    """The sublayers of a stack."""
    return BlockBuilder(
        options.dim,
        heads=options.heads,
        hidden=hidden,
        norm=options.norm,
        activation=options.activation,
        eps=options.eps,
        norm_type=family.norm_type,
        gated=gated,
        key_dim=options.key_dim,
        score=score,
        groups=options.groups,
        parts_without_bias=options.unbiased,
        relative_bias=relative_bias,
    )


def has_tied_readout(options: ModelOptions) -> bool:
    """True where one table serves the embeddings and the readout."""
    return options.tied and options.readout == "word"


def _build_embedding(family: ModelFamily, options: ModelOptions, builder: BlockBuilder, *, tied: bool) -> list[Node]:
    """The first state: embedding, position and segment, and their norm where the family has one; then, where words
    are narrower than states, a map of them."""
    if options.image is not None:
        return _build_patch_embedding(options.image, options.dim)
    if options.rotary is not None:
        table = Embed(options.dim, tied=tied)
        token = Node("token", Given(states=options.states), plates=WORD)
        return [token, Node("x", table, [TABLE, "token"] if tied else ["token"], WORD)]
    last, width = "add" if family.has_embed_norm else "x", options.embedding_dim
    nodes = [
        Node("token", Given(states=options.states), plates=WORD),
        Node("embed", Embed(width, tied=tied), [TABLE, "token"] if tied else ["token"], WORD),
        Node("position", Positions(options.num_positions, width), plates=WORD),
    ]
    if options.segments is not None:
        nodes += [
            Node(SEGMENT_ROLE, Given(states=options.segments, default=0), plates=WORD),
            Node("segment_embed", Embed(width), [SEGMENT_ROLE], WORD),
        ]
    summed = ["embed", "position"] + (["segment_embed"] if options.segments is not None else [])
    nodes.append(Node(last, Add(), summed, WORD))
    if "embed_norm" in family.modules:
        return [
            *nodes,
            Node("embed_norm", builder.norm_tpm, [last], WORD),
            Node("x", Affine(builder.dim), ["embed_norm"], WORD),
        ]
    return nodes if last == "x" else [*nodes, Node("x", builder.norm_tpm, [last], WORD)]


def _build_patch_embedding(image: Patches, dim: int) -> list[Node]:
    """The first state of the words of an image: `x_0_0 = u + position_0`, `x_0_i = W patch_i + b + position_i`."""
    return [
        Node("patch", Given(image.features, image=image), plates=WORD),
        Node("embed", Affine(dim), ["patch"], WORD),
        Node("start", Start(), [Arrow("embed", "rest")], WORD),
        Node("position", Positions(image.words, dim), plates=WORD),
        Node("x", Add(), ["start", "position"], WORD),
    ]


def _build_readout(family: ModelFamily, options: ModelOptions, builder: BlockBuilder, *, tied: bool) -> list[Node]:
    """The readout: a word of the vocabulary or a tag for each word, or the class of the sentence."""
    if options.readout == "word":
        return _build_lm_head(family, options, builder, tied=tied)
    count = len(options.labels)
    label = Categorical(count, affine=False, labels=options.labels)
    if options.readout == "tag":
        return [Node("tags", Affine(count), [builder.output_role], WORD), Node("y", label, ["tags"], WORD)]
    if options.readout == "class":
        pooled = _build_pooler(builder, *family.classifier) if family.classifier else _build_first_word(builder)
        return [*pooled, Node("classifier", Affine(count), [pooled[-1].role]), Node("y", label, ["classifier"])]
    return []


def _build_first_word(builder: BlockBuilder) -> list[Node]:
    """What leaves the first word."""
    return [Node("first", Add(), [Arrow(builder.output_role, "first")])]


def _build_pooler(builder: BlockBuilder, dense: str, activation: str) -> list[Node]:
    """`s(W x + b)` of the first word."""
    return [
        *_build_first_word(builder),
        Node(dense, Affine(builder.dim), ["first"]),
        Node("pooled", Activation(activation), [dense]),
    ]


def _build_lm_head(family: ModelFamily, options: ModelOptions, builder: BlockBuilder, *, tied: bool) -> list[Node]:
    """The word of the vocabulary at each place, or that follows it."""
    nodes: list[Node] = []
    source = builder.output_role
    if "dense" in family.modules:
        nodes = [
            Node("dense", Affine(options.embedding_dim), [source], WORD),
            Node("transform", Activation(family.transform or options.activation), ["dense"], WORD),
            Node("transform_norm", builder.norm_tpm, ["transform"], WORD),
        ]
        source = "transform_norm"
    return nodes + build_word_readout(options.states, source, tied=tied, has_bias=family.logits_bias)


def build_word_readout(states: int, source: str, *, tied: bool, has_bias: bool) -> list[Node]:
    """A word of the vocabulary at each place, from its own matrix or from the table of the words."""
    logits = (Affine if has_bias else Linear)(None if tied else states)
    return [
        Node("logits", logits, [TABLE, source] if tied else [source], WORD),
        Node("y", Categorical(states, affine=False), ["logits"], WORD),
    ]


# families of an encoder and a decoder

# Models of both stacks; an encoder alone has nothing of what is read here.
ENCODER_DECODER_READOUTS = {
    "ForConditionalGeneration": "word",
    "MTModel": "word",
    "EncoderModel": "encoder",
    "Model": None,
}


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderOptions(ModelOptions):
    """The options of an encoder and a decoder; those of `ModelOptions` are the encoder's where they differ, but for `reach`.

    `separate_vocabularies`: each stack has a vocabulary of its own.
    """

    decoder_sizes: Mapping[str, int]
    embed_scale: float
    logits_scale: float
    gated: bool
    buckets: tuple[int, int] | None
    one_table: bool = True
    logits_bias: bool = True
    separate_vocabularies: bool = False


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderFamily(ModelFamily):
    """A family of an encoder and a decoder.

    `decoder_keys` maps the options that the decoder has of its own to the names of the config. `derive_settings` adds to a config
    what its config class derives from other settings. `positions` are "learned", "sinusoidal" or None; a bias of the
    scores by distance, where the config has `buckets`, is one node of each stack. Parts of a stack start with its name.
    """

    decoder_keys: Mapping[str, str]
    positions: str | None
    score: Dot = Dot(None)  # noqa: RUF009  (frozen)
    derive_settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    readouts: Mapping[str, str | None] = field(default_factory=lambda: ENCODER_DECODER_READOUTS)
    declare: Callable[..., Declaration] | None = field(default_factory=lambda: options_to_encoder_decoder)
    resolve_options: Callable[..., ModelOptions] | None = field(default_factory=lambda: resolve_stacks)

    def canonicalize_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config with one name for each setting, with those that its config class derives from others."""
        return super().canonicalize_config(self.derive_settings(config))

    def config_to_options(
        self, config: Mapping[str, Any], architecture: str | None, readout: str | None
    ) -> EncoderDecoderOptions:
        """What a config says, in our words."""
        config = self.canonicalize_config(config)
        told, start = super().config_to_options(config, architecture, readout), self.read_setting(config, "start")
        reach = Reach("causal" if is_causal(config) else "every")
        told = replace(told, reach=reach, labels=())  # it observes words alone
        if start is not None:
            told = replace(told, start=check_int("decoder_start_token_id of the config", start, minimum=0))
        apart = "one_table" in self.config_keys and not config.get(self.config_keys["one_table"], True)
        one_table = told.tied and not apart
        return EncoderDecoderOptions(
            **{each.name: getattr(told, each.name) for each in fields(told)},
            decoder_sizes=self._read_decoder_sizes(config, told, one_table=one_table),
            embed_scale=told.dim**0.5 if self._is_enabled(config, "scaled_words") else 1.0,
            logits_scale=told.dim**-0.5 if self._is_enabled(config, "scaled_logits") else 1.0,
            gated=self._is_enabled(config, "gated_ffn"),
            buckets=(self.read_size(config, "buckets"), self.read_size(config, "furthest"))
            if "buckets" in self.config_keys
            else None,
            one_table=one_table,
            separate_vocabularies=apart,
        )

    def _read_decoder_sizes(
        self, config: Mapping[str, Any], encoder_options: ModelOptions, *, one_table: bool
    ) -> dict[str, int]:
        """The sizes of the decoder, those of the encoder where the config tells no others."""
        found = {}
        for option in ("slices", "hidden", "heads", "states"):
            name = self.decoder_keys.get(option)
            value = None if name is None or (option == "states" and one_table) else config.get(name)
            found[option] = (
                getattr(encoder_options, option) if value is None else check_int(f"{name} of the config", value)
            )
        if found["heads"] != encoder_options.heads:
            what = f"{self.decoder_keys['heads']} of the config"
            raise BNetError(
                what, expected=f"{encoder_options.heads}, as many heads as the encoder's", actual=found["heads"]
            )
        return found

    def _is_enabled(self, config: Mapping[str, Any], option: str) -> bool:
        return option in self.config_keys and bool(self.read_setting(config, option))


def resolve_stacks(
    family: EncoderDecoderFamily, options: EncoderDecoderOptions, weights: StateDict
) -> EncoderDecoderOptions:
    """Which tables are one, as the weights say too; whether the logits have a bias; and that sinusoids are such."""
    if family.positions == "sinusoidal":
        for stack in ("enc", "dec"):
            _check_sinusoids(family, options.dim, weights, f"{stack}_sinusoids")
    keys, present = _find_table_keys(family, options, weights), index_keys(family, weights)
    biases = {canonical_key(family, key) for key in locate_bias(family.locate("logits"))[0]}
    tables = {family.get_weight_key(part): key for part, key in keys.items() if family.get_weight_key(part) != key}
    enc, dec, logits = (keys.get(part) for part in ("enc_embed", "dec_embed", "logits"))
    return replace(
        options,
        one_table=options.one_table and are_tensors_equal(family, weights, enc, dec),
        tied=options.tied and are_tensors_equal(family, weights, dec, logits),
        logits_bias=family.logits_bias and not biases.isdisjoint(present),
        tied_keys=tables,
    )


def _find_table_keys(
    family: EncoderDecoderFamily, options: EncoderDecoderOptions, weights: StateDict
) -> dict[str, str]:
    """The key of the table that each part reads; none for a part whose table is missing.

    A part reads its own table. `transformers` ties a table that a file lacks to `shared`, which no stack reads itself,
    and where that is missing too, to one of the tables that are tied with it: which one is clear where they are equal.
    """
    present = index_keys(family, weights)
    tied = ("dec_embed", "logits") if options.separate_vocabularies else ("embed", "enc_embed", "dec_embed", "logits")
    held = [key for part in tied if options.tied and (key := family.get_weight_key(part)) in present]
    found = {}
    for part in ("enc_embed", "dec_embed", *(["logits"] if options.readout == "word" else [])):
        own = family.get_weight_key(part)
        if own in present:
            found[part] = own
        elif part in tied and held:
            shared = family.get_weight_key("embed")
            if held[0] != shared and not all(are_tensors_equal(family, weights, held[0], key) for key in held):
                wanted = f"{own}, or one table in place of it and of {shared}"
                raise FileError(weights.origin, expected=wanted, actual=f"{', '.join(held)}, which differ")
            found[part] = held[0]
    return found


def _check_sinusoids(family: EncoderDecoderFamily, dim: int, weights: StateDict, part: str) -> None:
    """Refuse a table of positions, where the weights hold one, that is not of sinusoids to its own precision."""
    present, key = index_keys(family, weights), family.get_weight_key(part) if part in family.modules else ""
    if key not in present:
        return
    table = weights.get_tensor(present[key])
    made = _make_sinusoid(dim).value(EvalContext(word=torch.arange(len(table)), dtype=torch.float64))
    close = 4 * max(torch.finfo(table.dtype).eps, torch.finfo(torch.float32).eps)
    if table.shape != made.shape or not torch.allclose(table.double(), made.to(table.device), rtol=0, atol=close):
        raise FileError(f"{weights.origin}: {family.locate(part).key}", expected="sinusoids", actual="other positions")


def options_to_encoder_decoder(
    family: EncoderDecoderFamily,
    options: EncoderDecoderOptions,
    vocabulary: tuple[str, ...] | None,
    extras: Collection[str] = (),
) -> Declaration:
    """The declaration of an encoder and a decoder that reads its last state."""
    shared = options.one_table or has_tied_readout(options)
    states = {"enc": options.states, "dec": options.decoder_sizes["states"]}
    stacks = []
    for name in ("enc", "dec"):
        relative = None if options.buckets is None else Buckets(*options.buckets, two_sided=name == "enc")
        hidden = options.hidden if name == "enc" else options.decoder_sizes["hidden"]
        net = make_builder(family, options, hidden, gated=options.gated, score=family.score, relative_bias=relative)
        reaches = [Reach("every")] if name == "enc" else [options.reach, Reach("every")]
        tied = options.one_table or (shared and name == "dec")
        observed = _build_decoder_readout(options, net) if name == "dec" and options.readout == "word" else []
        named = len(vocabulary or ()) == states[name] and not (name == "dec" and options.separate_vocabularies)
        stacks.append(
            Stack(
                net.build_slice(*reaches),
                _build_stack_embedding(family, options, net, states[name], tied=tied),
                [*net.build_final_norm(), *observed],
                slices=options.slices if name == "enc" else options.decoder_sizes["slices"],
                name=name,
                vocabulary=vocabulary if named else None,
            )
        )
    table = [Node(TABLE, Weight((states["dec"], options.dim)))] if shared else []
    return Declaration(stacks, table, net.plates, name=family.name)


def _build_stack_embedding(
    family: EncoderDecoderFamily, options: EncoderDecoderOptions, builder: BlockBuilder, states: int, *, tied: bool
) -> list[Node]:
    """The first state of a stack: embedding and position, and their norm where the family has one; and the bias."""
    table = Embed(options.dim, scale=options.embed_scale, tied=tied)
    read = [TABLE, "token"] if tied else ["token"]
    nodes = [Node("token", Given(states=states), plates=WORD)]
    if builder.relative_bias is not None:
        nodes.append(Node("b", Weight((builder.relative_bias.width,)), plates=["head"]))
    if family.positions is None:
        return [*nodes, Node("x", table, read, WORD)]
    learned = family.positions == "learned"
    position = Positions(options.num_positions, options.dim) if learned else _make_sinusoid(options.dim)
    last = "add" if family.has_embed_norm else "x"
    nodes += [
        Node("embed", table, read, WORD),
        Node("position", position, plates=WORD),
        Node(last, Add(), ["embed", "position"], WORD),
    ]
    return [*nodes, Node("x", builder.norm_tpm, ["add"], WORD)] if family.has_embed_norm else nodes


def _make_sinusoid(dim: int) -> Sinusoid:
    """Sines in the first half of the features, cosines in the second."""
    return Sinusoid(dim, halves=True, rounded=True)


def _build_decoder_readout(options: EncoderDecoderOptions, builder: BlockBuilder) -> list[Node]:
    """The output at each place of the decoder."""
    nodes, source = [], builder.output_role
    if options.logits_scale != 1:
        nodes, source = [Node("scaled", Scale(options.logits_scale), [builder.output_role], WORD)], "scaled"
    states, biased = options.decoder_sizes["states"], options.logits_bias
    return nodes + build_word_readout(states, source, tied=has_tied_readout(options), has_bias=biased)
