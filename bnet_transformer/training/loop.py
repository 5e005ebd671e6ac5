"""`train`: the loop over minibatches, with held-out losses, early stop, checkpoints and resume."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from tqdm import tqdm

from bnet_transformer._core.distributed import device_of, ranks
from bnet_transformer._core.torch_context import own_random, with_gradients
from bnet_transformer.data import Batch, Dataset
from bnet_transformer.data.dataset import read_dataset
from bnet_transformer.data.examples import ExampleReader
from bnet_transformer.data.task import check_has_words, infer_task
from bnet_transformer.errors import BNetError, FileError, number, one_of, whole, within_memory
from bnet_transformer.files import as_path
from bnet_transformer.files.checkpoint import CHANGEABLE, NAME, diverged, kept_by, path_of, read
from bnet_transformer.network import Network, network_of
from bnet_transformer.training.captured import recorder_of
from bnet_transformer.training.objective import Loss
from bnet_transformer.training.result import N, Trained
from bnet_transformer.training.run import Recipe, Run, settings_of
from bnet_transformer.training.steps import default_rate
from bnet_transformer.training.task import infer_trainable_task


@with_gradients()
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
    resume: bool | str = False,
    bound: float | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    shard: bool = False,
    compile: bool = False,
    recorded: bool = False,
    progress: bool | None = None,
) -> Trained[N]:
    """A new net, trained on the log probability of its readouts by AdamW; the net that came in stays as it is.

    `data` is a list of sentences or pairs, an array `[sentence, word]`, a pair of arrays, a file of tokens (in windows
    of `words`), or a function from the step to any of these, each a batch as it is (`batch` is not for them). Where
    the readout tells the next word, targets follow from the words, between `start` and `stop` where they are given.
    `loss(module, batch)` replaces the likelihood. `schedule` is "constant", "cosine" or "noam", where `rate` is a
    factor (1 by default). Every `every` steps the `held_out` loss is measured and a checkpoint goes to `folder`;
    `resume` goes on from it, bit for bit, or, if it is "changed", with the rates of this call. After `patience`
    measures without a better one training stops, and the best net is what it gives. A loss above `bound` or not
    finite stops it with an error. Under torchrun each process takes its share of each batch. `compile` has
    torch.compile make code of the net; `recorded` records the work of a step on a GPU once and replays it.

    >>> import bnet_transformer as bt
    >>> net = bt.decoder(8, heads=2, slices=1, vocabulary=["the", "cat", "sat"])
    >>> trained = bt.train(net, ["the cat sat", "sat the cat"], steps=20, rate=0.01, batch=2)
    >>> trained.losses[0] > trained.losses[-1]
    True
    """
    recipe = Recipe(
        batch, smoothing, rate, schedule, warmup, dim, betas, eps, weight_decay, clip, precision, words, seed
    )
    habits = Habits(steps, epochs, every, patience, folder, resume, bound, progress)
    network = network_of(net)
    if loss is not None and not callable(loss):
        raise BNetError("loss", expected="a function loss(module, batch)", got=loss)
    check_has_words(network, "train", "bt.fit")
    reader = ExampleReader(infer_trainable_task(network) if loss is None else infer_task(network), start, stop)
    given = read_dataset(reader, data, batch, seed, words)
    held = None if held_out is None else read_dataset(reader, held_out, batch, seed, words, "held_out")
    ways = Ways(device, shard, compile, recorded)
    return _held_as(net, _trained(network, recipe, habits, given, held, reader, loss, ways))


def kept(net: N, folder: str | Path, *, best: bool = False) -> Trained[N]:
    """What the checkpoint in a folder holds: the net as it was then, or the `best` by its held-out loss; the losses."""
    network, path = network_of(net), as_path(folder)
    one_of("best", best, (True, False))
    found = read(path / NAME if path.is_dir() else path, network)
    parameters = found.part("best" if best else "net")
    if not parameters:
        raise BNetError("best", expected="a checkpoint of a run with patience=", got="one of a run without")
    home = {name: value.to(network.parameters[name].device) for name, value in parameters.items()}
    return _held_as(net, Trained(network.with_parameters(home), found.losses, found.held_out, found.step))


def _held_as(net: N, found: Trained[Network]) -> Trained[N]:
    """The result with its net as the caller holds it."""
    made = found.net if isinstance(net, Network) else cast(Callable[[Network], Any], type(net))(found.net)
    return replace(found, net=made)  # type: ignore[return-value]


def _trained(
    network: Network,
    recipe: Recipe,
    habits: Habits,
    given: Dataset,
    held_out: Dataset | None,
    reader: ExampleReader,
    loss: Loss | None,
    ways: Ways,
) -> Trained[Network]:
    """The steps of a recipe, on the device and in the processes that there are."""
    measured = [] if held_out is None else held_out.in_order()
    habits.check(measured)
    steps = habits.total(given)
    settings = settings_of(recipe, reader, given, held_out, loss, steps)
    place = device_of(ways.device, network)
    with (
        within_memory("train"),
        ranks(place) as here,
        own_random(here.device),
        kept_by(habits.folder, here.first),
    ):
        if here.world > 1:
            first, begun = given(0), habits.folder is not None and path_of(habits.folder).exists()
            told = {**settings, "net": network, "batch": (first.x, first.observed), "checkpoint": begun}
            here.assert_same("train", **told, steps=steps, habits=habits.together, ways=replace(ways, device=None))
        recorder = recorder_of(here.device, here.world) if ways.recorded else None
        with nullcontext() if recorder is None else recorder.stage():
            run = Run(
                reader.task, recipe, steps, here, loss, ways.shard, settings, compile=ways.compile, recorder=recorder
            )
            _follow(run, given, measured, habits, steps)
            found = run.best if habits.patience is not None and run.best else run.parameters()
    home = {name: value.to(network.parameters[name].device) for name, value in found.items()}
    return Trained(network.with_parameters(home), tuple(run.losses), tuple(run.held_out), run.step)


@dataclass(frozen=True)
class Ways:
    """How the steps are worked at, whatever they are."""

    device: str | torch.device | None
    shard: bool
    compile: bool
    recorded: bool

    def __post_init__(self) -> None:
        for what in ("shard", "compile", "recorded"):
            one_of(what, getattr(self, what), (True, False))


@dataclass(frozen=True)
class Habits:
    """What goes on around the steps: how many, what is measured and kept, and when it ends early."""

    steps: int | None
    epochs: int | None
    every: int | None
    patience: int | None
    folder: str | Path | None
    resume: bool | str
    bound: float | None
    progress: bool | None

    def check(self, held_out: list[Batch]) -> None:
        """Refuse what does not go together."""
        one_of("resume", self.resume, (True, False, "changed"))
        one_of("progress", self.progress, (True, False, None))
        if self.every is not None:
            whole("every", self.every)
        if self.patience is not None and whole("patience", self.patience) and not held_out:
            raise BNetError("patience", expected="held_out= data to measure", got="none")
        if self.bound is not None:
            number("bound", self.bound)
        if self.resume and self.folder is None:
            raise BNetError("resume", expected="a folder= with a checkpoint", got="none")

    def total(self, given: Dataset) -> int:
        """How many steps there are in all."""
        if (self.steps is None) == (self.epochs is None):
            got = f"steps={self.steps}, epochs={self.epochs}"
            raise BNetError("steps", expected="steps= or epochs=, one of them", got=got)
        if self.steps is not None:
            return whole("steps", self.steps)
        if given.epoch is None:
            raise BNetError("epochs", expected="steps=, for a function of the step has no end", got=self.epochs)
        return whole("epochs", self.epochs) * given.epoch

    @property
    def together(self) -> tuple[object, ...]:
        """What several processes must have in common, for at a pause they meet."""
        return self.every, self.patience, self.folder is not None, self.resume, self.bound

    def good(self, loss: float, length: float = 0.0) -> bool:
        """True for a loss, with the length of its gradient, that training may go on from."""
        return math.isfinite(loss + length) and (self.bound is None or loss <= self.bound)

    def pauses(self, step: int, steps: int) -> bool:
        """True after the steps at which something is measured and kept: by default ten times, and at the end."""
        return step % (self.every or max(1, steps // 10)) == 0 or step == steps


def _follow(run: Run, given: Dataset, held_out: list[Batch], habits: Habits, steps: int) -> None:
    """The steps that are left."""
    path = None if habits.folder is None else path_of(habits.folder)
    if path is not None and path.exists():
        if not habits.resume:
            allowed = "resume=True, another folder="
            raise FileError(str(path), expected="no checkpoint yet", got="one", allowed=allowed)
        run.restore(path, free=CHANGEABLE if habits.resume == "changed" else ())
        if run.step > steps:
            got, allowed = f"{steps}", "training.kept(net, folder), for the net of the checkpoint"
            raise BNetError("steps", expected=f"at least the {run.step} of {path}", got=got, allowed=allowed)
    run.ranks.barrier()
    hide = True if not run.ranks.first or habits.progress is False else False if habits.progress else None
    bar = tqdm(total=steps, initial=run.step, disable=hide, unit="step", leave=False)
    batch, due, stop = None, False, False  # due: a checkpoint that waits for the next loss of its parameters
    with bar, asked_to_stop() as asked:
        while run.step < steps and not stop and not _tired(run, habits):
            batch = given(run.step)
            run.gradient(run.feed(batch, bool(asked)))
            stop = _listen(run, habits, path, all=path is not None and due)
            if path is not None and due:
                run.save(path)
            run.follow()
            bar.update()
            if not bar.disable and run.losses:
                bar.set_postfix(loss=f"{run.losses[-1]:.4f}", refresh=False)
            stop, due = stop or (run.ranks.world == 1 and bool(asked)), habits.pauses(run.step, steps)
            if held_out and not stop and due:
                _listen(run, habits, path, all=True)
                _measure(run, held_out, keep=habits.patience is not None)
        _listen(run, habits, path, all=True)
        if batch is not None:
            _finish(run, batch, habits, path)
    if stop:
        raise KeyboardInterrupt


def _listen(run: Run, habits: Habits, path: Path | None, *, all: bool = False) -> bool:
    """Hear of the losses that are there, or of `all`; a bad one ends the run. True where some process is to stop."""
    stop = False
    for loss, length, asked in run.heard(all=all):
        if not habits.good(loss, length):
            raise _diverged(run, f"loss {loss:g}, a gradient of length {length:g}", habits, path)
        stop = stop or asked
    return stop


def _finish(run: Run, batch: Batch, habits: Habits, path: Path | None) -> None:
    """Keep the last parameters if they are good: by their loss on the batch that made them, for there is no next."""
    loss = run.evaluate([batch])
    if not habits.good(loss):
        raise _diverged(run, f"loss {loss:g} on the batch of step {run.step}", habits, path)
    if path is not None:
        run.save(path)


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


def _diverged(run: Run, told: str, habits: Habits, path: Path | None) -> BNetError:
    """The error of a loss that is not good, with what is kept and the ways on."""
    wanted = "a finite loss" if habits.bound is None else f"a finite loss of at most {habits.bound:g}"
    rate = f"a rate= below {run.recipe.rate or default_rate(run.recipe.schedule):g}"
    ways = f"{rate}, a longer warmup=, clip=1.0, float32 for bfloat16"
    return diverged(len(run.losses) + 1, wanted, told, ways, path, run.kept)


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
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
