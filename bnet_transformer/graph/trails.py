"""Trails, separators and cuts: along which nodes one node tells of another, and which nodes stand between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bnet_transformer.errors import BudgetError
from bnet_transformer.graph.ground import Ground, Selection
from bnet_transformer.graph.separation import Question, cuts, determined, ids_of, marks, roll, separated, thinned
from bnet_transformer.graph.walk import ancestors, descendants

if TYPE_CHECKING:
    import networkx as nx

LIMIT = 2_000_000
FEW = 4


@dataclass(frozen=True)
class Trail:
    """A trail from one node to another: the nodes, and for each step whether it goes with the arrow."""

    nodes: tuple[str, ...]
    forward: tuple[bool, ...]

    @property
    def colliders(self) -> tuple[str, ...]:
        """The nodes at which two arrows meet; they are open by what is given."""
        steps = zip(self.nodes[1:], self.forward, self.forward[1:], strict=False)
        return tuple(node for node, into, out in steps if into and not out)

    def __len__(self) -> int:
        return len(self.forward)

    def __str__(self) -> str:
        steps = ((" -> " if f else " <- ") + node for f, node in zip(self.forward, self.nodes[1:], strict=True))
        return self.nodes[0] + "".join(steps)

    def _repr_html_(self) -> str:
        return f"<code>{str(self).replace('<', '&lt;').replace('>', '&gt;')}</code>"


def active_trail(ground: Ground, question: Question, functions: Collection[int] = ()) -> Trail | None:
    """A shortest active trail from x to y given others, or None where they are separated (with these `functions`)."""
    if separated(ground, [question], functions)[0]:
        return None
    thin = thinned(ground, [question.nodes])
    small = thin.surgery(ground)
    x, y, given = (set(thin.numbers([part])[0]) for part in (question.x, question.y, question.given))
    opened = given | set(ancestors(small, given))
    cut = cuts(small, small, [small.cut], [small.rows])
    blocked = set(ids_of(determined(small, marks(small, 1, [given]), cut, functions)).tolist())
    came = {(node, True): (node, True) for node in sorted(x)}  # whence the ball came; where it starts, from there
    queue = deque(came)
    while queue:
        state = queue.popleft()
        node, rising = state
        if node in y and node not in blocked:
            steps = [state]
            while came[steps[-1]] != steps[-1]:
                steps.append(came[steps[-1]])
            names = tuple(ground.name(thin.name(node)) for node, _ in reversed(steps))
            return Trail(names, tuple(not rising for _, rising in reversed(steps[:-1])))
        after: list[tuple[int, bool]] = []
        if (rising and node not in blocked) or (not rising and node in opened):
            after += [(parent, True) for parent in small.parents(node)]
        if node not in blocked:
            after += [(child, False) for child in small.children(node)]
        for step in after:
            if step not in came:
                came[step] = state
                queue.append(step)
    return None


def minimal_separator(ground: Ground, x: frozenset[int], y: frozenset[int]) -> list[int] | None:
    """A set of nodes that separates x from y and of which no part does; None where an arrow joins them.

    It is the part of their ancestors that balls from x meet, and of that part what balls from y meet
    (van der Zander and Liskiewicz 2020).
    """
    above = sorted({*x, *y, *ancestors(ground, x), *ancestors(ground, y)})
    inside, cut = marks(ground, 1, [above]), cuts(ground, ground, [ground.cut], [ground.rows])
    sources, targets = marks(ground, 1, [x]), marks(ground, 1, [y])
    given = inside & ~sources & ~targets
    met = roll(ground, sources, given, given, cut, inside)
    if (met & targets).any():
        return None
    given &= met
    given &= roll(ground, targets, given, given, cut, inside)
    found: list[int] = ids_of(given).tolist()
    return found


def minimal_cut(ground: Ground, x: int, y: int, limit: int = LIMIT) -> list[int] | None:
    """A smallest set of nodes that every path of arrows from x to y meets; None where an arrow joins them.

    It is sought among few words first: a smallest cut of a part of the graph that cuts the whole is a smallest one.
    """
    import networkx as nx

    if y in ground.children(x):
        return None
    count, most = FEW, max(ground.words.values(), default=0)
    while True:
        graph = _between(ground, x, y, count, limit)
        cut = sorted(nx.minimum_node_cut(graph, x, y)) if x in graph and nx.has_path(graph, x, y) else []
        if count >= most or y not in descendants(ground.surgery({*ground.cut, *cut}), [x]):
            return cut
        count *= 2


def _between(ground: Ground, x: int, y: int, count: int, limit: int) -> nx.DiGraph:
    """The arrows on paths from x to y among the first words and those of x and y."""
    import networkx as nx

    own = {stack: set(range(min(count, size))) for stack, size in ground.words.items()}
    for node in (x, y):
        family, index = ground.place(node)
        if family.words is not None:
            own[family.words].add(index[-1])
    selection = Selection(words={stack: sorted(words) for stack, words in own.items()})
    between = np.zeros(len(ground), dtype=bool)
    between[list({x, *descendants(ground, [x])} & {y, *ancestors(ground, [y])})] = True
    if (arrows := ground.count_arrows(selection)) > limit:
        got, allowed = f"{arrows} of {count} words", "limit=, for a slow search"
        raise BudgetError("minimal cut", expected=f"at most {limit} arrows", got=got, allowed=allowed)
    graph = nx.DiGraph()
    for _, sources, targets in ground.arrows(selection):
        inside = between[sources] & between[targets]
        graph.add_edges_from(zip(sources[inside].tolist(), targets[inside].tolist(), strict=True))
    return graph
