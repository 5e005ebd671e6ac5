"""Sums over unobserved choices, by enumeration: one run of the reference for each joint state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bnet_transformer.errors import BudgetError, EvidenceError
from bnet_transformer.reference.ground_model import World, choices, settles, settling
from bnet_transformer.reference.run import Run

BUDGET = 2**16
ATOL = 1e-6
ROUNDING = {torch.float32: 2**-12, torch.float16: 2**-7, torch.bfloat16: 2**-4}  # 2^11 eps, and 8 of a half: measured


def runs(world: World, free: list[int], known: Mapping[int, Tensor], budget: int = BUDGET) -> Iterator[Run]:
    """A run for each joint state of the free nodes."""
    check_joint_states(world, free, budget)
    for states in itertools.product(*(range(world.count_states(node)) for node in free)):
        chosen = (torch.tensor(state, device=world.network.device) for state in states)
        yield Run(world, {**known, **dict(zip(free, chosen, strict=True))})


def check_joint_states(world: World, free: Sequence[int], budget: int) -> None:
    """Refuse more joint states of the free nodes than the budget."""
    count = math.prod(world.count_states(node) for node in free)
    if count > budget:
        names = ", ".join(world.ground.name(node) for node in free[:6]) + (", …" if len(free) > 6 else "")
        raise BudgetError(
            "exact enumeration",
            expected=f"at most {budget} joint states of {names}",
            actual=f"{count} states",
            allowed="evidence or do on some of these nodes; a larger budget=, of a question that takes one; "
            "sample(n) without evidence, which is approximate",
        )


def values(world: World, node: int, settled: Mapping[int, Tensor], budget: int = BUDGET) -> Tensor:
    """The value of a node for each joint state of the choices that decide it: `[*states, *shape]`."""
    settled = settling(world, settled)
    free = choices(world, [node], settled)
    found = torch.stack([run.value(node) for run in runs(world, free, settled, budget)])
    return found.reshape((*(world.count_states(choice) for choice in free), *found.shape[1:]))


def log_evidence(
    world: World, evidence: Mapping[int, Tensor], query: int | None = None, budget: int = BUDGET, atol: float = ATOL
) -> Tensor:
    """`log P(evidence)`, or `log P(query = state, evidence)` for each state of a discrete query.

    Evidence on a node that is a function of its parents, or a tensor for a node that is chosen by its state, is
    reproduced (`fits`) or is impossible. Impossible evidence is an error that names the node.
    """
    settled = {n: v for n, v in evidence.items() if settles(world, n, v)}
    asked = [] if query is None or query in evidence else [query]
    free = choices(world, [*evidence, *asked], settled, beyond=True)
    size = 1 if query is None else world.count_states(query)
    totals = torch.full((len(evidence) + 1, size), -math.inf, dtype=torch.float64)
    for run in runs(world, free, settled, budget):
        state = 0 if query is None else int(run.states[query])
        totals[:, state] = torch.logaddexp(totals[:, state], _log_terms(run, free, evidence, atol).cumsum(0))
    for k in range(len(evidence)):
        if torch.logsumexp(totals[k + 1], 0) == -math.inf:
            raise impossible(world, evidence, k)
    return totals[-1] if query is not None else totals[-1, 0]


def impossible(world: World, evidence: Mapping[int, Tensor], k: int) -> EvidenceError:
    """The error of the first piece of evidence (its place k) that has probability zero beside those before it."""
    node = [*evidence][k]
    return EvidenceError(
        world.ground.name(node),
        expected="evidence that some state of the net makes possible",
        actual=f"one of probability zero{' given the evidence before it' if k else ''}: {evidence[node].tolist()}",
    )


def posterior(
    world: World, query: int, evidence: Mapping[int, Tensor], budget: int = BUDGET, atol: float = ATOL
) -> Tensor:
    """`P(query | evidence)` for a discrete node, by enumeration."""
    return torch.softmax(log_evidence(world, evidence, query, budget, atol), 0)


def _log_terms(run: Run, free: list[int], evidence: Mapping[int, Tensor], atol: float) -> Tensor:
    """`log P(the free choices)`, then the log probability of each piece of evidence in the run."""
    terms = [sum((run.log_prob(node) for node in free), torch.zeros((), dtype=torch.float64))]
    for node, seen in evidence.items():
        if settles(run.world, node, seen):
            terms.append(run.log_prob(node))
        else:
            made = run.value(node)
            is_same = bool(fits(made, seen, atol, made.dim()))
            terms.append(torch.tensor(0.0 if is_same else -math.inf, dtype=torch.float64))
    return torch.stack(terms)


def log_joint(run: Run, free: list[int], evidence: Mapping[int, Tensor], atol: float = ATOL) -> float:
    """`log P(the free choices, the evidence)` of one run."""
    return float(_log_terms(run, free, evidence, atol).sum())


def fits(made: Tensor, told: Tensor, atol: float, own: int) -> Tensor:
    """Whether told values are those that were made: `|made - told| <= atol + r greatest` in every entry.

    The last `own` dims are a node's own, and `greatest` is the largest entry, made or told, of that very node in that
    state and sentence. r is the rounding of the floating type: 0 in float64.
    """
    dims = tuple(range(-own, 0))
    greatest = torch.maximum(made.detach().abs(), told.abs())
    greatest = greatest.amax(dims, keepdim=True) if own else greatest
    near = (made - told).abs() <= atol + ROUNDING.get(made.dtype, 0.0) * greatest
    return near.all(dims) if own else near
