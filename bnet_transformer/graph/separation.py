"""Separation: which nodes tell of each other, given others. Many questions at once, each on a bit of its own.

Balls roll along arrows (Shachter 1998): past a node that is not given, and back up from one that is. A question names
few words and heads, and those that it does not name are alike: mapping each word to the greatest kept one at or before
it takes arrows to arrows, so the balls need only the graph of the words named, their next ones and both ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from bnet_transformer.axes import WORD, Reach
from bnet_transformer.graph.folded import Bundle
from bnet_transformer.graph.ground import Ground, Ids
from bnet_transformer.graph.walk import descendants

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
        size = max(LANE, MOST_BITS // max(1, _thinned_size(ground, questions[start])) // LANE * LANE)
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
    cut = marks(thin.ground, count, thin.numbers([ground.cut] * count))
    blocked = given if not functions else ~_undetermined(thin.ground, given, cut, functions)
    y &= ~blocked
    hit = np.bitwise_or.reduce(roll(thin.ground, x, given, blocked, cut, goal=y) & y, axis=0)
    return ~np.unpackbits(hit.view(np.uint8), bitorder="little")[:count].astype(bool)


def reaches(ground: Ground, x: int, y: int) -> bool:
    """True where a path of arrows leads from x to y."""
    thin = thinned(ground, [{x, y}])
    ((source, target),) = thin.numbers([[x, y]])
    return target in descendants(thin.surgery(ground), [source])


# balls


def marks(ground: Ground, count: int, nodes: Sequence[Iterable[int]]) -> Bits:
    """`[node, lanes]`: the bit of each question at its nodes."""
    found: Bits = np.zeros((len(ground), -(-count // LANE)), dtype=np.uint64)
    pairs = [(node, question) for question, some in enumerate(nodes) for node in some]
    if pairs:
        node, question = np.array(pairs).T
        bit = np.uint64(1) << (question % LANE).astype(np.uint64)
        np.bitwise_or.at(found, (node, question // LANE), bit)
    return found


def roll(
    ground: Ground,
    start: Bits,
    given: Bits,
    blocked: Bits,
    cut: Bits,
    within: Bits | None = None,
    goal: Bits | None = None,
) -> Bits:
    """`[node, lanes]`: where the balls come that start at `start`; they stay inside `within`, and may stop once each
    question that has a `goal` has come to it.
    """
    families = range(len(ground.folded.families))
    sides = {"given": given, "blocked": blocked, "cut": cut, "up": start.copy(), "down": np.zeros_like(start)}
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
            come = carried(ground, bundle, bits, up=up)
            come = come if up else come & ~told["cut"][other]
            fresh = come & ~told[way][other] if inside is None else come & ~told[way][other] & inside[other]
            if fresh.any():
                told[way][other] |= fresh
                waiting[way][other] = waiting[way][other] | fresh if other in waiting[way] else fresh
                if other in goals:
                    np.bitwise_and(short, ~np.bitwise_or.reduce(_flat(fresh & goals[other]), axis=0), out=short)

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


def _flat(bits: Bits) -> Bits:
    return bits.reshape(-1, bits.shape[-1])


def view(ground: Ground, bits: Bits, index: int) -> Bits:
    """The part of a family, `[*plates, word, lanes]`."""
    low, high = int(ground.offsets[index]), int(ground.offsets[index + 1])
    return bits[low:high].reshape(*ground.shapes[index], bits.shape[-1])


def carried(ground: Ground, bundle: Bundle, bits: Bits, *, up: bool) -> Bits:
    """The bits of one family moved along a bundle of arrows; broadcasts to the shape of the other family."""
    child, parent = ground.folded.families[bundle.child], ground.folded.families[bundle.parent]
    here, there = (child, parent) if up else (parent, child)
    gone = tuple(k for k, plate in enumerate(here.plates) if plate not in there.plates)
    bits = np.bitwise_or.reduce(bits, axis=gone) if gone else bits
    bits = bits[..., None, :] if here.words is None else bits
    bits = _along(ground, bundle, bits, up=up)
    stay = [plate for plate in here.plates if plate in there.plates]
    order = [stay.index(plate) for plate in there.plates if plate in stay]
    bits = bits.transpose(*order, len(stay), len(stay) + 1)
    for k, plate in enumerate(there.plates):
        if plate not in stay:
            bits = np.expand_dims(bits, k)
    bits = bits[..., 0, :] if there.words is None else bits
    return np.broadcast_to(bits, (*ground.shapes[there.index], bits.shape[-1]))


def _along(ground: Ground, bundle: Bundle, bits: Bits, *, up: bool) -> Bits:
    """`[..., word, lanes]` moved from word to word by the reaches of a bundle."""
    child, parent = ground.folded.families[bundle.child], ground.folded.families[bundle.parent]
    if parent.words is None or not bundle.reaches:
        return np.bitwise_or.reduce(bits, axis=-2, keepdims=True) if up else bits
    n = 1 if child.words is None else ground.words[child.words]
    moved = [_moved(reach, bits, n, ground.words[parent.words], up) for reach in bundle.reaches]
    return reduce(np.bitwise_or, moved)


def _moved(reach: Reach, bits: Bits, n: int, m: int, up: bool) -> Bits:
    """What n words of a child send to m words of the parent that they read (up), or the other way."""
    match reach.kind:
        case "same":
            return bits
        case "every":
            return np.bitwise_or.reduce(bits, axis=-2, keepdims=True)
        case "causal" | "earlier" | "before" if n == m:
            if reach.kind != "before":
                flow = bits[..., ::-1, :] if up else bits
                flow = np.bitwise_or.accumulate(flow, axis=-2)
                bits = flow[..., ::-1, :] if up else flow
            return bits if reach.kind == "causal" else _shifted(bits, -1 if up else 1)
        case "window" if n == m:
            return reduce(np.bitwise_or, (_shifted(bits, by) for by in range(-min(reach.width, n), reach.width + 1)))
    rows, which = _rows(reach, n, m, up)
    found = [np.bitwise_or.reduce(bits[..., row, :], axis=-2) for row in rows]
    return np.stack(found, axis=-2)[..., which, :]


def _shifted(bits: Bits, by: int) -> Bits:
    found = np.zeros_like(bits)
    if by == 0:
        return bits
    if abs(by) < bits.shape[-2]:
        into, out = (slice(by, None), slice(None, -by)) if by > 0 else (slice(None, by), slice(-by, None))
        found[..., into, :] = bits[..., out, :]
    return found


@lru_cache(maxsize=64)
def _rows(reach: Reach, n: int, m: int, up: bool) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """The different rows of who reads whom, and which row each word has."""
    pairs = reach.matrix(n, m)
    rows, which = np.unique(pairs.T if up else pairs, axis=0, return_inverse=True)
    return rows, which.reshape(-1)


def _undetermined(ground: Ground, given: Bits, cut: Bits, functions: Collection[int]) -> Bits:
    """The nodes that what is given or set does not determine; a root counts as free, whatever its TPM."""
    folded, found = ground.folded, np.zeros_like(given)
    open_ = ~(given | cut)
    for group in folded.groups or tuple((family.index,) for family in folded.families):
        while True:
            grown = False
            for index in group:
                part = view(ground, found, index)
                if index in functions and folded.into[index]:
                    above = (carried(ground, b, view(ground, found, b.parent), up=False) for b in folded.into[index])
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
                family, index = _place(self.full, node)
                at = int(self.ground.offsets[family])
                for axis, i, stride in zip(_axes(self.full, family), index, _strides(self.ground, family), strict=True):
                    at += (places[axis][i] if axis in places else i) * stride
                own.append(at)
            found.append(own)
        return found

    def name(self, node: int, question: int = 0) -> int:
        """The number in the full graph of a node of the smaller one."""
        family, index = _place(self.ground, node)
        kept, at = self.kept[question], int(self.full.offsets[family])
        for axis, i, stride in zip(_axes(self.full, family), index, _strides(self.full, family), strict=True):
            at += (kept[axis][i] if axis in kept else i) * stride
        return at

    def surgery(self, full: Ground) -> Ground:
        """The smaller graph of the first question, without the arrows that the full one has lost."""
        return self.ground.surgery(self.numbers([full.cut])[0])


def thinned(ground: Ground, named: Sequence[Iterable[int]]) -> Thinned:
    """The smaller graphs for questions that name these nodes."""
    wanted = [_named(ground, {*nodes, *ground.cut}) for nodes in named]
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
        family, index = _place(ground, node)
        for axis, i in zip(_axes(ground, family), index, strict=True):
            found.setdefault(axis, set()).add(i)
    return found


def _thinned_size(ground: Ground, question: Question) -> int:
    return len(thinned(ground, [question.nodes]).ground)


def _size(ground: Ground, axis: tuple[str, str]) -> int:
    return ground.words[axis[1]] if axis[0] == WORD else ground.folded.sizes[axis[0]]


def _axes(ground: Ground, family: int) -> list[tuple[str, str]]:
    told = ground.folded.families[family]
    return [(plate, "") for plate in told.plates] + ([] if told.words is None else [(WORD, told.words)])


def _strides(ground: Ground, family: int) -> list[int]:
    found = [1]
    for size in reversed(ground.shapes[family][1:]):
        found.insert(0, found[0] * size)
    return found[: len(ground.shapes[family])] if ground.shapes[family] else []


def _place(ground: Ground, node: int) -> tuple[int, list[int]]:
    family = int(np.searchsorted(ground.offsets, node, side="right")) - 1
    rest, index = node - int(ground.offsets[family]), []
    for stride in _strides(ground, family):
        index.append(rest // stride)
        rest %= stride
    return family, index


def ids_of(bits: Bits) -> Ids:
    """The nodes at which the first question has its bit."""
    return np.flatnonzero(bits[:, 0] & np.uint64(1))
