"""Plots of the heads of a net: their importance, the loss without some of them, and their roles.

The importance of heads is drawn as a heat map with a cell for each head of each slice, or as intervals by rank. The
role of a head is a sign in its cell; the colour of the cell is more intense if its attention is farther from chance.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize, SymLogNorm, to_rgb
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, SymmetricalLogLocator

from bnet_transformer._core.arrays import FloatArray, to_numpy
from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer.attention.heads.head_attention import OTHER
from bnet_transformer.attention.heads.head_roles import Roles
from bnet_transformer.attention.heads.head_tables import Damage, Inclusion
from bnet_transformer.figures.size import MIN_FONT_SIZE
from bnet_transformer.plots.canvas import SMALL_FONT_SIZE, Canvas, make_norm
from bnet_transformer.plots.heat_maps import (
    ERROR_SIZE,
    HeatMapData,
    draw_heat_map,
    fit_font_size,
    probability_limits,
    shared_limits,
    tick_label_width,
)
from bnet_transformer.plots.labelled_arrays import to_float_array
from bnet_transformer.plots.numbers import format_digits

MEASURES = {  # for each measure: the label of its scale, the title, and the attribute with its errors
    "rho": ("share of sentences, rho", "Inclusion of heads", None),
    "log_bayes": ("log Bayes factor, nats", "Log Bayes factor of heads", "error"),
    "importance": ("gradient importance, nats", "Gradient importance of heads", "importance_error"),
    "ablation": ("ablation, nats", "Ablation of single heads", "ablation_error"),
}
MIN_TWO_LINES = 0.3  # inches of a cell with a number and its error or interval
LOG_SCALE_RATIO = 50.0  # the ratio of the largest number to the median above which a scale is logarithmic
LINE_STYLES = (("accent", "-", "o"), ("second", "--", "s"), ("v", ":", "^"))

RELATION_SIGNS = {
    "same": "=",
    "previous": "←",
    "next": "→",
    "first": "⇤",
    "last": "⇥",
    "separator": "|",
    "same token": "≡",
    "earlier": "≪",
    "later": "≫",
    "other": "·",
}
CONFIDENT_PROBABILITY = 0.9  # a role with a lower probability has a question mark
MIN_FILL = 0.1  # the intensity of the cell of a head whose attention equals chance


def plot_inclusion(result: Inclusion, canvas: Canvas, *, show: str = "rho", top: int = 20) -> None:
    """Plot a cell for each head: `rho` with its interval; or log Bayes factor, importance or ablation with errors.

    `show="intervals"` draws the `top` heads by rank instead, with the interval of `rho` and the log Bayes factor.
    """
    check_choice("show", show, (*MEASURES, "intervals"))
    check_int("top", top)
    plural = "s" * (result.sentences != 1)
    source = f"{result.sentences:,} sentence{plural}"
    if show == "intervals":
        _plot_forest(result, canvas, top)
        canvas.set_title(f"Heads by log Bayes factor, {source}")
    else:
        _plot_measure(result, canvas, show)
        canvas.set_title(f"{MEASURES[show][1]}, {source}")
    sigma = "" if result.sigma is None else f", sigma {format_digits(result.sigma)}"
    canvas.add_note(f"{result.likelihood}{sigma}; {result.method}.")
    missing = int((~result.has_interval).sum())
    canvas.add_note(f"{missing} of {result.has_interval.numel()} heads have no interval." if missing else "")


def _plot_measure(result: Inclusion, canvas: Canvas, show: str) -> None:
    """Plot one measure as a heat map, slice by head."""
    value_label, _, errors = MEASURES[show]
    values = to_float_array(show, result.mean if show == "rho" else getattr(result, show))
    is_biased = show == "log_bayes" and result.method == "svi"  # the Monte Carlo error does not contain the bias
    error = None if errors is None or is_biased else to_float_array("errors", getattr(result, errors))
    heads = tuple(map(str, range(values.shape[1])))
    data = HeatMapData(values, result.slices, heads, error=np.zeros_like(values) if error is None else error)

    def write_cells(ax: Axes, image: Any, width: float, height: float) -> None:
        has_numbers = _write_cells(canvas, ax, image, values, error, (width, height))
        if show == "rho" and (height >= MIN_TWO_LINES or not has_numbers):
            _draw_intervals(canvas, ax, image, result, height=None if has_numbers else height)
        if result.has_interval.any() and any(line.get_label() == "interval" for line in ax.collections):
            mark = "Line below each mean" if has_numbers else "Bar"
            canvas.add_note(f"{mark}: {result.interval:.0%} interval, on a scale from 0 (left) to 1.")
        if any("±" in text.get_text() for text in ax.texts):
            kind = "Monte Carlo error" if show == "log_bayes" else "standard error over the sentences"
            canvas.add_note(f"±: {kind}.")

    norm = Normalize(0.0, 1.0) if show == "rho" else choose_norm(values)
    ax = draw_heat_map(canvas, data, value_label=value_label, x="head", y="", norm=norm, write_cells=write_cells)
    if isinstance(norm, SymLogNorm):
        assert norm.vmin is not None and norm.vmax is not None
        powers = [norm.linthresh * 10**k for k in range(int(math.log10(norm.vmax / norm.linthresh)) + 1)]
        ticks = [*(-p for p in reversed(powers) if norm.vmin <= -p), 0.0, *powers]
        bar: Any = ax.child_axes[-1]
        bar.set_yticks(ticks, labels=[format_short(tick) for tick in ticks])
        bar.minorticks_off()
    _frame_dead_heads(result, canvas, ax, values, norm)


def choose_norm(values: FloatArray) -> Normalize:
    """A linear colour scale from 0; a symmetric logarithmic scale if a few numbers are much larger than the others."""
    magnitudes = np.abs(values[np.isfinite(values)])
    largest, median = float(magnitudes.max(initial=0.0)), float(np.median(magnitudes)) if len(magnitudes) else 0.0
    low, high = shared_limits([values])
    if median <= 0 or largest < LOG_SCALE_RATIO * median:
        return make_norm(low, high)
    return SymLogNorm(10.0 ** math.floor(math.log10(median)), vmin=low, vmax=high, base=10)


def format_short(value: float) -> str:
    """A number as short text.

    >>> [format_short(value) for value in (0.934, 1.0, -2.5, 26.05, 1234.5, 2.5e6)]
    ['.93', '1.00', '−2.5', '26', '1234', '2e6']
    """
    size = abs(value)
    if size < 0.005:
        return "0"
    text = f"{size:.2f}".lstrip("0") if size < 1.995 else f"{size:.1f}" if size < 9.95 else f"{size:.0f}"
    if size >= 99999.5:
        text = f"{size:.0e}".replace("e+0", "e").replace("e+", "e")
    return ("−" if value < 0 else "") + text


def _write_cells(
    canvas: Canvas, ax: Axes, image: Any, values: FloatArray, error: FloatArray | None, cell: tuple[float, float]
) -> bool:
    """Write the number of each cell, with its error below it if there is space; return whether the numbers fit."""
    texts = {index: format_short(float(value)) for index, value in np.ndenumerate(values)}
    size = fit_font_size(canvas, texts.values(), cell)
    has_two_lines = cell[1] >= MIN_TWO_LINES
    errors = {}
    if error is not None:
        errors = {k: f"±{format_short(float(e))}" for k, e in np.ndenumerate(error) if e >= 0.005}
    has_errors = has_two_lines and fit_font_size(canvas, errors.values(), cell) is not None
    if size is None:
        return False
    for (i, j), text in texts.items():
        colour = canvas.contrasting_colour(image.cmap(image.norm(values[i, j])))
        style: Any = {"ha": "center", "va": "center_baseline", "color": colour}
        canvas.add_text(ax, j, i - (0.16 if has_two_lines else 0), text, fontsize=size, **style)
        if has_errors and (i, j) in errors:
            canvas.add_text(ax, j, i + 0.24, errors[i, j], fontsize=ERROR_SIZE, **style)
    return True


def _draw_intervals(canvas: Canvas, ax: Axes, image: Any, result: Inclusion, height: float | None) -> None:
    """Draw in each cell the interval of rho, from 0 at the left to 1 at the right, with a dot for the mean.

    With the `height` of a cell in inches, the interval is a bar in the middle of the cell, with a line for the mean.
    """
    low, mean, high = (to_float_array("rho", tensor) for tensor in (result.low, result.mean, result.high))
    tracks, lines, marks, colours, fills = [], [], [], [], []
    offset = 0.26 if height is None else 0.0
    for (i, j), value in np.ndenumerate(mean):
        y, left = i + offset, j - 0.4
        tracks.append([(left, y), (left + 0.8, y)])
        lines.append([(left + 0.8 * low[i, j], y), (left + 0.8 * high[i, j], y)])
        marks.append([(left + 0.8 * value, y - 0.25), (left + 0.8 * value, y + 0.25)])
        fills.append(image.cmap(image.norm(value)))
        colours.append(canvas.contrasting_colour(fills[-1]))
    ax.add_collection(LineCollection(tracks, colors=colours, linewidths=0.4, alpha=0.5, label="from 0 to 1"))
    thickness = 1.3 if height is None else 0.5 * 72 * height
    style: Any = {"linewidths": thickness, "capstyle": "butt", "label": "interval", "zorder": 2.5}
    ax.add_collection(LineCollection(lines, colors=colours, **style))
    if height is not None:
        ax.add_collection(LineCollection(marks, colors=fills, linewidths=0.9, label="mean", zorder=3))
        return
    x, y_middle = np.array(marks).mean(1).T
    ax.scatter(x, y_middle, s=7, c=colours, linewidths=0, zorder=3)


def _frame_dead_heads(result: Inclusion, canvas: Canvas, ax: Axes, values: FloatArray, norm: Normalize) -> None:
    """Draw a dashed frame around heads that have no effect."""
    colours = canvas.make_colour_map(norm)
    for i, j in result.dead:
        edge = canvas.contrasting_colour(colours(norm(values[i, j])))
        style: Any = {"edgecolor": edge, "linestyle": (0, (3, 2)), "linewidth": 1.1, "fill": False}
        ax.add_patch(Rectangle((j - 0.45, i - 0.45), 0.9, 0.9, gid=f"dead_{i}_{j}", **style))
    canvas.add_note("Dashed frame: a head without effect." if result.dead else "")


def _plot_forest(result: Inclusion, canvas: Canvas, top: int) -> None:
    """Plot the heads by rank (a forest plot): the interval of rho, the prior mean as a line, the log Bayes factor."""
    order = result.log_bayes.flatten().argsort(descending=True, stable=True)[:top]
    slices, heads = result.log_bayes.shape
    names = [f"{result.slices[k // heads]}_{k % heads}_*" for k in order.tolist()]
    low, mean, high, log, error = (
        to_float_array("rho", tensor.flatten()[order])
        for tensor in (result.low, result.mean, result.high, result.log_bayes, result.error)
    )
    height = max(1.0, 0.19 * len(names))
    ax = canvas.add_axes(min(canvas.page_width, 4.6 + tick_label_width(names)), height + 0.8)
    _, height = canvas.panel_size(ax, (0.0, height))
    y = np.arange(len(names))
    colour = canvas.colours["accent"]
    ax.axvline(0.5, color=canvas.colours["grey"], linewidth=0.8, linestyle=(0, (4, 3)), label="prior mean")
    ax.hlines(y, low, high, color=colour, linewidth=1.5, label="interval")
    ax.plot(mean, y, linestyle="", marker="o", markersize=4.2, color=colour, label="mean")
    step = max(1, math.ceil(1.2 * 6.0 * len(names) / (72 * height)))
    for k in range(0, len(names), step):
        error_text = f" ±{format_short(error[k])}" if error[k] >= 0.005 and result.method != "svi" else ""
        style: Any = {"ha": "left", "va": "center_baseline", "fontsize": 6.5, "clip_on": False}
        canvas.add_text(ax, 1.04, y[k], f"{format_short(log[k])}{error_text}", color=canvas.colours["grey"], **style)
    ax.set_xlim(0.0, 1.02)
    ax.set_ylim(len(names) - 0.4, -0.6)
    canvas.set_tick_labels(ax, "y", names, height)
    interval = f" with {result.interval:.0%} interval" if result.has_interval.any() else ""
    canvas.set_axis_labels(ax, f"rho{interval}; right: log Bayes factor")
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color=canvas.colours["line"], linewidth=0.5)
    ax.set_axisbelow(True)
    canvas.add_note("Dashed line: prior mean of rho.")
    num_heads = slices * heads
    canvas.add_note(
        f"Showing {len(names)} of {num_heads:,} heads, by log Bayes factor." if len(names) < num_heads else ""
    )


def plot_damage(result: Damage, canvas: Canvas, *, log: bool | None = None) -> None:
    """Plot the loss by the number of ablated heads: a line for each measure that ranks them, with standard errors.

    `log` sets a logarithmic axis; by default, the axis is logarithmic if the losses differ by orders of magnitude.
    """
    check_choice("log", log, (None, True, False))
    measures, counts = (result.labels[axis] for axis in result.axes)
    x = np.array([int(count) for count in counts])
    values, errors = to_float_array("loss", result.values), to_float_array("errors", result.error)
    ax = canvas.add_axes(4.8, 2.8)
    marker_step = max(1, len(x) // 10)
    for k, (measure, (name, line, marker)) in enumerate(zip(measures, LINE_STYLES, strict=True)):
        colour = canvas.colours[name]
        offset = (k * marker_step // len(measures), marker_step)
        style: Any = {"linestyle": line, "marker": marker, "markevery": offset, "markersize": 4, "linewidth": 1.3}
        ax.plot(x, values[k], color=colour, label=measure, zorder=3, **style)
        if not np.isnan(errors[k]).all():
            ax.fill_between(x, values[k] - errors[k], values[k] + errors[k], color=colour, alpha=0.16, linewidth=0)
    magnitudes = np.abs(values[values != 0])
    smallest, largest = (float(f(magnitudes)) for f in (np.min, np.max)) if len(magnitudes) else (1.0, 1.0)
    if largest > LOG_SCALE_RATIO * float(np.median(magnitudes) if len(magnitudes) else 1.0) if log is None else log:
        linthresh = 10.0 ** math.floor(math.log10(max(smallest, largest * 1e-4)))  # symlog is linear around 0
        ax.set_yscale("symlog", linthresh=linthresh)
        ax.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=linthresh))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    canvas.style_curve_axes(ax, "number of ablated heads, least important first", "loss per sentence, nats", 8)
    canvas.add_legend(ax, loc="upper left", title="heads ranked by", title_fontsize=SMALL_FONT_SIZE)
    plural = "s" * (result.sentences != 1)
    canvas.set_title(f"Loss by number of ablated heads, {result.sentences:,} sentence{plural}")
    canvas.add_note("Bands: ± one standard error over the sentences." if not np.isnan(errors).all() else "")


def plot_roles(result: Roles, canvas: Canvas, *, relation: str | None = None) -> None:
    """Plot the role of each head with its share of the attention; or the share of one `relation` for each head."""
    check_choice("relation", relation, (None, *result.relations))
    if relation is not None:
        _plot_relation(result, canvas, relation)
        return
    signs = assign_signs(result.relations)
    colours = _assign_colours(result.relations, canvas)
    rows, columns = result.probability.shape
    left = tick_label_width(result.slices)
    right = 0.1 if canvas.is_narrow else 1.6
    width, height = min(canvas.page_width - left - right, max(1.2, 0.42 * columns)), min(7.0, max(0.5, 0.36 * rows))
    ax = canvas.add_axes(width + left + right, height + 0.9)
    planned = width, height
    width, height = canvas.panel_size(ax, planned)

    def fill_cells() -> None:
        size = canvas.panel_size(ax, planned)
        _draw_cells(result, canvas, ax, signs, colours, (size[0] / columns, size[1] / rows))

    canvas.draw_when_sized(fill_cells)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    canvas.draw_frame(ax)
    canvas.set_tick_labels(ax, "x", [str(head) for head in range(columns)], width)
    canvas.set_tick_labels(ax, "y", result.slices, height)
    selectors = ", ".join(dict.fromkeys(name for name in result.selectors if name))
    canvas.set_axis_labels(ax, f"state of {selectors}" if selectors else "head")
    used_roles = {name for row in result.role for name in row}
    handles = [Patch(facecolor=colours[n], label=f"{signs[n]}  {n}") for n in result.relations if n in used_roles]
    if canvas.is_narrow:
        canvas.add_legend(ax, handles=handles, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=4)
    else:
        canvas.add_legend(ax, handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.0)
    plural = "s" * (result.sentences != 1)
    canvas.set_title(f"Roles of heads, {result.sentences:,} sentence{plural}", is_above_legend=canvas.is_narrow)
    canvas.add_note("Cell: the relation whose share of the attention is farthest above chance, and that share.")
    canvas.add_note(
        f"Intense colour: all attention. Pale: chance. ?: probability of the role below {CONFIDENT_PROBABILITY:.0%}."
    )


def assign_signs(relations: tuple[str, ...]) -> dict[str, str]:
    """A sign for each relation: a fixed one for built-in relations, else a letter that is not used yet.

    >>> assign_signs(("previous", "verb", "vowel", "other"))
    {'previous': '←', 'verb': 'v', 'vowel': 'o', 'other': '·'}
    """
    signs: dict[str, str] = {}
    for name in relations:
        letters = [*name, *name.upper(), *"0123456789"]
        letter = next((x for x in letters if not x.isspace() and x not in signs.values()), "?")
        signs[name] = RELATION_SIGNS.get(name, letter)
    return signs


def _assign_colours(relations: tuple[str, ...], canvas: Canvas) -> dict[str, str]:
    """A colour for each relation: a fixed one for built-in relations, an unused one for others, grey for "other"."""
    colour_ids = {name: k for k, name in enumerate(RELATION_SIGNS) if name in relations}
    for name in relations:
        unused = (k for k in range(len(relations) + len(RELATION_SIGNS)) if k not in colour_ids.values())
        colour_ids.setdefault(name, next(unused))
    return {n: canvas.head_colours[k % len(canvas.head_colours)] for n, k in colour_ids.items()} | {
        OTHER: canvas.colours["prior"]
    }


def _draw_cells(
    result: Roles,
    canvas: Canvas,
    ax: Axes,
    signs: dict[str, str],
    colours: dict[str, str],
    cell_size: tuple[float, float],
) -> None:
    """Draw a rectangle for each head, with its sign and, if they fit, its share."""
    rows, columns = result.probability.shape
    strength, sure, share = (to_numpy(x) for x in (result.strength, result.probability, result.of_role(result.mean)))
    paper, (width, height) = np.array(to_rgb(canvas.colours["paper"])), cell_size
    for t, h in np.ndindex(rows, columns):
        name = result.role[t][h]
        fill = MIN_FILL + (1 - MIN_FILL) * strength[t, h]
        colour = tuple(fill * np.array(to_rgb(colours[name])) + (1 - fill) * paper)
        edge: Any = {"facecolor": colour, "edgecolor": canvas.colours["line"], "linewidth": 0.5}
        ax.add_patch(Rectangle((h - 0.46, t - 0.46), 0.92, 0.92, gid=f"head_{t}_{h}", **edge))
        has_two_lines = width >= 0.27 and height >= 0.26
        style: Any = {"ha": "center", "va": "center", "color": canvas.contrasting_colour(colour)}
        text = signs[name] + ("" if sure[t, h] >= CONFIDENT_PROBABILITY else "?")
        size = min(9.0, 60 * min(width, height))
        if size >= MIN_FONT_SIZE:
            canvas.add_text(ax, h, t - (0.16 if has_two_lines else 0), text, fontsize=size, **style)
        if has_two_lines:
            canvas.add_text(ax, h, t + 0.24, f"{share[t, h]:.2f}".lstrip("0"), fontsize=5.5, **style)


def _plot_relation(result: Roles, canvas: Canvas, relation: str) -> None:
    """Plot the share of one relation in the attention of each head."""
    r = result.relations.index(relation)
    mean, low, high, chance = (
        to_float_array(relation, x[..., r]) for x in (result.mean, result.low, result.high, result.chance)
    )
    heads = tuple(str(head) for head in range(mean.shape[1]))
    data = HeatMapData(mean, result.slices, heads)
    draw_heat_map(canvas, data, value_label=f"share of {relation}", x="head", y="", limits=probability_limits([mean]))
    canvas.set_title(f"Attention to the {relation} word" if relation != OTHER else "Attention to other words")
    canvas.add_note(
        f"Chance: {chance.mean():.2f}. {result.interval:.0%} intervals: at most {(high - low).max():.2f} wide."
    )
