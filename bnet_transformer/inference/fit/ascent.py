"""`map` and `em`: restarts that climb together, judged by held-out likelihood; checkpoints, resume, early stop."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from bnet_transformer.errors import BNetError, FileError
from bnet_transformer.inference.fit.corpus import Corpus
from bnet_transformer.inference.fit.descent import Sets, begun, bound_and_gradient, climb, settle_tables
from bnet_transformer.inference.fit.objective import Objective
from bnet_transformer.inference.fit.recipe import Habits, Recipe
from bnet_transformer.training import checkpoint
from bnet_transformer.training.data import mixed
from bnet_transformer.training.loop import asked_to_stop
from bnet_transformer.training.parallel import Ranks
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
        corpus: Corpus,
        judge: Corpus,
        ranks: Ranks,
        settings: dict[str, object],
    ) -> None:
        self.objective, self.recipe, self.corpus, self.judge, self.ranks = objective, recipe, corpus, judge, ranks
        self.settings = settings
        self.sets = begun(objective.network, objective.learned.names, recipe.restarts, recipe.seed, ranks.device)
        self.rate = schedule_of("cosine", recipe.highest, max(1, recipe.total // 20), recipe.total, None)
        self.bounds: list[float] = []
        self.measured: list[tuple[int, int, float]] = []
        self.best: tuple[float, int, dict[str, Tensor]] = (-math.inf, 0, self.sets.one(0))
        self.settled = objective.choosing
        self.full, self.judges = self.whole(corpus), self.whole(judge)
        for part in (*self.full, *self.judges) if recipe.choices == "exact" else ():
            objective.keep(part)
        self.batch = len(corpus) if objective.of_corpus else min(recipe.batch or USUAL, len(corpus))

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.bounds)

    def minibatch(self, step: int) -> Corpus:
        """The sentences of a step, each once in an epoch."""
        which = self.which(step)
        return self.corpus if which is None else self.corpus.take(which)

    def which(self, step: int) -> Tensor | None:
        """The places of the sentences of a step; None for all of them."""
        size, count = self.batch, len(self.corpus)
        if size >= count:
            return None
        epoch, place = divmod(step, -(-count // size))
        generator = torch.Generator().manual_seed(mixed(self.recipe.seed, "order", epoch))
        return torch.randperm(count, generator=generator)[place * size : (place + 1) * size].to(self.ranks.device)

    def advance(self) -> None:
        """One step of every restart; those whose bound or gradient is no number, or far too low, are let go."""
        step = self.step
        bound, gradient = self.rise(step)
        good = bound.isfinite()
        if gradient:
            recipe = self.recipe
            good &= climb(self.sets, gradient, step + 1, self.rate(step + 1), recipe.clip, recipe.weight_decay)
        if self.bounds and self.recipe.anneal is None:
            good &= bound > self.bounds[0] - FALLEN * (1 + abs(self.bounds[0]))
        if not bool(good.all()):
            if not bool(good.any()):
                raise _Diverged(f"a bound of {float(bound.max()):g}")
            self.sets.keep(good.nonzero()[:, 0].tolist())
        self.bounds.append(float(bound[good].max()))

    def rise(self, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The bound of each restart on the sentences of a step, and the gradient that it follows."""
        em = self.recipe.method == "em"
        if em and not set(self.objective.learned.names) - self.settled:
            prior = self.objective.log_prior(self.sets.values)
            return (settle_tables(self.objective, self.sets, self.full) + prior) / len(self.corpus), {}
        if em and step % self.recipe.inner == 0:
            settle_tables(self.objective, self.sets, self.full)
        power, autocast = self.recipe.power(step), self.recipe.precision == "bfloat16"
        part, total = self.minibatch(step), len(self.corpus)
        bound, gradient = bound_and_gradient(self.objective, self.sets, part, total, power, self.ranks, autocast)
        return bound, {name: g for name, g in gradient.items() if not em or name not in self.settled}

    def evidence(self, parts: list[Corpus]) -> Tensor:
        """The mean log evidence of a sentence under each restart, `[set]`."""
        with torch.no_grad():
            total = torch.stack([self.objective.log_evidences(self.sets.values, part).sum(1) for part in parts]).sum(0)
        return total / sum(len(part) for part in parts)

    def scores(self) -> list[float]:
        """The mean log evidence of a sentence of those that judge, under each restart."""
        return [float(score) for score in self.evidence(self.judges)]

    def whole(self, corpus: Corpus) -> list[Corpus]:
        """A corpus in the parts of a full pass; one part where sentences share a draw."""
        return [corpus] if self.objective.of_corpus else corpus.parts(AT_ONCE)

    def measure(self) -> None:
        """Judge every restart; the best parameters are kept, and at a halving the worse half is let go."""
        scores = self.scores()
        for place, (who, score) in enumerate(zip(self.sets.who, scores, strict=True)):
            self.measured.append((self.step, who, score))
            if score > self.best[0]:
                self.best = score, who, self.sets.one(place)
        if self.step in self.recipe.halvings:
            order = sorted(range(len(scores)), key=lambda place: -scores[place])
            self.sets.keep(sorted(order[: -(-len(order) // 2)]))

    def tired(self, patience: int | None) -> bool:
        """True after `patience` measures without a better one."""
        best: dict[int, float] = {}
        for step, _, score in self.measured:
            best[step] = max(score, best.get(step, -math.inf))
        scores = list(best.values())
        return patience is not None and bool(scores) and len(scores) - 1 - scores.index(max(scores)) >= patience

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        network, (score, who, best) = self.objective.network, self.best
        tensors = {f"net/{name}": value for name, value in network.parameters.items()}
        tensors |= {f"net/{name}": value for name, value in best.items() if name in network.parameters}
        tensors |= {f"best/{name}": value for name, value in best.items()}
        for part, values in (("all", self.sets.values), ("first", self.sets.first), ("second", self.sets.second)):
            tensors |= {f"{part}/{name}": value for name, value in values.items()}
        tensors["story/who"] = torch.tensor(self.sets.who)
        tensors["story/best"] = torch.tensor([score, who], dtype=torch.float64)
        tensors["story/measured"] = torch.tensor(self.measured, dtype=torch.float64).reshape(-1, 3)
        if self.ranks.first:
            found = checkpoint.Checkpoint(self.step, tensors, tuple(self.bounds), (), self.settings)
            checkpoint.write(path, network, found)
        self.ranks.meet()

    def restore(self, path: Path, free: Collection[str] = ()) -> None:
        """Go on where a checkpoint stands; settings that are `free` may be others than those that it was made with."""
        found = checkpoint.read(path, self.objective.network)
        checkpoint.check_settings(path, found, self.settings, free)
        story, device = found.part("story"), self.ranks.device
        values, first, second = (
            {k: v.to(device) for k, v in found.part(name).items()} for name in ("all", "first", "second")
        )
        self.sets = Sets(values, first, second, [int(who) for who in story["who"]])
        self.bounds = list(found.losses)
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
    run.ranks.meet()
    steps = run.recipe.total
    hide = True if not run.ranks.first or habits.progress is False else False if habits.progress else None
    bar = tqdm(total=steps, initial=run.step, disable=hide, unit="step", leave=False)
    with bar, asked_to_stop() as asked:
        while run.step < steps and not run.tired(habits.patience):
            try:
                run.advance()
            except _Diverged as error:
                raise _refusal(run, error, path) from error
            bar.update()
            bar.set_postfix(bound=f"{run.bounds[-1]:.4f}", live=_live(run), refresh=False)
            stop = run.ranks.any(bool(asked))
            pause = habits.pauses(run.step, steps) or run.step in run.recipe.halvings
            if pause:
                run.measure()
            if path is not None and (pause or stop):
                run.save(path)
            if stop:
                if not pause:
                    run.measure()  # after the checkpoint: a resumed fit is as if it had never stopped
                return False
    return True


def _live(run: Ascent) -> str:
    """Restarts that are followed, and the fewest and most effective heads among them."""
    tables = [
        run.sets.values[name] for name in run.settled if name in run.sets.values and run.sets.values[name].dim() == 2
    ]
    if not tables:
        return f"{len(run.sets.who)} restarts"
    pi = tables[0].softmax(-1)
    return f"{len(run.sets.who)} restarts, {int((pi > 0.01).sum(-1).max())} heads"


def _refusal(run: Ascent, error: _Diverged, path: Path | None) -> BNetError:
    kept = "no checkpoint was kept (folder=)" if path is None else f"{path} keeps the last good checkpoint"
    if path is not None and not path.exists():
        kept = "it came before the first checkpoint (every=)"
    return BNetError(
        f"step {run.step + 1}",
        expected="a finite bound, not far below its start",
        got=f"{error}; {kept}",
        allowed=f"a rate= below {run.rate(run.step + 1):g}, clip=1.0, a prior (spread=), float32 for bfloat16",
    )
