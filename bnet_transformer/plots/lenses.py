"""Plots of a lens: the grid of its most probable words, and the probability or the rank of one word by state."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bnet_transformer._core.arrays import FloatArray, to_numpy
from bnet_transformer._core.checks import check_choice
from bnet_transformer.errors import BNetError, BudgetError
from bnet_transformer.figures.fonts import text_width
from bnet_transformer.figures.labels import format_token
from bnet_transformer.inference.selection import parse_words
from bnet_transformer.plots.canvas import MAX_LABEL_LENGTH, SMALL_FONT_SIZE, Canvas
from bnet_transformer.plots.heat_maps import HeatMapData, draw_cells, shared_limits, tick_label_width
from bnet_transformer.plots.special_words import select_words
from bnet_transformer.residual_stream import Lens, TunedLens

COLOURS = {"probability": "probability of the word", "entropy": "entropy (nats)", "kl": "KL(end || lens) (nats)"}
MAX_GRID_CELLS = 4096
MAX_GRID_HEIGHT = 8.4  # inches
MIN_TEXT_WIDTH, MIN_TEXT_HEIGHT = 0.2, 0.09  # inches of a cell below which its text is not readable


def plot_lens(
    result: Lens,
    canvas: Canvas,
    *,
    colour: str = "probability",
    target: str | int | None = None,
    show: str | None = None,
    slices: object = None,
    words: object = None,
    special: bool = True,
) -> None:
    """Plot the most probable word of every state, or the probability or rank of a `target` word by state.

    In the grid, words are along x and slices along y, with the last state on top. `colour` is the quantity of the
    colours: `"probability"` of the written word, `"entropy"` or `"kl"`. `slices` and `words` select a part, and
    `special=False` leaves out special tokens. With `target`, the curve is that of the last selected word: of its
    probability, or with `show="rank"` of its rank.
    """
    check_choice("colour", colour, COLOURS)
    check_choice("show", show, (None, "probability", "rank"))
    if show is not None and target is None:
        raise BNetError(
            "show", expected="None without target=", actual=show, hint='Pass the word, as in target=" Paris"'
        )
    rows = result.parse_slices(range(len(result.states)) if slices is None else slices)
    columns = parse_words(result.words, range(len(result.words)) if words is None else words)
    shown = set(select_words(canvas, result.words, result.special, special))
    columns = [k for k in columns if k in shown]
    if not columns:
        raise BNetError("words", expected="words that are no special tokens", actual=words)
    kind = "Tuned lens" if result.is_tuned else "Logit lens"
    norm = f"The readout applies {result.norm} to each state." if result.norm else "No norm is applied to the states."
    canvas.add_note(norm if result.is_tuned else f"{norm} The lens of early slices is biased.")
    if target is not None:
        _plot_target(result, canvas, result.parse_state(target), rows, columns[-1], kind, show)
        return
    if len(rows) * len(columns) > MAX_GRID_CELLS:
        expected, actual = f"at most {MAX_GRID_CELLS:,} cells", f"{len(rows) * len(columns):,}"
        raise BudgetError("plot", expected=expected, actual=actual, hint="Select some by slices= and words=")
    canvas.set_title(f"{kind} of {result.readout}")
    _draw_grid(result, canvas, rows[::-1], columns, colour)


def _draw_grid(result: Lens, canvas: Canvas, rows: list[int], columns: list[int], colour: str) -> None:
    """Draw the grid; `rows` are the states from top to bottom."""
    quantity = {"probability": result.top_probabilities[..., 0], "entropy": result.entropy, "kl": result.kl}[colour]
    values = to_numpy(quantity).astype(np.float64)[np.ix_(rows, columns)]
    texts = [[result.labels[int(result.top_states[t, i, 0])] for i in columns] for t in rows]
    row_labels = tuple(result.states[t] for t in rows)
    column_labels = tuple(result.words[i] for i in columns)
    longest = canvas.limit_label_length(MAX_LABEL_LENGTH)
    left, below = tick_label_width(row_labels), tick_label_width(column_labels, longest)
    label_width = (
        max(text_width(format_token(text.strip(), 12), SMALL_FONT_SIZE) for line in texts for text in line) / 72
    )
    width = min(canvas.page_width - left - 1.0, max(1.6, (label_width + 0.12) * len(columns)))
    height = min(MAX_GRID_HEIGHT, max(1.0, 0.2 * len(rows)))
    ax = canvas.add_axes(width + left + 1.0, height + below + 0.75)
    width, height = canvas.panel_size(ax, (width, height))
    low, high = (0.0, 1.0) if colour == "probability" else shared_limits([values])
    # The divergence of x_0 is often ten times that of other states: a root makes the others visible.
    norm = PowerNorm(0.5, low, high) if colour == "kl" else None
    image = draw_cells(canvas, ax, HeatMapData(values, row_labels, column_labels), (low, high), norm)
    canvas.set_tick_labels(ax, "x", column_labels, width, longest)
    canvas.set_tick_labels(ax, "y", row_labels, height)
    canvas.set_axis_labels(ax, "word", "state")

    def fill_cells() -> None:
        size = canvas.panel_size(ax, (width, height))
        cell = size[0] / len(columns), size[1] / len(rows)
        if cell[0] >= MIN_TEXT_WIDTH and cell[1] >= MIN_TEXT_HEIGHT:
            _write_words(canvas, ax, image, values, texts, cell)
        else:
            canvas.add_note("The words do not fit into the cells; select some by slices= and words=.")

    canvas.draw_when_sized(fill_cells)
    canvas.add_colour_bar(image, COLOURS[colour], [ax])


def _write_words(
    canvas: Canvas, ax: Axes, image: Any, values: FloatArray, texts: list[list[str]], cell: tuple[float, float]
) -> None:
    """Write the words into the cells, shortened to their width, in a colour with contrast."""
    size = min(SMALL_FONT_SIZE, 0.78 * 72 * cell[1])
    points = (72 * cell[0] - 3) / canvas.font_scale
    shortened = {text: _shorten(text.strip() or text, size, points) for line in texts for text in line}
    for (row, column), value in np.ndenumerate(values):
        style: Any = {"fontsize": size, "ha": "center", "va": "center_baseline"}
        colour = canvas.contrasting_colour(image.cmap(image.norm(value)))
        canvas.add_text(ax, column, row, shortened[texts[row][column]], color=colour, **style)


def _shorten(text: str, size: float, points: float) -> str:
    """The longest form of a word that fits into a width in points."""
    lengths = range(min(len(text), 24), 1, -1)
    fitting = (format_token(text, n) for n in lengths if text_width(format_token(text, n), size) <= points)
    return next(fitting, format_token(text, 2))


def _plot_target(
    result: Lens, canvas: Canvas, state: int, rows: list[int], word: int, kind: str, show: str | None
) -> None:
    """Plot the probability or the rank of one state of the readout by slice, for one word."""
    probs, ranks = (to_numpy(values[rows, word]) for values in (result.probability(state), result.rank(state)))
    label = result.labels[state].strip()
    ax = canvas.add_axes(4.2, 2.3)
    style: Any = {"color": canvas.colours["accent"], "linewidth": 1.4, "marker": "o", "markersize": 3}
    ax.plot(rows, ranks if show == "rank" else probs, **style)
    if show == "rank":
        ax.set_yscale("log")
        ax.set_ylim(1.15 * max(2, ranks.max()), 0.85)
        ticks = [k * 10**power for power in range(len(str(ranks.max()))) for k in (1, 2, 5)]
        step = 1 if ranks.max() < 100 else 3  # powers of ten only
        ax.yaxis.set_major_locator(FixedLocator([tick for tick in ticks[::step] if tick <= ranks.max()]))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda rank, _: f"{rank:,.0f}"))
        ax.yaxis.set_minor_locator(NullLocator())
        canvas.style_curve_axes(ax, "state", f"rank of {label}", 10)
    else:
        ax.set_ylim(-0.03, 1.1)
        canvas.style_curve_axes(ax, "state", f"P({label})", 10)
        _write_ranks(canvas, ax, rows, probs, ranks)
    canvas.set_title(f"{kind}: {label} after {result.words[word].strip()}")


def _write_ranks(canvas: Canvas, ax: Axes, rows: list[int], probs: FloatArray, ranks: FloatArray) -> None:
    """Write the rank of a word above its probability, where the rank changes."""
    style: Any = {"ha": "center", "va": "bottom", "fontsize": 6.5, "color": canvas.colours["grey"]}
    if len(rows) <= 40:
        for k, (row, prob, rank) in enumerate(zip(rows, probs, ranks, strict=True)):
            is_new = k == 0 or rank != ranks[k - 1]
            if is_new and rank <= 10:
                canvas.add_text(ax, row, min(float(prob), 1.0) + 0.03, f"{rank}", **style)
    canvas.add_note("Numbers: the rank of the word, where it changes and is at most 10.")


def plot_tuned_lens(result: TunedLens, canvas: Canvas) -> None:
    """Plot the held-out KL of the logit lens and of the tuned lens by slice."""
    ax = canvas.add_axes(4.2, 2.3)
    rows = range(len(result.kl))
    for name, values, colour in (("logit lens", result.plain_kl, "grey"), ("tuned lens", result.kl, "accent")):
        style: Any = {"linewidth": 1.4, "marker": "o", "markersize": 3, "label": name}
        ax.plot(rows, to_numpy(values), color=canvas.colours[colour], **style)
    ax.set_ylim(bottom=0)
    canvas.style_curve_axes(ax, "state", "held-out KL(end || lens) (nats)", 10)
    canvas.add_legend(ax)
    for note in result.notes:
        canvas.add_note(note)
    canvas.set_title(f"Tuned lens of {result.readout}")
