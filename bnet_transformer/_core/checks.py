"""Checks of arguments at the public face: the value as it is used, or the error that says what was expected."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any

from bnet_transformer.errors import BNetError, unknown_name_error


def check_names(subject: str, given: Iterable[str], names: Collection[str]) -> None:
    """Refuse what is none of these names, with the near ones."""
    for name in given:
        if name not in names:
            raise unknown_name_error(subject, name, names)


def check_int(subject: str, value: object, *, minimum: int = 1) -> int:
    """`value` as a whole number of at least `minimum`, or the error that says so."""
    is_bool = str(getattr(value, "dtype", "")).endswith("bool") or isinstance(value, bool)
    try:
        number = None if is_bool or getattr(value, "ndim", 0) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        number = None
    if number is None or number < minimum or number.bit_length() > 1024:  # no float holds more
        bound = "" if number is None or number < minimum else ", below 2^1024"
        raise BNetError(subject, expected=f"a whole number of at least {minimum}{bound}", actual=value)
    return number


def check_seed(value: object) -> int:
    """`value` as a seed that every generator takes, or the error that says so."""
    seed = check_int("seed", value, minimum=0)
    if seed >= 2**63:
        raise BNetError("seed", expected="a whole number below 2^63", actual=value)
    return seed


def check_sequence(
    subject: str, value: object, item_type: type, convert: Callable[[Any], Any] | None = None
) -> tuple[Any, ...]:
    """`value` as a tuple of `item_type`, each entry as it is `convert`, or the error that says so."""
    items: list[Any] = []
    try:
        for item in None if isinstance(value, str | bytes | Mapping) else value:  # type: ignore[attr-defined]
            items.append(item if convert is None else convert(item))
            if not isinstance(items[-1], item_type):  # the first wrong one tells, for a list may have no end
                raise TypeError
    except TypeError as error:
        raise BNetError(subject, expected=f"a list of {item_type.__name__}", actual=value) from error
    return tuple(items)


def check_mapping(subject: str, value: object) -> Mapping[str, Any]:
    """`value` as a mapping from strings (empty for None), or the error that says so."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise BNetError(subject, expected="a mapping from names", actual=value)
    return value


def check_float(subject: str, value: object, *, above: float | None = None, minimum: float | None = None) -> float:
    """A finite number, above a bound or from one on, where one is given."""
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
    """A share that is neither nothing nor all."""
    fraction = check_float(subject, value)
    if not 0 < fraction < 1:
        raise BNetError(subject, expected="a share between 0 and 1", actual=value)
    return fraction


def set_frozen(instance: object, **checked: object) -> None:
    """Fields of a frozen dataclass as their checks give them: plain numbers, for those of numpy or 0-d tensors."""
    for name, value in checked.items():
        object.__setattr__(instance, name, value)


def check_choice(subject: str, value: object, options: Iterable[object]) -> None:
    """Refuse a `value` that is none of `options`."""
    listed = tuple(options)
    if not any(value is option or (type(value) is type(option) and value == option) for option in listed):
        allowed = ", ".join(repr(option) for option in listed)
        raise BNetError(subject, expected="one of the allowed values", actual=value, allowed=allowed)
