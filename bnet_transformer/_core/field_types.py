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

from bnet_transformer.errors import FileError, format_value


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


def _find_fault(value: object, annotation: object) -> TypeFault | None:
    """Find the first part of a value that does not have the type of an annotation; None if there is none.

    An integer is a valid `float`, and a bool is no `int`. A type parameter without a bound allows any value.
    """
    kind, arguments = _parse_annotation(annotation)
    if kind in (int, float, bool):
        is_valid = type(value) is kind or (kind is float and type(value) is int)
        return None if is_valid else TypeFault("", annotation, value)
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
