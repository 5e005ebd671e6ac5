"""A fit on disk: one safetensors file that holds the net's own file, byte for byte, and what the fit found."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bnet_transformer import files
from bnet_transformer.errors import FileError
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.network import Network

FORMAT, VERSION, KEY = "bnet_transformer fit", 1, "bnet_transformer"
TOLD = (
    *("method", "sentences", "judged_on", "restart", "finished", "approximate"),
    *("learned", "budget", "missing", "divergent", "matched"),
)


def save(fit: Fit[Any], path: str | os.PathLike[str]) -> None:
    """Write a fit, whole or not at all."""
    tensors = {"net": _net_bytes(fit.network)}
    tensors["bounds"] = torch.tensor(fit.bounds, dtype=torch.float64)
    tensors["measured"] = torch.tensor(fit.measured, dtype=torch.float64).reshape(-1, 3)
    tensors |= {f"samples/{name}": value.detach().cpu().contiguous() for name, value in fit.samples.items()}
    tensors |= {f"choices/{name}": value.detach().cpu().contiguous() for name, value in fit.choices.items()}
    tensors |= {f"statistics/{name}": value.contiguous() for name, value in fit.statistics.items()}
    if fit.log_likelihoods is not None:
        tensors["log_likelihoods"] = fit.log_likelihoods.detach().cpu().contiguous()
    head = {"format": FORMAT, "version": VERSION, "told": {name: getattr(fit, name) for name in TOLD}}
    head["sha256"] = _content(head, tensors)
    with files.replacing(path) as temporary:
        save_file(tensors, temporary, metadata={KEY: json.dumps(head)})


def is_fit(path: str | os.PathLike[str]) -> bool:
    """True for a file that `save` wrote; whatever else is wrong with a file is for those to say who read it."""
    try:
        with safe_open(files.as_path(path), framework="pt") as opened:
            head = json.loads((opened.metadata() or {}).get(KEY, "null"))
    except (OSError, SafetensorError, ValueError, RecursionError):
        return False
    return isinstance(head, dict) and head.get("format") == FORMAT


def load(path: str | os.PathLike[str], *, trust: bool | str | Collection[str] = ()) -> Fit[Network]:
    """The fit that `save` wrote, every byte of it compared with its hash."""
    where, wanted = str(files.as_path(path)), "a fit that save wrote"
    try:
        with safe_open(where, framework="pt") as opened:
            head = json.loads((opened.metadata() or {})[KEY])
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise FileError(where, expected=wanted, got=str(error)) from error
    if head.get("version") != VERSION:
        raise FileError(where, expected=f"format version {VERSION}", got=f"version {head.get('version')}")
    if head.pop("sha256", None) != _content(head, tensors):
        raise FileError(where, expected="the content that was saved (its SHA-256)", got="other bytes")
    told: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in head["told"].items()
    }
    samples = {name[8:]: value for name, value in tensors.items() if name.startswith("samples/")}
    measured = tuple((int(step), int(who), score) for step, who, score in tensors["measured"].tolist())
    network = _net(where, tensors["net"], trust)
    return Fit(
        network,
        **told,
        bounds=tuple(tensors["bounds"].tolist()),
        measured=measured,
        samples=samples,
        known_likelihoods=tensors.get("log_likelihoods"),
        statistics={name[11:]: value for name, value in tensors.items() if name.startswith("statistics/")},
        choices={name[8:]: value for name, value in tensors.items() if name.startswith("choices/")},
    )


def _net_bytes(network: Network) -> Tensor:
    """The file of the net, as `files.save` writes it."""
    with tempfile.TemporaryDirectory() as folder:
        files.save(network, Path(folder, "net.safetensors"))
        return torch.frombuffer(bytearray(Path(folder, "net.safetensors").read_bytes()), dtype=torch.uint8)


def _net(where: str, content: Tensor, trust: bool | str | Collection[str]) -> Network:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.safetensors")
        path.write_bytes(content.numpy().tobytes())
        try:
            return files.load(path, trust=trust)
        except FileError as error:
            raise FileError(where, expected=error.expected, got=error.got, allowed=error.allowed) from error


def _content(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """What tells a flipped bit: a hash of everything."""
    found = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return found.hexdigest()
