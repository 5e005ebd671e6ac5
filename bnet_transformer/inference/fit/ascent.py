"""`map` and `em`: restarts that climb together, judged by the log posterior density, or by the log evidence of held-out
sentences; checkpoints, resume, early stop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer._core.deferred_scalars import DeferredScalars
from bnet_transformer._core.distributed import Ranks
from bnet_transformer._core.hashing import derive_seed
from bnet_transformer.data import Batch
from bnet_transformer.data.batch import send
from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.files import checkpoint, reading
from bnet_transformer.inference.factors import NEVER
from bnet_transformer.inference.fit.descent import (
    Sets,
    begun,
    bound_and_gradient,
    climb,
    settle_tables,
    squared_length,
)
from bnet_transformer.inference.fit.objective import LOG_EVIDENCE, LOG_POSTERIOR, Objective
from bnet_transformer.inference.fit.recipe import Habits, Recipe
from bnet_transformer.training.loop import asked_to_stop
from bnet_transformer.training.steps import schedule_of

USUAL = 256  # sentences of a minibatch, where none is told
AT_ONCE = 1024  # sentences of one part of a full pass
FALLEN = 100.0  # how far below its start, in its own measure, a bound may fall before it counts as diverged


class Ascent:
    """A fit by ascent: every restart's parameters, what was measured of them, the best so far."""

    def __init__(
        self,
        objective: Objective,
        recipe: Recipe,
        corpus: Batch,
        judge: Batch,
        ranks: Ranks,
        settings: dict[str, object],
    ) -> None:
        self.objective, self.recipe, self.corpus, self.judge, self.ranks = objective, recipe, corpus, judge, ranks
        self.settings = {**settings, "judged_by": self.judged_by}
        self.sets = begun(objective.network, objective.learned.names, recipe.restarts, recipe.seed, ranks.device)
        self.rate = schedule_of("cosine", recipe.highest, max(1, recipe.total // 20), recipe.total, None)
        self.step = 0  # how many steps are done
        self.late = DeferredScalars.on(ranks.device)  # bounds of steps that were not heard of yet
        self.whose: deque[list[int]] = deque()  # of which restarts they are
        self.alive = torch.ones(len(self.sets.who), dtype=torch.bool, device=ranks.device)  # whose bounds were good
        self.first: Tensor | None = None  # the bound of the first step
        self.asked = self.stopping = False  # whether this process is to stop; whether some process was
        self.bounds: list[float] = []
        self.measured: list[tuple[int, int, float]] = []
        self.best: tuple[float, int, dict[str, Tensor]] = (-math.inf, 0, self.sets.one(0))
        self.settled = objective.choosing
        self.kept: int | None = None  # the step of the checkpoint that lies in the folder
        self.full = self.whole(corpus)
        self.judges = self.full if judge is corpus else self.whole(judge)
        for part in (corpus, judge):
            if part.mask is not None:
                objective.module.check_mask(tuple(part.evidence), part.x, part.mask)
        objective.check_values = False  # all else was looked at when it became a corpus
        for part in (*self.full, *self.judges) if recipe.choices == "exact" else ():
            objective.keep(part)
        self.batch = len(corpus) if objective.of_corpus else min(recipe.batch or USUAL, len(corpus))

    def minibatch(self, step: int) -> Batch:
        """The sentences of a step, each once in an epoch."""
        which = self.which(step)
        return self.corpus if which is None else self.corpus.take(which)

    def which(self, step: int) -> Tensor | None:
        """The places of the sentences of a step; None for all of them."""
        size, count = self.batch, len(self.corpus)
        if size >= count:
            return None
        epoch, place = divmod(step, -(-count // size))
        generator = torch.Generator().manual_seed(derive_seed(self.recipe.seed, "order", epoch))
        order = torch.randperm(count, generator=generator)
        return send(order[place * size : (place + 1) * size].clone(), self.ranks.device)

    def advance(self) -> None:
        """One step of every restart, of which nothing is read; what it came to is heard of in `listen`."""
        step = self.step
        bound, gradient = self.rise(step)
        self.alive = self.alive & self.good(bound)
        if gradient:
            recipe = self.recipe
            sound = climb(self.sets, gradient, step + 1, self.rate(step + 1), recipe.clip, recipe.weight_decay)
            self.alive = self.alive & sound
        highest = bound.where(self.alive, -math.inf).max().double()
        self.first = highest if self.first is None else self.first
        asked = self.ranks.all_reduce(torch.full((), float(self.asked), dtype=torch.float64, device=self.ranks.device))
        self.late.put(torch.cat([torch.stack([highest, bound.max().double(), asked]), self.alive.double()]))
        self.whose.append(self.sets.who)
        self.step += 1

    def listen(self, *, all: bool = False) -> None:
        """Hear of the steps that are there, or of `all`: restarts whose bound or gradient was no number, or far too
        low, are let go; from then on they were computed for nothing."""
        for highest, top, asked, *good in self.late.all() if all else self.late.ripe():
            live = {who for who, fine in zip(self.whose.popleft(), good, strict=True) if fine}
            if not live:
                raise _Diverged(f"a bound of {top:g}")
            self.bounds.append(highest)
            self.stopping = self.stopping or asked > 0
            if not live.issuperset(self.sets.who):
                self.keep([place for place, who in enumerate(self.sets.who) if who in live])

    def keep(self, places: list[int]) -> None:
        """Follow only some of the restarts."""
        self.sets.keep(places)
        self.alive = self.alive[places]

    def good(self, bound: Tensor) -> Tensor:
        """Which bounds are numbers of sentences that can be, and not far below the start, `[set]`."""
        sound = bound.isfinite() & (bound > NEVER / 2 / len(self.corpus))
        if self.first is None or self.recipe.anneal is not None:
            return sound
        return sound & (bound > self.first - FALLEN * (1 + self.first.abs()))

    def sound(self) -> bool:
        """True where the bound and gradient of some restart are good: the next step, looked at and not taken."""
        before = self.sets
        self.sets = Sets(dict(before.values), dict(before.first), dict(before.second), list(before.who))
        bound, gradient = self.rise(self.step)
        self.sets = before
        good = self.good(bound)
        return bool((good & squared_length(gradient).isfinite() if gradient else good).any())

    def rise(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The bound of each restart on the sentences of a step, and the gradient that it follows."""
        em, power = self.recipe.method == "em", self.recipe.power(step)
        if em and not set(self.objective.learned.names) - self.settled:
            prior = self.objective.log_prior(self.sets.values)
            evidence = settle_tables(self.objective, self.sets, self.full, power, self.ranks)
            return (evidence + prior) / len(self.corpus), {}
        if em and step % self.recipe.inner == 0:
            settle_tables(self.objective, self.sets, self.full, power, self.ranks)
        autocast = self.recipe.precision == "bfloat16"
        part, total = self.minibatch(step), len(self.corpus)
        bound, gradient = bound_and_gradient(self.objective, self.sets, part, total, power, self.ranks, autocast)
        return bound, {name: g for name, g in gradient.items() if not em or name not in self.settled}

    @property
    def judged_by(self) -> str:
        """What `scores` measures. Without a prior on what is learned the log posterior density is the log evidence."""
        return LOG_POSTERIOR if self.judge is self.corpus and self.objective.has_prior else LOG_EVIDENCE

    def scores(self) -> list[float]:
        """What each restart is judged by, per sentence of those that judge.

        On the sentences learned from it is what the method maximises: by their likelihood alone, the best step would be
        the one that disregards the prior most. Held-out sentences judge what prior and likelihood make together.
        """
        total = torch.zeros(len(self.sets.who), dtype=self.objective.network.dtype, device=self.ranks.device)
        with torch.no_grad():
            for part in self.judges:
                total = total + self.objective.log_evidences(self.sets.values, part).sum(1)
        total = self.ranks.all_reduce(total)  # the prior counts once, and not once for each rank
        if self.judged_by == LOG_POSTERIOR:
            total = total + self.objective.log_prior(self.sets.values).detach()
        return [float(score) for score in total / len(self.judge)]

    def whole(self, corpus: Batch) -> list[Batch]:
        """This process's share of a corpus, in the parts of a full pass; one part where sentences share a draw."""
        if self.objective.of_corpus:
            return [corpus]
        mine = corpus if self.ranks.world == 1 else corpus.take(slice(self.ranks.rank, None, self.ranks.world))
        return mine.parts(AT_ONCE) if len(mine) else []

    def shares(self) -> list[Tensor]:
        """The shares of heads of each selector under each restart, `[set, head]`."""
        tables = [self.sets.values[name] for name in sorted(self.settled) if name in self.sets.values]
        return [table.softmax(-1) for table in tables if table.dim() == 2]

    def measure(self) -> None:
        """Judge every restart; the best parameters are kept, and at a halving the worse half is let go."""
        scores = self.scores()
        for place, (who, score) in enumerate(zip(self.sets.who, scores, strict=True)):
            self.measured.append((self.step, who, score))
            if score > self.best[0]:
                self.best = score, who, self.sets.one(place)
        if self.step in self.recipe.halvings:
            order = sorted(range(len(scores)), key=lambda place: -scores[place])
            self.keep(sorted(order[: -(-len(order) // 2)]))

    def tired(self, patience: int | None) -> bool:
        """True after `patience` measures without a better one."""
        best: dict[int, float] = {}
        for step, _, score in self.measured:
            best[step] = max(score, best.get(step, -math.inf))
        scores = list(best.values())
        return patience is not None and bool(scores) and len(scores) - 1 - scores.index(max(scores)) >= patience

    def snapshot(self) -> checkpoint.Checkpoint:
        """A checkpoint of where the fit stands."""
        network, (score, who, best) = self.objective.network, self.best
        tensors = {f"net/{name}": value for name, value in network.parameters.items()}
        tensors |= {f"net/{name}": value for name, value in best.items() if name in network.parameters}
        tensors |= {f"best/{name}": value for name, value in best.items()}
        for part, values in (("all", self.sets.values), ("first", self.sets.first), ("second", self.sets.second)):
            tensors |= {f"{part}/{name}": value for name, value in values.items()}
        tensors["story/who"] = torch.tensor(self.sets.who)
        tensors["story/best"] = torch.tensor([score, who], dtype=torch.float64)
        tensors["story/measured"] = torch.tensor(self.measured, dtype=torch.float64).reshape(-1, 3)
        return checkpoint.Checkpoint(self.step, tensors, tuple(self.bounds), (), self.settings)

    def save(self, path: Path, found: checkpoint.Checkpoint) -> None:
        """Write a checkpoint; it was seen to be good."""
        if self.ranks.first:
            checkpoint.write(path, self.objective.network, found)
        self.kept = found.step
        self.ranks.barrier()

    def restore(self, path: Path, free: Collection[str] = ()) -> None:
        """Go on where a checkpoint stands; settings that are `free` may be others than those that it was made with."""
        found = checkpoint.read(path, self.objective.network)
        checkpoint.check_settings(path, found, self.settings, free)
        with reading(path, checkpoint.WANTED):
            self._go_on(found)

    def _go_on(self, found: checkpoint.Checkpoint) -> None:
        """Take a checkpoint's state; what is none of this fit is refused."""
        story, device = found.part("story"), self.ranks.device
        who = [int(each) for each in story["who"]]
        form = {name: value[:1].expand(len(who), *value.shape[1:]) for name, value in self.sets.values.items()}
        if not who or not {*who} <= {*range(self.recipe.restarts)}:
            raise BNetError("who", expected=f"restarts among {self.recipe.restarts}", got=who)
        for name in ("all", "first", "second"):
            checkpoint.check_forms(found.part(name), form)
        checkpoint.check_forms(found.part("best"), {name: value[0] for name, value in form.items()})
        values, first, second = (
            {k: v.to(device) for k, v in found.part(name).items()} for name in ("all", "first", "second")
        )
        self.sets = Sets(values, first, second, who)
        self.alive = torch.ones(len(self.sets.who), dtype=torch.bool, device=device)
        self.bounds, self.kept, self.step = list(found.losses), found.step, found.step
        self.first = torch.tensor(self.bounds[0], dtype=torch.float64, device=device) if self.bounds else None
        self.measured = [(int(step), int(who), score) for step, who, score in story["measured"].tolist()]
        kept = {name: value.to(device) for name, value in found.part("best").items()}
        self.best = float(story["best"][0]), int(story["best"][1]), kept


class _Diverged(Exception):
    """Every restart left the numbers."""


def ascend(run: Ascent, habits: Habits) -> bool:
    """All steps that are left; False where Ctrl-C ended them early."""
    path = None if habits.folder is None else checkpoint.path_of(habits.folder)
    if path is not None and path.exists():
        if not habits.resume:
            raise FileError(str(path), expected="no checkpoint yet", got="one", allowed="resume=True, another folder=")
        run.restore(path, habits.free)
    run.ranks.barrier()
    steps = run.recipe.total
    hide = True if not run.ranks.first or habits.progress is False else False if habits.progress else None
    bar = tqdm(total=steps, initial=run.step, disable=hide, unit="step", leave=False)
    before, waiting, stop = run.step, None, False  # waiting: a checkpoint, until the next bound shows that it is good
    live = "" if bar.disable else _live(run)
    with bar, asked_to_stop() as asked:
        while run.step < steps and not stop and not run.tired(habits.patience):
            run.asked = bool(asked)
            run.advance()
            stop = run.ranks.world == 1 and bool(asked)
            pause = habits.pauses(run.step, steps) or run.step in run.recipe.halvings
            _listen(run, path, all=pause or stop or waiting is not None)
            stop = stop or run.stopping
            if path is not None and waiting is not None:
                run.save(path, waiting)
                waiting = None
            bar.update()
            if not bar.disable and run.bounds:
                live = _live(run) if pause else live
                bar.set_postfix(bound=f"{run.bounds[-1]:.4f}", live=live, refresh=False)
            if pause:
                run.measure()
            if path is not None and (pause or stop):
                waiting = run.snapshot()
            if stop and not pause:
                run.measure()  # after the checkpoint: a resumed fit is as if it had never stopped
        _listen(run, path, all=True)
        bar.refresh()  # a quick fit tells how it ended, too
        if run.step > before:
            _finish(run, waiting, path)
    return not stop


def _listen(run: Ascent, path: Path | None, *, all: bool) -> None:
    """Hear of steps; where no restart is left the fit ends."""
    try:
        run.listen(all=all)
    except _Diverged as error:
        raise _refusal(run, str(error), path) from error


def _finish(run: Ascent, waiting: checkpoint.Checkpoint | None, path: Path | None) -> None:
    """Look at the last parameters, for which there is no next step: refuse them, or keep them."""
    if not run.sound():
        raise _refusal(run, "a last step to where no bound is", path)
    if path is not None and waiting is not None:
        run.save(path, waiting)


def _live(run: Ascent) -> str:
    """Restarts that are followed, and the most live heads among them."""
    pis = run.shares()
    if not pis:
        return f"{len(run.sets.who)} restarts"
    return f"{len(run.sets.who)} restarts, {int((pis[0] > 0.01).sum(-1).max())} heads"


def _refusal(run: Ascent, told: str, path: Path | None) -> BNetError:
    """The error of a fit that diverged, with what is kept and the ways on."""
    step = len(run.bounds) + 1
    ways = f"a rate= below {run.rate(step):g}, clip=1.0, a prior (spread=), float32 for bfloat16"
    return checkpoint.diverged(step, "a finite bound, not far below its start", told, ways, path, run.kept)
