"""Model families as data (`ModelFamily`: config keys, weight keys), and how they read a config as `ModelOptions`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bnet_transformer._core.checks import check_choice, check_float, check_int
from bnet_transformer._core.naming import Reach
from bnet_transformer.declare import Declaration
from bnet_transformer.errors import BNetError, FileError, format_value
from bnet_transformer.pretrained.config import (
    MAX_SIZE,
    Config,
    check_single_label,
    check_size,
    config_to_labels,
    config_to_patches,
    config_to_reach,
    config_to_rotary,
    is_causal,
)
from bnet_transformer.tpm import Bias, Patches, Rotary

MAX_SLICES = 2**10
MAX_WORDS = 2**32  # of one sentence
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
READOUTS: dict[str, str | None] = {  # by the suffix of a class name; the first that fits
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
READOUT_PARTS = {"word": "logits", "class": "classifier", "tag": "tags"}  # readout -> its last part
# Parts that a model without a readout lacks.
READOUT_ONLY_PARTS = ("dense", "transform_norm", "logits", "class_dense", "classifier", "tags")
# Settings that would change the equations of any family, with the value that does not.
UNSUPPORTED = {"per_layer_config": None}


@dataclass(frozen=True)
class WeightLocation:
    """The location of a weight in a checkpoint: the key of its module, and its layout there.

    Args:
        key: The key of the module; `{t}` is the slice.
        transposed: Whether the matrix is `[in, out]`.
        chunk: `(index, count)`: the weight is one of several that are concatenated, such as q of q, k, v.
        is_interleaved: Whether the chunks alternate head by head, rather than each covering all heads.
        row_offset: The number of unused rows before the first.
        bias: The key of the bias where it is not that of the module, or its location.
        is_tensor_key: Whether `key` is the key of the tensor itself.
        leading_dims: The number of dims of size 1 before those of the net's parameter.
        is_conv: Whether its last three dims (channels, rows, columns of a convolution) are one dim of the parameter.
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
class ModelFamily:
    """A model family: the keys of its config, the keys of its weights, and how its architecture differs from others.

    Args:
        name: The `model_type` of its configs.
        prefix: The prefix of the keys of a model with a readout.
        config: For each option, its key in the config, or `(key, default)`; a key of None means that no config has it.
        modules: For each part of the declaration, its location among the weights; `{t}` is the slice.
        norm: "post", "pre" or "parallel".
        reach: "causal", or "every".
        has_embed_norm: Whether the embeddings have a norm.
        first_position: The index of the first position in the table of positions.
        logits_bias: Whether the logits of words have a bias.
        transform: The activation before the logits; None for that of the feed-forward map.
        classifier: The part and the activation of the pooler before the classifier; empty for none.
        unsupported: Settings that change the equations, with the value that does not.
        buffers: Keys of the weights that no node needs.
        in_transformer_lens: Whether TransformerLens has the family.
        key_mapping: Regular expressions of legacy keys, with their replacements.
        shared: Whether all slices share one set of weights.
        has_normed_last_state: Whether the last of `hidden_states` comes after the final norm.
        is_vision: Whether its words are patches of an image.
        norm_type: "layer" or "rms".
        gated: Whether the feed-forward map is gated.
        rotary: Whether q and k have rotary positions.
        biased: For each kind of map, whether it has a bias, or the key of the config that says so.
        relative_bias: A bias of all scores by distance, one node for all slices.
        can_decode: Whether `is_decoder` in a config makes attention causal.
        aliases: Other keys that a config may have, with the family's own (`attribute_map` of its config class).
        readouts: The readout by the suffix of the model's class name.
        declare: Makes the declaration of `(family, options, vocabulary, extras)`, in place of `options_to_declaration`.
        resolve_options: Makes the options of `(family, options, weights)`, where the weights decide what the config
            leaves open.
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

    @cached_property
    def config_keys(self) -> dict[str, str]:
        """The key of each option in a config, without options that no config has."""
        keys = {option: value if isinstance(value, str) else value[0] for option, value in self.config.items()}
        return {option: key for option, key in keys.items() if key is not None}

    @cached_property
    def config_defaults(self) -> dict[str, object]:
        """The default of each option that a config may omit."""
        return {option: value[1] for option, value in self.config.items() if not isinstance(value, str)}

    def locate(self, part: str) -> WeightLocation:
        """The location of the weight of a part."""
        location = self.modules[part]
        return location if isinstance(location, WeightLocation) else WeightLocation(location)

    def get_weight_key(self, part: str) -> str:
        """The key of the weight of a part."""
        return f"{self.locate(part).key}.weight"

    def canonicalize_config(self, config: Config) -> Config:
        """A config without aliases; an alias takes precedence over the family's own key, as in `transformers`."""
        canonical = {key: value for key, value in config.items() if key not in self.aliases}
        return canonical | {key: config[alias] for alias, key in self.aliases.items() if alias in config}

    def config_to_options(self, config: Config, architecture: str | None, readout: str | None) -> ModelOptions:
        """The options of a model.

        Args:
            config: The config.
            architecture: The name of the model's class.
            readout: "auto" for that of the architecture, None for none.

        Raises:
            BNetError: Where a setting is not supported, missing, or out of range.
        """
        config = self.canonicalize_config(config)
        for name, harmless in (UNSUPPORTED | dict(self.unsupported)).items():
            if config.get(name, harmless) != harmless:
                actual = f"{name}={config[name]!r}"
                raise BNetError(f"config of {self.name}", expected=f"{name}={harmless!r}", actual=actual)
        dim, heads = self.read_size(config, "dim"), self.read_size(config, "heads")
        activation, key_dim = self.read_setting(config, "activation"), self.read_optional_size(config, "key_dim")
        if dim % heads and key_dim is None:
            raise BNetError(f"config of {self.name}", expected=f"heads that divide {dim}", actual=heads)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            allowed = ", ".join(ACTIVATIONS)
            raise BNetError(f"config of {self.name}", expected="a known activation", actual=activation, allowed=allowed)
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
            norm="parallel" if "parallel" in self.config_keys and self.read_setting(config, "parallel") else self.norm,
            key_dim=None if key_dim == dim / heads else key_dim,
            groups=self._count_groups(config, heads),
            unbiased=frozenset(part for part in self.biased if not self._has_bias(config, part)),
            rotary=self._build_rotary(config, key_dim or dim // heads) if self.rotary else None,
        )

    def read_size(self, config: Config, option: str) -> int:
        """A size of a config, bounded: loops run over it before any weight is read."""
        maximum = MAX_SLICES if option == "slices" else MAX_SIZE
        return check_size(f"{self.config_keys[option]} of the config", self.read_setting(config, option), maximum)

    def read_optional_size(self, config: Config, option: str) -> int | None:
        """A size that a config may omit or set to None."""
        size = self.read_setting(config, option) if option in self.config_keys else None
        return None if size is None else check_size(f"{self.config_keys[option]} of the config", size, MAX_WORDS)

    def read_setting(self, config: Config, option: str) -> Any:
        """The value of an option in a config, or its default."""
        key, default = self.config_keys.get(option), self.config_defaults.get(option)
        value = default if key is None else config.get(key, default)
        if value is None and option not in self.config_defaults:
            raise BNetError(f"config of {self.name}", expected=f"a value for {key or option!r}", actual="none")
        return value

    def _count_positions(self, config: Config) -> int:
        """The number of rows of the table of learned positions; 0 without one."""
        has_table = "length" in self.config_keys and not self.rotary
        return self.read_size(config, "length") - self.first_position if has_table else 0

    def _infer_reach(self, config: Config) -> Reach:
        """The words that a word attends to."""
        if self.reach != "causal" and not (self.can_decode and config.get("is_decoder", False)):
            return Reach("every")
        slides = "slides" not in self.config_keys or self.read_setting(config, "slides")
        window = self.read_optional_size(config, "window") if slides else None
        first = self.read_setting(config, "first_sliding") if "first_sliding" in self.config_keys else 0
        first = check_int("first_sliding", first, minimum=0)
        types = config.get(self.config_keys["types"]) if "types" in self.config_keys else None
        reach = config_to_reach(types, window, first, self.read_size(config, "slices"))
        if is_causal(config):
            return reach
        return Reach("window", reach.width + 1) if reach.kind == "recent" else Reach("every")

    def _count_groups(self, config: Config, heads: int) -> int | None:
        """The number of groups of heads that share keys and values (GQA); None where each head has its own."""
        groups = self.read_optional_size(config, "groups")
        if groups is not None and heads % groups:
            subject = f"{self.config_keys['groups']} of the config"
            raise BNetError(subject, expected=f"a divisor of the {heads} heads", actual=groups)
        return None if groups == heads else groups

    def _has_bias(self, config: Config, part: str) -> bool:
        """Whether the maps of a part have a bias."""
        key = self.biased[part]
        return key if isinstance(key, bool) else bool(config.get(key, self.config_defaults.get(key, False)))

    def _build_rotary(self, config: Config, width: int) -> Rotary:
        """The rotary positions of heads of a width."""
        factor = self.read_setting(config, "rotary_part") if "rotary_part" in self.config_keys else None
        theta = config.get(self.config_keys["rotary_base"])
        widths = width, self.read_optional_size(config, "rotary_width") or width
        return config_to_rotary(config, widths, factor, theta, self.read_optional_size(config, "length"))

    def _infer_readout(self, architecture: str | None) -> str | None:
        """The readout of an architecture, from the suffix of its name."""
        if architecture is None:
            return None
        known = [end for end, kind in self.readouts.items() if kind is None or READOUT_PARTS.get(kind) in self.modules]
        end = next((end for end in self.readouts if architecture.endswith(end)), None)
        if end not in known:
            allowed = f"models whose names end in {', '.join(known)}; readout=None reads the states alone"
            raise BNetError("architecture", expected="a readout that is known", actual=architecture, allowed=allowed)
        return self.readouts[end]


@dataclass(frozen=True)
class ModelOptions:
    """The sizes and settings of a model under the names of this package."""

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
    embedding_dim: int  # of the words, before a map to `dim`
    image: Patches | None = None
    norm: str = "post"
    key_dim: int | None = None
    groups: int | None = None
    unbiased: frozenset[str] = frozenset()
    rotary: Rotary | None = None
    start: int | None = None  # the id of a decoder's start token
    tied_keys: Mapping[str, str] = field(default_factory=dict)  # missing key -> the key that is read in its place


def load_config(family: ModelFamily, raw_config: Config, origin: str) -> Config:
    """The settings that `transformers` reads from a config.json, with its defaults.

    Args:
        family: The family.
        raw_config: The JSON object.
        origin: The source in messages.

    Returns:
        The settings; `raw_config` itself where `transformers` is not installed or does not know the model type.
    """
    _check_config_sizes(family, raw_config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its imports and deprecated names
        try:
            from transformers import CONFIG_MAPPING

            config_class = CONFIG_MAPPING[family.name]
        except (ImportError, KeyError):
            return raw_config
        try:
            config: dict[str, Any] = config_class.from_dict(copy.deepcopy(dict(raw_config))).to_dict()
        except Exception as error:  # of any kind: each config class checks its settings differently
            actual, expected = " ".join(str(error).split()) or type(error).__name__, "settings that transformers reads"
            raise FileError(f"config of {origin}", expected=expected, actual=format_value(actual)) from error
    return config


def _check_config_sizes(family: ModelFamily, raw_config: Config) -> None:
    """Refuse sizes out of range, before a config class builds a list of such a length."""
    for option in SIZE_OPTIONS:
        key = family.config_keys.get(option)
        for name in (key, *(alias for alias, name in family.aliases.items() if name == key)):
            if name is not None and raw_config.get(name) is not None:
                check_size(f"{name} of the config", raw_config[name], MAX_SLICES if option == "slices" else MAX_SIZE)
    config_to_labels(raw_config)
