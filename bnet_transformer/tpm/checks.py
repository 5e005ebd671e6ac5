"""The checks of the options of TPMs and of their parts: a table of them for each class, one a field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from bnet_transformer.errors import BNetError, number, one_of, put

Check = Callable[[str, Any], Any]  # of the name of an option and its value: the value to keep, or the error
Checks = Mapping[str, Check]


def positive(what: str, value: object) -> float:
    """A finite number above 0."""
    return number(what, value, above=0)


def below_one(what: str, value: object) -> float:
    """A probability that is not 1."""
    found = number(what, value)
    if not 0 <= found < 1:
        raise BNetError(what, expected="a probability below 1", got=value)
    return found


def choice(*options: object) -> Check:
    """One of some values."""

    def check(what: str, value: object) -> object:
        one_of(what, value, options)
        return value

    return check


flag = choice(True, False)


def optional(check: Check) -> Check:
    """What a check says, or None."""
    return lambda what, value: None if value is None else check(what, value)


def called(what: str, check: Check) -> Check:
    """A check that calls the option by another name than its field's."""
    return lambda _, value: check(what, value)


@dataclass(frozen=True)
class Checked:
    """A frozen dataclass whose fields are what the check of each makes of them, in the order of `field_checks`."""

    field_checks: ClassVar[Checks] = {}

    def __post_init__(self) -> None:
        for name, check in self.field_checks.items():
            put(self, **{name: check(name, getattr(self, name))})
