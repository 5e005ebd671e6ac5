"""Distributions and attention of single nodes by the reference, for all states of the choices on which they depend."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal as TorchNormal

from bnet_transformer._core.naming import WORD
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.reference import (
    BUDGET,
    GroundModel,
    attention_parents,
    enumerate_runs,
    find_open_choices,
    find_slot_parents,
    get_fixed,
    log_evidence,
    log_joint,
    parents,
)


def check_discrete_node(model: GroundModel, node: int) -> None:
    """Raise an error for a node without a finite number of states."""
    spec = model.spec(node)
    if node in model.do:
        actual = f"a node that do() set to {model.do[node].tolist()}"
        raise BNetError(model.ground.name(node), expected="a random node", actual=actual)
    if spec.tpm.kind != "discrete":
        names = [m.group.name for m in model.network.specs if m.tpm.kind == "discrete"]
        raise BNetError(
            model.ground.name(node),
            expected="a discrete random node",
            actual=f"{'an' if spec.tpm.kind == 'input' else 'a'} {spec.tpm.kind} node ({type(spec.tpm).__name__})",
            allowed="nodes of " + ", ".join(names) if names else None,
            hint=None if names else "This net has no discrete random node",
        )


def conditional_distribution(model: GroundModel, node: int, evidence: Mapping[int, Tensor]) -> Distribution:
    """`P(node | parents)`, batched over the latent choices on which the parents depend: `[*states]`."""
    evidence = get_fixed(model, evidence)
    choices = find_open_choices(model, parents(model, node), evidence)
    sizes = [model.count_states(choice) for choice in choices]
    distributions = [run.distribution(node) for run in enumerate_runs(model, choices, evidence)]
    if not choices:
        return distributions[0]
    first = distributions[0]

    def stack_states(name: str) -> Tensor:
        table = torch.stack([getattr(distribution, name) for distribution in distributions])
        return table.reshape((*sizes, *table.shape[1:]))

    if isinstance(first, Categorical):
        return Categorical(logits=stack_states("logits"), validate_args=False)
    if isinstance(first, Independent) and isinstance(first.base_dist, TorchNormal):
        normal = TorchNormal(stack_states("mean"), stack_states("stddev"), validate_args=False)
        return Independent(normal, first.mean.dim(), validate_args=False)
    from pyro.distributions import Delta

    if isinstance(first, Delta):
        return Delta(stack_states("v"), event_dim=first.v.dim())
    names = ", ".join(model.ground.name(choice) for choice in choices)
    reason = f"only Categorical, Delta and Normal distributions can be batched over latent choices ({names})"
    raise BNetError(f"{model.ground.name(node)}: {reason}, not {type(first).__name__}", hint=f"Set or observe {names}")


def conditional_attention(model: GroundModel, spec: NodeSpec, evidence: Mapping[int, Tensor]) -> Tensor:
    """`P(j | i)` of a group whose nodes depend on the same choices: `[*states, *plates, word, word]`."""
    evidence = get_fixed(model, evidence)
    base, shape = int(model.ground.offsets[spec.group.index]), model.ground.shapes[spec.group.index]
    parent = next(parent for parent in spec.parents if WORD in parent.over or dict(parent.pick).get(WORD) is not None)
    width = model.ground.word_counts[model.network.specs[parent.index].group.word_stack or ""]
    rows = []
    for offset in range(len(model.ground.select_nodes(spec.group))):
        node = base + offset
        choices = find_open_choices(model, attention_parents(model, node), evidence)
        table = []
        for run in enumerate_runs(model, choices, evidence):
            attention = run.attention(node)
            if attention is None:
                raise BNetError(spec.group.name, expected="attention P(j | i)", actual=spec.tpm.no_attention_reason())
            words, weights = attention
            row = torch.zeros(width, dtype=weights.dtype)
            row[words] = weights
            table.append(row)
        rows.append(torch.stack(table).reshape((*(model.count_states(choice) for choice in choices), width)))
    states = max((row.shape[:-1] for row in rows), key=len)
    stacked = torch.stack([row.expand(*states, width) for row in rows], -2)
    return stacked.reshape((*stacked.shape[:-2], *shape, width))


def split_choices(
    model: GroundModel, ancestor_choices: Mapping[int, Sequence[int]]
) -> tuple[list[int], list[int]] | None:
    """The choices that all nodes share, and the groups of which each node depends on the choice of the same word.

    None if a node depends on other choices. `ancestor_choices` maps each node to the choices on which it depends.
    """
    shared = set.intersection(*map(set, ancestor_choices.values())) if ancestor_choices else set()
    groups = set()
    for node, choices in ancestor_choices.items():
        word = model.ground.unravel_index(node)[1][-1:]
        located = [model.ground.unravel_index(choice) for choice in choices if choice not in shared]
        if any(index[-1:] != word for _, index in located):
            return None
        groups.add(tuple(group.index for group, _ in located))
    per_word = groups.pop() if groups else ()
    return None if groups or len(set(per_word)) < len(per_word) else (sorted(shared), sorted(per_word))


def has_ancestor_choices(network: Network, groups: Collection[int]) -> bool:
    """True if a discrete group is an ancestor of one of these groups."""
    return not network.choice_descendants.isdisjoint(groups)


def compute_read_mask(model: GroundModel, spec: NodeSpec) -> NDArray[np.bool_]:
    """`[word i, word j]`: whether there is an arrow by which word i of a group reads word j, in any of its plates."""
    ground, group = model.ground, spec.group
    read_groups = {parent.index for parent in spec.word_parents}
    edges = [edge for edge in ground.template.in_edges[group.index] if edge.parent in read_groups]
    pairs: NDArray[np.bool_] = np.logical_or.reduce([ground.word_adjacency(edge) for edge in edges])
    cut, partly_cut = ground.get_cut_nodes(group.index), ground.get_partly_cut_nodes(group.index)
    indices = [ground.unravel_index(node)[1] for node in (*cut, *partly_cut)]
    num_per_word = math.prod(ground.shapes[group.index][:-1])
    cut_words = [word for word, count in Counter(index[-1] for index in indices).items() if count == num_per_word]
    retained_edges = [edge for edge in map(ground.retained_edge, edges) if edge is not None] if partly_cut else []
    partly_cut_words = {ground.unravel_index(node)[1][-1] for node in partly_cut}
    for word in cut_words:
        rows_left = [ground.word_adjacency(edge)[word] for edge in retained_edges] if word in partly_cut_words else []
        pairs[word] = np.logical_or.reduce(rows_left) if rows_left else False
    return pairs


def expected_attention(
    model: GroundModel, node: int, evidence: Mapping[int, Tensor], budget: int = BUDGET
) -> tuple[list[int], Tensor] | None:
    """The words to which a node attends, and `P(j | i, evidence)`, its attention averaged over the choices."""
    fixed = get_fixed(model, evidence)
    choices = find_open_choices(model, [*attention_parents(model, node), *evidence], fixed, include_ancestors=True)
    words: list[int] = []
    tables, logs = [], []
    for run in enumerate_runs(model, choices, fixed, budget):
        attention = run.attention(node)
        if attention is None:
            return None
        words, weights = attention
        tables.append(weights.double())
        logs.append(log_joint(run, choices, evidence))
    if evidence and max(logs) == -math.inf:
        log_evidence(model, evidence, budget=budget)
    probs = torch.softmax(torch.tensor(logs, dtype=torch.float64), 0)
    return words, torch.einsum("s,sm->m", probs, torch.stack(tables))


def find_single_parents(model: GroundModel, node: int) -> set[int]:
    """The parents of a node in slots with a single parent (its query, its residual)."""
    group, index = model.ground.unravel_index(node)
    spec = model.network.specs[group.index]
    single = [parent_spec for parent_spec in spec.parents if not parent_spec.over and not parent_spec.pick]
    return {parent for parent_spec in single for parent in find_slot_parents(model, spec, index, parent_spec, {})[1]}
