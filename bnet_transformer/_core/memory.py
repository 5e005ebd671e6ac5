"""The size of the machine's memory, and one error for allocations that fail."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from inspect import isfunction
from typing import TypeVar

from bnet_transformer.errors import BudgetError

T = TypeVar("T")
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
    """Re-raise a failed allocation of the block as a `BudgetError`; in the block, the default device is the CPU.

    >>> with translate_memory_errors("a list"):
    ...     [0] * 10**17
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.BudgetError: a list: there is not enough memory. ...
    """
    try:
        with _use_cpu_by_default():
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


def _use_cpu_by_default() -> AbstractContextManager[object]:
    """A context in which the default device is the CPU, because nets have their own device."""
    torch = sys.modules.get("torch")
    is_accelerator = torch is not None and torch.get_default_device().type != "cpu"
    return torch.device("cpu") if torch is not None and is_accelerator else nullcontext()
