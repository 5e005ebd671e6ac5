"""Answers of the reference about one node or node group: distributions, attention, and the choices they depend on."""

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
    """Refuse a node without a finite number of states."""
    member = model.spec(node)
    if node in model.do:
        got = f"one that is set to {model.do[node].tolist()}"
        raise BNetError(model.ground.name(node), expected="a node that is still random", actual=got)
    if member.tpm.kind != "discrete":
        names = [m.group.name for m in model.network.specs if m.tpm.kind == "discrete"]
        raise BNetError(
            model.ground.name(node),
            expected="a discrete random node",
            actual=f"{'an' if member.tpm.kind == 'input' else 'a'} {member.tpm.kind} one ({type(member.tpm).__name__})",
            allowed="nodes of " + ", ".join(names) if names else "none: this net has no discrete random node",
        )


def conditional_distribution(model: GroundModel, node: int, evidence: Mapping[int, Tensor]) -> Distribution:
    """`P(node | parents)`, batched over the open choices that decide the parents: `[*states]`."""
    evidence = get_fixed(model, evidence)
    free = find_open_choices(model, parents(model, node), evidence)
    sizes = [model.count_states(choice) for choice in free]
    found = [run.distribution(node) for run in enumerate_runs(model, free, evidence)]
    if not free:
        return found[0]
    first = found[0]

    def stack_states(name: str) -> Tensor:
        table = torch.stack([getattr(each, name) for each in found])
        return table.reshape((*sizes, *table.shape[1:]))

    if isinstance(first, Categorical):
        return Categorical(logits=stack_states("logits"), validate_args=False)
    if isinstance(first, Independent) and isinstance(first.base_dist, TorchNormal):
        normal = TorchNormal(stack_states("mean"), stack_states("stddev"), validate_args=False)
        return Independent(normal, first.mean.dim(), validate_args=False)
    from pyro.distributions import Delta

    if isinstance(first, Delta):
        return Delta(stack_states("v"), event_dim=first.v.dim())
    names = ", ".join(model.ground.name(choice) for choice in free)
    raise BNetError(
        model.ground.name(node),
        expected=f"{names} settled (do or observe)",
        actual="open choices",
        allowed=f"a batch is made of categoricals, deltas and normals, not of {type(first).__name__}",
    )


def conditional_attention(model: GroundModel, spec: NodeSpec, evidence: Mapping[int, Tensor]) -> Tensor:
    """`P(j | i)` of a family that reads words, which depend on the same choices: `[*states, *plates, word, word]`."""
    evidence = get_fixed(model, evidence)
    base, shape = int(model.ground.offsets[spec.group.index]), model.ground.shapes[spec.group.index]
    given = next(given for given in spec.parents if WORD in given.over or dict(given.pick).get(WORD) is not None)
    width = model.ground.word_counts[model.network.specs[given.index].group.word_stack or ""]
    rows = []
    for offset in range(len(model.ground.select_nodes(spec.group))):
        node = base + offset
        free = find_open_choices(model, attention_parents(model, node), evidence)
        table = []
        for run in enumerate_runs(model, free, evidence):
            reading = run.attention(node)
            if reading is None:
                raise BNetError(spec.group.name, expected="attention P(j | i)", actual=spec.tpm.no_attention_reason())
            row = torch.zeros(width, dtype=reading[1].dtype)
            row[reading[0]] = reading[1]
            table.append(row)
        rows.append(torch.stack(table).reshape((*(model.count_states(choice) for choice in free), width)))
    states = max((row.shape[:-1] for row in rows), key=len)
    stacked = torch.stack([row.expand(*states, width) for row in rows], -2)
    return stacked.reshape((*stacked.shape[:-2], *shape, width))


def split_choices(
    model: GroundModel, ancestor_choices: Mapping[int, Sequence[int]]
) -> tuple[list[int], list[int]] | None:
    """The choices that decide all of some nodes, and the families of which each node has that of its own word beside
    them; None where nodes depend on other choices. `ancestor_choices` has the choices that decide each node."""
    shared = set.intersection(*map(set, ancestor_choices.values())) if ancestor_choices else set()
    families = set()
    for node, free in ancestor_choices.items():
        word = model.ground.unravel_index(node)[1][-1:]
        own = [model.ground.unravel_index(choice) for choice in free if choice not in shared]
        if any(index[-1:] != word for _, index in own):
            return None
        families.add(tuple(family.index for family, _ in own))
    apart = families.pop() if families else ()
    return None if families or len(set(apart)) < len(apart) else (sorted(shared), sorted(apart))


def has_ancestor_choices(network: Network, groups: Collection[int]) -> bool:
    """True where a discrete family stands above some families."""
    return any(network.specs[index].tpm.kind == "discrete" for index in network.graph.ancestors(groups))


def compute_read_mask(model: GroundModel, spec: NodeSpec) -> NDArray[np.bool_]:
    """`[word, word]`: whether an arrow lets word i of a member read word j, along any of its plates."""
    ground, family = model.ground, spec.group
    over = {given.index for given in spec.word_parents}
    bundles = [bundle for bundle in ground.template.in_edges[family.index] if bundle.parent in over]
    pairs: NDArray[np.bool_] = np.logical_or.reduce([ground.word_adjacency(bundle) for bundle in bundles])
    cut, rows = ground.get_cut_nodes(family.index), ground.get_partly_cut_nodes(family.index)
    places = [ground.unravel_index(node)[1] for node in (*cut, *rows)]
    each = math.prod(ground.shapes[family.index][:-1])
    gone = [word for word, count in Counter(place[-1] for place in places).items() if count == each]
    some = [kept for kept in map(ground.retained_edge, bundles) if kept is not None] if rows else []
    stay = {ground.unravel_index(node)[1][-1] for node in rows}
    for word in gone:
        left = [ground.word_adjacency(kept)[word] for kept in some] if word in stay else []
        pairs[word] = np.logical_or.reduce(left) if left else False
    return pairs


def expected_attention(
    model: GroundModel, node: int, evidence: Mapping[int, Tensor], budget: int = BUDGET
) -> tuple[list[int], Tensor] | None:
    """The words that a node reads and `P(j | i, evidence)`: its reading averaged over the posterior of the choices."""
    settled = get_fixed(model, evidence)
    free = find_open_choices(model, [*attention_parents(model, node), *evidence], settled, include_ancestors=True)
    words: list[int] = []
    found, logs = [], []
    for run in enumerate_runs(model, free, settled, budget):
        reading = run.attention(node)
        if reading is None:
            return None
        words = reading[0]
        found.append(reading[1].double())
        logs.append(log_joint(run, free, evidence))
    if evidence and max(logs) == -math.inf:
        log_evidence(model, evidence, budget=budget)
    share = torch.softmax(torch.tensor(logs, dtype=torch.float64), 0)
    return words, torch.einsum("s,sm->m", share, torch.stack(found))


def find_single_parents(model: GroundModel, node: int) -> set[int]:
    """The parents of a node that fill a slot of a single parent (its query, its residual)."""
    family, index = model.ground.unravel_index(node)
    member = model.network.specs[family.index]
    single = [given for given in member.parents if not given.over and not given.pick]
    return {parent for given in single for parent in find_slot_parents(model, member, index, given, {})[1]}
