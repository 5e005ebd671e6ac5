"""The values that `do` accepts: zeros, means, noise, attention rows and values of other sentences, for nodes by name,
group, role or pattern.
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
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.graph import GroundGraph, NodeGroup
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
    """The mean of a node's values in other sentences.

    Without sentences, the mean of its group's values over the words of this sentence.

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
            allowed = "Mean(), over the words of this sentence"
            raise BNetError("Mean", expected="a list of sentences", actual=sentences, allowed=allowed)
        object.__setattr__(self, "sentences", tuple(sentences or ()))


@dataclass(frozen=True)
class Noise:
    """A node's value plus normal noise, which the seed and the node's name fix.

    The value is that after all other interventions of the same `do`, except `Noise` and `Mean()`.

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
    """Attention weights in place of `P(j | i)`, for all words or for those that the node may attend to.

    The node still depends on its values v (and its residual), but no longer on q and k.

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
            raise BNetError("Attend", expected="probabilities of words, summing to 1", actual=weights)
        object.__setattr__(self, "weights", row)


def match_nodes(ground: GroundGraph, pattern: object) -> list[int]:
    """The nodes that a name, a group (`q_2`), a role (`q`) or a pattern (`q_2_*_3`) matches.

    A star matches one index, so `q_*_3` has slice and word and no head. Names take precedence over groups, and groups
    over roles.
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
    """Node -> value, with groups, roles and patterns expanded; one value for each node."""
    result: dict[int, object] = {}
    for pattern, value in values.items():
        for node in match_nodes(ground, pattern):
            if node in result:
                actual = f"two, one of them by {pattern!r}"
                raise EvidenceError(f"do of {ground.name(node)}", expected="one value", actual=actual)
            result[node] = value
    return result


def is_relative(value: object) -> bool:
    """True for a value that depends on the values of the sentence itself: `Noise`, and `Mean()` over its words."""
    return isinstance(value, Noise) or (isinstance(value, Mean) and not value.sentences)


def resolve_value(model: GroundModel, node: int, value: object) -> Tensor | AttentionRow:
    """The tensor or attention row that a node is set to."""
    name, spec = model.ground.name(node), model.spec(node)
    match value:
        case Zero():
            if spec.tpm.is_index_valued:
                raise EvidenceError(name, expected="a node whose value is real numbers", actual="one that has states")
            return torch.zeros(spec.shape, dtype=model.network.dtype, device=model.network.device)
        case Mean(sentences=sentences):
            return torch.stack([_check_single_value(model, node, other[name]) for other in sentences]).mean(0)
        case Attend(weights=weights):
            return _build_attention_row(model, node, weights)
    return encode_value(model, node, value[name] if _has_node_values(value) else value, evidence=False)  # type: ignore[index]


@dataclass
class RelativeValues:
    """The values of `Noise` and `Mean()` (`is_relative`); the mean of each group is computed once."""

    model: GroundModel
    get_value: Callable[[int], Tensor]
    _means: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, node: int, value: object) -> Tensor:
        if isinstance(value, Noise):
            current = self._get_current_value(node)
            return current + sample_noise(self.model.ground.name(node), value, current)
        group, index = self.model.ground.unravel_index(node)
        check_has_words(group, self.model.ground.name(node))
        first = node - index[-1]
        if first not in self._means:
            words = range(self.model.ground.word_counts[group.word_stack or ""])
            self._means[first] = torch.stack([self._get_current_value(first + i) for i in words]).mean(0)
        return self._means[first]

    def _get_current_value(self, node: int) -> Tensor:
        """The current value of a node."""
        name, tpm = self.model.ground.name(node), self.model.spec(node).tpm
        if tpm.is_random and node not in self.model.do:
            expected = "a node with a value: a function of its parents"
            raise EvidenceError(name, expected=expected, actual=f"a {tpm.kind} one")
        return _check_single_value(self.model, node, self.get_value(node))


def sample_noise(name: str, noise: Noise, value: Tensor) -> Tensor:
    """The noise of a node, fixed by its name and the seed."""
    digest = hashlib.sha256(f"{noise.seed}/noise/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return noise.sigma * torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)


def check_has_words(group: NodeGroup, name: str) -> None:
    """Refuse the mean over words for a node without words."""
    if group.word_stack is None:
        raise EvidenceError(name, expected="a node over words, or Mean(sentences)", actual="Mean() of another")


def _has_node_values(value: object) -> bool:
    """True for a sentence, or another object with values by node name that is no mapping, list or tensor."""
    is_plain = isinstance(value, Tensor | Mapping | Sequence | str)
    return not is_plain and hasattr(value, "ground") and hasattr(value, "__getitem__")


def _check_single_value(model: GroundModel, node: int, value: Tensor) -> Tensor:
    """Check that a value consists of real numbers and does not depend on open choices."""
    name, shape = model.ground.name(node), model.spec(node).shape
    if not value.is_floating_point():
        raise EvidenceError(name, expected="a node whose value is real numbers", actual="one that has states")
    if tuple(value.shape) != shape:
        hint = suggest_do(model.network, value, shape)
        actual = f"one of shape {tuple(value.shape)}"
        raise EvidenceError(name, expected=f"one value of shape {shape}", actual=actual, allowed=hint)
    return value


def _build_attention_row(model: GroundModel, node: int, weights: Tensor) -> AttentionRow:
    """The attention weights of a node, one for each word."""
    (spec, index), name = locate_node(model, node), model.ground.name(node)
    values = next((parent for parent in spec.parents if parent.slot == "v."), None)
    is_plain = isinstance(spec.tpm, Attention) and not any(parent.pick for parent in spec.parents)
    if not is_plain or values is None or values.over != (WORD,):
        expected = "a node that is the mix of an Attention over words, without picks"
        raise EvidenceError(name, expected=expected, actual=type(spec.tpm).__name__)
    words = find_slot_parents(model, spec, index, values, {})[2]
    row = torch.zeros(model.ground.word_counts[model.network.specs[values.index].group.word_stack or ""])
    if len(weights) not in (len(row), len(words)):
        raise EvidenceError(name, expected=f"{len(row)} probabilities, one for each word", actual=f"{len(weights)}")
    if len(weights) == len(row) and float(weights[words].sum()) < 1 - 1e-6:
        actual = f"{weights.tolist()}"
        raise EvidenceError(name, expected=f"probabilities of the words that it reads, {words}", actual=actual)
    row = row.to(model.network.device, model.network.dtype)
    row[words] = (weights[words] if len(weights) == len(row) else weights).to(row)
    return AttentionRow(row)
