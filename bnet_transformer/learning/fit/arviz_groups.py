"""The export of a fit to ArviZ: the groups of its data structure, and an adapter for ArviZ 0.x and 1.x."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.tensors import to_numpy
from bnet_transformer.data import Batch
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.learning.fit.heads import compute_invariant_samples, find_selectors, samples_to_parameters
from bnet_transformer.learning.fit.predictive import replicate

Arrays = Mapping[str, NDArray[Any]]

DTYPES = {"diverging": "bool", "n_steps": "int64", "tree_depth": "int64"}  # the dtypes that ArviZ uses
JOINT = "joint"  # the log likelihood of several readouts together


def to_arviz(
    network: Network,
    samples: Mapping[str, Tensor],
    log_likelihoods: Tensor | None,
    statistics: Mapping[str, Tensor],
    data: Batch | None,
    predictive_draws: int,
) -> Any:
    """Convert the samples of a fit to ArviZ's InferenceData, or to its DataTree with ArviZ 1.x.

    The posterior contains every parameter, with tables as probabilities: `<selector>_pi` for a selector,
    `<owner>_theta` for other tables. It also contains quantities that do not depend on the labels of heads:
    `<selector>_sorted` (probabilities in descending order), `<selector>_effective` (the effective number of heads) and
    `log_evidence`; and quantities that do not depend on the basis of the key space: `A_<node>` and `OV_<node>` of the
    attention nodes. `sample_stats` contains the sampler statistics of NUTS.
    """
    az = _import_arviz()
    groups: dict[str, Arrays] = {
        "posterior": {name: to_numpy(v) for name, v in _collect_posterior(network, samples, log_likelihoods).items()}
    }
    if statistics:
        groups["sample_stats"] = {k: to_numpy(v).astype(DTYPES.get(k, "float64")) for k, v in statistics.items()}
    dims: dict[str, list[str]] = {JOINT: ["sentence"]}
    names = [] if data is None else list(data.evidence)
    if log_likelihoods is not None:
        # Latent choices connect the words of a sentence, so the unit of the likelihood is the sentence.
        # Its unit is a nat, so ArviZ exponentiates differences that overflow in float32.
        likelihoods = to_numpy(log_likelihoods.double())
        groups["log_likelihood"] = {names[0] if len(names) == 1 else JOINT: likelihoods}
    if data is not None:
        data = data.to(network.device)
        dims |= {name: _name_dims(network.get_spec(name)) for name in names}
        observed = {name: _find_observed(network.get_spec(name), data) for name in names}
        values = {name: evidence.value for name, evidence in data.evidence.items()}
        groups["observed_data"] = {name: _mask(value, observed[name]) for name, value in values.items()}
        if predictive_draws:
            groups["posterior_predictive"] = _sample_predictive(network, samples, data, observed, predictive_draws)
    return build_arviz(az, groups, dims)


def build_arviz(az: Any, groups: Mapping[str, Arrays], dims: Mapping[str, Sequence[str]]) -> Any:
    """Build the data structure of the given ArviZ module from arrays by group and variable.

    `dims` are the names of the dims after the draws; the log likelihood of a variable has only the first of them.
    """
    # ArviZ 0.x takes the groups as keyword arguments and returns an InferenceData; ArviZ 1.x takes one nested mapping
    # and returns a DataTree of xarray. Both drop the last dims of a log likelihood with fewer dims.
    used = {name: list(names) for name, names in dims.items() if any(name in group for group in groups.values())}
    arrays = {name: dict(group) for name, group in groups.items()}
    return az.from_dict(arrays, dims=used) if is_arviz_1(az) else az.from_dict(**arrays, dims=used)


def is_arviz_1(az: Any) -> bool:
    """Return True for ArviZ 1.x and later."""
    return int(str(az.__version__).partition(".")[0]) >= 1


def leave_one_out(network: Network, samples: Mapping[str, Tensor], log_likelihoods: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the leave-one-out log predictive density of each sentence and its Pareto k-hat, both `[sentence]`."""
    # PSIS-LOO (Vehtari, Gelman and Gabry 2017) estimates log p(y_i | y_-i) from the draws of the full posterior by
    # importance sampling with Pareto-smoothed weights, so no fit is repeated.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\nArviZ is undergoing", FutureWarning)
        warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto", UserWarning)  # the caller has k-hat
        az = _import_arviz()
        result = az.loo(to_arviz(network, samples, log_likelihoods, {}, None, 0), pointwise=True)
    densities = result.elpd_i if is_arviz_1(az) else result.loo_i
    density, khat = (torch.as_tensor(v.values, dtype=torch.float64) for v in (densities, result.pareto_k))
    return density, khat


def _import_arviz() -> Any:
    """Import ArviZ."""
    try:
        import arviz
    except ImportError as error:
        hint = 'Run pip install "bnet-transformer[arviz]"'
        raise BNetError("to_arviz requires the package arviz", hint=hint) from error
    return arviz


def _collect_posterior(
    network: Network, samples: Mapping[str, Tensor], log_likelihoods: Tensor | None
) -> dict[str, Tensor]:
    """Collect the variables of the posterior, `[chain, draw, ...]`."""
    owners = [spec.param_prefix for spec in find_selectors(network) if not spec.parents]
    names = {name: f"{name.removesuffix('.logits')}_theta" for name in network.unconditional_logit_names}
    names |= {f"{owner}.logits": f"{owner}_pi" for owner in owners}
    posterior = {names.get(k, k).replace(".", "_"): value for k, value in samples.items()}
    for owner in owners:
        pi = samples.get(f"{owner}.logits")
        if pi is not None:
            posterior[f"{owner}_sorted"] = pi.sort(-1, descending=True).values
            posterior[f"{owner}_effective"] = torch.special.entr(pi).sum(-1).exp()
    invariants = compute_invariant_samples(network, samples)
    posterior |= {name.replace(" ", "_"): value for name, value in invariants.items()}
    if log_likelihoods is not None:
        posterior["log_evidence"] = log_likelihoods.sum(-1)
    return posterior


def _sample_predictive(
    network: Network,
    samples: Mapping[str, Tensor],
    data: Batch,
    observed: Mapping[str, Tensor | None],
    predictive_draws: int,
) -> dict[str, NDArray[Any]]:
    """Sample replicated observations from evenly spaced draws of each chain, `[chain, draw, sentence, ...]`."""
    chains, count = next(iter(samples.values())).shape[:2]
    idx = torch.linspace(0, count - 1, min(count, max(1, predictive_draws // chains))).round().long()
    sets = samples_to_parameters(network, {name: value[:, idx] for name, value in samples.items()})
    networks: list[Network] = [
        network.with_parameters({name: value[k] for name, value in sets.items()}) for k in range(chains * len(idx))
    ]
    rows: dict[str, list[NDArray[Any]]] = {name: [] for name in data.evidence}
    for values in replicate(networks, data, len(networks)):
        for name, value in values.items():
            rows[name].append(_mask(value, observed[name]))
    return {name: np.stack(row).reshape(chains, len(idx), *row[0].shape) for name, row in rows.items()}


def _name_dims(spec: NodeSpec) -> list[str]:
    """Name the dims of an observed node: sentence, plates, word, and the features of a vector."""
    stack = spec.group.word_stack
    words = [] if stack is None else [f"{stack}_word" if stack else "word"]
    features = [f"{spec.group.name}_dim" + (f"_{k}" if k else "") for k in range(len(spec.shape))]
    return ["sentence", *spec.group.plates, *words, *features]


def _find_observed(spec: NodeSpec, data: Batch) -> Tensor | None:
    """Find the observed nodes of a group, `[sentence, *plates, word]`: no padding; None if all are observed."""
    observed, present = data.evidence[spec.group.name].observed, data.get_present(spec)
    if present is None:
        return observed
    present = present[:, *[None] * len(spec.group.plates)]
    return present if observed is None else present & observed


def _mask(value: Tensor, observed: Tensor | None) -> NDArray[Any]:
    """Convert values to an array; nodes that are not observed are NaN, and then states are floats."""
    if observed is None or bool(observed.all()):
        return to_numpy(value)
    numbers = value if value.is_floating_point() else value.double()
    hidden = ~observed.reshape(*observed.shape, *[1] * (value.dim() - observed.dim()))
    return to_numpy(numbers.masked_fill(hidden, torch.nan))
