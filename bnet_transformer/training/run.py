"""One run of training: its settings, its state, one step of it, and its checkpoints."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from bnet_transformer.compiler import Module
from bnet_transformer.errors import BNetError, number, one_of, seed_of, whole
from bnet_transformer.training import checkpoint
from bnet_transformer.training.data import Batch, Batches, Reader, mixed
from bnet_transformer.training.objective import Loss, Objective
from bnet_transformer.training.parallel import Ranks, laid_like, spread
from bnet_transformer.training.parallel import whole as put_together
from bnet_transformer.training.steps import SCHEDULES, optimiser_of, schedule_of, width_of
from bnet_transformer.training.task import Task, above

PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Recipe:
    """How a net is trained; with the same recipe, net and data a run has the same losses."""

    batch: int = 32
    smoothing: float = 0.0
    rate: float | None = None
    schedule: str = "constant"
    warmup: int = 0
    dim: int | None = None
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    weight_decay: float = 0.0
    clip: float | None = None
    precision: str | None = None
    words: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        whole("batch", self.batch)
        if not 0 <= number("smoothing", self.smoothing) < 1:
            raise BNetError("smoothing", expected="a share below 1", got=self.smoothing)
        for what in ("rate", "eps", "clip"):
            if getattr(self, what) is not None:
                number(what, getattr(self, what), above=0)
        one_of("schedule", self.schedule, SCHEDULES)
        whole("warmup", self.warmup, least=0)
        for what in ("dim", "words"):
            if getattr(self, what) is not None:
                whole(what, getattr(self, what))
        pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        if not pair or not all(0 <= number("betas", beta) < 1 for beta in self.betas):
            raise BNetError("betas", expected="two numbers from 0 to below 1", got=self.betas)
        if number("weight_decay", self.weight_decay) < 0:
            raise BNetError("weight_decay", expected="a number of at least 0", got=self.weight_decay)
        one_of("precision", self.precision, (None, *PRECISIONS))
        seed_of(self.seed)

    def check(self, task: Task) -> None:
        """Refuse what does not go with the net."""
        if self.smoothing and any(readout.tpm.kind == "continuous" for readout in task.readouts):
            raise BNetError("smoothing", expected="0, for a readout is real-valued", got=self.smoothing)
        wanted = PRECISIONS.get(self.precision or "")
        if wanted not in (None, torch.bfloat16, task.network.dtype):
            allowed = f"net.to({wanted}), or precision='bfloat16'"
            raise BNetError(
                "precision", expected=f"that of the net, {task.network.dtype}", got=self.precision, allowed=allowed
            )


class Run:
    """A net in training: parameters of its own, optimiser, losses so far."""

    def __init__(
        self, task: Task, recipe: Recipe, steps: int, ranks: Ranks, loss: Loss | None, shard: bool, settings: Any
    ) -> None:
        recipe.check(task)
        network = task.network
        network.one_type()
        own = {name: value.detach().clone().to(ranks.device) for name, value in network.parameters.items()}
        self.network, self.recipe, self.ranks, self.settings = network, recipe, ranks, dict(settings)
        self.module = Module(network.with_parameters(own))
        if loss is None:
            read = {m.owner for readout in task.readouts for m in above(network, readout)}
            for name, value in self.module.store.items():
                value.requires_grad_(value.requires_grad and name.rpartition("/")[0] in read)
        self.objective = Objective(self.module, task, recipe.smoothing, loss)
        self.spread: nn.Module = spread(self.objective, ranks, shard=shard, known_use=loss is None)
        self.named = [(k.replace("/", "."), v) for k, v in self.module.store.items() if v.requires_grad]
        if not self.named:
            raise BNetError("net", expected="parameters that training changes", got="none")
        self.optimiser = optimiser_of(network, self.named, recipe.betas, recipe.eps, recipe.weight_decay)
        self.rate = schedule_of(recipe.schedule, recipe.rate, recipe.warmup, steps, recipe.dim or width_of(network))
        self.losses: list[float] = []
        self.held_out: list[tuple[int, float]] = []
        self.best: dict[str, Tensor] = {}
        self.kept: int | None = None  # the step of the checkpoint on disk

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.losses)

    def train(self, batch: Batch) -> tuple[float, float]:
        """One step; its loss, and the length of the gradient."""
        loss, length = self.gradient(batch)
        self.follow(loss)
        return loss, length

    def gradient(self, batch: Batch) -> tuple[float, float]:
        """The loss of a batch and the length of its gradient, clipped where that is asked for; no parameter changes."""
        torch.manual_seed(mixed(self.recipe.seed, "dropout", self.step, self.ranks.rank))
        self.spread.train()
        total, count = self._sum(batch)
        (total * (self.ranks.world / count)).backward()
        (loss,) = self.ranks.summed(total / count)
        parameters = [value for _, value in self.named]
        clip = self.recipe.clip
        length = float(put_together(torch.nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)))
        return loss, length

    def follow(self, loss: float) -> None:
        """Change the parameters along the gradient of that loss."""
        rate, most = self.rate(self.step + 1), torch.finfo(self.network.dtype).max
        if max(rate / (1 - self.recipe.betas[0]), rate * self.recipe.weight_decay) > most:
            raise BNetError("rate", expected=f"a rate whose step {self.network.dtype} can hold", got=rate)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.losses.append(loss)
        self.optimiser.zero_grad(set_to_none=True)

    def evaluate(self, batches: list[Batch]) -> float:
        """The mean loss of held-out data, without dropout and without smoothing."""
        self.spread.eval()
        with torch.no_grad():
            found = [self._sum(batch) for batch in batches]
        (total,) = self.ranks.summed(torch.stack([part.double() for part, _ in found]).sum())
        return total / sum(count for _, count in found)

    def _sum(self, batch: Batch) -> tuple[Tensor, int]:
        """This process's share of the loss of a batch, and the count of the whole batch."""
        device = self.ranks.device
        count = self.objective.count(batch)
        if not count:
            raise BNetError("data", expected="something that is observed in every batch", got="nothing")
        if self.ranks.world > 1:
            batch = batch.share(self.ranks.rank, self.ranks.world)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16"):
            return self.spread(batch.to(device, self.network.dtype)), count

    def parameters(self) -> dict[str, Tensor]:
        """The parameters as they are, whole; every process calls it."""
        return {name: put_together(self.module.store[name.replace(".", "/")]) for name in self.network.parameters}

    def keep_best(self) -> None:
        """Remember the parameters as the best so far."""
        self.best = {name: value.clone() for name, value in self.parameters().items()}

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        tensors = {f"net/{name}": value for name, value in self.parameters().items()}
        for name, value in self.named:
            state = self.optimiser.state.get(value)
            if not state:  # a loss of the user's that does not read it
                continue
            tensors[f"first/{name}"] = put_together(state["exp_avg"])
            tensors[f"second/{name}"] = put_together(state["exp_avg_sq"])
            tensors[f"count/{name}"] = put_together(state["step"])
        tensors |= {f"best/{name}": value for name, value in self.best.items()}
        if self.ranks.first:
            found = checkpoint.Checkpoint(self.step, tensors, tuple(self.losses), tuple(self.held_out), self.settings)
            checkpoint.write(path, self.network, found)
        self.kept = self.step
        self.ranks.meet()

    def restore(self, path: Path, *, free: Collection[str] = ()) -> None:
        """Go on where a checkpoint stands; settings that are `free` may be others than those that it was made with."""
        found = checkpoint.read(path, self.network)
        checkpoint.check_settings(path, found, self.settings, free)
        with torch.no_grad():
            for name, value in found.part("net").items():
                kept = self.module.store[name.replace(".", "/")]
                kept.copy_(laid_like(value, kept))
        self._restore_optimiser(found.part("first"), found.part("second"), found.part("count"))
        self.losses, self.held_out, self.kept = list(found.losses), list(found.held_out), found.step
        self.best = {name: value.to(self.ranks.device) for name, value in found.part("best").items()}

    def _restore_optimiser(
        self, first: Mapping[str, Tensor], second: Mapping[str, Tensor], count: Mapping[str, Tensor]
    ) -> None:
        for name, value in self.named:
            if name in first:
                self.optimiser.state[value] = {
                    "step": count[name],
                    "exp_avg": laid_like(first[name], value),
                    "exp_avg_sq": laid_like(second[name], value),
                }


def settings_of(
    recipe: Recipe, reader: Reader, data: Batches, held_out: Batches | None, loss: Loss | None, steps: int
) -> dict[str, Any]:
    """What a resumed run must share with the run that it goes on with."""
    told = {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}
    told |= {"data": data.digest(), "start": reader.start, "stop": reader.stop}
    told |= {"held_out": None if held_out is None else held_out.digest(), "loss": None if loss is None else _code(loss)}
    return told | ({"steps": steps} if recipe.schedule == "cosine" else {})


def _code(loss: Loss) -> str:
    """What tells another function: its name and its instructions, but not what it closes over."""
    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    code = getattr(loss, "__code__", None) or getattr(type(loss).__call__, "__code__", None)
    return name if code is None else f"{name} {hashlib.sha256(_instructions(code)).hexdigest()[:16]}"


def _instructions(code: CodeType) -> bytes:
    """The instructions of a function with its names and constants, and of the functions inside; no line numbers."""
    inside = [part for part in code.co_consts if isinstance(part, CodeType)]
    plain = [part for part in code.co_consts if not isinstance(part, CodeType | frozenset)]
    own = code.co_code + repr((code.co_names, code.co_varnames, plain)).encode()
    return own + b"".join(_instructions(part) for part in inside)
