"""Separation: which nodes tell of each other, given others. Many questions at once, each on a bit of its own.

Balls roll along arrows (Shachter 1998): past a node that is not given, and back up from one that is. A set of nodes is
an array of bits for each family, so that one step along a bundle of arrows is one array operation. A question names few
words and heads, and those that it does not name are alike: mapping each word to the greatest kept one at or before it
takes arrows to arrows, so the balls need only the graph of the words named, their next ones and both ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.naming import WORD
from bnet_transformer.graph.folded import Family
from bnet_transformer.graph.ground import Ground, Ids
from bnet_transformer.graph.walk import Cut, moved

Bits = NDArray[np.uint64]  # [..., lanes]: bit q % 64 of lane q // 64 belongs to question q
LANE = 64
MOST_BITS = 2**28
ALIKE = ("same", "every", "causal", "first", "last")  # the reaches that a map of words as above takes to themselves


@dataclass(frozen=True)
class Question:
    """Are the nodes `x` and `y` separated by `given`?"""

    x: frozenset[int]
    y: frozenset[int]
    given: frozenset[int] = frozenset()

    @property
    def nodes(self) -> frozenset[int]:
        """All nodes that it names."""
        return self.x | self.y | self.given


def separated(ground: Ground, questions: Sequence[Question], functions: Collection[int] = ()) -> NDArray[np.bool_]:
    """For each question, whether it is so. `functions` are families whose nodes their parents determine: what is given
    then closes under what it determines (D-separation: Geiger, Verma and Pearl 1990), as does what is set.
    """
    found = np.zeros(len(questions), dtype=bool)
    start = 0
    while start < len(questions):
        size = max(LANE, MOST_BITS // max(1, len(thinned(ground, [questions[start].nodes]).ground)) // LANE * LANE)
        chunk = questions[start : start + min(size, 64 * LANE)]
        found[start : start + len(chunk)] = _separated(ground, chunk, functions)
        start += len(chunk)
    return found


def _separated(ground: Ground, questions: Sequence[Question], functions: Collection[int]) -> NDArray[np.bool_]:
    thin = thinned(ground, [question.nodes for question in questions])
    count = len(questions)
    x, y, given = (
        marks(thin.ground, count, thin.numbers([getattr(question, part) for question in questions]))
        for part in ("x", "y", "given")
    )
    cut = cuts(ground, thin.ground, *(thin.numbers([some] * count) for some in (ground.cut, ground.rows)))
    blocked = determined(thin.ground, given, cut, functions)
    y &= ~blocked
    hit = np.bitwise_or.reduce(roll(thin.ground, x, given, blocked, cut, goal=y) & y, axis=0)
    return ~np.unpackbits(hit.view(np.uint8), bitorder="little")[:count].astype(bool)


def determined(ground: Ground, given: Bits, cut: Cut, functions: Collection[int]) -> Bits:
    """The nodes that what is given determines, itself among them; with no `functions`, itself alone."""
    if not functions:
        return given
    # what is not determined: a root counts as free, whatever its TPM
    folded, found, open_ = ground.folded, np.zeros_like(given), ~given
    for index, bits in cut.nodes.items():
        part = view(ground, open_, index)
        part &= ~bits
    for group in folded.groups or tuple((family.index,) for family in folded.families):
        while True:
            grown = False
            for index in group:
                part = view(ground, found, index)
                if index in functions and folded.into[index]:
                    parts = ((b, view(ground, found, b.parent)) for b in folded.into[index])
                    above = (moved(ground, b, bits, cut, up=False) for b, bits in parts)
                    now = reduce(np.bitwise_or, above) & view(ground, open_, index)
                else:
                    now = view(ground, open_, index)
                grown |= bool((now & ~part).any())
                part |= now
            if not grown or (len(group) == 1 and all(b.parent != group[0] for b in folded.into[group[0]])):
                break
    return ~found


# the words and heads that a question does not name


@dataclass(frozen=True)
class Thinned:
    """A smaller ground graph for each question, all of one size: `kept[q][axis]` are the indices that question q keeps
    of an axis, a plate or the words of a stack.
    """

    ground: Ground
    full: Ground
    kept: tuple[dict[tuple[str, str], Sequence[int]], ...]

    def numbers(self, nodes: Sequence[Iterable[int]]) -> list[list[int]]:
        """The nodes of each question as numbers of the smaller graph."""
        found = []
        for some, kept in zip(nodes, self.kept, strict=True):
            own = []
            for node in some:
                family, index = self.full.place(node)
                at = [kept[axis].index(i) for axis, i in zip(_axes(family), index, strict=True)]
                own.append(self.ground.number(family, at))
            found.append(own)
        return found

    def name(self, node: int, question: int = 0) -> int:
        """The number in the full graph of a node of the smaller one."""
        family, index = self.ground.place(node)
        kept = self.kept[question]
        return self.full.number(family, [kept[axis][i] for axis, i in zip(_axes(family), index, strict=True)])

    def surgery(self) -> Ground:
        """The smaller graph of the first question, without the arrows that the full one has lost."""
        cut, rows = (self.numbers([some])[0] for some in (self.full.cut, self.full.rows))
        return self.ground.surgery(cut, dict(zip(rows, self.full.rows.values(), strict=True)))


def thinned(ground: Ground, named: Sequence[Iterable[int]]) -> Thinned:
    """The smaller graphs for questions that name these nodes."""
    full = {(plate, ""): size for plate, size in ground.folded.sizes.items()}
    full |= {(WORD, stack): size for stack, size in ground.words.items()}
    wanted = [_named(ground, {*nodes, *ground.cut, *ground.rows}) for nodes in named]
    least = [{axis: _least(axis, each.get(axis, set()), size) for axis, size in full.items()} for each in wanted]
    sizes = {axis: max(len(each[axis]) for each in least) for axis in full}
    sizes |= {axis: full[axis] for axis in _rigid(ground)}
    kept = tuple({axis: _filled(some, sizes[axis], full[axis]) for axis, some in each.items()} for each in least)
    plates = {plate: sizes[plate, ""] for plate in ground.folded.sizes}
    small = Ground(replace(ground.folded, sizes=plates), {stack: sizes[WORD, stack] for stack in ground.words})
    return Thinned(small, ground, kept)


def _filled(some: set[int], size: int, full: int) -> Sequence[int]:
    """So many of the indices of an axis, these among them, in order."""
    if size == full:
        return range(full)
    more = (i for i in range(full) if i not in some)
    return sorted([*some, *islice(more, size - len(some))])


def _least(axis: tuple[str, str], named: set[int], size: int) -> set[int]:
    """The indices that must be kept of an axis: of words those named, both ends, and the one after each; of a plate
    those named and one more."""
    if axis[0] == WORD:
        return {i for word in (0, *named, size - 1) for i in (word, word + 1) if i < size}
    other = next((i for i in range(size) if i not in named), None)
    return named if other is None else {*named, other}


def _rigid(ground: Ground) -> set[tuple[str, str]]:
    """The words that cannot be thinned, for a reach among them tells words apart by more than their order."""
    found = set()
    for bundle in ground.folded.bundles:
        child, parent = ground.folded.families[bundle.child], ground.folded.families[bundle.parent]
        across = child.words is not None and child.words != parent.words
        for reach in bundle.reaches if parent.words is not None else ():
            if reach.kind not in ALIKE or (across and reach.kind in ("same", "causal")):
                found |= {(WORD, stack) for stack in (child.words, parent.words) if stack is not None}
    return found


def _named(ground: Ground, nodes: Iterable[int]) -> dict[tuple[str, str], set[int]]:
    found: dict[tuple[str, str], set[int]] = {}
    for node in nodes:
        family, index = ground.place(node)
        for axis, i in zip(_axes(family), index, strict=True):
            found.setdefault(axis, set()).add(i)
    return found


def _axes(family: Family) -> list[tuple[str, str]]:
    return [(plate, "") for plate in family.plates] + ([] if family.words is None else [(WORD, family.words)])


# the balls


def marks(ground: Ground, count: int, nodes: Sequence[Iterable[int]]) -> Bits:
    """`[node, lanes]`: the bit of each question at its nodes."""
    found: Bits = np.zeros((len(ground), -(-count // LANE)), dtype=np.uint64)
    pairs = [(node, question) for question, some in enumerate(nodes) for node in some]
    if pairs:
        node, question = np.array(pairs).T
        bit = np.uint64(1) << (question % LANE).astype(np.uint64)
        np.bitwise_or.at(found, (node, question // LANE), bit)
    return found


def cuts(ground: Ground, small: Ground, cut: Sequence[Iterable[int]], rows: Sequence[Iterable[int]]) -> Cut:
    """What surgery took of a graph, as bits of a smaller one, in which each question has these numbers for it."""
    nodes, some = (marks(small, len(cut), numbers) for numbers in (cut, rows))
    return Cut(by_family(small, nodes), by_family(small, some & ~nodes), ground)


def roll(
    ground: Ground,
    start: Bits,
    given: Bits,
    blocked: Bits,
    cut: Cut,
    within: Bits | None = None,
    goal: Bits | None = None,
) -> Bits:
    """`[node, lanes]`: where the balls come that start at `start`; they stay inside `within`, and may stop once each
    question that has a `goal` has come to it.
    """
    families = range(len(ground.folded.families))
    sides = {"given": given, "blocked": blocked, "up": start.copy(), "down": np.zeros_like(start)}
    told = {name: [view(ground, bits, index) for index in families] for name, bits in sides.items()}
    inside = None if within is None else [view(ground, within, index) for index in families]
    waiting: dict[str, dict[int, Bits]] = {"up": {}, "down": {}}
    goals = {} if goal is None else by_family(ground, goal)
    short: Bits = start[0] * 0 if goal is None else np.bitwise_or.reduce(goal, axis=0)

    def send(index: int, bits: Bits, way: str) -> None:
        up = way == "up"
        if not bits.any():
            return
        for bundle in (ground.folded.into if up else ground.folded.out_of)[index]:
            other = bundle.parent if up else bundle.child
            come = moved(ground, bundle, bits, cut, up=up)
            fresh = come & ~told[way][other] if inside is None else come & ~told[way][other] & inside[other]
            if fresh.any():
                told[way][other] |= fresh
                waiting[way][other] = waiting[way][other] | fresh if other in waiting[way] else fresh
                if other in goals:
                    come = (fresh & goals[other]).reshape(-1, len(short))
                    np.bitwise_and(short, ~np.bitwise_or.reduce(come, axis=0), out=short)

    waiting["up"] |= by_family(ground, start)
    while (waiting["up"] or waiting["down"]) and (goal is None or short.any()):
        rising = bool(waiting["up"])
        way = "up" if rising else "down"
        index = max(waiting[way]) if rising else min(waiting[way])
        bits = waiting[way].pop(index)
        past = bits & ~told["blocked"][index]
        send(index, past if rising else bits & told["given"][index], "up")
        send(index, past, "down")
    return sides["up"] | sides["down"]


def by_family(ground: Ground, bits: Bits) -> dict[int, Bits]:
    """The bits of each family that has some."""
    nodes = np.flatnonzero(bits.any(axis=-1))
    families = np.unique(np.searchsorted(ground.offsets, nodes, side="right") - 1)
    return {index: view(ground, bits, index) for index in families.tolist()}


def view(ground: Ground, bits: Bits, index: int) -> Bits:
    """The part of a family, `[*plates, word, lanes]`."""
    low, high = int(ground.offsets[index]), int(ground.offsets[index + 1])
    return bits[low:high].reshape(*ground.shapes[index], bits.shape[-1])


def ids_of(bits: Bits) -> Ids:
    """The nodes at which the first question has its bit."""
    return np.flatnonzero(bits[:, 0] & np.uint64(1))
