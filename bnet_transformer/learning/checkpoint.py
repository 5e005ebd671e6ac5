"""Checkpoints of `train` and `fit`: the state that a run needs to resume, in one safetensors file.

The file is replaced atomically, so an interrupted write leaves the last checkpoint as it was.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int, check_mapping, set_frozen
from bnet_transformer._core.files import as_path, exclusive_lock, read_tensors, wrap_read_errors, write_tensors
from bnet_transformer._core.hashing import compute_digest
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError, FileError

EXPECTED = "a checkpoint of train"
FORMAT, VERSION, FILE_NAME = "bnet_transformer checkpoint", 2, "checkpoint.safetensors"
CHANGEABLE_SETTINGS = frozenset(("rate", "schedule", "warmup", "dim", "clip", "precision", "steps"))


@dataclass(frozen=True)
class Checkpoints:
    """The folder of the checkpoints of a run, and whether the run resumes from the one in it.

    Args:
        folder: The folder of the checkpoint; it is created if it does not exist.
        resume: False raises an error if the folder has a checkpoint. True resumes from it bit for bit, with the same
            settings, or starts a new run if there is none. `"changed"` allows another rate, schedule, warmup, dim,
            clip, precision or number of steps.

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

    def prepare(self) -> tuple[Path, bool]:
        """Return the path of the checkpoint, and whether the run resumes from it.

        Raises:
            FileError: If there is a checkpoint and `resume` is False.
        """
        path = self.create_path()
        if path.exists() and not self.resume:
            allowed = "bt.Checkpoints(folder, resume=True), another folder"
            raise FileError(str(path), expected="no checkpoint yet", actual="one", allowed=allowed)
        return path, path.exists()

    @classmethod
    def from_value(cls, value: Checkpoints | str | Path | None) -> Checkpoints | None:
        """Convert an argument of the caller to a config: a folder becomes a config without `resume`."""
        return value if value is None or isinstance(value, Checkpoints) else cls(value)


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after some steps; tensors are named `net/...`, `first/...`, `second/...`, `best/...`."""

    step: int
    tensors: Mapping[str, Tensor]
    losses: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...]
    settings: Mapping[str, Any]

    def get_tensors(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with `prefix/`, without the prefix."""
        return {k[len(prefix) + 1 :]: v for k, v in self.tensors.items() if k.startswith(f"{prefix}/")}


def divergence_error(
    step: int, expected: str, actual: str, remedies: str, path: Path | None, checkpoint_step: int | None
) -> BNetError:
    """The error of a step that diverged, with the step of the saved checkpoint, if any, and the remedies."""
    if checkpoint_step is not None:
        resumed = "bt.Checkpoints(folder, resume='changed')"
        remedies = f"{path} keeps the last good checkpoint, of step {checkpoint_step}: {resumed} with {remedies}"
    elif path is None:
        actual = f"{actual}; no checkpoint was kept (checkpoints=)"
    else:
        actual = f"{actual}; it came before the first good checkpoint (every=)"
    return BNetError(f"step {step}", expected=expected, actual=actual, allowed=remedies)


def lock_checkpoints(checkpoints: Checkpoints | None, is_main_process: bool) -> AbstractContextManager[None]:
    """Lock the folder of the checkpoints for the time of a run, so that no other run writes there.

    Of several processes of one run only the main process takes the lock.
    """
    return nullcontext() if checkpoints is None or not is_main_process else exclusive_lock(checkpoints.create_path())


def write_checkpoint(path: Path, network: Network, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; it replaces the last one atomically."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "net": digest_network(network),
        "step": checkpoint.step,
        "settings": dict(checkpoint.settings),
    }
    tensors = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in checkpoint.tensors.items()}
    tensors["losses"] = torch.tensor(checkpoint.losses, dtype=torch.float64)
    tensors["held_out"] = torch.tensor(checkpoint.held_out, dtype=torch.float64).reshape(-1, 2)
    write_tensors(path, header, tensors)


def read_checkpoint(path: Path, network: Network) -> Checkpoint:
    """Read the checkpoint of a net.

    Raises:
        FileError: If the file is not a checkpoint, has an earlier format, or is of another net.
    """
    location = str(path)
    header, tensors = read_tensors(path, EXPECTED, FORMAT, VERSION)
    if header["version"] < VERSION:  # version 1 hashed the module of a class, and classes have moved
        actual = "one of an earlier version of the library"
        raise FileError(
            location, expected=f"a checkpoint of format version {VERSION}", actual=actual, allowed="another folder"
        )
    _check_network(location, network, header, tensors)
    with wrap_read_errors(path, EXPECTED):
        losses, held_out = tensors.pop("losses").tolist(), tensors.pop("held_out").tolist()
        step, settings = check_int("step", header["step"], minimum=0), check_mapping("settings", header["settings"])
        measured = tuple((int(at), float(loss)) for at, loss in held_out)
        return Checkpoint(step, tensors, tuple(map(float, losses)), measured, settings)


def digest_network(network: Network) -> str:
    """A hash of the declaration of a net, by its fields: a repr may contain addresses of objects."""
    try:
        return compute_digest(network.declaration)
    except BNetError as error:
        expected = "one that a checkpoint can tell from others"
        raise BNetError("declaration", expected=expected, actual=error.actual, allowed=error.allowed) from error


def _check_network(location: str, network: Network, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise an error if the checkpoint is of another net: compare names, shapes and dtypes, then the declaration."""
    allowed = "another folder, or the net that the checkpoint is of"
    saved = {name.removeprefix("net/"): value for name, value in tensors.items() if name.startswith("net/")}
    try:
        check_shapes_and_dtypes(saved, network.parameters)
    except BNetError as error:
        expected = f"a checkpoint of this net ({error.subject}: {error.expected})"
        raise FileError(location, expected=expected, actual=error.actual, allowed=allowed) from error
    if header.get("net") != digest_network(network):
        raise FileError(location, expected="a checkpoint of this net", actual="another declaration", allowed=allowed)


def check_shapes_and_dtypes(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
    """Raise an error unless the tensors have the names, shapes and dtypes of the `reference`."""
    for name in sorted({*tensors, *reference}):
        value, template = tensors.get(name), reference.get(name)
        if value is None or template is None or (value.shape, value.dtype) != (template.shape, template.dtype):
            expected = "no such tensor" if template is None else f"{template.dtype} of shape {tuple(template.shape)}"
            actual = "none" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"
            raise BNetError(name, expected=f"{expected}, as this run has", actual=actual)


def check_settings(
    path: Path, checkpoint: Checkpoint, settings: Mapping[str, Any], changeable: Collection[str] = ()
) -> None:
    """Raise an error if a setting of the run differs from the checkpoint and is not `changeable`."""
    saved, current = checkpoint.settings, json.loads(json.dumps(dict(settings)))
    changed = [name for name in sorted({*saved, *current} - {*changeable}) if saved.get(name) != current.get(name)]
    if changed:
        before = ", ".join(f"{name}={saved.get(name)!r}" for name in changed)
        actual = ", ".join(f"{name}={current.get(name)!r}" for name in changed)
        allowed = "another folder"
        if {*changed} <= CHANGEABLE_SETTINGS:
            allowed += ", bt.Checkpoints(folder, resume='changed')"
        expected = f"the settings that the run began with: {before}"
        raise BNetError(str(path), expected=expected, actual=actual, allowed=allowed)
