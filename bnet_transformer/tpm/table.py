"""`Table`: the distribution of a discrete node as numbers: from an array, a data frame or a function of its parents."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.checks import check_int, check_sequence, set_frozen
from bnet_transformer._core.tensors import copy_to_tensor, to_numpy, to_tuples
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm.base import (
    TPM,
    EvalContext,
    Kind,
    Parameter,
    Parent,
    Shape,
    check_bool,
    check_concentration,
    check_discrete,
    optional,
)
from bnet_transformer.tpm.random import (
    MAX_NUMBERS_IN_EQUATIONS,
    check_labels,
    define_initial,
    define_prior,
    define_rows,
    format_row,
    lookup_logits,
    state_range_latex,
)
from bnet_transformer.tpm.symbols import Symbols, add_scripts

if TYPE_CHECKING:
    import pandas as pd

JointState = tuple[Any, ...]  # a state of each parent, as a number or a label
SUM_TOLERANCE = 1e-6


@final
@dataclass(frozen=True)
class Table(TPM):
    """A conditional probability table with given numbers: `P(y | d) = table[d, y]`; discrete.

    Parents: a discrete node for each axis of the table except the last, in the order of the axes. Without parents, the
    table has one axis and the node is a root. The value is an integer state from 0 to n - 1. `Table.from_function` and
    `Table.from_dataframe` compute the table from a Python function and from a pandas data frame.

    The node is a function of its parents if the table contains only zeros and ones. It still is a discrete node, and
    not one of kind "deterministic": it can have evidence, which updates its parents by Bayes' rule. An example is the
    node "either" (tuberculosis or cancer) of the chest clinic (Lauritzen and Spiegelhalter 1988).

    A parent at the word before (reach `"before"`) or after (`"after"`) makes the nodes of the words a Markov chain;
    `initial` then is the table of the word that has no such parent.

    The parameters are the logarithms of the tables, `logits` and `initial`; the logit of a probability of 0 is -inf.

    Args:
        probabilities: The table, `[*states of the parents, n]`; each row along the last axis sums to 1.
        labels: The names of the states, `n` different strings, which evidence can use instead of numbers. Default
            None.
        initial: With a parent at the word before or after, the table for words without it, `[*states of the other
            parents, n]`. Default None.
        learnable: Whether training changes the table; it starts at these numbers, and zeros stay zero. Default False.
        prior: The concentration of the Dirichlet prior on each row of a learnable table: a number for all states, `n`
            numbers, or an array of the table's shape. None (default) for no prior.

    >>> wet = Table([[[1.0, 0.0], [0.1, 0.9]], [[0.1, 0.9], [0.01, 0.99]]], labels=("no", "yes"))
    >>> wet.states, wet.parameters(Parent("sprinkler", states=2), Parent("rain", states=2))["logits"].shape
    (2, (2, 2, 2))
    >>> Table([[0.5, 0.5], [0.5, 0.6]])
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.BNetError: probabilities, row (1): expected numbers that sum to 1; got [0.5, 0.6], sum 1.1
    """

    probabilities: Any  # an array; stored as nested tuples of floats, which are hashable
    labels: Sequence[str] | None = None
    initial: Any = None
    learnable: Annotated[bool, check_bool] = False
    prior: Annotated[Any, optional(check_concentration)] = None
    kind: ClassVar[Kind] = "discrete"
    is_lookup: ClassVar[bool] = True
    slots: ClassVar[tuple[str, ...]] = ("*c",)
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        table = _to_array("probabilities", self.probabilities)
        check_rows("probabilities", table)
        set_frozen(self, probabilities=to_tuples(table.tolist()))
        if self.initial is not None:
            initial = _to_array("initial", self.initial)
            if initial.shape[-1] != table.shape[-1]:
                expected = f"{table.shape[-1]} states on the last axis, as the table"
                raise BNetError("initial", expected=expected, actual=f"shape {initial.shape}")
            check_rows("initial", initial)
            set_frozen(self, initial=to_tuples(initial.tolist()))
        if self.labels is not None:
            set_frozen(self, labels=check_labels(self.labels, table.shape[-1]))
        if self.prior is not None and not self.learnable:
            raise BNetError("prior", expected="None, because the table is fixed", hint="Pass learnable=True")

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        parents: Sequence[int | Sequence[str]],
        *,
        states: int | None = None,
        labels: Sequence[str] | None = None,
        initial: object = None,
        learnable: bool = False,
        prior: Any = None,
    ) -> Self:
        """The table of a Python function of the parents' states.

        The function is called once for each joint state of the parents. It returns the state of the node, as a number
        or a label, if the node is a function of its parents; or it returns the probabilities of all states. The table
        is stored, not the function.

        Args:
            function: The function. Its arguments are the states of the parents, in their order.
            parents: For each parent, the number of its states, or their labels. The argument of the function is a
                number from 0, or a label.
            states: The number of states. None (default) if `labels` are given or the function returns probabilities.
            labels: The names of the states, as in `Table`. Default None.
            initial: The table for words without an optional parent, as in `Table`. Default None.
            learnable: Whether training changes the table, as in `Table`. Default False.
            prior: The concentration of the prior, as in `Table`. Default None.

        Returns:
            The table, `[*states of the parents, n]`.

        Raises:
            BNetError: The function returns no state and no distribution; the error names the joint state of the
                parents.

        >>> Table.from_function(lambda a, b: a or b, (2, 2), states=2).probabilities
        (((1.0, 0.0), (0.0, 1.0)), ((0.0, 1.0), (0.0, 1.0)))
        >>> Table.from_function(lambda day: (0.9, 0.1) if day == "dry" else (0.4, 0.6), [("dry", "wet")]).probabilities
        ((0.9, 0.1), (0.4, 0.6))
        """
        if not callable(function):
            raise BNetError("function", expected="a function of the states of the parents", actual=function)
        names = _check_parents(parents)
        labels = labels if labels is None else check_sequence("labels", labels, str)
        n = len(labels) if labels is not None else None if states is None else check_int("states", states)
        rows: dict[JointState, NDArray[np.float64]] = {}
        for joint_state in itertools.product(*names):
            row = _result_to_row(joint_state, function(*joint_state), n, labels)
            n, rows[joint_state] = len(row), row
        return cls(_stack_rows(rows, names), labels, initial, learnable, prior)

    @classmethod
    def from_dataframe(
        cls,
        frame: pd.DataFrame,
        parents: Sequence[int | Sequence[str]] = (),
        *,
        labels: Sequence[str] | None = None,
        initial: object = None,
        learnable: bool = False,
        prior: Any = None,
    ) -> Self:
        """The table in a pandas data frame: a row for each joint state of the parents, a column for each state.

        This is the layout of `pd.crosstab([data.a, data.b], data.y, normalize="index")`: the levels of the index are
        the parents, in their order. If the states of the parents are in columns, pass `frame.set_index(["a", "b"])`.
        The order of the rows, and with `labels` of the columns, is arbitrary. Without parents, the frame has one row.

        Args:
            frame: The data frame of probabilities.
            parents: For each parent, the number of its states, or their labels in the order of its states. The index
                contains numbers from 0, or these labels. Default: none.
            labels: The names of the states, in their order. None (default): the names of the columns are the labels; or
                there are no labels, if the names are the numbers 0, 1, ....
            initial: The table for words without an optional parent, as in `Table`. Default None.
            learnable: Whether training changes the table, as in `Table`. Default False.
            prior: The concentration of the prior, as in `Table`. Default None.

        Returns:
            The table, `[*states of the parents, n]`.

        Raises:
            BNetError: A row is missing, occurs twice or does not sum to 1; the error names the joint state of the
                parents.

        >>> import pandas as pd
        >>> frame = pd.DataFrame({"rain": ["yes", "no"], "dry": [0.2, 0.9], "wet": [0.8, 0.1]}).set_index("rain")
        >>> Table.from_dataframe(frame, [("no", "yes")]).probabilities
        ((0.9, 0.1), (0.2, 0.8))
        """
        if not _is_dataframe(frame):
            raise BNetError("frame", expected="a pandas DataFrame", actual=frame)
        names, columns = _check_parents(parents), list(frame.columns)
        if labels is not None or set(columns) != set(range(len(columns))):
            labels = check_labels(columns if labels is None else labels, len(columns))
        order: list[Any] = list(range(len(columns))) if labels is None else list(labels)
        if set(order) != set(columns):
            raise BNetError("columns of the frame", expected=f"the states {order}", actual=columns)
        try:
            values = frame.to_numpy(dtype=float)[:, [columns.index(state) for state in order]]
        except (TypeError, ValueError) as error:
            raise BNetError("frame", expected="a column of probabilities for each state", actual=f"{error}") from error
        keys = [key if isinstance(key, tuple) else (key,) for key in frame.index] if names else [()] * len(frame)
        joint_states = set(itertools.product(*names))
        rows: dict[JointState, NDArray[np.float64]] = {}
        for key, row in zip(keys, values, strict=True):
            if key not in joint_states:
                expected = f"a state of each of the {len(names)} parents"
                raise BNetError(f"row {_format_joint_state(key)}", expected=expected, allowed=f"{names}")
            if key in rows:
                raise BNetError(f"row {_format_joint_state(key)}", expected="one row of the frame", actual="two rows")
            rows[key] = row
        for key in itertools.product(*names):
            if key not in rows:
                raise BNetError(f"row {_format_joint_state(key)}", expected="one row of the frame", actual="no row")
        return cls(_stack_rows(rows, names), labels, initial, learnable, prior)

    @property
    def states(self) -> int | None:
        row = self.probabilities
        while isinstance(row[0], tuple):
            row = row[0]
        return len(row)

    def shape(self, *parents: Parent) -> Shape:
        _check_axes("probabilities", self.probabilities, parents)
        required = [parent for parent in parents if not parent.is_optional]
        if self.initial is not None:
            if len(required) == len(parents):
                raise BNetError("initial", expected="None, because every word has all parents")
            _check_axes("initial", self.initial, required)
        elif len(required) < len(parents):
            names = " or ".join(parent.name for parent in parents if parent.is_optional)
            shape = (*map(check_discrete, required), self.states)
            raise BNetError("initial", expected=f"a table of shape {shape}, for words without {names}")
        return ()

    def parameters(self, *parents: Parent) -> dict[str, Parameter]:
        tables = {"logits": self.probabilities} | ({} if self.initial is None else {"initial": self.initial})
        parameters = {}
        for name, table in tables.items():
            with np.errstate(divide="ignore"):  # log 0 = -inf
                logits = np.log(table)
            parameters[name] = Parameter(logits.shape, fill=to_tuples(logits.tolist()), learnable=self.learnable)
        return parameters

    def logits(self, context: EvalContext, *parents: Tensor) -> Tensor:
        return lookup_logits(context, parents)

    def latex(self, s: Symbols) -> str:
        s.require_form("word")
        n = self.states or 0
        s.define(state_range_latex(s.state, n))
        states = [str(s.of(slot)) for slot in s.slot_indices()]
        table = np.asarray(self.probabilities)
        if not self.learnable and not states and n <= MAX_NUMBERS_IN_EQUATIONS:
            return add_scripts(format_row(table), [s.state])
        if not self.learnable and self.initial is None and states and bool(((table == 0) | (table == 1)).all()):
            function = s.parameter("f")
            if table.size // n <= MAX_NUMBERS_IN_EQUATIONS:
                indices = np.ndindex(table.shape[:-1])
                s.define(r",\; ".join(f"{function}{_format_joint_state(k)} = {table[k].argmax()}" for k in indices))
            return s.indicator(f"{s.state} = {function}({', '.join(states)})")
        row = s.parameter(r"\theta", *states) if states else s.parameter(r"\pi", role=False)
        define_initial(s, row)
        define_prior(s, row, self.prior, n)
        if not self.learnable:
            define_rows(s, s.parameter(r"\theta") if states else row, table)
            if self.initial is not None:
                define_rows(s, s.parameter(r"\pi"), np.asarray(self.initial))
        return str(row.with_sub(s.state))

    def priors(self) -> Mapping[str, Any]:
        return {} if self.prior is None else {"logits": self.prior}


def _to_array(subject: str, values: object) -> NDArray[np.float64]:
    """A table as an array of floats with at least one axis."""
    if _is_dataframe(values):
        raise BNetError(subject, expected="an array", actual="a DataFrame", hint="Use Table.from_dataframe")
    if callable(values):
        raise BNetError(subject, expected="an array", actual="a function", hint="Use Table.from_function")
    try:
        tensor = copy_to_tensor(values)
        array = to_numpy(tensor.double() if not tensor.is_complex() else tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        expected = "an array of probabilities [*states of the parents, states]"
        raise BNetError(subject, expected=expected, actual=values) from error
    if array.ndim == 0 or not array.size or np.iscomplexobj(array):
        raise BNetError(subject, expected="an array of probabilities with at least one state", actual=values)
    return array


def _is_dataframe(value: object) -> bool:
    """True for a pandas data frame; does not import pandas."""
    return hasattr(value, "columns") and hasattr(value, "index") and hasattr(value, "to_numpy")


def check_rows(subject: str, table: NDArray[np.float64], names: Sequence[Sequence[int | str]] | None = None) -> None:
    """Raise an error for a row that is no distribution; it names the joint state of the parents."""
    is_valid = (table >= 0).all(-1) & (np.abs(table.sum(-1) - 1) <= SUM_TOLERANCE)  # False for NaN
    if is_valid.all():
        return
    index = tuple(np.argwhere(~is_valid)[0].tolist())
    states = index if names is None else tuple(names[k][state] for k, state in enumerate(index))
    row = table[index]
    location = f"{subject}, row {_format_joint_state(states)}" if states else subject
    actual = f"{row.tolist()}, sum {row.sum():.9g}" if len(row) <= 6 else f"a row with the sum {row.sum():.9g}"
    if not (row >= 0).all():
        raise BNetError(location, expected="numbers from 0 to 1", actual=row.tolist())
    raise BNetError(location, expected="numbers that sum to 1", actual=actual)


def _check_axes(subject: str, table: tuple[Any, ...], parents: Sequence[Parent]) -> None:
    """Raise an error unless the axes of a table, except the last, have the sizes of the parents."""
    sizes = np.shape(table)[:-1]
    if len(sizes) != len(parents):
        actual = ", ".join(parent.name for parent in parents) or "no parents"
        expected = f"{len(sizes)} discrete parents, one for each axis of the table except the last"
        raise BNetError(subject, expected=expected, actual=actual)
    for k, (size, parent) in enumerate(zip(sizes, parents, strict=True)):
        if check_discrete(parent) != size:
            expected = f"{size} states, the size of axis {k} of {subject}"
            raise BNetError(parent.name, expected=expected, actual=parent.form)


def _check_parents(parents: object) -> list[tuple[int | str, ...]]:
    """The states of each parent: numbers from 0, or labels."""
    if isinstance(parents, str | int) or not isinstance(parents, Sequence):
        raise BNetError("parents", expected="for each parent the number of its states or their labels", actual=parents)
    names: list[tuple[int | str, ...]] = []
    for k, parent in enumerate(parents):
        if isinstance(parent, Sequence) and not isinstance(parent, str):
            names.append(check_labels(parent, len(parent)))
        else:
            names.append(tuple(range(check_int(f"states of parent {k}", parent))))
    return names


def _result_to_row(
    joint_state: JointState, result: object, n: int | None, labels: Sequence[str] | None
) -> NDArray[np.float64]:
    """The row of the table of what a function returned: a state, a label, or probabilities."""
    subject = f"function at {_format_joint_state(joint_state)}"
    allowed = None if labels is None else ", ".join(labels)
    state: object = result
    if isinstance(result, str):
        state = labels.index(result) if labels is not None and result in labels else None
    elif isinstance(result, bool | np.bool_):
        state = int(result)
    elif not isinstance(result, Sequence) and not getattr(result, "ndim", 0):
        try:
            state = operator.index(result)  # type: ignore[arg-type]
        except TypeError:
            state = None
    else:
        row = _to_array(subject, result)
        if row.ndim != 1 or n not in (None, len(row)):
            raise BNetError(subject, expected=f"{'the' if n is None else n} probabilities of the states", actual=result)
        return row
    if n is None and state is not None:
        expected = "the number of states, because the function returns a state"
        raise BNetError("states", expected=expected, hint="Pass states= or labels=")
    if n is None or not isinstance(state, int) or not 0 <= state < n:
        numbers = "" if n is None else f" from 0 to {n - 1}"
        expected = f"a state{numbers}, a label, or the probabilities of all states"
        raise BNetError(subject, expected=expected, actual=result, allowed=allowed)
    row = np.zeros(n)
    row[state] = 1
    return row


def _stack_rows(
    rows: Mapping[JointState, NDArray[np.float64]], names: Sequence[Sequence[int | str]]
) -> NDArray[np.float64]:
    """The table of rows by the joint state of the parents, `[*states of the parents, n]`; checks that they sum to 1."""
    table = np.stack([rows[joint_state] for joint_state in itertools.product(*names)])
    table = table.reshape(*map(len, names), -1)
    check_rows("probabilities", table, names)
    return table


def _format_joint_state(states: Sequence[object]) -> str:
    """The joint state of the parents in an error."""
    return f"({', '.join(map(str, states))})"
