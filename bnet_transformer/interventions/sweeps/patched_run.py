"""One batch of a sweep: for some cells, what the outcomes come to, family by family down from what is set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.compiler.execution_state import ExecutionState
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.sweeps.cell_spec import IntArray, NodePath, PatchSites
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.interventions.sweeps.sparse_update import (
    BoolArray,
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
    """The corrupt run, and the outcomes of every run that starts from it with some nodes set.

    Args:
        examples: The sentences, of which the choices are set.
        needed: The words that lead to an outcome; nothing else is computed again.
        source_groups: Further families whose values are kept, since cells take values from them.
        record_attention: Families whose attention `P(j | i)` is kept.
        gradient_groups: Families at every node of which the outcomes have a gradient, by a nudge of zero.

    `base` has the values of the run before anything is set. Of the families in `compact_index` it has only the words that
    lead to an outcome: `positions[family][word]` is the place of a word there.
    """

    examples: Examples
    needed: NeededPositions
    source_groups: frozenset[int] = frozenset()
    record_attention: frozenset[int] = frozenset()
    gradient_groups: frozenset[int] = frozenset()
    perturbations: dict[int, Tensor] = field(init=False)
    specs: tuple[NodeSpec, ...] = field(init=False)
    base: ExecutionState = field(init=False)
    compact_index: dict[int, Tensor] = field(init=False, default_factory=dict)
    last_uses: dict[int, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        world = self.examples.model
        self.specs = world.network.specs
        self.last_uses = self._find_last_uses()
        fixed = {world.ground.group_of(node).index for node in world.do}
        families = {*self.needed.ancestor_words, *self.source_groups}
        computed = {index for index in families if not self.specs[index].tpm.is_random or index in fixed}
        narrowed = self._find_compact_groups(self.source_groups | self.record_attention | fixed)
        self.perturbations = {
            index: self._create_perturbation(index)
            for index in sorted(self.gradient_groups & self.needed.ancestor_words.keys())
        }
        self.base = self.examples.run(computed - narrowed, self.record_attention, self.perturbations)
        for index in sorted(narrowed):
            rows = RowIndex.from_mask(self.needed.ancestor_words[index][None])
            with torch.set_grad_enabled(bool(self.perturbations)):
                self.base.values[index] = SparseUpdate(self.base, {}, self.compact_index).compute(
                    self.specs[index], rows
                )
            self.compact_index[index] = rows.row_ids[0]

    def _find_compact_groups(self, full_groups: Set[int]) -> set[int]:
        """The families of which the base run computes only the words that lead to an outcome.

        They are the last ones before the outcomes: logits of 50,257 states, say, of which the metric reads one word.
        The other words can be left out since nothing reads them: neither a cell nor `do` (`full_groups` has the families
        that these need), nor a family that is computed for all words at once. A word can be computed without the
        others where it reads its own word alone, of parents that have values, without a pick.
        """
        narrowed = set[int]()
        for index in sorted(self.needed.ancestor_words, reverse=True):  # readers before what they read
            member = self.specs[index]
            if self.needed.ancestor_words[index].all() or index in full_groups or member.tpm.is_random:
                continue
            children = {bundle.child for bundle in self.examples.model.network.graph.out_edges[index]}
            readers = children & self.needed.ancestor_words.keys()
            if any(child not in narrowed and not self.specs[child].tpm.is_random for child in readers):
                continue  # random readers are computed at the words of the outcomes alone
            parents = [self.specs[given.index] for given in member.parents]
            if any(parent.tpm.is_random and parent.group.index not in full_groups for parent in parents):
                continue
            if any(given.pick for given in member.parents) or all(
                parent.group.word_stack is None for parent in parents
            ):
                continue
            if is_wordwise(self.examples.model.network, member):
                narrowed.add(index)
        return narrowed

    def _create_perturbation(self, index: int) -> Tensor:
        """Zeros for every node of a family in every example: the outcomes have a gradient at them."""
        network, member = self.examples.model.network, self.specs[index]
        if member.tpm.kind == "discrete" or member.tpm.is_index_valued:
            wanted, allowed = "nodes with a slope, for first_order=True: real numbers", "first_order=False"
            raise BNetError(f"at {member.group.name}", expected=wanted, actual="states", allowed=allowed)
        plates = [
            network.graph.plate_sizes[plate] if plate in member.group.plates else 1
            for plate in network.graph.plate_sizes
        ]
        words = (
            1 if member.group.word_stack is None else self.examples.model.ground.word_counts[member.group.word_stack]
        )
        shape = (len(self.examples), *plates, words, *member.shape)
        return torch.zeros(shape, dtype=network.dtype, requires_grad=True)

    def get_base_values(self, group: int, patch: GroupPatch) -> Tensor:
        """The base values of the nodes of a setting, `[k, example, *shape]`."""
        return gather_nodes(self, group, self.base.values[group], patch.nodes)

    def get_patch_values(self, group: int, patch: GroupPatch) -> Tensor:
        """The values that they are set to, `[k, example, *shape]`."""
        return (
            patch.source.transpose(0, 1) if patch.is_per_node else gather_nodes(self, group, patch.source, patch.nodes)
        )

    def compute_base_outcomes(self) -> dict[int, Tensor]:
        """The outcomes of the base run: `[1, example, *shape]` of each node."""
        with torch.set_grad_enabled(bool(self.perturbations)):
            changes = SparseUpdate(self.base, {}, self.compact_index)
            return {node: self._compute_outcome(changes, node, 1) for node in self.needed.outcome_nodes}

    def compute_outcomes(self, num_cells: int, patches: Mapping[int, Sequence[GroupPatch]]) -> dict[int, Tensor]:
        """The outcomes with these cells set, each in a run of its own: `[cell, example, *shape]` of each node."""
        world, leads = self.examples.model, self.needed.ancestor_words
        set_words = {
            index: self._get_patched_words(index, several, num_cells)
            for index, several in patches.items()
            if index in leads
        }
        changes = SparseUpdate(self.base, {}, self.compact_index)
        same: dict[bytes, RowIndex] = {}
        with torch.set_grad_enabled(bool(self.perturbations)):
            for index, (descends, both) in find_changed_positions(world, self.needed, set_words, num_cells).items():
                key = both.tobytes()
                rows = same[key] if key in same else same.setdefault(key, RowIndex.from_mask(both))
                value = self._compute_group(changes, self.specs[index], rows, descends, patches.get(index, ()))
                changes.by_group[index] = GroupUpdate(rows, value)
                for done in self.last_uses.get(index, ()):
                    changes.by_group.pop(done, None)
            return {node: self._compute_outcome(changes, node, num_cells) for node in self.needed.outcome_nodes}

    def patch_paths(self, clean: ExecutionState, paths: Sequence[NodePath], memory: int) -> dict[int, list[GroupPatch]]:
        """What paths come to at their last nodes, which cells then set: their first nodes are as in the clean run.

        A step of a path is a cell of its own: the parent is set to what is sent, and the next node alone is computed.
        """
        ends: dict[tuple[int, int], list[tuple[int, ...]]] = {}  # by the cell and the last node
        for path in paths:
            ends.setdefault((path.cell, path.nodes[-1]), []).append(path.nodes)
        ways, cells = list(ends.values()), np.array([cell for cell, _ in ends])
        sent: dict[int, list[GroupPatch]] = {}
        first = [(k, path[0]) for k, several in enumerate(ways) for path in several]
        for family, number, node in self._split_by_group(first):
            entries = PatchSites(family, number, node)
            sent.setdefault(family, []).append(build_patch(self, clean, entries))
        found: dict[int, list[GroupPatch]] = {}
        for step in range(1, max(len(several[0]) for several in ways)):
            made: dict[int, list[GroupPatch]] = {}
            due = [(k, several[0][step]) for k, several in enumerate(ways) if len(several[0]) > step]
            for family, number, node in self._split_by_group(due):
                parents = get_parent_groups(self.base.network, self.specs[family])
                read = sum(self.base.values[index].numel() for index in parents if index in sent)
                size = max(1, memory // (16 * len(self.examples) * max(1, read)))
                for start in range(0, len(number), size):
                    some = slice(start, start + size)
                    setting = self._compute_path_step(sent, family, number[some], node[some])
                    made.setdefault(family, []).append(setting)
            last = np.array([len(several[0]) == step + 1 for several in ways])
            done = np.flatnonzero(last)
            for family, settings in select_cells(made, done, cells[done]).items():
                found.setdefault(family, []).extend(settings)
            sent = select_cells(made, np.flatnonzero(~last), np.flatnonzero(~last))
        return found

    def _split_by_group(self, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, IntArray, IntArray]]:
        """Numbers with a ground node each, family by family: the numbers, and those of the nodes in the family."""
        number, node = np.array(pairs, dtype=np.int64).T
        offsets = self.examples.model.ground.offsets
        families = np.searchsorted(offsets, node, side="right") - 1
        for family in np.unique(families).tolist():
            own = families == family
            yield family, number[own], node[own] - int(offsets[family])

    def _compute_path_step(
        self, path_patches: Mapping[int, Sequence[GroupPatch]], group: int, cells: IntArray, nodes: IntArray
    ) -> GroupPatch:
        """What a node of a family comes to in each of some cells, where its parents alone are as they are sent."""
        member, count = self.specs[group], len(cells)
        changes = SparseUpdate(self.base, {}, self.compact_index)
        parents = {
            index: path_patches[index]
            for index in get_parent_groups(self.base.network, member)
            if index in path_patches
        }
        for index, several in select_cells(parents, cells, np.arange(count)).items():
            words = self._get_patched_words(index, several, count)
            rows = RowIndex.from_mask(words)
            value = self._compute_group(changes, self.specs[index], rows, np.zeros_like(words), several)
            changes.by_group[index] = GroupUpdate(rows, value)
        node = get_layout_index(self.base, member, nodes)
        table = np.zeros((count, get_layout_shape(self.base, member)[-1]), dtype=np.bool_)
        table[np.arange(count), node[-1].numpy()] = True
        value = changes.compute(member, RowIndex.from_mask(table))  # a row for each cell
        full = value.expand(len(self.examples), *get_layout_shape(self.base, member)[:-1], count, *member.shape)
        source = full.movedim(0, self.base.layout.word_dim)[(*node[:-1], torch.arange(count))].transpose(0, 1)
        return GroupPatch(torch.from_numpy(cells), node, source, is_per_node=True)

    def _get_patched_words(self, index: int, patches: Sequence[GroupPatch], num_cells: int) -> BoolArray:
        """The words of a family that cells set, `[cell, word]`."""
        table = np.zeros((num_cells, count_words(self.examples.model, index)), dtype=np.bool_)
        for setting in patches:
            table[setting.cells.numpy(), setting.nodes[-1].numpy()] = True
        return table

    def _compute_group(
        self, update: SparseUpdate, spec: NodeSpec, rows: RowIndex, affected: BoolArray, patches: Sequence[GroupPatch]
    ) -> Tensor:
        """The rows of a family: those that read something changed are computed, then what cells set is put in."""
        index = spec.group.index
        values = [setting for setting in patches if not setting.is_attention]
        weights = next((setting for setting in patches if setting.is_attention), None)  # a role has one for each family
        if weights is not None:
            found = update.mix_attention(spec, rows, weights)
        elif affected.any():
            mine = rows if len(rows) == int(affected.sum()) else RowIndex.from_mask(affected)
            is_open = spec.tpm.is_random and index not in self.base.known
            made = update.compute(spec, mine, as_distribution=is_open)
            found = made if mine is rows else self._replace_rows(update.gather(index, rows), made, rows, mine)
        else:
            found = update.gather(index, rows)
        if index in self.base.patched and affected.any():
            found = self._apply_interventions(found, index, rows)
        for setting in values:
            found = self._apply_patch(found, spec, rows, setting)
        return found

    def _replace_rows(self, base: Tensor, computed: Tensor, rows: RowIndex, computed_rows: RowIndex) -> Tensor:
        """Rows as they were, but for those that were made."""
        axis = self.base.layout.word_dim
        lead = broadcast_shapes(base.shape[:axis], computed.shape[:axis])
        found = base.expand(*lead, len(rows), *base.shape[axis + 1 :]).clone()
        at = rows.row_ids[computed_rows.cells, computed_rows.words]
        return found.index_copy_(axis, at, computed.expand(*lead, *computed.shape[axis:]))

    def _apply_interventions(self, values: Tensor, index: int, rows: RowIndex) -> Tensor:
        """The rows of a family, with the nodes of a word that `do` set as they are set."""
        value, which = self.base.patched[index]
        if values.dim() > value.dim():  # log P of a choice: no metric asks about the nodes that are set
            return values
        axis = self.base.layout.word_dim
        word = rows.words if which.shape[axis] > 1 else torch.zeros_like(rows.words)
        which = which.index_select(axis, word)
        which = which.reshape(*which.shape, *[1] * (value.dim() - self.base.layout.rank))
        return torch.where(which, value.index_select(axis, word), values)

    def _apply_patch(self, values: Tensor, spec: NodeSpec, rows: RowIndex, patch: GroupPatch) -> Tensor:
        """The rows of a family, with what a cell sets in its place."""
        axis = self.base.layout.word_dim
        row = rows.row_ids[patch.cells, patch.nodes[-1]]
        there = row >= 0  # what leads to no outcome has no row
        examples = max(values.shape[0], patch.source.shape[0])
        shape = (examples, *get_layout_shape(self.base, spec)[:-1], len(rows), *values.shape[axis + 1 :])
        values = values.expand(shape).clone()
        plates = tuple(each[there] for each in patch.nodes[:-1])
        value = self.get_patch_values(spec.group.index, patch)[there]
        target = values.movedim(0, axis)  # [*plates, row, example, *shape]: a view
        target[(*plates, row[there])] = value.to(values.dtype)
        return values

    def _find_last_uses(self) -> dict[int, list[int]]:
        """After each family, those that no later one reads."""
        ground, out_of, leads = (
            self.examples.model.ground,
            self.examples.model.network.graph.out_edges,
            self.needed.ancestor_words,
        )
        outcomes = {ground.group_of(node).index for node in self.needed.outcome_nodes}
        last_read: dict[int, list[int]] = {}
        for index in leads.keys() - outcomes:
            last = max([index, *(bundle.child for bundle in out_of[index] if bundle.child in leads)])
            last_read.setdefault(last, []).append(index)
        return last_read

    def _compute_outcome(self, update: SparseUpdate, node: int, num_cells: int) -> Tensor:
        """What a node came to in each cell, `[cell, example, *shape]`."""
        world, axis, count = self.examples.model, self.base.layout.word_dim, len(self.examples)
        family = world.ground.group_of(node).index
        member = self.specs[family]
        offset = np.array([node - int(world.ground.offsets[family])])
        *plates, word = (int(each) for each in get_layout_index(self.base, member, offset))
        one = RowIndex(torch.zeros(1, dtype=torch.long), torch.tensor([word]), torch.full((1, word + 1), 0))
        nothing = SparseUpdate(self.base, {}, self.compact_index)
        known = family in self.base.values
        base = nothing.gather(family, one) if known else nothing.compute(member, one, as_distribution=True)
        own = base.shape[axis + 1 :]

        def of(value: Tensor) -> Tensor:
            """`[row, example, *shape]`."""
            full = value.expand(count, *get_layout_shape(self.base, member)[:-1], *value.shape[axis:])
            for plate in plates:
                full = full[:, plate]
            return full.transpose(0, 1)

        found = of(base).expand(num_cells, count, *own)
        changed = update.by_group.get(family)
        if changed is None:
            return found
        row = changed.rows.row_ids[:, word]
        there = row >= 0
        found = found.clone()
        found[there] = of(changed.values)[row[there]]
        return found


def gather_nodes(run: PatchedRun, group: int, value: Tensor, nodes: tuple[Tensor, ...]) -> Tensor:
    """Some nodes of a value `[1 or N, *plates, word, *shape]`: `[k, 1 or N, *shape]`."""
    rank = run.base.layout.rank
    full = value.expand(value.shape[0], *get_layout_shape(run.base, run.specs[group]), *value.shape[rank:])
    return full.movedim(0, rank - 1)[nodes]


def select_cells(
    patches: Mapping[int, Sequence[GroupPatch]], cells: IntArray, new_ids: IntArray
) -> dict[int, list[GroupPatch]]:
    """What some cells set in each family, with other numbers for the cells; families in which they set nothing go."""
    most = max((int(each.cells.max()) for several in patches.values() for each in several), default=-1)
    place = np.full(max(most, int(cells.max(initial=-1))) + 1, -1)
    place[cells] = new_ids
    parts = {family: [each.renumber_cells(place) for each in several] for family, several in patches.items()}
    kept = {family: [part for part in several if len(part.cells)] for family, several in parts.items()}
    return {family: several for family, several in kept.items() if several}


def build_patch(run: PatchedRun, source: ExecutionState, sites: PatchSites) -> GroupPatch:
    """What cells set in a family, from another run."""
    member = run.specs[sites.group]
    node = get_layout_index(run.base, member, sites.nodes)
    cell = torch.from_numpy(sites.cells)
    read = None if sites.read_words is None else torch.from_numpy(np.asarray(sites.read_words))
    if sites.is_attention:
        table = source.attention_weights[sites.group]
        assert table is not None  # words that read one after another are an obstacle, so their cells run alone
        return GroupPatch(cell, node, table.expand(-1, *get_layout_shape(run.base, member), -1), True, read)
    return GroupPatch(cell, node, source.values[sites.group])
