"""`inclusion`: a net that sums heads and sentences in, the posterior of each head's gate out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.distributed import Ranks, ranks
from bnet_transformer._core.torch_context import with_gradients
from bnet_transformer.compiler.module import Module
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.data.dataset import Needs, has_observed
from bnet_transformer.data.task import check_has_words, infer_task
from bnet_transformer.errors import BNetError, BudgetError, number, one_of, room_for, seed_of, whole, within_memory
from bnet_transformer.inference.heads.annealing import settings
from bnet_transformer.inference.heads.likelihood import Around, likelihood_for
from bnet_transformer.inference.heads.measures import ablation, importance
from bnet_transformer.inference.heads.posterior import posterior_of
from bnet_transformer.inference.heads.relaxed import passes_of, relaxed
from bnet_transformer.inference.heads.result import MEASURES, Damage, Inclusion, counts_of, order_by
from bnet_transformer.inference.heads.runs import Runs
from bnet_transformer.inference.heads.sites import sites_of
from bnet_transformer.network import Network, network_of

MOST = 12  # heads of a slice, for all settings of their gates
BUDGET = 2**17  # runs of one slice: sentences times settings
MEMORY = 2**29
FAR = 1e4  # times what a head moves the output by: sigmas beyond tell nothing, or no number holds what they tell
ALMOST = 1e-6  # of the most that a head changes: what less is nothing
METHODS = ("exact", "svi")
Told = Callable[[int], None]


@within_memory("inclusion")
@with_gradients()
def inclusion(
    net: Any,
    sentences: object,
    *,
    method: str = "exact",
    sigma: float | None = None,
    output: str | None = None,
    role: str | None = None,
    interval: float = 0.9,
    draws: int = 1000,
    rounds: int = 40,
    budget: int = BUDGET,
    memory: int = MEMORY,
    seed: int = 0,
    progress: bool | None = None,
) -> Inclusion:
    """The posterior of `rho`, the share of sentences in which each head is in, and two other measures beside it.

    The likelihood is that of what is observed (of the next words, for a net that tells them); where nothing is, or
    `output` or `sigma` asks for it, a Normal around what the full net makes of the family `output`.

    Args:
        net: A net that sums its heads.
        sentences: Text, lists, ids or vectors, or pairs with what is observed.
        method: `"exact"` sums over all gates of a slice, the other slices being on; `"svi"` takes all slices at once.
        sigma: The spread around the output of the full net; None for the root mean square distance by which that moves
            when one head is off.
        output: The family of that output, such as x_6; None for what the module returns.
        role: Of several kinds of heads those of one role, such as dec_cross_a.
        interval: The probability of intervals.
        draws: Draws of the posterior.
        rounds: Rounds of `"svi"`.
        budget: The most runs, sentences x 2^heads, of a slice that `"exact"` may take.
        memory: About how many bytes are used at once.
        seed: The seed of the draws.
        progress: Show a bar: in a terminal (None), always or never.

    Returns:
        The posterior, with gradient importance and ablation beside it.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(8, heads=2, slices=2, vocabulary=["the", "cat", "sat"])
    >>> found = bt.inclusion(net, ["the cat sat", "sat the cat"])
    >>> found.mean.shape                                        # [slice, head]
    torch.Size([2, 2])
    """
    one_of("method", method, METHODS)
    if sigma is not None:
        number("sigma", sigma, above=0)
    if not 0 < number("interval", interval) < 1:
        raise BNetError("interval", expected="a probability between 0 and 1", got=interval)
    whole("draws", draws)
    whole("rounds", rounds, least=3)
    whole("memory", memory)
    seed_of(seed)
    network = network_of(net)
    runs = runs_of(network, sentences, output, role, seen=sigma is None and output is None)
    room_for(f"{draws} draws", 8 * draws * len(runs.sites) * runs.heads, "fewer draws=")
    if method == "exact":
        _check_budget(runs, whole("budget", budget))
    with ranks(runs.like.device) as here, _Bar(progress, here) as told:
        told_by = method, sigma, output, role, interval, draws, rounds, seed, runs.likelihood.families
        here.assert_same("inclusion", net=network, data=runs.corpus, settings=told_by)
        shared = _shared(runs, here)
        asked = _Asked(network, runs.corpus, shared, sigma, float(interval), draws, rounds, memory, seed, told)
        return asked.exactly() if method == "exact" else asked.jointly()


@dataclass(frozen=True)
class _Asked:
    """A question about heads, with all that its answer needs: `data` are all sentences, `runs` this rank's share."""

    network: Network
    data: Batch
    runs: Runs
    sigma: float | None
    interval: float
    draws: int
    rounds: int
    memory: int
    seed: int
    told: _Bar

    def exactly(self) -> Inclusion:
        """By all settings of the gates of a slice, slice by slice."""
        runs, gates = self.runs, settings(self.runs.heads)
        self.told.begin("runs", len(runs.corpus) * len(gates) * len(runs.sites))
        table = runs.table(gates, self.told, self.memory)
        off = (len(gates) - 1) - 2 ** torch.arange(runs.heads)
        lost = (table[..., -1:] - table[..., off]).transpose(0, 1)
        sigma = self._sigma(lost)
        scale, generator = 1.0 if sigma is None else sigma**-2, torch.Generator().manual_seed(self.seed)
        self.told.begin("posteriors", len(runs.sites) * (1 + runs.heads))
        found = [posterior_of(scale * each, self.draws, generator, self.told) for each in table]
        rho, log_bayes, error = (torch.stack([getattr(f, name) for f in found], at)
                                 for name, at in (("rho", 1), ("log_bayes", 0), ("error", 0)))  # fmt: skip
        each = torch.stack([f.inclusion for f in found], 1)
        together = torch.stack([f.interaction for f in found])
        idle = _idle(table, runs.heads)
        return self._told(rho, log_bayes, error, each, together, idle, scale * lost, sigma, "exact")

    def jointly(self) -> Inclusion:
        """All slices at once, by relaxed gates."""
        runs = self.runs
        self.told.begin("runs", len(runs.corpus) * (runs.heads + 1) * len(runs.sites))
        lost = ablation(runs, self.told, self.memory)
        sigma = self._sigma(lost)
        scale, generator = 1.0 if sigma is None else sigma**-2, torch.Generator().manual_seed(self.seed)
        self.told.begin("runs", len(runs.corpus) * passes_of(runs.heads * len(runs.sites)) * self.rounds)
        found = relaxed(runs, scale, self.rounds, self.draws, generator, self.told, self.memory)
        idle = _relatively_none(lost.abs().amax(0)) & (found.log_bayes.abs() < ALMOST)
        told = found.rho, found.log_bayes, found.error, found.inclusion
        return self._told(*told, None, idle, scale * lost, sigma, "svi")

    def _sigma(self, lost: Tensor) -> float | None:
        """The spread around the output: as it was told, or so that one head off moves the output by it on average."""
        if not isinstance(self.runs.likelihood, Around):
            return None
        name, found = self.runs.likelihood.families[0], float((2 * lost.mean()).sqrt())
        if not found > 0:
            raise BNetError("output", expected="a family that a head moves when it is off", got=name)
        if self.sigma is None:
            return found
        if not found / FAR <= self.sigma <= found * FAR:
            wanted = (
                f"a number from {found / FAR:.3g} to {found * FAR:.3g}, for one head off moves {name} by {found:.3g}"
            )
            raise BNetError("sigma", expected=wanted, got=self.sigma)
        return float(self.sigma)

    def _told(
        self,
        rho: Tensor,
        log_bayes: Tensor,
        error: Tensor,
        each: Tensor,
        together: Tensor | None,
        idle: Tensor,
        lost: Tensor,
        sigma: float | None,
        method: str,
    ) -> Inclusion:
        runs, count = self.runs, len(lost)
        self.told.begin("sentences", len(runs.corpus))
        steep = importance(runs, sigma, self.seed, self.told, self.memory)
        return Inclusion(
            slices=tuple(site.name for site in runs.sites),
            method=method,
            sentences=count,
            likelihood=_said(runs),
            sigma=sigma,
            interval=self.interval,
            rho=rho,
            log_bayes=log_bayes,
            error=error,
            inclusion=each,
            importance=steep.values,
            importance_error=steep.error,
            ablation=lost.mean(0),
            ablation_error=lost.std(0) / count**0.5 if count > 1 else lost[0] * torch.nan,
            interaction=together,
            idle=idle,
            network=self.network,
            data=self.data,
        )


def damage(
    found: Inclusion, sentences: object = None, *, counts: object = None, progress: bool | None = None
) -> Damage:
    """What it costs sentences (by default those of the measures) to shut off the heads that are held least of.

    >>> import bnet_transformer as bt
    >>> from bnet_transformer.inference import damage
    >>> net = bt.decoder(8, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
    >>> damage(bt.inclusion(net, ["the cat sat", "sat the cat"]), counts=[1, 2]).to_dataframe().shape
    (2, 3)
    """
    if not isinstance(found, Inclusion):
        raise BNetError("damage", expected="what bt.inclusion found", got=found)
    around = found.sigma is not None
    output = found.likelihood.removeprefix(AROUND) if around else None
    data = found.data if sentences is None else sentences
    roles = {found.network.graph.family(name).stem for name in found.slices}
    role = min(roles) if len(roles) == 1 else None
    runs = runs_of(found.network, data, output, role, seen=not around, sites=found.slices)
    if _said(runs) != found.likelihood:
        raise BNetError("sentences", expected=f"sentences with {found.likelihood}, as the measures had them",
                        got=f"sentences with {_said(runs)}")  # fmt: skip
    scale = 1.0 if found.sigma is None else found.sigma**-2
    numbers = counts_of(counts, found.log_bayes.numel())
    order = {name: order_by(found.measure(name)) for name in MEASURES}
    gates = torch.ones(len(MEASURES), len(numbers), *found.log_bayes.shape)
    for m, heads in enumerate(order.values()):
        for k, off in enumerate(numbers):
            for at in heads[:off]:
                gates[(m, k, *at)] = 0.0
    with ranks(runs.like.device) as here, _Bar(progress, here) as told, torch.no_grad():
        here.assert_same("damage", net=found.network, data=runs.corpus, settings=(counts, order, around))
        shared = _shared(runs, here)
        told.begin("sentences", len(shared.corpus))
        losses = torch.zeros(len(shared.corpus), len(MEASURES) * len(numbers), dtype=torch.float64)
        for part in shared.parts():
            full = shared.gated(part, torch.ones(len(part), *found.log_bayes.shape).to(shared.like))
            each = [shared.gated(part, g.expand(len(part), -1, -1).to(shared.like)) for g in gates.flatten(0, 1)]
            losses[part.which] = (scale * (full - torch.stack(each)).double().cpu()).T
            told(len(part))
        loss = here.all_gather(losses).T
    shape = gates.shape[:2]
    labels = {"measure": MEASURES, "heads off": tuple(map(str, numbers))}
    count = loss.shape[1]
    error = (loss.std(1) / count**0.5 if count > 1 else loss[:, 0] * torch.nan).reshape(shape)
    return Damage(("measure", "heads off"), labels, loss.mean(1).reshape(shape), error, count, order)


AROUND = "Normal around "


def _said(runs: Runs) -> str:
    """The likelihood in words."""
    names = ", ".join(runs.likelihood.families)
    return f"{AROUND}{names}" if isinstance(runs.likelihood, Around) else f"P({names} | x)"


def _shared(runs: Runs, here: Ranks) -> Runs:
    """The runs of this rank's share of the sentences, on its device."""
    if here.world == 1:
        return runs
    module = Module(here.to_device(runs.module.network)).eval()
    for value in module.store.values():
        value.requires_grad_(False)
    return replace(runs, module=module, corpus=here.shard(runs.corpus).to(here.device), ranks=here)


def runs_of(
    network: Network,
    sentences: object,
    output: str | None = None,
    role: str | None = None,
    *,
    seen: bool = True,
    sites: tuple[str, ...] | None = None,
) -> Runs:
    """The runs of a net whose heads are gated: its sites, the sentences, how likely they are."""
    network.one_type()
    check_has_words(network, "sentences")
    if not seen and not isinstance(sentences, Batch) and has_observed(infer_task(network), sentences):
        raise BNetError("sentences", expected="sentences alone, where sigma= or output= asks for the output of the net",
                        got="pairs of sentences and what is observed of them")  # fmt: skip
    needs: Needs = "optional" if seen else "none"
    corpus = read_batch(network, sentences, "sentences", observed=needs, option=None, mask_padding=True)
    likelihood = likelihood_for(network, corpus, output)
    wanted = [network.graph.family(name).index for name in likelihood.families]
    found = sites_of(network, role, wanted)
    found = found if sites is None else tuple(site for site in found if site.name in sites)
    module = Module(network).eval()
    for value in module.store.values():
        value.requires_grad_(False)
    runs = Runs(module, found, corpus, likelihood, found[0].heads)
    return replace(runs, corpus=corpus.to(runs.like.device))


def _check_budget(runs: Runs, budget: int) -> None:
    """Refuse more settings, or more runs, than are summed exactly."""
    if runs.heads > MOST:
        raise BudgetError(
            "method='exact'",
            expected=f"at most {MOST} heads in a slice, {2**MOST:,} settings of their gates",
            got=f"{runs.heads}, {2**runs.heads:,} settings",
            allowed="method='svi', which is approximate",
        )
    count = len(runs.corpus) * 2**runs.heads
    if count > budget:
        fit = budget >> runs.heads
        fewer = f"{_many(fit)}, " if fit else ""
        raise BudgetError(
            "method='exact'",
            expected=f"at most {budget:,} runs of each slice",
            got=f"{count:,}: {_many(len(runs.corpus))} under {2**runs.heads:,} settings of {runs.heads} gates",
            allowed=f"{fewer}a larger budget=, or method='svi', which is approximate",
        )


def _many(sentences: int) -> str:
    return f"{sentences:,} sentence{'s' * (sentences != 1)}"


def _idle(table: Tensor, heads: int) -> Tensor:
    """The heads whose gates change `log P` of no sentence, in any company: `[slice, head]`."""
    halves = (table.unflatten(-1, (-1, 2, 2**head)) for head in range(heads))
    return _relatively_none(torch.stack([(h[..., 1, :] - h[..., 0, :]).abs().amax((1, 2, 3)) for h in halves], 1))


def _relatively_none(change: Tensor) -> Tensor:
    return change <= ALMOST * change.max()


class _Bar:
    """Bars of progress, one after another."""

    def __init__(self, progress: bool | None, here: Ranks) -> None:
        one_of("progress", progress, (True, False, None))
        self.hide = True if not here.first else None if progress is None else not progress
        self.bar: Any = None

    def begin(self, unit: str, total: int) -> None:
        """The next bar."""
        self.end()
        self.bar = tqdm(total=total, unit=f" {unit}", disable=self.hide, leave=False)

    def __call__(self, count: int) -> None:
        self.bar.update(count)

    def end(self) -> None:
        """Close the bar that is shown."""
        if self.bar is not None:
            self.bar.close()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
