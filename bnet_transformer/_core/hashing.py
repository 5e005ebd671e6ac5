"""Digests of nested Python objects, which are equal in every process, and seeds derived from several values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.errors import BNetError

PRIMITIVE_TYPES = (type(None), bool, int, float, complex, str, bytes, type(...))  # these are hashed by their repr
HashParts = tuple[str, Iterable[Any]]


def compute_digest(obj: object) -> str:
    """A digest of nested data: of every number, name and field, but not of the order in mappings and sets.

    >>> digest = compute_digest({"a": [1.0, {2, 3}]})
    >>> digest == compute_digest({"a": [1.0, {3, 2}]}), digest == compute_digest({"a": [1.0, {2, 4}]})
    (True, False)
    """
    try:
        return _compute_sha256(obj).hex()[:16]
    except RecursionError as error:
        raise _unhashable_error("it contains itself", obj) from error


def _compute_sha256(obj: object) -> bytes:
    """The SHA-256 of an object, from a header and its parts."""
    head, body = _hash_parts(obj)
    hasher = hashlib.sha256(f"{head}\0".encode("utf-8", "surrogatepass"))
    # Different objects give different bytes: the header contains the number of parts and ends with a zero byte. Parts
    # are digests of equal length, or the raw numbers of an array, whose dtype and shape are in the header.
    for part in body:
        hasher.update(part)
    return hasher.digest()


def _hash_parts(obj: Any) -> HashParts:
    """The header (type, length) of an object and its parts as bytes: raw numbers, or the digest of each part."""
    if type(obj) in PRIMITIVE_TYPES:
        return f"{type(obj).__name__} {obj!r}", ()
    if isinstance(obj, Tensor) and obj.layout is torch.strided:
        return f"tensor {obj.dtype} {tuple(obj.shape)}", [_tensor_bytes(obj)]
    if type(obj) is np.ndarray:
        return _array_hash_parts(obj)
    if isinstance(obj, type):
        return f"class {_class_name(obj)}", ()
    if isinstance(obj, FunctionType):
        inside = [cell.cell_contents for cell in obj.__closure__ or ()]
        return f"function {describe_code(obj)}", map(_compute_sha256, (obj.__defaults__, obj.__kwdefaults__, inside))
    if isinstance(obj, Mapping):
        return f"mapping {len(obj)}", sorted(
            _compute_sha256(key) + _compute_sha256(value) for key, value in obj.items()
        )
    if isinstance(obj, Set):
        return f"set {len(obj)}", sorted(map(_compute_sha256, obj))
    if isinstance(obj, list | tuple):
        return f"list {len(obj)}", map(_compute_sha256, obj)
    return _object_hash_parts(obj)


def _object_hash_parts(obj: Any) -> HashParts:
    """The parts of other objects: `parts_to_hash()`, the fields of a dataclass, or the state that pickle stores."""
    name = _class_name(type(obj))
    if hasattr(type(obj), "parts_to_hash"):
        return name, map(_compute_sha256, obj.parts_to_hash())
    if is_dataclass(obj):
        names = [field.name for field in fields(obj) if field.compare]
        return f"{name} {names}", [_compute_sha256(getattr(obj, field_name)) for field_name in names]
    try:
        reduced: Any = obj.__reduce_ex__(4)
    except Exception as error:  # any error of a class that cannot be pickled
        raise _unhashable_error("it cannot be pickled", obj) from error
    if isinstance(reduced, str):
        return f"{name} {reduced}", ()
    function, given, state, items, pairs = (*reduced, None, None, None)[:5]
    return "object", map(_compute_sha256, (function, given, state, list(items or ()), list(pairs or ())))


def _class_name(kind: type) -> str:
    """The name of a class in a digest.

    For a class of this package it is the name without the module. Names are unique, and checkpoints, which store the
    digest, remain readable if a class moves to another module.
    """
    is_internal = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return kind.__qualname__ if is_internal else f"{kind.__module__}.{kind.__qualname__}"


def _tensor_bytes(value: Tensor) -> Any:
    """The bytes of a tensor, on the CPU and contiguous."""
    dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data if dense.numel() else b""


def _array_hash_parts(array: np.ndarray) -> HashParts:
    """The header and the bytes of a numpy array."""
    head = f"array {array.dtype!r} {array.shape}"
    if array.dtype.hasobject:
        return head, map(_compute_sha256, array.ravel().tolist())
    return head, [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.nbytes else b""]


def _unhashable_error(reason: str, obj: object) -> BNetError:
    """The error for an object without a digest, which ranks could not compare."""
    return BNetError(
        "data and settings under torchrun",
        expected="objects that ranks can compare",
        actual=f"an object of type {type(obj).__name__} ({reason})",
        allowed="tensors, arrays, mappings, lists, strings, numbers, dataclasses, functions, objects for pickle",
    )


def derive_seed(*parts: object) -> int:
    """A seed that depends on every part.

    >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 1) != derive_seed(0, "order", 2)
    True
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def describe_code(function: Any) -> str:
    """The name of a function with a digest of its bytecode, without the values of its closure."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return name if code is None else f"{name} {hashlib.sha256(_code_bytes(code)).hexdigest()[:16]}"


def _code_bytes(code: CodeType) -> bytes:
    """The bytecode, names and constants of a function and its nested functions, without line numbers."""
    inside = [part for part in code.co_consts if isinstance(part, CodeType)]
    plain = [part for part in code.co_consts if not isinstance(part, CodeType | frozenset)]
    instructions = code.co_code + repr((code.co_names, code.co_varnames, plain)).encode()
    return instructions + b"".join(_code_bytes(part) for part in inside)
