"""Exact inference by enumeration: one run of the reference for each joint state of the latent choices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bnet_transformer.errors import BudgetError, EvidenceError, format_count
from bnet_transformer.reference.ground_model import GroundModel, find_open_choices, get_fixed, is_fixed
from bnet_transformer.reference.run import ReferenceRun

BUDGET = 2**16
ATOL = 1e-6
RTOL = {
    torch.float32: 2**-12,
    torch.float16: 2**-7,
    torch.bfloat16: 2**-4,
}  # measured: 2^11 eps, and 8 eps in half precision


def enumerate_runs(
    model: GroundModel, choices: list[int], fixed: Mapping[int, Tensor], budget: int = BUDGET
) -> Iterator[ReferenceRun]:
    """A run for each joint state of the choices."""
    check_joint_states(model, choices, budget)
    for states in itertools.product(*(range(model.count_states(node)) for node in choices)):
        chosen = (torch.tensor(state, device=model.network.device) for state in states)
        yield ReferenceRun(model, {**fixed, **dict(zip(choices, chosen, strict=True))})


def check_joint_states(model: GroundModel, choices: Sequence[int], budget: int) -> None:
    """Raise an error if the choices have more joint states than the budget."""
    count = math.prod(model.count_states(node) for node in choices)
    if count > budget:
        names = ", ".join(model.ground.name(node) for node in choices[:6]) + (", …" if len(choices) > 6 else "")
        raise BudgetError(
            "exact enumeration",
            expected=f"at most {format_count(budget)} joint states of {names}",
            actual=f"{format_count(count)} states",
            hint="Observe or set some of these nodes, raise budget= if the method takes it, or, without evidence, "
            "use sample(n), which is approximate",
        )


def values(model: GroundModel, node: int, fixed: Mapping[int, Tensor], budget: int = BUDGET) -> Tensor:
    """The value of a node for each joint state of the choices that determine it: `[*states, *shape]`."""
    fixed = get_fixed(model, fixed)
    choices = find_open_choices(model, [node], fixed)
    stacked = torch.stack([run.value(node) for run in enumerate_runs(model, choices, fixed, budget)])
    return stacked.reshape((*(model.count_states(choice) for choice in choices), *stacked.shape[1:]))


def log_evidence(
    model: GroundModel,
    evidence: Mapping[int, Tensor],
    query: int | None = None,
    budget: int = BUDGET,
    atol: float = ATOL,
) -> Tensor:
    """`log P(evidence)`, or `log P(query = state, evidence)` for each state of a discrete query.

    Evidence on a node that is a function of its parents, or a vector as evidence on a choice, is impossible unless the
    computed value is close to it (`is_close`). The error for impossible evidence names the node.
    """
    fixed = {n: v for n, v in evidence.items() if is_fixed(model, n, v)}
    query_nodes = [] if query is None or query in evidence else [query]
    choices = find_open_choices(model, [*evidence, *query_nodes], fixed, include_ancestors=True)
    size = 1 if query is None else model.count_states(query)
    totals = torch.full((len(evidence) + 1, size), -math.inf, dtype=torch.float64)
    # Row k is the joint probability of the choices and the first k observations, summed over the choices. So the first
    # row that is zero shows which observation is impossible.
    for run in enumerate_runs(model, choices, fixed, budget):
        state = 0 if query is None else int(run.states[query])
        totals[:, state] = torch.logaddexp(totals[:, state], _log_terms(run, choices, evidence, atol).cumsum(0))
    for k in range(len(evidence)):
        if torch.logsumexp(totals[k + 1], 0) == -math.inf:
            raise impossible_evidence_error(model, evidence, k)
    return totals[-1] if query is not None else totals[-1, 0]


def impossible_evidence_error(model: GroundModel, evidence: Mapping[int, Tensor], position: int) -> EvidenceError:
    """The error for the first observation (number `position`) that has probability zero given those before it."""
    node = [*evidence][position]
    return EvidenceError(
        model.ground.name(node),
        expected="evidence that is possible in some state of the net",
        actual=f"a value of probability zero{' given the evidence before it' if position else ''}: "
        f"{evidence[node].tolist()}",
    )


def posterior(
    model: GroundModel, query: int, evidence: Mapping[int, Tensor], budget: int = BUDGET, atol: float = ATOL
) -> Tensor:
    """`P(query | evidence)` for a discrete node, by enumeration."""
    return torch.softmax(log_evidence(model, evidence, query, budget, atol), 0)


def _log_terms(run: ReferenceRun, choices: list[int], evidence: Mapping[int, Tensor], atol: float) -> Tensor:
    """`log P(choices)` and the log probability of each observation in the run: `[1 + evidence]`."""
    terms = [sum((run.log_prob(node) for node in choices), torch.zeros((), dtype=torch.float64))]
    for node, observed in evidence.items():
        if is_fixed(run.model, node, observed):
            terms.append(run.log_prob(node))
        else:
            computed = run.value(node)
            is_same = bool(is_close(computed, observed, atol, computed.dim()))
            terms.append(torch.tensor(0.0 if is_same else -math.inf, dtype=torch.float64))
    return torch.stack(terms)


def log_joint(run: ReferenceRun, choices: list[int], evidence: Mapping[int, Tensor], atol: float = ATOL) -> float:
    """`log P(choices, evidence)` of one run."""
    return float(_log_terms(run, choices, evidence, atol).sum())


def is_close(computed: Tensor, observed: Tensor, atol: float, event_dims: int) -> Tensor:
    """True where computed and observed values agree: `|computed - observed| <= atol + r largest` in every entry.

    The last `event_dims` dims are those of a node's value, and `largest` is the largest absolute entry of that node,
    computed or observed. r is the rounding of the floating type: 0 in float64.
    """
    dims = tuple(range(-event_dims, 0))
    greatest = torch.maximum(computed.detach().abs(), observed.abs())
    greatest = greatest.amax(dims, keepdim=True) if event_dims else greatest
    is_within = (computed - observed).abs() <= atol + RTOL.get(computed.dtype, 0.0) * greatest
    return is_within.all(dims) if event_dims else is_within
