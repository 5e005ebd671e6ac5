"""One run of the compiled net: what it is asked (`Request`), how its values lie (`Layout`), its state (`Course`).

Then what a TPM sees in it (`seen`): where its family stands, and the value in each slot, aligned with its own words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bnet_transformer._core.checks import set_frozen
from bnet_transformer._core.naming import WORD, Reach
from bnet_transformer.compiler.plan import open_parent
from bnet_transformer.declare import Network, NodeSpec, ParentSpec
from bnet_transformer.tpm import EvalContext

Values = Tensor | Mapping[str, Tensor]
SomeNodes = Mapping[str, tuple[Tensor, Tensor]]  # for some nodes of a family: values, and which nodes


@dataclass(frozen=True)
class Layout:
    """Where things lie: the enumerated families, then the batch, the plates of the net, the word."""

    enumerated: tuple[int, ...]
    plates: tuple[str, ...]
    batch: int = field(init=False, compare=False)  # plain fields: torch.compile cannot trace a cached property
    word: int = field(init=False, compare=False)
    rank: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        batch = len(self.enumerated)
        set_frozen(self, batch=batch, word=batch + 1 + len(self.plates), rank=batch + 2 + len(self.plates))

    def axis(self, plate: str) -> int:
        """The dim of a plate, or of the word."""
        return self.word if plate == WORD else self.batch + 1 + self.plates.index(plate)

    def full(self, value: Tensor, own: int) -> Tensor:
        """A value with all dims before its last `own`: those that a TPM left out lead with size 1."""
        missing = self.rank + own - value.dim()
        return value.reshape(*[1] * missing, *value.shape) if missing else value


class Inputs(NamedTuple):
    """The value of every input family with its name in messages, the words of each stack, the batch, the device."""

    values: dict[int, tuple[str, Tensor]]
    words: dict[str, int]
    batch: int
    device: torch.device


@dataclass(frozen=True)
class Request:
    """What one run of the compiled net computes: the families that are wanted, the sentences, the interventions.

    Values are `[batch, *plates, word, *shape]`, states `[batch, *plates, word]`; a batch of 1 holds for all sentences.

    Args:
        want: Families whose values are computed; of a random one, what its distribution is made of.
        x: The words of each stack, or the `Inputs` that `Module.inputs` made of them.
        mask: Which words are present, `[batch, word]` for each stack; all by default.
        given: Values of further input families.
        do: Values of families that are set.
        observed: Values of random families that were seen. They act as `do` does; only messages tell them apart.
        patched: Values for some nodes of a family, and which nodes, `[batch, *plates, word]`.
        rows: Attention weights by which some nodes mix, `[batch, *plates, word, word read]`, and which nodes.
        gates: Factors of the values of families, `[batch, *plates]`; zero shuts a head off.
        nudges: What is added to the values of families (by their numbers), in the layout of the run.
        enumerate_too: Choices that are enumerated though no value depends on them.
        left: Families that are not computed, though all that they read is.
        readings: Families whose `P(j | i)` is kept.
        training: Whether TPMs are in training mode; the module's own mode by default.
        check_values: Whether states, ids and masks are looked at, to refuse wrong ones; the module's mode by default.
    """

    want: tuple[str, ...]
    x: Values | Inputs | None = None
    mask: Values | None = None
    given: Mapping[str, Tensor] | None = None
    do: Mapping[str, Tensor] | None = None
    observed: Mapping[str, Tensor] | None = None
    patched: SomeNodes | None = None
    rows: SomeNodes | None = None
    gates: Mapping[str, Tensor] | None = None
    nudges: Mapping[int, Tensor] | None = None
    enumerate_too: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    readings: frozenset[int] = frozenset()
    training: bool | None = None
    check_values: bool | None = None


@dataclass
class Course:
    """One run of a plan: the parameters, what is known, the words of each stack, and the values so far.

    `places` say where the words of a stack stand in their sentence, where they are not `0 .. n - 1`; by `gates` the
    values of a family are multiplied, and its `nudges` are added to them. Some parameters may lie `apart` from the
    inputs, on other devices.
    """

    network: Network
    layout: Layout
    parameters: Mapping[str, Tensor]
    known: Mapping[int, Tensor]
    words: Mapping[str, int]
    present: Mapping[str, Tensor]
    training: bool
    values: dict[int, Tensor]
    dtype: torch.dtype
    device: torch.device
    patched: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    readings: dict[int, Tensor | None] = field(default_factory=dict)
    gates: dict[int, Tensor] = field(default_factory=dict)
    nudges: Mapping[int, Tensor] = field(default_factory=dict)
    places: Mapping[str, Tensor] = field(default_factory=dict)
    _counted: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict)  # made once for all slices
    turns: dict[Any, Any] = field(default_factory=dict)  # so too
    apart: bool = False
    tables: Mapping[Reach, Tensor] = field(default_factory=dict)  # of reaches that are told by one
    check_values: bool = True  # whether states, ids and masks are looked at

    @property
    def log_dtype(self) -> torch.dtype:
        """The type of log probabilities: a half is too coarse for them, and too narrow."""
        return torch.promote_types(self.dtype, torch.float32)

    def count_states(self, index: int) -> int:
        """How many states a discrete family has; the words that it may read, where its state is a word."""
        return self.network.count_states(index, self.words)

    def count(self, n: int) -> Tensor:
        """The numbers `0 .. n - 1`."""
        if n not in self._counted:
            self._counted[n] = torch.arange(n, device=self.device)
        return self._counted[n]


def brought(course: Course, at: EvalContext, parents: Sequence[Tensor]) -> tuple[EvalContext, list[Tensor]]:
    """What a TPM sees, all of it where its node is computed."""
    device = _home(course, at, parents)
    read = {slot: value.to(device) for slot, value in at.read_indices.items()}
    mask = {slot: value.to(device) for slot, value in at.mask.items()}
    return replace(at, word=at.word.to(device), read=read, mask=mask), [parent.to(device) for parent in parents]


def _home(course: Course, at: EvalContext, parents: Sequence[Tensor]) -> torch.device:
    """The device of a node's own parameters; else that of the greatest of what it reads, the last of several."""
    for value in at.parameters.values():
        return value.device
    greatest = max([parent.numel() for parent in parents], default=0)
    return next((parent.device for parent in reversed(parents) if parent.numel() == greatest), course.device)


def states(course: Course, index: int) -> Tensor:
    """All states of an enumerated family, along its own dim."""
    place = course.layout.enumerated.index(index)
    shape = [1] * course.layout.rank
    shape[place] = -1
    return course.count(course.count_states(index)).reshape(shape)


def given_value(course: Course, index: int) -> Tensor | None:
    """The value of a family that is known or enumerated, as its children receive it; None of one to be computed."""
    member = course.network.specs[index]
    if index not in course.known and index not in course.layout.enumerated:
        return None
    found = course.known[index] if index in course.known else states(course, index)
    discrete = member.tpm.kind == "discrete" and not found.is_floating_point()
    return full(course, member, member.tpm.emit(standing(course, member), found)) if discrete else found


def full(course: Course, member: NodeSpec, value: Tensor) -> Tensor:
    """A value with all dims of the layout: those that a TPM left out lead with size 1."""
    return course.layout.full(value, len(member.shape))


def seen(course: Course, member: NodeSpec, word: int | None = None) -> tuple[EvalContext, list[Tensor]]:
    """What a TPM sees: where it stands, then the value in each slot, aligned. `word` picks one word of a scan."""
    read: dict[str, Tensor] = {}
    mask: dict[str, Tensor] = {}
    parents = []
    for given in member.parents:
        found = course.values.get(given.index)
        if found is None:  # a value that is read no more in the plan was dropped
            found = given_value(course, given.index)
        if found is None:
            if given.index not in course.network.graph.recurrent:  # else it is a word that is not there yet
                raise open_parent(course.network.specs[given.index].group.name)
            found = nothing(course, given)
        words = course.network.specs[given.index].group.word_stack
        if words is not None and WORD not in dict(given.pick):
            found = _of_words(course, member, given, found, words, word)  # first: a selector picks for the child's word
        for plate, selector in given.pick:
            found = _picked(course, found, course.layout.axis(plate), selector, word)
            if plate == WORD:
                found = _within_reach(course, member, given, found, selector)
        for plate in reversed(given.over):
            if plate != WORD:
                found = found.unsqueeze(course.layout.rank).transpose(course.layout.axis(plate), course.layout.rank)
        if given.over:
            read[given.slot], mask[given.slot] = _who(course, member, given, word)
        parents.append(found)
    at = standing(course, member, read, mask, word)
    return brought(course, at, parents) if course.apart else (at, parents)


def nothing(course: Course, given: ParentSpec) -> Tensor:
    """What is read of a word that is not there yet: zero, or state 0."""
    parent = course.network.specs[given.index]
    dtype = torch.long if parent.tpm.is_index_valued else course.dtype
    return torch.zeros([1] * course.layout.rank + list(parent.shape), dtype=dtype, device=course.device)


def _within_reach(course: Course, member: NodeSpec, given: ParentSpec, found: Tensor, selector: int) -> Tensor:
    """A picked word that is out of reach gives zero (it has probability zero)."""
    words = course.network.specs[given.index].group.word_stack or ""
    n = course.words[member.group.word_stack] if member.group.word_stack is not None else 1
    reads = _reads(course, given, n, course.words[words])
    state = course.values[selector]
    word = course.count(n)
    inside = reads[word, state]
    return found * inside.reshape(*inside.shape, *[1] * (found.dim() - inside.dim()))


def _of_words(
    course: Course, member: NodeSpec, given: ParentSpec, found: Tensor, words: str, word: int | None
) -> Tensor:
    """A parent's value at the words that are read: aligned with the child's, or as a collection behind them."""
    axis = course.layout.word
    n = found.shape[axis]
    match given.reach.kind:
        case "same":
            return found if word is None else found.narrow(axis, word if n > 1 else 0, 1)
        case "first":
            return found.narrow(axis, 0, 1)
        case "last":
            return _last(course, found, words)
        case "before" | "rest":  # the first word reads nothing, and the others the word before them, or their own
            back = int(given.reach.kind == "before")
            found = present_alone(course, words, found) if back else found
            found = found.expand(*found.shape[:axis], course.words[words], *found.shape[axis + 1 :])
            zero = torch.zeros_like(found.narrow(axis, 0, 1))
            if word is not None:
                return found.narrow(axis, word - back, 1) if word else zero
            return torch.cat([zero, found.narrow(axis, 1 - back, course.words[words] - 1)], axis)
        case _:
            return found.unsqueeze(axis)


def present_in(course: Course, words: str | None) -> Tensor | None:
    """Which words of a stack are present, in the layout; None where all are, or of a family without words."""
    if words is None or words not in course.present:
        return None
    present, layout = course.present[words], course.layout
    return present.reshape(*[1] * layout.batch, present.shape[0], *[1] * len(layout.plates), present.shape[1])


def present_alone(course: Course, words: str | None, value: Tensor) -> Tensor:
    """A value that is zero, or state 0, at the words that are absent."""
    there = present_in(course, words)
    if there is None:
        return value
    there = there.reshape(*there.shape, *[1] * (value.dim() - there.dim())).to(value.device)
    return torch.where(there, value, value.new_zeros(()))


def _last(course: Course, found: Tensor, words: str) -> Tensor:
    """The last word that is present."""
    axis = course.layout.word
    if words not in course.present:
        return found.narrow(axis, found.shape[axis] - 1, 1)
    last = course.present[words].long().cumsum(-1).argmax(-1).to(found.device)
    shape = [1] * found.dim()
    shape[course.layout.batch] = -1
    where = last.reshape(shape)
    lead = torch.broadcast_shapes(where.shape, (*found.shape[:axis], 1, *found.shape[axis + 1 :]))
    return found.expand(*lead[:axis], found.shape[axis], *lead[axis + 1 :]).gather(axis, where.expand(lead))


def _who(course: Course, member: NodeSpec, given: ParentSpec, word: int | None) -> tuple[Tensor, Tensor]:
    """For a collection: the indices of its entries, and which of them each word reads."""
    network = course.network
    if WORD not in given.over:
        size = network.graph.plate_sizes[given.over[-1]]
        return course.count(size), torch.ones(size, dtype=torch.bool, device=course.device)
    words = network.specs[given.index].group.word_stack or ""
    m = course.words[words]
    key = given.reach, words, member.group.word_stack, word
    if key not in course.masks:
        course.masks[key] = _mask(course, member, given, words, word)
    return course.count(m), course.masks[key]


def _mask(course: Course, member: NodeSpec, given: ParentSpec, words: str, word: int | None) -> Tensor:
    """Which words of a stack each word of a family reads, none that is absent."""
    m = course.words[words]
    n = 1 if member.group.word_stack is None else course.words[member.group.word_stack]
    mask = _reads(course, given, n, m)
    mask = mask if word is None else mask[word : word + 1]
    if words in course.present:
        present = course.present[words]
        shape = (present.shape[0], *[1] * len(course.layout.plates), 1, m)
        mask = mask & present.reshape(shape)
        mask = mask | _absent_and_alone(course, member, mask, word)
    return mask


def _absent_and_alone(course: Course, member: NodeSpec, mask: Tensor, word: int | None) -> Tensor:
    """The padding words that may read nobody: they read everybody, and nobody reads them."""
    alone = ~mask.any(-1, keepdim=True)
    if member.group.word_stack not in course.present:
        return torch.zeros_like(alone)
    present = course.present[member.group.word_stack or ""]
    present = present if word is None else present[:, word : word + 1]
    return alone & ~present.reshape(present.shape[0], *[1] * len(course.layout.plates), -1, 1)


def _reads(course: Course, given: ParentSpec, n: int, m: int) -> Tensor:
    """`[n, m]`: which words each word reads."""
    if given.reach.kind == "mask":
        made = course.tables.get(given.reach)
        return torch.tensor(given.reach.table, device=course.device) if made is None else made.to(course.device)
    i, j = course.count(n), course.count(m)
    mask: Tensor = given.reach.has_arrow(i[:, None], j[None, :], m)
    return mask


def _picked(course: Course, found: Tensor, axis: int, selector: int, word: int | None = None) -> Tensor:
    """The entry of a dim that a selector picks; a view where the selector is enumerated."""
    if selector in course.layout.enumerated and selector not in course.patched:
        place = course.layout.enumerated.index(selector)
        if found.shape[place] == 1:
            return found.transpose(place, axis)
    state = course.values[selector]
    if word is not None and state.shape[course.layout.word] > 1:
        state = state.narrow(course.layout.word, word, 1)
    extra = found.dim() - state.dim()
    where = state.reshape(*state.shape, *[1] * extra)
    lead = torch.broadcast_shapes((*found.shape[:axis], 1, *found.shape[axis + 1 :]), where.shape)
    return found.expand(*lead[:axis], found.shape[axis], *lead[axis + 1 :]).gather(axis, where.expand(lead))


def standing(
    course: Course,
    member: NodeSpec,
    read: Mapping[str, Tensor] | None = None,
    mask: Mapping[str, Tensor] | None = None,
    word: int | None = None,
) -> EvalContext:
    """Where a family stands, with its parameters among the dims of the layout; what it reads is told."""
    layout, family = course.layout, member.group
    parameters = {}
    for name in member.parameters:
        stored = course.parameters[f"{member.param_prefix}.{name}"]
        if family.plates:
            shape = [1] * (1 + len(layout.plates) + 1)
            for k, plate in enumerate(family.plates):
                shape[1 + layout.plates.index(plate)] = stored.shape[k]
            stored = stored.reshape(*shape, *stored.shape[len(family.plates) :])
        parameters[name] = stored
    if word is not None:
        place = torch.full((1,), word, device=course.device)
    elif family.word_stack is not None and family.word_stack in course.places:
        place = course.places[family.word_stack]
    else:
        place = course.count(1 if family.word_stack is None else course.words[family.word_stack])
    turns = course.turns if word is None else {}
    return EvalContext(parameters, place, read or {}, mask or {}, course.training, course.dtype, turns)
