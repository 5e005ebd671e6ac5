"""Rates by step (constant, cosine, Noam) and the optimiser that follows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from bnet_transformer.errors import BNetError, one_of
from bnet_transformer.network import Network

SCHEDULES = ("constant", "cosine", "noam")
Schedule = Callable[[int], float]


def schedule_of(kind: str, rate: float | None, warmup: int, steps: int, dim: int | None) -> Schedule:
    """The rate of each step, counted from 1.

    >>> noam = schedule_of("noam", None, 400, 1000, 512)
    >>> round(noam(400) / noam(1600), 6)                    # rises to the warm-up, then falls as 1/sqrt(step)
    2.0
    """
    one_of("schedule", kind, SCHEDULES)
    factor = default_rate(kind) if rate is None else rate
    if kind == "noam":
        if warmup < 1 or dim is None:
            got = f"warmup={warmup}, dim={dim}"
            raise BNetError("schedule='noam'", expected="warmup= of at least 1, and the width dim=", got=got)
        return lambda step: factor * dim**-0.5 * min(step**-0.5, step * warmup**-1.5)

    def followed(step: int) -> float:
        risen = min(1.0, step / warmup) if warmup else 1.0
        if kind == "constant" or step <= warmup:
            return factor * risen
        return factor * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))

    return followed


def default_rate(kind: str) -> float:
    """The `rate` where none is told: a factor for Noam."""
    return 1.0 if kind == "noam" else 1e-3


def width_of(network: Network) -> int | None:
    """The width of the states, for Noam's schedule: of the last stack whose state is a vector."""
    for stack in reversed(network.declaration.stacks):
        for member in reversed(network.members):
            if member.family.stack == stack.name and member.family.role in stack.states and len(member.shape) == 1:
                return member.shape[0]
    return None


def optimiser_of(
    network: Network,
    named: Sequence[tuple[str, nn.Parameter]],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW, whose whole step is one operation; what decays are matrices and tables, not biases, gains and others."""
    own = {
        f"{member.owner}.{name}": len(parameter.shape)
        for member in network.members
        for name, parameter in member.parameters.items()
    }
    matrices = [value for name, value in named if own[name] >= 2]
    vectors = [value for name, value in named if own[name] < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps, fused=True)
