"""Draws of a posterior over parameters: log likelihoods and invariants of each, the one to show, labels matched, ArviZ.

Whatever is computed of many draws is computed in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.fit.heads import invariants, matched, overlap_of, sources_of, words_present
from bnet_transformer.inference.fit.objective import Objective
from bnet_transformer.network import Member, Network

if TYPE_CHECKING:
    import arviz as az

    from bnet_transformer.inference.fit.result import Fit

NUMBERS = 2**22  # numbers of the largest table that a piece holds: draws times sentences times joint states
MOST = 2**28  # numbers of all draws of one matrix whose interval is still told
LOOKED_AT = 200  # sentences by whose responsibilities heads are matched
DTYPES = {"diverging": "bool", "n_steps": "int64", "tree_depth": "int64"}  # as ArviZ has them


def selectors_of(network: Network) -> list[Member]:
    """The choices that hang on no other node, and that something reads."""
    reads = network.graph.out_of
    return [m for m in network.members if m.tpm.kind == "discrete" and not m.inputs and reads[m.family.index]]


def tables_of(network: Network) -> tuple[str, ...]:
    """The parameters of which a sample is told as probabilities."""
    owners = (m.owner for m in network.members if m.tpm.kind == "discrete" and "weight" not in m.parameters)
    return tuple(name for name in dict.fromkeys(f"{owner}.logits" for owner in owners) if name in network.shapes)


def stored(samples: Mapping[str, Tensor], tables: Collection[str]) -> dict[str, Tensor]:
    """Samples, one dim of draws in front, as parameters."""
    flat = {name: value.flatten(0, 1) for name, value in samples.items()}
    return {name: value.log() if name in tables else value for name, value in flat.items()}


def pieces(objective: Objective, corpus: Batch) -> tuple[int, list[Batch]]:
    """How many draws are computed at once, and the parts of the sentences, so that no table passes `NUMBERS`."""
    with torch.no_grad():
        course, factors = objective(corpus.take(slice(0, 1)), lambda course, factors: (course, factors))
    tables = [*(factor.table for factor in factors), *course.values.values()]
    each = max([t.numel() for t in tables if isinstance(t, Tensor)], default=1) * _widest(objective, corpus)
    if objective.of_corpus:
        return max(1, NUMBERS // (each * len(corpus))), [corpus]
    sentences = max(1, min(len(corpus), NUMBERS // each))
    return max(1, NUMBERS // (each * sentences)), corpus.parts(sentences)


def _widest(objective: Objective, corpus: Batch) -> int:
    """The most numbers of one word: of a vector, of the states of a readout, of the words that it reads."""
    worded = [m for m in objective.network.members if m.family.words is not None or m.family.name in corpus.evidence]
    vectors = [m.tpm.states or 1 if m.tpm.kind == "discrete" else math.prod(m.shape) for m in worded]
    return max([*vectors, *(x.shape[1] for x in corpus.x.values()), 1])


def likelihoods(objective: Objective, corpus: Batch, sets: Mapping[str, Tensor]) -> Tensor:
    """The log evidence of each sentence under each draw, `[draw, sentence]`."""
    with torch.no_grad():
        return _in_pieces(objective, corpus, sets, objective.log_evidences)


def shares(objective: Objective, corpus: Batch, sets: Mapping[str, Tensor], selector: Member) -> Tensor:
    """`P(c | x, y)` under each draw, `[draw, sentence, head]` or `[draw, sentence, word, head]`."""

    def ask(some: dict[str, Tensor], part: Batch) -> Tensor:
        return torch.vmap(lambda one: objective.shares(one, part, selector))(some)

    return _in_pieces(objective, corpus, sets, ask)


def _in_pieces(
    objective: Objective,
    corpus: Batch,
    sets: Mapping[str, Tensor],
    ask: Callable[[dict[str, Tensor], Batch], Tensor],
) -> Tensor:
    """What is asked of some draws and sentences at a time, `[draw, sentence, ...]`."""
    at_once, parts = pieces(objective, corpus)
    rows = []
    for start in range(0, len(next(iter(sets.values()))), at_once):
        some = {name: value[start : start + at_once] for name, value in sets.items()}
        rows.append(torch.cat([ask(some, part) for part in parts], 1))
    return torch.cat(rows)


def invariants_by_draw(network: Network, selector: Member, sets: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The invariants of the heads, `[head, dim, dim]`, draw by draw; those that no sample tells of too."""
    for k in range(len(next(iter(sets.values())))):
        one = {name: value[k] for name, value in sets.items()}
        yield invariants(network, selector, {**network.parameters, **one})


def mean_invariants(network: Network, selector: Member, sets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The means of the invariants over all draws: not those of the means, which a change of basis would spoil."""
    totals: dict[str, Tensor] = {}
    for found in invariants_by_draw(network, selector, sets):
        for name, value in found.items():
            totals[name] = totals.get(name, 0) + value
    count = len(next(iter(sets.values())))
    return {name: total / count for name, total in totals.items()}


def interval(values: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Between which values each number lies with a probability, from draws of it, `[draw, ...]`."""
    ends = torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=values.dtype, device=values.device)
    columns = values.flatten(1).split(max(1, NUMBERS // len(values)), 1)
    low, high = torch.cat([torch.quantile(each, ends, dim=0) for each in columns], 1)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])


def interval_of_invariant(
    network: Network, sets: Mapping[str, Tensor], name: str, share: float
) -> tuple[Tensor, Tensor] | None:
    """Between which values an invariant of the heads lies; None where no selector has one of that name."""
    count = len(next(iter(sets.values())))
    for selector in selectors_of(network):
        found: list[Tensor] = []
        for each in invariants_by_draw(network, selector, sets) if name in sources_of(network, selector) else ():
            found.append(each[name])
            if count * found[0].numel() > MOST:
                raise BNetError(name, expected=f"at most {MOST:,} numbers", got=f"{count} draws of it", allowed="fewer")
        if found:
            return interval(torch.stack(found), share)
    return None


def representative(network: Network, samples: Mapping[str, Tensor], tables: Collection[str]) -> dict[str, Tensor]:
    """The draw that stands for all, as parameters: its tables and invariants lie nearest their means.

    Each number counts in units of its spread, each table and matrix as much as any other. Weights that no invariant is
    made of are taken as they are.
    """
    sets, used = stored(samples, tables), set[str]()
    count = len(next(iter(sets.values())))
    far = torch.zeros(count, dtype=torch.float64)
    for selector in selectors_of(network):
        used |= {name for names in sources_of(network, selector).values() for each in names for name in each}
        means = mean_invariants(network, selector, sets)
        variances = {name: torch.zeros_like(mean) for name, mean in means.items()}
        for found in invariants_by_draw(network, selector, sets) if means else ():
            for name, value in found.items():
                variances[name] += (value - means[name]).square() / count
        for k, found in enumerate(invariants_by_draw(network, selector, sets) if means else ()):
            for name, value in found.items():
                far[k] += _distance(value[None], means[name], variances[name])[0]
    for name, value in samples.items():
        if name in tables or name not in used:
            flat = value.flatten(0, 1)
            far += _distance(flat, flat.mean(0), flat.var(0, correction=0))
    return {name: value[int(far.argmin())] for name, value in sets.items()}


def _distance(values: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """The mean square distance of each draw from the mean, in units of the variance of each number."""
    tiny = torch.finfo(values.dtype).tiny
    return ((values - mean).square() / variance.clamp(min=tiny)).flatten(1).mean(1).double().cpu()


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
