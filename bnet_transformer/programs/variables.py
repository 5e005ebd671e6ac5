"""A program as a bnet of its variables: a node for each variable and word, with TPMs that are functions of the parents.

The value of a node is a one-hot vector, or one number. A missing value is the zero vector. The net has no stream and
no weights: it is the program, to intervene on and to compare with the compiled net.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, final

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_int
from bnet_transformer._core.naming import Reach
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Arrow, Declaration, Node, Stack
from bnet_transformer.errors import BNetError
from bnet_transformer.programs.program import TOKEN_ROLE, Program
from bnet_transformer.programs.sops import Aggregate, Fallback, LinearSequenceMap, SelectedShare, SOp, Value
from bnet_transformer.tpm import TPM, EvalContext, Given, Parameter, Parent, Product
from bnet_transformer.tpm.field_checks import choice

WORD = ["word"]


@final
@dataclass(frozen=True)
class OneHot(TPM):
    """The indicator of a state, `[n]`: that of a discrete parent, or the index of the word; deterministic.

    Parent: the discrete node `token`, if `of="token"`.

    Args:
        n: The number of states.
        of: `"token"` for the state of the parent, `"word"` for the index of the word, from 0.

    >>> OneHot(3, "word").value(EvalContext(word=torch.tensor(1)))
    tensor([0., 1., 0.])
    """

    n: Annotated[int, check_int]
    of: Annotated[str, choice("token", "word")]
    elementwise: ClassVar[bool] = True

    def get_slots(self) -> tuple[str, ...]:
        return ("token",) if self.of == "token" else ()

    def shape(self, *parents: Parent) -> tuple[int, ...]:
        return (self.n,)

    @property
    def max_words(self) -> int | None:
        return self.n if self.of == "word" else None

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        state = parents[0] if parents else context.word
        return torch.nn.functional.one_hot(state, self.n).to(context.dtype)


@final
@dataclass(frozen=True)
class StateFunction(TPM):
    """A function of one or two variables by its table: the row of their states; deterministic.

    Parents: the variables `x`, one-hot vectors `[n]` or numbers `[1]`. The value has shape `[out]`.

    Args:
        table: The value for each joint state of the parents, `[state + 1, ..., out]`; the last row of an axis is for a
            missing value.
        grids: For each parent the numbers that it can have, of which the nearest is its state; None for one-hot.

    >>> negate = StateFunction(((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)), (None,))
    >>> context = EvalContext({name: torch.tensor(p.fill) for name, p in negate.parameters(Parent("x", (2,))).items()})
    >>> negate.value(context, torch.tensor([1.0, 0.0]))
    tensor([0., 1.])
    """

    table: Any  # nested tuples of floats
    grids: tuple[tuple[float, ...] | None, ...]
    slots: ClassVar[tuple[str, ...]] = ("*x",)

    def shape(self, *parents: Parent) -> tuple[int, ...]:
        (*states, out) = torch.tensor(self.table).shape
        for parent, grid, count in zip(parents, self.grids, states, strict=True):
            width = count - 1 if grid is None else 1
            if parent.shape != (width,):
                raise BNetError(parent.name, expected=f"a vector of width {width}", actual=parent.form)
        return (out,)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        return {"table": Parameter(tuple(torch.tensor(self.table).shape), fill=self.table, learnable=False)}

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        sizes = tuple(torch.tensor(self.table).shape)
        return tuple(Product(parents[: k + 1], sizes[k:], has_parameter=True) for k in range(len(parents)))

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        value = context["table"]
        for k, (parent, grid) in enumerate(zip(parents, self.grids, strict=True)):
            weights = _state_weights(parent, grid).to(value.dtype)
            value = _contract(weights, value, first=k == 0)
        return value


def _state_weights(x: Tensor, grid: tuple[float, ...] | None) -> Tensor:
    """The indicator of the state of a variable, `[..., state + 1]`, of which the last one is missing."""
    if grid is None:
        return torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1)
    nearest = (x - torch.tensor(grid, dtype=x.dtype, device=x.device)).abs().argmin(-1)
    return torch.nn.functional.one_hot(nearest, len(grid) + 1).to(x.dtype)


def _contract(weights: Tensor, value: Tensor, *, first: bool) -> Tensor:
    """The sum over the states of a parent of its weights and the rows of a table."""
    if first:
        product: Tensor = torch.tensordot(weights, value, dims=1)
        return product
    return torch.einsum("...s,...so->...o", weights, value)


@final
@dataclass(frozen=True)
class WeightedSum(TPM):
    """The sum `a x + b y` of variables that are numbers; deterministic.

    Parents: the variables `x`, `[1]`. The value has shape `[1]`.

    Args:
        factors: The factor of each parent.

    >>> WeightedSum((1.0, -1.0)).value(EvalContext(), torch.tensor([3.0]), torch.tensor([1.0]))
    tensor([2.])
    """

    factors: tuple[float, ...]
    slots: ClassVar[tuple[str, ...]] = ("*x",)
    elementwise: ClassVar[bool] = True

    def shape(self, *parents: Parent) -> tuple[int, ...]:
        return parents[0].shape

    def linear_parents(self, *parents: Parent) -> tuple[int, ...]:
        return tuple(range(len(parents)))

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return torch.stack([factor * x for factor, x in zip(self.factors, parents, strict=True)]).sum(0)


@final
@dataclass(frozen=True)
class SelectedMean(TPM):
    """The mean of values over the words that satisfy all conditions, or `1 / (1 + n)` for n such words; deterministic.

    Parents: for each condition the query `q`, `[nq]`, and the keys `k.`, `[nk]` for each word, one-hot vectors; then
    the values `v.`, `[d]`. The value has shape `[d]`, and is zero if no word satisfies all. Without values it has shape
    `[1]`.

    Args:
        conditions: For each condition its table, `[query, key]`, of zeros and ones.
        has_values: Whether there are values.

    >>> SelectedMean(((((1.0, 0.0), (0.0, 1.0))),), has_values=True).get_slots()
    ('q', 'k.', 'v.')
    """

    conditions: tuple[Any, ...]
    has_values: bool

    def get_slots(self) -> tuple[str, ...]:
        numbers = ("", *map(str, range(2, len(self.conditions) + 1)))
        slots = tuple(slot for number in numbers for slot in (f"q{number}", f"k{number}."))
        return (*slots, "v.") if self.has_values else slots

    def shape(self, *parents: Parent) -> tuple[int, ...]:
        return parents[-1].shape if self.has_values else (1,)

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        tables = [torch.tensor(table) for table in self.conditions]
        return {
            f"condition{k}": Parameter(tuple(table.shape), fill=self.conditions[k], learnable=False)
            for k, table in enumerate(tables)
        }

    def products(self, *parents: Parent) -> tuple[Product, ...]:
        pairs = self._pairs(parents)
        products = [Product((q,), (*q.shape, *k.shape), has_parameter=True) for q, k in pairs]
        products += [Product((q, k), k.shape, over=(k,)) for q, k in pairs]
        return (*products, *((Product(parents, parents[-1].shape, over=(parents[-1],)),) if self.has_values else ()))

    def value(self, context: EvalContext, *parents: Tensor) -> Tensor:
        selected = context.mask["k."].to(parents[0].dtype)
        for k, (query, keys) in enumerate(self._pairs(parents)):
            row = query @ context[f"condition{k}"]
            selected = selected * torch.einsum("...k,...mk->...m", row, keys)
        count = selected.sum(-1, keepdim=True)
        if not self.has_values:
            return 1 / (1 + count)
        return torch.einsum("...m,...md->...d", selected, parents[-1]) / count.clamp(min=1)

    def _pairs(self, parents: tuple[Any, ...]) -> list[tuple[Any, Any]]:
        """The query and the keys of each condition."""
        return [(parents[2 * k], parents[2 * k + 1]) for k in range(len(self.conditions))]


def program_to_bnet(program: Program) -> BNet:
    """The bnet of the variables of a program, in float64; its sentences have no BOS."""
    nodes = [Node(TOKEN_ROLE, Given(states=len(program.vocabulary)), plates=WORD)]
    nodes += [_make_node(program, name, sop) for name, sop in program.variables.items()]
    words = tuple(str(token) for token in program.vocabulary)
    stack = Stack([], nodes, vocabulary=words)
    return BNet(Declaration([stack], name=f"program {program.names[program.output]}")).to(torch.float64)


def encode_value(program: Program, sop: SOp, value: Value) -> Tensor:
    """A value of a variable as that of its node, `[n]` or `[1]`."""
    if sop.is_numeric:
        return torch.tensor([0.0 if value is None else value], dtype=torch.float64)
    states = program.list_values(sop)
    return torch.tensor([float(state == value) for state in states], dtype=torch.float64)


def _make_node(program: Program, name: str, sop: SOp) -> Node:
    """The node of a variable."""
    roles = program.names
    if isinstance(sop, Aggregate | SelectedShare):
        reach = Reach("causal" if program.causal else "every")
        arrows: list[str | Arrow] = []
        for term in sop.selector.terms:
            arrows += [roles[term.queries], Arrow(roles[term.keys], reach)]
        arrows += [Arrow(roles[sop.values], reach)] if isinstance(sop, Aggregate) else []
        conditions = tuple(
            tuple(
                tuple(float(term.holds(key, query)) for key in program.list_values(term.keys))
                for query in program.list_values(term.queries)
            )
            for term in sop.selector.terms
        )
        return Node(name, SelectedMean(conditions, isinstance(sop, Aggregate)), arrows, WORD)
    if isinstance(sop, LinearSequenceMap):
        return Node(name, WeightedSum((sop.a, sop.b)), [roles[sop.x], roles[sop.y]], WORD)
    if sop.kind == "tokens":
        return Node(name, OneHot(len(program.vocabulary), "token"), [TOKEN_ROLE], WORD)
    if sop.kind == "indices":
        return Node(name, OneHot(program.max_words, "word"), plates=WORD)
    sources = [sop.x, sop.y] if hasattr(sop, "y") else [sop.x]  # type: ignore[attr-defined]
    grids = tuple(program.list_values(source) if source.is_numeric else None for source in sources)
    return Node(name, StateFunction(_make_table(program, sop, sources), grids), [roles[s] for s in sources], WORD)


def _make_table(program: Program, sop: SOp, sources: list[SOp]) -> Any:
    """The table of a function of one or two variables, with a last row for a missing value on each axis."""
    axes = [(*program.list_values(source), None) for source in sources]

    def fill(values: tuple[Value, ...]) -> Any:
        if len(values) < len(axes):
            return tuple(fill((*values, value)) for value in axes[len(values)])
        if isinstance(sop, Fallback):
            result = values[1] if values[0] is None else values[0]
        else:
            result = sop.apply(*values)  # type: ignore[attr-defined]
        return tuple(encode_value(program, sop, result).tolist())

    return fill(())
