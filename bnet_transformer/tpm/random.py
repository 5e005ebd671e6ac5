"""Random nodes: `Categorical`, `Codebook` and `Normal`; and `Select`, the deterministic choice by a selector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from typing import Annotated, Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal as TorchNormal
from torch.nn import functional

from bnet_transformer._core.checks import check_int, check_sequence, set_frozen
from bnet_transformer._core.tokens import get_raw
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import (
    TPM,
    EvalContext,
    Kind,
    Parameter,
    Parent,
    Product,
    Shape,
    broadcast_shapes,
    check_bool,
    check_concentration,
    check_discrete,
    check_positive,
    check_shape,
    check_single_axis,
    check_vector,
    choice,
    initial_spread,
    named,
    optional,
)
from bnet_transformer.tpm.deterministic import POOLS, pool_latex, pool_words
from bnet_transformer.tpm.symbols import Symbol, Symbols, add_scripts, format_number, format_power

MAX_NUMBERS_IN_EQUATIONS = 16


@final
@dataclass(frozen=True)
class Categorical(TPM):
    """A categorical node: `P(y | d, x) = softmax(theta[d] + W x)_y`; discrete.

    Parents, in order: any number of discrete nodes `d`, which index the table of logits `theta`
    (`[*states of d, n]`); then at most one vector `x`, `[d_x]`, with a learnable matrix `W`, `[n, d_x]`. Without
    parents the node is a root, such as a head selector. With `pool` the one parent is the collection `x.` of all words.
    The value is an integer state from 0 to n - 1; a logit of -inf is a probability of 0.

    A discrete parent at the word before (reach `"before"`) or after (`"after"`) makes the nodes of the words a Markov
    chain. The first word of the chain has no such parent. Its table is the second parameter `initial`, with the states
    of the other discrete parents: `[*states of the other d, n]`.

    Args:
        n: The number of states.
        probabilities: For a node without parents, its `n` probabilities, which sum to 1. None (default): the logits of
            a root start at 0, which is the uniform distribution; those of a table start at random.
        learnable: Whether training changes the parameters. None (default): True, unless `probabilities` are given.
        prior: The concentration of the Dirichlet prior on each row of `theta` and of `initial`: a number for all
            states, or `n` numbers; or an array of the shape of `theta`, if there is no `initial`. None (default) for no
            prior.
        pool: `"mean"` or `"sum"` of the vectors of a sentence, for one node `y` of the sentence. None (default) for a
            node of each word.
        affine: Whether a vector parent is mapped by `W x + theta`. False uses the vector, `[n]`, itself as logits.
            Default True.
        labels: The names of the states, `n` different strings, which evidence can use instead of numbers. Default
            None.

    >>> Categorical(4).shape(), Categorical(3, probabilities=(0.5, 0.25, 0.25)).states
    ((), 3)
    >>> {name: p.shape for name, p in Categorical(5).parameters(Parent("c", states=2), Parent("x", (8,))).items()}
    {'logits': (2, 5), 'weight': (5, 8)}
    >>> {name: p.shape for name, p in Categorical(3).parameters(Parent("c", states=3, is_optional=True)).items()}
    {'logits': (3, 3), 'initial': (3,)}
    """

    n: Annotated[int, named("Categorical states", check_int)]
    probabilities: tuple[float, ...] | None = None
    learnable: Annotated[bool | None, choice(None, True, False)] = None  # None: True without `probabilities`
    prior: Annotated[Any, optional(check_concentration)] = None
    pool: Annotated[str | None, choice(None, *POOLS)] = None
    affine: Annotated[bool, check_bool] = True
    labels: tuple[str, ...] | None = None
    kind: ClassVar[Kind] = "discrete"
    is_lookup: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probabilities is not None:
            set_frozen(self, probabilities=_check_simplex(self.probabilities, self.n))
        if self.learnable is None:
            set_frozen(self, learnable=self.probabilities is None)
        if self.labels is not None:
            set_frozen(self, labels=check_labels(self.labels, self.n))

    @property
    def states(self) -> int | None:
        return self.n

    def get_slots(self) -> tuple[str, ...]:
        return ("x.",) if self.pool else ("*x",)

    def shape(self, *parents: Parent) -> Shape:
        vectors = [parent for parent in parents if parent.states is None]
        if len(vectors) > 1 or (vectors and parents[-1].states is not None):
            raise BNetError(
                ", ".join(parent.name for parent in parents),
                expected="discrete parents first, then at most one vector",
                actual=", ".join(parent.form for parent in parents),
            )
        for parent in vectors:
            if self.pool:
                check_single_axis(parent)
            if len(parent.shape) != 1 or (not self.affine and parent.shape != (self.n,)):
                expected = "a vector" if self.affine else f"a vector of {self.n} logits"
                raise BNetError(parent.name, expected=expected, actual=parent.form)
        if vectors and not self.affine and self.prior is not None:
            raise BNetError("prior", expected="None, because affine=False omits the logits", actual=self.prior)
        if self.probabilities is not None and parents:
            raise BNetError(parents[0].name, expected="no parent, because `probabilities` are those of a root")
        return ()

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        table = tuple(check_discrete(parent) for parent in parents if parent.states is not None)
        if self.probabilities is not None:
            logs = tuple(torch.tensor(self.probabilities, dtype=torch.float64).log().tolist())
            return {"logits": Parameter((self.n,), fill=logs, learnable=bool(self.learnable))}
        vectors = [parent.shape[0] for parent in parents if parent.states is None]
        if vectors and not self.affine:
            return {}
        learnable, fill = bool(self.learnable), None if table and not vectors else 0.0
        parameters = {"logits": Parameter((*table, self.n), 0.5, fill, learnable)}
        parameters |= initial_parameter(parents, self.n, learnable=learnable)
        for width in vectors:
            parameters["weight"] = Parameter((self.n, width), width**-0.5, learnable=learnable)
        return parameters

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        vectors = tuple(parent for parent in parents if parent.states is None) if self.affine else ()
        return tuple(Product((x,), (self.n, *x.shape), has_parameter=True) for x in vectors)

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return tuple(k for k, parent in enumerate(parents) if parent.states is None)

    def select_entries(
        self, entries: Tensor, context: EvalContext, *parents: Tensor
    ) -> tuple[EvalContext, tuple[Tensor, ...]] | None:
        if not self.affine:  # the vector itself has the logits
            return None
        return context.select_entries(entries, weight=-2, logits=-1, initial=-1), parents

    def logits(self, context: EvalContext, *parents: Tensor) -> Tensor:
        vectors = [parent for parent in parents if parent.is_floating_point()]
        if self.pool:
            vectors = [pool_words(self.pool, vectors[0], context.mask["x."])]
        if vectors and not self.affine:
            return vectors[0]
        scores = lookup_logits(context, parents)
        if vectors:
            scores = scores + torch.einsum("...nd,...d->...n", context["weight"], vectors[0])
        return scores

    def latex(self, s: Symbols) -> str:
        s.define(state_range_latex(s.state, self.n))
        vectors = [slot for slot in s.slot_indices() if not s.slot(slot).is_discrete]
        states = [str(s.of(slot)) for slot in s.slot_indices() if s.slot(slot).is_discrete]
        define_initial(s, s.parameter("b" if vectors else r"\theta", *states))
        if not vectors:
            return self._table_latex(s, states)
        x = pool_latex(self.pool, s, "b") if self.pool else s.of(vectors[0], "b")
        if not self.affine:
            return s.softmax(pool_latex(self.pool, s) if self.pool else str(s.of(vectors[0])))
        bias = s.parameter("b", *states)
        define_prior(s, bias, self.prior, self.n)
        return s.softmax(s.map(s.parameter("W"), x) + s.plus(bias))

    def _table_latex(self, s: Symbols, states: list[str]) -> str:
        """The equation of a table without vector parents."""
        s.require_form("word")
        table = s.parameter(r"\theta", *states) if states else s.parameter(r"\pi", role=False)
        define_prior(s, table, self.prior, self.n)
        if self.probabilities is not None and not self.learnable:
            probs = f"({', '.join(format_number(p) for p in self.probabilities)})"
            if self.n <= 8:
                return add_scripts(probs, [s.state])
            s.define(rf"\pi_. \text{{ is fixed: }} {probs}")
        return str(table.with_sub(s.state))

    def priors(self) -> dict[str, Any]:
        return {} if self.prior is None else {"logits": self.prior}


@final
@dataclass(frozen=True)
class Select(TPM):
    """A tensor that a selector chooses: `P(W | c) = delta(W, W_c)`; deterministic.

    Parents: one or more discrete nodes. The TPM owns a learnable tensor for each of their joint states, in the
    parameter `values`, `[*states, *size]`. The value has shape `size`.

    Args:
        size: The shape of the value: an integer, or a tuple of integers.
        spread: The standard deviation of the initial normal distribution. None (default) for `1/sqrt(columns)`.

    >>> Select((4, 8)).parameters(Parent("c", states=3))["values"].shape
    (3, 4, 8)
    """

    size: Annotated[int | Shape, named("Select", check_shape)]
    spread: Annotated[float | None, optional(check_positive)] = None
    slots: ClassVar[tuple[str, ...]] = ("*c",)
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> Shape:
        if not parents:
            raise BNetError("Select", expected="at least one discrete parent, the selector")
        for parent in parents:
            check_discrete(parent)
        return check_shape("Select", self.size)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        table = tuple(check_discrete(parent) for parent in parents)
        shape = check_shape("Select", self.size)
        return {"values": Parameter((*table, *shape), initial_spread(shape, self.spread))}

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return lookup(context["values"], parents, len(check_shape("Select", self.size)))

    def latex(self, s: Symbols) -> str:
        states = [str(s[slot]) for slot in s.slot_indices()]
        return s.delta(s.node.with_states(*states))


@final
@dataclass(frozen=True)
class Codebook(TPM):
    """A random choice among shared tensors, the atoms: `P(W = atom m | c) = theta[c, m]`; discrete.

    Parents: any number of discrete nodes, such as a head selector. The parameters are `logits`, `[*states, atoms]`,
    with `theta = softmax(logits)`, and the learnable `atoms`, `[atoms, *size]`. The state is the integer `m`; children
    receive the tensor of the atom, of shape `size`.

    Args:
        atoms: The number of atoms.
        size: The shape of an atom: an integer, or a tuple of integers.
        prior: The concentration of the Dirichlet prior on each row of `theta`: a number for all atoms, a number for
            each atom, or an array of the shape of `theta`. None (default) for no prior.
        spread: The standard deviation of the initial normal distribution of the atoms. None (default) for
            `1/sqrt(columns)`.

    >>> Codebook(12, (4, 8)).parameters(Parent("c", states=3))["logits"].shape
    (3, 12)
    """

    atoms: Annotated[int, check_int]
    size: Annotated[int | Shape, named("Codebook", check_shape)]
    prior: Annotated[Any, optional(check_concentration)] = None
    spread: Annotated[float | None, optional(check_positive)] = None
    kind: ClassVar[Kind] = "discrete"
    is_lookup: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    @property
    def states(self) -> int | None:
        return self.atoms

    @property
    def is_index_valued(self) -> bool:
        return False

    @property
    def fixed_shape(self) -> Shape:
        return check_shape("Codebook", self.size)

    def get_slots(self) -> tuple[str, ...]:
        return ("*c",)

    def shape(self, *parents: Parent) -> Shape:
        for parent in parents:
            check_discrete(parent)
        return self.fixed_shape

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        table = tuple(check_discrete(parent) for parent in parents)
        atoms = Parameter((self.atoms, *self.fixed_shape), initial_spread(self.fixed_shape, self.spread))
        return {"logits": Parameter((*table, self.atoms), 0.5), "atoms": atoms}

    def logits(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return lookup(context["logits"], parents)

    def emit(self, context: EvalContext, state: Tensor) -> Tensor:
        return gather_entry(context["atoms"], state, len(self.fixed_shape))

    def latex(self, s: Symbols) -> str:
        table = s.parameter(r"\theta", *(str(s[slot]) for slot in s.slot_indices()))
        s.define(rf"{state_range_latex(s.state, self.atoms)} \text{{ for }} {s.node}")
        define_prior(s, table, self.prior, self.atoms)
        return str(table.with_sub(s.state))

    def priors(self) -> dict[str, Any]:
        return {} if self.prior is None else {"logits": self.prior}


@final
@dataclass(frozen=True)
class Normal(TPM):
    """A Gaussian node: `y ~ N(x, sigma^2 I)`, or with `dim` `y ~ N(W x + b, sigma^2 I)`; continuous.

    Parent: the vector `x`, `[d]`; with `pool` the collection `x.` of all words. The value has shape `[d]`, or `[dim]`.

    Args:
        sigma: The standard deviation, one number for all features. Default 1.
        dim: The width of the value, if a learnable `W x + b` maps the mean. None (default) for the width of `x`.
        learnable: Whether training changes `sigma`. Default False.
        pool: `"mean"` or `"sum"` of the vectors of a sentence, for one node `y` of the sentence. None (default) for a
            node of each word.

    >>> Normal(0.5).shape(Parent("x", (8,))), Normal(dim=3).shape(Parent("x", (8,)))
    ((8,), (3,))
    """

    sigma: Annotated[float, check_positive] = 1.0
    dim: Annotated[int | None, optional(check_int)] = None
    learnable: Annotated[bool, check_bool] = False
    pool: Annotated[str | None, choice(None, *POOLS)] = None
    kind: ClassVar[Kind] = "continuous"

    def get_slots(self) -> tuple[str, ...]:
        return ("x.",) if self.pool else ("x",)

    def shape(self, *parents: Parent) -> Shape:
        width = check_vector(parents[0])
        if self.pool:
            check_single_axis(parents[0])
        return (width if self.dim is None else self.dim,)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        width = check_vector(parents[0])
        parameters = {"log_sigma": Parameter((), fill=math.log(self.sigma), learnable=self.learnable)}
        if self.dim is not None:
            parameters["weight"] = Parameter((self.dim, width), width**-0.5)
            parameters["bias"] = Parameter((self.dim,), fill=0.0)
        return parameters

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        return () if self.dim is None else (Product(parents, (self.dim, *parents[0].shape), has_parameter=True),)

    def mean(self, context: EvalContext, *parents: Tensor) -> Tensor:
        """The mean `E[y | x]`.

        Args:
            context: The parameters and the mask of the words.
            *parents: The value of the parent, `[..., d]`; with `pool` `[..., m, d]`.

        Returns:
            The mean, `[..., d]` or `[..., dim]`.
        """
        x = pool_words(self.pool, parents[0], context.mask["x."]) if self.pool else parents[0]
        if self.dim is None:
            return x
        return torch.einsum("...od,...d->...o", context["weight"], x) + context["bias"]

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return (0,)

    def linear_value(self, context: EvalContext, scale: Tensor | None, *parents: Tensor) -> Tensor:
        return self.mean(context, *parents)

    def log_prob(self, context: EvalContext, value: Tensor, *parents: Tensor) -> Tensor:
        mean = self.mean(context, *parents)
        return self.log_density(context, squared_distance(value, mean), mean.shape[-1])

    def log_density(self, context: EvalContext, square: Tensor, num_entries: int | Tensor) -> Tensor:
        """The log density of a vector at a squared distance from its mean.

        Args:
            context: The parameters, which contain `log_sigma`.
            square: The squared distance, `[...]`.
            num_entries: The number of entries of the vector, or of several vectors together.

        Returns:
            The log density, `[...]`.
        """
        log_sigma = context["log_sigma"]
        log_scale = num_entries * (log_sigma + 0.5 * math.log(2 * math.pi))
        log_density: Tensor = -0.5 * (-2 * log_sigma).exp() * square - log_scale
        return log_density

    def distribution(self, context: EvalContext, *parents: Tensor) -> Distribution:
        mean = self.mean(context, *parents)
        sigma = context["log_sigma"].exp()[..., None].expand(mean.shape)
        return Independent(TorchNormal(mean, sigma, validate_args=False), 1, validate_args=False)

    def latex(self, s: Symbols) -> str:
        letter = "a" if self.dim is None else "b"
        mean = pool_latex(self.pool, s, letter) if self.pool else str(s.of("x", letter))
        if self.dim is not None:
            mean = s.map(s.parameter("W"), mean) + s.plus(s.parameter("b"))
        sigma = s.parameter(r"\sigma")
        variance = f"({sigma})^2" if self.learnable else "1" if self.sigma == 1 else format_power(self.sigma, "2")
        unit = variance if s.form == "einstein" else "I" if variance == "1" else f"{variance} I"
        return rf"\mathcal{{N}}\left({s.node['a']};\; {mean},\; {unit}\right)"


def squared_distance(a: Tensor, b: Tensor, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """The squared distance `|a - b|^2`, summed over `dims`."""
    # The backward pass of `mse_loss` allocates one tensor; that of `(a - b) ** 2` allocates three.
    a, b = torch.broadcast_tensors(a, b)
    return functional.mse_loss(a, b, reduction="none").sum(dims)


def lookup(table: Tensor, states: Sequence[Tensor], rank: int = 1) -> Tensor:
    """The entry of `table[..., d1, d2, *shape]` at the states of discrete parents d1, d2; leading dims broadcast."""
    for k, state in enumerate(states):
        table = gather_entry(table, state, rank + len(states) - k - 1)
    return table


def initial_parameter(parents: Sequence[Parent], n: int, *, learnable: bool) -> dict[str, Parameter]:
    """The logits of a node without its optional parents: `initial`, `[*states of the other discrete parents, n]`.

    Empty if no discrete parent is optional.
    """
    discrete = [parent for parent in parents if parent.states is not None]
    if not any(parent.is_optional for parent in discrete):
        return {}
    table = tuple(check_discrete(parent) for parent in discrete if not parent.is_optional)
    return {"initial": Parameter((*table, n), 0.5, None if table else 0.0, learnable)}


def lookup_logits(context: EvalContext, parents: Sequence[Tensor]) -> Tensor:
    """The row of `logits` at the states of the discrete parents, or of `initial` where an optional one is missing."""
    discrete = {k: parent for k, parent in enumerate(parents) if not parent.is_floating_point()}
    rows = lookup(context["logits"], [*discrete.values()])
    missing = [context.missing[k] for k in discrete if k in context.missing]
    if not missing or "initial" not in context.parameters:
        return rows
    initial = lookup(context["initial"], [state for k, state in discrete.items() if k not in context.missing])
    is_missing = reduce(torch.logical_or, missing)
    return torch.where(is_missing[..., None], initial, rows)


def gather_entry(table: Tensor, state: Tensor, rank: int) -> Tensor:
    """Entry `state` of a table `[..., entries, *shape]` with a shape of `rank` dims; leading dims broadcast.

    >>> gather_entry(torch.eye(3), torch.tensor([2, 0]), 1)
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    if table.dim() == rank + 1:
        return table[state]
    leading = table.shape[: table.dim() - rank - 1]
    batch = broadcast_shapes(leading, state.shape)
    index = state.expand(batch)[(...,) + (None,) * (rank + 1)].expand(*batch, 1, *table.shape[table.dim() - rank :])
    return table.expand(*batch, *table.shape[-rank - 1 :]).gather(len(batch), index).squeeze(len(batch))


def state_range_latex(state: str, n: int) -> str:
    """The range of a state in LaTeX, from 0 to n - 1."""
    return rf"{state} \in \{{{list_latex([str(k) for k in range(n)])}\}}"


def define_initial(s: Symbols, row: Symbol) -> None:
    """Define the row of a table for words without one of the optional parents, if there are such parents."""
    discrete = [slot for slot in s.slot_indices() if s.slot(slot).is_discrete]
    missing = r" \text{ or } ".join(str(s.of(slot)) for slot in discrete if s.slot(slot).is_optional)
    if missing:
        initial = s.parameter(r"\pi", *(str(s.of(slot)) for slot in discrete if not s.slot(slot).is_optional))
        s.define(rf"{row} = {initial} \text{{ for a word without }} {missing}")


def define_prior(s: Symbols, row: Symbol, prior: float | tuple[Any, ...] | None, n: int) -> None:
    """Define the Dirichlet prior of a row of a table, if there is one; it is the prior of the softmax of the logits."""
    if prior is None:
        return
    distribution = row.with_sub(".") if "\\" in row.base else rf"\operatorname{{softmax}}({row.plain})"
    if not isinstance(prior, tuple):
        alpha = list_latex([format_number(prior)] * n)
    elif isinstance(prior[0], tuple):  # a vector for each row
        symbol = replace(row, base=r"\alpha")
        alpha = str(symbol.with_sub("."))
        define_rows(s, replace(symbol, sub=()), np.array(prior), "concentrations")
    else:
        alpha = ", ".join(map(format_number, prior))
    s.define(rf"{distribution} \sim \operatorname{{Dirichlet}}({alpha})")


def define_rows(s: Symbols, symbol: Symbol, table: NDArray[np.float64], noun: str = "probabilities") -> None:
    """Define the rows of a fixed table in LaTeX, or only its shape if it is large."""
    if table.size > MAX_NUMBERS_IN_EQUATIONS:
        sizes = r" \times ".join(map(str, table.shape))
        s.define(rf"{symbol} \text{{ is a fixed table of }} {sizes} \text{{ {noun}}}")
        return
    indices = np.ndindex(table.shape[:-1])
    s.define(r",\; ".join(f"{symbol.with_sub(*map(str, k), '.')} = {format_row(table[k])}" for k in indices))


def format_row(row: NDArray[np.float64]) -> str:
    """A row of probabilities in LaTeX."""
    return f"({', '.join(map(format_number, row.tolist()))})"


def list_latex(items: list[str]) -> str:
    r"""The items, separated by commas; from more than four items only the first and the last: `0, \ldots, 9`."""
    return ", ".join(items) if len(items) <= 4 else rf"{items[0]}, \ldots, {items[-1]}"


def check_labels(labels: object, n: int) -> tuple[str, ...]:
    """The labels of `n` states as a tuple of different strings."""
    names = tuple(map(get_raw, check_sequence("labels", labels, str)))
    if len(names) != n or len(set(names)) != n:
        raise BNetError("labels", expected=f"{n} different labels, one for each state", actual=names)
    return names


def _check_simplex(values: object, n: int) -> tuple[float, ...]:
    """The values as `n` probabilities; raises an error if they are negative or do not sum to 1."""
    try:
        given = tuple(float(value) for value in islice(values, n + 1))  # type: ignore[call-overload]
    except (TypeError, ValueError, RuntimeError) as error:
        raise BNetError("probabilities", expected=f"{n} numbers that sum to 1", actual=values) from error
    if len(given) != n or not all(value >= 0 for value in given) or abs(sum(given) - 1) > 1e-6:
        raise BNetError("probabilities", expected=f"{n} numbers from 0 to 1 that sum to 1", actual=given)
    return given
