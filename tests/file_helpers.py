"""Helpers for tests of files: equality of networks, and files with a changed header or changed tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bnet_transformer.declare import Network, io as store


def assert_same(one: Network, other: Network) -> None:
    """Assert that declarations are equal and parameters are bitwise equal."""
    assert one.declaration == other.declaration
    assert (one.seed, one.graph, one.specs) == (other.seed, other.graph, other.specs)
    assert one.parameters.keys() == other.parameters.keys()
    for name, value in one.parameters.items():
        peer = other.parameters[name]
        assert peer.dtype == value.dtype and peer.shape == value.shape
        bits = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (value, peer))
        assert torch.equal(*bits), name


def rewrite(
    path: Path,
    header: Callable[[dict[str, Any]], Any] | None = None,
    *,
    signed: bool = False,
    sign: Callable[[dict[str, Any], dict[str, torch.Tensor]], str] = store._compute_sha256,
    **tensors: torch.Tensor | None,
) -> Path:
    """Rewrite a file with another header, hashed by `sign` if `signed`, and other tensors; None removes a tensor."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        stored = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if header is not None:
        content = json.loads(metadata[store.METADATA_KEY])
        changed = header(content)
        content = content if changed is None else changed
        if signed:
            content["sha256"] = sign({key: value for key, value in content.items() if key != "sha256"}, stored)
        metadata[store.METADATA_KEY] = json.dumps(content)
    stored |= {name: value for name, value in tensors.items() if value is not None}
    save_file({n: v for n, v in stored.items() if tensors.get(n, v) is not None}, path, metadata)
    return path
