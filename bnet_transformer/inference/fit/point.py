"""`map` and `em`: the best of several restarts, judged by the log posterior density or by held-out sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bnet_transformer._core.hashing import derive_seed, digest_of
from bnet_transformer.errors import BNetError
from bnet_transformer.files import checkpoint
from bnet_transformer.inference.fit.ascent import RestartOptimizer, optimize
from bnet_transformer.inference.fit.descent import bound_and_grad, m_step
from bnet_transformer.inference.fit.methods import EM, MAP, FitProblem, PointMethod
from bnet_transformer.inference.fit.objective import Objective
from bnet_transformer.inference.fit.result import Fit
from bnet_transformer.network import Network

OF_GRADIENTS = ("rate", "clip", "weight_decay", "precision", "inner")  # of EM, for the weights alone
LAST = 0.2  # of the rate, when the best restart goes on with all sentences
SHARE, MOST = 0.1, 1000  # of the sentences that are held out to choose among restarts, where none are given


class GradientAscent(RestartOptimizer):
    """`map`: every learned parameter follows the gradient of a minibatch."""

    def __init__(self, problem: FitProblem, method: PointMethod) -> None:
        super().__init__(problem, method, method.restarts)
        self.autocast = method.precision == "bfloat16"

    def bound_and_grad(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The log posterior density of each restart, per sentence, and its gradient."""
        power, part, total = self.method.likelihood_power(step), self.minibatch(step), len(self.corpus)
        return bound_and_grad(self.objective, self.sets, part, total, power, self.ranks, self.autocast)


class ExpectationMaximization(GradientAscent):
    """`em`: the tables of choices in closed form every `inner` steps, the weights by gradient between."""

    def __init__(self, problem: FitProblem, method: EM) -> None:
        super().__init__(problem, method)
        self.inner = method.inner

    def bound_and_grad(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The M step where it is due, then the bound and the gradient of the weights."""
        if step % self.inner == 0:
            m_step(self.objective, self.sets, self.full, self.method.likelihood_power(step), self.ranks)
        bound, gradient = super().bound_and_grad(step)
        return bound, {name: g for name, g in gradient.items() if name not in self.objective.choosing}


class ClosedFormEM(GradientAscent):
    """`em` of tables alone: every step is an M step of all sentences, and nothing follows a gradient."""

    def bound_and_grad(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The log posterior density before the M step, per sentence; no gradient."""
        prior = self.objective.log_prior(self.sets.values)
        evidence = m_step(self.objective, self.sets, self.full, self.method.likelihood_power(step), self.ranks)
        return (evidence + prior) / len(self.corpus), {}


def _check_options(problem: FitProblem, method: MAP | EM) -> None:
    """Refuse what EM has no use for where tables alone are learned: every step is the closed form of all sentences."""
    if isinstance(method, MAP) or set(problem.objective.learned.names) - problem.objective.choosing:
        return
    options = {name: getattr(method, name) for name in OF_GRADIENTS if getattr(method, name) != getattr(EM(), name)}
    options |= {} if problem.batch is None else {"batch": problem.batch}
    for name, value in options.items():
        wanted, allowed = (
            "no option of steps by gradient: EM of tables alone has none",
            "bt.MAP(), or weights in learn=",
        )
        raise BNetError(name, expected=wanted, got=f"{name}={value!r}", allowed=allowed)


def optimizer_of(problem: FitProblem, method: MAP | EM) -> GradientAscent:
    """The steps of a method."""
    if isinstance(method, MAP):
        return GradientAscent(problem, method)
    learns_weights = set(problem.objective.learned.names) - problem.objective.choosing
    return (ExpectationMaximization if learns_weights else ClosedFormEM)(problem, method)


def fit_point(problem: FitProblem, method: MAP | EM) -> Fit[Network]:
    """A fit by `map` or `em`: all restarts, then the best of them with the sentences that chose it as well.

    Args:
        problem: What is fitted.
        method: The options.

    Returns:
        The fit, whose net has the best parameters that were measured.
    """
    _check_options(problem, method)
    chosen, judged_on = _split(problem, method)
    run = optimizer_of(chosen, method)
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
    home = {name: value.to(network.parameters[name].device) for name, value in learned.items()}
    return network.with_parameters({**network.parameters, **home})


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


def _continue_on_all(problem: FitProblem, method: MAP | EM, best: Mapping[str, Tensor]) -> tuple[GradientAscent, bool]:
    """Go on from the best restart with all sentences, for a quarter of the steps and at a lower rate."""
    objective, ranks = problem.objective, problem.ranks
    again = Objective(with_learned(objective.network, best), objective.learned, objective.budget).to(ranks.device)
    slower = replace(method, restarts=1, anneal=None, steps=max(1, method.steps // 4), rate=method.rate * LAST)
    start = {"again": "with all sentences", "parameters": digest_of(again.network.parameters)}
    loop = problem.loop
    if loop.checkpoints is not None:
        loop = replace(loop, checkpoints=replace(loop.checkpoints, folder=Path(loop.checkpoints.folder) / "all"))
    rest = replace(problem, objective=again, loop=loop, settings={**problem.settings, **start})
    last = optimizer_of(rest, slower)
    with checkpoint.kept_by(loop.checkpoints, ranks.first):
        if loop.checkpoints is not None and loop.checkpoints.resume and ranks.first:
            _delete_other(loop.checkpoints.path(), again.network, start)
        ranks.barrier()
        last.measure()  # where it begins may be better than where its steps lead
        return last, optimize(last, loop)


def _delete_other(path: Path, network: Network, start: Mapping[str, str]) -> None:
    """Delete the checkpoint of a last phase that began where another first phase had ended."""
    if path.exists() and checkpoint.read(path, network).settings.get("parameters") != start["parameters"]:
        path.unlink()
