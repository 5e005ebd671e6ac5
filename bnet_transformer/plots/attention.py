"""Plots of attention: rollout, TANs, and the heads of a net with their importance and roles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize, SymLogNorm, to_rgb
from matplotlib.patches import FancyArrowPatch, Patch, PathPatch, Rectangle
from matplotlib.path import Path as Outline
from matplotlib.ticker import FuncFormatter, SymmetricalLogLocator
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.checks import check_choice, check_float, check_int
from bnet_transformer._core.tensors import FloatArray, to_numpy
from bnet_transformer.attention import CorpusTan, Reads, Tan, TanTree
from bnet_transformer.attention.inclusion import Damage, Inclusion
from bnet_transformer.attention.roles import OTHER, Roles
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import MIN_FONT_SIZE, format_token, text_width
from bnet_transformer.plots.canvas import SMALL_FONT_SIZE, Canvas, format_digits, format_number, make_norm
from bnet_transformer.plots.heat_maps import (
    HeatMapData,
    draw_matrix,
    frame_cell,
    probability_limits,
    select_words,
    shared_limits,
    tick_label_width,
    to_float_array,
    write_numbers,
)

# --------------------------------------------------------------------------------------------------------------------
# Plots of attention rollout: `P(source word | output word)`, and the flow from one word through the slices.


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
        draw_matrix(canvas, [data], **labels, limits=limits, square=True)
        canvas.set_title(f"Attention over {span}")
    elif show == "entropy":
        data = HeatMapData(to_numpy(result.entropies), tuple(map(str, result.slices)), result.tokens)
        shown = select_words(canvas, result.tokens, result.special, special)
        data = data.select(range(len(result.slices)), shown)
        draw_matrix(canvas, [data], value_label="entropy of P(j | i), nats", x="word i that attends", y="slice")
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
    ax = canvas.add_axes(column_width * last, min(6.8, 0.34 * len(rows) + 0.3))
    for t in range(last):
        draw_ribbons(canvas, ax, t, bar, flows[t] * mask[t], mass, rows)
    for level, i in np.argwhere(is_end):
        left, right, half = level - bar, level + bar, MAX_BLOCK_HEIGHT * mass[level, i] / 2
        top, foot = row_by_word[i] - half, row_by_word[i] + half
        outline = Outline([(left, top), (right, top), (right, foot), (left, foot)])
        ax.add_patch(PathPatch(outline, color=canvas.colours["ink"], linewidth=0.4, zorder=3, gid=f"block_{level}_{i}"))
    path_style: dict[str, Any] = {"color": canvas.colours["q"], "zorder": 4}
    for k, (i, j) in enumerate(itertools.pairwise(path)):
        level = last - k
        points = _bezier_points(level - bar, row_by_word[i], level - 1 + bar, row_by_word[j])
        outline = Outline(points, [Outline.MOVETO, *[Outline.CURVE4] * 3])
        ax.add_patch(PathPatch(outline, facecolor="none", edgecolor=canvas.colours["q"], linewidth=1.4, zorder=4))
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
    canvas.set_tick_labels(ax, "x", names, positions=[t + 0.5 for t in range(last)])
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
    codes = [Outline.MOVETO, *[Outline.CURVE4] * 3, Outline.LINETO, *[Outline.CURVE4] * 3, Outline.CLOSEPOLY]
    for a, b in np.argwhere(thickness > 0):
        i, j = rows[a], rows[b]
        x0, x1, width = level + 1 - bar, level + bar, thickness[a, b]
        upper = _bezier_points(x0, right[a, b], x1, left[a, b])
        lower = _bezier_points(x1, left[a, b] + width, x0, right[a, b] + width)
        style: Any = {"color": canvas.colours["k"], "alpha": 0.25 + 0.35 * float(flows[i, j]), "linewidth": 0.4}
        ribbon = PathPatch(Outline([*upper, *lower, upper[0]], codes), **style, zorder=1)
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
    step = max(1, math.ceil(1.2 * MIN_FONT_SIZE * len(rows) / (72 * canvas.panel_size(ax)[1])))
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


def _bezier_points(x0: float, y0: float, x1: float, y1: float) -> list[tuple[float, float]]:
    """The control points of a cubic Bézier curve from (x0, y0) to (x1, y1), horizontal at both ends."""
    middle = (x0 + x1) / 2
    return [(x0, y0), (middle, y0), (middle, y1), (x1, y1)]


# --------------------------------------------------------------------------------------------------------------------
# Plots of tree-augmented naive Bayes (TAN): of one slice, of the best parents of words, and of a corpus.


MAX_TREE_WORDS = 40  # by default, arrows between at most this number of words are drawn, so that all can be labelled
HIDDEN_PARENT = -2  # the parent of a word whose arrow is not drawn; the parent of a root is -1


def plot_tan(result: Tan, canvas: Canvas) -> None:
    """Plot the number of arrows between boxes; the class is the first box."""
    boxes = [result.class_box, *(box for box in result.quotient.boxes if box != result.class_box)]
    positions = np.array([boxes.index(box) for box in result.quotient.boxes])
    counts = np.full((len(boxes), len(boxes)), np.nan)
    counts[*positions[result.quotient.arrows].T] = result.quotient.counts
    data = HeatMapData(counts, tuple(boxes), tuple(boxes))
    draw_matrix(canvas, [data], value_label="arrows", x="to box", y="from box", square=True)
    nearly = f" (almost {result.nearly})" if result.nearly != result.kind else ""
    canvas.set_title(f"{result.kind.replace('no DAG', 'not a DAG')}{nearly}")


def plot_tan_tree(result: TanTree, canvas: Canvas, *, min_weight: float | None = None, top: int | None = None) -> None:
    """Plot the words with an arrow from each word's best parent, of at least `min_weight`, or the `top` strongest.

    By default, the strongest arrows between as many words as can be labelled are drawn.
    """
    if min_weight is not None and not 0 <= check_float("min_weight", min_weight) <= 1:
        raise BNetError("min_weight", expected="a probability from 0 to 1", actual=min_weight)
    if top is not None:
        check_int("top", top)
    draw_arcs(canvas, result, min_weight, top)
    canvas.set_title(f"Best parents in slice {result.slice}, {result.head}")
    canvas.add_note(f"The tree has {result.mass:.1%} of the attention between words. Square: a root.")


def plot_corpus_tan(result: CorpusTan, canvas: Canvas, *, corrected: bool = True) -> None:
    """Plot the mutual information of each pair of boxes given the class; frames mark the arrows of the tree."""
    check_choice("corrected", corrected, (True, False))
    values = (result.corrected if corrected else result.information).copy()
    np.fill_diagonal(values, np.nan)
    data = HeatMapData(values, result.boxes, result.boxes)
    value_label = "mutual information given the class, nats" + (", corrected" if corrected else "")
    (ax,) = draw_matrix(canvas, [data], value_label=value_label, x="box", y="box", square=True)
    for i, parent in enumerate(result.parents):
        for row, column in ((i, parent), (parent, i)) if parent >= 0 else ():
            frame_cell(canvas, ax, row, column)
    distance = "" if result.divergence is None else f", divergence from the TAN {format_digits(result.divergence)} nats"
    canvas.set_title(f"{result.sentences:,} sentences{distance}")
    canvas.add_note("Red frames: arrows of the tree.")


def prune_tree(canvas: Canvas, tree: TanTree, min_weight: float | None, top: int | None) -> TanTree:
    """The tree with only the arrows to draw and the words at their ends; a note counts the omitted parts."""
    parents, weights = tree.parents, tree.weights
    arrows = [i for i, parent in enumerate(parents) if parent >= 0]
    order = sorted(arrows, key=lambda i: (-weights[i], i))
    if min_weight is not None:
        order = [i for i in order if weights[i] >= min_weight]
    if top is not None:
        order = order[:top]
    selected: set[int] = set()
    word_ids: set[int] = set()
    for i in order:
        if top is None and min_weight is None and len(word_ids | {i, parents[i]}) > MAX_TREE_WORDS < len(parents):
            break
        selected.add(i)
        word_ids |= {i, parents[i]}
    if len(selected) == len(arrows):
        return tree
    shown = sorted(word_ids) or range(len(parents))
    new_ids = {i: k for k, i in enumerate(shown)}
    num_hidden = len(parents) - len(shown)
    words = f" and {num_hidden} words" if num_hidden else ""
    strongest = max(weights[i] for i in arrows if i not in selected)
    counts = f"{len(arrows) - len(selected)} arrows of at most {format_fraction(strongest)}{words}"
    canvas.add_note(f"Omitted: {counts}.")
    new_parents = [new_ids[parents[i]] if i in selected else -1 if parents[i] < 0 else HIDDEN_PARENT for i in shown]
    return replace(
        tree,
        parents=tuple(new_parents),
        weights=tuple(weights[i] for i in shown),
        tokens=tuple(tree.tokens[i] for i in shown),
    )


def draw_arcs(canvas: Canvas, result: TanTree, min_weight: float | None, top: int | None) -> None:
    """Draw the words in a row, and above them an arrow from each word's best parent, as thick as its weight."""
    tree = prune_tree(canvas, result, min_weight, top)
    parents, tokens = tree.parents, tree.tokens
    n = len(tokens)
    span = max((abs(i - p) for i, p in enumerate(parents) if p >= 0), default=1)
    height = 0.25 * span + 0.65
    width = min(canvas.page_width - 0.3, max(2.7, 0.55 * n), 3.2 * n / height)  # in inches
    ax = canvas.add_axes(width, width * height / n, has_fixed_shape=True)
    for i, (parent, weight) in enumerate(zip(parents, tree.weights, strict=True)):
        if parent == HIDDEN_PARENT:
            continue
        if parent < 0:
            ax.plot([i], [0.0], marker="s", markersize=4.5, color=canvas.colours["q"], zorder=3, clip_on=False)
            continue
        curvature = (-1 if parent < i else 1) * (0.5 if abs(parent - i) > 1 else 0.9)
        style: dict[str, Any] = {"color": canvas.colours["accent"], "alpha": 0.35 + 0.65 * min(1.0, weight)}
        style |= {"connectionstyle": f"arc3,rad={curvature}", "arrowstyle": "-|>,head_length=4,head_width=2"}
        style |= {"linewidth": 0.6 + 2.4 * weight, "shrinkA": 3, "shrinkB": 4, "gid": f"arc_{parent}_{i}"}
        ax.add_patch(FancyArrowPatch((parent, 0), (i, 0), **style))
    ax.plot(range(n), [0] * n, linestyle="", marker="o", markersize=3, color=canvas.colours["ink"])
    ax.set_xlim(-0.6, n - 0.4)
    ax.set_ylim(-0.3, 0.25 * span + 0.35)
    ax.set_aspect("equal")  # an arc is as high as it is wide
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.set_yticks([])
    canvas.set_tick_labels(ax, "x", tokens)
    ax.tick_params(length=0)


# --------------------------------------------------------------------------------------------------------------------
# Plots of the heads of a net: their importance, the loss without some of them, and their roles.
#
# The importance of heads is drawn as a heat map with a cell for each head of each slice, or as intervals by rank. The
# role of a head is a sign in its cell; the colour of the cell is more intense if its attention is farther from chance.


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
    rows, columns = values.shape
    data = HeatMapData(values, result.slices, tuple(map(str, range(columns))), error=error)

    def write_cells(ax: Axes, image: Any, width: float, height: float) -> None:
        has_numbers = write_numbers(canvas, [ax], [data], image, (width, height))
        if show == "rho" and (height >= MIN_TWO_LINES or not has_numbers):
            _draw_intervals(canvas, ax, image, result, height=None if has_numbers else height)
        if result.has_interval.any() and any(line.get_label() == "interval" for line in ax.collections):
            mark = "Line below each mean" if has_numbers else "Bar"
            canvas.add_note(f"{mark}: {result.interval:.0%} interval, on a scale from 0 (left) to 1.")
        if any("±" in text.get_text() for text in ax.texts):
            kind = "Monte Carlo error" if show == "log_bayes" else "standard error over the sentences"
            canvas.add_note(f"±: {kind}.")

    norm = Normalize(0.0, 1.0) if show == "rho" else choose_norm(values)
    size = max(2.4, 0.45 * columns), min(7.0, max(1.4, 0.42 * rows))
    style: Any = {"value_label": value_label, "x": "head", "y": "", "norm": norm, "size": size}
    (ax,) = draw_matrix(canvas, [data], **style, write_cells=write_cells)
    if isinstance(norm, SymLogNorm):
        assert norm.vmin is not None and norm.vmax is not None
        powers = [norm.linthresh * 10**k for k in range(int(math.log10(norm.vmax / norm.linthresh)) + 1)]
        ticks = [*(-p for p in reversed(powers) if norm.vmin <= -p), 0.0, *powers]
        bar: Any = ax.child_axes[-1]
        bar.set_yticks(ticks, labels=[format_digits(tick) for tick in ticks])
        bar.minorticks_off()
    colours = canvas.make_colour_map(norm)
    for i, j in result.dead:
        edge = canvas.contrasting_colour(colours(norm(values[i, j])))
        style = {"edgecolor": edge, "linestyle": (0, (3, 2)), "linewidth": 1.1, "fill": False}
        ax.add_patch(Rectangle((j - 0.45, i - 0.45), 0.9, 0.9, gid=f"dead_{i}_{j}", **style))
    canvas.add_note("Dashed frame: a head without effect." if result.dead else "")


def choose_norm(values: FloatArray) -> Normalize:
    """A linear colour scale from 0; a symmetric logarithmic scale if a few numbers are much larger than the others."""
    magnitudes = np.abs(values[np.isfinite(values)])
    largest, median = float(magnitudes.max(initial=0.0)), float(np.median(magnitudes)) if len(magnitudes) else 0.0
    low, high = shared_limits([values])
    if median <= 0 or largest < LOG_SCALE_RATIO * median:
        return make_norm(low, high)
    return SymLogNorm(10.0 ** math.floor(math.log10(median)), vmin=low, vmax=high, base=10)


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


def _plot_forest(result: Inclusion, canvas: Canvas, top: int) -> None:
    """Plot the heads by rank (a forest plot): the interval of rho, the prior mean as a line, the log Bayes factor."""
    order = result.log_bayes.flatten().argsort(descending=True, stable=True)[:top]
    slices, heads = result.log_bayes.shape
    names = [f"{result.slices[k // heads]}_{k % heads}_*" for k in order.tolist()]
    low, mean, high, log, error = (
        to_float_array("rho", tensor.flatten()[order])
        for tensor in (result.low, result.mean, result.high, result.log_bayes, result.error)
    )
    ax = canvas.add_axes(3.7, max(1.0, 0.19 * len(names)))
    y = np.arange(len(names))
    colour = canvas.colours["accent"]
    ax.axvline(0.5, color=canvas.colours["grey"], linewidth=0.8, linestyle=(0, (4, 3)), label="prior mean")
    ax.hlines(y, low, high, color=colour, linewidth=1.5, label="interval")
    ax.plot(mean, y, linestyle="", marker="o", markersize=4.2, color=colour, label="mean")
    for k in range(0, len(names), max(1, math.ceil(1.2 * 6.0 * len(names) / (72 * canvas.panel_size(ax)[1])))):
        error_text = f" ±{format_number(error[k], 1.0)}" if error[k] >= 0.005 and result.method != "svi" else ""
        style: Any = {"ha": "left", "va": "center_baseline", "fontsize": 6.5, "clip_on": False}
        canvas.add_text(
            ax,
            1.04,
            y[k],
            f"{format_number(log[k], np.abs(log).max())}{error_text}",
            color=canvas.colours["grey"],
            **style,
        )
    ax.set_xlim(0.0, 1.02)
    canvas.label_rows(ax, names)
    interval = f" with {result.interval:.0%} interval" if result.has_interval.any() else ""
    canvas.set_axis_labels(ax, f"rho{interval}; right: log Bayes factor")
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
    ax = canvas.add_axes(4.2, 2.3)
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
    canvas.style_curve_axes(ax, "number of ablated heads, least important first", "loss per sentence, nats")
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
    ax = canvas.add_axes(max(1.4, 0.46 * columns), min(7.0, max(0.5, 0.42 * rows)))

    def fill_cells() -> None:
        size = canvas.panel_size(ax)
        _draw_cells(result, canvas, ax, signs, colours, (size[0] / columns, size[1] / rows))

    canvas.draw_when_sized(fill_cells)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    canvas.draw_frame(ax)
    canvas.set_tick_labels(ax, "x", [str(head) for head in range(columns)])
    canvas.set_tick_labels(ax, "y", result.slices)
    selectors = ", ".join(dict.fromkeys(name for name in result.selectors if name))
    canvas.set_axis_labels(ax, f"state of {selectors}" if selectors else "head")
    used_roles = {name for row in result.role for name in row}
    handles = [Patch(facecolor=colours[n], label=f"{signs[n]}  {n}") for n in result.relations if n in used_roles]
    if canvas.is_narrow:
        canvas.add_legend(ax, handles=handles, is_above=True, ncols=4)
    else:
        canvas.add_legend(ax, handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.0)
    plural = "s" * (result.sentences != 1)
    canvas.set_title(f"Roles of heads, {result.sentences:,} sentence{plural}")
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
    draw_matrix(canvas, [data], value_label=f"share of {relation}", x="head", y="", limits=probability_limits([mean]))
    canvas.set_title(f"Attention to the {relation} word" if relation != OTHER else "Attention to other words")
    canvas.add_note(
        f"Chance: {chance.mean():.2f}. {result.interval:.0%} intervals: at most {(high - low).max():.2f} wide."
    )
