"""The distance of a job from the limit of the machine: its FLOPs and bytes over the measured rates of the machine.

    limit = max(FLOPs / rate, bytes / bandwidth)

FLOPs are those of the matrix products of the job, including attention. Bytes are those that the job must move: each
number that exists before the job and is read, once (for a table with selected rows, only those rows), and each number
that the job creates and keeps, or overwrites, once. Intermediate numbers do not count: with perfect fusion and an
infinite cache they are never moved. The rates are measured on the same threads, in large products and copies. A job
whose numbers stay in the cache can be faster than `bytes` allow.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.harness import LIMIT, Figure, figure, measure_peak, time_calls

if TYPE_CHECKING:
    from torch import Tensor

SIZES = (1024, 2048, 3072)  # sizes of the square matrices whose product gives the rate
COPIED = 2**26  # float32 numbers of the arrays whose copies give the bandwidth: 268 MB, more than a cache holds
# Ops that read no number of their argument, by how their names begin; and ops that read a part of it.
FACTORY_OPS = ("empty", "zeros", "ones", "full", "rand", "randn", "new_")
LOOKUP_OPS = ("embedding", "index", "index_select", "gather", "take", "take_along_dim")


@dataclass(frozen=True)
class Machine:
    """The peak rates of a machine, in FLOPs and bytes per second, and a description of where and how they were
    measured."""

    rate: float
    bandwidth: float
    where: str = ""

    def __str__(self) -> str:
        rate, bandwidth = f"{self.rate / 1e9:,.1f} GFLOP/s", f"{self.bandwidth / 1e9:,.1f} GB/s"
        return f"{self.where}: {rate} in products, {bandwidth} in copies"


@dataclass(frozen=True)
class Work:
    """The work of a job: the FLOPs of its matrix products, and the bytes that it reads and keeps."""

    flops: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """The limit: the time of the products or of the bytes, whichever is greater."""
        return max(self.flops / machine.rate, self.bytes / machine.bandwidth)

    def binds(self, machine: Machine) -> str:
        """The name of the binding limit."""
        return "products" if self.flops / machine.rate >= self.bytes / machine.bandwidth else "bytes"


def measure_machine(device: str = "cpu", dtype: Any = None) -> Machine:
    """Measure this machine with the present number of threads, or its accelerator; once for each."""
    import torch

    return _measure_machine(torch.get_num_threads() if device == "cpu" else 0, device, dtype or torch.float32)


def list_machines() -> list[Machine]:
    """Return the machines that were measured in this process."""
    return list(_measured.values())


_measured: dict[tuple[int, str, str], Machine] = {}


@functools.cache
def _measure_machine(threads: int, device: str, dtype: Any) -> Machine:
    """Measure the rates for a number of threads, a device and a dtype."""
    import torch

    clock = get_clock(device)
    rates = {}
    for size in SIZES if device == "cpu" else [4 * size for size in SIZES]:
        a = torch.randn(size, size, device=device).to(dtype)
        rates[size] = 2 * size**3 / min(time_calls({"": functools.partial(torch.matmul, a, a)}, 5, 2, clock)[""])
    x = torch.ones(COPIED, device=device)
    y, z = torch.empty_like(x), torch.ones_like(x)
    spent = time_calls({"copy": lambda: y.copy_(x), "sum": lambda: torch.add(x, z, alpha=2, out=y)}, 5, 2, clock)
    bandwidth = 4 * COPIED * max(2 / min(spent["copy"]), 3 / min(spent["sum"]))
    best = max(rates, key=lambda size: rates[size])
    on = f"{threads} thread{'s' * (threads != 1)}" if device == "cpu" else device
    label = f"{on}, {str(dtype).removeprefix('torch.')} ({best:,} x {best:,})"
    result = _measured[threads, device, str(dtype)] = Machine(rates[best], bandwidth, label)
    return result


def get_clock(device: str) -> Callable[[], float]:
    """Return a clock for the work of a device: it waits for the queued work before it reads the time."""
    import time

    import torch

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock if device.startswith("cuda") else time.perf_counter


def measure_work(job: Callable[[], object]) -> Work:
    """Return the FLOPs and bytes of a job, which is run once; run it before, so that caches exist.

    >>> import torch
    >>> a, b = torch.ones(8, 16), torch.ones(16, 4)
    >>> measure_work(lambda: a @ b)
    Work(flops=1024, bytes=896)
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    traffic = _create_byte_counter()
    with FlopCounterMode(display=False) as counter, traffic, sdpa_kernel(SDPBackend.MATH):
        result = job()
    left = traffic.count_left()
    del result
    return Work(counter.get_total_flops(), traffic.read + left)


def measure_limit(
    job: Callable[[], object], seconds: Sequence[float], target: float | None = None, name: str = ""
) -> list[Figure]:
    """Return the work of a job, its limit on this machine, the measured time over the limit, and the peak memory.

    `target` is the maximum of the time over the limit.
    """
    peak, subject = measure_peak(job), f"{name}: " if name else ""
    return [
        *limit_figures(measure_work(job), seconds, target, name),
        figure(f"{subject}peak memory of the job", peak, "MB"),
    ]


def limit_figures(work: Work, seconds: Sequence[float], target: float | None = None, name: str = "") -> list[Figure]:
    """Return the limit of some work on this machine, and the measured seconds over it."""
    best, subject = measure_machine(), f"{name}: " if name else ""
    limit = work.seconds(best)
    return [
        figure(f"{subject}matrix products", work.flops / 1e9, "GFLOP"),
        figure(f"{subject}bytes to move", work.bytes / 1e6, "MB"),
        figure(f"{subject}limit ({work.binds(best)})", limit * 1e3, "ms"),
        figure(f"{subject}{LIMIT}", [item / limit for item in seconds], "", target=target),
    ]


def _create_byte_counter() -> Any:
    """Return a dispatch mode that counts the bytes read from earlier tensors, and the bytes that remain after."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def list_tensors(values: object) -> list[Tensor]:
        leaves = (item for item in tree_leaves(values) if isinstance(item, torch.Tensor))
        return [item for item in leaves if item.layout == torch.strided and item.device.type != "meta"]

    class ByteCounter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.storages: dict[int, Any] = {}  # storages that existed before, referenced so that no address is reused
            self.reads: dict[
                int, dict[tuple[Any, ...], int]
            ] = {}  # pieces that were read: offset, shape and strides -> bytes
            self.overwritten: dict[int, dict[tuple[Any, ...], int]] = {}  # pieces that were written to
            self.created: dict[int, Any] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name, outputs = func.overloadpacket.__name__, list_tensors(result)
            inputs, addresses = (
                list_tensors((args, kwargs or {})),
                {get_address(item) for item in list_tensors((args, kwargs or {}))},
            )
            written = {get_address(item) for item in _list_written(func, args, kwargs or {}, list_tensors)}
            new = [item for item in outputs if get_address(item) not in addresses]
            if (new or written or not outputs) and not name.startswith(FACTORY_OPS) and not name.endswith("_like"):
                for item in inputs:
                    if get_address(item) in written and (
                        name in ("copy_", "zero_", "fill_") or "out" in (kwargs or {})
                    ):
                        continue
                    self.record(self.reads, item, outputs[0] if name in LOOKUP_OPS and outputs else item)
            for item in inputs:
                if get_address(item) in written:
                    self.record(self.overwritten, item, item)
            for item in new:
                if get_address(item) not in self.storages:
                    self.created[get_address(item)] = StorageWeakRef(item.untyped_storage())
            return result

        def record(self, pieces: dict[int, dict[tuple[Any, ...], int]], item: Tensor, extent: Tensor) -> None:
            position = get_address(item)
            if position in self.created:
                return
            self.storages[position] = item.untyped_storage()
            piece = (item.storage_offset(), tuple(item.shape), item.stride())
            known = pieces.setdefault(position, {})
            known[piece] = known.get(piece, 0) + _count_bytes(extent) if extent is not item else _count_bytes(item)

        @property
        def read(self) -> int:
            return sum(_cap(self.storages[position].nbytes(), known.values()) for position, known in self.reads.items())

        def count_left(self) -> int:
            """Return the bytes of storages that the job created and that still exist, and of earlier storages that it
            wrote to."""
            gc.collect()
            alive = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.created.values())
            present = sum(storage.nbytes() for storage in alive if storage is not None)
            over = (
                _cap(self.storages[position].nbytes(), known.values()) for position, known in self.overwritten.items()
            )
            return present + sum(over)

    def get_address(item: Tensor) -> int:
        return int(item.untyped_storage()._cdata)

    return ByteCounter()


def _list_written(func: Any, args: Any, kwargs: Any, tensors: Callable[[object], list[Tensor]]) -> list[Tensor]:
    """Return the arguments that an op writes to."""
    targets = [
        (k, item) for k, item in enumerate(func._schema.arguments) if item.alias_info and item.alias_info.is_write
    ]
    values = [args[k] if k < len(args) else kwargs.get(item.name) for k, item in targets]
    return tensors(values)


def _count_bytes(item: Tensor) -> int:
    """Return the bytes of a tensor's numbers; repeated numbers (stride 0) count once."""
    count = 1
    for size, stride in zip(item.shape, item.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * item.element_size()


def _cap(maximum: int, parts: Iterable[int]) -> int:
    """Return the sum of the parts, but at most the maximum."""
    return min(maximum, sum(parts))
