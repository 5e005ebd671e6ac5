"""`bnet-transformer completion`: the script that makes a shell complete commands, options, models and suffixes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import click
from click.shell_completion import CompletionItem, get_completion_class

PROGRAM, VARIABLE = "bnet-transformer", "_BNET_TRANSFORMER_COMPLETE"
Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a SHELL.

    \b
    bash   eval "$(bnet-transformer completion bash)"     in ~/.bashrc
    zsh    eval "$(bnet-transformer completion zsh)"      in ~/.zshrc
    fish   bnet-transformer completion fish > ~/.config/fish/completions/bnet-transformer.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(ctx.find_root().command, {}, PROGRAM, VARIABLE)
    click.echo(made.source_template % made.source_vars())  # not source(), which looks for a bash to try it on


def completer(option: str, suffixes: Sequence[str]) -> Completer | None:
    """What completes the value of an option: files, the names of nets, files with one of the suffixes."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = [name for name in ("tiny", "minilm") if option == "model" and name.startswith(incomplete)]
        names += _suffixed(incomplete, suffixes) if option == "out" else []
        return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]

    return complete if option in ("file", "model", "out") else None


def _suffixed(incomplete: str, suffixes: Sequence[str]) -> list[str]:
    """A name with each suffix that fits what is written of it."""
    stem, begun = os.path.splitext(incomplete)
    if incomplete.endswith("."):
        stem, begun = incomplete[:-1], "."
    return [stem + suffix for suffix in suffixes if suffix.startswith(begun)] if os.path.basename(stem) else []
