"""Values of single nodes of a sentence: by the compiled reading, one family at a time and each once. Where choices of
words meet, all their joint states are one batch; what the compiled reading refuses is left to the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent
from torch.distributions import Normal as TorchNormal

from bnet_transformer import asking, reference
from bnet_transformer.axes import WORD
from bnet_transformer.compiler.course import Course, Layout
from bnet_transformer.compiler.module import Module
from bnet_transformer.compiler.plan import states_in
from bnet_transformer.compiler.seeing import seen
from bnet_transformer.errors import ReadingError
from bnet_transformer.graph import Selection
from bnet_transformer.inference.batched_states import joint_states, of_one_sentence, pieces
from bnet_transformer.inference.ground import choices_above, counted, interventions
from bnet_transformer.network import Input, Member
from bnet_transformer.reference import BUDGET, World
from bnet_transformer.tpm import Normal
from bnet_transformer.tpm.arrays import in_numpy

T = TypeVar("T")


@dataclass(frozen=True)
class _Table:
    """The values of one family in a layout, `[*enumerated, 1, *plates, word, *shape]`."""

    layout: Layout
    values: Tensor


@dataclass
class Answers:
    """What a sentence knows of its nodes: each family is computed when it is first asked for.

    `before` are the answers of the sentence that it was before a surgery: they tell what the surgery left as it was.
    `states` has many states of choices that are set, `[S]` each: readings are then those of all, `[S, ...]`, in one
    course (or refused).
    """

    module: Module
    world: World
    evidence: Mapping[int, Tensor]
    before: Answers | None = None
    states: Mapping[int, Tensor] = field(default_factory=dict)
    _tables: dict[tuple[str, int], _Table] = field(default_factory=dict)

    def value(self, node: int) -> Tensor:
        """The value of a node: `[*states, *shape]`."""
        return _first_of(
            lambda: self._value(node),
            lambda: self._in_every_state(self._where(node)[0], self._open_above([node]), lambda a: a._value(node)),
            lambda: reference.values(self.world, node, self.evidence),
        )

    def distribution(self, node: int) -> Distribution:
        """`P(node | parents)`, batched over the open choices that decide the parents."""
        member = self._where(node)[0]

        def in_every_state() -> Tensor:
            free = self._open_above(reference.parents(self.world, node))
            return self._in_every_state(member, free, lambda a: a._parameters(node))

        return _first_of(
            lambda: _distribution_of(member, self._parameters(node)),
            lambda: _distribution_of(member, in_every_state()),
            lambda: asking.distribution(self.world, node, self.evidence),
        )

    def attention(self, slice_: int, role: str | None) -> Tensor:
        """`P(j | i)` of the family that reads in a slice: `[*states, *plates, word, word]`."""
        member = asking.reader(self.world, slice_, role)
        if self.states:
            return self._attention(member)
        return _first_of(
            lambda: self._attention(member),
            lambda: self._attention_in_every_state(member),
            lambda: asking.attention(self.world, slice_, role, self.evidence),
        )

    def prepare(self, members: Sequence[Member]) -> None:
        """Compute what families read in one course of the net, where each were one of its own."""
        self._compute("reading", members)

    def arrow_weights(self, selection: Selection) -> dict[tuple[int, int], float]:
        """`P(j | i)` for each arrow along which a selected node reads another word; averaged over what is open."""
        return _first_of(
            lambda: self._arrow_weights(selection),
            lambda: asking.arrow_weights(self.world, selection, self.evidence),
        )

    def _value(self, node: int) -> Tensor:
        member, index = self._where(node)
        if member.tpm.is_random:
            raise _refused(member, "a node that is a function of its parents", "a random one")
        free = self._free(member, [node])
        return self._entry(self._table("value", member), member, free, index, member.shape)

    def _parameters(self, node: int) -> Tensor:
        """What `_distribution_of` makes a node's distribution of: its value, its mean and sigma, or its logits."""
        member, index = self._where(node)
        tpm = member.tpm
        if node in self.world.do or tpm.kind == "input":
            raise _refused(member, "a node with parents", "one that is set")
        if tpm.kind == "deterministic":
            return self._value(node)
        free = self._free(member, reference.parents(self.world, node))
        if isinstance(tpm, Normal):
            return self._entry(self._table("normal", member), member, free, index, (2, *member.shape))
        if tpm.kind != "discrete" or tpm.states is None:
            raise _refused(member, "a node with a number of states", "another")
        return self._entry(self._table("logits", member), member, free, index, (tpm.states,))

    def _in_every_state(
        self, member: Member, free: Sequence[int], ask: Callable[[Answers], Tensor], apart: Sequence[int] = ()
    ) -> Tensor:
        """What is asked of a family, in every joint state of the open choices `free`, as one batch: `[*states, ...]`.

        The choices of the families `apart` stay open: each word has one of its own, whose states are a dim as well.
        """
        world = self.world
        if self.states or not free:
            raise ReadingError("batch of states", expected="choices that are enumerated", got="none")
        reference.check_joint_states(world, free, BUDGET)
        sizes = [reference.support(world, choice) for choice in free]
        states, module, parts = joint_states([range(size) for size in sizes]), of_one_sentence(self.module), []
        states = states.to(world.network.device)
        for part in pieces(world, len(states), [member.family.index]):
            batch = dict(zip(free, states[part].unbind(1), strict=True))
            settled = {**reference.settling(world, self.evidence), **world.do}
            do = {**settled, **{choice: state[0] for choice, state in batch.items()}}
            parts.append(ask(Answers(module, replace(world, do=do), {}, states=batch)))
        table: Tensor = torch.cat(parts, len(apart)).unflatten(len(apart), sizes)
        order = [*apart, *(world.ground.family_of(choice).index for choice in free)]
        dims = sorted(range(len(order)), key=order.__getitem__)
        return table.permute(*dims, *range(len(order), table.dim()))

    def _open_above(self, nodes: Sequence[int]) -> list[int]:
        """The open choices that decide some nodes."""
        return choices_above(self.world, nodes, reference.settling(self.world, self.evidence))

    def _attention_in_every_state(self, member: Member) -> Tensor:
        """The readings of a family below choices of which all its nodes share some, and each word has others alone."""
        world = self.world
        nodes = [node for node in world.ground.nodes(member.family).tolist() if node not in world.rows]
        above = {node: self._open_above(reference.reading_parents(world, node)) for node in nodes}
        choices = asking.shared_and_own(world, above)
        if choices is None:
            raise _refused(member, "words that depend on the same choices", "others")
        shared, own = choices
        return self._in_every_state(member, shared, lambda a: a._attention(member), own)

    def _attention(self, member: Member) -> Tensor:
        ground = self.world.ground
        nodes = ground.nodes(member.family).tolist()
        if any(node in self.world.do for node in nodes):
            raise _refused(member, "nodes that read", "one that is set")
        free: list[int] = []
        if self._open(member):
            above = {}
            for node in nodes:
                if node not in self.world.rows:  # whose row is the same in every state
                    above[node] = free = self._free(member, reference.reading_parents(self.world, node))
            if asking.shared_and_own(self.world, above) is None:
                raise _refused(member, "words that depend on the same choices", "others")
        return self._entry(self._table("reading", member), member, free, None, (self._width(member),))

    def _arrow_weights(self, selection: Selection) -> dict[tuple[int, int], float]:
        if self.evidence:
            raise ReadingError("weights of arrows", expected="no evidence", got="some")
        ground = self.world.ground
        weights: dict[tuple[int, int], float] = {}
        rows: dict[int, Any] = {}
        read: dict[int, set[int]] = {}
        reading: list[Member] = []
        for member in self.world.network.members:
            if not asking.reads_words(member) or not ground.kept(member.family, selection):
                continue
            reading.append(member)
            over = {given.parent for given in member.inputs if WORD in given.over}
            if self._open(member) or over & {given.parent for given in member.inputs if WORD not in given.over}:
                raise _refused(member, "words read in one way, and no open choice above", "another")
            read[member.family.index] = over
        self._compute("reading", reading)
        for member in reading:
            table = self._entry(self._table("reading", member), member, [], None, (self._width(member),))
            rows[member.family.index] = in_numpy(table.reshape(-1, table.shape[-1]))
        for bundle, sources, targets in ground.arrows(selection):
            if bundle.child in rows and bundle.parent in read[bundle.child]:
                words = (sources - int(ground.offsets[bundle.parent])) % ground.shapes[bundle.parent][-1]
                shares = rows[bundle.child][targets - int(ground.offsets[bundle.child]), words]
                weights |= dict(zip(zip(sources.tolist(), targets.tolist(), strict=True), shares.tolist(), strict=True))
        return weights

    def _where(self, node: int) -> tuple[Member, tuple[int, ...]]:
        family, index = self.world.ground.place(node)
        return self.world.network.members[family.index], index

    def _width(self, member: Member) -> int:
        """How many words there are to read."""
        given = next(given for given in member.inputs if WORD in given.over)
        return self.world.ground.words[self.world.network.members[given.parent].family.words or ""]

    def _above(self, member: Member) -> set[int]:
        """The families above one, itself included."""
        return {member.family.index, *self.world.network.graph.above([member.family.index])}

    def _open(self, member: Member) -> bool:
        """True where a choice stands above a family."""
        above = self._above(member) - {member.family.index}
        return any(self.world.network.members[index].tpm.kind == "discrete" for index in above)

    def _free(self, member: Member, nodes: Sequence[int]) -> list[int]:
        """The open choices that decide some nodes, one for each family, within the budget."""
        if not self._open(member):
            return []
        settled = reference.settling(self.world, self.evidence)
        free = choices_above(self.world, nodes, settled)
        families = {self.world.ground.family_of(choice).index for choice in free}
        if len(families) < len(free) or math.prod(reference.support(self.world, c) for c in free) > BUDGET:
            raise _refused(member, "one choice of each family, within the budget", f"{len(free)} choices")
        return free

    def _entry(
        self, table: _Table, member: Member, free: Sequence[int], index: tuple[int, ...] | None, own: tuple[int, ...]
    ) -> Tensor:
        """The entry of one node, or (index None) of all nodes of its family: `[*states, *own]`."""
        layout, values, family = table.layout, table.values, member.family
        if tuple(values.shape[layout.rank :]) != own:
            raise _refused(member, f"a value of shape {own}", f"{tuple(values.shape[layout.rank :])}")
        states = {self.world.ground.family_of(c).index: reference.support(self.world, c) for c in free}
        if not states.keys() <= set(layout.enumerated):
            raise _refused(member, "choices that are enumerated", "others")
        axes = [layout.axis(axis) for axis in self.world.ground.axes(family)]
        place = dict(zip(axes, index, strict=True)) if index is not None else {}
        wide = dict(zip(axes, self.world.ground.shapes[family.index], strict=True)) if index is None else {}
        wide |= {k: states[each] for k, each in enumerate(layout.enumerated) if each in states}
        if self.states:
            wide[layout.batch] = len(next(iter(self.states.values())))
        for k in reversed(range(layout.rank)):
            if k in wide:
                values = values.expand(*values.shape[:k], wide[k], *values.shape[k + 1 :])
            else:
                values = values.select(k, place.get(k, 0) if values.shape[k] > 1 else 0)
        if bool(values.isnan().any()):
            raise _refused(member, "numbers", "NaN")
        return values.clone()

    def _table(self, what: str, member: Member) -> _Table:
        """The values, logits or readings of a family, computed once."""
        self._compute(what, [member])
        return self._tables[what, member.family.index]

    @torch.no_grad()
    def _compute(self, what: str, members: Sequence[Member]) -> None:
        """Make the tables that are not there yet, all in one course of the net."""
        asked = [member for member in members if (what, member.family.index) not in self._tables]
        if not asked:
            return
        want = {member.family.index for member in asked}
        if what != "value":
            inputs = [given for member in asked for given in _inputs(what, member)]
            want = {given.parent for given in inputs} | {s for given in inputs for _, s in given.pick}
        course = self._course(sorted(want), set().union(*map(self._above, asked)))
        for member in asked:
            self._tables[what, member.family.index] = _tabled(what, member, course)

    def _course(self, wanted: Sequence[int], above: set[int]) -> Course:
        """The values of families, with all that was done and seen among those above them."""
        world, network = self.world, self.world.network
        want = tuple(network.members[index].family.name for index in wanted)
        settled = reference.settling(world, self.evidence)  # a value is the same whether its parents are seen or set
        done = interventions(replace(world, do={**settled, **world.do}), above)
        set_, patched = done["do"], done["patched"]
        for name, value in many_states(world, self.states).items():
            patched.pop(name, None)
            set_[name] = value
        set_ |= self._untouched(set(wanted), set_)
        known = frozenset(network.graph.family(name).index for name in set_)
        open_ = frozenset(i for i in set(wanted) - known if network.members[i].tpm.kind == "discrete")
        plan = self.module.plan(want, known, open_)
        if math.prod(states_in(network, index, world.ground.words) for index in plan.enumerated) > BUDGET:
            raise ReadingError(want[0], expected=f"at most {BUDGET} joint states", got="more")
        return self.module.course(
            want,
            counted(world),
            do=set_,
            patched=patched,
            rows=done["rows"],
            given={name: value[None] for name, value in world.given.items()},
            enumerate_too=open_,
        )[0]

    def _untouched(self, wanted: set[int], set_: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values that families have from before the surgery: those that it did not touch, and touched ones read."""
        if self.before is None:
            return {}
        network, touched = self.world.network, self._touched
        found: set[int] = set()
        passed: set[int] = set()
        stack = list(wanted)
        while stack:
            index = stack.pop()
            if index in passed or network.graph.families[index].name in set_:
                continue
            passed.add(index)
            if index not in touched:
                found.add(index)
            else:
                stack.extend(bundle.parent for bundle in network.graph.into[index])
        kept = [network.members[index] for index in sorted(found) if self._keeps(network.members[index])]
        try:
            self.before._compute("value", kept)
            tables = {m.family.name: self.before._tables["value", m.family.index] for m in kept}
            return {m.family.name: self._entry(tables[m.family.name], m, [], None, m.shape)[None] for m in kept}
        except ReadingError:
            return {}

    def _keeps(self, member: Member) -> bool:
        """True for a family that is a function of its parents, beneath no open choice."""
        return bool(member.inputs) and member.tpm.kind == "deterministic" and not self._open(member)

    @cached_property
    def _touched(self) -> set[int]:
        """The families that the surgery set or freed, and all that descend from them."""
        assert self.before is not None
        mine, theirs = ({**world.do, **world.rows} for world in (self.world, self.before.world))
        nodes = {n for n in {**mine, **theirs} if n not in mine or n not in theirs or not mine[n].equal(theirs[n])}
        graph = self.world.network.graph
        found: set[int] = set()
        stack = [self.world.ground.family_of(node).index for node in nodes]
        while stack:
            index = stack.pop()
            if index not in found:
                found.add(index)
                stack.extend(bundle.child for bundle in graph.out_of[index])
        return found


def _first_of(*readings: Callable[[], T]) -> T:
    """The answer of the first reading that does not refuse; the last one is the reference, whose refusal is final."""
    *compiled, by_reference = readings
    for reading in compiled:
        with suppress(ReadingError):
            return reading()
    return by_reference()


def _distribution_of(member: Member, parameters: Tensor) -> Distribution:
    """The distribution of a node: of its value, of its mean and sigma, or of its logits."""
    if not member.tpm.is_random:
        from pyro.distributions import Delta

        return Delta(parameters, event_dim=len(member.shape))
    if isinstance(member.tpm, Normal):
        mean, sigma = parameters.unbind(-2)
        return Independent(TorchNormal(mean, sigma, validate_args=False), 1, validate_args=False)
    return Categorical(logits=parameters, validate_args=False)


def _inputs(what: str, member: Member) -> list[Input]:
    """What the logits or the reading of a family depend on."""
    slots = member.tpm.reading_slots()
    return [given for given in member.inputs if what != "reading" or given.slot in slots]


def _tabled(what: str, member: Member, course: Course) -> _Table:
    """The table of a family, whose parents a course has."""
    if what == "value":
        return _Table(course.layout, course.values[member.family.index])
    inputs = _inputs(what, member)
    at, seen_ = seen(course, replace(member, inputs=tuple(inputs)))
    told = iter(seen_)
    parents = [next(told) if given in inputs else torch.zeros(0) for given in member.inputs]
    if what == "normal":  # its mean and its sigma, one above the other
        normal = member.tpm.distribution(at, *parents)
        return _Table(course.layout, course.layout.full(torch.stack([normal.mean, normal.stddev], -2), 2))
    found = member.tpm.reading(at, *parents) if what == "reading" else member.tpm.logits(at, *parents)
    if found is None:
        raise _refused(member, "attention P(j | i)", member.tpm.why_no_reading())
    found = found if what == "reading" else torch.log_softmax(found.to(course.log_dtype), -1)
    found = course.layout.full(found, 1)
    if what == "reading" and member.family.index in course.rows:
        rows, which = course.rows[member.family.index]
        found = torch.where(which[..., None], rows, found)
    return _Table(course.layout, found)


def many_states(world: World, states: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Families of random nodes in many states, `[S, *plates, word, ...]`: as `do` has it, 0 where nothing is told."""
    told: dict[int, dict[int, Tensor]] = {}
    for node, value in {**world.do, **states}.items():
        told.setdefault(world.ground.family_of(node).index, {})[node] = value
    found = {}
    for index in {world.ground.family_of(node).index for node in states}:
        member, shape, base = world.network.members[index], world.ground.shapes[index], int(world.ground.offsets[index])
        first = next(value for node, value in told[index].items() if node in states)
        if any(value.dtype != first.dtype for value in told[index].values()):
            raise ReadingError(member.family.name, expected="states for its nodes, or tensors", got="both")
        flat = torch.zeros(len(first), math.prod(shape), *first.shape[1:], dtype=first.dtype, device=first.device)
        for node, value in told[index].items():
            flat[:, node - base] = value
        found[member.family.name] = flat.reshape(-1, *shape, *first.shape[1:])
    return found


def _refused(member: Member, expected: str, got: str) -> ReadingError:
    return ReadingError(member.family.name, expected=expected, got=got)
