"""Runs of many circuits of the same examples at once, from the family where they differ down to the outcomes.

Along a kept arrow a node sees what its parent came to in this run, along any other what its parent is in the corrupt
one. Values lie as `[circuit, example, *plates, word, *shape]`. A table `[circuit, arrow]` says which arrows into a
family are kept; where a collection is read, each node may then see another one, `[..., i, j, *shape]`. That is made
only where it must be: not where all words see alike, nor by an attention, which mixes scores and weights instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.course import ExecutionState, TensorLayout, gather_parents
from bnet_transformer.compiler.values import evaluate_tpm
from bnet_transformer.declare import NodeSpec
from bnet_transformer.errors import UnsupportedError
from bnet_transformer.graph import ancestors
from bnet_transformer.interventions.circuits.arrows import Arrows, Into, Marks, needed_above, span
from bnet_transformer.interventions.sweeps.examples import Examples, Metric
from bnet_transformer.interventions.sweeps.sparse_update import CELLS, full_shape, parents_of, summary
from bnet_transformer.tpm import Attention, Bilinear, Dot, EvalContext

Values = dict[int, Tensor]


@dataclass(frozen=True)
class Masked:
    """A family some of whose arrows are not kept, or the one word of it that is needed.

    `slots` has for each entry of each slot, `[1 or N, *plates, word, *over]`, the number of the arrow along which it is
    seen; -1 where nothing that differs is.
    """

    member: NodeSpec
    word: int | None
    slots: tuple[Tensor, ...]

    @classmethod
    def of(cls, course: ExecutionState, arrows: Arrows, index: int, word: int | None) -> Masked:
        """Find the arrow of each entry of each slot, by letting nodes see numbers in place of values."""
        member, offsets = course.network.specs[index], arrows.ground.offsets
        into = arrows.into.get(index, Into(*[np.zeros(0, dtype=np.int64)] * 3))
        scale = len(arrows.ground)
        number_of = pd.Index(into.targets * scale + into.sources).get_indexer  # -1 where there is no arrow
        own, slots = _numbers(course, member, int(offsets[index]), word)[0], []
        for given in member.parents:
            parent = course.network.specs[given.index]
            picks = {selector: course.values[selector] for _, selector in given.pick}
            numbers = _numbers(course, parent, int(offsets[given.index]), None) + 1  # 0 is nobody
            told = replace(course, values={**picks, given.index: numbers})
            _, (source,) = gather_parents(told, replace(member, inputs=(given,)), word)
            target = own.reshape(*own.shape, *[1] * (source.dim() - 1 - own.dim()))
            ends = torch.where(source[0] > 0, target * scale + source[0] - 1, -1)
            slots.append(torch.from_numpy(number_of(ends.reshape(-1).numpy())).reshape(ends.shape))
        return cls(member, word, tuple(slots))

    @staticmethod
    def mixes(member: NodeSpec) -> bool:
        """True for an attention over words, whose scores and weights can be mixed of two runs."""
        plain = isinstance(member.tpm, Attention) and isinstance(member.tpm.score, Dot | Bilinear)
        return plain and all(given.over in ((), (WORD,)) for given in member.parents)

    def value(self, course: ExecutionState, corrupt: ExecutionState, kept: Tensor) -> Tensor:
        """The value (of a random node log P, or its mean) in each circuit of a table `[circuit, arrow]`."""
        at, here = gather_parents(course, self.member, self.word)
        _, there = gather_parents(corrupt, self.member, self.word)
        random = self.member.tpm.is_random
        if self.mixes(self.member) and not bool(kept.all()):
            found = self._attended(at, here, there, kept)
        else:
            parents = [_seen(*each, kept) for each in zip(here, there, self.slots, strict=True)]
            found = summary(self.member, at, parents) if random else evaluate_tpm(course, self.member, at, parents)
        own = found.shape[-1:] if self.member.tpm.kind == "discrete" else self.member.shape
        found = course.layout.pad_dims(found, len(own))
        if self.member.group.index not in course.attention_rows:
            return found
        rows, which = course.attention_rows[self.member.group.index]  # the nodes whose row of attention is set
        if self.word is not None:
            rows, which = (each.narrow(course.layout.word_dim, self.word, 1) for each in (rows, which))
        parents = [_seen(*each, kept) for each in zip(here, there, self.slots, strict=True)]
        assert isinstance(self.member.tpm, Attention)
        return torch.where(which[..., None], self.member.tpm.mix(rows, *parents), found)

    def _attended(self, at: EvalContext, here: list[Tensor], there: list[Tensor], kept: Tensor) -> Tensor:
        """An attention whose scores, and then values, are mixed of both runs: no word needs keys of its own."""
        tpm = self.member.tpm
        assert isinstance(tpm, Attention)
        names = [given.slot for given in self.member.parents]
        read = next(k for k, name in enumerate(names[:2]) if name.endswith("."))
        parents = [
            ours if k in (read, 2) else _seen(ours, theirs, slot, kept)
            for k, (ours, theirs, slot) in enumerate(zip(here, there, self.slots, strict=True))
        ]
        scores, mask = tpm.scores(at, *parents)
        which = _mask(self.slots[read], kept)
        if which is not None:
            other = [*parents]
            other[read] = there[read]
            scores = torch.where(which, scores, tpm.scores(at, *other)[0])
        weights = tpm.normaliser.normalise(scores, mask)
        which = _mask(self.slots[2], kept)
        if which is None:
            return tpm.mix(weights, *parents)
        other = [*parents]
        other[2] = there[2]
        if tpm.residual:
            other[-1] = torch.zeros_like(other[-1])
        return tpm.mix(weights * which, *parents) + tpm.mix(weights * ~which, *other)


def _numbers(course: ExecutionState, member: NodeSpec, offset: int, word: int | None) -> Tensor:
    """The ids of a family's nodes in the layout, `[1, 1, *plates, word]`."""
    shape = (1, 1, *full_shape(course, member))
    found = (torch.arange(int(np.prod(shape))) + offset).reshape(shape)
    return found if word is None else found.narrow(course.layout.word_dim, word, 1)


def _seen(here: Tensor, there: Tensor, slot: Tensor, kept: Tensor) -> Tensor:
    """What is seen in a slot: of this run where the arrow is kept, of the corrupt one where it is not."""
    which = _mask(slot, kept)
    if which is None:
        return here
    for d in range(1, which.dim()):  # not one collection for each word (or head) where they all see alike
        if which.shape[d] > 1 and here.shape[d] == there.shape[d] == 1:
            which = _alike(which, slot >= 0, d)
    own = here.dim() - which.dim()
    return torch.where(which.reshape(*which.shape, *[1] * own), here, there)


def _mask(slot: Tensor, kept: Tensor) -> Tensor | None:
    """Which entries of a slot are seen in this run, `[circuit, *entries]`; None where all that differ are."""
    if bool(kept.all()):
        return None
    which = kept[:, slot.clamp(min=0)] & (slot >= 0)
    return None if bool((which | ~(slot >= 0)).all()) else which


def _alike(which: Tensor, there: Tensor, d: int) -> Tensor:
    """The same with one entry along a dim, where all entries along it that are there agree."""
    some, none = (each.any(d, keepdim=True) for each in (which, ~which & there))
    return which if bool((some & none).any()) else some


@dataclass
class Runs:
    """The clean examples run by a circuit: at first by all arrows; `settle` says which of a family's arrows stay.

    Families are settled from the outcomes upwards, so whatever stands above the one that is tried has all its arrows,
    and its clean value. `now` has what the settled ones come to in the run of the present circuit, `below` marks the
    nodes from which kept arrows lead to an outcome. A family of which one word alone is needed has that word alone.
    """

    clean: ExecutionState
    corrupt: ExecutionState
    arrows: Arrows
    metric: Metric
    count: int
    memory: int
    kept: dict[int, Marks] = field(init=False)
    below: Marks = field(init=False)
    now: Values = field(init=False)
    words: dict[int, int] = field(default_factory=dict)
    _masked: dict[tuple[int, int | None], Masked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kept = {family: np.ones(len(into), dtype=bool) for family, into in self.arrows.into.items()}
        self.below = np.zeros(len(self.arrows.ground), dtype=bool)
        self.below[list(self.arrows.outcomes)] = True
        self.now = self._told(self.clean)

    def settle(self, family: int, kept: Marks) -> None:
        """Keep these arrows into a family and no others."""
        self.kept[family] = kept
        way = self._way(family)
        if way:
            self.now |= self._values(way, kept[None], drop=False)
        needed_above(self.arrows, self.kept, self.below, family)

    def tried(self, family: int, tables: Marks) -> Tensor:
        """The metric with other arrows kept into a family, `[circuit, arrow]`: `[circuit, example]`."""
        way = self._way(family)
        size, found = max(1, self.memory // max(1, sum(map(self._bytes, way)))), []
        for start in range(0, len(tables), size):
            part = tables[start : start + size]
            found.append(self._measured({**self.now, **self._values(way, part)}, len(part)))
        return torch.cat(found)

    def metric_of(self, side: ExecutionState) -> Tensor:
        """The metric of the clean or of the corrupt run: `[example]`."""
        return self._measured(self._told(side), 1, side)[0]

    def outcome(self) -> Tensor:
        """The metric of the circuit of the arrows that stay: `[example]`."""
        return self._measured(self.now, 1)[0]

    def _way(self, family: int) -> list[int]:
        """The families that change with the arrows into one, and lead to an outcome; that one is the first."""
        graph, found = self.clean.network.graph, {family}
        for index in self.arrows.into:
            if index > family and any(bundle.parent in found for bundle in graph.in_edges[index]):
                found.add(index)
        way = [index for index in sorted(found) if self.below[span(self.arrows.ground, index)].any()]
        for index in way:
            self._narrow(index)
        return way if family in way else []

    def _narrow(self, index: int) -> None:
        """Note the word of a family, if only one is needed. It is asked when all that reads the family is settled."""
        member, ground = self.clean.network.specs[index], self.arrows.ground
        if (
            member.group.word_stack is not None
            and self.clean.word_counts[member.group.word_stack] > 1
            and index not in self.words
        ):
            marks = self.below[span(ground, index)].reshape(ground.shapes[index])
            words = np.flatnonzero(marks.reshape(-1, marks.shape[-1]).any(0))
            self.words[index] = int(words[0]) if len(words) == 1 else -1

    @torch.no_grad()
    def _values(self, way: Sequence[int], table: Marks, *, drop: bool = True) -> Values:
        """What the families on a way come to, the first by a table `[circuit, arrow]` of kept arrows."""
        parents = {index: {given.index for given in self.clean.network.specs[index].parents} for index in way}
        last = {parent: k for k, index in enumerate(way) for parent in parents[index]}
        told = {self.arrows.ground.group_of(node).index for node in self.arrows.outcomes}
        words = {index: word for index, word in self.words.items() if word >= 0}
        found: Values = {}
        for k, index in enumerate(way):
            kept = torch.from_numpy(table if k == 0 else self.kept[index][None])
            found[index] = self._value(index, words.get(index), {**self.now, **found}, kept, words)
            for done in [i for i in found if drop and last.get(i, -1) <= k and i != index and i not in told]:
                del found[done]
        return found

    def _value(
        self, index: int, word: int | None, values: Mapping[int, Tensor], kept: Tensor, words: Mapping[int, int]
    ) -> Tensor:
        """What one family comes to in each circuit; what `do` set of it stays."""
        key = index, word
        if key not in self._masked:
            self._masked[key] = Masked.of(self.clean, self.arrows, index, word)
        masked = self._masked[key]
        found = masked.value(self._course(masked.member, word, values, words), self.corrupt, kept)
        value, which = self.clean.patched.get(index, (None, None))
        if value is not None and which is not None and found.dim() == value.dim():  # not log P of a choice
            if word is not None:
                value, which = (each.narrow(self.clean.layout.word_dim, word, 1) for each in (value, which))
            found = torch.where(which.reshape(*which.shape, *[1] * (value.dim() - which.dim())), value, found)
        return found

    def _course(
        self, member: NodeSpec, word: int | None, values: Mapping[int, Tensor], words: Mapping[int, int]
    ) -> ExecutionState:
        """What a family reads: of this run where it has changed, else clean; all words of it, unless it reads one."""
        there = self.clean.values | {g.index: values[g.index] for g in member.parents if g.index in values}
        axis = self.clean.layout.word_dim
        for given in member.parents:
            index, own = given.index, words.get(given.index)
            alone = given.reach.kind == "same" and own == word
            if own is not None and not alone and index in values and there[index].shape[axis] == 1:
                # One word among the others of its family; nothing needed is read from those.
                value, others = there[index], self.corrupt.values[index]
                count = self.clean.word_counts[self.clean.network.specs[index].group.word_stack or ""]
                lead = torch.broadcast_shapes(value.shape[:axis], others.shape[:axis])
                wide = others.expand(*lead, count, *others.shape[axis + 1 :]).clone()
                wide.narrow(axis, own, 1).copy_(value.expand(*lead, 1, *value.shape[axis + 1 :]))
                there[index] = wide
        return replace(self.clean, values=there)

    @torch.no_grad()
    def _told(self, course: ExecutionState) -> Values:
        """What the random nodes of which something is told come to in a run: log P, or the mean."""
        found: Values = {}
        for node in self.arrows.outcomes:
            index = self.arrows.ground.group_of(node).index
            if index not in course.values and index not in found:
                member = course.network.specs[index]
                value = summary(member, *gather_parents(course, member))
                own = 1 if member.tpm.kind == "discrete" else len(member.shape)
                found[index] = course.layout.pad_dims(value, own)
        return found

    def _measured(self, values: Mapping[int, Tensor], circuits: int, side: ExecutionState | None = None) -> Tensor:
        """The metric of what the outcomes came to: `[circuit, example]`."""
        base, found = side or self.clean, {}
        for node in self.arrows.outcomes:
            family, index = self.arrows.ground.unravel_index(node)
            value = values[family.index] if family.index in values else base.values[family.index]
            place = dict(zip(self.arrows.ground.axes(family), index, strict=True))
            for plate in reversed((*base.layout.plates, WORD)):
                axis = base.layout.axis(plate)
                value = value.select(axis, place.get(plate, 0) if value.shape[axis] > 1 else 0)
            found[node] = value.expand(circuits, self.count, *value.shape[2:])
        return self.metric(found)

    def _bytes(self, index: int) -> int:
        """The memory that the nodes of a family, and what they see, take in one circuit, at most."""
        member, sizes = self.clean.network.specs[index], self.clean.network.graph.plate_sizes
        *plates, words = full_shape(self.clean, member)
        count = self.count * math.prod(plates) * (1 if self.words.get(index, -1) >= 0 else words)
        own = self.clean.count_states(index) if member.tpm.kind == "discrete" else math.prod(member.shape)
        sources = self.arrows.into[index].sources
        for given, parent in zip(member.parents, member.tpm_parents, strict=True):
            there = span(self.arrows.ground, given.index)
            if not ((sources >= there.start) & (sources < there.stop)).any():
                continue  # it is the same in all circuits
            read = self.clean.network.specs[given.index].group.word_stack or ""
            over = math.prod(self.clean.word_counts[read] if axis == WORD else sizes[axis] for axis in given.over)
            own += over * (1 if Masked.mixes(member) else math.prod(parent.shape))
        return 3 * count * own * self.clean.dtype.itemsize


def runs_of(clean: Examples, corrupt: Examples, arrows: Arrows, metric: Metric, memory: int) -> Runs:
    """The runs of two sides of the same examples."""
    ours, theirs = (_course_of(examples, arrows.outcomes) for examples in (clean, corrupt))
    return Runs(ours, theirs, arrows, metric, len(clean), memory)


def check_settled(examples: Examples, outcomes: Sequence[int]) -> None:
    """Refuse a sentence in which something random is open above an outcome."""
    world = examples.world
    for node in ancestors(world.ground, outcomes):
        member = world.network.specs[world.ground.group_of(node).index]
        if member.tpm.is_random and node not in world.do:
            name = world.ground.name(node)
            raise UnsupportedError(
                f"circuit below {name}",
                expected="random nodes above the metric that are set",
                actual=f"{name} open",
                allowed=f"do({name}=...) first, in clean and corrupt",
            )


def _course_of(examples: Examples, outcomes: Sequence[int]) -> ExecutionState:
    """A run of all that leads to the outcomes, `[1, example, *plates, word, *shape]`: circuits lead."""
    world = examples.world
    above = {world.ground.group_of(node).index for node in (*outcomes, *ancestors(world.ground, outcomes))}
    set_ = {world.ground.group_of(node).index for node in world.do}
    members = world.network.specs
    course = examples.course({index for index in above if not members[index].tpm.is_random or index in set_})

    return replace(
        course,
        layout=TensorLayout((CELLS,), course.layout.plates),
        values=_not_read(course, above) | {index: value[None] for index, value in course.values.items()},
        patched={index: (value[None], which[None]) for index, (value, which) in course.patched.items()},
        rows={index: (value[None], which[None]) for index, (value, which) in course.attention_rows.items()},
        known={},
        readings={},
    )


def _not_read(course: ExecutionState, above: set[int]) -> Values:
    """Zeros for the families of which surgery has left nothing that leads to an outcome: their readers see these."""
    members, found = course.network.specs, {}
    for index in above:
        for parent in parents_of(course.network, members[index]):
            if parent not in above:
                dtype = torch.long if members[parent].tpm.is_index_valued else course.dtype
                shape = 1, 1, *full_shape(course, members[parent]), *members[parent].shape
                found[parent] = torch.zeros(shape, dtype=dtype)
    return found
