"""Declarations as plain JSON data and back: every dataclass by its class and fields, every value of the type it had.

A dataclass is `{"class": name, field: value, ...}`, the name alone for classes of this package and `module:Class` for
others; a tuple is a JSON list; a list, a mapping and a float that is not finite are `{"list": ...}`, `{"dict": ...}`
and `{"float": ...}`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from bnet_transformer import network, tpm
from bnet_transformer.axes import Reach
from bnet_transformer.errors import BNetError, FileError

OURS = __name__.partition(".")[0] + ".models."

REGISTRY: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(getattr(tpm, name) for name in tpm.__all__),
        *(getattr(network, name) for name in ("Arrow", "Declaration", "Node", "Plate", "Stack")),
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
