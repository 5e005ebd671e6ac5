"""What a family of pretrained models says of itself: where its config has the sizes, where its weights lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bnet_transformer.axes import Reach
from bnet_transformer.errors import BNetError, number, one_of, whole
from bnet_transformer.network import Declaration
from bnet_transformer.pretrained.config import (
    LARGEST,
    LONGEST,
    MOST_SLICES,
    bounded,
    check_classes,
    config_labels,
    config_to_patches,
    config_to_reach,
    config_to_rotary,
    is_causal,
)
from bnet_transformer.tpm import Bias, Patches, Rotary

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
READOUTS = {
    "Model": None,
    "ForMaskedLM": "word",
    "LMHeadModel": "word",
    "DoubleHeadsModel": "word",
    "ForCausalLM": "word",
    "ForPreTraining": "word",
    "ForSequenceClassification": "class",
    "ForTokenClassification": "tag",
    "ForImageClassification": "class",
}
PARTS = {"word": "logits", "class": "classifier", "tag": "tags"}  # the part that makes each readout
BESIDE = ("dense", "transform_norm", "logits", "class_dense", "classifier", "tags")  # parts that a bare model has not

UNSUPPORTED = {"per_layer_config": None}
"""Settings that would change the equations of any family, with the value that does not."""


@dataclass(frozen=True)
class Where:
    """Where a map or a table lies: the key of its module, and how it lies there.

    `transposed`: `[in, out]`. `part`: it is one of several side by side, `(which, of how many)`, of all heads or
    `within` each head. `skip`: rows before the first that counts. `bias`: a key of its own for the bias, where it lies
    elsewhere. `bare`: the key is that of the tensor itself, not of a module. `lead`: dims of size one before ours.
    `flat`: its last dims are one of ours, as a convolution's are.
    """

    key: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    within: bool = False
    skip: int = 0
    bias: str | Where | None = None
    bare: bool = False
    lead: int = 0
    flat: bool = False


@dataclass(frozen=True)
class Family:
    """One family: the names of its config, the keys of its modules, and what sets it apart.

    `config` maps each option of `Options` to the family's own name for it, with what a config means that leaves it out
    where it may (`(name, meant)`; the name is None where no config tells it), `aliases` other names that a config may
    have for these to them (the `attribute_map` of its config class), `modules` the parts of our declaration to where
    they lie (`{t}` is the slice), `unsupported` the settings that change the equations, with the value that does not;
    `in_lens` says that TransformerLens has it.
    `former` maps pieces of keys, as files of before have them, to today's. `shared`: one weight node and one set of
    parameters serve all slices. `last_normed`: the last of `hidden_states` is what leaves the final norm. `in_image`:
    its words are patches of an image. `form` is that of its norms, `gated` its feed-forward map, `rotary` says that
    positions turn its q and k, and `biased` which maps have a bias, or the setting of the config that tells.
    `relative`: a bias of all scores by distance, from one node for all slices. `decodes`: where a config says
    `is_decoder`, a word reads no later ones.

    `declare`, in place of `options_to_declaration`, makes the declaration of `(family, options, vocabulary, extras)`;
    `settle` the options of `(family, options, weights)`, where the weights say more than the config.
    """

    name: str
    prefix: str
    config: Mapping[str, str | tuple[str | None, object]]
    modules: Mapping[str, str | Where]
    norm: str = "post"
    reach: str = "every"
    normed_words: bool = True
    first_position: int = 0
    logits_bias: bool = True
    transform: str | None = None
    classifier: tuple[str, ...] = ()
    unsupported: Mapping[str, object] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    in_lens: bool = True
    former: Mapping[str, str] = field(default_factory=dict)
    shared: bool = False
    last_normed: bool = True
    in_image: bool = False
    form: str = "layer"
    gated: bool = False
    rotary: bool = False
    biased: Mapping[str, bool | str] = field(default_factory=dict)
    relative: Bias | None = None
    decodes: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    declare: Callable[..., Declaration] | None = None
    settle: Callable[..., Options] | None = None

    @cached_property
    def names(self) -> dict[str, str]:
        """The config's name for each option that it tells."""
        found = {option: told if isinstance(told, str) else told[0] for option, told in self.config.items()}
        return {option: name for option, name in found.items() if name is not None}

    @cached_property
    def defaults(self) -> dict[str, object]:
        """What a config means that leaves an option out."""
        return {option: told[1] for option, told in self.config.items() if not isinstance(told, str)}

    def where(self, part: str) -> Where:
        """Where a part lies."""
        found = self.modules[part]
        return found if isinstance(found, Where) else Where(found)

    def canonical(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config with the family's own name for each setting; where an alias is there too, it goes first.

        A config that `transformers` has read has no other names.
        """
        own = {name: value for name, value in config.items() if name not in self.aliases}
        return own | {name: config[alias] for alias, name in self.aliases.items() if alias in config}

    def options(self, config: Mapping[str, Any], architecture: str | None, readout: str | None) -> Options:
        """What a config says, in our words."""
        config = self.canonical(config)
        for name, harmless in (UNSUPPORTED | dict(self.unsupported)).items():
            if config.get(name, harmless) != harmless:
                got = f"{name}={config[name]!r}"
                raise BNetError(f"config of {self.name}", expected=f"{name}={harmless!r}", got=got)
        dim, heads, activation = self.size(config, "dim"), self.size(config, "heads"), self.said(config, "activation")
        key_dim = self.maybe(config, "key_dim")
        if dim % heads and key_dim is None:
            raise BNetError(f"config of {self.name}", expected=f"heads that divide {dim}", got=heads)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            got, allowed = activation, ", ".join(ACTIVATIONS)
            raise BNetError(f"config of {self.name}", expected="a known activation", got=got, allowed=allowed)
        hidden = self.said(config, "hidden")
        one_of("readout", readout, ("auto", None))
        observed = None if readout is None else self._readout(architecture)
        image = config_to_patches(config) if self.in_image else None
        labels = config_labels(config)
        if observed == "class":
            check_classes(config, labels)
        return Options(
            dim=dim,
            heads=heads,
            slices=self.size(config, "slices"),
            hidden=4 * dim if hidden is None else whole(self.names["hidden"], hidden),
            length=image.words if image else self._length(config),
            states=0 if image else self.size(config, "states"),
            segments=self.size(config, "segments") if "segments" in self.names else None,
            activation=ACTIVATIONS[activation],
            eps=number(self.names.get("eps", "eps"), self.said(config, "eps"), above=0),
            reach=self._reach(config),
            tied=bool(config.get("tie_word_embeddings", self.defaults.get("tied", True))),
            readout=observed,
            labels=labels,
            embedding=self.size(config, "embedding") if "embedding" in self.names else dim,
            image=image,
            norm="parallel" if "parallel" in self.names and self.said(config, "parallel") else self.norm,
            key_dim=None if key_dim == dim / heads else key_dim,
            groups=self._groups(config, heads),
            unbiased=frozenset(part for part in self.biased if not self._has_bias(config, part)),
            rotary=self._rotary(config, key_dim or dim // heads) if self.rotary else None,
        )

    def size(self, config: Mapping[str, Any], option: str) -> int:
        """A whole number of a config, no larger than any model has it: loops go over it before weights are seen."""
        most = MOST_SLICES if option == "slices" else LARGEST
        return bounded(f"{self.names[option]} of the config", self.said(config, option), most)

    def maybe(self, config: Mapping[str, Any], option: str) -> int | None:
        """A whole number of a config that may tell none."""
        found = self.said(config, option) if option in self.names else None
        return None if found is None else bounded(f"{self.names[option]} of the config", found, LONGEST)

    def said(self, config: Mapping[str, Any], option: str) -> Any:
        """What a config says of an option, or means by leaving it out."""
        name, meant = self.names.get(option), self.defaults.get(option)
        found = meant if name is None else config.get(name, meant)
        if found is None and option not in self.defaults:
            raise BNetError(f"config of {self.name}", expected=f"a value for {name or option!r}", got="none")
        return found

    def _length(self, config: Mapping[str, Any]) -> int:
        """For how many words there are learned positions; 0 where positions are none or need no table."""
        return 0 if self.rotary or "length" not in self.names else self.size(config, "length") - self.first_position

    def _reach(self, config: Mapping[str, Any]) -> Reach:
        """Which words a word reads."""
        if self.reach != "causal" and not (self.decodes and config.get("is_decoder", False)):
            return Reach("every")
        slides = "slides" not in self.names or self.said(config, "slides")
        window = self.maybe(config, "window") if slides else None
        first = self.said(config, "first_sliding") if "first_sliding" in self.names else 0
        first = whole("first_sliding", first, least=0)
        types = config.get(self.names["types"]) if "types" in self.names else None
        reach = config_to_reach(types, window, first, self.size(config, "slices"))
        if is_causal(config):
            return reach
        return Reach("window", reach.width + 1) if reach.kind == "recent" else Reach("every")

    def _groups(self, config: Mapping[str, Any], heads: int) -> int | None:
        """How many groups of heads share keys and values; None where each head has its own."""
        groups = self.maybe(config, "groups")
        if groups is not None and heads % groups:
            what = f"{self.names['groups']} of the config"
            raise BNetError(what, expected=f"a divisor of the {heads} heads", got=groups)
        return None if groups == heads else groups

    def _has_bias(self, config: Mapping[str, Any], part: str) -> bool:
        """True where the maps of a part add a bias."""
        told = self.biased[part]
        return told if isinstance(told, bool) else bool(config.get(told, self.defaults.get(told, False)))

    def _rotary(self, config: Mapping[str, Any], width: int) -> Rotary:
        """The turns of heads of a width."""
        part = self.said(config, "rotary_part") if "rotary_part" in self.names else None
        base = config.get(self.names["rotary_base"])
        turning = self.maybe(config, "rotary_width") or width
        return config_to_rotary(config, (width, turning), part, base, self.maybe(config, "length"))

    def _readout(self, architecture: str | None) -> str | None:
        """What a model of an architecture observes, from the end of its name."""
        if architecture is None:
            return None
        found = [readout for end, readout in READOUTS.items() if architecture.endswith(end) and end != "Model"]
        found += [None] if architecture.endswith("Model") else []
        part = PARTS.get(found[0] or "") if found else None
        if not found or (found[0] is not None and part not in self.modules):
            ends = [end for end, r in READOUTS.items() if r is None or PARTS[r] in self.modules]
            allowed = f"models whose names end in {', '.join(ends)}; readout=None reads the states alone"
            raise BNetError("architecture", expected="a readout that is known", got=architecture, allowed=allowed)
        return found[0]


@dataclass(frozen=True)
class Options:
    """A model's sizes and habits in our words."""

    dim: int
    heads: int
    slices: int
    hidden: int
    length: int
    states: int
    segments: int | None
    activation: str
    eps: float
    reach: Reach
    tied: bool
    readout: str | None
    labels: tuple[str, ...]
    embedding: int  # the width of the words before they are mapped to the states'
    image: Patches | None = None
    norm: str = "post"
    key_dim: int | None = None
    groups: int | None = None
    unbiased: frozenset[str] = frozenset()
    rotary: Rotary | None = None
    start: int | None = None  # the token with which the words of a decoder start
    tables: Mapping[str, str] = field(default_factory=dict)  # keys that weights lack, and those read in their place
