"""The values that `do` accepts: zeros, means, noise, shifts, attention rows and values of other sentences. A value is
set for a node, a node group, a role or a pattern.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_seed, set_frozen
from bnet_transformer._core.naming import WORD
from bnet_transformer._core.tensors import copy_to_tensor
from bnet_transformer.data.encode import encode_value, suggest_do, to_reals
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.graph import GroundGraph, NodeFamily, find_family, topological_order
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
        sentences: The sentences over which to average the node, all with its word: the mean of word i is that over
            their words i, and further words are not used. Without sentences, the value is the mean of the node group
            over the words of the sentence in which it is set.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Mean
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s.do(x_0_1=Mean())["x_0_1"].isclose((s["x_0_0"] + s["x_0_1"] + s["x_0_2"]) / 3).all().item()
    True
    """

    sentences: tuple[Any, ...] = ()

    def __init__(self, sentences: Sequence[Any] | None = None) -> None:
        is_valid = isinstance(sentences, Sequence) and bool(sentences) and all(map(has_node_values, sentences))
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


@dataclass(frozen=True)
class Shift:
    """The value of a node plus a vector, as in activation steering (Turner et al. 2023, Rimsky et al. 2024).

    The value is that after all other interventions of the same `do`, including the shifts of its ancestors.

    Args:
        vector: The vector that is added, with the shape of the node.

    Raises:
        BNetError: The vector does not consist of finite real numbers.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Shift
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> vector = torch.tensor([1.0, 0.0, 0.0, -1.0])
    >>> s.do(x_0_1=Shift(vector))["x_0_1"].isclose(s["x_0_1"] + vector).all().item()
    True
    """

    vector: Tensor

    def __init__(self, vector: object) -> None:
        tensor = to_reals("Shift", vector)
        if not bool(tensor.isfinite().all()):
            raise BNetError("Shift", expected="finite numbers", actual="NaN or infinity")
        object.__setattr__(self, "vector", tensor.detach().clone())

    def get_vector(self, model: GroundModel, node: int) -> Tensor:
        """The vector in the type and on the device of a net; an error if the node has another shape.

        Args:
            model: The ground model of the node.
            node: The ground id of the node.

        Returns:
            The vector, `[*shape]`.
        """
        name, spec = model.ground.name(node), model.spec(node)
        if spec.tpm.is_index_valued:
            raise EvidenceError(name, expected="a node with real values", actual="a discrete node")
        if tuple(self.vector.shape) != spec.shape:
            actual = f"shape {tuple(self.vector.shape)}"
            raise EvidenceError(name, expected=f"a shift of shape {spec.shape}", actual=actual)
        return self.vector.to(model.network.device, model.network.dtype)


def expand_names(model: GroundModel, subject: str, values: Mapping[str, object]) -> dict[int, object]:
    """A mapping from node to value, for `do` and for evidence.

    A value of several nodes applies to each of them, or has one entry for each: `[slice, *plates, word, *shape]`, with
    the dims of `NodeFamily.array`.

    Args:
        model: The ground model of the sentence.
        subject: `"do"` or `"evidence"`, for messages.
        values: The values by name or pattern.

    Raises:
        EvidenceError: A node has two values.
    """
    result: dict[int, object] = {}
    for name, value in values.items():
        family = find_family(model.ground, name)
        entries = None if family.is_node else _split_value(model, family, value)
        for k, node in enumerate(family.nodes):
            if node in result:
                raise EvidenceError(
                    f"{subject}: {name!r} sets {model.ground.name(node)}, which has another value already"
                )
            result[node] = value if entries is None else entries[k]
    return result


def _split_value(model: GroundModel, family: NodeFamily, value: object) -> Sequence[object] | None:
    """The value of each node of a family, from an array or a nested list; None for a value of all nodes."""
    if not isinstance(value, Tensor | np.ndarray | list | tuple):
        return None
    try:
        sizes = tuple(value.shape) if isinstance(value, Tensor | np.ndarray) else np.shape(value)
    except (ValueError, TypeError, RuntimeError):  # a ragged list, or one of objects without a shape
        return None
    shape = model.spec(family.nodes[0]).shape
    if len(sizes) in (0, len(shape)):  # a number is the value of every entry
        return None
    axes = family.array.shape
    if sizes[: len(axes)] != axes:
        hint = suggest_do(model.network, value, shape) if isinstance(value, Tensor) else None
        expected = f"a value of shape {shape} for all nodes, or of shape {(*axes, *shape)}"
        raise EvidenceError(family.name, expected=expected, actual=f"shape {sizes}", hint=hint)
    entries: list[Any] = [value]
    for _ in axes:
        entries = [entry for part in entries for entry in part]
    return entries


def is_relative(value: object) -> bool:
    """True for a value that depends on the values of the sentence: `Noise`, `Shift`, and `Mean()` over its words."""
    return isinstance(value, Noise | Shift) or (isinstance(value, Mean) and not value.sentences)


def iter_relative_batches(model: GroundModel, values: Mapping[int, object]) -> Iterator[Collection[int]]:
    """The nodes with relative values in the order of their resolution: first `Noise` and `Mean()`, then shifts.

    A shifted node depends on the shifts of its ancestors, so that each batch comes after those of its ancestors.
    """
    yield [node for node, value in values.items() if not isinstance(value, Shift)]
    shifted: dict[int, list[int]] = {}
    for node in (node for node, value in values.items() if isinstance(value, Shift)):
        shifted.setdefault(model.ground.group_of(node).index, []).append(node)
    graph = model.network.graph
    for component in graph.components if shifted else ():
        nodes = [node for index in component for node in shifted.get(index, ())]
        if len(nodes) > 1 and graph.recurrent & {*component}:  # each node depends on those of earlier words
            known = {*nodes}
            yield from ([node] for node in topological_order(model.ground).tolist() if node in known)
        elif nodes:
            yield nodes


def resolve_value(model: GroundModel, node: int, value: object) -> Tensor | AttentionRow:
    """The tensor or the attention row to which a node is set."""
    name, spec = model.ground.name(node), model.spec(node)
    match value:
        case Zero():
            if spec.tpm.is_index_valued:
                raise EvidenceError(name, expected="a node with real values", actual="a discrete node")
            return torch.zeros(spec.shape, dtype=model.network.dtype, device=model.network.device)
        case Mean(sentences=sentences):
            values = [get_donor_value(name, other) for other in sentences]
            return torch.stack([_check_single_value(model, node, value) for value in values]).mean(0)
        case Attend(weights=weights):
            return _build_attention_row(model, node, weights)
    donor = get_donor_value(name, value) if has_node_values(value) else value
    return encode_value(model, node, donor, evidence=False)


def get_donor_value(name: str, sentence: Any) -> Tensor:
    """The value of a node in another sentence; an error if that sentence has no such word."""
    check_has_word(name, sentence.ground)
    value: Tensor = sentence[name]
    return value


def check_has_word(name: str, ground: GroundGraph) -> None:
    """Raise an error if a sentence that gives the value of a node has fewer words than the index of its word."""
    parsed = ground.template.parse_name(name, {})
    stack = None if parsed is None else parsed[0].word_stack
    if stack is None or ground.template.parse_name(name, ground.word_counts) is not None:
        return
    expected = "this word in each sentence that gives values: a patch or Mean(sentences) takes word i from word i"
    hint = "Pass sentences of at least this number of words, or set only words that all of them have"
    count = ground.word_counts[stack]
    actual = f"a sentence of {count} word{'' if count == 1 else 's'}"
    raise EvidenceError(name, expected=expected, actual=actual, hint=hint)


@dataclass
class RelativeValues:
    """Computes relative values (`is_relative`); the mean of each group is computed once."""

    model: GroundModel
    get_value: Callable[[int], Tensor]
    _means: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, node: int, value: object) -> Tensor:
        if isinstance(value, Noise):
            current = self._get_current_value(node)
            return current + sample_noise(self.model.ground.name(node), value, current)
        if isinstance(value, Shift):
            return self._get_current_value(node) + value.get_vector(self.model, node)
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


def has_node_values(value: object) -> bool:
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
