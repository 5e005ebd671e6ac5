"""`bnet-transformer explore`: the bnet of a sentence as an interactive page, one file that opens from disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from bnet_transformer.cli import outputs, shared
from bnet_transformer.errors import BNetError

FORMATS = (".html",)


@click.command("explore", short_help="Write a sentence's interactive page.")
@shared.sentences_option()
@shared.out_option(FORMATS)
@click.option("--open", "opened", is_flag=True, help="Open the page in a browser; without -o from a temporary folder.")
@shared.model_option()
@shared.do_options()
@shared.input_option()
@click.option("--pair", help="A second sentence behind the first.")
@click.option("--detail", type=click.Choice(["nodes", "words"]), help="What comes unfolded; by default what is small.")
@click.option("--posterior", multiple=True, help="A discrete node whose posterior is told as well; may be repeated.")
@click.option("--slices", help="Slices whose reads are kept, such as 0 or 0,5.")
@click.option("--heads", help="Heads whose reads are kept, such as 3 or 0,3.")
@click.option("--title", help="The title of the page.")
@click.option("--theme", type=click.Choice(["auto", "light", "dark"]), help="The paper; by default the reader's own.")
@shared.json_option()
def command(
    sentences: tuple[str, ...],
    source: str | None,
    outs: tuple[str, ...],
    opened: bool,
    model: str,
    done: tuple[str, ...],
    given: tuple[str, ...],
    inputs: tuple[str, ...],
    pair: str | None,
    slices: str | None,
    heads: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Write the interactive page of a SENTENCE, one file without a server.

    bnet-transformer explore "the cat sat" -o cat.html
    """
    texts = shared.sentences_of(sentences, source, model)
    if not outs and not opened:
        raise BNetError("-o", expected="the page to write, or --open", got="neither", allowed="-o cat.html")
    outputs.check_outs(outs, FORMATS, len(texts))
    options = shared.known(slices=shared.numbers("--slices", slices), heads=shared.numbers("--heads", heads), **asked)
    net = shared.net_of(model)
    told: list[dict[str, Any]] = []
    places = outs or (str(Path(tempfile.mkdtemp(prefix="bnet-")) / "sentence-{}.html"),)
    for k, text in enumerate(shared.along(texts, "sentence")):
        s = shared.sentence_of(net, text, pair=pair, inputs=inputs, done=done, given=given)
        files = [str(s.explore(outputs.placed(out, k), **options)) for out in places]
        told.append({"sentence": text, "words": s.words, "files": files})
    if as_json:
        click.echo(outputs.json_of({"command": "explore", "model": model, "sentences": told}))
    else:
        outputs.say([f"{', '.join(each['files'])}: {' '.join(each['words'])}" for each in told])
    if opened:
        _open([each["files"][0] for each in told])


def _open(files: list[str]) -> None:
    """Show pages in a browser."""
    import webbrowser

    for file in files:
        if not webbrowser.open(Path(file).resolve().as_uri()):
            click.echo(f"no browser was found here: open {file} in one", err=True)
