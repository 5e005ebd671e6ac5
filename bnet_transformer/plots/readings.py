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
from bnet_transformer.figures.fonts import BASE, width
from bnet_transformer.figures.labels import shown
from bnet_transformer.inference import Samples
from bnet_transformer.interventions.counterfactual import Counterfactual
from bnet_transformer.plots.canvas import PAGE, SMALL, Canvas
from bnet_transformer.plots.heat import Map, Numbers, framed, heat_map, room, up_to
from bnet_transformer.plots.tables import table, table_of
from bnet_transformer.tpm.arrays import to_numpy

SHOWN = ("matrix", "flow", "entropy")
TALL = 0.86  # the height of the whole mass, in rows
FLOWS, WORDS = 300, 32  # no more than these are drawn, unless asked for
FAINT = 1e-3  # flows below it are drawn only if asked for
NAMES = 40  # more words of a tree than these cannot all be named on a page
LEFT_OUT = -2  # the parent of a word whose arrow is not drawn


def reads(
    result: Reads, canvas: Canvas, *, show: str | None = None, word: int | None = None, least: float | None = None
) -> None:
    """`P(source word | output word)`; the flow from one output `word` over the slices; or entropies.

    Of the flows those of at least `least` are drawn; where none is told, the strongest that a page bears.
    """
    show = show if show is not None else "flow" if word is not None else "matrix"
    check_choice("show", show, SHOWN)
    n = len(result.tokens)
    if word is not None and show != "flow":
        raise BNetError("word", expected="a word with show='flow' alone", actual=word)
    if least is not None and not 0 <= check_float("least", least) < 1:
        raise BNetError("least", expected="a share from 0 to 1", actual=least)
    where = f"slice {result.slices[0]}" if len(result.slices) == 1 else f"slices {result.slices[0]}–{result.slices[-1]}"
    told = f"Chain of attention TPMs, residual share {result.residual:g}, {result.head}; no posterior of the bnet."
    if show == "matrix":
        capacity = result.method == "flow"
        what = "greatest flow" if capacity else "P(source | output)"
        values = to_numpy(result.matrix.masked_fill(~reached(result), torch.nan))
        found = Map(values, result.tokens, result.tokens)
        limits = None if capacity else up_to([values])
        heat_map(canvas, found, what=what, x="source word", y="output word", limits=limits, square=True)
        canvas.headline(f"What is read over {where}")
    elif show == "entropy":
        found = Map(to_numpy(result.entropies), tuple(map(str, result.slices)), result.tokens)
        heat_map(canvas, found, what="entropy of P(j | i), nats", x="word i that reads", y="slice")
        return
    else:
        at = n - 1 if word is None else check_int("word", word, minimum=0)
        if at >= n:
            raise BNetError("word", expected=f"a word from 0 to {n - 1}", actual=word)
        best = result.paths(at)[0]
        canvas.note(f"{told} Red: the most probable path ({share_of(best.probability)}).")
        flow(canvas, result, at, best.words, least)
        canvas.headline(f"What '{shown(result.tokens[at], 14)}' reads over {where}")
        return
    canvas.note(told)


def reached(result: Reads) -> Tensor:
    """`[word, word]`: whether a chain of arrows (and of the residual share) leads from output i to source j."""
    own = torch.eye(len(result.tokens), dtype=torch.bool)
    found = own
    for step in result.readable.flip(0):
        found = found.double() @ (step | own if result.residual > 0 else step).double() > 0
    return found


def tan(result: Tan, canvas: Canvas) -> None:
    """How many arrows lead from box to box, the class first."""
    boxes = [result.class_box, *(box for box in result.quotient.boxes if box != result.class_box)]
    place = np.array([boxes.index(box) for box in result.quotient.boxes])
    counts = np.full((len(boxes), len(boxes)), np.nan)
    counts[*place[result.quotient.arrows].T] = result.quotient.counts
    found = Map(counts, tuple(boxes), tuple(boxes))
    heat_map(canvas, found, what="arrows", x="to box", y="from box", square=True)
    but = f" (nearly {result.nearly})" if result.nearly != result.kind else ""
    canvas.headline(f"{result.kind}{but}")


def tan_tree(result: TanTree, canvas: Canvas, *, min_weight: float | None = None, top: int | None = None) -> None:
    """The words, with an arrow from each word's best parent: of `min_weight`, or the `top` strongest.

    Where neither is told, the strongest arrows of as many words as can be named.
    """
    if min_weight is not None and not 0 <= check_float("min_weight", min_weight) <= 1:
        raise BNetError("min_weight", expected="a share from 0 to 1", actual=min_weight)
    if top is not None:
        check_int("top", top)
    arcs(canvas, result, min_weight, top)
    canvas.headline(f"Best parents in slice {result.slice}, {result.head}")
    canvas.note(f"The tree keeps {result.mass:.1%} of the attention between words. Square: a root.")


def corpus_tan(result: CorpusTan, canvas: Canvas, *, corrected: bool = True) -> None:
    """The information that two boxes share given the class; the tree's pairs framed."""
    check_choice("corrected", corrected, (True, False))
    values = (result.corrected if corrected else result.information).copy()
    np.fill_diagonal(values, np.nan)
    found = Map(values, result.boxes, result.boxes)
    what = "information given the class, nats" + (", corrected" if corrected else "")
    ax = heat_map(canvas, found, what=what, x="box", y="box", square=True)
    for i, p in enumerate(result.parents):
        for row, column in ((i, p), (p, i)) if p >= 0 else ():
            framed(canvas, ax, row, column)
    far = "" if result.divergence is None else f", {result.divergence:.3g} nats from the TAN"
    canvas.headline(f"{result.sentences:,} sentences{far}")
    canvas.note("Red frames: the arrows of the tree.")


def counterfactual(result: Counterfactual, canvas: Canvas, *, top: int = 20) -> None:
    """What a node would have been: bars of its states, or of the features of its mean."""
    check_int("top", top)
    if result.probabilities is not None:
        told = _labelled(result.labels, "state")
        found = table_of(result.probabilities, "state", labels=told, what=f"P({result.node} had it been so)")
    else:
        found = table_of(result.mean.flatten(), "feature", what=f"mean of {result.node} had it been so")
    table(found, canvas, top=top)
    canvas.note(f"{result.convention}." if result.convention else "")


def samples(result: Samples, canvas: Canvas, *, node: str | None = None, top: int = 20) -> None:
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
        told = _labelled(named, chosen)
        table(table_of(shares, chosen, labels=told, what=f"share of {result.n:,} draws"), canvas, top=top)
        return
    ax = canvas.axes(4.2, 2.4)
    for k, values in enumerate(drawn.flatten(1).unbind(1) if drawn.dim() > 1 else [drawn]):
        colour = canvas.heads[k % len(canvas.heads)]
        name = f"{chosen}[{k}]" if drawn.dim() > 1 else chosen
        ax.hist(to_numpy(values.double()), bins="auto", histtype="step", color=colour, linewidth=1.2, label=name)
    canvas.named(ax, chosen, f"of {result.n:,} draws")
    if drawn.dim() > 1 and drawn[0].numel() <= 8:
        canvas.legend(ax)


def categorical(result: Categorical, canvas: Canvas, *, labels: object = None, top: int = 20) -> None:
    """The shares of the states; a row for each state of the open choices, where there are such."""
    probabilities = result.probs.detach().flatten(0, -2) if result.probs.dim() > 1 else result.probs.detach()
    axes = ("state",) if probabilities.dim() == 1 else ("choice", "state")
    table(table_of(probabilities, axes, labels=_labelled(labels, "state"), what="probability"), canvas, top=top)


def distribution(result: Distribution, canvas: Canvas, *, labels: object = None, top: int = 20) -> None:
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
    told = _labelled(labels, axes[-1])
    table(
        table_of(mean.reshape(shape), axes, labels=told, error=error, what="mean" if random else "value"),
        canvas,
        top=top,
    )
    canvas.note("Intervals: a standard deviation to each side." if random else "")


def _labelled(labels: object, axis: str) -> dict[str, object] | None:
    """Labels as a table takes them."""
    return None if labels is None else {axis: labels}


# arrows over words


def shares_of(chain: Numbers, weights: Numbers, word: int) -> tuple[Numbers, Numbers]:
    """The chain from one word down: `mass[state, word]`, first state first, and `flows[slice, word, word read]`."""
    states, slices, n, _ = chain.shape
    mass, flows = np.zeros((slices + 1, n)), np.zeros((slices, n, n))
    for s in range(states):
        at = np.zeros(n)
        at[word] = weights[s]
        mass[slices] += at
        for t in reversed(range(slices)):
            flows[t] += at[:, None] * chain[s, t]
            at = at @ chain[s, t]
            mass[t] += at
    return mass, flows


def flow(canvas: Canvas, result: Reads, word: int, path: Sequence[int], least: float | None) -> None:
    """What a word reads, slice below slice, as ribbons as thick as their share; the most probable path in red."""
    tokens, last = result.tokens, len(result.slices)
    mass, flows = shares_of(to_numpy(result.chain), to_numpy(result.weights), word)
    drawn = drawn_of(mass, flows, path, least)
    ends = np.zeros(mass.shape, dtype=bool)
    ends[1:] |= drawn.any(2)
    ends[:-1] |= drawn.any(1)
    rows = sorted({*np.flatnonzero(ends.any(0)).tolist(), *path})
    row = {i: k for k, i in enumerate(rows)}
    side = room([tokens[i] for i in rows]) + 0.35
    each = min(1.6, max(0.5, (PAGE - 2 * side) / last))
    bar = 0.035 / each
    ax = canvas.axes(2 * side + each * last, min(7.5, 0.34 * len(rows) + 1.0))
    for t in range(last):
        ribbons(canvas, ax, t, bar, flows[t] * drawn[t], mass, rows)
    for level, i in np.argwhere(ends):
        block = _block(level, bar, row[i], TALL * mass[level, i], canvas.colours["ink"])
        ax.add_patch(block).set_gid(f"block_{level}_{i}")
    red: dict[str, Any] = {"color": canvas.colours["q"], "zorder": 4}
    for k, (i, j) in enumerate(itertools.pairwise(path)):
        level = last - k
        ax.add_patch(_thread(level - bar, row[i], level - 1 + bar, row[j], canvas.colours["q"]))
    ax.plot(range(last, -1, -1), [row[i] for i in path], "o", markersize=3, gid="path", **red)
    for k in range(len(rows)):
        ax.axhline(k, color=canvas.colours["line"], linewidth=0.5, zorder=0)
    _names(canvas, ax, result, mass[0], rows, word)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_xlim(-0.12, last + 0.12)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_yticks([])
    ax.set_xticks([t + 0.5 for t in range(last)], labels=[f"slice {t}" for t in result.slices], fontfamily=BASE)
    ax.tick_params(length=0)
    hidden = (flows > 0) & ~drawn
    if hidden.any():
        most = float((flows * hidden).sum((1, 2)).max())
        gone = len(tokens) - len(rows)
        words = f" and {gone} words without any other" if gone else ""
        greatest = share_of(float((flows * hidden).max()))
        left = f"{int(hidden.sum()):,} flows{words}, none above {greatest}, at most {100 * most:.2g}% of a slice"
        canvas.note(f"Left out: {left}.")


def share_of(value: float) -> str:
    """A share in two decimals, or where these say nothing in two digits.

    >>> share_of(0.256), share_of(0.00234), share_of(0.0000312)
    ('0.26', '0.0023', '3.1e-05')
    """
    return f"{value:.2f}" if value >= 0.0995 or value == 0 else f"{value:.2g}"


def drawn_of(mass: Numbers, flows: Numbers, path: Sequence[int], least: float | None) -> NDArray[np.bool_]:
    """Which flows are drawn: those of at least so much; if that is not told, the strongest that a page bears.

    These are between the words of the path and those that are read most in some slice.
    """
    if least is not None:
        return (flows >= least) & (flows > 0)
    words = np.zeros(flows.shape[1], dtype=bool)
    words[list(path)] = True
    for i in np.argsort(-mass[:-1].max(0), kind="stable"):
        if words.sum() >= WORDS:
            break
        words[i] = True
    among = np.where(words[:, None] & words, flows, 0.0)
    order = np.argsort(-among, axis=None, kind="stable")[:FLOWS]
    drawn = np.zeros(flows.shape, dtype=bool)
    drawn.flat[order] = True
    return drawn & (among >= FAINT)


def ribbons(
    canvas: Canvas, ax: Axes, level: int, bar: float, flows: Numbers, mass: Numbers, rows: Sequence[int]
) -> None:
    """The flows of one slice, stacked at both ends in the order of the words that they come from and go to."""
    thick = TALL * flows[np.ix_(rows, rows)]
    right = _stacked(mass[level + 1, rows], thick)
    left = _stacked(mass[level, rows], thick.T).T
    for a, b in np.argwhere(thick > 0):
        i, j = rows[a], rows[b]
        ends = (level + 1 - bar, right[a, b], level + bar, left[a, b])
        ribbon = _ribbon(*ends, thick[a, b], canvas.colours["k"], float(flows[i, j]))
        ax.add_patch(ribbon).set_gid(f"flow_{level}_{i}_{j}")


def _stacked(mass: Numbers, thick: Numbers) -> Numbers:
    """Where each ribbon of each row begins: one below the other, about the row's middle."""
    tops = np.arange(len(mass)) - TALL * mass / 2
    return np.cumsum(np.column_stack([tops, thick]), 1)[:, :-1]


def _names(canvas: Canvas, ax: Axes, result: Reads, read: Numbers, rows: Sequence[int], word: int) -> None:
    """The words at the left with the share that is read of each; the word that reads at the right."""
    shares = [share_of(float(read[i])) if read[i] > 0 else "–" for i in rows]
    wide = max(28.0, 12 + max(width(share, SMALL + 0.5) for share in shares))
    for k, (i, share) in enumerate(zip(rows, shares, strict=True)):
        (line,), fonts = canvas.lines([result.tokens[i]], 14)
        style: dict[str, Any] = {"va": "center_baseline", "fontfamily": fonts, "fontsize": SMALL + 0.5}
        dim = canvas.colours["ink" if read[i] >= 0.005 else "grey"]
        around: dict[str, Any] = {"textcoords": "offset points", "parse_math": False, **style}
        ax.annotate(line, (0, k), (-wide, 0), ha="right", color=dim, **around)
        ax.annotate(share, (0, k), (-6, 0), ha="right", color=dim, **around)
        if i == word:
            ax.annotate(line, (len(result.slices), k), (6, 0), ha="left", color=canvas.colours["q"], **around)


def _block(level: int, bar: float, at: float, tall: float, colour: str) -> PathPatch:
    left, right, top, foot = level - bar, level + bar, at - tall / 2, at + tall / 2
    corners = [(left, top), (right, top), (right, foot), (left, foot)]
    return PathPatch(Outline(corners), facecolor=colour, edgecolor=colour, linewidth=0.4, zorder=3)


def _bend(x0: float, y0: float, x1: float, y1: float) -> list[tuple[float, float]]:
    """A curve from (x0, y0) to (x1, y1), level at both ends: the points that Bézier's has."""
    middle = (x0 + x1) / 2
    return [(x0, y0), (middle, y0), (middle, y1), (x1, y1)]


def _ribbon(x0: float, y0: float, x1: float, y1: float, tall: float, colour: str, share: float) -> PathPatch:
    """A band of which these are the upper ends."""
    there, back = _bend(x0, y0, x1, y1), _bend(x1, y1 + tall, x0, y0 + tall)
    turns = [Outline.MOVETO, *[Outline.CURVE4] * 3, Outline.LINETO, *[Outline.CURVE4] * 3, Outline.CLOSEPOLY]
    alpha = 0.25 + 0.35 * share
    path = Outline([*there, *back, there[0]], turns)
    return PathPatch(path, facecolor=colour, edgecolor=colour, alpha=alpha, linewidth=0.4, zorder=1)


def _thread(x0: float, y0: float, x1: float, y1: float, colour: str) -> PathPatch:
    path = Outline(_bend(x0, y0, x1, y1), [Outline.MOVETO, *[Outline.CURVE4] * 3])
    return PathPatch(path, facecolor="none", edgecolor=colour, linewidth=1.4, zorder=4)


def thinned(canvas: Canvas, tree: TanTree, min_weight: float | None, top: int | None) -> TanTree:
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
        if top is None and min_weight is None and len(rows | {i, parents[i]}) > NAMES < len(parents):
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
    canvas.note(f"Left out: {len(arrows) - len(drawn)} arrows{words}, none stronger than {share_of(most)}.")
    found = [row[parents[i]] if i in drawn else -1 if parents[i] < 0 else LEFT_OUT for i in kept]
    strengths, said = tuple(weights[i] for i in kept), tuple(tree.tokens[i] for i in kept)
    return replace(tree, parents=tuple(found), weights=strengths, tokens=said)


def arcs(canvas: Canvas, result: TanTree, min_weight: float | None, top: int | None) -> None:
    """The words in a row, and over them an arrow from each word's best parent, as thick as it is read."""
    tree = thinned(canvas, result, min_weight, top)
    parents, tokens = tree.parents, tree.tokens
    n = len(tokens)
    span = max((abs(i - p) for i, p in enumerate(parents) if p >= 0), default=1)
    wide = max(3.0, min(PAGE, 0.55 * n + 0.4))
    ax = canvas.axes(wide, min(4.0, 0.75 + room(tokens) + 0.16 * span))
    across, _ = canvas.size(ax, (wide - 0.3, 0.0))
    for i, (parent, share) in enumerate(zip(parents, tree.weights, strict=True)):
        if parent == LEFT_OUT:
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
    canvas.words(ax, "x", tokens, across)
    ax.tick_params(length=0)
