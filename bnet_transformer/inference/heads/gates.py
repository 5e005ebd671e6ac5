"""`inclusion`: a net that sums heads and sentences in, the posterior of each head's gate out, and measures beside it.

Ablation is what it costs to shut a head off. Importance is how steep the loss is along a gate (Michel, Levy and Neubig
2019, "Are sixteen heads really better than one?"): `E_x |d loss / d xi|` at `xi = 1`, or `E_x |a^T d loss / d a|`.
Where nothing is observed the loss has no slope there, for it is measured against the full net: then `y` is drawn from
`Normal(f(all on), sigma)`, several times for each sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bnet_transformer._core.distributed import Ranks, ranks
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer._core.torch_context import with_gradients
from bnet_transformer.compiler.module import Module
from bnet_transformer.data import Batch, read_batch
from bnet_transformer.data.dataset import Needs, has_observed
from bnet_transformer.data.task import check_has_words, infer_task
from bnet_transformer.errors import BNetError, BudgetError, number, one_of, room_for, seed_of, whole, within_memory
from bnet_transformer.inference.heads.posterior import Posterior, passes_of, posterior_of, relaxed, settings
from bnet_transformer.inference.heads.result import MEASURES, Damage, Inclusion, counts_of, order_by
from bnet_transformer.inference.heads.runs import Part, Runs, likelihood_for, sites_of
from bnet_transformer.network import Network, network_of
from bnet_transformer.training.configs import LoopConfig

MOST = 12  # heads of a slice, for all settings of their gates
BUDGET = 2**17  # runs of one slice: sentences times settings
FAR = 1e4  # times what a head moves the output by: sigmas beyond tell nothing, or no number holds what they tell
ALMOST = 1e-6  # of the most that a head changes: what less is nothing
DRAWS = 8  # of y, for each sentence of which nothing is observed
AROUND = "Normal around "
METHODS = ("exact", "svi")
Bars = Callable[[str, int], Any]  # a progress bar by its unit and its total


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
    seed_of(seed)
    network = network_of(net)
    runs = runs_of(network, sentences, output, role, seen=sigma is None and output is None)
    room_for(f"{draws} draws", 8 * draws * len(runs.sites) * runs.heads, "fewer draws=")
    if method == "exact":
        _check_budget(runs, whole("budget", budget))
    with ranks(runs.like.device) as here:
        bars = _bars(progress, here)
        told_by = method, sigma, output, role, interval, draws, rounds, seed, runs.likelihood.families
        here.assert_same("inclusion", net=network, data=runs.corpus, settings=told_by)
        own, generator = _shared(runs, here), torch.Generator().manual_seed(seed)
        if method == "exact":
            found, lost, idle, sigma = _exactly(own, sigma, draws, generator, bars)
        else:
            found, lost, idle, sigma = _jointly(own, sigma, draws, rounds, generator, bars)
        with bars("sentences", len(own.corpus)) as bar:
            steep, error = importance(own, sigma, seed, bar.update)
    count = len(lost)
    return Inclusion(
        slices=tuple(site.name for site in own.sites),
        method=method,
        sentences=count,
        likelihood=_said(own),
        sigma=sigma,
        interval=float(interval),
        **vars(found),
        importance=steep,
        importance_error=error,
        ablation=lost.mean(0),
        ablation_error=lost.std(0) / count**0.5 if count > 1 else lost[0] * torch.nan,
        idle=idle,
        network=network,
        data=runs.corpus,
    )


def _bars(progress: bool | None, here: Ranks) -> Bars:
    loop = LoopConfig(progress=progress)
    return lambda unit, total: loop.progress_bar(here, total, 0, f" {unit}")


Found = tuple[Posterior, Tensor, Tensor, float | None]  # with the nats lost, the idle heads, the spread of the output


def _exactly(runs: Runs, sigma: float | None, draws: int, generator: torch.Generator, bars: Bars) -> Found:
    """By all settings of the gates of a slice, slice by slice."""
    heads, gates = runs.heads, settings(runs.heads)
    with bars("runs", len(runs.corpus) * len(gates) * len(runs.sites)) as bar:
        table = runs.table(gates, bar.update)
    off = (len(gates) - 1) - 2 ** torch.arange(heads)
    lost = (table[..., -1:] - table[..., off]).transpose(0, 1)
    sigma, scale = _sigma(runs, lost, sigma)
    with bars("posteriors", len(runs.sites) * (1 + heads)) as bar:
        each = [posterior_of(scale * log, draws, generator, bar.update) for log in table]
    dims = {"rho": 1, "log_bayes": 0, "error": 0, "inclusion": 1, "interaction": 0}
    found = Posterior(**{name: torch.stack([getattr(one, name) for one in each], dim) for name, dim in dims.items()})
    halves = (table.unflatten(-1, (-1, 2, 2**head)) for head in range(heads))
    change = torch.stack([(half[..., 1, :] - half[..., 0, :]).abs().amax((1, 2, 3)) for half in halves], 1)
    return found, scale * lost, change <= ALMOST * change.max(), sigma


def _jointly(runs: Runs, sigma: float | None, draws: int, rounds: int, generator: torch.Generator, bars: Bars) -> Found:
    """All slices at once, by relaxed gates."""
    with bars("runs", len(runs.corpus) * (runs.heads + 1) * len(runs.sites)) as bar:
        lost = ablation(runs, bar.update)
    sigma, scale = _sigma(runs, lost, sigma)
    with bars("runs", len(runs.corpus) * passes_of(runs.heads * len(runs.sites)) * rounds) as bar:
        found = relaxed(runs, scale, rounds, draws, generator, bar.update)
    change = lost.abs().amax(0)
    idle = (change <= ALMOST * change.max()) & (found.log_bayes.abs() < ALMOST)
    return found, scale * lost, idle, sigma


def _sigma(runs: Runs, lost: Tensor, sigma: float | None) -> tuple[float | None, float]:
    """The spread around the output, as it was told or so that one head off moves the output by it on average; and what
    `log P` of a run is multiplied by, for runs have the square of the distance from the full output."""
    if runs.likelihood.is_observed:
        return None, 1.0
    name, found = runs.likelihood.families[0], float((2 * lost.mean()).sqrt())
    if not found > 0:
        raise BNetError("output", expected="a family that a head moves when it is off", got=name)
    sigma = found if sigma is None else float(sigma)
    if not found / FAR <= sigma <= found * FAR:
        wanted = f"a number from {found / FAR:.3g} to {found * FAR:.3g}, for one head off moves {name} by {found:.3g}"
        raise BNetError("sigma", expected=wanted, got=sigma)
    return sigma, sigma**-2


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
    gates = torch.ones(len(MEASURES), len(numbers), *found.log_bayes.shape).to(runs.like)
    for m, heads in enumerate(order.values()):
        for k, off in enumerate(numbers):
            for at in heads[:off]:
                gates[(m, k, *at)] = 0.0
    every = [torch.ones_like(gates[0, 0]), *gates.flatten(0, 1)]
    with ranks(runs.like.device) as here, torch.no_grad():
        here.assert_same("damage", net=found.network, data=runs.corpus, settings=(counts, order, around))
        shared = _shared(runs, here)
        losses = torch.zeros(len(shared.corpus), len(every) - 1, dtype=torch.float64)
        with _bars(progress, here)("sentences", len(shared.corpus)) as bar:
            for part in shared.parts():
                full, *each = (shared.gated(part, g.expand(len(part), -1, -1).to(shared.like)) for g in every)
                losses[part.which] = (scale * (full - torch.stack(each)).double().cpu()).T
                bar.update(len(part))
        loss = here.all_gather(losses).T
    shape = gates.shape[:2]
    labels = {"measure": MEASURES, "heads off": tuple(map(str, numbers))}
    count = loss.shape[1]
    error = (loss.std(1) / count**0.5 if count > 1 else loss[:, 0] * torch.nan).reshape(shape)
    return Damage(("measure", "heads off"), labels, loss.mean(1).reshape(shape), error, count, order)


def _said(runs: Runs) -> str:
    """The likelihood in words."""
    names = ", ".join(runs.likelihood.families)
    return f"P({names} | x)" if runs.likelihood.is_observed else f"{AROUND}{names}"


def _shared(runs: Runs, here: Ranks) -> Runs:
    """The runs of this rank's share of the sentences, on its device."""
    if here.world == 1:
        return runs
    corpus = here.shard(runs.corpus).to(here.device)
    return replace(runs, module=_module(here.to_device(runs.module.network)), corpus=corpus, ranks=here)


def _module(network: Network) -> Module:
    """The compiled net, of whose parameters no gradient is asked."""
    return Module(network).eval().requires_grad_(False)


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
    runs = Runs(_module(network), found, corpus, likelihood, found[0].heads)
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
    count, most = len(runs.corpus), budget >> runs.heads
    if count > most:
        told, fewer = (f"{n:,} sentence{'s' * (n != 1)}" for n in (count, most))
        raise BudgetError(
            "method='exact'",
            expected=f"at most {budget:,} runs of each slice",
            got=f"{count << runs.heads:,}: {told} under {2**runs.heads:,} settings of {runs.heads} gates",
            allowed=f"{fewer + ', ' if most else ''}a larger budget=, or method='svi', which is approximate",
        )


def ablation(runs: Runs, told: Callable[[int], object]) -> Tensor:
    """What `log P` of each sentence loses with one head off: `[sentence, site, head]`."""
    one_off = torch.cat([torch.ones(1, runs.heads), 1 - torch.eye(runs.heads)]).double()
    table = runs.table(one_off, told)
    return (table[..., :1] - table[..., 1:]).transpose(0, 1)


def importance(runs: Runs, sigma: float | None, seed: int, told: Callable[[int], object]) -> tuple[Tensor, Tensor]:
    """The mean size of the slope of the loss along each gate, all heads on, `[site, head]`, and its standard error."""
    found = torch.empty(len(runs.corpus), len(runs.sites), runs.heads, dtype=torch.float64)
    for part in runs.parts(runs.fitting()):
        if sigma is None:
            found[part.which] = slopes(runs, part).abs()
        else:
            each = [slopes(runs, other).abs() for other in _drawn(runs, part, sigma, seed)]
            found[part.which] = torch.stack(each).mean(0) / sigma**2
        told(len(part))
    found = runs.ranks.all_gather(found)
    return found.mean(0), found.std(0) / len(found) ** 0.5 if len(found) > 1 else found[0] * torch.nan


def slopes(runs: Runs, part: Part) -> Tensor:
    """`d log P / d gates` of each sentence with all heads on."""
    shape, dtype = (len(part), len(runs.sites), runs.heads), runs.module.network.dtype
    gates = torch.ones(shape, dtype=dtype, device=part.device).requires_grad_()
    (found,) = torch.autograd.grad(runs.gated(part, gates).sum(), gates)
    return found.double().cpu()


def _drawn(runs: Runs, part: Part, sigma: float, seed: int) -> Iterator[Part]:
    """The same sentences, with outputs drawn around the full one, by random numbers of each sentence's own."""
    assert part.full is not None
    full = part.full.expand(len(part), *part.full.shape[1:])
    noise = []
    for sentence in runs.ranks.places(part.which).tolist():
        own = torch.Generator().manual_seed(derive_seed(seed, "output", sentence))
        noise.append(torch.randn(DRAWS, *full.shape[1:], generator=own, dtype=torch.float64))
    for each in torch.stack(noise, 1):
        yield replace(part, full=full + sigma * each.to(full))
