"""Writing a file whole or not at all, and one run at a time in a folder."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from bnet_transformer.errors import FileError

NAMED = 40  # letters of a file's name in that of its temporary folder: a name has at most 255 bytes


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
    a hidden folder of its own beside the file, for libraries write beside a file as well (safetensors does). A device
    or a pipe is written to when the block ends.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/a.txt") as temporary:
    ...         _ = temporary.write_text("whole")
    ...     Path(folder, "a.txt").read_text()
    'whole'
    """
    where = as_path(path)
    try:
        is_stream = where.exists() and not where.is_file() and not where.is_dir()
        target = where if is_stream else Path(os.path.realpath(where))  # a link stays one
        if not target.parent.is_dir():
            raise FileError(str(path), expected="a folder that is there", got=f"{target.parent}, which is not")
        beside = None if is_stream else target.parent
        prefix = f".{target.name[:NAMED]}."
        with tempfile.TemporaryDirectory(".tmp", prefix, beside, ignore_cleanup_errors=True) as folder:
            temporary = Path(folder, "whole")
            temporary.touch()
            mode = (target if target.is_file() else temporary).stat().st_mode
            yield temporary
            if is_stream:
                with temporary.open("rb") as held, target.open("wb") as stream:
                    shutil.copyfileobj(held, stream)
                return
            with temporary.open("rb+") as made:
                os.fsync(made.fileno())
            temporary.chmod(stat.S_IMODE(mode))
            temporary.replace(target)
    except (OSError, SafetensorError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise FileError(str(path), expected="a file that can be written", got=got) from error


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Lock a file: while the block runs no other process can, and the system releases the lock of a killed one.

    Temporary folders that killed writers of the file left behind are removed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, exclusive_lock(Path(folder, "a")):
    ...     with exclusive_lock(Path(folder, "a")):
    ...         pass
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.FileError: ...
    """
    folder = str(path.parent)
    try:
        held = FileLock(f"{path}.lock").acquire(timeout=0)
    except Timeout as error:
        wanted, got = "a folder that no other run writes to", "one that another run writes to"
        allowed = "another folder, or this one when that run has ended"
        raise FileError(folder, expected=wanted, got=got, allowed=allowed) from error
    except OSError as error:
        got = error.strerror or str(error)
        raise FileError(folder, expected="a folder that can be written", got=got) from error
    with held:
        for left in path.parent.glob(f".{glob.escape(path.name[:NAMED])}.????????.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        yield
