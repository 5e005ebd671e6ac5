"""Checks of arguments at the public face: the value as it is used, or the error that says what was expected."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any

from bnet_transformer.errors import BNetError, unknown


def check_names(what: str, told: Iterable[str], names: Collection[str]) -> None:
    """Refuse what is none of these names, with the near ones."""
    for name in told:
        if name not in names:
            raise unknown(what, name, names)


def whole(what: str, value: object, *, least: int = 1) -> int:
    """`value` as a whole number of at least `least`, or the error that says so."""
    answer = str(getattr(value, "dtype", "")).endswith("bool") or isinstance(value, bool)
    try:
        number = None if answer or getattr(value, "ndim", 0) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        number = None
    if number is None or number < least or number.bit_length() > 1024:  # no float holds more
        most = "" if number is None or number < least else ", below 2^1024"
        raise BNetError(what, expected=f"a whole number of at least {least}{most}", got=value)
    return number


def seed_of(value: object) -> int:
    """`value` as a seed that every generator takes, or the error that says so."""
    seed = whole("seed", value, least=0)
    if seed >= 2**63:
        raise BNetError("seed", expected="a whole number below 2^63", got=value)
    return seed


def listed(what: str, value: object, kind: type, read: Callable[[Any], Any] | None = None) -> tuple[Any, ...]:
    """`value` as a tuple of `kind`, each entry as it is `read`, or the error that says so."""
    things: list[Any] = []
    try:
        for thing in None if isinstance(value, str | bytes | Mapping) else value:  # type: ignore[attr-defined]
            things.append(thing if read is None else read(thing))
            if not isinstance(things[-1], kind):  # the first wrong one tells, for a list may have no end
                raise TypeError
    except TypeError as error:
        raise BNetError(what, expected=f"a list of {kind.__name__}", got=value) from error
    return tuple(things)


def mapping(what: str, value: object) -> Mapping[str, Any]:
    """`value` as a mapping from strings (empty for None), or the error that says so."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise BNetError(what, expected="a mapping from names", got=value)
    return value


def number(what: str, value: object, *, above: float | None = None, least: float | None = None) -> float:
    """A finite number, above a bound or from one on, where one is given."""
    bound = "" if above is None else f" above {above:g}"
    bound = bound if least is None else f" of at least {least:g}"
    try:
        found = None if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        found = None
    is_low = found is not None and ((above is not None and found <= above) or (least is not None and found < least))
    if found is None or not abs(found) < float("inf") or is_low:
        raise BNetError(what, expected=f"a finite number{bound}", got=value)
    return found


def share(what: str, value: object) -> float:
    """A share that is neither nothing nor all."""
    found = number(what, value)
    if not 0 < found < 1:
        raise BNetError(what, expected="a share between 0 and 1", got=value)
    return found


def put(thing: object, **checked: object) -> None:
    """Fields of a frozen dataclass as their checks give them: plain numbers, for those of numpy or 0-d tensors."""
    for name, value in checked.items():
        object.__setattr__(thing, name, value)


def one_of(what: str, value: object, options: Iterable[object]) -> None:
    """Refuse a `value` that is none of `options`."""
    listed = tuple(options)
    if not any(value is option or (type(value) is type(option) and value == option) for option in listed):
        allowed = ", ".join(repr(option) for option in listed)
        raise BNetError(what, expected="one of the allowed values", got=value, allowed=allowed)
