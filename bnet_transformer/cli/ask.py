"""`bnet-transformer ask`: questions to the bnet of a sentence, of structure, of probability, of what was read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from bnet_transformer.cli import shared
from bnet_transformer.cli.outputs import PICTURES, TABLES, Output, Result, most_of, placed, plotted, rows_of
from bnet_transformer.cli.shared import Asked
from bnet_transformer.cli.signatures import Count, Options, command
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
FORMATS = (*TABLES, *PICTURES)
SENTENCE = "sentence.py"


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


@command(
    "posterior",
    group=ask,
    short_help="P(NODE | evidence).",
    formats=FORMATS,
    options=[Options(SENTENCE, ("posterior",), ("budget",))],
)
def posterior(
    nodes: str, asked: Asked, options: dict[str, Any], to: Output, top: Count | None = None, all_: bool = False
) -> None:
    """P(NODE | evidence), of one discrete node or of several together, with commas between: c, or c,y_2.

    bnet-transformer ask posterior y_2 "the cat sat" --do c=1

    Args:
        top: Print so many states, 20 unless told.
        all_: Print all states, in their order.
    """
    names = shared.names("NODES", nodes)
    most = most_of(top, all_)

    def answer(s: Sentence) -> Result:
        found = s.posterior(names if len(names) > 1 else names[0], **options)
        labels = [_labels(s, name, size) for name, size in zip(names, found.shape, strict=True)]
        states = [dict(zip(names, state, strict=True)) for state in itertools.product(*labels)]
        rows = [{**state, "probability": p} for state, p in zip(states, found.flatten().tolist(), strict=True)]
        table = _table(rows)
        shown = table if all_ else table.sort_values("probability", ascending=False, kind="stable")
        told = {"nodes": names, "labels": labels, "probabilities": found}
        return Result(told, rows_of(shown, most), lambda: table, plotted(s, node=names))

    _answer("posterior", asked, to, answer, FORMATS if len(names) < 3 else TABLES)


@command("separated", group=ask, short_help="Whether the graph separates X from Y.", formats=TABLES)
def separated(x: str, y: str, asked: Asked, to: Output, deterministic: bool = False, verify: bool = False) -> None:
    """Whether the graph separates X from Y, each a node or several with commas between.

    Here --given names nodes without values: bnet-transformer ask separated x_0_0 x_1_2 "the cat sat" --given q_0_2

    Args:
        deterministic: Close what is given under the nodes that it determines.
        verify: Say as well how dependent they are in this sentence's numbers.
    """
    left, right = shared.names("X", x), shared.names("Y", y)
    known = [name for each in asked.given for name in shared.names("--given", each)]

    def answer(s: Sentence) -> Result:
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
        return Result(told, lines, lambda: _table([row]))

    _answer("separated", replace(asked, given=()), to, answer, TABLES)


def _relative(name: str, text: str) -> None:
    """Make the command that asks for the relatives of one node."""

    def relative(node: str, asked: Asked, to: Output) -> None:
        def answer(s: Sentence) -> Result:
            found: list[str] = getattr(s, name)(node)
            table = lambda: _table([{"node": node, name: each} for each in found])  # noqa: E731
            return Result({"node": node, "nodes": found}, [" ".join(found) or "none"], table)

        _answer(name, asked, to, answer, TABLES)

    relative.__doc__ = f'{text}\n\nbnet-transformer ask {name} q_0_1 "the cat sat"'
    command(name, group=ask, short_help=text, formats=TABLES)(relative)


for _name, _text in RELATIVES.items():
    _relative(_name, _text)


@command(
    "reads",
    group=ask,
    short_help="Which word was read.",
    formats=FORMATS,
    options=[Options(SENTENCE, ("reads",), ("slices", "residual", "head", "role", "method", "budget"))],
)
def reads(
    asked: Asked, to: Output, options: dict[str, Any], word: str | None = None, paths: Count | None = None
) -> None:
    """Which word was read: P(source word | output word) along the attention TPMs.

    bnet-transformer ask reads "the cat sat" --word sat

    Args:
        word: One output word, by number or as it stands, and the paths by which it was read.
        paths: So many paths, of --word: 3 unless told.
    """
    if paths is not None and word is None:
        raise BNetError("--paths", expected="--word beside it", got="none")

    def answer(s: Sentence) -> Result:
        found = s.reads(**options)
        tokens = list(found.tokens)
        one = None if word is None else shared.word_number("--word", word, tokens)
        ways = [] if one is None else found.paths(one, count=paths or 3)
        shown = range(len(tokens)) if one is None else [one]
        rows = [[tokens[i], *(f"{p:.3f}" for p in found.matrix[i].tolist())] for i in shown]
        told = {"tokens": tokens, "slices": found.slices, "residual": found.residual, "matrix": found.matrix}
        told["paths"] = [{"words": each.words, "probability": each.probability} for each in ways]
        picture = plotted(found, **({} if one is None else {"word": one}))
        return Result(told, [*_aligned([["", *tokens], *rows]), *map(str, ways)], found.to_dataframe, picture)

    _answer("reads", asked, to, answer, FORMATS)


def _answer(
    question: str, asked: Asked, to: Output, answer: Callable[[Sentence], Result], formats: Sequence[str]
) -> None:
    """Ask each sentence, and write and print what it answers; tables may hold all sentences, pictures one."""
    texts = asked.texts()
    to.check(1, formats)
    replace(to, out=tuple(out for out in to.out if not out.lower().endswith(TABLES))).check(len(texts), formats)
    net, told, results = shared.net_of(asked.model), [], []
    for text in shared.along(texts, "sentence"):
        s = asked.sentence(net, text)
        results.append(answer(s))
        told.append({"sentence": text, "words": s.words, **results[-1].told})
    whole: dict[str, Any] = {"command": f"ask {question}", "model": asked.model, "sentences": told}
    for out in to.out:
        if out.lower().endswith(TABLES) and "{}" not in out:
            Result(whole, (), lambda: _all(texts, results)).write(out)
            continue
        for k, result in enumerate(results):
            replace(result, told={**whole, "sentences": [told[k]]}).write(placed(out, k))
    headed = zip(texts, results, strict=True)
    lines = [line for text, each in headed for line in [*([f"# {text}"] if len(texts) > 1 else []), *each.lines]]
    to.say(whole, [*lines, *(f"written: {out}" for out in to.out)])


def _all(texts: Sequence[str], results: Sequence[Result]) -> pd.DataFrame:
    """The tables of all sentences, one below the other."""
    import pandas as pd

    tables = [each.table().copy() for each in results if each.table is not None]
    for text, table in zip(texts, tables, strict=True):
        table.insert(0, "sentence", text)
    return pd.concat(tables, ignore_index=True)


def _table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)


def _labels(s: Sentence, name: str, states: int) -> list[str]:
    """What the states of a node are called; numbers where they have no names."""
    return list(s.state.labels(s.ground.id(name)) or map(str, range(states)))


def _aligned(rows: list[list[str]]) -> list[str]:
    """Rows of cells in columns, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    told = ([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows)
    return ["  ".join(cells).rstrip() for cells in told]
