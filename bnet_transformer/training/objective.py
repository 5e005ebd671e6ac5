"""What training makes small: minus the log probability of what is observed, or a loss of the user's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from bnet_transformer.compiler import Module
from bnet_transformer.compiler.course import Course, Request
from bnet_transformer.compiler.module import laid_out
from bnet_transformer.compiler.seeing import seen
from bnet_transformer.data.batch import UNSEEN, Batch, is_observed
from bnet_transformer.data.task import Task
from bnet_transformer.errors import BNetError
from bnet_transformer.network import Member

Loss = Callable[[Module, Batch], Tensor]


class Objective(nn.Module):
    """A batch in, the sum of its losses out: of its observed words, or of its sentences where the loss is a user's."""

    def __init__(self, module: Module, task: Task, smoothing: float = 0.0, loss: Loss | None = None) -> None:
        super().__init__()
        self.module, self.task, self.smoothing, self.loss = module, task, smoothing, loss
        self.wanted = tuple(readout.family.name for readout in task.readouts)

    def forward(self, batch: Batch) -> Tensor:
        """The sum; divided by `count` it is the mean."""
        if self.loss is not None:
            found = self.loss(self.module, batch)
            if not isinstance(found, Tensor) or found.dim() or not found.is_floating_point():
                raise BNetError("loss", expected="one number: the mean over the batch, a tensor", got=found)
            if torch.is_grad_enabled() and not found.requires_grad:
                wanted = "a tensor that follows from parameters that training changes"
                raise BNetError("loss", expected=wanted, got="one without a gradient")
            return found * len(batch)
        course, _ = self.module.run(Request(self.wanted, batch.x, batch.mask, check_values=False))
        smoothing = self.smoothing if self.training else 0.0
        observed = batch.observed
        parts = [
            _surprise(course, readout, observed[name], smoothing)
            for name, readout in zip(self.wanted, self.task.readouts, strict=True)
        ]
        return torch.stack(parts).sum()

    def count(self, batch: Batch) -> int:
        """What the sum is divided by for the mean."""
        return len(batch) if self.loss is not None else batch.count


def _surprise(course: Course, readout: Member, observed: Tensor, smoothing: float) -> Tensor:
    """`- sum log P(y)` of a readout over what is observed of it."""
    at, parents = seen(course, readout)
    index = readout.family.index
    if readout.tpm.kind == "discrete":
        logits, target = readout.tpm.logits(at, *parents), laid_out(course, index, observed)
        lead = torch.broadcast_shapes(logits.shape[:-1], target.shape)
        flat = logits.expand(*lead, logits.shape[-1]).reshape(-1, logits.shape[-1])
        return functional.cross_entropy(
            flat, target.expand(lead).reshape(-1), ignore_index=UNSEEN, reduction="sum", label_smoothing=smoothing
        )
    here = is_observed(observed)
    value = observed.masked_fill(~here[..., None], 0.0)
    log_prob = readout.tpm.log_prob(at, laid_out(course, index, value), *parents)
    there = laid_out(course, index, here.to(log_prob.dtype)[..., None].expand_as(value))[..., 0]
    return -(log_prob * there).sum()
