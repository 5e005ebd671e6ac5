"""Structure queries by name, of the ground graph of a sentence and of the folded graph of a net alike.

A folded node stands for all nodes of a family, in every sentence. What the folded graph separates, each ground graph
separates, given all nodes of the given families. A trail of the folded graph need not be active in a ground graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.errors import BNetError, listed, one_of, whole
from bnet_transformer.graph.ground import Ground
from bnet_transformer.graph.separation import Question, reaches, separated
from bnet_transformer.graph.trails import LIMIT, Trail, active_trail, minimal_cut, minimal_separator
from bnet_transformer.graph.walk import ancestors, blanket, descendants

Names = str | Collection[str]


@dataclass(frozen=True)
class Separation:
    """Whether nodes are separated. True or false as a bool is.

    Args:
        separated: Whether the graph separates `x` from `y`.
        x: Names of nodes.
        y: Names of nodes.
        given: Names of the nodes that are given.
        deterministic: Whether `given` was closed under the nodes that it determines.
        over_choices: With `verify=`, the greatest `|P(x, y | given) - P(x | given) P(y | given)|` over the states of
            the choices, from 0 to 1; None where it was not or cannot be computed.
        over_roots: With `verify=`, the greatest partial correlation to first order as the words vary, from 0 to 1;
            None where it was not or cannot be computed.
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
        """The greater of the two tests; None where none was asked for."""
        return max((test for test in (self.over_choices, self.over_roots) if test is not None), default=None)

    def __bool__(self) -> bool:
        return self.separated

    def marks(self) -> dict[str, str]:
        """What each node is in the question, for `draw(highlight=)`."""
        parts = {"x": self.x, "y": self.y, "given": self.given}
        return {name: part for part, names in parts.items() for name in names}

    def _repr_html_(self) -> str:
        sign = "⊥" if self.separated else "⊥̸"
        test = "" if self.dependence is None else f" (dependence {self.dependence:.3g})"
        return f"<p>{', '.join(self.x)} {sign} {', '.join(self.y)} | {', '.join(self.given) or 'nothing'}{test}</p>"


class StructureQueries:
    """What `BNet` and `Sentence` answer from the graph alone; a node of a net is a family: all its nodes.

    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(dim=4)
    >>> net.parents("x_1"), net.sentence("the cat").parents("q_0_1")
    (['q_0', 'k_0', 'v_0'], ['W_q_0', 'x_0_1'])
    """

    @property
    def _graph(self) -> Ground:
        """The graph."""
        raise NotImplementedError

    @property
    def _functional(self) -> frozenset[int]:
        """The numbers of the families whose nodes are functions of their parents."""
        raise NotImplementedError

    def parents(self, name: str) -> list[str]:
        """The nodes with an arrow into this one.

        Args:
            name: A node.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.parents("x_1_2")
        ['q_0_2', 'k_0_0', 'k_0_1', 'k_0_2', 'v_0_0', 'v_0_1', 'v_0_2']
        """
        return self._names(self._graph.parents(self._graph.id(name)))

    def children(self, name: str) -> list[str]:
        """The nodes to which this one has an arrow.

        Args:
            name: A node.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.children("c")
        ['W_q_0', 'W_k_0', 'W_v_0']
        """
        return self._names(self._graph.children(self._graph.id(name)))

    def ancestors(self, *names: str) -> list[str]:
        """All from which a path of arrows leads to one of these nodes.

        Args:
            *names: Nodes.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.ancestors("q_0_2")
        ['c', 'x_0_2', 'W_q_0']
        """
        return self._names(ancestors(self._graph, map(self._graph.id, names)))

    def descendants(self, *names: str) -> list[str]:
        """All to which a path of arrows leads from one of these nodes.

        Args:
            *names: Nodes.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.descendants("q_0_0", "q_0_2")
        ['x_1_0', 'x_1_2']
        """
        return self._names(descendants(self._graph, map(self._graph.id, names)))

    def blanket(self, name: str) -> list[str]:
        """The Markov blanket: parents, children, and the children's other parents.

        Args:
            name: A node.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.blanket("W_q_0")
        ['c', 'x_0_0', 'x_0_1', 'x_0_2', 'q_0_0', 'q_0_1', 'q_0_2']
        """
        return self._names(blanket(self._graph, self._graph.id(name)))

    def separated(self, x: Names, y: Names, given: Names = (), *, deterministic: bool = False) -> Separation:
        """Whether the graph separates x from y given others; what the folded graph separates, every sentence does.

        Sound, and not complete where TPMs are deterministic. Roots count as free, words and weights among them.

        Args:
            x: A node, or several.
            y: A node, or several.
            given: A node, or several.
            deterministic: Close `given` under the nodes that it determines (D-separation).

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, slices=2)
        >>> bool(net.separated("x_0", "x_2")), bool(net.separated("x_0", "x_2", given=["x_1", "c"]))
        (False, True)
        """
        question = self._question(x, y, given)
        is_separated = bool(separated(self._graph, [question], self._closing(deterministic))[0])
        left, right, known = (tuple(self._names(sorted(part))) for part in (question.x, question.y, question.given))
        return Separation(is_separated, left, right, known, deterministic)

    def separations(self, questions: Sequence[Sequence[Names]], *, deterministic: bool = False) -> NDArray[np.bool_]:
        """`separated` for many questions at once, some thousands a second.

        Args:
            questions: `(x, y)` or `(x, y, given)` for each question.
            deterministic: As in `separated`.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.separations([("q_0_0", "k_0_1"), ("q_0_0", "k_0_1", ["c"])])
        array([False,  True])
        """
        closing = self._closing(deterministic)
        if isinstance(questions, str) or not isinstance(questions, Sequence):
            raise BNetError("questions", expected="a list of (x, y) or (x, y, given)", got=questions)
        for question in questions:
            if isinstance(question, str) or not isinstance(question, Sequence) or not 2 <= len(question) <= 3:
                raise BNetError("question", expected="(x, y) or (x, y, given)", got=question)
        return separated(self._graph, [self._question(*question) for question in questions], closing)

    def minimal_separator(self, x: Names, y: Names) -> list[str] | None:
        """Nodes that separate x from y, none of which can be left out; None where an arrow joins x and y.

        Args:
            x: A node, or several.
            y: A node, or several.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.minimal_separator("x_0_0", "x_1_1")
        ['W_k_0', 'W_v_0', 'k_0_0', 'v_0_0']
        """
        question = self._question(x, y)
        nodes = minimal_separator(self._graph, question.x, question.y)
        return None if nodes is None else self._names(nodes)

    def active_trail(self, x: Names, y: Names, given: Names = (), *, deterministic: bool = False) -> Trail | None:
        """A shortest trail along which x tells of y, given others; None where they are separated.

        Args:
            x: A node, or several.
            y: A node, or several.
            given: A node, or several.
            deterministic: Pass no node that `given` determines.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> print(s.active_trail("q_0_0", "k_0_1"))
        q_0_0 <- W_q_0 <- c -> W_k_0 -> k_0_1
        """
        return active_trail(self._graph, self._question(x, y, given), self._closing(deterministic))

    def reaches(self, x: str, y: str) -> bool:
        """Whether a path of arrows leads from x to y.

        Args:
            x: A node.
            y: A node.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.reaches("x_0_1", "x_1_2"), s.reaches("q_0_1", "x_1_2")
        (True, False)
        """
        return reaches(self._graph, self._graph.id(x), self._graph.id(y))

    def minimal_cut(self, x: str, y: str, *, limit: int = LIMIT) -> list[str] | None:
        """A smallest set of nodes on every path of arrows from x to y; None where an arrow joins them.

        Args:
            x: A node.
            y: A node.
            limit: How many arrows the graph may have.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.minimal_cut("c", "x_1_0")
        ['W_k_0', 'W_v_0', 'q_0_0']
        """
        source, target = self._graph.id(x), self._graph.id(y)
        if source == target:
            raise BNetError("y", expected=f"another node than {x}", got=y)
        nodes = minimal_cut(self._graph, source, target, whole("limit", limit))
        return None if nodes is None else self._names(nodes)

    def _question(self, x: Names, y: Names, given: Names = ()) -> Question:
        """A question of separation by node numbers. A node on two sides is an error."""
        parts = {"x": names_of("x", x), "y": names_of("y", y), "given": names_of("given", given)}
        ids = {part: frozenset(map(self._graph.id, names)) for part, names in parts.items()}
        for one, other in (("x", "y"), ("x", "given"), ("y", "given")):
            for node in sorted(ids[one] & ids[other]):
                name = self._graph.name(node)
                raise BNetError(f"separation of {name}", expected="a node on one side", got=f"it in {one} and {other}")
        for part in ("x", "y"):
            if not ids[part]:
                raise BNetError(part, expected="at least one node", got="none")
        return Question(ids["x"], ids["y"], ids["given"])

    def _closing(self, deterministic: bool) -> frozenset[int]:
        """The families under which the given nodes are closed."""
        one_of("deterministic", deterministic, (True, False))
        return self._functional if deterministic else frozenset()

    def _names(self, nodes: Sequence[int]) -> list[str]:
        return [self._graph.name(node) for node in nodes]


def names_of(what: str, names: object) -> tuple[str, ...]:
    """One name or several, as a tuple.

    Args:
        what: What the names are for, as an error says it.
        names: A string, or several.
    """
    if isinstance(names, str):
        return (names,)
    try:
        return listed(what, names, str)
    except BNetError as error:
        raise BNetError(what, expected="the name of a node, or several", got=names) from error
