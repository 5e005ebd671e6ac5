"""Several processes that train one net: the same script under torchrun, each process with its share of each batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from bnet_transformer.errors import BNetError
from bnet_transformer.network import Network
from bnet_transformer.training.objective import Objective


@dataclass(frozen=True)
class Ranks:
    """This process among those that train: its rank, how many there are, its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True in the process that writes and shows."""
        return self.rank == 0

    def summed(self, *numbers: Tensor) -> list[float]:
        """Numbers, summed over all processes."""
        total = torch.stack([number.detach().double() for number in numbers])
        if self.world > 1:
            distributed.all_reduce(total)
        return [float(number) for number in total]

    def any(self, flag: bool) -> bool:
        """True where it is true in some process."""
        if self.world == 1:
            return flag
        return self.summed(torch.tensor(float(flag), device=self.device))[0] > 0

    def meet(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            distributed.barrier()


def device_of(device: str | torch.device | None, network: Network) -> torch.device:
    """The device that is asked for, if this machine has it; by default that of the net."""
    if device is None:
        return next(iter(network.parameters.values())).device
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
    """The processes of this run: those of torchrun, or of a group that the caller has made; else this one alone."""
    if distributed.is_available() and distributed.is_initialized():
        yield Ranks(distributed.get_rank(), distributed.get_world_size(), device)
        return
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield Ranks(0, 1, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size(), device)
    finally:
        distributed.destroy_process_group()


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
