"""`svi` and `nuts`: samples of the posterior, by Pyro, with the exact log evidence as a factor of the model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.distributed import Ranks
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer._core.torch_context import reseed
from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.files import checkpoint
from bnet_transformer.inference.fit.ascent import ascend
from bnet_transformer.inference.fit.chains import TOLD, Chain, go_on, keep
from bnet_transformer.inference.fit.draws import representative
from bnet_transformer.inference.fit.objective import LOG_EVIDENCE, Objective
from bnet_transformer.inference.fit.recipe import Habits, Recipe
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.inference.fit.samples import aligned
from bnet_transformer.inference.fit.variational import Drawn, Model, Variational
from bnet_transformer.network import Network
from bnet_transformer.training.loop import asked_to_stop

NARROW = "mean-field: the posterior is taken as independent by parameter, and its spread comes out too small"
DRAWN = "; choices are drawn, not summed, and taken as independent of each other given the sentence"
EARLY = "interrupted in the warmup: nothing is drawn yet, and the net is the likeliest that was come to"


@dataclass(frozen=True)
class Found:
    """What a method found: samples with tables as probabilities, and the parameters to show, tables as logarithms."""

    samples: dict[str, Tensor]
    shown: dict[str, Tensor]
    finished: bool
    approximate: str | None = None
    bounds: tuple[float, ...] = ()
    measured: tuple[tuple[int, int, float], ...] = ()
    statistics: dict[str, Tensor] = field(default_factory=dict)
    matched: tuple[str, ...] = ()
    judged_by: str = LOG_EVIDENCE
    choices: dict[str, Tensor] = field(default_factory=dict)


def sampled(
    objective: Objective, recipe: Recipe, habits: Habits, corpus: Batch, settings: dict[str, Any], ranks: Ranks
) -> Fit[Network]:
    """A fit with a posterior."""
    if recipe.method == "nuts" and recipe.batch is not None and recipe.batch < len(corpus):
        wanted = f"None or all {len(corpus)} sentences: NUTS needs the whole likelihood"
        raise BNetError("batch", expected=wanted, got=recipe.batch, allowed="svi")
    by = _by_svi if recipe.method == "svi" else _by_nuts
    found = by(objective, recipe, habits, corpus, settings, ranks)
    network = objective.network
    shown = _home(network, found.shown)
    return Fit(
        network.with_parameters({**network.parameters, **shown}),
        recipe.method,
        len(corpus),
        "the sentences learned from",
        finished=found.finished,
        approximate=found.approximate,
        learned=objective.learned.names,
        budget=objective.budget,
        bounds=found.bounds,
        measured=found.measured,
        samples=_home(network, found.samples),
        divergent=tuple(int(n) for n in found.statistics.get("diverging", torch.zeros(0, 1)).sum(1)),
        choices=found.choices,
        statistics=found.statistics,
        matched=found.matched,
        judged_by=found.judged_by,
    )


def _home(network: Network, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was found, each where the net has its own."""
    return {name: value.to(network.parameters[name].device) for name, value in found.items()}


def _by_svi(
    objective: Objective, recipe: Recipe, habits: Habits, corpus: Batch, settings: dict[str, Any], ranks: Ranks
) -> Found:
    drawn = recipe.choices == "sampled"
    run = (Drawn if drawn else Variational)(objective, recipe, corpus, corpus, ranks, settings)
    finished = ascend(run, habits)
    reseed(derive_seed(recipe.seed, "posterior"), ranks.device)
    samples = {name: of.sample((1, recipe.draws)) for name, of in run.guide(run.sets.one(0)).items()}
    return Found(
        samples,
        run.mean(),
        finished,
        NARROW + (DRAWN if drawn else ""),
        tuple(run.bounds),
        tuple(run.measured),
        judged_by=run.judged_by,
        choices=run.choices(),
    )


def _by_nuts(
    objective: Objective, recipe: Recipe, habits: Habits, corpus: Batch, settings: dict[str, Any], ranks: Ranks
) -> Found:
    """All chains, a draw of each in turn: whenever they end, each has as many draws.

    Under torchrun each rank follows every so many-th chain, on all sentences.
    """
    path = None if habits.folder is None else checkpoint.path_of(habits.folder)
    there = path is not None and path.exists()
    if there and not habits.resume:
        raise FileError(str(path), expected="no checkpoint yet", got="one", allowed="resume=True, another folder=")
    ranks.barrier()
    objective.keep(corpus)
    model, steps, done = Model(objective), recipe.warmup + recipe.draws, 0
    hide = True if not ranks.first or habits.progress is False else False if habits.progress else None
    with pyro.validation_enabled(False), warnings.catch_warnings(), asked_to_stop() as asked:
        warnings.simplefilter("ignore", UserWarning)  # Pyro's own, of torch interfaces that go away
        chains = [Chain(model, recipe, corpus, number) for number in ranks.shard(range(recipe.chains))]
        if path is not None and there:
            done = go_on(path, objective.network, chains, settings, habits.free)
        with tqdm(total=steps, initial=done, disable=hide, unit="draw", leave=False) as bar:
            stop = ranks.any(bool(asked))
            while done < steps and not stop:
                for chain in chains:
                    chain.advance()
                done += 1
                stop = ranks.any(bool(asked))
                bar.update()
                if chains:
                    bar.set_postfix(_told(objective, chains, len(corpus)), refresh=False)
                if path is not None and (habits.pauses(done, steps) or stop):
                    keep(path, objective.network, chains, settings, ranks)
            bar.refresh()  # a quick fit tells how it ended, too
    drawn, told, best = _of_all(chains, recipe.chains, ranks)
    names, finished = objective.learned.names, done == steps
    if not drawn:
        shown = {name: value.log() if name in objective.learned.tables else value for name, value in best.items()}
        return Found({}, shown, finished, EARLY)
    samples = {name: torch.stack([each[name] for each in drawn]) for name in names}
    statistics = dict(zip(TOLD, torch.stack(told).unbind(-1), strict=True))
    samples, matched = aligned(objective, corpus, samples, statistics["lp"])
    shown = representative(objective.network, samples, objective.learned.tables)
    return Found(samples, shown, finished, statistics=statistics, matched=matched)


def _of_all(
    chains: list[Chain], count: int, ranks: Ranks
) -> tuple[list[dict[str, Tensor]], list[Tensor], dict[str, Tensor]]:
    """What the chains of all ranks drew and told, by their numbers, and where the densest of them stands."""
    own: dict[int, Any] = {}
    for chain in chains:
        drawn = {k: torch.stack([each[k] for each in chain.drawn]).cpu() for k in (chain.drawn or [{}])[0]}
        stands = {name: value.cpu() for name, value in chain.parameters().items()}
        own[chain.number] = drawn, torch.tensor(chain.told, dtype=torch.float64), chain.density, stands
    found = {number: each for part in ranks.all_gather_object(own) for number, each in part.items()}
    every = [found[number] for number in range(count)]
    _, _, _, best = max(every, key=lambda each: each[2])

    def here(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(ranks.device) for name, value in values.items()}

    return [here(drawn) for drawn, *_ in every if drawn], [told for _, told, *_ in every], here(best)


def _told(objective: Objective, chains: list[Chain], sentences: int) -> dict[str, str]:
    """What the progress says: the phase, the mean log density per sentence, the most live heads of a chain."""
    bound = sum(chain.density for chain in chains) / len(chains) / sentences
    told = {"phase": "draws" if chains[0].drawn else "warmup", "bound": f"{bound:.4f}"}
    tables = [chain.parameters()[name] for name in sorted(objective.choosing)[:1] for chain in chains]
    pis = [table for table in tables if table.dim() == 1]
    return told | ({"live": f"{max(int((pi > 0.01).sum()) for pi in pis)} heads"} if pis else {})
