"""`bnet-transformer cost`: FLOPs, parameters and bytes of a forward pass, by node template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bnet_transformer.cli import outputs, shared
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    from bnet_transformer.bnet import BNet
    from bnet_transformer.cost import Cost

FORMATS = (*outputs.TABLES, *outputs.PICTURES)


@click.command("cost", short_help="Count FLOPs, parameters and bytes.")
@shared.sentences_option()
@shared.model_option()
@click.option("--words", multiple=True, help="So many words instead of a sentence: 128, or enc=20,dec=30; repeatable.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sentences in a batch.")
@click.option("--want", help="The families that are asked for, such as x_1,y; by default what the net gives out.")
@click.option("--show", type=click.Choice(["flops", "parameters", "value_bytes", "parameter_bytes"]), default="flops",
              show_default=True, help="What a picture shows.")  # fmt: skip
@shared.out_option(FORMATS)
@shared.json_option()
def command(
    sentences: tuple[str, ...],
    source: str | None,
    model: str,
    words: tuple[str, ...],
    batch: int,
    want: str | None,
    show: str,
    outs: tuple[str, ...],
    as_json: bool,
) -> None:
    """What a forward pass costs for a SENTENCE, or for so many words: FLOPs, parameters, bytes, orders.

    bnet-transformer cost --model minilm --words 128
    """
    if words and (sentences or source):
        raise BNetError("cost", expected="sentences, or --words", got="both")
    texts = [] if words else shared.sentences_of(sentences, source, model)
    counts: list[int | dict[str, int]] = [_counts(each) for each in words]
    outputs.check_outs(outs, FORMATS, len(texts) + len(counts))
    net = shared.net_of(model)
    counts += [_of_sentence(net, text) for text in texts]
    asked = None if want is None else shared.names("--want", want)
    found = [net.cost(each, batch=batch, want=asked) for each in counts]
    told = [_told(each, text) for each, text in zip(found, texts or words, strict=True)]
    for k, (cost, each) in enumerate(zip(found, told, strict=True)):
        places = [str(outputs.placed(out, k)) for out in outs]
        outputs.write(places, {"command": "cost", "model": model, "costs": [each]}, cost.to_dataframe,
                      lambda cost=cost: _picture(cost, show))  # type: ignore[misc]  # fmt: skip
    if as_json:
        click.echo(outputs.json_of({"command": "cost", "model": model, "costs": told}))
        return
    shown = "\n\n".join("\n".join(line.rstrip() for line in str(each).splitlines()) for each in found)
    outputs.say([shown, *(f"written: {outputs.placed(out, k)}" for k in range(len(found)) for out in outs)])


def _counts(told: str) -> int | dict[str, int]:
    """Words, or words of each stack."""
    parts = [each.partition("=") for each in told.split(",")]
    if len(parts) == 1 and shared.is_whole(told):
        return int(told)
    if not all(name.strip() and sign and shared.is_whole(count.strip()) for name, sign, count in parts):
        raise BNetError("--words", expected="a whole number, or one for each stack (enc=20,dec=30)", got=told)
    return {name.strip(): int(count) for name, _, count in parts}


def _of_sentence(net: BNet, text: str) -> dict[str, int]:
    """How many words each stack of a sentence has."""
    return net.sentence(shared.said_to(net, text)).ground.words


def _told(cost: Cost, of: str) -> dict[str, Any]:
    """A cost as JSON has it."""
    totals = {name: getattr(cost, name) for name in ("parameters", "flops", "order", "parameter_bytes", "value_bytes")}
    totals["flops_in_words"] = None if cost.flops_in_words is None else str(cost.flops_in_words)
    slices = [
        {name: value if value is None or isinstance(value, int) else str(value) for name, value in vars(each).items()}
        for each in cost.slices
    ]
    rows = cost.to_dataframe()
    return {"of": of, "words": cost.words, "batch": cost.batch, **totals, "rows": rows, "slices": slices}


def _picture(cost: Cost, show: str) -> Any:
    from bnet_transformer.viz.plots import plot

    return plot(cost, show=show)
