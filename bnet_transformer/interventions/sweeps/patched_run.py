"""One batch of a sweep: for some cells, what the outcomes come to, family by family down from what is set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.compiler.course import ExecutionState
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import BNetError
from bnet_transformer.interventions.sweeps.cell_spec import Entries, Ids, NodePath
from bnet_transformer.interventions.sweeps.examples import Examples
from bnet_transformer.interventions.sweeps.sparse_update import (
    Changed,
    Changes,
    NeededPositions,
    Rows,
    Setting,
    Table,
    count_words,
    find_changed_positions,
    full_shape,
    index_of,
    is_wordwise,
    parents_of,
)
from bnet_transformer.tpm.base import broadcast_shapes


@dataclass
class PatchedRun:
    """The corrupt run, and the outcomes of every run that starts from it with some nodes set.

    Args:
        examples: The sentences, of which the choices are set.
        needed: The words that lead to an outcome; nothing else is computed again.
        sources: Further families whose values are kept, since cells take values from them.
        readings: Families whose attention `P(j | i)` is kept.
        slopes: Families at every node of which the outcomes have a gradient, by a nudge of zero.

    `base` has the values of the run before anything is set. Of the families in `positions` it has only the words that
    lead to an outcome: `positions[family][word]` is the place of a word there.
    """

    examples: Examples
    needed: NeededPositions
    sources: frozenset[int] = frozenset()
    readings: frozenset[int] = frozenset()
    slopes: frozenset[int] = frozenset()
    nudges: dict[int, Tensor] = field(init=False)
    members: tuple[NodeSpec, ...] = field(init=False)
    base: ExecutionState = field(init=False)
    positions: dict[int, Tensor] = field(init=False, default_factory=dict)
    last_read: dict[int, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        world = self.examples.world
        self.members = world.network.specs
        self.last_read = self._find_last_reads()
        fixed = {world.ground.group_of(node).index for node in world.do}
        families = {*self.needed.leads, *self.sources}
        computed = {index for index in families if not self.members[index].tpm.is_random or index in fixed}
        narrowed = self._find_narrowed(self.sources | self.readings | fixed)
        self.nudges = {index: self._nudge(index) for index in sorted(self.slopes & self.needed.leads.keys())}
        self.base = self.examples.course(computed - narrowed, self.readings, self.nudges)
        for index in sorted(narrowed):
            rows = Rows.of(self.needed.leads[index][None])
            with torch.set_grad_enabled(bool(self.nudges)):
                self.base.values[index] = Changes(self.base, {}, self.positions).value(self.members[index], rows)
            self.positions[index] = rows.place[0]

    def _find_narrowed(self, complete: Set[int]) -> set[int]:
        """The families of which the base run computes only the words that lead to an outcome.

        They are the last ones before the outcomes: logits of 50,257 states, say, of which the metric reads one word.
        The other words can be left out since nothing reads them: neither a cell nor `do` (`complete` has the families
        that these need), nor a family that is computed for all words at once. A word can be computed without the
        others where it reads its own word alone, of parents that have values, without a pick.
        """
        narrowed = set[int]()
        for index in sorted(self.needed.leads, reverse=True):  # readers before what they read
            member = self.members[index]
            if self.needed.leads[index].all() or index in complete or member.tpm.is_random:
                continue
            children = {bundle.child for bundle in self.examples.world.network.graph.out_edges[index]}
            readers = children & self.needed.leads.keys()
            if any(child not in narrowed and not self.members[child].tpm.is_random for child in readers):
                continue  # random readers are computed at the words of the outcomes alone
            parents = [self.members[given.index] for given in member.parents]
            if any(parent.tpm.is_random and parent.group.index not in complete for parent in parents):
                continue
            if any(given.pick for given in member.parents) or all(
                parent.group.word_stack is None for parent in parents
            ):
                continue
            if is_wordwise(self.examples.world.network, member):
                narrowed.add(index)
        return narrowed

    def _nudge(self, index: int) -> Tensor:
        """Zeros for every node of a family in every example: the outcomes have a gradient at them."""
        network, member = self.examples.world.network, self.members[index]
        if member.tpm.kind == "discrete" or member.tpm.is_index_valued:
            wanted, allowed = "nodes with a slope, for first_order=True: real numbers", "first_order=False"
            raise BNetError(f"at {member.group.name}", expected=wanted, actual="states", allowed=allowed)
        plates = [
            network.graph.plate_sizes[plate] if plate in member.group.plates else 1
            for plate in network.graph.plate_sizes
        ]
        words = (
            1 if member.group.word_stack is None else self.examples.world.ground.word_counts[member.group.word_stack]
        )
        shape = (len(self.examples), *plates, words, *member.shape)
        return torch.zeros(shape, dtype=network.dtype, requires_grad=True)

    def at(self, family: int, setting: Setting) -> Tensor:
        """The base values of the nodes of a setting, `[k, example, *shape]`."""
        return picked(self, family, self.base.values[family], setting.node)

    def value_of(self, family: int, setting: Setting) -> Tensor:
        """The values that they are set to, `[k, example, *shape]`."""
        return setting.source.transpose(0, 1) if setting.own else picked(self, family, setting.source, setting.node)

    def base_outcomes(self) -> dict[int, Tensor]:
        """The outcomes of the base run: `[1, example, *shape]` of each node."""
        with torch.set_grad_enabled(bool(self.nudges)):
            changes = Changes(self.base, {}, self.positions)
            return {node: self._outcome(changes, node, 1) for node in self.needed.outcomes}

    def outcomes(self, cells: int, settings: Mapping[int, Sequence[Setting]]) -> dict[int, Tensor]:
        """The outcomes with these cells set, each in a run of its own: `[cell, example, *shape]` of each node."""
        world, leads = self.examples.world, self.needed.leads
        set_words = {
            index: self._words_of(index, several, cells) for index, several in settings.items() if index in leads
        }
        changes = Changes(self.base, {}, self.positions)
        same: dict[bytes, Rows] = {}
        with torch.set_grad_enabled(bool(self.nudges)):
            for index, (descends, both) in find_changed_positions(world, self.needed, set_words, cells).items():
                key = both.tobytes()
                rows = same[key] if key in same else same.setdefault(key, Rows.of(both))
                value = self._value(changes, self.members[index], rows, descends, settings.get(index, ()))
                changes.by_family[index] = Changed(rows, value)
                for done in self.last_read.get(index, ()):
                    changes.by_family.pop(done, None)
            return {node: self._outcome(changes, node, cells) for node in self.needed.outcomes}

    def along_paths(self, clean: ExecutionState, paths: Sequence[NodePath], memory: int) -> dict[int, list[Setting]]:
        """What paths come to at their last nodes, which cells then set: their first nodes are as in the clean run.

        A step of a path is a cell of its own: the parent is set to what is sent, and the next node alone is computed.
        """
        ends: dict[tuple[int, int], list[tuple[int, ...]]] = {}  # by the cell and the last node
        for path in paths:
            ends.setdefault((path.cell, path.nodes[-1]), []).append(path.nodes)
        ways, cells = list(ends.values()), np.array([cell for cell, _ in ends])
        sent: dict[int, list[Setting]] = {}
        first = [(k, path[0]) for k, several in enumerate(ways) for path in several]
        for family, number, node in self._by_family(first):
            entries = Entries(family, number, node)
            sent.setdefault(family, []).append(setting_of(self, clean, entries))
        found: dict[int, list[Setting]] = {}
        for step in range(1, max(len(several[0]) for several in ways)):
            made: dict[int, list[Setting]] = {}
            due = [(k, several[0][step]) for k, several in enumerate(ways) if len(several[0]) > step]
            for family, number, node in self._by_family(due):
                parents = parents_of(self.base.network, self.members[family])
                read = sum(self.base.values[index].numel() for index in parents if index in sent)
                size = max(1, memory // (16 * len(self.examples) * max(1, read)))
                for start in range(0, len(number), size):
                    some = slice(start, start + size)
                    setting = self._sent(sent, family, number[some], node[some])
                    made.setdefault(family, []).append(setting)
            last = np.array([len(several[0]) == step + 1 for several in ways])
            done = np.flatnonzero(last)
            for family, settings in some_of(made, done, cells[done]).items():
                found.setdefault(family, []).extend(settings)
            sent = some_of(made, np.flatnonzero(~last), np.flatnonzero(~last))
        return found

    def _by_family(self, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Ids, Ids]]:
        """Numbers with a ground node each, family by family: the numbers, and those of the nodes in the family."""
        number, node = np.array(pairs, dtype=np.int64).T
        offsets = self.examples.world.ground.offsets
        families = np.searchsorted(offsets, node, side="right") - 1
        for family in np.unique(families).tolist():
            own = families == family
            yield family, number[own], node[own] - int(offsets[family])

    def _sent(self, sent: Mapping[int, Sequence[Setting]], family: int, cells: Ids, nodes: Ids) -> Setting:
        """What a node of a family comes to in each of some cells, where its parents alone are as they are sent."""
        member, count = self.members[family], len(cells)
        changes = Changes(self.base, {}, self.positions)
        parents = {index: sent[index] for index in parents_of(self.base.network, member) if index in sent}
        for index, several in some_of(parents, cells, np.arange(count)).items():
            words = self._words_of(index, several, count)
            rows = Rows.of(words)
            value = self._value(changes, self.members[index], rows, np.zeros_like(words), several)
            changes.by_family[index] = Changed(rows, value)
        node = index_of(self.base, member, nodes)
        table = np.zeros((count, full_shape(self.base, member)[-1]), dtype=np.bool_)
        table[np.arange(count), node[-1].numpy()] = True
        value = changes.value(member, Rows.of(table))  # a row for each cell
        full = value.expand(len(self.examples), *full_shape(self.base, member)[:-1], count, *member.shape)
        source = full.movedim(0, self.base.layout.word_dim)[(*node[:-1], torch.arange(count))].transpose(0, 1)
        return Setting(torch.from_numpy(cells), node, source, own=True)

    def _words_of(self, index: int, settings: Sequence[Setting], cells: int) -> Table:
        """The words of a family that cells set, `[cell, word]`."""
        table = np.zeros((cells, count_words(self.examples.world, index)), dtype=np.bool_)
        for setting in settings:
            table[setting.cell.numpy(), setting.node[-1].numpy()] = True
        return table

    def _value(
        self, changes: Changes, member: NodeSpec, rows: Rows, descends: Table, settings: Sequence[Setting]
    ) -> Tensor:
        """The rows of a family: those that read something changed are computed, then what cells set is put in."""
        index = member.group.index
        values = [setting for setting in settings if not setting.rows]
        weights = next((setting for setting in settings if setting.rows), None)  # a role has one for each family
        if weights is not None:
            found = changes.mixed(member, rows, weights)
        elif descends.any():
            mine = rows if len(rows) == int(descends.sum()) else Rows.of(descends)
            is_open = member.tpm.is_random and index not in self.base.known
            made = changes.value(member, mine, distribution=is_open)
            found = made if mine is rows else self._among(changes.at(index, rows), made, rows, mine)
        else:
            found = changes.at(index, rows)
        if index in self.base.patched and descends.any():
            found = self._with_patch(found, index, rows)
        for setting in values:
            found = self._put(found, member, rows, setting)
        return found

    def _among(self, base: Tensor, made: Tensor, rows: Rows, mine: Rows) -> Tensor:
        """Rows as they were, but for those that were made."""
        axis = self.base.layout.word_dim
        lead = broadcast_shapes(base.shape[:axis], made.shape[:axis])
        found = base.expand(*lead, len(rows), *base.shape[axis + 1 :]).clone()
        at = rows.place[mine.cell, mine.word]
        return found.index_copy_(axis, at, made.expand(*lead, *made.shape[axis:]))

    def _with_patch(self, found: Tensor, index: int, rows: Rows) -> Tensor:
        """The rows of a family, with the nodes of a word that `do` set as they are set."""
        value, which = self.base.patched[index]
        if found.dim() > value.dim():  # log P of a choice: no metric asks about the nodes that are set
            return found
        axis = self.base.layout.word_dim
        word = rows.word if which.shape[axis] > 1 else torch.zeros_like(rows.word)
        which = which.index_select(axis, word)
        which = which.reshape(*which.shape, *[1] * (value.dim() - self.base.layout.rank))
        return torch.where(which, value.index_select(axis, word), found)

    def _put(self, found: Tensor, member: NodeSpec, rows: Rows, setting: Setting) -> Tensor:
        """The rows of a family, with what a cell sets in its place."""
        axis = self.base.layout.word_dim
        row = rows.place[setting.cell, setting.node[-1]]
        there = row >= 0  # what leads to no outcome has no row
        examples = max(found.shape[0], setting.source.shape[0])
        shape = (examples, *full_shape(self.base, member)[:-1], len(rows), *found.shape[axis + 1 :])
        found = found.expand(shape).clone()
        plates = tuple(each[there] for each in setting.node[:-1])
        value = self.value_of(member.group.index, setting)[there]
        target = found.movedim(0, axis)  # [*plates, row, example, *shape]: a view
        target[(*plates, row[there])] = value.to(found.dtype)
        return found

    def _find_last_reads(self) -> dict[int, list[int]]:
        """After each family, those that no later one reads."""
        ground, out_of, leads = (
            self.examples.world.ground,
            self.examples.world.network.graph.out_edges,
            self.needed.leads,
        )
        outcomes = {ground.group_of(node).index for node in self.needed.outcomes}
        last_read: dict[int, list[int]] = {}
        for index in leads.keys() - outcomes:
            last = max([index, *(bundle.child for bundle in out_of[index] if bundle.child in leads)])
            last_read.setdefault(last, []).append(index)
        return last_read

    def _outcome(self, changes: Changes, node: int, cells: int) -> Tensor:
        """What a node came to in each cell, `[cell, example, *shape]`."""
        world, axis, count = self.examples.world, self.base.layout.word_dim, len(self.examples)
        family = world.ground.group_of(node).index
        member = self.members[family]
        offset = np.array([node - int(world.ground.offsets[family])])
        *plates, word = (int(each) for each in index_of(self.base, member, offset))
        one = Rows(torch.zeros(1, dtype=torch.long), torch.tensor([word]), torch.full((1, word + 1), 0))
        nothing = Changes(self.base, {}, self.positions)
        known = family in self.base.values
        base = nothing.at(family, one) if known else nothing.value(member, one, distribution=True)
        own = base.shape[axis + 1 :]

        def of(value: Tensor) -> Tensor:
            """`[row, example, *shape]`."""
            full = value.expand(count, *full_shape(self.base, member)[:-1], *value.shape[axis:])
            for plate in plates:
                full = full[:, plate]
            return full.transpose(0, 1)

        found = of(base).expand(cells, count, *own)
        changed = changes.by_family.get(family)
        if changed is None:
            return found
        row = changed.rows.place[:, word]
        there = row >= 0
        found = found.clone()
        found[there] = of(changed.values)[row[there]]
        return found


def picked(run: PatchedRun, family: int, value: Tensor, node: tuple[Tensor, ...]) -> Tensor:
    """Some nodes of a value `[1 or N, *plates, word, *shape]`: `[k, 1 or N, *shape]`."""
    rank = run.base.layout.rank
    full = value.expand(value.shape[0], *full_shape(run.base, run.members[family]), *value.shape[rank:])
    return full.movedim(0, rank - 1)[node]


def some_of(settings: Mapping[int, Sequence[Setting]], cells: Ids, numbers: Ids) -> dict[int, list[Setting]]:
    """What some cells set in each family, with other numbers for the cells; families in which they set nothing go."""
    most = max((int(each.cell.max()) for several in settings.values() for each in several), default=-1)
    place = np.full(max(most, int(cells.max(initial=-1))) + 1, -1)
    place[cells] = numbers
    parts = {family: [each.among(place) for each in several] for family, several in settings.items()}
    kept = {family: [part for part in several if len(part.cell)] for family, several in parts.items()}
    return {family: several for family, several in kept.items() if several}


def setting_of(run: PatchedRun, source: ExecutionState, entries: Entries) -> Setting:
    """What cells set in a family, from another run."""
    member = run.members[entries.family]
    node = index_of(run.base, member, entries.node)
    cell = torch.from_numpy(entries.cell)
    read = None if entries.read is None else torch.from_numpy(np.asarray(entries.read))
    if entries.rows:
        table = source.attention_weights[entries.family]
        assert table is not None  # words that read one after another are an obstacle, so their cells run alone
        return Setting(cell, node, table.expand(-1, *full_shape(run.base, member), -1), True, read)
    return Setting(cell, node, source.values[entries.family])
