"""The data of a net without words: for each node a column of values, one for each sentence."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from torch import Tensor

from bnet_transformer.data.examples import ExampleReader
from bnet_transformer.data.task import Task
from bnet_transformer.data.words import to_integers, to_reals
from bnet_transformer.errors import BNetError, unknown
from bnet_transformer.network import Member, Network
from bnet_transformer.tpm.arrays import in_numpy

COLUMNS = (
    "what is observed of the nodes of a net without words: a list of mappings, one for each sentence, a "
    "DataFrame, or a mapping from node to an array [sentence, ...]"
)


def read_columns(network: Network, task: Task, data: object, what: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read the columns of a net without words.

    Args:
        network: the net.
        task: its random nodes, as readouts.
        data: a mapping from node to a column, a DataFrame, or a list of mappings. The only readout of a net needs no
            name: its column may stand alone.
        what: the name of the data in messages.

    Returns:
        The values of input nodes, and what is observed of random ones, both `[sentence, *plates, *shape]` by name.

    Raises:
        BNetError: where a column is missing, of another length or of another shape.
        UnknownNameError: for a node that the net does not have.
    """
    by_node = _by_node(task, data, what)
    given: dict[str, Tensor] = {}
    observed: dict[str, Tensor] = {}
    reader = ExampleReader(task)
    random = {member.family.name: member for member in task.readouts}
    inputs = {m.family.name: m for m in network.members if m.tpm.kind == "input"}
    for name, column in by_node.items():
        if name not in random and name not in inputs:
            raise unknown(f"node of {what}", name, [*random, *inputs])
        member = random.get(name) or inputs[name]
        if member.scope == "corpus":
            got = "one that is drawn once for the corpus"
            raise BNetError(f"{what}, {name}", expected="nodes that are drawn for each sentence", got=got)
        if name in inputs:
            read = to_integers if member.tpm.reads_by_index else to_reals
            given[name] = read(f"{what}, {name}", _of_series(member, column))
        else:
            observed[name] = reader.observed(member, _with_missing(network, member, _of_series(member, column)))
    needed = [m.family.name for m in network.members if m.tpm.kind == "input" and m.tpm.default is None]
    missing = [name for name in needed if name not in by_node]
    if missing:
        raise BNetError(what, expected="a column for every given node", got=f"none for {', '.join(missing)}")
    counts = {name: len(value) if value.dim() else 0 for name, value in {**given, **observed}.items()}
    if len(set(counts.values())) > 1 or not all(counts.values()):
        got = ", ".join(f"{n} of {name}" for name, n in counts.items())
        raise BNetError(what, expected="columns of one length, at least one sentence", got=got)
    for name, value in given.items():
        _check_shape(network, inputs[name], value, f"{what}, {name}")
    for name, value in observed.items():
        reader.check(random[name], value, {}, lead=(len(value),))
    return given, observed


def _by_node(task: Task, data: object, what: str) -> dict[str, object]:
    """A column for each node."""
    if isinstance(data, Mapping):
        by_node = dict(data)
    elif is_frame(data):
        by_node = {name: data[name] for name in data.columns}
    elif isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
        names = dict.fromkeys(name for row in data for name in row)
        by_node = {name: [row.get(name) for row in data] for name in names}
    else:
        leaves = [m.family.name for m in task.readouts if not task.network.graph.out_of[m.family.index]]
        alone = isinstance(data, Tensor | np.ndarray | Sequence) and not isinstance(data, str) and len(data)
        if len(leaves) != 1 or not alone:
            raise BNetError(what, expected=COLUMNS, got=data)
        by_node = {leaves[0]: data}
    if not by_node or not all(isinstance(name, str) for name in by_node):
        raise BNetError(what, expected=COLUMNS, got=data)
    return by_node


def is_frame(data: Any) -> TypeGuard[Any]:
    """True for a DataFrame of pandas, which is not imported."""
    return all(hasattr(data, name) for name in ("columns", "isna", "to_numpy"))


def _of_series(member: Member, column: Any) -> Any:
    """A Series of pandas as a list, None where it has no value; a number of a node of width 1 is its vector."""
    if not hasattr(column, "isna"):
        return column
    values = [None if absent else value for value, absent in zip(column, column.isna(), strict=True)]
    if member.shape != (1,) or member.family.plates:
        return values
    return [[value] if isinstance(value, numbers.Real) else value for value in values]


def _with_missing(network: Network, member: Member, column: object) -> object:
    """A column in which None says that a state, and NaN that a real number was not observed."""
    if member.tpm.kind == "discrete":
        return _states(column)
    if not isinstance(column, list | tuple):
        return column
    sizes = [network.graph.sizes[plate] for plate in member.family.plates]
    return [np.full((*sizes, *member.shape), np.nan) if value is None else value for value in column]


def _states(column: Any) -> Any:
    """States with None for NaN, 0 and 1 for booleans, and whole numbers for those in a floating type."""
    if isinstance(column, Tensor | np.ndarray):
        array = in_numpy(column) if isinstance(column, Tensor) else column
        return _states(array.tolist()) if array.dtype.kind in "bfO" else column
    if isinstance(column, list | tuple):
        return [_states(value) for value in column]
    if isinstance(column, bool | np.bool_):
        return int(column)
    if isinstance(column, float | np.floating):
        return None if np.isnan(column) else int(column) if float(column).is_integer() else column
    return column


def _check_shape(network: Network, member: Member, value: Tensor, what: str) -> None:
    """Refuse the values of a given node of another form than `[sentence, *plates, *shape]`."""
    sizes = tuple(network.graph.sizes[plate] for plate in member.family.plates)
    shape = (len(value), *sizes, *(() if member.tpm.reads_by_index else member.shape))
    if tuple(value.shape) != shape:
        raise BNetError(what, expected=f"values of shape {shape}", got=f"shape {tuple(value.shape)}")
