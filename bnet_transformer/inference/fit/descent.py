"""Several sets of parameters that learn at once: AdamW steps on the exact marginal, closed-form steps for tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer._core.distributed import Ranks
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer.data import Batch
from bnet_transformer.inference.fit.objective import Objective
from bnet_transformer.network import Network
from bnet_transformer.network.network import declare

FIRST, SECOND, SMALL = 0.9, 0.99, 1e-8  # of Adam: how long means last, and what keeps division sound


@dataclass
class Sets:
    """The learned parameters of each restart that is still followed, and the moments of AdamW, one restart in front."""

    values: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    restart_ids: list[int]

    def keep(self, places: list[int]) -> None:
        """Follow only some."""
        for part in (self.values, self.first, self.second):
            for name, value in part.items():
                part[name] = value[places]
        self.restart_ids = [self.restart_ids[place] for place in places]

    def one(self, place: int) -> dict[str, Tensor]:
        """The parameters of one."""
        return {name: value[place].detach().clone() for name, value in self.values.items()}


def init_restarts(network: Network, names: tuple[str, ...], restarts: int, seed: int, device: torch.device) -> Sets:
    """The net's own parameters for the first restart, newly drawn ones for the others; logits of -inf for all."""
    own = [{name: network.parameters[name] for name in names}]
    for r in range(1, restarts):
        drawn = declare(network.declaration, seed=derive_seed(seed, "restart", r)).parameters
        new = {name: drawn[name].to(own[0][name]) for name in names}
        own.append({name: value.where(own[0][name] > -torch.inf, -torch.inf) for name, value in new.items()})
    values = {name: torch.stack([each[name].detach().to(device) for each in own]) for name in names}
    zeros = {name: torch.zeros_like(value) for name, value in values.items()}
    return Sets(values, zeros, {k: v.clone() for k, v in zeros.items()}, list(range(restarts)))


def bound_and_grad(
    objective: Objective, sets: Sets, corpus: Batch, total: int, power: float, ranks: Ranks, autocast: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over sentences of `log P(y) + log P(parameters) / total`, `[set]`, and its gradient.

    Under torchrun each process takes its share of the sentences, and all get the sum.
    """
    size = len(corpus)
    part = corpus if ranks.world == 1 else corpus.take(slice(ranks.rank, None, ranks.world))
    leaves = {name: value.detach().requires_grad_() for name, value in sets.values.items()}
    with torch.enable_grad(), torch.autocast(ranks.device.type, torch.bfloat16, enabled=autocast):
        bound = objective.log_prior(leaves) / total / ranks.world
        if len(part):
            bound = bound + objective.log_evidences(leaves, part, power).sum(1) / size
    gradients = torch.autograd.grad(bound.sum(), list(leaves.values()), allow_unused=True)
    slopes = [torch.zeros_like(v) if g is None else g for g, v in zip(gradients, leaves.values(), strict=True)]
    found = [ranks.all_reduce(each) for each in (bound.detach(), *slopes)]
    return found[0], dict(zip(leaves, found[1:], strict=True))


def squared_length(gradient: Mapping[str, Tensor]) -> Tensor:
    """The square of the length of each set's gradient, `[set]`."""
    return torch.stack([g.reshape(len(g), -1).double().square().sum(1) for g in gradient.values()]).sum(0)


def adamw_step(
    sets: Sets, gradient: Mapping[str, Tensor], step: int, rate: float, clip: float | None, decay: float
) -> Tensor:
    """One step of AdamW up the gradient, for each set by itself; which sets have sound gradients, `[set]`."""
    square = squared_length(gradient)
    sound = square.isfinite()
    factor = torch.ones_like(square) if clip is None else (clip / square.sqrt().clamp(min=1e-30)).clamp(max=1.0)
    for name, g in gradient.items():
        wide = (-1, *[1] * (g.dim() - 1))
        g = torch.where(sound.reshape(wide), g * factor.reshape(wide).to(g.dtype), 0.0)
        m = sets.first[name] = FIRST * sets.first[name] + (1 - FIRST) * g
        s = sets.second[name] = SECOND * sets.second[name] + (1 - SECOND) * g.square()
        m, s = m / (1 - FIRST**step), s / (1 - SECOND**step)
        sets.values[name] = (1 - rate * decay) * sets.values[name] + rate * m / (s.sqrt() + SMALL)
    return sound


def m_step(objective: Objective, sets: Sets, parts: list[Batch], power: float, ranks: Ranks) -> Tensor:
    """The M-step in closed form: `theta = (counts + concentration - 1) / sum`, for the tables that choose.

    Returns the log evidence of all sentences before it, `[set]`. Under torchrun the parts are this process's share.
    """
    totals = {name: torch.zeros_like(sets.values[name]) for name in sorted(objective.choosing)}
    bound = torch.zeros(len(sets.restart_ids), dtype=objective.network.dtype, device=ranks.device)
    for part in parts:
        counts, evidence = torch.vmap(lambda one, part=part: objective.counts(one, part, power))(sets.values)
        bound = bound + evidence
        for name, count in counts.items():
            totals[name] = totals[name] + count
    bound, totals = ranks.all_reduce(bound), {name: ranks.all_reduce(count) for name, count in totals.items()}
    for name, count in totals.items():
        share = (count + objective.learned.tables[name] - 1).clamp(min=SMALL)
        share = share.where(sets.values[name] > -torch.inf, 0.0)
        sets.values[name] = (share / share.sum(-1, keepdim=True)).log()
    return bound
