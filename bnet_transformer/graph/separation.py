"""Separation: which nodes tell of each other, given others. Many questions at once, each on a bit of its own.

Balls roll along arrows (Shachter 1998): past a node that is not given, and back up from one that is. A set of nodes is
an array of bits for each family, so that one step along a bundle of arrows is one array operation. A question names few
words and heads, and those that it does not name are alike: mapping each word to the greatest kept one at or before it
takes arrows to arrows, so the balls need only the graph of the words named, their next ones and both ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.axes import WORD
from bnet_transformer.graph.folded import Bundle, Family
from bnet_transformer.graph.ground import Ground, Ids, Kept, strides
from bnet_transformer.graph.walk import descendants, stepped

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


def reaches(ground: Ground, x: int, y: int) -> bool:
    """True where a path of arrows leads from x to y."""
    thin = thinned(ground, [{x, y}])
    ((source, target),) = thin.numbers([[x, y]])
    return target in descendants(thin.surgery(ground), [source])


def determined(ground: Ground, given: Bits, cut: Cut, functions: Collection[int]) -> Bits:
    """The nodes that what is given determines, itself among them; with no `functions`, itself alone."""
    return ~_undetermined(ground, given, cut, functions) if functions else given


def _undetermined(ground: Ground, given: Bits, cut: Cut, functions: Collection[int]) -> Bits:
    """The nodes that what is given or set does not determine; a root counts as free, whatever its TPM."""
    folded, found = ground.folded, np.zeros_like(given)
    open_ = ~(given | cut.nodes)
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
    return found


# the words and heads that a question does not name


@dataclass(frozen=True)
class Thinned:
    """A smaller ground graph for each question, all of one size: `kept[q][axis]` are the indices that question q keeps
    of an axis, a plate or the words of a stack; an axis that is not there is whole.
    """

    ground: Ground
    full: Ground
    kept: tuple[dict[tuple[str, str], tuple[int, ...]], ...]
    places: tuple[dict[tuple[str, str], dict[int, int]], ...] = field(repr=False)

    def numbers(self, nodes: Sequence[Iterable[int]]) -> list[list[int]]:
        """The nodes of each question as numbers of the smaller graph."""
        found = []
        for some, places in zip(nodes, self.places, strict=True):
            own = []
            for node in some:
                family, index = self.full.place(node)
                at, steps = int(self.ground.offsets[family.index]), strides(self.ground.shapes[family.index])
                for axis, i, stride in zip(_axes(family), index, steps, strict=True):
                    at += (places[axis][i] if axis in places else i) * stride
                own.append(at)
            found.append(own)
        return found

    def name(self, node: int, question: int = 0) -> int:
        """The number in the full graph of a node of the smaller one."""
        family, index = self.ground.place(node)
        kept, at = self.kept[question], int(self.full.offsets[family.index])
        for axis, i, stride in zip(_axes(family), index, strides(self.full.shapes[family.index]), strict=True):
            at += (kept[axis][i] if axis in kept else i) * stride
        return at

    def surgery(self, full: Ground) -> Ground:
        """The smaller graph of the first question, without the arrows that the full one has lost."""
        cut, rows = (self.numbers([some])[0] for some in (full.cut, full.rows))
        kept = dict(zip(rows, full.rows.values(), strict=True))
        return Ground(self.ground.folded, self.ground.words, cut, kept)


def thinned(ground: Ground, named: Sequence[Iterable[int]]) -> Thinned:
    """The smaller graphs for questions that name these nodes."""
    wanted = [_named(ground, {*nodes, *ground.cut, *ground.rows}) for nodes in named]
    axes = {axis for each in wanted for axis in each} | {(WORD, stack) for stack in ground.words}
    axes |= {(plate, "") for plate in ground.folded.sizes}
    sizes = {}
    for axis in axes:
        full = _size(ground, axis)
        size = max(len(_least(axis, each.get(axis, set()), full)) for each in wanted)
        if size < full and axis not in _rigid(ground):
            sizes[axis] = size
    kept = []
    for each in wanted:
        own = {}
        for axis, size in sizes.items():
            least = _least(axis, each.get(axis, set()), _size(ground, axis))
            more = (i for i in range(_size(ground, axis)) if i not in least)
            own[axis] = tuple(sorted([*least, *(next(more) for _ in range(size - len(least)))]))
        kept.append(own)
    plates = {plate: sizes.get((plate, ""), size) for plate, size in ground.folded.sizes.items()}
    words = {stack: sizes.get((WORD, stack), size) for stack, size in ground.words.items()}
    small = Ground(replace(ground.folded, sizes=plates), words)
    places = tuple({axis: {i: k for k, i in enumerate(some)} for axis, some in own.items()} for own in kept)
    return Thinned(small, ground, tuple(kept), places)


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


def _size(ground: Ground, axis: tuple[str, str]) -> int:
    return ground.words[axis[1]] if axis[0] == WORD else ground.folded.sizes[axis[0]]


def _axes(family: Family) -> list[tuple[str, str]]:
    return [(plate, "") for plate in family.plates] + ([] if family.words is None else [(WORD, family.words)])


# the balls


@dataclass(frozen=True)
class Cut:
    """What surgery took, with a bit for each question: all arrows into `nodes`, some of those into `rows`, of whose
    families the nodes keep what `kept` says."""

    nodes: Bits
    rows: Bits
    kept: Mapping[int, Kept]


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
    kept = {ground.family_of(node).index: kept for node, kept in ground.rows.items()}
    return Cut(marks(small, len(cut), cut), marks(small, len(rows), rows), kept)


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
    sides = {"given": given, "blocked": blocked, "cut": cut.nodes, "up": start.copy(), "down": np.zeros_like(start)}
    told = {name: [view(ground, bits, index) for index in families] for name, bits in sides.items()}
    inside = None if within is None else [view(ground, within, index) for index in families]
    waiting: dict[str, dict[int, Bits]] = {"up": {}, "down": {}}
    goals = {index: view(ground, goal, index) for index in _families(ground, goal)} if goal is not None else {}
    short: Bits = start[0] * 0 if goal is None else np.bitwise_or.reduce(goal, axis=0)

    def send(index: int, bits: Bits, way: str) -> None:
        up = way == "up"
        if not bits.any():
            return
        for bundle in (ground.folded.into if up else ground.folded.out_of)[index]:
            other = bundle.parent if up else bundle.child
            come = moved(ground, bundle, bits, cut, up=up)
            come = come if up else come & ~told["cut"][other]
            fresh = come & ~told[way][other] if inside is None else come & ~told[way][other] & inside[other]
            if fresh.any():
                told[way][other] |= fresh
                waiting[way][other] = waiting[way][other] | fresh if other in waiting[way] else fresh
                if other in goals:
                    come = (fresh & goals[other]).reshape(-1, len(short))
                    np.bitwise_and(short, ~np.bitwise_or.reduce(come, axis=0), out=short)

    waiting["up"] |= {index: told["up"][index].copy() for index in _families(ground, start)}
    while (waiting["up"] or waiting["down"]) and (goal is None or short.any()):
        rising = bool(waiting["up"])
        way = "up" if rising else "down"
        index = max(waiting[way]) if rising else min(waiting[way])
        bits = waiting[way].pop(index)
        past = bits & ~told["blocked"][index]
        send(index, (past if rising else bits & told["given"][index]) & ~told["cut"][index], "up")
        send(index, past, "down")
    return sides["up"] | sides["down"]


def _families(ground: Ground, bits: Bits) -> list[int]:
    """The families in which there are bits."""
    nodes = np.flatnonzero(bits.any(axis=-1))
    return sorted(set((np.searchsorted(ground.offsets, nodes, side="right") - 1).tolist()))


def view(ground: Ground, bits: Bits, index: int) -> Bits:
    """The part of a family, `[*plates, word, lanes]`."""
    low, high = int(ground.offsets[index]), int(ground.offsets[index + 1])
    return bits[low:high].reshape(*ground.shapes[index], bits.shape[-1])


def moved(ground: Ground, bundle: Bundle, bits: Bits, cut: Cut, *, up: bool) -> Bits:
    """The bits of one family moved along a bundle of arrows, less those that surgery took from nodes with rows."""
    if bundle.child not in cut.kept:
        return stepped(ground, bundle, bits, None, None, up=up)
    reaches = cut.kept[bundle.child].get(bundle.parent)
    kept = None if reaches is None else replace(bundle, reaches=reaches)
    return stepped(ground, bundle, bits, view(ground, cut.rows, bundle.child), kept, up=up)


def ids_of(bits: Bits) -> Ids:
    """The nodes at which the first question has its bit."""
    return np.flatnonzero(bits[:, 0] & np.uint64(1))
