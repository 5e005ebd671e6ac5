"""Samples of a posterior over heads: their labels matched where they mean nothing, and handed to ArviZ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.fit.draws import selectors_of, shares, stored, tables_of
from bnet_transformer.inference.fit.matching import matched, overlap_of, words_present
from bnet_transformer.inference.fit.objective import Objective
from bnet_transformer.network import Member, Network

if TYPE_CHECKING:
    import arviz as az

    from bnet_transformer.inference.fit.result import Fit

LOOKED_AT = 200  # sentences by whose responsibilities heads are matched
DTYPES = {"diverging": "bool", "n_steps": "int64", "tree_depth": "int64"}  # as ArviZ has them


def aligned(
    objective: Objective, corpus: Batch, samples: dict[str, Tensor], density: Tensor
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The samples with the heads of every draw in the order of the densest one's; the selectors of which that is done.

    It is done where another order of the heads is as likely: a draw stays a draw of the same posterior.
    """
    network, lead, tables = objective.network, density.shape, objective.learned.tables
    part = corpus if objective.of_corpus else corpus.take(slice(0, LOOKED_AT))
    sets, top, done = stored(samples, tables), int(density.argmax()), []
    for selector in selectors_of(network):
        dims = {name: dim for name in network.parameters if (dim := head_dim(network, selector, name)) is not None}
        if not _interchangeable(objective, part, {name: value[top] for name, value in sets.items()}, dims):
            continue
        answers, present = shares(objective, part, sets, selector), words_present(selector, part)
        orders = [torch.tensor(matched(overlap_of(answers[top], each, present))) for each in answers]
        for name in sets.keys() & dims.keys():
            drawn = zip(sets[name], orders, strict=True)
            sets[name] = torch.stack([each.index_select(dims[name], order.to(each.device)) for each, order in drawn])
        done.append(selector.family.name)
    found = {name: value.exp() if name in tables else value for name, value in sets.items()}
    return {name: found[name].reshape(*lead, *found[name].shape[1:]) for name in samples}, tuple(done)


def _interchangeable(objective: Objective, corpus: Batch, one: Mapping[str, Tensor], dims: Mapping[str, int]) -> bool:
    """True where no order of a selector's heads is likelier than another.

    What of a head is not learned must be equal over heads; and the log evidence must stay as it is under a turn and a
    swap, of which all orders are made.
    """
    store = {**{k: v.detach().to(objective.device) for k, v in objective.network.parameters.items()}, **one}
    for name, dim in dims.items():
        if name not in one and not torch.equal(store[name], store[name].roll(1, dim)):
            return False
    count = next((store[name].shape[dim] for name, dim in dims.items()), 0)
    if count < 2:
        return False
    few = corpus if objective.of_corpus else corpus.take(slice(0, 16))
    with torch.no_grad():
        own = objective.log_evidence(store, few)
        for order in ([*range(1, count), 0], [1, 0, *range(2, count)]):
            turned = {k: store[k].index_select(dim, torch.tensor(order, device=own.device)) for k, dim in dims.items()}
            other = objective.log_evidence({**store, **turned}, few)
            if not torch.allclose(own, other, rtol=torch.finfo(own.dtype).eps ** 0.5, atol=1e-4):
                return False
    return True


def head_dim(network: Network, selector: Member, name: str) -> int | None:
    """The dim of a parameter along which the heads of a selector lie; None where it has none."""
    owner, _, key = name.rpartition(".")
    index = selector.family.index
    if owner == selector.owner:
        return 0 if key == "logits" else None
    for member in network.members:
        if member.owner != owner:
            continue
        parents = [given.parent for given in member.inputs]
        if index in parents and key in ("logits", "values"):
            return len(member.family.plates) + parents.index(index)
        for other in network.members:
            for given in other.inputs:
                for plate, by in given.pick:
                    made = network.members[given.parent]
                    if by == index and plate in member.family.plates and made.family.stack == member.family.stack:
                        return member.family.plates.index(plate)
    return None


def to_arviz(fit: Fit[Any]) -> az.InferenceData:
    """ArviZ's InferenceData of a fit with samples.

    The posterior has every parameter, tables as the probabilities that samples are: a selector's is `<selector>_pi`,
    another's `<owner>_theta`. And what does not hang on the labels of heads: `<selector>_sorted` (shares in falling
    order), `<selector>_effective` (heads in effect), `log_evidence`. NUTS's statistics of each draw go with it.
    """
    if not fit.samples:
        raise BNetError("to_arviz", expected="a fit with samples", got=fit.method, allowed="svi, nuts")
    try:
        import arviz as az
    except ImportError as error:
        raise BNetError(
            "to_arviz", expected="ArviZ", got="none", allowed='pip install "bnet-transformer[arviz]"'
        ) from error
    owners = [fit.network.member(name).owner for name in fit.selectors]
    names = {name: f"{name.removesuffix('.logits')}_theta" for name in tables_of(fit.network)}
    names |= {f"{owner}.logits": f"{owner}_pi" for owner in owners}
    posterior_ = {names.get(k, k).replace(".", "_"): value.cpu().numpy() for k, value in fit.samples.items()}
    for owner in owners:
        pi = fit.samples.get(f"{owner}.logits")
        if pi is not None:
            posterior_[f"{owner}_sorted"] = pi.sort(-1, descending=True).values.cpu().numpy()
            posterior_[f"{owner}_effective"] = torch.special.entr(pi).sum(-1).exp().cpu().numpy()
    likelihood = None
    if fit.log_likelihoods is not None:
        likelihood = {"y": fit.log_likelihoods.cpu().numpy()}
        posterior_["log_evidence"] = fit.log_likelihoods.sum(-1).cpu().numpy()
    told = {name: value.cpu().numpy() for name, value in fit.statistics.items()}
    told = {name: value.astype(DTYPES.get(name, value.dtype)) for name, value in told.items()}
    made: az.InferenceData = az.from_dict(posterior=posterior_, log_likelihood=likelihood, sample_stats=told or None)
    return made
