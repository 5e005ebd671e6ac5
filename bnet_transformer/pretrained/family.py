"""What a family of pretrained models says of itself: where its config has the sizes, where its weights lie; and what a
config tells, labels, rotary positions, windows and patches among it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bnet_transformer._core.checks import check_choice, check_float, check_int
from bnet_transformer._core.naming import Reach
from bnet_transformer.declare import Declaration
from bnet_transformer.errors import BNetError, FileError, format_value
from bnet_transformer.tpm import Bias, Patches, Rotary

MAX_SIZE = 2**22
"""As large as a width or a vocabulary can be."""
MAX_SLICES = 2**10
MAX_WORDS = 2**32
"""As many words as a model may read at once."""
SIZE_OPTIONS = ("dim", "heads", "slices", "hidden", "states", "segments", "embedding")  # options that count something
ROPE_TYPES = ("default", "linear", "llama3")
DEFAULT_ROPE_THETA = 10000.0

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
READOUTS: dict[str, str | None] = {  # by the end of the name of a class; the first that fits
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
READOUT_PARTS = {"word": "logits", "class": "classifier", "tag": "tags"}  # the part that makes each readout
READOUT_ONLY_PARTS = (
    "dense",
    "transform_norm",
    "logits",
    "class_dense",
    "classifier",
    "tags",
)  # parts that a bare model has not

UNSUPPORTED = {"per_layer_config": None}
"""Settings that would change the equations of any family, with the value that does not."""


@dataclass(frozen=True)
class WeightLocation:
    """Where a map or a table lies: the key of its module, and how it lies there.

    `transposed`: `[in, out]`. `chunk`: it is one of several side by side, `(which, of how many)`, of all heads or
    `is_interleaved` each head. `row_offset`: rows before the first that counts. `bias`: a key of its own for the bias, where it lies
    elsewhere. `is_tensor_key`: the key is that of the tensor itself, not of a module. `leading_dims`: dims of size one before ours.
    `is_conv`: its last dims are one of ours, as a convolution's are.
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
    """One family: the names of its config, the keys of its modules, and what sets it apart.

    `config` maps each option of `ModelOptions` to the family's own name for it, with what a config means that leaves it out
    where it may (`(name, meant)`; the name is None where no config tells it), `aliases` other names that a config may
    have for these to them (the `attribute_map` of its config class), `modules` the parts of our declaration to where
    they lie (`{t}` is the slice), `unsupported` the settings that change the equations, with the value that does not;
    `in_transformer_lens` says that TransformerLens has it.
    `key_mapping` maps pieces of keys, as files of before have them, to today's. `shared`: one weight node and one set of
    parameters serve all slices. `has_normed_last_state`: the last of `hidden_states` is what leaves the final norm. `is_vision`:
    its words are patches of an image. `norm_type` is that of its norms, `gated` its feed-forward map, `rotary` says that
    positions turn its q and k, and `biased` which maps have a bias, or the setting of the config that tells.
    `relative_bias`: a bias of all scores by distance, from one node for all slices. `can_decode`: where a config says
    `is_decoder`, a word reads no later ones. `readouts`: what a model observes, by the end of the name of its class.

    `declare`, in place of `options_to_declaration`, makes the declaration of `(family, options, vocabulary, extras)`;
    `resolve_options` the options of `(family, options, weights)`, where the weights say more than the config.
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
        """The config's name for each option that it tells."""
        found = {option: told if isinstance(told, str) else told[0] for option, told in self.config.items()}
        return {option: name for option, name in found.items() if name is not None}

    @cached_property
    def config_defaults(self) -> dict[str, object]:
        """What a config means that leaves an option out."""
        return {option: told[1] for option, told in self.config.items() if not isinstance(told, str)}

    def locate(self, part: str) -> WeightLocation:
        """Where a part lies."""
        found = self.modules[part]
        return found if isinstance(found, WeightLocation) else WeightLocation(found)

    def get_weight_key(self, part: str) -> str:
        """The key of the weight of a part."""
        return f"{self.locate(part).key}.weight"

    def canonicalize_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config with the family's own name for each setting; where an alias is there too, it goes first.

        A config that `transformers` has read has no other names.
        """
        own = {name: value for name, value in config.items() if name not in self.aliases}
        return own | {name: config[alias] for alias, name in self.aliases.items() if alias in config}

    def config_to_options(
        self, config: Mapping[str, Any], architecture: str | None, readout: str | None
    ) -> ModelOptions:
        """What a config says, in our words."""
        config = self.canonicalize_config(config)
        for name, harmless in (UNSUPPORTED | dict(self.unsupported)).items():
            if config.get(name, harmless) != harmless:
                got = f"{name}={config[name]!r}"
                raise BNetError(f"config of {self.name}", expected=f"{name}={harmless!r}", actual=got)
        dim, heads, activation = (
            self.read_size(config, "dim"),
            self.read_size(config, "heads"),
            self.read_setting(config, "activation"),
        )
        key_dim = self.read_optional_size(config, "key_dim")
        if dim % heads and key_dim is None:
            raise BNetError(f"config of {self.name}", expected=f"heads that divide {dim}", actual=heads)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            got, allowed = activation, ", ".join(ACTIVATIONS)
            raise BNetError(f"config of {self.name}", expected="a known activation", actual=got, allowed=allowed)
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

    def read_size(self, config: Mapping[str, Any], option: str) -> int:
        """A whole number of a config, no larger than any model has it: loops go over it before weights are seen."""
        most = MAX_SLICES if option == "slices" else MAX_SIZE
        return check_size(f"{self.config_keys[option]} of the config", self.read_setting(config, option), most)

    def read_optional_size(self, config: Mapping[str, Any], option: str) -> int | None:
        """A whole number of a config that may tell none."""
        found = self.read_setting(config, option) if option in self.config_keys else None
        return None if found is None else check_size(f"{self.config_keys[option]} of the config", found, MAX_WORDS)

    def read_setting(self, config: Mapping[str, Any], option: str) -> Any:
        """What a config says of an option, or means by leaving it out."""
        name, meant = self.config_keys.get(option), self.config_defaults.get(option)
        found = meant if name is None else config.get(name, meant)
        if found is None and option not in self.config_defaults:
            raise BNetError(f"config of {self.name}", expected=f"a value for {name or option!r}", actual="none")
        return found

    def _count_positions(self, config: Mapping[str, Any]) -> int:
        """For how many words there are learned positions; 0 where positions are none or need no table."""
        return (
            0
            if self.rotary or "length" not in self.config_keys
            else self.read_size(config, "length") - self.first_position
        )

    def _infer_reach(self, config: Mapping[str, Any]) -> Reach:
        """Which words a word reads."""
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

    def _count_groups(self, config: Mapping[str, Any], heads: int) -> int | None:
        """How many groups of heads share keys and values; None where each head has its own."""
        groups = self.read_optional_size(config, "groups")
        if groups is not None and heads % groups:
            what = f"{self.config_keys['groups']} of the config"
            raise BNetError(what, expected=f"a divisor of the {heads} heads", actual=groups)
        return None if groups == heads else groups

    def _has_bias(self, config: Mapping[str, Any], part: str) -> bool:
        """True where the maps of a part add a bias."""
        told = self.biased[part]
        return told if isinstance(told, bool) else bool(config.get(told, self.config_defaults.get(told, False)))

    def _build_rotary(self, config: Mapping[str, Any], width: int) -> Rotary:
        """The turns of heads of a width."""
        part = self.read_setting(config, "rotary_part") if "rotary_part" in self.config_keys else None
        base = config.get(self.config_keys["rotary_base"])
        turning = self.read_optional_size(config, "rotary_width") or width
        return config_to_rotary(config, (width, turning), part, base, self.read_optional_size(config, "length"))

    def _infer_readout(self, architecture: str | None) -> str | None:
        """What a model of an architecture observes, from the end of its name."""
        if architecture is None:
            return None
        known = [
            end
            for end, readout in self.readouts.items()
            if readout is None or READOUT_PARTS.get(readout) in self.modules
        ]
        end = next((end for end in self.readouts if architecture.endswith(end)), None)
        if end not in known:
            allowed = f"models whose names end in {', '.join(known)}; readout=None reads the states alone"
            raise BNetError("architecture", expected="a readout that is known", actual=architecture, allowed=allowed)
        return self.readouts[end]


@dataclass(frozen=True)
class ModelOptions:
    """A model's sizes and habits in our words."""

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
    embedding_dim: int  # the width of the words before they are mapped to the states'
    image: Patches | None = None
    norm: str = "post"
    key_dim: int | None = None
    groups: int | None = None
    unbiased: frozenset[str] = frozenset()
    rotary: Rotary | None = None
    start: int | None = None  # the token with which the words of a decoder start
    tied_keys: Mapping[str, str] = field(default_factory=dict)  # keys that weights lack, and those read in their place


# what a config tells


def load_config(family: ModelFamily, raw_config: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
    """The settings that `transformers` makes of a config.json; those themselves where it is not installed or does not
    know the model type."""
    _check_config_sizes(family, raw_config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports, and of names that are deprecated
        try:
            from transformers import CONFIG_MAPPING

            config_class = CONFIG_MAPPING[family.name]
        except (ImportError, KeyError):
            return raw_config
        try:
            config: dict[str, Any] = config_class.from_dict(copy.deepcopy(dict(raw_config))).to_dict()
        except Exception as error:  # of many kinds, for each class checks its settings in its own way
            got = format_value(" ".join(str(error).split()) or type(error).__name__)  # in one line
            raise FileError(f"config of {origin}", expected="settings that transformers reads", actual=got) from error
    return config


def _check_config_sizes(family: ModelFamily, raw_config: Mapping[str, Any]) -> None:
    """Refuse counts that no model has before a config class makes a list of such a length."""
    for option in SIZE_OPTIONS:
        own = family.config_keys.get(option)
        for name in (own, *(alias for alias, name in family.aliases.items() if name == own)):
            if name is not None and raw_config.get(name) is not None:
                check_size(f"{name} of the config", raw_config[name], MAX_SLICES if option == "slices" else MAX_SIZE)
    config_to_labels(raw_config)


def check_size(subject: str, value: object, maximum: int) -> int:
    """A whole number from 1 up to the most that it can be."""
    integer = check_int(subject, value)
    if integer > maximum:
        raise BNetError(subject, expected=f"a whole number of at most {maximum}", actual=value)
    return integer


def config_to_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes, which a config tells by number, or how many they are; two where it tells neither."""
    count = config.get("num_labels")
    count = 2 if count is None else check_size("num_labels of the config", count, MAX_SIZE)
    found = config.get("id2label") or {k: f"LABEL_{k}" for k in range(count)}
    if not isinstance(found, Mapping):
        raise BNetError("id2label of the config", expected="a mapping from numbers to labels", actual=found)
    numbered = all(str(k).isdecimal() and len(str(k)) < 10 for k in found)
    by_number = {int(k): str(label) for k, label in found.items()} if numbered else {}
    if not by_number or sorted(by_number) != list(range(len(found))):
        raise BNetError("id2label of the config", expected="labels for 0, 1, 2, ...", actual=found)
    return tuple(by_number[k] for k in range(len(by_number)))


def check_single_label(config: Mapping[str, Any], labels: tuple[str, ...]) -> None:
    """Refuse a readout of the sentence that is no choice of one class."""
    kind = config.get("problem_type")
    if kind in (None, "single_label_classification") and len(labels) > 1:
        return
    got = f"problem_type={kind!r}" if kind else "num_labels=1, which is regression"
    allowed = "readout=None reads the states alone"
    wanted = "one class of several (a regression tells no sigma, and labels that do not exclude each other no classes)"
    raise BNetError("readout of the sentence", expected=wanted, actual=got, allowed=allowed)


# rotary positions, windows, patches


def config_to_rotary(
    config: Mapping[str, Any], widths: tuple[int, int], partial_factor: object, theta: object, max_words: int | None
) -> Rotary:
    """The rotary positions of heads, of which `widths` tells how wide they are and how wide the turns take them to be.

    `theta`, and the `partial_factor` of the features that turns, are what the config tells beside its `rope_parameters`, which go
    first; all features turn where a family knows no part. `max_words` is how many words the model may read.
    """
    told = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(told, Mapping) or any(isinstance(value, Mapping) for value in told.values()):
        raise BNetError("rope_parameters of the config", expected="those of all slices, a mapping", actual=told)
    kind = told.get("rope_type", told.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise BNetError("rope_type of the config", expected="a known one", actual=kind, allowed=", ".join(ROPE_TYPES))
    share = check_float(
        "partial_rotary_factor of the config", told.get("partial_rotary_factor", partial_factor or 1), above=0
    )
    if share > 1 or (partial_factor is None and share < 1):
        wanted = "1: all features turn" if partial_factor is None else "at most 1"
        raise BNetError("partial_rotary_factor of the config", expected=wanted, actual=share)
    turned = int(widths[1] * share)
    of_heads = None if turned == widths[0] else turned
    theta = check_float("rope_theta of the config", told.get("rope_theta") or theta or DEFAULT_ROPE_THETA, above=0)
    if kind == "default":
        return Rotary(theta, of_heads)
    factor = check_float("factor of the rope_parameters", told.get("factor"), above=0)
    known = (
        {"original_max_position_embeddings": max_words} | dict(told) | dict(config)
    )  # what stands outside goes first
    if kind != "llama3":
        return Rotary(theta, of_heads, factor)
    names = ("low_freq_factor", "high_freq_factor")
    low, high = (check_float(f"{name} of the rope_parameters", known.get(name), above=0) for name in names)
    first = "original_max_position_embeddings"  # how long the sentences were that a model was first trained on
    bands = low, high, check_int(f"{first} of the rope_parameters", known.get(first))
    return Rotary(theta, of_heads, factor, bands)


def is_causal(config: Mapping[str, Any]) -> bool:
    """False where a config lets the words of a decoder read later ones too."""
    return bool(config.get("is_causal", True))


def config_to_reach(layer_types: Sequence[str] | None, window: int | None, first_sliding: int, slices: int) -> Reach:
    """Which words a word of a causal stack reads: all those before it, or those of a window alone.

    Slices from `first_sliding` on have the window, unless the config tells the types of its slices; they are of one type.
    """
    if layer_types is not None and not (
        isinstance(layer_types, list | tuple) and all(isinstance(each, str) for each in layer_types)
    ):
        raise BNetError("layer_types of the config", expected="a list of the types of its slices", actual=layer_types)
    slides = [window is not None and t >= first_sliding for t in range(slices)]
    layer_types = layer_types or ["sliding_attention" if each else "full_attention" for each in slides]
    if len(set(layer_types)) > 1 or layer_types[0] not in ("sliding_attention", "full_attention"):
        got, allowed = (
            ", ".join(map(str, layer_types)),
            "full_attention in every slice, sliding_attention in every slice",
        )
        raise BNetError("layer_types of the config", expected="slices that all read alike", actual=got, allowed=allowed)
    if window is None or layer_types[0] == "full_attention":
        return Reach("causal")
    return Reach("recent", window - 1)


def config_to_patches(config: Mapping[str, Any]) -> Patches:
    """How a config cuts an image; a size is one number or `[rows, columns]`."""
    rows, columns = _read_size_pair(config, "image_size", 224)
    high, wide = _read_size_pair(config, "patch_size", 16)
    channels = check_int("num_channels of the config", config.get("num_channels", 3))
    return Patches(channels, rows, columns, high, wide)


def _read_size_pair(config: Mapping[str, Any], name: str, default: int) -> tuple[int, int]:
    found = config.get(name, default)
    pair = list(found) if isinstance(found, list | tuple) else [found, found]
    if len(pair) != 2:
        raise BNetError(f"{name} of the config", expected="a number, or one for rows and one for columns", actual=found)
    return check_int(f"{name} of the config", pair[0]), check_int(f"{name} of the config", pair[1])
