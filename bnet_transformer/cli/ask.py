"""`bnet-transformer ask`: questions to the bnet of a sentence, of structure, of probability, of what was read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from bnet_transformer.cli import shared
from bnet_transformer.cli.outputs import PICTURES, TABLES, Listing, Output, Result, plotted, rows_of
from bnet_transformer.cli.shared import Asked
from bnet_transformer.cli.signatures import Count, Derived, Options
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


@ask.command(
    "posterior",
    cls=Derived,
    short_help="P(NODE | evidence).",
    formats=FORMATS,
    options=[Options(SENTENCE, ("posterior",), ("budget",))],
)
def posterior(nodes: str, asked: Asked, options: dict[str, Any], to: Listing) -> None:
    """P(NODE | evidence), of one discrete node or of several together, with commas between: c, or c,y_2.

    bnet-transformer ask posterior y_2 "the cat sat" --do c=1
    """
    names = shared.names("NODES", nodes)

    def answer(s: Sentence) -> Result:
        found = s.posterior(names if len(names) > 1 else names[0], **options)
        each = zip(names, found.shape, strict=True)
        labels = [list(s.state.labels(s.ground.id(name)) or map(str, range(count))) for name, count in each]
        states = [dict(zip(names, state, strict=True)) for state in itertools.product(*labels)]
        rows = [{**state, "probability": p} for state, p in zip(states, found.flatten().tolist(), strict=True)]
        table = _table(rows)
        told = {"nodes": names, "labels": labels, "probabilities": found}
        return Result(told, to.rows(table, by="probability"), lambda: table, plotted(s, node=names))

    _answer("posterior", asked, to if len(names) < 3 else replace(to, formats=TABLES), answer)


@ask.command("separated", cls=Derived, short_help="Whether the graph separates X from Y.", formats=TABLES)
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

    _answer("separated", replace(asked, given=()), to, answer)


def _relative(name: str, text: str) -> None:
    """Make the command that asks for the relatives of one node."""

    def relative(node: str, asked: Asked, to: Output) -> None:
        def answer(s: Sentence) -> Result:
            found: list[str] = getattr(s, name)(node)
            table = lambda: _table([{"node": node, name: each} for each in found])  # noqa: E731
            return Result({"node": node, "nodes": found}, [" ".join(found) or "none"], table)

        _answer(name, asked, to, answer)

    relative.__doc__ = f'{text}\n\nbnet-transformer ask {name} q_0_1 "the cat sat"'
    ask.command(name, cls=Derived, short_help=text, formats=TABLES)(relative)


for _name, _text in RELATIVES.items():
    _relative(_name, _text)


@ask.command(
    "reads",
    cls=Derived,
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
        told = {"tokens": tokens, "slices": found.slices, "residual": found.residual, "matrix": found.matrix}
        told["paths"] = [{"words": each.words, "probability": each.probability} for each in ways]
        picture = plotted(found, **({} if one is None else {"word": one}))
        matrix = _table(found.matrix.tolist(), index=tokens, columns=tokens)
        rows = rows_of(matrix if one is None else matrix.iloc[[one]], index=True)
        return Result(told, [*rows, *map(str, ways)], found.to_dataframe, picture)

    _answer("reads", asked, to, answer)


def _answer(question: str, asked: Asked, to: Output, answer: Callable[[Sentence], Result]) -> None:
    """Ask each sentence, and write and print what it answers; tables may hold all sentences, pictures one."""
    texts = asked.texts()
    to.check(len(texts), whole=TABLES)
    net, results = shared.net_of(asked.model), []
    for text in shared.along(texts, "sentence"):
        s = asked.sentence(net, text)
        found = answer(s)
        results.append(replace(found, told={"sentence": text, "words": s.words, **found.told}))
    to.tell_each({"command": f"ask {question}", "model": asked.model}, "sentences", texts, results)


def _table(rows: Sequence[Any], **more: Any) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, **more)
