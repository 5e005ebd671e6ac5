"""`save` and `load`: a net as one safetensors file. It is checked when it is written, and not trusted when it is read.

The declaration is JSON, as in `_core.results`. A dataclass is `{"class": name, field: value, ...}`, where name is
`Class` for classes of this package and `module:Class` for others.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_bytes, save_file
from torch import Tensor

from bnet_transformer import declare as networks, tpm
from bnet_transformer._core import results
from bnet_transformer._core.checks import check_seed
from bnet_transformer._core.files import (
    MAX_HEADER_BYTES,
    METADATA_KEY,
    as_path,
    atomic_write,
    read_tensors,
    wrap_read_errors,
)
from bnet_transformer._core.naming import Reach
from bnet_transformer._core.results import register_codec
from bnet_transformer._core.tokens import Tokenizer
from bnet_transformer.declare import Declaration, Network
from bnet_transformer.declare.network import build_structure, check_parameters
from bnet_transformer.errors import BNetError, FileError, unknown_name_error

FORMAT = "bnet_transformer net"
VERSION = 1
EXPECTED = "a net that save wrote"
STORABLE_DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


def save(network: Network, path: str | os.PathLike[str]) -> None:
    """Write a net to one safetensors file, atomically; raises an error if `load` would not restore the net exactly."""
    tensors, metadata = _serialize(network)
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def to_bytes(network: Network) -> bytes:
    """The content of the file that `save` writes."""
    return save_bytes(*_serialize(network))


def _serialize(network: Network) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a net's file."""
    if not isinstance(network, Network):
        raise BNetError("save", expected="a Network", actual=network)
    for name, value in network.parameters.items():
        if name not in network.shapes:
            raise unknown_name_error("parameter", name, network.shapes)
        if value.is_meta or value.layout is not torch.strided:
            raise BNetError(name, expected="a dense tensor with values", actual=f"{value.layout} on {value.device}")
        if value.dtype not in STORABLE_DTYPES:
            allowed = ", ".join(map(str, STORABLE_DTYPES))
            raise BNetError(name, expected="a type that can be stored", actual=value.dtype, allowed=allowed)
    check_parameters(network.shapes, network.parameters, network.logit_names)
    # safetensors requires tensors on the CPU with contiguous memory that no other tensor shares.
    tensors = {
        name: torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value.detach())
        for name, value in network.parameters.items()
    }
    return tensors, {METADATA_KEY: _serialize_header(network, tensors)}


def load(path: str | os.PathLike[str], *, trust: bool | str | Collection[str] = ()) -> Network:
    """The net in a file that `save` wrote; every fault of the file is a `FileError`.

    A class from outside the package is imported only if `trust` names it (`"module:Class"`) or its module. `trust=True`
    trusts the whole file, which can then run code.
    """
    file_path = as_path(path)
    if not isinstance(trust, bool | Collection):
        raise BNetError("trust", expected="True, or names of classes or modules", actual=trust)
    header, tensors = read_tensors(file_path, EXPECTED, FORMAT, VERSION, _compute_sha256)
    with wrap_read_errors(file_path, EXPECTED):
        return _read_network(file_path, header, trust).with_parameters(tensors)


def to_tensor(network: Network) -> Tensor:
    """The content of the file that `save` writes, as bytes in a tensor, which the file of a result contains."""
    return torch.frombuffer(bytearray(to_bytes(network)), dtype=torch.uint8)


def from_tensor(content: Tensor, trust: bool | str | Collection[str] = ()) -> Network:
    """The net of the bytes that `to_tensor` returned."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.safetensors")
        path.write_bytes(content.numpy().tobytes())
        return load(path, trust=trust)


def _serialize_header(network: Network, tensors: Mapping[str, Tensor]) -> str:
    """The JSON header: everything except the parameters.

    Before it is written, it is parsed again and compared with the declaration.
    """
    try:
        library = importlib.metadata.version(METADATA_KEY)
    except importlib.metadata.PackageNotFoundError:
        library = "unknown"
    data = to_json_data(network.declaration, "declaration")
    header = {"format": FORMAT, "version": VERSION, "library": library, "seed": network.seed, "declaration": data}
    if network.tokenizer is not None:
        tokenizer = network.tokenizer
        fields = [tokenizer.json_text, tokenizer.segments_role, tokenizer.start_token_id, tokenizer.first_stack_only]
        num_fields = 4 if tokenizer.first_stack_only else 2 if tokenizer.start_token_id is None else 3
        header["tokenizer"] = fields[:num_fields]
    try:
        text = json.dumps({**header, "sha256": _compute_sha256(header, tensors)}, allow_nan=False)
        is_same = from_json_data(json.loads(text)["declaration"], "declaration") == network.declaration
    except (ValueError, TypeError, RecursionError) as error:
        raise BNetError("declaration", expected="one that JSON can store", actual=f"{error}") from error
    if not is_same:
        hint = "Remove NaN, and use a frozen dataclass for your own classes, so that equal fields make them equal"
        raise BNetError("declaration", expected="one that is equal to its copy from JSON", hint=hint)
    if len(text) > MAX_HEADER_BYTES // 2:
        raise BNetError("declaration", expected=f"at most {MAX_HEADER_BYTES // 2} bytes of JSON", actual=len(text))
    return text


def _compute_sha256(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the seed, the declaration, the tokenizer and every tensor."""
    tokenizer = [header["tokenizer"]] if "tokenizer" in header else []
    hasher = hashlib.sha256(json.dumps([header["seed"], header["declaration"], *tokenizer]).encode())
    for name in sorted(tensors):
        value = tensors[name]
        hasher.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        hasher.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _read_network(path: Path, header: Mapping[str, Any], trust: bool | str | Collection[str]) -> Network:
    """The net of a header without parameters; checks the declaration."""
    data = header["declaration"]
    trusted = (trust,) if isinstance(trust, str) else () if isinstance(trust, bool) else tuple(trust)
    untrusted = [
        name
        for name in dict.fromkeys(find_untrusted_classes(data))
        if trust is not True and name not in trusted and name.partition(":")[0] not in trusted
    ]
    if untrusted:
        expected = "only classes of this package, because loading other classes runs their code"
        hint = f"If you trust them, pass trust={tuple(untrusted)!r}"
        raise FileError(str(path), expected=expected, actual=", ".join(untrusted), hint=hint)
    declaration = from_json_data(data, f"{path}: declaration")
    if not isinstance(declaration, Declaration):
        raise FileError(str(path), expected="a Declaration", actual=type(declaration).__name__)
    structure = build_structure(declaration, check_seed(header["seed"]))
    return dataclasses.replace(structure, tokenizer=_read_tokenizer(path, header.get("tokenizer")))


def _read_tokenizer(path: Path, fields: object) -> Tokenizer | None:
    """The tokenizer in a header; None if there is none."""
    match fields:
        case None:
            return None
        case [str(), None | str()] | [str(), None | str(), int()] | [str(), None | str(), None | int(), True]:
            return Tokenizer(*fields)  # type: ignore[arg-type]
    raise FileError(str(path), expected="a tokenizer: its JSON text and the role of the segments", actual=fields)


# declarations as JSON data

TRUSTED_PREFIXES = tuple(f"{__name__.partition('.')[0]}.{package}." for package in ("models", "programs"))

CLASS_REGISTRY: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(getattr(tpm, name) for name in tpm.__all__),
        *(getattr(networks, name) for name in ("Arrow", "Declaration", "Node", "Plate", "Stack")),
        Reach,
    )
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and not inspect.isabstract(kind)
}
CLASS_NAMES_OF_0_1 = {"Scale": "Multiple"}  # in files of version 0.1


def to_json_data(value: object, location: str) -> Any:
    """A value as JSON data; raises an error for a value that JSON cannot restore."""
    return results.to_json_data(value, location, _encode_dataclass)


def _encode_dataclass(value: object, location: str) -> dict[str, Any]:
    """The JSON data of a dataclass instance."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        allowed = "dataclasses, tuples, lists, mappings, strings, numbers, true, false and None"
        raise BNetError(location, expected="a value that can be stored", actual=value, allowed=allowed)
    name = _format_class_name(type(value), location)
    stored = [field.name for field in dataclasses.fields(value) if field.init]
    return {"class": name, **{field: to_json_data(getattr(value, field), f"{location}.{field}") for field in stored}}


def _format_class_name(kind: type, location: str) -> str:
    """The name of a class in a file."""
    if CLASS_REGISTRY.get(kind.__name__) is kind:
        return kind.__name__
    actual = f"{kind.__module__}.{kind.__qualname__}"
    if "__dataclass_fields__" not in vars(kind):
        expected = "a class with the decorator @dataclass(frozen=True)"
        raise BNetError(location, expected=expected, actual=actual)
    if "<locals>" in kind.__qualname__:
        raise BNetError(location, expected="a class at the top level of a module, for import", actual=actual)
    return f"{kind.__module__}:{kind.__qualname__}"


def find_untrusted_classes(data: object) -> Iterator[str]:
    """The import paths of all classes in JSON data that are not of this package."""
    stack = [data]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            name = part.get("class")
            if isinstance(name, str) and ":" in name and not name.startswith(TRUSTED_PREFIXES):
                yield name
            stack.extend(part.values())
        elif isinstance(part, list):
            stack.extend(part)


def from_json_data(data: object, location: str) -> Any:
    """The value of JSON data. It imports the classes in the data, so call `find_untrusted_classes` first."""
    return results.from_json_data(data, location, _build_object)


def _build_object(data: dict[str, Any], location: str) -> Any:
    """The dataclass instance of JSON data with a class name."""
    if "class" not in data:
        raise FileError(location, expected="an object with a class, a list, a dict or a float", actual=data)
    kind = _find_class(data["class"], location)
    init_fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    given = {name: from_json_data(part, f"{location}.{name}") for name, part in data.items() if name != "class"}
    for name in given:
        if name not in init_fields:
            raise FileError(location, expected=f"fields of {data['class']}: {', '.join(init_fields)}", actual=name)
    for name, field in init_fields.items():
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if is_required and name not in given:
            raise FileError(location, expected=f"the field {name} of {data['class']}, which is missing")
    return kind(**given)


def _find_class(name: object, location: str) -> type:
    """The dataclass with a given name or import path."""
    if not isinstance(name, str):
        raise FileError(location, expected="the name of a class", actual=name)
    module, colon, path = name.partition(":")
    if not colon:
        name = CLASS_NAMES_OF_0_1.get(name, name)
        if name not in CLASS_REGISTRY:
            known = ", ".join(sorted(CLASS_REGISTRY))
            raise FileError(location, expected="a class of this package", actual=name, allowed=known)
        return CLASS_REGISTRY[name]
    try:
        imported = importlib.import_module(module)
        # Static lookup, because a property or a `__getattr__` of an untrusted class would run its code.
        resolved: Any = functools.reduce(inspect.getattr_static, path.split("."), imported)
    except Exception as error:  # a user's module can raise any error
        actual = f"{name} ({type(error).__name__}: {error})"
        raise FileError(location, expected="a class that can be imported", actual=actual) from error
    if not isinstance(resolved, type) or not dataclasses.is_dataclass(resolved) or inspect.isabstract(resolved):
        raise FileError(location, expected="the import path of a dataclass, such as a TPM or a Score", actual=name)
    # Trust in a module does not include the modules that it imports.
    if (resolved.__module__, resolved.__qualname__) != (module, path):
        raise FileError(location, expected="a class in the module that defines it", actual=name)
    return resolved


register_codec(
    Network,
    lambda network: {"file": to_tensor(network)},
    lambda fields, trust: from_tensor(fields["file"], trust),
    {"file": Tensor},
)
