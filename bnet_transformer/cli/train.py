"""`bnet-transformer train`: a decoder of a text file, or a saved net, trained by gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bnet_transformer.cli import lines, outputs, shared
from bnet_transformer.cli.telling import Interrupted
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    from bnet_transformer.bnet import BNet
    from bnet_transformer.training import Trained

FORMATS = (*outputs.TABLES, *outputs.PICTURES, ".safetensors")
DECLARED = ("dim", "heads", "slices", "hidden", "dropout")
STEPS = 300


@click.command("train", short_help="Train a decoder, or a saved net.")
@shared.sentences_option()
@shared.model_option(None, "A net to train, in place of the decoder below")
@click.option("--dim", type=int, help="A new decoder: the width of a word's state, 32 unless told.")
@click.option("--heads", type=int, help="A new decoder: heads, 2 unless told.")
@click.option("--slices", type=int, help="A new decoder: slices, 2 unless told.")
@click.option("--hidden", type=int, help="A new decoder: the width within the feed-forward node.")
@click.option("--dropout", type=float, help="A new decoder: the share that is dropped, 0 unless told.")
@click.option("--start", help="A word before each sentence.")
@click.option("--stop", help="A word behind each sentence.")
@click.option("--steps", type=int, help=f"How many steps, {STEPS} unless --epochs tells it.")
@click.option("--epochs", type=int, help="How many times each sentence is met.")
@click.option("--batch", type=int, help="Sentences in a step, 32 unless told.")
@click.option("--rate", type=float, help="The rate of AdamW.")
@click.option("--schedule", type=click.Choice(["constant", "cosine", "noam"]), help="How the rate goes.")
@click.option("--warmup", type=int, help="Steps in which the rate rises.")
@click.option("--smoothing", type=float, help="The share of a label that is spread over all.")
@click.option("--weight-decay", type=float, help="Of matrices and tables.")
@click.option("--clip", type=float, help="The longest gradient.")
@click.option("--held-out", "held_out", help="A file of sentences on which the loss is measured.")
@lines.checkpoint_options()
@click.option("--device", help="Where to train, such as cuda.")
@click.option("--seed", type=int, default=0, show_default=True)
@shared.out_option(FORMATS)
@shared.json_option()
def command(
    sentences: tuple[str, ...],
    source: str | None,
    model: str | None,
    start: str | None,
    stop: str | None,
    steps: int | None,
    epochs: int | None,
    held_out: str | None,
    folder: str | None,
    resume: bool,
    changed: bool,
    outs: tuple[str, ...],
    as_json: bool,
    **asked: Any,
) -> None:
    """Train on SENTENCES, or on those of a --file: a new decoder, which tells the next word, or a --model.

    A net that tells no next word is trained on lines with what is observed behind a tab.

    \b
    bnet-transformer train -f sentences.txt --steps 500 -o net.safetensors
    """
    data = lines.lines_of(sentences, source)
    judges = None if held_out is None else lines.lines_of((), held_out)
    outputs.check_outs(outs, FORMATS)
    declared = shared.known(**{name: asked.pop(name) for name in DECLARED})
    ends = [word for word in (start, stop) if word is not None]
    net = _new(data, ends, declared, asked["seed"]) if model is None else _told(model, declared)
    checkpoints = lines.checkpoints_of(folder, resume=resume, changed=changed)
    options = _configured(shared.known(**asked, start=start, stop=stop, epochs=epochs, checkpoints=checkpoints))
    options["steps"] = STEPS if steps is None and epochs is None else steps
    if judges is not None:
        options["held_out"] = _examples(net, judges)
    found = _trained(net, _examples(net, data), options, folder)
    told = {
        "command": "train",
        "model": model,
        "sentences": len(data.texts),
        "steps": found.steps,
        "losses": found.losses,
        "held_out": found.held_out,
        "files": outs,
    }
    for out in outs:
        if out.lower().endswith(".safetensors"):
            found.net.save(out)
        else:
            outputs.write([out], told, lambda: found.to_dataframe().reset_index(), lambda: _picture(found))
    if as_json:
        click.echo(outputs.json_of(told))
        return
    measured = f", held out {found.held_out[-1][1]:.3f}" if found.held_out else ""
    loss = f"loss {found.losses[0]:.3f} at first, {found.losses[-1]:.3f} at last{measured}"
    outputs.say([f"{found.steps} steps on {len(data.texts)} sentences: {loss}", *(f"written: {out}" for out in outs)])


def _configured(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `train`, those that belong together in their configs."""
    from bnet_transformer.training.configs import AdamW, EarlyStopping

    optimizer, early_stopping = shared.config_of(AdamW, options), shared.config_of(EarlyStopping, options)
    return {**options, "optimizer": optimizer, "early_stopping": early_stopping}


def _trained(net: BNet, data: object, options: dict[str, Any], folder: str | None) -> Trained[BNet]:
    from bnet_transformer.training import train

    try:
        return train(net, data, **options)
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted" + ("" if folder is None else f": --resume goes on from {folder}")) from error


def _new(data: lines.Lines, ends: list[str], declared: dict[str, Any], seed: int) -> BNet:
    """A decoder of a text: its words, and those at the ends of sentences."""
    if data.told is not None:
        raise BNetError("SENTENCES", expected="lines without a tab, for a decoder tells next words", got="tabs")
    from bnet_transformer.models.decoder import decoder

    words = list(dict.fromkeys([*data.vocabulary, *ends]))
    return decoder(**{"dim": 32, "heads": 2, "slices": 2, "dropout": 0.0, **declared}, vocabulary=words, seed=seed)


def _told(model: str, declared: dict[str, Any]) -> BNet:
    """The net of a model, which is declared already."""
    if declared:
        got = ", ".join(f"--{name}" for name in declared)
        raise BNetError("--model", expected="no option of a new decoder beside it", got=got)
    return shared.net_of(model)


def _examples(net: BNet, data: lines.Lines) -> list[object]:
    """The sentences, with what is observed of them where that is told."""
    if data.told is None:
        return [shared.said_to(net, text) for text in data.texts]
    labels = [label for member in net.network.members for label in getattr(member.tpm, "labels", None) or ()]
    vocabularies = [word for known in net.network.vocabularies.values() for word in known or ()]
    return list(data.pairs(data.observed(None), [*labels, *vocabularies]))


def _picture(found: Trained[BNet]) -> Any:
    from bnet_transformer.viz.plots import plot

    return plot(found)
