"""The reader of the BIF format (interchange format for Bayesian networks, Cozman 1998).

The text is divided into tokens, and the parser takes each token once, so that the time is linear in the length of the
text. Names may contain spaces, and symbols that do not end them: states are separated by commas, or by spaces without
any comma. Rows `(states) numbers`, `default numbers` and `table numbers` are read; properties are skipped, except the
property of files that `to_bif` wrote. The case of the names of variables is ignored.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.errors import BNetError, BudgetError, format_count, format_value

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
                raise BNetError(
                    f"variable {variable}", expected=f"{count} states, which are different", actual=states, hint=hint
                )
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
