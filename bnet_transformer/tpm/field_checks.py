"""Checks of the options of TPMs. The annotations of the fields contain them: `dim: Annotated[int, check_int]`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bnet_transformer._core.arrays import copy_to_tensor, to_tuples
from bnet_transformer._core.checks import check_choice, check_float, check_int, set_frozen
from bnet_transformer.errors import BNetError

Check = Callable[[str, Any], Any]  # takes the name of an option and its value; returns the checked value or raises


def check_positive(subject: str, value: object) -> float:
    """The value as a finite float greater than 0."""
    return check_float(subject, value, above=0)


def check_concentration(subject: str, value: object) -> float | tuple[Any, ...]:
    """The concentration of a Dirichlet prior: a positive number, or an array of positive numbers as nested tuples."""
    expected = "a positive number, one for each state, or an array of the table's shape"
    try:
        array = copy_to_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BNetError(subject, expected=expected, actual=value) from error
    is_real = not array.is_complex() and array.dtype != torch.bool and array.numel() > 0
    if not is_real or not bool(((array > 0) & (array < torch.inf)).all()):
        raise BNetError(subject, expected=expected, actual=value)
    return to_tuples(array.double().tolist())  # type: ignore[no-any-return]


def check_below_one(subject: str, value: object) -> float:
    """The value as a probability less than 1."""
    probability = check_float(subject, value)
    if not 0 <= probability < 1:
        raise BNetError(subject, expected="a probability from 0 to below 1", actual=value)
    return probability


def min_int(minimum: int) -> Check:
    """A check for an integer of at least `minimum`."""
    return lambda subject, value: check_int(subject, value, minimum=minimum)


def choice(*options: object) -> Check:
    """A check that the value is one of `options`."""

    def check(subject: str, value: object) -> object:
        check_choice(subject, value, options)
        return value

    return check


def instance_of(cls: type, expected: str, allowed: str = "") -> Check:
    """A check that the value is an instance of `cls`; `expected` and `allowed` are parts of its error."""

    def check(subject: str, value: object) -> object:
        if not isinstance(value, cls):
            raise BNetError(subject, expected=expected, actual=value, allowed=allowed or None)
        return value

    return check


check_bool = choice(True, False)


def optional(check: Check) -> Check:
    """A check that also accepts None."""
    return lambda subject, value: None if value is None else check(subject, value)


def named(subject: str, check: Check) -> Check:
    """A check with errors that call the option `subject` instead of the name of its field."""
    return lambda _, value: check(subject, value)


@cache
def get_checks(cls: type) -> dict[str, Check]:
    """The checks in the annotations of the fields of a class and its bases, by field."""
    checks: dict[str, Check] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("bnet_transformer."):  # users' annotations may not evaluate here
            for name, hint in inspect.get_annotations(base, eval_str=True).items():
                for check in getattr(hint, "__metadata__", ()):
                    checks[name] = check
    return checks


@dataclass(frozen=True)
class CheckedDataclass:
    """A frozen dataclass that checks its fields when it is created, and stores the results of the checks."""

    def __post_init__(self) -> None:
        for name, check in get_checks(type(self)).items():  # type: ignore[arg-type]  # a class has a hash
            set_frozen(self, **{name: check(name, getattr(self, name))})
