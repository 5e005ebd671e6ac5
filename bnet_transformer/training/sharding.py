"""The objective of several processes: data parallel, or with its parameters in shards."""

from __future__ import annotations

from torch import Tensor, nn

from bnet_transformer._core.distributed import Ranks
from bnet_transformer.errors import BNetError
from bnet_transformer.training.objective import Objective


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
