"""Structure queries by name, for the ground graph of a sentence and the template graph of a net.

A node of the template graph represents all nodes of a group, in every sentence. If the template graph separates two
groups, each ground graph separates them, given all nodes of the given groups. The converse does not hold: a trail of
the template graph can be inactive in a ground graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.checks import check_choice, check_int, check_mapping, parse_names
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.graph.d_separation import (
    SeparationQuery,
    are_separated,
    bayes_ball,
    deterministic_closure,
    nodes_of_first_query,
    pack_cuts,
    pack_queries,
    thin_graph,
)
from bnet_transformer.graph.ground_graph import ALL_NODES, GroundGraph, NodeSelection, find_family
from bnet_transformer.graph.traversal import ancestors, descendants, markov_blanket

if TYPE_CHECKING:
    import networkx as nx


Names = str | Collection[str]
DEFAULT_LIMIT = 2_000_000
INITIAL_WORD_COUNT = 4


@dataclass(frozen=True)
class Trail:
    """A trail from one node to another.

    Attributes:
        nodes: The names of the nodes, from the first to the last.
        forward: For each step, whether it follows the direction of the arrow.
    """

    nodes: tuple[str, ...]
    forward: tuple[bool, ...]

    @property
    def colliders(self) -> tuple[str, ...]:
        """The nodes with two arrows of the trail into them; evidence on a collider opens the trail."""
        steps = zip(self.nodes[1:], self.forward, self.forward[1:], strict=False)
        return tuple(node for node, into, out in steps if into and not out)

    def __len__(self) -> int:
        return len(self.forward)

    def __str__(self) -> str:
        steps = ((" -> " if f else " <- ") + node for f, node in zip(self.forward, self.nodes[1:], strict=True))
        return self.nodes[0] + "".join(steps)

    def _repr_html_(self) -> str:
        """The trail in a notebook."""
        return f"<code>{str(self).replace('<', '&lt;').replace('>', '&gt;')}</code>"


@dataclass(frozen=True)
class Separation:
    """The answer of a separation query; `bool(separation)` is `separation.separated`.

    Attributes:
        separated: Whether `given` separates `x` from `y` in the graph.
        x: The names of the first nodes.
        y: The names of the second nodes.
        given: The names of the given nodes.
        deterministic: Whether the nodes that `given` determines count as given. Default False.
        over_choices: With `verify=`, the maximum of `|P(x, y | given) - P(x | given) P(y | given)|` over the states of
            latent choices, from 0 to 1. None (default) if it was not computed.
        over_roots: With `verify=`, the maximum partial correlation, to first order in a change of the words, from 0 to
            1. None (default) if it was not computed.
    """

    separated: bool
    x: tuple[str, ...]
    y: tuple[str, ...]
    given: tuple[str, ...]
    deterministic: bool = False
    over_choices: float | None = field(default=None, kw_only=True)
    over_roots: float | None = field(default=None, kw_only=True)

    @property
    def dependence(self) -> float | None:
        """The maximum of `over_choices` and `over_roots`; None if neither was computed."""
        return max((test for test in (self.over_choices, self.over_roots) if test is not None), default=None)

    def __bool__(self) -> bool:
        return self.separated

    def marks(self) -> dict[str, str]:
        """The part of each node in the query, `"x"`, `"y"` or `"given"`, for `draw(highlight=)`."""
        parts = {"x": self.x, "y": self.y, "given": self.given}
        return {name: part for part, names in parts.items() for name in names}

    def _repr_html_(self) -> str:
        """The answer in a notebook, with the sign of independence."""
        sign = "⊥" if self.separated else "⊥̸"
        test = "" if self.dependence is None else f" (dependence {self.dependence:.3g})"
        return f"<p>{', '.join(self.x)} {sign} {', '.join(self.y)} | {', '.join(self.given) or 'nothing'}{test}</p>"


class StructureQueries:
    """The structure queries of `BNet` and `Sentence`.

    Nodes are names. In a net, a name such as `"x_1"` is a node group, which represents all its nodes in every sentence;
    in a sentence, a name such as `"x_1_2"` is one node. Where several nodes are allowed, a name or a pattern of several
    nodes (`"x_1"`, `"q_*_2"`) is all of them.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(dim=4)
    >>> net.parents("x_1"), net.sentence("the cat").parents("q_0_1")
    (['q_0', 'k_0', 'v_0'], ['W_q_0', 'x_0_1'])
    """

    @property
    def _graph(self) -> GroundGraph:
        """The graph."""
        raise NotImplementedError

    @property
    def _functional_groups(self) -> frozenset[int]:
        """The indices of the groups whose nodes are functions of their parents."""
        raise NotImplementedError

    def parents(self, name: str) -> list[str]:
        """The parents of a node: the nodes with an arrow into it.

        Args:
            name: The name of the node.

        Returns:
            The names of the parents, in the order of the TPM's slots.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.parents("x_1_2")
        ['q_0_2', 'k_0_0', 'k_0_1', 'k_0_2', 'v_0_0', 'v_0_1', 'v_0_2']
        """
        return self._format_names(self._graph.parents(self._graph.id(name)))

    def children(self, name: str) -> list[str]:
        """The children of a node: the nodes to which it has an arrow.

        Args:
            name: The name of the node.

        Returns:
            The names of the children.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.children("c")
        ['W_q_0', 'W_k_0', 'W_v_0']
        """
        return self._format_names(self._graph.children(self._graph.id(name)))

    def ancestors(self, *names: str) -> list[str]:
        """The ancestors of one or more nodes: all nodes with a directed path to one of them.

        Args:
            *names: The names of the nodes.

        Returns:
            The names of the ancestors, without the nodes themselves.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.ancestors("q_0_2")
        ['c', 'x_0_2', 'W_q_0']
        """
        return self._format_names(ancestors(self._graph, self._find_nodes(names)))

    def descendants(self, *names: str) -> list[str]:
        """The descendants of one or more nodes: all nodes with a directed path from one of them.

        Args:
            *names: The names of the nodes.

        Returns:
            The names of the descendants, without the nodes themselves.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.descendants("q_0_0", "q_0_2")
        ['x_1_0', 'x_1_2']
        """
        return self._format_names(descendants(self._graph, self._find_nodes(names)))

    def blanket(self, name: str) -> list[str]:
        """The Markov blanket of a node: its parents, its children, and the other parents of its children.

        Args:
            name: The name of the node.

        Returns:
            The names of the nodes in the blanket.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.blanket("W_q_0")
        ['c', 'x_0_0', 'x_0_1', 'x_0_2', 'q_0_0', 'q_0_1', 'q_0_2']
        """
        return self._format_names(markov_blanket(self._graph, self._graph.id(name)))

    def separated(self, x: Names, y: Names, given: Names = (), *, deterministic: bool = False) -> Separation:
        """Whether the graph separates x from y given other nodes (d-separation).

        Separation implies independence. The converse can fail if TPMs are deterministic. Roots, such as words and
        weights, count as free variables. If a net separates groups, every sentence does.

        Args:
            x: The name of a node, or several.
            y: The name of a node, or several.
            given: The name of a node, or several. Default: none.
            deterministic: Whether the nodes that `given` determines count as given (D-separation). Default False.

        Returns:
            The answer, which is true or false like a bool.

        Raises:
            BNetError: If a node is in two of the three arguments, or `x` or `y` is empty.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, slices=2)
        >>> bool(net.separated("x_0", "x_2")), bool(net.separated("x_0", "x_2", given=["x_1", "c"]))
        (False, True)
        """
        query = self._build_query(x, y, given)
        is_separated = bool(are_separated(self._graph, [query], self._closure_groups(deterministic))[0])
        left, right, known = (tuple(self._format_names(sorted(part))) for part in (query.x, query.y, query.given))
        return Separation(is_separated, left, right, known, deterministic)

    def separations(self, questions: Sequence[Sequence[Names]], *, deterministic: bool = False) -> NDArray[np.bool_]:
        """The answers of many separation queries at once, some thousands per second.

        Args:
            questions: `(x, y)` or `(x, y, given)` for each query; each entry is a name or several.
            deterministic: Whether the nodes that `given` determines count as given (D-separation). Default False.

        Returns:
            Whether x and y are separated, `[query]`.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.separations([("q_0_0", "k_0_1"), ("q_0_0", "k_0_1", ["c"])])
        array([False,  True])
        """
        closure = self._closure_groups(deterministic)
        if isinstance(questions, str) or not isinstance(questions, Sequence):
            raise BNetError("questions", expected="a list of (x, y) or (x, y, given)", actual=questions)
        for question in questions:
            if isinstance(question, str) or not isinstance(question, Sequence) or not 2 <= len(question) <= 3:
                raise BNetError("question", expected="(x, y) or (x, y, given)", actual=question)
        return are_separated(self._graph, [self._build_query(*question) for question in questions], closure)

    def minimal_separator(self, x: Names, y: Names) -> list[str] | None:
        """A minimal set of nodes that separates x from y: no proper subset separates them.

        Args:
            x: The name of a node, or several.
            y: The name of a node, or several.

        Returns:
            The names of the nodes; None if an arrow joins x and y.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.minimal_separator("x_0_0", "x_1_1")
        ['W_k_0', 'W_v_0', 'k_0_0', 'v_0_0']
        """
        query = self._build_query(x, y)
        nodes = find_minimal_separator(self._graph, query.x, query.y)
        return None if nodes is None else self._format_names(nodes)

    def active_trail(self, x: Names, y: Names, given: Names = (), *, deterministic: bool = False) -> Trail | None:
        """A shortest active trail from x to y given other nodes: the reason that they are not separated.

        Args:
            x: The name of a node, or several.
            y: The name of a node, or several.
            given: The name of a node, or several. Default: none.
            deterministic: Whether nodes that `given` determines block the trail (D-separation). Default False.

        Returns:
            The trail; None if x and y are separated.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> print(s.active_trail("q_0_0", "k_0_1"))
        q_0_0 <- W_q_0 <- c -> W_k_0 -> k_0_1
        """
        return find_active_trail(self._graph, self._build_query(x, y, given), self._closure_groups(deterministic))

    def minimal_cut(self, x: str, y: str, *, limit: int = DEFAULT_LIMIT) -> list[str] | None:
        """A smallest set of nodes that contains a node of every directed path from x to y.

        Args:
            x: The name of a node.
            y: The name of a node.
            limit: The maximum number of arrows of the searched graph. Default 2,000,000.

        Returns:
            The names of the nodes; None if an arrow leads from x to y.

        Raises:
            BudgetError: If the graph has more than `limit` arrows.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.minimal_cut("c", "x_1_0")
        ['W_k_0', 'W_v_0', 'q_0_0']
        """
        source, target = self._graph.id(x), self._graph.id(y)
        if source == target:
            raise BNetError("y", expected=f"a node other than {x}", actual=y)
        nodes = find_minimal_cut(self._graph, source, target, check_int("limit", limit))
        return None if nodes is None else self._format_names(nodes)

    def _build_query(self, x: Names, y: Names, given: Names = ()) -> SeparationQuery:
        """The separation query with node ids; raises an error if a node is in two arguments."""
        parts = {"x": parse_names("x", x), "y": parse_names("y", y), "given": parse_names("given", given)}
        ids = {part: frozenset(self._find_nodes(names)) for part, names in parts.items()}
        for first, second in (("x", "y"), ("x", "given"), ("y", "given")):
            for node in sorted(ids[first] & ids[second]):
                name = self._graph.name(node)
                raise BNetError(f"{name} is in both {first} and {second}", hint="Pass each node only once")
        for part in ("x", "y"):
            if not ids[part]:
                raise BNetError(part, expected="at least one node")
        return SeparationQuery(ids["x"], ids["y"], ids["given"])

    def _find_nodes(self, names: Iterable[str]) -> list[int]:
        """The ids of the nodes of names and patterns."""
        return [node for name in names for node in find_family(self._graph, name).nodes]

    def _closure_groups(self, deterministic: bool) -> frozenset[int]:
        """The groups of nodes that count as given if their parents are given."""
        check_choice("deterministic", deterministic, (True, False))
        return self._functional_groups if deterministic else frozenset()

    def _format_names(self, nodes: Sequence[int]) -> list[str]:
        """The names of nodes from their ids."""
        return [self._graph.name(node) for node in nodes]


# paths, trails, separators and cuts


def find_active_trail(
    ground: GroundGraph, query: SeparationQuery, functional_groups: Collection[int] = ()
) -> Trail | None:
    """A shortest active trail from x to y given other nodes; None if they are separated."""
    if are_separated(ground, [query], functional_groups)[0]:
        return None
    # Breadth-first search over the states (node, direction) of the Bayes ball finds a shortest trail. A collider is
    # open if it is given or is an ancestor of a given node; the ball's path to that node is not part of the trail.
    thinned = thin_graph(ground, [query.nodes])
    small = thinned.apply_surgery()
    x, y, given = (set(thinned.to_thinned([part])[0]) for part in (query.x, query.y, query.given))
    opened = given | set(ancestors(small, given))
    cut = pack_cuts(small, small, [small.cut_nodes], [small.retained_parents])
    determined = deterministic_closure(small, pack_queries(small, 1, [given]), cut, functional_groups)
    blocked = set(nodes_of_first_query(determined).tolist())
    predecessors = {(node, True): (node, True) for node in sorted(x)}  # a start node is its own predecessor
    queue = deque(predecessors)
    while queue:
        state = queue.popleft()
        node, going_up = state
        if node in y and node not in blocked:
            steps = [state]
            while predecessors[steps[-1]] != steps[-1]:
                steps.append(predecessors[steps[-1]])
            names = tuple(ground.name(thinned.to_full(node)) for node, _ in reversed(steps))
            return Trail(names, tuple(not going_up for _, going_up in reversed(steps[:-1])))
        next_states: list[tuple[int, bool]] = []
        if (going_up and node not in blocked) or (not going_up and node in opened):
            next_states += [(parent, True) for parent in small.parents(node)]
        if node not in blocked:
            next_states += [(child, False) for child in small.children(node)]
        for step in next_states:
            if step not in predecessors:
                predecessors[step] = state
                queue.append(step)
    return None


def find_minimal_separator(ground: GroundGraph, x: frozenset[int], y: frozenset[int]) -> list[int] | None:
    """A minimal set of nodes that separates x from y; None if an arrow joins them."""
    # Van der Zander and Liskiewicz (2020), "Finding minimal d-separators in linear time": if any set separates x from
    # y, the set of their other ancestors does too. Of this set, keep the nodes that balls from x reach, and of these
    # the nodes that balls from y reach. The remaining set is minimal.
    ancestral = sorted({*x, *y, *ancestors(ground, x), *ancestors(ground, y)})
    inside = pack_queries(ground, 1, [ancestral])
    cut = pack_cuts(ground, ground, [ground.cut_nodes], [ground.retained_parents])
    sources, targets = pack_queries(ground, 1, [x]), pack_queries(ground, 1, [y])
    given = inside & ~sources & ~targets
    reached = bayes_ball(ground, sources, given, given, cut, inside)
    if (reached & targets).any():
        return None
    given &= reached
    given &= bayes_ball(ground, targets, given, given, cut, inside)
    separator: list[int] = nodes_of_first_query(given).tolist()
    return separator


def find_minimal_cut(ground: GroundGraph, x: int, y: int, limit: int = DEFAULT_LIMIT) -> list[int] | None:
    """A smallest set of nodes that contains a node of every directed path from x to y; None if an arrow joins them."""
    import networkx as nx

    if y in ground.children(x):
        return None
    # A minimum node cut by max-flow (Menger's theorem). The search starts with a small number of words: the cut of a
    # subgraph is a lower bound, so if it also cuts the full graph, it is a minimum cut of the full graph.
    count, max_words = INITIAL_WORD_COUNT, max(ground.word_counts.values(), default=0)
    while True:
        graph = _build_path_graph(ground, x, y, count, limit)
        cut = sorted(nx.minimum_node_cut(graph, x, y)) if x in graph and nx.has_path(graph, x, y) else []
        if count >= max_words or y not in descendants(ground.surgery({*ground.cut_nodes, *cut}), [x]):
            return cut
        count *= 2


def _build_path_graph(ground: GroundGraph, x: int, y: int, word_count: int, limit: int) -> nx.DiGraph:
    """The arrows on directed paths from x to y between the first words and the words of x and y."""
    import networkx as nx

    words_of_stack = {stack: set(range(min(word_count, size))) for stack, size in ground.word_counts.items()}
    for node in (x, y):
        group, index = ground.unravel_index(node)
        if group.word_stack is not None:
            words_of_stack[group.word_stack].add(index[-1])
    selection = NodeSelection(words={stack: sorted(words) for stack, words in words_of_stack.items()})
    on_path = np.zeros(len(ground), dtype=bool)
    on_path[list({x, *descendants(ground, [x])} & {y, *ancestors(ground, [y])})] = True
    if (arrows := ground.count_arrows(selection)) > limit:
        actual = f"{arrows} arrows between {sum(map(len, words_of_stack.values()))} words"
        hint = "Raise limit= for a slower search"
        raise BudgetError("minimal_cut", expected=f"at most {limit} arrows", actual=actual, hint=hint)
    graph = nx.DiGraph()
    for _, sources, targets in ground.arrows(selection):
        is_on_path = on_path[sources] & on_path[targets]
        graph.add_edges_from(zip(sources[is_on_path].tolist(), targets[is_on_path].tolist(), strict=True))
    return graph


# --------------------------------------------------------------------------------------------------------------------
# Quotient graphs: groups of nodes (boxes) are contracted to single nodes, and parallel arrows are counted.


MAX_ARROWS = 10_000_000  # the maximum number of contracted arrows


@dataclass(frozen=True)
class Quotient:
    """A graph of boxes, which are groups of nodes.

    Attributes:
        boxes: The names of the boxes.
        arrows: The arrows between boxes, `[arrow, 2]`: the indices of the parent box and of the child box.
        counts: The number of arrows of the ground graph that each arrow represents, `[arrow]`.
    """

    _shapes = "boxes: any box; arrows: int<box arrow 2; counts: int arrow"

    boxes: tuple[str, ...]
    arrows: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def acyclic(self) -> bool:
        """True if the graph of the boxes has no cycle."""
        import networkx as nx

        return bool(nx.is_directed_acyclic_graph(self.to_networkx()))

    def to_networkx(self) -> nx.DiGraph:
        """The graph of the boxes as a networkx graph; its edges have the attribute `count`."""
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from(self.boxes)
        graph.add_edges_from(
            (self.boxes[i], self.boxes[j], {"count": int(count)})
            for (i, j), count in zip(self.arrows.tolist(), self.counts.tolist(), strict=True)
        )
        return graph


def shrink(
    ground: GroundGraph, boxes: Mapping[str, str] | Callable[[str], str], selection: NodeSelection = ALL_NODES
) -> Quotient:
    """Contract each box to one node: arrows inside a box are removed, and parallel arrows are counted.

    `boxes` maps the name of a node, or of several nodes, to that of their box. A node that is not in a mapping is its
    own box.
    """
    if callable(boxes):
        naming = boxes
    else:
        if not isinstance(boxes, Mapping):
            raise BNetError("boxes", expected="a mapping from names, or a function of a name", actual=boxes)
        given = check_mapping("boxes", boxes)
        mapping = {ground.name(node): given[name] for name in given for node in find_family(ground, name).nodes}
        naming = lambda name: mapping.get(name, name)  # noqa: E731
    arrows = ground.count_arrows(selection)
    if arrows > MAX_ARROWS:
        hint = "Select fewer words or slices"
        raise BudgetError("quotient graph", expected=f"at most {MAX_ARROWS} arrows", actual=arrows, hint=hint)
    nodes = [
        node
        for group in ground.template.groups
        if ground.is_selected(group, selection)
        for node in ground.select_nodes(group, selection).tolist()
    ]
    label = np.full(len(ground), -1, dtype=np.int64)
    order: dict[str, int] = {}
    for node in nodes:
        name = naming(ground.name(node))
        if not isinstance(name, str) or not name:
            raise BNetError("boxes", expected="the name of a box, a string", actual=name)
        label[node] = order.setdefault(name, len(order))
    num_boxes = len(order)
    codes = [
        label[sources] * num_boxes + label[targets] for _, sources, targets in ground.arrows(selection) if len(sources)
    ]
    joined = np.concatenate(codes) if codes else np.zeros(0, dtype=np.int64)
    unique, counts = np.unique(joined, return_counts=True)
    pairs = np.stack([unique // max(num_boxes, 1), unique % max(num_boxes, 1)], axis=1)
    is_outer = pairs[:, 0] != pairs[:, 1]
    return Quotient(tuple(order), pairs[is_outer], counts[is_outer])
