"""Several processes on one net: the same script under torchrun, each process (rank) with its share of the sentences.

Every rank asks the same and gets the same whole answer. What is summed over sentences is summed over ranks; what is
told of each sentence is put together in the order of one process.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn

from bnet_transformer.errors import BNetError
from bnet_transformer.network import Network
from bnet_transformer.training.objective import Objective

S = TypeVar("S")
PATIENCE = timedelta(minutes=10)  # for a rank that lives and does not come; one that died is missed at once
_BY_ITSELF: ContextVar[bool] = ContextVar("by itself", default=False)


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

    def mine(self, sentences: S) -> S:
        """This rank's share of a list, a tensor or a corpus: every `world`-th, from its own number on."""
        if self.world == 1:
            return sentences
        share, every = slice(self.rank, None, self.world), cast(Any, sentences)
        return cast(S, every[share] if isinstance(sentences, Tensor | Sequence) else every.take(share))

    def places(self, which: Tensor) -> Tensor:
        """Where sentences of the share stand among all."""
        return self.rank + self.world * which

    def hold(self, network: Network) -> Network:
        """The net on the device of this rank."""
        return network if device_of(None, network) == self.device else network.to(self.device)

    def summed(self, *numbers: Tensor) -> list[float]:
        """Numbers, summed over all processes."""
        total = torch.stack([number.detach().double() for number in numbers])
        if self.world > 1:
            distributed.all_reduce(total)
        return [float(number) for number in total]

    def total(self, value: Tensor) -> Tensor:
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

    def collected(self, thing: S) -> list[S]:
        """A small thing of each rank, by rank."""
        if self.world == 1:
            return [thing]
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, thing)
        return found

    def gathered(self, rows: Tensor) -> Tensor:
        """What each rank has of its share, `[sentence, ...]`, put together in the order of one process.

        A rank without a sentence gives anything of length zero.
        """
        if self.world == 1:
            return rows
        told = self.collected((len(rows), tuple(rows.shape[1:]), rows.dtype))
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

    def agree(self, what: str, **told: object) -> None:
        """Refuse a question that some rank does not ask, or asks of other data, settings or parameters."""
        if self.world == 1:
            return
        each = self.collected({"question": what, **{name: digest_of(value) for name, value in told.items()}})
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

    def meet(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            distributed.barrier()


ALONE = Ranks(0, 1, torch.device("cpu"))


def digest_of(thing: object) -> str:
    """What tells another thing: a hash of every number of tensors, in mappings and lists too; else of what is shown."""
    found = hashlib.sha256()
    _hash(found, thing)
    return found.hexdigest()[:16]


def _hash(found: Any, thing: object) -> None:
    if isinstance(thing, Tensor):
        found.update(f"{tuple(thing.shape)} {thing.dtype}".encode())
        dense = thing.detach().cpu().clone(memory_format=torch.contiguous_format)
        found.update(dense.reshape(-1).view(torch.uint8).numpy().data if dense.numel() else b"")
    elif isinstance(thing, Mapping):
        for name, value in sorted(thing.items()):
            found.update(f"{name} ".encode())
            _hash(found, value)
    elif isinstance(thing, list | tuple):
        found.update(f"{len(thing)} ".encode())
        for value in thing:
            _hash(found, value)
    else:
        told = getattr(thing, "digest", None)
        found.update((told() if callable(told) else repr(thing)).encode())


def device_of(device: str | torch.device | None, network: Network) -> torch.device:
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
    if _BY_ITSELF.get() or not _opened(device):
        yield Ranks(0, 1, device)
        return
    if device.type == "cuda" and _Own.made:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size(), device)
    except BaseException as error:
        _close()
        if _is_of_another(error):
            told = str(error).rpartition("] ")[2].partition(". ")[0]
            raise BNetError(
                "torchrun",
                expected="every rank to come to the same point",
                got=f"one that did not ({told})",
                allowed="the error of that rank says why; folder= and resume=True go on",
            ) from error
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


class _Own:
    """Whether the group of processes was made here, so that it is ours to close; how many were made so far."""

    made, count = False, 0


def _opened(device: torch.device) -> bool:
    """True where there are several processes; their group is made if it is not there."""
    if not distributed.is_available():
        return False
    if distributed.is_initialized():
        return distributed.get_world_size() > 1
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return False
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" or torch.cuda.is_available() else "gloo"
    store, rank, world = next(rendezvous("env://", timeout=PATIENCE))
    # The store may still have the addresses of a group that was given up, or of ranks that were killed.
    attempt, _Own.count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), _Own.count + 1
    store = PrefixStore(f"attempt {attempt}, group {_Own.count}", store)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    _Own.made = True
    atexit.register(_close)
    return True


def _close() -> None:
    """End the group, if it was made here."""
    if _Own.made and distributed.is_initialized():
        distributed.destroy_process_group()
    _Own.made = False


def _is_of_another(error: BaseException) -> bool:
    """True for what torch tells where another process is gone or does not come."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, distributed.DistError) or "gloo" in str(error) or "onnection closed" in str(error)
    )


def spread(objective: Objective, ranks: Ranks, *, shard: bool, known_use: bool) -> nn.Module:
    """The objective for all processes: its gradients averaged (DDP), or parameters and gradients split (FSDP2).

    `known_use` says that every parameter with a gradient is read by every batch.
    """
    if shard and ranks.world == 1:
        raise BNetError("shard", expected="several processes (torchrun --nproc-per-node 2)", got="one")
    if shard:
        from torch.distributed.fsdp import fully_shard

        flat = [name for name, value in objective.module.store.items() if value.requires_grad and not value.dim()]
        if flat:
            raise BNetError("shard", expected="parameters with a dim to split", got=f"a number: {flat[0]}")
        rest = {value for value in objective.parameters() if not value.dim()}
        fully_shard(objective, ignored_params=rest)
        return objective
    if ranks.world == 1:
        return objective
    devices = [ranks.device.index] if ranks.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(objective, device_ids=devices, find_unused_parameters=not known_use)


def whole(value: Tensor) -> Tensor:
    """A tensor put together from its shards; every process calls it."""
    full = getattr(value, "full_tensor", None)
    return value.detach() if full is None else full().detach()


def laid_like(value: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, split as another one is."""
    mesh = getattr(other, "device_mesh", None)
    value = value.to(other.device)
    if mesh is None:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, mesh, other.placements)  # type: ignore[attr-defined]
