"""Tensors with a JSON head as one safetensors file: written whole, and read as they were written or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bnet_transformer.errors import BNetError, DeclarationError, FileError, shown
from bnet_transformer.files.atomic import as_path, replacing

KEY = "bnet_transformer"
LONGEST_HEADER = 2**26


def write_tensors(path: str | os.PathLike[str], head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A file of tensors, with the hash of all that is in it; `head` has its "format" and "version"."""
    told = {**head, "sha256": _digest(head, tensors)}
    with replacing(path) as temporary:
        save_file(dict(tensors), temporary, metadata={KEY: json.dumps(told)})


def read_tensors(
    path: str | os.PathLike[str], wanted: str, form: str, version: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The head and the tensors of a file, every bit of it compared with its hash."""
    where = as_path(path)
    look(where, wanted)
    with reading(where, wanted), opening(where) as opened:
        head = read_head(where, opened, wanted, form, version)
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if head.pop("sha256", None) != _digest(head, tensors):
            raise FileError(str(where), expected="the content that was saved (its SHA-256)", got="other bytes")
    return head, tensors


def read_head(where: Path, opened: Any, wanted: str, form: str, known: int) -> dict[str, Any]:
    """The JSON in the metadata of an open file, of a format and a version that this library reads."""
    head = json.loads((opened.metadata() or {}).get(KEY, "null"))
    if not isinstance(head, dict) or head.get("format") != form:
        raise FileError(str(where), expected=wanted, got="safetensors of something else")
    version = head.get("version")
    if type(version) is not int or version < 1:
        raise FileError(str(where), expected="a format version, a whole number", got=shown(repr(version)))
    if version > known:
        by = f", written by bnet_transformer {head['library']}" if "library" in head else ""
        allowed = "a newer bnet_transformer reads it: pip install --upgrade bnet_transformer"
        raise FileError(str(where), expected=f"format version {known}", got=f"version {version}{by}", allowed=allowed)
    return head


def is_of(path: str | os.PathLike[str], wanted: str, form: str) -> bool:
    """True for a file of that format; whatever else is wrong with a file is for those to say who read it."""
    where = as_path(path)
    try:
        look(where, wanted)
        with reading(where, wanted), opening(where) as opened:
            head = json.loads((opened.metadata() or {}).get(KEY, "null"))
    except FileError:
        return False
    return isinstance(head, dict) and head.get("format") == form


def look(where: Path, wanted: str) -> None:
    """Refuse what is no file: a folder, or a pipe, which would be waited for."""
    try:
        is_plain = stat.S_ISREG(where.stat().st_mode)
    except OSError as error:
        got = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise FileError(str(where), expected=wanted, got=got) from error
    if not is_plain:
        raise FileError(str(where), expected=wanted, got="a folder" if where.is_dir() else "no plain file")


def opening(where: Path) -> Any:
    """A safetensors file, opened once: mapped, its header and its tensors could be of two files that follow each other.

    Nor does a file that somebody cuts short while it is read end the process, as a mapped one would.
    """
    return safe_open(where, framework="pt", backend="pread")


@contextmanager
def reading(where: Path, wanted: str) -> Iterator[None]:
    """Whatever goes wrong inside is told as a FileError that names the file."""
    try:
        yield
    except FileError:
        raise
    except DeclarationError as error:
        more = f" (and {len(error.faults) - 1} more)" if len(error.faults) > 1 else ""
        raise FileError(str(where), expected=wanted, got=f"a fault: {error.faults[0]}{more}") from error
    except SafetensorError as error:
        raise FileError(str(where), expected=wanted, got=f"no sound safetensors file: {error}") from error
    except BNetError as error:
        raise FileError(str(where), expected=wanted, got=str(error)) from error
    except Exception as error:  # values of a type that nobody foresaw; a stranger's class may fail in any way
        raise FileError(str(where), expected=wanted, got=f"{type(error).__name__}: {error}") from error


def _digest(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """What tells a flipped bit: a hash of everything."""
    found = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.reshape(-1).contiguous().view(torch.uint8).numpy().data if value.numel() else b"")
    return found.hexdigest()
