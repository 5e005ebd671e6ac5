"""Notes on data whose scale is far from the scale that the prior of the weights and the noise imply.

All scales follow from the declaration: real-valued inputs, and observed `Normal` nodes with the prior predictive
distribution of their means.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BudgetError, UnsupportedError
from bnet_transformer.learning.fit.predictive import ReadoutPredictor, predict_readout
from bnet_transformer.learning.fit.problem import FitObjective
from bnet_transformer.tpm import Normal

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
    inputs = [spec for spec in network.specs if spec.tpm.kind == "input" and spec.group.index in used]
    notes = [note for spec in inputs if (note := _describe_constant(spec, corpus))]
    scales = [_describe_input(spec, corpus, learned.spread) for spec in inputs]
    outputs = [_describe_readout(objective, corpus, spec) for spec in readouts if isinstance(spec.tpm, Normal)]
    if not (faults := [fault for fault in (*scales, *outputs) if fault]):
        return notes
    options = [] if learned.spread is None else ["spread="]
    options += ["noise (sigma)"] if any(outputs) else []
    remedy = "rescale (standardise) the data first" + (f", or use another {' or '.join(options)}" if options else "")
    return [f"{'; '.join(faults)}: {remedy}", *notes]


def _describe_input(spec: NodeSpec, corpus: Batch, spread: float | None) -> str:
    """Describe an input if its product with a weight of the prior is far from 1."""
    rows = _get_input(spec, corpus)
    # The scores of attention and other arguments of nonlinear functions are products of inputs and weights, and the
    # scale of these functions is 1. An offset counts too.
    scale = 0.0 if rows is None else float(rows.square().mean(0).sqrt().max()) * (spread or 1.0)
    if rows is None or scale == 0 or 1 / SCALE_FACTOR <= scale <= SCALE_FACTOR:
        return ""
    limits = f"outside {1 / SCALE_FACTOR:g} to {SCALE_FACTOR:g}"
    products = f"its products with weights of standard deviation {spread or 1.0:g} are about {scale:.2g}, {limits}"
    return f"{_describe_moments(spec, rows)}; {products}"


def _describe_constant(spec: NodeSpec, corpus: Batch) -> str:
    """Describe an input of words that is equal for all words."""
    rows = _get_input(spec, corpus)
    if rows is None or len(rows) < 2 or spec.group.name in corpus.given:
        return ""
    if float(rows.std(0).max()) > CONSTANT * float(rows.square().mean().sqrt()):
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
    stack = spec.group.word_stack
    present = None if stack is None or corpus.mask is None else corpus.mask.get(stack)
    if observed is None and present is not None:
        observed = present[:, *[None] * len(spec.group.plates)].expand(rows.shape[:-1])
    return rows.flatten(0, -2) if observed is None else rows[observed]
