"""`bnet-transformer ask`: questions to the bnet of a sentence, of structure, of probability, of what was read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from bnet_transformer.cli import outputs, shared
from bnet_transformer.errors import BNetError

if TYPE_CHECKING:
    import pandas as pd

    from bnet_transformer.sentence import Sentence

RELATIVES = {
    "blanket": "The Markov blanket of NODE: parents, children, and the children's other parents.",
    "parents": "The nodes with an arrow into NODE.",
    "children": "The nodes to which NODE has an arrow.",
    "ancestors": "All from which a path of arrows leads to NODE.",
    "descendants": "All to which a path of arrows leads from NODE.",
}
FORMATS = (*outputs.TABLES, *outputs.PICTURES)
Common = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What a sentence answers: for JSON, as lines, as a table, as a picture where there is one."""

    told: dict[str, Any]
    lines: list[str]
    table: Callable[[], pd.DataFrame]
    picture: Callable[[], Any] | None = field(default=None)


@click.group("ask", invoke_without_command=True, short_help="Ask: posteriors, separation, what was read.")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Ask the bnet of a SENTENCE.

    Nodes come first, by their ground names (x_1_2: slice 1, word 2), then sentences.

    \b
    bnet-transformer ask posterior c "the cat sat" --given y_2=cat
    bnet-transformer ask separated x_0_0 x_1_2 "the cat sat" --given q_0_2
    bnet-transformer ask reads "the cat sat" --word 2
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _common(suffixes: Sequence[str], *, values: bool = True) -> Callable[[Any], Any]:
    """The options of every question; evidence with `values`, or the names of what is given."""
    names = click.option("--given", multiple=True, metavar="NODE[,NODE]...", help="Nodes that are given.")
    return shared.options(
        shared.sentences_option(),
        shared.model_option(),
        *([shared.do_options()] if values else [shared.do_option(), names]),
        shared.input_option(),
        click.option("--pair", help="A second sentence behind the first."),
        shared.out_option(suffixes),
        shared.json_option(),
    )


@command.command("posterior")
@click.argument("nodes", metavar="NODE[,NODE]...")
@_common(FORMATS)
@click.option("--budget", type=click.IntRange(min=1), help="The most joint states.")
@click.option("--top", type=click.IntRange(min=1), help=f"Print so many states, {outputs.TOP} unless told.")
@click.option("--all", "every", is_flag=True, help="Print all states, in their order.")
def posterior(nodes: str, budget: int | None, top: int | None, every: bool, **common: Any) -> None:
    """P(NODE | evidence), of one discrete node or of several together: c, or c,y_2.

    bnet-transformer ask posterior y_2 "the cat sat" --do c=1
    """
    asked = shared.names("NODE", nodes)
    most = outputs.most_of(top, every)

    def answer(s: Sentence) -> Answer:
        found = s.posterior(asked if len(asked) > 1 else asked[0], **shared.known(budget=budget))
        labels = [_labels(s, name, size) for name, size in zip(asked, found.shape, strict=True)]
        states = [dict(zip(asked, state, strict=True)) for state in itertools.product(*labels)]
        rows = [{**state, "probability": p} for state, p in zip(states, found.flatten().tolist(), strict=True)]
        table = _table(rows)
        shown = table if every else table.sort_values("probability", ascending=False, kind="stable")
        lines = outputs.rows_of(shown, most)
        told = {"nodes": asked, "labels": labels, "probabilities": found}
        return Answer(told, lines, lambda: table, lambda: _plot(s, node=asked))

    _answered("posterior", common, answer, FORMATS if len(asked) < 3 else outputs.TABLES)


@command.command("separated")
@click.argument("x", metavar="X[,X]...")
@click.argument("y", metavar="Y[,Y]...")
@_common(outputs.TABLES, values=False)
@click.option("--deterministic", is_flag=True, help="Close what is given under the nodes that it determines.")
@click.option("--verify", is_flag=True, help="Say as well how dependent they are in this sentence's numbers.")
def separated(x: str, y: str, given: tuple[str, ...], deterministic: bool, verify: bool, **common: Any) -> None:
    """Whether the graph separates X from Y; --given names nodes here, without values.

    bnet-transformer ask separated x_0_0 x_1_2 "the cat sat" --given q_0_2 --given k_0_0,v_0_0
    """
    left, right = shared.names("X", x), shared.names("Y", y)
    known = [name for each in given for name in shared.names("--given", each)]

    def answer(s: Sentence) -> Answer:
        found = s.separated(left, right, known, deterministic=deterministic, verify=verify)
        told = {
            "separated": bool(found),
            **{name: getattr(found, name) for name in ("x", "y", "given", "deterministic")},
            **{name: getattr(found, name) for name in ("dependence", "over_choices", "over_roots")},
        }
        trail = None if found else s.active_trail(left, right, known, deterministic=deterministic)
        told["trail"] = None if trail is None else str(trail)
        said = "separated" if found else "not separated"
        lines = [f"{', '.join(left)} and {', '.join(right)} given {', '.join(known) or 'nothing'}: {said}"]
        lines += [f"along {trail}"] if trail is not None else []
        lines += [f"dependence in this sentence: {found.dependence:.3g}"] if found.dependence is not None else []
        return Answer(told, lines, lambda: _table([{k: _joined(v) for k, v in told.items()}]))

    _answered("separated", {**common, "given": ()}, answer, outputs.TABLES)


def _relative(name: str, told: str) -> None:
    """A question of one node that nodes answer."""

    def ask(node: str, **common: Any) -> None:
        def answer(s: Sentence) -> Answer:
            found: list[str] = getattr(s, name)(node)
            table = lambda: _table([{"node": node, name: each} for each in found])  # noqa: E731
            return Answer({"node": node, "nodes": found}, [" ".join(found) or "none"], table)

        _answered(name, common, answer, outputs.TABLES)

    made = click.argument("node")(_common(outputs.TABLES)(ask))
    command.command(name, help=f'{told}\n\nbnet-transformer ask {name} q_0_1 "the cat sat"')(made)


for _name, _what in RELATIVES.items():
    _relative(_name, _what)


@command.command("reads")
@_common(FORMATS)
@click.option("--slices", help="The slices that are read through, such as 0 or 0,1; by default all.")
@click.option("--word", help="One output word, by number or as it stands, and the paths by which it was read.")
@click.option("--paths", type=click.IntRange(min=1), help="So many paths, of --word: 3 unless told.")
@click.option("--residual", type=float, help="The share of a step that stays at its word: 0.5 unless told.")
@click.option("--head", type=click.IntRange(min=0), help="One head, where there are several; else their mean.")
@click.option("--role", help="The node that reads, where a slice has several.")
@click.option("--method", type=click.Choice(["rollout", "flow"]), help="Products of TPMs, or the greatest flow.")
@click.option("--budget", type=click.IntRange(min=1), help="The most joint states.")
def reads(slices: str | None, word: str | None, paths: int | None, **rest: Any) -> None:
    """Which word was read: P(source word | output word) along the attention TPMs.

    bnet-transformer ask reads "the cat sat" --word sat
    """
    own = {name: rest.pop(name) for name in ("residual", "head", "role", "method", "budget")}
    chosen = shared.numbers("--slices", slices)
    if paths is not None and word is None:
        raise BNetError("--paths", expected="--word beside it", got="none")
    count = 3 if paths is None else paths

    def answer(s: Sentence) -> Answer:
        found = s.reads("all" if chosen is None else chosen, **shared.known(**own))
        tokens = list(found.tokens)
        told = {"tokens": tokens, "slices": found.slices, "residual": found.residual, "matrix": found.matrix}
        which = range(len(tokens)) if word is None else [_word(word, tokens)]
        rows = [[tokens[i], *(f"{p:.3f}" for p in found.matrix[i].tolist())] for i in which]
        ways = [] if word is None else found.paths(which[0], count=count)
        told["paths"] = [{"words": each.words, "probability": each.probability} for each in ways]
        lines = [*_aligned([["", *tokens], *rows]), *map(str, ways)]
        options = {} if word is None else {"word": which[0]}
        return Answer(told, lines, found.to_dataframe, lambda: _plot(found, **options))

    _answered("reads", rest, answer)


def _answered(
    question: str, common: Common, answer: Callable[[Sentence], Answer], formats: Sequence[str] = FORMATS
) -> None:
    """Ask each sentence, and write and print what it answers."""
    texts = shared.sentences_of(common["sentences"], common["source"], common["model"])
    outs = common["outs"]
    outputs.check_outs(outs, formats, 1)
    pictures = [out for out in outs if not out.lower().endswith(outputs.TABLES)]
    outputs.check_outs(pictures, formats, len(texts))  # tables may hold all sentences
    net, told, answers = shared.net_of(common["model"]), [], []
    for text in shared.along(texts, "sentence"):
        s = shared.sentence_of(net, text, **{name: common[name] for name in ("pair", "inputs", "done", "given")})
        answers.append(answer(s))
        told.append({"sentence": text, "words": s.words, **answers[-1].told})
    whole = {"command": f"ask {question}", "model": common["model"], "sentences": told}
    for out in outs:
        _write(out, whole, texts, answers)
    if common["as_json"]:
        click.echo(outputs.json_of(whole))
        return
    headed = [[*([f"# {text}"] if len(texts) > 1 else []), *a.lines] for text, a in zip(texts, answers, strict=True)]
    outputs.say([*(line for lines in headed for line in lines), *(f"written: {out}" for out in outs)])


def _write(out: str, whole: dict[str, Any], texts: Sequence[str], answers: Sequence[Answer]) -> None:
    """One file: tables hold all sentences, unless {} gives each its own; pictures one."""
    if out.lower().endswith(outputs.TABLES) and "{}" not in out:
        outputs.write([out], whole, lambda: _all(texts, answers), None)
        return
    for k, (told, each) in enumerate(zip(whole["sentences"], answers, strict=True)):
        place = str(outputs.placed(out, k))
        outputs.write([place], {**whole, "sentences": [told]}, each.table, each.picture)


def _all(texts: Sequence[str], answers: Sequence[Answer]) -> pd.DataFrame:
    """The tables of all sentences, one below the other."""
    import pandas as pd

    tables = [each.table().copy() for each in answers]
    for text, table in zip(texts, tables, strict=True):
        table.insert(0, "sentence", text)
    return pd.concat(tables, ignore_index=True)


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)


def _plot(result: object, **options: Any) -> Any:
    from bnet_transformer.viz.plots import plot

    return plot(result, **options)


def _labels(s: Sentence, name: str, states: int) -> list[str]:
    """What the states of a node are called; numbers where they have no names."""
    return list(s.state.labels(s.ground.id(name)) or map(str, range(states)))


def _word(told: str, tokens: list[str]) -> int:
    """A word by its number, or as it stands, if it stands once."""
    if told in tokens:
        if tokens.count(told) > 1:
            places = ", ".join(str(k) for k, token in enumerate(tokens) if token == told)
            raise BNetError("--word", expected="a word that stands once", got=told, allowed=f"its number: {places}")
        return tokens.index(told)
    if not shared.is_whole(told) or int(told) >= len(tokens):
        allowed = ", ".join(tokens[:20])
        raise BNetError("--word", expected=f"a word, or its number up to {len(tokens) - 1}", got=told, allowed=allowed)
    return int(told)


def _aligned(rows: list[list[str]]) -> list[str]:
    """Rows of cells in columns, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    told = ([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows)
    return ["  ".join(cells).rstrip() for cells in told]


def _joined(value: Any) -> Any:
    return " ".join(value) if isinstance(value, tuple | list) else value
