"""`picture` and `draw`: the layout of the figure of each kind of result, and its file formats.

To add a figure for another kind of result, register a function for its class with `picture`. To add a file format, add
a writer to `_figure_writers` or, for graphs, `get_graph_writers`.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, singledispatch
from typing import TYPE_CHECKING, Any

import numpy as np

from bnet_transformer._core.checks import check_names
from bnet_transformer._core.files import Writers, as_path, write_file
from bnet_transformer._core.tensors import to_numpy
from bnet_transformer.attention import Reads, Tan, TanTree
from bnet_transformer.bridges.networkx import (
    is_folder,
    sentence_to_networkx,
    template_graph_to_networkx,
    to_json,
    write_ground_graph,
    write_template_graph,
)
from bnet_transformer.bridges.pgmpy import to_bif
from bnet_transformer.declare import Network
from bnet_transformer.equations import equations
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.figures.attention_grid import (
    StateAttention,
    describe_special_words,
    exclude_words,
    layout_attention_grid,
    select_edges,
)
from bnet_transformer.figures.fonts import GRID_DENSITIES, Density
from bnet_transformer.figures.graph_files import to_gexf, to_graphml
from bnet_transformer.figures.graph_layout import layout_net
from bnet_transformer.figures.graphviz import to_dot
from bnet_transformer.figures.grid_layout import layout_quotient, layout_tan, layout_tan_tree
from bnet_transformer.figures.options import (
    FigureOptions,
    FoldedOptions,
    ReadsOptions,
    SentenceOptions,
    compose_picture,
    parse_options,
)
from bnet_transformer.figures.picture import Drawing, Picture, to_sentence_case
from bnet_transformer.figures.sentence_views import layout_sentence
from bnet_transformer.figures.svg import NotebookPicture, to_pdf, to_png, to_svg
from bnet_transformer.figures.tikz import to_tikz
from bnet_transformer.graph import Quotient
from bnet_transformer.inference import SentenceState
from bnet_transformer.page.description import MAX_WORDS, PageOptions, describe_sentence, parse_page_options
from bnet_transformer.page.html import render_html

if TYPE_CHECKING:
    from bnet_transformer.page.widget import Widget

__all__ = ["build_mime_bundle", "check_options", "draw", "make_widget", "picture"]

PathLike = str | os.PathLike[str]
GRAPH_SUFFIXES = (".gexf", ".graphml", ".json")
FOLDER_HINT = "A path that ends in / is a folder of two Parquet files"
MimeBundle = tuple[dict[str, Any], dict[str, Any]]


@singledispatch
def picture(result: object, /, **options: Any) -> Picture:
    """Lay out the figure of a net, a sentence or a result.

    Args:
        result: A `BNet`, a `Sentence`, or the result of its methods `reads`, `tan`, `tan_tree` or `shrink`.
        **options: For a net or a sentence the options of its method `picture`; for a result `theme`, `width`, `font`
            and `title`, and for the result of `reads` also `min_weight`, `top`, `limit` and `special`.

    Returns:
        The figure. A notebook displays it; its methods write it to a file, and `to_graphviz` returns it as DOT source.

    Raises:
        BNetError: The result has no figure, or an option is unknown or invalid.

    >>> import bnet_transformer as bt
    >>> len(bt.picture(bt.bayesuvius(dim=4).sentence("the cat sat").tan_tree()).boxes)
    4
    """
    hint = "To plot the numbers of a result, use bt.plot"
    raise BNetError("picture", expected="a net, a sentence or a result with a figure", actual=result, hint=hint)


@singledispatch
def draw(result: object, /, path: PathLike, **options: Any) -> None:
    """Write the figure of a net, a sentence or a result to a file.

    Args:
        result: A `BNet`, a `Sentence`, or the result of its methods `reads`, `tan`, `tan_tree` or `shrink`.
        path: The file. Its suffix selects the format: svg, png, pdf, tex or dot; for a net and a sentence also the
            formats of its method `draw`.
        **options: The options of `picture`; for a net or a sentence those of its method `draw`.

    Raises:
        BNetError: The result has no figure, or an option is unknown or invalid.

    >>> import bnet_transformer as bt
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     bt.draw(bt.bayesuvius(dim=4).sentence("the cat sat").tan("roles"), f"{folder}/roles.svg")
    """
    layout = picture(result, **options)
    write_file(path, _figure_writers(lambda: layout))


def _figure_writers(layout: Callable[[], Picture], latex: Callable[[], str] = str) -> Writers:
    """Return the writers of a figure by suffix; the figure is laid out when a file is written.

    Args:
        layout: Returns the layout of the figure.
        latex: Returns LaTeX text to add to a TeX file, such as the equations of the net.
    """
    return {
        ".svg": lambda: to_svg(layout()).encode(),
        ".dot": lambda: to_dot(layout()).encode(),
        ".png": lambda: to_png(layout()),
        ".pdf": lambda: to_pdf(layout()),
        ".tex": lambda: to_tikz(layout(), latex()).encode("ascii"),
    }


def get_graph_writers(network: Network, build_graph: Callable[[], Any]) -> Writers:
    """Return the writers of a graph by suffix; the graph is built and laid out when a file is written.

    Args:
        network: The net.
        build_graph: Returns the template graph or the ground graph.
    """
    return {
        ".json": lambda: to_json(build_graph()).encode(),
        ".graphml": lambda: to_graphml(network, build_graph()),
        ".gexf": lambda: to_gexf(network, build_graph()),
    }


@picture.register
def picture_net(network: Network, **options: Any) -> NotebookPicture:
    """Lay out the template (folded) graph of a net."""
    return NotebookPicture(**vars(layout_net(network, parse_options(FoldedOptions, options))))


@picture.register
def picture_sentence(state: SentenceState, **options: Any) -> NotebookPicture:
    """Lay out the ground graph of a sentence, its attention grid, or the template graph of its net."""
    return NotebookPicture(**vars(layout_sentence(state, parse_options(SentenceOptions, options))))


@picture.register
def picture_reads(result: Reads, **options: Any) -> NotebookPicture:
    """Lay out the attention grid of the slices, averaged over the latent choices, without the residual connection."""
    parsed = parse_options(ReadsOptions, options)
    mean = np.einsum("s,stij->tij", to_numpy(result.weights), to_numpy(result.attention))
    readable = to_numpy(result.readable)
    attention = [
        StateAttention(("", t), ("", t + 1), *pair) for t, *pair in zip(result.slices, mean, readable, strict=True)
    ]
    tokens, words = {"": result.tokens}, {"": list(range(len(result.tokens)))}
    caption = [to_sentence_case(result.head)]
    special = {"": [k for k, is_special in enumerate(result.special) if is_special]}
    has_special = parsed.special and result.has_special
    if special[""] and not has_special:
        words = exclude_words(tokens, words, special)
        caption.append(describe_special_words(tokens, words, special, attention))
    reductions = ["special=False"] if special[""] and has_special else []
    edges = select_edges(attention, words, parsed, lambda: reductions)
    caption[1:1] = edges.captions

    def layout(density: Density) -> Drawing:
        grid = layout_attention_grid(tokens, {"": result.state}, attention, edges, density)
        return Drawing(grid, "Attention of each slice", caption)

    return NotebookPicture(**vars(compose_picture(layout, parsed, lambda: reductions, GRID_DENSITIES)))


def _layout_graph(layout: Callable[[Any, Density], Drawing], result: Any, **options: Any) -> NotebookPicture:
    """Lay out the graph of a result."""
    parsed = parse_options(FigureOptions, options)
    return NotebookPicture(**vars(compose_picture(partial(layout, result), parsed)))


picture.register(Quotient, partial(_layout_graph, layout_quotient))
picture.register(Tan, partial(_layout_graph, layout_tan))
picture.register(TanTree, partial(_layout_graph, layout_tan_tree))


@draw.register
def draw_net(network: Network, path: PathLike, **options: Any) -> None:
    """Write the template graph of a net, or its figure."""
    if is_folder(path):
        check_names("option of a graph", options, ())
        write_template_graph(network, path)
        return

    def graph() -> Any:
        check_names("option of a graph", options, ())
        return template_graph_to_networkx(network)

    writers = _figure_writers(partial(picture, network, **options), lambda: equations(network).latex)
    write_file(path, get_graph_writers(network, graph) | writers, FOLDER_HINT)


@draw.register
def draw_sentence(state: SentenceState, path: PathLike, **options: Any) -> None:
    """Write the ground graph of a sentence, its figure, its interactive page, or its discrete part as BIF."""
    parsed: Any = check_options(path, options)
    if is_folder(path):
        write_ground_graph(state, path, **options)
        return
    writers = get_graph_writers(state.network, partial(sentence_to_networkx, state, **options))
    writers |= _figure_writers(partial(layout_sentence, state, parsed), lambda: equations(state.network).latex)
    writers[".bif"] = lambda: to_bif(state.model, evidence=state.evidence).encode()
    writers[".html"] = lambda: render_html(*describe_sentence(state, parsed))
    write_file(path, writers, FOLDER_HINT)


def _fallback_svg(state: SentenceState) -> str:
    """Return the SVG for a notebook that cannot run widgets; for a long sentence, it shows the template graph."""
    is_long = max(map(len, state.tokens.values()), default=0) > MAX_WORDS
    try:
        return to_svg(picture_sentence(state, theme="auto", detail="folded" if is_long else None))
    except BudgetError:
        return to_svg(picture_sentence(state, theme="auto", detail="folded"))


def build_mime_bundle(text: str, state: SentenceState, create_widget: Callable[[], Any]) -> MimeBundle:
    """Return the notebook representation of a sentence: the MIME bundle and its metadata.

    A terminal receives only the text. GitHub, nbconvert and other programs that cannot run widgets show the SVG. The
    bundle has no widget if there is no kernel or if anywidget is not installed.

    Args:
        text: The text of the sentence.
        state: The state of the sentence.
        create_widget: Returns the widget.

    Returns:
        The data by MIME type, and the metadata by MIME type.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    bundle: dict[str, Any] = {"text/plain": text}
    if shell is not None and getattr(shell, "kernel", None) is None:
        return bundle, {}
    if shell is not None and importlib.util.find_spec("anywidget") is not None:
        try:
            data, metadata = create_widget()._repr_mimebundle_()
            return {**data, **bundle}, metadata
        except BudgetError as error:
            warnings.warn(f"showing a figure instead of the widget: {error}", stacklevel=2)
    return bundle | {"image/svg+xml": _fallback_svg(state)}, {}


def make_widget(sentence: Any, options: Mapping[str, Any]) -> Widget:
    """Return the interactive page of a sentence as a notebook widget.

    Args:
        sentence: The `Sentence`.
        options: The options of `Sentence.widget`.

    Returns:
        The widget.

    Raises:
        BNetError: anywidget is not installed.
    """
    if importlib.util.find_spec("anywidget") is None:
        hint = 'Run pip install "bnet-transformer[notebook]"'
        raise BNetError("a widget requires the package anywidget, which is not installed", hint=hint)
    from bnet_transformer.page.widget import Widget

    parsed = parse_page_options(options)

    def describe(changed: Any) -> tuple[dict[str, Any], bytes]:
        # After an intervention in the page, contributions of the sentence before it are no longer those of the page.
        return describe_sentence(changed.state, parsed if changed is sentence else replace(parsed, contributions=None))

    return Widget(sentence, describe, lambda changed: _fallback_svg(changed.state))


def check_options(path: PathLike, options: Mapping[str, Any]) -> PageOptions | SentenceOptions | None:
    """Return the options of a page or a figure; raise an error for options that the file format does not have.

    Args:
        path: The file; its suffix determines the format.
        options: The options of `Sentence.draw`.
    """
    suffix = as_path(path).suffix.lower()
    if suffix == ".html":
        return parse_page_options(options)
    if suffix in GRAPH_SUFFIXES or is_folder(path):
        check_names("option of a graph", options, [*inspect.signature(sentence_to_networkx).parameters][1:])
        return None
    if suffix == ".bif" and options:
        expected = "no options, because a BIF file contains the whole bnet"
        raise BNetError(f"options of {path}", expected=expected, actual=", ".join(options))
    return parse_options(SentenceOptions, options)
