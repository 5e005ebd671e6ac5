"""Questions of structure, to the ground graph of a sentence and to the folded graph of a net alike.

A folded node stands for all nodes of a family, in every sentence. What the folded graph separates, each ground graph
does, given all nodes of the families that are given; a trail of the folded graph need not be active in any.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bnet_transformer import graph
from bnet_transformer.errors import BNetError, listed, one_of, whole
from bnet_transformer.graph import Ground, Question, Trail
from bnet_transformer.graph.trails import LIMIT
from bnet_transformer.network import Network

Names = str | Collection[str]


@dataclass(frozen=True)
class Separation:
    """Whether nodes are separated; true or false as it is.

    Where it was asked for (`verify=`), `dependence` is the greater of two tests in the sentence's numbers, each from 0
    to 1 or None where it cannot be made: `over_choices`, the greatest `|P(x, y | given) - P(x | given) P(y | given)|`
    over the states of the choices; `over_roots`, the greatest partial correlation to first order as the words vary.
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
        told = "" if self.dependence is None else f" (dependence {self.dependence:.3g})"
        return f"<p>{', '.join(self.x)} {sign} {', '.join(self.y)} | {', '.join(self.given) or 'nothing'}{told}</p>"


class Structure(abc.ABC):
    """Questions of structure: of a sentence they name ground nodes (`x_1_2`), of a net folded ones (`x_1`)."""

    @property
    @abc.abstractmethod
    def _asked(self) -> Ground:
        """The graph that answers."""

    @property
    @abc.abstractmethod
    def _network(self) -> Network:
        """The declaration, which says what is a function of its parents."""

    def parents(self, name: str) -> list[str]:
        """The nodes with an arrow into this one.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.parents("x_1_2"), s.net.parents("x_1")
        (['q_0_2', 'k_0_0', 'k_0_1', 'k_0_2', 'v_0_0', 'v_0_1', 'v_0_2'], ['q_0', 'k_0', 'v_0'])
        """
        return self._named(self._asked.parents(self._asked.id(name)))

    def children(self, name: str) -> list[str]:
        """The nodes to which this one has an arrow.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.children("c"), s.net.children("x_0")
        (['W_q_0', 'W_k_0', 'W_v_0'], ['q_0', 'k_0', 'v_0'])
        """
        return self._named(self._asked.children(self._asked.id(name)))

    def ancestors(self, *names: str) -> list[str]:
        """All from which a path of arrows leads to one of these nodes.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.ancestors("q_0_2")
        ['c', 'x_0_2', 'W_q_0']
        """
        return self._named(graph.ancestors(self._asked, map(self._asked.id, names)))

    def descendants(self, *names: str) -> list[str]:
        """All to which a path of arrows leads from one of these nodes.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.descendants("q_0_0", "q_0_2")
        ['x_1_0', 'x_1_2']
        """
        return self._named(graph.descendants(self._asked, map(self._asked.id, names)))

    def blanket(self, name: str) -> list[str]:
        """The Markov blanket: parents, children, and the children's other parents.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.net.blanket("q_0")
        ['x_0', 'W_q_0', 'k_0', 'v_0', 'x_1']
        """
        return self._named(graph.blanket(self._asked, self._asked.id(name)))

    def separated(self, x: Names, y: Names, given: Names = (), *, deterministic: bool = False) -> Separation:
        """Whether the graph separates x from y given others (names, or several).

        Sound, and not complete where TPMs are deterministic: `deterministic=True` closes `given` under the nodes that
        it determines (D-separation). Roots count as free, words and weights among them.

        Of a net each name stands for all nodes of a family: separated here, they are in every sentence.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, slices=2)
        >>> bool(net.separated("x_0", "x_2")), bool(net.separated("x_0", "x_2", given=["x_1", "c"]))
        (False, True)
        """
        one_of("deterministic", deterministic, (True, False))
        question = self._question(x, y, given)
        told = bool(graph.separated(self._asked, [question], self._functions(deterministic))[0])
        left, right, known = (tuple(self._named(sorted(part))) for part in (question.x, question.y, question.given))
        return Separation(told, left, right, known, deterministic)

    def separations(self, questions: Sequence[Sequence[Names]], *, deterministic: bool = False) -> NDArray[np.bool_]:
        """`separated` for many questions `(x, y)` or `(x, y, given)` at once, some thousands a second.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.separations([("q_0_0", "k_0_1"), ("q_0_0", "k_0_1", ["c"])])
        array([False,  True])
        """
        one_of("deterministic", deterministic, (True, False))
        if isinstance(questions, str) or not isinstance(questions, Sequence):
            raise BNetError("questions", expected="a list of (x, y) or (x, y, given)", got=questions)
        for each in questions:
            if isinstance(each, str) or not isinstance(each, Sequence) or not 2 <= len(each) <= 3:
                raise BNetError("question", expected="(x, y) or (x, y, given)", got=each)
        asked = [self._question(*each) for each in questions]
        return graph.separated(self._asked, asked, self._functions(deterministic))

    def minimal_separator(self, x: Names, y: Names) -> list[str] | None:
        """Nodes that separate x from y, none of which can be left out; None where an arrow joins x and y.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.minimal_separator("x_0_0", "x_1_1")
        ['W_k_0', 'W_v_0', 'k_0_0', 'v_0_0']
        """
        question = self._question(x, y)
        found = graph.minimal_separator(self._asked, question.x, question.y)
        return None if found is None else self._named(found)

    def active_trail(self, x: Names, y: Names, given: Names = (), *, deterministic: bool = False) -> Trail | None:
        """A shortest trail along which x tells of y, given others; None where they are separated.

        `deterministic=True` asks for one that passes no node which what is given determines.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> print(s.active_trail("q_0_0", "k_0_1"))
        q_0_0 <- W_q_0 <- c -> W_k_0 -> k_0_1
        """
        one_of("deterministic", deterministic, (True, False))
        return graph.active_trail(self._asked, self._question(x, y, given), self._functions(deterministic))

    def reaches(self, x: str, y: str) -> bool:
        """Whether a path of arrows leads from x to y.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4, slices=4, mask="causal").sentence("the cat sat on")
        >>> s.reaches("x_0_1", "x_4_3"), s.reaches("x_0_3", "x_4_1"), s.net.reaches("x_0", "x_4")
        (True, False, True)
        """
        return graph.reaches(self._asked, self._asked.id(x), self._asked.id(y))

    def minimal_cut(self, x: str, y: str, *, limit: int = LIMIT) -> list[str] | None:
        """A smallest set of nodes on every path of arrows from x to y; None where an arrow joins them.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.minimal_cut("c", "x_1_0")
        ['W_k_0', 'W_v_0', 'q_0_0']
        """
        source, target = self._asked.id(x), self._asked.id(y)
        if source == target:
            raise BNetError("y", expected=f"another node than {x}", got=y)
        found = graph.minimal_cut(self._asked, source, target, whole("limit", limit))
        return None if found is None else self._named(found)

    def _question(self, x: Names, y: Names, given: Names = ()) -> Question:
        """A question of separation by numbers, refused where a node stands on two sides."""
        parts = {"x": several("x", x), "y": several("y", y), "given": several("given", given)}
        ids = {what: frozenset(map(self._asked.id, names)) for what, names in parts.items()}
        for one, other in (("x", "y"), ("x", "given"), ("y", "given")):
            for node in sorted(ids[one] & ids[other]):
                name = self._asked.name(node)
                raise BNetError(f"separation of {name}", expected="a node on one side", got=f"it in {one} and {other}")
        for what in ("x", "y"):
            if not ids[what]:
                raise BNetError(what, expected="at least one node", got="none")
        return Question(ids["x"], ids["y"], ids["given"])

    def _functions(self, deterministic: bool) -> frozenset[int]:
        """The families that are functions of their parents, where they count."""
        members = self._network.members if deterministic else ()
        kept = (m for m in members if m.tpm.kind == "deterministic")
        return frozenset(member.family.index for member in kept)

    def _named(self, nodes: Sequence[int]) -> list[str]:
        return [self._asked.name(node) for node in nodes]


class NetStructure(Structure):
    """Questions to the folded graph of a net."""

    network: Network

    @cached_property
    def _asked(self) -> Ground:
        return Ground(self.network.graph.flat, {})

    @property
    def _network(self) -> Network:
        return self.network


def several(what: str, names: object) -> tuple[str, ...]:
    """One name or several, as a tuple."""
    if isinstance(names, str):
        return (names,)
    try:
        return listed(what, names, str)
    except BNetError as error:
        raise BNetError(what, expected="the name of a node, or several", got=names) from error
