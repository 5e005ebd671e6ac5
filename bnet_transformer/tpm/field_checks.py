"""Checks of the options of TPMs, written in the annotations of their fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from bnet_transformer._core.checks import check_choice, check_float, check_int, set_frozen
from bnet_transformer.errors import BNetError

Check = Callable[[str, Any], Any]  # of the name of an option and its value: the value to keep, or the error


def check_positive(subject: str, value: object) -> float:
    """A finite number above 0."""
    return check_float(subject, value, above=0)


def check_below_one(subject: str, value: object) -> float:
    """A probability below 1."""
    probability = check_float(subject, value)
    if not 0 <= probability < 1:
        raise BNetError(subject, expected="a probability below 1", actual=value)
    return probability


def min_int(minimum: int) -> Check:
    """A check for an integer of at least `minimum`."""
    return lambda subject, value: check_int(subject, value, minimum=minimum)


def choice(*options: object) -> Check:
    """A check for one of some values."""

    def check(subject: str, value: object) -> object:
        check_choice(subject, value, options)
        return value

    return check


def instance_of(cls: type, expected: str, allowed: str = "") -> Check:
    """A check for an instance of a class."""

    def check(subject: str, value: object) -> object:
        if not isinstance(value, cls):
            raise BNetError(subject, expected=expected, actual=value, allowed=allowed or None)
        return value

    return check


check_bool = choice(True, False)


def optional(check: Check) -> Check:
    """A check that accepts None as well."""
    return lambda subject, value: None if value is None else check(subject, value)


def named(subject: str, check: Check) -> Check:
    """A check whose errors name the option differently from its field."""
    return lambda _, value: check(subject, value)


@cache
def get_checks(cls: type) -> dict[str, Check]:
    """The checks of the fields of a class, from their annotations: `dim: Annotated[int, check_int]`."""
    checks: dict[str, Check] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("bnet_transformer."):  # a stranger's annotations may have no meaning out here
            for name, hint in inspect.get_annotations(base, eval_str=True).items():
                for check in getattr(hint, "__metadata__", ()):
                    checks[name] = check
    return checks


@dataclass(frozen=True)
class CheckedDataclass:
    """A frozen dataclass whose fields are replaced by the results of their checks."""

    def __post_init__(self) -> None:
        for name, check in get_checks(type(self)).items():  # type: ignore[arg-type]  # a class has a hash
            set_frozen(self, **{name: check(name, getattr(self, name))})
