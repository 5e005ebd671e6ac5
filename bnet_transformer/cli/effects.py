"""`bnet-transformer sweep` and `heads`: which nodes carry a difference, which heads matter and what they read."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, Literal

import click

from bnet_transformer.cli import shared
from bnet_transformer.cli.outputs import PICTURES, TABLES, TOP, Listing, Result, plotted
from bnet_transformer.cli.shared import Asked, Source
from bnet_transformer.cli.signatures import Count, Derived, Options
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    from bnet_transformer.sentence import Sentence

HANDED_ON = ("method", "sigma", "output", "role", "interval", "budget", "seed")


@click.command(
    "sweep",
    cls=Derived,
    short_help="Put clean values into a corrupt run.",
    formats=(*PICTURES, *TABLES),
    options=[Options("inference/sweeps/__init__.py", ("sweep",), ("first_order",))],
)
def sweep(
    asked: Asked,
    to: Listing,
    options: dict[str, Any],
    at: tuple[str, ...] = (),
    metric: str | None = None,
    answer: str | None = None,
    over: str | None = None,
    ablate: Literal["zero", "mean"] | None = None,
    memory: Count | None = None,
    restored: bool = False,
    theme: Literal["light", "dark"] = "light",
) -> None:
    """Which nodes carry what tells a CLEAN sentence from a CORRUPT one.

    Sentences come in pairs, clean and corrupt, of as many words each; in a file a tab stands between them.

    bnet-transformer sweep "the cat sat" "the dog sat" --answer cat,dog

    Args:
        at: A role (x, q, j, a), an arrow ("v -> a"), or names and patterns; x unless told; may be repeated.
        metric: A node and its state, or two for their difference: y_2=cat or y_2=cat,dog. A whole number is a state;
            the word 7 is "7", in quotes of its own.
        answer: The same of the last word's readout: the clean and the corrupt answer, cat,dog.
        over: The axes that stay apart, such as slice,head.
        ablate: Put in zeros, or the mean over the words: then all sentences are corrupt.
        memory: About so many MB at once.
        restored: A picture of shares of the total.
        theme: The paper.
    """
    to.check()
    texts = _pairs(asked, ablated=ablate is not None)
    if (metric is None) == (answer is None):
        raise BNetError("sweep", expected="--metric or --answer", got="neither" if metric is None else "both")
    from bnet_transformer.inference import Mean, Zero, sweeps

    net = shared.net_of(asked.model)
    made = [[asked.sentence(net, text) for text in pair] for pair in texts]
    clean, corrupt = [pair[0] for pair in made], [pair[-1] for pair in made]
    measured = _metric(metric) if metric is not None else _answer(corrupt[0], str(answer))
    options["over"] = None if over is None else shared.names("--over", over)
    if memory is not None:
        options["memory"] = memory * 2**20
    ablations: dict[str | None, Any] = {None: clean, "zero": Zero(), "mean": Mean()}
    found = sweeps.sweep(ablations[ablate], corrupt, at=_cells(at), metric=measured, **options)
    table = found.to_dataframe()
    told = {"at": found.at, "first_order": found.first_order, "metric": measured, "sentences": texts}
    told |= {name: getattr(found, name) for name in ("axes", "labels", "clean", "corrupt", "values")}
    shown = table.dropna(axis="columns", how="all")  # a single example tells no error
    ((node, states),) = measured.items()
    each = states if isinstance(states, tuple) else (states,)
    difference = " - ".join(f"log P({node} = {_named(corrupt[0], node, state)})" for state in each)
    before = "" if found.clean is None else f"{float(found.clean.mean()):.3f} clean, "
    head = f"{difference}: {before}{float(found.corrupt.mean()):.3f} corrupt; effects are from there"
    lines = [repr(found), head, *to.rows(shown, by="effect")]
    picture = plotted(found, restored=restored, theme=theme)
    to.tell("sweep", Result({**told, "table": table}, lines, lambda: table, picture), model=asked.model)


def _pairs(asked: Asked, *, ablated: bool) -> list[list[str]]:
    """Clean and corrupt sentences, from the lines of a file or one after the other."""
    if ablated:
        return [[text] for text in asked.texts()]
    parted = asked.parted()
    if all(len(parts) == 1 for parts in parted) and len(parted) % 2 == 0:
        return [[clean, corrupt] for (clean,), (corrupt,) in zip(parted[::2], parted[1::2], strict=True)]
    if not all(len(parts) == 2 for parts in parted):
        wanted = "sentences in pairs, clean and corrupt: in a file with a tab between them"
        raise BNetError("SENTENCES", expected=wanted, got=f"{len(parted)} in all")
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


def _answer(s: Sentence, told: str) -> dict[str, object]:
    """The metric of the answer: the readout of the last word, or of the sentence."""
    from bnet_transformer.data.task import infer_task

    readouts = [m.family for m in infer_task(s.state.network).readouts if m.tpm.kind == "discrete"]
    if len(readouts) != 1:
        got = ", ".join(family.name for family in readouts) or "none"
        raise BNetError("--answer", expected="a net with one discrete readout", got=got, allowed="--metric NODE=STATE")
    (family,) = readouts
    last = "" if family.words is None else f"_{s.ground.words[family.words] - 1}"
    return {f"{family.name}{last}": _states("--answer", told)}


def _named(s: Sentence, node: str, state: object) -> str:
    """A state by its number, and by its word where it has one."""
    labels = s.state.labels(s.ground.id(node))
    if not labels:
        return f"state {state}"
    number = labels.index(state) if isinstance(state, str) else int(str(state))
    return f"state {number} {labels[number]!r}"


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
