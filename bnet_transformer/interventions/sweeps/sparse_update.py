"""Values that a sweep changes, and no others: of each family, the rows (cell, word) that differ from the corrupt run.

They descend from what a cell sets, and lead to an outcome. Both are tables of words, `[cell, word]` and `[word]`, for
each family (one column if it has no words): an arrow carries them along its reach.

A family's changed values lie as `[example, *plates, row, *shape]`, as if the rows were the words of one long sentence:
TPMs that read their own word alone compute just these. One that reads across words sees each cell's whole sentence,
`[cell, example, *plates, word, *shape]`, with all that the cell leaves as it was shared between the cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.course import ExecutionState, TensorLayout, gather_parents
from bnet_transformer.compiler.values import evaluate_tpm
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.graph.walk import find_reachable, mark_nodes
from bnet_transformer.reference import GroundModel
from bnet_transformer.tpm.base import broadcast_shapes

Table = NDArray[np.bool_]
COPIES = 8  # of the widest value of a cell that are there at once
CELLS = -1  # stands for the cells among the dims that lead a layout


@dataclass(frozen=True)
class Rows:
    """Pairs of a cell and a word, in order: `place[cell, word]` is a row's number, -1 where there is none."""

    cell: Tensor
    word: Tensor
    place: Tensor

    def __len__(self) -> int:
        return len(self.cell)

    @classmethod
    def of(cls, table: NDArray[np.bool_]) -> Rows:
        """The rows that a table `[cell, word]` marks."""
        marked = torch.from_numpy(np.ascontiguousarray(table))
        cell, word = marked.nonzero(as_tuple=True)
        place = torch.full(marked.shape, -1)
        place[cell, word] = torch.arange(len(cell))
        return cls(cell, word, place)


@dataclass(frozen=True)
class Changed:
    """The rows of a family that differ from the corrupt run, and what they came to."""

    rows: Rows
    values: Tensor


@dataclass(frozen=True)
class Setting:
    """What cells set in one family: `source[example, *plates, word, *shape]` at `node[k]` for `cell[k]`.

    A node is told by its index along each plate of the layout and its word. With `rows` it is `P(j | i)` that is set:
    `source[example, *plates, word, word read]`. With `own` each k has a value of its own: `source[example, k, *shape]`.
    """

    cell: Tensor
    node: tuple[Tensor, ...]
    source: Tensor
    rows: bool = False
    read: Tensor | None = None
    own: bool = False

    def among(self, place: NDArray[np.int64]) -> Setting:
        """What some cells set, numbered by their place, `place[cell]`; those at -1 are left out."""
        number = torch.from_numpy(place)[self.cell]
        keep = number >= 0
        node = tuple(each[keep] for each in self.node)
        read = None if self.read is None else self.read[keep]
        source = self.source[:, keep] if self.own else self.source
        return replace(self, cell=number[keep], node=node, source=source, read=read)


@dataclass
class Changes:
    """What differs from the corrupt run (`base`), family by family, and how a TPM sees it.

    Of the families in `positions`, the base has some words alone: `positions[family][word]` is the place of a word.
    """

    base: ExecutionState
    by_family: dict[int, Changed]
    positions: Mapping[int, Tensor] = field(default_factory=dict)

    def value(self, member: NodeSpec, rows: Rows, *, distribution: bool = False) -> Tensor:
        """The rows of a family; with `distribution`, of a random one: `log P`, or the mean."""
        alone = is_wordwise(self.base.network, member)
        course, cells = (self._of_rows(member, rows), None) if alone else self._of_cells(member, rows)
        at, parents = gather_parents(course, member)
        found = summary(member, at, parents) if distribution else evaluate_tpm(course, member, at, parents)
        own = tuple(found.shape[-1:]) if distribution and member.tpm.kind == "discrete" else member.shape
        return course.layout.pad_dims(found, len(own)) if cells is None else self._picked(found, rows, cells, own)

    def mixed(self, member: NodeSpec, rows: Rows, setting: Setting) -> Tensor:
        """The rows of an attention, some of whose `P(j | i)` are set."""
        course, cells = self._of_cells(member, rows)
        weights, parents = weights_of(course, member)
        lead = (len(cells), max(weights.shape[1], setting.source.shape[0]), *full_shape(self.base, member)[:-1])
        weights = weights.expand(*lead, *weights.shape[-2:]).clone()
        there = rows.place[setting.cell, setting.node[-1]] >= 0  # what leads to no outcome has no row
        node = tuple(each[there] for each in setting.node) + (() if setting.read is None else (setting.read[there],))
        table, source = weights.movedim(1, -1), setting.source.movedim(0, -1)  # examples last
        table[(torch.searchsorted(cells, setting.cell[there]), *node)] = source[node]
        mix = member.tpm.mix(weights, *parents)  # type: ignore[attr-defined]
        return self._picked(mix, rows, cells, member.shape)

    def at(self, family: int, rows: Rows) -> Tensor:
        """A family at some rows, changed or as it was: `[1 or N, *plates, row or 1, *shape]`."""
        member, axis = self.base.network.specs[family], self.base.layout.word_dim
        base, changed = self.base.values[family], self.by_family.get(family)
        if changed is not None and changed.rows is rows:
            return changed.values
        over_words = member.group.word_stack is not None
        word = rows.word if over_words else torch.zeros_like(rows.word)
        there = self.positions[family][word] if family in self.positions else word
        if changed is None:
            return base.index_select(axis, there) if family in self.positions or base.shape[axis] > 1 else base
        number = changed.rows.place[rows.cell, word]
        if bool((number >= 0).all()):
            return changed.values.index_select(axis, number)
        lead = broadcast_shapes(base.shape[:axis], changed.values.shape[:axis])
        both = [each.expand(*lead, each.shape[axis], *base.shape[axis + 1 :]) for each in (base, changed.values)]
        there = there if family in self.positions or base.shape[axis] > 1 else torch.zeros_like(word)
        return torch.cat(both, axis).index_select(axis, torch.where(number >= 0, number + base.shape[axis], there))

    @property
    def _led(self) -> TensorLayout:
        """The layout with the cells in front."""
        return TensorLayout((CELLS,), self.base.layout.plates)

    def _of_rows(self, member: NodeSpec, rows: Rows) -> ExecutionState:
        """A course in which the rows are the words."""
        own = member.group.word_stack
        words = dict(self.base.word_counts) if own is None else {**self.base.word_counts, own: len(rows)}
        values = {parent: self.at(parent, rows) for parent in parents_of(self.base.network, member)}
        places = {} if own is None else {own: rows.word}
        return replace(self.base, words=words, values=values, places=places, masks={}, readings={})

    def _of_cells(self, member: NodeSpec, rows: Rows) -> tuple[ExecutionState, Tensor]:
        """A course in which the cells of these rows lead, and their numbers."""
        cells = torch.unique_consecutive(rows.cell)
        values = {parent: self._whole(parent, cells) for parent in parents_of(self.base.network, member)}
        return replace(self.base, layout=self._led, values=values, masks={}, readings={}), cells

    def _whole(self, family: int, cells: Tensor) -> Tensor:
        """All words of a family for some cells: `[cell or 1, N, *plates, word, *shape]`."""
        axis, changed = self.base.layout.word_dim, self.by_family.get(family)
        if changed is None:
            return self.base.values[family][None]
        place = changed.rows.place
        words = torch.arange(place.shape[1])
        rows = Rows(cells.repeat_interleave(len(words)), words.repeat(len(cells)), place)
        found: Tensor = self.at(family, rows).unflatten(axis, (len(cells), len(words)))
        return found.movedim(axis, 0)

    def _picked(self, value: Tensor, rows: Rows, cells: Tensor, own: tuple[int, ...]) -> Tensor:
        """The rows of a value `[cell, example, *plates, word, *shape]`."""
        value = self._led.pad_dims(value, len(own))
        axis = self.base.layout.word_dim
        cell = torch.searchsorted(cells, rows.cell) if value.shape[0] > 1 else torch.zeros_like(rows.cell)
        word = rows.word if value.shape[axis + 1] > 1 else torch.zeros_like(rows.word)
        return value.movedim(axis + 1, 1)[cell, word].movedim(0, axis)


def is_wordwise(network: Network, member: NodeSpec) -> bool:
    """True where each word of a family reads its own word alone, and what has no words."""
    for given in member.parents:
        words = network.specs[given.index].group.word_stack
        if WORD in given.over or (words is not None and given.reach.kind != "same"):
            return False
        if words is not None and member.group.word_stack is None:
            return False
    return True


def parents_of(network: Network, member: NodeSpec) -> set[int]:
    """The families that a member reads, its selectors among them."""
    return {bundle.parent for bundle in network.graph.in_edges[member.group.index]}


def summary(member: NodeSpec, at: Any, parents: list[Tensor]) -> Tensor:
    """What is told of a random node: `log P` of its states, or its mean."""
    if member.tpm.kind == "discrete":
        logits = member.tpm.logits(at, *parents)
        return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    mean: Tensor = member.tpm.distribution(at, *parents).mean
    return mean


def weights_of(course: ExecutionState, member: NodeSpec) -> tuple[Tensor, list[Tensor]]:
    """The `P(j | i)` of an attention, and what it reads."""
    at, parents = gather_parents(course, member)
    weights = member.tpm.attention_weights(at, *parents)
    assert weights is not None  # cell_spec refuses an attention that has none
    return course.layout.pad_dims(weights, 1), parents


def full_shape(course: ExecutionState, member: NodeSpec) -> tuple[int, ...]:
    """How many nodes a family has along each plate of the layout, and its words; 1 where it has not."""
    sizes, family = course.network.graph.plate_sizes, member.group
    plates = (sizes[plate] if plate in family.plates else 1 for plate in course.layout.plates)
    return (*plates, 1 if family.word_stack is None else course.word_counts[family.word_stack])


def index_of(course: ExecutionState, member: NodeSpec, node: NDArray[np.int64]) -> tuple[Tensor, ...]:
    """The index of nodes of a family along each plate of the layout, and their word; 0 where it has not."""
    sizes, family = course.network.graph.plate_sizes, member.group
    own = [sizes[plate] for plate in family.plates]
    axes = [*family.plates]
    if family.word_stack is not None:
        own, axes = [*own, course.word_counts[family.word_stack]], [*axes, WORD]
    at = dict(zip(axes, np.unravel_index(node, own), strict=True)) if own else {}
    nothing = np.zeros_like(node)
    return tuple(torch.from_numpy(np.asarray(at.get(axis, nothing))) for axis in (*course.layout.plates, WORD))


@dataclass(frozen=True)
class NeededPositions:
    """The words of each family that lead to an outcome, and those that `do` has set.

    Args:
        outcomes: Ground ids of the nodes that the metric reads.
        leads: Of each family from which an outcome descends, which words lead to it, `[word]`.
        cut: Of each family of which `do` has set a node, the words of which it has set every node, `[word]`.
    """

    outcomes: tuple[int, ...]
    leads: Mapping[int, Table]
    cut: Mapping[int, Table]


def find_needed_positions(world: GroundModel, outcomes: Iterable[int]) -> NeededPositions:
    """Mark the ancestors of the outcomes, and of these the words.

    Args:
        world: The sentence after surgery.
        outcomes: Ground ids of the nodes that the metric reads.

    Returns:
        The words that lead to an outcome, and those that are set.
    """
    outcomes, ground = tuple(outcomes), world.ground
    marks = mark_nodes(ground, outcomes)
    for index, above in find_reachable(ground, marks, up=True).items():
        marks[index] = np.asarray(marks[index] | above) if index in marks else above
    leads = {index: np.any(_by_word(world, index, mark), axis=0) for index, mark in marks.items()}
    cut = {index: np.all(_by_word(world, index, mark), axis=0) for index, mark in mark_nodes(ground, world.do).items()}
    return NeededPositions(outcomes, leads, cut)


def _by_word(world: GroundModel, index: int, marks: Table) -> Table:
    """The marks of a family's nodes as `[plates, word]`, one word if it has none."""
    return marks.reshape(-1, count_words(world, index))


def find_changed_positions(
    world: GroundModel, needed: NeededPositions, set_words: Mapping[int, Table], cells: int
) -> dict[int, tuple[Table, Table]]:
    """Walk from what cells set down to the outcomes.

    Args:
        world: The sentence after surgery.
        needed: The words that lead to an outcome; no others are walked.
        set_words: Of each family of which cells set nodes, the words in which they do, `[cell, word]`.
        cells: The number of cells.

    Returns:
        Of each family that changes in a cell, in order: the words that read something changed, `[cell, word]`, and
        these together with the words in which the cell sets a node.
    """
    changed: dict[int, tuple[Table, Table]] = {}
    for index, member in enumerate(world.network.specs):
        leads = needed.leads.get(index)
        if leads is None or not (index in set_words or any(given.index in changed for given in member.parents)):
            continue
        descends = np.zeros((cells, len(leads)), dtype=np.bool_)
        for given in member.parents:
            if given.index in changed:
                above = changed[given.index][1]
                if given.reach.kind == "same" or world.network.specs[given.index].group.word_stack is None:
                    descends |= above
                    continue
                reads = given.reach.matrix(len(leads), count_words(world, given.index))  # [word, word read]
                descends |= (above.astype(np.float32) @ reads.T.astype(np.float32)) > 0
        descends &= leads & np.logical_not(needed.cut.get(index, False))
        both = descends | (set_words[index] & leads) if index in set_words else descends
        if both.any():
            changed[index] = descends, both
    return changed


def count_words(world: GroundModel, index: int) -> int:
    """The words of a family, 1 if it has none."""
    words = world.network.specs[index].group.word_stack
    return 1 if words is None else world.ground.word_counts[words]


def bytes_of(world: GroundModel, needed: NeededPositions) -> tuple[int, int]:
    """What one cell of one example takes while it is computed, and what the run of one example takes that is kept."""
    most, kept = 1, 1
    for index, table in needed.leads.items():
        member, count, shape = world.network.specs[index], int(table.sum()), world.ground.shapes[index]
        if member.tpm.kind == "input" or member.group.word_stack is None:
            continue
        plates = int(np.prod(shape[:-1], dtype=np.int64))
        own = numbers_in(world, member)
        inner = max([n for each in member.parameters.values() for n in each.shape[:1]], default=1)
        stacks = [world.network.specs[given.index].group.word_stack for given in member.parents]
        read = max([world.ground.word_counts[stack] for stack in stacks if stack is not None], default=1)
        most = max(most, count * max(plates * own, plates * read, inner))
        kept += 2 * plates * own * (shape[-1] if table.all() else count)
    size = world.network.dtype.itemsize
    return size * COPIES * most, size * kept


def numbers_in(world: GroundModel, member: NodeSpec) -> int:
    """How many numbers an outcome of a node has: its value's, or the probabilities of its states."""
    if member.tpm.kind == "discrete":
        return world.network.count_states(member.group.index, world.ground.word_counts)
    return math.prod(member.shape)
