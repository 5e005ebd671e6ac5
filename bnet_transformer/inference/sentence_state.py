"""What is known of one sentence: its tensors, its interventions, its evidence, and what follows from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from bnet_transformer import asking
from bnet_transformer.compiler.module import Module
from bnet_transformer.data.encode import EncodedSentence, Tokens, encode_value
from bnet_transformer.errors import BNetError, EvidenceError, mapping, tolerance, unknown, whole
from bnet_transformer.graph import Ground, Selection
from bnet_transformer.graph.queries import names_of
from bnet_transformer.inference.node_queries import Answers
from bnet_transformer.inference.query import Query
from bnet_transformer.inference.surgery import OwnValues, expanded, is_own, matching, value_for
from bnet_transformer.network import Network
from bnet_transformer.reference import ATOL, BUDGET
from bnet_transformer.world import Row, World


@dataclass(frozen=True, eq=False, repr=False)
class SentenceState:
    """The state of a `Sentence`, which every function that answers a question about it receives.

    Frozen: `with_interventions` and `with_evidence` return a new state. What follows from the fields (`world`,
    `answers`) is computed once, on first use.

    Args:
        module: The compiled net, in evaluation mode.
        encoded: The sentence as tensors.
        interventions: The value, or the row of attention, that `do` sets each node to, by ground id.
        evidence: The observed value of each node, by ground id.
        before: The answers of the sentence before its last `do`; values that this `do` does not change come from them.

    >>> import bnet_transformer as bt
    >>> state = bt.bayesuvius(dim=4).sentence("the cat sat").do(c=1).state
    >>> len(state.ground), state.interventions, state.tokens
    (19, {0: tensor(1)}, {'': ('the', 'cat', 'sat')})
    """

    module: Module
    encoded: EncodedSentence
    interventions: Mapping[int, Tensor | Row] = field(default_factory=dict)
    evidence: Mapping[int, Tensor] = field(default_factory=dict)
    before: Answers | None = None

    @property
    def network(self) -> Network:
        """The declaration with its parameters."""
        return self.module.network

    @property
    def tokens(self) -> Tokens:
        """The tokens of each stack."""
        return self.encoded.tokens

    @property
    def ground(self) -> Ground:
        """The ground graph after surgery."""
        return self.world.ground

    @cached_property
    def world(self) -> World:
        """The ground graph, the given values and the interventions: the model after surgery."""
        ground = Ground(self.network.graph, self.encoded.words)
        return World(self.network, ground, self.encoded.given).surgery(self.interventions)

    @cached_property
    def answers(self) -> Answers:
        """The values of nodes; each family is computed once."""
        values = self.network.parameters.values()
        if values and all(value.is_meta for value in values):
            raise BNetError("net", expected="parameters with values", got="a net on the device meta, which has none")
        return Answers(self.module, self.world, self.evidence, self.before)

    def resolve_interventions(self, nodes: Mapping[str, object]) -> dict[int, Tensor | Row]:
        """What each node is set to, by ground id.

        Args:
            nodes: For each name, family, role or pattern what `Sentence.do` takes.

        Returns:
            A value or a row of attention for each node.
        """
        wanted = expanded(self.ground, nodes)
        own = {node: value for node, value in wanted.items() if is_own(value)}
        result = {n: value_for(self.world, n, value) for n, value in wanted.items() if n not in own}
        if own:
            # Noise and Mean() use a node's value after all other interventions of the same call.
            evidence = {node: value for node, value in self.evidence.items() if node not in result}
            state = replace(
                self, interventions={**self.interventions, **result}, evidence=evidence, before=self.answers
            )
            own_value = OwnValues(state.world, state.answers.value)
            result |= {node: own_value(node, value) for node, value in own.items()}
        return result

    def with_interventions(self, nodes: Mapping[str, object]) -> SentenceState:
        """The state after `do`.

        Args:
            nodes: For each name, family, role or pattern what `Sentence.do` takes.

        Returns:
            A state with these interventions besides those of this one; of two on one node the later counts.

        Raises:
            EvidenceError: A node has evidence.
        """
        interventions = self.resolve_interventions(nodes)
        for node in interventions.keys() & self.evidence.keys():
            raise EvidenceError(self.ground.name(node), expected="do or evidence on a node, not both", got="both")
        return replace(self, interventions={**self.interventions, **interventions}, before=self.answers)

    def without_interventions(self, names: Collection[str] = ()) -> SentenceState:
        """The state before `do`.

        Args:
            names: Names, families, roles or patterns of the nodes whose interventions go; all, where there are none.

        Raises:
            BNetError: No intervention is on these nodes.
        """
        nodes = {node for name in names for node in matching(self.ground, name)} or set(self.interventions)
        if not nodes & self.interventions.keys():
            raise BNetError("undo", expected="a node that do set", got=", ".join(names) or "none is set")
        rest = {node: value for node, value in self.interventions.items() if node not in nodes}
        return replace(self, interventions=rest, before=None)

    def with_evidence(self, nodes: Mapping[str, object] | None) -> SentenceState:
        """The state with more evidence.

        Args:
            nodes: For each node a value, a state or a label; None for no more.

        Returns:
            A state with this evidence besides that of this one.

        Raises:
            EvidenceError: An intervention, or another value, is on the same node.
        """
        ids = {self.ground.id(name): value for name, value in mapping("evidence", nodes).items()}
        for node in ids.keys() & self.interventions.keys():
            raise EvidenceError(self.ground.name(node), expected="do or evidence on a node, not both", got="both")
        evidence = {node: encode_value(self.world, node, value, evidence=True) for node, value in ids.items()}
        for node, value in evidence.items():
            if node in self.evidence and not torch.equal(value, self.evidence[node]):
                got = f"{value.tolist()} beside {self.evidence[node].tolist()}"
                raise EvidenceError(self.ground.name(node), expected="one piece of evidence for a node", got=got)
        state = replace(self, evidence={**self.evidence, **evidence}, before=None)
        vars(state)["world"] = self.world  # evidence changes no arrow: the cached property holds for both
        return state

    def query(self, nodes: Collection[int] = (), budget: int = BUDGET, atol: float = ATOL) -> Query:
        """A question about probabilities, given the evidence of this state.

        Args:
            nodes: The ground ids of the nodes that are asked for.
            budget: The most joint states of choices that are computed.
            atol: The tolerance of evidence on nodes that are functions of their parents.
        """
        limits = whole("budget", budget), tolerance("atol", atol)
        return Query(self.module, self.world, self.evidence, tuple(nodes), *limits)

    def posterior_query(self, name: object, evidence: Mapping[str, object] | None, budget: int, atol: float) -> Query:
        """The query of a posterior.

        Args:
            name: A discrete node, or several.
            evidence: Evidence besides that of this state.
            budget: The most joint states of choices that are computed.
            atol: The tolerance of evidence on nodes that are functions of their parents.
        """
        nodes = [self.ground.id(each) for each in names_of("name", name)]
        if not nodes:
            raise BNetError("name", expected="a node, or several", got="none")
        query = self.with_evidence(evidence).query(nodes, budget, atol)
        for node in nodes:
            asking.must_be_discrete(self.world, node)
        return query

    def selection(
        self,
        *,
        weights: bool = True,
        slices: int | Collection[int] | None = None,
        words: object = None,
        heads: int | Collection[int] | None = None,
    ) -> Selection:
        """A part of the ground graph.

        Args:
            weights: Whether selectors and weights are in it.
            slices: The slices that are in it; all where None.
            words: The words that are in it, by number or as words, or a mapping from stacks to them; all where None.
            heads: The heads that are in it; all where None.
        """
        chosen = None if slices is None else asking.slices_of(slices, self.network)
        sizes, plates, kept = self.network.graph.sizes, {}, {}
        if heads is not None:
            if "head" not in sizes:
                raise BNetError("heads", expected="a net with a plate of heads", got="a net without one")
            plates["head"] = asking.numbers_of("heads", heads, sizes["head"])
        by_stack = words if isinstance(words, Mapping) else dict.fromkeys(self.tokens, words)
        for stack, wanted in by_stack.items():
            if stack not in self.tokens:
                raise unknown("stack", stack, self.tokens)
            if wanted is not None:
                kept[stack] = asking.places_of(self.tokens[stack], wanted)
        return Selection(chosen, kept, plates, weights)

    def labels(self, node: int) -> tuple[str, ...] | None:
        """What the states of a node are called (labels, or words of the sentence or of the vocabulary), or None.

        Args:
            node: A ground id.
        """
        network, member = self.network, self.world.member(node)
        if member.tpm.kind != "discrete":
            return None
        if member.tpm.states is None:
            return tuple(self.tokens[network.stack_read(member)])
        found = getattr(member.tpm, "labels", None)
        if found is None and not network.graph.out_of[member.family.index]:
            found = network.vocabularies.get(member.family.stack)
        return None if found is None or len(found) != member.tpm.states else tuple(found)
