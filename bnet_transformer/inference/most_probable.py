"""The most probable joint states of nodes given the evidence: the most probable explanation, and marginal MAP.

The most probable explanation (MPE) of evidence e is `argmax_c P(c, e)` over the joint states c of all latent choices
(Pearl 1988, Probabilistic Reasoning in Intelligent Systems, section 5.3). Marginal MAP maximises over some nodes only
and sums over the others before: `argmax_a sum_b P(a, b, e)`. Its result is in general not a part of the MPE. Both are
returned with the k best joint states (Nilsson 1998).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.naming import EVERY_NODE, count_word_from_start, match_names
from bnet_transformer._core.process import check_memory
from bnet_transformer._core.results import Result
from bnet_transformer._core.tokens import distinguish, name_columns
from bnet_transformer.errors import BudgetError, unknown_name_error
from bnet_transformer.inference import elimination
from bnet_transformer.inference.factor_graph import FactorGraph, build_factor_graph
from bnet_transformer.inference.factors import FactorRequest
from bnet_transformer.inference.plan import Plan, format_nodes
from bnet_transformer.inference.posteriors import (
    check_nodes,
    find_factor_request,
    plan_elimination,
    plan_joint,
    plan_log_evidence,
    raise_impossible_evidence,
)
from bnet_transformer.inference.query import Query
from bnet_transformer.inference.values import SentenceState

UNKNOWN_STATE = -1
MAX_SHOWN = 12  # states of a group in a text


@dataclass(frozen=True)
class GroupStates:
    """The states of one node group in each of the k best joint states.

    Attributes:
        name: The name of the node group, such as `c_0`.
        nodes: The names of its nodes, in the order of the flattened `states`.
        states: The states, `[k, *plates, word]`. Observed and set nodes have their own state; -1 is the state of a node
            that was not requested, or that is set to a vector.
        is_explained: True for the nodes over whose states the probability was maximised, `[*plates, word]`.
        num_states: The number of states of each node.
        labels: The labels of the states; None for states without labels.
        stack: The stack whose words the nodes have; None for nodes without words.
    """

    _shapes = "num_states: size state; labels: any state; states: int<state rank *plates; is_explained: bool *plates"

    name: str
    nodes: tuple[str, ...] = field(repr=False)
    states: Tensor = field(repr=False)
    is_explained: Tensor = field(repr=False)
    num_states: int
    labels: tuple[str, ...] | None = field(default=None, repr=False)
    stack: str | None = None

    @property
    def flat_states(self) -> Tensor:
        """The states, `[k, node]`."""
        return self.states.reshape(len(self.states), -1)

    def format_states(self, k: int) -> list[str]:
        """The labels of the states of all nodes in joint state k; a long list is shortened."""
        labels = [self.format_state(state) for state in self.flat_states[k].tolist() if state != UNKNOWN_STATE]
        return labels if len(labels) <= MAX_SHOWN else [*labels[:MAX_SHOWN], f"… ({len(labels)} nodes)"]

    def format_state(self, state: int) -> str:
        """The label of a state, or its number."""
        return str(state) if self.labels is None else self.labels[state]


@dataclass(frozen=True)
class RankedStates(Result):
    """The k most probable joint states of some nodes given the evidence, the most probable one first.

    `len(result)` is k, which is smaller than the requested count if fewer joint states are possible. Of equally
    probable joint states, the one with smaller states is first; the last ones of a list are the smallest of at most 256
    equally probable joint states that are compared.

    Attributes:
        nodes: The names of the nodes over whose states the probability was maximised.
        states: Their states, `[k, node]`.
        log_probs: `log P(states, evidence)` of each joint state, `[k]`: a log density if an observed node is
            continuous. Nodes that are neither in `nodes` nor observed are summed out.
        log_evidence: `log P(evidence)`.
        groups: The states by node group, with those of observed and set nodes.
        tokens: The tokens of the words of each stack.
        method: `"most_probable"` or `"marginal_map"`.
    """

    _index = "rank"
    _shapes = "nodes: any node; states: int rank node; log_probs: float64 rank; groups.states: int rank *_"

    nodes: tuple[str, ...] = field(repr=False)
    states: Tensor
    log_probs: Tensor
    log_evidence: float
    groups: tuple[GroupStates, ...] = field(repr=False)
    tokens: Mapping[str, tuple[str, ...]] = field(repr=False)
    method: str = "most_probable"

    def __len__(self) -> int:
        """The number k of joint states."""
        return len(self.log_probs)

    def __str__(self) -> str:
        lines = []
        for k, (log_prob, share) in enumerate(zip(self.log_probs.tolist(), self.shares.tolist(), strict=True)):
            groups = (f"{group.name}: {' '.join(group.format_states(k))}" for group in self.groups)
            lines.append(f"{k + 1}. log P = {log_prob:.4f}, share {share:.3g}; {'; '.join(groups)}")
        return "\n".join(lines)

    @property
    def log_shares(self) -> Tensor:
        """`log P(states | evidence)` of each joint state, `[k]`."""
        return self.log_probs - self.log_evidence

    @property
    def shares(self) -> Tensor:
        """The posterior probability `P(states | evidence)` of each joint state, `[k]`."""
        return self.log_shares.exp()

    @cached_property
    def _position_of(self) -> dict[str, tuple[GroupStates, int]]:
        """The group of each node, and its index in the flattened states."""
        return {name: (group, k) for group in self.groups for k, name in enumerate(group.nodes)}

    def __getitem__(self, name: str) -> Tensor:
        """The states of a node or of a node group.

        Args:
            name: The name of a node, such as `"c_0_2"` or `"c_0_-1"`, or of all nodes of a group, such as `"c_0"`.

        Returns:
            The state `[k]` of the node, or the states `[k, *plates, word]` of the nodes of the group, where observed
            and set nodes have their own state, and -1 is the state of a node that was not requested or is set to a
            vector.

        Raises:
            UnknownNameError: The result has no such node or group.
        """
        group, index = self._find(name)
        return group.states if index is None else group.flat_states[:, index]

    def _find(self, name: Any) -> tuple[GroupStates, int | None]:
        """The group of a node and its index in the flattened states; without an index for all nodes of a group."""
        matches = list[GroupStates]()
        for group in self.groups if isinstance(name, str) else ():
            node = count_word_from_start(name, 0 if group.stack is None else group.states.shape[-1])
            if self._position_of.get(node, (None, 0))[0] is group:
                return self._position_of[node]
            if name != EVERY_NODE and len(match_names(name, group.nodes)) == len(group.nodes):
                matches.append(group)
        if len(matches) == 1:
            return matches[0], None
        raise unknown_name_error("node", name, [*(group.name for group in self.groups), *self.nodes])

    def labels(self, name: str) -> list[str]:
        """The labels of the states of a node, one for each of the k joint states.

        Args:
            name: The name of a node.

        Returns:
            k labels; numerals for states without labels.
        """
        group, index = self._find(name)
        if index is None:
            raise unknown_name_error("node", name, self.nodes)
        return distinguish(group.format_state(state) for state in self[name].tolist())

    def _get_columns(self) -> Mapping[str, Any]:
        columns: dict[str, Any] = {"rank": range(1, len(self) + 1), "log_prob": self.log_probs, "share": self.shares}
        # The column of a node with the name of another column is marked, as in `share (node)`.
        names = name_columns(self.nodes, columns)
        return columns | {column: self.labels(name) for column, name in zip(names, self.nodes, strict=True)}

    @property
    def caption(self) -> str:
        """The numbers of joint states and of nodes, in one line."""
        names = ", ".join([*self.nodes[:3], *(["…"] if len(self.nodes) > 3 else [])])
        return f"{len(self)} most probable joint states of {len(self.nodes):,} nodes: {names}"


def plan_ranked_states(state: SentenceState, query: Query, count: int, method: str) -> Plan[RankedStates]:
    """The plan of the `count` most probable joint states of the nodes of a query.

    Args:
        state: The sentence, for labels and tokens.
        query: The nodes, the evidence and the limits; observed nodes keep their state.
        count: The maximum number of joint states.
        method: `"most_probable"` or `"marginal_map"`.

    Raises:
        BudgetError: There are more joint states than the budget.
        EvidenceError: The evidence is impossible; the error names the first impossible observation. `run` raises it.
    """
    maximised = query.without_input_evidence()
    maximised = replace(maximised, nodes=tuple(node for node in maximised.nodes if node not in maximised.fixed))
    evidence = plan_log_evidence(replace(maximised, nodes=()))
    sizes = [query.model.count_states(node) for node in maximised.nodes]
    count = min(count, math.prod(sizes))
    best = plan_marginal_map(maximised, count) if maximised.nodes else None

    def compute() -> RankedStates:
        log_evidence = evidence.run()
        check_memory("count", 16 * count * sum(sizes), "a smaller count=")
        nodes, states, log_probs = best.run() if best else ([], torch.zeros(1, 0, dtype=torch.long), log_evidence[None])
        return RankedStates(
            tuple(map(query.model.ground.name, nodes)),
            states,
            log_probs,
            float(log_evidence),
            tuple(_build_group_states(state, query, dict(zip(nodes, states.unbind(1), strict=True)), len(states))),
            dict(state.tokens),
            method,
        )

    name = "most probable explanation" if method == "most_probable" else "marginal MAP"
    question = f"{name} of {format_nodes(query.model, maximised.nodes) or 'no node'}"
    return replace(best or evidence, question=question).with_run(compute)


def plan_marginal_map(query: Query, count: int) -> Plan[tuple[list[int], Tensor, Tensor]]:
    """The plan of the most probable joint states of the requested nodes, summed over all other choices: marginal MAP.

    Args:
        query: The nodes, the evidence and the sentence.
        count: The maximum number k of joint states.

    Returns:
        The plan of the nodes by ground id, their states `[k, node]`, and `log P(states, evidence)`, `[k]` (float64;
        with an observed continuous node a log density). The most probable states come first, and of equally probable
        ones those with smaller state numbers; k is smaller than `count` if fewer joint states are possible.

    Raises:
        BudgetError: A scope of the elimination has more joint states than the budget.
        EvidenceError: The evidence is impossible; the error names the first impossible observation. `run` raises it.
    """
    query = query.without_input_evidence()
    nodes, question = [*query.nodes], f"most probable states of {format_nodes(query.model, query.nodes)}"
    if count == 1 and _has_only_chains(query):
        chain = plan_elimination(question, replace(query, nodes=query.nodes[:1]), partial(_find_best_paths, query))
        if isinstance(chain, Plan):
            reason = "the choices are chains along the words, whose most probable paths the Viterbi algorithm finds"
            return replace(chain, reason=reason).then(lambda best: (nodes, *best))
    graph = find_maximisation_graph(query)
    if graph is not None:

        def find_best() -> tuple[Tensor, Tensor]:
            states, log_probs = graph.find_best(count)
            ranked = [states[node] for node in nodes]
            return torch.stack(ranked, 1) if ranked else torch.zeros(len(log_probs), 0).long(), log_probs

        reason = "choices are summed out first, then the requested nodes are maximised out, one by one"
        plan = graph.plan(question, reason, find_best, *graph.constrained_orders)
    else:
        check_nodes(query)
        plan = replace(plan_joint(query), question=question).then(partial(_select_best, query, count))

    def check_possible(best: tuple[Tensor, Tensor]) -> tuple[list[int], Tensor, Tensor]:
        if not len(best[1]):
            raise_impossible_evidence(query)
        return nodes, *best

    return plan.then(check_possible)


def _select_best(query: Query, count: int, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable states, `[k, node]`, and their log probabilities, from those of all joint states."""
    log_probs, flat = torch.sort(log_probs, descending=True, stable=True)
    possible = log_probs[:count] > -math.inf
    log_probs, flat = log_probs[:count][possible], flat[:count][possible]
    sizes = [query.model.count_states(node) for node in query.nodes]
    return torch.stack(torch.unravel_index(flat, sizes), 1) if sizes else flat[:, None][:, :0], log_probs


def _has_only_chains(query: Query) -> bool:
    """Whether the requested nodes and the observed ones are independent chains along the words, the only choices."""
    model, network = query.model, query.model.network
    factor_request = find_factor_request(query, query.nodes[0]) if query.nodes else None
    if not isinstance(factor_request, FactorRequest):
        return False
    problem = factor_request.problem
    single = {first for first, scope in problem.chain_scopes.items() if {*scope} == {first}}
    nodes = {n for i in problem.enumerated for n in model.ground.select_nodes(network.specs[i].group).tolist()}
    is_complete = {*query.nodes} <= nodes <= {*query.nodes, *query.fixed}
    has_small_tables = all(model.count_states(node) ** 2 <= query.budget for node in nodes)
    return problem.enumerated == single and is_complete and has_small_tables


def _find_best_paths(query: Query, factor_request: FactorRequest) -> tuple[Tensor, Tensor]:
    """The most probable states of the nodes of chains, `[1, node]`, and `log P(states, evidence)`, `[1]`."""
    ground = query.model.ground
    paths, log_prob = elimination.find_best_paths(query.module, factor_request)
    if log_prob == -math.inf:
        raise_impossible_evidence(query)
    groups = [ground.group_of(node).index for node in query.nodes]
    states = [paths[k][node - int(ground.offsets[k])] for k, node in zip(groups, query.nodes, strict=True)]
    return torch.stack(states)[None], torch.tensor([log_prob], dtype=torch.float64)


def find_maximisation_graph(query: Query) -> FactorGraph | None:
    """The factor graph for the most probable states of the nodes of a query; None if their joint table is required.

    Raises:
        BudgetError: The joint table has more entries than the budget too.
    """
    graph = build_factor_graph(query)
    excess = graph.find_excess(*graph.constrained_orders) if isinstance(graph, FactorGraph) else graph
    if isinstance(excess, BudgetError) and math.prod(map(query.model.count_states, query.nodes)) > query.budget:
        raise excess
    return graph if isinstance(graph, FactorGraph) and excess is None else None


def _build_group_states(
    state: SentenceState, query: Query, columns: Mapping[int, Tensor], count: int
) -> Iterator[GroupStates]:
    """The states of the groups of the requested nodes, in the order of the net.

    Args:
        state: The sentence.
        query: The query with all requested nodes, also observed ones.
        columns: The states `[k]` of each explained node.
        count: The number k of joint states.
    """
    model, ground = query.model, query.model.ground
    known = {node: value for node, value in {**query.fixed, **model.do}.items() if not value.is_floating_point()}
    for index in sorted({ground.group_of(node).index for node in query.nodes}):
        group, shape = model.network.specs[index].group, ground.shapes[index]
        nodes = ground.select_nodes(group).tolist()
        unknown = torch.tensor(UNKNOWN_STATE)
        states = [columns.get(node, known.get(node, unknown)).cpu().expand(count) for node in nodes]
        yield GroupStates(
            group.name,
            tuple(ground.iter_names(group)),
            torch.stack(states, 1).reshape(count, *shape),
            torch.tensor([node in columns for node in nodes]).reshape(shape),
            model.count_states(nodes[0]),
            state.labels(nodes[0]),
            group.word_stack,
        )
