"""Restarts that learn at once, step by step: minibatches, Adam, bounds, measures and checkpoints.

A method says by `bound_and_grad` what a step makes large; `optimize` takes the steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from bnet_transformer._core.hashing import derive_seed
from bnet_transformer.data import Batch
from bnet_transformer.data.batch import send
from bnet_transformer.errors import BNetError
from bnet_transformer.files import checkpoint, reading
from bnet_transformer.inference.factors import NEVER
from bnet_transformer.inference.fit.methods import FitProblem, IterativeMethod
from bnet_transformer.inference.fit.objective import LOG_EVIDENCE, LOG_POSTERIOR
from bnet_transformer.network import Network
from bnet_transformer.network.network import declare
from bnet_transformer.training.configs import LoopConfig, asked_to_stop, schedule_of

USUAL = 256  # sentences of a minibatch, where none is told
AT_ONCE = 1024  # sentences of one part of a full pass
FALLEN = 100.0  # how far below its start, in its own measure, a bound may fall before it counts as diverged
FIRST, SECOND, SMALL = 0.9, 0.99, 1e-8  # of Adam: how long its means last, and what keeps division sound


@dataclass
class Sets:
    """The learned parameters of each restart that is still followed, and the moments of Adam, one restart in front."""

    values: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    restart_ids: list[int]

    @classmethod
    def of(cls, values: dict[str, Tensor]) -> Sets:
        """Sets of parameters before the first step, whose moments are 0."""
        first, second = ({name: torch.zeros_like(value) for name, value in values.items()} for _ in range(2))
        return cls(values, first, second, list(range(len(next(iter(values.values()))))))

    def keep(self, places: list[int]) -> None:
        """Follow only some."""
        for part in (self.values, self.first, self.second):
            for name, value in part.items():
                part[name] = value[places]
        self.restart_ids = [self.restart_ids[place] for place in places]

    def one(self, place: int) -> dict[str, Tensor]:
        """The parameters of one."""
        return {name: value[place].detach().clone() for name, value in self.values.items()}


def init_restarts(network: Network, names: tuple[str, ...], restarts: int, seed: int, device: torch.device) -> Sets:
    """The net's own parameters for the first restart, newly drawn ones for the others; logits of -inf for all."""
    own = [{name: network.parameters[name] for name in names}]
    for r in range(1, restarts):
        drawn = declare(network.declaration, seed=derive_seed(seed, "restart", r)).parameters
        new = {name: drawn[name].to(own[0][name]) for name in names}
        own.append({name: value.where(own[0][name] > -torch.inf, -torch.inf) for name, value in new.items()})
    return Sets.of({name: torch.stack([each[name].detach().to(device) for each in own]) for name in names})


def adam_step(sets: Sets, gradient: Mapping[str, Tensor], step: int, rate: float, clip: float | None) -> Tensor:
    """One step of Adam (Kingma and Ba 2015) up the gradient, for each set by itself.

    `torch.optim` would clip and refuse the gradient of all sets as one: here a set whose gradient is not finite stands
    still, and the others go on.

    Args:
        sets: The parameters, `[set, *shape]`, and their moments; they are replaced.
        gradient: The gradient by parameter, `[set, *shape]`; a parameter without one is left as it is.
        step: The number of the step, from 1.
        rate: The rate.
        clip: The greatest length of the gradient of a set; None for any.

    Returns:
        Which sets have a finite gradient, `[set]`.
    """
    square = squared_length(gradient)
    is_finite = square.isfinite()
    factor = torch.ones_like(square) if clip is None else (clip / square.sqrt().clamp(min=1e-30)).clamp(max=1.0)
    for name, g in gradient.items():
        wide = (-1, *[1] * (g.dim() - 1))
        g = torch.where(is_finite.reshape(wide), g * factor.reshape(wide).to(g.dtype), 0.0)
        m = sets.first[name] = FIRST * sets.first[name] + (1 - FIRST) * g
        s = sets.second[name] = SECOND * sets.second[name] + (1 - SECOND) * g.square()
        m, s = m / (1 - FIRST**step), s / (1 - SECOND**step)
        sets.values[name] = sets.values[name] + rate * m / (s.sqrt() + SMALL)
    return is_finite


def squared_length(gradient: Mapping[str, Tensor]) -> Tensor:
    """The square of the length of each set's gradient, `[set]`."""
    return torch.stack([g.reshape(len(g), -1).double().square().sum(1) for g in gradient.values()]).sum(0)


class RestartOptimizer(ABC):
    """The steps of a fit: every restart's parameters, what was measured of them, the best so far.

    Args:
        problem: What is fitted.
        method: The options of the steps.
        restarts: Sets of parameters that are followed at once.
    """

    sums_choices: ClassVar[bool] = True

    def __init__(self, problem: FitProblem, method: IterativeMethod, restarts: int = 1) -> None:
        self.objective = objective = problem.objective
        self.corpus = corpus = problem.corpus
        self.ranks = ranks = problem.ranks
        self.method, self.restarts, self.seed = method, restarts, problem.seed
        self.judge = corpus if problem.held_out is None else problem.held_out
        self.settings = {**problem.settings, "judged_by": self.judged_by}
        self.sets = init_restarts(objective.network, objective.learned.names, restarts, problem.seed, ranks.device)
        self.rate = schedule_of("cosine", method.rate, max(1, method.steps // 20), method.steps, None)
        self.step = 0  # how many steps are done
        self.bounds: list[float] = []
        self.measured: list[tuple[int, int, float]] = []
        self.best: tuple[float, int, dict[str, Tensor]] = (-math.inf, 0, self.sets.one(0))
        self.path: Path | None = None  # of the checkpoint
        self.saved: int | None = None  # the step of the checkpoint in the folder
        self.full = self.full_pass(corpus)
        self.judges = self.full if self.judge is corpus else self.full_pass(self.judge)
        for part in (corpus, self.judge):
            if part.mask is not None:
                objective.module.check_mask(tuple(part.evidence), part.x, part.mask)
        objective.check_values = False  # all else was looked at when it became a corpus
        for part in (*self.full, *self.judges) if self.sums_choices else ():
            objective.keep(part)
        self.batch = len(corpus) if objective.of_corpus else min(problem.batch or USUAL, len(corpus))

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
        size, count = self.batch, len(self.corpus)
        if size >= count:
            return None
        epoch, place = divmod(step, -(-count // size))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        order = torch.randperm(count, generator=generator)
        return send(order[place * size : (place + 1) * size].clone(), self.ranks.device)

    def advance(self) -> None:
        """Take one step of every restart, and drop those whose bound or gradient is not finite, or far too low.

        Raises:
            BNetError: Where no restart is left.
        """
        bound, gradient = self.bound_and_grad(self.step)
        is_valid = self.valid_bounds(bound)
        if gradient:
            number = self.step + 1
            is_valid = is_valid & adam_step(self.sets, gradient, number, self.rate(number), self.method.clip)
        live = is_valid.nonzero()[:, 0].tolist()
        if not live:
            raise self.diverged(f"a bound of {float(bound.max()):g}")
        self.bounds.append(float(bound[live].max()))
        if len(live) < len(bound):
            self.sets.keep(live)
        self.step += 1

    def valid_bounds(self, bound: Tensor) -> Tensor:
        """Which bounds are numbers of sentences that can be, and not far below the start, `[set]`."""
        is_valid = bound.isfinite() & (bound > NEVER / 2 / len(self.corpus))
        if not self.bounds or self.method.anneal is not None:
            return is_valid
        start = self.bounds[0]
        return is_valid & (bound > start - FALLEN * (1 + abs(start)))

    def check_next_step(self) -> None:
        """Look at the next step without taking it; where no restart has a valid one the fit has diverged."""
        before = self.sets
        self.sets = Sets(dict(before.values), dict(before.first), dict(before.second), list(before.restart_ids))
        bound, gradient = self.bound_and_grad(self.step)
        self.sets = before
        is_valid = self.valid_bounds(bound)
        if not bool((is_valid & squared_length(gradient).isfinite() if gradient else is_valid).any()):
            raise self.diverged("a last step to where no bound is")

    def diverged(self, got: str) -> BNetError:
        """The error of a fit that diverged, with the checkpoint that is left and what to change."""
        step, wanted = len(self.bounds) + 1, "a finite bound, not far below its start"
        ways = f"a rate= below {self.rate(step):g}, clip=1.0, a prior (spread=)"
        return checkpoint.diverged(step, wanted, got, ways, self.path, self.saved)

    @property
    def judged_by(self) -> str:
        """What `scores` measures. Without a prior on what is learned the log posterior density is the log evidence."""
        return LOG_POSTERIOR if self.judge is self.corpus and self.objective.has_prior else LOG_EVIDENCE

    def scores(self) -> list[float]:
        """What each restart is judged by, per sentence of those that judge.

        On the sentences learned from it is what the method maximises: by their likelihood alone, the best step would be
        the one that disregards the prior most. Held-out sentences judge what prior and likelihood make together.
        """
        total = torch.zeros(len(self.sets.restart_ids), dtype=self.objective.network.dtype, device=self.ranks.device)
        with torch.no_grad():
            for part in self.judges:
                total = total + self.objective.log_evidences(self.sets.values, part).sum(1)
        total = self.ranks.all_reduce(total)  # the prior counts once, and not once for each rank
        if self.judged_by == LOG_POSTERIOR:
            total = total + self.objective.log_prior(self.sets.values).detach()
        return [float(score) for score in total / len(self.judge)]

    def full_pass(self, corpus: Batch) -> list[Batch]:
        """This process's share of a corpus, in the parts of a full pass; one part where sentences share a draw."""
        if self.objective.of_corpus:
            return [corpus]
        mine = self.ranks.shard(corpus)
        return mine.parts(AT_ONCE) if len(mine) else []

    def measure(self) -> None:
        """Judge every restart and remember the best parameters; at a pruning step, drop the worse half."""
        scores = self.scores()
        for place, (restart, score) in enumerate(zip(self.sets.restart_ids, scores, strict=True)):
            self.measured.append((self.step, restart, score))
            if score > self.best[0]:
                self.best = score, restart, self.sets.one(place)
        if self.step in self.method.pruning_steps:
            order = sorted(range(len(scores)), key=lambda place: -scores[place])
            self.sets.keep(sorted(order[: -(-len(order) // 2)]))

    def snapshot(self) -> checkpoint.Checkpoint:
        """A checkpoint of where the fit stands."""
        network, (score, restart, best) = self.objective.network, self.best
        tensors = {f"net/{name}": value for name, value in network.parameters.items()}
        tensors |= {f"net/{name}": value for name, value in best.items() if name in network.parameters}
        parts = {"best": best, "all": self.sets.values, "first": self.sets.first, "second": self.sets.second}
        tensors |= {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}
        tensors["story/who"] = torch.tensor(self.sets.restart_ids)
        tensors["story/best"] = torch.tensor([score, restart], dtype=torch.float64)
        tensors["story/measured"] = torch.tensor(self.measured, dtype=torch.float64).reshape(-1, 3)
        return checkpoint.Checkpoint(self.step, tensors, tuple(self.bounds), (), self.settings)

    def save(self, state: checkpoint.Checkpoint) -> None:
        """Write a checkpoint whose next bound was valid."""
        assert self.path is not None
        if self.ranks.first:
            checkpoint.write(self.path, self.objective.network, state)
        self.saved = state.step
        self.ranks.barrier()

    def restore(self, path: Path, free: Collection[str] = ()) -> None:
        """Go on from a checkpoint; settings that are `free` may be others than those that it was made with."""
        state = checkpoint.read(path, self.objective.network)
        checkpoint.check_settings(path, state, self.settings, free)
        with reading(path, checkpoint.WANTED):
            story, device = state.part("story"), self.ranks.device
            ids = [int(k) for k in story["who"]]
            if not ids or not {*ids} <= {*range(self.restarts)}:
                raise BNetError("who", expected=f"restarts among {self.restarts}", got=ids)
            form = {name: value[:1].expand(len(ids), *value.shape[1:]) for name, value in self.sets.values.items()}
            parts = [state.part(name) for name in ("all", "first", "second")]
            for part in parts:
                checkpoint.check_forms(part, form)
            best = state.part("best")
            checkpoint.check_forms(best, {name: value[0] for name, value in form.items()})
            values, first, second = ({k: v.to(device) for k, v in part.items()} for part in parts)
            self.sets = Sets(values, first, second, ids)
            self.bounds, self.saved, self.step = list(state.losses), state.step, state.step
            self.measured = [(int(step), int(k), score) for step, k, score in story["measured"].tolist()]
            score, restart = story["best"].tolist()
            self.best = score, int(restart), {name: value.to(device) for name, value in best.items()}


def optimize(run: RestartOptimizer, loop: LoopConfig) -> bool:
    """Take the steps that are left, with measures and checkpoints.

    A checkpoint waits until the bound of the next step has shown that its parameters are good.

    Args:
        run: The restarts; a checkpoint that there is replaces their state.
        loop: When it is measured and saved.

    Returns:
        False where Ctrl-C ended the steps early.

    Raises:
        BNetError: Where every restart diverged.
        FileError: Where there is a checkpoint that the run is not to go on from.
    """
    if loop.checkpoints is not None:
        run.path, has_checkpoint = loop.checkpoints.begin()
        if has_checkpoint:
            run.restore(run.path, loop.checkpoints.changeable)
    run.ranks.barrier()
    steps, before, stop = run.method.steps, run.step, False
    waiting: checkpoint.Checkpoint | None = None
    with loop.progress_bar(run.ranks, steps, run.step) as bar, asked_to_stop() as asked:
        while run.step < steps and not stop:
            run.advance()
            stop = run.ranks.any(bool(asked))
            pause = loop.is_pause(run.step, steps) or run.step in run.method.pruning_steps
            if waiting is not None:
                run.save(waiting)
                waiting = None
            bar.update()
            bar.set_postfix(bound=f"{run.bounds[-1]:.4f}", restarts=len(run.sets.restart_ids), refresh=False)
            if pause:
                run.measure()
            if run.path is not None and (pause or stop):
                waiting = run.snapshot()
            if stop and not pause:
                run.measure()  # after the checkpoint: a resumed fit is as if it had never stopped
        bar.refresh()  # a quick fit shows how it ended, too
        if run.step > before:
            run.check_next_step()
        if waiting is not None:
            run.save(waiting)
    return not stop
