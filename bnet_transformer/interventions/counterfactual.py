"""Counterfactuals: what a node would have been, had others been set, given what was seen.

Abduction: the posterior of the choices, and the noise of what was seen. Action: `do`. Prediction: the net again, with
that noise. The noise of a Normal is its residual. A categorical does not say what its noise is: Gumbel-max is the
convention here (Oberst and Sontag 2019), one of many that agree with the net and differ in their counterfactuals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer import reference
from bnet_transformer.errors import BNetError, UnsupportedError
from bnet_transformer.graph import ancestral_order
from bnet_transformer.inference.node_evaluator import get_normal
from bnet_transformer.inference.query import Query
from bnet_transformer.inference.routing import route_reference
from bnet_transformer.reference import GroundModel, Interventions, ReferenceRun
from bnet_transformer.tpm.arrays import to_numpy

if TYPE_CHECKING:
    import pandas as pd

GUMBEL_MAX = "Gumbel-max, a convention: the net does not say what the noise of a categorical is"


@dataclass(frozen=True)
class Counterfactual:
    """What a node would have been.

    Of a discrete node `probabilities`; of any other `values[s]`, `[s, *shape]`, with `weights[s]` (and `sigma[s]` of a
    random real node that was not seen). `convention` says on what categorical noise the answer hangs, where it does.
    `labels` are what the states are called, where they have names.
    """

    node: str
    probabilities: Tensor | None = None
    values: Tensor | None = field(default=None, repr=False)
    weights: Tensor | None = field(default=None, repr=False)
    sigma: Tensor | None = field(default=None, repr=False)
    convention: str | None = None
    labels: tuple[str, ...] | None = field(default=None, repr=False)

    @property
    def mean(self) -> Tensor:
        """The mean value of a node that is not discrete."""
        if self.values is None or self.weights is None:
            raise BNetError(self.node, expected="a node with real values", actual="a discrete one: see probabilities")
        values = self.values if self.values.is_floating_point() else self.values.to(self.weights.dtype)
        return torch.einsum("s,s...->...", self.weights.to(values.dtype), values)

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each state, or for each value with its weight."""
        import pandas as pd

        if self.probabilities is not None:
            return pd.DataFrame({"probability": to_numpy(self.probabilities)}).rename_axis("state")
        assert self.values is not None and self.weights is not None
        frame = pd.DataFrame(to_numpy(self.values.reshape(len(self.weights), -1)))
        frame.insert(0, "weight", to_numpy(self.weights))
        return frame

    def _repr_html_(self) -> str:
        told = f" ({self.convention})" if self.convention else ""
        return f"<p>{self.node}{told}</p>{self.to_dataframe().to_html()}"


@dataclass(frozen=True)
class _Branch:
    """A course of events that might have been: its weight, what random nodes came to, and whether the convention
    decided any of it."""

    weight: float
    states: dict[int, Tensor]
    is_conventional: bool


def counterfactual(query: Query, interventions: Interventions) -> Counterfactual:
    """What a node would have been under other interventions, by enumeration.

    Args:
        query: The node that is asked for, and the evidence in the sentence as it was.
        interventions: The interventions.
    """
    world, evidence, (target,) = query.model, query.evidence, query.nodes
    free = query.choices
    route_reference(f"counterfactual of {query.format_nodes()}", world, free).warn_if_slow()
    reference.log_evidence(world, evidence, None, query.budget, query.atol)
    other, settled = world.surgery(interventions), query.fixed
    order = [n for n in ancestral_order(other.ground, [target]) if n not in other.do]
    random = [node for node in order if world.spec(node).tpm.is_random]
    for node in random:
        if world.spec(node).tpm.kind == "continuous" and node not in settled and node != target:
            wanted = "what a random real node came to, for others read it"
            raise UnsupportedError(world.ground.name(node), expected=wanted, actual="neither evidence nor do")
    found: list[_Branch] = []
    twin = _TwinNetwork(other)
    for run in reference.enumerate_runs(world, free, settled, query.budget):
        log = reference.log_joint(run, free, evidence, query.atol)
        if log > -math.inf:
            branches = [_Branch(math.exp(log), {}, False)]
            for node in random:
                if node in run.states:
                    before = run.distribution(node)
                    state = run.states[node]
                    branches = [
                        step for each in branches for step in _propagate_branch(twin, each, node, before, state)
                    ]
            found += branches
    return _summarize_branches(twin, target, found)


@dataclass(frozen=True)
class _TwinNetwork:
    """The world as it might have been, run once for each joint state of its choices."""

    model: GroundModel
    runs: dict[tuple[tuple[int, int], ...], ReferenceRun] = field(default_factory=dict)
    distributions: dict[tuple[ReferenceRun, int], Distribution] = field(default_factory=dict)

    def run(self, states: Mapping[int, Tensor]) -> ReferenceRun:
        """The run of these states, kept where they are all choices."""
        if any(state.is_floating_point() for state in states.values()):
            return ReferenceRun(self.model, states)
        key = tuple((node, int(state)) for node, state in states.items())
        return self.runs.setdefault(key, ReferenceRun(self.model, states))

    def distribution(self, states: Mapping[int, Tensor], node: int) -> Distribution:
        """`P(node | its parents)` in that run."""
        run = self.run(states)
        if (run, node) not in self.distributions:
            self.distributions[run, node] = run.distribution(node)
        return self.distributions[run, node]


def _propagate_branch(
    twin: _TwinNetwork, branch: _Branch, node: int, factual: Distribution, state: Tensor
) -> list[_Branch]:
    """The branches after one random node: its noise made `state` of `factual`, its parents are those of the branch."""
    other, after = twin.model, twin.distribution(branch.states, node)
    if other.spec(node).tpm.kind == "continuous":
        was, would_be = (get_normal(other.spec(node), each) for each in (factual, after))
        value = would_be.mean + would_be.stddev * (state - was.mean) / was.stddev
        return [_Branch(branch.weight, {**branch.states, node: value}, branch.is_conventional)]
    p, q = (each.probs.double() for each in (factual, after))  # type: ignore[attr-defined]
    share = gumbel_max(p, q, int(state))
    assumed = branch.is_conventional or not torch.equal(p, q)
    return [
        _Branch(branch.weight * float(share[m]), {**branch.states, node: torch.tensor(m)}, assumed)
        for m in torch.nonzero(share).flatten().tolist()
    ]


def gumbel_max(p: Tensor, q: Tensor, state: int) -> Tensor:
    """`P(the state under q | it was `state` under p)` when one Gumbel noise makes both; in closed form.

    As a race of exponential times with rates p, the first was `state`; under q each time is longer by r = p / q. With
    `L(s) = 1 + sum_(j != state) q_j (s - r_j)_+`, state m wins with `int_(r_m)^(r_state) q_m / L(s)^2 ds`.
    """
    ratio = torch.where(q > 0, p / q, math.inf)
    if torch.equal(p, q) or bool(ratio[state] <= ratio.min()):
        return torch.nn.functional.one_hot(torch.tensor(state), len(p)).to(p.dtype)
    end = ratio[state]
    others = torch.argsort(ratio)[: int((ratio < end).sum())]
    knots = torch.cat([ratio[others], end[None]])
    widths, slopes = knots.diff(), q[others].cumsum(0)  # L is linear between the ratios
    heights = 1 + torch.cat([knots.new_zeros(1), (slopes * widths).cumsum(0)])
    areas = widths / (heights[:-1] * heights[1:])  # of 1 / L^2
    areas = torch.where(widths.isinf(), 1 / (slopes * heights[:-1]), areas)
    found = torch.zeros_like(p)
    found[others] = q[others] * areas.flip(0).cumsum(0).flip(0)
    found[state] = 1 / heights[-1]
    return found


def _summarize_branches(twin: _TwinNetwork, target: int, branches: list[_Branch]) -> Counterfactual:
    """The answer: the branches by what the query comes to."""
    other = twin.model
    weights = torch.tensor([branch.weight for branch in branches], dtype=torch.float64)
    weights = weights / weights.sum()
    name = other.ground.name(target)
    convention = GUMBEL_MAX if any(branch.is_conventional for branch in branches) else None
    state = other.do.get(target)
    if other.spec(target).tpm.kind == "discrete" and (state is None or not state.is_floating_point()):
        states = torch.stack([branch.states[target] if state is None else state for branch in branches])
        share = torch.zeros(other.count_states(target), dtype=torch.float64)
        share = share.index_add(0, states, weights).to(other.network.log_dtype)
        return Counterfactual(name, share, convention=convention)
    values, sigmas = [], []
    for branch in branches:
        run = twin.run(branch.states)
        if other.spec(target).tpm.kind == "continuous" and target not in branch.states and target not in other.do:
            normal = get_normal(other.spec(target), run.distribution(target))
            values.append(normal.mean)
            sigmas.append(normal.stddev)
        else:
            values.append(run.value(target))
    spread = torch.stack(sigmas) if sigmas else None
    return Counterfactual(name, None, torch.stack(values), weights.to(other.network.log_dtype), spread, convention)
