"""Several processes on one net: the same script under torchrun, each process (rank) with its share of the sentences.

Every rank asks the same and gets the same whole answer. What is summed over sentences is summed over ranks; what is
told of each sentence is put together in the order of one process.
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
    """This process among those that work together: its rank, how many there are, its device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main_process(self) -> bool:
        """True in the process that writes and shows."""
        return self.rank == 0

    def shard(self, sentences: S) -> S:
        """This rank's share of a list, a tensor or a corpus: every `world`-th, from its own number on."""
        if self.world_size == 1:
            return sentences
        share, every = slice(self.rank, None, self.world_size), cast(Any, sentences)
        return cast(S, every[share] if isinstance(sentences, Tensor | Sequence) else every.take(share))

    def global_indices(self, indices: Tensor) -> Tensor:
        """Where sentences of the share stand among all."""
        return self.rank + self.world_size * indices

    def to_device(self, network: N) -> N:
        """The net on the device of this rank."""
        moved: Any = network
        return network if moved.device == self.device else cast(N, moved.to(self.device))

    def all_reduce(self, value: Tensor) -> Tensor:
        """A tensor, summed over all ranks."""
        if self.world_size == 1:
            return value
        found = value.detach().to(self.device, copy=True).contiguous()
        distributed.all_reduce(found)
        return found.to(value.device)

    def any(self, flag: bool) -> bool:
        """True where it is true in some process."""
        return bool(self.all_reduce(torch.tensor(float(flag), device=self.device)))

    def all_gather_object(self, value: S) -> list[S]:
        """A small thing of each rank, by rank."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        distributed.all_gather_object(found, value)
        return found

    def all_gather(self, rows: Tensor) -> Tensor:
        """What each rank has of its share, `[sentence, ...]`, put together in the order of one process.

        A rank without a sentence gives anything of length zero.
        """
        if self.world_size == 1:
            return rows
        told = self.all_gather_object((len(rows), tuple(rows.shape[1:]), rows.dtype))
        longest, shape, dtype = max(told, key=lambda each: each[0])
        mine = torch.zeros(longest, *shape, dtype=dtype, device=self.device)
        if len(rows):
            mine[: len(rows)] = rows.detach()
        every = [torch.empty_like(mine) for _ in told]
        distributed.all_gather(every, mine)
        found = torch.empty(sum(count for count, *_ in told), *shape, dtype=dtype, device=self.device)
        for rank, (each, (count, *_)) in enumerate(zip(every, told, strict=True)):
            found[rank :: self.world_size] = each[:count]
        return found.to(rows.device)

    def assert_same(self, operation: str, **values: object) -> None:
        """Refuse a question that some rank does not ask, or asks of other data, settings or parameters."""
        if self.world_size == 1:
            return
        each = self.all_gather_object(
            {"question": operation, **{name: compute_digest(value) for name, value in values.items()}}
        )
        for rank, other in enumerate(each):
            apart = sorted(name for name in each[0] if each[0][name] != other.get(name))
            if apart:
                got = other["question"] if "question" in apart else f"other {', '.join(apart)}"
                raise RankMismatchError(
                    f"torchrun, {each[0]['question']}",
                    expected="the same on every rank",
                    actual=f"{got} on rank {rank}",
                    allowed="the same script and data for all; training.single_process() for what one rank asks by "
                    "itself",
                )

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            distributed.barrier()


class RankMismatchError(BNetError):
    """Ranks that ask for different things: all of them have this error, and can go on together."""


SINGLE_PROCESS = DistributedContext(0, 1, torch.device("cpu"))


def resolve_device(device: str | torch.device | None, network: Any) -> torch.device:
    """The device that is asked for, if this machine has it; by default that of the net."""
    found: torch.device = network.device if device is None else check_device(device)
    return found


def check_device(device: Any) -> torch.device:
    """A device that this machine has, and that holds numbers."""
    wanted = "a device of this machine that computes"
    try:
        found = torch.device(device)
        if found.type != "meta":
            float(torch.zeros((), device=found))
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise BNetError("device", expected=wanted, actual=device, allowed="'cpu', 'cuda', 'cuda:0', ...") from error
    if found.type == "meta":
        raise BNetError("device", expected=wanted, actual=device)
    return found


@contextmanager
def distributed_context(device: torch.device) -> Iterator[DistributedContext]:
    """The processes of this run: those of torchrun, or of a group that the caller has made; else this one alone.

    The group that is made here stays open for the next question. An error that not all ranks have alike closes it, so
    that the others fail at once where they would wait for this one.
    """
    if not is_distributed():
        yield DistributedContext(0, 1, device)
        return
    try:
        yield _join_process_group(device)
    except RankMismatchError:
        raise
    except BaseException as error:
        is_of_another = isinstance(error, RuntimeError) and (
            isinstance(error, distributed.DistError) or "gloo" in str(error) or "onnection closed" in str(error)
        )
        if _PROCESS_GROUP.is_open:
            _destroy_process_group()
            _PROCESS_GROUP.failure = (
                str(error).partition("\n")[0] if is_of_another else f"{type(error).__name__}: {error}"
            )
        if is_of_another:
            raise _rank_failure_error(format_value(str(error))) from error
        raise


@contextmanager
def single_process() -> Iterator[None]:
    """What one process asks by itself under torchrun: nothing is shared, and no other rank is waited for.

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
    """The group of processes that is made here, so that it is ours to close."""

    is_open: bool = False
    failure: str = ""  # the error that closed the last one


_PROCESS_GROUP = _ProcessGroup()


def is_distributed() -> bool:
    """True where this process works with others: not inside `single_process`."""
    if _IS_SINGLE_PROCESS.get() or not distributed.is_available():
        return False
    if distributed.is_initialized():
        return distributed.get_world_size() > 1
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _join_process_group(device: torch.device) -> DistributedContext:
    """This process among the others, whom it waits for where it is the first time."""
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
                allowed="torchrun --nproc-per-node 2 script.py; training.single_process(); no WORLD_SIZE, for one "
                "process",
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
    """End the group that is made here."""
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
