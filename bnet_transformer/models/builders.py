"""What several models share: embeddings, readouts, sublayers of transformers, and the weights of torch's modules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature
from typing import Annotated, Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.naming import Reach, as_reach, join_name, join_stem
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Arrow, Node, Plate, Stack
from bnet_transformer.declare.declaration import check_vocabulary
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm import (
    TPM,
    Activation,
    Add,
    Affine,
    Attention,
    Bias,
    Categorical,
    Concat,
    Dot,
    Dropout,
    Embed,
    FeedForward,
    Given,
    Linear,
    Norm,
    Normal,
    Pool,
    Positions,
    Recur,
    Sinusoid,
    Weight,
)
from bnet_transformer.tpm.base import CheckedDataclass, check_below_one, check_bool, choice, optional
from bnet_transformer.tpm.deterministic import ACTIVATIONS, check_activation

# --------------------------------------------------------------------------------------------------------------------
# Convert the weights of torch's modules to parameters of `encoder`, `encoder_decoder`, `decoder` and `recurrent`.


SUPPORTED_MODULES = "nn.Transformer, its encoder, its decoder, a layer of them, nn.MultiheadAttention, nn.RNN, nn.LSTM"
LAYER_TYPES = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
RECURRENT_ROLES = {nn.RNN: ("x",), nn.LSTM: ("input", "forget", "candidate", "output")}  # in the order of torch's rows
RoleParameters = tuple[str, int | None, dict[str, Tensor | None]]  # a role, its slice, its parameters
ATTENTION_ROLES = ("W_q", "W_k", "W_v", "W_o", "q", "k", "v", "mix")


def weights_of(module: nn.Module, stack: str | None = None, *, net: BNet | None = None) -> dict[str, Tensor]:
    """The weights of a torch module as parameters of a net, for `net.replace`.

    The weights of an `nn.Transformer` are those of an `encoder_decoder`, and an `nn.TransformerDecoder` is its stack
    `dec`. An `nn.TransformerEncoder` is an `encoder` (or `decoder`). A single layer and an `nn.MultiheadAttention` are
    slice 0 of a net. An `nn.RNN` or `nn.LSTM` is a `recurrent` net; its bias is the sum of torch's two biases.

    Args:
        module: The torch module.
        stack: The name of the stack in the names of the parameters. None (default) for `"dec"` if the module has cross
            attention, otherwise for no name.
        net: The net for the weights. If it is given, the function checks that the slices and final norms of the net
            have exactly the parameters of the module, and the same activation. Default None.

    Returns:
        Copies of the parameters by name.

    Raises:
        BNetError: If the module is not supported, or does not correspond to `net`.

    >>> sorted(weights_of(nn.MultiheadAttention(8, 2, bias=False)))
    ['W_k_0.value', 'W_o_0.value', 'W_q_0.value', 'W_v_0.value']
    """
    if net is not None and not isinstance(net, BNet):
        raise BNetError("net", expected="the BNet for the weights", actual=net)
    if stack is not None and not isinstance(stack, str):
        raise BNetError("stack", expected="the name of a stack, a string", actual=stack)
    parameters: dict[str, Tensor] = {}
    for part, name in _get_stacks(module, stack).items():
        weights = _convert_stack(part, name)
        if net is not None:
            _check_complete(net, name, part, weights)
        parameters |= weights
    return parameters


def _get_stacks(module: nn.Module, stack: str | None) -> dict[nn.Module, str]:
    """The parts of a module that are stacks, and the names of the stacks."""
    if not isinstance(module, nn.Module):
        raise BNetError("module", expected="a supported torch module", actual=module, allowed=SUPPORTED_MODULES)
    if isinstance(module, nn.Transformer):
        if stack is not None:
            raise BNetError("stack", expected="None, because a Transformer has the stacks enc and dec", actual=stack)
        return {module.encoder: "enc", module.decoder: "dec"}
    crossed = isinstance(module, nn.TransformerDecoder | nn.TransformerDecoderLayer)
    return {module: "dec" if crossed and stack is None else stack or ""}


def _convert_stack(module: nn.Module, stack: str) -> dict[str, Tensor]:
    """The parameters of one stack."""
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
        parts = [] if module.norm is None else [_convert_norm("norm", None, module.norm)]
        for t, layer in enumerate(module.layers):
            parts += _convert_layer(t, layer)
    elif isinstance(module, nn.MultiheadAttention):
        parts = _convert_attention(0, "", module)
    elif isinstance(module, nn.RNN | nn.LSTM):
        parts = _convert_recurrent(module)
    else:
        parts = _convert_layer(0, module)
    parameters: dict[str, Tensor] = {}
    for role, step, values in parts:
        owner = join_name(join_stem(stack, role), () if step is None else (step,))
        tensors = {name: value for name, value in values.items() if value is not None}
        parameters |= {f"{owner}.{name}": value.detach().clone().contiguous() for name, value in tensors.items()}
    return parameters


def _check_complete(net: BNet, stack: str, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise an error unless a stack of the net has exactly these parameters and the same activation."""
    specs = [spec for spec in net.network.specs if spec.group.stack == stack]
    steps = range(net.network.graph.slices.get(stack, 0))
    inside = [m for m in specs if m.group.role == "norm" or m.group.step in steps]
    if isinstance(module, nn.MultiheadAttention):
        inside = [spec for spec in inside if spec.group.role in ATTENTION_ROLES]
    net_parameters = {f"{spec.param_prefix}.{name}" for spec in inside for name in spec.parameters}
    sides = ("the module has no", net_parameters - weights.keys()), ("the net has no", weights.keys() - net_parameters)
    differences = [f"{side} {', '.join(sorted(names)[:4])} ({len(names)} in all)" for side, names in sides if names]
    if differences:
        hint = "Build the net with the slices=, bias=, norm= and final_norm= of the module"
        raise BNetError("net", expected="the parameters of the module", actual="; ".join(differences), hint=hint)
    x = torch.linspace(-4, 4, 65)  # torch's activation is a function or a module, so values are compared
    activations = [layer.activation for layer in module.modules() if isinstance(layer, LAYER_TYPES)]
    activations += [getattr(torch, module.nonlinearity)] if isinstance(module, nn.RNN) else []
    kind = Recur if isinstance(module, nn.RNN) else FeedForward
    net_activations = {m.tpm.activation for m in inside if isinstance(m.tpm, kind)}
    for activation, name in itertools.product(activations, sorted(net_activations)):
        if not torch.allclose(activation(x), ACTIVATIONS[name](x), atol=1e-6):
            raise BNetError("activation of the module", expected=f"that of the net, {name!r}", actual=activation)


def _convert_layer(t: int, layer: nn.Module) -> list[RoleParameters]:
    """The parameters of one slice."""
    if not isinstance(layer, LAYER_TYPES):
        expected = "a supported torch module"
        raise BNetError("module", expected=expected, actual=type(layer).__name__, allowed=SUPPORTED_MODULES)
    parts = [*_convert_attention(t, "", layer.self_attn), _convert_norm("norm1", t, layer.norm1)]
    last = layer.norm2
    if isinstance(layer, nn.TransformerDecoderLayer):
        parts += [*_convert_attention(t, "cross_", layer.multihead_attn), _convert_norm("cross_norm", t, layer.norm2)]
        last = layer.norm3
    parts.append(_convert_norm("norm2", t, last) if layer.norm_first else _convert_norm("x", t + 1, last))
    for name, linear in (("in", layer.linear1), ("out", layer.linear2)):
        parts.append(("ffn", t, {f"weight_{name}": linear.weight, f"bias_{name}": linear.bias}))
    return parts


def _convert_attention(t: int, prefix: str, module: nn.MultiheadAttention) -> list[RoleParameters]:
    """The parameters of multi-head attention; the plate of heads is the first dim."""
    dim, heads = module.embed_dim, module.num_heads
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        raise BNetError("MultiheadAttention", expected="no option kdim, vdim, add_bias_kv or add_zero_attn")
    parts: list[RoleParameters] = []
    weights = module.in_proj_weight.chunk(3)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    for role, weight, bias in zip("qkv", weights, biases, strict=True):
        parts.append((f"W_{prefix}{role}", t, {"value": weight.reshape(heads, -1, dim)}))
        parts.append((prefix + role, t, {"bias": None if bias is None else bias.reshape(heads, -1)}))
    out = module.out_proj
    parts.append((f"W_{prefix}o", t, {"value": out.weight.reshape(dim, heads, -1).movedim(1, 0)}))
    return [*parts, (f"{prefix}mix", t, {"bias": out.bias})]


def _convert_recurrent(module: nn.RNN | nn.LSTM) -> list[RoleParameters]:
    """The parameters of all slices of a recurrent net, from torch's matrices with the rows of all gates."""
    if module.bidirectional or module.proj_size:
        actual = "bidirectional" if module.bidirectional else f"proj_size={module.proj_size}"
        raise BNetError("module", expected="a module with one direction and without projection", actual=actual)
    if module.dropout and module.num_layers > 1:
        expected = "no dropout between layers, which a recurrent net does not have"
        actual = f"dropout={module.dropout}"
        raise BNetError("module", expected=expected, actual=actual, hint="Set module.dropout = 0.0")
    roles = RECURRENT_ROLES[type(module)]
    parts: list[RoleParameters] = []
    for t in range(module.num_layers):
        values = {name: getattr(module, f"weight_{suffix}_l{t}") for name, suffix in (("W", "ih"), ("U", "hh"))}
        if module.bias:
            values["bias"] = getattr(module, f"bias_ih_l{t}") + getattr(module, f"bias_hh_l{t}")
        for k, role in enumerate(roles):
            rows = {name: value.chunk(len(roles))[k] for name, value in values.items()}
            parts.append((role, t + 1 if role == "x" else t, rows))
    return parts


def _convert_norm(role: str, t: int | None, norm: nn.Module) -> RoleParameters:
    """The gain and the bias of a layer norm."""
    if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.eps != Norm().eps:
        raise BNetError("norm", expected=f"a LayerNorm with a gain and eps={Norm().eps}", actual=norm)
    return role, t, {"gain": norm.weight, "bias": norm.bias}


# --------------------------------------------------------------------------------------------------------------------
# Nodes that several models use: embeddings, readouts, and the sublayers of transformers with post-norm and pre-norm.
#
#     post-norm   add = x + sublayer(x),   x' = norm(add)          pre-norm   x' = x + sublayer(norm(x))
#
# A sublayer is multi-head attention, in which `W_o` sums the heads, or the feed-forward map. Dropout is a node between
# the sublayer and the residual sum. The last node of a slice is its state.


Vocabulary = Sequence[str] | int | None
Options = TypeVar("Options")
P = ParamSpec("P")  # the arguments of a class of options, which are those of its builder
TABLE = "W_embed"
WORD, HEADS = ["word"], ["head", "word"]


@dataclass(frozen=True)
class NetOptions:
    """The options that all builders share.

    Args:
        dim: The width of the hidden state of a word. Default 512.
        slices: The number of slices (layers), by default 6, in `recurrent` 1; in `encoder_decoder` also a mapping with
            `"enc"` and `"dec"`.
        features: The width of words that are vectors; in a transformer a learnable map takes them to `dim`. None
            (default) for width `dim` without a map.
        vocabulary: The words as a list, or their number. None (default) for words that are vectors.
        activation: The activation of the feed-forward map, or of an RNN: `"relu"`, `"gelu"`, `"gelu_tanh"`, `"silu"`,
            `"tanh"`, `"sigmoid"` or `"identity"`. Default `"relu"`; in `recurrent` None for `"tanh"`, and an LSTM
            accepts only None.
        bias: Whether linear maps and norms have a bias. Default True.
        readout: The readout `y`: `"word"` for the next word, or the next vector if there are `features`; a
            `Categorical` or `Normal`; or None. `"auto"`, the default except in `encoder`, is `"word"` if there is a
            vocabulary or features, else None.
        pool: A readout of the sentence instead of each word: from its `"first"` or `"last"` word, or from the `"mean"`
            or `"sum"` of the words. None (default) for each word.
        transform: The activation s of a map `s(W x + b)` before the readout. None (default) for no map.
        tie: Whether embedding and readout share one table; in an encoder and a decoder one table is the embedding of
            both stacks and the readout. Default True.
        seed: The seed of the initial parameters. Default 0.
    """

    dim: int = 512
    _: KW_ONLY
    slices: int | Mapping[str, int] = 6
    features: int | None = None
    vocabulary: Vocabulary = None
    activation: str | None = "relu"
    bias: bool = True
    readout: TPM | str | None = "auto"
    pool: str | None = None
    transform: str | None = None
    tie: bool = True
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class TransformerOptions(NetOptions):
    """The options of a transformer.

    Args:
        heads: The number of heads in each slice. Default 8.
        hidden: The width of the hidden layer of the feed-forward map. None (default) for `4 * dim`.
        words: The maximum number of words, which `positions="learned"` requires. None (default) otherwise.
        positions: The position encoding: `"sinusoidal"` (default), `"learned"`, a TPM without parents, or None.
        norm: The place of the norms: `"post"` (default) after the residual sum, `"pre"` before each sublayer, or
            without cross attention `"parallel"` before both sublayers, which then run in parallel.
        final_norm: Whether a norm follows the last slice. None (default): True unless `norm="post"`.
        dropout: The probability with which training sets an entry to zero, from 0 to below 1. Default 0.1.
        mask: The words to which each word attends: None for every word, `"causal"`, a `Reach`, or a table of booleans
            `[word, word]`; for an encoder and a decoder a mapping from `"enc"`, `"dec"` and `"cross"` to one of these.
            By default causal in a decoder, and every word otherwise.
    """

    heads: int = 8
    hidden: int | None = None
    words: int | None = None
    positions: TPM | str | None = "sinusoidal"
    norm: str = "post"
    final_norm: bool | None = None
    dropout: float = 0.1
    mask: Any = None

    @property
    def position_tpm(self) -> TPM | None:
        """The TPM of the positions."""
        return get_positions(self.positions, self.dim, self.words)

    @property
    def builder(self) -> BlockBuilder:
        """The builder of a stack."""
        sizes = self.dim, self.bias, self.features, self.dropout, self.heads, self.hidden
        norms = self.norm, self.final_norm, self.activation
        return BlockBuilder(*sizes, *norms, vocabulary=self.vocabulary, tie=self.tie)  # type: ignore[arg-type]


def takes_options(
    options_class: Callable[P, Options], **defaults: object
) -> Callable[[Callable[[Options], BNet]], Callable[P, BNet]]:
    """Decorate a builder of a net from options: it takes the fields of the options as keyword arguments.

    The signature of the builder and the `Args:` of its docstring are those of the class of the options.

    Args:
        options_class: A frozen dataclass; its first field is also a positional argument. Type checkers read the
            arguments of the builder from it.
        **defaults: The defaults that differ from those of the class.
    """
    declared = cast("type[Any]", options_class)
    members = fields(declared)
    kinds = [Parameter.POSITIONAL_OR_KEYWORD, *[Parameter.KEYWORD_ONLY] * (len(members) - 1)]
    parameters = [Parameter(f.name, kind, annotation=f.type) for f, kind in zip(members, kinds, strict=True)]
    known = {f.name: f.default for f in members if f.default is not MISSING} | defaults
    parameters = [p.replace(default=known.get(p.name, Parameter.empty)) for p in parameters]
    signature = Signature(parameters, return_annotation="BNet")
    classes = [c for c in declared.__mro__ if is_dataclass(c)]
    texts = [(c.__doc__ or "").partition("    Args:\n")[2].rstrip() for c in reversed(classes)]

    def decorate(build: Callable[[Options], BNet]) -> Callable[P, BNet]:
        @wraps(build)
        def builder(*args: P.args, **options: P.kwargs) -> BNet:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            return build(declared(**bound.arguments))

        builder.__doc__ = (build.__doc__ or "").replace("        {options}", "\n".join(texts))
        builder.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": "BNet"}
        builder.__signature__ = signature  # type: ignore[attr-defined]
        return builder

    return decorate


def build_observation(readout: TPM | None, source_role: str = "x", plates: Sequence[str] = WORD) -> list[Node]:
    """The readout node `y` of each word, or of the sentence if the readout pools; [] without a readout."""
    if readout is None:
        return []
    slots = readout.get_slots() if isinstance(readout, TPM) and readout.is_random else ()
    if len(slots) != 1:
        allowed = "Categorical(n), Normal(sigma), a random TPM with one slot, None"
        raise BNetError("observe", expected="a readout", actual=readout, allowed=allowed)
    if slots[0].endswith("."):
        return [Node("y", readout, [Arrow(source_role, "every")])]
    return [Node("y", readout, [source_role], plates=plates)]


def build_logits(states: int, source: str, *, tied: bool, has_bias: bool) -> list[Node]:
    """The nodes `logits` and `y` of each word, with a separate matrix or the table of the words (`tied`)."""
    logits = (Affine if has_bias else Linear)(None if tied else states)
    return [
        Node("logits", logits, [TABLE, source] if tied else [source], WORD),
        Node("y", Categorical(states, affine=False), ["logits"], WORD),
    ]


@dataclass(frozen=True)
class StackBuilder(CheckedDataclass):
    """The builder of the nodes before and after the slices: embeddings and readouts.

    `dim` is the width of the states, `features` that of words that are vectors. `tie` is whether embedding and readout
    share one table of the vocabulary. `norm_type` and `eps` are options of the norms.
    """

    dim: Annotated[int, check_int]
    bias: Annotated[bool, check_bool] = True
    features: Annotated[int | None, optional(check_int)] = None
    dropout: Annotated[float, check_below_one] = 0.0
    vocabulary: Vocabulary = field(default=None, kw_only=True)
    tie: Annotated[bool, check_bool] = field(default=True, kw_only=True)
    eps: float = field(default=1e-5, kw_only=True)
    norm_type: str = field(default="layer", kw_only=True)

    @property
    def norm_tpm(self) -> Norm:
        """The TPM of every norm."""
        return Norm(self.norm_type, eps=self.eps, bias=self.bias)

    @property
    def output_role(self) -> str:
        """The role of the output of a stack: the last state, or its norm."""
        return "x"

    @property
    def is_tied(self) -> bool:
        """Whether embedding and readout share one table."""
        return self.tie and self.vocabulary is not None

    def build_stack(
        self, nodes: list[Node], embedding: list[Node], readout: list[Node], slices: Any, name: str = ""
    ) -> Stack:
        """A stack over the words of the vocabulary."""
        words = check_vocabulary(self.vocabulary) if isinstance(self.vocabulary, str | Sequence) else None
        return Stack(nodes, embedding, readout, slices=slices, name=name, vocabulary=words)

    # the words

    def build_embedding(self, positions: TPM | None = None, *, mapped: bool = True) -> list[Node]:
        """The nodes before the first slice.

        These are input vectors, mapped features, or an embedding times sqrt(dim); then positions and dropout. Without
        `mapped`, the features are the first state.
        """
        if self.vocabulary is not None and self.features is not None:
            raise BNetError("features", expected="None, because there is a vocabulary", actual=self.features)
        features = self.features if mapped else None
        if self.vocabulary is None and positions is None and features is None:
            return [Node("x", Given(self.features or self.dim), plates=WORD)]
        if features is not None:
            embed = Affine(self.dim) if self.bias else Linear(self.dim)
            nodes = [Node("value", Given(features), plates=WORD), Node("embed", embed, ["value"], WORD)]
        elif self.vocabulary is None:
            nodes = [Node("embed", Given(self.dim), plates=WORD)]
        else:
            table = Embed(self.dim, scale=self.dim**0.5, tied=self.is_tied, spread=self.dim**-0.5)
            token = Node("token", Given(states=count_words(self.vocabulary)), plates=WORD)
            nodes = [token, Node("embed", table, [TABLE, "token"] if self.is_tied else ["token"], WORD)]
        if positions is not None:
            nodes.append(Node("position", positions, plates=WORD))
            nodes.append(Node("add", Add(), ["embed", "position"], WORD))
        *before, last = nodes + self.build_dropout(nodes[-1].role, "drop")
        return [*before, Node("x", last.tpm, last.parents, WORD)]

    def build_embedding_table(self) -> list[Node]:
        """The embedding table as a node outside the stacks, if embedding and readout share it."""
        return [Node(TABLE, Weight((count_words(self.vocabulary), self.dim)))] if self.is_tied else []

    def build_dropout(self, source: str, role: str) -> list[Node]:
        """The dropout node, if there is dropout."""
        return [Node(role, Dropout(self.dropout), [source], WORD)] if self.dropout else []

    # the readouts

    def build_word_readout(self, transform: str | None) -> list[Node]:
        """The readout of a word of the vocabulary at each word."""
        # Tied logits have a bias only after a transform, as in BERT.
        nodes = self._build_transform(self.output_role, transform, WORD)
        if transform:
            nodes.append(Node("transform_norm", self.norm_tpm, ["transform"], WORD))
        source = nodes[-1].role if nodes else self.output_role
        has_bias = self.bias and (transform is not None or not self.is_tied)
        return nodes + build_logits(count_words(self.vocabulary), source, tied=self.is_tied, has_bias=has_bias)

    def build_pooled_readout(
        self, readout: Categorical | Normal, pool: str | None, transform: str | None
    ) -> list[Node]:
        """A readout of each word, or of the sentence from its first or last word, or from their mean or sum."""
        if readout.pool is not None:
            if pool or transform:
                hint = f"Remove pool={readout.pool!r} from the readout, and pass pool= to the model"
                raise BNetError(f"pool= and transform= do not apply to the readout {readout}", hint=hint)
            return build_observation(readout, self.output_role)
        over = [] if pool else WORD
        nodes: list[Node] = []
        if pool in ("first", "last"):
            nodes = [Node("pool", Add(), [Arrow(self.output_role, pool)])]
        elif pool:
            nodes = [Node("pool", Pool(pool), [Arrow(self.output_role, "every")])]
        nodes += self._build_transform("pool" if pool else self.output_role, transform, over)
        return [*nodes, *build_observation(readout, nodes[-1].role if nodes else self.output_role, over)]

    def _build_transform(self, source: str, activation: str | None, plates: list[str]) -> list[Node]:
        """The nodes of `s(W x + b)` before a readout, if there is an activation."""
        if activation is None:
            return []
        dense = Affine(self.dim) if self.bias else Linear(self.dim)
        return [Node("dense", dense, [source], plates), Node("transform", Activation(activation), ["dense"], plates)]

    def build_readout(
        self, readout: TPM | str | None, pool: str | None = None, transform: str | None = None
    ) -> list[Node]:
        """The nodes of the readout; "word" is the readout of a word of the vocabulary, or of its features."""
        check_choice("pool", pool, (None, "first", "last", "mean", "sum"))
        check_choice("transform", transform, (None, *ACTIVATIONS))
        if isinstance(readout, Categorical | Normal):
            return self.build_pooled_readout(readout, pool, transform)
        allowed = "'auto', 'word', a Categorical, a Normal, None"
        if not (readout is None or (isinstance(readout, str) and readout in ("auto", "word"))):
            raise BNetError("readout", expected="a readout", actual=readout, allowed=allowed)
        if readout == "auto":
            readout = None if self.vocabulary is None and self.features is None else "word"
        if readout == "word" and self.vocabulary is None and self.features is not None:
            return self.build_pooled_readout(Normal(1.0, dim=self.features, learnable=True), pool, transform)
        for option, value in (("pool", pool), ("transform", transform)):
            if value is not None and (option == "pool" or readout is None):
                expected = "None without a readout" if readout is None else f"None for readout={readout!r}"
                raise BNetError(option, expected=expected, actual=value)
        if readout is None:
            return []
        if self.vocabulary is None:
            raise BNetError("readout='word'", expected="a vocabulary or features")
        return self.build_word_readout(transform)


@dataclass(frozen=True)
class BlockBuilder(StackBuilder):
    """The builder of the nodes of a transformer from its sizes and options.

    Later models use further options: `gated` feed-forward maps; `key_dim`, the width of a head if it is not dim /
    heads; another `score`; `relative_bias`, a bias of the scores within a stack with the parent `b`; `groups` of heads
    that share keys and values (grouped-query attention); and `parts_without_bias`, the maps without a bias (`map` for
    q, k and v, `mix`, `ffn`).
    """

    heads: Annotated[int, check_int] = 8
    hidden: Annotated[int | None, optional(check_int)] = None
    norm: Annotated[str, choice("post", "pre", "parallel")] = "post"
    final_norm: Annotated[bool | None, choice(None, True, False)] = None
    activation: Annotated[str, check_activation] = "relu"
    _: KW_ONLY
    gated: bool = False
    key_dim: Annotated[int | None, optional(check_int)] = None
    score: Dot = Dot(None)  # noqa: RUF009  (frozen)
    relative_bias: Bias | None = None
    groups: Annotated[int | None, optional(check_int)] = None
    parts_without_bias: Collection[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads and self.key_dim is None:
            raise BNetError("heads", expected=f"a divisor of dim, which is {self.dim}", actual=self.heads)
        if self.groups is not None and self.heads % self.groups:
            raise BNetError("groups", expected=f"a divisor of heads, which is {self.heads}", actual=self.groups)

    @property
    def plates(self) -> list[Plate]:
        """The plate of heads; for grouped queries, the plate of groups and the plate of the heads in a group."""
        if self.groups is None:
            return [Plate("head", self.heads)]
        return [Plate("group", self.groups), Plate("head", self.heads // self.groups)]

    @property
    def output_role(self) -> str:
        """The role of the output of a stack: the last state, or its norm, which is the default unless norm="post"."""
        return "norm" if (self.norm != "post" if self.final_norm is None else self.final_norm) else "x"

    # the slices

    def build_slice(self, reach: Reach, cross_reach: Reach | None = None) -> list[Node]:
        """The nodes of one slice: self-attention, cross attention with `cross_reach`, and the feed-forward map."""
        if self.norm == "parallel":
            if cross_reach is not None:
                raise BNetError("norm", expected="'post' or 'pre', because there is cross attention", actual=self.norm)
            return self._build_parallel_sublayers(reach)
        nodes = self._build_residual("x", partial(self._build_attention, reach=reach), ("drop1", "add1", "norm1"))
        if cross_reach is not None:
            memory = (f"enc.{self.output_role}", "enc.word")
            attend = partial(self._build_attention, reach=cross_reach, prefix="cross_", memory=memory)
            nodes += self._build_residual(nodes[-1].role, attend, ("cross_drop", "cross_add", "cross_norm"))
        last, roles = nodes[-1].role, ("drop2", "add2", "norm2")
        return nodes + self._build_residual(last, self._build_feed_forward, roles, makes_state=True)

    def _build_parallel_sublayers(self, reach: Reach) -> list[Node]:
        """The nodes of `x' = x + attention(norm1(x)) + feed_forward(norm2(x))` (GPT-J, Wang and Komatsuzaki 2021)."""
        nodes, summed = [], ["x"]
        sublayers = (self._build_attention("norm1", reach), self._build_feed_forward("norm2"))
        for k, sublayer in enumerate(sublayers, 1):
            inner = [Node(f"norm{k}", self.norm_tpm, ["x"], WORD), *sublayer]
            inner += self.build_dropout(inner[-1].role, f"drop{k}")
            nodes += inner
            summed.append(inner[-1].role)
        return [*nodes, Node("x", Add(), summed, WORD)]

    def build_final_norm(self) -> list[Node]:
        """The norm after the last slice, if there is one."""
        return [Node("norm", self.norm_tpm, ["x"], WORD)] if self.output_role == "norm" else []

    def _build_residual(
        self, x: str, sublayer: Callable[[str], list[Node]], roles: tuple[str, str, str], *, makes_state: bool = False
    ) -> list[Node]:
        """The nodes of `norm(x + sublayer(x))`, or of `x + sublayer(norm(x))`."""
        drop, add, norm = roles
        pre = self.norm == "pre"
        inner = sublayer(norm if pre else x)
        inner += self.build_dropout(inner[-1].role, drop)
        total = Node("x" if pre and makes_state else add, Add(), [x, inner[-1].role], WORD)
        if pre:
            return [Node(norm, self.norm_tpm, [x], WORD), *inner, total]
        return [*inner, total, Node("x" if makes_state else norm, self.norm_tpm, [add], WORD)]

    def _build_attention(
        self, x: str, reach: Reach, prefix: str = "", memory: tuple[str, str] | None = None
    ) -> list[Node]:
        """The nodes of attention with all heads; keys and values are of `memory` (a role, its plate), else of x."""
        width = self.key_dim or self.dim // self.heads
        q, k, v, a, mix = (prefix + role for role in ("q", "k", "v", "a", "mix"))
        W_o = f"W_{prefix}o"
        project = Affine() if self._has_bias("map") else Linear()
        heads = [plate.name for plate in self.plates]
        plates = {q: heads, k: heads[:1], v: heads[:1]}
        sources = {q: (x, "word"), k: memory or (x, "word"), v: memory or (x, "word")}
        relative = self.relative_bias if memory is None else None  # words of two sentences have no distance
        arrows: list[str | Arrow] = [q, Arrow(k, reach), Arrow(v, reach), *(["b"] if relative else [])]
        return [
            *(Node(f"W_{role}", Weight((width, self.dim)), plates=plates[role]) for role in sources),
            *(Node(r, project, [f"W_{r}", source], [*plates[r], over]) for r, (source, over) in sources.items()),
            Node(a, Attention(self.score, bias=relative), arrows, [*heads, "word"]),
            Node(W_o, Weight((self.dim, width), spread=self.dim**-0.5), plates=heads),
            Node(mix, Concat(bias=self._has_bias("mix"), plates=len(heads)), [W_o, a], WORD),
        ]

    def _build_feed_forward(self, x: str) -> list[Node]:
        """The node of the feed-forward map."""
        hidden = 4 * self.dim if self.hidden is None else self.hidden
        return [Node("ffn", FeedForward(hidden, self.activation, self.gated, self._has_bias("ffn")), [x], WORD)]

    def _has_bias(self, part: str) -> bool:
        """True if a map has a bias."""
        return self.bias and part not in self.parts_without_bias


def count_words(vocabulary: Vocabulary) -> int:
    """The number of words of a vocabulary."""
    if isinstance(vocabulary, str | Sequence):
        return len(check_vocabulary(vocabulary))
    try:
        return check_int("vocabulary", vocabulary)
    except BNetError as error:
        expected = "a list of different words, or their number (at least 1)"
        raise BNetError("vocabulary", expected=expected, actual=vocabulary) from error


def get_positions(positions: TPM | str | None, dim: int, words: int | None) -> TPM | None:
    """The TPM of the positions from a name or a TPM; `words` is the maximum number of words of learned positions."""
    name = positions if isinstance(positions, str) else None
    if words is not None and name != "learned":
        raise BNetError("words", expected="None unless positions='learned'", actual=words)
    if positions is None or (isinstance(positions, TPM) and not positions.get_slots()):
        return positions
    if name == "sinusoidal":
        return Sinusoid(dim)
    if name == "learned":
        if words is None:
            raise BNetError("words", expected="the maximum number of words, because positions='learned'")
        return Positions(words, dim)
    allowed = "'sinusoidal', 'learned', None, a TPM without parents such as Sinusoid(dim, base=100.0)"
    raise BNetError("positions", expected="a position encoding", actual=positions, allowed=allowed)


def parse_mask(mask: object, subject: str = "mask") -> Reach:
    """The reach of a mask; None is the reach `"every"`."""
    reach = as_reach(mask)
    if reach.is_single:
        raise BNetError(subject, expected="a mask", actual=mask, allowed="None, 'causal', a Reach, a table of booleans")
    return reach


def shift_right(outputs: Tensor, start: int) -> Tensor:
    """The input words of a decoder from its outputs: the start word, then all outputs except the last.

    Args:
        outputs: The ids of the output words, `[..., word]`, at least one word.
        start: The id of the start word, at least 0.

    Returns:
        The ids of the input words, `[..., word]`.

    Raises:
        BNetError: If `outputs` are not integers, or have no word.

    >>> shift_right(torch.tensor([[5, 6, 7]]), start=0)
    tensor([[0, 5, 6]])
    """
    has_words = isinstance(outputs, Tensor) and outputs.dim() > 0 and outputs.shape[-1] > 0
    if not has_words or outputs.is_floating_point() or outputs.is_complex() or outputs.dtype == torch.bool:
        raise BNetError("outputs", expected="a tensor of ids, [..., word], with at least one word", actual=outputs)
    first = torch.full_like(outputs[..., :1], check_int("start", start, minimum=0))
    return torch.cat([first, outputs[..., :-1]], -1)
