"""Predictions and posterior predictive checks of fitted nets."""

from __future__ import annotations

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
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.elimination import (
    compute_posterior,
    eliminate_choices,
    find_posterior_dims,
    get_batch_size,
    get_full_shape,
)
from bnet_transformer.inference.factors import (
    Factor,
    check_elimination_budget,
    find_ancestor_choices,
    log_prior,
    request_factors,
)

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
        factors = [request_factors(module, {}, spec.group.index, request, budget=budget) for request in requests]
        probs = [compute_posterior(module, spec.group.index, request) for request in factors]
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
    return gradient.flatten(0, first).reshape(*[shape[k] for k in find_posterior_dims(state, group)], size)


def default_statistics(num_states: int | None) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the default statistics of a check: the share of each state, or moments of a real-valued readout."""
    if num_states is not None:
        return {f"share of {k}": lambda y, k=k: (y == k).double().mean() for k in range(num_states)}  # type: ignore[misc]
    return {"mean": torch.mean, "variance": lambda y: y.flatten(0, -2).var(0).mean(), "kurtosis": _kurtosis}


def _kurtosis(y: Tensor) -> Tensor:
    """Compute the kurtosis, averaged over the dims of the readout."""
    values = y.flatten(0, -2)
    return (values - values.mean(0)).pow(4).mean() / values.var(0).square().mean()


def evaluate_number(subject: str, function: Any, argument: object, expected: str) -> float:
    """Call a function of the user, and check that it returns a number."""
    if not callable(function):
        raise BNetError(subject, expected=expected, actual=function)
    value = function(argument)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BNetError(subject, expected=expected, actual=value) from error


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
    evidence, expected = corpus.evidence[name], "a function of the observed values that returns a number"

    def evaluate(y: Tensor) -> list[float]:
        y = y if evidence.observed is None else y[evidence.observed]
        # A statistic may write to its argument.
        return [evaluate_number(f"statistic {label}", fn, y.clone(), expected) for label, fn in functions.items()]

    actual = torch.tensor(evaluate(evidence.value), dtype=torch.float64)
    rows = [evaluate(replicated[name]) for replicated in replicate(networks, corpus, draws)]
    table = torch.tensor(rows, dtype=torch.float64)
    p = ((table > actual).double() + 0.5 * (table == actual).double() + 0 * (table + actual)).mean(0)  # NaN stays NaN
    spread = table.std(0) if draws > 1 else table[0] * torch.nan
    by_label = [dict(zip(functions, row.tolist(), strict=True)) for row in (actual, table.mean(0), spread, p)]
    return Check(by_label[0], by_label[1], by_label[2], by_label[3], name)
