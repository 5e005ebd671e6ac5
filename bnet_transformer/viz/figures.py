"""The figure of each kind of result: `picture` lays it out, `draw` writes it as the suffix of the file says.

To give another result a figure, register a function of it for `picture`, and derive its class from `Drawable`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bnet_transformer import export
from bnet_transformer._core.drawing import Drawable, draw, picture
from bnet_transformer.axes import join
from bnet_transformer.equations import equations
from bnet_transformer.errors import BNetError, BudgetError, one_of, unknown
from bnet_transformer.files import as_path
from bnet_transformer.graph import Quotient
from bnet_transformer.inference import Reads, SentenceState, Tan, TanTree
from bnet_transformer.network import Network
from bnet_transformer.tpm.arrays import in_numpy
from bnet_transformer.viz.formats import DATA, FORMATS, FigureParts
from bnet_transformer.viz.options import LIMIT, THEMES, VIEWS, Options, options_of
from bnet_transformer.viz.page.data import MOST_WORDS, asked_of, described
from bnet_transformer.viz.page.page import written
from bnet_transformer.viz.picture import Picture
from bnet_transformer.viz.quotient import quotient_picture, tan_picture, tree_picture
from bnet_transformer.viz.sentence import net_picture, sentence_picture
from bnet_transformer.viz.style import finished
from bnet_transformer.viz.svg import showing, to_svg
from bnet_transformer.viz.words import Reading, chosen, spoken, words_picture

__all__ = ["check_options", "draw", "picture", "plain_figure", "write_page"]

Path = str | os.PathLike[str]


@picture.register
def picture_net(network: Network, **options: Any) -> Picture:
    """The folded graph of a net."""
    return showing(net_picture(network, options_of(options, VIEWS["folded"])))


@picture.register
def picture_sentence(state: SentenceState, **options: Any) -> Picture:
    """The ground graph of a sentence, its reading grid, or its folded net."""
    return showing(sentence_picture(state, options_of(options)))


@picture.register
def picture_quotient(result: Quotient, *, theme: str = "light") -> Picture:
    """The boxes, and the arrows between them."""
    return _themed(quotient_picture(result), theme)


@picture.register
def picture_tan(result: Tan, *, theme: str = "light") -> Picture:
    """The boxes of the slice, the class on top."""
    return _themed(tan_picture(result), theme)


@picture.register
def picture_tan_tree(result: TanTree, *, theme: str = "light") -> Picture:
    """The words in a row, under the class and their best parents."""
    return _themed(tree_picture(result), theme)


@picture.register
def picture_reads(
    result: Reads,
    *,
    min_weight: float | None = None,
    top: int | None = None,
    theme: str = "light",
    limit: int | None = LIMIT,
) -> Picture:
    """The reading grid of these slices: reads are averaged over the choices, without the residual share."""
    options = Options(min_weight=min_weight, top=top, theme=theme, limit=limit)
    mean = np.einsum("s,stij->tij", in_numpy(result.weights), in_numpy(result.attention))
    readable = in_numpy(result.readable)
    readings = [Reading(("", t), ("", t + 1), *pair) for t, *pair in zip(result.slices, mean, readable, strict=True)]
    states = {"": [*result.slices, result.slices[-1] + 1]}
    reads = chosen(readings, {"": range(len(result.tokens))}, options.min_weight, options.top, options.limit)
    words, silent = spoken({"": range(len(result.tokens))}, reads)
    name = lambda _, slice_, word: join(result.state, (slice_, word))  # noqa: E731
    grid = words_picture({"": result.tokens}, words, states, name, reads)
    return _themed(finished(grid, title="what is read", caption=[result.head, reads.hidden, silent]), theme)


@draw.register
def draw_result(result: Drawable, path: Path, **options: Any) -> None:
    """Write the figure of a result."""
    layout = picture(result, **options)
    formats = {suffix: writer for suffix, writer in FORMATS.items() if suffix not in DATA}
    export.write(path, FigureParts(graph=layout.to_networkx, picture=lambda: layout), writers=formats)


@draw.register
def draw_net(network: Network, path: Path, **options: Any) -> None:
    """Write the folded graph of a net, or its figure."""

    def graph() -> Any:
        _check_known(options, export.folded_to_networkx)
        return export.folded_to_networkx(network)

    latex = lambda: equations(network).latex  # noqa: E731
    parts = FigureParts(graph=graph, picture=lambda: picture(network, **options), equations=latex)
    export.write(path, parts, writers=FORMATS)


@draw.register
def draw_sentence(state: SentenceState, path: Path, **options: Any) -> None:
    """Write the ground graph of a sentence, its figure, its page or its discrete part."""
    check_options(path, options)
    parts = FigureParts(
        graph=lambda: export.sentence_to_networkx(state, **options),
        world=state.world,
        evidence=state.evidence,
        picture=lambda: picture(state, **options),
        equations=lambda: equations(state.network).latex,
        page=lambda: written(described(state, asked_of(options))),
    )
    export.write(path, parts, writers=FORMATS)


def write_page(state: SentenceState, path: Path, **options: Any) -> None:
    """Write the interactive page of a sentence.

    Args:
        state: The sentence.
        path: An HTML file.
        **options: The options of `Sentence.explore`.
    """
    asked = asked_of(options)
    parts = FigureParts(graph=lambda: export.sentence_to_networkx(state), page=lambda: written(described(state, asked)))
    export.write(path, parts, writers={".html": FORMATS[".html"]})


def plain_figure(state: SentenceState) -> str:
    """The SVG of a sentence for a notebook that runs no widget: of a long sentence, the folded net."""
    is_long = max(map(len, state.tokens.values()), default=0) > MOST_WORDS
    try:
        return to_svg(picture_sentence(state, theme="auto", **({"detail": "folded"} if is_long else {})))
    except BudgetError:
        return to_svg(picture_sentence(state, theme="auto", detail="folded"))


def check_options(path: Path, options: Mapping[str, Any]) -> None:
    """Refuse options that the format of a file has no use for, before anything is written.

    Args:
        path: The file.
        options: Those of `Sentence.draw`.
    """
    suffix = as_path(path).suffix.lower()
    if suffix == ".html":
        asked_of(options)
    elif suffix in (".json", ".graphml"):
        _check_known(options, export.sentence_to_networkx)
    elif suffix == ".bif" and options:
        raise BNetError(f"options of {path}", expected="none: bif holds the whole bnet", got=", ".join(options))
    elif suffix in FORMATS:
        options_of(options)


def _check_known(options: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Refuse an option that a function does not have."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in options:
        if name not in names:
            raise unknown("option of a graph", name, names)


def _themed(layout: Picture, theme: str) -> Picture:
    one_of("theme", theme, THEMES)
    return showing(replace(layout, theme=theme))
