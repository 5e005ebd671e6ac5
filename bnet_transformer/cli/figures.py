"""`bnet-transformer draw` and `explore`: the bnet of a sentence as a figure, a file of its graph, a page."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path
from typing import Any

import click

from bnet_transformer.cli import shared
from bnet_transformer.cli.outputs import Output, placed
from bnet_transformer.cli.shared import Asked
from bnet_transformer.cli.signatures import Derived, Options
from bnet_transformer.errors import BNetError

FORMATS = (".bif", ".dot", ".graphml", ".html", ".json", ".pdf", ".png", ".svg", ".tex")
GRAPHS = ("weights", "slices", "heads", "attention", "min_weight", "top", "detail", "theme", "limit")
PAGES = ("detail", "posterior", "slices", "heads", "title", "theme")


@click.command(
    "draw",
    cls=Derived,
    short_help="Draw the bnet of a sentence.",
    formats=FORMATS,
    options=[Options("viz/options.py", ("Options",), GRAPHS)],
)
def draw(asked: Asked, to: Output, options: dict[str, Any], words: str | None = None) -> None:
    """Draw the bnet of a SENTENCE; the suffix says how.

    bnet-transformer draw "the cat sat" -o cat.svg

    Args:
        words: Words to draw, by number or as they stand, such as cat,2; a number that is a word in quotes, "7".
    """
    from bnet_transformer.viz.figures import check_options

    texts = asked.texts()
    if not to.out:
        raise BNetError("-o", expected="a file to write", got="none", allowed="-o cat.svg")
    to.check(len(texts))
    if words is not None:
        options["words"] = shared.states("--words", words)
    net = shared.net_of(asked.model)
    told: list[dict[str, Any]] = []
    lines: list[str] = []
    for k, text in enumerate(shared.along(texts, "sentence")):
        s = asked.sentence(net, text)
        files = [placed(out, k) for out in to.out]
        for file in files:
            check_options(file, options)
        for file in files:
            s.draw(file, **options)
        nodes, arrows = len(s.ground), s.ground.count_arrows()
        told.append({"sentence": text, "words": s.words, "files": files, "nodes": nodes, "arrows": arrows})
        lines.append(f"{', '.join(files)}: {' '.join(s.words)} ({nodes:,} nodes, {arrows:,} arrows in all)")
    to.say({"command": "draw", "model": asked.model, "sentences": told}, lines)


@click.command(
    "explore",
    cls=Derived,
    short_help="Write a sentence's interactive page.",
    formats=(".html",),
    options=[Options("sentence.py", ("explore",), PAGES)],
)
def explore(asked: Asked, to: Output, options: dict[str, Any], open_: bool = False) -> None:
    """Write the interactive page of a SENTENCE, one file without a server.

    bnet-transformer explore "the cat sat" -o cat.html

    Args:
        open_: Open the page in a browser; without -o from a temporary folder.
    """
    texts = asked.texts()
    if not to.out and not open_:
        raise BNetError("-o", expected="the page to write, or --open", got="neither", allowed="-o cat.html")
    to.check(len(texts))
    net = shared.net_of(asked.model)
    told: list[dict[str, Any]] = []
    places = to.out or (str(Path(tempfile.mkdtemp(prefix="bnet-")) / "sentence-{}.html"),)
    for k, text in enumerate(shared.along(texts, "sentence")):
        s = asked.sentence(net, text)
        files = [str(s.explore(placed(out, k), **options)) for out in places]
        told.append({"sentence": text, "words": s.words, "files": files})
    lines = [f"{', '.join(each['files'])}: {' '.join(each['words'])}" for each in told]
    to.say({"command": "explore", "model": asked.model, "sentences": told}, lines)
    for file in [each["files"][0] for each in told] if open_ else []:
        if not webbrowser.open(Path(file).resolve().as_uri()):
            click.echo(f"no browser was found here: open {file} in one", err=True)
