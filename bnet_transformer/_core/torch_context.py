"""What a run keeps apart from the torch of its caller (gradients, random numbers); numbers that are read late."""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

DEFERRED_STEPS = 8  # steps that an accelerator may be ahead of what is read of it
_RANDOM_LOCK = threading.RLock()


@contextmanager
def enable_gradients() -> Iterator[None]:
    """Gradients, and tensors that are made on the host, under whatever modes of torch the caller stands.

    >>> with torch.inference_mode(), enable_gradients():
    ...     torch.ones(1, requires_grad=True).sum().requires_grad
    True
    """
    is_cpu_default = torch.get_default_device().type == "cpu"  # the mode that sets it is asked at every operation
    with torch.inference_mode(False), torch.enable_grad(), nullcontext() if is_cpu_default else torch.device("cpu"):
        yield


@contextmanager
def fork_torch_rng(device: torch.device) -> Iterator[None]:
    """Random numbers that leave those of the caller alone; one thread at a time, for they, and what Pyro keeps of a
    model that runs, belong to the process.

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
    """Python's own random numbers are after it as they were: pgmpy draws some as it is imported.

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
    """The seed of what is drawn on the host and on the device; no other device is asked, as `fork_torch_rng` keeps none.

    >>> with fork_torch_rng(torch.device("cpu")):
    ...     seed_rngs(0, torch.device("cpu"))
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


class DeferredScalars:
    """Numbers as they are put in, given out once `lag` more came; on the CPU there is nothing to wait for.

    >>> late = DeferredScalars(lag=1)
    >>> for step in range(3):
    ...     late.put(torch.tensor([float(step)]))
    >>> list(late.read()), list(late.read(all=True))
    ([[0.0], [1.0]], [[2.0]])
    """

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._pending: deque[tuple[Tensor, Any]] = deque()

    @classmethod
    def for_device(cls, device: torch.device) -> DeferredScalars:
        """What suits a device."""
        return cls(DEFERRED_STEPS if device.type == "cuda" else 0)

    def append(self, numbers: Tensor) -> None:
        """Take the numbers of a step as they are now, wherever they lie."""
        if numbers.device.type != "cuda":
            self._pending.append((numbers.detach().clone(), None))
            return
        pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        pinned.copy_(numbers.detach(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._pending.append((pinned, copied))

    def pop_ready(self, *, all: bool = False) -> Iterator[list[float]]:
        """The numbers that are `lag` steps old, oldest first; or `all` that are left, for which this waits."""
        while len(self._pending) > (0 if all else self.lag):
            pinned, copied = self._pending.popleft()
            if copied is not None:
                copied.synchronize()
            numbers: list[float] = pinned.tolist()
            yield numbers


def _reset_lock_after_fork() -> None:
    """A turn that nobody has: a thread that had it does not live on in a process that was forked."""
    global _RANDOM_LOCK
    _RANDOM_LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_lock_after_fork)
