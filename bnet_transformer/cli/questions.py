"""The commands `ask` (posteriors, separation, relatives, attention), `sweep` (patching) and `heads` (importance)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import click

from bnet_transformer.cli import inputs
from bnet_transformer.cli.inputs import SentenceQuery, TextSource
from bnet_transformer.cli.outputs import IMAGES, TABLES, CommandResult, Output, TableOutput, format_table, make_plotter
from bnet_transformer.cli.signatures import ApiOptions, Count, SignatureCommand
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
FORMATS = (*TABLES, *IMAGES)
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
    options=[ApiOptions(SENTENCE_FILE, ("posterior",), ("budget",))],
)
def posterior(nodes: str, query: SentenceQuery, options: dict[str, Any], output: TableOutput) -> None:
    """P(NODE | evidence), of one discrete node or of several together, with commas between: c, or c,y_2.

    bnet-transformer ask posterior y_2 "the cat sat" --do c=1
    """
    names = inputs.parse_names("NODES", nodes)

    def answer(s: Sentence) -> CommandResult:
        probs = s.posterior(names if len(names) > 1 else names[0], **options)
        sizes = zip(names, probs.shape, strict=True)
        labels = [list(s.state.labels(s.ground.id(name)) or map(str, range(size))) for name, size in sizes]
        states = [dict(zip(names, state, strict=True)) for state in itertools.product(*labels)]
        rows = [{**state, "probability": p} for state, p in zip(states, probs.flatten().tolist(), strict=True)]
        table = _make_table(rows)
        document = {"nodes": names, "labels": labels, "probabilities": probs}
        lines = output.format_rows(table, by="probability")
        return CommandResult(document, lines, lambda: table, make_plotter(s, node=names))

    _run_question("posterior", query, output if len(names) < 3 else replace(output, formats=TABLES), answer)


@ask.command("separated", cls=SignatureCommand, short_help="Whether the graph separates X from Y.", formats=TABLES)
def separated(
    x: str, y: str, query: SentenceQuery, output: Output, deterministic: bool = False, verify: bool = False
) -> None:
    """Whether the graph separates X from Y, each a node or several with commas between.

    Here --given names nodes without values: bnet-transformer ask separated x_0_0 x_1_2 "the cat sat" --given q_0_2

    Args:
        deterministic: Close what is given under the nodes that it determines.
        verify: Say as well how dependent they are in this sentence's numbers.
    """
    left, right = inputs.parse_names("X", x), inputs.parse_names("Y", y)
    known = [name for text in query.given for name in inputs.parse_names("--given", text)]

    def answer(s: Sentence) -> CommandResult:
        result = s.separated(left, right, known, deterministic=deterministic, verify=verify)
        trail = None if result else s.active_trail(left, right, known, deterministic=deterministic)
        names = ("x", "y", "given", "deterministic", "dependence", "over_choices", "over_roots")
        fields = {name: getattr(result, name) for name in names}
        document = {"separated": bool(result), **fields, "trail": None if trail is None else str(trail)}
        verdict = "separated" if result else "not separated"
        lines = [f"{', '.join(left)} and {', '.join(right)} given {', '.join(known) or 'nothing'}: {verdict}"]
        lines += [f"along {trail}"] if trail is not None else []
        lines += [f"dependence in this sentence: {result.dependence:.3g}"] if result.dependence is not None else []
        row = {key: " ".join(value) if isinstance(value, tuple) else value for key, value in document.items()}
        return CommandResult(document, lines, lambda: _make_table([row]))

    _run_question("separated", replace(query, given=()), output, answer)


def _add_relative_command(name: str, help_text: str) -> None:
    """Add the command `ask NAME`, for a method of `Sentence` that returns the relatives of one node."""

    def relative(node: str, query: SentenceQuery, output: Output) -> None:
        def answer(s: Sentence) -> CommandResult:
            nodes: list[str] = getattr(s, name)(node)
            make_table = lambda: _make_table([{"node": node, name: x} for x in nodes])  # noqa: E731
            return CommandResult({"node": node, "nodes": nodes}, [" ".join(nodes) or "none"], make_table)

        _run_question(name, query, output, answer)

    relative.__doc__ = f'{help_text}\n\nbnet-transformer ask {name} q_0_1 "the cat sat"'
    ask.command(name, cls=SignatureCommand, short_help=help_text, formats=TABLES)(relative)


for _name, _text in RELATIVE_HELPS.items():
    _add_relative_command(_name, _text)


@ask.command(
    "reads",
    cls=SignatureCommand,
    short_help="Which word was read.",
    formats=FORMATS,
    options=[ApiOptions(SENTENCE_FILE, ("reads",), ("slices", "residual", "head", "role", "method", "budget"))],
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
        reads = s.reads(**options)
        tokens = list(reads.tokens)
        k = None if word is None else inputs.find_word("--word", word, tokens)
        top_paths = [] if k is None else reads.paths(k, count=paths or 3)
        document = {"tokens": tokens, "slices": reads.slices, "residual": reads.residual, "matrix": reads.matrix}
        document["paths"] = [{"words": path.words, "probability": path.probability} for path in top_paths]
        plotter = make_plotter(reads, **({} if k is None else {"word": k}))
        matrix = _make_table(reads.matrix.tolist(), index=tokens, columns=tokens)
        rows = format_table(matrix if k is None else matrix.iloc[[k]], index=True)
        return CommandResult(document, [*rows, *map(str, top_paths)], reads.to_dataframe, plotter)

    _run_question("reads", query, output, answer)


def _run_question(
    command: str, query: SentenceQuery, output: Output, answer: Callable[[Sentence], CommandResult]
) -> None:
    """Run `answer` on each sentence, and write and print the results; a table may hold all, an image one.

    Args:
        command: The name after `ask`.
        query: The sentences, their net and their values.
        output: Where the results go.
        answer: Computes the result of one sentence.
    """
    texts = query.read_texts()
    output.check(len(texts), combined_suffixes=TABLES)
    net, results = inputs.load_model(query.model), []
    for text in inputs.show_progress(texts, "sentence"):
        s = query.build_sentence(net, text)
        result = answer(s)
        results.append(replace(result, document={"sentence": text, "words": s.words, **result.document}))
    output.write_results({"command": f"ask {command}", "model": query.model}, "sentences", texts, results)


def _make_table(rows: Sequence[Any], **kwargs: Any) -> pd.DataFrame:
    """A data frame; pandas is imported only when one is made."""
    import pandas as pd

    return pd.DataFrame(rows, **kwargs)


@click.command(
    "sweep",
    cls=SignatureCommand,
    short_help="Put clean values into a corrupt run.",
    formats=(*IMAGES, *TABLES),
    options=[ApiOptions("interventions/sweeps/__init__.py", ("sweep",), ("first_order",))],
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

    net = inputs.load_model(query.model)
    pairs = [[query.build_sentence(net, text) for text in pair] for pair in texts]
    clean, corrupt = [pair[0] for pair in pairs], [pair[-1] for pair in pairs]
    target = _parse_metric(metric) if metric is not None else _make_answer_metric(corrupt[0], str(answer))
    options["over"] = None if over is None else inputs.parse_names("--over", over)
    if memory is not None:
        options["memory"] = memory * 2**20
    ablations: dict[str | None, Any] = {None: clean, "zero": Zero(), "mean": Mean()}
    result = sweeps.sweep(ablations[ablate], corrupt, at=_parse_cells(at), metric=target, **options)
    table = result.to_dataframe()
    document = {"at": result.at, "first_order": result.first_order, "metric": target, "sentences": texts}
    document |= {name: getattr(result, name) for name in ("axes", "labels", "clean", "corrupt", "values")}
    rows = table.dropna(axis="columns", how="all")  # one example has no standard error
    ((node, states),) = target.items()
    states = states if isinstance(states, tuple) else (states,)
    difference = " - ".join(f"log P({node} = {_format_state(corrupt[0], node, state)})" for state in states)
    baseline = "" if result.clean is None else f"{float(result.clean.mean()):.3f} clean, "
    header = f"{difference}: {baseline}{float(result.corrupt.mean()):.3f} corrupt; effects are from there"
    lines = [repr(result), header, *output.format_rows(rows, by="effect")]
    plotter = make_plotter(result, restored=restored, theme=theme)
    document["table"] = table
    output.write_result("sweep", CommandResult(document, lines, lambda: table, plotter), model=query.model)


def _read_pairs(query: SentenceQuery, *, is_ablated: bool) -> list[list[str]]:
    """Pairs of clean and corrupt sentences, tab-separated or alternating; with `is_ablated` corrupt ones alone."""
    if is_ablated:
        return [[text] for text in query.read_texts()]
    rows = query.read_columns()
    if all(len(row) == 1 for row in rows) and len(rows) % 2 == 0:
        return [[clean, corrupt] for (clean,), (corrupt,) in zip(rows[::2], rows[1::2], strict=True)]
    if not all(len(row) == 2 for row in rows):
        expected = "sentences in pairs, clean and corrupt: in a file with a tab between them"
        raise BNetError("SENTENCES", expected=expected, actual=f"{len(rows)} in all")
    return rows


def _parse_cells(specs: tuple[str, ...]) -> str | list[str]:
    """The `at=` of a sweep: a role or a path of roles as text, names and patterns (with an index) as a list."""
    has_index = any(re.search(r"_(\d|\*)", spec) for spec in specs)
    return list(specs) if has_index or len(specs) > 1 else specs[0] if specs else "x"


def _parse_metric(text: str) -> dict[str, object]:
    """The metric of `NODE=STATE` or `NODE=STATE,STATE`: `{node: state}` or `{node: (state, state)}`."""
    name, sign, states = text.partition("=")
    if not sign or not name.strip():
        raise BNetError("--metric", expected="a node and its state or two, y_2=cat or y_2=cat,dog", actual=text)
    return {name.strip(): _parse_metric_states("--metric", states)}


def _parse_metric_states(option: str, text: str) -> object:
    """One state, or a pair of states."""
    parts = inputs.parse_states(option, text)
    if len(parts) > 2:
        raise BNetError(option, expected="one state or two", actual=text)
    return parts[0] if len(parts) == 1 else tuple(parts)


def _make_answer_metric(s: Sentence, text: str) -> dict[str, object]:
    """The metric of `--answer`: the states of the readout at the last word, or of the sentence's readout."""
    from bnet_transformer.data.task import infer_task

    readouts = [spec.group for spec in infer_task(s.state.network).readouts if spec.tpm.kind == "discrete"]
    if len(readouts) != 1:
        actual, allowed = ", ".join(group.name for group in readouts) or "none", "--metric NODE=STATE"
        raise BNetError("--answer", expected="a net with one discrete readout", actual=actual, allowed=allowed)
    (group,) = readouts
    last = "" if group.word_stack is None else f"_{s.ground.word_counts[group.word_stack] - 1}"
    return {f"{group.name}{last}": _parse_metric_states("--answer", text)}


def _format_state(s: Sentence, node: str, state: object) -> str:
    """A state by its index, and by its label where it has one."""
    labels = s.state.labels(s.ground.id(node))
    if not labels:
        return f"state {state}"
    number = labels.index(state) if isinstance(state, str) else int(str(state))
    return f"state {number} {labels[number]!r}"


@click.command(
    "heads",
    cls=SignatureCommand,
    short_help="Tell which heads matter.",
    formats=(*IMAGES, *TABLES),
    options=[ApiOptions("attention/heads/head_inclusion.py", ("inclusion",), INCLUSION_OPTIONS)],
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
    from bnet_transformer.attention.heads import inclusion, roles as find_roles

    net = inputs.load_model(model)
    sentences: list[object] = [inputs.split_stacks(net, text) for text in texts]
    result = inclusion(net, sentences, **options)
    shared = {name: options[name] for name in ("interval", "seed") if name in options}
    by_head = find_roles(net, sentences, **shared).by_head() if roles else None
    table = result.to_dataframe()
    if by_head is not None:
        columns = by_head[["slice", "head", "role", "mean", "chance"]]
        columns = columns.rename(columns={"role": "reads", "mean": "share"})
        table = table.merge(columns, on=["slice", "head"], how="left")
    names = ("sentences", "method", "likelihood", "sigma", "interval")
    document = {"told": result.summary, **{name: getattr(result, name) for name in names}}
    ranks = result.agreement()
    duplicates = None if result.interaction is None else result.duplicates()
    document |= {"table": result.to_dataframe(), "agreement": {name: dict(column) for name, column in ranks.items()}}
    document |= {"dead": result.dead, "duplicates": duplicates, "roles": by_head}
    lines = [result.summary, *output.format_rows(table)]
    if result.dead:
        lines.append("nothing hangs on: " + ", ".join(f"{result.slices[s]}_{h}" for s, h in result.dead))
    if duplicates:
        pairs = (f"{result.slices[s]}_{h} and {result.slices[s]}_{o}" for s, h, o in duplicates[:5])
        more = f", {len(duplicates) - 5} more" if len(duplicates) > 5 else ""
        lines.append(f"stand in for each other: {', '.join(pairs)}{more}")
    correlations = (f"{a} and {b} {ranks.loc[a, b]:.2f}" for a, b in itertools.combinations(ranks, 2))
    lines.append("rank correlations: " + "; ".join(correlations))
    num_rows = len(table) if output.all_ else min(output.num_rows, len(table))
    plotter = make_plotter(result, show=show, theme=theme, **({"top": num_rows} if show == "intervals" else {}))
    output.write_result("heads", CommandResult(document, lines, lambda: table, plotter), model=model)
