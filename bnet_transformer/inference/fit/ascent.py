"""Restarts that learn at once, step by step: minibatches, bounds, measures, checkpoints and early stopping.

A method says by `bound_and_grad` what a step makes large; `optimize` takes the steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from bnet_transformer._core.deferred_scalars import DeferredScalars
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer.data import Batch
from bnet_transformer.data.batch import send
from bnet_transformer.errors import BNetError
from bnet_transformer.files import checkpoint, reading
from bnet_transformer.inference.factors import NEVER
from bnet_transformer.inference.fit.descent import Sets, adamw_step, init_restarts, squared_length
from bnet_transformer.inference.fit.methods import FitProblem, IterativeMethod
from bnet_transformer.inference.fit.objective import LOG_EVIDENCE, LOG_POSTERIOR
from bnet_transformer.training.configs import schedule_of
from bnet_transformer.training.loop_config import LoopConfig, asked_to_stop

USUAL = 256  # sentences of a minibatch, where none is told
AT_ONCE = 1024  # sentences of one part of a full pass
FALLEN = 100.0  # how far below its start, in its own measure, a bound may fall before it counts as diverged


class RestartOptimizer(ABC):
    """The steps of a fit: every restart's parameters, what was measured of them, the best so far.

    The host reads no number off the device in a step: bounds wait in `pending` until they are there, and restarts that
    diverged are dropped some steps late, computed for nothing until then.

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
        self.pending = DeferredScalars.on(ranks.device)  # bounds of steps that were not read yet
        self.pending_ids: deque[list[int]] = deque()  # of which restarts they are
        self.alive = torch.ones(restarts, dtype=torch.bool, device=ranks.device)  # whose bounds were valid
        self.first: Tensor | None = None  # the bound of the first step
        self.asked = self.stopping = False  # whether this process is to stop; whether some process was
        self.bounds: list[float] = []
        self.measured: list[tuple[int, int, float]] = []
        self.best: tuple[float, int, dict[str, Tensor]] = (-math.inf, 0, self.sets.one(0))
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

    def minibatch(self, step: int) -> Batch:
        """The sentences of a step, each once in an epoch."""
        which = self.minibatch_indices(step)
        return self.corpus if which is None else self.corpus.take(which)

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
        """Take one step of every restart and read nothing off the device; `drain_pending` reads the bounds."""
        step, method = self.step, self.method
        bound, gradient = self.bound_and_grad(step)
        self.alive = self.alive & self.valid_bounds(bound)
        if gradient:
            is_finite = adamw_step(self.sets, gradient, step + 1, self.rate(step + 1), method.clip, method.weight_decay)
            self.alive = self.alive & is_finite
        highest = bound.where(self.alive, -math.inf).max().double()
        self.first = highest if self.first is None else self.first
        asked = self.ranks.all_reduce(torch.full((), float(self.asked), dtype=torch.float64, device=self.ranks.device))
        self.pending.put(torch.cat([torch.stack([highest, bound.max().double(), asked]), self.alive.double()]))
        self.pending_ids.append(self.sets.restart_ids)
        self.step += 1

    def drain_pending(self, *, all: bool = False) -> None:
        """Read the bounds of the steps that are done, or of `all`, and drop restarts whose bound or gradient was not
        finite, or far too low; from that step on they were computed for nothing.

        Raises:
            Diverged: Where no restart is left.
        """
        for highest, top, asked, *valid in self.pending.all() if all else self.pending.ripe():
            live = {k for k, is_valid in zip(self.pending_ids.popleft(), valid, strict=True) if is_valid}
            if not live:
                raise Diverged(f"a bound of {top:g}")
            self.bounds.append(highest)
            self.stopping = self.stopping or asked > 0
            if not live.issuperset(self.sets.restart_ids):
                self.keep_restarts([place for place, k in enumerate(self.sets.restart_ids) if k in live])

    def keep_restarts(self, places: list[int]) -> None:
        """Follow only some of the restarts."""
        self.sets.keep(places)
        self.alive = self.alive[places]

    def valid_bounds(self, bound: Tensor) -> Tensor:
        """Which bounds are numbers of sentences that can be, and not far below the start, `[set]`."""
        valid = bound.isfinite() & (bound > NEVER / 2 / len(self.corpus))
        if self.first is None or self.method.anneal is not None:
            return valid
        return valid & (bound > self.first - FALLEN * (1 + self.first.abs()))

    def next_step_finite(self) -> bool:
        """True where the bound and gradient of some restart are good: the next step, looked at and not taken."""
        before = self.sets
        self.sets = Sets(dict(before.values), dict(before.first), dict(before.second), list(before.restart_ids))
        bound, gradient = self.bound_and_grad(self.step)
        self.sets = before
        valid = self.valid_bounds(bound)
        return bool((valid & squared_length(gradient).isfinite() if gradient else valid).any())

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
        mine = corpus if self.ranks.world == 1 else corpus.take(slice(self.ranks.rank, None, self.ranks.world))
        return mine.parts(AT_ONCE) if len(mine) else []

    def shares(self) -> list[Tensor]:
        """The shares of heads of each selector under each restart, `[set, head]`."""
        tables = [self.sets.values[name] for name in sorted(self.objective.choosing)]
        return [table.softmax(-1) for table in tables if table.dim() == 2]

    def measure(self) -> None:
        """Judge every restart and remember the best parameters; at a pruning step, drop the worse half."""
        scores = self.scores()
        for place, (restart, score) in enumerate(zip(self.sets.restart_ids, scores, strict=True)):
            self.measured.append((self.step, restart, score))
            if score > self.best[0]:
                self.best = score, restart, self.sets.one(place)
        if self.step in self.method.pruning_steps:
            order = sorted(range(len(scores)), key=lambda place: -scores[place])
            self.keep_restarts(sorted(order[: -(-len(order) // 2)]))

    def should_stop_early(self) -> bool:
        """True after `patience` measures without a better one."""
        best: dict[int, float] = {}
        for step, _, score in self.measured:
            best[step] = max(score, best.get(step, -math.inf))
        scores, patience = list(best.values()), self.method.patience
        return patience is not None and bool(scores) and len(scores) - 1 - scores.index(max(scores)) >= patience

    def snapshot(self) -> checkpoint.Checkpoint:
        """A checkpoint of where the fit stands."""
        network, (score, restart, best) = self.objective.network, self.best
        tensors = {f"net/{name}": value for name, value in network.parameters.items()}
        tensors |= {f"net/{name}": value for name, value in best.items() if name in network.parameters}
        tensors |= {f"best/{name}": value for name, value in best.items()}
        for part, values in (("all", self.sets.values), ("first", self.sets.first), ("second", self.sets.second)):
            tensors |= {f"{part}/{name}": value for name, value in values.items()}
        tensors["story/who"] = torch.tensor(self.sets.restart_ids)
        tensors["story/best"] = torch.tensor([score, restart], dtype=torch.float64)
        tensors["story/measured"] = torch.tensor(self.measured, dtype=torch.float64).reshape(-1, 3)
        return checkpoint.Checkpoint(self.step, tensors, tuple(self.bounds), (), self.settings)

    def save(self, path: Path, state: checkpoint.Checkpoint) -> None:
        """Write a checkpoint whose next bound was valid."""
        if self.ranks.first:
            checkpoint.write(path, self.objective.network, state)
        self.saved = state.step
        self.ranks.barrier()

    def restore(self, path: Path, free: Collection[str] = ()) -> None:
        """Go on from a checkpoint; settings that are `free` may be others than those that it was made with."""
        state = checkpoint.read(path, self.objective.network)
        checkpoint.check_settings(path, state, self.settings, free)
        with reading(path, checkpoint.WANTED):
            self._set_state(state)

    def _set_state(self, state: checkpoint.Checkpoint) -> None:
        """Take the state of a checkpoint, or refuse one that is not of this fit."""
        story, device = state.part("story"), self.ranks.device
        ids = [int(k) for k in story["who"]]
        form = {name: value[:1].expand(len(ids), *value.shape[1:]) for name, value in self.sets.values.items()}
        if not ids or not {*ids} <= {*range(self.restarts)}:
            raise BNetError("who", expected=f"restarts among {self.restarts}", got=ids)
        for name in ("all", "first", "second"):
            checkpoint.check_forms(state.part(name), form)
        checkpoint.check_forms(state.part("best"), {name: value[0] for name, value in form.items()})
        values, first, second = (
            {k: v.to(device) for k, v in state.part(name).items()} for name in ("all", "first", "second")
        )
        self.sets = Sets(values, first, second, ids)
        self.alive = torch.ones(len(ids), dtype=torch.bool, device=device)
        self.bounds, self.saved, self.step = list(state.losses), state.step, state.step
        self.first = torch.tensor(self.bounds[0], dtype=torch.float64, device=device) if self.bounds else None
        self.measured = [(int(step), int(k), score) for step, k, score in story["measured"].tolist()]
        best = {name: value.to(device) for name, value in state.part("best").items()}
        self.best = float(story["best"][0]), int(story["best"][1]), best


class Diverged(Exception):
    """No restart has a valid bound."""


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
    path = None
    if loop.checkpoints is not None:
        path, has_checkpoint = loop.checkpoints.begin()
        if has_checkpoint:
            run.restore(path, loop.checkpoints.changeable)
    run.ranks.barrier()
    steps, before, stop = run.method.steps, run.step, False
    bar = loop.progress_bar(run.ranks, steps, run.step)
    waiting: checkpoint.Checkpoint | None = None
    live = "" if bar.disable else _live_heads(run)
    with bar, asked_to_stop() as asked:
        while run.step < steps and not stop and not run.should_stop_early():
            run.asked = bool(asked)
            run.advance()
            stop = run.ranks.world == 1 and bool(asked)
            pause = loop.is_pause(run.step, steps) or run.step in run.method.pruning_steps
            _drain(run, path, all=pause or stop or waiting is not None)
            stop = stop or run.stopping
            if path is not None and waiting is not None:
                run.save(path, waiting)
                waiting = None
            bar.update()
            if not bar.disable and run.bounds:
                live = _live_heads(run) if pause else live
                bar.set_postfix(bound=f"{run.bounds[-1]:.4f}", live=live, refresh=False)
            if pause:
                run.measure()
            if path is not None and (pause or stop):
                waiting = run.snapshot()
            if stop and not pause:
                run.measure()  # after the checkpoint: a resumed fit is as if it had never stopped
        _drain(run, path, all=True)
        bar.refresh()  # a quick fit shows how it ended, too
        if run.step > before:
            _finish(run, waiting, path)
    return not stop


def _drain(run: RestartOptimizer, path: Path | None, *, all: bool) -> None:
    """Read bounds; where no restart is left the fit ends with an error."""
    try:
        run.drain_pending(all=all)
    except Diverged as error:
        raise _divergence_error(run, str(error), path) from error


def _finish(run: RestartOptimizer, waiting: checkpoint.Checkpoint | None, path: Path | None) -> None:
    """Check the last parameters, for which there is no next step, and save them."""
    if not run.next_step_finite():
        raise _divergence_error(run, "a last step to where no bound is", path)
    if path is not None and waiting is not None:
        run.save(path, waiting)


def _live_heads(run: RestartOptimizer) -> str:
    """Restarts that are followed, and the most live heads among them."""
    pis, restarts = run.shares(), len(run.sets.restart_ids)
    if not pis:
        return f"{restarts} restarts"
    return f"{restarts} restarts, {int((pis[0] > 0.01).sum(-1).max())} heads"


def _divergence_error(run: RestartOptimizer, got: str, path: Path | None) -> BNetError:
    """The error of a fit that diverged, with the checkpoint that is left and what to change."""
    step = len(run.bounds) + 1
    ways = f"a rate= below {run.rate(step):g}, clip=1.0, a prior (spread=), float32 for bfloat16"
    return checkpoint.diverged(step, "a finite bound, not far below its start", got, ways, path, run.saved)
