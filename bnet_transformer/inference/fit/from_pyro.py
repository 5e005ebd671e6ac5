"""What a user found with Pyro on `net.pyro()`, by a model, guide or kernel of their own, as a `Fit`."""

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

from bnet_transformer._core.hashing import derive_seed
from bnet_transformer._core.torch_context import own_random, reseed
from bnet_transformer.data import read_batch
from bnet_transformer.errors import BNetError, mapping, seed_of, unknown, whole
from bnet_transformer.inference.fit.ascent import with_learned
from bnet_transformer.inference.fit.heads import aligned, likelihoods, representative, stored
from bnet_transformer.inference.fit.problem import Objective, learned_of
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.inference.fit.run import elimination_fault
from bnet_transformer.network import Network
from bnet_transformer.pyro_reading import PyroModel
from bnet_transformer.pyro_reading.checks import check_rows

FEW = 20.0  # effective draws below which importance sampling tells little
FORMS = "pyro.infer.MCMC or Importance after its run, a mapping of samples, or a guide"


@dataclass(frozen=True)
class SiteDraws:
    """Draws of Pyro's sites, `[chain, draw, *shape]`, and what is known of how they were made."""

    values: Mapping[str, Tensor]
    divergent: tuple[int, ...] = ()
    approximate: str | None = None
    effective_sample_size: float | None = None
    is_point: bool = False  # all draws are one: of a guide of Delta sites


def fit_from_pyro(
    network: Network,
    data: object,
    result: object,
    sites: Mapping[str, str] | None,
    arguments: tuple[object, ...],
    num_samples: int,
    missing: bool,
    budget: int,
    seed: int,
) -> Fit[Network]:
    """The fit that Pyro's samples, or a guide, are; `Fit.from_pyro` has the arguments."""
    network.one_type()
    corpus = read_batch(network, data, missing=missing)
    seed, num_samples = seed_of(seed), whole("num_samples", num_samples)
    with own_random(network.device):
        reseed(derive_seed(seed, "from pyro"), network.device)
        draws = _draws_of(result, arguments, num_samples)
    samples = _parameters_of(network, draws.values, mapping("sites", sites))
    readouts = tuple(network.member(name) for name in corpus.evidence)
    objective = Objective(network, learned_of(network, readouts, list(samples), None), whole("budget", budget))
    matched: tuple[str, ...] = ()
    if draws.is_point:
        shown = {name: value[0] for name, value in stored(network, samples).items()}
    else:
        if elimination_fault(objective, corpus)[1] is None:  # heads in the order of the likeliest draw
            lead = next(iter(samples.values())).shape[:2]
            density = likelihoods(objective, corpus, stored(network, samples)).sum(1).reshape(lead)
            samples, matched = aligned(objective, corpus, samples, density)
        shown = representative(network, samples)
    return Fit(
        with_learned(network, shown),
        "pyro",
        len(corpus),
        "nothing",
        samples={} if draws.is_point else samples,
        matched=matched,
        divergent=draws.divergent,
        effective_sample_size=draws.effective_sample_size,
        learned=objective.learned.names,
        budget=objective.budget,
        approximate=draws.approximate,
        missing=missing,
        data=corpus,
    )


def _draws_of(result: object, arguments: tuple[object, ...], num_samples: int) -> SiteDraws:
    """Draws of every site of what Pyro gave."""
    if isinstance(result, MCMC):
        try:
            values = result.get_samples(group_by_chain=True)
        except (AttributeError, TypeError) as error:  # it has no draws yet
            raise BNetError("result", expected="a run of it, with its arguments, before", got="no draw") from error
        by_chain = result.diagnostics().get("divergences", {})
        return SiteDraws(values, tuple(len(draws) for draws in by_chain.values()))
    if isinstance(result, Importance):
        log_weights = [*map(torch.as_tensor, result.log_weights)]
        return _resampled(_traced(result.exec_traces), torch.stack(log_weights), num_samples)
    if isinstance(result, Mapping):
        named = all(isinstance(name, str) for name in result)
        if not result or not named or any(isinstance(v, tuple | Distribution) for v in result.values()):
            raise BNetError("result", expected="a mapping from the names of sites to samples", got=result)
        return SiteDraws({name: torch.as_tensor(values) for name, values in result.items()})
    if callable(result) and not isinstance(result, Distribution):
        with torch.no_grad():
            traces = [poutine.trace(result).get_trace(*arguments) for _ in range(num_samples)]
        values = {name: value[None] for name, value in _traced(traces).items()}
        is_point = all(bool((value == value[:, :1]).all()) for value in values.values())  # a guide of Delta sites
        note = None if is_point else "draws of a guide: as near to the posterior as its family allows"
        return SiteDraws(values, approximate=note, is_point=is_point)
    raise BNetError("result", expected=FORMS, got=result)


def _traced(traces: list[Any]) -> dict[str, Tensor]:
    """The values of the sites that were drawn in each of some traces, `[draw, *shape]`."""
    if not traces:
        raise BNetError("result", expected="a run of it, with its arguments, before", got="no draw")
    drawn = [name for name, site in traces[0].nodes.items() if _is_drawn(site)]
    return {name: torch.stack([trace.nodes[name]["value"].detach() for trace in traces]) for name in drawn}


def _is_drawn(site: Mapping[str, Any]) -> bool:
    """True for a site that holds a value of the posterior: not observed, no plate, no helper of an AutoGuide."""
    if site["type"] != "sample" or site["is_observed"] or type(site["fn"]).__name__ == "_Subsample":
        return False
    return not (site["infer"] or {}).get("is_auxiliary", False) and isinstance(site["value"], Tensor)


def _resampled(values: Mapping[str, Tensor], log_weights: Tensor, num_samples: int) -> SiteDraws:
    """Weighted draws as draws that count alike, by systematic resampling.

    One uniform number places `num_samples` evenly spaced points on the cumulative weights, so that a draw of weight w
    is taken either floor(w n) or ceil(w n) times: of all unbiased ways the one with the least variance in practice
    (Douc, Cappe and Moulines 2005). The effective sample size is `1 / sum w^2` of the weights before (Kong 1992).
    """
    if not bool((log_weights > -torch.inf).any()) or bool(log_weights.isnan().any()):
        raise BNetError("result", expected="log weights, one of them finite", got="none that is")
    weights = log_weights.detach().double().softmax(0)
    size = float(1 / weights.square().sum())
    told = f"importance sampling: {len(weights)} draws count as {size:.1f}"
    if size < FEW:
        warnings.warn(f"{told}; a guide nearer to the posterior gives more", stacklevel=5)
    start = torch.rand((), dtype=torch.float64).item()
    points = (torch.arange(num_samples, dtype=torch.float64, device=weights.device) + start) / num_samples
    taken = torch.searchsorted(weights.cumsum(0), points).clamp(max=len(weights) - 1)
    note = f"{told}; resampled to {num_samples}"
    return SiteDraws({name: value[taken][None] for name, value in values.items()}, (), note, size)


def _parameters_of(network: Network, values: Mapping[str, Tensor], sites: Mapping[str, str]) -> dict[str, Tensor]:
    """The samples of parameters, `[chain, draw, *shape]`, tables as probabilities, from those of sites.

    A site has the parameter's own name, that with `_` for `.`, that of a table in `net.pyro()`, or one that is told.
    """
    known = {name: name for name in network.shapes} | {name.replace(".", "_"): name for name in network.shapes}
    known |= {f"theta_{name.removesuffix('.logits')}": name for name in network.plain_tables}
    known |= {site: name for name, site in PyroModel(network).priors.items()}
    families = {member.family.name for member in network.members}
    for site, name in sites.items():
        if name not in network.shapes:
            raise unknown("parameter", name, network.shapes)
        known[site] = name
    missing = sites.keys() - values.keys()
    if missing:
        raise unknown("site of the result", min(missing), values)
    found: dict[str, Tensor] = {}
    for site, value in values.items():
        if site not in known and site in families:
            continue  # a choice that was drawn: it is summed out, given the parameters
        if site not in known:
            raise unknown("site", site, known)
        name = known[site]
        if name in found:
            raise BNetError(site, expected="one site for each parameter", got=f"two for {name}")
        found[name] = _shaped(network, name, site, value)
    if not found:
        raise BNetError("result", expected=f"a site for some parameter: {', '.join(known)}", got=", ".join(values))
    leads = {tuple(value.shape[:2]) for value in found.values()}
    if len(leads) > 1:
        raise BNetError("result", expected="as many draws of every site", got=", ".join(map(str, leads)))
    return found


def _shaped(network: Network, name: str, site: str, value: Tensor) -> Tensor:
    """Samples of one parameter as `[chain, draw, *shape]`, checked, in the type and on the device of the parameter."""
    own = network.parameters[name]
    lead = value.dim() - own.dim()
    fits = lead in (1, 2) and value.shape[lead:] == own.shape and 0 not in value.shape[:lead]
    if not value.is_floating_point() or not fits:
        wanted = f"real numbers [draw, {', '.join(map(str, own.shape))}], or [chain, draw, ...], of {name}"
        raise BNetError(site, expected=wanted, got=f"{value.dtype} of shape {tuple(value.shape)}")
    value = (value[None] if lead == 1 else value).detach().to(own)
    if not bool(value.isfinite().all()):
        raise BNetError(site, expected="finite numbers", got="NaN or infinity")
    if name in network.plain_tables:
        check_rows(site, value, own)
    return value
