"""Plots of answers: reading paths, TANs, counterfactuals, draws, distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from bnet_transformer.errors import BNetError, number, one_of, unknown, whole
from bnet_transformer.inference import CorpusTan, Counterfactual, Reads, Samples, Tan, TanTree
from bnet_transformer.tpm.arrays import in_numpy
from bnet_transformer.viz.labels import shown
from bnet_transformer.viz.plots.canvas import Canvas
from bnet_transformer.viz.plots.flow import arcs, flow, share_of
from bnet_transformer.viz.plots.heat import Map, framed, heat_map, up_to
from bnet_transformer.viz.plots.table import table_of
from bnet_transformer.viz.plots.tables import table

SHOWN = ("matrix", "flow", "entropy")


def reads(
    result: Reads, canvas: Canvas, *, show: str | None = None, word: int | None = None, least: float | None = None
) -> None:
    """`P(source word | output word)`; the flow from one output `word` over the slices; or entropies.

    Of the flows those of at least `least` are drawn; where none is told, the strongest that a page bears.
    """
    show = show if show is not None else "flow" if word is not None else "matrix"
    one_of("show", show, SHOWN)
    n = len(result.tokens)
    if word is not None and show != "flow":
        raise BNetError("word", expected="a word with show='flow' alone", got=word)
    if least is not None and not 0 <= number("least", least) < 1:
        raise BNetError("least", expected="a share from 0 to 1", got=least)
    where = f"slice {result.slices[0]}" if len(result.slices) == 1 else f"slices {result.slices[0]}–{result.slices[-1]}"
    told = f"Chain of attention TPMs, residual share {result.residual:g}, {result.head}; no posterior of the bnet."
    if show == "matrix":
        capacity = result.method == "flow"
        what = "greatest flow" if capacity else "P(source | output)"
        values = in_numpy(result.matrix.masked_fill(~reached(result), torch.nan))
        found = Map(values, result.tokens, result.tokens)
        limits = None if capacity else up_to([values])
        heat_map(canvas, found, what=what, x="source word", y="output word", limits=limits, square=True)
        canvas.headline(f"What is read over {where}")
    elif show == "entropy":
        found = Map(in_numpy(result.entropies), tuple(map(str, result.slices)), result.tokens)
        heat_map(canvas, found, what="entropy of P(j | i), nats", x="word i that reads", y="slice")
        return
    else:
        at = n - 1 if word is None else whole("word", word, least=0)
        if at >= n:
            raise BNetError("word", expected=f"a word from 0 to {n - 1}", got=word)
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
    if min_weight is not None and not 0 <= number("min_weight", min_weight) <= 1:
        raise BNetError("min_weight", expected="a share from 0 to 1", got=min_weight)
    if top is not None:
        whole("top", top)
    arcs(canvas, result, min_weight, top)
    canvas.headline(f"Best parents in slice {result.slice}, {result.head}")
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
    canvas.headline(f"{result.sentences:,} sentences{far}")
    canvas.note("Red frames: the arrows of the tree.")


def counterfactual(result: Counterfactual, canvas: Canvas, *, labels: object = None, top: int = 20) -> None:
    """What a node would have been: bars of its states, or of the features of its mean."""
    whole("top", top)
    if result.probabilities is not None:
        told = _labelled(result.labels if labels is None else labels, "state")
        found = table_of(result.probabilities, "state", labels=told, what=f"P({result.node} had it been so)")
    else:
        told = _labelled(labels, "feature")
        found = table_of(result.mean.flatten(), "feature", labels=told, what=f"mean of {result.node} had it been so")
    table(found, canvas, top=top)
    canvas.note(f"{result.convention}." if result.convention else "")


def samples(result: Samples, canvas: Canvas, *, node: str | None = None, labels: object = None, top: int = 20) -> None:
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
        named = labels if labels is not None else result.labels.get(chosen)
        count = len(named) if isinstance(named, Sequence) and not isinstance(named, str) else 0
        shares = torch.bincount(drawn.flatten().long(), minlength=count).double() / result.n
        told = _labelled(named, chosen)
        table(table_of(shares, chosen, labels=told, what=f"share of {result.n:,} draws"), canvas, top=top)
        return
    if labels is not None:
        raise BNetError("labels", expected="a discrete node, whose states have names", got=chosen)
    ax = canvas.axes(4.2, 2.4)
    for k, values in enumerate(drawn.flatten(1).unbind(1) if drawn.dim() > 1 else [drawn]):
        colour = canvas.heads[k % len(canvas.heads)]
        name = f"{chosen}[{k}]" if drawn.dim() > 1 else chosen
        ax.hist(in_numpy(values.double()), bins="auto", histtype="step", color=colour, linewidth=1.2, label=name)
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
        raise BNetError("distribution", expected="one with a mean and a variance", got=result) from None
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
