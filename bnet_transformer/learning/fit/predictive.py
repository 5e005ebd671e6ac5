"""Predictions and posterior predictive checks of fitted nets."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bnet_transformer._core.checks import check_mapping
from bnet_transformer._core.saved_results import SavedResult
from bnet_transformer._core.torch_context import enable_gradients, fork_torch_rng, seed_rngs
from bnet_transformer.bridges.pyro import PyroModel
from bnet_transformer.compiler import CompiledModule, ExecutionRequest
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.elimination import (
    eliminate_choices,
    get_batch_size,
    get_full_shape,
    has_posterior_dim,
    posterior,
)
from bnet_transformer.inference.factors import Factor, check_elimination_budget, find_ancestor_choices, log_prior

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Check(SavedResult):
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

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row for each statistic."""
        import pandas as pd

        columns = {"observed": self.observed, "mean": self.mean, "spread": self.spread, "p": self.p}
        return pd.DataFrame(columns).rename_axis(self.readout or None)

    def _repr_html_(self) -> str:
        """Return the table of the checks as HTML."""
        caption = html.escape(f"posterior predictive checks of {self.readout}")
        return f"<div>{caption}{self.to_dataframe().to_html()}</div>"


@enable_gradients()
def predict_readout(network: Network, name: str, parts: Sequence[Batch], budget: int) -> Tensor:
    """Compute `P(y | x)` of a discrete readout, `[sentence, word, state]`, or `E[y | x]`; choices are summed out."""
    module, spec = CompiledModule(network).eval(), network.get_spec(name)
    if spec.tpm.kind == "discrete":
        probs = [posterior(module, name, {}, p.x, p.mask, given=p.given, budget=budget) for p in parts]
        return torch.cat([part.expand(len(p), *part.shape[1:]) for part, p in zip(probs, parts, strict=True)])
    open_choices = _find_open_choices(network, spec)
    for part in parts[:1]:
        _, words, *_ = module.validate_inputs(part.x, part.given)
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
        return _predict_mean(self.module, self.spec, self.open_choices, batch, check_values=False)

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


def _predict_mean(
    module: CompiledModule, spec: NodeSpec, open_choices: list[int], batch: Batch, *, check_values: bool = True
) -> Tensor:
    """Compute `E[y | x]`, or the probabilities of a discrete readout, `[sentence, *plates, word, dim]`.

    The latent choices are summed out.
    """
    network = module.network
    names = (spec.group.name, *(network.specs[i].group.name for i in open_choices))  # of the groups with a factor
    enumerated = frozenset(open_choices)
    options: dict[str, Any] = {"enumerate_too": enumerated, "has_chains": True, "check_values": check_values}
    with torch.no_grad():
        state, _ = module.run(ExecutionRequest(names, batch.x, batch.mask, batch.given, **options))
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
