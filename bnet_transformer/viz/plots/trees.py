"""Trees: the words in a row, and an arrow over them from each word's best parent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from bnet_transformer.viz.plots.canvas import PAGE, Canvas
from bnet_transformer.viz.plots.flow import share_of
from bnet_transformer.viz.plots.heat import room

WORDS = 40  # more words than these cannot all be named on a page
LEFT_OUT = -2  # the parent of a word whose arrow is not drawn


def thinned(
    canvas: Canvas,
    parents: Sequence[int],
    weights: Sequence[float],
    tokens: Sequence[str],
    min_weight: float | None,
    top: int | None,
) -> tuple[list[int], list[float], list[str]]:
    """The arrows that are drawn and the words at their ends, all where there is room; what is left out is told."""
    arrows = [i for i, parent in enumerate(parents) if parent >= 0]
    order = sorted(arrows, key=lambda i: (-weights[i], i))
    if min_weight is not None:
        order = [i for i in order if weights[i] >= min_weight]
    if top is not None:
        order = order[:top]
    elif min_weight is None and len(tokens) > WORDS:
        order = order[: nameable([(i, parents[i]) for i in order])]
    drawn = set(order)
    if len(drawn) == len(arrows):
        return list(parents), list(weights), list(tokens)
    rows = sorted(drawn | {parents[i] for i in drawn}) or list(range(len(tokens)))
    row = {i: k for k, i in enumerate(rows)}
    gone = len(tokens) - len(rows)
    words = f" and {gone} words without any other" if gone else ""
    most = max(weights[i] for i in arrows if i not in drawn)
    canvas.note(f"Left out: {len(arrows) - len(drawn)} arrows{words}, none stronger than {share_of(most)}.")
    found = [row[parents[i]] if i in drawn else -1 if parents[i] < 0 else LEFT_OUT for i in rows]
    return found, [weights[i] for i in rows], [tokens[i] for i in rows]


def nameable(arrows: Sequence[tuple[int, int]]) -> int:
    """How many of some arrows, the first ones, lie between as many words as can be named."""
    seen: set[int] = set()
    for k, ends in enumerate(arrows):
        seen |= {*ends}
        if len(seen) > WORDS:
            return k
    return len(arrows)


def arcs(
    canvas: Canvas,
    parents: Sequence[int],
    weights: Sequence[float],
    tokens: Sequence[str],
    min_weight: float | None = None,
    top: int | None = None,
) -> Axes:
    """The words in a row, and over them an arrow from each word's best parent, as thick as it is read."""
    parents, weights, tokens = thinned(canvas, parents, weights, tokens, min_weight, top)
    n = len(tokens)
    span = max((abs(i - p) for i, p in enumerate(parents) if p >= 0), default=1)
    wide = max(3.0, min(PAGE, 0.55 * n + 0.4))
    ax = canvas.axes(wide, min(4.0, 0.75 + room(tokens) + 0.16 * span))
    across = canvas.size(ax)[0] if canvas.given is not None else wide - 0.3
    for i, (parent, share) in enumerate(zip(parents, weights, strict=True)):
        if parent == LEFT_OUT:
            continue
        if parent < 0:
            ax.plot([i], [0.0], marker="s", markersize=4.5, color=canvas.colours["q"], zorder=3, clip_on=False)
            continue
        bend = (-1 if parent < i else 1) * (0.5 if abs(parent - i) > 1 else 0.9)
        style: dict[str, Any] = {"color": canvas.colours["accent"], "alpha": 0.35 + 0.65 * share}
        arrow = FancyArrowPatch(
            (parent, 0),
            (i, 0),
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>,head_length=4,head_width=2",
            linewidth=0.6 + 2.4 * share,
            shrinkA=3,
            shrinkB=4,
            gid=f"arc_{parent}_{i}",
            **style,
        )
        ax.add_patch(arrow)
    ax.plot(range(n), [0] * n, linestyle="", marker="o", markersize=3, color=canvas.colours["ink"])
    ax.set_xlim(-0.6, n - 0.4)
    ax.set_ylim(-0.3, 0.25 * span + 0.35)
    ax.set_aspect("equal")  # an arc is as high as it is wide
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.set_yticks([])
    canvas.words(ax, "x", tokens, across)
    ax.tick_params(length=0)
    return ax
