"""Plots of answers: what was read, TANs, counterfactuals, draws, distributions.

Arrows over words show how the reading of one word spreads over the slices below it, and a tree of best parents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, PathPatch
from matplotlib.path import Path as Outline
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Categorical, Distribution

from bnet_transformer._core.checks import check_choice, check_float, check_int
from bnet_transformer.attention import CorpusTan, Reads, Tan, TanTree
from bnet_transformer.errors import BNetError, unknown_name_error
from bnet_transformer.figures.fonts import BASE_FONT, text_width
from bnet_transformer.figures.labels import format_token
from bnet_transformer.inference import Samples
from bnet_transformer.interventions.counterfactual import Counterfactual
from bnet_transformer.plots.canvas import PAGE_WIDTH, SMALL_FONT_SIZE, Canvas
from bnet_transformer.plots.heat_maps import (
    FloatArray,
    HeatMapData,
    draw_heat_map,
    frame_cell,
    probability_limits,
    tick_label_width,
)
from bnet_transformer.plots.labelled_arrays import make_labelled_array, plot_labelled_array
from bnet_transformer.tpm.arrays import to_numpy

ROLLOUT_VIEWS = ("matrix", "flow", "entropy")
MAX_BLOCK_HEIGHT = 0.86  # the height of the whole mass, in rows
MAX_FLOWS, MAX_FLOW_WORDS = 300, 32  # no more than these are drawn, unless asked for
MIN_FLOW = 1e-3  # flows below it are drawn only if asked for
MAX_TREE_WORDS = 40  # more words of a tree than these cannot all be named on a page
HIDDEN_PARENT = -2  # the parent of a word whose arrow is not drawn


def plot_reads(
    result: Reads, canvas: Canvas, *, show: str | None = None, word: int | None = None, min_weight: float | None = None
) -> None:
    """`P(source word | output word)`; the flow from one output `word` over the slices; or entropies.

    `min_weight` draws all flows of at least this weight; without it, only the strongest flows are drawn, as many as fit on a page.
    """
    show = show if show is not None else "flow" if word is not None else "matrix"
    check_choice("show", show, ROLLOUT_VIEWS)
    n = len(result.tokens)
    if word is not None and show != "flow":
        raise BNetError("word", expected="a word with show='flow' alone", actual=word)
    if min_weight is not None and not 0 <= check_float("min_weight", min_weight) < 1:
        raise BNetError("min_weight", expected="a share from 0 to 1", actual=min_weight)
    where = f"slice {result.slices[0]}" if len(result.slices) == 1 else f"slices {result.slices[0]}–{result.slices[-1]}"
    told = f"Chain of attention TPMs, residual share {result.residual:g}, {result.head}; no posterior of the bnet."
    if show == "matrix":
        capacity = result.method == "flow"
        what = "greatest flow" if capacity else "P(source | output)"
        values = to_numpy(result.matrix.masked_fill(~reachability(result), torch.nan))
        found = HeatMapData(values, result.tokens, result.tokens)
        limits = None if capacity else probability_limits([values])
        draw_heat_map(canvas, found, value_label=what, x="source word", y="output word", limits=limits, square=True)
        canvas.set_title(f"What is read over {where}")
    elif show == "entropy":
        found = HeatMapData(to_numpy(result.entropies), tuple(map(str, result.slices)), result.tokens)
        draw_heat_map(canvas, found, value_label="entropy of P(j | i), nats", x="word i that reads", y="slice")
        return
    else:
        at = n - 1 if word is None else check_int("word", word, minimum=0)
        if at >= n:
            raise BNetError("word", expected=f"a word from 0 to {n - 1}", actual=word)
        best = result.paths(at)[0]
        canvas.add_note(f"{told} Red: the most probable path ({format_fraction(best.probability)}).")
        draw_flow(canvas, result, at, best.words, min_weight)
        canvas.set_title(f"What '{format_token(result.tokens[at], 14)}' reads over {where}")
        return
    canvas.add_note(told)


def reachability(result: Reads) -> Tensor:
    """`[word, word]`: whether a chain of arrows (and of the residual share) leads from output i to source j."""
    own = torch.eye(len(result.tokens), dtype=torch.bool)
    found = own
    for step in result.readable.flip(0):
        found = found.double() @ (step | own if result.residual > 0 else step).double() > 0
    return found


def plot_tan(result: Tan, canvas: Canvas) -> None:
    """How many arrows lead from box to box, the class first."""
    boxes = [result.class_box, *(box for box in result.quotient.boxes if box != result.class_box)]
    place = np.array([boxes.index(box) for box in result.quotient.boxes])
    counts = np.full((len(boxes), len(boxes)), np.nan)
    counts[*place[result.quotient.arrows].T] = result.quotient.counts
    found = HeatMapData(counts, tuple(boxes), tuple(boxes))
    draw_heat_map(canvas, found, value_label="arrows", x="to box", y="from box", square=True)
    but = f" (nearly {result.nearly})" if result.nearly != result.kind else ""
    canvas.set_title(f"{result.kind}{but}")


def plot_tan_tree(result: TanTree, canvas: Canvas, *, min_weight: float | None = None, top: int | None = None) -> None:
    """The words, with an arrow from each word's best parent: of `min_weight`, or the `top` strongest.

    Where neither is told, the strongest arrows of as many words as can be named.
    """
    if min_weight is not None and not 0 <= check_float("min_weight", min_weight) <= 1:
        raise BNetError("min_weight", expected="a share from 0 to 1", actual=min_weight)
    if top is not None:
        check_int("top", top)
    draw_arcs(canvas, result, min_weight, top)
    canvas.set_title(f"Best parents in slice {result.slice}, {result.head}")
    canvas.add_note(f"The tree keeps {result.mass:.1%} of the attention between words. Square: a root.")


def plot_corpus_tan(result: CorpusTan, canvas: Canvas, *, corrected: bool = True) -> None:
    """The information that two boxes share given the class; the tree's pairs framed."""
    check_choice("corrected", corrected, (True, False))
    values = (result.corrected if corrected else result.information).copy()
    np.fill_diagonal(values, np.nan)
    found = HeatMapData(values, result.boxes, result.boxes)
    what = "information given the class, nats" + (", corrected" if corrected else "")
    ax = draw_heat_map(canvas, found, value_label=what, x="box", y="box", square=True)
    for i, p in enumerate(result.parents):
        for row, column in ((i, p), (p, i)) if p >= 0 else ():
            frame_cell(canvas, ax, row, column)
    far = "" if result.divergence is None else f", {result.divergence:.3g} nats from the TAN"
    canvas.set_title(f"{result.sentences:,} sentences{far}")
    canvas.add_note("Red frames: the arrows of the tree.")


def plot_counterfactual(result: Counterfactual, canvas: Canvas, *, top: int = 20) -> None:
    """What a node would have been: bars of its states, or of the features of its mean."""
    check_int("top", top)
    if result.probabilities is not None:
        told = _axis_labels(result.labels, "state")
        found = make_labelled_array(
            result.probabilities, "state", labels=told, value_label=f"P({result.node} had it been so)"
        )
    else:
        found = make_labelled_array(
            result.mean.flatten(), "feature", value_label=f"mean of {result.node} had it been so"
        )
    plot_labelled_array(found, canvas, top=top)
    canvas.add_note(f"{result.convention}." if result.convention else "")


def plot_samples(result: Samples, canvas: Canvas, *, node: str | None = None, top: int = 20) -> None:
    """How often each state of a node was drawn; of a real node, a histogram of each of its numbers."""
    check_int("top", top)
    names = list(result.states)
    if node is None and len(names) != 1:
        raise BNetError("node", expected="one of the nodes that were drawn", actual=None, allowed=", ".join(names[:12]))
    chosen = node if node is not None else names[0]
    if chosen not in result.states:
        raise unknown_name_error("node", chosen, names)
    drawn = result.states[chosen]
    if not drawn.is_floating_point():
        named = result.labels.get(chosen)
        shares = torch.bincount(drawn.flatten().long(), minlength=len(named or ())).double() / result.n
        told = _axis_labels(named, chosen)
        plot_labelled_array(
            make_labelled_array(shares, chosen, labels=told, value_label=f"share of {result.n:,} draws"),
            canvas,
            top=top,
        )
        return
    ax = canvas.add_axes(4.2, 2.4)
    for k, values in enumerate(drawn.flatten(1).unbind(1) if drawn.dim() > 1 else [drawn]):
        colour = canvas.head_colours[k % len(canvas.head_colours)]
        name = f"{chosen}[{k}]" if drawn.dim() > 1 else chosen
        ax.hist(to_numpy(values.double()), bins="auto", histtype="step", color=colour, linewidth=1.2, label=name)
    canvas.set_axis_labels(ax, chosen, f"of {result.n:,} draws")
    if drawn.dim() > 1 and drawn[0].numel() <= 8:
        canvas.add_legend(ax)


def plot_categorical(result: Categorical, canvas: Canvas, *, labels: object = None, top: int = 20) -> None:
    """The shares of the states; a row for each state of the open choices, where there are such."""
    probabilities = result.probs.detach().flatten(0, -2) if result.probs.dim() > 1 else result.probs.detach()
    axes = ("state",) if probabilities.dim() == 1 else ("choice", "state")
    plot_labelled_array(
        make_labelled_array(probabilities, axes, labels=_axis_labels(labels, "state"), value_label="probability"),
        canvas,
        top=top,
    )


def plot_distribution(result: Distribution, canvas: Canvas, *, labels: object = None, top: int = 20) -> None:
    """The mean of each number of a real node, with its deviation; a row for each state of the open choices."""
    try:
        mean, spread = result.mean.detach(), result.variance.detach().sqrt()
    except NotImplementedError:
        raise BNetError("distribution", expected="one with a mean and a variance", actual=result) from None
    event, batch = tuple(result.event_shape), tuple(result.batch_shape)
    shape = event if not batch and len(event) == 2 else (-1,) if not batch else (math.prod(batch), -1)
    axes = ("row", "column") if not batch and len(event) == 2 else ("choice", "feature")[-len(shape) :]
    random = bool((spread > 0).any())
    error = spread.reshape(shape) if random else None
    told = _axis_labels(labels, axes[-1])
    plot_labelled_array(
        make_labelled_array(
            mean.reshape(shape), axes, labels=told, error=error, value_label="mean" if random else "value"
        ),
        canvas,
        top=top,
    )
    canvas.add_note("Intervals: a standard deviation to each side." if random else "")


def _axis_labels(labels: object, axis: str) -> dict[str, object] | None:
    """Labels as a table takes them."""
    return None if labels is None else {axis: labels}


# arrows over words


def propagate_flow(attention: FloatArray, weights: FloatArray, word: int) -> tuple[FloatArray, FloatArray]:
    """The chain from one word down: `mass[state, word]`, first state first, and `flows[slice, word, word read]`."""
    states, slices, n, _ = attention.shape
    mass, flows = np.zeros((slices + 1, n)), np.zeros((slices, n, n))
    for s in range(states):
        at = np.zeros(n)
        at[word] = weights[s]
        mass[slices] += at
        for t in reversed(range(slices)):
            flows[t] += at[:, None] * attention[s, t]
            at = at @ attention[s, t]
            mass[t] += at
    return mass, flows


def draw_flow(canvas: Canvas, result: Reads, word: int, path: Sequence[int], min_weight: float | None) -> None:
    """What a word reads, slice below slice, as ribbons as thick as their share; the most probable path in red."""
    tokens, last = result.tokens, len(result.slices)
    mass, flows = propagate_flow(to_numpy(result.chain), to_numpy(result.weights), word)
    drawn = select_flows(mass, flows, path, min_weight)
    ends = np.zeros(mass.shape, dtype=bool)
    ends[1:] |= drawn.any(2)
    ends[:-1] |= drawn.any(1)
    rows = sorted({*np.flatnonzero(ends.any(0)).tolist(), *path})
    row = {i: k for k, i in enumerate(rows)}
    side = tick_label_width([tokens[i] for i in rows]) + 0.35
    each = min(1.6, max(0.5, (PAGE_WIDTH - 2 * side) / last))
    bar = 0.035 / each
    ax = canvas.add_axes(2 * side + each * last, min(7.5, 0.34 * len(rows) + 1.0))
    for t in range(last):
        draw_ribbons(canvas, ax, t, bar, flows[t] * drawn[t], mass, rows)
    for level, i in np.argwhere(ends):
        block = _make_block(level, bar, row[i], MAX_BLOCK_HEIGHT * mass[level, i], canvas.colours["ink"])
        ax.add_patch(block).set_gid(f"block_{level}_{i}")
    red: dict[str, Any] = {"color": canvas.colours["q"], "zorder": 4}
    for k, (i, j) in enumerate(itertools.pairwise(path)):
        level = last - k
        ax.add_patch(_make_path_line(level - bar, row[i], level - 1 + bar, row[j], canvas.colours["q"]))
    ax.plot(range(last, -1, -1), [row[i] for i in path], "o", markersize=3, gid="path", **red)
    for k in range(len(rows)):
        ax.axhline(k, color=canvas.colours["line"], linewidth=0.5, zorder=0)
    _draw_words(canvas, ax, result, mass[0], rows, word)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_xlim(-0.12, last + 0.12)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_yticks([])
    ax.set_xticks([t + 0.5 for t in range(last)], labels=[f"slice {t}" for t in result.slices], fontfamily=BASE_FONT)
    ax.tick_params(length=0)
    hidden = (flows > 0) & ~drawn
    if hidden.any():
        most = float((flows * hidden).sum((1, 2)).max())
        gone = len(tokens) - len(rows)
        words = f" and {gone} words without any other" if gone else ""
        greatest = format_fraction(float((flows * hidden).max()))
        left = f"{int(hidden.sum()):,} flows{words}, none above {greatest}, at most {100 * most:.2g}% of a slice"
        canvas.add_note(f"Left out: {left}.")


def format_fraction(value: float) -> str:
    """A share in two decimals, or where these say nothing in two digits.

    >>> format_fraction(0.256), format_fraction(0.00234), format_fraction(0.0000312)
    ('0.26', '0.0023', '3.1e-05')
    """
    return f"{value:.2f}" if value >= 0.0995 or value == 0 else f"{value:.2g}"


def select_flows(
    mass: FloatArray, flows: FloatArray, path: Sequence[int], min_weight: float | None
) -> NDArray[np.bool_]:
    """Which flows are drawn: those of at least so much; if that is not told, the strongest that a page bears.

    These are between the words of the path and those that are read most in some slice.
    """
    if min_weight is not None:
        return (flows >= min_weight) & (flows > 0)
    words = np.zeros(flows.shape[1], dtype=bool)
    words[list(path)] = True
    for i in np.argsort(-mass[:-1].max(0), kind="stable"):
        if words.sum() >= MAX_FLOW_WORDS:
            break
        words[i] = True
    among = np.where(words[:, None] & words, flows, 0.0)
    order = np.argsort(-among, axis=None, kind="stable")[:MAX_FLOWS]
    drawn = np.zeros(flows.shape, dtype=bool)
    drawn.flat[order] = True
    return drawn & (among >= MIN_FLOW)


def draw_ribbons(
    canvas: Canvas, ax: Axes, level: int, bar: float, flows: FloatArray, mass: FloatArray, rows: Sequence[int]
) -> None:
    """The flows of one slice, stacked at both ends in the order of the words that they come from and go to."""
    thick = MAX_BLOCK_HEIGHT * flows[np.ix_(rows, rows)]
    right = _stack_offsets(mass[level + 1, rows], thick)
    left = _stack_offsets(mass[level, rows], thick.T).T
    for a, b in np.argwhere(thick > 0):
        i, j = rows[a], rows[b]
        ends = (level + 1 - bar, right[a, b], level + bar, left[a, b])
        ribbon = _make_ribbon(*ends, thick[a, b], canvas.colours["k"], float(flows[i, j]))
        ax.add_patch(ribbon).set_gid(f"flow_{level}_{i}_{j}")


def _stack_offsets(mass: FloatArray, thickness: FloatArray) -> FloatArray:
    """Where each ribbon of each row begins: one below the other, about the row's middle."""
    tops = np.arange(len(mass)) - MAX_BLOCK_HEIGHT * mass / 2
    return np.cumsum(np.column_stack([tops, thickness]), 1)[:, :-1]


def _draw_words(
    canvas: Canvas, ax: Axes, result: Reads, word_weights: FloatArray, rows: Sequence[int], word: int
) -> None:
    """The words at the left with the share that is read of each; the word that reads at the right."""
    shares = [format_fraction(float(word_weights[i])) if word_weights[i] > 0 else "–" for i in rows]
    wide = max(28.0, 12 + max(text_width(share, SMALL_FONT_SIZE + 0.5) for share in shares))
    for k, (i, share) in enumerate(zip(rows, shares, strict=True)):
        (line,), fonts = canvas.format_texts([result.tokens[i]], 14)
        style: dict[str, Any] = {"va": "center_baseline", "fontfamily": fonts, "fontsize": SMALL_FONT_SIZE + 0.5}
        dim = canvas.colours["ink" if word_weights[i] >= 0.005 else "grey"]
        around: dict[str, Any] = {"textcoords": "offset points", "parse_math": False, **style}
        ax.annotate(line, (0, k), (-wide, 0), ha="right", color=dim, **around)
        ax.annotate(share, (0, k), (-6, 0), ha="right", color=dim, **around)
        if i == word:
            ax.annotate(line, (len(result.slices), k), (6, 0), ha="left", color=canvas.colours["q"], **around)


def _make_block(level: int, bar: float, y: float, height: float, colour: str) -> PathPatch:
    left, right, top, foot = level - bar, level + bar, y - height / 2, y + height / 2
    corners = [(left, top), (right, top), (right, foot), (left, foot)]
    return PathPatch(Outline(corners), facecolor=colour, edgecolor=colour, linewidth=0.4, zorder=3)


def _bezier_points(x0: float, y0: float, x1: float, y1: float) -> list[tuple[float, float]]:
    """A curve from (x0, y0) to (x1, y1), level at both ends: the points that Bézier's has."""
    middle = (x0 + x1) / 2
    return [(x0, y0), (middle, y0), (middle, y1), (x1, y1)]


def _make_ribbon(x0: float, y0: float, x1: float, y1: float, thickness: float, colour: str, weight: float) -> PathPatch:
    """A band of which these are the upper ends."""
    there, back = _bezier_points(x0, y0, x1, y1), _bezier_points(x1, y1 + thickness, x0, y0 + thickness)
    turns = [Outline.MOVETO, *[Outline.CURVE4] * 3, Outline.LINETO, *[Outline.CURVE4] * 3, Outline.CLOSEPOLY]
    alpha = 0.25 + 0.35 * weight
    path = Outline([*there, *back, there[0]], turns)
    return PathPatch(path, facecolor=colour, edgecolor=colour, alpha=alpha, linewidth=0.4, zorder=1)


def _make_path_line(x0: float, y0: float, x1: float, y1: float, colour: str) -> PathPatch:
    path = Outline(_bezier_points(x0, y0, x1, y1), [Outline.MOVETO, *[Outline.CURVE4] * 3])
    return PathPatch(path, facecolor="none", edgecolor=colour, linewidth=1.4, zorder=4)


def prune_tree(canvas: Canvas, tree: TanTree, min_weight: float | None, top: int | None) -> TanTree:
    """The arrows that are drawn and the words at their ends, all where there is room; what is left out is told."""
    parents, weights = tree.parents, tree.weights
    arrows = [i for i, parent in enumerate(parents) if parent >= 0]
    order = sorted(arrows, key=lambda i: (-weights[i], i))
    if min_weight is not None:
        order = [i for i in order if weights[i] >= min_weight]
    if top is not None:
        order = order[:top]
    drawn: set[int] = set()
    rows: set[int] = set()
    for i in order:
        if top is None and min_weight is None and len(rows | {i, parents[i]}) > MAX_TREE_WORDS < len(parents):
            break
        drawn.add(i)
        rows |= {i, parents[i]}
    if len(drawn) == len(arrows):
        return tree
    kept = sorted(rows) or range(len(parents))
    row = {i: k for k, i in enumerate(kept)}
    gone = len(parents) - len(kept)
    words = f" and {gone} words without any other" if gone else ""
    most = max(weights[i] for i in arrows if i not in drawn)
    canvas.add_note(f"Left out: {len(arrows) - len(drawn)} arrows{words}, none stronger than {format_fraction(most)}.")
    found = [row[parents[i]] if i in drawn else -1 if parents[i] < 0 else HIDDEN_PARENT for i in kept]
    strengths, said = tuple(weights[i] for i in kept), tuple(tree.tokens[i] for i in kept)
    return replace(tree, parents=tuple(found), weights=strengths, tokens=said)


def draw_arcs(canvas: Canvas, result: TanTree, min_weight: float | None, top: int | None) -> None:
    """The words in a row, and over them an arrow from each word's best parent, as thick as it is read."""
    tree = prune_tree(canvas, result, min_weight, top)
    parents, tokens = tree.parents, tree.tokens
    n = len(tokens)
    span = max((abs(i - p) for i, p in enumerate(parents) if p >= 0), default=1)
    wide = max(3.0, min(PAGE_WIDTH, 0.55 * n + 0.4))
    ax = canvas.add_axes(wide, min(4.0, 0.75 + tick_label_width(tokens) + 0.16 * span))
    across, _ = canvas.panel_size(ax, (wide - 0.3, 0.0))
    for i, (parent, share) in enumerate(zip(parents, tree.weights, strict=True)):
        if parent == HIDDEN_PARENT:
            continue
        if parent < 0:
            ax.plot([i], [0.0], marker="s", markersize=4.5, color=canvas.colours["q"], zorder=3, clip_on=False)
            continue
        bend = (-1 if parent < i else 1) * (0.5 if abs(parent - i) > 1 else 0.9)
        style: dict[str, Any] = {"color": canvas.colours["accent"], "alpha": 0.35 + 0.65 * share}
        style |= {"connectionstyle": f"arc3,rad={bend}", "arrowstyle": "-|>,head_length=4,head_width=2"}
        style |= {"linewidth": 0.6 + 2.4 * share, "shrinkA": 3, "shrinkB": 4, "gid": f"arc_{parent}_{i}"}
        ax.add_patch(FancyArrowPatch((parent, 0), (i, 0), **style))
    ax.plot(range(n), [0] * n, linestyle="", marker="o", markersize=3, color=canvas.colours["ink"])
    ax.set_xlim(-0.6, n - 0.4)
    ax.set_ylim(-0.3, 0.25 * span + 0.35)
    ax.set_aspect("equal")  # an arc is as high as it is wide
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.set_yticks([])
    canvas.set_tick_labels(ax, "x", tokens, across)
    ax.tick_params(length=0)
