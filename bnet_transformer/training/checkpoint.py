"""Checkpoints: all that a run needs to go on, in one safetensors file that is written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.files import as_path, replacing
from bnet_transformer.network import Network

FORMAT, VERSION, KEY, NAME = "bnet_transformer checkpoint", 1, "bnet_transformer", "checkpoint.safetensors"
CHANGEABLE = frozenset(("rate", "schedule", "warmup", "dim", "clip", "precision", "steps"))


@dataclass(frozen=True)
class Checkpoint:
    """A run after some steps: tensors (`net/...`, `first/...`, `second/...`, `best/...`), losses, settings."""

    step: int
    tensors: Mapping[str, Tensor]
    losses: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...]
    settings: Mapping[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors under one heading."""
        return {k[len(name) + 1 :]: v for k, v in self.tensors.items() if k.startswith(f"{name}/")}


def diverged(step: int, expected: str, told: str, ways: str, path: Path | None, kept: int | None) -> BNetError:
    """The error of a step that went wrong: what was told, what is kept (the checkpoint of which step), the ways on."""
    if kept is not None:
        ways = f"{path} keeps the last good checkpoint, of step {kept}: resume='changed' with {ways}"
    elif path is None:
        told = f"{told}; no checkpoint was kept (folder=)"
    else:
        told = f"{told}; it came before the first good checkpoint (every=)"
    return BNetError(f"step {step}", expected=expected, got=told, allowed=ways)


def path_of(folder: object) -> Path:
    """The file of the checkpoint in a folder, which is made where it is not there."""
    where = as_path(folder)
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(str(where), expected="a folder for checkpoints", got=error.strerror or str(error)) from error
    return where / NAME


def write(path: Path, network: Network, found: Checkpoint) -> None:
    """Put a checkpoint in the place of the last one."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "net": digest(network),
        "step": found.step,
        "settings": dict(found.settings),
    }
    tensors = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in found.tensors.items()}
    tensors["losses"] = torch.tensor(found.losses, dtype=torch.float64)
    tensors["held_out"] = torch.tensor(found.held_out, dtype=torch.float64).reshape(-1, 2)
    head["sha256"] = _content(head, tensors)
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={KEY: json.dumps(head)})


def read(path: Path, network: Network) -> Checkpoint:
    """The checkpoint of this net; any other is refused."""
    where, wanted = str(path), "a checkpoint of train"
    try:
        with safe_open(path, framework="pt") as opened:
            head = json.loads((opened.metadata() or {}).get(KEY, "null"))
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise FileError(where, expected=wanted, got=str(error)) from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise FileError(where, expected=wanted, got="safetensors of something else")
    if head.get("version") != VERSION:
        raise FileError(where, expected=f"format version {VERSION}", got=f"version {head.get('version')}")
    if head.pop("sha256", None) != _content(head, tensors):
        raise FileError(where, expected="the content that was saved (its SHA-256)", got="other bytes")
    _check_net(where, network, head, tensors)
    losses, held_out = tensors.pop("losses").tolist(), tensors.pop("held_out").tolist()
    return Checkpoint(
        head["step"], tensors, tuple(losses), tuple((int(step), loss) for step, loss in held_out), head["settings"]
    )


def digest(network: Network) -> str:
    """What tells another net: a hash of its declaration."""
    return hashlib.sha256(repr(network.declaration).encode()).hexdigest()


def _content(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """What tells a flipped bit: a hash of everything."""
    found = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name].reshape(-1).contiguous()
        found.update(f"{name} {value.dtype} {tuple(tensors[name].shape)}".encode())
        found.update(value.view(torch.uint8).numpy().data if value.numel() else b"")
    return found.hexdigest()


def _check_net(where: str, network: Network, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse the parameters of another net: by name, by shape and type, then by the declaration."""
    kept = {name[4:]: tuple(value.shape) for name, value in tensors.items() if name.startswith("net/")}
    allowed = "another folder=, or the net that the checkpoint is of"
    for name in sorted(network.shapes.keys() ^ kept.keys()):
        got = f"one with {name}" if name in kept else f"one without {name}"
        raise FileError(where, expected="a checkpoint of this net", got=got, allowed=allowed)
    for name, shape in network.shapes.items():
        if kept[name] != shape:
            raise FileError(where, expected=f"{name} of shape {shape}", got=f"shape {kept[name]}", allowed=allowed)
        dtype = tensors[f"net/{name}"].dtype
        if dtype != network.parameters[name].dtype:
            raise FileError(where, expected=f"{name} in {network.parameters[name].dtype}", got=dtype, allowed=allowed)
    if head.get("net") != digest(network):
        raise FileError(where, expected="a checkpoint of this net", got="another declaration", allowed=allowed)


def check_settings(path: Path, found: Checkpoint, settings: Mapping[str, Any], free: Collection[str] = ()) -> None:
    """Refuse to go on with other settings than those that the run began with, but for those that are `free`."""
    kept, now = found.settings, json.loads(json.dumps(dict(settings)))
    other = [name for name in sorted({*kept, *now} - {*free}) if kept.get(name) != now.get(name)]
    if other:
        wanted = "the settings that the run began with: " + ", ".join(f"{name}={kept.get(name)!r}" for name in other)
        got = ", ".join(f"{name}={now.get(name)!r}" for name in other)
        ways = "another folder=" + (", resume='changed'" if {*other} <= CHANGEABLE else "")
        raise BNetError(str(path), expected=wanted, got=got, allowed=ways)
