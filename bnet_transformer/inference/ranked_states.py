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
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.memory import check_memory
from bnet_transformer._core.naming import EVERY_NODE, count_word_from_start, match_names
from bnet_transformer._core.saved_results import SavedResult, stored_class
from bnet_transformer._core.tokens import distinguish, name_columns
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.inference.factor_graph import format_nodes
from bnet_transformer.inference.joint_posterior import find_marginal_map, joint_log_evidence, route_marginal_map
from bnet_transformer.inference.query import Query
from bnet_transformer.inference.routing import Route, route_log_evidence, with_cost
from bnet_transformer.inference.sentence_state import SentenceState
from bnet_transformer.reference import GroundModel

if TYPE_CHECKING:
    import pandas as pd

UNKNOWN_STATE = -1
MAX_SHOWN = 12  # states of a group in a text


@stored_class
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
class RankedStates(SavedResult):
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

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each joint state: `log_prob`, `share`, and the label of each node's state.

        The column of a node with the name of another column is marked, as in `share (node)`.
        """
        import pandas as pd

        columns: dict[str, Any] = {"log_prob": to_numpy(self.log_probs), "share": to_numpy(self.shares)}
        names = name_columns(self.nodes, ("rank", *columns))
        columns |= {column: self.labels(name) for column, name in zip(names, self.nodes, strict=True)}
        return pd.DataFrame(columns, index=pd.RangeIndex(1, len(self) + 1, name="rank"))

    def _repr_html_(self) -> str:
        """The joint states as an HTML table."""
        names = ", ".join([*self.nodes[:3], *(["…"] if len(self.nodes) > 3 else [])])
        title = f"{len(self)} most probable joint states of {len(self.nodes):,} nodes: {names}"
        return f"<p>{escape(title)}</p>{self.to_dataframe().head(10).to_html(max_cols=20)}"


def find_explained_nodes(model: GroundModel) -> list[int]:
    """The nodes of a most probable explanation: the discrete nodes that have children and are not set.

    A discrete node without children is a readout. Without evidence on it, its probabilities sum to 1.
    """
    graph = model.network.graph
    choices = [s.group for s in model.network.specs if s.tpm.kind == "discrete" and graph.out_edges[s.group.index]]
    nodes = [node for group in choices for node in model.ground.select_nodes(group).tolist() if node not in model.do]
    if not nodes:
        raise BNetError(
            "most probable explanation",
            expected="a sentence with latent choices: discrete nodes that have children and are not set by do",
            hint="For the most probable states of readouts, use marginal_map(nodes)",
        )
    return nodes


def compute_ranked_states(state: SentenceState, query: Query, count: int, method: str) -> RankedStates:
    """The `count` most probable joint states of the nodes of a query.

    Args:
        state: The sentence, for labels and tokens.
        query: The nodes, the evidence and the limits; observed nodes keep their state.
        count: The maximum number of joint states.
        method: `"most_probable"` or `"marginal_map"`.

    Raises:
        EvidenceError: The evidence is impossible; the error names the first impossible observation.
    """
    model, maximised = query.model, _without_observed_nodes(query)
    log_evidence = joint_log_evidence(replace(maximised, nodes=()))
    sizes = [model.count_states(node) for node in maximised.nodes]
    count = min(count, math.prod(sizes))
    check_memory("count", 16 * count * sum(sizes), "a smaller count=")
    if maximised.nodes:
        nodes, states, log_probs = find_marginal_map(maximised, count)
    else:
        nodes, states, log_probs = [], torch.zeros(1, 0, dtype=torch.long), log_evidence[None]
    columns = dict(zip(nodes, states.unbind(1), strict=True))
    return RankedStates(
        tuple(map(model.ground.name, nodes)),
        states,
        log_probs,
        float(log_evidence),
        tuple(_build_group_states(state, query, columns, len(states))),
        dict(state.tokens),
        method,
    )


def route_ranked_states(query: Query, question: str, count: int) -> Route:
    """The route of the `count` most probable joint states of the nodes of a query."""
    query = _without_observed_nodes(query)
    route = route_marginal_map(query, count) if query.nodes else with_cost(query, route_log_evidence(query))
    return replace(route, question=f"{question} of {format_nodes(query.model, query.nodes) or 'no node'}")


def _without_observed_nodes(query: Query) -> Query:
    """The query without requested nodes whose state is observed, and without evidence on inputs."""
    query = query.without_input_evidence()
    return replace(query, nodes=tuple(node for node in query.nodes if node not in query.fixed))


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
