"""A fit on disk: one safetensors file that holds the net's own file, byte for byte, and what the fit found."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bnet_transformer import files
from bnet_transformer.errors import FileError
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.network import Network
from bnet_transformer.training import alone

FORMAT, VERSION, WANTED = "bnet_transformer fit", 1, "a fit that save wrote"
TOLD = (
    *("method", "sentences", "judged_on", "judged_by", "restart", "finished", "approximate"),
    *("learned", "budget", "missing", "divergent", "matched", "effective_sample_size"),
)


def save(fit: Fit[Any], path: str | os.PathLike[str]) -> None:
    """Write a fit, whole or not at all."""
    tensors = {"net": torch.frombuffer(bytearray(files.as_bytes(fit.network)), dtype=torch.uint8)}
    tensors["bounds"] = torch.tensor(fit.bounds, dtype=torch.float64)
    tensors["measured"] = torch.tensor(fit.measured, dtype=torch.float64).reshape(-1, 3)
    tensors |= {f"samples/{name}": value.detach().cpu().contiguous() for name, value in fit.samples.items()}
    tensors |= {f"choices/{name}": value.detach().cpu().contiguous() for name, value in fit.choices.items()}
    tensors |= {f"statistics/{name}": value.contiguous() for name, value in fit.statistics.items()}
    with alone():  # files are written by one rank
        known = fit.log_likelihoods
    if known is not None:
        tensors["log_likelihoods"] = known.detach().cpu().contiguous()
    head = {"format": FORMAT, "version": VERSION, "told": {name: getattr(fit, name) for name in TOLD}}
    files.write_tensors(path, head, tensors)


def is_fit(path: str | os.PathLike[str]) -> bool:
    """True for a file that `save` wrote; whatever else is wrong with a file is for those to say who read it."""
    return files.is_of(path, WANTED, FORMAT)


def load(path: str | os.PathLike[str], *, trust: bool | str | Collection[str] = ()) -> Fit[Network]:
    """The fit that `save` wrote, every byte of it compared with its hash."""
    where = files.as_path(path)
    head, tensors = files.read_tensors(where, WANTED, FORMAT, VERSION)
    with files.reading(where, WANTED):
        return _fit(where, head, tensors, trust)


def _fit(
    where: Path, head: Mapping[str, Any], tensors: Mapping[str, Tensor], trust: bool | str | Collection[str]
) -> Fit[Network]:
    """The fit of what a file holds."""
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


def _net(where: Path, content: Tensor, trust: bool | str | Collection[str]) -> Network:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.safetensors")
        path.write_bytes(content.numpy().tobytes())
        try:
            return files.load(path, trust=trust)
        except FileError as error:
            raise FileError(str(where), expected=error.expected, got=error.got, allowed=error.allowed) from error
