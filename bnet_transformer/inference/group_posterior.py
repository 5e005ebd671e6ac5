"""The posteriors of all nodes of a discrete node group, such as the choices of all words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.saved_results import SavedResult
from bnet_transformer._core.tokens import distinguish
from bnet_transformer.compiler.validate_inputs import find_groups
from bnet_transformer.graph import NodeGroup
from bnet_transformer.inference import elimination
from bnet_transformer.inference.joint_posterior import node_posteriors
from bnet_transformer.inference.query import Query, build_request_arguments, group_evidence
from bnet_transformer.inference.routing import find_single_target_fault
from bnet_transformer.inference.sentence_state import SentenceState
from bnet_transformer.reference import GroundModel
from bnet_transformer.reference.node_tables import check_discrete_node

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class GroupPosterior(SavedResult):
    """The posterior `P(node | evidence)` of each node of a discrete node group.

    Attributes:
        name: The name of the node group, such as `c_0`.
        probabilities: The probabilities, `[*plates, word, state]`. A node that is observed or set has probability 1 in
            its state; the row of a node that is set to a vector is NaN.
        axes: The names of the dims of `probabilities`: plates such as `head`, then `word` and `state`.
        labels: The labels along each axis, for axes with labels: the tokens of the words, the labels of the states.
        special: For each word, whether it is a special token; empty if this is unknown.
    """

    _shapes = "labels: {_} any @; probabilities: real *axes; special: any @word?"

    name: str
    probabilities: Tensor
    axes: tuple[str, ...]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    special: tuple[bool, ...] = field(default=(), repr=False)

    def labels_along(self, dim: int) -> tuple[str, ...]:
        """The labels along a dim of `probabilities`.

        Args:
            dim: The number of the dim.

        Returns:
            The labels; numerals for an axis without labels.
        """
        return self.labels.get(self.axes[dim], tuple(map(str, range(self.probabilities.shape[dim]))))

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each node and a column for each state, indexed by the axes and the token.

        The axes are not columns, because a state may have the label of an axis, such as the token `word`.
        """
        import pandas as pd

        tokens, axes, probs = self.labels.get("word"), [*self.axes[:-1]], to_numpy(self.probabilities)
        frame = pd.DataFrame(probs.reshape(-1, probs.shape[-1]), columns=distinguish(self.labels_along(-1)))
        if not axes:
            return frame
        index = np.indices(probs.shape[:-1]).reshape(len(axes), -1)
        levels = [pd.Series(row, name=axis) for axis, row in zip(axes, index, strict=True)]
        levels += [] if tokens is None else [pd.Series([tokens[k] for k in index[-1]], name="token", dtype=object)]
        return frame.set_index(levels)

    def _repr_html_(self) -> str:
        """The probabilities as an HTML table."""
        return f"<p>P({escape(self.name)} | evidence)</p>{self.to_dataframe().head(20).to_html()}"


def compute_group_posterior(state: SentenceState, query: Query, name: str) -> GroupPosterior:
    """`P(node | evidence)` of each node of a group: by one elimination if one applies, else node by node.

    Args:
        state: The sentence, for tokens and labels.
        query: The sentence, the evidence and the limits; its requested nodes are ignored.
        name: The name of the discrete node group, or the pattern of all its nodes.

    Raises:
        EvidenceError: The evidence is impossible.
    """
    model, ground = query.model, query.model.ground
    nodes = find_group_nodes(model, name)
    group = ground.group_of(nodes[0])
    probs = _compute_probabilities(query.without_input_evidence(), group, nodes)
    state_labels = state.labels(nodes[0])
    labels: dict[str, tuple[str, ...]] = {} if state_labels is None else {"state": state_labels}
    if group.word_stack is not None:
        labels["word"] = state.tokens[group.word_stack]
    flags = () if group.word_stack is None else state.encoded.flag_special_words(state.network, group.word_stack)
    return GroupPosterior(group.name, probs.to(model.network.log_dtype), (*ground.axes(group), "state"), labels, flags)


def find_group_nodes(model: GroundModel, name: str) -> list[int]:
    """The nodes of a discrete node group; an error if the group is not discrete, or if all its nodes are set."""
    groups = find_groups(model.network, name)
    group = groups[0] if len(groups) == 1 else model.ground.template.get_group(name)
    nodes: list[int] = model.ground.select_nodes(group).tolist()
    check_discrete_node(model, next((node for node in nodes if node not in model.do), nodes[0]))
    return nodes


def _compute_probabilities(query: Query, group: NodeGroup, nodes: Sequence[int]) -> Tensor:
    """The posteriors of the nodes of a group, `[*plates, word, state]`."""
    model = query.model
    if find_single_target_fault(replace(query, nodes=(nodes[0],))) is None:
        evidence, arguments = group_evidence(model, query.evidence), build_request_arguments(model)
        limits: dict[str, Any] = {"budget": query.budget, "atol": query.atol}
        probs = elimination.posterior(query.module, group.name, evidence, **arguments, **limits)[0].double()
        return probs / probs.sum(-1, keepdim=True)  # in float32 the sum is 1 only to 1e-7
    table = torch.zeros(len(nodes), model.count_states(nodes[0]), dtype=torch.float64)
    posteriors = node_posteriors(replace(query, nodes=tuple(node for node in nodes if node not in model.do)))
    for row, node in zip(table, nodes, strict=True):
        if node in posteriors:
            row.copy_(posteriors[node])
        elif model.do[node].is_floating_point():
            row.fill_(math.nan)
        else:
            row[model.do[node]] = 1.0
    return table.reshape(*model.ground.shapes[group.index], -1)
