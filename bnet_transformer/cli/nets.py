"""The commands `draw`, `explore`, `serve`, `cost`, `models` and `bench`: figures, pages, costs, local nets."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import webbrowser
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from bnet_transformer._core.checks import is_integer
from bnet_transformer.cli.group import ApiOptions, Count, SignatureCommand, escape_control
from bnet_transformer.cli.io import (
    IMAGES,
    TABLES,
    Answer,
    Output,
    SentenceQuery,
    TextSource,
    answer_sentences,
    check_model,
    load_model,
    parse_names,
    parse_states,
    split_stacks,
)
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    from bnet_transformer.sentence import Sentence

    pass


FORMATS = (".bif", ".dot", ".gexf", ".graphml", ".html", ".json", ".pdf", ".png", ".svg", ".tex")
DRAW_OPTIONS = (
    *("weights", "slices", "heads", "attention", "min_weight", "top", "detail", "theme", "limit"),
    *("special", "width", "font", "title"),
)
COST_FIELDS = (*("words", "batch", "parameters", "flops", "order", "parameter_bytes", "value_bytes"), "flops_in_words")
EXPLORE_OPTIONS = ("detail", "posterior", "slices", "heads", "title", "theme", "special")


@click.command(
    "draw",
    cls=SignatureCommand,
    short_help="Draw the bnet of a sentence.",
    formats=FORMATS,
    options=[ApiOptions("figures/options.py", ("SentenceOptions",), DRAW_OPTIONS)],
)
def draw(query: SentenceQuery, output: Output, options: dict[str, Any], words: str | None = None) -> None:
    """Draw the bnet of a SENTENCE in the format of the file's suffix.

    bnet-transformer draw "the cat sat" -o cat.svg

    Args:
        words: The words to draw, as words or indices, such as cat,2; a number that is a word in double quotes: "7".
    """
    from bnet_transformer.drawing import check_options

    if not output.out:
        raise BNetError("the output file is missing", hint="Give it with -o, such as -o cat.svg")
    if words is not None:
        options["words"] = parse_states("--words", words)

    def answer(s: Sentence) -> Answer:
        for out in output.out:
            check_options(out, options)
        counts = {"nodes": len(s.ground), "arrows": s.ground.count_arrows()}
        line = f"{' '.join(s.words)} ({counts['nodes']:,} nodes and {counts['arrows']:,} arrows in total)"
        return Answer(more=counts, lines=[line], save=partial(s.draw, **options))

    answer_sentences("draw", query, output, answer, combined_suffixes=())


@click.command(
    "explore",
    cls=SignatureCommand,
    short_help="Write a sentence's interactive page.",
    formats=(".html",),
    options=[ApiOptions("page/description.py", ("PageOptions",), EXPLORE_OPTIONS)],
)
def explore(query: SentenceQuery, output: Output, options: dict[str, Any], open_: bool = False) -> None:
    """Write the interactive page of a SENTENCE, one HTML file that requires no server.

    bnet-transformer explore "the cat sat" -o cat.html

    Args:
        open_: Open the page in a browser; without -o, the page is in a temporary folder.
    """
    if not output.out and not open_:
        raise BNetError("the output file is missing", hint="Give it with -o, such as -o cat.html, or use --open")
    if not output.out:
        output = replace(output, out=(str(Path(tempfile.mkdtemp(prefix="bnet-")) / "sentence-{}.html"),))

    def answer(s: Sentence) -> Answer:
        return Answer(lines=[" ".join(s.words)], save=partial(s.draw, **options))

    documents = answer_sentences("explore", query, output, answer, combined_suffixes=())
    for file in [document["files"][0] for document in documents] if open_ else []:
        if not webbrowser.open(Path(file).resolve().as_uri()):
            click.echo(f"no browser was found. Open {file} in a browser.", err=True)


@click.command(
    "cost",
    cls=SignatureCommand,
    short_help="Count FLOPs, parameters and bytes.",
    formats=(*TABLES, *IMAGES),
    options=[ApiOptions("bnet.py", ("cost",), ("batch",))],
)
def cost(
    source: TextSource,
    output: Output,
    options: dict[str, Any],
    model: str = SentenceQuery.model,
    words: tuple[str, ...] = (),
    want: str | None = None,
    show: Literal["flops", "parameters", "value_bytes", "parameter_bytes"] = "flops",
) -> None:
    """Count FLOPs, parameters, bytes and orders of a forward pass, for a SENTENCE or for a number of words.

    bnet-transformer cost --model minilm --words 128

    Args:
        model: The net, as for draw.
        words: The number of words, instead of a sentence: 128, or enc=20,dec=30. May be repeated.
        want: The node groups to compute, such as x_1,y; by default, the outputs of the net.
        show: The quantity in images.
    """
    if words and (source.sentences or source.file):
        raise BNetError("give sentences or --words, not both")
    texts = [] if words else SentenceQuery(source.sentences, source.file, model).read_texts()
    counts: list[Any] = [_parse_word_counts(text) for text in words]
    output.check(len(texts) + len(counts), combined_suffixes=TABLES)
    net = load_model(model)
    counts += [net.sentence(split_stacks(net, text)).ground.word_counts for text in texts]
    groups = None if want is None else parse_names("--want", want)
    answers = []
    for count, text in zip(counts, texts or words, strict=True):
        cost = net.cost(count, want=groups, **options)
        more = {"of": text, "rows": cost.to_dataframe(), "slices": [vars(row) for row in cost.slices]}
        lines = [line.rstrip() for line in str(cost).splitlines()]
        answers.append(Answer(cost, COST_FIELDS, more, lines, plot={"show": show}))
    output.write("cost", answers, texts or words, "costs", model=model)


def _parse_word_counts(text: str) -> int | dict[str, int]:
    """Return the number of words, or the number of each stack."""
    parts = [[part.strip() for part in item.partition("=")] for item in text.split(",")]
    if len(parts) == 1 and is_integer(text):
        return int(text)
    if not all(name and sign and is_integer(count) for name, sign, count in parts):
        raise BNetError("--words", expected="an integer, or one for each stack (enc=20,dec=30)", actual=text)
    return {name: int(count) for name, _, count in parts}


@click.command("models", cls=SignatureCommand, short_help="List pretrained nets and families.")
def models(json: bool = False) -> None:
    """List the pretrained nets on this computer, and the supported families of models.

    Args:
        json: Print one JSON document.
    """
    from bnet_transformer.pretrained import FAMILIES, PACKAGES, list_cached
    from bnet_transformer.pretrained.source import is_installed

    nets = {"tiny": "in the package"}
    for name, model in PACKAGES.items():
        nets[name] = f"in {model.package}" if is_installed(name) else f"not installed: {model.install}"
    nets |= dict.fromkeys(list_cached(), "in the Hugging Face cache")
    width = max(map(len, nets))
    lines = [f"{name:{width}}  {location}" for name, location in nets.items()]
    document = {"command": "models", "models": nets, "families": list(FAMILIES)}
    Output(json=json).print_document(document, [*lines, "supported families: " + ", ".join(FAMILIES)])


@click.command(
    "bench", short_help="Run the benchmarks of the repository.", context_settings={"ignore_unknown_options": True}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Run `python -m benchmarks ARGUMENTS` in a clone of the repository.

    The installed package has no benchmarks. The clone is this folder, a parent folder, or the folder of the package.
    """
    folders = [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[2]]
    clone = next((folder for folder in folders if (folder / "benchmarks" / "__main__.py").is_file()), None)
    if clone is None:
        hint = "Run the command in a clone of the repository"
        raise BNetError("this folder and its parents have no folder benchmarks/", hint=hint)
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    raise SystemExit(subprocess.run([sys.executable, "-m", "benchmarks", *arguments], env=environment).returncode)


# --------------------------------------------------------------------------------------------------------------------
# The command `serve`: the live page.


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
    from bnet_transformer.serve.server import check_serve_installed

    check_serve_installed()
    from bnet_transformer.pretrained.source import PACKAGES, is_installed
    from bnet_transformer.serve.answers import Limits
    from bnet_transformer.serve.server import run_server

    names = models or ("tiny", *filter(is_installed, PACKAGES))
    for name in names:
        check_model(name)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("bnet_transformer.serve")
    logger.addHandler(handler)
    loaders = {name: partial(load_model, name) for name in names}
    print_line, limits = lambda line: click.echo(escape_control(line)), Limits(words=max_words)
    run_server(loaders, port=port, limits=limits, print_line=print_line, open_browser=not no_browser)
    # A thread that computes or loads a model cannot be interrupted; Python would wait for it, and print the traceback
    # of another Ctrl-C. The output is already flushed.
    os._exit(0)
