"""The command `serve`: the live page."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial

import click

from bnet_transformer.cli import inputs
from bnet_transformer.cli.errors import escape_control
from bnet_transformer.cli.signatures import Count, SignatureCommand


@click.command("serve", cls=SignatureCommand, short_help="Open the live page: type a sentence, see its bnet.")
def serve(models: tuple[str, ...], port: int = 8765, no_browser: bool = False, max_words: Count = 256) -> None:
    """Serve the live page on this computer until Ctrl-C, for each MODEL; by default, for all models that are installed.

    bnet-transformer serve tiny minilm

    Args:
        models: The nets, as for --model of draw.
        port: The port on 127.0.0.1; 0 for a free one.
        no_browser: Print the address without opening it in a browser.
        max_words: The maximum number of words of a sentence.
    """
    from bnet_transformer.serve.app import check_serve_installed

    check_serve_installed()
    from bnet_transformer.serve.page_state import Limits
    from bnet_transformer.serve.server import run_server

    names = models or tuple(_list_installed())
    for name in names:
        inputs.check_model(name)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("bnet_transformer.serve")
    logger.addHandler(handler)
    loaders = {name: partial(inputs.load_model, name) for name in names}
    run_server(
        loaders,
        port=port,
        limits=Limits(words=max_words),
        print_line=lambda line: click.echo(escape_control(line)),
        open_browser=not no_browser,
    )
    # A thread that computes or loads a model cannot be interrupted; Python would wait for it, and print the traceback
    # of another Ctrl-C. The output is already flushed.
    os._exit(0)


def _list_installed() -> list[str]:
    """The nets of the package and of installed packages."""
    from bnet_transformer.pretrained import PACKAGES
    from bnet_transformer.pretrained.source import is_installed

    return ["tiny", *(name for name in PACKAGES if is_installed(name))]
