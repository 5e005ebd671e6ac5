"""Second pass, plan to values: every family as one tensor, in the layout `[*enumerated, batch, *plates, word, *shape]`.

A dim on which a value does not depend has size 1, so values broadcast: all states of a selector share what lies
before it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bnet_transformer.axes import WORD
from bnet_transformer.compiler.course import Course
from bnet_transformer.compiler.fused import Reading, fused, is_plain, maps, reading_of, told_apart
from bnet_transformer.compiler.plan import Plan, states_in
from bnet_transformer.compiler.products import Fold
from bnet_transformer.errors import ReadingError
from bnet_transformer.network import Input, Member
from bnet_transformer.tpm import Affine, At, Attention


def plan_to_values(plan: Plan, course: Course) -> dict[int, Tensor]:
    """The value of every family of a plan."""
    for group, done in zip(plan.groups, plan.done, strict=True):
        if group[0] in plan.left:
            pass
        elif group[0] in plan.folds:
            course.values[group[0]] = folded(course, plan.folds[group[0]])
        elif group[0] in plan.together:
            course.values |= made_together(course, plan.together[group[0]])
        elif group[0] in course.values:
            pass  # made together with an earlier one
        elif len(group) == 1 and not any(given.parent == group[0] for given in course.network.members[group[0]].inputs):
            course.values[group[0]] = value(course, group[0])
        else:
            scan(course, group)
        if group[0] in course.rows and group[0] not in course.known:
            course.values[group[0]] = _by_rows(course, group[0])
        if group[0] in course.patched:
            course.values[group[0]] = _patched(course, group[0])
        if group[0] in course.gates:
            course.values[group[0]] = course.values[group[0]] * course.gates[group[0]]
        for index in done:
            course.values.pop(index, None)
    return course.values


def _patched(course: Course, index: int) -> Tensor:
    """The value of a family some of whose nodes are set."""
    set_, which = course.patched[index]
    own = set_.dim() - course.layout.rank
    return torch.where(which.reshape(*which.shape, *[1] * own), set_, course.values[index])


def _by_rows(course: Course, index: int) -> Tensor:
    """The value of a family some of whose nodes mix by rows that were set, in place of their `P(j | i)`."""
    (rows, which), member = course.rows[index], course.network.members[index]
    assert isinstance(member.tpm, Attention)
    _, parents = seen(course, member)
    mix = _full(course, member, member.tpm.mix(rows, *parents))
    return torch.where(which[..., None], mix, course.values[index])


def value(course: Course, index: int) -> Tensor:
    """The value of one family, for all its words at once."""
    member = course.network.members[index]
    if index in course.known:
        return _emitted(course, member, course.known[index])
    if index in course.layout.enumerated:
        return _emitted(course, member, states(course, index))
    at, parents = seen(course, member)
    if index in course.readings:
        return _full(course, member, _with_reading(course, member, at, parents))
    return _full(course, member, computed(course, member, at, parents))


def _with_reading(course: Course, member: Member, at: At, parents: list[Tensor]) -> Tensor:
    """The value of a family, whose `P(j | i)` is kept beside it: an attention is computed once for both."""
    tpm = member.tpm
    if isinstance(tpm, Attention) and is_plain(tpm, member, parents):
        whole, causal = _unmasked(course, member)
        weights, mix = told_apart(reading_of(tpm, at, parents, whole=whole, causal=causal))
        found = mix + parents[-1] if tpm.residual else mix
    else:
        told = tpm.reading(at, *parents)
        if told is None:
            raise ReadingError(member.family.name, expected="attention P(j | i)", got=tpm.why_no_reading())
        weights, found = told, computed(course, member, at, parents)
    course.readings[member.family.index] = course.layout.full(weights, 1)
    return found


def computed(course: Course, member: Member, at: At, parents: list[Tensor]) -> Tensor:
    """What a TPM makes of what it sees, by a fused operation where there is one."""
    whole, causal = _unmasked(course, member)
    found = fused(member, at, parents, whole=whole, causal=causal)
    if found is not None:
        return found
    found = member.tpm.value(at, *parents)
    if not isinstance(found, Tensor) or found.shape[max(0, found.dim() - len(member.shape)) :] != member.shape:
        got = f"one of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
        what = f"{member.family.name} ({type(member.tpm).__name__})"
        raise ReadingError(what, expected=f"values of shape {member.shape}, as it says", got=got)
    return found


def made_together(course: Course, indices: tuple[int, ...]) -> dict[int, Tensor]:
    """Several maps of one vector, as one product."""
    members = [course.network.members[index] for index in indices]
    seen_ = [seen(course, member) for member in members]
    biases = [at["bias"] if isinstance(m.tpm, Affine) else None for m, (at, _) in zip(members, seen_, strict=True)]
    made = maps([parents[0] for _, parents in seen_], seen_[0][1][1], biases)
    return {m.family.index: _full(course, m, each) for m, each in zip(members, made, strict=True)}


def folded(course: Course, fold: Fold) -> Tensor:
    """An attention with the maps around it folded in: `softmax(x_i . (W_q^T W_k) x_j)`, and W_v after the mix."""
    at, parents, residual = _folded_in(course, fold)
    mix = computed(course, fold.member, at, parents)
    if fold.W_v is not None:
        (mix,) = maps([course.values[fold.W_v.parent]], mix, [None])
    return _full(course, fold.member, mix if residual is None else mix + residual)


def _folded_in(course: Course, fold: Fold) -> tuple[At, list[Tensor], Tensor | None]:
    """What the attention of a fold sees, and the residual that is added to what it makes."""
    at, parents = seen(course, fold.member)
    residual = parents.pop() if fold.residual else None
    W_q, W_k = course.values[fold.W_q.parent], course.values[fold.W_k.parent]
    (parents[0],) = maps([W_k.mT @ W_q], parents[0], [None])
    return at, parents, residual


def attended(course: Course, member: Member, fold: Fold | None) -> tuple[Reading, Tensor | None, Tensor | None]:
    """What a plain attention reads; then W_v, where it is applied to the mix; then the residual."""
    if fold is not None:
        at, parents, residual = _folded_in(course, fold)
        member = fold.member
    else:
        at, parents = seen(course, member)
    whole, causal = _unmasked(course, member)
    tpm = member.tpm
    assert isinstance(tpm, Attention)
    if fold is None:
        residual = parents[-1] if tpm.residual else None
    W_v = None if fold is None or fold.W_v is None else course.values[fold.W_v.parent]
    return reading_of(tpm, at, parents, whole=whole, causal=causal), W_v, residual


def _unmasked(course: Course, member: Member) -> tuple[bool, bool]:
    """Whether all words are there and every one reads every one, or those up to itself: no mask is needed then."""
    reaches = {given.reach.kind for given in member.inputs if WORD in given.over}
    bare = not course.present
    return bare and reaches == {"every"}, bare and reaches == {"causal"}


def _full(course: Course, member: Member, value: Tensor) -> Tensor:
    """A value with all dims of the layout: those that a TPM left out lead with size 1."""
    return course.layout.full(value, len(member.shape))


def states(course: Course, index: int) -> Tensor:
    """All states of an enumerated family, along its own dim."""
    place = course.layout.enumerated.index(index)
    shape = [1] * course.layout.rank
    shape[place] = -1
    return course.count(count_states(course, index)).reshape(shape)


def count_states(course: Course, index: int) -> int:
    """How many states a discrete family has; the words that it may read, where its state is a word."""
    return states_in(course.network, index, course.words)


def _emitted(course: Course, member: Member, known: Tensor) -> Tensor:
    discrete = member.tpm.kind == "discrete" and not known.is_floating_point()
    return _full(course, member, member.tpm.emit(standing(course, member), known)) if discrete else known


def seen(course: Course, member: Member, word: int | None = None) -> tuple[At, list[Tensor]]:
    """What a TPM sees: where it stands, then the value in each slot, aligned. `word` picks one word of a scan."""
    read: dict[str, Tensor] = {}
    mask: dict[str, Tensor] = {}
    parents = []
    for given in member.inputs:
        found = course.values.get(given.parent)
        if found is None:
            found = _nothing(course, given)
        words = course.network.members[given.parent].family.words
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
    return _at(course, member, read, mask, word), parents


def _nothing(course: Course, given: Input) -> Tensor:
    """What is read of a word that is not there yet: zero, or state 0."""
    parent = course.network.members[given.parent]
    dtype = torch.long if parent.tpm.reads_by_index else course.dtype
    return torch.zeros([1] * course.layout.rank + list(parent.shape), dtype=dtype, device=course.device)


def _within_reach(course: Course, member: Member, given: Input, found: Tensor, selector: int) -> Tensor:
    """A picked word that is out of reach gives zero (it has probability zero)."""
    words = course.network.members[given.parent].family.words or ""
    n = course.words[member.family.words] if member.family.words is not None else 1
    reads = _reads(course, given, n, course.words[words])
    state = course.values[selector]
    word = course.count(n)
    inside = reads[word, state]
    return found * inside.reshape(*inside.shape, *[1] * (found.dim() - inside.dim()))


def _of_words(course: Course, member: Member, given: Input, found: Tensor, words: str, word: int | None) -> Tensor:
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
        case "before":
            if word is not None:
                return found.narrow(axis, word - 1, 1) if word else torch.zeros_like(found.narrow(axis, 0, 1))
            zero = torch.zeros_like(found.narrow(axis, 0, 1))
            return torch.cat([zero, found.narrow(axis, 0, n - 1)], axis)
        case _:
            return found.unsqueeze(axis)


def _last(course: Course, found: Tensor, words: str) -> Tensor:
    """The last word that is present."""
    axis = course.layout.word
    if words not in course.present:
        return found.narrow(axis, found.shape[axis] - 1, 1)
    last = course.present[words].long().cumsum(-1).argmax(-1)
    shape = [1] * found.dim()
    shape[course.layout.batch] = -1
    where = last.reshape(shape)
    lead = torch.broadcast_shapes(where.shape, (*found.shape[:axis], 1, *found.shape[axis + 1 :]))
    return found.expand(*lead[:axis], found.shape[axis], *lead[axis + 1 :]).gather(axis, where.expand(lead))


def _who(course: Course, member: Member, given: Input, word: int | None) -> tuple[Tensor, Tensor]:
    """For a collection: the indices of its entries, and which of them each word reads."""
    network = course.network
    if WORD not in given.over:
        size = network.graph.sizes[given.over[-1]]
        return course.count(size), torch.ones(size, dtype=torch.bool, device=course.device)
    words = network.members[given.parent].family.words or ""
    m = course.words[words]
    key = given.reach, words, member.family.words, word
    if key not in course.masks:
        course.masks[key] = _mask(course, member, given, words, word)
    return course.count(m), course.masks[key]


def _mask(course: Course, member: Member, given: Input, words: str, word: int | None) -> Tensor:
    """Which words of a stack each word of a family reads, none that is absent."""
    m = course.words[words]
    n = 1 if member.family.words is None else course.words[member.family.words]
    mask = _reads(course, given, n, m)
    mask = mask if word is None else mask[word : word + 1]
    if words in course.present:
        present = course.present[words]
        shape = (present.shape[0], *[1] * len(course.layout.plates), 1, m)
        mask = mask & present.reshape(shape)
        mask = mask | _absent_and_alone(course, member, mask, word)
    return mask


def _absent_and_alone(course: Course, member: Member, mask: Tensor, word: int | None) -> Tensor:
    """The padding words that may read nobody: they read everybody, and nobody reads them."""
    alone = ~mask.any(-1, keepdim=True)
    if member.family.words not in course.present:
        return torch.zeros_like(alone)
    present = course.present[member.family.words or ""]
    present = present if word is None else present[:, word : word + 1]
    return alone & ~present.reshape(present.shape[0], *[1] * len(course.layout.plates), -1, 1)


def _reads(course: Course, given: Input, n: int, m: int) -> Tensor:
    """`[n, m]`: which words each word reads."""
    if given.reach.kind == "mask":
        return torch.tensor(given.reach.table, device=course.device)
    i, j = course.count(n), course.count(m)
    mask: Tensor = given.reach.holds(i[:, None], j[None, :], m)
    return mask


def _picked(course: Course, found: Tensor, axis: int, selector: int, word: int | None = None) -> Tensor:
    """The entry of a dim that a selector picks; a view where the selector is enumerated."""
    if selector in course.layout.enumerated:
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


def standing(course: Course, member: Member) -> At:
    """Where a family stands, with its parameters, whatever it reads."""
    return _at(course, member, {}, {})


def _at(
    course: Course,
    member: Member,
    read: Mapping[str, Tensor],
    mask: Mapping[str, Tensor],
    word: int | None = None,
) -> At:
    layout, family = course.layout, member.family
    parameters = {}
    for name in member.parameters:
        stored = course.parameters[f"{member.owner}.{name}"]
        if family.plates:
            shape = [1] * (1 + len(layout.plates) + 1)
            for k, plate in enumerate(family.plates):
                shape[1 + layout.plates.index(plate)] = stored.shape[k]
            stored = stored.reshape(*shape, *stored.shape[len(family.plates) :])
        parameters[name] = stored
    if word is not None:
        place = torch.tensor([word], device=course.device)
    elif family.words is not None and family.words in course.places:
        place = course.places[family.words]
    else:
        place = course.count(1 if family.words is None else course.words[family.words])
    return At(parameters, place, read, mask, course.training, course.dtype)


def scan(course: Course, group: tuple[int, ...]) -> None:
    """A group that reads itself at earlier words: word after word."""
    axis = course.layout.word
    stack = course.network.members[group[0]].family.words or ""
    so_far: dict[int, list[Tensor]] = {index: [] for index in group}
    for word in range(course.words[stack]):
        for index in group:
            member = course.network.members[index]
            if index in course.known or index in course.layout.enumerated:
                full = value(course, index)
                so_far[index].append(full.narrow(axis, word if full.shape[axis] > 1 else 0, 1))
            else:
                at, parents = seen(course, member, word)
                so_far[index].append(_full(course, member, member.tpm.value(at, *parents)))
            later = torch.zeros_like(so_far[index][0])
            rest = [later] * (course.words[stack] - word - 1)
            shape = torch.broadcast_shapes(*(each.shape for each in so_far[index]))
            course.values[index] = torch.cat([each.expand(shape) for each in so_far[index] + rest], axis)
