"""Work on a device that is recorded once and replayed: a step of a small net then costs what the device takes for it.

What launches each of its operations from the host is left out; that is most of the time where operations are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from bnet_transformer.errors import BNetError

Fed = Mapping[str, Tensor]
Work = Callable[[Fed], Tensor]
MOST = 16  # forms of what is fed that are recorded; others are worked at as they come


class Recorder(Protocol):
    """What records work."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What does the work again, in place, and where its result then lies."""


class Replayed:
    """Work that is done as it comes the first time, recorded the second, and replayed from then on.

    Each form of what it is fed (names, shapes, types) is recorded for itself, in tensors of its own that what is fed
    is copied to. The first time makes what lasts: gradients, the state of an optimiser, tables that are kept.
    """

    def __init__(self, work: Work, recorder: Recorder) -> None:
        self.work, self.recorder = work, recorder
        self._met: set[object] = set()
        self._made: dict[object, tuple[dict[str, Tensor], Callable[[], None], Tensor]] = {}

    def __call__(self, fed: Fed) -> Tensor:
        """The result of the work; it lies where the next result of this form will."""
        form = tuple((name, value.shape, value.dtype) for name, value in fed.items())
        if form not in self._made:
            if form not in self._met or len(self._made) >= MOST:
                self._met.add(form)
                return self.work(fed)
            own = {name: value.clone() for name, value in fed.items()}
            again, result = self.recorder.record(lambda: self.work(own))
            self._made[form] = own, again, result
        own, again, result = self._made[form]
        for name, value in fed.items():
            own[name].copy_(value, non_blocking=True)
        again()
        return result


class CudaGraphs:
    """Work on a GPU, recorded as CUDA graphs that share their memory: what one of them keeps lies outside it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def stage(self) -> Iterator[None]:
        """A stream beside the usual one, on which all of a run is done: the usual one cannot be recorded."""
        with torch.cuda.device(self.device):
            outside = torch.cuda.current_stream()
            self.stream.wait_stream(outside)
            try:
                with torch.cuda.stream(self.stream):
                    yield
            finally:
                outside.wait_stream(self.stream)

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What does the work again, in place, and where its result then lies; nothing is done yet."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                result = work()
        except RuntimeError as error:
            raise BNetError(
                "recorded",
                expected="a step that reads no number off the device and copies nothing to it",
                got=str(error).splitlines()[0],
                allowed="recorded=False; a loss= without .item(), float(), bool() or a mask of booleans as an index",
            ) from error
        return graph.replay, result


def recorder_of(device: torch.device, world: int) -> CudaGraphs:
    """What records steps on a device; refused where nothing does.

    >>> recorder_of(torch.device("cpu"), 1)
    Traceback (most recent call last):
        ...
    bnet_transformer.errors.BNetError: recorded: expected a CUDA device, whose work can be recorded; got cpu; ...
    """
    if device.type != "cuda":
        wanted = "a CUDA device, whose work can be recorded"
        raise BNetError("recorded", expected=wanted, got=device.type, allowed="device='cuda', recorded=False")
    if world > 1:
        wanted = "one process: what several say to each other is not recorded"
        raise BNetError("recorded", expected=wanted, got=world, allowed="recorded=False, compile=True")
    return CudaGraphs(device)
