"""What limits a fit, read from its parameters: dead heads, heads that coincide, too few data, the scale of weights, and
directions of weights that the data do not determine; from its draws, how many independent draws they are worth; and
from its data, whether their scale is far from that of the prior.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BudgetError, UnsupportedError
from bnet_transformer.learning.fit.heads import (
    DEAD_USAGE,
    compute_invariant_samples,
    find_invariant_parameters,
    find_selectors,
    find_unidentified,
    head_dims,
    invariants,
    occupancy,
)
from bnet_transformer.learning.fit.identification import find_gauges
from bnet_transformer.learning.fit.objective import FitObjective, Parameters
from bnet_transformer.learning.fit.predictive import ReadoutPredictor, predict_readout
from bnet_transformer.tpm import Normal

MAX_PRIOR_SCALE = 3.0  # root mean square of a weight, in standard deviations of its prior
COINCIDENT = 0.05  # relative distance of two heads that coincide
NEGLIGIBLE = 1e-6  # a smaller weight, in standard deviations of its prior, is 0
MIN_VARIANCE_DRAWS, DRAWS_PER_NUMBER = 1000, 20  # draws from which variances are compared; for each number of a matrix
MIN_EFFECTIVE_DRAWS = 100  # n independent draws: 90% intervals hold 90 (n - 1) / (n + 1) percent
MAX_RHAT, MIN_RHAT_DRAWS = 1.1, 4  # above it chains disagree; it needs this number of draws of a chain
UNINFORMED_SHARE = 0.8  # a direction with this share of its prior variance is not determined by the data
MORE_DATA = "more sentences of this head, or sentences whose words differ in these directions, determine them"
Uninformed = dict[tuple[str, int], tuple[int, int]]  # by invariant and head: the number of directions, and of all


def count_free(network: Network, names: Iterable[str]) -> int:
    """Count the free numbers of parameters: the probabilities of n states sum to 1, so they are n - 1 numbers."""
    tables, values = set(network.unconditional_logit_names), {name: network.parameters[name] for name in names}
    return sum(v.numel() - (v.numel() // v.shape[-1] if name in tables else 0) for name, v in values.items())


def describe_parameters(objective: FitObjective, sentences: int, values: Parameters) -> list[str]:
    """Describe what limits a fit.

    Args:
        objective: The objective of the fit.
        sentences: The number of training sentences.
        values: All parameters of the fitted net.
    """
    network, notes = objective.network, []
    size = count_free(network, objective.learned.names)
    if sentences < size:
        counts = f"the number of sentences, {sentences}, is below that of the learned numbers, {size}"
        notes.append(f"{counts}: the prior determines a part of them" if objective.learned.spread else counts)
    if dead := find_dead_heads(network, values):
        remedy = "use fewer heads, or more sentences"
        notes.append(f"{', '.join(dead)}: dead (probability below {DEAD_USAGE}); {remedy}")
    # Weights that only the prior determines are 0 up to the tolerance of the optimiser, in each head.
    tiny = NEGLIGIBLE * (objective.learned.spread or 0.0)
    if same := find_coincident_heads(network, {k: v.where(v.abs() > tiny, 0.0) for k, v in values.items()}):
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
    """Find pairs of heads whose invariants, tables and other parameters differ by less than 5% of their norm.

    Args:
        network: The net.
        values: One set of all its parameters.
    """
    result = []
    for selector in find_selectors(network):
        parts = _split_by_head(network, selector, values)
        if not parts:
            continue
        heads = torch.cat([part.flatten(1) / part.norm().clamp(min=1e-30) for part in parts], 1)
        for a in range(len(heads)):
            for b in range(a + 1, len(heads)):
                scale = max(float(heads[a].norm()), float(heads[b].norm()), 1e-30)
                if float((heads[a] - heads[b]).norm()) < COINCIDENT * scale:
                    result.append(f"heads {a} and {b} of {selector.group.name}")
    return result


def _split_by_head(network: Network, selector: NodeSpec, values: Parameters) -> list[Tensor]:
    """Return what distinguishes heads, each `[head, ...]`: invariants, probabilities of tables, other parameters."""
    # The probability of a head does not distinguish it; the transitions of a chain along words do. If each head has a
    # separate gauge, only the invariants of its matrices can be compared.
    parts = list(invariants(network, selector, values).values())
    sources = find_invariant_parameters(network, selector).values()
    omitted = {name for sides in sources for side in sides for name in side}
    omitted |= {name for gauge in find_gauges(network) if gauge.shared for name in gauge.names}
    for name in sorted(values.keys() - omitted):
        dims, (owner, _, key) = head_dims(network, selector, name), name.rpartition(".")
        if not dims or (owner == selector.param_prefix and not (selector.parents and key == "logits")):
            continue
        value = values[name].detach()
        value = value.softmax(-1) if name in network.unconditional_logit_names else value
        parts.append(value.movedim(dims[0], 0).reshape(value.shape[dims[0]], -1))
    return parts


def _describe_scale(objective: FitObjective, values: Parameters) -> list[str]:
    """Describe the weights that are large in units of their prior."""
    learned = objective.learned
    if learned.spread is None:
        return []
    normal = [name for name in learned.weights if name not in learned.logits]  # others have a Dirichlet prior
    scales = {name: float(values[name].square().mean().sqrt()) / learned.spread for name in normal}
    large = {name: scale for name, scale in scales.items() if scale > MAX_PRIOR_SCALE}
    if not large:
        return []
    names = ", ".join(f"{name} ({scale:.1f})" for name, scale in large.items())
    problem = "weights are many standard deviations of their prior from 0"
    return [f"{problem}: {names}; use a larger spread=, or rescale the data"]


def find_learned_invariants(network: Network, selector: NodeSpec, learned: Collection[str]) -> list[str]:
    """Return the names of the identified invariants of a selector whose parameters are all learned."""
    sources, unidentified = find_invariant_parameters(network, selector), find_unidentified(network, learned)
    names = [k for k, sides in sources.items() if all(name in learned for side in sides for name in side)]
    return [name for name in names if name not in unidentified]


def count_uninformed(name: str, after: Tensor, before: Tensor) -> Uninformed:
    """Count the directions of an invariant of each head whose posterior variance is at least 80% of the prior variance.

    Args:
        name: The name of the invariant.
        after: Draws from the posterior, `[draw, head, dim, dim]`.
        before: Draws from the prior, of the same shape.
    """
    # Half of the draws determine the directions, and the other half the variances in these directions: the eigenvalues
    # of a sample covariance matrix are too spread (Marchenko and Pastur 1967).
    variance, result = before.var(0).flatten(1).mean(1), {}  # all entries of a matrix have one prior variance
    for head in range(len(variance)):
        first, second = after[:, head].flatten(1).chunk(2)
        axes = torch.linalg.eigh(torch.atleast_2d(torch.cov(first.mT))).eigenvectors
        shares = (second @ axes).var(0) / variance[head]
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


def count_effective(draws: Tensor) -> Tensor:
    """Compute the effective sample size of each number, at least 1, `[chain, draw, *shape]` to `[*shape]`."""
    # As the rank-normalised split version of Vehtari et al. 2021: ranks make it robust against heavy tails, and halves
    # of chains detect a drift. The estimate for constant draws is NaN.
    chains, count = draws.shape[:2]
    half = count // 2
    if half < 4:
        return draws.new_full(draws.shape[2:], chains)
    ranks = draws.flatten(0, 1).argsort(0).argsort(0).double().unflatten(0, (chains, count))
    size = effective_sample_size(ranks[:, : 2 * half].reshape(2 * chains, half, *draws.shape[2:]))
    is_constant = (draws == draws[:1, :1]).flatten(0, 1).all(0)
    return torch.where(is_constant | size.isnan(), 1.0, size.clamp(1.0, chains * count))


def compute_rhat(draws: Tensor) -> Tensor:
    """Compute the split R-hat of each number, `[chain, draw, *shape]` to `[*shape]`; 1 if all draws are equal."""
    if draws.shape[1] < MIN_RHAT_DRAWS:
        return draws.new_full(draws.shape[2:], torch.nan)
    is_constant = (draws == draws[:1, :1]).flatten(0, 1).all(0)
    return torch.where(is_constant, 1.0, split_gelman_rubin(draws.double()))


def describe_rhat(quantities: Mapping[str, Tensor]) -> str:
    """Describe the quantities with draws `[chain, draw, *shape]` on which chains disagree; "" if there are none."""
    rhats = {name: float(compute_rhat(draws).max()) for name, draws in quantities.items() if draws[0, 0].numel()}
    large = ", ".join(f"{name} ({rhat:.2f})" for name, rhat in rhats.items() if rhat > MAX_RHAT)
    problem = f"R-hat is above {MAX_RHAT} for {large}: the chains disagree, so intervals are not reliable"
    return f"{problem}; use more warmup= and draws=" if large else ""


def describe_effective(network: Network, samples: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Describe the parameters or invariants whose draws are not enough for intervals: chains that disagree, few draws.

    Args:
        network: The net.
        samples: The samples of its parameters, `[chain, draw, *shape]`, with tables as probabilities.
    """
    in_gauge = {name for gauge in find_gauges(network) for name in gauge.names} | {*find_unidentified(network, samples)}
    quantities = compute_invariant_samples(network, samples)
    for name, value in samples.items():
        has_one_state = name in network.logit_names and value.shape[-1] == 1
        if name not in in_gauge and not has_one_state:
            quantities[name] = value
    notes = [note] if (note := describe_rhat(quantities)) else []
    sizes = {name: float(count_effective(value).min()) for name, value in quantities.items()}
    if sizes and min(sizes.values()) < MIN_EFFECTIVE_DRAWS:
        name = min(sizes, key=sizes.__getitem__)
        draws = next(iter(samples.values())).shape[:2].numel()
        problem = f"the {draws} draws of {name} are worth {sizes[name]:.0f} independent draws"
        notes.append(f"{problem}: intervals need {MIN_EFFECTIVE_DRAWS}; use more draws= and chains=")
    return tuple(notes)


def describe_weighted(size: float) -> tuple[str, ...]:
    """Describe reweighted draws whose effective sample size is too small for intervals."""
    if size >= MIN_EFFECTIVE_DRAWS:
        return ()
    problem = f"the weighted draws are worth {size:.0f} independent draws"
    return (f"{problem}: intervals need {MIN_EFFECTIVE_DRAWS}; use more draws=, or method=bt.NUTS()",)


# --------------------------------------------------------------------------------------------------------------------
# Notes on data whose scale is far from the scale that the prior of the weights and the noise imply.
#
# All scales follow from the declaration: real-valued inputs, and observed `Normal` nodes with the prior predictive
# distribution of their means.

# Standardised data with a spread between 0.05 and 20 are within this factor. The root mean square of observations of a
# net that is drawn from its prior differs by less from the mean over the prior.
SCALE_FACTOR = 20.0
# y = mean + noise varies at least as much as its noise. For ten numbers a standard deviation below a third of the noise
# has a probability below 0.001.
MIN_NOISE_SHARE, MIN_NUMBERS = 1 / 3, 10
CONSTANT = 1e-6  # standard deviation of a constant input, relative to its root mean square
PRIOR_DRAWS, PRIOR_SENTENCES = 32, 64  # for the prior predictive scale


def describe_data_scale(objective: FitObjective, corpus: Batch) -> list[str]:
    """Describe inputs and observations whose scale is far from that of the prior and the noise.

    Args:
        objective: The objective of the fit.
        corpus: The training sentences.

    Returns:
        At most one note; none if no weights are learned.
    """
    network, learned = objective.network, objective.learned
    if all(name in learned.logits for name in learned.weights):
        return []
    readouts = [network.get_spec(name) for name in corpus.evidence]
    used = {spec.group.index for readout in readouts for spec in network.ancestral_specs(readout)}
    specs = [spec for spec in network.specs if spec.tpm.kind == "input" and spec.group.index in used]
    inputs = [(spec, rows) for spec in specs if (rows := _get_input(spec, corpus)) is not None]
    words = [(spec, rows) for spec, rows in inputs if spec.group.name not in corpus.given]
    notes = [note for spec, rows in words if (note := _describe_constant(spec, rows))]
    scales = [_describe_input(spec, rows, learned.spread) for spec, rows in inputs]
    outputs = [_describe_readout(objective, corpus, spec) for spec in readouts if isinstance(spec.tpm, Normal)]
    if not (faults := [fault for fault in (*scales, *outputs) if fault]):
        return notes
    options = [] if learned.spread is None else ["spread="]
    options += ["noise (sigma)"] if any(outputs) else []
    remedy = "rescale (standardise) the data first" + (f", or use another {' or '.join(options)}" if options else "")
    return [f"{'; '.join(faults)}: {remedy}", *notes]


def _describe_input(spec: NodeSpec, rows: Tensor, spread: float | None) -> str:
    """Describe an input if its product with a weight of the prior is far from 1."""
    # The scores of attention and other arguments of nonlinear functions are products of inputs and weights, and the
    # scale of these functions is 1. An offset counts too.
    scale = float(rows.square().mean(0).sqrt().max()) * (spread or 1.0)
    if scale == 0 or 1 / SCALE_FACTOR <= scale <= SCALE_FACTOR:
        return ""
    limits = f"outside {1 / SCALE_FACTOR:g} to {SCALE_FACTOR:g}"
    products = f"its products with weights of standard deviation {spread or 1.0:g} are about {scale:.2g}, {limits}"
    return f"{_describe_moments(spec, rows)}; {products}"


def _describe_constant(spec: NodeSpec, rows: Tensor) -> str:
    """Describe an input of words that is equal for all words."""
    if len(rows) < 2 or float(rows.std(0).max()) > CONSTANT * float(rows.square().mean().sqrt()):
        return ""
    return (
        f"{_describe_moments(spec, rows)}: all words are equal, so the data do not determine to which words a word "
        "attends; use sentences whose words differ"
    )


def _get_input(spec: NodeSpec, corpus: Batch) -> Tensor | None:
    """Return the vectors of a real-valued input, `[row, feature]`; None for other inputs."""
    value = corpus.given.get(spec.group.name, corpus.x.get(spec.group.word_stack or ""))
    if value is None or not value.is_floating_point():
        return None
    return _select_rows(spec, value, corpus, None)


def _describe_moments(spec: NodeSpec, rows: Tensor) -> str:
    """Describe the mean and the standard deviation of the numbers of a node."""
    return f"{spec.group.name} has mean {float(rows.mean()):.3g} and standard deviation {_std(rows):.3g}"


def _std(rows: Tensor) -> float:
    """Compute the root mean square over features of their standard deviations."""
    return float(rows.var(0, correction=0).mean().sqrt())


def _describe_readout(objective: FitObjective, corpus: Batch, spec: NodeSpec) -> str:
    """Describe an observed Normal node that varies less than its noise, or is far larger than under the prior."""
    name, network = spec.group.name, objective.network
    evidence = corpus.evidence[name]
    rows = _select_rows(spec, evidence.value, corpus, evidence.observed)
    if rows.numel() < MIN_NUMBERS or len(rows) < 2:
        return ""
    described = _describe_moments(spec, rows)
    parameter = f"{spec.param_prefix}.log_sigma"
    sigmas = network.parameters[parameter].detach().exp() * (parameter not in objective.learned.names)  # of its plates
    sigma = float(sigmas.max())
    if _std(rows) < MIN_NOISE_SHARE * float(sigmas.min()):
        return f"{described}, below a third of the standard deviation of its noise, {sigma:.3g}"
    signal = float(rows.square().mean()) - sigma**2
    if objective.learned.spread is None or signal < 3 * sigma**2:
        return ""
    prior = _compute_prior_scale(objective, corpus, name)
    if not prior or not math.isfinite(prior) or signal**0.5 <= SCALE_FACTOR * prior:
        return ""
    factor = f"more than {SCALE_FACTOR:g} times that of the prior, {prior:.3g}"
    return f"{described}; its root mean square without noise, {signal**0.5:.3g}, is {factor}"


def _compute_prior_scale(objective: FitObjective, corpus: Batch, name: str) -> float | None:
    """Compute the root mean square of `E[y | x]` under the prior; None if the choices cannot be summed."""
    part = corpus if objective.has_corpus_choice else corpus.take(slice(0, PRIOR_SENTENCES))
    part = Batch(part.x, part.mask, {}, part.given)
    network = objective.network.to(objective.device)
    try:
        predict_readout(network, name, [part.take(slice(0, 1))], objective.budget)  # checks the budget
    except (BudgetError, UnsupportedError):
        return None
    means = ReadoutPredictor(network, name).predict(_sample_prior(objective, network), part)
    return float(means.double().square().mean().sqrt())


def _sample_prior(objective: FitObjective, network: Network) -> dict[str, Tensor]:
    """Draw sets of the learned parameters from their prior, `[set, *shape]`."""
    learned, generator, result = objective.learned, torch.Generator().manual_seed(0), dict[str, Tensor]()
    concentrations = {**learned.tables, **learned.logits}
    for name in learned.names:
        like, shape = network.parameters[name], (PRIOR_DRAWS, *network.parameters[name].shape)
        if name in concentrations:
            gamma = torch._standard_gamma(concentrations[name].expand(shape).contiguous(), generator=generator)
            value = gamma.clamp(min=torch.finfo(torch.float32).tiny).log().log_softmax(-1)
        else:
            value = (learned.spread or 1.0) * torch.randn(shape, generator=generator, dtype=torch.float64)
        result[name] = value.to(like)
    return result


def _select_rows(spec: NodeSpec, value: Tensor, corpus: Batch, observed: Tensor | None) -> Tensor:
    """Return the vectors of a node that are present and observed, in float64, `[row, feature]`."""
    rows = value.detach().double()
    rows = rows.reshape(*rows.shape[: rows.dim() - len(spec.shape)], math.prod(spec.shape))
    present = corpus.get_present(spec)
    if observed is None and present is not None:
        observed = present[:, *[None] * len(spec.group.plates)].expand(rows.shape[:-1])
    return rows.flatten(0, -2) if observed is None else rows[observed]
