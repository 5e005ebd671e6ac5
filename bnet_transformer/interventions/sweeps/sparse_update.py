"""Sparse updates: compute only the values that cells change, as rows (cell, word) of each node group.

A row is computed if it descends from a patched node and leads to an outcome. Both conditions are masks over the words
of a group, `[cell, word]` and `[word]`, which are propagated along the reach of the arrows.

The updated values of a group have the layout `[example, *plates, row, *shape]`, as if the rows were the words of one
long sentence. A wordwise TPM, in which a word depends only on itself, computes only these rows. A TPM that uses other
words receives the full sentence of each cell, `[cell, example, *plates, word, *shape]`; values that no cell changes are
shared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.arrays import BoolArray
from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.evaluate import evaluate_tpm
from bnet_transformer.compiler.execution_state import ExecutionState, TensorLayout
from bnet_transformer.compiler.gather import gather_parents
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.graph.traversal import find_reachable, mark_nodes
from bnet_transformer.reference import GroundModel
from bnet_transformer.tpm.base import broadcast_shapes

PEAK_COPIES = 8  # the maximum number of copies of the largest value of a cell at once
CELL_AXIS = -1  # the dim of the cells, among the leading dims of a layout


@dataclass(frozen=True)
class RowIndex:
    """The rows of an update: pairs of a cell and a word, in order.

    Args:
        cells: The cell of each row, `[row]`.
        words: The word of each row, `[row]`.
        row_ids: The row of each pair, `[cell, word]`; -1 for a pair without a row.
    """

    cells: Tensor
    words: Tensor
    row_ids: Tensor

    def __len__(self) -> int:
        return len(self.cells)

    @classmethod
    def from_mask(cls, mask: NDArray[np.bool_]) -> RowIndex:
        """The rows that a mask `[cell, word]` marks."""
        marked = torch.from_numpy(np.ascontiguousarray(mask))
        cell, word = marked.nonzero(as_tuple=True)
        row_ids = torch.full(marked.shape, -1)
        row_ids[cell, word] = torch.arange(len(cell))
        return cls(cell, word, row_ids)


@dataclass(frozen=True)
class GroupUpdate:
    """The rows of a group that differ from the corrupt run, and their values `[example, *plates, row, *shape]`."""

    rows: RowIndex
    values: Tensor


@dataclass(frozen=True)
class GroupPatch:
    """The patch of one node group: cell `cells[k]` sets a node to its value in `source`.

    Args:
        cells: The cells, `[k]`.
        nodes: The indices of the nodes along each plate of the layout, and their words, `[k]` each.
        source: The values, `[example, *plates, word, *shape]`; with `is_attention` the rows `P(j | i)`,
            `[example, *plates, word, word read]`; with `is_per_node` the value for each k, `[example, k, *shape]`.
        is_attention: Whether cells set attention instead of values.
        read_words: The word whose `P(j | i)` is set, `[k]`; None for full rows.
        is_per_node: Whether `source` has a value for each k.
    """

    cells: Tensor
    nodes: tuple[Tensor, ...]
    source: Tensor
    is_attention: bool = False
    read_words: Tensor | None = None
    is_per_node: bool = False

    def renumber_cells(self, new_ids: NDArray[np.int64]) -> GroupPatch:
        """The patch of the cells with a new id, `new_ids[cell]`; cells whose new id is -1 are dropped."""
        cells = torch.from_numpy(new_ids)[self.cells]
        keep = cells >= 0
        node = tuple(index[keep] for index in self.nodes)
        read = None if self.read_words is None else self.read_words[keep]
        source = self.source[:, keep] if self.is_per_node else self.source
        return replace(self, cells=cells[keep], nodes=node, source=source, read_words=read)


@dataclass
class SparseUpdate:
    """The updated rows of each node group, over the values of a base run.

    Args:
        base: The base run.
        by_group: The updates that are already computed.
        compact_index: For groups of which the base contains only some words, the index of each word there, `[word]`.
    """

    base: ExecutionState
    by_group: dict[int, GroupUpdate]
    compact_index: Mapping[int, Tensor] = field(default_factory=dict)

    def compute(
        self, spec: NodeSpec, rows: RowIndex, *, as_distribution: bool = False, slots: Collection[int] | None = None
    ) -> Tensor:
        """Compute some rows of a group, `[1 or N, *plates, row, *shape]`.

        With `as_distribution`, the result is `log P` or the mean of a random group. With `slots`, only these slots read
        updated values; the other slots read the base run.
        """
        wordwise = is_wordwise(self.base.network, spec)
        state, cells = (self.build_row_state(spec, rows), None) if wordwise else self._build_cell_state(spec, rows)
        context, parents = gather_parents(state, spec)
        if slots is not None:
            base_update = SparseUpdate(self.base, {}, self.compact_index)
            base = base_update.build_row_state(spec, rows) if wordwise else base_update._build_cell_state(spec, rows)[0]
            _, base_parents = gather_parents(base, spec)
            parents = [
                new if k in slots else old for k, (new, old) in enumerate(zip(parents, base_parents, strict=True))
            ]
        if as_distribution:
            values = summarize_distribution(spec, context, parents)
        else:
            values = evaluate_tpm(state, spec, context, parents)
        shape = tuple(values.shape[-1:]) if as_distribution and spec.tpm.kind == "discrete" else spec.shape
        if cells is not None:
            return self._select_rows(values, rows, cells, shape)
        return state.layout.pad_dims(values, len(shape))

    def mix_attention(self, spec: NodeSpec, rows: RowIndex, patch: GroupPatch) -> Tensor:
        """Compute some rows of an attention whose `P(j | i)` a patch sets."""
        state, cells = self._build_cell_state(spec, rows)
        weights, parents = compute_attention_weights(state, spec)
        num_examples, plates = max(weights.shape[1], patch.source.shape[0]), get_layout_shape(self.base, spec)[:-1]
        weights = weights.expand(len(cells), num_examples, *plates, *weights.shape[-2:]).clone()
        has_row = rows.row_ids[patch.cells, patch.nodes[-1]] >= 0  # a word that leads to no outcome has no row
        columns = patch.nodes if patch.read_words is None else (*patch.nodes, patch.read_words)
        nodes = tuple(index[has_row] for index in columns)
        table, source = weights.movedim(1, -1), patch.source.movedim(0, -1)  # examples last
        table[(torch.searchsorted(cells, patch.cells[has_row]), *nodes)] = source[nodes]
        mix = spec.tpm.mix(weights, *parents)  # type: ignore[attr-defined]
        return self._select_rows(mix, rows, cells, spec.shape)

    def gather(self, group: int, rows: RowIndex) -> Tensor:
        """The values of a group at some rows, updated or from the base: `[1 or N, *plates, row or 1, *shape]`."""
        spec, axis = self.base.network.specs[group], self.base.layout.word_dim
        base, changed = self.base.values[group], self.by_group.get(group)
        if changed is not None and changed.rows is rows:
            return changed.values
        over_words = spec.group.word_stack is not None
        word = rows.words if over_words else torch.zeros_like(rows.words)
        base_words = self.compact_index[group][word] if group in self.compact_index else word
        if changed is None:
            has_words = group in self.compact_index or base.shape[axis] > 1
            return base.index_select(axis, base_words.to(base.device)) if has_words else base
        row_ids = changed.rows.row_ids[rows.cells, word]
        if bool((row_ids >= 0).all()):
            return changed.values.index_select(axis, row_ids.to(changed.values.device))
        batch_shape = broadcast_shapes(base.shape[:axis], changed.values.shape[:axis])
        tables = [v.expand(*batch_shape, v.shape[axis], *base.shape[axis + 1 :]) for v in (base, changed.values)]
        base_words = base_words if group in self.compact_index or base.shape[axis] > 1 else torch.zeros_like(word)
        index = torch.where(row_ids >= 0, row_ids + base.shape[axis], base_words)
        return torch.cat(tables, axis).index_select(axis, index.to(base.device))

    @property
    def _cell_layout(self) -> TensorLayout:
        """The layout with cells as its first dim."""
        return TensorLayout((CELL_AXIS,), self.base.layout.plates)

    def build_row_state(self, spec: NodeSpec, rows: RowIndex) -> ExecutionState:
        """A state in which the rows are the words of the group's stack."""
        stack = spec.group.word_stack
        words = dict(self.base.word_counts) if stack is None else {**self.base.word_counts, stack: len(rows)}
        values = {parent: self.gather(parent, rows) for parent in get_parent_groups(self.base.network, spec)}
        positions = {} if stack is None else {stack: rows.words.to(self.base.device)}
        return replace(
            self.base, word_counts=words, values=values, positions=positions, mask_cache={}, attention_weights={}
        )

    def _build_cell_state(self, spec: NodeSpec, rows: RowIndex) -> tuple[ExecutionState, Tensor]:
        """A state with a leading dim for the cells of these rows, and these cells, `[cell]`."""
        cells = torch.unique_consecutive(rows.cells)
        values = {
            parent: self._gather_all_words(parent, cells) for parent in get_parent_groups(self.base.network, spec)
        }
        return replace(self.base, layout=self._cell_layout, values=values, mask_cache={}, attention_weights={}), cells

    def _gather_all_words(self, group: int, cells: Tensor) -> Tensor:
        """The values of all words of a group in some cells: `[cell or 1, N, *plates, word, *shape]`."""
        axis, changed = self.base.layout.word_dim, self.by_group.get(group)
        if changed is None:
            return self.base.values[group][None]
        row_ids = changed.rows.row_ids
        words = torch.arange(row_ids.shape[1])
        rows = RowIndex(cells.repeat_interleave(len(words)), words.repeat(len(cells)), row_ids)
        values: Tensor = self.gather(group, rows).unflatten(axis, (len(cells), len(words)))
        return values.movedim(axis, 0)

    def _select_rows(self, value: Tensor, rows: RowIndex, cells: Tensor, event_shape: tuple[int, ...]) -> Tensor:
        """Select rows of values `[cell, example, *plates, word, *shape]`: `[example, *plates, row, *shape]`."""
        value = self._cell_layout.pad_dims(value, len(event_shape))
        axis = self.base.layout.word_dim
        cell = torch.searchsorted(cells, rows.cells) if value.shape[0] > 1 else torch.zeros_like(rows.cells)
        word = rows.words if value.shape[axis + 1] > 1 else torch.zeros_like(rows.words)
        return value.movedim(axis + 1, 1)[cell, word].movedim(0, axis)


def is_wordwise(network: Network, spec: NodeSpec) -> bool:
    """True if each word of a group depends only on the same word of its parents, and parents without words."""
    for parent in spec.parents:
        words = network.specs[parent.index].group.word_stack
        if WORD in parent.over or (words is not None and parent.reach.kind != "same"):
            return False
        if words is not None and spec.group.word_stack is None:
            return False
    return True


def get_parent_groups(network: Network, spec: NodeSpec) -> set[int]:
    """The ids of the groups that a group reads, its selectors included."""
    return {edge.parent for edge in network.graph.in_edges[spec.group.index]}


def summarize_distribution(spec: NodeSpec, context: Any, parents: list[Tensor]) -> Tensor:
    """The outcome of a random group: `log P` of its states, or its mean."""
    if spec.tpm.kind == "discrete":
        logits = spec.tpm.logits(context, *parents)
        return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    mean: Tensor = spec.tpm.distribution(context, *parents).mean
    return mean


def compute_attention_weights(state: ExecutionState, spec: NodeSpec) -> tuple[Tensor, list[Tensor]]:
    """The `P(j | i)` of an attention, `[*lead, *plates, word, word read]`, and the values of its parents."""
    context, parents = gather_parents(state, spec)
    weights = spec.tpm.attention_weights(context, *parents)
    assert weights is not None  # cell_spec raises an error for an attention without weights
    return state.layout.pad_dims(weights, 1), parents


def get_layout_shape(state: ExecutionState, spec: NodeSpec) -> tuple[int, ...]:
    """The size of a group along each plate of the layout, and its number of words; 1 along missing axes."""
    sizes, group = state.network.graph.plate_sizes, spec.group
    plates = (sizes[plate] if plate in group.plates else 1 for plate in state.layout.plates)
    return (*plates, 1 if group.word_stack is None else state.word_counts[group.word_stack])


def get_layout_index(state: ExecutionState, spec: NodeSpec, nodes: NDArray[np.int64]) -> tuple[Tensor, ...]:
    """The index of nodes of a group along each plate of the layout, and their word; 0 along missing axes."""
    sizes, group = state.network.graph.plate_sizes, spec.group
    dims = [sizes[plate] for plate in group.plates]
    axes = [*group.plates]
    if group.word_stack is not None:
        dims, axes = [*dims, state.word_counts[group.word_stack]], [*axes, WORD]
    index = dict(zip(axes, np.unravel_index(nodes, dims), strict=True)) if dims else {}
    zeros = np.zeros_like(nodes)
    return tuple(torch.from_numpy(np.asarray(index.get(axis, zeros))) for axis in (*state.layout.plates, WORD))


@dataclass(frozen=True)
class NeededPositions:
    """The words of each group that lead to an outcome, and the words that `do` sets.

    Args:
        outcome_nodes: Ground ids of the nodes that the metric reads.
        ancestor_words: For each group with an ancestor of an outcome, the mask of the words with such a node, `[word]`.
        intervened_words: For each group with a node that `do` sets, the mask of the words whose nodes are all set,
            `[word]`.
    """

    outcome_nodes: tuple[int, ...]
    ancestor_words: Mapping[int, BoolArray]
    intervened_words: Mapping[int, BoolArray]


def find_needed_positions(model: GroundModel, outcome_nodes: Iterable[int]) -> NeededPositions:
    """Find the words with ancestors of the outcomes.

    Args:
        model: The sentence after interventions.
        outcome_nodes: Ground ids of the nodes that the metric reads.

    Returns:
        The words that lead to an outcome, and the words that `do` sets.
    """
    outcome_nodes, ground = tuple(outcome_nodes), model.ground
    marks = mark_nodes(ground, outcome_nodes)
    for index, reached in find_reachable(ground, marks, up=True).items():
        marks[index] = np.asarray(marks[index] | reached) if index in marks else reached
    needed_words = {index: np.any(_reshape_by_word(model, index, mark), axis=0) for index, mark in marks.items()}
    intervened = {
        index: np.all(_reshape_by_word(model, index, mark), axis=0)
        for index, mark in mark_nodes(ground, model.do).items()
    }
    return NeededPositions(outcome_nodes, needed_words, intervened)


def _reshape_by_word(model: GroundModel, index: int, marks: BoolArray) -> BoolArray:
    """Reshape the marks of a group's nodes to `[plates, word]`, with one word if it has none."""
    return marks.reshape(-1, count_words(model, index))


def find_changed_positions(
    model: GroundModel, needed: NeededPositions, patched_words: Mapping[int, BoolArray], num_cells: int
) -> dict[int, tuple[BoolArray, BoolArray]]:
    """Propagate changes from the patched words to the outcomes.

    Args:
        model: The sentence after interventions.
        needed: The words that lead to an outcome; other words are ignored.
        patched_words: For each patched group, the mask of the words in which cells set nodes, `[cell, word]`.
        num_cells: The number of cells.

    Returns:
        For each group that changes in a cell, in topological order: the mask of the words that read a changed value,
        `[cell, word]`, and the mask of these words and the words in which the cell sets a node.
    """
    # A value can differ from the base run only if it is patched or descends from a patched node, and it matters only if
    # it is an ancestor of an outcome. A word cannot change if `do` sets all its nodes. Specs are in topological order,
    # so one pass finds all descendants (cells that change a recurrent group run one at a time). The masks are by word,
    # not by node: they mark a superset, which costs time but changes no result.
    changed: dict[int, tuple[BoolArray, BoolArray]] = {}
    for index, spec in enumerate(model.network.specs):
        needed_words = needed.ancestor_words.get(index)
        is_reached = index in patched_words or any(parent.index in changed for parent in spec.parents)
        if needed_words is None or not is_reached:
            continue
        descends = np.zeros((num_cells, len(needed_words)), dtype=np.bool_)
        for parent in spec.parents:
            if parent.index in changed:
                changed_words = changed[parent.index][1]
                if parent.reach.kind == "same" or model.network.specs[parent.index].group.word_stack is None:
                    descends |= changed_words
                    continue
                reads = parent.reach.matrix(len(needed_words), count_words(model, parent.index))  # [word, word read]
                descends |= (changed_words.astype(np.float32) @ reads.T.astype(np.float32)) > 0
        descends &= needed_words & np.logical_not(needed.intervened_words.get(index, False))
        updated = descends | (patched_words[index] & needed_words) if index in patched_words else descends
        if updated.any():
            changed[index] = descends, updated
    return changed


def count_words(model: GroundModel, index: int) -> int:
    """The number of words of a group; 1 for a group without words."""
    words = model.network.specs[index].group.word_stack
    return 1 if words is None else model.ground.word_counts[words]


def estimate_bytes(model: GroundModel, needed: NeededPositions) -> tuple[int, int]:
    """Estimate memory: the peak bytes of one cell of one example, and the bytes of the stored run of one example."""
    peak, retained = 1, 1
    for index, table in needed.ancestor_words.items():
        spec, count, shape = model.network.specs[index], int(table.sum()), model.ground.shapes[index]
        if spec.tpm.kind == "input" or spec.group.word_stack is None:
            continue
        plates = int(np.prod(shape[:-1], dtype=np.int64))
        num_values = count_outcome_values(model, spec)
        inner = max([n for parameter in spec.parameters.values() for n in parameter.shape[:1]], default=1)
        stacks = [model.network.specs[parent.index].group.word_stack for parent in spec.parents]
        read = max([model.ground.word_counts[stack] for stack in stacks if stack is not None], default=1)
        peak = max(peak, count * max(plates * num_values, plates * read, inner))
        retained += 2 * plates * num_values * (shape[-1] if table.all() else count)
    size = model.network.dtype.itemsize
    return size * PEAK_COPIES * peak, size * retained


def count_outcome_values(model: GroundModel, spec: NodeSpec) -> int:
    """The size of the outcome of a node: the size of its value, or its number of states."""
    if spec.tpm.kind == "discrete":
        return model.network.count_states(spec.group.index, model.ground.word_counts)
    return math.prod(spec.shape)
