"""The runs of many cells in one batch: from the patched nodes down to the outcomes, by node group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from bnet_transformer._core.arrays import BoolArray, IntArray
from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.sweeps.alignment import WordAlignment
from bnet_transformer.interventions.sweeps.cell_spec import PatchSites, PathsToEnd
from bnet_transformer.interventions.sweeps.examples import Examples, Overrides
from bnet_transformer.interventions.sweeps.sparse_update import (
    GroupPatch,
    GroupUpdate,
    NeededPositions,
    RowIndex,
    SparseUpdate,
    count_words,
    find_changed_positions,
    get_layout_index,
    get_layout_shape,
    get_parent_groups,
    is_wordwise,
)
from bnet_transformer.tpm.base import broadcast_shapes


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
        network, spec = self.examples.model.network, self.specs[index]
        if spec.tpm.kind == "discrete" or spec.tpm.is_index_valued:
            expected, hint = "nodes with real values, for first_order=True", "Use first_order=False"
            raise BNetError(f"at {spec.group.name}", expected=expected, actual="discrete nodes", hint=hint)
        plates = [
            network.graph.plate_sizes[plate] if plate in spec.group.plates else 1 for plate in network.graph.plate_sizes
        ]
        words = 1 if spec.group.word_stack is None else self.examples.model.ground.word_counts[spec.group.word_stack]
        shape = (len(self.examples), *plates, words, *spec.shape)
        return torch.zeros(shape, dtype=network.dtype, device=network.device, requires_grad=True)

    def get_base_values(self, group: int, patch: GroupPatch) -> Tensor:
        """The base values of the nodes of a patch, `[k, example, *shape]`."""
        return gather_nodes(self, group, self.base.values[group], patch.nodes)

    def get_patch_values(self, group: int, patch: GroupPatch) -> Tensor:
        """The values to which a patch sets its nodes, `[k, example, *shape]`."""
        return (
            patch.source.transpose(0, 1) if patch.is_per_node else gather_nodes(self, group, patch.source, patch.nodes)
        )

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
        table = np.zeros((num_cells, count_words(self.examples.model, index)), dtype=np.bool_)
        for patch in patches:
            table[patch.cells.numpy(), patch.nodes[-1].numpy()] = True
        return table

    def _compute_group(
        self, update: SparseUpdate, spec: NodeSpec, rows: RowIndex, affected: BoolArray, patches: Sequence[GroupPatch]
    ) -> Tensor:
        """The updated rows of a group: compute the affected rows, then apply `do` and the patches."""
        index = spec.group.index
        values = [patch for patch in patches if not patch.is_attention]
        attention = next((patch for patch in patches if patch.is_attention), None)  # at most one in a group
        if attention is not None:
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
        examples = max(values.shape[0], patch.source.shape[0])
        shape = (examples, *get_layout_shape(self.base, spec)[:-1], len(rows), *values.shape[axis + 1 :])
        values = values.expand(shape).clone()
        plates = tuple(index[has_row] for index in patch.nodes[:-1])
        value = self.get_patch_values(spec.group.index, patch)[has_row]
        target = values.movedim(0, axis)  # [*plates, row, example, *shape]: a view
        target[(*plates, row[has_row])] = value.to(values.dtype)
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


def gather_nodes(run: PatchedRun, group: int, value: Tensor, nodes: tuple[Tensor, ...]) -> Tensor:
    """Gather nodes from the values `[1 or N, *plates, word, *shape]` of a group: `[k, 1 or N, *shape]`."""
    rank = run.base.layout.rank
    full = value.expand(value.shape[0], *get_layout_shape(run.base, run.specs[group]), *value.shape[rank:])
    return full.movedim(0, rank - 1)[nodes]


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
    run: PatchedRun, source: ExecutionState, sites: PatchSites, alignment: WordAlignment | None = None
) -> GroupPatch:
    """The patch of one node group with the values, or the attention, of another run, at aligned words."""
    spec = run.specs[sites.group]
    node = get_layout_index(run.base, spec, sites.nodes)
    cell = torch.from_numpy(sites.cells)
    read = None if sites.read_words is None else torch.from_numpy(np.asarray(sites.read_words))
    if sites.is_attention:
        table = source.attention_weights[sites.group]
        assert table is not None  # recurrent groups are an obstacle, so their cells have separate runs
        return GroupPatch(cell, node, table.expand(-1, *get_layout_shape(run.base, spec), -1), True, read)
    if alignment is None or alignment.is_identity:
        return GroupPatch(cell, node, source.values[sites.group])
    aligned = get_layout_index(source, spec, alignment.align_nodes(sites.group, sites.nodes))
    value, rank = source.values[sites.group], source.layout.rank
    full = value.expand(value.shape[0], *get_layout_shape(source, spec), *value.shape[rank:])
    return GroupPatch(cell, node, full.movedim(0, rank - 1)[aligned].transpose(0, 1), is_per_node=True)
