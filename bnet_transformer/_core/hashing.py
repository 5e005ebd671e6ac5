"""Hashes of nested Python objects, the same in every process, and seeds made of several things."""

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

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))  # told in full by their repr
Held = tuple[str, Iterable[Any]]


def digest_of(thing: object) -> str:
    """A hash of every number, name and field, however deep it lies; mappings and sets have no order.

    >>> digest_of({"a": [1.0, {2, 3}]}) == digest_of({"a": [1.0, {3, 2}]}) != digest_of({"a": [1.0, {2, 4}]})
    True
    """
    try:
        return _digest(thing).hex()[:16]
    except RecursionError as error:
        raise _untold("one that holds itself", thing) from error


def _digest(thing: object) -> bytes:
    head, body = _held(thing)
    found = hashlib.sha256(f"{head}\0".encode("utf-8", "surrogatepass"))
    for part in body:  # of one length each, but for the numbers of an array, whose head says how many there are
        found.update(part)
    return found.digest()


def _held(thing: Any) -> Held:
    """What a thing is, with how many parts, and these: numbers as bytes, or a digest of each."""
    if type(thing) in PLAIN:
        return f"{type(thing).__name__} {thing!r}", ()
    if isinstance(thing, Tensor) and thing.layout is torch.strided:
        return f"tensor {thing.dtype} {tuple(thing.shape)}", [_bytes(thing)]
    if type(thing) is np.ndarray:
        return _of_array(thing)
    if isinstance(thing, type):
        return f"class {_class_name(thing)}", ()
    if isinstance(thing, FunctionType):
        inside = [cell.cell_contents for cell in thing.__closure__ or ()]
        return f"function {code_of(thing)}", map(_digest, (thing.__defaults__, thing.__kwdefaults__, inside))
    if isinstance(thing, Mapping):
        return f"mapping {len(thing)}", sorted(_digest(key) + _digest(value) for key, value in thing.items())
    if isinstance(thing, Set):
        return f"set {len(thing)}", sorted(map(_digest, thing))
    if isinstance(thing, list | tuple):
        return f"list {len(thing)}", map(_digest, thing)
    return _of_object(thing)


def _of_object(thing: Any) -> Held:
    """By its fields, or by what it would be made of again (as `pickle` asks)."""
    name = _class_name(type(thing))
    if hasattr(type(thing), "parts_to_hash"):
        return name, map(_digest, thing.parts_to_hash())
    if is_dataclass(thing):
        own = [field.name for field in fields(thing) if field.compare]
        return f"{name} {own}", [_digest(getattr(thing, each)) for each in own]
    try:
        made: Any = thing.__reduce_ex__(4)
    except Exception as error:  # whatever forbids it
        raise _untold("one whose content nothing tells", thing) from error
    if isinstance(made, str):
        return f"{name} {made}", ()
    function, given, state, items, pairs = (*made, None, None, None)[:5]
    return "object", map(_digest, (function, given, state, list(items or ()), list(pairs or ())))


def _class_name(kind: type) -> str:
    """What tells a class from others.

    A class of this package is told by its name alone, which no other class of a declaration has: a checkpoint keeps
    this hash, and stays readable when a class moves to another module.
    """
    is_own = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return kind.__qualname__ if is_own else f"{kind.__module__}.{kind.__qualname__}"


def _bytes(value: Tensor) -> Any:
    dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data if dense.numel() else b""


def _of_array(array: np.ndarray) -> Held:
    head = f"array {array.dtype!r} {array.shape}"
    if array.dtype.hasobject:
        return head, map(_digest, array.ravel().tolist())
    return head, [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.nbytes else b""]


def _untold(got: str, thing: object) -> BNetError:
    return BNetError(
        "data and settings under torchrun",
        expected="things that ranks can compare",
        got=f"{got}, a {type(thing).__name__}",
        allowed="tensors, arrays, mappings, lists, strings, numbers, dataclasses, functions, what can be pickled",
    )


def derive_seed(*parts: object) -> int:
    """A seed that depends on every part.

    >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 1) != derive_seed(0, "order", 2)
    True
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


def code_of(function: Any) -> str:
    """What tells another function: its name and its instructions, but not what it closes over."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return name if code is None else f"{name} {hashlib.sha256(_instructions(code)).hexdigest()[:16]}"


def _instructions(code: CodeType) -> bytes:
    """The instructions of a function with its names and constants, and of the functions inside; no line numbers."""
    inside = [part for part in code.co_consts if isinstance(part, CodeType)]
    plain = [part for part in code.co_consts if not isinstance(part, CodeType | frozenset)]
    own = code.co_code + repr((code.co_names, code.co_varnames, plain)).encode()
    return own + b"".join(_instructions(part) for part in inside)
