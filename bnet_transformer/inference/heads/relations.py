"""What a word that is read is to its reader: relations in order, of which the first that holds counts.

`other` is what none of them holds of, so of each word that is read exactly one relation holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.axes import Reach
from bnet_transformer.errors import BNetError, unknown

Codes = NDArray[np.int64]
Table = NDArray[np.bool_]

OTHER = "other"
ONE_STACK, TOKENS, SEPARATORS = "one stack", "tokens", "separators"


@dataclass(frozen=True)
class Pair:
    """The words that read and the words that are read, of one sentence: their tokens, and which are separators."""

    tokens: tuple[str, ...]
    read: tuple[str, ...]
    separators: Table
    one_stack: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.tokens), len(self.read)


def _distance(pair: Pair) -> Codes:
    """`j - i`."""
    n, m = pair.shape
    found: Codes = np.arange(m)[None, :] - np.arange(n)[:, None]
    return found


def _separators(pair: Pair) -> Table:
    return np.broadcast_to(pair.separators, pair.shape)


def _same_token(pair: Pair) -> Table:
    """Another word with the same token; in another stack, any word with it."""
    alike: Table = np.array(pair.tokens)[:, None] == np.array(pair.read)[None, :]
    return alike & (_distance(pair) != 0) if pair.one_stack else alike


# What each relation needs to have a meaning, and where it holds.
RELATIONS: Mapping[str, tuple[str, Callable[[Pair], Table]]] = {
    "same": (ONE_STACK, lambda pair: _distance(pair) == 0),
    "previous": (ONE_STACK, lambda pair: _distance(pair) == -1),
    "next": (ONE_STACK, lambda pair: _distance(pair) == 1),
    "first": ("", lambda pair: Reach("first").matrix(*pair.shape)),
    "last": ("", lambda pair: Reach("last").matrix(*pair.shape)),
    "separator": (SEPARATORS, _separators),
    "same token": (TOKENS, _same_token),
    "earlier": (ONE_STACK, lambda pair: _distance(pair) < 0),
    "later": (ONE_STACK, lambda pair: _distance(pair) > 0),
}
DEFAULT = ("same", "previous", "next", "first", "separator", "same token")


@dataclass(frozen=True)
class Relations:
    """Relations in order, `other` last; `left_out` says of the default ones that have no meaning here why."""

    tables: Mapping[str, Callable[[Pair], Table]]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return *self.tables, OTHER

    def codes(self, pair: Pair, where: str) -> Codes:
        """The number of the relation of each reader i and each word j that is read, `[i, j]`."""
        held = [_checked(table(pair), pair, f"relation {name!r}, {where}") for name, table in self.tables.items()]
        everywhere = np.ones(pair.shape, dtype=bool)
        found: Codes = np.argmax(np.stack([*held, everywhere]), axis=0)
        return found


def relations_of(asked: object, missing: Mapping[str, str]) -> Relations:
    """The relations that are asked for: none for the default ones, a list of names, or a mapping from names to what
    says where they hold; `missing` says why there is no meaning to relations that need something."""
    if asked is None:
        left = {name: missing[RELATIONS[name][0]] for name in DEFAULT if RELATIONS[name][0] in missing}
        return Relations({name: RELATIONS[name][1] for name in DEFAULT if name not in left}, left)
    if isinstance(asked, str) or not isinstance(asked, Sequence | Mapping):
        wanted = "a list of relations, or a mapping from names to what says where they hold"
        raise BNetError("relations", expected=wanted, got=asked, allowed=", ".join(RELATIONS))
    named = asked if isinstance(asked, Mapping) else {name: name for name in asked if name != OTHER}
    tables = {name: _table_of(name, told, missing) for name, told in named.items()}
    if not tables:
        raise BNetError(
            "relations", expected=f"at least one beside {OTHER!r}", got="none", allowed=", ".join(RELATIONS)
        )
    return Relations(tables)


def _table_of(name: object, told: object, missing: Mapping[str, str]) -> Callable[[Pair], Table]:
    """Where one relation holds: as one of ours, a Reach, or a function of the tokens says."""
    if not isinstance(name, str) or not name or name == OTHER:
        wanted = f"a name for each relation; {OTHER!r} is what no relation holds of"
        raise BNetError("relations", expected=wanted, got=name)
    if isinstance(told, str):
        if told not in RELATIONS:
            raise unknown("relation", told, RELATIONS)
        needs, table = RELATIONS[told]
        if needs in missing:
            raise BNetError(f"relation {told!r}", expected=f"a reading that has {needs}", got=missing[needs])
        return table
    if isinstance(told, Reach):
        return lambda pair: told.matrix(*pair.shape)
    if not callable(told):
        wanted = "a function of the tokens, a Reach, or the name of a relation"
        raise BNetError(f"relation {name!r}", expected=wanted, got=told, allowed=", ".join(RELATIONS))
    return lambda pair: told(pair.tokens) if pair.one_stack else told(pair.tokens, pair.read)


def _checked(told: object, pair: Pair, where: str) -> Table:
    """A table of booleans for all pairs of words, or the error that says which one is none."""
    try:
        table = np.asarray(told)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BNetError(where, expected=f"a table of booleans of shape {pair.shape}", got=told) from error
    if table.dtype != bool or table.shape != pair.shape:
        got = f"{table.dtype} of shape {table.shape}"
        raise BNetError(where, expected=f"a table of booleans of shape {pair.shape}", got=got)
    return table
