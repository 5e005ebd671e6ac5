"""The vanilla transformer on small tasks: copying, reversing, sorting, dates; and one head compared with four."""

from __future__ import annotations

import datetime
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer.generation.generate import Generated
from experiments.result import Result

TEST_SEED = 20_000_003  # the seed of the test set; training steps use the seeds 0, 1, 2, ...
COUNT = 1000

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
START, STOP = "<", ">"
FIRST = datetime.date(1900, 1, 1).toordinal()
LAST = datetime.date(2099, 12, 31).toordinal()


Task = Callable[..., tuple[Tensor, Tensor]]


def _make_task(change: Callable[[Tensor], Tensor]) -> Task:
    """Return a task that changes a source: it draws sources `[count, length]` of ids from 1, and targets, which start
    with 0."""

    def sample(count: int, *, length: int = 10, symbols: int = 11, seed: int = 0) -> tuple[Tensor, Tensor]:
        source = torch.randint(1, symbols, (count, length), generator=torch.Generator().manual_seed(seed))
        return source, torch.cat([torch.zeros_like(source[:, :1]), change(source)], 1)

    return sample


COPY, REVERSE, SORT = (_make_task(lambda x: x), _make_task(lambda x: x.flip(1)), _make_task(lambda x: x.sort(1).values))


def copying() -> Result:
    """Run the copy task of the Annotated Transformer."""
    return _run_symbols("copy", COPY, 2500, 0.3)


def reversing() -> Result:
    """Run the task of reversing the source."""
    return _run_symbols("reverse", REVERSE, 1500, 0.5)


def sorting() -> Result:
    """Run the task of sorting the source."""
    return _run_symbols("sort", SORT, 2500, 0.3)


def _run_symbols(name: str, task: Task, steps: int, rate: float) -> Result:
    """Train the vanilla transformer on a task of symbols, and test it."""
    net = bt.encoder_decoder(64, heads=4, slices=2, hidden=256, vocabulary=11, dropout=0.1)
    start = time.perf_counter()
    result = bt.train(
        net,
        lambda step: task(80, seed=step),
        steps=steps,
        batch=80,
        optimizer=bt.AdamW(schedule="noam", warmup=400, rate=rate),
    )
    spent = time.perf_counter() - start
    source, target = task(COUNT, seed=TEST_SEED)
    generated = result.net.generate(source, length=target.shape[1] - 1, start=0)
    summary = (
        f"11 symbols (one of them the start word), length 10, 2 slices, 64 wide, 4 heads, feed-forward 256, dropout "
        f"0.1, Noam with warm-up 400 and factor {rate}, {steps} steps of 80 new sentences. Exact: all 10 words of the "
        f"greedy output are correct, for {COUNT} sentences of another seed."
    )
    return Result(name, summary, HEAD, (_format_row(result, spent, _count_exact(generated, target[:, 1:].tolist())),))


def sample_days(count: int, *, seed: int) -> list[tuple[list[str], list[str]]]:
    """Return days from 1900 to 2099 in common notations, and as `YYYY-MM-DD`; both as lists of letters.

    >>> source, target = sample_days(6, seed=3)[5]
    >>> "".join(source), "".join(target)
    ('Thu 22 Sep 1904', '1904-09-22')
    """
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        day = datetime.date.fromordinal(rng.randint(FIRST, LAST))
        result.append((list(_format_day(day, rng.randrange(6))), list(day.isoformat())))
    return result


def list_letters() -> list[str]:
    """Return the letters of all dates, after the words that start and stop a target."""
    used = {letter for word in (*MONTHS, *DAYS, "0123456789 -,./") for letter in word}
    return [START, STOP, *sorted(used)]


def _format_day(day: datetime.date, form: int) -> str:
    """Return a day in one of the notations."""
    month, name, d, y = MONTHS[day.month - 1], DAYS[day.weekday()], day.day, day.year
    return (
        f"{d} {month} {y}",
        f"{month} {d}, {y}",
        f"{name} {d} {month} {y}",
        f"{name[:3]} {d} {month[:3]} {y}",
        f"{d:02}/{day.month:02}/{y}",
        f"{d}.{day.month}.{y}",
    )[form]


def dates() -> Result:
    """Translate common notations of dates to YYYY-MM-DD, letter by letter."""
    net = bt.encoder_decoder(64, heads=4, slices=2, hidden=256, vocabulary=list_letters(), dropout=0.0)
    start = time.perf_counter()
    result = bt.train(
        net,
        lambda step: sample_days(64, seed=step),
        steps=1500,
        batch=64,
        optimizer=bt.AdamW(rate=3e-3, schedule="cosine", warmup=100, clip=1.0),
        start=START,
        stop=STOP,
    )
    spent = time.perf_counter() - start
    pairs = sample_days(COUNT, seed=TEST_SEED)
    generated = result.net.generate([source for source, _ in pairs], length=12, start=START, stop=STOP)
    exact = sum("".join(words) == "".join(target) for words, (_, target) in zip(generated.words, pairs, strict=True))
    summary = (
        "Six notations of a day from 1900 to 2099 (`Sun 18 Apr 1971`, `April 21, 2095`, `25/05/1985`, ...), read "
        "and written letter by letter. 2 slices, 64 wide, 4 heads, feed-forward 256, no dropout, 1500 steps of 64 new "
        f"days, cosine from 0.003 after a warm-up of 100, gradients clipped at 1. Exact: the greedy output is the "
        f"date, for {COUNT} days of another seed."
    )
    return Result("dates", summary, HEAD, (_format_row(result, spent, exact),))


def heads(seeds: Sequence[int] = range(20)) -> Result:
    """Test the chapter's remark that heads improve stability: the spread of the final loss, one head and four."""
    rows = []
    for count in (1, 4):
        finals = [_train_final_loss(count, seed) for seed in seeds]
        spread = f"{statistics.stdev(finals):.4f}"
        rows.append(
            (
                str(count),
                f"{statistics.mean(finals):.4f}",
                f"{statistics.median(finals):.4f}",
                spread,
                f"{min(finals):.4f} to {max(finals):.4f}",
            )
        )
    summary = (
        f"Sorting 8 of 10 symbols, 1 slice, 32 wide for any number of heads, feed-forward 128, no dropout, rate "
        f"0.003, 300 steps of 32 new sentences; {len(seeds)} seeds, each with its own initial parameters and "
        "sentences. The final loss is the mean of the last 20 steps, in nats per word."
    )
    return Result("heads", summary, ("heads", "mean", "median", "standard deviation", "least to greatest"), tuple(rows))


def _train_final_loss(count: int, seed: int) -> float:
    """Return the final loss of one seed with this number of heads."""
    net = bt.encoder_decoder(32, heads=count, slices=1, hidden=128, vocabulary=11, dropout=0.0, seed=seed)
    result = bt.train(
        net,
        lambda step: SORT(32, length=8, seed=1000 * seed + step),
        steps=300,
        batch=32,
        optimizer=bt.AdamW(rate=3e-3),
        seed=seed,
    )
    return statistics.mean(result.losses[-20:])


HEAD = ("final loss", "exact", "share", "steps", "parameters", "seconds")


def _format_row(result: Any, spent: float, exact: int) -> tuple[str, ...]:
    """Return the row of the table."""
    final = statistics.mean(result.losses[-20:])
    size = sum(value.numel() for value in result.net.parameters.values())
    share = f"{100 * exact / COUNT:.1f}%"
    return f"{final:.4f}", f"{exact} of {COUNT}", share, str(result.steps), f"{size:,}", f"{spent:.0f}"


def _count_exact(generated: Generated, targets: list[list[int]]) -> int:
    """Return the number of outputs that equal their targets."""
    return sum(list(row) == target for row, target in zip(generated.ids, targets, strict=True))


EXPERIMENTS: dict[str, Callable[[], Result]] = {
    "copy": copying,
    "reverse": reversing,
    "sort": sorting,
    "dates": dates,
    "heads": heads,
}
