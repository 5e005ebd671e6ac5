"""The attention grid: the hidden state of every word in every slice, with the strongest attention weights as arrows.

Words are columns and slices are rows; in a long sentence, words are rows. The other nodes of a slice (q, k, v, ...) are
not drawn: an arrow shows that word i attends to word j of the state before with probability `P(j | i)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.naming import join_name
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.figures.fonts import Density, TextRun, format_token, measure_label
from bnet_transformer.figures.options import ReadsOptions, limit_error
from bnet_transformer.figures.picture import NodeBox, Picture, Point, TextLine, cubic_curve, make_arrow
from bnet_transformer.graph import NodeSelection
from bnet_transformer.inference import SentenceState

MIN_ATTENTION = 0.1
MAX_EDGES = 300
MAX_UPRIGHT_WORDS = 12  # more words than this become rows
DOT_SIZE = 5.0
TOKEN_SIZE = 9.0
STATE_SIZE = 10.0  # of the labels of states: their superscripts stay legible if the figure is shown smaller
WORD_PITCH = 11.5  # between words that are rows

# Word i attends to word j in `attentions[matrix]`; `gain` is the weight divided by the uniform weight of the row.
EDGE_DTYPE = np.dtype([("matrix", "i8"), ("i", "i8"), ("j", "i8"), ("weight", "f8"), ("gain", "f8")])
EdgeArray = Any  # a record array of EDGE_DTYPE


@dataclass(frozen=True)
class StateAttention:
    """The attention between two hidden states: word i of `target` attends to word j of `source`.

    Args:
        source: The stack and the slice of the state that is attended to.
        target: The stack and the slice of the state that attends.
        weights: `[word i, word j]`, the probabilities `P(j | i)`.
        mask: `[word i, word j]`, True where the bnet has an arrow.
    """

    source: tuple[str, int]
    target: tuple[str, int]
    weights: NDArray[np.float64]
    mask: NDArray[np.bool_]


GridEdges = Sequence[tuple[StateAttention, int, int, float]]  # word i attends to word j with this weight


@dataclass(frozen=True)
class GridSelection:
    """The arrows and words of an attention grid.

    Args:
        edges: The arrows, strongest last.
        words: The words of each stack, in order.
        captions: Sentences that count the omitted arrows and words.
    """

    edges: GridEdges
    words: Mapping[str, Sequence[int]]
    captions: tuple[str, ...]


def get_attention_specs(network: Network, slices: Collection[int] | None) -> list[NodeSpec]:
    """Return the nodes with attention over words in these slices; None selects all slices."""
    specs = [spec for spec in network.specs if spec.has_word_attention]
    return [spec for spec in specs if slices is None or spec.group.step in slices]


def get_end_states(network: Network, spec: NodeSpec) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return the states at both ends of an attention: the one that is attended to, and the one that attends."""
    step = spec.group.step or 0
    source = network.get_source_stack(spec)
    out = step if source == spec.group.stack else network.graph.slices[source]
    return (source, out), (spec.group.stack, step + 1)


def select_edges(
    attentions: Sequence[StateAttention],
    words: Mapping[str, Collection[int]],
    options: ReadsOptions,
    reductions: Callable[[], Sequence[str]],
    highlighted: Collection[tuple[str, int]] = (),
) -> GridSelection:
    """Return the arrows and words of the attention grid of these words.

    `options.min_weight` and `options.top` select the arrows; without both, `_rank_edges` does. If more arrows than
    `options.limit` remain, an error names `reductions`, options that select less. The words of `highlighted`, pairs of
    stack and word, are drawn even if no arrow starts or ends at them.
    """
    min_weight, top, limit = options.min_weight, options.top, options.limit
    edges = _collect_edges(attentions, words)
    total = len(edges)
    # A weight is compared with the uniform share of its row: 0.2 is large among 100 words and small among two.
    edges = edges[np.lexsort((edges.j, edges.i, edges.matrix, -edges.gain.round(9)))]
    if min_weight is None and top is None:
        count = MAX_EDGES if limit is None else min(MAX_EDGES, limit)
        edges = edges[_rank_edges(edges, attentions)[:count]]
    else:
        edges = edges[edges.weight >= (min_weight or 0.0)][:top]
    if limit is not None and len(edges) > limit:
        raise limit_error("attention grid", limit, "reads", len(edges), ["min_weight=", "top=", *reductions()])
    selected = [(attentions[k], i, j, weight) for k, i, j, weight, _ in reversed(edges.tolist())]  # strongest on top
    caption = f"Showing {len(edges):,} of {total:,} reads"
    if top is not None:
        caption = f"Showing the {len(edges):,} strongest of {total:,} reads"
    elif min_weight is None:
        caption += ": the strongest of each word, and other strong ones"
    threshold = f" (P(j | i) ≥ {min_weight:.2g})" if min_weight else ""
    shown, omitted = _select_words(words, selected, highlighted)
    return GridSelection(selected, shown, (caption + threshold if len(edges) < total else "", omitted))


def layout_attention_grid(
    tokens: Mapping[str, Sequence[str]],
    stems: Mapping[str, str],
    attentions: Sequence[StateAttention],
    selection: GridSelection,
    density: Density,
) -> Picture:
    """Lay out an attention grid; `stems` maps each stack to the stem of the names of its state nodes."""
    words, edges = selection.words, selection.edges
    end_states = {end for attn in attentions for end in (attn.source, attn.target)}
    states = {stack: sorted(slice_ for name, slice_ in end_states if name == stack) for stack in words}
    is_upright = sum(map(len, words.values())) <= MAX_UPRIGHT_WORDS and density.is_upright is not False
    positions, texts = _position_states(tokens, words, states, is_upright, edges, density)
    connected = {end for attn, i, j, _ in edges for end in ((*attn.source, j), (*attn.target, i))}
    boxes = []
    for (stack, slice_, word), (x, y) in positions.items():
        name = join_name(stems[stack], (slice_, word))
        title = f"{name} “{format_token(tokens[stack][word], None)}”"
        is_idle = (stack, slice_, word) not in connected
        boxes.append(NodeBox(name, x, y, DOT_SIZE, DOT_SIZE, border="dot", is_faded=is_idle, title=title))
    arrows, gap = [], DOT_SIZE / 2 + 1.0
    for attn, i, j, weight in edges:
        (out, before), (into, after) = attn.source, attn.target
        source, target = join_name(stems[out], (before, j)), join_name(stems[into], (after, i))
        (x0, y0), (x1, y1) = positions[out, before, j], positions[into, after, i]
        ends = ((x0, y0 + gap), (x1, y1 - gap)) if is_upright else ((x0 + gap, y0), (x1 - gap, y1))
        arrow = make_arrow(source, target, "accent", weight, f"{source} → {target}: P(j | i) = {weight:.3f}")
        curve = cubic_curve(*ends, sideways=not is_upright, bow=0.4)
        arrows.append(replace(arrow, points=curve, has_head=len(edges) <= 150))
    return Picture(tuple(boxes), tuple(arrows), (), tuple(texts))


def _collect_edges(attentions: Sequence[StateAttention], words: Mapping[str, Collection[int]]) -> EdgeArray:
    """Return every edge between these words."""
    parts = []
    for k, attn in enumerate(attentions):
        rows, columns = np.array(sorted(words[attn.target[0]])), np.array(sorted(words[attn.source[0]]))
        i, j = attn.mask[np.ix_(rows, columns)].nonzero()
        i, j = rows[i], columns[j]
        weight = attn.weights[i, j]
        parts.append((np.full(len(i), k), i, j, weight, weight * attn.mask.sum(1)[i]))
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return np.rec.fromarrays(joined, dtype=EDGE_DTYPE)


def _rank_edges(edges: EdgeArray, attentions: Sequence[StateAttention]) -> NDArray[np.int64]:
    """Return the indices of the edges to draw, most important first; `edges` are sorted by gain.

    The order is: the strongest edge of each word; the strongest edge of each word in each slice, unless these are too
    many; the edges above a threshold.
    """
    stacks = sorted({attn.target[0] for attn in attentions})
    stack = np.array([stacks.index(attn.target[0]) for attn in attentions])[edges.matrix]
    rank = np.where((edges.weight >= MIN_ATTENTION) | (edges.gain >= 2.0), 2, 3)
    width = 1 + int(edges.i.max(initial=0))
    # np.unique returns the first index of each key: in sorted edges, the strongest of each (matrix, word).
    strongest = np.unique(edges.matrix * width + edges.i, return_index=True)[1]
    if len(strongest) <= MAX_EDGES // 2:
        rank[strongest] = 1
    rank[np.unique(stack * width + edges.i, return_index=True)[1]] = 0
    order = np.argsort(rank, kind="stable")
    return order[rank[order] < 3]


def _select_words(
    words: Mapping[str, Collection[int]], edges: GridEdges, highlighted: Collection[tuple[str, int]]
) -> tuple[dict[str, list[int]], str]:
    """Return the words to draw, and a caption that counts the others.

    In a long sentence, words without an arrow are omitted unless they are highlighted.
    """
    ends = {end for attn, i, j, _ in edges for end in ((attn.source[0], j), (attn.target[0], i))} | set(highlighted)
    every_word = {stack: sorted(ids) for stack, ids in words.items()}
    selected = {stack: [word for word in ids if (stack, word) in ends] for stack, ids in every_word.items()}
    total = sum(map(len, every_word.values()))
    num_hidden = total - sum(map(len, selected.values()))
    if total <= MAX_UPRIGHT_WORDS or not ends or not num_hidden:
        return every_word, ""
    return selected, f"{num_hidden:,} of {total:,} words without a drawn read are omitted"


def _position_states(
    tokens: Mapping[str, Sequence[str]],
    words: Mapping[str, Collection[int]],
    states: Mapping[str, Sequence[int]],
    is_upright: bool,
    edges: GridEdges,
    density: Density,
) -> tuple[dict[tuple[str, int, int], Point], list[TextLine]]:
    """Return the point of each (stack, slice, word), and the texts: words at both ends, slices along one side.

    Positions are computed as (across the words, along the slices). These are x and y if `is_upright`, else y and x.
    """
    positions: dict[tuple[str, int, int], Point] = {}
    texts: list[TextLine] = []

    def text(across: float, along: float, label: tuple[TextRun, ...], anchor: str, **style: Any) -> None:
        x, y = (across, along) if is_upright else (along, across)
        texts.append(TextLine(x, y, label, anchor, **style))

    labels = {
        (stack, slice_): (TextRun(f"{stack} " if stack else ""), TextRun("x", "math"), TextRun(str(slice_), "sup"))
        for stack in words
        for slice_ in states[stack]
    }
    pitch = 58.0  # between slices
    if not is_upright:
        depth, label_width = max(map(len, states.values())), max(measure_label(x, STATE_SIZE) for x in labels.values())
        pitch = max(min(max(400.0 / max(depth - 1, 1), 32.0), 110.0) * density.gap, label_width + 5.0, 18.0)
    across = 0.0
    offsets = _stack_offsets(states, edges)
    for stack, word_ids in words.items():
        tokens_shown = [(TextRun(format_token(tokens[stack][i], density.max_token), "token"),) for i in word_ids]
        widths = [measure_label(token, TOKEN_SIZE) for token in tokens_shown]
        centers = [across + offset for offset in (_column_offsets(widths, density) if is_upright else ())]
        centers = centers or [across + WORD_PITCH * k for k in range(len(word_ids))]
        low = pitch * offsets[stack]
        high = pitch * (offsets[stack] + len(states[stack]) - 1)
        is_crossed = any(attn.source[0] == stack != attn.target[0] for attn, *_ in edges)
        before, after = ((13.0, "middle"), (14.0, "middle")) if is_upright else ((9.0, "end"), (9.0, "start"))
        for word, center, token in zip(word_ids, centers, tokens_shown, strict=True):
            for t, slice_ in enumerate(states[stack]):
                along = pitch * (t + offsets[stack])
                positions[stack, slice_, word] = (center, along) if is_upright else (along, center)
            title = format_token(tokens[stack][word], None)
            text(center, low - before[0], token, before[1], size=TOKEN_SIZE, title=title)
            if not is_crossed:
                text(center, high + after[0], token, after[1], size=TOKEN_SIZE, title=title)
        # The labels of the states: left of the first stack, and right of the other stacks, where no arrow crosses them.
        is_first = stack == next(iter(words))
        margins = [width / 2 + 12.0 for width in (widths[:1] or [0.0]) + (widths[-1:] or [0.0])]
        margins = margins if is_upright else [14.0, 14.0]
        side = across - margins[0] if is_first else (centers[-1] if centers else across) + margins[1]
        anchor = ("end" if is_first else "start") if is_upright else "middle"
        for t, slice_ in enumerate(states[stack]):
            text(side, low + pitch * t, labels[stack, slice_], anchor, size=STATE_SIZE, colour="grey")
        across = (centers[-1] if centers else across) + (75.0 + 26.0 if is_upright else 40.0 + WORD_PITCH)
    return positions, texts


def _column_offsets(widths: Sequence[float], density: Density) -> list[float]:
    """The positions of the words of a grid with words as columns: at equal distances, unless the layout is compact."""
    gap = 10.0 * density.gap
    if density.gap >= 1.0:
        step = max(max(widths, default=0.0) + gap, 26.0 * density.gap)
        return [step * k for k in range(len(widths))]
    steps = [max((a + b) / 2 + gap, 14.0) for a, b in itertools.pairwise(widths)]
    return [0.0, *itertools.accumulate(steps)][: len(widths)]


def _stack_offsets(states: Mapping[str, Sequence[int]], edges: GridEdges) -> dict[str, int]:
    """Return the shift of each stack in steps; it puts a state before the states of other stacks that attend to it."""
    offsets = dict.fromkeys(states, 0)
    crossing = {(attn.source, attn.target) for attn, *_ in edges if attn.source[0] != attn.target[0]}
    for out, into in sorted(crossing):
        before = offsets[out[0]] + states[out[0]].index(out[1])
        offsets[into[0]] = max(offsets[into[0]], before + 1 - states[into[0]].index(into[1]))
    return offsets


# --------------------------------------------------------------------------------------------------------------------
# Special tokens that a figure leaves out: which words they are, and how much attention goes to them.


MAX_NAMED_TOKENS = 4  # in a caption or a note


def exclude_words(
    tokens: Mapping[str, Sequence[str]], words: Mapping[str, Collection[int]], special: Mapping[str, Collection[int]]
) -> dict[str, list[int]]:
    """Return the selected words of each stack without special tokens; stacks without a selection stay without one."""
    remaining = {stack: [int(word) for word in selected] for stack, selected in words.items()}
    for stack, indices in special.items():
        selected = remaining.get(stack, range(len(tokens[stack])))
        remaining[stack] = [word for word in selected if word not in indices]
        if not remaining[stack]:
            name = f"the words of the stack {stack}" if stack else "the words"
            raise BNetError("special", expected="words that are no special tokens", actual=f"{name}: all are special")
    return remaining


def exclude_special_words(state: SentenceState, selection: NodeSelection) -> NodeSelection:
    """Return a selection of nodes without those of special tokens."""
    special = state.encoded.find_special_words(state.network)
    return replace(selection, words=exclude_words(state.tokens, selection.words, special))


def describe_special_words(
    tokens: Mapping[str, Sequence[str]],
    words: Mapping[str, Collection[int]],
    special: Mapping[str, Collection[int]],
    attentions: Sequence[StateAttention] = (),
) -> str:
    """Return a caption with the special tokens that are not drawn, and the share of attention that goes to them.

    The share is the mean of `P(j special | i)` over the drawn words i and over `attentions`.
    """
    if not any(special.values()):
        return ""
    hidden = [tokens[stack][k] for stack, ids in special.items() for k in sorted(ids)]
    masses = []
    for attn in attentions:
        rows = sorted(words[attn.target[0]])
        masses += attn.weights[rows][:, sorted(special.get(attn.source[0], ()))].sum(1).tolist()
    return describe_omission(hidden, "drawn", sum(masses) / len(masses) if masses else None)


def describe_omission(hidden: Sequence[str], verb: str, share: float | None = None) -> str:
    """Return a sentence without full stop: which special tokens are not drawn or shown, and their share of attention.

    Args:
        hidden: The token of each word that is left out.
        verb: The participle, "drawn" or "shown".
        share: The mean share of the attention of the other words that goes to them; None for no statement.

    >>> describe_omission(["[CLS]"], "drawn", 0.25)
    'The special token [CLS] is not drawn; 25.0% of the attention of the words drawn goes to it'
    """
    names = list(dict.fromkeys(map(format_token, hidden)))
    joined = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    listed = f" {joined}" if len(names) <= MAX_NAMED_TOKENS else ""
    noun, be, pronoun = ("token", "is", "it") if len(hidden) == 1 else ("tokens", "are", "them")
    text = f"The special {noun}{listed} {be} not {verb}"
    return text if share is None else f"{text}; {share:.1%} of the attention of the words {verb} goes to {pronoun}"
