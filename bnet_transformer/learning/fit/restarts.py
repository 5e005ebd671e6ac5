"""`map` and `em`, and what they share with `svi`: restarts that learn at once, step by step.

A method says by `bound_and_grad` what a step makes large; `optimize` takes the steps, with minibatches, Adam, bounds,
measures and checkpoints. `map` and `em` give the best of several restarts, judged by the log posterior density or by
held-out sentences.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from bnet_transformer._core.distributed import DistributedContext
from bnet_transformer._core.files import wrap_read_errors
from bnet_transformer._core.hashing import compute_digest, derive_seed
from bnet_transformer.data import Batch
from bnet_transformer.data.batch import send_to_device
from bnet_transformer.declare import Network
from bnet_transformer.declare.network import declare
from bnet_transformer.errors import BNetError
from bnet_transformer.inference.factors import LOG_ZERO
from bnet_transformer.learning import checkpoint
from bnet_transformer.learning.fit.problem import (
    EM,
    LOG_EVIDENCE,
    LOG_POSTERIOR,
    MAP,
    SVI,
    FitObjective,
    FitProblem,
    IterativeMethod,
    Method,
    PointMethod,
)
from bnet_transformer.learning.fit.result import Fit
from bnet_transformer.learning.training.configs import LoopConfig, create_schedule, defer_interrupt

TRAINING_SENTENCES = "the sentences learned from"
DEFAULT_BATCH_SIZE = 256  # sentences of a minibatch, where none is told
FULL_PASS_SIZE = 1024  # sentences of one part of a full pass
DIVERGENCE_FACTOR = 100.0  # how far below its start, in its own measure, a bound may fall before it counts as diverged
BETA1, BETA2, EPS = 0.9, 0.99, 1e-8  # of Adam: how long its means last, and what keeps division sound
GRADIENT_OPTIONS = ("rate", "clip", "inner")  # of EM, for the weights alone
FINAL_RATE_FACTOR = 0.2  # of the rate, when the best restart goes on with all sentences
VALIDATION_FRACTION, MAX_VALIDATION = (
    0.1,
    1000,
)  # of the sentences that are held out to choose among restarts, where none are given


@dataclass
class ParameterSets:
    """The learned parameters of each restart that is still followed, and the moments of Adam, one restart in front."""

    values: dict[str, Tensor]
    first_moments: dict[str, Tensor]
    second_moments: dict[str, Tensor]
    restart_ids: list[int]

    @classmethod
    def create(cls, values: dict[str, Tensor]) -> ParameterSets:
        """Sets of parameters before the first step, whose moments are 0."""
        first, second = ({name: torch.zeros_like(value) for name, value in values.items()} for _ in range(2))
        return cls(values, first, second, list(range(len(next(iter(values.values()))))))

    def select(self, indices: list[int]) -> None:
        """Follow only some."""
        for part in (self.values, self.first_moments, self.second_moments):
            for name, value in part.items():
                part[name] = value[indices]
        self.restart_ids = [self.restart_ids[place] for place in indices]

    def get(self, index: int) -> dict[str, Tensor]:
        """The parameters of one."""
        return {name: value[index].detach().clone() for name, value in self.values.items()}


def init_restarts(
    network: Network, names: tuple[str, ...], restarts: int, seed: int, device: torch.device
) -> ParameterSets:
    """The net's own parameters for the first restart, newly drawn ones for the others; logits of -inf for all."""
    own = [{name: network.parameters[name] for name in names}]
    for r in range(1, restarts):
        drawn = declare(network.declaration, seed=derive_seed(seed, "restart", r)).parameters
        new = {name: drawn[name].to(own[0][name]) for name in names}
        own.append({name: value.where(own[0][name] > -torch.inf, -torch.inf) for name, value in new.items()})
    return ParameterSets.create({name: torch.stack([each[name].detach().to(device) for each in own]) for name in names})


def adam_step(
    sets: ParameterSets, gradients: Mapping[str, Tensor], step: int, rate: float, clip: float | None
) -> Tensor:
    """One step of Adam (Kingma and Ba 2015) up the gradient, for each set by itself.

    `torch.optim` would clip and refuse the gradient of all sets as one: here a set whose gradient is not finite stands
    still, and the others go on.

    Args:
        sets: The parameters, `[set, *shape]`, and their moments; they are replaced.
        gradients: The gradient by parameter, `[set, *shape]`; a parameter without one is left as it is.
        step: The number of the step, from 1.
        rate: The rate.
        clip: The greatest length of the gradient of a set; None for any.

    Returns:
        Which sets have a finite gradient, `[set]`.
    """
    square = squared_grad_norm(gradients)
    is_finite = square.isfinite()
    factor = torch.ones_like(square) if clip is None else (clip / square.sqrt().clamp(min=1e-30)).clamp(max=1.0)
    for name, g in gradients.items():
        wide = (-1, *[1] * (g.dim() - 1))
        g = torch.where(is_finite.reshape(wide), g * factor.reshape(wide).to(g.dtype), 0.0)
        m = sets.first_moments[name] = BETA1 * sets.first_moments[name] + (1 - BETA1) * g
        s = sets.second_moments[name] = BETA2 * sets.second_moments[name] + (1 - BETA2) * g.square()
        m, s = m / (1 - BETA1**step), s / (1 - BETA2**step)
        sets.values[name] = sets.values[name] + rate * m / (s.sqrt() + EPS)
    return is_finite


def squared_grad_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """The square of the length of each set's gradient, `[set]`."""
    return torch.stack([g.reshape(len(g), -1).double().square().sum(1) for g in gradients.values()]).sum(0)


class RestartOptimizer(ABC):
    """The steps of a fit: every restart's parameters, what was measured of them, the best so far.

    Args:
        problem: What is fitted.
        method: The options of the steps.
        restarts: Sets of parameters that are followed at once.
    """

    has_summed_choices: ClassVar[bool] = True

    def __init__(self, problem: FitProblem, method: IterativeMethod, restarts: int = 1) -> None:
        self.objective = objective = problem.objective
        self.corpus = corpus = problem.corpus
        self.ranks = ranks = problem.ranks
        self.method, self.restarts, self.seed = method, restarts, problem.seed
        self.pruning_steps = method.pruning_steps if isinstance(method, PointMethod) else ()
        self.validation = corpus if problem.held_out is None else problem.held_out
        self.settings = {**problem.settings, "judged_by": self.criterion}
        self.sets = init_restarts(objective.network, objective.learned.names, restarts, problem.seed, ranks.device)
        self.schedule = create_schedule("cosine", method.rate, max(1, method.steps // 20), method.steps, None)
        self.step = 0  # how many steps are done
        self.bounds: list[float] = []
        self.measured: list[tuple[int, int, float]] = []
        self.best: tuple[float, int, dict[str, Tensor]] = (-math.inf, 0, self.sets.get(0))
        self.checkpoint_path: Path | None = None  # of the checkpoint
        self.saved_step: int | None = None  # the step of the checkpoint in the folder
        self.corpus_parts = self.split_full_pass(corpus)
        self.validation_parts = (
            self.corpus_parts if self.validation is corpus else self.split_full_pass(self.validation)
        )
        for part in (corpus, self.validation):
            if part.mask is not None:
                objective.module.check_mask(tuple(part.evidence), part.x, part.mask)
        objective.check_values = False  # all else was looked at when it became a corpus
        for part in (*self.corpus_parts, *self.validation_parts) if self.has_summed_choices else ():
            objective.cache_factors(part)
        self.batch_size = (
            len(corpus) if objective.has_corpus_choice else min(problem.batch or DEFAULT_BATCH_SIZE, len(corpus))
        )

    @abstractmethod
    def bound_and_grad(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The bound of each restart on the sentences of a step, `[set]`, and the gradient that it follows.

        Args:
            step: The number of the step, from 0; it decides the minibatch and the seed of draws.

        Returns:
            The bounds, and the gradient by parameter; an empty one where the step set parameters in closed form.
        """

    def minibatch_indices(self, step: int) -> Tensor | None:
        """The places of the sentences of a step; None for all of them."""
        size, count = self.batch_size, len(self.corpus)
        if size >= count:
            return None
        epoch, place = divmod(step, -(-count // size))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        order = torch.randperm(count, generator=generator)
        return send_to_device(order[place * size : (place + 1) * size].clone(), self.ranks.device)

    def advance(self) -> None:
        """Take one step of every restart, and drop those whose bound or gradient is not finite, or far too low.

        Raises:
            BNetError: Where no restart is left.
        """
        bound, gradient = self.bound_and_grad(self.step)
        is_valid = self.valid_bounds(bound)
        if gradient:
            number = self.step + 1
            is_valid = is_valid & adam_step(self.sets, gradient, number, self.schedule(number), self.method.clip)
        live = is_valid.nonzero()[:, 0].tolist()
        if not live:
            raise self.divergence_error(f"a bound of {float(bound.max()):g}")
        self.bounds.append(float(bound[live].max()))
        if len(live) < len(bound):
            self.sets.select(live)
        self.step += 1

    def valid_bounds(self, bound: Tensor) -> Tensor:
        """Which bounds are numbers of sentences that can be, and not far below the start, `[set]`."""
        is_valid = bound.isfinite() & (bound > LOG_ZERO / 2 / len(self.corpus))
        if not self.bounds or (isinstance(self.method, SVI) and self.method.anneal is not None):
            return is_valid
        start = self.bounds[0]
        return is_valid & (bound > start - DIVERGENCE_FACTOR * (1 + abs(start)))

    def check_next_step(self) -> None:
        """Look at the next step without taking it; where no restart has a valid one the fit has diverged."""
        before = self.sets
        self.sets = ParameterSets(
            dict(before.values), dict(before.first_moments), dict(before.second_moments), list(before.restart_ids)
        )
        bound, gradient = self.bound_and_grad(self.step)
        self.sets = before
        is_valid = self.valid_bounds(bound)
        if not bool((is_valid & squared_grad_norm(gradient).isfinite() if gradient else is_valid).any()):
            raise self.divergence_error("a last step to where no bound is")

    def divergence_error(self, received: str) -> BNetError:
        """The error of a fit that diverged, with the checkpoint that is left and what to change."""
        step, wanted = len(self.bounds) + 1, "a finite bound, not far below its start"
        ways = f"a rate= below {self.schedule(step):g}, clip=1.0, a prior (spread=)"
        return checkpoint.divergence_error(step, wanted, received, ways, self.checkpoint_path, self.saved_step)

    @property
    def criterion(self) -> str:
        """What `scores` measures. Without a prior on what is learned the log posterior density is the log evidence."""
        return LOG_POSTERIOR if self.validation is self.corpus and self.objective.has_prior else LOG_EVIDENCE

    def scores(self) -> list[float]:
        """What each restart is judged by, per sentence of those that judge.

        On the sentences learned from it is what the method maximises: by their likelihood alone, the best step would be
        the one that disregards the prior most. Held-out sentences judge what prior and likelihood make together.
        """
        total = torch.zeros(len(self.sets.restart_ids), dtype=self.objective.network.dtype, device=self.ranks.device)
        with torch.no_grad():
            for part in self.validation_parts:
                total = total + self.objective.log_evidences(self.sets.values, part).sum(1)
        total = self.ranks.all_reduce(total)  # the prior counts once, and not once for each rank
        if self.criterion == LOG_POSTERIOR:
            total = total + self.objective.log_prior(self.sets.values).detach()
        return [float(score) for score in total / len(self.validation)]

    def split_full_pass(self, corpus: Batch) -> list[Batch]:
        """This process's share of a corpus, in the parts of a full pass; one part where sentences share a draw."""
        if self.objective.has_corpus_choice:
            return [corpus]
        mine = self.ranks.shard(corpus)
        return mine.parts(FULL_PASS_SIZE) if len(mine) else []

    def evaluate_restarts(self) -> None:
        """Judge every restart and remember the best parameters; at a pruning step, drop the worse half."""
        scores = self.scores()
        for place, (restart, score) in enumerate(zip(self.sets.restart_ids, scores, strict=True)):
            self.measured.append((self.step, restart, score))
            if score > self.best[0]:
                self.best = score, restart, self.sets.get(place)
        if self.step in self.pruning_steps:
            order = sorted(range(len(scores)), key=lambda place: -scores[place])
            self.sets.select(sorted(order[: -(-len(order) // 2)]))

    def snapshot(self) -> checkpoint.Checkpoint:
        """A checkpoint of where the fit stands."""
        network, (score, restart, best) = self.objective.network, self.best
        tensors = {f"net/{name}": value for name, value in network.parameters.items()}
        tensors |= {f"net/{name}": value for name, value in best.items() if name in network.parameters}
        parts = {
            "best": best,
            "all": self.sets.values,
            "first": self.sets.first_moments,
            "second": self.sets.second_moments,
        }
        tensors |= {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}
        tensors["story/who"] = torch.tensor(self.sets.restart_ids)
        tensors["story/best"] = torch.tensor([score, restart], dtype=torch.float64)
        tensors["story/measured"] = torch.tensor(self.measured, dtype=torch.float64).reshape(-1, 3)
        return checkpoint.Checkpoint(self.step, tensors, tuple(self.bounds), (), self.settings)

    def save(self, state: checkpoint.Checkpoint) -> None:
        """Write a checkpoint whose next bound was valid."""
        assert self.checkpoint_path is not None
        if self.ranks.is_main_process:
            checkpoint.write_checkpoint(self.checkpoint_path, self.objective.network, state)
        self.saved_step = state.step
        self.ranks.barrier()

    def restore(self, path: Path, changeable: Collection[str] = ()) -> None:
        """Go on from a checkpoint; settings that are `changeable` may be others than those that it was made with."""
        state = checkpoint.read_checkpoint(path, self.objective.network)
        checkpoint.check_settings(path, state, self.settings, changeable)
        with wrap_read_errors(path, checkpoint.EXPECTED):
            story, device = state.get_tensors("story"), self.ranks.device
            ids = [int(k) for k in story["who"]]
            if not ids or not {*ids} <= {*range(self.restarts)}:
                raise BNetError("who", expected=f"restarts among {self.restarts}", actual=ids)
            form = {name: value[:1].expand(len(ids), *value.shape[1:]) for name, value in self.sets.values.items()}
            parts = [state.get_tensors(name) for name in ("all", "first", "second")]
            for part in parts:
                checkpoint.check_shapes_and_dtypes(part, form)
            best = state.get_tensors("best")
            checkpoint.check_shapes_and_dtypes(best, {name: value[0] for name, value in form.items()})
            values, first, second = ({k: v.to(device) for k, v in part.items()} for part in parts)
            self.sets = ParameterSets(values, first, second, ids)
            self.bounds, self.saved_step, self.step = list(state.losses), state.step, state.step
            self.measured = [(int(step), int(k), score) for step, k, score in story["measured"].tolist()]
            score, restart = story["best"].tolist()
            self.best = score, int(restart), {name: value.to(device) for name, value in best.items()}


def optimize(optimizer: RestartOptimizer, loop: LoopConfig) -> bool:
    """Take the steps that are left, with measures and checkpoints.

    A checkpoint waits until the bound of the next step has shown that its parameters are good.

    Args:
        optimizer: The restarts; a checkpoint that there is replaces their state.
        loop: When it is measured and saved.

    Returns:
        False where Ctrl-C ended the steps early.

    Raises:
        BNetError: Where every restart diverged.
        FileError: Where there is a checkpoint that the run is not to go on from.
    """
    if loop.checkpoints is not None:
        optimizer.checkpoint_path, has_checkpoint = loop.checkpoints.prepare()
        if has_checkpoint:
            optimizer.restore(optimizer.checkpoint_path, loop.checkpoints.changeable)
    optimizer.ranks.barrier()
    steps, before, stop = optimizer.method.steps, optimizer.step, False
    waiting: checkpoint.Checkpoint | None = None
    with loop.progress_bar(optimizer.ranks, steps, optimizer.step) as bar, defer_interrupt() as asked:
        while optimizer.step < steps and not stop:
            optimizer.advance()
            stop = optimizer.ranks.any(bool(asked))
            pause = loop.is_evaluation_step(optimizer.step, steps) or optimizer.step in optimizer.pruning_steps
            if waiting is not None:
                optimizer.save(waiting)
                waiting = None
            bar.update()
            bar.set_postfix(
                bound=f"{optimizer.bounds[-1]:.4f}", restarts=len(optimizer.sets.restart_ids), refresh=False
            )
            if pause:
                optimizer.evaluate_restarts()
            if optimizer.checkpoint_path is not None and (pause or stop):
                waiting = optimizer.snapshot()
            if stop and not pause:
                optimizer.evaluate_restarts()  # after the checkpoint: a resumed fit is as if it had never stopped
        bar.refresh()  # a quick fit shows how it ended, too
        if optimizer.step > before:
            optimizer.check_next_step()
        if waiting is not None:
            optimizer.save(waiting)
    return not stop


class PointOptimizer(RestartOptimizer):
    """`map`: every learned parameter follows the gradient of a minibatch. `em`: the tables of choices in closed form
    every `inner` steps, the weights by gradient between; of tables alone every step is an M step of all sentences."""

    def __init__(self, problem: FitProblem, method: MAP | EM) -> None:
        learned = problem.objective.learned
        self.inner = method.inner if isinstance(method, EM) else None
        if isinstance(method, EM) and not learned.weights:
            self.inner, wanted = 1, "no option of steps by gradient: EM of tables alone has none"
            given = {name: getattr(method, name) for name in GRADIENT_OPTIONS} | {"batch": problem.batch}
            for name, value in given.items():
                if value != getattr(EM(), name, None):
                    got, allowed = f"{name}={value!r}", "bt.MAP(), or weights in learn="
                    raise BNetError(name, expected=wanted, actual=got, allowed=allowed)
        super().__init__(problem, method, method.restarts)

    def bound_and_grad(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The M step where it is due; then the mean over sentences of `log P(y) + log P(parameters) / sentences` of
        each restart, and its gradient by what is not in closed form. Of an M step alone, the bound before it.

        Under torchrun each process takes its share of the sentences, and all get the sum.
        """
        objective, ranks = self.objective, self.ranks
        if self.inner is not None and step % self.inner == 0:
            prior = objective.log_prior(self.sets.values)
            evidence = m_step(objective, self.sets, self.corpus_parts, ranks)
            if not objective.learned.weights:
                return (evidence + prior) / len(self.corpus), {}
        which = self.minibatch_indices(step)
        part = self.corpus if which is None else self.corpus.take(which)
        size, own = len(part), ranks.shard(part)
        leaves = {name: value.detach().requires_grad_() for name, value in self.sets.values.items()}
        bound = objective.log_prior(leaves) / len(self.corpus) / ranks.world_size
        if len(own):
            bound = bound + objective.log_evidences(leaves, own).sum(1) / size
        closed = () if self.inner is None else objective.learned.tables
        open_ = {name: leaf for name, leaf in leaves.items() if name not in closed}
        gradients = torch.autograd.grad(bound.sum(), [*open_.values()], allow_unused=True, materialize_grads=True)
        whole = {name: ranks.all_reduce(g) for name, g in zip(open_, gradients, strict=True)}
        return ranks.all_reduce(bound.detach()), whole


def m_step(objective: FitObjective, sets: ParameterSets, parts: list[Batch], ranks: DistributedContext) -> Tensor:
    """The M step in closed form: `theta = (counts + concentration - 1) / sum`, for the tables that choose.

    Args:
        objective: The log evidence, whose expected counts are the E step.
        sets: The parameters of each restart; their tables are replaced.
        parts: All sentences; under torchrun this process's share of them.
        ranks: The processes.

    Returns:
        The log evidence of all sentences before the step, `[set]`.
    """
    totals = {name: torch.zeros_like(sets.values[name]) for name in sorted(objective.learned.tables)}
    bound = torch.zeros(len(sets.restart_ids), dtype=objective.network.dtype, device=ranks.device)
    for part in parts:
        counts, evidence = torch.vmap(lambda one, part=part: objective.expected_counts(one, part))(sets.values)
        bound = bound + evidence
        for name, count in counts.items():
            totals[name] = totals[name] + count
    for name, count in totals.items():
        share = (ranks.all_reduce(count) + objective.learned.tables[name] - 1).clamp(min=EPS)
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
    chosen, judged_on = _split_validation(problem, method)
    run = PointOptimizer(chosen, method)
    is_finished = optimize(run, problem.loop)
    (_, restart, best), bounds = run.best, run.bounds
    if len(chosen.corpus) < len(problem.corpus) and is_finished:
        last, is_finished = _continue_on_all(problem, method, best)
        best, bounds = last.best[2], [*bounds, *last.bounds]
    found = {"bounds": tuple(bounds), "measured": tuple(run.measured), "criterion": run.criterion}
    return build_fit(problem, method, best, judged_on, restart=restart, finished=is_finished, **found)


def build_fit(
    problem: FitProblem,
    method: Method,
    parameters: Mapping[str, Tensor],
    evaluated_on: str = TRAINING_SENTENCES,
    **fields: Any,
) -> Fit[Network]:
    """What a method found: the net with these parameters, what was asked, and the fields of a fit in `fields`."""
    objective, count = problem.objective, len(problem.corpus)
    net, learned = replace_learned(objective.network, parameters), objective.learned.names
    return Fit(net, method.name, count, evaluated_on, learned=learned, budget=objective.budget, **fields)


def replace_learned(network: Network, learned: Mapping[str, Tensor]) -> Network:
    """The net with learned parameters, each on the device where the net had it."""
    return network.with_parameters({**network.parameters, **to_network_devices(network, learned)})


def to_network_devices(network: Network, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of parameters, or draws of them, each on the device where the net has it."""
    return {name: value.to(network.parameters[name].device) for name, value in values.items()}


def _split_validation(problem: FitProblem, method: PointMethod) -> tuple[FitProblem, str]:
    """The problem with sentences by which restarts are judged, and what they are.

    One restart, and a selector of the corpus, are judged by the sentences that they learn from.
    """
    corpus = problem.corpus
    if problem.held_out is not None:
        return problem, "held-out sentences"
    count = min(MAX_VALIDATION, int(VALIDATION_FRACTION * len(corpus)))
    if method.restarts == 1 or problem.objective.has_corpus_choice or not count:
        return problem, TRAINING_SENTENCES
    generator = torch.Generator().manual_seed(derive_seed(problem.seed, "held out"))
    order = torch.randperm(len(corpus), generator=generator)
    split = replace(problem, corpus=corpus.take(order[count:]), held_out=corpus.take(order[:count]))
    return split, f"{count} held-out sentences"


def _continue_on_all(
    problem: FitProblem, method: MAP | EM, best: Mapping[str, Tensor]
) -> tuple[RestartOptimizer, bool]:
    """Go on from the best restart with all sentences, for a quarter of the steps and at a lower rate."""
    objective, ranks = problem.objective, problem.ranks
    again = FitObjective(replace_learned(objective.network, best), objective.learned, objective.budget).to(ranks.device)
    slower = replace(method, restarts=1, steps=max(1, method.steps // 4))
    if isinstance(method, MAP) or objective.learned.weights:
        slower = replace(slower, rate=method.rate * FINAL_RATE_FACTOR)
    start = {"again": "with all sentences", "parameters": compute_digest(again.network.parameters)}
    loop = problem.loop
    if loop.checkpoints is not None:
        loop = replace(loop, checkpoints=replace(loop.checkpoints, folder=Path(loop.checkpoints.folder) / "all"))
    rest = replace(problem, objective=again, loop=loop, settings={**problem.settings, **start})
    last = PointOptimizer(rest, slower)
    with checkpoint.lock_checkpoints(loop.checkpoints, ranks.is_main_process):
        if loop.checkpoints is not None and loop.checkpoints.resume and ranks.is_main_process:
            path = (
                loop.checkpoints.create_path()
            )  # one that began where another first phase had ended is none of this fit
            if (
                path.exists()
                and checkpoint.read_checkpoint(path, again.network).settings.get("parameters") != start["parameters"]
            ):
                path.unlink()
        ranks.barrier()
        last.evaluate_restarts()  # where it begins may be better than where its steps lead
        return last, optimize(last, loop)
