"""The runs of many cells in one batch: from the patched nodes to the outcomes, with rows only for what cells change."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnet_transformer._core.naming import WORD
from bnet_transformer._core.tensors import BoolArray, IntArray
from bnet_transformer.compiler.evaluate import evaluate_tpm
from bnet_transformer.compiler.gather import ExecutionState, TensorLayout, gather_parents, get_layout_sizes
from bnet_transformer.compiler.linear import find_reached_words, is_norm
from bnet_transformer.data.do_values import Change
from bnet_transformer.declare import Network, NodeSpec
from bnet_transformer.graph.traversal import find_reachable, mark_nodes
from bnet_transformer.interventions.cells import PatchSites, PathsToEnd, WordAlignment
from bnet_transformer.interventions.examples import Examples, Overrides
from bnet_transformer.reference import GroundModel
from bnet_transformer.tpm.base import broadcast_shapes

# --------------------------------------------------------------------------------------------------------------------
# Sparse updates: compute only the values that cells change, as rows (cell, word) of each node group.
#
# A row is computed if it descends from a patched node and leads to an outcome. Both conditions are masks over the words
# of a group, `[cell, word]` and `[word]`, which are propagated along the reach of the arrows.
#
# The updated values of a group have the layout `[example, *plates, row, *shape]`, as if the rows were the words of one
# long sentence. A wordwise TPM, in which a word depends only on itself, computes only these rows. A TPM that uses other
# words receives the full sentence of each cell, `[cell, example, *plates, word, *shape]`; values that no cell changes
# are shared.


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
    """The rows of a group that differ from the base run, and their values `[example, *plates, row, *shape]`."""

    rows: RowIndex
    values: Tensor


@dataclass(frozen=True)
class GroupPatch:
    """The patch of one node group: cell `cells[k]` sets a node to its value in `source`.

    Args:
        cells: The cells, `[k]`.
        nodes: The indices of the nodes along each plate of the layout, and their words, `[k]` each.
        source: The values, `[example, *plates, word, *shape]`; with `is_attention` the rows `P(j | i)`,
            `[example, *plates, word, word read]`; with `is_per_node` the value for each k, `[example, k, *shape]`, or
            only its entry, `[example, k, 1]`, without a change.
        is_attention: Whether cells set attention instead of values.
        is_score: Whether the rows are the scores before the softmax, -inf for words that are not read.
        entries: The entry of the value, in row-major order, or of the row that is set, `[k]`; None for all entries.
        is_per_node: Whether `source` has a value for each k.
        change: The change of the values that the nodes have in the run of the cell, with the constants in `source`;
            None to set the values of `source`.
    """

    cells: Tensor
    nodes: tuple[Tensor, ...]
    source: Tensor
    is_attention: bool = False
    entries: Tensor | None = None
    is_per_node: bool = False
    change: Change | None = None
    is_score: bool = False

    def renumber_cells(self, new_ids: NDArray[np.int64]) -> GroupPatch:
        """The patch of the cells with a new id, `new_ids[cell]`; cells whose new id is -1 are dropped."""
        cells = torch.from_numpy(new_ids)[self.cells]
        keep = cells >= 0
        node = tuple(index[keep] for index in self.nodes)
        entries = None if self.entries is None else self.entries[keep]
        source = self.source[:, keep] if self.is_per_node else self.source
        return replace(self, cells=cells[keep], nodes=node, source=source, entries=entries)


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
        self,
        spec: NodeSpec,
        rows: RowIndex,
        *,
        as_distribution: bool = False,
        slots: Collection[int] | None = None,
        is_scale_fixed: bool = False,
    ) -> Tensor:
        """Compute some rows of a group, `[1 or N, *plates, row, *shape]`.

        With `as_distribution`, the result is `log P` or the mean of a random group. With `slots`, only these slots read
        updated values; the other slots read the base run. With `is_scale_fixed`, the scale of a norm is that of the
        base run.
        """
        wordwise = is_wordwise(self.base.network, spec)
        state, cells = (self.build_row_state(spec, rows), None) if wordwise else self._build_cell_state(spec, rows)
        context, parents = gather_parents(state, spec)
        is_scale_fixed = is_scale_fixed and is_norm(spec)
        if slots is not None or is_scale_fixed:
            base_update = SparseUpdate(self.base, {}, self.compact_index)
            base = base_update.build_row_state(spec, rows) if wordwise else base_update._build_cell_state(spec, rows)[0]
            _, base_parents = gather_parents(base, spec)
            pairs = enumerate(zip(parents, base_parents, strict=True))
            parents = [new if slots is None or k in slots else old for k, (new, old) in pairs]
        if is_scale_fixed:
            values = spec.tpm.linear_value(context, spec.tpm.norm_scale(context, *base_parents), *parents)
        elif as_distribution:
            values = summarize_distribution(spec, context, parents)
        else:
            values = evaluate_tpm(state, spec, context, parents)
        shape = tuple(values.shape[-1:]) if as_distribution and spec.tpm.kind == "discrete" else spec.shape
        if cells is not None:
            return self._select_rows(values, rows, cells, shape)
        return state.layout.pad_dims(values, len(shape))

    def mix_attention(self, spec: NodeSpec, rows: RowIndex, patches: Sequence[GroupPatch]) -> Tensor:
        """Compute some rows of an attention of which patches set scores or `P(j | i)`."""
        state, cells = self._build_cell_state(spec, rows)
        has_scores = any(patch.is_score for patch in patches)
        table, parents = compute_attention_rows(state, spec, is_score=has_scores)
        num_examples = max([table.shape[1], *(patch.source.shape[0] for patch in patches)])
        plates = get_layout_shape(self.base, spec)[:-1]
        table = table.expand(len(cells), num_examples, *plates, *table.shape[-2:]).clone()
        for patch in sorted(patches, key=lambda patch: not patch.is_score):  # scores, then the weights after them
            if has_scores and not patch.is_score:
                table, has_scores = table.softmax(-1), False
            has_row = rows.row_ids[patch.cells, patch.nodes[-1]] >= 0  # a word that leads to no outcome has no row
            columns = patch.nodes if patch.entries is None else (*patch.nodes, patch.entries)
            nodes = tuple(index[has_row] for index in columns)
            examples_last, source = table.movedim(1, -1), patch.source.movedim(0, -1)
            examples_last[(torch.searchsorted(cells, patch.cells[has_row]), *nodes)] = source[nodes]
        mix = spec.tpm.mix(table.softmax(-1) if has_scores else table, *parents)  # type: ignore[attr-defined]
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
        layout = TensorLayout((CELL_AXIS,), self.base.layout.plates)
        return replace(self.base, layout=layout, values=values, mask_cache={}, attention_weights={}), cells

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
        value = TensorLayout((CELL_AXIS,), self.base.layout.plates).pad_dims(value, len(event_shape))
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


def compute_attention_rows(
    state: ExecutionState, spec: NodeSpec, *, is_score: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The `P(j | i)` of an attention, `[*lead, *plates, word, word read]`, and the values of its parents.

    With `is_score`, the scores before the softmax instead, -inf for words that are not read.
    """
    context, parents = gather_parents(state, spec)
    if is_score:
        scores, mask = spec.tpm.scores(context, *parents)  # type: ignore[attr-defined]
        return state.layout.pad_dims(scores.masked_fill(~mask, -torch.inf), 1), parents
    weights = spec.tpm.attention_weights(context, *parents)
    assert weights is not None  # cells of an attention without weights are an error
    return state.layout.pad_dims(weights, 1), parents


def get_layout_shape(state: ExecutionState, spec: NodeSpec) -> tuple[int, ...]:
    """The size of a group along each plate of the layout, and its number of words; 1 along missing axes."""
    return (*get_layout_sizes(state.network, spec), spec.group.count_words(state.word_counts))


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
    by_word = {i: mark.reshape(-1, ground.count_words(i)) for i, mark in marks.items()}  # [plates, word]
    set_by_word = {i: mark.reshape(-1, ground.count_words(i)) for i, mark in mark_nodes(ground, model.do).items()}
    needed_words = {index: np.any(mark, axis=0) for index, mark in by_word.items()}
    return NeededPositions(outcome_nodes, needed_words, {i: np.all(mark, axis=0) for i, mark in set_by_word.items()})


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
                descends |= find_reached_words(parent, changed[parent.index][1], len(needed_words))
        descends &= needed_words & np.logical_not(needed.intervened_words.get(index, False))
        updated = descends | (patched_words[index] & needed_words) if index in patched_words else descends
        if updated.any():
            changed[index] = descends, updated
    return changed


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


# --------------------------------------------------------------------------------------------------------------------
# The runs of many cells in one batch: from the patched nodes down to the outcomes, by node group.


@dataclass
class PatchedRun:
    """A base run, and the outcomes of the runs that patch some of its nodes.

    Args:
        examples: The sentences, in which the enumerated choices are set.
        needed: The words that lead to an outcome; only these are computed again.
        source_groups: Further groups whose values are recorded, because cells use them.
        record_attention: Groups whose attention `P(j | i)` is recorded.
        gradient_groups: Groups with respect to whose values the outcomes have a gradient, by added zeros.
        overrides: Values that replace those of some nodes, and the masks of these nodes, by group.

    `base` contains the values of the base run. For the groups in `compact_index` it contains only the words that lead
    to an outcome, and `compact_index[group][word]` is the index of a word there. After group `index` is computed, the
    updates of the groups `last_uses[index]` are released.
    """

    examples: Examples
    needed: NeededPositions
    source_groups: frozenset[int] = frozenset()
    record_attention: frozenset[int] = frozenset()
    gradient_groups: frozenset[int] = frozenset()
    overrides: Overrides | None = None
    perturbations: dict[int, Tensor] = field(init=False)
    specs: tuple[NodeSpec, ...] = field(init=False)
    base: ExecutionState = field(init=False)
    compact_index: dict[int, Tensor] = field(init=False, default_factory=dict)
    last_uses: dict[int, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        model = self.examples.model
        self.specs = model.network.specs
        self.last_uses = self._find_last_uses()
        fixed = {model.ground.group_of(node).index for node in model.do}
        groups = {*self.needed.ancestor_words, *self.source_groups}
        computed = {index for index in groups if not self.specs[index].tpm.is_random or index in fixed}
        overridden = self.overrides.keys() if self.overrides else set()
        full_groups = self.source_groups | self.record_attention | self.gradient_groups | fixed | overridden
        compact = self._find_compact_groups(full_groups)
        self.perturbations = {
            index: self._create_perturbation(index)
            for index in sorted(self.gradient_groups & self.needed.ancestor_words.keys())
        }
        self.base = self.examples.run(computed - compact, self.record_attention, self.perturbations, self.overrides)
        for index in sorted(compact):
            rows = RowIndex.from_mask(self.needed.ancestor_words[index][None])
            with torch.set_grad_enabled(bool(self.perturbations)):
                self.base.values[index] = SparseUpdate(self.base, {}, self.compact_index).compute(
                    self.specs[index], rows
                )
            self.compact_index[index] = rows.row_ids[0]

    def _find_compact_groups(self, full_groups: Set[int]) -> set[int]:
        """The groups for which the base run computes only the words that lead to an outcome.

        These are the last groups before the outcomes, such as logits of 50,257 states, if the metric reads one word.
        `full_groups` are computed for all words, because cells or `do` need them.
        """
        # A word can be omitted if nothing reads it: no cell, no `do`, and no child that is computed for all words. The
        # needed words can be computed without the others if the group is wordwise, its parents have values, and it has
        # no pick.

        compact = set[int]()
        for index in sorted(self.needed.ancestor_words, reverse=True):  # children before parents
            spec = self.specs[index]
            if self.needed.ancestor_words[index].all() or index in full_groups or spec.tpm.is_random:
                continue
            children = {edge.child for edge in self.examples.model.network.graph.out_edges[index]}
            readers = children & self.needed.ancestor_words.keys()
            if any(child not in compact and not self.specs[child].tpm.is_random for child in readers):
                continue  # random children are computed only at the words of the outcomes
            sources = [self.specs[parent.index] for parent in spec.parents]
            if any(source.tpm.is_random and source.group.index not in full_groups for source in sources):
                continue
            if any(parent.pick for parent in spec.parents) or all(s.group.word_stack is None for s in sources):
                continue
            if is_wordwise(self.examples.model.network, spec):
                compact.add(index)
        return compact

    def _create_perturbation(self, index: int) -> Tensor:
        """Zeros for every node of a group in every example, with respect to which the outcomes have a gradient."""
        model, spec = self.examples.model, self.specs[index]
        network, words = model.network, model.ground.count_words(index)
        shape = (len(self.examples), *get_layout_sizes(network, spec), words, *spec.shape)
        return torch.zeros(shape, dtype=network.dtype, device=network.device, requires_grad=True)

    def get_base_values(self, group: int, patch: GroupPatch) -> Tensor:
        """The base values, or attention, of the nodes of a patch, `[k, example, *shape]`; of entries `[..., 1]`."""
        if patch.is_attention:
            return self.gather(group, self.get_attention(group, is_score=patch.is_score), patch)
        return self.gather(group, self.base.values[group], patch)

    def get_patch_values(self, group: int, patch: GroupPatch) -> Tensor:
        """The values, or attention, to which a patch sets its nodes in the base run, as `get_base_values`."""
        if patch.change is None:
            return self._get_sources(group, patch)
        nodes, number = patch.nodes, torch.arange(len(patch.cells))
        if patch.entries is not None and not patch.is_per_node:  # many entries of a node: each node once
            columns, number = torch.stack(nodes).unique(dim=1, return_inverse=True)
            nodes = tuple(columns)
        values = replace(patch, nodes=nodes, entries=None)
        base, constants = self.get_base_values(group, values), self._get_sources(group, values)
        changed = patch.change.apply(base, self.specs[group].shape, constants)
        return changed if patch.entries is None else _select_entries(changed[number], patch.entries)

    def _get_sources(self, group: int, patch: GroupPatch) -> Tensor:
        """The values of the nodes of a patch, or their entries, or the constants of a change: `[k, 1 or N, *shape]`."""
        if patch.is_per_node:
            return patch.source.transpose(0, 1)
        return self.gather(group, patch.source, patch if patch.change is None else replace(patch, entries=None))

    def get_difference(self, group: int, patch: GroupPatch) -> Tensor:
        """The values to which a patch sets its nodes minus their base values, `[k, example, *shape]`."""
        base, values = self.get_base_values(group, patch), self.get_patch_values(group, patch)
        difference = (values - base).detach()
        return torch.where(values == base, 0, difference) if patch.is_score else difference  # scores may be -inf

    def gather(self, group: int, values: Tensor, patch: GroupPatch) -> Tensor:
        """Gather what a patch sets from the values, or the attention, of its group: `[k, 1 or N, *shape]`."""
        return gather_nodes(self.base, self.specs[group], values, patch.nodes, patch.entries)

    @torch.no_grad()
    def get_attention(self, group: int, *, is_score: bool = False) -> Tensor:
        """The `P(j | i)` of a group in the base run, or its scores, `[1 or N, *plates, word, word read]`."""
        if is_score:
            return compute_attention_rows(self.base, self.specs[group], is_score=True)[0]
        weights = self.base.attention_weights.get(group)
        if weights is None:
            weights = self.base.attention_weights[group] = compute_attention_rows(self.base, self.specs[group])[0]
        return weights

    def compute_base_outcomes(self) -> dict[int, Tensor]:
        """The outcomes of the base run: `[1, example, *shape]` of each node."""
        with torch.set_grad_enabled(bool(self.perturbations)):
            update = SparseUpdate(self.base, {}, self.compact_index)
            return {node: self._compute_outcome(update, node, 1) for node in self.needed.outcome_nodes}

    def compute_outcomes(
        self,
        num_cells: int,
        patches: Mapping[int, Sequence[GroupPatch]],
        outcome_patches: Mapping[int, Sequence[GroupPatch]] = MappingProxyType({}),
    ) -> dict[int, Tensor]:
        """Compute the outcomes of many cells in one pass.

        Args:
            num_cells: The number of cells.
            patches: The patches of the cells, by node group.
            outcome_patches: The patches of outcomes that only the metric sees, by node group.

        Returns:
            The outcome of each outcome node, `[cell, example, *shape]`.
        """
        model, needed_words = self.examples.model, self.needed.ancestor_words
        set_words = {
            index: self._get_patched_words(index, group_patches, num_cells)
            for index, group_patches in patches.items()
            if index in needed_words
        }
        update = SparseUpdate(self.base, {}, self.compact_index)
        row_cache: dict[bytes, RowIndex] = {}
        with torch.set_grad_enabled(bool(self.perturbations)):
            for index, (descends, updated) in find_changed_positions(model, self.needed, set_words, num_cells).items():
                key = updated.tobytes()
                rows = row_cache[key] if key in row_cache else row_cache.setdefault(key, RowIndex.from_mask(updated))
                value = self._compute_group(update, self.specs[index], rows, descends, patches.get(index, ()))
                update.by_group[index] = GroupUpdate(rows, value)
                for released in self.last_uses.get(index, ()):
                    update.by_group.pop(released, None)
            outcomes = {node: self._compute_outcome(update, node, num_cells) for node in self.needed.outcome_nodes}
        for node, value in outcomes.items():
            group = model.ground.group_of(node).index
            offset = np.array([node - int(model.ground.offsets[group])])
            for patch in outcome_patches.get(group, ()):
                position = get_layout_index(self.base, self.specs[group], offset)
                inside = torch.stack([axis == i for axis, i in zip(patch.nodes, position, strict=True)]).all(0)
                value = value.clone()
                value[patch.cells[inside]] = patch.source[:, inside].transpose(0, 1).to(value)
                outcomes[node] = value
        return outcomes

    def patch_paths(
        self, ends: Sequence[PathsToEnd], build_first: Callable[[PatchSites], GroupPatch], memory: int
    ) -> dict[int, list[GroupPatch]]:
        """Compute the values that paths transmit to their last nodes, as patches of these nodes (path patching).

        Args:
            ends: The paths, by cell and last node.
            build_first: The patch of the first nodes, from sites whose cells are indices of `ends`.
            memory: The maximum number of bytes that are used at once.

        Returns:
            The patches of the last nodes, by node group.
        """
        # Only the arrows of a path transmit the patched value; the other parents of a node on the path have their
        # values of the base run (path patching, Goldowsky-Dill et al. 2023). So each step sets the parent and computes
        # one child. Paths of one cell with the same last node are computed together.
        cells = np.array([end.cell for end in ends])
        sent: dict[int, list[GroupPatch]] = {}
        first = [(k, path[0]) for k, end in enumerate(ends) for path in end.paths]
        for group, ids, nodes in self._split_by_group(first):
            sent.setdefault(group, []).append(build_first(PatchSites(group, ids, nodes)))
        results: dict[int, list[GroupPatch]] = {}
        for step in range(1, max(end.length for end in ends)):
            computed: dict[int, list[GroupPatch]] = {}
            pending = [(k, end.paths[0][step]) for k, end in enumerate(ends) if end.length > step]
            for group, ids, nodes in self._split_by_group(pending):
                parents = get_parent_groups(self.base.network, self.specs[group])
                num_values = sum(self.base.values[index].numel() for index in parents if index in sent)
                size = max(1, memory // (16 * len(self.examples) * max(1, num_values)))
                for start in range(0, len(ids), size):
                    part = slice(start, start + size)
                    patch = self._compute_path_step(sent, group, ids[part], nodes[part])
                    computed.setdefault(group, []).append(patch)
            last = np.array([end.length == step + 1 for end in ends])
            finished = np.flatnonzero(last)
            for group, patches in select_cells(computed, finished, cells[finished]).items():
                results.setdefault(group, []).extend(patches)
            sent = select_cells(computed, np.flatnonzero(~last), np.flatnonzero(~last))
        return results

    def _split_by_group(self, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, IntArray, IntArray]]:
        """Split pairs (id, ground node) by node group: yield the group, the ids, and the indices within the group."""
        ids, nodes = np.array(pairs, dtype=np.int64).T
        offsets = self.examples.model.ground.offsets
        groups = np.searchsorted(offsets, nodes, side="right") - 1
        for group in np.unique(groups).tolist():
            mask = groups == group
            yield group, ids[mask], nodes[mask] - int(offsets[group])

    def _compute_path_step(
        self, path_patches: Mapping[int, Sequence[GroupPatch]], group: int, cells: IntArray, nodes: IntArray
    ) -> GroupPatch:
        """Compute one node of a group for each cell, with the patched values of its parents."""
        spec, count = self.specs[group], len(cells)
        update = SparseUpdate(self.base, {}, self.compact_index)
        parents = {
            parent: path_patches[parent]
            for parent in get_parent_groups(self.base.network, spec)
            if parent in path_patches
        }
        for parent, parent_patches in select_cells(parents, cells, np.arange(count)).items():
            words = self._get_patched_words(parent, parent_patches, count)
            rows = RowIndex.from_mask(words)
            value = self._compute_group(update, self.specs[parent], rows, np.zeros_like(words), parent_patches)
            update.by_group[parent] = GroupUpdate(rows, value)
        index = get_layout_index(self.base, spec, nodes)
        mask = np.zeros((count, get_layout_shape(self.base, spec)[-1]), dtype=np.bool_)
        mask[np.arange(count), index[-1].numpy()] = True
        value = update.compute(spec, RowIndex.from_mask(mask))  # a row for each cell
        full = value.expand(len(self.examples), *get_layout_shape(self.base, spec)[:-1], count, *spec.shape)
        source = full.movedim(0, self.base.layout.word_dim)[(*index[:-1], torch.arange(count))].transpose(0, 1)
        return GroupPatch(torch.from_numpy(cells), index, source, is_per_node=True)

    def _get_patched_words(self, index: int, patches: Sequence[GroupPatch], num_cells: int) -> BoolArray:
        """The mask of the words of a group that cells set, `[cell, word]`."""
        table = np.zeros((num_cells, self.examples.model.ground.count_words(index)), dtype=np.bool_)
        for patch in patches:
            table[patch.cells.numpy(), patch.nodes[-1].numpy()] = True
        return table

    def _compute_group(
        self, update: SparseUpdate, spec: NodeSpec, rows: RowIndex, affected: BoolArray, patches: Sequence[GroupPatch]
    ) -> Tensor:
        """The updated rows of a group: compute the affected rows, then apply `do` and the patches."""
        index = spec.group.index
        values = [patch for patch in patches if not patch.is_attention]
        attention = [patch for patch in patches if patch.is_attention]
        if attention:
            result = update.mix_attention(spec, rows, attention)
        elif affected.any():
            subset = rows if len(rows) == int(affected.sum()) else RowIndex.from_mask(affected)
            is_open = spec.tpm.is_random and index not in self.base.known
            result = update.compute(spec, subset, as_distribution=is_open)
            if subset is not rows:
                result = self._replace_rows(update.gather(index, rows), result, rows, subset)
        else:
            result = update.gather(index, rows)
        if index in self.base.patched and affected.any():
            result = self.apply_interventions(result, index, rows)
        for patch in values:
            result = self._apply_patch(result, spec, rows, patch)
        return result

    def _replace_rows(self, base: Tensor, computed: Tensor, rows: RowIndex, computed_rows: RowIndex) -> Tensor:
        """Replace some rows of `base` by computed ones: `[example, *plates, row, *shape]`."""
        axis = self.base.layout.word_dim
        batch_shape = broadcast_shapes(base.shape[:axis], computed.shape[:axis])
        result = base.expand(*batch_shape, len(rows), *base.shape[axis + 1 :]).clone()
        row_ids = rows.row_ids[computed_rows.cells, computed_rows.words]
        return result.index_copy_(
            axis, row_ids.to(result.device), computed.expand(*batch_shape, *computed.shape[axis:])
        )

    def apply_interventions(self, values: Tensor, index: int, rows: RowIndex) -> Tensor:
        """Replace the nodes that `do` sets by their set values."""
        value, is_set = self.base.patched[index]
        if values.dim() > value.dim():  # log P of a choice; the metric reads no nodes that are set
            return values
        axis = self.base.layout.word_dim
        word = (rows.words if is_set.shape[axis] > 1 else torch.zeros_like(rows.words)).to(value.device)
        is_set = is_set.index_select(axis, word)
        is_set = is_set.reshape(*is_set.shape, *[1] * (value.dim() - self.base.layout.rank))
        return torch.where(is_set, value.index_select(axis, word), values)

    def _apply_patch(self, values: Tensor, spec: NodeSpec, rows: RowIndex, patch: GroupPatch) -> Tensor:
        """Replace the nodes that cells set by the patched values."""
        axis = self.base.layout.word_dim
        row = rows.row_ids[patch.cells, patch.nodes[-1]]
        has_row = row >= 0  # a word that leads to no outcome has no row
        if not bool(has_row.any()):
            return values
        examples = max(values.shape[0], patch.source.shape[0])
        shape = (examples, *get_layout_shape(self.base, spec)[:-1], len(rows), *values.shape[axis + 1 :])
        values = values.expand(shape).clone()
        plates = tuple(index[has_row] for index in patch.nodes[:-1])
        target = values.movedim(0, axis)  # [*plates, row, example, *shape]: a view
        value, position = self._get_sources(spec.group.index, patch)[has_row], (*plates, row[has_row])
        if patch.change is not None:  # of the value in the run of the cell, after the patches above it
            value = patch.change.apply(target[position], spec.shape, value)
        if patch.entries is None:
            target[position] = value.to(values.dtype)
        else:
            entries = patch.entries[has_row]
            value = value if patch.change is None else _select_entries(value, entries)
            target[_index_entries(position, entries, spec.shape)] = value[..., 0].to(values.dtype)
        return values

    def _find_last_uses(self) -> dict[int, list[int]]:
        """For each group, the groups that no later group reads."""
        model, needed_words = self.examples.model, self.needed.ancestor_words
        ground, out_edges = model.ground, model.network.graph.out_edges
        outcomes = {ground.group_of(node).index for node in self.needed.outcome_nodes}
        last_read: dict[int, list[int]] = {}
        for index in needed_words.keys() - outcomes:
            last = max([index, *(edge.child for edge in out_edges[index] if edge.child in needed_words)])
            last_read.setdefault(last, []).append(index)
        return last_read

    def _compute_outcome(self, update: SparseUpdate, node: int, num_cells: int) -> Tensor:
        """The outcome of a node in each cell, `[cell, example, *shape]`."""
        model, axis, count = self.examples.model, self.base.layout.word_dim, len(self.examples)
        group = model.ground.group_of(node).index
        spec = self.specs[group]
        offset = np.array([node - int(model.ground.offsets[group])])
        *plates, word = (int(i) for i in get_layout_index(self.base, spec, offset))
        one = RowIndex(torch.zeros(1, dtype=torch.long), torch.tensor([word]), torch.full((1, word + 1), 0))
        empty = SparseUpdate(self.base, {}, self.compact_index)
        known = group in self.base.values
        base = empty.gather(group, one) if known else empty.compute(spec, one, as_distribution=True)
        event_shape = base.shape[axis + 1 :]

        def select_node(value: Tensor) -> Tensor:  # [row, example, *shape]
            full = value.expand(count, *get_layout_shape(self.base, spec)[:-1], *value.shape[axis:])
            for plate in plates:
                full = full[:, plate]
            return full.transpose(0, 1)

        outcomes = select_node(base).expand(num_cells, count, *event_shape)
        changed = update.by_group.get(group)
        if changed is None:
            return outcomes
        row = changed.rows.row_ids[:, word]
        has_row = row >= 0
        outcomes = outcomes.clone()
        outcomes[has_row] = select_node(changed.values)[row[has_row]]
        return outcomes


def gather_nodes(
    state: ExecutionState, spec: NodeSpec, value: Tensor, nodes: tuple[Tensor, ...], entries: Tensor | None = None
) -> Tensor:
    """Gather nodes from the values `[1 or N, *plates, word, *shape]` of a group: `[k, 1 or N, *shape]`.

    With `entries`, gather one entry of each value, in row-major order: `[k, 1 or N, 1]`.
    """
    rank = state.layout.rank
    full = value.expand(value.shape[0], *get_layout_shape(state, spec), *value.shape[rank:]).movedim(0, rank - 1)
    if entries is None:
        return full[nodes]
    return full[_index_entries(nodes, entries, value.shape[rank:])].unsqueeze(-1)


def _index_entries(nodes: Sequence[Tensor], entries: Tensor, shape: Sequence[int]) -> tuple[Any, ...]:
    """The index of one entry of each node in values `[*plates, word, example, *shape]`."""
    return (*nodes, slice(None), *torch.unravel_index(entries, tuple(shape)))


def _select_entries(values: Tensor, entries: Tensor) -> Tensor:
    """One entry of each value `[k, example, *shape]`, in row-major order: `[k, example, 1]`."""
    return values.flatten(2)[torch.arange(len(values)), :, entries, None]


def select_cells(
    patches: Mapping[int, Sequence[GroupPatch]], cells: IntArray, new_ids: IntArray
) -> dict[int, list[GroupPatch]]:
    """The patches of some cells, which get new ids, by node group; groups without a patch are dropped."""
    cell_ids = [int(patch.cells.max()) for group_patches in patches.values() for patch in group_patches]
    id_map = np.full(max([*cell_ids, int(cells.max(initial=-1))]) + 1, -1)
    id_map[cells] = new_ids
    selected: dict[int, list[GroupPatch]] = {}
    for group, group_patches in patches.items():
        parts = (patch.renumber_cells(id_map) for patch in group_patches)
        if nonempty := [part for part in parts if len(part.cells)]:
            selected[group] = nonempty
    return selected


def build_patch(
    run: PatchedRun,
    source: ExecutionState,
    sites: PatchSites,
    alignment: WordAlignment | None = None,
    change: Change | None = None,
) -> GroupPatch:
    """The patch of one node group with the values, or the attention, of another run, at aligned words."""
    spec = run.specs[sites.group]
    node = get_layout_index(run.base, spec, sites.nodes)
    cell = torch.from_numpy(sites.cells)
    entries = None if sites.entries is None else torch.from_numpy(sites.entries)
    if sites.is_attention:
        table = source.attention_weights.get(sites.group)
        if sites.is_score:
            table, _ = compute_attention_rows(source, spec, is_score=True)
        assert table is not None  # recurrent groups are an obstacle, so their cells have separate runs
        table = table.expand(-1, *get_layout_shape(run.base, spec), -1)
        return GroupPatch(cell, node, table, True, entries, is_score=sites.is_score)
    value = source.values[sites.group]
    if alignment is None or alignment.is_identity:
        return GroupPatch(cell, node, value, entries=entries, change=change)
    aligned = get_layout_index(source, spec, alignment.align_nodes(sites.group, sites.nodes))
    values = gather_nodes(source, spec, value, aligned, entries if change is None else None).transpose(0, 1)
    return GroupPatch(cell, node, values, entries=entries, is_per_node=True, change=change)
