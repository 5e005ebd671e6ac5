"""`bnet-transformer draw`: the bnet of a sentence as a figure or a file of its graph."""

from __future__ import annotations

from typing import Any

import click

from bnet_transformer.cli import outputs, shared

FORMATS = (".bif", ".dot", ".graphml", ".html", ".json", ".pdf", ".png", ".svg", ".tex")


@click.command("draw", short_help="Draw the bnet of a sentence.")
@shared.sentences_option()
@shared.out_option(FORMATS, required=True)
@shared.model_option()
@shared.do_options()
@shared.input_option()
@click.option("--pair", help="A second sentence behind the first.")
@click.option("--weights/--no-weights", default=None, help="Draw selectors and weights, as is done unless told.")
@click.option("--attention", is_flag=True, help="Put P(j | i) on the arrows of json and graphml; figures have it.")
@click.option("--min-weight", type=float, help="Leave out arrows that are read less than this.")
@click.option("--top", type=int, help="Figures: at most so many reads, the strongest.")
@click.option("--detail", type=click.Choice(["nodes", "words", "folded"]), help="Figures: what is drawn.")
@click.option("--theme", type=click.Choice(["light", "dark", "auto"]), help="Figures: the paper.")
@click.option("--slices", help="Slices to draw, such as 0 or 0,5.")
@click.option("--heads", help="Heads to draw, such as 3 or 0,3.")
@click.option("--words", help="Words to draw, by number or as they stand, such as cat,sat.")
@click.option("--word", multiple=True, help="A word to draw as it stands, be it a number or a comma; may be repeated.")
@click.option(
    "--limit", type=click.IntRange(min=0), help="Refuse more arrows; a figure without --detail shows words then."
)
@shared.json_option()
def command(
    sentences: tuple[str, ...],
    source: str | None,
    outs: tuple[str, ...],
    model: str,
    done: tuple[str, ...],
    given: tuple[str, ...],
    inputs: tuple[str, ...],
    pair: str | None,
    slices: str | None,
    heads: str | None,
    words: str | None,
    word: tuple[str, ...],
    attention: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Draw the bnet of a SENTENCE; the suffix says how.

    bnet-transformer draw "the cat sat" -o cat.svg
    """
    from bnet_transformer.viz.figures import check_options

    texts = shared.sentences_of(sentences, source, model)
    outputs.check_outs(outs, FORMATS, len(texts))
    options = shared.known(
        slices=shared.numbers("--slices", slices),
        heads=shared.numbers("--heads", heads),
        words=shared.words(words, word),
        attention=attention or None,
        **asked,
    )
    net = shared.net_of(model)
    told: list[dict[str, Any]] = []
    for k, text in enumerate(shared.along(texts, "sentence")):
        s = shared.sentence_of(net, text, pair=pair, inputs=inputs, done=done, given=given)
        files = [outputs.placed(out, k) for out in outs]
        for file in files:
            check_options(file, options)
        for file in files:
            s.draw(file, **options)
        counts = {"nodes": len(s.ground), "arrows": s.ground.count_arrows()}
        told.append({"sentence": text, "words": s.words, "files": [*map(str, files)], **counts})
    if as_json:
        click.echo(outputs.json_of({"command": "draw", "model": model, "sentences": told}))
        return
    for each in told:
        counted = f"{each['nodes']:,} nodes, {each['arrows']:,} arrows in all"
        outputs.say([f"{', '.join(each['files'])}: {' '.join(each['words'])} ({counted})"])
