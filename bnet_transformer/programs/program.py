"""A program with its inputs: its variables, its evaluation in Python, and its bnet of variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, final

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_int, check_mapping, check_names
from bnet_transformer._core.naming import Reach, find_role_fault
from bnet_transformer.bnet import BNet
from bnet_transformer.declare import Arrow, Declaration, Node, Stack
from bnet_transformer.errors import BNetError
from bnet_transformer.programs.language import (
    TOLERANCE,
    Aggregate,
    Column,
    Fallback,
    Indices,
    LinearSequenceMap,
    Map,
    SelectedShare,
    Selector,
    SequenceMap,
    SOp,
    Term,
    Tokens,
    Value,
)
from bnet_transformer.tpm import TPM, EvalContext, Given, Parameter, Parent, Product
from bnet_transformer.tpm.base import choice

if TYPE_CHECKING:
    import networkx as nx


BOS = "BOS"
MAX_VALUES = 2000  # values of one variable
TOKEN_ROLE = "token"  # the role of the words in the bnet of a program


class Program:
    """A program: its variables, the values that they can have, and its evaluation, which defines what is right.

    Args:
        output: The s-op that the program computes.
        vocabulary: The tokens: different strings or integers. A string is the list of its characters.
        max_words: The maximum number of words of a sentence, without BOS.
        causal: Whether word i selects only words up to i.

    Raises:
        BNetError: A name occurs twice or is no identifier, or an argument is invalid.

    >>> from bnet_transformer import programs
    >>> before = programs.select(programs.indices, programs.indices, lambda j, i: j == i - 1)
    >>> program = Program(programs.aggregate(before, programs.tokens, name="previous"), "ab", 3)
    >>> program.run("aba"), list(program.variables)
    ((None, 'a', 'b'), ['indices', 'tokens', 'previous'])
    """

    def __init__(self, output: SOp, vocabulary: Sequence[Value], max_words: int, *, causal: bool = False) -> None:
        if not isinstance(output, SOp):
            raise BNetError("program", expected="an s-op, such as aggregate(...)", actual=output)
        self.output = output
        self.vocabulary = _check_vocabulary(vocabulary)
        self.max_words = check_int("max_words", max_words)
        if not isinstance(causal, bool):
            raise BNetError("causal", expected="True or False", actual=causal)
        self.causal = causal
        self.variables: dict[str, SOp] = _name_variables(output)
        self._values: dict[SOp, tuple[Value, ...]] = {}

    @cached_property
    def names(self) -> dict[SOp, str]:
        """The name of each variable."""
        return {sop: name for name, sop in self.variables.items()}

    # evaluation

    def parse(self, sentence: object) -> tuple[Value, ...]:
        """The tokens of a sentence.

        Args:
            sentence: A list of tokens; or a text, which is split at spaces, or into characters if it has no space and
                all tokens are single characters.

        Returns:
            The tokens.

        Raises:
            BNetError: A token is unknown, or the sentence has no word or more than `max_words`.
        """
        if isinstance(sentence, str):
            known = {str(token): token for token in self.vocabulary}
            is_split = " " not in sentence and all(len(token) == 1 for token in known)
            parts = list(sentence) if is_split else sentence.split()
            sentence = [known.get(part, part) for part in parts]
        if not isinstance(sentence, Sequence):
            raise BNetError("sentence", expected="a list of tokens, or a text", actual=sentence)
        if not 1 <= len(sentence) <= self.max_words:
            raise BNetError("sentence", expected=f"1 to {self.max_words} words", actual=f"{len(sentence)} words")
        for token in sentence:
            if token not in self.vocabulary:
                allowed = ", ".join(map(repr, self.vocabulary))
                raise BNetError("sentence", expected="tokens of the vocabulary", actual=token, allowed=allowed)
        return tuple(sentence)

    def evaluate(self, sentence: object, do: Mapping[str, Value] | None = None) -> dict[str, tuple[Value, ...]]:
        """The values of all variables at each word of a sentence.

        Args:
            sentence: The sentence.
            do: Values of variables that are set, by the name of the variable and the index of its word, as in
                `{"previous_2": "a"}`. None (default) for no intervention.

        Returns:
            For each variable a value for each word. A missing value is None.

        Raises:
            BNetError: The sentence does not fit, or an aggregate has several categorical values.

        >>> from bnet_transformer import programs
        >>> double = programs.map(lambda t: 2 * t, programs.tokens, name="double")
        >>> Program(double, [1, 2], max_words=3).evaluate([1, 2], do={"tokens_1": 1})
        {'tokens': (1, 1), 'double': (2, 2)}
        """
        words = self.parse(sentence)
        settings = check_mapping("do", do)
        check_names("node", settings, [f"{name}_{i}" for name in self.variables for i in range(len(words))])
        columns: dict[SOp, Column] = {}
        for name, sop in self.variables.items():
            column = sop.compute(words, columns, causal=self.causal)
            columns[sop] = [settings.get(f"{name}_{i}", value) for i, value in enumerate(column)]
        return {name: tuple(columns[sop]) for name, sop in self.variables.items()}

    def run(self, sentence: object, do: Mapping[str, Value] | None = None) -> tuple[Value, ...]:
        """The output of the program at each word of a sentence.

        Args:
            sentence: The sentence.
            do: Values of variables that are set, as in `evaluate`. None (default) for no intervention.

        Returns:
            A value for each word. A missing value is None.
        """
        return self.evaluate(sentence, do)[self.names[self.output]]

    @cached_property
    def net(self) -> BNet:
        """The program as a bnet, in float64: a node for each variable and word, without BOS.

        The value of a node is a one-hot vector over `list_values`, or a number; a missing value is zero.

        >>> from bnet_transformer import programs
        >>> before = programs.select(programs.indices, programs.indices, lambda j, i: j == i - 1)
        >>> program = Program(programs.aggregate(before, programs.tokens, name="previous"), "ab", 3)
        >>> s = program.net.sentence(["a", "b", "a"])
        >>> s["previous_1"], s.do(tokens_0=[0.0, 1.0])["previous_1"]
        (tensor([1., 0.], dtype=torch.float64), tensor([0., 1.], dtype=torch.float64))
        """
        nodes = [Node(TOKEN_ROLE, Given(states=len(self.vocabulary)), plates=WORD)]
        nodes += [_make_node(self, name, sop) for name, sop in self.variables.items()]
        stack = Stack([], nodes, vocabulary=tuple(map(str, self.vocabulary)))
        return BNet(Declaration([stack], name=f"program {self.names[self.output]}")).to(torch.float64)

    # the graph

    def graph(self, sentence: object = None) -> nx.DiGraph:
        """The program as a Bayesian network: its variables, or a node for each variable and word of a sentence.

        Args:
            sentence: A sentence. None (default) for one node for each variable.

        Returns:
            A networkx graph. Nodes have the attributes `kind` and `is_numeric`; for a sentence also `value`, and an
            aggregate has arrows from the keys of all words that it can select, and from the values of those it selects.

        >>> from bnet_transformer import programs
        >>> before = programs.select(programs.indices, programs.indices, lambda j, i: j == i - 1)
        >>> program = Program(programs.aggregate(before, programs.tokens, name="previous"), "ab", 3)
        >>> sorted(program.graph("ab").predecessors("previous_1"))
        ['indices_0', 'indices_1', 'tokens_0']
        """
        import networkx as nx

        graph = nx.DiGraph()
        if sentence is None:
            for name, sop in self.variables.items():
                graph.add_node(name, kind=sop.kind, is_numeric=sop.is_numeric)
                graph.add_edges_from((self.names[parent], name) for parent in sop.parents)
            return graph
        values = self.evaluate(sentence)
        columns: dict[SOp, Column] = {self.variables[name]: column for name, column in values.items()}
        for name, sop in self.variables.items():
            for i, value in enumerate(values[name]):
                graph.add_node(f"{name}_{i}", kind=sop.kind, is_numeric=sop.is_numeric, value=value)
            graph.add_edges_from(self._list_arrows(name, sop, columns))
        return graph

    def _list_arrows(self, name: str, sop: SOp, columns: dict[SOp, Column]) -> list[tuple[str, str]]:
        """The arrows into the nodes of a variable in a sentence."""
        count = len(next(iter(columns.values())))
        if not isinstance(sop, Aggregate | SelectedShare):
            return [(f"{self.names[parent]}_{i}", f"{name}_{i}") for parent in sop.parents for i in range(count)]
        arrows = []
        for i, selected in enumerate(sop.selector.select(columns, causal=self.causal)):
            visible = range(i + 1 if self.causal else count)
            sources = [(term.queries, i) for term in sop.selector.terms]
            sources += [(term.keys, j) for term in sop.selector.terms for j in visible]
            sources += [(sop.values, j) for j in selected] if isinstance(sop, Aggregate) else []
            arrows += [(f"{self.names[parent]}_{j}", f"{name}_{i}") for parent, j in sources]
        return arrows

    # the values that a variable can have

    def list_values(self, sop: SOp) -> tuple[Value, ...]:
        """The values that a variable can have, without None, in increasing order; a superset of those that occur.

        Args:
            sop: The variable.

        Returns:
            The values.

        Raises:
            BNetError: There are too many.
        """
        if sop not in self._values:
            values = self._infer_values(sop)
            if len(values) > MAX_VALUES:
                hint = "Map it to fewer values before it is mapped or aggregated again"
                subject = f"{sop.kind} {self.names[sop]}"
                raise BNetError(subject, expected=f"at most {MAX_VALUES} values", actual=len(values), hint=hint)
            self._values[sop] = values
        return self._values[sop]

    def _infer_values(self, sop: SOp) -> tuple[Value, ...]:
        """The values of a variable from those of its parents."""
        match sop:
            case Tokens():
                return self.vocabulary
            case Indices():
                return tuple(range(self.max_words))
            case Map(x=x):
                return self._sort(sop, [sop.apply(value) for value in self.list_values(x)])
            case SequenceMap(x=x, y=y):
                pairs = [(v, w) for v in self.list_values(x) for w in self.list_values(y) if x is not y or v == w]
                return self._sort(sop, [sop.apply(*pair) for pair in pairs])
            case Fallback(x=x, y=y):
                return self._sort(sop, [*self.list_values(x), *self.list_values(y)])
            case LinearSequenceMap(x=x, y=y, a=a, b=b):
                return self._sort(sop, [a * v + b * w for v in self.list_values(x) for w in self.list_values(y)])
            case SelectedShare():
                return self._sort(sop, [1 / (1 + count) for count in range(self.max_words + 1)])
            case Aggregate(values=values) if values.is_numeric:
                return self._sort(sop, self._list_means(sop, self.list_values(values)))
            case Aggregate(values=values):
                return self.list_values(values)
        raise BNetError("program", expected="an s-op of this package", actual=sop)

    def _sort(self, sop: SOp, values: Sequence[Value]) -> tuple[Value, ...]:
        """Different values in increasing order, without None; numbers that agree up to rounding are one value."""
        if sop.is_numeric:
            has_zero = isinstance(sop, Map | SequenceMap) and any(map(self.can_be_missing, sop.parents))
            ordered = sorted([*values, 0.0] if has_zero else values)
            return tuple(v for k, v in enumerate(ordered) if k == 0 or v - ordered[k - 1] > TOLERANCE)
        states = dict.fromkeys(value for value in values if value is not None)
        return tuple(sorted(states, key=lambda value: (str(type(value)), value)))

    def _list_means(self, sop: Aggregate, values: Sequence[float]) -> list[float]:
        """The means of up to `max_words` values, and 0 for no selected word."""
        sums, means = {0.0}, {0.0}
        for count in range(1, self.max_words + 1):
            sums = {round(total + value, 12) for total in sums for value in values}
            means |= {total / count for total in sums}
            if len(means) > 20 * MAX_VALUES:
                hint = "Map the values to fewer numbers"
                expected = "numbers with a small number of different means"
                subject, actual = f"aggregate {self.names[sop]}", f"{len(values)} values"
                raise BNetError(subject, expected=expected, actual=actual, hint=hint)
        return [*means]

    def can_be_missing(self, sop: SOp) -> bool:
        """Whether a categorical variable can be None at a word.

        Args:
            sop: The variable.

        Returns:
            False if it is numeric or always has a value.
        """
        if sop.is_numeric:
            return False
        match sop:
            case Fallback(x=x, y=y):
                return self.can_be_missing(x) and self.can_be_missing(y)
            case Aggregate(selector=selector, values=values):
                return self.can_be_empty(selector) or self.can_be_missing(values)
            case Map(x=x):
                return self.can_be_missing(x) or any(sop.apply(value) is None for value in self.list_values(x))
            case SequenceMap(x=x, y=y):
                if any(map(self.can_be_missing, (x, y))):
                    return True
                return any(sop.apply(v, w) is None for v in self.list_values(x) for w in self.list_values(y))
        return False

    def can_be_empty(self, selector: Selector) -> bool:
        """Whether a selector can select no word, as far as the values of its s-ops show.

        Args:
            selector: The selector.

        Returns:
            False if every word selects itself, or every word selects the first one, or every word.
        """
        return not any(
            all(term_selects(self, term) for term in selector.terms)
            for term_selects in (_selects_itself, _selects_first)
        ) or any(self.can_be_missing(sop) for sop in selector.parents)

    def __repr__(self) -> str:
        names = ", ".join(f"{name} ({sop.kind})" for name, sop in self.variables.items())
        return f"<Program: {names}>"


def _selects_itself(program: Program, term: Term) -> bool:
    """Whether each word satisfies the condition with respect to the same word."""
    keys, queries = term.keys, term.queries
    pairs = [(v, w) for v in program.list_values(keys) for w in program.list_values(queries)]
    return all(term.holds(v, w) for v, w in pairs if keys is not queries or v == w)


def _selects_first(program: Program, term: Term) -> bool:
    """Whether the first word satisfies the condition for each word."""
    keys, queries = term.keys, term.queries
    firsts = (0,) if isinstance(keys, Indices) else program.list_values(keys)
    return all(term.holds(v, w) for v in firsts for w in program.list_values(queries))


def _name_variables(output: SOp) -> dict[str, SOp]:
    """The variables of a program by name, parents first."""
    order: dict[SOp, None] = {}

    def visit(sop: SOp) -> None:
        if sop not in order:
            for parent in sop.parents:
                visit(parent)
            order[sop] = None

    visit(output)
    variables: dict[str, SOp] = {}
    given = {sop.name for sop in order}
    for sop in order:
        name = sop.name
        if name is None:
            numbers = (f"{sop.kind}{k}" for k in range(1, len(order) + 1))
            name = next(number for number in numbers if number not in given and number not in variables)
        fault = f"{TOKEN_ROLE!r}, the role of the words" if name == TOKEN_ROLE else find_role_fault(name)
        if fault:
            raise BNetError("name", expected="a name that can be the role of a node", actual=fault)
        if name in variables:
            raise BNetError("name", expected="variables with different names", actual=f"two with the name {name}")
        variables[name] = sop
    return variables


def _check_vocabulary(vocabulary: object) -> tuple[Value, ...]:
    """The tokens as a tuple of different strings or integers with different texts."""
    words = tuple(vocabulary) if isinstance(vocabulary, Sequence) else ()
    is_valid = bool(words) and all(isinstance(word, str | int) and not isinstance(word, bool) for word in words)
    if not is_valid or len({str(word) for word in words}) < len(words):
        raise BNetError("vocabulary", expected="a list of different strings or integers", actual=vocabulary)
    if BOS in words:
        raise BNetError("vocabulary", expected=f"tokens other than {BOS!r}, which the compiler adds", actual=words)
    return words


# --------------------------------------------------------------------------------------------------------------------
# A program as a bnet of its variables: a node for each variable and word, with TPMs that are functions of the parents.
#
# The value of a node is a one-hot vector, or one number. A missing value is the zero vector. The net has no stream and
# no weights: it is the program, to intervene on and to compare with the compiled net.


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
            value = torch.tensordot(weights, value, 1) if k == 0 else torch.einsum("...s,...so->...o", weights, value)
        return value


def _state_weights(x: Tensor, grid: tuple[float, ...] | None) -> Tensor:
    """The indicator of the state of a variable, `[..., state + 1]`, of which the last one is missing."""
    if grid is None:
        return torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1)
    nearest = (x - torch.tensor(grid, dtype=x.dtype, device=x.device)).abs().argmin(-1)
    return torch.nn.functional.one_hot(nearest, len(grid) + 1).to(x.dtype)


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
        return {
            f"condition{k}": Parameter(tuple(torch.tensor(table).shape), fill=table, learnable=False)
            for k, table in enumerate(self.conditions)
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
