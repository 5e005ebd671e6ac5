"""The state of one sentence: its tensors, its interventions and its evidence; from these, its model and its values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from bnet_transformer._core.checks import check_float, check_int, check_mapping
from bnet_transformer._core.tokens import Labels, as_labels
from bnet_transformer.compiler.module import CompiledModule
from bnet_transformer.data.encode import EncodedSentence, Tokens, encode_value
from bnet_transformer.declare import Network
from bnet_transformer.errors import BNetError, EvidenceError, unknown_name_error
from bnet_transformer.graph import GroundGraph, NodeSelection, find_family
from bnet_transformer.graph.queries import parse_names
from bnet_transformer.inference.intervention_values import (
    RelativeValues,
    expand_names,
    is_relative,
    iter_relative_batches,
    resolve_value,
)
from bnet_transformer.inference.node_evaluator import NodeEvaluator
from bnet_transformer.inference.query import Query
from bnet_transformer.inference.selection import parse_indices, parse_slices, parse_words
from bnet_transformer.reference import ATOL, BUDGET, AttentionRow, GroundModel
from bnet_transformer.reference.node_tables import check_discrete_node


@dataclass(frozen=True, eq=False, repr=False)
class SentenceState:
    """The state of a `Sentence`: the argument of every function that computes a query about it.

    The state is frozen: `with_interventions` and `with_evidence` return a new state. `model` and `evaluator` are
    computed from the fields on first use.

    Args:
        module: The compiled net, in evaluation mode.
        encoded: The sentence as tensors.
        interventions: The value or the attention row to which `do` sets each node, by ground id.
        evidence: The observed value of each node, by ground id.
        previous: The evaluator before the last `do` or evidence; values that these do not change are reused.

    >>> import bnet_transformer as bt
    >>> state = bt.bayesuvius(dim=4).sentence("the cat sat").do(c=1).state
    >>> len(state.ground), state.interventions, state.tokens
    (19, {0: tensor(1)}, {'': ('the', 'cat', 'sat')})
    """

    module: CompiledModule
    encoded: EncodedSentence
    interventions: Mapping[int, Tensor | AttentionRow] = field(default_factory=dict)
    evidence: Mapping[int, Tensor] = field(default_factory=dict)
    previous: NodeEvaluator | None = None

    @property
    def network(self) -> Network:
        """The declaration with its parameters."""
        return self.module.network

    @property
    def tokens(self) -> Tokens:
        """The tokens of each stack."""
        return self.encoded.tokens

    @property
    def ground(self) -> GroundGraph:
        """The ground graph after all interventions."""
        return self.model.ground

    @cached_property
    def model(self) -> GroundModel:
        """The ground model after all interventions: ground graph, inputs, set values."""
        ground = GroundGraph(self.network.graph, self.encoded.word_counts)
        return GroundModel(self.network, ground, self.encoded.given).surgery(self.interventions)

    @cached_property
    def evaluator(self) -> NodeEvaluator:
        """The evaluator of nodes; it computes each node group once."""
        values = self.network.parameters.values()
        if values and all(value.is_meta for value in values):
            raise BNetError("net: its parameters are on the device meta and have no values")
        return NodeEvaluator(self.module, self.model, self.evidence, self.previous)

    def drop_previous(self) -> SentenceState:
        """The same state with its computed values, without those of the state before it, which then can be freed."""
        state = replace(self, previous=None)
        evaluator = replace(self.evaluator, previous=None)
        vars(state).update(model=self.model, evaluator=evaluator)
        return state

    def resolve_interventions(self, nodes: Mapping[str, object]) -> dict[int, Tensor | AttentionRow]:
        """The values to which nodes are set, by ground id.

        Args:
            nodes: A mapping from a name, group, role or pattern to a value that `Sentence.do` accepts.

        Returns:
            A value or an attention row for each node.
        """
        requested = expand_names(self.model, "do", nodes)
        relative = {node: value for node, value in requested.items() if is_relative(value)}
        result = {n: resolve_value(self.model, n, value) for n, value in requested.items() if n not in relative}
        # A relative value uses the value of a node after all other interventions of the same call.
        previous = self.evaluator if relative else None
        for batch in iter_relative_batches(self.model, relative) if relative else ():
            if batch:
                evidence = {node: value for node, value in self.evidence.items() if node not in result}
                interventions = {**self.interventions, **result}
                state = replace(self, interventions=interventions, evidence=evidence, previous=previous)
                resolve_relative, previous = RelativeValues(state.model, state.evaluator.value), state.evaluator
                result |= {node: resolve_relative(node, relative[node]) for node in batch}
        return result

    def with_interventions(self, nodes: Mapping[str, object]) -> SentenceState:
        """The state after `do`.

        Args:
            nodes: A mapping from a name, group, role or pattern to a value that `Sentence.do` accepts.

        Returns:
            A state with these interventions and those of this state; a new intervention on a node replaces the old one.

        Raises:
            EvidenceError: A node has evidence.
        """
        interventions = self.resolve_interventions(nodes)
        self._check_disjoint(interventions, self.evidence)
        return replace(self, interventions={**self.interventions, **interventions}, previous=self.evaluator)

    def without_interventions(self, names: Collection[str] = ()) -> SentenceState:
        """The state without some interventions.

        Args:
            names: Names, groups, roles or patterns of the nodes whose interventions are removed; all if empty.

        Returns:
            The new state.

        Raises:
            BNetError: These nodes have no intervention.
        """
        nodes = {node for name in names for node in find_family(self.ground, name).nodes} or set(self.interventions)
        if not nodes & self.interventions.keys():
            expected = "the name of a node that is set by do"
            raise BNetError("undo", expected=expected, actual=", ".join(names) or "a sentence without interventions")
        interventions = {node: value for node, value in self.interventions.items() if node not in nodes}
        return replace(self, interventions=interventions, previous=None)

    def with_evidence(self, nodes: Mapping[str, object] | None) -> SentenceState:
        """The state with more evidence.

        Args:
            nodes: A mapping from a name or a pattern to a value, a state or a label, for each of its nodes or one for
                all; None for no further evidence.

        Returns:
            A state with this evidence and that of this state.

        Raises:
            EvidenceError: A node is set, or has different evidence.
        """
        ids = expand_names(self.model, "evidence", check_mapping("evidence", nodes))
        self._check_disjoint(self.interventions, ids)
        evidence = {node: encode_value(self.model, node, value, evidence=True) for node, value in ids.items()}
        for node, value in evidence.items():
            if node in self.evidence and not torch.equal(value, self.evidence[node]):
                name, old = self.ground.name(node), self.evidence[node].tolist()
                raise EvidenceError(f"{name}: two different observed values, {old} and {value.tolist()}")
        state = replace(self, evidence={**self.evidence, **evidence}, previous=vars(self).get("evaluator"))
        vars(state)["model"] = self.model  # evidence changes no arrow, so both states have the same model
        return state

    def _check_disjoint(self, interventions: Collection[int], evidence: Collection[int]) -> None:
        """Raise an error for an intervention and evidence on the same node."""
        for node in set(interventions) & set(evidence):
            raise EvidenceError(f"{self.ground.name(node)}: set it by do or observe it, not both")

    def query(self, nodes: Collection[int] = (), budget: int = BUDGET, atol: float = ATOL) -> Query:
        """A query about probabilities, given the evidence of this state.

        Args:
            nodes: The requested nodes, by ground id.
            budget: The maximum number of joint states of choices.
            atol: The absolute tolerance of evidence on nodes that are functions of their parents.

        Returns:
            The query.
        """
        limits = check_int("budget", budget), check_float("atol", atol, minimum=0)
        return Query(self.module, self.model, self.evidence, tuple(nodes), *limits)

    def posterior_query(self, name: object, evidence: Mapping[str, object] | None, budget: int, atol: float) -> Query:
        """The query of a posterior.

        Args:
            name: The name of a discrete node, or several names.
            evidence: Evidence in addition to that of this state.
            budget: The maximum number of joint states of choices.
            atol: The absolute tolerance of evidence on nodes that are functions of their parents.

        Returns:
            The query.
        """
        nodes = [self.ground.id(item) for item in parse_names("name", name)]
        if not nodes:
            raise BNetError("name", expected="the name of a node, or several names")
        query = self.with_evidence(evidence).query(nodes, budget, atol)
        for node in nodes:
            check_discrete_node(self.model, node)
        return query

    def marginal_map_query(
        self, names: object, evidence: Mapping[str, object] | None, budget: int, atol: float
    ) -> Query:
        """The query of a marginal MAP: discrete nodes by name, node group, role or pattern.

        Args:
            names: One name or several; nodes of a group or a pattern that are set by `do` are left out.
            evidence: Evidence in addition to that of this state.
            budget: The maximum number of joint states of choices.
            atol: The absolute tolerance of evidence on nodes that are functions of their parents.

        Returns:
            The query.
        """
        nodes: list[int] = []
        for name in parse_names("nodes", names):
            matches = find_family(self.ground, name).nodes
            nodes += matches if len(matches) == 1 else [node for node in matches if node not in self.model.do]
        if not nodes:
            raise BNetError("nodes", expected="at least one node that is not set by do")
        for node in nodes:
            check_discrete_node(self.model, node)
        return self.with_evidence(evidence).query(dict.fromkeys(nodes), budget, atol)

    def selection(
        self,
        *,
        weights: bool = True,
        slices: int | Collection[int] | None = None,
        words: object = None,
        heads: int | Collection[int] | None = None,
    ) -> NodeSelection:
        """A part of the ground graph.

        Args:
            weights: Whether selectors and weights are included.
            slices: The indices of the included slices; None for all.
            words: The included words, by index or as words, or a mapping from stack to these; None for all.
            heads: The indices of the included heads; None for all.

        Returns:
            The selection of nodes.
        """
        chosen = None if slices is None else parse_slices(slices, self.network)
        sizes, plates, selected_words = self.network.graph.plate_sizes, {}, {}
        if heads is not None:
            if "head" not in sizes:
                raise BNetError("heads: the net has no plate of heads")
            plates["head"] = parse_indices("heads", heads, sizes["head"])
        by_stack = words if isinstance(words, Mapping) else dict.fromkeys(self.tokens, words)
        for stack, selected in by_stack.items():
            if stack not in self.tokens:
                raise unknown_name_error("stack", stack, self.tokens)
            if selected is not None:
                selected_words[stack] = parse_words(self.tokens[stack], selected)
        return NodeSelection(chosen, selected_words, plates, weights)

    def labels(self, node: int) -> Labels | None:
        """The labels of the states of a node: its labels, words of the sentence or words of the vocabulary.

        Args:
            node: The ground id of the node.

        Returns:
            The labels; None for a node without labels.
        """
        network, spec = self.network, self.model.spec(node)
        if spec.tpm.kind != "discrete":
            return None
        if spec.tpm.states is None:
            return as_labels(self.tokens[network.get_source_stack(spec)])
        labels = getattr(spec.tpm, "labels", None)
        if labels is None and not network.graph.out_edges[spec.group.index]:
            labels = network.vocabularies.get(spec.group.stack)
        return None if labels is None or len(labels) != spec.tpm.states else as_labels(labels)
