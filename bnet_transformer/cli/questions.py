"""The commands `ask` (posteriors, most probable states, separation, relatives, attention), `sweep` and `heads`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import click

from bnet_transformer._core.tokens import distinguish, name_columns
from bnet_transformer.cli.group import ApiOptions, Count, SignatureCommand
from bnet_transformer.cli.io import (
    IMAGES,
    TABLES,
    Answer,
    Output,
    SentenceQuery,
    TableOutput,
    TextSource,
    answer_sentences,
    find_word,
    format_table,
    load_model,
    parse_names,
    parse_states,
    split_stacks,
)
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    import pandas as pd

    from bnet_transformer.bnet import BNet
    from bnet_transformer.sentence import Sentence

RELATIVE_HELPS = {
    "blanket": "The Markov blanket of NODE: parents, children, and the children's other parents.",
    "parents": "The nodes with an arrow into NODE.",
    "children": "The nodes to which NODE has an arrow.",
    "ancestors": "The nodes from which a path of arrows leads to NODE.",
    "descendants": "The nodes to which a path of arrows leads from NODE.",
}
METRIC_HINT = "Use --metric NODE=STATE, or --answer CLEAN,CORRUPT for the readout of the last word"
FORMATS = (*TABLES, *IMAGES)
SENTENCE_FILE = "sentence.py"
INCLUSION_OPTIONS = ("method", "sigma", "output", "role", "interval", "budget", "seed")


@dataclass(frozen=True)
class LimitedQuery(SentenceQuery):
    """The sentences of a query of probabilities.

    Args:
        budget: The maximum number of joint states of latent choices, by default 65536.
    """

    budget: Count | None = None

    def build_sentence(self, net: BNet, text: str) -> Sentence:
        return super().build_sentence(net, text).limits(budget=self.budget)


@click.group("ask", invoke_without_command=True, short_help="Query posteriors, separation, relatives and attention.")
@click.pass_context
def ask(ctx: click.Context) -> None:
    """Query the bnet of a SENTENCE.

    Give nodes first, by their ground names (x_1_2: slice 1, word 2), then sentences.

    \b
    bnet-transformer ask posterior c "the cat sat" --given y_2=cat
    bnet-transformer ask separated x_0_0 x_1_2 "the cat sat" --given q_0_2
    bnet-transformer ask reads "the cat sat" --word 2
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@ask.command("posterior", cls=SignatureCommand, short_help="P(NODE | evidence).", formats=FORMATS)
def posterior(nodes: str, query: LimitedQuery, output: TableOutput) -> None:
    """Compute P(NODE | evidence) of a discrete node, or of several nodes jointly (separated by commas: c,y_2).

    bnet-transformer ask posterior y_2 "the cat sat" --do c=1
    """
    names = parse_names("NODES", nodes)

    def answer(s: Sentence) -> Answer:
        probs = s.posterior(names if len(names) > 1 else names[0])
        labels = [s.labels(name) for name in names]
        columns = name_columns(names, ["probability"])
        table = _make_table([*itertools.product(*labels)], columns=columns, dtype=object)
        table = table.assign(probability=probs.flatten().tolist())
        lines = output.format_rows(table, by="probability")
        distinct = [distinguish(part) for part in labels]  # in a file all tokens are distinguished, not only the shown
        table[columns] = [*itertools.product(*distinct)]
        more = {"nodes": names, "labels": distinct, "probabilities": probs}
        return Answer(s, more=more, lines=lines, table=table, plot={"node": names})

    answer_sentences("ask posterior", query, output if len(names) < 3 else replace(output, formats=TABLES), answer)


@ask.command(
    "most-probable",
    cls=SignatureCommand,
    short_help="The most probable joint states of latent choices.",
    formats=FORMATS,
    options=[ApiOptions(SENTENCE_FILE, ("most_probable",), ("count",))],
)
def most_probable(query: LimitedQuery, options: dict[str, Any], output: TableOutput, nodes: str | None = None) -> None:
    """Find the most probable joint states of all latent choices given the evidence (the most probable explanation).

    bnet-transformer ask most-probable "the cat sat" --given y_2=cat --count 3

    Args:
        nodes: Only these nodes, separated by commas; the other nodes are summed out (marginal MAP). A node group or a
            pattern such as c_0_* is several nodes.
    """
    names = None if nodes is None else parse_names("--nodes", nodes)

    def answer(s: Sentence) -> Answer:
        result = s.most_probable(nodes=names, **options)
        labels = {name: result.labels(name) for name in result.nodes}
        states = _make_table([{"node": name, **dict(enumerate(row, 1))} for name, row in labels.items()])
        ranks = result.to_dataframe().reset_index()[["rank", "log_prob", "share"]]
        fields = ("nodes", "states", "log_probs", "shares", "log_evidence")
        lines = [*format_table(ranks), *output.format_rows(states)]
        return Answer(result, fields, {"labels": [*zip(*labels.values(), strict=True)]}, lines)

    answer_sentences("ask most-probable", query, output, answer)


@ask.command("separated", cls=SignatureCommand, short_help="Whether the graph separates X from Y.", formats=TABLES)
def separated(
    x: str, y: str, query: LimitedQuery, output: Output, deterministic: bool = False, verify: bool = False
) -> None:
    """Test whether the graph separates X from Y; each is a node, or several nodes separated by commas.

    --given takes names of nodes without values: bnet-transformer ask separated x_0_0 x_1_2 "the cat sat" --given q_0_2

    Args:
        deterministic: Treat nodes that the given nodes determine as given.
        verify: Also measure the dependence between X and Y in this sentence.
    """
    left, right = parse_names("X", x), parse_names("Y", y)
    known = [name for text in query.given for name in parse_names("--given", text)]

    def answer(s: Sentence) -> Answer:
        result = s.separated(left, right, known, deterministic=deterministic, verify=verify)
        trail = None if result else s.active_trail(left, right, known, deterministic=deterministic)
        fields = ("separated", "x", "y", "given", "deterministic", "dependence", "over_choices", "over_roots")
        separation = Answer(result, fields, {"trail": None if trail is None else str(trail)})
        row = {
            key: " ".join(value) if isinstance(value, tuple) else value for key, value in separation.document.items()
        }
        verdict = "separated" if result else "not separated"
        lines = [f"{', '.join(left)} and {', '.join(right)} given {', '.join(known) or 'nothing'}: {verdict}"]
        lines += [f"along {trail}"] if trail is not None else []
        lines += [f"dependence in this sentence: {result.dependence:.3g}"] if result.dependence is not None else []
        return replace(separation, lines=lines, table=_make_table([row]))

    answer_sentences("ask separated", replace(query, given=()), output, answer)


def _add_relative_command(name: str, help_text: str) -> None:
    """Add the command `ask NAME`, for a method of `Sentence` that returns the relatives of one node."""

    def relative(node: str, query: SentenceQuery, output: Output) -> None:
        def answer(s: Sentence) -> Answer:
            nodes: list[str] = getattr(s, name)(node)
            table = _make_table([{"node": node, name: x} for x in nodes])
            return Answer(more={"node": node, "nodes": nodes}, lines=[" ".join(nodes) or "none"], table=table)

        answer_sentences(f"ask {name}", query, output, answer)

    relative.__doc__ = f'{help_text}\n\nbnet-transformer ask {name} q_0_1 "the cat sat"'
    ask.command(name, cls=SignatureCommand, short_help=help_text, formats=TABLES)(relative)


for _name, _text in RELATIVE_HELPS.items():
    _add_relative_command(_name, _text)


@ask.command(
    "reads",
    cls=SignatureCommand,
    short_help="Attention to source words over slices.",
    formats=FORMATS,
    options=[ApiOptions(SENTENCE_FILE, ("reads",), ("slices", "residual", "head", "role", "method"))],
)
def reads(
    query: LimitedQuery, output: Output, options: dict[str, Any], word: str | None = None, paths: Count | None = None
) -> None:
    """Compute the attention of output words to source words: P(source word | output word) over the attention TPMs.

    bnet-transformer ask reads "the cat sat" --word sat

    Args:
        word: Only this output word (a word or its index), with its most probable paths.
        paths: The number of paths of --word, by default 3.
    """
    if paths is not None and word is None:
        raise BNetError("--paths requires --word", hint="Give the output word with --word")

    def answer(s: Sentence) -> Answer:
        reads = s.reads(**options)
        tokens = list(reads.tokens)
        k = None if word is None else find_word("--word", word, tokens)
        top_paths = [] if k is None else reads.paths(k, count=paths or 3)
        more = {"tokens": tokens, "paths": [{"words": p.words, "probability": p.probability} for p in top_paths]}
        matrix = _make_table(reads.matrix.tolist(), index=tokens, columns=tokens)
        lines = [*format_table(matrix if k is None else matrix.iloc[[k]], index=True), *map(str, top_paths)]
        return Answer(reads, ("slices", "residual", "matrix"), more, lines, plot={} if k is None else {"word": k})

    answer_sentences("ask reads", query, output, answer)


def _make_table(rows: Sequence[Any], **kwargs: Any) -> pd.DataFrame:
    """A data frame; pandas is imported only when one is made."""
    import pandas as pd

    return pd.DataFrame(rows, **kwargs)


@dataclass(frozen=True)
class SweepCells:
    """The cells of a sweep and what is measured.

    Args:
        first_order: Estimate the effects from gradients, without running a cell.
        at: The cells: a role (x, q, j, a), an arrow ("v -> a"), or names and patterns; by default x. May be repeated.
        metric: A node and its state, or two states for their difference: y_2=cat or y_2=cat,dog. An integer is a
            state; the word 7 is "7", in double quotes, which also keep a leading space: " Mary".
        answer: The metric of the readout of the last word, as the clean and the corrupt answer: cat,dog.
        over: The axes of the result, such as slice,head.
        ablate: Patch in zeros, or the mean over the words; the sentences are then no pairs, and all are patched.
        memory: The approximate memory in MB.
    """

    first_order: bool = False
    at: tuple[str, ...] = ()
    metric: str | None = None
    answer: str | None = None
    over: str | None = None
    ablate: Literal["zero", "mean"] | None = None
    memory: Count | None = None

    def make_metric(self, corrupt: Sentence) -> dict[str, object]:
        """The metric of `--metric` or `--answer`."""
        if self.metric is not None:
            return _parse_metric(self.metric)
        return _make_answer_metric(corrupt, str(self.answer))


@click.command(
    "sweep",
    cls=SignatureCommand,
    short_help="Patch clean values into a corrupt run.",
    formats=(*IMAGES, *TABLES),
    options=[ApiOptions("interventions/sweep.py", ("sweep",), ("direction",))],
    gradient=[ApiOptions("interventions/methods.py", ("Gradient",), help_prefix="With --first-order: ")],
)
def sweep(
    query: SentenceQuery,
    output: TableOutput,
    options: dict[str, Any],
    gradient: dict[str, Any],
    request: SweepCells,
    restored: bool = False,
    theme: Literal["light", "dark"] = "light",
) -> None:
    """Find the nodes that distinguish a CLEAN from a CORRUPT sentence, by patching.

    Sentences are pairs, clean and corrupt, with equal numbers of words; in a file, a tab separates the two.

    bnet-transformer sweep "the cat sat" "the dog sat" --answer cat,dog

    Args:
        restored: Show shares of the total effect in images.
        theme: The colours of images.
    """
    output.check()
    texts = _read_pairs(query, is_ablated=request.ablate is not None)
    if (request.metric is None) == (request.answer is None):
        both = "give --metric or --answer, not both"
        raise BNetError(both if request.metric is not None else "the metric is missing", hint=METRIC_HINT)
    from bnet_transformer.interventions import Mean, Zero, sweep
    from bnet_transformer.interventions.methods import Gradient

    net = load_model(query.model)
    pairs = [[query.build_sentence(net, text) for text in pair] for pair in texts]
    clean, corrupt = [pair[0] for pair in pairs], [pair[-1] for pair in pairs]
    target = request.make_metric(corrupt[0])
    options["over"] = None if request.over is None else parse_names("--over", request.over)
    if request.memory is not None:
        options["memory"] = request.memory * 2**20
    if request.first_order or gradient:
        options["method"] = Gradient(**gradient)
    is_noise = options.get("direction") == "noise"
    sides: tuple[Any, Any] = clean, corrupt
    if request.ablate is not None:  # all sentences are patched
        ablation = Zero() if request.ablate == "zero" else Mean()
        sides = (corrupt, ablation) if is_noise else (ablation, corrupt)
    result = sweep.sweep(*sides, at=_parse_cells(request.at), metric=target, **options)
    table, method = result.to_dataframe(), getattr(result.method, "describe", lambda: "exact")()
    rows = table.dropna(axis="columns", how="all")  # one example has no standard error
    ((node, states),) = target.items()
    states = states if isinstance(states, tuple) else (states,)
    difference = " - ".join(f"log P({node} = {_format_state(corrupt[0], node, state)})" for state in states)
    runs = {"clean": result.clean, "corrupt": result.corrupt}
    baseline = ", ".join(f"{float(run.mean()):.3f} {name}" for name, run in runs.items() if run is not None)
    header = f"{difference}: {baseline}; effects are changes from {'clean' if is_noise else 'corrupt'}"
    fields = ("at", "axes", "labels", "clean", "corrupt", "values")
    more = {"method": method, "metric": target, "sentences": texts, "table": table}
    lines = [repr(result), header, *output.format_rows(rows, by="effect")]
    swept = Answer(result, fields, more, lines, table, {"restored": restored, "theme": theme})
    output.write("sweep", [swept], model=query.model)


def _read_pairs(query: SentenceQuery, *, is_ablated: bool) -> list[list[str]]:
    """Return pairs of clean and corrupt sentences, tab-separated or alternating; only corrupt ones if `is_ablated`."""
    if is_ablated:
        return [[text] for text in query.read_texts()]
    rows = query.read_columns()
    if all(len(row) == 1 for row in rows) and len(rows) % 2 == 0:
        return [[clean, corrupt] for (clean,), (corrupt,) in zip(rows[::2], rows[1::2], strict=True)]
    if not all(len(row) == 2 for row in rows):
        hint = "In a file, separate the clean and the corrupt sentence by a tab"
        raise BNetError("SENTENCES", expected="pairs of sentences", actual=f"{len(rows)} sentences", hint=hint)
    return rows


def _parse_cells(specs: tuple[str, ...]) -> str | list[str]:
    """Return `at=` of a sweep: a role or a path of roles as text; names and patterns (with an index) as a list."""
    from bnet_transformer._core.naming import split_path, split_pattern

    has_index = any(split_pattern(end)[1] for spec in specs for end in split_path(spec))
    return list(specs) if has_index or len(specs) > 1 else specs[0] if specs else "x"


def _parse_metric(text: str) -> dict[str, object]:
    """Return the metric of `NODE=STATE` or `NODE=STATE,STATE`: `{node: state}` or `{node: (state, state)}`."""
    name, sign, states = text.partition("=")
    if not sign or not name.strip():
        raise BNetError("--metric", expected="a node with one or two states, y_2=cat or y_2=cat,dog", actual=text)
    return {name.strip(): _parse_metric_states("--metric", states)}


def _parse_metric_states(option: str, text: str) -> object:
    """One state, or a pair of states."""
    parts = parse_states(option, text)
    if len(parts) > 2:
        raise BNetError(option, expected="one or two states", actual=text)
    return parts[0] if len(parts) == 1 else tuple(parts)


def _make_answer_metric(s: Sentence, text: str) -> dict[str, object]:
    """Return the metric of `--answer`: states of the readout of the last word, or of the readout of the sentence."""
    from bnet_transformer.data.batch import infer_task

    readouts = [spec.group for spec in infer_task(s.state.network).readouts if spec.tpm.kind == "discrete"]
    if len(readouts) != 1:
        actual = ", ".join(group.name for group in readouts) or "a net without discrete readouts"
        expected, hint = "a net with one discrete readout", "Use --metric NODE=STATE"
        raise BNetError("--answer", expected=expected, actual=actual, hint=hint)
    (group,) = readouts
    last = "" if group.word_stack is None else f"_{s.ground.word_counts[group.word_stack] - 1}"
    return {f"{group.name}{last}": _parse_metric_states("--answer", text)}


def _format_state(s: Sentence, node: str, state: object) -> str:
    """Return a state of a node, or of all nodes of a name, as text: its index, and its label if it has one."""
    from bnet_transformer.data.encode import encode_value
    from bnet_transformer.graph import find_family

    first = find_family(s.ground, node).nodes[0]
    number, labels = int(encode_value(s.state.model, first, state, evidence=True)), s.state.labels(first)
    return f"state {number} {labels[number]!r}" if labels else f"state {number}"


@click.command(
    "heads",
    cls=SignatureCommand,
    short_help="Rank heads by importance.",
    formats=(*IMAGES, *TABLES),
    options=[ApiOptions("attention/inclusion.py", ("inclusion",), INCLUSION_OPTIONS)],
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
    """Estimate which heads matter for SENTENCES, or for the lines of a --file.

    For each head, the table has the posterior of the share rho of sentences that include it, its log Bayes factor, its
    gradient importance and its ablation. rho does not measure importance; the table is sorted by the Bayes factor.

    bnet-transformer heads -f sentences.txt --model minilm -o map.svg

    Args:
        model: The net, which must sum its heads (tiny does not).
        limit: Use only this number of sentences, the first ones.
        roles: Add the role of each head, and its share of the attention.
        show: The measure in a map of slices and heads, or the intervals by rank.
        theme: The colours of images.
    """
    texts = source.read_texts()[:limit]
    output.check()
    from bnet_transformer.attention.inclusion import inclusion
    from bnet_transformer.attention.roles import roles as find_roles

    net = load_model(model)
    sentences: list[object] = [split_stacks(net, text) for text in texts]
    result = inclusion(net, sentences, **options)
    shared = {name: options[name] for name in ("interval", "seed") if name in options}
    by_head = find_roles(net, sentences, **shared).by_head() if roles else None
    table = result.to_dataframe()
    if by_head is not None:
        columns = by_head[["slice", "head", "role", "mean", "chance"]]
        columns = columns.rename(columns={"role": "reads", "mean": "share"})
        table = table.merge(columns, on=["slice", "head"], how="left")
    ranks = result.agreement()
    duplicates = None if result.interaction is None else result.duplicates()
    agreement = {name: dict(column) for name, column in ranks.items()}
    more: dict[str, Any] = {"summary": result.caption, "table": result.to_dataframe(), "agreement": agreement}
    more |= {"duplicates": duplicates, "roles": by_head}
    lines = [result.caption, *output.format_rows(table)]
    if result.dead:
        lines.append("heads without effect: " + ", ".join(f"{result.slices[s]}_{h}" for s, h in result.dead))
    if duplicates:
        pairs = (f"{result.slices[s]}_{h} and {result.slices[s]}_{o}" for s, h, o in duplicates[:5])
        hidden = f", {len(duplicates) - 5} more" if len(duplicates) > 5 else ""
        lines.append(f"redundant pairs of heads: {', '.join(pairs)}{hidden}")
    correlations = (f"{a} and {b} {ranks.loc[a, b]:.2f}" for a, b in itertools.combinations(ranks, 2))
    lines.append("rank correlations: " + "; ".join(correlations))
    num_rows = len(table) if output.all_ else min(output.num_rows, len(table))
    fields = ("sentences", "method", "likelihood", "sigma", "interval", "dead")
    plot = {"show": show, "theme": theme, **({"top": num_rows} if show == "intervals" else {})}
    output.write("heads", [Answer(result, fields, more, lines, table, plot)], model=model)
