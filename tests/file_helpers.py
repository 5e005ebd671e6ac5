"""What the tests of files share: equal nets, and files that are tampered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bnet_transformer.declare import Network, io as store


def same(one: Network, other: Network) -> None:
    """Equal declarations, parameters equal to the bit."""
    assert one.declaration == other.declaration
    assert (one.seed, one.graph, one.specs) == (other.seed, other.graph, other.specs)
    assert one.parameters.keys() == other.parameters.keys()
    for name, value in one.parameters.items():
        result = other.parameters[name]
        assert result.dtype == value.dtype and result.shape == value.shape
        bits = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (value, result))
        assert torch.equal(*bits), name


def rewrite(
    path: Path,
    header: Callable[[dict[str, Any]], Any] | None = None,
    *,
    signed: bool = False,
    **tensors: torch.Tensor | None,
) -> Path:
    """The same file with another header, its hash true where it is `signed`; tensors changed, added or (None) gone."""
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
        held = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    if header is not None:
        given = json.loads(metadata[store.METADATA_KEY])
        changed = header(given)
        given = given if changed is None else changed
        if signed:
            given["sha256"] = store._compute_sha256(given, held)
        metadata[store.METADATA_KEY] = json.dumps(given)
    held |= {name: value for name, value in tensors.items() if value is not None}
    save_file({n: v for n, v in held.items() if tensors.get(n, v) is not None}, path, metadata)
    return path
