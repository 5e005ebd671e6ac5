"""Plots of tree-augmented naive Bayes (TAN): of one slice, of the best parents of words, and of a corpus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.patches import FancyArrowPatch

from bnet_transformer._core.checks import check_choice, check_float, check_int
from bnet_transformer.attention import CorpusTan, Tan, TanTree
from bnet_transformer.errors import BNetError
from bnet_transformer.plots.canvas import Canvas
from bnet_transformer.plots.heat_maps import HeatMapData, draw_heat_map, frame_cell, tick_label_width
from bnet_transformer.plots.numbers import format_digits
from bnet_transformer.plots.rollout import format_fraction

MAX_TREE_WORDS = 40  # by default, arrows between at most this number of words are drawn, so that all can be labelled
HIDDEN_PARENT = -2  # the parent of a word whose arrow is not drawn; the parent of a root is -1


def plot_tan(result: Tan, canvas: Canvas) -> None:
    """Plot the number of arrows between boxes; the class is the first box."""
    boxes = [result.class_box, *(box for box in result.quotient.boxes if box != result.class_box)]
    positions = np.array([boxes.index(box) for box in result.quotient.boxes])
    counts = np.full((len(boxes), len(boxes)), np.nan)
    counts[*positions[result.quotient.arrows].T] = result.quotient.counts
    data = HeatMapData(counts, tuple(boxes), tuple(boxes))
    draw_heat_map(canvas, data, value_label="arrows", x="to box", y="from box", square=True)
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
    ax = draw_heat_map(canvas, data, value_label=value_label, x="box", y="box", square=True)
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
    width = max(3.0, min(canvas.page_width, 0.55 * n + 0.4))
    ax = canvas.add_axes(width, min(4.0, 0.75 + tick_label_width(tokens) + 0.16 * span))
    panel_width, _ = canvas.panel_size(ax, (width - 0.3, 0.0))
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
    canvas.set_tick_labels(ax, "x", tokens, panel_width)
    ax.tick_params(length=0)
