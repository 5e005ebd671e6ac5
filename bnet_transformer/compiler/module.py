"""The compiled net as an `nn.Module`: shares the net's parameters, computes only what is wanted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bnet_transformer.axes import WORD
from bnet_transformer.compiler.course import Course, Layout
from bnet_transformer.compiler.plan import Needs, Plan, find_needs, network_to_plan
from bnet_transformer.compiler.seeing import count_states, seen
from bnet_transformer.compiler.told import (
    Values,
    batch_of,
    by_family,
    check_mask,
    check_read,
    check_value,
    form,
    gates_in,
    laid_out,
    lead_of,
    received,
    told_gates,
    wanted,
)
from bnet_transformer.compiler.values import plan_to_values
from bnet_transformer.data.encode import check_reads, main_of
from bnet_transformer.errors import BNetError, ReadingError, mapping, unknown, whole
from bnet_transformer.network import Member, Network, network_of
from bnet_transformer.tpm import TPM
from bnet_transformer.tpm.arrays import is_plain

__all__ = ["Module", "Values", "laid_out", "output_of"]


class Inputs(NamedTuple):
    """The value of every `Given` family with its name in messages, the words of each stack, the batch, the device."""

    values: dict[int, tuple[str, Tensor]]
    words: dict[str, int]
    batch: int
    device: torch.device


class Module(nn.Module):
    """`module(x, mask=None, want=None, do=None)`: a batch of sentences in, values out.

    `x` is `[batch, word, dim]` vectors or `[batch, word]` ids (a mapping from stack where there are several), `mask`
    is true where a word is present, `want` names families (`"x_1"`); by default the last state or readout. A value is
    `[*states, batch, *plates, word, *shape]`; of a random family its logits or its mean. Parameters are the net's
    own tensors, under their names with `/` for `.`.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        network = network_of(network)
        network.one_type()
        self.network = network
        self.store = nn.ParameterDict()
        for name, value in network.parameters.items():
            self.store[name.replace(".", "/")] = nn.Parameter(value, requires_grad=name in network.learnable)
        self.output = output_of(network)
        self._stacks = network.graph.word_stacks
        self.widest = max((n for member in network.members for n in member.shape), default=0)
        self._fitting: set[tuple[tuple[str, int], ...]] = set()
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._needs: dict[tuple[object, ...], Needs] = {}
        self._given = [member for member in network.members if member.tpm.kind == "input"]
        self.questions: dict[tuple[object, ...], Any] = {}  # what each needs of the net, worked out once
        self.compiled: dict[str, Callable[..., Tensor]] = {}  # what torch.compile made of uses of it
        self.looks = True  # at the numbers of what it is told, to refuse what they should not be
        tables = {given.reach for m in network.members for given in m.inputs if given.reach.kind == "mask"}
        self._tables = {reach: f"table_{k}" for k, reach in enumerate(sorted(tables, key=repr))}
        for reach, name in self._tables.items():
            self.register_buffer(name, torch.tensor(reach.table), persistent=False)
        if self.find_needs((self.output,), ()).fault is None:  # else it is refused when it is asked for
            for fold in (False, True):
                self.plan((self.output,), frozenset(), fold=fold)

    def forward(
        self,
        x: Values | None = None,
        mask: Values | None = None,
        *,
        want: Sequence[str] | None = None,
        do: Mapping[str, Tensor] | None = None,
        given: Mapping[str, Tensor] | None = None,
        gates: Mapping[str, Tensor] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The wanted values; a dict where `want` is given.

        The values of a family are multiplied by its `gates`, `[batch, *plates]`: zero shuts a head off.
        """
        names = (self.output,) if want is None else wanted(want)
        course, plan = self.course(names, x, mask, do=do, given=given, gates=gates)
        found = {name: self.wanted(course, name, index) for name, index in zip(names, plan.wanted, strict=True)}
        return found[self.output] if want is None else found

    def readings(
        self,
        x: Values | None = None,
        mask: Values | None = None,
        *,
        of: Sequence[str] | None = None,
        want: Sequence[str] = (),
        do: Mapping[str, Tensor] | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """`P(j | i)` of the families that read words (`of`; all by default), and the wanted values, in one course.

        A reading is `[*states, batch, *plates, word, word read]`.
        """
        readers = {m.family.name: m.family.index for m in self.network.members if _reads(m)}
        for name in wanted([] if of is None else of):
            if name not in readers:
                raise unknown("family that reads words", name, readers)
        asked = {name: readers[name] for name in (readers if of is None else of)}
        names = wanted(want)
        course, plan = self.course(names, x, mask, do=do, given=given, readings=frozenset(asked.values()))
        found = {}
        for name, index in asked.items():
            weights = course.readings[index]
            if weights is None:
                member = self.network.members[index]
                got = "one that is set" if index in course.known else "one that is computed word after word"
                raise ReadingError(member.family.name, expected="a family that reads all words at once", got=got)
            found[name] = _bare(course, self.network.members[index], weights)
        own = zip(names, plan.wanted, strict=True)
        return found, {name: self.wanted(course, name, index) for name, index in own}

    def course(
        self,
        want: tuple[str, ...],
        x: Values | Inputs | None = None,
        mask: Values | None = None,
        *,
        do: Mapping[str, Tensor] | None = None,
        seen: Mapping[str, Tensor] | None = None,
        given: Mapping[str, Tensor] | None = None,
        enumerate_too: frozenset[int] = frozenset(),
        left: frozenset[int] = frozenset(),
        patched: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        rows: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        readings: frozenset[int] = frozenset(),
        gates: Mapping[str, Tensor] | None = None,
        nudges: Mapping[int, Tensor] | None = None,
        training: bool | None = None,
    ) -> tuple[Course, Plan]:
        """All values that the wanted families need (but for the `left`), in one layout, and the plan.

        `seen` says outright what some random families came to, as `do` does; only messages tell them apart. `patched`
        sets some nodes of a family: values, and which nodes, `[batch, *plates, word]`; `rows` in the same way the
        weights of words by which nodes mix. The `readings` of families are kept, and their values only where they are
        wanted. `nudges` are added to the values of families, in the layout. `training` is the module's own mode by
        default.
        """
        parameters = {name: self.store[name.replace(".", "/")] for name in self.network.parameters}
        inputs, words, batch, device = x if isinstance(x, Inputs) else self.inputs(x, given)
        set_ = self.told("do", do, words, batch) | self.told("evidence", seen, words, batch)
        batch = batch_of(self.network, set_, batch)
        gated = told_gates(self.network, gates, batch, next(iter(self.store.values()), None))
        batch = max([batch, *map(len, gated.values())])
        fold = not (readings or nudges) and batch * max([0, *words.values()]) > self.widest
        some = self.told("do", {name: value for name, (value, _) in mapping("patched", patched).items()}, words, batch)
        mixed = {self.network.graph.family(name).index: told for name, told in (rows or {}).items()}
        apart = frozenset({*some, *mixed, *gated, *(nudges or ())})
        fold = fold and not mixed  # where maps are folded into an attention there are no values v to mix
        plan = self.plan(want, frozenset(set_), enumerate_too, left, apart, readings, fold=fold, words=words)
        layout = Layout(plan.enumerated, tuple(self.network.graph.sizes))
        dtype = next((p.dtype for p in parameters.values()), self.network.floating)
        present = self.present(mask, words, batch)
        mode = self.training if training is None else training
        course = Course(self.network, layout, parameters, {}, words, present, mode, {}, dtype, device)
        course.tables = {reach: getattr(self, name) for reach, name in self._tables.items()}
        course.looks = self.looks
        course.apart = any([value.device != device for value in parameters.values()])  # noqa: C419
        course.known = received(course, {**inputs, **set_})
        for (index, value), (_, which) in zip(received(course, some).items(), (patched or {}).values(), strict=True):
            course.patched[index] = value, laid_out(course, index, which)
        for index, (weights, which) in mixed.items():
            own = weights.shape[-1:]
            course.rows[index] = laid_out(course, index, weights, own), laid_out(course, index, which)
        course.readings.update(dict.fromkeys(readings))
        course.gates.update(gates_in(course, gated))
        course.nudges = nudges or {}
        if present and self.looks:
            groups = (*plan.groups, plan.wanted, left)
            check_read(course, (self.network.members[index] for group in groups for index in group))
        plan_to_values(plan, course)
        return course, plan

    def plan(
        self,
        want: tuple[str, ...],
        known: frozenset[int],
        enumerate_too: frozenset[int] = frozenset(),
        left: frozenset[int] = frozenset(),
        patched: frozenset[int] = frozenset(),
        passed: frozenset[int] = frozenset(),
        *,
        fold: bool = False,
        words: Mapping[str, int] | None = None,
    ) -> Plan:
        """The plan of a question, made once; `words` are for the messages of what cannot be planned."""
        key = (want, known, enumerate_too, left, patched, passed, fold)
        if key not in self._plans:
            given = {m.family.index for m in self._given}
            sets = {"left": left, "patched": patched, "passed": passed}
            self._plans[key] = network_to_plan(
                self.network, want, known | given, enumerate_too, fold=fold, words=words, **sets
            )
        return self._plans[key]

    def find_needs(
        self,
        want: Sequence[str],
        known: Collection[int],
        enumerate_too: Collection[int] = (),
        patched: Collection[int] = (),
        words: Mapping[str, int] | None = None,
    ) -> Needs:
        """What a question needs and why it cannot be planned, found once: `compiler.plan.find_needs`, inputs known."""
        key = (tuple(want), frozenset(known), frozenset(enumerate_too), frozenset(patched))
        if key not in self._needs:
            indices = [self.network.graph.family(name).index for name in want]
            known = {*known, *(member.family.index for member in self._given)}
            self._needs[key] = find_needs(
                self.network, indices, known, enumerate_too, patched=frozenset(patched), words=words
            )
        return self._needs[key]

    def wanted(self, course: Course, name: str, index: int) -> Tensor:
        """The value of a family in a course, of a random one its logits or its mean, without dims that it has not."""
        member = self.network.members[index]
        if index in course.values and (member.tpm.kind == "deterministic" or index in course.known):
            return _bare(course, member, course.values[index])
        at, parents = seen(course, member)
        if member.tpm.kind == "discrete":
            logits = torch.log_softmax(member.tpm.logits(at, *parents), -1)
            return _bare(course, member, course.layout.full(logits, 1))
        return _bare(course, member, member.tpm.distribution(at, *parents).mean)

    def told(self, what: str, told: object, words: Mapping[str, int], batch: int) -> dict[int, tuple[str, Tensor]]:
        """Values by the number of their family, each with its name in messages; wrong names and forms are refused."""
        found = by_family(self.network, what, told)
        batch = batch_of(self.network, found, batch)
        for index, (name, value) in found.items():
            self._check(index, name, value, words, batch)
        return found

    def _check(self, index: int, what: str, value: Tensor, words: Mapping[str, int], batch: int) -> None:
        like = next(iter(self.store.values()), None)
        check_value(self.network, self.network.members[index], what, value, words=words, batch=batch, like=like)

    def inputs(self, x: Values | None, given: Mapping[str, Tensor] | None) -> Inputs:
        """What a batch gives, checked; `course` takes it in place of `x` and `given`."""
        stacks = self._stacks
        if not stacks and isinstance(x, Tensor):
            raise BNetError("x", expected="None: the net has no words", got="a tensor", allowed="given=, do=")
        if len(stacks) > 1 and x is not None and not isinstance(x, Mapping):
            raise BNetError("x", expected="a mapping from stack: " + ", ".join(stacks), got="one tensor")
        by_stack = dict(x) if isinstance(x, Mapping) else {} if x is None else {stacks[0]: x}
        inputs = by_family(self.network, "given", given)
        for index, (what, _) in inputs.items():
            if self.network.members[index].tpm.kind != "input":
                hint = ", ".join(m.family.name for m in self._given) + "; do= sets any node"
                raise BNetError(what, expected="a node that is given", got="one that is not", allowed=hint)
        words: dict[str, int] = {}
        for stack, value in by_stack.items():
            if stack not in stacks:
                raise unknown("stack", stack, stacks)
            what = f"x[{stack!r}]" if len(stacks) > 1 else "x"
            member = self._main(stack, what, mapping("given", given))
            if not is_plain(value) or value.dim() < 2:
                got = tuple(value.shape) if is_plain(value) else value
                raise BNetError(what, expected="[batch, word] ids or [batch, word, dim] vectors", got=got)
            words[stack] = value.shape[1]
            if member is not None:
                inputs[member.family.index] = what, value
        for index, (what, value) in inputs.items():
            family = self.network.members[index].family
            if family.words is not None:
                if not is_plain(value) or value.dim() < 2 + len(family.plates):
                    got = tuple(value.shape) if is_plain(value) else value
                    raise BNetError(what, expected=form(self.network.members[index]), got=got)
                words.setdefault(family.words, value.shape[1 + len(family.plates)])
        return self._complete(inputs, words, by_stack)

    def _complete(
        self, inputs: dict[int, tuple[str, Tensor]], words: dict[str, int], by_stack: Mapping[str, Tensor]
    ) -> Inputs:
        """The inputs, none missing, all of the right form for words that the net can read."""
        given = [*by_stack.values(), *(value for _, value in inputs.values())]
        first = given[0] if given else torch.zeros(1)
        for member in self._given:
            default = member.tpm.default
            words_known = member.family.words is None or member.family.words in words
            if default is not None and words_known and member.family.index not in inputs:
                lead = lead_of(self.network, member, words)
                inputs[member.family.index] = member.family.name, torch.full((1, *lead), default, device=first.device)
        missing = [m.family.name for m in self._given if m.family.index not in inputs]
        missing += [f"stack {stack!r}" for stack in self._stacks if stack not in words]
        if missing:
            raise BNetError(
                "x", expected="a value for every given node and stack", got="none for " + ", ".join(missing)
            )
        batch = batch_of(self.network, inputs, first.shape[0] if by_stack else 1)
        if batch == 0:
            what = ", ".join(what for what, _ in inputs.values())
            raise BNetError(what, expected="at least one sentence", got="none")
        for index, (what, value) in inputs.items():
            self._check(index, what, value, words, batch)
        if not torch.compiler.is_compiling():
            self._check_words(words)
        return Inputs(inputs, words, batch, first.device)

    def _check_words(self, words: Mapping[str, int]) -> None:
        """Refuse numbers of words that the reaches and positions of the net do not allow; each is looked at once."""
        key = tuple(words.items())
        if key not in self._fitting:
            for stack, count in words.items():
                whole(f"words of stack {stack!r}" if stack else "words", count)
            check_reads(self.network, words)
            self._fitting.add(key)

    def _main(self, stack: str, what: str, given: Mapping[str, Tensor]) -> Member | None:
        """The family that `x` fills: what `given` leaves open of a stack's; both for one family are refused."""
        over = [member for member in self._given if member.family.words == stack and not member.family.plates]
        found = main_of([member for member in over if member.family.name not in given])
        rest = found is None or found.tpm.default is not None
        main = main_of(over)
        if rest and main is not None and main.family.name in given:
            name = main.family.name
            raise BNetError(f"{what} and given[{name!r}]", expected=f"one value for {name}", got="two")
        return found

    def look(self, want: tuple[str, ...], x: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> None:
        """Refuse a mask that leaves a sentence no word, or a word nothing to read, wherever the parameters lie."""
        words, first = {stack: value.shape[1] for stack, value in x.items()}, next(iter(x.values()))
        members, present = self.network.members, check_mask(mask, words, len(first))
        # Whether choices can be summed is no matter of a mask: they are taken as they come.
        choices = frozenset(m.family.index for m in members if m.tpm.kind == "discrete" and m.family.name not in want)
        plan = self.plan(want, choices, words=words)
        layout = Layout((), tuple(self.network.graph.sizes))
        course = Course(self.network, layout, {}, {}, words, present, False, {}, self.network.floating, first.device)
        check_read(course, (members[index] for group in plan.groups for index in group))

    def present(self, mask: Values | None, words: Mapping[str, int], batch: int) -> dict[str, Tensor]:
        """The words that are present, by stack; nothing where all are."""
        return check_mask(mask, words, batch, looks=self.looks)


def _reads(member: Member) -> bool:
    """True for a deterministic family whose TPM has a distribution over words that it reads."""
    own = type(member.tpm).reading is not TPM.reading and member.tpm.kind == "deterministic"
    return own and any(WORD in given.over for given in member.inputs)


def output_of(network: Network) -> str:
    """The family that a module returns by default: the last readout, else the last state."""
    last = network.members[-1].family
    for stack in network.declaration.stacks:
        nodes = stack.epilogue or stack.slice or stack.prologue
        if not nodes:
            continue
        name = f"{stack.name}_{nodes[-1].role}" if stack.name else nodes[-1].role
        families = network.graph.by_stem.get(name, ())
        last = families[-1] if families else last
    return last.name


def _bare(course: Course, member: Member, value: Tensor) -> Tensor:
    """A value without the dims that its family has not, and without the states on which it does not depend."""
    layout, family = course.layout, member.family
    drop = {k for k in range(layout.batch) if value.shape[k] == 1 and count_states(course, layout.enumerated[k]) > 1}
    drop |= {layout.axis(plate) for plate in layout.plates if plate not in family.plates}
    drop |= {layout.word} if family.words is None else set()
    full = list(value.shape)
    for plate in family.plates:
        full[layout.axis(plate)] = course.network.graph.sizes[plate]
    if family.words is not None:
        full[layout.word] = course.words[family.words]
    return value.expand(full).reshape([size for k, size in enumerate(full) if k not in drop])
