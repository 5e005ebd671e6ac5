"""What a run keeps apart from the torch of its caller: gradients, where tensors are made, random numbers."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

_TURN = threading.RLock()


@contextmanager
def with_gradients() -> Iterator[None]:
    """Gradients, and tensors that are made on the host, under whatever modes of torch the caller stands.

    >>> with torch.inference_mode(), with_gradients():
    ...     torch.ones(1, requires_grad=True).sum().requires_grad
    True
    """
    usual = torch.get_default_device().type == "cpu"  # the mode that sets it is asked at every operation
    with torch.inference_mode(False), torch.enable_grad(), nullcontext() if usual else torch.device("cpu"):
        yield


@contextmanager
def own_random(device: torch.device) -> Iterator[None]:
    """Random numbers that leave those of the caller alone; one thread at a time, for they, and what Pyro keeps of a
    model that runs, belong to the process.

    >>> before = torch.get_rng_state()
    >>> with own_random(torch.device("cpu")):
    ...     _ = torch.rand(1)
    >>> before.equal(torch.get_rng_state())
    True
    """
    with _TURN, torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def same_random() -> Iterator[None]:
    """Python's own random numbers are after it as they were: pgmpy draws some as it is imported.

    >>> before = random.getstate()
    >>> with same_random():
    ...     _ = random.random()
    >>> before == random.getstate()
    True
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def reseed(seed: int, device: torch.device) -> None:
    """The seed of what is drawn on the host and on the device; no other device is asked, as `own_random` keeps none.

    >>> with own_random(torch.device("cpu")):
    ...     reseed(0, torch.device("cpu"))
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


def _anew() -> None:
    """A turn that nobody has: a thread that had it does not live on in a process that was forked."""
    global _TURN
    _TURN = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_anew)
