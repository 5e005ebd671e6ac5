"""The loss of training, and the state of a run: one step, the evaluation, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer._core.hashing import derive_seed, describe_code
from bnet_transformer._core.torch_context import DeferredScalars, seed_rngs
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.execution_state import ExecutionRequest, ExecutionState
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.compiler.validate_inputs import lay_out_value
from bnet_transformer.data import Batch, Dataset
from bnet_transformer.data.batch import UNOBSERVED, is_observed
from bnet_transformer.data.examples import ExampleReader
from bnet_transformer.data.task import Task
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, EvidenceError
from bnet_transformer.inference.elimination import eliminate_choices, log_evidence
from bnet_transformer.inference.factors import build_factors
from bnet_transformer.learning import checkpoint
from bnet_transformer.learning.training.configs import AdamW, TrainConfig, create_schedule
from bnet_transformer.reference import ATOL, BUDGET
from bnet_transformer.tpm import Dropout

Loss = Callable[[CompiledModule, Batch], Tensor]
IMPOSSIBLE_LOSS = 1e20  # below the mean loss of any batch with probability zero, which is -LOG_ZERO over its words


class TrainingLoss(nn.Module):
    """The summed loss of a batch, over its observed words; for a loss function of the user, over its sentences.

    The loss is `- log P(y | x)`. If the readouts depend on latent choices, they are summed out exactly.
    """

    def __init__(self, module: CompiledModule, task: Task, smoothing: float = 0.0, loss_fn: Loss | None = None) -> None:
        super().__init__()
        self.module, self.task, self.smoothing, self.loss_fn = module, task, smoothing, loss_fn
        self.readout_names = tuple(readout.group.name for readout in task.readouts)

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
        if self.task.has_choices:
            request = ExecutionRequest((), batch.x, batch.mask, training=self.training, check_values=False)
            state, factors = build_factors(self.module, batch.evidence, None, request, atol=ATOL, budget=BUDGET)
            return -eliminate_choices(state, factors).sum()
        state, _ = self.module.run(ExecutionRequest(self.readout_names, batch.x, batch.mask, check_values=False))
        smoothing = self.smoothing if self.training else 0.0
        observed = batch.observed
        parts = [
            _negative_log_likelihood(state, readout, observed[name], smoothing)
            for name, readout in zip(self.readout_names, self.task.readouts, strict=True)
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


class Trainer:
    """A net in training: a copy of its parameters, the optimizer, and the losses so far.

    A step is `prepare_batch`, `compute_gradients`, `update_parameters`. None of them waits for the device, so the host
    runs ahead of it. `drain_losses` reads the losses that are finished.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        steps: int,
        ranks: DistributedContext,
        loss: Loss | None,
        settings: Mapping[str, Any],
    ) -> None:
        config.check(task)
        optimizer = config.optimizer
        network = task.network
        network.check_single_dtype()
        parameters = {name: value.detach().clone().to(ranks.device) for name, value in network.parameters.items()}
        self.network, self.config, self.ranks, self.settings = network, config, ranks, dict(settings)
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
        self.step = 0  # the number of completed steps
        self.deferred_scalars = DeferredScalars.for_device(ranks.device)  # loss, gradient norm, stop flag of a step
        self.losses: list[float] = []  # at least the losses of completed steps: a loss is known before its update
        self.held_out: list[tuple[int, float]] = []
        self.best: dict[str, Tensor] = {}
        self.saved_step: int | None = None  # the step of the checkpoint on disk

    def prepare_batch(self, batch: Batch, should_stop: bool = False) -> PreparedBatch:
        """Move this process's shard of a batch to the device, with the divisor of the summed loss.

        The batch is checked here, on the host. The stop flag `should_stop` is shared with the other processes.
        """
        count, device = self.training_loss.count_terms(batch), self.ranks.device
        if not count:
            raise BNetError("data", expected="at least one observed word in every batch")
        # A loss of the user may pass any values. A check on a GPU waits for the device, so it is done only in step 0.
        self.module.check_values = self.should_check_values and (device.type == "cpu" or not self.step)
        if batch.mask is not None and self.training_loss.loss_fn is None:
            self.module.check_mask(self.training_loss.readout_names, batch.x, batch.mask)
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

    def update_parameters(self) -> None:
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

    def drain_losses(self, *, all: bool = False) -> Iterator[tuple[float, float, bool]]:
        """Iterate over the loss, gradient norm and stop flag of the finished steps, oldest first.

        `all` also waits for the steps that are not finished.
        """
        for loss, grad_norm, should_stop in self.deferred_scalars.pop_ready(all=all):
            yield loss, grad_norm, should_stop > 0
            self.losses.append(loss)

    def check_possible(self, loss: float, dataset: Dataset, step: int) -> None:
        """Raise an error if the loss of a step is that of an impossible observation; the error names the first.

        Only such a loss requires another pass, on the net as it was before the first step.
        """
        has_choices = self.training_loss.loss_fn is None and self.training_loss.task.has_choices
        if not (has_choices and loss > IMPOSSIBLE_LOSS):
            return
        batch = dataset(step).to(self.ranks.device, self.network.dtype)
        module = CompiledModule(self.network).to(self.ranks.device).eval()
        try:
            with torch.no_grad():
                log_evidence(module, batch.evidence, batch.x, batch.mask)
        except EvidenceError as error:
            raise EvidenceError(f"{error.subject} in the batch of step {step + 1}", **error.parts) from error

    def evaluate(self, batches: list[Batch]) -> float:
        """Compute the mean loss of held-out data, without dropout and label smoothing."""
        self.ddp_module.eval()
        with torch.no_grad():
            losses = [self._summed_loss(self.prepare_batch(batch).batch).double() for batch in batches]
        total = float(self.ranks.all_reduce(torch.stack(losses).sum()))
        return total / sum(map(self.training_loss.count_terms, batches))

    def _summed_loss(self, batch: Batch) -> Tensor:
        """Compute this process's part of the summed loss."""
        is_mixed = self.config.execution.precision == "bfloat16"
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=is_mixed):
            loss: Tensor = self.ddp_module(batch)
        return loss

    def parameters(self) -> dict[str, Tensor]:
        """Return the current parameters."""
        return {name: self.module.store[name.replace(".", "/")].detach() for name in self.network.parameters}

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        tensors = {f"net/{name}": value for name, value in self.parameters().items()}
        for name, value in self.trainable_parameters:
            state = self.optimizer.state.get(value)
            if not state:  # the loss of the user does not depend on this parameter
                continue
            tensors[f"first/{name}"] = state["exp_avg"]
            tensors[f"second/{name}"] = state["exp_avg_sq"]
            tensors[f"count/{name}"] = state["step"]
        tensors |= {f"best/{name}": value for name, value in self.best.items()}
        if self.ranks.is_main_process:
            losses = tuple(self.losses[: self.step])
            state = checkpoint.Checkpoint(self.step, tensors, losses, tuple(self.held_out), self.settings)
            checkpoint.write_checkpoint(path, self.network, state)
        self.saved_step = self.step
        self.ranks.barrier()

    def restore(self, path: Path, *, changeable: Collection[str] = ()) -> None:
        """Load the state of a checkpoint. The `changeable` settings may differ from the settings in it."""
        saved = checkpoint.read_checkpoint(path, self.network)
        checkpoint.check_settings(path, saved, self.settings, changeable)
        with torch.no_grad():
            for name, value in saved.get_tensors("net").items():
                self.module.store[name.replace(".", "/")].copy_(value)
        first, second, count = (saved.get_tensors(heading) for heading in ("first", "second", "count"))
        for name, value in self.trainable_parameters:
            if name in first:
                self.optimizer.state[value] = {
                    "step": count[name].to(value.device),
                    "exp_avg": _copy_with_layout(first[name], value),
                    "exp_avg_sq": _copy_with_layout(second[name], value),
                }
        self.losses, self.held_out = list(saved.losses), list(saved.held_out)
        self.step = self.saved_step = saved.step
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


def _copy_with_layout(value: Tensor, like: Tensor) -> Tensor:
    """Copy a tensor to the memory layout of a parameter, which the fused step of AdamW requires."""
    return torch.empty_like(like, requires_grad=False).copy_(value)


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
