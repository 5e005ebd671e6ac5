"""Which heads matter: a cell for each head of each slice, intervals by rank, and what it costs to shut heads off."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, SymmetricalLogLocator

from bnet_transformer.errors import one_of, whole
from bnet_transformer.inference.heads.gates import Damage, Inclusion
from bnet_transformer.viz.plots.canvas import PAGE, SMALL, Canvas, scaled
from bnet_transformer.viz.plots.heat import Map, heat_map, room, shared_limits
from bnet_transformer.viz.plots.table import Numbers, numbers_of

MAPS = {
    "rho": "share of sentences, rho",
    "log_bayes": "log Bayes factor, nats",
    "importance": "gradient importance, nats",
    "ablation": "ablation, nats",
}
TITLES = {
    "rho": "Where heads are in",
    "log_bayes": "Heads in some sentences against none",
    "importance": "Gradient importance of heads",
    "ablation": "One head off",
}
SHOWN = (*MAPS, "intervals")
ERRORS = {"log_bayes": "error", "importance": "importance_error", "ablation": "ablation_error"}
STEEP = 50.0  # times a middling number: past it colours and axes go by powers of ten
LINES = (("accent", "-", "o"), ("second", "--", "s"), ("v", ":", "^"))


def inclusion(result: Inclusion, canvas: Canvas, *, show: str = "rho", top: int = 20) -> None:
    """A cell for each head: `rho` with its interval, the log Bayes factor, the importance or the ablation with errors;
    or `show="intervals"`: the `top` heads by rank, `rho` with its interval beside the log Bayes factor."""
    one_of("show", show, SHOWN)
    whole("top", top)
    s = "s" * (result.sentences != 1)
    said = f"by {result.sentences:,} sentence{s}"
    if show == "intervals":
        canvas.headline(f"Heads that matter, {said}", _forest(result, canvas, top))
    else:
        canvas.headline(f"{TITLES[show]}, {said}", _map(result, canvas, show))
    sigma = "" if result.sigma is None else f", sigma {result.sigma:.3g}"
    canvas.note(f"{result.likelihood}{sigma}; {result.method}.")


def _map(result: Inclusion, canvas: Canvas, show: str) -> Axes:
    """One measure, slice by head."""
    values = numbers_of(show, result.mean if show == "rho" else getattr(result, show))
    error = None if show == "rho" else numbers_of("errors", getattr(result, ERRORS[show]))
    heads = tuple(map(str, range(values.shape[1])))
    found = Map(values, result.slices, heads, error=np.zeros_like(values) if error is None else error)

    def write(ax: Axes, image: Any, wide: float, high: float) -> None:
        if wide >= 0.27 and high >= 0.16:
            _numbers(canvas, ax, image, values, error, high >= 0.3)
        if show == "rho" and high >= 0.3:
            _ranges(canvas, ax, image, result)

    norm = Normalize(0.0, 1.0) if show == "rho" else steep(values)
    ax = heat_map(canvas, found, what=MAPS[show], x="head", y="", norm=norm, write=write)
    if isinstance(norm, SymLogNorm):
        _powers(ax.child_axes[-1], norm)
    _dead(result, canvas, ax, values, norm)
    if any(line.get_label() == "interval" for line in ax.collections):
        canvas.note(f"Beneath each mean its interval of {result.interval:.0%}, from 0 (left) to 1.")
    if any("±" in text.get_text() for text in ax.texts):
        kind = "Monte Carlo error" if show == "log_bayes" else "standard error over the sentences"
        canvas.note(f"±: {kind}.")
    return ax


def steep(values: Numbers) -> Normalize:
    """A scale of colours from 0; by powers of ten where a few numbers are far above the others."""
    sizes = np.abs(values[np.isfinite(values)])
    most, middle = float(sizes.max(initial=0.0)), float(np.median(sizes)) if len(sizes) else 0.0
    low, high = shared_limits([values])
    if middle <= 0 or most < STEEP * middle:
        return scaled(low, high)
    return SymLogNorm(10.0 ** math.floor(math.log10(middle)), vmin=low, vmax=high, base=10)


def _powers(bar: Any, norm: Any) -> None:
    """Marks of a scale by powers of ten."""
    powers = [norm.linthresh * 10**k for k in range(int(math.log10(norm.vmax / norm.linthresh)) + 1)]
    every = [*(-p for p in reversed(powers) if norm.vmin <= -p), 0.0, *powers]
    bar.set_yticks(every, labels=[brief(each) for each in every])
    bar.minorticks_off()


def brief(value: float) -> str:
    """A number in few letters.

    >>> brief(0.934), brief(1.0), brief(-2.5), brief(26.05), brief(1234.5), brief(2.5e6)
    ('.93', '1.00', '−2.5', '26', '1234', '2e6')
    """
    size = abs(value)
    if size < 0.005:
        return "0"
    told = f"{size:.2f}".lstrip("0") if size < 1.995 else f"{size:.1f}" if size < 9.95 else f"{size:.0f}"
    if size >= 99999.5:
        told = f"{size:.0e}".replace("e+0", "e").replace("e+", "e")
    return ("−" if value < 0 else "") + told


def _numbers(canvas: Canvas, ax: Axes, image: Any, values: Numbers, error: Numbers | None, two: bool) -> None:
    """The number of each cell, its error beneath it where there is room for `two` lines."""
    for (i, j), value in np.ndenumerate(values):
        style: Any = {"ha": "center", "va": "center_baseline", "color": canvas.contrast(image.cmap(image.norm(value)))}
        canvas.write(ax, j, i - (0.16 if two else 0), brief(value), fontsize=6.5, **style)
        if two and error is not None and error[i, j] >= 0.005:
            canvas.write(ax, j, i + 0.24, f"±{brief(float(error[i, j]))}", fontsize=5.2, **style)


def _ranges(canvas: Canvas, ax: Axes, image: Any, result: Inclusion) -> None:
    """In each cell the interval of rho, from 0 at the left to 1 at the right, a dot for the mean."""
    low, mean, high = (numbers_of("rho", each) for each in (result.low, result.mean, result.high))
    tracks, lines, dots, colours = [], [], [], []
    for (i, j), value in np.ndenumerate(mean):
        at = i + 0.26
        tracks.append([(j - 0.4, at), (j + 0.4, at)])
        lines.append([(j - 0.4 + 0.8 * low[i, j], at), (j - 0.4 + 0.8 * high[i, j], at)])
        dots.append((j - 0.4 + 0.8 * value, at))
        colours.append(canvas.contrast(image.cmap(image.norm(value))))
    ax.add_collection(LineCollection(tracks, colors=colours, linewidths=0.4, alpha=0.5, label="from 0 to 1"))
    ax.add_collection(LineCollection(lines, colors=colours, linewidths=1.3, label="interval"))
    x, y = np.array(dots).T
    ax.scatter(x, y, s=7, c=colours, linewidths=0, zorder=3)


def _dead(result: Inclusion, canvas: Canvas, ax: Axes, values: Numbers, norm: Normalize) -> None:
    """A dashed frame around heads on which nothing hangs."""
    colours = canvas.diverging() if norm.vmin is not None and norm.vmin < 0 else canvas.sequential()
    for i, j in result.dead:
        edge = canvas.contrast(colours(norm(values[i, j])))
        style: Any = {"edgecolor": edge, "linestyle": (0, (3, 2)), "linewidth": 1.1, "fill": False}
        ax.add_patch(Rectangle((j - 0.45, i - 0.45), 0.9, 0.9, gid=f"dead_{i}_{j}", **style))
    canvas.note("Dashed frame: nothing hangs on this head." if result.dead else "")


def _forest(result: Inclusion, canvas: Canvas, top: int) -> Axes:
    """The heads by rank, each with the interval of its rho, the prior's mean as a line, the log Bayes factor beside."""
    order = result.log_bayes.flatten().argsort(descending=True, stable=True)[:top]
    slices, heads = result.log_bayes.shape
    names = [f"{result.slices[k // heads]}_{k % heads}_*" for k in order.tolist()]
    low, mean, high, log, error = (
        numbers_of("rho", each.flatten()[order])
        for each in (result.low, result.mean, result.high, result.log_bayes, result.error)
    )
    long = max(1.0, 0.19 * len(names))
    ax = canvas.axes(min(PAGE, 4.6 + room(names)), long + 0.8)
    if canvas.given is not None:
        long = canvas.size(ax)[1]
    at = np.arange(len(names))
    colour = canvas.colours["accent"]
    ax.axvline(0.5, color=canvas.colours["grey"], linewidth=0.8, linestyle=(0, (4, 3)), label="mean of the prior")
    ax.hlines(at, low, high, color=colour, linewidth=1.5, label="interval")
    ax.plot(mean, at, linestyle="", marker="o", markersize=4.2, color=colour, label="mean")
    step = max(1, math.ceil(1.2 * 6.0 * len(names) / (72 * long)))
    for k in range(0, len(names), step):
        spread = f" ±{brief(error[k])}" if error[k] >= 0.005 else ""
        style: Any = {"ha": "left", "va": "center_baseline", "fontsize": 6.5, "clip_on": False}
        canvas.write(ax, 1.04, at[k], f"{brief(log[k])}{spread}", color=canvas.colours["grey"], **style)
    ax.set_xlim(0.0, 1.02)
    ax.set_ylim(len(names) - 0.4, -0.6)
    canvas.words(ax, "y", names, long)
    canvas.named(ax, f"rho, with its interval of {result.interval:.0%}; log Bayes factor at the right")
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color=canvas.colours["line"], linewidth=0.5)
    ax.set_axisbelow(True)
    canvas.note("Dashed: the mean of rho before any sentence is seen.")
    every = slices * heads
    canvas.note(f"The {len(names)} of the greatest log Bayes factor, of {every:,} heads." if len(names) < every else "")
    return ax


def damage(result: Damage, canvas: Canvas, *, log: bool | None = None) -> None:
    """What sentences lose with so many heads off: a line for each measure by which heads are chosen, with a band of a
    standard error to each side. `log` asks for an axis by powers of ten; by default losses that are far apart have it.
    """
    one_of("log", log, (None, True, False))
    measures, counts = (result.labels[axis] for axis in result.axes)
    x = np.array([int(count) for count in counts])
    values, errors = numbers_of("loss", result.values), numbers_of("errors", result.error)
    ax = canvas.axes(4.8, 2.8)
    marks = max(1, len(x) // 10)
    for k, (measure, (colour, line, marker)) in enumerate(zip(measures, LINES, strict=True)):
        tint = canvas.colours[colour]
        every = (k * marks // len(measures), marks)
        style: Any = {"linestyle": line, "marker": marker, "markevery": every, "markersize": 4, "linewidth": 1.3}
        ax.plot(x, values[k], color=tint, label=measure, zorder=3, **style)
        if not np.isnan(errors[k]).all():
            ax.fill_between(x, values[k] - errors[k], values[k] + errors[k], color=tint, alpha=0.16, linewidth=0)
    sizes = np.abs(values[values != 0])
    least, most = (float(f(sizes)) for f in (np.min, np.max)) if len(sizes) else (1.0, 1.0)
    if most > STEEP * float(np.median(sizes) if len(sizes) else 1.0) if log is None else log:
        _by_powers(ax, max(least, most * 1e-4))
    canvas.named(ax, "heads off, those held least of first", "nats that a sentence loses")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.grid(axis="y", color=canvas.colours["line"], linewidth=0.5)
    ax.set_axisbelow(True)
    ax.margins(x=0.02)
    canvas.legend(ax, loc="upper left", title="heads chosen by", title_fontsize=SMALL)
    s = "s" * (result.sentences != 1)
    canvas.headline(f"What heads are worth to {result.sentences:,} sentence{s}", ax)
    canvas.note("Bands: a standard error over the sentences to each side." if not np.isnan(errors).all() else "")


def _by_powers(ax: Axes, least: float) -> None:
    """An axis by powers of ten, even around zero up to that of the `least`."""
    even = 10.0 ** math.floor(math.log10(least))
    ax.set_yscale("symlog", linthresh=even)
    ax.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=even))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
