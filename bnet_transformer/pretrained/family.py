"""What a family of pretrained models says of itself: where its config has the sizes, where its weights lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bnet_transformer.errors import BNetError, number, one_of, whole

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
}


@dataclass(frozen=True)
class Where:
    """Where a map or a table lies: the key of its module, and how it lies there.

    `transposed`: `[in, out]`. `part`: it is one of several side by side, `(which, of how many)`. `skip`: rows before
    the first that counts. `bias`: a key of its own for the bias, where it lies elsewhere.
    """

    key: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    skip: int = 0
    bias: str | None = None


@dataclass(frozen=True)
class Family:
    """One family: the names of its config, the keys of its modules, and what sets it apart.

    `config` maps each option of `Options` to the family's own name for it, `defaults` are what a config that leaves it
    out means, `modules` maps the parts of our declaration to where they lie (`{t}` is the slice), `unsupported` the
    settings that change the equations, with the value that does not; `in_lens` says that TransformerLens has it.
    """

    name: str
    prefix: str
    config: Mapping[str, str]
    defaults: Mapping[str, object]
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

    def where(self, part: str) -> Where:
        """Where a part lies."""
        found = self.modules[part]
        return found if isinstance(found, Where) else Where(found)

    def options(self, config: Mapping[str, Any], architecture: str | None, readout: str | None) -> Options:
        """What a config says, in our words."""
        for name, harmless in self.unsupported.items():
            if config.get(name, harmless) != harmless:
                got = f"{name}={config[name]!r}"
                raise BNetError(f"config of {self.name}", expected=f"{name}={harmless!r}", got=got)
        dim, heads, activation = self.size(config, "dim"), self.size(config, "heads"), self.said(config, "activation")
        if dim % heads:
            raise BNetError(f"config of {self.name}", expected=f"heads that divide {dim}", got=heads)
        if activation not in ACTIVATIONS:
            got, allowed = activation, ", ".join(ACTIVATIONS)
            raise BNetError(f"config of {self.name}", expected="a known activation", got=got, allowed=allowed)
        hidden = self.said(config, "hidden")
        one_of("readout", readout, ("auto", None))
        observed = None if readout is None else self._readout(architecture)
        labels = _labels(config)
        if observed == "class":
            _check_classes(config, labels)
        return Options(
            dim=dim,
            heads=heads,
            slices=self.size(config, "slices"),
            hidden=4 * dim if hidden is None else whole(self.config["hidden"], hidden),
            length=self.size(config, "length") - self.first_position,
            states=self.size(config, "states"),
            segments=self.size(config, "segments") if "segments" in self.config else None,
            activation=ACTIVATIONS[activation],
            eps=number(self.config.get("eps", "eps"), self.said(config, "eps"), above=0),
            causal=self.reach == "causal" or bool(config.get("is_decoder", False)),
            tied=bool(config.get("tie_word_embeddings", True)),
            readout=observed,
            labels=labels,
        )

    def size(self, config: Mapping[str, Any], option: str) -> int:
        """A whole number of a config."""
        return whole(f"{self.config[option]} of the config", self.said(config, option))

    def said(self, config: Mapping[str, Any], option: str) -> Any:
        """What a config says of an option, or means by leaving it out."""
        name = self.config.get(option, option)
        found = config.get(name, self.defaults.get(option))
        if found is None and option not in self.defaults:
            raise BNetError(f"config of {self.name}", expected=f"a value for {name!r}", got="none")
        return found

    def _readout(self, architecture: str | None) -> str | None:
        """What a model of an architecture observes, from the end of its name."""
        if architecture is None:
            return None
        found = [readout for end, readout in READOUTS.items() if architecture.endswith(end) and end != "Model"]
        found += [None] if architecture.endswith("Model") else []
        part = {"word": "logits", "class": "classifier", "tag": "tags"}.get(found[0] or "") if found else None
        if not found or (found[0] is not None and part not in self.modules):
            ends = [end for end, r in READOUTS.items() if r is None or _PARTS[r] in self.modules]
            allowed = f"models whose names end in {', '.join(ends)}; readout=None reads the states alone"
            raise BNetError("architecture", expected="a readout that is known", got=architecture, allowed=allowed)
        return found[0]


_PARTS = {"word": "logits", "class": "classifier", "tag": "tags"}


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
    causal: bool
    tied: bool
    readout: str | None
    labels: tuple[str, ...]


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes, which a config tells by number; two where it tells none."""
    found = config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
    if not isinstance(found, Mapping):
        raise BNetError("id2label of the config", expected="a mapping from numbers to labels", got=found)
    numbered = all(str(k).isdecimal() for k in found)
    by_number = {int(k): str(label) for k, label in found.items()} if numbered else {}
    if not by_number or sorted(by_number) != list(range(len(found))):
        raise BNetError("id2label of the config", expected="labels for 0, 1, 2, ...", got=found)
    return tuple(by_number[k] for k in range(len(by_number)))


def _check_classes(config: Mapping[str, Any], labels: tuple[str, ...]) -> None:
    """Refuse a readout of the sentence that is no choice of one class."""
    kind = config.get("problem_type")
    if kind in (None, "single_label_classification") and len(labels) > 1:
        return
    got = f"problem_type={kind!r}" if kind else "num_labels=1, which is regression"
    allowed = "readout=None reads the states alone"
    wanted = "one class of several (a regression tells no sigma, and labels that do not exclude each other no classes)"
    raise BNetError("readout of the sentence", expected=wanted, got=got, allowed=allowed)
