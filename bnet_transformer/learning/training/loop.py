"""`train`: the loop over minibatches with held-out losses, early stopping, checkpoints and resume; and its result."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.config_options import suggest_config_for_options
from bnet_transformer._core.distributed import distributed_context, resolve_device
from bnet_transformer._core.files import as_path
from bnet_transformer._core.memory import translate_memory_errors
from bnet_transformer._core.saved_results import SavedResult
from bnet_transformer._core.torch_context import enable_gradients, fork_torch_rng
from bnet_transformer.data import Batch, Dataset
from bnet_transformer.data.dataset import read_dataset
from bnet_transformer.data.examples import ExampleReader
from bnet_transformer.data.task import check_has_words, infer_task, infer_trainable_task
from bnet_transformer.declare import Network, as_network
from bnet_transformer.errors import BNetError
from bnet_transformer.learning.checkpoint import (
    FILE_NAME,
    Checkpoints,
    divergence_error,
    lock_checkpoints,
    read_checkpoint,
)
from bnet_transformer.learning.training.configs import (
    AdamW,
    EarlyStopping,
    Execution,
    LoopConfig,
    TrainConfig,
    defer_interrupt,
)
from bnet_transformer.learning.training.trainer import Loss, Trainer, get_resume_settings

if TYPE_CHECKING:
    import pandas as pd


N = TypeVar("N")  # a Network, or a BNet that holds one


@dataclass(frozen=True)
class Trained(SavedResult, Generic[N]):
    """A trained net and its losses.

    Attributes:
        net: The trained net.
        losses: The loss of each step.
        held_out: The held-out losses, as pairs `(step, loss)`; steps are counted from 1.
        steps: The number of steps.
    """

    net: N
    losses: tuple[float, ...] = field(repr=False)
    held_out: tuple[tuple[int, float], ...] = field(repr=False)
    steps: int

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row for each step: `loss`, and `held_out` at the steps with an evaluation."""
        import pandas as pd

        rows = pd.DataFrame({"loss": self.losses}, index=pd.RangeIndex(1, len(self.losses) + 1, name="step"))
        rows["held_out"] = pd.Series(dict(self.held_out), dtype=float)
        return rows

    def _repr_html_(self) -> str:
        """Return the net, the first and the last step, and the last ten evaluations, as HTML."""
        frame = self.to_dataframe()
        ends, measured = frame.index[:1].union(frame.index[-1:]), frame.index[frame["held_out"].notna()]
        table = frame.loc[ends.union(measured[-10:])].to_html(float_format="{:.4f}".format, na_rep="")
        return f"<p>{html.escape(repr(self.net))}, {self.steps} steps</p>{table}"


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
    dataset = read_dataset(reader, data, batch, seed, words)
    validation = None if held_out is None else read_dataset(reader, held_out, batch, seed, words, "held_out")
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
        lock_checkpoints(loop.checkpoints, ranks.is_main_process),
    ):
        if ranks.world_size > 1:
            first = dataset(0)
            shared = {**settings, "net": network, "batch": (first.x, first.observed), "checkpoint": loop.has_checkpoint}
            around = (loop.shared_settings, early_stopping)
            ranks.assert_same("train", **shared, steps=total, loop=around, execution=execution)
        trainer = Trainer(reader.task, config, total, ranks, loss, settings)
        _run_steps(trainer, dataset, validation_batches, loop, total)
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
    trained = network.with_parameters(values)
    trained_net = trained if isinstance(net, Network) else cast(Callable[[Network], Any], type(net))(trained)
    return Trained(cast(N, trained_net), tuple(losses), tuple(held_out), steps)


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


def _run_steps(trainer: Trainer, dataset: Dataset, held_out: list[Batch], loop: LoopConfig, steps: int) -> None:
    """Run the remaining steps."""
    # Step n computes the gradient and loss at the parameters after n - 1 updates, then updates them. A checkpoint of
    # these parameters is written between the two, when their loss is known to be valid (`due`). So no checkpoint
    # contains diverged parameters.
    path = None
    if loop.checkpoints is not None:
        path, has_checkpoint = loop.checkpoints.prepare()
        if has_checkpoint:
            trainer.restore(path, changeable=loop.checkpoints.changeable)
        if trainer.step > steps:
            hint = "Use bnet_transformer.learning.training.load_checkpoint to load the net of the checkpoint"
            expected = f"at least {trainer.step}, the step of {path}"
            raise BNetError("steps", expected=expected, actual=steps, hint=hint)
    trainer.ranks.barrier()
    bar = loop.progress_bar(trainer.ranks, steps, trainer.step)
    batch, due, stop = None, False, False  # due: a checkpoint is to be written when the loss of its parameters is known
    with bar, defer_interrupt() as interrupts:
        while trainer.step < steps and not stop and not _should_stop_early(trainer):
            batch = dataset(trainer.step)
            trainer.compute_gradients(trainer.prepare_batch(batch, bool(interrupts)))
            stop = _drain_losses(trainer, dataset, path, all=path is not None and due)
            if path is not None and due:
                trainer.save(path)
            trainer.update_parameters()
            bar.update()
            if not bar.disable and trainer.losses:
                bar.set_postfix(loss=f"{trainer.losses[-1]:.4f}", refresh=False)
            stop = stop or (trainer.ranks.world_size == 1 and bool(interrupts))
            due = loop.is_evaluation_step(trainer.step, steps)
            if held_out and not stop and due:
                _drain_losses(trainer, dataset, path, all=True)
                _evaluate_held_out(trainer, held_out)
        _drain_losses(trainer, dataset, path, all=True)
        if batch is not None:  # the last parameters are saved if their loss on the last batch is valid
            loss = trainer.evaluate([batch])
            if not trainer.config.early_stopping.is_valid(loss):
                raise _divergence_error(trainer, f"loss {loss:g} on the batch of step {trainer.step}", path)
            if path is not None:
                trainer.save(path)
    if stop:
        raise KeyboardInterrupt


def _drain_losses(trainer: Trainer, dataset: Dataset, path: Path | None, *, all: bool = False) -> bool:
    """Read the finished losses, or `all`; raise an error for an invalid one. Return True if a process must stop."""
    stop = False
    for loss, grad_norm, should_stop in trainer.drain_losses(all=all):
        trainer.check_possible(loss, dataset, len(trainer.losses))
        if not trainer.config.early_stopping.is_valid(loss, grad_norm):
            raise _divergence_error(trainer, f"loss {loss:g} and gradient norm {grad_norm:g}", path)
        stop = stop or should_stop
    return stop


def _evaluate_held_out(trainer: Trainer, held_out: list[Batch]) -> None:
    """Compute the held-out loss; with patience, keep the parameters with the lowest one."""
    loss = trainer.evaluate(held_out)
    best = min((loss for _, loss in trainer.held_out), default=math.inf)
    trainer.held_out.append((trainer.step, loss))
    if trainer.config.early_stopping.patience is not None and loss < best:
        trainer.best = {name: value.clone() for name, value in trainer.parameters().items()}


def _should_stop_early(trainer: Trainer) -> bool:
    """Return True after `patience` held-out losses without an improvement."""
    losses, patience = [loss for _, loss in trainer.held_out], trainer.config.early_stopping.patience
    if patience is None or not losses:
        return False
    return len(losses) - 1 - losses.index(min(losses)) >= patience


def _divergence_error(trainer: Trainer, received: str, path: Path | None) -> BNetError:
    """Create the error of an invalid loss, with the last checkpoint and the remedies."""
    bound = trainer.config.early_stopping.bound
    expected = "a finite loss" if bound is None else f"a finite loss of at most {bound:g}"
    rate = f"a rate= below {trainer.config.optimizer.highest_rate:g}"
    remedies = f"{rate}, a longer warmup=, clip=1.0, or float32 instead of bfloat16"
    return divergence_error(len(trainer.losses) + 1, expected, received, remedies, path, trainer.saved_step)
