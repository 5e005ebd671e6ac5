"""The process: the size of the memory, one error for allocations that fail, and cancellation from another thread."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from inspect import isfunction
from typing import TypeVar

from bnet_transformer.errors import BudgetError

# --------------------------------------------------------------------------------------------------------------------
# Cancellation of a computation from another thread: long loops call `check_cancelled` between their steps.


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
    bnet_transformer._core.process.Cancelled
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


# --------------------------------------------------------------------------------------------------------------------
# The size of the machine's memory, and one error for allocations that fail.


T = TypeVar("T")
AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")
OUT_OF_MEMORY = re.compile("OutOfMemoryError|can't allocate memory|not enough memory|bad_alloc|out of memory")


def total_memory() -> int | None:
    """The size of the machine's memory in bytes; None if the system does not report it."""
    with suppress(OSError, ValueError, AttributeError):
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return num_bytes if num_bytes > 0 else None
    return None


def check_memory(subject: str, num_bytes: int, reduction: str) -> None:
    """Raise an error before an allocation of more bytes than the machine has; `reduction` needs less memory.

    >>> check_memory("draws", 10**18, "fewer draws=")
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.BudgetError: draws: expected at most ... bytes, the memory of this machine; got ... bytes.
    ...
    """
    available = total_memory()
    if available is not None and num_bytes > available:
        expected = f"at most {available:,} bytes, the memory of this machine"
        raise BudgetError(subject, expected=expected, actual=f"{num_bytes:,} bytes", hint=f"Use {reduction}")


@contextmanager
def translate_memory_errors(subject: str) -> Iterator[None]:
    """Re-raise a failed allocation of the block as a `BudgetError`; the block ignores modes of torch of the caller.

    >>> with translate_memory_errors("a list"):
    ...     [0] * 10**17
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.BudgetError: a list: there is not enough memory. ...
    """
    try:
        with ignore_caller_modes():
            yield
    except (MemoryError, RuntimeError) as error:
        message = str(error).strip().partition("\n")[0]
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(f"{type(error).__name__} {message}"):
            raise
        requested = re.search(r"allocate ([\d.]+ ?\w+)", message)
        needed = f" ({requested[1]} more are needed)" if requested else ""
        hint = "Use fewer or shorter sentences at once, or a smaller budget=, memory= or batch="
        raise BudgetError(f"{subject}: there is not enough memory{needed}", hint=hint) from error


def translate_memory_errors_of_methods(cls: type[T]) -> type[T]:
    """Decorate every public method of a class with `translate_memory_errors`; errors contain the method's name."""
    for name, method in list(vars(cls).items()):
        if isfunction(method) and not name.startswith("_"):
            setattr(cls, name, translate_memory_errors(name)(method))
    return cls


@contextmanager
def ignore_caller_modes() -> Iterator[None]:
    """Compute without autocast and with the CPU as default device: nets have their own types and devices.

    Autocast rounds products to bfloat16, so that a posterior would differ in its third digit.

    >>> import torch
    >>> with torch.autocast("cpu"), ignore_caller_modes():
    ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
    torch.float32
    """
    torch = sys.modules.get("torch")
    with ExitStack() as modes:
        if torch is not None:
            for device in filter(torch.is_autocast_enabled, AUTOCAST_DEVICES):
                modes.enter_context(torch.autocast(device, enabled=False))
            # Only if needed, because a device context is a torch function mode, which slows down every operation.
            if torch.get_default_device().type != "cpu":
                modes.enter_context(torch.device("cpu"))
        yield
