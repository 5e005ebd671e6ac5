"""The ground graph of a sentence: one node for each word (and head, ...), numbered, and lazy.

Nodes are integers: a family's nodes lie side by side, its plates in row-major order, the word innermost. Arrows are
computed when asked for, as integer arrays, and only those that the question needs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnet_transformer._core.naming import SLICE, WORD, Reach, join, split
from bnet_transformer.errors import BNetError, BudgetError, UnknownNameError, unknown
from bnet_transformer.graph.folded import Bundle, Family, FoldedGraph

MOST_NODES = 2**40
ONE = np.zeros(1, dtype=np.int64)  # the place of what has no word
KEPT, FEW = 2**12, 64  # nodes whose parents are kept once they are asked for, where they are few

Ids = NDArray[Any]  # int32, or int64 past 2^31 nodes
Index = NDArray[Any]
Picks = Sequence[int] | NDArray[Any]
Kept = Mapping[int, tuple[Reach, ...]]  # the families that a node still reads, each by these reaches


@dataclass(frozen=True)
class Selection:
    """A part of the ground graph: the slices, the words of each stack, the indices of other plates; None is all.

    `slices` keeps what those slices read and compute; `weights=False` leaves out the wordless families.
    """

    slices: Collection[int] | None = None
    words: Mapping[str, Picks] = field(default_factory=dict)
    plates: Mapping[str, Picks] = field(default_factory=dict)
    weights: bool = True


EVERYTHING = Selection()


class Ground:
    """The ground graph: names, counts, arrows as arrays, and the questions that need only structure.

    After surgery no arrow leads into the nodes of `cut`; those of `rows` keep some of theirs.
    """

    def __init__(
        self,
        folded: FoldedGraph,
        words: Mapping[str, int],
        cut: Iterable[int] = (),
        rows: Mapping[int, Kept] | None = None,
    ) -> None:
        self.folded = folded
        self.words = dict(words)
        shapes = [[folded.sizes[plate] for plate in family.plates] for family in folded.families]
        for family, shape in zip(folded.families, shapes, strict=True):
            shape += [] if family.words is None else [self.words[family.words]]
        self.shapes = tuple([tuple(shape) for shape in shapes])
        sizes = [math.prod(shape) for shape in self.shapes]
        if sum(sizes) > MOST_NODES:
            raise BudgetError("ground graph", expected=f"at most {MOST_NODES} nodes", got=f"{sum(sizes)}")
        self.offsets: Ids = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        self._operate(cut, rows or {})

    def surgery(self, nodes: Iterable[int], rows: Mapping[int, Kept] | None = None) -> Ground:
        """The same nodes without the arrows into some: what `do` leaves.

        Args:
            nodes: All nodes that lose their incoming arrows.
            rows: All nodes that keep some of theirs, with the bundles that they keep; those of this graph by default.
        """
        ground = copy(self)
        ground._operate(nodes, self.rows if rows is None else rows)
        return ground

    def _operate(self, cut: Iterable[int], rows: Mapping[int, Kept]) -> None:
        """Take the arrows into the nodes of `cut`, and from those of `rows` what they do not keep."""
        self.cut, self.rows = frozenset(cut), dict(rows)
        self.cut_by_family = self.by_family(self.cut)
        self.rows_by_family = self.by_family(node for node in self.rows if node not in self.cut)
        self._above: dict[int, list[int]] = {}

    def by_family(self, nodes: Iterable[int]) -> dict[int, list[int]]:
        """Some nodes, by the number of their family."""
        families: dict[int, list[int]] = {}
        for node in nodes:
            families.setdefault(self.family_of(node).index, []).append(node)
        return families

    # names

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def axes(self, family: Family) -> tuple[str, ...]:
        """The plates that index a family's nodes, in order: others, then the word."""
        return family.plates if family.words is None else (*family.plates, WORD)

    def id(self, name: object) -> int:
        """The number of the node of that name, or the error with near matches."""
        return self.number(*self.locate(name))

    def number(self, family: Family, index: Sequence[int]) -> int:
        """The number of the node of a family at an index."""
        steps = strides(self.shapes[family.index])
        return int(self.offsets[family.index]) + sum(i * step for i, step in zip(index, steps, strict=True))

    def locate(self, name: object) -> tuple[Family, tuple[int, ...]]:
        """The family of a node and its index there: `q_0_2` is word 2 of the family `q_0`."""
        found = self.folded.place(name, self.words)
        if found is None:
            raise self._unknown(name)
        return found

    def _unknown(self, name: object) -> UnknownNameError:
        stem = split(name)[0] if isinstance(name, str) else ""
        families = self.folded.by_stem.get(stem)
        if families is None:
            of_stacks = {f.stem: next(self.family_names(f)) for f in reversed(self.folded.families) if f.role == stem}
            if of_stacks:  # a role without its stack
                allowed = ", ".join(f"{own} (such as {first})" for own, first in reversed(of_stacks.items()))
                return UnknownNameError("node", expected="its stack before it", got=repr(name), allowed=allowed)
            if stem == "c" and "head" in self.folded.sizes:
                allowed = "heads are a plate here: all are summed, none is selected; bt.inclusion tells which matter"
                return UnknownNameError("node", expected="a known name", got=repr(name), allowed=allowed)
            return unknown("node", name, (next(self.family_names(f)) for f in self.folded.families))
        shape = self.shapes[families[0].index]
        axes = [*([SLICE] if families[0].slice is not None else []), *self.axes(families[0])]
        first, last = families[0], families[-1]
        low = join(first.name, [0] * len(shape))
        high = join(last.name, [size - 1 for size in self.shapes[last.index]])
        form = "_".join([stem, *axes])
        return UnknownNameError("node", expected=f"a node {form}", got=repr(name), allowed=f"{low} to {high}")

    def name(self, node: int) -> str:
        """The name of a node."""
        family, index = self.place(node)
        return join(family.name, index)

    def place(self, node: int) -> tuple[Family, tuple[int, ...]]:
        """The family of a node and its index there: what `locate` finds by name."""
        family = self.family_of(node)
        rest, index = int(node) - int(self.offsets[family.index]), []
        for stride in strides(self.shapes[family.index]):
            i, rest = divmod(rest, stride)
            index.append(i)
        return family, tuple(index)

    def family_of(self, node: int) -> Family:
        """The family of a node."""
        return self.folded.families[int(np.searchsorted(self.offsets, node, side="right")) - 1]

    def family_names(self, family: Family) -> Iterator[str]:
        """The names of a family's nodes, in the order of their numbers."""
        stems = [family.name]
        for size in self.shapes[family.index]:
            stems = [f"{stem}_{i}" for stem in stems for i in range(size)]
        return iter(stems)

    @cached_property
    def names(self) -> list[str]:
        """Every name; `names[id]`."""
        return [name for family in self.folded.families for name in self.family_names(family)]

    # what is there

    def kept(self, family: Family, selection: Selection = EVERYTHING) -> bool:
        """True where a selection keeps a family (some of its nodes at least)."""
        if not selection.weights and family.index in self.folded.wordless:
            return False
        if selection.slices is None or family.step is None:
            return True
        last = self.folded.slices[family.stack] - 1
        steps = {min(max(family.step, 0), last)}
        if family.slice is not None:
            steps.add(min(family.slice, last))
        return bool(steps & set(selection.slices))

    def indices(self, family: Family, selection: Selection = EVERYTHING) -> dict[str, Index]:
        """For each of a family's axes, the indices that a selection keeps."""
        found = {}
        for axis, size in zip(self.axes(family), self.shapes[family.index], strict=True):
            wanted = selection.words.get(family.words or "") if axis == WORD else selection.plates.get(axis)
            found[axis] = np.arange(size) if wanted is None else _within(axis, wanted, size)
        return found

    def nodes(self, family: Family, selection: Selection = EVERYTHING) -> Ids:
        """The numbers of a family's nodes that a selection keeps."""
        indices, steps = self.indices(family, selection).values(), strides(self.shapes[family.index])
        at: Ids = np.array([self.offsets[family.index]])
        for index, stride in zip(indices, steps, strict=True):
            at = (at[:, None] + index * stride).ravel()
        return at

    def count_nodes(self, selection: Selection = EVERYTHING) -> int:
        """How many nodes a selection keeps."""
        return sum(
            math.prod(len(index) for index in self.indices(family, selection).values())
            for family in self.folded.families
            if self.kept(family, selection)
        )

    def count_arrows(self, selection: Selection = EVERYTHING, roles: tuple[str, str] | None = None) -> int:
        """How many arrows lie between the nodes that a selection keeps, from one role to another; none is made."""
        stem = [family.stem for family in self.folded.families]
        kept = self._kept_arrows(selection)
        return sum(self._count(b, selection) for b in kept if roles in (None, (stem[b.parent], stem[b.child])))

    def _kept_arrows(self, selection: Selection) -> Iterator[Bundle]:
        families = self.folded.families
        keep = [self.kept(family, selection) for family in families]
        whole_states = selection.slices is None
        for bundle in self.folded.bundles:
            if keep[bundle.parent] and keep[bundle.child]:
                child, parent = families[bundle.child], families[bundle.parent]
                if whole_states or _inside(child, parent, set(selection.slices or ()), self.folded.slices):
                    yield bundle

    def _count(self, bundle: Bundle, selection: Selection) -> int:
        inner, outer = (self.indices(self.folded.families[k], selection) for k in (bundle.child, bundle.parent))
        plates = {axis for axis in (*inner, *outer) if axis != WORD}
        total = math.prod(len(_shared(axis, inner, outer)) for axis in plates)
        total *= self._count_words(bundle, inner.get(WORD, ONE), outer.get(WORD, ONE))
        for node in (*self.cut_in(bundle.child), *self.rows_in(bundle.child)):
            own = {axis: np.array([i]) for axis, i in self._index(node).items()}
            if all(i in inner[axis] for axis, i in own.items()):
                total -= len(self._joined(bundle, own, outer)[0]) - len(self._pairs(bundle, own, outer)[0])
        return total

    def _count_words(self, bundle: Bundle, i: Index, j: Index) -> int:
        """How many pairs of these words an arrow joins."""
        child, parent = self.folded.families[bundle.child], self.folded.families[bundle.parent]
        if parent.words is None or (child.words is None and not bundle.reaches):
            return len(i) * len(j)
        if len(bundle.reaches) > 1:
            return int(self.reads(bundle)[np.ix_(i, j)].sum())
        n = 1 if child.words is None else self.words[child.words]
        return bundle.reaches[0].count(i, j, n, self.words[parent.words])

    def cut_in(self, family: int) -> list[int]:
        """The nodes of a family whose incoming arrows are gone."""
        return self.cut_by_family.get(family, [])

    def rows_in(self, family: int) -> list[int]:
        """The nodes of a family that keep some of their incoming arrows."""
        return self.rows_by_family.get(family, [])

    def kept_of(self, bundle: Bundle) -> Bundle | None:
        """What stays of a bundle at the nodes that keep some of their arrows; None where nothing does."""
        reaches = self.rows[self.rows_in(bundle.child)[0]].get(bundle.parent)
        return None if reaches is None else replace(bundle, reaches=reaches)

    def _index(self, node: int) -> dict[str, int]:
        family, index = self.place(node)
        return dict(zip(self.axes(family), index, strict=True))

    def reads(self, bundle: Bundle) -> NDArray[np.bool_]:
        """`[words of the child, words of the parent]`, 1 where a family has none: which pairs an arrow joins."""
        child, parent = self.folded.families[bundle.child], self.folded.families[bundle.parent]
        n = 1 if child.words is None else self.words[child.words]
        if parent.words is None or (child.words is None and not bundle.reaches):
            return np.ones((n, 1), dtype=bool)
        pairs = [reach.matrix(n, self.words[parent.words]) for reach in bundle.reaches]
        return pairs[0] if len(pairs) == 1 else np.logical_or.reduce(pairs)

    def arrows(self, selection: Selection = EVERYTHING) -> Iterator[tuple[Bundle, Ids, Ids]]:
        """For each arrow of the folded graph, the numbers of the parents and children that it joins."""
        for bundle in self._kept_arrows(selection):
            inner, outer = (self.indices(self.folded.families[k], selection) for k in (bundle.child, bundle.parent))
            yield bundle, *self._pairs(bundle, inner, outer)

    def _pairs(self, bundle: Bundle, inner: Mapping[str, Index], outer: Mapping[str, Index]) -> tuple[Ids, Ids]:
        """The arrows of a bundle between some indices of its child and of its parent, after surgery."""
        sources, targets, reads = self._joined(bundle, inner, outer)
        cut, rows = self.cut_in(bundle.child), self.rows_in(bundle.child)
        if not cut and not rows:
            return sources, targets
        stays = ~np.isin(targets, cut)
        if rows:
            some = self.kept_of(bundle)
            kept = False if some is None else np.resize(self.reads(some)[reads], len(targets))
            stays &= kept | ~np.isin(targets, rows)
        return sources[stays], targets[stays]

    def _joined(
        self, bundle: Bundle, inner: Mapping[str, Index], outer: Mapping[str, Index]
    ) -> tuple[Ids, Ids, tuple[Index, Index]]:
        """Parents and children as the declaration joins them, and the words of either, which repeat for each plate."""
        child, parent = self.folded.families[bundle.child], self.folded.families[bundle.parent]
        own, there = inner.get(WORD, ONE), outer.get(WORD, ONE)
        i, j = self.reads(bundle)[np.ix_(own, there)].nonzero()
        reads = own[i], there[j]
        size = np.int32 if len(self) < 2**31 else np.int64
        into, out = (dict(zip(self.axes(f), strides(self.shapes[f.index]), strict=True)) for f in (child, parent))
        sources: Ids = np.array([self.offsets[parent.index]], dtype=size)
        targets: Ids = np.array([self.offsets[child.index]], dtype=size)
        for axis in dict.fromkeys([*child.plates, *parent.plates]):
            index: Ids = _shared(axis, inner, outer).astype(size)
            sources = (sources[:, None] + index * size(out.get(axis, 0))).ravel()
            targets = (targets[:, None] + index * size(into.get(axis, 0))).ravel()
        sources = (sources[:, None] + reads[1].astype(size)).ravel()
        targets = (targets[:, None] + reads[0].astype(size)).ravel()
        return sources, targets, reads

    def parents(self, node: int) -> list[int]:
        """The parents of a node, in the order of its family's arrows."""
        found = self._above.get(node)
        if found is None:
            found = self._read(node)
            if len(found) <= FEW and len(self._above) < KEPT:
                self._above[node] = found
        return found.copy()

    def _read(self, node: int) -> list[int]:
        """The parents, without an array for each: `_pairs` takes three times as long for the few of one node."""
        if node in self.cut:
            return []
        own, found = self._index(node), list[int]()
        for bundle in self.folded.into[self.family_of(node).index]:
            parent, there = self.folded.families[bundle.parent], self.reads(bundle)[own.get(WORD, 0)]
            if node in self.rows:
                kept = self.kept_of(bundle)
                there = there & self.reads(kept)[own.get(WORD, 0)] if kept is not None else there[:0]
            words = np.flatnonzero(there).tolist()
            if not words:  # also of a parent without words
                continue
            base = [int(self.offsets[parent.index])]
            shape = self.shapes[parent.index]
            for axis, size, step in zip(self.axes(parent), shape, strides(shape), strict=True):
                picks = words if axis == WORD else [own[axis]] if axis in own else range(size)
                base = [at + i * step for at in base for i in picks]
            found += base
        return found

    def children(self, node: int) -> list[int]:
        """The children of a node."""
        outer = {axis: np.array([i]) for axis, i in self._index(node).items()}
        found: list[int] = []
        for bundle in self.folded.out_of[self.family_of(node).index]:
            found.extend(self._pairs(bundle, self.indices(self.folded.families[bundle.child]), outer)[1].tolist())
        return found


def _within(axis: str, wanted: Picks, size: int) -> Index:
    """The wanted indices of an axis, each once, in order."""
    index = np.unique(np.asarray(wanted, dtype=np.int64))
    if len(index) and not 0 <= index[0] <= index[-1] < size:
        raise BNetError(f"selection of {axis}", expected=f"indices from 0 to {size - 1}", got=index.tolist())
    return index


def strides(shape: Sequence[int]) -> list[int]:
    """By how much the number of a node grows with each of its indices."""
    return [math.prod(shape[k + 1 :]) for k in range(len(shape))]


def _shared(axis: str, inner: Mapping[str, Index], outer: Mapping[str, Index]) -> Index:
    if axis in inner and axis in outer:
        return np.intersect1d(inner[axis], outer[axis])
    return inner[axis] if axis in inner else outer[axis]


def _inside(child: Family, parent: Family, slices: set[int], depth: Mapping[str, int]) -> bool:
    """True where an arrow belongs to one of `slices`: what computes a slice's nodes, or enters or leaves the stack."""
    step = child.step if child.step is not None else parent.step
    if step is None:
        return True
    last = depth[child.stack if child.step is not None else parent.stack] - 1
    return min(max(step, 0), last) in slices
