"""Checkpoints of `train` and `fit`: the state that a run needs to resume, in one safetensors file.

The file is replaced atomically, so an interrupted write leaves the previous checkpoint intact.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_int, set_frozen
from bnet_transformer._core.files import as_path, compute_digest, read_tensors, wrap_read_errors, write_tensors
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

    def prepare(self) -> tuple[Path, bool]:
        """Return the path of the checkpoint, and whether the run resumes from it.

        Raises:
            FileError: If there is a checkpoint and `resume` is False.
        """
        path = self.create_path()
        if path.exists() and not self.resume:
            hint = "Use bt.Checkpoints(folder, resume=True) to resume from it, or another folder"
            raise FileError(f"{path} already exists", hint=hint)
        return path, path.exists()

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
    location = str(path)
    header, tensors = read_tensors(path, EXPECTED, FORMAT, VERSION)
    if header["version"] < VERSION:  # version 1 hashed the module of a class, and classes have moved
        actual = f"version {header['version']}, of an earlier version of the library"
        raise FileError(
            location, expected=f"a checkpoint of format version {VERSION}", actual=actual, hint="Use another folder"
        )
    _check_network(location, network, header, tensors)
    with wrap_read_errors(path, EXPECTED):
        losses, held_out = tensors.pop("losses").tolist(), tensors.pop("held_out").tolist()
        step, settings = check_int("step", header["step"], minimum=0), header["settings"]
        check_type(settings, dict[str, Any], f"{location}: settings")
        measured = tuple((int(at), float(loss)) for at, loss in held_out)
        return Checkpoint(step, tensors, tuple(map(float, losses)), measured, settings)


def resume_checkpoint(
    checkpoints: Checkpoints | None, network: Network, settings: Mapping[str, Any]
) -> Checkpoint | None:
    """Return the checkpoint from which a run with these settings resumes; None if the run starts anew."""
    if checkpoints is None:
        return None
    path, has_checkpoint = checkpoints.prepare()
    if not has_checkpoint:
        return None
    state = read_checkpoint(path, network)
    check_settings(path, state, settings, checkpoints.changeable)
    return state


def digest_network(network: Network) -> str:
    """Compute a hash of the declaration of a net from its fields; a repr may contain addresses of objects."""
    try:
        return compute_digest(network.declaration)
    except BNetError as error:
        expected = "a declaration that can be hashed, to identify its checkpoints"
        raise BNetError("declaration", **error.parts | {"expected": expected}) from error


def _check_network(location: str, network: Network, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise an error if the checkpoint belongs to another net: compare names, shapes, dtypes and the declaration."""
    hint = "Use another folder, or the net that wrote the checkpoint"
    saved = {name.removeprefix("net/"): value for name, value in tensors.items() if name.startswith("net/")}
    try:
        check_shapes_and_dtypes(saved, network.parameters)
    except BNetError as error:
        expected = f"a checkpoint of this net ({error.subject}: {error.expected})"
        raise FileError(location, expected=expected, actual=error.actual, hint=hint) from error
    if header.get("net") != digest_network(network):
        actual = "a checkpoint of another declaration"
        raise FileError(location, expected="a checkpoint of this net", actual=actual, hint=hint)


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


def check_settings(
    path: Path, checkpoint: Checkpoint, settings: Mapping[str, Any], changeable: Collection[str] = ()
) -> None:
    """Raise an error if a setting of the run differs from the checkpoint and is not in `changeable`."""
    saved, current = checkpoint.settings, json.loads(json.dumps(dict(settings)))
    changed = [name for name in sorted({*saved, *current} - {*changeable}) if saved.get(name) != current.get(name)]
    if changed:
        before = ", ".join(f"{name}={saved.get(name)!r}" for name in changed)
        actual = ", ".join(f"{name}={current.get(name)!r}" for name in changed)
        hint = "Use another folder"
        if {*changed} <= CHANGEABLE_SETTINGS:
            hint += ", or bt.Checkpoints(folder, resume='changed')"
        expected = f"the settings of the run that wrote the checkpoint: {before}"
        raise BNetError(str(path), expected=expected, actual=actual, hint=hint)
