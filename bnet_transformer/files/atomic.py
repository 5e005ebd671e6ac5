"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from bnet_transformer.errors import FileError

NAMED = 40  # letters of a file's name in that of its temporary file: a name has at most 255 bytes


def as_path(path: object) -> Path:
    """A path, from what people write."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
        os.fsencode(text)
    except (TypeError, UnicodeError):  # half of a character names no file
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise FileError("path", expected="the path of a file, a string or a Path", got=path)
    return Path(text)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """An empty temporary file, which takes the place of `path` when the block ends, and is gone if it fails.

    The bytes are on the disk before the name is theirs: after a crash there is the old file or the new one. It lies in
    a hidden folder `.name.*.tmp` beside the file, of its own, for libraries write beside a file as well (safetensors
    does); what a killed process leaves behind is that folder, which nothing reads. A device or a pipe stays what it
    is: it is written to when the block ends.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/a.txt") as temporary:
    ...         _ = temporary.write_text("whole")
    ...     Path(folder, "a.txt").read_text()
    'whole'
    """
    if _is_stream(as_path(path)):
        with _into(as_path(path)) as temporary:
            yield temporary
        return
    try:
        target = Path(os.path.realpath(as_path(path)))
    except OSError as error:
        gone = "the current one, which is gone"
        raise FileError(str(path), expected="a folder that is there", got=gone) from error
    if os.path.isdir(target):
        raise FileError(str(path), expected="the path of a file", got="a folder")
    if not os.path.isdir(target.parent):
        raise FileError(str(path), expected="a folder that is there", got=f"{target.parent}, which is not")
    own = target.with_name(f".{target.name[:NAMED]}.{secrets.token_hex(8)}.tmp")
    temporary = own / "whole"
    try:
        own.mkdir(0o700)  # what is to be private is so while it is written
        temporary.touch()
        mode = (target if target.exists() else temporary).stat().st_mode
        yield temporary
        with temporary.open("rb+") as made:
            os.fsync(made.fileno())
        temporary.chmod(stat.S_IMODE(mode))
        temporary.replace(target)
        _keep_names(target.parent)
    except (OSError, SafetensorError) as error:
        raise _unwritten(path, error) from error
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _keep_names(folder: Path) -> None:
    """Put the names in a folder on the disk; where a system cannot, it does so by itself, a little later."""
    with contextlib.suppress(OSError):
        held = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(held)
        finally:
            os.close(held)


def clear(path: Path) -> None:
    """Take away what killed writers of `path` left behind; for who knows that nobody else writes it now."""
    for left in path.parent.glob(f".{glob.escape(path.name[:NAMED])}.{'[0-9a-f]' * 16}.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def _unwritten(path: object, error: OSError | SafetensorError) -> FileError:
    """The error of a file that could not be written."""
    got = getattr(error, "strerror", None) or str(error)
    return FileError(str(path), expected="a file that can be written", got=got)


def _is_stream(path: Path) -> bool:
    """Whether what is there, behind links, is a device, a pipe or a socket: such a place holds no file."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextlib.contextmanager
def _into(path: Path) -> Iterator[Path]:
    """An empty temporary file, whose content is written to a device or a pipe when the block ends."""
    try:
        with tempfile.TemporaryDirectory(prefix="bnet-") as folder:
            temporary = Path(folder, "whole")
            temporary.touch()
            yield temporary
            with temporary.open("rb") as held, open(os.open(path, os.O_WRONLY), "wb") as stream:
                shutil.copyfileobj(held, stream)
    except (OSError, SafetensorError) as error:
        raise _unwritten(path, error) from error
