"""Plots of answers: reading paths, TANs, counterfactuals, draws, distributions."""

from __future__ import annotations

import numpy as np
import torch
from torch.distributions import Categorical

from bnet_transformer.errors import BNetError, number, one_of, unknown, whole
from bnet_transformer.inference import CorpusTan, Counterfactual, Reads, Samples, Tan, TanTree
from bnet_transformer.viz.plots.bars import Series, bars, top_of
from bnet_transformer.viz.plots.canvas import Canvas
from bnet_transformer.viz.plots.flow import arcs, flow
from bnet_transformer.viz.plots.heat import Map, framed, heat_map, up_to
from bnet_transformer.viz.plots.table import table_of
from bnet_transformer.viz.plots.tables import table
from bnet_transformer.viz.plots.words import shown

SHOWN = ("matrix", "flow", "entropy")


def reads(
    result: Reads, canvas: Canvas, *, show: str | None = None, word: int | None = None, least: float = 0.01
) -> None:
    """`P(source word | output word)`; the flow from one output `word` over the slices; or entropies."""
    show = show if show is not None else "flow" if word is not None else "matrix"
    one_of("show", show, SHOWN)
    n = len(result.tokens)
    if word is not None and show != "flow":
        raise BNetError("word", expected="a word with show='flow' alone", got=word)
    if not 0 <= number("least", least) < 1:
        raise BNetError("least", expected="a share from 0 to 1", got=least)
    where = f"slice {result.slices[0]}" if len(result.slices) == 1 else f"slices {result.slices[0]}–{result.slices[-1]}"
    told = f"Chain of attention TPMs, residual share {result.residual:g}, {result.head}; no posterior of the bnet."
    if show == "matrix":
        capacity = result.method == "flow"
        what = "greatest flow" if capacity else "P(source | output)"
        values = torch.where(result.matrix == 0, torch.nan, result.matrix).numpy()
        found = Map(values, result.tokens, result.tokens)
        limits = None if capacity else up_to([values])
        ax = heat_map(canvas, found, what=what, x="source word", y="output word", limits=limits, square=True)
        canvas.headline(f"What is read over {where}", ax)
    elif show == "entropy":
        found = Map(result.entropies.numpy(), tuple(map(str, result.slices)), result.tokens)
        ax = heat_map(canvas, found, what="entropy of P(j | i), nats", x="word i that reads", y="slice")
        canvas.headline("", ax)
        return
    else:
        at = n - 1 if word is None else whole("word", word, least=0)
        if at >= n:
            raise BNetError("word", expected=f"a word from 0 to {n - 1}", got=word)
        best = result.paths(at)[0]
        chain, weights = result.chain.numpy(), result.weights.numpy()
        said = f"{told} Red: the most probable path ({best.probability:.2f})."
        ax = flow(canvas, chain, weights, result.tokens, result.slices, at, best.words, said, least)
        canvas.headline(f"What '{shown(result.tokens[at], 14)}' reads over {where}", ax)
        return
    canvas.note(told)


def tan(result: Tan, canvas: Canvas) -> None:
    """How many arrows lead from box to box, the class first."""
    boxes = [result.class_box, *(box for box in result.quotient.boxes if box != result.class_box)]
    place = {box: k for k, box in enumerate(boxes)}
    counts = np.full((len(boxes), len(boxes)), np.nan)
    for (i, j), count in zip(result.quotient.arrows.tolist(), result.quotient.counts.tolist(), strict=True):
        counts[place[result.quotient.boxes[i]], place[result.quotient.boxes[j]]] = count
    found = Map(counts, tuple(boxes), tuple(boxes))
    ax = heat_map(canvas, found, what="arrows", x="to box", y="from box", square=True)
    but = f" (nearly {result.nearly})" if result.nearly != result.kind else ""
    canvas.headline(f"{result.kind}{but}", ax)


def tan_tree(result: TanTree, canvas: Canvas) -> None:
    """The words, with an arrow from each word's best parent."""
    ax = arcs(canvas, result.parents, result.weights, result.tokens)
    canvas.headline(f"Best parents in slice {result.slice}, {result.head}", ax)
    canvas.note(f"The tree keeps {result.mass:.1%} of the attention between words. Square: a root.")


def corpus_tan(result: CorpusTan, canvas: Canvas, *, corrected: bool = True) -> None:
    """The information that two boxes share given the class; the tree's pairs framed."""
    one_of("corrected", corrected, (True, False))
    values = (result.corrected if corrected else result.information).copy()
    np.fill_diagonal(values, np.nan)
    found = Map(values, result.boxes, result.boxes)
    what = "information given the class, nats" + (", corrected" if corrected else "")
    ax = heat_map(canvas, found, what=what, x="box", y="box", square=True)
    for i, p in enumerate(result.parents):
        for row, column in ((i, p), (p, i)) if p >= 0 else ():
            framed(canvas, ax, row, column)
    far = "" if result.divergence is None else f", {result.divergence:.3g} nats from the TAN"
    canvas.headline(f"{result.sentences:,} sentences{far}", ax)
    canvas.note("Red frames: the arrows of the tree.")


def counterfactual(result: Counterfactual, canvas: Canvas, *, top: int = 20) -> None:
    """What a node would have been: bars of its states, or of the features of its mean."""
    whole("top", top)
    if result.probabilities is not None:
        found = table_of(result.probabilities, "state", what=f"P({result.node} had it been so)")
    else:
        found = table_of(result.mean.flatten(), "feature", what=f"mean of {result.node} had it been so")
    table(found, canvas, top=top)
    canvas.note(f"{result.convention}." if result.convention else "")


def samples(result: Samples, canvas: Canvas, *, node: str | None = None, top: int = 20) -> None:
    """How often each state of a node was drawn; of a real node, a histogram of each of its numbers."""
    whole("top", top)
    names = list(result.states)
    if node is None and len(names) != 1:
        raise BNetError("node", expected="one of the nodes that were drawn", got=None, allowed=", ".join(names[:12]))
    chosen = node if node is not None else names[0]
    if chosen not in result.states:
        raise unknown("node", chosen, names)
    drawn = result.states[chosen]
    if not drawn.is_floating_point():
        shares = torch.bincount(drawn.flatten().long()).double() / result.n
        series, labels, told = top_of([Series(shares.numpy())], [str(k) for k in range(len(shares))], top)
        canvas.note(told)
        ax = bars(canvas, None, series, labels, what=f"share of {result.n:,} draws", of=chosen)
        canvas.headline("", ax)
        return
    ax = canvas.axes(4.2, 2.4)
    for k, values in enumerate(drawn.flatten(1).unbind(1) if drawn.dim() > 1 else [drawn]):
        colour = canvas.heads[k % len(canvas.heads)]
        name = f"{chosen}[{k}]" if drawn.dim() > 1 else chosen
        ax.hist(values.double().numpy(), bins="auto", histtype="step", color=colour, linewidth=1.2, label=name)
    canvas.named(ax, chosen, f"of {result.n:,} draws")
    if drawn.dim() > 1 and drawn[0].numel() <= 8:
        canvas.legend(ax)
    canvas.headline("", ax)


def categorical(result: Categorical, canvas: Canvas, *, labels: object = None, top: int = 20) -> None:
    """The shares of the states; a row for each state of the open choices, where there are such."""
    probabilities = result.probs.detach().flatten(0, -2) if result.probs.dim() > 1 else result.probs.detach()
    axes = ("state",) if probabilities.dim() == 1 else ("choice", "state")
    told = None if labels is None else {"state": labels}
    table(table_of(probabilities, axes, labels=told, what="probability"), canvas, top=top)
