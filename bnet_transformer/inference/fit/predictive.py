"""What a net with choices predicts: readouts with the choices summed out, draws of them, checks against data."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnet_transformer._core.torch_context import own_random, reseed, with_gradients
from bnet_transformer.compiler import Module, Request
from bnet_transformer.compiler.course import seen
from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError, mapping
from bnet_transformer.inference.exact import batch_of, eliminated, full_shape, keeps, posterior
from bnet_transformer.inference.factors import Factor, check_count, choices_above, prior_of
from bnet_transformer.network import Member, Network
from bnet_transformer.pyro_reading import PyroModel

if TYPE_CHECKING:
    import pandas as pd

Statistic = Callable[[Tensor], Tensor]


@with_gradients()
def predicted(network: Network, name: str, parts: Sequence[Batch], budget: int) -> Tensor:
    """`P(y | x)` of a discrete readout, `[sentence, word, state]`; `E[y | x]` of a real one; choices summed out."""
    module, member = Module(network).eval(), network.member(name)
    if member.tpm.kind == "discrete":
        each = [posterior(module, name, {}, p.x, p.mask, given=p.given, budget=budget) for p in parts]
        return torch.cat(each)
    graph = network.graph
    above = network.ancestral_members(member)
    free = [m.family.index for m in above if m.tpm.kind == "discrete" and graph.out_of[m.family.index]]
    for part in parts[:1]:
        _, words, *_ = module.inputs(part.x, part.given)
        choices = choices_above(network, member.family.index, {*free}, set())
        check_count(network, member.family.index, choices, words, budget)
    return torch.cat([_mean(module, member, free, part) for part in parts])


def _mean(module: Module, member: Member, free: list[int], corpus: Batch) -> Tensor:
    """`E[y | x]` of a real readout, `[sentence, word, feature]`, the free choices summed out."""
    network, name = module.network, member.family.name
    with torch.no_grad():
        course, _ = module.run(Request((name,), corpus.x, corpus.mask, corpus.given, enumerate_too=frozenset(free)))
        at, parents = seen(course, member)
        mean = member.tpm.distribution(at, *parents).mean
        priors = [Factor(network.members[i], prior_of(course, i, network.members[i])) for i in free]
    family, first = member.family, course.layout.batch
    shape = full_shape(course, family.plates, family.words, batch_of([Factor(member, mean[..., 0])], course))
    # The derivative at 0 of log E[exp(t . mean)] by t is the mean of the means.
    tilt = torch.zeros(*shape, *member.shape, dtype=mean.dtype, device=mean.device, requires_grad=True)
    total = eliminated(course, [*priors, Factor(member, (tilt * mean).sum(-1))])
    (found,) = torch.autograd.grad(total.sum(), tilt)
    kept = [n for k, n in enumerate(shape[first:]) if keeps(course, family, first + k)]
    return found.flatten(0, first).reshape(*kept, *member.shape)


@dataclass(frozen=True)
class Check:
    """Statistics of a `readout` of the data beside those of draws of the net; `p` is the share of draws above it, ties
    halved."""

    observed: Mapping[str, float]
    mean: Mapping[str, float]
    spread: Mapping[str, float]
    p: Mapping[str, float]
    readout: str = ""

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each statistic."""
        import pandas as pd

        columns = {"observed": self.observed, "mean": self.mean, "spread": self.spread, "p": self.p}
        return pd.DataFrame(columns).rename_axis(self.readout or None)

    def _repr_html_(self) -> str:
        told = html.escape(f"posterior predictive checks of {self.readout}")
        return f"<div>{told}{self.to_dataframe().to_html()}</div>"


def usual(states: int | None) -> dict[str, Statistic]:
    """The statistics that are looked at where none are told."""

    def flat(y: Tensor) -> Tensor:
        return y.flatten(0, -2)

    if states is not None:
        return {f"share of {k}": lambda y, k=k: (y == k).double().mean() for k in range(states)}  # type: ignore[misc]
    return {
        "mean": lambda y: flat(y).mean(),
        "variance": lambda y: flat(y).var(0).mean(),
        "kurtosis": lambda y: (flat(y) - flat(y).mean(0)).pow(4).mean() / flat(y).var(0).square().mean(),
    }


def _number(what: str, of: Any, y: Tensor) -> float:
    """What a statistic is of what was observed."""
    wanted = "a function of what is observed that returns a number"
    if not callable(of):
        raise BNetError(f"statistic {what}", expected=wanted, got=of)
    found = of(y.clone())  # a statistic may change what it sees
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BNetError(f"statistic {what}", expected=wanted, got=found) from error


def checked(
    draw: Callable[[int], Network], name: str, corpus: Batch, statistics: object, draws: int, states: int | None
) -> Check:
    """Posterior predictive checks: each draw takes a net of the posterior, and sentences of that net.

    Statistics see what was observed and nothing else: all of it, or its words one after the other where some are not.
    """
    told = dict(mapping("statistics", statistics)) or usual(states)
    seen_of = corpus.evidence[name]

    def shown(y: Tensor) -> Tensor:
        return y if seen_of.observed is None else y[seen_of.observed]

    observed = {what: _number(what, of, shown(seen_of.value)) for what, of in told.items()}
    rows = []
    for k in range(draws):
        network = draw(k)
        with own_random(network.device), torch.no_grad():
            reseed(k, network.device)
            found = PyroModel(network, parameters="own")(
                corpus.x, mask=corpus.mask, given=corpus.given, batch=len(corpus)
            )
        y = shown(found[name].reshape(seen_of.value.shape))
        rows.append([_number(what, of, y) for what, of in told.items()])
    table, own = (torch.tensor(values, dtype=torch.float64) for values in (rows, list(observed.values())))
    share = ((table > own).double() + 0.5 * (table == own).double() + 0 * (table + own)).mean(0)  # NaN stays NaN
    spread = table.std(0) if draws > 1 else table[0] * torch.nan
    of = [dict(zip(told, values.tolist(), strict=True)) for values in (table.mean(0), spread, share)]
    return Check(observed, of[0], of[1], of[2], name)
