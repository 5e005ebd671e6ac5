"""Small tasks to train on: copying, reversing and sorting of ids, and dates written in words to dates in digits.

Of the ids 0 is the word that a target starts with; the rest are drawn evenly.
"""

from __future__ import annotations

import datetime
import random

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, room_for, seed_of, whole

Pairs = tuple[Tensor, Tensor]
Dates = list[tuple[list[str], list[str]]]

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
START, STOP = "<", ">"
FIRST = datetime.date(1900, 1, 1).toordinal()
LAST = datetime.date(2099, 12, 31).toordinal()


def copying(count: int, *, length: int = 10, symbols: int = 11, seed: int = 0) -> Pairs:
    """Sources `[count, length]` and the same behind the start word.

    >>> source, target = copying(2, length=3)
    >>> source.shape, target.shape, target[0, 1:].equal(source[0])
    (torch.Size([2, 3]), torch.Size([2, 4]), True)
    """
    source = _drawn(count, length, symbols, seed)
    return source, _started(source)


def reversing(count: int, *, length: int = 10, symbols: int = 11, seed: int = 0) -> Pairs:
    """Sources and the same from the end."""
    source = _drawn(count, length, symbols, seed)
    return source, _started(source.flip(1))


def sorting(count: int, *, length: int = 10, symbols: int = 11, seed: int = 0) -> Pairs:
    """Sources and the same in rising order."""
    source = _drawn(count, length, symbols, seed)
    return source, _started(source.sort(1).values)


def dates(count: int, *, seed: int = 0) -> Dates:
    """Days from 1900 to 2099 as people write them, and as `YYYY-MM-DD`; both as lists of letters.

    >>> source, target = dates(6, seed=3)[5]
    >>> "".join(source), "".join(target)
    ('Thu 22 Sep 1904', '1904-09-22')
    """
    draw = random.Random(seed_of(seed))
    found = []
    for _ in range(whole("count", count)):
        day = datetime.date.fromordinal(draw.randint(FIRST, LAST))
        found.append((list(_written(day, draw.randrange(6))), list(day.isoformat())))
    return found


def letters() -> list[str]:
    """The letters of all dates, after the words that start and stop a target."""
    used = {letter for word in (*MONTHS, *DAYS, "0123456789 -,./") for letter in word}
    return [START, STOP, *sorted(used)]


def _written(day: datetime.date, form: int) -> str:
    month, name, d, y = MONTHS[day.month - 1], DAYS[day.weekday()], day.day, day.year
    return (
        f"{d} {month} {y}",
        f"{month} {d}, {y}",
        f"{name} {d} {month} {y}",
        f"{name[:3]} {d} {month[:3]} {y}",
        f"{d:02}/{day.month:02}/{y}",
        f"{d}.{day.month}.{y}",
    )[form]


def _drawn(count: int, length: int, symbols: int, seed: int) -> Tensor:
    if not 2 <= whole("symbols", symbols) < 2**63:
        raise BNetError("symbols", expected="at least 2, of which 0 starts a target, and below 2^63", got=symbols)
    room_for("ids", 8 * whole("count", count) * whole("length", length), "a smaller count=, or length=")
    generator = torch.Generator().manual_seed(seed_of(seed))
    return torch.randint(1, symbols, (count, length), generator=generator)


def _started(target: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(target[:, :1]), target], 1)
