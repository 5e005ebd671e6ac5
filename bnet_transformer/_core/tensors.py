"""Tensors: the torch state of the caller, which is restored, and arrays and tensors that a caller passes."""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.checks import check_int
from bnet_transformer._core.process import ignore_caller_modes

# --------------------------------------------------------------------------------------------------------------------
# Isolation from the caller's torch state (gradients, random numbers), and scalars that are read with a delay.


DEFERRED_STEPS = 8  # number of steps by which an accelerator can be ahead of the host
_RANDOM_LOCK = threading.RLock()


@contextmanager
def enable_gradients() -> Iterator[None]:
    """Enable gradients, without autocast and with the CPU as default device, for any torch mode of the caller.

    >>> with torch.inference_mode(), enable_gradients():
    ...     torch.ones(1, requires_grad=True).sum().requires_grad
    True
    """
    with torch.inference_mode(False), torch.enable_grad(), ignore_caller_modes():
        yield


@contextmanager
def fork_torch_rng(device: torch.device) -> Iterator[None]:
    """Restore the caller's random state after the block.

    Only one thread at a time can be in the block, because the random state and Pyro's handlers are global.

    >>> before = torch.get_rng_state()
    >>> with fork_torch_rng(torch.device("cpu")):
    ...     _ = torch.rand(1)
    >>> before.equal(torch.get_rng_state())
    True
    """
    with _RANDOM_LOCK, torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def preserve_python_rng() -> Iterator[None]:
    """Restore the state of Python's `random` after the block, such as an import of pgmpy, which draws numbers.

    >>> before = random.getstate()
    >>> with preserve_python_rng():
    ...     _ = random.random()
    >>> before == random.getstate()
    True
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def seed_rngs(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`, which are those that `fork_torch_rng` restores.

    >>> with fork_torch_rng(torch.device("cpu")):
    ...     seed_rngs(0, torch.device("cpu"))
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


class DeferredScalars:
    """A queue of scalars that are read `lag` steps later, so the host does not wait for the device.

    >>> deferred = DeferredScalars(lag=1)
    >>> for step in range(3):
    ...     deferred.append(torch.tensor([float(step)]))
    >>> list(deferred.pop_ready()), list(deferred.pop_ready(all=True))
    ([[0.0], [1.0]], [[2.0]])
    """

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._pending: deque[tuple[Tensor, Any]] = deque()

    @classmethod
    def for_device(cls, device: torch.device) -> DeferredScalars:
        """A queue with a suitable lag for a device."""
        return cls(DEFERRED_STEPS if device.type == "cuda" else 0)

    def append(self, numbers: Tensor) -> None:
        """Append a copy of the numbers of a step; from a GPU the copy is asynchronous."""
        if numbers.device.type != "cuda":
            self._pending.append((numbers.detach().clone(), None))
            return
        # A copy into pinned memory does not block the host; the event records when the copy is complete.
        pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        pinned.copy_(numbers.detach(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._pending.append((pinned, copied))

    def pop_ready(self, *, all: bool = False) -> Iterator[list[float]]:
        """The numbers of steps older than `lag`, oldest first; `all=True` gives all and waits for the device."""
        while len(self._pending) > (0 if all else self.lag):
            pinned, copied = self._pending.popleft()
            if copied is not None:
                copied.synchronize()
            numbers: list[float] = pinned.tolist()
            yield numbers


def _reset_lock_after_fork() -> None:
    """Replace the lock in a forked child process, in which the thread that held it does not exist."""
    global _RANDOM_LOCK
    _RANDOM_LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_lock_after_fork)


# --------------------------------------------------------------------------------------------------------------------
# Conversions between tensors and numpy arrays, and checks of tensors that a caller passes.


IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

TIE_DIGITS = 6  # numbers that are equal up to this part of the largest are ties
HALF_DTYPES = (torch.bfloat16, torch.float16)
UNSIGNED_DTYPES = (torch.uint16, torch.uint32, torch.uint64)  # torch supports few operations on these types


def to_numpy(value: Tensor) -> NDArray[Any]:
    """A tensor on any device as an array; half precision is converted to float32, because numpy has no bfloat16.

    >>> to_numpy(torch.ones(2, dtype=torch.bfloat16, requires_grad=True)).tolist()
    [1.0, 1.0]
    """
    value = value.detach().cpu()
    dense: NDArray[Any] = (value.float() if value.dtype in HALF_DTYPES else value).numpy()
    return dense


def is_dense(value: object) -> TypeGuard[Tensor]:
    """True for a strided tensor: not sparse, nested or quantised.

    >>> is_dense(torch.ones(2)), is_dense(torch.ones(2).to_sparse())
    (True, False)
    """
    return isinstance(value, Tensor) and value.layout is torch.strided and not (value.is_nested or value.is_quantized)


def is_readable(value: Tensor) -> bool:
    """True if the numbers of a tensor are readable: not within `torch.compile`, nor on the device meta."""
    return not torch.compiler.is_compiling() and not value.is_meta and type(value) in (Tensor, torch.nn.Parameter)


def copy_to_tensor(value: object) -> Tensor:
    """A copy of a caller's numbers as a tensor; raises `TypeError` if entries are missing or masked.

    >>> numbers = torch.ones(2, requires_grad=True)
    >>> copy = copy_to_tensor(numbers)
    >>> copy.requires_grad, copy.data_ptr() == numbers.data_ptr()
    (False, False)
    """
    if isinstance(value, Tensor):
        if not is_dense(value) or value.is_meta:
            raise TypeError("a tensor with missing entries (sparse, nested, quantised or on the meta device)")
        tensor = value.detach().resolve_conj().resolve_neg().clone()
    elif np.ma.is_masked(value):
        raise TypeError("an array with masked entries")
    else:
        array = np.asarray(value)
        tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    return tensor.long() if tensor.dtype in UNSIGNED_DTYPES else tensor


def to_tuples(table: float | list[Any]) -> Any:
    """Nested lists as nested tuples, which are hashable."""
    return tuple(map(to_tuples, table)) if isinstance(table, list) else table


def rank_by_size(values: Tensor | FloatArray, count: int | None = None) -> list[int]:
    """The positions of the numbers in decreasing order of their absolute values; ties are in the given order.

    Args:
        values: The numbers; NaN is last.
        count: The maximum number of positions; None for all.

    >>> rank_by_size(np.array([0.5, np.nan, -2.0, 2.0]), 3)
    [2, 3, 0]
    """
    numbers = to_numpy(values.double()) if isinstance(values, Tensor) else values
    magnitude = np.where(np.isnan(numbers), -1.0, np.abs(numbers))
    greatest = magnitude.max(initial=1e-290, where=np.isfinite(magnitude))
    order: list[int] = np.argsort(-np.round(magnitude / greatest, TIE_DIGITS), kind="stable").tolist()
    return order if count is None else order[: check_int("count", count)]
