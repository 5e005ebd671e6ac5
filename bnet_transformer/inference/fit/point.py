"""`map` and `em`: the best of several restarts, judged by the log posterior density or by held-out sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bnet_transformer._core.distributed import Ranks
from bnet_transformer._core.hashing import derive_seed, digest_of
from bnet_transformer.data import Batch
from bnet_transformer.errors import BNetError
from bnet_transformer.files import checkpoint
from bnet_transformer.inference.fit.ascent import SMALL, RestartOptimizer, Sets, optimize
from bnet_transformer.inference.fit.methods import EM, MAP, FitProblem, PointMethod
from bnet_transformer.inference.fit.objective import Objective
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.network import Network

OF_GRADIENTS = ("rate", "clip", "inner")  # of EM, for the weights alone
LAST = 0.2  # of the rate, when the best restart goes on with all sentences
SHARE, MOST = 0.1, 1000  # of the sentences that are held out to choose among restarts, where none are given


class PointEstimate(RestartOptimizer):
    """`map`: every learned parameter follows the gradient of a minibatch. `em`: the tables of choices in closed form
    every `inner` steps, the weights by gradient between; of tables alone every step is an M step of all sentences."""

    def __init__(self, problem: FitProblem, method: MAP | EM) -> None:
        learned = problem.objective.learned
        self.inner = method.inner if isinstance(method, EM) else None
        if isinstance(method, EM) and not learned.weights:
            self.inner, default = 1, EM()
            given = {name: getattr(method, name) for name in OF_GRADIENTS}
            options = {name: value for name, value in given.items() if value != getattr(default, name)}
            for name, value in (options if problem.batch is None else {**options, "batch": problem.batch}).items():
                wanted = "no option of steps by gradient: EM of tables alone has none"
                raise BNetError(
                    name, expected=wanted, got=f"{name}={value!r}", allowed="bt.MAP(), or weights in learn="
                )
        super().__init__(problem, method, method.restarts)

    def bound_and_grad(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The M step where it is due; then the mean over sentences of `log P(y) + log P(parameters) / sentences` of
        each restart, and its gradient by what is not in closed form. Of an M step alone, the bound before it.

        Under torchrun each process takes its share of the sentences, and all get the sum.
        """
        objective, ranks, power = self.objective, self.ranks, self.method.likelihood_power(step)
        if self.inner is not None and step % self.inner == 0:
            prior = objective.log_prior(self.sets.values)
            evidence = m_step(objective, self.sets, self.full, power, ranks)
            if not objective.learned.weights:
                return (evidence + prior) / len(self.corpus), {}
        part = self.minibatch(step)
        size, own = len(part), part if ranks.world == 1 else part.take(slice(ranks.rank, None, ranks.world))
        leaves = {name: value.detach().requires_grad_() for name, value in self.sets.values.items()}
        bound = objective.log_prior(leaves) / len(self.corpus) / ranks.world
        if len(own):
            bound = bound + objective.log_evidences(leaves, own, power).sum(1) / size
        closed = () if self.inner is None else objective.learned.tables
        open_ = {name: leaf for name, leaf in leaves.items() if name not in closed}
        gradients = torch.autograd.grad(bound.sum(), [*open_.values()], allow_unused=True, materialize_grads=True)
        whole = {name: ranks.all_reduce(g) for name, g in zip(open_, gradients, strict=True)}
        return ranks.all_reduce(bound.detach()), whole


def m_step(objective: Objective, sets: Sets, parts: list[Batch], power: float, ranks: Ranks) -> Tensor:
    """The M step in closed form: `theta = (counts + concentration - 1) / sum`, for the tables that choose.

    Args:
        objective: The log evidence, whose expected counts are the E step.
        sets: The parameters of each restart; their tables are replaced.
        parts: All sentences; under torchrun this process's share of them.
        power: The power of the likelihoods.
        ranks: The processes.

    Returns:
        The log evidence of all sentences before the step, `[set]`.
    """
    totals = {name: torch.zeros_like(sets.values[name]) for name in sorted(objective.learned.tables)}
    bound = torch.zeros(len(sets.restart_ids), dtype=objective.network.dtype, device=ranks.device)
    for part in parts:
        counts, evidence = torch.vmap(lambda one, part=part: objective.counts(one, part, power))(sets.values)
        bound = bound + evidence
        for name, count in counts.items():
            totals[name] = totals[name] + count
    for name, count in totals.items():
        share = (ranks.all_reduce(count) + objective.learned.tables[name] - 1).clamp(min=SMALL)
        share = share.where(sets.values[name] > -torch.inf, 0.0)
        sets.values[name] = (share / share.sum(-1, keepdim=True)).log()
    return ranks.all_reduce(bound)


def fit_point(problem: FitProblem, method: MAP | EM) -> Fit[Network]:
    """A fit by `map` or `em`: all restarts, then the best of them with the sentences that chose it as well.

    Args:
        problem: What is fitted.
        method: The options.

    Returns:
        The fit, whose net has the best parameters that were measured.
    """
    chosen, judged_on = _split(problem, method)
    run = PointEstimate(chosen, method)
    is_finished = optimize(run, problem.loop)
    (_, restart, best), bounds = run.best, run.bounds
    if len(chosen.corpus) < len(problem.corpus) and is_finished:
        last, is_finished = _continue_on_all(problem, method, best)
        best, bounds = last.best[2], [*bounds, *last.bounds]
    return Fit(
        with_learned(problem.objective.network, best),
        method.name,
        len(problem.corpus),
        judged_on,
        restart,
        is_finished,
        learned=problem.objective.learned.names,
        budget=problem.objective.budget,
        bounds=tuple(bounds),
        measured=tuple(run.measured),
        judged_by=run.judged_by,
    )


def with_learned(network: Network, learned: Mapping[str, Tensor]) -> Network:
    """The net with learned parameters, each on the device where the net had it."""
    return network.with_parameters({**network.parameters, **at_home(network, learned)})


def at_home(network: Network, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of parameters, or draws of them, each on the device where the net has it."""
    return {name: value.to(network.parameters[name].device) for name, value in values.items()}


def _split(problem: FitProblem, method: PointMethod) -> tuple[FitProblem, str]:
    """The problem with sentences by which restarts are judged, and what they are.

    One restart, and a selector of the corpus, are judged by the sentences that they learn from.
    """
    corpus = problem.corpus
    if problem.held_out is not None:
        return problem, "held-out sentences"
    count = min(MOST, int(SHARE * len(corpus)))
    if method.restarts == 1 or problem.objective.of_corpus or not count:
        return problem, "the sentences learned from"
    generator = torch.Generator().manual_seed(derive_seed(problem.seed, "held out"))
    order = torch.randperm(len(corpus), generator=generator)
    split = replace(problem, corpus=corpus.take(order[count:]), held_out=corpus.take(order[:count]))
    return split, f"{count} held-out sentences"


def _continue_on_all(
    problem: FitProblem, method: MAP | EM, best: Mapping[str, Tensor]
) -> tuple[RestartOptimizer, bool]:
    """Go on from the best restart with all sentences, for a quarter of the steps and at a lower rate."""
    objective, ranks = problem.objective, problem.ranks
    again = Objective(with_learned(objective.network, best), objective.learned, objective.budget).to(ranks.device)
    slower = replace(method, restarts=1, anneal=None, steps=max(1, method.steps // 4))
    if isinstance(method, MAP) or objective.learned.weights:
        slower = replace(slower, rate=method.rate * LAST)
    start = {"again": "with all sentences", "parameters": digest_of(again.network.parameters)}
    loop = problem.loop
    if loop.checkpoints is not None:
        loop = replace(loop, checkpoints=replace(loop.checkpoints, folder=Path(loop.checkpoints.folder) / "all"))
    rest = replace(problem, objective=again, loop=loop, settings={**problem.settings, **start})
    last = PointEstimate(rest, slower)
    with checkpoint.kept_by(loop.checkpoints, ranks.first):
        if loop.checkpoints is not None and loop.checkpoints.resume and ranks.first:
            path = loop.checkpoints.path()  # one that began where another first phase had ended is none of this fit
            if path.exists() and checkpoint.read(path, again.network).settings.get("parameters") != start["parameters"]:
                path.unlink()
        ranks.barrier()
        last.measure()  # where it begins may be better than where its steps lead
        return last, optimize(last, loop)
