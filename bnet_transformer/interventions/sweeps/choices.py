"""Latent choices that are ancestors of the patched nodes or of the outcomes.

They have the same state in both runs of a sweep, and outcomes are averaged over their joint states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bnet_transformer import reference
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, format_count
from bnet_transformer.inference.joint_posterior import joint_log_probs
from bnet_transformer.inference.query import Query, enumerate_joint_states
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.reference import BUDGET, GroundModel, evaluation_order, find_open_choices, locate_node
from bnet_transformer.reference.node_tables import has_ancestor_choices


@dataclass(frozen=True)
class EnumeratedChoices:
    """Latent choices that depend on no value (a selector, atoms), and all their joint states, `[state, node]`.

    Args:
        nodes: Ground ids of the choices.
        states: Their joint states, `[state, node]`.
        examples: The sentences, which give the probabilities of the states.
    """

    nodes: tuple[int, ...]
    states: Tensor
    examples: Examples = field(repr=False)

    @cached_property
    def log_probs(self) -> Tensor:
        """The log probability of each joint state in each example, `[state, example]`."""
        module, nodes = self.examples.module, self.nodes
        columns = [joint_log_probs(Query(module, model, nodes=nodes)) for model in self.examples.models]
        return torch.stack(columns, -1)

    def __iter__(self) -> Iterator[dict[int, Tensor]]:
        for row in self.states:
            yield dict(zip(self.nodes, row.unbind(), strict=True))

    def marginalize(self, outcomes: Sequence[Tensor], *, is_discrete: bool) -> Tensor:
        """Average an outcome over the joint states.

        Args:
            outcomes: The outcome in each joint state, `[cell, example, *shape]` each.
            is_discrete: Whether outcomes are log probabilities; then the probabilities are averaged.

        Returns:
            The mean, or the log of the mean probabilities, `[cell, example, *shape]`.
        """
        if not self.nodes:
            return outcomes[0]
        stacked = torch.stack(list(outcomes))
        log_probs = self.log_probs.to(stacked.dtype).reshape(len(stacked), 1, -1, *[1] * (stacked.dim() - 3))
        return (stacked + log_probs).logsumexp(0) if is_discrete else (stacked * log_probs.exp()).sum(0)


def enumerate_choices(
    source: Examples | None,
    base: Examples,
    nodes: Sequence[int],
    outcome_nodes: Sequence[int],
    side_names: tuple[str, str] = ("clean", "corrupt"),
) -> EnumeratedChoices:
    """Find the latent choices of either run that depend on no value, and are therefore enumerated.

    Args:
        source: The examples that provide values; None for an ablation.
        base: The examples that are patched, with equal lengths.
        nodes: Ground ids of the nodes that cells set, or read.
        outcome_nodes: Ground ids of the nodes that the metric reads.
        side_names: The names of both sides in errors.

    Returns:
        The ancestral choices of these nodes, with all their joint states.

    Raises:
        BudgetError: There are more joint states than the budget.
        EvidenceError: A choice is set in one run only.
    """
    choices: set[int] = set()
    for examples in (base,) if source is None else (source, base):
        model = examples.model
        queried = [*nodes]
        for node in outcome_nodes:  # the outcome of a random node is a function of its parents
            is_random = locate_node(model, node)[0].tpm.is_random and node not in model.do
            queried += reference.parents(model, node) if is_random else [node]
        groups = {*np.unique(np.searchsorted(model.ground.offsets, queried, side="right") - 1).tolist()}
        has_discrete = any(model.network.specs[index].tpm.kind == "discrete" for index in groups)
        if not has_discrete and not has_ancestor_choices(model.network, groups):
            continue  # a fast test on groups, before the search over nodes
        choices |= {node for node in find_open_choices(model, queried, {}) if not _is_value_dependent(model, node)}
    open_choices = sorted(choices)
    model = base.model
    for node in choices.intersection(outcome_nodes):
        name = model.ground.name(node)
        expected = "a node that depends on the patched nodes"
        raise BNetError(f"metric of {name}", expected=expected, actual="a choice with the same state in both runs")
    count = math.prod(model.count_states(node) for node in open_choices)
    if count > BUDGET:
        raise BudgetError(
            "sweep",
            expected=f"at most {BUDGET:,} joint states of the latent choices",
            actual=format_count(count),
            hint="Set some of them by do: " + ", ".join(map(model.ground.name, open_choices[:6])),
        )
    for node in open_choices:
        if node in model.do:
            name = model.ground.name(node)
            hint = f"Set it also in the {side_names[0]} sentences by do({name}=...)"
            raise EvidenceError(f"{name} is set in the {side_names[1]} sentences only", hint=hint)
    states = enumerate_joint_states([range(model.count_states(node)) for node in open_choices])
    return EnumeratedChoices(tuple(open_choices), states, base)


def _is_value_dependent(model: GroundModel, node: int) -> bool:
    """True if the distribution of a choice depends on values, not only on other choices."""
    ancestors = [model.spec(ancestor) for ancestor in evaluation_order(model, node, {}, {}) if ancestor != node]
    return any(m.tpm.kind == "input" or (m.tpm.kind != "discrete" and m.parents) for m in ancestors)
