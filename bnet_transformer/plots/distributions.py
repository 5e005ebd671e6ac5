"""Plots of distributions: torch distributions, samples, counterfactuals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.distributions import Categorical, Distribution

from bnet_transformer._core.arrays import to_numpy
from bnet_transformer._core.checks import check_int
from bnet_transformer._core.naming import WORD
from bnet_transformer.errors import BNetError
from bnet_transformer.inference import GroupPosterior, Samples
from bnet_transformer.interventions.counterfactual import Counterfactual
from bnet_transformer.plots.canvas import Canvas
from bnet_transformer.plots.heat_maps import HeatMapData, count_columns, draw_heat_map, draw_heat_maps
from bnet_transformer.plots.labelled_arrays import make_labelled_array, plot_labelled_array
from bnet_transformer.plots.special_words import select_words

MAX_WORD_LABELS = 60  # with more words than this, the columns of a heat map have numbers


def plot_counterfactual(result: Counterfactual, canvas: Canvas, *, top: int = 20) -> None:
    """Plot the counterfactual distribution of a node: bars of its states, or of the features of its mean."""
    check_int("top", top)
    if result.probabilities is not None:
        labels, name = _axis_labels(result.labels, "state"), f"counterfactual P({result.node})"
        array = make_labelled_array(result.probabilities, "state", labels=labels, value_label=name)
    else:
        name = f"counterfactual mean of {result.node}"
        array = make_labelled_array(result.mean.flatten(), "feature", value_label=name)
    plot_labelled_array(array, canvas, top=top)
    canvas.add_note(f"{result.convention}." if result.convention else "")


def plot_samples(result: Samples, canvas: Canvas, *, node: str | None = None, top: int = 20) -> None:
    """Plot the frequency of each state of a discrete node, or a histogram of each feature of a real node."""
    check_int("top", top)
    names = list(result.states)
    if node is None and len(names) != 1:
        hint = f"Pass node=, one of the sampled nodes: {', '.join(names[:12])}"
        raise BNetError("several nodes were sampled", hint=hint)
    name = names[0] if node is None else result.find_name(node)
    samples = result.states[name]
    if not samples.is_floating_point():
        labels = result.labels.get(name)
        fractions = torch.bincount(samples.flatten().long(), minlength=len(labels or ())).double() / result.n
        text = f"share of {result.n:,} samples"
        array = make_labelled_array(fractions, name, labels=_axis_labels(labels, name), value_label=text)
        plot_labelled_array(array, canvas, top=top)
        return
    ax = canvas.add_axes(4.2, 2.4)
    for k, values in enumerate(samples.flatten(1).unbind(1) if samples.dim() > 1 else [samples]):
        colour = canvas.head_colours[k % len(canvas.head_colours)]
        label = f"{name}[{k}]" if samples.dim() > 1 else name
        ax.hist(to_numpy(values.double()), bins="auto", histtype="step", color=colour, linewidth=1.2, label=label)
    canvas.set_axis_labels(ax, name, f"count, {result.n:,} samples")
    if samples.dim() > 1 and samples[0].numel() <= 8:
        canvas.add_legend(ax)


def plot_group_posterior(result: GroupPosterior, canvas: Canvas, *, special: bool = True) -> None:
    """Plot the posteriors of the nodes of a group: words as columns, states as rows, a panel for each other index.

    `special=False` leaves out special tokens.
    """
    probs, names = to_numpy(result.probabilities.double()), result.axes
    if probs.ndim == 1:  # one node
        array = make_labelled_array(probs, names, labels=result.labels, value_label=f"P({result.name} | evidence)")
        plot_labelled_array(array, canvas)
        return
    states, columns = result.labels_along(-1), result.labels_along(probs.ndim - 2)
    is_long = len(columns) > MAX_WORD_LABELS
    column_label = f"number of the {names[-2]}" if is_long else names[-2]
    style: Any = {"value_label": "P(state | evidence)", "x": column_label, "y": f"state of {result.name}"}
    maps = [
        HeatMapData(probs[index].T, states, columns, ", ".join(f"{a} {k}" for a, k in zip(names, index, strict=False)))
        for index in np.ndindex(*probs.shape[:-2])
    ]
    if names[-2] == WORD and not special:
        shown = select_words(canvas, columns, result.special, special)
        maps = [m.select(range(len(states)), shown) for m in maps]
    if len(maps) == 1:
        panels = [draw_heat_map(canvas, maps[0], **style, limits=(0.0, 1.0))]
    else:
        num_columns, width = (1, 5.4) if len(columns) > 16 else (count_columns(canvas, len(maps), 4), 2.0)
        style |= {"num_columns": num_columns, "max_width": width, "aspect": min(1.0, 0.2 * len(states) / width)}
        panels = draw_heat_maps(canvas, maps, **style, limits=(0.0, 1.0), square=False, should_thin_labels=True)
    if is_long:
        for ax in panels:
            canvas.set_index_ticks(ax)
    canvas.set_title(f"Posterior of {result.name}")


def plot_categorical(result: Categorical, canvas: Canvas, *, labels: object = None, top: int = 20) -> None:
    """Plot the probabilities of the states, a row for each batch element (a state of the latent choices)."""
    probs = result.probs.detach().flatten(0, -2) if result.probs.dim() > 1 else result.probs.detach()
    axes = ("state",) if probs.dim() == 1 else ("choice", "state")
    array = make_labelled_array(probs, axes, labels=_axis_labels(labels, "state"), value_label="probability")
    plot_labelled_array(array, canvas, top=top)


def plot_distribution(result: Distribution, canvas: Canvas, *, labels: object = None, top: int = 20) -> None:
    """Plot the mean and standard deviation of each feature, a row for each batch element."""
    try:
        mean, deviation = result.mean.detach(), result.variance.detach().sqrt()
    except NotImplementedError:
        expected = "a distribution with a mean and a variance"
        raise BNetError("distribution", expected=expected, actual=result) from None
    event, batch = tuple(result.event_shape), tuple(result.batch_shape)
    shape = event if not batch and len(event) == 2 else (-1,) if not batch else (math.prod(batch), -1)
    axes = ("row", "column") if not batch and len(event) == 2 else ("choice", "feature")[-len(shape) :]
    is_random = bool((deviation > 0).any())
    error, text = (deviation.reshape(shape), "mean") if is_random else (None, "value")
    axis_labels = _axis_labels(labels, axes[-1])
    array = make_labelled_array(mean.reshape(shape), axes, labels=axis_labels, error=error, value_label=text)
    plot_labelled_array(array, canvas, top=top)
    canvas.add_note("Intervals: mean ± one standard deviation." if is_random else "")


def _axis_labels(labels: object, axis: str) -> dict[str, object] | None:
    """The labels in the form that `make_labelled_array` accepts."""
    return None if labels is None else {axis: labels}
