"""Small tasks to train on: copying, reversing and sorting of ids.

Of the ids 0 is the word that a target starts with; the rest are drawn evenly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError, room_for, seed_of, whole

Pairs = tuple[Tensor, Tensor]


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


def _drawn(count: int, length: int, symbols: int, seed: int) -> Tensor:
    if not 2 <= whole("symbols", symbols) < 2**63:
        raise BNetError("symbols", expected="at least 2, of which 0 starts a target, and below 2^63", got=symbols)
    room_for("ids", 8 * whole("count", count) * whole("length", length), "a smaller count=, or length=")
    generator = torch.Generator().manual_seed(seed_of(seed))
    return torch.randint(1, symbols, (count, length), generator=generator)


def _started(target: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(target[:, :1]), target], 1)
