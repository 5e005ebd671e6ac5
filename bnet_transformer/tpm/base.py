"""The base class of TPMs: the conditional distribution of one ground node given its parents' values.

A TPM is a frozen dataclass that writes the equation of *one* ground node, with `...` for leading dims. It may assume
this about its values, and nothing else:

- a slot named `x` holds the value of one parent: `[..., *shape]`;
- a slot named `k.` (the chapter writes k_. for "k of every word") holds a collection, whose axis is before the shape:
  `[..., m, *shape]`; `context.mask["k."]` (`[..., m]`) is true for those of the m that are read (all, in one node);
- a last slot named `*x` holds any number of parents;
- parameters are `context["name"]`, `[..., *shape]`, with the node's own plates among the leading dims;
- leading dims broadcast against each other, so `torch.einsum("...oi,...i->...o", W, x)` serves one node and a batch.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer._core.checks import check_float, check_int, set_frozen
from bnet_transformer._core.naming import Reach
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.field_checks import CheckedDataclass
from bnet_transformer.tpm.symbols import Symbols

if TYPE_CHECKING:
    from bnet_transformer.tpm.roots import Patches

Kind = Literal["input", "deterministic", "discrete", "continuous"]
Shape = tuple[int, ...]


def broadcast_shapes(*shapes: Sequence[int]) -> Shape:
    """The shape that several broadcast to. (torch's own function imports a computer algebra first, for a second.)

    >>> broadcast_shapes((2, 1), (3,), ())
    (2, 3)
    """
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*aligned, strict=True))


@dataclass(frozen=True)
class Parent:
    """A parent as its child's TPM sees it before there are values.

    `states` is the number of values of a discrete parent that is read by its index (a selector, a word of a
    vocabulary); `over` has the axes of a collection with their sizes (`("head", 4)`, `("word", None)`: the sentence
    decides), and is empty for a single parent. `stack_reach` is the stack and the reach of a collection of words.
    """

    name: str
    shape: Shape = ()
    states: int | None = None
    over: tuple[tuple[str, int | None], ...] = ()
    stack_reach: tuple[str, Reach] | None = None

    @property
    def form(self) -> str:
        """The parent as error messages show it."""
        if self.states == 0:
            return "as many states as words"
        form = f"{self.states} states" if self.states is not None else f"shape {self.shape}"
        return form + "".join(f" over every {plate}" for plate, _ in self.over)


@dataclass(frozen=True)
class Parameter:
    """A tensor that a TPM owns: its shape for one node, its initialisation, whether training changes it.

    It starts as `fill` where that is given (a number, or nested tuples of `shape`), else normal with `spread`.
    """

    shape: Shape
    spread: float = 1.0
    fill: float | tuple[object, ...] | None = None
    learnable: bool = True

    def __post_init__(self) -> None:
        spread = check_float("spread of a parameter", self.spread, minimum=0)
        set_frozen(self, shape=check_shape("shape of a parameter", self.shape), spread=spread)
        if self.fill is None:
            return
        try:
            fill = np.asarray(self.fill, dtype=float)
            numbers = np.isfinite(fill) | np.isneginf(fill)  # -inf: the logit of a probability of 0
            fits = bool(numbers.all()) and broadcast_shapes(fill.shape, self.shape) == self.shape
        except (TypeError, ValueError, RuntimeError):
            fits = False
        if not fits:
            expected = f"finite numbers, one or of shape {self.shape}"
            raise BNetError("fill of a parameter", expected=expected, actual=self.fill)
        set_frozen(self, fill=_to_tuples(fill.tolist()))


def _to_tuples(table: float | list[Any]) -> float | tuple[object, ...]:
    return tuple(map(_to_tuples, table)) if isinstance(table, list) else table


@dataclass(frozen=True)
class Product:
    """A matrix product in the equation of one ground node; its multiplications are the product of its sizes.

    `parents` are its factors, `sizes` the widths it runs over, `over` the collections along whose axis it runs
    (`sum_j`); `has_parameter` is true where a parameter of the TPM is a factor.
    """

    parents: tuple[Parent, ...]
    sizes: Shape
    over: tuple[Parent, ...] = ()
    has_parameter: bool = False


@dataclass(frozen=True)
class EvalContext:
    """The context of an evaluation.

    It has the parameters, the index of the word, and for each collection the words that are read and their mask.
    `rotary` caches cosines and sines of rotary positions, for all slices.
    """

    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    word: Tensor = field(default_factory=lambda: torch.tensor(0))
    read_indices: Mapping[str, Tensor] = field(default_factory=dict)
    mask: Mapping[str, Tensor] = field(default_factory=dict)
    training: bool = False
    dtype: torch.dtype = torch.float32
    rotary: dict[Any, Any] = field(default_factory=dict, compare=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[name]

    def to(self, dtype: torch.dtype) -> EvalContext:
        """The same context in another floating type."""
        if all(value.dtype == dtype for value in self.parameters.values()):
            return self if self.dtype == dtype else replace(self, dtype=dtype)
        return replace(self, parameters={name: value.to(dtype) for name, value in self.parameters.items()}, dtype=dtype)


@dataclass(frozen=True)
class TPM(CheckedDataclass, abc.ABC):
    """The conditional distribution of a node given its parents.

    Its `kind` is "input" (the value comes with the sentence), "deterministic", "discrete" or "continuous".
    """

    slots: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[Kind] = "deterministic"
    is_random: ClassVar[bool] = False  # True where the parents do not decide the value: discrete or continuous
    elementwise: ClassVar[bool] = False  # True where the equation has no matrix product

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.is_random = cls.kind in ("discrete", "continuous")

    def get_slots(self) -> tuple[str, ...]:
        """The slots that its parents fill, in order."""
        return self.slots

    @abc.abstractmethod
    def shape(self, *parents: Parent) -> Shape:
        """The shape of the node's value; refuses parents of a shape that it cannot take."""

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        """The parameters of the TPM, by name."""
        return {}

    def products(self, *parents: Parent) -> tuple[Product, ...] | None:
        """The matrix products of its equation, for counting costs; None where it does not declare them."""
        return () if self.elementwise else None

    @property
    def states(self) -> int | None:
        """The number of states of a discrete node; None where the sentence decides it, or the node is not discrete."""
        return None

    @property
    def default(self) -> int | None:
        """The state of an input for which the sentence gives none; None where the sentence must give it."""
        return None

    @property
    def image(self) -> Patches | None:
        """How the vectors of an input are cut from an image; None for other inputs."""
        return None

    @property
    def is_index_valued(self) -> bool:
        """True where children receive the integer state of a discrete node instead of a tensor."""
        return self.kind == "discrete"

    @property
    def fixed_shape(self) -> Shape | None:
        """The shape of a discrete node's value, which does not depend on parents; None for other nodes."""
        return () if self.is_index_valued else None

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        """The value of a deterministic node."""
        raise BNetError(type(self).__name__, expected="a method `value`, for it is deterministic", actual="none")

    def logits(self, context: EvalContext, *parents: Tensor) -> Tensor:
        """The log probabilities, up to a constant, of a discrete node: `[..., states]`."""
        raise BNetError(type(self).__name__, expected="a method `logits`, for it is discrete", actual="none")

    def emit(self, context: EvalContext, state: Tensor) -> Tensor:
        """The value that children receive from a discrete node in a state."""
        return state

    def distribution(self, context: EvalContext, *parents: Tensor) -> Distribution:
        """The node's distribution given its parents' values; a delta where it is deterministic."""
        if self.kind == "discrete":
            return torch.distributions.Categorical(logits=self.logits(context, *parents), validate_args=False)
        if self.kind == "continuous":
            raise BNetError(
                type(self).__name__, expected="a method `distribution`, for it is continuous", actual="none"
            )
        from pyro.distributions import Delta

        value = self.value(context, *parents)
        return Delta(value, event_dim=value.dim())

    def log_prob(self, context: EvalContext, value: Tensor, *parents: Tensor) -> Tensor:
        """`log P(value | parents)` of a continuous node. A TPM may compute it more cheaply than by its distribution."""
        log_prob: Tensor = self.distribution(context, *parents).log_prob(value)
        return log_prob

    def attention_weights(self, context: EvalContext, *parents: Tensor) -> Tensor | None:
        """The attention distribution `P(j | i)`, `[..., m]`, where the TPM has one."""
        return None

    @property
    def has_attention(self) -> bool:
        """True where the TPM has `P(j | i)`, a distribution over the words that it reads."""
        return type(self).attention_weights is not TPM.attention_weights

    def no_attention_reason(self) -> str:
        """Why the TPM has no `P(j | i)`, for error messages."""
        return f"{type(self).__name__} has no attention distribution"

    def latex(self, s: Symbols) -> str:
        r"""The right-hand side of `P(node | parents) = ...` in LaTeX, written in the symbols `s`.

        What a TPM that says nothing more is: `\mathbb{I}(\, x_i = \operatorname{Gate}(g_i, x_i) \,)`.
        """
        return s.call(type(self).__name__)

    def priors(self) -> Mapping[str, float]:
        """The Dirichlet priors of the logits, for TPMs that have one; `fit` and `pyro` use them.

        Returns:
            `{"logits": concentration}`: the softmax of each row of the parameter `logits` has a Dirichlet prior with
            this concentration for every state. Empty for no prior.
        """
        return {}

    @property
    def max_words(self) -> int | None:
        """The largest number of words that the node can be over; None for no limit."""
        return None

    @property
    def can_read_empty(self) -> bool:
        """True where a collection may be empty: a sum of nothing is zero, a distribution over nothing is not."""
        return False

    def attention_slots(self) -> tuple[str, ...]:
        """The slots on which `P(j | i)` depends."""
        return self.get_slots()


@dataclass(frozen=True)
class VectorMap(TPM):
    """A TPM from vectors to vectors of the same width; elementwise, unless it declares products."""

    slots: ClassVar[tuple[str, ...]] = ("x",)
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> Shape:
        width = check_vector(parents[0])
        for parent in parents[1:]:
            check_vector(parent, width, reason=f"as {parents[0].name}")
        return (width,)


def initial_spread(shape: Shape, spread: float | None) -> float:
    """The initial standard deviation of a weight: `spread`, or 1/sqrt(columns), which preserves the scale of what it
    maps.
    """
    if spread is not None:
        return spread
    return float(shape[-1] ** -0.5) if shape else 1.0


def check_vector(parent: Parent, width: int | None = None, *, reason: str = "") -> int:
    """The width of a parent that must be a vector (of width `width`)."""
    expected = "a vector" if width is None else f"a vector of width {width}"
    has_wrong_width = len(parent.shape) == 1 and width is not None and parent.shape[0] != width
    if parent.states is not None or len(parent.shape) != 1 or has_wrong_width:
        raise BNetError(parent.name, expected=expected + (f" ({reason})" if reason else ""), actual=parent.form)
    return parent.shape[0]


def check_single_axis(parent: Parent) -> None:
    """Refuse a collection over more than one axis (words, or the entries of one plate), or over none."""
    if len(parent.over) != 1:
        raise BNetError(parent.name, expected="a collection over words alone, or over one plate", actual=parent.form)


def check_matrix(parent: Parent) -> tuple[int, int]:
    """The shape of a parent that must be a matrix."""
    if parent.states is not None or len(parent.shape) != 2:
        raise BNetError(parent.name, expected="a matrix", actual=parent.form)
    return parent.shape[0], parent.shape[1]


def check_discrete(parent: Parent) -> int:
    """The number of states of a parent that must be discrete."""
    if not parent.states:
        raise BNetError(parent.name, expected="a discrete node (its states index a table)", actual=parent.form)
    return parent.states


def check_shape(subject: str, shape: object) -> Shape:
    """A value's shape, from a number or a tuple of numbers."""
    values = shape.tolist() if isinstance(shape, np.ndarray) else shape
    sizes = values if isinstance(values, Sequence) and not isinstance(values, str) else (values,)
    return tuple(check_int(subject, size) for size in sizes)
