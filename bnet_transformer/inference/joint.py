"""Joint questions to a sentence: posteriors of several nodes, the log probability of evidence. Both are exact."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributions import Categorical

from bnet_transformer import reference
from bnet_transformer.compiler.module import Module
from bnet_transformer.errors import BNetError, BudgetError, EvidenceError, ReadingError
from bnet_transformer.inference import exact, ground
from bnet_transformer.inference.answers import Answers
from bnet_transformer.inference.many import joint_log_probs, log_evidence_by_states
from bnet_transformer.reference import ATOL, BUDGET, World
from bnet_transformer.world import where

Seen = Mapping[int, Tensor]


def joint_posterior(
    module: Module,
    world: World,
    nodes: Sequence[int],
    evidence: Seen,
    budget: int = BUDGET,
    atol: float = ATOL,
    known: Answers | None = None,
) -> Tensor:
    """`P(nodes | evidence)` for discrete nodes: `[*states]`, a dim for each in their order.

    `known` holds values of this sentence that were computed before, without evidence.
    """
    if len(set(nodes)) < len(nodes):
        raise BNetError("nodes", expected="different nodes", got=", ".join(map(world.ground.name, nodes)))
    sizes = [world.count_states(node) for node in nodes]
    if len(nodes) > 1 and math.prod(sizes) > budget:
        names = ", ".join(map(world.ground.name, nodes))
        got, allowed = f"{math.prod(sizes)}", "do or evidence on some; fewer nodes, or slices; a larger budget="
        wanted = f"at most {budget} joint states of {names}"
        raise BudgetError("joint posterior", expected=wanted, got=got, allowed=allowed)
    if len(nodes) == 1:
        if known is not None and not evidence and _is_its_tpm(world, nodes[0]):
            distribution = known.distribution(nodes[0])
            assert isinstance(distribution, Categorical)
            return distribution.logits.double().softmax(-1)
        with contextlib.suppress(ReadingError):
            return ground.eliminated(module, world, nodes[0], evidence, budget, atol)
    logs = joint_log_probs(module, world, nodes, evidence, budget, atol)
    if bool(logs.isinf().all()):
        joint_log_evidence(module, world, evidence, budget, atol)  # names the evidence that cannot be
        names = ", ".join(map(world.ground.name, nodes))
        raise EvidenceError(names, expected="evidence that some of its states make possible", got="none that does")
    return torch.softmax(logs.flatten(), 0).reshape(logs.shape)


def _is_its_tpm(world: World, node: int) -> bool:
    """True where `P(node)` is the node's TPM at the values of its parents: no choice above it is open."""
    return where(world, node)[0].tpm.states is not None and not reference.choices(
        world, reference.parents(world, node), {}
    )


def joint_log_evidence(
    module: Module, world: World, evidence: Seen, budget: int = BUDGET, atol: float = ATOL
) -> Tensor:
    """`log P(evidence)`: a number (of a density, where a node is continuous)."""
    if not evidence:
        return torch.zeros((), dtype=torch.float64)
    try:
        found = exact.log_evidence(
            module,
            ground.seen_families(world, evidence),
            ground.counted(world),
            **ground.interventions(world),
            given={name: value[None] for name, value in world.given.items()},
            budget=budget,
            atol=atol,
        )
    except ReadingError:
        return log_evidence_by_states(module, world, evidence, budget, atol)
    return found.detach()[0].double()
