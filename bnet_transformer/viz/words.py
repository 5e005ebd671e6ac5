"""The reading grid: the state of every word in every slice, and the strongest reads between them.

Words are columns and slices rows; of a long sentence, words are rows. q, k, v and what else a slice computes are folded
into the arrows: word j of one state is read by word i of the next with `P(j | i)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.viz.curves import curve
from bnet_transformer.viz.labels import Run, measured, shown, written
from bnet_transformer.viz.picture import Arrow, Box, Picture, Point, Text
from bnet_transformer.viz.style import link

LEAST = 0.1
TOP = 300
FEW = 12  # words that stand side by side
DOT = 5.0
SIZE = 9.0


@dataclass(frozen=True)
class Reading:
    """`matrix[i, j]`: how much word i of state `into` reads word j of state `out`; a state is a stack and a number."""

    out: tuple[str, int]
    into: tuple[str, int]
    matrix: NDArray[np.float64]


@dataclass(frozen=True)
class Chosen:
    """The reads that are drawn, strongest last, how many there are in all, and by what they were chosen."""

    reads: tuple[tuple[Reading, int, int, float], ...]
    total: int
    rule: str

    @property
    def hidden(self) -> str:
        """What is not drawn, in words."""
        gone = self.total - len(self.reads)
        return f"{gone:,} of {self.total:,} reads are not drawn ({self.rule})" if gone else ""


def chosen(
    readings: Sequence[Reading], words: Mapping[str, Collection[int]], least: float | None, top: int | None
) -> Chosen:
    """The reads of at least so much, at most so many; if neither is told, some of each slice that stand out."""
    total = 0
    found: list[tuple[Reading, int, int, float]] = []
    plain = least is None and top is None
    floor = min([LEAST, *(2.0 / len(words[reading.out[0]]) for reading in readings)]) if plain else least or 0.0
    most = max(TOP // len(readings), 1)
    for reading in readings:
        rows, columns = sorted(words[reading.into[0]]), sorted(words[reading.out[0]])
        part = reading.matrix[np.ix_(rows, columns)]
        total += int((part > 0).sum())
        own = [
            (reading, rows[i], columns[j], float(part[i, j]))
            for i, j in zip(*np.nonzero((part > 0) & (part >= floor)), strict=True)
        ]
        found += sorted(own, key=_strength)[:most] if plain else own
    found.sort(key=_strength)
    rules = [f"P(j | i) below {floor:.2g}"] if floor else []
    rules += [f"past the strongest {most if plain else top}" + (" of a slice" if plain else "")] if plain or top else []
    return Chosen(tuple(reversed(found[:top])), total, ", or ".join(rules))


def _strength(read: tuple[Reading, int, int, float]) -> tuple[float, tuple[str, int], int, int]:
    reading, i, j, share = read
    return -share, reading.into, i, j


def words_picture(
    tokens: Mapping[str, Sequence[str]],
    words: Mapping[str, Collection[int]],
    states: Mapping[str, Sequence[int]],
    name: Callable[[str, int, int], str],
    reads: Chosen,
) -> Picture:
    """The grid; `states` are the slices whose entering states are drawn, `name` the node of a word's state."""
    upright = sum(map(len, words.values())) <= FEW
    place, texts = _places(tokens, words, states, upright, reads)
    busy = {end for r, i, j, _ in reads.reads for end in ((*r.out, j), (*r.into, i))}
    boxes = []
    for (stack, slice_, word), (x, y) in place.items():
        title = f"{name(stack, slice_, word)} “{shown(tokens[stack][word], None)}”"
        idle = (stack, slice_, word) not in busy
        boxes.append(Box(name(stack, slice_, word), x, y, DOT, DOT, border="dot", faded=idle, title=title))
    arrows = [_arrow(read, place, name, upright, len(reads.reads) <= 150) for read in reads.reads]
    return Picture(tuple(boxes), tuple(arrows), (), tuple(texts))


def _arrow(
    read: tuple[Reading, int, int, float],
    place: Mapping[tuple[str, int, int], Point],
    name: Callable[[str, int, int], str],
    upright: bool,
    head: bool,
) -> Arrow:
    reading, i, j, share = read
    source, target = name(*reading.out, j), name(*reading.into, i)
    (x0, y0), (x1, y1) = place[*reading.out, j], place[*reading.into, i]
    gap = DOT / 2 + 1.0
    ends = ((x0, y0 + gap), (x1, y1 - gap)) if upright else ((x0 + gap, y0), (x1 - gap, y1))
    found = link(source, target, "accent", share, f"{source} → {target}: P(j | i) = {share:.3f}")
    return Arrow(
        source,
        target,
        curve(*ends, sideways=not upright, bow=0.4),
        found.colour,
        found.width,
        found.opacity,
        weight=share,
        head=head,
        title=found.title,
    )


def _places(
    tokens: Mapping[str, Sequence[str]],
    words: Mapping[str, Collection[int]],
    states: Mapping[str, Sequence[int]],
    upright: bool,
    reads: Chosen,
) -> tuple[dict[tuple[str, int, int], Point], list[Text]]:
    """Where each state stands; its words at both ends, its slices along one side."""
    place: dict[tuple[str, int, int], Point] = {}
    texts: list[Text] = []
    wide = {
        s: max((measured(written(shown(tokens[s][i])), SIZE) for i in kept), default=0.0) for s, kept in words.items()
    }
    depth = max(map(len, states.values()))
    pitch = 58.0 if upright else min(max(400.0 / max(depth - 1, 1), 32.0), 110.0)
    across = 0.0
    late = _offsets(states, reads)
    for stack, kept in words.items():
        step = max(wide[stack] + 10.0, 26.0) if upright else 11.5
        for k, word in enumerate(sorted(kept)):
            at = across + step * k
            for t, slice_ in enumerate(states[stack]):
                place[stack, slice_, word] = (
                    (at, pitch * (t + late[stack])) if upright else (pitch * (t + late[stack]), at)
                )
            ends = pitch * late[stack], pitch * (late[stack] + len(states[stack]) - 1)
            crossed = any(r.out[0] == stack != r.into[0] for r, *_ in reads.reads)
            texts += _named(tokens[stack][word], at, ends, upright)[: 1 if crossed else 2]
        texts += _numbered(stack, states[stack], (across, ends[0]), pitch, upright, wide[stack])
        across += step * len(kept) + (75.0 if upright else 40.0)
    return place, texts


def _offsets(states: Mapping[str, Sequence[int]], reads: Chosen) -> dict[str, int]:
    """How many steps later the states of a stack stand, so that what it reads of another stands before them."""
    late = dict.fromkeys(states, 0)
    crossing = {(r.out, r.into) for r, *_ in reads.reads if r.out[0] != r.into[0]}
    for out, into in sorted(crossing):
        before = late[out[0]] + states[out[0]].index(out[1])
        late[into[0]] = max(late[into[0]], before + 1 - states[into[0]].index(into[1]))
    return late


def _named(token: str, at: float, ends: tuple[float, float], upright: bool) -> list[Text]:
    """A word at both ends of its states."""
    said, whole = (Run(shown(token), "token"),), shown(token, None)
    low, high = ends
    if upright:
        return [Text(at, low - 13.0, said, size=SIZE, title=whole), Text(at, high + 14.0, said, size=SIZE, title=whole)]
    return [
        Text(low - 9.0, at, said, "end", SIZE, title=whole),
        Text(high + 9.0, at, said, "start", SIZE, title=whole),
    ]


def _numbered(
    stack: str, states: Sequence[int], start: tuple[float, float], pitch: float, upright: bool, wide: float
) -> list[Text]:
    """The states along the side, x with its slice."""
    across, along = start
    found = []
    for t, slice_ in enumerate(states):
        said = (*written(f"{stack} " if stack else ""), Run("x", "math"), Run(str(slice_), "sup"))
        at = along + pitch * t
        spot = (across - wide / 2 - 12.0, at, "end") if upright else (at, across - 14.0, "middle")
        found.append(Text(spot[0], spot[1], said, spot[2], SIZE, "grey"))
    return found
