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
from bnet_transformer.compiler.evaluate import evaluate_tpm
from bnet_transformer.compiler.execution_state import ExecutionState, TensorLayout
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.graph.traversal import find_reachable, mark_nodes
from bnet_transformer.reference import GroundModel
from bnet_transformer.tpm.base import broadcast_shapes

BoolArray = NDArray[np.bool_]
PEAK_COPIES = 8  # of the widest value of a cell that are there at once
CELL_AXIS = -1  # stands for the cells among the dims that lead a layout


@dataclass(frozen=True)
class RowIndex:
    """Pairs of a cell and a word, in order: `place[cell, word]` is a row's number, -1 where there is none."""

    cells: Tensor
    words: Tensor
    row_ids: Tensor

    def __len__(self) -> int:
        return len(self.cells)

    @classmethod
    def from_mask(cls, mask: NDArray[np.bool_]) -> RowIndex:
        """The rows that a table `[cell, word]` marks."""
        marked = torch.from_numpy(np.ascontiguousarray(mask))
        cell, word = marked.nonzero(as_tuple=True)
        place = torch.full(marked.shape, -1)
        place[cell, word] = torch.arange(len(cell))
        return cls(cell, word, place)


@dataclass(frozen=True)
class GroupUpdate:
    """The rows of a family that differ from the corrupt run, and what they came to."""

    rows: RowIndex
    values: Tensor


@dataclass(frozen=True)
class GroupPatch:
    """What cells set in one family: `source[example, *plates, word, *shape]` at `node[k]` for `cell[k]`.

    A node is told by its index along each plate of the layout and its word. With `is_attention` it is `P(j | i)` that is set:
    `source[example, *plates, word, word read]`. With `is_per_node` each k has a value of its own: `source[example, k, *shape]`.
    """

    cells: Tensor
    nodes: tuple[Tensor, ...]
    source: Tensor
    is_attention: bool = False
    read_words: Tensor | None = None
    is_per_node: bool = False

    def renumber_cells(self, new_ids: NDArray[np.int64]) -> GroupPatch:
        """What some cells set, numbered by their place, `place[cell]`; those at -1 are left out."""
        number = torch.from_numpy(new_ids)[self.cells]
        keep = number >= 0
        node = tuple(each[keep] for each in self.nodes)
        read = None if self.read_words is None else self.read_words[keep]
        source = self.source[:, keep] if self.is_per_node else self.source
        return replace(self, cells=number[keep], nodes=node, source=source, read_words=read)


@dataclass
class SparseUpdate:
    """What differs from the corrupt run (`base`), family by family, and how a TPM sees it.

    Of the families in `compact_index`, the base has some words alone: `positions[family][word]` is the place of a word.
    """

    base: ExecutionState
    by_group: dict[int, GroupUpdate]
    compact_index: Mapping[int, Tensor] = field(default_factory=dict)

    def compute(self, spec: NodeSpec, rows: RowIndex, *, as_distribution: bool = False) -> Tensor:
        """The rows of a family; with `as_distribution`, of a random one: `log P`, or the mean."""
        alone = is_wordwise(self.base.network, spec)
        course, cells = (self._build_row_state(spec, rows), None) if alone else self._build_cell_state(spec, rows)
        at, parents = gather_parents(course, spec)
        found = (
            summarize_distribution(spec, at, parents) if as_distribution else evaluate_tpm(course, spec, at, parents)
        )
        own = tuple(found.shape[-1:]) if as_distribution and spec.tpm.kind == "discrete" else spec.shape
        return course.layout.pad_dims(found, len(own)) if cells is None else self._select_rows(found, rows, cells, own)

    def mix_attention(self, spec: NodeSpec, rows: RowIndex, patch: GroupPatch) -> Tensor:
        """The rows of an attention, some of whose `P(j | i)` are set."""
        course, cells = self._build_cell_state(spec, rows)
        weights, parents = compute_attention_weights(course, spec)
        lead = (len(cells), max(weights.shape[1], patch.source.shape[0]), *get_layout_shape(self.base, spec)[:-1])
        weights = weights.expand(*lead, *weights.shape[-2:]).clone()
        there = rows.row_ids[patch.cells, patch.nodes[-1]] >= 0  # what leads to no outcome has no row
        node = tuple(each[there] for each in patch.nodes) + (
            () if patch.read_words is None else (patch.read_words[there],)
        )
        table, source = weights.movedim(1, -1), patch.source.movedim(0, -1)  # examples last
        table[(torch.searchsorted(cells, patch.cells[there]), *node)] = source[node]
        mix = spec.tpm.mix(weights, *parents)  # type: ignore[attr-defined]
        return self._select_rows(mix, rows, cells, spec.shape)

    def gather(self, group: int, rows: RowIndex) -> Tensor:
        """A family at some rows, changed or as it was: `[1 or N, *plates, row or 1, *shape]`."""
        member, axis = self.base.network.specs[group], self.base.layout.word_dim
        base, changed = self.base.values[group], self.by_group.get(group)
        if changed is not None and changed.rows is rows:
            return changed.values
        over_words = member.group.word_stack is not None
        word = rows.words if over_words else torch.zeros_like(rows.words)
        there = self.compact_index[group][word] if group in self.compact_index else word
        if changed is None:
            return base.index_select(axis, there) if group in self.compact_index or base.shape[axis] > 1 else base
        number = changed.rows.row_ids[rows.cells, word]
        if bool((number >= 0).all()):
            return changed.values.index_select(axis, number)
        lead = broadcast_shapes(base.shape[:axis], changed.values.shape[:axis])
        both = [each.expand(*lead, each.shape[axis], *base.shape[axis + 1 :]) for each in (base, changed.values)]
        there = there if group in self.compact_index or base.shape[axis] > 1 else torch.zeros_like(word)
        return torch.cat(both, axis).index_select(axis, torch.where(number >= 0, number + base.shape[axis], there))

    @property
    def _cell_layout(self) -> TensorLayout:
        """The layout with the cells in front."""
        return TensorLayout((CELL_AXIS,), self.base.layout.plates)

    def _build_row_state(self, spec: NodeSpec, rows: RowIndex) -> ExecutionState:
        """A course in which the rows are the words."""
        own = spec.group.word_stack
        words = dict(self.base.word_counts) if own is None else {**self.base.word_counts, own: len(rows)}
        values = {parent: self.gather(parent, rows) for parent in get_parent_groups(self.base.network, spec)}
        places = {} if own is None else {own: rows.words}
        return replace(
            self.base, word_counts=words, values=values, positions=places, mask_cache={}, attention_weights={}
        )

    def _build_cell_state(self, spec: NodeSpec, rows: RowIndex) -> tuple[ExecutionState, Tensor]:
        """A course in which the cells of these rows lead, and their numbers."""
        cells = torch.unique_consecutive(rows.cells)
        values = {
            parent: self._gather_all_words(parent, cells) for parent in get_parent_groups(self.base.network, spec)
        }
        return replace(self.base, layout=self._cell_layout, values=values, mask_cache={}, attention_weights={}), cells

    def _gather_all_words(self, group: int, cells: Tensor) -> Tensor:
        """All words of a family for some cells: `[cell or 1, N, *plates, word, *shape]`."""
        axis, changed = self.base.layout.word_dim, self.by_group.get(group)
        if changed is None:
            return self.base.values[group][None]
        place = changed.rows.row_ids
        words = torch.arange(place.shape[1])
        rows = RowIndex(cells.repeat_interleave(len(words)), words.repeat(len(cells)), place)
        found: Tensor = self.gather(group, rows).unflatten(axis, (len(cells), len(words)))
        return found.movedim(axis, 0)

    def _select_rows(self, value: Tensor, rows: RowIndex, cells: Tensor, event_shape: tuple[int, ...]) -> Tensor:
        """The rows of a value `[cell, example, *plates, word, *shape]`."""
        value = self._cell_layout.pad_dims(value, len(event_shape))
        axis = self.base.layout.word_dim
        cell = torch.searchsorted(cells, rows.cells) if value.shape[0] > 1 else torch.zeros_like(rows.cells)
        word = rows.words if value.shape[axis + 1] > 1 else torch.zeros_like(rows.words)
        return value.movedim(axis + 1, 1)[cell, word].movedim(0, axis)


def is_wordwise(network: Network, spec: NodeSpec) -> bool:
    """True where each word of a family reads its own word alone, and what has no words."""
    for given in spec.parents:
        words = network.specs[given.index].group.word_stack
        if WORD in given.over or (words is not None and given.reach.kind != "same"):
            return False
        if words is not None and spec.group.word_stack is None:
            return False
    return True


def get_parent_groups(network: Network, spec: NodeSpec) -> set[int]:
    """The families that a member reads, its selectors among them."""
    return {bundle.parent for bundle in network.graph.in_edges[spec.group.index]}


def summarize_distribution(spec: NodeSpec, context: Any, parents: list[Tensor]) -> Tensor:
    """What is told of a random node: `log P` of its states, or its mean."""
    if spec.tpm.kind == "discrete":
        logits = spec.tpm.logits(context, *parents)
        return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    mean: Tensor = spec.tpm.distribution(context, *parents).mean
    return mean


def compute_attention_weights(state: ExecutionState, spec: NodeSpec) -> tuple[Tensor, list[Tensor]]:
    """The `P(j | i)` of an attention, and what it reads."""
    at, parents = gather_parents(state, spec)
    weights = spec.tpm.attention_weights(at, *parents)
    assert weights is not None  # cell_spec refuses an attention that has none
    return state.layout.pad_dims(weights, 1), parents


def get_layout_shape(state: ExecutionState, spec: NodeSpec) -> tuple[int, ...]:
    """How many nodes a family has along each plate of the layout, and its words; 1 where it has not."""
    sizes, family = state.network.graph.plate_sizes, spec.group
    plates = (sizes[plate] if plate in family.plates else 1 for plate in state.layout.plates)
    return (*plates, 1 if family.word_stack is None else state.word_counts[family.word_stack])


def get_layout_index(state: ExecutionState, spec: NodeSpec, nodes: NDArray[np.int64]) -> tuple[Tensor, ...]:
    """The index of nodes of a family along each plate of the layout, and their word; 0 where it has not."""
    sizes, family = state.network.graph.plate_sizes, spec.group
    own = [sizes[plate] for plate in family.plates]
    axes = [*family.plates]
    if family.word_stack is not None:
        own, axes = [*own, state.word_counts[family.word_stack]], [*axes, WORD]
    at = dict(zip(axes, np.unravel_index(nodes, own), strict=True)) if own else {}
    nothing = np.zeros_like(nodes)
    return tuple(torch.from_numpy(np.asarray(at.get(axis, nothing))) for axis in (*state.layout.plates, WORD))


@dataclass(frozen=True)
class NeededPositions:
    """The words of each family that lead to an outcome, and those that `do` has set.

    Args:
        outcome_nodes: Ground ids of the nodes that the metric reads.
        ancestor_words: Of each family from which an outcome descends, which words lead to it, `[word]`.
        intervened_words: Of each family of which `do` has set a node, the words of which it has set every node, `[word]`.
    """

    outcome_nodes: tuple[int, ...]
    ancestor_words: Mapping[int, BoolArray]
    intervened_words: Mapping[int, BoolArray]


def find_needed_positions(model: GroundModel, outcome_nodes: Iterable[int]) -> NeededPositions:
    """Mark the ancestors of the outcomes, and of these the words.

    Args:
        model: The sentence after surgery.
        outcome_nodes: Ground ids of the nodes that the metric reads.

    Returns:
        The words that lead to an outcome, and those that are set.
    """
    outcome_nodes, ground = tuple(outcome_nodes), model.ground
    marks = mark_nodes(ground, outcome_nodes)
    for index, above in find_reachable(ground, marks, up=True).items():
        marks[index] = np.asarray(marks[index] | above) if index in marks else above
    leads = {index: np.any(_reshape_by_word(model, index, mark), axis=0) for index, mark in marks.items()}
    cut = {
        index: np.all(_reshape_by_word(model, index, mark), axis=0)
        for index, mark in mark_nodes(ground, model.do).items()
    }
    return NeededPositions(outcome_nodes, leads, cut)


def _reshape_by_word(model: GroundModel, index: int, marks: BoolArray) -> BoolArray:
    """The marks of a family's nodes as `[plates, word]`, one word if it has none."""
    return marks.reshape(-1, count_words(model, index))


def find_changed_positions(
    model: GroundModel, needed: NeededPositions, patched_words: Mapping[int, BoolArray], num_cells: int
) -> dict[int, tuple[BoolArray, BoolArray]]:
    """Walk from what cells set down to the outcomes.

    Args:
        model: The sentence after surgery.
        needed: The words that lead to an outcome; no others are walked.
        patched_words: Of each family of which cells set nodes, the words in which they do, `[cell, word]`.
        num_cells: The number of cells.

    Returns:
        Of each family that changes in a cell, in order: the words that read something changed, `[cell, word]`, and
        these together with the words in which the cell sets a node.
    """
    changed: dict[int, tuple[BoolArray, BoolArray]] = {}
    for index, member in enumerate(model.network.specs):
        leads = needed.ancestor_words.get(index)
        if leads is None or not (index in patched_words or any(given.index in changed for given in member.parents)):
            continue
        descends = np.zeros((num_cells, len(leads)), dtype=np.bool_)
        for given in member.parents:
            if given.index in changed:
                above = changed[given.index][1]
                if given.reach.kind == "same" or model.network.specs[given.index].group.word_stack is None:
                    descends |= above
                    continue
                reads = given.reach.matrix(len(leads), count_words(model, given.index))  # [word, word read]
                descends |= (above.astype(np.float32) @ reads.T.astype(np.float32)) > 0
        descends &= leads & np.logical_not(needed.intervened_words.get(index, False))
        both = descends | (patched_words[index] & leads) if index in patched_words else descends
        if both.any():
            changed[index] = descends, both
    return changed


def count_words(model: GroundModel, index: int) -> int:
    """The words of a family, 1 if it has none."""
    words = model.network.specs[index].group.word_stack
    return 1 if words is None else model.ground.word_counts[words]


def estimate_bytes(model: GroundModel, needed: NeededPositions) -> tuple[int, int]:
    """What one cell of one example takes while it is computed, and what the run of one example takes that is kept."""
    most, kept = 1, 1
    for index, table in needed.ancestor_words.items():
        member, count, shape = model.network.specs[index], int(table.sum()), model.ground.shapes[index]
        if member.tpm.kind == "input" or member.group.word_stack is None:
            continue
        plates = int(np.prod(shape[:-1], dtype=np.int64))
        own = count_outcome_values(model, member)
        inner = max([n for each in member.parameters.values() for n in each.shape[:1]], default=1)
        stacks = [model.network.specs[given.index].group.word_stack for given in member.parents]
        read = max([model.ground.word_counts[stack] for stack in stacks if stack is not None], default=1)
        most = max(most, count * max(plates * own, plates * read, inner))
        kept += 2 * plates * own * (shape[-1] if table.all() else count)
    size = model.network.dtype.itemsize
    return size * PEAK_COPIES * most, size * kept


def count_outcome_values(model: GroundModel, spec: NodeSpec) -> int:
    """How many numbers an outcome of a node has: its value's, or the probabilities of its states."""
    if spec.tpm.kind == "discrete":
        return model.network.count_states(spec.group.index, model.ground.word_counts)
    return math.prod(spec.shape)
