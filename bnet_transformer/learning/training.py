"""`train`: gradient descent over minibatches with held-out losses, early stopping, checkpoints and resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bnet_transformer._core.checks import (
    check_choice,
    check_float,
    check_int,
    check_options,
    check_seed,
    set_frozen,
    suggest_config_for_options,
)
from bnet_transformer._core.distributed import DistributedContext, distributed_context, resolve_device, single_process
from bnet_transformer._core.files import as_path, derive_seed, describe_code
from bnet_transformer._core.process import translate_memory_errors
from bnet_transformer._core.results import Result
from bnet_transformer._core.tensors import DeferredScalars, enable_gradients, fork_torch_rng, seed_rngs
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.gather import ExecutionState, batch_to_request, gather_parents, lay_out_value
from bnet_transformer.data import Batch, Dataset
from bnet_transformer.data.batch import UNOBSERVED, Task, check_has_words, infer_task, infer_trainable_task, is_observed
from bnet_transformer.data.dataset import ExampleReader, check_batch_mask, read_dataset
from bnet_transformer.declare import Network, NodeSpec, as_network
from bnet_transformer.declare.network import restore_type
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.inference.elimination import eliminate_choices, log_evidence
from bnet_transformer.inference.factors import compute_factors, request_factors
from bnet_transformer.learning.loop import (
    FILE_NAME,
    Checkpoint,
    Checkpoints,
    LoopConfig,
    Run,
    read_checkpoint,
    run_steps,
)
from bnet_transformer.tpm import Dropout

__all__ = ["AdamW", "EarlyStopping", "Execution", "Trained", "load_checkpoint", "single_process", "train"]


# --------------------------------------------------------------------------------------------------------------------
# Configs of a run: the optimizer and its schedule, early stopping, and the execution of a step.

PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class AdamW:
    """The AdamW optimizer and the schedule of its learning rate.

    Args:
        rate: The peak learning rate, 0.001 by default. For the schedule `"noam"` it is a factor, 1 by default.
        schedule: `"constant"`, `"cosine"` (decay to 0 at the last step) or `"noam"` (Vaswani et al. 2017).
        warmup: The number of steps in which the learning rate rises linearly.
        dim: The width of the hidden states, for the schedule `"noam"`; by default the width of the net.
        betas: The decay rates of the first and second moment.
        eps: A term that is added to the denominator for numerical stability.
        weight_decay: The weight decay of matrices and tables. Biases and gains do not decay.
        clip: The maximum norm of the gradient; None for no clipping.

    Raises:
        BNetError: If an option is out of range.

    >>> import bnet_transformer as bt
    >>> bt.AdamW(0.01, schedule="cosine").highest_rate
    0.01
    """

    rate: float | None = None
    schedule: str = "constant"
    warmup: int = 0
    dim: int | None = None
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    weight_decay: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        check_options(self, check_float, "rate", "eps", "clip", above=0)
        check_choice("schedule", self.schedule, ("constant", "cosine", "noam"))
        check_options(self, check_int, "warmup", minimum=0)
        check_options(self, check_int, "dim")
        is_pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
        if not is_pair or not all(0 <= check_float("betas", beta) < 1 for beta in self.betas):
            raise BNetError("betas", expected="two numbers from 0 to below 1", actual=self.betas)
        decay = check_float("weight_decay", self.weight_decay, minimum=0)
        set_frozen(self, betas=tuple(map(float, self.betas)), weight_decay=decay)

    @property
    def highest_rate(self) -> float:
        """The peak learning rate, or the factor of the Noam schedule."""
        return self.rate or (1.0 if self.schedule == "noam" else 1e-3)


@dataclass(frozen=True)
class EarlyStopping:
    """When training stops early.

    Args:
        patience: The number of consecutive held-out losses without an improvement after which training stops. The
            result is then the net with the lowest held-out loss. It requires `held_out`. None runs all steps.
        bound: The maximum loss. Training stops with an error if the loss is above it or not finite. None for no
            maximum.

    Raises:
        BNetError: If an option is out of range.

    >>> import bnet_transformer as bt
    >>> bt.EarlyStopping(patience=3).is_valid(2.0)
    True
    """

    patience: int | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        check_options(self, check_int, "patience")
        check_options(self, check_float, "bound")

    def is_valid(self, loss: float, grad_norm: float = 0.0) -> bool:
        """Return True if training may continue after this loss and gradient norm.

        Args:
            loss: The loss of the step.
            grad_norm: The norm of the gradient of the step.

        Returns:
            True if both are finite and the loss is at most `bound`.
        """
        return math.isfinite(loss + grad_norm) and (self.bound is None or loss <= self.bound)


@dataclass(frozen=True)
class Execution:
    """How a step is executed. The results of all settings are equal up to rounding.

    Args:
        precision: `"bfloat16"` computes matrix products in bfloat16. None uses the dtype of the net; the name of this
            dtype is also accepted.
        compile: True compiles the net and its loss with `torch.compile`.

    Raises:
        BNetError: If an option has no such value.

    >>> import bnet_transformer as bt
    >>> bt.Execution(precision="bfloat16").compile
    False
    """

    precision: str | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, (None, *PRECISIONS))
        check_choice("compile", self.compile, (True, False))


@dataclass(frozen=True)
class TrainConfig:
    """The options of `train` that, with the net and the data, determine the losses."""

    batch: int = 32
    smoothing: float = 0.0
    words: int | None = None
    seed: int = 0
    optimizer: AdamW = AdamW()
    early_stopping: EarlyStopping = EarlyStopping()
    execution: Execution = Execution()

    def __post_init__(self) -> None:
        set_frozen(self, batch=check_int("batch", self.batch), smoothing=check_float("smoothing", self.smoothing))
        if not 0 <= self.smoothing < 1:
            raise BNetError("smoothing", expected="a number of at least 0 and below 1", actual=self.smoothing)
        check_options(self, check_int, "words")
        set_frozen(self, seed=check_seed(self.seed))
        for option, kind in (("optimizer", AdamW), ("early_stopping", EarlyStopping), ("execution", Execution)):
            if not isinstance(getattr(self, option), kind):
                raise BNetError(option, expected=f"a bt.{kind.__name__}(...)", actual=getattr(self, option))

    def check(self, task: Task) -> None:
        """Raise an error if an option does not apply to the net."""
        if self.smoothing and task.has_choices:
            raise BNetError(
                "smoothing", expected="0, because the readouts depend on latent choices", actual=self.smoothing
            )
        if self.smoothing and any(readout.tpm.kind == "continuous" for readout in task.readouts):
            raise BNetError("smoothing", expected="0, because a readout is real-valued", actual=self.smoothing)
        precision, dtype = self.execution.precision, task.network.dtype
        requested = PRECISIONS.get(precision or "")
        if requested not in (None, torch.bfloat16, dtype):
            hint = f"Convert the net with net.to({requested}), or use precision='bfloat16'"
            raise BNetError("precision", expected=f"the dtype of the net, {dtype}", actual=precision, hint=hint)


def create_schedule(kind: str, rate: float | None, warmup: int, steps: int, dim: int | None) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 1.

    >>> noam = create_schedule("noam", None, 400, 1000, 512)
    >>> round(noam(400) / noam(1600), 6)                    # rises to the warm-up, then falls as 1/sqrt(step)
    2.0
    """
    factor = AdamW(rate, kind).highest_rate
    if kind == "noam":  # Vaswani et al. 2017, equation 3
        if warmup < 1 or dim is None:
            actual = f"warmup={warmup}, dim={dim}"
            expected = "warmup= of at least 1 and the width of the hidden states, dim="
            raise BNetError("schedule='noam'", expected=expected, actual=actual)
        return lambda step: factor * dim**-0.5 * min(step**-0.5, step * warmup**-1.5)

    def schedule(step: int) -> float:
        warmup_factor = min(1.0, step / warmup) if warmup else 1.0
        if kind == "constant" or step <= warmup:
            return factor * warmup_factor
        # Loshchilov and Hutter 2017, equation 5, without restarts
        return factor * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))

    return schedule


# --------------------------------------------------------------------------------------------------------------------
# The loss of training, and the state of a run: one step, the evaluation, checkpoints.

Loss = Callable[[CompiledModule, Batch], Tensor]
MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq", "count": "step"}  # the state of AdamW in a checkpoint
IMPOSSIBLE_LOSS = 1e20  # below the mean loss of any batch with probability zero, which is -LOG_ZERO over its words


class TrainingLoss(nn.Module):
    """The summed loss of a batch, over its observed words; for a loss function of the user, over its sentences.

    The loss is `- log P(y | x)`. If the readouts depend on latent choices, they are summed out exactly.
    """

    def __init__(self, module: CompiledModule, task: Task, smoothing: float = 0.0, loss_fn: Loss | None = None) -> None:
        super().__init__()
        self.module, self.task, self.smoothing, self.loss_fn = module, task, smoothing, loss_fn
        self.readout_indices = tuple(readout.group.index for readout in task.readouts)

    def forward(self, batch: Batch) -> Tensor:
        """Compute the summed loss, `[]`. Divided by `count_terms` it is the mean."""
        if self.loss_fn is not None:
            loss = self.loss_fn(self.module, batch)
            if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
                expected = "a function that returns the mean over the batch as a tensor of one number"
                raise BNetError("loss", expected=expected, actual=loss)
            if torch.is_grad_enabled() and not loss.requires_grad:
                raise BNetError("loss", expected="a tensor that depends on trainable parameters")
            return loss * len(batch)
        network = self.module.network
        if self.task.has_choices:
            request, evidence = batch_to_request(network, batch, training=self.training), batch.index_evidence(network)
            factor_request = request_factors(self.module, evidence, None, request)
            return -eliminate_choices(*compute_factors(self.module, factor_request)).sum()
        state, _ = self.module.execute(batch_to_request(network, batch, self.readout_indices))
        smoothing = self.smoothing if self.training else 0.0
        observed = batch.observed
        parts = [
            _negative_log_likelihood(state, readout, observed[readout.group.name], smoothing)
            for readout in self.task.readouts
        ]
        return torch.stack(parts).sum()

    def count_terms(self, batch: Batch) -> int:
        """Count the terms of the sum: observed words, or sentences for a loss function of the user."""
        return len(batch) if self.loss_fn is not None else batch.count


def _negative_log_likelihood(state: ExecutionState, readout: NodeSpec, observed: Tensor, smoothing: float) -> Tensor:
    """Compute `- sum log P(y)` of a readout over its observed words, `[]`."""
    context, parents = gather_parents(state, readout)
    index = readout.group.index
    if readout.tpm.kind == "discrete":
        logits, target = readout.tpm.logits(context, *parents), lay_out_value(state, index, observed)
        shape = torch.broadcast_shapes(logits.shape[:-1], target.shape)
        flat = logits.expand(*shape, logits.shape[-1]).reshape(-1, logits.shape[-1])
        return functional.cross_entropy(
            flat, target.expand(shape).reshape(-1), ignore_index=UNOBSERVED, reduction="sum", label_smoothing=smoothing
        )
    is_known = is_observed(observed)
    value = observed.masked_fill(~is_known[..., None], 0.0)
    log_prob = readout.tpm.log_prob(context, lay_out_value(state, index, value), *parents)
    weight = lay_out_value(state, index, is_known.to(log_prob.dtype)[..., None].expand_as(value))[..., 0]
    return -(log_prob * weight).sum()


class PreparedBatch(NamedTuple):
    """The input of a step: the shard of a batch of this process, the divisor of the summed loss, and the stop flag."""

    batch: Batch
    divisor: Tensor
    should_stop: Tensor


class Trainer(Run):
    """A net in training: a copy of its parameters, the optimizer, and the losses so far.

    The computation of a step and its update do not wait for the device, so the host runs ahead of it. `drain_losses`
    reads the losses that are finished.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        steps: int,
        ranks: DistributedContext,
        dataset: Dataset,
        held_out: Sequence[Batch] = (),
        loss: Loss | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        config.check(task)
        optimizer = config.optimizer
        network = task.network
        network.check_single_dtype()
        parameters = {name: value.detach().clone().to(ranks.device) for name, value in network.parameters.items()}
        self.network, self.config, self.ranks, self.settings = network, config, ranks, settings or {}
        self.steps, self.dataset, self.held_out_batches = steps, dataset, held_out
        self.module = CompiledModule(network.with_parameters(parameters))
        if loss is None:
            read = {m.param_prefix for readout in task.readouts for m in network.ancestral_specs(readout)}
            for name, value in self.module.store.items():
                value.requires_grad_(value.requires_grad and name.rpartition("/")[0] in read)
        self.training_loss = TrainingLoss(self.module, task, config.smoothing, loss)
        if config.execution.compile:
            self.training_loss.compile()
        # A check depends on values, so `torch.compile` would compile a loss twice: with the check and without it.
        self.should_check_values = not (config.execution.compile and ranks.device.type == "cuda")
        self.ddp_module: nn.Module = self.training_loss
        if ranks.world_size > 1:
            devices = [ranks.device.index] if ranks.device.type == "cuda" else None
            self.ddp_module = nn.parallel.DistributedDataParallel(
                self.training_loss, device_ids=devices, find_unused_parameters=loss is not None
            )
        self.trainable_parameters = [(k.replace("/", "."), v) for k, v in self.module.store.items() if v.requires_grad]
        if not self.trainable_parameters:
            expected = "a net with trainable parameters"
            raise BNetError("net", expected=expected, hint="Unfreeze parameters, or train another net")
        self.optimizer = create_optimizer(network, self.trainable_parameters, optimizer)
        dim = optimizer.dim or get_state_width(network)
        self.schedule = create_schedule(optimizer.schedule, optimizer.rate, optimizer.warmup, steps, dim)
        self.is_stochastic = loss is not None or any(map(_is_stochastic, network.specs))
        self.deferred_scalars = DeferredScalars.for_device(ranks.device)  # loss, gradient norm, stop flag of a step
        self.losses: list[float] = []  # at least the losses of completed steps: a loss is known before its update
        self.held_out: list[tuple[int, float]] = []
        self.best: dict[str, Tensor] = {}
        self.last_batch: Batch | None = None
        self.is_stopped = False  # by Ctrl-C in some process

    def prepare_batch(self, batch: Batch, should_stop: bool = False) -> PreparedBatch:
        """Move this process's shard of a batch to the device, with the divisor of the summed loss.

        The batch is checked here, on the host. The stop flag `should_stop` is shared with the other processes.
        """
        count, device = self.training_loss.count_terms(batch), self.ranks.device
        if not count:
            raise BNetError("data", expected="at least one observed word in every batch")
        # A loss of the user may pass any values. A check on a GPU waits for the device, so it is done only in step 0.
        self.module.check_values = self.should_check_values and (device.type == "cpu" or not self.step)
        if self.training_loss.loss_fn is None:
            check_batch_mask(self.training_loss.task, batch)
        if self.ranks.world_size > 1:
            batch = batch.shard(self.ranks.rank, self.ranks.world_size)
        numbers = (torch.full((), float(n), dtype=torch.float64, device=device) for n in (count, should_stop))
        return PreparedBatch(batch.to(device, self.network.dtype), *numbers)

    def compute_gradients(self, prepared: PreparedBatch) -> None:
        """Compute the gradient of a batch and clip it. The parameters do not change."""
        if self.is_stochastic:
            seed_rngs(derive_seed(self.config.seed, "dropout", self.step, self.ranks.rank), self.ranks.device)
        if not self.ddp_module.training:
            self.ddp_module.train()
        mean = self._summed_loss(prepared.batch).double() / prepared.divisor
        (mean * self.ranks.world_size).backward()  # DDP averages the gradients of the ranks
        loss, should_stop = self.ranks.all_reduce(torch.stack([mean.detach(), prepared.should_stop]))
        parameters = [value for _, value in self.trainable_parameters]
        grad_norm = get_total_norm([value.grad for value in parameters if value.grad is not None])
        if self.config.optimizer.clip is not None:
            clip_grads_with_norm_(parameters, self.config.optimizer.clip, grad_norm)
        self.deferred_scalars.append(torch.stack([loss, grad_norm.double(), should_stop]))

    def compute(self, is_interrupted: bool, is_due: bool) -> None:
        """Compute the gradient of the batch of this step, and check the losses that are finished."""
        self.last_batch = self.dataset(self.step)
        self.compute_gradients(self.prepare_batch(self.last_batch, is_interrupted))
        self.drain_losses(all=is_due)

    def update(self) -> None:
        """Take one step of the optimizer along the gradient."""
        rate, max_value = self.schedule(self.step + 1), torch.finfo(self.network.dtype).max
        if max(rate / (1 - self.config.optimizer.betas[0]), rate * self.config.optimizer.weight_decay) > max_value:
            expected = f"a learning rate whose step does not overflow {self.network.dtype}"
            raise BNetError("rate", expected=expected, actual=rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def should_stop(self, is_interrupted: bool) -> bool:
        """Return True after Ctrl-C. Several processes share it with the losses, so they stop some steps later."""
        return self.is_stopped or (self.ranks.world_size == 1 and is_interrupted)

    def describe(self) -> Mapping[str, object]:
        """Return the last loss that is finished."""
        return {"loss": f"{self.losses[-1]:.4f}"} if self.losses else {}

    def drain_losses(self, *, all: bool = False) -> None:
        """Read the losses of the finished steps, and raise an error for an invalid one.

        `all` also waits for the steps that are not finished.
        """
        for loss, grad_norm, should_stop in self.deferred_scalars.pop_ready(all=all):
            if loss > IMPOSSIBLE_LOSS and self.training_loss.loss_fn is None and self.training_loss.task.has_choices:
                self._check_possible(len(self.losses))
            if not self.config.early_stopping.is_valid(loss, grad_norm):
                raise self._create_error(f"loss {loss:g} and gradient norm {grad_norm:g}")
            self.is_stopped = self.is_stopped or should_stop > 0
            self.losses.append(loss)

    def _check_possible(self, step: int) -> None:
        """Raise an error if the batch of a step has an impossible observation; the error names the first.

        Only an infinite loss requires this other pass, on the net as it was before the first step.
        """
        batch = self.dataset(step).to(self.ranks.device, self.network.dtype)
        module = CompiledModule(self.network).to(self.ranks.device).eval()
        try:
            with torch.no_grad():
                log_evidence(module, batch.evidence, batch.x, batch.mask)
        except EvidenceError as error:
            raise EvidenceError(f"{error.subject} in the batch of step {step + 1}", **error.parts) from error

    def _create_error(self, actual: str) -> BNetError:
        """Create the error of an invalid loss."""
        bound = self.config.early_stopping.bound
        expected = "a finite loss" if bound is None else f"a finite loss of at most {bound:g}"
        rate = f"a rate= below {self.config.optimizer.highest_rate:g}"
        remedies = f"{rate}, a longer warmup=, clip=1.0, or float32 instead of bfloat16"
        return self.divergence_error(expected, actual, remedies, len(self.losses) + 1)

    def check_last_step(self) -> None:
        """Raise an error if the loss of the last parameters on the last batch is not valid."""
        self.drain_losses(all=True)
        loss = self.compute_loss([cast(Batch, self.last_batch)])
        if not self.config.early_stopping.is_valid(loss):
            raise self._create_error(f"loss {loss:g} on the batch of step {self.step}")

    def compute_loss(self, batches: Sequence[Batch]) -> float:
        """Compute the mean loss of batches, without dropout and label smoothing."""
        self.ddp_module.eval()
        with torch.no_grad():
            losses = [self._summed_loss(self.prepare_batch(batch).batch).double() for batch in batches]
        total = float(self.ranks.all_reduce(torch.stack(losses).sum()))
        return total / sum(map(self.training_loss.count_terms, batches))

    def evaluate(self) -> None:
        """Compute the held-out loss; with patience, keep the parameters with the lowest one."""
        if not self.held_out_batches:
            return
        self.drain_losses(all=True)
        loss, best = (
            self.compute_loss(self.held_out_batches),
            min((loss for _, loss in self.held_out), default=math.inf),
        )
        self.held_out.append((self.step, loss))
        if self.config.early_stopping.patience is not None and loss < best:
            self.best = {name: value.clone() for name, value in self.parameters().items()}

    @property
    def is_finished(self) -> bool:
        """True after `patience` held-out losses without an improvement."""
        losses, patience = [loss for _, loss in self.held_out], self.config.early_stopping.patience
        return bool(losses) and patience is not None and len(losses) - 1 - losses.index(min(losses)) >= patience

    def _summed_loss(self, batch: Batch) -> Tensor:
        """Compute this process's part of the summed loss."""
        is_mixed = self.config.execution.precision == "bfloat16"
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=is_mixed):
            loss: Tensor = self.ddp_module(batch)
        return loss

    def parameters(self) -> dict[str, Tensor]:
        """Return the current parameters."""
        return {name: self.module.store[name.replace(".", "/")].detach() for name in self.network.parameters}

    def snapshot(self) -> Checkpoint:
        """Create a checkpoint. It has no state of AdamW for parameters on which a loss of the user does not depend."""
        tensors = {f"net/{name}": value for name, value in self.parameters().items()}
        for name, value in self.trainable_parameters:
            for prefix, key in MOMENTS.items() if self.optimizer.state.get(value) else ():
                tensors[f"{prefix}/{name}"] = self.optimizer.state[value][key]
        tensors |= {f"best/{name}": value for name, value in self.best.items()}
        return Checkpoint(self.step, tensors, tuple(self.losses[: self.step]), tuple(self.held_out), self.settings)

    def restore(self, saved: Checkpoint) -> None:
        """Load the state of a checkpoint."""
        with torch.no_grad():
            for name, value in saved.get_tensors("net").items():
                self.module.store[name.replace(".", "/")].copy_(value)
        moments = {key: saved.get_tensors(prefix) for prefix, key in MOMENTS.items()}
        for name, value in self.trainable_parameters:
            if name in moments["step"]:
                # The fused step of AdamW requires the memory layout of the parameter.
                state = {k: torch.empty_like(value).copy_(part[name]) for k, part in moments.items() if k != "step"}
                self.optimizer.state[value] = {"step": moments["step"][name].to(value.device), **state}
        self.losses, self.held_out = list(saved.losses), list(saved.held_out)
        self.best = {name: value.to(self.ranks.device) for name, value in saved.get_tensors("best").items()}


def get_resume_settings(
    config: TrainConfig, reader: ExampleReader, data: Dataset, held_out: Dataset | None, loss: Loss | None, steps: int
) -> dict[str, Any]:
    """Return the settings that must be equal in a resumed run and in the run that wrote the checkpoint."""
    settings = {name: getattr(config, name) for name in ("batch", "smoothing", "words", "seed")}
    settings |= {**vars(config.optimizer), "precision": config.execution.precision, "data": data.digest()}
    settings |= {"start": reader.start, "stop": reader.stop}
    settings["held_out"] = None if held_out is None else held_out.digest()
    settings["loss"] = None if loss is None else describe_code(loss)
    return settings | ({"steps": steps} if config.optimizer.schedule == "cosine" else {})


def _is_stochastic(spec: NodeSpec) -> bool:
    """Return True if a node may draw random numbers in training; a TPM of another package may."""
    is_builtin = type(spec.tpm).__module__.partition(".")[0] == __name__.partition(".")[0]
    return not is_builtin or (isinstance(spec.tpm, Dropout) and spec.tpm.p > 0)


def get_state_width(network: Network) -> int | None:
    """Return the width of the hidden states for the Noam schedule: of the last stack whose state is a vector."""
    for stack in reversed(network.declaration.stacks):
        for spec in reversed(network.specs):
            if spec.group.stack == stack.name and spec.group.role in stack.states and len(spec.shape) == 1:
                return spec.shape[0]
    return None


def create_optimizer(
    network: Network, trainable_parameters: Sequence[tuple[str, nn.Parameter]], options: AdamW
) -> torch.optim.AdamW:
    """Create a fused AdamW. Matrices and tables decay; vectors (biases, gains) do not."""
    # Decoupled weight decay (Loshchilov and Hutter 2019). Biases and gains have no scale that decay could regularise.
    ranks = {f"{m.param_prefix}.{name}": len(p.shape) for m in network.specs for name, p in m.parameters.items()}
    matrices = [value for name, value in trainable_parameters if ranks[name] >= 2]
    vectors = [value for name, value in trainable_parameters if ranks[name] < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    non_empty = [group for group in groups if group["params"]]
    return torch.optim.AdamW(non_empty, lr=0.0, betas=options.betas, eps=options.eps, fused=True)


# --------------------------------------------------------------------------------------------------------------------
# `train`: the loop over minibatches with held-out losses, early stopping, checkpoints and resume; and its result.

N = TypeVar("N")  # a Network, or a BNet that holds one


@dataclass(frozen=True)
class Trained(Result, Generic[N]):
    """A trained net and its losses.

    Attributes:
        net: The trained net.
        losses: The loss of each step.
        held_out: The held-out losses, as pairs `(step, loss)`; steps are counted from 1.
        steps: The number of steps.
    """

    _index, _number_format = "step", "{:.4f}"

    net: N
    losses: tuple[float, ...] = field(repr=False)
    held_out: tuple[tuple[int, float], ...] = field(repr=False)
    steps: int

    @property
    def caption(self) -> str:
        """The net and the number of steps, in one line."""
        return f"{self.net!r}, {self.steps} steps"

    def _get_columns(self) -> Mapping[str, Any]:
        steps, held_out = range(1, len(self.losses) + 1), dict(self.held_out)
        evaluations = np.array([held_out.get(step, math.nan) for step in steps])
        return {"step": steps, "loss": self.losses, "held_out": evaluations}

    def _get_shown_rows(self) -> list[int]:
        steps = [step - 1 for step, _ in self.held_out if step <= len(self.losses)]
        return sorted({0, len(self.losses) - 1, *steps[-10:]}) if self.losses else []


@suggest_config_for_options(
    optimizer=(AdamW,), early_stopping=(EarlyStopping,), checkpoints=(Checkpoints,), execution=(Execution,)
)
@enable_gradients()
def train(
    net: N,
    data: object,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int = 32,
    loss: Loss | None = None,
    smoothing: float = 0.0,
    optimizer: AdamW = AdamW(),
    words: int | None = None,
    start: object = None,
    stop: object = None,
    held_out: object = None,
    every: int | None = None,
    early_stopping: EarlyStopping = EarlyStopping(),
    checkpoints: Checkpoints | str | Path | None = None,
    execution: Execution = Execution(),
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> Trained[N]:
    """Train a net on the log probability of its readouts with AdamW. `net` itself does not change.

    If the readout predicts the next word, the targets are the words themselves. Ctrl-C finishes the step, writes a
    checkpoint and raises KeyboardInterrupt. Under torchrun each process computes a shard of each batch.

    Args:
        net: A net with a readout, or any net if `loss` is set.
        data: A list of sentences or pairs, an array `[sentence, word]`, a pair of arrays, a file of tokens (cut into
            windows of `words`), or a function from the step to any of these, which returns one batch.
        steps: The total number of steps. Set either `steps` or `epochs`.
        epochs: The number of passes over the data.
        batch: The number of examples of a step, over all processes.
        loss: A function `loss(module, batch)` that returns a mean, which replaces the negative log likelihood.
        smoothing: Label smoothing: the share of each label that is spread over all states, from 0 to below 1.
        optimizer: The optimizer and its schedule.
        words: The number of words of a window, if the data is one stream of tokens.
        start: A word before each sentence, for next-word prediction; None for no such word.
        stop: A word after each sentence, for next-word prediction; None for no such word.
        held_out: Data for the held-out loss, in the forms of `data`; None for no held-out loss.
        every: The number of steps between two held-out losses (and checkpoints); None for ten in a run.
        early_stopping: When training stops before its last step.
        checkpoints: The folder of checkpoints, and whether the run resumes from one. A path starts a new run. None
            writes no checkpoints.
        execution: The precision and compilation of a step.
        seed: The seed of the order of examples and of dropout.
        device: The device to train on; None for the device of the net.
        progress: True shows a progress bar, False none; None shows one only in a terminal.

    Returns:
        The trained net, its losses and its held-out losses.

    Raises:
        BNetError: If an option is out of range or does not apply to the net, or the loss diverges.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(8, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
    >>> data = ["the cat sat", "sat the cat"]
    >>> trained = bt.train(net, data, steps=20, batch=2, optimizer=bt.AdamW(rate=0.01))
    >>> trained.losses[0] > trained.losses[-1]
    True
    """
    config = TrainConfig(batch, smoothing, words, seed, optimizer, early_stopping, execution)
    loop = LoopConfig(every, Checkpoints.from_value(checkpoints), progress)
    network = as_network(net)
    if loss is not None and not callable(loss):
        raise BNetError("loss", expected="a function loss(module, batch)", actual=loss)
    check_has_words(network, "train", "bt.fit")
    reader = ExampleReader(infer_trainable_task(network) if loss is None else infer_task(network), start, stop)
    read = partial(read_dataset, reader, batch=batch, seed=seed, words=words, has_loss=loss is not None)
    dataset, validation = read(data), None if held_out is None else read(held_out, subject="held_out")
    total = _count_steps(steps, epochs, dataset)
    validation_batches = [] if validation is None else validation.in_order()
    patience = early_stopping.patience
    if patience is not None and not validation_batches:
        raise BNetError("patience requires held-out data", hint="Pass held_out=")
    settings = get_resume_settings(config, reader, dataset, validation, loss, total)
    with (
        translate_memory_errors("train"),
        distributed_context(resolve_device(device, network)) as ranks,
        fork_torch_rng(ranks.device),
        loop.lock(ranks.is_main_process),
    ):
        if ranks.world_size > 1:
            first = dataset(0)
            shared = {**settings, "net": network, "batch": (first.x, first.observed), "checkpoint": loop.has_checkpoint}
            around = (loop.shared_settings, early_stopping)
            ranks.assert_same("train", **shared, steps=total, loop=around, execution=execution)
        trainer = Trainer(reader.task, config, total, ranks, dataset, validation_batches, loss, settings)
        is_complete = run_steps(trainer, loop)
        if trainer.step > total:
            hint = "Use bnet_transformer.learning.training.load_checkpoint to load the net of the checkpoint"
            expected = f"at least {trainer.step}, the step of {trainer.checkpoint_path}"
            raise BNetError("steps", expected=expected, actual=total, hint=hint)
        if not is_complete:
            raise KeyboardInterrupt
        parameters = trainer.best if patience is not None and trainer.best else trainer.parameters()
    return _build_result(net, parameters, trainer.losses, trainer.held_out, trainer.step)


def load_checkpoint(net: N, folder: str | Path, *, best: bool = False) -> Trained[N]:
    """Load the result of a run from its checkpoint.

    Args:
        net: The net that was trained, or one of the same declaration.
        folder: The folder of the checkpoint, or its file.
        best: True for the parameters with the lowest held-out loss, False for the parameters of the last step.

    Returns:
        The net with the parameters of the checkpoint, and the losses up to it.

    Raises:
        FileError: If the folder contains no checkpoint of this net.
        BNetError: If `best` is True and the run had no early stopping.
    """
    network, path = as_network(net), as_path(folder)
    check_choice("best", best, (True, False))
    saved = read_checkpoint(path / FILE_NAME if path.is_dir() else path, network)
    parameters = saved.get_tensors("best" if best else "net")
    if not parameters:
        expected = "a checkpoint of a run with early_stopping=bt.EarlyStopping(patience=...)"
        raise BNetError("best", expected=expected, hint="Use best=False")
    return _build_result(net, parameters, saved.losses, saved.held_out, saved.step)


def _build_result(
    net: N, parameters: Mapping[str, Tensor], losses: Sequence[float], held_out: Sequence[tuple[int, float]], steps: int
) -> Trained[N]:
    """Create the result: a net of the caller's type, with the parameters on the devices of that net."""
    network = as_network(net)
    values = {name: value.to(network.parameters[name].device) for name, value in parameters.items()}
    return Trained(restore_type(net, network.with_parameters(values)), tuple(losses), tuple(held_out), steps)


def _count_steps(steps: int | None, epochs: int | None, dataset: Dataset) -> int:
    """Compute the total number of steps."""
    if (steps is None) == (epochs is None):
        raise BNetError("give either steps= or epochs=", actual=f"steps={steps}, epochs={epochs}")
    if steps is not None:
        return check_int("steps", steps)
    if dataset.epoch is None:
        expected = "steps=, because data from a function of the step has no epochs"
        raise BNetError("epochs", expected=expected, actual=epochs)
    return check_int("epochs", epochs) * dataset.epoch
