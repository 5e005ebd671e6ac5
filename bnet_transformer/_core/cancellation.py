"""Cancellation of a computation from another thread: long loops call `check_cancelled` between their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


class Cancelled(Exception):
    """A computation whose result is no longer needed."""


@contextmanager
def cancellable(check: Callable[[], None]) -> Iterator[None]:
    """In the block, `check_cancelled` calls `check`, which raises `Cancelled` to stop the computation.

    >>> def stop():
    ...     raise Cancelled
    >>> with cancellable(stop):
    ...     check_cancelled()
    Traceback (most recent call last):
    ...
    bnet_transformer._core.cancellation.Cancelled
    """
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


def check_cancelled() -> None:
    """Stop the computation if it runs in `cancellable` and was cancelled."""
    check = _CHECK.get()
    if check is not None:
        check()
