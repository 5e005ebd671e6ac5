"""`save` and `load`: a net as one safetensors file, checked on the way out and distrusted on the way in."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_bytes
from safetensors.torch import save_file
from torch import Tensor

from bnet_transformer._core.tokenizer import Tokenizer
from bnet_transformer.errors import BNetError, FileError, unknown
from bnet_transformer.files.atomic import as_path, replacing
from bnet_transformer.files.plain import from_plain, strangers, to_plain
from bnet_transformer.files.tensors import KEY, LONGEST_HEADER, look, opening, read_head, reading
from bnet_transformer.network import Declaration, Network
from bnet_transformer.network.network import check_parameters, outline

FORMAT = "bnet_transformer net"
VERSION = 1
WANTED = "a net that save wrote"
DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


def save(network: Network, path: str | os.PathLike[str]) -> None:
    """Write a net to one safetensors file, whole or not at all; it refuses a net that `load` would not give back."""
    tensors, metadata = _content(network)
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def as_bytes(network: Network) -> bytes:
    """The file that `save` writes."""
    return save_bytes(*_content(network))


def _content(network: Network) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a net's file."""
    if not isinstance(network, Network):
        raise BNetError("save", expected="a Network", got=network)
    for name, value in network.parameters.items():
        if name not in network.shapes:
            raise unknown("parameter", name, network.shapes)
        if value.is_meta or value.layout is not torch.strided:
            raise BNetError(name, expected="a dense tensor with values", got=f"{value.layout} on {value.device}")
        if value.dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise BNetError(name, expected="a type that a file can hold", got=value.dtype, allowed=allowed)
    check_parameters(network.shapes, network.parameters, network.tables)
    # Copies on the CPU, each with a storage of its own and plain strides: safetensors takes no other.
    tensors = {
        name: torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value.detach())
        for name, value in network.parameters.items()
    }
    return tensors, {KEY: _header(network, tensors)}


def load(path: str | os.PathLike[str], *, trust: bool | str | Collection[str] = ()) -> Network:
    """The net that `save` wrote.

    A class from outside the package is imported only if `trust` names it (`"module:Class"`) or its module; True trusts
    the file entirely, as one trusts a program. Anything wrong with the file is a FileError.
    """
    where = as_path(path)
    if not isinstance(trust, bool | Collection):
        raise BNetError("trust", expected="True, or the names of classes or modules", got=trust)
    look(where, WANTED)
    with reading(where, WANTED), opening(where) as opened:
        header = read_head(where, opened, WANTED, FORMAT, VERSION)
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if _digest(header, tensors) != header.get("sha256"):
            raise FileError(str(where), expected="the content that was saved (its SHA-256)", got="other bytes")
        return _read_net(where, header, trust).with_parameters(tensors)


def _header(network: Network, tensors: Mapping[str, Tensor]) -> str:
    """The JSON that tells all but the parameters, proved to read back as the declaration that it is."""
    try:
        library = importlib.metadata.version(KEY)
    except importlib.metadata.PackageNotFoundError:
        library = "unknown"
    plain = to_plain(network.declaration, "declaration")
    head = {"format": FORMAT, "version": VERSION, "library": library, "seed": network.seed, "declaration": plain}
    if network.tokenizer is not None:
        reader = network.tokenizer
        told = [reader.text, reader.segments, reader.start, reader.apart]
        short = 4 if reader.apart else 2 if reader.start is None else 3
        head["tokenizer"] = told[:short]
    try:
        text = json.dumps({**head, "sha256": _digest(head, tensors)}, allow_nan=False)
        same = from_plain(json.loads(text)["declaration"], "declaration") == network.declaration
    except (ValueError, TypeError, RecursionError) as error:
        raise BNetError("declaration", expected="one that reads back from JSON", got=f"{error}") from error
    if not same:
        raise BNetError("declaration", expected="one that reads back from JSON as it is", got="another")
    if len(text) > LONGEST_HEADER // 2:
        raise BNetError("declaration", expected=f"at most {LONGEST_HEADER // 2} bytes of JSON", got=len(text))
    return text


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """What tells a flipped bit: a hash of the seed, the declaration, the tokenizer and every tensor."""
    told = [header["tokenizer"]] if "tokenizer" in header else []
    found = hashlib.sha256(json.dumps([header["seed"], header["declaration"], *told]).encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _read_net(where: Path, header: Mapping[str, Any], trust: bool | str | Collection[str]) -> Network:
    """The net without its parameters, its declaration checked as any other."""
    plain = header["declaration"]
    trusted = (trust,) if isinstance(trust, str) else () if isinstance(trust, bool) else tuple(trust)
    strange = [
        name
        for name in dict.fromkeys(strangers(plain))
        if trust is not True and name not in trusted and name.partition(":")[0] not in trusted
    ]
    if strange:
        raise FileError(
            str(where),
            expected="classes of this package: to load others runs their code",
            got=", ".join(strange),
            allowed=f"where you trust them, trust={tuple(strange)!r}",
        )
    declaration = from_plain(plain, f"{where}: declaration")
    if not isinstance(declaration, Declaration):
        raise FileError(str(where), expected="a Declaration", got=type(declaration).__name__)
    return replace(outline(declaration, header["seed"]), tokenizer=_tokenizer(where, header.get("tokenizer")))


def _tokenizer(where: Path, told: object) -> Tokenizer | None:
    """The tokenizer of a net that has one."""
    if told is None:
        return None
    match told:
        case [str(text), None | str() as segments]:
            return Tokenizer(text, segments)
        case [str(text), None | str() as segments, int(start)]:
            return Tokenizer(text, segments, start)
        case [str(text), None | str() as segments, None | int() as start, True]:
            return Tokenizer(text, segments, start, apart=True)
    raise FileError(str(where), expected="a tokenizer: its text and the role that takes segments", got=told)
