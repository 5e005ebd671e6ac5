"""Data parallelism under torchrun: each process (rank) runs the same script with its shard of the sentences.

All ranks call the same functions and get the full result. Sums over sentences are all-reduced. Results for each
sentence are gathered in the order of a single process.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed

from bnet_transformer._core.files import compute_digest
from bnet_transformer.errors import BNetError, format_value

S = TypeVar("S")
N = TypeVar("N")
TIMEOUT = timedelta(minutes=10)  # for a rank that is alive but does not respond; a dead rank is noticed immediately
_IS_SINGLE_PROCESS: ContextVar[bool] = ContextVar("by itself", default=False)


@dataclass(frozen=True)
class DistributedContext:
    """The position of this process in its process group: its rank, the number of ranks, its device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main_process(self) -> bool:
        """True for the process that writes files and prints."""
        return self.rank == 0

    def shard(self, sentences: S) -> S:
        """The items of a list, a tensor or a corpus for this rank: `rank`, `rank + world_size`, ..."""
        if self.world_size == 1:
            return sentences
        shard, items = slice(self.rank, None, self.world_size), cast(Any, sentences)
        return cast(S, items[shard] if isinstance(sentences, Tensor | Sequence) else items.take(shard))

    def global_indices(self, indices: Tensor) -> Tensor:
        """The global indices of sentences, from their indices in this shard."""
        return self.rank + self.world_size * indices

    def to_device(self, network: N) -> N:
        """The net on the device of this rank."""
        moved: Any = network
        return network if moved.device == self.device else cast(N, moved.to(self.device))

    def all_reduce(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all ranks."""
        if self.world_size == 1:
            return value
        total = value.detach().to(self.device, copy=True).contiguous()
        distributed.all_reduce(total)
        return total.to(value.device)

    def any(self, flag: bool) -> bool:
        """True if `flag` is true on at least one rank."""
        return bool(self.all_reduce(torch.tensor(float(flag), device=self.device)))

    def all_gather_object(self, value: S) -> list[S]:
        """The objects of all ranks, in the order of ranks; for small objects."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        distributed.all_gather_object(gathered, value)
        return gathered

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows `[sentence, ...]` of all shards, in the order of a single process; a rank can have 0 rows."""
        if self.world_size == 1:
            return rows
        headers = self.all_gather_object((len(rows), tuple(rows.shape[1:]), rows.dtype))
        longest, shape, dtype = max(headers, key=lambda header: header[0])
        # Collectives need the same shape on all ranks. So shards are padded to the longest, and the gathered rows are
        # interleaved, which is the inverse of `shard`.
        padded = torch.zeros(longest, *shape, dtype=dtype, device=self.device)
        if len(rows):
            padded[: len(rows)] = rows.detach()
        shards = [torch.empty_like(padded) for _ in headers]
        distributed.all_gather(shards, padded)
        gathered = torch.empty(sum(count for count, *_ in headers), *shape, dtype=dtype, device=self.device)
        for rank, (shard, (count, *_)) in enumerate(zip(shards, headers, strict=True)):
            gathered[rank :: self.world_size] = shard[:count]
        return gathered.to(rows.device)

    def assert_same(self, operation: str, **values: object) -> None:
        """Raise `RankMismatchError` on every rank if the ranks differ in the operation or in a digest of `values`."""
        if self.world_size == 1:
            return
        digests = self.all_gather_object(
            {"operation": operation, **{name: compute_digest(value) for name, value in values.items()}}
        )
        for rank, other in enumerate(digests):
            mismatches = sorted(name for name in digests[0] if digests[0][name] != other.get(name))
            if mismatches:
                actual = other["operation"] if "operation" in mismatches else f"other {', '.join(mismatches)}"
                raise RankMismatchError(
                    f"torchrun, {digests[0]['operation']}",
                    expected="the same call with the same arguments on every rank",
                    actual=f"{actual} on rank {rank}",
                    hint="Run the same script with the same data on all ranks, and use training.single_process() for a "
                    "call on one rank only",
                )

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            distributed.barrier()


class RankMismatchError(BNetError):
    """Different calls on different ranks. Every rank raises this error, so no rank waits, and all can continue."""


SINGLE_PROCESS = DistributedContext(0, 1, torch.device("cpu"))


def resolve_device(device: str | torch.device | None, network: Any) -> torch.device:
    """The requested device, checked; the device of the net by default."""
    resolved: torch.device = network.device if device is None else check_device(device)
    return resolved


def check_device(device: Any) -> torch.device:
    """The device as `torch.device`; raises an error if this machine does not have it, or for the meta device."""
    expected = "an available device"
    try:
        resolved = torch.device(device)
        if resolved.type != "meta":
            float(torch.zeros((), device=resolved))
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise BNetError("device", expected=expected, actual=device, allowed="'cpu', 'cuda', 'cuda:0', ...") from error
    if resolved.type == "meta":
        raise BNetError("device", expected=expected, actual=device)
    return resolved


@contextmanager
def distributed_context(device: torch.device) -> Iterator[DistributedContext]:
    """The process group of this run: that of torchrun, one that the caller has initialised, or only this process.

    A group that is opened here remains open for the next call. An error on some ranks closes it, so that the other
    ranks fail immediately instead of at the timeout.
    """
    if not is_distributed():
        yield DistributedContext(0, 1, device)
        return
    try:
        yield _join_process_group(device)
    except RankMismatchError:
        raise
    except BaseException as error:
        is_from_other_rank = isinstance(error, RuntimeError) and (
            isinstance(error, distributed.DistError) or "gloo" in str(error) or "onnection closed" in str(error)
        )
        if _PROCESS_GROUP.is_open:
            _destroy_process_group()
            _PROCESS_GROUP.failure = (
                str(error).partition("\n")[0] if is_from_other_rank else f"{type(error).__name__}: {error}"
            )
        if is_from_other_rank:
            raise _rank_failure_error(format_value(str(error))) from error
        raise


@contextmanager
def single_process() -> Iterator[None]:
    """Compute only in this process under torchrun: data is not sharded, and no other rank is involved.

    >>> from bnet_transformer.learning import training
    >>> with training.single_process():
    ...     print("only here")
    only here
    """
    before = _IS_SINGLE_PROCESS.set(True)
    try:
        yield
    finally:
        _IS_SINGLE_PROCESS.reset(before)


@dataclass
class _ProcessGroup:
    """The state of the process group that this module opens and closes."""

    is_open: bool = False
    failure: str = ""  # the error that closed the last group


_PROCESS_GROUP = _ProcessGroup()


def is_distributed() -> bool:
    """True if this process works with other ranks, which it does not inside `single_process`."""
    if _IS_SINGLE_PROCESS.get() or not distributed.is_available():
        return False
    if distributed.is_initialized():
        return distributed.get_world_size() > 1
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _join_process_group(device: torch.device) -> DistributedContext:
    """The context of this rank. The first call initialises the process group and waits for the other ranks."""
    if _PROCESS_GROUP.failure:
        raise _rank_failure_error(_PROCESS_GROUP.failure)
    if not distributed.is_initialized():
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        try:
            if not 0 <= int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]):
                raise ValueError(f"RANK={os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
            store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
        except (KeyError, ValueError, distributed.DistError) as error:
            names = "WORLD_SIZE, a smaller RANK, MASTER_ADDR and a free MASTER_PORT"
            raise BNetError(
                "torchrun",
                expected=f"{names} in the environment, as torchrun sets them",
                actual=str(error).partition(". ")[0],
                hint="Start the script with torchrun --nproc-per-node 2 script.py, or unset WORLD_SIZE for one process",
            ) from error
        # The store of torchrun outlives killed ranks and still has their addresses, so each restart has a new prefix.
        store = PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" or torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
        _PROCESS_GROUP.is_open = True
        atexit.register(_destroy_process_group)
    if device.type == "cuda" and _PROCESS_GROUP.is_open:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return DistributedContext(distributed.get_rank(), distributed.get_world_size(), device)


def _destroy_process_group() -> None:
    """Close the process group if this module opened it."""
    if _PROCESS_GROUP.is_open and distributed.is_initialized():
        distributed.destroy_process_group()
    _PROCESS_GROUP.is_open = False


def _rank_failure_error(reason: str) -> BNetError:
    """The error for a rank that failed, from its reason or that of the connection."""
    hint = "See the error of that rank. To restart runs, use torchrun --max-restarts and bt.Checkpoints(resume=True)"
    return BNetError(f"torchrun: another rank failed or stopped ({reason})", hint=hint)
