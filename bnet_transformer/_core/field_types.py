"""The values of a file against the annotations of the dataclass that they become.

The annotations are the schema of a file: they are checked once, when the file is read, so that no reading of the object
fails later with an error of Python.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.errors import FileError, format_value

MAX_INT_AS_FLOAT = 2**53  # up to this, each integer is a float64
MAX_ROUNDING = 1e-5  # of a share in float32
DTYPES = {
    "float": (torch.float32, torch.float64),
    "real": (torch.float16, torch.bfloat16, torch.float32, torch.float64),  # numbers of a net, in its dtype
    "float64": (torch.float64,),
    "int": (torch.int64,),
    "bool": (torch.bool,),
    "byte": (torch.uint8,),
}
DTYPES |= {"number": (*DTYPES["real"], *DTYPES["int"])}


class TypeFault(NamedTuple):
    """A part of a value that does not have its type."""

    path: str  # from the value to the part
    expected: object
    actual: object


def check_field_types(schema: type | Mapping[str, Any], values: Mapping[str, object], location: str) -> None:
    """Raise an error for values that do not have the types of a schema.

    Args:
        schema: The type of each value, by name, or a dataclass, whose fields have the types.
        values: The values, by name.
        location: Where the values are, for messages.

    Raises:
        FileError: A value has another type or a name that the schema does not contain, or is missing.
    """
    types = schema if isinstance(schema, Mapping) else _get_hints(schema)
    required = schema if isinstance(schema, Mapping) else _get_required(schema)
    for name in (*values, *required):
        if name not in types or name not in values:
            problem = "is not one of them" if name not in types else "is missing"
            raise FileError(location, expected=f"the fields {', '.join(types)}", actual=f"{name!r}, which {problem}")
        check_type(values[name], types[name], f"{location}.{name}")


def check_type(value: object, annotation: object, location: str) -> None:
    """Raise an error for a value that does not have the type of an annotation, at any depth.

    >>> check_type((1, "a"), tuple[int, ...], "file")
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.FileError: file[1]: expected int; got 'a'
    """
    fault = _find_fault(value, annotation)
    if fault is not None:
        actual = format_value(repr(fault.actual))
        raise FileError(f"{location}{fault.path}", expected=_format_type(fault.expected), actual=actual)


def check_shapes(shapes: str, values: Mapping[str, object], location: str) -> None:
    """Raise an error for arrays and collections that do not have the kinds of numbers and the dims of a class.

    The shapes are parts `field field: {keys} kind dim dim ...`, separated by semicolons. Dims with equal names have
    equal sizes. A field with `{keys}` is a mapping: the dims are those of each value, and mappings whose keys have an
    equal name have equal keys; `{_}` are any keys. A collection that is no array has one dim.

    A dim is `_` for any size, `dim?` for this size or 0, `dim+` for this size but not 0, `@` for the axis with the name
    of the key, `@name` for the axis with this name, `*axes` for the axes in the field `axes`, and `*name` for any
    number of further dims. A kind is a key of `DTYPES`; `any`; `share` for numbers from 0 to 1; `size` for an integer
    that is the size of a dim. `int<dim` are indices along a dim, or -1, if the dim has a size. `objects.field` is the
    field of each object of a tuple.

    >>> check_shapes("a: int row; b: any row", {"a": torch.arange(3), "b": ("x",)}, "file")
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.FileError: file.b: expected 3 (row) as in file.a; got 1
    """
    sizes: dict[str, tuple[Any, str]] = {}  # of each dim, and where it has this size
    indices: list[tuple[str, Any, str]] = []

    def bind(dim: str, size: object, where: str) -> None:
        if dim.endswith("+") and not size:
            raise FileError(where, expected=f"at least one {dim.strip('_+') or 'entry'}", actual=size)
        if dim in ("_", "_+") or dim.startswith("*_") or (dim.endswith("?") and not size):
            return
        dim = dim.rstrip("?+")
        expected, first = sizes.setdefault(dim, (int(dim), location) if dim.isdecimal() else (size, where))
        if size != expected:
            raise FileError(where, expected=f"{expected} ({dim}) as in {first}", actual=size)

    for name, description in _parse_shapes(shapes):
        name, _, attribute = name.partition(".")
        value: Any = values.get(name)
        if value is None:
            continue
        where, (kind, *dims) = f"{location}.{name}", description
        parts = {where: ("", value)}
        if attribute:
            objects = value if isinstance(value, tuple) else (value,)
            parts = {f"{where}[{k}].{attribute}": ("", getattr(item, attribute)) for k, item in enumerate(objects)}
        if kind.startswith("{"):
            bind(kind[1:-1], sorted(map(repr, value)), where)
            parts = {f"{where}[{key!r}]": (str(key), part) for key, part in value.items()} if dims else {}
            kind, *dims = dims or ["any"]
        for where, (key, part) in parts.items():
            axes: Any = values.get("axes")
            names = [dim.replace("@", f"axis {key}") for dim in dims]
            names = [name for dim in names for name in ([f"axis {axis}" for axis in axes] if dim == "*axes" else [dim])]
            for dim, size in zip(*_check_dims(part, kind, names, where), strict=True):
                bind(dim, size, where)
            indices.append((kind.partition("<")[2].replace("@", f"axis {key}"), part, where))
    for dim, part, where in indices:
        if dim not in sizes:
            continue
        numbers, size = part.flatten().tolist() if isinstance(part, Tensor | np.ndarray) else part, sizes[dim][0]
        if outside := [number for number in numbers if not (isinstance(number, int) and -1 <= number < size)]:
            raise FileError(where, expected=f"indices below {size}, the number of {dim}", actual=outside[0])


@functools.cache
def _parse_shapes(shapes: str) -> list[tuple[str, list[str]]]:
    """The words of the description of each field."""
    parts = [part.split(": ") for part in shapes.split(";") if part]
    return [(name, description.split()) for names, description in parts for name in names.split()]


def _check_dims(value: Any, kind: str, dims: list[str], where: str) -> tuple[list[str], list[int]]:
    """Check the kind and the number of dims of a value; return the names and the sizes of its dims."""
    if kind == "size":
        return dims, [value]
    is_array = isinstance(value, Tensor | np.ndarray)
    shape = list(value.shape) if is_array else [len(value)]
    if dims and dims[-1].startswith("*"):
        *dims, last = dims
        further = range(max(0, len(shape) - len(dims)))
        dims, shape = [last, *dims, *(f"{last}[{k}]" for k in further)], [len(further), *shape]
    if len(dims) != len(shape):
        raise FileError(where, expected=f"the dims [{', '.join(dims)}]", actual=f"shape {shape}")
    dtypes = DTYPES.get(kind.partition("<")[0], ())
    if is_array and dtypes and torch.as_tensor(value).dtype not in dtypes:
        raise FileError(where, expected=" or ".join(map(str, dtypes)), actual=value.dtype)
    if kind == "share" and not all(0 <= share <= 1 + MAX_ROUNDING for share in value):  # also false for NaN
        raise FileError(where, expected="numbers from 0 to 1", actual=format_value(repr(value)))
    return dims, shape


def _find_fault(value: object, annotation: object) -> TypeFault | None:
    """Find the first part of a value that does not have the type of an annotation; None if there is none.

    An integer that a float64 represents is a valid `float`, and a bool is no `int`. A type parameter without a bound
    allows any value.
    """
    kind, arguments = _parse_annotation(annotation)
    if kind in (int, float, bool):
        is_float = kind is float and isinstance(value, int) and abs(value) <= MAX_INT_AS_FLOAT
        return None if type(value) is kind or (is_float and type(value) is int) else TypeFault("", annotation, value)
    if kind is object:
        return None
    if kind is Union:
        faults = [_find_fault(value, part) for part in arguments]
        inner = [fault for fault in faults if fault is not None and fault.path]
        return None if None in faults else inner[0] if inner else TypeFault("", annotation, value)
    if kind is Literal:
        return None if value in arguments else TypeFault("", annotation, value)
    is_fixed = kind is tuple and bool(arguments) and arguments[-1] is not Ellipsis
    if (
        not isinstance(value, kind)
        or (isinstance(value, str) and kind is not str)  # a string is no sequence of strings
        or (is_fixed and len(value) != len(arguments))
    ):
        return TypeFault("", annotation, value)
    for key, part, part_annotation in _iter_parts(value, arguments, is_fixed) if arguments else ():
        if (fault := _find_fault(part, part_annotation)) is not None:
            return fault._replace(path=f"[{key!r}]{fault.path}")
    return None


def _iter_parts(value: object, arguments: tuple[Any, ...], is_fixed: bool) -> Iterator[tuple[object, object, Any]]:
    """Yield the parts of a collection: the key or index, the part, and its annotation."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield key, key, arguments[0]
            yield key, part, arguments[1]
    elif isinstance(value, tuple | list | frozenset):
        for k, part in enumerate(value):
            yield k, part, arguments[k if is_fixed else 0]


@functools.cache
def _parse_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """The class of an annotation and its arguments; `Union` for each form of a union, and `object` for any value."""
    if isinstance(annotation, TypeVar):
        return _parse_annotation(annotation.__bound__ or object)
    kind = get_origin(annotation) or annotation
    return {Any: object, types.UnionType: Union}.get(kind, kind), get_args(annotation)


@functools.cache
def _get_hints(kind: type) -> dict[str, Any]:
    """The resolved annotations of the arguments of a dataclass."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


@functools.cache
def _get_required(kind: type) -> list[str]:
    """The arguments of a dataclass without a default."""
    missing = dataclasses.MISSING
    is_required = {f.name: f.default is missing and f.default_factory is missing for f in dataclasses.fields(kind)}
    return [name for name in _get_hints(kind) if is_required[name]]


def _format_type(annotation: object) -> str:
    """Format an annotation without the names of modules.

    >>> _format_type(Mapping[str, tuple[float, ...] | None])
    'Mapping[str, tuple[float, ...] | None]'
    """
    text = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    return re.sub(r"\b[a-z_]\w*\.(?=\w)", "", text)
