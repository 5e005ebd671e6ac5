"""`save` and `load`: a net as one safetensors file, checked on the way out and distrusted on the way in.

Its declaration is plain JSON data: every dataclass by its class and fields, every value of the type it had.

A dataclass is `{"class": name, field: value, ...}`, the name alone for classes of this package and `module:Class` for
others; a tuple is a JSON list; a list, a mapping and a float that is not finite are `{"list": ...}`, `{"dict": ...}`
and `{"float": ...}`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_bytes, save_file
from torch import Tensor

from bnet_transformer import declare as networks, tpm
from bnet_transformer._core.files import KEY, LONGEST_HEADER, as_path, read_tensors, reading, replacing
from bnet_transformer._core.naming import Reach
from bnet_transformer._core.tokenizer import Tokenizer
from bnet_transformer.declare import Declaration, Network
from bnet_transformer.declare.network import check_parameters, outline
from bnet_transformer.errors import BNetError, FileError, unknown

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
    header, tensors = read_tensors(where, WANTED, FORMAT, VERSION, _digest)
    with reading(where, WANTED):
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
        wanted = "classes of this package: to load others runs their code"
        allowed = f"where you trust them, trust={tuple(strange)!r}"
        raise FileError(str(where), expected=wanted, got=", ".join(strange), allowed=allowed)
    declaration = from_plain(plain, f"{where}: declaration")
    if not isinstance(declaration, Declaration):
        raise FileError(str(where), expected="a Declaration", got=type(declaration).__name__)
    return dataclasses.replace(
        outline(declaration, header["seed"]), tokenizer=_tokenizer(where, header.get("tokenizer"))
    )


def _tokenizer(where: Path, told: object) -> Tokenizer | None:
    """The tokenizer of a net that has one."""
    match told:
        case None:
            return None
        case [str(), None | str()] | [str(), None | str(), int()] | [str(), None | str(), None | int(), True]:
            return Tokenizer(*told)  # type: ignore[arg-type]
    raise FileError(str(where), expected="a tokenizer: its text and the role that takes segments", got=told)


# declarations as JSON data

OURS = __name__.partition(".")[0] + ".models."

REGISTRY: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(getattr(tpm, name) for name in tpm.__all__),
        *(getattr(networks, name) for name in ("Arrow", "Declaration", "Node", "Plate", "Stack")),
        Reach,
    )
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and not inspect.isabstract(kind)
}


def to_plain(value: object, where: str) -> Any:
    """A value as JSON data; refuses what would not come back as it is."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) in (tuple, torch.Size):
        return [to_plain(part, f"{where}[{k}]") for k, part in enumerate(value)]  # type: ignore[arg-type, var-annotated]
    if type(value) is list:
        return {"list": [to_plain(part, f"{where}[{k}]") for k, part in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"dict": [[to_plain(key, where), to_plain(part, f"{where}[{key!r}]")] for key, part in value.items()]}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        allowed = "dataclasses, tuples, lists, mappings, strings, numbers, true, false and None"
        raise BNetError(where, expected="a value that a file can hold", got=value, allowed=allowed)
    name = _name(type(value), where)
    stored = [field.name for field in dataclasses.fields(value) if field.init]
    return {"class": name, **{field: to_plain(getattr(value, field), f"{where}.{field}") for field in stored}}


def _name(kind: type, where: str) -> str:
    """The name under which a class is stored."""
    if REGISTRY.get(kind.__name__) is kind:
        return kind.__name__
    got = f"{kind.__module__}.{kind.__qualname__}"
    if "__dataclass_fields__" not in vars(kind):
        raise BNetError(where, expected="a class that is itself a dataclass (@dataclass(frozen=True))", got=got)
    if "<locals>" in kind.__qualname__:
        raise BNetError(where, expected="a class at the top of a module, which can be imported", got=got)
    return f"{kind.__module__}:{kind.__qualname__}"


def strangers(plain: object) -> Iterator[str]:
    """The import paths of all classes in JSON data that are not of this package (of its registry or its models)."""
    stack = [plain]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            name = part.get("class")
            if isinstance(name, str) and ":" in name and not name.startswith(OURS):
                yield name
            stack.extend(part.values())
        elif isinstance(part, list):
            stack.extend(part)


def from_plain(plain: object, where: str) -> Any:
    """The value of JSON data. It imports the classes that are named: ask `strangers` first."""
    if isinstance(plain, list):
        return tuple(from_plain(part, f"{where}[{k}]") for k, part in enumerate(plain))
    if not isinstance(plain, dict):
        return plain
    if "class" in plain:
        return _object(plain, where)
    match plain:
        case {"list": list(parts), **rest} if not rest:
            return [from_plain(part, f"{where}[{k}]") for k, part in enumerate(parts)]
        case {"dict": list(pairs), **rest} if not rest and all(isinstance(p, list) and len(p) == 2 for p in pairs):
            return {from_plain(key, where): from_plain(part, f"{where}[{key!r}]") for key, part in pairs}
        case {"float": "inf" | "-inf" | "nan" as name, **rest} if not rest:
            return float(name)
    raise FileError(where, expected="an object with a class, a list, a dict or a float", got=plain)


def _object(plain: dict[str, Any], where: str) -> Any:
    kind = _class(plain["class"], where)
    wanted = {field.name: field for field in dataclasses.fields(kind) if field.init}
    given = {name: from_plain(part, f"{where}.{name}") for name, part in plain.items() if name != "class"}
    for name in given:
        if name not in wanted:
            raise FileError(where, expected=f"fields of {plain['class']}: {', '.join(wanted)}", got=name)
    for name, field in wanted.items():
        bare = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if bare and name not in given:
            raise FileError(where, expected=f"the field {name} of {plain['class']}", got="none")
    return kind(**given)


def _class(name: object, where: str) -> type:
    """The class of that name or import path, a dataclass."""
    if not isinstance(name, str):
        raise FileError(where, expected="the name of a class", got=name)
    module, colon, path = name.partition(":")
    if not colon:
        if name not in REGISTRY:
            known = ", ".join(sorted(REGISTRY))
            raise FileError(where, expected="a class of this package", got=name, allowed=known)
        return REGISTRY[name]
    try:
        held = importlib.import_module(module)
        found: Any = functools.reduce(inspect.getattr_static, path.split("."), held)  # what asks nobody runs nothing
    except Exception as error:  # a stranger's module may fail in any way
        got = f"{name} ({type(error).__name__}: {error})"
        raise FileError(where, expected="a class that can be imported", got=got) from error
    if not isinstance(found, type) or not dataclasses.is_dataclass(found) or inspect.isabstract(found):
        raise FileError(where, expected="the path of a dataclass", got=name, allowed="a TPM, a Score, a part of one")
    if (found.__module__, found.__qualname__) != (module, path):  # who trusts a module trusts none that it imports
        raise FileError(where, expected="a class where it is defined", got=name)
    return found
