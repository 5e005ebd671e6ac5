"""Counterfactuals: what a node would have been under other interventions, given the evidence.

The three steps of Pearl (Causality, 2009, section 7.1): abduction infers the latent choices and the noise from the
evidence, action applies `do`, and prediction runs the net again with that noise. The noise of a Normal is its residual.
The net does not define the noise of a categorical. Gumbel-max is the convention here (Oberst and Sontag 2019). Other
conventions agree with the net as well, and have other counterfactuals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer import reference
from bnet_transformer._core.results import Fields, Result
from bnet_transformer.errors import BNetError, UnsupportedError
from bnet_transformer.graph import ancestral_order
from bnet_transformer.inference.plan import Plan, plan_reference
from bnet_transformer.inference.query import Query
from bnet_transformer.inference.values import get_normal
from bnet_transformer.reference import GroundModel, Interventions, ReferenceRun

GUMBEL_MAX = "Gumbel-max noise by convention: the net does not define the noise of a categorical"


@dataclass(frozen=True)
class Counterfactual(Result):
    """The distribution of a node under other interventions, given the evidence.

    A branch is a joint state of the random nodes in the counterfactual.

    Attributes:
        node: The name of the node.
        probabilities: The probability of each state of a discrete node, `[state]`; None for other nodes.
        values: The value of a node that is not discrete in each branch, `[branch, *shape]`; None for discrete nodes.
        weights: The probability of each branch, `[branch]`.
        sigma: The standard deviation in each branch, `[branch, *shape]`, of a continuous random node without evidence;
            None for other nodes.
        convention: The convention about the noise of a categorical, if the result depends on it.
        labels: The labels of the states, if they have labels.
    """

    _index = "state"
    _shapes = (
        "probabilities: real state; labels: any state; weights: real branch; values: number branch *_; sigma: real "
        "branch *_"
    )

    node: str
    probabilities: Tensor | None = None
    values: Tensor | None = field(default=None, repr=False)
    weights: Tensor | None = field(default=None, repr=False)
    sigma: Tensor | None = field(default=None, repr=False)
    convention: str | None = None
    labels: tuple[str, ...] | None = field(default=None, repr=False)

    @classmethod
    def _from_fields(cls, fields: Fields) -> Counterfactual:
        has_values = fields.get("values") is not None and fields.get("weights") is not None
        if has_values == (fields.get("probabilities") is not None):
            raise BNetError("counterfactual", expected="either probabilities, or values and weights")
        return cls(**fields)

    @property
    def mean(self) -> Tensor:
        """The mean value of a node that is not discrete, `[*shape]`."""
        if self.values is None or self.weights is None:
            raise BNetError(f"{self.node} is discrete and has no mean", hint="Use probabilities")
        values = self.values if self.values.is_floating_point() else self.values.to(self.weights.dtype)
        return torch.einsum("s,s...->...", self.weights.to(values.dtype), values)

    def _get_columns(self) -> Mapping[Any, Any]:
        if self.probabilities is not None:
            return {"state": range(len(self.probabilities)), "probability": self.probabilities}
        assert self.values is not None and self.weights is not None
        return {"weight": self.weights, **dict(enumerate(self.values.reshape(len(self.weights), -1).T))}

    @property
    def caption(self) -> str:
        """The node and the convention, in one line."""
        return f"{self.node} ({self.convention})" if self.convention else self.node


@dataclass(frozen=True)
class _Branch:
    """One joint state of the random nodes in the counterfactual: its probability, the value of each node by its id,
    and whether a value depends on the Gumbel-max convention.
    """

    weight: float
    states: dict[int, Tensor]
    is_conventional: bool


def plan_counterfactual(query: Query, interventions: Interventions) -> Plan[Counterfactual]:
    """The plan of the counterfactual distribution of a node by enumeration of the latent choices.

    Args:
        query: The node, and the evidence in the factual sentence.
        interventions: The interventions of the counterfactual sentence.

    Returns:
        The plan of the probabilities of a discrete node, or of the weighted values of another node.

    Raises:
        UnsupportedError: A continuous random ancestor of the evidence or the node is neither observed nor set; `run`
            raises it.
    """
    question, compute = f"counterfactual of {query.format_nodes()}", partial(_enumerate_branches, query, interventions)
    return plan_reference(question, query.model, query.choices, compute)


def _enumerate_branches(query: Query, interventions: Interventions) -> Counterfactual:
    """The counterfactual, from all joint states of the latent choices."""
    model, evidence, (target,) = query.model, query.evidence, query.nodes
    open_choices = query.choices
    reference.log_evidence(model, evidence, None, query.budget, query.atol)
    intervened, fixed = model.surgery(interventions), query.fixed
    order = [n for n in ancestral_order(intervened.ground, [target]) if n not in intervened.do]
    random_nodes = [node for node in order if model.spec(node).tpm.is_random]
    for node in random_nodes:
        if model.spec(node).tpm.kind == "continuous" and node not in fixed and node != target:
            name = model.ground.name(node)
            reason = f"{name} is random and continuous, other nodes depend on it, and it has no value"
            raise UnsupportedError(reason, hint=f"Set or observe {name}")
    # Abduction, action and prediction for one joint state of the choices at a time: its posterior weight is its joint
    # probability with the evidence, and each random node has the noise of the factual run. Nodes are in ancestral
    # order, so that the parents of a node already have their counterfactual values (a twin network, Balke and Pearl
    # 1994).
    all_branches: list[_Branch] = []
    twin = _TwinNetwork(intervened)
    for run in reference.enumerate_runs(model, open_choices, fixed, query.budget):
        log_weight = reference.log_joint(run, open_choices, evidence, query.atol)
        if log_weight > -math.inf:
            branches = [_Branch(math.exp(log_weight), {}, False)]
            for node in random_nodes:
                if node in run.states:
                    factual = run.distribution(node)
                    state = run.states[node]
                    branches = [new for old in branches for new in _propagate_branch(twin, old, node, factual, state)]
            all_branches += branches
    return _summarize_branches(twin, target, all_branches)


@dataclass(frozen=True)
class _TwinNetwork:
    """The model after the interventions, run once for each joint state of its choices."""

    model: GroundModel
    runs: dict[tuple[tuple[int, int], ...], ReferenceRun] = field(default_factory=dict)
    distributions: dict[tuple[ReferenceRun, int], Distribution] = field(default_factory=dict)

    def run(self, states: Mapping[int, Tensor]) -> ReferenceRun:
        """The run with these states of the random nodes; cached if all of them are discrete."""
        if any(state.is_floating_point() for state in states.values()):
            return ReferenceRun(self.model, states)
        key = tuple((node, int(state)) for node, state in states.items())
        return self.runs.setdefault(key, ReferenceRun(self.model, states))

    def distribution(self, states: Mapping[int, Tensor], node: int) -> Distribution:
        """`P(node | parents)` in the run with these states."""
        run = self.run(states)
        if (run, node) not in self.distributions:
            self.distributions[run, node] = run.distribution(node)
        return self.distributions[run, node]


def _propagate_branch(
    twin: _TwinNetwork, branch: _Branch, node: int, factual: Distribution, state: Tensor
) -> list[_Branch]:
    """Extend a branch by one random node.

    Args:
        twin: The model after the interventions.
        branch: The branch, which contains the values of the node's ancestors.
        node: The id of the node.
        factual: The distribution of the node in the factual run.
        state: The value of the node in the factual run.

    Returns:
        One branch for each possible value of the node. A continuous node has one value, because its noise is known.
    """
    model, intervened = twin.model, twin.distribution(branch.states, node)
    if model.spec(node).tpm.kind == "continuous":
        # The noise of a Normal is (state - mean) / sigma; it is the same in both runs.
        old, new = (get_normal(model.spec(node), distribution) for distribution in (factual, intervened))
        value = new.mean + new.stddev * (state - old.mean) / old.stddev
        return [_Branch(branch.weight, {**branch.states, node: value}, branch.is_conventional)]
    p, q = (distribution.probs.double() for distribution in (factual, intervened))  # type: ignore[attr-defined]
    probs = gumbel_max(p, q, int(state))
    is_conventional = branch.is_conventional or not torch.equal(p, q)
    return [
        _Branch(branch.weight * float(probs[m]), {**branch.states, node: torch.tensor(m)}, is_conventional)
        for m in torch.nonzero(probs).flatten().tolist()
    ]


def gumbel_max(p: Tensor, q: Tensor, state: int) -> Tensor:
    """The probability of each state under `q`, given that the same Gumbel noise gives `state` under `p`; closed form.

    Args:
        p: The factual probabilities, `[state]`.
        q: The counterfactual probabilities, `[state]`.
        state: The factual state.

    Returns:
        The counterfactual posterior, `[state]`.
    """
    # The argmax of log p + Gumbel noise is the first of independent exponential times with rates p. Under q the time of
    # state j is multiplied by r_j = p_j / q_j. Given that `state` was first, its time is exponential with rate 1, and
    # the others are that time plus fresh exponentials. So state m is first under q with probability
    # int_(r_m)^(r_state) q_m / L(s)^2 ds, where L(s) = 1 + sum_(j != state) q_j (s - r_j)_+ is piecewise linear;
    # `state` itself is first with probability 1 / L(r_state). The integral of 1 / L^2 over a linear piece is
    # width / (L(left) L(right)). A state with a ratio above r_state cannot overtake it
    # (counterfactual stability, Oberst and Sontag 2019, theorem 2).
    ratio = torch.where(q > 0, p / q, math.inf)
    if torch.equal(p, q) or bool(ratio[state] <= ratio.min()):
        return torch.nn.functional.one_hot(torch.tensor(state), len(p)).to(p.dtype)
    end = ratio[state]
    earlier = torch.argsort(ratio)[: int((ratio < end).sum())]
    knots = torch.cat([ratio[earlier], end[None]])
    widths, slopes = knots.diff(), q[earlier].cumsum(0)  # L is linear between the ratios
    heights = 1 + torch.cat([knots.new_zeros(1), (slopes * widths).cumsum(0)])
    areas = widths / (heights[:-1] * heights[1:])  # of 1 / L^2
    areas = torch.where(widths.isinf(), 1 / (slopes * heights[:-1]), areas)
    probs = torch.zeros_like(p)
    probs[earlier] = q[earlier] * areas.flip(0).cumsum(0).flip(0)
    probs[state] = 1 / heights[-1]
    return probs


def _summarize_branches(twin: _TwinNetwork, target: int, branches: list[_Branch]) -> Counterfactual:
    """Collect the branches by the state, or the value, of the target."""
    model = twin.model
    weights = torch.tensor([branch.weight for branch in branches], dtype=torch.float64)
    weights = weights / weights.sum()
    name = model.ground.name(target)
    convention = GUMBEL_MAX if any(branch.is_conventional for branch in branches) else None
    state = model.do.get(target)
    if model.spec(target).tpm.kind == "discrete" and (state is None or not state.is_floating_point()):
        states = torch.stack([branch.states[target] if state is None else state for branch in branches])
        probs = torch.zeros(model.count_states(target), dtype=torch.float64)
        probs = probs.index_add(0, states, weights).to(model.network.log_dtype)
        return Counterfactual(name, probs, convention=convention)
    values, sigmas = [], []
    for branch in branches:
        run = twin.run(branch.states)
        if model.spec(target).tpm.kind == "continuous" and target not in branch.states and target not in model.do:
            normal = get_normal(model.spec(target), run.distribution(target))
            values.append(normal.mean)
            sigmas.append(normal.stddev)
        else:
            values.append(run.value(target))
    sigma = torch.stack(sigmas) if sigmas else None
    return Counterfactual(name, None, torch.stack(values), weights.to(model.network.log_dtype), sigma, convention)
