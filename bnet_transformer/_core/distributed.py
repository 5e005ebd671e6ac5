"""Data parallelism under torchrun: the same script in each process (rank), each with its shard of the sentences.

Every rank asks the same question and gets the full answer. Sums over sentences are all-reduced; results per sentence
are gathered in the order of a single process.
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

from bnet_transformer._core.hashing import compute_digest
from bnet_transformer.errors import BNetError, format_value

S = TypeVar("S")
N = TypeVar("N")
TIMEOUT = timedelta(minutes=10)  # for a rank that lives and does not come; one that died is missed at once
_IS_SINGLE_PROCESS: ContextVar[bool] = ContextVar("by itself", default=False)


@dataclass(frozen=True)
class DistributedContext:
    """This process in its group: its rank, the number of ranks, its device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main_process(self) -> bool:
        """True in the process that writes files and prints."""
        return self.rank == 0

    def shard(self, sentences: S) -> S:
        """The shard of this rank of a list, a tensor or a corpus: items `rank`, `rank + world_size`, ..."""
        if self.world_size == 1:
            return sentences
        shard, items = slice(self.rank, None, self.world_size), cast(Any, sentences)
        return cast(S, items[shard] if isinstance(sentences, Tensor | Sequence) else items.take(shard))

    def global_indices(self, indices: Tensor) -> Tensor:
        """The indices among all sentences of sentences of this shard."""
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
        """True where `flag` is true on some rank."""
        return bool(self.all_reduce(torch.tensor(float(flag), device=self.device)))

    def all_gather_object(self, value: S) -> list[S]:
        """A small object of each rank, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        distributed.all_gather_object(gathered, value)
        return gathered

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows `[sentence, ...]` of all shards, in the order of a single process; a rank without rows passes length
        0.
        """
        if self.world_size == 1:
            return rows
        headers = self.all_gather_object((len(rows), tuple(rows.shape[1:]), rows.dtype))
        longest, shape, dtype = max(headers, key=lambda header: header[0])
        # Collectives need one shape on all ranks: shards are padded to the longest, then interleaved as `shard` cut
        # them.
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
            {"question": operation, **{name: compute_digest(value) for name, value in values.items()}}
        )
        for rank, other in enumerate(digests):
            mismatches = sorted(name for name in digests[0] if digests[0][name] != other.get(name))
            if mismatches:
                actual = other["question"] if "question" in mismatches else f"other {', '.join(mismatches)}"
                raise RankMismatchError(
                    f"torchrun, {digests[0]['question']}",
                    expected="the same on every rank",
                    actual=f"{actual} on rank {rank}",
                    allowed="the same script and data for all; "
                    "training.single_process() for what one rank asks by itself",
                )

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            distributed.barrier()


class RankMismatchError(BNetError):
    """Ranks that call different operations. Every rank raises it, so none waits for another, and all can continue."""


SINGLE_PROCESS = DistributedContext(0, 1, torch.device("cpu"))


def resolve_device(device: str | torch.device | None, network: Any) -> torch.device:
    """The requested device, checked; by default that of the net."""
    resolved: torch.device = network.device if device is None else check_device(device)
    return resolved


def check_device(device: Any) -> torch.device:
    """A device that this machine has and that can hold numbers."""
    expected = "a device of this machine that computes"
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
    """The process group of this run: that of torchrun, or one that the caller has initialised; otherwise this process
    alone.

    A group that is opened here stays open for the next call. An error that only some ranks raise closes it, so that the
    others fail at once instead of waiting until the timeout.
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
    """Under torchrun, compute in this process only: nothing is sharded, and no other rank is waited for.

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
    """The process group that this module opened, and must close."""

    is_open: bool = False
    failure: str = ""  # the error that closed the last one


_PROCESS_GROUP = _ProcessGroup()


def is_distributed() -> bool:
    """True where this process works with other ranks: not inside `single_process`."""
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
            names = "WORLD_SIZE, RANK below it, MASTER_ADDR and a free MASTER_PORT"
            raise BNetError(
                "torchrun",
                expected=f"{names} in the environment, as torchrun sets them",
                actual=str(error).partition(". ")[0],
                allowed="torchrun --nproc-per-node 2 script.py; training.single_process(); "
                "no WORLD_SIZE, for one process",
            ) from error
        # The store of torchrun outlives ranks that were killed, and still has their addresses.
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
    return BNetError(
        "torchrun",
        expected="every rank to come to the same point",
        actual=f"one that did not ({reason})",
        allowed="the error of that rank says why; torchrun --max-restarts, with bt.Checkpoints(folder, resume=True)",
    )
