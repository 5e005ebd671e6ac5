"""Plots of attention rollout: `P(source word | output word)`, and the flow from one word through the slices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.arrays import FloatArray, to_numpy
from bnet_transformer._core.checks import check_choice, check_float, check_int
from bnet_transformer.attention import Reads
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import text_width
from bnet_transformer.figures.labels import format_token
from bnet_transformer.figures.size import MIN_FONT_SIZE
from bnet_transformer.plots.canvas import SMALL_FONT_SIZE, Canvas
from bnet_transformer.plots.heat_maps import HeatMapData, draw_heat_map, probability_limits, tick_label_width
from bnet_transformer.plots.numbers import format_digits
from bnet_transformer.plots.special_words import select_words

ROLLOUT_VIEWS = ("matrix", "flow", "entropy")
MAX_BLOCK_HEIGHT = 0.86  # the height of a block with mass 1, in rows
MAX_FLOWS, MAX_FLOW_WORDS = 300, 32  # drawn by default
MIN_FLOW = 1e-3  # the weight of a flow that is drawn by default


def plot_reads(
    result: Reads,
    canvas: Canvas,
    *,
    show: str | None = None,
    word: int | None = None,
    min_weight: float | None = None,
    special: bool = True,
) -> None:
    """Plot `P(source word | output word)`, the flow from one output `word` through the slices, or entropies.

    `min_weight` draws all flows of at least this weight; without it, the strongest flows that fit on a page are drawn.
    `special=False` leaves out special tokens, except in a flow.
    """
    show = show if show is not None else "flow" if word is not None else "matrix"
    check_choice("show", show, ROLLOUT_VIEWS)
    n = len(result.tokens)
    if word is not None and show != "flow":
        raise BNetError(f"word= has no effect with show={show!r}", hint="Use show='flow'")
    if min_weight is not None and not 0 <= check_float("min_weight", min_weight) < 1:
        raise BNetError("min_weight", expected="a probability of at least 0 and below 1", actual=min_weight)
    first, last = result.slices[0], result.slices[-1]
    span = f"slice {first}" if len(result.slices) == 1 else f"slices {first}–{last}"
    note = f"Product of attention TPMs, residual share {result.residual:g}, {result.head}; not a posterior of the bnet."
    if show == "flow" and not special:
        expected = 'show="matrix" or show="entropy": the flow passes through special tokens'
        raise BNetError("special=False", expected=expected, actual=show)
    special = special and result.has_special
    if show == "matrix":
        is_flow = result.method == "flow"
        labels: Any = {"value_label": "maximum flow" if is_flow else "P(source | output)"}
        labels |= {"x": "source word", "y": "output word"}
        values = to_numpy(result.matrix.masked_fill(~reachability(result), torch.nan))
        limits = None if is_flow else probability_limits([values])
        rows = [k for k, is_special in enumerate(result.special) if not is_special] if not special else slice(None)
        shown = select_words(canvas, result.tokens, result.special, special, None if is_flow else values[rows])
        data = HeatMapData(values, result.tokens, result.tokens).select(shown, shown)
        draw_heat_map(canvas, data, **labels, limits=limits, square=True)
        canvas.set_title(f"Attention over {span}")
    elif show == "entropy":
        data = HeatMapData(to_numpy(result.entropies), tuple(map(str, result.slices)), result.tokens)
        shown = select_words(canvas, result.tokens, result.special, special)
        data = data.select(range(len(result.slices)), shown)
        draw_heat_map(canvas, data, value_label="entropy of P(j | i), nats", x="word i that attends", y="slice")
        return
    else:
        reader = n - 1 if word is None else check_int("word", word, minimum=0)
        if reader >= n:
            raise BNetError("word", expected=f"an index of a word from 0 to {n - 1}", actual=word)
        best_path = result.paths(reader)[0]
        canvas.add_note(f"{note} Red: most probable path ({format_fraction(best_path.probability)}).")
        draw_flow(canvas, result, reader, best_path.words, min_weight)
        canvas.set_title(f"Attention of '{format_token(result.tokens[reader], 14)}' over {span}")
        return
    canvas.add_note(note)


def reachability(result: Reads) -> Tensor:
    """`[word, word]`: whether a chain of arrows, or of the residual connection, leads from output i to source j."""
    # Transitive reachability over the slices: products of Boolean matrices.
    identity = torch.eye(len(result.tokens), dtype=torch.bool)
    reachable = identity
    for step in result.readable.flip(0):
        reachable = reachable.double() @ (step | identity if result.residual > 0 else step).double() > 0
    return reachable


# the flow from one word


def propagate_flow(attention: FloatArray, weights: FloatArray, word: int) -> tuple[FloatArray, FloatArray]:
    """The probability mass of a random walk from `word` down through the slices, and its flows.

    Args:
        attention: `[choice, slice, i, j]`, the attention matrix of each slice, mixed with the residual connection.
        weights: `[choice]`, the posterior probability of each joint state of the latent choices.
        word: The output word.

    Returns:
        `mass[state, word]`, the first state first, and `flows[slice, i, j]`.
    """
    # Attention rollout (Abnar and Zuidema, 2020) one step at a time: a row vector times the matrices, top slice first.
    states, slices, n, _ = attention.shape
    mass, flows = np.zeros((slices + 1, n)), np.zeros((slices, n, n))
    for s in range(states):
        probs = np.zeros(n)
        probs[word] = weights[s]
        mass[slices] += probs
        for t in reversed(range(slices)):
            flows[t] += probs[:, None] * attention[s, t]
            probs = probs @ attention[s, t]
            mass[t] += probs
    return mass, flows


def draw_flow(canvas: Canvas, result: Reads, word: int, path: Sequence[int], min_weight: float | None) -> None:
    """Draw the words that `word` attends to in each slice, with ribbons as thick as their weight, and `path` in red."""
    tokens, last = result.tokens, len(result.slices)
    mass, flows = propagate_flow(to_numpy(result.chain), to_numpy(result.weights), word)
    mask = select_flows(mass, flows, path, min_weight)
    is_end = np.zeros(mass.shape, dtype=bool)
    is_end[1:] |= mask.any(2)
    is_end[:-1] |= mask.any(1)
    rows = sorted({*np.flatnonzero(is_end.any(0)).tolist(), *path})
    row_by_word = {i: k for k, i in enumerate(rows)}
    label_width = tick_label_width([tokens[i] for i in rows]) + 0.35
    column_width = min(1.6, max(0.5, (canvas.page_width - 2 * label_width) / last))
    bar = 0.035 / column_width
    ax = canvas.add_axes(2 * label_width + column_width * last, min(7.5, 0.34 * len(rows) + 1.0))
    for t in range(last):
        draw_ribbons(canvas, ax, t, bar, flows[t] * mask[t], mass, rows)
    for level, i in np.argwhere(is_end):
        block = _make_block(level, bar, row_by_word[i], MAX_BLOCK_HEIGHT * mass[level, i], canvas.colours["ink"])
        ax.add_patch(block).set_gid(f"block_{level}_{i}")
    path_style: dict[str, Any] = {"color": canvas.colours["q"], "zorder": 4}
    for k, (i, j) in enumerate(itertools.pairwise(path)):
        level = last - k
        line = level - bar, row_by_word[i], level - 1 + bar, row_by_word[j]
        ax.add_patch(_make_path_line(*line, canvas.colours["q"]))
    ax.plot(range(last, -1, -1), [row_by_word[i] for i in path], "o", markersize=3, gid="path", **path_style)
    for k in range(len(rows)):
        ax.axhline(k, color=canvas.colours["line"], linewidth=0.5, zorder=0)
    _draw_words(canvas, ax, result, mass[0], rows, word)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_xlim(-0.12, last + 0.12)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_yticks([])
    names = [f"slice {t}" for t in result.slices]
    width = canvas.panel_size(ax, (column_width * last, 0.0))[0]
    canvas.set_tick_labels(ax, "x", names, width, positions=[t + 0.5 for t in range(last)])
    ax.tick_params(length=0)
    hidden = (flows > 0) & ~mask
    if hidden.any():
        largest = float((flows * hidden).sum((1, 2)).max())
        num_hidden = len(tokens) - len(rows)
        words = f" and {num_hidden} words" if num_hidden else ""
        greatest = format_fraction(float((flows * hidden).max()))
        share = format_digits(100 * largest, 2)
        omitted = f"{int(hidden.sum()):,} flows of at most {greatest}{words}; at most {share}% of a slice"
        canvas.add_note(f"Omitted: {omitted}.")


def format_fraction(value: float) -> str:
    """A fraction with two decimals; a small one with two significant digits.

    >>> format_fraction(0.256), format_fraction(0.00234), format_fraction(0.0000312)
    ('0.26', '0.0023', '3.1e-05')
    """
    return f"{value:.2f}" if value >= 0.0995 or value == 0 else f"{value:.2g}"


def select_flows(
    mass: FloatArray, flows: FloatArray, path: Sequence[int], min_weight: float | None
) -> NDArray[np.bool_]:
    """A mask of the flows to draw: those of at least `min_weight`, or the strongest flows that fit on a page.

    The strongest flows are chosen between the words of the path and the words with the largest mass in any slice.
    """
    if min_weight is not None:
        return (flows >= min_weight) & (flows > 0)
    words = np.zeros(flows.shape[1], dtype=bool)
    words[list(path)] = True
    for i in np.argsort(-mass[:-1].max(0), kind="stable"):
        if words.sum() >= MAX_FLOW_WORDS:
            break
        words[i] = True
    candidates = np.where(words[:, None] & words, flows, 0.0)
    order = np.argsort(-candidates, axis=None, kind="stable")[:MAX_FLOWS]
    mask = np.zeros(flows.shape, dtype=bool)
    mask.flat[order] = True
    return mask & (candidates >= MIN_FLOW)


def draw_ribbons(
    canvas: Canvas, ax: Axes, level: int, bar: float, flows: FloatArray, mass: FloatArray, rows: Sequence[int]
) -> None:
    """Draw the flows of one slice, stacked at both ends in the order of the words at their other ends."""
    thickness = MAX_BLOCK_HEIGHT * flows[np.ix_(rows, rows)]
    right = _stack_offsets(mass[level + 1, rows], thickness)
    left = _stack_offsets(mass[level, rows], thickness.T).T
    for a, b in np.argwhere(thickness > 0):
        i, j = rows[a], rows[b]
        ends = (level + 1 - bar, right[a, b], level + bar, left[a, b])
        ribbon = _make_ribbon(*ends, thickness[a, b], canvas.colours["k"], float(flows[i, j]))
        ax.add_patch(ribbon).set_gid(f"flow_{level}_{i}_{j}")


def _stack_offsets(mass: FloatArray, thickness: FloatArray) -> FloatArray:
    """The upper end of each ribbon in each row: stacked from top to bottom, centred at the middle of the row."""
    tops = np.arange(len(mass)) - MAX_BLOCK_HEIGHT * mass / 2
    return np.cumsum(np.column_stack([tops, thickness]), 1)[:, :-1]


def _draw_words(
    canvas: Canvas, ax: Axes, result: Reads, word_weights: FloatArray, rows: Sequence[int], word: int
) -> None:
    """Draw the source words with their weights at the left, and the output word at the right."""
    texts = [format_fraction(float(word_weights[i])) if word_weights[i] > 0 else "–" for i in rows]
    offset = max(28.0, 12 + max(text_width(text, SMALL_FONT_SIZE + 0.5) for text in texts))
    step = 1
    if canvas.user_axes is not None:
        step = max(1, math.ceil(1.2 * MIN_FONT_SIZE * len(rows) / (0.6 * 72 * canvas.space.height / ax.figure.dpi)))
    for k, (i, text) in enumerate(zip(rows, texts, strict=True)):
        if k % step and i != word:
            continue
        (line,), fonts = canvas.format_texts([result.tokens[i]], 14)
        style: dict[str, Any] = {"va": "center_baseline", "fontfamily": fonts, "fontsize": SMALL_FONT_SIZE + 0.5}
        style |= {"textcoords": "offset points", "parse_math": False}
        colour = canvas.colours["ink" if word_weights[i] >= 0.005 else "grey"]
        ax.annotate(line, (0, k), (-offset, 0), ha="right", color=colour, **style)
        ax.annotate(text, (0, k), (-6, 0), ha="right", color=colour, **style)
        if i == word:
            ax.annotate(line, (len(result.slices), k), (6, 0), ha="left", color=canvas.colours["q"], **style)


def _make_block(level: int, bar: float, y: float, height: float, colour: str) -> PathPatch:
    """The block of a word at the end of ribbons."""
    left, right, top, foot = level - bar, level + bar, y - height / 2, y + height / 2
    corners = [(left, top), (right, top), (right, foot), (left, foot)]
    return PathPatch(Outline(corners), facecolor=colour, edgecolor=colour, linewidth=0.4, zorder=3)


def _bezier_points(x0: float, y0: float, x1: float, y1: float) -> list[tuple[float, float]]:
    """The control points of a cubic Bézier curve from (x0, y0) to (x1, y1), horizontal at both ends."""
    middle = (x0 + x1) / 2
    return [(x0, y0), (middle, y0), (middle, y1), (x1, y1)]


def _make_ribbon(x0: float, y0: float, x1: float, y1: float, thickness: float, colour: str, weight: float) -> PathPatch:
    """A ribbon between (x0, y0) and (x1, y1), which are its upper ends."""
    forward, backward = _bezier_points(x0, y0, x1, y1), _bezier_points(x1, y1 + thickness, x0, y0 + thickness)
    codes = [Outline.MOVETO, *[Outline.CURVE4] * 3, Outline.LINETO, *[Outline.CURVE4] * 3, Outline.CLOSEPOLY]
    alpha = 0.25 + 0.35 * weight
    path = Outline([*forward, *backward, forward[0]], codes)
    return PathPatch(path, facecolor=colour, edgecolor=colour, alpha=alpha, linewidth=0.4, zorder=1)


def _make_path_line(x0: float, y0: float, x1: float, y1: float, colour: str) -> PathPatch:
    """A piece of the most probable path."""
    path = Outline(_bezier_points(x0, y0, x1, y1), [Outline.MOVETO, *[Outline.CURVE4] * 3])
    return PathPatch(path, facecolor="none", edgecolor=colour, linewidth=1.4, zorder=4)
