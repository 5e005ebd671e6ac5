"""A seasonal series: forecasters compared with seasonal-naive, and each with an LSTM of at most as many parameters.

    s_t = level + slope t + seasonalities of SEASON, SEASON / 2 and SEASON / 4 words + noise

Seasonal-naive repeats the values of one season earlier, so it has all seasonalities right. The forecasts are for
windows whose future is in the training data of no net.
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
DRAWS, EVERY = 100, 40  # number of draws, for every n-th window, for the 90% band


def sample_series(count: int, length: int, seed: int) -> Tensor:
    """Return series `[series, word]`: a trend, seasonalities of random sizes and phases, noise."""
    generator = torch.Generator().manual_seed(seed)

    def sample_uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=generator)

    t = torch.arange(length)
    angle = 2 * math.pi * t / SEASON
    result = sample_uniform(-2, 2) + sample_uniform(-0.02, 0.02) * t
    for harmonic, maximum in ((1, 1.5), (2, 0.8), (4, 1.0)):
        result = result + sample_uniform(0.2, maximum) * torch.sin(harmonic * angle + sample_uniform(0, 2 * math.pi))
    return result + NOISE * torch.randn(count, length, generator=generator)


def cut_windows(series: Tensor, first: int, last: int, step: int = 1) -> tuple[Tensor, Tensor]:
    """Return windows and their futures, `[window, word, 1]`, with the futures between the words `first` and `last`."""
    starts = range(first - WINDOW, last - WINDOW - AHEAD + 1, step)
    full = torch.stack([series[:, k : k + WINDOW + AHEAD] for k in starts], 1).flatten(0, 1)[..., None]
    return full[:, :WINDOW], full[:, WINDOW:]


@dataclass(frozen=True)
class Standardization:
    """Standardize windows by their own mean and standard deviation, and invert it."""

    mean: Tensor
    spread: Tensor

    @classmethod
    def fit(cls, windows: Tensor) -> Standardization:
        """Return the means and standard deviations of windows."""
        return cls(windows.mean(1, keepdim=True), windows.std(1, keepdim=True))

    def __call__(self, words: Tensor) -> Tensor:
        return (words - self.mean) / self.spread

    def invert(self, words: Tensor) -> Tensor:
        """Return words in their original scale."""
        return words * self.spread + self.mean


@dataclass(frozen=True)
class Forecaster:
    """A net, its training pairs from windows and their futures, its mean forecasts, and samples of them."""

    name: str
    build: Callable[[int], bt.BNet]
    prepare_data: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    forecast: Callable[[bt.BNet, Tensor], Tensor]
    draws: Callable[[bt.BNet, Tensor], Tensor]

    def train(self, windows: Tensor, future: Tensor, seed: int) -> Trained[bt.BNet]:
        """Return the trained net."""
        return bt.train(
            self.build(seed),
            self.prepare_data(windows, future),
            steps=STEPS,
            batch=BATCH,
            optimizer=bt.AdamW(rate=3e-3, schedule="cosine", warmup=100, clip=1.0),
            seed=seed,
        )


def _target_vector(windows: Tensor, future: Tensor) -> tuple[Tensor, Tensor]:
    """Return targets where the future is one vector, the target of the last word."""
    return windows, future[..., 0]


def _target_decoder_words(windows: Tensor, future: Tensor) -> tuple[Tensor, Tensor]:
    """Return targets of teacher forcing: the decoder starts from the last word of the window, its targets are the
    future."""
    return windows, torch.cat([windows[:, -1:], future], 1)


def _target_next_words(windows: Tensor, future: Tensor) -> tuple[Tensor, Tensor]:
    """Return targets where the target of each word is the next word."""
    full = torch.cat([windows, future], 1)
    return full[:, :-1], full[:, 1:]


def _forecast_vector(net: bt.BNet, windows: Tensor) -> Tensor:
    """Return the mean forecast of a net that predicts the future as a vector."""
    with torch.inference_mode():
        result: Tensor = net.module().eval()(windows)
    return result[..., None]


def _sample_vector(net: bt.BNet, windows: Tensor) -> Tensor:
    """Return samples of a net that predicts the future as a vector."""
    mean = _forecast_vector(net, windows)
    generator = torch.Generator().manual_seed(0)
    return mean + net.parameters["y.log_sigma"].exp() * torch.randn(DRAWS, *mean.shape, generator=generator)


def _iterate(net: bt.BNet, windows: Tensor) -> Tensor:
    """Return the mean forecast, word by word."""
    return net.iterate(windows, AHEAD, grow=True)


def _sample_paths(net: bt.BNet, windows: Tensor) -> Tensor:
    """Return samples, word by word."""
    return net.iterate(windows.expand(DRAWS, *windows.shape), AHEAD, grow=True, sample=True)


SIZES = {"heads": 4, "dropout": 0.0, "features": 1, "positions": Sinusoid(32, base=100.0)}
VECTOR = Normal(1.0, dim=AHEAD, learnable=True)
FORECASTERS = (
    Forecaster(
        "encoder, all words at once",
        lambda seed: bt.encoder(32, slices=2, hidden=64, readout=VECTOR, pool="last", seed=seed, **SIZES),
        _target_vector,
        _forecast_vector,
        _sample_vector,
    ),
    Forecaster(
        "encoder-decoder, word by word",
        lambda seed: bt.encoder_decoder(32, slices=1, hidden=48, seed=seed, **SIZES),
        _target_decoder_words,
        _iterate,
        _sample_paths,
    ),
    Forecaster(
        "LSTM, all words at once",
        lambda seed: bt.recurrent(63, features=1, readout=VECTOR, pool="last", seed=seed),
        _target_vector,
        _forecast_vector,
        _sample_vector,
    ),
    Forecaster(
        "LSTM, word by word",
        lambda seed: bt.recurrent(68, features=1, seed=seed),
        _target_next_words,
        _iterate,
        _sample_paths,
    ),
)


def seasonal_series() -> Result:
    """Compare two transformers and two LSTMs with seasonal-naive on held-out windows."""
    series = sample_series(SERIES, LENGTH, seed=1)
    windows, future = cut_windows(series, WINDOW, SPLIT)
    hidden, truth = cut_windows(series, SPLIT, LENGTH, step=8)
    naive = hidden[:, WINDOW - SEASON :][:, :AHEAD]
    unit = (series[:, SEASON:SPLIT] - series[:, : SPLIT - SEASON]).abs().mean()
    (naive_mase, naive_rmse), shown = _compute_errors([naive], truth, unit), {"seasonal-naive": naive}
    rows = [("seasonal-naive", "0", _format_spread(naive_mase), _format_spread(naive_rmse), "", "", "0")]
    scale, test = Standardization.fit(windows), Standardization.fit(hidden)
    for item in FORECASTERS:
        start, forecasts, coverages, size = time.perf_counter(), [], [], 0
        for seed in SEEDS:
            net = item.train(scale(windows), scale(future), seed).net
            mean = item.forecast(net, test(hidden))
            forecasts.append(test.invert(mean))
            coverages.append(_compute_coverage(item.draws(net, test(hidden)[::EVERY]), test(truth)[::EVERY]))
            size = sum(value.numel() for value in net.parameters.values())
        spent = (time.perf_counter() - start) / len(SEEDS)
        mase, rmse = _compute_errors(forecasts, truth, unit)
        below, band = 1 - statistics.mean(mase) / naive_mase[0], statistics.mean(coverages)
        cells = f"{below:.0%}", f"{band:.0%}", f"{spent:.0f}"
        rows.append((item.name, f"{size:,}", _format_spread(mase), _format_spread(rmse), *cells))
        shown[item.name] = forecasts[0]
    figures = {"Held-out windows and their forecasts": plot_windows(hidden, truth, shown)}
    return Result("series", _summarize(len(truth)), HEAD, tuple(rows), figures)


def _summarize(count: int) -> str:
    """Return the text above the table: data, training and metrics."""
    return (
        f"{SERIES} series of {LENGTH} words: level, trend, seasonalities of {SEASON}, {SEASON // 2} and {SEASON // 4} "
        f"words of random size and phase, noise of {NOISE}. Windows of {WINDOW} words, minus their mean and divided by "
        f"their standard deviation; {AHEAD} words are forecast. Training uses words 0 to {SPLIT - 1}; the futures of "
        f"the {count:,} test windows are after these. {STEPS} steps of {BATCH} windows, AdamW, cosine from 0.003 after "
        f"a warm-up of 100, gradients clipped at 1; {len(SEEDS)} seeds: mean (least to greatest). MASE is the mean "
        f"absolute error divided by that of seasonal-naive (one season of {SEASON} words earlier) on words 0 to "
        f"{SPLIT - 1}. "
        "Seconds are for one seed. The target is an error below that of seasonal-naive. The band is between the "
        f"quantiles 5% and 95% of {DRAWS} draws of the net's Normal readout, path by path. A forecast without "
        f"knowledge of the noise cannot have an RMSE below {NOISE}. Each LSTM has at most as many parameters as the "
        "transformer that forecasts in the same way."
    )


def _compute_errors(forecasts: Sequence[Tensor], truth: Tensor, unit: Tensor) -> tuple[list[float], list[float]]:
    """Return MASE and RMSE of each seed."""
    mase = [float((item - truth).abs().mean() / unit) for item in forecasts]
    rmse = [float((item - truth).square().mean().sqrt()) for item in forecasts]
    return mase, rmse


def _format_spread(values: Sequence[float]) -> str:
    """Return the mean with the least and the greatest value."""
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def _compute_coverage(draws: Tensor, truth: Tensor) -> float:
    """Return the fraction of words between the quantiles 5% and 95% of the samples of a net."""
    low, high = torch.quantile(draws, torch.tensor([0.05, 0.95]), 0)
    return float(((low <= truth) & (truth <= high)).float().mean())


def plot_windows(hidden: Tensor, truth: Tensor, forecasts: Mapping[str, Tensor]) -> Any:
    """Plot some held-out windows, their futures, and the forecasts."""
    canvas = Canvas(None, "light", None)
    with plot_rc_context(canvas.rc_params):
        panels = canvas.add_panels(1, SHOWN, 8.5 / SHOWN, 2.0)
        for k, ax in enumerate(panels):
            row = k * len(truth) // SHOWN
            observed = torch.cat([hidden[row, -SEASON:], truth[row]])[:, 0]
            ax.plot(range(-SEASON, AHEAD), observed, color=canvas.colours["prior"], linewidth=2.5, label="the series")
            for (name, words), colour in zip(
                forecasts.items(), (canvas.colours["grey"], *canvas.head_colours), strict=False
            ):
                ax.plot(range(AHEAD), words[row, :, 0], color=colour, linewidth=0.9, label=name)
            canvas.set_panel_title(ax, f"window {row}")
        canvas.add_legend(panels[-1], loc="center left", bbox_to_anchor=(1.02, 0.5))
        return canvas.finish()


EXPERIMENTS: dict[str, Callable[[], Result]] = {"series": seasonal_series}
