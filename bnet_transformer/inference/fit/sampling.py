"""`svi` and `nuts`: samples of the posterior, by Pyro, with the exact log evidence as a factor of the model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from torch import Tensor

from bnet_transformer._core.distributed import Ranks
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer._core.torch_context import reseed
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.fit.ascent import optimize
from bnet_transformer.inference.fit.chains import TOLD, Chain, go_on, keep
from bnet_transformer.inference.fit.draws import representative
from bnet_transformer.inference.fit.methods import NUTS, SVI, FitProblem
from bnet_transformer.inference.fit.objective import LOG_EVIDENCE, Objective
from bnet_transformer.inference.fit.point import with_learned
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.inference.fit.samples import aligned
from bnet_transformer.inference.fit.variational import Drawn, Model, Variational
from bnet_transformer.network import Network
from bnet_transformer.training.loop_config import asked_to_stop

NARROW = "mean-field: the posterior is taken as independent by parameter, and its spread comes out too small"
DRAWN = "; choices are drawn, not summed, and taken as independent of each other given the sentence"
EARLY = "interrupted in the warmup: nothing is drawn yet, and the net is the likeliest that was come to"


@dataclass(frozen=True)
class Posterior:
    """What a method found: samples with tables as probabilities, and the parameters to show, tables as logarithms."""

    samples: dict[str, Tensor]
    shown: dict[str, Tensor]
    is_finished: bool
    approximate: str | None = None
    bounds: tuple[float, ...] = ()
    measured: tuple[tuple[int, int, float], ...] = ()
    statistics: dict[str, Tensor] = field(default_factory=dict)
    matched: tuple[str, ...] = ()
    judged_by: str = LOG_EVIDENCE
    choices: dict[str, Tensor] = field(default_factory=dict)

    def as_fit(self, network: Network, method: str, objective: Objective, sentences: int) -> Fit[Network]:
        """The fit with this posterior.

        Args:
            network: The net that was fitted.
            method: The name of the method.
            objective: What was learned, and within which budget.
            sentences: How many sentences it was learned from.

        Returns:
            The fit; its net has the parameters to show, and every tensor is where the net has its own.
        """
        return Fit(
            with_learned(network, self.shown),
            method,
            sentences,
            "the sentences learned from",
            finished=self.is_finished,
            approximate=self.approximate,
            learned=objective.learned.names,
            budget=objective.budget,
            bounds=self.bounds,
            measured=self.measured,
            samples={name: value.to(network.parameters[name].device) for name, value in self.samples.items()},
            divergent=tuple(int(n) for n in self.statistics.get("diverging", torch.zeros(0, 1)).sum(1)),
            choices=self.choices,
            statistics=self.statistics,
            matched=self.matched,
            judged_by=self.judged_by,
        )


def fit_svi(problem: FitProblem, method: SVI) -> Fit[Network]:
    """A fit by a mean-field guide.

    Args:
        problem: What is fitted.
        method: The options.

    Returns:
        The fit, with draws of the guide as samples.
    """
    objective, is_drawn = problem.objective, method.choices == "sampled"
    run = (Drawn if is_drawn else Variational)(problem, method)
    is_finished = optimize(run, problem.loop)
    reseed(derive_seed(problem.seed, "posterior"), problem.ranks.device)
    samples = {name: of.sample((1, method.draws)) for name, of in run.guide(run.sets.one(0)).items()}
    posterior = Posterior(
        samples,
        run.mean(),
        is_finished,
        NARROW + (DRAWN if is_drawn else ""),
        tuple(run.bounds),
        tuple(run.measured),
        judged_by=run.judged_by,
        choices=run.choices(),
    )
    return posterior.as_fit(objective.network, method.name, objective, len(problem.corpus))


def fit_nuts(problem: FitProblem, method: NUTS) -> Fit[Network]:
    """A fit by NUTS: a draw of each chain in turn, so that all chains have as many draws whenever they end.

    Under torchrun each rank follows every so many-th chain, on all sentences.

    Args:
        problem: What is fitted.
        method: The options.

    Returns:
        The fit; without samples where it was interrupted in the warmup.

    Raises:
        BNetError: Where `batch` is less than all sentences.
    """
    objective, corpus = problem.objective, problem.corpus
    if problem.batch is not None and problem.batch < len(corpus):
        wanted = f"None or all {len(corpus)} sentences: NUTS needs the whole likelihood"
        raise BNetError("batch", expected=wanted, got=problem.batch, allowed="svi")
    chains, is_finished = _run_chains(problem, method)
    drawn, statistics_by_chain, best = _of_all(chains, method.chains, problem.ranks)
    if not drawn:
        tables = objective.learned.tables
        shown = {name: value.log() if name in tables else value for name, value in best.items()}
        posterior = Posterior({}, shown, is_finished, EARLY)
        return posterior.as_fit(objective.network, method.name, objective, len(corpus))
    samples = {name: torch.stack([each[name] for each in drawn]) for name in objective.learned.names}
    statistics = dict(zip(TOLD, torch.stack(statistics_by_chain).unbind(-1), strict=True))
    samples, matched = aligned(objective, corpus, samples, statistics["lp"])
    shown = representative(objective.network, samples, objective.learned.tables)
    posterior = Posterior(samples, shown, is_finished, statistics=statistics, matched=matched)
    return posterior.as_fit(objective.network, method.name, objective, len(corpus))


def _run_chains(problem: FitProblem, method: NUTS) -> tuple[list[Chain], bool]:
    """The chains of this rank after their draws, and whether they came to the end."""
    objective, loop, ranks = problem.objective, problem.loop, problem.ranks
    path, has_checkpoint = (None, False) if loop.checkpoints is None else loop.checkpoints.begin()
    ranks.barrier()
    objective.keep(problem.corpus)
    model, steps, done = Model(objective), method.warmup + method.draws, 0
    with pyro.validation_enabled(False), warnings.catch_warnings(), asked_to_stop() as asked:
        warnings.simplefilter("ignore", UserWarning)  # Pyro's own, of torch interfaces that go away
        chains = [Chain(model, problem, method.warmup, number) for number in ranks.shard(range(method.chains))]
        if path is not None and loop.checkpoints is not None and has_checkpoint:
            done = go_on(path, objective.network, chains, problem.settings, loop.checkpoints.changeable)
        with loop.progress_bar(ranks, steps, done, "draw") as bar:
            stop = ranks.any(bool(asked))
            while done < steps and not stop:
                for chain in chains:
                    chain.advance()
                done += 1
                stop = ranks.any(bool(asked))
                bar.update()
                if chains:
                    bar.set_postfix(_told(objective, chains, len(problem.corpus)), refresh=False)
                if path is not None and (loop.is_pause(done, steps) or stop):
                    keep(path, objective.network, chains, problem.settings, ranks)
            bar.refresh()  # a quick fit shows how it ended, too
    return chains, done == steps


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
