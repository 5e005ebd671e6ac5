"""The options of a figure and their validation; the nodes and arrows to highlight; and how a figure fits its width."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Protocol, TypeVar, runtime_checkable

import networkx as nx

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_mapping, check_names
from bnet_transformer._core.naming import match_names, split_path
from bnet_transformer.errors import BNetError, BudgetError, unknown_name_error
from bnet_transformer.figures.fonts import (
    GRAPH_DENSITIES,
    MAX_HEIGHT,
    MIN_FONT_SIZE,
    NAMED_WIDTHS,
    POINTS_PER_INCH,
    SCRIPT_SCALE,
    SLIDE_RATIO,
    Density,
    check_font_name,
    measuring_font,
    parse_width,
)
from bnet_transformer.figures.picture import (
    DEFAULT_MARK as MARKED,
    LABEL_SIZE,
    Drawing,
    Picture,
    add_marks,
    add_texts,
    extent,
    fit_to_extent,
)
from bnet_transformer.graph import Trail

DEFAULT_LIMIT = 2_000  # arrows in one figure
BOX_KINDS = ("words", "roles")
THEMES = ("light", "dark", "auto")
MarkedArrows = frozenset[tuple[str, str]]
HIGHLIGHT_KINDS = "a name, names, a mapping from names to labels, a networkx graph, a Trail, a Separation, a Sweep"
ATTENTION_ROW = re.compile(r"((?:\w+_)?)j((?:_(?:-?\d+|\*))*)(?:\[\d+\])?")


@dataclass(frozen=True)
class FigureOptions:
    """The options of every figure.

    Args:
        theme: The colours: `"light"`, `"dark"` or `"auto"`.
        width: The width of the figure, such as "8.5cm", "column", "text" or "slide"; None for its natural size.
        font: The family of the font, such as "Times New Roman" or "serif"; None for the default font.
        title: The text above the figure; None or an empty string for no text.
    """

    theme: str = "light"
    width: str | None = None
    font: str | None = None
    title: str | None = None

    def __post_init__(self) -> None:
        check_choice("theme", self.theme, THEMES)
        if self.width is not None:
            parse_width(self.width)
        check_font_name(self.font)
        if not isinstance(self.title, str | None):
            raise BNetError("title", expected="a string", actual=self.title)
        for flag in ("weights", "legend", "special"):
            check_choice(flag, getattr(self, flag, True), (True, False))


@dataclass(frozen=True)
class ViewOptions(FigureOptions):
    """The options of every view of a net or a sentence.

    Args:
        slices: The slices to draw, such as 0 or 0,5; None for all slices.
        highlight: What to mark: names, patterns, paths, or a result.
        legend: Whether to draw a legend.
    """

    slices: int | Collection[int] | None = None
    highlight: object = None
    legend: bool = True


@dataclass(frozen=True)
class FoldedOptions(ViewOptions):
    """The options of the folded graph, `detail="folded"`.

    Args:
        weights: Whether to draw selectors and weights.
    """

    weights: bool = True


@dataclass(frozen=True)
class ReadsOptions(FigureOptions):
    """The options of an attention grid.

    Args:
        min_weight: Omit arrows with a lower probability `P(j | i)` than this.
        top: Draw only this number of attention weights, the strongest ones.
        limit: The maximum number of arrows; None for any number.
        special: Whether to draw special tokens, such as `[CLS]`.
    """

    min_weight: float | None = None
    top: int | None = None
    limit: int | None = DEFAULT_LIMIT
    special: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_weight is not None and not 0.0 <= check_float("min_weight", self.min_weight) <= 1.0:
            raise BNetError("min_weight", expected="a probability from 0 to 1", actual=self.min_weight)
        if self.top is not None:
            check_int("top", self.top)
        if self.limit is not None:
            check_int("limit", self.limit, minimum=0)


@dataclass(frozen=True)
class WordsOptions(ViewOptions, ReadsOptions):
    """The options of the attention grid of a sentence, `detail="words"`.

    Args:
        words: The words to draw; None for all words.
        heads: The heads to draw, such as 3 or 0,3; None for all heads.
    """

    words: object = None
    heads: int | Collection[int] | None = None


@dataclass(frozen=True)
class NodesOptions(FoldedOptions, WordsOptions):
    """The options of all nodes of a sentence, `detail="nodes"`; they contain those of the other views.

    Args:
        attention: Whether arrows show `P(j | i)`; None for the default: True in figures, False in graphs.
        only: The nodes to draw, or a networkx graph of them.
        boxes: Frames around nodes: `"words"`, `"roles"`, or a mapping from names of nodes to names of boxes.
    """

    attention: bool | None = None
    only: object = None
    boxes: str | Mapping[str, str] | None = None


VIEWS: Mapping[str, type[ViewOptions]] = {"nodes": NodesOptions, "words": WordsOptions, "folded": FoldedOptions}


@dataclass(frozen=True)
class SentenceOptions(NodesOptions):
    """The options of `Sentence.picture`: a view, and those of the view.

    Args:
        detail: The view: `"nodes"`, `"words"` or `"folded"`; None for the most detailed view that is readable.
    """

    detail: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("attention", self.attention, (None, True, False))
        if isinstance(self.boxes, str):
            check_choice("boxes", self.boxes, BOX_KINDS)
        else:
            for name, box in check_mapping("boxes", self.boxes).items():
                if not isinstance(box, str):
                    raise BNetError(f"box of {name}", expected="the name of a box, a string", actual=box)
        check_choice("detail", self.detail, (None, *VIEWS))
        if self.detail is not None:
            self.check_view(self.detail)

    def unused(self, view: str) -> list[str]:
        """Return the options that differ from their defaults and that a view does not have."""
        pairs = [(option.name, getattr(self, option.name), option.default) for option in fields(self)]
        given = [n for n, value, usual in pairs if type(value) is not type(usual) or value != usual]
        return [name for name in given if name != "detail" and name not in VIEWS[view].__dataclass_fields__]

    def check_view(self, view: str) -> None:
        """Raise an error if an option is given that a view does not have."""
        for name in self.unused(view):
            uses = " or ".join(f"detail={k!r}" for k, kind in VIEWS.items() if name in kind.__dataclass_fields__)
            raise BNetError(f"{name}= has no effect with detail={view!r}", hint=f"Use {uses}")


OptionsT = TypeVar("OptionsT", bound=FigureOptions)
ViewT = TypeVar("ViewT", bound=ViewOptions)


def parse_options(kind: type[OptionsT], options: Mapping[str, Any]) -> OptionsT:
    """Options from keyword arguments; the error for an unknown name suggests similar ones."""
    check_names("option of a picture", options, [option.name for option in fields(kind)])
    return kind(**options)


def limit_error(subject: str, limit: float, unit: str, count: int, reductions: Sequence[str]) -> BudgetError:
    """The error for a figure with too many arrows to be readable; it names the options that make it smaller."""
    hint = "; or use ".join((*filter(None, [", ".join(reductions)]), f"limit={count}"))
    expected, actual = f"at most {limit:,} {unit}", f"{count:,} {unit}"
    return BudgetError(subject, expected=expected, actual=actual, hint=f"To draw less, use {hint}")


# highlights


@runtime_checkable
class SupportsMarks(Protocol):
    """A result that can be highlighted: it has a label for each of its nodes."""

    def marks(self) -> Mapping[str, str]:
        """The label of each node, such as "given" or "collider"."""
        ...


@runtime_checkable
class SupportsProjection(Protocol):
    """A result whose nodes can be marked in a view that has fewer nodes."""

    def project_marks(self, names: Collection[str]) -> Mapping[str, str]:
        """The label of each node and arrow between the nodes of a view, `names`."""
        ...


def project_highlight(options: ViewT, names: Collection[str]) -> ViewT:
    """The options with the highlight of a result projected to the nodes of a view."""
    if not isinstance(options.highlight, SupportsProjection):
        return options
    return replace(options, highlight=options.highlight.project_marks(names))


def resolve_highlight(highlight: object, names: Collection[str]) -> tuple[dict[str, str], MarkedArrows]:
    """The highlighted nodes with their labels, and the highlighted arrows.

    The name of a row of attention, such as `j_0_1`, matches the node that attends.

    >>> resolve_highlight("q_0_* -> x_1_0", ["q_0_0", "q_0_1", "x_1_0"])[0]
    {'q_0_0': 'marked', 'q_0_1': 'marked', 'x_1_0': 'marked'}
    """
    labels, arrows = _parse_highlight(highlight)
    nodes = {name: match_nodes(name, names) for name in labels}
    for name, matches in nodes.items():
        if not matches:
            raise unknown_name_error("highlight", name, names)
    marks: dict[str, str] = {}
    for name, label in labels.items():
        for node in nodes[name]:
            if marks.get(node, MARKED) == MARKED:
                marks[node] = label
    return marks, frozenset(arrow for a, b in arrows for arrow in itertools.product(nodes[a], nodes[b]))


def name_variants(name: str) -> list[str]:
    """Return a name or a pattern; for a row of attention, also the names of the node that attends."""
    row = ATTENTION_ROW.fullmatch(name)
    return [name] if row is None else [name, *(f"{row[1]}{role}{row[2]}" for role in "ax")]


def match_nodes(name: str, names: Collection[str]) -> list[str]:
    """The nodes of a view that a name or a pattern matches."""
    if name in names:
        return [name]
    return next((matches for variant in name_variants(name) if (matches := sorted(match_names(variant, names)))), [])


def _parse_highlight(highlight: Any) -> tuple[dict[str, str], MarkedArrows]:
    """The nodes and arrows of names and paths (`x_0_1 -> q_0_1`); the label of a path belongs to its last node."""
    if isinstance(highlight, Trail):
        steps = zip(highlight.nodes, highlight.nodes[1:], highlight.forward, strict=False)
        colliders = dict.fromkeys(highlight.colliders, "collider")
        nodes = {**dict.fromkeys(highlight.nodes, "on the trail"), **colliders}
        return nodes, frozenset((a, b) if forward else (b, a) for a, b, forward in steps)
    if isinstance(highlight, nx.Graph):
        return dict.fromkeys(map(str, highlight.nodes), MARKED), frozenset(
            (str(a), str(b)) for a, b in highlight.edges()
        )
    labels: dict[str, str] = {}
    arrows: set[tuple[str, str]] = set()
    for name, label in _parse_marks(highlight).items():
        path = split_path(name)
        for node, mark in zip(path, [*[MARKED] * (len(path) - 1), label], strict=True):
            if labels.get(node, MARKED) == MARKED:
                labels[node] = mark
        arrows |= set(itertools.pairwise(path))
    return labels, frozenset(arrows)


def _parse_marks(highlight: Any) -> Mapping[str, str]:
    """The label of each name or path."""
    if isinstance(highlight, SupportsMarks):
        return highlight.marks()
    if isinstance(highlight, Mapping):
        return {str(name): str(label) for name, label in highlight.items()}
    names = [highlight] if isinstance(highlight, str) else highlight
    if isinstance(names, Collection) and all(isinstance(name, str) for name in names):
        return dict.fromkeys(names, MARKED)
    raise BNetError("highlight", expected="nodes to highlight", actual=highlight, allowed=HIGHLIGHT_KINDS)


def get_highlighted_names(highlight: object) -> tuple[str, ...]:
    """The names and patterns of `highlight=` (or `only=`); empty for None."""
    return () if highlight is None else tuple(_parse_highlight(highlight)[0])


def select_subgraph(graph: nx.DiGraph, only: Any, check_name: Callable[[str], object]) -> nx.DiGraph:
    """The part of a graph that `only` names: nodes with all arrows between them, or exactly the arrows of a graph."""
    names, arrows = _parse_highlight(only)
    for name in names:
        check_name(name)
    missing = [name for name in names if name not in graph]
    if missing:
        raise BNetError("only", expected="nodes that the other options do not exclude", actual=missing[0])
    if not isinstance(only, nx.Graph):
        return subgraph(graph, names)
    for source, target in sorted(arrows):
        if not graph.has_edge(source, target):
            raise BNetError("only", expected="arrows of the bnet", actual=f"{source} -> {target}")
    result = subgraph(graph, names)
    result.remove_edges_from([arrow for arrow in list(result.edges) if arrow not in arrows])
    return result


def drop_wordless_components(graph: nx.DiGraph) -> nx.DiGraph:
    """Remove the connected components without a word: readouts and weights that the selection isolates."""
    word = nx.get_node_attributes(graph, "word")
    groups = [group for group in nx.weakly_connected_components(graph) if any(word[n] is not None for n in group)]
    return subgraph(graph, set().union(*groups)) if groups else graph


def subgraph(graph: Any, names: Collection[str]) -> Any:
    """The subgraph induced by `names`, in the order of the graph (`nx.Graph.subgraph` does not keep it)."""
    result, selected = graph.__class__(), set(names)
    result.add_nodes_from((name, attrs) for name, attrs in graph.nodes(data=True) if name in selected)
    arrows = graph.edges(data=True)
    result.add_edges_from((a, b, attrs) for a, b, attrs in arrows if a in selected and b in selected)
    return result


# --------------------------------------------------------------------------------------------------------------------
# Fits a figure to its physical width: how compact its layout is, and the scale at which all text is legible.


TIGHT_MARGIN = 3.0  # of a figure with a given width: the page around it has its own margins
PREFERRED_SCALE = 0.75  # the first layout that fits at this scale is drawn


def compose_picture(
    layout: Callable[[Density], Drawing],
    options: FigureOptions,
    reductions: Callable[[], Sequence[str]] = list,
    densities: Sequence[Density] = GRAPH_DENSITIES,
    fallback: Callable[[], Picture] | None = None,
) -> Picture:
    """Lay out a figure with its texts, at its natural size or in the width of the options.

    Args:
        layout: Lays out the figure for a density.
        options: `width`, `title`, `font` and `theme` of the figure.
        reductions: Returns the options that make the figure smaller, for the error.
        densities: The layouts to try for a given width, from loose to compact.
        fallback: Lays out a figure that shows less, if this one does not fit the width or the height of the page; None
            for an error.

    Returns:
        The picture. With a width, its `scale` is set.

    Raises:
        BNetError: The figure does not fit the width, or the height of a page or slide, at a legible size.
    """
    with measuring_font(options.font):
        heading = options.title or ""
        style: dict[str, Any] = {"theme": options.theme, "font": options.font}
        if options.width is None:
            return replace(fit_to_extent(add_texts(layout(Density()), heading)), **style)
        width = parse_width(options.width) * POINTS_PER_INCH
        layout = cache(layout)
        chosen = _choose_layout(((density, layout(density)) for density in densities), width, heading)
        if isinstance(chosen, float):
            if fallback is not None:
                return fallback()
            raise _width_error(options, chosen, reductions())
        remaining = (drawing for density in densities if (drawing := layout(density)) is not chosen[0])
        fitted = _fit_height(itertools.chain(chosen[:1], remaining), chosen[1], width, heading)
        if isinstance(fitted, float):
            if fallback is not None:
                return fallback()
            raise _height_error(fitted, _max_height(width), reductions())
        return replace(fitted, **style)


def _fit_height(drawings: Iterable[Drawing], scale: float, width: float, heading: str) -> Picture | float:
    """Return the first layout that is not higher than a page, if necessary with smaller text.

    If there is none, return the smallest height at which one is legible, in points.
    `scale` is that of the first layout.
    """
    max_height, lowest = _max_height(width), math.inf
    for drawing in drawings:
        min_scale = MIN_FONT_SIZE / min_text_size(drawing, heading)
        scale = min(scale, width / required_width(drawing, heading))
        if scale < min_scale:
            continue
        picture, reduced = _compose(drawing, heading, width / scale), scale
        if picture.height * scale > max_height:
            reduced = max(min_scale, max_height / picture.height)
            picture = _compose(drawing, heading, width / reduced)
        if picture.height * reduced <= max_height + 1e-6:
            return replace(picture, scale=reduced)
        lowest = min(lowest, picture.height * reduced)
    return lowest


def _compose(drawing: Drawing, heading: str, width: float) -> Picture:
    """Return a drawing with its texts in a picture of this width, in points of the layout."""
    return fit_to_extent(add_texts(drawing, heading, width - 2 * TIGHT_MARGIN), TIGHT_MARGIN, width)


def _max_height(width: float) -> float:
    """The height of a page, or of a slide for a figure that is wider than a page; in points."""
    is_slide = width > NAMED_WIDTHS["text"] * POINTS_PER_INCH
    return width * SLIDE_RATIO if is_slide else MAX_HEIGHT * POINTS_PER_INCH


def _choose_layout(
    candidates: Iterable[tuple[Density, Drawing]], width: float, heading: str
) -> tuple[Drawing, float] | float:
    """Return the first layout that fits at the preferred scale, or else the one with the largest scale; and its scale.

    If no layout is legible, return the width at which one is, in points.

    The text of a figure that is wider than a page, such as that of a slide, is larger in proportion.
    """
    max_scale = max(1.0, width / (NAMED_WIDTHS["text"] * POINTS_PER_INCH))
    best: tuple[Drawing, float] | None = None
    min_width = math.inf
    for density, drawing in candidates:
        required = required_width(drawing, heading)
        min_scale = MIN_FONT_SIZE / min_text_size(drawing, heading)
        min_width = min(min_width, required * min_scale)
        scale = min(max_scale, width / required)
        if scale >= (max_scale if density.gap > 1.0 else min(PREFERRED_SCALE * max_scale, 1.0)):
            return drawing, scale
        if scale >= min_scale and (best is None or scale > best[1]):
            best = drawing, scale
    return min_width if best is None else best


def required_width(drawing: Drawing, heading: str) -> float:
    """The width of a figure with its margins, in points of the layout; its texts are wrapped."""
    left, _, right, _ = extent(add_marks(drawing.content))
    return max(right - left, drawing.min_text_width(heading)) + 2 * TIGHT_MARGIN


def min_text_size(drawing: Drawing, heading: str) -> float:
    """The size of the smallest text of a figure, in points of the layout."""
    picture = add_texts(drawing, heading)
    labels = [(box.label, LABEL_SIZE) for box in picture.boxes] + [(line.runs, line.size) for line in picture.lines]
    scales = {"sub": SCRIPT_SCALE, "sup": SCRIPT_SCALE}
    sizes = (size * scales.get(run.style, 1.0) for runs, size in labels for run in runs)
    return min(sizes, default=LABEL_SIZE)


def _width_error(options: FigureOptions, min_width: float, reductions: Sequence[str]) -> BNetError:
    """The error for a width at which the figure is not legible; it names a width that suffices."""
    inches = math.ceil(100 * min_width / POINTS_PER_INCH) / 100
    hint = "To draw less, use " + ", ".join(reductions) if reductions else "Use a larger width"
    expected = f"at least {inches:g}in for this figure, so that no text is smaller than {MIN_FONT_SIZE:g} points"
    return BNetError("width", expected=expected, actual=options.width, hint=hint)


def _height_error(height: float, max_height: float, reductions: Sequence[str]) -> BNetError:
    """The error for a figure that is higher than a page or a slide with the smallest legible text."""
    limit, inches = max_height / POINTS_PER_INCH, math.ceil(100 * height / POINTS_PER_INCH) / 100
    hint = "To draw less, use " + ", ".join(reductions) + "; or draw" if reductions else "Draw"
    return BNetError(
        "height of a figure with width=",
        expected=f"at most {limit:.4g}in, the height of a page or a slide",
        actual=f"{inches:g}in with text of {MIN_FONT_SIZE:g} points",
        hint=f"{hint} it without width=",
    )
