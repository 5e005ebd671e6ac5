"""The file of a result: a safetensors file with its tensors, and all its other values as JSON in the header."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import json
import math
import os
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from html import escape
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import torch
from safetensors.torch import load
from torch import Size, Tensor

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
from bnet_transformer._core.tensors import to_numpy
from bnet_transformer._core.tokens import Labels, Token
from bnet_transformer.errors import BNetError, FileError, format_value

if TYPE_CHECKING:
    import pandas as pd


# --------------------------------------------------------------------------------------------------------------------
# Python values as JSON data that restores them: tuples, lists, mappings, and floats that are not finite.
#
# A tuple is a JSON list. A list, a mapping and a float that is not finite are `{"list": ...}`, `{"dict": ...}` and
# `{"float": ...}`. A token of a vocabulary is `{"token": [raw, decoded, text]}`. The caller encodes and decodes all
# other objects.


Encoder = Callable[[object, str], Any]  # JSON data of an object, and where it is, for messages
Decoder = Callable[[dict[str, Any], str], Any]


def to_json_data(value: object, location: str, encode_object: Encoder) -> Any:
    """A value as JSON data; `encode_object` encodes what is neither a number, a string nor a collection.

    >>> to_json_data({"a": (1, [float("inf")])}, "it", lambda value, location: None)
    {'dict': [['a', [1, {'list': [{'float': 'inf'}]}]]]}
    """

    def encode(part: object, where: str) -> Any:
        return to_json_data(part, where, encode_object)

    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Token):
        return {"token": [value.raw, value.decoded, str(value)]}
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) in (tuple, Size, Labels):
        return [encode(part, f"{location}[{k}]") for k, part in enumerate(value)]  # type: ignore[arg-type, var-annotated]
    if type(value) is list:
        return {"list": [encode(part, f"{location}[{k}]") for k, part in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key, location), encode(part, f"{location}[{key!r}]")] for key, part in value.items()]}
    return encode_object(value, location)


def from_json_data(data: object, location: str, decode_object: Decoder) -> Any:
    """The value of JSON data; `decode_object` decodes JSON objects that are no collection and no float.

    >>> from_json_data({"dict": [["a", [1, 2]]]}, "it", lambda data, location: None)
    {'a': (1, 2)}
    """

    def decode(part: object, where: str) -> Any:
        return from_json_data(part, where, decode_object)

    if isinstance(data, list):
        return tuple(decode(part, f"{location}[{k}]") for k, part in enumerate(data))
    if not isinstance(data, dict):
        return data
    match data:
        case {"list": list(parts), **rest} if not rest:
            return [decode(part, f"{location}[{k}]") for k, part in enumerate(parts)]
        case {"dict": list(pairs), **rest} if not rest and all(isinstance(p, list) and len(p) == 2 for p in pairs):
            return {decode(key, location): decode(part, f"{location}[{key!r}]") for key, part in pairs}
        case {"token": [str(raw), str(decoded), str(text)], **rest} if not rest:
            return Token(raw, decoded, text)
        case {"float": "inf" | "-inf" | "nan" as name, **rest} if not rest:
            return float(name)
    return decode_object(data, location)


# --------------------------------------------------------------------------------------------------------------------
# The values of a file against the annotations of the dataclass that they become.
#
# The annotations are the schema of a file: they are checked once, when the file is read, so that no reading of the
# object fails later with an error of Python.


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


# --------------------------------------------------------------------------------------------------------------------
# Results and their files: a safetensors file with its tensors, and with all its other values as JSON in the header.
#
# A class of results inherits from `Result`. A file is data: only the classes of `RESULTS` and `PARTS` are built, from
# the names in the file, and no code is stored. An object of such a class is `{"class": name, "fields": {...}}`; its
# second occurrence is `{"same": number}`, with the objects of the file counted in the order in which they are complete.
# A tensor is `{"tensor": name}`, an array of numpy `{"array": name}`.
#
# The stored fields are those of the dataclass; `register_codec` is for a class that is not restored from its fields.


Trust = Collection[str] | bool
Fields = dict[str, Any]
FORMAT, VERSION, FILE_DESCRIPTION = "bnet_transformer result", 1, "a result that save wrote"
FIT_FORMAT = "bnet_transformer fit"  # of fits that version 0.1 wrote
MAX_HTML_ROWS = 20
RESULTS: Mapping[str, tuple[str, ...]] = {  # the package or module of each class of results
    "attention": ("CorpusTan", "Damage", "Inclusion", "Reads", "Roles", "Tan", "TanTree"),
    "cost": ("Cost",),
    "inference": ("GroupPosterior", "RankedStates", "Samples"),
    "generation.generate": ("Generated",),
    "interventions": ("ResultComparison",),
    "interventions.circuit": ("Circuit", "CircuitTests"),
    "interventions.counterfactual": ("Counterfactual",),
    "interventions.curves": ("FaithfulnessCurves",),
    "interventions.sweep_results": ("EstimateCalibration", "Mediation", "Sweep"),
    "learning.calibration": ("Calibration",),
    "learning.fit": ("Check", "Comparison", "Fit", "Heads", "ModelComparison"),
    "learning.training": ("Trained",),
    "programs": ("TrueEdges",),
    "residual_stream": ("Contributions", "Lens", "PathContributions", "ScoreContributions", "TunedLens"),
}
PARTS: Mapping[str, tuple[str, ...]] = {  # of other classes whose objects are parts of results
    "_core.results": ("UnsavedFunction", "frozenset"),
    "bnet": ("BNet",),
    "cost": ("Polynomial", "SliceCost", "TemplateCost"),
    "data": ("Batch", "Evidence"),
    "declare.io": ("Network",),
    "graph": ("Quotient",),
    "inference": ("GroupStates",),
    "data.do_values": ("Noise", "Scale", "Shift", "Zero"),
    "interventions.acdc": ("CircuitPairs",),
    "interventions.sweep_results": ("CellGrid",),
    "interventions.examples": ("Examples",),
    "interventions.methods": ("Gradient",),
    "learning.fit.result": ("FitRecord",),
    "reference": ("GroundModel",),
    "residual_stream.lens": ("LensReader",),
    "residual_stream.results": ("ReadoutDirection",),
    "residual_stream.linear_paths": ("Writer",),
}
MODULES = {name: module for table in (RESULTS, PARTS) for module, names in table.items() for name in names}


class Codec(NamedTuple):
    """How the objects of a class are stored: as fields of given types, from which they are built."""

    to_fields: Callable[[Any], Fields]
    from_fields: Callable[[Fields, Trust], Any]
    types: Mapping[str, Any] | type


_CODECS: dict[type, Codec] = {}  # of the classes that are not restored from their fields


class Result:
    """The base class of results: a dataclass that is saved, and shown as a caption, a table of numbers and notes."""

    _shapes: ClassVar[str] = ""  # the kinds and dims of its arrays and collections, as `check_shapes` reads them
    _index: ClassVar[str] = ""  # the column that is the index of the data frame
    _number_format: ClassVar[str] = "{:.3g}"
    _max_rows: ClassVar[int | None] = MAX_HTML_ROWS  # in a notebook

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

    @property
    def caption(self) -> str:
        """The subject of the result, in one line."""
        return repr(self).strip("<>")

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each part of the result; the class describes the columns."""
        import pandas as pd

        columns = {
            name: to_numpy(value) if isinstance(value, Tensor) else value for name, value in self._get_columns().items()
        }
        frame = pd.DataFrame(columns)
        return frame.set_index(self._index) if self._index in columns else frame

    def _get_columns(self) -> Mapping[Any, Any]:
        """The columns of the data frame."""
        raise NotImplementedError

    def _get_shown_frame(self) -> pd.DataFrame:
        """The rows of the data frame that are shown."""
        rows = self._get_shown_rows()
        return self.to_dataframe() if rows is None else self.to_dataframe().iloc[rows]

    def _get_shown_rows(self) -> list[int] | None:
        """The numbers of these rows, in the order in which a reader looks for them; None for all."""
        return None

    def _get_notes(self) -> Sequence[str]:
        """What a reader of the result must know."""
        return getattr(self, "notes", ())

    def _repr_html_(self) -> str:
        """The caption, the first rows of the table, and the notes as HTML."""
        frame = self._get_shown_frame()
        shown, options = frame.iloc[: self._max_rows], {"max_cols": self._max_rows, "na_rep": ""}
        table = shown.to_html(index=_has_index(frame), float_format=self._number_format.format, **options)
        more = f"<p>The first {len(shown)} of {len(frame):,}.</p>" if len(shown) < len(frame) else ""
        notes = "".join(f"<li>{escape(note)}</li>" for note in self._get_notes())
        return f"<p>{escape(self.caption)}</p>{table}{more}" + (f"<ul>{notes}</ul>" if notes else "")

    def _format_text(self) -> str:
        """The caption, the table and the notes as text."""
        frame = self._get_shown_frame()
        table = frame.to_string(index=_has_index(frame), float_format=self._number_format.format)
        return "\n".join([self.caption, table, *(f"note: {note}" for note in self._get_notes())])

    def _to_fields(self) -> Fields:
        """The values that the file stores, by field."""
        return get_fields(self)

    @classmethod
    def _upgrade_fields(cls, fields: Fields) -> Fields:
        """The values in a file, by the names that the fields have today."""
        return fields

    @classmethod
    def _from_fields(cls, fields: Fields) -> Any:
        """The result of the values in a file."""
        return cls(**fields)


def _has_index(frame: pd.DataFrame) -> bool:
    """Whether the index of a data frame has a meaning."""
    return frame.index.names != [None] or frame.index.inferred_type not in ("integer", "empty")


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
    types: Mapping[str, Any] | type,
) -> None:
    """Register how the objects of a class are stored that are not restored from their fields.

    Args:
        kind: The class; its name is that in files.
        to_fields: Returns the values that the file stores, by name.
        from_fields: Builds the object of these values, and of the classes that the reader trusts.
        types: The type of each stored value, by name, which is checked before the object is built; or a dataclass.
    """
    _CODECS[kind] = Codec(to_fields, from_fields, types)


def get_fields(value: Any) -> Fields:
    """The arguments of a dataclass instance, by name."""
    return {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.init}


register_codec(
    frozenset,
    lambda value: {"entries": sorted(value)},
    lambda fields, trust: frozenset(fields["entries"]),
    {"entries": list[Any]},
)


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
    return any(has_format(path, FILE_DESCRIPTION, name) for name in (FORMAT, FIT_FORMAT))


def read_field_names(path: str | os.PathLike[str]) -> tuple[str, tuple[str, ...]]:
    """The kind of a result in a file, and the names of its fields, without its tensors."""
    source = as_path(path)
    if has_format(source, FILE_DESCRIPTION, FIT_FORMAT):
        return "Fit", ("net",)
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
    is_first_fit = has_format(source, description, FIT_FORMAT)
    header, tensors = read_tensors(source, description, FIT_FORMAT if is_first_fit else FORMAT, VERSION)
    with wrap_read_errors(source, description):
        content = _convert_first_fit(header, tensors, "BNet") if is_first_fit else header["content"]
        return _ResultReader(tensors, trust).decode(content, str(source))


def _convert_first_fit(header: Mapping[str, Any], tensors: dict[str, Tensor], net: str) -> Any:
    """The content that `save` writes today of a fit of version 0.1, whose net has this class."""
    parts: dict[str, Any] = {name: [] for name in ("samples", "statistics", "choices")}
    for name in tensors:
        part, _, key = name.partition("/")
        if key:
            parts[part].append([key, {"tensor": name}])
    network = {"class": "Network", "fields": {"file": {"tensor": "net"}}}
    renamed = {"judged_on": "evaluated_on", "judged_by": "criterion"}
    fields = {renamed.get(name, name): value for name, value in header["told"].items()}
    fields |= {name: {"dict": pairs} for name, pairs in parts.items()}
    fields["net"] = network if net == "Network" else {"class": net, "fields": {"network": network}}
    fields["bounds"] = tensors["bounds"].tolist()
    fields["measured"] = [[int(step), int(restart), score] for step, restart, score in tensors["measured"].tolist()]
    fields["known_likelihoods"] = {"tensor": "log_likelihoods"} if "log_likelihoods" in tensors else None
    return {"class": "Fit", "fields": fields}


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
        if name not in MODULES or find_class(name, location) is not type(value):
            if not inspect.isroutine(value):  # another callable can contain data, such as a module with weights
                allowed = "tensors, arrays, collections, strings, numbers, None, and objects of registered classes"
                raise BNetError(location, expected="a value that a file can store", actual=value, allowed=allowed)
            return self._encode_object(UnsavedFunction(value.__name__, get_parameter_names(value)), location)
        parts = _get_codec(type(value)).to_fields(value).items()
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
                kind = find_class(name, location)
                if name == "Fit" and "file" in parts:
                    return self._decode_first_fit(parts, location)
                codec = _get_codec(kind)
                fields = {key: self.decode(part, f"{location}: {name}.{key}") for key, part in parts.items()}
                fields = kind._upgrade_fields(fields) if issubclass(kind, Result) else fields
                check_field_types(codec.types, fields, f"{location}: {name}")
                check_shapes(getattr(kind, "_shapes", ""), fields, f"{location}: {name}")
                try:
                    self._objects.append(codec.from_fields(fields, self.trust))
                except FileError as error:  # of a file within this file, which has a temporary path
                    raise FileError(f"{location}: {name}", **error.parts) from error
                return self._objects[-1]
        raise FileError(location, expected="a tensor, an array, or an object of a registered class", actual=data)

    def _decode_first_fit(self, parts: Mapping[str, Any], location: str) -> Any:
        """A fit in a result of version 0.1: the bytes of its file, and the class of its net."""
        content = self.tensors[parts["file"]["tensor"]].numpy().tobytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header, tensors = json.loads(json.loads(content[8:end])["__metadata__"][METADATA_KEY]), load(content)
        data = _convert_first_fit(header, tensors, parts["net"])
        self._objects.append(_ResultReader(tensors, self.trust).decode(data, f"{location}: Fit"))
        return self._objects[-1]


def find_class(name: str, location: str) -> type:
    """The class of a name in a file; its module is imported."""
    if name not in MODULES:
        hint = "If a newer version of bnet_transformer wrote the file, update with pip install --upgrade"
        known = ", ".join(sorted(name for names in RESULTS.values() for name in names))
        raise FileError(location, expected="a known kind of result", actual=name, allowed=known, hint=hint)
    if name == frozenset.__name__:
        return frozenset
    kind: type = getattr(importlib.import_module(f"bnet_transformer.{MODULES[name]}"), name)
    return kind


def _get_codec(kind: Any) -> Codec:
    """How the objects of a class are stored: by default as their fields."""
    if issubclass(kind, Result):
        return Codec(kind._to_fields, lambda fields, trust: kind._from_fields(fields), kind)
    return _CODECS.get(kind) or Codec(get_fields, lambda fields, trust: kind(**fields), kind)
