"""The rigid body: three nets learn its free rotation from windows of three words, and continue from their own words.

    dz_1/dt = z_2 z_3 / 2     dz_2/dt = - z_3 z_1     dz_3/dt = z_1 z_2 / 2

`|z|^2` and the energy `z_2^2 / 4 + z_3^2 / 2` are constant. The implicit midpoint rule, which generates the data,
conserves both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import bnet_transformer as bt
from bnet_transformer.generation.forecast import windows
from bnet_transformer.plots.canvas import Canvas, plot_rc_context
from bnet_transformer.tpm import Normal
from experiments.result import Result

RATES = (0.5, -1.0, 0.5)
STEP = 0.2
POINTS = 101
LONG = 500  # words of a rollout, up to t = 100
SHOWN = 1.1  # start angle of the orbits of the figure
SIGMA = 0.01  # of the readout; fixed, so the likelihood is the squared error
RATE = 0.02
VIEW = (
    (-0.5, 0.866, 0.0),
    (-0.259, -0.15, 0.954),
    (0.826, 0.477, 0.3),
)  # the axes of the projection: right, up, towards the viewer


def create_starts(shift: float = 0.0) -> Tensor:
    """Return the starts `(sin a, 0, cos a)` and `(0, sin a, cos a)`, a = 0.1, 0.11, ..., 6.28: `[1238, 3]`."""
    a = 0.1 + 0.01 * torch.arange(619, dtype=torch.float64) + shift
    return create_axis_starts(a)


def create_axis_starts(a: Tensor) -> Tensor:
    """Return both initial conditions of each angle."""
    none = torch.zeros_like(a)
    return torch.cat([torch.stack([a.sin(), none, a.cos()], -1), torch.stack([none, a.sin(), a.cos()], -1)])


def field(z: Tensor) -> Tensor:
    """Return the rate of change, `dz/dt`."""
    return z.new_tensor(RATES) * z.roll(-1, -1) * z.roll(-2, -1)


def energy(z: Tensor) -> Tensor:
    """Return the kinetic energy, which is conserved, as the length is."""
    return z[..., 1].square() / 4 + z[..., 2].square() / 2


def step_midpoint(z: Tensor) -> Tensor:
    """Compute a step of the implicit midpoint rule, `z' = z + h f((z + z') / 2)`, by fixed-point iteration."""
    after = z
    for _ in range(100):
        before, after = after, z + STEP * field((z + after) / 2)
        if float((after - before).abs().max()) <= 1e-16:
            return after
    if float((after - before).abs().max()) > 1e-14:  # pragma: no cover: the map contracts, by 0.2 at |z| = 1
        raise ArithmeticError("the midpoint rule was not solved")
    return after


def integrate_orbits(z: Tensor, points: int = POINTS) -> Tensor:
    """Return the orbit from each start, which is its first point: `[start, point, 3]`."""
    states = [z]
    for _ in range(points - 1):
        states.append(step_midpoint(states[-1]))
    return torch.stack(states, -2)


@dataclass(frozen=True)
class Trial:
    """A net, its windows and its training; the relative error that it must reach."""

    name: str
    net: bt.BNet
    words: int
    batch: int
    steps: int
    target: float


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial: the trained net in float64, and its rollouts from the first words of every start."""

    trial: Trial
    net: bt.BNet
    spent: float
    rollout: Tensor

    def format_row(self, series: Tensor, hidden: Tensor) -> tuple[str, ...]:
        """Return the row of the table."""
        words, error = self.trial.words, relative_error
        size = sum(value.numel() for name, value in self.net.parameters.items() if name != "y.log_sigma")
        drifts = drift(self.rollout)
        rollout_error = (self.rollout[:, POINTS - 1] - series[:, POINTS - 1]).norm() / series[:, POINTS - 1].norm()
        return (
            self.trial.name,
            str(size),
            f"{error(self.net, series, words):.2e}",
            f"{self.trial.target:.1e}",
            f"{error(self.net, hidden, words):.2e}",
            f"{rollout_error:.2e}",
            f"{drifts[POINTS - 1]:.1e}",
            f"{drifts[-1]:.1e}",
            str(self.trial.steps),
            f"{self.spent:.0f}",
        )


def create_trials() -> tuple[Trial, ...]:
    """Return the three nets: 3 units (L) and 2 blocks (n_blocks); the feed-forward net has the 6 blocks, and no
    attention."""
    readout = Normal(SIGMA)
    standard = bt.geometric(3, slices=3, blocks=2, heads=1, observe=readout)
    volume = bt.volume_preserving(3, slices=3, blocks=2, spread=0.3, observe=readout)
    single = bt.volume_preserving(3, slices=1, blocks=6, attention=None, spread=0.3, observe=readout)
    return (
        Trial("standard", standard, 3, 512, 16000, 4.6e-2),
        Trial("volume-preserving", volume, 3, 512, 10000, 5e-3),
        Trial("feed-forward", single, 1, 1024, 8000, 4e-3),
    )


def relative_error(net: bt.BNet, series: Tensor, words: int) -> float:
    """Return `|predicted - true| / |true|` over all windows of a series; each predicts as many words as it contains."""
    x, y = windows(series, words, ahead=words)
    with torch.no_grad():
        predicted = net.module()(x)
    assert isinstance(predicted, Tensor)
    return float((predicted - y).norm() / y.norm())


def drift(z: Tensor) -> Tensor:
    """Return the distance of `|z|^2` from 1 at each point, as a mean over the starts."""
    return (z.square().sum(-1) - 1).abs().mean(0)


def run_trial(trial: Trial, series: Tensor) -> TrialResult:
    """Train a net on the windows of the series, and continue from the first window of each."""
    start = time.perf_counter()
    data = windows(series.float(), trial.words, ahead=trial.words)
    result = bt.train(
        trial.net, data, steps=trial.steps, batch=trial.batch, optimizer=bt.AdamW(rate=RATE, schedule="cosine")
    )
    spent = time.perf_counter() - start
    net, first = result.net.to(torch.float64), series[:, : trial.words]
    further = net.iterate(first, LONG + 1 - trial.words, ahead=trial.words)
    return TrialResult(trial, net, spent, torch.cat([first, further], 1))


def rigid_body() -> Result:
    """Train the three nets, and compare them with their targets."""
    series, hidden = integrate_orbits(create_starts()), integrate_orbits(create_starts(shift=0.005))
    result = [run_trial(trial, series) for trial in create_trials()]
    summary = (
        "Free rotation, `(A, B, C) = (1/2, -1, 1/2)`: 1238 orbits of 101 points, by the implicit midpoint rule with "
        "step 0.2. A transformer reads 3 words and predicts the next 3, the feed-forward net reads 1 and predicts the "
        f"next. AdamW on the squared error in float32, rate {RATE} with a cosine schedule, batches of 512 windows "
        "(feed-forward: 1024). The relative error is over all windows of the data, with true inputs; *unseen* is "
        "the same for orbits with start angles halfway between. In a rollout a net reads the data only at its start, "
        "then its own words: *apart* is the relative error at t = 20, and the drift of `|z|^2` is a mean over all "
        f"{len(series)} rollouts. The implicit midpoint rule drifts only by rounding. The number of steps of each net "
        "was increased, with one seed, until its error on these windows was below the target. The margin of the "
        "standard net is small: its error levels off close to the target, and shorter training ended just above it."
    )
    figures = {"Orbits on the sphere": plot_orbits(result), "The drift of the squared length": plot_drift(result)}
    return Result("rigid body", summary, HEAD, tuple(item.format_row(series, hidden) for item in result), figures)


def plot_orbits(result: Sequence[TrialResult]) -> Any:
    """Plot the orbits of two starts on the sphere, up to t = 100: the midpoint rule, and over it each net."""
    true = integrate_orbits(create_axis_starts(torch.tensor([SHOWN], dtype=torch.float64)), LONG + 1)
    canvas = Canvas(None, "light", None)
    with plot_rc_context(canvas.rc_params):
        for ax, item in zip(canvas.add_panels(1, len(result), 7.0 / len(result), 2.2), result, strict=True):
            words = item.trial.words
            further = item.net.iterate(true[:, :words], LONG + 1 - words, ahead=words)
            _plot_sphere(canvas, ax)
            for orbit, rollout in zip(true, torch.cat([true[:, :words], further], 1), strict=True):
                _plot_orbit(ax, orbit, color=canvas.colours["prior"], linewidth=3.0)
                _plot_orbit(ax, rollout, color=canvas.colours["accent"], linewidth=0.8)
            canvas.set_panel_title(ax, item.trial.name)
        canvas.set_title("Rollouts up to t = 100 (blue) and the implicit midpoint rule (grey), on the unit sphere")
        return canvas.finish()


def plot_drift(result: Sequence[TrialResult]) -> Any:
    """Plot the distance of `|z|^2` from 1 along the rollouts, as a mean over all starts."""
    canvas = Canvas(None, "light", None)
    with plot_rc_context(canvas.rc_params):
        ax = canvas.add_axes(4.6, 2.3)
        for item, colour, dash in zip(result, canvas.head_colours, ("-", "--", ":"), strict=False):
            off = drift(item.rollout).clamp(min=1e-16)
            ax.semilogy(STEP * torch.arange(len(off)), off, color=colour, linestyle=dash, label=item.trial.name)
        ax.set_ylim(1e-3, None)
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.grid(axis="y", color=canvas.colours["line"], linewidth=0.5)
        canvas.set_axis_labels(ax, "t", "distance of |z|\u00b2 from 1")
        canvas.add_legend(ax, loc="best")
        return canvas.finish()


def _plot_sphere(canvas: Canvas, ax: Any) -> None:
    """Plot the unit sphere: its outline and some circles."""
    angle = torch.linspace(0, 2 * math.pi, 181, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin(), torch.zeros_like(angle)], -1)
    for k in range(3):
        _plot_orbit(ax, circle.roll(k, -1), color=canvas.colours["line"], linewidth=0.7)
    ax.plot(angle.cos(), angle.sin(), color=canvas.colours["grey"], linewidth=0.8)
    ax.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)


def _plot_orbit(ax: Any, z: Tensor, **style: Any) -> None:
    """Plot a line on the sphere in projection; the far side is pale."""
    x, y, depth = (z @ z.new_tensor(VIEW).T).unbind(-1)
    is_behind = depth < 0
    ax.plot(x.masked_fill(is_behind, math.nan), y.masked_fill(is_behind, math.nan), **style)
    ax.plot(x.masked_fill(~is_behind, math.nan), y.masked_fill(~is_behind, math.nan), **style, alpha=0.3)


HEAD = (
    "net",
    "parameters",
    "relative error",
    "target, at most",
    "unseen",
    "apart, t = 20",
    "drift, t = 20",
    "drift, t = 100",
    "steps",
    "seconds",
)
EXPERIMENTS: dict[str, Callable[[], Result]] = {"rigid_body": rigid_body}
