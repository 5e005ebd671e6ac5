"""The questions that a sentence answers: of structure, of probability, of what is read, of what would have been.

`Sentence` is made of these and of what it holds; each is one call to the room that knows.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from bnet_transformer import asking, graph, inference, reference, viz
from bnet_transformer._core.distributed import device_of, ranks
from bnet_transformer.errors import BNetError, mapping, one_of, room_for, seed_of, tolerance, unknown, whole
from bnet_transformer.graph import Ground, Selection
from bnet_transformer.inference import CorpusTan, Counterfactual, Inclusion, Samples, SentenceState
from bnet_transformer.network import Network
from bnet_transformer.structure import Names, Separation, Structure, several
from bnet_transformer.tpm.arrays import own_tensor


class Questions(Structure):
    """Questions of the ground graph, and of numbers: exact, with a stated budget of joint states."""

    net: Any
    state: SentenceState

    @property
    @abc.abstractmethod
    def ground(self) -> Ground:
        """The ground graph on integers, after surgery: counts, arrow arrays, names."""

    @property
    def _asked(self) -> Ground:
        return self.ground

    @property
    def _network(self) -> Network:
        return self.state.world.network

    def topological_order(self) -> list[str]:
        """All nodes, parents before children.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> order = s.topological_order()
        >>> order[0], order[-1], len(order)
        ('c', 'x_1_2', 19)
        """
        return self._named(graph.topological_order(self.ground).tolist())

    def shrink(self, boxes: Mapping[str, str] | Callable[[str], str], *, weights: bool = False) -> viz.Quotient:
        """The graph with each box of nodes shrunk to one; `boxes` maps a node's name to its box.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.shrink(lambda name: name[0]).boxes
        ('x', 'q', 'k', 'v')
        """
        one_of("weights", weights, (True, False))
        return viz.drawable(graph.shrink(self.ground, boxes, Selection(weights=weights)), viz.Quotient)

    def separated(
        self,
        x: Names,
        y: Names,
        given: Names = (),
        *,
        deterministic: bool = False,
        verify: bool = False,
        budget: int = reference.BUDGET,
    ) -> Separation:
        """Whether the graph separates x from y given others (names, or several).

        Sound, and not complete where TPMs are deterministic: `deterministic=True` closes `given` under the nodes that
        it determines (D-separation). Roots count as free, words and weights among them. `verify=True` says how
        dependent x and y are in this sentence's numbers: over the states of the choices of a small net, and to first
        order as the words vary. Evidence is given only if named.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> bool(s.separated("q_0_0", "k_0_1")), bool(s.separated("q_0_0", "k_0_1", given=["W_q_0", "x_0_0"]))
        (False, True)
        """
        one_of("verify", verify, (True, False))
        whole("budget", budget)
        told = super().separated(x, y, given, deterministic=deterministic)
        if not verify:
            return told
        left, right, known = ([self.ground.id(name) for name in part] for part in (told.x, told.y, told.given))
        over_choices, over_roots = inference.dependences(self.state.world, left, right, known, budget)
        return replace(told, over_choices=over_choices, over_roots=over_roots)

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
        all, where choices of words meet. Evidence on a node that is a function of its parents must be reproduced: no
        entry may be off by more than `atol + r m`, with m the largest entry, made or seen, of that very node in that
        state, and r the rounding of the net's floating type (0 in float64, 2^-12 in float32).

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> s.posterior("c", evidence={"y_2": "cat"}).shape, s.posterior(["c", "y_0"]).shape
        (torch.Size([2]), torch.Size([2, 3]))
        """
        nodes = [self.ground.id(each) for each in several("name", name)]
        if not nodes:
            raise BNetError("name", expected="a node, or several", got="none")
        query = self.state.with_evidence(mapping("evidence", evidence)).query(nodes, budget, atol)
        for node in nodes:
            asking.must_be_discrete(self.state.world, node)
        return inference.joint_posterior(query, self.state.answers).to(self.state.network.log_dtype)

    def sample(
        self,
        n: int = 1,
        evidence: Mapping[str, object] | None = None,
        *,
        seed: int = 0,
        budget: int = reference.BUDGET,
        atol: float = reference.ATOL,
    ) -> Samples:
        """n draws of every random node, given the evidence and what the sentence observes.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> drawn = s.sample(5, evidence={"y_2": "cat"})
        >>> drawn.states["c"].shape, drawn.states["y_0"].shape
        (torch.Size([5]), torch.Size([5]))
        """
        query = self.state.with_evidence(mapping("evidence", evidence)).query((), budget, atol)
        count, start = whole("n", n), seed_of(seed)
        room_for("draws", 8 * count * len(self.ground), "a smaller n=")
        samples = inference.sample(query, count, start)
        named = {name: self.state.labels(self.ground.id(name)) for name in samples.states}
        return replace(samples, labels={name: labels for name, labels in named.items() if labels is not None})

    def log_prob(
        self,
        evidence: Mapping[str, object] | None = None,
        *,
        budget: int = reference.BUDGET,
        atol: float = reference.ATOL,
    ) -> Tensor:
        """`log P(evidence)`, with what the sentence observes: a log density, where a node is continuous.

        >>> import torch
        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> both, one = s.log_prob({"y_0": "cat", "y_2": "cat"}), s.log_prob({"y_2": "cat"})
        >>> torch.testing.assert_close((both - one).exp(), s.posterior("y_0", {"y_2": "cat"})[1])
        """
        query = self.state.with_evidence(mapping("evidence", evidence)).query((), budget, atol)
        return inference.joint_log_evidence(query)

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
        inclusion: Inclusion | None = None,
    ) -> viz.Reads:
        """P(source word | output word) in the Markov chain of attention TPMs: which word was read, over slices.

        `residual` is the share of a step that stays at its word; heads of a plate are averaged unless `head` names one;
        under a selector the products are averaged over its posterior; `inclusion`, what `bt.inclusion` found, averages
        over the heads that are in. `method="flow"` is the greatest flow instead.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4, slices=2, mask="causal").sentence("the cat sat")
        >>> read = s.reads()
        >>> read.tokens, read.matrix.shape, read.matrix[0, 1:].tolist()   # the first word read nothing behind it
        (('the', 'cat', 'sat'), torch.Size([3, 3]), [0.0, 0.0])
        """
        stack, chosen = asking.slices_that_read(self._network, slices, role)
        query = self.state.with_evidence(mapping("evidence", evidence)).query((), budget)
        found = inference.reads(
            query,
            self.state.tokens[stack],
            chosen,
            role=role,
            residual=residual,
            head=head,
            method=method,
            inclusion=inclusion,
            answers=None if self.state.evidence else self.state.answers,
        )
        return viz.drawable(found, viz.Reads)

    def tan(
        self,
        boxes: str | Mapping[str, str] = "words",
        *,
        slice: int = 0,
        stack: str | None = None,
        class_box: str | None = None,
    ) -> viz.Tan:
        """What a slice is when it is shrunk to boxes: `"words"`, `"roles"`, or a mapping from nodes to boxes.

        `stack` says whose slice, where there are several.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> s.tan("words").kind, s.tan("roles").nearly
        ('no DAG', 'reverse TAN')
        """
        depths = self._network.graph.slices
        if stack is not None and (not isinstance(stack, str) or stack not in depths):
            raise unknown("stack", stack, depths)
        if isinstance(boxes, str) or depths:
            most = asking.depth_of(self._network, stack)
            if whole("slice", slice, least=0) >= most:
                raise BNetError("slice", expected=f"a slice from 0 to {most - 1}", got=slice)
        return viz.drawable(inference.tan(self.ground, boxes, slice, class_box, stack), viz.Tan)

    def tan_tree(
        self,
        slice: int = 0,
        evidence: Mapping[str, object] | None = None,
        *,
        head: int | None = None,
        role: str | None = None,
        budget: int = reference.BUDGET,
    ) -> viz.TanTree:
        """The best parent of each word in a slice's attention, and how much of the attention that keeps.

        >>> import bnet_transformer as bt
        >>> s = bt.bayesuvius(dim=4).sentence("the cat sat")
        >>> found = s.tan_tree()
        >>> len(found.parents), 0 <= found.mass <= 1
        (3, True)
        """
        read = self.reads(slice, evidence, residual=0.0, head=head, role=role, budget=budget)
        return viz.drawable(inference.tan_tree(read.matrix, read.tokens, read.slices[0], read.head), viz.TanTree)

    def counterfactual(
        self,
        name: str,
        do: Mapping[str, object],
        evidence: Mapping[str, object] | None = None,
        *,
        budget: int = reference.BUDGET,
        atol: float = reference.ATOL,
    ) -> Counterfactual:
        """What a node would have been under `do`, given the evidence and what the sentence observes.

        A node may be seen in one way and set in another. The noise of a Normal is what was seen less its mean; that of
        a categorical is Gumbel-max, by convention.

        >>> import bnet_transformer as bt
        >>> net = bt.bayesuvius(dim=4, vocabulary=["the", "cat", "sat"], observe=bt.tpm.Categorical(3))
        >>> s = net.sentence("the cat sat")
        >>> s.counterfactual("y_2", do={"c": 1}, evidence={"y_2": "cat"}).probabilities.shape
        torch.Size([3])
        """
        seen = self.state.with_evidence(mapping("evidence", evidence)).evidence
        done = self.state.resolve_interventions(mapping("do", do))
        limits = whole("budget", budget), tolerance("atol", atol)
        node = self.ground.id(name)
        found = inference.counterfactual(self.state.world, done, seen, node, *limits)
        return replace(found, labels=self.state.labels(node))


def tan_of_corpus(
    sentences: Sequence[Questions], classes: object, slice_: int, head: int | None, role: str | None
) -> CorpusTan:
    """The TAN of sentences of one length: boxes are words, and a word's code is the word that it reads most.

    `classes` is a label for each sentence, or a discrete node: its most probable state, given what a sentence observes,
    which is then seen as well.
    """
    if len({len(s.state.tokens[asking.slices_that_read(s.state.network, slice_, role)[0]]) for s in sentences}) != 1:
        raise BNetError("sentences", expected="sentences of one length, at least one", got="others, or none")
    node = classes if isinstance(classes, str) else None
    for s in sentences if node is not None else ():
        if not s.state.evidence:
            wanted = f"evidence (observe) on each sentence, for {classes} is its class"
            raise BNetError("sentences", expected=wanted, got="one without", allowed="classes=, a list of labels")
    told = _labels(classes, len(sentences)) if node is None else [None] * len(sentences)
    network = sentences[0].net.network
    with ranks(device_of(None, network)) as here:
        data = [(s.state.encoded.given, s.state.evidence) for s in sentences]
        here.assert_same("tan of a corpus", net=network, data=data, settings=(told, node, slice_, head, role))
        mine = here.shard([*zip(sentences, told, strict=True)])
        every = here.all_gather_object([_class_and_codes(s, node, label, slice_, head, role) for s, label in mine])
    found = [every[k % len(every)][k // len(every)] for k in range(len(sentences))]
    labels = told if node is None else [label for label, _ in found]  # those told are this rank's own objects
    place = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    table = np.array([codes for _, codes in found])
    boxes = [f"word_{i}" for i in range(table.shape[1])]
    return inference.corpus_tan([place[label] for label in labels], table, boxes)


def _class_and_codes(
    s: Questions, node: str | None, label: Hashable, slice_: int, head: int | None, role: str | None
) -> tuple[Hashable, list[int]]:
    """The class of a sentence, told or the most probable state of a node, and the word that each word reads most."""
    label = label if node is None else int(s.posterior(node).argmax())
    seen = {node: label} if node is not None and s.ground.id(node) not in s.state.evidence else {}
    codes: list[int] = s.reads(slice_, seen, residual=0.0, head=head, role=role).matrix.argmax(-1).tolist()
    return label, codes


def _listed(told: object) -> list[Any]:
    return list(told) if isinstance(told, Sequence) and not isinstance(told, str) else []


def _labels(classes: object, count: int) -> list[Hashable]:
    """A label for each sentence, from a list, an array or a tensor of them."""
    try:
        told = (own_tensor(classes) if isinstance(classes, Tensor) else classes).tolist()  # type: ignore[attr-defined]
    except (TypeError, AttributeError):
        told = classes
    labels = [each.item() if isinstance(each, Tensor | np.generic) else each for each in _listed(told)]
    if len(labels) != count:
        raise BNetError("classes", expected=f"{count} labels, or a discrete node", got=classes)
    for label in labels:
        if not isinstance(label, str | int | float) or label != label:
            raise BNetError("classes", expected="labels that are names or numbers", got=label)
    return labels
