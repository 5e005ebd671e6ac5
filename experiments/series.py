"""A seasonal series: forecasters against seasonal-naive, and beside each an LSTM of at most as many parameters.

    s_t = level + slope t + seasonalities of SEASON, SEASON / 2 and SEASON / 4 words + noise

Seasonal-naive says what was seen one season earlier, and so has all seasonalities right. The forecasts are of windows
whose future no net has seen in training.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer.learning.training import Trained
from bnet_transformer.plots.canvas import Canvas, plot_rc_context
from bnet_transformer.tpm import Normal, Sinusoid
from experiments.result import Result

SERIES, LENGTH, SPLIT = 200, 264, 168  # the words from SPLIT on are held out
SEASON, WINDOW, AHEAD, NOISE = 24, 48, 24, 0.4
STEPS, BATCH, SEEDS = 1000, 64, (0, 1)
HEAD = ("forecaster", "parameters", "MASE", "RMSE", "below seasonal-naive", "in their 90% band", "seconds")
SHOWN = 3
DRAWS, EVERY = 100, 40  # draws of the forecasts of every so many windows, for the 90% band


def seasonal(count: int, length: int, seed: int) -> Tensor:
    """Series `[series, word]`: a trend, seasonalities of random sizes and phases, noise."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=generator)

    t = torch.arange(length)
    turn = 2 * math.pi * t / SEASON
    result = drawn(-2, 2) + drawn(-0.02, 0.02) * t
    for harmonic, maximum in ((1, 1.5), (2, 0.8), (4, 1.0)):
        result = result + drawn(0.2, maximum) * torch.sin(harmonic * turn + drawn(0, 2 * math.pi))
    return result + NOISE * torch.randn(count, length, generator=generator)


def cut(series: Tensor, first: int, last: int, step: int = 1) -> tuple[Tensor, Tensor]:
    """Windows and what follows them, `[window, word, 1]`, where what follows lies between two words."""
    starts = range(first - WINDOW, last - WINDOW - AHEAD + 1, step)
    full = torch.stack([series[:, k : k + WINDOW + AHEAD] for k in starts], 1).flatten(0, 1)[..., None]
    return full[:, :WINDOW], full[:, WINDOW:]


@dataclass(frozen=True)
class Scaled:
    """Windows less their mean, over their spread; and back."""

    mean: Tensor
    spread: Tensor

    @classmethod
    def by(cls, windows: Tensor) -> Scaled:
        return cls(windows.mean(1, keepdim=True), windows.std(1, keepdim=True))

    def __call__(self, words: Tensor) -> Tensor:
        return (words - self.mean) / self.spread

    def back(self, words: Tensor) -> Tensor:
        return words * self.spread + self.mean


@dataclass(frozen=True)
class Forecaster:
    """A net, how it is told what follows its windows; its forecasts, their mean and draws of them."""

    name: str
    build: Callable[[int], bt.BNet]
    told: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    forecast: Callable[[bt.BNet, Tensor], Tensor]
    draws: Callable[[bt.BNet, Tensor], Tensor]

    def trained(self, windows: Tensor, future: Tensor, seed: int) -> Trained[bt.BNet]:
        """The net after its steps."""
        return bt.train(
            self.build(seed),
            self.told(windows, future),
            steps=STEPS,
            batch=BATCH,
            optimizer=bt.AdamW(rate=3e-3, schedule="cosine", warmup=100, clip=1.0),
            seed=seed,
        )


def _at_once(windows: Tensor, future: Tensor) -> tuple[Tensor, Tensor]:
    """All that follows is one vector, told by the last word."""
    return windows, future[..., 0]


def _from_the_last(windows: Tensor, future: Tensor) -> tuple[Tensor, Tensor]:
    """The decoder begins with the last word of the window; its outputs are those that follow."""
    return windows, torch.cat([windows[:, -1:], future], 1)


def _word_by_word(windows: Tensor, future: Tensor) -> tuple[Tensor, Tensor]:
    """Each word tells the next."""
    full = torch.cat([windows, future], 1)
    return full[:, :-1], full[:, 1:]


def _read(net: bt.BNet, windows: Tensor) -> Tensor:
    with torch.inference_mode():
        result: Tensor = net.module().eval()(windows)
    return result[..., None]


def _read_draws(net: bt.BNet, windows: Tensor) -> Tensor:
    mean = _read(net, windows)
    generator = torch.Generator().manual_seed(0)
    return mean + net.parameters["y.log_sigma"].exp() * torch.randn(DRAWS, *mean.shape, generator=generator)


def _iterated(net: bt.BNet, windows: Tensor) -> Tensor:
    return net.iterate(windows, AHEAD, grow=True)


def _paths(net: bt.BNet, windows: Tensor) -> Tensor:
    return net.iterate(windows.expand(DRAWS, *windows.shape), AHEAD, grow=True, sample=True)


SIZES = {"heads": 4, "dropout": 0.0, "features": 1, "positions": Sinusoid(32, base=100.0)}
VECTOR = Normal(1.0, dim=AHEAD, learnable=True)
FORECASTERS = (
    Forecaster(
        "encoder, all words at once",
        lambda seed: bt.encoder(32, slices=2, hidden=64, readout=VECTOR, pool="last", seed=seed, **SIZES),
        _at_once,
        _read,
        _read_draws,
    ),
    Forecaster(
        "encoder-decoder, word by word",
        lambda seed: bt.encoder_decoder(32, slices=1, hidden=48, seed=seed, **SIZES),
        _from_the_last,
        _iterated,
        _paths,
    ),
    Forecaster(
        "LSTM, all words at once",
        lambda seed: bt.recurrent(63, features=1, readout=VECTOR, pool="last", seed=seed),
        _at_once,
        _read,
        _read_draws,
    ),
    Forecaster(
        "LSTM, word by word", lambda seed: bt.recurrent(68, features=1, seed=seed), _word_by_word, _iterated, _paths
    ),
)


def seasonal_series() -> Result:
    """Two transformers and two LSTMs on held-out windows, beside seasonal-naive."""
    series = seasonal(SERIES, LENGTH, seed=1)
    windows, future = cut(series, WINDOW, SPLIT)
    hidden, truth = cut(series, SPLIT, LENGTH, step=8)
    naive = hidden[:, WINDOW - SEASON :][:, :AHEAD]
    unit = (series[:, SEASON:SPLIT] - series[:, : SPLIT - SEASON]).abs().mean()
    (usual, squared), shown = _errors([naive], truth, unit), {"seasonal-naive": naive}
    rows = [("seasonal-naive", "0", _spread(usual), _spread(squared), "", "", "0")]
    scale, test = Scaled.by(windows), Scaled.by(hidden)
    for item in FORECASTERS:
        begun, created, inside, size = time.perf_counter(), [], [], 0
        for seed in SEEDS:
            net = item.trained(scale(windows), scale(future), seed).net
            mean = item.forecast(net, test(hidden))
            created.append(test.back(mean))
            inside.append(_inside(item.draws(net, test(hidden)[::EVERY]), test(truth)[::EVERY]))
            size = sum(value.numel() for value in net.parameters.values())
        spent = (time.perf_counter() - begun) / len(SEEDS)
        mase, rmse = _errors(created, truth, unit)
        below, band = 1 - statistics.mean(mase) / usual[0], statistics.mean(inside)
        given = f"{below:.0%}", f"{band:.0%}", f"{spent:.0f}"
        rows.append((item.name, f"{size:,}", _spread(mase), _spread(rmse), *given))
        shown[item.name] = created[0]
    figures = {"Held-out windows and their forecasts": shown_windows(hidden, truth, shown)}
    return Result("series", _told(len(truth)), HEAD, tuple(rows), figures)


def _told(query: int) -> str:
    """What was done."""
    return (
        f"{SERIES} series of {LENGTH} words: level, trend, seasonalities of {SEASON}, {SEASON // 2} and {SEASON // 4} "
        f"words of random size and phase, noise of {NOISE}. Windows of {WINDOW} words, less their mean and over their "
        f"spread; {AHEAD} words are forecast. Training knows words 0 to {SPLIT - 1}; the {query:,} windows that are "
        f"asked have their future behind these. {STEPS} steps of {BATCH} windows, AdamW, cosine from 0.003 after a "
        f"warm-up of 100, gradients clipped at 1; {len(SEEDS)} seeds: mean (least to greatest). MASE is the mean "
        f"absolute error over that of seasonal-naive (one season of {SEASON} words earlier) on words 0 to {SPLIT - 1}. "
        "Seconds are of one seed. The target is an error below that of seasonal-naive. The band is that between the "
        f"quantiles 5% and 95% of {DRAWS} draws of the net's own Normal readout, path by path. Nothing that does not "
        f"know the noise can come below an RMSE of {NOISE}. Each LSTM has at most as many parameters as the "
        "transformer that forecasts in the same way."
    )


def _errors(created: Sequence[Tensor], truth: Tensor, unit: Tensor) -> tuple[list[float], list[float]]:
    """MASE and RMSE of each seed."""
    mase = [float((item - truth).abs().mean() / unit) for item in created]
    rmse = [float((item - truth).square().mean().sqrt()) for item in created]
    return mase, rmse


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def _inside(draws: Tensor, truth: Tensor) -> float:
    """The share of words between the quantiles 5% and 95% of what a net draws."""
    low, high = torch.quantile(draws, torch.tensor([0.05, 0.95]), 0)
    return float(((low <= truth) & (truth <= high)).float().mean())


def shown_windows(hidden: Tensor, truth: Tensor, created: Mapping[str, Tensor]) -> Any:
    """Some held-out windows, what followed, and what the nets said."""
    canvas = Canvas(None, "light", None)
    with plot_rc_context(canvas.colours["ink"]):
        panels = canvas.add_panels(1, SHOWN, 10.5, 2.6)
        for k, ax in enumerate(panels):
            row = k * len(truth) // SHOWN
            observed = torch.cat([hidden[row, -SEASON:], truth[row]])[:, 0]
            ax.plot(range(-SEASON, AHEAD), observed, color=canvas.colours["prior"], linewidth=2.5, label="the series")
            for (name, words), colour in zip(
                created.items(), (canvas.colours["grey"], *canvas.head_colours), strict=False
            ):
                ax.plot(range(AHEAD), words[row, :, 0], color=colour, linewidth=0.9, label=name)
            canvas.set_panel_title(ax, f"window {row}")
        canvas.add_legend(panels[-1], loc="center left", bbox_to_anchor=(1.02, 0.5))
        return canvas.finish()


EXPERIMENTS: dict[str, Callable[[], Result]] = {"series": seasonal_series}
