"""Parameters of several restarts, stacked in a leading dim, and one step of Adam for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BETA1, BETA2, EPS = 0.9, 0.99, 1e-8  # decay rates of the moments; EPS keeps divisions and logs finite


@dataclass
class ParameterSets:
    """The learned parameters of all active restarts, `[set, *shape]`, with their Adam moments.

    `restart_ids[i]` is the index of the restart in row i; the rows of dropped restarts are removed.
    """

    values: dict[str, Tensor]
    first_moments: dict[str, Tensor]
    second_moments: dict[str, Tensor]
    restart_ids: list[int]

    @classmethod
    def create(cls, values: dict[str, Tensor]) -> ParameterSets:
        """Create sets of parameters before the first step: all moments are 0."""
        first, second = ({name: torch.zeros_like(value) for name, value in values.items()} for _ in range(2))
        return cls(values, first, second, list(range(len(next(iter(values.values()))))))

    def select(self, indices: list[int]) -> None:
        """Keep only these rows."""
        for part in (self.values, self.first_moments, self.second_moments):
            for name, value in part.items():
                part[name] = value[indices]
        self.restart_ids = [self.restart_ids[i] for i in indices]

    def get(self, index: int) -> dict[str, Tensor]:
        """Return a copy of the parameters of one row, without the leading dim."""
        return {name: value[index].detach().clone() for name, value in self.values.items()}


def adam_step(
    sets: ParameterSets, gradients: Mapping[str, Tensor], step: int, rate: float, clip: float | None
) -> Tensor:
    """Take one Adam step that increases the objective, independently for each set.

    Args:
        sets: The parameters, `[set, *shape]`, and their moments; the function replaces both.
        gradients: The gradient by parameter, `[set, *shape]`; a parameter without a gradient does not change.
        step: The number of the step, counted from 1.
        rate: The learning rate.
        clip: The maximum gradient norm of a set; None for no clipping.

    Returns:
        Whether the gradient of each set is finite, `[set]`.
    """
    # Kingma and Ba 2015, algorithm 1, elementwise: the sets do not interact, and one stacked step equals one step of
    # each restart. `torch.optim` would compute one norm for all sets, so one diverged restart would clip or stop all.
    # A set whose gradient is not finite gets a gradient of 0, and the caller drops it.
    square = squared_grad_norm(gradients)
    is_finite = square.isfinite()
    factor = torch.ones_like(square) if clip is None else (clip / square.sqrt().clamp(min=1e-30)).clamp(max=1.0)
    for name, g in gradients.items():
        shape = (-1, *[1] * (g.dim() - 1))
        g = torch.where(is_finite.reshape(shape), g * factor.reshape(shape).to(g.dtype), 0.0)
        m = sets.first_moments[name] = BETA1 * sets.first_moments[name] + (1 - BETA1) * g
        s = sets.second_moments[name] = BETA2 * sets.second_moments[name] + (1 - BETA2) * g.square()
        m, s = m / (1 - BETA1**step), s / (1 - BETA2**step)
        sets.values[name] = sets.values[name] + rate * m / (s.sqrt() + EPS)
    return is_finite


def squared_grad_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """Compute the squared gradient norm of each set over all parameters, `[set]`, in float64."""
    return torch.stack([g.reshape(len(g), -1).double().square().sum(1) for g in gradients.values()]).sum(0)
