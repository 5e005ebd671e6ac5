"""The values that `do` accepts: zeros, means, noise, attention rows and values of other sentences. A value is set for a
node, a node group, a role or a pattern.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.arrays import copy_to_tensor
from bnet_transformer._core.checks import check_float, check_seed, set_frozen
from bnet_transformer._core.naming import WORD
from bnet_transformer.data.encode import encode_value, suggest_do
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.graph import GroundGraph
from bnet_transformer.graph.transformer_lens import unknown_node_error
from bnet_transformer.reference import AttentionRow, GroundModel, find_slot_parents, locate_node
from bnet_transformer.tpm import Attention


@dataclass(frozen=True)
class Zero:
    """The value 0 for every entry of a node.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Zero
    >>> bt.bayesuvius(dim=4).sentence("the cat sat").do(v_0_1=Zero())["v_0_1"]
    tensor([0., 0., 0., 0.])
    """


@dataclass(frozen=True)
class Mean:
    """The mean of the values of a node in other sentences, or of its group over the words of this sentence.

    Args:
        sentences: The sentences over which to average the node. Without sentences, the value is the mean of the node
            group over the words of the sentence in which it is set.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Mean
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s.do(x_0_1=Mean())["x_0_1"].isclose((s["x_0_0"] + s["x_0_1"] + s["x_0_2"]) / 3).all().item()
    True
    """

    sentences: tuple[Any, ...] = ()

    def __init__(self, sentences: Sequence[Any] | None = None) -> None:
        is_valid = isinstance(sentences, Sequence) and bool(sentences) and all(map(_has_node_values, sentences))
        if sentences is not None and not is_valid:
            hint = "Use Mean() for the mean over the words of the sentence"
            raise BNetError("Mean", expected="a list of sentences", actual=sentences, hint=hint)
        object.__setattr__(self, "sentences", tuple(sentences or ()))


@dataclass(frozen=True)
class Noise:
    """The value of a node plus normal noise, which is determined by the seed and the name of the node.

    The value is that after all other interventions of the same `do`, except `Noise` and `Mean()`.

    Args:
        sigma: The standard deviation of the noise.
        seed: The seed of the noise.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Noise
    >>> bt.bayesuvius(dim=4).sentence("the cat sat").do(x_0_1=Noise(0.1))["x_0_1"].shape
    torch.Size([4])
    """

    sigma: float
    seed: int = 0

    def __post_init__(self) -> None:
        set_frozen(self, sigma=check_float("sigma", self.sigma, above=0), seed=check_seed(self.seed))


@dataclass(frozen=True)
class Attend:
    """Attention weights that replace `P(j | i)` of a node.

    The node then depends on v (and on its residual), but no longer on q and k.

    Args:
        weights: A probability for each word j, or for each word to which the node can attend, `[word]`; they sum to 1.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Attend
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat").do(x_1_0=Attend([0, 0, 1]))
    >>> s["x_1_0"].isclose(s["v_0_2"]).all().item(), s.parents("x_1_0")
    (True, ['v_0_0', 'v_0_1', 'v_0_2'])
    """

    weights: Tensor

    def __init__(self, weights: object) -> None:
        try:
            row = copy_to_tensor(weights)
            if row.is_complex():
                raise TypeError("complex")
            row = row.to(torch.float64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise BNetError("Attend", expected="a probability for each word", actual=weights) from error
        if row.dim() != 1 or not bool((row >= 0).all()) or abs(float(row.sum()) - 1) > 1e-6:
            raise BNetError("Attend", expected="probabilities of words that sum to 1", actual=weights)
        object.__setattr__(self, "weights", row)


def match_nodes(ground: GroundGraph, pattern: object) -> list[int]:
    """The nodes that match a name, a group (`q_2`), a role (`q`) or a pattern (`q_2_*_3`).

    A star matches one index, so `q_*_3` has a slice and a word but no head. Names take precedence over groups, and
    groups over roles.
    """
    template = ground.template
    if not isinstance(pattern, str) or "*" not in pattern:
        if isinstance(pattern, str) and template.parse_name(pattern, ground.word_counts) is None:
            groups = [template.by_name[pattern]] if pattern in template.by_name else template.by_stem.get(pattern, ())
            nodes = [node for group in groups for node in ground.select_nodes(group).tolist()]
            if nodes:
                return nodes
        return [ground.id(pattern)]
    count = pattern.count("_")
    nodes = []
    for group in template.groups:
        if group.name.count("_") + len(ground.shapes[group.index]) == count:
            base = int(ground.offsets[group.index])
            names = ground.iter_names(group)
            nodes += [base + k for k, name in enumerate(names) if fnmatchcase(name, pattern)]
    if not nodes:
        examples = [next(ground.iter_names(group)) for group in template.groups]
        raise unknown_node_error("pattern of nodes", pattern, examples, template)
    return nodes


def expand_patterns(ground: GroundGraph, values: Mapping[str, object]) -> dict[int, object]:
    """A mapping from node to value, with groups, roles and patterns expanded; two values for a node are an error."""
    result: dict[int, object] = {}
    for pattern, value in values.items():
        for node in match_nodes(ground, pattern):
            if node in result:
                raise EvidenceError(f"do: {pattern!r} sets {ground.name(node)}, which has another value already")
            result[node] = value
    return result


def is_relative(value: object) -> bool:
    """True for a value that depends on the values of the sentence itself: `Noise`, and `Mean()` over its words."""
    return isinstance(value, Noise) or (isinstance(value, Mean) and not value.sentences)


def resolve_value(model: GroundModel, node: int, value: object) -> Tensor | AttentionRow:
    """The tensor or the attention row to which a node is set."""
    name, spec = model.ground.name(node), model.spec(node)
    match value:
        case Zero():
            if spec.tpm.is_index_valued:
                raise EvidenceError(name, expected="a node with real values", actual="a discrete node")
            return torch.zeros(spec.shape, dtype=model.network.dtype, device=model.network.device)
        case Mean(sentences=sentences):
            return torch.stack([_check_single_value(model, node, other[name]) for other in sentences]).mean(0)
        case Attend(weights=weights):
            return _build_attention_row(model, node, weights)
    return encode_value(model, node, value[name] if _has_node_values(value) else value, evidence=False)  # type: ignore[index]


@dataclass
class RelativeValues:
    """Computes the values of `Noise` and `Mean()` (`is_relative`); the mean of each group is computed once."""

    model: GroundModel
    get_value: Callable[[int], Tensor]
    _means: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, node: int, value: object) -> Tensor:
        if isinstance(value, Noise):
            current = self._get_current_value(node)
            return current + sample_noise(self.model.ground.name(node), value, current)
        group, index = self.model.ground.unravel_index(node)
        check_has_words(self.model.spec(node), self.model.ground.name(node))
        first = node - index[-1]
        if first not in self._means:
            words = range(self.model.ground.word_counts[group.word_stack or ""])
            self._means[first] = torch.stack([self._get_current_value(first + i) for i in words]).mean(0)
        return self._means[first]

    def _get_current_value(self, node: int) -> Tensor:
        """The current value of a node."""
        name, tpm = self.model.ground.name(node), self.model.spec(node).tpm
        if tpm.is_random and node not in self.model.do:
            expected = "a node that is a function of its parents"
            raise EvidenceError(name, expected=expected, actual=f"a {tpm.kind} node")
        return _check_single_value(self.model, node, self.get_value(node))


def sample_noise(name: str, noise: Noise, value: Tensor) -> Tensor:
    """The noise of a node, determined by its name and the seed."""
    digest = hashlib.sha256(f"{noise.seed}/noise/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return noise.sigma * torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)


def check_has_words(spec: NodeSpec, name: str) -> None:
    """Raise an error for the mean over words of a node without words."""
    if spec.group.word_stack is None:
        hint = None if spec.tpm.is_index_valued else "Use Mean(sentences)"
        raise EvidenceError(f"{name}: Mean() is the mean over words, and {name} has no words", hint=hint)


def _has_node_values(value: object) -> bool:
    """True for a sentence, or another object with values by node name; mappings, lists and tensors are excluded."""
    is_plain = isinstance(value, Tensor | Mapping | Sequence | str)
    return not is_plain and hasattr(value, "ground") and hasattr(value, "__getitem__")


def _check_single_value(model: GroundModel, node: int, value: Tensor) -> Tensor:
    """Check that a value consists of real numbers and does not depend on latent choices."""
    name, shape = model.ground.name(node), model.spec(node).shape
    if not value.is_floating_point():
        raise EvidenceError(name, expected="a node with real values", actual="a discrete node")
    if tuple(value.shape) != shape:
        hint = suggest_do(model.network, value, shape)
        actual = f"shape {tuple(value.shape)}"
        raise EvidenceError(name, expected=f"one value of shape {shape}", actual=actual, hint=hint)
    return value


def _build_attention_row(model: GroundModel, node: int, weights: Tensor) -> AttentionRow:
    """The attention weights of a node, one for each word."""
    (spec, index), name = locate_node(model, node), model.ground.name(node)
    values = next((parent for parent in spec.parents if parent.slot == "v."), None)
    is_plain = isinstance(spec.tpm, Attention) and not any(parent.pick for parent in spec.parents)
    if not is_plain or values is None or values.over != (WORD,):
        expected = "a node with an Attention over words and without pick="
        raise EvidenceError(name, expected=expected, actual=type(spec.tpm).__name__)
    words = find_slot_parents(model, spec, index, values, {})[2]
    row = torch.zeros(model.ground.word_counts[model.network.specs[values.index].group.word_stack or ""])
    if len(weights) not in (len(row), len(words)):
        raise EvidenceError(name, expected=f"{len(row)} probabilities, one for each word", actual=len(weights))
    if len(weights) == len(row) and float(weights[words].sum()) < 1 - 1e-6:
        actual = f"{weights.tolist()}"
        expected = f"probabilities that are zero except for the words to which it can attend, {words}"
        raise EvidenceError(name, expected=expected, actual=actual)
    row = row.to(model.network.device, model.network.dtype)
    row[words] = (weights[words] if len(weights) == len(row) else weights).to(row)
    return AttentionRow(row)
