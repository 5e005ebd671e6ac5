"""What a user may ask of a figure, checked; and what stands out in it: nodes that somebody names, or those of an answer
(a trail, a separation, a sweep)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import networkx as nx

from bnet_transformer._core.checks import check_choice, check_float, check_int, check_mapping, check_names
from bnet_transformer.errors import BNetError, BudgetError, unknown_name_error
from bnet_transformer.figures.style import DEFAULT_MARK as MARKED
from bnet_transformer.graph import Trail

DEFAULT_LIMIT = 2_000  # arrows of one figure
DETAILS = (None, "nodes", "words", "folded")
BOX_KINDS = ("words", "roles")
VIEW_OPTIONS: Mapping[str, tuple[str, ...]] = {  # the options that each view uses, besides detail=
    "nodes": (
        *("weights", "slices", "words", "heads", "attention", "min_weight", "top"),
        *("only", "highlight", "boxes", "theme", "legend", "limit"),
    ),
    "words": ("slices", "words", "heads", "min_weight", "top", "highlight", "theme", "legend", "limit"),
    "folded": ("slices", "weights", "highlight", "theme", "legend"),
}
THEMES = ("light", "dark", "auto")
MarkedArrows = frozenset[tuple[str, str]]
HIGHLIGHT_KINDS = (
    "a name, names, a mapping from names to what they are, a networkx graph, a Trail, a Separation, a Sweep"
)
PATH_SEPARATOR = "->"
ATTENTION_ROW = re.compile(r"((?:\w+_)?)j((?:_(?:\d+|\*))*)(?:\[\d+\])?")


@dataclass(frozen=True)
class FigureOptions:
    """The options of `Sentence.picture`; the first six are those of `Sentence.graph`.

    Args:
        weights: Draw selectors and weights.
        slices: Slices to draw, such as 0 or 0,5; None for all.
        words: Words to draw; None for all.
        heads: Heads to draw, such as 3 or 0,3; None for all.
        attention: Put `P(j | i)` on the arrows; None for as is usual: figures do, graphs do not.
        min_weight: Leave out arrows that are read less than this.
        top: At most so many reads, the strongest.
        detail: What is drawn: `"nodes"`, `"words"` or `"folded"`; None for what can be read.
        only: Some nodes, or a networkx graph of them.
        highlight: Names, patterns, paths or an answer that are marked.
        boxes: What frames nodes: `"words"`, `"roles"`, or a box for each name.
        theme: `"light"`, `"dark"` or `"auto"`.
        legend: Whether there is a legend.
        limit: The most arrows; None for any number.
    """

    weights: bool = True
    slices: int | Collection[int] | None = None
    words: object = None
    heads: int | Collection[int] | None = None
    attention: bool | None = None
    min_weight: float | None = None
    top: int | None = None
    detail: str | None = None
    only: object = None
    highlight: object = None
    boxes: str | Mapping[str, str] | None = None
    theme: str = "light"
    legend: bool = True
    limit: int | None = DEFAULT_LIMIT

    def __post_init__(self) -> None:
        for what in ("weights", "legend"):
            check_choice(what, getattr(self, what), (True, False))
        check_choice("attention", self.attention, (None, True, False))
        check_choice("detail", self.detail, DETAILS)
        check_choice("theme", self.theme, THEMES)
        if self.min_weight is not None and not 0.0 <= check_float("min_weight", self.min_weight) <= 1.0:
            raise BNetError("min_weight", expected="a probability from 0 to 1", actual=self.min_weight)
        if self.top is not None:
            check_int("top", self.top)
        if self.limit is not None:
            check_int("limit", self.limit, minimum=0)
        if isinstance(self.boxes, str):
            check_choice("boxes", self.boxes, BOX_KINDS)
        else:
            for name, box in check_mapping("boxes", self.boxes).items():
                if not isinstance(box, str):
                    raise BNetError(f"box of {name}", expected="the name of a box, a string", actual=box)
        if self.detail is not None:
            self.check_view(self.detail)

    @property
    def non_default(self) -> list[str]:
        """The options besides `detail` that are not at their defaults."""
        pairs = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]
        return [n for n, value, usual in pairs if n != "detail" and (type(value) is not type(usual) or value != usual)]

    def unused(self, view: str) -> list[str]:
        """The options that are told and that a view has no use for."""
        return [name for name in self.non_default if name not in VIEW_OPTIONS[view]]

    def check_view(self, view: str) -> None:
        """Refuse an option that a view has no use for."""
        for name in self.unused(view):
            uses = ", ".join(f"detail={other!r}" for other, names in VIEW_OPTIONS.items() if name in names)
            raise BNetError(name, expected="a view that uses it", actual=f"detail={view!r}", allowed=uses)


def parse_options(options: Mapping[str, Any], allowed: Collection[str] = ()) -> FigureOptions:
    """Options from keywords; a name that none has is refused with the near ones."""
    check_names("option of a picture", options, allowed or [each.name for each in fields(FigureOptions)])
    return FigureOptions(**options)


def limit_error(
    subject: str, limit: int, unit: str, received: str, suggestions: Sequence[str], count: int
) -> BudgetError:
    """The error for a figure of more arrows than anybody can read, with ways to one that fits."""
    advice = "; ".join(suggestions) + "; or " if suggestions else ""
    expected = f"at most {limit} {unit}, or nobody can read it"
    return BudgetError(subject, expected=expected, actual=received, allowed=f"{advice}limit={count}")


# what stands out


@runtime_checkable
class SupportsMarks(Protocol):
    """An answer that says which nodes it is about, and what each is in it."""

    def marks(self) -> Mapping[str, str]:
        """What each node is in the answer."""
        ...


def resolve_highlight(highlight: object, names: Collection[str]) -> tuple[dict[str, str], MarkedArrows]:
    """The nodes that stand out with what each is, and the arrows between them that do.

    A star stands for any index, and a row of attention `j_0_1` for the node that reads by it.

    >>> resolve_highlight("q_0_* -> x_1_0", ["q_0_0", "q_0_1", "x_1_0"])[0]
    {'q_0_0': 'marked', 'q_0_1': 'marked', 'x_1_0': 'marked'}
    """
    found, ways = _parse_highlight(highlight)
    nodes = {name: match_names(name, names) for name in found}
    for name, drawn in nodes.items():
        if not drawn:
            raise unknown_name_error("highlight", name, names)
    marks: dict[str, str] = {}
    for name, what in found.items():
        for node in nodes[name]:
            if marks.get(node, MARKED) == MARKED:
                marks[node] = what
    return marks, frozenset(way for a, b in ways for way in itertools.product(nodes[a], nodes[b]))


def name_variants(name: str) -> list[str]:
    """A name or a pattern, and for a row of attention those of the node that reads by it."""
    row = ATTENTION_ROW.fullmatch(name)
    return [name] if row is None else [name, *(f"{row[1]}{role}{row[2]}" for role in "ax")]


def match_names(name: str, names: Collection[str]) -> list[str]:
    """The nodes that a name or a pattern means, of those that are drawn."""
    if name in names:
        return [name]
    for pattern in name_variants(name):
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        if found := sorted(node for node in names if wanted.fullmatch(node)):
            return found
    return []


def _parse_highlight(highlight: Any) -> tuple[dict[str, str], MarkedArrows]:
    """The nodes of names and of paths of names (`x_0_1 -> q_0_1`; the last is what is told), and their arrows."""
    if isinstance(highlight, Trail):
        steps = zip(highlight.nodes, highlight.nodes[1:], highlight.forward, strict=False)
        colliders = dict.fromkeys(highlight.colliders, "collider")
        nodes = {**dict.fromkeys(highlight.nodes, "on the trail"), **colliders}
        return nodes, frozenset((a, b) if forward else (b, a) for a, b, forward in steps)
    if isinstance(highlight, nx.Graph):
        return dict.fromkeys(map(str, highlight.nodes), MARKED), frozenset(
            (str(a), str(b)) for a, b in highlight.edges()
        )
    found: dict[str, str] = {}
    ways: set[tuple[str, str]] = set()
    for name, what in _parse_marks(highlight).items():
        path = [node.strip() for node in name.split(PATH_SEPARATOR)]
        for node, own in zip(path, [*[MARKED] * (len(path) - 1), what], strict=True):
            if found.get(node, MARKED) == MARKED:
                found[node] = own
        ways |= set(itertools.pairwise(path))
    return found, frozenset(ways)


def _parse_marks(highlight: Any) -> Mapping[str, str]:
    """What each name or path that is told is in the answer."""
    if isinstance(highlight, SupportsMarks):
        return highlight.marks()
    if isinstance(highlight, Mapping):
        return {str(name): str(what) for name, what in highlight.items()}
    names = [highlight] if isinstance(highlight, str) else highlight
    if isinstance(names, Collection) and all(isinstance(name, str) for name in names):
        return dict.fromkeys(names, MARKED)
    raise BNetError("highlight", expected="nodes", actual=highlight, allowed=HIGHLIGHT_KINDS)


def get_highlighted_names(highlight: object) -> tuple[str, ...]:
    """The nodes that somebody names; none where nothing is told."""
    return () if highlight is None else tuple(_parse_highlight(highlight)[0])


def select_subgraph(graph: nx.DiGraph, only: Any, check_name: Callable[[str], object]) -> nx.DiGraph:
    """The part of a graph that is wanted: some nodes and all arrows between them, or the arrows of a graph."""
    wanted, ways = _parse_highlight(only)
    for name in wanted:
        check_name(name)
    missing = [name for name in wanted if name not in graph]
    if missing:
        raise BNetError("only", expected="nodes that the other options keep", actual=missing[0])
    if not isinstance(only, nx.Graph):
        return subgraph(graph, wanted)
    for source, target in sorted(ways):
        if not graph.has_edge(source, target):
            raise BNetError("only", expected="arrows of the bnet", actual=f"{source} -> {target}")
    found = subgraph(graph, wanted)
    found.remove_edges_from([arrow for arrow in list(found.edges) if arrow not in ways])
    return found


def drop_wordless_components(graph: nx.DiGraph) -> nx.DiGraph:
    """What hangs together with a word: a part of a sentence leaves readouts and weights behind, joined to nothing."""
    word = nx.get_node_attributes(graph, "word")
    groups = [group for group in nx.weakly_connected_components(graph) if any(word[n] is not None for n in group)]
    return subgraph(graph, set().union(*groups)) if groups else graph


def subgraph(graph: Any, names: Collection[str]) -> Any:
    """Some nodes of a graph with the arrows between them, in the order of the graph."""
    found, wanted = graph.__class__(), set(names)
    found.add_nodes_from((name, about) for name, about in graph.nodes(data=True) if name in wanted)
    arrows = graph.edges(data=True)
    found.add_edges_from((a, b, about) for a, b, about in arrows if a in wanted and b in wanted)
    return found
