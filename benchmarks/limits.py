"""How far a job is from what the machine could do: its FLOPs and bytes over the machine's own measured rates.

    limit = max(FLOPs / rate, bytes / bandwidth)

FLOPs are those of the job's matrix products (attention as the products that it is). Bytes are those that it must move:
each number that was there before the job and is read in it, once (of a table from which rows are taken, those rows),
and each number that is there after it and was not before, or was written over, once. What is made and dropped within
the job does not count: with perfect fusion and a cache without end it would never be moved. The rates are measured on
the same threads, in large products and copies. A job whose numbers stay in the cache can be faster than `bytes` allow.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.harness import LIMIT, Figure, figure, interleaved, peak_of

if TYPE_CHECKING:
    from torch import Tensor

SIZES = (1024, 2048, 3072)  # of the square matrices whose product tells the rate
COPIED = 2**26  # float32 numbers of the arrays that tell the bandwidth: 268 MB, more than a cache holds
MADE = ("empty", "zeros", "ones", "full", "rand", "randn", "new_")  # ops that look at no number of their argument
TAKEN = ("embedding", "index", "index_select", "gather", "take", "take_along_dim")  # ops that read a part


@dataclass(frozen=True)
class Machine:
    """What a machine does at best: FLOPs and bytes a second, and in words where and how that was found."""

    rate: float
    bandwidth: float
    where: str = ""

    def __str__(self) -> str:
        rate, bandwidth = f"{self.rate / 1e9:,.1f} GFLOP/s", f"{self.bandwidth / 1e9:,.1f} GB/s"
        return f"{self.where}: {rate} in products, {bandwidth} in copies"


@dataclass(frozen=True)
class Work:
    """What a job must do: the FLOPs of its matrix products, the bytes that it reads and leaves."""

    flops: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """The limit: the time of the products or that of the bytes, whichever is greater."""
        return max(self.flops / machine.rate, self.bytes / machine.bandwidth)

    def binds(self, machine: Machine) -> str:
        """Which of the two it is."""
        return "products" if self.flops / machine.rate >= self.bytes / machine.bandwidth else "bytes"


def machine(device: str = "cpu", dtype: Any = None) -> Machine:
    """This machine on the present number of threads, or its accelerator; measured once for each."""
    import torch

    return _machine(torch.get_num_threads() if device == "cpu" else 0, device, dtype or torch.float32)


def machines() -> list[Machine]:
    """Those that were measured in this process."""
    return list(_measured.values())


_measured: dict[tuple[int, str, str], Machine] = {}


@functools.cache
def _machine(threads: int, device: str, dtype: Any) -> Machine:
    import torch

    clock = clock_of(device)
    rates = {}
    for size in SIZES if device == "cpu" else [4 * size for size in SIZES]:
        a = torch.randn(size, size, device=device).to(dtype)
        rates[size] = 2 * size**3 / min(interleaved({"": functools.partial(torch.matmul, a, a)}, 5, 2, clock)[""])
    x = torch.ones(COPIED, device=device)
    y, z = torch.empty_like(x), torch.ones_like(x)
    spent = interleaved({"copy": lambda: y.copy_(x), "sum": lambda: torch.add(x, z, alpha=2, out=y)}, 5, 2, clock)
    bandwidth = 4 * COPIED * max(2 / min(spent["copy"]), 3 / min(spent["sum"]))
    best = max(rates, key=lambda size: rates[size])
    on = f"{threads} thread{'s' * (threads != 1)}" if device == "cpu" else device
    where = f"{on}, {str(dtype).removeprefix('torch.')} ({best:,} x {best:,})"
    result = _measured[threads, device, str(dtype)] = Machine(rates[best], bandwidth, where)
    return result


def clock_of(device: str) -> Callable[[], float]:
    """The seconds of a device: its work is done before they are read."""
    import time

    import torch

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock if device.startswith("cuda") else time.perf_counter


def work_of(job: Callable[[], object]) -> Work:
    """The FLOPs and bytes of a job, which is run once, and should have run before, so that caches are made.

    >>> import torch
    >>> a, b = torch.ones(8, 16), torch.ones(16, 4)
    >>> work_of(lambda: a @ b)
    Work(flops=1024, bytes=896)
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    moved = _moved()
    with FlopCounterMode(display=False) as counter, moved, sdpa_kernel(SDPBackend.MATH):
        retained = job()
    left = moved.left()
    del retained
    return Work(counter.get_total_flops(), moved.read + left)


def of_the_limit(
    job: Callable[[], object], seconds: Sequence[float], target: float | None = None, name: str = ""
) -> list[Figure]:
    """What a job must do, its limit on this machine, how far the measured seconds are from it, its peak memory.

    `target` is what the time may be of the limit at most.
    """
    peak, subject = peak_of(job), f"{name}: " if name else ""
    return [*limit_of(work_of(job), seconds, target, name), figure(f"{subject}peak memory of it", peak, "MB")]


def limit_of(work: Work, seconds: Sequence[float], target: float | None = None, name: str = "") -> list[Figure]:
    """The limit of some work on this machine, and how far the measured seconds are from it."""
    best, subject = machine(), f"{name}: " if name else ""
    limit = work.seconds(best)
    return [
        figure(f"{subject}matrix products", work.flops / 1e9, "GFLOP"),
        figure(f"{subject}bytes to move", work.bytes / 1e6, "MB"),
        figure(f"{subject}limit ({work.binds(best)})", limit * 1e3, "ms"),
        figure(f"{subject}{LIMIT}", [item / limit for item in seconds], "", target=target),
    ]


def _moved() -> Any:
    """A mode that watches which numbers are read that were there before, and which are left."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def tensors(values: object) -> list[Tensor]:
        answer = (item for item in tree_leaves(values) if isinstance(item, torch.Tensor))
        return [item for item in answer if item.layout == torch.strided and item.device.type != "meta"]

    class Moved(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.held: dict[int, Any] = {}  # storages that were there before, kept so that no address comes again
            self.pieces: dict[int, dict[tuple[Any, ...], int]] = {}  # what was read of them
            self.over: dict[int, dict[tuple[Any, ...], int]] = {}  # what was written over
            self.made: dict[int, Any] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name, outputs = func.overloadpacket.__name__, tensors(result)
            given, positions = tensors((args, kwargs or {})), {address(item) for item in tensors((args, kwargs or {}))}
            written = {address(item) for item in _written(func, args, kwargs or {}, tensors)}
            new = [item for item in outputs if address(item) not in positions]
            if (new or written or not outputs) and not name.startswith(MADE) and not name.endswith("_like"):
                for item in given:
                    if address(item) in written and (name in ("copy_", "zero_", "fill_") or "out" in (kwargs or {})):
                        continue
                    self.note(self.pieces, item, outputs[0] if name in TAKEN and outputs else item)
            for item in given:
                if address(item) in written:
                    self.note(self.over, item, item)
            for item in new:
                if address(item) not in self.held:
                    self.made[address(item)] = StorageWeakRef(item.untyped_storage())
            return result

        def note(self, pieces: dict[int, dict[tuple[Any, ...], int]], item: Tensor, extent: Tensor) -> None:
            position = address(item)
            if position in self.made:
                return
            self.held[position] = item.untyped_storage()
            piece = (item.storage_offset(), tuple(item.shape), item.stride())
            known = pieces.setdefault(position, {})
            known[piece] = known.get(piece, 0) + _bytes(extent) if extent is not item else _bytes(item)

        @property
        def read(self) -> int:
            return sum(_capped(self.held[position].nbytes(), known.values()) for position, known in self.pieces.items())

        def left(self) -> int:
            """Of storages made in the job those that are still there; and what was written over."""
            gc.collect()
            alive = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.made.values())
            present = sum(storage.nbytes() for storage in alive if storage is not None)
            over = (_capped(self.held[position].nbytes(), known.values()) for position, known in self.over.items())
            return present + sum(over)

    def address(item: Tensor) -> int:
        return int(item.untyped_storage()._cdata)

    return Moved()


def _written(func: Any, args: Any, kwargs: Any, tensors: Callable[[object], list[Tensor]]) -> list[Tensor]:
    """The arguments that an op writes to."""
    given = [(k, item) for k, item in enumerate(func._schema.arguments) if item.alias_info and item.alias_info.is_write]
    values = [args[k] if k < len(args) else kwargs.get(item.name) for k, item in given]
    return tensors(values)


def _bytes(item: Tensor) -> int:
    """The bytes of a tensor's numbers, those that are repeated (stride 0) once."""
    count = 1
    for size, stride in zip(item.shape, item.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * item.element_size()


def _capped(maximum: int, parts: Iterable[int]) -> int:
    return min(maximum, sum(parts))
