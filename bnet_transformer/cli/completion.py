"""`bnet-transformer completion`: the script that makes a shell complete commands, options, models and suffixes."""

from __future__ import annotations

import click

PROGRAM, VARIABLE = "bnet-transformer", "_BNET_TRANSFORMER_COMPLETE"


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a SHELL.

    \b
    bash   eval "$(bnet-transformer completion bash)"     in ~/.bashrc
    zsh    eval "$(bnet-transformer completion zsh)"      in ~/.zshrc
    fish   bnet-transformer completion fish > ~/.config/fish/completions/bnet-transformer.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(ctx.find_root().command, {}, PROGRAM, VARIABLE)
    click.echo(made.source_template % made.source_vars())  # not source(), which looks for a bash to try it on
