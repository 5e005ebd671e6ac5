"""From `ModelOptions` to a declaration: embeddings, slices, readouts; for one stack, or for an encoder and a decoder.

    x_0 = norm(E[token] + position + segment)       post-norm families; pre-norm families add without a norm
    dec_y_i = softmax_w(E_w . s dec_x_i + b_w)      E: one table for the words of both stacks and the logits, or several

The inputs of a decoder in a net with two stacks are its outputs shifted right by one (`bt.models.shift_right`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch

from bnet_transformer._core.checks import check_int
from bnet_transformer._core.naming import Reach
from bnet_transformer.declare import Arrow, Declaration, Node, Stack
from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.models.builders import TABLE, WORD, BlockBuilder, build_logits
from bnet_transformer.pretrained.family import Config, ModelFamily, ModelOptions, is_causal
from bnet_transformer.pretrained.weights import StateDict, are_tensors_equal, canonicalize_key, index_keys, locate_bias
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
    Multiple,
    Patches,
    Pool,
    Positions,
    Sinusoid,
    Start,
    Weight,
)

SEGMENT_ROLE = "segment"


def options_to_declaration(
    family: ModelFamily, options: ModelOptions, vocabulary: tuple[str, ...] | None, extras: Collection[str] = ()
) -> Declaration:
    """Build the declaration of a model with one stack.

    Args:
        family: The family.
        options: The sizes and settings.
        vocabulary: The names of the words; None without a tokenizer.
        extras: Sentence-level nodes to add: the `"pooler"` of the model, the `"mean"` of the words.
    """
    score, bias = Dot(None, options.rotary), family.relative_bias
    builder = make_builder(family, options, options.hidden, gated=family.gated, score=score, relative_bias=bias)
    tied = has_tied_readout(options)
    slice_ = builder.build_slice(options.reach)
    # ALBERT: all slices share one set of parameters, and weights are corpus-level nodes that all slices read.
    weights = [node for node in slice_ if family.shared and isinstance(node.tpm, Weight)]
    if family.shared:
        slice_ = [replace(node, shared=True) for node in slice_ if node not in weights]
    stack = Stack(
        slice_,
        _build_embedding(family, options, builder, tied=tied),
        [*builder.build_final_norm(), *_build_readout(family, options, builder, tied=tied)],
        slices=options.slices,
        vocabulary=vocabulary,
    )
    nodes = [Node(TABLE, Weight((options.states, options.embedding_dim)))] if tied else []
    nodes += weights
    if bias is not None:
        nodes.append(Node("b", Weight((bias.width,)), plates=["head"]))
    if "pooler" in extras:
        nodes += _build_pooler(builder, "pooler", "tanh")
    if "mean" in extras:
        nodes.append(Node("embedding", Pool("mean"), [Arrow(builder.output_role, "every")]))
    return Declaration([stack], nodes, builder.plates, name=family.name)


def resolve_options(family: ModelFamily, options: ModelOptions, weights: StateDict) -> ModelOptions:
    """Return the options, with `tied` inferred from the weights: True if embeddings and readout share one table."""
    if family.resolve_options is not None:
        return family.resolve_options(family, options, weights)
    # If the weights contain two different tables, a config with tied tables is wrong: transformers does not tie them.
    tables = [family.get_weight_key(part) for part in ("embed", "logits") if has_tied_readout(options)]
    return replace(options, tied=are_tensors_equal(family, weights, *tables)) if tables else options


def make_builder(
    family: ModelFamily, options: ModelOptions, hidden: int, *, gated: bool, score: Dot, relative_bias: Bias | None
) -> BlockBuilder:
    """Create the builder of the sublayers of a stack."""
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
    """Return True if the embeddings and the readout share one table."""
    return options.tied and options.readout == "word"


def _build_embedding(family: ModelFamily, options: ModelOptions, builder: BlockBuilder, *, tied: bool) -> list[Node]:
    """Build the nodes of the first state: embedding, position, segment, norm, and a map to `dim` if it is needed."""
    if options.image is not None:
        return _build_patch_embedding(options.image, options.dim)
    if options.rotary is not None:
        table = Embed(options.dim, tied=tied)
        token = Node("token", Given(states=options.states), plates=WORD)
        return [token, Node("x", table, [TABLE, "token"] if tied else ["token"], WORD)]
    sum_role, width = "add" if family.has_embed_norm else "x", options.embedding_dim
    nodes = [
        Node("token", Given(states=options.states), plates=WORD),
        Node("embed", Embed(width, tied=tied), [TABLE, "token"] if tied else ["token"], WORD),
        Node("position", Positions(options.num_positions, width), plates=WORD),
    ]
    terms = ["embed", "position"]
    if options.segments is not None:
        nodes.append(Node(SEGMENT_ROLE, Given(states=options.segments, default=0), plates=WORD))
        nodes.append(Node("segment_embed", Embed(width), [SEGMENT_ROLE], WORD))
        terms.append("segment_embed")
    nodes.append(Node(sum_role, Add(), terms, WORD))
    if "embed_norm" in family.modules:
        norm = Node("embed_norm", builder.norm_tpm, [sum_role], WORD)
        return [*nodes, norm, Node("x", Affine(builder.dim), ["embed_norm"], WORD)]
    return nodes if sum_role == "x" else [*nodes, Node("x", builder.norm_tpm, [sum_role], WORD)]


def _build_patch_embedding(image: Patches, dim: int) -> list[Node]:
    """Build the first state of an image: `x_0_0 = u + position_0`, `x_0_i = W patch_i + b + position_i`."""
    return [
        Node("patch", Given(image.features, image=image), plates=WORD),
        Node("embed", Affine(dim), ["patch"], WORD),
        Node("start", Start(), [Arrow("embed", "rest")], WORD),
        Node("position", Positions(image.words, dim), plates=WORD),
        Node("x", Add(), ["start", "position"], WORD),
    ]


def _build_readout(family: ModelFamily, options: ModelOptions, builder: BlockBuilder, *, tied: bool) -> list[Node]:
    """Build the nodes of the readout: a word of the vocabulary or a tag for each word, or a class of the sentence."""
    if options.readout == "word":
        return _build_lm_head(family, options, builder, tied=tied)
    count = len(options.labels)
    label = Categorical(count, affine=False, labels=options.labels)
    if options.readout == "tag":
        return [Node("tags", Affine(count), [builder.output_role], WORD), Node("y", label, ["tags"], WORD)]
    if options.readout == "class":
        pooled = _build_pooler(builder, *family.classifier) if family.classifier else [_build_first_word(builder)]
        return [*pooled, Node("classifier", Affine(count), [pooled[-1].role]), Node("y", label, ["classifier"])]
    return []


def _build_first_word(builder: BlockBuilder) -> Node:
    """Build the node of the last state of the first word."""
    return Node("first", Add(), [Arrow(builder.output_role, "first")])


def _build_pooler(builder: BlockBuilder, dense: str, activation: str) -> list[Node]:
    """Build the nodes of `s(W x + b)`, where x is the last state of the first word."""
    first, pooled = _build_first_word(builder), Node("pooled", Activation(activation), [dense])
    return [first, Node(dense, Affine(builder.dim), ["first"]), pooled]


def _build_lm_head(family: ModelFamily, options: ModelOptions, builder: BlockBuilder, *, tied: bool) -> list[Node]:
    """Build the nodes of the word at each position (masked models), or of the next word (causal models)."""
    nodes: list[Node] = []
    source = builder.output_role
    if "dense" in family.modules:
        nodes = [
            Node("dense", Affine(options.embedding_dim), [source], WORD),
            Node("transform", Activation(family.transform or options.activation), ["dense"], WORD),
            Node("transform_norm", builder.norm_tpm, ["transform"], WORD),
        ]
        source = "transform_norm"
    return nodes + build_logits(options.states, source, tied=tied, has_bias=family.logits_bias)


# families of an encoder and a decoder

# The readout "encoder" raises an error: these families need both stacks.
TWO_STACK_READOUTS = {"ForConditionalGeneration": "word", "MTModel": "word", "EncoderModel": "encoder", "Model": None}


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderOptions(ModelOptions):
    """The options of an encoder and a decoder. The options of `ModelOptions` are those of the encoder.

    `reach` is that of the decoder; the words of the encoder attend to every word.

    Args:
        decoder_sizes: The `"slices"`, `"hidden"`, `"heads"` and `"states"` of the decoder.
        embed_scale: The scale of the embeddings.
        logits_scale: The scale of the last state before the logits.
        gated: True if the feed-forward maps are gated.
        buckets: The number of buckets of relative positions and the maximum distance; None without relative biases.
        one_table: True if both stacks share one table of words.
        logits_bias: True if the logits have a bias.
        separate_vocabularies: True if each stack has its own vocabulary.
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
    """A family of an encoder and a decoder; the names of parts start with the stack, `enc_` or `dec_`.

    Args:
        decoder_keys: The config key of each option that the decoder has separately.
        positions: `"learned"`, `"sinusoidal"` or None. Relative biases (`buckets` in the config) are a node of each
            stack.
        score: The score of attention.
        derive_settings: A function that adds to a config the settings that its config class derives from others.
    """

    decoder_keys: Mapping[str, str]
    positions: str | None
    score: Dot = Dot(None)  # noqa: RUF009  (frozen)
    derive_settings: Callable[[Config], Config] = dict
    readouts: Mapping[str, str | None] = field(default_factory=lambda: TWO_STACK_READOUTS)
    declare: Callable[..., Declaration] | None = field(default_factory=lambda: options_to_encoder_decoder)
    resolve_options: Callable[..., ModelOptions] | None = field(default_factory=lambda: resolve_stacks)

    @cached_property
    def read_keys(self) -> frozenset[str]:
        """The config keys that determine the options."""
        return super().read_keys | {*self.decoder_keys.values(), "is_causal"}

    def canonicalize_config(self, config: Config) -> Config:
        """Return a config without aliases, with the settings that its config class derives from others."""
        return super().canonicalize_config(self.derive_settings(config))

    def config_to_options(self, config: Config, architecture: str | None, readout: str | None) -> EncoderDecoderOptions:
        """Read the options of a model, as in `ModelFamily.config_to_options`."""
        config = self.canonicalize_config(config)
        options, start = super().config_to_options(config, architecture, readout), self.read_setting(config, "start")
        reach = Reach("causal" if is_causal(config) else "every")
        options = replace(options, reach=reach, labels=())  # the readout of a decoder is a word: no class labels
        if start is not None:
            options = replace(options, start=check_int("decoder_start_token_id of the config", start, minimum=0))
        separate = "one_table" in self.config_keys and not config.get(self.config_keys["one_table"], True)
        one_table = options.tied and not separate
        has_buckets = "buckets" in self.config_keys
        return EncoderDecoderOptions(
            **{field.name: getattr(options, field.name) for field in fields(options)},
            decoder_sizes=self._read_decoder_sizes(config, options, one_table=one_table),
            embed_scale=options.dim**0.5 if self._find_setting(config, "scaled_words") else 1.0,
            logits_scale=options.dim**-0.5 if self._find_setting(config, "scaled_logits") else 1.0,
            gated=bool(self._find_setting(config, "gated_ffn")),
            buckets=(self.read_size(config, "buckets"), self.read_size(config, "furthest")) if has_buckets else None,
            one_table=one_table,
            separate_vocabularies=separate,
        )

    def _read_decoder_sizes(self, config: Config, encoder: ModelOptions, *, one_table: bool) -> dict[str, int]:
        """Read the sizes of the decoder; those of the encoder if the config has no others."""
        sizes: dict[str, int] = {}
        for option in ("slices", "hidden", "heads", "states"):
            key = self.decoder_keys.get(option)
            value = None if key is None or (option == "states" and one_table) else config.get(key)
            sizes[option] = getattr(encoder, option) if value is None else check_int(f"{key} of the config", value)
        if sizes["heads"] != encoder.heads:
            expected = f"{encoder.heads}, the number of heads of the encoder"
            raise BNetError(f"{self.decoder_keys['heads']} of the config", expected=expected, actual=sizes["heads"])
        return sizes


def resolve_stacks(
    family: EncoderDecoderFamily, options: EncoderDecoderOptions, weights: StateDict
) -> EncoderDecoderOptions:
    """Return the options with those inferred from the weights: tied tables, and whether the logits have a bias.

    The net computes sinusoidal positions itself. So if the weights contain a table of them, its values are checked.
    """
    if family.positions == "sinusoidal":
        for stack in ("enc", "dec"):
            _check_sinusoids(family, options.dim, weights, f"{stack}_sinusoids")
    keys, present = _find_table_keys(family, options, weights), index_keys(family, weights)
    biases = {canonicalize_key(family, key) for key in locate_bias(family.locate("logits"))[0]}
    tied_keys = {family.get_weight_key(part): key for part, key in keys.items()}
    enc, dec, logits = (keys.get(part) for part in ("enc_embed", "dec_embed", "logits"))
    return replace(
        options,
        one_table=options.one_table and are_tensors_equal(family, weights, enc, dec),
        tied=options.tied and are_tensors_equal(family, weights, dec, logits),
        logits_bias=family.logits_bias and not biases.isdisjoint(present),
        tied_keys={key: source for key, source in tied_keys.items() if key != source},
    )


def _find_table_keys(family: ModelFamily, options: EncoderDecoderOptions, weights: StateDict) -> dict[str, str]:
    """Find the key of the table that each part reads; a part whose table is missing has no key.

    A part reads its own table if the weights contain it. Otherwise `transformers` ties it to `shared`, which no stack
    reads directly. If that is missing too, it is tied to another of the tied tables, which must all be equal.
    """
    present = index_keys(family, weights)
    tied = ("dec_embed", "logits") if options.separate_vocabularies else ("embed", "enc_embed", "dec_embed", "logits")
    sources = [key for part in tied if options.tied and (key := family.get_weight_key(part)) in present]
    tables = {}
    for part in ("enc_embed", "dec_embed", *(["logits"] if options.readout == "word" else [])):
        key = family.get_weight_key(part)
        if key in present:
            tables[part] = key
        elif part in tied and sources:
            shared = family.get_weight_key("embed")
            if sources[0] != shared and not all(are_tensors_equal(family, weights, sources[0], k) for k in sources):
                expected = f"{key}, or equal tables that could replace it and {shared}"
                raise FileError(weights.origin, expected=expected, actual=f"different tables {', '.join(sources)}")
            tables[part] = sources[0]
    return tables


def _check_sinusoids(family: EncoderDecoderFamily, dim: int, weights: StateDict, part: str) -> None:
    """Raise an error for a table of positions in the weights that differs from sinusoids by more than rounding."""
    present, key = index_keys(family, weights), family.get_weight_key(part) if part in family.modules else ""
    if key not in present:
        return
    table = weights.get_tensor(present[key])
    expected = _make_sinusoid(dim).value(EvalContext(word=torch.arange(len(table)), dtype=torch.float64))
    atol = 4 * max(torch.finfo(table.dtype).eps, torch.finfo(torch.float32).eps)
    is_close = table.shape == expected.shape and torch.allclose(table.double(), expected.to(table.device), 0, atol)
    if not is_close:
        subject = f"{weights.origin}: {family.locate(part).key}"
        raise FileError(subject, expected="sinusoidal positions", actual="other values")


def options_to_encoder_decoder(
    family: EncoderDecoderFamily,
    options: EncoderDecoderOptions,
    vocabulary: tuple[str, ...] | None,
    extras: Collection[str] = (),
) -> Declaration:
    """Build the declaration of an encoder, and of a decoder that attends to its last state; `extras` are ignored."""
    has_table = options.one_table or has_tied_readout(options)
    states = {"enc": options.states, "dec": options.decoder_sizes["states"]}
    stacks = []
    for name in ("enc", "dec"):
        is_encoder = name == "enc"
        bias = None if options.buckets is None else Buckets(*options.buckets, two_sided=is_encoder)
        hidden = options.hidden if is_encoder else options.decoder_sizes["hidden"]
        builder = make_builder(family, options, hidden, gated=options.gated, score=family.score, relative_bias=bias)
        reaches = [Reach("every")] if is_encoder else [options.reach, Reach("every")]
        tied = options.one_table or (has_table and not is_encoder)
        readout = [] if is_encoder or options.readout != "word" else _build_decoder_readout(options, builder)
        is_named = len(vocabulary or ()) == states[name] and (is_encoder or not options.separate_vocabularies)
        stack = Stack(
            builder.build_slice(*reaches),
            _build_stack_embedding(family, options, builder, states[name], tied=tied),
            [*builder.build_final_norm(), *readout],
            slices=options.slices if is_encoder else options.decoder_sizes["slices"],
            name=name,
            vocabulary=vocabulary if is_named else None,
        )
        stacks.append(stack)
    table = [Node(TABLE, Weight((states["dec"], options.dim)))] if has_table else []
    return Declaration(stacks, table, builder.plates, name=family.name)


def _build_stack_embedding(
    family: EncoderDecoderFamily, options: EncoderDecoderOptions, builder: BlockBuilder, states: int, *, tied: bool
) -> list[Node]:
    """Build the nodes of the first state of a stack (embedding, position, norm), and of the relative bias."""
    table = Embed(options.dim, scale=options.embed_scale, tied=tied)
    parents = [TABLE, "token"] if tied else ["token"]
    nodes = [Node("token", Given(states=states), plates=WORD)]
    if builder.relative_bias is not None:
        nodes.append(Node("b", Weight((builder.relative_bias.width,)), plates=["head"]))
    if family.positions is None:
        return [*nodes, Node("x", table, parents, WORD)]
    is_learned = family.positions == "learned"
    position = Positions(options.num_positions, options.dim) if is_learned else _make_sinusoid(options.dim)
    sum_role = "add" if family.has_embed_norm else "x"
    nodes += [Node("embed", table, parents, WORD), Node("position", position, plates=WORD)]
    nodes.append(Node(sum_role, Add(), ["embed", "position"], WORD))
    return [*nodes, Node("x", builder.norm_tpm, ["add"], WORD)] if family.has_embed_norm else nodes


def _make_sinusoid(dim: int) -> Sinusoid:
    """Create the TPM of sinusoidal positions: sines in the first half of the features, cosines in the second half."""
    return Sinusoid(dim, halves=True, rounded=True)


def _build_decoder_readout(options: EncoderDecoderOptions, builder: BlockBuilder) -> list[Node]:
    """Build the nodes of the decoder's readout at each position."""
    nodes, source = [], builder.output_role
    if options.logits_scale != 1:
        nodes, source = [Node("scaled", Multiple(options.logits_scale), [builder.output_role], WORD)], "scaled"
    states, has_bias = options.decoder_sizes["states"], options.logits_bias
    return nodes + build_logits(states, source, tied=has_tied_readout(options), has_bias=has_bias)
