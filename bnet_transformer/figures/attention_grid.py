"""The reading grid: the state of every word in every slice, and the strongest reads between them.

Words are columns and slices rows; of a long sentence, words are rows. q, k, v and what else a slice computes are folded
into the arrows: word j of one state is read by word i of the next with `P(j | i)`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.naming import join_name
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.errors import BudgetError
from bnet_transformer.figures.labels import TextRun, format_token, measure_label, text_to_label
from bnet_transformer.figures.options import FigureOptions, limit_error
from bnet_transformer.figures.picture import NodeBox, Picture, Point, TextLine, cubic_curve
from bnet_transformer.figures.style import make_arrow

MIN_ATTENTION = 0.1
MAX_EDGES = 300
MAX_UPRIGHT_WORDS = 12  # words that stand side by side
DOT_SIZE = 5.0

# A row for each read: the number of its reading, reader, what is read, share, and share against the even one.
EDGE_DTYPE = np.dtype([("reading", "i8"), ("i", "i8"), ("j", "i8"), ("share", "f8"), ("gain", "f8")])
EdgeArray = Any  # a record array of these
TOKEN_SIZE = 9.0


@dataclass(frozen=True)
class StateAttention:
    """`matrix[i, j]`: how much word i of state `target` reads word j of state `source`; `mask` says where an arrow is.

    A state is a stack and a number.
    """

    source: tuple[str, int]
    target: tuple[str, int]
    attention: NDArray[np.float64]
    mask: NDArray[np.bool_]


GridEdges = Sequence[tuple[StateAttention, int, int, float]]  # who is read by whom: word i reads word j with this share


def get_attention_specs(network: Network, slices: Collection[int] | None) -> list[NodeSpec]:
    """The members that read words, of some slices (None: of all)."""
    readers = [member for member in network.specs if member.has_word_attention]
    return [member for member in readers if slices is None or member.group.step in slices]


def get_end_states(network: Network, spec: NodeSpec) -> tuple[tuple[str, int], tuple[str, int]]:
    """The states between which a member reads: of the words that are read, and of those that read."""
    step = spec.group.step or 0
    source = network.get_source_stack(spec)
    out = step if source == spec.group.stack else network.graph.slices[source]
    return (source, out), (spec.group.stack, step + 1)


def layout_attention_grid(
    tokens: Mapping[str, Sequence[str]],
    words: Mapping[str, Collection[int]],
    stems: Mapping[str, str],
    attentions: Sequence[StateAttention],
    options: FigureOptions,
    highlighted: Collection[tuple[str, int]] = (),
) -> tuple[Picture, list[str]]:
    """The grid of some words, and in words what is not drawn.

    `stems` are those of the states of each stack, `highlighted` words that have a place in any case.
    """
    every = {end for reading in attentions for end in (reading.source, reading.target)}
    states = {stack: sorted(slice_ for own, slice_ in every if own == stack) for stack in words}
    reads, hidden = _select_edges(attentions, words, options, can_filter=not highlighted)
    words, silent = _select_words(words, reads, highlighted)
    upright = sum(map(len, words.values())) <= MAX_UPRIGHT_WORDS
    place, texts = _position_states(tokens, words, states, upright, reads)
    busy = {end for r, i, j, _ in reads for end in ((*r.source, j), (*r.target, i))}
    boxes = []
    for (stack, slice_, word), (x, y) in place.items():
        name = join_name(stems[stack], (slice_, word))
        title = f"{name} “{format_token(tokens[stack][word], None)}”"
        idle = (stack, slice_, word) not in busy
        boxes.append(NodeBox(name, x, y, DOT_SIZE, DOT_SIZE, border="dot", is_faded=idle, title=title))
    arrows, gap = [], DOT_SIZE / 2 + 1.0
    for reading, i, j, share in reads:
        (out, before), (into, after) = reading.source, reading.target
        source, target = join_name(stems[out], (before, j)), join_name(stems[into], (after, i))
        (x0, y0), (x1, y1) = place[out, before, j], place[into, after, i]
        ends = ((x0, y0 + gap), (x1, y1 - gap)) if upright else ((x0 + gap, y0), (x1 - gap, y1))
        found = make_arrow(source, target, "accent", share, f"{source} → {target}: P(j | i) = {share:.3f}")
        way = cubic_curve(*ends, sideways=not upright, bow=0.4)
        arrows.append(replace(found, points=way, has_head=len(reads) <= 150))
    return Picture(tuple(boxes), tuple(arrows), (), tuple(texts)), [hidden, silent]


def _select_edges(
    attentions: Sequence[StateAttention],
    words: Mapping[str, Collection[int]],
    options: FigureOptions,
    *,
    can_filter: bool,
) -> tuple[GridEdges, str]:
    """The reads of at least so much, at most so many, the strongest against the even share of what a word may read;
    and in words what is not drawn.

    If neither is told, the strongest of each word, then those that stand out. Past the limit it refuses, and names
    what fits: fewer reads, or (`can_filter`) some slices or words.
    """
    least, top, limit = options.min_weight, options.top, options.limit
    pairs = _collect_edges(attentions, words)
    total = len(pairs)
    pairs = pairs[np.lexsort((pairs.j, pairs.i, pairs.reading, -pairs.gain.round(9)))]
    if least is None and top is None:
        most = MAX_EDGES if limit is None else min(MAX_EDGES, limit)
        pairs = pairs[_rank_edges(pairs, attentions)[:most]]
        rule = f"drawn are the strongest of each word, then what is over {MIN_ATTENTION} or twice the even share, up to {most}"
    else:
        pairs = pairs[pairs.share >= (least or 0.0)][:top]
        rules = [f"P(j | i) below {least:.2g}"] if least else []
        rules += [f"past the strongest {top} against the even share"] if top else []
        rule = ", or ".join(rules)
    if limit is not None and len(pairs) > limit:
        raise _edge_limit_error(pairs, attentions, limit, can_filter)
    gone = total - len(pairs)
    found = [
        (attentions[r], i, j, share) for r, i, j, share, _ in reversed(pairs.tolist())
    ]  # the strongest last, on top
    return found, f"{gone:,} of {total:,} reads are not drawn ({rule})" if gone else ""


def _collect_edges(attentions: Sequence[StateAttention], words: Mapping[str, Collection[int]]) -> EdgeArray:
    """Every read of an arrow between these words."""
    parts = []
    for number, reading in enumerate(attentions):
        rows, columns = np.array(sorted(words[reading.target[0]])), np.array(sorted(words[reading.source[0]]))
        i, j = reading.mask[np.ix_(rows, columns)].nonzero()
        i, j = rows[i], columns[j]
        share = reading.attention[i, j]
        parts.append((np.full(len(i), number), i, j, share, share * reading.mask.sum(1)[i]))
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return np.rec.fromarrays(joined, dtype=EDGE_DTYPE)


def _rank_edges(edges: EdgeArray, attentions: Sequence[StateAttention]) -> NDArray[np.int64]:
    """Of reads in order of strength: the first of each word, of each word of a slice where few, then the strong."""
    stacks = sorted({reading.target[0] for reading in attentions})
    stack = np.array([stacks.index(reading.target[0]) for reading in attentions])[edges.reading]
    rank = np.where((edges.share >= MIN_ATTENTION) | (edges.gain >= 2.0), 2, 3)
    wide = 1 + int(edges.i.max(initial=0))
    own = np.unique(edges.reading * wide + edges.i, return_index=True)[1]
    if len(own) <= MAX_EDGES // 2:
        rank[own] = 1
    rank[np.unique(stack * wide + edges.i, return_index=True)[1]] = 0
    order = np.argsort(rank, kind="stable")
    return order[rank[order] < 3]


def _edge_limit_error(
    edges: EdgeArray, attentions: Sequence[StateAttention], limit: int, can_filter: bool
) -> BudgetError:
    """The error for a grid past the limit: how many reads, and three filters that fit it."""
    fits = [f"top={limit} ({limit} reads)"] if limit else []
    for told in np.unique(np.ceil(np.sort(edges.share)[::-1][limit] * 100) / 100 + np.arange(3) / 100).tolist():
        if len(fits) < 2 and 0 < (count := int((edges.share >= told).sum())) <= limit:
            fits.append(f"min_weight={told:.2g} ({count} reads)")
    steps = np.array([reading.target[1] - 1 for reading in attentions])[edges.reading]
    parts = [(f"slices={step}", steps == step) for step in np.unique(steps).tolist()]
    parts += [(f"words=range({n})", (edges.i < n) & (edges.j < n)) for n in (32, 16, 8, 5, 3)]
    for name, kept in parts if can_filter else ():
        if len(fits) < 3 and 0 < (count := int(kept.sum())) <= limit:
            fits.append(f"{name} ({count} reads)")
    count = len(edges)
    return limit_error("reading grid", limit, "reads", f"{count} reads", fits, count)


def _select_words(
    words: Mapping[str, Collection[int]], edges: GridEdges, highlighted: Collection[tuple[str, int]]
) -> tuple[dict[str, list[int]], str]:
    """The words that have a place: of a long sentence those that are marked or have a read, where any has one; and how
    many have none."""
    busy = {end for r, i, j, _ in edges for end in ((r.source[0], j), (r.target[0], i))} | set(highlighted)
    every = {stack: sorted(own) for stack, own in words.items()}
    kept = {stack: [word for word in own if (stack, word) in busy] for stack, own in every.items()}
    total = sum(map(len, every.values()))
    gone = total - sum(map(len, kept.values()))
    if total <= MAX_UPRIGHT_WORDS or not busy or not gone:
        return every, ""
    return kept, f"{gone:,} of {total:,} words have no drawn read, and no place"


def _position_states(
    tokens: Mapping[str, Sequence[str]],
    words: Mapping[str, Collection[int]],
    states: Mapping[str, Sequence[int]],
    is_upright: bool,
    edges: GridEdges,
) -> tuple[dict[tuple[str, int, int], Point], list[TextLine]]:
    """Where each state stands; its words at both ends, its slices along one side.

    A place is `(across, along)`: where words stand side by side (`is_upright`) that is x and y, else y and x.
    """
    place: dict[tuple[str, int, int], Point] = {}
    texts: list[TextLine] = []

    def text(across: float, along: float, label: tuple[TextRun, ...], anchor: str, **look: str) -> None:
        x, y = (across, along) if is_upright else (along, across)
        texts.append(TextLine(x, y, label, anchor, TOKEN_SIZE, **look))

    depth = max(map(len, states.values()))
    pitch = 58.0 if is_upright else min(max(400.0 / max(depth - 1, 1), 32.0), 110.0)
    across = 0.0
    late = _stack_offsets(states, edges)
    for stack, kept in words.items():
        wide = max(
            (measure_label(text_to_label(format_token(tokens[stack][i])), TOKEN_SIZE) for i in kept), default=0.0
        )
        step = max(wide + 10.0, 26.0) if is_upright else 11.5
        low = pitch * late[stack]
        high = pitch * (late[stack] + len(states[stack]) - 1)
        is_crossed = any(r.source[0] == stack != r.target[0] for r, *_ in edges)
        before, after = ((13.0, "middle"), (14.0, "middle")) if is_upright else ((9.0, "end"), (9.0, "start"))
        for k, word in enumerate(sorted(kept)):
            at = across + step * k
            for t, slice_ in enumerate(states[stack]):
                along = pitch * (t + late[stack])
                place[stack, slice_, word] = (at, along) if is_upright else (along, at)
            label, whole = (
                (TextRun(format_token(tokens[stack][word]), "token"),),
                format_token(tokens[stack][word], None),
            )
            text(at, low - before[0], label, before[1], title=whole)
            if not is_crossed:
                text(at, high + after[0], label, after[1], title=whole)
        # The states along the side, x with its slice; of a later stack where no read between stacks passes.
        is_first = stack == next(iter(words))
        beside = wide / 2 + 12.0 if is_upright else 14.0
        side = across - beside if is_first else across + step * max(len(kept) - 1, 0) + beside
        anchor = ("end" if is_first else "start") if is_upright else "middle"
        for t, slice_ in enumerate(states[stack]):
            number = (*text_to_label(f"{stack} " if stack else ""), TextRun("x", "math"), TextRun(str(slice_), "sup"))
            text(side, low + pitch * t, number, anchor, colour="grey")
        across += step * len(kept) + (75.0 if is_upright else 40.0)
    return place, texts


def _stack_offsets(states: Mapping[str, Sequence[int]], edges: GridEdges) -> dict[str, int]:
    """How many steps later the states of a stack stand, so that what it reads of another stands before them."""
    late = dict.fromkeys(states, 0)
    crossing = {(r.source, r.target) for r, *_ in edges if r.source[0] != r.target[0]}
    for out, into in sorted(crossing):
        before = late[out[0]] + states[out[0]].index(out[1])
        late[into[0]] = max(late[into[0]], before + 1 - states[into[0]].index(into[1]))
    return late
