"""Samples of a posterior over heads: their labels matched, and handed to ArviZ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnet_transformer.compiler import Module
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.exact import posterior
from bnet_transformer.inference.fit.corpus import Corpus
from bnet_transformer.inference.fit.matching import matched, overlap_of
from bnet_transformer.inference.fit.objective import Objective
from bnet_transformer.network import Member, Network

if TYPE_CHECKING:
    import arviz as az

    from bnet_transformer.inference.fit.result import Fit

LOOKED_AT = 200  # sentences by whose responsibilities heads are matched


def aligned(
    objective: Objective, corpus: Corpus, samples: dict[str, Tensor], evidence: Tensor | None
) -> dict[str, Tensor]:
    """The samples with the heads of each draw in the order in which they match those of the likeliest draw."""
    network, found = objective.network, {name: value.clone() for name, value in samples.items()}
    graph, part = network.graph, corpus.take(slice(0, LOOKED_AT))
    chains, draws = next(iter(samples.values())).shape[:2]
    top = 0 if evidence is None else int(evidence.sum(-1).argmax())
    for selector in network.members:
        if selector.tpm.kind != "discrete" or selector.inputs or not graph.out_of[selector.family.index]:
            continue
        dims = {name: head_dim(network, selector, name) for name in samples}

        def answers(k: int, selector: Member = selector) -> Tensor:
            one = {name: value.flatten(0, 1)[k] for name, value in samples.items()}
            one = {name: value.log() if name in objective.learned.tables else value for name, value in one.items()}
            module = Module(network.with_parameters({**network.parameters, **one}))
            return posterior(module, selector.family.name, part.evidence, part.x, part.mask, budget=objective.budget)

        reference = answers(top)
        for k in range(chains * draws):
            order = torch.tensor(matched(overlap_of(reference, answers(k))))
            for name, dim in dims.items():
                if dim is not None:
                    each = found[name].flatten(0, 1)[k]
                    found[name][k // draws, k % draws] = each.index_select(dim, order.to(each.device))
    return found


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
            return parents.index(index)
        for other in network.members:
            for given in other.inputs:
                for plate, by in given.pick:
                    made = network.members[given.parent]
                    if by == index and plate in member.family.plates and made.family.stack == member.family.stack:
                        return member.family.plates.index(plate)
    return None


def to_arviz(fit: Fit[Any]) -> az.InferenceData:
    """ArviZ's InferenceData of a fit with samples.

    The posterior has every parameter, and what does not hang on the labels of heads: `<selector>_sorted` (shares in
    falling order), `<selector>_effective` (heads in effect), `log_evidence`.
    """
    if not fit.samples:
        raise BNetError("to_arviz", expected="a fit with samples", got=fit.method, allowed="svi, nuts")
    try:
        import arviz as az
    except ImportError as error:
        raise BNetError(
            "to_arviz", expected="ArviZ", got="none", allowed="pip install 'bnet-transformer[arviz]'"
        ) from error
    posterior_ = {name.replace(".", "_"): value.cpu().numpy() for name, value in fit.samples.items()}
    for owner in [fit.network.member(name).owner for name in fit.selectors]:
        pi = fit.samples.get(f"{owner}.logits")
        if pi is not None:
            posterior_[f"{owner}_sorted"] = pi.sort(-1, descending=True).values.cpu().numpy()
            posterior_[f"{owner}_effective"] = torch.special.entr(pi).sum(-1).exp().cpu().numpy()
    likelihood = None
    if fit.log_likelihoods is not None:
        likelihood = {"y": fit.log_likelihoods.cpu().numpy()}
        posterior_["log_evidence"] = fit.log_likelihoods.sum(-1).cpu().numpy()
    made: az.InferenceData = az.from_dict(posterior=posterior_, log_likelihood=likelihood)
    return made
