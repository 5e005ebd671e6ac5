"""Checkpoints: all that a run needs to go on, in one safetensors file that is written whole or not at all."""

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
    """Where a run keeps its checkpoints, and whether it goes on from the one that is there.

    Args:
        folder: The folder of the checkpoint; it is made where it does not exist.
        resume: False refuses a folder that has a checkpoint. True goes on from it bit for bit, with the same settings,
            or begins where there is none. `"changed"` goes on with another rate, schedule, warmup, dim, clip, precision
            or number of steps.

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
        """The settings that a resumed run may have others of."""
        return CHANGEABLE_SETTINGS if self.resume == "changed" else frozenset()

    def create_path(self) -> Path:
        """The file of the checkpoint; its folder is made where it is not there."""
        folder = Path(self.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            got = error.strerror or str(error)
            raise FileError(str(folder), expected="a folder for checkpoints", actual=got) from error
        return folder / FILE_NAME

    def prepare(self) -> tuple[Path, bool]:
        """The file of the checkpoint, and whether the run goes on from it.

        Raises:
            FileError: Where there is a checkpoint that the run is not to go on from.
        """
        path = self.create_path()
        if path.exists() and not self.resume:
            allowed = "bt.Checkpoints(folder, resume=True), another folder"
            raise FileError(str(path), expected="no checkpoint yet", actual="one", allowed=allowed)
        return path, path.exists()

    @classmethod
    def from_value(cls, value: Checkpoints | str | Path | None) -> Checkpoints | None:
        """The config of what a caller gives: a folder alone is one without `resume`."""
        return value if value is None or isinstance(value, Checkpoints) else cls(value)


@dataclass(frozen=True)
class Checkpoint:
    """A run after some steps: tensors (`net/...`, `first/...`, `second/...`, `best/...`), losses, settings."""

    step: int
    tensors: Mapping[str, Tensor]
    losses: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...]
    settings: Mapping[str, Any]

    def get_tensors(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under one heading."""
        return {k[len(prefix) + 1 :]: v for k, v in self.tensors.items() if k.startswith(f"{prefix}/")}


def divergence_error(
    step: int, expected: str, actual: str, remedies: str, path: Path | None, checkpoint_step: int | None
) -> BNetError:
    """The error of a step that went wrong: what was told, what is kept (the checkpoint of which step), the ways on."""
    if checkpoint_step is not None:
        resumed = "bt.Checkpoints(folder, resume='changed')"
        remedies = f"{path} keeps the last good checkpoint, of step {checkpoint_step}: {resumed} with {remedies}"
    elif path is None:
        actual = f"{actual}; no checkpoint was kept (checkpoints=)"
    else:
        actual = f"{actual}; it came before the first good checkpoint (every=)"
    return BNetError(f"step {step}", expected=expected, actual=actual, allowed=remedies)


def lock_checkpoints(checkpoints: Checkpoints | None, is_main_process: bool) -> AbstractContextManager[None]:
    """While a run keeps checkpoints in a folder no other does; of several processes the `is_main_process` sees to it."""
    return nullcontext() if checkpoints is None or not is_main_process else exclusive_lock(checkpoints.create_path())


def write_checkpoint(path: Path, network: Network, checkpoint: Checkpoint) -> None:
    """Put a checkpoint in the place of the last one."""
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
    """The checkpoint of this net; any other is refused."""
    location = str(path)
    header, tensors = read_tensors(path, EXPECTED, FORMAT, VERSION)
    if header["version"] < VERSION:  # its hashes name modules that classes have left since
        got = "one of an earlier version of the library"
        raise FileError(
            location, expected=f"a checkpoint of format version {VERSION}", actual=got, allowed="another folder"
        )
    _check_network(location, network, header, tensors)
    with wrap_read_errors(path, EXPECTED):
        losses, held_out = tensors.pop("losses").tolist(), tensors.pop("held_out").tolist()
        step, settings = check_int("step", header["step"], minimum=0), check_mapping("settings", header["settings"])
        told = tuple((int(at), float(loss)) for at, loss in held_out)
        return Checkpoint(step, tensors, tuple(map(float, losses)), told, settings)


def digest_network(network: Network) -> str:
    """What tells another net: a hash of its declaration, by what it holds (a repr may tell where something lies)."""
    try:
        return compute_digest(network.declaration)
    except BNetError as error:
        expected = "one that a checkpoint can tell from others"
        raise BNetError("declaration", expected=expected, actual=error.actual, allowed=error.allowed) from error


def _check_network(location: str, network: Network, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse the parameters of another net: by name, by shape and type, then by the declaration."""
    allowed = "another folder, or the net that the checkpoint is of"
    kept = {name.removeprefix("net/"): value for name, value in tensors.items() if name.startswith("net/")}
    try:
        check_shapes_and_dtypes(kept, network.parameters)
    except BNetError as error:
        wanted = f"a checkpoint of this net ({error.subject}: {error.expected})"
        raise FileError(location, expected=wanted, actual=error.actual, allowed=allowed) from error
    if header.get("net") != digest_network(network):
        raise FileError(location, expected="a checkpoint of this net", actual="another declaration", allowed=allowed)


def check_shapes_and_dtypes(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
    """Refuse tensors that have not the names, shapes and types of others."""
    for name in sorted({*tensors, *reference}):
        got, wanted = tensors.get(name), reference.get(name)
        if got is None or wanted is None or (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            form = "no such tensor" if wanted is None else f"{wanted.dtype} of shape {tuple(wanted.shape)}"
            came = "none" if got is None else f"{got.dtype} of shape {tuple(got.shape)}"
            raise BNetError(name, expected=f"{form}, as this run has", actual=came)


def check_settings(
    path: Path, checkpoint: Checkpoint, settings: Mapping[str, Any], changeable: Collection[str] = ()
) -> None:
    """Refuse to go on with other settings than those that the run began with, but for those that are `changeable`."""
    kept, now = checkpoint.settings, json.loads(json.dumps(dict(settings)))
    other = [name for name in sorted({*kept, *now} - {*changeable}) if kept.get(name) != now.get(name)]
    if other:
        wanted = "the settings that the run began with: " + ", ".join(f"{name}={kept.get(name)!r}" for name in other)
        got = ", ".join(f"{name}={now.get(name)!r}" for name in other)
        ways = "another folder" + (
            ", bt.Checkpoints(folder, resume='changed')" if {*other} <= CHANGEABLE_SETTINGS else ""
        )
        raise BNetError(str(path), expected=wanted, actual=got, allowed=ways)
