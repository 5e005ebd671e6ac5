"""The group of commands: it imports the module of a command on its first use, runs it, and sets the exit code."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from bnet_transformer.cli.errors import exit_with_error, print_warning

COMMANDS = {  # command -> its module
    **{
        "draw": "nets",
        "explore": "nets",
        "serve": "serving",
        "ask": "questions",
        "sweep": "questions",
        "fit": "learning",
    },
    **{"heads": "questions", "train": "learning", "cost": "nets", "models": "nets", "bench": "nets"},
}
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used, so that `--help` does not import torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"bnet_transformer.cli.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> Any:
        """Run a command and exit; `--debug` may be anywhere before a `--`.

        Args:
            args: The arguments; by default, the arguments of the process.
            *more: Passed to `click.Group.main`.
            **extra: Passed to `click.Group.main`.

        Raises:
            SystemExit: Always, with the exit code.
        """
        argv = list(sys.argv[1:] if args is None else args)
        options = argv[: argv.index("--")] if "--" in argv else argv
        debug = "--debug" in options or os.environ.get("BNET_DEBUG", "0") not in ("", "0")
        argv = [option for option in options if option != "--debug"] + argv[len(options) :]
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError):  # a stream may be None, or may not be a text stream
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            with warnings.catch_warnings():
                warnings.showwarning = print_warning
                sys.exit(super().main(argv, *more, **{**extra, "standalone_mode": False}) or 0)
        except Exception as error:  # click raises click.Abort, an Exception, for KeyboardInterrupt
            exit_with_error(error, debug)


@click.group(cls=LazyGroup, context_settings=CONTEXT_SETTINGS, invoke_without_command=True)
@click.version_option(package_name="bnet-transformer")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error; allowed anywhere.")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Treat a transformer as a Bayesian network: draw it, query it, intervene on it, fit it."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
