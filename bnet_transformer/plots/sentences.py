"""Plots of sentences: attention TPMs, posteriors, most probable joint states, distributions and samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.patches import Patch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Categorical, Distribution

from bnet_transformer import reference
from bnet_transformer._core.checks import check_choice, check_int
from bnet_transformer._core.naming import WORD
from bnet_transformer._core.tensors import to_numpy
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import format_token, text_width
from bnet_transformer.inference import GroupPosterior, GroupStates, RankedStates, Samples, SentenceState
from bnet_transformer.inference.query import find_attention_spec, merge_words, parse_attention_slices
from bnet_transformer.interventions.counterfactual import Counterfactual
from bnet_transformer.plots.canvas import SEQUENTIAL_COLOURS, SMALL_FONT_SIZE, Canvas
from bnet_transformer.plots.heat_maps import (
    BarSeries,
    HeatMapData,
    count_columns,
    draw_bars,
    draw_matrix,
    make_labelled_array,
    plot_labelled_array,
    probability_limits,
    select_top,
    select_words,
)
from bnet_transformer.reference import compute_read_mask

# --------------------------------------------------------------------------------------------------------------------
# Plots of distributions: torch distributions, samples, counterfactuals.


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
    ax = canvas.add_axes(3.7, 2.0)
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
    if len(maps) > 1:
        num_columns, width = (1, 5.4) if len(columns) > 16 else (count_columns(canvas, len(maps), 4), 2.0)
        style |= {"num_columns": num_columns, "size": (width, min(width, 0.2 * len(states)))}
    panels = draw_matrix(canvas, maps, **style, limits=(0.0, 1.0))
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


# --------------------------------------------------------------------------------------------------------------------
# The plot of the most probable joint states: words as columns, node groups as rows, states as labelled colours.


CELL_FONT_SIZE = 6.5
MAX_STATE_LABEL = 12  # characters of a label in a cell
MIN_WORD_PITCH = 7.5  # points of a column that has its word as label
MAX_HEIGHT = 8.0  # inches of all cells
FADED = 0.7  # the share of the background in the colour of a state that equals that of the best joint state
BLANK = -1


@dataclass(frozen=True)
class CellRow:
    """A row of cells.

    `edges` are the left and right ends of the cells, `[cell, 2]`, in columns; `states` are `[rank, cell]`, -1 for a
    blank cell; `names` are prefixes of the texts of cells.
    """

    label: str
    edges: NDArray[np.float64]
    states: NDArray[np.int64]
    is_explained: NDArray[np.bool_]
    groups: tuple[GroupStates, ...]
    names: tuple[str, ...] = ()

    def text(self, rank: int, cell: int, *, as_number: bool = False) -> str:
        """The text of a cell: the label of its state, or its number."""
        state = int(self.states[rank, cell])
        prefix = f"{self.names[cell]} = " if self.names else ""
        label = str(state) if as_number else self.groups[cell].format_state(state)
        return prefix + format_token(label, MAX_STATE_LABEL)


@dataclass(frozen=True)
class Block:
    """The rows of one panel and the labels of its columns, which are the words of a stack or the nodes."""

    rows: tuple[CellRow, ...]
    columns: tuple[str, ...]
    column_name: str

    @property
    def pitch(self) -> int:
        """The height of one joint state in rows of cells, with the gap below it."""
        return len(self.rows) + (len(self.rows) > 1)


def plot_ranked_states(result: RankedStates, canvas: Canvas, *, top: int = 10) -> None:
    """Plot the states of the `top` most probable joint states over the words, with their probabilities.

    A row is a node group (and an index of each plate). Nodes without words are in a line above the words.
    """
    count = min(check_int("top", top), len(result))
    stacks = dict.fromkeys(group.stack for group in result.groups if group.stack is not None)
    width = max(1.6, max(_natural_width(g, result) for g in result.groups))
    blocks = [_build_word_block(result, stack, width, stack == next(iter(stacks))) for stack in stacks]
    blocks = blocks or [_build_node_block(result)]
    heights = [count * block.pitch - (block.pitch > 1) for block in blocks]
    unit = min(0.22, MAX_HEIGHT / sum(heights))
    panels = canvas.add_panels(len(blocks), 1, width, [unit * height for height in heights])
    for ax, block, height in zip(panels, blocks, heights, strict=True):
        ax.set_xlim(-0.5, len(block.columns) - 0.5)
        ax.set_ylim(height - 0.5, -0.5)
        _label_axes(canvas, ax, block, count)
    _write_probabilities(canvas, panels[0], result, blocks[0], count)

    def fill_cells() -> None:
        unlabelled: list[GroupStates] = []
        for ax, block, height in zip(panels, blocks, heights, strict=True):
            size = canvas.panel_size(ax)
            scale = 72 * size[0] / len(block.columns), 72 * size[1] / height  # points of a column and a row
            for k, row in enumerate(block.rows):
                is_labelled = _draw_row(canvas, ax, row, range(k, count * block.pitch, block.pitch), scale)
                unlabelled += [] if is_labelled else row.groups
            if scale[0] < MIN_WORD_PITCH:
                canvas.set_index_ticks(ax)
                ax.set_xlabel(f"number of the {block.column_name}")
        _add_state_legend(canvas, panels[0], unlabelled)

    canvas.draw_when_sized(fill_cells)
    name = "most probable explanation" if result.method == "most_probable" else "marginal MAP"
    canvas.set_title(f"{name[:1].upper()}{name[1:]}" + (f", the {count} best" if count > 1 else ""))
    canvas.add_note("Faded: the same state as in the best joint state." if count > 1 else "")
    rows = [row for block in blocks for row in block.rows]
    is_fixed = any(bool((~row.is_explained & (row.states != BLANK)).any()) for row in rows)
    canvas.add_note("Grey: observed or set." if is_fixed else "")
    canvas.add_note(f"Showing {count} of {len(result):,} joint states." if count < len(result) else "")


# the rows


def _row_labels(group: GroupStates) -> list[str]:
    """The labels of the rows of a group with words: the name of its nodes without the word."""
    if group.stack is None:
        return []
    return list(dict.fromkeys(name.rsplit("_", 1)[0] for name in group.nodes))


def _natural_width(group: GroupStates, result: RankedStates) -> float:
    """The width in inches in which the labels of the cells of a group fit."""
    longest = max(text_width(label, CELL_FONT_SIZE) for label in _state_texts(group))
    if group.stack is not None:
        return len(result.tokens[group.stack]) * max(0.3, (longest + 5) / 72)
    return len(group.nodes) * max(0.42, (longest + 5) / 72)


def _state_texts(group: GroupStates) -> list[str]:
    """The texts of the states that occur."""
    states = sorted({*group.states.flatten().tolist()} - {BLANK})
    return [format_token(group.format_state(state), MAX_STATE_LABEL) for state in states]


def _build_word_block(result: RankedStates, stack: str, width: float, has_single_nodes: bool) -> Block:
    """The rows of the groups with the words of a stack; above them the nodes without words."""
    tokens, rows = result.tokens[stack], []
    edges = np.arange(len(tokens))[:, None] + np.array([-0.5, 0.5])
    for group in result.groups:
        if group.stack == stack:
            states = group.states.reshape(len(result), -1, len(tokens)).numpy()
            is_explained = group.is_explained.reshape(-1, len(tokens)).numpy()
            for k, label in enumerate(_row_labels(group)):
                rows.append(CellRow(label, edges, states[:, k], is_explained[k], (group,) * len(tokens)))
    singles = _list_single_nodes(result) if has_single_nodes else []
    rows = [*_wrap_single_nodes(singles, len(tokens), width), *rows]
    return Block(tuple(rows), tokens, "word")


def _build_node_block(result: RankedStates) -> Block:
    """One row with the nodes, none of which has a word, as columns."""
    singles = _list_single_nodes(result)
    edges = np.arange(len(singles))[:, None] + np.array([-0.5, 0.5])
    return Block((_join_single_nodes(singles, edges, with_names=False),), tuple(name for name, *_ in singles), "node")


def _list_single_nodes(result: RankedStates) -> list[tuple[str, GroupStates, int]]:
    """The nodes without words that have a state: their names, groups and positions."""
    return [
        (name, group, k)
        for group in result.groups
        if group.stack is None
        for k, name in enumerate(group.nodes)
        if int(group.flat_states[0, k]) != BLANK
    ]


def _join_single_nodes(
    nodes: Sequence[tuple[str, GroupStates, int]], edges: NDArray[np.float64], *, with_names: bool
) -> CellRow:
    """A row with a cell for each node."""
    names, groups, positions = zip(*nodes, strict=True)
    states = np.stack([g.flat_states[:, k].numpy() for g, k in zip(groups, positions, strict=True)], 1)
    is_explained = np.array([bool(g.is_explained.flatten()[k]) for g, k in zip(groups, positions, strict=True)])
    return CellRow("", edges, states, is_explained, groups, names if with_names else ())


def _wrap_single_nodes(
    nodes: Sequence[tuple[str, GroupStates, int]], num_columns: int, width: float
) -> Iterator[CellRow]:
    """Rows with as many nodes as fit next to each other with their names."""
    if not nodes:
        return
    texts = [f"{name} = {text}" for name, group, _ in nodes for text in _state_texts(group)]
    fitting = max(1, int(72 * width / (max(text_width(text, CELL_FONT_SIZE) for text in texts) + 6)))
    per_row = math.ceil(len(nodes) / math.ceil(len(nodes) / fitting))
    for start in range(0, len(nodes), per_row):
        part = nodes[start : start + per_row]
        ends = np.linspace(-0.5, num_columns - 0.5, per_row + 1)
        yield _join_single_nodes(part, np.stack([ends[:-1], ends[1:]], 1)[: len(part)], with_names=True)


# the cells


def _draw_row(canvas: Canvas, ax: Axes, row: CellRow, positions: Sequence[int], scale: tuple[float, float]) -> bool:
    """Draw a row of each joint state; return True if each cell has the label of its state.

    If labels or numbers do not fit, cells of equal states are joined, and the text is written where it fits.
    """
    widths = scale[0] * (row.edges[:, 1] - row.edges[:, 0])
    as_number = False
    for as_number in (False, True):
        cells = [(r, c) for r, c in np.argwhere(row.states[: len(positions)] != BLANK).tolist()]
        is_fitting = all(
            text_width(row.text(r, c, as_number=as_number), CELL_FONT_SIZE) + 2 <= widths[c] for r, c in cells
        )
        if is_fitting:
            break
    gap = (0.6 / scale[0], 0.6 / scale[1]) if is_fitting else (0.0, 0.6 / scale[1])
    corners, colours = [], []
    for rank, y in enumerate(positions):
        for first, last in _find_runs(row, rank, is_joined=not is_fitting):
            state = int(row.states[rank, first])
            if state == BLANK:
                continue
            x0, x1 = row.edges[first, 0] + gap[0] / 2, row.edges[last, 1] - gap[0] / 2
            y0, y1 = y - 0.5 + gap[1] / 2, y + 0.5 - gap[1] / 2
            corners.append([(x0, y0), (x1, y0), (x1, y1), (x0, y1)])
            is_faded, colour = rank > 0 and state == row.states[0, first], canvas.colours["observed"]
            if row.is_explained[first]:
                colour = state_colour(canvas, state, row.groups[first].num_states)
                colour = _mix(colour, canvas.colours["paper"], FADED) if is_faded else colour
            colours.append(colour)
            text = row.text(rank, first, as_number=as_number)
            if scale[1] >= CELL_FONT_SIZE and text_width(text, CELL_FONT_SIZE) + 2 <= scale[0] * (x1 - x0):
                ink = canvas.contrasting_colour(colours[-1])
                ink = _mix(ink, colours[-1], 0.35) if is_faded else ink
                style: Any = {"ha": "center", "va": "center_baseline", "color": ink, "fontsize": CELL_FONT_SIZE}
                canvas.add_text(ax, (x0 + x1) / 2, y, text, **style)
    ax.add_collection(PolyCollection(corners, facecolors=colours, linewidths=0, label=row.label or "nodes"))
    return is_fitting and not as_number and scale[1] >= CELL_FONT_SIZE


def _find_runs(row: CellRow, rank: int, *, is_joined: bool) -> Iterator[tuple[int, int]]:
    """The first and the last cell of each rectangle: single cells, or runs of cells that have the same look."""
    states, first = row.states[rank], 0
    is_same = states == row.states[0]
    for k in range(1, len(states) + 1):
        if (
            k == len(states)
            or not is_joined
            or states[k] != states[first]
            or row.is_explained[k] != row.is_explained[first]
            or is_same[k] != is_same[first]
        ):
            yield first, k - 1
            first = k


def state_colour(canvas: Canvas, state: int, count: int) -> str:
    """The colour of a state: different hues for up to 8 states, with a second lightness for 16, else a scale."""
    hues = canvas.head_colours
    if count <= 2 * len(hues):
        colour = hues[state % len(hues)]
        return colour if state < len(hues) else _mix(colour, canvas.colours["ink"], 0.45)
    scale = LinearSegmentedColormap.from_list("states", SEQUENTIAL_COLOURS[canvas.theme])
    return to_hex(scale(0.15 + 0.85 * state / (count - 1)))


def _mix(colour: str, other: str, share: float) -> str:
    """A colour with a share of another one."""
    return to_hex((1 - share) * np.array(to_rgb(colour)) + share * np.array(to_rgb(other)))  # type: ignore[arg-type]


# labels


def _label_axes(canvas: Canvas, ax: Axes, block: Block, count: int) -> None:
    """Label the rows of each joint state and the columns, without a frame."""
    canvas.draw_frame(ax)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ticks = [(r * block.pitch + k, row.label) for r in range(count) for k, row in enumerate(block.rows) if row.label]
    labels, tick_positions = [label for _, label in ticks], [float(y) for y, _ in ticks]
    ax.set_yticks([])
    canvas.set_tick_labels(ax, "y", labels, positions=tick_positions)
    canvas.set_tick_labels(ax, "x", block.columns)
    canvas.set_axis_labels(ax, block.column_name)


def _write_probabilities(canvas: Canvas, ax: Axes, result: RankedStates, block: Block, count: int) -> None:
    """Write the rank, the log probability and the posterior share of each joint state at the right of its first row."""
    columns = [
        ("log P", [f"{value:.2f}".replace("-", "−") for value in result.log_probs.tolist()], 0.88),
        ("share", [f"{s:.3f}" if s >= 5e-4 or s == 0 else f"{s:.0e}" for s in result.shares.tolist()], 1.28),
    ]
    columns = [("rank", [str(k + 1) for k in range(count)], 0.28), *columns] if count > 1 else columns
    at = ("axes fraction", "data")
    for header, texts, offset in columns:
        style: Any = {"ha": "right", "xycoords": at, "textcoords": "offset points", "fontsize": SMALL_FONT_SIZE}
        style |= {"xytext": (72 * offset, 0), "annotation_clip": False}
        ax.annotate(header, (1.0, -0.62), va="bottom", color=canvas.colours["grey"], **style)
        for rank, text in enumerate(texts[:count]):
            y = rank * block.pitch
            ax.annotate(text, (1.0, y), va="center_baseline", color=canvas.colours["ink"], **style)
    canvas.add_note(
        "log P: log probability of the states and the evidence. Share: posterior probability of the states."
    )


def _add_state_legend(canvas: Canvas, ax: Axes, groups: Sequence[GroupStates]) -> None:
    """Add the colours of the states whose labels are not in all cells."""
    if not groups:
        return
    count = max(group.num_states for group in groups)
    if count > 2 * len(canvas.head_colours):
        canvas.add_note(f"Colour: the number of the state, from 0 to {count - 1}, in increasing contrast.")
        return
    named = {group.labels for group in groups if group.num_states == count}
    labels = next(iter(named)) if len(named) == 1 else None
    texts = [f"state {k}" if labels is None else f"{k} = {labels[k]}" for k in range(count)]
    texts, fonts = canvas.format_texts(texts, 30)
    patches = [Patch(color=state_colour(canvas, k, count), label=text) for k, text in enumerate(texts)]
    prop = {"family": fonts, "size": SMALL_FONT_SIZE}
    canvas.add_legend(ax, handles=patches, ncols=min(count, 8), prop=prop, columnspacing=1.2, is_above=True)


TOKEN_WORDS = "tokens"
MIN_PANEL_WIDTH = 0.55  # inches of the attention of one head
BLANK_NOTE = "Blank: no arrow; word i cannot attend to word j."


@runtime_checkable
class SentenceLike(Protocol):
    """The part of `Sentence` that plots use."""

    state: SentenceState

    def attention(self, slice: int, *, role: str | None = None, words: str = TOKEN_WORDS) -> Tensor:
        """The attention TPMs of a slice."""

    def posterior(self, name: Any, evidence: Mapping[str, object] | None = None) -> Tensor:
        """The posterior of a discrete node."""


def plot_sentence(
    s: SentenceLike,
    canvas: Canvas,
    *,
    slice: int | Collection[int] | None = None,
    head: int | None = None,
    role: str | None = None,
    words: str = TOKEN_WORDS,
    special: bool = True,
    node: str | Sequence[str] | None = None,
    evidence: Mapping[str, object] | None = None,
    top: int = 20,
) -> None:
    """Plot the attention TPMs of slices, by default of all; or the posterior of `node` given the `evidence`.

    `special=False` leaves out the rows and columns of special tokens.
    """
    if node is not None:
        if slice is not None or head is not None or role is not None or words != TOKEN_WORDS:
            options = {"slice": slice, "head": head, "role": role, "words": None if words == TOKEN_WORDS else words}
            given = ", ".join(f"{name}=" for name, value in options.items() if value is not None)
            raise BNetError(f"{given} cannot be combined with node=", hint="Use only evidence= and top= with node=")
        plot_posterior(s, canvas, node, evidence, top)
        return
    if evidence is not None:
        hint = "Pass node=, or plot s.observe(...) to see the attention given evidence"
        raise BNetError("evidence= requires node=", hint=hint)
    check_choice("words", words, (TOKEN_WORDS, "words"))
    slices = parse_attention_slices(s.state.network, "all" if slice is None else slice, role)[1]
    maps_by_slice = {t: build_attention_maps(s, t, head, role, words) for t in slices}
    maps_by_slice = _drop_special(s, canvas, maps_by_slice, role, words, special)
    maps = [m for slice_maps in maps_by_slice.values() for m in slice_maps]
    labels: Any = {"value_label": "P(j | i)", "x": "word j attended to", "y": "word i that attends"}
    if any(bool(np.isnan(m.values).any()) for m in maps):
        canvas.add_note(BLANK_NOTE)
    limits = probability_limits([m.values for m in maps])
    num_columns, panels = arrange_panels(canvas, maps_by_slice)
    draw_matrix(canvas, panels, **labels, num_columns=num_columns, limits=limits, square=True)
    title = f"Slice {slices[0]}" if len(slices) == 1 else "Attention TPMs by slice"
    canvas.set_title(title + (f", {maps[0].name}" if len(maps) == 1 and maps[0].name else ""))


def _drop_special(
    s: SentenceLike,
    canvas: Canvas,
    maps_by_slice: Mapping[int, list[HeatMapData]],
    role: str | None,
    words: str,
    special: bool,
) -> dict[int, list[HeatMapData]]:
    """The maps without the rows and columns of special tokens."""
    spec = find_attention_spec(s.state.model, next(iter(maps_by_slice)), role)
    stacks = spec.group.word_stack or "", s.state.model.network.get_source_stack(spec)
    rows, columns = ([*_flag_special(s, stack, words)] for stack in stacks)
    first = next(iter(maps_by_slice.values()))[0]
    row_ids = select_words(canvas, first.row_labels, rows, special) if stacks[0] != stacks[1] else []
    row_ids = row_ids or [k for k, is_special in enumerate(rows) if special or not is_special]
    masses = np.stack([m.values[row_ids] for maps in maps_by_slice.values() for m in maps])
    column_ids = select_words(canvas, first.column_labels, columns, special, masses)
    return {t: [m.select(row_ids, column_ids) for m in maps] for t, maps in maps_by_slice.items()}


def _flag_special(s: SentenceLike, stack: str, words: str) -> Sequence[bool]:
    """Whether each word of a stack is a special token."""
    flags = s.state.encoded.flag_special_words(s.state.network, stack)
    if words == TOKEN_WORDS:
        return flags
    return [all(flags[k] for k in group) for group in s.state.encoded.group_subwords()]


def arrange_panels(
    canvas: Canvas, maps_by_slice: Mapping[int, list[HeatMapData]]
) -> tuple[int, list[HeatMapData | None]]:
    """The number of columns, and the panels row by row; each slice starts a new row, which is filled with None."""
    panels: list[HeatMapData | None] = []
    max_maps = max(map(len, maps_by_slice.values()))
    if max_maps == 1:
        panels += [replace(maps[0], name=f"slice {t}") for t, maps in maps_by_slice.items()]
        return count_columns(canvas, len(panels), 4), panels
    if len(maps_by_slice) == 1:
        panels += next(iter(maps_by_slice.values()))
        return count_columns(canvas, len(panels), 4), panels
    limit, smallest = (max_maps, MIN_PANEL_WIDTH) if max_maps <= 16 else (8, None)
    num_columns = count_columns(canvas, max_maps, limit, smallest)
    for t, maps in maps_by_slice.items():
        panels += [replace(m, row_title=f"slice {t}") for m in maps]
        panels += [None] * (-len(maps) % num_columns)
    return num_columns, panels


def build_attention_maps(
    s: SentenceLike, slice_: int, head: int | None, role: str | None, words: str
) -> list[HeatMapData]:
    """A heat map for each joint state of the latent choices and each head of a slice; NaN where there is no arrow."""
    model = s.state.model
    attention = s.attention(slice_, role=role, words=words).double()
    spec = find_attention_spec(model, slice_, role)
    rows = _word_labels(s, spec.group.word_stack or "", words)
    columns = _word_labels(s, model.network.get_source_stack(spec), words)
    names = _name_dims(s, spec, attention.dim() - 2)
    readable = torch.from_numpy(compute_read_mask(model, spec))
    if words != TOKEN_WORDS:
        readable = merge_words(readable.double(), s.state.encoded.group_subwords()) > 0
    masked = attention.masked_fill(~readable, torch.nan)
    if head is not None:
        if "head" not in names:
            choices = [m.group.name for m in model.network.specs if m.tpm.kind == "discrete" and m.group.role == "c"]
            hint = f"Choose a state of the selector with s.do({choices[0]}=...)" if choices else "Leave out head="
            raise BNetError("head= requires a net with a plate of heads", hint=hint)
        head_dim = names.index("head")
        if check_int("head", head, minimum=0) >= attention.shape[head_dim]:
            expected = f"an index of a head from 0 to {attention.shape[head_dim] - 1}"
            raise BNetError("head", expected=expected, actual=head)
    maps = []
    for states in np.ndindex(*attention.shape[:-2]):
        state_by_dim = dict(zip(names, states, strict=True))
        if head is not None and state_by_dim["head"] != head:
            continue
        name = ", ".join(f"head {k}" if axis == "head" else f"{axis} = {k}" for axis, k in state_by_dim.items())
        maps.append(HeatMapData(to_numpy(masked[states]), rows, columns, name))
    return maps


def plot_posterior(
    s: SentenceLike, canvas: Canvas, node: str | Sequence[str], evidence: Mapping[str, object] | None, top: int
) -> None:
    """Plot the distribution of one node as bars, before and after the evidence; the joint one of two as a heat map."""
    check_int("top", top)
    names = (node,) if isinstance(node, str) else tuple(node)
    if not 1 <= len(names) <= 2:
        raise BNetError("node", expected="the name of one node, or of two nodes", actual=f"{len(names)} names")
    texts = [f"{name} = {value if isinstance(value, str | int) else '…'}" for name, value in (evidence or {}).items()]
    given = ", ".join([*texts, *(f"{s.state.ground.name(node)} observed" for node in s.state.evidence)])
    condition = f" | {given})" if given and len(given) < 40 else " | evidence)" if given else ")"
    value_label = f"P({', '.join(names)}" + condition
    if len(names) == 2:
        state_names = {name: state_labels(s, name) for name in names}
        joint = make_labelled_array(s.posterior(names, evidence), names, labels=state_names, value_label=value_label)
        plot_labelled_array(joint, canvas)
        return
    series = [BarSeries(to_numpy(s.posterior(names[0], evidence).double()), value_label)]
    if evidence:
        before = to_numpy(s.posterior(names[0]).double())
        prior = f"P({names[0]}" + (" | observed)" if s.state.evidence else ")")
        series = [BarSeries(before, prior, colour="prior"), *series]
    series, labels, note = select_top(series, state_labels(s, names[0]), top)
    canvas.add_note(note)
    draw_bars(canvas, series, labels, value_label="probability" if evidence else value_label, category_label=names[0])


def plot_sentences(
    sentences_: Sequence[SentenceLike], canvas: Canvas, *, node: str = "c", evidence: Mapping[str, object] | None = None
) -> None:
    """Plot the posterior of a node, a row for each sentence."""
    if not isinstance(node, str):
        raise BNetError("node", expected="the name of one node", actual=node)
    posteriors = [s.posterior(node, evidence) for s in sentences_]
    if len({len(posterior) for posterior in posteriors}) != 1:
        raise BNetError(f"the sentences have different numbers of states of {node}", hint="Use sentences of one net")
    texts = [" ".join(token for tokens in s.state.tokens.values() for token in tokens) for s in sentences_]
    labels = {"sentence": texts, node: state_labels(sentences_[0], node)}
    has_evidence = bool(evidence) or any(s.state.evidence for s in sentences_)
    value_label = f"P({node} | evidence)" if has_evidence else f"P({node})"
    array = make_labelled_array(torch.stack(posteriors), ("sentence", node), labels=labels, value_label=value_label)
    plot_labelled_array(array, canvas, sort=False)


def state_labels(s: SentenceLike, name: str) -> list[str]:
    """The labels of the states of a node; states without labels have their numbers."""
    node = s.state.ground.id(name)
    labels = s.state.labels(node)
    return list(labels) if labels is not None else [str(k) for k in range(s.state.model.count_states(node))]


def _word_labels(s: SentenceLike, stack: str, words: str) -> tuple[str, ...]:
    """The labels of the words of a stack: tokens, or full words."""
    tokens, encoded, tokenizer = tuple(s.state.tokens[stack]), s.state.encoded, s.state.network.tokenizer
    if words == TOKEN_WORDS or tokenizer is None or stack not in encoded.tokenized:
        return tokens
    ids = encoded.tokenized[stack].ids
    texts = {group: tokenizer.decode([ids[k] for k in group]).strip() for group in encoded.group_subwords()}
    return tuple(text or "".join(tokens[k] for k in group) for group, text in texts.items())


def _name_dims(s: SentenceLike, spec: NodeSpec, num_dims: int) -> list[str]:
    """The names of the dims of an attention that precede the dims of words: latent choices, then plates."""
    model = s.state.model
    plates = [axis for axis in model.ground.axes(spec.group) if axis != WORD]
    if len(plates) == num_dims:
        return plates
    node = int(model.ground.select_nodes(spec.group)[0])
    open_choices = reference.find_open_choices(
        model, reference.attention_parents(model, node), reference.get_fixed(model, s.state.evidence)
    )
    group_names = list(dict.fromkeys(model.ground.group_of(node).name for node in open_choices))
    for dim_names in (group_names, [model.ground.name(node) for node in open_choices]):
        if len(dim_names) + len(plates) == num_dims:
            return [*dim_names, *plates]
    return [f"choice {k}" for k in range(num_dims - len(plates))] + plates
