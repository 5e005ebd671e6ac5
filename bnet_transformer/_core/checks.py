"""Checks of arguments: each returns the value in the required type, or raises an error with what was expected."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from bnet_transformer.errors import BNetError, unknown_name_error

FLOAT_PATTERN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def check_names(subject: str, given: Iterable[str], names: Collection[str]) -> None:
    """Raise an error for a name that is not in `names`; it lists near matches."""
    for name in given:
        if name not in names:
            raise unknown_name_error(subject, name, names)


def check_int(subject: str, value: object, *, minimum: int = 1) -> int:
    """The value as an int of at least `minimum`; booleans and floats are invalid."""
    is_bool = str(getattr(value, "dtype", "")).endswith("bool") or isinstance(value, bool)
    try:
        number = None if is_bool or getattr(value, "ndim", 0) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        number = None
    if number is None or number < minimum or number.bit_length() > 1024:  # larger ones are not floats
        bound = "" if number is None or number < minimum else ", below 2^1024"
        raise BNetError(subject, expected=f"an integer of at least {minimum}{bound}", actual=value)
    return number


def is_integer(text: str) -> bool:
    """Whether a text is a nonnegative integer in ASCII digits, of no more digits than `int` accepts (4300 by default).

    `int` also accepts digits of other scripts, signs, spaces and underscores, which can be words of a vocabulary.
    """
    return text.isascii() and text.isdigit() and len(text) <= 1000


def parse_float(text: str) -> float | None:
    """The finite number of a text in ASCII, such as `-1.5e3`; None for other texts, such as `nan` and `1_0`."""
    number = float(text) if FLOAT_PATTERN.fullmatch(text) else math.nan
    return number if math.isfinite(number) else None


def resolve_index(subject: str, value: object, count: int) -> int:
    """The index of one of `count` items; as in Python, a negative number counts from the end."""
    number = check_int(subject, value, minimum=-count)
    if number >= count:
        raise BNetError(
            subject, expected=f"an integer from 0 to {count - 1}, or from -1 for the last one", actual=number
        )
    return number % count


def check_seed(value: object) -> int:
    """The value as a seed that is valid for every generator: 0 to 2^63 - 1."""
    seed = check_int("seed", value, minimum=0)
    if seed >= 2**63:
        raise BNetError("seed", expected="an integer below 2^63", actual=value)
    return seed


def check_sequence(
    subject: str, value: object, item_type: type, convert: Callable[[Any], Any] | None = None
) -> tuple[Any, ...]:
    """The value as a tuple of `item_type`; `convert` converts each item before the check."""
    items: list[Any] = []
    try:
        for item in None if isinstance(value, str | bytes | Mapping) else value:  # type: ignore[attr-defined]
            items.append(item if convert is None else convert(item))
            if not isinstance(items[-1], item_type):  # stop here: the iterable may be infinite
                raise TypeError
    except TypeError as error:
        raise BNetError(subject, expected=f"a list of {item_type.__name__}", actual=value) from error
    return tuple(items)


def parse_names(subject: str, names: object) -> tuple[str, ...]:
    """One name or several as a tuple; `subject` is the name of the argument in an error."""
    if isinstance(names, str):
        return (names,)
    try:
        return check_sequence(subject, names, str)
    except BNetError as error:
        raise BNetError(subject, expected="the name of a node, or a list of names", actual=names) from error


def check_mapping(subject: str, value: object) -> Mapping[str, Any]:
    """The value as a mapping with string keys; None gives an empty mapping."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise BNetError(subject, expected="a mapping from names", actual=value)
    return value


def check_float(subject: str, value: object, *, above: float | None = None, minimum: float | None = None) -> float:
    """The value as a finite float, greater than `above` and not less than `minimum` if these are given."""
    bound = "" if above is None else f" above {above:g}"
    bound = bound if minimum is None else f" of at least {minimum:g}"
    try:
        number = None if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = None
    is_low = number is not None and (
        (above is not None and number <= above) or (minimum is not None and number < minimum)
    )
    if number is None or not abs(number) < float("inf") or is_low:
        raise BNetError(subject, expected=f"a finite number{bound}", actual=value)
    return number


def check_fraction(subject: str, value: object) -> float:
    """The value as a float between 0 and 1, both excluded."""
    fraction = check_float(subject, value)
    if not 0 < fraction < 1:
        raise BNetError(subject, expected="a number between 0 and 1", actual=value)
    return fraction


def set_frozen(instance: object, **checked: object) -> None:
    """Set fields of a frozen dataclass to their checked values, such as a Python float for a numpy scalar."""
    for name, value in checked.items():
        object.__setattr__(instance, name, value)


def check_options(instance: object, check: Callable[..., object], *names: str, **limits: float) -> None:
    """Check options of a config by `check_int` or `check_float`, and set their values; a default of None is valid."""
    for name in names:
        value = getattr(instance, name)
        if value is not None or getattr(type(instance), name) is not None:
            set_frozen(instance, **{name: check(name, value, **limits)})


def check_choice(subject: str, value: object, options: Iterable[object]) -> None:
    """Raise an error unless the value is one of `options`. Types must agree: True is not 1."""
    choices = tuple(options)
    if not any(value is option or (type(value) is type(option) and value == option) for option in choices):
        allowed = ", ".join(repr(option) for option in choices)
        raise BNetError(subject, expected="one of the allowed values", actual=value, allowed=allowed)


# --------------------------------------------------------------------------------------------------------------------
# Options of configs: an unknown keyword of a function raises an error that names the config with this option.


P = ParamSpec("P")
R = TypeVar("R")


def suggest_config_for_options(**configs: tuple[type[Any], ...]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that an unknown keyword raises an error that names the config with this option.

    Args:
        **configs: For each parameter that accepts a config, the frozen dataclasses that it accepts.

    Returns:
        A decorator, which preserves the signature of the function. The decorated function raises `BNetError` for a
        keyword that is an option of a config, and `UnknownNameError` for any other unknown keyword.
    """

    configs_of_option: dict[str, list[str]] = {}  # for each option, the code that sets it
    for parameter, kinds in configs.items():
        for kind in kinds:
            for field in fields(kind):
                configs_of_option.setdefault(field.name, []).append(f"{parameter}=bt.{kind.__name__}({field.name}=...)")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters
        name = getattr(function, "__name__", "")

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            for option in options.keys() - known.keys():
                if option not in configs_of_option:
                    raise unknown_name_error(f"{name} option", option, [*known, *sorted(configs_of_option)])
                hint = f"Pass {' or '.join(configs_of_option[option])}"
                raise BNetError(option, expected=f"an option of {name}", actual="an option of a config", hint=hint)
            return function(*args, **options)

        return checked

    return decorate
