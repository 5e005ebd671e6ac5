"""What limits a fit, read from its parameters: dead heads, heads that coincide, too few data, the scale of weights."""

from __future__ import annotations

import torch

from bnet_transformer.declare import Network
from bnet_transformer.learning.fit.head_summary import DEAD_USAGE, find_selectors, invariants, occupancy
from bnet_transformer.learning.fit.problem import FitObjective, Parameters

MAX_PRIOR_SCALE = 3.0  # root mean square of a weight, in standard deviations of its prior
COINCIDENT = 0.05  # relative distance of two heads that coincide


def describe_parameters(objective: FitObjective, sentences: int, size: int, values: Parameters) -> list[str]:
    """Describe what limits a fit.

    Args:
        objective: The objective of the fit.
        sentences: The number of training sentences.
        size: The number of learned numbers.
        values: All parameters of the fitted net.
    """
    network, notes = objective.network, []
    if sentences < size:
        counts = f"the number of sentences, {sentences}, is below that of the learned numbers, {size}"
        notes.append(f"{counts}: the prior determines a part of them" if objective.learned.spread else counts)
    if dead := find_dead_heads(network, values):
        remedy = "use fewer heads, or more sentences"
        notes.append(f"{', '.join(dead)}: dead (probability below {DEAD_USAGE}); {remedy}")
    if same := find_coincident_heads(network, values):
        notes.append(f"{', '.join(same)} coincide; use fewer heads, or sentences that distinguish them")
    return notes + _describe_scale(objective, values)


def find_dead_heads(network: Network, values: Parameters) -> list[str]:
    """Find the heads with a probability below 0.01, at one set of parameters."""
    result = []
    for selector in find_selectors(network):
        theta = {
            name.removesuffix(".logits"): values[name].detach().softmax(-1)
            for name in network.unconditional_logit_names
        }
        usage = occupancy(selector, theta)
        result += [f"head {k} of {selector.group.name}" for k in (usage < DEAD_USAGE).nonzero()[:, 0].tolist()]
    return result


def find_coincident_heads(network: Network, values: Parameters) -> list[str]:
    """Find pairs of heads whose invariants differ by less than 5% of their norm, at one set of parameters."""
    result = []
    for selector in find_selectors(network):
        matrices = list(invariants(network, selector, values).values())
        if not matrices:
            continue
        heads = torch.cat([matrix.flatten(1) / matrix.norm().clamp(min=1e-30) for matrix in matrices], 1)
        for a in range(len(heads)):
            for b in range(a + 1, len(heads)):
                scale = max(float(heads[a].norm()), float(heads[b].norm()), 1e-30)
                if float((heads[a] - heads[b]).norm()) < COINCIDENT * scale:
                    result.append(f"heads {a} and {b} of {selector.group.name}")
    return result


def _describe_scale(objective: FitObjective, values: Parameters) -> list[str]:
    """Describe the weights that are large in units of their prior."""
    learned = objective.learned
    if learned.spread is None:
        return []
    scales = {name: float(values[name].square().mean().sqrt()) / learned.spread for name in learned.weights}
    large = {name: scale for name, scale in scales.items() if scale > MAX_PRIOR_SCALE}
    if not large:
        return []
    names = ", ".join(f"{name} ({scale:.1f})" for name, scale in large.items())
    problem = "weights are many standard deviations of their prior from 0"
    return [f"{problem}: {names}; use a larger spread=, or rescale the data"]
