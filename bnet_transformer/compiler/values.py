"""Second pass, plan to values: every family as one tensor, in the layout `[*enumerated, batch, *plates, word, *shape]`.

A dim on which a value does not depend has size 1, so values broadcast: all states of a selector share what lies
before it.

Families that read themselves at earlier words are computed word after word (`Scan`). All that does not wait for an
earlier word is done before the first: parameters, what comes from outside the group, and the products `W x` of a
recurrent map, of all words and of all gates at once. What is left of a word is one product `U h` for all gates that
read the same h, and what stands between it and the next word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from bnet_transformer._core.naming import WORD
from bnet_transformer.compiler.course import Course, full, given_value, nothing, present_in, seen, standing
from bnet_transformer.compiler.fused import Reading, entries, fused, is_plain, maps, reading_of, told_apart
from bnet_transformer.compiler.plan import Fold, Plan
from bnet_transformer.declare import NodeSpec, ParentSpec
from bnet_transformer.errors import BNetError, UnsupportedError
from bnet_transformer.tpm import Affine, Attention, EvalContext, Recur, Select
from bnet_transformer.tpm.base import broadcast_shapes
from bnet_transformer.tpm.steps import ACTIVATIONS


def plan_to_values(plan: Plan, course: Course) -> None:
    """Compute the value of every family of a plan."""
    for group, done in zip(plan.groups, plan.done, strict=True):
        if group[0] in plan.left:
            pass
        elif group[0] in plan.folds:
            course.values[group[0]] = folded(course, plan.folds[group[0]])
        elif group[0] in plan.together:
            course.values |= made_together(course, plan.together[group[0]])
        elif group[0] in course.values:
            pass  # made together with an earlier one
        elif group[0] in plan.recurrent:
            course.values |= Scan(course, group).run(done)
        else:
            course.values[group[0]] = value(course, group[0])
        if group[0] in course.rows and group[0] not in course.known:
            course.values[group[0]] = _by_rows(course, group[0])
        if group[0] in course.patched and group[0] not in plan.recurrent:
            course.values[group[0]] = _patched(course, group[0])
        if group[0] in course.gates:
            course.values[group[0]] = course.values[group[0]] * course.gates[group[0]]
        if group[0] in course.nudges:
            made = course.values[group[0]]
            course.values[group[0]] = made + course.nudges[group[0]].to(made.device)
        for index in done:
            course.values.pop(index, None)


def _patched(course: Course, index: int) -> Tensor:
    """The value of a family some of whose nodes are set."""
    (set_, which), member, made = course.patched[index], course.network.specs[index], course.values[index]
    if member.tpm.kind == "discrete" and not set_.is_floating_point():
        set_ = full(course, member, member.tpm.emit(standing(course, member), set_))
    own = set_.dim() - course.layout.rank
    return torch.where(which.reshape(*which.shape, *[1] * own).to(made.device), set_.to(made.device), made)


def _by_rows(course: Course, index: int) -> Tensor:
    """The value of a family some of whose nodes mix by rows that were set, in place of their `P(j | i)`."""
    (rows, which), member = course.rows[index], course.network.specs[index]
    assert isinstance(member.tpm, Attention)
    _, parents = seen(course, member)
    mix = full(course, member, member.tpm.mix(rows.to(parents[0].device), *parents))
    return torch.where(which[..., None].to(mix.device), mix, course.values[index])


def value(course: Course, index: int) -> Tensor:
    """The value of one family, for all its words at once."""
    member = course.network.specs[index]
    found = given_value(course, index)
    if found is not None:
        return found
    if isinstance(member.tpm, Select) and (dims := _all_states(course, member)):
        return entries(course.parameters[f"{member.param_prefix}.values"], dims, course.layout.rank)
    at, parents = seen(course, member)
    if index in course.readings:
        return full(course, member, _with_reading(course, member, at, parents))
    return full(course, member, computed(course, member, at, parents))


def _all_states(course: Course, member: NodeSpec) -> list[int]:
    """The dims along which the parents of a family run through all their states; none where some do not."""
    enumerated = course.layout.enumerated
    each = {given.index for given in member.parents}
    plain = all(not (given.pick or given.over) and given.reach.kind == "same" for given in member.parents)
    plain = plain and not each & course.patched.keys()
    if member.group.plates or not plain or len(each) < len(member.parents) or not each <= {*enumerated}:
        return []
    return [enumerated.index(given.index) for given in member.parents]


def _with_reading(course: Course, member: NodeSpec, at: EvalContext, parents: list[Tensor]) -> Tensor:
    """The value of a family, whose `P(j | i)` is kept beside it: an attention is computed once for both."""
    tpm = member.tpm
    if isinstance(tpm, Attention) and is_plain(tpm, member, parents):
        weights, mix = told_apart(_reading(course, member, at, parents))
        found = mix + parents[-1] if tpm.residual else mix
    else:
        told = tpm.attention_weights(at, *parents)
        if told is None:
            raise UnsupportedError(member.group.name, expected="attention P(j | i)", actual=tpm.no_attention_reason())
        weights, found = told, computed(course, member, at, parents)
    course.readings[member.group.index] = course.layout.full(weights, 1)
    return found


def computed(course: Course, member: NodeSpec, at: EvalContext, parents: list[Tensor]) -> Tensor:
    """What a TPM makes of what it sees, by a fused operation where there is one."""
    whole, causal = _unmasked(course, member)
    found = fused(member, at, parents, whole=whole, causal=causal)
    if found is not None:
        return found
    found = member.tpm.value(at, *parents)
    if not isinstance(found, Tensor) or found.shape[max(0, found.dim() - len(member.shape)) :] != member.shape:
        got = f"one of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
        what = f"{member.group.name} ({type(member.tpm).__name__})"
        raise BNetError(what, expected=f"a value of shape {member.shape}, as it says", actual=got)
    return found


def made_together(course: Course, indices: tuple[int, ...]) -> dict[int, Tensor]:
    """Several maps of one vector, as one product."""
    members = [course.network.specs[index] for index in indices]
    seen_ = [seen(course, member) for member in members]
    biases = [at["bias"] if isinstance(m.tpm, Affine) else None for m, (at, _) in zip(members, seen_, strict=True)]
    made = maps([parents[0] for _, parents in seen_], seen_[0][1][1], biases)
    return {m.group.index: full(course, m, each) for m, each in zip(members, made, strict=True)}


def folded(course: Course, fold: Fold) -> Tensor:
    """An attention with the maps around it folded in: `softmax(x_i . (W_q^T W_k) x_j)`, and W_v after the mix."""
    at, parents, residual = _folded_in(course, fold)
    mix = computed(course, fold.member, at, parents)
    if fold.W_v is not None:
        (mix,) = maps([course.values[fold.W_v.index]], mix, [None])
    return full(course, fold.member, mix if residual is None else mix + residual)


def _folded_in(course: Course, fold: Fold) -> tuple[EvalContext, list[Tensor], Tensor | None]:
    """What the attention of a fold sees, and the residual that is added to what it makes."""
    at, parents = seen(course, fold.member)
    residual = parents.pop() if fold.residual else None
    W_q, W_k = course.values[fold.W_q.index], course.values[fold.W_k.index]
    (parents[0],) = maps([W_k.mT @ W_q], parents[0], [None])
    return at, parents, residual


def attended(course: Course, member: NodeSpec, fold: Fold | None) -> tuple[Reading, Tensor | None, Tensor | None]:
    """What a plain attention reads; then W_v, where it is applied to the mix; then the residual."""
    if fold is not None:
        at, parents, residual = _folded_in(course, fold)
        W_v = None if fold.W_v is None else course.values[fold.W_v.index]
        return _reading(course, fold.member, at, parents), W_v, residual
    at, parents = seen(course, member)
    assert isinstance(member.tpm, Attention)
    return _reading(course, member, at, parents), None, parents[-1] if member.tpm.residual else None


def _reading(course: Course, member: NodeSpec, at: EvalContext, parents: list[Tensor]) -> Reading:
    """What a plain attention reads, from what it sees."""
    assert isinstance(member.tpm, Attention)
    whole, causal = _unmasked(course, member)
    return reading_of(member.tpm, at, parents, whole=whole, causal=causal)


def _unmasked(course: Course, member: NodeSpec) -> tuple[bool, bool]:
    """Whether all words are there and every one reads every one, or those up to itself: no mask is needed then."""
    reaches = {_kind(course, given) for given in member.parents if WORD in given.over}
    bare = not course.present
    return bare and reaches == {"every"}, bare and reaches == {"causal"}


def _kind(course: Course, given: ParentSpec) -> str:
    """The kind of a reach; that of recent words is causal where no word stands further back."""
    words = course.words[course.network.specs[given.index].group.word_stack or ""]
    near = given.reach.kind == "recent" and words <= given.reach.width + 1
    return "causal" if near else given.reach.kind


Reads = Callable[[int], Tensor]
Turn = Callable[[int], None]


class Scan:
    """One scan of a group whose members read each other, or themselves, at earlier words: the values so far."""

    def __init__(self, course: Course, group: Sequence[int]) -> None:
        self.course, self.axis = course, course.layout.word
        self.members = {index: course.network.specs[index] for index in group}
        self.count = course.words[self.members[group[0]].group.word_stack or ""]
        self.places = course.count(self.count).split(1)
        self.given = {index: found for index in group if (found := given_value(course, index)) is not None}
        self.done = {index: list(self.words(found)) for index, found in self.given.items()}
        self.done |= {index: [] for index in group if index not in self.given}
        self.patched = {
            index: (self.words(value), self.words(which.reshape(*which.shape, *[1] * len(self.members[index].shape))))
            for index, (value, which) in course.patched.items()
            if index in self.done
        }

    def run(self, done: Collection[int] = ()) -> dict[int, Tensor]:
        """All words, one after another; the values of all members but those that nothing reads after it."""
        turns = self.turns()
        for word in range(self.count):
            for turn in turns:
                turn(word)
        return {index: self.whole(index) for index in self.members if index not in done}

    def words(self, value: Tensor) -> Sequence[Tensor]:
        """A value at each word; the same at all, where it does not depend on the word."""
        parts: list[Tensor] = list(value.split(1, self.axis))
        return parts if len(parts) == self.count else parts * self.count

    def whole(self, index: int) -> Tensor:
        """The value of a member at all words."""
        return self.given[index] if index in self.given else self.joined(self.done[index])

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Values at words one after another, broadcast to one shape."""
        shapes = {each.shape for each in parts}
        if len(shapes) > 1:
            shape = broadcast_shapes(*shapes)
            parts = [each.expand(shape) for each in parts]
        return torch.cat(list(parts), self.axis)

    def put(self, index: int, word: int, value: Tensor) -> None:
        """Keep the value of a member at a word, or what is set in its place."""
        if index in self.patched:
            values, which = self.patched[index]
            value = torch.where(which[word], values[word], value)
        self.done[index].append(value)

    # what is done at each word, in order

    def turns(self) -> list[Turn]:
        """What each word takes."""
        found: list[Turn] = []
        made: set[int] = set()
        for index, member in self.members.items():
            if index in self.given or index in made:
                continue
            beside = self.beside(member)
            found.append(self.together(beside) if beside else self.alone(member))
            made |= {each.group.index for each in beside}
        return found

    def alone(self, member: NodeSpec) -> Turn:
        """One member, by its TPM."""
        index, tpm, own = member.group.index, member.tpm, len(member.shape)
        if not all(map(self.is_single, member.parents)):
            return lambda word: self.put(index, word, self.slowly(member, word))
        reads = [self.reader(given) for given in member.parents]
        at = standing(self.course, member)
        ats = [EvalContext(at.parameters, place, {}, {}, at.training, at.dtype) for place in self.places]
        put = self.course.layout.full
        return lambda word: self.put(index, word, put(tpm.value(ats[word], *(read(word) for read in reads)), own))

    def slowly(self, member: NodeSpec, word: int) -> Tensor:
        """One member at a word, of which it reads several words, or those that a selector picks."""
        for given in member.parents:
            selectors = [selector for _, selector in given.pick]
            for index in {given.index, *selectors} & self.done.keys():
                if self.done[index]:
                    self.course.values[index] = self.so_far(index)
        at, parents = seen(self.course, member, word)
        return full(self.course, member, member.tpm.value(at, *parents))

    def so_far(self, index: int) -> Tensor:
        """A member at all words, zero at those that are still to come."""
        if index in self.given:
            return self.given[index]
        there = self.done[index]
        return self.joined([*there, *[torch.zeros_like(there[0])] * (self.count - len(there))])

    def is_single(self, given: ParentSpec) -> bool:
        """True for a parent of which the own word is read, or the one before, or one without words."""
        return given.reach.kind in ("same", "before") and not given.over and not given.pick

    def reader(self, given: ParentSpec) -> Reads:
        """What a slot receives at each word."""
        parts: Sequence[Tensor]
        if given.index in self.done:
            parts = self.done[given.index]
        else:
            parts = self.words(self.course.values[given.index])
        if given.reach.kind == "same":
            return lambda word: parts[word]
        nobody = torch.zeros_like(parts[0]) if parts else nothing(self.course, given)
        there = present_in(self.course, self.course.network.specs[given.index].group.word_stack)
        if there is None:
            return lambda word: parts[word - 1] if word else nobody
        own = nobody.dim() - there.dim()
        here = [each.reshape(*each.shape, *[1] * own) for each in self.words(there)]
        return lambda word: torch.where(here[word - 1], parts[word - 1], nobody) if word else nobody

    # recurrent maps of the same words, as one product

    def beside(self, member: NodeSpec) -> list[NodeSpec]:
        """The recurrent maps that are made together with one: of the same x from outside, and of the same h."""
        if not self.is_plain(member):
            return []

        def where(each: NodeSpec) -> list[tuple[object, ...]]:
            return [(given.index, given.reach) for given in each.parents]

        beside = [
            other
            for index, other in self.members.items()
            if index not in self.given and self.is_plain(other) and where(other) == where(member)
        ]
        return sorted(beside, key=_activation)

    def is_plain(self, member: NodeSpec) -> bool:
        """True for a recurrent map without plates of a word from outside and of what came before it in the group."""
        if not isinstance(member.tpm, Recur) or member.group.plates:
            return False
        x, h = member.parents
        inside = x.index not in self.done and h.index in self.done and h.reach.kind == "before"
        return inside and self.is_single(x) and self.is_single(h)

    def together(self, members: Sequence[NodeSpec]) -> Turn:
        """Several recurrent maps: `W x + b` of all words, then at each word `+ U h`, and their activations."""
        ats = [standing(self.course, member) for member in members]
        x, h = (self.reader(given) for given in members[0].parents)
        W, U = (torch.cat([at[name] for at in ats]) for name in "WU")
        whole = self.course.values[members[0].parents[0].index]
        bias = torch.cat([at.parameters.get("bias", W.new_zeros(len(at["W"]))) for at in ats])
        if members[0].parents[0].reach.kind == "same":
            ready = self.words(functional.linear(whole, W, bias))
        else:
            ready = [functional.linear(x(word), W, bias) for word in range(self.count)]
        kinds = dict.fromkeys(map(_activation, members))
        alike = {kind: [(m.group.index, m.shape[0]) for m in members if _activation(m) == kind] for kind in kinds}
        acts = [(ACTIVATIONS[kind], some) for kind, some in alike.items()]
        widths = [sum(width for _, width in some) for _, some in acts]

        def turn(word: int) -> None:
            raw = _mapped(U, h(word), ready[word]).split_with_sizes(widths, -1)
            for (act, some), each in zip(acts, raw, strict=True):
                made = act(each).split_with_sizes([width for _, width in some], -1)
                for (index, _), value in zip(some, made, strict=True):
                    self.put(index, word, value)

        return turn


def _mapped(U: Tensor, h: Tensor, ready: Tensor) -> Tensor:
    """`U h + ready`, in one operation where both have the same dims."""
    if h.shape[:-1] != ready.shape[:-1]:
        return functional.linear(h, U) + ready
    flat = torch.addmm(ready.reshape(-1, len(U)), h.reshape(-1, U.shape[-1]), U.mT)
    return flat.reshape(ready.shape)


def _activation(member: NodeSpec) -> str:
    assert isinstance(member.tpm, Recur)
    return member.tpm.activation
