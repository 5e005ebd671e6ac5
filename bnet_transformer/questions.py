"""The questions that a sentence answers: of structure, of probability, of what is read, of what would have been.

`Sentence` is made of these and of what it holds; each is one call to the room that knows.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer import asking, graph, inference, reference
from bnet_transformer.errors import BNetError, mapping, number, one_of, unknown, whole
from bnet_transformer.graph import Ground, Quotient, Selection, Trail
from bnet_transformer.graph.separation import Question
from bnet_transformer.graph.trails import LIMIT
from bnet_transformer.inference import CorpusTan, Counterfactual, Reads, Samples, Tan, TanTree
from bnet_transformer.intake import Intake
from bnet_transformer.tpm import Given

if TYPE_CHECKING:
    from bnet_transformer.reference import World

Names = str | Collection[str]


@dataclass(frozen=True)
class Separation:
    """Whether nodes are separated; true or false as it is.

    `dependence` is the greatest `|P(x, y | given) - P(x | given) P(y | given)|`, where it was asked for (`verify=`).
    """

    separated: bool
    x: tuple[str, ...]
    y: tuple[str, ...]
    given: tuple[str, ...]
    deterministic: bool = False
    dependence: float | None = field(default=None)

    def __bool__(self) -> bool:
        return self.separated

    def _repr_html_(self) -> str:
        sign = "⊥" if self.separated else "⊥̸"
        return f"<p>{', '.join(self.x)} {sign} {', '.join(self.y)} | {', '.join(self.given) or 'nothing'}</p>"


class Structure(abc.ABC):
    """Questions of structure: they need the ground graph alone."""

    @property
    @abc.abstractmethod
    def ground(self) -> Ground:
        """The ground graph on integers, after surgery: counts, arrow arrays, names."""

    @property
    @abc.abstractmethod
    def _world(self) -> World: ...

    def parents(self, name: str) -> list[str]:
        """The nodes with an arrow into this one."""
        return self._named(self.ground.parents(self.ground.id(name)))

    def children(self, name: str) -> list[str]:
        """The nodes to which this one has an arrow."""
        return self._named(self.ground.children(self.ground.id(name)))

    def ancestors(self, *names: str) -> list[str]:
        """All from which a path of arrows leads to one of these nodes."""
        return self._named(graph.ancestors(self.ground, map(self.ground.id, names)))

    def descendants(self, *names: str) -> list[str]:
        """All to which a path of arrows leads from one of these nodes."""
        return self._named(graph.descendants(self.ground, map(self.ground.id, names)))

    def blanket(self, name: str) -> list[str]:
        """The Markov blanket: parents, children, and the children's other parents."""
        return self._named(graph.blanket(self.ground, self.ground.id(name)))

    def topological_order(self) -> list[str]:
        """All nodes, parents before children."""
        return self._named(graph.topological_order(self.ground).tolist())

    def shrink(self, boxes: Mapping[str, str] | Callable[[str], str], *, weights: bool = False) -> Quotient:
        """The graph with each box of nodes shrunk to one; `boxes` maps a node's name to its box."""
        one_of("weights", weights, (True, False))
        return graph.shrink(self.ground, boxes, Selection(weights=weights))

    def separated(
        self, x: Names, y: Names, given: Names = (), *, deterministic: bool = False, verify: bool = False
    ) -> Separation:
        """Whether the graph separates x from y given others (names, or several).

        Sound, and not complete where TPMs are deterministic: `deterministic=True` closes `given` under the nodes that
        it determines (D-separation). Roots count as free, words and weights among them. `verify=True` enumerates the
        choices of a small net and says how dependent x and y are in its numbers. Evidence is given only if named.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> bool(s.separated("q_0_0", "k_0_1")), bool(s.separated("q_0_0", "k_0_1", given=["W_q_0", "x_0_0"]))
        (False, True)
        """
        one_of("deterministic", deterministic, (True, False))
        one_of("verify", verify, (True, False))
        question = self._question(x, y, given)
        parts = tuple(sorted(part) for part in (question.x, question.y, question.given))
        told = bool(graph.separated(self.ground, [question], self._functions(deterministic))[0])
        dependence = inference.dependence(self._world, parts[0], parts[1], parts[2]) if verify else None
        left, right, known = (tuple(self._named(part)) for part in parts)
        return Separation(told, left, right, known, deterministic, dependence)

    def separations(self, questions: Sequence[Sequence[Names]], *, deterministic: bool = False) -> NDArray[np.bool_]:
        """`separated` for many questions `(x, y)` or `(x, y, given)` at once, some thousands a second."""
        one_of("deterministic", deterministic, (True, False))
        if isinstance(questions, str) or not isinstance(questions, Sequence):
            raise BNetError("questions", expected="a list of (x, y) or (x, y, given)", got=questions)
        for each in questions:
            if isinstance(each, str) or not 2 <= len(each) <= 3:
                raise BNetError("question", expected="(x, y) or (x, y, given)", got=each)
        asked = [self._question(*each) for each in questions]
        return graph.separated(self.ground, asked, self._functions(deterministic))

    def minimal_separator(self, x: Names, y: Names) -> list[str] | None:
        """Nodes that separate x from y, none of which can be left out; None where an arrow joins x and y."""
        question = self._question(x, y)
        found = graph.minimal_separator(self.ground, question.x, question.y)
        return None if found is None else self._named(found)

    def active_trail(self, x: Names, y: Names, given: Names = ()) -> Trail | None:
        """A shortest trail along which x tells of y, given others; None where they are separated."""
        return graph.active_trail(self.ground, self._question(x, y, given))

    def reaches(self, x: str, y: str) -> bool:
        """Whether a path of arrows leads from x to y.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4, slices=4, mask="causal").sentence("the cat sat on")
        >>> s.reaches("x_0_1", "x_4_3"), s.reaches("x_0_3", "x_4_1")
        (True, False)
        """
        return graph.reaches(self.ground, self.ground.id(x), self.ground.id(y))

    def minimal_cut(self, x: str, y: str, *, limit: int = LIMIT) -> list[str] | None:
        """A smallest set of nodes on every path of arrows from x to y; None where an arrow joins them."""
        source, target = self.ground.id(x), self.ground.id(y)
        if source == target:
            raise BNetError("y", expected=f"another node than {x}", got=y)
        found = graph.minimal_cut(self.ground, source, target, whole("limit", limit))
        return None if found is None else self._named(found)

    def _question(self, x: Names, y: Names, given: Names = ()) -> Question:
        """A question of separation by numbers, refused where a node stands on two sides."""
        parts = {"x": _several("x", x), "y": _several("y", y), "given": _several("given", given)}
        ids = {what: frozenset(map(self.ground.id, names)) for what, names in parts.items()}
        for one, other in (("x", "y"), ("x", "given"), ("y", "given")):
            for node in sorted(ids[one] & ids[other]):
                name = self.ground.name(node)
                raise BNetError(f"separation of {name}", expected="a node on one side", got=f"it in {one} and {other}")
        for what in ("x", "y"):
            if not ids[what]:
                raise BNetError(what, expected="at least one node", got="none")
        return Question(ids["x"], ids["y"], ids["given"])

    def _functions(self, deterministic: bool) -> frozenset[int]:
        """The families that are functions of their parents, where they count."""
        members = self._world.network.members if deterministic else ()
        kept = (m for m in members if m.tpm.kind == "deterministic" and not isinstance(m.tpm, Given))
        return frozenset(member.family.index for member in kept)

    def _named(self, nodes: Sequence[int]) -> list[str]:
        return [self.ground.name(node) for node in nodes]


class Questions(Structure):
    """Questions of numbers: exact, with a stated budget of joint states."""

    net: Any
    _intake: Intake
    _seen: dict[int, Tensor]

    def posterior(
        self,
        name: str | Sequence[str],
        evidence: Mapping[str, object] | None = None,
        *,
        budget: int = reference.BUDGET,
        atol: float = reference.ATOL,
    ) -> Tensor:
        """`P(node | evidence)` for a discrete node: `[states]`; what the sentence observes counts as well.

        Of several nodes it is the joint posterior, a dim for each in their order.

        Exact, over at most `budget` joint states: of the choices that one node hangs on, which are eliminated, or of
        all, where choices of words meet. Evidence on a node that is a function of its parents must be reproduced
        within `atol`.
        """
        nodes = [self.ground.id(each) for each in _several("name", name)]
        if not nodes:
            raise BNetError("name", expected="a node, or several", got="none")
        seen = self._with(mapping("evidence", evidence))._seen
        for node in nodes:
            asking.must_be_discrete(self._world, node)
        module, limit = self.net._evaluated, whole("budget", budget)
        return inference.joint_posterior(module, self._world, nodes, seen, limit, number("atol", atol))

    def sample(self, n: int = 1, evidence: Mapping[str, object] | None = None, *, seed: int = 0) -> Samples:
        """n draws of every random node, given the evidence and what the sentence observes."""
        seen = self._with(mapping("evidence", evidence))._seen
        count, number_ = whole("n", n), whole("seed", seed, least=0)
        return inference.sample(self.net._evaluated, self._world, seen, count, number_)

    def log_prob(
        self,
        evidence: Mapping[str, object] | None = None,
        *,
        budget: int = reference.BUDGET,
        atol: float = reference.ATOL,
    ) -> Tensor:
        """`log P(evidence)`, with what the sentence observes: a log density, where a node is continuous."""
        seen = self._with(mapping("evidence", evidence))._seen
        limit = whole("budget", budget)
        return inference.joint_log_evidence(self.net._evaluated, self._world, seen, limit, number("atol", atol))

    def reads(
        self,
        slices: str | int | Collection[int] = "all",
        evidence: Mapping[str, object] | None = None,
        *,
        residual: float = 0.5,
        head: int | None = None,
        role: str | None = None,
        method: str = "rollout",
        budget: int = reference.BUDGET,
    ) -> Reads:
        """P(source word | output word) in the Markov chain of attention TPMs: which word was read, over slices.

        `residual` is the share of a step that stays at its word; heads of a plate are averaged unless `head` names one;
        under a selector the products are averaged over its posterior. `method="flow"` is the greatest flow instead.
        """
        stack, chosen = self._slices(slices, role)
        seen = self._with(mapping("evidence", evidence))._seen
        return inference.reads(
            self.net._evaluated,
            self._world,
            seen,
            self._intake.tokens[stack],
            chosen,
            role=role,
            residual=residual,
            head=head,
            method=method,
            budget=whole("budget", budget),
        )

    def tan(self, boxes: str | Mapping[str, str] = "words", *, slice: int = 0, class_box: str | None = None) -> Tan:
        """What a slice is when it is shrunk to boxes: `"words"`, `"roles"`, or a mapping from nodes to boxes."""
        self._slices(slice, None)
        return inference.tan(self.ground, boxes, slice, class_box)

    def tan_tree(
        self,
        slice: int = 0,
        evidence: Mapping[str, object] | None = None,
        *,
        head: int | None = None,
        role: str | None = None,
    ) -> TanTree:
        """The best parent of each word in a slice's attention, and how much of the attention that keeps."""
        read = self.reads(slice, evidence, residual=0.0, head=head, role=role)
        return inference.tan_tree(read.matrix, read.tokens, read.slices[0], read.head)

    def counterfactual(
        self,
        name: str,
        do: Mapping[str, object],
        evidence: Mapping[str, object] | None = None,
        *,
        budget: int = reference.BUDGET,
    ) -> Counterfactual:
        """What a node would have been under `do`, given the evidence and what the sentence observes.

        The noise of a Normal is what was seen less its mean; that of a categorical is Gumbel-max, by convention.
        """
        seen = self._with(mapping("evidence", evidence))._seen
        done = self._set(mapping("do", do))
        return inference.counterfactual(self._world, done, seen, self.ground.id(name), whole("budget", budget))

    def _slices(self, slices: object, role: str | None) -> tuple[str, list[int]]:
        """The stack of which slices are meant, and their numbers."""
        depths = self._world.network.graph.slices
        families = self._world.network.graph.by_stem
        if role is not None and role not in families:
            raise unknown("role", role, families)
        stack = families[role][0].stack if role is not None else next(iter(depths))
        depth = depths.get(stack, 0)
        if isinstance(slices, str):
            one_of("slices", slices, ("all",))
            return stack, list(range(depth))
        asked = [slices] if not isinstance(slices, Collection) else list(slices)
        found = sorted({whole("slice", each, least=0) for each in asked})
        if not found or found[-1] >= depth:
            raise BNetError("slices", expected=f"slices from 0 to {depth - 1}", got=slices)
        return stack, found

    @abc.abstractmethod
    def do(self, nodes: Mapping[str, object] | None = None, /, **named: object) -> Questions:
        """A new sentence in which nodes are set."""

    @abc.abstractmethod
    def _set(self, wanted: Mapping[str, object]) -> dict[int, Tensor]: ...

    @abc.abstractmethod
    def _with(self, evidence: Mapping[str, object]) -> Questions: ...


def tan_of_corpus(
    sentences: Sequence[Questions], classes: object, slice_: int, head: int | None, role: str | None
) -> CorpusTan:
    """The TAN of sentences of one length: boxes are words, and a word's code is the word that it reads most.

    `classes` is a label for each sentence, or a discrete node: its most probable state, given what a sentence observes.
    """
    if len({len(s._intake.tokens[s._slices(slice_, role)[0]]) for s in sentences}) != 1:
        raise BNetError("sentences", expected="sentences of one length, at least one", got="others, or none")
    if isinstance(classes, str):
        for s in sentences:
            if not s._seen:
                wanted = f"evidence (observe) on each sentence, for {classes} is its class"
                raise BNetError("sentences", expected=wanted, got="one without", allowed="classes=, a list of labels")
        labels: list[object] = [int(s.posterior(classes).argmax()) for s in sentences]
        sentences = [s.do({classes: label}) for s, label in zip(sentences, labels, strict=True)]
    else:
        labels = list(classes) if isinstance(classes, Sequence) else []
        if len(labels) != len(sentences):
            raise BNetError("classes", expected=f"{len(sentences)} labels, or a discrete node", got=classes)
    place = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    codes = [s.reads(slice_, residual=0.0, head=head, role=role).matrix.argmax(-1) for s in sentences]
    table = np.stack([each.numpy() for each in codes])
    boxes = [f"word_{i}" for i in range(table.shape[1])]
    return inference.corpus_tan([place[label] for label in labels], table, boxes)


def _several(what: str, names: object) -> tuple[str, ...]:
    """One name or several, as a tuple."""
    if isinstance(names, str):
        return (names,)
    several = tuple(names) if isinstance(names, Collection) and not isinstance(names, Tensor) else (None,)
    if not all(isinstance(name, str) for name in several):
        raise BNetError(what, expected="the name of a node, or several", got=names)
    return several
