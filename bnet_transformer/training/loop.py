"""`train`: the loop over minibatches, with held-out losses, early stop, checkpoints and resume."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from tqdm import tqdm

from bnet_transformer.errors import BNetError, FileError, number, one_of, whole
from bnet_transformer.network import Network
from bnet_transformer.training.checkpoint import path_of
from bnet_transformer.training.data import Batch, Batches, Reader, batches
from bnet_transformer.training.objective import Loss
from bnet_transformer.training.parallel import ranks
from bnet_transformer.training.result import N, Trained
from bnet_transformer.training.run import Recipe, Run, settings_of
from bnet_transformer.training.task import task_of


def train(
    net: N,
    data: object,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int = 32,
    loss: Loss | None = None,
    smoothing: float = 0.0,
    rate: float | None = None,
    schedule: str = "constant",
    warmup: int = 0,
    dim: int | None = None,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
    weight_decay: float = 0.0,
    clip: float | None = None,
    precision: str | None = None,
    words: int | None = None,
    start: object = None,
    stop: object = None,
    held_out: object = None,
    every: int | None = None,
    patience: int | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    bound: float | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    shard: bool = False,
    progress: bool | None = None,
) -> Trained[N]:
    """A new net, trained on the log probability of its readouts by AdamW; the net that came in stays as it is.

    `data` is a list of sentences or pairs, an array `[sentence, word]`, a pair of arrays, a file of tokens (in windows
    of `words`), or a function from the step to any of these. Where the readout tells the next word, targets follow
    from the words, between `start` and `stop` where they are given. `loss(module, batch)` replaces the likelihood.
    `schedule` is "constant", "cosine" or "noam", where `rate` is a factor (1 by default). Every `every` steps the
    `held_out` loss is measured and a checkpoint goes to `folder`; `resume` goes on from it, bit for bit. After
    `patience` measures without a better one training stops, and the best net is what it gives. A loss above `bound`
    or not finite stops it with an error. Under torchrun each process takes its share of each batch.
    """
    recipe = Recipe(
        batch, smoothing, rate, schedule, warmup, dim, betas, eps, weight_decay, clip, precision, words, seed
    )
    habits = Habits(steps, epochs, every, patience, folder, resume, bound, progress)
    network = _network(net)
    reader = Reader(task_of(network, likelihood=loss is None), start, stop)
    given = batches(reader, data, batch, seed, words)
    held = [] if held_out is None else batches(reader, held_out, batch, seed, words).in_order()
    found = _trained(network, recipe, habits, given, held, reader, loss, device, shard)
    made = found.net if isinstance(net, Network) else cast(Callable[[Network], Any], type(net))(found.net)
    return replace(found, net=made)  # type: ignore[return-value]


def _trained(
    network: Network,
    recipe: Recipe,
    habits: Habits,
    given: Batches,
    held_out: list[Batch],
    reader: Reader,
    loss: Loss | None,
    device: str | torch.device | None,
    shard: bool,
) -> Trained[Network]:
    """The steps of a recipe, on the device and in the processes that there are."""
    one_of("shard", shard, (True, False))
    habits.check(held_out)
    steps = habits.total(given)
    settings = settings_of(recipe, given, reader.start, reader.stop, steps)
    place = torch.device(device) if device is not None else next(iter(network.parameters.values())).device
    with ranks(place) as here, torch.random.fork_rng([here.device] if here.device.type == "cuda" else []):
        run = Run(reader.task, recipe, steps, here, loss, shard, settings)
        _follow(run, given, held_out, habits, steps)
        found = run.best if habits.patience is not None and run.best else run.parameters()
    home = {name: value.to(network.parameters[name].device) for name, value in found.items()}
    return Trained(network.with_parameters(home), tuple(run.losses), tuple(run.held_out), run.step)


@dataclass(frozen=True)
class Habits:
    """What goes on around the steps: how many, what is measured and kept, and when it ends early."""

    steps: int | None
    epochs: int | None
    every: int | None
    patience: int | None
    folder: str | Path | None
    resume: bool
    bound: float | None
    progress: bool | None

    def check(self, held_out: list[Batch]) -> None:
        """Refuse what does not go together."""
        one_of("resume", self.resume, (True, False))
        one_of("progress", self.progress, (True, False, None))
        if self.every is not None:
            whole("every", self.every)
        if self.patience is not None and whole("patience", self.patience) and not held_out:
            raise BNetError("patience", expected="held_out= data to measure", got="none")
        if self.bound is not None:
            number("bound", self.bound)
        if self.resume and self.folder is None:
            raise BNetError("resume", expected="a folder= with a checkpoint", got="none")

    def total(self, given: Batches) -> int:
        """How many steps there are in all."""
        if (self.steps is None) == (self.epochs is None):
            got = f"steps={self.steps}, epochs={self.epochs}"
            raise BNetError("steps", expected="steps= or epochs=, one of them", got=got)
        if self.steps is not None:
            return whole("steps", self.steps)
        if given.epoch is None:
            raise BNetError("epochs", expected="steps=, for a function of the step has no end", got=self.epochs)
        return whole("epochs", self.epochs) * given.epoch

    def pauses(self, step: int, steps: int) -> bool:
        """True after the steps at which something is measured and kept: by default ten times, and at the end."""
        return step % (self.every or max(1, steps // 10)) == 0 or step == steps


def _follow(run: Run, given: Batches, held_out: list[Batch], habits: Habits, steps: int) -> None:
    """The steps that are left."""
    path = None if habits.folder is None else path_of(habits.folder)
    if path is not None and path.exists():
        if not habits.resume:
            allowed = "resume=True, another folder="
            raise FileError(str(path), expected="no checkpoint yet", got="one", allowed=allowed)
        run.restore(path)
    run.ranks.meet()
    hide = True if not run.ranks.first or habits.progress is False else False if habits.progress else None
    bar = tqdm(total=steps, initial=run.step, disable=hide, unit="step", leave=False)
    with bar, _asked_to_stop() as asked:
        while run.step < steps and not _tired(run, habits):
            before = run.step
            loss, length = run.train(given(before), habits.bound)
            if run.step == before:
                raise _diverged(run, loss, length, habits, path)
            bar.update()
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            stop = run.ranks.any(bool(asked))
            if held_out and not stop and habits.pauses(run.step, steps):
                _measure(run, held_out, keep=habits.patience is not None)
            if path is not None and (stop or habits.pauses(run.step, steps)):
                run.save(path)
            if stop:
                raise KeyboardInterrupt


def _measure(run: Run, held_out: list[Batch], *, keep: bool) -> None:
    """The held-out loss; to `keep` is to remember the parameters where it is the best."""
    found = run.evaluate(held_out)
    best = min((loss for _, loss in run.held_out), default=math.inf)
    run.held_out.append((run.step, found))
    if keep and found < best:
        run.keep_best()


def _tired(run: Run, habits: Habits) -> bool:
    """True after `patience` held-out losses that were not better than the best before them."""
    losses = [loss for _, loss in run.held_out]
    if habits.patience is None or not losses:
        return False
    return len(losses) - 1 - losses.index(min(losses)) >= habits.patience


def _diverged(run: Run, loss: float, length: float, habits: Habits, path: Path | None) -> BNetError:
    kept = "no checkpoint was kept (folder=)" if path is None else f"{path} keeps the last good checkpoint"
    if path is not None and not path.exists():
        kept = "it came before the first checkpoint (every=)"
    wanted = "a finite loss" if habits.bound is None else f"a finite loss of at most {habits.bound:g}"
    return BNetError(
        f"step {run.step + 1}",
        expected=wanted,
        got=f"loss {loss:g}, a gradient of length {length:g}; {kept}",
        allowed=f"a rate= below {run.rate(run.step + 1):g}, a longer warmup=, clip=1.0, float32 for bfloat16",
    )


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Whether Ctrl-C came: the step is finished first. A second one is not waited for."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _network(net: object) -> Network:
    found = net if isinstance(net, Network) else getattr(net, "network", None)
    if not isinstance(found, Network):
        raise BNetError("net", expected="a net", got=net)
    return found
