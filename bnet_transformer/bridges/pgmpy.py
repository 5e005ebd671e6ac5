"""Discrete Bayesian networks of pgmpy and in the BIF format: export of the discrete part of a net, and import.

The export is the discrete part of a sentence's bnet, given its words, as tables.

The variables are the discrete random nodes (selectors, atoms, word positions, categorical readouts). The parents of a
variable are the discrete random nodes on which its distribution depends, also through deterministic nodes. The
reference implementation computes its table, with one run for each joint state of the parents. Continuous readouts are
left out, unless they have evidence.

The import is a declaration without words, in which each variable is a node with a `Table`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer._core.checks import check_choice, check_int, check_names
from bnet_transformer._core.files import as_path, wrap_read_errors
from bnet_transformer._core.naming import find_role_fault
from bnet_transformer._core.tensors import preserve_python_rng, to_numpy
from bnet_transformer._core.tokens import get_raw
from bnet_transformer.declare import Declaration, Node
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, FileError, format_count, format_value
from bnet_transformer.reference import (
    ATOL,
    BUDGET,
    GroundModel,
    ReferenceRun,
    cast_to_float64,
    find_open_choices,
    parents,
)
from bnet_transformer.tpm import Table
from bnet_transformer.tpm.table import check_rows

if TYPE_CHECKING:
    import os

    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork


# --------------------------------------------------------------------------------------------------------------------
# The reader of the BIF format (interchange format for Bayesian networks, Cozman 1998).
#
# The text is divided into tokens, and the parser takes each token once, so that the time is linear in the length of the
# text. Names may contain spaces, and symbols that do not end them: states are separated by commas, or by spaces without
# any comma. Rows `(states) numbers`, `default numbers` and `table numbers` are read; properties are skipped, except the
# property of files that `to_bif` wrote. The case of the names of variables is ignored.


MAX_TABLE_ENTRIES = 10_000_000  # in all tables together
MAX_TABLE_DIMS = 64  # the limit of numpy, and so of pgmpy
ESCAPED_STATES = "property states escaped"  # in the block "network": labels by `format_state_name`
# The first two characters select the alternative, and none backtracks, so that the time is linear.
TOKEN = re.compile(
    r"""(?P<space>\s++|//[^\n]*+|/\*(?s:.*?)(?:\*/|\Z))|(?P<string>"[^"]*+"?+)"""
    r"""|(?P<symbol>[{}()\[\],;|])|(?P<word>[^\s{}()\[\],;|"/]++|/)"""
)
Token = tuple[str | None, str]  # the name of the group of `TOKEN`, and the text
Rows = Mapping[tuple[str, ...] | str, list[float]]  # by the states of the parents, "table" or "default"
Axes = Mapping[str, Mapping[str, int]]  # the positions of the states of each parent


@dataclass(frozen=True)
class ConditionalTable:
    """A variable with its table: `values[s, p1, p2, ...]` is the probability of state s given the parents' states."""

    name: str
    states: tuple[str, ...]
    parents: tuple[str, ...]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class _ProbabilityBlock:
    """A block `probability`: a variable, its parents, and the numbers of each row."""

    variable: str
    parents: tuple[str, ...]
    rows: Rows


def format_state_name(text: str) -> str:
    """Convert a label to a BIF identifier: letters and later digits stay, any other character becomes `_hex_`.

    >>> format_state_name("sat"), format_state_name("don't"), format_state_name("2nd")
    ('sat', 'don_27_t', '_32_nd')
    """
    matches = (re.fullmatch("[A-Za-z0-9]" if k else "[A-Za-z]", character) for k, character in enumerate(text))
    parts = [c if plain else f"_{ord(c):x}_" for c, plain in zip(text, matches, strict=True)]
    return "".join(parts) or "__"


def parse_state_name(name: str) -> str:
    """The label of a BIF identifier: the inverse of `format_state_name`.

    >>> parse_state_name("don_27_t"), parse_state_name("_32_nd")
    ("don't", '2nd')
    """
    return re.sub("_([0-9a-f]*)_", lambda match: chr(int(match[1], 16)) if match[1] else "", name)


def parse_bif(text: str) -> tuple[str, list[ConditionalTable]]:
    """Parse a BIF text.

    Returns:
        The name of the network, and the table of each variable, in the order of the blocks `variable`.

    Raises:
        BNetError: If the text is not in the BIF format, or a table is missing or incomplete.
        BudgetError: If rows `default` make more than `MAX_TABLE_ENTRIES` entries.
    """
    tokens, title, is_escaped = _TokenStream(text), "", False
    names, states, blocks = dict[str, str](), dict[str, tuple[str, ...]](), list[_ProbabilityBlock]()
    while (keyword := tokens.take()) is not None:
        if keyword == "network":
            title = tokens.take_text("{")
            is_escaped = ESCAPED_STATES in [*tokens.iter_statements()]
        elif keyword == "variable":
            name = tokens.take_text("{")
            if (same := names.setdefault(name.lower(), name)) != name or name in states:
                raise BNetError("variables", expected="names that differ not only in case", actual=f"{same}, {name}")
            states[name] = _parse_states(name, tokens)
        elif keyword == "probability":
            blocks.append(_parse_probability(tokens))
        elif keyword != ";":
            raise tokens.make_error("a block 'network', 'variable' or 'probability'", keyword)
    if not states:
        raise BNetError("variables", expected="at least one block 'variable'")
    tables = _build_tables(names, states, blocks)
    decode = parse_state_name if is_escaped else str
    return title, [ConditionalTable(name, tuple(map(decode, states[name])), *tables[name]) for name in states]


class _TokenStream:
    """The tokens of a text, each of which is taken once; a comment is a space, and strings have no quotes."""

    def __init__(self, text: str) -> None:
        self._tokens = self._iter_tokens(text)
        self._line = 1

    def _iter_tokens(self, text: str) -> Iterator[Token]:
        """Yield the tokens, and count lines."""
        for match in TOKEN.finditer(text):
            kind, token = match.lastgroup, match[0]
            if kind == "string":
                if len(token) < 2 or not token.endswith('"'):
                    raise self.make_error('" at the end of a string')
                yield kind, token[1:-1]
            elif token.startswith(("//", "/*")):
                if token.startswith("/*") and (len(token) < 4 or not token.endswith("*/")):
                    raise self.make_error("*/ at the end of a comment")
                yield kind, " "
            else:
                yield kind, token
            self._line += token.count("\n")

    def make_error(self, expected: str, actual: str | None = None) -> BNetError:
        """Create the error of the current line; without a token, the text has ended."""
        return BNetError(f"line {self._line}", expected=expected, actual=format_value(actual or "the end of the file"))

    def take(self) -> str | None:
        """Return the next token that is no space; None at the end."""
        return next((token for kind, token in self._tokens if kind != "space"), None)

    def take_symbol(self, symbol: str) -> None:
        """Take the next token, which must be a given symbol."""
        if (token := self.take()) != symbol:
            raise self.make_error(repr(symbol), token)

    def take_until(self, stops: str) -> tuple[list[Token], str]:
        """Return the tokens before the next symbol of `stops`, and this symbol."""
        taken = list[Token]()
        for kind, token in self._tokens:
            if kind == "symbol" and token in stops:
                return taken, token
            taken.append((kind, token))
        raise self.make_error(" or ".join(map(repr, stops)))

    def take_text(self, stop: str) -> str:
        """Return the text before a symbol, and take the symbol."""
        return _join(self.take_until(stop)[0])

    def iter_statements(self) -> Iterator[str]:
        """Yield the text of each statement of a block that has no other blocks."""
        stop = ";"
        while stop != "}":
            taken, stop = self.take_until(";}")
            yield _join(taken)


def _join(tokens: Sequence[Token]) -> str:
    """Join the text of tokens."""
    return "".join(token for _, token in tokens).strip()


def _split(tokens: Sequence[Token], *, by_comma: bool = False) -> tuple[str, ...]:
    """Split tokens into names: by commas, if there are any or `by_comma` is True, or else by spaces."""
    by_comma = by_comma or ("symbol", ",") in tokens
    names: list[list[Token]] = [[]]
    for token in tokens:
        if token == ("symbol", ",") if by_comma else token[0] == "space":
            names.append([])
        else:
            names[-1].append(token)
    return tuple(_join(name) for name in names if any(kind != "space" for kind, _ in name))


def _parse_states(variable: str, tokens: _TokenStream) -> tuple[str, ...]:
    """Parse a block `variable` after its brace: the states."""
    states: tuple[str, ...] | None = None
    while (token := tokens.take()) != "}":
        if token == "type":
            tokens.take()
            tokens.take_symbol("[")
            count = tokens.take_text("]")
            tokens.take_symbol("{")
            states = _split(tokens.take_until("}")[0])
            if count != str(len(states)) or len({*states}) < len(states):
                hint = "Correct the number in brackets or the list of states"
                expected = f"{count} states, which are different"
                raise BNetError(f"variable {variable}", expected=expected, actual=states, hint=hint)
        elif token != ";" and tokens.take_until(";}")[1] == "}":  # a property
            break
    if not states:
        raise BNetError(f"variable {variable}", expected="a type with states, such as: type discrete [ 2 ] { a, b };")
    return states


def _parse_probability(tokens: _TokenStream) -> _ProbabilityBlock:
    """Parse a block `probability`. Older files separate the parents by spaces only."""
    tokens.take_symbol("(")
    header, stop = tokens.take_until("|)")
    variables = _split(header)
    if stop == "|":
        variables = (_join(header), *_split(tokens.take_until(")")[0], by_comma=True))
    if not variables:
        raise tokens.make_error("the name of a variable", ")")
    tokens.take_symbol("{")
    rows = dict[tuple[str, ...] | str, list[float]]()
    while (token := tokens.take()) != "}":
        key: tuple[str, ...] | str | None = token
        if token == "(":
            key = _split(tokens.take_until(")")[0], by_comma=True)
        elif token not in ("table", "default", "property", ";"):
            raise tokens.make_error("a row: '(states) numbers', 'table numbers' or 'default numbers'", token)
        if key is None or key == ";":
            continue
        if key in rows:
            raise tokens.make_error("different rows", f"{_format_row(key)} twice")
        taken, stop = tokens.take_until(";}")
        if key != "property":
            rows[key] = [_parse_number(tokens, token) for kind, token in taken if kind != "space" and token != ","]
        if stop == "}":
            break
    return _ProbabilityBlock(variables[0], variables[1:], rows)


def _parse_number(tokens: _TokenStream, text: str) -> float:
    """Parse a decimal number; Python's `float` also accepts underscores and names such as nan."""
    if not text.strip("0123456789+-.eE"):
        with contextlib.suppress(ValueError):
            return float(text)
    raise tokens.make_error("numbers", text)


def _build_tables(
    names: Mapping[str, str], states: Mapping[str, tuple[str, ...]], blocks: Sequence[_ProbabilityBlock]
) -> dict[str, tuple[tuple[str, ...], NDArray[np.float64]]]:
    """Build the parents and the table of each variable; `names` are the variables by their names in lower case."""
    positions = {name: {state: k for k, state in enumerate(labels)} for name, labels in states.items()}
    tables, total = dict[str, tuple[tuple[str, ...], NDArray[np.float64]]](), 0
    for block in blocks:
        subject = f"probability of {block.variable}"
        for name in (block.variable, *block.parents):
            if name.lower() not in names:
                hint = f"Correct the name, or add a block 'variable {name}'"
                raise BNetError(subject, expected="variables of the file", actual=name, hint=hint)
        variable, *parents = (names[name.lower()] for name in (block.variable, *block.parents))
        if variable in tables or len({variable, *parents}) <= len(parents):
            expected = "one block for each variable, with different parents"
            raise BNetError(subject, expected=expected, actual=", ".join((variable, *parents)))
        count, axes = len(states[variable]), {name: positions[name] for name in parents}
        total += count * math.prod(map(len, axes.values()))
        _check_rows(subject, count, axes, block.rows)
        if len(axes) >= MAX_TABLE_DIMS or total > MAX_TABLE_ENTRIES:  # rows `default` can make tables of any size
            expected = f"tables of at most {MAX_TABLE_DIMS} dims, with at most {MAX_TABLE_ENTRIES:,} entries together"
            actual = f"{len(axes) + 1} dims; {format_count(total)} entries up to this table"
            raise BudgetError(subject, expected=expected, actual=actual)
        tables[variable] = tuple(parents), _build_values(count, axes, block.rows)
    missing = next((name for name in states if name not in tables), None)
    if missing is not None:
        raise BNetError(f"variable {missing}", expected="a block 'probability' of this variable; it is missing")
    return tables


def _check_rows(subject: str, count: int, axes: Axes, rows: Rows) -> None:
    """Raise an error unless the rows make a table of `count` states; this is checked before it is allocated."""
    joint_states = math.prod(map(len, axes.values()))
    if "table" in rows and len(rows) > 1:
        raise BNetError(subject, expected="a row 'table' or other rows", actual=", ".join(map(_format_row, rows)))
    for key, row in rows.items():
        if isinstance(key, tuple) and (
            len(key) != len(axes) or any(a not in b for a, b in zip(key, axes.values(), strict=True))
        ):
            expected = f"one state of each parent ({', '.join(axes)}) in each row"
            raise BNetError(subject, expected=expected, actual=_format_row(key))
        size = count * joint_states if key == "table" else count
        if len(row) != size:
            actual = f"{len(row)} numbers"
            raise BNetError(subject, expected=f"{size} numbers in the row {_format_row(key)}", actual=actual)
    if not {"table", "default"} & rows.keys() and len(rows) < joint_states:
        missing = next(key for key in itertools.product(*axes.values()) if key not in rows)
        raise BNetError(subject, expected=f"a row {_format_row(missing)}, or a row default; it is missing")


def _build_values(count: int, axes: Axes, rows: Rows) -> NDArray[np.float64]:
    """Build a table of `count` states, `[count, *states of the parents]`."""
    sizes = [len(positions) for positions in axes.values()]
    if "table" in rows:
        return np.array(rows["table"]).reshape(count, *sizes)
    values = np.empty((*sizes, count))
    values[...] = rows.get("default", np.nan)
    for key, row in rows.items():
        if isinstance(key, tuple):
            values[tuple(positions[name] for positions, name in zip(axes.values(), key, strict=True))] = row
    return np.moveaxis(values, -1, 0)


def _format_row(key: tuple[str, ...] | str) -> str:
    """Format the start of a row."""
    return key if isinstance(key, str) else f"({', '.join(key)})"


Roles = Mapping[str, str] | Callable[[str], str] | None  # from the names of variables to roles
OBSERVATION_STATES = ("seen", "unseen")
ROW_SUM_TOLERANCE = 0.01  # of pgmpy's `check_model`; published tables are often rounded
EXACT_SUM_TOLERANCE = 1e-9  # rows whose sum is nearer to 1 stay as they are


@dataclass(frozen=True)
class _TablePlan:
    """A table to compute; `evidence` is the evidence on the node, if the variable is an observation of it."""

    node: int
    name: str
    states: tuple[str, ...]
    parents: tuple[int, ...]
    evidence: Tensor | None = None


@preserve_python_rng()
def to_pgmpy(
    model: GroundModel,
    *,
    evidence: Mapping[int, Tensor] | None = None,
    limit: int = MAX_TABLE_ENTRIES,
    runs: int = BUDGET,
) -> DiscreteBayesianNetwork:
    """Convert the discrete part to a pgmpy network.

    States have the names of their labels; states without labels are "0", "1", .... A node that `do` sets to a
    state is a root with a delta distribution. Query it with `VariableElimination`, not with `CausalInference`, whose
    `do` is wrong in pgmpy 1.1.2. Evidence on a continuous or deterministic node becomes a variable with the states
    `seen` and `unseen`. Its table is the likelihood divided by its maximum: this is virtual evidence (Pearl 1988),
    which does not change posteriors. `network.graph["evidence"]` contains all evidence, in the form that `query` takes.

    Args:
        model: The ground model of the sentence.
        evidence: The evidence by node.
        limit: The maximum number of entries of all tables.
        runs: The maximum number of runs, one for each joint state of the parents of a variable.

    Returns:
        The pgmpy network.

    Raises:
        BudgetError: If the tables have more than `limit` entries, or need more than `runs` runs. Both are counted
            before any table is computed.
    """
    tables, states = model_to_tables(model, evidence=evidence, limit=limit, runs=runs)
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

    names = {table.name: list(table.states) for table in tables}
    network = DiscreteBayesianNetwork()
    network.add_nodes_from(names)
    network.add_edges_from((parent, table.name) for table in tables for parent in table.parents)
    for table in tables:
        network.add_cpds(
            TabularCPD(
                table.name,
                len(table.states),
                table.values.reshape(len(table.states), -1),
                evidence=list(table.parents),
                evidence_card=list(table.values.shape[1:]),
                state_names={name: names[name] for name in (table.name, *table.parents)},
            )
        )
    network.graph["evidence"] = states
    return network


def to_bif(
    model: GroundModel,
    *,
    evidence: Mapping[int, Tensor] | None = None,
    limit: int = MAX_TABLE_ENTRIES,
    runs: int = BUDGET,
) -> str:
    """Convert the discrete part to the BIF format, with exact probabilities; see `to_pgmpy`.

    States are named as by `format_state_name`, because a BIF identifier has no special characters; `read_bif` restores
    the labels. (pgmpy's BIFReader does not distinguish names of variables that differ only in case.)

    Args:
        model: The ground model of the sentence.
        evidence: The evidence by node.
        limit: The maximum number of entries of all tables.
        runs: The maximum number of runs, one for each joint state of the parents of a variable.

    Returns:
        The BIF text.
    """
    tables, _ = model_to_tables(model, evidence=evidence, limit=limit, runs=runs)
    names = {table.name: _to_identifiers(table.states) for table in tables}
    is_escaped = any(names[table.name] != table.states for table in tables)
    title = format_state_name(model.network.declaration.name or "bnet")
    lines = [f"network {title} {{", *([f"  {ESCAPED_STATES} ;"] if is_escaped else []), "}"]
    for table in tables:
        states = ", ".join(names[table.name])
        lines += [f"variable {table.name} {{", f"  type discrete [ {len(table.states)} ] {{ {states} }};", "}"]
    for table in tables:
        bar = f" | {', '.join(table.parents)}" if table.parents else ""
        lines.append(f"probability ( {table.name}{bar} ) {{")
        for index in np.ndindex(*table.values.shape[1:]):
            condition = ", ".join(names[parent][state] for parent, state in zip(table.parents, index, strict=True))
            row = ", ".join(map(repr, table.values[(slice(None), *index)].tolist()))
            lines.append(f"  ({condition}) {row};" if condition else f"  table {row};")
        lines.append("}")
    return "\n".join(lines) + "\n"


def _to_identifiers(states: tuple[str, ...]) -> tuple[str, ...]:
    """The states of a variable as BIF identifiers; the numbers "0", "1", ... stay."""
    return states if states == tuple(map(str, range(len(states)))) else tuple(map(format_state_name, states))


@preserve_python_rng()
def pgmpy_to_declaration(
    network: DiscreteBayesianNetwork, *, roles: Roles = None, learnable: bool = False
) -> Declaration:
    """Convert a network of pgmpy to a declaration without words: a node with a `Table` for each variable.

    The names of states become labels; the numbers 0, 1, ... are states without labels.

    Args:
        network: The network, with a `TabularCPD` for each variable.
        roles: The role of each variable, by name, or a function from names to roles. None (default): the name itself.
        learnable: Whether training changes the tables. Default False.

    Returns:
        The declaration.

    Raises:
        BNetError: If a variable has no table, its table is no distribution, or its name is no valid role.
    """
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

    _check_import_options(roles, learnable)
    if not isinstance(network, DiscreteBayesianNetwork):
        raise BNetError("model", expected="a DiscreteBayesianNetwork of pgmpy", actual=network)
    tables: dict[Hashable, TabularCPD] = {variable: network.get_cpds(variable) for variable in network.nodes}
    for variable, table in tables.items():
        if not isinstance(table, TabularCPD):
            actual = "no table" if table is None else type(table).__name__
            raise BNetError(f"variable {variable}", expected="a TabularCPD", actual=actual)
        if set(table.variables[1:]) != set(network.get_parents(variable)):
            expected = f"a table with the parents {sorted(map(str, network.get_parents(variable)))}"
            raise BNetError(f"variable {variable}", expected=expected, actual=sorted(map(str, table.variables[1:])))
    role_of, nodes = _find_roles([*tables], roles), []
    for variable, table in tables.items():
        labels = _to_labels(table.state_names[variable])
        tpm = _build_tpm(variable, _read_probabilities(variable, tables), labels, learnable)
        nodes.append(Node(role_of[variable], tpm, [role_of[name] for name in table.variables[1:]]))
    return Declaration(nodes=nodes, name=str(network.name or "net"))


def bif_to_declaration(path: str | os.PathLike[str], *, roles: Roles = None, learnable: bool = False) -> Declaration:
    """Read a file in the BIF format as a declaration; see `pgmpy_to_declaration`.

    Args:
        path: The file.
        roles: The role of each variable, by name, or a function from names to roles. None (default): the name itself.
        learnable: Whether training changes the tables. Default False.

    Returns:
        The declaration.

    Raises:
        FileError: If the file is missing or not in the BIF format.
        BNetError: If the network cannot be converted.
    """
    _check_import_options(roles, learnable)
    file = as_path(path)
    with wrap_read_errors(file, "a file in the BIF format"):
        try:
            title, tables = parse_bif(file.read_text(encoding="utf-8-sig"))
        except BNetError as error:
            raise FileError(f"{file}, {error.subject}", **error.parts) from error
    role_of, states = _find_roles([table.name for table in tables], roles), {t.name: t.states for t in tables}
    nodes = []
    for table in tables:
        values = _normalize_rows(table.name, np.moveaxis(table.values, 0, -1), [states[name] for name in table.parents])
        tpm = _build_tpm(table.name, values, table.states, learnable)
        nodes.append(Node(role_of[table.name], tpm, [role_of[name] for name in table.parents]))
    return Declaration(nodes=nodes, name=title or "net")


def _read_probabilities(variable: Hashable, tables: Mapping[Hashable, TabularCPD]) -> NDArray[np.float64]:
    """The table of a variable, `[*states of the parents, states]`, with all states in the order of their variable."""
    table = tables[variable]
    values = np.asarray(table.values, dtype=np.float64)
    states = [list(tables[name].state_names[name]) for name in table.variables]
    for axis, (name, names) in enumerate(zip(table.variables, states, strict=True)):
        given = list(table.state_names[name])
        if len(given) != len(names) or set(given) != set(names):
            raise BNetError(f"variable {variable}", expected=f"the states {names} of its parent {name}", actual=given)
        values = values.take([given.index(state) for state in names], axis)
    return _normalize_rows(variable, np.moveaxis(values, 0, -1), states[1:])


def _normalize_rows(
    variable: Hashable, values: NDArray[np.float64], states: Sequence[Sequence[int | str]]
) -> NDArray[np.float64]:
    """The table `[*states of the parents, states]` with rows that sum to 1, if their sums are rounded."""
    sums = values.sum(-1, keepdims=True)
    is_rounded = (np.abs(sums - 1) > EXACT_SUM_TOLERANCE) & (np.abs(sums - 1) <= ROW_SUM_TOLERANCE)
    values = values / np.where(is_rounded, sums, 1)
    check_rows(f"variable {variable}", values, states)
    return values


def _build_tpm(
    variable: Hashable, values: NDArray[np.float64], labels: tuple[str, ...] | None, learnable: bool
) -> Table:
    """The `Table` of a variable; errors name the variable."""
    try:
        return Table(values, labels, learnable=learnable)
    except BNetError as error:
        raise BNetError(f"variable {variable}, {error.subject}", **error.parts) from error


def _check_import_options(roles: object, learnable: object) -> None:
    """Raise an error for invalid options of an import, before the network is read."""
    if roles is not None and not isinstance(roles, Mapping) and not callable(roles):
        raise BNetError("roles", expected="a mapping or a function from names of variables to roles", actual=roles)
    check_choice("learnable", learnable, (True, False))


def _find_roles(variables: Sequence[Hashable], roles: Roles) -> dict[Hashable, str]:
    """The role of each variable; raises an error that proposes valid roles for invalid names."""
    names = [str(variable) for variable in variables]
    if isinstance(roles, Mapping):
        check_names("variable in roles", roles, names)
        converted = [roles.get(name, name) for name in names]
    else:
        converted = names if roles is None else [roles(name) for name in names]
    invalid = {name: fault for name, role in zip(names, converted, strict=True) if (fault := find_role_fault(role))}
    if invalid:
        proposed = {name: _propose_role(name) for name in invalid}
        shown = ", ".join(f"{name!r}: {role!r}" for name, role in [*proposed.items()][:8])
        more = f" and for {len(invalid) - 8} more variables" if len(invalid) > 8 else ""
        expected = "names that are valid roles: identifiers that do not end in _ and digits"
        hint = f"Pass roles=, a mapping or a function from names to roles, such as {{{shown}}}{more}"
        raise BNetError("names of variables", expected=expected, actual=next(iter(invalid.values())), hint=hint)
    if len(set(converted)) < len(converted):
        duplicate = next(role for role in converted if converted.count(role) > 1)
        raise BNetError("roles", expected="different roles", actual=f"{duplicate!r} twice")
    return dict(zip(variables, converted, strict=True))


def _propose_role(name: str) -> str:
    """A valid role that is similar to a name.

    >>> _propose_role("C_NI_12_00"), _propose_role("2nd-day"), _propose_role("class")
    ('C_NI1200', 'n2nd_day', 'class_node')
    """
    parts = re.sub("[^A-Za-z0-9]+", "_", name).strip("_").split("_")
    end = max((k for k, part in enumerate(parts) if not part.isdigit()), default=0)  # the parts after it are numbers
    role = "_".join(parts[: end + 1]) + "".join(parts[end + 1 :])
    role = role if role[:1].isalpha() else f"n{role}"
    return role if find_role_fault(role) is None else f"{role}_node"


def _to_labels(states: Sequence[Hashable]) -> tuple[str, ...] | None:
    """The labels of the states of a variable; None for the numbers 0, 1, ...."""
    is_numbered = all(isinstance(state, int | np.integer) and not isinstance(state, bool) for state in states)
    return None if is_numbered and list(states) == [*range(len(states))] else tuple(map(str, states))


def model_to_tables(
    model: GroundModel,
    *,
    evidence: Mapping[int, Tensor] | None = None,
    limit: int = MAX_TABLE_ENTRIES,
    runs: int = BUDGET,
) -> tuple[list[ConditionalTable], dict[str, str]]:
    """Compute the tables of the discrete part, and the evidence as the state of each variable that has evidence."""
    # In float64, parameters with declared values have all their digits: a probability of 0.99 is not 0.99000005.
    model, observed = model.to_float64(), cast_to_float64(evidence or {})
    set_states = {n: v for n, v in model.do.items() if _is_state(model, n, v)}
    open_model = replace(model, do={n: v for n, v in model.do.items() if n not in set_states})
    known = {n: v for n, v in observed.items() if model.spec(n).tpm.kind == "continuous"}
    plans = _plan_tables(open_model, set_states, observed, known)
    _check_table_sizes(open_model, plans, check_int("limit", limit), check_int("runs", runs))
    names = {plan.node: plan.name for plan in plans if plan.evidence is None}
    tables = {}
    with torch.no_grad():
        for parents, group in _group_by_parents(plans).items():
            sizes = [open_model.count_states(parent) for parent in parents]
            results = reference.enumerate_runs(open_model, list(parents), known, runs)
            logs = [[_compute_log_row(run, plan, set_states.get(plan.node)) for plan in group] for run in results]
            for plan, rows in zip(group, zip(*logs, strict=True), strict=True):
                table = np.moveaxis(to_numpy(torch.stack(rows).reshape(*sizes, -1)), -1, 0)
                value = plan.evidence
                values = np.exp(table) if value is None else _build_likelihood_table(table, plan.name, value)
                tables[plan.name] = ConditionalTable(plan.name, plan.states, tuple(names[p] for p in parents), values)
    states = {plan.name: OBSERVATION_STATES[0] for plan in plans if plan.evidence is not None}
    by_node = {plan.node: plan for plan in plans if plan.evidence is None}
    states |= {by_node[n].name: by_node[n].states[int(v)] for n, v in observed.items() if _is_state(model, n, v)}
    return [tables[plan.name] for plan in plans], states


def _plan_tables(
    model: GroundModel, set_states: Mapping[int, Tensor], evidence: Mapping[int, Tensor], fixed: Mapping[int, Tensor]
) -> list[_TablePlan]:
    """Plan every variable with its parents: the discrete random nodes, then observations of other nodes.

    `fixed` is the evidence on continuous nodes: their descendants do not depend on their ancestors through them.
    """
    ground = model.ground
    groups = [m.group for m in model.network.specs if m.tpm.kind == "discrete"]
    nodes = [n for group in groups for n in ground.select_nodes(group).tolist() if n not in model.do]
    if not nodes:
        kinds = sorted({type(m.tpm).__name__ for m in model.network.specs if m.tpm.is_random})
        expected = "at least one discrete random node"
        hint = f"All random nodes are continuous ({', '.join(kinds)})" if kinds else "This net has no random nodes"
        raise BNetError("discrete part", expected=expected, hint=hint)

    def find_discrete_parents(node: int) -> tuple[int, ...]:
        """The discrete random nodes on which the distribution of a node depends: its parents first, in their order."""
        slots = {parent.index: -k for k, parent in enumerate(reversed(model.spec(node).parents))}
        choices = find_open_choices(model, parents(model, node), fixed)
        return tuple(sorted(choices, key=lambda choice: (slots.get(ground.group_of(choice).index, 1), choice)))

    plans = [
        _TablePlan(n, ground.name(n), _get_state_names(model, n), () if n in set_states else find_discrete_parents(n))
        for n in nodes
    ]
    variables = set(nodes)
    for node, value in evidence.items():
        if node in variables and value.is_floating_point():
            name = f"{ground.name(node)}_{OBSERVATION_STATES[0]}"
            plans.append(_TablePlan(node, name, OBSERVATION_STATES, (node,), value))
        elif node not in variables:
            plans.append(_TablePlan(node, ground.name(node), OBSERVATION_STATES, find_discrete_parents(node), value))
    return plans


def _check_table_sizes(model: GroundModel, plans: Sequence[_TablePlan], limit: int, budget: int) -> None:
    """Raise an error for tables that are too large, before any is computed."""
    hint = "Set some of its parents with do=, use a shorter sentence or fewer heads, or raise limit="
    total = 0
    for plan in plans:
        dims = 1 + len(plan.parents)
        entries = len(plan.states) * math.prod(model.count_states(parent) for parent in plan.parents)
        if dims > MAX_TABLE_DIMS or entries > limit:
            expected = f"a table of at most {MAX_TABLE_DIMS} dims and {limit:,} entries"
            actual = f"{dims} dims and {format_count(entries)} entries"
            raise BudgetError(plan.name, expected=expected, actual=actual, hint=hint)
        total += entries
    if total > limit:
        actual = f"{format_count(total)} in {len(plans)} tables"
        expected = f"at most {limit:,} entries in all tables"
        raise BudgetError("discrete part", expected=expected, actual=actual, hint="Raise limit=")
    count = sum(math.prod(model.count_states(p) for p in parents) for parents in _group_by_parents(plans))
    if count > budget:
        expected = f"at most {budget:,} runs, one for each joint state of a variable's parents"
        raise BudgetError("discrete part", expected=expected, actual=f"{format_count(count)} runs", hint="Raise runs=")


def _group_by_parents(plans: Sequence[_TablePlan]) -> dict[tuple[int, ...], list[_TablePlan]]:
    """Group variables by their parents: variables with the same parents share the runs."""
    groups: dict[tuple[int, ...], list[_TablePlan]] = {}
    for plan in plans:
        groups.setdefault(plan.parents, []).append(plan)
    return groups


def _compute_log_row(run: ReferenceRun, plan: _TablePlan, set_state: Tensor | None) -> Tensor:
    """Compute the log probability of each state, or of the evidence."""
    if plan.evidence is not None:
        if run.model.spec(plan.node).tpm.kind == "continuous":
            return run.log_prob(plan.node).reshape(1)
        same = torch.allclose(run.value(plan.node).double(), plan.evidence.double(), rtol=0, atol=ATOL)
        return torch.tensor([0.0 if same else -math.inf], dtype=torch.float64)
    states = torch.arange(len(plan.states))
    if set_state is not None:
        return torch.where(states == set_state, 0.0, -math.inf).double()
    row = run.distribution(plan.node).log_prob(states).double()
    if bool(row.isnan().any()):
        expected = "a distribution over its states"
        raise EvidenceError(plan.name, expected=expected, actual="probabilities that contain NaN")
    return row


def _build_likelihood_table(log_likelihood: NDArray[np.float64], name: str, evidence: Tensor) -> NDArray[np.float64]:
    """Compute the table of `seen` and `unseen`: the likelihood divided by its maximum, which has the same ratios."""
    top = log_likelihood.max()
    if not top > -math.inf:
        actual = f"{evidence.tolist()}, which has probability zero"
        raise EvidenceError(name, expected="evidence that is possible in some state of the net", actual=actual)
    likelihood = np.exp(log_likelihood - top)
    return np.concatenate([likelihood, 1 - likelihood])


def _get_state_names(model: GroundModel, node: int) -> tuple[str, ...]:
    """Return the names of a variable's states: its labels, the words of the vocabulary for a readout, or numbers."""
    spec, count = model.spec(node), model.count_states(node)
    labels = getattr(spec.tpm, "labels", None)
    words = model.network.vocabularies.get(spec.group.stack, ())
    is_last = spec.group.step == model.network.graph.slices.get(spec.group.stack)
    if labels is None and is_last and len(words) == count:
        labels = words
    names = tuple(map(str, range(count))) if labels is None else tuple(map(get_raw, labels))
    if len(set(names)) != count:
        raise BNetError(f"labels of {spec.group.name}", expected=f"{count} different labels", actual=labels)
    return names


def _is_state(model: GroundModel, node: int, value: Tensor) -> bool:
    """Return True for a state of a discrete random node; the matrix of an atom is not a state."""
    return model.spec(node).tpm.kind == "discrete" and not value.is_floating_point()
