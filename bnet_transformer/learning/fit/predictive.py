"""Predictions and posterior predictive checks of fitted nets, and notes on data of another scale than the prior."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bnet_transformer._core.checks import check_mapping
from bnet_transformer._core.results import Result
from bnet_transformer._core.tensors import enable_gradients, fork_torch_rng, seed_rngs
from bnet_transformer.bridges.pyro import PyroModel
from bnet_transformer.compiler import CompiledModule
from bnet_transformer.compiler.gather import batch_to_request, gather_parents
from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError, BudgetError, UnsupportedError
from bnet_transformer.inference.elimination import (
    compute_posterior,
    eliminate_choices,
    get_batch_size,
    get_full_shape,
    has_posterior_dim,
)
from bnet_transformer.inference.factors import Factor, check_elimination_budget, find_ancestor_choices, log_prior
from bnet_transformer.learning.fit.objective import FitObjective
from bnet_transformer.tpm import Normal

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Check(Result):
    """Posterior predictive checks of a readout: each statistic of the data and of replicated data.

    Attributes:
        observed: The statistic of the data, by name.
        mean: The mean of the statistic over the replicated data sets, by name.
        spread: The standard deviation of the statistic over the replicated data sets, by name.
        p: The share of replicated data sets with a larger statistic, by name; ties count one half.
        readout: The name of the readout.
    """

    observed: Mapping[str, float]
    mean: Mapping[str, float]
    spread: Mapping[str, float]
    p: Mapping[str, float]
    readout: str = ""

    def _get_columns(self) -> Mapping[str, Any]:
        return {"observed": self.observed, "mean": self.mean, "spread": self.spread, "p": self.p}

    def to_dataframe(self) -> pd.DataFrame:
        """A data frame with a row for each statistic."""
        return super().to_dataframe().rename_axis(self.readout or None)

    @property
    def caption(self) -> str:
        """The readout, in one line."""
        return f"posterior predictive checks of {self.readout}"


@enable_gradients()
def predict_readout(network: Network, name: str, parts: Sequence[Batch], budget: int) -> Tensor:
    """Compute `P(y | x)` of a discrete readout, `[sentence, word, state]`, or `E[y | x]`; choices are summed out."""
    module, spec = CompiledModule(network).eval(), network.get_spec(name)
    if spec.tpm.kind == "discrete":
        requests = [batch_to_request(network, part) for part in parts]
        probs = [compute_posterior(module, spec.group.index, {}, request, budget=budget) for request in requests]
        return torch.cat([part.expand(len(p), *part.shape[1:]) for part, p in zip(probs, parts, strict=True)])
    open_choices = _find_open_choices(network, spec)
    for part in parts[:1]:
        words = batch_to_request(network, part).word_counts
        choices = find_ancestor_choices(network, spec.group.index, {*open_choices}, set())
        check_elimination_budget(network, spec.group.index, choices, words, budget)
    means = [_predict_mean(module, spec, open_choices, part) for part in parts]
    return torch.cat([mean.expand(len(part), *mean.shape[1:]) for mean, part in zip(means, parts, strict=True)])


class ReadoutPredictor(nn.Module):
    """Predicts a readout for many sets of parameters at once.

    Args:
        network: The net.
        name: The readout.
    """

    def __init__(self, network: Network, name: str) -> None:
        super().__init__()
        self.module, self.spec = CompiledModule(network).eval(), network.get_spec(name)
        for value in self.module.store.values():
            value.requires_grad_(False)
        self.open_choices = _find_open_choices(network, self.spec)

    def forward(self, batch: Batch) -> Tensor:
        """Compute the mean of the readout, `[sentence, *plates, word, dim]`."""
        return _predict_mean(self.module, self.spec, self.open_choices, batch)

    def predict(self, sets: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Compute `P(y | x)` of a discrete readout, or `E[y | x]`, for each set, `[set, sentence, ...]`.

        The budget is not checked: see `predict_readout`.
        """

        def evaluate(parameters: dict[str, Tensor]) -> Tensor:
            stored = {f"module.store.{name.replace('.', '/')}": value for name, value in parameters.items()}
            result: Tensor = torch.func.functional_call(self, stored, (batch,))
            return result

        return torch.vmap(evaluate)(dict(sets))


def _find_open_choices(network: Network, spec: NodeSpec) -> list[int]:
    """Find the latent choices on which a readout depends."""
    out_of = network.graph.out_edges
    ancestors = [m.group.index for m in network.ancestral_specs(spec) if m.tpm.kind == "discrete"]
    return [index for index in ancestors if out_of[index] and index != spec.group.index]


def _predict_mean(module: CompiledModule, spec: NodeSpec, open_choices: list[int], batch: Batch) -> Tensor:
    """Compute `E[y | x]`, or the probabilities of a discrete readout, `[sentence, *plates, word, dim]`.

    The latent choices are summed out.
    """
    network = module.network
    outputs = (spec.group.index, *open_choices)  # the groups with a factor
    request = batch_to_request(network, batch, outputs, enumerate_too=frozenset(open_choices), has_chains=True)
    with torch.no_grad():
        state, _ = module.execute(request)
        context, parents = gather_parents(state, spec)
        distribution: Any = spec.tpm.distribution(context, *parents)
        mean = distribution.probs if spec.tpm.kind == "discrete" else distribution.mean
        priors = [Factor(network.specs[i], log_prior(state, i, network.specs[i])) for i in open_choices]
    group, first = spec.group, state.layout.batch_dim
    num_dims = first + 1 + len(group.plates) + (group.word_stack is not None)  # of a factor; a root may have fewer
    mean = mean.reshape(*[1] * (num_dims - mean.dim() + 1), *mean.shape)
    shape = get_full_shape(state, group.plates, group.word_stack, get_batch_size([Factor(spec, mean[..., 0])], state))

    # E[y | x] = sum_c P(c | x) E[y | x, c]. Elimination computes the log of a sum of products, not an expectation, so
    # the mean comes from the cumulant generating function: d/dt log E[exp(t . mean)] at t = 0 is E[mean].
    def generate_cumulants(tilt: Tensor) -> Tensor:
        return eliminate_choices(state, [*priors, Factor(spec, (tilt * mean).sum(-1))]).sum()

    size = mean.shape[-1]
    gradient: Tensor = torch.func.grad(generate_cumulants)(mean.new_zeros((*shape, size)))
    dims = [n for k, n in enumerate(shape[first:]) if has_posterior_dim(state, group, first + k)]
    return gradient.flatten(0, first).reshape(*dims, size)


def default_statistics(num_states: int | None) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the default statistics of a check: the share of each state, or moments of a real-valued readout."""
    if num_states is not None:
        return {f"share of {k}": lambda y, k=k: (y == k).double().mean() for k in range(num_states)}  # type: ignore[misc]
    return {"mean": torch.mean, "variance": lambda y: y.flatten(0, -2).var(0).mean(), "kurtosis": _kurtosis}


def _kurtosis(y: Tensor) -> Tensor:
    """Compute the kurtosis, averaged over the dims of the readout."""
    values = y.flatten(0, -2)
    return (values - values.mean(0)).pow(4).mean() / values.var(0).square().mean()


def _evaluate_statistic(name: str, statistic: Any, y: Tensor) -> float:
    """Evaluate a statistic of the observed words `y`, and check that it is a number."""
    expected = "a function of the observed values that returns a number"
    if not callable(statistic):
        raise BNetError(f"statistic {name}", expected=expected, actual=statistic)
    value = statistic(y.clone())  # a statistic may write to its argument
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BNetError(f"statistic {name}", expected=expected, actual=value) from error


def replicate(networks: Sequence[Network], corpus: Batch, draws: int) -> Iterator[dict[str, Tensor]]:
    """Sample the observations of all sentences, in their shape, from each of `draws` nets, which are used in turn."""
    for k in range(draws):
        network = networks[k % len(networks)]
        with fork_torch_rng(network.device), torch.no_grad():
            seed_rngs(k, network.device)
            model = PyroModel(network, parameters="own")
            sites = model(corpus.x, mask=corpus.mask, given=corpus.given, batch=len(corpus))
        yield {name: sites[name].reshape(evidence.value.shape) for name, evidence in corpus.evidence.items()}


def check_posterior_predictive(
    networks: Sequence[Network], name: str, corpus: Batch, statistics: object, draws: int, num_states: int | None
) -> Check:
    """Run posterior predictive checks: each draw takes one net of the posterior and samples all sentences from it.

    A statistic receives only the observed values: the tensor itself, or the observed words in one dim if some are
    missing.
    """
    # Replicated data y_rep ~ p(y | theta_k) with theta_k from the posterior; p = P(T(y_rep) > T(y)) is the posterior
    # predictive p-value (Gelman, Meng and Stern 1996). Half of the ties counts, so that p is centred for discrete T.
    functions = dict(check_mapping("statistics", statistics)) or default_statistics(num_states)
    evidence = corpus.evidence[name]

    def select_observed(y: Tensor) -> Tensor:
        return y if evidence.observed is None else y[evidence.observed]

    def evaluate(y: Tensor) -> list[float]:
        return [_evaluate_statistic(label, fn, select_observed(y)) for label, fn in functions.items()]

    observed = evaluate(evidence.value)
    rows = []
    for replicated in replicate(networks, corpus, draws):
        rows.append(evaluate(replicated[name]))
    table, actual = (torch.tensor(values, dtype=torch.float64) for values in (rows, observed))
    p = ((table > actual).double() + 0.5 * (table == actual).double() + 0 * (table + actual)).mean(0)  # NaN stays NaN
    spread = table.std(0) if draws > 1 else table[0] * torch.nan
    rows = [actual.tolist(), table.mean(0).tolist(), spread.tolist(), p.tolist()]
    by_label = [dict(zip(functions, row, strict=True)) for row in rows]
    return Check(by_label[0], by_label[1], by_label[2], by_label[3], name)


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
