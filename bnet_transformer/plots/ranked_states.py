"""The plot of the most probable joint states: words as columns, node groups as rows, states as labelled colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.patches import Patch
from numpy.typing import NDArray

from bnet_transformer._core.checks import check_int
from bnet_transformer.figures.fonts import text_width
from bnet_transformer.figures.labels import format_token
from bnet_transformer.inference import GroupStates, RankedStates
from bnet_transformer.plots.canvas import SEQUENTIAL_COLOURS, SMALL_FONT_SIZE, Canvas
from bnet_transformer.plots.heat_maps import tick_label_width

CELL_FONT_SIZE = 6.5
MAX_STATE_LABEL = 12  # characters of a label in a cell
MIN_WORD_PITCH = 7.5  # points of a column that has its word as label
NUMBERS_WIDTH = 1.4  # inches of the columns of numbers at the right
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
    labels = [label for group in result.groups for label in _row_labels(group)]
    left = tick_label_width(labels or [""])
    width = min(
        canvas.page_width - left - NUMBERS_WIDTH, max(1.6, max(_natural_width(g, result) for g in result.groups))
    )
    blocks = [_build_word_block(result, stack, width, stack == next(iter(stacks))) for stack in stacks]
    blocks = blocks or [_build_node_block(result)]
    heights = [count * block.pitch - (block.pitch > 1) for block in blocks]
    unit = min(0.22, MAX_HEIGHT / sum(heights))
    # More space than the texts need, because a saved file has no empty margins.
    labels_height = sum(0.5 + tick_label_width(block.columns) for block in blocks)
    legend_height = 0.06 * min(2 * len(canvas.head_colours), max(group.num_states for group in result.groups))
    size = width + left + NUMBERS_WIDTH, unit * sum(heights) + labels_height + legend_height + 0.6
    panels = canvas.add_panels(len(blocks), 1, *size, height_ratios=heights)
    unlabelled: list[GroupStates] = []
    for ax, block, height in zip(panels, blocks, heights, strict=True):
        ax.set_xlim(-0.5, len(block.columns) - 0.5)
        ax.set_ylim(height - 0.5, -0.5)
        panel_width, panel_height = canvas.panel_size(ax, (width, unit * height))
        if canvas.user_axes is None:
            ax.set_box_aspect(panel_height / panel_width)
        scale = 72 * panel_width / len(block.columns), 72 * panel_height / height  # points of a column and a row
        for k, row in enumerate(block.rows):
            is_labelled = _draw_row(canvas, ax, row, range(k, count * block.pitch, block.pitch), scale)
            unlabelled += [] if is_labelled else row.groups
        _label_axes(canvas, ax, block, count, (panel_width, panel_height))
    if not canvas.is_small:
        _write_probabilities(canvas, panels[0], result, blocks[0], count)
    _add_state_legend(canvas, panels[0], unlabelled)
    name = "most probable explanation" if result.method == "most_probable" else "marginal MAP"
    canvas.set_title(
        f"{name[:1].upper()}{name[1:]}" + (f", the {count} best" if count > 1 else ""), is_above_legend=True
    )
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
            is_faded = rank > 0 and state == row.states[0, first]
            colours.append(_cell_colour(canvas, row, first, state, is_faded))
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


def _cell_colour(canvas: Canvas, row: CellRow, cell: int, state: int, is_faded: bool) -> str:
    """The colour of a cell: that of its state, or grey for an observed or set node."""
    if not row.is_explained[cell]:
        return canvas.colours["observed"]
    colour = state_colour(canvas, state, row.groups[cell].num_states)
    return _mix(colour, canvas.colours["paper"], FADED) if is_faded else colour


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


def _label_axes(canvas: Canvas, ax: Axes, block: Block, count: int, size: tuple[float, float]) -> None:
    """Label the rows of each joint state, and the columns with words, or with their numbers if words do not fit."""
    canvas.draw_frame(ax)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ticks = [(r * block.pitch + k, row.label) for r in range(count) for k, row in enumerate(block.rows) if row.label]
    labels, tick_positions = [label for _, label in ticks], [float(y) for y, _ in ticks]
    canvas.set_tick_labels(ax, "y", labels, size[1], positions=tick_positions)
    if 72 * size[0] / len(block.columns) >= MIN_WORD_PITCH:
        canvas.set_tick_labels(ax, "x", block.columns, size[0])
        canvas.set_axis_labels(ax, block.column_name)
    else:
        canvas.set_index_ticks(ax)
        canvas.set_axis_labels(ax, f"number of the {block.column_name}")


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
    width = max(text_width(text, SMALL_FONT_SIZE) for text in texts) + 30
    columns = max(1, min(count, int(72 * (canvas.page_width - NUMBERS_WIDTH - 0.5) / width)))
    style: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "columnspacing": 1.2}
    canvas.add_legend(ax, handles=patches, ncols=columns, prop={"family": fonts, "size": SMALL_FONT_SIZE}, **style)
