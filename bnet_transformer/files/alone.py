"""One run at a time in a folder."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bnet_transformer.errors import FileError
from bnet_transformer.files.atomic import clear

if sys.platform == "win32":
    import msvcrt

    def _lock(held: int) -> None:
        msvcrt.locking(held, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(held: int) -> None:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)


@dataclass
class _Lock:
    """A lock file that is open."""

    held: int


_LOCKS: dict[Path, _Lock] = {}  # of this process, by the file that each is for


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """While the block runs no other `alone` has this file, in any process; the lock of a killed one is gone with it.

    What killed writers of the file left behind is taken away.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, alone(Path(folder, "a")), alone(Path(folder, "a")):
    ...     pass
    Traceback (most recent call last):
    ...
    bnet_transformer.errors.FileError: ...
    """
    lock = _LOCKS[path] = _Lock(_held(path))
    try:
        clear(path)
        yield
    finally:
        if _LOCKS.get(path) is lock:
            del _LOCKS[path]
        if _is_there(_lock_of(path), lock.held):  # not that of a run in a folder that was made anew
            with contextlib.suppress(OSError):  # while it is held: who opened it before sees that it is gone
                _lock_of(path).unlink()
        os.close(lock.held)


def still_alone(path: Path) -> None:
    """Before a file is written that is held `alone`: where its lock, or its folder, was taken away, take it anew.

    In a folder that was deleted and made again another run may have begun: then this one is refused.
    """
    lock = _LOCKS.get(path)
    if lock is not None and not _is_there(_lock_of(path), lock.held):
        before, lock.held = lock.held, _held(path)
        os.close(before)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _held(path: Path) -> int:
    """The lock file, opened and locked, with the number of this process in it."""
    folder, lock = path.parent, _lock_of(path)
    while True:
        try:
            held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            got = error.strerror or str(error)
            raise FileError(str(folder), expected="a folder that can be written", got=got) from error
        try:
            _lock(held)
        except (BlockingIOError, PermissionError) as error:
            who = os.read(held, 20).decode("ascii", "replace")
            os.close(held)
            got = f"one that {f'process {who}' if who else 'another run'} writes to"
            allowed = "another folder, or this one when that run has ended"
            raise FileError(
                str(folder), expected="a folder that no other run writes to", got=got, allowed=allowed
            ) from error
        except OSError as error:  # a file system without locks
            warnings.warn(f"{folder} cannot be locked ({error.strerror}): let no other run write there", stacklevel=4)
        if _is_there(lock, held):
            with contextlib.suppress(OSError):  # of a full disk: the lock holds without the number, too
                os.truncate(held, 0)
                os.write(held, str(os.getpid()).encode())
            return held
        os.close(held)  # it was taken away between the two


def _is_there(lock: Path, held: int) -> bool:
    """Whether the file that is open still has its name."""
    try:
        return os.path.samestat(lock.stat(), os.fstat(held))
    except OSError:
        return False
