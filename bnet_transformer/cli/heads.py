"""`bnet-transformer heads`: which heads matter, with uncertainty, and what they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bnet_transformer.cli import outputs, shared

if TYPE_CHECKING:
    import pandas as pd

    from bnet_transformer.inference import Inclusion
    from bnet_transformer.inference.heads import Roles

FORMATS = (*outputs.PICTURES, *outputs.TABLES)
SHOWN = ("rho", "log_bayes", "importance", "ablation", "intervals")


@click.command("heads", short_help="Tell which heads matter.")
@shared.sentences_option()
@shared.model_option("minilm", "The net, which sums its heads (tiny does not)")
@click.option("--limit", type=click.IntRange(min=1), help="Take the first so many sentences.")
@click.option("--method", type=click.Choice(["exact", "svi"]), default="exact", show_default=True,
              help="All gates of a slice, slice by slice; or all slices at once, approximately.")  # fmt: skip
@click.option("--sigma", type=float, help="The spread around the output of the full net.")
@click.option("--output", help="The family around which it is, such as x_6; by default what the net gives out.")
@click.option("--role", help="Of several kinds of heads those of one role, such as dec_cross_a.")
@click.option("--interval", type=float, default=0.9, show_default=True, help="The probability of intervals.")
@click.option("--budget", type=click.IntRange(min=1), help="The most runs of a slice that exact may take.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draws.")
@click.option("--roles", "reads", is_flag=True, help="Tell what heads read as well.")
@click.option("--top", type=click.IntRange(min=1), help=f"Print so many heads, {outputs.TOP} unless told.")
@click.option("--all", "every", is_flag=True, help="Print all heads.")
@shared.out_option(FORMATS)
@click.option("--show", type=click.Choice(SHOWN), default="rho", show_default=True,
              help="What is drawn: a map of slices and heads, or intervals by rank.")  # fmt: skip
@click.option("--theme", type=click.Choice(["light", "dark"]), default="light", show_default=True, help="The paper.")
@shared.json_option()
def command(
    sentences: tuple[str, ...],
    source: str | None,
    model: str,
    limit: int | None,
    reads: bool,
    top: int | None,
    every: bool,
    outs: tuple[str, ...],
    show: str,
    theme: str,
    as_json: bool,
    **asked: Any,
) -> None:
    """Which heads matter, by SENTENCES or those of a --file: the posterior of each head's share rho, its log Bayes
    factor, gradient importance and ablation. rho is no importance: the table is ordered by the Bayes factor.

    bnet-transformer heads -f sentences.txt --model minilm -o map.svg
    """
    texts = shared.sentences_of(sentences, source)[:limit]
    outputs.check_outs(outs, FORMATS)
    shown = outputs.most_of(top, every)
    from bnet_transformer.inference.heads import inclusion, roles

    net = shared.net_of(model)
    said: list[object] = [shared.said_to(net, text) for text in texts]
    found = inclusion(net, said, **shared.known(**asked))
    read = roles(net, said, interval=asked["interval"], seed=asked["seed"]) if reads else None
    told = {"command": "heads", "model": model, "files": outs, **_told(found, read)}
    table = _with_roles(found.to_dataframe(), read)
    most = len(table) if shown is None else min(shown, len(table))
    outputs.write(outs, told, lambda: table, lambda: _picture(found, show, theme, most))
    if as_json:
        click.echo(outputs.json_of(told))
    else:
        outputs.say([found.told, *outputs.rows_of(table.head(most)), *_beneath(found, most, outs)])


def _picture(found: Inclusion, show: str, theme: str, most: int) -> Any:
    from bnet_transformer.viz.plots import plot

    options: dict[str, Any] = {"top": most} if show == "intervals" else {}
    return plot(found, show=show, theme=theme, **options)


def _told(found: Inclusion, read: Roles | None) -> dict[str, Any]:
    """All that was found, as JSON can hold it."""
    return {
        **{name: getattr(found, name) for name in ("told", "sentences", "method", "likelihood", "sigma", "interval")},
        "table": found.to_dataframe(),
        "agreement": {one: dict(column) for one, column in found.agreement().items()},
        "dead": found.dead,
        "duplicates": found.duplicates() if found.interaction is not None else None,
        "roles": None if read is None else read.by_head(),
    }


def _with_roles(table: pd.DataFrame, read: Roles | None) -> pd.DataFrame:
    """The table, and beside each head what it reads, the share of its reading, and what that is by chance."""
    if read is None:
        return table
    what = read.by_head()[["slice", "head", "role", "mean", "chance"]]
    what = what.rename(columns={"role": "reads", "mean": "share"})
    return table.merge(what, on=["slice", "head"], how="left")


def _beneath(found: Inclusion, count: int, outs: tuple[str, ...]) -> list[str]:
    """What stands below the table."""
    every = found.log_bayes.numel()
    lines = [f"... and {every - count} more heads (--all)"] if count < every else []
    if found.dead:
        lines.append("nothing hangs on: " + ", ".join(f"{found.slices[s]}_{h}" for s, h in found.dead))
    pairs = found.duplicates() if found.interaction is not None else ()
    if pairs:
        told = (f"{found.slices[s]}_{h} and {found.slices[s]}_{o}" for s, h, o in pairs[:5])
        lines.append("stand in for each other: " + ", ".join(told) + (f", {len(pairs) - 5} more" * (len(pairs) > 5)))
    ranks = found.agreement()
    names = list(ranks)
    told = (f"{a} and {b} {ranks.loc[a, b]:.2f}" for k, a in enumerate(names) for b in names[k + 1 :])
    lines.append("rank correlations: " + "; ".join(told))
    return [*lines, *(f"written: {out}" for out in outs)]
