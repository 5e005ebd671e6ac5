"""Several processes on one net: the same script under torchrun, each process (rank) with its share of the sentences.

Every rank asks the same and gets the same whole answer. What is summed over sentences is summed over ranks; what is
told of each sentence is put together in the order of one process.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, distributed

from bnet_transformer._core.hashing import digest_of
from bnet_transformer.errors import BNetError, shown

S = TypeVar("S")
N = TypeVar("N", bound="HasParameters")
PATIENCE = timedelta(minutes=10)  # for a rank that lives and does not come; one that died is missed at once
LOST = "it was killed, or its machine was lost"
_BY_ITSELF: ContextVar[bool] = ContextVar("by itself", default=False)


class HasParameters(Protocol):
    """A net: named parameters, and a copy of it on another device."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """A tensor for each name."""

    def to(self: N, *where: torch.dtype | torch.device | str) -> N:
        """The same net elsewhere."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that work together: its rank, how many there are, its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True in the process that writes and shows."""
        return self.rank == 0

    def shard(self, sentences: S) -> S:
        """This rank's share of a list, a tensor or a corpus: every `world`-th, from its own number on."""
        if self.world == 1:
            return sentences
        share, every = slice(self.rank, None, self.world), cast(Any, sentences)
        return cast(S, every[share] if isinstance(sentences, Tensor | Sequence) else every.take(share))

    def places(self, which: Tensor) -> Tensor:
        """Where sentences of the share stand among all."""
        return self.rank + self.world * which

    def to_device(self, network: N) -> N:
        """The net on the device of this rank."""
        return network if device_of(None, network) == self.device else network.to(self.device)

    def summed(self, *numbers: Tensor) -> list[float]:
        """Numbers, summed over all processes."""
        total = torch.stack([number.detach().double() for number in numbers])
        if self.world > 1:
            distributed.all_reduce(total)
        return [float(number) for number in total]

    def all_reduce(self, value: Tensor) -> Tensor:
        """A tensor, summed over all ranks."""
        if self.world == 1:
            return value
        found = value.detach().to(self.device, copy=True).contiguous()
        distributed.all_reduce(found)
        return found.to(value.device)

    def any(self, flag: bool) -> bool:
        """True where it is true in some process."""
        if self.world == 1:
            return flag
        return self.summed(torch.tensor(float(flag), device=self.device))[0] > 0

    def all_gather_object(self, thing: S) -> list[S]:
        """A small thing of each rank, by rank."""
        if self.world == 1:
            return [thing]
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, thing)
        return found

    def all_gather(self, rows: Tensor) -> Tensor:
        """What each rank has of its share, `[sentence, ...]`, put together in the order of one process.

        A rank without a sentence gives anything of length zero.
        """
        if self.world == 1:
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
            found[rank :: self.world] = each[:count]
        return found.to(rows.device)

    def assert_same(self, what: str, **told: object) -> None:
        """Refuse a question that some rank does not ask, or asks of other data, settings or parameters."""
        if self.world == 1:
            return
        each = self.all_gather_object({"question": what, **{name: digest_of(value) for name, value in told.items()}})
        for rank, other in enumerate(each):
            apart = sorted(name for name in each[0] if each[0][name] != other.get(name))
            if apart:
                got = other["question"] if "question" in apart else f"other {', '.join(apart)}"
                raise BNetError(
                    f"torchrun, {each[0]['question']}",
                    expected="the same on every rank",
                    got=f"{got} on rank {rank}",
                    allowed="the same script and data for all; training.alone() for what one rank asks by itself",
                )

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            distributed.barrier()


ALONE = Ranks(0, 1, torch.device("cpu"))


def device_of(device: str | torch.device | None, network: HasParameters) -> torch.device:
    """The device that is asked for, if this machine has it; by default that of the net."""
    if device is None:
        return next((value.device for value in network.parameters.values()), torch.device("cpu"))
    wanted = "a device of this machine that computes"
    try:
        found = torch.device(device)
        if found.type != "meta":
            float(torch.zeros((), device=found))
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise BNetError("device", expected=wanted, got=device, allowed="'cpu', 'cuda', 'cuda:0', ...") from error
    if found.type == "meta":
        raise BNetError("device", expected=wanted, got=device)
    return found


@contextmanager
def ranks(device: torch.device) -> Iterator[Ranks]:
    """The processes of this run: those of torchrun, or of a group that the caller has made; else this one alone.

    The group that is made here stays for the next question. After an error it is given up: then a rank that ended is
    told of as such, and those that go on meet in a new one.
    """
    if _BY_ITSELF.get() or not several():
        yield Ranks(0, 1, device)
        return
    try:
        yield _met(device)
    except BaseException as error:
        why = _Own.give_up(error)
        if _is_of_another(error):
            raise _apart(why) from error
        raise


@contextmanager
def alone() -> Iterator[None]:
    """What one process asks by itself under torchrun: nothing is shared, and no other rank is waited for.

    >>> from bnet_transformer import training
    >>> with training.alone():
    ...     print("only here")
    only here
    """
    before = _BY_ITSELF.set(True)
    try:
        yield
    finally:
        _BY_ITSELF.reset(before)


def by_itself() -> bool:
    """True inside `alone`."""
    return _BY_ITSELF.get()


class _Own:
    """The group of processes that is made here, so that it is ours to close.

    Groups are counted in a store that all ranks see: each rank goes on to the first that none has given up, so that
    ranks meet again whatever became of each in between. Why a group was given up, and who ended, stands there too.
    """

    made, lost, number, rank, world = False, False, 0, 0, 1
    store: Any = None

    @classmethod
    def meet(cls, backend: str) -> None:
        """Be in a group with all ranks: the one that is open, or the next."""
        if cls.store is None:
            cls.rank, cls.world, cls.store = _store()
            atexit.register(cls.end)
        if cls.made and not distributed.is_initialized():
            cls.give_up(RuntimeError("the script ended the group"))
        until = time.monotonic() + PATIENCE.total_seconds()
        while not cls.made or cls.why():
            cls.close()
            while why := cls.why():
                if why == LOST:
                    raise _apart(why)
                cls.number += 1
            cls.store.set(f"group {cls.number}, rank {cls.rank}", "")
            late = [k for k in range(cls.world) if not cls.store.check([f"group {cls.number}, rank {k}"])]
            if not late:
                told: dict[str, Any] = {"store": _part(cls.store, f"group {cls.number}"), "timeout": PATIENCE}
                distributed.init_process_group(backend, rank=cls.rank, world_size=cls.world, **told)
                cls.made = True
            elif gone := cls.ended(late):
                raise _apart(gone)
            elif time.monotonic() > until:
                raise _apart(f"rank {late[0]} did not come in {PATIENCE.total_seconds():g} s")
            else:
                time.sleep(0.02)

    @classmethod
    def why(cls) -> str:
        """Why the group was given up by the first who did; nothing where none has."""
        key = f"given up {cls.number}"
        return LOST if cls.lost else cls.store.get(key).decode() if cls.store.check([key]) else ""

    @classmethod
    def ended(cls, some: Iterable[int]) -> str:
        """Which of some ranks told that it ends."""
        gone = [k for k in some if cls.store.check([f"ended {k}"])]
        return f"rank {gone[0]} ended" if gone else ""

    @classmethod
    def give_up(cls, error: BaseException) -> str:
        """Leave the group for an error; why the first left it who did."""
        told = str(error).rpartition("] ")[2].partition(". ")[0] or type(error).__name__
        try:
            if cls.store is not None and not cls.lost:
                if not _is_of_another(error):
                    told = f"rank {cls.rank}: {type(error).__name__}: {shown(str(error))}"
                elif "imed out" not in told:
                    told = cls.ended(range(cls.world)) or LOST
                told = cls.store.compare_set(f"given up {cls.number}", "", told).decode()
        except RuntimeError:  # the rank that held the store is gone, and none can meet
            told, cls.lost = LOST, True
        cls.close()
        return told

    @classmethod
    def close(cls) -> None:
        """End the group."""
        if cls.made and distributed.is_initialized():
            distributed.destroy_process_group()
        cls.made = False

    @classmethod
    def end(cls) -> None:
        """Tell the others that this process ends."""
        with suppress(RuntimeError):
            if not cls.lost:
                cls.store.set(f"ended {cls.rank}", "")
        cls.close()


def several() -> bool:
    """True where there are several processes."""
    if not distributed.is_available():
        return False
    if distributed.is_initialized() and not _Own.made:
        return distributed.get_world_size() > 1
    return "WORLD_SIZE" in os.environ and _of_environment("WORLD_SIZE", 1) > 1


def _met(device: torch.device) -> Ranks:
    """This process, when it has met the others."""
    if _Own.made or not distributed.is_initialized():
        _Own.meet("cpu:gloo,cuda:nccl" if device.type == "cuda" or torch.cuda.is_available() else "gloo")
        if device.type == "cuda":
            device = torch.device("cuda", _of_environment("LOCAL_RANK"))
            torch.cuda.set_device(device)
    return Ranks(distributed.get_rank(), distributed.get_world_size(), device)


def _part(store: Any, name: str) -> Any:
    """A part of a store, whose names mean nothing in others."""
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(name, store)


def _store() -> tuple[int, int, Any]:
    """This rank, how many there are, and the store that torchrun holds for them; else the first rank does, as long as
    it lives."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    world = _of_environment("WORLD_SIZE", 1)
    rank, port = _of_environment("RANK", below=world), _of_environment("MASTER_PORT", below=2**16)
    address, held = os.environ.get("MASTER_ADDR", ""), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not address:
        raise _unset("MASTER_ADDR")
    try:
        store = TCPStore(
            address, port, is_master=not rank and not held, timeout=PATIENCE, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        wanted, got = f"a port that ranks can meet at, {address}:{port}", str(error).partition(". ")[0]
        raise BNetError("torchrun", expected=wanted, got=got, allowed="another MASTER_PORT") from error
    # The store of torchrun outlives ranks that were killed.
    return rank, world, _part(store, f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")


def _of_environment(name: str, least: int = 0, below: int = 2**31) -> int:
    """A number that torchrun tells its processes."""
    told = os.environ.get(name, "")
    if not told.isdecimal() or not least <= int(told) < below:
        raise _unset(name)
    return int(told)


def _unset(name: str) -> BNetError:
    return BNetError(
        "torchrun",
        expected="WORLD_SIZE, RANK below it, MASTER_ADDR and MASTER_PORT in the environment, as torchrun sets them",
        got=f"{name}={os.environ[name]}" if name in os.environ else f"no {name}",
        allowed="torchrun --nproc-per-node 2 script.py; training.alone(); no WORLD_SIZE, for one process",
    )


def _apart(told: str) -> BNetError:
    return BNetError(
        "torchrun",
        expected="every rank to come to the same point",
        got=f"one that did not ({told})",
        allowed="the error of that rank says why; checkpoints=bt.Checkpoints(folder, resume=True) goes on",
    )


def _is_of_another(error: BaseException) -> bool:
    """True for what torch tells where another process is gone or does not come."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, distributed.DistError) or "gloo" in str(error) or "onnection closed" in str(error)
    )
