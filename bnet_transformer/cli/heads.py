"""`bnet-transformer heads`: which heads matter, with uncertainty, and what they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from bnet_transformer.cli import shared
from bnet_transformer.cli.outputs import PICTURES, TABLES, Output, Result, most_of, plotted, rows_of
from bnet_transformer.cli.shared import Source
from bnet_transformer.cli.signatures import Count, Options, command

if TYPE_CHECKING:
    from bnet_transformer.inference import Inclusion

HANDED_ON = ("method", "sigma", "output", "role", "interval", "budget", "seed")


@command(
    "heads",
    short_help="Tell which heads matter.",
    formats=(*PICTURES, *TABLES),
    options=[Options("inference/heads/gates.py", ("inclusion",), HANDED_ON)],
)
def heads(
    source: Source,
    to: Output,
    options: dict[str, Any],
    model: str = "minilm",
    limit: Count | None = None,
    roles: bool = False,
    top: Count | None = None,
    all_: bool = False,
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
        top: Print so many heads, 20 unless told.
        all_: Print all heads.
        show: What is drawn: a map of slices and heads, or intervals by rank.
        theme: The paper.
    """
    texts = source.texts()[:limit]
    to.check()
    most = most_of(top, all_)
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
    count = len(table) if most is None else min(most, len(table))
    told = {name: getattr(found, name) for name in ("told", "sentences", "method", "likelihood", "sigma", "interval")}
    told["table"] = found.to_dataframe()
    told["agreement"] = {one: dict(column) for one, column in found.agreement().items()}
    told |= {"dead": found.dead, "duplicates": _duplicates(found), "roles": read}
    picture = plotted(found, show=show, theme=theme, **({"top": count} if show == "intervals" else {}))
    lines = [found.told, *rows_of(table.head(count)), *_beneath(found, count)]
    to.tell("heads", Result(told, lines, lambda: table, picture), model=model)


def _duplicates(found: Inclusion) -> Any:
    """The pairs of heads that stand in for each other; None where they were not looked at."""
    return found.duplicates() if found.interaction is not None else None


def _beneath(found: Inclusion, count: int) -> list[str]:
    """What stands below the table."""
    every = found.log_bayes.numel()
    lines = [f"... and {every - count} more heads (--all)"] if count < every else []
    if found.dead:
        lines.append("nothing hangs on: " + ", ".join(f"{found.slices[s]}_{h}" for s, h in found.dead))
    pairs = _duplicates(found) or ()
    if pairs:
        told = (f"{found.slices[s]}_{h} and {found.slices[s]}_{o}" for s, h, o in pairs[:5])
        lines.append("stand in for each other: " + ", ".join(told) + (f", {len(pairs) - 5} more" * (len(pairs) > 5)))
    ranks = found.agreement()
    names = list(ranks)
    told = (f"{a} and {b} {ranks.loc[a, b]:.2f}" for k, a in enumerate(names) for b in names[k + 1 :])
    return [*lines, "rank correlations: " + "; ".join(told)]
