"""The loop over the steps of a run: evaluation, checkpoints, the progress bar and Ctrl-C.

Training and fits supply a `Run`, whose steps `run_steps` takes. NUTS and calibration, which keep no state between
steps that the loop could save, use only the bar and the interrupts.
"""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from bnet_transformer._core.checks import check_choice, check_int, check_options
from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer._core.files import exclusive_lock, wrap_read_errors
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError
from bnet_transformer.learning import checkpoint
from bnet_transformer.learning.checkpoint import Checkpoint, Checkpoints


@dataclass(frozen=True)
class LoopConfig:
    """Evaluation, checkpoints and the progress bar of a run.

    Args:
        every: The number of steps between two evaluations (and checkpoints); None for ten evaluations in a run.
        checkpoints: The folder of checkpoints, or a config; None for no checkpoints.
        progress: True shows a progress bar, False none; None shows one only in a terminal.
    """

    every: int | None = None
    checkpoints: Checkpoints | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        check_choice("progress", self.progress, (True, False, None))
        check_options(self, check_int, "every")

    @property
    def shared_settings(self) -> tuple[object, ...]:
        """The settings that must be equal on all ranks, because the ranks wait for each other at an evaluation."""
        return self.every, None if self.checkpoints is None else self.checkpoints.resume

    @property
    def has_checkpoint(self) -> bool:
        """True if there is a checkpoint to resume from."""
        return self.checkpoints is not None and self.checkpoints.create_path().exists()

    def in_subfolder(self, name: str) -> LoopConfig:
        """Return the config of a part of the run, whose checkpoints are in a subfolder."""
        if self.checkpoints is None:
            return self
        return replace(self, checkpoints=replace(self.checkpoints, folder=Path(self.checkpoints.folder) / name))

    def lock(self, is_main_process: bool) -> AbstractContextManager[None]:
        """Lock the folder of the checkpoints during a run, so that no other run writes to it.

        If a run has several processes, only the main process takes the lock.
        """
        if self.checkpoints is None or not is_main_process:
            return nullcontext()
        return exclusive_lock(self.checkpoints.create_path())

    def is_evaluation_step(self, step: int, steps: int) -> bool:
        """Return True if the run evaluates and saves after this step. The last step always does."""
        return step % (self.every or max(1, steps // 10)) == 0 or step == steps

    def progress_bar(self, ranks: DistributedContext, steps: int, initial: int, unit: str = "step") -> Any:
        """Create the progress bar of a run. Only the main process shows it."""
        hide = True if not ranks.is_main_process or self.progress is False else False if self.progress else None
        return tqdm(total=steps, initial=initial, disable=hide, unit=unit, leave=False)


class Run(ABC):
    """The state of a run of steps.

    A step is `compute`, which proves that the current parameters are valid, and then `update`, which changes them. A
    checkpoint of the parameters is written between the two, so no checkpoint contains diverged parameters.

    Attributes:
        ranks: The processes of the run.
        network: The net with the declaration that the checkpoints belong to.
        settings: The settings that must be equal in a resumed run and in the run that wrote the checkpoint.
        steps: The total number of steps.
        step: The number of completed steps.
        extra_evaluations: Further steps after which the run evaluates and saves.
        checkpoint_path: The path of the checkpoint; None if the run writes none.
        saved_step: The step of the checkpoint on disk; None if there is none.
    """

    ranks: DistributedContext
    network: Network
    settings: Mapping[str, Any]
    steps: int
    step: int = 0
    extra_evaluations: Collection[int] = ()
    checkpoint_path: Path | None = None
    saved_step: int | None = None

    @abstractmethod
    def compute(self, is_interrupted: bool, is_due: bool) -> None:
        """Compute what the next update needs at the current parameters, which do not change.

        Args:
            is_interrupted: Whether Ctrl-C was pressed in this process.
            is_due: Whether a checkpoint is written next: the computation must then be finished.

        Raises:
            BNetError: If the current parameters are not valid.
        """

    @abstractmethod
    def update(self) -> None:
        """Change the parameters, and count the step."""

    @abstractmethod
    def evaluate(self) -> None:
        """Evaluate the current parameters."""

    @abstractmethod
    def snapshot(self) -> Checkpoint:
        """Create a checkpoint of the current state."""

    @abstractmethod
    def restore(self, saved: Checkpoint) -> None:
        """Load the state of a checkpoint."""

    def describe(self) -> Mapping[str, object]:
        """Return what the progress bar shows."""
        return {}

    def should_stop(self, is_interrupted: bool) -> bool:
        """Return True if Ctrl-C was pressed in some process."""
        return self.ranks.any(is_interrupted)

    @property
    def is_finished(self) -> bool:
        """True if no further step is needed."""
        return False

    def check_last_step(self) -> None:
        """Raise an error if the parameters after the last step are not valid."""
        self.compute(False, True)

    def save(self) -> None:
        """Write a checkpoint, if the run has any. Call it only when the current parameters are known to be valid."""
        if self.checkpoint_path is None:
            return
        if self.ranks.is_main_process:
            checkpoint.write_checkpoint(self.checkpoint_path, self.network, self.snapshot())
        self.saved_step = self.step
        self.ranks.barrier()

    def divergence_error(self, expected: str, actual: str, remedies: str, number: int) -> BNetError:
        """Create the error of step `number`. It names the last valid checkpoint, if any, and the remedies."""
        hint = f"Try {remedies}"
        if self.saved_step is not None:
            resume = "bt.Checkpoints(folder, resume='changed')"
            hint = f"Resume from step {self.saved_step} ({self.checkpoint_path}) with {resume} and {remedies}"
        elif self.checkpoint_path is None:
            actual = f"{actual}; there is no checkpoint, because checkpoints= was not set"
        else:
            actual = f"{actual}; it occurred before the first checkpoint (every=)"
        return BNetError(f"step {number}", expected=expected, actual=actual, hint=hint)


def run_steps(run: Run, loop: LoopConfig) -> bool:
    """Take the remaining steps of a run, with evaluation and checkpoints.

    Args:
        run: The run. An existing checkpoint replaces its state.
        loop: When to evaluate and save.

    Returns:
        False if Ctrl-C ended the run early.

    Raises:
        BNetError: If the run diverged.
        FileError: If there is a checkpoint and the run does not resume.
    """
    if loop.checkpoints is not None:
        run.checkpoint_path = loop.checkpoints.create_path()
        saved = checkpoint.resume_checkpoint(loop.checkpoints, run.network, run.settings)
        if saved is not None:
            with wrap_read_errors(run.checkpoint_path, checkpoint.EXPECTED):
                run.restore(saved)
            run.step = run.saved_step = saved.step
    run.ranks.barrier()
    start, is_due, stop = run.step, False, False
    with loop.progress_bar(run.ranks, run.steps, start) as bar, defer_interrupt() as interrupts:
        while run.step < run.steps and not stop and not run.is_finished:
            run.compute(bool(interrupts), is_due and run.checkpoint_path is not None)
            if is_due:
                run.save()
            run.update()
            bar.update()
            bar.set_postfix(run.describe(), refresh=False)
            stop = run.should_stop(bool(interrupts))
            is_due = loop.is_evaluation_step(run.step, run.steps) or run.step in run.extra_evaluations
            is_due = is_due or run.is_finished
            if is_due:
                run.evaluate()
        bar.refresh()  # so that a short run also shows its last state
        if run.step > start:
            run.check_last_step()
            run.save()
    return not stop


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
