"""What an intervention sets: a constant, the value in other sentences, or a change `t = f(v)` of the value of a node.

`do` sets it for a node, a node group, a role or a pattern; sweeps, edges, circuits and `generate` take the same values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_seed, set_frozen
from bnet_transformer._core.naming import WORD, split_entries
from bnet_transformer._core.results import UnsavedFunction
from bnet_transformer._core.tensors import copy_to_tensor
from bnet_transformer.data.encode import encode_value, suggest_do, to_reals
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.graph import GroundGraph, topological_order
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


class Change:
    """An intervention that computes the value of a node from the value that it has: `t = f(v)`.

    The value v is that after all other interventions, including the changes of the ancestors of the node.
    """

    def check(self, name: str, spec: NodeSpec) -> None:
        """Raise an error if the change is not defined for a node.

        Args:
            name: The name of the node.
            spec: Its node group.
        """
        if spec.tpm.is_index_valued:
            raise EvidenceError(name, expected="a node with real values", actual="a discrete node")

    def get_constant(self, name: str, value: Tensor) -> Tensor | None:
        """The part of the change that does not depend on the value; None if there is none.

        Args:
            name: The name of the node.
            value: A value of the node, for the shape, the type and the device, `[*shape]`.

        Returns:
            The constant, `[*shape]`.
        """
        return None

    def apply(self, value: Tensor, shape: tuple[int, ...], constant: Tensor | None) -> Tensor:
        """The changed values.

        Args:
            value: The values, `[..., *shape]`.
            shape: The shape of the value of a node.
            constant: The constant of each node, which broadcasts with `value`.

        Returns:
            The values after the change, `[..., *shape]`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Noise(Change):
    """The value of a node plus normal noise, which is determined by the seed and the name of the node.

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

    def get_constant(self, name: str, value: Tensor) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}/noise/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return self.sigma * torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)

    def apply(self, value: Tensor, shape: tuple[int, ...], constant: Tensor | None) -> Tensor:
        assert constant is not None
        return value + constant


@dataclass(frozen=True)
class Shift(Change):
    """The value of a node plus a vector, as in activation steering (Turner et al. 2023, Rimsky et al. 2024).

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
        object.__setattr__(self, "vector", _to_finite_reals("Shift", vector))

    def check(self, name: str, spec: NodeSpec) -> None:
        super().check(name, spec)
        _check_shape(name, "a shift", self.vector, spec.shape)

    def apply(self, value: Tensor, shape: tuple[int, ...], constant: Tensor | None) -> Tensor:
        return value + self.vector.to(value)


@dataclass(frozen=True)
class Scale(Change):
    """The value of a node times a number, or each entry times its own number.

    Args:
        factor: The number, or a factor for each entry with the shape of the node.

    Raises:
        BNetError: The factor does not consist of finite real numbers.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Scale
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s.do(x_0_1=Scale(0.5))["x_0_1"].isclose(s["x_0_1"] / 2).all().item()
    True
    """

    factor: Tensor

    def __init__(self, factor: object) -> None:
        object.__setattr__(self, "factor", _to_finite_reals("Scale", factor))

    def check(self, name: str, spec: NodeSpec) -> None:
        super().check(name, spec)
        if self.factor.dim():
            _check_shape(name, "factors", self.factor, spec.shape)

    def apply(self, value: Tensor, shape: tuple[int, ...], constant: Tensor | None) -> Tensor:
        return value * self.factor.to(value)


@dataclass(frozen=True)
class Apply(Change):
    """A function of the value of a node, such as the reconstruction by an autoencoder. A bare function means the same.

    Args:
        function: A function from values `[..., *shape]` to values of the same shape. It may be called with the values
            of many nodes, sentences and cells at once.

    Raises:
        BNetError: The function returns another shape, or NaN.

    >>> import bnet_transformer as bt
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s.do(x_0_1=lambda v: v.relu())["x_0_1"].equal(s["x_0_1"].relu())
    True
    """

    function: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise BNetError("Apply", expected="a function of the value of a node", actual=self.function)

    def apply(self, value: Tensor, shape: tuple[int, ...], constant: Tensor | None) -> Tensor:
        result, subject = self.function(value), f"function {getattr(self.function, '__name__', '')}".strip()
        if not isinstance(result, Tensor) or result.shape != value.shape:
            actual = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            hint = "The function receives values [..., *shape] of many nodes at once: index the last dims"
            raise BNetError(subject, expected=f"a tensor of shape {tuple(value.shape)}", actual=actual, hint=hint)
        if bool(result.isnan().any()):
            hint = "Check the function at the values of the nodes that it changes"
            raise BNetError(subject, expected="numbers for every value", actual="NaN", hint=hint)
        return result.to(value)


class Within(Change):
    """A change within a subspace, or of some entries: `t = v + Q Q^T (target - v)`, with orthonormal columns Q.

    Attributes:
        basis: The columns Q, `[size, k]`; or the indices of entries, `[k]`. The size is that of the flattened value.
        target: What the value becomes within the subspace: a tensor, `Zero()`, `Mean(sentences)` or a sentence.
    """

    basis: Tensor
    target: Any

    def _set_basis(self, within: object) -> None:
        """Validate the subspace, or the entries."""
        name = type(self).__name__
        expected = "orthonormal columns, [size, k], or a list of indices of entries"
        try:
            basis = copy_to_tensor(within)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise BNetError(name, expected=expected, actual=within) from error
        if basis.is_floating_point():
            basis = basis[:, None] if basis.dim() == 1 else basis
            if basis.dim() != 2 or not basis.numel():
                raise BNetError(name, expected=expected, actual=f"shape {tuple(basis.shape)}")
            columns = basis.double()
            error_size = float((columns.T @ columns - torch.eye(columns.shape[1], dtype=torch.float64)).abs().max())
            if not error_size < ORTHONORMAL_TOLERANCE:
                actual = f"columns whose products differ from those of an orthonormal basis by {error_size:.2g}"
                raise BNetError(name, expected=expected, actual=actual, hint="Use torch.linalg.qr(columns).Q")
        elif basis.dim() != 1 or not basis.numel() or basis.dtype == torch.bool or int(basis.min()) < 0:
            raise BNetError(name, expected=expected, actual=within)
        elif len(basis.unique()) < len(basis):
            raise BNetError(name, expected="each entry once", actual=within)
        object.__setattr__(self, "basis", basis)

    def check(self, name: str, spec: NodeSpec) -> None:
        super().check(name, spec)
        size = math.prod(spec.shape)
        if self.basis.is_floating_point() and len(self.basis) != size:
            raise EvidenceError(name, expected=f"a subspace of {size} dimensions", actual=len(self.basis))
        if not self.basis.is_floating_point() and int(self.basis.max()) >= size:
            raise EvidenceError(name, expected=f"entries from 0 to {size - 1}", actual=int(self.basis.max()))
        if isinstance(self.target, Tensor):
            _check_shape(name, "a target", self.target, spec.shape)

    def get_constant(self, name: str, value: Tensor) -> Tensor:
        match self.target:
            case Zero():
                return torch.zeros_like(value)
            case Tensor():
                return self.target.to(value)
        sentences = self.target.sentences if isinstance(self.target, Mean) else [self.target]
        values = [get_donor_value(name, other) for other in sentences]
        if any(other.shape != value.shape for other in values):
            actual = "a value for each state of a latent choice"
            raise EvidenceError(name, expected="one value in each sentence", actual=actual, hint="Set choices by do")
        return torch.stack(values).mean(0).to(value)

    def apply(self, value: Tensor, shape: tuple[int, ...], constant: Tensor | None) -> Tensor:
        assert constant is not None
        leading = value.shape[: value.dim() - len(shape)]
        flat = value.reshape(*leading, -1)
        target = constant.expand_as(value).reshape(*leading, -1)
        basis = self.basis.to(value.device)
        if basis.is_floating_point():
            basis = basis.to(value)
            flat = flat + (target - flat) @ basis @ basis.T
        else:
            flat = flat.index_copy(-1, basis, target.index_select(-1, basis))
        return flat.reshape(value.shape)


@dataclass(frozen=True)
class Swap(Within):
    """The value in another sentence, within a subspace: `t = v + Q Q^T (v' - v)` (interchange intervention).

    Args:
        sentences: The sentence that gives the value v'; in a sweep, the list of the sentences of the other side.
        within: Orthonormal columns Q, `[size, k]`, with the flattened size of the node; or a list of entries.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Swap
    >>> net = bt.bayesuvius(dim=4)
    >>> s, other = net.sentence("the cat sat"), net.sentence("the dog sat")
    >>> (s.do(x_0_1=Swap(other, [0, 2]))["x_0_1"] == other["x_0_1"])[[0, 2]].all().item()
    True
    """

    target: Any
    basis: Tensor

    def __init__(self, sentences: object, within: object) -> None:
        items = list(sentences) if isinstance(sentences, list | tuple) else [sentences]
        if not items or not all(map(has_node_values, items)):
            raise BNetError("Swap", expected="a sentence, or a list of sentences in a sweep", actual=sentences)
        object.__setattr__(self, "target", sentences)
        self._set_basis(within)

    def get_constant(self, name: str, value: Tensor) -> Tensor:
        if isinstance(self.target, list | tuple):
            hint = "A list of sentences has one for each example of a sweep"
            raise EvidenceError(name, expected="Swap with one sentence", actual="a list", hint=hint)
        return super().get_constant(name, value)


@dataclass(frozen=True)
class Project(Within):
    """The value without its part in a subspace: `t = v - Q Q^T (v - m)`.

    Args:
        within: Orthonormal columns Q, `[size, k]`, with the flattened size of the node; or a list of entries.
        mean: The value m that the part becomes: a tensor with the shape of the node, or `Mean(sentences)`; 0 by
            default.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Project
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> direction = torch.tensor([0.6, 0.8, 0.0, 0.0])
    >>> round((s.do(x_0_1=Project(direction))["x_0_1"] @ direction).item(), 5) + 0.0
    0.0
    """

    basis: Tensor
    target: Any

    def __init__(self, within: object, mean: object = None) -> None:
        self._set_basis(within)
        if isinstance(mean, Mean) and not mean.sentences:
            raise BNetError("Project", expected="Mean(sentences) or a tensor", actual="Mean()")
        target = Zero() if mean is None else mean if isinstance(mean, Mean) else _to_finite_reals("Project", mean)
        object.__setattr__(self, "target", target)


@dataclass(frozen=True)
class Set(Within):
    """Coordinates that the value has in a subspace: `t = v + Q (z - Q^T v)`.

    Args:
        coordinates: The coordinates z, `[k]`, or a number for all.
        within: Orthonormal columns Q, `[size, k]`, with the flattened size of the node; or a list of entries.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.interventions import Set
    >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
    >>> s.do(x_0_1=Set([1.0, -1.0], [0, 3]))["x_0_1"][[0, 3]].tolist()
    [1.0, -1.0]
    """

    basis: Tensor
    target: Tensor

    def __init__(self, coordinates: object, within: object) -> None:
        self._set_basis(within)
        z, count = _to_finite_reals("Set", coordinates), self.basis.shape[-1]
        if z.shape not in ((), (count,)):
            raise BNetError("Set", expected=f"{count} coordinates", actual=f"shape {tuple(z.shape)}")
        object.__setattr__(self, "target", z.expand(count))

    def check(self, name: str, spec: NodeSpec) -> None:
        Project(self.basis).check(name, spec)

    def get_constant(self, name: str, value: Tensor) -> Tensor:
        z = self.target.to(value)
        basis = self.basis.to(value.device)
        flat = (
            basis.to(value) @ z if basis.is_floating_point() else value.new_zeros(value.numel()).index_copy(0, basis, z)
        )
        return flat.reshape(value.shape)


@dataclass(frozen=True)
class Entries(Within):
    """Some entries of a value become those of another intervention, as of `"x_1_2[3]"` in `do`.

    Args:
        basis: The indices of the entries, `[k]`.
        target: A change, `Zero()`, `Mean(sentences)` or a sentence.
    """

    basis: Tensor
    target: Any

    def check(self, name: str, spec: NodeSpec) -> None:
        if isinstance(self.target, Attend) or (isinstance(self.target, Mean) and not self.target.sentences):
            expected = "a number, numbers, a sentence, Zero(), Mean(sentences) or a change, for entries"
            raise EvidenceError(name, expected=expected, actual=type(self.target).__name__)
        super().check(name, spec)
        if isinstance(self.target, Change):
            self.target.check(name, spec)

    def get_constant(self, name: str, value: Tensor) -> Tensor:
        if not isinstance(self.target, Change):
            return super().get_constant(name, value)
        constant = self.target.get_constant(name, value)
        return torch.zeros_like(value) if constant is None else constant

    def apply(self, value: Tensor, shape: tuple[int, ...], constant: Tensor | None) -> Tensor:
        if isinstance(self.target, Change):
            constant = self.target.apply(value, shape, constant)
        return super().apply(value, shape, constant)


ORTHONORMAL_TOLERANCE = 1e-4  # above the rounding errors of a basis that was computed in single precision


def as_change(value: object) -> Change | None:
    """The change that a value of `do` means: itself, or that of a function; None for another value.

    Args:
        value: A value that `do` accepts.

    Raises:
        BNetError: The value is a class instead of an object, such as `Zero` instead of `Zero()`.
    """
    if isinstance(value, type):
        raise BNetError(
            "intervention", expected=f"an object, such as {value.__name__}(...)", actual=f"a class, {value}"
        )
    if isinstance(value, Change):
        return value
    return Apply(value) if callable(value) and not isinstance(value, Tensor) else None


def _to_finite_reals(name: str, value: object) -> Tensor:
    """A copy of finite real numbers as a tensor."""
    tensor = to_reals(name, value)
    if not bool(tensor.isfinite().all()):
        raise BNetError(name, expected="finite numbers", actual="NaN or infinity")
    return tensor.detach().clone()


def _check_shape(name: str, kind: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise an error for a tensor with another shape than the node."""
    if tuple(tensor.shape) != shape:
        actual = f"shape {tuple(tensor.shape)}"
        raise EvidenceError(name, expected=f"{kind} of shape {shape}", actual=actual)


def parse_entries(values: Mapping[str, object]) -> dict[str, object]:
    """The interventions of `do` by the names of nodes, with entries in brackets as a change of the value.

    Args:
        values: The interventions by name, such as `"x_1_2"` or `"x_1_2[3, 5]"`.

    Returns:
        The interventions by name, without brackets.

    Raises:
        EvidenceError: Two names set entries of the same nodes.
    """
    result: dict[str, object] = {}
    for name, value in values.items():
        nodes, entries = split_entries(name) if isinstance(name, str) else (name, None)
        if nodes in result:
            hint = f"Set all entries at once, as {nodes}[0, 1], or call do again"
            raise EvidenceError(f"do: {name!r} sets {nodes}, which has another value already", hint=hint)
        if entries is not None:
            has_values = isinstance(value, Zero | Mean | Attend) or has_node_values(value)
            change = as_change(value)
            value = Entries(torch.tensor(entries), value if has_values else change or Set(value, list(entries)))
        result[nodes] = value
    return result


def is_relative(value: object) -> bool:
    """True for a value that depends on the values of the sentence: a change, and `Mean()` over its words."""
    return as_change(value) is not None or (isinstance(value, Mean) and not value.sentences)


def is_intervention(value: object) -> bool:
    """True for what values become, instead of sentences: a tensor, `Zero()`, `Mean(...)`, or a change of the value."""
    return isinstance(value, Tensor | Zero | Mean) or as_change(value) is not None


def to_stored(value: object) -> object:
    """An intervention in a file: functions, and values in other sentences, are written by name only."""
    is_stored = value is None or isinstance(value, Noise | Scale | Shift | Zero | Tensor | UnsavedFunction)
    return value if is_stored else UnsavedFunction(type(value).__name__)


def resolve_relative(
    model: GroundModel,
    values: Mapping[int, object],
    evaluate: Callable[[Mapping[int, Tensor]], Callable[[int], Tensor]],
    constants: Mapping[int, Tensor] = MappingProxyType({}),
) -> dict[int, Tensor]:
    """The values that relative values set: first those of `Mean()`, then changes, those of ancestors first.

    Args:
        model: The ground model of the sentence.
        values: The relative value of each node, by ground id.
        evaluate: From the values that are resolved so far to a function from a node to its value, `[*shape]`.
        constants: The constants of changes that come from another run, `[*shape]`, by node.

    Returns:
        The value of each node, `[*shape]`.

    Raises:
        EvidenceError: A value is not defined for a node, or the value of the node depends on latent choices.
    """
    result: dict[int, Tensor] = {}
    changes = {node: change for node, value in values.items() if (change := as_change(value)) is not None}
    means = [node for node in values if node not in changes]
    if means:
        result |= compute_word_means(model, means, evaluate({}))
    for batch in _iter_change_batches(model, [*changes]):
        get_value, resolved = evaluate(result), dict[int, Tensor]()
        for node in batch:
            name, spec, change = model.ground.name(node), model.spec(node), changes[node]
            change.check(name, spec)
            value = get_current_value(model, node, get_value)
            constant = constants[node] if node in constants else change.get_constant(name, value)
            resolved[node] = change.apply(value, spec.shape, constant)
        result |= resolved
    return result


def _iter_change_batches(model: GroundModel, nodes: Sequence[int]) -> Iterator[Collection[int]]:
    """The nodes with changes, each batch after those of its ancestors."""
    changed = model.ground.split_by_group(nodes)
    graph = model.network.graph
    for component in graph.components if changed else ():
        batch = [node for index in component for node in changed.get(index, ())]
        if len(batch) > 1 and graph.recurrent & {*component}:  # each node depends on those of earlier words
            known = {*batch}
            yield from ([node] for node in topological_order(model.ground).tolist() if node in known)
        elif batch:
            yield batch


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


def compute_word_means(
    model: GroundModel, nodes: Collection[int], get_value: Callable[[int], Tensor]
) -> dict[int, Tensor]:
    """The mean of the group of each node over the words of the sentence, `[*shape]`; each group is computed once.

    Args:
        model: The ground model of the sentence.
        nodes: Ground ids of the nodes.
        get_value: A function from a node to its value, `[*shape]`.
    """
    by_first, result = dict[int, Tensor](), dict[int, Tensor]()
    for node in nodes:
        group, index = model.ground.unravel_index(node)
        check_has_words(model.spec(node), model.ground.name(node))
        first = node - index[-1]
        if first not in by_first:
            words = range(model.ground.word_counts[group.word_stack or ""])
            by_first[first] = torch.stack([get_current_value(model, first + i, get_value) for i in words]).mean(0)
        result[node] = by_first[first]
    return result


def get_current_value(model: GroundModel, node: int, get_value: Callable[[int], Tensor]) -> Tensor:
    """The value of a node that is a function of its parents, `[*shape]`; an error for another node."""
    name, tpm = model.ground.name(node), model.spec(node).tpm
    if tpm.is_random and node not in model.do:
        expected = "a node that is a function of its parents"
        raise EvidenceError(name, expected=expected, actual=f"a {tpm.kind} node")
    return _check_single_value(model, node, get_value(node))


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
