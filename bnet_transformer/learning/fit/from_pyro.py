"""`fit_from_pyro`: a fit from samples, a guide or a kernel that the user ran in Pyro on `net.pyro()`.

The steps are: samples of sites, samples of parameters, alignment of the heads, `Fit`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer import MCMC, Importance
from torch import Tensor
from torch.distributions import Distribution

from bnet_transformer._core.checks import check_int, check_mapping, check_seed
from bnet_transformer._core.files import derive_seed
from bnet_transformer._core.stats import effective_sample_size, resample
from bnet_transformer._core.tensors import fork_torch_rng, seed_rngs
from bnet_transformer.bridges.pyro import PyroModel, check_probabilities
from bnet_transformer.data import read_batch
from bnet_transformer.declare import Network, as_network
from bnet_transformer.declare.network import restore_type
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.learning.fit.heads import (
    align_heads,
    describe_unidentified,
    find_representative,
    log_likelihoods,
    samples_to_parameters,
)
from bnet_transformer.learning.fit.methods import analyse_choices
from bnet_transformer.learning.fit.objective import FitObjective, select_learnable
from bnet_transformer.learning.fit.restarts import replace_learned
from bnet_transformer.learning.fit.result import Fit, FitRecord
from bnet_transformer.learning.training import N

MIN_EFFECTIVE_DRAWS = 20.0  # fewer effective draws raise a warning


@dataclass(frozen=True)
class SiteSamples:
    """Samples by Pyro site, `[chain, draw, *shape]`, with the diagnostics of the sampler."""

    values: Mapping[str, Tensor]
    divergent: tuple[int, ...] = ()
    approximate: str | None = None
    effective_sample_size: float | None = None
    is_point: bool = False  # all draws are equal: a guide of Delta sites


def fit_from_pyro(
    net: N,
    data: object,
    result: object,
    *,
    sites: Mapping[str, str] | None = None,
    arguments: tuple[object, ...] = (),
    num_samples: int = 500,
    missing: bool = False,
    budget: int = 2**16,
    seed: int = 0,
) -> Fit[N]:
    """Create a fit from a result of Pyro: your own model, guide or kernel on `net.pyro()`.

    A site belongs to a parameter if it has the name of the parameter (`"W_v_0.values"`), this name with `_` for `.`
    (`"W_v_0_values"`), or the name that `net.pyro()` gives to a table (`"theta_c"` for `"c.logits"`). Samples of
    tables are probabilities. Parameters without a site keep their value in the net. Sites of choices, such as
    `"c"`, are ignored: given the parameters, the fit sums choices out exactly. Exchangeable heads are ordered as in
    the most likely draw, as for NUTS.

    Args:
        net: The net whose `net.pyro()` was fitted.
        data: The sentences and their observations, in the forms of `bt.fit`.
        result: One of: `pyro.infer.MCMC` after its run; samples by site, `[draw, *shape]` or
            `[chain, draw, *shape]`; a guide, which is sampled `num_samples` times (a guide of Delta sites, such as
            `AutoDelta`, gives a point); `pyro.infer.Importance` after its run, whose weighted draws are resampled
            systematically to `num_samples`.
        sites: A mapping from site to parameter, for sites with other names.
        arguments: The arguments of a guide.
        num_samples: The number of draws from a guide, or of resampling.
        missing: True treats a word whose numbers are all NaN as not observed.
        budget: The maximum number of joint states of the choices of a sentence that are summed.
        seed: The seed of the draws from a guide and of resampling.

    Returns:
        The fit, with `method="pyro"`. `approximate` describes what is not exact, and `effective_sample_size` is
        that of weighted draws.

    Raises:
        BNetError: If a site or its values do not match the net; the error lists near names.

    >>> import torch
    >>> import bnet_transformer as bt
    >>> net = bt.bayesuvius(4, heads=2, vocabulary=["the", "cat"], observe=bt.tpm.Categorical(2), prior=1.0)
    >>> data = [("the cat", "cat the"), ("cat the", "the cat")]
    >>> draws = torch.distributions.Dirichlet(torch.ones(2)).sample((100,))
    >>> f = bt.fit_from_pyro(net, data, {"theta_c": draws})
    >>> f.samples["c.logits"].shape
    torch.Size([1, 100, 2])
    """
    network = as_network(net)
    network.check_single_dtype()
    corpus = read_batch(network, data, missing=missing)
    seed, num_samples = check_seed(seed), check_int("num_samples", num_samples)
    with fork_torch_rng(network.device):
        seed_rngs(derive_seed(seed, "from pyro"), network.device)
        draws = _read_samples(result, arguments, num_samples)
    samples = _to_parameter_samples(network, draws.values, check_mapping("sites", sites))
    readouts = tuple(network.get_spec(name) for name in corpus.evidence)
    objective = FitObjective(
        network, select_learnable(network, readouts, list(samples), None), check_int("budget", budget)
    )
    matched: tuple[str, ...] = ()
    if draws.is_point:
        shown = {name: value[0] for name, value in samples_to_parameters(network, samples).items()}
    else:
        *_, fault = analyse_choices(objective, corpus)
        if fault is None:  # order the heads as in the most likely draw
            shape = next(iter(samples.values())).shape[:2]
            density = log_likelihoods(objective, corpus, samples_to_parameters(network, samples)).sum(1).reshape(shape)
            samples, matched = align_heads(objective, corpus, samples, density)
        shown = find_representative(network, samples)
    record = FitRecord(
        len(corpus),
        "nothing",
        matched=matched,
        divergent=draws.divergent,
        effective_sample_size=draws.effective_sample_size,
        learned=objective.learned.names,
        budget=objective.budget,
        approximate=draws.approximate,
        missing=missing,
    )
    fitted_net = restore_type(net, replace_learned(network, shown))
    notes = () if draws.is_point else describe_unidentified(network, objective.learned.names)
    return Fit(fitted_net, "pyro", record, notes, samples={} if draws.is_point else samples, data=corpus)


def _read_samples(result: object, arguments: tuple[object, ...], num_samples: int) -> SiteSamples:
    """Read the samples of every site from a result of Pyro."""
    if isinstance(result, MCMC):
        try:
            values = result.get_samples(group_by_chain=True)
        except (AttributeError, TypeError) as error:  # the kernel has not run
            raise BNetError("result has no samples", hint="Call run(...) of the MCMC first") from error
        by_chain = result.diagnostics().get("divergences", {})
        return SiteSamples(values, tuple(len(draws) for draws in by_chain.values()))
    if isinstance(result, Importance):
        log_weights = [*map(torch.as_tensor, result.log_weights)]
        return _resample_systematically(_stack_traces(result.exec_traces), torch.stack(log_weights), num_samples)
    if isinstance(result, Mapping):
        named = all(isinstance(name, str) for name in result)
        if not result or not named or any(isinstance(v, tuple | Distribution) for v in result.values()):
            raise BNetError("result", expected="a mapping from names of sites to samples", actual=result)
        return SiteSamples({name: torch.as_tensor(values) for name, values in result.items()})
    if callable(result) and not isinstance(result, Distribution):
        with torch.no_grad():
            traces = [poutine.trace(result).get_trace(*arguments) for _ in range(num_samples)]
        values = {name: value[None] for name, value in _stack_traces(traces).items()}
        is_point = all(bool((value == value[:, :1]).all()) for value in values.values())  # a guide of Delta sites
        note = None if is_point else "draws from a guide, which approximates the posterior within its family"
        return SiteSamples(values, approximate=note, is_point=is_point)
    expected = "pyro.infer.MCMC or Importance after its run, a mapping from site to samples, or a guide"
    raise BNetError("result", expected=expected, actual=result)


def _stack_traces(traces: list[Any]) -> dict[str, Tensor]:
    """Stack the values of the latent sites of several traces, `[draw, *shape]`."""
    if not traces:
        raise BNetError("result has no samples", hint="Call run(...) of the result, or use num_samples of at least 1")
    names = [name for name, site in traces[0].nodes.items() if _is_latent(site)]
    return {name: torch.stack([trace.nodes[name]["value"].detach() for trace in traces]) for name in names}


def _is_latent(site: Mapping[str, Any]) -> bool:
    """Return True for a site with a posterior value: not observed, no plate, no auxiliary site of an AutoGuide."""
    if site["type"] != "sample" or site["is_observed"] or type(site["fn"]).__name__ == "_Subsample":
        return False
    return not (site["infer"] or {}).get("is_auxiliary", False) and isinstance(site["value"], Tensor)


def _resample_systematically(values: Mapping[str, Tensor], log_weights: Tensor, num_samples: int) -> SiteSamples:
    """Convert weighted draws to `num_samples` draws of equal weight, by systematic resampling."""
    if not bool((log_weights > -torch.inf).any()) or bool(log_weights.isnan().any()):
        raise BNetError("result", expected="log weights without NaN, at least one of them finite")
    weights = log_weights.detach().double().softmax(0)
    size = effective_sample_size(weights)
    note = f"importance sampling: {len(weights)} draws with an effective sample size of {size:.1f}"
    if size < MIN_EFFECTIVE_DRAWS:
        warnings.warn(f"{note}; use a guide that is nearer to the posterior", stacklevel=5)
    idx = resample(weights, num_samples)
    note = f"{note}; resampled to {num_samples}"
    return SiteSamples({name: value[idx][None] for name, value in values.items()}, (), note, size)


def _to_parameter_samples(
    network: Network, values: Mapping[str, Tensor], sites: Mapping[str, str]
) -> dict[str, Tensor]:
    """Convert samples of sites to samples of parameters, `[chain, draw, *shape]`, with tables as probabilities.

    The name of a site is the parameter's name, this name with `_` for `.`, the name that `net.pyro()` gives to a table,
    or a key of `sites`.
    """
    known = {name: name for name in network.shapes} | {name.replace(".", "_"): name for name in network.shapes}
    known |= {f"theta_{name.removesuffix('.logits')}": name for name in network.unconditional_logit_names}
    known |= {site: name for name, site in PyroModel(network).priors.items()}
    group_names = {spec.group.name for spec in network.specs}
    for site, name in sites.items():
        if name not in network.shapes:
            raise unknown_name_error("parameter", name, network.shapes)
        known[site] = name
    missing = sites.keys() - values.keys()
    if missing:
        raise unknown_name_error("site of the result", min(missing), values)
    samples: dict[str, Tensor] = {}
    for site, value in values.items():
        if site not in known and site in group_names:
            continue  # a sampled choice: the fit sums it out, given the parameters
        if site not in known:
            raise unknown_name_error("site", site, known)
        name = known[site]
        if name in samples:
            raise BNetError(site, expected="one site for each parameter", actual=f"a second site for {name}")
        samples[name] = _reshape_samples(network, name, site, value)
    if not samples:
        expected = f"a site for at least one parameter ({', '.join(known)})"
        raise BNetError("result", expected=expected, actual=", ".join(values))
    shapes = {tuple(value.shape[:2]) for value in samples.values()}
    if len(shapes) > 1:
        expected = "the same number of chains and draws for every site"
        raise BNetError("result", expected=expected, actual=", ".join(map(str, shapes)))
    return samples


def _reshape_samples(network: Network, name: str, site: str, value: Tensor) -> Tensor:
    """Check the samples of one parameter, and return them as `[chain, draw, *shape]` with its dtype and device."""
    parameter = network.parameters[name]
    extra_dims = value.dim() - parameter.dim()
    fits = extra_dims in (1, 2) and value.shape[extra_dims:] == parameter.shape and 0 not in value.shape[:extra_dims]
    if not value.is_floating_point() or not fits:
        expected = f"floating-point samples of {name} of shape [draw, {', '.join(map(str, parameter.shape))}], "
        expected += "with an optional leading dim for chains"
        raise BNetError(site, expected=expected, actual=f"{value.dtype} of shape {tuple(value.shape)}")
    value = (value[None] if extra_dims == 1 else value).detach().to(parameter)
    if not bool(value.isfinite().all()):
        raise BNetError(site, expected="finite numbers", actual="NaN or infinity")
    if name in network.unconditional_logit_names:
        check_probabilities(site, value, parameter)
    return value
