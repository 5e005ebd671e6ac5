"""`bnet-transformer sweep`: clean values put into the corrupt run, every cell in one batch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from bnet_transformer.cli import outputs, shared
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    import pandas as pd

    from bnet_transformer.bnet import BNet
    from bnet_transformer.inference.sweeps import Sweep
    from bnet_transformer.sentence import Sentence

FORMATS = (*outputs.PICTURES, *outputs.TABLES)


@click.command("sweep", short_help="Put clean values into a corrupt run.")
@shared.sentences_option()
@shared.model_option()
@click.option(
    "--at", multiple=True, help='A role (x, q, j, a), an arrow ("v -> a"), or names and patterns; repeatable.'
)
@click.option("--metric", help='A node and its state, or two for their difference: y_2=cat or y_2=cat,dog. '
              'A whole number is a state; the word 7 is "7", in quotes of its own.')  # fmt: skip
@click.option("--answer", help="The same of the last word's readout: the clean and the corrupt answer, cat,dog.")
@click.option("--over", help="The axes that stay apart, such as slice,head.")
@click.option("--ablate", type=click.Choice(["zero", "mean"]),
              help="Put in zeros, or the mean over the words: then all sentences are corrupt.")  # fmt: skip
@click.option("--first-order", is_flag=True, help="Run no cell: estimate all effects from one pass back.")
@shared.do_option()
@click.option("--memory", type=click.IntRange(min=1), help="About so many MB at once.")
@click.option("--top", type=click.IntRange(min=1), help=f"Print so many cells, {outputs.TOP} unless told.")
@click.option("--all", "every", is_flag=True, help="Print all cells, in their order.")
@click.option("--restored", is_flag=True, help="A picture of shares of the total.")
@click.option("--theme", type=click.Choice(["light", "dark"]), default="light", show_default=True, help="The paper.")
@shared.out_option(FORMATS)
@shared.json_option()
def command(
    sentences: tuple[str, ...],
    source: str | None,
    model: str,
    at: tuple[str, ...],
    metric: str | None,
    answer: str | None,
    over: str | None,
    ablate: str | None,
    first_order: bool,
    done: tuple[str, ...],
    memory: int | None,
    top: int | None,
    every: bool,
    restored: bool,
    theme: str,
    outs: tuple[str, ...],
    as_json: bool,
) -> None:
    """Which nodes carry what tells a CLEAN sentence from a CORRUPT one.

    Sentences come in pairs, clean and corrupt, of as many words each; in a file a tab stands between them.

    bnet-transformer sweep "the cat sat" "the dog sat" --answer cat,dog
    """
    outputs.check_outs(outs, FORMATS)
    most = outputs.most_of(top, every)
    texts = _pairs(shared.sentences_of(sentences, source), ablated=ablate is not None)
    if (metric is None) == (answer is None):
        raise BNetError("sweep", expected="--metric or --answer", got="neither" if metric is None else "both")
    net = shared.net_of(model)
    made = [[shared.sentence_of(net, text, done=done) for text in pair] for pair in texts]
    clean, corrupt = [pair[0] for pair in made], [pair[-1] for pair in made]
    asked = _metric(metric) if metric is not None else _answer(net, corrupt[0], str(answer))
    found = _swept(
        clean if ablate is None else ablate,
        corrupt,
        at=_cells(at),
        metric=asked,
        over=None if over is None else shared.names("--over", over),
        first_order=first_order,
        **({} if memory is None else {"memory": memory * 2**20}),
    )
    told = _told(found, model, asked, texts, outs)
    table = found.to_dataframe()
    outputs.write(outs, told, lambda: table, lambda: _picture(found, restored, theme))
    if as_json:
        click.echo(outputs.json_of(told))
    else:
        outputs.say([*_head(found, asked, corrupt[0]), *_shown(table, most), *(f"written: {out}" for out in outs)])


def _pairs(texts: list[str], *, ablated: bool) -> list[list[str]]:
    """Clean and corrupt sentences, from the lines of a file or one after the other."""
    if ablated:
        return [[text] for text in texts]
    parted = [[part.strip() for part in text.split("\t")] for text in texts]
    if all(len(parts) == 1 for parts in parted) and len(texts) % 2 == 0:
        return [texts[k : k + 2] for k in range(0, len(texts), 2)]
    if not all(len(parts) == 2 for parts in parted):
        wanted = "sentences in pairs, clean and corrupt: in a file with a tab between them"
        raise BNetError("SENTENCES", expected=wanted, got=f"{len(texts)} in all")
    return parted


def _cells(told: tuple[str, ...]) -> str | list[str]:
    """A role or a path of roles; names and patterns, which have an index, as a list."""
    named = any(re.search(r"_(\d|\*)", each) for each in told)
    return list(told) if named or len(told) > 1 else told[0] if told else "x"


def _metric(told: str) -> dict[str, object]:
    """A node and its state, or two."""
    name, sign, states = told.partition("=")
    if not sign or not name.strip():
        raise BNetError("--metric", expected="a node and its state or two, y_2=cat or y_2=cat,dog", got=told)
    return {name.strip(): _states("--metric", states)}


def _states(what: str, told: str) -> object:
    """One state, or two: each a number, or a word."""
    parts = shared.states(what, told)
    if len(parts) > 2:
        raise BNetError(what, expected="one state or two", got=told)
    return parts[0] if len(parts) == 1 else tuple(parts)


def _answer(net: BNet, s: Sentence, told: str) -> dict[str, object]:
    """The metric of the answer: the readout of the last word, or of the sentence."""
    from bnet_transformer.data.task import infer_task

    readouts = [m.family for m in infer_task(net.network).readouts if m.tpm.kind == "discrete"]
    if len(readouts) != 1:
        got = ", ".join(family.name for family in readouts) or "none"
        raise BNetError("--answer", expected="a net with one discrete readout", got=got, allowed="--metric NODE=STATE")
    (family,) = readouts
    last = "" if family.words is None else f"_{s.ground.words[family.words] - 1}"
    return {f"{family.name}{last}": _states("--answer", told)}


def _swept(clean: Any, corrupt: list[Sentence], **asked: Any) -> Sweep:
    from bnet_transformer.inference import Mean, Zero
    from bnet_transformer.inference.sweeps import sweep

    ablations = {"zero": Zero, "mean": Mean}
    return sweep(ablations[clean]() if isinstance(clean, str) else clean, corrupt, **asked)


def _told(found: Sweep, model: str, metric: Any, texts: list[list[str]], outs: tuple[str, ...]) -> dict[str, Any]:
    """A sweep as JSON has it."""
    return {
        "command": "sweep",
        "model": model,
        "files": outs,
        "at": found.at,
        "first_order": found.first_order,
        "metric": metric,
        "sentences": texts,
        "axes": found.axes,
        "labels": found.labels,
        "clean": found.clean,
        "corrupt": found.corrupt,
        "values": found.values,
        "table": found.to_dataframe(),
    }


def _head(found: Sweep, metric: dict[str, object], s: Sentence) -> list[str]:
    """What was swept, and how far apart the runs are."""
    ((node, states),) = metric.items()
    each = states if isinstance(states, tuple) else (states,)
    asked = " - ".join(f"log P({node} = {_named(s, node, state)})" for state in each)
    clean = "" if found.clean is None else f"{float(found.clean.mean()):.3f} clean, "
    return [repr(found), f"{asked}: {clean}{float(found.corrupt.mean()):.3f} corrupt; effects are from there"]


def _named(s: Sentence, node: str, state: object) -> str:
    """A state by its number, and by its word where it has one."""
    labels = s.state.labels(s.ground.id(node))
    if not labels:
        return f"state {state}"
    number = labels.index(state) if isinstance(state, str) else int(str(state))
    return f"state {number} {labels[number]!r}"


def _shown(table: pd.DataFrame, most: int | None) -> list[str]:
    """The cells of the greatest effects, or all in their order; what a single example does not tell is left out."""
    table = table.dropna(axis="columns", how="all")
    if most is None:
        return outputs.rows_of(table)
    return outputs.rows_of(table.sort_values("effect", key=abs, ascending=False, kind="stable"), most)


def _picture(found: Sweep, restored: bool, theme: str) -> Any:
    from bnet_transformer.viz.plots import plot

    return plot(found, restored=restored, theme=theme)
