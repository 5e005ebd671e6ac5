"""`bnet-transformer ask`, `sweep` and `heads`: questions to the bnets of sentences.

Of structure, of probability, of what was read; which nodes carry a difference; which heads matter, and what they read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import click

from bnet_transformer.cli import shared
from bnet_transformer.cli.outputs import (
    DEFAULT_TOP,
    PICTURE_SUFFIXES,
    TABLE_SUFFIXES,
    CommandResult,
    Output,
    TableOutput,
    format_table,
    make_plotter,
)
from bnet_transformer.cli.shared import SentenceQuery, TextSource
from bnet_transformer.cli.signatures import Count, ForwardedOptions, SignatureCommand
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    import pandas as pd

    from bnet_transformer.sentence import Sentence

RELATIVE_HELPS = {
    "blanket": "The Markov blanket of NODE: parents, children, and the children's other parents.",
    "parents": "The nodes with an arrow into NODE.",
    "children": "The nodes to which NODE has an arrow.",
    "ancestors": "All from which a path of arrows leads to NODE.",
    "descendants": "All to which a path of arrows leads from NODE.",
}
FORMATS = (*TABLE_SUFFIXES, *PICTURE_SUFFIXES)
SENTENCE_FILE = "sentence.py"
INCLUSION_OPTIONS = ("method", "sigma", "output", "role", "interval", "budget", "seed")


@click.group("ask", invoke_without_command=True, short_help="Ask: posteriors, separation, what was read.")
@click.pass_context
def ask(ctx: click.Context) -> None:
    """Ask the bnet of a SENTENCE.

    Nodes come first, by their ground names (x_1_2: slice 1, word 2), then sentences.

    \b
    bnet-transformer ask posterior c "the cat sat" --given y_2=cat
    bnet-transformer ask separated x_0_0 x_1_2 "the cat sat" --given q_0_2
    bnet-transformer ask reads "the cat sat" --word 2
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@ask.command(
    "posterior",
    cls=SignatureCommand,
    short_help="P(NODE | evidence).",
    formats=FORMATS,
    options=[ForwardedOptions(SENTENCE_FILE, ("posterior",), ("budget",))],
)
def posterior(nodes: str, query: SentenceQuery, options: dict[str, Any], output: TableOutput) -> None:
    """P(NODE | evidence), of one discrete node or of several together, with commas between: c, or c,y_2.

    bnet-transformer ask posterior y_2 "the cat sat" --do c=1
    """
    names = shared.parse_names("NODES", nodes)

    def answer(s: Sentence) -> CommandResult:
        found = s.posterior(names if len(names) > 1 else names[0], **options)
        each = zip(names, found.shape, strict=True)
        labels = [list(s.state.labels(s.ground.id(name)) or map(str, range(count))) for name, count in each]
        states = [dict(zip(names, state, strict=True)) for state in itertools.product(*labels)]
        rows = [{**state, "probability": p} for state, p in zip(states, found.flatten().tolist(), strict=True)]
        table = _make_table(rows)
        told = {"nodes": names, "labels": labels, "probabilities": found}
        return CommandResult(
            told, output.format_rows(table, by="probability"), lambda: table, make_plotter(s, node=names)
        )

    _run_question("posterior", query, output if len(names) < 3 else replace(output, formats=TABLE_SUFFIXES), answer)


@ask.command(
    "separated", cls=SignatureCommand, short_help="Whether the graph separates X from Y.", formats=TABLE_SUFFIXES
)
def separated(
    x: str, y: str, query: SentenceQuery, output: Output, deterministic: bool = False, verify: bool = False
) -> None:
    """Whether the graph separates X from Y, each a node or several with commas between.

    Here --given names nodes without values: bnet-transformer ask separated x_0_0 x_1_2 "the cat sat" --given q_0_2

    Args:
        deterministic: Close what is given under the nodes that it determines.
        verify: Say as well how dependent they are in this sentence's numbers.
    """
    left, right = shared.parse_names("X", x), shared.parse_names("Y", y)
    known = [name for each in query.given for name in shared.parse_names("--given", each)]

    def answer(s: Sentence) -> CommandResult:
        found = s.separated(left, right, known, deterministic=deterministic, verify=verify)
        trail = None if found else s.active_trail(left, right, known, deterministic=deterministic)
        told = {name: getattr(found, name) for name in ("x", "y", "given", "deterministic")}
        told |= {name: getattr(found, name) for name in ("dependence", "over_choices", "over_roots")}
        told = {"separated": bool(found), **told, "trail": None if trail is None else str(trail)}
        said = "separated" if found else "not separated"
        lines = [f"{', '.join(left)} and {', '.join(right)} given {', '.join(known) or 'nothing'}: {said}"]
        lines += [f"along {trail}"] if trail is not None else []
        lines += [f"dependence in this sentence: {found.dependence:.3g}"] if found.dependence is not None else []
        row = {name: " ".join(each) if isinstance(each, tuple) else each for name, each in told.items()}
        return CommandResult(told, lines, lambda: _make_table([row]))

    _run_question("separated", replace(query, given=()), output, answer)


def _add_relative_command(name: str, help_text: str) -> None:
    """Make the command that asks for the relatives of one node."""

    def relative(node: str, query: SentenceQuery, output: Output) -> None:
        def answer(s: Sentence) -> CommandResult:
            found: list[str] = getattr(s, name)(node)
            table = lambda: _make_table([{"node": node, name: each} for each in found])  # noqa: E731
            return CommandResult({"node": node, "nodes": found}, [" ".join(found) or "none"], table)

        _run_question(name, query, output, answer)

    relative.__doc__ = f'{help_text}\n\nbnet-transformer ask {name} q_0_1 "the cat sat"'
    ask.command(name, cls=SignatureCommand, short_help=help_text, formats=TABLE_SUFFIXES)(relative)


for _name, _text in RELATIVE_HELPS.items():
    _add_relative_command(_name, _text)


@ask.command(
    "reads",
    cls=SignatureCommand,
    short_help="Which word was read.",
    formats=FORMATS,
    options=[ForwardedOptions(SENTENCE_FILE, ("reads",), ("slices", "residual", "head", "role", "method", "budget"))],
)
def reads(
    query: SentenceQuery, output: Output, options: dict[str, Any], word: str | None = None, paths: Count | None = None
) -> None:
    """Which word was read: P(source word | output word) along the attention TPMs.

    bnet-transformer ask reads "the cat sat" --word sat

    Args:
        word: One output word, by number or as it stands, and the paths by which it was read.
        paths: So many paths, of --word: 3 unless told.
    """
    if paths is not None and word is None:
        raise BNetError("--paths", expected="--word beside it", actual="none")

    def answer(s: Sentence) -> CommandResult:
        found = s.reads(**options)
        tokens = list(found.tokens)
        one = None if word is None else shared.find_word("--word", word, tokens)
        ways = [] if one is None else found.paths(one, count=paths or 3)
        told = {"tokens": tokens, "slices": found.slices, "residual": found.residual, "matrix": found.matrix}
        told["paths"] = [{"words": each.words, "probability": each.probability} for each in ways]
        picture = make_plotter(found, **({} if one is None else {"word": one}))
        matrix = _make_table(found.matrix.tolist(), index=tokens, columns=tokens)
        rows = format_table(matrix if one is None else matrix.iloc[[one]], index=True)
        return CommandResult(told, [*rows, *map(str, ways)], found.to_dataframe, picture)

    _run_question("reads", query, output, answer)


def _run_question(
    command: str, query: SentenceQuery, output: Output, answer: Callable[[Sentence], CommandResult]
) -> None:
    """Ask each sentence, and write and print what it answers; tables may hold all sentences, pictures one."""
    texts = query.read_texts()
    output.check(len(texts), combined_suffixes=TABLE_SUFFIXES)
    net, results = shared.load_model(query.model), []
    for text in shared.show_progress(texts, "sentence"):
        s = query.build_sentence(net, text)
        found = answer(s)
        results.append(replace(found, document={"sentence": text, "words": s.words, **found.document}))
    output.write_results({"command": f"ask {command}", "model": query.model}, "sentences", texts, results)


def _make_table(rows: Sequence[Any], **kwargs: Any) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, **kwargs)


@click.command(
    "sweep",
    cls=SignatureCommand,
    short_help="Put clean values into a corrupt run.",
    formats=(*PICTURE_SUFFIXES, *TABLE_SUFFIXES),
    options=[ForwardedOptions("interventions/sweeps/__init__.py", ("sweep",), ("first_order",))],
)
def sweep(
    query: SentenceQuery,
    output: TableOutput,
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
    output.check()
    texts = _read_pairs(query, is_ablated=ablate is not None)
    if (metric is None) == (answer is None):
        raise BNetError("sweep", expected="--metric or --answer", actual="neither" if metric is None else "both")
    from bnet_transformer.interventions import Mean, Zero, sweeps

    net = shared.load_model(query.model)
    made = [[query.build_sentence(net, text) for text in pair] for pair in texts]
    clean, corrupt = [pair[0] for pair in made], [pair[-1] for pair in made]
    measured = _parse_metric(metric) if metric is not None else _make_answer_metric(corrupt[0], str(answer))
    options["over"] = None if over is None else shared.parse_names("--over", over)
    if memory is not None:
        options["memory"] = memory * 2**20
    ablations: dict[str | None, Any] = {None: clean, "zero": Zero(), "mean": Mean()}
    found = sweeps.sweep(ablations[ablate], corrupt, at=_parse_cells(at), metric=measured, **options)
    table = found.to_dataframe()
    told = {"at": found.at, "first_order": found.first_order, "metric": measured, "sentences": texts}
    told |= {name: getattr(found, name) for name in ("axes", "labels", "clean", "corrupt", "values")}
    shown = table.dropna(axis="columns", how="all")  # a single example tells no error
    ((node, states),) = measured.items()
    each = states if isinstance(states, tuple) else (states,)
    difference = " - ".join(f"log P({node} = {_format_state(corrupt[0], node, state)})" for state in each)
    before = "" if found.clean is None else f"{float(found.clean.mean()):.3f} clean, "
    head = f"{difference}: {before}{float(found.corrupt.mean()):.3f} corrupt; effects are from there"
    lines = [repr(found), head, *output.format_rows(shown, by="effect")]
    picture = make_plotter(found, restored=restored, theme=theme)
    output.write_result(
        "sweep", CommandResult({**told, "table": table}, lines, lambda: table, picture), model=query.model
    )


def _read_pairs(query: SentenceQuery, *, is_ablated: bool) -> list[list[str]]:
    """Clean and corrupt sentences, from the lines of a file or one after the other."""
    if is_ablated:
        return [[text] for text in query.read_texts()]
    parted = query.read_columns()
    if all(len(parts) == 1 for parts in parted) and len(parted) % 2 == 0:
        return [[clean, corrupt] for (clean,), (corrupt,) in zip(parted[::2], parted[1::2], strict=True)]
    if not all(len(parts) == 2 for parts in parted):
        wanted = "sentences in pairs, clean and corrupt: in a file with a tab between them"
        raise BNetError("SENTENCES", expected=wanted, actual=f"{len(parted)} in all")
    return parted


def _parse_cells(specs: tuple[str, ...]) -> str | list[str]:
    """A role or a path of roles; names and patterns, which have an index, as a list."""
    named = any(re.search(r"_(\d|\*)", each) for each in specs)
    return list(specs) if named or len(specs) > 1 else specs[0] if specs else "x"


def _parse_metric(text: str) -> dict[str, object]:
    """A node and its state, or two."""
    name, sign, states = text.partition("=")
    if not sign or not name.strip():
        raise BNetError("--metric", expected="a node and its state or two, y_2=cat or y_2=cat,dog", actual=text)
    return {name.strip(): _parse_metric_states("--metric", states)}


def _parse_metric_states(option: str, text: str) -> object:
    """One state, or two: each a number, or a word."""
    parts = shared.parse_states(option, text)
    if len(parts) > 2:
        raise BNetError(option, expected="one state or two", actual=text)
    return parts[0] if len(parts) == 1 else tuple(parts)


def _make_answer_metric(s: Sentence, text: str) -> dict[str, object]:
    """The metric of the answer: the readout of the last word, or of the sentence."""
    from bnet_transformer.data.task import infer_task

    readouts = [m.group for m in infer_task(s.state.network).readouts if m.tpm.kind == "discrete"]
    if len(readouts) != 1:
        got = ", ".join(family.name for family in readouts) or "none"
        raise BNetError(
            "--answer", expected="a net with one discrete readout", actual=got, allowed="--metric NODE=STATE"
        )
    (family,) = readouts
    last = "" if family.word_stack is None else f"_{s.ground.word_counts[family.word_stack] - 1}"
    return {f"{family.name}{last}": _parse_metric_states("--answer", text)}


def _format_state(s: Sentence, node: str, state: object) -> str:
    """A state by its number, and by its word where it has one."""
    labels = s.state.labels(s.ground.id(node))
    if not labels:
        return f"state {state}"
    number = labels.index(state) if isinstance(state, str) else int(str(state))
    return f"state {number} {labels[number]!r}"


@click.command(
    "heads",
    cls=SignatureCommand,
    short_help="Tell which heads matter.",
    formats=(*PICTURE_SUFFIXES, *TABLE_SUFFIXES),
    options=[ForwardedOptions("attention/heads/head_inclusion.py", ("inclusion",), INCLUSION_OPTIONS)],
)
def heads(
    source: TextSource,
    output: TableOutput,
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
    texts = source.read_texts()[:limit]
    output.check()
    from bnet_transformer.attention.heads import inclusion, roles as roles_of

    net = shared.load_model(model)
    said: list[object] = [shared.split_stacks(net, text) for text in texts]
    found = inclusion(net, said, **options)
    same = {name: options[name] for name in ("interval", "seed") if name in options}
    read = roles_of(net, said, **same).by_head() if roles else None
    table = found.to_dataframe()
    if read is not None:
        beside = read[["slice", "head", "role", "mean", "chance"]].rename(columns={"role": "reads", "mean": "share"})
        table = table.merge(beside, on=["slice", "head"], how="left")
    told = {"told": found.summary} | {
        name: getattr(found, name) for name in ("sentences", "method", "likelihood", "sigma", "interval")
    }
    told["table"] = found.to_dataframe()
    told["agreement"] = {one: dict(column) for one, column in found.agreement().items()}
    duplicates = None if found.interaction is None else found.duplicates()
    told |= {"dead": found.dead, "duplicates": duplicates, "roles": read}
    top = (
        {"top": len(table) if output.all_ else min(output.top or DEFAULT_TOP, len(table))}
        if show == "intervals"
        else {}
    )
    lines = [found.summary, *output.format_rows(table)]
    if found.dead:
        lines.append("nothing hangs on: " + ", ".join(f"{found.slices[s]}_{h}" for s, h in found.dead))
    if duplicates:
        pairs = (f"{found.slices[s]}_{h} and {found.slices[s]}_{o}" for s, h, o in duplicates[:5])
        more = f", {len(duplicates) - 5} more" if len(duplicates) > 5 else ""
        lines.append(f"stand in for each other: {', '.join(pairs)}{more}")
    ranks = found.agreement()
    compared = (f"{a} and {b} {ranks.loc[a, b]:.2f}" for a, b in itertools.combinations(ranks, 2))
    lines.append("rank correlations: " + "; ".join(compared))
    output.write_result(
        "heads",
        CommandResult(told, lines, lambda: table, make_plotter(found, show=show, theme=theme, **top)),
        model=model,
    )
