"""One batch of a sweep: for some cells, what the outcomes come to, family by family down from what is set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bnet_transformer.axes import WORD
from bnet_transformer.compiler.course import Course
from bnet_transformer.errors import BNetError, ReadingError
from bnet_transformer.inference.sweeps.cells import Entries
from bnet_transformer.inference.sweeps.pairs import Examples
from bnet_transformer.inference.sweeps.reach import Table, count_words, cut_words, leads, reached
from bnet_transformer.inference.sweeps.rows import Changed, Changes, Rows, Setting, full_shape, index_of
from bnet_transformer.network import Member
from bnet_transformer.tpm.base import broadcast


@dataclass
class Run:
    """The corrupt run, and the outcomes that are wanted of every run that starts from it.

    Of the families `few` it has only the words that lead to an outcome: `few[family][word]` is their place. The
    outcomes have a gradient at every node of the families `slopes`.
    """

    examples: Examples
    outcomes: tuple[int, ...]
    extra: frozenset[int] = frozenset()
    slopes: frozenset[int] = frozenset()
    nudges: dict[int, Tensor] = field(init=False, default_factory=dict)
    leads: dict[int, Table] = field(init=False)
    base: Course = field(init=False)
    cut: dict[int, Table] = field(init=False)
    few: dict[int, Tensor] = field(init=False, default_factory=dict)
    last: dict[int, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        world = self.examples.world
        self.leads = leads(world, self.outcomes)
        self.cut = cut_words(world)
        self.last = self._last_read()
        fixed = {world.ground.family_of(node).index for node in world.do}
        made = {i for i in {*self.leads, *self.extra} if not self.members[i].tpm.is_random or i in fixed}
        few = self._at_few_words({*self.extra, *fixed})
        self.nudges = {index: self._nudge(index) for index in sorted(self.slopes & self.leads.keys())}
        self.base = self.examples.course(made - few, nudges=self.nudges)
        for index in sorted(few):
            rows = Rows.of(self.leads[index][None])
            with torch.set_grad_enabled(bool(self.nudges)):
                self.base.values[index] = Changes(self.base, {}, self.few).value(self.members[index], rows)
            self.few[index] = rows.place[0]

    def _at_few_words(self, others: set[int]) -> set[int]:
        """The last families, each word's own alone, of which few words lead to an outcome: no others are computed."""
        members, found = self.members, set[int]()
        for index in sorted(self.leads, reverse=True):
            member, table = members[index], self.leads[index]
            below = {bundle.child for bundle in self.examples.world.network.graph.out_of[index]} & self.leads.keys()
            alone = all(i in found or members[i].tpm.is_random for i in below)
            read = [given for given in member.inputs if members[given.parent].family.words is not None]
            own = all(given.reach.kind == "same" and WORD not in given.over for given in read)
            settled = all(not members[g.parent].tpm.is_random or g.parent in others for g in member.inputs)
            plain = settled and not member.tpm.is_random and not any(g.pick for g in member.inputs)
            if read and own and plain and alone and not table.all() and index not in others:
                found.add(index)
        return found

    def _nudge(self, index: int) -> Tensor:
        """Nothing, for every node of a family in every example: what the outcomes have a gradient at."""
        network, member = self.examples.world.network, self.members[index]
        if member.tpm.kind == "discrete" or member.tpm.reads_by_index:
            wanted, allowed = "nodes with a slope, for first_order=True: real numbers", "first_order=False"
            raise BNetError(f"at {member.family.name}", expected=wanted, got="states", allowed=allowed)
        if index in network.graph.recurrent:
            raise ReadingError(member.family.name, expected="words computed at once", got="one after another")
        plates = [network.graph.sizes[plate] if plate in member.family.plates else 1 for plate in network.graph.sizes]
        words = 1 if member.family.words is None else self.examples.world.ground.words[member.family.words]
        shape = (len(self.examples), *plates, words, *member.shape)
        return torch.zeros(shape, dtype=network.dtype, requires_grad=True)

    @property
    def members(self) -> tuple[Member, ...]:
        return self.examples.world.network.members

    def at(self, family: int, setting: Setting) -> Tensor:
        """What the nodes of a setting are in the corrupt run, `[k, example, *shape]`."""
        return picked(self, family, self.base.values[family], setting.node)

    def told(self, family: int, setting: Setting) -> Tensor:
        """What they are set to."""
        return setting.source.transpose(0, 1) if setting.own else picked(self, family, setting.source, setting.node)

    def corrupt(self) -> dict[int, Tensor]:
        """The outcomes of the corrupt run: `[1, example, *shape]` of each node."""
        return self.outcomes_of(1, {})

    def outcomes_of(self, cells: int, settings: Mapping[int, Sequence[Setting]]) -> dict[int, Tensor]:
        """The outcomes with these cells set, each in a run of its own: `[cell, example, *shape]` of each node."""
        with torch.set_grad_enabled(bool(self.nudges)):
            return self._outcomes(cells, settings)

    def _outcomes(self, cells: int, settings: Mapping[int, Sequence[Setting]]) -> dict[int, Tensor]:
        tables: dict[int, Table] = {}
        changes = Changes(self.base, {}, self.few)
        same: dict[bytes, Rows] = {}
        for index, member in enumerate(self.members):
            if index not in self.leads:
                continue
            told = settings.get(index, ())
            table = self._descends(member, tables, cells)
            rows_set = self._set(index, told, cells)
            both = table | rows_set
            if both.any():
                self.check(member, table, told)
                key = both.tobytes()
                rows = same[key] if key in same else same.setdefault(key, Rows.of(both))
                changes.by_family[index] = Changed(rows, self._value(changes, member, rows, table, told))
                tables[index] = both
            for done in self.last.get(index, ()):
                changes.by_family.pop(done, None)
        return {node: self._outcome(changes, node, cells) for node in self.outcomes}

    def _descends(self, member: Member, tables: Mapping[int, Table], cells: int) -> Table:
        """The rows of a family that a changed parent reaches, of those that lead to an outcome."""
        index = member.family.index
        found = np.zeros((cells, count_words(self.examples.world, index)), dtype=np.bool_)
        for given in member.inputs:
            if given.parent in tables:
                found |= reached(self.examples.world, member, given, tables[given.parent])
            if any(selector in tables for _, selector in given.pick):
                raise ReadingError(member.family.name, expected="a choice that no cell changes", got="one that does")
        found &= self.leads[index]
        if index in self.cut:
            found = found & ~self.cut[index]
        return found

    def _set(self, index: int, told: Sequence[Setting], cells: int) -> Table:
        found = np.zeros((cells, count_words(self.examples.world, index)), dtype=np.bool_)
        for setting in told:
            found[setting.cell.numpy(), setting.node[-1].numpy()] = True
        found &= self.leads[index]
        return found

    def check(self, member: Member, table: Table, told: Sequence[Setting]) -> None:
        """Refuse what is not computed all at once: families that read each other word after word, rows set by do."""
        world, index = self.examples.world, member.family.index
        weights = any(each.rows for each in told)
        if index in world.network.graph.recurrent:
            raise ReadingError(member.family.name, expected="words computed at once", got="one after another")
        if weights and world.ground.cut_in(index):
            raise ReadingError(member.family.name, expected="nodes that read", got="some that are set")
        if table.any() or weights:
            if any(axis == WORD for given in member.inputs for axis, _ in given.pick):
                raise ReadingError(member.family.name, expected="no choice of a word", got="one")
            if world.ground.rows_in(index):
                raise ReadingError(member.family.name, expected="nodes without rows of their own", got="some with")

    def _value(self, changes: Changes, member: Member, rows: Rows, table: Table, told: Sequence[Setting]) -> Tensor:
        """The rows of a family: those that descend are computed, then what is set is put in."""
        index = member.family.index
        values = [each for each in told if not each.rows]
        weights = next((each for each in told if each.rows), None)  # a role has one entry for each family
        whole = self._whole(member, values, table.shape)
        some = table & ~whole
        random = member.tpm.is_random and index not in self.base.known
        if weights is not None:
            found = changes.derive_seed(member, rows, weights)
        elif some.any():
            mine = rows if len(rows) == int(some.sum()) else Rows.of(some)
            made = changes.outcome(member, mine) if random else changes.value(member, mine)
            if mine is rows:
                found = made
            else:
                found = self._among(changes.at(index, rows), made, rows, mine)
        else:
            found = changes.at(index, rows)
        found = self._kept(found, member, rows, table)
        for setting in values:
            found = self._put(found, member, rows, setting)
        return found

    def _whole(self, member: Member, told: Sequence[Setting], shape: tuple[int, ...]) -> Table:
        """The rows of which every node is set: they need not be computed."""
        plates = full_shape(self.base, member)[:-1]
        count = int(np.prod(plates, dtype=np.int64))
        hits = np.zeros((*shape, count), dtype=np.bool_)
        for setting in told:
            plate = np.ravel_multi_index([p.numpy() for p in setting.node[:-1]], plates) if plates else 0
            hits[setting.cell.numpy(), setting.node[-1].numpy(), plate] = True
        found: Table = np.all(hits, axis=-1)
        return found

    def _among(self, base: Tensor, made: Tensor, rows: Rows, mine: Rows) -> Tensor:
        """Rows as they were, but for those that were made."""
        axis = self.base.layout.word
        lead = broadcast(base.shape[:axis], made.shape[:axis])
        found = base.expand(*lead, len(rows), *base.shape[axis + 1 :]).clone()
        at = rows.place[mine.cell, mine.word]
        return found.index_copy_(axis, at, made.expand(*lead, *made.shape[axis:]))

    def _kept(self, found: Tensor, member: Member, rows: Rows, table: Table) -> Tensor:
        """What `do` set of a part of a word's nodes stays as it is."""
        index = member.family.index
        if index not in self.base.patched or not table.any():
            return found
        value, which = self.base.patched[index]
        axis = self.base.layout.word
        word = rows.word if which.shape[axis] > 1 else torch.zeros_like(rows.word)
        own = value.dim() - self.base.layout.rank
        kept = which.index_select(axis, word)
        return torch.where(kept.reshape(*kept.shape, *[1] * own), value.index_select(axis, word), found)

    def _put(self, found: Tensor, member: Member, rows: Rows, setting: Setting) -> Tensor:
        """The rows of a family, with what a cell sets in its place."""
        axis = self.base.layout.word
        row = rows.place[setting.cell, setting.node[-1]]
        there = row >= 0  # what leads to no outcome has no row
        examples = max(found.shape[0], setting.source.shape[0])
        shape = (examples, *full_shape(self.base, member)[:-1], len(rows), *found.shape[axis + 1 :])
        found = found.expand(shape).clone()
        plates = tuple(each[there] for each in setting.node[:-1])
        value = self.told(member.family.index, setting)[there]
        target = found.movedim(0, axis)  # [*plates, row, example, *shape]: a view
        target[(*plates, row[there])] = value.to(found.dtype)
        return found

    def _last_read(self) -> dict[int, list[int]]:
        """After each family, those that are read no more."""
        kept = {self.examples.world.ground.family_of(node).index for node in self.outcomes}
        out_of = self.examples.world.network.graph.out_of
        last = {i: max([i, *(b.child for b in out_of[i] if b.child in self.leads)]) for i in self.leads}
        found: dict[int, list[int]] = {}
        for index, end in last.items():
            if index not in kept:
                found.setdefault(end, []).append(index)
        return found

    def _outcome(self, changes: Changes, node: int, cells: int) -> Tensor:
        """What a node came to in each cell, `[cell, example, *shape]`."""
        world, axis, count = self.examples.world, self.base.layout.word, len(self.examples)
        family = world.ground.family_of(node).index
        member = self.members[family]
        offset = np.array([node - int(world.ground.offsets[family])])
        *plates, word = (int(each) for each in index_of(self.base, member, offset))
        one = Rows(torch.zeros(1, dtype=torch.long), torch.tensor([word]), torch.full((1, word + 1), 0))
        base = self._as_it_was(member, one)
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

    def _as_it_was(self, member: Member, one: Rows) -> Tensor:
        """What a node came to in the corrupt run: `[1 or N, *plates, 1, *shape]`."""
        nothing = Changes(self.base, {}, self.few)
        known = member.family.index in self.base.values
        return nothing.at(member.family.index, one) if known else nothing.outcome(member, one)


def picked(run: Run, family: int, value: Tensor, node: tuple[Tensor, ...]) -> Tensor:
    """Some nodes of a value `[1 or N, *plates, word, *shape]`: `[k, 1 or N, *shape]`."""
    rank = run.base.layout.rank
    full = value.expand(value.shape[0], *full_shape(run.base, run.members[family]), *value.shape[rank:])
    return full.movedim(0, rank - 1)[node]


def setting_of(run: Run, source: Course, entries: Entries) -> Setting:
    """What cells set in a family, from another run."""
    member = run.members[entries.family]
    node = index_of(run.base, member, entries.node)
    cell = torch.from_numpy(entries.cell)
    read = None if entries.read is None else torch.from_numpy(np.asarray(entries.read))
    if entries.rows:
        table = source.readings[entries.family]
        if table is None:
            raise ReadingError(member.family.name, expected="words read all at once", got="one after another")
        return Setting(cell, node, table.expand(-1, *full_shape(run.base, member), -1), True, read)
    return Setting(cell, node, source.values[entries.family])
