"""Numbers of a step, read some steps later: so the host never waits for what the device has not done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LAG = 8  # steps that an accelerator may be ahead of what is read of it


class DeferredScalars:
    """Numbers as they are put in, given out once `lag` more came; on the CPU there is nothing to wait for.

    >>> late = DeferredScalars(lag=1)
    >>> for step in range(3):
    ...     late.put(torch.tensor([float(step)]))
    >>> list(late.ripe()), list(late.all())
    ([[0.0], [1.0]], [[2.0]])
    """

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._waiting: deque[tuple[Tensor, Any]] = deque()

    @classmethod
    def on(cls, device: torch.device) -> DeferredScalars:
        """What suits a device."""
        return cls(LAG if device.type == "cuda" else 0)

    def put(self, numbers: Tensor) -> None:
        """Take the numbers of a step as they are now, wherever they lie."""
        if numbers.device.type != "cuda":
            self._waiting.append((numbers.detach().clone(), None))
            return
        kept = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        kept.copy_(numbers.detach(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._waiting.append((kept, copied))

    def ripe(self) -> Iterator[list[float]]:
        """The numbers that are `lag` steps old, oldest first."""
        while len(self._waiting) > self.lag:
            yield self._read()

    def all(self) -> Iterator[list[float]]:
        """All numbers that are left, oldest first; this waits."""
        while self._waiting:
            yield self._read()

    def _read(self) -> list[float]:
        kept, copied = self._waiting.popleft()
        if copied is not None:
            copied.synchronize()
        found: list[float] = kept.tolist()
        return found
