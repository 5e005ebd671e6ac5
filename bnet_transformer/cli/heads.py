"""`bnet-transformer heads`: which heads matter, with uncertainty, and what they read."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import click

from bnet_transformer.cli import shared
from bnet_transformer.cli.outputs import PICTURES, TABLES, TOP, Listing, Result, plotted
from bnet_transformer.cli.shared import Source
from bnet_transformer.cli.signatures import Count, Derived, Options

HANDED_ON = ("method", "sigma", "output", "role", "interval", "budget", "seed")


@click.command(
    "heads",
    cls=Derived,
    short_help="Tell which heads matter.",
    formats=(*PICTURES, *TABLES),
    options=[Options("inference/heads/gates.py", ("inclusion",), HANDED_ON)],
)
def heads(
    source: Source,
    to: Listing,
    options: dict[str, Any],
    model: str = "minilm",
    limit: Count | None = None,
    roles: bool = False,
    show: Literal["rho", "log_bayes", "importance", "ablation", "intervals"] = "rho",
    theme: Literal["light", "dark"] = "light",
) -> None:
    """Which heads matter, by SENTENCES or those of a --file: the posterior of each head's share rho, its log Bayes
    factor, gradient importance and ablation. rho is no importance: the table is ordered by the Bayes factor.

    bnet-transformer heads -f sentences.txt --model minilm -o map.svg

    Args:
        model: The net, which sums its heads (tiny does not).
        limit: Take the first so many sentences.
        roles: Tell what heads read as well.
        show: What is drawn: a map of slices and heads, or intervals by rank.
        theme: The paper.
    """
    texts = source.texts()[:limit]
    to.check()
    from bnet_transformer.inference.heads import inclusion
    from bnet_transformer.inference.heads import roles as roles_of

    net = shared.net_of(model)
    said: list[object] = [shared.words_of(net, text) for text in texts]
    found = inclusion(net, said, **options)
    same = {name: options[name] for name in ("interval", "seed") if name in options}
    read = roles_of(net, said, **same).by_head() if roles else None
    table = found.to_dataframe()
    if read is not None:
        beside = read[["slice", "head", "role", "mean", "chance"]].rename(columns={"role": "reads", "mean": "share"})
        table = table.merge(beside, on=["slice", "head"], how="left")
    told = {name: getattr(found, name) for name in ("told", "sentences", "method", "likelihood", "sigma", "interval")}
    told["table"] = found.to_dataframe()
    told["agreement"] = {one: dict(column) for one, column in found.agreement().items()}
    duplicates = None if found.interaction is None else found.duplicates()
    told |= {"dead": found.dead, "duplicates": duplicates, "roles": read}
    top = {"top": len(table) if to.all_ else min(to.top or TOP, len(table))} if show == "intervals" else {}
    lines = [found.told, *to.rows(table)]
    if found.dead:
        lines.append("nothing hangs on: " + ", ".join(f"{found.slices[s]}_{h}" for s, h in found.dead))
    if duplicates:
        pairs = (f"{found.slices[s]}_{h} and {found.slices[s]}_{o}" for s, h, o in duplicates[:5])
        more = f", {len(duplicates) - 5} more" if len(duplicates) > 5 else ""
        lines.append(f"stand in for each other: {', '.join(pairs)}{more}")
    ranks = found.agreement()
    compared = (f"{a} and {b} {ranks.loc[a, b]:.2f}" for a, b in itertools.combinations(ranks, 2))
    lines.append("rank correlations: " + "; ".join(compared))
    to.tell("heads", Result(told, lines, lambda: table, plotted(found, show=show, theme=theme, **top)), model=model)
