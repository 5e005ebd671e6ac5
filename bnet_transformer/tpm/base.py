"""The base class of TPMs: the conditional distribution of one ground node given its parents' values.

A TPM is a frozen dataclass with the equation of *one* ground node; `...` denotes the leading dims. Its methods may rely
on these properties of their arguments, and on no others:

- A slot named `x` holds the value of one parent: `[..., *shape]`.
- A slot named `k.` holds a collection, such as the keys of all words. The axis of the collection precedes the shape:
  `[..., m, *shape]`. The mask `context.mask["k."]` (`[..., m]`) is true for the members on which the node depends.
- A last slot named `*x` holds any number of parents.
- A parameter is `context["name"]`, `[..., *shape]`; the leading dims contain the node's own plates.
- Leading dims broadcast, so `torch.einsum("...oi,...i->...o", W, x)` is correct for one node and for a batch.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer._core.checks import check_choice, check_float, check_int, set_frozen
from bnet_transformer._core.naming import Reach
from bnet_transformer._core.tensors import copy_to_tensor, to_tuples
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.symbols import Symbols

# --------------------------------------------------------------------------------------------------------------------
# Checks of the options of TPMs. The annotations of the fields contain them: `dim: Annotated[int, check_int]`.


Check = Callable[[str, Any], Any]  # takes the name of an option and its value; returns the checked value or raises


def check_positive(subject: str, value: object) -> float:
    """The value as a finite float greater than 0."""
    return check_float(subject, value, above=0)


def check_concentration(subject: str, value: object) -> float | tuple[Any, ...]:
    """The concentration of a Dirichlet prior: a positive number, or an array of positive numbers as nested tuples."""
    expected = "a positive number, one for each state, or an array of the table's shape"
    try:
        array = copy_to_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BNetError(subject, expected=expected, actual=value) from error
    is_real = not array.is_complex() and array.dtype != torch.bool and array.numel() > 0
    if not is_real or not bool(((array > 0) & (array < torch.inf)).all()):
        raise BNetError(subject, expected=expected, actual=value)
    return to_tuples(array.double().tolist())  # type: ignore[no-any-return]


def check_below_one(subject: str, value: object) -> float:
    """The value as a probability less than 1."""
    probability = check_float(subject, value)
    if not 0 <= probability < 1:
        raise BNetError(subject, expected="a probability from 0 to below 1", actual=value)
    return probability


def min_int(minimum: int) -> Check:
    """A check for an integer of at least `minimum`."""
    return lambda subject, value: check_int(subject, value, minimum=minimum)


def choice(*options: object) -> Check:
    """A check that the value is one of `options`."""

    def check(subject: str, value: object) -> object:
        check_choice(subject, value, options)
        return value

    return check


def instance_of(cls: type, expected: str, allowed: str = "") -> Check:
    """A check that the value is an instance of `cls`; `expected` and `allowed` are parts of its error."""

    def check(subject: str, value: object) -> object:
        if not isinstance(value, cls):
            raise BNetError(subject, expected=expected, actual=value, allowed=allowed or None)
        return value

    return check


check_bool = choice(True, False)


def optional(check: Check) -> Check:
    """A check that also accepts None."""
    return lambda subject, value: None if value is None else check(subject, value)


def named(subject: str, check: Check) -> Check:
    """A check with errors that call the option `subject` instead of the name of its field."""
    return lambda _, value: check(subject, value)


@cache
def get_checks(cls: type) -> dict[str, Check]:
    """The checks in the annotations of the fields of a class and its bases, by field."""
    checks: dict[str, Check] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("bnet_transformer."):  # users' annotations may not evaluate here
            for name, hint in inspect.get_annotations(base, eval_str=True).items():
                for check in getattr(hint, "__metadata__", ()):
                    checks[name] = check
    return checks


@dataclass(frozen=True)
class CheckedDataclass:
    """A frozen dataclass that checks its fields when it is created, and stores the results of the checks."""

    def __post_init__(self) -> None:
        for name, check in get_checks(type(self)).items():  # type: ignore[arg-type]  # a class has a hash
            set_frozen(self, **{name: check(name, getattr(self, name))})


Kind = Literal["input", "deterministic", "discrete", "continuous"]
Shape = tuple[int, ...]


def broadcast_shapes(*shapes: Sequence[int]) -> Shape:
    """The shape to which several shapes broadcast.

    `torch.broadcast_shapes` is not used because its first call imports sympy, which takes about a second.

    >>> broadcast_shapes((2, 1), (3,), ())
    (2, 3)
    """
    rank = max(map(len, shapes))
    sizes = [1] * rank
    for shape in shapes:
        for d, n in enumerate(shape, rank - len(shape)):
            if sizes[d] == 1:
                sizes[d] = n
    return tuple(sizes)


@dataclass(frozen=True)
class Parent:
    """The description of a parent that its child's TPM receives when shapes and parameters are inferred.

    Args:
        name: The name of the parent, such as `"x_1"`.
        shape: The shape of the value of one node.
        states: The number of states if the value is an integer state, such as that of a selector or of a word of a
            vocabulary; 0 if the sentence decides the number; None (default) if the value is a tensor of `shape`.
        over: The axes of a collection with their sizes, such as `("head", 4)`. The size of `"word"` is None because the
            sentence decides it. Empty (default) for a single parent.
        stack_reach: For a collection of words, their stack and the reach of the arrow; otherwise None (default).
        is_optional: True if some words have no such parent: the reach is `"before"`, `"after"` or `"rest"`, and the
            word is the first or the last. `EvalContext.missing` shows which words these are. Default False.

    >>> Parent("k", (8,), over=(("word", None),)).form
    'shape (8,) over every word'
    """

    name: str
    shape: Shape = ()
    states: int | None = None
    over: tuple[tuple[str, int | None], ...] = ()
    stack_reach: tuple[str, Reach] | None = None
    is_optional: bool = False

    @property
    def form(self) -> str:
        """The description of the parent in error messages."""
        if self.states == 0:
            return "as many states as words"
        form = f"{self.states} states" if self.states is not None else f"shape {self.shape}"
        return form + "".join(f" over every {plate}" for plate, _ in self.over)


@dataclass(frozen=True)
class Parameter:
    """A tensor that a TPM owns: its shape, its initial value, and whether training changes it.

    Args:
        shape: The shape for one node, without the node's plates.
        spread: The standard deviation of the initial normal distribution with mean 0. Default 1.
        fill: The initial value instead of random numbers: one number, or nested tuples that broadcast to `shape`. None
            (default) draws from the normal distribution. An entry of -inf is the logit of a probability of 0.
        learnable: Whether training changes the tensor. Default True.

    >>> Parameter((2, 3), fill=0.0).fill
    0.0
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
            expected = f"one finite number, or finite numbers of shape {self.shape}"
            raise BNetError("fill of a parameter", expected=expected, actual=self.fill)
        set_frozen(self, fill=to_tuples(fill.tolist()))


@dataclass(frozen=True)
class Product:
    """A matrix product in the equation of one ground node, from which costs are counted.

    The number of multiplications is the product of `sizes`, times the number of members of each collection in `over`.

    Args:
        parents: The parents that are factors.
        sizes: The widths of the dims of the product.
        over: The collections over which the product runs, such as the keys in a sum over `j`. Default: none.
        has_parameter: Whether a parameter of the TPM is a factor. Default False.

    >>> W, x = Parent("W", (4, 8)), Parent("x", (8,))
    >>> Product((W, x), (4, 8)).sizes                # 32 multiplications
    (4, 8)
    """

    parents: tuple[Parent, ...]
    sizes: Shape
    over: tuple[Parent, ...] = ()
    has_parameter: bool = False


@dataclass(frozen=True)
class EvalContext:
    """The inputs of a TPM's methods other than the parents' values; `context["name"]` is a parameter.

    Args:
        parameters: The parameters of the TPM by name, `[..., *shape]`. Default: none.
        word: The index of the node's word, from 0: one integer, or `[..., word]`. Default 0.
        read_indices: For each slot of a collection of words, the indices of these words, `[..., m]`. Default: none.
        mask: For each slot of a collection of words, `[..., m]`: true for the words on which it depends. Default: none.
        training: Whether the net is in training mode, in which dropout is active. Default False.
        dtype: The floating type of values that a TPM computes without parents and parameters. Default float32.
        rotary: A cache of the cosines and sines of rotary positions, which all slices share. Default: empty.
        missing: For each optional parent (`Parent.is_optional`), by its position among the parents, `[..., word]`: true
            for words without this parent. Its value is then zero, or state 0. Default: none.

    >>> EvalContext({"bias": torch.zeros(3)})["bias"].shape
    torch.Size([3])
    """

    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    word: Tensor = field(default_factory=lambda: torch.tensor(0))
    read_indices: Mapping[str, Tensor] = field(default_factory=dict)
    mask: Mapping[str, Tensor] = field(default_factory=dict)
    training: bool = False
    dtype: torch.dtype = torch.float32
    rotary: dict[Any, Any] = field(default_factory=dict, compare=False)
    missing: Mapping[int, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        """The parameter of that name.

        Args:
            name: A name that `TPM.parameters` declares.

        Returns:
            The tensor, `[..., *shape]`; the leading dims contain the node's plates.
        """
        return self.parameters[name]

    def select_entries(self, entries: Tensor, **dims: int) -> EvalContext:
        """The same context with some entries of parameters.

        Args:
            entries: The indices of the entries, `[entry]`.
            **dims: The dim of the entries, for each parameter that has them. Other names have no effect.

        Returns:
            The context.

        >>> EvalContext({"bias": torch.arange(3.0)}).select_entries(torch.tensor([2]), bias=-1)["bias"]
        tensor([2.])
        """
        selected = {k: v.index_select(dims[k], entries) for k, v in self.parameters.items() if k in dims}
        return replace(self, parameters={**self.parameters, **selected})

    def to(self, dtype: torch.dtype) -> EvalContext:
        """The same context in another floating type.

        Args:
            dtype: The floating type of the parameters and of computed values.

        Returns:
            The context with converted parameters; the same object if nothing changes.
        """
        if all(value.dtype == dtype for value in self.parameters.values()):
            return self if self.dtype == dtype else replace(self, dtype=dtype)
        return replace(self, parameters={name: value.to(dtype) for name, value in self.parameters.items()}, dtype=dtype)


@dataclass(frozen=True)
class TPM(CheckedDataclass, abc.ABC):
    """The conditional distribution of a node given its parents: the base class of all TPMs.

    A subclass is a frozen dataclass. It sets the class variables `slots` (the names of its parents, in order) and
    `kind`, implements `shape`, and one method that depends on the kind:

    - `"deterministic"` (default): `value`;
    - `"discrete"`: `logits`, and the property `states`;
    - `"continuous"`: `distribution`;
    - `"input"`: none, because the value is given with the sentence.

    A TPM with learnable tensors also implements `parameters`; one with a Dirichlet prior also implements `priors`.
    `elementwise = True` declares that the equation has no matrix product.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Shift(TPM):                            # x + b
    ...     slots = ("x",)
    ...     def shape(self, x):
    ...         return x.shape
    ...     def parameters(self, x):
    ...         return {"bias": Parameter(x.shape, fill=1.0)}
    ...     def value(self, context, x):             # [..., d]
    ...         return x + context["bias"]
    >>> Shift().value(EvalContext({"bias": torch.ones(2)}), torch.zeros(2))
    tensor([1., 1.])
    """

    slots: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[Kind] = "deterministic"
    is_random: ClassVar[bool] = False  # True if the parents do not determine the value: discrete or continuous
    elementwise: ClassVar[bool] = False  # True if the equation has no matrix product
    is_lookup: ClassVar[bool] = False  # True if `logits` without a vector parent selects rows of parameters only

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.is_random = cls.kind in ("discrete", "continuous")

    def get_slots(self) -> tuple[str, ...]:
        """The names of the slots for the parents, in order."""
        return self.slots

    @abc.abstractmethod
    def shape(self, *parents: Parent) -> Shape:
        """The shape of the node's value, inferred from its parents.

        Args:
            *parents: The descriptions of the parents, in the order of the slots.

        Returns:
            The shape of the value of one node; `()` for an integer state.

        Raises:
            BNetError: If a parent has an unsuitable shape or kind.
        """

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        """The parameters of the TPM by name; none by default.

        Args:
            *parents: The descriptions of the parents, in the order of the slots.

        Returns:
            The shape, the initial value and the learnability of each parameter. Discrete nodes have their table of
            log probabilities in `"logits"`, `[*states of the parents, states]`.
        """
        return {}

    def products(self, *parents: Parent) -> tuple[Product, ...] | None:
        """The matrix products of the equation, from which costs are counted.

        Args:
            *parents: The descriptions of the parents, in the order of the slots.

        Returns:
            The products for one node; empty if `elementwise`; None if the TPM does not declare them.
        """
        return () if self.elementwise else None

    @property
    def states(self) -> int | None:
        """The number of states of a discrete node; None if the sentence decides it or the node is not discrete."""
        return None

    @property
    def default(self) -> int | None:
        """The state of an input that the sentence does not give; None if the sentence must give it."""
        return None

    @property
    def image(self) -> Patches | None:
        """The division of an image into the vectors of an input; None for other inputs."""
        return None

    @property
    def is_index_valued(self) -> bool:
        """True if children receive the integer state of a discrete node instead of a tensor."""
        return self.kind == "discrete"

    @property
    def fixed_shape(self) -> Shape | None:
        """The shape of a discrete node's value, which does not depend on parents; None for other nodes."""
        return () if self.is_index_valued else None

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        """The value of a deterministic node.

        Args:
            context: The parameters, the index of the word and the masks.
            *parents: The values of the parents, `[..., *shape]`, in the order of the slots.

        Returns:
            The value, `[..., *shape]`.
        """
        raise BNetError(type(self).__name__, expected="a method `value`, because the TPM is deterministic")

    def logits(self, context: EvalContext, *parents: Tensor) -> Tensor:
        """The log probabilities of a discrete node, up to a constant.

        Args:
            context: The parameters, the index of the word and the masks.
            *parents: The values of the parents, `[..., *shape]`, in the order of the slots.

        Returns:
            The logits of all states, `[..., states]`; -inf is a probability of 0.
        """
        raise BNetError(type(self).__name__, expected="a method `logits`, because the TPM is discrete")

    def emit(self, context: EvalContext, state: Tensor) -> Tensor:
        """The value that children receive from a discrete node in a given state; by default the state itself.

        Args:
            context: The parameters, the index of the word and the masks.
            state: The integer states, `[...]`.

        Returns:
            The states, `[...]`, or the tensors of the states, `[..., *shape]` (the atoms of a codebook).
        """
        return state

    def distribution(self, context: EvalContext, *parents: Tensor) -> Distribution:
        """The node's distribution given its parents' values; a delta distribution for a deterministic node.

        Args:
            context: The parameters, the index of the word and the masks.
            *parents: The values of the parents, `[..., *shape]`, in the order of the slots.

        Returns:
            A torch or Pyro distribution. The dims of a vector are event dims.
        """
        if self.kind == "discrete":
            return torch.distributions.Categorical(logits=self.logits(context, *parents), validate_args=False)
        if self.kind == "continuous":
            raise BNetError(type(self).__name__, expected="a method `distribution`, because the TPM is continuous")
        from pyro.distributions import Delta

        value = self.value(context, *parents)
        return Delta(value, event_dim=value.dim())

    def log_prob(self, context: EvalContext, value: Tensor, *parents: Tensor) -> Tensor:
        """The log density `log P(value | parents)` of a continuous node.

        A subclass may override it with a cheaper computation than that of `distribution`.

        Args:
            context: The parameters, the index of the word and the masks.
            value: The value of the node, `[..., *shape]`.
            *parents: The values of the parents, `[..., *shape]`, in the order of the slots.

        Returns:
            The log density, `[...]`.
        """
        log_prob: Tensor = self.distribution(context, *parents).log_prob(value)
        return log_prob

    def attention_weights(self, context: EvalContext, *parents: Tensor) -> Tensor | None:
        """The attention distribution `P(j | i)`, with which word i attends to the words j.

        Args:
            context: The parameters, the index of the word and the masks.
            *parents: The values of the parents, `[..., *shape]`, in the order of the slots. Only those of
                `attention_slots` are read.

        Returns:
            The weights, `[..., m]`; None if the TPM has no attention distribution.
        """
        return None

    @property
    def has_attention(self) -> bool:
        """True if the TPM has an attention distribution `P(j | i)` over the words that it reads."""
        return type(self).attention_weights is not TPM.attention_weights

    def no_attention_reason(self) -> str:
        """A description of a TPM without `P(j | i)`, with the reason, for error messages after "got"."""
        return f"{type(self).__name__}, which has no attention distribution"

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        """The parents in which the value is affine: a constant plus a sum of linear maps; none by default.

        The other parents (a matrix, the query and the keys of attention) and the scale of a norm count as constants.
        Contributions (`Sentence.contributions`) pass through these parents. A node without them is a writer.

        Args:
            *parents: The descriptions of the parents, in the order of the slots.

        Returns:
            The positions of these parents among the slots.
        """
        return ()

    def residual_parents(self, *parents: Parent) -> tuple[int, ...]:
        """The parents of `linear_parents` that the value adds unchanged, such as the input of a residual connection.

        Contributions pass through them without a computation. If all parents are such, the value is their sum.

        Args:
            *parents: The descriptions of the parents, in the order of the slots.

        Returns:
            The positions of these parents among the slots; none by default.
        """
        return ()

    @property
    def adds_entries(self) -> bool:
        """Whether the value is a constant plus a sum of one term for each entry of its collections; False by default.

        Then collections of one entry give the term of this entry, such as what one head adds to the sum of all heads.
        """
        return False

    def norm_scale(self, context: EvalContext, *parents: Tensor) -> Tensor | None:
        """The factor by which a norm multiplies its input, which contributions hold fixed; None for other TPMs.

        Args:
            context: The parameters, the index of the word and the masks.
            *parents: The values of the parents, `[..., *shape]`, in the order of the slots.

        Returns:
            The factor, `[..., 1]`; None (default) if the TPM is no norm.
        """
        return None

    def linear_value(self, context: EvalContext, scale: Tensor | None, *parents: Tensor) -> Tensor:
        """The value, the logits or the mean of the node with the scale of its norm held fixed.

        It is affine in the parents of `linear_parents`; at zeros it is the constant, such as a bias.

        Args:
            context: The parameters, the index of the word and the masks.
            scale: The result of `norm_scale` at the values of the sentence.
            *parents: The values of the parents, `[..., *shape]`, in the order of the slots.

        Returns:
            The value, `[..., *shape]`; of a discrete node the logits, `[..., states]`.
        """
        return (self.logits if self.kind == "discrete" else self.value)(context, *parents)

    def select_entries(
        self, entries: Tensor, context: EvalContext, *parents: Tensor
    ) -> tuple[EvalContext, tuple[Tensor, ...]] | None:
        """The inputs with which `linear_value` is only some entries of the value, such as some rows of a matrix.

        Contributions to one or two of many logits then read only the rows of these logits.

        Args:
            entries: The indices of the entries, `[entry]`.
            context: The parameters, the index of the word and the masks.
            *parents: The values of the parents, `[..., *shape]`, in the order of the slots.

        Returns:
            The context and the parents; None (default) if all entries must be computed.
        """
        return None

    def split_neurons(self, *parents: Parent) -> tuple[TPM, TPM, Mapping[str, str]] | None:
        """The TPM as two, at its hidden activations (its neurons); None (default) if it has none.

        `net.expose_neurons()` then declares two nodes instead of one.

        Args:
            *parents: The descriptions of the parents, in the order of the slots.

        Returns:
            The TPM of the hidden activations, with the same parents and with parameters of the same names; the TPM of
            the value, with the hidden activations as its parent; and for each parameter of the second its name in this
            TPM.
        """
        return None

    def latex(self, s: Symbols) -> str:
        r"""The right-hand side of `P(node | parents) = ...` in LaTeX.

        By default it is a function of the parents, such as `\mathbb{I}(\, x_i = \operatorname{Gate}(g_i, x_i) \,)`.

        Args:
            s: The symbols of the node and its parents, and methods that write equations with them.

        Returns:
            LaTeX without delimiters.
        """
        return s.call(type(self).__name__)

    def priors(self) -> Mapping[str, Any]:
        """The Dirichlet priors of the tables of log probabilities; none by default.

        A discrete TPM that learns a table `logits` of shape `[..., states]` returns `{"logits": alpha}`. Each row of
        probabilities, `softmax(logits)`, then has a Dirichlet prior. If `alpha` is a number, it is the concentration of
        all states: with `alpha=1` the prior is uniform; a larger value pulls the row towards the uniform distribution.
        `alpha` can also be the concentrations of the states, `[states]`, or of all rows, an array of the table's shape.
        `Categorical`, `Codebook` and `Table` return their option `prior` in this way.

        `bt.fit` adds the log density of the prior to its objective; the parameter must have the name `logits`. If the
        node has a vector parent, the rows are not its probabilities themselves: MAP and EM use the prior, and SVI and
        NUTS raise an error unless every `alpha` is 1. The Pyro model (`net.pyro()`) samples the rows at the site
        `theta_<node>` (`theta_<node>_<name>` for a parameter of another name), and their logarithms replace the
        parameter.

        Returns:
            For each parameter with a prior, the concentrations `alpha > 0` of its rows.

        >>> import bnet_transformer as bt
        >>> class Coin(TPM):
        ...     kind, states = "discrete", 2
        ...     def shape(self):
        ...         return ()
        ...     def parameters(self):
        ...         return {"logits": Parameter((2,), fill=0.0)}
        ...     def logits(self, context):
        ...         return context["logits"]             # [..., states]
        ...     def priors(self):
        ...         return {"logits": 3.0}
        >>> bt.BNet(bt.Declaration(nodes=[bt.Node("coin", Coin())])).pyro().sites
        ('theta_coin', 'coin')
        """
        return {}

    @property
    def max_words(self) -> int | None:
        """The maximum number of words of a sentence; None for no limit."""
        return None

    @property
    def can_read_empty(self) -> bool:
        """True if a collection may be empty. An empty sum is zero; a distribution over no words does not exist."""
        return False

    def attention_slots(self) -> tuple[str, ...]:
        """The slots on which `P(j | i)` depends."""
        return self.get_slots()


@dataclass(frozen=True)
class VectorMap(TPM):
    """The base class of TPMs from vectors to a vector of the same width; elementwise, unless it declares products."""

    slots: ClassVar[tuple[str, ...]] = ("x",)
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> Shape:
        width = check_vector(parents[0])
        for parent in parents[1:]:
            check_vector(parent, width, reason=f"as {parents[0].name}")
        return (width,)


def initial_spread(shape: Shape, spread: float | None) -> float:
    """The initial standard deviation of a weight: `spread`, or `1/sqrt(columns)` to preserve the scale of inputs."""
    if spread is not None:
        return spread
    return float(shape[-1] ** -0.5) if shape else 1.0


def check_vector(parent: Parent, width: int | None = None, *, reason: str = "") -> int:
    """The width of a parent; raises an error if it is not a vector (of width `width`, for a `reason`)."""
    expected = "a vector" if width is None else f"a vector of width {width}"
    has_wrong_width = len(parent.shape) == 1 and width is not None and parent.shape[0] != width
    if parent.states is not None or len(parent.shape) != 1 or has_wrong_width:
        raise BNetError(parent.name, expected=expected + (f" ({reason})" if reason else ""), actual=parent.form)
    return parent.shape[0]


def check_single_axis(parent: Parent) -> None:
    """Raise an error unless a parent is a collection over exactly one axis: words, or one plate."""
    if len(parent.over) != 1:
        raise BNetError(parent.name, expected="a collection over one axis (words, or one plate)", actual=parent.form)


def check_matrix(parent: Parent) -> tuple[int, int]:
    """The shape of a parent; raises an error if it is not a matrix."""
    if parent.states is not None or len(parent.shape) != 2:
        raise BNetError(parent.name, expected="a matrix", actual=parent.form)
    return parent.shape[0], parent.shape[1]


def check_discrete(parent: Parent) -> int:
    """The number of states of a parent; raises an error if it is not discrete."""
    if not parent.states:
        raise BNetError(parent.name, expected="a discrete node, because its states index a table", actual=parent.form)
    return parent.states


def check_shape(subject: str, shape: object) -> Shape:
    """A shape as a tuple of integers, from one integer or a sequence of them."""
    values = shape.tolist() if isinstance(shape, np.ndarray) else shape
    sizes = values if isinstance(values, Sequence) and not isinstance(values, str) else (values,)
    return tuple(check_int(subject, size) for size in sizes)


@final
@dataclass(frozen=True)
class Patches(CheckedDataclass):
    """The division of an image `[channel, row, column]` into words: patches, row by row.

    Word 0 is the class token `[CLS]`, with an input of zeros. Rows and columns at the end that do not fill a patch are
    dropped.

    Args:
        channels: The number of channels of the image.
        rows: The number of rows of the image, in pixels.
        columns: The number of columns of the image, in pixels.
        high: The number of rows of a patch, in pixels.
        wide: The number of columns of a patch, in pixels.

    >>> Patches(channels=3, rows=8, columns=8, high=4, wide=4).tokens
    ('[CLS]', '0,0', '0,1', '1,0', '1,1')
    """

    channels: Annotated[int, check_int]
    rows: Annotated[int, check_int]
    columns: Annotated[int, check_int]
    high: Annotated[int, check_int]
    wide: Annotated[int, check_int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high > self.rows or self.wide > self.columns:
            expected = f"at most the size of the image, {self.rows} x {self.columns}"
            raise BNetError("patches", expected=expected, actual=f"{self.high} x {self.wide}")

    @property
    def num_patch_rows(self) -> int:
        """The number of rows of patches."""
        return self.rows // self.high

    @property
    def num_patch_columns(self) -> int:
        """The number of columns of patches."""
        return self.columns // self.wide

    @property
    def words(self) -> int:
        """The number of words of an image: the class token and the patches."""
        return 1 + self.num_patch_rows * self.num_patch_columns

    @property
    def features(self) -> int:
        """The number of features of a patch."""
        return self.channels * self.high * self.wide

    @property
    def tokens(self) -> tuple[str, ...]:
        """The names of the words: `[CLS]`, then `row,column` of each patch."""
        return ("[CLS]", *(f"{i},{j}" for i in range(self.num_patch_rows) for j in range(self.num_patch_columns)))

    def patchify(self, image: Tensor) -> Tensor:
        """The words of an image.

        Args:
            image: The image, `[channel, row, column]`.

        Returns:
            The words, `[word, feature]`; the features of a patch are in the order channel, row, column.

        Raises:
            BNetError: If the image has another shape.
        """
        shape = (self.channels, self.rows, self.columns)
        if tuple(image.shape) != shape:
            raise BNetError("image", expected=f"[channel, row, column] of shape {shape}", actual=tuple(image.shape))
        cropped = image[:, : self.num_patch_rows * self.high, : self.num_patch_columns * self.wide]
        patches = cropped.unfold(1, self.high, self.high).unfold(2, self.wide, self.wide)
        words = patches.permute(1, 2, 0, 3, 4).reshape(-1, self.features)
        return torch.cat([words.new_zeros(1, self.features), words])
