"""Files (atomic writes, locks, safetensors with a checked JSON header) and digests of Python objects."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bnet_transformer.errors import NOT_GIVEN, BNetError, DeclarationError, FileError, format_value

# --------------------------------------------------------------------------------------------------------------------
# Digests of nested Python objects, which are equal in every process, and seeds derived from several values.


PRIMITIVE_TYPES = (type(None), bool, int, float, complex, str, bytes, type(...))  # these are hashed by their repr
HashParts = tuple[str, Iterable[Any]]


def compute_digest(obj: object) -> str:
    """A digest of nested data: of every number, name and field, but not of the order in mappings and sets.

    >>> digest = compute_digest({"a": [1.0, {2, 3}]})
    >>> digest == compute_digest({"a": [1.0, {3, 2}]}), digest == compute_digest({"a": [1.0, {2, 4}]})
    (True, False)
    """
    try:
        return _hash_object(obj).hex()[:16]
    except RecursionError as error:
        raise _unhashable_error("it contains itself", obj) from error


def _hash_object(obj: object) -> bytes:
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
        return f"function {describe_code(obj)}", map(_hash_object, (obj.__defaults__, obj.__kwdefaults__, inside))
    if isinstance(obj, Mapping):
        return f"mapping {len(obj)}", sorted(_hash_object(key) + _hash_object(value) for key, value in obj.items())
    if isinstance(obj, Set):
        return f"set {len(obj)}", sorted(map(_hash_object, obj))
    if isinstance(obj, list | tuple):
        return f"list {len(obj)}", map(_hash_object, obj)
    return _object_hash_parts(obj)


def _object_hash_parts(obj: Any) -> HashParts:
    """The parts of other objects: `parts_to_hash()`, the fields of a dataclass, or the state that pickle stores."""
    name = _class_name(type(obj))
    if hasattr(type(obj), "parts_to_hash"):
        return name, map(_hash_object, obj.parts_to_hash())
    if is_dataclass(obj):
        names = [field.name for field in fields(obj) if field.compare]
        return f"{name} {names}", [_hash_object(getattr(obj, field_name)) for field_name in names]
    try:
        reduced: Any = obj.__reduce_ex__(4)
    except Exception as error:  # any error of a class that cannot be pickled
        raise _unhashable_error("it cannot be pickled", obj) from error
    if isinstance(reduced, str):
        return f"{name} {reduced}", ()
    function, given, state, items, pairs = (*reduced, None, None, None)[:5]
    return "object", map(_hash_object, (function, given, state, list(items or ()), list(pairs or ())))


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
        return head, map(_hash_object, array.ravel().tolist())
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


METADATA_KEY = "bnet_transformer"
MAX_HEADER_BYTES = 2**26
MAX_PREFIX_LENGTH = 40  # of a file's name in that of its temporary folder, because names have at most 255 bytes
DigestFunction = Callable[[Mapping[str, Any], Mapping[str, Tensor]], str]


def as_path(path: object) -> Path:
    """The path as a `Path`; raises an error if it is not a valid path."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
        os.fsencode(text)
    except (TypeError, UnicodeError):  # a lone surrogate cannot be encoded
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise FileError("path", expected="the path of a file, a string or a Path", actual=path)
    return Path(text)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty temporary file that replaces `path` when the block ends, and is deleted if the block fails.

    The temporary file is in a separate hidden folder next to `path`, because libraries such as safetensors also create
    temporary files next to their target. A device or a pipe is written when the block ends.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(f"{folder}/a.txt") as temporary:
    ...         _ = temporary.write_text("whole")
    ...     Path(folder, "a.txt").read_text()
    'whole'
    """
    # The data is on the disk (fsync) before `replace` renames the file, and a rename within one file system is atomic.
    # So after a crash either the old or the new file exists.
    destination = as_path(path)
    try:
        is_stream = destination.exists() and not destination.is_file() and not destination.is_dir()
        target = destination if is_stream else Path(os.path.realpath(destination))  # a link remains a link
        if not target.parent.is_dir():
            raise FileError(str(path), expected="a file in an existing folder", actual=str(target.parent))
        parent = None if is_stream else target.parent
        prefix = f".{target.name[:MAX_PREFIX_LENGTH]}."
        with tempfile.TemporaryDirectory(".tmp", prefix, parent, ignore_cleanup_errors=True) as folder:
            temporary = Path(folder, "whole")
            temporary.touch()
            mode = (target if target.is_file() else temporary).stat().st_mode
            yield temporary
            if is_stream:
                with temporary.open("rb") as source, target.open("wb") as stream:
                    shutil.copyfileobj(source, stream)
                return
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.chmod(stat.S_IMODE(mode))
            temporary.replace(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(str(path), expected="a writable file", actual=reason) from error


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Lock a file for the block; another process that tries to lock it fails at once.

    The operating system releases the lock of a killed process. Temporary folders of killed writers are removed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, exclusive_lock(Path(folder, "a")):
    ...     with exclusive_lock(Path(folder, "a")):
    ...         pass
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.FileError: ...
    """
    # An advisory lock (flock) on a file next to `path`; unlike a lock file by existence, it cannot outlive its process.
    folder = str(path.parent)
    try:
        lock = FileLock(f"{path}.lock").acquire(timeout=0)
    except Timeout as error:
        hint = "Use another folder, or wait until that run has ended"
        raise FileError(f"another run writes to {folder}", hint=hint) from error
    except OSError as error:
        actual = error.strerror or str(error)
        raise FileError(folder, expected="a writable folder", actual=actual) from error
    with lock:
        for leftover in path.parent.glob(f".{glob.escape(path.name[:MAX_PREFIX_LENGTH])}.????????.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def write_tensors(path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and a JSON header to a safetensors file, with a SHA-256 of both.

    The header must have the entries "format" and "version".
    """
    signed = {**header, "sha256": _compute_sha256(header, tensors)}
    with atomic_write(path) as temporary:
        save_file(dict(tensors), temporary, metadata={METADATA_KEY: json.dumps(signed)})


def read_tensors(
    path: str | os.PathLike[str],
    expected: str,
    file_format: str,
    version: int,
    compute_digest: DigestFunction | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a file; raises an error if its SHA-256 (by `compute_digest`) does not match."""
    file_path = as_path(path)
    with open_safetensors(file_path, expected) as opened:
        header = read_header(file_path, opened, expected, file_format, version)
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if header.pop("sha256", None) != (compute_digest or _compute_sha256)(header, tensors):
            raise FileError(str(file_path), expected="unchanged content", actual="another SHA-256")
    return header, tensors


def read_header(path: Path, file: Any, expected: str, file_format: str, max_version: int) -> dict[str, Any]:
    """The JSON header of an open file; raises an error for another format or a newer version than `max_version`."""
    header = json.loads((file.metadata() or {}).get(METADATA_KEY, "null"))
    if not isinstance(header, dict) or header.get("format") != file_format:
        raise FileError(str(path), expected=expected, actual="a safetensors file of another format")
    version = header.get("version")
    if type(version) is not int or version < 1:
        raise FileError(str(path), expected="a format version, an integer", actual=format_value(repr(version)))
    if version > max_version:
        by = f", written by bnet_transformer {header['library']}" if "library" in header else ""
        hint = "Update with pip install --upgrade bnet_transformer"
        raise FileError(str(path), expected=f"format version {max_version}", actual=f"version {version}{by}", hint=hint)
    return header


def has_format(path: str | os.PathLike[str], expected: str, file_format: str) -> bool:
    """True if the header of a file has a given format; False also for an invalid file."""
    file_path = as_path(path)
    try:
        with open_safetensors(file_path, expected) as opened:
            header = json.loads((opened.metadata() or {}).get(METADATA_KEY, "null"))
    except FileError:
        return False
    return isinstance(header, dict) and header.get("format") == file_format


@contextlib.contextmanager
def open_safetensors(path: Path, expected: str) -> Iterator[Any]:
    """Open a safetensors file once, with `pread`.

    With a memory map, the header and the tensors could come from different files if the file is replaced, and the
    process would be killed (SIGBUS) if the file is truncated. Folders and pipes raise an error, because a pipe could
    block.
    """
    try:
        is_plain = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise FileError(str(path), expected=expected, actual=reason) from error
    if not is_plain:
        raise FileError(str(path), expected=expected, actual="a folder" if path.is_dir() else "a special file")
    with wrap_read_errors(path, expected), safe_open(path, framework="pt", backend="pread") as opened:
        yield opened


@contextlib.contextmanager
def wrap_read_errors(path: Path, expected: str) -> Iterator[None]:
    """Re-raise any error of the block as a `FileError` that names the file."""
    try:
        yield
    except FileError:
        raise
    except DeclarationError as error:
        suffix = f" (and {len(error.faults) - 1} more)" if len(error.faults) > 1 else ""
        raise FileError(str(path), expected=expected, actual=f"a fault: {error.faults[0]}{suffix}") from error
    except SafetensorError as error:
        raise FileError(str(path), expected=expected, actual=f"an invalid safetensors file: {error}") from error
    except BNetError as error:
        raise FileError(str(path), expected=expected, actual=str(error)) from error
    except Exception as error:  # unexpected values; a user's class can raise any error
        raise FileError(str(path), expected=expected, actual=f"{type(error).__name__}: {error}") from error


def _compute_sha256(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the header and of the name, dtype, shape and bytes of each tensor."""
    hasher = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        hasher.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        hasher.update(value.reshape(-1).contiguous().view(torch.uint8).numpy().data if value.numel() else b"")
    return hasher.hexdigest()


Writers = dict[str, Callable[[], bytes]]  # for each suffix, the function that returns the content of a file


def write_file(path: str | os.PathLike[str], writers: Writers, hint: str = "") -> None:
    """Write a file atomically, with the content that the writer of its suffix returns.

    The error for an unknown suffix ends with the hint.
    """
    suffix = as_path(path).suffix.lower()
    if suffix not in writers:
        actual = repr(suffix) if suffix else NOT_GIVEN
        allowed = ", ".join(sorted(writers))
        expected = "a file name with a known suffix"
        raise BNetError(str(path), expected=expected, actual=actual, allowed=allowed, hint=hint)
    with atomic_write(path) as temporary:
        temporary.write_bytes(writers[suffix]())
