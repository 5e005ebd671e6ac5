"""Model families as data (`ModelFamily`: config keys, weight keys), and how they read a config as `ModelOptions`."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bnet_transformer._core.checks import check_choice, check_float, check_int, is_integer
from bnet_transformer._core.naming import Reach
from bnet_transformer.declare import Declaration
from bnet_transformer.errors import BNetError, FileError, format_value
from bnet_transformer.tpm import Bias, Patches, Rotary

# --------------------------------------------------------------------------------------------------------------------
# The values of a config: sizes, labels, rotary positions, attention windows, image patches.
#
# A config is untrusted input, so each value is checked before anything of its size is built.


Config = Mapping[str, Any]
MAX_SIZE = 2**22  # maximum width, and maximum size of a vocabulary
ROPE_TYPES = ("default", "linear", "llama3")
LABEL_KEYS = ("num_labels", "id2label", "problem_type")
PATCH_KEYS = ("image_size", "patch_size", "num_channels")
ROPE_KEYS = ("rope_scaling", "rope_parameters", "original_max_position_embeddings")
ROPE_PARAMETERS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
)
# Keys that change no value of a net in evaluation mode, in any family.
IRRELEVANT_KEYS = re.compile(
    r"""model_type | architectures | auto_map | _?name_or_path | _commit_hash | transformers\.js_config
    | ((adapter_)?transformers|adapters|unsloth|torch)_version | finetuning_task | label2id | _num_labels | language
    | (torch_)?dtype | use_bfloat16 | torchscript | _?(attn|experts)_implementation(_internal|_autoset)?
    | _flash_attn_2_enabled | use_flash_attn | is_encoder_decoder | tokenizer_class | n_ctx
    | \w*dropout(_(prob|rate))? | \w+_pdrop | \w*layerdrop | drop_path_rate
    | initializer_(range|factor) | init_std | gradient_checkpointing | loss_type | pretraining_tp
    | use_cache | output_(attentions|hidden_states|past|scores) | return_dict(_in_generate)? | chunk_size_feed_forward
    | (decoder_|forced_)?(bos|eos|pad|sep|cls|mask|unk)_token_ids? | decoder_start_token_id
    | force_bos_token_to_be_generated | bad_words_ids | prefix | task_specific_params
    | summary_(type|use_proj|activation|proj_to_labels|hidden_size)
    | (max|min)_length | max_new_tokens | do_sample | early_stopping | num_beams | num_beam_groups | diversity_penalty
    | temperature | top_[kp] | typical_p | (repetition|length|exponential_decay_length)_penalty
    | (encoder_)?no_repeat_ngram_size | num_return_sequences | remove_invalid_values | (begin_)?suppress_tokens""",
    re.VERBOSE,
)


def check_settings(
    subject: str,
    family: str,
    settings: Mapping[str, object],
    read: Collection[str],
    neutral: Mapping[str, Collection[object]],
    hint: str | None = None,
) -> None:
    """Raise an error for settings that no rule reads, with their list, because they could change the equations.

    Args:
        subject: The source of the settings.
        family: The name of the family.
        settings: The settings; None is a setting without a value.
        read: The settings that rules read.
        neutral: For other settings, the values that change nothing.
        hint: What to do.
    """
    unread = []
    for key, value in sorted(settings.items()):
        values = neutral.get(key, ())
        if key not in read and value is not None and value not in values:
            expected = f", not {' or '.join(map(repr, values))}" if values else ""
            unread.append(f"{key}={format_value(repr(value))}{expected}")
    if unread:
        expected, allowed = f"only settings of a {family} that are read", ", ".join(sorted({*read, *neutral}))
        raise BNetError(subject, expected=expected, actual=", ".join(unread), allowed=allowed, hint=hint)


def check_size(subject: str, value: object, maximum: int) -> int:
    """Check an integer from 1 to `maximum`."""
    integer = check_int(subject, value)
    if integer > maximum:
        raise BNetError(subject, expected=f"an integer of at most {maximum}", actual=value)
    return integer


def config_to_labels(config: Config) -> tuple[str, ...]:
    """Return the names of the classes: `id2label`, or `LABEL_k` for `num_labels` classes, 2 by default."""
    count = config.get("num_labels")
    count = 2 if count is None else check_size("num_labels of the config", count, MAX_SIZE)
    labels = config.get("id2label") or {k: f"LABEL_{k}" for k in range(count)}
    if not isinstance(labels, Mapping):
        raise BNetError("id2label of the config", expected="a mapping from numbers to labels", actual=labels)
    is_numbered = all(is_integer(str(k)) for k in labels)
    by_id = {int(k): str(label) for k, label in labels.items()} if is_numbered else {}
    if not by_id or sorted(by_id) != list(range(len(labels))):
        raise BNetError("id2label of the config", expected="labels for 0, 1, 2, ...", actual=labels)
    return tuple(by_id[k] for k in range(len(by_id)))


def check_single_label(config: Config, labels: tuple[str, ...]) -> None:
    """Raise an error for a readout of the sentence that does not choose one class.

    A regression has no sigma, so it defines no distribution. Labels that do not exclude each other are not classes.
    """
    kind = config.get("problem_type")
    if kind in (None, "single_label_classification") and len(labels) > 1:
        return
    actual = f"problem_type={kind!r}" if kind else "num_labels=1, which is regression"
    expected = "a choice of one of several classes, because other readouts define no distribution"
    hint = "Use readout=None for only the hidden states"
    raise BNetError("readout of the sentence", expected=expected, actual=actual, hint=hint)


def config_to_rotary(
    config: Config, widths: tuple[int, int], partial_factor: object, theta: object, max_words: int | None
) -> Rotary:
    """Read the rotary positions (RoPE) of heads; `rope_parameters` of the config take precedence over the arguments.

    Args:
        config: The config.
        widths: The width of a head, and the width from which the number of rotated features is computed.
        partial_factor: The share of features that are rotated; None if the family rotates all features.
        theta: The base of the angles.
        max_words: The maximum number of words of a sentence.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        expected = "a mapping with the same parameters for all slices"
        raise BNetError("rope_parameters of the config", expected=expected, actual=rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        allowed = ", ".join(ROPE_TYPES)
        raise BNetError("rope_type of the config", expected="a supported type", actual=kind, allowed=allowed)
    check_settings("rope_parameters of the config", str(config.get("model_type", "model")), rope, ROPE_PARAMETERS, {})
    subject = "partial_rotary_factor of the config"
    fraction = check_float(subject, rope.get("partial_rotary_factor", partial_factor or 1), above=0)
    if fraction > 1 or (partial_factor is None and fraction < 1):
        expected = "1, because the family rotates all features" if partial_factor is None else "at most 1"
        raise BNetError(subject, expected=expected, actual=fraction)
    rotated = int(widths[1] * fraction)
    num_features = None if rotated == widths[0] else rotated
    theta = next(value for value in (rope.get("rope_theta"), theta, 10000.0) if value is not None)
    theta = check_float("rope_theta of the config", theta, above=0)
    if kind == "default":
        return Rotary(theta, num_features)
    factor = check_float("factor of the rope_parameters", rope.get("factor"), above=0)
    if kind != "llama3":
        return Rotary(theta, num_features, factor)
    # Llama 3.1 (Grattafiori et al. 2024) divides only low frequencies by `factor`. The bands are wavelengths relative
    # to the sentence length of the original training. Values outside `rope_parameters` take precedence.
    original = "original_max_position_embeddings"
    known = {original: max_words} | dict(rope) | dict(config)
    names = ("low_freq_factor", "high_freq_factor")
    low, high = (check_float(f"{name} of the rope_parameters", known.get(name), above=0) for name in names)
    bands = low, high, check_int(f"{original} of the rope_parameters", known.get(original))
    return Rotary(theta, num_features, factor, bands)


def is_causal(config: Config) -> bool:
    """Return True if the words of a decoder attend only to earlier words."""
    return bool(config.get("is_causal", True))


def config_to_reach(layer_types: Sequence[str] | None, window: int | None, first_sliding: int, slices: int) -> Reach:
    """Return the words that a word of a causal stack attends to: all earlier words, or those of a sliding window.

    Args:
        layer_types: The type of each slice; all must be equal. None to infer them from the other arguments.
        window: The number of words of the window, including the word itself; None for all words.
        first_sliding: The index of the first slice with the window.
        slices: The number of slices.
    """
    is_list = isinstance(layer_types, list | tuple) and all(isinstance(kind, str) for kind in layer_types)
    if layer_types is not None and not is_list:
        raise BNetError("layer_types of the config", expected="a list of the types of its slices", actual=layer_types)
    slides = [window is not None and t >= first_sliding for t in range(slices)]
    layer_types = layer_types or ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]
    if len(set(layer_types)) > 1 or layer_types[0] not in ("sliding_attention", "full_attention"):
        expected, actual = "one attention type for all slices", ", ".join(map(str, layer_types))
        allowed = "full_attention or sliding_attention, in every slice"
        raise BNetError("layer_types of the config", expected=expected, actual=actual, allowed=allowed)
    if window is None or layer_types[0] == "full_attention":
        return Reach("causal")
    return Reach("recent", window - 1)


def config_to_patches(config: Config) -> Patches:
    """Read the patches of an image from a config."""
    image_size, patch_size = _read_size_pair(config, "image_size", 224), _read_size_pair(config, "patch_size", 16)
    channels = check_int("num_channels of the config", config.get("num_channels", 3))
    return Patches(channels, *image_size, *patch_size)


def _read_size_pair(config: Config, name: str, default: int) -> tuple[int, int]:
    """Read the rows and columns of a size, which is one number or `[rows, columns]`."""
    size = config.get(name, default)
    pair = list(size) if isinstance(size, list | tuple) else [size, size]
    if len(pair) != 2:
        raise BNetError(f"{name} of the config", expected="one number, or the numbers of rows and columns", actual=size)
    return check_int(f"{name} of the config", pair[0]), check_int(f"{name} of the config", pair[1])


MAX_SLICES = 2**10
MAX_WORDS = 2**32  # maximum number of words of a sentence
SIZE_OPTIONS = ("dim", "heads", "slices", "hidden", "states", "segments", "embedding")
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "linear": "identity",
}
READOUTS: dict[str, str | None] = {  # by the suffix of a class name; the first match counts
    "ForMaskedLM": "word",
    "LMHeadModel": "word",
    "DoubleHeadsModel": "word",
    "ForCausalLM": "word",
    "ForPreTraining": "word",
    "ForSequenceClassification": "class",
    "ForTokenClassification": "tag",
    "ForImageClassification": "class",
    "Model": None,
}
READOUT_PARTS = {"word": "logits", "class": "classifier", "tag": "tags"}  # the last part of each readout
# Parts that a model without a readout does not have.
READOUT_ONLY_PARTS = ("dense", "transform_norm", "logits", "class_dense", "classifier", "tags")
ADAPTER_ADVICE = "Describe the family as in docs/adapters.md"
# Settings that change the equations of any family that does not read them, with the value that does not change them.
NEUTRAL = {"is_decoder": False, "is_causal": False, "add_cross_attention": False, "pruned_heads": {}}
NEUTRAL |= {"tie_encoder_decoder": False}
UNREAD_ADVICE = (
    "The net would have other values. If a setting changes nothing, remove it from the config, or list it in "
    "irrelevant= of the family (docs/adapters.md)"
)


@dataclass(frozen=True)
class WeightLocation:
    """The location of a weight in a checkpoint: the key of its module, and its layout.

    Args:
        key: The key of the module; `{t}` is the index of the slice.
        transposed: True if the matrix is `[in, out]`.
        chunk: `(index, count)`: the index of the weight among several weights that are concatenated, such as q, k, v.
        is_interleaved: True if the chunks alternate head by head; False if each chunk contains all heads.
        row_offset: The number of unused rows before the first row.
        bias: The key of the bias, or its location, if it is not in the module; None if it is.
        is_tensor_key: True if `key` is the key of the tensor itself.
        leading_dims: The number of dims of size 1 before the dims of the net's parameter.
        is_conv: True if the last three dims (channels, rows, columns of a convolution) are one dim of the parameter.
    """

    key: str
    transposed: bool = False
    chunk: tuple[int, int] = (0, 1)
    is_interleaved: bool = False
    row_offset: int = 0
    bias: str | WeightLocation | None = None
    is_tensor_key: bool = False
    leading_dims: int = 0
    is_conv: bool = False


@dataclass(frozen=True)
class GGUFFormat:
    """How a GGUF file contains a model of a family.

    Args:
        architecture: The name of the architecture, `general.architecture`.
        interleaved: The parts whose rows are in the order of llama.cpp: the features of a head that are rotated
            together follow each other.
    """

    architecture: str
    interleaved: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelFamily:
    """A model family: the keys of its config, the keys of its weights, and how its architecture differs from others.

    Args:
        name: The `model_type` of its configs.
        prefix: The prefix of the keys of a model with a readout.
        config: The config key of each option, or `(key, default)`; a key of None means that no config contains it.
        modules: The location of each part of the declaration in the weights; `{t}` is the index of the slice.
        norm: `"post"`, `"pre"` or `"parallel"`.
        reach: `"causal"` or `"every"`.
        has_embed_norm: True if the embeddings have a norm.
        first_position: The index of the first position in the table of positions.
        logits_bias: True if the logits of words have a bias.
        transform: The activation before the logits; None for the activation of the feed-forward map.
        classifier: The part and the activation of the pooler before the classifier; empty for none.
        unsupported: Settings that change the equations, with the value that does not change them.
        irrelevant: Settings that change no value. A setting that is neither read nor in this list raises an error,
            except for settings that are irrelevant for every family (names, dropout, ids of tokens, generation).
        buffers: Keys of the weights that no node needs.
        in_transformer_lens: True if TransformerLens has the family, with the hooks of one stack of words.
        key_mapping: Regular expressions of legacy keys, with their replacements.
        shared: True if all slices share one set of weights.
        has_normed_last_state: True if the last of `hidden_states` is the output of the final norm.
        is_vision: True if words are patches of an image.
        norm_type: `"layer"` or `"rms"`.
        gated: True if the feed-forward map is gated.
        rotary: True if q and k have rotary positions.
        biased: For each kind of map, whether it has a bias, or the config key that determines it.
        relative_bias: A bias of all scores by distance, one node for all slices; None for none.
        can_decode: True if `is_decoder` in a config makes attention causal.
        aliases: Other keys that a config may have, with the family's key (`attribute_map` of its config class).
        readouts: The readout by the suffix of the model's class name.
        declare: A function from `(family, options, vocabulary, extras)` to the declaration, which replaces
            `options_to_declaration`.
        resolve_options: A function from `(family, options, weights)` to options, for options that depend on the
            weights and not only on the config.
        gguf: How GGUF files contain the family; None if they are not supported.
    """

    name: str
    prefix: str
    config: Mapping[str, str | tuple[str | None, object]]
    modules: Mapping[str, str | WeightLocation]
    norm: str = "post"
    reach: str = "every"
    has_embed_norm: bool = True
    first_position: int = 0
    logits_bias: bool = True
    transform: str | None = None
    classifier: tuple[str, ...] = ()
    unsupported: Mapping[str, object] = field(default_factory=dict)
    irrelevant: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    in_transformer_lens: bool = True
    key_mapping: Mapping[str, str] = field(default_factory=dict)
    shared: bool = False
    has_normed_last_state: bool = True
    is_vision: bool = False
    norm_type: str = "layer"
    gated: bool = False
    rotary: bool = False
    biased: Mapping[str, bool | str] = field(default_factory=dict)
    relative_bias: Bias | None = None
    can_decode: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    readouts: Mapping[str, str | None] = field(default_factory=lambda: READOUTS)
    declare: Callable[..., Declaration] | None = None
    resolve_options: Callable[..., ModelOptions] | None = None
    gguf: GGUFFormat | None = None

    @cached_property
    def config_keys(self) -> dict[str, str]:
        """The config key of each option, without options that no config contains."""
        keys = {option: value if isinstance(value, str) else value[0] for option, value in self.config.items()}
        return {option: key for option, key in keys.items() if key is not None}

    @cached_property
    def config_defaults(self) -> dict[str, object]:
        """The default of each option that a config may omit."""
        return {option: value[1] for option, value in self.config.items() if not isinstance(value, str)}

    @cached_property
    def read_keys(self) -> frozenset[str]:
        """The config keys that determine the options."""
        keys = {*self.config_keys.values(), *self.aliases, *LABEL_KEYS, "tie_word_embeddings"}
        keys |= {key for key in self.biased.values() if isinstance(key, str)}
        keys |= {*(ROPE_KEYS if self.rotary else ()), *(PATCH_KEYS if self.is_vision else ())}
        return frozenset(keys | ({"is_causal", "is_decoder"} if self.reach == "causal" or self.can_decode else set()))

    def locate(self, part: str) -> WeightLocation:
        """Return the location of the weight of a part.

        Args:
            part: The name of the part.

        Returns:
            The location.
        """
        location = self.modules[part]
        return location if isinstance(location, WeightLocation) else WeightLocation(location)

    def get_weight_key(self, part: str) -> str:
        """Return the key of the weight of a part.

        Args:
            part: The name of the part.

        Returns:
            The key.
        """
        return f"{self.locate(part).key}.weight"

    def canonicalize_config(self, config: Config) -> Config:
        """Return a config without aliases; an alias takes precedence over the family's own key, as in `transformers`.

        Args:
            config: The config.

        Returns:
            The config with the family's own keys.
        """
        canonical = {key: value for key, value in config.items() if key not in self.aliases}
        return canonical | {key: config[alias] for alias, key in self.aliases.items() if alias in config}

    def config_to_options(self, config: Config, architecture: str | None, readout: str | None) -> ModelOptions:
        """Read the options of a model from its config.

        Args:
            config: The config.
            architecture: The name of the model's class; None for the hidden states.
            readout: `"auto"` for the readout of the architecture, None for no readout.

        Returns:
            The options.

        Raises:
            BNetError: If a setting is not supported, missing, or out of range.
        """
        config = self.canonicalize_config(config)
        self._check_settings(config)
        dim, heads = self.read_size(config, "dim"), self.read_size(config, "heads")
        activation, key_dim = self.read_setting(config, "activation"), self.read_optional_size(config, "key_dim")
        if dim % heads and key_dim is None:
            raise BNetError(f"config of {self.name}", expected=f"a number of heads that divides {dim}", actual=heads)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            allowed = ", ".join(ACTIVATIONS)
            expected = "a supported activation"
            raise BNetError(f"config of {self.name}", expected=expected, actual=activation, allowed=allowed)
        hidden = self.read_setting(config, "hidden")
        check_choice("readout", readout, ("auto", None))
        observed = None if readout is None else self._infer_readout(architecture)
        image = config_to_patches(config) if self.is_vision else None
        labels = config_to_labels(config)
        if observed == "class":
            check_single_label(config, labels)
        return ModelOptions(
            dim=dim,
            heads=heads,
            slices=self.read_size(config, "slices"),
            hidden=4 * dim if hidden is None else check_int(self.config_keys["hidden"], hidden),
            num_positions=image.words if image else self._count_positions(config),
            states=0 if image else self.read_size(config, "states"),
            segments=self.read_size(config, "segments") if "segments" in self.config_keys else None,
            activation=ACTIVATIONS[activation],
            eps=check_float(self.config_keys.get("eps", "eps"), self.read_setting(config, "eps"), above=0),
            reach=self._infer_reach(config),
            tied=bool(config.get("tie_word_embeddings", self.config_defaults.get("tied", True))),
            readout=observed,
            labels=labels,
            embedding_dim=self.read_size(config, "embedding") if "embedding" in self.config_keys else dim,
            image=image,
            norm="parallel" if self._find_setting(config, "parallel") else self.norm,
            key_dim=None if key_dim == dim / heads else key_dim,
            groups=self._count_groups(config, heads),
            unbiased=frozenset(part for part in self.biased if not self._has_bias(config, part)),
            rotary=self._build_rotary(config, key_dim or dim // heads) if self.rotary else None,
        )

    def read_size(self, config: Config, option: str) -> int:
        """Read a size from a config. It is bounded, because loops run over it before any weight is read.

        Args:
            config: The config.
            option: The name of the option.

        Returns:
            The size.
        """
        maximum = MAX_SLICES if option == "slices" else MAX_SIZE
        return check_size(f"{self.config_keys[option]} of the config", self.read_setting(config, option), maximum)

    def read_optional_size(self, config: Config, option: str) -> int | None:
        """Read a size that a config may omit or set to None.

        Args:
            config: The config.
            option: The name of the option.

        Returns:
            The size, or None.
        """
        size = self._find_setting(config, option)
        return None if size is None else check_size(f"{self.config_keys[option]} of the config", size, MAX_WORDS)

    def read_setting(self, config: Config, option: str) -> Any:
        """Read the value of an option from a config, or its default.

        Args:
            config: The config.
            option: The name of the option.

        Returns:
            The value.

        Raises:
            BNetError: If there is neither a value nor a default.
        """
        key, default = self.config_keys.get(option), self.config_defaults.get(option)
        value = default if key is None else config.get(key, default)
        if value is None and option not in self.config_defaults:
            raise BNetError(f"config of {self.name}", expected=f"a value for {key or option!r}; it is missing")
        return value

    def _find_setting(self, config: Config, option: str, default: object = None) -> Any:
        """Read the value of an option, or the default if the family does not have it."""
        return self.read_setting(config, option) if option in self.config_keys else default

    def _check_settings(self, config: Config) -> None:
        """Raise an error for settings that are not read and could change the equations."""
        neutral = {key: (value,) for key, value in (NEUTRAL | dict(self.unsupported)).items()}
        read = {*self.read_keys, *self.irrelevant} - self.unsupported.keys()
        keys = [key for key in config if key in self.unsupported or not IRRELEVANT_KEYS.fullmatch(key)]
        settings = {key: config[key] for key in keys}
        check_settings(f"config of {self.name}", self.name, settings, read, neutral, UNREAD_ADVICE)

    def _count_positions(self, config: Config) -> int:
        """Return the number of rows of the table of learned positions; 0 if there is no table."""
        has_table = "length" in self.config_keys and not self.rotary
        return self.read_size(config, "length") - self.first_position if has_table else 0

    def _infer_reach(self, config: Config) -> Reach:
        """Return the words that a word attends to."""
        if self.reach != "causal" and not (self.can_decode and config.get("is_decoder", False)):
            return Reach("every")
        window = self.read_optional_size(config, "window") if self._find_setting(config, "slides", True) else None
        first = check_int("first_sliding", self._find_setting(config, "first_sliding", 0), minimum=0)
        types = config.get(self.config_keys["types"]) if "types" in self.config_keys else None
        reach = config_to_reach(types, window, first, self.read_size(config, "slices"))
        if is_causal(config):
            return reach
        return Reach("window", reach.width + 1) if reach.kind == "recent" else Reach("every")

    def _count_groups(self, config: Config, heads: int) -> int | None:
        """Return the number of groups of heads that share keys and values (GQA); None if each head has its own."""
        groups = self.read_optional_size(config, "groups")
        if groups is not None and heads % groups:
            subject = f"{self.config_keys['groups']} of the config"
            raise BNetError(subject, expected=f"a divisor of the {heads} heads", actual=groups)
        return None if groups == heads else groups

    def _has_bias(self, config: Config, part: str) -> bool:
        """Return True if the maps of a part have a bias."""
        key = self.biased[part]
        return key if isinstance(key, bool) else bool(config.get(key, self.config_defaults.get(key, False)))

    def _build_rotary(self, config: Config, width: int) -> Rotary:
        """Create the rotary positions of heads of a width."""
        factor, theta = self._find_setting(config, "rotary_part"), config.get(self.config_keys["rotary_base"])
        widths = width, self.read_optional_size(config, "rotary_width") or width
        return config_to_rotary(config, widths, factor, theta, self.read_optional_size(config, "length"))

    def _infer_readout(self, architecture: str | None) -> str | None:
        """Infer the readout of an architecture from the suffix of its name."""
        if architecture is None:
            return None
        known = [end for end, kind in self.readouts.items() if kind is None or READOUT_PARTS.get(kind) in self.modules]
        end = next((end for end in self.readouts if architecture.endswith(end)), None)
        if end not in known:
            allowed, hint = f"names that end in {', '.join(known)}", "Use readout=None for only the hidden states"
            expected = "a model class with a supported readout"
            raise BNetError("architecture", expected=expected, actual=architecture, allowed=allowed, hint=hint)
        return self.readouts[end]


@dataclass(frozen=True)
class ModelOptions:
    """The sizes and settings of a model with the names of this package.

    Attributes:
        dim: The width of the hidden states.
        heads: The number of heads.
        slices: The number of slices.
        hidden: The width of the feed-forward maps.
        num_positions: The number of learned positions; 0 for none.
        states: The size of the vocabulary; 0 for images.
        segments: The number of segments; None for none.
        activation: The activation of the feed-forward maps.
        eps: The eps of the norms.
        reach: The words that a word attends to.
        tied: True if the embeddings and the readout share one table.
        readout: `"word"`, `"class"`, `"tag"` or None.
        labels: The names of the classes or tags.
        embedding_dim: The width of the embeddings, before a map to `dim`.
        image: The patches of an image; None for words.
        norm: `"post"`, `"pre"` or `"parallel"`.
        key_dim: The width of keys and queries of a head; None for `dim / heads`.
        groups: The number of groups of heads that share keys and values; None if each head has its own.
        unbiased: The kinds of maps without a bias.
        rotary: The rotary positions; None for none.
        start: The id of the start token of a decoder; None for none.
        tied_keys: For each missing weight key, the key that is read in its place.
    """

    dim: int
    heads: int
    slices: int
    hidden: int
    num_positions: int
    states: int
    segments: int | None
    activation: str
    eps: float
    reach: Reach
    tied: bool
    readout: str | None
    labels: tuple[str, ...]
    embedding_dim: int
    image: Patches | None = None
    norm: str = "post"
    key_dim: int | None = None
    groups: int | None = None
    unbiased: frozenset[str] = frozenset()
    rotary: Rotary | None = None
    start: int | None = None
    tied_keys: Mapping[str, str] = field(default_factory=dict)


def load_config(family: ModelFamily, raw_config: Config, origin: str) -> Config:
    """Read a config.json as `transformers` does, with its defaults.

    Args:
        family: The family.
        raw_config: The JSON object.
        origin: The name of the source for error messages.

    Returns:
        The settings; `raw_config` itself if `transformers` is not installed or does not know the model type.
    """
    _check_config_sizes(family, raw_config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of transformers about its imports and deprecated names
        try:
            from transformers import CONFIG_MAPPING

            config_class = CONFIG_MAPPING[family.name]
        except (ImportError, KeyError):
            return raw_config
        try:
            config: dict[str, Any] = config_class.from_dict(copy.deepcopy(dict(raw_config))).to_dict()
        except Exception as error:  # of any type: each config class checks its settings differently
            actual = " ".join(str(error).split()) or type(error).__name__
            expected = "settings that transformers accepts"
            raise FileError(f"config of {origin}", expected=expected, actual=format_value(actual)) from error
    return config


def _check_config_sizes(family: ModelFamily, raw_config: Config) -> None:
    """Raise an error for sizes out of range, before a config class builds a list of this length."""
    for option in SIZE_OPTIONS:
        key = family.config_keys.get(option)
        for name in (key, *(alias for alias, name in family.aliases.items() if name == key)):
            if name is not None and raw_config.get(name) is not None:
                check_size(f"{name} of the config", raw_config[name], MAX_SLICES if option == "slices" else MAX_SIZE)
    config_to_labels(raw_config)
