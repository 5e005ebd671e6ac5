"""What limits a fit, read from its parameters: dead heads, heads that coincide, too few data, the scale of weights, and
directions of weights that the data do not determine."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor

from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.learning.fit.curvature import FlatLayout
from bnet_transformer.learning.fit.curvature_blocks import CurvatureBlocks
from bnet_transformer.learning.fit.head_summary import (
    DEAD_USAGE,
    find_invariant_parameters,
    find_selectors,
    invariants,
    occupancy,
)
from bnet_transformer.learning.fit.problem import FitObjective, Parameters

MAX_PRIOR_SCALE = 3.0  # root mean square of a weight, in standard deviations of its prior
COINCIDENT = 0.05  # relative distance of two heads that coincide
RANK_TOLERANCE = 1e-6  # of singular values
VARIANCE_DRAWS = 1000  # draws from which variances are compared
UNINFORMED_SHARE = 0.8  # a direction with this share of its prior variance is not determined by the data
MORE_DATA = "more sentences of this head, or sentences whose words differ in these directions, determine them"
Uninformed = dict[tuple[str, int], tuple[int, int]]  # by invariant and head: the number of directions, and of all


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


def find_learned_invariants(network: Network, selector: NodeSpec, learned: Container[str]) -> list[str]:
    """Return the names of the invariants of a selector whose parameters are all learned."""
    sources = find_invariant_parameters(network, selector)
    return [k for k, sides in sources.items() if all(name in learned for side in sides for name in side)]


def find_uninformed_by_blocks(objective: FitObjective, values: Parameters, blocks: CurvatureBlocks) -> Uninformed:
    """Find the invariants of heads with directions in which the posterior is about as wide as the prior.

    Args:
        objective: The objective of the fit.
        values: All parameters at the maximum.
        blocks: The blocks of the Gauss-Newton matrix of one set of parameters, with the prior.
    """
    # Weights may vary along the gradients of the entries of an invariant, which are orthogonal to all changes of the
    # basis of keys. There their covariance is compared with that of the prior, both to first order. A direction without
    # a gradient, such as those of A where W_q and W_k are 0, is one that the prior has shrunk to 0.
    network, learned, result = objective.network, objective.learned, Uninformed()
    layout = FlatLayout.create({name: value[None] for name, value in values.items()}, learned.weights)
    mode = layout.flatten({name: value[None].double().cpu() for name, value in values.items()})
    fixed = {name: value.double().cpu()[None] for name, value in values.items()}
    generic = torch.randn(mode.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for group, matrix in zip(blocks.groups, blocks.matrices, strict=True):
        if group.selector is None or learned.spread is None:
            continue
        inside = [name for name in learned.weights if bool(torch.isin(layout.locate([name]), group.index).all())]
        for name in find_learned_invariants(network, group.selector, inside):

            def evaluate(flat: Tensor, name: str = name, selector: NodeSpec = group.selector) -> Tensor:
                return invariants(network, selector, fixed | layout.unflatten(flat))[name]

            total = int(torch.linalg.matrix_rank(_differentiate(evaluate, generic, group.index)[0]))
            for head, J in enumerate(_differentiate(evaluate, mode, group.index)):
                _, singular, V = torch.linalg.svd(J, full_matrices=False)
                V = V[singular > RANK_TOLERANCE * max(1.0, float(singular.max()))]
                shares = torch.linalg.eigvalsh(V @ matrix[0, head].cpu().inverse() @ V.mT) / learned.spread**2
                if count := total - len(V) + int((shares > UNINFORMED_SHARE).sum()):
                    result[name, head] = count, total
    return result


def _differentiate(function: Callable[[Tensor], Tensor], at: Tensor, index: Tensor) -> Tensor:
    """The derivatives of an invariant by the entries of the block of each head, `[head, number, entry]`."""
    steps = torch.zeros(index.shape[1], at.shape[1], dtype=at.dtype)
    steps[torch.arange(index.shape[1])[:, None], index.mT] = 1.0  # the same entry of each head
    differences = function(at + steps) - function(at - steps)  # exact, because invariants are bilinear
    return (differences / 2).flatten(2).permute(1, 2, 0)


def count_uninformed(name: str, after: Tensor, before: Tensor) -> Uninformed:
    """Count the directions of an invariant of each head whose posterior variance is at least 80% of the prior variance.

    Args:
        name: The name of the invariant.
        after: Draws from the posterior, `[draw, head, dim, dim]`.
        before: Draws from the prior, of the same shape.
    """
    variance, result = before.var(0).flatten(1).mean(1), {}  # all entries of a matrix have one prior variance
    for head in range(len(variance)):
        covariance = torch.atleast_2d(torch.cov(after[:, head].flatten(1).mT))
        shares = torch.linalg.eigvalsh(covariance) / variance[head]
        if uninformed := int((shares > UNINFORMED_SHARE).sum()):
            result[name, head] = uninformed, len(shares)
    return result


def describe_uninformed(uninformed: Uninformed) -> str:
    """Describe directions that the data do not determine."""
    share = f"at least {UNINFORMED_SHARE:.0%} of the prior variance remains"
    directions = [
        f"{name} of head {k} ({count} of {total} directions)" for (name, k), (count, total) in uninformed.items()
    ]
    return f"the data do not determine {', '.join(directions)}: {share}; {MORE_DATA}"
