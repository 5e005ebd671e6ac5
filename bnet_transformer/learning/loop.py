"""The loop over the steps of a run: evaluation, checkpoints, the progress bar and Ctrl-C.

Training and fits supply a `Run`, whose steps `run_steps` takes. NUTS and calibration, which keep no state between
steps that the loop could save, use only the bar and the interrupts. A checkpoint is the state that a run needs to
resume, in one safetensors file, which is replaced atomically: an interrupted write leaves the previous one intact.
"""

from __future__ import annotations

import json
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.checks import check_choice, check_int, check_options, set_frozen
from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer._core.files import (
    as_path,
    compute_digest,
    exclusive_lock,
    read_tensors,
    wrap_read_errors,
    write_tensors,
)
from bnet_transformer._core.results import check_type
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError, FileError

EXPECTED = "a checkpoint of train"
FORMAT, VERSION, FILE_NAME = "bnet_transformer checkpoint", 2, "checkpoint.safetensors"
CHANGEABLE_SETTINGS = frozenset(("rate", "schedule", "warmup", "dim", "clip", "precision", "steps"))


@dataclass(frozen=True)
class Checkpoints:
    """The folder of the checkpoint of a run, and whether the run resumes from it.

    Args:
        folder: The folder of the checkpoint. It is created if it does not exist.
        resume: False raises an error if the folder contains a checkpoint. True resumes from the checkpoint bit for bit,
            with the same settings, or starts a new run if there is no checkpoint. `"changed"` also allows another rate,
            schedule, warmup, dim, clip, precision or number of steps.

    >>> Checkpoints("runs/first", resume=True).changeable
    frozenset()
    """

    folder: str | Path
    resume: bool | str = False

    def __post_init__(self) -> None:
        set_frozen(self, folder=as_path(self.folder))
        check_choice("resume", self.resume, (True, False, "changed"))

    @property
    def changeable(self) -> frozenset[str]:
        """The settings that a resumed run may change."""
        return CHANGEABLE_SETTINGS if self.resume == "changed" else frozenset()

    def create_path(self) -> Path:
        """Create the folder if it does not exist, and return the path of the checkpoint."""
        folder = Path(self.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise FileError(str(folder), expected="a folder for checkpoints", actual=reason) from error
        return folder / FILE_NAME

    @classmethod
    def from_value(cls, value: Checkpoints | str | Path | None) -> Checkpoints | None:
        """Convert an argument of the caller to a config.

        Args:
            value: A config or None, which is returned as it is, or a folder, which becomes a config with
                `resume=False`.

        Returns:
            The config.
        """
        return value if value is None or isinstance(value, Checkpoints) else cls(value)


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` steps. Tensors are named `net/...`, `first/...`, `second/...`, `best/...`."""

    step: int
    tensors: Mapping[str, Tensor]
    losses: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...]
    settings: Mapping[str, Any]

    def get_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with `prefix/`, without the prefix."""
        return {k[len(prefix) + 1 :]: v for k, v in self.tensors.items() if k.startswith(f"{prefix}/")}


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

    def resume(self, network: Network, settings: Mapping[str, Any], restore: Callable[[Checkpoint], None]) -> bool:
        """Restore the checkpoint from which a run with these settings resumes; return False if the run starts anew.

        Raises:
            FileError: If there is a checkpoint and the run does not resume, or it is of another net.
            BNetError: If a setting of the run differs from the checkpoint and may not change.
        """
        if self.checkpoints is None or not (path := self.checkpoints.create_path()).exists():
            return False
        if not self.checkpoints.resume:
            hint = "Use bt.Checkpoints(folder, resume=True) to resume from it, or another folder"
            raise FileError(f"{path} already exists", hint=hint)
        saved = read_checkpoint(path, network)
        before, now = saved.settings, json.loads(json.dumps(dict(settings)))
        names = {*before, *now} - self.checkpoints.changeable
        changed = [name for name in sorted(names) if before.get(name) != now.get(name)]
        if changed:
            expected = "the settings of the run that wrote the checkpoint: "
            expected += ", ".join(f"{name}={before.get(name)!r}" for name in changed)
            actual, hint = ", ".join(f"{name}={now.get(name)!r}" for name in changed), "Use another folder"
            if {*changed} <= CHANGEABLE_SETTINGS:
                hint += ", or bt.Checkpoints(folder, resume='changed')"
            raise BNetError(str(path), expected=expected, actual=actual, hint=hint)
        with wrap_read_errors(path, EXPECTED):
            restore(saved)
        return True

    def save(self, network: Network, state: Checkpoint) -> None:
        """Write a checkpoint, if the run has any."""
        if self.checkpoints is not None:
            write_checkpoint(self.checkpoints.create_path(), network, state)

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
            write_checkpoint(self.checkpoint_path, self.network, self.snapshot())
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

    def restore(saved: Checkpoint) -> None:
        run.restore(saved)
        run.step = run.saved_step = saved.step

    loop.resume(run.network, run.settings, restore)
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


def write_checkpoint(path: Path, network: Network, checkpoint: Checkpoint) -> None:
    """Write a checkpoint. It replaces the previous one atomically.

    Parameters of the net without a tensor `net/<name>` of the run have those of `network`.
    """
    header = {
        "format": FORMAT,
        "version": VERSION,
        "net": digest_network(network),
        "step": checkpoint.step,
        "settings": dict(checkpoint.settings),
    }
    values = {f"net/{name}": value for name, value in network.parameters.items()} | dict(checkpoint.tensors)
    tensors = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in values.items()}
    tensors["losses"] = torch.tensor(checkpoint.losses, dtype=torch.float64)
    tensors["held_out"] = torch.tensor(checkpoint.held_out, dtype=torch.float64).reshape(-1, 2)
    write_tensors(path, header, tensors)


def read_checkpoint(path: Path, network: Network) -> Checkpoint:
    """Read the checkpoint of a net.

    Raises:
        FileError: If the file is not a checkpoint, has an earlier format version, or belongs to another net.
    """
    location, hint = str(path), "Use another folder, or the net that wrote the checkpoint"
    header, tensors = read_tensors(path, EXPECTED, FORMAT, VERSION)
    if header["version"] < VERSION:  # version 1 hashed the module of a class, and classes have moved
        expected = f"a checkpoint of format version {VERSION}"
        actual = f"version {header['version']}, of an earlier version of the library"
        raise FileError(location, expected=expected, actual=actual, hint="Use another folder")
    saved = {name.removeprefix("net/"): value for name, value in tensors.items() if name.startswith("net/")}
    try:
        check_shapes_and_dtypes(saved, network.parameters)
    except BNetError as error:
        expected = f"a checkpoint of this net ({error.subject}: {error.expected})"
        raise FileError(location, expected=expected, actual=error.actual, hint=hint) from error
    if header.get("net") != digest_network(network):
        actual = "a checkpoint of another declaration"
        raise FileError(location, expected="a checkpoint of this net", actual=actual, hint=hint)
    with wrap_read_errors(path, EXPECTED):
        losses, held_out = tensors.pop("losses").tolist(), tensors.pop("held_out").tolist()
        step, settings = check_int("step", header["step"], minimum=0), header["settings"]
        check_type(settings, dict[str, Any], f"{location}: settings")
        measured = tuple((int(at), float(loss)) for at, loss in held_out)
        return Checkpoint(step, tensors, tuple(map(float, losses)), measured, settings)


def digest_network(network: Network) -> str:
    """Compute a hash of the declaration of a net from its fields; a repr may contain addresses of objects."""
    try:
        return compute_digest(network.declaration)
    except BNetError as error:
        expected = "a declaration that can be hashed, to identify its checkpoints"
        raise BNetError("declaration", **error.parts | {"expected": expected}) from error


def check_shapes_and_dtypes(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
    """Raise an error unless `tensors` has the names, shapes and dtypes of `reference`."""
    for name in sorted({*tensors, *reference}):
        value, template = tensors.get(name), reference.get(name)
        if value is None or template is None or (value.shape, value.dtype) != (template.shape, template.dtype):
            if template is None:
                raise BNetError(name, expected="no tensor of this name in this run")
            expected = f"a tensor of {template.dtype} and shape {tuple(template.shape)}"
            if value is None:
                raise BNetError(name, expected=f"{expected}; the file does not contain it")
            raise BNetError(name, expected=expected, actual=f"{value.dtype} of shape {tuple(value.shape)}")
