"""The file of a result: a safetensors file with its tensors, and with all its other values as JSON in the header.

A class of results inherits from `SavedResult`, which registers it. A class that is a part of results is registered by
`stored_class`, and a class that is not restored from its fields by `register_codec`. A file is data: only registered
classes are built, from the names in the file, and no code is stored. An object of a registered class is
`{"class": name, "fields": {...}}`; its second occurrence is `{"same": number}`, with the objects of the file counted
in the order in which they are complete. A tensor is `{"tensor": name}`, an array of numpy `{"array": name}`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.field_types import check_field_types, check_shapes
from bnet_transformer._core.files import (
    MAX_HEADER_BYTES,
    METADATA_KEY,
    as_path,
    has_format,
    open_safetensors,
    read_header,
    read_tensors,
    wrap_read_errors,
    write_tensors,
)
from bnet_transformer._core.json_values import from_json_data, to_json_data
from bnet_transformer.errors import BNetError, FileError

FORMAT, VERSION, FILE_DESCRIPTION = "bnet_transformer result", 1, "a result that save wrote"
PACKAGES = "attention", "cost", "inference", "interventions", "learning", "programs", "residual_stream"
Trust = Collection[str] | bool
Fields = dict[str, Any]
K = TypeVar("K", bound=type)


class Codec(NamedTuple):
    """How the objects of a class are stored: as fields of given types, from which they are built."""

    kind: type
    to_fields: Callable[[Any], Fields]
    from_fields: Callable[[Fields, Trust], Any]
    types: Mapping[str, Any] | None


_CODECS: dict[str, Codec] = {}


class SavedResult:
    """The base class of results with a file; a subclass is a dataclass, and is registered by its name."""

    _shapes: ClassVar[str] = ""  # the kinds and dims of its arrays and collections, as `check_shapes` reads them

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        register_codec(cls, lambda result: result._to_fields(), lambda fields, trust: cls._from_fields(fields))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result to one safetensors file, which `bt.load` reads.

        A result that contains a net is saved with the net. A file that exists is replaced when the new one is complete.

        Args:
            path: The path of the file.

        Raises:
            FileError: The file cannot be written.

        >>> import tempfile, bnet_transformer as bt
        >>> reads = bt.bayesuvius(4, mask="causal").sentence("the cat sat").reads()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     reads.save(f"{folder}/reads.safetensors")
        ...     bt.load(f"{folder}/reads.safetensors").matrix.equal(reads.matrix)
        True
        """
        save_result(self, path)

    def _to_fields(self) -> Fields:
        """The values that the file stores, by field."""
        return get_fields(self)

    @classmethod
    def _from_fields(cls, fields: Fields) -> Any:
        """The result of the values in a file."""
        return cls(**fields)


@dataclasses.dataclass(frozen=True, repr=False)
class UnsavedFunction:
    """The place of a function of the user, such as a metric, in a loaded result; files contain no code.

    Args:
        name: The name of the function.
        parameters: The names of its parameters.
    """

    name: str
    parameters: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"the function {self.name}, which a file does not contain"


def get_parameter_names(function: object) -> tuple[str, ...]:
    """The names of the parameters of a function without a default; none if the object is no function.

    >>> get_parameter_names(lambda y_1, scale=2: y_1 * scale)
    ('y_1',)
    """
    if isinstance(function, UnsavedFunction):
        return function.parameters
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ()
    named_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in parameters if p.kind in named_kinds and p.default is inspect.Parameter.empty)


def register_codec(
    kind: type,
    to_fields: Callable[[Any], Fields],
    from_fields: Callable[[Fields, Trust], Any],
    types: Mapping[str, Any] | None = None,
) -> None:
    """Register how the objects of a class are stored and built.

    Args:
        kind: The class; its name is that in files.
        to_fields: Returns the values that the file stores, by name.
        from_fields: Builds the object of these values, and of the classes that the reader trusts.
        types: The type of each stored value, by name, which is checked before the object is built. None for a dataclass
            whose stored values are its fields: their annotations.

    Raises:
        BNetError: A class of another module has this name.
    """
    registered = _CODECS[kind.__name__].kind if kind.__name__ in _CODECS else kind
    if registered.__module__ != kind.__module__:  # a file contains the name only
        expected = f"a class with another name than that of {registered.__module__}"
        raise BNetError("class of results", expected=expected, actual=f"{kind.__module__}.{kind.__name__}")
    _CODECS[kind.__name__] = Codec(kind, to_fields, from_fields, types)


def stored_class(kind: K) -> K:
    """Register a dataclass whose objects are parts of results.

    Args:
        kind: The dataclass.

    Returns:
        The same class.
    """
    register_codec(kind, get_fields, lambda fields, trust: kind(**fields))
    return kind


def get_fields(value: Any) -> Fields:
    """The arguments of a dataclass instance, by name."""
    return {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.init}


register_codec(
    frozenset,
    lambda value: {"entries": sorted(value)},
    lambda fields, trust: frozenset(fields["entries"]),
    {"entries": list[Any]},
)
stored_class(UnsavedFunction)


def build_object(name: str, argument: object) -> Any:
    """An object of a registered class from one positional argument, such as a `BNet` from its network."""
    return _find_codec(name, "object").kind(argument)


def save_result(result: object, path: str | os.PathLike[str]) -> None:
    """Write a result of a registered class to a file, atomically."""
    writer = _ResultWriter()
    try:
        library = importlib.metadata.version(METADATA_KEY)
    except importlib.metadata.PackageNotFoundError:
        library = "unknown"
    content = writer.encode(result, type(result).__name__)
    header = {"format": FORMAT, "version": VERSION, "library": library, "kind": type(result).__name__}
    size = len(json.dumps(content))
    if size > MAX_HEADER_BYTES:
        expected = f"at most {MAX_HEADER_BYTES:,} bytes of names and labels"
        raise FileError(str(path), expected=expected, actual=f"{size:,} bytes", hint="Save a part, such as select(...)")
    write_tensors(path, {**header, "content": content}, writer.tensors)


def is_result(path: str | os.PathLike[str]) -> bool:
    """True for a file that `save_result` wrote; `load_result` reports other defects of the file."""
    return has_format(path, FILE_DESCRIPTION, FORMAT)


def read_field_names(path: str | os.PathLike[str]) -> tuple[str, tuple[str, ...]]:
    """The kind of a result in a file, and the names of its fields, without its tensors."""
    source = as_path(path)
    with open_safetensors(source, FILE_DESCRIPTION) as file:
        header = read_header(source, file, FILE_DESCRIPTION, FORMAT, VERSION)
        return str(header["kind"]), tuple(header["content"]["fields"])


def load_result(path: str | os.PathLike[str], trust: Trust = (), description: str = FILE_DESCRIPTION) -> Any:
    """Read a result that `save` wrote.

    Args:
        path: The path of the file.
        trust: The full names of TPM classes of other packages that a net in the file may import; True for all.
        description: The kind of file, for messages.

    Returns:
        The result.

    Raises:
        FileError: The file is no result, is damaged, of a newer version or of an unknown kind.
    """
    source = as_path(path)
    header, tensors = read_tensors(source, description, FORMAT, VERSION)
    with wrap_read_errors(source, description):
        return _ResultReader(tensors, trust).decode(header["content"], str(source))


class _ResultWriter:
    """Collects the tensors of a result, and the objects that occur more than once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._objects: dict[int, tuple[int, object]] = {}  # by id: the number, and the object, which stays alive
        self._tensor_names: dict[int, tuple[str, object]] = {}

    def encode(self, value: object, location: str) -> Any:
        """The JSON data of a value."""
        return to_json_data(value, location, self._encode_object)

    def _encode_object(self, value: object, location: str) -> Any:
        """The JSON data of a tensor, an array, or an object of a registered class."""
        if isinstance(value, Tensor):
            return {"tensor": self._add_tensor(value, value.detach(), location)}
        if isinstance(value, np.ndarray):
            return {"array": self._add_tensor(value, torch.from_numpy(np.asarray(value, order="C")), location)}
        if id(value) in self._objects:
            return {"same": self._objects[id(value)][0]}
        name = type(value).__name__
        codec = _CODECS.get(name)
        if codec is None or codec.kind is not type(value):
            if not inspect.isroutine(value):  # another callable can contain data, such as a module with weights
                allowed = "tensors, arrays, collections, strings, numbers, None, and objects of registered classes"
                raise BNetError(location, expected="a value that a file can store", actual=value, allowed=allowed)
            return self._encode_object(UnsavedFunction(value.__name__, get_parameter_names(value)), location)
        parts = codec.to_fields(value).items()
        fields = {key: self.encode(part, f"{location}.{key}") for key, part in parts}
        self._objects[id(value)] = len(self._objects), value
        return {"class": name, "fields": fields}

    def _add_tensor(self, value: object, tensor: Tensor, location: str) -> str:
        """Store a tensor, once, and return its name."""
        if id(value) not in self._tensor_names:
            # safetensors requires tensors on the CPU with contiguous memory that no other tensor shares.
            name = location.partition(".")[2] or location
            self.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
            self._tensor_names[id(value)] = name, value
        return self._tensor_names[id(value)][0]


class _ResultReader:
    """Builds the objects of a file."""

    def __init__(self, tensors: Mapping[str, Tensor], trust: Trust) -> None:
        self.tensors, self.trust = tensors, trust
        self._objects: list[Any] = []

    def decode(self, data: object, location: str) -> Any:
        """The value of JSON data."""
        return from_json_data(data, location, self._decode_object)

    def _decode_object(self, data: dict[str, Any], location: str) -> Any:
        """The tensor, the array, or the object of a registered class."""
        match data:
            case {"tensor": str(name), **rest} if not rest and name in self.tensors:
                return self.tensors[name]
            case {"array": str(name), **rest} if not rest and name in self.tensors:
                return self.tensors[name].numpy()
            case {"same": int(number), **rest} if not rest and 0 <= number < len(self._objects):
                return self._objects[number]
            case {"class": str(name), "fields": dict(parts), **rest} if not rest:
                codec = _find_codec(name, location)
                fields = {key: self.decode(part, f"{location}: {name}.{key}") for key, part in parts.items()}
                check_field_types(codec.types or codec.kind, fields, f"{location}: {name}")
                check_shapes(getattr(codec.kind, "_shapes", ""), fields, f"{location}: {name}")
                try:
                    self._objects.append(codec.from_fields(fields, self.trust))
                except FileError as error:  # of a file within this file, which has a temporary path
                    raise FileError(f"{location}: {name}", **error.parts) from error
                return self._objects[-1]
        raise FileError(location, expected="a tensor, an array, or an object of a registered class", actual=data)


def _find_codec(name: str, location: str) -> Codec:
    """The codec of a class; the modules with results are imported if the class is not known yet."""
    if name not in _CODECS:
        _import_results()
    if name not in _CODECS:
        hint = "If a newer version of bnet_transformer wrote the file, update with pip install --upgrade"
        kinds = {key: codec.kind for key, codec in _CODECS.items() if issubclass(codec.kind, SavedResult)}
        known = ", ".join(sorted(key for key, kind in kinds.items() if not kind.__subclasses__()))
        raise FileError(location, expected="a known kind of result", actual=name, allowed=known, hint=hint)
    return _CODECS[name]


def _import_results() -> None:
    """Import all modules with classes of results, which registers the classes."""
    for package in PACKAGES:
        module = importlib.import_module(f"bnet_transformer.{package}")
        for info in pkgutil.walk_packages(module.__path__, f"{module.__name__}."):
            importlib.import_module(info.name)
