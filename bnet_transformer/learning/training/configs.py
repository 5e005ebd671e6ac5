"""Configs of a run: the optimizer and its schedule, early stopping, the execution of a step, and the loop."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_seed, set_frozen
from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer.data.task import Task
from bnet_transformer.errors import BNetError
from bnet_transformer.learning.checkpoint import Checkpoints

SCHEDULES = ("constant", "cosine", "noam")
Schedule = Callable[[int], float]
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
        for option in ("rate", "eps", "clip"):
            if getattr(self, option) is not None:
                set_frozen(self, **{option: check_float(option, getattr(self, option), above=0)})
        check_choice("schedule", self.schedule, SCHEDULES)
        set_frozen(self, warmup=check_int("warmup", self.warmup, minimum=0))
        if self.dim is not None:
            set_frozen(self, dim=check_int("dim", self.dim))
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
        if self.patience is not None:
            set_frozen(self, patience=check_int("patience", self.patience))
        if self.bound is not None:
            set_frozen(self, bound=check_float("bound", self.bound))

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
        if self.words is not None:
            set_frozen(self, words=check_int("words", self.words))
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


@dataclass(frozen=True)
class LoopConfig:
    """Evaluation, checkpoints and the progress bar of a run.

    Args:
        every: The number of steps between two evaluations (and checkpoints); None for ten evaluations in a run.
        checkpoints: The folder of checkpoints; None for no checkpoints.
        progress: True shows a progress bar, False none; None shows one only in a terminal.
    """

    every: int | None = None
    checkpoints: Checkpoints | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        check_choice("progress", self.progress, (True, False, None))
        if self.every is not None:
            set_frozen(self, every=check_int("every", self.every))

    @property
    def shared_settings(self) -> tuple[object, ...]:
        """The settings that must be equal on all ranks, because the ranks wait for each other at an evaluation."""
        return self.every, None if self.checkpoints is None else self.checkpoints.resume

    def in_subfolder(self, name: str) -> LoopConfig:
        """Return the config of a part of the run, whose checkpoints are in a subfolder."""
        if self.checkpoints is None:
            return self
        return replace(self, checkpoints=replace(self.checkpoints, folder=Path(self.checkpoints.folder) / name))

    @property
    def has_checkpoint(self) -> bool:
        """True if there is a checkpoint to resume from."""
        return self.checkpoints is not None and self.checkpoints.create_path().exists()

    def is_evaluation_step(self, step: int, steps: int) -> bool:
        """Return True if the run evaluates and saves after this step. The last step always does."""
        return step % (self.every or max(1, steps // 10)) == 0 or step == steps

    def progress_bar(self, ranks: DistributedContext, steps: int, initial: int, unit: str = "step") -> Any:
        """Create the progress bar of a run. Only the main process shows it."""
        hide = True if not ranks.is_main_process or self.progress is False else False if self.progress else None
        return tqdm(total=steps, initial=initial, disable=hide, unit=unit, leave=False)


@contextmanager
def defer_interrupt() -> Iterator[list[int]]:
    """Record Ctrl-C in the yielded list, so that the step finishes first. A second Ctrl-C interrupts immediately."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def create_schedule(kind: str, rate: float | None, warmup: int, steps: int, dim: int | None) -> Schedule:
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
