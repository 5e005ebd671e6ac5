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
from bnet_transformer.figures.labels import Run, measured, shown, written
from bnet_transformer.figures.options import Options, over_limit
from bnet_transformer.figures.picture import Box, Picture, Point, Text, curve
from bnet_transformer.figures.style import link

LEAST = 0.1
TOP = 300
FEW = 12  # words that stand side by side
DOT = 5.0

# A row for each read: the number of its reading, reader, what is read, share, and share against the even one.
READ = np.dtype([("reading", "i8"), ("i", "i8"), ("j", "i8"), ("share", "f8"), ("gain", "f8")])
Pairs = Any  # a record array of these
SIZE = 9.0


@dataclass(frozen=True)
class StateReads:
    """`matrix[i, j]`: how much word i of state `into` reads word j of state `out`; `readable` says where an arrow is.

    A state is a stack and a number.
    """

    out: tuple[str, int]
    into: tuple[str, int]
    matrix: NDArray[np.float64]
    readable: NDArray[np.bool_]


Reads = Sequence[tuple[StateReads, int, int, float]]  # who is read by whom: word i reads word j with this share


def readers_of(network: Network, slices: Collection[int] | None) -> list[NodeSpec]:
    """The members that read words, of some slices (None: of all)."""
    readers = [member for member in network.specs if member.has_word_attention]
    return [member for member in readers if slices is None or member.group.step in slices]


def ends_of(network: Network, member: NodeSpec) -> tuple[tuple[str, int], tuple[str, int]]:
    """The states between which a member reads: of the words that are read, and of those that read."""
    step = member.group.step or 0
    source = network.get_source_stack(member)
    out = step if source == member.group.stack else network.graph.slices[source]
    return (source, out), (member.group.stack, step + 1)


def reading_grid(
    tokens: Mapping[str, Sequence[str]],
    words: Mapping[str, Collection[int]],
    stems: Mapping[str, str],
    readings: Sequence[StateReads],
    asked: Options,
    marked: Collection[tuple[str, int]] = (),
) -> tuple[Picture, list[str]]:
    """The grid of some words, and in words what is not drawn.

    `stems` are those of the states of each stack, `marked` words that have a place in any case.
    """
    every = {end for reading in readings for end in (reading.out, reading.into)}
    states = {stack: sorted(slice_ for own, slice_ in every if own == stack) for stack in words}
    reads, hidden = _chosen(readings, words, asked, parts=not marked)
    words, silent = _spoken(words, reads, marked)
    upright = sum(map(len, words.values())) <= FEW
    place, texts = _places(tokens, words, states, upright, reads)
    busy = {end for r, i, j, _ in reads for end in ((*r.out, j), (*r.into, i))}
    boxes = []
    for (stack, slice_, word), (x, y) in place.items():
        name = join_name(stems[stack], (slice_, word))
        title = f"{name} “{shown(tokens[stack][word], None)}”"
        idle = (stack, slice_, word) not in busy
        boxes.append(Box(name, x, y, DOT, DOT, border="dot", faded=idle, title=title))
    arrows, gap = [], DOT / 2 + 1.0
    for reading, i, j, share in reads:
        (out, before), (into, after) = reading.out, reading.into
        source, target = join_name(stems[out], (before, j)), join_name(stems[into], (after, i))
        (x0, y0), (x1, y1) = place[out, before, j], place[into, after, i]
        ends = ((x0, y0 + gap), (x1, y1 - gap)) if upright else ((x0 + gap, y0), (x1 - gap, y1))
        found = link(source, target, "accent", share, f"{source} → {target}: P(j | i) = {share:.3f}")
        way = curve(*ends, sideways=not upright, bow=0.4)
        arrows.append(replace(found, points=way, head=len(reads) <= 150))
    return Picture(tuple(boxes), tuple(arrows), (), tuple(texts)), [hidden, silent]


def _chosen(
    readings: Sequence[StateReads], words: Mapping[str, Collection[int]], asked: Options, *, parts: bool
) -> tuple[Reads, str]:
    """The reads of at least so much, at most so many, the strongest against the even share of what a word may read;
    and in words what is not drawn.

    If neither is told, the strongest of each word, then those that stand out. Past the limit it refuses, and names
    what fits: fewer reads, or (`parts`) some slices or words.
    """
    least, top, limit = asked.min_weight, asked.top, asked.limit
    pairs = _pairs(readings, words)
    total = len(pairs)
    pairs = pairs[np.lexsort((pairs.j, pairs.i, pairs.reading, -pairs.gain.round(9)))]
    if least is None and top is None:
        most = TOP if limit is None else min(TOP, limit)
        pairs = pairs[_outstanding(pairs, readings)[:most]]
        rule = f"drawn are the strongest of each word, then what is over {LEAST} or twice the even share, up to {most}"
    else:
        pairs = pairs[pairs.share >= (least or 0.0)][:top]
        rules = [f"P(j | i) below {least:.2g}"] if least else []
        rules += [f"past the strongest {top} against the even share"] if top else []
        rule = ", or ".join(rules)
    if limit is not None and len(pairs) > limit:
        raise _too_many(pairs, readings, limit, parts)
    gone = total - len(pairs)
    found = [(readings[r], i, j, share) for r, i, j, share, _ in reversed(pairs.tolist())]  # the strongest last, on top
    return found, f"{gone:,} of {total:,} reads are not drawn ({rule})" if gone else ""


def _pairs(readings: Sequence[StateReads], words: Mapping[str, Collection[int]]) -> Pairs:
    """Every read of an arrow between these words."""
    parts = []
    for number, reading in enumerate(readings):
        rows, columns = np.array(sorted(words[reading.into[0]])), np.array(sorted(words[reading.out[0]]))
        i, j = reading.readable[np.ix_(rows, columns)].nonzero()
        i, j = rows[i], columns[j]
        share = reading.matrix[i, j]
        parts.append((np.full(len(i), number), i, j, share, share * reading.readable.sum(1)[i]))
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return np.rec.fromarrays(joined, dtype=READ)


def _outstanding(pairs: Pairs, readings: Sequence[StateReads]) -> NDArray[np.int64]:
    """Of reads in order of strength: the first of each word, of each word of a slice where few, then the strong."""
    stacks = sorted({reading.into[0] for reading in readings})
    stack = np.array([stacks.index(reading.into[0]) for reading in readings])[pairs.reading]
    rank = np.where((pairs.share >= LEAST) | (pairs.gain >= 2.0), 2, 3)
    wide = 1 + int(pairs.i.max(initial=0))
    own = np.unique(pairs.reading * wide + pairs.i, return_index=True)[1]
    if len(own) <= TOP // 2:
        rank[own] = 1
    rank[np.unique(stack * wide + pairs.i, return_index=True)[1]] = 0
    order = np.argsort(rank, kind="stable")
    return order[rank[order] < 3]


def _too_many(pairs: Pairs, readings: Sequence[StateReads], limit: int, with_parts: bool) -> BudgetError:
    """The error for a grid past the limit: how many reads, and three filters that fit it."""
    fits = [f"top={limit} ({limit} reads)"] if limit else []
    for told in np.unique(np.ceil(np.sort(pairs.share)[::-1][limit] * 100) / 100 + np.arange(3) / 100).tolist():
        if len(fits) < 2 and 0 < (count := int((pairs.share >= told).sum())) <= limit:
            fits.append(f"min_weight={told:.2g} ({count} reads)")
    steps = np.array([reading.into[1] - 1 for reading in readings])[pairs.reading]
    parts = [(f"slices={step}", steps == step) for step in np.unique(steps).tolist()]
    parts += [(f"words=range({n})", (pairs.i < n) & (pairs.j < n)) for n in (32, 16, 8, 5, 3)]
    for name, kept in parts if with_parts else ():
        if len(fits) < 3 and 0 < (count := int(kept.sum())) <= limit:
            fits.append(f"{name} ({count} reads)")
    count = len(pairs)
    return over_limit("reading grid", limit, "reads", f"{count} reads", fits, count)


def _spoken(
    words: Mapping[str, Collection[int]], reads: Reads, marked: Collection[tuple[str, int]]
) -> tuple[dict[str, list[int]], str]:
    """The words that have a place: of a long sentence those that are marked or have a read, where any has one; and how
    many have none."""
    busy = {end for r, i, j, _ in reads for end in ((r.out[0], j), (r.into[0], i))} | set(marked)
    every = {stack: sorted(own) for stack, own in words.items()}
    kept = {stack: [word for word in own if (stack, word) in busy] for stack, own in every.items()}
    total = sum(map(len, every.values()))
    gone = total - sum(map(len, kept.values()))
    if total <= FEW or not busy or not gone:
        return every, ""
    return kept, f"{gone:,} of {total:,} words have no drawn read, and no place"


def _places(
    tokens: Mapping[str, Sequence[str]],
    words: Mapping[str, Collection[int]],
    states: Mapping[str, Sequence[int]],
    upright: bool,
    reads: Reads,
) -> tuple[dict[tuple[str, int, int], Point], list[Text]]:
    """Where each state stands; its words at both ends, its slices along one side.

    A place is `(across, along)`: where words stand side by side (`upright`) that is x and y, else y and x.
    """
    place: dict[tuple[str, int, int], Point] = {}
    texts: list[Text] = []

    def text(across: float, along: float, label: tuple[Run, ...], anchor: str, **look: str) -> None:
        x, y = (across, along) if upright else (along, across)
        texts.append(Text(x, y, label, anchor, SIZE, **look))

    depth = max(map(len, states.values()))
    pitch = 58.0 if upright else min(max(400.0 / max(depth - 1, 1), 32.0), 110.0)
    across = 0.0
    late = _offsets(states, reads)
    for stack, kept in words.items():
        wide = max((measured(written(shown(tokens[stack][i])), SIZE) for i in kept), default=0.0)
        step = max(wide + 10.0, 26.0) if upright else 11.5
        low = pitch * late[stack]
        high = pitch * (late[stack] + len(states[stack]) - 1)
        is_crossed = any(r.out[0] == stack != r.into[0] for r, *_ in reads)
        before, after = ((13.0, "middle"), (14.0, "middle")) if upright else ((9.0, "end"), (9.0, "start"))
        for k, word in enumerate(sorted(kept)):
            at = across + step * k
            for t, slice_ in enumerate(states[stack]):
                along = pitch * (t + late[stack])
                place[stack, slice_, word] = (at, along) if upright else (along, at)
            label, whole = (Run(shown(tokens[stack][word]), "token"),), shown(tokens[stack][word], None)
            text(at, low - before[0], label, before[1], title=whole)
            if not is_crossed:
                text(at, high + after[0], label, after[1], title=whole)
        # The states along the side, x with its slice; of a later stack where no read between stacks passes.
        is_first = stack == next(iter(words))
        beside = wide / 2 + 12.0 if upright else 14.0
        side = across - beside if is_first else across + step * max(len(kept) - 1, 0) + beside
        anchor = ("end" if is_first else "start") if upright else "middle"
        for t, slice_ in enumerate(states[stack]):
            number = (*written(f"{stack} " if stack else ""), Run("x", "math"), Run(str(slice_), "sup"))
            text(side, low + pitch * t, number, anchor, colour="grey")
        across += step * len(kept) + (75.0 if upright else 40.0)
    return place, texts


def _offsets(states: Mapping[str, Sequence[int]], reads: Reads) -> dict[str, int]:
    """How many steps later the states of a stack stand, so that what it reads of another stands before them."""
    late = dict.fromkeys(states, 0)
    crossing = {(r.out, r.into) for r, *_ in reads if r.out[0] != r.into[0]}
    for out, into in sorted(crossing):
        before = late[out[0]] + states[out[0]].index(out[1])
        late[into[0]] = max(late[into[0]], before + 1 - states[into[0]].index(into[1]))
    return late
